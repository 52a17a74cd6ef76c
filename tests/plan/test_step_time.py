"""The time of a step: its operators are the model's products, its messages the links' bytes."""

import dataclasses
import importlib.resources
import pathlib
import types

import numpy as np
import pytest

from llmx import config
from llmx.aot import links
from llmx.config import checks, recipe
from llmx.model import costs, families, remat_costs
from llmx.pipeline import schedules, simulate
from llmx.plan import __main__ as command
from llmx.plan import (
    auto,
    calibrations,
    gemm,
    hardware_file,
    machines,
    operators,
    routes,
    sizes,
    step_time,
    traffic,
)
from llmx.plan import passes as passes_lib
from llmx.plan.operators import BACKWARD, FORWARD, LOSS
from llmx.plan.traffic import Message

ROOT = pathlib.Path(__file__).parents[2]
H100, V5P = machines.parse("h100:2x8"), machines.parse("v5p:2x2x4")


def _resolved(num=16, family="llama3", **keys):
    run = config.default()
    run.model = families.preset(
        family, width=1024, num_layers=8, num_heads=16, num_kv_heads=16 if family == "gpt2" else 8,
        head_dim=64, mlp_dim=4096, vocab_size=4096, max_positions=2048,
    )  # fmt: skip
    run.batch.size, run.batch.sequence_length = 32, 2048
    run.mesh.data, run.mesh.fsdp, run.sharding.layout = 1, -1, "zero3"
    for key, value in keys.items():
        config.set_value(run, key.replace("__", "."), value)
    return checks.resolve(run, num)


CASES = {
    "plain": {},
    "dots": dict(remat="dots"),
    "none": dict(remat="none"),
    "names": dict(remat="names"),
    "tensor": dict(mesh__tensor=4),
    "sequence": dict(mesh__sequence=4),
    "microbatches": dict(batch__accumulation=2),
    "gpt2": dict(family="gpt2", remat="full"),
    "gemma3": dict(family="gemma3", remat="attention"),
}


@pytest.mark.parametrize("machine", [H100, V5P], ids=["gpu", "tpu"])
@pytest.mark.parametrize("case", CASES)
def test_products_are_those_of_the_model(case, machine):
    """6 FLOPs a parameter and token, and what remat repeats, spread over all devices."""
    run = _resolved(**CASES[case])
    found = step_time.of(run, machine)
    times = step_time.repetitions(sizes.of(run))
    products = [one for one in found.operators if one.shape != (0, 0, 0)]
    flops = sum(one.flops * one.count * times[one.moment] for one in products)
    model, length = run.model, run.batch.sequence_length
    scores = sum(costs.scores_by_block(model, length, True))
    wanted = 3 * (costs.forward_flops_per_token(model, sequence_length=length) - scores)
    again = remat_costs.recomputed_flops_by_layer(
        model, sequence_length=length, text=run.remat, loss_chunks=1
    )
    attended = [
        remat_costs.recomputed_flops(model, policy, of) - remat_costs.recomputed_flops(
            model, policy, 0.0)
        for policy, of in zip(
            remat_costs.policies(model, run.remat), costs.scores_by_block(model, length, True),
            strict=True,
        )
    ]  # fmt: skip
    wanted += sum(again) - sum(attended)
    assert flops * 16 == pytest.approx(wanted * run.batch.size * length, rel=0.01)


@pytest.mark.parametrize("machine", [H100, V5P], ids=["gpu", "tpu"])
@pytest.mark.parametrize("case", CASES)
def test_parts_add_up(case, machine):
    found = step_time.of(_resolved(**CASES[case]), machine)
    assert sum(found.parts.values()) == pytest.approx(found.step)
    assert all(seconds >= 0 for seconds in found.parts.values())
    assert found.compute + found.exposed + found.bubble == pytest.approx(found.step)
    assert found.exposed <= found.communication * (1 + 1e-9)


