"""Pruning while a run trains: masks are state, and a masked weight is exactly zero.

The weights with the lowest scores are pruned between steps, by a program of its own, and more of
them at each of its times: the share goes up by the cubic schedule of Zhu and Gupta (arXiv
1710.01878), fast at first. A weight that is pruned stays so. Its gradient is zero before replicas
reduce it and before it counts towards norms, and so are its moments from then on: what averages
with others of its matrix (Muon, low-rank compression, codes of few bits) may move it in an update,
after which it is set to zero again in the parameters, in those of each replica and in their
average. So no technique of a step has to know of masks.

Scores: the magnitude of the weight; or the movement -w g, summed over steps (arXiv 2005.07683),
which keeps weights that grow. Movement is of the weights that are left: masked weights do not come
back here, in difference to the paper.

Rewinding (arXiv 1912.05671): after the last pruning the weights that are left go back to what they
were at an early step, with a new optimizer state, and are trained again.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from llmx.contract import Constraint, Gradients, State
from llmx.model import adapters, sparsity
from llmx.model.ranks import is_within
from llmx.model.training_loss import TrainingLoss, placed
from llmx.pipeline.permutation import EMPTY, LAYERS, LayerPermutation
from llmx.runtime.bounds import bounded, choice
from llmx.sharding import trees
from llmx.step.gradients import measured

NAME = "pruning"  # in `State.extra`
NONE, MAGNITUDE, MOVEMENT, N_M, FIXED = "none", "magnitude", "movement", "n_m", "fixed"
METHODS = (NONE, MAGNITUDE, MOVEMENT, N_M, FIXED)
GLOBAL, LAYER = "global", "layer"
# Where a state has weights: the parameters, their average, those of each replica.
WEIGHTS = ("params", "ema", "sync/params")
PRUNE, REMEMBER, REWIND = "prune", "remember", "rewind"  # programs between steps


@dataclasses.dataclass
class PruningConfig:
    """Which weights become zero while the run trains, and stay so."""

    # "none"; the least by "magnitude" or "movement"; "n_m" = the least of each group of the pattern
    # by magnitude; "fixed" = those of `masks_from`
    method: str = choice(NONE, METHODS)
    # "global" = the least of all layers together | "layer" = of each weight of each layer
    scope: str = choice(GLOBAL, (GLOBAL, LAYER))
    sparsity: float = bounded(0.5, at_least=0, below=1)  # share that is pruned in the end
    pattern: str = "2:4"  # n_m: at most 2 of 4 neighbours along the summed dimension are not zero
    begin_step: int = bounded(0, at_least=0)  # steps taken when the schedule begins
    # steps taken when it ends; 0 = half of the run. All at once where it is begin_step
    end_step: int = bounded(0, at_least=0)
    every: int = bounded(10, at_least=1)  # steps between two times of pruning
    # which products: a module, "attention", or a product, "attention/query"
    products: tuple[str, ...] = adapters.MODULES
    # after the last pruning, weights go back to those after so many steps; -1 = they do not
    rewind_to: int = bounded(-1, at_least=-1, remedy="-1 = they do not")
    # fixed: the masks of a run, "WORKDIR" or "WORKDIR@STEP"; "" = where start_from's weights are 0
    masks_from: str = ""


class Pruning(NamedTuple):
    """What is kept from step to step. Trees of the pruned parameters only, shaped as they are."""

    masks: Any  # bool: whether a weight stays; split as the weights are
    sparsity: jax.Array  # share of these weights that is pruned, fp32 []
    scores: Any = ()  # movement: fp32, split as updates are
    early: Any = ()  # rewinding: all parameters as they were, in their dtype, split as updates are


def product_of(name: str) -> str:
    """ "mlp/up" of "blocks/mlp/up/kernel", or of "blocks/mlp/up" of experts."""
    return name.partition("/")[2].removesuffix("/kernel")


def prunable(axes: Any) -> dict[str, tuple[str, ...]]:
    """Logical axes of the weights that can be pruned, by name: of the layers' products and experts.
    Routers, factors of products and scales are left out."""
    leaves = jax.tree.leaves(axes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    named = trees.named(jax.tree.unflatten(jax.tree.structure(
        axes, is_leaf=lambda leaf: isinstance(leaf, tuple)), range(len(leaves))))  # fmt: skip
    found = {name: leaves[number] for name, number in named.items()}
    is_weight = lambda name, of: name.endswith("/kernel") or "experts" in of  # noqa: E731
    return {
        name: of for name, of in found.items()
        if of[0] in ("layers", "first") and "embed" in of and is_weight(name, of)
    }  # fmt: skip


def chosen(config: PruningConfig, axes: Any) -> dict[str, tuple[str, ...]]:
    """Logical axes of the weights that `config.products` names, by name."""
    return {
        name: of for name, of in prunable(axes).items()
        if is_within(product_of(name), config.products)
    }  # fmt: skip


def parse(pattern: str) -> tuple[int, int]:
    """(2, 4) of "2:4". Raises ValueError."""
    kept, size = map(int, pattern.split(":"))
    if not 0 < kept < size <= 64:
        raise ValueError(f"{pattern!r} is no pattern")
    return kept, size


def last_step(config: PruningConfig, total_steps: int) -> int:
    """Steps taken when the schedule ends."""
    return config.end_step or max(total_steps // 2, config.begin_step, 1)


def times(config: PruningConfig, total_steps: int) -> tuple[int, ...]:
    """After how many steps weights are pruned."""
    if config.method in (NONE, FIXED):
        return ()
    end = last_step(config, total_steps)
    return tuple(sorted({*range(config.begin_step, end, config.every), end} - {0}))


def is_time(config: PruningConfig, total_steps: int, taken: int) -> bool:
    """Whether weights are pruned after so many steps: whether they are in `times`."""
    if config.method in (NONE, FIXED) or not taken:
        return False
    end, since = last_step(config, total_steps), taken - config.begin_step
    return taken == end or (taken < end and since >= 0 and since % config.every == 0)


def share(config: PruningConfig, total_steps: int, step: int) -> float:
    """The share of `config.sparsity` that is pruned after `step` steps: 1 - (1 - t)^3, t the part
    of the schedule that is over."""
    end = last_step(config, total_steps)
    if step >= end:
        return 1.0
    over = (step - config.begin_step) / (end - config.begin_step)
    return 1 - (1 - max(over, 0.0)) ** 3


def constraints(
    config: PruningConfig, loss: TrainingLoss, order: LayerPermutation, *, total_steps: int,
    new_optimizer: Callable[[Any], tuple[Any, Any]],
) -> Mapping[str, Constraint]:  # fmt: skip
    """The constraint by name; {} where nothing is pruned.

    `order`: in which the parameters have their layers. `new_optimizer`: params -> new (opt_state,
    sync).
    """
    if config.method == NONE:
        return {}
    return {NAME: _Masks(config, loss, order, total_steps, new_optimizer).constraint()}


@dataclasses.dataclass(frozen=True, eq=False)
class _Masks:
    """The constraint's functions."""

    config: PruningConfig
    loss: TrainingLoss
    order: LayerPermutation
    total_steps: int
    new_optimizer: Callable

    def constraint(self) -> Constraint:
        programs = {PRUNE: self.pruned} if self.times else {}
        if self.config.rewind_to >= 0:
            programs |= {REMEMBER: self.remembered, REWIND: self.rewound}
        return Constraint(
            abstract=self.abstract(), init=self.init, gradients=self.gradients, after=self.after,
            hold=self.hold, refreshed=self.refreshed, programs=programs, due_after=self.due_after,
            scalars=lambda own: {"sparsity": own.sparsity},
        )  # fmt: skip

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        return chosen(self.config, self.loss.axes)

    @property
    def times(self) -> tuple[int, ...]:
        return times(self.config, self.total_steps)

    @property
    def filled(self) -> dict[str, np.ndarray]:
        """By name, which rows are layers: stages of unequal length have rows that are none."""
        shapes = trees.named(self.loss.params)
        slots = np.array(self.order.slots) != EMPTY
        rows = {name: np.ones(shapes[name].shape[0], bool) for name in self.axes}
        if self.order.slots:
            rows |= {name: slots for name in rows if name.startswith(f"{LAYERS}/")}
        return rows

    def abstract(self) -> Pruning:
        shapes, updates = trees.named(self.loss.params), trees.named(self.loss.updates)

        def masks(name):
            leaf = shapes[name]
            to = leaf.sharding.with_memory_kind(None)
            return jax.ShapeDtypeStruct(leaf.shape, jnp.bool_, sharding=to)

        whole = NamedSharding(self.loss.mesh, PartitionSpec())
        fp32 = lambda shape, to: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=to)  # noqa: E731
        scores, early = (), ()
        if self.config.method == MOVEMENT:
            scores = trees.nest({n: fp32(shapes[n].shape, updates[n]) for n in self.axes})
        if self.config.rewind_to >= 0:
            early = jax.tree.map(placed, self.loss.params, self.loss.updates)
        masks = trees.nest({name: masks(name) for name in self.axes})
        return Pruning(masks, fp32((), whole), scores, early)

    def init(self, params: Any) -> Pruning:
        abstract, named = self.abstract(), trees.named(_on_device(params))
        is_fixed = self.config.method == FIXED and not self.config.masks_from
        stays = (lambda leaf: leaf != 0) if is_fixed else (lambda leaf: jnp.ones(leaf.shape, bool))
        masks = {name: stays(named[name]) for name in self.axes}
        return Pruning(
            trees.nest(masks), self.share_of(masks),
            jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract.scores),
            jax.tree.map(lambda like, leaf: leaf + 0, abstract.early, _on_device(params))
            if self.config.rewind_to >= 0 else (),
        )  # fmt: skip

    def share_of(self, masks: Mapping[str, jax.Array]) -> jax.Array:
        """The share that is pruned, fp32 []."""
        filled, pruned, total = self.filled, 0.0, 0
        for name, mask in masks.items():
            counts = jnp.sum(~mask, axis=tuple(range(1, mask.ndim)), dtype=jnp.uint32)
            pruned += jnp.sum(jnp.where(filled[name], counts, 0).astype(jnp.float32))
            total += int(filled[name].sum()) * math.prod(mask.shape[1:])
        return pruned / float(total)  # which may be above the largest int32

    def refreshed(self, own: Pruning) -> Pruning:
        share = _auto(self.share_of, own.sparsity)(trees.named(own.masks))
        return own._replace(sparsity=share)

    # --------------------------------------------------------------------------------- in the step

    def gradients(self, found: Gradients, own: Pruning) -> Gradients:
        """Zero where the mask is False; what is not finite stays so, for the guard to see."""
        zeroed = lambda leaf, mask: leaf * mask.astype(leaf.dtype)  # noqa: E731
        tree = _on_masked(found.tree, trees.named(own.masks), zeroed)
        return measured(found._replace(tree=tree))

    def after(self, own: Pruning, state: State, found: Gradients, accepted: jax.Array) -> Pruning:
        if self.config.method != MOVEMENT:
            return own
        params, grads = trees.named(_on_device(state.params)), trees.named(found.tree)
        scores = trees.named(own.scores)

        def moved(scores, params, grads, accepted):
            one = lambda s, p, g: s - p.astype(jnp.float32) * g.astype(jnp.float32)  # noqa: E731
            return {
                name: jnp.where(accepted, one(s, params[name], grads[name]), s)
                for name, s in scores.items()
            }

        of = lambda tree: {name: tree[name] for name in scores}  # noqa: E731
        new = _auto(moved, scores)(scores, of(params), of(grads), accepted)
        return own._replace(scores=trees.nest(new))

    def hold(self, state: State) -> State:
        return _on_masked(state, trees.named(state.extra[NAME].masks), _where, WEIGHTS)

    # ------------------------------------------------------------------------------- between steps

    def due_after(self, step: int) -> tuple[str, ...]:
        taken, found = step + 1, ()
        if self.config.rewind_to == taken:
            found += (REMEMBER,)
        if is_time(self.config, self.total_steps, taken):
            found += (PRUNE,)
            if self.config.rewind_to >= 0 and taken == last_step(self.config, self.total_steps):
                found += (REWIND,)
        return found

    def remembered(self, state: State) -> State:
        """With the parameters as they are, to go back to."""
        own = state.extra[NAME]
        early = jax.tree.map(jax.sharding.reshard, _on_device(state.params), self.loss.updates)
        return _unless_stopped(state, _with(state, own._replace(early=early)))

    def rewound(self, state: State) -> State:
        """With the weights that are left as they were, and a new optimizer state."""
        to = lambda tree: jax.tree.map(lambda leaf: jax.typeof(leaf).sharding, tree)  # noqa: E731

        def make(early, ema):
            opt_state, sync = self.new_optimizer(early)
            if ema:
                ema = jax.tree.map(lambda old, new: new.astype(old.dtype), ema, early)
            return early, opt_state, sync, ema

        like = (state.params, state.opt_state, state.sync, state.ema)
        params, opt_state, sync, ema = jax.sharding.auto_axes(make, out_sharding=to(like))(
            state.extra[NAME].early, state.ema
        )
        new = state._replace(params=params, opt_state=opt_state, sync=sync, ema=ema)
        new = jax.tree.map(_in_memory_of, new, state)
        return _unless_stopped(state, self.hold(new))

    def pruned(self, state: State) -> State:
        """With the masks that the schedule wants after `state.step` steps."""
        own = state.extra[NAME]
        weights = own.scores if self.config.method == MOVEMENT else state.params
        named, masks = trees.named(_on_device(weights)), trees.named(own.masks)
        shardings = {name: jax.typeof(mask).sharding for name, mask in masks.items()}
        whole = NamedSharding(self.loss.mesh, PartitionSpec())

        def choose(weights, masks, step):
            of = sparsity.signed_keys if self.config.method == MOVEMENT else sparsity.magnitude_keys

            def keys_of(name):
                return lambda zero: sparsity.of_kept(of(weights[name], zero), masks[name])

            keys = {name: keys_of(name) for name in masks}
            found = self.chosen_masks(keys, jnp.searchsorted(jnp.array(self.times), step))
            found = {name: mask & masks[name] for name, mask in found.items()}
            return found, self.share_of(found)

        found, pruned = jax.sharding.auto_axes(choose, out_sharding=(shardings, whole))(
            {name: named[name] for name in masks}, masks, state.step
        )
        new = _with(state, own._replace(masks=trees.nest(found), sparsity=pruned))
        # Moments and residuals of what is pruned now would move it once more.
        new = _on_masked(new, found, _where, (*WEIGHTS, "opt_state", "sync"))
        return _unless_stopped(state, new)

    def chosen_masks(
        self, keys: Mapping[str, sparsity.Keys], time: jax.Array
    ) -> dict[str, jax.Array]:
        """The masks of the `time`-th pruning; its numbers are in tables that Python counts."""
        shares = [share(self.config, self.total_steps, step) for step in self.times]
        if self.config.method == N_M:
            kept, size = parse(self.config.pattern)
            table = [size - math.floor((size - kept) * part) for part in shares]
            dims = {name: sparsity.contracted_dim(of) for name, of in self.axes.items()}
            return {
                name: sparsity.largest_of_groups(
                    key(jnp.uint32(0)), dims[name], jnp.array(table)[time], size
                )
                for name, key in keys.items()
            }
        filled, shares = self.filled, [self.config.sparsity * part for part in shares]
        shapes = trees.named(self.loss.params)
        sizes = {name: math.prod(shapes[name].shape[1:]) for name in keys}
        if self.config.scope == LAYER:
            goals = {
                name: jnp.array([math.floor(size * part) for part in shares], jnp.uint32)[time]
                for name, size in sizes.items()
            }
            return sparsity.smallest_of_each(keys, filled, goals)
        total = sum(sizes[name] * int(filled[name].sum()) for name in sizes)
        table = jnp.array([sparsity.goal(math.floor(total * part)) for part in shares], jnp.uint32)
        return sparsity.smallest_of_all(keys, filled, sparsity.Goal(*table[time]))


