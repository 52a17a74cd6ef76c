"""Tokenizers: raw bytes, and Hugging Face `tokenizers` files, loaded or trained.

Every tokenizer has an end-of-document token, which closes each document. A literal
"<|endoftext|>" in a document is encoded as the ordinary characters that it is.
"""

import hashlib
import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

# Looked for in this order in a loaded file; the first is added where none is there.
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
MIN_TRAINED_SIZE = 257
MAX_TRAINED_SIZE = 1_000_000
TRAIN_BYTES = 256 << 20  # a tokenizer is trained on at most this much of the text
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
        self.fingerprint = hashlib.sha256(tokenizer.to_str().encode()).hexdigest()

    def encode_documents(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        decoded = [text.decode("utf-8") for text in texts]
        encodings = self._tokenizer.encode_batch_fast(decoded, add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int64) for encoding in encodings]

    def _decode(self, ids: np.ndarray) -> str:
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=True)

    def dumps(self) -> str:
        return self._tokenizer.to_str()


def problems(name: str) -> list[str]:
    """What is wrong with a tokenizer's name, without loading it."""
    path = pathlib.Path(name).expanduser()
    if name in ("auto", "bytes") or path.is_file() or (path / FILE_NAME).is_file():
        return []
    if path.is_dir():
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
    path = pathlib.Path(name).expanduser()
    path = path / FILE_NAME if path.is_dir() else path
    try:
        text = path.read_text(encoding="utf-8")
        parsed = json.loads(text)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path}: not a readable tokenizer file ({error}): give a tokenizer.json as the "
            "Hugging Face `tokenizers` library writes it"
        ) from error
    if parsed == _BYTES_FILE:
        return ByteTokenizer()
    import tokenizers

    try:
        inner = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exception for every malformed file
        raise ValueError(
            f"{path}: the `tokenizers` library does not accept this file ({error}): give a "
            "tokenizer.json as it writes it (tokenizer_config.json and vocab.json are others)"
        ) from error
    return FileTokenizer(inner, name=str(path))


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
        yield text.decode("utf-8")
