"""Compares runs on one HTML page that loads nothing:

    python -m llmx.report runs/a runs/b --output report.html

The runs may still be training, and may be of unequal length. Exit codes: 0; 2 where a work
directory or the output is wrong; 75 where a disk failed.
"""

import pathlib
import sys
from collections.abc import Sequence

from llmx.runtime import exits, printable

if __name__ == "__main__":
    exits.silent_interrupts()

from llmx.data import full_disk, transient
from llmx.report import page, runs
from llmx.runtime import output_paths


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the page and prints its path; returns the exit code."""
    command = printable.Parser(
        prog="python -m llmx.report",
        description="Compare runs on one HTML page: loss, throughput, gradient norm, learning "
        "rate, and what differs between their configs.",
    )
    command.add_argument("workdirs", nargs="+", metavar="WORKDIR", help="of a run")
    command.add_argument("--output", default="report.html", help="the page (default report.html)")
    args = command.parse_args(argv)
    try:
        problems = runs.problems(args.workdirs)
        if problems := [*problems, *output_paths.file_problems("--output", args.output)]:
            printable.to_stderr("\n".join(problems))
            return exits.REFUSED
        found = [
            runs.read(workdir, name)
            for workdir, name in zip(args.workdirs, runs.names(args.workdirs), strict=True)
        ]
        if not any(run.num_steps for run in found):
            raise ValueError(
                f"{', '.join(args.workdirs)}: no step is recorded yet: nothing to show"
            )
        write = full_disk.names_path(pathlib.Path.write_text)
        write(pathlib.Path(args.output), page.render(found), encoding="utf-8")
    except (ValueError, OSError) as error:
        printable.error(transient.told(error))
        return transient.exit_code(error)
    for note in (note for run in found for note in run.notes):
        printable.to_stderr(f"warning: {note}")
    exits.show(args.output)
    return exits.DONE


if __name__ == "__main__":
    sys.exit(main())
