"""What a teacher says of each token of a folder of token shards, beside them.

    DIR/teacher/index.json             which teacher, of which shards, with checksums; sealed
    DIR/teacher/shard-00000.ids        per token the K likeliest next tokens, the likeliest first
    DIR/teacher/shard-00000.log_p      their log-probabilities and that of all others, fp16 [K+1]

Documents are scored by themselves, in windows of the teacher's context that overlap by half: a
token is scored with all that is before it in its document, or at least half the context.

Letters: K tokens, C positions of the teacher's context.
"""

import dataclasses
import hashlib
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from llmx.data import json_files, packing, tokenizers
from llmx.data import shards as shards_lib
from llmx.data.teacher_tokens import TeacherTokens

FOLDER = "teacher"
FORMAT, VERSION = "llmx-teacher-tokens", 1
KINDS = ("ids", "log_p")
LOG_P_DTYPE = np.dtype("<f2")
# A folder up to this size is checked against its checksums whenever it is opened.
VERIFY_BYTES = shards_lib.VERIFY_BYTES
_REBUILD = "run the same command with --overwrite-teacher"

# (tokens int32 [B, C], segment_ids, positions) -> (ids [B, C, K], log p [B, C, K+1])
Top = Callable[[Mapping[str, np.ndarray]], tuple[np.ndarray, np.ndarray]]


class Window(NamedTuple):
    """Tokens [begin, end) of a shard, of one document, of which those from `kept` on are kept."""

    begin: int
    end: int
    kept: int


