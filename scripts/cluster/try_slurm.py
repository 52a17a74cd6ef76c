"""Runs scripts/cluster/slurm.sbatch in a SLURM cluster of two nodes that it starts on this machine.

    python scripts/cluster/try_slurm.py [--faults process,node,signal] [--folder FOLDER]

Needs root and the Debian packages slurm-wlm and munge. The cluster is private: its own ports, key
and folder, two slurmd for the nodes 127.0.0.1 and 127.0.0.2. A small run is trained once in peace
and once with the faults, each after a few more steps:

    process  kill -9 of one trainer: its supervisor starts it again, the job goes on
    node     all processes of one node are killed and the node is set down: SLURM requeues the job
    signal   SIGTERM to the batch script, as before the time limit: saved, requeued by the script

Exit code 0 if both runs have the same losses, bit for bit.
"""

import argparse
import contextlib
import dataclasses
import getpass
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
NODES = ("127.0.0.1", "127.0.0.2")  # a node's name is the address at which JAX looks for it
FAULTS = ("process", "node", "signal")
NEEDED = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "scancel")
STEPS = 200
SECONDS = 180  # for each thing that is waited for

SLURM_CONF = """
ClusterName=llmx
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=1
MpiDefault=none
ReturnToService=2
SlurmdTimeout=30
KillWait=20
SlurmdParameters=config_overrides
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 State=UNKNOWN
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

CONFIG = """
from llmx import config
from llmx.model import families

def get_config():
    run = config.default()
    run.model = families.preset("llama3", num_layers=2, width=32, num_heads=2, head_dim=16,
                                num_kv_heads=2, mlp_dim=64)
    run.steps, run.precision = {steps}, "fp32"
    run.batch.size, run.batch.sequence_length = 8, 32
    run.launch.platform, run.launch.cpu_devices, run.mesh.fsdp = "cpu", 1, 2
    run.launch.heartbeat_seconds = 10
    run.checkpoint.every, run.evaluation.every = 20, 0
    run.metrics.log_every, run.metrics.progress = 1, "plain"
    run.sample.prompt = ""
    run.data.sources, run.data.cache_dir = ({source!r},), {cache!r}
    return run
"""


def main(argv: list[str] | None = None) -> int:
    """Trains twice, disturbs the second run and compares."""
    options = parse(argv)
    if missing := lacking():
        print(f"try_slurm: {missing}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the daemons end too
    with scratch(options.folder) as folder, Cluster(folder) as cluster:
        peaceful, disturbed = (Run(cluster, folder, name) for name in ("peaceful", "disturbed"))
        peaceful.submit()
        peaceful.wait()
        disturbed.submit()
        for fault in options.faults:
            disturbed.wait_for_steps(disturbed.last_step() + 25)
            begun, at, starts = time.monotonic(), disturbed.last_step(), disturbed.starts()
            DISTURB[fault](disturbed)
            wait_until(lambda n=starts: disturbed.starts() > n, "step after the fault", disturbed)
            seconds = time.monotonic() - begun
            print(f"{fault:8} after step {at}: trains again after {seconds:.0f} s", flush=True)
        disturbed.wait()
        want, losses = peaceful.losses(), disturbed.losses()
        requeued = disturbed.job()["Restarts"]
        same = sum(losses.get(step) == loss for step, loss in want.items())
        print(f"requeued {requeued} times; {same} of {len(want)} losses are the same")
        requeues = sum(fault != "process" for fault in options.faults)
        return 0 if losses == want and len(want) == STEPS and requeued == str(requeues) else 1


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    faults = ", ".join(FAULTS)
    parser.add_argument("--faults", default=",".join(FAULTS), help=f"some of {faults}, in order")
    parser.add_argument("--folder", type=Path, help="kept afterwards; otherwise a temporary one")
    options = parser.parse_args(argv)
    options.faults = options.faults.split(",")
    if unknown := [fault for fault in options.faults if fault not in FAULTS]:
        parser.error(f"--faults {','.join(unknown)}: use some of {faults}")
    return options


def lacking() -> str:
    """What this machine lacks for a private SLURM; empty if nothing."""
    if programs := [name for name in NEEDED if find_program(name) is None]:
        return f"{', '.join(programs)} not found: install slurm-wlm and munge"
    return "" if os.geteuid() == 0 else "run it as root: slurmd starts the jobs"


def find_program(name: str) -> str | None:
    """The daemons are in a folder that is in root's PATH only."""
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")


