"""Token shards on disk: a folder of flat files that are memory-mapped, never read whole.

    index.json               what follows, with a SHA-256 of every file and of the index itself
    shard-00000.tokens       little-endian uint16 or uint32 ids of the documents, one after another
    shard-00000.documents    per document: number of tokens (uint64), hash of its text (uint64)
    shard-00000.weights      of chats only: one byte per token, 1 where it is learned, else 0
    tokenizer.json           the tokenizer that made them, with the files that lay beside it

Each document ends in the end-of-document token, which its length counts; none spans two shards.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmx.data import full_disk, json_files, remote, tokenizer_files, tokenizers

FORMAT = "llmx-token-shards"
VERSION = 1
WEIGHTED_VERSION = 2  # with weights; those without are still written as version 1
PAIRS_VERSION = 3  # with weights of pairs
LEARNED = 1  # the bit of a token's weight that says so; others: see `llmx.data.pairs`
INDEX = "index.json"
PROGRESS = "progress.json"
KINDS = ("tokens", "documents")  # the files of a shard
WEIGHTS = "weights"  # the third, where not every token is learned
DOCUMENT_DTYPE = np.dtype([("length", "<u8"), ("hash", "<u8")])
# A folder up to this size is checked against its checksums whenever it is opened.
VERIFY_BYTES = 256 << 20
_SHARD_NAME = re.compile(r"shard-[0-9]{5,9}")
_MAX_COUNT = 1 << 48


def json_hash(value: Mapping) -> str:
    """SHA-256 of a value as JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def write_json(path: pathlib.Path, value: Mapping) -> None:
    """Writes the file whole or not at all."""
    full_disk.write_atomically(path, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode())


def entries_of(path: pathlib.Path) -> list[dict]:
    """The shards that an index or the progress lists, unchecked."""
    return json.loads(path.read_bytes())["shards"]


def seal(index: Mapping) -> dict:
    """The index with a checksum of itself."""
    content = {key: value for key, value in index.items() if key != "checksum"}
    return {**content, "checksum": json_hash(content)}


def read_sealed(
    path: pathlib.Path, *, what: str, name: str, format: str, version: int, remedy: str
) -> dict:
    """The content of a JSON file that `seal` has sealed, of this format and version.

    what: "index". name: what the user names to have one, "a folder of ...". Raises ValueError.
    """
    found = json_files.read_object(path, remedy=remedy)
    if found.get("format") != format:
        raise ValueError(f"{path} is no {what} of {format}: name {name}")
    if found.get("version") != version:
        raise ValueError(
            f"{path} has format version {found.get('version')!r}, this llmx reads {version}: "
            f"{remedy}"
        )
    if found != seal(found):
        raise ValueError(f"{path}: the {what} does not match its own checksum: {remedy}")
    return found


def version_of(*, weighted: bool, pairs: bool) -> int:
    """That of the index of shards with or without weights, of pairs or not."""
    return PAIRS_VERSION if pairs else WEIGHTED_VERSION if weighted else VERSION


