"""One tick of a pipeline: the operations of all stages, as functions of (carry, row).

Each stage applies its operation, if any, to its own microbatch and model chunk, and sends the
result to the stage that needs it. The axis `stage` is local (`sharding.to_local`): the types of
arrays that differ from stage to stage do not name it; the other axes are as without stages.

Mesh axes: stages exchange activations and their gradients over `stage`, and sum over it the input
of the head and the gradient of the embedding's output.

Letters: B batch, T positions, D width, M microbatches.
"""

import dataclasses
import enum
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import NamedSharding, PartitionSpec

from llmx import sharding
from llmx.model import dot
from llmx.pipeline import saves as saves_lib
from llmx.pipeline.schedule import BACKWARD, FORWARD, IDLE, WEIGHT
from llmx.pipeline.stages import ModelChunks
from llmx.pipeline.ticks import Program, Row
from llmx.sharding.mesh import kind_of

STAGE = ("stage",)


@dataclasses.dataclass(frozen=True, eq=False)
class ModelFunctions:
    """A model as functions of one microbatch's rows (a dict of arrays [B, T]).

    `outer` are the parameters of embedding and head by name, `weights` those of layers, each with
    gradient buffers (`sharding.accumulate_into`); None = not differentiated.
    """

    embed: Callable  # (outer, buffers, rows) -> x, the input of the first chunk
    # (rows, whether there is an operation) -> tree: what every chunk takes beside x
    side_inputs: Callable
    # (weights, buffers, x, side_inputs, kinds, row=, first=) -> x: see `Apply.apply_layers`
    apply_layers: Callable
    losses: Callable  # (outer, buffers, last x, rows) -> scalars; the first is differentiated
    embed_names: tuple[str, ...]  # of `outer`, what embed and losses use
    losses_names: tuple[str, ...]
    uses_dot: Any  # for each of the layers' weights, whether `dot.dot` multiplies it
    remat: str  # of the config
    # Bytes per token that a chunk keeps between FORWARD and BACKWARD; None = whatever jax saves.
    kept_bytes: int | None


class Carry(NamedTuple):
    """What goes from tick to tick. Buffers have a leading dimension of slots."""

    inputs: jax.Array | None  # of chunks, until FORWARD
    gradients: jax.Array | None  # of chunks' outputs, until BACKWARD
    saved: tuple[jax.Array, ...]  # activations, from FORWARD to BACKWARD
    deferred: tuple[dot.WeightGradOperands, ...]  # from BACKWARD to WEIGHT
    blocks: tuple[jax.Array, ...]  # sums of gradients
    outer: Any
    losses: tuple[jax.Array, ...]
    token: jax.Array  # int32 [], the ordering token: see `Links`


class Results(NamedTuple):
    """What an operation computes."""

    sent: jax.Array | None  # the chunk's output, or the gradient of its input
    saved: tuple[jax.Array, ...] = ()
    deferred: tuple[dot.WeightGradOperands, ...] = ()
    # Gradients of one chunk's weights: for each of `Context.runs` those of all weights.
    blocks: tuple[jax.Array | None, ...] = ()


class When(enum.Enum):
    """In which ticks of a loop something happens."""

    NEVER = 0
    SOMETIMES = 1
    ALWAYS = 2


class Body(NamedTuple):
    """What the ticks of a loop have in common. Its program has nothing that never happens."""

    kinds: frozenset[int]  # of operations
    when: Row  # of `When`: in which ticks an entry is not -1
    rows: Row  # of the loop, known before it runs


# The scope of a conditional, which tells `llmx.aot` what it cannot know: for each branch, how often
# devices take it, and in how many iterations it is the longest that any device takes.
EXPECTED_BRANCHES = "expected_branches_{}_longest_{}"


