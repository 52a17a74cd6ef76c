"""Inputs of products scaled before weights or activations are rounded, so that less is lost.

    x W = (x / s) (s W)

with a factor s for each input. Large inputs, of which the weight is worth more bits, get a larger
weight (AWQ, arXiv 2306.00978), or inputs are evened out, so that they can be rounded themselves
(SmoothQuant, arXiv 2211.10438). What makes x takes the division, where that changes nothing: the
norm in front, the value's product in front of the output of attention, and the up product of a
gated MLP.

Functions of one layer's weights by name, whole on one device. Letters: D width, I inputs, O
outputs, E exponents, K key/value heads, G query heads of each, H head size.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from llmx.compress import rounding
from llmx.model import adapters
from llmx.model.activations import CLAMPED
from llmx.model.families import ModelConfig
from llmx.model.observed import Statistics
from llmx.model.packed import PackedConfig

Weights = dict[str, Array]
STEPS = 20  # exponents that `awq` tries


class Site(NamedTuple):
    """Products with one input, and what makes it."""

    products: tuple[str, ...]
    maker: str  # the weight that makes it
    # (weights, 1 / s [I]) -> weights whose x is that much smaller
    divide: Callable[[Weights, Array], Weights]
    ties: Callable[[Array], Array]  # [I] -> [I]: what must be one number is the mean of these


def sites(model: ModelConfig, weights: Weights) -> Iterator[Site]:
    """Where a layer with these weights can be scaled and computes the same."""
    for site in _known_sites(model):
        if all(name in weights for name in (*site.products, site.maker)):
            yield site


def _known_sites(model: ModelConfig) -> Iterator[Site]:
    if model.pre_norms and not model.kv_latent:
        of_attention = ("attention/query", "attention/key", "attention/value")
        yield _behind_norm(model, "attention_norm", of_attention)
    if model.pre_norms:
        both = ("mlp/gate", "mlp/up") if model.gated_mlp else ("mlp/up",)
        yield _behind_norm(model, "mlp_norm", both)
    if not model.kv_latent:
        heads = (model.num_kv_heads, model.num_heads // model.num_kv_heads, model.head_dim)
        yield Site(
            ("attention/out/kernel",), "attention/value/kernel",
            functools.partial(_divide_outputs, "attention/value", heads),
            functools.partial(_of_kv_heads, heads),
        )  # fmt: skip
    # The hidden numbers grow with those of `up`, unless one is added to these.
    if model.gated_mlp and model.activation != CLAMPED:
        divide = functools.partial(_divide_outputs, "mlp/up", None)
        yield Site(("mlp/down/kernel",), "mlp/up/kernel", divide, lambda factors_I: factors_I)


def _behind_norm(model: ModelConfig, norm: str, products: tuple[str, ...]) -> Site:
    def divide(weights: Weights, factors_D: Array) -> Weights:
        scale_D = weights[f"{norm}/scale"]
        one = 1.0 if model.norm_plus_one else 0.0
        new = {f"{norm}/scale": (scale_D + one) * factors_D - one}
        if f"{norm}/bias" in weights:
            new[f"{norm}/bias"] = weights[f"{norm}/bias"] * factors_D
        return weights | new

    named = tuple(f"{name}/kernel" for name in products)
    return Site(named, f"{norm}/scale", divide, lambda factors_D: factors_D)


def _divide_outputs(
    product: str, heads: tuple[int, int, int] | None, weights: Weights, factors_I: Array
) -> Weights:
    """What a product makes, times the factors of what takes it: of heads one for all that share a
    value."""
    if heads is not None:
        K, _, H = heads
        factors_I = factors_I.reshape(heads)[:, 0].reshape(K, H)
    names = [f"{product}/{part}" for part in ("kernel", "bias") if f"{product}/{part}" in weights]
    return weights | {name: weights[name] * factors_I for name in names}


def _of_kv_heads(heads: tuple[int, int, int], factors_I: Array) -> Array:
    """The geometric mean over query heads that share a value."""
    logs_KGH = jnp.log(factors_I).reshape(heads)
    means_KGH = jnp.broadcast_to(logs_KGH.mean(1, keepdims=True), heads)
    return jnp.exp(means_KGH).reshape(factors_I.shape)


def matrix(weights: Weights, name: str) -> Float[Array, "I O"]:
    """The weight of a product, fp32."""
    weight = weights[name].astype(jnp.float32)
    inputs = int(np.prod(weight.shape[: adapters.contracted(name)]))
    return weight.reshape(inputs, -1)


def scaled(
    weights: Weights, statistics: Mapping[str, Statistics], site: Site, factors_I: Array
) -> tuple[Weights, dict[str, Statistics]]:
    """The layer with the inputs of a site divided by these factors and their weights multiplied:
    it computes the same. And what its products take then."""
    new, found = site.divide(weights, 1 / factors_I), dict(statistics)
    for name in site.products:
        multiplied_IO = matrix(weights, name) * factors_I[:, None]
        new[name] = multiplied_IO.reshape(weights[name].shape)
        if name in found:
            found[name] = divided(found[name], factors_I)
    return new, found


def divided(statistics: Statistics, factors_I: Array) -> Statistics:
    """Of inputs divided by these factors."""
    return statistics._replace(
        gram_II=statistics.gram_II / factors_I[:, None] / factors_I,
        magnitude_I=statistics.magnitude_I / factors_I, amax_I=statistics.amax_I / factors_I,
    )  # fmt: skip


def awq(
    model: ModelConfig, weights: Weights, statistics: Mapping[str, Statistics],
    config: PackedConfig,
) -> tuple[Weights, dict[str, Statistics]]:  # fmt: skip
    """A layer scaled so that the nearest codes of `config` keep its products best.

    For each site the factors are mean(|x|)^a, of the exponents a = 0, 1/20, ... that with the least
    squared error of the products' outputs on the calibration text; at 0 the site stays as it is.
    Source: arXiv 2306.00978, section 3.2. There the error is that of whole modules.
    """
    found = dict(statistics)
    for site in sites(model, weights):
        if not all(name in found for name in site.products):
            continue
        gram_II = found[site.products[0]].gram_II
        magnitude_I = jnp.maximum(found[site.products[0]].mean_magnitude_I, 1e-8)
        exponents_E = jnp.arange(STEPS, dtype=jnp.float32) / STEPS
        factors_EI = jax.vmap(site.ties)(magnitude_I ** exponents_E[:, None])
        factors_EI /= jnp.sqrt(factors_EI.max(1) * factors_EI.min(1))[:, None]
        errors_E = sum(
            _errors(matrix(weights, name), factors_EI, gram_II, config) for name in site.products
        )
        weights, found = scaled(weights, found, site, factors_EI[jnp.argmin(errors_E)])
    return weights, found


@functools.partial(jax.jit, static_argnames="config")
def _errors(weight_IO: Array, factors_EI: Array, gram_II: Array, config: PackedConfig) -> Array:
    """Of a product's outputs [E], if its weight is scaled, rounded, and divided again."""

    def error(factors_I):
        rounded = rounding.nearest(weight_IO * factors_I[:, None], config=config)
        after_IO = rounding.numbers(rounded, config) / factors_I[:, None]
        return rounding.output_error(weight_IO, after_IO, gram_II)

    return jax.lax.map(error, factors_EI)


def smoothed(
    model: ModelConfig, weights: Weights, statistics: Mapping[str, Statistics], *,
    strength: float = 0.5,
) -> tuple[Weights, dict[str, Statistics]]:  # fmt: skip
    """A layer whose activations are easier to round, and weights harder:

        s = max|x|^strength / max|w|^(1 - strength)

    of each input that a norm makes. Source: arXiv 2211.10438, equation 4.
    """
    found = dict(statistics)
    for site in sites(model, weights):
        if not site.maker.endswith("norm/scale") or not all(n in found for n in site.products):
            continue
        largest_I = jnp.stack([jnp.abs(matrix(weights, name)).max(1) for name in site.products])
        weight_I = jnp.maximum(largest_I.max(0), 1e-5)
        amax_I = jnp.maximum(found[site.products[0]].amax_I, 1e-5)
        factors_I = amax_I**strength / weight_I ** (1 - strength)
        weights, found = scaled(weights, found, site, jnp.maximum(factors_I, 1e-5))
    return weights, found
