"""Models whose rows are split over devices: the same logits, and nothing leaks, on every split."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmx import sharding
from llmx.model import apply, families, precision
from llmx.model import execution as execution_lib
from llmx.model.attention.attend import AttentionConfig

VOCAB, T = 97, 32
FAMILIES = ("gpt2", "llama3", "qwen3", "gemma2", "gemma3")
WINDOW = 4

# (devices of `sequence`, of `tensor`, how attention is split)
SPLITS = {
    "ring4": (4, 1, AttentionConfig(zigzag=False)),
    "zigzag2_tensor2": (2, 2, AttentionConfig()),
    "zigzag4": (4, 1, AttentionConfig()),
    "zigzag8": (8, 1, AttentionConfig()),
    "ulysses4": (4, 1, AttentionConfig(ulysses=4)),
    "zigzag2_ulysses2": (4, 1, AttentionConfig(ulysses=2)),
    "zigzag2_ulysses2_tensor2": (4, 2, AttentionConfig(ulysses=2)),
    "zigzag4_ulysses2": (8, 1, AttentionConfig(ulysses=2)),
}


def config_of(family: str, **changes) -> families.ModelConfig:
    changes = dict(num_layers=2, num_heads=4, num_kv_heads=4, head_dim=8, width=32) | changes
    if family.startswith("gemma"):
        changes = dict(num_layers=3, num_kv_heads=2, window=WINDOW) | changes
        changes["num_layers"] = 3
    return families.preset(family, vocab_size=VOCAB, mlp_dim=48, max_positions=64, **changes)


@functools.cache
def parameters(config_key: tuple):
    config = config_of(config_key[0], **dict(config_key[1:]))
    shapes, axes = apply.abstract_parameters(config)
    noise = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: (0.2 * noise.standard_normal(leaf.shape)).astype(leaf.dtype), shapes
    )
    return apply.Apply(config), params, axes


def execution(split: str, policy: str = "fp32") -> execution_lib.Execution:
    ways, tensor, chosen = SPLITS.get(split, (1, 1, AttentionConfig("reference")))
    mesh = sharding.make_mesh(
        {"sequence": ways, "tensor": tensor}, devices=jax.devices()[: ways * tensor]
    )
    place = sharding.Placement(mesh, sharding.make_layout("zero3", replicate_kv=tensor > 1))
    return execution_lib.Execution(place, precision.POLICIES[policy], attention=chosen)


@dataclasses.dataclass(frozen=True)
class Runner:
    """Logits [rows, T, V] and losses of a model on one split, compiled once."""

    logits: callable
    gradient: callable


@functools.cache
def runner(split: str, config_key: tuple, policy: str = "fp32") -> Runner:
    apply, params, axes = parameters(config_key)
    run = execution(split, policy)
    mesh = run.place.mesh
    to = jax.NamedSharding(mesh, run.place.activation(("batch", "sequence")))
    put = lambda tree: jax.tree.map(lambda a: jax.device_put(jnp.asarray(a), to), tree)  # noqa: E731
    placed = jax.device_put(params, sharding.shardings(params, mesh, run.place.layout, rules=axes))

    def loss(params, batch):
        loss_BT, _ = apply.losses(params, batch, run)
        return jnp.mean(loss_BT), loss_BT

    logits = jax.jit(lambda params, *rows: apply.logits(params, *rows, run))
    gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))

    def with_mesh(function, *arguments):
        with jax.set_mesh(mesh):
            return jax.device_get(function(placed, *arguments))

    return Runner(
        lambda *rows: with_mesh(logits, *put(rows))[..., :VOCAB],
        lambda batch: with_mesh(gradient, put(batch)),
    )


def rows_of(*lengths: int):
    """Tokens, segments and positions [1, T] of a row of packed documents."""
    segments = np.repeat(np.arange(len(lengths)) + 1, lengths)
    positions = np.concatenate([np.arange(length) for length in lengths])
    tokens = np.random.default_rng(1).permutation(VOCAB)[: segments.size]
    return [array[None].astype(np.int32) for array in (tokens, segments, positions)]


def family_grid():
    """Every split with a family, and every family with splits; all pairs are in the parity grid."""
    for i, split in enumerate(SPLITS):
        marks = () if split == "zigzag2_ulysses2_tensor2" else pytest.mark.slow
        yield pytest.param(FAMILIES[(i + 1) % len(FAMILIES)], split, "fp32", marks=marks)
    for family, split in (("llama3", "zigzag4"), ("gemma2", "zigzag2_ulysses2_tensor2")):
        yield pytest.param(family, split, "bf16", marks=pytest.mark.slow)


@pytest.mark.parametrize("family, split, policy", list(family_grid()))
def test_families_equal_one_device(family, split, policy):
    """Losses by position, in the row's own order, and gradients of all parameters."""
    tokens, segments, positions = rows_of(13, 1, 18)
    batch = dict(
        tokens=tokens, targets=np.roll(tokens, -1), segment_ids=segments, positions=positions
    )
    (_, losses), gradients = runner(split, (family,), policy).gradient(batch)
    (_, wanted), want_gradients = runner("one", (family,), "fp32").gradient(batch)
    tolerance = {"fp32": 1e-5, "bf16": 2e-2}[policy]
    np.testing.assert_allclose(losses, wanted, rtol=tolerance, atol=tolerance)
    norm = np.sqrt(sum(np.square(leaf).sum() for leaf in jax.tree.leaves(want_gradients)))
    for path, leaf in jax.tree_util.tree_leaves_with_path(want_gradients):
        got = functools.reduce(lambda tree, key: tree[key.key], path, gradients)
        error = np.linalg.norm(got - leaf)
        # bf16 gradients of small leaves (norms) drown in the rounding of the large.
        scale = np.linalg.norm(leaf) if policy == "fp32" and np.any(leaf) else norm
        assert error <= tolerance * scale, sharding.path_name(path)


@pytest.mark.parametrize(
    "split",
    [
        pytest.param(s, marks=() if s in ("zigzag4", "zigzag2_ulysses2") else pytest.mark.slow)
        for s in SPLITS
    ],
)
def test_nothing_leaks(split):
    """Bit for bit: other documents, the past of a changed token, and what lies beyond the reach of
    all windows together stay as they were; what should change does."""
    tokens, segments, positions = rows_of(13, 1, 18)
    layers = 2
    local = ("gemma2", ("layer_pattern", (families.LOCAL,)), ("num_layers", layers))
    for key, reach in ((("llama3",), T), (local, 3 * (WINDOW - 1))):
        run = runner(split, key)
        before = run.logits(tokens, segments, positions)[0]
        for changed in (0, 12, 13, 14, 20, T - 1):
            other = tokens.copy()
            other[0, changed] = (other[0, changed] + 1) % VOCAB
            after = run.logits(other, segments, positions)[0]
            slot = np.arange(T)
            may = (segments[0] == segments[0, changed]) & (slot >= changed)
            may &= slot - changed <= reach
            np.testing.assert_array_equal(before[~may], after[~may])
            assert (before[may] != after[may]).any(axis=-1).all()
