"""Measures a step of a sparse table: lookup, gradient and update, beside dense tables and torch's.

    python scripts/bench_tables.py [--records 512 --ids 8] [--optimizer row_adagrad adagrad adam]
    python scripts/bench_tables.py --devices 4      # the same on so many devices of a CPU
    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 python scripts/bench_tables.py    # tables in huge pages

For each number of rows, milliseconds of a step, the least and the median of all; steps of the cases
of a group take turns, so that other work on the machine meets all of them. The groups: the step of
a table alone, by the number of its rows; a whole step of DLRM with 26 tables, by the rows of all;
the table's step beside `optax.adagrad` on a dense table, and torch's `EmbeddingBag(sparse=True)`
with its sparse optimizers. Ids of a batch are all different: every case touches as many rows.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

import numpy as np

RATE = 0.02
NUM_TABLES = 26  # of DLRM


def batches_of(rows: int, records: int, ids: int, number: int) -> list[np.ndarray]:
    """Of different ids each, [records, ids]."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(number):
        # About half more than it takes, without repetitions, in any order.
        drawn = np.unique(rng.integers(0, rows, 2 * records * ids))
        found.append(rng.permutation(drawn)[: records * ids].reshape(records, ids))
    assert all(one.size == records * ids for one in found), "too few rows for so many ids"
    return found


def mesh_of(devices: int):
    """So many devices of the batch."""
    import jax

    explicit = (jax.sharding.AxisType.Explicit,)
    return jax.make_mesh(
        (devices,), ("data",), axis_types=explicit, devices=jax.devices()[:devices]
    )


def sparse(rows: int, args: argparse.Namespace, optimizer: str) -> Callable[[], None]:
    """A step of llmx.tables."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding

    from llmx.tables import tables as tables_lib
    from llmx.tables.config import Feature, Table, TablesConfig

    mesh = mesh_of(args.devices)
    table, feature = Table("table", rows, args.width), Feature("ids", "table", args.ids, "sum")
    tables = tables_lib.make([table], [feature], TablesConfig(optimizer=optimizer), mesh)

    def step(state, ids):
        taken = tables.take(state, {"ids": ids})

        def loss(rows):
            return jnp.sum(jnp.square(tables.combine(rows, taken.plan)["ids"]))

        return tables.update(state, taken, jax.grad(loss)(taken.rows), rate=RATE)

    to = NamedSharding(mesh, tables.split)
    batches = batches_of(rows, args.records, args.ids, args.batches)
    batches = [jax.device_put(batch.astype(np.int32), to) for batch in batches]
    with jax.set_mesh(mesh):
        state = tables.init(0)
        compiled = jax.jit(step, donate_argnums=0).lower(state, batches[0]).compile()
        held = [state]

    def run(number: int) -> None:
        held[0] = jax.block_until_ready(compiled(held[0], batches[number % len(batches)]))

    memory = compiled.memory_analysis()
    run.memory = memory.temp_size_in_bytes
    return run


def of_dlrm(rows: int, args: argparse.Namespace, optimizer: str) -> Callable[[], None]:
    """A step of DLRM: 26 tables that have `rows` in all, the network by Adam."""
    import jax
    import optax
    from jax.sharding import NamedSharding, PartitionSpec

    from llmx.model.recommender import recommender
    from llmx.model.recommender.config import RecommenderConfig
    from llmx.tables import tables as tables_lib
    from llmx.tables.config import Feature, Table, TablesConfig

    each, width = rows // NUM_TABLES, 16
    mesh = mesh_of(args.devices)
    made = [Table(f"C{number}", each, width) for number in range(NUM_TABLES)]
    features = [Feature(table.name, table.name, 1, "sum") for table in made]
    tables = tables_lib.make(made, features, TablesConfig(optimizer=optimizer), mesh)
    config = RecommenderConfig(name="dlrm", width=width)
    model = recommender.make(config, num_dense=13, lengths={table.name: 0 for table in made})
    adam = optax.adam(1e-3)

    def step(state, params, moments, dense_BF, ids, labels_B):
        taken = tables.take(state, ids)

        def loss(params, rows):
            embedded = tables.combine(rows, taken.plan)
            logits = model.logits(params, dense_BF, embedded, {})
            return recommender.losses(logits, labels_B)[0].mean()

        of_params, of_rows = jax.grad(loss, argnums=(0, 1))(params, taken.rows)
        updates, moments = adam.update(of_params, moments)
        state = tables.update(state, taken, of_rows, rate=RATE)
        return state, optax.apply_updates(params, updates), moments

    rng = np.random.default_rng(0)
    to = NamedSharding(mesh, tables.split)
    batches = []
    for _ in range(args.batches):
        dense_BF = rng.random((args.dlrm_records, 13), np.float32)
        ids = {
            table.name: rng.integers(0, each, (args.dlrm_records, 1), np.int32) for table in made
        }  # fmt: skip
        labels_B = rng.integers(0, 2, args.dlrm_records).astype(np.float32)
        batches.append(jax.device_put((dense_BF, ids, labels_B), to))
    with jax.set_mesh(mesh):
        params = jax.device_put(model.init(jax.random.key(0)), NamedSharding(mesh, PartitionSpec()))
        held = [(tables.init(0), params, adam.init(params))]
        compiled = jax.jit(step, donate_argnums=(0, 1, 2)).lower(*held[0], *batches[0]).compile()

    def run(number: int) -> None:
        batch = batches[number % len(batches)]
        held[0] = jax.block_until_ready(compiled(*held[0], *batch))

    run.memory = compiled.memory_analysis().temp_size_in_bytes
    return run


def dense(rows: int, args: argparse.Namespace) -> Callable[[], None]:
    """The table's step with optax.adagrad on a dense table, on one device."""
    import jax
    import jax.numpy as jnp
    import optax

    optimizer = optax.adagrad(RATE, initial_accumulator_value=0.0)

    def step(table, state, ids):
        gradient = jax.grad(lambda table: jnp.sum(jnp.square(table[ids].sum(axis=1))))(table)
        update, state = optimizer.update(gradient, state, table)
        return optax.apply_updates(table, update), state

    batches = [
        jax.device_put(batch.astype(np.int32))
        for batch in batches_of(rows, args.records, args.ids, args.batches)
    ]
    table = jax.random.uniform(jax.random.key(0), (rows, args.width), minval=-0.1, maxval=0.1)
    held = [(table, optimizer.init(table))]
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*held[0], batches[0]).compile()

    def run(number: int) -> None:
        held[0] = jax.block_until_ready(compiled(*held[0], batches[number % len(batches)]))

    run.memory = compiled.memory_analysis().temp_size_in_bytes
    return run


