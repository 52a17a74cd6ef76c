"""Machines that a run is planned for: their devices, and what one of these reaches."""

import dataclasses
import math
import pathlib
import re

from llmx.aot import links, topologies
from llmx.aot.topologies import Topology
from llmx.plan import calibrations, hardware_file
from llmx.plan.gemm import Core
from llmx.plan.hardware_file import Hardware

CPU = "cpu"


@dataclasses.dataclass(frozen=True, eq=False)
class Machine:
    """Devices, how they are joined, and how fast they are."""

    topology: Topology
    core: Core
    rates: links.Rates  # what one device reaches of its links

    @property
    def on_gpu(self) -> bool:
        return self.topology.platform == "gpu"

    @property
    def on_cpu(self) -> bool:
        return self.topology.platform == CPU


def parse(name: str, hardware: str | pathlib.Path | None = None) -> Machine:
    """The machine called `name`, as `llmx.aot --topology` has it.

    `hardware`: a file of `hardware_file`, whose chip the machine has then; the part of `name`
    before the shape is the file's `name`. ValueError for unknown names and wrong files.
    """
    if hardware is not None:
        own = hardware_file.read(hardware)
        return Machine(topology_of(name, own, hardware), own.core, own.rates)
    if name.partition(":")[0] == CPU:
        raise ValueError(
            f"machine {name!r}: nothing is known of a CPU until it is measured: run "
            "`python -m llmx.plan calibrate --out cpu.json` there, and add --hardware cpu.json"
        )
    topology = topologies.parse(name)
    key = (topologies.TPUS | topologies.GPUS)[topology.family].chip
    return Machine(topology, calibrations.core_of(key), links.rates_of(topology.chip))


def topology_of(name: str, own: Hardware, path: str | pathlib.Path) -> Topology:
    """Devices of one's own hardware, as `name` says. ValueError, naming `path`, the file that the
    hardware is from, for another name; for a shape that cannot be."""
    match = re.fullmatch(r"(?:(\d+)@)?([a-z0-9_]+):(\d+(?:x\d+)*)", name)
    if not match or match[2] != own.name:
        raise ValueError(
            f"machine {name!r}: the hardware file {path} is of {own.name!r}: write "
            f"{own.name}:SHAPE, for example {own.name}:{_EXAMPLES[own.core.chip.topology]}"
        )
    chip, known = own.core.chip, topologies.TPUS | topologies.GPUS
    slices, shape = int(match[1] or 1), tuple(int(size) for size in match[3].split("x"))
    if own.platform == "gpu":
        shape = (1, *shape) if len(shape) == 1 else shape
    if why_not := _refusal(shape, slices, own):
        raise ValueError(f"machine {name!r}: {why_not}")
    return Topology(
        name=name, platform=own.platform, family=own.base or own.name, shape=shape,
        num_slices=slices, chip=chip,
        device_kind=known[own.base].device_kind if own.base else chip.name,
        hbm_bytes=own.usable_bytes,
    )  # fmt: skip


_EXAMPLES = {
    "torus_2d": "4x4", "torus_3d": "4x4x8", "switch": "4x8", "pair": "4x2",
    hardware_file.SHARED: "1",
}  # fmt: skip


def _refusal(shape: tuple[int, ...], slices: int, own: Hardware) -> str:
    """What is wrong with a shape; "" if nothing."""
    chip = own.core.chip
    sides = {"torus_2d": 2, "torus_3d": 3, hardware_file.SHARED: 1}.get(chip.topology, 2)
    if len(shape) != sides or min(shape) < 1 or slices < 1:
        return (
            f"{chip.topology} has {sides} sizes of at least 1: write for example "
            f"{own.name}:{_EXAMPLES[chip.topology]}"
        )
    if slices > 1 and own.platform != "tpu":
        return f"{slices}@ counts slices of a torus: leave it out"
    joined = shape[1] if own.platform == "gpu" else math.prod(shape)
    if joined > chip.max_domain:
        return (
            f"{joined} chips in one domain, and links join at most max_domain="
            f"{chip.max_domain}: use fewer, or correct max_domain in the hardware file"
        )
    devices = slices * math.prod(shape) * chip.devices_per_chip
    if devices > topologies.MAX_DEVICES:
        return f"{devices:,} devices: at most {topologies.MAX_DEVICES:,} are supported; use fewer"
    return ""
