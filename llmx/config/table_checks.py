"""What the sections `tables` and `model.recommender` say together with the data."""

import dataclasses
from collections.abc import Iterator

from llmx.config import Config
from llmx.data import config as data_config
from llmx.data.records import dataset as records
from llmx.model.recommender import config as recommender_config
from llmx.runtime import bounds
from llmx.tables import config as tables_config
from llmx.tables.config import Feature, Table


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
        return [f"data: {error}"]
    features = features_of(config)
    lengths = [each.length if each.combine == "none" else 0 for each in features]
    by_name = dict(zip((each.name for each in features), lengths, strict=True))
    if found := list(
        recommender_config.problems(recommender, num_dense=len(schema.dense), lengths=by_name)
    ):
        return found
    config.model.recommender = dataclasses.replace(
        recommender, num_dense=len(schema.dense), features=tuple(by_name),
        lengths=tuple(lengths), num_ids=schema.num_ids,
    )  # fmt: skip
    return []


def features_of(config: Config) -> list[Feature]:
    """The features of the data. A history is not combined where the model weighs its rows."""
    weighed = {text.partition("=")[0] for text in config.model.recommender.histories}
    return [
        Feature(
            each.name, each.table_name, each.length,
            "none" if each.name in weighed else config.tables.combine,
        )
        for each in records.schema_of(config.data).features
    ]  # fmt: skip


def tables_of(config: Config) -> list[Table]:
    """The tables of the data's features."""
    width = config.model.recommender.width
    return [
        Table(name, rows, width, config.tables.split, config.tables.scale)
        for name, rows in records.schema_of(config.data).tables.items()
    ]


def problems(config: Config) -> Iterator[str]:
    """Problems of the tables; those of the sections have been found."""
    if not config.model.recommender.name:
        return
    yield from bounds.problems(config.tables, "tables.")
    if config.data.format != data_config.RECORDS or not config.model.recommender.features:
        return
    if config.batch.sequence_length != 1:
        yield (
            f"batch.sequence_length={config.batch.sequence_length} with data.format='records': a "
            "record is a row of one position, so set batch.sequence_length=1"
        )
    if config.optimizer.ema_decay:
        yield (
            f"optimizer.ema_decay={config.optimizer.ema_decay} with "
            f"model.recommender.name={config.model.recommender.name!r}: rows have no average; "
            "set optimizer.ema_decay=0"
        )
    yield from tables_config.problems(tables_of(config), features_of(config))
