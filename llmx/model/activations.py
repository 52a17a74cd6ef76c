"""What stands between the products of a feed-forward layer."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

SILU, GELU, CLAMPED = "silu", "gelu", "clamped_silu"
ACTIVATIONS = {SILU: jax.nn.silu, GELU: jax.nn.gelu}
# Of gpt-oss: products are kept within the limit, and silu(a x) / a is close to gelu(x).
LIMIT, SLOPE = 7.0, 1.702


def hidden(activation: str, *products: Array) -> Array:
    """What the last product takes, of the products with gate and up, or with up alone.

    "clamped_silu" is of gate and up: gate sigmoid(1.702 gate) (up + 1), of gate at most 7 and up
    between -7 and 7 (gpt-oss, arXiv 2508.10925).
    """
    if activation == CLAMPED:
        gate, up = products
        gate, up = jnp.minimum(gate, LIMIT), jnp.clip(up, -LIMIT, LIMIT)
        return gate * jax.nn.sigmoid(SLOPE * gate) * (up + 1)
    act = ACTIVATIONS[activation](products[0])
    return act * products[1] if len(products) == 2 else act
