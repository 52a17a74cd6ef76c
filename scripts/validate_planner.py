"""How far the planner is from what others measured.

    python scripts/validate_planner.py --times [table.csv ...]
    python scripts/validate_planner.py --programs [programs.jsonl] [--compile]
    python scripts/validate_planner.py --search
    python scripts/validate_planner.py --cpu [cpu.json] [--rounds 10]

`--programs`: memory, bytes sent and the time of a step beside those of compiled programs (time: the
estimate of `llmx.aot`, from the program's operators and their overlap), by default those in
tests/golden/programs.jsonl. With `--compile` each is compiled again (a minute or two each; needs
the extra `aot`) and its line replaced: edit a line to add one.

`--search`: what the search finds for each config on its own hardware, beside the config, ZeRO-3
alone (one sequence per device and microbatch where it can), and devices split evenly over
`fsdp`, `sequence` and `tensor`; both with the best remat and microbatches that fit.

`--times`, by default with the tables in tests/golden/steps: each row's measured and predicted step
time; of each table of Megatron-LM the mean and the worst absolute error with the constants in
llmx/plan/calibrations.py, that of the best constant utilisation, and that on rows to which the
constants were not fitted; and the constants as a fit to these files finds them. Of steps of llmx
(`scripts/bench_gpu.py`) also the memory; two constants are from them (docs/performance.md).

`--cpu`: 12 small models are trained for some steps on this machine's CPU; their step times beside
those that the planner computes from the file of `python -m llmx.plan calibrate`, which is written
first if it does not exist.
"""

import argparse
import math
import pathlib
import sys

import numpy as np

from llmx import config
from llmx.aot import topologies
from llmx.config import flags as flags_lib
from llmx.config import utilization
from llmx.model import costs
from llmx.plan import (
    calibrate,
    candidates,
    compiled_programs,
    machines,
    measured_steps,
    search_report,
    small_models,
    step_time,
    timed_runs,
)
from llmx.plan.compiled_programs import Program
from llmx.plan.measured_steps import Table, Trainer
from llmx.plan.options import pasted
from llmx.plan.search import ADMITTED, Option, Search
from llmx.runtime import launch

