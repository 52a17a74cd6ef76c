"""How long a collective takes between GPUs: rings over NVLink in a node, adapters between nodes.

Alpha-beta: a time for the start and each hop, and bytes over bandwidth, so short messages reach less
of it. A ring of n devices with g members in each node passes through each device

    all-gather, reduce-scatter    (n-1)/n V       V: bytes of the whole array
    all-reduce                  2 (n-1)/n V

and as many through the g adapters of its members in a node where it leaves the node. A message
between two devices is V over one adapter. The rates are those of `llmx.aot.links`, with the shares
of a `gemm.Calibration`.
"""

from llmx.aot import links
from llmx.plan.gemm import Core

PASSES = {"all-gather": 1.0, "reduce-scatter": 1.0, "all-reduce": 2.0}


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


def seconds(kind: str, num_bytes: float, size: int, per_node: int, rates: links.Rates) -> float:
    """The time of a collective.

    Args:
      kind: of `PASSES`, or "collective-permute": each sends its array to one other.
      num_bytes: of the whole array: after an all-gather, before a reduce-scatter, of each device in
        an all-reduce and a permute.
      size: devices in the group.
      per_node: of these in one node; for a permute 1 where messages leave the node, else 2.
      rates: of `rates_of`.
    """
    if size == 1:
        return 0.0
    leaves = per_node < size
    if leaves and rates.network is None:
        raise ValueError(f"a group of {size} leaves its nodes, and no network bandwidth is known")
    if kind == "collective-permute":
        hop, bandwidth = (rates.network_hop, rates.network) if leaves else (rates.hop, rates.link)
        return rates.start + hop + num_bytes / bandwidth
    passes = PASSES[kind]
    passed = passes * num_bytes * (size - 1) / size
    inside = passed / rates.link if per_node > 1 else 0.0
    outside = passed / (per_node * rates.network) if leaves else 0.0
    far = size // per_node if leaves else 0
    hops = (size - max(far, 1)) * rates.hop + far * rates.network_hop
    return rates.start + passes * hops + max(inside, outside)
