"""Trains configs/slow_network.py with every strategy, draws docs/slow_networks_loss.png and prints
the table of held-out losses.

    python scripts/compare_sync.py [--runs one_bit,diloco] [--seeds 0] [--out PICTURE]

A run takes two minutes on two CPU cores; runs that are there already (runs/compare_sync) are not
made again. Every run has the same tokens in the same order as the run of "mean" with its seed.
"""

import argparse
import json
import pathlib
import subprocess
import sys

from matplotlib.figure import Figure

ROOT = pathlib.Path(__file__).parent.parent
RUNS_IN = ROOT / "runs" / "compare_sync"

WARMED = {"sync.warmup_steps": 180}  # 15%
# Every number is sent about each 100th step, so the second moment needs a longer memory.
SPARSE = {"optimizer.b1": 0.0, "optimizer.b2": 0.999, "sync.momentum": 0.5, "sync.ramp_steps": 180}
# The paper begins after 27% of its steps. 870 steps are 29 whole rounds. Each replica clips its own
# gradient, which is about twice as long as the mean's.
LOCAL = {"sync.warmup_steps": 330, "sync.every": 30, "optimizer.clip_norm": 2.0}
OUTER = {"sync.strategy": "diloco", "sync.outer_momentum": 0.7}
LAMB = {"optimizer.name": "lamb", "optimizer.learning_rate": 6e-3}

# What the runs differ in; all else is configs/slow_network.py. Late gradients act as momentum
# (docs/slow_networks.md), so "stale" and "top_k" have less, or none of the optimizer.
RUNS: dict[str, dict[str, object]] = {
    "mean": {"sync.strategy": "mean", "sync.warmup_steps": 0},
    "one_bit": WARMED,
    "zero_one, local steps": {"sync.strategy": "zero_one", **WARMED},
    "power_sgd": {"sync.strategy": "power_sgd", "sync.rank": 16, **WARMED},
    "int8": {"sync.strategy": "int8", "sync.warmup_steps": 0},
    "top_k": {"sync.strategy": "top_k", **WARMED, **SPARSE},
    "diloco": {**OUTER, **LOCAL},
    "diloco, int4 beside the next step": {
        **OUTER, **LOCAL, "sync.outer_format": "int4", "sync.overlap": True
    },
    "diloco, averaged moments": {
        **OUTER, **LOCAL, "sync.average_moments": True, "sync.outer_learning_rate": 0.9
    },
    "local_sgd": {"sync.strategy": "local_sgd", **LOCAL},
    "stale": {
        "sync.strategy": "stale", "sync.staleness": 2, "sync.warmup_steps": 0, "optimizer.b1": 0.5
    },
    "lamb": {"sync.strategy": "mean", "sync.warmup_steps": 0, **LAMB},
    "one_bit_lamb": {"sync.strategy": "one_bit_lamb", **WARMED, **LAMB},
}  # fmt: skip
AGAINST = {"one_bit_lamb": "lamb"}  # what a run is compared with; "mean" where nothing is named
COLORS = {
    "mean": "black", "one_bit": "#4477aa", "zero_one, local steps": "#009988",
    "power_sgd": "#aa3377", "int8": "#ee6677", "top_k": "#997700", "diloco": "#228833",
    "diloco, int4 beside the next step": "#228833", "diloco, averaged moments": "#117733",
    "local_sgd": "#ccbb44", "stale": "#999999",
    "lamb": "black", "one_bit_lamb": "#66ccee",
}  # fmt: skip
DASHED = ("lamb", "diloco, int4 beside the next step")


def train(name: str, seed: int, extra: list[str]) -> pathlib.Path:
    """The work directory of a run, which is made if it is not there."""
    workdir = RUNS_IN / f"{name.replace(', ', '_').replace(' ', '_')}-{seed}"
    if done(workdir):
        return workdir
    command = [
        sys.executable, "-m", "llmx.train", "--config", str(ROOT / "configs/slow_network.py"),
        "--workdir", str(workdir), "--config.launch.cpu_devices=4", f"--config.seed={seed}",
        "--config.evaluation.every=200", "--config.evaluation.batches=64",
        *(f"--config.{key}={value}" for key, value in RUNS[name].items()), *extra,
    ]  # fmt: skip
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return workdir


def done(workdir: pathlib.Path) -> bool:
    """Whether the run has come to its end."""
    if not (workdir / "metrics.jsonl").is_file():
        return False
    run = json.loads((workdir / "config.json").read_text())
    tokens = run["steps"] * run["batch"]["size"] * run["batch"]["sequence_length"]
    return tokens in [at for at, _ in held_out(workdir)]


def held_out(workdir: pathlib.Path) -> list[tuple[int, float]]:
    """(tokens, loss) of every evaluation."""
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [(each["tokens"], each["loss"]) for each in records if each["kind"] == "eval"]


def draw(curves: dict[str, list[list[tuple[int, float]]]], out: str):
    """Held-out loss against tokens, and beside it what each run ends with against "mean"."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    losses, ends = figure.subplots(1, 2, width_ratios=(2, 1))
    for name, runs in curves.items():
        points = [
            (at[0][0], sum(loss for _, loss in at) / len(at)) for at in zip(*runs, strict=True)
        ]
        style = dict(color=COLORS[name], ls="--" if name in DASHED else "-", marker=".")
        losses.plot(*zip(*points, strict=True), label=name, **style)
    losses.set(xlabel="tokens", ylabel="held-out loss, nats per byte")
    losses.legend(frameon=False)
    names = [name for name in curves if name not in ("mean", *AGAINST.values())]
    for row, name in enumerate(names):
        for ratio in ratios(curves, name):
            ends.plot(100 * (ratio - 1), row, "o", color=COLORS[name])
    ends.axvline(0, color="black")
    ends.set(
        yticks=range(len(names)), yticklabels=names, xlabel="% above mean, or LAMB, at the end"
    )
    ends.invert_yaxis()
    for axes in (losses, ends):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#eeeeee")
    figure.savefig(out, dpi=100)


def ratios(curves, name: str) -> list[float]:
    """What each run ends with, against "mean", or what `AGAINST` says, with the same seed."""
    pairs = zip(curves[name], curves[AGAINST.get(name, "mean")], strict=False)
    return [run[-1][1] / mean[-1][1] for run, mean in pairs]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", default=",".join(RUNS).replace(", ", "; "))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", default="")
    args, extra = parser.parse_known_args()
    seeds = [int(seed) for seed in args.seeds.split(",")]
    names = [name.replace("; ", ", ") for name in args.runs.split(",")]
    curves: dict[str, list] = {}
    wanted = [AGAINST[name] for name in names if name in AGAINST]
    for name in dict.fromkeys(["mean", *wanted, *names]):
        for seed in seeds:
            curves.setdefault(name, []).append(held_out(train(name, seed, extra)))
            print(f"{name}, seed {seed}: {curves[name][-1][-1][1]:.4f}", flush=True)
    for name, runs in curves.items():
        each = " ".join(f"{100 * (ratio - 1):+.2f}%" for ratio in ratios(curves, name))
        end = sum(run[-1][1] for run in runs) / len(runs)
        print(f"| {name} | {end:.4f} | {each} |")
    if args.out:
        draw(curves, args.out)


if __name__ == "__main__":
    main()
