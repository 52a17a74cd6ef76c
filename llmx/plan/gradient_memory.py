"""Which gradients a device holds at the peaks of a train step, and in which type."""

from llmx.config import utilization
from llmx.config.axes import is_one_device
from llmx.config.state_memory import FP32, leaves
from llmx.plan import head_memory, periods, traffic
from llmx.plan.sizes import Sizes


def buffers(sizes: Sizes) -> dict[str, float]:
    """Buffers of one microbatch's gradients, and sums over several."""
    found = {"gradients": 0.0, "sums of gradients": 0.0}
    for leaf in leaves(sizes.run.model):
        held = sizes.local(leaf, "gradients")
        found["gradients"] += held * (sizes.reduce_bytes if leaf.is_matrix else FP32)
        found["sums of gradients"] += held * FP32 * sizes.several
    return found


def of_layers(sizes: Sizes) -> float:
    """Of one microbatch, in the reduce dtype."""
    return sizes.reduce_bytes * sum(sizes.local(leaf, "gradients") for leaf in sizes.weights)


def at_the_loss(sizes: Sizes, common: dict[str, float], on_gpu: bool) -> dict[str, float]:
    """Parts of the peak of the loss in place of those in `common`. Where tables' gradients are
    summed at once there is the head's. Else there are none on one device, nor where layers save
    all, but where GPUs gather weights."""
    held, gathers = common.get("gradients", 0.0), bool(sizes.axes_of("embed", "parameters"))
    if held and sizes.reduce_bytes == FP32 and _sums_whole_tables(sizes):
        return {"gradients": of_head(sizes)}
    if is_one_device(sizes.run) or (sizes.saves_all and not (on_gpu and gathers)):
        return {"gradients": 0.0}
    if not held:
        return {}
    return _on_gpus(sizes, held, gathers) if on_gpu else _on_tpus(sizes, held, gathers)


def _on_gpus(sizes: Sizes, held: float, gathers: bool) -> dict[str, float]:
    """At the loss: none where several microbatches gather nothing, and layers save all products or
    are a loop over periods, or two tables, whole but for `tensor`, have their gradients; else all
    but the head's, where the loss has one chunk or it is whole."""
    two_tables = sizes.mesh["tensor"] > 1 and not sizes.run.model.tied_head and _whole(sizes)
    behind = periods.number(sizes) > 1 or sizes.saves_products or two_tables
    if sizes.several and not gathers and behind:
        return {"gradients": 0.0}
    # The loss counts the sum over chunks of a whole head's gradient, which is rounded behind it.
    rounded_later = _whole(sizes) and sizes.reduce_bytes < FP32
    if utilization.loss_chunks(sizes.run) > 1 and not rounded_later:
        return {}
    return {"gradients": held - of_head(sizes)}


def _on_tpus(sizes: Sizes, held: float, gathers: bool) -> dict[str, float]:
    """At the loss: those of layers are made behind it where weights are gathered, there are several
    microbatches, or layers are a loop over periods."""
    if not gathers and not sizes.several and periods.number(sizes) == 1:
        return {}
    if padded := head_memory.padded_tables(sizes, traffic.LANES):
        # They are there from the beginning, and nothing that the backward pass makes.
        return {
            "tables in another layout": padded, "gradients": 0.0, "gradient of the head": 0.0,
            "turned weights": 0.0, "copies of weights and gradients": 0.0,
        }  # fmt: skip
    if sizes.several and _whole(sizes):
        # The embedding's is the last; of one chunk the head's is not apart.
        return {"gradients": of_head(sizes) * (utilization.loss_chunks(sizes.run) > 1)}
    return {"gradients": held - of_layers(sizes)}


def summed_at_once(sizes: Sizes, common: dict[str, float], on_gpu: bool) -> dict[str, float]:
    """While layers are differentiated, of two tables whose gradients are whole, and are summed over
    several microbatches. In fp32 both are summed as they are made, and so are GPUs' with parameters
    in bf16. XLA:TPU adds the head's in bf16 at once too where the loss has one chunk, and so keeps
    no logits."""
    if "gradients" not in common or not _sums_whole_tables(sizes):
        return {}
    if sizes.reduce_bytes == FP32 or (on_gpu and embedding_in_fp32(sizes)):
        names, found = ("embedding", "head"), {"rounded head": 0.0}
    elif not on_gpu and utilization.loss_chunks(sizes.run) == 1:
        names, found = ("head",), {"logits": 0.0}
    else:
        return {}
    tables = (leaf for leaf in leaves(sizes.run.model) if leaf.name in names)
    of_tables = sizes.reduce_bytes * sum(sizes.local(leaf, "gradients") for leaf in tables)
    return {"gradients": common["gradients"] - of_tables} | found


def _sums_whole_tables(sizes: Sizes) -> bool:
    """Of two tables, over several microbatches, on each device (along `tensor` its rows)."""
    return sizes.several and not sizes.run.model.tied_head and _whole(sizes)


def of_head(sizes: Sizes) -> float:
    """Of one microbatch, in the reduce dtype."""
    return sizes.reduce_bytes * sizes.local(sizes.head, "gradients")


def _whole(sizes: Sizes) -> bool:
    """Whether each device has the gradients of the whole width."""
    return not sizes.axes_of("embed", "gradients")


def embedding_in_fp32(sizes: Sizes) -> float:
    """On GPUs, of parameters in bf16, where `remat` is not "none": the lookups' gradients are added
    up in fp32, where they are whole on each of several devices, and zeros for them are there from
    the loss on."""
    whole = _whole(sizes) and not is_one_device(sizes.run)
    bf16 = max(sizes.param_bytes, sizes.reduce_bytes) < FP32
    if not whole or not bf16 or sizes.saves_all:
        return 0.0
    return FP32 * sum(
        sizes.local(leaf, "gradients")
        for leaf in leaves(sizes.run.model)
        if leaf.name == "embedding"
    )
