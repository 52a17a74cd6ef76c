"""The norm of a sum over replicas from a sketch of it, which clipping and the guard look at."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support import runs
from support.plain_replicas import BATCH, WARMUP, batches, make_recipe

from llmx import sharding
from llmx.contract import State
from llmx.sync import replicas as replicas_lib
from llmx.sync import sketch
from llmx.sync.compressors import COMPRESSORS
from llmx.sync.config import SyncConfig
from llmx.sync.replicas import COMPRESSED, LOCAL

CLOSE = 0.05  # of the norm: three standard deviations of a sketch of 2,048 numbers
ROUNDING = 1e-5  # relative: fp32 sums in another order

SHAPES = {
    "blocks/w": ((4, 48, 96), ("layers", "embed", "mlp")),
    "blocks/q": ((4, 32, 6, 24), ("layers", "embed", "heads", "head_dim")),
    "matrix": ((264, 48), ("vocab", "embed")),
    "norm": ((7,), ("norm",)),
}
SPLITS = {
    "whole": {},
    "rows": {"blocks/w": ("fsdp",), "matrix": ("fsdp",)},
    "columns": {"blocks/w": (None, "fsdp", "tensor"), "matrix": (None, ("fsdp", "tensor"))},
    "heads": {"blocks/q": (None, "fsdp", "tensor"), "matrix": ("tensor", "fsdp")},
}


def norm(terms: dict, n: int, sizes: dict, split: str) -> float:
    """`sketch.norm_of_sum` of terms [n, ...] on a mesh."""
    sizes = {"data": n, **sizes}
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    mesh = sharding.make_mesh(sizes, devices=devices)
    specs = {
        name: PartitionSpec(*(*entries, *[None] * len(shape))[: len(shape)])
        for name, (shape, _) in SHAPES.items()
        for entries in [SPLITS[split].get(name, ())]
    }
    found = replicas_lib.make(
        SyncConfig("one_bit"), mesh, COMPRESSORS["signs"],
        shapes={name: jax.ShapeDtypeStruct(dims, "float32") for name, (dims, _) in SHAPES.items()},
        axes={name: axes for name, (_, axes) in SHAPES.items()},
        updates={name: NamedSharding(mesh, spec) for name, spec in specs.items()},
    )  # fmt: skip
    with jax.set_mesh(mesh):
        placed = {
            name: jax.device_put(term, NamedSharding(mesh, found.stacked_specs[name]))
            for name, term in terms.items()
        }
        return float(jax.jit(lambda terms: sketch.norm_of_sum(found, terms))(placed))


def drawn(seed: int, n: int, kind: str) -> dict[str, np.ndarray]:
    """Terms of replicas: of independent numbers, of rank one, or in few rows, as embeddings are."""
    random, terms = np.random.default_rng(seed), {}
    for name, (shape, _) in SHAPES.items():
        term = random.normal(size=(n, *shape))
        if kind == "rank one":
            one = (1,) * (len(shape) - 1)
            term = random.normal(size=(n, *shape[:-1], 1)) * random.normal(
                size=(n, *one, shape[-1])
            )
        if kind == "few rows":
            term = term * random.pareto(1.5, size=(1, *shape[:-1], 1))
        terms[name] = term.astype("f4")
    return terms


def exact(terms: dict) -> float:
    return float(np.sqrt(sum(np.sum(np.sum(term, axis=0) ** 2) for term in terms.values())))


@pytest.mark.parametrize("kind", ["independent", "rank one", "few rows"])
@pytest.mark.parametrize("n", [1, 3, 6])
def test_it_is_the_norm_of_the_sum(n, kind):
    """No bias over several draws, and each is near."""
    ratios = [norm(t, n, {}, "whole") / exact(t) for t in (drawn(s, n, kind) for s in range(6))]
    assert np.abs(np.array(ratios) - 1).max() < CLOSE * 1.5, ratios
    assert abs(np.mean(ratios) - 1) < CLOSE / 2


@pytest.mark.parametrize(
    "sizes, split",
    [({"fsdp": 2}, "whole"), ({"fsdp": 2}, "rows"), ({"fsdp": 2, "tensor": 2}, "columns"),
     ({"fsdp": 2, "tensor": 2}, "heads")],
)  # fmt: skip
def test_however_a_replica_is_split_it_is_the_same(sizes, split):
    terms = drawn(0, 2, "independent")
    assert norm(terms, 2, sizes, split) == pytest.approx(norm(terms, 2, {}, "whole"), rel=ROUNDING)


def lone(num: int) -> dict:
    """A batch of which the last of `num` replicas has one token."""
    batch = batches()[0]
    rows = BATCH // num
    weights = batch["weights"].copy()
    weights[(num - 1) * rows :] = 0
    weights[(num - 1) * rows, 0] = 1
    return batch | {"weights": weights}


def first_norm(recipe, phase: str, batch: dict) -> tuple[float, State]:
    """The reported norm of a batch at the first parameters, and the state after it."""
    state = recipe.init(0)
    with jax.set_mesh(recipe.mesh):
        step = runs.make_train_step(recipe, phase)
        state, report = step(state, runs.put_batch(recipe, batch))
    return float(report.grad_norm), jax.device_get(state)


@pytest.mark.parametrize("num", [2, 4])
def test_a_lone_token_does_not_move_the_norm(num):
    """`optimizer.clip_norm` and the guard see the norm of the mean, within 5%, however few tokens a
    replica has."""
    wanted, _ = first_norm(make_recipe("mean", {"data": num}), "mean", lone(num))
    recipe = make_recipe("one_bit", {"data": num}, sync=dict(warmup_steps=WARMUP))
    got, state = first_norm(recipe, COMPRESSED, lone(num))
    assert got == pytest.approx(wanted, rel=CLOSE)
    assert float(state.guard.sum_norms) == pytest.approx(wanted, rel=CLOSE)


@pytest.mark.parametrize("num", [2, 4])
def test_the_norm_does_not_grow_with_the_replicas(num):
    batch = batches()[0]
    wanted, _ = first_norm(make_recipe("mean", {"data": num}), "mean", batch)
    recipe = make_recipe("one_bit", {"data": num}, sync=dict(warmup_steps=WARMUP))
    assert first_norm(recipe, COMPRESSED, batch)[0] == pytest.approx(wanted, rel=CLOSE)


def test_the_guard_of_local_steps_weighs_replicas_by_their_tokens():
    """Each clips its own gradient; what the guard sees is the norm of those with tokens."""
    recipe = make_recipe("zero_one", {"data": 4})
    alone, _ = first_norm(recipe, LOCAL, lone(4))
    batch = lone(4)
    weights = batch["weights"].copy()
    weights[-BATCH // 4 :] = 0
    without, _ = first_norm(recipe, LOCAL, batch | {"weights": weights})
    assert alone == pytest.approx(without, rel=CLOSE)
