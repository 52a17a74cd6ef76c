"""Starts a trainer again when it ends and should not have; one supervisor per host.

    python -m llmx.runtime.supervisor [--max-restarts 10] [--backoff 5] -- python -m llmx.train ...

The trainer continues from its newest good checkpoint by itself. It is started again after a crash,
a signal and exit code 75 (`llmx.runtime.exits`), with a delay that doubles each time. Codes 0, 2,
3, 74 and 130 are final, and the last line is then the trainer's own. The limit counts restarts
since the last progress: a newer checkpoint in the work directory that the command names with
--workdir, or a start from a later step than the start before (of the local tier); or where that is
none or not a local folder, a trainer that ran for ten minutes. With
several hosts all trainers of a run end together, and each is started again by its own supervisor
with the same coordinator address.

SIGTERM and Ctrl-C are passed on, and then the supervisor ends with the trainer's code. The second
one, or --grace seconds, kills the trainer. The trainer also dies if the supervisor is killed
(Linux). This file must not import JAX: it stays small while the trainer runs.
"""

import argparse
import contextlib
import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from llmx.runtime import exits, printable

FINAL = (exits.DONE, exits.REFUSED, exits.STOPPED, exits.UNSAVED, exits.INTERRUPTED)
STEADY_SECONDS = 600.0  # without a work directory to look at, this long is progress
LONGEST_DELAY = 300.0
POLL_SECONDS = 0.1
ONE_SIGNAL_SECONDS = 1.0  # schedulers may send the same signal twice at a time
PR_SET_PDEATHSIG = 1
HISTORY_BYTES = 2**20  # of the end of history.jsonl


