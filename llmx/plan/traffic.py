"""What the devices of a step send each other, by mesh axes: counted, nothing is compiled.

Of each parameter, once per microbatch or step as the layout says: gathers before the forward and
the backward pass, the sum of its gradient, and the gather of what was updated elsewhere. Of
activations: the exchanges of tensor parallelism before and behind the products of each half block,
keys and values around a ring or heads of Ulysses, the lookup of tokens and the head. Bytes that one
device sends of a whole array of V bytes, in a group of n:

    all-gather, reduce-scatter, all-to-all    (n-1)/n V
    all-reduce                                2 (n-1)/n V
    collective-permute                        V

Not counted: numbers that do not grow with the model (losses, norms of gradients), and what a
strategy other than "mean" exchanges over `data`, which is in `llmx.plan.exchange`.

Letters: as in `llmx.model.costs`.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax.numpy as jnp

from llmx.aot import links
from llmx.config import Config, utilization
from llmx.config.axes import (
    WRITTEN_OUT,
    exchanges_ahead,
    gathers_ahead,
    gathers_head_ahead,
    gathers_head_once,
)
from llmx.config.state_memory import Leaf, leaves
from llmx.model import remat, remat_costs
from llmx.model.attention import ring, split
from llmx.model.families import ModelConfig, is_local
from llmx.plan import experts, orthogonal
from llmx.plan import passes as passes_lib
from llmx.plan.passes import Passes
from llmx.plan.sizes import Sizes
from llmx.sharding import scatter

PASSES = links.PASSES | {"all-to-all": 1.0}
LANES, ROWS = 128, 8  # of a tile: columns that XLA:TPU fills rows up to, and rows
# Of a scatter that it makes in parts, by the number of devices: 251 lanes were scattered over 2,
# 101 and not 149 over 4, 149 and not 197 over 8, 53 and not 101 over 16, 43 over 32, not 37 over
# 64, and not 197 over 512.
LANES_OF_A_PART, MOST_LANES = {2: 256, 4: 128, 8: 160, 16: 64, 32: 64}, 32
# Gathers that it makes of sums: 15.7 and 16.0 MiB were, 17.6 and 18 were not.
MOST_SUMMED = 16 * 2**20
IDS = FP32 = 4  # bytes of a token's id, of a number


@dataclasses.dataclass(frozen=True)
class Message:
    """Collectives of a step that are alike."""

    purpose: str  # "weights", "gradients", "activations", ...
    kind: str  # as XLA calls it
    axes: tuple[str, ...]
    bytes: float  # of the whole array in a group, as in `llmx.aot.collectives`
    count: float  # in a step
    size: int  # devices of a group
    name: str = ""  # of the parameter

    @property
    def sent(self) -> float:
        """Bytes that one device sends in a step."""
        if self.kind == "collective-permute":
            return self.bytes * self.count
        return PASSES[self.kind] * self.bytes * (1 - 1 / self.size) * self.count


def of(
    sizes: Sizes, *, turns: int = 1, on_gpu: bool = False, exchanges: bool = False,
    summed: int = 0, deferred: float = 1.0,
) -> list[Message]:  # fmt: skip
    """All messages of a resolved run's step.

    `turns`: groups of tokens that take turns in a layer (`config.recipe.turns_of`), each with a
    gradient of its own. `on_gpu`: in a program of XLA:GPU. `exchanges`: sums of which each device
    keeps a part are exchanges (`sharding.exchanges`), axis by axis. `summed`: devices of a slice,
    over all of which XLA:TPU makes all-reduces of reduce-scatters (`scatter.is_summed`); 0 = not.
    `deferred`: the share of layers whose weight gradients a schedule of zero bubble defers.
    """
    passes = passes_lib.of(sizes.run)
    if passes.weight:
        weight = passes.backward + deferred * (passes.weight - passes.backward)
        passes = dataclasses.replace(passes, weight=weight)
    peeled = on_gpu and gathers_ahead(sizes.run)
    if on_gpu and exchanges_ahead(sizes.run):
        passes = dataclasses.replace(
            passes, sends=passes.sends - passes.unread, lookups=passes.lookups - passes.idle
        )
    found = [
        *_weights(sizes, passes, turns, on_gpu), *_lookups(sizes, passes),
        *over_tensor(sizes, passes), *_replicated_heads(sizes, passes),
        *over_sequence(sizes, passes, peeled=peeled), *_stages(sizes, passes),
        *_over_expert(sizes, passes, peeled),
        *(_message(sizes, "whole matrices", *one) for one in orthogonal.messages(sizes)),
    ]  # fmt: skip
    if exchanges:
        found = [part for one in found for part in _exchanged(sizes, one)]
    elif not on_gpu:
        found = [_summed(sizes, one, summed) for one in found]
    found = [one for one in found if one.size > 1 and one.count and one.bytes]
    joins = on_gpu and not sizes.several
    return _joined(sizes, found, "positions") if joins else found


def _joined(sizes: Sizes, found: list[Message], name: str) -> list[Message]:
    """With one microbatch XLA:GPU sums the gradient of learned positions over all devices at once,
    where it is whole on each."""
    sums = [one for one in found if one.name == name and one.purpose == "gradients"]
    if [one.kind for one in sums] != ["all-reduce"] * 2:
        return found
    axes = tuple(axis for one in sums for axis in one.axes)
    whole = dataclasses.replace(sums[0], axes=axes, size=sizes.size(axes))
    return [one for one in found if one not in sums] + [whole]


def _summed(sizes: Sizes, one: Message, summed: int) -> Message:
    """A sum of a gradient, of which XLA:TPU makes an all-reduce: over a slice of so many devices;
    of the head and the MLP in some shapes; of attention's weights where columns are not whole
    (`cuts_rows`). Over such a slice of small weights' gathers, too."""
    if one.purpose == "weights" and one.size == summed and one.bytes <= MOST_SUMMED:
        return dataclasses.replace(one, kind="all-reduce")
    if one.purpose != "gradients" or one.kind != "reduce-scatter":
        return one
    of_head = one.name == sizes.head.name and sums_whole(sizes, one.size)
    columns = sizes.run.model.mlp_dim / sizes.mesh["tensor"]
    of_mlp = "/mlp/" in one.name and _has_no_parts(sizes, one.size, columns)
    of_attention = "/attention/" in one.name and cuts_rows(sizes, one.size)
    of_slice = one.size == summed and not {*one.axes} & {*sizes.run.mesh.across_slices}
    if of_slice or of_head or of_mlp or of_attention:
        return dataclasses.replace(one, kind="all-reduce")
    return one


