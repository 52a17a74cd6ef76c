"""Tables of matrix products on TPUs, from the cycles that XLA:TPU estimates for each shape:

    python scripts/tpu_products.py [--chips v5p v6e] [--out llmx/plan/tables]

Needs libtpu, no TPU. Compiles programs of a few products each, in bfloat16, in the three roles that
they have in training: forward [M, K] x [K, N], the gradient of the input [M, K] x [N, K]^T, the
gradient of the weight [K, M]^T x [K, N]. Each row is M, N, K, role and the share of the chip's peak
FLOP/s. Shapes that a file has already are left out: a run that was stopped goes on.
"""

import argparse
import csv
import itertools
import math
import pathlib
import re
import sys

import jax
import jax.numpy as jnp

from llmx.aot import core_times, hlo_text, topologies

SMALLEST = {"v4": "v4:2x2x1", "v5e": "v5e:1x1", "v5p": "v5p:1x1x1", "v6e": "v6e:1x1",
            "tpu7x": "tpu7x:1x1x1"}  # fmt: skip
# Equations of M, N, K in each role: the result is [M, N], and K is summed over.
ROLES = {"forward": "mk,kn->mn", "input": "mk,nk->mn", "weight": "km,kn->mn"}
SIZES = (256, 1024, 4096, 16384)
# Of published models, and of their shares over `tensor`; multiples of 128, and not.
MORE = (
    (8192, 14336, 4096), (8192, 4096, 14336), (8192, 28672, 8192), (8192, 8192, 28672),
    (8192, 53248, 16384), (8192, 6656, 16384), (4096, 14336, 8192), (32768, 3072, 768),
    (32768, 768, 3072), (32768, 768, 768), (4096, 2048, 1024), (4096, 3072, 1024),
    (8192, 3000, 3000), (8192, 8200, 3000), (8192, 6912, 1152), (65536, 4096, 4096),
    (512, 512, 512), (2048, 2048, 2048), (8192, 8192, 8192), (8192, 1024, 8192),
    (14336, 4096, 8192), (4096, 4096, 65536), (512, 16384, 128), (16384, 512, 128),
)  # fmt: skip
A_PROGRAM = 6  # shapes
LARGEST = 2**30  # bytes of the arrays of a shape

Shape = tuple[int, int, int]


def shapes(family: str) -> list[Shape]:
    """Those of a table: with few tokens and many for one generation, the others follow it."""
    tokens = (512, 4096, 32768) if family == "v5p" else (4096,)
    found = [*itertools.product(tokens, SIZES, SIZES), *MORE]
    return [one for one in dict.fromkeys(found) if _bytes(one) <= LARGEST]


def _bytes(shape: Shape) -> int:
    m, n, k = shape
    return 2 * (m * k + k * n + m * n)


def cycles(device: jax.Device, wanted: list[Shape]) -> dict[tuple[Shape, str], float]:
    """XLA's estimate of each product, by shape and role."""
    keys = list(itertools.product(wanted, ROLES))

    def program(*factors):
        results = []
        for number, (left, right) in enumerate(zip(factors[::2], factors[1::2], strict=True)):
            with jax.named_scope(f"product{number}_"):
                results.append(jnp.einsum(ROLES[keys[number][1]], left, right))
        return results

    arguments = []
    for (m, n, k), role in keys:
        size = dict(m=m, n=n, k=k)
        for letters in ROLES[role].split("->")[0].split(","):
            arguments.append(jax.ShapeDtypeStruct([size[one] for one in letters], jnp.bfloat16))
    place = jax.sharding.SingleDeviceSharding(device)
    lowered = jax.jit(program, in_shardings=place, out_shardings=place).lower(*arguments)
    module = hlo_text.parse(lowered.compile().as_text())
    found: dict[tuple[Shape, str], float] = {}
    for computation in module.computations.values():
        for one in computation.instructions:
            number = re.search(r"product(\d+)_/.*dot_general", hlo_text.source_of(one))
            estimate = int(one.configured("estimated_cycles") or 0)
            if number and estimate:
                key = keys[int(number[1])]
                found[key] = max(found.get(key, 0.0), float(estimate))
    return found


def fill(family: str, path: pathlib.Path, wanted: list[Shape]) -> None:
    """Adds the rows of these shapes that a file does not have."""
    topology = topologies.parse(SMALLEST[family])
    device = topologies.devices(topology)[0]
    core = core_times.core_of(topology.chip)
    have: set[tuple[str, ...]] = set()
    if path.exists():
        have = {tuple(row[:3]) for row in csv.reader(path.open())}
    else:
        path.write_text("m,n,k,role,share\n")
    missing = [shape for shape in wanted if tuple(map(str, shape)) not in have]
    for first in range(0, len(missing), A_PROGRAM):
        some = missing[first : first + A_PROGRAM]
        with path.open("a") as file:
            for (shape, role), estimate in cycles(device, some).items():
                share = 2.0 * math.prod(shape) / (estimate / core.clock) / core.peak("bf16")
                file.write(",".join(map(str, (*shape, role, f"{share:.4f}"))) + "\n")
        done = min(first + A_PROGRAM, len(missing))
        print(f"{family}: {done} of {len(missing)} shapes", file=sys.stderr, flush=True)


def main() -> None:
    """Command line; see the top of this file."""
    command = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    command.add_argument("--chips", nargs="+", default=list(SMALLEST), choices=list(SMALLEST))
    command.add_argument("--out", type=pathlib.Path, default="llmx/plan/tables")
    flags = command.parse_args()
    flags.out.mkdir(parents=True, exist_ok=True)
    for family in flags.chips:
        key = topologies.TPUS[family].chip
        fill(family, flags.out / f"{key}.csv", shapes(family))


if __name__ == "__main__":
    main()
