"""One executor for every pipeline: it runs a table's operations on the mesh axis `stage`.

A tick of the table is an iteration of a loop: every stage does its operation, if it has one, on its
own microbatch and part of the layers; then results go to the stages that need them. Ticks of one
kind of operation in a row are one loop whose body has that operation and no other; so have ticks
that alternate. In ticks of several kinds each stage takes the branch of its own. The axis `stage`
is hidden (see `llmx.sharding`): inside, everything is placed over the other axes as without stages.

Buffers are those that the table needs: from its ticks each value gets a place for just as long as
somebody waits for it.

    inputs      what a part takes, from its arrival to its forward operation
    kept        what the forward operation keeps for the backward one, as the remat policy says
    gradients   of a part's output, from their arrival to its backward operation
    products    factors of weight gradients, from the backward operation to the weight operation

Embedding and head are on all stages, each with an equal share of the vocabulary, and each
microbatch's are computed by all of them together (arXiv 2411.05288): no stage has more to hold or
to do than another, and a table that is embedding and head at once needs no second copy.

Mesh axes: neighbours on `stage` exchange activations and their gradients; sums over `stage` of what
enters the head and leaves the embedding.

Letters: B batch, T positions, D width, M microbatches.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from llmx import sharding
from llmx.model import dot
from llmx.pipeline.permutation import EMPTY
from llmx.pipeline.schedule import BACKWARD, FORWARD, IDLE, WEIGHT
from llmx.pipeline.stages import ModelChunks
from llmx.pipeline.ticks import Program

STAGE = ("stage",)


@dataclasses.dataclass(frozen=True, eq=False)
class Pieces:
    """A model in pieces, as functions of one microbatch's rows (a dict of arrays [B, T]).

    `outer` are the parameters of embedding and head by name, `weights` those of one part's layers,
    each with sinks for their gradients (see `sharding.accumulate_into`); None = not differentiated.

      embed(outer, sinks, rows) -> x                 the first part's input
      beside(rows) -> tree                           what every part takes beside x
      part(weights, sinks, x, beside, kinds) -> x    one part
      losses(outer, sinks, x, rows) -> scalars       of the last part's output, as a tuple; what is
                                                     differentiated is the first
    """

    embed: Callable
    beside: Callable
    part: Callable
    losses: Callable
    embed_names: tuple[str, ...]  # of `outer`, what embed and losses use
    losses_names: tuple[str, ...]
    products: Any  # of each of the layers' weights, whether it is multiplied by `dot.dot`


def inside(place: sharding.Placement) -> sharding.Placement:
    """The placement of what a stage does by itself."""
    return dataclasses.replace(place, local_axes=(*STAGE, *place.local_axes))


class Gradient(NamedTuple):
    """What a step makes: sums over all microbatches."""

    losses: tuple[jax.Array, ...]
    blocks: Any  # as staged, in fp32, split as their sinks are
    outer: Any


class _Kept(NamedTuple):
    """What differentiating a part keeps: how it is put together, and what has to be stored."""

    structure: Any
    given: tuple[int | None, ...]  # of each value, which of the arguments it is
    stored: tuple[jax.ShapeDtypeStruct, ...]  # the others


class _Made(NamedTuple):
    """What an operation makes."""

    sent: jax.Array  # the part's output, or the gradient of its input
    kept: tuple[jax.Array, ...] = ()
    products: tuple[dot.WeightGradOperands, ...] = ()
    blocks: tuple[jax.Array | None, ...] = ()  # gradients of one part's weights


class _Carry(NamedTuple):
    """What goes from tick to tick."""

    inputs: jax.Array | None
    gradients: jax.Array | None
    kept: tuple[jax.Array, ...]
    products: tuple[dot.WeightGradOperands, ...]
    blocks: tuple[jax.Array, ...]  # sums of gradients
    outer: Any
    losses: tuple[jax.Array, ...]
    turn: jax.Array  # 0: see `_Run.done`


@dataclasses.dataclass(frozen=True, eq=False)
class _Run:
    """What does not change from tick to tick."""

    program: Program
    parts: ModelChunks
    pieces: Pieces
    place: sharding.Placement  # `stage` is hidden
    weights: tuple  # of this stage's layers: those that this step began with, the step before's
    outer: tuple
    batch: dict[str, jax.Array]  # [M, B, T], then the step before's
    # Types of the gradients of this stage's layers; None = forward operations only. Those that the
    # backward operation makes may be `dot.WeightGradOperands`.
    sinks: Any
    backward_sinks: Any
    outer_sinks: Any
    kinds: tuple[str, ...] | jax.Array  # of the layers of every part, or of this stage's places
    me: jax.Array  # this stage's number
    x_type: jax.ShapeDtypeStruct | None = None  # of what goes from part to part

    def age(self, microbatch):
        """0 for a microbatch of this step, 1 for one of the step before."""
        return microbatch // self.program.table.num_microbatches

    def version(self, versions: tuple, microbatch):
        """The parameters with which a microbatch goes through all parts, forward and backward."""
        if len(versions) == 1:
            return versions[0]
        old = self.age(microbatch) > 0
        return jax.tree.map(lambda new, before: jnp.where(old, before, new), *versions)

    def rows(self, microbatch) -> dict[str, jax.Array]:
        """A microbatch's rows; of number 0 if it is negative."""
        return jax.tree.map(lambda array: _read(array, jnp.maximum(microbatch, 0)), self.batch)

    def arguments(self, chunk, microbatch) -> tuple:
        """weights, sinks, beside and kinds of one part and microbatch."""
        size = self.parts.size

        def share(tree):
            if self.parts.per_stage == 1:
                return tree
            take = lambda array: jax.lax.dynamic_slice_in_dim(array, chunk * size, size)  # noqa: E731
            return jax.tree.map(take, tree)

        sinks = None
        if self.sinks is not None:
            sinks = jax.tree.map(lambda leaf: sharding.zeros(leaf, size), self.backward_sinks)
        kinds = self.kinds if isinstance(self.kinds, tuple) else share(self.kinds)
        weights = share(self.version(self.weights, microbatch))
        return weights, sinks, self.pieces.beside(self.rows(microbatch)), kinds

    def sinks_of(self, names) -> dict:
        return {name: jax.tree.map(sharding.zeros, self.outer_sinks[name]) for name in names}

    def differentiated(self, x_BTD, weights, sinks, beside, kinds):
        """A part's output, and the function from its gradient to those of x and sinks."""
        part = lambda x, sinks: self.pieces.part(weights, sinks, x, beside, kinds)  # noqa: E731
        return jax.vjp(part, x_BTD, sinks)

    def embedded(self, sinks, microbatch):
        outer = self.version(self.outer, microbatch)
        return self.pieces.embed(outer, sinks, self.rows(microbatch))

    @property
    def in_turn(self) -> bool:
        """Whether everything that communicates has to wait for what did before.

        XLA:CPU starts loops and collectives that do not depend on each other in any order, on each
        device in another, and then they wait for each other until XLA ends the process.
        """
        return self.place.mesh.devices.flat[0].platform == "cpu"

    def done(self, turn, array):
        """`turn`, when `array` is there. It is always 0, which the compiler cannot know."""
        if not self.in_turn:
            return turn

        def local(array):
            first = array.reshape(-1)[0]
            return ((first != first) & (first == first)).astype(jnp.int32)

        to = jax.typeof(array).sharding.spec
        return turn + jax.shard_map(
            local, mesh=self.place.mesh, in_specs=to, out_specs=PartitionSpec(), check_vma=False
        )(array)

    def wait(self, turn, tree):
        """`tree`, integers or arrays, when `turn` is there."""
        if not self.in_turn:
            return tree
        late = lambda a: a + turn if a.dtype == jnp.int32 else jnp.where(turn == 0, a, 0)  # noqa: E731
        return jax.tree.map(late, tree)

    def spread(self, x_BTD, stage: int):
        """One stage's array on all stages."""

        def local(x_BTD):
            mine = jax.lax.axis_index(STAGE) == stage
            return jax.lax.psum(jnp.where(mine, x_BTD, 0), STAGE)

        return self._region(local, x_BTD)

    def shifted(self, x_BTD, distance: int):
        """Every stage's array on the stage so many further, in a circle."""
        if distance == 0:
            return x_BTD
        stages = self.place.mesh.shape["stage"]
        pairs = [(stage, (stage + distance) % stages) for stage in range(stages)]
        return self._region(lambda x_BTD: jax.lax.ppermute(x_BTD, STAGE, pairs), x_BTD)

    def _region(self, local: Callable, x_BTD):
        to = jax.typeof(x_BTD).sharding.spec
        return jax.shard_map(
            local, mesh=self.place.mesh, in_specs=to, out_specs=to, check_vma=False
        )(x_BTD)


