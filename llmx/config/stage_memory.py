"""What a device of a pipeline holds at the peak of a step, counted without a compiler.

The peak is in a BACKWARD of the stage that keeps most microbatches. What comes and goes in it is
that of the programs which XLA makes: docs/pipeline.md compares both.

Letters: as in `llmx.model.costs`.
"""

import dataclasses
import math

from llmx import sharding
from llmx.config import Config, loss_memory, state_memory, utilization
from llmx.config.axes import gathers_ahead, replica_axes, splits_parameters
from llmx.config.state_memory import Held, head_of, leaves
from llmx.model import precision, remat, remat_costs
from llmx.pipeline import ticks
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
# Of a chip's memory, where the config has no limit: within the first, or one layer in the second.
AUTOMATIC, AT_MOST = 2 / 3, 0.9


@dataclasses.dataclass(frozen=True)
class StageMemory:
    """Bytes of a device, by what they are for."""

    parameters: int
    optimizer: int  # moments; the average of the parameters and masks, if there are any
    gradients: int  # sums over microbatches; of PipeDream-2BW those of two steps
    # Of PipeDream-2BW, from step to step: weights and gradients of the batch in flight; with
    # prediction the weights twice and no gradients.
    in_flight: int
    versions: int  # of PipeDream-2BW: what the weights of both steps, behind each other, take more
    kept: int  # from FORWARD to BACKWARD
    waiting: int  # inputs of chunks, and gradients of their outputs
    factors: int  # of deferred weight gradients, from BACKWARD to WEIGHT
    working: int  # that comes and goes in a BACKWARD

    @property
    def total(self) -> int:
        return sum(vars(self).values())


def of(run: Config, *, deferred_layers: int | None = None, on_gpu: bool = False) -> StageMemory:
    """Of a resolved run with stages.

    `deferred_layers`: of each chunk, whose weight gradients are deferred; None = all. Raises
    ValueError for remat="budget".
    """
    return _of(run, _program(run), deferred_layers, on_gpu)


def _program(run: Config) -> Program:
    return ticks.program(utilization.table_of(run))


def _of(run: Config, program: Program, deferred_layers: int | None, on_gpu: bool) -> StageMemory:
    model, policy = run.model, precision.policy_of(run.precision, run.reduce_dtype)
    table, chunks = program.table, utilization.chunks_of(run)
    size = max(chunks)
    state, held = state_memory.of(run), state_memory.Held(run)
    held_gradients = sum(held.numbers(leaf, "gradients") for leaf in leaves(model))
    deferred = size if deferred_layers is None else min(deferred_layers, size)
    factors = deferred * factor_bytes(run) * (program.slots["deferred"] > 0)
    steps = 2 if table.periodic else 1
    in_flight = versions = 0.0
    if table.periodic:
        # In a step both lie behind each other, and where those in flight were is room for others.
        versions = state["parameters"]
        # With prediction no gradients, as they are applied, but the weights predicted from.
        in_flight = state["parameters"] + (
            state["parameters"] if run.pipeline.predict
            else policy.reduce.itemsize * held_gradients
        )  # fmt: skip
    x_bytes = policy.compute.itemsize * model.width * _tokens(run)
    return StageMemory(
        parameters=math.ceil(state["parameters"]),
        optimizer=math.ceil(state["optimizer"] + state["ema"] + state["masks"]),
        gradients=math.ceil(GRADIENT_BYTES * held_gradients * steps),
        in_flight=math.ceil(in_flight),
        versions=math.ceil(versions),
        kept=math.ceil(program.slots["saved"] * _kept(run, run.remat, chunks)),
        waiting=math.ceil((program.slots["inputs"] + program.slots["gradients"]) * x_bytes),
        factors=program.slots["deferred"] * factors,
        working=math.ceil(_comes_and_goes(run, program, deferred, on_gpu)),
    )


