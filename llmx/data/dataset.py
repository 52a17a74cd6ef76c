"""From a data config to a dataset whose every row is a pure function of (seed, step, row).

Row r of step s is sample s * batch_size + r of one endless stream, on any mesh and any number of
processes. Each source visits all its windows once an epoch, shuffled anew by grain's index
shuffle, which needs no array of the corpus's size; sources are interleaved in exact shares.
"""

import functools
import hashlib
import itertools
import os
import pathlib
import sys
from collections.abc import Callable, Sequence

import numpy as np

from llmx.data import build, objects, packing, pairs, remote, teacher_files, tokenizers, transient
from llmx.data import config as config_lib
from llmx.data import shards as shards_lib
from llmx.data import sources as sources_lib
from llmx.data import split as split_lib
from llmx.data.records import dataset as record_dataset
from llmx.data.teacher_tokens import TeacherTokens

DATA_CACHE = "~/.cache/llmx/data"  # of token shards made from text
_MAX_WINDOWS = 1 << 32  # grain's index shuffle is of 32 bits
_HELD_OUT_SEED = 0
_RULES = {
    "none": "nothing held out",
    "all": "all of it to evaluate on",
    "documents": "held out by hash of document",
    "document": "held out one document of fitting size",
    "end": "held out the end of the longest document",
}


class Interleave:
    """Which source, and which of its samples, is sample k of a mixture in integer shares.

    Every sum(shares) samples hold each source exactly its share of times, spread evenly.
    (grain's own `mix` rounds the shares to multiples of a hundredth of the smallest.)
    """

    def __init__(self, shares: Sequence[int]):
        self._shares = tuple(shares)
        self._total = sum(shares)

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> tuple[int, int]:
        low, high, remaining = index, index + 1, self._total
        for source, share in enumerate(self._shares):
            rest = remaining - share
            low_rest, high_rest = low * rest // remaining, high * rest // remaining
            if high - high_rest != low - low_rest:
                return source, high - high_rest - 1
            low, high, remaining = low_rest, high_rest, rest
        raise AssertionError(f"no source takes sample {index} of shares {self._shares}")


def _index_seed(seed: int, source: int) -> int:
    """32 bits. Hashed: grain adds the epoch, and epoch 1 of seed 0 is not epoch 0 of seed 1."""
    raw = hashlib.blake2b(f"{seed}/{source}".encode(), digest_size=4).digest()
    return int.from_bytes(raw, "little")


