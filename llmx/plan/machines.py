"""Machines that a run is planned for: their devices, and what one of these reaches."""

import dataclasses

from llmx.aot import links, topologies
from llmx.aot.topologies import Topology
from llmx.plan import calibrations
from llmx.plan.gemm import Core


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices, how they are joined, and how fast they are."""

    topology: Topology
    core: Core
    rates: links.Rates  # what one device reaches of its links

    @property
    def on_gpu(self) -> bool:
        return self.topology.platform == "gpu"


def parse(name: str) -> Machine:
    """The machine called `name`, as `llmx.aot --topology` has it. ValueError for unknown names."""
    topology = topologies.parse(name)
    key = (topologies.TPUS | topologies.GPUS)[topology.family].chip
    return Machine(topology, calibrations.core_of(key), links.rates_of(topology.chip))
