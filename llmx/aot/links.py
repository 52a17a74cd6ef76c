"""How long a collective takes on the links that it travels over: an estimate, nothing is measured.

A group of devices is looked up where the mesh really put it, and takes of each link

    TPU   the axes x, y, z of the torus that its chips span: a ring of both directions where they
          fill an axis that wraps around, else a line, whose end has one link. Pieces travel along
          all axes at a time. Groups that share the links of an axis divide them. The two dies of a
          TPU7x share the links of their chip.
    GPU   the switch of a host, and beyond it the network adapter of each GPU: an all-gather of V
          bytes over h hosts with g members each brings V (h-1)/h / g through each adapter, while
          V (g-1)/g pass the switch.

Bytes that a device must receive, over the bandwidth of its links, with n devices: all-gather and
reduce-scatter (n-1)/n V, all-reduce twice that; all-to-all what crosses the middle of the longest
axis; a permute what the busiest link carries when messages go along one axis after the other. To
that comes a latency for every hop. Sources: jax-ml.github.io/scaling-book (pages "tpus", "sharding"
and "gpus"); NCCL's tables of latencies, src/graph/tuning.cc in github.com/NVIDIA/nccl.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from llmx.runtime import hardware

Groups = Sequence[Sequence[int]]

NETWORK = "network"  # between hosts of GPUs, and between TPU slices


@dataclasses.dataclass(frozen=True)
class Route:
    """What one execution of a collective takes of the links."""

    seconds: Mapping[str, float]  # of each link, for the bytes alone
    latency: float = 0.0

    def duration(self, bandwidth: float = 1.0) -> float:
        """Seconds from start to end on free links with `bandwidth` times their bandwidth."""
        return self.latency + max(self.seconds.values(), default=0.0) / bandwidth


@dataclasses.dataclass(frozen=True)
class Rates:
    """What one device reaches of its links."""

    link: float  # bytes/s: one ICI link in one direction; of a GPU, all NVLinks together
    network: float | None  # bytes/s beyond them; None: not published
    start: float  # seconds that a collective takes without bytes and hops
    hop: float  # seconds of one hop over a link
    network_hop: float


# A link reaches 0.9 of its peak, and a hop takes a microsecond (scaling book, "tpus", which lists
# 90 GB/s for a v5p link of 100). A message between slices passes two hosts: as in llmx.plan.
_ICI, _ICI_HOP, _SLICES_HOP = 0.9, 1e-6, 50e-6
# 370 of 450 GB/s is the most that all-reduces between eight H100s reach, with gigabytes on each;
# with 470 MB it was 150 (scaling book, "gpus"; not modelled). Latencies are those of NCCL's rings
# for short messages.
_NVLINK, _ADAPTER, _NCCL, _NVLINK_HOP, _ADAPTER_HOP = 0.82, 0.9, 6.6e-6, 0.6e-6, 2.7e-6
# Between the dies of a TPU7x: six times one ICI link (Cloud TPU documentation, "TPU7x").
_DIES = 6.0


def rates_of(chip: hardware.Chip) -> Rates:
    """The rates of one jax device of a chip."""
    network = chip.network_bandwidth
    if chip.topology.startswith("torus"):
        share = None if network is None else network / chip.devices_per_chip
        return Rates(_ICI * chip.link_bandwidth, share, 0.0, _ICI_HOP, _SLICES_HOP)
    links = _NVLINK * chip.link_bandwidth * chip.num_links
    share = None if network is None else _ADAPTER * network
    return Rates(links, share, _NCCL, _NVLINK_HOP, _ADAPTER_HOP)


# The bytes that a device receives, as a multiple of an all-gather's.
PASSES = {"all-gather": 1.0, "reduce-scatter": 1.0, "all-reduce": 2.0, "collective-broadcast": 1.0}


@dataclasses.dataclass(frozen=True, eq=False)
class Torus:
    """A TPU slice.

    `positions` [devices, 4]: of each logical device x, y, z of its chip, and its die.
    """

    positions: np.ndarray
    shape: tuple[int, ...]
    wraps: tuple[bool, ...]  # by axis: whether its last chip is linked to its first
    rates: Rates

    def route(self, kind: str, size: float, groups: Groups) -> Route:
        """The time of a collective of `size` bytes: whole arrays, as in `Collective.bytes`."""
        if kind == "collective-permute":
            return self._permute(size, groups)
        n = max(map(len, groups))
        group = next(group for group in groups if len(group) == n)
        where = self.positions[list(group)]
        chips = np.unique(where[:, :3], axis=0)
        axes = [_Axis.of(chips[:, axis], *self._axis(axis)) for axis in range(3)]
        axes = [axis for axis in axes if axis.span > 1]
        per_chip = n / len(chips)  # members of the group on one chip, and groups that it serves
        dies = len(np.unique(self.positions[:, 3]))
        sharing = dies / per_chip if axes else 1.0
        seconds: dict[str, float] = {}
        if axes:
            links = sum(axis.links for axis in axes) * self.rates.link
            if kind in ("all-to-all", "ragged-all-to-all"):
                middle = max(axis.span * per_chip / 4 / axis.links for axis in axes)
                bytes_in = (1 - 1 / len(chips)) * per_chip
                time = size * max(middle / self.rates.link, bytes_in / links) * sharing
            else:
                time = PASSES[kind] * size * (1 - 1 / len(chips)) * sharing / links
            seconds = {axis.name: time for axis in axes}
        if per_chip > 1:
            passes = PASSES.get(kind, 1.0)
            seconds["dies"] = passes * size * (1 - 1 / per_chip) / (_DIES * self.rates.link)
        hops = sum(axis.hops for axis in axes) + (per_chip > 1)
        return Route(seconds, self.rates.start + hops * self.rates.hop * PASSES.get(kind, 1.0))

    def _axis(self, axis: int) -> tuple[str, int, bool]:
        return "xyz"[axis], self.shape[axis], self.wraps[axis]

    def _permute(self, size: float, pairs: Groups) -> Route:
        """Messages between pairs, along x, then y, then z, the shorter way round."""
        loads: dict[tuple, int] = {}  # messages over each link in each direction
        used, longest = set(), 0
        for source, target in pairs:
            here, there = self.positions[source].copy(), self.positions[target]
            hops = 0
            for axis in range(3):
                name, length, wraps = self._axis(axis)
                distance = int(there[axis] - here[axis])
                if wraps and abs(distance) > length / 2:
                    distance -= int(math.copysign(length, distance))
                step = 1 if distance > 0 else -1
                for _ in range(abs(distance)):
                    link = (*here[:3], axis, step)
                    loads[link] = loads.get(link, 0) + 1
                    here[axis] = (here[axis] + step) % length
                    used.add(name)
                hops += abs(distance)
            longest = max(longest, hops)
        seconds = {name: size * max(loads.values()) / self.rates.link for name in used}
        if not used and any(source != target for source, target in pairs):
            seconds = {"dies": size / (_DIES * self.rates.link)}
        return Route(seconds, max(longest, 1) * self.rates.hop)


@dataclasses.dataclass(frozen=True)
class _Axis:
    """What a group gets of one axis of the torus."""

    name: str
    span: int  # chips of the group along it
    links: float  # into the chip that has fewest
    hops: int  # of a piece, at most

    @classmethod
    def of(cls, coordinates: np.ndarray, name: str, length: int, wraps: bool) -> "_Axis":
        where = np.unique(coordinates)
        span = len(where)
        # Chips of other groups between these: their groups use the same links.
        apart = max((int(where[-1] - where[0]) // (span - 1)), 1) if span > 1 else 1
        ring = wraps and span * apart == length and span > 1
        hops = apart * (span // 2 if ring else span - 1)
        return cls(name, span, (2 if ring else 1) / apart, hops)


@dataclasses.dataclass(frozen=True, eq=False)
class Hosts:
    """GPUs: a switch in each host, and an adapter of each GPU to the network between hosts."""

    hosts: np.ndarray  # [devices], the host of each logical device
    rates: Rates

    def route(self, kind: str, size: float, groups: Groups) -> Route:
        """The time of a collective of `size` bytes: whole arrays, as in `Collective.bytes`."""
        rates = self.rates
        if kind == "collective-permute":
            far = any(self.hosts[source] != self.hosts[target] for source, target in groups)
            if far and rates.network is not None:
                return Route({NETWORK: size / rates.network}, rates.start + rates.network_hop)
            return Route({} if far else {"nvlink": size / rates.link}, rates.start + rates.hop)
        n = max(map(len, groups))
        group = next(group for group in groups if len(group) == n)
        _, members = np.unique(self.hosts[list(group)], return_counts=True)
        h, g = len(members), int(members.min())
        if kind in ("all-to-all", "ragged-all-to-all"):
            inside, outside = size * (g - 1) / n, size * (n - g) / n
            passes = 1.0
        else:
            passes = PASSES[kind]
            inside, outside = passes * size * (g - 1) / g, passes * size * (h - 1) / h / g
        seconds = {}
        if g > 1:
            seconds["nvlink"] = inside / rates.link
        if h > 1 and rates.network is not None:
            seconds[NETWORK] = outside / rates.network
        hops = passes * ((g - 1) * rates.hop + (h - 1) * rates.network_hop)
        return Route(seconds, rates.start + hops)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Fake devices of one CPU: bytes sent are bytes copied."""

    bandwidth: float  # bytes/s of one device
    start: float  # seconds of a collective without bytes

    def route(self, kind: str, size: float, groups: Groups) -> Route:
        """The time of a collective of `size` bytes: whole arrays, as in `Collective.bytes`."""
        n = max(map(len, groups))
        sent = size if kind == "collective-permute" else size * (n - 1) / n
        return Route({"memory": PASSES.get(kind, 1.0) * sent / self.bandwidth}, self.start)


Machine = Torus | Hosts | Memory


def machine_of(
    chip: hardware.Chip, shape: Sequence[int], wraps: Sequence[bool], devices: Sequence
) -> Machine:
    """The links between `devices`: jax devices in the order of the program's logical ones.

    `shape`, `wraps`: of a slice of TPUs, by axis.
    """
    rates = rates_of(chip)
    if not chip.topology.startswith("torus"):
        return Hosts(np.array([device.process_index for device in devices]), rates)
    positions = np.array([(*device.coords, device.core_on_chip) for device in devices])
    padded = (*shape, 1, 1)[:3]
    return Torus(positions, padded, tuple(itertools.islice((*wraps, False, False), 3)), rates)


def slices_route(sent: float, rates: Rates) -> Route:
    """What one device sends through its host to other TPU slices, in bytes."""
    seconds = {} if rates.network is None else {NETWORK: sent / rates.network}
    return Route(seconds, rates.network_hop)
