"""Freed memory goes back to the system."""

import ctypes
import os
import subprocess
import sys

import pytest

glibc = pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"),
    reason="other C libraries keep no heap per thread",
)

CODE = """
import threading
from llmx.runtime import host_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

if {limited}:
    host_memory.limit_arenas()

kept, ready = [], threading.Barrier(16)

def work():
    ready.wait()
    blocks = [b"x" * (90_000 + k) for k in range(100)]
    ready.wait()
    kept.append(blocks[-1])  # the last page of a heap stays in use

threads = [threading.Thread(target=work) for _ in range(16)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
before = resident()
host_memory.release()
freed = before - resident()
starts = [int(line.partition("-")[0], 16) for line in open("/proc/self/maps") if " rw-p " in line]
print(freed, sum(start % 2**26 == 0 for start in starts))  # heaps of threads are aligned
"""


def run(limited: bool) -> tuple[int, int]:
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(limited=limited)],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    freed, heaps = done.stdout.split()
    return int(freed), int(heaps)


@glibc
def test_freed_memory_is_returned_and_there_is_a_heap_per_cpu():
    freed, heaps = run(limited=False)
    assert freed > 50e6  # of the 144 MB that the threads had
    cpus, (_, limited) = os.cpu_count() or 1, run(limited=True)
    assert limited <= cpus and (limited < heaps or cpus >= 16)
