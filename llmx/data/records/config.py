"""The `data.records` section of a config."""

import dataclasses
from collections.abc import Iterator

from llmx.data.records import schema as schema_lib
from llmx.data.records.schema import Schema


@dataclasses.dataclass
class RecordsConfig:
    """With data.format="records": the columns of files. Shards have their own."""

    label: str = "label"  # column of a Parquet file that is 0 or 1; of lines it is the first
    # Columns of numbers: of lines, those behind the label. By default Criteo's I1 ... I13
    dense: tuple[str, ...] = schema_lib.CRITEO_DENSE
    # Columns of ids, behind the numbers in lines; by default Criteo's C1 ... C26. "NAME:LENGTH" has
    # lists of up to LENGTH ids; "NAME@TABLE" has the ids of TABLE: "history:50@item"; "NAME*COLUMN"
    # has the weights of its ids in COLUMN: "history:50*seconds@item"
    features: tuple[str, ...] = schema_lib.CRITEO_FEATURES
    # "rows": an id is a row of its table, below data.records.rows; a text is hashed to one.
    # "double": any whole number or text is two such rows, by two hashes, which are added up.
    # "exact": 64 bits, as they are or the hash of a text, which needs tables.cache_rows
    ids: str = dataclasses.field(default="rows", metadata={"choices": schema_lib.KINDS})
    # Ids of a feature are below this; texts are hashed to as many.
    rows: int = dataclasses.field(
        default=1_000_000, metadata={"limits": {"at least": 1, "at most": schema_lib.MAX_ROWS}}
    )


def schema_of(config: RecordsConfig) -> Schema:
    """The columns of files. Raises ValueError for names that are none."""
    parse = schema_lib.parse_feature
    features = tuple(parse(text, config.rows, config.ids) for text in config.features)
    return Schema(tuple(config.dense), features)


def problems(config: RecordsConfig) -> Iterator[str]:
    """What is wrong with the columns together."""
    try:
        found = schema_of(config)
    except ValueError as error:
        yield str(error)
        return
    yield from schema_lib.problems(found)
    if not config.label:
        yield "data.records.label='' is no column: name the one of the label, such as 'label'"