def cuts_rows(sizes: Sizes, ways: int) -> bool:
    """Whether a device's columns of the width are no multiple of `ROWS`, nor the width of lanes: as
    compiled of five programs with 100, 375, 378 and 380 columns. With 8 times an odd number some of
    attention's leaves are summed whole, by a rule that is not known (`plan.uncertain`)."""
    width = sizes.run.model.width
    return width % LANES > 0 and width // ways % ROWS > 0


def sums_whole(sizes: Sizes, ways: int) -> bool:
    """Whether XLA:TPU sums all of a chunk of the head's gradient on each of so many devices."""
    rows = sizes.whole(sizes.head) / sizes.run.model.width / utilization.loss_chunks(sizes.run)
    return _has_no_parts(sizes, ways, rows)


def _has_no_parts(sizes: Sizes, ways: int, rows: float) -> bool:
    """Whether a gradient of so many rows of the width is not scattered over so many TPUs.

    Where a device's columns are not whole lanes, rows are what XLA:TPU fills up to lanes, and it
    scatters in parts of equal numbers of these: none is small enough where that number has too
    large a prime factor.
    """
    most = LANES_OF_A_PART.get(ways, MOST_LANES)
    return cuts_lanes(sizes, ways) and _largest_factor(math.ceil(rows / LANES)) > most


