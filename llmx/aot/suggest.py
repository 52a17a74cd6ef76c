"""Variants of a config that need less memory, or that run faster and still fit.

The model and the number of devices stay. Six dimensions vary: the layout (ZeRO-1, 2, 3), when
weights are gathered, remat, the number of microbatches, tensor parallelism taken from the data
axes, and last the batch. Their costs are rough shares of a step's time, and serve only to order
the variants.
"""

import copy
import dataclasses
import itertools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from llmx import config, sharding
from llmx.aot import compiler
from llmx.aot.compiler import CompileError
from llmx.aot.report import Result, Trial
from llmx.config import checks

# In each dimension: least memory last. Other values are left as they are.
LAYOUT_COSTS = {"ddp": 0.0, "zero1": 0.01, "zero2": 0.02, "zero3": 0.06}
GATHER_COSTS = {"step": 0.0, "layer": 0.03}  # weights gathered once, or per layer and pass
# full: one more forward pass; sqrt: two
REMAT_COSTS = {"none": 0.0, "dots": 0.08, "names": 0.2, "full": 0.33, "sqrt": 0.67}
# Temporaries that remain with remat, roughly: enough to skip hopeless compilations.
REMAT_SHARES = {"none": 1.0, "dots": 0.5, "names": 0.3, "full": 0.1, "sqrt": 0.07}
_SAFETY_FACTOR = 2.0  # the estimate of temporaries may be too high by this much
DOUBLED_ACCUMULATION_COST = 0.05  # smaller products, weights gathered again
DOUBLED_TENSOR_COST = 0.06  # activations are communicated in every layer
HALVED_BATCH_COST = 0.25  # another run: more steps for the same tokens

_DOUBLINGS = range(5)
_HALVINGS = range(3)

MOST_TRIES = 8  # compilations of one search
ENOUGH = 2  # fitting variants that end it
MOST_TENSOR = 16  # devices along `tensor`, on a TPU slice


class Levels(NamedTuple):
    """How much memory each dimension saves; 0 = nothing."""

    layout: int
    gather: int
    remat: int
    accumulation: int
    tensor: int
    halvings: int  # of the batch

    def at_least(self, other: "Levels") -> bool:
        """Whether this saves at least as much as `other` in every dimension."""
        return all(map(operator.ge, self, other))


@dataclasses.dataclass(frozen=True)
class Variant:
    """A config that differs in a few values."""

    changes: dict[str, Any]  # {"remat": "full", "batch.accumulation": 2}
    levels: Levels
    cost: float  # of a step's time, compared with the config it is a variant of

    @property
    def flags(self) -> list[str]:
        return [f"--config.{key}={value}" for key, value in self.changes.items()]

    def of(self, run: config.Config) -> config.Config:
        run = copy.deepcopy(run)
        for key, value in self.changes.items():
            config.set_value(run, key, value)
        return run


def levels_of(run: config.Config) -> Levels:
    """The levels of a resolved config."""

    def level(value: str, costs: dict[str, float]) -> int:
        return list(costs).index(value) if value in costs else 0

    return Levels(
        layout=level(run.sharding.layout, LAYOUT_COSTS),
        gather=level(run.sharding.gather, GATHER_COSTS), remat=level(run.remat, REMAT_COSTS),
        accumulation=int(math.log2(run.batch.accumulation)),
        tensor=int(math.log2(run.mesh.tensor)), halvings=0,
    )  # fmt: skip


def variants(run: config.Config, *, most_tensor: int) -> list[Variant]:
    """All variants of a resolved config, cheapest first; some are invalid configs."""
    here = levels_of(run)
    # Devices along `tensor` come from fsdp, or from data.
    source = "fsdp" if run.mesh.fsdp > 1 else "data"
    shared = vars(run.mesh)[source] * run.mesh.tensor
    combinations = itertools.product(
        LAYOUT_COSTS if run.sharding.layout in LAYOUT_COSTS else [run.sharding.layout],
        GATHER_COSTS if run.sharding.gather in GATHER_COSTS else [run.sharding.gather],
        REMAT_COSTS if run.remat in REMAT_COSTS else [run.remat],
        sorted({1, *(run.batch.accumulation * 2**n for n in _DOUBLINGS)}),
        sorted({run.mesh.tensor, *(2**n for n in _DOUBLINGS if 2**n <= most_tensor)}),
        _HALVINGS,
    )
    listed = []
    for layout, gather, remat, accumulation, tensor, halvings in combinations:
        wanted = {
            "sharding.layout": layout, "sharding.gather": gather, "remat": remat,
            "batch.size": run.batch.size // 2**halvings, "batch.accumulation": accumulation,
            f"mesh.{source}": shared // tensor, "mesh.tensor": tensor,
        }  # fmt: skip
        changes = {k: value for k, value in wanted.items() if value != config.get_value(run, k)}
        if changes:
            levels = levels_of(Variant(changes, here, 0.0).of(run))._replace(halvings=halvings)
            listed.append(Variant(changes, levels, _cost(levels) - _cost(here)))
    return sorted(listed, key=lambda one: (one.cost, len(one.changes)))


