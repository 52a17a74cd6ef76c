"""Writes the records of a source as shards: of files in a cache or a folder, or of a law.

Interrupted, a build continues behind its last finished shard, to the same bytes.
"""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

from llmx.data import build as token_build
from llmx.data import full_disk
from llmx.data import shards as token_shards
from llmx.data import sources as sources_lib
from llmx.data.records import generated, parquet, shards, tsv
from llmx.data.records import schema as schema_lib
from llmx.data.records import sources as record_sources
from llmx.data.records.config import RecordsConfig
from llmx.data.records.schema import Chunk, Schema

_VERSION = 1  # of what the records of the same source are
_THREADS = 4
Log = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What determines the shards of a source."""

    source: str
    files: tuple[sources_lib.InputFile, ...]  # () of a law
    law: generated.Law | None
    schema: Schema
    label: str
    skip_bad: bool

    @functools.cached_property
    def identity(self) -> str:
        """A hash of all that the records depend on; of files their content."""
        if self.law is not None:
            what: dict[str, Any] = dataclasses.asdict(self.law)
        else:
            what = {
                "files": sources_lib.content_hash(self.files), "label": self.label,
                "kinds": [record_sources.is_parquet(file.path) for file in self.files],
                "skip_bad": self.skip_bad,
            }  # fmt: skip
        return token_shards.json_hash(
            {"version": _VERSION, "schema": self.schema.as_json(), "of": what}
        )


def make_recipe(source: str, config: RecordsConfig, *, skip_bad: bool) -> Recipe:
    """Of files or of a law. Raises ValueError for files that cannot be read."""
    law, files = None, []
    if source.startswith(generated.PREFIXES):
        law = generated.parse(source)
    else:
        for path in record_sources.paths_of(source):
            found = os.stat(path)
            kind = "parquet" if record_sources.is_parquet(path) else "text"
            files.append(
                sources_lib.InputFile(
                    path, kind, found.st_size, found.st_mtime_ns, found.st_ctime_ns
                )
            )
    return Recipe(
        source, tuple(files), law, record_sources.schema_of(source, config), config.label, skip_bad
    )


@full_disk.names_path
def write(folder: pathlib.Path, recipe: Recipe, *, log: Log = print) -> None:
    """Writes the shards and the index, or what of them is missing.

    Raises ValueError for records that cannot be read, or where there are none.
    """
    entries = shards.read_progress(folder, recipe.identity)
    made = _of_law if recipe.law is not None else _of_files
    for entry in made(folder, recipe, entries):
        entries.append(entry)
        shards.write_progress(folder, recipe.identity, entries)
    if not entries:
        raise ValueError(f"{recipe.source!r} holds no records: name files with some")
    if skipped := sum(entry["skipped"] for entry in entries):
        log(f"data: {recipe.source}: left out by data.skip_bad: {skipped:,} lines")
    shards.write_index(folder, recipe.schema, recipe.identity, entries)


def _of_law(folder: pathlib.Path, recipe: Recipe, done: list[dict]) -> Iterator[dict]:
    """The entries of the shards that are missing; threads make some at a time."""

    def one(number: int) -> dict:
        chunk, _ = generated.shard(recipe.law, number)
        return shards.write_shard(folder, number, recipe.schema, chunk, skipped=0, end=number + 1)

    threads = min(_THREADS, len(os.sched_getaffinity(0)))
    with futures.ThreadPoolExecutor(threads) as pool:
        yield from pool.map(one, range(len(done), recipe.law.num_shards))


def _of_files(folder: pathlib.Path, recipe: Recipe, done: list[dict]) -> Iterator[dict]:
    """The same; lines that are left out behind the last record are counted with its shard."""
    number, waiting, skipped = len(done), [], 0
    start = end = done[-1]["end"] if done else [0, 0, 0]

    def closed(end: list[int]) -> dict:
        chunk = schema_lib.concatenated(waiting)
        return shards.write_shard(folder, number, recipe.schema, chunk, skipped=skipped, end=end)

    for chunk, left_out, end in _read(recipe, start):
        waiting.append(chunk)
        skipped += left_out
        if sum(len(one.labels) for one in waiting) >= generated.SHARD_RECORDS:
            yield closed(end)
            number, waiting, skipped = number + 1, [], 0
    if any(len(one.labels) for one in waiting):
        yield closed(end)
    elif skipped and done:
        done[-1]["skipped"] += skipped


def _read(recipe: Recipe, start: list[int]) -> Iterator[tuple[Chunk, int, list[int]]]:
    """Chunks of the files, with how many lines are left out, and where reading goes on: (file,
    byte or record, line)."""
    first, offset, lines = start
    for index, file in enumerate(recipe.files[first:], first):
        if index > first:
            offset = lines = 0
        if record_sources.is_parquet(file.path):
            read = parquet.read(file.path, recipe.schema, label=recipe.label, start=offset)
            for chunk, after in read:
                yield chunk, 0, [index, after, 0]
            continue
        for block in tsv.read(
            file.path, recipe.schema, skip_bad=recipe.skip_bad, offset=offset, lines=lines
        ):
            yield block.chunk, block.skipped, [index, block.offset, block.lines]


def cached(recipe: Recipe, *, cache_dir: pathlib.Path, log: Log) -> pathlib.Path:
    """The folder of the recipe's shards in the cache; the first call builds it."""
    final = cache_dir / token_build.cache_name(recipe.source, recipe.identity)

    def build(work: pathlib.Path) -> None:
        log(f"data: {recipe.source}: records to {final}")
        write(work, recipe, log=log)

    token_build.build_once(final, shards.INDEX, build, name=recipe.source, log=log)
    return final
