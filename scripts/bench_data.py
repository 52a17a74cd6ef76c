"""Tokens per second of the data pipeline alone: python scripts/bench_data.py [--source stdlib].

Prints the time to open the dataset cold (tokenising) and warm (from the cache), and the rate of a
Loader alone, per batch size. The model does not run.
"""

import argparse
import pathlib
import statistics
import tempfile
import time

from llmx.data import config, dataset, loader


def measure(opened: dataset.Dataset, *, batch_size: int, seconds: float) -> float:
    """Tokens per second over the given time, without the first batches."""
    batches = loader.Loader(opened, batch_size=batch_size, rows=range(batch_size))
    for _ in range(10):
        next(batches)
    start, steps = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        next(batches)
        steps += 1
    elapsed = time.perf_counter() - start
    batches.close()
    return steps * batch_size * opened.sequence_length / elapsed


def main() -> None:
    """Prints one line per measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", nargs="+", default=["stdlib"], help="as data.sources")
    parser.add_argument("--tokenizer", default="auto", help="as data.tokenizer")
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.0, help="per repetition")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--cache-dir", help="default: a temporary folder")
    arguments = parser.parse_args()
    settings = config.DataConfig(
        sources=tuple(arguments.source),
        tokenizer=arguments.tokenizer,
        num_threads=arguments.num_threads,
    )
    with tempfile.TemporaryDirectory() as temporary:
        cache_dir = pathlib.Path(arguments.cache_dir or temporary)
        for state in ("first", "second"):
            start = time.perf_counter()
            opened = dataset.open_dataset(
                settings,
                sequence_length=arguments.sequence_length,
                seed=0,
                cache_dir=cache_dir,
            )
            print(f"open, {state} time: {time.perf_counter() - start:.2f} s")
        for batch_size in arguments.batch_sizes:
            rates = [
                measure(opened, batch_size=batch_size, seconds=arguments.seconds)
                for _ in range(arguments.repetitions)
            ]
            print(
                f"batch {batch_size} x {arguments.sequence_length}: "
                f"{statistics.median(rates) / 1e6:.1f} M tokens/s "
                f"(lowest {min(rates) / 1e6:.1f}, of {len(rates)})"
            )


if __name__ == "__main__":
    main()
