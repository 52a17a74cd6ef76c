"""Local steps: every replica has parameters and an optimizer of its own, and updates itself.

local_sgd (arXiv 1805.09767): every `every` steps all replicas continue from their mean. diloco
(arXiv 2311.08105, 2501.18512): an outer optimizer, SGD with Nesterov momentum, takes the mean of
what the replicas have moved as its gradient; fragments of the model do so at different steps. A
round that the run's end cuts short is averaged, without the outer optimizer: its momentum is sized
for whole rounds.

What replicas have moved may be sent in codes of 8 or 4 bits, and may travel while the next step is
computed (`overlap`): a phase of that step's own sends what replicas had moved before it, and adds
to what arrives what the replica has moved meanwhile.

With `by_tokens` a replica counts in a round by the tokens that it has trained on. One that had none
is left out: it changes nothing, keeps its optimizer's state, and continues from what the others
have made. With `average_moments` exchanges average the moments of Adam too (arXiv 1905.03817 does
so with momentum).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from llmx import sharding
from llmx.contract import Gradients, Phase, State, Strategy, Timetable, at_step
from llmx.sharding import trees
from llmx.sync import phases, reshard
from llmx.sync.compressors import Compressor, Residuals, Tensor
from llmx.sync.config import SyncConfig
from llmx.sync.replicas import AXES, AXIS, LOCAL, MEAN, WHOLE, Replicas, StrategyInputs

MOMENTS = ("mu", "nu")  # of Adam's state
SENDING = "sending_"  # phases in which fragment 0, 1, ... is exchanged: sending_0, sending_1, ...


class Local(NamedTuple):
    """What is kept from step to step."""

    params: Any  # of each replica, [n, ...]
    opt_state: Any  # of each replica, [n, ...]
    outer: dict[str, jax.Array]  # diloco: momentum of the outer optimizer, by parameter name
    residuals: Residuals  # of what replicas have moved and codes have left out
    # by_tokens: those that each replica has trained on since the last exchange, fp32 [n]
    tokens: Any = ()


def make(inputs: StrategyInputs) -> Strategy:
    replicas, config = inputs.replicas, inputs.config
    abstract = Local(
        *of_all_replicas(inputs), replicas.like_parameters() if config.strategy == "diloco" else {},
        replicas.abstract_residuals(),
        replicas.placed((replicas.size,), PartitionSpec(AXIS)) if counts_tokens(config) else (),
    )  # fmt: skip

    def init(params):
        return (), Local(*copies(inputs, params), *reshard.zeros(abstract[2:]))

    def update(found: Gradients, state: State, sync: Local, accepted: jax.Array) -> State:
        params, opt_state, _ = advanced(inputs, state, phases.clipped(found).tree, accepted)
        return state._replace(sync=sync._replace(params=params, opt_state=opt_state))

    def update_and_count(found: Gradients, state: State, sync: Local, accepted: jax.Array) -> State:
        taken = found.shares * found.tokens
        params, opt_state, _ = advanced(
            inputs, state, phases.clipped(found).tree, accepted, taking=taken > 0
        )
        tokens = sync.tokens + jnp.where(accepted, taken, 0)
        return state._replace(sync=sync._replace(params=params, opt_state=opt_state, tokens=tokens))

    own_update = update_and_count if counts_tokens(config) else update

    def resharded(saved: Local, layers: reshard.Layers) -> Local:
        return Local(
            reshard.averaged(saved.params, abstract.params, layers),
            reshard.averaged(saved.opt_state, abstract.opt_state, layers),
            reshard.placed(saved.outer, layers),
            reshard.residuals(saved.residuals, abstract.residuals, layers),
            # The tokens of a round that has begun are those of all: their sum is kept.
            jax.tree.map(
                lambda new: jnp.full(new.shape, saved.tokens.sum() / replicas.size), abstract.tokens
            ),
        )

    return Strategy(
        abstract=((), abstract), init=init, timetable=inputs.timetable,
        phases={MEAN: mean(inputs, update), LOCAL: own_phase(inputs, own_update)}
        | {
            SENDING + str(f): sending_phase(inputs, own_update, f)
            for f in range(num_fragments(config) * config.overlap)
        },
        enter=forget_after_mean(inputs),
        outer={each: make_outer_step(inputs, each) for each in sorted(inputs.timetable.fragments)},
        scalars=lambda sync: {}, reshard=resharded,
    )  # fmt: skip


def timetable(config: SyncConfig, rates: Sequence[float]) -> Timetable:
    """Outer steps every `every` steps, of one fragment after the other, and of all at the end. With
    `overlap` the next step takes the place of those before the end."""
    total_steps = len(rates)
    num = num_fragments(config)

    def due_after(steps: int) -> tuple[int, ...]:
        rest, fragment = _round(config, steps)
        return () if rest or steps <= config.warmup_steps else (fragment,)

    def fragments_after(step: int) -> tuple[int, ...]:
        if step == total_steps - 1 >= config.warmup_steps:
            return tuple(range(num))  # the trained model is the one that all share
        return () if config.overlap else due_after(step + 1)

    def phase_of(step: int, freeze_step: int = -1) -> str:
        if step < config.warmup_steps:
            return MEAN
        due = due_after(step) if config.overlap else ()
        return SENDING + str(due[0]) if due else LOCAL

    return Timetable(total_steps, phase_of, fragments_after, num)


def sends(replicas: Replicas, program: str | tuple[int, ...]) -> tuple[list[Tensor], Compressor]:
    """Nothing in a local step; in an outer step the rows that belong to its fragments."""
    if isinstance(program, str) and program.startswith(SENDING):
        program = (int(program.removeprefix(SENDING)),)
    fragments = program if isinstance(program, tuple) else ()
    found = [piece.tensor for piece in _pieces(replicas, fragments)]
    if found and replicas.config.average_moments:
        found += moments_of(replicas)
    return found, replicas.compressor


def moments_of(replicas: Replicas) -> list[Tensor]:
    """Those of Adam, which are averaged in full, with names of their own."""
    return [
        dataclasses.replace(tensor, name=f"{moment} of {tensor.name}", in_full=True)
        for moment in MOMENTS
        for tensor in replicas.tensors.values()
    ]


def counts_tokens(config: SyncConfig) -> bool:
    """Whether a replica counts by its tokens."""
    return config.by_tokens or config.groups > 1


def num_fragments(config: SyncConfig) -> int:
    return config.fragments if config.strategy == "diloco" else 1


def conflicts(config: Any) -> list[str]:
    """What local steps cannot go with."""
    sync, problems = config.sync, []
    if config.optimizer.ema_decay:
        problems.append(
            f"optimizer.ema_decay={config.optimizer.ema_decay} with sync.strategy="
            f"{sync.strategy!r}: the parameters that all replicas share change only now and then, "
            "and have no average by steps; set it to 0"
        )
    if sync.strategy == "diloco" and sync.every % sync.fragments:
        problems.append(
            f"sync.fragments={sync.fragments} does not divide sync.every={sync.every}: each "
            "fragment is exchanged once in that many steps; use a divisor"
        )
    if sync.average_moments and config.optimizer.name not in ("adamw", "lamb"):
        problems.append(
            f"sync.average_moments with optimizer.name={config.optimizer.name!r}: moments are "
            "those of adamw and lamb; leave sync.average_moments out"
        )
    if sync.average_moments and (num_fragments(sync) > 1 or sync.overlap):
        problems.append(
            "sync.average_moments with sync.fragments above 1 or sync.overlap: moments are "
            "averaged with the whole model, between two steps; leave the one or the other out"
        )
    return [*phases.conflicts(config), *problems]


# -------------------------------------------------------------- replicas with their own parameters


def of_all_replicas(inputs: StrategyInputs) -> tuple[Any, Any]:
    """Shapes with shardings of all replicas' parameters and optimizer states, [n, ...]."""
    return jax.tree.map(inputs.replicas.of_all, (inputs.loss.params, inputs.opt_state))


