"""The planner's counts beside programs that were compiled: tests/golden/programs.jsonl."""

import dataclasses
import functools
import json
import pathlib
import runpy
import sys

import numpy as np
import pytest
from support.resolved import resolved

from llmx import config
from llmx.aot import topologies
from llmx.config import state_memory
from llmx.model import families
from llmx.plan import __main__ as command
from llmx.plan import compiled_programs, exchange, memory, search, sizes, traffic
from llmx.plan import passes as passes_lib
from llmx.step import optimizers

ROOT = pathlib.Path(__file__).parents[2]
PROGRAMS = compiled_programs.read(ROOT / "tests" / "golden" / "programs.jsonl")
DRAWN = compiled_programs.read(ROOT / "tests" / "golden" / "drawn_programs.jsonl")
BY_NAME = {program.name: program for program in PROGRAMS}
DRAWN_BY_NAME = {program.name: program for program in DRAWN}
# Plain options at real widths on few devices, in a cover of their pairs; and some beside it.
PLAIN = compiled_programs.read(ROOT / "tests" / "golden" / "plain_programs.jsonl")
PIPELINES = compiled_programs.read(ROOT / "tests" / "golden" / "plain_pipelines.jsonl")

ALL = {
    program.name: program
    for path in (ROOT / "tests" / "golden").glob("*.jsonl")
    for program in compiled_programs.read(path)
}


@functools.cache
def errors(name):
    return compiled_programs.errors(ALL[name], ROOT / "configs")


def test_there_are_programs_of_all_kinds():
    assert len(PROGRAMS) >= 40
    names = " ".join(BY_NAME)
    kinds = (
        "v5p", "h100", "tensor", "sequence", "pipeline", "zero1", "zero2", "hsdp", "none", "sqrt",
        "accumulation", "fp16", "fp8", "offload", "ulysses", "gather=step",
    )  # fmt: skip
    assert all(kind in names for kind in kinds)


@pytest.mark.parametrize("name", BY_NAME)
def test_peak_memory(name):
    assert abs(errors(name).peak) <= 0.08


def test_peak_memory_on_average():
    assert np.mean([abs(errors(name).peak) for name in BY_NAME]) <= 0.025


def test_step_time():
    """Beside the timelines of the programs, operators and overlap by `llmx.aot`."""
    found = {name: abs(errors(name).step) for name in BY_NAME}
    assert np.mean(list(found.values())) <= 0.06
    assert sum(error <= 0.1 for error in found.values()) >= 0.85 * len(found)


@pytest.mark.parametrize("name", BY_NAME)
def test_state(name):
    """But for the batch, scalars and padding: TPUs fill 375 columns up to 384."""
    program = BY_NAME[name]
    allowed = 12 * 2**20 + ("width=3000" in name) * 0.024 * program.state
    assert abs(errors(name).state) * program.state <= allowed


@pytest.mark.parametrize("name", BY_NAME)
def test_bytes_sent(name):
    for axes, error in errors(name).sent.items():
        assert abs(error) <= 0.02, axes


def test_what_is_admitted_fits():
    """Few of them are near their device's limit, so also: few are counted 5% too low or more, which
    is what is left free."""
    found = [(program, errors(name)) for name, program in ALL.items()]
    for program, error in found:
        limit = topologies.parse(program.topology).hbm_bytes
        counted = (1 + error.peak) * program.peak
        assert program.peak <= limit or counted > search.ADMITTED * limit, program.name
    pipelines = {program.name for program in PIPELINES}
    low = [program.name for program, error in found if error.peak < search.ADMITTED - 1]
    others = [name for name in low if name not in pipelines]
    assert len(found) >= 610 and len(others) <= 0.07 * (len(found) - len(pipelines)), others
    assert len(low) - len(others) <= 0.1 * len(pipelines), low


