"""What comes and goes on a device of a pipeline in a step's ticks, counted without a compiler.

That depends on the program which a compiler makes of the ticks. `PROGRAMS` has the kinds that were
compiled, each with a function that counts it; docs/plan.md says how far off they are.

One fact explains most of XLA:GPU's: what a loop over layers writes is made (as zeros) where the
code around that loop begins. Ticks that are in no loop, behind each other, so have all that they
will write from the first of them on. Where XLA gathers weights ahead, the last iteration of each
loop over ticks is in no loop either (`axes.exchanges_ahead`).
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from llmx.config import loss_memory, tick_arrays, utilization
from llmx.config.axes import WRITTEN_OUT
from llmx.config.state_memory import head_of
from llmx.config.tick_arrays import GRADIENT_BYTES, Ticks
from llmx.model import remat
from llmx.pipeline.schedule import BACKWARD, FORWARD, WEIGHT

# Arrays [tokens, F] of a layer, in place of `tick_arrays.OF_MLP`, on GPUs that gather no weights:
# of several layers, of one, and where there is one tick at a time.
OF_MLP_WITHOUT_GATHERS, OF_MLP_OF_ONE_LAYER, OF_MLP_IN_TURN = 7, 3, 3
FREED = 0.25  # of the factors that WEIGHT reads
# A whole head's gradients where weights are gathered once a step and the loss has several chunks:
# those of two chunks that are added up, and their sum.
HEADS_OF_CHUNKS = 3
FEW_LAYERS = 4  # of a chunk, where BACKWARDs behind a loop begin with it (of 4 layers, not of 7)
LOOKUPS_AT_ONCE = 4  # gradients of the embedding beside a loss, where schedules interleave chunks


def of(ticks: Ticks) -> float:
    """Bytes of a BACKWARD, or of the loss, whichever are more."""
    return program_of(ticks)(ticks) + ticks.gathered_for_step


def program_of(ticks: Ticks) -> Callable[[Ticks], float]:
    """What counts these ticks: the first of `PROGRAMS` that takes them."""
    return next(count for takes, count in PROGRAMS if takes(ticks))


# ------------------------------------------------------------------------------------ any program


def _loss(ticks: Ticks) -> float:
    """What is there while a head's logits are. In the ticks of a head the layers of a FORWARD or
    BACKWARD are done, or not begun; but XLA:GPU begins other ticks of a loop's body then, save with
    PipeDream-2BW; of one layer, which is no loop, the MLP's weights are gathered once for the ticks
    of a body."""
    found, alone = ticks.of_loss, ticks.alone
    beside_layers = ticks.joined if ticks.on_gpu else not alone
    if beside_layers:
        found += ticks.outside
    if not ticks.joined:
        return found
    saves = not alone or remat.inside(ticks.run.remat) == "none"
    if ticks.on_gpu and saves and not ticks.periodic:
        found += ticks.more_of_mlp
    if alone and saves and ticks.ways("parameters") > 1:
        found += ticks.gathered(1, "/mlp/")
    return found


def _part_of_loss(ticks: Ticks) -> float:
    """Of the loss beside a BACKWARD whose layers save all, or all products, where gradients are
    whole: a part's logits, and the sum of the head's gradient over several."""
    run = ticks.run
    found = loss_memory.logits_of_chunk(run) + loss_memory.gradients_of_logits(run)
    if utilization.loss_chunks(run) > 1:
        found += ticks.table_gradient(head_of(run.model).name)
    return found


def _or_in_branch(
    ticks: Ticks, found: float, weights: int, of_mlp: float = tick_arrays.OF_MLP
) -> float:
    """A BACKWARD, or, where ticks take branches and if that is more, what a branch returns: it is
    beside the slots, once the other layers are differentiated."""
    if not ticks.mixes_kinds:
        return found
    rest = ticks.backward(weights, ticks.deferred_share, of_mlp)
    return max(found, ticks.selected_factors + rest)


def _one_backward(ticks: Ticks, weights: int) -> float:
    """A BACKWARD that gathers the weights of so many layers at a time."""
    found = ticks.backward(weights)
    if ticks.alone and not ticks.keeps_input:  # read from slots where it is used
        found -= ticks.saved
    return _or_in_branch(ticks, found, weights) + ticks.outside


def _on_tpu(ticks: Ticks) -> float:
    return max(_one_backward(ticks, 1), _loss(ticks))


def _otherwise(ticks: Ticks, of_backward: float = 0.0, of_loss: float = 0.0) -> float:
    """On GPUs: a BACKWARD with the weights of two layers and more of the MLP, and copies. So are
    ticks with branches (`zb_h1`, `zb_v`, `dual_pipe_v`), of which the WEIGHTs are what is copied
    for; and joined ones over `fsdp` and `tensor`. `of_backward`, `of_loss`: beside these."""
    working = _one_backward(ticks, 2) + ticks.more_of_mlp + of_backward
    one_chunk = ticks.layers > 1 and ticks.chunks_per_stage == 1
    sums = one_chunk and not ticks.periodic  # PipeDream-2BW has those of two steps apart
    copied = ticks.copied + (ticks.of_fp32_gradients if sums else 0.0)
    if ticks.mixes_kinds:
        copied *= ticks.deferred_share
    return max(working, _loss(ticks) + of_loss) + copied


# ------------------------------------------------------------------ GPUs that gather no weights


def _in_turn(ticks: Ticks) -> float:
    """One tick at a time: nothing is copied but fp32 gradients that devices or WEIGHTs sum, and of
    the tables the embedding's is there alone."""
    several = ticks.layers > 1
    working = ticks.backward(1, of_mlp=OF_MLP_IN_TURN)
    working = _or_in_branch(ticks, working, 1, OF_MLP_IN_TURN)
    working += (lookups := ticks.table_gradient("embedding"))
    if several and (ticks.splits_backward or ticks.splits_tokens) and not ticks.periodic:
        working += ticks.of_fp32_gradients
    of_loss = ticks.of_loss
    if ticks.joined:
        of_loss += lookups + (ticks.begun if several or ticks.saves_all else 0.0)
    return max(working, of_loss)


