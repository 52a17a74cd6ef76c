"""Memory, compile time and communication of large train steps, compiled without their machines.

    python scripts/bench_aot.py [--rows 1 4] [--config.section.key=value ...]

Prints the tables of docs/performance.md: memory and bytes of arrays, then estimated step times.
Compiles one program after the other, each in its own process. Overrides apply to every row. Peak
and compile time are printed with their bounds; the goal is 0.85 of the peak of the strongest public
JAX trainer on the same model, machine and batch.
"""

import argparse
import dataclasses
import json
import subprocess
import sys

from llmx import config, sharding
from llmx.model import costs

GIB = 2**30
GOAL = 0.85  # of the other trainer's peak


@dataclasses.dataclass(frozen=True)
class Row:
    config: str
    topology: str
    flags: tuple[str, ...]
    # Of the other trainer, where it was compiled so: peak and bound in GiB, seconds to compile.
    theirs: float | None = None
    bound: float | None = None
    seconds: float | None = None


ROWS = (
    Row("configs/llama3_8b.py", "v5p:2x2x2", (), 20.4, 18.4, 43),
    Row("configs/llama3_8b.py", "v5p:2x2x2", ("batch.size=16",), 25.6, 21.8, 68),
    Row(
        "configs/llama3_8b.py", "v5p:2x2x2", ("batch.size=128", "batch.accumulation=4"),
        42.0, 35.7, 40,
    ),
    Row(
        "configs/llama3_8b.py", "v5p:2x2x2",
        ("batch.size=128", "batch.accumulation=4", "sharding.gather=step"),
    ),
    Row(
        "configs/llama3_70b.py", "v5p:4x4x4", ("mesh.fsdp=64", "mesh.tensor=1"), 34.6, 31.1, 103
    ),
    Row("configs/llama3_70b.py", "v5p:4x4x4", (), 36.2, 32.5, 34),
    Row("configs/llama3_70b.py", "v5p:4x4x4", ("mesh.tensor=1", "mesh.sequence=4"), 34.6, 31.1),
    Row("configs/llama3_70b_pipeline.py", "v5p:4x4x4", (), 85.8, None, 242),
    Row("configs/llama3_8b.py", "v5e:4x4", ("mesh.fsdp=16", "batch.size=16")),
    Row("configs/llama3_8b.py", "v6e:4x4", ("mesh.fsdp=16", "batch.size=16")),
    Row("configs/gpt3_175b.py", "v5p:8x8x8", ()),
    Row(
        "configs/llama3_405b.py", "v5p:8x8x8", ("mesh.data=1", "mesh.fsdp=512", "mesh.tensor=1")
    ),
    Row("configs/llama3_405b.py", "v5p:16x16x16", ()),
    Row("configs/llama3_8b.py", "h100:8", ()),
    Row("configs/llama3_70b.py", "h100:8x8", ()),
)  # fmt: skip