def test_peak_memory_of_programs_that_were_drawn_on_average():
    """Of those that take 2 GiB of a device and more."""
    large = [name for name, program in DRAWN_BY_NAME.items() if program.peak >= 2 * 2**30]
    off = [abs(errors(name).peak) for name in large]
    assert len(large) >= 100 and np.mean(off) <= 0.026 and max(off) <= 0.1


def test_plain_options():
    """Few layers at real widths. In one XLA:TPU sums a tied table's gradient in fp32 whole, which
    is counted as scattered chunk by chunk."""
    found = [errors(program.name) for program in PLAIN]
    off = sorted(abs(error.peak) for error in found)
    assert len(off) >= 95 and np.mean(off) <= 0.033
    assert sum(error > 0.08 for error in off) <= 0.12 * len(off) and off[-1] <= 0.165
    assert all(
        abs(of.state) * one.state <= 12 * 2**20 for one, of in zip(PLAIN, found, strict=True)
    )
    sent = [max(map(abs, error.sent.values()), default=0) for error in found]
    assert sum(of > 0.02 for of in sent) <= 1


def test_plain_pipelines():
    """On GPUs."""
    found = [errors(program.name) for program in PIPELINES]
    off = [abs(error.peak) for error in found]
    assert len(off) >= 220 and np.mean(off) <= 0.032 and max(off) <= 0.16
    assert sum(of > 0.08 for of in off) <= 0.06 * len(off)
    assert all(abs(error.state) <= 0.0035 for error in found)
    steps = [abs(error.step) for error in found]
    assert np.mean(steps) <= 0.075 and max(steps) <= 0.27
    assert all(abs(of) <= 0.02 for error in found for of in error.sent.values())


# What is known not to be counted (docs/plan.md): of a program's peak, and of its bytes.
FURTHER_OFF = {
    # 36 columns of 2,304 over 64 devices: XLA:TPU scatters 40 or 48.
    ("gemma3_1b", "v5p:4x4x4", "model.width=2304", "mesh.fsdp=64"): (0.02, 0.13),
    # XLA:TPU rounds 2,048 positions of a reduce-scatter over `tensor` up to 2,112.
    ("gemma3_1b", "v5e:2x4", "mesh.tensor=4", "sharding.layout=zero1"): (0.02, 0.031),
}


def known(program):
    of = {program.config, program.topology, *program.flags}
    return next((far for names, far in FURTHER_OFF.items() if of.issuperset(names)), (0.0, 0.02))


@pytest.mark.parametrize("name", DRAWN_BY_NAME)
def test_programs_that_were_drawn(name):
    """Small and odd ones, whose memory is further off (docs/plan.md), but little of a device's, or
    of what is needed where that is more; their bytes are not."""
    found, program = errors(name), DRAWN_BY_NAME[name]
    run, topology = compiled_programs.resolved(program, ROOT / "configs")
    whole = max(topology.hbm_bytes, program.peak)
    within = abs(found.peak) * program.peak <= (0.02 if program.peak < whole else 0.08) * whole
    assert within or abs(found.peak) <= known(program)[0]
    # XLA:TPU may scatter what is counted as summed of the head's gradient, see `plan.uncertain`.
    head = sizes.of(run).head.name
    half = {
        ",".join(one.axes): one.sent / 2 for one in exchange.on(sizes.of(run), topology)
        if topology.platform == "tpu" and (one.name, one.kind) == (head, "all-reduce")
    }  # fmt: skip
    allowed = known(program)[1]
    for axes, error in found.sent.items():
        sent = program.sent.get(axes, 1.0)
        assert abs(error) <= allowed or abs(error * sent - half.get(axes, 0.0)) <= 0.02 * sent, axes


def of_golden(path):
    """Each program of a file, and its errors."""
    return [(program, errors(program.name)) for program in compiled_programs.read(path)]


