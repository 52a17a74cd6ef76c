"""Rows of sparse tables in a model: among the parameters, and in a batch.

Where a gradient is taken (`step.sparse_rows`), rows are looked up once for all microbatches, and
are among the parameters under `ROWS`. In an evaluation the tables themselves are, under `TABLES`,
and rows are looked up here. What says which record has which row is in the batch.

Letters: B records, U different rows of a device, n devices, W width of a row.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llmx.tables import numbers
from llmx.tables.tables import Ids, Plan, Tables

ROWS = "rows"  # by width, [n U, W]
TABLES = "tables"  # the tables' state; also in State.extra
IDS = "ids"  # of a batch: of records, and what the host has said to the devices
LATE = "late_rows"  # in State.extra: updates and rows that are under way, `llmx.tables.late`
NEXT = "next_"  # before the name of an array that a batch has of the one after it
BEFORE = "before"  # of a cache of keys and values: the last tokens of each row
PLACE, PRESENT = "place", "present"  # of a plan, by width; a batch has them after a lookup


def with_rows(params: dict, batch: dict, tables: Tables, ids: Ids) -> tuple[dict, dict]:
    """Parameters and batch of an evaluation after the lookup; as they are, if that is done."""
    if TABLES not in params:
        return params, batch
    taken = tables.take(params[TABLES], ids)
    params = {name: leaf for name, leaf in params.items() if name != TABLES}
    return params | {ROWS: taken.rows}, batch | of_plan(taken.plan)


def read_ahead(tables: Tables, id_arrays: tuple[str, ...]) -> dict[str, str]:
    """Names of arrays of the next batch, by the name that they have there, with which a batch says
    what is to be looked up for that one. {} where rows are looked up in the step that takes them.

    id_arrays: what the ids of a batch are made of.
    """
    if not tables.config.staleness:
        return {}
    return {name: NEXT + name for name in id_arrays}


def without_next(batch: dict) -> tuple[dict, dict]:
    """A batch, and what it says of the next one, by the names of that."""
    own = {name: leaf for name, leaf in batch.items() if not name.startswith(NEXT)}
    return own, {name.removeprefix(NEXT): batch[name] for name in batch.keys() - own.keys()}


def of_plan(plan: Mapping[str, Plan]) -> dict[str, Any]:
    """What a batch has of a plan: arrays whose first dimension is that of records."""
    return {PLACE + key: one.place_BK for key, one in plan.items()} | {
        PRESENT + key: one.present_BK for key, one in plan.items()
    }


def plan_of(batch: dict, tables: Tables) -> dict[str, Plan]:
    """The plan of a batch, as far as rows are combined by it."""
    return {
        key: Plan(None, batch[PLACE + key], batch[PRESENT + key], None) for key in tables.groups
    }


def ngram_name(order: int) -> str:
    """Of the table, and of its feature."""
    return f"{order}-grams"


def raw_ids(ngram_orders: tuple[int, ...], ngram_rows: int, batch: Mapping) -> np.ndarray:
    """On the host, what a batch looks up, [B, K] of all features side by side: the ids of records,
    or of n-grams."""
    if IDS in batch:
        ids_BTI = batch[IDS]
    else:
        found = ngrams(ngram_orders, ngram_rows, batch["tokens"], batch["positions"], xp=np)
        ids_BTI = np.stack(list(found.values()), axis=2)
    return ids_BTI.transpose(0, 2, 1).reshape(len(ids_BTI), -1)


def with_slots(batch: Mapping, slots_BK: np.ndarray) -> dict:
    """The batch with what devices look up, int32 [B, T, I]: K = I T."""
    B, T = batch["tokens"].shape
    slots_BTI = slots_BK.reshape(B, -1, T).transpose(0, 2, 1)
    return dict(batch) | {IDS: np.ascontiguousarray(slots_BTI)}


def slots_by_feature(tables: Tables, batch: Mapping) -> dict[str, jax.Array]:
    """What a batch looks up, int32 [B, T] by feature, where the host has said so."""
    return {one.name: batch[IDS][..., at] for at, one in enumerate(tables.features)}


def ngrams(
    orders: tuple[int, ...], rows: int, tokens_BT: Any, positions_BT: Any, xp: Any = jnp
) -> dict[str, Any]:
    """By table, the id of the last tokens up to each position, int32 [B, T], hashed to so many
    rows; -1 where a document has not as many tokens yet."""
    found = {}
    for order in orders:
        bits = xp.full_like(tokens_BT, order).astype(xp.uint32)
        for back in range(order):
            before = xp.pad(tokens_BT, ((0, 0), (back, 0)))[:, : tokens_BT.shape[1]]
            bits = numbers.mixed(bits * xp.uint32(0x01000193) ^ before.astype(xp.uint32), xp)
        ids = (bits % xp.uint32(rows)).astype(xp.int32)
        found[ngram_name(order)] = xp.where(positions_BT >= order - 1, ids, -1)
    return found


def continued(
    before_BN: jax.Array, tokens_BT: jax.Array, positions_BT: jax.Array, *, is_text_BT: jax.Array
) -> tuple[dict, jax.Array]:
    """Tokens with those before them, and their positions, [B, N + T], of which n-grams are made;
    and what will be before the next ones, [B, N]. Text is on the left of what fills a row up."""
    N = before_BN.shape[1]
    tokens_BM = jnp.concatenate([before_BN, tokens_BT.astype(jnp.int32)], axis=1)
    batch = dict(tokens=tokens_BM, positions=jnp.pad(positions_BT, ((0, 0), (N, 0))))
    at_BN = is_text_BT.sum(axis=1, dtype=jnp.int32)[:, None] + jnp.arange(N, dtype=jnp.int32)
    return batch, jnp.take_along_axis(tokens_BM, at_BN, axis=1)
