"""Every config compiles for the machine that its docstring names."""

import pathlib
import runpy
import subprocess
import sys

import pytest
from support import tiers

from llmx.aot import topologies
from llmx.config import checks

ROOT = pathlib.Path(__file__).parents[2]
CONFIGS = sorted(set((ROOT / "configs").glob("*.py")) - set((ROOT / "configs").glob("compress_*")))
# A minute of compilation or less; all others: python scripts/compile_configs.py
SMALL = ("gpt2_124m", "quickstart", "qwen3_0.6b", "scaling")

topologies_of = runpy.run_path(str(ROOT / "scripts" / "compile_configs.py"))["topologies_of"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_docstring_names_a_machine_that_the_config_fills(path):
    named = topologies_of(path)
    if not named and not runpy.run_path(str(path))["get_config"]().model.is_decoder:
        return  # llmx.aot refuses it
    assert named, "say `python -m llmx.aot --config ... --topology ...` in the docstring"
    for name in named:
        run = runpy.run_path(str(path))["get_config"]()
        # Of other runs, which are not here.
        run.start_from, run.distillation = "", type(run.distillation)()
        checks.resolve(run, topologies.parse(name).num_devices)


@pytest.mark.aot
@pytest.mark.parametrize("name", tiers.by_tier(SMALL, slow=(), full=set(SMALL) - {"scaling"}))
def test_it_compiles_and_fits(name):
    done = subprocess.run(
        [sys.executable, "scripts/compile_configs.py", name],
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fits: peak" in done.stdout


def test_an_unknown_config_is_refused():
    done = subprocess.run(
        [sys.executable, "scripts/compile_configs.py", "llama9"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "llama9" in done.stderr and "llama3_8b" in done.stderr
