"""Work directories in object stores: a local folder that a run writes, and its copy in the store.

Stores have neither renames nor appends, on which a work directory relies. So a run writes to a
local folder as always, and after each checkpoint what is new there is uploaded: first the small
files, then the checkpoint, of it `directory.MARKER` last. A checkpoint without it is unfinished,
and is neither read nor copied. At the start the folder is made what the store holds, under the
lease of the store's directory (`runtime.ownership`).

Of several processes each uploads the shards that it has written, and process 0 the rest
(`places.in_store`); its local folder has the files beside the arrays.
"""

import contextlib
import pathlib
import shutil
import time
import uuid
from collections.abc import Callable
from typing import Any

from llmx.checkpoint import directory
from llmx.data import remote
from llmx.runtime import exits, ownership

SCHEMES = ("s3", "gs")  # of which tensorstore has conditional writes, for the lease
FOLDER, READ_FOLDER = "~/.cache/llmx/workdirs", "~/.cache/llmx/workdirs_read"

Log = Callable[[str], None]


def problems(option: str, workdir: str) -> list[str]:
    """Why a run cannot have its work directory there; [] for local ones. Opens no connection."""
    if not remote.is_url(workdir):
        return []
    if remote.scheme_of(workdir) not in SCHEMES:
        return [
            f"{option}{workdir}: a work directory is local, or in one of the stores "
            f"{', '.join(f'{scheme}://' for scheme in SCHEMES)}: name such a one"
        ]
    return remote.problems(option, workdir)


def committed(names: Any) -> set[str]:
    """The steps, as text, of the complete checkpoints among names of files."""
    found = set()
    for name in names:
        if name.startswith(directory.CHECKPOINTS) and name.endswith(f"/{directory.MARKER}"):
            found.add(name.split("/")[1])
    return {step for step in found if step.isdecimal()}


def _wanted(names: Any) -> Callable[[str], bool]:
    """Which files are copied: all but the lease and those of unfinished checkpoints."""
    steps = committed(names)

    def keep(name: str) -> bool:
        if name.startswith(directory.CHECKPOINTS) and name.count("/") > 1:
            return name.split("/")[1] in steps
        return name not in (ownership.FILE, f"{ownership.FILE}.__lock")

    return keep


def _beside_arrays(name: str) -> bool:
    return not (name.startswith(directory.CHECKPOINTS) and f"/{directory.STATE}/" in name)


def pull(url: str, folder: pathlib.Path, *, arrays: bool = True) -> None:
    """Makes a local folder the work directory that the store holds now. Raises OSError.

    Args:
      arrays: whether those of the checkpoints are copied; else their folders are empty.
    """
    names = remote.find(url) if remote.kind_of(url) == "folder" else {}
    wanted, steps = _wanted(names), committed(names)
    keep = wanted if arrays else lambda name: wanted(name) and _beside_arrays(name)
    if not arrays and (folder / directory.CHECKPOINTS).exists():
        shutil.rmtree(folder / directory.CHECKPOINTS)
    for path in (folder / directory.CHECKPOINTS).glob("*/"):
        if path.name not in steps:
            shutil.rmtree(path)
    if any(map(keep, names)):
        remote.fetch(url, folder, keep=keep)
    elif folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for step in steps if not arrays else ():
        (folder / directory.CHECKPOINTS / step / directory.STATE).mkdir()


def reading(workdir: str) -> str:
    """A local work directory to read: the same, or a copy of one in a store, without a lease.

    Raises ValueError where there is none.
    """
    if not remote.is_url(workdir):
        return workdir
    if found := problems("--workdir=", workdir):
        raise ValueError(found[0])
    folder = remote.local_place(workdir, READ_FOLDER)
    try:
        pull(workdir, folder)
    except OSError as error:
        raise ValueError(f"--workdir={workdir} cannot be copied to {folder}: {error}") from error
    return str(folder)


