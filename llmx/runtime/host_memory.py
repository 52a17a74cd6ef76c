"""Memory of the host that a process has freed and its C library keeps.

glibc gives threads that allocate heaps of their own ("arenas"), up to eight per CPU, and returns
their freed pages only when asked. A checkpoint is written by many short-lived threads: without this
a long run grows a little with every save. Other C libraries do without.

Source: malloc_trim(3) and mallopt(3), man7.org.
"""

import ctypes
import os
from collections.abc import Callable

_M_ARENA_MAX = -8  # in glibc's malloc.h


def limit_arenas() -> None:
    """At most one heap per CPU; before threads are started. MALLOC_ARENA_MAX goes before it."""
    change = _function("mallopt")
    if change is not None and "MALLOC_ARENA_MAX" not in os.environ:
        change(_M_ARENA_MAX, os.cpu_count() or 1)


def release() -> None:
    """Returns freed pages to the system; takes milliseconds per GB."""
    trim = _function("malloc_trim")
    if trim is not None:
        trim(0)


def _function(name: str) -> Callable[..., int] | None:
    """A function of glibc; None in a process with another C library."""
    library = ctypes.CDLL(None)
    return getattr(library, name, None) if hasattr(library, "gnu_get_libc_version") else None
