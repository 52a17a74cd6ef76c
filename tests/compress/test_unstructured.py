"""Pruning after training against plain NumPy, and by the products that it leaves."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmx.compress import unstructured
from llmx.compress.calibration import Layer
from llmx.compress.unstructured import PruneOptions
from llmx.model import apply, families
from llmx.model.observed import Statistics
from llmx.sharding import trees

ROUNDING = 2e-4  # of fp32 sweeps against fp64: the largest difference over the largest weight
NUM_IN, NUM_OUT = 48, 24
MODEL = dict(
    vocab_size=64, vocab_multiple=64, width=16, num_layers=2, num_heads=2, num_kv_heads=2,
    head_dim=8, mlp_dim=32,
)  # fmt: skip


@functools.cache
def drawn(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A weight [I, O] and inputs [tokens, I] that depend on each other, some of them large."""
    generator = np.random.default_rng(seed)
    mixed = generator.standard_normal((NUM_IN, NUM_IN)) * (
        generator.random((NUM_IN, NUM_IN)) < 0.2
    ) + np.eye(NUM_IN)
    inputs = (
        generator.standard_normal((400, NUM_IN)) @ mixed * np.exp(generator.standard_normal(NUM_IN))
    )
    return generator.standard_normal((NUM_IN, NUM_OUT)).astype(np.float32), inputs.astype(
        np.float32
    )


def damped(inputs: np.ndarray) -> np.ndarray:
    gram = inputs.astype("f8").T @ inputs
    return gram + unstructured.DAMPING * np.diagonal(gram).mean() * np.eye(len(gram))


def brain_surgeon(weight, inputs, *, sparsity: float, groups: tuple[int, int] | None, block: int):
    """SparseGPT by its definition, in fp64: weights behind column i make up for it by the inverse
    of the X^T X of columns i, i + 1, ..., which is inverted anew for each."""
    left, gram = weight.T.astype("f8").copy(), damped(inputs)
    inverses = [np.linalg.inv(gram[i:, i:]) for i in range(NUM_IN)]
    scores = lambda columns: left[:, columns] ** 2 / [inverses[i][0, 0] for i in columns]  # noqa: E731
    pruned = np.zeros(left.shape, bool)
    for i in range(NUM_IN):
        if groups is None and i % block == 0:
            columns = range(i, min(i + block, NUM_IN))
            of_block = scores(columns)
            count = math.floor(of_block.size * sparsity)
            order = np.argsort(of_block.reshape(-1), kind="stable")[:count]
            rows, at = np.unravel_index(order, of_block.shape)
            pruned[rows, i + at] = True
        elif groups is not None and i % groups[1] == 0:
            columns = range(i, i + groups[1])
            order = np.argsort(scores(columns), axis=1, kind="stable")[:, : groups[1] - groups[0]]
            np.put_along_axis(pruned, i + order, values=True, axis=1)
        error = np.where(pruned[:, i], left[:, i], 0) / inverses[i][0, 0]
        left[:, i:] -= error[:, None] * inverses[i][0]
        left[pruned[:, i], i] = 0
    return left.T


@pytest.mark.parametrize(
    ("sparsity", "pattern", "block"),
    [(0.5, "", 16), (0.7, "", 128), (0.5, "2:4", 16), (0.5, "4:8", 128)],
)
def test_sparse_gpt(sparsity, pattern, block):
    weight, inputs = drawn()
    options = PruneOptions(method="sparse_gpt", sparsity=sparsity, pattern=pattern)
    gram = inputs.astype("f8").T @ inputs
    found = np.asarray(unstructured.sparse_gpt(jnp.asarray(weight), gram, options, block=block))
    groups = tuple(map(int, pattern.split(":"))) if pattern else None
    wanted = brain_surgeon(weight, inputs, sparsity=sparsity, groups=groups, block=block)
    np.testing.assert_array_equal(found == 0, wanted == 0)
    assert np.abs(found - wanted).max() <= ROUNDING * np.abs(wanted).max()
    share = sum(  # of each block
        math.floor(min(block, NUM_IN - i) * NUM_OUT * sparsity) for i in range(0, NUM_IN, block)
    ) if not pattern else NUM_IN * NUM_OUT // 2  # fmt: skip
    assert (found == 0).sum() == share


def test_an_input_that_is_always_zero():
    weight, inputs = drawn()
    inputs = inputs.copy()
    inputs[:, 5] = 0
    options = PruneOptions(method="sparse_gpt")
    found = unstructured.sparse_gpt(jnp.asarray(weight), inputs.T @ inputs, options)
    assert np.isfinite(found).all() and not found[5].any()