def _whole(ticks: Ticks) -> float:
    """Several layers, in a body of several ticks: the gradients of a chunk's weights twice, and of
    a tied head whose logits are one chunk the gradient of these, as its own is not made before that
    of the embedding is added."""
    run = ticks.run
    found = ticks.backward(1, of_mlp=OF_MLP_WITHOUT_GATHERS) + ticks.gradients + ticks.outside
    found += ticks.of_periods
    saves = ticks.saves_all or ticks.saves_products
    found += saves * ticks.saved_by_forward
    found += ticks.begun_again if ticks.chunks_per_stage == 1 else 0.0
    if saves and ticks.ways("gradients") == 1:
        found += _part_of_loss(ticks)
    elif run.model.tied_head and utilization.loss_chunks(run) == 1:
        found += loss_memory.gradients_of_logits(run)
    return max(found, _interleaved_loss(ticks))


def _whole_fp32(ticks: Ticks) -> float:
    """The same with gradients in fp32, as their sums are: the sums are copied, and so it is not
    there twice."""
    of_backward = 0.0
    if ticks.saves_all and ticks.ways("gradients") == 1:
        of_backward += _part_of_loss(ticks)
    if ticks.keeps_input:
        of_backward += ticks.begun_again - ticks.gradients
    return _otherwise(ticks, of_backward)


def _gpipe_whole(ticks: Ticks) -> float:
    """With `part`, what the two turns in a loop's body make again."""
    again = ticks.layers > 1 and ticks.keeps_input
    return _otherwise(ticks, again * ticks.saved)


def _of_one_layer(ticks: Ticks) -> float:
    """The same of one layer: its weights in the compute dtype for a FORWARD and a BACKWARD, and a
    part of the head, where they are cast; what it saved is read from slots where it is used."""
    casts = ticks.policy.compute != ticks.policy.param
    found = ticks.backward(1 + casts, of_mlp=OF_MLP_OF_ONE_LAYER) + ticks.outside
    found += casts * loss_memory.head_of_chunk(ticks.run)
    if not ticks.keeps_input:
        found -= ticks.saved
    return max(found, _interleaved_loss(ticks))


def _branches_of_split_gradients(ticks: Ticks) -> float:
    """What the branches of a tick return (saved activations of a FORWARD; factors and gradients of
    a BACKWARD, which are a device's share), beside the loss or a layer at work."""
    returned = ticks.factors + ticks.gradients
    of_backward = max(ticks.saved, ticks.saved_by_forward) + ticks.layer(1)
    return returned + max(of_backward, ticks.saved_by_forward + ticks.of_loss)