class ShardWriter:
    """Writes one shard's two or three files, hashing as it goes."""

    def __init__(self, folder: pathlib.Path, number: int, dtype: np.dtype, *, weighted: bool):
        self.name = f"shard-{number:05d}"
        self._dtype, self._kinds = dtype, (*KINDS, WEIGHTS) if weighted else KINDS
        self._files = {
            kind: (folder / f"{self.name}.{kind}").open("wb", buffering=1 << 20)
            for kind in self._kinds
        }
        self._hashes = {kind: hashlib.sha256() for kind in self._files}
        self.num_tokens = self.num_documents = self.num_weighted = 0

    def add(self, ids: np.ndarray, weights: np.ndarray | None, text: bytes) -> None:
        """Appends a document: its ids, closed by the end-of-document token, and its hash.

        64 bits of the text's hash decide on which side of the held-out split it lies.
        """
        record = len(ids).to_bytes(8, "little") + hashlib.blake2b(text, digest_size=8).digest()
        parts = {"tokens": ids.astype(self._dtype).tobytes(), "documents": record}
        if weights is not None:
            parts[WEIGHTS] = weights.astype(np.uint8).tobytes()
            self.num_weighted += int(np.count_nonzero(weights & LEARNED))
        for kind in self._kinds:
            self._files[kind].write(parts[kind])
            self._hashes[kind].update(parts[kind])
        self.num_tokens += len(ids)
        self.num_documents += 1

    def close(self) -> dict:
        """Makes the files durable and returns the shard's entry in the index."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        entry = {
            "name": self.name,
            "tokens": self.num_tokens,
            "documents": self.num_documents,
            "sha256": {kind: digest.hexdigest() for kind, digest in self._hashes.items()},
        }
        return entry | ({"weighted": self.num_weighted} if WEIGHTS in self._kinds else {})

    def abandon(self) -> None:
        """Closes the files of an unfinished shard; a later build removes them."""
        for file in self._files.values():
            file.close()


@dataclasses.dataclass(frozen=True)
class Shards:
    """An opened folder of token shards."""

    folder: pathlib.Path
    tokenizer: tokenizers.Tokenizer
    vocab_size: int
    tokens: tuple[np.ndarray, ...]  # one memory-mapped array per shard
    names: tuple[str, ...]
    lengths: np.ndarray  # tokens of each document, int64
    hashes: np.ndarray  # content hash of each document, uint64
    weights: tuple[np.ndarray, ...] = ()  # uint8 of each token, one array per shard; () = all 1
    num_weighted: int = 0  # tokens of weight 1, where there are weights
    start: tuple[int, ...] = ()  # what each document begins with
    pairs: bool = False  # each document is two texts of which one is preferred

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())


def _rebuild(folder: str | pathlib.Path) -> str:
    return f"delete {folder} and make it again"


def read_index(folder: str | pathlib.Path) -> dict:
    """The checked index of a shard folder, which may be in a store."""
    stored = remote.is_url(str(folder))
    path = f"{folder}/{INDEX}" if stored else pathlib.Path(folder) / INDEX
    if not stored and not path.exists():
        raise ValueError(
            f"{path} does not exist: the folder holds no finished token shards; write them with "
            f"python -m llmx.data --source ... --output {folder}"
        )
    index = json_files.read_object(path, remedy=_rebuild(folder))
    if index.get("format") != FORMAT:
        raise ValueError(f"{path} is no index of {FORMAT}: name a folder that llmx.data wrote")
    if index.get("version") not in (VERSION, WEIGHTED_VERSION, PAIRS_VERSION):
        raise ValueError(
            f"{path} has format version {index.get('version')!r}, this llmx reads {VERSION} to "
            f"{PAIRS_VERSION}: {_rebuild(folder)}"
        )
    if index != seal(index):
        raise ValueError(f"{path}: the index does not match its own checksum: {_rebuild(folder)}")
    if found := _index_problems(index):
        raise ValueError(f"{path}: {found[0]}: {_rebuild(folder)}")
    return index


def entry_problems(entries: Any) -> list[str]:
    """What is wrong with the list of shards of an index or of unfinished progress."""
    if not isinstance(entries, list):
        return ["shards is not a list"]
    return [
        f"shards[{number}] is {json_files.shown(entry)}, which describes no shard"
        for number, entry in enumerate(entries)
        if not _is_entry(entry)
    ]


def _kinds(entry: Mapping) -> tuple[str, ...]:
    """The files of a shard of an index."""
    return (*KINDS, WEIGHTS) if "weighted" in entry else KINDS


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and entry.keys() - {"weighted"} == {"name", "tokens", "documents", "sha256"}
        and isinstance(entry["name"], str)
        and _SHARD_NAME.fullmatch(entry["name"]) is not None
        and all(json_files.is_whole(entry[kind], 0, _MAX_COUNT) for kind in KINDS)
        and json_files.is_whole(entry.get("weighted", 0), 0, entry["tokens"])
        and isinstance(entry["sha256"], dict)
        and entry["sha256"].keys() == set(_kinds(entry))
        and all(isinstance(value, str) for value in entry["sha256"].values())
    )


def _index_problems(index: Mapping) -> list[str]:
    found = entry_problems(index.get("shards"))
    whole = ("tokens", 0, _MAX_COUNT), ("documents", 0, _MAX_COUNT)
    size = index.get("vocab_size")
    whole += ("vocab_size", 1, tokenizers.MAX_VOCAB_SIZE), ("end_of_document", 0, _MAX_COUNT)
    for key, low, high in whole:
        if not json_files.is_whole(value := index.get(key), low, high):
            found.append(f"{key} is {json_files.shown(value)}, not a number from {low} to {high}")
    for key in ("identity", "tokenizer_sha256"):
        if not isinstance(value := index.get(key), str):
            found.append(f"{key} is {json_files.shown(value)}, not a text")
    weighted = index.get("version") in (WEIGHTED_VERSION, PAIRS_VERSION)
    if not found and not all(("weighted" in entry) == weighted for entry in index["shards"]):
        found.append(f"version {index['version']} does not fit its shards")
    start = index.get("start", [])
    if not isinstance(start, list) or not all(
        json_files.is_whole(token, 0, tokenizers.MAX_VOCAB_SIZE) for token in start
    ):
        found.append(f"start is {json_files.shown(start)}, not token ids")
    files = index.get("tokenizer_files", {})
    if not isinstance(files, dict) or not files.keys() <= set(tokenizer_files.NAMES):
        found.append(f"tokenizer_files is {json_files.shown(files)}, not files of a tokenizer")
    if not isinstance(value := index.get("skipped"), dict):
        found.append(f"skipped is {json_files.shown(value)}, not an object")
    if not found and index.get("dtype") != tokenizers.token_dtype(size).str:
        found.append(
            f"dtype is {json_files.shown(index.get('dtype'))}, and {size} tokens are written as "
            f"{tokenizers.token_dtype(size).str}"
        )
    if not found and index["end_of_document"] >= size:
        found.append(f"end_of_document={index['end_of_document']} is not one of {size} tokens")
    return found


def _path(folder: pathlib.Path, entry: Mapping, kind: str) -> pathlib.Path:
    return folder / f"{entry['name']}.{kind}"


def check_sizes(folder: pathlib.Path, entries: Sequence[Mapping], *, dtype: np.dtype) -> int:
    """Compares every file's size with the index; returns their sum in bytes."""
    total = 0
    for entry in entries:
        sizes = {
            "tokens": entry["tokens"] * dtype.itemsize,
            "documents": entry["documents"] * DOCUMENT_DTYPE.itemsize,
            WEIGHTS: entry["tokens"],
        }
        for kind in _kinds(entry):
            path, expected = _path(folder, entry, kind), sizes[kind]
            if not path.is_file():
                raise ValueError(f"{path} is missing: {_rebuild(folder)}")
            actual = path.stat().st_size
            if actual != expected:
                wrong = "truncated" if actual < expected else "too long"
                raise ValueError(
                    f"{path} is {wrong}: it ends at byte {actual}, the index says {expected}: "
                    f"{_rebuild(folder)}"
                )
            total += actual
    return total


