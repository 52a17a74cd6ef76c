"""Runs that prune, and one of integers, killed and resumed on other meshes; a model of its own
behind them."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from support import text_runs
from support.text_runs import losses

from llmx.compress import saved
from llmx.sharding import trees

ROOT = pathlib.Path(__file__).parents[2]
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
    run.metrics.log_every, run.metrics.progress = 1, "plain"
    run.data.sources, run.data.cache_dir = ({source!r},), {cache!r}
    return run
"""

PRUNE = (
    "--config.pruning.method=magnitude", "--config.pruning.begin_step=2",
    "--config.pruning.end_step=6", "--config.pruning.every=2", "--config.checkpoint.every=1",
)  # fmt: skip
ROUND = (
    "--config.quantization.bits=8", "--config.quantization.scales=learned",
    "--config.checkpoint.every=1",
)  # fmt: skip
MESHES = (
    (1, ()),
    (4, ("--config.mesh.fsdp=2", "--config.mesh.tensor=2")),
    (2, ("--config.mesh.stage=2", "--config.batch.accumulation=4")),
)
ELSEWHERE = 1e-4  # relative, of losses: on another mesh sums are taken in another order


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pruning")
    source, cache = str(text_runs.write_corpus(folder, files=40, words=300)), str(folder / "cache")
    (folder / "run.py").write_text(CONFIG.format(source=source, cache=cache))
    return folder


def command(scratch, workdir, *flags, module="llmx.train") -> list[str]:
    config = ["--config", str(scratch / "run.py")] if module == "llmx.train" else []
    return [sys.executable, "-m", module, *config, "--workdir", str(workdir), *flags]


def environment(devices: int) -> dict:
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    return os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}


def run(scratch, workdir, *flags, module="llmx.train") -> subprocess.CompletedProcess:
    return subprocess.run(
        command(scratch, workdir, *flags, module=module), env=environment(1), cwd=ROOT,
        capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip


def sparsity(workdir) -> list[float]:
    return [record["sparsity"] for record in text_runs.records(workdir).values()]


@pytest.fixture(scope="module")
def undisturbed(scratch):
    """The work directory of a run that prunes, and what it has said."""
    done = run(scratch, scratch / "undisturbed", *PRUNE)
    assert done.returncode == 0, done.stdout + done.stderr
    return scratch / "undisturbed", done.stdout


@pytest.mark.slow
def test_killed_and_resumed_elsewhere(scratch, undisturbed):
    """Kill -9 before, between and after the prunings: the same shares and losses."""
    wanted, said = undisturbed
    assert "pruned: 50% of attention, mlp by magnitude" in said
    workdir = killed_and_resumed(scratch, *PRUNE)
    np.testing.assert_allclose(losses(workdir), losses(wanted), rtol=ELSEWHERE)
    # A report is of the masks with which its step began.
    assert sparsity(wanted)[6:] == sparsity(workdir)[6:] == [0.5] * 6
    assert sparsity(wanted)[:2] == [0, 0]
    assert 0 < sparsity(wanted)[5] < 0.5 and sparsity(workdir) == sparsity(wanted)


@pytest.mark.slow
def test_integers_killed_and_resumed_elsewhere(scratch):
    """Learned scales come back: losses at the end are the same, and so are weights but for the few
    whose number lies between two integers, which are one apart."""
    wanted = scratch / "integers"
    done = run(scratch, wanted, *ROUND)
    assert done.returncode == 0, done.stdout + done.stderr
    workdir = killed_and_resumed(scratch, *ROUND)
    np.testing.assert_allclose(losses(workdir), losses(wanted), rtol=ELSEWHERE)
    one, other = (
        trees.named(jax.device_get(saved.opened(str(place)).params)) for place in (wanted, workdir)
    )
    assert one.keys() == other.keys() and len(one) > 8
    for name, array in one.items():
        apart, largest = np.abs(array - other[name]), np.abs(array).max()
        assert apart.max() < 1.5 * largest / 127, name
        assert (apart > 1e-4 * largest).mean() < 0.05, name


def killed_and_resumed(scratch, *flags) -> pathlib.Path:
    """The work directory of a run that was killed twice, and went on on other meshes."""
    workdir = scratch / f"killed_{flags[0].rpartition('.')[2]}"
    for attempt, steps_of_attempt in enumerate((3, 3, None)):
        devices, of_mesh = MESHES[attempt]
        process = subprocess.Popen(
            command(scratch, workdir, *flags, *of_mesh), env=environment(devices), cwd=ROOT,
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        steps, lines = 0, []
        for line in process.stdout:
            lines.append(line)
            steps += "/12  loss" in line
            if steps == steps_of_attempt:
                process.kill()
        code = process.wait(300)
        assert (code == 0) == (steps_of_attempt is None), "".join(lines)
    return workdir


@pytest.mark.slow
@pytest.mark.full_grid  # tests of llmx.compress run other stages
def test_a_run_is_shrunk_and_used(scratch, undisturbed, tmp_path):
    """By a recipe, whose run trains, evaluates, generates and is exported as any other."""
    small = tmp_path / "small"
    (tmp_path / "recipe.py").write_text("""
from llmx.compress.recipe import Recipe

def get_recipe():
    return Recipe(
        stages=(
            ("shrink", dict(num_kv_heads=1, mlp_dim=48)),
            ("prune", dict(method="sparse_gpt", pattern="2:4", calibration_batches=2)),
            ("train", dict(steps=3, warmup_steps=1, config={"pruning.method": "fixed"})),
        ),
        evaluation_batches=2, generated_tokens=0,
    )
""")
    recipe = ("--recipe", str(tmp_path / "recipe.py"), "--output", str(small))
    made = run(scratch, undisturbed[0], *recipe, module="llmx.compress")
    assert made.returncode == 0, made.stdout + made.stderr
    rows = json.loads((small / "compress.json").read_text())
    assert rows[1]["flops"] < 0.9 * rows[0]["flops"]
    assert rows[3]["nonzero"] == rows[2]["nonzero"] < rows[1]["nonzero"] < 1
    assert all(np.isfinite(row["loss"]) for row in rows)
    said = run(scratch, small, "--prompt=def ", "--max-tokens=4", module="llmx.generate")
    assert said.returncode == 0 and "def " in said.stdout, said.stdout + said.stderr
    exported = tmp_path / "exported"
    used = run(scratch, small, "--to-hf", str(exported), module="llmx.convert")
    assert used.returncode == 0, used.stdout + used.stderr
    saved = json.loads((exported / "config.json").read_text())
    assert (saved["num_key_value_heads"], saved["intermediate_size"]) == (1, 48)
