"""URLs in place of local paths: what each command does with them, and what they need."""

import importlib
import pathlib
import sys

import pytest

from llmx.data import remote

COMMANDS = {
    "train": ["train", "--config", "configs/quickstart.py", "--workdir", "URL"],
    "start_from": ["train", "--config", "configs/quickstart.py", "--config.start_from=URL"],
    "cache_dir": ["train", "--config", "configs/quickstart.py", "--config.data.cache_dir=URL"],
    "generate": ["generate", "--workdir", "URL", "--prompt", "x"],
    "evaluate": ["evaluate", "--workdir", "URL"],
    "from_hf": ["convert", "--from-hf", "URL", "--workdir", "OUT"],
    "convert": ["convert", "--from-hf", "OUT", "--workdir", "URL"],
    "to_hf": ["convert", "--to-hf", "URL", "--workdir", "OUT"],
    "output": ["data", "--source", "stdlib", "--output", "URL"],
    "source": ["data", "--source", "URL", "--output", "OUT"],
    "verify": ["data", "--verify", "URL"],
    "checkpoint": ["checkpoint", "ls", "URL"],
    "metrics": ["metrics", "URL"],
    "history": ["config.history", "URL"],
}
UNSUPPORTED = {"train", "cache_dir"} | COMMANDS.keys()


def run(arguments, tmp_path, monkeypatch, url):
    """The exit code of a command in this process, and in an empty folder."""
    root = pathlib.Path(__file__).parents[2]
    name, *rest = (
        {"URL": url, "OUT": str(tmp_path / "out")}.get(a, a)
        .replace("=URL", f"={url}").replace("configs/", f"{root}/configs/")
        for a in arguments
    )  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *rest])
    package = f"llmx.{name}"
    with_main = name in ("data", "checkpoint")
    module = importlib.import_module(f"{package}.__main__" if with_main else package)
    try:
        return module.main() if name == "metrics" else module.main(rest)
    except SystemExit as ended:
        return ended.code


@pytest.mark.parametrize("command", sorted(UNSUPPORTED))
def test_a_url_that_is_not_supported_is_refused_and_nothing_is_written(
    tmp_path, monkeypatch, capsys, command
):
    assert run(COMMANDS[command], tmp_path, monkeypatch, "memory://bucket/key") == 2
    said = capsys.readouterr().err
    (line,) = [line for line in said.splitlines() if "memory://bucket/key" in line]
    assert "must be local" in line
    assert list(tmp_path.iterdir()) == []


def test_what_a_url_needs(monkeypatch):
    monkeypatch.setattr(remote.importlib.util, "find_spec", lambda name: None)
    for url, remedy in [
        ("s3://b/k", "--output s3://b/k needs s3fs, which is not installed: pip install 'llmx[s3]"),
        ("gs://b/k", "pip install 'llmx[gcs]'"),
        ("az://b/k", "pip install 'llmx[azure]'"),
        ("hf://datasets/o/n", "pip install 'llmx[hub]'"),
        ("nonsense://b", "nonsense is no kind of store that is known"),
        ("://b", "this is no kind of store"),
        ("file:///tmp/x", "without file://"),
    ]:
        (problem,) = remote.problems("--output ", url)
        assert remedy in problem
    assert not remote.problems("", "memory://x/y") and not remote.problems("", "C:/x")
    assert remote.scheme_of("zip://a.txt::s3://b/k.zip") == "zip"