def cuts_lanes(sizes: Sizes, ways: int) -> bool:
    """Whether a device's columns of the width are not whole lanes."""
    return ways > 1 and sizes.run.model.width // ways % LANES > 0


def _largest_factor(number: int) -> int:
    """The largest prime factor; 1 of 1."""
    found = 1
    for factor in range(2, math.isqrt(number) + 1):
        while number % factor == 0:
            number, found = number // factor, factor
    return max(found, number)


def _exchanged(sizes: Sizes, one: Message) -> Iterator[Message]:
    """A sum of gradients as the exchanges that it is made of (`sharding.psum_scatter`)."""
    if one.purpose != "gradients" or one.kind != "reduce-scatter":
        yield one
        return
    num_bytes = one.bytes
    for axis in one.axes:
        for size in scatter.steps_of(sizes.mesh[axis]):
            yield dataclasses.replace(
                one, kind="all-to-all", axes=(axis,), bytes=num_bytes, size=size
            )
            num_bytes /= size


def by_axes(messages: Iterable[Message]) -> dict[str, float]:
    """Bytes that a device sends in a step, by mesh axes: "fsdp", "fsdp,tensor"."""
    sums = collections.Counter()
    for message in messages:
        sums[",".join(message.axes)] += message.sent
    return dict(sums)


def _message(sizes: Sizes, purpose, kind, axes, num_bytes, count, name="") -> Message:
    return Message(purpose, kind, tuple(axes), num_bytes, count, sizes.size(axes), name)


def _weights(sizes: Sizes, passes: Passes, turns: int, on_gpu: bool) -> Iterator[Message]:
    """Gathers of weights, sums of their gradients, gathers of what was updated."""
    # XLA adds gradients of turns up before they are summed over devices, but for bf16, whose
    # additions it makes in fp32.
    own_sums = turns if sizes.policy.reduce == jnp.bfloat16 else 1
    for leaf in leaves(sizes.run.model):
        if not leaf.is_matrix:
            yield from _of_vector(sizes, passes, leaf)
        elif leaf.of_layers:
            yield from _of_layers(sizes, passes, leaf, turns, own_sums, on_gpu)
        elif leaf == sizes.head:
            yield from _of_head(sizes, passes, leaf, on_gpu)
        else:
            yield from _of_table(sizes, passes, leaf)
        if leaf.is_matrix:
            yield from _updated(sizes, leaf)


def _of_vector(sizes: Sizes, passes: Passes, leaf: Leaf) -> Iterator[Message]:
    """Of a norm or bias. Where positions are split between blocks its gradient is summed over
    `tensor` too, behind each pass over its layer."""
    num_bytes = FP32 * sizes.local(leaf, "parameters")
    over = _summed_over(sizes, leaf)
    yield _message(sizes, "gradients", "all-reduce", over, num_bytes, passes.steps, leaf.name)
    if "norm" not in leaf.axes or not sizes.splits_positions:
        return
    count = 1
    if leaf.of_layers:
        num_bytes /= sizes.layers_of(leaf)
        count = passes.backward * (passes.blocks if leaf.in_blocks else passes.first)
        count *= sizes.run.model.repeats
    yield _message(sizes, "gradients", "all-reduce", ("tensor",), num_bytes, count, leaf.name)


def _summed_over(sizes: Sizes, leaf: Leaf) -> list[str]:
    """The mesh axes along which a parameter's devices see different tokens: to an expert come those
    of the whole axis that splits experts."""
    of_experts = sizes.axes_of("experts", "gradients") if "experts" in leaf.axes else ()
    return [axis for axis in sizes.token_axes if axis not in of_experts]


