"""Runs a command as several processes of one run on this machine.

    python scripts/local_cluster.py -n 4 -- python -m llmx.train --config configs/quickstart.py

Each process gets LLMX_COORDINATOR, LLMX_NUM_PROCESSES and LLMX_PROCESS_ID, which
`llmx.runtime.launch.start` reads. Process 0 writes to this terminal directly; lines of the others
begin with [1], [2], ... Ctrl-C and SIGTERM are forwarded. When one process fails, the others are
killed after a few seconds. Exit code: that of the first failure (128 + signal if it was killed),
else 0.

With --supervise each process has a supervisor (`llmx.runtime.supervisor`) that starts it again, as
on a cluster of hosts, and the others are killed a minute after the first supervisor has ended.
--supervise="--max-restarts 3 --backoff 2" gives the supervisors flags.
"""

import argparse
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time

GRACE_SECONDS = 5
SUPERVISED_GRACE_SECONDS = 60
# One machine: no storage to spare, and soon clear that a process is stopped for good.
SUPERVISOR_FLAGS = "--backoff 1 --stopped-limit 20"


def main(argv: list[str] | None = None) -> int:
    """Starts the processes, forwards signals, and waits for all."""
    options = parse(argv)
    processes: list[subprocess.Popen] = []

    def forward(number: int, frame: object) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    signal.signal(signal.SIGINT, forward)
    signal.signal(signal.SIGTERM, forward)
    port = options.port or find_free_port()
    for rank in range(options.num_processes):
        processes.append(start(options, rank, port))
    readers = [
        threading.Thread(target=copy_lines, args=(process, rank))
        for rank, process in enumerate(processes)
        if process.stdout is not None
    ]
    for reader in readers:
        reader.start()
    code = wait(processes, supervised=options.supervise is not None)
    for reader in readers:
        reader.join()
    return code


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options and, after `--`, the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", "--num-processes", type=int, required=True, help="how many processes")
    parser.add_argument(
        "--devices-per-process", type=int, default=1, help="fake CPU devices in each (default 1)"
    )
    parser.add_argument(
        "--supervise", nargs="?", const=SUPERVISOR_FLAGS, metavar="FLAGS",
        help=f"start processes that end again; flags of the supervisor, {SUPERVISOR_FLAGS!r}",
    )  # fmt: skip
    parser.add_argument("--port", type=int, default=0, help="of the coordinator; 0 = a free one")
    parser.add_argument("command", nargs="+", metavar="-- command", help="what each process runs")
    options = parser.parse_args(argv)
    if options.num_processes < 1:
        parser.error(f"-n {options.num_processes}: use at least 1")
    if options.devices_per_process < 1:
        parser.error(f"--devices-per-process {options.devices_per_process}: use at least 1")
    return options


def find_free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(options: argparse.Namespace, rank: int, port: int) -> subprocess.Popen:
    """Process `rank`, in its own session: the terminal's Ctrl-C reaches it only through `main`."""
    environment = {
        "JAX_PLATFORMS": "cpu",
        **os.environ,
        "JAX_NUM_CPU_DEVICES": str(options.devices_per_process),
        "LLMX_COORDINATOR": f"127.0.0.1:{port}",
        "LLMX_NUM_PROCESSES": str(options.num_processes),
        "LLMX_PROCESS_ID": str(rank),
    }
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    if rank == 0:
        # It may draw on a terminal; into a file or pipe, whole lines are copied.
        output = {} if sys.stdout.isatty() else {"stdout": subprocess.PIPE}
    command = options.command
    if options.supervise is not None:
        flags = shlex.split(options.supervise)
        command = [sys.executable, "-m", "llmx.runtime.supervisor", *flags, "--", *command]
    return subprocess.Popen(command, env=environment, start_new_session=True, **output)


def copy_lines(process: subprocess.Popen, rank: int) -> None:
    """Copies the lines of one process, prefixed with its rank unless that is 0."""
    prefix = f"[{rank}] ".encode() if rank else b""
    for line in process.stdout:
        sys.stdout.buffer.write(prefix + line)
        sys.stdout.buffer.flush()


def wait(processes: list[subprocess.Popen], *, supervised: bool) -> int:
    """Waits until all have ended, and kills the others some time after the first failure, or if
    they are supervised after the first end.

    Returns the exit code of the first that failed, else 0.
    """
    first_failure, deadline = 0, None
    while None in (codes := [process.poll() for process in processes]):
        first_failure = first_failure or next((code for code in codes if code), 0)
        ended = any(code is not None for code in codes)
        if deadline is None and (first_failure or (supervised and ended)):
            grace = SUPERVISED_GRACE_SECONDS if supervised else GRACE_SECONDS
            deadline = time.monotonic() + grace
        if deadline is not None and time.monotonic() > deadline:
            for process in processes:
                process.kill()
        time.sleep(0.05)
    code = first_failure or next((code for code in codes if code), 0)
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main())
