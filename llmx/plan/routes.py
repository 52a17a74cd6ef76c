"""How long the messages of a step take on a machine's links, each by itself."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from llmx import sharding
from llmx.aot import links, topologies
from llmx.plan.machines import Machine
from llmx.plan.traffic import Message


@dataclasses.dataclass(frozen=True)
class _Chip:
    """What `jax.experimental.mesh_utils` asks of a TPU to place it."""

    id: int
    coords: tuple[int, ...]
    core_on_chip: int
    device_kind: str
    slice_index: int = 0
    process_index: int = 0
    platform: str = "tpu"


@functools.lru_cache(maxsize=8)
def _chips(shape: tuple[int, ...], dies: int, kind: str) -> tuple[_Chip, ...]:
    places = itertools.product(*(range(size) for size in reversed(shape)), range(dies))
    return tuple(
        _Chip(number, tuple(reversed(place[:3])), place[3], kind)
        for number, place in enumerate(places)
    )


@functools.lru_cache(maxsize=256)
def _positions(
    shape: tuple[int, ...], dies: int, kind: str, mesh: tuple[tuple[str, int], ...]
) -> np.ndarray:
    """int[devices, 4], of a mesh that jax places on a torus: coordinates and die. Many candidates
    of a search have the same mesh."""
    placed = sharding.make_mesh(dict(mesh), devices=_chips(shape, dies, kind))
    return np.array([(*chip.coords, chip.core_on_chip) for chip in placed.devices.flat])


@dataclasses.dataclass(frozen=True, eq=False)
class Routes:
    """The links between the devices of a mesh on a machine."""

    machine: Machine
    sizes: Mapping[str, int]  # of mesh axes, outermost first
    across: Sequence[str] = ()  # axes that cross slices, as `mesh.across_slices`

    @functools.cached_property
    def _inner(self) -> dict[str, int]:
        """The mesh of one slice."""
        return {name: size // self._outer(name) for name, size in self.sizes.items()}

    def _outer(self, name: str) -> int:
        """How many slices an axis crosses: where several do, the outermost fill first."""
        if name not in self.across:
            return 1
        left = self.machine.topology.num_slices
        for axis in self.sizes:
            if axis in self.across:
                part = math.gcd(self.sizes[axis], left)
                if axis == name:
                    return part
                left //= part
        return 1

    @functools.cached_property
    def _links(self) -> links.Machine:
        topology = self.machine.topology
        if self.machine.on_cpu:
            return links.Memory(self.machine.rates.link, self.machine.rates.start)
        if self.machine.on_gpu:
            return links.Hosts(np.arange(topology.num_devices) // topology.shape[1],
                               self.machine.rates)  # fmt: skip
        shape = (*topology.shape, 1, 1)[:3]
        kind, dies = topology.device_kind, topology.chip.devices_per_chip
        positions = _positions(shape, dies, kind, tuple(self._inner.items()))
        wraps = (*topologies.wraps(topology.shape), False, False)[:3]
        return links.Torus(positions, shape, wraps, self.machine.rates)

    @functools.cache  # noqa: B019 - lives as long as the mesh
    def _group(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The first group of devices along some axes of one slice."""
        numbers = np.arange(math.prod(self._inner.values())).reshape(tuple(self._inner.values()))
        at = tuple(slice(None) if name in axes else 0 for name in self._inner)
        return tuple(numbers[at].ravel().tolist())

    def seconds(self, message: Message) -> float:
        """The time of one of these messages on free links.

        Raises ValueError for one that leaves its slice or host where no bandwidth is known there.
        """
        rates, group = self.machine.rates, self._members(message)
        slices = math.prod(map(self._outer, message.axes))
        if rates.network is None and (slices > 1 or self._leaves_host(message)):
            raise ValueError(self._unknown(message))
        if message.kind == "collective-permute":
            if slices > 1:
                return links.slices_route(message.bytes, rates).duration()
            return self._inside(message)
        inside = self._inside(message) if len(group) > 1 else 0.0
        if slices == 1:
            return inside
        sent = links.PASSES.get(message.kind, 1.0) * message.bytes * (1 - 1 / slices) / len(group)
        return inside + links.slices_route(sent, rates).duration()

    def _members(self, message: Message) -> tuple[int, ...]:
        """The first group of devices that exchange a message."""
        group = self._group(message.axes)
        if message.kind == "collective-permute":
            return group
        return group[: message.size]  # neighbours along an axis, where it is not all

    def _inside(self, message: Message) -> float:
        """Seconds on the links of one slice, or of the hosts: they grow as the bytes do."""
        key = message.kind, message.axes, message.size
        if key not in self._of_a_byte:
            self._of_a_byte[key] = self._route(message, 1.0)
        route = self._of_a_byte[key]
        return route.latency + max(route.seconds.values(), default=0.0) * message.bytes

    @functools.cached_property
    def _of_a_byte(self) -> dict[tuple, links.Route]:
        return {}

    def _route(self, message: Message, num_bytes: float) -> links.Route:
        group = self._members(message)
        groups = [group]
        if message.kind == "collective-permute":
            groups = list(zip(group, (*group[1:], group[0]), strict=True))
        return self._links.route(message.kind, num_bytes, groups)

    def links_of(self, message: Message) -> str:
        """Which links a message takes: those of one name carry one message after the other. On a
        torus by mesh axes, which may share links that are counted apart here."""
        if math.prod(map(self._outer, message.axes)) > 1:
            return "between slices"
        if not self.machine.on_gpu:  # an axis of a torus has its own
            return ",".join(message.axes)
        return "between hosts" if self._leaves_host(message) else "inside a host"

    def _leaves_host(self, message: Message) -> bool:
        key = message.kind, message.axes, message.size
        if self.machine.on_gpu and key not in self._leaving:
            hosts = self._links.hosts[list(self._members(message))]
            self._leaving[key] = len(np.unique(hosts)) > 1
        return self._leaving.get(key, False)

    @functools.cached_property
    def _leaving(self) -> dict[tuple, bool]:
        return {}

    def _unknown(self, message: Message) -> str:
        topology = self.machine.topology
        between = "hosts" if self.machine.on_gpu else "slices"
        return (
            f"{topology.name}: the bandwidth between {between} of {topology.chip.name}, over which "
            f"{','.join(message.axes)} goes, is not known: rates.network=None; give it in a "
            'hardware file, "rates": {"network": BYTES_PER_SECOND_OF_A_DEVICE}, with --hardware '
            "(docs/plan.md)"
        )


@functools.lru_cache(maxsize=256)
def on(machine: Machine, mesh: tuple[tuple[str, int], ...], across: tuple[str, ...]) -> Routes:
    """Of the mesh axes with their sizes: the same object for the same mesh, of which a search times
    many candidates."""
    return Routes(machine, dict(mesh), across)
