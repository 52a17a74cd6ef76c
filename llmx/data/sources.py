"""Sources of text: which files a source names, in a fixed order, and what tells their content.

Nothing in a folder is left out without a word: other data is an error, other files are counted.
`documents` reads the files.
"""

import collections
import contextlib
import dataclasses
import difflib
import fnmatch
import glob
import hashlib
import os
import pathlib
import re
import stat
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence

from llmx.data import opening, remote, remote_listing, saved_datasets, transient

STDLIB = "stdlib"
SHARDS_PREFIX = "shards:"
STDLIB_BYTES = 10_000_000
# Files up to this sum are hashed whole whenever a source is opened, larger ones by sample.
HASH_BYTES = 256 << 20
WHOLE = "whole:"  # before a hash of every byte
_MAY_READ = "check that it exists and that this user may read it"
_SAMPLES, _SAMPLE_BYTES = 1024, 64 << 10

_KINDS_TO_COMPRESS = {
    **dict.fromkeys((".txt", ".text", ".md", ".rst", ".py"), "text"),
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
}
KIND_BY_SUFFIX = {
    **_KINDS_TO_COMPRESS,
    ".parquet": "parquet",
    ".arrow": "arrow",
    **dict.fromkeys((".array_record", ".arrayrecord"), "array_record"),
    **{
        inner + outer: kind
        for inner, kind in _KINDS_TO_COMPRESS.items()
        for outer in opening.COMPRESSIONS
    },
}
_COMPRESSED = (".bz2", ".xz", ".lz4", ".lzma", ".br", ".z", ".snappy")
_ARCHIVES = (".zip", ".tar", ".tgz", ".tbz2", ".txz", ".7z", ".rar")
_TABLES = (".feather", ".orc", ".avro", ".csv", ".tsv", ".tfrecord", ".h5", ".hdf5")
_UNREADABLE_SUFFIXES = {
    **dict.fromkeys(_COMPRESSED, "decompress it first"),
    **dict.fromkeys(_ARCHIVES, "unpack it first"),
    ".json": "write one JSON object per line and name it .jsonl",
    **dict.fromkeys(_TABLES, "write it as .parquet or .jsonl"),
    **dict.fromkeys((".npy", ".npz", ".pkl", ".pickle"), "write the text as .txt or .jsonl"),
}
_UNREADABLE_SUFFIXES |= {
    inner + outer: f"decompress it, and {remedy}"
    for inner, remedy in {**_UNREADABLE_SUFFIXES, ".parquet": "name it .parquet"}.items()
    for outer in opening.COMPRESSIONS
}
# Where the rest of the name does not say what is compressed.
_UNREADABLE_SUFFIXES |= {
    outer: f"name it .txt{outer} or .jsonl{outer}" for outer in opening.COMPRESSIONS
}
_SHARD = re.compile(r"-\d+-of-\d+$")  # behind the suffix, as in x.array_record-00000-of-00010
_STDLIB_EXCLUDED = {
    "__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib",
    "lib2to3", "turtledemo", "ensurepip", "lib-dynload",
}  # fmt: skip
_SKIP = "set data.skip_bad=True (--skip-bad) to leave them out"


@dataclasses.dataclass(frozen=True)
class InputFile:
    """One file of a source, with what tells whether it changes while it is read."""

    path: str
    kind: str  # "text", "jsonl", "parquet", "arrow" or "array_record"
    num_bytes: int
    mtime_ns: int
    ctime_ns: int


@dataclasses.dataclass(frozen=True)
class Listing:
    """The files of a source in reading order, and how many others of each kind are left out."""

    files: tuple[InputFile, ...]
    left_out: Mapping[str, int]


@dataclasses.dataclass
class _Found:
    """What a folder or a glob holds."""

    paths: list[str] = dataclasses.field(default_factory=list)
    left_out: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    unreadable: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    broken: list[str] = dataclasses.field(default_factory=list)
    wrong: list[str] = dataclasses.field(default_factory=list)  # messages on saved datasets

    def add(self, path: str, what: str, *, any_kind: bool) -> None:
        """Adds a path of `_walk`; with `any_kind` files of unknown kinds are text."""
        suffix = _suffix(path)
        if what.startswith(remote_listing.SAVED_DATASET):
            self.wrong.append(what.removeprefix(remote_listing.SAVED_DATASET))
        elif what in ("broken link", "folder that cannot be opened", "missing file of a dataset"):
            self.broken.append(f"{path} ({what})")
        elif what == "file" and _is_unreadable(suffix, any_kind=any_kind):
            self.unreadable[suffix] += 1
        elif what == "file" and (any_kind or suffix in KIND_BY_SUFFIX):
            self.paths.append(path)
        elif what == "file":
            self.left_out[suffix or "without suffix"] += 1
        elif what != "hidden" or suffix in KIND_BY_SUFFIX or suffix in _UNREADABLE_SUFFIXES:
            self.left_out[what] += 1


