"""auxiliary.py: one warning, retries with longer and longer pauses, one word of a recovery."""

import errno
import subprocess
import sys

from llmx.runtime import auxiliary
from llmx.runtime.auxiliary import Auxiliary, cause


class Attempts:
    """A function that fails until it is repaired, and a clock."""

    def __init__(self):
        self.now, self.times, self.broken = 0.0, [], True

    def __call__(self):
        self.times.append(self.now)
        if self.broken:
            raise OSError(errno.ENOSPC, "No space left on device", "/w/x")


def driven(attempts, seconds, told):
    runs = Auxiliary("the thing", log=told.append, clock=lambda: attempts.now)
    for attempts.now in range(seconds):
        runs(attempts)
    return runs


def test_one_warning_and_pauses_that_double():
    attempts, told = Attempts(), []
    driven(attempts, 300, told)
    assert attempts.times == [0, 1, 3, 7, 15, 31, 63, 123, 183, 243]
    assert told == [
        "warning: the thing: No space left on device: /w/x; training goes on without it, and "
        "tries again"
    ]


def test_a_recovery_is_said_once_and_the_pauses_begin_again():
    attempts, told = Attempts(), []
    runs = driven(attempts, 10, told)
    attempts.broken = False
    assert not runs(attempts)  # in its pause
    attempts.now = 15
    assert runs(attempts) and runs(attempts)
    assert told[1:] == ["the thing: works again"]
    attempts.broken = True
    assert not runs(attempts) and not runs(attempts)
    attempts.now = 16
    runs(attempts)
    assert attempts.times[-2:] == [15, 16]
    assert len(told) == 2  # it was told of lately
    attempts.broken, attempts.now = False, 15 + auxiliary.QUIET
    runs(attempts)
    attempts.broken = True
    runs(attempts)
    assert len(told) == 3 and told[2] == told[0]  # later again


def test_the_last_attempt_does_not_wait_and_promises_nothing():
    attempts, told = Attempts(), []
    runs = Auxiliary("the thing", log=told.append, clock=lambda: attempts.now)
    assert not runs(attempts, last=True) and not runs(attempts, last=True)
    assert len(attempts.times) == 2
    assert told == ["warning: the thing: No space left on device: /w/x; it is left out"]


def test_causes():
    assert cause(ValueError("first\nsecond")) == "ValueError: first"
    assert cause(KeyError()) == "KeyError"
    assert cause(OSError("plain")) == "plain"
    assert cause(FileExistsError(errno.EEXIST, "File exists", "/w")) == "File exists: /w"


def test_a_log_that_nobody_reads_ends_nothing():
    code = "from llmx.runtime import launch\nfor i in range(9): launch.log(i)\nlaunch.note('done')"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    assert process.stderr.read() == b"done\n" and process.wait(60) == 0


def test_a_log_on_a_full_disk_ends_nothing():
    code = "from llmx.runtime import launch\nlaunch.log('x')\nlaunch.note('done')"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert done.stderr.startswith(b"done\n")