@dataclasses.dataclass(frozen=True)
class Links:
    """Communication between stages.

    XLA:CPU starts independent loops and collectives in another order on each device, so that they
    deadlock. There a token orders communication; it is always 0, which the compiler cannot know.
    """

    mesh: jax.sharding.Mesh

    @property
    def ordered(self) -> bool:
        return kind_of(self.mesh).platform == "cpu"

    def in_order(self, array: jax.Array) -> jax.Array:
        """`array`; on GPUs with its dimensions in order in memory. There forward and backward
        operations would want different orders, and copy all of a buffer in every tick."""
        if kind_of(self.mesh).platform in ("cpu", "tpu"):
            return array
        to = Layout(tuple(range(array.ndim)))
        return self._manual(lambda a: with_layout_constraint(a, to), array)

    def completed(self, token: jax.Array, array: jax.Array) -> jax.Array:
        """`token`, once `array` is computed."""
        if not self.ordered:
            return token

        def zero(array):
            first = array.reshape(-1)[0]
            return ((first != first) & (first == first)).astype(jnp.int32)

        return token + self._manual(zero, array, to=PartitionSpec())

    def after(self, token: jax.Array, tree: Any) -> Any:
        """`tree`, integers or arrays, once `token` is computed."""
        if not self.ordered:
            return tree
        wait = lambda a: a + token if a.dtype == jnp.int32 else jnp.where(token == 0, a, 0)  # noqa: E731
        return jax.tree.map(wait, tree)

    def broadcast(self, x_BTD: jax.Array, stage: int) -> jax.Array:
        """One stage's array on all stages."""
        mine = lambda: jax.lax.axis_index(STAGE) == stage  # noqa: E731
        return self._manual(lambda x: jax.lax.psum(jnp.where(mine(), x, 0), STAGE), x_BTD)

    def shift(self, x_BTD: jax.Array, distance: int) -> jax.Array:
        """Every stage's array on the stage `distance` further, in a circle."""
        if distance == 0:
            return x_BTD
        stages = self.mesh.shape["stage"]
        pairs = [(stage, (stage + distance) % stages) for stage in range(stages)]
        return self._manual(lambda x: jax.lax.ppermute(x, STAGE, pairs), x_BTD)

    def _manual(self, local: Callable, array: jax.Array, to: PartitionSpec | None = None):
        """`local` of each device's part; the result is split as `to`, or as `array`."""
        spec = jax.typeof(array).sharding.spec
        to = spec if to is None else to
        region = jax.shard_map(local, mesh=self.mesh, in_specs=spec, out_specs=to, check_vma=False)
        return region(array)


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """Consecutive layers of every chunk, whose weight gradients are made in the same operation."""

    first: int
    size: int
    # Types of gradient buffers of one chunk's weights, by layer; `dot.WeightGradOperands` where
    # BACKWARD leaves these for WEIGHT.
    buffers: Any = None
    deferred: tuple[dot.WeightGradRecord, ...] = ()


class Arguments(NamedTuple):
    """What a chunk computes with beside its input."""

    weights: Any  # of its layers, or of more if `row` is that of the first
    row: jax.Array | None
    buffers: tuple  # of the gradients, for each of `Context.runs`
    side_inputs: Any
    kinds: jax.Array | None  # of the layers, if they are known at run time only