def listed(left_out: Mapping[str, int]) -> str:
    """Counts of files as text: ".html 3, .png 2"."""
    return ", ".join(f"{kind} {count}" for kind, count in left_out.items())


def _suffix(name: str) -> str:
    """What a file's name says of its content: ".txt", ".jsonl.gz"."""
    path = pathlib.PurePath(_SHARD.sub("", name).lower())
    both = pathlib.PurePath(path.stem).suffix + path.suffix
    return both if both in KIND_BY_SUFFIX or both in _UNREADABLE_SUFFIXES else path.suffix


def _is_unreadable(suffix: str, *, any_kind: bool) -> bool:
    """Whether files of a suffix are data that is not read; `any_kind`: they were named."""
    named = any_kind and suffix in opening.COMPRESSIONS  # then what is in it is text
    return suffix in _UNREADABLE_SUFFIXES and not named


def problems(source: str, *, skip_bad: bool = False) -> list[str]:
    """What is wrong with a source's name and the kinds of its files, without reading content.

    With `skip_bad` data of kinds that are not read may lie in a folder.
    """
    if source == STDLIB:
        root = sysconfig.get_path("stdlib")
        wrong = f"{STDLIB!r}: this Python keeps its library at {root}, which is no folder"
        return [] if os.path.isdir(root) else [wrong]
    if source.startswith(SHARDS_PREFIX):
        return _shards_problems(source)
    if remote.is_url(source):
        return _url_problems(source, skip_bad=skip_bad)
    path = os.path.expanduser(source)
    if os.path.isdir(path):
        return _folder_problems(source, _list_folder(path), skip_bad=skip_bad)
    if os.path.exists(path):
        return _file_problems(path)
    if glob.has_magic(source):
        found = _list_glob(path)
        if found.paths or found.unreadable or found.broken or found.wrong:
            return _found_problems(repr(source), found, skip_bad=skip_bad)
        return [
            f"{source!r} matches no file (from {os.getcwd()}): check the pattern; ** goes into "
            "subfolders"
        ]
    return [_missing(source, path)]


def _url_problems(source: str, *, skip_bad: bool) -> list[str]:
    """The same of a URL. It asks the store."""
    try:
        return remote.problems("", source) or _list_url(source, skip_bad=skip_bad)[1]
    except OSError as error:
        remedy = "check its name and the credentials"
        return [transient.problem(f"{source!r} cannot be listed", error, remedy)]


def _list_url(source: str, *, skip_bad: bool) -> tuple[_Found, list[str]]:
    """What a URL names, and what is wrong with it. Raises OSError."""
    found, root = _Found(), source.rstrip("/")
    kind = remote.kind_of(source)
    if kind == "folder":
        for path, what in remote_listing.walk(root):
            found.add(path, what, any_kind=False)
        return found, _folder_problems(source, found, skip_bad=skip_bad)
    if kind == "file":
        found.paths = [source]
        return found, _suffix_problems(source)
    if not remote.has_magic(source):
        return found, [f"{source!r} does not exist: check its name and the credentials"]
    for path, what in remote.matches(source):
        if what == "folder" and _is_dataset(path):
            for inner, kind in remote_listing.walk(path):
                found.add(inner, kind, any_kind=False)
        else:
            found.add(path, what, any_kind=True)
    if found.paths or found.unreadable or found.wrong:
        return found, _found_problems(repr(source), found, skip_bad=skip_bad)
    return found, [f"{source!r} matches no file: check the pattern; ** goes into subfolders"]


def _missing(source: str, path: str) -> str:
    parent, name = os.path.split(path)
    siblings = os.listdir(parent or ".") if os.path.isdir(parent or ".") else []
    near = difflib.get_close_matches(name[:255], [STDLIB, *siblings], n=1)
    hint = f"did you mean {near[0]!r}? Otherwise give" if near else "give"
    what = "is a link to nothing" if os.path.islink(path) else "does not exist"
    return (
        f'{source!r} {what} (from {os.getcwd()}): {hint} "{STDLIB}", an existing file, '
        f'folder or glob, or "{SHARDS_PREFIX}DIR"'
    )


