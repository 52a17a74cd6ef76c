"""What comes and goes on a device of a pipeline in a step's ticks, counted without a compiler.

That depends on the program which a compiler makes of the ticks. `PROGRAMS` has the kinds that were
compiled, each with a function that counts it; docs/pipeline.md compares them with compiled ones.
One fact explains most of XLA:GPU's: what a loop over layers writes is made (as zeros) where the
code around that loop begins. Ticks that are in no loop, behind each other, so have all that they
will write from the first of them on. Where XLA gathers weights ahead, the last iteration of each
loop over ticks is in no loop either (`axes.gathers_ahead`).

Letters: as in `llmx.model.costs`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

from llmx import sharding
from llmx.config import Config, loss_memory, utilization
from llmx.config.axes import gathers_ahead, replica_axes, splits_parameters
from llmx.config.state_memory import Held, head_of, leaves
from llmx.model import precision, remat, remat_costs
from llmx.pipeline.schedule import BACKWARD, FORWARD, WEIGHT
from llmx.pipeline.ticks import Program

GRADIENT_BYTES = 4  # of a sum over microbatches, fp32
# Arrays [tokens, F] and [tokens, D] that are there at once while a layer is run again and
# differentiated: gate, up, their activation and its gradient; the stream, its gradient, both norms.
OF_MLP, OF_STREAM = 4, 4
# XLA:GPU gathers the next layer's weights ahead, has more arrays [tokens, F] at once, and copies
# `down` and `out` of all layers in fp32 before its loops, in another layout.
GATHERED_ON_GPU, MORE_OF_MLP_ON_GPU, COPIED_BYTES = 2, 6, 4
# In place of `OF_MLP` on GPUs that gather no weights: of several layers, of one, and where
# ticks are one after the other.
OF_MLP_WITHOUT_GATHERS, OF_MLP_OF_ONE_LAYER, OF_MLP_IN_TURN = 7, 3, 3
SELECTED_FACTORS = 0.6  # of the factors of a BACKWARD, on GPUs
LOOKUPS_AT_ONCE = 4  # gradients of the embedding beside a loss, where schedules interleave chunks


def of(ticks: "Ticks") -> float:
    """Bytes of a BACKWARD, or of the loss, whichever are more."""
    return next(count(ticks) for takes, count in PROGRAMS if takes(ticks))


@dataclasses.dataclass(frozen=True)
class Ticks:
    """A pipeline's ticks on a device, and the bytes of their arrays."""

    run: Config  # resolved, with stages
    program: Program
    deferred: int  # layers of each chunk whose weight gradients WEIGHT makes
    on_gpu: bool

    @functools.cached_property
    def held(self) -> Held:
        return Held(self.run)

    @functools.cached_property
    def chunks(self) -> tuple[int, ...]:
        return utilization.chunks_of(self.run)

    @property
    def size(self) -> int:
        """Layers of the longest chunk."""
        return max(self.chunks)

    @property
    def per_stage(self) -> int:
        """Chunks of a stage."""
        return len(self.chunks) // self.run.mesh.stage

    @property
    def policy(self) -> precision.Policy:
        return precision.policy_of(self.run.precision, self.run.reduce_dtype)

    # What kind of ticks these are.

    @property
    def joined(self) -> bool:
        """Whether the body of a loop has several ticks, of FORWARD and of BACKWARD."""
        return any(length > 1 for _, length, _ in self.program.loops)

    @property
    def written_out(self) -> bool:
        """Whether a loop has two ticks with heads, which XLA:GPU writes out."""
        heads = self.program.rows.head >= 0
        return any(
            (length, times) == (1, 2) and heads[first : first + 2].all()
            for first, length, times in self.program.loops
        )

    @property
    def splits_backward(self) -> bool:
        return self.program.table.splits_backward

    @property
    def gathers_ahead(self) -> bool:
        return self.on_gpu and gathers_ahead(self.run)

    @property
    def begins_nothing_early(self) -> bool:
        """Whether XLA:GPU has one tick after the other: where stages gather no weights, and blocks
        exchange activations over `tensor`; or each is one device, and its ticks of FORWARD are in
        one loop and those of BACKWARD in another."""
        table = self.program.table
        if not self.on_gpu or splits_parameters(self.run) or table.periodic:
            return False
        in_two_loops = not (self.joined or table.splits_backward or table.mixes_kinds)
        return self.run.mesh.tensor > 1 or (in_two_loops and not self.splits_tokens)

    @property
    def loops_ahead(self) -> bool:
        """Whether XLA:GPU gathers ahead in loops over ticks that have no branches."""
        table = self.program.table
        plain = not (table.mixes_kinds or table.periodic)
        return self.gathers_ahead and self.size > 1 and plain

    @property
    def has_periods(self) -> bool:
        """Whether a chunk's layers are a loop over periods of several kinds, with loops in it."""
        if remat_costs.branches(self.run.model, self.chunks):
            return False
        period = remat.period_of(self.run.model.layer_kinds[: self.size])
        return 1 < period <= self.size // 2

    @property
    def gathers_in_two_loops(self) -> bool:
        """Whether GPUs gather weights where they are used, in a loop over FORWARDs and in one over
        BACKWARDs."""
        gathers = self.on_gpu and splits_parameters(self.run) and not self.gathers_ahead
        return gathers and not (self.joined or self.splits_backward or self.program.table.periodic)

    @property
    def writes_out_layers(self) -> bool:
        """Whether XLA:GPU, where it gathers ahead, has no loop over a chunk's layers."""
        return self.size == 2 and not self.splits_backward

    @property
    def in_one_body(self) -> bool:
        return self.on_gpu and self.joined and not splits_parameters(self.run)

    @property
    def alone(self) -> bool:
        """Whether a loop over one layer is written out, into the body of the loop over ticks."""
        return self.size == 1 and self.joined

    @property
    def splits_tokens(self) -> bool:
        """Whether a stage has several devices with other tokens, which sum their gradients."""
        return any(vars(self.run.mesh)[axis] > 1 for axis in sharding.TOKEN_AXES)

    # What layers save.

    @property
    def saves_all(self) -> bool:
        """Whether layers save everything from FORWARD to BACKWARD."""
        text = remat.inside(self.run.remat)
        return not self.keeps_input and remat_costs.saves_all(self.run.model, text)

    @property
    def saves_products(self) -> bool:
        """Whether they save all products with weights, and not everything."""
        text = remat.inside(self.run.remat)
        return not self.keeps_input and remat_costs.saves_all_products(self.run.model, text)

    @property
    def saves_more_than_inputs(self) -> bool:
        """Whether a layer that is in no segment saves more than its input."""
        text = remat.inside(self.run.remat)
        apart = remat_costs.policies_apart(self.run.model, text, self.chunks)
        return any(policy.saved is None or policy.saved for policy in apart)

    @property
    def keeps_input(self) -> bool:
        """Whether a chunk's input is all that is kept from FORWARD to BACKWARD."""
        return remat.keeps_input(self.run.remat)

    @property
    def stores_factors_once(self) -> bool:
        """Whether XLA:GPU sees that several products have one input: where no branch is between,
        of ticks or of layers of several kinds."""
        one_body = self.on_gpu and self.joined and not self.program.table.mixes_kinds
        return one_body and len(set(self.run.model.layer_kinds)) == 1

    @property
    def rounds_gradients(self) -> bool:
        """Whether those of a microbatch are in another type than their sums."""
        return self.policy.reduce.itemsize < GRADIENT_BYTES

    # Bytes.

    @functools.cached_property
    def saved(self) -> float:
        """What the longest chunk saves of a microbatch until its layers are differentiated."""
        return kept(self.run, remat.inside(self.run.remat), self.chunks)

    @functools.cached_property
    def gradients(self) -> float:
        """Those of a chunk's weights, of one microbatch."""
        return self.policy.reduce.itemsize * self.of_layers(self.size, "gradients")

    @functools.cached_property
    def outside(self) -> float:
        """Gradients of embedding and head of one microbatch, which are one table where the head is
        tied. XLA:GPU has more of them. Without gathers, those of lookups are scattered when they
        are added up. Of a tied head both are there, beside each other, where ticks take branches;
        and where gradients are fp32, in 1F1B; and there, of layers of several kinds whose gradients
        are whole, those of two turns of the loop: a body has two, and begins the second early."""
        tables = (leaf for leaf in leaves(self.run.model) if not leaf.in_blocks)
        found = GRADIENT_BYTES * sum(self.held.numbers(leaf, "gradients") for leaf in tables)
        if self.on_gpu and not splits_parameters(self.run):
            found += self.table("embedding") - self.table("embedding", "gradients")
        if self.gathers_ahead and self.program.table.mixes_kinds:
            return found + self.tied
        if not self.in_one_body or self.per_stage > 1 or self.size == 1:
            return found
        several_kinds = len(set(self.run.model.layer_kinds)) > 1
        if self.size > 2 and several_kinds and _ways(self.run, "gradients") == 1:
            return 2 * (found + self.tied)
        return found + (0.0 if self.rounds_gradients else self.tied)

    @property
    def tied(self) -> float:
        """The head's own gradient, where it is the embedding's table."""
        return self.run.model.tied_head * self.table("embedding", "gradients")

    @property
    def copied(self) -> float:
        """Of `down` and `out` of all layers, a device's share."""
        model = self.run.model
        numbers = model.width * (model.mlp_dim + model.num_heads * model.head_dim)
        ways = self.run.mesh.tensor * _ways(self.run, "parameters")
        return self.per_stage * self.size * COPIED_BYTES * numbers / ways

    @property
    def more(self) -> float:
        """Of one layer's activations, on GPUs."""
        tokens = utilization.tokens_of(self.run) / self.run.mesh.sequence
        of_mlp = MORE_OF_MLP_ON_GPU * self.run.model.mlp_dim / self.run.mesh.tensor
        return self.policy.compute.itemsize * tokens * of_mlp

    @functools.cached_property
    def of_loss(self) -> float:
        return loss_memory.of(self.run, on_gpu=self.on_gpu)

    @property
    def factors(self) -> int:
        """What a BACKWARD leaves to WEIGHT, in a slot."""
        of_layer = factor_bytes(self.run, distinct=self.stores_factors_once)
        return self.deferred * of_layer * (self.program.slots["deferred"] > 0)

    @property
    def selected_factors(self) -> float:
        """`factors` before they are in a slot. As it selects what a branch returns, XLA:GPU has
        more than half of it twice, in chunks of several layers that gather no weights."""
        twice = self.on_gpu and self.size > 1 and not splits_parameters(self.run)
        return self.factors * (1 + SELECTED_FACTORS if twice else 1)

    def table(self, name: str, split: str = "parameters") -> float:
        """A table's gradient in fp32, before it is scattered."""
        tables = (leaf for leaf in leaves(self.run.model) if leaf.name == name)
        return GRADIENT_BYTES * sum(self.held.numbers(leaf, split) for leaf in tables)

    def of_layers(
        self, count: int, table: str, whole: tuple[str, ...] = (), part: str = ""
    ) -> float:
        """Numbers of some layers' parameters; `part`: of those with this in their names."""
        blocks = (leaf for leaf in leaves(self.run.model) if leaf.in_blocks and part in leaf.name)
        numbers = sum(self.held.numbers(leaf, table, whole=whole) for leaf in blocks)
        return count * numbers * self.run.mesh.stage / self.held.slots

    def gathered(self, count: int, part: str = "") -> float:
        """Some layers' weights, gathered."""
        numbers = self.of_layers(count, "parameters", ("embed",), part)
        return self.policy.compute.itemsize * numbers

    def layer(self, weights: int, of_mlp: float = OF_MLP) -> float:
        """One layer's activations, and some layers' weights, gathered."""
        run = self.run
        width = of_mlp * run.model.mlp_dim / run.mesh.tensor + OF_STREAM * run.model.width
        tokens = utilization.tokens_of(run) / run.mesh.sequence
        return self.gathered(weights) + self.policy.compute.itemsize * tokens * width

    @property
    def of_periods(self) -> float:
        """What XLA:GPU has more of a loop over periods: their parts of what the microbatch saved,
        as the loops within read and write them; and, where it gathers ahead, a second body's layer,
        as the last kind of a period is in no loop."""
        if not self.has_periods:
            return 0.0
        second = self.layer(GATHERED_ON_GPU) + self.more if self.gathers_ahead else 0.0
        return second + (1 + self.joined) * self.saved

    def backward(self, weights: int, share: float = 1.0, of_mlp: float = OF_MLP) -> float:
        """A microbatch's saved activations, read, or made again for a share of a chunk's layers;
        the gradients of a chunk's weights; and `layer`."""
        saved = self.saved * (share if self.keeps_input else 1.0)
        return saved + self.gradients + self.layer(weights, of_mlp)

    @property
    def fp32_of_layer(self) -> float:
        """Whole gradients of a layer's MLP, twice, as far as they are wider than its weights."""
        wider = self.policy.reduce.itemsize - self.policy.compute.itemsize
        return 2 * wider * self.of_layers(1, "parameters", ("embed",), "/mlp/")

    @property
    def of_fp32_gradients(self) -> float:
        """What XLA:GPU has more where gradients are fp32 as their sums are: it writes a sum to
        where the gradient was, and so copies those of all layers; and `fp32_of_layer`."""
        if self.rounds_gradients:
            return 0.0
        copied = GRADIENT_BYTES * self.of_layers(self.size * self.per_stage, "gradients")
        return copied + self.fp32_of_layer

    @property
    def begun(self) -> float:
        """Beside the loss on GPUs, of the ticks of a loop's body that are begun: what layers that
        save all, or all products, saved; of the latter also their gradients."""
        if not (self.saves_products or self.saves_all):
            return 0.0
        return kept(self.run, self.run.remat, self.chunks) + self.saves_products * self.gradients


