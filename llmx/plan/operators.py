"""The operators of a train step on one device: what they compute and move, and how long they take.

Products are counted one by one, as the decoder has them: in the forward pass [tokens, in] x [in,
out], in the backward pass the gradient of the input, [tokens, out] x [out, in], and of the weight,
[in, tokens] x [tokens, out], and once more in the forward pass what `remat` runs again. Attention
counts by its kernel's FLOPs. All else, norms, activations, rotations, casts, copies, the update, is
memory-bound: bytes that are read and written, counted in whole arrays as the compilers' programs
have them (`TPU`, `GPU`, `CPU`).

On CPUs three things more count. Attention computes whole blocks of scores, timed by measured rows.
XLA:CPU copies the stacked moments of all layers again for each layer that the update's loop turns
to. And the memory of a step's arrays is new to each step, so that the system hands out every page
once more: that takes longer than to write them.

Letters: as in `llmx.model.costs`.
"""

import collections
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from llmx.aot import core_times
from llmx.config import Config, state_memory, utilization
from llmx.config.axes import is_one_device
from llmx.config.state_memory import Leaf
from llmx.data import pairs
from llmx.model import costs, precision, quantization, quantized, ranks, remat, remat_costs
from llmx.model.attention import blockwise, cudnn, splash
from llmx.model.families import is_local
from llmx.plan import experts, gemm, memory, orthogonal, periods
from llmx.plan import passes as passes_lib
from llmx.plan.gemm import Core
from llmx.plan.sizes import Sizes
from llmx.step import moments

FP32 = 4
FORWARD, BACKWARD, LOSS, ENDS = "forward", "backward", "loss", "ends"

# Arrays in fp32 that AdamW's update reads and writes once: parameters and both moments, twice each,
# and gradients. Of other optimizers and types the bytes count.
OF_ADAMW = 7.0

# Rows of the report.
PRODUCTS, ATTENTION, MOVES = "products of layers", "attention", "elementwise"
SAVES, WEIGHTS = "saves", "weights"  # operators of `MOVES`: of weights casts and copies
AGAIN = " again"  # the last word of the name of what the backward pass runs again of these
WEIGHT_GRADIENT = "weight gradient"  # the last words of a product's name
HEAD, UPDATE, NEW_MEMORY = "head and loss", "optimizer", "new memory"


class Operator(NamedTuple):
    """One operator, or several that are alike."""

    name: str  # "mlp/gate forward"
    part: str  # the row of the report
    moment: str  # FORWARD, BACKWARD: of a layer and microbatch; LOSS: of a microbatch; ENDS: a step
    seconds: float  # of one
    count: float = 1.0  # in its moment
    flops: float = 0.0  # of one
    bytes: float = 0.0  # of one
    shape: tuple[int, int, int] = (0, 0, 0)  # M, N, K of a product


