"""The report of `llmx.plan` on a model of clicks and a machine: what its tables take of a device.

Rows, what the optimizer keeps of them and exchanges are counted (`tables.costs`); the network is
small beside them, and is given an upper bound.
"""

import argparse
import copy
import math
from typing import Any

from llmx import sharding
from llmx.aot.report import size
from llmx.aot.topologies import Topology
from llmx.config import Config, checks, describe, table_checks
from llmx.model.recommender import apply as clicks
from llmx.plan import options, schedule_report
from llmx.plan.search import ADMITTED
from llmx.tables import cached, costs, placement, row_optimizers
from llmx.tables.by_id import DECAYED

# Of the network, each in fp32: parameters, their gradient, two moments.
COPIES, NUMBER = 4, 4
UNMODELLED = (
    "the time of a step, and the length of the run",
    "activations and exchanges of the network, and how the layout splits it",
    "what the compiler keeps beside the rows of a batch, and copies of ids that it sorts",
    "further rounds of an exchange, where ids are spread unevenly over the devices: each sends as "
    "much again",
)


def show(args: argparse.Namespace, config: Config, problems: list[str], topology: Topology):
    """The report as JSON and text. Raises ValueError for a wrong config, or a flag that is of other
    models."""
    if args.auto_mesh:
        problems = [*problems, "mesh='auto' is for decoders: set --config.mesh.data"]
    if wrong := options.given(args, options.OF_MACHINES):
        raise ValueError(
            f"{', '.join(wrong)} with model.recommender.name={config.model.recommender.name!r}: "
            "only memory and traffic of tables are counted; leave them out"
        )
    run = copy.deepcopy(config)
    run.launch.platform = topology.platform
    run = checks.resolve(run, topology.num_devices, problems=problems)
    found = of(run)
    shapes, _ = clicks.abstract_parameters(run.model)
    network = COPIES * NUMBER * sum(math.prod(leaf.shape) for leaf in shapes.values())
    state = {"rows": found.rows, "optimizer of rows": found.optimizer}
    held = state | {
        "network, at most": network, "rows of a batch, gradients": found.looked_up,
        "buffers of an exchange": found.buffers,
    }  # fmt: skip
    peak, limit = sum(held.values()), topology.hbm_bytes
    fits = peak <= ADMITTED * limit
    memory = {
        "peak": peak,
        "limit": limit,
        "admitted": ADMITTED,
        "fits": fits,
        "held": held,
        "refusal": "",
    }
    sizes = {axis: vars(run.mesh)[axis] for axis in sharding.AXES}
    head = {
        "model": f"{run.model.recommender.name}, tables split by {run.tables.split}, "
        f"{run.tables.optimizer}{_beside(run)}",
        "machine": f"{topology.name}: {topology.text}",
        "mesh": f"{sharding.mesh_text(sizes)}; layout {run.sharding.layout}",
        "batch": describe.batch_text(run),
    }  # fmt: skip
    report = {
        "run": {"config": args.config} | head, "machine": topology.name,
        "num_devices": topology.num_devices, "mesh": sizes, "memory": memory, "sent": found.sent,
        "not_counted": list(UNMODELLED),
    }  # fmt: skip
    return report, "\n".join([
        *(f"{name:<12}{text}" for name, text in head.items()), "",
        f"memory of a device: {size(peak)}, {peak / limit:.0%} of {size(limit)}: "
        f"{'fits' if fits else 'DOES NOT FIT'} (up to {ADMITTED:.0%} is admitted)",
        *schedule_report.columns([(name, size(number)) for name, number in held.items()]), "",
        *_sent_lines(found),
        *(f"not counted: {what}" for what in UNMODELLED),
    ])  # fmt: skip


def _beside(run: Config) -> str:
    """Where rows are that devices have not."""
    tables = run.tables
    if not tables.cache_rows:
        return ""
    return f"; a cache of {tables.cache_rows:,} rows of the host's {tables.host_gib:g} GiB"


def _sent_lines(found: costs.Costs) -> list[str]:
    if not sum(found.sent.values()):
        return ["a device sends nothing of tables", ""]
    rows = [("kind", "of", "sent")]
    rows += [("all-to-all", name, size(number)) for name, number in found.sent.items()]
    return ["sent by a device in a step, of tables", *schedule_report.columns(rows), ""]


def of(run: Config) -> costs.Costs:
    """What the tables of a resolved run take of a device."""
    devices = math.prod(vars(run.mesh)[axis] for axis in sharding.BATCH_AXES)
    tables, features = table_checks.tables_of(run), table_checks.features_of(run)
    if run.tables.cache_rows:
        table, features = cached.on_devices(tables, features, run.tables.cache_rows)
        tables = [table]
    groups = placement.placed(tables, features, devices)
    slots: dict[str, Any] = dict(row_optimizers.make(run.tables).slots)
    slots |= {DECAYED: False} if run.tables.weight_decay else {}
    return costs.of(
        groups, features, slots, records=run.batch.size // devices, multiple=run.tables.capacity
    )
