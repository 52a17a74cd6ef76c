"""The directory of a run's checkpoints: which are complete, what else lies there, renames, removal.

`<step>/` is a complete checkpoint; `<step>.orbax-checkpoint-tmp` is being written, or was when its
program was killed; `<step>.corrupt` and `<step>.replaced` were set aside; `<step>.deleted` is being
deleted. Other names are left alone. Object stores (paths with "://") have no atomic rename: there a
checkpoint is complete when the file `MARKER` is in it, which is written last.
"""

import os
import shutil
import threading
import time
from typing import Any, NamedTuple

from llmx.data import transient

STATE, META, MARKER = "state", "meta", "commit_success.txt"
CHECKPOINTS = "checkpoints/"  # in a work directory
UNFINISHED, DELETED = ".orbax-checkpoint-tmp", ".deleted"
LABELS = {"corrupt": ".corrupt", "replaced": ".replaced", "unfinished": UNFINISHED}


class Entry(NamedTuple):
    """One thing in the directory: "complete", one of `LABELS`, "deleted" or "foreign"."""

    name: str
    kind: str
    step: int | None


def root_of(directory: str) -> Any:
    """`directory` as an absolute path, without "..", that may be in an object store."""
    from etils import epath

    if "://" in str(directory):
        return epath.Path(directory)
    path = epath.Path(directory).absolute()
    return epath.Path(os.path.realpath(path) if ".." in path.parts else path)


def renames_atomically(root: Any) -> bool:
    """Whether a rename commits a directory: on file systems, not in object stores."""
    return "://" not in str(root)


def steps(root: Any) -> list[int]:
    """The steps with a complete checkpoint, oldest first; ValueError if it cannot be read."""
    return sorted(entry.step for entry in entries(root) if entry.kind == "complete")


def entries(root: Any) -> list[Entry]:
    """Everything in the directory, by step; none if it does not exist.

    Raises ValueError if it cannot be read.
    """
    try:
        if not root.exists():
            return []
        found = [_entry(root, path.name) for path in root.iterdir()]
    except NotADirectoryError as error:
        problem = f"{root} is a file, and should be the directory of a run's checkpoints"
        raise ValueError(f"{problem}: move it away, or use another work directory") from error
    except OSError as error:
        remedy = "make it readable, or use another work directory"
        what = f"the checkpoints in {root} cannot be listed"
        raise transient.refusal(what, error, remedy) from error
    return sorted(found, key=lambda entry: (entry.step is None, entry.step or 0, entry.name))


def _entry(root: Any, name: str) -> Entry:
    head, _, rest = name.partition(".")
    # "007", digits of other alphabets and numbers beyond any step are not ours.
    ours = head.isascii() and head.isdecimal() and len(head) < 16 and str(int(head)) == head
    if not ours or not (root / name).is_dir():
        return Entry(name, "foreign", None)
    step = int(head)
    if not rest:
        committed = renames_atomically(root) or (root / name / MARKER).exists()
        return Entry(name, "complete" if committed else "unfinished", step)
    if name.startswith(f"{head}{DELETED}"):
        return Entry(name, "deleted", step)
    for kind, suffix in LABELS.items():
        if name.startswith(f"{head}{suffix}"):
            return Entry(name, kind, step)
    return Entry(name, "foreign", None)


def unfinished_path(root: Any, step: int) -> Any:
    """Where checkpoint `step` is written before it is complete."""
    return root / (f"{step}{UNFINISHED}" if renames_atomically(root) else str(step))


def commit(root: Any, step: int) -> None:
    """Makes the checkpoint in `unfinished_path` complete, at once."""
    path = unfinished_path(root, step)
    (path / MARKER).write_text(f"Checkpoint commit was successful to {root / str(step)}")
    if renames_atomically(root):
        path.rename(root / str(step))


def occupied(root: Any, step: int) -> bool:
    """Whether anything has the name of checkpoint `step`: a directory, file or dangling link."""
    path = root / str(step)
    return os.path.lexists(path) if renames_atomically(root) else path.exists()


def set_aside(root: Any, step: int, label: str) -> Any:
    """Renames checkpoint `step` so that it is neither restored nor overwritten; the new path."""
    target, copies = root / f"{step}{LABELS[label]}", 1
    while target.exists():
        copies += 1
        target = root / f"{step}{LABELS[label]}-{copies}"
    return (root / str(step)).rename(target)


def start_removing(root: Any, name: str) -> threading.Thread:
    """Removes a checkpoint in a thread: it is no longer complete when this returns."""
    # Renamed first: a kill during the removal leaves no torn checkpoint under this name.
    path = root / name
    if renames_atomically(root):
        path = path.rename(root / f"{name.partition('.')[0]}{DELETED}-{time.time_ns()}")
    else:
        (path / MARKER).unlink(missing_ok=True)
    thread = threading.Thread(target=remove, args=(path,))
    thread.start()
    return thread


def remove(path: Any) -> None:
    """Removes a directory, a file or a link (not what it points to), if it is there."""
    for _ in range(20):
        if renames_atomically(path):
            if not os.path.lexists(path):
                return
            if os.path.islink(path) or not os.path.isdir(path):
                os.unlink(path)
            else:
                # A writer that has just failed may still close its files.
                shutil.rmtree(path, ignore_errors=True)
        elif not path.exists():
            return
        else:
            path.rmtree()
        time.sleep(0.05)


def num_bytes(path: Any) -> int:
    """Bytes of all files under `path`."""
    total, folders = 0, [path]
    while folders:
        for found in folders.pop().iterdir():
            if found.is_dir():
                folders.append(found)
            elif found.exists():  # it may be deleted meanwhile
                total += found.stat().length
    return total
