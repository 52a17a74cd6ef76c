"""Documents to token shards: resumable, byte-identical however often it was interrupted.

A shard is closed at the first document end past `shard_tokens`, then recorded in progress.json with
the position in the sources; a later run goes on from there.
"""

import collections
import contextlib
import dataclasses
import errno
import functools
import hashlib
import os
import pathlib
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np

from llmx.data import chat as chat_lib
from llmx.data import documents as documents_lib
from llmx.data import (
    full_disk,
    json_files,
    opening,
    remote,
    tokenizer_files,
    tokenizers,
    transient,
)
from llmx.data import pairs as pairs_lib
from llmx.data import shards as shards_lib
from llmx.data import sources as sources_lib

SHARD_TOKENS = 32 << 20
_BATCH_BYTES = 1 << 20
_BATCH_DOCUMENTS = 4096
_REPORT_SECONDS = 10.0
_POSITION = {field.name for field in dataclasses.fields(documents_lib.Position)}
_OWN_FILES = re.compile(
    r"index\.json|progress\.json|tokenizer\.json|shard-\d+\.(tokens|documents|weights|records)"
    r"|\.(index|progress|tokenizer)\.json\.\d+"
)
_BESIDE = re.compile(
    "|".join(rf"{name}|\.{name}\.\d+" for name in map(re.escape, tokenizer_files.NAMES))
)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything that decides the content of a shard folder."""

    sources: tuple[str, ...]
    files: tuple[sources_lib.InputFile, ...]
    tokenizer: tokenizers.Tokenizer | int  # an int: train one of that vocabulary size
    text_key: str
    skip_bad: bool
    shard_tokens: int
    content: str  # `sources.content_hash` of the files
    left_out: Mapping[str, int]  # files of a folder or glob that are not read, by kind
    bos: bool = True  # begin documents with what the tokenizer itself puts before a text
    # "text"; by the tokenizer's chat template conversations, "chat", or pairs, "preference"
    format: str = "text"

    def identity(self) -> str:
        """A hash that changes when the files (path, size, time, content) or a setting do."""
        trained = isinstance(self.tokenizer, int)
        settings = {
            "files": [(f.path, f.kind, f.num_bytes, f.mtime_ns) for f in self.files],
            "content": self.content,
            "tokenizer": self.tokenizer if trained else self.tokenizer.fingerprint,
            "text_key": self.text_key,
            "skip_bad": self.skip_bad,
            "shard_tokens": self.shard_tokens,
            "piece_bytes": documents_lib.MAX_PIECE_BYTES,
            "train_bytes": tokenizers.TRAIN_BYTES,
            "version": shards_lib.VERSION,
        }
        # Only what changes the shards is added, so that those of earlier versions stay good.
        if start := self.start:
            settings["start"] = start
        if not trained and self.tokenizer.rules:
            settings["rules"] = self.tokenizer.rules
        if self.chat:
            names = dict(self.tokenizer.names)
            settings["chat"] = {"template": self.tokenizer.template, "names": names, "version": 2}
            if self.tokenizer.flags:
                settings["chat"]["flags"] = self.tokenizer.flags
        if self.pairs:
            settings["pairs"] = {"version": 2}
        return shards_lib.json_hash(settings)

    @property
    def chat(self) -> bool:
        """Whether a template renders the documents, of which a part is learned."""
        return self.format != "text"

    @property
    def pairs(self) -> bool:
        """Whether each document is two texts of which one is preferred."""
        return self.format == pairs_lib.FORMAT

    @property
    def start(self) -> tuple[int, ...]:
        """The tokens that each document begins with; a chat template writes its own."""
        plain = isinstance(self.tokenizer, int) or self.chat or not self.bos
        return () if plain else self.tokenizer.start

    @property
    def name(self) -> str:
        return ",".join(self.sources)

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    def documents(
        self, start: documents_lib.Position, skipped: collections.Counter
    ) -> Iterator[documents_lib.Document]:
        """The documents from a position on; `skipped` counts what was left out, by kind."""
        return documents_lib.read_documents(
            self.files, text_key=self.text_key, skip_bad=self.skip_bad, start=start,
            skipped=skipped, render=self._render() if self.chat else None,
        )  # fmt: skip

    def _render(self) -> documents_lib.Render:
        of_format = pairs_lib if self.pairs else chat_lib
        template = chat_lib.template_of(self.tokenizer)
        return functools.partial(of_format.read_record, template=template)


def make_recipe(
    sources: Sequence[str], *, tokenizer: tokenizers.Tokenizer | int,
    text_key: str, skip_bad: bool, shard_tokens: int = SHARD_TOKENS, bos: bool = True,
    format: str = "text",
) -> Recipe:  # fmt: skip
    """Lists the files of the sources. Raises ValueError when one of them names none, and for
    conversations without a chat template."""
    if format != "text":
        chat_lib.template_of(tokenizer)
    listings = [sources_lib.list_files(source, skip_bad=skip_bad) for source in sources]
    files = tuple(file for listing in listings for file in listing.files)
    left_out = sum((collections.Counter(one.left_out) for one in listings), collections.Counter())
    return Recipe(
        tuple(sources), files, tokenizer, text_key, skip_bad, shard_tokens,
        sources_lib.content_hash(files), left_out, bos, format,
    )  # fmt: skip


def clear(folder: pathlib.Path, *, keep: Collection[str] = ()) -> None:
    """Removes what a build writes from the folder, but the names in `keep`, and nothing else."""
    foreign = foreign_files(folder)
    for path in list(folder.iterdir()):
        if path.name not in foreign and path.name not in keep:
            path.unlink()


def foreign_files(folder: pathlib.Path) -> list[str]:
    """Names in the folder that no build wrote."""
    return foreign_names([path.name for path in folder.iterdir()])


def foreign_names(names: Collection[str]) -> list[str]:
    """Those names of a folder's files that no build gives."""
    # The files of a tokenizer may also be those of a model that lies there.
    built = any(name in names for name in (shards_lib.INDEX, shards_lib.PROGRESS))
    ours = [_OWN_FILES, *([_BESIDE] if built else [])]
    return sorted(name for name in names if not any(known.fullmatch(name) for known in ours))


