"""Writes records as memory-mapped shards: python -m llmx.data.records --source FILES --output DIR.

Interrupted, it continues when run again, to the same bytes. --verify DIR checks a finished folder.
"""

import argparse
import os
import pathlib
import sys
from collections.abc import Iterator

from llmx.data import build as token_build
from llmx.data import transient
from llmx.data.records import build, schema, shards, sources
from llmx.data.records import config as config_lib
from llmx.runtime import bounds, exits, printable


def make_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = printable.Parser(
        prog="python -m llmx.data.records",
        description="Write records of clicks as memory-mapped shards, to train on with "
        "--config.data.format=records --config.data.sources=\"('shards:DIR',)\".",
    )
    add = parser.add_argument
    # fmt: off
    add("--source", metavar="SOURCE", default="",
        help='"generated:N", "generated-history:N", or a file, folder or quoted glob of Criteo\'s '
        "lines (.tsv .txt, also .gz .zst) or .parquet")
    add("--output", metavar="DIR", help="folder to write; new, or to continue")
    add("--label", default="label", metavar="NAME", help="column of the label, of Parquet (label)")
    add("--dense", nargs="*", default=list(schema.CRITEO_DENSE), metavar="NAME",
        help="columns of numbers (I1 ... I13)")
    add("--features", nargs="+", default=list(schema.CRITEO_FEATURES), metavar="NAME[:LENGTH]",
        help="columns of ids, or of lists of up to LENGTH ids (C1 ... C26); NAME*COLUMN has the "
        "weights of its ids in COLUMN; NAME@TABLE has the ids of TABLE")
    add("--rows", type=int, default=1_000_000, metavar="N",
        help="ids are below N; texts are hashed to as many (1000000)")
    add("--ids", default="rows", choices=schema.KINDS,
        help="what an id is, as data.records.ids: a row below N, two such rows by two hashes, or "
        "64 bits (rows)")
    add("--skip-bad", action="store_true", help="leave malformed lines out, counted")
    add("--overwrite", action="store_true", help="discard what an earlier run left in DIR")
    add("--verify", metavar="DIR", help="check every checksum of finished shards, write nothing")
    # fmt: on
    return parser


def _problems(arguments: argparse.Namespace, config: config_lib.RecordsConfig) -> Iterator[str]:
    if not arguments.source:
        yield "--source is missing: name records, such as --source generated:100000"
    if not arguments.output:
        yield "--output is missing: name the folder to write"
    elif os.path.isfile(os.path.expanduser(arguments.output)):
        yield f"--output {arguments.output} is a file: name a folder"
    yield from bounds.problems(config, "data.records.")
    yield from config_lib.problems(config)
    if arguments.source.startswith("shards:"):
        yield f"--source {arguments.source!r} is shards already: name files, or a law"
    elif arguments.source:
        yield from (f"--source {text}" for text in sources.problems(arguments.source, config))


def _refuse(folder: pathlib.Path) -> None:
    raise ValueError(f"another process is writing {folder}: wait for it to end")


def write(arguments: argparse.Namespace, config: config_lib.RecordsConfig) -> None:
    """Writes or continues the shards that the options describe."""
    recipe = build.make_recipe(arguments.source, config, skip_bad=arguments.skip_bad)
    folder = pathlib.Path(os.path.expanduser(arguments.output))
    folder.mkdir(parents=True, exist_ok=True)
    with token_build.exclusive(folder, on_wait=lambda: _refuse(folder)):
        if arguments.overwrite:
            token_build.clear(folder)
        if foreign := token_build.foreign_files(folder):
            raise ValueError(
                f"{folder} holds other files ({', '.join(foreign[:3])}): choose a new or empty one"
            )
        if (folder / shards.INDEX).is_file() and shards.identity_of(folder) != recipe.identity:
            raise ValueError(
                f"{folder} holds the records of another source or other settings (or the files "
                "have changed since): run with --overwrite, or choose another folder"
            )
        if not (folder / shards.INDEX).is_file():
            build.write(folder, recipe)
    _show(shards.open_shards(folder))


def _show(opened: shards.RecordShards) -> None:
    share = opened.num_clicks / opened.num_records
    exits.show(
        f"{opened.folder}: {opened.num_records:,} records, {share:.1%} clicks, "
        f"{len(opened.schema.dense)} numbers, {len(opened.schema.features)} features, "
        f"{len(opened.records)} shards"
    )


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status: 0 done, 2 if the input is wrong."""
    arguments = make_parser().parse_args(argv)
    config = config_lib.RecordsConfig(
        label=arguments.label, dense=tuple(arguments.dense), features=tuple(arguments.features),
        rows=arguments.rows, ids=arguments.ids,
    )  # fmt: skip
    try:
        if arguments.verify:
            _show(shards.open_shards(arguments.verify, verify=True))
            return 0
        if problems := list(_problems(arguments, config)):
            raise ValueError("\n".join(problems))
        write(arguments, config)
    except (ValueError, OSError) as error:
        printable.error(transient.told(error))
        return transient.exit_code(error)
    except KeyboardInterrupt:
        print("interrupted; run the same command again to continue", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
