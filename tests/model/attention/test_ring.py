"""Attention over split positions equals attention on one device: rings, zigzag, Ulysses, nested."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from support import pairwise
from support.pairwise import Rule

from llmx import config, sharding
from llmx.aot import compiler, report
from llmx.config import checks
from llmx.model import families, remat
from llmx.model.attention import attend, ring, ulysses
from llmx.model.attention import attend as attend_lib
from llmx.model.attention import split as split_lib
from llmx.model.attention.kernel import Kernel
from llmx.model.attention.masks import Mask, Scores
from llmx.model.attention.split import Split

# Relative to the largest number: sums are taken in another order.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
B, T, N, K, H = 2, 64, 8, 4, 8


@pytest.fixture(autouse=True)
def looped(monkeypatch):
    """Long rings are loops here, as on TPUs and GPUs: nothing else communicates in these tests."""
    monkeypatch.setattr(ring, "NEVER_LOOPED", ())


@dataclasses.dataclass(frozen=True)
class Case:
    window: int = 0
    softcap: float = 0.0
    packed: bool = False
    kv_heads: int = K
    value_dim: int = H


CASES = {
    "causal": Case(),
    "packed": Case(packed=True),
    "window5": Case(window=5),  # within a chunk and its neighbour
    "window23": Case(window=23),  # over several chunks
    "softcap": Case(softcap=1.0),
    "all": Case(window=13, softcap=2.0, packed=True),
    "one_kv_head": Case(packed=True, kv_heads=1),
    "narrow_values": Case(packed=True, value_dim=5),
}

LONG_CASES = {"window200": Case(window=200)}  # of longer rows

SPLITS = {
    "ring2": Split(2, zigzag=False),
    "ring4": Split(4, zigzag=False),
    "ring8": Split(8, zigzag=False),
    "zigzag1": Split(1),
    "zigzag2": Split(2),
    "zigzag4": Split(4),
    "zigzag8": Split(8),
    "ulysses2": Split(2, ulysses=2),
    "ulysses4": Split(4, ulysses=4),
    "ulysses8": Split(8, ulysses=8),
    "ring2_ulysses2": Split(4, ulysses=2, zigzag=False),
    "zigzag2_ulysses4": Split(8, ulysses=4),
    "zigzag4_ulysses2": Split(8, ulysses=2),
}


def documents(packed: bool, length: int = T) -> tuple[np.ndarray, np.ndarray]:
    """Segments and positions [B, length]: cuts that are no chunk's, one document a single token."""
    cuts = [[0.3, 0.02, 0.4], [0.6]] if packed else [[], []]
    rows = []
    for shares in cuts:
        lengths = [max(1, int(share * length)) for share in shares]
        rows.append([*lengths, length - sum(lengths)])
    segments = [np.repeat(np.arange(len(row)) + 1, row) for row in rows]
    positions = [np.concatenate([np.arange(n) for n in row]) for row in rows]
    return np.stack(segments).astype(np.int32), np.stack(positions).astype(np.int32)


def inputs(case: Case, dtype: str, length: int = T):
    """Query, key, value, and a gradient of the result."""
    rng = np.random.default_rng(0)
    kv, V = (B, length, case.kv_heads), case.value_dim
    shapes = ((B, length, N, H), (*kv, H), (*kv, V), (B, length, N, V))
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def mask_of(case: Case, length: int = T) -> Mask:
    segments, positions = map(jnp.asarray, documents(case.packed, length))
    return Mask(segments, positions, segments, positions, ahead=0)


def scores_of(case: Case) -> Scores:
    return Scores(scale=H**-0.5, softcap=case.softcap, window=case.window)


@functools.cache
def expected(name: str, length: int = T):
    """Value and gradients of the reference on one device, in fp32."""
    case = (CASES | LONG_CASES)[name]
    *arrays, cotangent = inputs(case, "float32", length)
    kernel, mask = attend.IMPLEMENTATIONS["reference"], mask_of(case, length)
    out, pull = jax.vjp(
        lambda *arrays: kernel(*arrays, mask, scores_of(case), device_kind="cpu"), *arrays
    )
    return [np.asarray(array) for array in (out, *pull(cotangent))]


