"""Attention: one contract, several implementations, each on one device's shard of batch and heads.

An implementation takes queries, keys and values, a `Mask` and `Scores`, and raises
NotImplementedError for what it does not do ("try the next"). `attend` runs one of them in a fully
manual region: batch over the batch axes, heads over `tensor`, query positions over `sequence` with
keys and values gathered along it.

Letters: B batch, T query positions, S key/value positions, N query heads, K key/value heads,
G = N/K, H head size.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from llmx import remat, sharding
from llmx.kernels import splash as splash_kernel


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mask:
    """Who may see whom: the same document, not the future, and within the window.

    Positions count from 0 within a document, so documents packed into a row are told apart by
    segment. `in_order` promises that queries and keys are the same rows of tokens, and that within
    a document positions count up by one along the row: then rows stand for positions, and kernels
    may skip blocks without looking.
    """

    segments_BT: Int[Array, "B T"]
    positions_BT: Int[Array, "B T"]
    key_segments_BS: Int[Array, "B S"]
    key_positions_BS: Int[Array, "B S"]
    in_order: bool = dataclasses.field(default=False, metadata=dict(static=True))

    def visible(self, window: int) -> Array:
        """bool[B, T, S]; `window` positions back including itself, 0 = all."""
        back_BTS = self.positions_BT[:, :, None] - self.key_positions_BS[:, None, :]
        visible_BTS = self.segments_BT[:, :, None] == self.key_segments_BS[:, None, :]
        visible_BTS &= back_BTS >= 0
        return visible_BTS & (back_BTS < window) if window else visible_BTS


@dataclasses.dataclass(frozen=True)
class Scores:
    """What is done to q.k before the softmax, and how far back it may look."""

    scale: float
    softcap: float = 0.0  # c tanh(score / c), 0 = off
    window: int = 0  # 0 = no limit


def reference(
    query_BTNH: Float[Array, "B T N H"],
    key_BSKH: Float[Array, "B S K H"],
    value_BSKH: Float[Array, "B S K H"],
    mask: Mask,
    scores: Scores,
    *,
    device_kind: str,
) -> Float[Array, "B T N H"]:
    """Attention as it is defined: all scores in fp32, then the softmax (arXiv 1706.03762)."""
    B, T, N, H = query_BTNH.shape
    K = key_BSKH.shape[2]
    query_BTKGH = query_BTNH.reshape(B, T, K, N // K, H)
    scores_BKGTS = jnp.einsum(
        "BTKGH,BSKH->BKGTS", query_BTKGH, key_BSKH, preferred_element_type=jnp.float32
    )
    scores_BKGTS = scores_BKGTS * scores.scale
    if scores.softcap:
        scores_BKGTS = scores.softcap * jnp.tanh(scores_BKGTS / scores.softcap)
    visible_B11TS = mask.visible(scores.window)[:, None, None]
    # A finite floor: a row that sees nothing (an empty cache slot) stays finite.
    scores_BKGTS = jnp.where(visible_B11TS, scores_BKGTS, jnp.finfo(jnp.float32).min)
    weights_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1).astype(value_BSKH.dtype)
    out_BTKGH = jnp.einsum("BKGTS,BSKH->BTKGH", weights_BKGTS, value_BSKH)
    return checkpoint_name(out_BTKGH.reshape(B, T, N, H), remat.ATTENTION)


def splash(
    query_BTNH: Float[Array, "B T N H"],
    key_BSKH: Float[Array, "B S K H"],
    value_BSKH: Float[Array, "B S K H"],
    mask: Mask,
    scores: Scores,
    *,
    device_kind: str,
) -> Float[Array, "B T N H"]:
    """TPU: scores are made a block at a time and never exist whole (`kernels.splash`)."""
    if not device_kind.startswith(("TPU", "cpu")):
        raise NotImplementedError(f"the splash kernel runs on TPUs, not on {device_kind!r}")
    if not mask.in_order:
        raise NotImplementedError("the splash kernel takes rows of tokens in order only")
    return splash_kernel.splash(
        query_BTNH, key_BSKH, value_BSKH, mask.segments_BT,
        scale=scores.scale, softcap=scores.softcap, window=scores.window,
        device_kind=device_kind, residual_name=remat.ATTENTION,
    )  # fmt: skip


# What the backward pass takes of an implementation's results is named `remat.ATTENTION`.
IMPLEMENTATIONS: dict[str, Callable] = {"reference": reference, "splash": splash}

# What "auto" tries, in this order, by the platform of the mesh.
PREFERRED = {"tpu": ("splash", "reference")}
OTHERWISE = ("reference",)


@dataclasses.dataclass
class AttentionConfig:
    """Which implementation of attention."""

    implementation: str = "auto"  # a name in IMPLEMENTATIONS; auto = the best for the platform


def candidates(implementation: str, platform: str) -> tuple[str, ...]:
    """The implementations to try, best first."""
    return PREFERRED.get(platform, OTHERWISE) if implementation == "auto" else (implementation,)


def _first_that_can(implementation: str, device: jax.Device) -> Callable:
    """One function of the attention contract: the first candidate that takes what it is given."""
    names = candidates(implementation, device.platform)

    def run(query_BTNH, key_BSKH, value_BSKH, mask: Mask, scores: Scores):
        refused = []
        for name in names:
            try:
                return IMPLEMENTATIONS[name](
                    query_BTNH, key_BSKH, value_BSKH, mask, scores, device_kind=device.device_kind
                )
            except NotImplementedError as error:
                refused.append(f"{name}: {error}")
        raise ValueError(
            f"attention.implementation={implementation!r} cannot do this: {'; '.join(refused)}; "
            "use attention.implementation='auto'"
        )

    return run


def attend(
    query_BTNH: Float[Array, "B T N H"],
    key_BSKH: Float[Array, "B S K H"],
    value_BSKH: Float[Array, "B S K H"],
    mask: Mask,
    scores: Scores,
    *,
    implementation: str,
    place: sharding.Placement,
) -> Float[Array, "B T N H"]:
    """Attention of arrays placed on a mesh; keys and values are gathered over `sequence`.

    K/V heads may be fewer than `tensor`, if the layout keeps them whole: each shard then takes
    those that its query heads need.

    Raises ValueError where the implementation asked for cannot do what is asked.
    """
    kernel = _first_that_can(implementation, place.mesh.devices.flat[0])
    query = place.activation(("batch", "sequence", "heads", "head_dim"))
    key = place.activation(("batch", None, "kv_heads", "head_dim"))
    tokens, key_tokens = place.activation(("batch", "sequence")), place.activation(("batch", None))
    heads = sharding.mesh_axes(query[2])
    pick_heads = bool(heads) and not sharding.mesh_axes(key[2])
    group = query_BTNH.shape[2] // key_BSKH.shape[2]
    # With positions split, a device's rows no longer line up with all keys.
    in_order = mask.in_order and not sharding.mesh_axes(query[1])
    whole = lambda array, to: sharding.constrain(array, place.mesh, to)  # noqa: E731

    def local(query_BTNH, key_BSKH, value_BSKH, *mask_arrays):
        if pick_heads:
            num = query_BTNH.shape[2]
            first = jax.lax.axis_index(heads) * num // group
            slice_ = (first, max(1, num // group), 2)
            key_BSKH = jax.lax.dynamic_slice_in_dim(key_BSKH, *slice_)
            value_BSKH = jax.lax.dynamic_slice_in_dim(value_BSKH, *slice_)
        return kernel(
            query_BTNH, key_BSKH, value_BSKH, Mask(*mask_arrays, in_order=in_order), scores
        )

    return jax.shard_map(
        local, mesh=place.mesh,
        in_specs=(query, key, key, tokens, tokens, key_tokens, key_tokens), out_specs=query,
        check_vma=False,
    )(
        query_BTNH, whole(key_BSKH, key), whole(value_BSKH, key),
        mask.segments_BT, mask.positions_BT,
        whole(mask.key_segments_BS, key_tokens), whole(mask.key_positions_BS, key_tokens),
    )  # fmt: skip
