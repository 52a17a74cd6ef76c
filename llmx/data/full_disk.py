"""Writes whose errors name the file: a full disk is seen by a descriptor, which has no name."""

import errno
import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def names_path(write: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a function that writes to the path of its first argument: errors of a full disk
    name that path."""

    @functools.wraps(write)
    def named(path: Any, *args: Any, **options: Any) -> Any:
        try:
            return write(path, *args, **options)
        except OSError as error:
            if error.errno not in FULL or error.filename is not None:
                raise
            raise OSError(error.errno, error.strerror, str(path)) from error

    return named


@names_path
def write_atomically(path: pathlib.Path, content: bytes) -> None:
    """Replaces the file by a complete one; a reader sees the old or the new, never a part."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(partial, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