def run_table(
    program: Program,
    parts: ModelChunks,
    pieces: Pieces,
    place: sharding.Placement,
    *,
    params: tuple[Any, ...],
    batches: tuple[dict[str, jax.Array], ...],
    kinds: tuple,
    sinks: tuple[Any, Any] | None,
    flight: "Flight | type[Flight] | None" = None,
) -> tuple[Gradient, "Flight | None"]:
    """All operations of a table.

    Args:
      program: of the table.
      parts: where the layers are.
      pieces: the model.
      place: the mesh, and the layout; `stage` is not hidden.
      params: (blocks, outer): weights of the layers as staged, [places, ...], and the other
        parameters. For a periodic table twice: of this step, and of the step before.
      batches: arrays [M, B, T], whole along `stage`; as often.
      kinds: of the model's layers; what `pieces.part` makes of them.
      sinks: types of the gradients of blocks and outer; None = no gradients.
      flight: of a periodic table, what the step before returned; `Flight` itself = nothing.

    Returns sums over microbatches, each with a leading dimension of steps (this one, the one
    before), and for a periodic table what is under way. Gradients are in fp32, placed as their
    sinks, of which each device may hold a term of the sum; those of layers have the steps one after
    the other, and `stage` hidden.
    """
    mesh, ages = place.mesh, len(params)
    stages = np.arange(mesh.shape["stage"], dtype=np.int32)
    block_sinks = None if sinks is None else jax.tree.map(_of_stage, sinks[0])
    run = _Run(
        program=program, parts=parts, pieces=pieces,
        place=inside(place),
        weights=tuple(hidden(blocks, mesh) for blocks, _ in params),
        outer=tuple(outer for _, outer in params),
        batch=jax.tree.map(lambda *each: jnp.concatenate(each), *batches),
        sinks=block_sinks, backward_sinks=block_sinks,
        outer_sinks=None if sinks is None else sinks[1],
        kinds=_kinds(parts, kinds, mesh), me=_by_stage(stages, mesh)[0],
    )  # fmt: skip
    run = dataclasses.replace(run, x_type=jax.eval_shape(lambda: run.embedded(None, 0)))
    noted = ()
    if program.table.splits_backward:
        noted, backward_sinks = _noted(run)
        run = dataclasses.replace(run, backward_sinks=backward_sinks)
    kept = None if sinks is None else _kept(run)
    losses = jax.eval_shape(lambda x: pieces.losses(run.outer[0], None, x, run.rows(0)), run.x_type)
    several = lambda leaf: sharding.empty_sum(_stacked(leaf, ages))  # noqa: E731
    carry = _Carry(
        **_buffers(run, kept, noted),
        blocks=tuple(
            sharding.empty_sum(_longer(leaf, ages)) for leaf in jax.tree.leaves(block_sinks)
        ),
        outer=None if sinks is None else jax.tree.map(several, run.outer_sinks),
        losses=jax.tree.map(lambda leaf: jnp.zeros((ages, *leaf.shape), leaf.dtype), losses),
        turn=jnp.zeros((), jnp.int32),
    )  # fmt: skip
    if isinstance(flight, Flight):
        carry = carry._replace(**_landed(flight, carry, mesh))
    rows = program.operation | {
        f"{name}+{distance}": array
        for distance, names in program.arrivals.items() for name, array in names.items()
    }  # fmt: skip
    rows = {name: array.astype(np.int32) for name, array in rows.items()}
    for first, length, times in program.loops:
        end = first + length * times
        present = [_present(program, slice(first + at, end, length)) for at in range(length)]

        def body(carry, row, present=present):
            for at, there in enumerate(present):
                carry = _tick(run, kept, noted, there, carry, {n: a[at] for n, a in row.items()})
            return carry, None

        steps = {n: a[first:end].reshape(times, length, *a.shape[1:]) for n, a in rows.items()}
        carry, _ = jax.lax.scan(body, carry, steps)
    blocks = jax.tree.unflatten(jax.tree.structure(block_sinks), carry.blocks)
    made = Gradient(carry.losses, blocks, carry.outer)
    return made, None if flight is None else _under_way(carry, mesh)


