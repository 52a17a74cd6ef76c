"""Sums that are exchanged equal the compiler's reduce-scatters; which chips exchange."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import runs

from llmx import sharding
from llmx.aot import program as program_lib
from llmx.aot import topologies
from llmx.sharding import scatter


@pytest.fixture(params=[16, 2], ids=["one step", "steps of 2"])
def exchanging(request, monkeypatch):
    monkeypatch.setattr(scatter, "EXCHANGING", {"cpu": 8})
    monkeypatch.setattr(scatter, "MOST_TERMS", request.param)


def make_mesh(**sizes):
    return sharding.make_mesh({axis: sizes.get(axis, 1) for axis in sharding.AXES})


def terms_of(mesh, value, spec, axes):
    """`value` times the number of each device, as terms of a sum over `axes`."""

    def local():
        number = 1 + jax.lax.axis_index(axes)
        return (value * number).astype(value.dtype)

    to = sharding.unreduced(spec, axes)
    return jax.shard_map(local, mesh=mesh, in_specs=(), out_specs=to, check_vma=False)()


def summed(mesh, value, axes, to):
    """The sum of `terms_of` placed as `to`, and the text of its program before optimization."""
    run = jax.jit(lambda: sharding.scattered(terms_of(mesh, value, P(None, None), axes), to))
    with jax.set_mesh(mesh):
        return run(), run.lower().as_text()


@pytest.mark.parametrize("dimension", [0, 1])
@pytest.mark.parametrize(
    ("sizes", "axes"),
    [
        (dict(fsdp=8), ("fsdp",)),
        (dict(fsdp=4, tensor=2), ("fsdp",)),
        (dict(fsdp=4, sequence=2), ("fsdp", "sequence")),
        (dict(data=2, fsdp=2, sequence=2), ("data", "fsdp", "sequence")),
        (dict(fsdp=2, tensor=4), ("fsdp",)),
    ],
)
def test_exchanged_as_by_the_compiler(sizes, axes, dimension, exchanging, monkeypatch):
    mesh = make_mesh(**sizes)
    value = np.arange(16 * 24, dtype=np.float32).reshape(16, 24)
    to = P(*[axes if number == dimension else None for number in range(2)])
    got, text = summed(mesh, value, axes, to)
    assert "all_to_all" in text and "reduce_scatter" not in text
    monkeypatch.setattr(scatter, "EXCHANGING", {})
    wanted, text = summed(mesh, value, axes, to)
    assert "all_to_all" not in text
    assert got.sharding == wanted.sharding
    n = np.prod([mesh.shape[axis] for axis in axes])
    np.testing.assert_array_equal(got, value * n * (n + 1) / 2)
    np.testing.assert_array_equal(got, wanted)


def test_a_dimension_that_is_split_already(exchanging):
    """Rows split over `tensor` are split again over `fsdp`."""
    mesh = make_mesh(fsdp=4, tensor=2)
    value = np.arange(8 * 3, dtype=np.float32).reshape(8, 3)
    got, _ = summed(mesh, value, ("fsdp",), P(("tensor", "fsdp"), None))
    np.testing.assert_array_equal(got, value * 10)
    assert got.sharding.spec == P(("tensor", "fsdp"), None)


@pytest.mark.parametrize("exchanges", [True, False])
def test_other_sums_stay_as_they_are(exchanges, monkeypatch):
    """Over `data` the terms of a sum over `fsdp` and `data` are summed later, or all-reduced."""
    monkeypatch.setattr(scatter, "EXCHANGING", {"cpu": 8} if exchanges else {})
    mesh = make_mesh(data=2, fsdp=4)
    value = np.arange(64, dtype=np.float32).reshape(8, 8)

    @jax.jit
    def run():
        terms = terms_of(mesh, value, P(None, None), ("data", "fsdp"))
        later = sharding.scattered(terms, sharding.unreduced(P("fsdp", None), ("data",)))
        assert jax.typeof(later).sharding.spec.unreduced == {"data"}
        now = sharding.scattered(terms, P("fsdp", None))
        return jax.sharding.reshard(later, P("fsdp", None)), now

    with jax.set_mesh(mesh):
        for got in run():
            np.testing.assert_array_equal(got, value * 36)
        compiled = run.lower().compile().as_text()
    program = program_lib.read(compiled, list(mesh.shape.items()))
    # No device receives the whole sum over both: parts over `fsdp`, then of these over `data`.
    assert not any(each.axes == ("data", "fsdp") for each in program.collectives)
    sums = program.select(kind="all-reduce", axes="data")
    assert sum(each.count * each.bytes for each in sums) == 2 * value.nbytes // 4


def test_a_sum_in_bf16_is_taken_in_fp32(monkeypatch):
    """256 + 1 in bf16 is 256; the sum of all, rounded once, is not."""
    monkeypatch.setattr(scatter, "EXCHANGING", {"cpu": 8})
    mesh = make_mesh(fsdp=8)

    def local():
        first = jax.lax.axis_index("fsdp") == 0
        terms = jnp.where(first, jnp.full((8, 8), 256.0), 1.0).astype(jnp.bfloat16)
        return sharding.psum_scatter(terms, ("fsdp",), dimension=0)

    with jax.set_mesh(mesh):
        region = jax.shard_map(local, in_specs=(), out_specs=P("fsdp"), check_vma=False)
        got = np.asarray(jax.jit(region)(), np.float32)
    np.testing.assert_array_equal(got, np.float32(jnp.bfloat16(263)))


def test_integers_are_added_exactly(exchanging):
    mesh = make_mesh(fsdp=8)
    value = np.arange(2**24 + 1, 2**24 + 17, dtype=np.int32).reshape(16, 1)
    got, text = summed(mesh, value, ("fsdp",), P("fsdp", None))
    assert "all_to_all" in text
    np.testing.assert_array_equal(got, value * 36)


@pytest.mark.parametrize(
    ("n", "steps"),
    [(1, ()), (2, (2,)), (16, (16,)), (17, (17,)), (32, (4, 8)), (64, (8, 8)), (256, (16, 16)),
     (8192, (8, 8, 8, 16))],
)  # fmt: skip
def test_steps_add_up_to_16_terms(n, steps):
    assert scatter.steps_of(n) == steps


@pytest.mark.aot
@pytest.mark.parametrize(
    ("topology", "fsdp", "exchanged"),
    [
        ("v5e:4x4", 16, True),
        ("v5e:4x8", 32, False),
        ("v4:2x2x2", 8, True),
        ("v4:4x4x4", 64, True),
        ("v5p:2x2x2", 8, False),
        ("v6e:4x4", 16, False),
    ],
)
def test_which_chips_exchange(topology, fsdp, exchanged):
    from llmx.aot import topologies

    sizes = {axis: 1 for axis in sharding.AXES} | {"fsdp": fsdp}
    mesh = sharding.make_mesh(sizes, devices=topologies.devices(topology))
    value = np.ones((fsdp, 8), np.float32)

    @functools.partial(jax.jit, out_shardings=jax.NamedSharding(mesh, P("fsdp", None)))
    def run():
        return sharding.scattered(terms_of(mesh, value, P(None, None), ("fsdp",)), P("fsdp", None))

    with jax.set_mesh(mesh):
        assert ("all_to_all" in run.lower().as_text()) == exchanged


@pytest.mark.parametrize("shape", [(1, 16, 3), (2, 16, 3), (1, 1, 16)])
def test_reduce_scatters_of_one_row(shape):
    """The same sums where leading dimensions are 1 on each device."""
    mesh, dimension = make_mesh(tensor=8), shape.index(16)
    value = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    to = P(*["tensor" if number == dimension else None for number in range(3)])

    def local():
        terms = value * (1 + jax.lax.axis_index("tensor"))
        return sharding.psum_scatter(terms, ("tensor",), dimension=dimension, exchange=False)

    region = jax.shard_map(local, mesh=mesh, in_specs=(), out_specs=to, check_vma=False)
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(jax.jit(region)(), value * sum(range(1, 9)))


@pytest.mark.aot
def test_tpus_scatter_activations_of_one_row():
    """No large all-reduce over `tensor`: XLA would write them if it were left to it."""
    run = runs.make_config(
        "llama3", precision="bf16", remat="full", mesh=dict(fsdp=2, tensor=4),
        model=dict(num_layers=2, width=512, num_heads=4, num_kv_heads=4, head_dim=128,
                   mlp_dim=1024, vocab_size=512, max_positions=512),
        batch__size=2, batch__sequence_length=512,
    )  # fmt: skip
    topology = topologies.parse("v5p:2x2x2")
    recipe = runs.make_recipe(run, devices=topologies.devices(topology))
    text = topologies.compile(runs.lower(recipe), topology.platform).as_text()
    moved = {}
    for one in program_lib.read(text, list(recipe.mesh.shape.items())).collectives:
        if one.axes == ("tensor",):
            moved[one.kind] = moved.get(one.kind, 0) + one.count * one.bytes
    assert moved["all-reduce"] < 0.02 * moved["reduce-scatter"]