def copies(inputs: StrategyInputs, params: Any) -> tuple[Any, Any]:
    """Parameters and a new optimizer state for each replica."""
    size = inputs.replicas.size
    own = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (size, *leaf.shape)), params)
    return own, jax.vmap(inputs.optimizer.whole.init)(own)


def own_params(inputs: StrategyInputs) -> Callable[[State], Any]:
    """Each replica's parameters, in its local view."""
    take = lambda leaf: sharding.to_local(inputs.loss.mesh, AXES, leaf)[0]  # noqa: E731
    return lambda state: jax.tree.map(take, state.sync.params)


def for_all(inputs: StrategyInputs, tree: Any) -> Any:
    """[n, ...] of what is the same for all replicas; nothing is sent."""
    copy = lambda leaf: sharding.from_local(inputs.loss.mesh, AXES, leaf[None])  # noqa: E731
    return jax.tree.map(copy, tree)


def own_phase(inputs: StrategyInputs, update: Callable) -> Phase:
    """Each replica updates its own parameters by its own gradient."""
    return Phase(own_params(inputs), inputs.replica_gradient, phases.already_reduced, update)


def sending_phase(inputs: StrategyInputs, update: Callable, fragment: int) -> Phase:
    """A local step, beside which a fragment's outer step takes place: of what replicas had moved
    before it. Communicates over `data`."""

    def update_and_send(found: Gradients, state: State, sync: Any, accepted: jax.Array) -> State:
        after = update(found, state, sync, accepted)
        sent = synchronized(inputs, (fragment,), state, after.sync.params)
        of_this_step = jax.tree.map(jnp.subtract, after.sync.tokens, state.sync.tokens)
        sent = sent._replace(
            sync=sent.sync._replace(opt_state=after.sync.opt_state, tokens=of_this_step)
        )
        params, sync = phases.keep(
            ~state.guard.stopped, (sent.params, sent.sync), (state.params, after.sync)
        )
        return after._replace(params=params, sync=sync)

    return own_phase(inputs, update_and_send)


