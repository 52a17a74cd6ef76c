"""How long the operators of a model take on one device: products of matrices and moves of memory.

A product of [M, K] and [K, N] is computed in tiles of its result, one on each streaming
multiprocessor (GPU) or matrix unit (TPU) at a time:

    tiles    ceil(M / tile_m) ceil(N / tile_n) batch splits
    waves    ceil(tiles / units); the last wave takes as long as a full one
    seconds  waves 2 tile_m tile_n K / splits / (peak / units x products x reuse(tile))

so a product whose tiles do not fill the waves gets less of the peak. So does a small tile, which
computes less with what it loads: reuse(tile) = I / (I + LOADS), I = tile_m tile_n / (tile_m +
tile_n), scaled to 1 for the largest tile. Of some tiles, and of splits of K, which cost a write and
a read of the result in fp32, the fastest counts. The time is at least that of the bytes of both
factors and the result, and `start` comes on top. Background: NVIDIA, "Matrix Multiplication
Background User's Guide" (tile and wave quantization).

That curve holds for every chip with a `Calibration`. Where products were measured, a table of
(M, N, K, dtype, share of peak) corrects it: exactly at its rows, between them by the ratio of
measured to computed, interpolated over log M, log N, log K; all times `in_steps`, since in a step
products reach less than alone. On GPUs those of odd sizes reach less again (`unaligned`).
Elementwise operators and attention have such tables too: of bandwidth by size, and of seconds for a
score.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import numpy as np

from llmx.model import losses
from llmx.model.attention import blockwise
from llmx.runtime import hardware

DTYPE_BYTES = {"float32": 4, "tf32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "int8": 1}

# [rows, columns] of results, largest first, as NVIDIA's libraries have them (guide above).
TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
SPLITS = (1, 2, 4, 8)
# Elements loaded that cost as much as one multiply-add of a row with a column. Assumed: a tile of
# 64 x 64 then reaches 0.76 of the largest.
LOADS = 20.0


class Measured(NamedTuple):
    """One row of a table of measured products."""

    m: int
    n: int
    k: int
    dtype: str
    share: float  # of the chip's peak FLOP/s


class Streamed(NamedTuple):
    """One row of a table of measured elementwise operators."""

    bytes: int  # of the array
    bandwidth: float  # bytes/s, read and written


class Attended(NamedTuple):
    """One row of a table of measured attention."""

    length: int  # positions of a document
    rows: int  # heads x documents
    head_dim: int
    dtype: str
    forward: float  # seconds of one score that the kernel computes
    backward: float


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What users of a chip reach of its data sheet: a row of `calibrations.CALIBRATIONS`, or yours.

    Shares are between 0 and 1. What large steps show first: `products` sets the time of large
    matrices, `memory` that of softmax, dropout, norms and the optimizer, `host` the least time of
    small models in a trainer that launches operators one by one, `links` the collectives of tensor
    parallelism, `network` gradients and tensor parallelism beyond a node.
    """

    products: float  # share of the peak FLOP/s in full waves of the largest tile
    memory: float  # share of the memory's bandwidth that elementwise operators reach
    # Streaming multiprocessors or matrix units: each computes a tile at a time. 0: no such tiles.
    units: int
    attention: float = 0.6  # share of the peak FLOP/s in fused attention, forward and backward
    # What cuDNN's attention reaches, as a share of an H200's by size (`core_times.cudnn_share`);
    # None: `attention` holds of it too.
    cudnn: float | None = None
    start: float = 4e-6  # seconds of the device between two operators
    host: float = 0.0  # seconds that the host takes to launch an operator; 0: a compiled program
    links: float = 0.82  # share of the links' bandwidth that rings within a node reach
    network: float = 0.9  # the same of the adapters to the network
    collective: float = 15e-6  # seconds of a collective without bytes and hops
    table: tuple[Measured, ...] = ()  # where products of the chip were measured, each alone
    in_steps: float = 1.0  # what a product of a step reaches, as a share of one of `table`
    # What one reaches whose M, N or K is no multiple of `losses.ALIGNED`, as a share of others.
    unaligned: float = 1.0
    streamed: tuple[Streamed, ...] = ()  # the same of elementwise operators, by size
    attended: tuple[Attended, ...] = ()  # the same of attention
    fresh: float = 0.0  # bytes/s of the first write to new memory; 0: nothing is allocated in steps