def test_programs_of_few_devices():
    """One TPU or GPU, two, or whole parameters on each: where little or nothing is gathered. GPT-2
    on one v5e, of 2.5 GiB, is 9% off (docs/plan.md)."""
    found = of_golden(ROOT / "tests" / "golden" / "few_devices.jsonl")
    *others, last = sorted(abs(one.peak) for _, one in found)
    assert len(found) >= 40 and np.mean([abs(one.peak) for _, one in found]) <= 0.03
    assert max(others) <= 0.08 and last <= 0.095
    assert np.mean([abs(one.step) for _, one in found]) <= 0.1
    assert all(abs(error) <= 0.02 for _, one in found for error in one.sent.values())


def test_bytes_of_mlps_whose_lanes_have_a_large_prime_factor():
    """Two layers over 8 to 64 TPUs: some sums of gradients are scattered, some are whole."""
    found = of_golden(ROOT / "tests" / "golden" / "prime_lanes.jsonl")
    assert len(found) == 8
    assert all(abs(error) <= 0.001 for _, one in found for error in one.sent.values())


def test_programs_of_few_tokens():
    """256 to 2,048 tokens a GPU, of 8 to 256 GPUs: what is gathered decides.
    That over 256, of 2 GiB, is 18% off (docs/plan.md)."""
    found = sorted(
        abs(one.peak) for _, one in of_golden(ROOT / "tests" / "golden" / "few_tokens.jsonl")
    )
    assert len(found) == 7 and np.mean(found[:-1]) <= 0.05 and found[-2] <= 0.08
    assert found[-1] <= 0.2


def test_lookups_of_nothing_are_left_out_on_gpus():
    """In the last turn of a loop: of chunks of one layer, or interleaved with branches."""
    kinds = dict(model__layer_pattern=("local", "local", "global"), model__window=64)
    interleaved = PIPELINE | dict(pipeline__schedule="interleaved_1f1b", model__num_layers=8)
    for keys, idle in (
        (interleaved, 0), (interleaved | kinds, 2), (interleaved | dict(model__num_layers=4), 2),
        # Chunks of a whole period take no branches.
        (interleaved | kinds | dict(model__num_layers=12), 0),
        (PIPELINE | kinds | dict(pipeline__schedule="1f1b", model__num_layers=8), 0),
    ):  # fmt: skip
        run = resolved(**keys)
        assert passes_lib.of(run).idle == idle
        lookups = [
            sum(one.count for one in traffic.of(sizes.of(run), on_gpu=on_gpu)
                if one.purpose == "lookups and heads")
            for on_gpu in (False, True)
        ]  # fmt: skip
        assert lookups[0] - lookups[1] == idle


@pytest.mark.parametrize(
    ("keys", "unread"), [({}, 2), (dict(mesh__fsdp=2, mesh__tensor=2), 0)], ids=["fsdp", "tensor"]
)
def test_sends_that_no_stage_stores_are_left_out_on_gpus(keys, unread):
    """GPipe: what the last ticks of both directions send arrives nowhere."""
    run = resolved(**PIPELINE | keys)
    passes = passes_lib.of(run)
    assert (passes.sends, passes.unread, passes.alike) == (10, 2, 10)
    counts = [
        one.count for on_gpu in (False, True)
        for one in traffic.of(sizes.of(run), on_gpu=on_gpu) if one.kind == "collective-permute"
    ]  # fmt: skip
    assert counts == [10, 10 - unread]


PIPELINE = dict(
    mesh__stage=2,
    mesh__data=1,
    mesh__fsdp=4,
    sharding__layout="zero3",
    batch__accumulation=4,
    pipeline__schedule="gpipe",
)


def _gpt3(**keys):
    run = config.default()
    run.model = families.preset("gpt3_175b")
    batch = dict(batch__size=1536, batch__sequence_length=2048, batch__accumulation=8)
    return sizes.of(resolved(run, **dict(mesh__data=1) | batch | keys))


