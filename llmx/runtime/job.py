"""One process of a run: what it is doing, who the others are, and how it ends.

with Job(log=launch.log) as job:
    job.join(config.launch)
    with job.progress("compile"):
        ...
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable

from llmx.runtime import agreement, bounds, exits, fatal, launch, ownership, printable, stragglers
from llmx.runtime.agreement import Peers
from llmx.runtime.auxiliary import Auxiliary
from llmx.runtime.caller import Caller
from llmx.runtime.launch import LaunchConfig
from llmx.runtime.progress import Progress
from llmx.runtime.signals import StopSignal
from llmx.runtime.watchdog import Watchdog, WatchdogConfig

ATTEMPT_SECONDS = 10.0  # until processes that wait for one that failed are ended


class Job(contextlib.ExitStack):
    """Progress, signals, other processes and the watchdog of this process.

    A context manager: enter it in the main thread before anything slow.
    """

    def __init__(self, *, log: Callable[[str], None], caller: Caller | None = None):
        """caller: who asks for the run; None: a command."""
        super().__init__()
        self.caller = caller or Caller()
        self.progress, self.peers = Progress(), Peers()
        self.stop = self.caller.stop = StopSignal(
            log=log, progress=self.progress, peers=self.peers, raises=self.caller.is_program
        )
        self._log, self._joined, self._refusal = log, False, ""
        self._lease: ownership.Lease | None = None  # in process 0 only
        self._owns = False  # whether all processes have called `own`

    def __enter__(self) -> "Job":
        super().__enter__()
        self.callback(self._show_refusal)  # the last line: behind what the others say at their end
        self.enter_context(self.stop)
        return self

    def join(self, config: LaunchConfig) -> None:
        """Sets up JAX and meets the other processes, if there are any; see `launch.start`.

        Raises ValueError for a bad config or environment.
        """
        self._joined = True
        fatal.explain(self._fail)

        def fail(text: str) -> None:
            printable.try_to_stderr(text)
            os._exit(exits.AGAIN)

        agreement.explain_abort(lambda: launch.join_problem(config), fail)
        launch.start(config)
        store, index, count = launch.store()
        if store is None:
            return
        self.peers = Peers(
            agreement.Store(store), index, count, heartbeat=self.progress.snapshot,
            silence=config.heartbeat_seconds,
        )  # fmt: skip
        self.callback(self.peers.close)
        self.stop.join(self.peers)
        self.peers.start()

    def watch(self, config: WatchdogConfig, launch_config: LaunchConfig) -> None:
        """Starts the watchdog; the first process tells of stragglers.

        Not where the section is wrong: the check of the whole config refuses it.
        """
        if bounds.problems(config, "watchdog."):
            return
        seconds = launch_config.watchdog_seconds
        watchdog = Watchdog(config, self.progress, self.peers, step_seconds=seconds)
        self.enter_context(watchdog)
        if self.peers.many and self.peers.index == 0:
            watch = stragglers.Watch(log=launch.log)
            self.peers.watchers.append(lambda: watch.look(self.peers.heartbeats()))

    def own(self, workdir: str) -> None:
        """Takes the work directory for this run, until its end; see `ownership`.

        Every process must call it. Raises ValueError if a living run has the directory, or if it
        cannot be written. A run that has taken one already keeps that.
        """
        if self._owns:
            return
        self._owns = True
        once = threading.Lock()  # of the lease's thread and the main one the second only waits

        def lost(error: ownership.Lost) -> None:
            with once:
                self._fail(error.code, str(error))

        def lost_meanwhile() -> tuple[int, str] | None:
            lost = self._lease.look()
            return lost and (lost.code, str(lost))

        if self.peers.index == 0:
            self._lease = ownership.take(workdir, log=self._log, on_lost=lost)
            # A process that was suspended may notice how long it was before it reads the file.
            self.peers.causes.append(lost_meanwhile)
            self.callback(self._lease.release)
            self.peers.endings.append(self._lease.release)
        self.peers.barrier("the work directory is taken")

    def may_write(self) -> None:
        """Ends the run if the work directory is no longer its own; reads a small file."""
        if self._lease is not None:
            self._lease.check()

    def still_owns(self) -> None:
        """As `may_write`, but reads nothing as long as the lease was renewed lately."""
        if self._lease is not None:
            self._lease.poll()

    def refuse(self, error: BaseException | str, code: int = exits.REFUSED) -> int:
        """Prints why the run ends, as its last line, and tells the other processes; returns the
        exit code.

        A program that asked for the run gets the error instead, see `caller`.
        With many processes it does not return: this process ends here, as the others do.
        """
        text, self.caller.refused = str(error), error
        if self.peers.many:
            self._fail(code, text)
        if not self.caller.is_program:
            self._refusal = text
        return code

    def _show_refusal(self) -> None:
        if self._refusal:
            printable.try_to_stderr(self._refusal)

    def _fail(self, code: int, text: str) -> None:
        """Ends all processes of the run now, with `text` as the last line."""
        self.peers.refuse(text, code)
        self.peers.end(code, text)

    def attempt(self, what: str, code: int, function: Callable, *args: object) -> None:
        """Calls what the saved run can do without; every process must do so.

        An error becomes a warning. Where it did not come to all processes, the others may wait for
        this one in a collective: then all end here, with the exit code `code` of the run.
        """
        told: list[str] = []
        done = Auxiliary(what, log=told.append)(function, *args, last=True)
        folder = f"attempt/{what}"
        self.peers.publish(f"{folder}/{self.peers.index}", "")
        if done:
            return
        deadline = time.monotonic() + ATTEMPT_SECONDS
        while self.peers.many and len(self.peers.read(folder)) < self.peers.count:
            if time.monotonic() > deadline:
                self.refuse(f"{told[0]}; everything is saved, and the run is done", code)
            time.sleep(0.1)
        launch.log(told[0])

    def join_by_environment(self) -> None:
        """`join` where there is no config, if the environment names other processes: to tell them
        of a refusal."""
        with contextlib.suppress(Exception):
            if launch.find_cluster(config := LaunchConfig(), os.environ):
                self.join(config)

    def tell_crash(self, kind: object, error: BaseException | None, trace: object) -> None:
        """For `ExitStack.push`: an error that leaves the stack ends all processes of the run.

        With many processes it does not return then.
        """
        if isinstance(error, Exception):
            if not self._joined:  # the others would wait for this one
                self.join_by_environment()
            self.may_write()  # where the work directory is gone, that is the cause
            self.peers.crashed(error)
