"""Optimizers and learning-rate schedules by optax: what is ours is which parameters they treat how,
and where Muon orthogonalises them (`llmx.step.muon`).

Matrices decay and norms, biases and position tables do not; Muon orthogonalises the matrices of the
blocks and leaves embedding and head to AdamW. Clipping, the average of parameters (EMA) and skipped
updates are in `llmx.step`.

AdamW and LAMB are Adam's direction and a *tail*: decay, trust ratio, learning rate. 1-bit Adam,
1-bit LAMB and 0/1 Adam put another head before the same tail (`llmx.sync`).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from llmx.contract import Optimizer
from llmx.runtime import bounds
from llmx.runtime.bounds import bounded, choice
from llmx.sharding import stacks, trees
from llmx.step import balance, factored, moments, muon, trust_ratio


def _without(*names: str) -> dict:
    """What a key needs that these optimizers do not look at."""
    return {"optimizer.name": {"not": names}}


@dataclasses.dataclass
class OptimizerConfig:
    """Optimizer, schedule and what is done to gradients before them."""

    # A warm-up longer than the run is no error: short trials of a long run have one.

    name: str = choice("adamw", lambda: OPTIMIZERS)  # a name in OPTIMIZERS
    learning_rate: float = bounded(3e-4, at_least=0, at_most=1000)  # peak
    schedule: str = choice("cosine", lambda: SCHEDULES)  # a name in SCHEDULES
    warmup_steps: int = bounded(100, at_least=0)  # linear from 0
    # wsd: steps of the final decay; 0 = a fifth of the run
    decay_steps: int = bounded(
        0, at_least=0, remedy="0 = a fifth of the run", needs={"optimizer.schedule": ("wsd",)}
    )
    # learning rate at the end, as a fraction of the peak
    final_fraction: float = bounded(
        0.1, at_least=0, at_most=1, needs={"optimizer.schedule": {"not": ("constant",)}}
    )
    # momentum; Muon's is 0.95
    b1: float = bounded(0.9, at_least=0, below=1, needs=_without("adafactor"))
    # second moment (adamw, lamb, muon's adamw; lion's second); 0 = 0.95, of lion 0.99
    b2: float = bounded(
        0.0, at_least=0, below=1, remedy="0 = 0.95, of lion 0.99", needs=_without("adafactor")
    )
    # added to the root of the second moment
    eps: float = bounded(1e-8, at_least=0, at_most=1, needs=_without("adafactor", "lion"))
    # "fp32" | "bf16" | "int8": how moments are kept; "auto" = as the master parameters
    moments: str = choice("auto", moments.NAMES)
    weight_decay: float = bounded(0.1, at_least=0, at_most=1000)  # decoupled, on matrices only
    # global norm that gradients are scaled down to; 0 = off
    clip_norm: float = bounded(1.0, at_least=0, at_most=1e9)
    # keep an average of parameters with this decay; 0 = off
    ema_decay: float = bounded(0.0, at_least=0, below=1)

    @property
    def beta2(self) -> float:
        """`b2`, or the optimizer's own: Lion's momentum is to be longer than Adam's second moment
        (arXiv 2302.06675)."""
        return self.b2 or {"lion": 0.99}.get(self.name, 0.95)


def _after_warmup(config: OptimizerConfig, decay: optax.Schedule) -> optax.Schedule:
    """`decay` of the steps since the warm-up, behind a linear warm-up; the first step moves."""
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


_IS_NAMES = lambda leaf: isinstance(leaf, tuple)  # noqa: E731


def decay_mask(axes: Any) -> Any:
    """True for the parameters that decay: those with a contracted dimension, by axis names."""
    whole = {"layers", "first", "norm", "positions", "head_dim", "loads", "experts", "groups"}
    decays = lambda names: len(set(names) - whole) >= 2  # noqa: E731
    return jax.tree.map(decays, axes, is_leaf=_IS_NAMES)


def _matrices(axes: Any) -> dict[str, tuple[str, ...]]:
    """Logical axes of the parameters that decay, by name."""
    decays = trees.named(decay_mask(axes))
    names = zip(decays, jax.tree.leaves(axes, is_leaf=_IS_NAMES), strict=True)
    return {name: of for name, of in names if decays[name]}


def _muon_dimensions(axes: Any) -> Any:
    """Which dimensions Muon contracts, in matrices of layers and of their experts; None for what
    AdamW updates."""

    def dimensions(names, decays):
        sides = stacks.sides(names)
        if names[0] not in stacks.LAYERS or not decays or len(sides) != 2:
            return None
        return contrib.MuonDimensionNumbers(*sides)

    return jax.tree.map(dimensions, axes, decay_mask(axes), is_leaf=_IS_NAMES)


def _adam(config):
    return optax.scale_by_adam(b1=config.b1, b2=config.beta2, eps=config.eps)


def _adamw_tail(config, schedule, axes):
    return (
        optax.add_decayed_weights(config.weight_decay, mask=decay_mask(axes)),
        optax.scale_by_learning_rate(schedule),
    )


def _lamb_tail(config, schedule, axes):
    decays = decay_mask(axes)
    return (
        optax.add_decayed_weights(config.weight_decay, mask=decays),
        trust_ratio.scale_by_trust_ratio(axes, decays, config.weight_decay),
        optax.scale_by_learning_rate(schedule),
    )


def _lion(config, schedule, axes):
    decay = dict(weight_decay=config.weight_decay, mask=decay_mask(axes))
    return optax.lion(schedule, b1=config.b1, b2=config.beta2, **decay)


def clip_by_matrix_rms(axes: Any, most: float) -> optax.GradientTransformation:
    """Scales each matrix's update down to a root mean square of `most` (arXiv 1804.04235, 6).

    Layers and experts that are stacked in one array are matrices of their own, as they are where
    they are not stacked.
    """

    def clipped(names, update):
        inner = tuple(i for i, name in enumerate(names) if name not in stacks.STACKED)
        rms = jnp.sqrt(jnp.mean(jnp.square(update), axis=inner, keepdims=True))
        return update / jnp.maximum(1.0, rms / most)

    def update(updates, state, params=None):
        return jax.tree.map(clipped, axes, updates, is_leaf=_IS_NAMES), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def _adafactor(config, schedule, axes):
    # Updates are not scaled by the parameters: the learning rate means what it means in AdamW.
    return optax.chain(
        factored.scale_by_factored_rms(axes),
        clip_by_matrix_rms(axes, 1.0),
        optax.add_decayed_weights(config.weight_decay, mask=decay_mask(axes)),
        optax.scale_by_learning_rate(schedule),
    )


def _muon(config, schedule, axes, splits=None):
    """`optax.contrib.muon` on a mesh, with a state of the same structure."""
    dimensions = _muon_dimensions(axes)
    is_leaf = lambda of: of is None or isinstance(of, contrib.MuonDimensionNumbers)  # noqa: E731
    labels = jax.tree.map(lambda of: "adam" if of is None else "muon", dimensions, is_leaf=is_leaf)
    found = jax.tree.leaves(dimensions, is_leaf=is_leaf)
    splits = jax.tree.leaves(splits) if splits is not None else [None] * len(found)
    mine = [pair for pair in zip(found, splits, strict=True) if pair[0] is not None]
    orthogonalized = muon.scale_by_orthogonalized_momentum(mine, beta=0.95, eps=config.eps)
    return optax.partition(
        {
            "muon": optax.chain(
                orthogonalized,
                optax.identity(),  # where optax's has its scale: states are alike
                optax.add_decayed_weights(config.weight_decay),
                optax.scale_by_learning_rate(schedule),
            ),
            "adam": optax.adamw(
                schedule, b1=config.b1, b2=config.beta2, eps=config.eps, weight_decay=0.0,
                nesterov=True,
            ),
        },
        labels,
    )  # fmt: skip


def _behind_adam(tail: Callable) -> Callable[..., optax.GradientTransformation]:
    return lambda config, schedule, axes: optax.chain(_adam(config), *tail(config, schedule, axes))


# What follows Adam's direction.
TAILS = {"adamw": _adamw_tail, "lamb": _lamb_tail}

OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "adamw": _behind_adam(_adamw_tail),  # arXiv 1711.05101
    "adafactor": _adafactor,  # arXiv 1804.04235
    "lion": _lion,  # arXiv 2302.06675
    "muon": _muon,  # kellerjordan.github.io/posts/muon, arXiv 2502.16982
    "lamb": _behind_adam(_lamb_tail),  # arXiv 1904.00962
}
# Those that exchange parts of an update by themselves: they are also told how it is split.
EXCHANGING = ("muon",)


def kept_shapes(
    config: OptimizerConfig, shape: tuple[int, ...], axes: tuple[str | None, ...]
) -> tuple[tuple[int, ...], ...]:
    """The arrays that an optimizer keeps of a parameter: of its shape, or with 1 in place of the
    dimensions that they are means over. Of an optimizer of a program that is not here two of its
    shape are assumed, as Adam has."""
    if config.name not in OPTIMIZERS:
        return shape, shape
    return _kept_shapes(OPTIMIZERS[config.name], shape, axes, *vars(config).values())


@functools.lru_cache(maxsize=4096)
def _kept_shapes(optimizer: Callable, shape, axes, *values: Any) -> tuple[tuple[int, ...], ...]:
    """`values`: of the fields of an `OptimizerConfig`, which itself has no hash."""
    config = OptimizerConfig(*values)
    made = optimizer(config, optax.constant_schedule(config.learning_rate), {"": axes})
    state = jax.eval_shape(made.init, {"": jax.ShapeDtypeStruct(shape, jnp.float32)})
    return tuple(leaf.shape for leaf in jax.tree.leaves(state) if _is_of(leaf.shape, shape))


def num_moments(config: OptimizerConfig) -> tuple[int, int]:
    """Arrays as large as the parameters that an optimizer keeps, for matrices of the blocks and for
    other matrices, where these are large enough to be factored."""
    block = (2, 256, 384), ("layers", "embed", "mlp")
    other = (512, 256), ("vocab", "embed")
    return tuple(kept_shapes(config, *each).count(each[0]) for each in (block, other))


def _is_of(shape: tuple[int, ...], param: tuple[int, ...]) -> bool:
    """Whether an array of a state is of a parameter's shape, or of means over some dimensions."""
    same = len(shape) == len(param) > 0
    return same and all(size in (1, full) for size, full in zip(shape, param, strict=True))


