"""How layers of several kinds repeat, and which of them a compiled program has in loops.

The layers are a loop over periods of kinds; within one, and behind the last, neighbours of one kind
are a loop of their own (`llmx.model.layers`).
"""

import itertools

from llmx.config.axes import WRITTEN_OUT
from llmx.model import remat
from llmx.model.families import ModelConfig
from llmx.plan.sizes import Sizes

MOST_BODIES = 3  # as many as were seen


def number(sizes: Sizes) -> float:
    """How many periods of several kinds of layers there are, with a part of one behind the last; 1
    where there is no loop over them."""
    model = sizes.run.model
    period = remat.period_of(model.block_kinds)
    return 1.0 if period == 1 or model.num_blocks < 2 * period else model.num_blocks / period


def share_in_loops(sizes: Sizes) -> float:
    """The share of layers that are in a loop of their own within that over periods."""
    if number(sizes) == 1:
        return 0.0
    kinds = sizes.run.model.layer_kinds
    period, rest = _series(sizes.run.model)
    whole = len(kinds) // remat.period_of(kinds)
    in_loops = lambda series: sum(num for num in series if num > WRITTEN_OUT)  # noqa: E731
    return (whole * in_loops(period) + in_loops(rest)) / len(kinds)


def _series(model: ModelConfig) -> tuple[list[int], list[int]]:
    """How many neighbours of one kind follow one another in a period, and behind the last whole
    one."""
    kinds, period = model.layer_kinds, remat.period_of(model.layer_kinds)
    parts = kinds[:period], kinds[len(kinds) - len(kinds) % period :]
    return tuple([len(list(of)) for _, of in itertools.groupby(part)] for part in parts)


def bodies(model: ModelConfig) -> int:
    """How many layers XLA:GPU has at a time, `MOST_BODIES` or fewer. Neighbours of one kind are a
    loop, in a period and behind the last whole one; of the loops behind one another one runs, while
    those of one or two turns are written out, and begin before the others are done."""
    series = [num for part in _series(model) for num in part]
    found = sum(num <= WRITTEN_OUT for num in series) + any(num > WRITTEN_OUT for num in series)
    return min(found, MOST_BODIES)
