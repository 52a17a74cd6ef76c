"""What a schedule costs, as JSON and as text; its picture and its file. Does not import jax."""

from collections.abc import Callable, Sequence
from typing import Any

from llmx.pipeline import schedule
from llmx.pipeline.schedule import Facts, Table
from llmx.pipeline.simulate import Timeline

# The bubble by P stages, M microbatches from P on, v model chunks per stage.
BUBBLES: dict[str, tuple[str, Callable[[int, int, int], float]]] = {
    "gpipe": ("(P-1) / (M+P-1)", lambda P, M, v: (P - 1) / (M + P - 1)),
    "1f1b": ("(P-1) / (M+P-1)", lambda P, M, v: (P - 1) / (M + P - 1)),
    "interleaved_1f1b": ("(P-1) / (vM+P-1)", lambda P, M, v: (P - 1) / (v * M + P - 1)),
    "zb_1f1b": ("2(P-1) / (3vM+2(P-1))", lambda P, M, v: 2 * (P - 1) / (3 * v * M + 2 * (P - 1))),
    "zb_h1": ("(P-1) / (3M+P-1)", lambda P, M, v: (P - 1) / (3 * M + P - 1)),
    "zb_v": ("I / (6M+I), I = max(P-1, 2(2P-1-M))", lambda P, M, v: _zb_v(P, M)),
    "dual_pipe_v": ("(P-1) / (6M+P-1)", lambda P, M, v: (P - 1) / (6 * M + P - 1)),
    "pipedream_2bw": ("0", lambda P, M, v: 0.0),
}


def _zb_v(P: int, M: int) -> float:
    idle = max(P - 1, 2 * (2 * P - 1 - M))
    return idle / (6 * M + idle)


def summary(
    table: Table, facts: Facts, barriers: float, free: float, *, own: bool
) -> dict[str, Any]:
    """The report on a schedule as JSON.

    `barriers`, `free`: seconds of a step, stages in lockstep or running freely. `own`: the table is
    from a file, not one of `SCHEDULES`.
    """
    report = {
        "name": table.name, "stages": table.num_stages, "microbatches": table.num_microbatches,
        "chunks": table.num_chunks, "ticks": table.num_ticks, "periodic": table.periodic,
        "length": facts.length, "busy": facts.busy, "bubble": facts.bubble,
        "peak_stash": facts.peak_stash.tolist(),
        "peak_waiting_weights": facts.peak_waiting_weights.tolist(),
        "step_time": {"barriers": barriers, "free_running": free},
    }  # fmt: skip
    if not own and table.num_microbatches >= table.num_stages:
        formula, bubble = BUBBLES[table.name]
        sizes = table.num_stages, table.num_microbatches, table.chunks_per_stage
        report["closed_form"] = {"bubble": bubble(*sizes), "formula": formula}
    return report


def text(report: dict[str, Any]) -> str:
    """The report of `summary` as lines of text."""
    bubble = f"{report['bubble']:.2%}"
    if closed := report.get("closed_form"):
        bubble += f"; closed form {closed['formula']} = {closed['bubble']:.2%}"
    whole = report["chunks"] == report["stages"]
    unit = "microbatches" if whole else "microbatches of one chunk"
    peaks = report["peak_stash"], report["peak_waiting_weights"]
    stash, weights = (" ".join(map(str, peak)) for peak in peaks)
    times = report["step_time"]
    rows = {
        "length": f"{report['length']:g} forwards of a stage in {report['ticks']} ticks",
        "bubble": bubble,
        "stash": f"{stash}   {unit} that each stage holds, at most",
        "weights": f"{weights}   of them between BACKWARD and WEIGHT, at most",
        "step time": f"{times['barriers']:g} s where stages meet at every tick, "
        f"{times['free_running']:g} s where they run freely",
    }
    period = "one period of " if report["periodic"] else ""
    head = f"{period}{report['name']}: {report['stages']} stages, {report['microbatches']} "
    return "\n".join(
        [head + "microbatches", *(f"  {name:<10} {row}" for name, row in rows.items())]
    )


def columns(rows: Sequence[Sequence], *, right: int = 0) -> list[str]:
    """Rows as lines with aligned columns, of which the last `right` are aligned to the right."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    aligns = [str.ljust] * (len(widths) - right) + [str.rjust] * right
    cells = [zip(aligns, row, widths, strict=True) for row in texts]
    return ["  ".join(align(text, width) for align, text, width in row).rstrip() for row in cells]


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def write(
    table: Table, facts: Facts, timeline: Timeline, *, picture: str | None, csv: str | None
) -> None:
    """Writes the picture and the table, each to its path unless that is empty."""
    if picture:
        from llmx.plan import draw  # matplotlib takes a second to import

        draw.draw(table, facts, timeline).savefig(picture, dpi=120)
    if csv:
        schedule.write_csv(table, csv)