class Dataset:
    """The rows of a training run. Opened by `open_dataset`."""

    def __init__(
        self, config: config_lib.DataConfig, shards: Sequence[shards_lib.Shards],
        splits: Sequence[split_lib.Split], *, tokenizer: tokenizers.Tokenizer,
        sequence_length: int, seed: int, taught: Sequence[TeacherTokens] = (), top_k: int = 0,
    ):  # fmt: skip
        self._top_k = top_k
        self.sequence_length, self.tokenizer = sequence_length, tokenizer
        self.vocab_size = self.tokenizer.vocab_size
        self.num_threads, self.prefetch = config.num_threads, config.prefetch
        self._seed, self._shuffle = seed, config.shuffle
        rows = dict(sequence_length=sequence_length, one_document_per_row=not config.pack)
        pairs = list(zip(shards, splits, strict=True))
        self._train = [
            packing.Windows(source, both.train, teacher=teacher, **rows)
            for (source, both), teacher in zip(pairs, taught or [None] * len(pairs), strict=True)
        ]
        self._held_out = [packing.Windows(source, both.held_out, **rows) for source, both in pairs]
        self._train_bases = np.cumsum([0] + [w.num_windows for w in self._train])
        self._held_out_bases = np.cumsum([0] + [w.num_windows for w in self._held_out])
        self.num_train_windows = int(self._train_bases[-1])
        self.num_held_out_windows = int(self._held_out_bases[-1])
        counts = tuple(windows.num_windows for windows in self._train)
        # Where all is held out, nothing is mixed.
        counts_or_equal = counts if any(counts) else (1,) * len(counts)
        self.shares = config_lib.integer_shares(config.weights or counts_or_equal)
        for name, count in zip(config.sources, counts, strict=True):
            if count > _MAX_WINDOWS:
                raise ValueError(
                    f"source {name!r} has {count:,} windows, above the {_MAX_WINDOWS:,} that can "
                    "be shuffled: name parts of it as several sources"
                )
        tables = (source.lengths.tobytes() + source.hashes.tobytes() for source in shards)
        settings = {
            "documents": [hashlib.sha256(table).hexdigest() for table in tables],
            "vocab_size": self.vocab_size,
            "shares": self.shares,
            "held_out": float(config.held_out),
            "shuffle": config.shuffle,
            "pack": config.pack,
            "sequence_length": sequence_length,
            "seed": seed,
        }
        if any(source.weights for source in shards):
            settings["learned"] = [source.num_weighted for source in shards]
        self.fingerprint = shards_lib.json_hash(settings)

    @functools.cached_property
    def _train_order(self):
        """Sample of the endless stream -> window, numbered over all sources, as a grain dataset."""
        import grain

        orders = []
        for source, (low, high) in enumerate(itertools.pairwise(self._train_bases.tolist())):
            order = grain.MapDataset.range(low, high)
            if self._shuffle:
                order = order.shuffle(seed=_index_seed(self._seed, source))
            orders.append(order)
        order = orders[0]
        if len(orders) > 1:
            order = grain.MapDataset.select_from_datasets(orders, Interleave(self.shares))
        order[0]  # grain sets up its statistics at the first access, which is not thread-safe
        return order

    @functools.cached_property
    def _held_out_order(self):
        """One fixed order for every run, shuffled so that any first part is a fair sample."""
        import grain

        order = grain.MapDataset.range(self.num_held_out_windows).shuffle(seed=_HELD_OUT_SEED)
        order[0]
        return order

    def _rows(
        self, parts: Sequence[packing.Windows], bases: np.ndarray, windows: np.ndarray, *,
        top_k: int = 0,
    ) -> dict[str, np.ndarray]:  # fmt: skip
        """Rows of the given windows, numbered over all sources; -1 stays padding."""
        filler = self.tokenizer.end_of_document
        batch = packing.empty_batch(len(windows), self.sequence_length, filler, top_k=top_k)
        for source, part in enumerate(parts):
            chosen = np.flatnonzero((windows >= bases[source]) & (windows < bases[source + 1]))
            if len(chosen):
                part.fill(batch, chosen, windows[chosen] - bases[source])
        return batch

    def train_rows(self, step: int, rows: Sequence[int], batch_size: int) -> dict[str, np.ndarray]:
        """Rows `rows` of the global batch of `batch_size` at a step; arrays [len(rows), T], of a
        teacher [len(rows), T, ...]."""
        packing.check_rows(step, rows, batch_size)
        order, first = self._train_order, step * batch_size
        windows = np.array([order[first + int(row)] for row in rows], np.int64)
        return self._rows(self._train, self._train_bases, windows, top_k=self._top_k)

    def held_out_rows(
        self, index: int, rows: Sequence[int], batch_size: int
    ) -> dict[str, np.ndarray]:
        """The same of held-out batch `index`, in one fixed order; rows past the end are padding."""
        packing.check_rows(index, rows, batch_size)
        if not self.num_held_out_windows:
            raise ValueError(
                "data.held_out=0 keeps no held-out split: set it above 0, such as 0.05, to evaluate"
            )
        order, count = self._held_out_order, self.num_held_out_windows
        samples = [index * batch_size + int(row) for row in rows]
        windows = np.array([order[k] if k < count else -1 for k in samples], np.int64)
        return self._rows(self._held_out, self._held_out_bases, windows)


