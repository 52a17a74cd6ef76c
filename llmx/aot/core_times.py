"""How long the core of a device computes one operation: an estimate, nothing is measured.

On TPU by the cycles that XLA writes into the program, at the chip's clock. Where there are none, by
a roofline: the longer of FLOPs at the peak of their type and bytes at the memory's bandwidth, each
at a share of the peak that is stated here, and a time to start the operation. Kernels that the text
shows as one call (Pallas, cuDNN) are timed by their FLOPs: by their own estimate, or, of attention,
by the shapes of queries and keys and the share of scores that the mask lets through.
"""

import dataclasses
import math
import re
from collections.abc import Mapping

from llmx.aot import instruction_costs
from llmx.aot.hlo_text import Array, Computation, Instruction, Module
from llmx.runtime import hardware


@dataclasses.dataclass(frozen=True)
class Core:
    """What one device reaches: peaks, and the share of each that operations get."""

    flops: Mapping[str, float]  # FLOP/s by the type of the factors as the text writes it, "bf16"
    bandwidth: float  # bytes/s of its memory
    clock: float | None = None  # Hz of XLA's cycles; None: the program has none
    products: float = 1.0  # share of `flops` that matrix products reach
    memory: float = 1.0  # share of `bandwidth`
    kernels: float = 1.0  # share of `flops` in kernels that the text shows as one call
    triton: float | None = None  # the same of kernels that Triton compiles; None: no other share
    launch: float = 0.0  # seconds that every operation takes besides
    elements: float = math.inf  # elementwise operations in a second; inf: they are never the limit
    visible: float = 0.5  # share of attention's scores that its mask leaves: causal, a half
    rings: bool = False  # unequal queries and keys are those of a ring's steps, which see all
    clock_published: bool = True

    def peak(self, dtype: str) -> float:
        """FLOP/s of factors of a type of the text, or of `EXACT` products."""
        if dtype == EXACT and EXACT not in self.flops:
            dtype = "f32"
        return self.flops.get(dtype, self.flops["bf16"])

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the times rest on, in words."""
        share = "{:.0%}".format
        how = f"products at {share(self.products)} of peak, memory at {share(self.memory)}"
        if self.clock is not None:
            source = "published" if self.clock_published else "inferred from XLA's own products"
            how = f"XLA's cycles at {self.clock / 1e9:.2f} GHz ({source}); without cycles {how}"
        elif self.launch:
            how += f", {self.launch * 1e6:.1f} us to start an operation"
        how += "; no array stays in a cache"
        kernels = f"kernels (Pallas, cuDNN) at {share(self.kernels)} of peak FLOP/s"
        if self.triton is not None:
            kernels = (
                f"kernels at {share(self.kernels)} of peak FLOP/s, Triton's at "
                f"{share(self.triton)}, cuDNN's attention by its size as on an H200"
            )
        return how, f"{kernels}; of attention's scores {share(self.visible)} are computed"


# Clocks in Hz. v4: Jouppi et al., ISCA 2023, table 4; v5e and v5p: the scaling book, "tpus". Those
# of the others are not published: at these XLA's cycles of a bf16 product of 16,384 cubed give 93%
# of the peak, as the published clocks do (v4 94%, v5e 92%, v5p 94%).
_CLOCKS = {"TPU v4": 1.05e9, "TPU v5e": 1.5e9, "TPU v5p": 1.75e9}
_INFERRED_CLOCKS = {"TPU v6e": 2.09e9, "TPU7x": 2.41e9}
# Shares of the peak. Assumed, but for cuDNN's attention (`cudnn_share`); that of kernels of unknown
# shapes is 600 of 989 TFLOP/s on an H100 (FlashAttention-3, arXiv 2407.08608, causal, 8k tokens,
# heads of 128), of Triton's two thirds of it.
_TPU = {"products": 0.9, "memory": 0.8, "kernels": 0.5}
_GPU = {"products": 0.7, "memory": 0.85, "kernels": 0.6, "triton": 0.4, "launch": 2e-6}

# cuDNN's causal attention, forward and backward: the most, and the head size, length, and rows x
# length at which half of it is reached. Fitted to 20 sizes that an H200 took (docs/performance.md):
# bf16, heads of 64 and 128, 1,024 to 16,384 positions, 8 and 64 rows; 4% off on average, 19% at
# worst. Assumed of other GPUs.
_CUDNN = ((1.31, 100.0, 850.0, 26_400.0), (0.94, 62.0, 1010.0, 16_800.0))


def cudnn_share(length: float, rows: float, head_dim: int, *, backward: bool) -> float:
    """The share of the peak FLOP/s that cuDNN's attention reaches.

    Args:
      length: positions of a document.
      rows: heads x documents.
      backward: in the backward pass, whose FLOPs are `BACKWARD_FLOPS` times the forward pass's.
    """
    most, *halves = _CUDNN[backward]
    sizes = (head_dim, length, rows * length)
    return most * math.prod(size / (size + half) for size, half in zip(sizes, halves, strict=True))


# By types of the text; XLA computes fp32 products on TPU in bf16 and on NVIDIA in tf32 unless told
# otherwise: `EXACT` are those in the precision "highest", which are exact.
EXACT = "f32 exact"
_TYPES = {"bf16": "bfloat16", "f16": "float16", "s8": "int8", "f8": "float8", "f32": "tf32"}


def core_of(chip: hardware.Chip, *, visible: float = 0.5, rings: bool = False) -> Core:
    """The core of one jax device of a chip. `visible`, `rings`: of the program's attention."""
    flops = {
        dtype: chip.device_flops(name if name in chip.flops else "bfloat16")
        for dtype, name in _TYPES.items()
    }
    flops |= {dtype: flops["f8"] for dtype in ("f8e4m3fn", "f8e5m2")}
    flops[EXACT] = chip.exact_flops()
    clock = _CLOCKS.get(chip.name) or _INFERRED_CLOCKS.get(chip.name)
    shares = _TPU if chip.topology.startswith("torus") else _GPU
    return Core(
        flops=flops, bandwidth=chip.hbm_bandwidth / chip.devices_per_chip, clock=clock,
        visible=visible, rings=rings, clock_published=chip.name in _CLOCKS, **shares,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Time:
    """The time of one operation and what it was taken from."""

    seconds: float
    basis: str = ""  # "cycles" | "flops" | "bytes" | "kernel"; "": it takes none
    flops: float = 0.0  # of a kernel


# What XLA writes where it has no estimate is larger than any.
_MOST_CYCLES = 2**62


def time_of(core: Core, module: Module, computation: Computation, instruction: Instruction) -> Time:
    """The time that the core spends on one instruction; those that only call others take none."""
    if instruction_costs.is_kernel(instruction):
        return _kernel(core, module, computation, instruction)
    if core.clock is not None:
        cycles = int(instruction.configured("estimated_cycles") or 0)
        if 0 < cycles < _MOST_CYCLES:
            return Time(cycles / core.clock, "cycles")
    moved = instruction_costs.bytes_of(module, computation, instruction)
    by_bytes = moved / (core.bandwidth * core.memory)
    by_flops = _arithmetic(core, module, computation, instruction)
    if by_bytes == by_flops == 0:
        return Time(0.0)
    seconds = core.launch + max(by_bytes, by_flops)
    return Time(seconds, "flops" if by_flops > by_bytes else "bytes")


# Operations that compute each element of their result.
_ELEMENTWISE = {
    "add", "subtract", "multiply", "divide", "maximum", "minimum", "exponential", "log", "tanh",
    "logistic", "rsqrt", "sqrt", "power", "select", "compare", "convert", "negate", "cosine",
    "sine", "exponential-minus-one", "log-plus-one", "erf", "abs", "sign", "and", "or", "not",
    "reduce-precision",
}  # fmt: skip


def _arithmetic(
    core: Core, module: Module, computation: Computation, instruction: Instruction
) -> float:
    """Seconds of the matrix products of an instruction and of its elementwise operations."""
    found = [(computation, instruction)]
    if instruction.op == "fusion":
        found = list(module.inside(instruction))
    total = 0.0
    for inside, one in found:
        if instruction_costs.is_product(one):
            flops = instruction_costs.flops_of(inside, one) or 0.0
            total += flops / (core.peak(_factor(inside, one)) * core.products)
        elif one.op in _ELEMENTWISE:
            total += one.arrays[0].size / core.elements
        elif one.op == "reduce":
            total += inside.operands_of(one)[0].arrays[0].size / core.elements
    return total


def _factor(computation: Computation, product: Instruction) -> str:
    """The type of a product's factors, or `EXACT`."""
    dtype = computation.operands_of(product)[0].arrays[0].dtype
    text = product.config if product.op == "custom-call" else product.attributes
    return EXACT if dtype == "f32" and _HIGHEST.search(text) else dtype


_HIGHEST = re.compile(r'operand_precision"?[=:][{\[]"?highest', re.IGNORECASE)


def _kernel(core: Core, module: Module, computation: Computation, call: Instruction) -> Time:
    moved = instruction_costs.bytes_of(module, computation, call)
    flops = kernel_flops(module, computation, call, visible=core.visible, rings=core.rings)
    by_bytes = moved / (core.bandwidth * core.memory)
    share = core.triton if _of_triton(call) and core.triton is not None else core.kernels
    if flops is not None and _of_cudnn(call):
        query, _ = _queries_and_keys(computation, call)
        B, T, N, H = query.dims
        backward = _products(module, call) != _FORWARD
        share = cudnn_share(T, B * N, H, backward=backward)
    # The step traces kernels of fp32 with exact products, which the text does not say. Sums are
    # in fp32 beside smaller factors.
    operands = [array for one in computation.operands_of(call) for array in one.arrays]
    factors = {array.dtype for array in operands if len(array.dims) >= 2}
    factor = EXACT if "f32" in factors and not factors & {"bf16", "f16"} else "bf16"
    by_flops = (flops or 0.0) / (core.peak(factor) * share)
    basis = "bytes" if flops is None else "kernel"
    return Time(core.launch + max(by_bytes, by_flops), basis, flops or 0.0)


# Matrix products of attention: scores and values; backward scores again, and the gradients by
# values, scores, queries and keys.
_FORWARD, _BACKWARD = 2, 5
BACKWARD_FLOPS = _BACKWARD / _FORWARD  # of the backward pass, in those of the forward pass
_BY_NAME = (("dkv", 4), ("dq", 3), ("bwd", _BACKWARD), ("backward", _BACKWARD))


def kernel_flops(
    module: Module, computation: Computation, call: Instruction, *, visible: float,
    rings: bool = False,
) -> float | None:  # fmt: skip
    """FLOPs of a kernel: its own estimate, or attention's by its shapes; None: neither.

    `visible`, `rings`: as in `Core`.
    """
    if estimate := re.search(r'"cost_estimate":\{"flops":"(\d+)"', call.config):
        return float(estimate.group(1))
    if not any(word in _names(call) for word in ("splash", "fmha", "flash", "attention")):
        return None
    if (arrays := _queries_and_keys(computation, call)) is None:
        return None
    query, key = arrays
    products = _products(module, call)
    if _of_cudnn(call) or _of_triton(call):
        rows = query.dims[1], key.dims[1]  # [B, T, N, H]
    else:
        rows = query.dims[-2], key.dims[-2]  # [..., T, H]
    # Of unequal numbers, the last queries of these keys, or the first keys of these queries.
    hidden = (1.0 - visible) * min(rows) / max(rows)
    if rings and rows[0] != rows[1] and _of_triton(call):
        hidden = 0.0  # zigzag: half of the queries, or of the keys, and all of these are visible
    return 2.0 * products * query.size * rows[1] * (1.0 - hidden)


def _names(call: Instruction) -> str:
    target = call.quoted("custom_call_target") or ""
    return f"{instruction_costs.kernel_name(call)} {target}".lower()


def _queries_and_keys(computation: Computation, call: Instruction) -> tuple[Array, Array] | None:
    """Of an attention kernel; None: they were not found."""
    arrays = [_first(one) for one in computation.operands_of(call)]
    arrays = [array for array in arrays if array and _is_factor(array)]
    # Keys of one head are [S, H]. Behind them may be sums of scores, [..., T].
    same_size = [array for array in arrays if array.dims[-1] == arrays[0].dims[-1]]
    return (same_size[0], same_size[1]) if len(same_size) >= 2 else None


def _products(module: Module, call: Instruction) -> int:
    """Matrix products of an attention kernel, of two operands of the size of the scores."""
    names = _names(call)
    if "dkv" in names and not _has(module, "_dq"):
        return _BACKWARD  # one kernel computes all gradients
    return next((number for word, number in _BY_NAME if word in names), _FORWARD)


def _of_cudnn(call: Instruction) -> bool:
    return (call.quoted("custom_call_target") or "").startswith("__cudnn")


def _of_triton(call: Instruction) -> bool:
    return "triton" in (call.quoted("custom_call_target") or "")


def _first(instruction: Instruction) -> Array | None:
    return instruction.arrays[0] if instruction.arrays else None


def _is_factor(array: Array) -> bool:
    return len(array.dims) >= 2 and array.dtype in ("bf16", "f16", "f32") and math.prod(array.dims)


def _has(module: Module, word: str) -> bool:
    return any(
        word in instruction_costs.kernel_name(one)
        for computation in module.computations.values()
        for one in computation.instructions
        if one.op == "custom-call"
    )