HEADER = (
    "| | model, machine, mesh, batch | peak GiB | at most | goal | compile s | at most "
    "| fsdp GiB | formula | sliced | tensor GiB | formula |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


def measure(row: Row, overrides: list[str]) -> dict | None:
    """The JSON of `llmx.aot --json`; None where it does not compile, which it says itself."""
    flags = [f"--config.{flag}" for flag in row.flags] + overrides
    done = subprocess.run(
        [sys.executable, "-m", "llmx.aot", "--json", "--config", row.config,
         "--topology", row.topology, *flags],
        stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    return json.loads(done.stdout) if done.stdout else None


def moved(report: dict, axis: str, *, sliced: bool = False) -> float:
    """GiB of the arrays of all collectives over `axis`; `sliced`: of all-reduces to be sliced."""
    chosen = [one for one in report["program"]["collectives"] if axis in (one["axes"] or ())]
    key = "sliced_bytes" if sliced else "bytes"
    return sum(one["count"] * one[key] for one in chosen) / GIB


def weights_formula(run: config.Config) -> float:
    """GiB: two gathers of the bf16 weights and one reduce-scatter of their gradients, for every
    microbatch; gathered once per step, one gather in all."""
    scatters = run.batch.accumulation
    gathers = 2 * scatters if run.sharding.gather == "layer" else 1
    return (gathers + scatters) * 2 * costs.num_stored_parameters(run.model) / run.mesh.tensor / GIB


def activations_formula(run: config.Config) -> float:
    """GiB: attention and MLP gather their input over `tensor` and scatter their output.

    In every layer: forward, once more with full remat, and backward.
    """
    if run.mesh.tensor == 1:
        return 0.0
    rows = run.batch.size / (run.mesh.data * run.mesh.fsdp)
    array = 2 * rows * run.batch.sequence_length * run.model.width
    passes = 3 if run.remat == "full" else 2
    return passes * 4 * run.model.num_layers * array / GIB


def line(number: int, row: Row, report: dict) -> str:
    run = config.from_json(report["config"])
    batch = f"{run.batch.size} x {run.batch.sequence_length}"
    if run.batch.accumulation > 1:
        batch += f" in {run.batch.accumulation}, gathered per {run.sharding.gather}"
    mesh = sharding.mesh_text(report["mesh"])
    name = f"{report['num_parameters'] / 1e9:.0f}B, {row.topology}, {mesh}, {batch}"
    peak = report["memory"]["peak"] / GIB
    tensor = moved(report, "tensor") if run.mesh.tensor > 1 else 0.0
    cells = [
        str(number), name, f"{peak:.2f}",
        f"{row.bound}" if row.bound else "", f"{GOAL * row.theirs:.2f}" if row.theirs else "",
        f"{report['seconds']['lower'] + report['seconds']['compile']:.0f}",
        f"{row.seconds:.0f}" if row.seconds else "",
        f"{moved(report, 'fsdp'):.2f}", f"{weights_formula(run):.2f}",
        f"{moved(report, 'fsdp', sliced=True):.2f}",
        f"{tensor:.1f}", f"{activations_formula(run):.1f}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


TIME_HEADER = (
    "| | step s | infinite bandwidth | ratio | half the bandwidth | nothing hidden "
    "| hidden, by bytes | by time | sent GiB | must travel | MFU |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


def must_travel(run: config.Config) -> float | None:
    """GiB that a device sends at least: its share of both formulas. None: there is no formula.

    A table of embeddings is never gathered, unless it is the head too, and the last sum of a
    recomputed layer is not needed.
    """
    if run.mesh.stage * run.mesh.sequence > 1:
        return None
    ways = run.mesh.fsdp * (1 if run.sharding.layout == "hsdp" else run.mesh.data)
    model, microbatches = run.model, run.batch.accumulation
    gathers = 2 * microbatches if run.sharding.gather == "layer" else 1
    table = 0 if model.tied_head else model.padded_vocab * model.width / run.mesh.tensor
    weights = weights_formula(run) - (gathers + microbatches) * 2 * table / GIB
    activations = activations_formula(run) * (11 / 12 if run.remat == "full" else 1)
    return weights * (1 - 1 / ways) + activations * (1 - 1 / run.mesh.tensor)


def time_line(number: int, report: dict) -> str:
    """The estimated step of a row beside the same estimate with other links."""
    times, run = report["timeline"], config.from_json(report["config"])
    collectives = report["program"]["collectives"]
    step, infinite = times["step"], times["infinite_bandwidth"]
    sent = sum(one["count"] * (one["wire_bytes"] or 0) for one in collectives) / GIB
    least = must_travel(run)
    cells = [
        str(number), f"{step:.3f}", f"{infinite:.3f}", f"{step / infinite:.3f}",
        f"{times['half_bandwidth']:.3f}", f"{times['nothing_hidden']:.3f}",
        f"{times['hidden_bytes']:.1%}", f"{times['hidden']:.0%}",
        f"{sent:.1f}", "" if least is None else f"{least:.1f}", f"{times['speed']['mfu']:.1%}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rows", type=int, nargs="*", default=range(1, len(ROWS) + 1), help="from 1"
    )
    args, overrides = parser.parse_known_args()
    print(HEADER, flush=True)
    reports = {}
    for number in args.rows:
        row = ROWS[number - 1]
        if report := measure(row, overrides):
            reports[number] = report
            print(line(number, row, report), flush=True)
    print(f"\n{TIME_HEADER}")
    for number, report in reports.items():
        print(time_line(number, report))
    sys.exit(1 if len(reports) < len(args.rows) else 0)


if __name__ == "__main__":
    main()
