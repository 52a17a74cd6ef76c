"""The key/value cache of decoding, whose slots may be split over `sequence`.

It keeps numbers in the compute dtype, or as int8 with a scale for each token and head: the largest
magnitude of the head's numbers over 127, rounded to nearest. Attention reads them in the compute
dtype again, a layer at a time.

Letters: B batch, T new tokens, S cache slots, N query heads, K key/value heads, H head size.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from llmx import sharding
from llmx.model import quantized
from llmx.model.attention import sinks
from llmx.model.attention.kernel import Kernel
from llmx.model.attention.masks import Mask, Scores
from llmx.model.families import ModelConfig

# Logical axes of the keys and of the values of all layers; and of latent attention, of latents and
# rotated keys.
CACHE = ("layers", "batch", "cache", "kv_heads", "head_dim")
LATENTS = ("layers", "batch", "cache", "latent")


def arrays_of(model: ModelConfig) -> tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]:
    """What a layer keeps of a position: of two arrays, the logical axes with those before, and the
    sizes behind the slots."""
    if model.kv_latent:
        return (LATENTS, (model.kv_latent,)), (LATENTS, (model.rope_dim,))
    return ((CACHE, (model.num_kv_heads, model.head_dim)),) * 2


INT8 = "int8"
FORMATS = ("", INT8)  # "" = the compute dtype


class Int8(NamedTuple):
    """Slots as integers times scales."""

    codes: Array  # int8 [..., S, ..., H]
    scale: Array  # fp32 [..., S, ...]: one for each token and head


def empty_slots(
    axes: Sequence[str], shape: Sequence[int], *, kind: str, dtype: jnp.dtype,
    place: sharding.Placement,
) -> Array | Int8:  # fmt: skip
    """Zeros of this shape, placed by its logical axes; `kind`: one of `FORMATS`."""
    zeros = lambda axes, shape, dtype: place.constrain(jnp.zeros(shape, dtype), axes)  # noqa: E731
    if not kind:
        return zeros(axes, shape, dtype)
    codes = zeros(axes, shape, quantized.INT8.dtype)
    return Int8(codes, zeros(axes[:-1], shape[:-1], jnp.float32))


def bytes_per_token(model: ModelConfig, kind: str, dtype: jnp.dtype) -> int:
    """What all layers keep of a token of a row, of each time that it goes through them."""
    found = 0
    for _, sizes in arrays_of(model):
        *heads, last = sizes
        of_head = last + jnp.dtype(jnp.float32).itemsize if kind else last * dtype.itemsize
        found += math.prod(heads) * of_head
    return model.num_layers * model.repeats * found


def read_slots(kept: Array | Int8, dtype: jnp.dtype) -> Array:
    """What attention sees of the cache, in the compute dtype."""
    if not isinstance(kept, Int8):
        return kept
    return (kept.codes.astype(jnp.float32) * kept.scale[..., None]).astype(dtype)


def _rounded(new: Array) -> Int8:
    """Each token's numbers of a head, with a scale of their own."""
    new, form = new.astype(jnp.float32), quantized.INT8
    scale = form.scale(jnp.abs(new).max(axis=-1))
    return Int8(form.codes(new / scale[..., None]), scale)


def slot_axes(place: sharding.Placement) -> tuple[str, ...]:
    """The mesh axes that split the slots."""
    return sharding.mesh_axes(place.activation(("cache",))[0])


def write_slots(
    old: Array | Int8, new: Array, start: Array | int, *, place: sharding.Placement
) -> Array | Int8:
    """A cache [B, S, ...] with `new` [B, T, ...] in its slots start..start+T.

    Each device writes the slots that it holds; nothing is communicated.
    """
    if isinstance(old, Int8):
        pairs = zip(old, _rounded(new), strict=True)
        return Int8(*(write_slots(*pair, start, place=place) for pair in pairs))
    axes = slot_axes(place)
    new = new.astype(old.dtype)
    if not axes:
        return jax.lax.dynamic_update_slice_in_dim(old, new, start, axis=1)
    num = new.shape[1]

    def local(old, new, start):
        held = old.shape[1]
        start = start - jax.lax.axis_index(axes) * held
        if num == 1:
            slot = jnp.clip(start, 0, held - 1)
            before = jax.lax.dynamic_slice_in_dim(old, slot, 1, axis=1)
            new = jnp.where(slot == start, new, before)
            return jax.lax.dynamic_update_slice_in_dim(old, new, slot, axis=1)
        row = jnp.arange(held) - start
        inside = ((row >= 0) & (row < num)).reshape(1, held, *(1,) * (old.ndim - 2))
        return jnp.where(inside, new[:, jnp.clip(row, 0, num - 1)], old)

    specs = [jax.typeof(array).sharding.spec for array in (old, new)]
    return jax.shard_map(
        local, mesh=place.mesh, in_specs=(*specs, jax.P()), out_specs=specs[0], check_vma=False
    )(old, new, jnp.asarray(start, jnp.int32))


def attention_over_slots(kernel: Kernel, *, axes: tuple[str, ...], device_kind: str) -> Callable:
    """Attention, in a manual region, of whole queries to keys that are split over mesh axes `axes`.

    Returns what `attend.attention_over` does. Each device's part of the result is weighted by its
    log-sum-exp. Communicates: a maximum [B, N, T], and sums of that size and of the result.
    """

    def attend(query_BTNH, key_BSKH, value_BSKH, mask: Mask, scores: Scores, sinks_BTN=None):
        out, lse = kernel.forward(
            query_BTNH, key_BSKH, value_BSKH, mask, scores, device_kind=device_kind
        )
        top = jax.lax.pmax(lse, axes)
        weight = jnp.exp(lse - top)
        total = jax.lax.psum(weight, axes)
        share = weight / total
        out = jax.lax.psum(share.swapaxes(1, 2)[..., None] * out, axes)
        out, _ = sinks.joined(out, top + jnp.log(total), sinks_BTN)
        return out.astype(query_BTNH.dtype)

    return attend