def _in_turn(ticks: Ticks) -> float:
    """On GPUs that begin nothing early: nothing is copied but fp32 gradients that devices or
    WEIGHTs sum, and of the tables the embedding's is there alone."""
    table, several = ticks.program.table, ticks.size > 1
    working = ticks.backward(1, of_mlp=OF_MLP_IN_TURN)
    if table.mixes_kinds:
        rest = ticks.backward(1, ticks.deferred / ticks.size, OF_MLP_IN_TURN)
        working = max(working, ticks.selected_factors + rest)
    working += (lookups := ticks.table("embedding"))
    if several and (table.splits_backward or ticks.splits_tokens):
        working += ticks.of_fp32_gradients
    of_loss = ticks.of_loss
    if ticks.joined:
        of_loss += lookups + (ticks.begun if several or ticks.saves_all else 0.0)
    return max(working, of_loss)


def _loss(ticks: Ticks) -> float:
    """What is there while a head's logits are. In the ticks of a head the layers of a FORWARD or
    BACKWARD are done, or not begun; but XLA:GPU begins other ticks of a loop's body then, save with
    PipeDream-2BW; of one layer, which is no loop, the MLP's weights are gathered once for the ticks
    of a body."""
    found, alone = ticks.of_loss, ticks.alone
    if ticks.joined if ticks.on_gpu else not alone:
        found += ticks.outside
    if not ticks.joined:
        return found
    saves = not alone or remat.inside(ticks.run.remat) == "none"
    if ticks.on_gpu and saves and not ticks.program.table.periodic:
        found += ticks.more
    if alone and saves and _ways(ticks.run, "parameters") > 1:
        found += ticks.gathered(1, "/mlp/")
    return found


