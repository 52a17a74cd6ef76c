"""The `data` section of a config and every check of it that needs no reading of the data."""

import collections
import dataclasses
import fractions
import math
import os
from collections.abc import Iterator
from typing import Any

from llmx.data import objects, pairs, tokenizers
from llmx.data import sources as sources_lib
from llmx.data.records import config as record_config
from llmx.data.records import sources as record_sources
from llmx.data.records.config import RecordsConfig

RECORDS = "records"
TEXT_FORMATS = ("text", "chat", pairs.FORMAT)  # what becomes tokens
FORMATS = (*TEXT_FORMATS, RECORDS)


def _within(default: float, low: float, high: float, **rules: Any) -> Any:
    """A field with a number from `low` to `high`; `llmx.runtime.bounds` knows the rules."""
    limits = {"at least": low, "at most": high}
    return dataclasses.field(default=default, metadata={"limits": limits, **rules})


def _needing(default: Any, needs: dict) -> Any:
    """A field that has an effect beside some values of other keys."""
    return dataclasses.field(default=default, metadata={"needs": needs})


_OF_TEXT, _OF_TOKENS = {"data.format": ("text",)}, {"data.format": TEXT_FORMATS}


@dataclasses.dataclass
class DataConfig:
    """What to train on, how it becomes tokens, and how rows are cut from it."""

    # Each "stdlib", a file, folder or glob of text, JSONL (also .gz, .zst), Parquet, Arrow or
    # ArrayRecord, or "shards:DIR"; or one "object:NAME" of a program.
    sources: tuple[str, ...] = ("stdlib",)
    # Share of each source in the mixture; () reads every window of every source once an epoch.
    weights: tuple[float, ...] = ()
    tokenizer: str = "auto"  # "bytes", a tokenizer.json, "auto": that of shards, else bytes
    # Train a byte-level BPE of this vocabulary size on the sources; 0 = do not.
    train_tokenizer: int = _within(
        0, tokenizers.MIN_TRAINED_SIZE, tokenizers.MAX_TRAINED_SIZE, unless=0,
        remedy="256 bytes and the end-of-document token are the least; 0 trains none",
    )  # fmt: skip
    # Key of a JSONL record, column of a table or feature with the text
    text_key: str = _needing("text", _OF_TEXT)
    # "text", or "chat": JSONL of conversations, of which the assistant's turns are learned, or
    # "preference": JSONL of pairs, of which one answer is to be preferred; or "records": a label,
    # numbers and ids, for models of clicks
    format: str = dataclasses.field(default="text", metadata={"choices": FORMATS})
    # Jinja file that renders conversations; "" = the tokenizer's own
    chat_template: str = _needing("", {"data.format": TEXT_FORMATS[1:]})
    records: RecordsConfig = dataclasses.field(
        default_factory=RecordsConfig, metadata={"needs": {"data.format": (RECORDS,)}}
    )
    # Begin documents with the start token, where the tokenizer adds one itself
    bos: bool = _needing(True, _OF_TOKENS)
    held_out: float = _within(0.05, 0, 0.5)  # Share of each source kept for evaluation; 0 = none
    shuffle: bool = True  # Visit the windows of every epoch in a new pseudo-random order
    # Fill rows with several documents; otherwise each row is of one document
    pack: bool = _needing(True, _OF_TOKENS)
    # Leave out empty or unreadable files and records (counted in the log) instead of an error.
    skip_bad: bool = False
    # Check the checksum of every shard at start, also of sets too large to be checked by default.
    verify: bool = False
    # Threads that prepare batches; the order does not depend on it. 0 = none.
    num_threads: int = _within(1, 0, 64, of="machine", needs={"data.prefetch": {"not": (0,)}})
    # Batches prepared ahead of the step
    prefetch: int = _within(4, 0, 1024, of="machine", needs={"data.num_threads": {"not": (0,)}})
    # Where token shards made from text are kept; "" = ~/.cache/llmx/data
    cache_dir: str = dataclasses.field(default="", metadata={"of": "machine"})


def problems(config: DataConfig) -> list[str]:
    """What is wrong with the sources, weights and tokenizer together, each with its remedy.

    Reads no data. Types and bounds of the values are checked with the rest of the config.
    """
    found = list(_record_problems(config)) if config.format == RECORDS else _text_problems(config)
    if os.path.isfile(os.path.expanduser(config.cache_dir)):
        found.append(f"data.cache_dir={config.cache_dir!r} is a file: give a folder")
    return found


