"""Draws docs/slow_networks.png: the time of a step against the bandwidth between replicas.

    python scripts/draw_slow_networks.py [--out docs/slow_networks.png]

Llama-3 8B on eight replicas of eight H100s (hsdp: a replica is split over `fsdp`), one row of 8,192
tokens on each. Bytes and times are those of `llmx.plan.network`; nothing is measured. Also prints
them as a table of docs/slow_networks.md.
"""

import argparse
import pathlib
import runpy

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from llmx import config
from llmx.plan import network
from llmx.plan.network import Link, StepGroup
from llmx.runtime import hardware
from llmx.step import optimizers
from llmx.sync.config import SyncConfig
from llmx.sync.replicas import MEAN
from llmx.sync.strategy import STRATEGIES

RUN = pathlib.Path(__file__).parent.parent / "configs" / "llama3_8b.py"
SIZES = {"stage": 1, "data": 8, "fsdp": 8, "expert": 1, "sequence": 1, "tensor": 1}
CHIP, UTILIZATION = hardware.CHIPS["h100_sxm"], 0.4
GBIT = 1e9 / 8  # bytes
TICKS = (0.1, 0.3, 1, 3, 10, 30, 100, 400)

# (label, strategy with its warm-up, reduce bytes, color, dashes); without a color in the table only
LINES = (
    ("mean, fp32", SyncConfig(), 4, "#777777", "-"),
    ("stale", SyncConfig("stale"), 4, "", ""),
    ("mean, bf16", SyncConfig(), 2, "#000000", "-"),
    ("int8", SyncConfig("int8"), 2, "#ee6677", "-"),
    ("top_k, 1%", SyncConfig("top_k"), 2, "#997700", "-"),
    ("every 30, with moments", SyncConfig("local_sgd", every=30, average_moments=True), 2,
     "#bbaa33", "--"),
    ("local_sgd, diloco: every 30", SyncConfig("local_sgd", every=30), 2, "#228833", "-"),
    ("diloco: every 30, int8 or fp8", SyncConfig("diloco", outer_format="int8"), 2, "", ""),
    ("diloco: every 30, int4", SyncConfig("diloco", outer_format="int4"), 2, "#66ccaa", "-"),
    ("diloco: every 30, int4, beside the next step",
     SyncConfig("diloco", outer_format="int4", overlap=True), 2, "", ""),
    ("one_bit, embedding and head in full",
     SyncConfig("one_bit", 1, uncompressed=("embedding", "head")), 2, "#99bbdd", "-."),
    ("one_bit, after the warm-up", SyncConfig("one_bit", 1), 2, "#4477aa", "-"),
    ("one_bit, run with 15% warm-up", SyncConfig("one_bit", 15_000), 2, "#4477aa", "--"),
    ("zero_one, whole run", SyncConfig("zero_one"), 2, "#009999", "-"),
    ("power_sgd, rank 4", SyncConfig("power_sgd"), 2, "#aa3377", "-"),
    ("local_sgd, diloco: every 500", SyncConfig("local_sgd", every=500), 2, "#228833", "--"),
)  # fmt: skip


def step_groups(run: config.Config, chosen: SyncConfig, reduce_bytes: int) -> list[StepGroup]:
    """The steps of a run with this strategy."""
    replicas = network.replicas_of(chosen, run.model, SIZES)
    schedule = optimizers.make_schedule(run.optimizer, total_steps=run.steps)
    rates = jax.vmap(schedule)(jnp.arange(run.steps))
    timetable = STRATEGIES[chosen.strategy].timetable(chosen, rates)
    groups = network.of_run(replicas, timetable, reduce_bytes=reduce_bytes)
    # One step of warm-up stands for none: these strategies need some.
    return [group for group in groups if chosen.warmup_steps != 1 or group.phase != MEAN]