def _with(state: State, own: Pruning) -> State:
    return state._replace(extra=dict(state.extra) | {NAME: own})


def _unless_stopped(state: State, new: State) -> State:
    """`new`, or the state as it is where the guard has stopped the run: the step is taken again."""

    def keep(new, old):
        if new is old:
            return old
        return _in_memory_of(
            jnp.where(state.guard.stopped, _on_device(old), _on_device(new)), old
        )  # fmt: skip

    return jax.tree.map(keep, new, state)


def _on_device(tree: Any) -> Any:
    """Arrays, of which some may be in the memory of the host."""
    return jax.tree.map(lambda leaf: jax.device_put(leaf, jax.memory.Space.Device), tree)


def _in_memory_of(new: jax.Array, old: jax.Array) -> jax.Array:
    return jax.device_put(new, jax.typeof(old).memory_space)


def _where(leaf: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.where(mask, leaf, jnp.zeros((), leaf.dtype))


def _auto(function: Callable, like: Any) -> Callable:
    """`function` under Auto axes, its result split as `like`."""
    to = jax.tree.map(lambda leaf: jax.typeof(leaf).sharding, like)
    return jax.sharding.auto_axes(function, out_sharding=to)


def _on_masked(
    tree: Any, masks: Mapping[str, jax.Array], change: Callable, parts: tuple[str, ...] = ()
) -> Any:
    """`tree` with `change(array, mask)` of the arrays that belong to masked parameters: whose path
    ends in the parameter's, and whose shape in its shape. Each stays split, and in its memory.

    `parts`: paths in the tree under which arrays are looked for; () = everywhere.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    own, owners = {}, {}
    for i, (path, leaf) in enumerate(leaves):
        name = trees.path_name(path)
        within = not parts or any(name.startswith(f"{part}/") for part in parts)
        if within and (owner := _owner(name, leaf, masks)):
            own[i], owners[i] = leaf, owner
    on_device = _on_device(own)

    def changed(arrays, masks):
        return {i: change(array, masks[owners[i]]) for i, array in arrays.items()}

    new = _auto(changed, on_device)(on_device, dict(masks))
    new = {i: _in_memory_of(new[i], leaf) for i, leaf in own.items()}
    return structure.unflatten([new.get(i, leaf) for i, (_, leaf) in enumerate(leaves)])


def _owner(name: str, leaf: Any, masks: Mapping[str, Any]) -> str | None:
    """The masked parameter that an array belongs to. Codes of 8-bit moments have its shape."""
    name = name.removesuffix("/codes")
    for owner, mask in masks.items():
        of_it = name == owner or name.endswith(f"/{owner}")
        if of_it and leaf.ndim >= mask.ndim and leaf.shape[leaf.ndim - mask.ndim :] == mask.shape:
            return owner
    return None
