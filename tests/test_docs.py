"""The examples of docs/adding.md fit the code as it is."""

import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "adding.md"
DIFFS = re.findall(r"```diff\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize("diff", DIFFS, ids=lambda diff: re.search(r"\+\+\+ b/(\S+)", diff)[1])
def test_a_diff_of_the_page_applies(diff):
    applied = subprocess.run(
        ["git", "apply", "--check", "--unidiff-zero", "--recount", "-"],
        cwd=ROOT, input=diff, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert applied.returncode == 0, applied.stderr


_CALL = re.compile(r"^\+.*?\b(phases|replicas_lib)\.(\w+)", re.MULTILINE)
CALLED = sorted(set(_CALL.findall("".join(DIFFS))))


@pytest.mark.parametrize("module, name", CALLED)
def test_what_a_diff_calls_exists(module, name):
    from llmx.sync import phases, replicas

    assert hasattr({"phases": phases, "replicas_lib": replicas}[module], name)
