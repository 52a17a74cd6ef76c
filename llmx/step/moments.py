"""How an optimizer keeps its moments between steps: in fp32, bf16, or 8 bits.

Every update is computed in fp32: moments are read up before it and rounded again after it,
stochastically. A second moment with b2 = 0.999 moves by a thousandth at a time, which rounding to
nearest loses.

Eight bits (the idea of arXiv 2110.02861: blocks with a scale, and a code that is finer near zero)
are here a small float in a block of 32 that shares an exponent, as in the OCP microscaling formats
(arXiv 2310.10537): 3 bits of mantissa, so a step of 1/8 to 1/16 of a number whatever its size. A
first moment has a sign and 16 octaves, a second moment no sign and 32: so its root reaches as far
down as what is divided by it. A linear code would round most second moments to zero, and the
division by their root would blow up. Here one that is not zero stays so.

Letters: D the dimension that blocks lie along, b blocks.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from llmx import sharding
from llmx.sharding import stacks, trees
from llmx.step import rounding

BLOCK = 32  # numbers that share an exponent
_MANTISSA = 3
_CUT = 23 - _MANTISSA  # bits of fp32's mantissa that a code leaves out
_OCTAVE = 1 << _MANTISSA  # codes of one exponent
_INFINITY = 0x7F800000  # as bits of fp32; NaN is above
# What optax calls moments that are never negative: they need no sign.
_SQUARES = "nu"


class EightBit(NamedTuple):
    """A moment in 8 bits."""

    codes: jax.Array  # uint8 [..., D, ...] of a moment that is never negative, otherwise int8
    scales: jax.Array  # uint8 [..., b, ...]: exponents of the blocks' largest numbers, as in fp32


class Rounded(NamedTuple):
    """An optimizer's state in another format."""

    count: jax.Array  # updates, int32 []: other random bits for each
    inner: Any  # the state of the optimizer, its moments in their format


class Format(NamedTuple):
    """How a moment is kept."""

    encode: Callable  # (fp32, random uint32, signed=, dim= of its blocks) -> kept
    matrices_only: bool  # norms, biases and position tables stay in fp32


def _blocks(array: jax.Array, dim: int) -> jax.Array:
    """[..., D, ...] as [..., b, up to BLOCK, ...], filled up with zeros."""
    size = array.shape[dim]
    block = min(BLOCK, size)
    if size % block:
        array = jnp.pad(array, [(0, -size % block * (i == dim)) for i in range(array.ndim)])
    return array.reshape(*array.shape[:dim], -1, block, *array.shape[dim + 1 :])


def _of_numbers(scales: jax.Array, shape: tuple[int, ...], dim: int) -> jax.Array:
    """Of each number of an array the scale of its block."""
    block = min(BLOCK, shape[dim])
    before, after = scales.shape[: dim + 1], scales.shape[dim + 1 :]
    each = jnp.broadcast_to(jnp.expand_dims(scales, dim + 1), (*before, block, *after))
    each = each.reshape(*shape[:dim], -1, *shape[dim + 1 :])
    return jax.lax.slice_in_dim(each, 0, shape[dim], axis=dim)


def _offset(codes: jnp.dtype, scale: jax.Array) -> jax.Array:
    """What is added to a code to make it the upper bits of fp32: the largest code is the last of
    the exponent `scale`."""
    return (scale + 1) * _OCTAVE - (256 if codes == jnp.uint8 else 128)


def block_dim(shape: tuple[int, ...], axes: tuple[str, ...]) -> int:
    """The dimension of a matrix that blocks lie along: the largest that counts neither layers nor
    experts and is not the last.

    Neighbours along the last dimension lie in one vector of a TPU; blocks of them would be moved
    to other places in every update.
    """
    rest = [i for i in range(len(shape) - 1) if axes[i] not in stacks.STACKED]
    return max(rest, key=lambda i: shape[i])


def _dim_of(shape: tuple[int, ...], scales: tuple[int, ...]) -> int | None:
    """The dimension that blocks lie along; None where each number is a block."""
    sizes = enumerate(zip(shape, scales, strict=True))
    return next((dim for dim, (size, num) in sizes if size != num), None)


def encode_8bit(x: jax.Array, random: jax.Array, *, signed: bool, dim: int) -> EightBit:
    """fp32 [..., D, ...] in 8 bits with blocks along `dim`.

    Right on average, but for numbers without a sign that are below the smallest code and not zero:
    these become it. Communicates over axes that split D where blocks cross their shards.
    """
    dtype = jnp.dtype(jnp.int8 if signed else jnp.uint8)
    # Some compilers' maxima pass over NaN: it is kept as an infinity.
    size = jnp.where(jnp.isnan(x), jnp.inf, jnp.abs(x))
    largest = jax.lax.bitcast_convert_type(jnp.max(_blocks(size, dim), axis=dim + 1), jnp.uint32)
    # Rounded up as far as any number of the block may be.
    scales = ((largest + ((1 << _CUT) - 1)) >> 23).astype(jnp.int32)
    offset = _of_numbers(_offset(dtype, scales), x.shape, dim)
    bits = jax.lax.bitcast_convert_type(size, jnp.uint32)
    rounded = bits + (random >> (32 - _CUT))
    rounded = jnp.where(rounded >= _INFINITY, bits, rounded)  # no finite number becomes infinite
    codes = (rounded >> _CUT).astype(jnp.int32) - offset
    smallest = jnp.maximum(offset + 1, 1)
    value = jax.lax.bitcast_convert_type(smallest << _CUT, jnp.float32)
    # Between zero and the smallest code the chance is that of the size, if there is a sign.
    chance = (random >> 8).astype(jnp.float32) * 2.0**-24 if signed else 0.0
    tiny = jnp.where(size > value * chance, smallest - offset, 0)
    codes = jnp.where((bits >> _CUT).astype(jnp.int32) < smallest, tiny, codes)
    codes = jnp.where(x < 0, -codes, codes) if signed else codes
    return EightBit(codes.astype(dtype), scales.astype(jnp.uint8))