def of_torch(rows: int, args: argparse.Namespace, optimizer: str) -> Callable[[], None]:
    """The table's step of torch, on all of its threads."""
    import torch

    bag = torch.nn.EmbeddingBag(rows, args.width, mode="sum", sparse=True)
    makers = {
        "sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.SparseAdam,
    }  # fmt: skip
    updated = makers[optimizer](bag.parameters(), lr=RATE)
    batches = [
        torch.from_numpy(batch) for batch in batches_of(rows, args.records, args.ids, args.batches)
    ]

    def run(number: int) -> None:
        updated.zero_grad(set_to_none=True)
        bag(batches[number % len(batches)]).square().sum().backward()
        updated.step()

    return run


def measured(cases: dict[str, Callable], steps: int) -> dict[str, tuple[float, float]]:
    """Milliseconds of a step of each, the least and the median; prints them."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    names = list(cases)
    for number in range(-3, steps):  # three to begin with
        at = number % len(names)  # none is always behind the same other
        for name in names[at:] + names[:at]:
            begun = time.perf_counter()
            cases[name](number)
            if number >= 0:
                seconds[name].append(time.perf_counter() - begun)
    found = {}
    for name, each in seconds.items():
        found[name] = (1e3 * min(each), 1e3 * statistics.median(each))
        beside = getattr(cases[name], "memory", None)
        memory = "" if beside is None else f"   {beside / 2**20:8.1f} MiB beside its arguments"
        print(f"{name:40s} {found[name][0]:8.2f} ms  median {found[name][1]:8.2f}{memory}")
    return found


def by_rows(make: Callable, name: str, args: argparse.Namespace, steps: int) -> dict:
    """`measured` of steps with tables of each number of rows; prints the most to the least."""
    optimizer = args.optimizer[0]
    found = measured(
        {f"{name} {optimizer} {rows:,} rows": make(rows, args, optimizer) for rows in args.rows},
        steps,
    )
    ratios = [max(each) / min(each) for each in zip(*found.values(), strict=True)]
    print(
        f"most to least of {len(found)} numbers of rows: {ratios[0]:.2f} (medians {ratios[1]:.2f})"
    )
    return found


def beside_others(args: argparse.Namespace) -> dict:
    """`measured` of a table's step, of a dense table's and of torch's; prints ratios."""
    rows = args.compare_rows
    cases: dict[str, Callable] = {
        f"llmx {optimizer} {rows:,} rows": sparse(rows, args, optimizer)
        for optimizer in args.optimizer
    }
    pairs = []
    if args.devices == 1:
        cases[name := f"optax.adagrad, dense, {rows:,} rows"] = dense(rows, args)
        pairs.append((name, f"llmx {args.optimizer[0]} {rows:,} rows"))
        for optimizer in args.optimizer if not args.no_torch else ():
            if optimizer == "row_adagrad":  # torch has none
                continue
            cases[name := f"torch {optimizer} {rows:,} rows"] = of_torch(rows, args, optimizer)
            pairs.append((name, f"llmx {optimizer} {rows:,} rows"))
    found = measured(cases, args.steps)
    for slow, fast in pairs:
        ratios = [found[slow][at] / found[fast][at] for at in range(2)]
        print(f"{slow}: {ratios[0]:.1f}x the time of {fast} (medians {ratios[1]:.1f}x)")
    return found


def main() -> None:
    """Measures and prints all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[10**5, 10**6, 10**7])
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--records", type=int, default=512)
    parser.add_argument("--ids", type=int, default=8, help="of a record, whose rows are added up")
    parser.add_argument("--dlrm-records", type=int, default=4096, help="of a step of DLRM")
    parser.add_argument("--optimizer", nargs="+", default=["row_adagrad", "adagrad", "adam"])
    parser.add_argument("--steps", type=int, default=50, help="of a case; more of the short ones")
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--compare-rows", type=int, default=10**6, help="of dense and torch's")
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--json", help="a file for the figures")
    args = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    if args.devices > 1:
        jax.config.update("jax_num_cpu_devices", args.devices)
    print(f"{args.records} x {args.ids} ids of width {args.width}, {jax.devices()[0].device_kind}")
    found = by_rows(sparse, "llmx", args, 6 * args.steps)
    found |= by_rows(of_dlrm, "a step of DLRM,", args, args.steps)
    found |= beside_others(args)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