def _plain(ticks: Ticks) -> float:
    """On TPUs, and on GPUs whatever has no kind of its own."""
    on_gpu, alone = ticks.on_gpu, ticks.alone
    weights = GATHERED_ON_GPU if on_gpu else 1
    working = ticks.backward(weights)
    if alone and not ticks.keeps_input:  # read from slots where it is used
        working -= ticks.saved
    if ticks.program.table.mixes_kinds:
        # What a branch returns is beside the slots, once the other layers are differentiated.
        rest = ticks.backward(weights, ticks.deferred / ticks.size)
        working = max(working, ticks.selected_factors + rest)
    working += ticks.outside + on_gpu * ticks.more
    if ticks.in_one_body and not alone and ticks.saves_all and _ways(ticks.run, "gradients") == 1:
        working += _part_of_loss(ticks)
    of_loss = _loss(ticks)
    if ticks.gathers_ahead and ticks.written_out:
        of_loss += 2 * ticks.saved + ticks.more  # two FORWARDs at a time, one with its logits
    working = max(working, of_loss)
    if on_gpu:
        copied = ticks.copied + (ticks.of_fp32_gradients if ticks.size > 1 else 0.0)
        # Of branches WEIGHT's alone.
        working += copied * (ticks.deferred / ticks.size if ticks.program.table.mixes_kinds else 1)
        if ticks.gathers_ahead and ticks.joined and not alone:
            # XLA:GPU begins the next body's ticks, and so has a microbatch's saved activations
            # twice, and those that come from slots once more, in another layout.
            from_slots = ticks.saves_more_than_inputs and not ticks.keeps_input
            working += (1 + from_slots) * ticks.saved
    return working