def read_progress(folder: pathlib.Path) -> dict:
    """The checked content of progress.json, {} where there is none. Raises ValueError."""
    path = folder / shards_lib.PROGRESS
    if not path.is_file():
        return {}
    remedy = f"delete {path.parent} and start again"
    progress = json_files.read_object(path, remedy=remedy)
    if progress != shards_lib.seal(progress):
        raise ValueError(f"{path}: it does not match its own checksum: {remedy}")
    position, skipped = progress.get("position"), progress.get("skipped")
    found = shards_lib.entry_problems(progress.get("shards"))
    if not isinstance(progress.get("identity"), str):
        found.append("identity is missing")
    if not isinstance(position, dict) or position.keys() != _POSITION or not all(
        json_files.is_whole(value, 0, 1 << 62) for value in position.values()
    ):  # fmt: skip
        found.append("position is not that of a source")
    if not isinstance(skipped, dict) or not all(
        json_files.is_whole(value, 0, 1 << 62) for value in skipped.values()
    ):
        found.append("skipped holds no counts")
    if found:
        raise ValueError(f"{path}: {found[0]}: {remedy}")
    return progress


def _start(folder: pathlib.Path, recipe: Recipe) -> dict:
    """The recorded progress; files that it does not list are removed."""
    progress, identity = read_progress(folder), recipe.identity()
    if progress and progress["identity"] != identity:
        if progress["shards"]:
            raise ValueError(
                f"{folder} holds the unfinished result of other sources or settings (or the source "
                "files have changed since): run with --overwrite, or choose another folder"
            )
        progress = {}  # nothing was finished, so nothing is lost by starting over
    if not progress:
        clear(folder)
        position = dataclasses.asdict(documents_lib.Position())
        progress = {"identity": identity, "shards": [], "position": position, "skipped": {}}
        shards_lib.write_json(folder / shards_lib.PROGRESS, shards_lib.seal(progress))
    known = {f"{e['name']}.{kind}" for e in progress["shards"] for kind in e["sha256"]}
    clear(folder, keep={*known, shards_lib.PROGRESS, *tokenizers.FILE_NAMES})
    return progress


