"""Starting a run: platform, XLA flags, one or many processes.

`start` must run before the first array exists, because JAX reads platform, device count and XLA
flags when its backend starts; it may be called again with the same config. Many processes are found
from the config, or by `clusters` from LLMX_COORDINATOR, LLMX_NUM_PROCESSES and LLMX_PROCESS_ID
(scripts/local_cluster.py sets them), Open MPI, SLURM, Cloud TPU or Kubernetes.
"""

import dataclasses
import errno
import glob
import importlib.util
import ipaddress
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import jax

from llmx.runtime import bounds, clusters, printable
from llmx.runtime.bounds import bounded, choice
from llmx.runtime.clusters import Cluster
from llmx.runtime.supervisor import restart_count as restart_count

# XLA aborts on a flag that it does not know: tests/runtime/test_launch.py tries each of these.
XLA_FLAGS: dict[str, dict[str, str]] = {
    # Several devices in one process on few cores: collectives of one program otherwise start in
    # different orders on different devices and wait for each other until XLA ends the process.
    "cpu": {"xla_cpu_enable_concurrency_optimized_scheduler": "false"},
    # JAX-Toolbox's guide and MaxText's H100 scripts. The thresholds gather about a layer at once:
    # smaller pieces are too short to hide behind the layer before.
    "gpu": {
        "xla_gpu_enable_pipelined_all_gather": "true",
        "xla_gpu_enable_pipelined_reduce_scatter": "true",
        "xla_gpu_enable_pipelined_all_reduce": "true",
        "xla_gpu_enable_while_loop_double_buffering": "true",
        "xla_gpu_all_gather_combine_threshold_bytes": str(128 * 2**20),
        "xla_gpu_reduce_scatter_combine_threshold_bytes": str(128 * 2**20),
        "xla_gpu_all_reduce_combine_threshold_bytes": str(128 * 2**20),
        "xla_gpu_enable_triton_gemm": "false",
        # With mesh.tensor > 1 this pass writes a sliced gather, which is the device's own part, as
        # a collective-permute without pairs. That gives zeros: gradients are lost (jax 0.10.2).
        "xla_disable_hlo_passes": "all-gather-to-collective-permute-simplifier",
    },
    # As compiler options, by chip, each tried before it is used: `runtime.compiler_options`.
    "tpu": {},
}

# Flags with several values, separated by commas: those of the user are added to llmx's own.
LISTS = ("xla_disable_hlo_passes",)


@dataclasses.dataclass
class LaunchConfig:
    """Platform, processes and compiler of a run."""

    platform: str = choice("", (*XLA_FLAGS, ""))  # cpu | gpu | tpu; "" = the best that JAX finds
    # fake CPU devices in this process; 0 = JAX's (one)
    cpu_devices: int = bounded(0, at_least=0, at_most=4096)
    # host:port of process 0; "" = from the environment, "auto" = JAX detects, "none" = one process
    coordinator: str = ""
    num_processes: int = bounded(0, at_least=0)  # with a coordinator; 0 = from the environment
    process_id: int = -1  # with a coordinator; -1 = from the environment
    # address that process 0 listens on; "" = the coordinator's, where it is one of this machine
    bind_address: str = ""
    # processes that have not met by then end with 75
    join_seconds: int = bounded(300, at_least=5, at_most=10**6)
    # a process not heard of for this long ends the run
    heartbeat_seconds: int = bounded(30, at_least=5, at_most=10**6, remedy="hosts pause; use 30")
    # no step for this long: print all stacks, exit 75; 0 = as the section watchdog says
    watchdog_seconds: int = bounded(0, at_least=0, at_most=10**8, remedy="0 = watchdog.step_factor")
    # compiled programs of earlier launches; "" = none, as on several CPU processes.
    # JAX_COMPILATION_CACHE_DIR goes first
    compile_cache: str = "~/.cache/llmx/xla"
    # options of XLA that hide collectives behind computation: "auto" = those known to do so on the
    # chip and accepted by its compiler, "none"
    overlap: str = choice("auto", ("auto", "none"))
    # of XLA for the train step: ("xla_name=value", ...); they override those of launch.overlap
    compiler_options: tuple[str, ...] = ()