@contextlib.contextmanager
def scratch(folder: Path | None) -> Iterator[Path]:
    """A new folder; a temporary one is deleted afterwards."""
    if folder is not None:
        folder.mkdir(parents=True)
        yield folder.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="llmx-slurm-", ignore_cleanup_errors=True) as name:
        yield Path(name)


class Cluster:
    """munged, slurmctld and two slurmd, as children of this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: dict[str, subprocess.Popen] = {}
        for name in ("state", *(f"spool.{node}" for node in NODES)):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        ports, host = free_ports(3), socket.gethostname().partition(".")[0]
        conf = folder / "slurm.conf"
        user = getpass.getuser()
        conf.write_text(
            SLURM_CONF.format(folder=folder, host=host, ports=ports, user=user, nodes=NODES)
        )
        self.environment = os.environ | {"SLURM_CONF": str(conf), "PYTHONPATH": str(ROOT)}

    def __enter__(self) -> "Cluster":
        try:
            folder = self.folder
            names = {"socket": "socket", "key-file": "key", "pid-file": "pid", "seed-file": "seed"}
            places = [f"--{flag}={folder}/munge.{name}" for flag, name in names.items()]
            self._start("munged", "--foreground", "--force", "--num-threads=2", *places)
            wait_until((folder / "munge.socket").exists, "munged")
            self._start("slurmctld", "-D", "-i")
            for node in NODES:
                self.start_node(node)
            wait_until(lambda: self.run("sinfo", "-ho", "%T %D") == "idle 2", "two idle nodes")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in processes():
            if process.environment.get("SLURM_CONF") == self.environment["SLURM_CONF"]:
                kill(process.pid)
        for daemon in reversed(self._daemons.values()):
            daemon.kill()
            daemon.wait()

    def start_node(self, node: str) -> None:
        self._start("slurmd", "-D", "-N", node, key=node)

    def lose_node(self, node: str) -> None:
        """Kills all that runs there at a time."""
        tasks = [found for found in processes() if found.environment.get("SLURMD_NODENAME") == node]
        # A task's parent is another task of the node, or the daemon of its step.
        for pid in {found.parent for found in tasks} | {found.pid for found in tasks}:
            kill(pid)
        self._daemons[node].kill()
        self._daemons[node].wait()

    def run(self, program: str, *arguments: str) -> str:
        """What the command prints."""
        done = subprocess.run(
            [program, *arguments], cwd=ROOT, env=self.environment,
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        return done.stdout.strip() if done.returncode == 0 else ""

    def _start(self, program: str, *arguments: str, key: str = "") -> None:
        log = (self.folder / f"{key or program}.out").open("a")
        self._daemons[key or program] = subprocess.Popen(
            [find_program(program), *arguments], env=self.environment, cwd=self.folder,
            stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip


class Run:
    """A job of slurm.sbatch with its own work directory."""

    def __init__(self, cluster: Cluster, folder: Path, name: str) -> None:
        self.cluster, self.workdir, self.log = cluster, folder / name, folder / f"{name}.log"
        self.config = folder / f"{name}.py"
        (folder / "text").mkdir(exist_ok=True)
        words = ["alpha", "beta", "gamma", "delta", "def", "return", "=", "+", "\n"]
        (folder / "text" / "a.txt").write_text(" ".join(random.Random(0).choices(words, k=20_000)))
        source, cache = str(folder / "text"), str(folder / "cache")
        self.config.write_text(CONFIG.format(steps=STEPS, source=source, cache=cache))

    def submit(self) -> None:
        variables = {"LLMX_PYTHON": sys.executable, "LLMX_GRACE_SECONDS": "60"}
        exported = ",".join(["ALL", *(f"{name}={value}" for name, value in variables.items())])
        self.id = self.cluster.run(
            "sbatch", "--parsable", f"--output={self.log}", f"--export={exported}",
            "scripts/cluster/slurm.sbatch", "--config", str(self.config),
            "--workdir", str(self.workdir),
        )  # fmt: skip
        assert self.id, "sbatch does not accept the job"

    def job(self) -> dict[str, str]:
        """What SLURM knows of the job."""
        words = self.cluster.run("scontrol", "show", "job", self.id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self) -> None:
        """Until the job is done."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        wait_until(lambda: self.job().get("JobState") in ended, "the job's end", self)
        assert self.job()["JobState"] == "COMPLETED", self.tail()

    def last_step(self) -> int:
        return max(self.losses(), default=0)

    def wait_for_steps(self, step: int) -> None:
        wait_until(lambda: self.last_step() >= step, f"step {step}", self)

    def starts(self) -> int:
        """How often a trainer has taken its first step."""
        return self.log.read_text().count("first step done")

    def losses(self) -> dict[int, float]:
        """The loss of each step so far."""
        try:
            text = (self.workdir / "metrics.jsonl").read_text()
        except FileNotFoundError:
            return {}
        lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
        records = [json.loads(line) for line in lines]
        return {record["step"]: record["loss"] for record in records if record["kind"] == "train"}

    def tail(self) -> str:
        lines = self.log.read_text().splitlines() if self.log.exists() else ["no log"]
        return "\n".join(lines[-30:])


