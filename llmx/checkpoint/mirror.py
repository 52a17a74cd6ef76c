"""Work directories in object stores: a local folder that a run writes, and its copy in the store.

Stores have neither renames nor appends, on which a work directory relies. So a run writes to a
local folder as always, and after each checkpoint a thread uploads what is new there: first the
small files, then the checkpoint, of it `directory.MARKER` last. A checkpoint without it is
unfinished, and is neither read nor copied.

At the start, under the lease of the store's directory (`runtime.ownership`), folder and store are
compared by `RECORD`, the launches that wrote them. Where the store has no launch that the folder
lacks, the folder is at least as new and stays; else it is made what the store holds.

Of several processes each uploads the shards that it has written, and process 0 the rest
(`places.in_store`); its local folder has the files beside the arrays.
"""

import contextlib
import json
import pathlib
import shutil
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from llmx.checkpoint import directory
from llmx.data import full_disk, remote, transient
from llmx.runtime import exits, ownership

SCHEMES = ("s3", "gs")  # of which tensorstore has conditional writes, for the lease
FOLDER, READ_FOLDER = "~/.cache/llmx/workdirs", "~/.cache/llmx/workdirs_read"
RECORD = "launches.json"
RETRY_SECONDS = 60.0  # until a failed upload is tried again, at the latest
TELL_SECONDS = 30.0  # between lines that say what is waited for
# At the end of a run: until the upload is given up, also where no file has arrived for so long.
FINAL_SECONDS, QUIET_SECONDS = 1800.0, 300.0

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


def pull(url: str, folder: pathlib.Path, *, arrays: bool = True, without: str = "") -> None:
    """Makes a local folder the work directory that the store holds now. Raises OSError.

    Args:
      arrays: whether those of the checkpoints are copied; else their folders are empty.
      without: the name of a file that is not copied.
    """
    names = remote.find(url)
    if not names:
        raise FileNotFoundError(f"{url} does not exist, or holds nothing that may be listed")
    wanted, steps = _wanted(names), committed(names)

    def keep(name: str) -> bool:
        return wanted(name) and name != without and (arrays or _beside_arrays(name))

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
        what = f"--workdir={workdir} cannot be copied to {folder}"
        raise transient.refusal(what, error, "check its name, and the credentials") from error
    return str(folder)