def split_mesh(split: Split, tensor: int = 1) -> jax.sharding.Mesh:
    devices = jax.devices()[: split.ways * tensor]
    return sharding.make_mesh({"sequence": split.ways, "tensor": tensor}, devices=devices)


def attend_on(split: Split, kernel: Kernel, case: Case):
    """The mesh, where rows lie on it, and attention (query, key, value, mask) of rows split so."""
    mesh, rows = split_mesh(split), PartitionSpec(None, "sequence")
    over = attend_lib.attention_over(kernel, axis="sequence", split=split, device_kind="cpu")
    attend = jax.shard_map(
        lambda *arrays: over(*arrays, scores_of(case)), mesh=mesh, in_specs=rows, out_specs=rows,
        check_vma=False,
    )  # fmt: skip
    return mesh, jax.NamedSharding(mesh, rows), attend


def attended(case: Case, split: Split, kernel: Kernel, dtype: str, length: int = T):
    """Value and gradients, in the order of the row, of attention over split positions."""
    *arrays, cotangent = inputs(case, dtype, length)
    mesh, to, attend = attend_on(split, kernel, case)
    put = lambda array: jax.device_put(array, to)  # noqa: E731
    move = lambda array, back=False: split_lib.reorder(array, split, mesh, back=back)  # noqa: E731

    def both(arrays, mask, cotangent):
        arrays, mask, cotangent = jax.tree.map(move, (arrays, mask, cotangent))
        out, pull = jax.vjp(lambda *arrays: attend(*arrays, mask), *arrays)
        return [move(array, back=True) for array in (out, *pull(cotangent))]

    with jax.set_mesh(mesh):
        found = jax.jit(both)(*jax.tree.map(put, (tuple(arrays), mask_of(case, length), cotangent)))
    return [np.asarray(array, np.float32) for array in found]


def assert_equal(found, wanted, dtype: str):
    for name, got, to_be in zip(("value", "query", "key", "value's"), found, wanted, strict=True):
        error = np.abs(got - to_be).max() / np.abs(to_be).max()
        assert error <= TOLERANCE[dtype], f"{name}: {error:.1e}"


BATTERY = {
    "case": tuple(CASES),
    "ring": (1, 2, 4, 8),
    "ulysses": (1, 2, 4, 8),
    "zigzag": (True, False),
    "implementation": ("blockwise", "reference"),
}
RULES = (
    Rule(("ring", "ulysses"), lambda r, u: "more than eight devices" if r * u > 8 else ""),
    Rule(("ring", "zigzag"), lambda r, z: "no ring" if r == 1 and not z else ""),
)


def battery():
    """Every split and every kind of mask once by default, all pairs of a cover with `slow`."""
    quick = [(split, "all", "blockwise") for split in SPLITS.values()]
    quick += [(SPLITS["zigzag4"], case, "blockwise") for case in CASES if case != "all"]
    for row in pairwise.cover(BATTERY, RULES).rows:
        split = Split(row["ring"] * row["ulysses"], row["ulysses"], row["zigzag"])
        if (chosen := (split, row["case"], row["implementation"])) not in quick:
            yield pytest.param(*chosen, marks=pytest.mark.slow)
    yield from quick


@pytest.mark.parametrize("split, case, implementation", list(battery()), ids=str)
def test_split_attention_equals_the_reference(split, case, implementation):
    kernel = attend.IMPLEMENTATIONS[implementation]
    found = attended(CASES[case], split, kernel, "float32")
    assert_equal(found, expected(case), "float32")


@pytest.mark.parametrize("split", ["zigzag4", "zigzag4_ulysses2"])
def test_split_attention_in_bf16(split):
    kernel = attend.IMPLEMENTATIONS["blockwise"]
    found = attended(CASES["all"], SPLITS[split], kernel, "bfloat16")
    assert_equal(found, expected("all"), "bfloat16")


