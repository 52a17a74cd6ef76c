"""Tokenizers: raw bytes, and Hugging Face `tokenizers` files, loaded or trained.

Every tokenizer has an end-of-document token, which closes each document. A literal
"<|endoftext|>" in a document is encoded as the ordinary characters that it is.
"""

import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from llmx.data import json_files

# Looked for in this order in a loaded file; the first is added where none is there.
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
MIN_TRAINED_SIZE = 257
MAX_TRAINED_SIZE = 1_000_000
TRAIN_BYTES = 256 << 20  # a tokenizer is trained on at most this much of the text
# Longer texts are encoded in pieces: the library takes a hundred times the size of a text.
PIECE_BYTES = 1 << 20
MAX_VOCAB_SIZE = 1 << 24
MAX_FILE_BYTES = 128 << 20
_MAX_VALUES = 4_000_000
FILE_NAME = "tokenizer.json"
_BYTES_FILE = {"llmx_tokenizer": "bytes"}


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest little-endian type on disk that holds every id of the vocabulary."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


class Tokenizer:
    """What byte and file tokenizers share. Each has a `_decode` of known ids."""

    name: str
    vocab_size: int
    end_of_document: int
    fingerprint: str

    def encode(self, text: str | bytes) -> np.ndarray:
        """Ids, int32, without the end-of-document token. Bytes must be UTF-8."""
        raw = text.encode("utf-8") if isinstance(text, str) else text
        return self.encode_documents([raw])[0].astype(np.int32)

    def encode_documents(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Ids of each text, without end-of-document tokens."""
        raise NotImplementedError

    def decode(self, ids: Iterable[int]) -> str:
        """Text without special tokens. Invalid UTF-8 and unknown ids become U+FFFD: a model may
        have a larger vocabulary."""
        array = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), np.int64).reshape(-1)
        if (array < 0).any():
            raise ValueError(f"token id {array.min()} is negative: ids count from 0")
        first, *others = np.split(array, np.flatnonzero(array >= self.vocab_size))
        return "\ufffd".join(map(self._decode, [first, *(run[1:] for run in others)]))

    def dumps(self) -> str:
        """The text of the file that `load` reads back."""
        raise NotImplementedError

    def save(self, path: str | os.PathLike) -> None:
        """Writes `dumps` to a file."""
        pathlib.Path(path).write_text(self.dumps(), encoding="utf-8")


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes are the ids 0 to 255; 256 ends a document."""

    name = fingerprint = "bytes"
    vocab_size, end_of_document = 257, 256

    def encode_documents(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(text, np.uint8) for text in texts]

    def _decode(self, ids: np.ndarray) -> str:
        return bytes(ids[ids < 256].astype(np.uint8)).decode("utf-8", errors="replace")

    def dumps(self) -> str:
        return json.dumps(_BYTES_FILE) + "\n"


_NO_IDS = np.empty(0, np.int64)


def _pieces(text: bytes) -> Iterator[bytes]:
    """`text` in pieces of at most PIECE_BYTES, cut after a line, a space, or else a character."""
    while len(text) > PIECE_BYTES:
        end = text.rfind(b"\n", 0, PIECE_BYTES) + 1
        # Before the space: byte-level tokenizers join a space to the word behind it.
        end = end or max(text.rfind(b" ", 0, PIECE_BYTES), 0) or PIECE_BYTES
        while end > 1 and text[end] & 0xC0 == 0x80:
            end -= 1
        yield text[:end]
        text = text[end:]
    yield text


def _groups(texts: Sequence[bytes]) -> Iterator[list[tuple[int, bytes]]]:
    """The pieces of all texts with the text's number, in lists of about PIECE_BYTES."""
    group, size = [], 0
    for number, text in enumerate(texts):
        for piece in _pieces(text):
            if group and size + len(piece) > PIECE_BYTES:
                yield group
                group, size = [], 0
            group.append((number, piece))
            size += len(piece)
    if group:
        yield group


def _call_library(call: Callable[..., Any], *args: Any, problem: str, **options: Any) -> Any:
    """What the `tokenizers` library returns, its errors as ValueError.

    It raises plain Exception, and for a panic in its Rust code a BaseException.
    """
    try:
        return call(*args, **options)
    except (KeyboardInterrupt, SystemExit, MemoryError, ValueError):
        raise
    except BaseException as error:
        text = " ".join(str(error).split())[:300]
        raise ValueError(
            f"{problem} ({text}): give a tokenizer.json as the `tokenizers` library writes it "
            "(tokenizer_config.json and vocab.json are others)"
        ) from error


class FileTokenizer(Tokenizer):
    """A Hugging Face `tokenizers.Tokenizer` with an end-of-document token, found or added."""

    def __init__(self, tokenizer, *, name: str):
        # Truncation and padding belong to models that the file was made for, not to a corpus.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        present = (token for token in END_TOKENS if tokenizer.token_to_id(token) is not None)
        end = next(present, END_TOKENS[0])
        # Also where it is there: only a *special* token is left to the documents' ends.
        tokenizer.add_special_tokens([end])
        tokenizer.encode_special_tokens = True
        self._tokenizer, self.name = tokenizer, name
        self.end_of_document = tokenizer.token_to_id(end)
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        if self.vocab_size > MAX_VOCAB_SIZE:
            raise ValueError(
                f"{name} has the token id {self.vocab_size - 1}, above {MAX_VOCAB_SIZE - 1:,}, the "
                "largest: number its tokens from 0"
            )
        self.fingerprint = hashlib.sha256(tokenizer.to_str().encode()).hexdigest()

    def encode_documents(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        found: list[list[np.ndarray]] = [[] for _ in texts]
        for group in _groups(texts):
            decoded = [piece.decode("utf-8") for _, piece in group]
            encodings = _call_library(
                self._tokenizer.encode_batch_fast, decoded, add_special_tokens=False,
                problem=f"tokenizer {self.name} cannot encode a text",
            )  # fmt: skip
            for (number, _), encoding in zip(group, encodings, strict=True):
                found[number].append(np.asarray(encoding.ids, np.uint32))
        return [np.concatenate(ids).astype(np.int64) if ids else _NO_IDS for ids in found]

    def _decode(self, ids: np.ndarray) -> str:
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=True)

    def dumps(self) -> str:
        return self._tokenizer.to_str()


def problems(name: str) -> list[str]:
    """What is wrong with a tokenizer's name, without loading it."""
    path = pathlib.Path(os.path.expanduser(name))
    if name in ("auto", "bytes") or os.path.isfile(path) or os.path.isfile(path / FILE_NAME):
        return []
    if os.path.isdir(path):
        return [f"folder {name!r} holds no {FILE_NAME}: name the tokenizer file itself"]
    return [
        f'{name!r} is no tokenizer: use "auto", "bytes", or the path of an existing '
        f"{FILE_NAME} (Hugging Face `tokenizers`); data.train_tokenizer=4096 trains one"
    ]


def load(name: str | os.PathLike) -> Tokenizer:
    """The tokenizer of that name: "bytes", a tokenizer.json, or a folder that holds one."""
    if name == "bytes":
        return ByteTokenizer()
    if name == "auto":
        raise ValueError('tokenizer "auto" needs sources to decide')
    if found := problems(os.fspath(name)):
        raise ValueError(found[0])
    path = pathlib.Path(os.path.expanduser(name))
    path = path / FILE_NAME if path.is_dir() else path
    remedy = "give a tokenizer.json as the Hugging Face `tokenizers` library writes it"
    raw = json_files.read_bytes(path, remedy=remedy, max_bytes=MAX_FILE_BYTES)
    if problem := json_files.too_many_values(raw, most=_MAX_VALUES):
        raise ValueError(f"{path}: {problem}: {remedy}")
    try:
        text = raw.decode("utf-8")
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a readable tokenizer file ({error}): {remedy}") from error
    if parsed == _BYTES_FILE:
        return ByteTokenizer()
    del parsed
    import tokenizers

    refused = f"{path}: the `tokenizers` library does not accept this file"
    inner = _call_library(tokenizers.Tokenizer.from_str, text, problem=refused)
    return _call_library(FileTokenizer, inner, name=str(path), problem=refused)


def train(texts: Iterable[bytes], *, vocab_size: int) -> FileTokenizer:
    """Trains a byte-level BPE on the first TRAIN_BYTES of the texts. Deterministic."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_TOKENS[0]], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    inner.train_from_iterator(_first_bytes(texts, limit=TRAIN_BYTES), trainer)
    return FileTokenizer(inner, name=f"bpe-{vocab_size}")


def _first_bytes(texts: Iterable[bytes], *, limit: int) -> Iterator[str]:
    for text in texts:
        if limit <= 0:
            return
        limit -= len(text)
        for piece in _pieces(text):
            yield piece.decode("utf-8")