def test_the_textbook_answer_for_gpt3():
    """16 bytes a parameter (ZeRO, arXiv 1910.02054): 2.8 TB, here of fp32 parameters, two moments
    and fp32 sums of gradients."""
    of_run = _gpt3(mesh__fsdp=1)
    held = memory.of(of_run)
    total = sum(held.state.values()) + held.peaks[memory.BACKWARD]["sums of gradients"]
    assert total == pytest.approx(16 * 175e9, rel=0.01)


def test_the_state_of_gpt3_is_split_by_each_axis():
    whole = sum(memory.state(_gpt3(mesh__fsdp=1)).values())
    for mesh, ways in (
        (dict(mesh__fsdp=64), 64), (dict(mesh__fsdp=8, mesh__tensor=8), 64),
        (dict(mesh__fsdp=1, mesh__tensor=8), 8),
    ):  # fmt: skip
        assert sum(memory.state(_gpt3(**mesh)).values()) == pytest.approx(whole / ways, rel=0.01)
    # ZeRO-1 splits the moments only; ddp nothing.
    replicated = _gpt3(mesh__data=8, mesh__fsdp=1, sharding__layout="ddp")
    assert sum(memory.state(replicated).values()) == pytest.approx(whole, rel=1e-3)
    zero1 = memory.state(_gpt3(mesh__data=8, mesh__fsdp=1, sharding__layout="zero1"))
    assert zero1["parameters"] + 8 * zero1["optimizer"] == pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "size", "sent"),
    [("all-gather", 4, 75.0), ("reduce-scatter", 4, 75.0), ("all-reduce", 4, 150.0),
     ("all-to-all", 2, 50.0), ("collective-permute", 8, 100.0)],
)  # fmt: skip
def test_what_a_device_sends_of_an_array(kind, size, sent):
    assert traffic.Message("weights", kind, ("fsdp",), 50.0, 2, size).sent == pytest.approx(sent)


def test_ddp_sends_each_gradient_once():
    """The textbook's 2 (n-1)/n of the gradients, in bf16, whatever the microbatches."""
    keys = dict(mesh__data=8, mesh__fsdp=1, sharding__layout="ddp", batch__size=64)
    once, often = (
        traffic.by_axes(traffic.of(sizes.of(resolved(**keys, batch__accumulation=n))))
        for n in (1, 8)
    )
    assert once == often
    of_run = sizes.of(resolved(**keys))
    matrices = sum(leaf.numbers for leaf in state_memory.leaves(of_run.run.model) if leaf.is_matrix)
    assert once["data"] == pytest.approx(2 * 7 / 8 * 2 * matrices, rel=0.01)


def test_microbatches_gather_weights_again():
    keys = dict(mesh__data=1, mesh__fsdp=8, batch__size=64)
    gathered = {
        (n, how): sum(
            message.sent
            for message in traffic.of(
                sizes.of(resolved(**keys, batch__accumulation=n, sharding__gather=how))
            )
            if message.purpose == "weights" and message.name.startswith("blocks")
        )
        for n in (1, 4)
        for how in ("layer", "step")
    }
    assert gathered[4, "layer"] == 4 * gathered[1, "layer"] == 8 * gathered[1, "step"]
    assert gathered[4, "step"] == gathered[1, "step"]


def _sent(run, **keys):
    return traffic.of(sizes.of(run), **keys)


@pytest.mark.parametrize(
    ("chunks", "on_gpu", "gathered"),
    [(1, False, 1), (1, True, 1), (2, False, 5), (2, True, 3), (4, False, 9), (4, True, 9)],
)
def test_chunks_of_the_head_are_gathered_for_both_passes(chunks, on_gpu, gathered):
    """As in compiled programs: once more at the end of a loop, which XLA:GPU leaves out of two."""
    run = resolved(mesh__data=1, mesh__fsdp=8, batch__size=64, loss__chunks=chunks)
    sent = [one for one in _sent(run, on_gpu=on_gpu) if one.purpose == "weights"]
    (head,) = (one for one in sent if not one.name.startswith("blocks"))
    rows, width = run.model.padded_vocab // chunks, run.model.width
    assert (head.count, head.bytes) == (gathered, 2 * rows * width)


