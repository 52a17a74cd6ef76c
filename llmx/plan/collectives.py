"""How long a collective takes between GPUs: rings over NVLink in a node, adapters between nodes.

Alpha-beta: a time for the start and each hop, and bytes over bandwidth, so that short messages
reach less of it. A ring of n devices passes through each of them

    all-gather, reduce-scatter    (n-1)/n V       V: bytes of the whole array
    all-reduce                  2 (n-1)/n V

and where it leaves a node as many bytes through the adapters that it has there. An all-reduce may
take two trees instead, each for a half of V, in which a device that is a leaf of one is inside the
other: as each passes on V up and V down, 2 V, but in 2 log2 n hops in place of 2 (n-1), which many
devices with short messages gain by (Sanders, Speck and Traeff, "Two-tree algorithms for full
bandwidth broadcast, reduction and scan", 2009; NCCL has both). The shorter counts. A message
between two devices is V over one adapter. Latencies are those of `llmx.aot.links`, shares of the
bandwidth those of a `gemm.Calibration`.
"""

import math

from llmx.aot import links
from llmx.plan.gemm import Core


def rates_of(core: Core) -> links.Rates:
    """What one GPU reaches of its links."""
    chip, calibration = core.chip, core.calibration
    rates = links.rates_of(chip)
    network = chip.network_bandwidth
    return links.Rates(
        link=calibration.links * chip.link_bandwidth * chip.num_links,
        network=None if network is None else calibration.network * network,
        start=calibration.collective, hop=rates.hop, network_hop=rates.network_hop,
    )  # fmt: skip


def adapters_of(stride: int, per_node: int) -> int:
    """How many adapters a ring leaves a node by, of one that each GPU of the node has.

    `stride`: from one member to the next. `per_node`: members in one node. A group of neighbours
    has the adapters of all its members. Groups of every `stride`-th GPU leave a node at the same
    time, each by one adapter. The rule is taken from a100_multi_node.csv, of nodes with 800 Gb/s
    for 8 GPUs: with an adapter for each member, steps with data parallel groups beside 2- to 4-way
    tensor parallelism come out up to a tenth shorter. Another network may do better.
    """
    return per_node if stride == 1 else 1


def seconds(
    kind: str, num_bytes: float, size: int, *, per_node: int, adapters: int, rates: links.Rates
) -> float:
    """The time of a collective.

    Args:
      kind: of `links.PASSES`.
      num_bytes: of the whole array: after an all-gather, before a reduce-scatter, of each device in
        an all-reduce.
      size: devices in the group.
      per_node: of these in one node.
      adapters: that the ring leaves a node by: `adapters_of`.
      rates: of `rates_of`.

    Raises ValueError if the group leaves its node and the chip's network is not known.
    """
    if size == 1:
        return 0.0
    times = [_ring(kind, num_bytes, size, per_node, adapters, rates)]
    if kind == "all-reduce":
        times.append(_trees(num_bytes, size, per_node, adapters, rates))
    return rates.start + min(times)


def _trees(num_bytes: float, size: int, per_node: int, adapters: int, rates: links.Rates) -> float:
    """Two trees between nodes, in each of which a chain joins the devices of a node."""
    far = size // per_node if per_node < size else 1
    inside = 2 * num_bytes / rates.link if per_node > 1 else 0.0
    outside = 2 * num_bytes / (adapters * _network(rates)) if far > 1 else 0.0
    hops = (per_node - 1) * rates.hop + math.ceil(math.log2(far)) * rates.network_hop
    return 2 * hops + max(inside, outside)


def _ring(
    kind: str, num_bytes: float, size: int, per_node: int, adapters: int, rates: links.Rates
) -> float:
    passed = links.PASSES[kind] * num_bytes * (size - 1) / size
    inside = passed / rates.link if per_node > 1 else 0.0
    outside = passed / (adapters * _network(rates)) if per_node < size else 0.0
    far = size // per_node if per_node < size else 0
    hops = (size - max(far, 1)) * rates.hop + far * rates.network_hop
    return links.PASSES[kind] * hops + max(inside, outside)


def message_seconds(num_bytes: float, *, leaves_node: bool, rates: links.Rates) -> float:
    """The time of a message from one GPU to another. ValueError as `seconds`."""
    if leaves_node:
        return rates.start + rates.network_hop + num_bytes / _network(rates)
    return rates.start + rates.hop + num_bytes / rates.link


def _network(rates: links.Rates) -> float:
    if rates.network is None:
        raise ValueError(
            "a group leaves its node, but the chip's network_bandwidth is None: set it in the row "
            "of the chip (dataclasses.replace)"
        )
    return rates.network
