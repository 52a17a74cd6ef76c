"""The loss curve of a run as a picture, and its numbers by layer as another.

However long the run is, its curve is kept as at most 4096 points: of each the mean, and the lowest
and highest loss of the records in it, so that a spike of a single step stays visible. Of numbers by
layer there are as many columns as a picture shows.
"""

import itertools
import math
import os
import pathlib
import statistics
from collections.abc import Callable, Sequence

from llmx.runtime import printable, records
from llmx.runtime.records import RECORDS

PLOT, LAYERS_PLOT = "loss.png", "layers.png"
MOST_POINTS = 4096  # of a curve: some per pixel of the picture
MOST_COLUMNS = 512  # of a map of layers


def plot_all(
    workdir: str | os.PathLike, *, log: Callable[[str], None] | None = None
) -> list[pathlib.Path]:
    """Both pictures, the second where there are numbers by layer; returns their paths.

    log: told what `plot_loss` says, also why it draws nothing, where the second picture is drawn.

    Raises ValueError where nothing is drawn.
    """
    layers = plot_layers(workdir)
    try:
        return [plot_loss(workdir, log=log), *filter(None, [layers])]
    except ValueError as error:
        if layers is None:
            raise
        if log is not None:
            log(str(error))
        return [layers]


def plot_loss(
    workdir: str | os.PathLike, *, log: Callable[[str], None] | None = None
) -> pathlib.Path:
    """Draw train and held-out loss against tokens into WORKDIR/loss.png; returns its path.

    log: told how many lines of the file are no records.

    Raises ValueError where the run has recorded no step yet.
    """
    path = pathlib.Path(workdir) / RECORDS
    if not path.exists():
        raise ValueError(f"{path} does not exist: give the --workdir of a run that has trained")
    curves, num_damaged = {"train": Curve(), "eval": Curve()}, 0
    for _, record in records.scan(path):
        num_damaged += record is None
        curve = curves.get(record["kind"]) if record else None
        loss = records.number(record.get("loss")) if curve is not None else math.nan
        if math.isfinite(loss):
            curve.add(record.get("tokens", 0), loss)
    for curve in curves.values():
        curve.close()
    skipped = records.damaged_text(num_damaged, path) if num_damaged else ""
    if not curves["train"].means:
        problem = f"{path} has no step with a finite loss: nothing to draw yet"
        raise ValueError(f"{problem} ({skipped})" if skipped else problem)
    if skipped and log is not None:
        log(f"{skipped}: skipped")
    figure = _draw(curves["train"], curves["eval"], title=_name(path))
    return _saved(figure, path.with_name(PLOT))


def _name(path: pathlib.Path) -> str:
    """Of a run, by its records, as a picture shows it."""
    return printable.printable(path.absolute().parent.name)


def _saved(figure, target: pathlib.Path) -> pathlib.Path:
    """Written aside and renamed: a reader during training never sees half a picture."""
    temporary = target.with_name(target.name + ".tmp")
    figure.savefig(temporary, format="png", dpi=150)
    temporary.replace(target)
    return target


def plot_layers(workdir: str | os.PathLike) -> pathlib.Path | None:
    """Draw each number by layer, over layers and steps, into WORKDIR/layers.png; returns its path.

    None where the run recorded none.
    """
    path = pathlib.Path(workdir) / RECORDS
    maps: dict[str, Columns] = {}
    for record in records.read_records(path) if path.exists() else ():
        if record["kind"] != "layers":
            continue
        for name, values in record.items():
            if isinstance(values, list):
                maps.setdefault(name, Columns(name)).add(record["step"], values)
    for each in maps.values():
        each.close()
    maps = {name: each for name, each in maps.items() if each.steps}
    if not maps:
        return None
    figure = _draw_layers(list(maps.values()), title=_name(path))
    return _saved(figure, path.with_name(LAYERS_PLOT))


class Columns:
    """Numbers by layer in at most MOST_COLUMNS columns, each of `width` records, at the step of the
    last of these.

    A column has the means of its records; their largest of a name that ends with "max", their least
    of one that ends with "min".
    """

    def __init__(self, name: str):
        self.name, self.width, self.steps, self.columns = name, 1, [], []
        self._join = {"max": max, "min": min}.get(name.rpartition("_")[-1], statistics.fmean)
        self._waiting: list[list[float]] = []  # records of the column that is being filled
        self._last = 0  # step of the last of them

    def add(self, step: int, values: list):
        """Adds a record after the ones before; one of another number of layers is left out."""
        column = [records.number(value) for value in values]  # of null nan
        if len(column) != len([*self._waiting, *self.columns, column][0]) or not len(column):
            return
        self._waiting.append(column)
        self._last = step
        if len(self._waiting) == self.width:
            self.close()
        if len(self.columns) == MOST_COLUMNS:
            pairs = zip(self.columns[::2], self.columns[1::2], strict=True)
            self.columns = [self._joined(pair) for pair in pairs]
            self.steps, self.width = self.steps[1::2], 2 * self.width

    def close(self):
        """Makes a column of the records that are left."""
        if self._waiting:
            self.columns.append(self._joined(self._waiting))
            self.steps.append(self._last)
        self._waiting = []

    def _joined(self, columns: Sequence[list[float]]) -> list[float]:
        """The columns as one; a layer without a number in all of them has none."""
        rows = (
            [value for value in row if math.isfinite(value)] for row in zip(*columns, strict=True)
        )
        return [self._join(row) if row else math.nan for row in rows]


