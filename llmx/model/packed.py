"""Weights of few bits: codes, with scales and zero points of their groups, which `dot` multiplies.

    weight = (code - zero) * scale

A group is consecutive numbers along what a product contracts, of one output; or all of these. Codes
of 4 bits are stored in pairs. A packed weight is whole codes on its devices: it is gathered and
kept as these, and turned into the compute dtype for one product at a time. It has no gradient.

Letters: I the numbers that a product contracts, O those that it makes, G groups.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from llmx import sharding
from llmx.model import adapters, quantized
from llmx.model.quantized import Quantized
from llmx.runtime.bounds import bounded, choice, plain
from llmx.sharding import trees

# Of scales: 8 bits of mantissa, so that files in fp16, bf16 and fp32 hold the same numbers.
SCALE = jnp.dtype(jnp.bfloat16)


_ON = {"packed.format": {"not": ("",)}}


@dataclasses.dataclass(unsafe_hash=True)
class PackedConfig:
    """How the weights of products are stored: in a compressed run, which is not trained."""

    format: str = choice("", ("", "int8", "int4"))  # of each number; "" = as trained
    # numbers of an input that share a scale; 0 = all
    group: int = bounded(0, at_least=0, needs=_ON)
    symmetric: bool = plain(True, needs=_ON)  # without a zero point

    @property
    def bits(self) -> int:
        return {"": 0, "int8": 8, "int4": 4}[self.format]

    @property
    def levels(self) -> int:
        return 2**self.bits

    @property
    def middle(self) -> int:
        """The code of zero, where groups have no zero points; codes are 0 to `levels` - 1."""
        return self.levels // 2


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("codes", "scale", "zero"),
    meta_fields=("outputs",),
)
@dataclasses.dataclass(frozen=True)
class Packed:
    """A weight [..., *I, *O] as codes."""

    # int8, less `middle`; or uint8 with two codes of 4 bits along the last of I, the first lower
    codes: Any
    scale: Any  # [..., *G, *O], `SCALE`; as many dimensions as the weight
    zero: Any  # as `scale`, in the dtype of the codes; None = `middle`
    outputs: int  # dimensions of O

    @property
    def bits(self) -> int:
        return 4 if self.codes.dtype == jnp.uint8 else 8


def is_packed(leaf: Any) -> bool:
    return isinstance(leaf, Packed)


def named(tree: Any) -> dict[str, Any]:
    """`trees.named`, with packed weights whole."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_packed)
    return {trees.path_name(path): leaf for path, leaf in leaves}


def problems(config: PackedConfig, shapes: Any) -> list[str]:
    """Why weights of these shapes cannot be stored so, each with its remedy."""
    found = []
    for name, leaf in trees.named(shapes).items():
        if not (config.bits and adapters.is_product(name)):
            continue
        inputs = leaf.shape[1:][: adapters.contracted(name)]
        if config.group and _groups(inputs, config.group) is None:
            found.append(
                f"packed.group={config.group} does not divide the inputs of {name}, {inputs}: use "
                f"a divisor of {math.gcd(math.prod(inputs), inputs[-1])}, or 0 for one scale of "
                "each output"
            )
        if config.bits == 4 and inputs[-1] % 2:
            found.append(
                f"packed.format='int4' stores pairs, and {name} has {inputs[-1]} inputs: use 'int8'"
            )
    return found


