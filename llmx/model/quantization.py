"""Quantization-aware training: weights are trained as the integers that they will be stored as.

The layers' products multiply what integers of few bits and their scales stand for,

    w' = s clip(round(w / s), -2^(b-1), 2^(b-1) - 1)        b bits

with one scale s for each output of a weight, or for each group of its inputs. The model never sees
w, and the gradient of w' is that of w, straight through the rounding (arXiv 1308.3432, 1712.05877,
1806.08342). Scales are the largest magnitude over 2^(b-1) - 1, so that nothing is clipped; or they
are learned (LSQ, arXiv 1902.08153), and then numbers that are clipped have no gradient, and

    ds = (N Q)^(-1/2) sum dw' (round(w / s) - w / s),  where clipped: dw' clip(...)
                                                        Q = 2^(b-1) - 1, N numbers share s

What is kept is log s, a parameter beside its weight: it stays positive, and a step of an optimizer
that divides by the size of gradients, as Adam does, changes it in proportion to itself.

All of this is a function of the parameters, and its transpose is linear in the gradient of w'. So
weights are rounded once before the gradient of a batch is taken, and the gradient is taken back
once after it (`llmx.step.quantized_weights`): microbatches, stages, replicas and rematerialization
know nothing of it.
"""

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from llmx import sharding
from llmx.model import adapters, dot, quantized
from llmx.model.quantized import Format, Quantized
from llmx.runtime.bounds import bounded, choice
from llmx.sharding import trees

LARGEST, LEARNED = "largest", "learned"
CURRENT, AVERAGE = "current", "average"
KERNEL, LOG_STEP = "kernel", "log_step"  # a weight, and beside it the logarithm of its scales
GROUPS = "groups"  # the logical axis


_WEIGHTS = {"quantization.bits": {"not": (0,)}}
_RANGES = {"quantization.activations": (AVERAGE,)}


@dataclasses.dataclass(unsafe_hash=True)
class QuantizationConfig:
    """Quantization-aware training: which integers the weights of layers are trained as."""

    # of the weights of attention and MLPs; 0 = they are not quantized
    bits: int = bounded(0, at_least=2, at_most=8, unless=0, remedy="0 = not quantized")
    # inputs of a weight that share a scale; 0 = all: one scale for each output
    group: int = bounded(0, at_least=0, remedy="0 = one scale for each output", needs=_WEIGHTS)
    # "largest" = scales from the largest magnitude of what shares one; "learned" = trained (LSQ)
    scales: str = choice(LARGEST, (LARGEST, LEARNED), needs=_WEIGHTS)
    # int8 inputs of these products: "" = not rounded; "current" = a scale for each token;
    # "average" = one for each product, from a moving average of the largest magnitudes
    activations: str = choice("", ("", CURRENT, AVERAGE))
    decay: float = bounded(0.99, at_least=0, below=1, needs=_RANGES)  # of that average, per step
    # steps after which it stays; 0 = never
    freeze_after: int = bounded(0, at_least=0, needs=_RANGES)

    @property
    def learns(self) -> bool:
        """Whether scales are parameters."""
        return self.bits > 0 and self.scales == LEARNED

    @property
    def largest(self) -> int:
        """The largest code."""
        return 2 ** (self.bits - 1) - 1


def is_quantized(name: str) -> bool:
    """Whether a parameter of this name, "blocks/mlp/up/kernel", is: weights of the products of
    attention and MLPs are; embedding, head, routers and experts are not."""
    stack, _, rest = name.partition("/")
    inside = rest.partition("/")[0] in adapters.MODULES
    return stack in ("blocks", "first") and inside and name.endswith(f"/{KERNEL}")


