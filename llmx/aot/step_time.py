"""The estimated time of a compiled train step on a machine by name, and what follows from it."""

import dataclasses
from collections.abc import Sequence

from jax.sharding import Mesh

from llmx import config
from llmx.aot import core_times, links, timeline, topologies
from llmx.aot.timeline import Timeline
from llmx.config import utilization
from llmx.model import costs
from llmx.model.families import ModelConfig


@dataclasses.dataclass(frozen=True)
class Speed:
    """What the estimated time of a step means."""

    tokens_per_second: float  # of the whole machine
    tokens_per_second_per_device: float
    peak_dtype: str  # the shares are of the peak FLOP/s in this type
    shares: dict[str, float]  # by figure of `llmx.runtime.utilization`
    program: float | None  # share that the program computes, all that its kernels repeat included


def visible_share(model: ModelConfig, *, sequence_length: int) -> float:
    """The share of attention's scores that masks and windows leave, over all layers."""
    keys = costs.keys_per_query(model, sequence_length=sequence_length)
    return sum(keys) / len(keys) / sequence_length


def estimate(text: str, run: config.Config, topology: topologies.Topology, mesh: Mesh) -> Timeline:
    """The timeline of a compiled program of `run` on `mesh`, the devices of `topology`."""
    visible = visible_share(run.model, sequence_length=run.batch.sequence_length)
    rings = run.mesh.sequence > run.attention.ulysses
    core = core_times.core_of(topology.chip, visible=visible, rings=rings)
    wraps = topologies.wraps(topology.shape) if topology.platform == "tpu" else ()
    shape = topology.shape if topology.platform == "tpu" else ()
    across = run.mesh.across_slices
    return timeline.read(
        text, list(mesh.shape.items()), core=core, across_slices=across,
        machine=links.machine_of(
            topology.chip, shape, wraps, _logical_devices(mesh, across, topology.num_slices)
        ),
    )  # fmt: skip


def _logical_devices(mesh: Mesh, across: Sequence[str], num_slices: int) -> list:
    """The devices that the program's text numbers, in their order: of several slices the first's.

    Axes across slices are outermost in their mesh axis (`mesh_utils.create_hybrid_device_mesh`).
    """
    devices = mesh.devices
    if num_slices > 1:
        first = devices.flat[0].slice_index
        inner = [
            slice(None) if name not in across else slice(_within(devices, dim, first))
            for dim, name in enumerate(mesh.axis_names)
        ]
        devices = devices[tuple(inner)]
    return list(devices.flat)


def _within(devices, dim: int, first: int) -> int:
    """How many devices along a mesh axis are of the first slice."""
    line = devices[tuple(slice(None) if d == dim else 0 for d in range(devices.ndim))]
    return sum(device.slice_index == first for device in line)


def speed_of(
    times: Timeline, run: config.Config, topology: topologies.Topology, flops: float | None
) -> Speed:
    """The speed of a train step.

    `flops`: that one device computes in matrix products; None: unknown.
    """
    tokens = run.batch.size * run.batch.sequence_length / times.step
    reached = utilization.of(run, topology.chip, topology.num_devices)
    peak, dtype = topology.chip.peak(reached.dtype)
    program = None if flops is None else (flops + times.kernel_flops) / times.step / peak
    each = tokens / topology.num_devices
    return Speed(tokens, each, dtype, reached.shares(tokens), program)
