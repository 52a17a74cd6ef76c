"""Shows what a step takes before anything runs: of a config on a machine, what a device holds and
sends; of a pipeline its bubble, its memory, its times, a picture:

    python -m llmx.plan --config configs/llama3_8b.py --machine v5p:2x2x2
    python -m llmx.plan --config configs/llama3_8b.py --machine v5p:2x2x2 --html plan.html
    python -m llmx.plan --schedule zb_v --stages 4 --microbatches 16 --out schedule.png
    python -m llmx.plan --config configs/llama3_70b_pipeline.py --chip v5p

`--table` reads a schedule from a file (see `schedule.read_csv`); `--csv` writes one to start from.
With a config, times are those of its layers, and the best cut of them into model chunks is compared
with the equal one. With `--machine` what a device holds and sends is counted instead, of any config
(docs/plan.md). Exit codes: 0; 1 if a config does not fit on its machine, or nothing that a
search looked at; 2 if config, machine, schedule, sizes, file or times are wrong, or nothing fits
into `--memory`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from llmx.runtime import exits, printable

if __name__ == "__main__":
    exits.silent_interrupts()

from llmx.data import transient
from llmx.pipeline import schedule, simulate
from llmx.plan import options, schedule_report


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what a schedule or a config's pipeline costs, draws and writes it; the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["calibrate"]:
        from llmx.plan import calibrate

        return calibrate.main(given[1:])
    command = options.parser()
    args, rest = command.parse_known_args(sys.argv[1:] if argv is None else argv)
    if args.config is None and rest:
        command.error(f"unknown arguments: {' '.join(rest)} (config values need --config)")
    try:
        if args.config is None:
            report, lines = show_schedule(args)
        elif args.machine is not None:
            from llmx.plan import run_report

            report, lines = run_report.show(command, args, argv)
        else:
            from llmx.plan import config_report  # jax, which a schedule alone does not need

            report, lines = config_report.show(command, args, argv)
    except (ValueError, OSError) as error:
        printable.to_stderr(transient.told(error))
        return transient.exit_code(error)
    exits.show(json.dumps(report) if args.json else lines)
    of_machine = args.config is not None and args.machine is not None
    return int(of_machine and not report["memory"]["fits"])


def show_schedule(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The report on a schedule alone, as JSON and text, with the times of the command line."""
    if wrong := options.given(args, options.CONFIG_ONLY):
        raise ValueError(f"{', '.join(wrong)} without --config: name a config file")
    table = options.make_table(args)
    facts = schedule.check(table)
    seconds = {name: vars(args)[name] for name in options.TIMES}
    seconds = options.TIMES | {name: time for name, time in seconds.items() if time is not None}
    timeline = simulate.simulate(table, **seconds)
    free = simulate.simulate(table, **seconds, barriers=False).step_time
    own = args.table is not None
    report = schedule_report.summary(table, facts, timeline.step_time, free, own=own)
    picture, lines = args.out, schedule_report.text(report)
    if picture is None and not args.json:
        picture = f"{table.name}_{table.num_stages}x{table.num_microbatches}.png"
    schedule_report.write(table, facts, timeline, picture=picture, csv=args.csv)
    return report, f"{lines}\npicture: {picture}" if picture else lines


if __name__ == "__main__":
    sys.exit(main())
