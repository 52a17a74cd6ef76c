"""Tables, the features that look rows up in them, and the `tables` section of a config."""

import dataclasses
from collections.abc import Iterator, Sequence

from llmx.runtime.bounds import bounded, choice

SPLITS = ("rows", "columns", "whole")
COMBINERS = ("sum", "mean", "max", "none")
OPTIMIZERS = ("sgd", "adagrad", "row_adagrad", "adam", "ftrl")
UNBOUNDED_SCALE = 0.01  # of new rows, where ids have no bound and `scale` is 0


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of numbers by id.

    rows: ids are below it; 0 = of 64 bits, which a cache of host rows has (`tables.cached`).
    split: "rows": row by row over the devices of the batch; "whole": on one device; "columns":
      each device has some columns of every row.
    scale: new rows are uniform in [-scale, scale]; 0 = 1 / sqrt(rows), as DLRM's.
    """

    name: str
    rows: int
    width: int
    split: str = "rows"
    scale: float = 0.0

    @property
    def bound(self) -> float:
        return self.scale or (self.rows**-0.5 if self.rows else UNBOUNDED_SCALE)


@dataclasses.dataclass(frozen=True)
class Feature:
    """Up to `length` ids of a record, whose rows are combined to one, or not ("none").

    hashes: rows of each id, side by side in `ids`, that are added up first.
    """

    name: str
    table: str
    length: int = 1
    combine: str = "sum"
    hashes: int = 1

    @property
    def columns(self) -> int:
        """Rows that a record looks up."""
        return self.length * self.hashes


@dataclasses.dataclass
class TablesConfig:
    """How the rows of sparse tables are split and trained."""

    split: str = choice("rows", SPLITS)  # of all tables: rows | columns | whole
    combine: str = choice("mean", ("sum", "mean", "max"))  # of features with several ids
    # new rows are uniform in [-scale, scale]; 0 = 1 / sqrt(rows of the table)
    scale: float = bounded(0.0, at_least=0)
    optimizer: str = choice("row_adagrad", OPTIMIZERS)  # of the rows that a step touches
    learning_rate: float = bounded(0.02, above=0)  # of rows, at the peak of the run's schedule
    eps: float = bounded(1e-8, at_least=0)  # added to the root that gradients are divided by
    b1: float = bounded(0.9, at_least=0, below=1)  # adam: of the momentum
    b2: float = bounded(0.999, at_least=0, below=1)  # adam: of the second moment
    # adagrad: what sums of squares begin with. From 0 the first update of a row that one record has
    # named would be as long as any
    initial_square: float = bounded(1e-8, at_least=0)
    l1: float = bounded(0.0, at_least=0)  # ftrl
    l2: float = bounded(0.0, at_least=0)  # ftrl
    # lr * weight_decay of a row is taken off in each step, also of rows that no step touches: when
    # they are read, all at once
    weight_decay: float = bounded(0.0, at_least=0)
    # Rows that a device asks each other for in one exchange, as a multiple of an equal share of its
    # ids; what is more goes in further exchanges
    capacity: float = bounded(1.5, above=0)
    # Rows that the devices hold of all tables together, a cache of those in host memory; 0 = tables
    # are whole on the devices
    cache_rows: int = bounded(0, at_least=0)
    # GiB of host memory, for rows with their state and ids; where it is full the rows that were not
    # named for longest are forgotten
    host_gib: float = bounded(4.0, above=0)
    # With a cache: an id gets a row that is trained when it was seen so often; before, it has the
    # numbers that its row begins with
    admit_after: int = bounded(1, at_least=1)
    # Gradients of rows reach the tables so many steps late, and rows of a batch are looked up a
    # step ahead, so that neither exchange waits for the network; 0 = in the same step
    staleness: int = bounded(0, at_least=0, at_most=64)


def problems(tables: Sequence[Table], features: Sequence[Feature]) -> Iterator[str]:
    """What does not fit together."""
    by_name = {table.name: table for table in tables}
    for kind, listed in (("table", tables), ("feature", features)):
        names = [one.name for one in listed]
        if twice := {name for name in names if names.count(name) > 1}:
            yield f"{kind}s {sorted(twice)} are there twice: give each a name of its own"
    for table in tables:
        if table.rows < 1 or table.width < 1:
            yield (
                f"table {table.name!r} of {table.rows} rows and width {table.width}: use at least "
                "1 of both; ids without a bound need tables.cache_rows"
            )
        if table.split not in SPLITS:
            yield f"table {table.name!r}: split={table.split!r} is unknown: use {', '.join(SPLITS)}"
    for feature in features:
        if feature.table not in by_name:
            yield (
                f"feature {feature.name!r} looks up table {feature.table!r}, which is not there: "
                f"use one of {', '.join(by_name)}"
            )
        if feature.length < 1 or feature.hashes < 1:
            yield (
                f"feature {feature.name!r}: length={feature.length}, hashes={feature.hashes}: use "
                "at least 1 of both"
            )
        if feature.combine not in COMBINERS:
            yield (
                f"feature {feature.name!r}: combine={feature.combine!r} is unknown: use "
                f"{', '.join(COMBINERS)}"
            )
