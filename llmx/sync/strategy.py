"""How the replicas along `data` synchronize: a strategy is one file and one row of `STRATEGIES`.

Every step or now and then, on gradients, momentum or parameters, in full or compressed. A run
begins with `warmup_steps` of "mean".
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from llmx.model import apply, precision
from llmx.runtime import bounds
from llmx.sharding import trees
from llmx.sync import compressed, late, local, mean, one_bit, phases, rounds, zero_one
from llmx.sync.compressors import COMPRESSORS, Compressor
from llmx.sync.config import SyncConfig
from llmx.sync.replicas import COMPRESSED, MEAN, unmatched


class Technique(NamedTuple):
    """A row of `STRATEGIES`."""

    make: Callable  # StrategyInputs -> contract.Strategy
    compressor: Compressor = COMPRESSORS["mean"]  # of what is not summed in full
    # (SyncConfig, learning rates of all steps) -> contract.Timetable
    timetable: Callable = phases.after_warmup(COMPRESSED)
    # (Replicas, phase or fragments of an outer step) -> (tensors, Compressor) that are exchanged
    sends: Callable = phases.sends
    conflicts: Callable = phases.conflicts  # Config -> what it cannot go with, as texts
    # the optimizer updates what all replicas share, and may do so layer by layer
    shared_update: bool = True


_SIGNS = COMPRESSORS["signs"]
_ONE_BIT = Technique(one_bit.make, _SIGNS, conflicts=one_bit.conflicts, shared_update=False)
_ZERO_ONE = Technique(
    zero_one.make, _SIGNS, zero_one.timetable, zero_one.sends, zero_one.conflicts,
    shared_update=False,
)  # fmt: skip
_LOCAL = Technique(
    rounds.make, timetable=local.timetable, sends=local.sends, conflicts=local.conflicts,
    shared_update=False,
)  # fmt: skip
_TOP_K = Technique(
    compressed.make, COMPRESSORS["top_k"], compressed.timetable, compressed.sends,
    compressed.conflicts,
)  # fmt: skip
_STALE = Technique(late.make, shared_update=False)

STRATEGIES: dict[str, Technique] = {
    "mean": Technique(mean.make, timetable=phases.after_warmup(MEAN), conflicts=lambda config: []),
    "int8": Technique(compressed.make, COMPRESSORS["int8"]),  # arXiv 1511.04561, 1610.02132
    "top_k": _TOP_K,  # arXiv 1704.05021, 1712.01887
    "power_sgd": Technique(compressed.make, COMPRESSORS["low_rank"]),  # arXiv 1905.13727
    "stale": _STALE,  # stale synchronous parallel, Ho et al. 2013
    "one_bit": _ONE_BIT,  # arXiv 2102.02888
    "one_bit_lamb": _ONE_BIT,  # arXiv 2104.06069
    "zero_one": _ZERO_ONE,  # arXiv 2202.06009
    "local_sgd": _LOCAL,  # arXiv 1805.09767
    "diloco": _LOCAL,  # arXiv 2311.08105, 2501.18512
}


def compresses(config: SyncConfig) -> bool:
    """Whether anything is sent otherwise than in full."""
    return compressor_of(config) is not COMPRESSORS["mean"]


def compressor_of(config: SyncConfig) -> Compressor:
    """How what is not summed in full is sent."""
    technique = STRATEGIES[config.strategy]
    if technique is _LOCAL and config.outer_format != "fp32":
        return COMPRESSORS[config.outer_format]
    return technique.compressor


def conflicts(config: Any) -> list[str]:
    """What the strategy of a Config cannot go with, each with its remedy."""
    if found := problems(config.sync):
        return found
    technique = STRATEGIES[config.sync.strategy]
    own = [] if technique.shared_update else _conflicts_of_own_updates(config)
    return [
        *technique.conflicts(config), *own, *rounds.conflicts(config), *_unmatched(config),
    ]  # fmt: skip


def _unmatched(config: Any) -> list[str]:
    """Patterns of parameters that are not compressed that the model has none of."""
    if not config.sync.uncompressed or config.adapters.rank:
        return []
    try:
        names = list(trees.named(apply.abstract_parameters(config.model)[0]))
    except (TypeError, ValueError):  # of an own model, whose check says so
        return []
    return [
        f"sync.uncompressed: {pattern!r} matches no parameter: they are {', '.join(names)}"
        for pattern in unmatched(config.sync, names)
    ]


def _conflicts_of_own_updates(config: Any) -> list[str]:
    """What a strategy that computes with the state of every replica's optimizer, or averages it,
    cannot go with."""
    found = []
    name = f"sync.strategy={config.sync.strategy!r}"
    remedy = "or use strategy 'mean' or a compressor of gradients, as 'int8'"
    policy = precision.POLICIES.get(config.precision)
    if policy is not None and policy.param != jnp.float32:
        found.append(
            f"precision={config.precision!r} with {name}: differences of replicas' parameters are "
            f"less than {policy.param.name} can tell; use precision='bf16', {remedy}"
        )
    if config.optimizer.moments not in ("auto", "fp32"):
        found.append(
            f"optimizer.moments={config.optimizer.moments!r} with {name}, which computes with "
            f"the moments of every replica: set optimizer.moments='auto', {remedy}"
        )
    if config.offload.optimizer:
        found.append(
            f"offload.optimizer with {name}, which computes with the optimizer's state of each "
            f"replica: leave offload.optimizer out, {remedy}"
        )
    return found


def problems(config: SyncConfig) -> list[str]:
    """All that is wrong with the section, each with its remedy."""
    if config.strategy not in STRATEGIES:
        remedy = bounds.use_one_of(config.strategy, STRATEGIES)
        return [f"sync.strategy={config.strategy!r} is unknown: {remedy}"]
    return bounds.problems(config, "sync.")
