"""Hangs end, with the stacks of all threads and the phase that took too long."""

import subprocess
import sys
import textwrap
import threading

import pytest

from llmx.runtime import exits
from llmx.runtime.agreement import Peers
from llmx.runtime.progress import Progress
from llmx.runtime.watchdog import Watchdog, WatchdogConfig

WATCHED = """
    import sys, time, ctypes
    from llmx.runtime.agreement import Peers
    from llmx.runtime.progress import Progress
    from llmx.runtime.watchdog import Watchdog, WatchdogConfig
    def stuck():
        {how}
    progress = Progress()
    config = WatchdogConfig(step_factor=4, step_seconds=0.4, evaluation_seconds=0.4, save_seconds=2)
    with Watchdog(config, progress, Peers()) as watchdog:
        progress.enter("step")
        for step in range(6):
            time.sleep(0.15)
            progress.step_done(step + 1)
        with progress("save"):
            time.sleep(1)  # has a limit of its own
        print("steps are enough", flush=True)
        with progress({phase!r}):
            stuck()
"""


def watch(how: str, phase: str = "data wait") -> subprocess.CompletedProcess:
    code = textwrap.dedent(WATCHED.format(how=how, phase=phase))
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        ("data wait", ["no step for", "watchdog.step_factor allows 0.6"]),
        ("evaluation", ["phase 'evaluation' for", "watchdog.evaluation_seconds allows 0.4"]),
    ],
)
def test_a_hang_ends_with_the_stacks_of_all_threads(phase, words):
    done = watch("time.sleep(60)", phase)
    assert done.returncode == exits.AGAIN, done.stderr
    assert done.stdout == "steps are enough\n"
    assert "in stuck" in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert all(word in last for word in [*words, "start the run again"]), last


def test_a_hang_that_holds_the_interpreter_ends_too():
    done = watch("ctypes.PyDLL(None).sleep(60)")
    assert done.returncode == 1 and "in stuck" in done.stderr
    assert done.stdout == "steps are enough\n"


BACKEND = """
    import sys, time
    from llmx import train
    from llmx.runtime import launch
    launch.device_count = lambda config: time.sleep(60)
    options = ["--config.watchdog.backend_seconds=0.5", "--config.watchdog.step_seconds=1"]
    sys.exit(train.main(["--config", "configs/quickstart.py", "--workdir", sys.argv[1], *options]))
"""


def test_devices_that_do_not_start_end_the_run(tmp_path):
    """As where another process has met this one, and then ends before its backend starts."""
    command = [sys.executable, "-c", textwrap.dedent(BACKEND), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == exits.AGAIN, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert "phase 'backend' for" in last and "watchdog.backend_seconds allows 0.5" in last


def test_limits_follow_the_measured_steps():
    now = [0.0]
    progress = Progress(clock=lambda: now[0])
    config = WatchdogConfig(step_factor=10, step_seconds=20, first_step_seconds=300)
    watchdog = Watchdog(config, progress, Peers())
    progress.enter("step")
    assert watchdog.limit("step") == (300, "watchdog.first_step_seconds")
    fixed = Watchdog(config, progress, Peers(), step_seconds=7)
    assert fixed.limit("step") == (60, "launch.watchdog_seconds")  # others may still compile
    for step in range(1, 6):
        now[0] += 3.0 if step != 3 else 1000.0
        if step == 3:
            with progress("evaluation"):
                now[0] += 50  # no part of a step's time
        progress.step_done(step)
    assert progress.median_step() == 3.0
    assert watchdog.limit("data wait") == (30, "watchdog.step_factor")
    assert watchdog.limit("save") == (config.save_seconds, "watchdog.save_seconds")
    assert watchdog.limit("restore") == (config.restore_seconds, "watchdog.restore_seconds")
    assert fixed.limit("step") == (7, "launch.watchdog_seconds")
    assert progress.idle() == ("step", 0.0)
    now[0] += 2
    with progress("data wait"):
        now[0] += 1
        assert progress.idle() == ("data wait", 3.0)
    assert progress.seconds["data wait"] == 1.0 and progress.seconds["evaluation"] == 50.0


def test_a_factor_of_zero_is_off():
    threads = threading.active_count()
    with Watchdog(WatchdogConfig(step_factor=0), Progress(), Peers()):
        assert threading.active_count() == threads
