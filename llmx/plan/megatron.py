"""The time of a step of Megatron-LM on GPT models, operator by operator: to check the planner with.

Not llmx's step: another trainer's, of which measured times are published. What a stage computes for
a microbatch is a list of operators, each of which takes the time of `gemm` or `collectives`; the
host that launches them one by one may be slower than the device, and then sets the pace. Letters: B
sequences of a microbatch, T positions, n = B T tokens, D width, N heads, V vocabulary, L layers,
P stages, M microbatches, t tensor, d data.

Sources: Shoeybi et al., arXiv 1909.08053 (tensor parallelism); Narayanan et al., arXiv 2104.04473
(pipeline, ranks); Korthikanti et al., arXiv 2205.05198 (sequence parallelism, recomputation).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from llmx.aot import links
from llmx.plan import collectives, gemm
from llmx.plan.gemm import Core


@dataclasses.dataclass(frozen=True)
class Job:
    """A GPT model and how it is spread over GPUs."""

    width: int
    heads: int
    layers: int
    sequence: int
    vocabulary: int
    batch: int  # sequences in a step, of all replicas
    microbatch: int = 1  # sequences
    tensor: int = 1
    data: int = 1
    pipeline: int = 1
    per_node: int = 8  # GPUs
    vocabulary_multiple: int = 128  # of padding, times `tensor`

    @property
    def tokens(self) -> int:
        return self.microbatch * self.sequence

    @property
    def gpus(self) -> int:
        return self.tensor * self.data * self.pipeline

    @property
    def microbatches(self) -> int:
        return self.batch // (self.data * self.microbatch)

    @property
    def words(self) -> int:
        """Rows of the embedding on one GPU."""
        multiple = self.vocabulary_multiple * self.tensor
        return math.ceil(self.vocabulary / multiple) * multiple // self.tensor

    @property
    def layer_parameters(self) -> float:
        """Of one layer on one GPU."""
        return 12.0 * self.width**2 / self.tensor


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a version of the trainer computes. What is exposed is a share: nothing hides it."""

    dtype: str
    fused_attention: bool  # one kernel, causal; else products, softmax and dropout of all scores
    recompute: bool  # every layer's forward pass again before its backward pass
    sequence_parallel: bool  # norms on n/t tokens, all-gathers and reduce-scatters
    dropout: bool
    sharded_optimizer: bool  # over replicas
    exposed_tensor: float = 1.0  # of tensor parallel collectives
    exposed_sends: float = 1.0  # of messages between stages
    exposed_gradients: float = 1.0  # of the sum over replicas
    chunk_layers: int | None = None  # of a chunk in interleaved 1F1B; None: one chunk on each stage


# 2021: all scores in memory, full recomputation, nothing overlaps, gradients summed in fp32. The
# authors of vTrain (MICRO 2024) measured it.
UNFUSED = Recipe(
    "float16", fused_attention=False, recompute=True, sequence_parallel=False, dropout=True,
    sharded_optimizer=False,
)  # fmt: skip
# 2024, as in the table of its README, which says that communication of data, tensor and pipeline
# parallelism overlaps. Not said there, and assumed: half of the tensor parallel collectives is
# hidden, microbatches of one sequence, chunks of one layer, no recomputation, no dropout.
FUSED = Recipe(
    "bfloat16", fused_attention=True, recompute=False, sequence_parallel=True, dropout=False,
    sharded_optimizer=True, exposed_tensor=0.5, exposed_sends=0.0, exposed_gradients=0.0,
    chunk_layers=1,
)  # fmt: skip


class Product(NamedTuple):
    """A product of matrices, or a batch of them."""

    m: int
    n: int
    k: int
    batch: int = 1
    accumulates: bool = False  # adds to a result in fp32


class Move(NamedTuple):
    """An elementwise operator or a reduction."""

    bytes: float


class Attention(NamedTuple):
    """Fused attention."""

    flops: float


class Collective(NamedTuple):
    """Over the tensor parallel group."""

    kind: str
    bytes: float