# Kernels of TPU and GPU, in their interpreters: chunks of 128 positions; one window cuts chunks.
@pytest.mark.parametrize(
    "kernel, split, case",
    [
        ("splash", "zigzag2", "all"),
        pytest.param("splash", "zigzag2", "packed", marks=pytest.mark.slow),
        pytest.param("splash", "ring4", "window200", marks=pytest.mark.slow),
        pytest.param("splash", "zigzag2_ulysses4", "one_kv_head", marks=pytest.mark.slow),
        ("triton", "zigzag2", "packed"),
        pytest.param("triton", "zigzag2", "all", marks=pytest.mark.slow),
        pytest.param("triton", "ring4", "window200", marks=pytest.mark.slow),
        pytest.param("triton", "zigzag2_ulysses4", "one_kv_head", marks=pytest.mark.slow),
    ],
)
def test_pallas_kernels_in_a_ring(kernel, split, case):
    found = attended(
        (CASES | LONG_CASES)[case], SPLITS[split], attend.IMPLEMENTATIONS[kernel], "float32",
        length=512,
    )  # fmt: skip
    assert_equal(found, expected(case, 512), "float32")


def test_positions_decide_where_order_is_not_promised():
    """Rows in any order, with their positions: every block is computed, and masked by these."""
    case = CASES["all"]
    *arrays, cotangent = inputs(case, "float32")
    split = Split(4)
    shuffled = np.random.default_rng(3).permutation(T)
    segments, positions = (array[:, shuffled] for array in documents(case.packed))
    mask = Mask(*map(jnp.asarray, (segments, positions, segments, positions)))
    mesh, to, attend = attend_on(split, attend_lib.IMPLEMENTATIONS["blockwise"], case)

    def both(arrays, mask, cotangent):
        out, pull = jax.vjp(lambda *arrays: attend(*arrays, mask), *arrays)
        return out, *pull(cotangent)

    put = lambda array: jax.device_put(array, to)  # noqa: E731
    given = [array[:, shuffled] for array in (*arrays, cotangent)]
    with jax.set_mesh(mesh):
        found = jax.jit(both)(*jax.tree.map(put, (given[:3], mask, given[3])))
    wanted = [array[:, shuffled] for array in expected("all")]
    assert_equal([np.asarray(array) for array in found], wanted, "float32")


# ------------------------------------------------------------------------------- the plan of a ring


@pytest.mark.parametrize("window", [0, 1, 5, 8, 9, 23, 24, 40, 64])
@pytest.mark.parametrize("split", [name for name in SPLITS if "8" not in name])
def test_tiles_show_every_pair_once(split, window):
    """Brute force over positions: what the tiles' masks show is what the mask shows, once."""
    split = SPLITS[split]
    order = split.order(T).reshape(split.rings, -1)
    found = ring.tiling(split, T, window)
    size = T // split.chunks.size
    shown = np.zeros((T, T), int)
    for group, step in np.ndindex(*found.table.shape):
        keys_of = order[(group - step) % split.rings]
        for tile in found.tile_lists[found.table[group, step]]:
            rows, columns = tile.rows(size)
            queries, keys = order[group][rows], keys_of[columns]
            shape = (1, len(queries)), (1, len(keys))
            mask = Mask(np.ones(shape[0]), None, np.ones(shape[1]), None, ahead=tile.ahead)
            visible = np.asarray(mask.visible(window))[0]
            assert visible.any(), "a tile that shows nothing"
            shown[np.ix_(queries, keys)] += visible
    back = np.arange(T)[:, None] - np.arange(T)[None]
    np.testing.assert_array_equal(shown, (back >= 0) & (back < (window or T)))


@pytest.mark.parametrize("ways", [2, 4, 8, 16, 64])
def test_zigzag_balances_causal_work(ways):
    """The busiest device against the mean; in row order it does about twice the mean."""
    length = ways * 256
    busiest = lambda split: (  # noqa: E731
        (scores := ring.scores_per_device(split, length)).max() / scores.mean()
    )
    assert busiest(Split(ways)) <= 1.0001
    assert busiest(Split(ways, zigzag=False)) == pytest.approx(2 - 1 / ways, rel=0.01)
    total = ring.scores_per_device(Split(ways), length).sum()
    assert total == length * (length + 1) // 2


