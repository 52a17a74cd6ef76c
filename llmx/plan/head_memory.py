"""What the head's gradient, and tables of the vocabulary in another layout, take of a device."""

from llmx.config import utilization
from llmx.config.axes import is_one_device
from llmx.config.state_memory import FP32
from llmx.plan import traffic
from llmx.plan.sizes import Sizes
from llmx.step import optimizers


def behind_the_loss(sizes: Sizes, on_gpu: bool) -> float:
    """What the head's gradient takes more while layers are differentiated."""
    if on_gpu:
        return _tied_head(sizes)
    summed = is_one_device(sizes.run) and utilization.loss_chunks(sizes.run) > 1
    return FP32 * sizes.whole(sizes.head) if summed or keeps_whole(sizes) else 0.0


def in_the_loss(sizes: Sizes, exchanges: bool) -> float:
    """On TPUs the head's gradient in the loss, where it is whole on each device, as that keeps no
    whole lanes of it: of a chunk, or of all (`keeps_whole`). Exchanges send a chunk's in parts."""
    if keeps_whole(sizes):
        return FP32 * sizes.whole(sizes.head)
    if exchanges or not _cuts_lanes(sizes):
        return 0.0
    return FP32 * sizes.whole(sizes.head) / utilization.loss_chunks(sizes.run)


def keeps_whole(sizes: Sizes) -> bool:
    """Whether XLA:TPU sums the head's gradient once, behind the loop over chunks, and keeps that of
    all until then: where a device has the whole head, and no whole lanes of its gradient."""
    in_loop = utilization.loss_chunks(sizes.run) > 1 and sizes.mesh["stage"] == 1
    return in_loop and not sizes.axes_of("embed", "parameters") and _cuts_lanes(sizes)


def scattered(sizes: Sizes, on_gpu: bool) -> float:
    """Behind the loss, where the head is whole and its gradient split: XLA:GPU scatters all chunks'
    sum at once, and copies it into another layout for that."""
    held = sizes.local(sizes.head, "parameters")
    if not on_gpu or held <= sizes.local(sizes.head, "gradients"):
        return 0.0
    return 2 * sizes.param_bytes * held


def padding_of(sizes: Sizes, lanes: int) -> float:
    """By how much rows of a device's columns of the width grow where XLA:TPU fills them up to whole
    lanes; 1 = they are whole, or sums over microbatches keep their layout."""
    if sizes.several:
        return 1.0
    columns = sizes.run.model.width // sizes.size(sizes.axes_of("embed", "parameters"))
    return -(-columns // lanes) * lanes / columns


def padded_tables(sizes: Sizes, lanes: int) -> float:
    """XLA:TPU updates tables of the vocabulary in another layout where their columns are not whole
    lanes: new values, moments and averages, which it makes room for from the beginning."""
    if (padding := padding_of(sizes, lanes)) == 1:
        return 0.0
    tables = 1 if sizes.run.model.tied_head else 2
    kept = optimizers.kept_shapes(sizes.run.optimizer, sizes.head.shape, sizes.head.axes)
    of_moments = kept.count(sizes.head.shape)
    of_one = FP32 * sizes.local(sizes.head, "parameters") * padding
    averages = sizes.run.optimizer.ema_decay > 0
    return (1 + of_moments + averages) * tables * of_one


def _cuts_lanes(sizes: Sizes) -> bool:
    """Whether a device keeps no whole lanes of the head's gradient."""
    return traffic.cuts_lanes(sizes, sizes.size(sizes.axes_of("embed", "gradients")))


def _tied_head(sizes: Sizes) -> float:
    """XLA:GPU keeps a tied head's gradient in the parameters' dtype until the lookups' is added to
    it: what that takes beyond the reduce dtype."""
    more = sizes.param_bytes - sizes.reduce_bytes
    if not sizes.run.model.tied_head or more <= 0:
        return 0.0
    return more * sizes.local(sizes.head, "gradients")
