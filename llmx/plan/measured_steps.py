"""Published step times, and how far the planner's are from them.

Tables are CSV files in one of two forms, told apart by their columns: those of vTrain (MICRO 2024;
A100, Megatron-LM of 2021) and that of Megatron-LM's README (H100, 2024). An error is predicted over
measured, less one. Two others stand beside it:

    constant   the error of one utilisation for all rows, the best for these rows
    held out   constants fitted on half of the rows, the error on the other half, mean over splits;
               what the model counts, and the constants that are not fitted, stay the same
"""

import csv
import dataclasses
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from llmx.plan import calibrations, megatron
from llmx.plan.gemm import Core
from llmx.plan.megatron import Job, Recipe
from llmx.runtime import hardware


class Step(NamedTuple):
    """One row of a table."""

    job: Job
    seconds: float  # measured


@dataclasses.dataclass(frozen=True)
class Trainer:
    """What computed a table, and which constants were fitted to it."""

    recipe: Recipe
    core: Core
    fitted: tuple[str, ...]  # fields of the recipe or of the calibration

    def constants(self) -> dict[str, float]:
        both = dataclasses.asdict(self.core.calibration) | dataclasses.asdict(self.recipe)
        return {name: both[name] for name in self.fitted}

    def replace(self, constants: dict[str, float]) -> "Trainer":
        of_recipe = {field.name for field in dataclasses.fields(Recipe)}
        recipe = {name: value for name, value in constants.items() if name in of_recipe}
        others = {name: value for name, value in constants.items() if name not in of_recipe}
        calibration = dataclasses.replace(self.core.calibration, **others)
        core = dataclasses.replace(self.core, calibration=calibration)
        return dataclasses.replace(
            self, recipe=dataclasses.replace(self.recipe, **recipe), core=core
        )

    def seconds(self, job: Job) -> float:
        return megatron.step_seconds(job, self.recipe, self.core)


# 800 Gb/s a node of 8, 400 Gb/s a GPU.
_A100 = dataclasses.replace(hardware.CHIPS["a100_80gb"], network_bandwidth=12.5e9)
A100 = Trainer(
    megatron.UNFUSED, Core(_A100, calibrations.CALIBRATIONS["a100_80gb"]),
    ("products", "memory", "host", "network"),
)  # fmt: skip
H100 = Trainer(
    megatron.FUSED, Core(hardware.CHIPS["h100_sxm"], calibrations.CALIBRATIONS["h100_sxm"]),
    ("products",),
)  # fmt: skip


class Table(NamedTuple):
    """A file of measured steps."""

    name: str
    trainer: Trainer
    steps: list[Step]


def read(path: pathlib.Path) -> Table:
    """A CSV file of either form. ValueError where its columns are of neither, or a row is
    wrong."""
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        rows, columns = list(reader), set(reader.fieldnames or ())
    for wanted, trainer, parse in FORMS:
        if wanted <= columns:
            return Table(path.stem, trainer, _steps(path, rows, parse))
    raise ValueError(f"{path} has columns {sorted(columns)}: of neither form in {__name__}")


def _steps(path: pathlib.Path, rows: list[dict], parse: Callable) -> list[Step]:
    """ValueError for rows that hold no measured step, and where there are none."""
    found = []
    for number, row in enumerate(rows, 1):
        try:
            step = parse(row)
        except (ValueError, TypeError, ZeroDivisionError) as error:
            raise ValueError(f"{path}, row {number}: {error}: correct or remove it") from error
        if not 0 < step.seconds < math.inf:
            raise ValueError(f"{path}, row {number}: no time above 0: correct or remove it")
        found.append(step)
    if not found:
        raise ValueError(f"{path} has no rows: give a table of measured steps")
    return found


_OF_VTRAIN = {
    "width": "hidden size", "heads": "attention heads", "layers": "# layers",
    "sequence": "sequence length", "batch": "global batch", "microbatch": "micro batch",
    "tensor": "tensor parallelism", "data": "data parallelism", "pipeline": "pipeline parallelism",
}  # fmt: skip


