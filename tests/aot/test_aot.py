"""Ahead-of-time compilation: the cost report adds up, and errors are reported early."""

import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from support import tiers

from llmx import config
from llmx.aot import __main__ as command
from llmx.aot import collectives, compiler, peak_memory, report, suggest, topologies
from llmx.aot import program as program_lib
from llmx.model import costs, families

ROOT = pathlib.Path(__file__).parents[2]
QUICKSTART = str(ROOT / "configs" / "quickstart.py")
GIB = 2**30

# Of a processor, without a compiler: the interpreter's start and jax's import.
SECONDS_TO_AN_ERROR = 5.0


def tiny(*, batch_size: int = 16, **changes) -> config.Config:
    """A model that compiles in seconds; its heads have the size that TPU kernels take."""
    run = config.default()
    run.model = families.preset(
        "llama3", num_layers=2, width=256, num_heads=4, num_kv_heads=2, head_dim=128, mlp_dim=512,
        vocab_size=512, vocab_multiple=128, max_positions=1024,
    )  # fmt: skip
    run.batch.size, run.batch.sequence_length = batch_size, 256
    run.remat = "full"
    for key, value in changes.items():
        setattr(run, key, value)
    return run


# ---------------------------------------------------------------------------- without a compiler

# As libtpu writes them: jax 0.10.2, jax 0.12.0, and the long form of its documentation.
SHORT = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
    "(116.28G) exceeds available HBM (15.75G)."
)
NUMBERED = (
    "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory "
    "required for HLO temporaries (1.56T) exceeds available HBM (95.73G). HLO module: "
    "jit_train_step.\nSee https://openxla.org/xla/errors/error_1000 for more details."
)
LONG = """RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space \
hbm. Used 49.34G of 32.00G hbm. Exceeded hbm capacity by 17.34G.

Total hbm usage >= 49.34G:
    reserved          3.12M
    program          49.34G
    arguments            0B
"""
VECTOR_MEMORY = (
    "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem while allocating on stack for "
    "%custom-call: scoped allocation with size 36.00M and limit 32.00M exceeded scoped vmem limit"
)


@pytest.mark.parametrize(
    ("text", "needed", "available"),
    [(SHORT, 116.28, 15.75), (NUMBERED, 1.56 * 1024, 95.73), (LONG, 49.34, 32.0)],
)
def test_what_the_compiler_says_of_memory(text, needed, available):
    found = compiler.parse_out_of_memory(text)
    assert found.needed == pytest.approx(needed * GIB, abs=1)
    assert found.available == pytest.approx(available * GIB, abs=1)


@pytest.mark.parametrize("text", [VECTOR_MEMORY, "INTERNAL: Mosaic failed to compile", ""])
def test_other_refusals_are_not_about_memory(text):
    assert compiler.parse_out_of_memory(text) is None


def test_a_refusal_is_short():
    text = compiler._first_lines("\n".join(f"line {number}" for number in range(100)))
    assert text.startswith("the compiler refuses the program:\nline 0\n")
    assert text.endswith("... and 88 more lines") and len(text.splitlines()) == 14


def test_all_problems_are_reported_together(capsys):
    code = command.main(
        ["--config", QUICKSTART, "--topology", "v5e:16x32", "--config.remat=ful",
         "--config.batch.sise=3"]
    )  # fmt: skip
    printed = capsys.readouterr()
    assert code == command.WRONG and printed.out == ""
    assert "3 problems" in printed.err
    for words in ("nearest are v5e:16x16", "did you mean 'full'?", "did you mean batch.size?"):
        assert words in printed.err


