"""What each option of memory saves and costs, compiled for TPUs that are not here.

    python scripts/bench_memory.py [--rows full sqrt ...] [--results runs/bench_memory]

Compiles one program after the other, each in its own process, and writes what `llmx.aot --json`
says of it into a file of the folder. A row that has a file is not compiled again: a run that was
stopped continues. Prints the tables of docs/memory.md; `scripts/draw_memory.py` draws the picture.
"""

import argparse
import json
import pathlib
import sys

from bench_aot import GIB, Row, measure

from llmx import config
from llmx.config import utilization
from llmx.model import costs, remat_costs

_8B = "configs/llama3_8b.py"
_405B = "configs/llama3_405b.py"
_FSDP512 = ("mesh.data=1", "mesh.fsdp=512", "mesh.tensor=1")
_V5E = ("mesh.fsdp=16", "batch.size=16")


def _v5p(*flags: str) -> Row:
    """Llama-3 8B, fsdp8, 8 x 8192, remat full unless flags say otherwise."""
    return Row(_8B, "v5p:2x2x2", flags)


# By table, then by what is shown of a row.
TABLES: dict[str, dict[str, Row]] = {
    "8B, v5p:2x2x2, fsdp8, 8 x 8192": {
        "none": _v5p("remat=none"),
        "dots": _v5p("remat=dots"),
        "dots, gate and up on the host": _v5p("remat=dots", "offload.saves=('gate','up')"),
        "names": _v5p("remat=names"),
        "full": _v5p(),
        "full, input on the host": _v5p("offload.saves=('input',)"),
        "sqrt": _v5p("remat=sqrt"),
        "every_4+dots": _v5p("remat=every_4+dots"),
        "offload.optimizer": _v5p("offload.optimizer=True"),
        "offload.optimizer, parameters": _v5p("offload.optimizer=True", "offload.parameters=True"),
        "moments int8": _v5p("optimizer.moments=int8"),
        "pure_bf16": _v5p("precision=pure_bf16"),
    },
    "8B on v5e, remat full": {
        "v5e: full": Row(_8B, "v5e:4x4", _V5E),
        "v5e: offload.optimizer": Row(_8B, "v5e:4x4", (*_V5E, "offload.optimizer=True")),
        "v5e: offload.optimizer, parameters": Row(
            _8B, "v5e:4x4", (*_V5E, "offload.optimizer=True", "offload.parameters=True")
        ),
        "v5e:2x4 config": Row("configs/llama3_8b_v5e.py", "v5e:2x4", ()),
    },
    "405B, v5p:8x8x8, fsdp512, 512 x 8192": {
        "405B: full": Row(_405B, "v5p:8x8x8", _FSDP512),
        "405B: sqrt": Row(_405B, "v5p:8x8x8", (*_FSDP512, "remat=sqrt")),
        "405B: full, input on the host": Row(
            _405B, "v5p:8x8x8", (*_FSDP512, "offload.saves=('input',)")
        ),
    },
}  # fmt: skip
ROWS = {name: row for table in TABLES.values() for name, row in table.items()}


def path_of(folder: pathlib.Path, name: str) -> pathlib.Path:
    """The file of a row."""
    return folder / f"{''.join(char if char.isalnum() else '_' for char in name)}.json"


def report_of(folder: pathlib.Path, name: str) -> dict | None:
    """What the compiler said of a row; None: it was not compiled."""
    path = path_of(folder, name)
    return json.loads(path.read_text()) if path.exists() else None


def compiled(folder: pathlib.Path, name: str) -> dict | None:
    """The same, compiled now where it was not; None: the compiler refuses it."""
    if report := report_of(folder, name):
        return report
    if report := measure(ROWS[name], []):
        written = path_of(folder, name).with_suffix(".part")
        written.write_text(json.dumps(report))
        written.rename(path_of(folder, name))
    return report


def recomputed(report: dict) -> float:
    """FLOPs of layers that the backward pass repeats, as a share of a forward pass."""
    run = config.from_json(report["config"])
    length = run.batch.sequence_length
    *layers, _ = remat_costs.recomputed_flops_by_layer(
        run.model, sequence_length=length, text=run.remat, loss_chunks=run.loss.chunks,
        chunks=utilization.chunks_of(run), offloaded=run.offload.saves,
    )  # fmt: skip
    return sum(layers) / costs.forward_flops_per_token(run.model, sequence_length=length)


HEADER = (
    "| | peak GiB | state and batch GiB | host GiB | recomputed | step s |\n"
    "| --- | --- | --- | --- | --- | --- |"
)


def line(name: str, report: dict) -> str:
    memory, times = report["memory"], report["timeline"]
    host = "unknown" if memory["host"] is None else f"{memory['host'] / GIB:.2f}"
    cells = [
        name, f"{memory['peak'] / GIB:.2f}" + ("" if report["fits"] else ", does not fit"),
        f"{memory['arguments'] / GIB:.2f}", host, f"{recomputed(report):.2f}",
        f"{times['step']:.3f}" if times else "",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> None:
    command = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    command.add_argument("--rows", nargs="*", default=list(ROWS), help="names of rows")
    command.add_argument("--results", default="runs/bench_memory", help="folder of the results")
    args = command.parse_args()
    if unknown := set(args.rows) - set(ROWS):
        command.error(f"no rows: {sorted(unknown)}; there are {list(ROWS)}")
    folder = pathlib.Path(args.results)
    folder.mkdir(parents=True, exist_ok=True)
    missing = []
    for title, table in TABLES.items():
        if names := [name for name in table if name in args.rows]:
            print(f"\n{title}\n\n{HEADER}", flush=True)
            for name in names:
                report = compiled(folder, name)
                print(line(name, report) if report else f"| {name} | refused |", flush=True)
                missing += [] if report else [name]
    sys.exit(1 if missing else 0)


if __name__ == "__main__":
    main()