def _added_up(sizes: Sizes, passes: Passes, leaf: Leaf) -> Message:
    """The sum of a gradient over the mesh axes along which tokens differ that do not split it."""
    split_by = sizes.splitting(leaf, "gradients")
    over = [axis for axis in _summed_over(sizes, leaf) if axis not in split_by]
    num_bytes = sizes.summed_bytes(leaf) * sizes.whole(leaf) / sizes.size(split_by)
    return _message(sizes, "gradients", "all-reduce", over, num_bytes, passes.steps, leaf.name)


def _of_layers(
    sizes: Sizes, passes: Passes, leaf: Leaf, turns: int, own_sums: int, on_gpu: bool
) -> Iterator[Message]:
    """`own_sums`: of the `turns`, how many sum their gradients over devices by themselves."""
    run, layers = sizes.run, passes.blocks if leaf.in_blocks else passes.first
    numbers = sizes.whole(leaf) / sizes.layers_of(leaf)  # of a layer
    stack = sizes.stacks[-1 if leaf.in_blocks else 0].run
    again = _layers_again(stack, written_out=on_gpu and gathers_ahead(run))
    # Weights of attention, in heads, have another layout in each pass.
    shared = passes.shared * ("/mlp/" in leaf.name)
    gathered = (passes.forward + passes.backward - shared) * layers
    gathered += passes.backward * again
    times = run.model.repeats
    own_gathers = turns if on_gpu else 1
    gathered *= times * (1 + (own_gathers - 1) * _kept_whole(run))
    if run.sharding.gather == "step":
        gathered = sizes.layers_of(leaf) * passes.steps
    yield _message(
        sizes, "weights", "all-gather", sizes.axes_of("embed", "parameters"),
        sizes.gathered_bytes(leaf) * numbers, gathered, leaf.name,
    )  # fmt: skip
    yield _message(
        sizes, "gradients", "reduce-scatter", sizes.splitting(leaf, "gradients"),
        sizes.summed_bytes(leaf) * numbers,
        (passes.weight or passes.backward) * layers * own_sums * times,
        leaf.name,
    )  # fmt: skip
    total = _added_up(sizes, passes, leaf)
    if on_gpu and run.batch.accumulation == 1 and not sizes.splitting(leaf, "gradients"):
        # Pairs of turns are added up first: as compiled with four. Of several microbatches the sum
        # is behind the loop over them.
        total = dataclasses.replace(total, count=total.count * math.ceil(own_sums / 2))
    yield total


def _kept_whole(run: Config) -> float:
    """The share of layers that save everything: each of their turns gathers weights of its own
    (`model.turns`), of which XLA:TPU makes one gather."""
    policies = remat_costs.policies(run.model, run.remat)
    return sum(of.saved is None for of in policies) / len(policies)


def _layers_again(run: Config, *, written_out: bool = False) -> int:
    """Layers of a pass that are run once more before the backward pass, by segments or "part".
    `written_out`: loops of two turns are (`gathers_ahead`). Nothing takes the result of the last
    layer of such a segment, and XLA:GPU leaves it out where it saves nothing, in pipelines, too."""
    chunk = max(utilization.chunks_of(run), default=run.model.num_layers)
    if remat.keeps_input(run.remat):
        return chunk
    chunks = utilization.chunks_of(run)
    segments = remat_costs.segments(run.model, run.remat, chunks)
    policies = remat_costs.policies(run.model, run.remat, chunks)

    def left_out(first: int, end: int) -> bool:
        alike = written_out and end - first == WRITTEN_OUT and policies[end - 1].saved == set()
        return alike or _ends_alone(run, first, end)

    return sum(end - first - left_out(first, end) for first, end in segments if first < chunk)


def _ends_alone(run: Config, first: int, end: int) -> bool:
    """Whether the last layer of a segment is in no loop: it is alone, or of another kind than those
    before it in the one period of the segment. Nothing takes its result, so it is not run again.
    (Its FLOPs are counted all the same, with those of its segment.)"""
    kinds = run.model.layer_kinds
    one_period = end - first <= remat.period_of(kinds)
    alone = end - first == 1 or kinds[end - 1] != kinds[end - 2]
    return run.mesh.stage == 1 and one_period and alone


