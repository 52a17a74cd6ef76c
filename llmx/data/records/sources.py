"""Sources of records: which files a source names, in a fixed order, and their columns.

A source is "generated:N", "generated-history:N", "shards:DIR", or a file, folder or glob of lines
or Parquet.
"""

import glob
import os
import pathlib
from collections.abc import Iterator

from llmx.data import remote
from llmx.data import sources as text_sources
from llmx.data.records import config as config_lib
from llmx.data.records import generated, shards
from llmx.data.records.config import RecordsConfig
from llmx.data.records.schema import Schema

LINES = (".tsv", ".txt", ".tsv.gz", ".txt.gz", ".tsv.zst", ".txt.zst")
PARQUET = ".parquet"


def is_parquet(path: str) -> bool:
    return path.lower().endswith(PARQUET)


def paths_of(source: str) -> list[str]:
    """The files of a source, in order; of a folder those of a known ending."""
    path = os.path.expanduser(source)
    if os.path.isdir(path):
        walked = (os.path.join(at, name) for at, _, names in os.walk(path) for name in names)
        return sorted(one for one in walked if one.lower().endswith((*LINES, PARQUET)))
    if glob.has_magic(path):
        return sorted(filter(os.path.isfile, glob.glob(path, recursive=True)))
    return [path] if os.path.isfile(path) else []


def problems(source: str, config: RecordsConfig) -> Iterator[str]:
    """What is wrong with a source, without reading its content."""
    if source.startswith(generated.PREFIXES):
        try:
            generated.parse(source)
        except ValueError as error:
            yield str(error)
        return
    if source.startswith(text_sources.SHARDS_PREFIX):
        try:
            shards.read_index(folder_of(source))
        except ValueError as error:
            yield str(error)
        return
    if refused := remote.refusal("", source, "copy the files, and name the copies"):
        yield refused
        return
    if not (paths := paths_of(source)):
        yield (
            f"{source!r} names no files of records: name '{generated.PREFIXES[0]}100000', "
            f"'shards:DIR', or a file, folder or glob of {', '.join((*LINES, PARQUET))}"
        )
        return
    lists = [one for one in config.features if ":" in one or "*" in one]
    lines = [path for path in paths if not is_parquet(path)]
    if lists and lines:
        yield (
            f"data.records.features has {lists[0]!r}, and {lines[0]} is of lines, which have no "
            "weights and one id of each feature: write Parquet"
        )


def folder_of(source: str) -> pathlib.Path:
    return pathlib.Path(os.path.expanduser(source.removeprefix(text_sources.SHARDS_PREFIX)))


def schema_of(source: str, config: RecordsConfig) -> Schema:
    """The columns of a source's records; `problems` has found nothing."""
    if source.startswith(generated.PREFIXES):
        return generated.parse(source).schema
    if source.startswith(text_sources.SHARDS_PREFIX):
        return shards.read_index(folder_of(source))[0]
    return config_lib.schema_of(config)