@dataclasses.dataclass(frozen=True, eq=False)
class Context:
    """What does not change from tick to tick."""

    program: Program
    chunks: ModelChunks
    functions: ModelFunctions
    links: Links
    # Of this stage's layers, [slots, ...]: those that this step began with, then the step before's.
    weights: Any
    outer: Any  # likewise, [versions, ...] if there are several
    batch: dict[str, jax.Array]  # [M, B, T], then the step before's
    # Types of the gradients of this stage's layers; None = forward operations only.
    block_buffers: Any
    outer_buffers: Any
    kinds: tuple[str, ...] | jax.Array  # of the layers of every chunk, or of this stage's slots
    stage: jax.Array  # this stage's number
    versions: int = 1  # of the weights
    runs: tuple[Run, ...] = ()  # of a chunk's layers
    x_type: jax.ShapeDtypeStruct | None = None  # of what goes from chunk to chunk
    saves: saves_lib.Saves | None = None

    def mine(self, array: jax.Array) -> jax.Array:
        """This stage's entry of a row's array [stages]."""
        return _read(array, self.stage)

    def age(self, microbatch):
        """0 for a microbatch of this step or none, 1 for one of the step before."""
        return jnp.maximum(microbatch, 0) // self.program.table.num_microbatches

    def outer_of(self, microbatch) -> Any:
        """Embedding and head with which a microbatch goes through the model."""
        if self.versions == 1:
            return self.outer
        return jax.tree.map(lambda stack: _read(stack, self.age(microbatch)), self.outer)

    def rows(self, microbatch) -> dict[str, jax.Array]:
        """A microbatch's rows; of number 0 if it is negative."""
        return jax.tree.map(lambda array: _read(array, jnp.maximum(microbatch, 0)), self.batch)

    def arguments(self, chunk, microbatch, works: jax.Array | bool = True) -> Arguments:
        """What one chunk computes with, of one microbatch, beside its input.

        `works`: whether the stage has an operation; if not, gradients are to be zero.
        """
        size, per_stage = self.chunks.size, self.chunks.per_stage
        row = None
        kinds = None if isinstance(self.kinds, tuple) else self.kinds
        if kinds is not None and per_stage > 1:
            kinds = jax.lax.dynamic_slice_in_dim(kinds, chunk * size, size)
        if per_stage * self.versions > 1:
            row = (self.age(microbatch) * per_stage + chunk) * size
        buffers = ()
        if self.block_buffers is not None:
            make = lambda run: lambda leaf: sharding.zeros(leaf, run.size)  # noqa: E731
            buffers = tuple(jax.tree.map(make(run), run.buffers) for run in self.runs)
        side_inputs = self.functions.side_inputs(self.rows(microbatch), works)
        return Arguments(self.weights, row, buffers, side_inputs, kinds)

    def apply(self, x_BTD, arguments: Arguments, buffers: tuple = ()):
        """A chunk's output."""
        weights, row, _, side_inputs, kinds = arguments
        kinds = self.kinds if kinds is None else kinds
        for run, buffers_of in itertools.zip_longest(self.runs, buffers):
            first, row_of = run.first, row
            if run.size < self.chunks.size:
                row_of = first if row is None else row + first
            x_BTD = self.functions.apply_layers(
                weights, buffers_of, x_BTD, side_inputs, kinds[first : first + run.size],
                row=row_of, first=first,
            )  # fmt: skip
        return x_BTD

    def empty_outer(self, names) -> dict:
        buffers = self.outer_buffers  # of what is trained
        return {n: jax.tree.map(sharding.zeros, buffers[n]) for n in names if n in buffers}

    def differentiated(self, x_BTD, arguments: Arguments):
        """A chunk's output, and the function from its gradient to those of x and the buffers."""
        apply = lambda x_BTD, buffers: self.apply(x_BTD, arguments, buffers)  # noqa: E731
        return jax.vjp(apply, x_BTD, arguments.buffers)

    def embedded(self, buffers, microbatch):
        return self.functions.embed(self.outer_of(microbatch), buffers, self.rows(microbatch))


# ------------------------------------------------------------------------------------------ a tick


def run_tick(context: Context, body: Body, carry: Carry, row: Row) -> Carry:
    """One tick of all stages."""
    links, mine = context.links, context.mine
    row = links.after(carry.token, row)
    chunk, microbatch = mine(row.chunk), mine(row.microbatch)
    if FORWARD in body.kinds and carry.inputs is not None:
        # Not before the tick before has ended: what it works with takes as much memory.
        inputs, blocks = jax.lax.optimization_barrier((carry.inputs, carry.blocks))
        carry = carry._replace(inputs=inputs, blocks=blocks)
    embedded = None
    if body.when.embedding is not When.NEVER:
        embedded = _if(
            body, "embedding", row.embedding, links.ordered,
            lambda: context.embedded(None, row.embedding),
            lambda: sharding.zeros(context.x_type),
        )  # fmt: skip
    operations = {
        kind: functools.partial(OPERATIONS[kind], context, carry, row, chunk, microbatch, embedded)
        for kind in sorted(body.kinds)
    }
    if len(operations) == 1:
        # A stage without an operation does as the others; its results are not used.
        results = next(iter(operations.values()))()
    else:
        branch = jnp.searchsorted(np.array([IDLE, *operations]), mine(row.kind))
        with jax.named_scope(_expected(body.rows.kind, [IDLE, *operations])):
            results = _switch(branch, list(operations.values()))
    carry = _stored(context, carry, row, chunk, microbatch, results)
    if results.sent is None:
        return carry
    carry = carry._replace(token=links.completed(carry.token, results.sent))
    carry, row = _ends(context, body, carry, row, results.sent)
    return _exchanged(context, body.when, carry, row, results.sent)