def _interleaved_loss(ticks: Ticks) -> float:
    """`_loss`, beside ticks of other chunks of a stage that are begun."""
    found = _loss(ticks)
    if ticks.chunks_per_stage > 1:
        found += (LOOKUPS_AT_ONCE - 1) * ticks.table_gradient("embedding") + ticks.begun
        if not ticks.alone and not ticks.rounds_gradients and not ticks.saves_products:
            found += ticks.gradients
    return found


def _whole_and_split(ticks: Ticks) -> float:
    """With ticks of FORWARD, BACKWARD and WEIGHT in one body. Two turns of a loop are at work at a
    time where a chunk's layers are in no loop."""
    of_layer = ticks.layer(1, OF_MLP_WITHOUT_GATHERS)
    second = ticks.layers <= WRITTEN_OUT
    if ticks.keeps_input:  # what two BACKWARDs make again
        of_layer += 2 * ticks.saved
    most = 0.0
    for turn in _turns(ticks):
        # A loop's body has two turns: two BACKWARDs, and their gradients of layers not deferred.
        more = second or (turn.in_loop and turn.backwards == 1)
        found = _written(ticks, turn) + more * ticks.factors
        found += turn.in_loop * (1 - ticks.deferred_share) * ticks.gradients
        found += (turn.forwards + second) * ticks.saved_by_forward
        most = max(most, found + max(of_layer, turn.has_head * ticks.of_loss))
    return ticks.outside + second * ticks.table_gradient("embedding") + most


# ----------------------------------------------------------------- GPUs that gather layers ahead


def _two_layers(ticks: Ticks) -> float:
    """They are in no loop, and read what they saved from slots, or with `part` make it. Beside the
    loss is what two FORWARDs saved. A tied head's gradient was in the embedding's where this was
    compiled."""
    around = ticks.outside + ticks.copied + ticks.gradients
    of_loss = ticks.of_loss + 2 * ticks.saved_by_forward
    of_loss += ticks.heads_unrolled * ticks.more_of_mlp
    made_again = ticks.saved if ticks.keeps_input else 0.0
    return around + max(ticks.layer_ahead + made_again, of_loss)


def _one_layer_or_periodic(ticks: Ticks) -> float:
    """Chunks of one layer, and PipeDream-2BW. XLA:GPU begins the next body's ticks, and so has a
    microbatch's saved activations twice, and those that come from slots once more, in another
    layout. Where two FORWARDs are written out, one has its logits."""
    of_loss = 2 * ticks.saved_by_forward + ticks.more_of_mlp
    found = _otherwise(ticks, of_loss=ticks.heads_unrolled * of_loss)
    if ticks.joined and ticks.layers > 1:
        from_slots = ticks.saves_more_than_inputs and not ticks.keeps_input
        found += (1 + from_slots) * ticks.saved
    return found


def _gpipe(ticks: Ticks) -> float:
    """A turn of a loop over FORWARDs or BACKWARDs, and the last, which is behind it. FORWARDs that
    save everything are not begun early. A tied head's gradient is there beside a BACKWARD."""
    around = ticks.outside + ticks.copied
    of_backward = ticks.layer_ahead + ticks.of_periods + ticks.tied + 2 * ticks.gradients
    of_backward += (2 if ticks.keeps_input else 1) * ticks.saved
    of_loss = ticks.of_loss + (1 if ticks.saves_all else 2) * ticks.saved_by_forward
    of_loss += ticks.heads_unrolled * ticks.more_of_mlp
    return around + max(of_backward, of_loss)


def _ahead(ticks: Ticks) -> float:
    """With ticks of FORWARD and BACKWARD (and WEIGHT) in one body. Beside a BACKWARD of interleaved
    chunks, in a loop, one microbatch's saved activations are there, but where layers save all or
    all products. A tied head has a gradient of its own, and beside an interleaved loss two."""
    interleaved = ticks.chunks_per_stage > 1
    one_saved = interleaved and not (ticks.saves_all or ticks.saves_products)
    most = 0.0
    for turn in _turns(ticks):
        written = _written(ticks, turn)
        if ticks.splits_backward:
            written += (turn.backwards - 1) * ticks.table_gradient("embedding")
        times = _made_again(ticks, turn) if ticks.keeps_input else turn.forwards
        of_backward = ticks.layer_ahead + ticks.of_periods
        of_backward += (1 if one_saved and turn.in_loop else times) * ticks.saved
        of_loss = ticks.of_loss + turn.forwards * ticks.saved_by_forward + interleaved * ticks.tied
        most = max(most, written + max(of_backward, turn.has_head * of_loss))
    return ticks.outside + ticks.tied + ticks.copied + most


