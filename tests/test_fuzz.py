"""scripts/fuzz.py: a part of its inputs, and that it reports what it is there to find."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent


def run(*arguments):
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip


def test_malformed_inputs_are_refused():
    done = run("scripts/fuzz.py", "--inputs", "320", "--workers", "2", "--seed", "7")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "320 inputs in" in done.stdout and "0 findings" in done.stdout


def test_what_configs_are_accepted_is_traced():
    done = run("scripts/fuzz.py", "--only", "configs", "--inputs", "24", "--seed", "5")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    counted = re.search(r"configs: loads (\d+), refused (\d+)", done.stdout)
    assert counted and int(counted[1]) >= 4 and int(counted[2]) >= 4, done.stdout


FAULTS = """
import os, pathlib, sys, time
sys.path.insert(0, "scripts")
import fuzz

class Faulty(fuzz.Target):
    def make(self, folder):
        (folder / "a.txt").write_text("x")

    def load(self, folder, rng):
        number = self.number
        if number == 0:
            raise KeyError("a")
        if number == 1:
            raise ValueError("something is wrong")
        if number == 2:
            pathlib.Path(os.environ["HOME"], "outside").write_text("x")
        if number == 3:
            bytearray(fuzz.LIMIT_BYTES + (50 << 20))
        if number == 4:
            os._exit(3)
        raise ValueError(f"{folder}: refused")

class Slow(Faulty):
    def load(self, folder, rng):
        time.sleep(60)

def numbered(target, number, *rest):
    target.number = number
    return try_input(target, number, *rest)

try_input, fuzz.try_input = fuzz.try_input, numbered
fuzz.LIMIT_SECONDS, fuzz.LIMIT_BYTES = 60, 200 << 20
fuzz.TARGETS = {"faulty": Faulty}
code = fuzz.main(["--inputs", "7", "--workers", "1"])
fuzz.LIMIT_SECONDS, fuzz.TARGETS = 3, {"slow": Slow}
sys.exit(10 * code + fuzz.main(["--inputs", "1", "--workers", "1"]))
"""


def test_what_is_there_to_find_is_found():
    done = run("-c", FAULTS)
    assert done.returncode == 11, done.stdout + done.stderr
    for outcome in ("KeyError", "unnamed", "writes outside", "memory", "died of 3"):
        assert f"{outcome} 1" in done.stdout, done.stdout
    assert "slow: hang 1" in done.stdout
    # The worker that died was replaced: the inputs after it were tried.
    assert "7 inputs in" in done.stdout and "5 findings" in done.stdout
