"""What a run begins with that starts from exported tables: rows and the parameters beside them, on
any devices and by any split."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from llmx.checkpoint.manifest import Mismatch
from llmx.contract import State
from llmx.model.looked_up import TABLES
from llmx.sharding import trees
from llmx.step.step import Recipe
from llmx.tables import exports
from llmx.tables.exports import Export


def parameters(
    place: str, like: Any, require_same: Callable[[Mapping[str, Any]], None]
) -> tuple[Any, int]:
    """The parameters of the network with the shardings and dtypes of `like`, and the step of the
    run that they were exported from. Each process reads its own shards.

    require_same: raises where a config, as JSON, is of another model. Raises ValueError.
    """
    opened = exports.open_export(place, verify=True)  # and what `with_tables` reads
    try:
        require_same({"model": opened.manifest["model"]})
    except Mismatch as error:
        raise ValueError(str(error)) from error
    saved, wanted = opened.dense, trees.named(like)
    shapes = [{name: tuple(leaf.shape) for name, leaf in each.items()} for each in (saved, wanted)]
    if shapes[0] != shapes[1]:
        name, _ = sorted(shapes[0].items() ^ shapes[1].items())[0]
        raise ValueError(
            f"start_from={place!r}: {name} has the shape {shapes[0].get(name, 'none')}, and the "
            f"config gives {shapes[1].get(name, 'none')}: use the widths of the exported model"
        )

    def placed(array: np.ndarray, leaf: Any) -> jax.Array:
        array = array.astype(leaf.dtype)
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda at: array[at])

    arrays = {name: placed(saved[name], leaf) for name, leaf in wanted.items()}
    return trees.unnamed(arrays, like), opened.step


def with_tables(recipe: Recipe, state: State, place: str, log: Callable[[str], None]) -> State:
    """The new state with the rows of an export, bit for bit, and with what the same optimizer has
    kept of them, if the export has it.

    Raises ValueError where the export has other tables.
    """
    tables, opened = recipe.loss.execution.tables, exports.open_export(place)
    _require_same_tables(place, opened, tables)
    same = opened.manifest["optimizer"] == tables.config.optimizer
    slots = opened.slots if same else ()
    kept = f", with what {tables.config.optimizer} has kept of them" if slots else ""
    log(f"starting with the rows of {place}, step {opened.step}{kept}")
    for leaf in jax.tree.leaves(state.extra[TABLES]):
        leaf.delete()  # the devices may not have room for both
    extra = dict(state.extra) | {TABLES: tables.filled(opened, slots)}
    return state._replace(extra=extra)


def _require_same_tables(place: str, opened: Export, tables: Any) -> None:
    wanted = {table.name: (table.rows, table.width) for table in tables.tables}
    saved = {table.name: (table.rows, table.width) for table in opened.tables.values()}
    if wanted != saved:
        name, _ = sorted(wanted.items() ^ saved.items())[0]
        raise ValueError(
            f"start_from={place!r}: table {name!r} has (rows, width) {saved.get(name, 'none')}, "
            f"and the config gives {wanted.get(name, 'none')}: use the same data.records (hashes "
            "depend on the rows) and widths"
        )
