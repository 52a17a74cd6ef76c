"""Masks from scores: exactly as many as are wanted, on any mesh, and nothing is gathered."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from llmx import sharding
from llmx.model import sparsity

SHAPES = {"a": (3, 8, 4), "b": (2, 4, 8, 2)}
FILLED = {"a": np.array([True, False, True]), "b": np.ones(2, bool)}


def drawn(seed: int, *, ties: bool) -> dict[str, np.ndarray]:
    """Weights by name; with `ties` few different sizes, and many zeros."""
    generator = np.random.default_rng(seed)
    made = lambda shape: generator.standard_normal(shape).astype(np.float32)  # noqa: E731
    if ties:
        made = lambda shape: generator.integers(-2, 3, shape).astype(np.float32)  # noqa: E731
    return {name: made(shape) for name, shape in SHAPES.items()}


def smallest(weights: dict[str, np.ndarray], count: int) -> dict[str, np.ndarray]:
    """Masks by a stable sort of all filled rows together."""
    places = [(n, i) for n, w in weights.items() for i in range(len(w)) if FILLED[n][i]]
    sizes = np.concatenate([np.abs(weights[n][i]).reshape(-1) for n, i in places])
    kept = np.ones(sizes.size, bool)
    kept[np.argsort(sizes, kind="stable")[:count]] = False
    masks = {name: np.ones(w.shape, bool) for name, w in weights.items()}
    for n, i in places:
        size = weights[n][i].size
        masks[n][i], kept = kept[:size].reshape(weights[n][i].shape), kept[size:]
    return masks


def keys_of(weights):
    return {n: functools.partial(sparsity.magnitude_keys, leaf) for n, leaf in weights.items()}


def of_all(weights, high, low):
    return sparsity.smallest_of_all(keys_of(weights), FILLED, sparsity.Goal(high, low))


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("count", [0, 1, 77, 151, 191, 192])
def test_the_smallest_of_all(count, ties):
    weights = drawn(count, ties=ties)
    goal = map(jnp.uint32, sparsity.goal(count))
    found, wanted = jax.jit(of_all)(weights, *goal), smallest(weights, count)
    for name, mask in wanted.items():
        np.testing.assert_array_equal(found[name], mask, err_msg=name)
    assert sum(int((~mask).sum()) for mask in wanted.values()) == count


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_the_smallest_of_each_layer(ties):
    weights, shares = drawn(5, ties=ties), {"a": 17, "b": 40}
    goals = {name: jnp.uint32(share) for name, share in shares.items()}
    found = sparsity.smallest_of_each(keys_of(weights), FILLED, goals)
    for name, w in weights.items():
        for row, layer in enumerate(w):
            kept = np.ones(layer.size, bool)
            order = np.argsort(np.abs(layer).reshape(-1), kind="stable")
            kept[order[: shares[name] * FILLED[name][row]]] = False
            np.testing.assert_array_equal(found[name][row], kept.reshape(layer.shape))


def test_what_is_pruned_is_pruned_first():
    """Also where other weights are zero, so that the count stays exact."""
    weights = drawn(1, ties=True)
    masks = {name: np.abs(w) < 2 for name, w in weights.items()}  # the largest are pruned
    already = sum(int((~masks[n])[FILLED[n]].sum()) for n in masks)

    def key_of(name):
        return lambda zero: sparsity.of_kept(
            sparsity.magnitude_keys(weights[name], zero), masks[name]
        )

    keys = {name: key_of(name) for name in weights}
    goal = sparsity.Goal(*map(jnp.uint32, sparsity.goal(already + 9)))
    found = sparsity.smallest_of_all(keys, FILLED, goal)
    both = {name: np.asarray(mask) & masks[name] for name, mask in found.items()}
    pruned = sum(int((~both[n])[FILLED[n]].sum()) for n in both)
    assert pruned == already + 9


def test_keys_are_in_the_order_of_scores():
    values = np.array([-np.inf, -3e38, -1.0, -1e-38, 0.0, 1e-38, 1e-5, 1.0, 3e38, np.inf], "f4")
    keys = np.asarray(sparsity.signed_keys(values))
    assert (np.diff(keys.astype(np.int64)) > 0).all() and keys[0] > sparsity.PRUNED
    assert sparsity.signed_keys(np.float32(-0.0)) == sparsity.signed_keys(np.float32(0.0))
    sizes = np.asarray(sparsity.magnitude_keys(values))
    assert (np.argsort(sizes, kind="stable") == np.argsort(np.abs(values), kind="stable")).all()
    assert sizes.min() > sparsity.PRUNED
    assert sparsity.magnitude_keys(np.float32(np.nan)) > sizes.max()


def test_counts_beyond_32_bits():
    """A model has more weights than a number of 32 bits counts."""
    counts = [3_000_000_000, 2_999_999_999, 12_345]
    total = sparsity._total(jnp.array(counts, jnp.uint32))
    assert tuple(map(int, total)) == sparsity.goal(sum(counts))
    left = sparsity._minus(total, sparsity.Goal(*map(jnp.uint32, sparsity.goal(counts[0]))))
    assert tuple(map(int, left)) == sparsity.goal(sum(counts[1:]))
    one_more = sparsity.Goal(*map(jnp.uint32, sparsity.goal(sum(counts) + 1)))
    assert sparsity._at_most(total, one_more) and not sparsity._at_most(one_more, total)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize(("kept", "size"), [(2, 4), (1, 4), (3, 8)])
def test_n_of_m(dim, kept, size):
    weights = np.random.default_rng(dim).integers(-3, 4, (8, 16, 8)).astype(np.float32)
    found = sparsity.largest_of_groups(sparsity.magnitude_keys(weights), dim, kept, size)
    lines = np.moveaxis(np.abs(weights), dim, -1).reshape(-1, size)
    wanted = np.zeros(lines.shape, bool)
    for line, mask in zip(lines, wanted, strict=True):
        mask[np.argsort(line, kind="stable")[size - kept :]] = True
    shape = np.moveaxis(weights, dim, -1).shape
    np.testing.assert_array_equal(found, np.moveaxis(wanted.reshape(shape), -1, dim))


def test_a_split_tree_gives_the_same_masks_and_gathers_nothing():
    mesh = sharding.make_mesh({"fsdp": 2, "tensor": 4}, devices=jax.devices()[:8])
    specs = {"a": P(None, "fsdp", "tensor"), "b": P(None, "tensor", "fsdp", None)}
    weights, count = drawn(3, ties=True), 100
    to = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    with jax.set_mesh(mesh):
        choose = jax.jit(jax.sharding.auto_axes(of_all, out_sharding=to))
        split = jax.device_put(weights, to)
        goal = tuple(map(np.uint32, sparsity.goal(count)))
        compiled = choose.lower(split, *goal).compile()
        found = compiled(split, *goal)
    for name, mask in smallest(weights, count).items():
        np.testing.assert_array_equal(found[name], mask)
        assert found[name].sharding.spec == specs[name]
    text = compiled.as_text()
    assert "all-reduce" in text
    exchanged = re.findall(r"= (\S+) (?:all-gather|all-to-all|collective-permute)\(", text)
    assert not exchanged, exchanged
    sums = re.findall(r"= \(?u32\[(\d*)\]\S* all-reduce\(", text)
    assert sums and all(int(size or 1) <= 5 for size in sums), sums


def test_what_a_product_sums_over():
    of = sparsity.contracted_dim
    assert of(("layers", "embed", "heads", "head_dim")) == 1
    assert of(("layers", "heads", "head_dim", "embed")) == 2
    assert of(("layers", "mlp", "embed")) == 1
    assert of(("layers", "experts", "embed", "mlp")) == 2
    assert of(("layers", "experts", "mlp", "embed")) == 2