def problems(config: OptimizerConfig) -> list[str]:
    """All that is wrong with the section, each with its remedy."""
    found = bounds.problems(config, "optimizer.")
    if config.name == "adafactor" and config.moments not in ("auto", "fp32"):
        found.append(
            f"optimizer.moments={config.moments!r} with optimizer.name='adafactor': its second "
            "moments are rows and columns, and it has no first; set optimizer.moments='auto', or "
            "use optimizer.name='adamw'"
        )
    return found


def make_schedule(
    config: OptimizerConfig, *, total_steps: int, factors: Mapping[int, float] | None = None
) -> optax.Schedule:
    """The learning rate as a function of the step, from 0.

    `factors`: {step: what the rate is multiplied with from there on}.
    """
    schedule = SCHEDULES[config.schedule](config, total_steps)
    if not factors:
        return schedule

    def scaled(count):
        scale = 1.0
        for first, factor in factors.items():
            scale = scale * jnp.where(count >= first, factor, 1.0)
        return schedule(count) * scale

    return scaled


def make(
    config: OptimizerConfig, *, axes: Any, total_steps: int, splits: Any = None, head: Any = None,
    factors: Mapping[int, float] | None = None, param: jnp.dtype | None = None,
    bias_rate: float = 0.0,
) -> Optimizer:  # fmt: skip
    """The configured optimizer with its schedule and masks.

    Args:
      config: names and numbers.
      axes: tree of logical axis names, one tuple per parameter.
      total_steps: length of the run, which the schedules need.
      splits: tree of the shardings of an update, over whose mesh axes Muon communicates; None =
        the compiler decides.
      head: a transformation that takes the place of Adam's, in front of the same tail.
      factors: of the learning rate, see `make_schedule`.
      param: dtype of the master parameters; None = fp32.
      bias_rate: see `balance.with_bias_rate`.
    """
    schedule, tail = make_schedule(config, total_steps=total_steps, factors=factors), None
    told = dict(splits=splits) if config.name in EXCHANGING else {}
    whole = OPTIMIZERS[config.name](config, schedule, axes, **told)
    if config.name in TAILS:
        tail = optax.chain(*TAILS[config.name](config, schedule, axes))
        # The tail's parts in one chain with the head: states lie side by side.
        whole = optax.chain(head, *TAILS[config.name](config, schedule, axes)) if head else whole
    param = jnp.dtype(param or jnp.float32)
    kept = moments.resolved(config.moments, param)
    if (kept, param) != ("fp32", jnp.float32):
        whole = moments.kept_as(kept, whole, _matrices(axes))
        tail = moments.in_fp32(tail) if tail else None
    if any("loads" in names for names in jax.tree.leaves(axes, is_leaf=_IS_NAMES)):
        whole = balance.with_bias_rate(whole, bias_rate)
    return Optimizer(whole, tail, schedule)