def mean(inputs: StrategyInputs, update: Callable) -> Phase:
    """Replicas average their gradients, and each updates itself by the mean: all stay equal."""
    own = own_params(inputs)

    def update_all(found: Gradients, state: State, sync: Any, accepted: jax.Array) -> State:
        found = found._replace(tree=for_all(inputs, found.tree))
        state = update(found, state, sync, accepted)
        return state._replace(params=own(state))

    return Phase(phases.shared_params, inputs.gradient, phases.already_reduced, update_all)


def forget_after_mean(inputs: StrategyInputs) -> Callable[[State, str, str], State]:
    """Norms of the mean say nothing of the norms of replicas' own gradients."""
    forget = jax.jit(inputs.forget_norms, donate_argnums=0)
    return lambda state, previous, phase: forget(state) if previous == MEAN else state


def advanced(
    inputs: StrategyInputs, state: State, gradients: Any, accepted: jax.Array, *,
    taking: jax.Array | None = None, **extra: Any,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """All replicas' parameters and optimizer states after an update by gradients [n, ...], and what
    of minus the updates was rounded off, split as updates are.

    `taking`: bool [n], the replicas that are updated; None = all. `extra`: arguments of the
    optimizer's update, [n, ...] too.
    """
    stack = lambda to: to.update(spec=PartitionSpec(AXIS, *to.spec.partitions))  # noqa: E731
    shares = jax.tree.map(stack, inputs.loss.updates)
    abstract_params, abstract_opt_state = of_all_replicas(inputs)
    to = lambda tree: jax.tree.map(lambda leaf: leaf.sharding, tree)  # noqa: E731

    def update(accepted, taking, gradients, params, opt_state, extra, step):
        def one(gradient, params, opt_state, extra):
            opt_state = at_step(opt_state, step)
            updates, new = inputs.optimizer.whole.update(gradient, opt_state, params, **extra)
            after = optax.apply_updates(params, updates)
            lost = jax.tree.map(lambda old, new, u: (new - old) - u, params, after, updates)
            return after, new, lost

        # An optimizer that exchanges by itself does so within a replica.
        new = jax.vmap(one, spmd_axis_name=AXES)(gradients, params, opt_state, extra)
        old = (params, opt_state, jax.tree.map(jnp.zeros_like, params))
        new = new if taking is None else jax.vmap(phases.keep)(taking, new, old)
        return phases.keep(accepted, new, old)

    sync = state.sync
    params = jax.tree.map(jax.sharding.reshard, sync.params, shares)
    params, opt_state, lost = jax.sharding.auto_axes(
        update, out_sharding=(shares, to(abstract_opt_state), shares)
    )(accepted, taking, gradients, params, sync.opt_state, extra, state.step)
    return jax.tree.map(jax.sharding.reshard, params, to(abstract_params)), opt_state, lost


# ------------------------------------------------------------------------------------ outer steps


def outer_step(synchronize: Callable[[State], State]) -> Callable[[State], State]:
    """The jitted program between steps, which donates its state; a stopped run stays as it is."""

    @functools.partial(jax.jit, donate_argnums=0)
    def outer_step(state: State) -> State:
        new = synchronize(state)
        params, sync = phases.keep(
            ~state.guard.stopped, (new.params, new.sync), (state.params, state.sync)
        )
        return state._replace(params=params, sync=sync)

    return outer_step


def as_updated(inputs: StrategyInputs, params: Any, own: Any) -> tuple[dict, dict]:
    """Shared and own parameters by name, split as updates are."""
    stack = lambda to: to.update(spec=PartitionSpec(AXIS, *to.spec.partitions))  # noqa: E731
    updates = inputs.loss.updates
    params = jax.tree.map(jax.sharding.reshard, params, updates)
    own = jax.tree.map(jax.sharding.reshard, own, jax.tree.map(stack, updates))
    return trees.named(params), trees.named(own)


def as_kept(inputs: StrategyInputs, params: dict, own: dict) -> tuple[Any, Any]:
    """The reverse of `as_updated`."""
    like = inputs.loss.params

    def to(tree: Any, wanted: Any) -> Any:
        return jax.tree.map(lambda a, leaf: jax.sharding.reshard(a, leaf.sharding), tree, wanted)

    own_like, _ = of_all_replicas(inputs)
    return to(trees.unnamed(params, like), like), to(trees.unnamed(own, like), own_like)


def make_outer_step(inputs: StrategyInputs, fragments: Sequence[int]) -> Callable[[State], State]:
    """Synchronizes the fragments of all replicas. Communicates over `data`."""
    return outer_step(functools.partial(synchronized, inputs, fragments))


def synchronized(
    inputs: StrategyInputs, fragments: Sequence[int], state: State, after: Any = None
) -> State:
    """The state with fragments of all replicas synchronized as they are in it. Communicates over
    `data`.

    `after`: replicas' parameters [n, ...] of a later step: they keep what they have moved since.
    """
    replicas = inputs.replicas
    stacked, counts = replicas.stacked_specs, state.sync.tokens
    shared, own = as_updated(inputs, state.params, state.sync.params)
    before = _Kept(
        shared, own, state.sync.outer, state.sync.residuals,
        _moments(state) if replicas.config.average_moments else {},
    )  # fmt: skip
    specs = _Kept(
        replicas.specs, stacked, {name: replicas.specs[name] for name in before.outer},
        replicas.residual_specs(),
        {name: stacked[name.partition(" of ")[2]] for name in before.moments},
    )  # fmt: skip
    later = {} if after is None else as_updated(inputs, state.params, after)[1]

    def region(before, later, tokens, due):
        first = lambda arrays: {name: leaf[0] for name, leaf in arrays.items()}  # noqa: E731
        before = before._replace(own=first(before.own), moments=first(before.moments))
        new = _averaged(inputs, fragments, before, first(later), tokens, due)
        stack = lambda arrays: {name: leaf[None] for name, leaf in arrays.items()}  # noqa: E731
        return new._replace(own=stack(new.own), moments=stack(new.moments))

    new = replicas.region(
        region,
        in_specs=(
            specs, {name: stacked[name] for name in later},
            jax.tree.map(lambda _: PartitionSpec(AXIS), counts), WHOLE,
        ),
        out_specs=specs,
    )(before, later, counts, due_fragment(replicas.config, state.step))  # fmt: skip
    params, own = as_kept(inputs, new.shared, new.own)
    sync = state.sync._replace(
        params=own, outer=new.outer, residuals=new.residuals,
        tokens=jax.tree.map(jnp.zeros_like, counts),
    )  # fmt: skip
    if new.moments:
        sync = sync._replace(opt_state=_with_moments(sync.opt_state, new.moments))
    return state._replace(params=params, sync=sync)


def _moments(state: State) -> dict[str, jax.Array]:
    """Of all replicas, [n, ...] by the names of `moments_of`."""
    head = state.sync.opt_state[0]
    return {
        f"{moment} of {name}": leaf
        for moment in MOMENTS
        for name, leaf in trees.named(getattr(head, moment)).items()
    }


def _with_moments(opt_state: Any, moments: dict[str, jax.Array]) -> Any:
    """The reverse of `_moments`."""
    head, *tail = opt_state
    new = {}
    for moment in MOMENTS:
        old, first = getattr(head, moment), f"{moment} of "
        named = {k.removeprefix(first): a for k, a in moments.items() if k.startswith(first)}
        new[moment] = trees.unnamed(named, old)
    return (head._replace(**new), *tail)


def due_fragment(config: SyncConfig, steps: Any) -> Any:
    """The fragment whose round is complete after so many steps; -1 = none."""
    rest, fragment = _round(config, steps)
    return jnp.where(rest == 0, fragment, -1)


def _round(config: SyncConfig, steps: Any) -> tuple[Any, Any]:
    """After so many steps: the steps since a round was complete, and that round's fragment."""
    num = num_fragments(config)
    apart, done = config.every // num, steps - config.warmup_steps
    return done % apart, done // apart % num


class _Kept(NamedTuple):
    """What an outer step reads and writes, by name: arrays of all replicas, or, in a manual region,
    a device's shards, where `own` and `moments` are those of its replica, without [n]."""

    shared: dict[str, jax.Array]  # parameters that all replicas share, as they are updated
    own: dict[str, jax.Array]  # of each replica, [n, ...]
    outer: dict[str, jax.Array]  # momentum of the outer optimizer, as parameters; {} = none
    residuals: Residuals
    moments: dict[str, jax.Array]  # of Adam, by the names of `moments_of`, [n, ...]; {} = apart


def _averaged(
    inputs: StrategyInputs, fragments: Sequence[int], before: _Kept, later: dict[str, jax.Array],
    tokens: Any, due: jax.Array,
) -> _Kept:  # fmt: skip
    """One device's arrays after the outer step. Communicates over `data`.

    Args:
      fragments: that are synchronized.
      before: as they are, of which what replicas have moved is taken.
      later: the replica's parameters of a later step, as `before.own`, which keep what was moved
        since; {} = there is none.
      tokens: those of this replica since the last exchange, fp32 [1]; () = they are not counted.
      due: int32 [], the fragment whose round is complete; -1 = none.
    """
    replicas, config = inputs.replicas, inputs.config
    shared, own = before.shared, before.own
    pieces, weighted = _pieces(replicas, fragments), (lambda x: x / replicas.size)
    if counts_tokens(config):
        total = jax.lax.psum(tokens[0], AXIS)
        weight = tokens[0] / jnp.maximum(total, 1)
        weighted = lambda x: x * weight  # noqa: E731
    terms = {
        tensor.name: weighted((shared[name][rows] - own[name][rows]).astype(jnp.float32))
        for tensor, name, _, rows in pieces
    }
    terms |= {name: weighted(leaf) for name, leaf in before.moments.items()}
    more = moments_of(replicas) if before.moments else []
    sums, residuals = _summed(replicas, pieces, terms, before.residuals, more)
    moments = {name: sums[name] for name in before.moments}
    new = _Kept(dict(shared), dict(later or own), dict(before.outer), residuals, moments)
    for piece in pieces:
        name, f, rows = piece[1:]
        step = moved = sums[piece.tensor.name]
        if name in new.outer:
            nesterov = optax.trace(config.outer_momentum, nesterov=True)
            momentum = new.outer[name][rows]
            step, trace = nesterov.update(moved, optax.TraceState(momentum))
            momentum = jnp.where(due == f, trace.trace, momentum)
            new.outer[name] = new.outer[name].at[rows].set(momentum)
            step = jnp.where(due == f, config.outer_learning_rate * step, moved)
        now = (new.shared[name][rows] - step).astype(shared[name].dtype)
        new.shared[name] = new.shared[name].at[rows].set(now)
        since = later[name][rows] - own[name][rows] if later else 0
        new.own[name] = new.own[name].at[rows].set(now + since)
    if not counts_tokens(config):
        return new
    # A round in which nobody has trained is none: residuals wait for the next.
    return phases.keep(total > 0, new, before._replace(own=later or own))


class _Piece(NamedTuple):
    """The rows of a shard that belong to one fragment."""

    tensor: Tensor  # of these rows, with a name of its own
    name: str
    fragment: int
    rows: slice  # of the shard's first dimension


def _pieces(replicas: Replicas, fragments: Sequence[int]) -> list[_Piece]:
    found, num = [], num_fragments(replicas.config)
    for name, tensor in replicas.tensors.items():
        for f, rows in _rows_of(tensor, fragments, num).items():
            shape = tensor.shape
            if tensor.layered:
                shape = (len(range(tensor.rows)[rows]), *shape[1:])
            piece = dataclasses.replace(tensor, name=f"{name} of fragment {f}", shape=shape)
            found.append(_Piece(piece, name, f, rows))
    return found


def _summed(replicas: Replicas, pieces: list[_Piece], terms: dict, residuals: Residuals, more=()):
    """The sums of terms of pieces over replicas, and residuals by parameter name. `more`: tensors
    beside the pieces, which have no residuals."""
    # Residuals of a device are [1, L, ...], or of a tensor that is not layered [1, ...].
    at = lambda piece: (slice(None), piece.rows) if piece.tensor.layered else slice(None)  # noqa: E731
    of_pieces = lambda kept: {p.tensor.name: kept[p.name][at(p)] for p in pieces if p.name in kept}  # noqa: E731
    before = Residuals(*map(of_pieces, residuals))
    tensors = [*(piece.tensor for piece in pieces), *more]
    sums, new = replicas.exchange(terms, before, tensors=tensors)
    whole = [dict(kept) for kept in residuals]
    for piece in pieces:
        for kept, rows in zip(whole, new, strict=True):
            if piece.name in kept:
                kept[piece.name] = kept[piece.name].at[at(piece)].set(rows[piece.tensor.name])
    return sums, Residuals(*whole)


def _rows_of(tensor: Tensor, fragments: Sequence[int], num: int) -> dict[int, slice]:
    """By fragment, the rows of a shard that belong to it, as a slice of its first dimension.

    Fragment f has every num-th layer from f on (arXiv 2501.18512, strided); the first fragment has
    what is outside the layers.
    """
    if not tensor.layered:
        return {0: slice(None)} if 0 in fragments else {}
    return {f: slice(f, None, num) for f in fragments if f < tensor.rows}
