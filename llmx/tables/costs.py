"""What tables take of a device, counted: bytes of rows, of what optimizers keep, of exchanges.

Letters: B records of a device, K ids of a device, n devices, C rows that a device asks of each
other, W width.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from llmx.tables.config import Feature
from llmx.tables.placement import Group

NUMBER = 4  # bytes: rows, gradients and ids are of 32 bits


class Costs(NamedTuple):
    """Bytes of a device. All are of one round, the least that a step takes."""

    rows: int
    optimizer: int  # what it keeps of rows
    looked_up: int  # the rows of a batch and their gradients
    buffers: int  # of the largest exchange, what is sent and what is received
    sent: dict[str, float]  # in a step, by all-to-all: ids, rows, gradients


def capacity(group: Group, num_ids: int, multiple: float) -> int:
    """C: a multiple of an equal share of a device's ids."""
    share = math.ceil(multiple * num_ids / group.devices)
    return max(1, min(num_ids, group.slots, share))


def of(
    groups: Sequence[Group], features: Sequence[Feature], slots: Mapping[str, bool], *,
    records: int, multiple: float,
) -> Costs:  # fmt: skip
    """Of a step.

    Args:
      slots: of each row, and whether each of its numbers has one (`RowOptimizer.slots`).
      records: of a device.
      multiple: `tables.capacity`.
    """
    rows = optimizer = looked_up = 0
    lanes = {"ids": 0, "rows": 0, "gradients": 0}  # numbers in what goes to another device
    for group in groups:
        num_ids = records * sum(feature.columns for feature, _ in group.lookups(features))
        rows += NUMBER * group.slots * group.width
        kept = sum(group.width if each else 1 for each in slots.values())
        optimizer += NUMBER * group.slots * kept
        looked_up += 2 * NUMBER * num_ids * group.width
        each = capacity(group, num_ids, multiple)
        lanes["ids"] += each
        lanes["rows"] += each * group.width
        lanes["gradients"] += each * (group.width + 1)  # and the slot that each is for
    devices = groups[0].devices
    sent = {name: float(NUMBER * lane * (devices - 1)) for name, lane in lanes.items()}
    buffers = 2 * NUMBER * devices * max(lanes.values()) if devices > 1 else 0
    return Costs(rows, optimizer, looked_up, buffers, sent)
