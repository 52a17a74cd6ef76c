"""What does not fit together: tables, features, the config and the devices; and ids that tables do
not have."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from llmx.tables import config as config_lib
from llmx.tables import placement
from llmx.tables.config import Feature, Table, TablesConfig


def problems(
    tables: Sequence[Table], features: Sequence[Feature], config: TablesConfig, devices: int
) -> Iterator[str]:
    """What does not fit together, on so many devices of the batch."""
    wrong = list(config_lib.problems(tables, features))
    yield from wrong
    if config.weight_decay and config.optimizer == "ftrl":
        yield "tables.weight_decay goes not with tables.optimizer='ftrl': use tables.l2"
    by_columns = [table.name for table in tables if table.split == "columns"]
    if by_columns and config.optimizer == "row_adagrad":
        yield (
            f"tables.split='columns' of table {by_columns[0]!r} goes not with "
            "tables.optimizer='row_adagrad', which has one number of a whole row: use "
            "tables.optimizer='adagrad', or tables.split='rows'"
        )
    if (taken := config.learning_rate * config.weight_decay) >= 1:
        yield (
            f"tables.learning_rate x tables.weight_decay = {taken:g} must be less than 1, or a "
            "step would take rows away whole: lower tables.weight_decay"
        )
    if wrong:
        return  # of which nothing can be placed
    try:
        placement.placed(tables, features, devices)
    except ValueError as error:
        yield str(error)


def problems_of_ids(
    tables: Sequence[Table], features: Sequence[Feature], ids: Mapping[str, np.ndarray],
    first_record: int = 0,
) -> Iterator[str]:  # fmt: skip
    """Of ids on the host, the first of each feature that its table does not have."""
    by_name = {table.name: table for table in tables}
    for feature in features:
        array, rows = np.asarray(ids[feature.name]), by_name[feature.table].rows
        bad = np.argwhere((array < -1) | (array >= rows))
        if len(bad):
            record, place = bad[0]
            yield (
                f"table {feature.table!r}: id {array[record, place]} of feature "
                f"{feature.name!r} in record {first_record + record:,} is not below its "
                f"{rows:,} rows: hash ids, or make the table larger; -1 says that there is no "
                "id"
            )


def require_32_bits(feature: Feature, ids: Any) -> None:
    """Raises ValueError for larger ids on the host, which int32 would cut."""
    if isinstance(ids, np.ndarray) and ids.dtype.itemsize > 4 and ids.size:
        limits = np.iinfo(np.int32)
        if ids.min() < limits.min or ids.max() > limits.max:
            raise ValueError(
                f"feature {feature.name!r}: id {ids.max()} has more than 32 bits: hash ids, or "
                "keep rows in host memory (tables.cached)"
            )