@dataclasses.dataclass(frozen=True)
class Moved:
    """How often the programs of a compiler read or write an array outside products, in a layer.

    Pairs: in the forward pass, and in the backward pass beside what it runs again.
    """

    mlp: tuple[float, float]  # [tokens, F]
    stream: tuple[float, float]  # [tokens, D] between blocks
    heads: tuple[float, float]  # [tokens, (N + K) H]: rotation, norms, layouts
    normed: tuple[float, float]  # more of these with norms of queries and keys
    ring: float  # of queries [tokens, N H] for each step of a ring, in both passes together
    weights: tuple[float, float]  # of a layer's gathered weights: casts, copies
    shares: tuple[float, float]  # of a device's share of them, in fp32
    gradients: float  # of a device's share of a layer's gradients
    saves: tuple[float, float]  # of what a layer saves
    kept: tuple[float, float]  # the same where a layer saves everything
    nested: tuple[float, float]  # more of what layers save in a loop within that over periods
    slots: tuple[float, float]  # the same where layers are no loop, so that ticks share a body
    rounded: float  # bytes for each number that fp8 or int8 products round
    # Operators: of a layer; of a product that rounds its factors, more; of a microbatch's loss, and
    # of each chunk of it; of the update, for each parameter.
    launches: tuple[float, float]
    of_rounding: float
    of_loss: tuple[float, float]
    of_update: float
    logits: float  # bytes per logit and microbatch
    # Arrays of a device's share of the table of lookups, and of its head, in a microbatch: zeros,
    # rows added to them, in fp32; with a tied head its gradient added; chunks of a head that is not
    # gathered, cut out and put together.
    lookups: float
    tied: float
    cuts: float
    norms: float  # gradients that are read once more, for their norm
    update: float  # of AdamW, arrays in fp32 of a device's share: `OF_ADAMW` are read and written
    sums: float  # of gradient buffers, with accumulation
    attention_backward: float  # FLOPs of attention's backward pass, as a multiple of the forward's
    least: float = 0.0  # seconds that an operator takes at least, of which `start` knows nothing
    # Of pipelines (`plan.slots`), passes over bytes of a microbatch:
    branches: float = 0.0  # in each tick with branches, of what is saved and of factors
    of_slots: float = 0.0  # of what layers save, once for each FORWARD
    unlike_slots: float = 0.0  # the same where layers save everything
    of_factors: float = 0.0  # of deferred weight gradients, once for each FORWARD
    blocks: bool = False  # attention computes whole blocks of scores (`attention.blockwise`)
    copies: float = 0.0  # of all layers' moments, in each turn of the update's loop over layers
    fresh: bool = False  # what a step holds is new memory
    alone: tuple[float, float] | None = None  # `shares` of one device, where weights are cast only


# Counted in the programs of llama3_8b, and fitted to those of tests/golden/programs.jsonl; `alone`
# counted in those of one GPU in few_devices.jsonl; `kept` and `nested` in those of Qwen3 0.6B,
# Llama 3.2 3B and SmolLM3 3B with remat="none" for h200:1; `branches` and `unlike_slots` fitted to
# plain_pipelines.jsonl.
GPU = Moved(
    mlp=(3.0, 6.0), stream=(7.0, 7.0), heads=(2.0, 4.0), normed=(4.0, 6.0), ring=25.0,
    weights=(0.1, 0.1), shares=(3.0, 4.0), gradients=3.0,
    saves=(2.2, 0.2), kept=(3.0, 0.5), nested=(3.7, 2.0), slots=(2.2, 0.2),
    rounded=13.0, launches=(25.0, 45.0), of_rounding=7.5,
    of_loss=(30.0, 14.0), of_update=10.0, logits=14.0, lookups=3.0, tied=2.0, cuts=6.0, norms=1.0,
    update=6.5, sums=2.0, attention_backward=3.5, alone=(1.5, 0.0),
    branches=3.0, of_slots=3.5, unlike_slots=11.0, of_factors=8.5,
)  # fmt: skip
TPU = Moved(
    mlp=(0.0, 0.0), stream=(10.0, 16.0), heads=(18.0, 45.0), normed=(4.0, 6.0), ring=60.0,
    weights=(0.0, 0.0), shares=(2.5, 5.0), gradients=12.0,
    saves=(4.0, 4.0), kept=(3.0, 1.0), nested=(0.0, 0.0), slots=(2.0, 0.0),
    rounded=10.0, launches=(25.0, 50.0), of_rounding=2.0,
    of_loss=(30.0, 8.0), of_update=8.0, logits=11.0, lookups=0.0, tied=0.0, cuts=0.0, norms=0.0,
    update=7.0, sums=3.0, attention_backward=2.5,
    least=1.24e-6,  # XLA's cycles of the smallest operators, on v5e and v5p
)  # fmt: skip

