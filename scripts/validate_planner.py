"""How far the planner is from what others measured.

    python scripts/validate_planner.py --times [table.csv ...]

Without files: the tables in tests/golden/steps. Prints each row's measured and predicted step time;
of each table the mean and the worst absolute error with the constants in
llmx/plan/calibrations.py, that of the best constant utilisation, and that on rows to which the
constants were not fitted; and the constants as a fit to these files finds them.
"""

import argparse
import pathlib

import numpy as np

from llmx.plan import measured_steps
from llmx.plan.measured_steps import Table, Trainer

ROOT = pathlib.Path(__file__).resolve().parents[1]
TABLES = sorted((ROOT / "tests" / "golden" / "steps").glob("*.csv"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--times", nargs="*", type=pathlib.Path, metavar="CSV", help="compare step times"
    )
    parser.add_argument("--splits", type=int, default=10, help="random halves, default 10; 0: none")
    flags = parser.parse_args()
    if flags.times is None:
        parser.error("nothing to compare: add --times")
    tables = [measured_steps.read(path) for path in flags.times or TABLES]
    for table in tables:
        print_rows(table)
    for trainer in (measured_steps.A100, measured_steps.H100):
        own = [table for table in tables if table.trainer is trainer]
        if own:
            print_summary(trainer, own, flags.splits)


def print_rows(table: Table) -> None:
    """Each row's error."""
    print(f"\n{table.name}\n{'measured s':>11} {'predicted s':>11} {'error':>7}  row")
    errors = measured_steps.errors(table.trainer, table.steps)
    for (job, seconds), error in zip(table.steps, errors, strict=True):
        row = (
            f"width {job.width} layers {job.layers} tensor {job.tensor} data {job.data} "
            f"pipeline {job.pipeline} batch {job.batch} microbatch {job.microbatch}"
        )
        print(f"{seconds:11.3f} {seconds * (1 + error):11.3f} {error:7.1%}  {row}")


def print_summary(trainer: Trainer, tables: list[Table], splits: int) -> None:
    """Errors of the tables of one chip, and its constants."""
    steps = [table.steps for table in tables]
    held_out = measured_steps.held_out_errors(trainer, steps, splits=splits) if splits else []
    print(f"\n{trainer.core.chip.name}: mean (worst) absolute error")
    for i, table in enumerate(tables):
        errors = np.abs(measured_steps.errors(trainer, table.steps))
        best, constant = measured_steps.constant_errors(trainer, table.steps)
        constant = np.abs(constant)
        line = (
            f"  {table.name}: {errors.mean():.1%} ({errors.max():.1%}); constant utilisation "
            f"{best:.1%}: {constant.mean():.1%} ({constant.max():.1%})"
        )
        print(line + (f"; held out: {held_out[i]:.1%}" if held_out else ""))
    fitted = measured_steps.fit(trainer, steps).constants()
    for name, value in trainer.constants().items():
        print(f"  {name} {value:.3g}, fitted to these files {fitted[name]:.3g}")


if __name__ == "__main__":
    main()