def _interleaved_loss(ticks: Ticks) -> float:
    """`_loss` of GPUs that gather no weights, where the body of a loop has several ticks."""
    found = _loss(ticks)
    if ticks.per_stage > 1:
        found += (LOOKUPS_AT_ONCE - 1) * ticks.table("embedding") + ticks.begun
        if not ticks.alone and not ticks.rounds_gradients and not ticks.saves_products:
            found += ticks.gradients
    return found


def _part_of_loss(ticks: Ticks) -> float:
    """Of the loss beside a BACKWARD whose layers save all, or all products, where gradients are
    whole: a part's logits, and the sum of the head's gradient over several."""
    run = ticks.run
    found = loss_memory.logits_of_chunk(run) + loss_memory.gradients_of_logits(run)
    if utilization.loss_chunks(run) > 1:
        found += ticks.table(head_of(run.model).name)
    return found


def _without_gathers(ticks: Ticks) -> float:
    """Several layers on GPUs, in a body of several ticks that gathers no weights: the gradients of
    a chunk's weights twice, and of a tied head whose logits are one chunk the gradient of these, as
    its own is not made before that of the embedding is added."""
    run = ticks.run
    found = ticks.backward(1, of_mlp=OF_MLP_WITHOUT_GATHERS) + ticks.gradients + ticks.outside
    saves = ticks.saves_all or ticks.saves_products
    found += saves * kept(run, run.remat, ticks.chunks) + ticks.of_periods  # of a FORWARD
    if saves and _ways(run, "gradients") == 1:
        found += _part_of_loss(ticks)
    elif run.model.tied_head and utilization.loss_chunks(run) == 1:
        found += loss_memory.gradients_of_logits(run)
    return max(found, _interleaved_loss(ticks))


