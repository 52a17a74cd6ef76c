"""Control characters in the text of others: shown, never sent to a terminal."""

import ast
import dataclasses
import errno
import io
import json
import os
import pathlib
import pty
import subprocess
import sys

import pytest

from llmx.runtime import exits, launch, plot, printable

PACKAGE = pathlib.Path(__file__).parent.parent.parent / "llmx"
EVIL = "a\x1b[31m\x07b\r\x9b2Jc\u202ed\udc80"
SHOWN = "a\\x1b[31m\\x07b\\r\\x9b2Jc\\u202ed\\udc80"


def test_what_is_shown():
    assert printable.printable(EVIL) == SHOWN
    plain = "two\nlines\tand été 日本 🙂 👨‍👩‍👧 \u200f\u05d0 \\x1b"
    assert printable.printable(plain) == plain
    assert printable.printable(printable.printable(EVIL)) == SHOWN
    assert printable.printable(ValueError(EVIL)) == SHOWN


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_text_of_a_model_stays_as_it_is_but_on_a_terminal():
    assert printable.on(io.StringIO(), EVIL) == EVIL
    assert printable.on(Terminal(), EVIL) == SHOWN


def test_logs_and_errors(capsys):
    launch.log(EVIL)
    launch.note(EVIL)
    exits.show(EVIL)
    printable.error(EVIL)
    found = capsys.readouterr()
    assert found.out == f"{SHOWN}\n{SHOWN}\n"
    assert found.err == f"{SHOWN}\nerror: {SHOWN}\n"


def test_nothing_but_constants_is_printed_to_stderr_by_itself():
    """Errors of all commands go through `printable`."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            to_stderr = (
                isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
                and any(ast.unparse(one) == "file=sys.stderr" for one in node.keywords)
            )  # fmt: skip
            if to_stderr and not isinstance(node.args[0], ast.Constant):
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert [one.partition(":")[0] for one in found] == ["runtime/printable.py"], found


def test_errors_of_all_command_lines_are_printable(capsys):
    parser = printable.Parser(prog="p")
    parser.add_subparsers().add_parser("part").add_argument("--number", type=int)
    for arguments in (["part", f"--{EVIL}"], ["part", "--number", EVIL], [EVIL]):
        with pytest.raises(SystemExit):
            parser.parse_args(arguments)
        said = capsys.readouterr().err
        assert "error: " in said and "\x1b" not in said and printable.printable(said) == said
    found = [
        path for path in PACKAGE.rglob("*.py") if "argparse.ArgumentParser(" in path.read_text()
    ]
    assert found == []


def test_a_name_is_no_markup_of_a_picture(tmp_path, recwarn):
    """Neither mathematics nor characters that no font has."""
    folder = tmp_path / "a$\\foo$\x1b]0;T\x07"
    folder.mkdir()
    lines = [
        {"kind": "train", "step": 1, "tokens": 8, "loss": 2.0},
        {"kind": "layers", "step": 1, "tokens": 8, "a$\\foo$\x1b": [1.0, 2.0]},
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert len(plot.plot_all(folder)) == 2
    assert not [str(one.message) for one in recwarn if "lyph" in str(one.message)]


@pytest.mark.parametrize("name", ["a[/b]", "a[red]", "a\x1b[31m"])
def test_a_name_is_no_markup_of_a_progress_bar(tmp_path, capsys, monkeypatch, name):
    from llmx.data import __main__ as command

    monkeypatch.setenv("COLUMNS", "300")
    (tmp_path / "a.txt").write_text("text " * 100)
    folder = tmp_path / "v" / name
    assert command.main(["--source", str(tmp_path / "a.txt"), "--output", str(folder)]) == 0
    assert command.main(["--verify", str(folder)]) == 0
    said = capsys.readouterr().err
    assert f"verify {printable.printable(folder)} " in said and "\x1b" not in said


def test_a_name_is_no_markup_of_a_table():
    from rich.console import Console

    from llmx.compress import measure, report

    values = dict.fromkeys((one.name for one in dataclasses.fields(measure.Measured)), 1)
    table = report.table([measure.Measured(**values | {"stage": "cut [/b] \x1b[31m"})])
    shown = io.StringIO()
    Console(file=shown, width=200).print(table)
    assert "cut [/b] \\x1b[31m" in shown.getvalue()


def on_terminal(*command) -> bytes:
    """What a command writes to a terminal, on both streams."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"NO_COLOR": "1", "TERM": "xterm"}
    child = subprocess.Popen(
        [sys.executable, "-m", *command], stdin=theirs, stdout=theirs, stderr=theirs,
        env=environment,
    )  # fmt: skip
    os.close(theirs)
    found = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        found += piece
    child.wait()
    os.close(ours)
    return found


@pytest.mark.parametrize("kind", ["name of a file", "refusal of a template", "special token"])
def test_a_command_on_a_terminal(tmp_path, kind):
    talk = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    template = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
    name = "a.jsonl"
    if kind == "name of a file":
        name, talk = "\x1b]0;title\x07.jsonl", {"text": 3}
    if kind == "refusal of a template":
        template = "{{ raise_exception('no \x1b[31m') }}"
    if kind == "special token":
        talk["messages"][1]["content"] = "a\x1b[31m"
    (tmp_path / name).write_text(json.dumps(talk))
    (tmp_path / "t.jinja").write_text(template)
    found = on_terminal(
        "llmx.data", "--preview", "--format", "chat", "--source", str(tmp_path / name),
        "--chat-template", str(tmp_path / "t.jinja"),
    )  # fmt: skip
    assert b"\x1b" not in found and b"\\x1b" in found


def test_a_last_line_that_nobody_can_read_is_no_error(monkeypatch, capsys):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

    closed = io.StringIO()
    closed.close()
    for stream in (Full(), closed):
        monkeypatch.setattr(sys, "stderr", stream)
        printable.try_to_stderr("text")
    monkeypatch.undo()
    printable.try_to_stderr("\x1b[2J")
    assert capsys.readouterr().err == "\\x1b[2J\n"
