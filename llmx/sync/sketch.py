"""The norm of a sum over replicas that nobody computes, from a count sketch of a few KB.

Momentum in signs never shows the gradient of the global batch, but clipping and the guard want its
norm. A sketch is linear: each number is given a random sign and added to one of K = 2,048 numbers,
the sketches of all devices are summed, and the sum of their squares is an unbiased estimate of the
squared norm of the sum. Its standard deviation is sqrt(2 / K) = 3% of it, 1.6% of the norm, where
the gradient is spread over the K numbers (Charikar et al. 2002; as a norm: Alon et al. 1996).

Signs and places are functions of a coordinate in the whole tensor: however a replica is split, the
result is the same, except for rounding.
"""

import math
import zlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from llmx import sharding
from llmx.sync.replicas import AXIS, Replicas

WIDTH = 2048  # K, numbers of a sketch: 8 KiB
_CELLS = 32  # K times as many numbers as a tensor is folded to before each finds its place


def norm_of_sum(replicas: Replicas, terms: dict[str, jax.Array]) -> jax.Array:
    """An estimate of |sum over replicas of their terms|, fp32 [].

    Args:
      replicas: on a mesh.
      terms: of each replica, [n, ...] by name, as `Replicas.shares` has them.

    Communicates over all axes of the mesh: an all-to-all of K numbers and a sum of one.
    """
    axes = tuple(replicas.mesh.axis_names)
    devices = math.prod(replicas.mesh.shape.values())

    def region(terms):
        total = jnp.zeros(WIDTH, jnp.float32)
        for name, term in terms.items():
            total = total + _of_shard(replicas, name, term[0])
        parts = jnp.pad(total, (0, -WIDTH % devices)).reshape(devices, -1)
        # Compilers make an all-reduce, twice the bytes, of a small reduce-scatter.
        own = jax.lax.all_to_all(parts, axes, 0, 0, tiled=True).sum(0)
        return jnp.sqrt(jax.lax.psum(jnp.sum(jnp.square(own)), axes))

    return replicas.region(
        region, in_specs=(replicas.stacked_specs,), out_specs=jax.sharding.PartitionSpec()
    )(terms)


def _of_shard(replicas: Replicas, name: str, shard: jax.Array) -> jax.Array:
    """What a device's shard of a tensor adds to the sketch, [K]."""
    mesh, entries = replicas.mesh, replicas.entries(name)
    over = {axis for entry in entries for axis in sharding.mesh_axes(entry)}
    # Devices with the same shard count once.
    first = jnp.bool_(True)
    for axis in mesh.axis_names:  # in their order: all processes must build the same program
        if axis != AXIS and axis not in over:
            first &= jax.lax.axis_index(axis) == 0
    seed = zlib.crc32(name.encode())
    firsts = [
        _index(mesh, entry) * dim if sharding.mesh_axes(entry) else 0
        for dim, entry in zip(shard.shape, entries, strict=True)
    ]
    fine, classes = _folds(replicas.shape(name))
    folded = shard.astype(jnp.float32) * _signs(shard.shape, firsts, seed)
    for dim, begin in enumerate(firsts):
        folded = _folded(folded, dim, begin, fine[dim] * classes[dim])
    return jnp.where(first, _placed(folded, fine, classes, seed), 0)


def _index(mesh, entry) -> jax.Array:
    """Which part of a dimension a device has."""
    index = jnp.int32(0)
    for axis in sharding.mesh_axes(entry):
        index = index * mesh.shape[axis] + jax.lax.axis_index(axis)
    return index


def _folds(shape: Sequence[int]) -> tuple[list[int], list[int]]:
    """How a tensor is folded, by its dimensions: (numbers that lie side by side in the sketch, at
    most K of them; classes of such, each of which has a place of its own).

    Powers of two, from the last dimension on: what is in one row does not collide with itself.
    """
    fine, classes, ndim = [1] * len(shape), [1] * len(shape), len(shape)
    for folds, most in ((fine, WIDTH), (classes, _CELLS)):
        for dim in reversed(range(ndim)):
            while fine[dim] * classes[dim] < shape[dim] and 2 * math.prod(folds) <= most:
                folds[dim] *= 2
    return fine, classes


def _placed(folded: jax.Array, fine: list[int], classes: list[int], seed: int) -> jax.Array:
    """The sketch [K] of a folded tensor: each class is rotated to its own place."""
    ndim = folded.ndim
    split = [size for pair in zip(classes, fine, strict=True) for size in pair]
    order = [*range(0, 2 * ndim, 2), *range(1, 2 * ndim, 2)]
    num = math.prod(classes)
    rows = folded.reshape(split).transpose(order).reshape(num, -1)
    rows = jnp.pad(rows, ((0, 0), (0, WIDTH - rows.shape[1])))
    shifts = np.random.default_rng(seed).integers(0, WIDTH, (num, 1))
    return jnp.take_along_axis(rows, (np.arange(WIDTH) - shifts) % WIDTH, axis=1).sum(0)


def _folded(array: jax.Array, dim: int, begin, fold: int) -> jax.Array:
    """Sums over the indices i of a dimension with the same (begin + i) mod `fold`."""
    pads = [(0, 0)] * array.ndim
    pads[dim] = (0, -array.shape[dim] % fold)
    array = jnp.pad(array, pads)
    shape = (*array.shape[:dim], -1, fold, *array.shape[dim + 1 :])
    array = array.reshape(shape).sum(dim)
    return array if isinstance(begin, int) else jnp.roll(array, begin % fold, axis=dim)


def _signs(shape: Sequence[int], firsts, seed: int) -> jax.Array:
    """+1 or -1 for each coordinate of a shard that begins at `firsts`, from a hash of it."""
    mixed = jnp.full((1,) * len(shape), np.uint32(seed))
    for dim, (size, begin) in enumerate(zip(shape, firsts, strict=True)):
        index = jnp.arange(size, dtype=jnp.uint32) + jnp.asarray(begin, jnp.uint32)
        index = index.reshape(*(size if d == dim else 1 for d in range(len(shape))))
        mixed = _mix(mixed ^ (index * np.uint32(0x9E3779B1)))
    return 1 - 2 * (mixed >> 31).astype(jnp.float32)


def _mix(bits: jax.Array) -> jax.Array:
    """MurmurHash3's last step: every bit of the result depends on every bit, uint32."""
    bits = (bits ^ (bits >> 16)) * np.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * np.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)