Operator = Product | Move | Attention | Collective

WIDTH = 2  # bytes of a number of an activation
ACCUMULATE_BYTES = 10.0  # a gradient in 2 bytes is read and added to a sum in fp32


def layer(job: Job, recipe: Recipe) -> tuple[list[Operator], list[Operator]]:
    """Forward and backward operators of a transformer layer, without recomputation."""
    D, t, n = job.width, job.tensor, job.tokens
    norm_tokens = n // t if recipe.sequence_parallel else n
    into, out = _entry_and_exit(job, recipe)
    stream = float(norm_tokens * D)
    norm, norm_back = [Move(4 * stream)], [Move(8 * stream)]
    # Bias, dropout and residual in one operator: reads two, writes one, and a byte of mask.
    mask = 1.0 if recipe.dropout else 0.0
    join, join_back = [Move((6 + mask) * stream)], [Move((4 + mask) * stream)]
    gelu, gelu_back = [Move(4.0 * n * 4 * D / t)], [Move(6.0 * n * 4 * D / t)]
    attend, attend_back = _attention(job, recipe)
    parts = [
        (norm, norm_back), into, _linear(n, 3 * D // t, D, recipe), (attend, attend_back),
        _linear(n, D, D // t, recipe), out, (join, join_back),
        (norm, norm_back), into, _linear(n, 4 * D // t, D, recipe), (gelu, gelu_back),
        _linear(n, D, 4 * D // t, recipe), out, (join, join_back),
    ]  # fmt: skip
    return _chain(parts)


def _entry_and_exit(job: Job, recipe: Recipe):
    """Collectives before the first and after the second product of a pair, forward and backward."""
    size = WIDTH * job.tokens * job.width
    if job.tensor == 1:
        return ([], []), ([], [])
    if recipe.sequence_parallel:
        gather, scatter = Collective("all-gather", size), Collective("reduce-scatter", size)
        # Backward the input is gathered once more for the gradient by the weights.
        return ([gather], [gather, scatter]), ([scatter], [gather])
    reduce = [Collective("all-reduce", size)]
    return ([], reduce), (reduce, [])


def _linear(m: int, n: int, k: int, recipe: Recipe) -> tuple[list[Operator], list[Operator]]:
    """A product with weights [k, n]; backward also what adds the gradient to the sum."""
    by_input, by_weight = Product(m, k, n), Product(k, n, m)
    bias = Move(float(WIDTH * m * n))
    if recipe.sequence_parallel:
        back = [by_input, by_weight._replace(accumulates=True), bias]
    else:
        back = [by_input, by_weight, bias, Move(ACCUMULATE_BYTES * k * n)]
    return [Product(m, n, k)], back


def _attention(job: Job, recipe: Recipe) -> tuple[list[Operator], list[Operator]]:
    T, H = job.sequence, job.width // job.heads
    batch = job.microbatch * max(job.heads // job.tensor, 1)
    if recipe.fused_attention:
        # The causal half of scores; 2 products forward, 5 backward.
        half = 2.0 * batch * T * T * H / 2
        return [Attention(2 * half)], [Attention(5 * half)]
    scores, values = float(batch * T * T), float(batch * T * H)
    mix = Move(4 * values)  # heads beside each other again
    forward = [
        Product(T, T, H, batch), Move(4 * scores), Move(5 * scores), Product(T, H, T, batch), mix,
    ]  # fmt: skip
    backward = [
        mix, Product(T, T, H, batch), Product(T, H, T, batch), Move(5 * scores), Move(6 * scores),
        Product(T, H, T, batch), Product(T, H, T, batch), Move(12 * values),
    ]  # fmt: skip
    return forward, backward


def embedding(job: Job, recipe: Recipe) -> tuple[list[Operator], list[Operator]]:
    """Forward and backward operators of the first stage before its layers."""
    size, table = float(WIDTH * job.tokens * job.width), float(job.words * job.width)
    forward: list[Operator] = [Move(2 * size), Move(3 * size), Move(2.5 * size)]
    if job.tensor > 1:
        kind = "reduce-scatter" if recipe.sequence_parallel else "all-reduce"
        forward.append(Collective(kind, size))
    # The gradient of the table is dense: filled with zeros, written, added to the sum.
    return forward, [Move(2.5 * size), Move(2 * table + 3 * size), Move(ACCUMULATE_BYTES * table)]


def head(job: Job, recipe: Recipe) -> tuple[list[Operator], list[Operator]]:
    """Forward and backward operators of the last stage after its layers."""
    size, n = float(WIDTH * job.tokens * job.width), job.tokens
    logits = float(n * job.words)
    # The loss in fp32, one operator after the other: cast, maximum, difference, exponential, sum,
    # quotient; backward product, cast.
    loss = [Move(by * logits) for by in (6, 4, 8, 8, 4, 8)]
    loss_back = [Move(by * logits) for by in (8, 8, 6)]
    into, _ = _entry_and_exit(job, recipe)
    if job.tensor > 1:
        loss[1:1] = [Collective("all-reduce", 4.0 * n)] * 3
    parts = [
        ([Move(2 * size)], [Move(4 * size)]), into,
        _linear(n, job.words, job.width, recipe), (loss, loss_back),
    ]  # fmt: skip
    return _chain(parts)


def _chain(parts: Iterable[tuple[Sequence[Operator], Sequence[Operator]]]):
    parts = list(parts)
    forward = [operator for part, _ in parts for operator in part]
    return forward, [operator for _, part in reversed(parts) for operator in part]


@dataclasses.dataclass(frozen=True)
class Prices:
    """What operators of a job take on GPUs of one kind."""

    job: Job
    recipe: Recipe
    core: Core

    @functools.cached_property
    def rates(self) -> links.Rates:
        return collectives.rates_of(self.core)

    def seconds(self, operator: Operator) -> float:
        """The time of one operator on the device."""
        core, dtype = self.core, self.recipe.dtype
        match operator:
            case Product(m, n, k, batch, accumulates):
                out = "float32" if accumulates else dtype
                return gemm.seconds(m, n, k, dtype, core, batch=batch, out=out)
            case Move(num_bytes):
                return gemm.memory_seconds(num_bytes, core)
            case Attention(flops):
                return gemm.attention_seconds(flops, dtype, core)
            case Collective(kind, num_bytes):
                return self.recipe.exposed_tensor * self.over_tensor(kind, num_bytes)
        raise AssertionError(operator)

    def over_tensor(self, kind: str, num_bytes: float) -> float:
        """A collective of neighbours."""
        return self._over(kind, num_bytes, self.job.tensor, 1)

    def over_data(self, kind: str, num_bytes: float) -> float:
        """A collective of every `tensor`-th GPU."""
        return self._over(kind, num_bytes, self.job.data, self.job.tensor)

    def over_ends(self, kind: str, num_bytes: float) -> float:
        """A collective of the first and the last stage."""
        job = self.job
        if job.pipeline == 1:
            return 0.0
        return self._over(kind, num_bytes, 2, job.gpus - job.tensor * job.data)

    def _over(self, kind: str, num_bytes: float, size: int, stride: int) -> float:
        per_node = min(size, max(math.ceil(self.job.per_node / stride), 1))
        adapters = collectives.adapters_of(stride, per_node)
        return collectives.seconds(
            kind, num_bytes, size, per_node=per_node, adapters=adapters, rates=self.rates
        )

    def work(self, operators: Sequence[Operator]) -> "Work":
        """Seconds of operators on the device and on its host."""
        device = sum(map(self.seconds, operators))
        return Work(device, self.core.calibration.host * len(operators))


class Work(NamedTuple):
    """Seconds."""

    device: float
    host: float

    def plus(self, other: "Work", times: float = 1.0) -> "Work":
        return Work(self.device + times * other.device, self.host + times * other.host)

    @property
    def together(self) -> float:
        """The host launches ahead of the device, so that the slower of both sets the pace.

        Where both take the same time each waits for the other in some parts: together they take
        2 ** (1 / `WAITS`) as long.
        """
        return (self.device**WAITS + self.host**WAITS) ** (1 / WAITS)


# Of a few that were tried on a100_single_node.csv. The maximum of both has 0.6 points more error.
WAITS = 4


def stage_seconds(prices: Prices) -> list[float]:
    """Of each stage, the time of a microbatch, forward and backward."""
    job, recipe = prices.job, prices.recipe
    forward, backward = layer(job, recipe)
    one = prices.work(forward + backward + (forward if recipe.recompute else []))
    stages = [Work(0.0, 0.0).plus(one, job.layers / job.pipeline)] * job.pipeline
    stages[0] = stages[0].plus(prices.work(list(itertools.chain(*embedding(job, recipe)))))
    stages[-1] = stages[-1].plus(prices.work(list(itertools.chain(*head(job, recipe)))))
    sends = recipe.exposed_sends * send_seconds(prices)
    return [stage.together + sends for stage in stages]


def send_seconds(prices: Prices) -> float:
    """What a stage waits for a microbatch's activations and gradients to pass to its neighbours."""
    job = prices.job
    if job.pipeline == 1:
        return 0.0
    # Each GPU of a tensor parallel group sends its part, and the receivers gather them.
    size = WIDTH * job.tokens * job.width
    send = collectives.message_seconds(
        size / job.tensor, leaves_node=job.gpus > job.per_node, rates=prices.rates
    )
    return 2 * (send + prices.over_tensor("all-gather", size))


def pipeline_seconds(stages: Sequence[float], microbatches: int, chunks: int = 1) -> float:
    """1F1B of stages that may differ: a microbatch through all, the others by the slowest.

    Equal to `pipeline.simulate` of stages without barriers where all take as long or the last, with
    the head, takes longest; else up to a fifth above it.

    `stages`: seconds of a microbatch in each, forward and backward. `chunks`: of the model on each
    stage, interleaved, which shortens the way to the last stage and back.
    """
    slowest = max(stages)
    return slowest * microbatches + (sum(stages) - slowest) / chunks


def parameters(job: Job) -> float:
    """Of a GPU of the first stage."""
    return job.layer_parameters * job.layers / job.pipeline + job.words * job.width


# Bytes that mixed precision moves for a parameter: test of the gradient for infinity 8, norm 4,
# Adam in fp32 28, fp32 to fp16 parameters 6.
UPDATE_BYTES = 46.0
GRADIENT_BYTES = 4  # summed over replicas in fp32


def update_seconds(prices: Prices) -> float:
    """Gradients summed over replicas, those of the tied embedding over two stages, and Adam."""
    job, recipe = prices.job, prices.recipe
    number = parameters(job)
    reduce = prices.over_data("all-reduce", GRADIENT_BYTES * number)
    tied = prices.over_ends("all-reduce", GRADIENT_BYTES * job.words * job.width)
    shards = job.data if recipe.sharded_optimizer else 1
    adam = gemm.memory_seconds(UPDATE_BYTES * number / shards, prices.core)
    return recipe.exposed_gradients * reduce + tied + adam


def step_seconds(job: Job, recipe: Recipe, core: Core) -> float:
    """The time of a step."""
    prices = Prices(job, recipe, core)
    chunks = 1
    if recipe.chunk_layers is not None:
        chunks = max(job.layers // job.pipeline // recipe.chunk_layers, 1)
    update = update_seconds(prices)
    return pipeline_seconds(stage_seconds(prices), job.microbatches, chunks) + update


def model_flops(job: Job) -> float:
    """FLOPs of a step without recomputation, with full attention (arXiv 2205.05198)."""
    D, L, T = job.width, job.layers, job.sequence
    ratio = 1 + T / (6 * D) + job.vocabulary / (12 * D * L)
    return 72.0 * job.batch * T * L * D**2 * ratio