def _comes_and_goes(run: Config, program: Program, deferred: int, on_gpu: bool) -> float:
    """Bytes of a BACKWARD, or of the loss, whichever are more."""
    if on_gpu and _begins_nothing_early(run, program):
        return _one_after_the_other(run, program, deferred)
    chunks, held = utilization.chunks_of(run), Held(run)
    size, per_stage = max(chunks), len(chunks) // run.mesh.stage
    layers_weights = GATHERED_ON_GPU if on_gpu else 1
    # A loop over one layer is written out, into the body of the loop over ticks.
    alone = size == 1 and _joined(program)
    working = _working(held, chunks, layers_weights)
    if alone and not remat.keeps_input(run.remat):  # read from slots where it is used
        working -= _kept(run, remat.inside(run.remat), chunks)
    if program.table.mixes_kinds:
        # What a branch returns is beside the slots, once the other layers are differentiated.
        factors = _factors(run, program, deferred, on_gpu)
        working = max(working, factors + _working(held, chunks, layers_weights, deferred / size))
    # And the gradients of embedding and head of one microbatch.
    outside = GRADIENT_BYTES * sum(
        held.numbers(leaf, "gradients") for leaf in leaves(run.model) if not leaf.in_blocks
    )
    if on_gpu and not splits_parameters(run):  # lookups' are scattered when they are added up
        outside += _table(held, "embedding") - _table(held, "embedding", "gradients")
    working += outside + on_gpu * _more_on_gpu(run)
    in_one_body = on_gpu and _joined(program) and not splits_parameters(run)
    several = not alone and (_rounds_gradients(run) or per_stage > 1)
    apart = in_one_body and (several or (alone and not program.table.periodic))
    if apart:
        count = _without_gathers if several else _of_one_layer
        working = count(held, chunks) + outside
    # In the ticks of a head the layers of a FORWARD or BACKWARD are done, or not begun.
    of_loss = _of_loss(run, program, on_gpu)
    if _joined(program) if on_gpu else not alone:
        of_loss += outside
    if in_one_body and per_stage > 1:
        of_loss += (LOOKUPS_AT_ONCE - 1) * _table(held, "embedding") + _begun(held, chunks)
        if not alone and not _rounds_gradients(run) and not _saves_products(run):
            of_loss += _gradients_of_chunk(held, size)
    if on_gpu and gathers_ahead(run) and _written_out(program):
        # Two microbatches of FORWARD at a time, one with its logits.
        saved = _kept(run, remat.inside(run.remat), chunks)
        of_loss += 2 * saved + _more_on_gpu(run)
    working = max(working, of_loss)
    if on_gpu and not apart:
        working += per_stage * size * _copied(run)
        if _joined(program) and not alone and gathers_ahead(run):
            # XLA:GPU begins the next body's ticks, and so has a microbatch's saved activations
            # twice, and those that come from slots once more, in another layout.
            from_slots = _saves_more_than_inputs(run, chunks) and not remat.keeps_input(run.remat)
            working += (1 + from_slots) * _kept(run, remat.inside(run.remat), chunks)
        if size > 1:
            working += _of_fp32_gradients(held, size, per_stage)
    return working


def _without_gathers(held: Held, chunks: tuple[int, ...]) -> float:
    """`_working` of several layers on GPUs, in a body of several ticks that gathers no weights:
    the gradients of a chunk's weights twice, and of a tied head whose logits are one chunk the
    gradient of these, as its own is not made before that of the embedding is added."""
    run = held.run
    found = _working(held, chunks, 1, of_mlp=OF_MLP_WITHOUT_GATHERS)
    found += _gradients_of_chunk(held, max(chunks))
    saves = _saves_all(run) or _saves_products(run)
    found += saves * _kept(run, run.remat, chunks)  # of a FORWARD
    if saves and _ways(run, "gradients") == 1:
        # And of the loss a part's logits, and the sum of the head's gradient over several.
        found += loss_memory.logits_of_chunk(run) + loss_memory.gradients_of_logits(run)
        if utilization.loss_chunks(run) > 1:
            found += _table(held, head_of(run.model).name)
    elif run.model.tied_head and utilization.loss_chunks(run) == 1:
        found += loss_memory.gradients_of_logits(run)
    return found


def _of_one_layer(held: Held, chunks: tuple[int, ...]) -> float:
    """The same of one layer: its weights in the compute dtype for a FORWARD and a BACKWARD, and a
    part of the head, where they are cast; what it saved is read from slots where it is used."""
    run = held.run
    policy = precision.policy_of(run.precision, run.reduce_dtype)
    casts = policy.compute != policy.param
    found = _working(held, chunks, 1 + casts, of_mlp=OF_MLP_OF_ONE_LAYER)
    found += casts * loss_memory.head_of_chunk(run)
    if not remat.keeps_input(run.remat):
        found -= _kept(run, remat.inside(run.remat), chunks)
    return found


