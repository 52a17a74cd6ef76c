"""Data that a program gives as an object, in place of files: the source "object:NAME".

An object has one method, and may have the other names:

- `train_rows(step, rows, batch_size)`: {name: array [len(rows), T]} of these rows of the batch of
  a step. A pure function: a run that goes on asks again for the same. "tokens" and "targets" (the
  next tokens) must be there. By default "weights" are 1, "segment_ids" 1 (0 = padding) and
  "positions" 0 ... T-1. Threads call it (`data.num_threads`).
- `held_out_rows(index, rows, batch_size)` and `num_held_out_rows`: the same of what is evaluated.
- `tokenizer`: a `tokenizers.Tokenizer`; bytes by default.
- `fingerprint`: text that is another for other data, so that a run does not go on with them.

Letters: T positions of a row.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmx.data import packing, tokenizers

PREFIX = "object:"
OBJECTS: dict[str, Any] = {}  # "object:NAME" -> object; `llmx.fit` and config files add to it


def problems(sources: Sequence[str], *, tokenizer: str, weights: Sequence[float]) -> list[str]:
    """What is wrong with sources of which one is an object."""
    [name, *_] = [source for source in sources if source.startswith(PREFIX)]
    if len(sources) > 1 or weights or tokenizer != "auto":
        return [
            f"data.sources: {name!r} is an object, which goes without other sources, data.weights "
            "and data.tokenizer: leave them out"
        ]
    if name not in OBJECTS:
        return [
            f"data.sources: {name!r} was an object of a program, which is not here: pass it to "
            "llmx.fit(dataset=...) again, or name text (llmx.evaluate: --data FILE)"
        ]
    if not callable(getattr(OBJECTS[name], "train_rows", None)):
        kind = type(OBJECTS[name]).__name__
        return [f"data.sources: {name!r} is a {kind} without train_rows(step, rows, batch_size)"]
    return []


def tokenizer_of(name: str) -> tokenizers.Tokenizer:
    """The tokenizer of a registered object."""
    return getattr(OBJECTS[name], "tokenizer", None) or tokenizers.ByteTokenizer()


class ObjectDataset:
    """What training takes of a `dataset.Dataset`, of an object."""

    def __init__(self, name: str, *, sequence_length: int, num_threads: int, prefetch: int):
        self._name, self._object = name, OBJECTS[name]
        self.tokenizer = tokenizer_of(name)
        self.vocab_size, self.sequence_length = self.tokenizer.vocab_size, sequence_length
        self.num_threads, self.prefetch = num_threads, prefetch
        self.fingerprint = str(getattr(self._object, "fingerprint", name))
        held_out = callable(getattr(self._object, "held_out_rows", None))
        self.num_held_out_windows = int(getattr(self._object, "num_held_out_rows", 0)) * held_out

    def train_rows(self, step: int, rows: Sequence[int], batch_size: int) -> dict[str, np.ndarray]:
        """See the head of this module. Raises ValueError for arrays that are no such rows."""
        return self._checked(self._object.train_rows(step, tuple(rows), batch_size), len(rows))

    def held_out_rows(
        self, index: int, rows: Sequence[int], batch_size: int
    ) -> dict[str, np.ndarray]:
        """The same of held-out batch `index`; rows past `num_held_out_rows` are padding."""
        there = [row for row in rows if index * batch_size + row < self.num_held_out_windows]
        found = self._object.held_out_rows(index, tuple(there), batch_size)
        batch = packing.empty_batch(len(rows), self.sequence_length, self.tokenizer.end_of_document)
        for key, array in self._checked(found, len(there)).items():
            batch[key][: len(there)] = array  # rows are in order
        return batch

    def _checked(self, found: Mapping[str, Any], num_rows: int) -> dict[str, np.ndarray]:
        shape = (num_rows, self.sequence_length)
        batch = packing.empty_batch(*shape, self.tokenizer.end_of_document)
        batch["weights"][:], batch["segment_ids"][:] = 1, 1
        batch["positions"][:] = np.arange(self.sequence_length)
        missing = {"tokens", "targets"} - found.keys()
        if missing or (unknown := found.keys() - batch.keys()):
            what = f"no {sorted(missing)}" if missing else f"{sorted(unknown)} too"
            raise ValueError(f"rows of {self._name!r} have {what}: give {', '.join(batch)}")
        for key, given in found.items():
            array = np.asarray(given)
            if array.shape != shape:
                raise ValueError(
                    f"{key!r} of {self._name!r} has the shape {array.shape}: give {shape}, the "
                    "rows that are asked for times batch.sequence_length"
                )
            batch[key][:] = array
        for key in ("tokens", "targets"):
            low, high = (int(f(batch[key], initial=0)) for f in (np.min, np.max))
            if low < 0 or high >= self.vocab_size:
                raise ValueError(
                    f"{key!r} of {self._name!r} has the token {low if low < 0 else high}: ids are "
                    f"0 to {self.vocab_size - 1}, as its tokenizer has {self.vocab_size} tokens"
                )
        return batch