def main(argv: list[str] | None = None) -> int:
    """Runs the command until it ends for good; returns its exit code."""
    return Supervisor(parse(argv)).run()


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options and, after `--`, the command."""
    parser = printable.Parser(
        prog="python -m llmx.runtime.supervisor", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--max-restarts", type=int, default=10, help="without progress; 0 = never (default 10)")
    add("--backoff", type=float, default=5.0, help="seconds before the first restart (default 5)")
    add("--grace", type=float, default=120.0,
        help="seconds for the trainer to save after a signal (default 120)")  # fmt: skip
    stopped = "seconds until a trainer that SIGSTOP stopped is killed; 0 = never (default 30)"
    add("--stopped-limit", type=float, default=30.0, help=stopped)
    add("--restart-unsaved", action="store_true", help="restart after exit code 74 too")
    add("command", nargs="+", metavar="-- command", help="the trainer")
    options = parser.parse_args(argv)
    for name in ("max_restarts", "backoff", "grace", "stopped_limit"):
        if not getattr(options, name) >= 0:
            flag = "--" + name.replace("_", "-")
            parser.error(f"{flag} {getattr(options, name)}: use at least 0")
    return options


def restart_count(environment: Mapping[str, str] | None = None) -> int:
    """How often this job was started again by a supervisor, SLURM or a JobSet; 0 = never."""
    environment = os.environ if environment is None else environment
    for name in ("LLMX_RESTART_COUNT", "SLURM_RESTART_COUNT", "JOBSET_RESTART_ATTEMPT"):
        if environment.get(name, "").isdecimal():
            return int(environment[name])
    return 0


class Supervisor:
    """One trainer, started again and again."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._workdir = workdir_of(options.command)
        self._signals: list[int] = []  # received, in order
        self._last_signal = 0.0
        self._process: subprocess.Popen | None = None

    def run(self) -> int:
        """Until the trainer ends for good, or the restarts are used up."""
        options, before = self._options, restart_count()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._receive)
        restarts = failures = 0
        while True:
            before_it, begun = reached(self._workdir), time.monotonic()
            code = self._run_once(before + restarts)
            seconds = time.monotonic() - begun
            ended = f"the trainer ended with {code_text(code)} after {seconds:.0f} s"
            if self._signals or (code in FINAL and not self._restarts_unsaved(code)):
                if code < 0:
                    note(f"{ended}: start again to continue from the newest checkpoint")
                return shell_code(code)
            if self._progressed(before_it, seconds):
                failures = 0
            if failures >= options.max_restarts:
                note(
                    f"{ended}: given up after {failures} restarts without a newer checkpoint; "
                    "fix what its last lines name, then start again to continue"
                )
                return shell_code(code)
            delay = delay_before(failures, options.backoff)
            restarts, failures = restarts + 1, failures + 1
            note(f"{ended}: restart {failures} of {options.max_restarts} in {delay:.1f} s")
            if not self._pause(delay):
                note(f"{signal.Signals(self._signals[0]).name} between two starts: ended")
                interrupted = self._signals[0] == signal.SIGINT
                return exits.INTERRUPTED if interrupted else exits.AGAIN

    def _run_once(self, restarts: int) -> int:
        """Starts the trainer and waits for its end; returns its code, negative for a signal."""
        environment = os.environ | {"LLMX_RESTART_COUNT": str(restarts)}
        try:
            self._process = process = subprocess.Popen(
                self._options.command, env=environment, start_new_session=True,
                preexec_fn=die_with(os.getpid()),  # noqa: PLW1509 (this process has one thread)
            )  # fmt: skip
        except OSError as error:
            note(f"{self._options.command[0]} cannot be started: {error}")
            return exits.REFUSED
        if self._signals:  # received while it started
            self._send(self._signals[0])
        deadline, stopped = None, 0
        while True:
            try:
                code = process.wait(POLL_SECONDS)
                break
            except subprocess.TimeoutExpired:
                pass
            if self._signals and deadline is None:
                deadline = time.monotonic() + self._options.grace
            if deadline is not None and time.monotonic() > deadline:
                note(f"the trainer did not end within --grace {self._options.grace:.0f} s: killed")
                self._kill()
            # Polls are counted, not seconds: where all processes are suspended none is missed.
            stopped = stopped + 1 if is_stopped(process.pid) else 0
            limit = self._options.stopped_limit
            if 0 < limit < stopped * POLL_SECONDS:
                note(f"the trainer is stopped (SIGSTOP) for more than {limit:.0f} s: killed")
                self._kill()
        self._kill()  # what it left: workers of its loader, for example
        return code

    def _receive(self, number: int, _frame: object) -> None:
        """Passes the first signal on; the second one kills."""
        again = time.monotonic() - self._last_signal > ONE_SIGNAL_SECONDS
        self._last_signal = time.monotonic()
        if self._signals and again:
            note(f"second {signal.Signals(number).name}: the trainer is killed")
            self._kill()
        elif not self._signals:
            self._signals.append(number)
            self._send(number)

    def _send(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _pause(self, seconds: float) -> bool:
        """Waits; False if a signal came."""
        end = time.monotonic() + seconds
        while not self._signals and time.monotonic() < end:
            time.sleep(min(POLL_SECONDS, max(end - time.monotonic(), 0.0)))
        return not self._signals

    def _restarts_unsaved(self, code: int) -> bool:
        return code == exits.UNSAVED and self._options.restart_unsaved

    def _progressed(self, before_it: tuple[int, int], seconds: float) -> bool:
        if self._workdir is None:
            return seconds >= STEADY_SECONDS
        pairs = zip(reached(self._workdir), before_it, strict=True)
        return any(now > before for now, before in pairs)


def workdir_of(command: list[str]) -> Path | None:
    """The local work directory that the command names."""
    found = None
    for index, word in enumerate(command):
        for flag in ("--workdir", "--config.workdir"):
            if word == flag and index + 1 < len(command):
                found = command[index + 1]
            elif word.startswith(f"{flag}="):
                found = word.partition("=")[2]
    return None if found is None or "://" in found else Path(found)


def reached(workdir: Path | None) -> tuple[int, int]:
    """The step of the newest checkpoint, and the one that the last start began at; -1 = unknown."""
    return (-1, -1) if workdir is None else (newest_step(workdir), last_start(workdir))


def newest_step(workdir: Path) -> int:
    """The newest committed checkpoint; -1 if there is none or it cannot be listed."""
    with contextlib.suppress(OSError):
        names = os.listdir(workdir / "checkpoints")
        return max((int(name) for name in names if name.isdecimal()), default=-1)
    return -1


def last_start(workdir: Path) -> int:
    """The step at which the last start began, by history.jsonl (`llmx.config.history`); or -1."""
    with contextlib.suppress(OSError), open(workdir / "history.jsonl", "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - HISTORY_BYTES))
        for line in reversed(file.read().splitlines()):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                return int(json.loads(line)["resumed_from"])
    return -1


def delay_before(failures: int, backoff: float) -> float:
    """Seconds before the restart after `failures` earlier ones: doubled each time, and a random
    part of it less, so that hosts do not all return to their storage at once."""
    return min(backoff * 2.0 ** min(failures, 30), LONGEST_DELAY) * random.uniform(0.5, 1.0)


def code_text(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    memory = " (by hand, or out of memory: see the kernel's log)" if code == -signal.SIGKILL else ""
    return f"signal {signal.Signals(-code).name}{memory}"


def shell_code(code: int) -> int:
    return 128 - code if code < 0 else code


def is_stopped(pid: int) -> bool:
    """Whether the process was suspended with SIGSTOP (Linux)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def die_with(parent: int):
    """What the new process runs first: it is killed when `parent` ends (Linux)."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl

    def before() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before
            os._exit(1)

    return before


def note(text: str) -> None:
    printable.to_stderr(f"supervisor: {text}")


if __name__ == "__main__":
    sys.exit(main())