@pytest.mark.parametrize(
    ("topology", "flag", "words"),
    [
        ("v5p:2x2x2", "--config.mesh.data=4", "mesh data4 needs 4 devices and there are 8"),
        ("v5p:2x2x2", "--config.batch.size=12", "batch.size=12 does not divide over 8 = data8"),
        ("v5e:2x2", "--config.launch.platform=gpu", "is a tpu: set --config.launch.platform=tpu"),
        ("h100:8", "--config.launch.platform=cpu", "is a gpu: set --config.launch.platform=gpu"),
        ("v5p:2x2x2", "--config.precision=fp16", "TPUs have no fp16: use 'bf16'"),
        ("v5p:2x2x2", "--config.reduce_dtype=fp16", "reduce_dtype='fp16'"),
        ("2@v5e:2x2", "--config.seed=0", "has 2 slices: name the mesh axes"),
        ("2@v5e:2x2", "--config.mesh.across_slices=('data','data')", "names 'data' twice"),
    ],
)
def test_configs_that_do_not_go_with_the_machine(topology, flag, words, capsys):
    code = command.main(["--config", QUICKSTART, "--topology", topology, flag])
    assert code == command.WRONG
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("--trace={}/none/step.json", "the folder .*/none does not exist: create it"),
        ("--trace={}", "is a folder: name a file"),
        ("--save-hlo={}/file/hlo", "file cannot be written to: use another folder"),
    ],
)
def test_where_nothing_can_be_written_is_said_before_compiling(flag, reason, tmp_path, capsys):
    (tmp_path / "file").touch()
    where = ["--config", QUICKSTART, "--topology", "v5e:1x1"]
    assert command.main([*where, flag.format(tmp_path)]) == command.WRONG
    printed = capsys.readouterr().err
    assert re.search(reason, printed) and "compiling for" not in printed