def draw(run: config.Config, compute: float, lines: dict[str, list[StepGroup]], out: str) -> None:
    speeds = np.geomspace(TICKS[0], TICKS[-1], 200)
    times = {
        label: [network.step_seconds(groups, Link(speed * GBIT), compute) for speed in speeds]
        for label, groups in lines.items()
    }
    figure = Figure(figsize=(11, 7), layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.axhline(compute, color="#bbbbbb", linewidth=1)
    axes.text(
        TICKS[0] * 1.05, compute / 1.04, f"computation alone, {compute:.2f} s", va="top",
        color="#777777", fontsize=10,
    )  # fmt: skip
    drawn = [label for label, *_, color, _ in LINES if color]
    for label, _, _, color, dashes in LINES:
        if color:
            axes.plot(speeds, times[label], dashes, color=color, linewidth=2)
    _label(axes, {label: times[label][0] for label in drawn})
    axes.set_xlim(TICKS[0] / 1.05, TICKS[-1])
    axes.set_ylim(compute / 1.3, 1.2 * max(time[0] for time in times.values()))
    axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axes.set_yticks((1, 3, 10, 30, 100, 300), ("1", "3", "10", "30", "100", "300"))
    axes.minorticks_off()
    axes.yaxis.tick_right()
    axes.yaxis.set_label_position("right")
    axes.grid(color="#eeeeee")
    axes.set_xlabel(
        "network between replicas, Gbit/s for each GPU (a host's link, divided by its 8 GPUs)"
    )
    axes.set_ylabel("seconds per step")
    tokens = SIZES["data"] * run.batch.size * run.batch.sequence_length
    axes.set_title(
        f"Llama-3 8B, eight replicas of eight H100s, {tokens:,} tokens per step", fontsize=12
    )
    for side in ("top", "left"):
        axes.spines[side].set_visible(False)
    figure.savefig(out, dpi=100)


def _label(axes: Axes, ends: dict[str, float]) -> None:
    """Labels at the left ends of lines, one above the other where lines are close."""
    color_of = {label: color for label, _, _, color, _ in LINES}
    ordered = sorted(ends, key=ends.get)
    places, apart = [], np.log(1.2)
    for label in ordered:
        wanted = np.log(ends[label])
        places.append(max(wanted, places[-1] + apart) if places else wanted)
    # From the top down what was pushed up comes back as far as it may.
    for i in reversed(range(len(places))):
        above = places[i + 1] - apart if i + 1 < len(places) else np.inf
        middle = (places[i] + np.log(ends[ordered[i]])) / 2
        places[i] = min(max(middle, places[i] - apart / 2), above)
    for label, place in zip(ordered, places, strict=True):
        axes.annotate(
            label, (TICKS[0], ends[label]), (TICKS[0] / 1.3, np.exp(place)), ha="right",
            va="center", color=color_of[label], fontsize=10, annotation_clip=False,
            arrowprops=dict(arrowstyle="-", color=color_of[label], linewidth=0.8, shrinkA=2,
                            shrinkB=0),
        )  # fmt: skip


def table(compute: float, lines: dict[str, list[StepGroup]]) -> str:
    """Bytes per step, and step times at some bandwidths, as a Markdown table."""
    shown = TICKS[::-1]
    rows = [
        "| strategy | MB sent by a GPU per step | beside bf16 | s at "
        + " | ".join(f"{speed:g}" for speed in shown) + " Gbit/s |",
        "| --- |" + " --- |" * (2 + len(shown)),
    ]  # fmt: skip
    usual = network.per_step(lines["mean, bf16"]).bytes
    for label, groups in lines.items():
        sent = network.per_step(groups).bytes
        times = [network.step_seconds(groups, Link(speed * GBIT), compute) for speed in shown]
        rows.append(
            f"| {label} | {sent / 1e6:,.0f} | {_ratio(usual / sent)} | "
            + " | ".join(f"{time:.3g}" for time in times) + " |"
        )  # fmt: skip
    sent = lines["mean, fp32"][0].step
    late = [network.late_seconds(sent, Link(speed * GBIT), compute, 1) for speed in shown]
    rows.append(
        f"| fp32 in the background, a step late or more (a bound) | {sent.bytes / 1e6:,.0f} | "
        f"{_ratio(usual / sent.bytes)} | " + " | ".join(f"{time:.3g}" for time in late) + " |"
    )
    return "\n".join(rows)


def _ratio(fewer: float) -> str:
    return f"1/{fewer:.3g}" if fewer > 1.001 else f"{1 / fewer:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="docs/slow_networks.png", help="file to write")
    args = parser.parse_args()
    run = runpy.run_path(str(RUN))["get_config"]()
    compute = network.compute_seconds(
        run.model, tokens=run.batch.sequence_length, sequence_length=run.batch.sequence_length,
        chip=CHIP, utilization=UTILIZATION,
    )  # fmt: skip
    lines = {label: step_groups(run, chosen, width) for label, chosen, width, *_ in LINES}
    draw(run, compute, lines, args.out)
    print(table(compute, lines))


if __name__ == "__main__":
    main()
