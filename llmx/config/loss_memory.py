"""What the loss takes of a device, counted in arrays that the programs of XLA have at a time.

The loss goes through the vocabulary in chunks (`llmx.model.losses`). In the backward pass a chunk's
logits are there in fp32, and beside them their gradient in the compute dtype, which two products
read. XLA:TPU has that in the core's own memory where it fits, and in the logits' place in fp32. One
chunk's logits are kept from the forward pass. XLA:GPU writes out a loop of two turns and begins the
second before the first is done, if it gathers chunks of the head ahead (with a tied head that of
the backward pass too); of more turns it has two in a body then. Its sums of the head's gradient
over chunks are in the parameters' dtype: the gradient itself where that is, and is not split
further.
"""

import dataclasses

from llmx.config import Config, utilization
from llmx.config.axes import gathers_head_ahead, is_one_device, splits_parameters
from llmx.config.state_memory import FP32, Held, head_of
from llmx.model import precision, remat_costs


@dataclasses.dataclass(frozen=True)
class Arrays:
    """Of a compiler: where there is one chunk, where there are two, and where there are more."""

    logits: tuple[int, int, int]  # of a chunk, in fp32
    gradients: tuple[int, int, int]  # of its logits, in the compute dtype
    # With more than two chunks that are gathered ahead a body has two turns: logits in fp32 and
    # chunks of the head while the second begins, and while the first makes the head's gradient.
    double_buffered: tuple[tuple[int, int], ...]
    # The same of two chunks where the head is the embedding table: as compiled with GPT-2.
    tied_logits: int
    rows: tuple[int, int, int]  # chunks of the head, gathered, in the compute dtype
    head: float  # bytes per number of a device's share of the head; of split sums in fp32 4
    head_fp32: float  # the same where these sums are its gradient, in fp32 and as large
    core_bytes: int  # a core's own memory
    keeps_logits: bool  # those of one chunk until the layers have their gradients


# With libtpu 0.0.42.1 and XLA of jax 0.10.2.
TPU = Arrays(
    logits=(1, 1, 1), gradients=(1, 1, 1), double_buffered=(), tied_logits=1, rows=(1, 2, 2),
    head=2.0, head_fp32=2.0, core_bytes=128 * 2**20, keeps_logits=True,
)  # fmt: skip
GPU = Arrays(
    logits=(1, 2, 1), gradients=(1, 0, 1), double_buffered=((2, 2), (1, 4)), tied_logits=4,
    rows=(1, 2, 2), head=4.0, head_fp32=0.0, core_bytes=0, keeps_logits=False,
)  # fmt: skip


def of(run: Config, *, on_gpu: bool = False) -> float:
    """Bytes of a resolved run's loss at its peak: logits and their gradients, chunks of the head,
    and the last hidden state in fp32."""
    arrays, kind = GPU if on_gpu else TPU, min(utilization.loss_chunks(run), 3) - 1
    if kind == 1 and on_gpu and not gathers_head_ahead(run):
        kind = 2
    logits, gradients, copied = (of[kind] for of in (arrays.logits, arrays.gradients, arrays.rows))
    if kind == 1 and run.model.tied_head:
        # In a pipeline the second chunk is begun when the first has its gradient.
        logits, gradients = (logits, 1) if run.mesh.stage > 1 else (arrays.tied_logits, gradients)
    policy = precision.policy_of(run.precision, run.reduce_dtype)
    compute = policy.compute.itemsize
    of_chunk, rows_of_head = logits_of_chunk(run), head_of_chunk(run)
    of_logits = gradients * gradients_of_logits(run)
    if not on_gpu and compute == FP32:
        of_logits = 0.0  # in the logits' place
    read = compute == policy.param.itemsize and not splits_parameters(run)
    if read and (kind == 0 or not on_gpu):
        copied = 0  # the head itself is read
    if kind == 2 and on_gpu and gathers_head_ahead(run):
        found = max(
            chunks * of_chunk + heads * rows_of_head for chunks, heads in arrays.double_buffered
        )
    else:
        found = logits * of_chunk + copied * rows_of_head
        found += of_logits if of_logits > arrays.core_bytes else 0.0
    made_later = on_gpu and kind == 0 and is_one_device(run)  # when the logits are gone
    hidden = FP32 * _tokens(run) * run.model.width
    return found + hidden + (0.0 if made_later else _sums_of_head(run, arrays))


def _sums_of_head(run: Config, arrays: Arrays) -> float:
    """Bytes of the sums of the head's gradient over chunks."""
    policy, held = precision.policy_of(run.precision, run.reduce_dtype), Held(run)
    head = head_of(run.model)
    numbers = held.numbers(head, "parameters")
    of_number = arrays.head
    if policy.reduce.itemsize == FP32:
        in_place = numbers <= held.numbers(head, "gradients")
        of_number = arrays.head_fp32 if in_place else FP32
    if arrays is GPU:  # in the parameters' dtype
        of_number *= policy.param.itemsize / FP32
    return of_number * numbers


def logits_of_chunk(run: Config) -> float:
    """Bytes of those of a chunk, in fp32."""
    return FP32 * _tokens(run) * _rows(run)


def head_of_chunk(run: Config) -> float:
    """Bytes of a chunk of the head, in the compute dtype."""
    return _compute_bytes(run) * _rows(run) * run.model.width


def gradients_of_logits(run: Config) -> float:
    """Bytes of those of a chunk, in the compute dtype."""
    return _compute_bytes(run) * _tokens(run) * _rows(run)


def _compute_bytes(run: Config) -> int:
    return precision.policy_of(run.precision, run.reduce_dtype).compute.itemsize


def kept_logits(run: Config, *, on_gpu: bool = False) -> float:
    """Bytes of the loss that are there while the layers are differentiated. On TPUs the logits of
    one chunk, where layers do not save all. On GPUs that scatter the head's gradient: the
    gradients of all logits where there is no loop over chunks (one, or two that gather ahead);
    where more gather ahead, those of the last chunk, which is behind the loop, and the head's
    gradient of it."""
    arrays, chunks = GPU if on_gpu else TPU, utilization.loss_chunks(run)
    if on_gpu and splits_parameters(run):
        if chunks == 1 or (chunks == 2 and gathers_head_ahead(run)):
            return gradients_of_logits(run) * chunks
        if gathers_head_ahead(run):
            return gradients_of_logits(run) + head_of_chunk(run)
    if chunks > 1 or not arrays.keeps_logits or remat_costs.saves_all(run.model, run.remat):
        return 0.0
    return logits_of_chunk(run)


def _tokens(run: Config) -> float:
    """Of a microbatch, whole along `tensor`."""
    return utilization.tokens_of(run) / run.mesh.sequence


def _rows(run: Config) -> float:
    """Of a chunk."""
    ways = run.mesh.stage * run.mesh.tensor * utilization.loss_chunks(run)
    return run.model.padded_vocab / ways
