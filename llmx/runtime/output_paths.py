"""What is wrong with a path that a command is asked to write to, said before it works for long."""

import contextlib
import os
import pathlib
from collections.abc import Collection

# In a folder from before its first file until its last: what was killed in between may be replaced.
UNFINISHED = ".llmx-unfinished"


def file_problems(option: str, path: str) -> list[str]:
    """Why no file can be written to `path`, as given with `option`; [] if one can, or for ""."""
    if not path:
        return []
    target = pathlib.Path(path).absolute()
    if target.is_dir():
        return [f"{option}={path} is a folder: name a file"]
    if not target.parent.is_dir():
        return [f"{option}={path}: the folder {target.parent} does not exist: create it"]
    if target.exists():
        return (
            []
            if os.access(target, os.W_OK)
            else [f"{option}={path} cannot be written to: use another file"]
        )
    return _closed(option, path, target.parent)


def folder_problems(option: str, path: str) -> list[str]:
    """Why no folder can be made or written to at `path`; parents are made too; [] for ""."""
    if not path:
        return []
    folder = pathlib.Path(path).absolute()
    while not folder.exists():
        folder = folder.parent
    return _closed(option, path, folder)


def _closed(option: str, path: str, folder: pathlib.Path) -> list[str]:
    if folder.is_dir() and os.access(folder, os.W_OK):
        return []
    return [f"{option}={path}: {folder} cannot be written to: use another folder"]


def require_new(
    folder: pathlib.Path, *, last: str = "", besides: Collection[str] = (),
    remedy: str = "export into a new directory",
) -> None:  # fmt: skip
    """Raises ValueError where something is in a folder that is to be made.

    last: the file that is written last; without it what `UNFINISHED` marks is nothing. With it a
    marked folder is complete, killed just then: it loses the mark. besides: names of what may be
    there.
    """
    if not os.path.lexists(folder):
        return
    if folder.is_dir() and may_be_filled([path.name for path in folder.iterdir()], last, besides):
        return
    if last and folder.is_dir() and (folder / last).exists():
        with contextlib.suppress(OSError):
            (folder / UNFINISHED).unlink(missing_ok=True)
    raise ValueError(f"{folder} exists and is not empty: {remedy}")


def may_be_filled(names: Collection[str], last: str = "", besides: Collection[str] = ()) -> bool:
    """Whether nothing is in a folder but what a killed command left, see `require_new`."""
    return set(names) <= {*besides} or (bool(last) and UNFINISHED in names and last not in names)