@pytest.mark.parametrize("window", [0, 13])
def test_the_tiles_that_run_are_those_of_the_tiling(window):
    """A kernel that reports each call: what is not planned is not computed."""
    split, calls = Split(4), collections.Counter()
    blockwise = attend.IMPLEMENTATIONS["blockwise"]

    def counted(method):
        def run(query, key, value, mask, *rest, device_kind):
            shape = (query.shape[1], key.shape[1], mask.ahead)
            report = lambda group: calls.update([(method, int(group), *shape)])  # noqa: E731
            jax.debug.callback(report, jax.lax.axis_index("sequence"))
            return getattr(blockwise, method)(
                query, key, value, mask, *rest, device_kind=device_kind
            )

        return run

    kernel = Kernel(counted("forward"), counted("backward"))
    attended(Case(window=window, packed=False), split, kernel, "float32")
    jax.effects_barrier()
    found = ring.tiling(split, T, window)
    size = T // split.chunks.size
    planned = collections.Counter()
    for group, step in np.ndindex(*found.table.shape):
        for tile in found.tile_lists[found.table[group, step]]:
            rows, keys = tile.rows(size)
            shape = (rows.stop - rows.start, keys.stop - keys.start, tile.ahead)
            planned.update((method, group, *shape) for method in ("forward", "backward"))
    assert calls == planned


