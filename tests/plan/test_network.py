"""sync_costs.py: bytes equal those counted by hand and those of compiled exchanges; ratios that the
documentation promises; step times."""

import dataclasses
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support import runs

from llmx import sharding
from llmx.aot import program as program_lib
from llmx.contract import Timetable
from llmx.model import families
from llmx.plan import network
from llmx.plan.network import Link, Sent
from llmx.runtime import hardware
from llmx.step import optimizers
from llmx.sync.config import SyncConfig
from llmx.sync.replicas import COMPRESSED, LOCAL, MEAN, VARIANCE, Replicas
from llmx.sync.strategy import STRATEGIES

ROOT = pathlib.Path(__file__).parents[2]
# A norm's scales and a bias beside matrices that are split; columns that no multiple of 8 divides.
TINY = families.ModelConfig(
    vocab_size=60, vocab_multiple=1, width=16, num_layers=3, num_heads=2, num_kv_heads=1,
    head_dim=6, mlp_dim=20, max_positions=32,
)  # fmt: skip
SIZES = {"stage": 1, "data": 4, "fsdp": 2, "expert": 1, "sequence": 1, "tensor": 1}
N = SIZES["data"]
LARGE = families.preset("llama3_8b")
LARGE_SIZES = SIZES | {"data": 8, "fsdp": 8}
# Bytes are added up in another order than by hand.
RELATIVE = 1e-12


def of_tiny(strategy: str, **changes) -> Replicas:
    chosen = SyncConfig(strategy=strategy, **changes)
    return network.replicas_of(chosen, TINY, SIZES)


def of_large(strategy: str, **changes) -> Replicas:
    return network.replicas_of(SyncConfig(strategy=strategy, **changes), LARGE, LARGE_SIZES)


def ring(num_bytes: float, n: int = N) -> float:
    return 2 * (n - 1) / n * num_bytes


# Numbers of TINY's tensors on a device, [rows, numbers of a row], by hand: width 16 in two halves.
MATRICES = {
    "query": (3, 8 * 2 * 6), "key": (3, 8 * 6), "value": (3, 8 * 6), "out": (3, 12 * 8),
    "gate": (3, 8 * 20), "up": (3, 8 * 20), "down": (3, 20 * 8),
    "embedding": (1, 60 * 8), "head": (1, 60 * 8),
}  # fmt: skip
VECTORS = {"attention_norm": (3, 16), "mlp_norm": (3, 16), "norm": (1, 16)}
# Of each matrix on a device, both sides: the width in two halves, and all else.
SIDES = {
    "query": (8, 12), "key": (8, 6), "value": (8, 6), "out": (12, 8), "gate": (8, 20),
    "up": (8, 20), "down": (20, 8), "embedding": (60, 8), "head": (60, 8),
}  # fmt: skip
TENSORS = MATRICES | VECTORS


def numbers(of: dict) -> int:
    return sum(rows * length for rows, length in of.values())


def test_the_tensors_are_those_counted():
    found = of_tiny("one_bit").tensors.values()
    of_shape = sorted((each.rows, each.length) for each in found)
    assert of_shape == sorted(TENSORS.values())
    sides = sorted(each.matrix[1:] for each in found if each.matrix)
    assert sides == sorted(SIDES.values())


def test_the_mean_is_a_ring_of_matrices_in_the_reduce_dtype_and_vectors_in_fp32():
    sent = network.of_step(of_tiny("mean"), MEAN, reduce_bytes=2)
    assert sent.bytes == pytest.approx(ring(2 * numbers(MATRICES) + 4 * numbers(VECTORS)))
    full = network.of_step(of_tiny("mean"), MEAN, reduce_bytes=4)
    assert full.bytes == pytest.approx(ring(4 * numbers(TENSORS)))
    assert full.hops == 2 * (N - 1)