def abstract_state(optimizer: optax.GradientTransformation, params: Any, shardings: Any) -> Any:
    """Shapes with shardings of an optimizer's state: of each moment its parameter's sharding, all
    else whole.

    A moment is known by its path, which ends in its parameter's, and by its shape; means of it are
    split along the dimensions that they have, and counters stay whole. Scales of 8-bit moments are
    split as their parameter, but whole along the dimension of their blocks where these cross
    shards.

    Args:
      optimizer: made of a tree of parameters.
      params: their shapes.
      shardings: theirs while they are updated.
    """
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    splits = jax.tree.leaves(shardings)
    pairs = zip(trees.named(params).items(), splits, strict=True)
    known = {name: (leaf.shape, to) for (name, leaf), to in pairs}
    whole = jax.sharding.NamedSharding(splits[0].mesh, jax.sharding.PartitionSpec())

    def one(path, leaf):
        shape, to = known.get(moments.owner_of(path, known), ((), whole))
        if shape != leaf.shape:
            scales = moments.scales_sharding(path, leaf.shape, shape, to)
            to = scales or (_without_means(leaf.shape, to) if _is_of(leaf.shape, shape) else whole)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=to)

    return jax.tree_util.tree_map_with_path(one, jax.eval_shape(optimizer.init, params))


def _without_means(shape: tuple[int, ...], to: jax.sharding.NamedSharding) -> Any:
    """`to` for an array of means, whose other dimensions have the size 1."""
    entries = zip(shape, to.spec.partitions, strict=False)
    spec = (None if size == 1 else entry for size, entry in entries)
    return to.update(spec=jax.sharding.PartitionSpec(*spec))