def _choose_tokenizer(
    config: config_lib.DataConfig, opened: dict[str, shards_lib.Shards]
) -> tokenizers.Tokenizer:
    """The one tokenizer of all sources. Raises ValueError where shards do not agree with it."""
    if config.tokenizer != "auto":
        chosen, origin = tokenizers.load(config.tokenizer), f"data.tokenizer={config.tokenizer!r}"
    elif opened:
        origin, first = next(iter(opened.items()))
        chosen = first.tokenizer
    else:
        return _with_template(config, tokenizers.ByteTokenizer())
    for name, shards in opened.items():
        if shards.tokenizer.fingerprint != chosen.fingerprint:
            raise ValueError(
                f"{name!r} was written with another tokenizer ({shards.vocab_size} tokens) than "
                f"{origin} ({chosen.vocab_size} tokens): write it again with the same --tokenizer, "
                'or use data.tokenizer="auto" with sources of one tokenizer'
            )
    return _with_template(config, chosen)


def _with_template(
    config: config_lib.DataConfig, tokenizer: tokenizers.Tokenizer
) -> tokenizers.Tokenizer:
    """The tokenizer with the chat template of the config, if that names one."""
    if not config.chat_template:
        return tokenizer
    return tokenizer.with_template(tokenizers.read_template(config.chat_template))


def open_dataset(
    config: config_lib.DataConfig, *, sequence_length: int, seed: int, top_k: int = 0,
    cache_dir: str | pathlib.Path = DATA_CACHE, log: Callable[[str], None] = print,
) -> Dataset | objects.ObjectDataset | record_dataset.RecordDataset:  # fmt: skip
    """Opens the sources of a config; the first call tokenises text into shards in the cache.

    `config.cache_dir` goes before `cache_dir`. `top_k`: rows to train on have so many likeliest
    tokens of a teacher, which must have been written beside the shards. Raises ValueError for
    everything wrong with the sources, the tokenizer or the data; `llmx.config.checks` has checked
    types and bounds.
    """
    if config.format == config_lib.RECORDS:
        return record_dataset.open_records(
            config, sequence_length=sequence_length, seed=seed, cache_dir=cache_dir, log=log
        )
    found = config_lib.problems(config)
    if sequence_length < 1:
        found.append(f"sequence_length={sequence_length} is below 1: give the tokens of a row")
    if top_k and (
        others := [s for s in config.sources if not s.startswith(sources_lib.SHARDS_PREFIX)]
    ):
        found.append(
            f"distillation.top_k={top_k} reads a teacher beside token shards, and {others[0]!r} is "
            "none: write shards with python -m llmx.data --teacher, and name them 'shards:DIR'"
        )
    if found:
        raise ValueError("\n".join(found))
    if config.sources[0].startswith(objects.PREFIX):
        log(f"data: {config.sources[0]}")
        return objects.ObjectDataset(
            config.sources[0], sequence_length=sequence_length, num_threads=config.num_threads,
            prefetch=config.prefetch,
        )  # fmt: skip
    cache = pathlib.Path(os.path.expanduser(config.cache_dir or cache_dir))
    shards, tokenizer = _open_sources(config, cache, log)
    tables = [(source.lengths, source.hashes) for source in shards]
    splits = split_lib.split_sources(tables, held_out=float(config.held_out), names=config.sources)
    for name, source, split in zip(config.sources, shards, splits, strict=True):
        _check_split(config, name, source, split, sequence_length)
        held = split.held_out.num_tokens
        log(
            f"data: {name}: {source.num_tokens:,} tokens in {len(source.lengths):,} documents, "
            f"{source.tokenizer.name} vocabulary {source.vocab_size:,}; {_RULES[split.rule]}: "
            f"{held:,} tokens ({held / source.num_tokens:.1%}){_learned(source)}"
        )
    taught = [
        teacher_files.open_tokens(one, top_k, verify=config.verify) for one in shards * bool(top_k)
    ]
    return Dataset(
        config, shards, splits, tokenizer=tokenizer, sequence_length=sequence_length, seed=seed,
        taught=taught, top_k=top_k,
    )  # fmt: skip