@dataclasses.dataclass(frozen=True)
class Core:
    """A chip and its calibration: `hardware.CHIPS` and `calibrations.CALIBRATIONS`, or your own."""

    chip: hardware.Chip
    calibration: Calibration

    @functools.cached_property
    def bandwidth(self) -> float:
        """Bytes/s that elementwise operators reach."""
        return self.calibration.memory * self.chip.hbm_bandwidth / self.chip.devices_per_chip

    def bandwidth_of(self, num_bytes: float) -> float:
        """The same on arrays of this size: small ones stay in caches."""
        rows = self.calibration.streamed
        if not rows:
            return self.bandwidth
        sizes, rates = zip(*((math.log(row.bytes), row.bandwidth) for row in rows), strict=True)
        return float(np.interp(math.log(max(num_bytes, 1.0)), sizes, rates))

    @functools.cached_property
    def known(self) -> dict[tuple, float]:
        """Times of products that were asked for before."""
        return {}

    @functools.cached_property
    def corrections(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """By dtype the measured products: [rows, 3] log2 of M, N, K; [rows] log of measured over
        computed share."""
        found: dict[str, dict[tuple[int, int, int], list[float]]] = {}
        for row in self.calibration.table:
            computed = _curve(row.m, row.n, row.k, row.dtype, self, 1, row.dtype)
            flops = 2.0 * row.m * row.n * row.k
            ratio = row.share * computed * self.chip.peak(row.dtype)[0] / flops
            of_dtype = found.setdefault(row.dtype, {})
            of_dtype.setdefault((row.m, row.n, row.k), []).append(math.log(ratio))
        return {
            dtype: (
                np.log2(np.array(list(rows), float)),
                np.array([np.mean(logs) for logs in rows.values()]),
            )
            for dtype, rows in found.items()
        }


def seconds(
    m: int, n: int, k: int, dtype: str, core: Core, *, batch: int = 1, out: str | None = None
) -> float:
    """The time of `batch` products [m, k] x [k, n]; `out`: type of the result, else `dtype`."""
    curve = _curve(m, n, k, dtype, core, batch, out or dtype)
    if any(size % losses.ALIGNED for size in (m, n, k)):
        curve /= core.calibration.unaligned
    if not core.calibration.table:
        return core.calibration.start + curve
    # However few rows a table has: no product beats the peak.
    least = 2.0 * batch * m * n * k / _peak(dtype, core)
    share = core.calibration.in_steps * _correction(m, n, k, dtype, core)
    return core.calibration.start + max(least, curve / share)


def memory_seconds(num_bytes: float, core: Core) -> float:
    """The time of an operator that reads and writes so many bytes and computes little."""
    return core.calibration.start + num_bytes / core.bandwidth


def attention_seconds(flops: float, dtype: str, core: Core, *, share: float | None = None) -> float:
    """The time of fused attention, or other kernels, with so many FLOPs: those that the kernel
    really computes. `share`: of the peak FLOP/s that it reaches; None: that of the calibration."""
    if share is None:
        share = core.calibration.attention
    return core.calibration.start + flops / (_peak(dtype, core) * share)


def attended_seconds(
    scores: float, length: float, rows: float, head_dim: int, dtype: str, core: Core
) -> tuple[float, float]:
    """The times of attention with so many scores, forward and backward, by the measured rows.

    Args:
      scores: that the kernel computes, of all heads and documents: `scores_of` each.
      length: positions of a document.
      rows: heads x documents.
    """
    same = [row for row in core.calibration.attended if row.dtype == dtype]
    same = same or list(core.calibration.attended)
    points = np.log2([(row.length, row.rows, row.head_dim) for row in same])
    at = np.log2([length, max(rows, 1.0), head_dim])
    return tuple(
        core.calibration.start + scores * math.exp(_weighted(points, at, np.log(values)))
        for values in zip(*((row.forward, row.backward) for row in same), strict=True)
    )


def scores_of(length: int, window: int = 0, *, in_blocks: bool) -> float:
    """Scores of a causal document and head that a kernel computes: those that are visible, or
    `in_blocks` all of each block of `attention.blockwise` that has one."""
    if in_blocks:
        return float(blockwise.num_scores(length, window))
    seen = min(window or length, length)
    return seen * (length - seen) + seen * (seen + 1) / 2


def _peak(dtype: str, core: Core) -> float:
    """FLOP/s of a device; "float32" is exact, unlike "tf32"."""
    return core.chip.exact_flops() if dtype == "float32" else core.chip.peak(dtype)[0]


def _curve(m: int, n: int, k: int, dtype: str, core: Core, batch: int, out: str) -> float:
    """Seconds without the start, by tiles and waves or by bytes."""
    calibration = core.calibration
    moved = batch * (DTYPE_BYTES[dtype] * (m * k + k * n) + DTYPE_BYTES[out] * m * n)
    if not calibration.units:
        flops = 2.0 * batch * m * n * k
        return max(flops / _peak(dtype, core) / calibration.products, moved / core.bandwidth)
    best = math.inf
    unit = _peak(dtype, core) / calibration.units * calibration.products
    for rows, columns in TILES:
        tiles = math.ceil(m / rows) * math.ceil(n / columns) * batch
        one = 2.0 * rows * columns * k / (unit * _reuse(rows, columns))
        for splits in SPLITS:
            waves = math.ceil(tiles * splits / calibration.units)
            partial = 8.0 * batch * m * n * splits if splits > 1 else 0.0
            best = min(best, waves * one / splits + partial / core.bandwidth)
            if waves > 1:
                break  # more splits only fill a wave that is not full
    return max(best, moved / core.bandwidth)


def _reuse(rows: int, columns: int) -> float:
    return _intensity(rows, columns) / _intensity(*TILES[0])


def _intensity(rows: int, columns: int) -> float:
    products = rows * columns / (rows + columns)
    return products / (products + LOADS)


def _correction(m: int, n: int, k: int, dtype: str, core: Core) -> float:
    """Measured over computed share, exactly at the rows of the table, weighted between them."""
    if not core.corrections:
        return 1.0
    # Where products of another type were measured, theirs.
    points, logs = core.corrections.get(dtype) or next(iter(core.corrections.values()))
    return math.exp(_weighted(points, np.log2([m, n, k]), logs))


def _weighted(points: np.ndarray, at: np.ndarray, values: np.ndarray) -> float:
    """The mean of values [rows] at points [rows, dims], weighted by the inverse fourth power of the
    distance: in three dimensions lower powers let the many that are far decide."""
    distances = np.square(points - at).sum(axis=-1)
    if distances.min() == 0.0:
        return float(values[distances.argmin()])
    weights = distances**-2.0
    return float(weights @ values / weights.sum())