def _shards_problems(source: str) -> list[str]:
    folder = os.path.expanduser(source[len(SHARDS_PREFIX) :])
    if remote.is_url(folder):
        return _remote_shards_problems(source, folder)
    remedy = f"write it with python -m llmx.data --source ... --output {folder}"
    if not os.path.isdir(folder):
        return [f"{source!r}: there is no folder {folder!r}: {remedy}"]
    if os.path.isfile(os.path.join(folder, "index.json")):
        return []
    if os.path.isfile(os.path.join(folder, "progress.json")):
        return [f"{source!r} is unfinished: run the same python -m llmx.data command again"]
    return [f"{source!r}: folder {folder!r} holds no index.json of token shards: {remedy}"]


def _remote_shards_problems(source: str, folder: str) -> list[str]:
    if found := remote.problems(SHARDS_PREFIX, folder):
        return found
    try:
        if remote.kind_of(f"{folder.rstrip('/')}/index.json") == "file":
            return []
    except OSError as error:
        remedy = "check its name and the credentials"
        return [transient.problem(f"{source!r} cannot be read", error, remedy)]
    remedy = f"write them with python -m llmx.data --source ... --output {folder}"
    return [f"{source!r} holds no finished token shards (no index.json): {remedy}"]


def _file_problems(path: str) -> list[str]:
    """What is wrong with a file that is named directly."""
    if not os.path.isfile(path):
        return [f"{path} is a device, pipe or socket: name a file, folder or glob of text"]
    return _suffix_problems(path)


def _suffix_problems(path: str) -> list[str]:
    suffix = _suffix(path)
    if _is_unreadable(suffix, any_kind=True):
        return [f"{path}: files of kind {suffix} are not read: {_UNREADABLE_SUFFIXES[suffix]}"]
    return []


def _folder_problems(source: str, found: _Found, *, skip_bad: bool) -> list[str]:
    if wrong := _found_problems(f"folder {source!r}", found, skip_bad=skip_bad):
        return wrong
    if found.paths:
        return []
    seen = [*sorted(found.unreadable), *sorted(found.left_out)]
    holds = f"only {', '.join(seen[:8])}" if seen else "no files at all"
    return [
        f"folder {source!r} has no file of a known kind ({', '.join(KIND_BY_SUFFIX)}) but "
        f"{holds}: name the files by a glob such as {os.path.join(source, '*')!r}"
    ]


def _found_problems(name: str, found: _Found, *, skip_bad: bool) -> list[str]:
    """Data that would be left out."""
    if skip_bad:
        return []
    wrong = [f"{text}, or {_SKIP}" for text in found.wrong]
    if found.broken:
        more = f" and {len(found.broken) - 3} more" if len(found.broken) > 3 else ""
        listed = ", ".join(found.broken[:3])
        wrong.append(f"{name} holds {listed}{more}: fix or remove them, or {_SKIP}")
    if found.unreadable:
        counts = collections.Counter(map(_suffix, found.paths)).most_common(1)
        example = f"*{counts[0][0]}" if counts else "*.txt"
        kinds = "; ".join(
            f"{suffix} {count} ({_UNREADABLE_SUFFIXES[suffix]})"
            for suffix, count in sorted(found.unreadable.items())
        )
        wrong.append(
            f"{name} holds data of kinds that are not read: {kinds}; or name the files to read, "
            f"such as {example!r}, or {_SKIP}"
        )
    return wrong


def _walk(root: str) -> Iterator[tuple[str, str]]:
    """(path, what it is) below a folder, in the order of the names, files before subfolders.

    Links are followed; what was seen under another name is "linked twice", so a cycle ends.
    """
    seen, waiting = {os.path.realpath(root)}, [root]
    while waiting:
        folder, below = waiting.pop(), []
        try:
            with os.scandir(folder) as entries:
                ordered = sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            if transient.is_transient(error):
                raise
            yield folder, "folder that cannot be opened"
            continue
        real_folder = os.path.realpath(folder)
        if saved_datasets.is_saved({entry.name for entry in ordered}):
            yield from _saved_files(folder, ordered, seen)
            ordered = _splits(folder, ordered)
        for entry in ordered:
            path, hidden = entry.path, entry.name.startswith(".")
            linked = entry.is_symlink()
            try:
                mode = entry.stat().st_mode
            except OSError as error:
                if transient.is_transient(error):
                    raise
                yield path, "hidden" if hidden else "broken link"
                continue
            real = os.path.realpath(path) if linked else os.path.join(real_folder, entry.name)
            if stat.S_ISDIR(mode):
                if hidden:
                    yield path, "hidden folder"
                elif entry.name != "__pycache__" and real not in seen:
                    seen.add(real)
                    below.append(path)
            elif not stat.S_ISREG(mode):
                yield path, "hidden" if hidden else "device, pipe or socket"
            elif hidden:
                yield path, "hidden"
            elif real in seen:
                yield path, "linked twice"
            else:
                seen.add(real)
                yield path, "file"
        waiting += reversed(below)