class Mirror:
    """The copy in a store of the local folder `folder`; with no URL it does nothing.

    Args:
      launch: of several processes, see `places.in_store`; "" = one process.
      rank: of this process. Only the first copies anything but its shards.
      may_write: raises where the store's directory is not this run's any more.
    """

    def __init__(
        self, url: str, folder: pathlib.Path, *, log: Log, launch: str = "", rank: int = 0,
        may_write: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._url, self._folder, self._log = url.rstrip("/"), folder, log
        from llmx.checkpoint import places  # imports JAX, which reading needs not

        self.named = self._url or str(folder)  # as the user named it, the same in all processes
        self.place, self._several = places.SHARED, bool(launch)
        self._may_write, self.is_local = may_write, not url
        if launch:
            self.place = places.in_store(
                self._url, launch, rank, before=self._upload_small, may_write=may_write,
                begun=self._begun, published=lambda step: self._steps.add(str(step)),
            )  # fmt: skip
        if rank:
            self._url = ""
        self._launches: list[str] = []
        self._uploaded = True  # whether the local record says that the store has been written
        self._sent: dict[str, tuple[int, int] | None] = {}  # sizes and times of what is uploaded
        self._steps: set[str] = set()  # checkpoints that the store holds
        self._pruned: set[str] = set()  # of them: what the run has deleted or set aside
        self._pruning, self._renaming = threading.Lock(), threading.Lock()
        self._parts: dict[str, set[str]] = {}  # of others: the files that it holds
        self._step = ""  # the checkpoint that is uploaded now
        self._error: BaseException | None = None  # why the last upload failed
        self._changed, self._small_files = threading.Condition(), threading.Lock()
        self._asked = self._done = 0  # uploads
        self._since = self._arrived = 0.0  # when this one began, and when a file last arrived
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------------------------ the beginning

    def pull(self) -> None:
        """Begins with the newer of folder and store. Raises ValueError where that is not known."""
        if not self._url:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(parents=True)
            return
        try:
            self._pull()
        except OSError as error:
            raise transient.refusal(
                f"workdir={self._url} cannot be copied to {self._folder}", error,
                "check its name, the credentials and the space on that disk",
            ) from error  # fmt: skip

    def _pull(self) -> None:
        names = self._listed()
        theirs, mine = self._record_there(names), _read_record(self._folder / RECORD)
        there, here = committed(names), self._complete()
        launches, kept = mine.get("launches", []), False
        if launches and launches[: len(theirs)] == theirs and (theirs or not there):
            if mine["uploaded"] and not theirs:
                raise ValueError(
                    f"{self._url} holds nothing of the run that was uploaded there from "
                    f"{self._folder}, which has its checkpoints {_listed(here)}: bring it back; or "
                    "move that folder away to begin a new run"
                )
            kept = mine["whole"] and bool(here or not there)
        if kept:
            if newer := here - there:
                self._log(
                    f"{self._url} lacks the checkpoints {_listed(newer)} of {self._folder}, which "
                    "are of the same run: they stay, and are uploaded"
                )
            self._sent = {name: None for name in filter(_wanted(()), names) if _is_small(name)}
            self._steps = {*there}
        if kept and self._several:  # of one process until now: the store gets the arrays, too
            self._upload_small()
            self._note_pruned()
            self._upload_checkpoints()
            names, kept = self._listed(), False
            here, there, theirs = set(), committed(names), launches
        if kept:
            self._fetch_newer(here, there)
        else:
            launches = theirs
            self._fetch_all(here - there)
            self._sent = {name: self._state(name) for name in self._small()}
        self._steps = there
        self._write_record([*launches, uuid.uuid4().hex], uploaded=bool(theirs or there))
        if kept:
            self._ask()

    def _listed(self) -> dict[str, remote.Status]:
        """The objects of the store. Raises OSError for a listing that cannot be true."""
        names = remote.find(self._url)
        if ownership.FILE not in names:
            raise transient.Transient(
                f"the listing of {self._url} lacks {ownership.FILE}, which this run has just "
                "written: the store does not list what it holds, and nothing is written over it"
            )
        return names

    def _record_there(self, names: Any) -> list[str]:
        """The launches that wrote what the store holds, oldest first."""
        if RECORD not in names:
            return []
        beside = self._folder.with_name(f"{self._folder.name}.record")
        remote.fetch(self._url, beside, keep=lambda name: name == RECORD)
        return _read_record(beside / RECORD).get("launches", [])

    def _fetch_newer(self, here: set[str], there: set[str]) -> None:
        """What the store has after the newest checkpoint of the folder, as where that was damaged,
        but not what the run went back from."""
        newest = max(map(int, here), default=-1)
        folder, label = self._folder / directory.CHECKPOINTS, directory.LABELS["replaced"]
        missing = {
            step for step in there
            if int(step) > newest and not any(folder.glob(f"{step}{label}*"))
        }  # fmt: skip
        if missing:
            lead = tuple(f"{directory.CHECKPOINTS}{step}/" for step in missing)
            remote.fetch(self._url, self._folder, keep=lambda name: name.startswith(lead))

    def again(self, step: int) -> Callable[[], None] | None:
        """Puts the store's copy into the place of a checkpoint that is damaged here, which is set
        aside; None where the store has none. Returns what undoes it. Raises ValueError where the
        copy cannot be had."""
        name, root = str(step), self._folder / directory.CHECKPOINTS
        replaced = directory.LABELS["replaced"]
        if name not in self._steps or self._several or any(root.glob(f"{name}{replaced}*")):
            return None
        lead = f"{directory.CHECKPOINTS}{name}/"
        beside = self._folder.with_name(f"{self._folder.name}.again")
        try:
            remote.fetch(self._url, beside, keep=lambda other: other.startswith(lead))
        except OSError as error:
            what = f"checkpoint {step} of {self._folder} is damaged, and that of {self._url} cannot"
            raise transient.refusal(
                f"{what} be copied", error, "check the credentials and the space on that disk"
            ) from error
        self._may_write()
        # An upload must not find the checkpoint gone meanwhile, and delete it in the store.
        with self._renaming:
            aside = directory.set_aside(root, step, "corrupt")
            (beside / lead).rename(root / name)
        shutil.rmtree(beside)
        self._log(f"set aside checkpoint {step} as {aside.name}: that of {self._url} is tried")

        def undo() -> None:
            with self._renaming:
                shutil.rmtree(root / name)
                aside.rename(root / name)

        return undo

    def _fetch_all(self, lost: set[str]) -> None:
        """Makes the folder what the store holds; what only the folder has is kept beside it."""
        if lost:
            number = 1
            while (aside := self._folder.with_name(f"{self._folder.name}.aside-{number}")).exists():
                number += 1
            self._folder.rename(aside)
            self._log(
                f"{self._folder} had the checkpoints {_listed(lost)}, of another run or of one "
                f"that went on elsewhere since: {self._url} counts, and they are kept in {aside}"
            )
        # Written last, so that a copy that is cut off is not believed.
        (self._folder / RECORD).unlink(missing_ok=True)
        pull(self._url, self._folder, arrays=not self._several, without=RECORD)

    def _write_record(self, launches: list[str], *, uploaded: bool) -> None:
        self._launches, self._uploaded = launches, uploaded
        record = {"launches": launches, "uploaded": uploaded, "whole": not self._several}
        full_disk.write_atomically(self._folder / RECORD, json.dumps(record).encode())

    # ------------------------------------------------------------------------------ while it runs

    def pushing(self, first: Callable[[int], None]) -> Callable[[int], None]:
        """What is called after each complete checkpoint, with its step: `first`, and an upload,
        which is not waited for."""

        def saved(step: int) -> None:
            first(step)
            if not self._several and str(step) in self._steps:  # set aside, and made anew
                self._pruned.add(str(step))
            if self._asked > self._done and time.time() - self._since > TELL_SECONDS:
                self._log(f"{self._waiting()}: training goes on, and saves in {self._folder}")
            self._ask()

        return saved

    def uses(self, step: int) -> bool:
        """Whether a checkpoint is uploaded now, and must not be deleted."""
        return self._step == str(step)

    def _ask(self) -> None:
        """Has all that is new uploaded, in a thread. Not while a save is made complete."""
        if not self._url:
            return
        with contextlib.suppress(ValueError, OSError):  # then the next one tells it
            self._note_pruned()
        with self._changed:
            if self._asked == self._done:
                self._since = self._arrived = time.time()
            self._asked += 1
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="llmx-upload", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while True:
            with self._changed:
                wait = RETRY_SECONDS if self._error is not None else None
                self._changed.wait_for(lambda: self._asked > self._done, wait)
                asked, self._since = self._asked, time.time()
            self.push()
            with self._changed:
                self._done = asked
                self._changed.notify_all()

    def _waiting(self) -> str:
        """What is waited for, and since when."""
        what = f"checkpoint {self._step}" if self._step else "the small files"
        since = time.strftime("%H:%M:%S", time.localtime(self._since))
        seconds = time.time() - self._since
        return f"{self._url} has not taken {what} yet, since {since} ({seconds:.0f} s)"

    def push(self) -> None:
        """Uploads what is new, if there is a URL. A failure is logged, and tried again later."""
        if not self._url:
            return
        for attempt in range(1, remote.ATTEMPTS + 1):
            try:
                self._may_write()
                self._upload()
                if self._error is not None:
                    self._log(f"{self._url} can be written again")
                self._error = None
                return
            except ownership.Lost:  # which ends the run
                return
            except (OSError, ValueError) as error:  # ValueError: of the local folder
                if attempt < remote.ATTEMPTS:
                    time.sleep(remote.PAUSE_SECONDS)
                    continue
                if self._error is None:
                    cause = " ".join(str(error).split())[:300]
                    self._log(
                        f"warning: {self._url} is not up to date ({cause}): it is tried again; "
                        f"training goes on, and all is in {self._folder}"
                    )
                self._error = error
            finally:
                self._step = ""

    def end(self, code: int, left: Callable[[], float | None] = lambda: None) -> int:
        """Uploads the rest, and waits for it: at most `FINAL_SECONDS`, and after SIGTERM, which may
        come meanwhile, what `left` says (`grace.GraceLimit.left`).

        Returns the exit code: `code`; where the copy did not arrive `exits.AGAIN`, or
        `exits.UNSAVED` if the store refuses it. The folder stays, and another start on this machine
        uploads it.
        """
        if not self._url:
            return code
        self._ask()
        begun = told = time.time()
        limit = begun + FINAL_SECONDS
        with self._changed:
            while self._done < self._asked and (now := time.time()) < limit:
                if now - max(self._arrived, begun) > QUIET_SECONDS or left() == 0:
                    break
                if now - told > TELL_SECONDS:
                    told = now
                    self._log(f"{self._waiting()}: waiting for it")
                self._changed.wait(0.5)
            arrived = self._done == self._asked
        if arrived and self._error is None:
            self._log(f"uploaded to {self._url}")
            return code
        late = "" if arrived else f" ({self._waiting()})"
        self._log(
            f"{self._url} lacks what came last{late}: all is in {self._folder}, and the same "
            "command on this machine uploads it"
        )
        if arrived and not transient.is_transient(self._error):
            return exits.UNSAVED
        return exits.AGAIN if code == exits.DONE else code

    # ---------------------------------------------------------------------------------- one upload

    def _upload_small(self) -> None:
        with self._small_files:  # of several processes a save uploads them, too
            self._upload_small_alone()

    def _upload_small_alone(self) -> None:
        # The record first: what is beside it is then known to be of these launches.
        for name in sorted(self._small(), key=lambda name: name != RECORD):
            try:
                state = self._state(name)
                if self._sent.get(name) != state:
                    remote.upload(self._folder / name, f"{self._url}/{name}")
                    self._sent[name], self._arrived = state, time.time()
            except FileNotFoundError:  # replaced or removed meanwhile; or the store has no bucket
                if (self._folder / name).exists():
                    raise
        for name in self._sent.keys() - {*self._small()}:
            remote.remove(f"{self._url}/{name}")
            del self._sent[name]
        if not self._uploaded:
            self._write_record(self._launches, uploaded=True)  # which the store need not know
            self._sent[RECORD] = self._state(RECORD)

    def _upload(self) -> None:
        self._upload_small()
        if self._several:  # whose saves upload their checkpoints, arrays and all
            self._prune()
            return
        self._note_pruned()
        self._upload_checkpoints()

    def _upload_checkpoints(self) -> None:
        while (missing := self._complete() - self._steps) or self._pruned:
            if missing:
                # The newest first: from a slow store that one is wanted.
                self._upload_checkpoint(max(missing, key=int))
                self._upload_small()  # before the next one, which it is to be as new as
                self._note_pruned()
            self._prune()

    def _upload_checkpoint(self, step: str) -> None:
        self._step, name = step, f"{directory.CHECKPOINTS}{step}"
        parts = self._parts.setdefault(step, set())
        try:
            remote.upload_folder(
                self._folder / name, f"{self._url}/{name}", last=directory.MARKER, before=parts,
                sent=lambda part: self._got(part, parts),
            )  # fmt: skip
            self._steps.add(step)
        except FileNotFoundError:
            if step in self._complete():
                raise
            # It was deleted here meanwhile.
            _remove_checkpoint(f"{self._url}/{name}", remote.remove)
        del self._parts[step]
        self._step = ""

    def _note_pruned(self) -> None:
        """Finds what the store holds and the folder does not, once it has any of the folder's: else
        the folder has vanished, or what is new has not arrived."""
        with self._renaming:
            complete = self._complete()
        if complete & self._steps:
            self._pruned |= self._steps - complete

    def _prune(self) -> None:
        for step in sorted(self._pruned, key=int):
            _remove_checkpoint(
                f"{self._url}/{directory.CHECKPOINTS}{step}",
                lambda url, step=step: self._remove(url, step),
            )
            if step in self._pruned:
                self._steps.discard(step)
                self._pruned.discard(step)

    def _remove(self, url: str, step: str) -> None:
        with self._pruning:
            if step in self._pruned:
                remote.remove(url)

    def _begun(self, step: int) -> None:
        """Several processes save `step` anew: that save replaces what the store holds of it."""
        if str(step) in self._pruned:
            with self._pruning:
                self._pruned.discard(str(step))

    def _got(self, part: str, parts: set[str]) -> None:
        parts.add(part)
        self._arrived = time.time()

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


def _is_small(name: str) -> bool:
    return not name.startswith(directory.CHECKPOINTS)


def _listed(steps: set[str]) -> str:
    return ", ".join(sorted(steps, key=int)) or "none"


def _read_record(path: pathlib.Path) -> dict[str, Any]:
    """A `RECORD`: the launches that wrote what is beside it, whether any of it was uploaded, and
    whether its checkpoints have their arrays. {} where there is none, or none that can be read."""
    try:
        found = json.loads(path.read_bytes())
        known = all(isinstance(launch, str) for launch in found["launches"])
        return found if known and {"uploaded", "whole"} <= found.keys() else {}
    except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _remove_checkpoint(url: str, remove: Callable[[str], None]) -> None:
    remove(f"{url}/{directory.MARKER}")  # from here on it is unfinished
    for name in remote.find(url):
        remove(f"{url}/{name}")


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
    mirror = Mirror(
        workdir, folder, log=log, launch=launch, rank=rank, may_write=job.may_write
    )  # fmt: skip
    log(f"work: {workdir} is written in {folder} and uploaded after each checkpoint")
    mirror.pull()
    return str(folder), mirror
