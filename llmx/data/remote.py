"""Paths that may be URLs of object stores: what they need, and how their objects are used.

A path with "://" in it is a URL, never a local file or folder. fsspec opens it; the extras of this
package bring what it needs for a kind of store. An object is replaced at once and as a whole; a
folder of objects is not, so that of several the one that makes them valid is written last.
"""

import contextlib
import dataclasses
import errno
import hashlib
import importlib.util
import io
import json
import logging
import os
import pathlib
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, BinaryIO

from llmx.data import full_disk, transient

ATTEMPTS, PAUSE_SECONDS = 3, 2.0  # of an upload, and of a copy that is not what the store says
_BLOCK_BYTES = 4 << 20  # that are read of an object at a time
_BUFFER_BYTES = 1 << 16

# Scheme: (module that fsspec needs, what brings it, as the extras of this package have it).
_NEEDS = {
    "s3": ("s3fs", "s3fs>=2025.3"),
    "gs": ("gcsfs", "gcsfs>=2025.3"),
    "gcs": ("gcsfs", "gcsfs>=2025.3"),
    "az": ("adlfs", "adlfs>=2024.12"),
    "abfs": ("adlfs", "adlfs>=2024.12"),
    "abfss": ("adlfs", "adlfs>=2024.12"),
    "hf": ("huggingface_hub", "huggingface-hub"),
}


def is_url(path: str) -> bool:
    """Whether a path is a URL and not that of a local file or folder."""
    return "://" in path


def scheme_of(url: str) -> str:
    """The scheme of a URL: "s3" of "s3://bucket/key"; "" of a local path."""
    found = re.match(r"([A-Za-z][A-Za-z0-9+.\-]*)(?:::.*)?://", url)
    return found[1].lower() if found else ""


def problems(option: str, path: str) -> list[str]:
    """Why a URL cannot be used: an unknown scheme, a missing package; [] for a local path.

    `option`: how the path was given, for the message. Opens no connection.
    """
    if not is_url(path):
        return []
    import fsspec

    scheme, known = scheme_of(path), fsspec.available_protocols()
    if scheme not in known:
        return [
            f"{option}{path}: {scheme or 'this'} is no kind of store that is known: use a local "
            "path, or one such as s3://BUCKET/KEY, gs://BUCKET/KEY or hf://datasets/OWNER/NAME"
        ]
    if scheme == "file":
        return [f"{option}{path}: give a local path without file://"]
    module, requirement = _NEEDS.get(scheme, ("", ""))
    if module and importlib.util.find_spec(module) is None:
        return [
            f"{option}{path} needs {module}, which is not installed: pip install '{requirement}'"
        ]
    return []


def refusal(option: str, path: str, remedy: str = "") -> str:
    """Why a URL cannot be used where none is supported; "" for a local path."""
    if not is_url(path):
        return ""
    return f"{option}{path} is a URL, and this must be local: {remedy or 'name a local path'}"


def require_local(option: str, path: str, remedy: str = "") -> None:
    """Raises ValueError for a URL."""
    if text := refusal(option, path, remedy):
        raise ValueError(text)


@dataclasses.dataclass(frozen=True)
class Status:
    """The size of an object, and a number that changes when the object does."""

    num_bytes: int
    version: int
    md5: str = ""  # of the content, where the store states it