def problems(config: LaunchConfig) -> list[str]:
    """All that is wrong with the section, each with its remedy."""
    return [*bounds.problems(config, "launch."), *_conflicts(config)]


def _conflicts(config: LaunchConfig) -> Iterator[str]:
    if config.cpu_devices and config.platform in ("gpu", "tpu"):
        yield (
            f"launch.cpu_devices={config.cpu_devices} has no effect on "
            f"launch.platform={config.platform!r}: use 0, or platform cpu"
        )
    for option in config.compiler_options:
        name, equals, _ = option.partition("=")
        if not equals or not name.startswith("xla_"):
            yield (
                f"launch.compiler_options has {option!r}: write xla_name=value, as "
                "xla_enable_async_all_gather=true"
            )
    numbers = config.num_processes, config.process_id
    if config.coordinator not in ("", "auto", clusters.ALONE):
        names = ("launch.coordinator", "launch.num_processes", "launch.process_id")
        yield from clusters.problems(names, config.coordinator, *numbers)
    elif numbers != (0, -1):
        yield (
            f"launch.num_processes={config.num_processes}, launch.process_id={config.process_id} "
            "without launch.coordinator: set launch.coordinator=host:port of process 0"
        )


def compiler_options(config: LaunchConfig) -> dict[str, str | bool | int]:
    """What the user gives, as {name: value} for `jax.jit`; see `runtime.compiler_options`."""
    options = dict(option.split("=", 1) for option in config.compiler_options)
    return {name: option_value(text) for name, text in options.items()}


def option_value(text: str) -> str | bool | int:
    """The value of an XLA flag with the type that a compiler option must have."""
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.isdecimal() else text


def start(config: LaunchConfig) -> None:
    """Sets up JAX and joins the other processes, if there are any. Call it before any array exists.

    Raises ValueError for a bad config or environment; RuntimeError if JAX runs with other settings.
    """
    if found := problems(config):
        raise ValueError("\n".join(found))
    cluster = find_cluster(config, os.environ)
    platform = choose_platform(config)
    if config.cpu_devices:
        _set("jax_num_cpu_devices", config.cpu_devices)
    if platform != "cpu" or cluster is not None or jax.config.jax_num_cpu_devices > 1:
        os.environ["XLA_FLAGS"] = merge_flags(os.environ.get("XLA_FLAGS", ""), XLA_FLAGS[platform])
    if config.compile_cache and not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        _set("jax_compilation_cache_dir", str(Path(config.compile_cache).expanduser()))
        _set("jax_persistent_cache_min_compile_time_secs", 0.02)
    cluster = cluster or _one_of_one(config, platform)
    if cluster is not None and platform == "cpu":
        # With jaxlib 0.10.2 a train step that is read back hangs: Gloo's collectives of one program
        # begin in different orders in different processes.
        _set("jax_enable_compilation_cache", False)
    if cluster is not None and not jax.distributed.is_initialized():
        if platform == "cpu":
            _set("jax_cpu_collectives_implementation", "gloo")
        if cluster.process_id == 0:
            note(clusters.describe(cluster))
        # `runtime.signals` handles SIGTERM, also before the first step.
        _set("jax_enable_preemption_service", False)
        jax.distributed.initialize(
            cluster.coordinator, cluster.num_processes, cluster.process_id,
            local_device_ids=cluster.local_device_ids,
            cluster_detection_method="deactivate" if cluster.coordinator else None,
            coordinator_bind_address=bind_address(config, cluster),
            initialization_timeout=config.join_seconds,
            # `runtime.agreement` names a lost process before JAX ends this one.
            heartbeat_timeout_seconds=2 * config.heartbeat_seconds + 10,
        )  # fmt: skip
        if cluster.coordinator is None:
            note(clusters.describe(cluster, jax.process_count()))


def _one_of_one(config: LaunchConfig, platform: str) -> Cluster | None:
    """A launcher's only process, where its devices are CPUs.

    It uses the collectives of many processes, so that its sums are theirs bit for bit; those inside
    one process add in another order.
    """
    address, count, _ = (os.environ.get(name, "") for name in clusters.NAMES)
    if config.num_processes == 1:
        address, count = config.coordinator, "1"
    several = platform == "cpu" and jax.config.jax_num_cpu_devices > 1
    found_by = "the launcher"
    return Cluster(address, 1, 0, found_by=found_by) if several and count == "1" else None