def test_a_pipeline_takes_the_ticks_of_its_schedule():
    keys = dict(mesh__stage=4, batch__accumulation=8, remat="full")
    for name in ("1f1b", "zb_h1", "interleaved_1f1b"):
        virtual = 2 if name.startswith("inter") else 0
        run = _resolved(
            **keys, pipeline__schedule=name, pipeline__virtual_stages=virtual, mesh__fsdp=4
        )
        counted = sizes.of(run)
        parts, listed = step_time.computed(counted, H100, 1.0)
        table = schedules.table_of(run.pipeline, stages=4, microbatches=8)
        layers = 8 // table.num_chunks
        forward, backward = (operators.seconds(listed, of) for of in (FORWARD, BACKWARD))
        weight = 0.0
        if table.splits_backward:
            weight = sum(
                one.seconds * one.count for one in listed
                if one.moment == BACKWARD and one.name.endswith("weight gradient")
            )  # fmt: skip
        each = [layers * of for of in (forward, backward - weight, weight)]
        times = [[of] * table.num_chunks for of in each]
        line = simulate.simulate(table, forward=times[0], backward=times[1], weight=times[2])
        outside = 8 * operators.seconds(listed, LOSS) + operators.seconds(listed, operators.ENDS)
        assert sum(parts.values()) == pytest.approx(line.step_time + outside)
        assert parts[step_time.BUBBLE] > 0


@pytest.mark.parametrize("machine", [H100, V5P], ids=["gpu", "tpu"])
def test_an_update_takes_the_bytes_of_its_optimizer(machine):
    def update(**keys):
        run = _resolved(**keys)
        listed = operators.of(sizes.of(run), machine.core, step_time.MOVED[run.launch.platform])
        (one,) = (one for one in listed if one.name == "update")
        return one.bytes, run

    keys = dict(launch__platform="gpu" if machine.on_gpu else "tpu")
    moved = step_time.MOVED[keys["launch__platform"]]
    adamw, run = update(**keys)
    numbers = costs.num_parameters(run.model) / 16  # norms aside
    # Fitted to the programs of AdamW in fp32.
    assert adamw == pytest.approx(moved.update * 4 * numbers, rel=1e-3)
    # Of each number: parameters twice, gradients once, moments and averages twice.
    for bytes_of, more in (
        (4 * 3 + 4 * 2, dict(optimizer__name="lion")),
        (4 * 3, dict(optimizer__name="adafactor")),
        (4 * 3 + 4 * 2 * 2, dict(optimizer__name="lamb")),
        (4 * 3 + 2 * 2 * 2, dict(optimizer__moments="bf16")),
        (4 * 3 + 2 * 2 * (1 + 1 / 32), dict(optimizer__moments="int8")),
        (4 * 3 + 4 * 2 * 2 + 4 * 2, dict(optimizer__ema_decay=0.999)),
    ):
        assert update(**keys, **more)[0] == pytest.approx(adamw * bytes_of / 28, rel=1e-3), more


def test_messages_on_gpus_take_nvlink_and_adapters():
    on = routes.Routes(H100, {"data": 2, "fsdp": 8})
    rates = H100.rates
    inside = Message("weights", "all-gather", ("fsdp",), 8e9, 1.0, 8)
    assert on.seconds(inside) == pytest.approx(7e9 / rates.link, rel=0.01)
    outside = Message("gradients", "all-reduce", ("data",), 8e9, 1.0, 2)
    assert on.seconds(outside) == pytest.approx(8e9 / rates.network, rel=0.01)
    both = Message("weights", "all-gather", ("data", "fsdp"), 8e9, 1.0, 16)
    longest = max(7e9 / rates.link, 4e9 / 8 / rates.network)
    assert on.seconds(both) == pytest.approx(longest, rel=0.01)


def test_messages_on_a_torus_take_the_axes_that_jax_gives_them():
    on = routes.Routes(V5P, {"fsdp": 4, "tensor": 4})
    for axes in (("fsdp",), ("tensor",), ("fsdp", "tensor")):
        size = 4 ** len(axes)
        seconds = on.seconds(Message("weights", "all-gather", axes, 1e9, 1.0, size))
        least = 1e9 * (1 - 1 / size) / (6 * V5P.rates.link)
        assert least < seconds < 7 * least
    ring = on.seconds(Message("keys", "collective-permute", ("tensor",), 1e9, 1.0, 4))
    assert ring >= 1e9 / V5P.rates.link


def test_what_is_waited_for():
    """Of tensor parallelism all, or half of one turn; of others what the programs hide. (GPUs hide
    more where there are no turns: below.)"""
    message = lambda purpose, kind="all-gather": Message(purpose, kind, ("a",), 1.0, 1.0, 2)  # noqa: E731
    for overlap in (step_time.TPU, step_time.GPU):
        activations = [step_time.share(message("activations"), overlap, n) for n in (1, 2, 4)]
        assert activations == [1.0, 0.25, 0.125]
        assert step_time.share(message("heads"), overlap, 1) == overlap.heads
        assert step_time.share(message("updated parameters"), overlap, 1) == overlap.once
        assert step_time.share(message("exchange"), overlap, 1) == 1.0


