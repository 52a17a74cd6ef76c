"""Signals that end a process inside native code: what is said of them before it ends.

A Python handler runs between two instructions of Python, which is too late for them. Those here are
called where the signal arrives.
"""

import ctypes
import faulthandler
import os
import pathlib
import signal
import stat
import sys
from collections.abc import Callable
from typing import Any

from llmx.runtime import exits

MAPS = "/proc/self/maps"
MOST_NAMED = 3  # files that a message names

_handlers: list[Any] = []  # C callbacks must outlive their registration


def on_signal(number: int, call: Callable[[], None]) -> None:
    """From now on a signal calls a function inside the code that it interrupts.

    The last registration counts.
    """
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: call())
    _handlers.append(handler)
    ctypes.CDLL(None).signal(number, handler)


def explain(end: Callable[[int, str], None]) -> None:
    """From now on a fatal signal prints the stacks of all threads, and SIGBUS calls
    `end(exit code, cause)` then. In a process without a stderr nothing changes."""
    if sys.__stderr__ is None:
        return
    owner = os.getpid()

    def unread() -> None:
        if os.getpid() != owner:  # a forked worker
            os._exit(128 + signal.SIGBUS)
        end(*cause_of_sigbus())
        os._exit(exits.CRASHED)

    # faulthandler calls the handler that was there before it when it has printed the stacks.
    faulthandler.disable()
    on_signal(signal.SIGBUS, unread)
    faulthandler.enable(sys.__stderr__)


def cause_of_sigbus() -> tuple[int, str]:
    """The exit code of a process that could not read a mapped file, and the cause with a remedy."""
    cut, mapped = _mapped_files()
    if cut:
        return exits.REFUSED, (
            f"{_listed(cut)}: shorter than when this process mapped it, so that a read of it "
            "failed (SIGBUS): something has cut or written it meanwhile. Restore it, or delete its "
            "folder and have it written anew; then start the run again"
        )
    of = f": {_listed(mapped)}" if mapped else ""
    return exits.CRASHED, (
        f"a read of a mapped file failed (SIGBUS){of}. Its disk or network file system failed, or "
        "memory did: check them, and start the run again"
    )


def _mapped_files() -> tuple[list[str], list[str]]:
    """The files that this process has mapped, as `numpy.memmap` and safetensors do, and that are
    shorter by now; and all of them."""
    cut, mapped = set(), set()
    try:
        lines = pathlib.Path(MAPS).read_text(errors="replace").splitlines()
    except OSError:  # not Linux
        return [], []
    for line in lines:
        addresses, modes, offset, _, _, *path = line.split(maxsplit=5)
        # Programs are mapped privately, and beyond their ends.
        if not path or not path[0].startswith("/") or not modes.endswith("s"):
            continue
        try:
            status = os.stat(path[0])
        except OSError:
            continue
        if not stat.S_ISREG(status.st_mode):
            continue
        begin, end = (int(number, 16) for number in addresses.split("-"))
        page = os.sysconf("SC_PAGE_SIZE")
        if status.st_size + page <= int(offset, 16) + end - begin:
            cut.add(path[0])
        mapped.add(path[0])
    return sorted(cut), sorted(mapped)


def _listed(paths: list[str]) -> str:
    more = len(paths) - MOST_NAMED
    return ", ".join(paths[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
