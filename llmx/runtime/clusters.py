"""The processes of a run, from what its launcher or scheduler left in the environment.

`find` reads LLMX_COORDINATOR, LLMX_NUM_PROCESSES and LLMX_PROCESS_ID first, then the variables of
Open MPI, SLURM, Cloud TPU and Kubernetes. It starts and asks nothing: `launch.start` joins the
processes. Schedulers' variables that contradict each other are errors, because a process that
takes itself for the only one would train beside the others.
"""

import dataclasses
import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence

NAMES = ("LLMX_COORDINATOR", "LLMX_NUM_PROCESSES", "LLMX_PROCESS_ID")
ALONE = "none"  # as a coordinator: this process is the only one, whatever the scheduler says
ALONE_REMEDY = f"or set {NAMES[0]}={ALONE} if each process trains by itself"
# Above the ports that Linux gives to clients by default (32768..60999).
FIRST_PORT, NUM_PORTS = 61440, 4096


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Arguments of `jax.distributed.initialize`; None = JAX detects them."""

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    local_device_ids: tuple[int, ...] | None = None  # None = all that are visible
    found_by: str = "JAX"


def find(environment: Mapping[str, str], *, tpu_host: bool = False) -> Cluster | None:
    """The processes of the run; None = this process only.

    Raises ValueError for an environment that contradicts itself or says half of what is needed.
    """
    given = {name: environment[name] for name in NAMES if name in environment}
    if given.get(NAMES[0]) == ALONE:
        return None
    if len(given) == len(NAMES):
        return _merge(given, None)
    if seen := _open_mpi(environment) or _slurm(environment):
        return _merge(given, seen) if given or seen.num_processes > 1 else None
    if not given and (tpu_host or _tpu(environment)):
        return Cluster(found_by="Cloud TPU")
    if seen := _kubernetes(environment):
        if not given and importlib.util.find_spec("kubernetes"):
            return Cluster(found_by="Kubernetes")
        return _merge(given, seen)
    return _merge(given, None) if given else None


def problems(
    names: Sequence[str], coordinator: str, num_processes: int, process_id: int
) -> Iterator[str]:
    """What is wrong with a run's address and numbers, which the user knows by `names`."""
    address, count, number = names
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        yield (
            f"{address}={coordinator!r} is not host:port: "
            f"write for example 10.0.0.1:4321, or {ALONE!r} for this process only"
        )
    if num_processes < 1:
        yield f"{count}={num_processes}: set the number of processes, at least 1"
    elif not 0 <= process_id < num_processes:
        yield (
            f"{number}={process_id} is not in 0..{num_processes - 1}: "
            "give each process its own number"
        )


def describe(cluster: Cluster, count: int = 0) -> str:
    """One line for the log: how many processes, who said so, and where they meet."""
    text = f"launch: {cluster.num_processes or count} processes, found by {cluster.found_by}"
    return f"{text}; the coordinator is {cluster.coordinator}" if cluster.coordinator else text


# --------------------------------------------------------------------------------- the schedulers


def _open_mpi(environment: Mapping[str, str]) -> Cluster | None:
    if "OMPI_COMM_WORLD_SIZE" not in environment:
        return None
    count = _number(environment, "OMPI_COMM_WORLD_SIZE", at_least=1)
    number = _number(environment, "OMPI_COMM_WORLD_RANK", below=count)
    on_host = _number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE", default=1, at_least=1)
    local = None
    if on_host > 1:
        local = _one_device(environment, "OMPI_COMM_WORLD_LOCAL_RANK")
    # 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911. Open MPI 5 has no such variable.
    uri = environment.get("OMPI_MCA_orte_hnp_uri", "")
    match = re.match(r"(\d+)\.\d+;tcp(?:6://(\[[^,\]]+)|://([^,:]+))", uri)
    coordinator = None
    if match:
        host = f"{match[2]}]" if match[2] else match[3]
        coordinator = f"{host}:{_port(environment, int(match[1]) >> 12)}"
    return Cluster(coordinator, count, number, local, "Open MPI")


def _slurm(environment: Mapping[str, str]) -> Cluster | None:
    if "SLURM_STEP_NODELIST" not in environment:
        if environment.get("SLURM_NTASKS", "1") == "1":
            return None
        raise ValueError(
            f"SLURM_NTASKS={environment['SLURM_NTASKS']}, but srun did not start this process: "
            f"start it with srun, {ALONE_REMEDY}"
        )
    tasks = next(
        (name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if name in environment),
        "SLURM_NTASKS",
    )
    count = _number(environment, tasks, at_least=1)
    number = _number(environment, "SLURM_PROCID", below=count)
    nodes = _number(environment, "SLURM_STEP_NUM_NODES", default=count, at_least=1)
    # A process that has its node to itself uses all of the node's devices.
    local = _one_device(environment, "SLURM_LOCALID") if nodes < count else None
    port = _port(environment, _number(environment, "SLURM_JOB_ID"))
    coordinator = f"{_first_host(environment['SLURM_STEP_NODELIST'])}:{port}"
    return Cluster(coordinator, count, number, local, f"SLURM (job {environment['SLURM_JOB_ID']})")


