"""`--config.mesh=auto`: the fastest configuration for the devices that are there."""

import math
import sys
from collections.abc import Callable, Sequence

import jax

from llmx import config as config_lib
from llmx import sharding
from llmx.aot import links, topologies
from llmx.aot.topologies import Topology
from llmx.config import Config
from llmx.plan import calibrations, candidates, search_report
from llmx.plan.gemm import Calibration, Core
from llmx.plan.machines import Machine
from llmx.runtime import hardware

# Of a CPU nothing is known; which mesh is best on it hardly matters. Bytes/s and FLOP/s of one of
# a few cores, and memory that is surely there for a device.
_CPU = hardware.Chip(
    "CPU", {"bfloat16": 5e10, "float32": 5e10}, 4 * hardware.GIB, 1e10, 5e9, 1, "switch", 2**16,
    None,
)  # fmt: skip


def on_these_devices(config: Config, log: Callable[[str], None]) -> Config:
    """The config with the mesh, layout, schedule, remat and microbatches that are fastest here.

    A run in the workdir on as many devices keeps what it has. All processes find the same. Raises
    ValueError where nothing fits, or the devices are not known.
    """
    devices = jax.devices()
    if (saved := _saved(config, len(devices))) is not None:
        log("mesh=auto: as the run in the workdir has it")
        return candidates.changed(config, saved)
    chosen, text = search_report.chosen(config, _machine(devices), out=sys.stderr)
    log(text)
    return chosen


def _saved(config: Config, num_devices: int) -> candidates.Candidate | None:
    """What the run in the workdir has, if it is for as many devices."""
    try:
        run = config_lib.load_run_with_tables(config.workdir)
    except ValueError:  # there is none
        return None
    count = math.prod(vars(run.mesh)[axis] for axis in sharding.AXES)
    return candidates.of_run(run) if count == num_devices else None


def _machine(devices: Sequence[jax.Device]) -> Machine:
    """What these devices are."""
    kind, platform = devices[0].device_kind, devices[0].platform
    if platform == "cpu":
        topology = Topology(
            f"cpu:{len(devices)}", "gpu", "cpu", (1, len(devices)), 1, _CPU, kind, _CPU.hbm_bytes
        )
        return Machine(topology, Core(_CPU, Calibration(0.8, 0.8, 1)), links.rates_of(_CPU))
    families = topologies.TPUS | topologies.GPUS
    family = next((name for name, of in families.items() if of.device_kind == kind), None)
    if family is None:
        known = ", ".join(sorted({of.device_kind for of in families.values()}))
        raise ValueError(
            f"mesh=auto: devices of kind {kind!r} are not known (known are {known}): set the axes "
            "of the mesh, --config.mesh.fsdp=-1 for example"
        )
    name = f"{family}:{'x'.join(map(str, _shape(devices, platform)))}"
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    topology = topologies.parse(f"{slices}@{name}" if slices > 1 else name)
    key = families[family].chip
    return Machine(topology, calibrations.core_of(key), links.rates_of(topology.chip))


def _shape(devices: Sequence[jax.Device], platform: str) -> tuple[int, ...]:
    """Hosts and GPUs of each; of a TPU slice the chips along each axis."""
    if platform == "gpu":
        hosts = len({device.process_index for device in devices})
        return hosts, len(devices) // hosts
    first = min(getattr(device, "slice_index", 0) for device in devices)
    coords = [device.coords for device in devices if getattr(device, "slice_index", 0) == first]
    spans = [max(axis) - min(axis) + 1 for axis in zip(*coords, strict=True)]
    flat = spans[2] == 1 and topologies.TPUS[_family(devices[0])].largest[2:] == ()
    return tuple(spans[:2]) if flat else tuple(spans)


def _family(device: jax.Device) -> str:
    return next(n for n, of in topologies.TPUS.items() if of.device_kind == device.device_kind)
