"""The loss curve of a run as a picture."""

import itertools
import math
import os
import pathlib

from llmx.runtime import records
from llmx.runtime.records import RECORDS

PLOT = "loss.png"


def plot_loss(workdir: str | os.PathLike) -> pathlib.Path:
    """Draw train and held-out loss against tokens into WORKDIR/loss.png; returns its path.

    Raises ValueError where the run has recorded no step yet.
    """
    path = pathlib.Path(workdir) / RECORDS
    if not path.exists():
        raise ValueError(f"{path} does not exist: give the --workdir of a run that has trained")
    curves = {"train": ([], []), "eval": ([], [])}
    for _, record in records.read_records(path):
        tokens, losses = curves.get(record["kind"], ([], []))
        if "loss" in record and math.isfinite(loss := float(record["loss"])):
            tokens.append(record["tokens"])
            losses.append(loss)
    if not curves["train"][0]:
        raise ValueError(f"{path} has no step with a finite loss: nothing to draw yet")
    figure = _draw(*curves["train"], *curves["eval"], title=path.absolute().parent.name)
    # Written aside and renamed: a reader during training never sees half a picture.
    target, temporary = path.with_name(PLOT), path.with_name(PLOT + ".tmp")
    figure.savefig(temporary, format="png", dpi=150)
    temporary.replace(target)
    return target


def _draw(tokens, losses, eval_tokens, eval_losses, *, title: str):
    """A matplotlib figure of the curves."""
    from matplotlib.figure import Figure  # not pyplot: no global state, safe in a thread

    largest = max(tokens + eval_tokens)
    units = ((1e9, "billions"), (1e6, "millions"), (1e3, "thousands"))
    unit, name = next((unit for unit in units if largest >= unit[0]), (1, ""))
    x, eval_x = [t / unit for t in tokens], [t / unit for t in eval_tokens]
    smooth = _smoothed(losses)

    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.add_subplot()
    label = "train"
    if len(losses) >= 100:  # with fewer, smoothing leaves them as they are
        label, each = "train, smoothed", "train, each record"
        axes.plot(x, losses, color="tab:blue", alpha=0.25, linewidth=0.8, label=each)
    axes.plot(x, smooth, color="tab:blue", linewidth=1.8, label=f"{label}: {smooth[-1]:.3f} at end")
    if eval_x:
        label = f"held-out: {eval_losses[-1]:.3f} at end"
        style = dict(color="tab:orange", linewidth=1.8, marker="o", markersize=4)
        axes.plot(eval_x, eval_losses, label=label, **style)
    # The steep first steps and single spikes may leave the frame.
    settled = smooth[len(smooth) // 50 :] + [
        loss for t, loss in zip(eval_tokens, eval_losses, strict=True) if t >= largest / 50
    ]
    low, high = min(settled), max(settled)
    margin = 0.08 * (high - low) or 0.1
    axes.set_ylim(low - margin, high + margin)
    axes.set_xlim(0, largest / unit * 1.01)
    axes.set_title(f"Loss of {title}")
    axes.set_xlabel(f"training tokens ({name})" if name else "training tokens")
    axes.set_ylabel("cross-entropy (nats per token)")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def _smoothed(values: list[float]) -> list[float]:
    """Mean over a fiftieth of the values around each: no lag, but for the last ones; few: as is."""
    reach = len(values) // 100
    sums = [0.0, *itertools.accumulate(values)]
    smooth = []
    for i in range(len(values)):
        left = min(reach, i)  # symmetric in the steep beginning
        right = min(left, len(values) - 1 - i)
        smooth.append((sums[i + right + 1] - sums[i - left]) / (left + right + 1))
    return smooth