class Mirror:
    """The copy in a store of the local folder `folder`; with no URL it does nothing.

    Args:
      launch: of several processes, see `places.in_store`; "" = one process.
      rank: of this process. Only the first copies anything but its shards.
    """

    def __init__(
        self, url: str, folder: pathlib.Path, *, log: Log, launch: str = "", rank: int = 0
    ) -> None:  # fmt: skip
        self._url, self._folder, self._log = url.rstrip("/"), folder, log
        from llmx.checkpoint import places  # imports JAX, which reading needs not

        self.named = self._url or str(folder)  # as the user named it, the same in all processes
        self.place, self._several = places.SHARED, bool(launch)
        if launch:
            self.place = places.in_store(
                self._url, launch, rank, before=self._upload_small,
                published=lambda step: self._steps.add(str(step)),
            )  # fmt: skip
        if rank:
            self._url = ""
        self._sent: dict[str, tuple[int, int]] = {}  # sizes and times of what is uploaded
        self._steps: set[str] = set()  # checkpoints that the store holds
        self._failed = False

    def pull(self) -> None:
        """Begins with what the store holds. Raises ValueError where it cannot be read."""
        if not self._url:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(parents=True)
            return
        try:
            pull(self._url, self._folder, arrays=not self._several)
        except OSError as error:
            raise ValueError(
                f"workdir={self._url} cannot be copied to {self._folder}: {error}: check its name, "
                "the credentials and the space on that disk"
            ) from error
        self._sent = {name: self._state(name) for name in self._small()}
        self._steps = self._complete()

    def pushing(self, first: Callable[[int], None]) -> Callable[[int], None]:
        """What is called after each complete checkpoint, with its step: `first`, and an upload."""

        def saved(step: int) -> None:
            first(step)
            self.push()

        return saved

    def push(self) -> None:
        """Uploads what is new, if there is a URL. A failure is logged, and tried again later."""
        if not self._url:
            return
        for attempt in range(1, remote.ATTEMPTS + 1):
            try:
                self._upload()
                if self._failed:
                    self._log(f"{self._url} can be written again")
                self._failed = False
                return
            except (OSError, ValueError) as error:  # ValueError: of the local folder
                if attempt == remote.ATTEMPTS:
                    self._failed = True
                    cause = " ".join(str(error).split())[:300]
                    self._log(
                        f"warning: {self._url} is not up to date ({cause}): it is tried again "
                        f"after the next checkpoint; all is in {self._folder}"
                    )
                else:
                    time.sleep(remote.PAUSE_SECONDS)

    def end(self, code: int) -> int:
        """Uploads the rest; the exit code: `code`, or `exits.UNSAVED` where that failed."""
        self.push()
        if self._url and not self._failed:
            self._log(f"uploaded to {self._url}")
        return exits.UNSAVED if self._failed else code

    def _upload_small(self) -> None:
        for name in self._small():
            with contextlib.suppress(FileNotFoundError):  # replaced or removed meanwhile
                state = self._state(name)
                if self._sent.get(name) != state:
                    remote.upload(self._folder / name, f"{self._url}/{name}")
                    self._sent[name] = state
        for name in self._sent.keys() - {*self._small()}:
            remote.remove(f"{self._url}/{name}")
            del self._sent[name]

    def _upload(self) -> None:
        self._upload_small()
        complete = self._complete()
        for step in sorted(complete - self._steps, key=int):
            name = f"{directory.CHECKPOINTS}{step}"
            remote.upload_folder(self._folder / name, f"{self._url}/{name}", last=directory.MARKER)
            self._steps.add(step)
        for step in self._steps - complete:
            _remove_checkpoint(f"{self._url}/{directory.CHECKPOINTS}{step}")
            self._steps.remove(step)

    def _complete(self) -> set[str]:
        return {str(step) for step in directory.steps(self._folder / "checkpoints")}

    def _small(self) -> list[str]:
        """The files of the work directory besides its checkpoints."""
        keep, found = _wanted(()), []
        for path in sorted(self._folder.rglob("*")):
            name = path.relative_to(self._folder).as_posix()
            if keep(name) and not name.endswith(".tmp") and path.is_file():
                found.append(name)
        return found

    def _state(self, name: str) -> tuple[int, int]:
        status = (self._folder / name).stat()
        return status.st_size, status.st_mtime_ns


def _remove_checkpoint(url: str) -> None:
    remote.remove(f"{url}/{directory.MARKER}")  # from here on it is unfinished
    for name in remote.find(url):
        remote.remove(f"{url}/{name}")


def begin(workdir: str, job: Any, *, log: Log) -> tuple[str, Mirror]:
    """The local work directory of a run, and its copy in a store, where `workdir` is there.

    Takes the store's directory for this run. Raises ValueError where that is not possible.
    """
    if not remote.is_url(workdir):
        return workdir, Mirror("", pathlib.Path(workdir), log=log)
    job.own(workdir)
    folder, rank = remote.local_place(workdir, FOLDER), job.peers.index
    launch = job.peers.broadcast("launch", uuid.uuid4().hex) if job.peers.many else ""
    if rank:  # its host may be that of others
        folder = folder.with_name(f"{folder.name}-{rank}")
    mirror = Mirror(workdir, folder, log=log, launch=launch, rank=rank)
    mirror.pull()
    log(f"work: {workdir} is written in {folder} and uploaded after each checkpoint")
    return str(folder), mirror
