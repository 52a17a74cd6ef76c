"""Sums over replicas that send less than the numbers, against what NumPy makes of their text.

The oracles know nothing of bytes, buckets, servers' parts or devices: they see whole tensors as
rows [L, R] and do what the paper says.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support import plain_signs

from llmx import sharding
from llmx.sync import compressors, reshard
from llmx.sync import replicas as replicas_lib
from llmx.sync.compressors import Residuals
from llmx.sync.config import SyncConfig
from llmx.sync.strategy import STRATEGIES

ORACLE = 1e-6  # of the largest number: fp32 sums and means, in another order
IDENTITY = 1e-4  # of what came in: fp32 sums of 50 steps, some of them of errors that have grown
LOW_RANK = 1e-5  # of the largest number: two products and an orthogonalisation in fp32

# Layers, a vector shorter than the eight numbers of a byte times replicas, and odd sides.
SHAPES = {
    "blocks/w": ((3, 37), ("layers", "embed")),
    "norm": ((5,), ("norm",)),
    "matrix": ((7, 13), ("embed", "vocab")),
}
ONE_BUCKET, MANY_BUCKETS = 32.0, 16 / 2**20  # MiB


def make(strategy: str, n: int, *, shapes=SHAPES, splits=None, fsdp: int = 1, **config):
    """The replicas of a mesh, whose tensors are split as `splits` says."""
    mesh = sharding.make_mesh({"data": n, "fsdp": fsdp}, devices=jax.devices()[: n * fsdp])
    splits = splits or {}
    abstract = {name: jax.ShapeDtypeStruct(shape, "float32") for name, (shape, _) in shapes.items()}
    to = {
        name: NamedSharding(mesh, splits.get(name, PartitionSpec(*(None,) * len(shape))))
        for name, (shape, _) in shapes.items()
    }
    axes = {name: axes for name, (_, axes) in shapes.items()}
    return replicas_lib.make(
        SyncConfig(strategy, **config), mesh, STRATEGIES[strategy].compressor, shapes=abstract,
        axes=axes, updates=to,
    )  # fmt: skip


def exchange_of(replicas: replicas_lib.Replicas):
    """(terms [n, ...], kept, live) -> (what every replica has of the sum [n, ...], kept)."""
    stacked = replicas.stacked_specs

    def region(terms, kept, live):
        own = {name: term[0] for name, term in terms.items()}
        sums, kept = replicas.exchange(own, kept, live)
        return {name: each[None] for name, each in sums.items()}, kept

    @functools.partial(jax.jit, static_argnums=3)
    def run(terms, kept, live, has_live):
        specs = replicas.residual_specs()
        return replicas.region(
            region, in_specs=(stacked, specs, replicas.specs if has_live else None),
            out_specs=(stacked, specs),
        )(terms, kept, live)  # fmt: skip

    def exchange(terms, kept, live=None):
        to = {name: NamedSharding(replicas.mesh, spec) for name, spec in stacked.items()}
        with jax.set_mesh(replicas.mesh):
            terms = jax.device_put(terms, {name: to[name] for name in terms})
            if live is not None:
                live = {
                    name: jax.device_put(each, NamedSharding(replicas.mesh, replicas.specs[name]))
                    for name, each in live.items()
                }
            return run(terms, kept, live, live is not None)

    return exchange


def nothing_kept(replicas: replicas_lib.Replicas) -> Residuals:
    zeros = lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding)  # noqa: E731
    return jax.tree.map(zeros, replicas.abstract_residuals())


def terms_of(n: int, seed: int, shapes=SHAPES) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        name: random.normal(size=(n, *shape)).astype("f4") * np.float32(10.0**i)
        for i, (name, (shape, _)) in enumerate(shapes.items())
    }


def the_same(stacked) -> np.ndarray:
    """What all replicas have, if that is the same bit for bit."""
    array = np.asarray(stacked)
    np.testing.assert_array_equal(array, np.broadcast_to(array[:1], array.shape))
    return array[0]


def assert_near(got, wanted, tolerance: float, size=None):
    """Within the tolerance of the largest number, of `size` where that is what they are made of."""
    got, wanted = np.asarray(got), np.asarray(wanted)
    assert got.shape == wanted.shape
    largest = np.abs(wanted if size is None else size).max()
    np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance * largest)


def of_servers(kept: Residuals, shapes=SHAPES) -> dict[str, np.ndarray]:
    return {
        name: np.asarray(reshard.whole(jnp.asarray(np.asarray(array)), shapes[name][0]))
        for name, array in kept.server.items()
    }


# ------------------------------------------------------------------------------------------ oracles


def steps_of_127(parts_LQ: np.ndarray, block: int) -> np.ndarray:
    """Each number as the nearest multiple of 1/127 of the largest of its block."""
    blocks = parts_LQ.reshape(-1, block)
    scale = np.abs(blocks).max(1, keepdims=True) / np.float32(127)
    sent = np.round(blocks / np.where(scale > 0, scale, np.float32(1))) * scale
    return sent.reshape(parts_LQ.shape).astype("f4")


def oracle_of_int8(terms_n, errors_n, server, axes):
    n, shape = len(terms_n), terms_n.shape[1:]
    length = plain_signs.rows_of(terms_n[0], axes).shape[1]
    block = 8
    while block < 256 and block * n < length:
        block *= 2
    padding = -length % (n * block)
    padded = lambda x: np.pad(plain_signs.rows_of(x, axes), ((0, 0), (0, padding)))  # noqa: E731
    bare = lambda x: x[:, :length].reshape(shape)  # noqa: E731
    xs = [padded(x) + padded(e) for x, e in zip(terms_n, errors_n, strict=True)]
    sent = [steps_of_127(x, block) for x in xs]
    total = np.sum(sent, axis=0, dtype="f4") + padded(server)
    agreed = steps_of_127(total, block)
    errors = np.stack([bare(x - s) for x, s in zip(xs, sent, strict=True)])
    return bare(agreed), errors, bare(total - agreed)


def oracle_of_top(terms_n, errors_n, axes, fraction: float):
    xs = [plain_signs.rows_of(x + e, axes) for x, e in zip(terms_n, errors_n, strict=True)]
    count = max(1, round(fraction * xs[0].shape[1]))
    sent = []
    for x_LR in xs:
        least_L = np.sort(np.abs(x_LR), axis=1)[:, -count]
        sent.append(np.where(np.abs(x_LR) >= least_L[:, None], x_LR, np.float32(0)))
    shape = terms_n.shape[1:]
    errors = np.stack([(x - s).reshape(shape) for x, s in zip(xs, sent, strict=True)])
    return np.sum(sent, axis=0, dtype="f4").reshape(shape), errors


def rounds(replicas, n: int, oracle, live=None, num: int = 3, feedback: bool = True):
    """Rounds of an exchange, each against the oracle; errors go on from the oracle's own."""
    exchange, kept = exchange_of(replicas), nothing_kept(replicas)
    zeros = lambda *lead: {k: np.zeros((*lead, *s), "f4") for k, (s, _) in SHAPES.items()}  # noqa: E731
    errors, server, found = zeros(n), zeros(), []
    for seed in range(num):
        terms = terms_of(n, seed)
        sums, kept = exchange(terms, kept, live)
        servers = of_servers(kept)
        for name, (_, axes) in SHAPES.items():
            wanted, *left = oracle(name, terms[name], errors[name], server[name], axes)
            got = the_same(sums[name])
            assert not np.any(np.sign(got) != np.sign(wanted)), name
            assert_near(got, wanted, ORACLE)
            found.append(got)
            if not feedback:
                continue
            errors[name] = left[0]
            # Errors are small differences of what was there and what was sent.
            assert_near(kept.errors[name], left[0], ORACLE, terms[name])
            if name in servers:
                server[name] = left[1]
                assert_near(servers[name], left[1], ORACLE, wanted)
    return found