CPU = Moved(
    mlp=(2.0, 4.0), stream=(8.0, 8.0), heads=(4.0, 8.0), normed=(4.0, 6.0), ring=0.0,
    weights=(1.0, 1.0), shares=(1.0, 1.0), gradients=2.0,
    saves=(2.0, 1.0), kept=(2.0, 1.0), nested=(0.0, 0.0), slots=(2.0, 1.0),
    rounded=20.0, launches=(30.0, 60.0), of_rounding=0.0,
    of_loss=(0.0, 8.0), of_update=1.0, logits=12.0, lookups=0.0, tied=0.0, cuts=0.0, norms=0.0,
    update=7.0, sums=2.0, attention_backward=2.5,
    blocks=True, copies=2.0, fresh=True,
)  # fmt: skip

# The leaves that layers multiply with, and what their products are called where they are saved.
_RESULTS = {
    "attention/query": remat.QUERY, "attention/key": remat.KEY, "attention/value": remat.VALUE,
    "attention/out": remat.ATTENTION_OUT, "mlp/gate": remat.GATE, "mlp/up": remat.UP,
    "mlp/down": remat.MLP_OUT, "mlp/shared/gate": remat.GATE, "mlp/shared/up": remat.UP,
    "mlp/shared/down": remat.MLP_OUT, "attention/query_down": remat.QUERY_LATENT,
    "attention/down": remat.LATENT, "attention/up": remat.KEY,
}  # fmt: skip


class _Weight(NamedTuple):
    """A matrix of a layer on a device that has gathered it."""

    width: int  # of the stream, or of a latent
    other: float  # N H, K H or F, over `tensor`
    into_stream: bool

    @property
    def numbers(self) -> float:
        return self.width * self.other


@dataclasses.dataclass(frozen=True, eq=False)
class _Device:
    """A device of a run."""

    sizes: Sizes
    core: Core
    moved: Moved
    turns: int = 1  # groups of tokens that have operators of their own in a layer

    @functools.cached_property
    def again(self) -> dict[str, float]:
        """The share of layers that run something again, by its name in `remat.SAVES`."""
        model, run = self.sizes.run.model, self.sizes.run
        found = collections.Counter()
        for policy in remat_costs.policies(model, remat.inside(run.remat)):
            found.update(remat_costs.recomputed(model, policy, run.offload.saves))
        return {name: count / model.num_layers for name, count in found.items()}

    def again_of(self, name: str) -> float:
        """How often the backward pass repeats a product, by the name of `of_layer`: the first of
        two factors wherever anything is, for the gradient of the second."""
        product, _, factor = name.partition("/kernel/")
        if factor == ranks.DOWN:
            policies = remat_costs.policies(
                self.sizes.run.model, remat.inside(self.sizes.run.remat)
            )
            return sum(policy.saved is not None for policy in policies) / len(policies)
        return self.again.get(_RESULTS.get(product), 0.0)

    @functools.cached_property
    def whole_again(self) -> float:
        """How often a layer is run once more, whole, before its backward pass."""
        run = self.sizes.run
        if remat.keeps_input(run.remat):
            return 1.0
        chunks = utilization.chunks_of(run)
        segments = remat_costs.segments(run.model, run.remat, chunks)
        return sum(end - first for first, end in segments) / run.model.num_layers

    @functools.cached_property
    def saved(self) -> float:
        """Bytes that one pass through a layer saves of a microbatch."""
        saved, model = memory.saved(self.sizes, memory.TPU), self.sizes.run.model
        return sum(saved.values()) / model.num_layers / model.repeats

    @functools.cached_property
    def of_layer(self) -> dict[str, _Weight]:
        """A layer's weights, but for those of experts, by "mlp/gate"."""
        sizes, found = self.sizes, {}
        for leaf in sizes.weights:
            if not experts.is_of_experts(leaf):
                name = leaf.name.removeprefix("blocks/").removesuffix("/kernel")
                width = leaf.shape[leaf.axes.index("embed")]
                other = sizes.whole(leaf) / sizes.layers / width
                found[name] = _Weight(width, other, leaf.axes[-1] == "embed")
        return found

    @functools.cached_property
    def dtypes(self) -> tuple[str, str]:
        """Of the factors of the layers' products, forward and backward."""
        run = self.sizes.run
        forward = utilization.compute_dtype(run)
        rounded = quantized.FORMATS[run.products.format].gradient
        backward = forward if rounded is not None else self.sizes.policy.compute.name
        return self.dtype(forward), self.dtype(backward)

    def dtype(self, name: str) -> str:
        """The name in `gemm.DTYPE_BYTES` that stands for a numpy type."""
        return "float8" if name.startswith("float8") else name

    def product(
        self, name: str, part: str, moment: str, shape: tuple[int, int, int], dtype: str,
        count: float = 1.0, role: str = "forward",
    ) -> Operator:  # fmt: skip
        """`shape`: M, N, K."""
        m, n, k = (max(1, round(size)) for size in shape)
        bytes_each = gemm.DTYPE_BYTES[dtype]
        return Operator(
            f"{name} {role}", part, moment, gemm.seconds(m, n, k, dtype, self.core), count,
            2.0 * m * n * k, float(bytes_each * (m * k + k * n + m * n)), (m, n, k),
        )  # fmt: skip

    def move(
        self, name: str, moment: str, num_bytes: float, *, part: str = MOVES, launches: float = 1.0
    ) -> Operator:
        start = self.core.calibration.start + self.moved.least
        seconds = num_bytes / self.core.bandwidth + launches * start
        return Operator(name, part, moment, seconds, bytes=num_bytes)