def _of(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it."""
    import fsspec

    if found := problems("", url):
        raise ValueError(found[0])
    with _as_os_error(url):
        return fsspec.core.url_to_fs(url)


@contextlib.contextmanager
def _as_os_error(url: str) -> Iterator[None]:
    """Turns the errors of stores, which are of many types, into OSError with the cause."""
    try:
        yield
    except OSError as error:
        if url in str(error):
            raise
        text = error.strerror or str(error) or type(error).__name__
        raise type(error)(f"{text} ({url})") from error
    except Exception as error:
        cause = " ".join(str(error).split())[:300] or type(error).__name__
        kind = transient.Transient if transient.is_transient(error) else OSError
        raise kind(f"{cause} ({url})") from error


@contextlib.contextmanager
def writing(what: str, *also: str) -> Iterator[None]:
    """Turns OSError into the ValueError that `what`, a URL with its option, cannot be written.

    also: what else is to be checked then.
    """
    try:
        yield
    except OSError as error:
        remedy = f"check {' and '.join(['its name', 'the credentials', *also])}"
        raise transient.refusal(f"{what} cannot be written", error, remedy) from error


def status(url: str) -> Status:
    """The present state of an object. Raises OSError."""
    files, path = _of(url)
    with _as_os_error(url):
        files.invalidate_cache(path)
        info = files.info(path)
    return _status(info)


_VERSIONS = ("ETag", "etag", "md5Hash", "generation", "blob_id", "last_commit", "content_md5")
_TIMES = ("LastModified", "mtime", "updated", "last_modified", "created")


def _status(info: Mapping[str, Any]) -> Status:
    # What names the content itself is enough; the size and times are not everywhere.
    stated = [(key, str(info[key])) for key in _VERSIONS if info.get(key)]
    stated = stated or [(key, str(info[key])) for key in _TIMES if info.get(key)]
    text = f"{info.get('size')}/{stated}"
    digest = hashlib.blake2b(text.encode(), digest_size=7).digest()
    # Of an object that was written in parts the ETag is no MD5, and has a "-".
    tag = str(info.get("ETag") or "").strip('"')
    md5 = tag if re.fullmatch(r"[0-9a-f]{32}", tag) else ""
    return Status(int(info.get("size") or 0), int.from_bytes(digest, "little"), md5)


def kind_of(url: str) -> str:
    """What a URL names now: "file", "folder", or "" for nothing. Raises OSError."""
    files, path = _of(url)
    # `isfile` and `exists` of fsspec take every error for a no.
    with _as_os_error(url), contextlib.suppress(FileNotFoundError):
        files.invalidate_cache()
        return "folder" if files.info(path)["type"] == "directory" else "file"
    return ""


def has_magic(url: str) -> bool:
    """Whether a URL is a glob."""
    return any(letter in url for letter in "*?[")


def matches(pattern: str) -> list[tuple[str, str]]:
    """(URL, "file" or "folder") of what a glob matches, in the order of the names.

    Hidden ones match only a pattern that begins so, as on a disk.
    """
    files, path = _of(pattern)
    hidden = "/." in path
    with _as_os_error(pattern):
        files.invalidate_cache()
        found = files.glob(path, detail=True)
        scheme = pattern.partition("://")[0]
        return [
            (f"{scheme}://{name.lstrip('/')}", "folder" if info["type"] == "directory" else "file")
            for name, info in sorted(found.items())
            if hidden or "/." not in name
        ]


def find(url: str) -> dict[str, Status]:
    """The files below a folder, by their names in it: {"a/b.txt": ...}. Raises OSError."""
    files, path = _of(url)
    root = path.rstrip("/") + "/"
    with _as_os_error(url):
        files.invalidate_cache()
        found = files.find(path, detail=True)
    return {
        name.removeprefix(root): _status(info)
        for name, info in sorted(found.items())
        if name.startswith(root) and info["type"] == "file" and not name.endswith("/")
    }


def open_file(url: str, *, random: bool) -> BinaryIO:
    """An object for reading, in blocks. `random`: keeps several blocks, of different places.

    Raises OSError, and so does reading from it.
    """
    files, path = _of(url)
    with _as_os_error(url):
        file = files.open(
            path, "rb", block_size=_BLOCK_BYTES, cache_type="blockcache" if random else "readahead"
        )
    return io.BufferedReader(_Object(file, url), _BUFFER_BYTES)


class _Object(io.RawIOBase):
    """An object that is read. One that a store cuts off is an error, and no shorter object."""

    def __init__(self, file: Any, url: str):
        self._file, self._url = file, url

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def readinto(self, buffer: Any) -> int:
        with _as_os_error(self._url):
            raw = self._file.read(len(buffer))
        at, size = self._file.tell(), self._file.size
        if not raw and len(buffer) and size is not None and at < size:
            raise transient.Transient(f"the store gave {at:,} of {size:,} bytes ({self._url})")
        buffer[: len(raw)] = raw
        return len(raw)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def read_bytes(url: str, *, most: int) -> bytes:
    """The content of an object, at most that many bytes. Raises OSError."""
    with open_file(url, random=False) as file, _as_os_error(url):
        return file.read(most)


def write_bytes(url: str, content: bytes) -> None:
    """Replaces an object, which stores do at once and as a whole. Raises OSError."""
    files, path = _of(url)
    with _as_os_error(url):
        files.pipe_file(path, content)


def remove(url: str) -> None:
    """Removes an object, if it is there. Raises OSError."""
    files, path = _of(url)
    with _as_os_error(url), contextlib.suppress(FileNotFoundError):
        files.rm_file(path)


def upload(file: str | os.PathLike, url: str) -> None:
    """Writes a local file to an object, in parts where it is large. Raises OSError."""
    files, path = _of(url)
    with _as_os_error(url):
        files.put_file(os.fspath(file), path)


def upload_folder(
    folder: pathlib.Path, url: str, *, last: str = "", sent: Callable[[str], None] | None = None,
    before: Collection[str] = (),
) -> None:  # fmt: skip
    """Uploads all files below a folder, the one named `last` after all others.

    sent: called with the name of each file that is there. before: names that are there already.
    """
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    for name in sorted({*names} - {*before}, key=lambda name: (name == last, name)):
        upload(folder / name, f"{url.rstrip('/')}/{name}")
        if sent is not None:
            sent(name)


def local_place(url: str, folder: str | os.PathLike) -> pathlib.Path:
    """The folder below `folder` that stands for a URL."""
    name = hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:24]
    return pathlib.Path(os.path.expanduser(folder)) / name


def _is_inside(name: str) -> bool:
    path = pathlib.PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def _stamp(path: pathlib.Path) -> list[int]:
    """What changes when a local file does."""
    state = path.stat()
    return [state.st_size, state.st_mtime_ns]


def fetch(
    url: str, target: pathlib.Path, *, keep: Callable[[str], bool] = lambda name: True
) -> None:  # fmt: skip
    """Makes a local folder hold the files below a URL, those whose names `keep` takes.

    Files that have changed neither here nor there are not read again; others are removed.
    Processes of one machine may call it at once. Raises OSError, and FileNotFoundError where
    nothing is there.
    """
    import fcntl

    target.mkdir(parents=True, exist_ok=True)
    with open(target.with_name(f"{target.name}.lock"), "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        names = {name: state for name, state in find(url).items() if keep(name)}
        if out := [name for name in names if not _is_inside(name)]:
            raise OSError(f"{url} holds the name {out[0]!r}, which leads out of a folder")
        if not names:
            raise FileNotFoundError(f"{url} does not exist, or holds no files")
        known_file = target.with_name(f"{target.name}.json")
        known = _known(known_file)
        for path in target.rglob("*"):
            name = path.relative_to(target).as_posix()
            if path.is_file() and keep(name) and name not in names:
                path.unlink()
        stale = {
            name: state for name, state in names.items()
            if not (path := target / name).is_file()
            or known.get(name) != [state.num_bytes, state.version, *_stamp(path)]
        }  # fmt: skip
        _require_room(url, target, sum(state.num_bytes for state in stale.values()))
        for name, state in stale.items():
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f".{path.name}.partial")
            _copy(f"{url.rstrip('/')}/{name}", state, partial)
            os.replace(partial, path)
            known[name] = [state.num_bytes, state.version, *_stamp(path)]
            full_disk.write_atomically(known_file, json.dumps(known).encode())


def fetch_file(url: str, target: pathlib.Path) -> None:
    """Copies one object to a local file, without a listing. Raises OSError."""
    _copy(url, status(url), target)


def _known(file: pathlib.Path) -> dict[str, list[int]]:
    """What was copied; where the file is damaged nothing is known of it, and all is copied anew."""
    try:
        known = json.loads(file.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _copy(url: str, state: Status, partial: pathlib.Path) -> None:
    """Copies an object to a local file, whose size and MD5 are then as the store says it is.

    An ETag may be no MD5 and look like one (S3's directory buckets, other stores): what was read
    twice alike is taken. Raises OSError.
    """
    files, source = _of(url)
    before = ""  # the MD5 of the copy before
    for attempt in range(1, ATTEMPTS + 1):
        with _as_os_error(url):
            files.get_file(source, str(partial))
        size, digest = partial.stat().st_size, ""
        if size == state.num_bytes:
            if not state.md5 or scheme_of(url) != "s3":
                return
            with open(partial, "rb") as file:
                digest = hashlib.file_digest(file, _md5).hexdigest()
            if digest == state.md5 or _is_encrypted(files, url):
                return
            if digest == before:
                logging.getLogger(__name__).warning(
                    "note: the ETag of %r is not the MD5 of its content: it was read twice, with "
                    "the same result (MD5 %s), and is used", url, digest,
                )  # fmt: skip
                return
            before = digest
        if attempt < ATTEMPTS:
            time.sleep(PAUSE_SECONDS)
    given = f"{size:,} bytes" if size != state.num_bytes else f"bytes of MD5 {digest}"
    raise transient.Transient(
        f"the store gives {given} of an object of {state.num_bytes:,} bytes"
        f"{f' and MD5 {state.md5}' if state.md5 else ''}, {ATTEMPTS} times ({url})"
    )


def _md5() -> Any:
    return hashlib.md5(usedforsecurity=False)


def _is_encrypted(files: Any, url: str) -> bool:
    """Whether the ETag of an object of S3 is no MD5 of its content, by the way it is encrypted."""
    bucket, _, key = url.partition("://")[2].partition("/")
    with _as_os_error(url):
        head = files.call_s3("head_object", Bucket=bucket, Key=key)
    return "SSECustomerAlgorithm" in head or "kms" in head.get("ServerSideEncryption", "")


def _require_room(url: str, target: pathlib.Path, num_bytes: int) -> None:
    """Raises OSError where a copy does not fit on the disk, before it is begun."""
    if num_bytes > (free := shutil.disk_usage(target).free):
        raise OSError(
            errno.ENOSPC,
            f"{num_bytes / 2**30:,.2f} GiB of {url} are to be copied, and the disk of {target} has "
            f"{free / 2**30:,.2f} GiB free",
        )