# ---------------------------------------------------------------------------------- against oracles


@pytest.mark.parametrize("n", [2, 4, 8])
def test_signs_are_those_of_the_paper_in_any_buckets(n):
    def oracle(name, terms, errors, server, axes):
        return plain_signs.exchanged(terms, errors, server, np.ones(terms.shape[1:], bool), axes)

    one = rounds(make("one_bit", n, bucket_mib=ONE_BUCKET), n, oracle)
    many = rounds(make("one_bit", n, bucket_mib=MANY_BUCKETS), n, oracle)
    for a, b in zip(one, many, strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_does_not_live_waits_and_has_no_part_in_the_scale():
    n, random = 4, np.random.default_rng(9)
    live = {name: random.random(shape) < 0.6 for name, (shape, _) in SHAPES.items()}
    live["blocks/w"][1] = False  # a whole row

    def oracle(name, terms, errors, server, axes):
        wanted = plain_signs.exchanged(terms, errors, server, live[name], axes)
        dead = ~live[name]
        assert np.all(wanted[0][dead] == 1) and not np.any(wanted[2][dead])
        np.testing.assert_array_equal(wanted[1][:, dead], (terms + errors)[:, dead])
        return wanted

    rounds(make("one_bit", n), n, oracle, live)


@pytest.mark.parametrize("strategy", ["mean", "int8", "top_k", "power_sgd"])
def test_other_compressors_leave_out_what_does_not_live(strategy):
    n, random = 2, np.random.default_rng(9)
    live = {name: random.random(shape) < 0.6 for name, (shape, _) in SHAPES.items()}
    replicas, terms = make(strategy, n, fraction=0.1, rank=2), terms_of(n, 0)
    sums, kept = exchange_of(replicas)(terms, nothing_kept(replicas), live)
    servers = of_servers(kept)
    for name, (shape, _) in SHAPES.items():
        errors = np.asarray(kept.errors.get(name, np.zeros((n, *shape), "f4")))
        left = errors.sum(0) + servers.get(name, 0)
        got = the_same(sums[name])
        assert not np.any(got[~live[name]]) and not np.any(left[~live[name]])
        assert_near(got + left, np.where(live[name], terms[name].sum(0), 0), ORACLE, terms[name])


def test_signs_without_feedback_begin_anew_each_time():
    def oracle(name, terms, errors, server, axes):
        return plain_signs.exchanged(terms, errors, server, np.ones(terms.shape[1:], bool), axes)

    replicas = make("one_bit", 2, error_feedback=False)
    assert jax.tree.leaves(replicas.abstract_residuals()) == []
    rounds(replicas, 2, oracle, feedback=False)


@pytest.mark.parametrize("n", [2, 4])
def test_the_scale_may_be_the_mean_size(n):
    def oracle(name, terms, errors, server, axes):
        live = np.ones(terms.shape[1:], bool)
        return plain_signs.exchanged(terms, errors, server, live, axes, "mean")

    rounds(make("one_bit", n, scale="mean"), n, oracle)


@pytest.mark.parametrize("strategy", ["one_bit", "int8", "top_k", "power_sgd"])
def test_one_replica_compresses_nothing(strategy):
    replicas, terms = make(strategy, 1, fraction=0.1, rank=2), terms_of(1, 0)
    exchange = exchange_of(replicas)
    kept = jax.tree.map(lambda leaf: leaf + 1, nothing_kept(replicas))
    before = {name: np.asarray(each)[0] for name, each in kept.errors.items()}
    sums, kept = exchange(terms, kept)
    for name, term in terms.items():
        left = before.get(name, 0) + (1 if name in kept.server else 0)
        assert_near(the_same(sums[name]), term[0] + left, ORACLE)
    assert not any(np.any(leaf) for leaf in (*kept.errors.values(), *kept.server.values()))


def test_zero_counts_as_positive():
    replicas = make("one_bit", 2)
    terms = {name: np.zeros_like(each) for name, each in terms_of(2, 0).items()}
    terms["norm"][:] = [[0, 1, 0, -1, 0]] * 2
    sums, _ = exchange_of(replicas)(terms, nothing_kept(replicas))
    size = np.sqrt(0.4)
    np.testing.assert_allclose(the_same(sums["norm"]), 2 * size * np.array([1, 1, 1, -1, 1]), 1e-6)
    assert not np.any(the_same(sums["matrix"]))


@pytest.mark.parametrize("n", [2, 8])
def test_int8_is_the_nearest_127th_of_a_blocks_largest(n):
    def oracle(name, terms, errors, server, axes):
        return oracle_of_int8(terms, errors, server, axes)

    one = rounds(make("int8", n, bucket_mib=ONE_BUCKET), n, oracle)
    many = rounds(make("int8", n, bucket_mib=MANY_BUCKETS), n, oracle)
    for a, b in zip(one, many, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("n, fraction", [(2, 0.1), (8, 0.3)])
def test_top_k_sends_the_largest_of_each_row(n, fraction):
    def oracle(name, terms, errors, server, axes):
        return oracle_of_top(terms, errors, axes, fraction)

    rounds(make("top_k", n, fraction=fraction), n, oracle)


def test_top_k_of_all_is_the_sum_and_leaves_nothing():
    replicas, terms = make("top_k", 4, fraction=1.0), terms_of(4, 0)
    sums, kept = exchange_of(replicas)(terms, nothing_kept(replicas))
    for name, term in terms.items():
        assert_near(the_same(sums[name]), term.sum(0), ORACLE)
        assert not np.any(kept.errors[name])


def test_top_k_of_rows_longer_than_a_block():
    """Positions start anew in each block of 4096, the last of which is not full."""
    shapes = {"w": ((2, 5000), ("layers", "embed"))}
    replicas = make("top_k", 2, shapes=shapes, fraction=0.01)
    terms = terms_of(2, 0, shapes)
    sums, kept = exchange_of(replicas)(terms, nothing_kept(replicas))
    got = the_same(sums["w"])
    sent = terms["w"] - np.asarray(kept.errors["w"])
    for each, term in zip(sent, terms["w"], strict=True):
        for block in (slice(0, 4096), slice(4096, None)):
            assert np.all(np.count_nonzero(each[:, block], axis=1) == 41)
            least = np.sort(np.abs(term[:, block]), axis=1)[:, -41:].min()
            assert np.all(np.abs(each[:, block])[each[:, block] != 0] >= least)
    assert_near(got, sent.sum(0), ORACLE)


def test_mean_is_the_sum():
    replicas, terms = make("mean", 8), terms_of(8, 0)
    sums, kept = exchange_of(replicas)(terms, nothing_kept(replicas))
    assert jax.tree.leaves(kept) == []
    for name, term in terms.items():
        assert_near(the_same(sums[name]), term.sum(0), ORACLE)


@pytest.mark.parametrize("n", [2, 4])
def test_a_sum_of_low_rank_arrives_whole(n):
    """Whatever the replicas' parts of it are: errors of the first round go in with the second."""
    random, rank = np.random.default_rng(1), 2
    shapes = {
        "blocks/w": ((3, 12, 10), ("layers", "embed", "mlp")),
        "matrix": ((7, 13), ("embed", "vocab")),
        "norm": ((5,), ("norm",)),
    }
    replicas = make("power_sgd", n, shapes=shapes, rank=rank)
    exchange, kept = exchange_of(replicas), nothing_kept(replicas)
    assert set(kept.errors) == set(kept.queries) == {"blocks/w", "matrix"}
    # Orthonormal sides: what is left of rounding is not divided by a small singular value.
    side = lambda *shape: np.linalg.qr(random.normal(size=shape))[0]  # noqa: E731
    wanted = {}
    for name in kept.queries:
        *layers, a, b = shapes[name][0]
        wanted[name] = side(*layers, a, rank) @ side(*layers, b, rank).swapaxes(-1, -2)
    for seed in range(3):
        terms = terms_of(n, seed, shapes)
        for name in kept.queries:
            terms[name][-1] = wanted[name] - terms[name][:-1].sum(0)
        sums, kept = exchange(terms, kept)
        for name, term in terms.items():
            assert_near(the_same(sums[name]), term.sum(0), LOW_RANK, term)


def test_a_rank_that_would_send_more_sends_the_matrix():
    for rank, low in ((4, True), (5, False)):
        replicas = make("power_sgd", 2, rank=rank)
        each, group = replicas.tensors["matrix"], replicas.group
        assert each.matrix == (1, 7, 13)
        sizes = [message.bytes for message in replicas.compressor.messages(each, group)]
        assert sizes == ([4 * 7 * rank, 4 * 13 * rank] if low else [4 * 7 * 13])
        assert ("matrix" in replicas.abstract_residuals().queries) == low
        assert "norm" not in replicas.abstract_residuals().queries


# --------------------------------------------------------------------------------- nothing is lost


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("strategy", ["one_bit", "int8", "top_k", "power_sgd"])
def test_all_that_came_in_is_sent_or_kept(strategy, n):
    replicas = make(strategy, n, fraction=0.1, rank=2)
    exchange, kept = exchange_of(replicas), nothing_kept(replicas)
    came = {name: np.zeros(shape) for name, (shape, _) in SHAPES.items()}
    sent = {name: np.zeros(shape) for name, (shape, _) in SHAPES.items()}
    for seed in range(50):
        terms = terms_of(n, seed)
        # A part that comes again and again, and one that is new each time.
        terms = {name: term + terms_of(n, 1000)[name] for name, term in terms.items()}
        sums, kept = exchange(terms, kept)
        for name in SHAPES:
            came[name] += terms[name].sum(0, dtype="f8")
            sent[name] += the_same(sums[name])
    servers = of_servers(kept)
    for name in SHAPES:
        left = np.asarray(kept.errors.get(name, np.zeros((n, *SHAPES[name][0])))).sum(0, dtype="f8")
        if name in servers:
            left = left + servers[name]
        assert_near(sent[name] + left, came[name], IDENTITY)


# ------------------------------------------------------------------------- how a replica is split


@pytest.mark.parametrize("masked", [False, True])
def test_signs_do_not_depend_on_how_a_replica_is_split(masked):
    """Rows split over `fsdp`, along one dimension or another: the scale is of the whole row."""
    shapes = {
        "blocks/w": ((3, 8, 6), ("layers", "embed", "mlp")),
        "vector": ((18,), ("vocab",)),
        "matrix": ((6, 10), ("embed", "vocab")),
    }
    splits = {
        "blocks/w": PartitionSpec(None, "fsdp", None),
        "vector": PartitionSpec("fsdp"),
        "matrix": PartitionSpec(None, "fsdp"),
    }
    n, live = 2, None
    if masked:
        random = np.random.default_rng(3)
        live = {name: random.random(shape) < 0.5 for name, (shape, _) in shapes.items()}
    whole = make("one_bit", n, shapes=shapes)
    split = make("one_bit", n, shapes=shapes, splits=splits, fsdp=2)
    assert split.tensors["matrix"].shape == (6, 5)
    kepts = [nothing_kept(replicas) for replicas in (whole, split)]
    exchanges = [exchange_of(replicas) for replicas in (whole, split)]
    for seed in range(3):
        terms = terms_of(n, seed, shapes)
        results = [
            exchange(terms, kept, live) for exchange, kept in zip(exchanges, kepts, strict=True)
        ]
        (of_whole, kept_whole), (of_split, kept_split) = results
        kepts = [kept_whole, kept_split]
        servers = [of_servers(kept, shapes) for kept in kepts]
        for name in shapes:
            assert_near(the_same(of_split[name]), the_same(of_whole[name]), ORACLE)
            assert_near(kept_split.errors[name], kept_whole.errors[name], ORACLE)
            assert_near(servers[1][name], servers[0][name], ORACLE)


def test_layers_that_are_split_keep_a_scale_each():
    """Over `fsdp` in the place of stages: a row is whole on its device."""
    shapes = {"blocks/w": ((4, 9), ("layers", "embed"))}
    splits = {"blocks/w": PartitionSpec("fsdp", None)}
    whole, split = (
        make("one_bit", 2, shapes=shapes),
        make("one_bit", 2, shapes=shapes, splits=splits, fsdp=2),
    )
    terms = terms_of(2, 0, shapes)
    results = [exchange_of(each)(terms, nothing_kept(each)) for each in (whole, split)]
    assert_near(the_same(results[1][0]["blocks/w"]), the_same(results[0][0]["blocks/w"]), ORACLE)
    servers = [of_servers(kept, shapes)["blocks/w"] for _, kept in results]
    assert_near(servers[1], servers[0], ORACLE)


# ------------------------------------------------------------------------------------------ shards


@pytest.mark.parametrize(
    "shape, axes, spec, wanted",
    [
        (
            (4, 6, 8), ("layers", "embed", "mlp"), PartitionSpec("stage", None, ("fsdp", "tensor")),
            dict(shape=(2, 6, 2), layered=True, over=("fsdp", "tensor"), columns=2,
                 rows=2, length=12, matrix=(2, 6, 2)),
        ),
        (
            (4, 2, 3, 8), ("layers", "heads", "head_dim", "embed"), PartitionSpec(),
            dict(shape=(4, 2, 3, 8), over=(), columns=3, rows=4, length=48,
                 matrix=(4, 6, 8)),
        ),
        (
            (4, 6, 8, 10), ("layers", "experts", "embed", "mlp"),
            PartitionSpec("stage", "fsdp", None, "tensor"),
            dict(shape=(2, 3, 8, 5), stacked=2, over=("fsdp", "tensor"), columns=3, rows=2,
                 length=120, matrix=(6, 8, 5)),
        ),
        (
            (3, 8, 10), ("first", "embed", "mlp"), PartitionSpec(),
            dict(layered=False, stacked=1, columns=2, rows=1, length=240, matrix=(3, 8, 10)),
        ),
        (
            (9, 8), ("vocab", "embed"), PartitionSpec(None, "fsdp"),
            dict(shape=(9, 4), layered=False, over=("fsdp",), columns=1, rows=1,
                 length=36, matrix=(1, 9, 4)),
        ),
        (
            (8,), ("norm",), PartitionSpec("fsdp"),
            dict(shape=(4,), layered=False, columns=0, rows=1, length=4, matrix=None),
        ),
    ],
)  # fmt: skip
def test_what_a_device_has_of_a_tensor(shape, axes, spec, wanted):
    sizes = {"stage": 2, "fsdp": 2, "tensor": 2}
    found = compressors.local_tensor("w", shape, axes, spec, sizes)
    properties = {name: getattr(found, name) for name in ("rows", "length", "matrix")}
    found = dataclasses.asdict(found) | properties
    assert {name: found[name] for name in wanted} == wanted
