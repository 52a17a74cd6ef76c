"""The supervisor, with plain Python programs in the place of a trainer."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from llmx.runtime import exits, launch, supervisor

ROOT = pathlib.Path(__file__).parents[2]


def command(code: str, *arguments, flags=("--backoff", "0.02")) -> list[str]:
    child = [sys.executable, "-u", "-c", textwrap.dedent(code), *map(str, arguments)]
    return [sys.executable, "-m", "llmx.runtime.supervisor", *flags, "--", *child]


def run(code: str, *arguments, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(code, *arguments, **options), cwd=ROOT, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip


def start(code: str, *arguments, **options) -> tuple[subprocess.Popen, str]:
    """The supervisor, and the first line that its child wrote."""
    process = subprocess.Popen(
        command(code, *arguments, **options), cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    return process, process.stdout.readline()


def last_line(done) -> str:
    return done.stderr.splitlines()[-1]


COUNTED = """
    import os, signal, sys
    count = int(os.environ["LLMX_RESTART_COUNT"])
    print("start", count)
    plan = sys.argv[1:]
    end = int(plan[count])
    if end < 0:
        os.kill(os.getpid(), -end)
    sys.exit(end)
"""


def test_crashes_signals_and_75_are_started_again():
    done = run(COUNTED, 1, -9, 75, 134, 143, 0)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [word for n in range(6) for word in ("start", str(n))]
    assert "signal SIGKILL" in done.stderr and "restart 5 of 10" in done.stderr
    assert done.stderr.count("\n") == 5, "it adds nothing to what the trainer says at its end"


@pytest.mark.parametrize("code", sorted(supervisor.FINAL))
def test_final_codes(code):
    done = run(COUNTED, code, 0)
    assert done.returncode == code and done.stdout.split() == ["start", "0"]
    assert done.stderr == ""
    if code == exits.UNSAVED:
        assert run(COUNTED, code, 0, flags=("--restart-unsaved", "--backoff", "0")).returncode == 0


def test_the_limit_counts_restarts_without_a_newer_checkpoint(tmp_path):
    done = run(COUNTED, *[1] * 9, flags=("--max-restarts", "2", "--backoff", "0"))
    assert done.returncode == 1 and done.stdout.count("start") == 3
    assert "given up after 2 restarts" in last_line(done) and "start again" in last_line(done)

    saves = """
        import os, sys
        count = int(os.environ["LLMX_RESTART_COUNT"])
        os.makedirs(f"{sys.argv[1].partition('=')[2]}/checkpoints/{count // 2}", exist_ok=True)
        sys.exit(0 if count == 7 else 1)
    """
    done = run(saves, f"--workdir={tmp_path}", flags=("--max-restarts", "2", "--backoff", "0"))
    assert done.returncode == 0 and done.stderr.count("restart 1 of 2") == 4, done.stderr


def test_a_start_from_a_later_step_is_progress(tmp_path):
    """Of the local tier, for example: the checkpoints in the work directory may be old."""
    code = """
        import json, os, pathlib, sys
        step = 10 * min(int(os.environ["LLMX_RESTART_COUNT"]), 4)
        with open(sys.argv[2] + "/history.jsonl", "a") as file:
            print(json.dumps({"kind": "start", "resumed_from": step}), file=file)
            print(json.dumps({"kind": "rollback"}), "torn", file=file)
        sys.exit(1)
    """
    flags = ("--backoff", "0.02", "--max-restarts", "2")
    done = run(code, "--workdir", tmp_path, flags=flags)
    assert done.returncode == 1 and "given up after 2 restarts" in last_line(done)
    starts = (tmp_path / "history.jsonl").read_text().count("start")
    assert starts == 7, "steps 0, 10, 20, 30 and 40, and then two without progress"


def test_delays_double_to_a_limit_and_differ():
    delays = [supervisor.delay_before(failures, 2.0) for failures in range(40)]
    for failures, delay in enumerate(delays):
        longest = min(2.0 * 2**failures, supervisor.LONGEST_DELAY)
        assert longest / 2 <= delay <= longest
    assert len(set(delays[20:])) > 1


POLITE = """
    import signal, sys, time
    def stop(number, frame):
        print("told", number)
        time.sleep(0.2)
        sys.exit(75)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    print("ready")
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_once_and_the_code_is_the_childs(number):
    process, _ = start(POLITE)
    for _ in range(3):  # schedulers repeat themselves
        process.send_signal(number)
    said, notes = process.communicate(timeout=30)
    assert process.returncode == 75 and said.split() == ["told", str(int(number))]
    assert notes == ""


DEAF = """
    import os, signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    print(os.getpid(), worker.pid)
    time.sleep(60)
"""


def gone(pids: str, seconds: float = 10) -> bool:
    """Whether all these processes end."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if all(state(pid) in "ZX" for pid in pids.split()):
            return True
        time.sleep(0.05)
    return False


def state(pid: str) -> str:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def test_a_deaf_trainer_is_killed_with_its_workers():
    process, pids = start(DEAF, flags=("--grace", "0.3"))
    process.terminate()
    assert process.wait(20) == 128 + signal.SIGKILL and gone(pids)
    assert "--grace 0 s: killed" in process.stderr.read()

    process, pids = start(DEAF)
    process.terminate()
    time.sleep(supervisor.ONE_SIGNAL_SECONDS + 0.2)
    process.terminate()
    assert process.wait(20) == 128 + signal.SIGKILL and gone(pids)
    assert "second SIGTERM" in process.stderr.read()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's end")
def test_the_trainer_dies_with_its_supervisor():
    process, pids = start(DEAF)
    process.kill()
    process.wait()
    assert gone(pids.split()[0])
    os.kill(int(pids.split()[1]), signal.SIGKILL)


def test_a_trainer_that_is_stopped_for_long_is_started_again():
    code = """
        import os, signal
        if os.environ["LLMX_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGSTOP)
    """
    done = run(code, flags=("--backoff", "0", "--stopped-limit", "0.5"))
    assert done.returncode == 0 and "SIGSTOP" in done.stderr and "restart 1 of" in done.stderr


def test_a_signal_between_two_starts_ends_it():
    process, _ = start("print('ended'); exit(1)", flags=("--backoff", "60"))
    while "restart 1" not in process.stderr.readline():
        pass
    process.terminate()
    assert process.wait(10) == exits.AGAIN


def test_a_command_that_does_not_exist():
    inner = [sys.executable, "-m", "llmx.runtime.supervisor", "--", "/no/such/program"]
    done = subprocess.run(inner, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "/no/such/program" in done.stderr
    assert "Traceback" not in done.stderr


def test_restart_count_of_every_starter():
    assert launch.restart_count({}) == 0
    assert launch.restart_count({"SLURM_RESTART_COUNT": "2"}) == 2
    assert launch.restart_count({"JOBSET_RESTART_ATTEMPT": "3"}) == 3
    assert launch.restart_count({"LLMX_RESTART_COUNT": "4", "SLURM_RESTART_COUNT": "2"}) == 4
    assert launch.restart_count({"SLURM_RESTART_COUNT": "x"}) == 0


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--workdir", "/w"], "/w"), (["--workdir=/w"], "/w"), (["--config.workdir=w"], "w"),
        (["--workdir", "gs://b/w"], None), (["--config", "c.py"], None), (["--workdir"], None),
    ],
)  # fmt: skip
def test_the_work_directory_of_a_command(words, found):
    assert supervisor.workdir_of(["python", *words]) == (pathlib.Path(found) if found else None)