def _factors(run: Config, program: Program, deferred: int, on_gpu: bool) -> float:
    """What a BACKWARD leaves to WEIGHT. As it selects what a branch returns, XLA:GPU has more than
    half of it twice, in chunks of several layers that gather no weights."""
    found = deferred * factor_bytes(run) * (program.slots["deferred"] > 0)
    several = max(utilization.chunks_of(run)) > 1
    if on_gpu and several and not splits_parameters(run):
        found *= 1 + SELECTED_FACTORS
    return found


def _begins_nothing_early(run: Config, program: Program) -> bool:
    """Whether XLA:GPU has one tick after the other, and begins nothing early: where stages gather
    no weights, and blocks exchange activations over `tensor`; or each is one device, and its ticks
    of FORWARD are in one loop and those of BACKWARD in another."""
    table = program.table
    if splits_parameters(run) or table.periodic:
        return False
    in_two_loops = not (_joined(program) or table.splits_backward or table.mixes_kinds)
    return run.mesh.tensor > 1 or (in_two_loops and not _splits_tokens(run))


def _splits_tokens(run: Config) -> bool:
    """Whether a stage has several devices with other tokens, which sum their gradients."""
    return any(vars(run.mesh)[axis] > 1 for axis in sharding.TOKEN_AXES)


def _one_after_the_other(run: Config, program: Program, deferred: int) -> float:
    """`_comes_and_goes` where GPUs begin nothing early (see above): nothing is copied but fp32
    gradients that devices or WEIGHTs sum, and of the tables the embedding's is there alone."""
    chunks, held = utilization.chunks_of(run), Held(run)
    size, per_stage = max(chunks), len(chunks) // run.mesh.stage
    working = _working(held, chunks, 1, of_mlp=OF_MLP_IN_TURN)
    if program.table.mixes_kinds:
        factors = _factors(run, program, deferred, on_gpu=True)
        of_rest = _working(held, chunks, 1, deferred / size, OF_MLP_IN_TURN)
        working = max(working, factors + of_rest)
    working += (lookups := _table(held, "embedding"))
    if size > 1 and (program.table.splits_backward or _splits_tokens(run)):
        working += _of_fp32_gradients(held, size, per_stage)
    of_loss = loss_memory.of(run, on_gpu=True)
    if _joined(program):
        of_loss += lookups
        if size > 1 or _saves_all(run):
            of_loss += _begun(held, chunks)
    return max(working, of_loss)


def _begun(held: Held, chunks: tuple[int, ...]) -> float:
    """Beside the loss on GPUs, of the ticks of a loop's body that are begun: what layers that save
    all, or all products, saved; of the latter also their gradients."""
    run, products = held.run, _saves_products(held.run)
    if not (products or _saves_all(run)):
        return 0.0
    return _kept(run, run.remat, chunks) + products * _gradients_of_chunk(held, max(chunks))


def _saves_all(run: Config) -> bool:
    """Whether layers save everything from FORWARD to BACKWARD."""
    text = remat.inside(run.remat)
    return not remat.keeps_input(run.remat) and remat_costs.saves_all(run.model, text)


def _saves_products(run: Config) -> bool:
    """Whether they save all products with weights, and not everything."""
    text = remat.inside(run.remat)
    return not remat.keeps_input(run.remat) and remat_costs.saves_all_products(run.model, text)


def _gradients_of_chunk(held: Held, size: int) -> float:
    """Gradients of a chunk's weights, of one microbatch."""
    policy = precision.policy_of(held.run.precision, held.run.reduce_dtype)
    return policy.reduce.itemsize * _of_layers(held, size, "gradients")


def _table(held: Held, name: str, split: str = "parameters") -> float:
    """A table's gradient in fp32, before it is scattered."""
    tables = (leaf for leaf in leaves(held.run.model) if leaf.name == name)
    return GRADIENT_BYTES * sum(held.numbers(leaf, split) for leaf in tables)


def _rounds_gradients(run: Config) -> bool:
    """Whether those of a microbatch are in another type than their sums."""
    return precision.policy_of(run.precision, run.reduce_dtype).reduce.itemsize < GRADIENT_BYTES