def _again_in_segments(run: Config, layers: int, peeled: bool) -> list[int]:
    """Whether each layer of a pass runs its attention once more with its segment. Nothing takes the
    result of a segment's last layer, but XLA leaves it out only where it is not in the loop over
    layers (`peeled`, `_ends_alone`)."""
    segments = remat_costs.segments(run.model, run.remat, utilization.chunks_of(run))
    if remat.keeps_input(run.remat):
        segments = [(0, layers)]
    found = [0] * layers
    for first, end in segments:
        left_out = peeled or _ends_alone(run, first, end)
        for layer in range(first, min(end - left_out, layers)):
            found[layer] = 1
    return found


def _of_head(sizes: Sizes, passes: Passes, leaf: Leaf, on_gpu: bool) -> Iterator[Message]:
    chunks = utilization.loss_chunks(sizes.run)
    num_bytes = sizes.gathered_bytes(leaf) * sizes.whole(leaf) / chunks
    # In both passes. The loop over several chunks gathers the first once more at its end, of which
    # the backward pass has no use. XLA:GPU writes out a loop of two turns, and leaves that out. One
    # chunk is still there for the backward pass.
    times = 1 if chunks == 1 else 2 * chunks + 1
    if chunks == 2 and on_gpu and gathers_head_ahead(sizes.run):
        times = 3
    count = times * passes.heads
    if gathers_head_once(sizes.run):  # with PipeDream-2BW both versions
        count = chunks * passes.steps
    over = sizes.axes_of("embed", "parameters")
    yield _message(sizes, "weights", "all-gather", over, num_bytes, count, leaf.name)
    num_bytes = sizes.reduce_bytes * sizes.whole(leaf) / chunks
    over, count = sizes.splitting(leaf, "gradients"), chunks * passes.heads
    yield _message(sizes, "gradients", "reduce-scatter", over, num_bytes, count, leaf.name)
    yield _added_up(sizes, passes, leaf)
    if sizes.mesh["stage"] > 1 and sizes.run.model.tied_head:
        yield _of_lookups(sizes, passes, leaf)


def _of_lookups(sizes: Sizes, passes: Passes, leaf: Leaf) -> Message:
    """Of rows that are looked up: where the width is split, each device has all terms. Where only
    gradients are split, those of each microbatch are, in a pipeline of each tick."""
    kept = sizes.axes_of("embed", "parameters")
    over = [axis for axis in sizes.splitting(leaf, "gradients") if axis not in kept]
    num_bytes = sizes.reduce_bytes * sizes.whole(leaf) / sizes.size(kept)
    count = passes.lookup_gradients
    return _message(sizes, "gradients", "reduce-scatter", over, num_bytes, count, leaf.name)


def _of_table(sizes: Sizes, passes: Passes, leaf: Leaf) -> Iterator[Message]:
    """Of a table that is only looked up."""
    yield (lookups := _of_lookups(sizes, passes, leaf))
    yield _added_up(sizes, passes, leaf)
    if "positions" in leaf.axes and sizes.splits_positions:
        # In a pipeline as they were added up over microbatches.
        number = FP32 if sizes.mesh["stage"] > 1 else sizes.reduce_bytes
        num_bytes, count = number * sizes.local(leaf, "gradients"), passes.steps
        if lookups.size > 1 and sizes.mesh["stage"] == 1:  # before each of these, whole
            num_bytes, count = lookups.bytes, lookups.count
        yield _message(sizes, "gradients", "all-reduce", ("tensor",), num_bytes, count, leaf.name)


