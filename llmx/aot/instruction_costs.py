"""What one instruction of a compiled program computes, and how many bytes it reads and writes.

FLOPs are those of matrix products and convolutions, a multiply-add counting as 2. TPU programs
write every matrix product as a convolution. Window positions on padding or on holes do not count.
Bytes are those of an operation's operands and results, in any memory; a fusion is one operation.
Of a sliced array the bytes of the slice count, of one updated in place those of the update.

Source: xla/service/hlo_cost_analysis.cc in github.com/openxla/xla.
"""

import functools
import math
import re

import numpy as np

from llmx.aot.hlo_text import Array, Computation, Instruction, Module, collective_kind


def is_product(instruction: Instruction) -> bool:
    """Whether it is a matrix product or a convolution, cuBLAS calls included."""
    if instruction.op == "custom-call":
        return (instruction.quoted("custom_call_target") or "").startswith("__cublas$")
    return instruction.op in ("dot", "scaled-dot", "convolution")


# Calls without computation: allocations, markers, layouts.
_NO_KERNELS = {
    "AllocateBuffer", "AsyncCollectiveStart", "AsyncCollectiveDone", "PrepareAsyncCallStart",
    "PrepareAsyncCallDone", "ConcatBitcast", "SliceBitcast", "Sharding", "SPMDFullToShardShape",
    "SPMDShardToFullShape", "LayoutConstraint", "MoveToHost", "MoveToDevice",
    "annotate_device_placement", "AssumeGatherIndicesInBound", "ShapeBarrier", "NopReturnToken",
}  # fmt: skip


def is_kernel(instruction: Instruction) -> bool:
    """Whether it calls a computation that the text does not show; cuBLAS calls are products."""
    if instruction.op not in ("custom-call", "custom-call-start") or is_product(instruction):
        return False
    return instruction.quoted("custom_call_target") not in _NO_KERNELS


def kernel_name(call: Instruction) -> str:
    """The name of the kernel that a call runs; Pallas on GPU writes it beside the kernel's code."""
    named = re.search(r', name = "([\w.\-]+)"', call.config)
    return named.group(1) if named else re.sub(r"\.\d+$", "", call.name)


def flops_of(computation: Computation, instruction: Instruction) -> float | None:
    """FLOPs of a product; None: its dimensions cannot be parsed."""
    left, right = (operand.arrays[0] for operand in computation.operands_of(instruction)[:2])
    out = instruction.arrays[0]
    if instruction.op == "convolution":
        return _convolution(instruction, left, right, out)
    if instruction.op == "custom-call":
        dims = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.config)
        if dims is None:
            return None
        contracted = [int(dim) for dim in re.findall(r"\d+", dims.group(1))]
    else:
        contracted = instruction.integers("lhs_contracting_dims")
    return 2.0 * out.size * math.prod(left.dims[dim] for dim in contracted)