@pytest.mark.parametrize(
    ("keys", "kind", "waited"),
    [
        # Of N passes over layers each way, with messages of a second: first gathers, the others
        # behind 0.3 s of casts; 2 N of the backward pass behind half of 1.2 s; sums behind 0.5 s.
        (dict(remat="none"), "all-gather", 1 + 0.7 + (2 - 0.6)),
        (dict(remat="none"), "reduce-scatter", (2 - 0.5) + (2 - 0.6)),
        # Run again: both gathers, one behind 0.2 s of casts, and attention's sum.
        (dict(remat="full"), "all-gather", 1 + 0.7 + (2 - 0.6) + 1 + 0.8),
        (dict(remat="full"), "reduce-scatter", (2 - 0.5) + (2 - 0.6) + 1),
        # All-reduces are alone behind products of weight gradients.
        (dict(remat="full", sharding__sequence_parallel=False), "all-reduce", 1.5 + 0.8 + 1),
    ],
)
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("repeats", [1, 2])
def test_what_hides_activations_on_gpus(keys, kind, waited, microbatches, repeats):
    run = _resolved(
        mesh__tensor=2, batch__accumulation=microbatches, model__repeats=repeats,
        **keys,
    )  # fmt: skip
    counted, passes = sizes.of(run), passes_lib.of(run)
    seconds = [
        ("query weight gradient", BACKWARD, 0.5), ("out weight gradient", BACKWARD, 0.7),
        ("weights", FORWARD, 0.3), ("weights again", BACKWARD, 0.2), ("weights", BACKWARD, 9.0),
        ("saves", FORWARD, 0.5), ("saves", BACKWARD, 9.0), ("query forward", FORWARD, 9.0),
    ]  # fmt: skip
    listed = [operators.Operator(name, "", moment, of, repeats) for name, moment, of in seconds]
    waits = step_time._Waits(counted, passes, listed, step_time.GPU, 1)
    (one,) = (of for of in traffic.over_tensor(counted, passes)
              if (of.kind, of.purpose) == (kind, "activations"))  # fmt: skip
    layers = microbatches * repeats * run.model.num_layers
    ends = 2 * microbatches  # of a lookup and of the head
    assert waits._alone(one, one.count) == pytest.approx(layers * waited + ends)


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter", "all-reduce"])
@pytest.mark.parametrize("repeats", [1, 2])
def test_the_search_s_bound_where_all_that_can_be_is_hidden(kind, repeats):
    """With turns, too, which a schedule may not allow."""
    run = _resolved(
        mesh__tensor=2, batch__accumulation=4, model__repeats=repeats, remat="none",
        sharding__sequence_parallel=kind != "all-reduce",
    )  # fmt: skip
    counted, passes = sizes.of(run), passes_lib.of(run)
    names = (("weight gradient", BACKWARD), ("weights", FORWARD), ("saves", FORWARD))
    listed = [operators.Operator(name, "", moment, 100.0, repeats) for name, moment in names]
    waits = step_time._Waits(counted, passes, listed, step_time.GPU, 1)
    (one,) = (of for of in traffic.over_tensor(counted, passes)
              if (of.kind, of.purpose) == (kind, "activations"))  # fmt: skip
    for turns in (1, 2, 4):
        least = step_time.least_share(one, step_time.GPU, turns) * one.count
        assert least <= waits._alone(one, one.count)


def test_slices_are_joined_by_their_network():
    machine = machines.parse("2@v5e:2x2")
    on = routes.Routes(machine, {"data": 2, "fsdp": 4}, ("data",))
    send = on.seconds(Message("between stages", "collective-permute", ("data",), 1e9, 1.0, 2))
    assert send == pytest.approx(1e9 / machine.rates.network, rel=0.01)
    seconds = on.seconds(Message("gradients", "all-reduce", ("data",), 1e9, 1.0, 2))
    assert seconds == pytest.approx(1e9 / machine.rates.network, rel=0.01)


