"""Calibrations of chips: rows of data, and where each number is from.

For hardware that is not here, write a `hardware.Chip` from its data sheet and a `Calibration` like
these: the shares of the latest generation are the first guess, `units` is published.
"""

import csv
import dataclasses
import functools
import importlib.resources
import io
import json

from llmx.aot import core_times
from llmx.plan.gemm import Calibration, Core, Measured
from llmx.runtime import hardware

# A100. Published: 108 streaming multiprocessors (data sheet); `links`, 0.82 of NVLink in rings of
# all-reduces (the share of an H100's that `llmx.aot.links` has). Assumed: 4 us between operators,
# 15 us for a collective. Fitted to 80 measured steps of Megatron-LM (scripts/validate_planner.py):
# - products 0.87: 271 of 312 TFLOP/s, as large products of cuBLAS reach.
# - memory 0.70: 1.4 of 2.04 TB/s; copies reach 0.85, softmax, dropout and norms less.
# - host 55 us for an operator of the trainer's list: Python, autograd and up to three launches.
# - network 0.69 of an adapter, shared with all other groups of 8 GPUs at 800 Gb/s.
_A100 = Calibration(products=0.87, memory=0.7, units=108, host=55e-6, network=0.69)

# H100. Published: 132 multiprocessors (data sheet of the SXM); `links` 370 of 450 GB/s (scaling
# book, "gpus"). Assumed: `attention`, 2 products forward at 570 and 5 backward at 440 TFLOP/s,
# about what FlashAttention-3 (arXiv 2407.08608) shows of causal heads of 128; elementwise operators
# as on the A100. Fitted to Megatron-LM's table of nine models:
# - products 0.56: 550 of 989 TFLOP/s. At 700 W large products alone reach 0.65 to 0.7; the rest
#   stands for all that the table does not tell apart (logging, data, waiting for other GPUs).
_H100 = Calibration(products=0.56, memory=0.7, units=132, attention=0.48)

# By keys of `hardware.CHIPS`. H200 and B200: not in its table; the H100's shares.
CALIBRATIONS = {
    "a100_40gb": _A100, "a100_80gb": _A100,
    "a100_pcie_40gb": _A100, "a100_pcie_80gb": _A100,
    "h100_sxm": _H100, "h100_pcie": dataclasses.replace(_H100, units=114),
    "h200": _H100, "b200": dataclasses.replace(_H100, units=148),
}  # fmt: skip


def core_of(name: str) -> Core:
    """A chip of `hardware.CHIPS` as it runs compiled programs, with the shares of `llmx.aot`.

    `CALIBRATIONS` hold what another trainer reached, whose steps include its host's time. Those of
    compiled programs are assumptions (`llmx.aot.core_times`) until `llmx.plan calibrate` has run,
    but for products of chips that have a table of them.
    """
    chip = hardware.CHIPS[name]
    units = CALIBRATIONS[name].units if name in CALIBRATIONS else 1
    return Core(chip, dataclasses.replace(shares_of(chip, units), table=products_of(name)))


# What a product of a step reaches of what one alone does, by `Chip.topology`. TPUs: XLA fuses what
# comes before and behind a product into it; of Llama 3 8B's on a v5p the shares of the peak are
# 0.62 to 0.92, on average this much of those alone. GPUs: fitted to 18 steps of an H200
# (tests/golden/steps); its profiles show 0.67 to 0.75 of the peak where products alone have 0.78.
IN_STEPS = {"torus_2d": 0.9, "torus_3d": 0.9, "switch": 0.88, "pair": 0.88}

# GPUs: a head's chunks of 4,748 rows, bf16, reached 395 TFLOP/s on an H200, where others reach 690
# (docs/performance.md). Taken of all types and sizes.
UNALIGNED = 0.57

# Chips without a table of their own, and those whose products are as theirs: units of 128 x 128,
# and of 256 x 256; the same processor at the same power.
ALIKE = {"tpu_v4": "tpu_v5p", "tpu7x": "tpu_v6e", "h100_sxm": "h200"}


@functools.cache
def products_of(name: str) -> tuple[Measured, ...]:
    """Products of a chip, each alone; () = there is no table.

    Of TPUs by the cycles that XLA:TPU estimates: NAME.csv, by scripts/tpu_products.py (libtpu
    0.0.42.1). Of GPUs as measured: NAME.json, which `llmx.plan calibrate` wrote and which says of
    what and when. Shapes have rows of the roles that a product has in training: where a shape is
    one's and where another's, it depends on the model, so that their mean stands for all.
    """
    name = ALIKE.get(name, name)
    folder = importlib.resources.files("llmx.plan") / "tables"
    if (path := folder / f"{name}.json").is_file():
        rows = json.loads(path.read_text())["calibration"]["table"]
        return tuple(Measured(*row) for row in rows)
    if not (path := folder / f"{name}.csv").is_file():
        return ()
    rows = csv.DictReader(io.StringIO(path.read_text()))
    return tuple(
        Measured(
            int(row["m"]), int(row["n"]), int(row["k"]), "bfloat16",
            min(1.0, float(row["share"])),  # a v6e's clock is inferred
        )
        for row in rows
    )  # fmt: skip


def shares_of(chip: hardware.Chip, units: int = 1) -> Calibration:
    """The shares of `llmx.aot` for a chip with so many `units`."""
    core = core_times.core_of(chip)
    return Calibration(
        products=core.products, memory=core.memory, units=units, start=core.launch,
        attention=core.kernels if core.triton is None else core.triton,
        cudnn=1.0 if chip.is_gpu else None, in_steps=IN_STEPS.get(chip.topology, 1.0),
        unaligned=UNALIGNED if chip.is_gpu else 1.0,
    )  # fmt: skip
