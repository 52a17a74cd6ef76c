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
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

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
    """How a version of the trainer computes."""

    dtype: str
    fused_attention: bool  # one kernel, causal; else products, softmax and dropout of all scores
    recompute: bool  # every layer's forward pass again before its backward pass
    sequence_parallel: bool  # norms on n/t tokens, all-gathers and reduce-scatters
    dropout: bool
    exposed_tensor: float = 1.0  # share of tensor parallel collectives that nothing hides
    exposed_data: float = 1.0  # the same of gradients and, where sharded, of parameters
    sharded_optimizer: bool = False
    gradient_bytes: int = 2  # of a number in the sum over replicas


# 2021, with full recomputation: what vTrain's authors measured (MICRO 2024).
UNFUSED = Recipe("float16", False, True, False, True)


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
        back = [by_input, by_weight, bias, Move(6.0 * k * n)]
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
    return forward, [Move(2.5 * size), Move(2 * table + 3 * size), Move(6 * table)]


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


class Cluster:
    """Prices of operators for a job on GPUs of one kind."""

    def __init__(self, job: Job, recipe: Recipe, core: Core):
        self.job, self.recipe, self.core = job, recipe, core
        self.rates = collectives.rates_of(core)

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
                return self.recipe.exposed_tensor * self.tensor(kind, num_bytes)
        raise AssertionError(operator)

    def tensor(self, kind: str, num_bytes: float) -> float:
        size = self.job.tensor
        return collectives.seconds(kind, num_bytes, size, min(size, self.job.per_node), self.rates)

    def data(self, kind: str, num_bytes: float) -> float:
        size, stride = self.job.data, self.job.tensor
        per_node = min(size, max(self.job.per_node // stride, 1))
        return collectives.seconds(kind, num_bytes, size, per_node, self.rates)

    def both(self, operators: Sequence[Operator]) -> "Work":
        """Seconds of some operators on the device and on its host."""
        device = sum(map(self.seconds, operators))
        return Work(device, self.core.calibration.host * len(operators))


class Work(NamedTuple):
    """Seconds."""

    device: float
    host: float

    def plus(self, other: "Work", times: float = 1.0) -> "Work":
        return Work(self.device + times * other.device, self.host + times * other.host)


def stage_seconds(cluster: Cluster) -> list[float]:
    """Of each stage, the time of a microbatch: forward and backward."""
    job, recipe = cluster.job, cluster.recipe
    forward, backward = layer(job, recipe)
    one = cluster.both(forward + backward + (forward if recipe.recompute else []))
    stages = [Work(0.0, 0.0).plus(one, job.layers / job.pipeline)] * job.pipeline
    stages[0] = stages[0].plus(cluster.both(sum(embedding(job, recipe), [])))
    stages[-1] = stages[-1].plus(cluster.both(sum(head(job, recipe), [])))
    return [max(stage) + send_seconds(cluster) for stage in stages]


def send_seconds(cluster: Cluster) -> float:
    """What a stage waits for activations and gradients of a microbatch to pass to its neighbours."""
    job = cluster.job
    if job.pipeline == 1:
        return 0.0
    # Each GPU of a tensor parallel group sends its part, and the receivers gather them.
    size = WIDTH * job.tokens * job.width
    leaves = job.tensor * job.data * job.pipeline > job.per_node
    send = collectives.seconds(
        "collective-permute", size / job.tensor, 2, 1 if leaves else 2, cluster.rates
    )
    return 2 * (send + cluster.tensor("all-gather", size))


def pipeline_seconds(stages: Sequence[float], microbatches: int, chunks: int = 1) -> float:
    """1F1B of stages that may differ: the first microbatch through all, the rest by the slowest.

    `chunks`: of the model on each stage, interleaved, which divides the first part.
    """
    return max(stages) * microbatches + (sum(stages) - max(stages)) / chunks


def parameters(job: Job) -> float:
    """Of the GPU that has most: that of the first stage."""
    return job.layer_parameters * job.layers / job.pipeline + job.words * job.width


# Bytes that mixed precision Adam moves for a parameter: fp16 gradient to fp32 6, test for infinity
# 8, norm 4, clip 8, Adam 28, fp32 to fp16 parameters 6, gradients to zero 2.
OPTIMIZER_BYTES = 62.0
TENSORS = 12  # of a layer
OPTIMIZER_OPERATORS = 3  # launched for each tensor


def update_seconds(cluster: Cluster) -> float:
    """Gradients summed over replicas, the tied embedding over two stages, and Adam."""
    job, recipe = cluster.job, cluster.recipe
    number = parameters(job)
    size = recipe.gradient_bytes * number
    reduce = recipe.exposed_data * cluster.data("all-reduce", size)
    if job.pipeline > 1:
        table = recipe.gradient_bytes * job.words * job.width
        leaves = job.tensor * job.data * job.pipeline > job.per_node
        reduce += collectives.seconds("all-reduce", table, 2, 1 if leaves else 2, cluster.rates)
    shards = job.data if recipe.sharded_optimizer else 1
    adam = gemm.memory_seconds(OPTIMIZER_BYTES * number / shards, cluster.core)
    launches = OPTIMIZER_OPERATORS * TENSORS * job.layers / job.pipeline
    return reduce + max(adam, launches * cluster.core.calibration.host)


def step_seconds(job: Job, recipe: Recipe, core: Core) -> float:
    """The time of a step."""
    cluster = Cluster(job, recipe, core)
    stages = stage_seconds(cluster)
    return pipeline_seconds(stages, job.microbatches) + update_seconds(cluster)


Predict = Callable[[Job], float]
