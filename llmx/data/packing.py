"""Rows of T tokens over the documents of one side of a split, by number, without any copy of them.

Packed, the documents are one stream and row w holds its tokens wT to (w+1)T; the target of each is
the next token, so every token that follows another in its document is predicted exactly once.
Unpacked, the same holds within each document. Letters: B rows, T tokens.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from llmx.data import pairs
from llmx.data import shards as shards_lib
from llmx.data import split as split_lib
from llmx.data.teacher_tokens import TeacherTokens

# In a batch, what a teacher says: see `llmx.model.distillation`.
TEACHER_IDS, TEACHER_LOG_P = "teacher_ids", "teacher_log_p"


def empty_batch(
    num_rows: int, sequence_length: int, filler: int, *, top_k: int = 0
) -> dict[str, np.ndarray]:
    """A batch of padding: filler tokens, segment 0, weight 0. All arrays [B, T]; with `top_k` those
    of a teacher, [B, T, top_k] and [B, T, top_k + 1]."""
    shape = (num_rows, sequence_length)
    of_teacher = {
        TEACHER_IDS: np.zeros((*shape, top_k), np.int32),
        TEACHER_LOG_P: np.zeros((*shape, top_k + 1), np.float32),
    }
    return (of_teacher if top_k else {}) | {
        "tokens": np.full(shape, filler, np.int32),
        "targets": np.full(shape, filler, np.int32),
        "segment_ids": np.zeros(shape, np.int32),
        "positions": np.zeros(shape, np.int32),
        "weights": np.zeros(shape, np.float32),
    }


def check_rows(step: int, rows: Sequence[int], batch_size: int) -> None:
    """Raises ValueError for a step, or rows of a global batch, that there are not."""
    if step < 0:
        raise ValueError(f"step={step} is negative: steps count from 0")
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} is below 1: give the global number of rows")
    if outside := [row for row in rows if not 0 <= row < batch_size]:
        raise ValueError(
            f"row {outside[0]} is outside the global batch of {batch_size}: give rows from 0 to "
            f"{batch_size - 1}"
        )


class Windows:
    """The rows of one side of one source."""

    def __init__(
        self, shards: shards_lib.Shards, part: split_lib.Part, *,
        sequence_length: int, one_document_per_row: bool, teacher: TeacherTokens | None = None,
    ):  # fmt: skip
        self._teacher = teacher
        self._shards, self._length, self._starts = shards, sequence_length, part.starts
        # Stream position of each document; one more entry for the end of the last.
        self._bounds = np.concatenate([[0], np.cumsum(part.lengths)]).astype(np.int64)
        self._shard_bounds = np.cumsum([0] + [len(tokens) for tokens in shards.tokens])
        self._first_row = None
        if one_document_per_row:
            rows = -(-(part.lengths - 1) // sequence_length)
            self._first_row = np.concatenate([[0], np.cumsum(rows)]).astype(np.int64)
            self.num_windows = int(self._first_row[-1])
        else:
            self.num_windows = -(-max(part.num_tokens - 1, 0) // sequence_length)

    def _extents(self, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Stream positions [begin, end) of the T + 1 tokens, or fewer, of each window."""
        if self._first_row is None:
            begin = windows * self._length
            limit = self._bounds[-1]
        else:
            document = np.searchsorted(self._first_row, windows, side="right") - 1
            begin = self._bounds[document] + (windows - self._first_row[document]) * self._length
            limit = self._bounds[document + 1]
        return begin, np.minimum(begin + self._length + 1, limit)

    def fill(self, batch: Mapping[str, np.ndarray], rows: np.ndarray, windows: np.ndarray) -> None:
        """Writes the windows into those rows of the batch, which must be padding so far."""
        T = self._length
        begin, end = self._extents(windows)
        first = np.searchsorted(self._bounds, begin, side="right") - 1
        last = np.searchsorted(self._bounds, end - 1, side="right") - 1
        # One entry per segment, that is, per document and window that meet.
        counts = last - first + 1
        row = np.repeat(np.arange(len(windows)), counts)
        local = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        document = first[row] + local
        lower = np.maximum(self._bounds[document], begin[row])
        upper = np.minimum(self._bounds[document + 1], end[row])
        column, size = lower - begin[row], upper - lower
        source = self._starts[document] + lower - self._bounds[document]
        ids, learned = (
            array.reshape(len(windows), -1) for array in self._read(row, column, size, source)
        )

        num_inputs = np.minimum(end - begin, T)
        size_in = np.minimum(column + size, T) - column
        segment = np.repeat((local + 1).astype(np.int32), size_in)
        offset = np.cumsum(size_in) - size_in
        position = np.arange(len(segment), dtype=np.int32)
        position -= np.repeat(offset.astype(np.int32), size_in)
        is_last = (upper == self._bounds[document + 1]) & (column + size - 1 < T)
        if len(segment) == len(windows) * T:
            shape = (len(windows), T)
            segment, position = segment.reshape(shape), position.reshape(shape)
            weights = np.ones(shape, np.float32)
        else:
            real = np.arange(T) < num_inputs[:, None]
            segment, position = _spread(segment, real), _spread(position, real)
            weights = real.astype(np.float32)
        weights[row[is_last], (column + size - 1)[is_last]] = 0.0
        if self._shards.weights:  # those of the targets
            weights *= learned[:, 1:] & shards_lib.LEARNED
        batch["tokens"][rows] = ids[:, :T]
        batch["targets"][rows] = ids[:, 1:]
        batch["segment_ids"][rows] = segment
        batch["positions"][rows] = position
        batch["weights"][rows] = weights
        if self._shards.pairs:
            pairs.separate(batch, rows, learned[:, :T])
        if TEACHER_IDS in batch:
            size_in = np.minimum(column + size, T) - column
            self._fill_of_teacher(batch, rows[row], column, size_in, source)

    def _fill_of_teacher(
        self, batch: Mapping[str, np.ndarray], row: np.ndarray, column: np.ndarray,
        size: np.ndarray, source: np.ndarray,
    ) -> None:  # fmt: skip
        """Writes what the teacher says of each segment into its place."""
        top_k = batch[TEACHER_IDS].shape[-1]
        shard = np.searchsorted(self._shard_bounds, source, side="right") - 1
        offset = source - self._shard_bounds[shard]
        for at, first, count, number, begin in zip(
            *(array.tolist() for array in (row, column, size, shard, offset)), strict=True
        ):
            found = self._teacher.read(number, begin, begin + count, top_k)
            for name, array in zip((TEACHER_IDS, TEACHER_LOG_P), found, strict=True):
                batch[name][at, first : first + count] = array

    def _read(
        self, row: np.ndarray, column: np.ndarray, size: np.ndarray, source: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of the segments, and their weights if there are any, flat [rows * (T + 1)]; what
        no segment covers is filler."""
        width, arrays, weights = self._length + 1, self._shards.tokens, self._shards.weights
        flat = (int(row[-1]) + 1) * width
        ids = np.full(flat, self._shards.tokenizer.end_of_document, np.int32)
        learned = np.zeros(flat if weights else 0, np.uint8)
        shard = np.searchsorted(self._shard_bounds, source, side="right") - 1
        # Neighbours in the file are copied together: one copy a window in the common case.
        joined = (np.diff(row) == 0) & (np.diff(shard) == 0) & (np.diff(source) == size[:-1])
        heads = np.concatenate([[0], np.flatnonzero(~joined) + 1])
        sizes = np.add.reduceat(size, heads).tolist()
        targets = (row * width + column)[heads].tolist()
        offsets = (source - self._shard_bounds[shard])[heads].tolist()
        for target, number, offset, count in zip(
            targets, shard[heads].tolist(), offsets, sizes, strict=True
        ):
            ids[target : target + count] = arrays[number][offset : offset + count]
            if weights:
                learned[target : target + count] = weights[number][offset : offset + count]
        if ids.max() >= self._shards.vocab_size or ids.min() < 0:
            self._raise_outside(shard[heads], offsets, sizes)
        return ids, learned

    def _raise_outside(self, shard: np.ndarray, offsets: list[int], sizes: list[int]) -> None:
        """Names the file and byte of a token that the vocabulary does not have."""
        vocab_size = self._shards.vocab_size
        for number, offset, count in zip(shard.tolist(), offsets, sizes, strict=True):
            tokens = self._shards.tokens[number]
            wrong = np.flatnonzero(tokens[offset : offset + count] >= vocab_size)
            if len(wrong):
                at = offset + int(wrong[0])
                path = self._shards.folder / f"{self._shards.names[number]}.tokens"
                raise ValueError(
                    f"{path}: byte {at * tokens.dtype.itemsize}: token id {tokens[at]} is outside "
                    f"the vocabulary of {vocab_size}: the file is damaged; delete "
                    f"{self._shards.folder} and make it again"
                )


def _spread(values: np.ndarray, real: np.ndarray) -> np.ndarray:
    """Puts values into the true places of a mask, row by row, zero elsewhere."""
    spread = np.zeros(real.shape, values.dtype)
    spread[real] = values
    return spread