def _tpu(environment: Mapping[str, str]) -> bool:
    """Whether this is one of several hosts with TPUs; JAX finds the others."""
    slices = _number(environment, "MEGASCALE_NUM_SLICES", default=1, at_least=1)
    if slices > 1 and "MEGASCALE_SLICE_ID" in environment:
        _number(environment, "MEGASCALE_SLICE_ID", below=slices)
    hosts = environment.get("TPU_PROCESS_ADDRESSES", environment.get("TPU_WORKER_HOSTNAMES", ""))
    if "," in hosts and "TPU_WORKER_ID" in environment:
        _number(environment, "TPU_WORKER_ID", below=hosts.count(",") + 1)
    return slices > 1 or "," in hosts


def _kubernetes(environment: Mapping[str, str]) -> Cluster | None:
    """An indexed Job tells its pods their numbers, but neither how many nor where the first is."""
    if not {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environment.keys():
        return None
    number = _number(environment, "JOB_COMPLETION_INDEX")
    return Cluster(process_id=number, found_by="Kubernetes")


# ----------------------------------------------------------------------------------- the variables


def _merge(given: Mapping[str, str], seen: Cluster | None) -> Cluster | None:
    """`given` of LLMX_*, and what is missing there from the scheduler."""
    seen = seen or Cluster(found_by="")
    values = {
        NAMES[0]: given.get(NAMES[0], seen.coordinator),
        NAMES[1]: _number(given, NAMES[1]) if NAMES[1] in given else seen.num_processes,
        NAMES[2]: _number(given, NAMES[2]) if NAMES[2] in given else seen.process_id,
    }
    if missing := [name for name, value in values.items() if value is None]:
        who = f"{seen.found_by} does not say it, and " if seen.found_by else ""
        raise ValueError(
            f"{', '.join(missing)} not set: {who}all of {', '.join(NAMES)} are needed; "
            f"set them, {ALONE_REMEDY}"
        )
    if found := list(problems(NAMES, *values.values())):
        raise ValueError("\n".join(found))
    if values[NAMES[1]] == 1:
        return None
    found_by = [seen.found_by] if seen.found_by else []
    if given:
        found_by.insert(0, ", ".join(given))
    return Cluster(*values.values(), seen.local_device_ids, " and ".join(found_by))


def _number(
    environment: Mapping[str, str],
    name: str,
    *,
    default: int | None = None,
    at_least: int = 0,
    below: int | None = None,
) -> int:
    """The number in a variable. Raises ValueError where it is none or out of range."""
    text = environment.get(name, None if default is None else str(default))
    if text is None:
        raise ValueError(f"{name} is not set, but others of its scheduler are: {ALONE_REMEDY[3:]}")
    if not (text.isascii() and text.isdecimal()) or int(text) < at_least:
        raise ValueError(f"{name}={text!r} is not a number, at least {at_least}")
    if below is not None and int(text) >= below:
        raise ValueError(
            f"{name}={text} is not in 0..{below - 1}: its scheduler has started {below} processes"
        )
    return int(text)


def _one_device(environment: Mapping[str, str], name: str) -> tuple[int, ...] | None:
    """The device of one of several processes on a host; None where the scheduler has chosen it."""
    bound = environment.get("CUDA_VISIBLE_DEVICES", environment.get("ROCR_VISIBLE_DEVICES", ","))
    return (_number(environment, name),) if "," in bound else None


def _port(environment: Mapping[str, str], job: int) -> int:
    """The coordinator's port: the same in all processes of a job, another in most other jobs."""
    if "JAX_COORDINATOR_PORT" in environment:
        return _number(environment, "JAX_COORDINATOR_PORT", at_least=1, below=2**16)
    return FIRST_PORT + job % NUM_PORTS


def _first_host(hosts: str) -> str:
    """The first of SLURM's list of hosts: gpu[001-004,7]-ib,login2 -> gpu001-ib."""
    match = re.match(r"([^,\[]*)(?:\[([^\]]*)\])?([^,\[]*)", hosts)
    prefix, numbers, suffix = match.groups()
    host = prefix + (re.split("[,-]", numbers)[0] + suffix if numbers else "")
    if not host:
        raise ValueError(f"SLURM_STEP_NODELIST={hosts!r} names no host")
    return host
