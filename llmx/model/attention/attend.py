"""Attention of arrays placed on a mesh: which kernel, and how split positions see each other.

`attend` runs a kernel in a fully manual region: batch over the batch axes, heads over `tensor`,
positions over `sequence`, which `context` puts together again by rings and exchanges of heads. A
cache of keys and values may be split over `sequence` too.

Letters: B batch, T query positions, S key/value positions, N query heads, K key/value heads,
H head size.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from llmx import sharding
from llmx.model.attention import split, ulysses
from llmx.model.attention.blockwise import BLOCKWISE
from llmx.model.attention.cudnn import CUDNN
from llmx.model.attention.kernel import Kernel, first_of
from llmx.model.attention.masks import Mask, Scores
from llmx.model.attention.reference import REFERENCE
from llmx.model.attention.splash import SPLASH
from llmx.runtime import launch
from llmx.runtime.bounds import bounded, choice

IMPLEMENTATIONS: dict[str, Kernel] = {
    "reference": REFERENCE,
    "blockwise": BLOCKWISE,
    "splash": SPLASH,
    "cudnn": CUDNN,
}

# What "auto" tries, in this order, by the platform of the mesh.
PREFERRED = {"tpu": ("splash", "blockwise"), "gpu": ("cudnn", "blockwise")}
OTHERWISE = ("blockwise",)


@dataclasses.dataclass
class AttentionConfig:
    """Which implementation of attention, and how split positions see each other."""

    # a name in IMPLEMENTATIONS; auto = the best for the platform
    implementation: str = choice("auto", lambda: ("auto", *IMPLEMENTATIONS))
    # Neighbours on the mesh axis `sequence` that exchange heads (Ulysses); such groups form rings.
    # 1 = one ring, sequence = no ring.
    ulysses: int = bounded(1, at_least=1)
    zigzag: bool = True  # positions are dealt out so that a ring's devices have equal causal work


def candidates(implementation: str, platform: str) -> tuple[str, ...]:
    """The implementations to try, best first."""
    return PREFERRED.get(platform, OTHERWISE) if implementation == "auto" else (implementation,)


def split_of(config: AttentionConfig, place: sharding.Placement) -> split.Split:
    """Which device of `sequence` holds which positions.

    Raises ValueError where `ulysses` does not divide them.
    """
    ways = place.size(sharding.mesh_axes(place.activation(("sequence",))[0]))
    return split.Split(ways, config.ulysses if ways > 1 else 1, config.zigzag)


@functools.cache
def kernel_for(implementation: str, platform: str) -> Kernel:
    """The implementation asked for; "auto" takes the first candidate that can, and says so once."""
    if implementation != "auto":
        return IMPLEMENTATIONS[implementation]
    kernels = {name: IMPLEMENTATIONS[name] for name in candidates(implementation, platform)}
    return first_of(kernels, functools.cache(lambda name: launch.note(f"attention: {name}")))


def attend(
    query_BTNH: Float[Array, "B T N H"],
    key_BSKH: Float[Array, "B S K H"],
    value_BSKH: Float[Array, "B S K H"],
    mask: Mask,
    scores: Scores,
    *,
    config: AttentionConfig,
    place: sharding.Placement,
    keys: str = "sequence",
) -> Float[Array, "B T N H"]:
    """Attention of arrays placed on a mesh.

    `keys` is the logical axis of key positions: "sequence", those of the queries too, or "cache",
    whose slots may be split where queries are whole. Where `place` splits queries, rows lie as
    `split_of` says if `mask.ahead` is 0, and anyhow if it is None. K/V heads may be fewer than
    `tensor`, if the layout keeps them whole: each shard then takes those that its query heads need.

    Communicates over `sequence`: see `context.ring`, `context.ulysses` and `context.parts`.

    Raises ValueError where the implementation asked for cannot do what is asked.
    """
    device = place.mesh.devices.flat[0]
    query = place.activation(("batch", "sequence", "heads", "head_dim"))
    key = place.activation(("batch", keys, "kv_heads", "head_dim"))
    tokens, key_tokens = place.activation(("batch", "sequence")), place.activation(("batch", keys))
    heads = sharding.mesh_axes(query[2])
    pick_heads = bool(heads) and not sharding.mesh_axes(key[2])
    group = query_BTNH.shape[2] // key_BSKH.shape[2]
    kernel = kernel_for(config.implementation, device.platform)
    split_keys = sharding.mesh_axes(key[1])
    if split_keys and not sharding.mesh_axes(query[1]):
        over = ulysses.parts(kernel, axes=split_keys, device_kind=device.device_kind)
    else:
        over = ulysses.attention_over(
            kernel, axis="sequence", split=split_of(config, place),
            device_kind=device.device_kind, apart="stage" in place.local_axes,
        )  # fmt: skip

    def local(query_BTNH, key_BSKH, value_BSKH, mask):
        if pick_heads:
            num = query_BTNH.shape[2]
            first = jax.lax.axis_index(heads) * num // group
            slice_ = (first, max(1, num // group), 2)
            key_BSKH = jax.lax.dynamic_slice_in_dim(key_BSKH, *slice_)
            value_BSKH = jax.lax.dynamic_slice_in_dim(value_BSKH, *slice_)
        return over(query_BTNH, key_BSKH, value_BSKH, mask, scores)

    of_mask = dataclasses.replace(
        mask, segments_BT=tokens, positions_BT=tokens, key_segments_BS=key_tokens,
        key_positions_BS=key_tokens,
    )  # fmt: skip
    try:
        return place.manual(local, in_specs=(query, key, key, of_mask), out_specs=query)(
            query_BTNH, key_BSKH, value_BSKH, mask)  # fmt: skip
    except NotImplementedError as error:
        raise ValueError(
            f"attention.implementation={config.implementation!r} cannot do this: {error}; "
            "use attention.implementation='auto'"
        ) from None


def written(old: Array, new: Array, now: Array | int, *, place: sharding.Placement) -> Array:
    """A cache [B, S, ...] with `new` [B, T, ...] in its slots now..now+T; each device writes those
    that it holds."""
    axes = sharding.mesh_axes(place.activation(("cache",))[0])
    new = new.astype(old.dtype)
    if not axes:
        return jax.lax.dynamic_update_slice_in_dim(old, new, now, axis=1)
    num = new.shape[1]

    def local(old, new, now):
        held = old.shape[1]
        now = now - jax.lax.axis_index(axes) * held
        if num == 1:
            slot = jnp.clip(now, 0, held - 1)
            before = jax.lax.dynamic_slice_in_dim(old, slot, 1, axis=1)
            new = jnp.where(slot == now, new, before)
            return jax.lax.dynamic_update_slice_in_dim(old, new, slot, axis=1)
        row = jnp.arange(held) - now
        inside = ((row >= 0) & (row < num)).reshape(1, held, *(1,) * (old.ndim - 2))
        return jnp.where(inside, new[:, jnp.clip(row, 0, num - 1)], old)

    specs = [jax.typeof(array).sharding.spec for array in (old, new)]
    return jax.shard_map(
        local, mesh=place.mesh, in_specs=(*specs, jax.P()), out_specs=specs[0], check_vma=False
    )(old, new, jnp.asarray(now, jnp.int32))