class Flight(NamedTuple):
    """What is under way between the steps of a periodic table: arrays [stages, places, ...]."""

    inputs: jax.Array | None
    gradients: jax.Array | None
    kept: tuple[jax.Array, ...]


def _under_way(carry: _Carry, mesh: jax.sharding.Mesh) -> Flight:
    def one(array):
        to = sharding.split_only(jax.typeof(array).sharding.spec)
        array = jax.sharding.reshard(array, to)
        # What manual regions keep is split over all axes, `stage` too.
        return (
            array
            if "stage" in sharding.used_axes(to)
            else sharding.from_local(mesh, STAGE, array[None])
        )

    return jax.tree.map(one, Flight(carry.inputs, carry.gradients, carry.kept))


def _landed(flight: Flight, carry: _Carry, mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """The buffers of `carry` with what is under way in them."""

    def one(array, buffer):
        to = jax.typeof(buffer).sharding.spec
        if "stage" not in sharding.used_axes(to):
            array = sharding.to_local(mesh, STAGE, array)[0]
        return jax.sharding.reshard(array, to)

    buffers = Flight(carry.inputs, carry.gradients, carry.kept)
    return jax.tree.map(one, flight, buffers)._asdict()


def _buffers(
    run: _Run, kept: _Kept | None, noted: tuple[dot.WeightGradRecord, ...]
) -> dict[str, Any]:
    """Empty places for everything that waits."""
    places = run.program.places
    of = lambda name: _buffer(run.x_type, places[name]) if places[name] else None  # noqa: E731
    return {
        "inputs": of("inputs"),
        "gradients": of("gradients"),
        "kept": () if kept is None else tuple(_buffer(k, places["kept"]) for k in kept.stored),
        "products": tuple(
            jax.tree.map(lambda leaf: _buffer(leaf, places["products"]), note.types)
            for note in noted
        ),
    }


def hidden(tree: Any, mesh: jax.sharding.Mesh) -> Any:
    """Arrays split over `stage` along their first dimension, with that axis hidden."""
    return jax.tree.map(lambda array: sharding.to_local(mesh, STAGE, array), tree)


def revealed(tree: Any, mesh: jax.sharding.Mesh) -> Any:
    """The reverse of `hidden`."""
    return jax.tree.map(lambda array: sharding.from_local(mesh, STAGE, array), tree)


def _by_stage(numbers: np.ndarray, mesh: jax.sharding.Mesh) -> jax.Array:
    """Each stage's share of `numbers`."""
    to = NamedSharding(mesh, PartitionSpec("stage"))
    return hidden(jax.sharding.reshard(jnp.asarray(numbers), to), mesh)


def of_stage(to: NamedSharding) -> NamedSharding:
    """The sharding of an array as staged, with `stage` hidden."""
    return NamedSharding(to.mesh, sharding.split_as(to.spec, None, *to.spec.partitions[1:]))


def _of_stage(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    kind = leaf.sharding
    shape = (leaf.shape[0] // kind.mesh.shape["stage"], *leaf.shape[1:])
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=of_stage(kind))


def _longer(leaf: jax.ShapeDtypeStruct, times: int) -> jax.ShapeDtypeStruct:
    shape = (leaf.shape[0] * times, *leaf.shape[1:])
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=leaf.sharding)


def _kinds(parts: ModelChunks, kinds: tuple, mesh: jax.sharding.Mesh) -> tuple | jax.Array:
    """The kinds of every part's layers, or int[places of this stage] where parts differ."""
    at = [EMPTY if layer == EMPTY else kinds[layer] for layer in parts.slots]
    by_part = {tuple(at[i : i + parts.size]) for i in range(0, len(at), parts.size)}
    if len(by_part) == 1:
        return by_part.pop()
    names = sorted(set(kinds))
    numbers = [EMPTY if kind == EMPTY else names.index(kind) for kind in at]
    return _by_stage(np.array(numbers, np.int32), mesh)


def _present(program: Program, ticks: slice) -> dict[str, Any]:
    """What is in these ticks: True = in all, None = in some, False = in none."""

    def how_many(array):
        there = array[ticks] >= 0
        return True if there.all() else None if there.any() else False

    kinds = program.table.kind[ticks]
    return {
        "kinds": set(np.unique(kinds).tolist()) - {IDLE},
        "embeds": how_many(program.operation["embeds"]),
        "loses": how_many(program.operation["loses"]),
        "unembeds": how_many(program.operation["unembeds"]),
        "arrivals": {
            distance: {n: how_many(a) for n, a in names.items() if how_many(a) is not False}
            for distance, names in program.arrivals.items()
            if any(how_many(array) is not False for array in names.values())
        },
    }


def _tick(
    run: _Run,
    kept: _Kept | None,
    noted: tuple[dot.WeightGradRecord, ...],
    present: dict[str, Any],
    carry: _Carry,
    row,
) -> _Carry:
    """One tick. `present` says what the ticks of its loop have at all, so that others are not in
    the program."""
    row = run.wait(carry.turn, row)
    mine = lambda name: _read(row[name], run.me)  # noqa: E731
    chunk, microbatch = mine("chunk"), mine("microbatch")

    if FORWARD in present["kinds"] and carry.inputs is not None and carry.blocks is not None:
        # Not before the tick before has ended: what it works with takes as much room.
        inputs, blocks = jax.lax.optimization_barrier((carry.inputs, carry.blocks))
        carry = carry._replace(inputs=inputs, blocks=blocks)
    if present["embeds"] is not False:
        entered = _if(
            row["embeds"] >= 0, present["embeds"] and not run.in_turn,
            lambda: run.embedded(None, row["embeds"]),
            lambda: sharding.zeros(run.x_type),
        )  # fmt: skip

    def forward() -> _Made:
        x_BTD = entered if carry.inputs is None else _read(carry.inputs, mine("inputs"))
        if present["embeds"] is not False and carry.inputs is not None:
            x_BTD = jnp.where(mine("first") > 0, entered, x_BTD)
        weights, sinks, beside, kinds = run.arguments(chunk, microbatch)
        if run.sinks is None:
            return _Made(run.pieces.part(weights, None, x_BTD, beside, kinds))
        y_BTD, pull = run.differentiated(x_BTD, weights, sinks, beside, kinds)
        values = zip(jax.tree.leaves(pull), kept.given, strict=True)
        return _Made(y_BTD, kept=tuple(value for value, number in values if number is None))

    def backward() -> _Made:
        # A stage that has nothing to do makes gradients of zero.
        gradient = jnp.where(mine("kind") == BACKWARD, _read(carry.gradients, mine("gradients")), 0)
        leaves = jax.tree.leaves(run.arguments(chunk, microbatch))
        stored = iter([_read(buffer, mine("kept")) for buffer in carry.kept])
        values = [next(stored) if number is None else leaves[number] for number in kept.given]
        gradient_x, gradients = jax.tree.unflatten(kept.structure, values)(gradient)
        leaves = jax.tree.leaves(gradients, is_leaf=_is_factors)
        return _Made(
            gradient_x,
            products=tuple(leaf for leaf in leaves if _is_factors(leaf)),
            blocks=tuple(None if _is_factors(leaf) else leaf for leaf in leaves),
        )

    def weight() -> _Made:
        found = [jax.tree.map(lambda b: _read(b, mine("products")), two) for two in carry.products]
        mine_is = mine("kind") == WEIGHT
        found = [each._replace(gradient=jnp.where(mine_is, each.gradient, 0)) for each in found]
        sinks = jax.tree.leaves(run.sinks)
        made = iter(zip(noted, found, strict=True))

        def one(product, sink):
            if not product:
                return None
            note, factors = next(made)
            layer = lambda factors: sharding.to_buffer(note.gradient(factors), _row(sink))  # noqa: E731
            return jax.lax.map(layer, factors)

        products = jax.tree.leaves(run.pieces.products)
        return _Made(None, blocks=tuple(map(one, products, sinks)))

    operations = {FORWARD: forward, BACKWARD: backward, WEIGHT: weight}
    operations = {kind: operations[kind] for kind in sorted(present["kinds"])}
    if len(operations) == 1:
        # A stage without an operation does what the others do, and nobody uses what comes out.
        made = next(iter(operations.values()))()
    else:
        branch = jnp.searchsorted(np.array([IDLE, *operations]), mine("kind"))
        made = _switch(branch, list(operations.values()))
    # Stages that keep nothing now write where nothing is: a choice would need the old value too.
    if made.kept:
        at = mine("keeps")
        kept_now = [_written(b, at, v) for b, v in zip(carry.kept, made.kept, strict=True)]
        carry = carry._replace(kept=tuple(kept_now))
    if made.products:
        put = lambda buffer, new: _written(buffer, mine("puts"), new)  # noqa: E731
        products = [
            jax.tree.map(put, *two) for two in zip(carry.products, made.products, strict=True)
        ]
        carry = carry._replace(products=tuple(products))
    if made.blocks:
        carry = carry._replace(blocks=_added(run, carry.blocks, made.blocks, chunk, microbatch))
    sent = made.sent
    if sent is None:
        return carry

    carry = carry._replace(turn=run.done(carry.turn, sent))
    stage_of = run.program.table.stage_of
    for name, function, stage in (
        ("loses", _lose, stage_of[-1]),
        ("unembeds", _unembed, stage_of[0]),
    ):
        if present[name] is not False:
            row = run.wait(carry.turn, row)
            apply = functools.partial(function, run, stage, row, sent)
            always = present[name] and not run.in_turn
            carry = _if(row[name] >= 0, always, apply, lambda carry: carry, carry)
    for distance, names in present["arrivals"].items():
        arrived = run.shifted(run.wait(carry.turn, sent), distance)
        carry = carry._replace(turn=run.done(carry.turn, arrived))
        for name, always in names.items():
            at = mine(f"{name}+{distance}")
            buffer = _written(carry._asdict()[name], at, arrived, None if always else at >= 0)
            carry = carry._replace(**{name: buffer})
    return carry


def _lose(run: _Run, stage: int, row, sent, carry: _Carry) -> _Carry:
    """Losses of a microbatch that went through the last part, and its gradient's way back."""
    microbatch, at = row["loses"], _read(row["losing"], run.me)
    x_BTD, rows = run.spread(sent, stage), run.rows(microbatch)
    outer = run.version(run.outer, microbatch)
    if run.sinks is None:
        found = run.pieces.losses(outer, None, x_BTD, rows)
        losses = _with(run, carry.losses, found, microbatch)
        return carry._replace(losses=losses, turn=run.done(carry.turn, x_BTD))

    def loss(x_BTD, sinks):
        found = run.pieces.losses(outer, sinks, x_BTD, rows)
        return found[0], found

    sinks = run.sinks_of(run.pieces.losses_names)
    _, pull, found = jax.vjp(loss, x_BTD, sinks, has_aux=True)
    gradient_x, gradients = pull(jnp.ones(()))
    return carry._replace(
        losses=_with(run, carry.losses, found, microbatch),
        outer=carry.outer | _with(run, carry.outer, gradients, microbatch),
        gradients=_written(carry.gradients, at, gradient_x, at >= 0),
        turn=run.done(carry.turn, gradient_x),
    )


def _unembed(run: _Run, stage: int, row, sent, carry: _Carry) -> _Carry:
    """Gradients of the embedding from a microbatch's way back through the first part."""
    microbatch, gradient = row["unembeds"], run.spread(sent, stage)
    sinks = run.sinks_of(run.pieces.embed_names)
    _, pull = jax.vjp(lambda sinks: run.embedded(sinks, microbatch), sinks)
    outer = carry.outer | _with(run, carry.outer, *pull(gradient), microbatch)
    return carry._replace(outer=outer, turn=run.done(carry.turn, gradient))


def _if(condition, always, function: Callable, otherwise: Callable, *arguments):
    """`always`: True if the condition holds in every tick."""
    if always is True:
        return function(*arguments)
    return jax.lax.cond(condition, function, otherwise, *arguments)


def _with(run: _Run, total: Any, new: Any, microbatch) -> Any:
    """`total` [ages, ...] with `new` added in the row of a microbatch's step."""
    if isinstance(new, dict):
        total = {name: total[name] for name in new}
    add = lambda old, one: _plus(old, one[None], run.age(microbatch))  # noqa: E731
    return jax.tree.map(add, total, new)


def _added(run: _Run, total: tuple, gradients: tuple, chunk, microbatch) -> tuple:
    """`total`, over a stage's layers, with the gradients of one part; None is not added."""
    at = (run.age(microbatch) * run.parts.per_stage + chunk) * run.parts.size
    each = zip(total, gradients, strict=True)
    return tuple(old if new is None else _plus(old, new, at) for old, new in each)


def _plus(total: jax.Array, new: jax.Array, at) -> jax.Array:
    """`total` with `new` added to its rows from `at` on."""
    new = new.astype(total.dtype)
    if new.shape != total.shape:
        # Of an array that is not summed yet no slice can be taken.
        new = jax.lax.dynamic_update_slice_in_dim(jnp.zeros_like(total), new, at, 0)
    return total + new


def _is_factors(leaf: Any) -> bool:
    return isinstance(leaf, dot.WeightGradOperands)


def _row(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The type of one layer's share of an array over layers."""
    spec = leaf.sharding.spec
    to = NamedSharding(leaf.sharding.mesh, sharding.split_as(spec, *spec.partitions[1:]))
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=to)


def _noted(run: _Run) -> tuple[tuple[dot.WeightGradRecord, ...], Any]:
    """The products of a part, with types over its layers, and sinks that leave their gradients."""
    size = run.parts.size
    sinks = jax.tree.map(
        lambda leaf, product: dot.WeightGradRecord() if product else leaf,
        run.sinks,
        run.pieces.products,
    )

    def trace(x_BTD):
        weights, _, beside, kinds = run.arguments(0, 0)
        given = jax.tree.map(lambda leaf: sharding.zeros(leaf, size), sinks)
        return run.pieces.part(weights, given, x_BTD, beside, kinds)

    jax.eval_shape(trace, run.x_type)
    is_note = lambda leaf: isinstance(leaf, dot.WeightGradRecord)  # noqa: E731
    notes = [leaf for leaf in jax.tree.leaves(sinks, is_leaf=is_note) if is_note(leaf)]
    for note in notes:
        note.types = jax.tree.map(lambda leaf: _stacked(leaf, size), note.types)
    return tuple(notes), jax.tree.map(
        lambda leaf: leaf.types if is_note(leaf) else leaf, sinks, is_leaf=is_note
    )


def _read(buffer: jax.Array, at) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(buffer, at, keepdims=False)


def _written(buffer: jax.Array, at, value: jax.Array, where=None) -> jax.Array:
    """`buffer` with `value` at one place, if `where` is None or true."""
    if where is not None:
        at = jnp.maximum(at, 0)
        value = jnp.where(where, value, _read(buffer, at))
    return jax.lax.dynamic_update_index_in_dim(buffer, value, at, 0)


def _switch(branch, functions: list[Callable]) -> _Made:
    """What one of the functions makes, and zeros in the place of what others make; 0 = none.

    Conditionals copy what they change, so none changes a buffer.
    """
    types = [jax.eval_shape(function) for function in functions]
    sent = next(made.sent for made in types if made.sent is not None)
    longest = lambda name: max((getattr(made, name) for made in types), key=len)  # noqa: E731
    each = zip(*(made.blocks for made in types if made.blocks), strict=True)
    blocks = tuple(next((leaf for leaf in leaves if leaf is not None), None) for leaves in each)
    whole = _Made(sent, longest("kept"), longest("products"), blocks)

    def filled(function):
        made = function()
        empty = jax.tree.map(sharding.zeros, whole)
        blocks = made.blocks or empty.blocks
        return _Made(
            empty.sent if made.sent is None else made.sent,
            made.kept or empty.kept,
            made.products or empty.products,
            tuple(
                zero if leaf is None else leaf
                for leaf, zero in zip(blocks, empty.blocks, strict=True)
            ),
        )

    nothing = lambda: jax.tree.map(sharding.zeros, whole)  # noqa: E731
    branches = [nothing, *(functools.partial(filled, function) for function in functions)]
    return jax.lax.switch(branch, branches)


def _buffer(leaf: jax.ShapeDtypeStruct, places: int) -> jax.Array:
    return sharding.zeros(_stacked(leaf, places))


def _stacked(leaf: jax.ShapeDtypeStruct, num: int) -> jax.ShapeDtypeStruct:
    spec = leaf.sharding.spec
    to = NamedSharding(leaf.sharding.mesh, sharding.split_as(spec, None, *spec.partitions))
    return jax.ShapeDtypeStruct((num, *leaf.shape), leaf.dtype, sharding=to)


def _type(array: Any) -> Any:
    kind = jax.typeof(array)
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=kind.sharding)


def _kept(run: _Run) -> _Kept:
    """What one part keeps of one microbatch."""
    found = []

    def trace(x_BTD, arguments):
        _, pull = run.differentiated(x_BTD, *arguments)
        values, structure = jax.tree.flatten(pull)
        numbers = {id(leaf): number for number, leaf in enumerate(jax.tree.leaves(arguments))}
        given = tuple(numbers.get(id(value)) for value in values)
        stored = tuple(_type(v) for v, number in zip(values, given, strict=True) if number is None)
        found.append(_Kept(structure, given, stored))

    jax.eval_shape(lambda x: trace(x, run.arguments(0, 0)), run.x_type)
    return found[0]
