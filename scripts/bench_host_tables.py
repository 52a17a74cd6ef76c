"""Trains a table that is larger than memory: of virtual rows the host keeps those it has met.

    python scripts/bench_host_tables.py                     # 40 GB of rows, in less than 4 GB
    python scripts/bench_host_tables.py --steps 200 --admit-after 2

A record has 8 ids, half of them by Zipf's law and half uniform over all rows, and a label that the
first id decides; rows learn it (logistic regression over sums of rows, Adagrad). Prints every so
often the mean log loss since, the share of ids whose rows were on the device, rows in host memory,
admitted and forgotten, milliseconds of a step and what of it the host takes, and the resident
memory of the process. At the end the peak, which must be below `--limit-gb`, else it ends with 1.
"""

import argparse
import os
import resource
import sys
import time

import numpy as np


def resident_gb() -> float:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e9


def batch_of(number: int, rows: int, args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Ids [records, 8], and labels: a bit of a hash of the first id."""
    rng = np.random.default_rng(number)
    shape = (args.records, args.ids // 2)
    # Zipf's law with exponent 1.1, by the inverse of its integral; ids of ranks are anywhere.
    ranks = (1 - rng.random(shape) * (1 - float(rows) ** -0.1)) ** -10
    hot = (ranks.astype(np.int64) * 40_503_001) % rows
    ids = np.concatenate([hot, rng.integers(0, rows, (args.records, args.ids - shape[1]))], axis=1)
    bits = ids[:, 0].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return ids, (bits >> np.uint64(63)).astype(np.float32)


def main() -> int:
    """Trains and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=40.0, help="of rows, without their state")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--host-gib", type=float, default=3.0, help="tables.host_gib")
    parser.add_argument("--limit-gb", type=float, default=4.0, help="of the whole process")
    parser.add_argument("--cache-rows", type=int, default=1 << 18)
    parser.add_argument("--admit-after", type=int, default=1)
    parser.add_argument("--records", type=int, default=4096)
    parser.add_argument("--ids", type=int, default=8)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=100, help="steps between lines")
    args = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding

    from llmx.runtime import host_memory
    from llmx.tables import cached as cached_lib
    from llmx.tables.config import Feature, Table, TablesConfig

    host_memory.limit_arenas()
    mesh = jax.make_mesh(
        (1,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:1]
    )
    rows = int(args.gb * 1e9 / (4 * args.width))
    config = TablesConfig(
        optimizer="row_adagrad", cache_rows=args.cache_rows, host_gib=args.host_gib,
        admit_after=args.admit_after,
    )  # fmt: skip
    tables = cached_lib.make(
        [Table("table", rows, args.width)], [Feature("ids", "table", args.ids, "sum")], config, mesh
    )
    cached = cached_lib.Cached(tables)
    to, direction = NamedSharding(mesh, tables.split), 8 / np.sqrt(args.width)

    def step(state, slots, labels_B):
        taken = tables.take(state, {"ids": slots})

        def loss(rows):
            odds_B = tables.combine(rows, taken.plan)["ids"].sum(axis=1) * direction
            return jnp.mean(jax.nn.softplus(odds_B) - labels_B * odds_B)

        value, gradients = jax.value_and_grad(loss)(taken.rows)
        return tables.update(state, taken, gradients, rate=0.005), value

    print(
        f"{rows:,} rows of width {args.width}: {4e-9 * rows * args.width:.1f} GB; room for "
        f"{cached.rows.capacity:,} on the host, {args.cache_rows:,} on {jax.devices()[0]}; "
        f"{resident_gb():.2f} GB resident before the first step"
    )
    jitted = jax.jit(step, donate_argnums=0)
    with jax.set_mesh(mesh):
        state, losses, hits, host, begun = tables.init(0), [], [], 0.0, time.perf_counter()
        for number in range(1, args.steps + 1):
            ids, labels = batch_of(number, rows, args)
            before = time.perf_counter()
            state, slots = cached.prepare(state, ids)
            host += time.perf_counter() - before
            state, loss = jitted(state, jax.device_put(slots, to), jax.device_put(labels, to))
            losses.append(loss)
            hits.append(cached.scalars()["cache_hits"])
            if number % args.every and number != args.steps:
                continue
            mean = float(np.mean(jax.device_get(losses)))
            seconds, found = time.perf_counter() - begun, cached.scalars()
            print(
                f"step {number:5d}  log loss {mean:.4f}  hits {np.mean(hits):.3f}  rows "
                f"{found['host_rows']:12,.0f}  admitted {found['rows_admitted']:12,.0f}  forgotten "
                f"{found['rows_forgotten']:12,.0f}  {1e3 * seconds / len(losses):6.1f} ms a step, "
                f"{1e3 * host / len(losses):6.1f} of it prepare  host {found['host_gib']:.2f} GiB  "
                f"resident {resident_gb():.2f} GB",
                flush=True,
            )
            losses, hits, host, begun = [], [], 0.0, time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024e-9
    print(f"peak resident memory {peak:.2f} GB, limit {args.limit_gb:g}")
    return int(peak > args.limit_gb)


if __name__ == "__main__":
    sys.exit(main())