# ---------------------------------------------------- GPUs that gather layers where they are used


def _gpipe_in_turn(ticks: Ticks) -> float:
    """One layer's weights, and a chunk's gradients once. Beside the loss is what two FORWARDs
    saved, and a tied head's gradient."""
    of_backward = ticks.layer(1) + ticks.gradients + ticks.saved
    of_loss = ticks.of_loss + ticks.tied + 2 * ticks.saved_by_forward
    return ticks.outside + ticks.copied + max(of_backward, of_loss)


def _split_in_turn(ticks: Ticks) -> float:
    """With FORWARD, BACKWARD and WEIGHT in one body: the factors of a BACKWARD, and those that
    WEIGHT reads and frees. Where each layer gathers weights they are beside a BACKWARD, too."""
    most = 0.0
    for turn in _turns(ticks):
        freed = FREED * ticks.factors if turn.backwards > 1 else 0.0
        most = max(most, _written(ticks, turn) - freed)
    gathers = ticks.gathers_where_used
    around = ticks.outside + gathers * (ticks.copied + ticks.fp32_of_layer)
    of_tick = (_otherwise(ticks) + ticks.factors) if gathers else _in_turn(ticks)
    return max(around + most, of_tick)


# ------------------------------------------------------------------ GPUs that gather once a step


def _gathered_once(ticks: Ticks) -> float:
    """Of the gathered weights XLA:GPU has another layout, too. The gradient of a head that is not
    tied is whole, of several chunks in three arrays."""
    around = ticks.outside + ticks.gathered_for_step
    heads = 1 if utilization.loss_chunks(ticks.run) == 1 else HEADS_OF_CHUNKS
    around += heads * GRADIENT_BYTES * ticks.whole_head
    most = ticks.of_loss + ticks.saved_by_forward
    for turn in _turns(ticks):
        of_backward = ticks.layer(0) + ticks.of_periods
        if ticks.keeps_input:  # a layer of each of two BACKWARDs
            of_backward += ticks.layer(0) + ticks.more_of_mlp + turn.backwards * ticks.saved
        else:
            of_backward += turn.forwards * ticks.saved
        of_loss = ticks.of_loss + turn.forwards * ticks.saved_by_forward
        most = max(most, _written(ticks, turn) + max(of_backward, turn.has_head * of_loss))
    return around + most


# ------------------------------------------------------------------------ ticks that are in no loop


class _Turn(NamedTuple):
    """A turn of a loop over ticks, or ticks in no loop: how many ticks of a kind there are whose
    results XLA:GPU makes before it ends."""

    in_loop: bool
    forwards: int
    backwards: int
    weights: int
    has_head: bool  # whether losses are computed in it


def _turns(ticks: Ticks) -> Iterator[_Turn]:
    """Of the loops with BACKWARDs."""
    table, heads = ticks.program.table, ticks.program.rows.head >= 0
    for at, (first, length, times) in enumerate(ticks.program.loops):
        if BACKWARD in table.kind[first : first + length]:
            counts = (_made_early(ticks, at, kind) for kind in (FORWARD, BACKWARD, WEIGHT))
            has_head = bool(heads[first : first + length * times].any())
            yield _Turn(times > WRITTEN_OUT, *counts, has_head)


def _made_early(ticks: Ticks, at: int, kind: int) -> int:
    """Ticks of a kind in the loop `at`, and those in no loop behind it.

    Where XLA gathers ahead that is also the last turn of a loop. But a loop of one tick, as the
    BACKWARDs at the end of 1F1B in four stages, makes none as early as in a loop before it.
    """
    found, ahead = 0, ticks.exchanges_ahead
    in_loop = ticks.program.loops[at][2] > WRITTEN_OUT
    for place, (first, length, times) in enumerate(ticks.program.loops[at:]):
        body = ticks.program.table.kind[first : first + length]
        in_body = int((body == kind).any(axis=1).sum())
        if times == 1 or (ahead and times <= WRITTEN_OUT):  # in no loop
            found += in_body * times
        elif place == 0:
            found += in_body * (1 + ahead)
        elif length > 1 or not in_loop:
            found += in_body * ahead
    return found


