"""Tokenizers: raw bytes, and Hugging Face `tokenizers` files, loaded or trained.

Every tokenizer has an end-of-document token, which closes each document. Special tokens are read
where a prompt or a chat template writes them. A literal "<|endoftext|>" in a document is encoded as
the ordinary characters that it is.
"""

import copy
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from llmx.data import json_files, sealing, tokenizer_files, tokenizer_limits

# Looked for in this order in a loaded file; the first is added where none is there.
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
MIN_TRAINED_SIZE = 257
MAX_TRAINED_SIZE = 1_000_000
TRAIN_BYTES = 256 << 20  # a tokenizer is trained on at most this much of the text
# Longer texts are encoded in pieces: the library takes a hundred times the size of a text.
PIECE_BYTES = 1 << 20
MAX_VOCAB_SIZE = tokenizer_limits.MAX_VOCAB_SIZE
MAX_FILE_BYTES = 128 << 20
_MAX_VALUES = 4_000_000
FILE_NAME = "tokenizer.json"
FILE_NAMES = (FILE_NAME, *tokenizer_files.NAMES)  # of a folder that holds a tokenizer
_BYTES_FILE = {"llmx_tokenizer": "bytes"}


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest little-endian type on disk that holds every id of the vocabulary."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


@dataclasses.dataclass(frozen=True)
class Encoded:
    """Ids of a text, and which characters of it each is of; tokens of one character share it."""

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray


class Tokenizer:
    """What byte and file tokenizers share. Each has a `_decode` of known ids."""

    name: str
    vocab_size: int
    end_of_document: int
    fingerprint: str  # of the vocabulary and its rules
    start: tuple[int, ...] = ()  # what the tokenizer itself puts before a text
    closing: tuple[int, ...] = ()  # and behind it
    # What makes the ids of a document others than those of the fingerprint alone; {} = nothing.
    rules: Mapping[str, Any] = {}
    special: Mapping[str, int]  # text of each special token -> its id
    names: Mapping[str, str]  # "bos_token" and so on -> text
    # [text, "rstrip", ...] of special tokens that are found otherwise than by their text alone.
    flags: Sequence[Sequence[str]] = ()
    files: Mapping[str, bytes] = {}  # those beside the tokenizer.json
    template: str = ""  # the chat template
    stop_tokens: tuple[int, ...]  # each ends a generated text

    def encode(self, text: str | bytes) -> np.ndarray:
        """Ids, int32, without the end-of-document token. Bytes must be UTF-8."""
        raw = text.encode("utf-8") if isinstance(text, str) else text
        return self.encode_documents([raw])[0].astype(np.int32)

    def encode_documents(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Ids of each text, without end-of-document tokens. All of it is ordinary text."""
        raise NotImplementedError

    def encode_prompt(self, text: str) -> np.ndarray:
        """Ids, int32, of a text in which special tokens are what they are named, behind the
        tokens that the tokenizer begins a text with, unless these are there already."""
        ids = self._encode_read(text)
        begins = ids[: len(self.start)].tolist() == list(self.start)
        return ids if begins else np.concatenate([np.array(self.start, np.int32), ids])

    def _encode_read(self, text: str) -> np.ndarray:
        """Ids of a text with the special tokens that the tokenizer finds in it."""
        return self.encode_marked(text, self.find_special(text)).ids

    def encode_marked(self, text: str, special: Sequence[tuple[int, int]]) -> Encoded:
        """A text in which the character ranges `special` are special tokens, and nothing else."""
        raise NotImplementedError

    def find_special(self, text: str) -> list[tuple[int, int]]:
        """The ranges of a text that read as special tokens, the longest where several do."""
        return [found.span() for found in self.special_pattern.finditer(text)]

    @functools.cached_property
    def special_pattern(self) -> re.Pattern:
        """Of the texts of all special tokens; matches nothing where there are none."""
        longest_first = sorted(self.special, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def with_template(self, template: str) -> "Tokenizer":
        """The same with another chat template."""
        other = copy.copy(self)
        other.template = template
        other.files = dict(self.files) | {tokenizer_files.TEMPLATE: template.encode("utf-8")}
        return other

    def decode(self, ids: Iterable[int]) -> str:
        """Text without special tokens. Invalid UTF-8 and unknown ids become U+FFFD: a model may
        have a larger vocabulary."""
        array = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), np.int64).reshape(-1)
        if (array < 0).any():
            raise ValueError(f"token id {array.min()} is negative: ids count from 0")
        first, *others = np.split(array, np.flatnonzero(array >= self.vocab_size))
        return "\ufffd".join(map(self._decode, [first, *(run[1:] for run in others)]))

    def dumps(self) -> bytes:
        """The content of the file that `load` reads back."""
        raise NotImplementedError

    def save(self, path: str | os.PathLike) -> None:
        """Writes `dumps` to a file, and `files` beside it; each whole or not at all."""
        path = pathlib.Path(path)
        beside = {path.with_name(name): content for name, content in self.files.items()}
        for file, content in {path: self.dumps(), **beside}.items():
            partial = file.with_name(f".{file.name}.{os.getpid()}")
            partial.write_bytes(content)
            os.replace(partial, file)

    def _use(self, files: Mapping[str, bytes], settings: tokenizer_files.Settings) -> None:
        """Keeps the files beside a tokenizer, and what they say of generation."""
        self.files, self.template = files, settings.template
        end = self.special.get(settings.names.get("eos_token", ""), self.end_of_document)
        self.stop_tokens = tuple(sorted({self.end_of_document, end, *settings.stop_ids}))


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes are the ids 0 to 255; 256 ends a document."""

    name = fingerprint = "bytes"
    vocab_size, end_of_document = 257, 256

    def __init__(self, files: Mapping[str, bytes] | None = None, *, where: str | os.PathLike = ""):
        self.special = {END_TOKENS[0]: self.end_of_document}
        self.names = {"eos_token": END_TOKENS[0]}
        self._use(files or {}, tokenizer_files.parse(files or {}, where))

    def encode_documents(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(text, np.uint8) for text in texts]

    def encode_marked(self, text: str, special: Sequence[tuple[int, int]]) -> Encoded:
        ids, starts, ends, at = [], [], [], 0
        for begin, end in [*special, (len(text), len(text))]:
            sizes = [len(char.encode("utf-8")) for char in text[at:begin]]
            ids += text[at:begin].encode("utf-8")
            first = np.repeat(np.arange(at, begin), sizes).tolist()
            starts, ends = starts + first, ends + [char + 1 for char in first]
            if begin < end:
                ids, starts, ends = [*ids, 256], [*starts, begin], [*ends, end]
            at = end
        return Encoded(np.array(ids, np.int32), np.array(starts, int), np.array(ends, int))

    def _decode(self, ids: np.ndarray) -> str:
        return bytes(ids[ids < 256].astype(np.uint8)).decode("utf-8", errors="replace")

    def dumps(self) -> bytes:
        return (json.dumps(_BYTES_FILE) + "\n").encode()


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

    def __init__(
        self, tokenizer, *, name: str, raw: bytes = b"",
        files: Mapping[str, bytes] | None = None, where: str | os.PathLike = "",
    ):  # fmt: skip
        """raw, files: what was read, and is kept; `files` lay beside the tokenizer.json."""
        settings = tokenizer_files.parse(files or {}, where)
        # Truncation and padding belong to models that the file was made for, not to a corpus.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        before, tokens = _added(tokenizer), _tokens_of(settings, _added(tokenizer))
        tokenizer.add_tokens([t for t in tokens if tokenizer.token_to_id(t.content) is None])
        end = _end_token(tokenizer, settings)
        # Also where it is there: only a *special* token is left to the documents' ends.
        tokenizer.add_special_tokens([end])
        self.fingerprint = hashlib.sha256(tokenizer.to_str().encode()).hexdigest()
        self._raw = raw or tokenizer.to_str().encode()
        self._tokenizer, self.name = tokenizer, name
        self.end_of_document = tokenizer.token_to_id(end)
        # The end token again as it is found: until here it was as shards of earlier versions know.
        tokenizer.add_special_tokens([before.get(end, end)])
        tokenizer.add_tokens(tokens)
        tokenizer.add_special_tokens([_added(tokenizer)[end]])
        if _rules(before, _added(tokenizer), ()).get("in_text"):
            # The library keeps what was special once apart from text, until it is read anew.
            self._tokenizer = tokenizer = tokenizer.from_str(tokenizer.to_str())
        tokenizer.encode_special_tokens = True
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        if self.vocab_size > MAX_VOCAB_SIZE:
            raise ValueError(
                f"{name} has the token id {self.vocab_size - 1}, above {MAX_VOCAB_SIZE - 1:,}, the "
                "largest: number its tokens from 0"
            )
        added = tokenizer.get_added_tokens_decoder().items()
        self.special = {token.content: index for index, token in added if token.special}
        flags = {token.content: _flags(token) for _, token in added}
        self.flags = sorted(flags[text] for text in self.special if flags[text][1:])
        self._is_special = np.zeros(self.vocab_size, bool)
        self._is_special[list(self.special.values())] = True
        # It stands for what a vocabulary lacks, and so comes from text.
        if (unknown := _unknown(tokenizer)) is not None:
            self._is_special[unknown] = False
        self.start, self.closing = surroundings(tokenizer)
        if foreign := [i for i in self.start + self.closing if i >= self.vocab_size]:
            raise ValueError(
                f"{name} puts the token id {foreign[0]} around texts, and its ids end at "
                f"{self.vocab_size - 1}: correct its post_processor"
            )
        self.names = {"eos_token": end, **settings.names}
        if self.start and "bos_token" not in self.names:
            self.names["bos_token"] = tokenizer.id_to_token(self.start[0])
        self._plain, leaks = tokenizer, self._leaks()
        if leaks:
            self._plain = self._sealed[0]
        self.rules = _rules(before, _added(tokenizer), leaks)
        self._use(files or {}, settings)

    def _leaks(self) -> list[str]:
        """Special tokens that the model of the tokenizer itself makes of their characters."""
        tokens = list(self.special)
        for texts in (tokens, [f"a {token}" for token in tokens]):
            found = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            leaks = [t for t, one in zip(tokens, found, strict=True) if self._any_special(one.ids)]
            if leaks:
                return leaks
        return []

    def _any_special(self, ids: Sequence[int] | np.ndarray) -> bool:
        return bool(self._is_special[np.asarray(ids, np.int64)].any())

    @functools.cached_property
    def _sealed(self) -> tuple[Any, dict[str, str]]:
        """The tokenizer with other names for its special tokens, and these."""
        import tokenizers

        text, secret = sealing.seal(self._tokenizer.to_str(), self.special)
        problem = f"tokenizer {self.name}: its special tokens cannot be told from text"
        sealed = _call_library(tokenizers.Tokenizer.from_str, text, problem=problem)
        if wrong := [t for t, i in self.special.items() if sealed.token_to_id(secret[t]) != i]:
            raise ValueError(f"{problem}: {wrong[0]!r} would change its id: number them in order")
        return sealed, secret

    def encode_documents(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        found: list[list[np.ndarray]] = [[] for _ in texts]
        for group in _groups(texts):
            decoded = [piece.decode("utf-8") for _, piece in group]
            encodings = _call_library(
                self._plain.encode_batch_fast, decoded, add_special_tokens=False,
                problem=f"tokenizer {self.name} cannot encode a text",
            )  # fmt: skip
            for (number, _), encoding in zip(group, encodings, strict=True):
                found[number].append(np.asarray(encoding.ids, np.uint32))
        return [np.concatenate(ids).astype(np.int64) if ids else _NO_IDS for ids in found]

    def _encode(self, coder, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Ids of a text with its special tokens, and where in it they are, [tokens, 2]."""
        coder.encode_special_tokens = False
        try:
            problem = f"tokenizer {self.name} cannot encode a text"
            found = _call_library(coder.encode, text, add_special_tokens=False, problem=problem)
        finally:
            self._tokenizer.encode_special_tokens = True
        return np.array(found.ids, np.int32), np.array(found.offsets, int).reshape(-1, 2)

    def _encode_read(self, text: str) -> np.ndarray:
        return self._encode(self._tokenizer, text)[0]

    def encode_marked(self, text: str, special: Sequence[tuple[int, int]]) -> Encoded:
        wanted = [self.special[text[begin:end]] for begin, end in special]
        wanted = [token for token in wanted if self._is_special[token]]
        if list(special) == self.find_special(text):
            ids, offsets = self._encode(self._tokenizer, text)
            if ids[self._is_special[ids]].tolist() == wanted:
                return Encoded(ids, offsets[:, 0], offsets[:, 1])
        coder, secret = self._sealed
        # (begin, end) of each special token in what is encoded, and how far it lies from `text`.
        pieces, moved, size, at = [], [], 0, 0
        for begin, end in special:
            token = secret[text[begin:end]]
            pieces += [text[at:begin], token]
            size += begin - at
            moved.append((size, size + len(token)))
            size, at = size + len(token), end
        ids, offsets = self._encode(coder, "".join([*pieces, text[at:]]))
        if ids[self._is_special[ids]].tolist() != wanted:
            raise ValueError(f"tokenizer {self.name} {self._why_other(text, special)}")
        offsets = _back(offsets, moved, special)
        return Encoded(ids, offsets[:, 0], offsets[:, 1])

    def _why_other(self, text: str, special: Sequence[tuple[int, int]]) -> str:
        """Why other special tokens are found in a text than those at `special`."""
        words = {token for token, *flags in self.flags if "single_word" in flags}
        for begin, end in special:
            beside = text[max(begin - 1, 0) : begin] + text[end : end + 1]
            if text[begin:end] in words and re.search(r"\w", beside):
                return (
                    f"has {text[begin:end]!r} as a single_word, which is no token beside a letter "
                    f"({json_files.shown(text[max(begin - 9, 0) : end + 9])}): let the chat "
                    "template write a blank there, or set single_word to false"
                )
        return (
            f"makes other special tokens of a text than it holds ({json_files.shown(text)}): give "
            "a tokenizer.json whose special tokens are not normalized"
        )

    def _decode(self, ids: np.ndarray) -> str:
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=True)

    def dumps(self) -> bytes:
        return self._raw

    def content(self) -> dict[str, Any]:
        """What a tokenizer.json would hold of it: with the tokens that were made special."""
        return json.loads(self._tokenizer.to_str())


def _back(
    offsets: np.ndarray, moved: Sequence[tuple[int, int]], special: Sequence[tuple[int, int]]
) -> np.ndarray:
    """Offsets in a text with special tokens at `moved`, as those where they are at `special`."""
    theirs, ours = (np.array([(0, 0), *pairs], int).reshape(-1) for pairs in (moved, special))
    at = np.searchsorted(theirs, offsets, side="right") - 1
    inside = at % 2 == 0  # between the begin and the end of a special token
    exact = ours[at] + offsets - theirs[at]
    return np.where(inside & (offsets > theirs[at]), ours[np.minimum(at + 1, len(ours) - 1)], exact)


def _end_token(tokenizer, settings: tokenizer_files.Settings) -> str:
    """The token that closes documents."""
    named = filter(None, [settings.names.get("eos_token")])
    known = (token for token in [*END_TOKENS, *named] if tokenizer.token_to_id(token) is not None)
    return next(known, END_TOKENS[0])


def _unknown(tokenizer) -> int | None:
    """The id that stands for what the vocabulary lacks."""
    from tokenizers import models

    if isinstance(tokenizer.model, models.Unigram):
        return json.loads(tokenizer.to_str())["model"]["unk_id"]
    token = tokenizer.model.unk_token
    return None if token is None else tokenizer.token_to_id(token)


def _added(tokenizer) -> dict[str, Any]:
    """The added tokens of a tokenizer by their texts."""
    return {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}


def _flags(token) -> list[str]:
    """The text of an added token, and the flags by which it is found that it has."""
    return [token.content, *(name for name in tokenizer_files.FLAGS[:-1] if getattr(token, name))]


def _rules(
    before: Mapping[str, Any], now: Mapping[str, Any], leaks: Sequence[str]
) -> dict[str, list]:
    """`Tokenizer.rules`: how tokens are found, where a tokenizer.json has them `before` otherwise.

    leaks: those that its model makes of their characters.
    """
    special = {text for text, token in now.items() if token.special}
    was = {text for text, token in before.items() if token.special}
    found = {text: _flags(now[text]) for text in before if text not in special}
    rules = {
        "as_characters": (before.keys() - was) & special, "sealed": leaks, "in_text": was - special,
        "flags": [flags for text, flags in found.items() if flags != _flags(before[text])],
    }  # fmt: skip
    return {key: sorted(value) for key, value in rules.items() if value}


def _tokens_of(settings: tokenizer_files.Settings, known: Mapping[str, Any]) -> list[Any]:
    """The tokens that the files beside a tokenizer.json name, with their flags, as transformers has
    them: those of `known`, which it holds, unless the files list them too."""
    import tokenizers

    found = {text: tokenizers.AddedToken(text, **flags) for text, flags in settings.listed.items()}
    for text, flags in settings.added.items():
        if text not in found:
            found[text] = known.get(text) or tokenizers.AddedToken(text, **flags)
    for text in settings.special:  # what follows from not being special there stays
        flags = {name: getattr(found[text], name) for name in tokenizer_files.FLAGS}
        found[text] = tokenizers.AddedToken(text, **flags | {"special": True})
    for text in settings.names.values():
        found[text].special = True
    return list(found.values())


def surroundings(tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids that the post-processor puts before and behind a text."""
    for text in ("a", "1", " ", "."):
        found = tokenizer.encode(text, add_special_tokens=True)
        inside = [at for at, sequence in enumerate(found.sequence_ids) if sequence is not None]
        if inside:
            return tuple(found.ids[: inside[0]]), tuple(found.ids[inside[-1] + 1 :])
    return (), ()


def of_run(workdir: str | os.PathLike) -> Tokenizer:
    """The tokenizer that a run keeps in its work directory."""
    require(workdir)
    return load(pathlib.Path(workdir, FILE_NAME))


def require(workdir: str | os.PathLike) -> None:
    """Raises ValueError where a run keeps no tokenizer."""
    if not pathlib.Path(workdir, FILE_NAME).is_file():
        raise ValueError(
            f"{workdir} has no {FILE_NAME}, so that its tokens mean nothing: put the one of its "
            "model there; a run that was imported without one, import with --tokenizer FILE"
        )


def is_bytes(path: str | os.PathLike) -> bool:
    """Whether a tokenizer file is that of bytes, without loading another."""
    return pathlib.Path(path).stat().st_size < 99 and load(path).fingerprint == "bytes"


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
    # Under another name it may lie beside several others.
    files = tokenizer_files.read(path.parent) if path.name == FILE_NAME else {}
    if parsed == _BYTES_FILE:
        return ByteTokenizer(files, where=path.parent)
    if problem := tokenizer_limits.problem(parsed):
        raise ValueError(f"{path}: {problem}: {remedy}")
    del parsed
    import tokenizers

    refused = f"{path}: the `tokenizers` library does not accept this file"
    inner = _call_library(tokenizers.Tokenizer.from_str, text, problem=refused)
    return _call_library(
        FileTokenizer, inner, name=str(path), raw=raw, files=files, where=path.parent,
        problem=refused,
    )  # fmt: skip


def read_template(path: str) -> str:
    """A chat template of a file. Raises ValueError where it cannot be read."""
    remedy = "name a Jinja file"
    raw = json_files.read_bytes(os.path.expanduser(path), remedy=remedy)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not valid UTF-8 ({error}): {remedy}") from error


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