def _convolution(instruction: Instruction, left: Array, right: Array, out: Array) -> float | None:
    labels = re.search(r"\bdim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    if labels is None:
        return None
    of_left, of_right, of_out = labels.groups()
    groups = int(instruction.attribute("feature_group_count") or 1)
    batches = int(instruction.attribute("batch_group_count") or 1)
    products = left.dims[of_left.index("f")] // groups * right.dims[of_right.index("o")]
    products *= left.dims[of_left.index("b")] // batches
    window = re.search(r"\bwindow=\{([^}]*)\}", instruction.attributes)
    values = dict(part.split("=") for part in window.group(1).split()) if window else {}
    for dim, label in enumerate(sorted(set(of_left) - {"b", "f"})):
        # "size=3x3 pad=1_1x1_1": of a padding the part before the array counts.
        window = {name: int(text.split("x")[dim].split("_")[0]) for name, text in values.items()}
        products *= _positions(
            left.dims[of_left.index(label)], out.dims[of_out.index(label)],
            window=window.get("size", 1), stride=window.get("stride", 1), pad=window.get("pad", 0),
            dilation=window.get("lhs_dilate", 1), window_dilation=window.get("rhs_dilate", 1),
        )  # fmt: skip
    return 2.0 * products


@functools.cache
def _positions(
    size: int, out: int, *, window: int, stride: int, pad: int, dilation: int, window_dilation: int
) -> int:
    """Pairs of an output position and a window position that meet an element of the input."""
    starts, steps = np.arange(out) * stride - pad, np.arange(window) * window_dilation
    shorter, longer = sorted((starts, steps), key=len)
    total = 0
    for offset in shorter:
        at = longer + offset
        total += int(np.sum((at >= 0) & (at % dilation == 0) & (at // dilation < size)))
    return total


# Operations that name existing arrays, run other computations, or start asynchronous ones.
FREE = {
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "add-dependency",
    "domain", "optimization-barrier", "partition-id", "replica-id", "while", "conditional", "call",
    "call-start", "call-done", "async-start", "async-done", "send-done", "recv-done", "copy-start",
    "slice-start", "dynamic-slice-start",
}  # fmt: skip
# Ends of asynchronous operations whose bytes are counted here, not at the start.
_ENDS = {"copy-done", "slice-done", "dynamic-slice-done"}
_SLICES = {"slice", "dynamic-slice", "gather"}


def bytes_of(module: Module, computation: Computation, instruction: Instruction) -> float:
    """Bytes that an instruction reads and writes; 0 for those that only name or call others.

    Those of a fusion do not include the bytes of a collective inside it.
    """
    op = instruction.op
    if op in _ENDS or op in _SLICES or op == "all-reduce-start":
        return 2.0 * instruction.bytes
    if op in FREE or op.endswith(("-update", "-done")):
        return 0.0
    operands = computation.operands_of(instruction)
    if op == "dynamic-update-slice":
        return 2.0 * operands[1].bytes
    if op == "scatter":
        return 3.0 * sum(operand.bytes for operand in operands[1 + len(operands) // 2 :])
    if op in ("fusion", "fusion-start"):
        (fused,) = module.called(instruction)
        read = sum(
            _read(module, fused, fused.parameters[number], operand.bytes)
            for number, operand in enumerate(operands)
        )
        return float(read + _written(module, fused, fused.root))
    if op.endswith("-start"):
        return float(instruction.bytes)  # it names operands and results
    if instruction.quoted("custom_call_target") in _NO_KERNELS:
        return 0.0
    written = instruction.bytes
    if op == "custom-call" and is_product(instruction):
        written = instruction.arrays[0].bytes  # the second result of cuBLAS is room to work in
    return float(sum(operand.bytes for operand in operands) + written)


def _read(module: Module, fused: Computation, source: Instruction, whole: int) -> int:
    """Bytes of a fusion's parameter that it reads."""
    total = 0
    for user in fused.users[source.name]:
        if user.op == "bitcast":
            total += _read(module, fused, user, whole)
        elif user.op in _SLICES and user.operands[0] == source.name:
            total += user.bytes
        elif user.op == "fusion":
            (inner,) = module.called(user)
            for number, name in enumerate(user.operands):
                if name == source.name:
                    total += _read(module, inner, inner.parameters[number], whole)
        elif not (
            (user.op == "dynamic-update-slice" and user.operands[0] == source.name)  # in place
            or user.op == "tuple"
            or collective_kind(user)
            or user.quoted("custom_call_target") in _NO_KERNELS
        ):
            total += whole
    return min(total, whole)


def _written(module: Module, fused: Computation, result: Instruction) -> int:
    """Bytes of a fusion's result that it writes."""
    if result.op == "tuple":
        return sum(_written(module, fused, operand) for operand in fused.operands_of(result))
    if result.op == "bitcast":
        return _written(module, fused, fused.by_name[result.operands[0]])
    if result.op == "dynamic-update-slice":
        return fused.by_name[result.operands[1]].bytes
    if result.op == "fusion":
        (inner,) = module.called(result)
        return _written(module, inner, inner.root)
    existing = result.op in ("parameter", "get-tuple-element") or collective_kind(result)
    if existing or result.quoted("custom_call_target") in _NO_KERNELS:
        return 0
    return result.bytes