def _of_fp32_gradients(held: Held, size: int, per_stage: int) -> float:
    """What XLA:GPU has more where gradients are fp32 as their sums are: it writes a sum to where
    the gradient was, and so copies those of all layers; and whole gradients of a layer, twice."""
    if _rounds_gradients(held.run):
        return 0.0
    policy = precision.policy_of(held.run.precision, held.run.reduce_dtype)
    copied = GRADIENT_BYTES * _of_layers(held, size * per_stage, "gradients")
    more = policy.reduce.itemsize - policy.compute.itemsize
    return copied + 2 * more * _of_layers(held, 1, "parameters", ("embed",), "/mlp/")


def _saves_more_than_inputs(run: Config, chunks: tuple[int, ...]) -> bool:
    """Whether a layer that is in no segment saves more than its input."""
    apart = remat_costs.policies_apart(run.model, remat.inside(run.remat), chunks)
    return any(policy.saved is None or policy.saved for policy in apart)


def _joined(program: Program) -> bool:
    """Whether the body of a loop has several ticks, of FORWARD and of BACKWARD."""
    return any(length > 1 for _, length, _ in program.loops)


def _written_out(program: Program) -> bool:
    """Whether a loop has two ticks with heads, which XLA:GPU writes out."""
    heads = program.rows.head >= 0
    return any(
        (length, times) == (1, 2) and heads[first : first + 2].all()
        for first, length, times in program.loops
    )


def _of_loss(run: Config, program: Program, on_gpu: bool) -> float:
    """What is there while a head's logits are. XLA:GPU begins other ticks of a loop's body then,
    but for PipeDream-2BW; of one layer, which is no loop, the MLP's weights are gathered once for
    the ticks of a body."""
    found = loss_memory.of(run, on_gpu=on_gpu)
    if not _joined(program):
        return found
    alone = max(utilization.chunks_of(run)) == 1
    saves = not alone or remat.inside(run.remat) == "none"
    if on_gpu and saves and not program.table.periodic:
        found += _more_on_gpu(run)
    if alone and saves and _ways(run, "parameters") > 1:
        found += _gathered(Held(run), 1, "/mlp/")
    return found


def deferred_share(run: Config, device_bytes: int | None, *, on_gpu: bool = False) -> float:
    """The share of a chunk's layers whose weight gradients are deferred, 0 to 1, as they are
    planned."""
    layers = planned_layers(run, device_bytes, on_gpu=on_gpu)
    return 1.0 if layers is None else layers / max(utilization.chunks_of(run))


def planned_layers(run: Config, device_bytes: int | None, *, on_gpu: bool = False) -> int | None:
    """`deferred_layers`, and one where not one layer's weight gradients fit."""
    try:
        return deferred_layers(run, device_bytes, on_gpu=on_gpu)
    except ValueError:
        return 1


def deferred_layers(run: Config, device_bytes: int | None, *, on_gpu: bool = False) -> int | None:
    """The layers of each chunk whose weight gradients are deferred: as many as fit.

    Within `pipeline.memory_gib`, or else within two thirds of `device_bytes`, and one layer within
    nine tenths: that leaves room for what is not counted. None = all, where neither is known or the
    schedule defers none. Raises ValueError where not one layer's fit.
    """
    program = _program(run)
    most = run.pipeline.memory_gib * 2**30 or (device_bytes or 0) * AT_MOST
    if not most or not program.table.splits_backward:
        return None
    limit = run.pipeline.memory_gib * 2**30 or device_bytes * AUTOMATIC
    held = lambda layers: _of(run, program, layers, on_gpu).total  # noqa: E731
    for layers in range(max(utilization.chunks_of(run)), 0, -1):
        if held(layers) <= (limit if layers > 1 else most):
            return layers
    rest, of_a_layer = held(0), held(1) - held(0)
    remedies = ["more stages or devices"]
    if rest <= most:
        remedies.insert(0, "1f1b")
    elif not remat.keeps_input(run.remat):
        remedies.insert(0, "remat='part'")
    if run.pipeline.memory_gib:
        remedies.append("a larger pipeline.memory_gib")
    raise ValueError(
        f"pipeline.schedule={program.table.name!r} within {most / 2**30:.1f} GiB of a device "
        f"(pipeline.memory_gib={run.pipeline.memory_gib:g}): it holds {rest / 2**30:.1f} GiB, and "
        f"the factors of one deferred layer take {of_a_layer / 2**30:.1f} GiB more; use "
        f"{', or '.join(remedies)}"
    )


