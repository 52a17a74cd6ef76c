"""The console command `llmx`: it forwards to the modules, with their exit codes and signals."""

import importlib.util
import pathlib
import re
import signal
import subprocess
import sys
import tomllib

import pytest

from llmx import __main__ as console
from llmx.runtime import exits

ROOT = pathlib.Path(__file__).parents[2]


def run(*words, **options):
    return subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, cwd=ROOT, check=False,
        **options,
    )  # fmt: skip


def test_help_has_a_line_for_each_command(capsys):
    assert console.main(["--help"]) == exits.DONE
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("usage: llmx COMMAND")
    for line, (name, (module, what)) in zip(lines[2:], console.COMMANDS.items(), strict=True):
        assert line.split() == [name, *what.split()]
        assert importlib.util.find_spec(module)
    assert console.main([]) == exits.DONE
    assert capsys.readouterr().out.splitlines() == lines


def test_every_command_of_the_readme_is_one():
    named = set(re.findall(r"python -m (llmx\.[\w.]+)", (ROOT / "README.md").read_text()))
    assert named == {module for module, _ in console.COMMANDS.values()}


def test_the_package_names_it():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"llmx": "llmx.__main__:main"}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("trian", "'trian' is not a command: did you mean train?"),
        ("xyz", "'xyz' is not a command: use one of train, generate, evaluate, harness"),
        ("--config", "'--config' is not a command: "),
    ],
)
def test_an_unknown_command(capsys, name, words):
    assert console.main([name, "--config", "x"]) == exits.REFUSED
    out, told = capsys.readouterr()
    assert words in told and not out and len(told.splitlines()) == 1


def test_arguments_and_exit_codes_are_those_of_the_module(tmp_path):
    for words in (["x y", "--z"], [str(tmp_path)]):  # of a command without JAX
        own, forwarded = run("llmx.report", *words), run("llmx", "report", *words)
        assert own.returncode == forwarded.returncode == exits.REFUSED
        assert own.stderr == forwarded.stderr and own.stderr


def test_signals_are_those_of_the_module():
    """SIGTERM ends the supervisor with the code of its command."""
    code = "import time; print(1, flush=True); time.sleep(60)"
    command = [sys.executable, "-m", "llmx", "supervise", "--", sys.executable, "-c", code]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout.readline() == "1\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
