"""Neighbours of a config that need less memory, or more and run faster, by what they cost in speed.

The model and the number of devices stay; six dials turn: the layout (ZeRO-1, 2, 3), when weights
are gathered, remat, the number of microbatches, tensor parallelism taken from the data axes, and
as a last resort the batch. Their costs are rough shares of a step's time, good for an order and no
more.
"""

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

from llmx import config, sharding
from llmx.aot import compiler, topologies
from llmx.aot.compiler import CompileError
from llmx.aot.report import Result, Trial
from llmx.config import checks

# Within a dial: least memory last. A value that is not here is left as it is.
LAYOUT_COSTS = {"ddp": 0.0, "zero1": 0.01, "zero2": 0.02, "zero3": 0.06}
GATHER_COSTS = {"step": 0.0, "layer": 0.03}  # weights gathered once, or per layer and pass
REMAT_COSTS = {"none": 0.0, "dots": 0.08, "names": 0.2, "full": 0.33}  # full: one more forward pass
# What remat leaves of the temporaries, roughly: enough to see what is not worth a compilation.
REMAT_SHARES = {"none": 1.0, "dots": 0.5, "names": 0.3, "full": 0.1}
_BENEFIT_OF_DOUBT = 2.0
DOUBLED_ACCUMULATION_COST = 0.05  # smaller products, weights gathered again
DOUBLED_TENSOR_COST = 0.06  # activations travel in every layer
HALVED_BATCH_COST = 0.25  # another run: more steps for the same tokens

_DOUBLINGS = range(5)
_MOST_HALVINGS = 3


@dataclasses.dataclass(frozen=True)
class Levels:
    """How far each dial is turned towards less memory; 0 = least."""

    layout: int
    gather: int
    remat: int
    accumulation: int
    tensor: int
    halvings: int  # of the batch

    def at_least(self, other: "Levels") -> bool:
        """Whether no dial is turned less far than in `other`."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return all(mine >= theirs for mine, theirs in pairs)


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
        """`run` with the changes."""
        run = copy.deepcopy(run)
        for key, value in self.changes.items():
            config.set_value(run, key, value)
        return run


def levels_of(run: config.Config) -> Levels:
    """Where the dials of a resolved config stand."""
    return Levels(
        layout=_level(run.sharding.layout, LAYOUT_COSTS),
        gather=_level(run.sharding.gather, GATHER_COSTS),
        remat=_level(run.remat, REMAT_COSTS),
        accumulation=int(math.log2(run.batch.accumulation)),
        tensor=int(math.log2(run.mesh.tensor)),
        halvings=0,
    )


def variants(run: config.Config, *, most_tensor: int) -> list[Variant]:
    """All variants of a resolved config, cheapest first; some are no valid configs.

    Args:
      run: a resolved config.
      most_tensor: devices that fast links join.
    """
    here = levels_of(run)
    dials = itertools.product(
        _ladder(run.sharding.layout, LAYOUT_COSTS),
        _ladder(run.sharding.gather, GATHER_COSTS),
        _ladder(run.remat, REMAT_COSTS),
        sorted({1, *(run.batch.accumulation * 2**n for n in _DOUBLINGS)}),
        sorted({run.mesh.tensor, *(2**n for n in _DOUBLINGS if 2**n <= most_tensor)}),
        range(_MOST_HALVINGS),
    )
    made = []
    for layout, gather, remat, accumulation, tensor, halvings in dials:
        wanted = {
            "sharding.layout": layout,
            "sharding.gather": gather,
            "remat": remat,
            "batch.size": run.batch.size // 2**halvings,
            "batch.accumulation": accumulation,
            **_mesh(run, tensor),
        }
        changes = {
            key: value for key, value in wanted.items() if value != config.get_value(run, key)
        }
        if not changes:
            continue
        levels = dataclasses.replace(
            levels_of(Variant(changes, here, 0.0).of(run)), halvings=halvings
        )
        made.append(Variant(changes, levels, _cost(levels) - _cost(here)))
    return sorted(made, key=lambda one: (one.cost, len(one.changes)))


@dataclasses.dataclass(frozen=True)
class Measured:
    """Bytes of one device."""

    levels: Levels
    state: int  # state and batch
    peak: int


def search(
    run: config.Config,
    measured: Measured,
    *,
    limit: int,
    state_of: Callable[[config.Config], int | None],
    peak_of: Callable[[Variant], int | None],
    most_tensor: int,
    enough: int,
    most_tries: int,
) -> None:
    """Compiles variants until `enough` of them fit, or `most_tries` were compiled.

    A config that fits is followed by faster ones, one that does not by those with less memory;
    cheapest in speed first, without those that cannot fit as far as one can see.

    Args:
      run: a resolved config.
      measured: what `run` itself takes.
      limit: bytes of one device.
      state_of: bytes of state and batch of a config, which needs no compilation; None: it does
        not go with the machine.
      peak_of: compiles a variant; None: the compiler refuses it.
      most_tensor: see `variants`.
      enough, most_tries: when to stop.
    """
    start, tries, fitting = measured, 0, []
    for variant in variants(run, most_tensor=most_tensor):
        levels = variant.levels
        faster = start.peak <= limit
        if not (start.levels.at_least(levels) if faster else levels.at_least(start.levels)):
            continue
        if any(map(levels.at_least, fitting)):
            continue  # less was enough; what saves less than one that failed came before it
        if not _is_config(variant, run) or (state := state_of(variant.of(run))) is None:
            continue
        temporaries = (measured.peak - measured.state) * _share(levels) / _share(measured.levels)
        if state + temporaries / _BENEFIT_OF_DOUBT > limit:
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


def _ladder(value: str, costs: dict[str, float]) -> list[str]:
    return list(costs) if value in costs else [value]


def _level(value: str, costs: dict[str, float]) -> int:
    return list(costs).index(value) if value in costs else 0


def _cost(levels: Levels) -> float:
    return (
        list(LAYOUT_COSTS.values())[levels.layout]
        + list(GATHER_COSTS.values())[levels.gather]
        + list(REMAT_COSTS.values())[levels.remat]
        + DOUBLED_ACCUMULATION_COST * levels.accumulation
        + DOUBLED_TENSOR_COST * levels.tensor
        + HALVED_BATCH_COST * levels.halvings
    )


def _mesh(run: config.Config, tensor: int) -> dict[str, int]:
    """A mesh with another tensor axis: its devices come from fsdp, else from data."""
    giver = "fsdp" if run.mesh.fsdp > 1 else "data"
    return {
        f"mesh.{giver}": vars(run.mesh)[giver] * run.mesh.tensor // tensor,
        "mesh.tensor": tensor,
    }


# With --suggest: compilations take their time.
MOST_TRIES = 8
ENOUGH = 2
MOST_TENSOR = 16  # of a TPU slice


# --------------------------------------------------------------------------------------- suggest


def suggest(result: Result, *, log: Callable[[str], None]) -> list[Trial]:
    """Compiles variants of a run: with less memory until some fit, or faster ones if it fits."""
    trials: list[Trial] = []
    topology = result.topology

    def state_of(run: config.Config) -> int | None:
        try:
            return _state_of(run, topology)
        except ValueError:  # mesh and machine do not go together
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


def _state_of(run: config.Config, topology: topologies.Topology) -> int:
    from llmx.config import recipe

    setup = recipe.make_setup(run, devices=topologies.devices(topology))
    batch = setup.abstract_batch(run.batch.size, run.batch.sequence_length)
    return sum(compiler.state_bytes(setup, batch).values())
