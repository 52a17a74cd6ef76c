"""Exports the tables and the network of a run.

    python -m llmx.tables export --workdir W --output DIR
    python -m llmx.tables export --workdir W --output DIR2 --since DIR    # rows that have changed
    python -m llmx.tables merge DIR2 --output DIR3                         # whole again
    python -m llmx.tables verify DIR2

No accelerator is used, and memory does not depend on the size of the tables. --format parquet is
for other programs; all that reads exports takes both formats, and merge makes one of the other.
"""

import argparse
import os
import pathlib
import sys
from collections.abc import Mapping

from llmx.data import remote, transient
from llmx.runtime import exits, output_paths, printable

if __name__ == "__main__":
    exits.silent_interrupts()


def make_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = printable.Parser("python -m llmx.tables", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    export = commands.add_parser("export", help="writes the tables of a run's checkpoint")
    export.add_argument("--workdir", required=True, help="the run's work directory")
    export.add_argument("--step", type=int, help="this checkpoint; by default the newest")
    export.add_argument(
        "--optimizer-state", action="store_true", help="also what the optimizer keeps of each row"
    )
    export.add_argument(
        "--since", metavar="DIR", help="an earlier export: only rows that have changed since"
    )
    merge = commands.add_parser("merge", help="makes an increment whole, or another format of it")
    merge.add_argument("export", help="a folder that export wrote")
    for command in (export, merge):
        command.add_argument("--output", required=True, metavar="DIR", help="a new folder")
        command.add_argument(
            "--format", choices=("files", "parquet"), default="files",
            help="files to map into memory, or one of Parquet for each table",
        )  # fmt: skip
    verify = commands.add_parser("verify", help="computes all checksums of an export again")
    verify.add_argument("export", help="its folder")
    return parser


def export(args: argparse.Namespace) -> str:
    """Writes what a checkpoint has."""
    from llmx import config as config_lib
    from llmx.checkpoint import identity, mirror, saved_tables
    from llmx.config import table_checks
    from llmx.runtime import launch
    from llmx.tables import exporting, exports, row_optimizers

    workdir, output = mirror.reading(args.workdir), _new(args.output)
    since = exports.open_export(args.since, verify=True) if args.since else None
    run = config_lib.load_run_with_tables(workdir)
    tables, features = table_checks.tables_of(run), table_checks.features_of(run)
    if not tables:
        raise ValueError(f"{args.workdir} is a run without sparse tables: it has nothing to export")
    if run.tables.cache_rows:
        raise ValueError(
            f"{args.workdir} has tables.cache_rows={run.tables.cache_rows}: rows of the host have "
            "no export; train without a cache, or read checkpoints/STEP/host_rows"
        )
    if double := [one.name for one in features if one.hashes > 1]:
        raise ValueError(
            f"{args.workdir}: features {', '.join(double[:3])} have two rows for each id "
            "(data.records.ids='double'), which exports do not: use data.records.ids='rows'"
        )
    slots = dict(row_optimizers.make(run.tables).slots)
    saved = saved_tables.open_saved(
        workdir, tables, features, slots=slots, step=args.step, log=launch.log
    )
    kept = slots if args.optimizer_state else {}
    content = exporting.Content(
        saved.step, tables, features, kept, run.tables.optimizer, saved.dense,
        identity.as_json(run.model),
    )  # fmt: skip
    stored = exporting.write(
        output, content, saved.source, files=_FILES[args.format], since=since,
        block_rows=lambda table: saved.block_rows(
            table, slots=len(kept), num_bytes=exporting.BLOCK_BYTES
        ),
    )  # fmt: skip
    return f"step {saved.step} of {args.workdir} is now in {output}: {_shown(stored)}"


def merge(args: argparse.Namespace) -> str:
    """Writes an increment with all that it is behind as a whole export."""
    from llmx.tables import by_id, exporting, exports

    opened, output = exports.open_export(args.export, verify=True), _new(args.output)
    manifest = opened.manifest
    content = exporting.Content(
        opened.step, list(opened.tables.values()), list(opened.features.values()),
        manifest["slots"], manifest["optimizer"], opened.dense, manifest["model"],
    )  # fmt: skip
    stored = exporting.write(
        output, content, opened, files=_FILES[args.format],
        block_rows=lambda table: by_id.block_rows(
            table, 1, 1, slots=len(opened.slots), num_bytes=exporting.BLOCK_BYTES
        ),
    )  # fmt: skip
    return f"{args.export} is now whole in {output}: {_shown(stored)}"


def verify(args: argparse.Namespace) -> str:
    """Raises ValueError where a file has changed."""
    from llmx.tables import exports

    opened = exports.open_export(args.export, verify=True)
    return f"{args.export}: step {opened.step}, {len(opened.tables)} tables: good"


_FILES = {"files": "npy", "parquet": "parquet"}


def _new(output: str) -> pathlib.Path:
    """The folder to write. Raises ValueError where something is there."""
    remote.require_local("--output=", output, "write a local folder, and copy that")
    folder = pathlib.Path(os.path.expanduser(output))
    output_paths.require_new(folder)
    return folder


def _shown(stored: Mapping[str, int]) -> str:
    tables = "1 table" if len(stored) == 1 else f"{len(stored)} tables"
    return f"{sum(stored.values()):,} rows of {tables}"


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 done, 2 the input is wrong, 74 it cannot be written, 75 a disk or a store
    failed, 130 after Ctrl-C."""
    args = make_parser().parse_args(argv)
    os.environ["JAX_PLATFORMS"] = "cpu"
    try:
        exits.show({"export": export, "merge": merge, "verify": verify}[args.command](args))
        return exits.DONE
    # RuntimeError: no checkpoint of the run is good.
    except (ValueError, RuntimeError) as error:
        printable.error(transient.told(error))
        return transient.exit_code(error)
    except OSError as error:
        printable.error(transient.told(error))
        return transient.exit_code(error, exits.UNSAVED)
    except KeyboardInterrupt:  # what was written is removed
        print("interrupted: run the same command again", file=sys.stderr)
        return exits.INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
