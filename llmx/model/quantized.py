"""Products in fp8 and int8: in which numbers weights are multiplied, and in which gathered.

A quantised array is its codes, e4m3, e5m2 or int8, with a scale for all of it, for each channel, or
for each block: number = code * scale. Two operands whose scales do not change along the contracted
dimensions are multiplied as codes, which tensor cores and MXUs do at twice the rate of bf16 where
the chip has units for them. Others are turned back into the compute dtype first, which is exact for
fp8: a code times a power of two.

Sources: fp8 training, e4m3 forward and e5m2 backward, arXiv 2209.05433; blocks, DeepSeek-V3
(arXiv 2412.19437), section 3.3; scales that are powers of two, OCP Microscaling Formats 1.0; int8
forward with straight-through gradients, arXiv 1712.05877 and 1308.3432.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from llmx import sharding
from llmx.runtime import bounds, hardware
from llmx.runtime.bounds import bounded, choice

RANGES = "product_ranges"  # in `State.extra`: fp32 [steps, weights, L, 3], see `with_ranges`


@dataclasses.dataclass
class ProductsConfig:
    """In which numbers the layers' weights are multiplied, and in which they are gathered."""

    # "" = the compute dtype; "fp8" = e4m3 forward, e5m2 gradients; "int8" = int8 forward, gradients
    # in the compute dtype, straight through the rounding
    format: str = choice("", lambda: FORMATS)
    # what has one scale: a "tensor"; a "block" (fp8); a "channel" (int8): each token of the
    # activations, each output of a weight
    granularity: str = choice("tensor", ("tensor", "block", "channel"))
    # numbers along the contracted dimension that share a scale, and of weights along the other too
    block: int = bounded(128, at_least=1, needs={"products.granularity": ("block",)})
    # in which numbers split weights are gathered: "" = the compute dtype; "fp8" = e4m3, half of its
    # bytes; "fp8_layers" = so in the layers, but not the head
    gather: str = choice("", ("", "fp8", "fp8_layers"))
    # the largest magnitude that a scale is made from: "current" = of the numbers themselves;
    # "delayed" = of the last `history` steps (fp8 per tensor)
    scaling: str = choice("current", ("current", "delayed"))
    # steps that delayed scaling looks back
    history: int = bounded(16, at_least=1, needs={"products.scaling": ("delayed",)})


@dataclasses.dataclass(frozen=True)
class Format:
    """What one operand is rounded to."""

    dtype: jnp.dtype
    largest: float  # larger codes are not used
    power_of_two: bool  # scales are

    def scale(self, amax: jax.Array) -> jax.Array:
        """The scale, fp32, of numbers whose largest magnitude is `amax`.

        That of zeros is 1; that of numbers which are not finite is NaN, and so all numbers become.
        """
        # Smaller ones would make 1 / scale infinite.
        scale = jnp.maximum(amax / self.largest, 2.0**-120)
        if self.power_of_two:  # the next above: add what is less than one to the exponent's bits
            bits = jax.lax.bitcast_convert_type(scale, jnp.int32)
            bits = (bits + 0x7FFFFF) & 0x7F800000
            scale = jax.lax.bitcast_convert_type(bits, jnp.float32)
        return jnp.where(jnp.isfinite(amax), jnp.where(amax > 0, scale, 1.0), jnp.nan)

    def codes(self, steps: jax.Array) -> jax.Array:
        """Numbers in units of their scale, rounded to even; finite ones are clipped to
        `largest`."""
        if jnp.issubdtype(self.dtype, jnp.integer):  # their scale is NaN, if one is not finite
            return jnp.clip(jnp.round(steps), -self.largest, self.largest).astype(self.dtype)
        # A select between arrays would need one of NaNs, which a scan keeps beside its loop.
        nan_unless_finite = steps - steps
        clipped = jnp.clip(steps, -self.largest, self.largest)
        return (clipped + nan_unless_finite).astype(self.dtype)


# int8 is symmetric: -128 is not used. Rounding of fp8 numbers does not depend on a scale that is a
# power of two, but for the smallest ones; int8 would lose up to one of its eight bits.
E4M3 = Format(jnp.dtype(jnp.float8_e4m3fn), 448.0, power_of_two=True)
E5M2 = Format(jnp.dtype(jnp.float8_e5m2), 57344.0, power_of_two=True)
INT8 = Format(jnp.dtype(jnp.int8), 127.0, power_of_two=False)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("codes", "scale", "amax"),
    meta_fields=("dtype",),
)  # fmt: skip
@dataclasses.dataclass(frozen=True)
class Quantized:
    """An array as codes times scales."""

    codes: jax.Array
    scale: jax.Array  # fp32, of equal rank: along each dimension 1, or the number of blocks
    dtype: jnp.dtype  # of the array
    amax: jax.Array | None = None  # of the array, fp32 [], where the scale is of another


