"""Measures what a long metrics.jsonl costs: seconds and memory of a resume and of a drawing.

    python scripts/bench_metrics.py [--records 1000000]

Memory is the growth of the peak resident size, each measured in a process of its own.
"""

import argparse
import json
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

RECORD = {
    "kind": "train", "step": 0, "tokens": 0, "time": 1.7e9, "loss": 2.5, "grad_norm": 1.25,
    "learning_rate": 3e-4, "tokens_per_second": 123456.75, "data_share": 0.01, "mfu": 0.41,
    "mfu_full": 0.46, "hfu": 0.53,
    "step_seconds": 0.531, "data_seconds": 0.002,
}  # fmt: skip


def write(path: pathlib.Path, count: int) -> None:
    """A metrics.jsonl of so many steps, with a spike in the middle."""
    with open(path, "w", encoding="utf-8") as file:
        for step in range(1, count + 1):
            loss = 50.0 if step == count // 2 else 2.0 + 8.0 / step**0.3
            record = RECORD | {"step": step, "tokens": step * 2**20, "loss": loss}
            file.write(json.dumps(record) + "\n")


def measure(what: str, workdir: str, count: int) -> None:
    """Prints the seconds and the growth of memory of one operation."""
    from matplotlib.figure import Figure  # imports are no part of it

    from llmx.runtime import plot, records

    Figure().savefig("/dev/null", format="png")
    path = pathlib.Path(workdir, records.RECORDS)
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # noqa: E731
    before, begun = peak(), time.perf_counter()
    if what == "resume":
        records.RecordFile(path, start_step=count - 10, log=print).close()
    else:
        plot.plot_loss(workdir)
    print(f"{what}: {time.perf_counter() - begun:.1f} s, {peak() - before:.0f} MiB")


def main() -> None:
    """Measures both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--measure", nargs=2, metavar=("WHAT", "DIR"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(*args.measure, args.records)
        return
    with tempfile.TemporaryDirectory() as folder:
        write(pathlib.Path(folder, "metrics.jsonl"), args.records)
        for what in ("resume", "plot"):
            command = [sys.executable, __file__, "--records", str(args.records)]
            subprocess.run([*command, "--measure", what, folder], check=True)


if __name__ == "__main__":
    main()