ROOT = pathlib.Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs"
PROGRAMS = ROOT / "tests" / "golden" / "programs.jsonl"
TABLES = sorted((ROOT / "tests" / "golden" / "steps").glob("*.csv"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--times", nargs="*", type=pathlib.Path, metavar="CSV", help="compare step times"
    )
    parser.add_argument("--splits", type=int, default=10, help="random halves, default 10; 0: none")
    parser.add_argument(
        "--programs", nargs="?", type=pathlib.Path, const=PROGRAMS, metavar="JSONL",
        help="compare memory, bytes sent and estimated times",
    )  # fmt: skip
    parser.add_argument("--compile", action="store_true", help="compile the programs first")
    parser.add_argument("--search", action="store_true", help="compare searches with configs")
    parser.add_argument(
        "--cpu", nargs="?", type=pathlib.Path, const=pathlib.Path("cpu.json"), metavar="JSON",
        help="compare steps on this machine",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=10, help="of the steps with --cpu (10)")
    flags = parser.parse_args()
    if flags.times is None and flags.programs is None and flags.cpu is None and not flags.search:
        parser.error("nothing to compare: add --times, --programs, --search or --cpu")
    if flags.splits < 0:
        parser.error(f"--splits {flags.splits}: give 0 or more")
    try:
        compare(flags)
    except (OSError, ValueError) as error:  # of a file that the user gave
        parser.error(str(error))


def compare(flags: argparse.Namespace) -> None:
    if flags.search:
        compare_search()
    if flags.cpu is not None:
        compare_cpu(flags.cpu, flags.rounds)
    if flags.programs is not None:
        if flags.compile:
            compile_again(flags.programs)
        print_programs(compiled_programs.read(flags.programs))
    if flags.times is not None:
        compare_times(flags)


def compile_again(path: pathlib.Path) -> None:
    """Every line as `llmx.aot` finds it now; one that does not compile is left as it was."""
    programs = compiled_programs.read(path)
    for number, program in enumerate(programs):
        programs[number] = compiled_programs.compiled(program, CONFIGS) or program
        path.write_text("".join(f"{compiled_programs.to_line(one)}\n" for one in programs))
        print(f"compiled {number + 1} of {len(programs)}: {program.name}", flush=True)


def print_programs(programs: list[Program]) -> None:
    """What is counted of each program, and the errors; beside them those of one constant."""
    for program in (one for one in programs if not one.peak):
        print(f"not compiled: {program.name}")
    programs = [program for program in programs if program.peak]
    print(
        f"{'step s':>8} {'counted':>8} {'peak GiB':>9} {'counted':>8} {'bytes sent':>11}  program"
    )
    found = [compiled_programs.errors(program, CONFIGS) for program in programs]
    for program, errors in zip(programs, found, strict=True):
        worst = max(errors.sent.values(), key=abs, default=0.0)
        time = f"{program.seconds['step']:8.3f} {errors.step:+8.1%}"
        print(
            f"{time} {program.peak / 2**30:9.2f} {errors.peak:+8.1%} {worst:+11.2%}  {program.name}"
        )
    print_mean("memory", [errors.peak for errors in found])
    ratios = [program.peak / max(program.state, 1) for program in programs]
    print_constant(ratios, "{:.2f} x the state")
    print_mean("step", [errors.step for errors in found])
    for platform, names in (("TPU", topologies.TPUS), ("GPU", topologies.GPUS)):
        chosen = [program.topology.split(":")[0].split("@")[-1] in names for program in programs]
        own = [errors.step for errors, is_own in zip(found, chosen, strict=True) if is_own]
        print_mean(f"  on {platform}", own)
        ratios = [
            program.seconds["step"] / ideal_seconds(program)
            for program, is_own in zip(programs, chosen, strict=True)
            if is_own
        ]
        print_constant(ratios, "{:.2f} x the model's FLOPs at the peak")


def ideal_seconds(program: Program) -> float:
    """Of a step, if all devices reached their peak."""
    run, topology = compiled_programs.resolved(program, CONFIGS)
    reached = utilization.of(run, topology.chip, topology.num_devices)
    return reached.shares(run.batch.size * run.batch.sequence_length)["mfu"]


def print_mean(what: str, errors: list[float]) -> None:
    if not errors:
        print(f"{what}: none")
        return
    sizes = np.abs(errors)
    within = f"{(sizes <= 0.1).sum()} within 10%"
    print(f"{what}: mean {sizes.mean():.1%}, worst {sizes.max():.1%} of {len(sizes)}; {within}")


def print_constant(ratios: list[float], what: str) -> None:
    """The errors of the constant that suits these best; nothing where there are none."""
    if not ratios:
        return
    ratios = np.array(ratios)
    constant = min(ratios, key=lambda ratio: np.abs(ratio / ratios - 1).mean())
    errors = np.abs(constant / ratios - 1)
    print(
        f"  one constant, {what.format(constant)}: mean {errors.mean():.1%}, worst "
        f"{errors.max():.1%}"
    )


# By machine: configs on what their docstrings name, and where one layout alone is far from best.
SEARCHES = (
    ("gpt2_124m", "v5e:2x4"), ("qwen3_0.6b", "v5e:2x4"), ("gemma3_1b", "2@v5e:2x2"),
    ("llama3_8b", "v5p:2x2x2"), ("llama3_8b", "h100:8"), ("llama3_8b_v5e", "v5e:2x4"),
    ("llama3_128k", "v5p:2x2x4"), ("llama3_70b", "v5p:4x4x4"), ("llama3_70b_pipeline", "h100:8x8"),
    ("gpt3_175b", "v5p:8x8x8"), ("llama3_405b", "h100:128x8"), ("llama3_405b", "v5p:16x16x16"),
)  # fmt: skip
FSDP, EVEN = "fsdp alone", "even split"


def compare_search() -> None:
    """Searches, beside configs and two plain rules."""
    print(f"{'best s':>8} {'config':>8} {FSDP:>11} {EVEN:>11}  counted  run: what is best")
    for name, topology in SEARCHES:
        machine = machines.parse(topology)
        _, config, _ = flags_lib.parse(
            flags_lib.parser("validate_planner", ""), [f"--config={CONFIGS / name}.py"]
        )
        search = search_report.make(config, machine)
        found = search.find(most=search_report.MOST_COUNTED)
        candidate = search.own and candidates.of_run(search.own)
        begins = candidate and search.bytes_of(candidate) is not None
        own = search.option(candidate, math.inf) if begins else None
        beside = [plain_rule(search, rule) for rule in (FSDP, EVEN)]
        steps = ["-" if one is None else f"{one.step:.4g}" for one in (own, *beside)]
        print(
            f"{found.best.step:8.4g} {steps[0]:>8} {steps[1]:>11} {steps[2]:>11} {found.counted:8}"
            f"  {name} {topology}: {pasted(candidates.flags(found.best.candidate, config))}",
            flush=True,
        )


def plain_rule(search: Search, rule: str) -> Option | None:
    """The fastest with the mesh of a rule that fits; None where none does."""
    num, limit = search.space.num_devices, ADMITTED * search.machine.topology.hbm_bytes
    side = 2 ** (round(math.log2(num)) // 3)
    sequence, tensor = (1, 1) if rule == FSDP else (side, side)
    options = []
    for group in search.space.groups():
        if group.stage > 1 or (group.sequence, group.tensor) != (sequence, tensor):
            continue
        place = next(
            (one for one in search.space.placements(group)
             if one.layout == "zero3" and one.gather == "layer"), None,
        )  # fmt: skip
        for text in search.space.remats_of(group) if place else ():
            candidate = search.space.candidate(group, place, text)
            if (search.bytes_of(candidate) or math.inf) <= limit:
                options.append(search.option(candidate, limit))
    return min(options, key=lambda one: one.order, default=None)


def compare_cpu(path: pathlib.Path, rounds: int) -> None:
    """Steps of small models on this machine."""
    if not path.exists() and calibrate.main(["--out", str(path)]):
        sys.exit(2)
    launch.start(config.default().launch)
    machine = machines.parse("cpu:1", path)
    runs = {
        name: small_models.run_of(family, batch, **changes)
        for name, (family, batch, changes) in small_models.MODELS.items()
    }
    note = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    seconds = small_models.measured(runs, rounds, note)
    measured = np.array(list(seconds.values()))
    predicted = np.array([step_time.of(run, machine).step for run in runs.values()])
    flops = np.array([
        run.batch.size * run.batch.sequence_length * costs.training_flops_per_token(
            run.model, sequence_length=run.batch.sequence_length)
        for run in runs.values()
    ])  # fmt: skip
    rates = flops / measured
    rate = min(rates, key=lambda rate: np.abs(rates / rate - 1).mean())
    print(f"{'measured s':>11} {'predicted s':>11} {'error':>7} {'constant':>8}  model")
    for name, one, ours, constant in zip(runs, measured, predicted, rates / rate, strict=True):
        run = runs[name]
        what = (
            f"{name} wide, {run.model.num_layers} layers, {run.batch.size} x "
            f"{run.batch.sequence_length}, {run.precision}, remat {run.remat}"
        )
        print(f"{one:11.4f} {ours:11.4f} {ours / one - 1:7.1%} {constant - 1:8.1%}  {what}")
    errors, constants = np.abs(predicted / measured - 1), np.abs(rates / rate - 1)
    print(
        f"mean {errors.mean():.1%}, worst {errors.max():.1%}; with constant {rate / 1e9:.3g} "
        f"GFLOP/s mean {constants.mean():.1%}, worst {constants.max():.1%}"
    )


def compare_times(flags: argparse.Namespace) -> None:
    paths = flags.times or TABLES
    own = [path for path in paths if timed_runs.is_table(path)]
    for path in own:
        print_runs(path.stem, timed_runs.read(path))
    tables = [measured_steps.read(path) for path in paths if path not in own]
    for table in tables:
        print_rows(table)
    for trainer in (measured_steps.A100, measured_steps.H100):
        own = [table for table in tables if table.trainer is trainer]
        if own:
            print_summary(trainer, own, flags.splits)


def print_runs(name: str, runs: list[timed_runs.Run]) -> None:
    """Steps of llmx: of each row the errors of the step time and of the peak."""
    columns = f"{'measured s':>11} {'predicted s':>11} {'error':>7} {'peak GiB':>9} {'error':>7}"
    print(f"\n{name}\n{columns}  row")
    for run in runs:
        print(
            f"{run.seconds:11.4f} {run.predicted:11.4f} {run.step_error:+7.1%} "
            f"{run.peak / 2**30:9.2f} {run.peak_error:+7.1%}  {run.name}"
        )
    print_mean("step", [run.step_error for run in runs])
    print_mean("memory", [run.peak_error for run in runs])


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
