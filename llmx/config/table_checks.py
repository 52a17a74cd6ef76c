"""What the sections `tables` and `model.recommender` say together with the data."""

import dataclasses
import math
from collections.abc import Iterator

from llmx import sharding
from llmx.config import Config, get_value, preference_checks
from llmx.data import config as data_config
from llmx.data import remote, transient
from llmx.data.records import dataset as records
from llmx.data.records import generated
from llmx.model import looked_up
from llmx.model.recommender import config as recommender_config
from llmx.runtime import bounds
from llmx.step.transforms import masks
from llmx.tables import cached, checks, exports, host_rows, row_optimizers
from llmx.tables import config as tables_config
from llmx.tables.config import Feature, Table, TablesConfig


def filled_in(config: Config) -> list[str]:
    """Problems of a model of clicks and its data; fills in the columns that the model takes."""
    recommender = config.model.recommender
    if not recommender.name:
        return [
            "data.format='records' has labels and ids, and the model is a decoder of text: set "
            "model.recommender.name, such as 'dlrm'"
        ]
    if config.data.format != data_config.RECORDS:
        return [
            f"model.recommender.name={recommender.name!r} learns from records, and data.format="
            f"{config.data.format!r}: set data.format='records'"
        ]
    if found := bounds.problems(recommender, "model.recommender."):
        return found
    try:
        schema = records.schema_of(config.data)
    except (ValueError, OSError) as error:
        if transient.is_transient(error):
            raise
        return [f"data: {error}"]
    features = features_of(config)
    lengths = [each.length if each.combine == "none" else 0 for each in features]
    by_name = dict(zip((each.name for each in features), lengths, strict=True))
    if found := list(
        recommender_config.problems(recommender, num_dense=len(schema.dense), lengths=by_name)
    ):
        return found
    weights = tuple(each.length if each.weights else 0 for each in schema.features)
    of_data = dict(
        num_dense=len(schema.dense), features=tuple(by_name), lengths=tuple(lengths),
        num_ids=schema.num_ids, weights=weights if any(weights) else (),
    )  # fmt: skip
    config.model.recommender = dataclasses.replace(recommender, **of_data)
    default = recommender_config.RecommenderConfig()
    return [
        f"model.recommender.{key}={given!r} is not of the data, which have {found!r}: leave it out"
        for key, found in of_data.items()
        if (given := vars(recommender)[key]) not in (vars(default)[key], found)
    ]


def features_of(config: Config) -> list[Feature]:
    """The features: of n-grams, one for each order; or of the data. A history is not combined where
    the model weighs its rows."""
    if not config.model.recommender.name:
        length = config.batch.sequence_length
        names = map(looked_up.ngram_name, config.model.ngram_tables)
        return [Feature(name, name, length, "none") for name in names]
    weighed = {text.partition("=")[0] for text in config.model.recommender.histories}
    return [
        Feature(
            each.name, each.table_name, each.length,
            "none" if each.name in weighed else config.tables.combine, each.hashes,
        )
        for each in records.schema_of(config.data).features
    ]  # fmt: skip


def tables_of(config: Config) -> list[Table]:
    """The tables: of n-grams, or of the data's features; [] = there are none."""
    if not config.model.recommender.name:
        rows, width = config.model.ngram_rows, config.model.width
        return [
            Table(
                looked_up.ngram_name(order), rows, width, config.tables.split, config.tables.scale
            )
            for order in config.model.ngram_tables
        ]
    width = config.model.recommender.width
    return [
        Table(name, rows, width, config.tables.split, config.tables.scale)
        for name, rows in records.schema_of(config.data).tables.items()
    ]


# What tables do not go with, by key: the value that is needed, and why.
ALONE = {
    "mesh.stage": (1, "tables belong to the batch, which stages take in parts"),
    "mesh.sequence": (1, "n-grams are of neighboring tokens"),
    "sync.groups": (1, "each group would have rows of its own"),
    "optimizer.ema_decay": (0.0, "rows have no average"),
    "adapters.rank": (0, "only adapters would be trained"),
    "distillation.teacher": ("", "it was not tried"),
    "distillation.top_k": (0, "it was not tried"),
    "pruning.method": (masks.NONE, "it was not tried"),
    "quantization.bits": (0, "it was not tried"),
    "packed.format": ("", "codes have no gradient"),
}  # fmt: skip


# Keys of `model.recommender` that only one model of clicks reads.
OF_MODELS = {
    "cross_layers": "dcn", "cross_rank": "dcn", "structure": "dcn", "attention": "din",
    "histories": "din",
}  # fmt: skip
# Keys of `model` that a model of clicks has too, or that are filled in.
NOT_OF_DECODERS = ("recommender", "own", "vocab_size", "ngram_tables", "ngram_rows")


def _of_clicks(config: Config) -> Iterator[str]:
    """What a model of clicks does not read."""
    name, source = config.model.recommender.name, config.data.sources[:1]
    reason = f"with model.recommender.name={name!r}: leave it out"
    others = {
        key: f"{reason}, or choose {of!r}" for key, of in OF_MODELS.items() if of != name
    }  # fmt: skip
    yield from bounds.without_effect(config.model.recommender, "model.recommender.", others)
    of_decoders = {key: reason for key in vars(config.model) if key not in NOT_OF_DECODERS}
    yield from bounds.without_effect(config.model, "model.", of_decoders)
    yield from bounds.without_effect(config.loss, "loss.", dict.fromkeys(vars(config.loss), reason))
    if source and source[0].startswith(generated.PREFIXES):
        why = f"with data.sources={config.data.sources}, which have labels: leave it out"
        yield from bounds.without_effect(config.data.records, "data.records.", {"label": why})


