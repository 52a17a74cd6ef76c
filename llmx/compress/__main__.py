"""Makes a smaller run of a trained one, stage by stage:

    python -m llmx.compress --workdir RUN --recipe configs/compress_quickstart.py --output NEW

RUN is a work directory, WORKDIR@STEP, or a Hugging Face directory. After each stage the run is
measured and kept, so that a killed command goes on. NEW is a run as any other, with compress.png
and compress.json in it. Exit codes: 0; 2 where run, recipe or output are wrong; 3 where training
stopped, by a signal or by its guard: the same command goes on; 130 after Ctrl-C elsewhere.
"""

import argparse
import json
import sys
from collections.abc import Sequence

from llmx.runtime import exits, printable

if __name__ == "__main__":
    exits.silent_interrupts()


def main(argv: Sequence[str] | None = None) -> int:
    """Compresses a run; returns the exit code."""
    from llmx.compress.stages import STAGES

    about = "\n".join(f"  {name:<14} {stage.about}" for name, stage in STAGES.items())
    command = printable.Parser(
        prog="python -m llmx.compress", allow_abbrev=False,
        description="Makes a smaller run of a trained one, by the stages of a recipe.",
        epilog=f"stages:\n{about}\ndocs/compression.md has their options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    command.add_argument(
        "--workdir", required=True, help="of the run, WORKDIR@STEP, or a Hugging Face directory"
    )
    command.add_argument(
        "--recipe", required=True, help="a Python file with get_recipe(): configs/compress_*.py"
    )
    command.add_argument("--output", required=True, help="a new directory; or to go on, the same")
    command.add_argument("--json", action="store_true", help="print the measurements as JSON")
    args = command.parse_args(argv)
    from llmx.compress import command as command_lib
    from llmx.compress import recipe, report
    from llmx.compress.stages import Stopped
    from llmx.data import transient

    try:
        rows = command_lib.compress(args.workdir, recipe.load(args.recipe), args.output)
    except Stopped as stopped:
        printable.to_stderr(f"{stopped}; the same command goes on from there")
        return exits.STOPPED
    # RuntimeError: no checkpoint of the run is good, or the devices have no room for it.
    except (ValueError, RuntimeError, OSError) as error:
        printable.error(transient.told(error))
        return transient.exit_code(error)
    if args.json:
        exits.show(json.dumps([vars(row) for row in rows]))
        return exits.DONE
    from rich.console import Console

    console = Console()
    console.width = max(console.width, report.WIDTH)
    console.print(report.table(rows))
    return exits.DONE


if __name__ == "__main__":
    sys.exit(main())