def _updated(sizes: Sizes, leaf: Leaf) -> Iterator[Message]:
    """Where each device updates a share of what it keeps whole."""
    kept = sizes.axes_of("embed", "parameters")
    over = [axis for axis in sizes.splitting(leaf, "optimizer") if axis not in kept]
    num_bytes = sizes.param_bytes * sizes.whole(leaf) / sizes.size(kept)
    yield _message(sizes, "updated parameters", "all-gather", over, num_bytes, 1, leaf.name)


def _lookups(sizes: Sizes, passes: Passes) -> Iterator[Message]:
    """Ids, and columns of the result, of the replicas that split the width."""
    over = sizes.axes_of("embed", "parameters")
    num_bytes, count = IDS * sizes.tokens * sizes.size(over), passes.lookups
    yield _message(sizes, "ids", "all-gather", over, num_bytes, count)
    x_bytes = sizes.compute_bytes * sizes.tokens * sizes.run.model.width
    # Learned positions are looked up too; their gradient is the tokens'.
    count += passes.lookups * (sizes.run.model.positions == "learned") + passes.lookup_gradients
    yield _message(sizes, "looked-up rows", "all-to-all", over, x_bytes, count)


# Of a pass over a layer: before attention and MLP positions are gathered, behind them terms summed.
HALVES = 2
# Of a token, over a split vocabulary: its largest logit, sum of exponentials, and target's logit.
SUMS_OF_LOSS = 3


class Halves(NamedTuple):
    """How often a device gathers before half blocks, and sums behind them, in a step."""

    forward: float
    backward: float
    gathered_again: float  # for what the backward pass runs again
    summed_again: float


def halves(sizes: Sizes, passes: Passes) -> Halves:
    run, repeats = sizes.run, sizes.run.model.repeats
    policies = remat_costs.policies(run.model, remat.inside(run.remat))[: passes.layers]
    of_pass = HALVES * passes.layers * repeats
    again = HALVES * _layers_again(run)
    gathered = again + sum(map(_gathered_again, policies))
    summed = again + sum(_summed_again(run.model, of) for of in policies)
    return Halves(
        passes.forward * of_pass, passes.backward * of_pass,
        passes.backward * gathered * repeats, passes.backward * summed * repeats,
    )  # fmt: skip


def over_tensor(sizes: Sizes, passes: Passes) -> Iterator[Message]:
    """Activations [tokens, D]: before and behind each half block, lookup and head."""
    run, of = sizes.run, halves(sizes, passes)
    gathered = of.forward + of.backward + of.gathered_again
    summed = of.forward + of.backward + of.summed_again
    x_bytes = sizes.compute_bytes * sizes.tokens * run.model.width
    kinds = {
        "all-gather": gathered + passes.lookup_gradients + passes.heads,
        "reduce-scatter": summed + passes.lookups + passes.heads,
    }
    if not sizes.splits_positions:
        kinds = {"all-reduce": summed + passes.lookups + passes.heads}
    for kind, count in kinds.items():
        yield _message(sizes, "activations", kind, ("tensor",), x_bytes, count)
    over = sizes.axes_of("vocab", "activations")
    count = SUMS_OF_LOSS * passes.heads
    yield _message(sizes, "sums of the loss", "all-reduce", over, FP32 * sizes.tokens, count)


def _gathered_again(policy: remat.Policy) -> int:
    if policy.saved is None:
        return 0
    return HALVES - len(policy.saved & {remat.ATTENTION_NORM, remat.MLP_NORM})


def _summed_again(model: ModelConfig, policy: remat.Policy) -> int:
    """Attention's output is, to give the MLP its input; the MLP's where a norm follows it."""
    if policy.saved is None:
        return 0
    needed = {remat.ATTENTION_OUT} | ({remat.MLP_OUT} if model.post_norms else set())
    return len(needed - policy.saved)


