"""How the replicas along `data` agree: every step or now and then, on gradients, momentum or
parameters, in full or compressed.

`data` crosses the slow network. A *strategy* says what the replicas exchange there; the layout says
how each of them is split over the other axes, and neither knows of the other. With every strategy
but "mean" the parameters are whole along `data`, and each replica takes the gradient of its own
rows.

Gradients are *shares*: a replica's term of the gradient of the global batch, so that the sum over
replicas is the gradient, however many tokens each has. What compression leaves out is in the same
unit, and so the sum of all errors means the same for any number of replicas.

A run begins with `warmup_steps` of "mean"; the step has one program for each *phase*.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from llmx import sharding
from llmx.runtime import bounds
from llmx.runtime.bounds import bounded, choice
from llmx.sharding import trees
from llmx.sync import buckets, compressors
from llmx.sync.compressors import COMPRESSORS, Compressor, Group, Residuals, Tensor

AXIS = "data"

# Of a step: replicas sum their gradients in full; exchange them, or the momentum, in the strategy's
# way; go on alone; go on alone, with gradients summed in full for the second moment only.
MEAN, COMPRESSED, ALONE, VARIANCE = "mean", "compressed", "alone", "variance"

# What replicas agree on.
GRADIENTS, MOMENTUM, PARAMETERS = "gradients", "momentum", "parameters"


@dataclasses.dataclass
class SyncConfig:
    """How the replicas on `data` agree."""

    strategy: str = choice("mean", lambda: STRATEGIES)  # a name in STRATEGIES
    # steps of "mean" first; -1 (one_bit): until the variance has settled
    warmup_steps: int = bounded(0, at_least=-1)
    error_feedback: bool = True  # what compression leaves out goes in with the next exchange
    # compressed tensors are fused into messages of this size
    bucket_mib: float = bounded(32.0, above=0)
    rank: int = bounded(4, at_least=1)  # power_sgd
    # top_k: of the numbers, how many are sent
    fraction: float = bounded(0.01, above=0, at_most=1)
    # local_sgd, diloco: steps between exchanges; zero_one: at most this many
    every: int = bounded(30, at_least=1)
    # diloco: parts of the model that are exchanged at different steps
    fragments: int = bounded(1, at_least=1)
    # diloco: of the optimizer between replicas
    outer_learning_rate: float = bounded(0.7, at_least=0, below=10)
    # diloco: its Nesterov momentum
    outer_momentum: float = bounded(0.9, at_least=0, below=1)
    # stale: steps that a gradient may come late; 0 = none
    staleness: int = bounded(2, at_least=0)
    asynchronous: bool = False  # stale: nobody waits for a replica that is later still


@dataclasses.dataclass(frozen=True)
class Strategy:
    """What replicas agree on, by which exchange, and under which optimizer ("" = any)."""

    agrees_on: str
    exchange: str  # a name in COMPRESSORS
    optimizer: str = ""


STRATEGIES: dict[str, Strategy] = {
    "mean": Strategy(GRADIENTS, "mean"),
    "int8": Strategy(GRADIENTS, "int8"),  # arXiv 1511.04561, 1610.02132
    "top_k": Strategy(GRADIENTS, "top_k"),  # arXiv 1704.05021, 1712.01887
    "power_sgd": Strategy(GRADIENTS, "low_rank"),  # arXiv 1905.13727
    "stale": Strategy(GRADIENTS, "mean"),  # stale synchronous parallel, Ho et al. 2013
    "one_bit": Strategy(MOMENTUM, "signs", "adamw"),  # 1-bit Adam, arXiv 2102.02888
    "one_bit_lamb": Strategy(MOMENTUM, "signs", "lamb"),  # 1-bit LAMB, arXiv 2104.06069
    "zero_one": Strategy(PARAMETERS, "signs", "adamw"),  # 0/1 Adam, arXiv 2202.06009
    "local_sgd": Strategy(PARAMETERS, "mean"),  # arXiv 1805.09767
    "diloco": Strategy(PARAMETERS, "mean"),  # arXiv 2311.08105, 2501.18512
}


class Sync(NamedTuple):
    """What a strategy keeps from step to step: part of the state, saved with it."""

    taken: jax.Array  # steps in another phase than MEAN, int32
    settled_at: jax.Array  # the step that found the variance settled, int32; -1 = none yet
    variance: jax.Array  # L1 norm of the second moment when it was last looked at, fp32
    # one_bit: updates that the frozen variance has seen; zero_one: updates so far; int32.
    updates: jax.Array
    fresh: dict[str, jax.Array]  # one_bit_lamb: the variance, as the exchanged momentum shows it
    kept: Residuals  # of the exchange, by parameter name
    late: dict[str, jax.Array]  # stale: shares that arrive 1, 2, ... steps later, [n, s, ...]
    lateness: jax.Array | None  # stale: by how many steps each replica is behind, fp32 [n]
    # Replicas that go on alone; a leading dimension n: their parameters and optimizer state.
    params: Any
    opt_state: Any
    outer: dict[str, jax.Array]  # diloco: momentum of the outer optimizer
    # zero_one: sums since the last exchange of learning rates, and of those with the correction of
    # momentum's bias, fp32 [2].
    rates: jax.Array


# ----------------------------------------------------------------------------------- what runs when


@dataclasses.dataclass(frozen=True, eq=False)
class Timetable:
    """Which phase each step is in, and which exchanges of parameters follow it.

    `meetings` and `second_moments` (zero_one): True for the steps with an exchange, and for those
    that update the second moment.
    """

    config: SyncConfig
    total_steps: int
    meetings: np.ndarray | None = None
    second_moments: np.ndarray | None = None

    @property
    def strategy(self) -> Strategy:
        return STRATEGIES[self.config.strategy]

    @property
    def phases(self) -> tuple[str, ...]:
        """All phases that the run can come to, in order."""
        config = self.config
        if config.strategy == "mean" or config.warmup_steps >= self.total_steps:
            return (MEAN,)
        first = () if config.warmup_steps == 0 else (MEAN,)
        if self.strategy.agrees_on != PARAMETERS:
            return (*first, COMPRESSED)
        if self.second_moments is not None:
            begun = config.warmup_steps
            kinds = self.second_moments[begun:]
            return (
                *first,
                *((VARIANCE,) if kinds.any() else ()),
                *(() if kinds.all() else (ALONE,)),
            )
        return (*first, ALONE)

    def phase(self, step: int, settled_at: int = -1) -> str:
        """The phase of step number `step`, counted from 0.

        `settled_at` counts from the second step after it: the report of a step is known when the
        next has begun.
        """
        config = self.config
        if config.strategy == "mean":
            return MEAN
        if config.warmup_steps < 0:
            return COMPRESSED if 0 <= settled_at <= step - 2 else MEAN
        if step < config.warmup_steps:
            return MEAN
        if self.strategy.agrees_on != PARAMETERS:
            return COMPRESSED
        if self.second_moments is not None and self.second_moments[min(step, self.total_steps - 1)]:
            return VARIANCE
        return ALONE

    def phases_from(self, first: int, settled_at: int) -> tuple[str, ...]:
        """The phases that steps from number `first` on can be in."""
        if self.config.warmup_steps < 0 and settled_at < 0:
            return self.phases
        there = {self.phase(step, settled_at) for step in range(first, self.total_steps)}
        return tuple(phase for phase in self.phases if phase in there)

    def fragments_after(self, step: int) -> tuple[int, ...]:
        """The parts of the model that replicas agree on after step number `step`."""
        config = self.config
        if self.strategy.agrees_on != PARAMETERS or step < config.warmup_steps:
            return ()
        every_part = tuple(range(self.num_fragments))
        if step == self.total_steps - 1:
            return every_part  # what is trained is what all agree on
        if self.meetings is not None:
            return every_part if self.meetings[min(step, self.total_steps - 1)] else ()
        apart, done = config.every // self.num_fragments, step + 1 - config.warmup_steps
        if done % apart:
            return ()
        return (done // apart % self.num_fragments,)

    @property
    def num_fragments(self) -> int:
        return self.config.fragments if self.config.strategy == "diloco" else 1


def timetable(config: SyncConfig, *, total_steps: int, rates: Sequence[float]) -> Timetable:
    """The timetable of a run; `rates`: the learning rate of every step."""
    if config.strategy != "zero_one":
        return Timetable(config, total_steps)
    return Timetable(config, total_steps, *_zero_one(config, np.asarray(rates, np.float64)))


# Updates of the second moment before the interval between them doubles (arXiv 2202.06009, 6).
_VARIANCE_UPDATES = 16


def _zero_one(config: SyncConfig, rates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The steps with an exchange, and with an update of the second moment, of 0/1 Adam.

    Every step until the learning rate is at its peak; then the interval doubles whenever the rate
    has halved. The interval between updates of the second moment doubles after every 16, and they
    end with the first step that has no exchange.
    """
    meetings, moments = np.zeros(len(rates), bool), np.zeros(len(rates), bool)
    peak = int(rates.argmax())
    halvings = np.floor(np.log2(rates[peak] / np.maximum(rates, 1e-30)) + 1e-9)
    intervals = np.minimum(2.0 ** np.minimum(halvings, 30), config.every).astype(int)
    intervals[: peak + 1] = 1
    intervals = np.maximum.accumulate(np.maximum(intervals, 1))
    begun = max(config.warmup_steps, 0)
    last, next_moment, num_moments = begun - 1, begun, 0
    for step in range(begun, len(rates)):
        if step - last < intervals[step]:
            continue
        last, meetings[step] = step, True
        if intervals[step] == 1 and step >= next_moment:
            moments[step] = True
            num_moments += 1
            next_moment = step + 2 ** (num_moments // _VARIANCE_UPDATES)
    return meetings, moments


# ------------------------------------------------------------------------------- replicas on a mesh


@dataclasses.dataclass(frozen=True, eq=False)
class Replicas:
    """The replicas of a mesh, what each device has of every tensor, and what they exchange.

    `tensors`: by parameter name. `specs`: how a replica's updates are split.
    """

    config: SyncConfig
    mesh: Mesh
    tensors: dict[str, Tensor]
    specs: dict[str, PartitionSpec]

    @property
    def strategy(self) -> Strategy:
        return STRATEGIES[self.config.strategy]

    @property
    def size(self) -> int:
        return self.mesh.shape[AXIS]

    @property
    def group(self) -> Group:
        config = self.config
        return Group(
            axis=AXIS, size=self.size, feedback=config.error_feedback,
            bucket_bytes=int(config.bucket_mib * 2**20), fraction=config.fraction,
            rank=config.rank,
        )  # fmt: skip

    def stacked(self, name: str) -> PartitionSpec:
        """The split of an array of all replicas, [n, ...]."""
        return PartitionSpec(AXIS, *self.specs[name].partitions)

    @property
    def compressor(self) -> Compressor:
        return COMPRESSORS[self.strategy.exchange]

    def exchange(self, terms, residuals: Residuals, live=None):
        """The sum of all replicas' terms, for use inside a manual region; see `Compressor`."""
        tensors = list(self.tensors.values())
        return self.compressor.reduce(tensors, terms, residuals, self.group, live)

    def messages(self) -> tuple[int, tuple[int, ...]]:
        """How many tensors are compressed into bytes, and the bytes of each message of the first
        phase of an exchange that a device fuses them into."""
        first = [self.compressor.messages(each, self.group)[0] for each in self.tensors.values()]
        sizes = [message.bytes for message in first if message.collective != "all_reduce"]
        fused = buckets.fuse(sizes, self.group.bucket_bytes)
        return len(sizes), tuple(sum(sizes[i] for i in bucket) for bucket in fused)

    def region(self, function, *, in_specs, out_specs):
        """`function` of one device's parts, manual over all axes of the mesh."""
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def kept_specs(self) -> Residuals:
        return jax.tree.map(lambda leaf: leaf.sharding.spec, self.abstract_kept())

    def abstract_kept(self) -> Residuals:
        """Shapes with shardings of what the exchange keeps."""
        residuals = {field: {} for field in Residuals._fields}
        for name, tensor in self.tensors.items():
            for field, row in self.compressor.state(tensor, self.group).items():
                if row is None:
                    shape = self._placed((self.size, *self.shape(name)), self.stacked(name))
                else:
                    leading = () if field == "queries" else (AXIS,)
                    shape = self._by_shard(name, row, leading)
                residuals[field][name] = shape
        return Residuals(**residuals)

    def shape(self, name: str) -> tuple[int, ...]:
        """The global shape of a parameter."""
        each, entries = self.tensors[name], self.specs[name].partitions
        entries = (*entries, *(None,) * (len(each.shape) - len(entries)))
        ways = [sharding.ways(self.mesh, entry) for entry in entries]
        return tuple(dim * way for dim, way in zip(each.shape, ways, strict=True))

    def _by_shard(self, name: str, last: tuple[int, ...], leading: tuple[str, ...] = ()):
        """[leading..., L, parts of each dimension..., last...]: an array of every shard's own.

        Its shape says how the parameter was split, which is what a restore has to know.
        """
        each, entries = self.tensors[name], self.specs[name].partitions
        entries = (*entries, *(None,) * (len(each.shape) - len(entries)))
        first, rest = (entries[0], entries[1:]) if each.layered else (None, entries)
        rows = each.rows * sharding.ways(self.mesh, first)
        shape = (
            *(self.mesh.shape[axis] for axis in leading),
            rows, *(sharding.ways(self.mesh, entry) for entry in rest), *last,
        )  # fmt: skip
        return self._placed(shape, PartitionSpec(*leading, first, *rest, *(None,) * len(last)))

    def _placed(self, shape, spec, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, spec))

    def abstract(self, params: Any, opt_state: Any) -> Sync:
        """Shapes with shardings of the strategy's state.

        Args:
          params, opt_state: of one replica, with shardings; used where replicas go on alone.
        """
        config, scalar = self.config, lambda dtype: self._placed((), PartitionSpec(), dtype)
        late, lateness, own, moments = {}, None, None, None
        if config.strategy == "stale":
            lateness = self._placed((self.size,), PartitionSpec())
            if config.staleness:
                late = {
                    name: self._placed(
                        (self.size, config.staleness, *self.shape(name)),
                        PartitionSpec(AXIS, None, *self.specs[name].partitions),
                    )
                    for name in self.tensors
                }
        if self.strategy.agrees_on == PARAMETERS:
            own, moments = jax.tree.map(self._of_all, (params, opt_state))
        like_parameters = {
            name: self._placed(self.shape(name), self.specs[name]) for name in self.tensors
        }
        return Sync(
            taken=scalar(jnp.int32), settled_at=scalar(jnp.int32), variance=scalar(jnp.float32),
            updates=scalar(jnp.int32),
            fresh=like_parameters if config.strategy == "one_bit_lamb" else {},
            kept=self.abstract_kept(), late=late, lateness=lateness, params=own,
            opt_state=moments, outer=like_parameters if config.strategy == "diloco" else {},
            rates=self._placed((2,), PartitionSpec()),
        )  # fmt: skip

    def _of_all(self, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = PartitionSpec(AXIS, *leaf.sharding.spec.partitions)
        return self._placed((self.size, *leaf.shape), spec, leaf.dtype)


def replicas(config: SyncConfig, mesh: Mesh, *, shapes: Any, axes: Any, updates: Any) -> Replicas:
    """The replicas of a model on a mesh.

    Args:
      config: the strategy.
      mesh: with an axis `data`.
      shapes, axes, updates: of the parameters, their logical axes, and their shardings while they
        are updated, which must be whole along `data`.
    """
    specs = {name: to.spec for name, to in trees.named(updates).items()}
    logical = jax.tree.structure(shapes).flatten_up_to(axes)
    tensors = {
        name: compressors.local_tensor(name, leaf.shape, of, specs[name], dict(mesh.shape))
        for (name, leaf), of in zip(trees.named(shapes).items(), logical, strict=True)
    }
    return Replicas(config, mesh, tensors, specs)


# ------------------------------------------------------------------------------ bounded staleness

# Simulated replicas: log-normal factors of their time for a step, constant ones and of each step.
_SPREAD_OF_REPLICAS, _SPREAD_OF_STEPS = 0.1, 0.3


def delays(config: SyncConfig, lateness: jax.Array, taken: jax.Array):
    """By how many steps each replica's gradient comes late, int32 [n], and its lateness after it.

    Replica i takes tau_i(t) times as long for a step as the others' usual replica; its lateness is
    what has come together, never below 0. With a bound s all others wait for a replica that would
    be more than s steps late; asynchronously nobody does, and lateness is cut at s, a window that
    stands for no bound. The same numbers for the same step of any run: speeds are a function of
    replica and step.
    """
    num, key = lateness.shape[0], jax.random.key(20130)
    speed = _SPREAD_OF_REPLICAS * jax.random.normal(jax.random.fold_in(key, 0), (num,))
    now = jax.random.normal(jax.random.fold_in(key, 1 + taken), (num,))
    took = jnp.exp(speed + _SPREAD_OF_STEPS * now)
    new = jnp.maximum(lateness + took - 1, 0)
    most = config.staleness + 1 - 1e-3
    if not config.asynchronous:
        new = jnp.maximum(new - jnp.maximum(new.max() - most, 0), 0)
    new = jnp.minimum(new, most)
    return jnp.floor(new).astype(jnp.int32), new


def delayed(shares: dict[str, jax.Array], late: dict[str, jax.Array], delay: jax.Array):
    """What arrives now, and what is left for later, [s, ...]; `delay` is of this replica's shares.

    What arrives, summed over all steps, and what is still on its way is all that was sent.
    """
    arrived, left = {}, {}
    for name, any_share in shares.items():
        share, waiting = any_share.astype(jnp.float32), late[name]
        slots = jnp.arange(waiting.shape[0] + 1).reshape(-1, *(1,) * share.ndim)
        all_ = jnp.concatenate([waiting, jnp.zeros_like(share)[None]])
        all_ = all_ + jnp.where(slots == delay, share, 0)
        arrived[name], left[name] = all_[0], all_[1:]
    return arrived, left


# ---------------------------------------------------------------------------- onto another number


def whole(server: jax.Array, shape: Sequence[int]) -> jax.Array:
    """What servers keep of a parameter, [n, L, parts..., Q], in the parameter's shape."""
    n, rows, *parts, q = server.shape
    dims = shape[len(shape) - len(parts) :]
    each = [dim // part for dim, part in zip(dims, parts, strict=True)]
    length = math.prod(each)
    flat = jnp.moveaxis(server, 0, -2).reshape(rows, *parts, n * q)[..., :length]
    blocks = flat.reshape(rows, *parts, *each)
    count = len(parts)
    order = [0, *(1 + i + j * count for i in range(count) for j in range(2))]
    return blocks.transpose(order).reshape(shape)


def regrouped(
    saved: Sync,
    wanted: Sync,
    shapes: Mapping[str, Sequence[int]],
    ordered: Callable[[str, jax.Array], jax.Array] = lambda name, array: array,
) -> Sync:
    """The state of a strategy for another number of replicas, or for replicas split otherwise.

    The sum of all errors of a parameter, of replicas and of servers, is kept, and split evenly
    among the new replicas; so is the sum of what is on its way late. Replicas that go on alone
    begin again at the mean of the old ones' parameters and moments. `queries` begin anew.

    Args:
      saved: as it was, [n, ...].
      wanted: shapes of the new state.
      shapes: of the parameters, by name, as they were.
      ordered: (name, array of a parameter's shape) -> its layers in the new order.
    """

    def split(name, total, like):
        total = ordered(name, total)
        return jnp.broadcast_to(total / like.shape[0], like.shape).astype(like.dtype)

    errors = {}
    for name, like in wanted.kept.errors.items():
        total = saved.kept.errors[name].sum(0)
        if name in saved.kept.server:
            total = total + whole(saved.kept.server[name], shapes[name])
        errors[name] = split(name, total, like)

    def waiting(name, like):
        totals = jax.vmap(lambda total: ordered(name, total))(saved.late[name].sum(0))
        return jnp.broadcast_to(totals / like.shape[0], like.shape).astype(like.dtype)

    def middle(path, old, like):
        mean = old.astype(jnp.float32).mean(0).astype(like.dtype)
        return jnp.broadcast_to(ordered(sharding.path_name(path), mean), like.shape)

    zeros = lambda tree: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)  # noqa: E731
    placed = lambda tree: {name: ordered(name, array) for name, array in tree.items()}  # noqa: E731
    lateness = wanted.lateness
    return saved._replace(
        fresh=placed(saved.fresh),
        outer=placed(saved.outer),
        kept=Residuals(errors, zeros(wanted.kept.server), zeros(wanted.kept.queries)),
        late={name: waiting(name, like) for name, like in wanted.late.items()},
        lateness=None if lateness is None else jnp.zeros(lateness.shape, lateness.dtype),
        params=jax.tree_util.tree_map_with_path(middle, saved.params, wanted.params),
        opt_state=jax.tree_util.tree_map_with_path(middle, saved.opt_state, wanted.opt_state),
    )


# ------------------------------------------------------------------------------------------- checks


def problems(config: SyncConfig) -> list[str]:
    """All that is wrong with the section, each with its remedy."""
    found = bounds.problems(config, "sync.")
    if config.strategy not in STRATEGIES:
        return found
    strategy = STRATEGIES[config.strategy]
    if config.warmup_steps == -1 and strategy.agrees_on != MOMENTUM:
        found.append(
            f"sync.warmup_steps=-1 waits for the variance of Adam to settle, which strategy "
            f"{config.strategy!r} does not freeze: use a number of steps"
        )
    if config.warmup_steps == 0 and strategy.agrees_on == MOMENTUM:
        found.append(
            f"sync.warmup_steps=0 leaves {config.strategy!r} without a variance to freeze: use "
            "about 15% of the steps, or -1 = until the variance has settled"
        )
    if config.strategy == "diloco" and config.fragments >= 1 and config.every % config.fragments:
        found.append(
            f"sync.fragments={config.fragments} does not divide sync.every={config.every}: each "
            "fragment is exchanged once in that many steps; use a divisor"
        )
    return found
