"""A disk that is full, as a write sees it: by a descriptor, which has no name."""

import errno
import functools
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