def test_a_network_of_unknown_bandwidth_is_refused(capsys):
    argv = [f"--config={ROOT}/configs/gpt2_124m.py", "--config.batch.size=64"]
    sliced = ["--machine=2@v4:2x2x2", "--config.mesh.data=2", "--config.mesh.fsdp=8",
              "--config.sharding.layout=hsdp", "--config.mesh.across_slices=('data',)"]  # fmt: skip
    assert command.main([*argv, *sliced]) == 2
    printed = capsys.readouterr()
    assert "rates.network=None; give it in a hardware file" in printed.err and not printed.out
    assert command.main([*argv, *sliced, "--search"]) == 2
    unknown = dataclasses.replace(H100, rates=dataclasses.replace(H100.rates, network=None))
    links = routes.Routes(unknown, {"data": 2, "fsdp": 8})
    with pytest.raises(ValueError, match="between hosts of NVIDIA H100"):
        links.seconds(Message("gradients", "all-reduce", ("data",), 1e6, 1, 2))
    with pytest.raises(ValueError, match="between hosts of NVIDIA H100"):
        links.seconds(Message("", "collective-permute", ("data",), 1e6, 1, 2))
    assert links.seconds(Message("weights", "all-gather", ("fsdp",), 1e6, 1, 8)) > 0


def test_faster_links_are_never_slower():
    run = _resolved(mesh__tensor=4)
    for field in ("link", "network"):
        rates = dataclasses.replace(H100.rates, **{field: 2 * getattr(H100.rates, field)})
        faster = step_time.of(run, dataclasses.replace(H100, rates=rates))
        assert faster.step <= step_time.of(run, H100).step
        assert faster.compute == step_time.of(run, H100).compute


@pytest.mark.parametrize(("name", "times"), [("h100:4x4", 989.5 / 67), ("v5e:4x4", 6.0)])
def test_fp32_is_computed_exactly(name, times):
    """Not in TF32, nor in one product of bfloat16: the step asks for the precision "highest"."""
    machine = machines.parse(name)
    bf16, fp32 = (
        step_time.of(_resolved(num=16, precision=precision), machine)
        for precision in ("bf16", "fp32")
    )
    for part in (operators.PRODUCTS, operators.ATTENTION):
        # Less by the time to start operators, which is the same.
        assert 0.9 * times < fp32.parts[part] / bf16.parts[part] < 1.001 * times, part


@pytest.mark.parametrize(
    ("keys", "times"),
    [
        (dict(model__head_dim=64), 2.0), (dict(model__head_dim=96), 4 / 3),
        (dict(model__head_dim=128), 1.0),
        # Blockwise attention computes heads as they are.
        (dict(model__head_dim=64, attention__implementation="blockwise"), 1.0),
    ],
)  # fmt: skip
def test_kernels_of_tpus_fill_up_heads(keys, times):
    run = _resolved(**keys)
    as_they_are, filled = (
        _attention_flops(run, moved) / moved.attention_backward
        for moved in (operators.GPU, operators.TPU)
    )
    np.testing.assert_allclose(filled, times * as_they_are)


def _attention_flops(run, moved):
    """Of one layer's backward pass, by the kernel's own count."""
    listed = operators.of(sizes.of(run), V5P.core, moved)
    return next(one.flops for one in listed if one.name == "attention backward")


def test_products_on_tpus_are_by_their_tables():
    core = calibrations.core_of("tpu_v5p")
    rows = {(row.m, row.n, row.k) for row in core.calibration.table}
    assert len(rows) >= 60 and (8192, 14336, 4096) in rows
    for shape in sorted(rows)[::7]:
        shares = [row.share for row in core.calibration.table if row[:3] == shape]
        flops = 2.0 * np.prod(shape)
        found = flops / gemm.seconds(*shape, "bfloat16", core) / core.chip.peak("bfloat16")[0]
        alone = np.exp(np.mean(np.log(shares)))
        assert found == pytest.approx(calibrations.IN_STEPS["torus_3d"] * alone, rel=1e-3)
    assert calibrations.core_of("tpu_v4").calibration.table == core.calibration.table


