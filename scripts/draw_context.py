"""Draws docs/long_context.png: who holds and who computes what in a ring of four devices.

    python scripts/draw_context.py [--out docs/long_context.png]

Placements and work are those of `llmx.model.attention.split`.
"""

import argparse

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from llmx.model.attention import ring, split

COLORS = ListedColormap(["#4477aa", "#ee6677", "#228833", "#ccbb44"])
WAYS, LENGTH = 4, 64
SPLITS = {
    "in row order": split.Split(WAYS, zigzag=False),
    "zigzag": split.Split(WAYS),
}


def holders(chosen: split.Split) -> np.ndarray:
    """int[T]: the device that holds each position."""
    device = np.repeat(np.arange(WAYS), LENGTH // WAYS)
    return device[np.argsort(chosen.order(LENGTH))]


def draw(out: str) -> None:
    figure = Figure(figsize=(10, 7.2), layout="constrained")
    grid = figure.subplots(2, 3, width_ratios=(1.25, 1.25, 1))
    for row, (name, chosen) in zip(grid, SPLITS.items(), strict=True):
        held = holders(chosen)
        by_query = np.where(np.tri(LENGTH, dtype=bool), held[:, None], np.nan)
        row[0].imshow(by_query, cmap=COLORS, vmin=0, vmax=WAYS - 1, interpolation="nearest")
        row[0].set_title(f"{name}: who computes a score")
        row[0].set_xlabel("position of the key")
        row[0].set_ylabel("position of the query")
        # A device meets the keys of the device `step` before it.
        step = (held[:, None] - held[None]) % WAYS
        by_step = np.where(np.tri(LENGTH, dtype=bool), step, np.nan)
        image = row[1].imshow(by_step, cmap="Greys_r", vmin=-1, vmax=WAYS, interpolation="nearest")
        row[1].set_title("at which step of the ring")
        row[1].set_xlabel("position of the key")
        figure.colorbar(image, ax=row[1], ticks=range(WAYS), boundaries=np.arange(WAYS + 1) - 0.5)
        work = ring.scores_per_device(chosen, LENGTH)
        row[2].bar(range(WAYS), work / work.mean(), color=COLORS.colors)
        row[2].axhline(1, color="black", linewidth=0.8)
        row[2].set_title(f"work: busiest {work.max() / work.mean():.2f} x mean")
        row[2].set_xlabel("device")
        row[2].set_xticks(range(WAYS))
        row[2].set_ylim(0, 2)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="docs/long_context.png", help="file to write")
    draw(parser.parse_args().out)