def _forward(context: Context, carry: Carry, row: Row, chunk, microbatch, embedded) -> Results:
    """FORWARD: a chunk's output, and the activations that its derivative needs."""
    x_BTD = embedded
    if carry.inputs is not None:
        x_BTD = _read(carry.inputs, context.mine(row.input_slot))
        if embedded is not None:
            x_BTD = jnp.where(context.mine(row.is_first) > 0, embedded, x_BTD)
    arguments = context.arguments(chunk, microbatch)
    if context.saves is None:
        return Results(context.apply(x_BTD, arguments))
    y_BTD, saved = context.saves.forward(x_BTD, arguments)
    return Results(y_BTD, saved=saved)


def _backward(context: Context, carry: Carry, row: Row, chunk, microbatch, _) -> Results:
    """BACKWARD: gradients of a chunk's input and weights, some of these deferred."""
    mine = context.mine
    # A stage without an operation computes gradients of zero.
    works = mine(row.kind) == BACKWARD
    gradient = jnp.where(works, _read(carry.gradients, mine(row.gradient_slot)), 0)
    in_order = context.links.in_order
    saved = [in_order(_read(buffer, mine(row.saved_slot))) for buffer in carry.saved]
    arguments = context.arguments(chunk, microbatch, works)
    gradient_x, gradients = context.saves.backward(saved, arguments, gradient)
    is_deferred = lambda leaf: isinstance(leaf, dot.WeightGradOperands)  # noqa: E731
    leaves = jax.tree.leaves(gradients, is_leaf=is_deferred)
    return Results(
        gradient_x,
        deferred=tuple(leaf for leaf in leaves if is_deferred(leaf)),
        blocks=tuple(None if is_deferred(leaf) else leaf for leaf in leaves),
    )


def _weight(context: Context, carry: Carry, row: Row, *_) -> Results:
    """WEIGHT: the deferred gradients of a chunk's weights, from their operands."""
    mine = context.mine
    operands = [
        jax.tree.map(lambda buffer: _read(buffer, mine(row.deferred_slot)), buffers)
        for buffers in carry.deferred
    ]
    works = mine(row.kind) == WEIGHT
    operands = iter(
        two._replace(gradient=jnp.where(works, two.gradient, 0)) for two in operands
    )  # fmt: skip
    blocks = []
    for run in context.runs:
        records = iter(run.deferred)
        for uses_dot, buffer in zip(
            jax.tree.leaves(context.functions.uses_dot), jax.tree.leaves(context.block_buffers),
            strict=True,
        ):  # fmt: skip
            if not (uses_dot and run.deferred):
                blocks.append(None)
                continue
            record, layer_type = next(records), with_leading(buffer, of=1)
            layer = lambda two: sharding.to_buffer(record.gradient(two), layer_type)  # noqa: B023, E731
            blocks.append(jax.lax.map(layer, next(operands)))
    return Results(None, blocks=tuple(blocks))


OPERATIONS = {FORWARD: _forward, BACKWARD: _backward, WEIGHT: _weight}


def _switch(branch, functions: list[Callable]) -> Results:
    """The results of one of the functions, with zeros for those of others; 0 = of none.

    Conditionals copy what they change, so none changes a buffer.
    """
    types = [jax.eval_shape(function) for function in functions]
    sent = next(results.sent for results in types if results.sent is not None)
    longest = lambda name: max((getattr(results, name) for results in types), key=len)  # noqa: E731
    by_weight = zip(*(results.blocks for results in types if results.blocks), strict=True)
    blocks = tuple(
        next((leaf for leaf in leaves if leaf is not None), None) for leaves in by_weight
    )
    whole = Results(sent, longest("saved"), longest("deferred"), blocks)
    nothing = lambda: jax.tree.map(sharding.zeros, whole)  # noqa: E731

    def filled(function):
        results, empty = function(), nothing()
        blocks = zip(results.blocks or empty.blocks, empty.blocks, strict=True)
        return Results(
            empty.sent if results.sent is None else results.sent,
            results.saved or empty.saved,
            results.deferred or empty.deferred,
            tuple(zero if leaf is None else leaf for leaf, zero in blocks),
        )

    branches = [nothing, *(functools.partial(filled, function) for function in functions)]
    return jax.lax.switch(branch, branches)


