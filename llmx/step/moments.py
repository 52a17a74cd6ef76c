"""How an optimizer keeps its moments between steps: in fp32, bf16, or 8 bits.

Every update is computed in fp32: moments are read up before it and rounded again after it,
stochastically, since a second moment with b2 = 0.999 moves by a thousandth at a time, which
rounding to nearest would lose.

Eight bits (the idea of arXiv 2110.02861: blocks with a scale, and a code that is finer near zero)
are here a small float in a block of 32 that shares an exponent, as in the OCP microscaling formats
(arXiv 2310.10537): 3 bits of mantissa below a block's largest number, so a step of 1/8 to 1/16 of a
number whatever its size. A first moment has a sign and 16 octaves, a second moment none and 32: so
a root of it reaches as far down as what is divided by it. A linear code would round most second
moments to zero, and the division by their root would blow up. Here one that is not zero stays so,
and a first moment below its smallest code is rounded to it or to zero.

Letters: D the last dimension, b blocks along it.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from llmx import sharding
from llmx.sharding import trees
from llmx.step import rounding

BLOCK = 32  # numbers that share an exponent
_MANTISSA = 3
_CUT = 23 - _MANTISSA  # bits of fp32's mantissa that a code leaves out
_OCTAVE = 1 << _MANTISSA  # codes of one exponent
_NOT_FINITE = 255  # the scale of a block with an infinity or NaN, which is read as NaN
# What optax calls moments that are never negative: they need no sign.
_SQUARES = "nu"


class EightBit(NamedTuple):
    """A moment in 8 bits."""

    codes: jax.Array  # uint8 [..., D] of a moment that is never negative, otherwise int8
    scales: jax.Array  # uint8 [..., b]: the exponent of each block's largest number, as in fp32


class Rounded(NamedTuple):
    """An optimizer's state in another format."""

    count: jax.Array  # updates, int32 []: other random bits for each
    inner: Any  # the state of the optimizer, its moments in their format


class Format(NamedTuple):
    """How a moment is kept."""

    encode: Callable  # (fp32, random uint32, whether it has a sign) -> kept
    matrices_only: bool  # norms, biases and position tables stay in fp32


def _blocks(array_D: jax.Array) -> jax.Array:
    """[..., D] as [..., b, up to BLOCK], filled up with zeros."""
    *rest, size = array_D.shape
    block = min(BLOCK, size)
    if size % block:
        array_D = jnp.pad(array_D, [(0, 0)] * len(rest) + [(0, -size % block)])
    return array_D.reshape(*rest, -1, block)


def _of_numbers(scales_b: jax.Array, size: int) -> jax.Array:
    """Of each of `size` numbers the scale of its block."""
    *rest, blocks = scales_b.shape
    block = min(BLOCK, size)
    each = jnp.broadcast_to(scales_b[..., None], (*rest, blocks, block))
    return each.reshape(*rest, blocks * block)[..., :size]


def _offset(codes: jnp.dtype, scale: jax.Array) -> jax.Array:
    """What is added to a code to make it the upper bits of fp32: the largest code is the last of
    the exponent `scale`."""
    return (scale.astype(jnp.int32) + 1) * _OCTAVE - (256 if codes == jnp.uint8 else 128)