@pytest.mark.parametrize("topology", ["v5e:2x2", "h100:2"])
def test_no_compiler_installed(topology, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    assert command.main(["--config", QUICKSTART, "--topology", topology]) == command.WRONG
    assert "pip install 'jax[tpu,cuda13-local]==" in capsys.readouterr().err


def run_command(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "llmx.aot", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def test_errors_come_before_anything_heavy():
    begun = os.times()
    done = run_command("--config", QUICKSTART, "--topology", "v5p:2x2x2", "--config.batch.size=9")
    ended = os.times()
    taken = ended.children_user + ended.children_system - begun.children_user
    assert taken - begun.children_system < SECONDS_TO_AN_ERROR
    assert done.returncode == command.WRONG and done.stdout == ""
    assert "batch.size=9 does not divide over 8" in done.stderr


def made_up(*, peak: int = 10 * GIB, limit: int = 16 * GIB) -> report.Result:
    """A result that no compiler made."""
    topology = topologies.parse("2@v5e:4x4")
    run = tiny(batch_size=64)
    run.mesh.data, run.mesh.fsdp, run.mesh.across_slices = 2, 16, ("data",)
    each = {
        "dtype": "bf16", "arrays": 1, "asynchronous": True, "hidden_by": 3, "in_loop": 1,
        "name": "all-gather.1", "source": "forward/dot_general",
    }  # fmt: skip
    gather = collectives.Collective(
        kind="all-gather", axes=("fsdp",), count=64, bytes=2 * GIB, wire_bytes=GIB, sliced=False,
        **each,
    )  # fmt: skip
    reduce = collectives.Collective(
        kind="all-reduce", axes=None, count=None, bytes=100, wire_bytes=50, sliced=True, **each
    )
    permute = dataclasses.replace(
        gather, kind="collective-permute", count=10, wire_bytes=90, hidden_by=0
    )
    kernel = program_lib.Kernel("splash_attention_forward", "tpu_custom_call", 64, 2e12, "forward")
    array = peak_memory.Buffer(
        3 * GIB, 2, "bf16[32,1,8192,4096]", "backward/recomputed/" + "very_long/" * 20 + "end",
        "model.py:404", False,
    )  # fmt: skip
    return report.Result(
        run=compiler.resolve(run, topology), topology=topology,
        memory=report.Memory(
            arguments=GIB, outputs=5000, temporaries=9 * GIB, peak=peak, limit=limit, host=None
        ),
        largest=(array,) * 20,
        program=program_lib.CostReport((gather, reduce, permute), (kernel,), 1e15, 1e12, None, ()),
        state={"parameters": GIB, "batch": 100}, num_parameters=123, model_flops=1e15,
        lower_seconds=1.0, compile_seconds=2.0, versions={"jax": "1"}, unknown=("the weather",),
        before="", after="",
    )  # fmt: skip


def test_the_cost_report_as_text():
    text = report.text(made_up())
    lines = text.splitlines()
    assert max(map(len, lines)) <= report.WIDTH
    assert "memory of a device: peak 10.00 GiB of 16.00 GiB: fits, 6.00 GiB left" in lines
    (line,) = [line for line in lines if line.startswith("  all-gather")]
    assert line.split() == ["all-gather", "fsdp", "bf16", "64", "128.00", "GiB", "64.00", "GiB",
                            "100%", "?"]  # fmt: skip
    (line,) = [line for line in lines if line.startswith("  all-reduce")]
    assert line.split() == ["all-reduce", "(sliced)", "?", "bf16", "?", "?", "?", "?", "?"]
    (line,) = [line for line in lines if line.startswith("  collective-permute")]
    assert line.split()[-4:] == ["900", "B", "0%", "?"]
    assert "  kernel splash_attention_forward: 64 times; 128.00 TFLOP by its own estimate" in lines
    assert "2 slices of 4x4 TPU v5e, 32 devices" in text and "the weather" in text
    assert text.count("2 x bf16[32,1,8192,4096]") + 6 == 20 and " 6 more" in text


def test_notes_that_differ_in_names_alone_are_counted():
    branch = "branch that conditional.{} (jvp()/cond) takes: 0 or 1 kernels"
    notes = (branch.format(240), "FLOPs of a kernel", branch.format(7))
    text = report.text(dataclasses.replace(made_up(), unknown=notes))
    assert "  2 x branch that conditional (jvp()/cond) takes: 0 or 1 kernels" in text.splitlines()
    assert "  FLOPs of a kernel" in text.splitlines()


def test_the_cost_report_of_what_does_not_fit():
    trials = [
        report.Trial(("--config.remat=full",), 12 * GIB, True, 3.0),
        report.Trial(("--config.remat=dots",), None, False, 0.0, "INTERNAL: no"),
    ]
    text = report.text(made_up(peak=18 * GIB), trials)
    assert "peak 18.00 GiB of 16.00 GiB: DOES NOT FIT: 2.00 GiB too much" in text
    assert "12.00 GiB  fits  --config.remat=full" in text
    assert "refused" in text and "INTERNAL: no" in text
    assert "nothing is left to try" in report.text(made_up(peak=18 * GIB), [])


def test_the_cost_report_as_json():
    result = made_up()
    document = report.to_json(result, [report.Trial(("--config.remat=full",), GIB, True, 3.0)])
    assert json.loads(json.dumps(document)) == document
    assert document["fits"] and document["memory"]["headroom"] == 6 * GIB
    assert config.from_json(document["config"]) == config.from_json(config.to_json(result.run))
    assert document["program"]["collectives"][1]["axes"] is None
    assert document["suggestions"] == [
        {"flags": ["--config.remat=full"], "peak": GIB, "fits": True, "compile_seconds": 3.0,
         "problem": ""}
    ]  # fmt: skip
    assert "suggestions" not in report.to_json(result)


# -------------------------------------------------------------------------------- with a compiler


@pytest.mark.aot
@pytest.mark.parametrize(
    "name",
    [
        "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "h100:2x2",
        *map(
            tiers.full_grid,
            ("v4:2x2x1", "tpu7x:2x2x1", "h200:2", "a100:2", "a100_40gb:2", "b200:2"),
        ),
    ],
)  # fmt: skip
def test_every_family_compiles(name):
    topology = topologies.parse(name)
    result = compiler.compile(tiny(), name)
    n = topology.num_devices
    run, memory, program = result.run, result.memory, result.program
    assert result.fits and memory.limit == topology.hbm_bytes and run.mesh.data == n
    # fp32 parameters and two moments, split over all devices.
    stored = 4 * costs.num_stored_parameters(run.model) // n
    norms = 4 * (2 * 2 + 1) * run.model.width  # not split
    assert stored <= result.state["parameters"] <= stored + norms
    assert result.state["optimizer"] == pytest.approx(2 * result.state["parameters"], abs=64)
    # Arguments are the state, padded where tiles ask for it.
    state = sum(result.state.values())
    assert state <= memory.arguments <= 1.2 * state + 2**17
    assert memory.arguments <= memory.peak and memory.outputs < 2**16
    # full remat computes the forward pass twice, apart from attention in a kernel.
    in_kernels = sum(each.count * (each.flops or 0) for each in program.kernels)
    assert 0.9 < (program.flops + in_kernels) / result.model_flops < 2
    assert {axis for each in program.collectives for axis in each.axes} == {"data"}
    # ZeRO-3 gathers every weight at least once per pass, in bf16.
    weights = 2 * costs.num_stored_parameters(run.model)
    assert program_lib.total_bytes(program.collectives) > 2 * weights
    assert result.before and result.after and result.lower_seconds > 0 < result.compile_seconds
    # Peaks of a few MiB may be those of vector memory, and are not compared with the arrays.
    assert result.largest
    assert report.text(result)


@pytest.mark.aot
def test_gpus_save_one_microbatch_at_a_time():
    """XLA:GPU would make one body of two microbatches, and hold what both have saved."""
    run = tiny(batch_size=256, remat="none")
    run.model.num_layers, run.batch.accumulation = 8, 4
    run.mesh, run.sharding.layout = config.MeshConfig(data=1, fsdp=8), "zero3"
    compiled = compiler.compile(run, "h100:8")
    # Layers, rows and positions of a device, width: in fp32, two for each of a layer's norms, as
    # with one microbatch. A body of two had twice as many.
    saved = sum(each.count for each in compiled.largest if each.shape == "f32[8,8,256,256]")
    assert saved == 2 * 2
    # And what is listed adds up to the peak.
    listed = sum(each.bytes for each in compiled.largest)
    assert listed == pytest.approx(compiled.memory.peak, rel=0.001)


@pytest.mark.aot
@pytest.mark.full_grid  # of a TPU also in `test_too_large_is_a_result`, of GPUs in the test above
def test_arrays_add_up_to_the_peak():
    result = compiler.compile(tiny(batch_size=1024), "v5p:2x2x1")
    assert result.memory.peak > GIB / 4
    listed = sum(each.bytes for each in result.largest)
    assert listed == pytest.approx(result.memory.peak, rel=0.01)
    gpu = compiler.compile(tiny(batch_size=1024), "h100:4")
    assert sum(each.bytes for each in gpu.largest) == pytest.approx(gpu.memory.peak, rel=0.001)


@pytest.mark.aot
def test_gpus_have_no_moments_that_the_host_has():
    """The program's own figures count them, and its text does not say where they are."""
    plain, offloaded = tiny(), tiny()
    offloaded.offload.optimizer = True
    plain, offloaded = (compiler.compile(run, "h100:4") for run in (plain, offloaded))
    assert plain.memory.host == 0
    assert 0.99 * plain.state["optimizer"] < offloaded.memory.host < plain.state["optimizer"]
    assert offloaded.memory.arguments == plain.memory.arguments - offloaded.memory.host
    assert offloaded.memory.peak < plain.memory.peak - 0.9 * offloaded.memory.host
    assert any("host's memory" in note for note in offloaded.unknown)


@pytest.mark.aot
def test_slices():
    run = tiny()
    run.mesh.data, run.mesh.fsdp, run.mesh.across_slices = 2, 4, ("data",)
    run.sharding.layout = "hsdp"
    result = compiler.compile(run, "2@v5e:2x2")
    program = result.program
    between = program.select(across="data")
    within = program.select(axes="fsdp")
    assert between and within
    # Between slices a device's share of the gradients travels, not the whole.
    share = 4 * costs.num_stored_parameters(result.run.model) // 4
    assert program_lib.total_bytes(program.select(across="data")) <= 2.1 * share
    # Replicas of a slice's shares: those of four devices, in fp32, and norms on each.
    norms = 4 * (2 * result.run.model.num_layers + 1) * result.run.model.width
    assert share <= result.state["parameters"] <= share + norms


@pytest.mark.aot
@pytest.mark.parametrize("topology", ["v5e:2x2", "a100_40gb:2"])
def test_too_large_is_a_result(topology, tmp_path, capsys):
    code = command.main(
        ["--config", QUICKSTART, "--topology", topology, "--config.precision=bf16", "--json",
         "--config.batch.size=8192", "--save-hlo", str(tmp_path / "hlo")]
    )  # fmt: skip
    document = json.loads(capsys.readouterr().out)
    assert code == command.DOES_NOT_FIT and not document["fits"]
    memory = document["memory"]
    assert memory["headroom"] == memory["limit"] - memory["peak"] < 0
    assert memory["limit"] == pytest.approx(topologies.parse(topology).hbm_bytes, abs=0.011 * GIB)
    temporary = [each for each in document["largest"] if not each["argument"]]
    assert temporary[0]["bytes"] > GIB and "[" in temporary[0]["shape"]
    assert temporary[0]["source"].startswith(("apply.py:", "attend.py:", "layers.py:", "dot.py:"))
    assert sum(each["bytes"] for each in document["largest"]) == pytest.approx(
        memory["peak"], rel=0.01
    )
    assert document["program"]["collectives"]
    assert not [words for words in document["unknown"] if "which peak is right" in words]
    written = json.loads((tmp_path / "hlo" / "cost_report.json").read_text())
    assert written == document
    for name in ("before_optimization.txt", "after_optimization.txt"):
        assert (tmp_path / "hlo" / name).read_text().startswith("HloModule jit_train_step")


@pytest.mark.aot
@pytest.mark.full_grid  # compiles several large programs
@pytest.mark.parametrize("topology", ["v5e:2x2", "a100_40gb:2"])
def test_suggestions_fit(topology, monkeypatch):
    monkeypatch.setattr(suggest, "ENOUGH", 1)
    run = tiny(batch_size=65536, remat="none")
    result = compiler.compile(run, topology)
    assert not result.fits
    said = []
    trials = suggest.suggest(result, log=said.append)
    assert len(said) == len(trials) <= suggest.MOST_TRIES
    fitting = [trial for trial in trials if trial.fits]
    assert len(fitting) == suggest.ENOUGH
    for trial in trials:
        fits = trial.peak is not None and trial.peak <= result.memory.limit
        assert trial.fits == fits and (trial.peak is None) == bool(trial.problem)
    changed = dict(flag.removeprefix("--config.").split("=") for flag in fitting[0].flags)
    for key, value in changed.items():
        assert {"batch.accumulation", "remat", "mesh.data", "mesh.tensor", "batch.size"} >= {key}
        if key == "batch.accumulation":
            run.batch.accumulation = int(value)
        elif key == "remat":
            run.remat = value
    if set(changed) <= {"batch.accumulation", "remat"}:
        assert compiler.compile(run, topology).memory.peak == fitting[0].peak


@pytest.mark.aot
def test_what_fits_is_made_faster(monkeypatch):
    monkeypatch.setattr(suggest, "ENOUGH", 1)
    result = compiler.compile(tiny(), "v5e:2x2")
    trials = suggest.suggest(result, log=lambda text: None)
    assert trials[0].fits and "--config.remat=none" in trials[0].flags


@pytest.mark.aot
def test_only_json_on_stdout():
    small = ("--config.batch.size=4", "--config.batch.sequence_length=128")
    done = run_command("--config", QUICKSTART, "--topology", "v5e:2x2", "--json", *small)
    assert done.returncode == command.FITS
    document = json.loads(done.stdout)
    assert document["topology"] == {
        "name": "v5e:2x2", "platform": "tpu", "chip": "TPU v5e", "device_kind": "TPU v5 lite",
        "num_devices": 4, "num_slices": 1,
    }  # fmt: skip
    assert document["seconds"]["compile"] > 0 and document["versions"]["libtpu"]
    # libtpu's warnings about a machine that is not there are no news.
    assert done.stderr.splitlines() == ["compiling for 2x2 TPU v5e, 4 devices", "attention: splash"]


@pytest.mark.aot
def test_other_refusals_are_errors(monkeypatch, capsys):
    import jax

    def refuse(*arguments):
        raise jax.errors.JaxRuntimeError("INTERNAL: Mosaic failed to compile\nat a place")

    monkeypatch.setattr(topologies, "compile", refuse)
    assert command.main(["--config", QUICKSTART, "--topology", "v5e:2x2"]) == command.WRONG
    printed = capsys.readouterr()
    assert "the compiler refuses the program:\nINTERNAL: Mosaic failed to compile" in printed.err
    assert printed.out == ""


# Shapes alone: 405 B parameters and their moments are 4.9 TB, of which nothing may be allocated.
LARGE = """
import resource, sys
from llmx import config
from llmx.aot import compiler
from llmx.model import families
run = config.default()
run.model = families.preset("llama3_405b")
run.model.max_positions = max(run.model.max_positions, 2048)
run.batch.size, run.batch.sequence_length, run.remat = 512, 2048, "full"
run.mesh.data, run.mesh.fsdp, run.mesh.tensor = 1, 64, 8
run.sharding.layout = "zero3"
result = compiler.compile(run, "v5p:8x8x8")
print(result.memory.peak, sum(result.state.values()))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.aot
@pytest.mark.full_grid  # compiles for minutes
def test_405b_on_512_chips_allocates_nothing():
    done = subprocess.run(
        [sys.executable, "-c", LARGE], capture_output=True, text=True, cwd=ROOT, check=True
    )
    peak, state, resident = map(int, done.stdout.split())
    assert state == pytest.approx(12 * 405.9e9 / 512, rel=0.02)
    assert state < peak
    assert resident < 8 * GIB