def _record_problems(config: DataConfig) -> Iterator[str]:
    """Those of records. What is about tokens, such as `pack`, means nothing for them."""
    if not config.sources:
        yield 'data.sources is empty: name at least one, such as ("generated:100000",)'
    yield from record_config.problems(config.records)
    for source, count in collections.Counter(config.sources).items():
        if count > 1:
            yield f"data.sources names {source!r} {count} times: name it once"
        yield from (f"data.sources: {text}" for text in _of_records(source, config))
    if config.weights:
        yield (
            f"data.weights={config.weights} with data.format='records': an epoch visits each "
            "record once; set data.weights=()"
        )
    if config.tokenizer != "auto" or config.train_tokenizer:
        yield (
            "data.tokenizer and data.train_tokenizer have no use with data.format='records': "
            "leave them out"
        )


def _of_records(source: str, config: DataConfig) -> Iterator[str]:
    """What is wrong with a source of records, without reading its content."""
    if source.startswith(objects.PREFIX):
        yield f"{source!r} is an object of a program, which gives rows of tokens: name records"
    else:
        yield from record_sources.problems(source, config.records)


def _text_problems(config: DataConfig) -> list[str]:
    found = [*_source_problems(config), *_tokenizer_problems(config), *_chat_problems(config)]
    if not config.text_key:
        found.append(
            "data.text_key='' is not a field name: give the JSONL key or column that "
            'holds the text, such as "text"'
        )
    return found


def _source_problems(config: DataConfig) -> Iterator[str]:
    if any(source.startswith(objects.PREFIX) for source in config.sources):
        yield from objects.problems(
            config.sources, tokenizer=config.tokenizer, weights=config.weights
        )
        return
    if not config.sources:
        yield 'data.sources is empty: name at least one, such as ("stdlib",)'
    for source in config.sources:
        if source:
            yield from (
                f"data.sources: {text}"
                for text in sources_lib.problems(source, skip_bad=config.skip_bad)
            )
        else:
            yield 'data.sources holds \'\': use "stdlib", a path or glob, or "shards:DIR"'
    for source, count in collections.Counter(config.sources).items():
        if count > 1:
            yield (
                f"data.sources names {source!r} {count} times: name it once and give it a larger "
                "share in data.weights"
            )
    if config.weights and len(config.weights) != len(config.sources):
        yield (
            f"data.weights has {len(config.weights)} entries for {len(config.sources)} "
            "data.sources: give one weight for each source, or () for none"
        )
    for weight in config.weights:
        if not 0 < weight < math.inf:
            yield (
                f"data.weights holds {weight!r}: each must be a finite number above 0; leave a "
                "source that should have no share out of data.sources"
            )


def _tokenizer_problems(config: DataConfig) -> Iterator[str]:
    size = config.train_tokenizer
    if size and config.tokenizer != "auto":
        yield (
            f"data.train_tokenizer={size} and data.tokenizer={config.tokenizer!r} exclude each "
            'other: leave data.tokenizer="auto", or set data.train_tokenizer=0'
        )
    yield from (f"data.tokenizer: {text}" for text in tokenizers.problems(config.tokenizer))
    for source in config.sources:
        if size and source.startswith(sources_lib.SHARDS_PREFIX):
            yield (
                f"data.train_tokenizer={size} cannot be used with {source!r}, whose tokens are "
                "already fixed: set data.train_tokenizer=0, or name the text itself"
            )


def _chat_problems(config: DataConfig) -> Iterator[str]:
    path = config.chat_template
    if path and not os.path.isfile(os.path.expanduser(path)):
        yield f"data.chat_template={path!r} is no file: name one, or '' for the tokenizer's own"
    if config.format == pairs.FORMAT and config.pack:
        yield (
            "data.pack=True with data.format='preference': a row holds one pair; set "
            "data.pack=False"
        )
    if config.format in TEXT_FORMATS[1:] and config.train_tokenizer:
        yield (
            f"data.train_tokenizer={config.train_tokenizer} cannot be trained on conversations: "
            "train it on text first (python -m llmx.data), and set data.tokenizer"
        )


def integer_shares(weights: tuple[float, ...]) -> tuple[int, ...]:
    """The smallest integers in the exact decimal proportions of the weights: (0.7, 0.3) -> 7, 3."""
    exact = [fractions.Fraction(str(float(weight))) for weight in weights]
    scale = math.lcm(*(share.denominator for share in exact))
    integers = [int(share * scale) for share in exact]
    divisor = math.gcd(*integers)
    return tuple(share // divisor for share in integers)
