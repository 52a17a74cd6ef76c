"""Optimizers and learning-rate schedules by optax: what is ours is which parameters they treat how.

Matrices decay and norms, biases and position tables do not; Muon orthogonalises the matrices of the
blocks and leaves embedding and head to AdamW. Clipping, the average of parameters (EMA) and skipped
updates are in `llmx.step`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax
from optax import contrib

from llmx import sharding


@dataclasses.dataclass
class OptimizerConfig:
    """Optimizer, schedule and what is done to gradients before them."""

    name: str = "adamw"  # a name in OPTIMIZERS
    learning_rate: float = 3e-4  # peak
    schedule: str = "cosine"  # a name in SCHEDULES
    warmup_steps: int = 100  # linear from 0
    decay_steps: int = 0  # wsd: steps of the final decay; 0 = a fifth of the run
    final_fraction: float = 0.1  # learning rate at the end, as a fraction of the peak
    b1: float = 0.9  # momentum
    b2: float = 0.95  # second moment (adamw, muon's adamw; lion's second)
    eps: float = 1e-8  # added to the root of the second moment
    weight_decay: float = 0.1  # decoupled, on matrices only
    clip_norm: float = 1.0  # global norm that gradients are scaled down to; 0 = off
    ema_decay: float = 0.0  # keep an average of parameters with this decay; 0 = off


# ---------------------------------------------------------------------------------------- schedules


def _after_warmup(config: OptimizerConfig, decay: optax.Schedule) -> optax.Schedule:
    """`decay` of the updates since the warm-up, behind a linear warm-up; the first update moves."""
    warmup = optax.linear_schedule(0.0, config.learning_rate, config.warmup_steps)
    joined = optax.join_schedules([warmup, decay], [config.warmup_steps])
    return lambda count: joined(count + 1)


def _rest(config: OptimizerConfig, total_steps: int) -> int:
    return max(1, total_steps - config.warmup_steps)


def constant(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """Warm-up, then the peak for ever."""
    return _after_warmup(config, optax.constant_schedule(config.learning_rate))


def cosine(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """Warm-up, then half a cosine down to the final fraction (arXiv 1608.03983)."""
    steps = _rest(config, total_steps)
    decay = optax.cosine_decay_schedule(config.learning_rate, steps, config.final_fraction)
    return _after_warmup(config, decay)


def linear(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """Warm-up, then a straight line down to the final fraction."""
    peak, steps = config.learning_rate, _rest(config, total_steps)
    decay = optax.linear_schedule(peak, peak * config.final_fraction, steps)
    return _after_warmup(config, decay)


def wsd(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """Warm-up, stable, then a linear decay over the last `decay_steps` (arXiv 2404.06395)."""
    peak, steps = config.learning_rate, _rest(config, total_steps)
    last = min(config.decay_steps or max(1, total_steps // 5), steps)
    decay = optax.linear_schedule(peak, peak * config.final_fraction, last)
    stable = optax.join_schedules([optax.constant_schedule(peak), decay], [steps - last])
    return _after_warmup(config, stable)


SCHEDULES: dict[str, Callable[[OptimizerConfig, int], optax.Schedule]] = {
    "constant": constant,
    "cosine": cosine,
    "linear": linear,
    "wsd": wsd,
}


# --------------------------------------------------------------------------------------- optimizers


def _is_names(leaf: Any) -> bool:
    return isinstance(leaf, tuple)


def decay_mask(axes: Any) -> Any:
    """True for the parameters that decay: those with a contracted dimension, by axis names."""
    whole = {"layers", "norm", "positions", "head_dim"}

    def decays(names):
        return len(set(names) - whole) >= 2

    return jax.tree.map(decays, axes, is_leaf=_is_names)


def _muon_dimensions(axes: Any) -> Any:
    """Which dimensions Muon contracts, in matrices of the blocks; None for what AdamW updates."""

    def dimensions(path, names):
        if not sharding.path_name(path).startswith("blocks") or "embed" not in names:
            return None
        width = names.index("embed")
        others = tuple(i for i, name in enumerate(names) if name != "layers" and i != width)
        if width == len(names) - 1:
            return contrib.MuonDimensionNumbers(reduction_axis=others, output_axis=(width,))
        return contrib.MuonDimensionNumbers(reduction_axis=(width,), output_axis=others)

    return jax.tree_util.tree_map_with_path(dimensions, axes, is_leaf=_is_names)


def _adamw(config, schedule, axes):
    return optax.adamw(
        schedule, b1=config.b1, b2=config.b2, eps=config.eps,
        weight_decay=config.weight_decay, mask=decay_mask(axes),
    )  # fmt: skip


def _lion(config, schedule, axes):
    return optax.lion(
        schedule, b1=config.b1, b2=config.b2,
        weight_decay=config.weight_decay, mask=decay_mask(axes),
    )  # fmt: skip


def _adafactor(config, schedule, axes):
    # Updates are not scaled by the parameters: the learning rate means what it means in AdamW.
    return optax.chain(
        optax.scale_by_factored_rms(),
        optax.clip_by_block_rms(1.0),
        optax.add_decayed_weights(config.weight_decay, mask=decay_mask(axes)),
        optax.scale_by_learning_rate(schedule),
    )


def _muon(config, schedule, axes):
    # consistent_rms gives updates the size of AdamW's, so that one learning rate serves both
    # (2502.16982).
    return contrib.muon(
        schedule, beta=0.95, weight_decay=config.weight_decay,
        adam_b1=config.b1, adam_b2=config.b2, eps=config.eps, adam_weight_decay=0.0,
        muon_weight_dimension_numbers=_muon_dimensions(axes), consistent_rms=0.2,
    )  # fmt: skip


OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "adamw": _adamw,  # arXiv 1711.05101
    "adafactor": _adafactor,  # arXiv 1804.04235
    "lion": _lion,  # arXiv 2302.06675
    "muon": _muon,  # kellerjordan.github.io/posts/muon, arXiv 2502.16982
}


def make_schedule(config: OptimizerConfig, *, total_steps: int) -> optax.Schedule:
    """The learning rate as a function of the number of updates made."""
    return SCHEDULES[config.schedule](config, total_steps)


def make(config: OptimizerConfig, *, axes: Any, total_steps: int) -> optax.GradientTransformation:
    """The configured optimizer with its schedule and masks.

    Args:
      config: names and numbers.
      axes: tree of logical axis names, one tuple per parameter.
      total_steps: length of the run, which the schedules need.
    """
    return OPTIMIZERS[config.name](config, make_schedule(config, total_steps=total_steps), axes)


def state_shardings(
    optimizer: optax.GradientTransformation, abstract_parameters: Any, parameter_shardings: Any
) -> Any:
    """Shardings of an optimizer's state: of each moment its parameter's, and whole for all else.

    A moment is known by its path, which ends in its parameter's, and by its shape; factored second
    moments and counters are small and stay whole.
    """
    named = zip(
        jax.tree_util.tree_leaves_with_path(abstract_parameters),
        jax.tree.leaves(parameter_shardings),
        strict=True,
    )
    known = {sharding.path_name(path): (leaf.shape, to) for (path, leaf), to in named}
    mesh = next(iter(known.values()))[1].mesh
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def one(path, leaf):
        for start in range(len(path)):
            shape, to = known.get(sharding.path_name(path[start:]), (None, whole))
            if shape == leaf.shape:
                return to
        return whole

    state = jax.eval_shape(optimizer.init, abstract_parameters)
    return jax.tree_util.tree_map_with_path(one, state)


def problems(config: OptimizerConfig) -> list[str]:
    """All that is wrong with the section, each with its remedy."""
    found = []
    for key, table in (("name", OPTIMIZERS), ("schedule", SCHEDULES)):
        if (value := vars(config)[key]) not in table:
            found.append(f"optimizer.{key}={value!r} is unknown: use one of {', '.join(table)}")
    for key, low, high in (
        ("learning_rate", 0, 1e3), ("final_fraction", 0, 1), ("b1", 0, 1), ("b2", 0, 1),
        ("eps", 0, 1), ("weight_decay", 0, 1e3), ("clip_norm", 0, 1e9), ("ema_decay", 0, 1),
    ):  # fmt: skip
        value = vars(config)[key]
        if not low <= value <= high or (key in ("b1", "b2", "ema_decay") and value == 1):
            found.append(f"optimizer.{key}={value} must be at least {low} and below {high}")
    # A warm-up longer than the run is no mistake: short trials of a long run's config have one.
    if config.warmup_steps < 0:
        found.append(f"optimizer.warmup_steps={config.warmup_steps} must be at least 0")
    if config.decay_steps < 0:
        found.append(
            f"optimizer.decay_steps={config.decay_steps} must not be negative; 0 = a fifth"
        )
    return found