def _train_tokenizer(recipe: Recipe, folder: pathlib.Path) -> tokenizers.Tokenizer:
    """Trains a tokenizer on the recipe's text into a folder, or loads the one that is there."""
    path = folder / tokenizers.FILE_NAME
    if not path.is_file():
        documents = recipe.documents(documents_lib.Position(), collections.Counter())
        texts = (document.text for document in documents)
        trained = tokenizers.train(texts, vocab_size=recipe.tokenizer)
        full_disk.write_atomically(path, trained.dumps())
    return tokenizers.load(path)


def encode(
    tokenizer: tokenizers.Tokenizer, recipe: Recipe, documents: Sequence[documents_lib.Document]
) -> list[tuple[np.ndarray, np.ndarray | None]]:
    """Ids of each document with its end, checked against the vocabulary, and their weights."""
    end, start = np.array([tokenizer.end_of_document]), np.array(recipe.start, int)
    if recipe.chat:
        encode_one = pairs_lib.encode if recipe.pairs else chat_lib.encode_closed
        pairs = [encode_one(tokenizer, one.chat) for one in documents]
    else:
        plain = tokenizer.encode_documents([document.text for document in documents])
        pairs = [(np.concatenate([start, ids, end]), None) for ids in plain]
    for ids, _ in pairs:
        if not 0 <= int(ids.min()) <= int(ids.max()) < tokenizer.vocab_size:
            outside = ids[(ids >= tokenizer.vocab_size) | (ids < 0)]
            raise ValueError(
                f"tokenizer {tokenizer.name} produced the token id {outside[0]}, outside its "
                f"vocabulary of {tokenizer.vocab_size}: its file is inconsistent, give another"
            )
    return pairs


def _batches(
    documents: Iterator[documents_lib.Document], skipped: collections.Counter
) -> Iterator[list[tuple[documents_lib.Document, dict]]]:
    """Documents in groups worth encoding at once, each with the skips counted before it."""
    batch, size = [], 0
    for document in documents:
        batch.append((document, dict(skipped)))
        size += len(document.text)
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _totals(entries: Sequence[Mapping]) -> dict[str, int]:
    return {key: sum(entry[key] for entry in entries) for key in ("tokens", "documents")}


@full_disk.names_path
def write_shards(
    folder: pathlib.Path, recipe: Recipe, *, report: Callable[[int, int], None],
    closed: Callable[[], None] = lambda: None,
) -> dict:  # fmt: skip
    """Writes or continues the shards of a recipe in an existing folder; returns the index.

    `report` is called with the bytes of text read and the tokens written so far, `closed` whenever
    a shard is complete and recorded.
    """
    progress = _start(folder, recipe)
    tokenizer = recipe.tokenizer
    if isinstance(tokenizer, int):
        tokenizer = _train_tokenizer(recipe, folder)
    else:
        tokenizer.save(folder / tokenizers.FILE_NAME)
    dtype = tokenizers.token_dtype(tokenizer.vocab_size)
    entries = progress["shards"]
    shards_lib.check_sizes(folder, entries, dtype=dtype)
    skipped = collections.Counter(progress["skipped"])
    documents = recipe.documents(documents_lib.Position(**progress["position"]), skipped)
    num_tokens = _totals(entries)["tokens"]
    sizes_before = np.cumsum([0] + [file.num_bytes for file in recipe.files])
    writer = None
    try:
        for batch in _batches(documents, skipped):
            encoded = encode(tokenizer, recipe, [document for document, _ in batch])
            for (document, skips), (ids, weights) in zip(batch, encoded, strict=True):
                writer = writer or shards_lib.ShardWriter(
                    folder, len(entries), dtype, weighted=recipe.chat
                )
                writer.add(ids, weights, document.text)
                if writer.num_tokens >= recipe.shard_tokens:
                    entries.append(writer.close())
                    writer = None
                    position = dataclasses.asdict(document.end)
                    progress |= {"position": position, "skipped": skips}
                    progress_file = folder / shards_lib.PROGRESS
                    shards_lib.write_json(progress_file, shards_lib.seal(progress))
                    closed()
                num_tokens += len(ids)
            # Rows of tables and bytes of decompressed text are no bytes of the file.
            end = document.end
            before, after = sizes_before[[end.file, min(end.file + 1, len(recipe.files))]]
            report(int(min(before + end.offset, after)), num_tokens)
        if writer:
            entries.append(writer.close())
    finally:
        if writer:
            writer.abandon()
    return _finish(folder, recipe, tokenizer, entries, skipped)


