"""The command line, end to end: trains, resumes, stops, falls back, and tells what is wrong."""

import functools
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from support import text_runs
from support.text_runs import records

from llmx.runtime import exits, launch

# One run serves several tests: they belong on one worker.
pytestmark = pytest.mark.xdist_group("train")

ROOT = pathlib.Path(__file__).parents[2]
RESUME_ELSEWHERE = 1e-5  # relative: on another mesh sums are taken in another order
OTHER_REPLICAS = 0.1  # relative, of losses: compression of other parts leaves other things out

CONFIG = """
from llmx import config
from llmx.model import families

def get_config():
    run = config.default()
    run.model = families.preset("llama3", num_layers=2, width=32, num_heads=2, head_dim=16,
                                num_kv_heads=2, mlp_dim=64)
    run.steps, run.precision = 12, "fp32"
    run.batch.size, run.batch.sequence_length = 8, 32
    run.optimizer.warmup_steps, run.optimizer.learning_rate = 2, 1e-2
    run.checkpoint.every, run.evaluation.every, run.evaluation.batches = 2, 6, 2
    run.sample.max_tokens = 8
    run.metrics.log_every, run.metrics.progress = 1, "plain"
    run.data.sources = ({source!r},)
    run.data.cache_dir = {cache!r}
    return run
"""


# A profile and a sample take a quarter of a run's time.
EVERYTHING = (
    "--config.profile.first_step=3", "--config.profile.num_steps=2", "--config.sample.prompt=def ",
)  # fmt: skip


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """A small corpus of text and a config file that trains on it."""
    folder = tmp_path_factory.mktemp("train")
    source, cache = str(text_runs.write_corpus(folder, files=40, words=300)), str(folder / "cache")
    (folder / "run.py").write_text(CONFIG.format(source=source, cache=cache))
    return folder


def environment(devices: int) -> dict:
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    return os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}


def command(scratch, workdir, *flags, module="llmx.train") -> list[str]:
    config = ["--config", str(scratch / "run.py")] if module == "llmx.train" else []
    return [sys.executable, "-m", module, *config, "--workdir", str(workdir), *flags]


def train(scratch, workdir, *flags, devices=1) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(scratch, workdir, *flags), env=environment(devices), capture_output=True,
        text=True, cwd=ROOT, timeout=300, check=False,
    )  # fmt: skip


def losses(workdir) -> np.ndarray:
    return np.array(text_runs.losses(workdir))


@pytest.fixture(scope="module")
def undisturbed(scratch):
    """A run from beginning to end, on one device."""
    done = train(scratch, scratch / "whole", *EVERYTHING)
    assert done.returncode == 0, done.stdout + done.stderr
    return scratch / "whole", done.stdout + done.stderr


def test_a_run_leaves_everything(undisturbed):
    workdir, said = undisturbed
    found = losses(workdir)
    assert len(found) == 12 and found[-1] < found[0]
    assert list(records(workdir, "eval")) == [6, 12]
    for name in ("config.json", "tokenizer.json", "loss.png", "tensorboard", "checkpoints/12",
                 "profile/plugins"):  # fmt: skip
        assert (workdir / name).exists(), name
    for words in ("parameters", "256 tokens per step", "compiled in", "first step done", "sample:",
                  "def ", "everything is in"):  # fmt: skip
        assert words in said, words


@pytest.mark.slow
def test_a_mixture_records_the_loads_of_its_layers(scratch, tmp_path):
    """Once for each step, also where it goes on with another number of devices; and draws them."""
    mixture = [
        f"--config.model.{key}={value}"
        for key, value in dict(num_experts=4, experts_per_token=2, expert_dim=32).items()
    ]
    for steps, expert in ((4, 2), (6, 1)):
        mesh = (f"--config.steps={steps}", "--config.mesh.data=1", f"--config.mesh.expert={expert}")
        done = train(scratch, tmp_path, *mixture, *mesh, "--config.sample.prompt=", devices=expert)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "expert_load_max" in done.stdout and "layers.png" in done.stdout
        assert "by_layer" not in done.stdout
        found = records(tmp_path, "layers")
        assert list(found) == list(range(1, steps + 1))
    for of_step in found.values():
        largest, least = of_step["expert_load_max"], of_step["expert_load_min"]
        assert len(largest) == len(least) == 2
        assert all(0 <= low <= 1 <= high <= 2 for low, high in zip(least, largest, strict=True))
    assert (tmp_path / "layers.png").exists()