# -------------------------------------------------------------------------------- after operations


def _stored(context: Context, carry: Carry, row: Row, chunk, microbatch, results: Results) -> Carry:
    """`carry` with what stays on the stage: saved activations, deferred and summed gradients."""
    # Stages that save nothing now write to a free slot: a choice would need the old value too.
    if results.saved:
        at, in_order = context.mine(row.save_slot), context.links.in_order
        pairs = zip(carry.saved, results.saved, strict=True)
        carry = carry._replace(saved=tuple(in_order(_written(b, at, v)) for b, v in pairs))
    if results.deferred:
        write = lambda buffer, new: _written(buffer, context.mine(row.defer_slot), new)  # noqa: E731
        carry = carry._replace(deferred=jax.tree.map(write, carry.deferred, results.deferred))
    if results.blocks:
        chunks, blocks = context.chunks, list(carry.blocks)
        at = (context.age(microbatch) * chunks.per_stage + chunk) * chunks.size
        of_runs = itertools.product(context.runs, range(len(blocks)))
        for (run, leaf), new in zip(of_runs, results.blocks, strict=True):
            if new is not None:
                blocks[leaf] = _plus(blocks[leaf], new, at + run.first)
        carry = carry._replace(blocks=tuple(blocks))
    return carry


def _ends(context: Context, body: Body, carry: Carry, row: Row, sent: jax.Array):
    """`carry` and `row` after the head and the embedding's gradient, which all stages share."""
    links, stage_of = context.links, context.program.table.stage_of
    for name, function, stage in (
        ("head", _head, stage_of[-1]),
        ("embedding_gradient", _embedding_gradient, stage_of[0]),
    ):
        if getattr(body.when, name) is not When.NEVER:
            row = links.after(carry.token, row)
            apply = functools.partial(function, context, stage, row, sent)
            microbatch, otherwise = getattr(row, name), lambda carry: carry
            carry = _if(body, name, microbatch, links.ordered, apply, otherwise, carry)
    return carry, row


def _head(context: Context, stage: int, row: Row, sent, carry: Carry) -> Carry:
    """Losses of a microbatch that left the last chunk, and the gradient that goes back into it."""
    microbatch, at = row.head, context.mine(row.head_gradient_slot)
    links, functions = context.links, context.functions
    x_BTD, rows = links.broadcast(sent, stage), context.rows(microbatch)
    outer = context.outer_of(microbatch)
    if context.block_buffers is None:
        losses = functions.losses(outer, None, x_BTD, rows)
        losses = _summed(context, carry.losses, losses, microbatch)
        return carry._replace(losses=losses, token=links.completed(carry.token, x_BTD))

    def loss(x_BTD, buffers):
        losses = functions.losses(outer, buffers, x_BTD, rows)
        return losses[0], losses

    buffers = context.empty_outer(functions.losses_names)
    _, pull, losses = jax.vjp(loss, x_BTD, buffers, has_aux=True)
    gradient_x, gradients = pull(jnp.ones(()))
    return carry._replace(
        losses=_summed(context, carry.losses, losses, microbatch),
        outer=carry.outer | _summed(context, carry.outer, gradients, microbatch),
        gradients=_written(carry.gradients, at, gradient_x, at >= 0),
        token=links.completed(carry.token, gradient_x),
    )


def _embedding_gradient(context: Context, stage: int, row: Row, sent, carry: Carry) -> Carry:
    """The embedding's gradient, of a microbatch that came back through the first chunk; if none
    did, zeros are added."""
    microbatch, gradient = row.embedding_gradient, context.links.broadcast(sent, stage)
    gradient = jnp.where(microbatch >= 0, gradient, 0)
    buffers = context.empty_outer(context.functions.embed_names)
    _, pull = jax.vjp(lambda buffers: context.embedded(buffers, microbatch), buffers)
    outer = carry.outer | _summed(context, carry.outer, *pull(gradient), microbatch)
    return carry._replace(outer=outer, token=context.links.completed(carry.token, gradient))