def _made_again(ticks: Ticks, turn: _Turn) -> int:
    """Microbatches whose activations are made again at a time, with `part`: of two BACKWARDs in no
    loop, or of one in a loop and those; of few layers also where more BACKWARDs follow, as at the
    end of 1F1B in four stages."""
    if ticks.splits_backward or ticks.chunks_per_stage > 1:
        return turn.backwards
    _, length, times = ticks.program.loops[-1]
    follow = length == 1 and times > WRITTEN_OUT
    return 3 if follow and ticks.layers <= FEW_LAYERS else 2


def _written(ticks: Ticks, turn: _Turn) -> float:
    """Factors, and gradients of a chunk's weights: BACKWARD makes those of the layers that are not
    deferred. One layer that is deferred is in no loop, whose results would be made early."""
    one = ticks.deferred == 1 < ticks.layers
    share = ticks.deferred_share if ticks.splits_backward else 0.0
    weights, backwards = (1, 1) if one else (turn.weights, turn.backwards)
    of_gradients = share * weights + (1 - share) * turn.backwards
    return of_gradients * ticks.gradients + backwards * ticks.factors


# What counts which pipelines: the first that takes them. GPUs from the second row on.
PROGRAMS: tuple[tuple[Callable[[Ticks], bool], Callable[[Ticks], float]], ...] = (
    (lambda ticks: not ticks.on_gpu, _on_tpu),
    # Over `tensor`, wherever the weights are: zb_1f1b.
    (lambda ticks: ticks.over_tensor and ticks.joined and ticks.splits_backward, _split_in_turn),
    # Whole parameters over `tensor`; gpipe of one device a stage.
    (lambda ticks: ticks.one_tick_at_a_time, _in_turn),
    # Parameters split over `fsdp`: gpipe, 1f1b, interleaved_1f1b, zb_1f1b.
    (lambda ticks: ticks.loops_ahead and ticks.layers_unrolled, _two_layers),
    (lambda ticks: ticks.loops_ahead and ticks.one_kind_a_loop, _gpipe),
    (lambda ticks: ticks.loops_ahead, _ahead),
    # The same with pipedream_2bw, and with chunks of one layer.
    (lambda ticks: ticks.gathers_ahead and not ticks.mixes_kinds, _one_layer_or_periodic),
    # Over `fsdp` and `tensor`: gpipe.
    (lambda ticks: ticks.gathers_where_used and ticks.one_kind_a_loop, _gpipe_in_turn),
    # Gathered once a step, without `tensor`: gpipe, 1f1b, interleaved_1f1b, zb_1f1b.
    (lambda ticks: ticks.gathers_once and ticks.exchanges_ahead
     and not (ticks.mixes_kinds or ticks.periodic), _gathered_once),
    # Whole parameters: zb_1f1b.
    (lambda ticks: ticks.joined_whole and ticks.splits_backward, _whole_and_split),
    # 1f1b and interleaved_1f1b with chunks of one layer.
    (lambda ticks: ticks.joined_whole and ticks.alone and not ticks.periodic, _of_one_layer),
    # 1f1b and pipedream_2bw with gradients in bf16, interleaved_1f1b; those in fp32; gpipe.
    (lambda ticks: ticks.joined_whole and not ticks.alone
     and (ticks.rounds_gradients or ticks.chunks_per_stage > 1), _whole),
    (lambda ticks: ticks.joined_whole and not ticks.alone, _whole_fp32),
    (lambda ticks: ticks.one_kind_a_loop and not ticks.splits_parameters, _gpipe_whole),
    # zb_h1 with gradients that are split over whole parameters' devices (`zero2`).
    (lambda ticks: ticks.mixes_kinds and not ticks.splits_parameters and not ticks.over_tensor
     and ticks.ways("gradients") > 1, _branches_of_split_gradients),
    # zb_h1, zb_v, dual_pipe_v; 1f1b and interleaved_1f1b over `fsdp` and `tensor`; and others.
    (lambda ticks: True, _otherwise),
)  # fmt: skip
