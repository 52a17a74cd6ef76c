"""What is said of a process that ends inside native code."""

import subprocess
import sys

import pytest

from llmx.runtime import exits

PROGRAM = """
import os, signal, sys
import numpy as np
from llmx.runtime import fatal

def end(code, text):
    print(text, file=sys.stderr, flush=True)
    os._exit(code)

fatal.explain(end)
mapped = np.memmap(sys.argv[1], np.uint8, "r")
if sys.argv[2] == "cut":
    os.truncate(sys.argv[1], 10)
    print(mapped[-1])
os.kill(os.getpid(), getattr(signal, sys.argv[2]))
"""


@pytest.mark.parametrize("how, code, words", [
    ("cut", exits.REFUSED, ("shorter than when this process mapped it", "Restore it")),
    ("SIGBUS", exits.CRASHED, ("a read of a mapped file failed", "check them")),
])  # fmt: skip
def test_a_mapped_file_that_cannot_be_read_is_named(tmp_path, how, code, words):
    path = tmp_path / "shard.tokens"
    path.write_bytes(bytes(100_000))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path), how], capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    last = done.stderr.splitlines()[-1]
    assert str(path) in last and all(word in last for word in words), last
    assert "most recent call first" in done.stderr


def test_another_fatal_signal_shows_the_stacks(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "file"), "SIGSEGV"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -11 and "Segmentation fault" in done.stderr
    assert "most recent call first" in done.stderr