def _check_split(
    config: config_lib.DataConfig, name: str, source: shards_lib.Shards, split: split_lib.Split,
    sequence_length: int,
) -> None:  # fmt: skip
    """Raises ValueError for a source that is too small, or whose pairs are too long for a row."""
    if source.pairs and split.rule == "end":
        raise ValueError(
            f"source {name!r} has {len(source.lengths)} pairs, of which data.held_out="
            f"{config.held_out} holds out none as a whole: set data.held_out=0, or add pairs"
        )
    short = split.train.num_tokens <= sequence_length and not source.pairs
    if config.held_out < 1 and short:
        raise ValueError(
            f"source {name!r} has {split.train.num_tokens} tokens to train on, fewer than "
            f"one window of sequence_length={sequence_length} and its next token: add text, "
            f"or set the sequence length below {max(split.train.num_tokens, 2)}"
        )
    if source.pairs and (longest := int(source.lengths.max())) > sequence_length + 1:
        number = int((source.lengths > sequence_length + 1).sum())
        raise ValueError(
            f"source {name!r} has {number:,} pairs that are longer than a row of "
            f"sequence_length={sequence_length}, the longest of {longest:,} tokens with both "
            f"texts: set batch.sequence_length to at least {longest - 1}, or leave them out"
        )


def _learned(source: shards_lib.Shards) -> str:
    share = source.num_weighted / source.num_tokens
    return f"; learned: {source.num_weighted:,} tokens ({share:.1%})" if source.weights else ""


def _open_sources(
    config: config_lib.DataConfig, cache_dir: pathlib.Path, log: Callable[[str], None]
) -> tuple[list[shards_lib.Shards], tokenizers.Tokenizer]:
    """The shards of each source, written to the cache first where the source is text, and the
    tokenizer of all of them."""
    prefix = sources_lib.SHARDS_PREFIX
    opened = {
        source: shards_lib.open_shards(
            _local_shards(source.removeprefix(prefix), cache_dir), verify=config.verify
        )
        for source in config.sources if source.startswith(prefix)
    }  # fmt: skip
    text_sources = [source for source in config.sources if source not in opened]
    make_recipe = functools.partial(
        build.make_recipe, text_key=config.text_key, skip_bad=config.skip_bad, bos=config.bos,
        format=config.format,
    )  # fmt: skip
    if config.train_tokenizer:
        recipe = make_recipe(text_sources, tokenizer=config.train_tokenizer, format="text")
        tokenizer = build.cached_tokenizer(recipe, cache_dir=cache_dir, log=log)
    else:
        tokenizer = _choose_tokenizer(config, opened)
    for source in text_sources:
        recipe = make_recipe((source,), tokenizer=tokenizer)
        _check_start(recipe, opened)
        if recipe.left_out:
            log(f"data: {source}: left out: {sources_lib.listed(recipe.left_out)}")
        folder = build.cached_shards(recipe, cache_dir=cache_dir, log=log)
        if skipped := shards_lib.read_index(folder)["skipped"]:
            log(f"data: {source}: left out by data.skip_bad: {skipped}")
        opened[source] = shards_lib.open_shards(folder, verify=config.verify)
    for source, shards in opened.items():
        if shards.pairs != (config.format == pairs.FORMAT):
            kind = "pairs" if shards.pairs else "no pairs"
            remedy = "'preference'" if shards.pairs else "'text', or a source of pairs"
            raise ValueError(
                f"source {source!r} holds {kind} and data.format={config.format!r}: use "
                f"data.format={remedy}"
            )
    return [opened[source] for source in config.sources], tokenizer


def _local_shards(folder: str, cache_dir: pathlib.Path) -> str | pathlib.Path:
    """A local folder of shards; those of a store are copied into the cache, once."""
    if not remote.is_url(folder):
        return folder
    target = remote.local_place(folder, cache_dir / "fetched")
    try:
        remote.fetch(folder, target)
    except OSError as error:
        what = f"{folder} cannot be copied to {target}"
        raise transient.refusal(what, error, "check the credentials and the space") from error
    return target


def _check_start(recipe: build.Recipe, opened: dict[str, shards_lib.Shards]) -> None:
    """Raises ValueError where plain documents would begin in two ways."""
    for name, shards in opened.items():
        if not (recipe.chat or shards.weights) and shards.start != recipe.start:
            raise ValueError(
                f"the documents of {name!r} begin with the tokens {list(shards.start)}, those of "
                f"{recipe.name} with {list(recipe.start)}: write the shards again, or set data.bos"
            )