def bytes_of_signs(tensors: dict) -> float:
    expected = 0.0
    for rows, length in tensors.values():
        bits = rows * -(-length // (N * 8))  # bytes of a server's share
        expected += (N - 1) * (bits + 4 * rows)  # to each server, with this replica's scales
        expected += (N - 1) * bits  # from it
        expected += ring(2 * 4 * rows)  # servers agree on their scales
    return expected


def bytes_of_codes(tensors: dict, per_byte: int = 1) -> float:
    expected = 0.0
    for rows, length in tensors.values():
        share = -(-length // N)
        block = min(256 * per_byte, max(8, 2 ** (share - 1).bit_length()))
        share = -(-share // block) * block
        expected += 2 * (N - 1) * rows * (share // per_byte + 4 * share // block)
    return expected


def bytes_of_the_largest(tensors: dict) -> float:
    own = sum(6 * rows * max(1, round(0.1 * length)) for rows, length in tensors.values())
    return (N - 1) * own


def bytes_of_low_rank(tensors: dict) -> float:
    summed = 0
    for name, (rows, length) in tensors.items():
        a, b = SIDES.get(name, (0, 0))
        # key and value, 8 x 6, are sent as they are: 4 x (8 + 6) is more than 48.
        summed += rows * 4 * (a + b) if 0 < 4 * (a + b) < length else rows * length
    return ring(4 * summed)


BY_HAND = {
    "one_bit": bytes_of_signs, "one_bit_lamb": bytes_of_signs, "zero_one": bytes_of_signs,
    "int8": bytes_of_codes, "top_k": bytes_of_the_largest, "power_sgd": bytes_of_low_rank,
}  # fmt: skip
SETTINGS = dict(rank=4, fraction=0.1)


@pytest.mark.parametrize("strategy", BY_HAND)
def test_what_compressors_send(strategy):
    """Bits and scales; bytes and scales of blocks; numbers with places, to all others; two factors
    of a matrix."""
    sent = network.of_exchange(of_tiny(strategy, **SETTINGS), COMPRESSED)
    assert sent.bytes == pytest.approx(BY_HAND[strategy](TENSORS), rel=RELATIVE)


@pytest.mark.parametrize("strategy", BY_HAND)
def test_what_is_not_compressed_is_sent_in_full(strategy):
    replicas = of_tiny(strategy, **SETTINGS, uncompressed=("*norm*", "embedding"))
    full = VECTORS | {"embedding": MATRICES["embedding"]}
    rest = {name: size for name, size in TENSORS.items() if name not in full}
    expected = BY_HAND[strategy](rest) + ring(4 * numbers(full))
    assert network.of_exchange(replicas, COMPRESSED).bytes == pytest.approx(expected, rel=RELATIVE)


@pytest.mark.parametrize("code, per_byte", [("int8", 1), ("fp8", 1), ("int4", 2), ("fp32", 0)])
def test_moments_travel_in_full_beside_codes(code, per_byte):
    def sent(**values):
        replicas = of_tiny("diloco", every=10, outer_format=code, **values)
        return network.of_exchange(replicas, (0,)).bytes

    full = ring(4 * numbers(TENSORS))
    own = bytes_of_codes(TENSORS, per_byte) if per_byte else full
    assert sent() == pytest.approx(own, rel=RELATIVE)
    assert sent(average_moments=True) == pytest.approx(own + 2 * full, rel=RELATIVE)


def test_an_exchange_beside_a_step_hides_behind_it():
    replicas = of_tiny("diloco", every=10, overlap=True)
    groups = network.of_run(replicas, timetable(replicas.config, 95))
    [sending] = [group for group in groups if group.phase == "sending_0"]
    slow = Link(sending.step.bytes / 3.0, latency=0.0)  # three seconds
    last = [group for group in groups if group.outer.bytes]
    rest = sum(group.steps * 3.0 for group in last)
    for compute, exposed in ((1.0, 2.0), (4.0, 0.0)):
        expected = 95 * compute + sending.steps * exposed + rest
        assert network.step_seconds(groups, slow, compute) * 95 == pytest.approx(expected)


def test_files_of_a_round():
    """Three groups: each writes its own, one besides what all share; each reads three."""
    assert network.of_round(1000, 3, momentum=True) == (4000 + 8000 / 3, 12000)
    assert network.of_round(1000, 3, momentum=False) == (4000 + 4000 / 3, 12000)


def test_stale_gradients_are_summed_in_full():
    sent = network.of_step(of_tiny("stale"), COMPRESSED, reduce_bytes=2)
    assert sent.bytes == pytest.approx(ring(4 * numbers(TENSORS)))


def timetable(chosen: SyncConfig, total_steps: int) -> Timetable:
    schedule = optimizers.make_schedule(
        optimizers.OptimizerConfig(warmup_steps=total_steps // 10), total_steps=total_steps
    )
    rates = jax.vmap(schedule)(jnp.arange(total_steps))
    return STRATEGIES[chosen.strategy].timetable(chosen, rates)


def test_a_run_begins_with_the_mean():
    replicas = of_tiny("one_bit", warmup_steps=15)
    groups = network.of_run(replicas, timetable(replicas.config, 100))
    mean, signs = (network.of_step(replicas, phase) for phase in (MEAN, COMPRESSED))
    assert [(group.phase, group.steps) for group in groups] == [(MEAN, 15), (COMPRESSED, 85)]
    assert network.per_step(groups).bytes == pytest.approx(0.15 * mean.bytes + 0.85 * signs.bytes)


def test_a_run_that_waits_for_the_variance_is_told_when():
    replicas = of_tiny("one_bit", warmup_steps=-1)
    groups = network.of_run(replicas, timetable(replicas.config, 100), freeze_step=28)
    assert [(group.phase, group.steps) for group in groups] == [(MEAN, 30), (COMPRESSED, 70)]


def test_parameters_travel_now_and_then():
    replicas = of_tiny("local_sgd", every=10)
    sent = network.per_step(network.of_run(replicas, timetable(replicas.config, 100)))
    assert sent.bytes == pytest.approx(ring(4 * numbers(TENSORS)) / 10)


def test_fragments_add_up_to_the_model():
    replicas = of_tiny("diloco", every=6, fragments=3)
    pieces = [network.of_exchange(replicas, (f,)) for f in range(3)]
    whole = network.of_exchange(replicas, (0, 1, 2))
    assert sum(piece.bytes for piece in pieces) == pytest.approx(whole.bytes, rel=RELATIVE)
    # The first has what is outside the layers: embedding, head, norm; each has one of 3 layers.
    layer = sum(length for rows, length in TENSORS.values() if rows == 3)
    assert pieces[1].bytes == pieces[2].bytes == pytest.approx(ring(4 * layer))
    # One every 2 steps: 16 rounds of 3 in 99 steps and the second once more, and all at the end.
    sent = network.per_step(network.of_run(replicas, timetable(replicas.config, 99)))
    assert sent.bytes * 99 == pytest.approx(17 * whole.bytes + pieces[1].bytes)


def test_zero_one_follows_its_timetable():
    replicas = of_tiny("zero_one", every=16)
    when = timetable(replicas.config, 400)
    signs = network.of_exchange(replicas, (0,)).bytes
    full = network.of_step(replicas, VARIANCE).bytes
    assert full == pytest.approx(ring(4 * numbers(TENSORS)))
    exchanges = sum(when.fragments_after(step) == (0,) for step in range(400))
    moments = sum(when.phase_of(step, -1) == VARIANCE for step in range(400))
    assert 0 < moments < exchanges < 400
    expected = exchanges * signs + moments * full
    sent = network.per_step(network.of_run(replicas, when))
    assert sent.bytes * 400 == pytest.approx(expected, rel=RELATIVE)


# ---------------------------------------------------------------------------- compiled exchanges


@pytest.mark.parametrize(
    "strategy, uncompressed",
    [
        *((name, ()) for name in ("mean", "one_bit", "int8", "top_k", "power_sgd")),
        *((name, ("*norm*", "embedding")) for name in ("one_bit", "power_sgd")),
    ],
    ids=[
        "mean",
        "one_bit",
        "int8",
        "top_k",
        "power_sgd",
        "one_bit, some whole",
        "power_sgd, some whole",
    ],
)
def test_bytes_are_those_of_the_compiled_exchange(strategy, uncompressed):
    mesh = sharding.make_mesh(SIZES)
    replicas = of_tiny(strategy, uncompressed=uncompressed)
    replicas = dataclasses.replace(replicas, mesh=mesh)
    stacked = replicas.stacked_specs
    kept_specs = replicas.residual_specs()

    def region(terms, kept):
        return replicas.exchange({name: term[0] for name, term in terms.items()}, kept)

    exchange = replicas.region(
        region, in_specs=(stacked, kept_specs), out_specs=(replicas.specs, kept_specs)
    )
    terms = {
        name: jax.ShapeDtypeStruct((N, *replicas.shape(name)), jnp.float32,
                                   sharding=NamedSharding(mesh, to))
        for name, to in stacked.items()
    }  # fmt: skip
    with jax.set_mesh(mesh):
        compiled = jax.jit(exchange).lower(terms, replicas.abstract_residuals()).compile()
    program = program_lib.read(compiled.as_text(), list(SIZES.items()))
    along = [each for each in program.collectives if "data" in (each.axes or ())]
    # Servers sum scales over the axes that split a replica too, in one ring of all its devices.
    wide = [each for each in along if each.axes != ("data",)]
    there = sum(each.bytes for each in wide)
    sent = program_lib.wire_bytes([each for each in along if each.axes == ("data",)]) + ring(there)
    assert sent == pytest.approx(network.of_exchange(replicas, COMPRESSED).bytes, rel=RELATIVE)
    assert bool(wide) == (strategy == "one_bit")


def test_a_model_is_counted_as_its_recipe():
    model = dataclasses.replace(TINY, vocab_size=260)
    config = runs.make_config(
        model, mesh={"data": 4, "fsdp": 2}, batch__size=8, batch__sequence_length=16,
        sharding__layout="hsdp", sync__strategy="int8",
    )  # fmt: skip
    replicas = runs.replicas(runs.make_recipe(config), config.sync)
    of_model = network.replicas_of(config.sync, model, SIZES)
    assert replicas.tensors == of_model.tensors
    assert replicas.specs == of_model.specs


# ---------------------------------------------------------------------------------------- ratios


def test_ratios_on_a_large_model():
    """What docs/slow_networks.md says of Llama-3 8B, eight replicas of eight."""

    def sent(strategy: str, phase: str, width: int) -> float:
        return network.of_step(of_large(strategy), phase, reduce_bytes=width).bytes

    fp32, bf16 = sent("mean", MEAN, 4), sent("mean", MEAN, 2)
    one_bit = sent("one_bit", COMPRESSED, 2)
    assert one_bit <= fp32 / 30
    assert one_bit <= bf16 / 15
    assert sent("int8", COMPRESSED, 2) <= fp32 / 3.8
    assert sent("power_sgd", COMPRESSED, 2) <= fp32 / 50
    # A whole run with 15% of warm-up, against the mean of 16-bit gradients in all steps.
    chosen = SyncConfig(strategy="one_bit", warmup_steps=150)
    groups = network.of_run(of_large("one_bit", warmup_steps=150), timetable(chosen, 1000))
    assert bf16 / network.per_step(groups).bytes >= 4.9


def test_what_is_kept_is_an_error_per_number_and_a_share_of_one():
    replicas = of_large("one_bit")
    numbers_here = sum(each.rows * each.length for each in replicas.tensors.values())
    kept = sharding.device_bytes(replicas.abstract_residuals())
    assert kept == pytest.approx(numbers_here * (4 + 4 / 8), rel=1e-4)


def test_the_example_of_the_docs_prints_what_the_docs_say(capsys):
    page = (ROOT / "docs" / "slow_networks.md").read_text()
    code, printed = re.search(r"```python\n(from llmx.+?)```\n\n```\n(.+?)```", page, re.S).groups()
    exec(compile(code, "docs/slow_networks.md", "exec"), {})
    assert capsys.readouterr().out == printed


# ----------------------------------------------------------------------------------------- times


def test_step_times_by_hand():
    link = Link(bandwidth=100.0, latency=0.5, overlap=0.5)
    sent = Sent(bytes=300.0, hops=2)  # 4 seconds

    def group(phase: str, step: Sent, outer: Sent = Sent(0, 0), steps: int = 1):  # noqa: B008
        return network.StepGroup(phase, (), steps, step, outer)

    assert link.seconds(sent) == 4
    # The mean hides behind half of the computation, an exchange behind none.
    assert network.step_seconds([group(MEAN, sent)], link, 6.0) == 6 + 4 - 3
    assert network.step_seconds([group(MEAN, sent)], link, 10.0) == 10
    assert network.step_seconds([group(COMPRESSED, sent)], link, 6.0) == 6 + 4
    # One outer step in four steps.
    local = [group(LOCAL, Sent(), steps=3), group(LOCAL, Sent(), sent)]
    assert network.step_seconds(local, link, 6.0) == 6 + 4 / 4
    assert [network.late_seconds(sent, link, 6.0, s) for s in (0, 1, 2)] == [10, 6, 6]
    assert network.late_seconds(sent, link, 1.0, 3) == 4


def test_compute_is_about_six_flops_per_parameter_and_token():
    chip = hardware.CHIPS["h100_sxm"]
    seconds = network.compute_seconds(
        LARGE, tokens=8192, sequence_length=8192, chip=chip, utilization=0.4
    )
    six_n = 6 * 8.03e9 * 8192 / (989.5e12 * 0.4)
    # Attention's scores are above it, the embedding table, which is looked up, below.
    assert six_n < seconds < 1.3 * six_n


def test_one_replica_sends_nothing():
    alone = network.replicas_of(SyncConfig(strategy="one_bit"), TINY, SIZES | {"data": 1})
    assert network.of_step(alone, MEAN) == network.of_step(alone, COMPRESSED) == Sent(0, 0)


def test_the_specs_are_whole_along_data():
    for to in of_large("one_bit").specs.values():
        assert isinstance(to, PartitionSpec)
        assert "data" not in sharding.used_axes(to)