def _groups(inputs: tuple[int, ...], group: int) -> tuple[int, ...] | None:
    """How many groups there are along each of these dimensions; None = they do not divide."""
    *outer, last = inputs
    if not group:
        return (1,) * len(inputs)
    if last % group == 0:
        return (*outer, last // group)
    if outer and group % last == 0 and outer[-1] % (group // last) == 0:
        return (*outer[:-1], outer[-1] // (group // last), 1)
    return None


def shapes_and_axes(config: PackedConfig, shapes: Any, axes: Any) -> tuple[Any, Any]:
    """A model's parameters, those of products as `Packed`, in shapes with dtypes and logical axes.

    Scales are whole along what products contract.
    """
    found = trees.named(shapes)
    leaves = jax.tree.leaves(axes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    axes_of = dict(zip(found, leaves, strict=True))
    for name in filter(adapters.is_product, found):
        form = jax.eval_shape(functools.partial(_empty, config, name), found[name])
        layers, *rest = axes_of[name]
        num = adapters.contracted(name)
        of_scale = (layers, *[None] * num, *rest[num:])
        of_zero = None if config.symmetric else of_scale
        found[name] = form
        axes_of[name] = Packed(axes_of[name], of_scale, of_zero, form.outputs)
    return trees.nest(found), trees.nest(axes_of)


def _empty(config: PackedConfig, name: str, weight: jax.Array) -> Packed:
    num = adapters.contracted(name)
    inputs = weight.shape[1:][:num]
    I, O = math.prod(inputs), math.prod(weight.shape[1 + num :])  # noqa: E741
    groups = math.prod(_groups(inputs, config.group) or (1,))
    codes_LIO = jnp.zeros((weight.shape[0], I, O), jnp.uint8)
    scale_LGO = jnp.zeros((weight.shape[0], groups, O), jnp.float32)
    zero_LGO = None if config.symmetric else codes_LIO[:, :groups]
    return pack(codes_LIO, scale_LGO, zero_LGO, config, weight.shape, weight.ndim - 1 - num)


def pack(
    codes: jax.Array, scale: jax.Array, zero: jax.Array | None, config: PackedConfig,
    shape: tuple[int, ...], outputs: int,
) -> Packed:  # fmt: skip
    """Codes [..., I, O] from 0 on, scales and zero points [..., G, O], of a weight of `shape`, the
    last `outputs` dimensions of which are O."""
    lead, end = shape[: codes.ndim - 2], len(shape) - outputs
    inputs, made = shape[len(lead) : end], shape[end:]
    grouped = (*lead, *_groups(inputs, config.group), *made)
    if config.bits == 8:
        narrow = lambda array: (array.astype(jnp.int32) - config.middle).astype(jnp.int8)  # noqa: E731
        codes = narrow(codes).reshape(shape)
    else:
        narrow = lambda array: array.astype(jnp.uint8)  # noqa: E731
        pairs = narrow(codes).reshape(*lead, -1, 2, codes.shape[-1])
        codes = pairs[..., 0, :] | pairs[..., 1, :] << 4
        codes = codes.reshape(*lead, *inputs[:-1], inputs[-1] // 2, *made)
    zero = None if zero is None else narrow(zero).reshape(grouped)
    return Packed(codes, scale.astype(SCALE).reshape(grouped), zero, outputs)


def whole(weight: Packed, dtype: jnp.dtype, axes: tuple[str, ...]) -> Quantized:
    """A packed weight of one layer, whole over these mesh axes, as codes without zero points.

    Communicates over those that split it: a byte, or half, a number.
    """
    mesh = jax.typeof(weight.codes).sharding.mesh
    to = sharding.without(jax.typeof(weight.codes).sharding.spec, axes)
    codes, scale = jax.sharding.reshard(weight.codes, to), _along(weight.scale, to, mesh)
    zero = () if weight.zero is None else (_along(weight.zero, to, mesh),)
    halved = weight.codes.ndim - weight.outputs - 1 if weight.bits == 4 else None
    codes = jax.shard_map(
        functools.partial(_unpacked_local, halved=halved), mesh=mesh,
        in_specs=(to, *(jax.typeof(part).sharding.spec for part in zero)), out_specs=to,
        check_vma=False,
    )(codes, *zero)  # fmt: skip
    return Quantized(codes, scale.astype(jnp.float32), jnp.dtype(dtype))


def _along(part: jax.Array, to: PartitionSpec, mesh: Any) -> jax.Array:
    """Scales or zero points of groups, split as their codes: repeated where one is of several
    devices."""
    entries = []
    # First whole over the axes that `to` leaves out: one exchange at a time.
    kept = sharding.used_axes(to)
    own = jax.typeof(part).sharding.spec
    gone = [axis for axis in sharding.used_axes(own) if axis not in kept]
    part = jax.sharding.reshard(part, sharding.without(own, gone))
    for dim, entry in enumerate(to.partitions):
        ways, size = sharding.ways(mesh, entry), part.shape[dim]
        times = math.lcm(size, ways) // size
        if size == 1 or ways == 1:
            entries.append(None if size == 1 else entry)
            continue
        if times > 1:
            part = jnp.repeat(part, times, axis=dim)
        entries.append(entry)
    return jax.sharding.reshard(part, PartitionSpec(*entries))


def _unpacked_local(codes: jax.Array, *zero: jax.Array, halved: int | None) -> jax.Array:
    """Codes less their zero: int8, or int16 where these have 8 bits and zero points."""
    numbers = codes.astype(jnp.int8)
    if halved is not None:
        pair = jnp.stack([codes & 15, codes >> 4], axis=halved + 1).astype(jnp.int8)
        shape = list(codes.shape)
        shape[halved] *= 2
        numbers = pair.reshape(shape)
    elif zero:
        numbers = numbers.astype(jnp.int16)
    for part in zero:
        sizes = part.shape
        blocks = quantized.in_blocks(numbers, sizes)
        taken = part.astype(numbers.dtype).reshape([n for num in sizes for n in (num, 1)])
        return (blocks - taken).reshape(numbers.shape)
    return numbers if halved is None else numbers - jnp.int8(8)


def plain(weight: Any, dtype: jnp.dtype) -> jax.Array:
    """A weight of one layer as an array: what is packed in `dtype`, whole over batch axes."""
    if not is_packed(weight):
        return weight
    return quantized.dequantized(whole(weight, dtype, sharding.TOKEN_AXES))


def shape_of(weight: Packed) -> tuple[int, ...]:
    """Of the weight that it stands for."""
    shape, last = list(weight.codes.shape), len(weight.codes.shape) - weight.outputs - 1
    shape[last] *= 8 // weight.bits
    return tuple(shape)


def inputs_of(weight: Packed, lead: int = 1) -> tuple[int, int]:
    """How many numbers a product contracts, and how many groups these are; `lead`: dimensions that
    count stacked weights."""
    end = len(weight.scale.shape) - weight.outputs
    return math.prod(shape_of(weight)[lead:end]), math.prod(weight.scale.shape[lead:end])


def codes_of(weight: Packed) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """The reverse of `pack`, of one layer, in NumPy: codes [I, O] from 0 on, int32; scales and zero
    points [G, O], fp32 and int32, the latter None where there are none."""
    made = weight.codes.shape[weight.codes.ndim - weight.outputs :]
    rows = lambda array: np.asarray(array).reshape(-1, math.prod(made))  # noqa: E731
    codes, middle = rows(weight.codes).astype(np.int32), 128
    if weight.bits == 4:
        codes, middle = np.stack([codes & 15, codes >> 4], axis=1).reshape(-1, codes.shape[1]), 0
    zero = None if weight.zero is None else rows(weight.zero).astype(np.int32) + middle
    return codes + middle, rows(weight.scale).astype(np.float32), zero