class Ranges(NamedTuple):
    """The largest magnitudes of a product's operands, fp32 [] each, or [L] of stacked layers.

    None = not known: each scale is made from the numbers themselves.
    """

    x: jax.Array | None = None
    weight: jax.Array | None = None
    gradient: jax.Array | None = None  # of the result


@dataclasses.dataclass(frozen=True)
class Numbers:
    """How operands of products are rounded; None = not at all, they stay in the compute dtype."""

    x: Format | None = None
    weight: Format | None = None
    gradient: Format | None = None  # of the result
    granularity: str = "tensor"
    block: int = 0
    gathers_codes: bool = False  # weights are rounded before they are gathered
    head: Format | None = None  # of the head, which has a scale for each token of the vocabulary
    clips_x: bool = False  # x has no gradient where it is beyond its range, and so clipped

    @property
    def of_head(self) -> "Numbers":
        """How the head's product with the last hidden state is rounded."""
        if self.head is None:
            return UNROUNDED
        return Numbers(weight=self.head, granularity="channel", gathers_codes=True)

    def activation(
        self, array: jax.Array, form: Format | None, contracted: Sequence[bool],
        amax: jax.Array | None = None,
    ) -> jax.Array | Quantized:  # fmt: skip
        """`array`, an operand of tokens, rounded to `form`; `contracted`: for each dimension.

        `amax`: see `quantize`.
        """
        if form is None:
            return array
        last = _last(contracted, True)
        sharing = {
            "tensor": [0 for _ in contracted],
            "channel": [0 if summed else 1 for summed in contracted],
            "block": [self.block if n == last else 1 for n in range(array.ndim)],
        }
        return quantize(array, form, sharing[self.granularity], amax)

    def rounded_weight(
        self, array: jax.Array, sides: Sequence[bool | None], amax: jax.Array | None = None
    ) -> jax.Array | Quantized:
        """A weight rounded to its format.

        `sides`: for each dimension, whether a product contracts it (blocks are the same if sides
        are exchanged), or None for one that counts stacked weights.
        """
        if self.weight is None:
            return array
        tile = (_last(sides, True), _last(sides, False))
        sharing = {
            "tensor": [0 if side is not None else 1 for side in sides],
            "channel": [0 if side else 1 for side in sides],
            "block": [self.block if n in tile else 1 for n in range(array.ndim)],
        }
        return quantize(array, self.weight, sharing[self.granularity], amax)


def _last(values: Sequence, value) -> int:
    """The last index of a value."""
    return max(n for n, one in enumerate(values) if one is value)


UNROUNDED = Numbers()
FORMATS = {
    "": UNROUNDED,
    "fp8": Numbers(x=E4M3, weight=E4M3, gradient=E5M2),
    "int8": Numbers(x=INT8, weight=INT8),
}


def problems(config: ProductsConfig) -> list[str]:
    """All that is wrong with the section by itself, each with its remedy."""
    found = bounds.problems(config, "products.")
    if config.format == "int8" and config.gather:
        found.append(
            f"products.gather={config.gather!r} with products.format='int8' would round weights "
            "twice: use products.gather='', or products.format='fp8' or ''"
        )
    fits = {"block": ("fp8", ""), "channel": ("int8",)}.get(config.granularity, FORMATS)
    if config.format not in fits and config.format in FORMATS:
        found.append(
            f"products.granularity={config.granularity!r} is not for products.format="
            f"{config.format!r}: use 'tensor', 'block' with 'fp8', or 'channel' with 'int8'"
        )
    if config.scaling == "delayed" and (config.format, config.granularity) != ("fp8", "tensor"):
        found.append(
            f"products.scaling='delayed' with products.format={config.format!r} and "
            f"products.granularity={config.granularity!r}: it is for 'fp8' per 'tensor'; use "
            "products.scaling='current'"
        )
    if config.granularity != "tensor" and not (config.format or config.gather):
        found.append(
            f"products.granularity={config.granularity!r} has no effect, since nothing is "
            "rounded: set products.format or products.gather, or leave it out"
        )
    return found