def of(sizes: Sizes, core: Core, moved: Moved, *, turns: int = 1) -> list[Operator]:
    """All operators of a resolved run's step on one device. `turns`: of `recipe.turns_of`."""
    found = []
    for stack in sizes.stacks:
        device = _Device(stack, core, moved, turns)
        share = stack.run.model.num_layers / sizes.run.model.num_layers
        layer = (*_products(device), *_attention(device), *_moves(device))
        times = share * sizes.run.model.repeats
        found += [one._replace(count=one.count * times) for one in layer]
    device = _Device(sizes, core, moved)
    found += [*_loss(device), *_ends(device)]
    return [one for one in found if one.count and one.seconds]


def seconds(operators: Sequence[Operator], moment: str, part: str = "", *, name: str = "") -> float:
    """The time of a moment, or of a part of it; `name`: how names of operators end."""
    return sum(
        one.seconds * one.count
        for one in operators
        if one.moment == moment and part in ("", one.part) and one.name.endswith(name)
    )


def _products(device: _Device) -> Iterator[Operator]:
    sizes, (forward, backward) = device.sizes, device.dtypes
    tokens = sizes.tokens
    if sizes.run.model.num_experts:
        yield from _of_experts(device)
    for name, weight in device.of_layer.items():
        left, right = weight.width, weight.other
        if weight.into_stream:
            left, right = right, left
        again = device.again_of(name) + device.whole_again
        shape = (tokens, right, left)
        yield device.product(name, PRODUCTS, FORWARD, shape, forward)
        yield device.product(name, PRODUCTS, BACKWARD, shape, forward, again)
        shape = (tokens, left, right)
        yield device.product(name, PRODUCTS, BACKWARD, shape, backward, role="input gradient")
        shape = (left, right, tokens)
        yield device.product(name, PRODUCTS, BACKWARD, shape, backward, role=WEIGHT_GRADIENT)