@pytest.mark.parametrize("pattern", ["", "2:4"])
def test_wanda(pattern):
    weight, inputs = drawn()
    squares = np.square(inputs.astype("f8")).sum(0)
    scores = unstructured.wanda_scores(jnp.asarray(weight), jnp.asarray(squares, jnp.float32))
    options = PruneOptions(method="wanda", pattern=pattern)
    kept = np.asarray(unstructured.kept_of_outputs(scores, options))
    for o in range(NUM_OUT):
        wanted = np.abs(weight[:, o]) * np.linalg.norm(inputs.astype("f8"), axis=0)
        for start in range(0, NUM_IN, 4 if pattern else NUM_IN):
            end = start + (4 if pattern else NUM_IN)
            order = np.argsort(wanted[start:end], kind="stable")
            assert set(np.flatnonzero(~kept[start:end, o])) == set(order[: len(order) // 2])


def test_products_are_nearer_the_more_a_method_knows():
    """Of the same inputs: SparseGPT < Wanda < magnitude, in each pattern."""
    for pattern in ("", "2:4"):
        errors = {}
        for method in ("magnitude", "wanda", "sparse_gpt"):
            errors[method] = 0.0
            for seed in range(4):
                weight, inputs = drawn(seed)
                options = PruneOptions(method=method, pattern=pattern, scope="layer")
                if method == "magnitude":
                    of = unstructured._kept_by_magnitude
                    axes = {"w": ("layers", "embed", "mlp")}
                    kept = of({"w": jnp.asarray(weight)[None]}, options, axes)["w"][0]
                    new = np.where(kept, weight, 0)
                else:
                    gram = jnp.asarray(inputs.T @ inputs)
                    new = unstructured._of_weight(jnp.asarray(weight), gram, options, 1)
                assert (np.asarray(new) == 0).mean() == 0.5
                x = inputs.astype("f8")
                change = np.linalg.norm(x @ (new - weight)) / np.linalg.norm(x @ weight)
                errors[method] += change
        assert errors["sparse_gpt"] < 0.9 * errors["wanda"] < 0.8 * errors["magnitude"], errors


def made_params(model):
    generator = np.random.default_rng(1)
    shapes, _ = apply.abstract_parameters(model)
    draw = lambda leaf: generator.standard_normal(leaf.shape).astype(np.float32)  # noqa: E731
    return jax.tree.map(draw, shapes)


def test_a_model_by_magnitude():
    model = families.preset("llama3", **MODEL)
    before = trees.named(params := made_params(model))
    after = trees.named(unstructured.by_magnitude(model, params, PruneOptions(sparsity=0.3)))
    assert before.keys() == after.keys()
    products = [name for name in before if name.endswith("/kernel")]
    assert len(products) == 7 and all(name.startswith("blocks/") for name in products)
    sizes, kept = (
        np.concatenate([np.asarray(of(name)).reshape(-1) for name in products])
        for of in (lambda name: np.abs(before[name]), lambda name: after[name] != 0)
    )
    assert (~kept).sum() == math.floor(0.3 * kept.size)
    assert sizes[~kept].max() < sizes[kept].min()
    for name, leaf in after.items():
        wanted = np.where(leaf != 0, before[name], 0) if name in products else before[name]
        np.testing.assert_array_equal(leaf, wanted)


@pytest.mark.parametrize("method", ["wanda", "sparse_gpt"])
def test_a_layer_by_statistics(method):
    """The products that are named, each by the inputs of its own."""
    model, options = families.preset("llama3", **MODEL), PruneOptions(
        method=method, products=("mlp/up", "attention")
    )  # fmt: skip
    weights = {n: leaf[1] for n, leaf in trees.named(made_params(model)["blocks"]).items()}
    generator, statistics = np.random.default_rng(2), {}
    for name, leaf in weights.items():
        if name.endswith("kernel"):
            size = leaf.shape[0] if "out" not in name else leaf.shape[0] * leaf.shape[1]
            x_TI = generator.standard_normal((100, size)).astype(np.float32)
            statistics[name] = Statistics(x_TI.T @ x_TI, None, None, None)
    changes = unstructured.of_layer(options)(Layer("blocks", 1, weights, statistics))
    assert sorted(changes) == sorted(
        f"{name}/kernel" for name in
        ("attention/key", "attention/out", "attention/query", "attention/value", "mlp/up")
    )  # fmt: skip
    for name, leaf in changes.items():
        flat_IO = weights[name].reshape(len(statistics[name].gram_II), -1)
        gram = statistics[name].gram_II
        if method == "wanda":
            scores = np.abs(flat_IO) * np.sqrt(np.diag(gram))[:, None]
            wanted = np.where(scores > np.median(scores, axis=0), flat_IO, 0)
        else:
            wanted = unstructured.sparse_gpt(jnp.asarray(flat_IO), gram, options)
        np.testing.assert_array_equal(leaf, np.reshape(wanted, weights[name].shape))
        assert np.isclose((np.asarray(leaf) == 0).mean(), 0.5, atol=0.01)


def test_problems():
    model = families.preset("llama3", **MODEL)
    of = lambda **keys: list(unstructured.problems(PruneOptions(**keys), model))  # noqa: E731
    assert of() == of(method="sparse_gpt", pattern="2:4") == []
    assert "must be 'N:M'" in of(pattern="4")[0]
    assert "sums over 16 numbers" in of(pattern="2:32")[0]
    assert "names 'mpl'" in of(products=("mpl",))[0]
    assert "sparsity=1.5" in of(sparsity=1.5)[0]
    mixture = families.preset("mixtral", vocab_size=64)
    (problem,) = unstructured.problems(PruneOptions(method="wanda"), mixture)
    assert "statistics of experts" in problem