def test_norms_are_summed_over_devices_with_other_positions():
    keys = dict(mesh__data=1, mesh__fsdp=4, mesh__tensor=2, batch__size=64, batch__accumulation=4)
    for split in (True, False):
        run = resolved(**keys, sharding__sequence_parallel=split)
        found = [
            one for one in _sent(run)
            if one.axes == ("tensor",) and one.purpose == "gradients" and "norm" in one.name
        ]  # fmt: skip
        of_layers = [one.count for one in found if one.name.startswith("blocks")]
        assert of_layers == [4 * run.model.num_layers] * 2 * split
        assert [one.count for one in found if one.name.startswith("norm")] == [1] * split
        assert {one.bytes for one in found} <= {4 * run.model.width}


def test_gradients_of_replicated_keys_are_summed():
    run = resolved(
        mesh__data=1, mesh__tensor=8, batch__size=16, model__num_kv_heads=2, model__num_heads=16,
        sharding__replicate_kv=True,
    )  # fmt: skip
    (found,) = (one for one in _sent(run) if one.purpose == "gradients of all keys and values")
    tokens = 16 * run.batch.sequence_length
    assert found.bytes == 2 * 2 * tokens * 2 * run.model.head_dim
    assert (found.axes, found.count) == (("tensor",), run.model.num_layers)
    run.sharding.replicate_kv, run.model.num_kv_heads = False, 8
    assert not [one for one in _sent(run) if "all keys" in one.purpose]


def _run(capsys, *args: str):
    code = command.main(args)
    return code, capsys.readouterr()


def test_gathers_in_fp8_are_half_the_bytes():
    keys = dict(mesh__data=1, mesh__fsdp=8, batch__size=64)
    full, half, layers = (
        sum(
            message.sent
            for message in traffic.of(sizes.of(resolved(**keys, products__gather=gather)))
            if message.purpose == "weights" and message.name.startswith("blocks")
        )
        for gather in ("", "fp8", "fp8_layers")
    )
    assert full == 2 * half == 2 * layers


def test_stages_of_zero2_hold_new_parameters_beside_the_old():
    keys = dict(mesh__data=1, mesh__stage=2, batch__size=64, batch__accumulation=4)
    keys |= dict(mesh__fsdp=4, sharding__layout="zero2")
    held = memory.of(sizes.of(resolved(**keys, model__head_dim=128)))
    updated = held.peaks[memory.UPDATE]["updated parameters"]
    assert updated == pytest.approx(held.state["parameters"], rel=1e-3)
    # Heads of 64 are filled up to the lanes of TPUs in new values of attention's weights.
    held = memory.of(sizes.of(resolved(**keys, model__head_dim=64)))
    assert held.peaks[memory.UPDATE]["updated parameters"] > 1.01 * held.state["parameters"]


def test_zero_bubble_that_does_not_fit_is_a_report(capsys):
    given = (f"--config={ROOT}/configs/llama3_70b_pipeline.py", "--machine=v5e:8x8")
    code, printed = _run(capsys, *given, "--config.pipeline.schedule=zb_h1")
    assert code == 1 and "DOES NOT FIT" in printed.out


def test_the_report(capsys):
    given = (f"--config={ROOT}/configs/llama3_8b.py", "--machine=h100:8")
    code, printed = _run(capsys, *given)
    assert code == 0 and "fits" in printed.out and "saved activations" in printed.out
    code, printed = _run(capsys, *given, "--json")
    report = json.loads(printed.out)
    assert code == 0 and report["num_devices"] == 8
    assert report["sent"]["fsdp"] == pytest.approx(36.9 * 2**30, rel=0.01)
    assert sum(one["sent"] for one in report["messages"]) == pytest.approx(
        sum(report["sent"].values())
    )
    peaks = report["memory"]["peaks"]
    state = sum(report["memory"]["state"].values())
    assert report["memory"]["peak"] == state + max(sum(of.values()) for of in peaks.values())


