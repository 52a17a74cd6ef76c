"""Draws docs/memory.png: what a device holds at the peak of a step, by option of memory.

    python scripts/draw_memory.py [--results runs/bench_memory] [--out docs/memory.png]

From what `scripts/bench_memory.py` compiled, Llama-3 8B on eight v5p. Also prints the parts.
"""

import argparse
import math
import pathlib
import re

from bench_aot import GIB
from bench_memory import TABLES, report_of
from matplotlib.figure import Figure

TABLE = "8B, v5p:2x2x2, fsdp8, 8 x 8192"
NOT_DRAWN = ("none",)  # several times as long as the others
COLORS = {
    "parameters": "#4477aa", "optimizer": "#66ccee", "average": "#aa3377",
    "gradients": "#ee6677", "activations": "#ccbb44", "temporaries": "#bbbbbb",
}  # fmt: skip


def parts(report: dict) -> dict[str, float]:
    """Bytes of a device at the peak, by part of `COLORS`; their sum is the peak.

    State is told apart as the report does. What is on the host is the optimizer's, then parameters.
    The batch is temporary.
    """
    state, memory = report["state"], report["memory"]
    found = dict.fromkeys(COLORS, 0.0)
    found["average"] = state.get("average", 0)
    left = memory["arguments"] - found["average"] - state["batch"]
    found["parameters"] = min(state["parameters"], left)
    found["optimizer"] = left - found["parameters"]
    arguments = [buffer for buffer in report["largest"] if buffer["argument"]]
    sizes = {math.prod(_dimensions(buffer)) for buffer in arguments}
    for buffer in report["largest"]:
        if not buffer["argument"] and (part := _part(buffer, sizes)):
            found[part] += buffer["bytes"]
    found["temporaries"] = memory["peak"] - sum(found.values())
    return found


def _part(buffer: dict, sizes_of_state: set[int]) -> str:
    """ "activations", "gradients" or "", for an array that is not an argument.

    Activations: stacks by layer or segment that the forward pass made, or a segment that is run
    again. Gradients: stacks that loops of the backward pass fill, and outside the layers arrays of
    as many numbers as one of the state.
    """
    operation, dimensions = buffer["operation"].rpartition(" of ")[2], _dimensions(buffer)
    if len(dimensions) < 2 or dimensions[0] == 1:
        return ""
    filled, again = operation.endswith("dynamic_update_slice"), "recomputed" in operation
    if operation.startswith("forward") or (again and filled):
        return "activations"
    outside = buffer["source"].partition(":")[0] in ("embedding.py", "gradients.py", "losses.py")
    whole = outside and math.prod(dimensions) in sizes_of_state
    stack = filled and operation.startswith("backward")
    return "gradients" if stack or whole else ""


def _dimensions(buffer: dict) -> list[int]:
    return [int(size) for size in re.findall(r"\d+", buffer["shape"].partition("[")[2])]


def draw(folder: pathlib.Path, out: str) -> None:
    reports = {name: report_of(folder, name) for name in TABLES[TABLE]}
    table = {name: parts(report) for name, report in reports.items() if report}
    if not table:
        raise SystemExit(f"no results in {folder}: run scripts/bench_memory.py")
    order = sorted(table, key=lambda name: sum(table[name].values()))
    _print(order, table)
    order = [name for name in order if name not in NOT_DRAWN]
    figure = Figure(figsize=(10, 0.42 * len(order) + 1.4), layout="constrained")
    axes = figure.subplots()
    left = dict.fromkeys(order, 0.0)
    for part, color in COLORS.items():
        widths = [table[name][part] / GIB for name in order]
        if any(widths):
            axes.barh(order, widths, 0.72, list(left.values()), color=color, label=part)
        left = {name: left[name] + width for name, width in zip(order, widths, strict=True)}
    for row, name in enumerate(order):
        fits = "" if reports[name]["fits"] else ", does not fit"
        host = reports[name]["memory"]["host"]
        beside = f" (+ {host / GIB:.2f} on the host)" if host else ""
        axes.text(left[name] + 0.1, row, f"{left[name]:.2f}{beside}{fits}", va="center", fontsize=9)
    axes.set_xlim(0, max(left.values()) * 1.12)
    axes.set_xlabel("GiB of a device at the peak of a step")
    axes.set_title(f"Llama-3 {TABLE}", loc="left", fontsize=11)
    axes.invert_yaxis()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.legend(loc="outside upper center", ncols=len(COLORS), frameon=False)
    figure.savefig(out, dpi=100)


def _print(order: list[str], table: dict[str, dict[str, float]]) -> None:
    shown = [part for part in COLORS if any(table[name][part] for name in order)]
    print(f"| | {' | '.join(shown)} | peak |\n|{' --- |' * (len(shown) + 2)}")
    for name in order:
        cells = [f"{table[name][part] / GIB:.2f}" for part in shown]
        print(f"| {name} | {' | '.join(cells)} | {sum(table[name].values()) / GIB:.2f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", default="runs/bench_memory", help="of bench_memory.py")
    parser.add_argument("--out", default="docs/memory.png", help="file to write")
    args = parser.parse_args()
    draw(pathlib.Path(args.results), args.out)
