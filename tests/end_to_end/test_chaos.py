"""A handful of faults with a fixed seed: each ends as scripts/chaos.py says that it must."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
KINDS = ("kill", "flip", "term_all")


@pytest.mark.full_grid  # each fault has a test of its own
@pytest.mark.slow
def test_a_handful_of_faults(tmp_path):
    done = subprocess.run(
        [sys.executable, "scripts/chaos.py", "--faults", str(len(KINDS)), "--seed", "1",
         "--processes", "2", "--only", ",".join(KINDS), "--folder", str(tmp_path / "chaos")],
        cwd=ROOT, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(KINDS)} ok, 0 missed, 0 VIOLATION" in done.stdout, done.stdout