def _saved_files(
    folder: str, entries: Sequence[os.DirEntry], seen: set[str]
) -> Iterator[tuple[str, str]]:
    """The same for the files of a folder that is a saved dataset."""
    try:
        names = saved_datasets.arrow_names(folder)
    except ValueError as error:
        if transient.is_transient(error):
            raise
        yield folder, f"{remote_listing.SAVED_DATASET}{error}"
        return
    for name in names:
        path = os.path.join(folder, name)
        seen.add(os.path.realpath(path))
        yield path, "file" if os.path.isfile(path) else "missing file of a dataset"
    for entry in entries:
        if entry.name not in names and _suffix(entry.name) in KIND_BY_SUFFIX:
            yield entry.path, "beside a saved dataset"


def _splits(folder: str, entries: Sequence[os.DirEntry]) -> list[os.DirEntry]:
    """The split's folder, where a dataset of splits has a single one."""
    with contextlib.suppress(ValueError):
        names = saved_datasets.split_names(folder)
        return [entry for entry in entries if len(names) == 1 and entry.name in names]
    return []


def _is_dataset(folder: str) -> bool:
    """Whether a folder that a glob matches is one dataset: saved, or named .parquet as by Spark."""
    try:
        if remote.is_url(folder):
            inside = {name for name in remote.find(folder) if "/" not in name}
            return _suffix(folder) == ".parquet" or saved_datasets.is_saved(inside)
        return _suffix(folder) == ".parquet" or saved_datasets.is_saved(os.listdir(folder))
    except OSError as error:
        if transient.is_transient(error):
            raise
        return False


def _list_folder(root: str) -> _Found:
    found = _Found()
    for path, what in _walk(root):
        found.add(path, what, any_kind=False)
    return found


def _list_glob(pattern: str) -> _Found:
    """What a glob matches, each file once. Hidden files match only a pattern that begins so."""
    found, parts = _Found(), pathlib.PurePath(pattern).parts
    fixed = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    if "**" not in parts or any(part.startswith(".") for part in parts[fixed:]):
        seen: set[str] = set()
        for path in sorted(glob.glob(pattern, recursive=True)):
            real = os.path.realpath(path)
            what = "file"
            if os.path.isdir(path) and _is_dataset(path):
                for inner, kind in _walk(path):
                    twice = kind == "file" and os.path.realpath(inner) in seen
                    found.add(inner, "linked twice" if twice else kind, any_kind=False)
                    seen.add(os.path.realpath(inner))
                continue
            if os.path.isdir(path):
                what = "folder"
            elif not os.path.exists(path):
                what = "broken link"
            elif not os.path.isfile(path):
                what = "device, pipe or socket"
            elif real in seen:
                what = "linked twice"
            seen.add(real)
            found.add(path, what, any_kind=True)
        return found
    root = os.path.join(*parts[:fixed]) if fixed else "."
    for path, what in _walk(root):
        inside = os.path.relpath(path, root).split(os.sep)
        if what == "folder that cannot be opened" or _matches(inside, parts[fixed:]):
            found.add(path if fixed else os.path.relpath(path, root), what, any_kind=True)
    found.paths.sort()
    return found


