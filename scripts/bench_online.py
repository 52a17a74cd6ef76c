"""Measures lookups of exported tables in one process, without jax, beside torch's.

    python scripts/bench_online.py [--rows 1000000 10000000] [--records 512 --ids 8]

For each number of rows, microseconds of sums of bags (`llmx.tables.online`), the least and the
median, and ids a second of the least: of a whole export, and of one with three increments of a
thousandth of the rows each. Then the predictions of a DLRM of 26 features (`--models`).
"""

import argparse
import itertools
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np

from llmx.model.recommender import online as models
from llmx.tables import exporting, exports, online
from llmx.tables.config import Feature, Table


class Random:
    """Rows by id that are random, of which increments have changed."""

    def __init__(self, seed: int, widths: dict[str, int]):
        self.seed, self.widths = seed, widths

    def read(self, table: str, slot: str, ids: slice) -> np.ndarray:
        rng = np.random.default_rng([0, ids.start])
        found = rng.standard_normal((ids.stop - ids.start, self.widths[table]), np.float32)
        for number in range(self.seed):
            found[number::1000] += 1
        return found


def export(folder, tables, features, *, seed=0, since=None, dense=None, model=None):
    content = exporting.Content(
        seed, tables, features, {}, "sgd", dense or {"none": np.zeros(1, np.float32)}, model or {}
    )
    source = Random(seed, {table.name: table.width for table in tables})
    exporting.write(
        folder, content, source, block_rows=lambda table: 100_000,
        since=since and exports.open_export(since),
    )  # fmt: skip


def measured(cases: dict[str, Callable[[], object]], steps: int) -> dict[str, tuple[float, float]]:
    """Microseconds of each, which take turns: the least, and the median."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(-3, steps):  # three to begin with
        for name, run in cases.items():
            begun = time.perf_counter()
            run()
            if number >= 0:
                seconds[name].append(time.perf_counter() - begun)
    return {n: (1e6 * min(each), 1e6 * statistics.median(each)) for n, each in seconds.items()}


def bags(folder: pathlib.Path, rows: int, args: argparse.Namespace) -> dict[str, Callable]:
    """Sums of bags of random ids."""
    tables = [Table("table", rows, args.width)]
    features = [Feature("ids", "table", args.ids, "sum")]
    export(folder / f"{rows}.0", tables, features)
    for number in range(1, 4):
        since = folder / f"{rows}.{number - 1}"
        export(folder / f"{rows}.{number}", tables, features, seed=number, since=since)
    ids = np.random.default_rng(1).integers(0, rows, (args.records, args.ids))
    opened = {
        f"{rows:,} rows": online.open_export(folder / f"{rows}.0"),
        f"{rows:,} rows, 3 increments": online.open_export(folder / f"{rows}.3"),
    }
    return {name: lambda of=of: of.bags("ids", ids) for name, of in opened.items()}


def of_torch(rows: int, args: argparse.Namespace) -> Callable[[], object]:
    """The same sums of torch, on all of its threads."""
    import torch

    bag = torch.nn.EmbeddingBag(rows, args.width, mode="sum").requires_grad_(False)
    ids = np.random.default_rng(1).integers(0, rows, (args.records, args.ids))
    return lambda: bag(torch.from_numpy(ids))


def predictions(folder: pathlib.Path) -> dict[str, Callable]:
    """A DLRM of 26 tables of 100,000 rows, the network of docs/tables.md's defaults."""
    rng, bottom, top = np.random.default_rng(0), (13, 512, 256, 64, 16), (367, 512, 256)
    dense, layers = {}, {"bottom": bottom, "top": top}
    for name, widths in layers.items():
        for at, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
            dense[f"{name}.{at}.weight"] = 0.05 * rng.standard_normal((inputs, outputs), np.float32)
            dense[f"{name}.{at}.bias"] = np.zeros(outputs, np.float32)
    dense |= {"logit.weight": np.zeros((256, 1), np.float32), "logit.bias": np.zeros(1, "f4")}
    tables = [Table(f"C{number}", 100_000, 16) for number in range(1, 27)]
    features = [Feature(table.name, table.name) for table in tables]
    model = {"recommender": dict(name="dlrm", width=16, bottom=bottom[1:], top=top[1:])}
    export(folder / "dlrm", tables, features, dense=dense, model=model)
    opened, cases = models.open_model(folder / "dlrm"), {}
    for records in (1, 64, 1024):
        ids = rng.integers(0, 100_000, (records, 26))
        numbers = rng.standard_normal((records, 13), np.float32)
        cases[f"DLRM, {records} records"] = lambda n=numbers, i=ids: opened.click(n, i)
    return cases


def main() -> None:
    """Measures and prints all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[10**6, 10**7])
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--records", type=int, default=512)
    parser.add_argument("--ids", type=int, default=8, help="of a record, whose rows are added up")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--torch", action="store_true", help="also torch's EmbeddingBag")
    parser.add_argument("--models", action="store_true", help="also predictions of a DLRM")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        cases: dict[str, Callable] = {}
        for rows in args.rows:
            cases |= bags(pathlib.Path(name), rows, args)
            if args.torch:
                cases[f"torch, {rows:,} rows"] = of_torch(rows, args)
        if args.models:
            cases |= predictions(pathlib.Path(name))
        for case, (least, median) in measured(cases, args.steps).items():
            rate = "" if "DLRM" in case else f"{args.records * args.ids / least:8.2f} million ids/s"
            print(f"{case:32s} {least:9.1f} us  median {median:9.1f} {rate}")


if __name__ == "__main__":
    main()