def _replicated_heads(sizes: Sizes, passes: Passes) -> Iterator[Message]:
    """Where each device of `tensor` has all keys and values: their gradients, from all queries."""
    if sizes.axes_of("kv_heads", "activations"):
        return
    model = sizes.run.model
    num_bytes = 2 * sizes.compute_bytes * sizes.tokens * model.num_kv_heads * model.head_dim
    yield _message(
        sizes, "gradients of all keys and values", "all-reduce", ("tensor",), num_bytes,
        passes.backward * passes.layers,
    )  # fmt: skip


def over_sequence(sizes: Sizes, passes: Passes, *, peeled: bool = False) -> Iterator[Message]:
    """Heads that neighbours exchange, keys and values that travel around a ring. `peeled`: the last
    turn of the loop over layers is not in it."""
    run, model, over = sizes.run, sizes.run.model, ("sequence",)
    if sizes.mesh["sequence"] == 1:
        return
    of = split.Split(sizes.mesh["sequence"], run.attention.ulysses, run.attention.zigzag)
    policies = remat_costs.policies(model, remat.inside(run.remat))[: passes.layers]
    of_head = sizes.compute_bytes * sizes.tokens * (model.head_dim + model.value_width) / 2
    keys = model.num_kv_heads / sizes.size(sizes.axes_of("kv_heads", "activations"))
    again_in_segments = _again_in_segments(run, passes.layers, peeled)
    for layer, (kind, policy) in enumerate(zip(model.layer_kinds, policies, strict=False)):
        recomputed = policy.saved is not None
        of_segment = again_in_segments[layer]
        again = recomputed and remat.ATTENTION not in policy.saved
        window = model.window if is_local(kind) else 0
        steps = range(of.rings)  # without a window a device sees something of all others
        if window and of.rings > 1:
            steps = ring.tiling(of, run.batch.sequence_length, window).steps
        sends, home = len(steps) - 1, steps[-1] > 0
        num_bytes = 2 * keys * of_head
        # A ring that is run again makes its first send once for both passes.
        in_backward = sends * (1 + again + of_segment) - (again and sends > 0) + home
        yield _message(
            sizes, "keys and values", "collective-permute", over, num_bytes,
            passes.forward * sends + passes.backward * in_backward,
        )  # fmt: skip
        yield _message(
            sizes, "gradients of keys and values", "collective-permute", over,
            num_bytes * FP32 / sizes.compute_bytes, sends * passes.backward,
        )  # fmt: skip
        # Queries and results; keys and values, repeated where they do not divide.
        heads = 2 * model.num_heads / sizes.mesh["tensor"]
        heads += 2 * keys * (of.ulysses // math.gcd(int(keys), of.ulysses))
        count = passes.forward + passes.backward * (1 + recomputed + of_segment)
        yield Message("heads", "all-to-all", over, heads * of_head, count, of.ulysses)


def _over_expert(sizes: Sizes, passes: Passes, peeled: bool) -> Iterator[Message]:
    """Rows on their way to the devices of their experts, and back. `peeled`: of `_layers_again`."""
    if not sizes.run.model.num_experts:
        return
    again = passes.backward * _layers_again(sizes.stacks[-1].run, written_out=peeled)
    for purpose, num_bytes, forward, backward in experts.exchanges(sizes):
        count = passes.blocks * (passes.forward * forward + passes.backward * backward)
        count += again * forward
        yield _message(sizes, purpose, "all-to-all", ("expert",), num_bytes, count)


def _stages(sizes: Sizes, passes: Passes) -> Iterator[Message]:
    """Activations [tokens, D] between stages, and those of lookup and head, which all stages
    share."""
    x_bytes = sizes.compute_bytes * sizes.tokens_between * sizes.run.model.width
    over, shared = ("stage",), passes.lookups + passes.lookup_gradients + 2 * passes.heads
    yield _message(sizes, "between stages", "collective-permute", over, x_bytes, passes.sends)
    yield _message(sizes, "lookups and heads", "all-reduce", over, x_bytes, shared)