def _of_one_layer(ticks: Ticks) -> float:
    """The same of one layer: its weights in the compute dtype for a FORWARD and a BACKWARD, and a
    part of the head, where they are cast; what it saved is read from slots where it is used."""
    casts = ticks.policy.compute != ticks.policy.param
    found = ticks.backward(1 + casts, of_mlp=OF_MLP_OF_ONE_LAYER) + ticks.outside
    found += casts * loss_memory.head_of_chunk(ticks.run)
    if not ticks.keeps_input:
        found -= ticks.saved
    return max(found, _interleaved_loss(ticks))


def _layers_written_out(ticks: Ticks) -> float:
    """Two layers on GPUs that gather ahead: they are in no loop, and read what they saved from
    slots. Beside the loss is what two FORWARDs saved."""
    around = ticks.outside + ticks.copied + ticks.gradients
    of_layer = ticks.layer(GATHERED_ON_GPU) + ticks.more + ticks.fp32_of_layer
    of_loss = ticks.of_loss + 2 * ticks.saved + ticks.written_out * ticks.more
    return around + max(of_layer, of_loss)


def _in_two_loops(ticks: Ticks) -> float:
    """On GPUs that gather ahead, with a loop over FORWARDs and one over BACKWARDs (gpipe): one of a
    loop, and the last, which is behind it. FORWARDs that save everything are not begun early."""
    around = ticks.outside + ticks.copied
    of_layer = ticks.layer(GATHERED_ON_GPU) + ticks.more + ticks.fp32_of_layer
    of_backward = ticks.tied + of_layer + 2 * ticks.gradients + ticks.saved + ticks.of_periods
    forwards = 1 if ticks.saves_all else 2
    of_loss = ticks.of_loss + forwards * ticks.saved + ticks.written_out * ticks.more
    return around + max(of_backward, of_loss)