def units_text(config: ProductsConfig, chip: hardware.Chip | None) -> str:
    """In which numbers products are, and whether this chip has units for them; "" for the usual.

    `chip`: None = unknown.
    """
    words = []
    if config.format:
        share = "" if config.granularity == "tensor" else f" per {config.granularity}"
        words.append(f"{_NAMES[config.format]}{share}")
    if config.gather:
        words.append("weights gathered in e4m3")
    if config.format and chip is not None:
        rate, usual = chip.flops.get(_RATES[config.format], 0.0), chip.flops["bfloat16"]
        if config.granularity == "block":
            words.append("multiplied in the compute dtype: XLA has no product with block scales")
        elif rate <= usual:
            words.append(
                f"{chip.name} multiplies {config.format} no faster than bfloat16: this shows what "
                "its rounding does, and costs time"
                + ("; products.gather='fp8' alone saves traffic" if config.format == "fp8" else "")
            )
    return "; ".join(words)


_NAMES = {"fp8": "fp8, e4m3 forward and e5m2 gradients", "int8": "int8 forward"}
_RATES = {"fp8": "float8", "int8": "int8"}  # keys of `hardware.Chip.flops`


def make(config: ProductsConfig) -> Numbers:
    """The numbers that a resolved section says."""
    numbers = FORMATS[config.format]
    if config.gather:
        head = E4M3 if config.gather == "fp8" else None
        numbers = dataclasses.replace(numbers, weight=E4M3, gathers_codes=True, head=head)
    return dataclasses.replace(numbers, granularity=config.granularity, block=config.block)


def of_inputs(averaged: bool) -> Numbers:
    """int8 inputs of products of weights in the compute dtype: with a scale for each token, or for
    each product, from an average."""
    return Numbers(x=INT8, granularity="tensor" if averaged else "channel", clips_x=averaged)


class Averages(NamedTuple):
    """Moving averages of the largest magnitudes, in the place of those of the last steps."""

    amax: jax.Array  # fp32 [weights, L, 3], see `with_ranges`; 0 = none yet
    steps: jax.Array  # accepted so far, int32 []


def known_ranges(state: Any) -> jax.Array:
    """What scales are made from, fp32 [weights, L, 3], of `State.extra[RANGES]`: the averages, or
    the largest of the last steps."""
    return state.amax if isinstance(state, Averages) else state.max(axis=0)


class WithRanges(NamedTuple):
    """A weight or its gradient buffer, with the ranges that its product is scaled by.

    Differentiated by, the ranges of a buffer have those of this pass as their gradient.
    """

    array: Any
    ranges: Ranges


def with_ranges(buffers: Any, amax: jax.Array, axes: Any) -> Any:
    """Gradient buffers of layers with these logical axes, those of products with their ranges.

    `amax`: fp32 [weights, L, 3], for each weight of a product those of x, weight and gradient.
    """
    rows = iter(amax)

    def one(buffer, axes):
        if "embed" not in axes:
            return buffer
        row = next(rows)
        return WithRanges(buffer, Ranges(*(row[:, n] for n in range(3))))

    return jax.tree.map(one, buffers, axes)


