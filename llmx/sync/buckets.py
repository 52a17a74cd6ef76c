"""Compressed tensors as bytes, fused into buckets: one message for several tensors.

For use inside a manual region over the mesh axis that the messages cross.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

_BITS = tuple(1 << bit for bit in range(8))


def pack(positive: jax.Array) -> jax.Array:
    """bool [..., 8 k] as uint8 [..., k]."""
    bits = positive.reshape(*positive.shape[:-1], -1, 8)
    return jnp.sum(jnp.where(bits, jnp.array(_BITS, jnp.uint8), jnp.uint8(0)), -1, jnp.uint8)


def unpack(packed: jax.Array) -> jax.Array:
    """uint8 [..., k] as +1 and -1 in fp32 [..., 8 k]."""
    bits = packed[..., None] & jnp.array(_BITS, jnp.uint8)
    signs = jnp.where(bits > 0, jnp.float32(1), jnp.float32(-1))
    return signs.reshape(*packed.shape[:-1], -1)


def fuse(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Indices of the tensors in each message, given their bytes: neighbors up to `limit` bytes.

    A tensor above the limit has a message of its own.
    """
    messages: list[list[int]] = []
    room = 0
    for i, size in enumerate(sizes):
        if not messages or size > room:
            messages.append([])
            room = limit
        messages[-1].append(i)
        room -= size
    return messages


def exchange(
    collective: str, arrays: Sequence[Sequence[jax.Array]], axis: str, limit: int
) -> list[list[jax.Array]]:
    """Sends the arrays of each tensor along a mesh axis of n devices.

    Args:
      collective: "all_to_all", row j of each array [n, ...] to device j; or "all_gather", arrays
        [1, ...] to all devices.
      arrays: by tensor, any dtypes.
      axis: the mesh axis.
      limit: bytes of one device per message; see `fuse`.

    Returns the arrays as they arrive, [n, ...]: row i is from device i.
    """
    flat = [[_to_bytes(array) for array in of_tensor] for of_tensor in arrays]
    sizes = [sum(raw.size for raw in of_tensor) for of_tensor in flat]
    arrived: list[list[jax.Array]] = [[] for _ in arrays]
    for bucket in fuse(sizes, limit):
        message = jnp.concatenate([raw for i in bucket for raw in flat[i]], axis=1)
        if collective == "all_to_all":
            received = jax.lax.all_to_all(message, axis, 0, 0, tiled=True)
        else:
            received = jax.lax.all_gather(message, axis, axis=0, tiled=True)
        offset = 0
        for i in bucket:
            for array, raw in zip(arrays[i], flat[i], strict=True):
                piece = received[:, offset : offset + raw.shape[1]]
                shape = (received.shape[0], *array.shape[1:])
                arrived[i].append(_from_bytes(piece, array.dtype, shape))
                offset += raw.shape[1]
    return arrived


def _to_bytes(array: jax.Array) -> jax.Array:
    """Any array [k, ...] as uint8 [k, bytes]."""
    leading = array.shape[0]
    if array.dtype.itemsize > 1 or array.dtype != jnp.uint8:
        array = jax.lax.bitcast_convert_type(array, jnp.uint8)
    return array.reshape(leading, -1)


def _from_bytes(raw: jax.Array, dtype: jnp.dtype, shape: Sequence[int]) -> jax.Array:
    size = jnp.dtype(dtype).itemsize
    raw = raw.reshape(*shape, size) if size > 1 else raw.reshape(shape)
    return jax.lax.bitcast_convert_type(raw, dtype)
