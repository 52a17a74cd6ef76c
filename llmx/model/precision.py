"""Which dtype each number is kept, computed and summed in.

Parameters are the master copy that the optimizer updates (fp32). Weights are cast to the compute
dtype where they are used, before they are gathered, so that communication is in that dtype. Norms,
softmax, the loss and the optimizer are in fp32 always. Source: mixed precision training (arXiv
1710.03740), bf16 (arXiv 1905.12322).
"""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Policy:
    """Dtypes of master parameters, of products and activations, of gradient sums over devices."""

    param: jnp.dtype
    compute: jnp.dtype
    reduce: jnp.dtype

    def products(self) -> contextlib.AbstractContextManager:
        """Under it matrix products are traced as exact as the compute dtype.

        GPUs and TPUs by default multiply fp32 in fewer bits (TF32, one bf16 pass).
        """
        exact = "highest" if self.compute == jnp.float32 else "default"
        return jax.default_matmul_precision(exact)


def _policy(param, compute, reduce) -> Policy:
    return Policy(jnp.dtype(param), jnp.dtype(compute), jnp.dtype(reduce))


POLICIES = {
    "fp32": _policy("float32", "float32", "float32"),
    # Gradients cross the network in bf16,
    "bf16": _policy("float32", "bfloat16", "bfloat16"),
    # or in fp32, at twice the bytes.
    "bf16_fp32_reduce": _policy("float32", "bfloat16", "float32"),
}
