"""Training with sparse tables, killed and gone on with; exports of what comes out."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from support import text_runs

from llmx.tables import __main__ as command
from llmx.tables import exports

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("tables")]

ROOT = pathlib.Path(__file__).parents[2]
ELSEWHERE = dict(rtol=1e-5, atol=0)  # on another mesh sums are taken in another order
TABLES_ELSEWHERE = dict(rtol=0, atol=2e-5)
STEPS, KILLED_AT = 30, 17

CONFIG = """
from llmx import config
from llmx.model.families import ModelConfig
from llmx.model.recommender.config import RecommenderConfig

def get_config():
    run = config.default()
    run.model = ModelConfig(recommender=RecommenderConfig("dlrm", width=8, bottom=(16, 8),
                                                          top=(16,)))
    run.steps, run.precision = {steps}, "fp32"
    run.batch.size, run.batch.sequence_length = 64, 1
    run.data.format, run.data.sources = "records", ({records!r},)
    run.data.records.dense, run.data.records.rows = ("x", "y"), 5000
    run.data.records.features = ("user", "history:4@item", "item")
    run.data.cache_dir = {cache!r}
    run.tables.eps = run.optimizer.eps = 1e-3
    run.tables.weight_decay = 0.1
    run.optimizer.warmup_steps, run.optimizer.learning_rate = 2, 1e-3
    run.checkpoint.every, run.evaluation.every = 4, 0
    run.metrics.log_every, run.metrics.progress = 1, "plain"
    return run
"""


def write_records(path: pathlib.Path) -> None:
    """Clicks where a user's number and an item's are alike."""
    import pyarrow
    from pyarrow import parquet

    rng, number = np.random.default_rng(0), 3000
    user, item = (np.minimum(rng.zipf(1.3, number), 5000) - 1 for _ in range(2))
    history = [list(rng.integers(0, 5000, rng.integers(0, 5))) for _ in range(number)]
    columns = {
        "label": ((user + item) % 3 == 0).astype(np.int8), "x": rng.standard_normal(number),
        "y": rng.standard_normal(number), "user": user, "item": item,
        "history": pyarrow.array(history, pyarrow.list_(pyarrow.int32())),
    }  # fmt: skip
    parquet.write_table(pyarrow.table(columns), path)


def started(scratch, workdir, devices: int, *flags) -> subprocess.Popen:
    xla = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        [sys.executable, "-m", "llmx.train", "--config", str(scratch / "run.py"), "--workdir",
         str(workdir), f"--config.mesh.fsdp={devices}", "--config.mesh.data=1", *flags],
        env=os.environ | {"XLA_FLAGS": xla, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"},
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def train(scratch, workdir, devices: int, *flags) -> str:
    process = started(scratch, workdir, devices, *flags)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return said


def exported(workdir, *flags) -> exports.Export:
    folder = workdir.with_name(f"{workdir.name}{len(list(workdir.parent.iterdir()))}")
    args = ["--workdir", str(workdir), "--output", str(folder), "--optimizer-state", *flags]
    assert command.main(["export", *args]) == 0
    return exports.open_export(folder, verify=True)


def arrays_of(opened: exports.Export) -> dict:
    return {
        (name, slot): opened.read(name, slot, slice(0, table.rows))
        for name, table in opened.tables.items()
        for slot in ("", *opened.slots)
    }


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """A config, a run from beginning to end on two devices, and one that was killed."""
    folder = tmp_path_factory.mktemp("tables")
    write_records(folder / "records.parquet")
    text = CONFIG.format(
        steps=STEPS, records=str(folder / "records.parquet"), cache=str(folder / "cache")
    )
    (folder / "run.py").write_text(text)
    train(folder, folder / "whole", 2)
    process, last = started(folder, folder / "killed", 2), 0
    for line in process.stdout:
        if found := re.search(rf"step +(\d+)/{STEPS}", line):
            last = int(found[1])
        if last >= KILLED_AT:
            process.send_signal(signal.SIGKILL)
            break
    process.stdout.close()
    assert process.wait(30) == -signal.SIGKILL
    return folder


def test_a_killed_run_goes_on_bit_for_bit(scratch):
    workdir = scratch / "again"
    shutil.copytree(scratch / "killed", workdir)
    assert re.search(r"resumed from checkpoint (8|12|16)\b", train(scratch, workdir, 2))
    losses = [text_runs.losses(each) for each in (workdir, scratch / "whole")]
    assert len(losses[0]) == STEPS
    np.testing.assert_array_equal(*losses)
    found, wanted = (exported(each) for each in (workdir, scratch / "whole"))
    for (name, slot), array in arrays_of(wanted).items():
        np.testing.assert_array_equal(found.read(name, slot, slice(0, len(array))), array)
    for name, array in wanted.dense.items():
        np.testing.assert_array_equal(found.dense[name], array)


def test_a_killed_run_goes_on_on_other_devices(scratch):
    workdir = scratch / "elsewhere"
    shutil.copytree(scratch / "killed", workdir)
    flags = ("--config.tables.split=whole",)
    assert "rows were moved from a mesh of fsdp2" in train(scratch, workdir, 4, *flags)
    losses = [text_runs.losses(each) for each in (workdir, scratch / "whole")]
    np.testing.assert_allclose(*losses, **ELSEWHERE)
    found, wanted = (exported(each) for each in (workdir, scratch / "whole"))
    for name, table in wanted.tables.items():
        arrays = [each.read(name, "", slice(0, table.rows)) for each in (found, wanted)]
        np.testing.assert_allclose(*arrays, **TABLES_ELSEWHERE)


def test_increments_of_a_run_equal_its_whole_exports(scratch):
    """Of checkpoints of a run whose rows also change where no batch has named them, and where only
    the optimizer's state does."""
    workdir = scratch / "whole"
    steps = sorted(int(path.name) for path in (workdir / "checkpoints").glob("[0-9]*"))
    first = exported(workdir, "--step", str(steps[0]))
    newest = first
    for step in steps[1:]:
        newest = exported(workdir, "--step", str(step), "--since", str(newest.folder))
    assert newest.step == STEPS and len(newest.parts["item"]) == len(steps) > 2
    whole = exported(workdir)
    for (name, slot), array in arrays_of(whole).items():
        np.testing.assert_array_equal(newest.read(name, slot, slice(0, len(array))), array)
