"""How long a save into the local tier blocks a step, and what it takes in the background.

    python scripts/bench_local_tier.py --mib 1024 --directory /dev/shm [--shared /tmp]

One process with arrays of `--mib` MiB in all. With --shared also a checkpoint in a work directory,
for comparison. Prints one line of JSON.
"""

import argparse
import json
import statistics
import tempfile
import time

import jax
import jax.numpy as jnp

from llmx.checkpoint import checkpointer, local_tier
from llmx.runtime.agreement import Peers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=256, help="size of the state (default 256)")
    parser.add_argument("--directory", default="/dev/shm", help="of the tier (default /dev/shm)")
    parser.add_argument("--saves", type=int, default=5, help="measured after the first (default 5)")
    parser.add_argument("--shared", default="", help="also measure a checkpoint below this folder")
    options = parser.parse_args()
    leaves = max(options.mib // 16, 1)
    state = {f"w{i}": jnp.full((4, 2**20), float(i)) for i in range(leaves)}
    jax.block_until_ready(state)
    found: dict = {"device": str(jax.devices()[0]), "state_mib": 16 * leaves}
    with (
        tempfile.TemporaryDirectory(dir=options.directory) as local,
        tempfile.TemporaryDirectory(dir=options.shared or None) as work,
    ):
        config = checkpointer.CheckpointConfig(every=0, keep_last=2, local_directory=local)
        with local_tier.LocalTier(config, work, Peers(), log=lambda text: None) as tier:
            save = lambda step: tier.save(step, state, meta={})  # noqa: E731
            found["local"] = measured(save, tier.wait, options.saves)
        if options.shared:
            with checkpointer.Checkpointer(work, config, log=lambda text: None) as checkpoints:
                save = lambda step: checkpoints.save(step, state, meta={})  # noqa: E731
                found["shared"] = measured(save, checkpoints.wait, options.saves)
    print(json.dumps(found))


def measured(save, wait, times: int) -> dict[str, float]:
    """Milliseconds: of the first save, of a later one (median), and until that is complete."""
    blocked, complete = [], []
    for step in range(times + 1):
        begun = time.perf_counter()
        save(step)
        blocked.append(time.perf_counter() - begun)
        wait()
        complete.append(time.perf_counter() - begun)
    rows = {"first_ms": blocked[0], "blocked_ms": statistics.median(blocked[1:])}
    rows["complete_ms"] = statistics.median(complete[1:])
    return {name: round(1000 * seconds, 1) for name, seconds in rows.items()}


if __name__ == "__main__":
    main()
