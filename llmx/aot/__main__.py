"""Compiles the train step for a machine that is not here, and prints its cost report:

    python -m llmx.aot --config configs/llama3_8b.py --topology v5p:2x2x2 [--suggest] [--json]
        [--trace step.json]

The step is the one that `llmx.train` runs, compiled by the compiler that would compile it there;
state and batch are shapes only. Exit codes: 0 the program fits, 1 it does not, 2 the config or the
topology is wrong, or the compiler refuses the program.
"""

import json
import pathlib
import sys
from collections.abc import Sequence

from llmx.runtime import exits, printable

if __name__ == "__main__":
    exits.silent_interrupts()

from llmx.aot import compiler, report, suggest, timeline, topologies
from llmx.aot.compiler import CompileError
from llmx.aot.report import Result, Trial
from llmx.config import checks, flags
from llmx.data import transient
from llmx.runtime import launch, output_paths

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
        problems = [
            *problems,
            *output_paths.folder_problems("--save-hlo", args.save_hlo),
            *output_paths.file_problems("--trace", args.trace),
        ]
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
        printable.to_stderr(transient.told(error))
        return transient.exit_code(error, WRONG)
    exits.show(
        json.dumps(report.to_json(result, trials)) if args.json else report.text(result, trials)
    )
    return FITS if result.fits else DOES_NOT_FIT


def save(result: Result, folder: pathlib.Path, trials: Sequence[Trial] | None = None) -> None:
    """Writes the program before and after optimisation, and the cost report as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "before_optimization.txt").write_text(result.before)
    (folder / "after_optimization.txt").write_text(result.after)
    document = json.dumps(report.to_json(result, trials), indent=2)
    (folder / "cost_report.json").write_text(f"{document}\n")


if __name__ == "__main__":
    sys.exit(main())
