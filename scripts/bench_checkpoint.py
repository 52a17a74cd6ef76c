"""How long a save blocks training: python scripts/bench_checkpoint.py [--mib 256] [--saves 5]

Saves a state of that size alternately with `wait=True` (synchronous) and without, and prints
the median seconds of both, their ratio, and how long a step takes alone and while a save runs.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time

import jax
import numpy as np

from llmx.checkpoint.checkpointer import CheckpointConfig, Checkpointer

SIDE = 1024


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256, help="size of the state")
    parser.add_argument("--saves", type=int, default=5, help="saves of each kind")
    parser.add_argument("--directory", help="where to write; by default a temporary directory")
    args = parser.parse_args(argv)
    directory = tempfile.mkdtemp(dir=args.directory)
    try:
        print(json.dumps(measure(directory, args.mib, args.saves), indent=1))
    finally:
        shutil.rmtree(directory)
    return 0


def measure(directory: str, mib: int, saves: int) -> dict[str, float]:
    rng = np.random.default_rng(0)
    num = max(1, mib * 2**20 // (4 * SIDE * SIDE))
    state = {str(i): jax.device_put(rng.normal(size=(SIDE, SIDE)).astype("f")) for i in range(num)}
    step = jax.jit(lambda state: jax.tree.map(lambda w: w * 0.999, state), donate_argnums=0)
    seconds: dict[str, list[float]] = {"sync": [], "blocked": [], "step": [], "step in save": []}

    def train(kind: str, number: int) -> None:
        nonlocal state
        for _ in range(number):
            begun = time.perf_counter()
            state = jax.block_until_ready(step(state))
            seconds[kind].append(time.perf_counter() - begun)

    config = CheckpointConfig(keep_last=2)
    with Checkpointer(directory, config, log=lambda text: None) as checkpoints:
        checkpoints.save(1, state, meta={}, wait=True)  # compiles
        train("step", 3)
        seconds["step"].clear()
        for number in range(2, 2 + 2 * saves, 2):
            train("step", 3)
            begun = time.perf_counter()
            checkpoints.save(number, state, meta={}, wait=True)
            seconds["sync"].append(time.perf_counter() - begun)
            begun = time.perf_counter()
            checkpoints.save(number + 1, state, meta={})
            seconds["blocked"].append(time.perf_counter() - begun)
            train("step in save", 3)
            checkpoints.wait()
    found = {f"{kind} (median s)": statistics.median(all_) for kind, all_ in seconds.items()}
    ratio = found["blocked (median s)"] / found["sync (median s)"]
    return found | {"blocked / sync": ratio, "MiB": num * SIDE * SIDE * 4 / 2**20}


if __name__ == "__main__":
    sys.exit(main())