def kill_trainer(run: Run) -> None:
    """kill -9 of the trainer on the second node."""
    trainers = [
        found
        for found in processes()
        if found.environment.get("SLURMD_NODENAME") == NODES[1]
        and found.environment.get("SLURM_JOB_ID") == run.id
        and "llmx.runtime.supervisor" not in found.command
        and "llmx.train" in found.command
    ]
    kill(min(trainers, key=lambda found: found.pid).pid)


def lose_node(run: Run) -> None:
    """The second node dies; the administrator's word spares the wait for SlurmdTimeout."""
    with requeued(run):
        run.cluster.lose_node(NODES[1])
        run.cluster.run("scontrol", "update", f"nodename={NODES[1]}", "state=down", "reason=lost")
    run.cluster.start_node(NODES[1])
    run.cluster.run("scontrol", "update", f"nodename={NODES[1]}", "state=resume")


def signal_job(run: Run) -> None:
    """What SLURM does before the time limit, by `#SBATCH --signal=B:TERM@seconds`."""
    with requeued(run):
        run.cluster.run("scancel", "--batch", "--signal=TERM", run.id)


@contextlib.contextmanager
def requeued(run: Run) -> Iterator[None]:
    """Waits afterwards until the job is in the queue once more."""
    before = run.job()["Restarts"]
    yield
    wait_until(lambda: run.job().get("Restarts", before) != before, "the requeue", run)


DISTURB: dict[str, Callable[[Run], None]] = {
    "process": kill_trainer,
    "node": lose_node,
    "signal": signal_job,
}


@dataclasses.dataclass(frozen=True)
class Process:
    """One of /proc."""

    pid: int
    parent: int
    command: list[str]
    environment: dict[str, str]


def processes() -> Iterator[Process]:
    """All that can be read."""
    for path in Path("/proc").iterdir():
        if not path.name.isdecimal():
            continue
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            command, variables = (
                (path / name).read_bytes().decode(errors="replace").split("\0")
                for name in ("cmdline", "environ")
            )
        except OSError:
            continue
        environment = dict(word.partition("=")[::2] for word in variables)
        yield Process(int(path.name), parent, command, environment)


def kill(pid: int) -> None:
    if pid > 1 and pid != os.getpid():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_until(condition: Callable[[], object], what: str, run: Run | None = None) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} in {SECONDS} s\n{run.tail() if run else ''}")
        time.sleep(0.1)


def free_ports(count: int) -> list[int]:
    """Ports that are free now."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


if __name__ == "__main__":
    sys.exit(main())
