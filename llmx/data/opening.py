"""Opens the files of a source: plain ones, and compressed ones, decompressed as they are read.

The decompressed content is never held whole. Damage is an error with the place where it lies.
"""

import dataclasses
import gzip
import io
import os
import zlib
from typing import Any, BinaryIO

from llmx.data import remote, transient

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_READ_BYTES = 16 << 10  # decompressed at once: what is lost of the text before damage
_BUFFER_BYTES = 1 << 20


def compression_of(path: str) -> str:
    """The compression that a file's name says, "" for none."""
    return COMPRESSIONS.get(os.path.splitext(path)[1].lower(), "")


def open_at(path: str, offset: int = 0) -> BinaryIO:
    """The content of a file from a byte of it on; of the decompressed one where it is compressed.

    What comes before is decompressed again. Raises OSError for a file that cannot be read;
    reading raises ValueError for damaged compressed data.
    """
    compression = compression_of(path)
    if not compression:
        file = _open(path)
        file.seek(offset)
        return file
    stream = io.BufferedReader(_Decompressed(path, compression), _BUFFER_BYTES)
    while offset > 0 and (passed := stream.read(min(offset, _BUFFER_BYTES))):
        offset -= len(passed)
    return stream


def _open(path: str) -> BinaryIO:
    return remote.open_file(path, random=False) if remote.is_url(path) else open(path, "rb")


def open_random(path: str) -> BinaryIO:
    """A file for reads at several places. Raises OSError."""
    return remote.open_file(path, random=True) if remote.is_url(path) else open(path, "rb")


@dataclasses.dataclass(frozen=True)
class Status:
    """The size of a file, and what changes when its content does."""

    num_bytes: int
    mtime_ns: int  # of an object: a number that is another for another content
    ctime_ns: int


def status(path: str) -> Status:
    """The present state of a file. Raises OSError, also for what is no file."""
    if remote.is_url(path):
        found = remote.status(path)
        return Status(found.num_bytes, found.version, 0)
    if not os.path.isfile(path) and os.path.exists(path):
        raise OSError("it is no regular file any more")
    found = os.stat(path)
    return Status(found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class _Decompressed(io.RawIOBase):
    """The decompressed content of a file. It counts lines, to say where damage lies."""

    def __init__(self, path: str, compression: str):
        self._path, self._compression = path, compression
        self._num_bytes = self._num_lines = 0
        self._file = _open(path)
        self._stream: Any = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        import pyarrow

        try:
            if self._stream is None:
                self._stream = _decompressor(self._file, self._compression)
            raw = self._stream.read(min(len(buffer), _READ_BYTES))
        except (OSError, EOFError, zlib.error, pyarrow.ArrowException) as error:
            if transient.is_of_access(error):
                raise
            raise ValueError(
                f"{self._path}: the {self._compression} data is damaged or cut off ({error}) "
                f"before byte {self._file.tell()} of the file, after line {self._num_lines} (byte "
                f"{self._num_bytes}) of the text in it: copy or compress it again"
            ) from error
        buffer[: len(raw)] = raw
        self._num_bytes += len(raw)
        self._num_lines += raw.count(b"\n")
        return len(raw)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def _decompressor(file: BinaryIO, compression: str) -> Any:
    """A stream with `read(size)`, which checks what checksums the format has."""
    if compression == "gzip":
        return _Members(file)
    import pyarrow

    return pyarrow.input_stream(pyarrow.PythonFile(file, mode="r"), compression=compression)


class _Members:
    """`read` of a gzip file that returns what comes before damage, and raises only then."""

    def __init__(self, file: BinaryIO):
        self._file = gzip.GzipFile(fileobj=file)

    def read(self, size: int) -> bytes:
        return self._file.read1(size)