# Keys of `tables` that only some optimizers of rows read.
OF_OPTIMIZERS = {
    "b1": ("adam",), "b2": ("adam",), "initial_square": ("row_adagrad", "adagrad"),
    "l1": ("ftrl",), "l2": ("ftrl",),
}  # fmt: skip


def _of_optimizer(config: Config) -> Iterator[str]:
    """What the optimizer of rows does not read, and what it does not go with."""
    optimizer = config.tables.optimizer
    reason = f"with tables.optimizer={optimizer!r}: leave it out, or choose "
    of_others = {
        key: f"{reason}{' or '.join(map(repr, names))}"
        for key, names in OF_OPTIMIZERS.items() if optimizer not in names
    }  # fmt: skip
    yield from bounds.without_effect(config.tables, "tables.", of_others)


def _cache_problems(config: Config) -> Iterator[str]:
    """Of tables larger than the devices."""
    tables, key = config.tables, f"tables.cache_rows={config.tables.cache_rows}"
    if not tables.cache_rows:
        why = "with tables.cache_rows=0: set the number of rows that the devices hold"
        yield from bounds.without_effect(
            tables, "tables.", {"host_gib": why, "admit_after": why}
        )  # fmt: skip
        return
    if (number := config.launch.num_processes) > 1:
        yield (
            f"launch.num_processes={number} with {key}: rows are in the memory of one host; use "
            "one process, or tables.cache_rows=0"
        )
    if tables.staleness:
        yield (
            f"tables.staleness={tables.staleness} with {key}: an update that waits could come to "
            "a slot that has another row by then; use tables.staleness=0"
        )
    if (strategy := config.sync.strategy) != "mean":
        yield f"sync.strategy={strategy!r} with {key}: it was not tried; use sync.strategy='mean'"
    if config.start_from:
        yield (
            f"start_from={config.start_from!r} with {key}: rows of an export are of whole tables; "
            "begin without it, or without a cache"
        )
    for asked, empty in (("sample.prompt", ""), ("evaluation.choices", ())):
        if (value := get_value(config, asked)) != empty:
            yield f"{asked}={value!r} with {key}: rows of the host are not read there; leave it out"
    if folder := config.checkpoint.local_directory:
        yield (
            f"checkpoint.local_directory={folder!r} with {key}: rows of the host are in "
            "checkpoints of the work directory only; use checkpoint.local_directory=''"
        )
    if remote.is_url(config.workdir):
        yield (
            f"workdir={config.workdir!r} with {key}: rows of the host are not read from object "
            "stores; use a folder"
        )
    listed = tables_of(config)
    optimizer = row_optimizers.make(tables)
    width = listed[0].width
    try:
        widths = host_rows.widths_of(optimizer.slots, tables, width)
        host_rows.capacity_of(tables, widths, width)
    except ValueError as error:
        yield str(error)


def problems(config: Config) -> Iterator[str]:
    """Problems of the tables; those of the sections have been found."""
    orders, name = config.model.ngram_tables, config.model.recommender.name
    if not orders:
        why = "without tables of n-grams: set model.ngram_tables, or leave it out"
        yield from bounds.without_effect(config.model, "model.", {"ngram_rows": why})
    if not orders and not name:
        default = TablesConfig()
        yield from (
            f"tables.{key}={value!r} has no effect without tables: set model.ngram_tables or "
            "model.recommender.name, or leave it out"
            for key, value in vars(config.tables).items()
            if value != vars(default)[key]
        )
        if exports.is_export(config.start_from):
            yield (
                f"start_from={config.start_from!r} is an export of sparse tables, and the model "
                "has none: set model.recommender.name or model.ngram_tables as its run had them"
            )
        return
    what = f"model.recommender.name={name!r}" if name else f"model.ngram_tables={orders}"
    if name:
        yield from _of_clicks(config)
    for key, (wanted, why) in ALONE.items():
        if (value := get_value(config, key)) != wanted:
            yield f"{key}={value!r} with {what}: {why}; use {key}={wanted!r}"
    if config.start_from and not exports.is_export(config.start_from):
        yield (
            f"start_from={config.start_from!r} with {what}: rows are taken of an export: name a "
            "folder that python -m llmx.tables export has written"
        )
    if preference_checks.is_on(config):
        yield (
            f"data.format={config.data.format!r} with {what}: the reference would have tables of "
            "its own; use data.format='text'"
        )
    if any(bounds.problems(config.tables, "tables.")):
        return  # said already
    if name and (
        config.data.format != data_config.RECORDS or not config.model.recommender.features
    ):
        return  # said already
    if name and orders:
        yield f"model.ngram_tables={orders} with {what}: n-grams are of tokens; leave them out"
    if bad := [order for order in orders if not 1 < order <= 16]:
        yield f"model.ngram_tables={orders}: {bad[0]} is no number of tokens: use 2 to 16"
        return
    if name and config.batch.sequence_length != 1:
        yield (
            f"batch.sequence_length={config.batch.sequence_length} with data.format='records': a "
            "record is a row of one position, so set batch.sequence_length=1"
        )
    yield from _of_optimizer(config)
    yield from _cache_problems(config)
    yield from _of_placement(config)


def _of_placement(config: Config) -> Iterator[str]:
    """Tables that the devices of the batch cannot have, or not with this optimizer."""
    listed, features, settings = tables_of(config), features_of(config), config.tables
    if settings.cache_rows:
        known = [dataclasses.replace(one, rows=one.rows or 1) for one in listed]
        yield from tables_config.problems(known, features)
        table, features = cached.on_devices(listed, features, settings.cache_rows)
        listed = [table]
    devices = math.prod(max(1, vars(config.mesh)[axis]) for axis in sharding.BATCH_AXES)
    yield from checks.problems(listed, features, settings, devices)