def _gathered_in_turn(ticks: Ticks) -> float:
    """On GPUs that gather weights where they are used, as beside `tensor`, with two such loops."""
    around = ticks.outside + ticks.copied
    of_backward = ticks.layer(1) + ticks.gradients + ticks.saved
    return around + max(of_backward, ticks.of_loss + ticks.tied + 2 * ticks.saved)


def _in_bodies_of_several(ticks: Ticks) -> float:
    """On GPUs that gather ahead, with ticks of FORWARD and BACKWARD (and WEIGHT) in one body.
    Beside a BACKWARD of interleaved chunks, in a loop, one microbatch's saved activations are
    there, but where layers save all or all products."""
    around = ticks.outside + ticks.tied + ticks.copied
    of_layer = ticks.layer(GATHERED_ON_GPU) + ticks.more + ticks.fp32_of_layer
    interleaved = ticks.per_stage > 1
    in_turn = interleaved and not (ticks.saves_all or ticks.saves_products)
    most = 0.0
    for at, (first, length, times) in enumerate(ticks.program.loops):
        forwards, backwards, weights = (
            _written_ahead(ticks, at, kind) for kind in (FORWARD, BACKWARD, WEIGHT)
        )
        if BACKWARD not in ticks.program.table.kind[first : first + length]:
            continue
        written = backwards * ticks.gradients
        if ticks.splits_backward:
            in_loop = ticks.deferred > 2  # over the layers of a BACKWARD
            written = weights * ticks.gradients + ticks.factors * (backwards if in_loop else 1)
            written += (backwards - 1) * ticks.table("embedding")
        of_backward = of_layer + (1 if in_turn and times > 2 else forwards) * ticks.saved
        of_backward += ticks.of_periods
        of_head = ticks.of_loss + forwards * ticks.saved + interleaved * ticks.tied
        has_head = (ticks.program.rows.head[first : first + length * times] >= 0).any()
        most = max(most, written + max(of_backward, has_head * of_head))
    return around + most


def _split_in_one_body(ticks: Ticks) -> float:
    """On GPUs that gather no weights, with ticks of FORWARD, BACKWARD and WEIGHT in one body. Two
    turns of a loop are at work at a time where their layers are in no loop."""
    of_layer = ticks.layer(1, OF_MLP_WITHOUT_GATHERS)
    second = ticks.size <= 2
    most = 0.0
    for at, (first, length, times) in enumerate(ticks.program.loops):
        forwards, backwards, weights = (
            _written_ahead(ticks, at, kind) for kind in (FORWARD, BACKWARD, WEIGHT)
        )
        if BACKWARD not in ticks.program.table.kind[first : first + length]:
            continue
        written = weights * ticks.gradients + (backwards + second) * ticks.factors
        written += (forwards + second) * ticks.saved
        has_head = (ticks.program.rows.head[first : first + length * times] >= 0).any()
        most = max(most, written + max(of_layer, has_head * ticks.of_loss))
    return ticks.outside + second * ticks.table("embedding") + most