def check_sums(folder: pathlib.Path, entry: Mapping, kinds: Sequence[str] = ()) -> None:
    """Compares a shard's files, all by default, with their checksums."""
    for kind in kinds or _kinds(entry):
        path, expected = _path(folder, entry, kind), entry["sha256"][kind]
        with open(path, "rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
        if actual != expected:
            raise ValueError(
                f"{path}: checksum mismatch (sha256 {actual[:12]}..., the index says "
                f"{expected[:12]}...): its content has changed on disk; {_rebuild(folder)}"
            )


def _load_tokenizer(folder: pathlib.Path, index: Mapping) -> tokenizers.Tokenizer:
    path = folder / tokenizers.FILE_NAME
    if not path.is_file():
        raise ValueError(f"{path} is missing: {_rebuild(folder)}")
    if hashlib.sha256(path.read_bytes()).hexdigest() != index["tokenizer_sha256"]:
        raise ValueError(f"{path}: checksum mismatch with {INDEX}: {_rebuild(folder)}")
    for name, expected in index.get("tokenizer_files", {}).items():
        beside = folder / name
        if not beside.is_file() or hashlib.sha256(beside.read_bytes()).hexdigest() != expected:
            raise ValueError(f"{beside} is missing or not what {INDEX} says: {_rebuild(folder)}")
    tokenizer = tokenizers.load(path)
    if tokenizer.end_of_document != index["end_of_document"]:
        raise ValueError(
            f"{path} ends documents by token {tokenizer.end_of_document}, {INDEX} says "
            f"{index['end_of_document']}: {_rebuild(folder)}"
        )
    if tokenizer.vocab_size != index["vocab_size"]:
        raise ValueError(
            f"{path} has {tokenizer.vocab_size} tokens, {INDEX} says {index['vocab_size']}: "
            f"{_rebuild(folder)}"
        )
    return tokenizer


def open_shards(folder: str | os.PathLike, *, verify: bool = False) -> Shards:
    """Opens a shard folder.

    Sizes, the index and the document tables are always checked; the tokens too where the folder
    holds at most VERIFY_BYTES, or where `verify` asks for it.
    """
    folder = pathlib.Path(os.path.expanduser(folder))
    index = read_index(folder)
    dtype, entries = np.dtype(index["dtype"]), index["shards"]
    total = check_sizes(folder, entries, dtype=dtype)
    kinds = () if verify or total <= VERIFY_BYTES else ("documents",)
    tables = []
    for entry in entries:
        check_sums(folder, entry, kinds)
        path = _path(folder, entry, "documents")
        table = np.fromfile(path, DOCUMENT_DTYPE)
        lengths = table["length"]
        bounded = not len(lengths) or 1 <= lengths.min() <= lengths.max() <= entry["tokens"]
        num_tokens = int(lengths.sum()) if bounded else "impossible numbers of"
        if num_tokens != entry["tokens"]:
            raise ValueError(
                f"{path}: its documents have {num_tokens} tokens, {INDEX} says {entry['tokens']}: "
                f"{_rebuild(folder)}"
            )
        tables.append(table)
    maps = {"tokens": dtype, WEIGHTS: np.dtype(np.uint8)}
    # np.asarray: slicing a plain view of the map costs a tenth of slicing np.memmap itself.
    tokens, weights = (
        tuple(
            np.asarray(np.memmap(_path(folder, entry, kind), maps[kind], mode="r"))
            for entry in entries if kind in _kinds(entry)
        )
        for kind in maps
    )  # fmt: skip
    table = np.concatenate(tables) if tables else np.empty(0, DOCUMENT_DTYPE)
    if not len(table):
        raise ValueError(f"{folder} holds no document: {_rebuild(folder)} from sources with text")
    return Shards(
        folder=folder,
        tokenizer=_load_tokenizer(folder, index),
        vocab_size=index["vocab_size"],
        tokens=tokens,
        names=tuple(entry["name"] for entry in entries),
        lengths=np.ascontiguousarray(table["length"]).astype(np.int64),
        hashes=np.ascontiguousarray(table["hash"]),
        weights=weights,
        num_weighted=sum(entry.get("weighted", 0) for entry in entries),
        start=tuple(index.get("start", ())),
        pairs=index["version"] == PAIRS_VERSION,
    )
