"""Trains on the hosts of a Ray cluster: one actor on each host, with a supervisor and its trainer.

    pip install -e '.[ray,cuda]'                               # on every host
    python scripts/cluster/ray_train.py --hosts 4 --gpus 8 -- \\
        --config configs/llama3_8b.py --workdir /shared/runs/llama3_8b

What follows `--` are the arguments of llmx.train. It runs in --directory on every host, so configs
are there, and the work directory is on storage that all hosts share. RAY_ADDRESS names the cluster;
without it Ray starts one on this machine. When an actor is lost with its host, the others save what
they can, and all start again on hosts that are left, or when others have joined. Ctrl-C and SIGTERM
are passed on to the trainers: they save and end.

Exit code: that of the trainers, as `llmx.runtime.exits` has them.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

from llmx.runtime import exits, supervisor

FINAL = supervisor.FINAL


def main(argv: list[str] | None = None) -> int:
    """Trains until the trainers end for good or the restarts are used up."""
    options = parse(argv)
    try:
        import ray
    except ImportError:
        note("ray is not installed: pip install -e '.[ray]'")
        return exits.REFUSED
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    ray.init(log_to_driver=True, include_dashboard=False)
    try:
        for attempt in range(options.max_restarts + 1):
            code = train_once(options, attempt, stop)
            if stop.is_set() or code in FINAL:
                return code
            note(f"the trainers ended with code {code}: restart {attempt + 1}")
            stop.wait(options.backoff)
        note(f"given up after {options.max_restarts} restarts: start again to continue")
        return code
    finally:
        ray.shutdown()


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options and, after `--`, the arguments of llmx.train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--hosts", type=int, required=True, help="how many processes, each on its own host")
    add("--gpus", type=float, default=0, help="GPUs of each host (default 0)")
    add("--tpus", type=float, default=0, help="TPU chips of each host (default 0)")
    add("--cpus", type=float, default=1, help="CPUs of each host (default 1)")
    add("--port", type=int, default=0, help="of the coordinator; 0 = one that is free there")
    add("--directory", default=os.getcwd(), help="on every host (default: this one)")
    add("--python", default=sys.executable, help="on every host (default: this one)")
    add("--share-hosts", action="store_true", help="several processes on one host, to try it")
    add("--max-restarts", type=int, default=100, help="after lost hosts (default 100)")
    add("--backoff", type=float, default=10.0, help="seconds before a restart (default 10)")
    add("--grace", type=float, default=150.0, help="seconds to save after a signal (default 150)")
    add("--wait", type=float, default=600.0, help="seconds to wait for the hosts (default 600)")
    add("arguments", nargs="+", metavar="-- arguments", help="of llmx.train")
    options = parser.parse_args(argv)
    if options.hosts < 1:
        parser.error(f"--hosts {options.hosts}: use at least 1")
    return options


def train_once(options: argparse.Namespace, attempt: int, stop: threading.Event) -> int:
    """Starts an actor on each host and waits for their trainers; returns the first failure."""
    import ray
    from ray.util import placement_group, remove_placement_group

    needs = {"CPU": options.cpus, "GPU": options.gpus, "TPU": options.tpus}
    bundles = [{name: count for name, count in needs.items() if count}] * options.hosts
    strategy = "PACK" if options.share_hosts else "STRICT_SPREAD"
    group = placement_group(bundles, strategy=strategy)
    try:
        deadline = time.monotonic() + options.wait
        while not group.wait(timeout_seconds=1):
            if stop.is_set():
                return exits.AGAIN
            if time.monotonic() > deadline:
                note(f"Ray has no {options.hosts} hosts with {bundles[0]} in {options.wait:.0f} s")
                return exits.AGAIN
        hosts = start_hosts(options, group)
        try:
            places = ray.get([host.place.remote(options.port) for host in hosts])
            note(f"{options.hosts} processes on {', '.join(place for place, _ in places)}")
            coordinator = "{}:{}".format(*places[0])
            runs = [
                host.run.remote(command(options), environment(coordinator, options, rank, attempt))
                for rank, host in enumerate(hosts)
            ]
            return wait(hosts, runs, stop, options.grace)
        except ray.exceptions.RayError as error:
            note(f"a host was lost: {str(error).splitlines()[0]}")
            return exits.AGAIN
        finally:
            for host in hosts:
                ray.kill(host)
    finally:
        remove_placement_group(group)


def start_hosts(options: argparse.Namespace, group: Any) -> list[Any]:
    """The actors, one in each bundle of the placement group."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    needs = {
        "num_cpus": options.cpus,
        "num_gpus": options.gpus,
        "resources": {"TPU": options.tpus} if options.tpus else None,
        "max_concurrency": 4,  # `stop` must run while `run` waits
    }
    kind = ray.remote(Host)
    return [
        kind.options(
            **needs,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=rank
            ),
        ).remote(options.directory)
        for rank in range(options.hosts)
    ]


def command(options: argparse.Namespace) -> list[str]:
    """What a host runs."""
    module = [options.python, "-m"]
    watched = [*module, "llmx.runtime.supervisor", "--grace", f"{options.grace:.0f}"]
    return [*watched, "--", *module, "llmx.train", *options.arguments]


def environment(
    coordinator: str, options: argparse.Namespace, rank: int, attempt: int
) -> dict[str, str]:
    """What a host's trainer finds its place by."""
    return {
        "LLMX_COORDINATOR": coordinator,
        "LLMX_NUM_PROCESSES": str(options.hosts),
        "LLMX_PROCESS_ID": str(rank),
        "LLMX_RESTART_COUNT": str(attempt),
    }


def wait(hosts: list[Any], runs: list[Any], stop: threading.Event, grace: float) -> int:
    """Waits for all trainers. Those that outlive the first that failed are stopped.

    Raises RayError where an actor is lost.
    """
    import ray

    code, stopped, deadline = 0, False, None
    while runs:
        done, runs = ray.wait(runs, timeout=0.5)
        lost = None
        for run in done:
            try:
                code = code or ray.get(run)
            except ray.exceptions.RayError as error:
                lost = error
        if (stop.is_set() or lost) and not stopped:
            stopped = True
            for host in hosts:
                host.stop.remote()
        if lost:
            ray.wait(runs, num_returns=len(runs), timeout=grace) if runs else None
            raise lost
        if code and deadline is None:
            deadline = time.monotonic() + grace
        if deadline is not None and time.monotonic() > deadline:
            note(f"{len(runs)} trainers did not end within {grace:.0f} s: killed")
            return code
    return code


class Host:
    """An actor: the supervisor of one host, whose output Ray shows at the driver."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._process: subprocess.Popen | None = None

    def place(self, port: int) -> tuple[str, int]:
        """This host's address, and the port if process 0 is here."""
        import ray

        address = ray.util.get_node_ip_address()
        if port == 0:
            with socket.socket() as probe:
                probe.bind((address, 0))
                port = probe.getsockname()[1]
        return address, port

    def run(self, command: list[str], variables: dict[str, str]) -> int:
        """The exit code of the supervisor."""
        self._process = subprocess.Popen(
            command, cwd=self._directory, env=os.environ | variables, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, preexec_fn=supervisor.die_with(os.getpid()),  # noqa: PLW1509
        )  # fmt: skip
        for line in self._process.stdout:
            print(line, end="", flush=True)
        return supervisor.shell_code(self._process.wait())

    def stop(self) -> None:
        """SIGTERM: the trainer saves and ends."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()


def note(text: str) -> None:
    print(f"ray_train: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