def test_documents_that_do_not_meet_are_not_computed():
    """Rows of documents of a chunk each: only the diagonal is computed."""
    split, calls = Split(4, zigzag=False), collections.Counter()
    blockwise = attend_lib.IMPLEMENTATIONS["blockwise"]

    def forward(query, *rest, device_kind):
        jax.debug.callback(lambda i: calls.update([int(i)]), jax.lax.axis_index("sequence"))
        return blockwise.forward(query, *rest, device_kind=device_kind)

    segments = jnp.tile(jnp.arange(4).repeat(T // 4)[None], (B, 1))
    mask = Mask(segments, None, segments, None, ahead=0)
    *arrays, _ = inputs(Case(), "float32")
    mesh, to, attend = attend_on(split, Kernel(forward, blockwise.backward), Case())
    with jax.set_mesh(mesh):
        jax.block_until_ready(jax.jit(attend)(*jax.device_put((*arrays, mask), to)))
    jax.effects_barrier()
    assert calls == dict.fromkeys(range(4), 1)


@pytest.mark.parametrize(
    "split, window, steps",
    [
        (Split(8, zigzag=False), 0, range(8)),
        (Split(8, zigzag=False), 1, [0]),
        (Split(8, zigzag=False), 8, [0, 1]),  # a chunk: of the one before, all but a token
        (Split(8, zigzag=False), 10, [0, 1, 2]),
        (Split(8), 5, [0, 1, 7]),  # zigzag: the chunk before lies with either neighbour
        (Split(8), 0, range(8)),
    ],
)
def test_blocks_beyond_the_window_are_not_sent(split, window, steps):
    assert ring.tiling(split, T, window).steps == list(steps)
    *arrays, _ = inputs(Case(), "float32")
    mesh, to, attend = attend_on(
        split, attend_lib.IMPLEMENTATIONS["blockwise"], Case(window=window)
    )
    with jax.set_mesh(mesh):
        given = jax.device_put((*arrays, mask_of(Case())), to)
        text = str(jax.make_jaxpr(attend)(*given))
    # Written out, each step but the last sends keys, values and segments; a loop holds one of them.
    sends = len(list(steps)) - 1
    assert text.count("ppermute[") == 3 * (sends if sends <= ring.WRITTEN_OUT + 1 else 2)


def test_remat_keeps_what_the_policy_says():
    """Under "names" the ring turns once per pass; under "full" the backward pass turns it again."""
    split = Split(4)
    mesh, to, attend = attend_on(split, attend_lib.IMPLEMENTATIONS["blockwise"], Case())
    with jax.set_mesh(mesh):
        *arrays, _ = inputs(Case(), "float32")
        *arrays, mask = jax.device_put((*arrays, mask_of(Case())), to)

        def sends(policy: str) -> int:
            layer = remat.checkpointed(
                lambda query, others: jnp.sum(jnp.sin(attend(query, *others, mask))),
                remat.POLICIES[policy],
            )
            gradient = jax.grad(layer, argnums=(0, 1))
            return str(jax.make_jaxpr(gradient)(arrays[0], arrays[1:])).count("ppermute")

        found = {policy: sends(policy) for policy in ("none", "names", "full")}
    blocks, arrays = 3, 3  # keys, values, segments
    once = 2 * blocks * arrays + 2 * blocks + 2
    assert found == {"none": once, "names": once, "full": once + blocks * arrays}


# ----------------------------------------------------------------------- compiled for real chips


def long_step(topology: str, ways: int, **kind) -> report.Result:
    """The train step of a small Llama on one row of 65,536 tokens split over all chips."""
    run = config.default()
    run.model = families.preset(
        "llama3", num_layers=4, width=1024, mlp_dim=2048, num_heads=8, num_kv_heads=2,
        head_dim=128, vocab_size=4096, max_positions=2**16,
    )  # fmt: skip
    run.precision, run.remat, run.sharding.layout = "bf16", "full", "zero3"
    run.batch.size, run.batch.sequence_length = 1, 2**16
    run.mesh.data, run.mesh.sequence = 1, ways
    for name, value in kind.items():
        setattr(run.attention, name, value)
    return compiler.compile(checks.resolve(run, ways), topology)


@pytest.mark.aot
@pytest.mark.full_grid  # compiles several large programs
def test_memory_and_sends_of_split_rows():
    """Twice the devices hold half the activations, or less; a ring sends what the formula says,
    behind the kernels. scripts/bench_context.py does it at full size."""
    found = {ways: long_step(f"v5p:{shape}", ways) for ways, shape in ((4, "2x2x1"), (8, "2x2x2"))}
    state = lambda result: sum(result.state.values())  # noqa: E731
    whole = {n: n * (result.memory.peak - state(result)) for n, result in found.items()}
    assert whole[8] <= 1.1 * whole[4]
    for ways, result in found.items():
        model, program = result.run.model, result.program
        block = 4 * 2**16 // ways * model.num_kv_heads * model.head_dim
        sends = [
            each
            for each in program.select(kind="collective-permute", axes="sequence")
            if each.dtype != "s32"
        ]
        sent = sum(each.count * each.bytes for each in sends)
        # Forward, again, and backward; the compiler may share sends of the last two.
        per_layer = 2 * (ways - 1) + 3 * (ways - 1) + 1
        assert (per_layer - ways) * block <= sent / model.num_layers <= per_layer * block
        assert all(each.asynchronous for each in sends)
        hidden = sum(each.count * each.bytes for each in sends if each.hidden_by)
        assert hidden >= (1 - 1 / per_layer) * sent, "but for the last send, home"


# --------------------------------------------------------------------------------- order and errors


@pytest.mark.parametrize("split", SPLITS)
def test_reorder_and_back(split):
    split = SPLITS[split]
    mesh = split_mesh(split)
    array = jnp.arange(2 * T, dtype=jnp.float32).reshape(2, T)
    to = jax.NamedSharding(mesh, PartitionSpec(None, "sequence"))
    with jax.set_mesh(mesh):
        there = split_lib.reorder(jax.device_put(array, to), split, mesh)
        np.testing.assert_array_equal(there, np.asarray(array)[:, split.order(T)])
        np.testing.assert_array_equal(split_lib.reorder(there, split, mesh, back=True), array)


def test_zigzag_order():
    assert Split(2).order(8).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert Split(4, ulysses=2).order(8).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert Split(4, ulysses=4).order(8).tolist() == list(range(8))
    assert Split(3).order(6).tolist() == [0, 5, 1, 4, 2, 3]


def test_errors_name_value_limit_and_remedy():
    with pytest.raises(
        ValueError, match=r"ulysses=3 does not divide the 8 devices .* use a divisor"
    ):
        Split(8, ulysses=3)
    with pytest.raises(ValueError, match=r"68 positions .* 8 chunks .* multiple of 8, or .*zigzag"):
        Split(4).order(68)
    case = dataclasses.replace(CASES["causal"], kv_heads=1)
    with pytest.raises(ValueError, match="ulysses=16 does not divide the 8 query heads"):
        exchanged = ulysses.ulysses(lambda *_: None, axis="sequence", split=Split(16, ulysses=16))
        *arrays, _ = inputs(case, "float32")
        exchanged(*arrays, mask_of(case), scores_of(case))