def windows_of(lengths: np.ndarray, context: int) -> Iterator[Window]:
    """The windows of a shard's documents, in the order of their tokens."""
    first = 0
    for length in map(int, lengths):
        begin, kept, end = first, first, first + length
        while kept < end:
            yield Window(begin, min(begin + context, end), kept)
            kept = begin + context
            begin += max(context // 2, 1)
        first = end


def batches(windows: Iterator[Window], *, rows: int, context: int) -> Iterator[list[list[Window]]]:
    """Windows in rows of `context` tokens, some to a row, `rows` rows together, in order."""
    batch: list[list[Window]] = [[]]
    used = 0
    for window in windows:
        size = window.end - window.begin
        if used + size > context:
            if len(batch) == rows:
                yield batch
                batch = []
            batch.append([])
            used = 0
        batch[-1].append(window)
        used += size
    if batch[-1]:
        yield batch


@dataclasses.dataclass(frozen=True)
class Settings:
    """What decides the content of the files, beside the tokens."""

    teacher: str
    step: int
    top_k: int
    context: int


def write(
    shards: shards_lib.Shards, settings: Settings, top: Top, *, rows: int,
    report: Callable[[int], None],
) -> None:  # fmt: skip
    """Writes the files, or goes on where an earlier call was interrupted.

    `report`: called with the number of tokens that are done. Raises ValueError where the folder
    holds those of other settings.
    """
    folder = shards.folder / FOLDER
    folder.mkdir(exist_ok=True)
    tokens = shards_lib.read_index(shards.folder)
    identity = dataclasses.asdict(settings) | {"tokens": tokens["checksum"]}
    progress = _progress(folder, identity)
    bounds = np.cumsum([0] + [len(array) for array in shards.tokens])
    lengths = iter(shards.lengths.tolist())
    for number, name in enumerate(shards.names):
        # No document spans two shards.
        own, left = [], len(shards.tokens[number])
        while left:
            own.append(next(lengths))
            left -= own[-1]
        if number < len(progress["shards"]):
            continue
        writer = _Writer(folder, name, progress, settings.top_k, shards.vocab_size)
        windows = (one for one in windows_of(np.array(own), settings.context)
                   if one.end > writer.done)  # fmt: skip
        for batch in batches(windows, rows=rows, context=settings.context):
            writer.add(batch, *_scored(shards.tokens[number], batch, settings.context, rows, top))
            report(int(bounds[number]) + writer.done)
        progress["shards"].append(writer.close(len(shards.tokens[number])))
        progress["done"] = 0
        shards_lib.write_json(folder / shards_lib.PROGRESS, progress)
    index = {"format": FORMAT, "version": VERSION, "vocab_size": shards.vocab_size, **identity}
    index = shards_lib.seal(index | {"shards": progress["shards"]})
    shards_lib.write_json(folder / shards_lib.INDEX, index)
    (folder / shards_lib.PROGRESS).unlink()


def clear(shards_folder: pathlib.Path) -> None:
    """Removes what a teacher said."""
    shutil.rmtree(shards_folder / FOLDER, ignore_errors=True)


def is_complete(shards: shards_lib.Shards, settings: Settings) -> bool:
    """Whether the files of these settings are there. Raises ValueError where others' are."""
    path = shards.folder / FOLDER / shards_lib.INDEX
    if not path.is_file():
        return False
    index = _read_index(shards)
    given = dataclasses.asdict(settings)
    if different := [f"{k}={index[k]!r}, not {v!r}" for k, v in given.items() if index[k] != v]:
        raise ValueError(f"{path.parent} was written with {'; '.join(different)}: {_REBUILD}")
    return True


def _progress(folder: pathlib.Path, identity: dict) -> dict:
    path = folder / shards_lib.PROGRESS
    if not path.is_file():
        clear(folder.parent)
        folder.mkdir()
        progress = {"identity": identity, "shards": [], "done": 0}
        shards_lib.write_json(path, progress)
        return progress
    progress = json_files.read_object(path, remedy=_REBUILD)
    if progress.get("identity") != identity:
        raise ValueError(
            f"{folder} was begun with other settings, or of other tokens: {_REBUILD}, or give the "
            f"same: {progress.get('identity')}"
        )
    return progress


def _scored(tokens: np.ndarray, batch: list[list[Window]], context: int, rows: int, top: Top):
    """(ids [n, K], log p [n, K+1]) of the tokens that the windows keep, in order."""
    arrays = packing.empty_batch(rows, context, 0)
    for row, windows in enumerate(batch):
        at = 0
        for segment, window in enumerate(windows, 1):
            part = (row, slice(at, at + window.end - window.begin))
            arrays["tokens"][part] = tokens[window.begin : window.end]
            arrays["segment_ids"][part] = segment
            arrays["positions"][part] = np.arange(window.end - window.begin)
            at += window.end - window.begin
    names = ("tokens", "segment_ids", "positions")
    found = top({name: arrays[name] for name in names})
    kept = np.zeros((rows, context), bool)
    for row, windows in enumerate(batch):
        at = 0
        for window in windows:
            size = window.end - window.begin
            kept[row, at + window.kept - window.begin : at + size] = True
            at += size
    return tuple(array[kept] for array in found)


class _Writer:
    """The two files of a shard; what is recorded as done is on the disk."""

    def __init__(
        self, folder: pathlib.Path, name: str, progress: dict, top_k: int, vocab_size: int
    ):  # fmt: skip
        self._folder, self._name, self._progress = folder, name, progress
        self.done = progress["done"]  # tokens of the shard
        self._dtypes = dtypes_of(vocab_size)
        sizes = {"ids": top_k, "log_p": top_k + 1}
        self._files, self._hashes = {}, {}
        for kind in KINDS:
            path = folder / f"{name}.{kind}"
            path.touch()
            os.truncate(path, self.done * sizes[kind] * self._dtypes[kind].itemsize)
            with open(path, "rb") as file:
                self._hashes[kind] = hashlib.file_digest(file, "sha256")
            self._files[kind] = path.open("ab", buffering=1 << 20)

    def add(self, batch: list[list[Window]], ids: np.ndarray, log_p: np.ndarray) -> None:
        for kind, array in zip(KINDS, (ids, log_p), strict=True):
            content = array.astype(self._dtypes[kind]).tobytes()
            self._files[kind].write(content)
            self._hashes[kind].update(content)
        self.done += len(ids)
        # A resumed call begins with windows whose last token is not done: so whole windows only.
        assert self.done == batch[-1][-1].end
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        self._progress["done"] = self.done
        shards_lib.write_json(self._folder / shards_lib.PROGRESS, self._progress)

    def close(self, num_tokens: int) -> dict:
        for file in self._files.values():
            file.close()
        assert self.done == num_tokens
        sums = {kind: digest.hexdigest() for kind, digest in self._hashes.items()}
        return {"name": self._name, "tokens": num_tokens, "sha256": sums}


def dtypes_of(vocab_size: int) -> dict[str, np.dtype]:
    """Of the two files of a shard."""
    return {"ids": tokenizers.token_dtype(vocab_size), "log_p": LOG_P_DTYPE}


def open_tokens(shards: shards_lib.Shards, top_k: int, *, verify: bool = False) -> TeacherTokens:
    """What a teacher said of these shards, at least `top_k` tokens each.

    Sizes and the index are always checked; the checksums as of the shards. Raises ValueError.
    """
    folder = shards.folder / FOLDER
    if not (folder / shards_lib.INDEX).is_file():
        raise ValueError(
            f"{folder} holds nothing of a teacher, and distillation.top_k={top_k} reads it: write "
            f"it with python -m llmx.data --output {shards.folder} --teacher RUN --top-k {top_k}"
        )
    index = _read_index(shards)
    if index["top_k"] < top_k:
        raise ValueError(
            f"{folder} has the {index['top_k']} likeliest tokens, and distillation.top_k={top_k} "
            f"asks for more: use at most {index['top_k']}, or write them anew"
        )
    dtypes, sizes = dtypes_of(shards.vocab_size), {"ids": index["top_k"]}
    sizes["log_p"] = sizes["ids"] + 1
    total = sum(
        entry["tokens"] * sizes[kind] * dtypes[kind].itemsize
        for entry in index["shards"] for kind in KINDS
    )  # fmt: skip
    maps: dict[str, list] = {kind: [] for kind in KINDS}
    for entry in index["shards"]:
        for kind in KINDS:
            path = folder / f"{entry['name']}.{kind}"
            expected = entry["tokens"] * sizes[kind] * dtypes[kind].itemsize
            if not path.is_file() or path.stat().st_size != expected:
                raise ValueError(f"{path} is missing, or not of {expected} bytes: {_REBUILD}")
            if verify or total <= VERIFY_BYTES:
                _check_sum(path, entry["sha256"][kind])
            array = np.memmap(path, dtypes[kind], mode="r", shape=(entry["tokens"], sizes[kind]))
            maps[kind].append(np.asarray(array))
    return TeacherTokens(tuple(maps["ids"]), tuple(maps["log_p"]), index["top_k"])


def _check_sum(path: pathlib.Path, expected: str) -> None:
    with open(path, "rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise ValueError(f"{path}: checksum mismatch: its content has changed; {_REBUILD}")


def _read_index(shards: shards_lib.Shards) -> dict[str, Any]:
    path = shards.folder / FOLDER / shards_lib.INDEX
    index = json_files.read_object(path, remedy=_REBUILD)
    if index.get("format") != FORMAT or index.get("version") != VERSION:
        raise ValueError(f"{path} is no index of {FORMAT}, version {VERSION}: {_REBUILD}")
    if index != shards_lib.seal(index):
        raise ValueError(f"{path}: the index does not match its own checksum: {_REBUILD}")
    if index["tokens"] != shards_lib.read_index(shards.folder)["checksum"]:
        raise ValueError(f"{path} is of other tokens than {shards.folder} holds now: {_REBUILD}")
    return index