def _matches(path: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(_matches(path[i:], pattern[1:]) for i in range(len(path) + 1))
    return (
        bool(path) and fnmatch.fnmatchcase(path[0], pattern[0]) and _matches(path[1:], pattern[1:])
    )


def _stdlib_paths() -> list[str]:
    """Python files of the standard library, at most STDLIB_BYTES, the same choice every time."""
    root = sysconfig.get_path("stdlib")
    found = []
    for folder, subfolders, names in os.walk(root):
        kept = (n for n in subfolders if n not in _STDLIB_EXCLUDED and not n.startswith("config-"))
        subfolders[:] = sorted(kept)
        for name in names:
            if name.endswith(".py"):
                path = os.path.join(folder, name)
                found.append((os.path.relpath(path, root), path, os.path.getsize(path)))
    # By a hash of the name, so that the bound drops files evenly and not the end of the alphabet.
    found.sort(key=lambda entry: hashlib.sha256(entry[0].encode()).digest())
    chosen, total = [], 0
    for relative, path, size in found:
        if size > 0 and total + size <= STDLIB_BYTES:
            chosen.append((relative, path))
            total += size
    return [path for _, path in sorted(chosen)]


def _input_file(name: str) -> InputFile:
    kind = KIND_BY_SUFFIX.get(_suffix(name), "text")
    if kind == "array_record":
        remote.require_local("", name, "ArrayRecord is read from local files only: copy it")
    try:
        found = opening.status(name)
    except OSError as error:
        raise transient.refusal(f"{name}: cannot be read", error, _MAY_READ) from error
    path = name if remote.is_url(name) else os.path.abspath(name)
    return InputFile(path, kind, found.num_bytes, found.mtime_ns, found.ctime_ns)


def list_files(source: str, *, skip_bad: bool = False) -> Listing:
    """The files of a text source in reading order. Raises ValueError when there are none.

    Other data in a folder or glob is an error too, unless `skip_bad` leaves it out.
    """
    path, found = os.path.expanduser(source), _Found()
    if remote.is_url(source):
        if wrong := _url_problems(source, skip_bad=skip_bad):
            raise ValueError("\n".join(wrong))
        found, _ = _list_url(source, skip_bad=skip_bad)
    elif (
        source == STDLIB
        or os.path.isfile(path)
        or not (os.path.isdir(path) or glob.has_magic(path))
    ):
        if wrong := problems(source):
            raise ValueError(wrong[0])
        found.paths = _stdlib_paths() if source == STDLIB else [path]
    elif os.path.isdir(path):
        found = _list_folder(path)
        if wrong := _folder_problems(source, found, skip_bad=skip_bad):
            raise ValueError("\n".join(wrong))
    else:
        found = _list_glob(path)
        wrong = _found_problems(repr(source), found, skip_bad=skip_bad)
        if wrong or not (found.paths or found.unreadable or found.broken or found.wrong):
            raise ValueError("\n".join(wrong or problems(source)))
    files = [_input_file(name) for name in found.paths]
    if not files:
        version = ".".join(map(str, sys.version_info[:3]))
        raise ValueError(
            f"{source!r} gives no files (Python {version}): name a file, folder or glob of text"
        )
    left_out = found.left_out + found.unreadable
    if found.broken or found.wrong:
        left_out["broken links or folders"] = len(found.broken) + len(found.wrong)
    return Listing(tuple(files), dict(sorted(left_out.items())))


def content_hash(files: Sequence[InputFile]) -> str:
    """A hash of what the files hold, so that a change with the same size and time is noticed.

    Up to HASH_BYTES in all every byte counts. Of more, samples do, spread evenly, and the times of
    the last change to the file system's entries, which a program cannot set. Of objects of a store
    the version that it states does, without reading them.
    """
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        if remote.is_url(file.path):
            digest.update(file.mtime_ns.to_bytes(16, "little"))
    files = [file for file in files if not remote.is_url(file.path)]
    total = sum(file.num_bytes for file in files)
    if total <= HASH_BYTES:
        for file in files:
            for block in _blocks(file.path, 0, file.num_bytes):
                digest.update(block)
        return f"{WHOLE}{digest.hexdigest()}"
    spots = collections.deque(
        i * max(total - _SAMPLE_BYTES, 0) // (_SAMPLES - 1) for i in range(_SAMPLES)
    )
    begin = 0
    for file in files:
        digest.update(file.ctime_ns.to_bytes(16, "little", signed=True))
        while spots and spots[0] < begin + file.num_bytes:
            for block in _blocks(file.path, spots.popleft() - begin, _SAMPLE_BYTES):
                digest.update(block)
        begin += file.num_bytes
    return f"sampled:{digest.hexdigest()}"


def _blocks(path: str, offset: int, size: int) -> Iterator[bytes]:
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(offset)
            while size > 0 and (block := file.read(min(size, 1 << 20))):
                size -= len(block)
                yield block
    except OSError as error:
        raise transient.refusal(f"{path}: cannot be read", error, _MAY_READ) from error