def _of_experts(device: _Device) -> Iterator[Operator]:
    """Products with experts, by kernels, and what is moved between them."""
    sizes = device.sizes
    dtype = device.dtype(sizes.policy.compute.name)
    for name, role, (m, n, k), *counts in experts.multiplied(sizes):
        flops = 2.0 * m * n * k
        time = gemm.attention_seconds(flops, dtype, device.core)  # kernels, too
        num_bytes = sizes.compute_bytes * (m * k + k * n + m * n)
        forward, backward = counts
        one = Operator(
            f"{name} {role}", PRODUCTS, FORWARD, time, forward, flops, num_bytes, (m, n, k)
        )
        yield one
        yield one._replace(moment=BACKWARD, count=backward + device.whole_again * forward)


def _attention(device: _Device) -> Iterator[Operator]:
    sizes, moved = device.sizes, device.moved
    model, run = sizes.run.model, sizes.run
    scores = costs.scores_by_block(model, run.batch.sequence_length, True)
    flops = sum(scores) / len(scores) / model.repeats * sizes.tokens / sizes.mesh["tensor"]
    if _by_splash(device):
        whole = lambda size: -(-size // splash.LANES) * splash.LANES  # noqa: E731
        H, V = model.head_dim, model.value_width
        flops *= (whole(H) + whole(V)) / (H + V)
    dtype = device.dtype(sizes.policy.compute.name)
    again = device.again.get(remat.ATTENTION, 0.0) + device.whole_again
    arrays = sizes.compute_bytes * sizes.tokens * model.head_dim / sizes.mesh["tensor"]
    arrays *= 2 * (model.num_heads + model.num_kv_heads)
    calibration = device.core.calibration
    by_cudnn = calibration.cudnn is not None and _by_cudnn(device)
    # On GPUs cuDNN's is measured.
    is_measured = calibration.attended and (by_cudnn or calibration.cudnn is None)
    measured = _measured_attention(device, dtype) if is_measured else None
    shares, backward = (None, None), moved.attention_backward
    if by_cudnn:
        shares, backward = _shares_of_cudnn(device), core_times.BACKWARD_FLOPS
    for name, moment, times, count in (
        ("attention forward", FORWARD, 1.0, 1.0),
        ("attention forward", BACKWARD, 1.0, again),
        ("attention backward", BACKWARD, backward, 1.0),
    ):
        share = shares[times > 1]
        time = gemm.attention_seconds(times * flops, dtype, device.core, share=share)
        if measured is not None:
            time = measured[times > 1]
        yield Operator(
            name, ATTENTION, moment, time, count, times * flops, arrays * (times > 1) + arrays
        )


def _by_splash(device: _Device) -> bool:
    """Whether the kernel is that of TPUs, which fills heads up to whole lanes."""
    run = device.sizes.run
    takes = splash.fits_lanes(run.batch.sequence_length)
    return device.moved is TPU and takes and run.attention.implementation in ("auto", "splash")


def _by_cudnn(device: _Device) -> bool:
    """Whether the kernel that a GPU chooses is cuDNN's."""
    run = device.sizes.run
    return run.attention.implementation in ("auto", "cudnn") and not cudnn_refusal(run)


def cudnn_refusal(run: Config) -> str:
    """Why cuDNN's attention does not take a run, on an NVIDIA GPU; "" if it does."""
    policy = precision.policy_of(run.precision, run.reduce_dtype)
    return cudnn.refusal(
        policy.compute, run.model.head_dim, softcap=run.model.attention_softcap,
        one_document=not (run.data.pack or run.data.format == pairs.FORMAT),
        device_kind="NVIDIA",
    )  # fmt: skip


def _shares_of_cudnn(device: _Device) -> tuple[float, float]:
    """Of the peak FLOP/s that cuDNN's attention reaches, forward and backward."""
    sizes, run = device.sizes, device.sizes.run
    length, model = run.batch.sequence_length / device.sizes.rings, run.model
    rows = sizes.tokens / length * model.num_heads / sizes.mesh["tensor"]
    of_h200 = (
        core_times.cudnn_share(length, rows, model.head_dim, backward=backward)
        for backward in (False, True)
    )
    return tuple(device.core.calibration.cudnn * share for share in of_h200)


def _measured_attention(device: _Device, dtype: str) -> tuple[float, float]:
    """Seconds of a layer's attention, forward and backward, by the rows that were measured."""
    sizes, run = device.sizes, device.sizes.run
    length, model = run.batch.sequence_length, run.model
    rows = sizes.tokens * sizes.mesh["sequence"] / length * model.num_heads / sizes.mesh["tensor"]
    scores = rows / sizes.mesh["sequence"] * sum(
        gemm.scores_of(length, model.window * is_local(kind), in_blocks=device.moved.blocks)
        for kind in model.layer_kinds
    ) / model.num_layers  # fmt: skip
    return gemm.attended_seconds(scores, length, rows, model.head_dim, dtype, device.core)


def _moves(device: _Device) -> Iterator[Operator]:
    """Elementwise operators of a layer, forward and backward, with what is run again."""
    for index, moment in enumerate((FORWARD, BACKWARD)):
        for name, num_bytes, launches in _moved(device, index):
            yield device.move(name, moment, num_bytes, launches=launches * device.turns)
    share = _run_again(device)
    for name, num_bytes, launches in _moved(device, 0):
        starts = launches * device.turns
        one = device.move(name + AGAIN, BACKWARD, num_bytes, launches=starts)
        # What a layer saved is saved once more only where it is run again as a part of a segment.
        yield one._replace(count=device.whole_again if name == SAVES else share)


def _run_again(device: _Device) -> float:
    """The share of a forward pass's elementwise operators that the backward pass repeats."""
    return device.whole_again + min(1.0, max(device.again.values(), default=0.0))


def _moved(device: _Device, index: int) -> Iterator[tuple[str, float, float]]:
    """Name, bytes and launches of a layer's elementwise operators; `index`: backward or not."""
    sizes, moved = device.sizes, device.moved
    model, tensor, number = sizes.run.model, sizes.mesh["tensor"], sizes.compute_bytes
    heads = (model.num_heads + model.num_kv_heads) * model.head_dim
    head_passes = moved.heads[index] + moved.normed[index] * model.qk_norm
    of_layer = sum(weight.numbers for weight in device.of_layer.values())
    shares = sum(sizes.local(leaf, "parameters") for leaf in sizes.weights)
    shares /= sizes.layers
    if model.num_experts:
        yield "rows of experts", experts.moved_bytes(sizes, index), 1.0
    of_mlp = number * sizes.tokens * remat_costs.mlp_dim(model) / tensor
    yield "activation", moved.mlp[index] * of_mlp, 1.0
    stream = moved.stream[index] * costs.norms_of_block(model) / 2
    yield "norms and residuals", stream * number * sizes.tokens_between * model.width, 1.0
    yield "heads", head_passes * number * sizes.tokens * heads / tensor, 1.0
    passes = (is_one_device(sizes.run) and moved.alone) or moved.shares
    weights = moved.weights[index] * number * of_layer + passes[index] * FP32 * shares
    yield WEIGHTS, weights, moved.launches[index]
    if (steps := device.sizes.rings) > 1:
        queries = number * sizes.tokens * model.num_heads * model.head_dim / tensor
        yield "ring", moved.ring * steps * queries * (2 / 3 if index else 1 / 3), 1.0
    alone = sizes.mesh["stage"] == 1 and sizes.saves_all
    passes = moved.kept if alone else moved.saves
    if passes_lib.of(sizes.run).shared:
        passes = moved.slots
    times = passes[index] + moved.nested[index] * periods.share_in_loops(sizes)
    yield SAVES, times * device.saved, 1.0
    if index:
        gradients = sum(sizes.local(leaf, "gradients") for leaf in sizes.weights)
        gradients *= sizes.reduce_bytes / sizes.layers
        yield "gradients", moved.gradients * gradients, 1.0
    if numbers := _rounded(device, index):
        yield "rounding", moved.rounded * numbers, moved.of_rounding * len(device.of_layer)


def _rounded(device: _Device, index: int) -> float:
    """Numbers that a layer's products round, of activations or of gradients."""
    sizes = device.sizes
    form = quantized.FORMATS[sizes.run.products.format]
    if (form.gradient if index else form.x) is None:
        return 0.0
    return sizes.tokens * sum(
        weight.other if weight.into_stream != bool(index) else weight.width
        for weight in device.of_layer.values()
    )


def _loss(device: _Device) -> Iterator[Operator]:
    """Lookup, head and loss of a microbatch."""
    sizes, run = device.sizes, device.sizes.run
    shared = sizes.mesh["tensor"] * sizes.mesh["stage"]
    chunks, rows = utilization.loss_chunks(run), run.model.padded_vocab / shared
    dtype, width, tokens = device.dtype(sizes.policy.compute.name), run.model.width, sizes.tokens
    shape, each = (tokens, rows / chunks, width), chunks
    yield device.product("head", HEAD, LOSS, shape, dtype, each * (1 + (chunks > 1)))
    shape = (tokens, width, rows / chunks)
    yield device.product("head", HEAD, LOSS, shape, dtype, each, "input gradient")
    shape = (rows / chunks, width, tokens)
    yield device.product("head", HEAD, LOSS, shape, dtype, each, WEIGHT_GRADIENT)
    moved = device.moved.logits * tokens * rows
    of_microbatch, of_chunk = device.moved.of_loss
    launches = of_microbatch + of_chunk * chunks
    yield device.move("logits", LOSS, moved, part=HEAD, launches=launches)
    yield device.move("tables", LOSS, _of_tables(device, chunks), part=HEAD)


def _of_tables(device: _Device, chunks: int) -> float:
    """Bytes of a microbatch's gradient of the table of lookups, and of a head's chunks."""
    sizes, moved, run = device.sizes, device.moved, device.sizes.run
    fp32 = moved.lookups + moved.tied * run.model.tied_head
    found = FP32 * fp32 * sizes.local(sizes.head, "parameters")
    if chunks > 1 and not sizes.axes_of("embed", "parameters"):
        found += moved.cuts * sizes.compute_bytes * sizes.whole(sizes.head)
    return found


def _ends(device: _Device) -> Iterator[Operator]:
    """Of a step: sums of gradients over microbatches, and the update."""
    sizes, moved = device.sizes, device.moved
    leaves = [*sizes.weights, sizes.head]
    if not sizes.run.model.tied_head:
        leaves.append(sizes.head)  # the embedding, as large
    gradients = sum(sizes.local(leaf, "gradients") for leaf in leaves)
    if (several := sizes.run.batch.accumulation) > 1:
        yield device.move("sums of gradients", ENDS, several * moved.sums * FP32 * gradients)
    yield from _roundings(device)
    norms = moved.norms * sizes.reduce_bytes * gradients
    yield device.move("norms of gradients", ENDS, norms)
    updated = sum(sizes.local(leaf, "optimizer") for leaf in leaves)
    num_bytes = moved.update / OF_ADAMW * _updated_bytes(sizes, leaves, updated)
    launches = moved.of_update * len(state_memory.leaves(sizes.run.model))
    yield device.move("update", ENDS, num_bytes, part=UPDATE, launches=launches)
    for stack in orthogonal.stacks(sizes):
        for shape, count in orthogonal.products(stack):
            name = stack.leaf.name.removeprefix("blocks/").removesuffix("/kernel")
            yield device.product(
                name, UPDATE, ENDS, shape, orthogonal.dtype(device.core.chip), count,
                role="orthogonalised",
            )  # fmt: skip
    yield from _of_cpus(device)


def _roundings(device: _Device) -> Iterator[Operator]:
    """Of weights that are trained as integers: read for the largest magnitudes, unless scales are
    learned, read and written once a step; and gradients taken back to the scales."""
    sizes, config = device.sizes, device.sizes.run.quantization
    if not config.bits:
        return
    weights = [leaf for leaf in sizes.weights if quantization.is_quantized(leaf.name)]
    held = sizes.param_bytes * sum(sizes.local(leaf, "parameters") for leaf in weights)
    yield device.move("rounded weights", ENDS, (2 if config.learns else 3) * held)
    if config.learns:
        gradients = FP32 * sum(sizes.local(leaf, "gradients") for leaf in weights)
        yield device.move("gradients of scales", ENDS, 3 * gradients)


def _updated_bytes(sizes: Sizes, leaves: Sequence[Leaf], updated: float) -> float:
    """That an update of so many numbers has to read and write once: parameters, moments and an
    average, both ways, and gradients."""
    run = sizes.run
    kept = moments.number_bytes(run.optimizer.moments, sizes.policy.param)
    number = 2 * sizes.param_bytes + FP32 + (2 * FP32 if run.optimizer.ema_decay else 0)
    return number * updated + 2 * kept * _moments(sizes, leaves)


def _moments(sizes: Sizes, leaves: Sequence[Leaf]) -> float:
    """Numbers of the optimizer's arrays of these parameters on a device."""
    of = functools.partial(state_memory.moments_of, sizes.run)
    return sum(of(leaf) * sizes.local(leaf, "optimizer") for leaf in leaves)


def _of_cpus(device: _Device) -> Iterator[Operator]:
    """Copies of moments in the update's loop over layers, and new memory."""
    sizes, moved, core = device.sizes, device.moved, device.core
    run = sizes.run
    if moved.copies:
        kept = moments.number_bytes(run.optimizer.moments, sizes.policy.param)
        stacked = kept * _moments(sizes, sizes.weights)
        turns, num_bytes = run.model.num_layers / sizes.mesh["stage"], 2 * moved.copies * stacked
        time = num_bytes / core.bandwidth_of(stacked)
        yield Operator("copies of moments", UPDATE, ENDS, time, turns, bytes=num_bytes)
    if moved.fresh and core.calibration.fresh:
        held = _held(device)
        yield Operator("new memory", NEW_MEMORY, ENDS, held / core.calibration.fresh, bytes=held)


def _held(device: _Device) -> float:
    """Bytes that a CPU's program allocates for a step, beside its state: the largest peak.

    update       gradients; both moments of all layers, copied; those of a layer three times
    backward     what layers saved and the weights that they are saved with; gradients of layers;
                 a layer's activations and scores
    loss         the same, with logits and their gradient in place of a layer, and the head's
    """
    sizes, run = device.sizes, device.sizes.run
    model, tokens = run.model, device.sizes.tokens
    layers = FP32 * sum(sizes.local(leaf, "optimizer") for leaf in sizes.weights)
    ends = FP32 * sizes.local(sizes.head, "optimizer") * (1 if model.tied_head else 2)
    rounded = sizes.compute_bytes / FP32 if sizes.compute_bytes < FP32 else 0.0
    share = sizes.reduce_bytes / FP32
    weights = (remat.inside(run.remat) == "none") * layers + rounded * layers
    saved = memory.saved(sizes, dataclasses.replace(memory.TPU, lanes=1))["saved activations"]
    heads = 2 * (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    a_layer = FP32 * tokens * (2 * model.mlp_dim + 6 * model.width + heads)
    block = min(run.batch.sequence_length, blockwise.ROWS) ** 2
    scores = 2.2 * FP32 * tokens / run.batch.sequence_length * model.num_heads * block
    logits = 2 * FP32 * tokens * model.padded_vocab / utilization.loss_chunks(run)
    return max(
        share * (layers + ends) + (2 + rounded + 3 / model.num_layers) * layers,
        saved + weights + share * (layers + ends) + a_layer + scores,
        saved + weights + share * layers + logits + ends,
    )