class Measured(NamedTuple):
    """Bytes of one device."""

    levels: Levels
    state: int  # state and batch
    peak: int


def search(
    run: config.Config, measured: Measured, *, limit: int,
    state_of: Callable[[config.Config], int | None], peak_of: Callable[[Variant], int | None],
    most_tensor: int, enough: int, most_tries: int,
) -> None:  # fmt: skip
    """Compiles variants until `enough` of them fit, or `most_tries` were compiled.

    They are faster ones if the config fits, else ones with less memory; the fastest come first.
    Those that cannot fit by a rough estimate are not compiled.

    Args:
      run, measured: a resolved config, and its own levels and memory.
      limit: bytes of one device.
      state_of: bytes of state and batch of a config; None: it is impossible on the machine.
      peak_of: compiles a variant and returns its peak; None: the compiler refuses it.
      most_tensor: devices that are joined by fast links.
    """
    start, tries, fitting = measured, 0, []
    for variant in variants(run, most_tensor=most_tensor):
        levels = variant.levels
        faster = start.peak <= limit
        if not (start.levels.at_least(levels) if faster else levels.at_least(start.levels)):
            continue
        if any(map(levels.at_least, fitting)):
            continue  # a variant that saves less fits already
        if not _is_config(variant, run) or (state := state_of(variant.of(run))) is None:
            continue
        temporaries = (measured.peak - measured.state) * _share(levels) / _share(measured.levels)
        if state + temporaries / _SAFETY_FACTOR > limit:
            continue
        tries += 1
        if (peak := peak_of(variant)) is not None:
            measured = Measured(levels, state, peak)
            fitting += [levels] if peak <= limit else []
        if len(fitting) == enough or tries == most_tries:
            return


def _share(levels: Levels) -> float:
    """Temporaries, roughly, as a share of those without any saving."""
    remat = list(REMAT_SHARES.values())[levels.remat]
    return remat / 2.0 ** (levels.accumulation + levels.tensor + levels.halvings)


def _is_config(variant: Variant, run: config.Config) -> bool:
    if run.batch.size % 2**variant.levels.halvings:
        return False
    try:
        checks.resolve(variant.of(run), math.prod(vars(run.mesh)[axis] for axis in sharding.AXES))
    except config.ConfigError:
        return False
    return True


def _cost(levels: Levels) -> float:
    tables = (LAYOUT_COSTS, GATHER_COSTS, REMAT_COSTS)
    doublings = (DOUBLED_ACCUMULATION_COST, DOUBLED_TENSOR_COST, HALVED_BATCH_COST)
    costs = [list(table.values())[level] for table, level in zip(tables, levels[:3], strict=True)]
    return sum(costs) + sum(map(operator.mul, doublings, levels[3:]))


def suggest(result: Result, *, log: Callable[[str], None]) -> list[Trial]:
    """Compiles variants of a run: with less memory until some fit, or faster ones if it fits."""
    trials: list[Trial] = []
    topology = result.topology

    def state_of(run: config.Config) -> int | None:
        try:
            return compiler.state_bytes(run, topology)
        except ValueError:
            return None

    def peak_of(variant: Variant) -> int | None:
        flags = tuple(variant.flags)
        log(f"trying {' '.join(flags)}")
        try:
            tried = compiler.compile(variant.of(result.run), topology)
        except CompileError as error:
            trials.append(Trial(flags, None, False, 0.0, str(error).splitlines()[1]))
            return None
        trials.append(Trial(flags, tried.memory.peak, tried.fits, tried.compile_seconds))
        return tried.memory.peak

    here = Measured(levels_of(result.run), sum(result.state.values()), result.memory.peak)
    search(
        result.run, here, limit=result.memory.limit, state_of=state_of, peak_of=peak_of,
        most_tensor=topology.shape[1] if topology.platform == "gpu" else MOST_TENSOR,
        enough=ENOUGH, most_tries=MOST_TRIES,
    )  # fmt: skip
    return trials
