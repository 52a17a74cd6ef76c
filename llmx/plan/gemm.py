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
measured to computed, interpolated over log M, log N, log K.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

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
    units: int  # streaming multiprocessors, or matrix units; each computes one tile at a time
    attention: float = 0.6  # share of the peak FLOP/s in fused attention, forward and backward
    start: float = 4e-6  # seconds of the device between two operators
    host: float = 0.0  # seconds that the host takes to launch an operator; 0: a compiled program
    links: float = 0.82  # share of the links' bandwidth that rings within a node reach
    network: float = 0.9  # the same of the adapters to the network
    collective: float = 15e-6  # seconds of a collective without bytes and hops
    table: tuple[Measured, ...] = ()  # where products of the chip were measured


@dataclasses.dataclass(frozen=True)
class Core:
    """A chip and its calibration: `hardware.CHIPS` and `calibrations.CALIBRATIONS`, or your own."""

    chip: hardware.Chip
    calibration: Calibration

    @functools.cached_property
    def bandwidth(self) -> float:
        """Bytes/s that elementwise operators reach."""
        return self.calibration.memory * self.chip.hbm_bandwidth / self.chip.devices_per_chip


def seconds(
    m: int, n: int, k: int, dtype: str, core: Core, *, batch: int = 1, out: str | None = None
) -> float:
    """The time of `batch` products [m, k] x [k, n]; `out`: type of the result, else `dtype`."""
    curve = _curve(m, n, k, dtype, core, batch, out or dtype)
    if not core.calibration.table:
        return core.calibration.start + curve
    rows = [row for row in core.calibration.table if row.dtype == dtype]
    return core.calibration.start + curve / _correction(m, n, k, rows, core)


def share_of_peak(m: int, n: int, k: int, dtype: str, core: Core, *, batch: int = 1) -> float:
    """FLOP/s of a product as a share of the chip's peak for its type."""
    flops = 2.0 * batch * m * n * k
    return flops / seconds(m, n, k, dtype, core, batch=batch) / core.chip.peak(dtype)[0]


def memory_seconds(num_bytes: float, core: Core) -> float:
    """The time of an operator that reads and writes so many bytes and computes little."""
    return core.calibration.start + num_bytes / core.bandwidth


def attention_seconds(flops: float, dtype: str, core: Core) -> float:
    """The time of fused attention with so many FLOPs: those that the kernel really computes."""
    peak = core.chip.peak(dtype)[0]
    return core.calibration.start + flops / (peak * core.calibration.attention)


def _curve(m: int, n: int, k: int, dtype: str, core: Core, batch: int, out: str) -> float:
    """Seconds without the start, by tiles and waves or by bytes."""
    calibration = core.calibration
    unit = core.chip.peak(dtype)[0] / calibration.units * calibration.products
    moved = batch * (DTYPE_BYTES[dtype] * (m * k + k * n) + DTYPE_BYTES[out] * m * n)
    best = math.inf
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


def _correction(m: int, n: int, k: int, rows: Sequence[Measured], core: Core) -> float:
    """Measured over computed share, weighted by the inverse square of the distance in octaves."""
    total = weights = 0.0
    for row in rows:
        computed = _curve(row.m, row.n, row.k, row.dtype, core, 1, row.dtype)
        flops = 2.0 * row.m * row.n * row.k
        ratio = row.share / (flops / computed / core.chip.peak(row.dtype)[0])
        distance = sum(
            math.log2(a / b) ** 2 for a, b in zip((m, n, k), (row.m, row.n, row.k), strict=True)
        )
        if distance == 0.0:
            return ratio
        total += math.log(ratio) / distance
        weights += 1.0 / distance
    return math.exp(total / weights) if weights else 1.0