def num_blocks(size: int) -> int:
    """The blocks of a last dimension."""
    return -(-size // min(BLOCK, size))


def encode_8bit(x: jax.Array, random: jax.Array, signed: bool) -> EightBit:
    """fp32 [..., D] in 8 bits, right on average, but for positive numbers that have no sign: these
    are at least the smallest code.

    Communicates over axes that split D where blocks cross their shards.
    """
    dtype = jnp.dtype(jnp.int8 if signed else jnp.uint8)
    bits = jax.lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
    largest = jnp.max(_blocks(bits), axis=-1)
    # Rounded up as far as any number of the block may be.
    exponent = jnp.minimum((largest + ((1 << _CUT) - 1)) >> 23, _NOT_FINITE - 1)
    scales = jnp.where(largest >> 23 == 255, _NOT_FINITE, exponent).astype(jnp.uint8)
    offset = _offset(dtype, _of_numbers(scales, x.shape[-1]))
    most = jnp.iinfo(dtype).max
    codes = ((bits + (random >> (32 - _CUT)).astype(jnp.int32)) >> _CUT) - offset
    smallest = jnp.maximum(offset + 1, 1)
    there = bits > 0
    if signed:
        # Between zero and the smallest code: the chance is that of the size.
        value = jax.lax.bitcast_convert_type(smallest << _CUT, jnp.float32)
        there &= jnp.abs(x) > value * ((random >> 8).astype(jnp.float32) * 2.0**-24)
    codes = jnp.minimum(codes, most)
    codes = jnp.where(bits < smallest << _CUT, jnp.where(there, smallest - offset, 0), codes)
    codes = jnp.where(x < 0, -codes, codes) if signed else codes
    return EightBit(codes.astype(dtype), scales)


def decode_8bit(kept: EightBit) -> jax.Array:
    """fp32 [..., D]."""
    codes = kept.codes.astype(jnp.int32)
    scale = _of_numbers(kept.scales, codes.shape[-1])
    upper = jnp.maximum(jnp.abs(codes) + _offset(kept.codes.dtype, scale), 0)
    size = jax.lax.bitcast_convert_type(upper << _CUT, jnp.float32)
    size = jnp.where(codes == 0, 0.0, jnp.where(scale == _NOT_FINITE, jnp.nan, size))
    return jnp.where(codes < 0, -size, size)


FORMATS: dict[str, Format | None] = {
    "fp32": None,  # as optax keeps them
    "bf16": Format(lambda x, random, signed: rounding.to_bf16(x, random), matrices_only=False),
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
    name: str, inner: optax.GradientTransformation, matrices: Mapping[str, bool]
) -> optax.GradientTransformationExtraArgs:
    """`inner`, computed in fp32, its moments kept in a format.

    A moment is an array of its state whose path ends in that of a parameter and that has its shape;
    all else, as factored moments and counters, stays as it is.

    Args:
      name: in `FORMATS`.
      matrices: by parameter, whether it is a matrix.
    """
    inner, kind = in_fp32(inner), FORMATS[name]
    if kind is None:
        return inner

    def encoded(state, params, count):
        shapes = {name: leaf.shape for name, leaf in trees.named(params).items()}

        def one(path, leaf):
            owner = owner_of(path, shapes)
            if shapes.get(owner) != leaf.shape or (kind.matrices_only and not matrices[owner]):
                return leaf
            signed = all(getattr(key, "name", None) != _SQUARES for key in path)
            bits = rounding.random_bits(leaf.shape, step=count, name=trees.path_name(path))
            return kind.encode(leaf, bits, signed)

        return jax.tree_util.tree_map_with_path(one, state)

    def init(params):
        count = jnp.zeros((), jnp.int32)
        return Rounded(count, encoded(inner.init(params), params, count))

    def update(updates, state, params, **extra):
        updates, new = inner.update(updates, decoded(state.inner), params, **extra)
        count = optax.safe_increment(state.count)
        return updates, Rounded(count, encoded(new, params, count))

    return optax.GradientTransformationExtraArgs(init, update)


def owner_of(path: Any, names: Any) -> str | None:
    """The longest of `names` in which a path ends, but for a field of `EightBit`."""
    if path and getattr(path[-1], "name", None) in EightBit._fields:
        path = path[:-1]
    ends = (trees.path_name(path[start:]) for start in range(len(path)))
    return next((name for name in ends if name in names), None)


def scales_sharding(path: Any, shape: tuple, of: tuple | None, to: Any) -> Any:
    """Of the scales at a path, their parameter's shape `of` being split as `to`; None for other
    arrays."""
    if of is None or getattr(path[-1], "name", None) != "scales":
        return None
    entries = (*to.spec.partitions, *(None,) * (len(of) - len(to.spec.partitions)))
    ways = sharding.ways(to.mesh, entries[-1])
    aligned = of[-1] % (ways * BLOCK) == 0
    return to.update(
        spec=jax.sharding.PartitionSpec(*entries[:-1], entries[-1] if aligned else None)
    )


def _fp32(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)