def _finish(
    folder: pathlib.Path, recipe: Recipe, tokenizer: tokenizers.Tokenizer,
    entries: list[dict], skipped: collections.Counter,
) -> dict:  # fmt: skip
    """Writes the index, which makes the folder complete."""
    if not entries:
        names = ", ".join(map(repr, recipe.sources))
        raise ValueError(
            f"{names} hold no document with text (left out: {dict(skipped) or 'nothing'}): name "
            "sources with text"
        )
    if changed := [file for file in recipe.files if _has_changed(file)]:
        # Other times alone are no change where every byte was hashed.
        hashed = recipe.content.startswith(sources_lib.WHOLE) and not any(
            remote.is_url(file.path) for file in changed
        )
        if not hashed or sources_lib.content_hash(recipe.files) != recipe.content:
            cause = transient.Transient(f"{changed[0].path} changed")
            raise ValueError(f"{changed[0].path} changed while it was read: run again") from cause
    tokenizer_file = (folder / tokenizers.FILE_NAME).read_bytes()
    beside = {name: hashlib.sha256(raw).hexdigest() for name, raw in tokenizer.files.items()}
    index = shards_lib.seal({
        "format": shards_lib.FORMAT,
        "version": shards_lib.version_of(weighted=recipe.chat, pairs=recipe.pairs),
        "identity": recipe.identity(),
        "sources": list(recipe.sources),
        "vocab_size": tokenizer.vocab_size,
        "end_of_document": tokenizer.end_of_document,
        "tokenizer_sha256": hashlib.sha256(tokenizer_file).hexdigest(),
        "dtype": tokenizers.token_dtype(tokenizer.vocab_size).str,
        **_totals(entries),
        "skipped": dict(sorted(skipped.items())),
        "shards": entries,
        **({"start": list(recipe.start)} if recipe.start else {}),
        **({"tokenizer_files": beside} if beside else {}),
    })  # fmt: skip
    shards_lib.write_json(folder / shards_lib.INDEX, index)
    (folder / shards_lib.PROGRESS).unlink()
    return index


def _has_changed(file: sources_lib.InputFile) -> bool:
    try:
        status = opening.status(file.path)
    except OSError as error:
        cause = transient.Transient(str(error))  # another start says whether it is gone for good
        raise ValueError(f"{file.path} went away while it was read: run again") from cause
    now = status.num_bytes, status.mtime_ns, status.ctime_ns
    return now != (file.num_bytes, file.mtime_ns, file.ctime_ns)


@contextlib.contextmanager
def exclusive(folder: pathlib.Path, *, on_wait: Callable[[], None]) -> Iterator[bool]:
    """Holds the folder's lock, which ends with its process; yields False where there are no locks.

    Raises FileNotFoundError where the folder was moved or replaced meanwhile.
    """
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        held = True
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
                raise
            held = False
        if not os.path.samestat(os.fstat(descriptor), os.stat(folder)):
            raise FileNotFoundError(f"{folder} was moved away while its lock was waited for")
        yield held
    finally:
        os.close(descriptor)


