"""Compiles the train step for a machine that is not here, and prints its cost report:

    python -m llmx.aot --config configs/llama3_8b.py --topology v5p:2x2x2 [--suggest] [--json]
        [--trace step.json]

The step is the one that `llmx.train` runs, compiled by the compiler that would compile it there;
state and batch are shapes only. Exit codes: 0 the program fits, 1 it does not, 2 the config or the
topology is wrong, or the compiler refuses the program.
"""

import json
import os
import pathlib
import sys
from collections.abc import Sequence

from llmx.runtime import exits

if __name__ == "__main__":
    exits.silent_interrupts()

from llmx.aot import compiler, report, suggest, timeline, topologies
from llmx.aot.compiler import CompileError
from llmx.aot.report import Result, Trial
from llmx.config import checks, flags
from llmx.runtime import launch

FITS, DOES_NOT_FIT, WRONG = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the cost report; returns the exit code."""
    command = flags.parser("llmx.aot", "Compile the train step for a machine that is not here.")
    command.add_argument(
        "--topology", required=True,
        help="the machine, e.g. v5p:2x2x2, 4@v5e:16x16 (four slices), h100:4x8 (docs/aot.md)",
    )  # fmt: skip
    command.add_argument("--json", action="store_true", help="print one JSON object")
    variants = "compile variants that fit; if the config fits, faster ones that fit too"
    command.add_argument("--suggest", action="store_true", help=variants)
    phases = "with sync.strategy: which program; mean, compressed, local, variance, or exchange"
    command.add_argument("--phase", default="", help=phases)
    written = "write the program before and after optimisation, and cost_report.json"
    command.add_argument("--save-hlo", metavar="DIR", default="", help=written)
    trace = "write the estimated timeline of a step as a Chrome trace, for ui.perfetto.dev"
    command.add_argument("--trace", metavar="FILE", default="", help=trace)
    try:
        args, run, problems = flags.parse(command, argv)
        try:
            topology = topologies.parse(args.topology)
        except ValueError as error:
            checks.resolve(run, problems=[*problems, str(error)])
            raise  # not reached: resolve raises, together with the config's own problems
        for option, path in (("--save-hlo", args.save_hlo), ("--trace", args.trace)):
            problems = [*problems, *_cannot_write(option, path)]
        run = compiler.resolve(run, topology, problems=problems)
        launch.note(f"compiling for {topology.text}")
        result = compiler.compile(run, topology, phase=args.phase)
        trials = suggest.suggest(result, log=launch.note) if args.suggest else None
        if args.save_hlo:
            save(result, pathlib.Path(args.save_hlo), trials)
        if args.trace and result.timeline is None:
            launch.note("--trace: the program has no estimated time, so nothing was written")
        elif args.trace:
            trace = timeline.to_trace(result.timeline)
            pathlib.Path(args.trace).write_text(f"{json.dumps(trace)}\n")
    except (ValueError, OSError, CompileError) as error:
        print(error, file=sys.stderr)
        return WRONG
    print(json.dumps(report.to_json(result, trials)) if args.json else report.text(result, trials))
    return FITS if result.fits else DOES_NOT_FIT


def _cannot_write(option: str, path: str) -> list[str]:
    """What is wrong with a path to write to, before anything is compiled."""
    if not path:
        return []
    folder = pathlib.Path(path).absolute()
    if option == "--trace":
        if folder.is_dir():
            return [f"{option}={path} is a folder: name a file"]
        folder = folder.parent
        if not folder.is_dir():
            return [f"{option}={path}: the folder {folder} does not exist: create it"]
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return [f"{option}={path}: {folder} cannot be written to: use another folder"]
    return []


def save(result: Result, folder: pathlib.Path, trials: Sequence[Trial] | None = None) -> None:
    """Writes the program before and after optimisation, and the cost report as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "before_optimization.txt").write_text(result.before)
    (folder / "after_optimization.txt").write_text(result.after)
    document = json.dumps(report.to_json(result, trials), indent=2)
    (folder / "cost_report.json").write_text(f"{document}\n")


if __name__ == "__main__":
    sys.exit(main())
