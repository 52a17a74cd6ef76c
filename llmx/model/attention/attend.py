"""Attention of arrays placed on a mesh: chooses the kernel, and how split positions see each other.

`attend` runs a kernel in a fully manual region: the batch is split over the batch axes, heads over
`tensor`, positions and cache slots over `sequence`, where devices form rings and exchange heads.

Letters: B batch, T query positions, S key/value positions, N query heads, K key/value heads,
H head size.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
from jaxtyping import Array, Float

from llmx import sharding
from llmx.model.attention import cache, ring, ulysses
from llmx.model.attention.blockwise import BLOCKWISE
from llmx.model.attention.cudnn import CUDNN
from llmx.model.attention.kernel import Kernel, first_of
from llmx.model.attention.masks import Mask, Scores
from llmx.model.attention.reference import REFERENCE
from llmx.model.attention.splash import SPLASH
from llmx.model.attention.split import Split
from llmx.model.attention.triton import TRITON
from llmx.runtime import launch
from llmx.runtime.bounds import bounded, choice, plain
from llmx.sharding.mesh import kind_of

IMPLEMENTATIONS: dict[str, Kernel] = {
    "reference": REFERENCE, "blockwise": BLOCKWISE, "splash": SPLASH, "cudnn": CUDNN,
    "triton": TRITON,
}  # fmt: skip
# What "auto" tries, in this order, by the platform of the mesh; blockwise alone on others.
PREFERRED = {"tpu": ("splash", "blockwise"), "gpu": ("cudnn", "triton", "blockwise")}
# Where others than all run; on the CPU they are interpreted, for tests.
RUNS_ON = {"splash": ("tpu", "cpu"), "cudnn": ("gpu",), "triton": ("gpu", "cpu")}
# What it costs that those before it in PREFERRED do not support the inputs.
COSTS = {
    "triton": "1.3 times cuDNN's time for one document of 2,048 tokens on an H200, "
    "less for short ones",
    "blockwise": "several times slower in training, because its scores go through memory",
}

# Logical axes of queries, keys and values.
QUERY = ("batch", "sequence", "heads", "head_dim")
KEY = ("batch", "sequence", "kv_heads", "head_dim")


_SPLIT = {"mesh.sequence": {"not": (1,)}}  # what keys need that say how positions are split


@dataclasses.dataclass
class AttentionConfig:
    """Which implementation of attention, and how split positions see each other."""

    # a name in IMPLEMENTATIONS; auto = the best for the platform
    implementation: str = choice("auto", lambda: ("auto", *IMPLEMENTATIONS))
    # Neighbours on the mesh axis `sequence` that exchange heads (Ulysses); such groups form rings.
    # 1 = one ring, sequence = no ring.
    ulysses: int = bounded(1, at_least=1, needs=_SPLIT)
    # the devices of a ring hold positions with equal causal work
    zigzag: bool = plain(True, needs=_SPLIT)


def candidates(implementation: str, platform: str) -> tuple[str, ...]:
    """The implementations to try, best first."""
    preferred = PREFERRED.get(platform, ("blockwise",))
    return preferred if implementation == "auto" else (implementation,)


class Unsupported(ValueError):
    """The configured implementation does not take arrays of these shapes or dtypes."""


def refusal(implementation: str, platform: str) -> str:
    """Why an implementation does not run on a platform of jax, with the remedy; "" if it does."""
    platform = platform if platform in ("cpu", "tpu") else "gpu"
    runs_on = RUNS_ON.get(implementation, (platform,))
    if platform in runs_on:
        return ""
    good = [name for name in IMPLEMENTATIONS if platform in RUNS_ON.get(name, (platform,))]
    return (
        f"attention.implementation={implementation!r} runs on {' and '.join(runs_on)}, not on "
        f"{platform}: use 'auto', or one of {good}"
    )


def split_of(config: AttentionConfig, place: sharding.Placement) -> Split:
    """Which device of `sequence` holds which positions; ValueError if `ulysses` does not divide."""
    ways = place.size(sharding.mesh_axes(place.activation(("sequence",))[0]))
    return Split(ways, config.ulysses if ways > 1 else 1, config.zigzag)


@functools.cache
def kernel_for(implementation: str, platform: str) -> Kernel:
    """That implementation; "auto": the first candidate that supports its inputs, printed once."""
    if implementation != "auto":
        return IMPLEMENTATIONS[implementation]
    kernels = {name: IMPLEMENTATIONS[name] for name in candidates(implementation, platform)}
    noted = set()

    def note(name: str, refusals: list[str]) -> None:
        if name not in noted:
            noted.add(name)
            launch.note(choice_text(name, refusals))

    return first_of(kernels, note)


def choice_text(name: str, refusals: list[str]) -> str:
    """What "auto" chose, and why not what is better: `refusals`, each a name and its reason."""
    reasons = "; ".join([COSTS.get(name, ""), *refusals] if refusals else [])
    return f"attention: {name}" + (f" ({reasons})" if reasons else "")


def attention_over(
    kernel: Kernel, *, axis: str, split: Split, device_kind: str, independent: bool = False
) -> Callable[..., Array]:
    """Attention, in a manual region, over positions split over mesh axis `axis` as `split` says.

    The function takes this device's query, key, value, mask, scores and sinks, as a `Kernel` does.
    `independent`, and what it communicates: see `ring.ring` and `ulysses.ulysses`.
    """
    attend = functools.partial(kernel, device_kind=device_kind)
    if split.rings > 1:
        attend = ring.ring(
            kernel, axis=axis, split=split, device_kind=device_kind, independent=independent
        )
    return ulysses.ulysses(attend, axis=axis, split=split)


def attend(
    query_BTNH: Float[Array, "B T N H"],
    key_BSKH: Float[Array, "B S K H"],
    value_BSKH: Float[Array, "B S K H"],
    mask: Mask, scores: Scores, *,
    config: AttentionConfig, place: sharding.Placement, keys: str = "sequence",
    sinks_BTN: Float[Array, "B T N"] | None = None, kv_heads: str | None = KEY[2],
) -> Float[Array, "B T N H"]:  # fmt: skip
    """Attention of arrays placed on a mesh.

    `kv_heads` is the logical axis of key/value heads, None where there is one that all queries
    share. `keys` is the logical axis of key positions: "sequence", as of the queries, or "cache",
    whose slots may be split where queries are whole. Where `place` splits queries and `mask.ahead`
    is 0, rows are in the order of `split_of`. K/V heads may be fewer than `tensor` if the layout
    keeps them whole: each device then takes those that its query heads need. `sinks_BTN`, fp32,
    placed as the queries: see `sinks`.

    Communicates over `sequence`: see `attention_over` and `cache.attention_over_slots`.

    Raises Unsupported where the configured implementation does not support the inputs.
    """
    device = kind_of(place.mesh)
    query, key = place.activation(QUERY), place.activation((KEY[0], keys, kv_heads, KEY[3]))
    kernel = kernel_for(config.implementation, device.platform)
    split_keys = sharding.mesh_axes(key[1])
    if split_keys and not sharding.mesh_axes(query[1]):
        over = cache.attention_over_slots(kernel, axes=split_keys, device_kind=device.device_kind)
    else:
        over = attention_over(
            kernel, axis="sequence", split=split_of(config, place),
            device_kind=device.device_kind, independent="stage" in place.local_axes,
        )  # fmt: skip
    heads = sharding.mesh_axes(query[2])
    pick_heads = bool(heads) and not sharding.mesh_axes(key[2])
    group = query_BTNH.shape[2] // key_BSKH.shape[2]

    def local(query_BTNH, key_BSKH, value_BSKH, mask, sinks_BTN):
        if pick_heads:
            num = query_BTNH.shape[2]
            mine = (jax.lax.axis_index(heads) * num // group, max(1, num // group), 2)
            key_BSKH = jax.lax.dynamic_slice_in_dim(key_BSKH, *mine)
            value_BSKH = jax.lax.dynamic_slice_in_dim(value_BSKH, *mine)
        return over(query_BTNH, key_BSKH, value_BSKH, mask, scores, sinks_BTN)

    tokens, slots = place.activation(QUERY[:2]), place.activation((KEY[0], keys))
    mask_specs = Mask(tokens, tokens, slots, slots, mask.ahead, mask.one_document)
    of_sinks = None if sinks_BTN is None else place.activation(QUERY[:3])
    region = place.manual(local, in_specs=(query, key, key, mask_specs, of_sinks), out_specs=query)
    try:
        return region(query_BTNH, key_BSKH, value_BSKH, mask, sinks_BTN)
    except NotImplementedError as error:
        raise Unsupported(
            f"attention.implementation={config.implementation!r} cannot do this: {error}; "
            "use attention.implementation='auto'"
        ) from None