# The CPU, as if it were a chip that the table knows.
AS_A_CHIP = """
import sys
from llmx import train
from llmx.runtime import hardware
hardware.this_chip = lambda: hardware.CHIPS["tpu_v5e"]
sys.exit(train.main(sys.argv[1:]))
"""


def test_a_run_on_a_known_chip_shows_mfu_and_hfu(scratch):
    workdir = scratch / "shares"
    flags = ["--config", str(scratch / "run.py"), "--workdir", str(workdir), "--config.steps=3"]
    flags += ["--config.remat=full", "--config.precision=bf16", "--config.evaluation.every=0"]
    done = subprocess.run(
        [sys.executable, "-c", AS_A_CHIP, *flags], env=environment(2), capture_output=True,
        text=True, cwd=ROOT, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "peak:  2 x 197 TFLOP/s in bfloat16 (TPU v5e), for MFU and HFU" in done.stdout
    last = records(workdir)[3]
    # tests/config/test_utilization.py has the numbers.
    assert 0 < last["mfu"] < last["mfu_full"] and last["mfu"] < last["hfu"]
    assert re.search(
        r"step 3/3 .* tok/s  MFU \d+\.\d% \(full \d+\.\d%, HFU \d+\.\d%\)", done.stdout
    )


def test_run_again_it_is_done(scratch, undisturbed):
    workdir, _ = undisturbed
    before = losses(workdir)
    done = train(scratch, workdir)
    assert done.returncode == 0 and "resumed from checkpoint 12" in done.stdout + done.stderr
    np.testing.assert_array_equal(losses(workdir), before)


def test_evaluate_and_generate_a_run(scratch, undisturbed):
    workdir, said = undisturbed

    surroundings = environment(1)
    if not launch.has_accelerator():
        del surroundings["JAX_PLATFORMS"]  # the commands choose the CPU themselves, silently

    def run(module, *flags):
        done = subprocess.run(
            command(scratch, workdir, *flags, module=module), env=surroundings, cwd=ROOT,
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        if not launch.has_accelerator():
            notes = ("data:", "attention:", "step 12 of ", "9 tokens added")
            assert all(line.startswith(notes) for line in done.stderr.splitlines()), done.stderr
        return done

    # The same batches as the evaluation at the end of training, unless others are asked for.
    last = records(workdir, "eval")[12]["loss"]
    told = run("llmx.evaluate").stdout
    assert f"step 12: held-out loss {last:.4f} nats per token" in told
    whole = json.loads(run("llmx.evaluate", "--batches", "0", "--json").stdout)
    assert whole["step"] == 12 and whole["batches"] == whole["split_batches"] > 2
    extent = f"over 2 of {whole['split_batches']} held-out batches"
    assert extent in told and extent in said
    assert whole["loss"] != last and abs(whole["loss"] / last - 1) < 0.2
    again = [run("llmx.generate", "--prompt", "return x", "--max-tokens", "9") for _ in range(2)]
    assert again[0].stdout.startswith("return x") and again[0].stdout == again[1].stdout


@pytest.mark.slow
def test_a_run_with_the_optimizer_in_host_memory(scratch, undisturbed):
    """It trains as without, is resumed, and evaluated, and generates."""
    workdir, offloaded = scratch / "offloaded", "--config.offload.optimizer"
    for _ in range(2):
        done = train(scratch, workdir, offloaded)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed from checkpoint 12" in done.stdout + done.stderr
    np.testing.assert_array_equal(losses(workdir), losses(undisturbed[0]))

    def run(*flags, module):
        done = subprocess.run(
            command(scratch, workdir, *flags, module=module), env=environment(1), cwd=ROOT,
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    last = records(workdir, "eval")[12]["loss"]
    assert f"held-out loss {last:.4f} nats" in run(module="llmx.evaluate")
    assert run("--prompt", "return x", module="llmx.generate").startswith("return x")


def test_config_errors_exit_early(scratch):
    begun = time.perf_counter()
    done = train(scratch, scratch / "bad", "--config.remat=ful", "--config.batch.sise=3")
    assert done.returncode == 2
    assert "did you mean 'full'" in done.stderr and "did you mean batch.size" in done.stderr
    assert "Traceback" not in done.stderr and not (scratch / "bad").exists()
    assert time.perf_counter() - begun < 30  # 2 s on an idle machine


def test_bad_data_exits_with_a_reason(scratch):
    (scratch / "bad.jsonl").write_text('{"text": "good"}\n{"text": \n')
    source = f"--config.data.sources=('{scratch / 'bad.jsonl'}',)"
    done = train(scratch, scratch / "bad_data", source)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "bad.jsonl" in done.stderr and "2" in done.stderr


def test_sigterm_saves_and_the_next_run_goes_on(scratch, undisturbed):
    workdir = scratch / "told"
    process = subprocess.Popen(
        command(scratch, workdir), env=environment(1), cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    said = ""
    for line in process.stdout:
        said += line
        if "step  3/12" in line:
            process.send_signal(signal.SIGTERM)
    stopped = "SIGTERM: stopped at step" in said  # the machine may be too quick to be stopped
    assert process.wait(120) == (exits.AGAIN if stopped else exits.DONE), said
    assert not stopped or "run the same command again" in said
    assert train(scratch, workdir).returncode == 0
    np.testing.assert_array_equal(losses(workdir), losses(undisturbed[0]))


def test_other_data_or_model_is_refused(scratch, undisturbed):
    workdir, _ = undisturbed
    for flag, words in (
        ("--config.seed=1", "trained on data"),
        ("--config.batch.size=4", "batch.size=8"),
        ("--config.model.rope_theta=2.5", "model.rope_theta: saved 500000.0, given 2.5"),
        ("--config.steps=10", "at step 12, which is after the last, steps=10"),
        ("--config.model.width=64", "model.width: saved 32, given 64"),
    ):
        done = train(scratch, workdir, flag)
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
        assert words in done.stderr, done.stderr
    assert (workdir / "checkpoints" / "12").exists()


@pytest.mark.full_grid  # checkpoint/test_reshard.py starts runs
def test_start_with_another_runs_parameters(scratch, undisturbed):
    """A new run with start_from begins at the loss where the other ended, at step 0."""
    done = train(scratch, scratch / "tuned", f"--config.start_from={undisturbed[0]}",
                 "--config.steps=2", "--config.optimizer.warmup_steps=0",
                 "--config.optimizer.ema_decay=0.9", devices=4)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "starting with the parameters of" in done.stdout + done.stderr
    fresh, ended = losses(undisturbed[0])[0], losses(undisturbed[0])[-1]
    assert abs(losses(scratch / "tuned")[0] - ended) < 0.2 * (fresh - ended)
    # With a checkpoint of its own it goes on, wherever it began.
    gone = train(scratch, scratch / "tuned", "--config.start_from=nowhere", "--config.steps=3",
                 "--config.optimizer.warmup_steps=0", "--config.optimizer.ema_decay=0.9",
                 devices=4)  # fmt: skip
    assert gone.returncode == 0 and len(losses(scratch / "tuned")) == 3, gone.stderr
    bad = train(scratch, scratch / "tuned_badly", "--config.start_from=nowhere")
    assert bad.returncode == 2 and "start_from='nowhere' holds no checkpoints" in bad.stderr


def test_nan_stops_the_run_and_keeps_the_state(scratch):
    """A learning rate beyond reason: the run stops by itself and names the leaf."""
    workdir = scratch / "nan"
    done = train(scratch, workdir, "--config.optimizer.learning_rate=1e3",
                 "--config.optimizer.name=lion", "--config.optimizer.weight_decay=100",
                 "--config.optimizer.clip_norm=0")  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 3, said
    assert "is not finite, first in " in said and "run again to resume" in said


@pytest.mark.slow
def test_fp16_skips_what_overflows_and_goes_on_from_there(scratch):
    """The scale and the skipped steps are in the metrics; resuming among them equals going on."""
    flags = (
        "--config.precision=fp16", "--config.loss_scale.initial=2.0e8",
        "--config.checkpoint.keep_last=10",
    )  # fmt: skip
    done = train(scratch, scratch / "fp16", *flags)
    assert done.returncode == 0, done.stderr
    assert "fp16, dynamic loss scale from 2e+08" in done.stdout
    assert "step 1: the gradient overflowed at loss scale 2e+08: update skipped" in done.stdout
    wanted = records(scratch / "fp16")
    scales = [record["loss_scale"] for record in wanted.values()]
    skipped = [0, *(int(record["skipped_steps"]) for record in wanted.values())]
    assert skipped[:4] == [0, 1, 2, 3] and skipped[12] < 12
    assert scales == [2e8 / 2**number for number in skipped[:12]]
    assert wanted[1]["grad_norm"] in ("inf", "nan")
    shutil.copytree(scratch / "fp16", scratch / "fp16_again")
    (scratch / "fp16_again" / "metrics.jsonl").unlink()
    again = train(scratch, scratch / "fp16_again", *flags, "--config.resume_step=2")
    assert again.returncode == 0, again.stderr
    got = records(scratch / "fp16_again")
    assert list(got) == list(range(3, 13))
    for step, record in got.items():
        for name in ("loss", "grad_norm", "loss_scale", "skipped_steps"):
            assert record[name] == wanted[step][name]


@pytest.mark.slow
@pytest.mark.full_grid  # trains twice for minutes
def test_fp16_learns_the_quickstart_as_fp32_does(tmp_path):
    """The quickstart with a quarter of its rows and an eighth of its steps: held-out loss to 1%."""
    found = {}
    for precision in ("fp16", "fp32"):
        done = subprocess.run(
            [
                sys.executable, "-m", "llmx.train", "--config", "configs/quickstart.py",
                "--workdir", str(tmp_path / precision), f"--config.precision={precision}",
                "--config.steps=40", "--config.batch.size=4", "--config.sample.prompt=",
            ],
            env=environment(1), capture_output=True, text=True, cwd=ROOT, timeout=900, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found[precision] = records(tmp_path / precision, "eval")[40]["loss"]
    assert found["fp16"] == pytest.approx(found["fp32"], rel=0.01)
    assert found["fp32"] < 3


@pytest.mark.slow
def test_a_second_start_is_refused_and_the_first_goes_on(scratch, undisturbed):
    """On one process and on two, whatever the first is doing: here it is suspended in a step."""
    workdir = scratch / "owned"
    first = subprocess.Popen(
        command(scratch, workdir, "--config.checkpoint.every=1"), env=environment(1), cwd=ROOT,
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert any("step  3/12" in line for line in first.stdout)
    first.send_signal(signal.SIGSTOP)
    before = sorted((workdir / "checkpoints").iterdir())
    cluster = [sys.executable, "scripts/local_cluster.py", "-n", "2", "--"]
    for prefix in ((), cluster):
        begun = time.perf_counter()
        done = subprocess.run(
            [*prefix, *command(scratch, workdir)], env=environment(1), cwd=ROOT,
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        said = done.stdout + done.stderr
        assert done.returncode == 2 and "Traceback" not in said, said
        assert f"{workdir} is in use by process {first.pid} on" in said.splitlines()[-1], said
        assert time.perf_counter() - begun < 60  # 5 s on an idle machine
    assert sorted((workdir / "checkpoints").iterdir()) == before
    first.send_signal(signal.SIGCONT)
    rest = first.communicate(timeout=120)[0]
    assert first.returncode == 0, rest
    np.testing.assert_array_equal(losses(workdir), losses(undisturbed[0]))
    assert not (workdir / "owner.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", [False, True], ids=["same mesh", "other layout"])
def test_kill_and_resume(scratch, undisturbed, elsewhere):
    """Kill -9 again and again, in steps and in saves: no step twice or missing, the same losses."""
    workdir = scratch / f"killed_{elsewhere}"
    meshes = [
        (1, ()),
        (8, ("--config.sharding.layout=zero3",)),
        (4, ("--config.sharding.layout=zero1", "--config.mesh.tensor=2")),
        (8, ("--config.sharding.layout=hsdp", "--config.mesh.data=2", "--config.mesh.fsdp=4")),
    ]
    kills, most = 0, 5 if elsewhere else 3
    for attempt in range(20):
        devices, flags = meshes[attempt % 4 if elsewhere else 0]
        process = subprocess.Popen(
            command(scratch, workdir, *flags, "--config.checkpoint.every=1"),
            env=environment(devices), cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        steps = 0
        for line in process.stdout:
            steps += "/12  loss" in line
            if steps == 2 and kills < most:
                time.sleep(0.02 * kills)  # at another moment each time: in a step, in a save
                process.kill()
        if process.wait(300) == 0:
            break
        kills += 1
    assert kills >= most - 1
    if elsewhere:
        wanted = losses(undisturbed[0])
        np.testing.assert_allclose(losses(workdir), wanted, rtol=RESUME_ELSEWHERE)
    else:
        np.testing.assert_array_equal(losses(workdir), losses(undisturbed[0]))


# Ends without a word in the evaluation of a step, once its checkpoint is complete.
KILLED_IN_EVALUATION = """
import os, pathlib, sys, time
from llmx import train
from llmx.evaluate import held_out
losses, calls, (step, workdir) = held_out.losses, [], sys.argv[1:3]

def killed(*args, **options):
    calls.append(1)
    if 6 * len(calls) < int(step):
        return losses(*args, **options)
    while not pathlib.Path(workdir, "checkpoints", step).exists():
        time.sleep(0.01)
    os._exit(9)

held_out.losses = killed
sys.exit(train.main(["--workdir", workdir, *sys.argv[3:]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("step", [6, 12])
def test_an_evaluation_that_was_killed_is_made_up(scratch, undisturbed, step):
    workdir = scratch / f"killed_in_evaluation_{step}"
    done = subprocess.run(
        [sys.executable, "-c", KILLED_IN_EVALUATION, str(step), str(workdir), "--config",
         str(scratch / "run.py")], env=environment(1), cwd=ROOT, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 9 and step not in records(workdir, "eval")
    assert train(scratch, workdir).returncode == 0
    found, expected = (records(folder, "eval") for folder in (workdir, undisturbed[0]))
    assert list(found) == [6, 12]
    assert [each["loss"] for each in found.values()] == [e["loss"] for e in expected.values()]
    np.testing.assert_array_equal(losses(workdir), losses(undisturbed[0]))


def trainer(workdir, number: int) -> int:
    """The process id of the trainer `number` of a cluster on this machine."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_text().split("\0")
            surroundings = (path / "environ").read_text().split("\0")
        except (OSError, UnicodeDecodeError):
            continue
        is_ours = words[1:3] == ["-m", "llmx.train"] and str(workdir) in words
        if is_ours and f"LLMX_PROCESS_ID={number}" in surroundings:
            found.append(int(path.name))
    (one,) = found
    return one


@pytest.mark.slow
def test_a_supervised_run_outlives_its_coordinator(scratch, undisturbed):
    """Kill -9 of process 0: the other one ends, and both meet again at the same address."""
    workdir = scratch / "supervised"
    cluster = [sys.executable, "scripts/local_cluster.py", "-n", "2", "--supervise=--backoff 0.2"]
    process = subprocess.Popen(
        [*cluster, "--", *command(scratch, workdir, "--config.checkpoint.every=1")], cwd=ROOT,
        env=environment(1), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    said = ""
    for line in process.stdout:
        said += line
        if "step  5/12" in line and "restart" not in said:
            os.kill(trainer(workdir, 0), signal.SIGKILL)
    assert process.wait(10) == 0, said
    assert said.count("restart 1 of 10") == 2 and "resumed from checkpoint" in said, said
    np.testing.assert_allclose(losses(workdir), losses(undisturbed[0]), rtol=RESUME_ELSEWHERE)


@pytest.mark.slow
def test_a_corrupt_checkpoint_falls_back(scratch):
    workdir = scratch / "corrupt"
    assert train(scratch, workdir).returncode == 0
    wanted = losses(workdir)
    files = (workdir / "checkpoints" / "12" / "state").rglob("*")
    largest = max((path for path in files if path.is_file()), key=lambda path: path.stat().st_size)
    raw = bytearray(largest.read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    largest.write_bytes(raw)
    done = train(scratch, workdir)
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "resumed from checkpoint 10" in said, said
    np.testing.assert_array_equal(losses(workdir), wanted)


@pytest.fixture(scope="module")
def three_layers(scratch):
    """The losses of a run on one device with as many layers as two stages cannot share evenly."""
    done = train(scratch, scratch / "three", "--config.model.num_layers=3")
    assert done.returncode == 0, done.stderr
    return losses(scratch / "three")


@pytest.mark.full_grid  # checkpoint/test_reshard.py goes on elsewhere
@pytest.mark.slow
def test_a_run_on_stages_goes_on_without_and_back(scratch, three_layers):
    """On two processes, the same losses wherever it goes on; evaluated and sampled from on one."""
    workdir = scratch / "stages"
    cluster = [sys.executable, "scripts/local_cluster.py", "-n", "2", "--devices-per-process", "2",
               "--"]  # fmt: skip

    def run(inner, prefix=(), devices=4):
        done = subprocess.run(
            [*prefix, *inner], env=environment(devices), cwd=ROOT, capture_output=True, text=True,
            timeout=600, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def go_on(from_step, *flags):
        for path in (workdir / "checkpoints").glob("*"):
            if int(path.name) > from_step:
                shutil.rmtree(path)
        inner = command(scratch, workdir, "--config.model.num_layers=3", *flags)
        said = run(inner, cluster, 2)
        assert f"resumed from checkpoint {from_step}" in said or not from_step
        np.testing.assert_allclose(losses(workdir), three_layers, rtol=RESUME_ELSEWHERE)
        return said

    asked, texts = scratch / "asked.jsonl", ["x", "yes", "return x"]
    asked.write_text("".join(
        json.dumps({"question": f"def f{n}", "choices": texts, "answer": n % 3}) + "\n"
        for n in range(6)
    ))  # fmt: skip
    stages = ("--config.mesh.stage=2", "--config.batch.accumulation=4",
              f"--config.evaluation.choices={(str(asked),)}")  # fmt: skip
    assert "sample:" in go_on(0, *stages, *EVERYTHING[1:])
    said, found = run(command(scratch, workdir, module="llmx.evaluate")), records(workdir, "eval")
    assert f"loss {found[12]['loss']:.4f} nats" in said
    flags = ("--choices", str(asked), "--json")
    said = run(command(scratch, workdir, *flags, module="llmx.evaluate"))
    result = json.loads(said[said.index('{"acc') :].splitlines()[0])
    assert result["accuracy_per_byte"] == found[12]["asked/accuracy_per_byte"]
    assert result["accuracy"] == found[12]["asked/accuracy"] and result["questions"] == 6
    said = run(command(scratch, workdir, "--prompt", "return x", module="llmx.generate"))
    assert "return x" in said
    go_on(8, "--config.mesh.fsdp=2")
    go_on(10, *stages, "--config.pipeline.layers=(1, 2)")


@pytest.mark.slow
def test_what_is_under_way_is_saved(scratch):
    """PipeDream-2BW goes on as if it had never stopped; on other stages the batch that was under
    way is taken again."""
    workdir = scratch / "under_way"
    stages = ("--config.mesh.stage=2", "--config.batch.accumulation=4")
    flags = (*stages, "--config.pipeline.schedule=pipedream_2bw", "--config.model.num_layers=2")

    def go_on(*flags):
        done = subprocess.run(
            command(scratch, workdir, *flags), env=environment(2), cwd=ROOT, capture_output=True,
            text=True, timeout=600, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def forget():
        for path in (workdir / "checkpoints").glob("*"):
            if int(path.name) > 8:
                shutil.rmtree(path)

    go_on(*flags)
    wanted = losses(workdir)
    assert np.isnan(wanted[0]) and np.isfinite(wanted[1:]).all()  # the first completes no batch
    forget()
    assert "resumed from checkpoint 8" in go_on(*flags)
    np.testing.assert_array_equal(losses(workdir), wanted)
    forget()
    assert "is taken again" in go_on("--config.model.num_layers=2")
    assert losses(workdir).shape == wanted.shape


# Killed in a phase of their own: with errors of compression, between two exchanges of parameters.
STRATEGIES = {
    "one_bit": ("--config.sync.warmup_steps=3",),
    "diloco": ("--config.sync.every=4",),
    "zero_one": ("--config.sync.warmup_steps=1",),
    "stale": (),
}


def with_strategy(strategy: str) -> tuple[str, ...]:
    return (f"--config.sync.strategy={strategy}", *STRATEGIES[strategy],
            "--config.checkpoint.every=1", "--config.checkpoint.keep_last=20")  # fmt: skip


@pytest.fixture(scope="module")
def four_replicas(scratch):
    """Undisturbed runs of four replicas, by strategy."""

    @functools.cache
    def of(strategy: str) -> pathlib.Path:
        workdir = scratch / f"four_{strategy}"
        done = train(scratch, workdir, *with_strategy(strategy), devices=4)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"sync:  {strategy} between 4 replicas" in done.stdout + done.stderr
        found = losses(workdir)
        assert len(found) == 12 and found[-1] < found[0]
        return workdir

    return of


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_killed_replicas_go_on_as_if_nothing_had_been(scratch, four_replicas, strategy):
    workdir = scratch / f"killed_{strategy}"
    process = subprocess.Popen(
        command(scratch, workdir, *with_strategy(strategy)), env=environment(4), cwd=ROOT,
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    for line in process.stdout:
        if "step  7/12" in line:
            process.kill()
    process.wait(300)
    for path in (workdir / "checkpoints").glob("*"):
        if path.name.isdigit() and int(path.name) > 6:  # where the machine was too quick
            shutil.rmtree(path)
    done = train(scratch, workdir, *with_strategy(strategy), devices=4)
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "resumed from checkpoint" in said, said
    np.testing.assert_array_equal(losses(workdir), losses(four_replicas(strategy)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy, devices, flags",
    [
        ("one_bit", 2, ()),
        ("one_bit", 8, ()),
        ("one_bit", 8, ("--config.mesh.fsdp=2", "--config.sharding.layout=zero3")),
        ("one_bit", 4, ("--config.mesh.stage=2", "--config.batch.accumulation=2")),
        ("zero_one", 2, ()),
        ("diloco", 8, ()),
        ("stale", 2, ()),
    ],
)
def test_fewer_and_more_replicas_go_on(scratch, four_replicas, strategy, devices, flags):
    """What the four had not sent is split among the others."""
    before = four_replicas(strategy)
    name = f"{strategy}_on_{devices}_{len(flags)}_{'stage' in str(flags)}"
    workdir = scratch / name
    shutil.copytree(before, workdir)
    for path in (workdir / "checkpoints").glob("*"):
        if int(path.name) > 6:
            shutil.rmtree(path)
    done = train(scratch, workdir, *with_strategy(strategy), *flags, devices=devices)
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "resumed from checkpoint 6" in said, said
    assert "was converted to" in said
    np.testing.assert_array_equal(losses(workdir)[:6], losses(before)[:6])
    np.testing.assert_allclose(losses(workdir)[6:], losses(before)[6:], rtol=OTHER_REPLICAS)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["mean", "diloco"])
def test_another_strategy_in_the_middle_is_refused(scratch, four_replicas, strategy):
    flags = (*with_strategy("one_bit")[1:], f"--config.sync.strategy={strategy}")
    done = train(scratch, four_replicas("one_bit"), *flags, "--config.steps=20", devices=4)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    for words in ("trained with sync.strategy='one_bit'", f"gives {strategy!r}", "start_from"):
        assert words in done.stderr, done.stderr
