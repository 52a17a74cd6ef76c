"""Compressed gradients: int8, the largest (top-k), low rank (PowerSGD).

Each step every replica takes the gradient of its own rows; the compressor sums the replicas' shares
and keeps what it leaves out as error-feedback residuals. Works with every optimizer.

`top_k` may have the three means by which Deep Gradient Compression (arXiv 1712.01887) makes up for
gradients that come late. Momentum correction: each replica exchanges its own momentum, so that what
waits has the weight that it would have had; momentum factor masking: where it was sent, momentum
begins anew; and a ramp: the fraction falls from 1/4 by quarters.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from llmx.contract import Gradients, Phase, Strategy, Timetable
from llmx.sync import phases, reshard
from llmx.sync.compressors import Compressor, Group, Residuals, Tensor
from llmx.sync.config import SyncConfig
from llmx.sync.replicas import COMPRESSED, MEAN, Replicas, StrategyInputs

RAMP = "ramp_"  # phases of the ramp: ramp_1, ramp_2, ...


class Compressed(NamedTuple):
    """What is kept from step to step."""

    residuals: Residuals  # of the compressor, by parameter name
    momentum: dict[str, jax.Array]  # top_k: of each replica, [n, ...]; {} = without


def make(inputs: StrategyInputs) -> Strategy:
    replicas, config = inputs.replicas, inputs.config
    own = {}
    if momentum_of(config):
        own = {name: replicas.of_all(leaf) for name, leaf in replicas.like_parameters().items()}
    abstract = Compressed(replicas.abstract_residuals(), own)

    def resharded(saved: Compressed, layers: reshard.Layers) -> Compressed:
        return Compressed(
            reshard.residuals(saved.residuals, abstract.residuals, layers),
            reshard.of_replicas(saved.momentum, abstract.momentum, layers),
        )

    names = (*(RAMP + str(i + 1) for i in range(len(ramp(config)))), COMPRESSED)
    update = phases.updated(inputs)
    own_phases = {
        name: Phase(
            phases.shared_params, inputs.replica_gradient, _reduce(at_phase(replicas, name)), update
        )
        for name in names
    }
    return phases.in_steps(inputs, abstract, own_phases, resharded)


def _reduce(replicas: Replicas) -> Callable:
    """(Gradients, Compressed) -> both after the exchange."""
    b1 = momentum_of(replicas.config)

    def reduce(found: Gradients, sync: Compressed) -> tuple[Gradients, Compressed]:
        if not b1:
            sums, residuals = replicas.summed_shares(replicas.shares(found), found, sync.residuals)
            return sums, Compressed(residuals, sync.momentum)
        shares = replicas.shares(found)
        momentum = {name: b1 * sync.momentum[name] + (1 - b1) * g for name, g in shares.items()}
        sums, residuals = replicas.summed_shares(momentum, found, sync.residuals)
        # What was sent has left no residual. Of what is always sent in full, momentum goes on.
        for name, error in residuals.errors.items():
            momentum[name] = jnp.where(error == 0, 0, momentum[name])
        return sums, Compressed(residuals, momentum)

    return reduce


def momentum_of(config: SyncConfig) -> float:
    return config.momentum if config.strategy == "top_k" else 0.0


def ramp(config: SyncConfig) -> list[float]:
    """Fractions of the ramp's phases, which have equal parts of `ramp_steps`."""
    found, fraction = [], 0.25
    while config.strategy == "top_k" and config.ramp_steps and fraction > config.fraction:
        found.append(fraction)
        fraction /= 4
    return found


def timetable(config: SyncConfig, rates: Sequence[float]) -> Timetable:
    """The mean in the warm-up, then the ramp."""
    fractions = ramp(config)

    def phase_of(step: int, freeze_step: int = -1) -> str:
        if step < config.warmup_steps:
            return MEAN
        done = step - config.warmup_steps
        if fractions and done < config.ramp_steps:
            return RAMP + str(1 + done * len(fractions) // config.ramp_steps)
        return COMPRESSED

    return Timetable(len(rates), phase_of)


def at_phase(replicas: Replicas, phase: str) -> Replicas:
    """The replicas with the fraction that they exchange in a phase."""
    if not phase.startswith(RAMP):
        return replicas
    fraction = ramp(replicas.config)[int(phase.removeprefix(RAMP)) - 1]
    config = dataclasses.replace(replicas.config, fraction=fraction)
    return dataclasses.replace(replicas, config=config)


def sends(replicas: Replicas, program: str | tuple[int, ...]) -> tuple[list[Tensor], Compressor]:
    """All tensors, by the compressor at the phase's fraction."""
    fraction = at_phase(replicas, str(program)).config.fraction

    def messages(tensor: Tensor, group: Group):
        group = dataclasses.replace(group, fraction=fraction)
        return replicas.compressor.messages(tensor, group)

    return list(replicas.tensors.values()), replicas.compressor._replace(messages=messages)


def conflicts(config: Any) -> list[str]:
    """What the largest gradients cannot go with."""
    sync, problems = config.sync, phases.conflicts(config)
    if sync.momentum and not sync.error_feedback:
        problems.append(
            f"sync.momentum={sync.momentum} with sync.error_feedback=False: momentum begins anew "
            "where it was sent, which only residuals show; set sync.momentum=0"
        )
    if sync.momentum and config.optimizer.name in ("adamw", "lamb") and config.optimizer.b1:
        problems.append(
            f"sync.momentum={sync.momentum} with optimizer.b1={config.optimizer.b1}: replicas "
            "exchange momentum, and the optimizer would take momentum of it; set optimizer.b1=0"
        )
    return problems