def factor_bytes(run: Config) -> int:
    """Per layer and microbatch, the factors of all its weight gradients: the input of each product
    with a weight, and the gradient of its output."""
    mesh, model = run.mesh, run.model
    D, F, H, N, K = model.width, model.mlp_dim, model.head_dim, model.num_heads, model.num_kv_heads
    inward = 2 if model.gated_mlp else 1
    whole = (3 + 1 + inward + 1) * D  # into queries, keys, values and MLP, out of both halves
    heads = (N + 2 * K) * H + N * H
    if R := model.kv_latent:  # into latents, out of them, and through them
        Q, V = model.query_latent, model.value_dim
        whole += 2 * (Q + R) + model.rope_dim - D
        heads = N * (H + H - model.rope_dim + V + V)
    split = heads + inward * F + F  # over `tensor`
    compute = precision.policy_of(run.precision, run.reduce_dtype).compute.itemsize
    tokens = utilization.tokens_of(run) // mesh.sequence
    return math.ceil(compute * tokens * (whole + split / mesh.tensor))


def _ways(run: Config, table: str) -> int:
    """Over how many devices a layout's table splits the width."""
    return math.prod(vars(run.mesh)[axis] for axis in replica_axes(run, table))


def _tokens(run: Config) -> float:
    """Of a microbatch, that a device has between products."""
    ways = run.mesh.sequence * (run.mesh.tensor if run.sharding.sequence_parallel else 1)
    return utilization.tokens_of(run) / ways


def _kept(run: Config, text: str, chunks: tuple[int, ...]) -> float:
    """Bytes that the longest chunk saves of a microbatch."""
    return _tokens(run) * remat_costs.saved_bytes_of_chunk(
        run.model, text=text, chunks=chunks,
        compute_bytes=precision.POLICIES[run.precision].compute.itemsize,
    )  # fmt: skip


def _more_on_gpu(run: Config) -> float:
    """Of one layer's activations."""
    policy = precision.policy_of(run.precision, run.reduce_dtype)
    tokens = utilization.tokens_of(run) / run.mesh.sequence
    of_mlp = MORE_OF_MLP_ON_GPU * run.model.mlp_dim / run.mesh.tensor
    return policy.compute.itemsize * tokens * of_mlp


def _copied(run: Config) -> float:
    """Of `down` and `out` of one layer, a device's share."""
    model = run.model
    numbers = model.width * (model.mlp_dim + model.num_heads * model.head_dim)
    return COPIED_BYTES * numbers / run.mesh.tensor / _ways(run, "parameters")


def _of_layers(
    held: Held, count: int, table: str, whole: tuple[str, ...] = (), part: str = ""
) -> float:
    """Numbers of some layers' parameters on a device; `part`: of those with this in their names."""
    blocks = (leaf for leaf in leaves(held.run.model) if leaf.in_blocks and part in leaf.name)
    numbers = sum(held.numbers(leaf, table, whole=whole) for leaf in blocks)
    return count * numbers * held.run.mesh.stage / held.slots


def _gathered(held: Held, count: int, part: str = "") -> float:
    """Bytes of some layers' weights, gathered."""
    policy = precision.policy_of(held.run.precision, held.run.reduce_dtype)
    return policy.compute.itemsize * _of_layers(held, count, "parameters", ("embed",), part)


def _working(
    held: Held,
    chunks: tuple[int, ...],
    layers_weights: int,
    share: float = 1.0,
    of_mlp: float = OF_MLP,
) -> float:
    """A microbatch's saved activations, read, or made again for a share of a chunk's layers; the
    gradients of a chunk's weights; some layers' weights, gathered, and one layer's activations."""
    run, size = held.run, max(chunks)
    policy = precision.policy_of(run.precision, run.reduce_dtype)
    gathered = _gathered(held, layers_weights)
    width = of_mlp * run.model.mlp_dim / run.mesh.tensor + OF_STREAM * run.model.width
    tokens = utilization.tokens_of(run) / run.mesh.sequence
    layer = policy.compute.itemsize * tokens * width
    saved = _kept(run, remat.inside(run.remat), chunks)
    saved *= share if remat.keeps_input(run.remat) else 1.0
    return saved + _gradients_of_chunk(held, size) + gathered + layer
