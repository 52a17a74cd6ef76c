"""Which program each step of a run is, and the pieces that phases of several strategies share.

A run begins with `warmup_steps` of "mean". What a strategy synchronizes in a step, or between
steps, is known before the run, or from the report of an earlier step: no conditional surrounds a
collective.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from llmx.contract import Gradients, Phase, State, Strategy, Timetable
from llmx.model.training_loss import scaled
from llmx.sync import reshard as reshard_lib
from llmx.sync.compressors import Compressor, Tensor
from llmx.sync.config import SyncConfig
from llmx.sync.replicas import COMPRESSED, MEAN, Replicas, StrategyInputs


def after_warmup(phase: str) -> Callable[[SyncConfig, Sequence[float]], Timetable]:
    """The timetable of a strategy with one phase of its own, by the learning rates of all steps."""

    def timetable(config: SyncConfig, rates: Sequence[float]) -> Timetable:
        def phase_of(step: int, freeze_step: int = -1) -> str:
            if config.warmup_steps < 0:
                return phase if 0 <= freeze_step <= step - 2 else MEAN
            return MEAN if step < config.warmup_steps else phase

        return Timetable(len(rates), phase_of)

    return timetable


def sends(replicas: Replicas, program: str | tuple[int, ...]) -> tuple[list[Tensor], Compressor]:
    """A strategy whose own phase exchanges all tensors sends them by its compressor."""
    return list(replicas.tensors.values()), replicas.compressor


def conflicts(config: Any) -> list[str]:
    """What a strategy that freezes no variance cannot go with."""
    problems = conflicts_of_all(config)
    if config.sync.warmup_steps == -1:
        problems.append(
            f"sync.warmup_steps=-1 waits for the variance of Adam to settle, which strategy "
            f"{config.sync.strategy!r} does not freeze: use a number of steps"
        )
    return problems


def conflicts_of_all(config: Any) -> list[str]:
    """What no strategy but "mean" goes with."""
    if config.mesh.stage > 1 and config.pipeline.schedule == "pipedream_2bw":
        return [
            f"sync.strategy={config.sync.strategy!r} with pipeline.schedule='pipedream_2bw': "
            "replicas exchange what a step ends with, and that schedule leaves a batch in flight; "
            "use another schedule, or strategy 'mean'"
        ]
    return []


def needs_optimizer(config: Any, name: str) -> list[str]:
    """What a strategy that is a form of one optimizer cannot go with."""
    if config.optimizer.name == name:
        return []
    return [
        f"sync.strategy={config.sync.strategy!r} is a form of {name} and "
        f"optimizer.name={config.optimizer.name!r}: set optimizer.name={name!r}, or use a "
        "strategy for any optimizer, as 'int8' or 'diloco'"
    ]


def keep(accepted: jax.Array, new: Any, old: Any) -> Any:
    """`new` where the update is accepted, else `old`."""
    return jax.tree.map(lambda new, old: jnp.where(accepted, new, old), new, old)


def shared_params(state: State) -> Any:
    """The parameters that all replicas share."""
    return state.params


def already_reduced(found: Gradients, sync: Any) -> tuple[Gradients, Any]:
    """Gradients that are reduced already."""
    return found, sync


def clipped(found: Gradients) -> Gradients:
    """With a tree that is multiplied by its factors."""
    if found.factors is None:
        return found
    return found._replace(tree=scaled(found.tree, found.factors), factors=None)


def updated(inputs: StrategyInputs) -> Callable:
    """The optimizer's update of the parameters that all replicas share."""

    def update(found: Gradients, state: State, sync: Any, accepted: jax.Array) -> State:
        state = inputs.update(
            found.tree, state, accepted, inputs.optimizer.whole, factors=found.factors
        )
        return state._replace(sync=keep(accepted, sync, state.sync))

    return update


def mean_phase(inputs: StrategyInputs) -> Phase:
    """Replicas average their gradients."""
    return Phase(shared_params, inputs.gradient, already_reduced, updated(inputs))


def in_steps(
    inputs: StrategyInputs, abstract: Any, own_phases: dict[str, Phase], reshard: Callable
) -> Strategy:
    """A strategy that synchronizes gradients within its steps, and whose state begins at zero.

    `abstract`: shapes with shardings of its state. `own_phases`: in addition to the mean.
    """
    return Strategy(
        abstract=(inputs.opt_state, abstract),
        init=lambda params: (inputs.optimizer.whole.init(params), reshard_lib.zeros(abstract)),
        phases={MEAN: mean_phase(inputs)} | own_phases, timetable=inputs.timetable,
        enter=lambda state, previous, phase: state, outer={}, scalars=lambda sync: {},
        reshard=reshard, messages=inputs.replicas.messages() if inputs.replicas else (0, ()),
    )  # fmt: skip


def exchanged(inputs: StrategyInputs, reduce: Callable) -> dict[str, Phase]:
    """Replicas take gradients of their own rows, which `reduce` sums."""
    update = updated(inputs)
    return {COMPRESSED: Phase(shared_params, inputs.replica_gradient, reduce, update)}