def decode_8bit(kept: EightBit) -> jax.Array:
    """fp32 [..., D, ...]."""
    codes = kept.codes.astype(jnp.int32)
    offset = _offset(kept.codes.dtype, kept.scales.astype(jnp.int32))
    if (dim := _dim_of(codes.shape, offset.shape)) is not None:
        offset = _of_numbers(offset, codes.shape, dim)
    upper = jnp.maximum(jnp.abs(codes) + offset, 0)
    size = jax.lax.bitcast_convert_type(upper << _CUT, jnp.float32)
    size = jnp.where(codes == 0, 0.0, size)
    return jnp.where(codes < 0, -size, size)


FORMATS: dict[str, Format | None] = {
    "fp32": None,  # as optax keeps them
    "bf16": Format(lambda x, random, **_: rounding.to_bf16(x, random), matrices_only=False),
    "int8": Format(encode_8bit, matrices_only=True),
}
AUTO = "auto"  # that of the master parameters
NAMES = (AUTO, *FORMATS)
_OF_PARAMETERS = {"float32": "fp32", "bfloat16": "bf16"}


def resolved(name: str, param: jnp.dtype) -> str:
    """The name of a format, where "auto" is that of master parameters of dtype `param`."""
    return _OF_PARAMETERS[jnp.dtype(param).name] if name == AUTO else name


def number_bytes(name: str, param: jnp.dtype) -> float:
    """Bytes of one number of a matrix's moment."""
    kept = {"fp32": 4, "bf16": 2, "int8": 1 + 1 / BLOCK}
    return kept[resolved(name, param)]


def decoded(state: Any) -> Any:
    """An optimizer's state with its moments in fp32."""

    def one(leaf):
        if isinstance(leaf, EightBit):
            return decode_8bit(leaf)
        return leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf

    return jax.tree.map(one, state, is_leaf=lambda leaf: isinstance(leaf, EightBit))


def in_fp32(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """`inner`, computed in fp32 whatever dtype gradients and parameters have; its state is kept in
    fp32 too."""
    inner = optax.with_extra_args_support(inner)

    def update(updates, state, params=None, **extra):
        return inner.update(_fp32(updates), state, _fp32(params), **extra)

    return optax.GradientTransformationExtraArgs(lambda params: inner.init(_fp32(params)), update)


def kept_as(
    name: str, inner: optax.GradientTransformation, matrices: Mapping[str, tuple[str, ...]]
) -> optax.GradientTransformationExtraArgs:
    """`inner`, computed in fp32, its moments kept in a format.

    A moment is an array of its state whose path ends in that of a parameter and that has its shape;
    all else, as factored moments and counters, stays as it is.

    Args:
      name: in `FORMATS`.
      matrices: logical axes of the parameters that are matrices.
    """
    inner, kind = in_fp32(inner), FORMATS[name]
    if kind is None:
        return inner

    def encoded(state, params, count, layers=None):
        shapes = {name: leaf.shape for name, leaf in trees.named(params).items()}

        def one(path, leaf):
            owner = owner_of(path, shapes)
            if shapes.get(owner) != leaf.shape or (kind.matrices_only and owner not in matrices):
                return leaf
            rows = rounding.rows_of(owner, layers)
            bits = rounding.random_bits(
                leaf.shape, step=count, name=trees.path_name(path), rows=rows
            )
            signed = all(getattr(key, "name", None) != _SQUARES for key in path)
            dim = block_dim(leaf.shape, matrices[owner]) if owner in matrices else None
            return kind.encode(leaf, bits, signed=signed, dim=dim)

        return jax.tree_util.tree_map_with_path(one, state)

    def init(params):
        count = jnp.zeros((), jnp.int32)
        return Rounded(count, encoded(inner.init(params), params, count))

    def update(updates, state, params, *, layers=None, **extra):
        updates, new = inner.update(updates, decoded(state.inner), params, **extra)
        count = optax.safe_increment(state.count)
        return updates, Rounded(count, encoded(new, params, count, layers))

    return optax.GradientTransformationExtraArgs(init, update)


def owner_of(path: Any, names: Any) -> str | None:
    """The longest of `names` in which a path ends, but for a field of `EightBit`."""
    if path and getattr(path[-1], "name", None) in EightBit._fields:
        path = path[:-1]
    ends = (trees.path_name(path[start:]) for start in range(len(path)))
    return next((name for name in ends if name in names), None)


def scales_sharding(path: Any, shape: tuple[int, ...], of: tuple | None, to: Any) -> Any:
    """Of the scales at a path, their parameter's shape `of` being split as `to`; None for other
    arrays.

    They are split as their numbers, but whole along the dimension of their blocks where a block
    crosses shards.
    """
    if of is None or getattr(path[-1], "name", None) != "scales":
        return None
    if (dim := _dim_of(of, shape)) is None:
        return to
    entries = [*to.spec.partitions, *(None,) * (len(of) - len(to.spec.partitions))]
    if of[dim] % (sharding.ways(to.mesh, entries[dim]) * BLOCK):
        entries[dim] = None
    return to.update(spec=jax.sharding.PartitionSpec(*entries))


def _fp32(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)
