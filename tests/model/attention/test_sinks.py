"""Sinks: equal to a softmax with one more score, in every kernel, split and cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from llmx import sharding
from llmx.model import dot
from llmx.model.attention import attend, cache
from llmx.model.attention import split as split_lib
from llmx.model.attention.attend import AttentionConfig
from llmx.model.attention.masks import Mask, Scores

B, T, N, K, H = 2, 128, 4, 2, 8
SCORES = Scores(scale=H**-0.5, window=21)
TOLERANCE = 1e-5  # fp32, of the largest number: sums in another order


def rows() -> tuple[np.ndarray, np.ndarray]:
    """Segments and positions of packed rows."""
    lengths = [[50, 1, 77], [128]]
    segments = [np.repeat(np.arange(len(row)) + 1, row) for row in lengths]
    positions = [np.concatenate([np.arange(n) for n in row]) for row in lengths]
    return np.stack(segments).astype(np.int32), np.stack(positions).astype(np.int32)


def mask() -> Mask:
    segments, positions = map(jnp.asarray, rows())
    return Mask(segments, positions, segments, positions, ahead=0)


def inputs() -> list[np.ndarray]:
    """Query, key, value, sinks of each head, and a gradient of the result."""
    rng = np.random.default_rng(0)
    shapes = ((B, T, N, H), (B, T, K, H), (B, T, K, H), (N,), (B, T, N, H))
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def plain(query, key, value, sinks_N):
    """One more score for each query, whose weight is then left out."""
    key, value = (jnp.repeat(array, N // K, axis=2) for array in (key, value))
    scores_BNTS = jnp.einsum("BTNH,BSNH->BNTS", query, key) * SCORES.scale
    visible = mask().visible(SCORES.window)[:, None]
    scores_BNTS = jnp.where(visible, scores_BNTS, -jnp.inf)
    of_sinks = jnp.broadcast_to(sinks_N[None, :, None, None], (B, N, T, 1))
    weights = jax.nn.softmax(jnp.concatenate([scores_BNTS, of_sinks], axis=-1))
    return jnp.einsum("BNTS,BSNH->BTNH", weights[..., :-1], value)


def value_and_gradients(function):
    *arrays, cotangent = inputs()

    def both(arrays, cotangent):
        out, pull = jax.vjp(function, *arrays)
        return out, *pull(cotangent)

    return jax.device_get(jax.jit(both)(tuple(arrays), cotangent))


@functools.cache
def wanted():
    return value_and_gradients(plain)


def assert_wanted(found) -> None:
    for name, got, want in zip(("value", "query", "key", "value's", "sinks"), found, wanted(),
                               strict=True):  # fmt: skip
        error = np.abs(got - want).max() / np.abs(want).max()
        assert error < TOLERANCE, f"{name}: {error:.1e}"


@pytest.mark.parametrize("implementation", ["reference", "blockwise", "splash", "triton"])
def test_every_kernel(implementation):
    """cuDNN needs a GPU; what it returns is used as that of these is."""
    kernel = attend.IMPLEMENTATIONS[implementation]

    def function(query, key, value, sinks_N):
        sinks_BTN = jnp.broadcast_to(sinks_N, (B, T, N))
        return kernel(query, key, value, mask(), SCORES, sinks_BTN, device_kind="cpu")

    assert_wanted(value_and_gradients(function))


def on_mesh(implementation: str, tensor: int = 1, sequence: int = 1, **keys):
    """`attend.attend` of rows in the order of its split."""
    mesh = sharding.make_mesh(
        dict.fromkeys(sharding.AXES, 1) | dict(tensor=tensor, sequence=sequence),
        devices=jax.devices()[: tensor * sequence],
    )
    place = sharding.Placement(mesh, sharding.make_layout("zero3"))
    config = AttentionConfig(implementation=implementation, **keys)
    to = attend.split_of(config, place)
    move = lambda array, back=False: split_lib.reorder(array, to, mesh, back=back)  # noqa: E731
    put = place.constrain

    def function(query, key, value, sinks_N):
        query, key, value = put(query, attend.QUERY), put(key, attend.KEY), put(value, attend.KEY)
        of_rows = jax.tree.map(lambda array: put(array, attend.QUERY[:2]), mask())
        query, key, value, of_rows = jax.tree.map(move, (query, key, value, of_rows))
        zeros_BTN = put(jnp.zeros((B, T, N)), attend.QUERY[:3])
        out = attend.attend(
            query, key, value, of_rows, SCORES, config=config, place=place,
            sinks_BTN=dot.shifted(zeros_BTN, put(sinks_N, ("heads",))),
        )  # fmt: skip
        return put(move(out, back=True), (None,) * 4)

    with jax.set_mesh(mesh):
        return value_and_gradients(function)


@pytest.mark.parametrize(
    ("implementation", "keys"),
    [
        ("blockwise", dict(tensor=2)), ("blockwise", dict(sequence=4)),
        ("reference", dict(sequence=4, zigzag=False)), ("blockwise", dict(sequence=4, ulysses=4)),
        ("blockwise", dict(sequence=4, ulysses=2, tensor=2)),
    ],
    ids=str,
)  # fmt: skip
def test_split_heads_and_positions(implementation, keys):
    assert_wanted(on_mesh(implementation, **keys))


def test_slots_of_a_cache_that_are_split():
    mesh = sharding.make_mesh({"sequence": 4}, devices=jax.devices()[:4])
    over = cache.attention_over_slots(
        attend.IMPLEMENTATIONS["blockwise"], axes=("sequence",), device_kind="cpu"
    )
    query, key, value, sinks_N, _ = inputs()
    sinks_BTN = jnp.broadcast_to(sinks_N, (B, T, N))
    whole, slots = PartitionSpec(), PartitionSpec(None, "sequence")
    segments, positions = rows()
    attended = jax.shard_map(
        lambda query, key, value, segments, positions, key_segments, key_positions, sinks: over(
            query, key, value, Mask(segments, positions, key_segments, key_positions), SCORES, sinks
        ),
        mesh=mesh, check_vma=False, out_specs=whole,
        in_specs=(whole, slots, slots, whole, whole, slots, slots, whole),
    )  # fmt: skip
    with jax.set_mesh(mesh):
        put = lambda array: jax.device_put(array, jax.NamedSharding(mesh, slots))  # noqa: E731
        key, value, *of_slots = map(put, (key, value, segments, positions))
        out = jax.jit(attended)(query, key, value, segments, positions, *of_slots, sinks_BTN)
    np.testing.assert_allclose(out, wanted()[0], rtol=1e-5, atol=1e-5)