def _of_vtrain(row: dict[str, str]) -> Step:
    sizes = {field: int(row[column]) for field, column in _OF_VTRAIN.items()}
    return Step(Job(vocabulary=51200, **sizes), float(row["iteration time (ms)"]) * 1e-3)


_OF_MEGATRON = {
    "width": "hidden", "heads": "heads", "layers": "layers", "batch": "batch", "tensor": "tensor",
    "data": "data", "pipeline": "pipeline",
}  # fmt: skip


def _of_megatron(row: dict[str, str]) -> Step:
    sizes = {field: int(row[column]) for field, column in _OF_MEGATRON.items()}
    job = Job(sequence=4096, vocabulary=131072, **sizes)
    rate = float(row["tflops_per_gpu"]) * 1e12 * job.gpus
    return Step(job, megatron.model_flops(job) / rate)


FORMS: tuple[tuple[set[str], Trainer, Callable[[dict[str, str]], Step]], ...] = (
    ({*_OF_VTRAIN.values(), "iteration time (ms)"}, A100, _of_vtrain),
    ({*_OF_MEGATRON.values(), "tflops_per_gpu"}, H100, _of_megatron),
)


def errors(trainer: Trainer, steps: Sequence[Step]) -> np.ndarray:
    """float[steps]: predicted over measured, less one."""
    return np.array([trainer.seconds(job) / seconds - 1 for job, seconds in steps])


def mean_error(trainer: Trainer, steps: Sequence[Step]) -> float:
    return float(np.abs(errors(trainer, steps)).mean())


def constant_errors(trainer: Trainer, steps: Sequence[Step]) -> tuple[float, np.ndarray]:
    """One utilisation for all rows with the least mean absolute error, and its errors."""
    peak = trainer.core.chip.peak(trainer.recipe.dtype)[0]
    shares = np.array([
        megatron.model_flops(job) / (job.gpus * peak) / seconds for job, seconds in steps
    ])  # fmt: skip
    # The mean of |share / u - 1| has its least value at the share of one of the rows.
    best = min(shares, key=lambda utilization: np.abs(shares / utilization - 1).mean())
    return float(best), shares / best - 1


def fit(trainer: Trainer, tables: Sequence[Sequence[Step]]) -> Trainer:
    """The trainer with its constants where the tables' mean errors have the least sum.

    A search along one constant after the other, in logarithms; shares stay below 1.
    """
    names, start = trainer.fitted, trainer.constants()
    where = np.log([start[name] for name in names])

    def trainer_at(logs: np.ndarray) -> Trainer:
        return trainer.replace(dict(zip(names, np.exp(logs).tolist(), strict=True)))

    def loss(logs: np.ndarray) -> float:
        if any(log > 0 for log, name in zip(logs, names, strict=True) if name != "host"):
            return math.inf
        return sum(mean_error(trainer_at(logs), steps) for steps in tables if steps)

    return trainer_at(_least(loss, where))


def _least(loss: Callable[[np.ndarray], float], where: np.ndarray) -> np.ndarray:
    """A local least of a function, by steps along one coordinate at a time."""
    least, steps = loss(where), np.full(len(where), 0.2)
    while steps.max() > 0.01:
        for i, step in enumerate(steps):
            for sign in (1, -1):
                there = where.copy()
                there[i] += sign * step
                if (found := loss(there)) < least - 1e-6:
                    least, where = found, there
                    steps[i] = min(1.5 * step, 0.3)
                    break
            else:
                steps[i] = step / 2
    return where


def held_out_errors(
    trainer: Trainer, tables: Sequence[Sequence[Step]], *, splits: int = 10
) -> list[float]:
    """Of each table the mean absolute error on rows that the constants were not fitted to."""
    found: list[list[float]] = [[] for _ in tables]
    for seed in range(splits):
        random = np.random.default_rng(seed)
        orders = [random.permutation(len(steps)) for steps in tables]
        halves = [
            ([steps[i] for i in order[::2]], [steps[i] for i in order[1::2]])
            for steps, order in zip(tables, orders, strict=True)
        ]
        fitted = fit(trainer, [half for half, _ in halves])
        for means, (_, other) in zip(found, halves, strict=True):
            if other:
                means.append(mean_error(fitted, other))
    return [float(np.mean(means)) if means else math.nan for means in found]
