"""Tables and network of a checkpoint in its files, as exports read them: part by part, whatever
devices wrote it."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from llmx import sharding
from llmx.checkpoint import checkpointer, relaid, streamed
from llmx.checkpoint.manifest import Document
from llmx.model.looked_up import TABLES
from llmx.sharding import trees
from llmx.tables import by_id, placement
from llmx.tables import tables as tables_lib
from llmx.tables.by_id import ByDevice
from llmx.tables.config import Feature, Table


class SavedTables(NamedTuple):
    """What an export takes of a checkpoint."""

    step: int
    source: ByDevice
    devices: int  # that had the tables
    # Parameters of the network by path, in fp32 where numpy's files have no such dtype
    dense: dict[str, np.ndarray]

    def block_rows(self, table: Table, *, slots: int, num_bytes: int) -> int:
        """See `by_id.block_rows`."""
        chunks = [
            self.source.rows[key].store.chunk_layout.read_chunk.shape[0]
            for key, group in self.source.groups.items()
            if group.parts_of(table.name)
        ]
        return by_id.block_rows(table, self.devices, max(chunks), slots=slots, num_bytes=num_bytes)


def open_saved(
    workdir: str, tables: Sequence[Table], features: Sequence[Feature], *,
    slots: Mapping[str, bool], step: int | None = None, log: Callable[[str], None],
) -> SavedTables:  # fmt: skip
    """Opens the newest good checkpoint, or that of a step; reads its network, and the tables once,
    for their checksums. `slots`: of the optimizer, and whether each number of a row has one.

    Raises ValueError if there is none, or one without these tables.
    """
    place = relaid.path_of(TABLES)
    found = _restored(workdir, place, step, log)
    section, sizes = found.meta.get("config", {}).get("tables", {}), found.meta.get("mesh", {})
    tables = [
        dataclasses.replace(table, split=section.get("split", table.split)) for table in tables
    ]
    devices = math.prod(sizes.get(axis, 1) for axis in sharding.BATCH_AXES)
    widths = {str(group.width) for group in placement.placed(tables, features, devices)}
    if widths != found.state["rows"].keys():
        raise ValueError(
            f"checkpoint {found.step} of {workdir} has tables of the widths "
            f"{sorted(found.state['rows'])}, and the config gives {sorted(widths)}: bring back the "
            "run's config.json"
        )
    state = tables_lib.by_path(found.state)
    kept = {name for of_group in state.slots.values() for name in of_group}
    if not slots.keys() <= kept:
        raise ValueError(
            f"checkpoint {found.step} of {workdir} has {', '.join(sorted(kept)) or 'nothing'} of "
            f"its optimizer, and the config's keeps {', '.join(slots)}: bring back the run's "
            "config.json"
        )
    source = by_id.of_state(state, tables, features, devices, slots=slots, due=True)
    params = _restored(workdir, "params", found.step, log).state
    dense = {name: _in_numpy(leaf[...]) for name, leaf in trees.named(params).items()}
    return SavedTables(found.step, source, devices, dense)


def _restored(workdir: str, place: str, step: int | None, log: Callable[[str], None]):
    def wanted(saved: Document) -> Any:
        if not saved.holds(place):
            raise ValueError(
                f"checkpoint {saved.step} of {workdir} has no {place}: name the work directory of "
                "a run with sparse tables"
            )
        leaves = {
            name.removeprefix(f"{place}/"): leaf
            for name, leaf in saved.leaves.items()
            if name.startswith(f"{place}/")
        }
        return trees.nest({
            name: jax.ShapeDtypeStruct(tuple(leaf["shape"]), leaf["dtype"])
            for name, leaf in leaves.items()
        })  # fmt: skip

    return checkpointer.restore_saved(
        workdir, wanted, prefix=place, step=step, log=log, reader=streamed.FROM_FILES
    )


def _in_numpy(array: np.ndarray) -> np.ndarray:
    """The array; of a dtype that numpy's files do not have, in fp32."""
    return array.astype(np.float32) if array.dtype.kind == "V" else array