def sharing(name: str, shape: tuple[int, ...], group: int) -> tuple[int, ...]:
    """For each dimension of a stacked weight [l, in..., out...], how many neighbors share a scale;
    0 = all. A group is of inputs in row-major order: of heads and their numbers, the latter first.

    Raises ValueError where inputs cannot be divided so.
    """
    num = adapters.contracted(name)
    inputs, left = shape[1 : 1 + num], group
    found = []
    for size in reversed(inputs):
        if not group or left % size == 0:
            found.append(0)
            left //= size
        elif left and size % left == 0:
            found.append(left)
            left = 1
        else:
            left = 0
            break
    if group and left != 1:
        raise ValueError(
            f"quantization.group={group} does not divide the inputs of {name}, "
            f"{' x '.join(map(str, inputs))}: use a divisor of {inputs[-1]}, or 0 for one scale "
            "for each output"
        )
    return (1, *reversed(found), *(1,) * (len(shape) - 1 - num))


def scales_shape(shape: tuple[int, ...], shared: tuple[int, ...]) -> tuple[int, ...]:
    """Of the scales of an array: along each dimension the number of groups."""
    return tuple(size // n if n else 1 for size, n in zip(shape, shared, strict=True))


def problems(config: QuantizationConfig, shapes: Any) -> list[str]:
    """All that is wrong with the section for a model with these parameters, with remedies."""
    found, named = [], trees.named(shapes)
    if not any(map(is_quantized, named)):
        found.append(
            f"quantization.bits={config.bits} would round nothing: all products of layers are two "
            "factors (model.ranks), which are not quantized; leave some of them one weight, or "
            "quantization.bits out"
        )
    for name, leaf in named.items():
        if not is_quantized(name):
            continue
        try:
            sharing(name, leaf.shape, config.group)
        except ValueError as error:
            found.append(str(error))
    return found


def with_steps(config: QuantizationConfig, shapes: Any, axes: Any) -> tuple[Any, Any]:
    """Shapes and logical axes of a model's parameters with those of the logarithms of their learned
    scales, fp32, beside them; as they are where none are learned.

    Scales are split as outputs of their weight are, but whole along its width and its inputs.
    """
    if not config.learns:
        return shapes, axes
    of_model, leaves = trees.named(shapes), jax.tree.leaves(axes, is_leaf=_is_names)
    names = dict(zip(of_model, leaves, strict=True))
    for name in [name for name in of_model if is_quantized(name)]:
        leaf, num = of_model[name], adapters.contracted(name)
        shape = scales_shape(leaf.shape, sharing(name, leaf.shape, config.group))
        layers, *rest = names[name]
        out = ["norm" if axis == "embed" else axis for axis in rest[num:]]
        of_model[step_of(name)] = jax.ShapeDtypeStruct(shape, jnp.float32)
        names[step_of(name)] = (layers, *[GROUPS] * num, *out)
    return trees.nest(of_model), trees.nest(names)


def init_steps(config: QuantizationConfig, params: Any) -> Any:
    """A model's parameters with new logarithms of scales; as they are where none are learned.

    A scale begins at 2 mean|w| Q^(-1/2), as in LSQ, or at max|w| / (Q - 1/4) where that is less: no
    coarser than the largest number needs, which is clearly inside. Under Auto axes.
    """
    if not config.learns:
        return params
    named = trees.named(params)
    for name in [name for name in named if is_quantized(name)]:
        weight = named[name].astype(jnp.float32)
        shape = scales_shape(weight.shape, sharing(name, weight.shape, config.group))
        magnitudes = jnp.abs(quantized.in_blocks(weight, shape))
        over = tuple(range(1, magnitudes.ndim, 2))
        mean = 2 * magnitudes.mean(axis=over) / math.sqrt(config.largest)
        scale = jnp.minimum(mean, magnitudes.max(axis=over) / (config.largest - 0.25))
        named[step_of(name)] = jnp.log(jnp.maximum(scale, 2.0**-120))
    return trees.nest(named)


def without_steps(tree: Any) -> Any:
    """A tree like the trained parameters, without what belongs to scales."""
    if not isinstance(tree, Mapping):
        return tree
    return {name: without_steps(leaf) for name, leaf in tree.items() if name != LOG_STEP}


def quantized_weights(
    params: Any, config: QuantizationConfig, compute: jnp.dtype
) -> dict[str, Quantized]:
    """Codes and scales of all weights that are quantized, by name, "blocks/mlp/up/kernel".

    Args:
      params: what the run trains, with `log_step` where scales are learned.
      compute: dtype of the products, in which weights are rounded.

    Codes are int8 [l, in..., out...], scales fp32 of equal rank: number = code * scale, in
    `compute`.
    Communicates over mesh axes that split numbers that share a scale.
    """
    named = trees.named(params)
    return {
        name: rounded(name, weight, config, compute, named.get(step_of(name)))
        for name, weight in named.items() if is_quantized(name)
    }  # fmt: skip


def dequantized_params(params: Any, config: QuantizationConfig, compute: jnp.dtype) -> Any:
    """The model's parameters, weights as the numbers that their codes stand for, in the dtypes that
    they are kept in: what products multiply. Communicates as `quantized_weights` does."""
    if not config.bits:
        return params
    named = trees.named(without_steps(params))
    for name, codes in quantized_weights(params, config, compute).items():
        weight = named[name]
        numbers = quantized.dequantized(codes)
        to = jax.typeof(weight).sharding.spec
        named[name] = jax.sharding.reshard(numbers, sharding.split_only(to)).astype(weight.dtype)
    return trees.nest(named)


def dequantized_on_mesh(params: Any, config: QuantizationConfig, compute: jnp.dtype) -> Any:
    """`dequantized_params` of arrays on a mesh, outside of programs."""
    if not config.bits:
        return params
    with jax.set_mesh(jax.tree.leaves(params)[0].sharding.mesh):
        return jax.jit(dequantized_params, static_argnums=(1, 2))(params, config, compute)


def rounded(
    name: str, weight: jax.Array, config: QuantizationConfig, compute: jnp.dtype,
    log_step: jax.Array | None,
) -> Quantized:  # fmt: skip
    """A stacked weight as codes and scales, its own or those learned."""
    shared = sharing(name, weight.shape, config.group)
    weight = _in_whole_groups(dot.cast(weight, compute), shared)
    if log_step is None:
        form = Format(jnp.dtype(jnp.int8), float(config.largest), power_of_two=False)
        return quantized.quantize(weight, form, shared)
    kind = jax.typeof(weight).sharding
    of_scale = _spec_of_scales(kind.spec, shared)
    scale = jnp.exp(jax.sharding.reshard(log_step, of_scale))
    codes = jax.shard_map(
        functools.partial(_codes_local, largest=config.largest), mesh=kind.mesh,
        in_specs=(kind.spec, of_scale), out_specs=kind.spec, check_vma=False,
    )(weight, scale)  # fmt: skip
    return Quantized(codes, scale, compute)


def gradients(
    params: Any, tree: Any, config: QuantizationConfig, compute: jnp.dtype, to: Any
) -> Any:
    """Gradients of what is trained, of those of the rounded weights; in fp32 for scales.

    Args:
      params: what was trained with, and what else was beside it; `tree`: of what is trained, but
        without scales.
      to: shardings of gradients, of all that is trained.

    Communicates, where scales are learned, sums over the mesh axes that split numbers of one scale.
    """
    if not config.learns:
        return tree
    named, found = trees.named(params), trees.named(tree)
    places = trees.named(to)
    for name in [name for name in found if is_quantized(name)]:
        own, step = _gradients_of(
            name, named[name], named[step_of(name)], found[name], config, compute
        )
        found[name] = jax.sharding.reshard(own, places[name])
        found[step_of(name)] = jax.sharding.reshard(step, places[step_of(name)])
    return trees.nest({name: found[name] for name in places})


def _gradients_of(name, weight, log_step, gradient, config, compute):
    """Of a weight, placed as `gradient`, and of the logarithms of its scales."""
    shared = sharing(name, weight.shape, config.group)
    gradient = _in_whole_groups(gradient, shared)
    kind = jax.typeof(gradient).sharding
    weight = jax.sharding.reshard(dot.cast(weight, compute), kind.spec)
    of_scale = _spec_of_scales(kind.spec, shared)
    axes = set(sharding.used_axes(kind.spec)) - set(sharding.used_axes(of_scale))
    num = math.prod(weight.shape) / math.prod(log_step.shape)
    local = functools.partial(
        _gradients_local, largest=config.largest, axes=tuple(sorted(axes)),
        factor=1 / math.sqrt(num * config.largest),
    )  # fmt: skip
    region = jax.shard_map(
        local, mesh=kind.mesh, in_specs=(kind.spec, of_scale, kind.spec),
        out_specs=(kind.spec, of_scale), check_vma=False,
    )  # fmt: skip
    return region(weight, jax.sharding.reshard(log_step, of_scale), gradient)


def _codes_local(weight, scale, *, largest: int):
    blocks = quantized.in_blocks(weight, scale.shape).astype(jnp.float32)
    codes = jnp.clip(jnp.round(blocks / _beside(scale)), -largest - 1, largest)
    return codes.astype(jnp.int8).reshape(weight.shape)


def _gradients_local(weight, log_step, gradient, *, largest: int, axes, factor: float):
    scale = _beside(jnp.exp(log_step))
    steps = quantized.in_blocks(weight, log_step.shape).astype(jnp.float32) / scale
    above = quantized.in_blocks(gradient, log_step.shape)
    codes = jnp.clip(jnp.round(steps), -largest - 1, largest)
    inside = (steps >= -largest - 1) & (steps <= largest)
    own = jnp.where(inside, above, 0).reshape(gradient.shape)
    terms = above.astype(jnp.float32) * jnp.where(inside, codes - steps, codes)
    of_scale = terms.sum(axis=tuple(range(1, terms.ndim, 2)), keepdims=True)
    if axes:
        of_scale = jax.lax.psum(of_scale, axes)
    return own, (of_scale * scale * factor).reshape(log_step.shape)


def _beside(scale):
    """Scales [n, ...] as they are multiplied with `in_blocks`, [n, 1, ...]."""
    return scale.reshape([n for num in scale.shape for n in (num, 1)])


def _spec_of_scales(spec: PartitionSpec, shared: tuple[int, ...]) -> PartitionSpec:
    return PartitionSpec(*(e if n else None for e, n in zip(spec.partitions, shared, strict=True)))


def _in_whole_groups(array: jax.Array, shared: tuple[int, ...]) -> jax.Array:
    """An array gathered over the mesh axes that split neighbors of one group."""
    kind = jax.typeof(array).sharding
    spec = sharding.split_only(kind.spec)

    def entry(size: int, n: int, axes: Any) -> Any:
        return None if n and size // sharding.ways(kind.mesh, axes) % n else axes

    entries = zip(array.shape, shared, spec.partitions, strict=True)
    return jax.sharding.reshard(array, PartitionSpec(*(entry(*each) for each in entries)))


def step_of(name: str) -> str:
    """The name of the logarithms of a weight's scales."""
    return f"{name.removesuffix(KERNEL)}{LOG_STEP}"


def _is_names(leaf: Any) -> bool:
    return isinstance(leaf, tuple)


def text(config: QuantizationConfig, factored: Collection[str]) -> str:
    """What is quantized, on a line; "" where nothing is. `factored`: products that are two factors,
    which are left out."""
    words = []
    if config.bits:
        group = f"a scale for {config.group} inputs" if config.group else "a scale for each output"
        learned = ", learned" if config.learns else ""
        but = f" (not the factors of {', '.join(sorted(factored))})" if factored else ""
        words.append(f"weights of layers{but} in {config.bits} bits, {group}{learned}")
    if config.activations:
        scale = {CURRENT: "a scale for each token", AVERAGE: "moving averages of ranges"}
        words.append(f"their inputs in 8 bits, {scale[config.activations]}")
    return "; ".join(words)