PORT_SECONDS = 5.0  # how long a port may still be held by a process that is ending


def bind_address(config: LaunchConfig, cluster: Cluster) -> str | None:
    """host:port that the coordinator listens on; None = JAX's own choice, or not process 0.

    Raises ValueError where the port is taken.
    """
    if not cluster.coordinator:
        if config.bind_address:
            raise ValueError(
                f"launch.bind_address={config.bind_address!r} needs the coordinator's port: set "
                "launch.coordinator too, or leave both to the scheduler"
            )
        return None
    if cluster.process_id != 0:
        return None
    host, _, port = cluster.coordinator.rpartition(":")
    wanted = config.bind_address or host.strip("[]")
    deadline = time.monotonic() + PORT_SECONDS
    while True:
        try:
            return _free_address(wanted, int(port), required=bool(config.bind_address))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ValueError(
                    f"launch.bind_address={wanted!r}: process 0 cannot listen there ({error}): "
                    "give an address of this machine"
                ) from error
            if time.monotonic() > deadline:
                raise ValueError(
                    f"the coordinator's port is in use: {cluster.coordinator}; another run may "
                    "use it: choose another port, or end that run"
                ) from error
            time.sleep(0.2)


def _free_address(host: str, port: int, *, required: bool) -> str:
    """Where to listen: at `host`, if this machine has that address, else at all of its addresses.

    Raises OSError where that port is taken, or a required host is not of this machine.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if required or not _own_name(host, address[0]):
            _bind(family, address)
            return f"[{address[0]}]:{port}" if family == socket.AF_INET6 else f"{address[0]}:{port}"
    except OSError as error:
        if required or error.errno == errno.EADDRINUSE:
            raise
    # The own name, or that of a service in front of this machine, whose address nothing here has.
    if socket.has_dualstack_ipv6():
        _bind(socket.AF_INET6, ("::", port))
    else:
        _bind(socket.AF_INET, ("0.0.0.0", port))
    return f"[::]:{port}"


def _own_name(host: str, address: str) -> bool:
    """Whether a name means loopback here only: Debian's /etc/hosts has 127.0.1.1 for its own."""
    loopback = ipaddress.ip_address(address.partition("%")[0]).is_loopback
    return loopback and host not in (address, "localhost")


def _bind(family: int, address: tuple) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


def store() -> tuple[Any, int, int]:
    """(client of the key-value store, index, count) of this run's processes; None: there is one."""
    state = _distributed_state()
    if state.client is None or (state.num_processes or 1) < 2:
        return None, 0, 1
    return state.client, state.process_id, state.num_processes


def coordinator_host() -> str:
    """The host of process 0; this one, where jax has no coordinator."""
    address = _distributed_state().coordinator_address or "127.0.0.1:0"
    return address.rpartition(":")[0].strip("[]")


def _distributed_state() -> Any:
    # Orbax takes it from there too: JAX has no public name for it.
    from jax._src import distributed

    return distributed.global_state


def join_problem(config: LaunchConfig) -> str:
    """What is wrong where JAX ends a process that tried to meet the others."""
    cluster = find_cluster(config, os.environ) or Cluster()
    number = "?" if cluster.process_id is None else cluster.process_id
    count = cluster.num_processes or "all"
    return (
        f"process {number} did not meet {count} processes at "
        f"{cluster.coordinator or 'the coordinator'} within launch.join_seconds="
        f"{config.join_seconds}, or process 0 ended: check that all were started, and that they "
        "reach that address; then start the run again"
    )


