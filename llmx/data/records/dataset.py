"""From a data config to batches of records, each a pure function of (seed, step, row).

A record is a row of one position, so that training takes it as it takes a row of tokens: "targets"
is its label, and "dense" and "ids" are beside the arrays that rows of tokens have. Records of all
sources are one list, visited once an epoch; the end of each source is held out, as the last day of
a log is.

Letters: B records, F numbers, I ids of all features side by side, J weights of ids.
"""

import os
import pathlib
from collections.abc import Callable, Sequence

import numpy as np

from llmx.data import config as config_lib
from llmx.data import packing, tokenizers
from llmx.data import shards as token_shards
from llmx.data import sources as sources_lib
from llmx.data.records import build, order, shards
from llmx.data.records import sources as record_sources
from llmx.data.records.schema import NONE, Schema

DENSE, IDS, ID_WEIGHTS = "dense", "ids", "id_weights"  # names in a batch


def empty_batch(num_rows: int, schema: Schema) -> dict[str, np.ndarray]:
    """A batch of padding: [B, 1], "dense" [B, 1, F], "ids" [B, 1, I], and where ids have weights
    "id_weights" [B, 1, J]; weights are 0."""
    arrays = {
        DENSE: np.zeros((num_rows, 1, len(schema.dense)), np.float32),
        IDS: np.full((num_rows, 1, schema.num_ids), NONE, schema.ids_dtype),
    }
    if schema.num_weights:
        arrays[ID_WEIGHTS] = np.zeros((num_rows, 1, schema.num_weights), np.float32)
    return packing.empty_batch(num_rows, 1, 0) | arrays


class RecordDataset:
    """What training takes of a `dataset.Dataset`, of records."""

    sequence_length = 1

    def __init__(
        self, config: config_lib.DataConfig, opened: Sequence[shards.RecordShards], *, seed: int
    ):
        self.schema = opened[0].schema
        self.tokenizer = tokenizers.ByteTokenizer()  # of no use, but that a label is a "token"
        self.vocab_size = self.tokenizer.vocab_size
        self.num_threads, self.prefetch = config.num_threads, config.prefetch
        self._opened, self._seed, self._shuffle = tuple(opened), seed, config.shuffle
        counts = np.array([one.num_records for one in opened])
        held = np.floor(counts * float(config.held_out)).astype(np.int64)
        self._train = np.cumsum([0, *(counts - held)])
        self._held_out, self._held_starts = np.cumsum([0, *held]), counts - held
        self.num_train_windows = int(self._train[-1])
        self.num_held_out_windows = int(self._held_out[-1])
        settings = {
            "records": [one.content for one in opened],
            "held_out": float(config.held_out), "shuffle": config.shuffle, "seed": seed,
        }  # fmt: skip
        self.fingerprint = token_shards.json_hash(settings)

    def train_rows(self, step: int, rows: Sequence[int], batch_size: int) -> dict[str, np.ndarray]:
        """Rows `rows` of the global batch of `batch_size` at a step; see `empty_batch`."""
        packing.check_rows(step, rows, batch_size)
        samples = step * batch_size + np.asarray(rows, np.int64)
        epochs, places = np.divmod(samples, self.num_train_windows)
        numbers = places.copy()
        for epoch in np.unique(epochs).tolist() if self._shuffle else ():
            at = np.flatnonzero(epochs == epoch)
            key = f"records/{self._seed}/{epoch}"
            numbers[at] = order.permuted(places[at], self.num_train_windows, key=key)
        batch = empty_batch(len(rows), self.schema)
        self._fill(batch, self._train, np.zeros_like(self._held_starts), numbers)
        return batch

    def held_out_rows(
        self, index: int, rows: Sequence[int], batch_size: int
    ) -> dict[str, np.ndarray]:
        """The same of held-out batch `index`, in one fixed order; rows past the end are padding."""
        packing.check_rows(index, rows, batch_size)
        if not self.num_held_out_windows:
            raise ValueError(
                "data.held_out=0 keeps no held-out split: set it above 0, such as 0.05, to evaluate"
            )
        places = index * batch_size + np.asarray(rows, np.int64)
        places = places[places < self.num_held_out_windows]  # rows are in order
        numbers = order.permuted(places, self.num_held_out_windows, key="held out")
        batch = empty_batch(len(rows), self.schema)
        self._fill(batch, self._held_out, self._held_starts, numbers)
        return batch

    def _fill(self, batch: dict, bounds: np.ndarray, starts: np.ndarray, numbers: np.ndarray):
        """Writes records, numbered over the sources of one side, into the first rows."""
        source_of = np.searchsorted(bounds, numbers, side="right") - 1
        for source, opened in enumerate(self._opened):
            at = np.flatnonzero(source_of == source)
            if not at.size:
                continue
            chunk = opened.take(numbers[at] - bounds[source] + starts[source])
            batch["tokens"][at], batch["targets"][at, 0] = 0, chunk.labels
            batch[DENSE][at, 0], batch[IDS][at, 0] = chunk.dense, chunk.ids
            if self.schema.num_weights:
                batch[ID_WEIGHTS][at, 0] = chunk.weights
            batch["segment_ids"][at], batch["weights"][at] = 1, 1


def schema_of(config: config_lib.DataConfig) -> Schema:
    """The columns of the records, which all sources have alike; `config.problems` has found
    nothing. Reads no records."""
    schemas = [record_sources.schema_of(source, config.records) for source in config.sources]
    for source, schema in zip(config.sources, schemas, strict=True):
        if schema != schemas[0]:
            raise ValueError(
                f"data.sources: {source!r} has other columns than {config.sources[0]!r}: name "
                "sources with the same numbers and features, of as many rows"
            )
    return schemas[0]


def open_records(
    config: config_lib.DataConfig, *, sequence_length: int, seed: int,
    cache_dir: str | pathlib.Path, log: Callable[[str], None] = print,
) -> RecordDataset:  # fmt: skip
    """Opens the sources; the first call writes those that are no shards into the cache."""
    if sequence_length != 1:
        raise ValueError(
            f"batch.sequence_length={sequence_length} with data.format='records': a record is a "
            "row of one position, so set batch.sequence_length=1"
        )
    if found := config_lib.problems(config):
        raise ValueError("\n".join(found))
    schema_of(config)
    cache, opened = pathlib.Path(os.path.expanduser(config.cache_dir or cache_dir)), []
    for source in config.sources:
        if source.startswith(sources_lib.SHARDS_PREFIX):
            folder = record_sources.folder_of(source)
        else:
            recipe = build.make_recipe(source, config.records, skip_bad=config.skip_bad)
            folder = build.cached(recipe, cache_dir=cache, log=log)
        opened.append(one := shards.open_shards(folder, verify=config.verify))
        log(
            f"data: {source}: {one.num_records:,} records, {one.num_clicks / one.num_records:.1%} "
            f"clicks, {len(one.schema.dense)} numbers, {len(one.schema.features)} features; the "
            f"last {config.held_out:.1%} held out"
        )
    return RecordDataset(config, opened, seed=seed)