def _exchanged(context: Context, when: Row, carry: Carry, row: Row, sent: jax.Array) -> Carry:
    """`carry` with what arrives from other stages in its buffers."""
    links, entries = context.links, {"inputs": "input_arrivals", "gradients": "gradient_arrivals"}
    for distance in context.program.rows.input_arrivals:
        ticks = {name: getattr(when, entry)[distance] for name, entry in entries.items()}
        if set(ticks.values()) == {When.NEVER}:
            continue
        arrived = links.shift(links.after(carry.token, sent), distance)
        carry = carry._replace(token=links.completed(carry.token, arrived))
        for name, entry in entries.items():
            if ticks[name] is not When.NEVER:
                at = context.mine(getattr(row, entry)[distance])
                where = None if ticks[name] is When.ALWAYS else at >= 0
                buffer = _written(getattr(carry, name), at, arrived, where)
                carry = carry._replace(**{name: buffer})
    return carry


def _if(
    body: Body, name: str, microbatch, ordered: bool, function: Callable, otherwise: Callable,
    *arguments,
):  # fmt: skip
    """`function` if there is a microbatch in the row's entry `name`, or if the body says always.

    `ordered`: in a conditional also then, with a condition that the compiler does not know.
    """
    always = getattr(body.when, name) is When.ALWAYS
    if always and not ordered:
        return function(*arguments)
    takes = np.minimum(getattr(body.rows, name), 0)[:, None]
    with jax.named_scope(_expected(takes, [-1, 0])):
        return jax.lax.cond(microbatch >= (-1 if always else 0), function, otherwise, *arguments)


def _expected(taken: np.ndarray, branches: Sequence[int]) -> str:
    """The scope of a conditional. `taken`: int [ticks, stages], values of `branches`; of these
    BACKWARD takes longer than FORWARD, and this than WEIGHT and IDLE."""
    order = [IDLE, WEIGHT, FORWARD, BACKWARD] if IDLE in branches[:1] else list(branches)
    longest = np.vectorize(order.index)(taken).max(axis=1)
    times = [(taken == branch).sum() for branch in branches]
    ticks = [(longest == order.index(branch)).sum() for branch in branches]
    return EXPECTED_BRANCHES.format("_".join(map(str, times)), "_".join(map(str, ticks)))


def _summed(context: Context, total: Any, new: Any, microbatch) -> Any:
    """`total` [steps, ...] with `new` added in the row of a microbatch's step."""
    if isinstance(new, dict):
        total = {name: total[name] for name in new}
    add = lambda old, one: _plus(old, one[None], context.age(microbatch))  # noqa: E731
    return jax.tree.map(add, total, new)


def _plus(total: jax.Array, new: jax.Array, at) -> jax.Array:
    """`total` with `new` added to its rows from `at` on."""
    new = new.astype(total.dtype)
    if new.shape != total.shape:
        # Of an array that is not summed yet no slice can be taken.
        new = jax.lax.dynamic_update_slice_in_dim(jnp.zeros_like(total), new, at, 0)
    return total + new


def with_leading(leaf: Any, *sizes: int, of: int = 0) -> jax.ShapeDtypeStruct:
    """The type of `leaf` with the first `of` dimensions replaced by these, which are not split."""
    spec, entries = leaf.sharding.spec, leaf.sharding.spec.partitions
    spec = sharding.split_as(spec, *(None,) * len(sizes), *entries[of:])
    to = NamedSharding(leaf.sharding.mesh, spec)
    return jax.ShapeDtypeStruct((*sizes, *leaf.shape[of:]), leaf.dtype, sharding=to)


def _read(buffer: jax.Array, at) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(buffer, at, keepdims=False)


def _written(buffer: jax.Array, at, value: jax.Array, where=None) -> jax.Array:
    """`buffer` with `value` in one slot, if `where` is None or true."""
    if where is not None:
        at = jnp.maximum(at, 0)
        value = jnp.where(where, value, _read(buffer, at))
    return jax.lax.dynamic_update_index_in_dim(buffer, value, at, 0)
