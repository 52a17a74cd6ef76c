"""The time to save after SIGTERM: over, the process ends and names what is safe."""

import subprocess
import sys
import time
import types

from llmx.checkpoint import grace

HUNG_SAVE = """
import os, sys, time
from llmx.checkpoint import grace

def end(text):
    print(text, flush=True)
    os._exit(75)

with grace.GraceLimit(0.5, process=1, newest=lambda: "that of step 40", end=end) as limit:
    limit.start(time.monotonic() - 0.2)
    time.sleep(30)
"""


def test_a_save_that_takes_too_long_ends_the_process_with_75():
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", HUNG_SAVE], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 75 and time.monotonic() - begun < 10, done
    assert done.stdout.splitlines()[-1] == (
        "checkpoint.grace_seconds=0.5 are over before the save is complete; the newest checkpoint "
        "is that of step 40: run again to continue from it"
    )


def test_a_save_in_time_ends_nothing():
    ended = []
    limit = grace.GraceLimit(0.2, process=1, newest=lambda: "none", end=ended.append)
    with limit:
        limit.start()
        limit.start(time.monotonic() - 5)  # the second signal does not shorten the time
        time.sleep(0.05)
    time.sleep(0.4)
    assert not ended
    limit.start()
    time.sleep(0.3)
    assert not ended  # the run has ended its own way


def test_what_comes_after_the_save_has_what_is_left():
    limit = grace.GraceLimit(5.0, process=1, newest=lambda: "none", end=print)
    assert limit.left() is None
    limit.start(time.monotonic() - 3)
    limit.cancel()
    assert 1 < limit.left() <= 2
    late = grace.GraceLimit(5.0, process=1, newest=lambda: "none", end=print)
    late.cancel()
    late.start(time.monotonic() - 9)  # the signal comes when all is saved
    assert late.left() == 0


def test_process_0_ends_last():
    ended = []
    for process in (0, 1):
        end = lambda text, process=process: ended.append(process)  # noqa: E731
        limit = grace.GraceLimit(0.1, process=process, newest=lambda: "none", end=end)
        limit.start()
    time.sleep(0.1 + grace.LAST_SECONDS + 0.3)
    assert ended == [1, 0]


def test_the_newest_checkpoint_is_named_by_tier():
    def text(shared, local):
        checkpoints = types.SimpleNamespace(latest_step=lambda: shared)
        tier = types.SimpleNamespace(newest=lambda: local)
        return grace.newest_text(checkpoints, tier, "/dev/shm/x")

    assert text(None, None) == "none"
    assert text(40, None) == text(40, 38) == "that of step 40"
    assert text(40, 58) == "that of step 58 on the hosts' own disks (/dev/shm/x)"
    assert text(None, 2).startswith("that of step 2 on")