def choose_platform(config: LaunchConfig) -> str:
    """Sets the platform of JAX before its backend starts, and returns it: cpu, gpu or tpu.

    The config goes first, then JAX_PLATFORMS, then JAX's choice. Without accelerators that is the
    CPU: plugins that are installed to compile with would print errors about missing drivers.
    """
    if config.platform:
        _set("jax_platforms", config.platform)
    elif not jax.config.jax_platforms and not has_accelerator():
        _set("jax_platforms", "cpu")
    # What JAX will choose: asking it would start its backend.
    if asked := (jax.config.jax_platforms or "").split(",")[0]:
        return {"cuda": "gpu", "rocm": "gpu"}.get(asked, asked if asked in XLA_FLAGS else "cpu")
    if any(map(glob.glob, TPU_DEVICES)) and importlib.util.find_spec("libtpu"):
        return "tpu"
    plugins = ("jax_cuda13_plugin", "jax_cuda12_plugin", "jax_rocm7_plugin", "jax_rocm60_plugin")
    has_plugin = any(map(importlib.util.find_spec, plugins))
    return "gpu" if has_plugin and any(map(glob.glob, GPU_DEVICES)) else "cpu"


def has_accelerator() -> bool:
    """Whether a TPU or GPU is attached, by its device file."""
    return sys.platform != "linux" or any(map(glob.glob, TPU_DEVICES + GPU_DEVICES))


def device_count(config: LaunchConfig) -> int:
    """Devices of the whole run. Starts the backend unless the config gives the number.

    Raises ValueError if the platform does not start.
    """
    if config.platform == "cpu" and config.cpu_devices and not jax.distributed.is_initialized():
        return config.cpu_devices
    try:
        return jax.device_count()
    except RuntimeError as error:
        raise ValueError(
            f"launch.platform={config.platform!r} does not start: {error}; "
            "use another platform, or install jax[cuda13] or jax[tpu] on a machine that has one"
        ) from error


def log(text: str, file: TextIO | None = None) -> None:
    """Prints a line in process 0, nothing in the others; nobody to read it is no error."""
    if jax.distributed.is_initialized() and jax.process_index() != 0:
        return
    file = sys.stdout if file is None else file
    try:
        # In one piece: collectives of a process print to the same stdout.
        file.write(f"{printable.printable(text)}\n")
        file.flush()
    except BrokenPipeError:  # the reader is gone: a flush at exit must not fail either
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
    except OSError:  # a log on a full disk
        pass


def note(text: str) -> None:
    """`log` to stderr, for commands whose stdout is their result."""
    log(text, file=sys.stderr)


def find_cluster(config: LaunchConfig, environment: Mapping[str, str]) -> Cluster | None:
    """The processes of the run by config, LLMX_* or scheduler; None = this process only.

    Raises ValueError for an environment that contradicts itself.
    """
    if config.coordinator == "auto":
        return Cluster()
    if config.coordinator == clusters.ALONE or config.num_processes == 1:
        return None
    if config.coordinator:
        place = config.coordinator, config.num_processes, config.process_id
        return Cluster(*place, found_by="the config")
    tpu_host = config.platform == "tpu" and any(map(glob.glob, TPU_DEVICES))
    return clusters.find(environment, tpu_host=tpu_host)


# On hosts with these files the TPU's metadata, not the environment, gives the number of processes.
TPU_DEVICES = ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*")
# Of NVIDIA's driver, of WSL's, of AMD's. Without one a plugin is there to compile with only.
GPU_DEVICES = ("/dev/nvidia[0-9]*", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")


def merge_flags(given: str, wanted: Mapping[str, str]) -> str:
    """XLA_FLAGS `given` by the user with each flag of `wanted` that they do not set themselves."""
    added = added_flags(given, wanted)
    kept = [flag for flag in given.split() if _name_and_value(flag)[0] not in added]
    return " ".join([*kept, *(f"--{name}={value}" for name, value in added.items())])


def added_flags(given: str, wanted: Mapping[str, str]) -> dict[str, str]:
    """{name: value} that `merge_flags` adds; those of `LISTS` with the user's values in front."""
    have = dict(map(_name_and_value, given.split()))
    return {
        name: joined(have.get(name, ""), value)
        for name, value in wanted.items()
        if name not in have or name in LISTS
    }


def joined(users: str, ours: str) -> str:
    """The values of a flag of `LISTS`."""
    return ",".join(dict.fromkeys(filter(None, f"{users},{ours}".split(","))))


def _name_and_value(flag: str) -> tuple[str, str]:
    name, _, value = flag.lstrip("-").partition("=")
    return name, value


def _set(name: str, value: str | int | float) -> None:
    # Writing some options after the backend has started raises, even when nothing changes.
    if jax.config.values[name] != value:
        jax.config.update(name, value)
