"""The `data` section of a config and every check of it that needs no reading of the data."""

import dataclasses
import fractions
import math
import numbers
import os

from llmx.data import sources as sources_lib
from llmx.data import tokenizers

MAX_HELD_OUT = 0.5
MAX_THREADS = 64


@dataclasses.dataclass
class DataConfig:
    """What to train on, how it becomes tokens, and how rows are cut from it."""

    # Each "stdlib", a file, folder or glob of text / JSONL / Parquet, or "shards:DIR".
    sources: tuple[str, ...] = ("stdlib",)
    # Share of each source in the mixture; () reads every window of every source once an epoch.
    weights: tuple[float, ...] = ()
    # "bytes", a tokenizer.json, or "auto": that of a shards source, else bytes.
    tokenizer: str = "auto"
    # Train a byte-level BPE of this vocabulary size on the sources; 0 = do not.
    train_tokenizer: int = 0
    # Field of a JSONL record, or column of a Parquet file, that holds the text.
    text_key: str = "text"
    # Fraction of each source kept for evaluation, by document; 0 = none.
    held_out: float = 0.05
    # Visit the windows of every epoch in a new pseudo-random order.
    shuffle: bool = True
    # Fill rows with several documents; otherwise a row holds tokens of one document only.
    pack: bool = True
    # Leave out empty or unreadable files and records (counted in the log) instead of an error.
    skip_bad: bool = False
    # Check the checksum of every shard at start, also of sets too large to be checked by default.
    verify: bool = False
    # Threads that prepare batches; the order does not depend on it. 0 = none.
    num_threads: int = 1
    # Batches prepared ahead of the step.
    prefetch: int = 4
    # Where token shards made from text are kept; "" = the trainer's default.
    cache_dir: str = ""


def _source_problems(config: DataConfig) -> list[str]:
    if isinstance(config.sources, str) or not isinstance(config.sources, (tuple, list)):
        return [
            f"data.sources={config.sources!r} is not a tuple of strings: write "
            f"data.sources=({str(config.sources)!r},)"
        ]
    if not config.sources:
        return ['data.sources is empty: name at least one, such as ("stdlib",)']
    problems = []
    for source in config.sources:
        if not isinstance(source, str) or not source:
            problems.append(
                f"data.sources holds {source!r}: each must be a non-empty string, "
                '"stdlib", a path or glob, or "shards:DIR"'
            )
            continue
        problems.extend(f"data.sources: {text}" for text in sources_lib.problems(source))
    names = [source for source in config.sources if isinstance(source, str)]
    for source in sorted({name for name in names if names.count(name) > 1}):
        problems.append(
            f"data.sources names {source!r} {names.count(source)} times: name it once and give it "
            "a larger share in data.weights"
        )
    return problems


def _is_real(value) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _weight_problems(config: DataConfig) -> list[str]:
    if isinstance(config.weights, str) or not isinstance(config.weights, (tuple, list)):
        return [
            f"data.weights={config.weights!r} is not a tuple of numbers: write (1.0, 2.0), one "
            "for each of data.sources, or () for no weights"
        ]
    if not config.weights:
        return []
    problems = []
    if isinstance(config.sources, (tuple, list)) and len(config.weights) != len(config.sources):
        problems.append(
            f"data.weights has {len(config.weights)} entries for {len(config.sources)} "
            "data.sources: give one weight for each source, or () for none"
        )
    for weight in config.weights:
        if not _is_real(weight) or not 0 < weight < float("inf"):
            problems.append(
                f"data.weights holds {weight!r}: each must be a finite number above 0; leave a "
                "source that should have no share out of data.sources"
            )
    return problems


def _tokenizer_problems(config: DataConfig) -> list[str]:
    problems = []
    size = config.train_tokenizer
    if isinstance(size, bool) or not isinstance(size, int):
        problems.append(
            f"data.train_tokenizer={size!r} is not an integer: give a vocabulary size, or 0 to "
            "train none"
        )
    elif size != 0 and not tokenizers.MIN_TRAINED_SIZE <= size <= tokenizers.MAX_TRAINED_SIZE:
        problems.append(
            f"data.train_tokenizer={size} is outside {tokenizers.MIN_TRAINED_SIZE} (256 bytes and "
            f"the end-of-document token) to {tokenizers.MAX_TRAINED_SIZE}: choose for example "
            "4096, or 0 to train none"
        )
    if not isinstance(config.tokenizer, str):
        problems.append(
            f'data.tokenizer={config.tokenizer!r} is not a string: use "auto", "bytes" or the '
            "path of a tokenizer.json"
        )
        return problems
    if size and config.tokenizer != "auto":
        problems.append(
            f"data.train_tokenizer={size} and data.tokenizer={config.tokenizer!r} exclude each "
            'other: leave data.tokenizer="auto", or set data.train_tokenizer=0'
        )
    problems.extend(f"data.tokenizer: {text}" for text in tokenizers.problems(config.tokenizer))
    if size and isinstance(config.sources, (tuple, list)):
        for source in config.sources:
            if isinstance(source, str) and source.startswith(sources_lib.SHARDS_PREFIX):
                problems.append(
                    f"data.train_tokenizer={size} cannot be used with {source!r}, whose tokens "
                    "are already fixed: set data.train_tokenizer=0, or name the text itself"
                )
    return problems


def problems(config: DataConfig) -> list[str]:
    """Everything wrong with the section, each text with value, limit and remedy. Reads no data."""
    found = _source_problems(config) + _weight_problems(config) + _tokenizer_problems(config)
    if not isinstance(config.text_key, str) or not config.text_key:
        found.append(
            f"data.text_key={config.text_key!r} is not a field name: give the JSONL field or "
            'Parquet column that holds the text, such as "text"'
        )
    if not _is_real(config.held_out) or not 0 <= config.held_out <= MAX_HELD_OUT:
        found.append(
            f"data.held_out={config.held_out!r} is outside 0 to {MAX_HELD_OUT}: give the fraction "
            "of the documents to evaluate on, such as 0.05, or 0 for no held-out split"
        )
    for name, value in (
        ("shuffle", config.shuffle),
        ("pack", config.pack),
        ("skip_bad", config.skip_bad),
        ("verify", config.verify),
    ):
        if not isinstance(value, bool):
            found.append(f"data.{name}={value!r} is not a truth value: use True or False")
    for name, value, limit in (
        ("num_threads", config.num_threads, MAX_THREADS),
        ("prefetch", config.prefetch, 1024),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= limit:
            found.append(f"data.{name}={value!r} is outside 0 to {limit}: use an integer there")
    if not isinstance(config.cache_dir, str):
        found.append(
            f'data.cache_dir={config.cache_dir!r} is not a string: give a folder, or "" for the '
            "default"
        )
    elif os.path.isfile(config.cache_dir):
        found.append(f"data.cache_dir={config.cache_dir!r} is a file: give a folder")
    return found


def integer_shares(weights: tuple[float, ...]) -> tuple[int, ...]:
    """The smallest integers in the exact decimal proportions of the weights: (0.7, 0.3) -> 7, 3."""
    exact = [fractions.Fraction(str(float(weight))) for weight in weights]
    scale = math.lcm(*(share.denominator for share in exact))
    integers = [int(share * scale) for share in exact]
    divisor = math.gcd(*integers)
    return tuple(share // divisor for share in integers)
