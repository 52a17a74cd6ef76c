"""What cannot be written names where, and what to do: a file may not grow beyond a limit here."""

import errno
import os
import resource
import subprocess
import sys

import pytest

from llmx import config
from llmx.config import describe
from llmx.data import full_disk
from llmx.runtime import printable


def small_files():
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))


@pytest.mark.parametrize("flag", ["llmx.data", "llmx.data.records"])
def test_a_build_names_its_folder(tmp_path, flag):
    output = tmp_path / "out"
    if flag == "llmx.data":
        (tmp_path / "a.txt").write_text("some words " * 1000)
        source = [str(tmp_path / "a.txt")]
    else:
        source = ["generated:5000"]
    done = subprocess.run(
        [sys.executable, "-m", flag, "--source", *source, "--output", str(output)],
        capture_output=True, text=True, timeout=60, check=False, preexec_fn=small_files,
    )  # fmt: skip
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2 and str(output) in last, last
    assert last.count("raise the limit (ulimit -f)") == 1 and "free space" not in last, last


def test_only_errors_of_a_full_disk_without_a_name_are_changed(tmp_path):
    @full_disk.names_path
    def write(path, error):
        raise error

    for error in (OSError(5, "Input/output error"), FileNotFoundError(2, "no", "x"), KeyError(1)):
        with pytest.raises(type(error)) as raised:
            write(tmp_path, error)
        assert raised.value is error
    with pytest.raises(OSError, match="No space left on device") as raised:
        write(tmp_path, OSError(28, os.strerror(28)))
    assert raised.value.filename == str(tmp_path)


@pytest.mark.parametrize(("number", "remedy"), [
    (errno.ENOSPC, "the disk is full ({}): free space on it"),
    (errno.EDQUOT, "the disk quota is used up ({}): free space or raise the quota"),
    (errno.EFBIG, "a file is larger than is allowed ({}): raise the limit (ulimit -f)"),
])  # fmt: skip
def test_the_remedy_is_said_once(number, remedy, tmp_path, capsys):
    """By a command, and by training, which names a key beside it."""

    @full_disk.names_path
    def write(path):
        raise OSError(number, os.strerror(number))

    with pytest.raises(OSError) as raised:
        write(tmp_path)
    printable.error(raised.value)
    remedy = remedy.format(f"[Errno {number}] {os.strerror(number)}: '{tmp_path}'")
    assert capsys.readouterr().err == f"error: {remedy}, and run the same command again\n"
    assert describe.failure_text(config.default(), raised.value) == remedy
