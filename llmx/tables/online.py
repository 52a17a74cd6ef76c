"""Lookups of exported tables in one process, without jax: for inference online.

    opened = online.open_export("exports/day3")
    opened.lookup("item", ids)                           # fp32 [..., W]
    opened.bags("history", ids_BL, weights_BL)           # fp32 [B, W]
    opened.ids_of("item", ["shoes", "bread"])            # texts as training hashed them

Files are memory-mapped: processes of one machine share what has been read, and opening costs
nothing of the tables' size. Letters: B records, L ids of a feature, W width.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence

import numpy as np

from llmx.data.records import hashing
from llmx.data.records.schema import Feature
from llmx.tables import exports
from llmx.tables.exports import Export


@dataclasses.dataclass(frozen=True, eq=False)
class Online:
    """Tables of an export."""

    export: Export

    def lookup(self, table: str, ids: np.ndarray) -> np.ndarray:
        """Rows, fp32 [..., W]; 0 of ids that are -1. Raises ValueError for ids that there are not
        in the table."""
        ids = np.asarray(ids)
        if not ids.size:
            ids = ids.astype(np.int64)
        if ids.dtype.kind not in "iu":
            raise ValueError(
                f"table {table!r}: ids of type {ids.dtype}, and they are whole numbers: hash texts "
                "as training did (ids_of)"
            )
        flat_R, rows = ids.reshape(-1), self._table(table).rows
        if flat_R.size and (flat_R.min() < -1 or flat_R.max() >= rows):
            bad = flat_R[(flat_R < -1) | (flat_R >= rows)][0]
            raise ValueError(
                f"table {table!r}: id {bad} is not from 0 to {rows - 1:,}, its rows: hash ids as "
                "training did (ids_of); -1 says that there is no id"
            )
        found_RW = self.export.take(table, np.maximum(flat_R, 0))
        found_RW[flat_R < 0] = 0
        return found_RW.reshape(*ids.shape, found_RW.shape[1])

    def bags(
        self, feature: str, ids_BL: np.ndarray, weights_BL: np.ndarray | None = None
    ) -> np.ndarray:
        """The rows of each record combined as in training, fp32 [B, W], or [B, L, W] of a feature
        that is not combined; 0 where there is none.

        weights_BL: rows are multiplied by them first; means are divided by their sum.
        """
        how = self._feature(feature)
        ids_BL = np.asarray(ids_BL)
        if ids_BL.ndim != 2 or ids_BL.shape[1] > how.length:
            raise ValueError(
                f"feature {feature!r}: ids of shape {list(ids_BL.shape)}, and they are [B, L] with "
                f"L up to {how.length}: one row for each record"
            )
        rows_BLW, there_BL = self.lookup(how.table, ids_BL), ids_BL >= 0
        scale_BL = there_BL.astype(np.float32)
        if weights_BL is not None:
            weights_BL = np.asarray(weights_BL, np.float32)
            if weights_BL.shape != ids_BL.shape:
                raise ValueError(
                    f"feature {feature!r}: weights of shape {list(weights_BL.shape)} for ids of "
                    f"shape {list(ids_BL.shape)}: give each id one"
                )
            if not (np.isfinite(weights_BL) & (weights_BL >= 0)).all():
                raise ValueError(f"feature {feature!r}: weights of ids are finite and not below 0")
            scale_BL = scale_BL * weights_BL
        if how.combine == "sum":
            return np.einsum("BL,BLW->BW", scale_BL, rows_BLW)
        if how.combine == "mean":
            total_B1 = scale_BL.sum(axis=1, keepdims=True)
            return np.einsum("BL,BLW->BW", scale_BL, rows_BLW) / np.where(
                total_B1 == 0, np.float32(1), total_B1
            )
        scaled_BLW = rows_BLW * scale_BL[..., None]
        if how.combine == "none":
            return scaled_BLW
        most_BW = np.where(there_BL[..., None], scaled_BLW, -np.inf).max(axis=1)
        return np.where(there_BL.any(axis=1)[:, None], most_BW, np.float32(0))

    def ids_of(self, table: str, texts: Sequence[str | bytes]) -> np.ndarray:
        """The row of each text, int32, by the hash that records are read with; -1 of ""."""
        if other := [text for text in texts if not isinstance(text, str | bytes)]:
            raise ValueError(f"table {table!r}: {other[0]!r} is no text: give str or bytes")
        encoded = [text.encode() if isinstance(text, str) else text for text in texts]
        if bad := [text for text in encoded if len(text) > hashing.MAX_BYTES]:
            raise ValueError(
                f"table {table!r}: a text of {len(bad[0]):,} bytes, and a category has at most "
                f"{hashing.MAX_BYTES}: shorten it as for training"
            )
        as_bytes = np.array([*encoded, b"."], dtype=bytes)[:-1]  # of one byte at least
        found = hashing.of_texts(as_bytes, Feature(table, self._table(table).rows))
        return np.where(as_bytes == b"", np.int32(-1), found[:, 0])

    def _feature(self, name: str):
        if name not in (features := self.export.features):
            raise ValueError(f"there is no feature {name!r}: use one of {', '.join(features)}")
        return features[name]

    def _table(self, name: str):
        tables: Mapping = self.export.tables
        if name not in tables:
            raise ValueError(f"there is no table {name!r}: use one of {', '.join(tables)}")
        return tables[name]


def open_export(folder: str | os.PathLike, *, verify: bool = False) -> Online:
    """Opens an export, with the increments that it is behind; `verify` reads all of it."""
    return Online(exports.open_export(folder, verify=verify))
