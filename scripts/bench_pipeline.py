"""Memory of pipelines, compiled for TPUs that are not here.

    python scripts/bench_pipeline.py [--picture docs/pipeline_memory.png] [--no-large]
    python scripts/bench_pipeline.py --counted

Prints the tables of docs/performance.md: temporaries against the number of microbatches for each
schedule, and Llama-3 70B on 64 chips. The picture shows the first. With `--counted` the table of
docs/pipeline.md: what `config.stage_memory` counts of a device, and the peak of the program.
"""

import argparse

from bench_aot import GIB, Row, measure
from matplotlib.figure import Figure

from llmx.aot import compiler, topologies
from llmx.config import flags, stage_memory

MICROBATCHES = (4, 8, 16, 32, 64)
SCHEDULES = {"gpipe": "full", "1f1b": "full"}  # with their remat policies
COLORS = {"gpipe": "#ee6677", "1f1b": "#4477aa"}
LARGE = Row("configs/llama3_70b_pipeline.py", "v5p:4x4x4", (), None, 40.0, None)


OF_70B = "configs/llama3_70b_pipeline.py"
OF_8B = (
    "mesh.data=1", "mesh.fsdp=4", "mesh.stage=4", "batch.sequence_length=4096", "batch.size=32",
    "batch.accumulation=8",
)  # fmt: skip
ON_8 = ("mesh.data=1", "mesh.stage=4", "mesh.fsdp=2", "batch.size=16", "batch.accumulation=8")
OF_405B = (
    "mesh.data=1", "mesh.fsdp=32", "mesh.stage=16", "mesh.tensor=1", "batch.size=512",
    "batch.sequence_length=8192", "batch.accumulation=16",
)  # fmt: skip
MORE = ("batch.accumulation=8", "batch.size=128")
COUNTED = (
    *(
        Row(OF_70B, topology, flags)
        for topology in ("v5p:4x4x4", "h100:8x8")
        for flags in (
            (), ("remat=part",), ("pipeline.schedule=interleaved_1f1b",),
            ("pipeline.schedule=zb_1f1b",), ("pipeline.schedule=zb_h1",),
            ("pipeline.schedule=zb_v",), ("pipeline.schedule=dual_pipe_v", *MORE),
            ("pipeline.schedule=pipedream_2bw", "remat=part", *MORE),
        )
    ),
    Row(OF_70B, "h100:8x8", ("pipeline.schedule=gpipe",)),
    Row(OF_70B, "v5p:4x4x4",
        ("pipeline.schedule=pipedream_2bw", "pipeline.predict=True", "remat=part", *MORE)),
    Row("configs/llama3_8b.py", "v5p:2x2x2", (*ON_8, "pipeline.schedule=zb_1f1b")),
    Row("configs/llama3_8b.py", "h100:8", (*ON_8, "remat=part")),
    Row(OF_70B, "v5p:4x4x4", ("mesh.fsdp=4", "mesh.tensor=4", "batch.size=16")),
    Row("configs/llama3_8b.py", "v5e:4x4", OF_8B),
    Row("configs/llama3_8b.py", "v5e:4x4",
        (*OF_8B, "remat=part+dots", "pipeline.schedule=zb_1f1b", "pipeline.virtual_stages=2",
         "pipeline.memory_gib=14")),
    Row("configs/llama3_405b.py", "v5p:8x8x8", OF_405B),
    Row("configs/llama3_405b.py", "v5p:8x8x8", (*OF_405B, "remat=part")),
)  # fmt: skip


def counted(row: Row) -> float:
    """GiB of a device, by `stage_memory`."""
    given = [f"--config={row.config}", *(f"--config.{flag}" for flag in row.flags)]
    _, run, problems = flags.parse(flags.parser("bench_pipeline", ""), given)
    topology = topologies.parse(row.topology)
    run, chip = compiler.resolve(run, topology, problems=problems), topology.chip
    on_gpu = chip.is_gpu
    layers = stage_memory.deferred_layers(run, chip.device_hbm_bytes, on_gpu=on_gpu)
    return stage_memory.of(run, deferred_layers=layers, on_gpu=on_gpu).total / GIB


def print_counted() -> None:
    print("| | counted | compiled | |\n| --- | --- | --- | --- |", flush=True)
    for row in COUNTED:
        told, expected = measure(row, []), counted(row)
        peak = told["memory"]["peak"] / GIB
        name = " ".join((row.topology, *row.flags))
        print(
            f"| `{name}` | {expected:.1f} | {peak:.1f} | {expected / peak - 1:+.1%} |", flush=True
        )


def small(schedule: str, microbatches: int) -> Row:
    """A Llama of eight layers on four stages, one row of 8192 tokens in each microbatch."""
    flags = (
        "mesh.stage=4", "mesh.fsdp=1", "model.num_layers=8", "model.width=1024",
        "model.num_heads=8", "model.num_kv_heads=4", "model.mlp_dim=4096",
        "model.vocab_size=32768", "batch.sequence_length=8192",
        f"batch.size={microbatches}", f"batch.accumulation={microbatches}",
        f"pipeline.schedule={schedule}", f"remat={SCHEDULES[schedule]}",
    )  # fmt: skip
    return Row("configs/llama3_8b.py", "v5p:2x2x1", flags, None, None, None)


def temporaries(told: dict) -> float:
    """GiB at the peak, beside parameters, optimizer state and batch."""
    return (told["memory"]["peak"] - sum(told["state"].values())) / GIB


def draw(table: dict[str, list[float]], path: str) -> None:
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for schedule, values in table.items():
        label = f"{schedule}, remat {SCHEDULES[schedule]}"
        axes.plot(MICROBATCHES, values, "o-", color=COLORS[schedule], label=label)
    axes.set_xticks(MICROBATCHES, [str(num) for num in MICROBATCHES])
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("microbatches")
    axes.set_ylabel("temporaries of a device, GiB")
    axes.set_title("Four stages: GPipe holds all microbatches, 1F1B seven at most")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    command = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    command.add_argument("--picture", default="", help="PNG to write; none by default")
    command.add_argument("--no-large", action="store_true", help="leave out the 70B model")
    text = "count memory beside compiled programs, and nothing else"
    command.add_argument("--counted", action="store_true", help=text)
    args = command.parse_args()
    if args.counted:
        return print_counted()
    print("| temporaries GiB |", " | ".join(f"M={num}" for num in MICROBATCHES), "| 8 to 64 |")
    print("| --- |", " | ".join("---" for _ in MICROBATCHES), "| --- |", flush=True)
    table = {}
    for schedule in SCHEDULES:
        table[schedule] = [temporaries(measure(small(schedule, m), [])) for m in MICROBATCHES]
        grown = table[schedule][-1] / table[schedule][1]
        shown = " | ".join(f"{value:.2f}" for value in table[schedule])
        print(f"| {schedule}, remat {SCHEDULES[schedule]} | {shown} | x {grown:.2f} |", flush=True)
    if args.picture:
        draw(table, args.picture)
    if not args.no_large:
        told = measure(LARGE, [])
        seconds = told["seconds"]["lower"] + told["seconds"]["compile"]
        print(
            f"\n70B, stage4 x fsdp16 on {LARGE.topology}: peak {told['memory']['peak'] / GIB:.2f} "
            f"GiB (at most {LARGE.bound}), compiled in {seconds:.0f} s"
        )


if __name__ == "__main__":
    main()