def _written_ahead(ticks: Ticks, at: int, kind: int) -> int:
    """Ticks of a kind whose results XLA:GPU makes before one of the loop `at` ends: that tick, and
    those in no loop behind it. Where it gathers ahead that is also the last turn of a loop; but of
    a loop of one tick, as at the end of 1F1B, it is not made in a loop before."""
    found, ahead = 0, ticks.gathers_ahead
    for place, (first, length, times) in enumerate(ticks.program.loops[at:]):
        body = ticks.program.table.kind[first : first + length]
        in_body = int((body == kind).any(axis=1).sum())
        if times == 1 or (ahead and times == 2):  # in no loop
            found += in_body * times
        elif place == 0:
            found += in_body * (1 + ahead)
        elif length > 1 or ticks.program.loops[at][2] <= 2:
            found += in_body * ahead
    return found


def _has_several(ticks: Ticks) -> bool:
    return not ticks.alone and (ticks.rounds_gradients or ticks.per_stage > 1)


def _has_one(ticks: Ticks) -> bool:
    return ticks.alone and not ticks.program.table.periodic


# Kinds of programs, the first that takes a pipeline's ticks counts them.
PROGRAMS: tuple[tuple[Callable[[Ticks], bool], Callable[[Ticks], float]], ...] = (
    (lambda ticks: ticks.begins_nothing_early, _in_turn),
    (lambda ticks: ticks.loops_ahead and ticks.writes_out_layers, _layers_written_out),
    (lambda ticks: ticks.loops_ahead and not ticks.joined, _in_two_loops),
    (lambda ticks: ticks.loops_ahead, _in_bodies_of_several),
    (lambda ticks: ticks.gathers_in_two_loops, _gathered_in_turn),
    (lambda ticks: ticks.in_one_body and ticks.splits_backward, _split_in_one_body),
    (lambda ticks: ticks.in_one_body and _has_several(ticks), _without_gathers),
    (lambda ticks: ticks.in_one_body and _has_one(ticks), _of_one_layer),
    (lambda ticks: True, _plain),
)


def factor_bytes(run: Config, *, distinct: bool = False) -> int:
    """Per layer and microbatch, the factors of all its weight gradients: the input of each product
    with a weight, and the gradient of its output; `distinct`: an input of several products once."""
    mesh, model = run.mesh, run.model
    D, F, H, N, K = model.width, model.mlp_dim, model.head_dim, model.num_heads, model.num_kv_heads
    inward = 2 if model.gated_mlp else 1
    # Into queries, keys, values and MLP, out of both halves.
    whole = ((1 if distinct else 3) + 1 + (1 if distinct else inward) + 1) * D
    heads = (N + 2 * K) * H + N * H
    if R := model.kv_latent:  # into latents, out of them, and through them
        Q, V = model.query_latent, model.value_dim
        whole += 2 * (Q + R) + model.rope_dim - D
        heads = N * (H + H - model.rope_dim + V + V)
    split = heads + inward * F + F  # over `tensor`
    compute = precision.policy_of(run.precision, run.reduce_dtype).compute.itemsize
    tokens = utilization.tokens_of(run) // mesh.sequence
    return math.ceil(compute * tokens * (whole + split / mesh.tensor))


def kept(run: Config, text: str, chunks: tuple[int, ...]) -> float:
    """Bytes that the longest chunk saves of a microbatch."""
    return tokens_of(run) * remat_costs.saved_bytes_of_chunk(
        run.model, text=text, chunks=chunks,
        compute_bytes=precision.POLICIES[run.precision].compute.itemsize,
    )  # fmt: skip


def tokens_of(run: Config) -> float:
    """Of a microbatch, that a device has between products."""
    ways = run.mesh.sequence * (run.mesh.tensor if run.sharding.sequence_parallel else 1)
    return utilization.tokens_of(run) / ways


def _ways(run: Config, table: str) -> int:
    """Over how many devices a layout's table splits the width."""
    return math.prod(vars(run.mesh)[axis] for axis in replica_axes(run, table))