def test_products_on_hopper_are_as_measured():
    """The file that `calibrate` wrote: read back whole, and taken for both chips."""
    path = importlib.resources.files("llmx.plan") / "tables" / "h200.json"
    own = hardware_file.read(path)
    assert own.measured["device_kind"] == "NVIDIA H200"
    assert hardware_file.to_text(own) == path.read_text()
    for name in ("h200", "h100_sxm"):
        core = calibrations.core_of(name)
        assert core.calibration.table == own.core.calibration.table
        for row in core.calibration.table[::20]:
            same = [one.share for one in core.calibration.table if one[:3] == row[:3]]
            seconds = gemm.seconds(*row[:4], core) - core.calibration.start
            flops = 2.0 * np.prod(row[:3])
            share = flops / seconds / core.chip.peak("bfloat16")[0]
            alone = np.exp(np.mean(np.log(same)))
            assert share == pytest.approx(calibrations.IN_STEPS["switch"] * alone, rel=1e-3)


def test_products_of_odd_sizes_are_slower_on_gpus():
    """Beside sizes that differ by one: no table has so small a step."""
    aligned = [16384, 4752, 1024]

    def times(name: str, sizes) -> float:
        core = calibrations.core_of(name)
        return gemm.seconds(*sizes, "bfloat16", core) - core.calibration.start

    for place in range(3):
        odd = [size - (at == place) for at, size in enumerate(aligned)]
        for name, factor in (("h200", 1 / calibrations.UNALIGNED), ("tpu_v5p", 1.0)):
            assert times(name, odd) / times(name, aligned) == pytest.approx(factor, rel=0.02)


def _device(index, kind, platform, coords=None, process=0):
    return types.SimpleNamespace(
        id=index, device_kind=kind, platform=platform, coords=coords, process_index=process,
        slice_index=0, core_on_chip=0,
    )  # fmt: skip


def test_devices_that_are_there_are_a_machine():
    gpus = [_device(i, "NVIDIA H100 80GB HBM3", "gpu", process=i // 8) for i in range(16)]
    assert auto._machine(gpus).topology == H100.topology
    chips = [
        _device(i, "TPU v5", "tpu", (i % 2, i // 2 % 2, i // 4), process=i // 4) for i in range(16)
    ]
    assert auto._machine(chips).topology == V5P.topology
    flat = [_device(i, "TPU v5 lite", "tpu", (i % 2, i // 2, 0)) for i in range(8)]
    assert auto._machine(flat).topology.name == "v5e:2x4"
    with pytest.raises(ValueError, match="devices of kind 'A card' are not known"):
        auto._machine([_device(0, "A card", "gpu")])


def test_rates_of_both_kinds_are_those_of_aot():
    for machine in (H100, V5P):
        assert machine.rates == links.rates_of(machine.topology.chip)


def test_no_step_is_shorter_than_the_messages_of_one_kind_of_links():
    """However much of a message the programs hide: there must be something to compute beside it."""
    machine = machines.parse("h100:2x8")
    run = _resolved(
        mesh__data=16, mesh__fsdp=1, sharding__layout="zero1", batch__size=16,
        batch__sequence_length=128, model__width=4096, model__mlp_dim=16384, model__num_layers=2,
    )  # fmt: skip
    found = step_time.of(run, machine)
    routed = routes.Routes(machine, sizes.of(run).mesh, ())
    messages = traffic.of(sizes.of(run), turns=1, on_gpu=True)
    assert {routed.links_of(one) for one in messages} == {"between hosts"}
    on_links = sum(routed.seconds(one) * one.count for one in messages)
    assert found.communication == pytest.approx(on_links)
    assert found.compute < on_links <= found.step * (1 + 1e-9)


def test_no_wait_is_longer_than_the_messages():
    """Of a pipeline with one layer a stage the edges would be more than all its layers."""
    run = _resolved(
        mesh__stage=4, mesh__fsdp=2, mesh__tensor=2, batch__accumulation=4, model__num_layers=4,
        pipeline__schedule="1f1b",
    )  # fmt: skip
    found, routed = step_time.of(run, H100), routes.Routes(H100, sizes.of(run).mesh, ())
    by_axes = {}
    turns = recipe.turns_of(run, H100.topology.device_kind)
    for one in traffic.of(sizes.of(run), turns=turns, on_gpu=True):
        axes = f"{step_time.EXPOSED}: {','.join(one.axes)}"
        by_axes[axes] = by_axes.get(axes, 0.0) + routed.seconds(one) * one.count
    assert found.parts[f"{step_time.EXPOSED}: fsdp"] > 0
    for axes, seconds in by_axes.items():
        assert found.parts.get(axes, 0.0) <= seconds * (1 + 1e-9), axes
