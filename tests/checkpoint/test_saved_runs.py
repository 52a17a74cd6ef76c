"""Runs saved by an earlier version go on as they would have gone on then.

saved_runs/*.tar.gz each hold a run of six steps, its losses of all six, and its checkpoint of step
3. They were written on one or two fake CPU devices before the package had rooms, `_even` before
stages kept activations alone.
"""

import os
import pathlib
import subprocess
import sys
import tarfile

import pytest
from support import text_runs

SAVED = pathlib.Path(__file__).parent / "saved_runs"
TOLERANCE = 1e-5  # relative; another machine may take sums in another order

CONFIG = """
from llmx import config
from llmx.model import families

def get_config():
    run = config.default()
    run.model = families.preset("llama3", num_layers=3, width=16, num_heads=2, head_dim=8,
                                num_kv_heads=2, mlp_dim=16, vocab_multiple=8, max_positions=64)
    run.steps, run.precision = 6, "fp32"
    run.batch.size, run.batch.sequence_length = 8, 16
    run.optimizer.warmup_steps, run.optimizer.learning_rate = 2, 1e-2
    run.checkpoint.every, run.metrics.log_every, run.metrics.progress = 3, 1, "plain"
    run.metrics.tensorboard = False
    run.data.sources, run.data.cache_dir = ("text",), "cache"
    return run
"""

STAGES = ("--config.mesh.stage=2", "--config.mesh.data=1", "--config.batch.accumulation=4",
          "--config.pipeline.layers=(2,1)")  # fmt: skip
TWO = "--config.launch.cpu_devices=2"
FLAGS = {
    "plain": ("--config.launch.cpu_devices=1", "--config.optimizer.ema_decay=0.9"),
    "stages": (TWO, *STAGES),
    "pipedream_2bw": (TWO, *STAGES, "--config.pipeline.schedule=pipedream_2bw"),
    "pipedream_2bw_even": (
        TWO,
        *STAGES[:-1],
        "--config.pipeline.schedule=pipedream_2bw",
        "--config.model.num_layers=4",
        "--config.remat=full",
    ),
    "one_bit": (TWO, "--config.sync.strategy=one_bit", "--config.sync.warmup_steps=2"),
    "zero_one": (TWO, "--config.sync.strategy=zero_one", "--config.sync.warmup_steps=2"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The text that the runs were trained on, and their config."""
    made = tmp_path_factory.mktemp("saved")
    text_runs.write_corpus(made, files=20, words=100)
    (made / "run.py").write_text(CONFIG)
    return made


def losses(folder: pathlib.Path, name: str) -> dict[int, float]:
    """By step, where one completes a batch."""
    found = text_runs.records(folder / name).items()
    return {step: record["loss"] for step, record in found if "loss" in record}


@pytest.mark.parametrize("name", FLAGS)
def test_a_run_saved_by_an_earlier_version_goes_on(folder, name):
    with tarfile.open(SAVED / f"{name}.tar.gz") as saved:
        saved.extractall(folder, filter="data")
    wanted = losses(folder, name)
    (folder / name / "metrics.jsonl").unlink()
    command = [sys.executable, "-m", "llmx.train", "--config", "run.py", "--workdir", name]
    done = subprocess.run(
        [*command, *FLAGS[name]], check=False, cwd=folder, capture_output=True, text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    got = losses(folder, name)
    if name == "pipedream_2bw":  # without remat stages kept weights of each microbatch too
        assert "the batch that was in flight in the pipeline" in done.stdout
        assert "resumed from checkpoint 2" in done.stdout and sorted(got) == [4, 5, 6]
        assert got[6] < got[5] < got[4] < 1.01 * wanted[4]
        return
    assert "resumed from checkpoint 3" in done.stdout
    assert sorted(got) == [4, 5, 6]
    for step, loss in got.items():
        assert loss == pytest.approx(wanted[step], rel=TOLERANCE), step