def num_weights(axes: Any) -> int:
    """How many weights of products have ranges, of parameters with these logical axes."""
    names = jax.tree.leaves(axes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    return sum("embed" in one for one in names)


def params_with_ranges(params: Any, amax: jax.Array, axes: Any) -> Any:
    """A model's parameters, products of its layers with the ranges that they are scaled by."""
    return params | {"blocks": with_ranges(params["blocks"], amax, axes["blocks"])}


def without_ranges(gradients: Any) -> tuple[Any, jax.Array | tuple]:
    """Gradients by buffers `with_ranges`: those of the weights, and of the ranges as `amax`.

    () where the buffers had none.
    """
    is_leaf = lambda leaf: isinstance(leaf, WithRanges)  # noqa: E731
    leaves, structure = jax.tree.flatten(gradients, is_leaf=is_leaf)
    rows = [jnp.stack(leaf.ranges, axis=-1) for leaf in leaves if is_leaf(leaf)]
    leaves = [leaf.array if is_leaf(leaf) else leaf for leaf in leaves]
    return jax.tree.unflatten(structure, leaves), jnp.stack(rows) if rows else ()


def added(total: Any, new: Any) -> Any:
    """Gradients added up, in the dtypes of `total`; of ranges the larger ones."""

    def one(total, new):
        if isinstance(total, Ranges):
            return jax.tree.map(jnp.maximum, total, new)
        return total + new.astype(total.dtype)

    return jax.tree.map(one, total, new, is_leaf=lambda leaf: isinstance(leaf, Ranges))


def quantize(
    array: jax.Array, form: Format, sharing: Sequence[int], amax: jax.Array | None = None
) -> Quantized:
    """`array` rounded to `form`, each scale from the largest of the numbers that share it.

    `sharing`: for each dimension, how many neighbors share a scale; 0 = all. `amax`, fp32 []: the
    scale, of all numbers, is made from it if it is not 0, and larger numbers are clipped.

    Communicates over the mesh axes that split a dimension of which all share a scale. Raises
    ValueError where neighbors that share one are on several devices.
    """
    kind = jax.typeof(array).sharding
    spec = sharding.split_only(kind.spec)
    sharing = tuple(min(n, size) for n, size in zip(sharing, array.shape, strict=True))
    for size, n, entry in zip(array.shape, sharing, spec.partitions, strict=True):
        ways = sharding.ways(kind.mesh, entry)
        if n and size // ways % n:
            raise ValueError(
                f"products.block={n} does not divide the {size // ways} numbers that each of "
                f"{ways} shards has of a dimension of {size}: use a divisor, or granularity "
                "'tensor'"
            )
    entries = zip(spec.partitions, sharing, strict=True)
    of_scale = PartitionSpec(*(entry if n else None for entry, n in entries))
    axes = sharding.used_axes(spec)
    axes = tuple(axis for axis in axes if axis not in sharding.used_axes(of_scale))
    known = () if amax is None else (amax,)
    codes, scale, largest = jax.shard_map(
        functools.partial(_quantize_local, form=form, sharing=sharing, axes=axes),
        mesh=kind.mesh, in_specs=(spec, *[PartitionSpec()] * len(known)),
        out_specs=(spec, of_scale, of_scale), check_vma=False,
    )(jax.sharding.reshard(array, spec), *known)  # fmt: skip
    return Quantized(codes, scale, array.dtype, None if amax is None else largest.reshape(()))


def _quantize_local(array, *known, form: Format, sharing: tuple, axes: tuple[str, ...]):
    sizes = [size // n if n else 1 for size, n in zip(array.shape, sharing, strict=True)]
    blocks = in_blocks(array, sizes).astype(jnp.float32)
    # The larger of two numbers may drop a NaN; of bits a NaN's are the largest.
    bits = jax.lax.bitcast_convert_type(jnp.abs(blocks), jnp.int32)
    bits = bits.max(axis=tuple(range(1, blocks.ndim, 2)), keepdims=True)
    if axes:
        bits = jax.lax.pmax(bits, axes)
    amax = jax.lax.bitcast_convert_type(bits, jnp.float32)
    amax = jnp.where(jnp.isnan(amax), jnp.inf, amax)
    used = amax
    for earlier in known:
        used = jnp.where(earlier > 0, earlier, amax)
    scale = form.scale(used)
    codes = form.codes(blocks / scale).reshape(array.shape)
    return codes, scale.reshape(sizes), amax.reshape(sizes)


def in_blocks(array: jax.Array, sizes: Sequence[int]) -> jax.Array:
    """[D, ...] as [blocks, D / blocks, ...], with these numbers of blocks."""
    pairs = zip(array.shape, sizes, strict=True)
    return array.reshape([n for size, num in pairs for n in (num, size // num)])


def amax_of(array: jax.Array | Quantized) -> jax.Array | None:
    """Its largest magnitude, where it is rounded by another's."""
    return array.amax if isinstance(array, Quantized) else None


def dequantized(array: jax.Array | Quantized) -> jax.Array:
    """The numbers that codes stand for, in the dtype of what was quantised."""
    if not isinstance(array, Quantized):
        return array
    specs = tuple(jax.typeof(part).sharding.spec for part in (array.codes, array.scale))
    local = functools.partial(_dequantized_local, dtype=array.dtype)
    mesh = jax.typeof(array.codes).sharding.mesh
    region = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)
    return region(array.codes, array.scale)


def _dequantized_local(codes: jax.Array, scale: jax.Array, *, dtype: jnp.dtype) -> jax.Array:
    pairs = [n for num in scale.shape for n in (num, 1)]
    numbers = in_blocks(codes, scale.shape).astype(jnp.float32) * scale.reshape(pairs)
    return numbers.astype(dtype).reshape(codes.shape)


def gathered(array: Quantized, axes: Sequence[str]) -> Quantized:
    """The codes and scales whole over mesh axes. Communicates over these, a byte a number."""
    whole = lambda part: jax.sharding.reshard(  # noqa: E731
        part, sharding.without(jax.typeof(part).sharding.spec, axes)
    )
    # As bytes: XLA would move the conversion of numbers before the gather, and gather wider ones.
    codes = whole(jax.lax.bitcast_convert_type(array.codes, jnp.uint8))
    codes = jax.lax.bitcast_convert_type(codes, array.codes.dtype)
    return Quantized(codes, whole(array.scale), array.dtype, array.amax)


def gathered_rows(rows_CD: jax.Array, form: Format, axes: Sequence[str]) -> jax.Array:
    """Rows rounded to `form`, each with a scale of its own, whole along D, in their dtype.

    For manual regions, where mesh `axes` split D. Communicates over these, a byte a number.
    """
    codes, scale, _ = _quantize_local(rows_CD, form=form, sharing=(1, 0), axes=axes)
    if axes:
        whole = jax.lax.bitcast_convert_type(codes, jnp.uint8)
        whole = jax.lax.all_gather(whole, axes, axis=1, tiled=True)
        codes = jax.lax.bitcast_convert_type(whole, codes.dtype)
    return _dequantized_local(codes, scale, dtype=rows_CD.dtype)


def einsum(
    expression: str, left: jax.Array | Quantized, right: jax.Array | Quantized, *,
    dtype: jnp.dtype, out: PartitionSpec,
) -> jax.Array:  # fmt: skip
    """`jnp.einsum` of arrays, quantised or not, in `dtype`, placed as `out`.

    fp32 arrays, a router's, are multiplied in more than bf16's bits under every policy: in three
    products of bf16 parts, or exactly where the policy asks for it. `out` is `unreduced` over the
    axes that split contracted dimensions.
    """
    if not _multiplies_codes(expression, left, right):
        left, right = dequantized(left), dequantized(right)
        wide = left.dtype == right.dtype == jnp.float32
        exact = jax.config.jax_default_matmul_precision == "highest"  # `Policy.products`
        return jnp.einsum(
            expression, left, right, preferred_element_type=dtype, out_sharding=out,
            precision=jax.lax.Precision.HIGH if wide and not exact else None,
        )  # fmt: skip
    arrays = (left.codes, left.scale, right.codes, right.scale)
    return jax.shard_map(
        functools.partial(_einsum_local, expression, dtype),
        mesh=jax.typeof(left.codes).sharding.mesh,
        in_specs=tuple(jax.typeof(array).sharding.spec for array in arrays),
        out_specs=out, check_vma=False,
    )(*arrays)  # fmt: skip


def _multiplies_codes(expression: str, left, right) -> bool:
    """Whether both are quantised, with scales that are constant along contracted dimensions."""
    if not (isinstance(left, Quantized) and isinstance(right, Quantized)):
        return False
    inputs, out = expression.split("->")
    shapes = left.scale.shape + right.scale.shape
    letters = inputs.replace(",", "")
    return all(n == 1 for letter, n in zip(letters, shapes, strict=True) if letter not in out)


def _einsum_local(expression, dtype, left, left_scale, right, right_scale):
    inputs, out = expression.split("->")
    of_left, of_right = inputs.split(",")
    exact = jnp.issubdtype(left.dtype, jnp.integer)
    # H100 adds fp8 products in fewer bits unless told otherwise: for gradients that is too few.
    gradients = jnp.dtype(jnp.float8_e5m2) in (left.dtype, right.dtype)
    sums = jnp.int32 if exact else jnp.float32
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None and device.device_kind == "cpu":
        # XLA:CPU multiplies codes in plain loops. The wider type holds them exactly.
        left, right = left.astype(sums), right.astype(sums)
    terms = jnp.einsum(
        expression, left, right, preferred_element_type=sums,
        precision=jax.lax.Precision.HIGHEST if gradients else None,
    ).astype(jnp.float32)  # fmt: skip
    for letters, scale in ((of_left, left_scale), (of_right, right_scale)):
        sizes = dict(zip(letters, scale.shape, strict=True))
        assert math.prod(n for letter, n in sizes.items() if letter not in out) == 1
        kept = "".join(letter for letter in out if letter in sizes)
        order = [letters.index(letter) for letter in kept]
        rest = [n for n in range(scale.ndim) if n not in order]
        terms *= scale.transpose(*rest, *order).reshape([sizes.get(letter, 1) for letter in out])
    return terms.astype(dtype)