@pytest.mark.parametrize("platform", ["v5p", "h100"])
def test_the_script_takes_programs_of_one_platform(platform, tmp_path, monkeypatch, capsys):
    name = next(name for name in BY_NAME if f"llama3_8b {platform}" in name)
    path = tmp_path / "programs.jsonl"
    path.write_text(compiled_programs.to_line(BY_NAME[name]) + "\n")
    monkeypatch.setattr(sys, "argv", ["validate_planner.py", "--programs", str(path)])
    runpy.run_path(str(ROOT / "scripts" / "validate_planner.py"), run_name="__main__")
    printed = capsys.readouterr().out
    own, other = ("TPU", "GPU") if platform == "v5p" else ("GPU", "TPU")
    assert f"on {own}: mean" in printed and f"on {other}: none" in printed


def test_what_is_not_counted_is_said(capsys):
    given = (f"--config={ROOT}/configs/gemma3_1b.py", "--machine=2@v5e:2x2")
    code, printed = _run(capsys, *given)
    assert code == 0 and "not counted" not in printed.out
    given = (f"--config={ROOT}/configs/llama3_8b.py", "--machine=h100:8")
    printed = _run(capsys, *given, "--config.offload.optimizer=True")[1]
    assert "not counted: the time in which moments go to the host's memory" in printed.out


def test_an_optimizer_that_a_config_file_adds_is_counted(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(
        "import optax\nfrom llmx import config\nfrom llmx.step import optimizers\n"
        "optimizers.OPTIMIZERS['mine'] = lambda config, schedule, axes: optax.sgd(schedule, 0.9)\n"
        "def get_config():\n"
        "    run = config.default()\n    run.optimizer.name = 'mine'\n    return run\n"
    )
    try:
        code, printed = _run(capsys, f"--config={path}", "--machine=v5e:2x2", "--json")
    finally:
        optimizers.OPTIMIZERS.pop("mine", None)
    state = json.loads(printed.out)["memory"]["state"]
    assert code == 0 and state["optimizer"] == state["parameters"]


def test_what_does_not_fit_is_said(capsys):
    given = (f"--config={ROOT}/configs/llama3_70b.py", "--machine=v5e:8x8")
    code, printed = _run(capsys, *given)
    assert code == 1 and "DOES NOT FIT" in printed.out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--machine=v5p:2x2x2",), "--machine without --config"),
        (("--machine=v5p:2x2x2", "--config=C", "--chip=v5p"), "--chip with --machine"),
        (("--machine=v5p:2x2x2", "--config=C", "--stages=2"), "--stages with --machine"),
        (("--machine=v9:2x2", "--config=C"), "'v9' is unknown"),
        (("--machine=v5p:2x2x2", "--config=C", "--config.remat=budget"), "run llmx.aot"),
        (("--machine=v5p:2x2x2", "--config=C", "--config.mesh.fsdp=3"), "mesh"),
        (("--machine=h100:8", "--config=C", "--config.mesh.fsdp=4", "--config.mesh.data=2",
          "--config.sync.strategy=int8", "--config.sharding.layout=hsdp", "--search"),
         "with a search"),
    ],
)  # fmt: skip
def test_bad_input(args, words, capsys):
    args = [arg.replace("=C", f"={ROOT}/configs/llama3_8b.py") for arg in args]
    code, printed = _run(capsys, *args)
    assert code == 2 and words in printed.err


def test_a_line_of_a_file_is_read_as_it_was_written():
    program = dataclasses.replace(PROGRAMS[0], flags=("remat=full", "batch.size=8"))
    assert compiled_programs.Program(
        **json.loads(compiled_programs.to_line(program)) | {"flags": program.flags}
    ) == program  # fmt: skip