def _log_report(recipe: Recipe, log: Callable[[str], None]) -> Callable[[int, int], None]:
    """A `report` that logs a line now and then."""
    last = time.monotonic()

    def report(num_bytes: int, num_tokens: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _REPORT_SECONDS:
            last = time.monotonic()
            share = num_bytes / max(recipe.num_bytes, 1)
            log(f"data: {recipe.name}: {share:.0%}, {num_tokens:,} tokens")

    return report


def _make_folder(folder: pathlib.Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        remedy = "set data.cache_dir to a folder that this user may write"
        raise transient.refusal(f"{folder} cannot be made", error, remedy) from error


def cached_shards(
    recipe: Recipe, *, cache_dir: pathlib.Path, log: Callable[[str], None]
) -> pathlib.Path:
    """The folder of the recipe's shards in the cache; the first call builds it."""
    final = cache_dir / cache_name(recipe.sources[0], recipe.identity())

    def write(work: pathlib.Path) -> None:
        files = f"{recipe.num_bytes:,} bytes in {len(recipe.files):,} files"
        log(f"data: {recipe.name}: {files} to {final}")
        write_shards(work, recipe, report=_log_report(recipe, log))

    build_once(final, shards_lib.INDEX, write, name=recipe.name, log=log)
    return final


def cache_name(source: str, identity: str) -> str:
    """The folder of a source in the cache."""
    slug = re.sub(r"[^A-Za-z0-9]+", "_", pathlib.PurePath(source).name)[-32:].strip("_")
    return f"{slug or 'data'}-{identity[:24]}"


def build_once(
    final: pathlib.Path, index: str, write: Callable[[pathlib.Path], None], *, name: str,
    log: Callable[[str], None],
) -> None:  # fmt: skip
    """Lets `write` fill a folder, then renames it to `final`, unless that holds the file `index`.

    Several processes may call this at once: one builds, the others wait. A killed build goes on in
    the folder that it left.
    """
    partial = final.with_name(f".{final.name}.partial")
    waiting = f"data: {name}: waiting for another process that writes {final}"
    while not (final / index).is_file():
        _make_folder(partial)
        try:
            with exclusive(partial, on_wait=functools.partial(log, waiting)) as held:
                _build_alone(final, index, write, partial=partial, held=held)
        except FileNotFoundError:
            if (final / index).is_file():
                break  # finished and moved into place by another process meanwhile
            if partial.is_dir():
                raise


def _build_alone(
    final: pathlib.Path, index: str, write: Callable[[pathlib.Path], None], *,
    partial: pathlib.Path, held: bool,
) -> None:  # fmt: skip
    """Builds in `partial` and renames it to `final`, unless another process has meanwhile."""
    if (final / index).is_file():
        with contextlib.suppress(OSError):
            partial.rmdir()  # made empty after the builder had moved its own away
        return
    work = partial
    if not held:  # without locks, build in a folder of this process alone
        work = partial.with_name(f"{partial.name}-{os.uname().nodename}-{os.getpid()}")
        work.mkdir()
    try:
        write(work)
    except ValueError as error:
        # The same input fails the same way, so there is nothing to continue; but not the same disk
        # or store.
        if not transient.is_of_access(error):
            clear(work)
            work.rmdir()
        raise
    try:
        os.rename(work, final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        shutil.rmtree(work)
        if not (final / index).is_file():
            raise ValueError(
                f"{final} exists but holds no {index}: delete it and run again"
            ) from error


def cached_tokenizer(
    recipe: Recipe, *, cache_dir: pathlib.Path, log: Callable[[str], None]
) -> tokenizers.Tokenizer:
    """The tokenizer trained on the recipe's text, kept in the cache."""
    folder = cache_dir / f"tokenizer-{recipe.identity()[:24]}"
    path = folder / tokenizers.FILE_NAME
    if not path.is_file():
        _make_folder(folder)
        with exclusive(folder, on_wait=lambda: log(f"data: waiting for the tokenizer in {folder}")):
            log(f"data: training a tokenizer of {recipe.tokenizer:,} tokens to {folder}")
            return _train_tokenizer(recipe, folder)
    return tokenizers.load(path)