def _draw_layers(maps: list[Columns], *, title: str):
    """A matplotlib figure with a map for each name, one under another."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 0.6 + 2.2 * len(maps)), layout="constrained")
    for axes, each in zip(figure.subplots(len(maps), squeeze=False)[:, 0], maps, strict=True):
        rows = [*zip(*each.columns, strict=True)]  # of layers
        found = sorted(value for row in rows for value in row if math.isfinite(value)) or [0.0, 1.0]
        # Single values, as of the first steps, would else take all the colours.
        low, high = found[len(found) // 100], found[-1 - len(found) // 100]
        # A column reaches from the one before to its own step, wherever that is.
        edges = [each.steps[0] - max((each.steps[-1] - each.steps[0]) / 100, 1), *each.steps]
        image = axes.pcolormesh(
            edges, [layer - 0.5 for layer in range(len(rows) + 1)], rows, vmin=low, vmax=high,
            cmap="viridis", rasterized=True,
        )  # fmt: skip
        figure.colorbar(image, ax=axes, extend="both")
        name = printable.printable(each.name.replace("_", " "))
        axes.set_title(name, loc="left", fontsize="medium", parse_math=False)
        axes.set_ylabel("layer")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step")
    figure.suptitle(f"Layers of {title}", parse_math=False)
    return figure


class Curve:
    """A curve in at most MOST_POINTS points, each of `width` records; few records are points."""

    def __init__(self):
        self.tokens, self.means, self.lows, self.highs = [], [], [], []
        self.width, self.last = 1, math.nan  # records in a point; the last value
        self._count = 0  # of the point that is being filled: its records ...
        self._begin_point()

    def _begin_point(self):
        self._count, self._tokens, self._sum = 0, 0.0, 0.0
        self._low, self._high = math.inf, -math.inf

    def add(self, tokens: float, value: float):
        """Adds a record after the ones before."""
        self._count, self._tokens, self._sum = self._count + 1, tokens, self._sum + value
        self._low, self._high, self.last = min(self._low, value), max(self._high, value), value
        if self._count == self.width:
            self.close()
            if len(self.means) == MOST_POINTS:
                self._halve()

    def close(self):
        """Makes a point of the records that are left."""
        if self._count:
            self.tokens.append(self._tokens)
            self.means.append(self._sum / self._count)
            self.lows.append(self._low)
            self.highs.append(self._high)
        self._begin_point()

    def _halve(self):
        self.width *= 2
        self.tokens = self.tokens[1::2]
        pairs = lambda values: zip(values[::2], values[1::2], strict=True)  # noqa: E731
        self.means = [(a + b) / 2 for a, b in pairs(self.means)]
        self.lows = [min(pair) for pair in pairs(self.lows)]
        self.highs = [max(pair) for pair in pairs(self.highs)]


def _draw(train: Curve, held_out: Curve, *, title: str):
    """A matplotlib figure of the curves."""
    from matplotlib.figure import Figure  # not pyplot: no global state, safe in a thread

    largest = max(train.tokens + held_out.tokens)
    units = ((1e9, "billions"), (1e6, "millions"), (1e3, "thousands"))
    unit, name = next((unit for unit in units if largest >= unit[0]), (1, ""))
    x, eval_x = [t / unit for t in train.tokens], [t / unit for t in held_out.tokens]
    smooth = smoothed(train.means)

    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.add_subplot()
    label = "train"
    if len(train.means) >= 100:  # with fewer, smoothing leaves them as they are
        label, each = "train, smoothed", "train, each record"
        thin = dict(color="tab:blue", alpha=0.25, linewidth=0.8)
        if train.width == 1:
            axes.plot(x, train.means, label=each, **thin)
        else:  # from the lowest to the highest of each point
            axes.fill_between(x, train.lows, train.highs, label=each, **thin)
    axes.plot(x, smooth, color="tab:blue", linewidth=1.8, label=f"{label}: {smooth[-1]:.3f} at end")
    if eval_x:
        label = f"held-out: {held_out.last:.3f} at end"
        style = dict(color="tab:orange", linewidth=1.8, marker="o", markersize=4)
        axes.plot(eval_x, held_out.means, label=label, **style)
    # The steep first steps and single spikes may leave the frame.
    settled = smooth[len(smooth) // 50 :] + [
        loss for t, loss in zip(held_out.tokens, held_out.means, strict=True) if t >= largest / 50
    ]
    low, high = min(settled), max(settled)
    margin = 0.08 * (high - low) or 0.1
    axes.set_ylim(low - margin, high + margin)
    axes.set_xlim(0, largest / unit * 1.01 or 1)
    axes.set_title(f"Loss of {title}", parse_math=False)
    axes.set_xlabel(f"training tokens ({name})" if name else "training tokens")
    axes.set_ylabel("cross-entropy (nats per token)")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def smoothed(values: list[float]) -> list[float]:
    """Mean over a fiftieth of the values around each: no lag, but for the last ones; few: as is."""
    reach = len(values) // 100
    sums = [0.0, *itertools.accumulate(values)]
    smooth = []
    for i in range(len(values)):
        left = min(reach, i)  # symmetric in the steep beginning
        right = min(left, len(values) - 1 - i)
        smooth.append((sums[i + right + 1] - sums[i - left]) / (left + right + 1))
    return smooth
