"""One run per work directory: a lease in WORKDIR/owner.json that ends when its owner dies.

Process 0 of a run holds it from before its first write to the end, and a thread renews it each
`ttl` / 5 seconds. Every change is a conditional write of TensorStore (https://google.github.io/
tensorstore/kvstore), which is atomic on local disks, NFS (file locks and a rename) and object
stores (`gs://`, `s3://`: generations). A second start sees on the same machine whether the owner's
process is alive. On another machine it watches for a renewal for `ttl` seconds of its own clock, so
clocks need not agree. The algorithm is that of leases: Gray and Cheriton, SOSP 1989. A lease alone
cannot stop an owner that was suspended for longer than `ttl`: what writes calls `check` before.
"""

import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmx.runtime import exits

FILE = "owner.json"
FILES = (FILE, f"{FILE}.__lock")  # of a lease, or what a killed write of one left
TTL_SECONDS = 20.0
IO_SECONDS = 30.0  # a read or write that takes longer has failed; it may still take effect
LONGEST_TTL = 600.0  # of another owner that is believed
ATTEMPTS = 10  # to take a directory, each of which another start, or a death, has undone

# What says that the same may succeed later, of TensorStore and of disks.
_PASSING = re.compile(r"UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|Timeout|Errno (5|116)\b")

Log = Callable[[str], None]


class Lost(RuntimeError):
    """The work directory is no longer this run's: stop without writing to it."""

    def __init__(self, text: str, code: int = exits.REFUSED) -> None:
        super().__init__(text)
        self.code = code


class Unavailable(Exception):
    """The storage did not answer."""


def stop(lost: Lost) -> None:
    """What a lease does by default when it is lost: `poll` and `check` raise."""


class Lease(contextlib.AbstractContextManager):
    """The right to write to a work directory; `take` makes one. It may be used by any thread."""

    def __init__(
        self, workdir: str, store: Any, record: dict, stamp: bytes, *, log: Log,
        on_lost: Callable[[Lost], None] = stop,
    ) -> None:  # fmt: skip
        self._workdir, self._store, self._log, self._on_lost = workdir, store, log, on_lost
        self._record, self._stamp = record, stamp
        self._renewed = now()
        self._lost: Lost | None = None
        self._failing = False
        self._mutex = threading.RLock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def lost(self) -> str:
        """Why the work directory is no longer this run's; "" as far as is known."""
        return "" if self._lost is None else str(self._lost)

    def poll(self) -> None:
        """Raises Lost if it is known to be lost. Reads the file only if the last renewal is old:
        cheap enough for every step. Never one in a store, which may answer late."""
        old = is_local(self._workdir) and now() - self._renewed > self._record["ttl"] / 2
        if self._lost is not None or old:
            self.check()

    def check(self) -> None:
        """Reads the file, and raises Lost if it is another's. Call it before what others may see:
        a save, a deletion. Storage that does not answer raises nothing here: the write will."""
        if (lost := self.look()) is not None:
            self._on_lost(lost)
            raise lost

    def look(self) -> Lost | None:
        """Reads the file; why the directory is not this run's any more, None as far as is known."""
        if self._lost is None and not self._over.is_set() and self._is_owner():
            with contextlib.suppress(Unavailable), self._mutex:
                self._look()
        return self._lost

    def release(self) -> None:
        """Gives the directory up, if it is still this run's. May be called again."""
        if not self._is_owner() or self._over.is_set():
            return
        self._over.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(IO_SECONDS)
        with contextlib.suppress(Unavailable, Lost), self._mutex:
            self._look()
            if self._lost is None:
                write(self._store, None, self._stamp)

    def _is_owner(self) -> bool:
        # A forked worker inherits the object, but neither the thread nor the right.
        return os.getpid() == self._record["pid"]

    def _keep(self) -> None:
        while not self._over.wait(self._record["ttl"] / 5):
            try:
                with self._mutex:
                    self._renew()
                if self._failing:
                    self._log(f"{self._workdir}/{FILE} can be renewed again")
                self._failing = False
            except Unavailable as error:
                if not self._failing:
                    self._log(f"{self._workdir}/{FILE} cannot be renewed ({error}): trying again")
                self._failing = True
            if self._lost is not None:
                return self._on_lost(self._lost)

    def _renew(self) -> None:
        begun = now()
        self._require_directory()
        if self._lost is not None:
            return
        self._record |= {"heartbeat": self._record["heartbeat"] + 1, "heartbeat_time": clock_text()}
        try:
            stamp = write(self._store, self._record, self._stamp)
        except Unavailable:
            # A full disk takes no new file, but another time of the old one: that is seen as well.
            if not is_local(self._workdir):
                raise
            self._look()
            with contextlib.suppress(OSError):
                os.utime(Path(self._workdir, FILE))
                self._renewed = begun
            raise
        if stamp is None:  # written by another, or touched, or our own write of which we heard late
            self._look()
            if self._lost is None:
                stamp = write(self._store, self._record, self._stamp)
                found = self._look()
                if self._lost is None and stamp is None and not _is_same(found, self._record):
                    raise Unavailable(_refused(self._workdir))
        else:
            self._stamp = stamp
        self._renewed = begun

    def _look(self) -> dict | None:
        """Reads the file, and returns it; sets `_lost`, or `_stamp` to what is there now."""
        self._require_directory()
        found, stamp = read(self._store)
        if found is None:  # seen on network file systems for a moment: look twice
            time.sleep(0.2)
            self._require_directory()
            found, stamp = read(self._store)
        if self._lost is not None:
            return found
        if found is None:
            self._lost = Lost(
                f"{self._workdir}/{FILE} is gone: the work directory was deleted, moved or "
                "unmounted, or the file was removed to end this run. Nothing more is written; "
                "bring the directory back and run again to continue",
                exits.UNSAVED,
            )
        elif "token" not in found:  # no run has written that: the next renewal mends it
            self._log(f"warning: {self._workdir}/{FILE} is damaged: written anew")
        elif found["token"] != self._record["token"]:
            self._lost = Lost(
                f"{self._workdir} was taken over by {owner_text(found)}, because this run did not "
                f"renew its lease for {self._record['ttl']:.0f} s or more (was it suspended?): "
                "nothing more is written; let that run go on, or end it and run again"
            )
        self._stamp = stamp
        return found

    def _require_directory(self) -> None:
        if is_local(self._workdir) and not os.path.isdir(self._workdir):
            self._lost = self._lost or Lost(
                f"the work directory {self._workdir} has vanished: bring it back (is its disk "
                "mounted?) and run again, or name another --workdir",
                exits.UNSAVED,
            )


def take(
    workdir: str, *, log: Log, on_lost: Callable[[Lost], None] = stop, ttl: float = TTL_SECONDS
) -> Lease:
    """Takes the work directory, which is made if it does not exist; use it as a context manager.

    An owner that has died is replaced: at once if it ran on this machine, else after `ttl` seconds
    without a renewal. `on_lost` is called as soon as the directory is found to be another's, in the
    thread that found it. Raises ValueError if a living run has the directory, or if it cannot be
    written. Only process 0 of a run calls it; commands that only read do not.
    """
    keeping = {"log": log, "on_lost": on_lost}
    try:
        if is_local(workdir):
            os.makedirs(workdir, exist_ok=True)
        store = open_store(workdir)
        record = own_record(ttl, workdir)
        unchanged = 0
        for _ in range(ATTEMPTS):
            found, stamp = read(store)
            if found is not None:
                stamp = _outlast(workdir, store, found, stamp, ttl, log)
            written = write(store, record, stamp)
            if written is not None:
                return Lease(workdir, store, record, written, **keeping)
            # Another start was faster; or our own write took effect and its answer was lost.
            found, now_there = read(store)
            if _is_same(found, record):
                return Lease(workdir, store, record, now_there, **keeping)
            # A store may answer so, too, that takes no write at all. One that stays missing may
            # have been another's in between, which is unlikely to happen twice.
            unchanged += now_there == stamp
            if unchanged == 2:
                break
        raise Unavailable(_refused(workdir))
    except (Unavailable, OSError) as error:
        remedy = "free space on its disk" if is_local(workdir) else "check the name of the bucket"
        remedy = f"make it writable, {remedy}, or name another --workdir"
        if _PASSING.search(f"{error} {error.__cause__!r}"):
            remedy = "run again"
        raise ValueError(
            f"the work directory {workdir} cannot be written ({error}): {remedy}"
        ) from error


def _is_same(found: dict | None, record: dict) -> bool:
    """Whether what was found is what this process has just written."""
    keys = ("token", "heartbeat")
    return found is not None and all(found.get(key) == record[key] for key in keys)


def _refused(workdir: str) -> str:
    """Why a conditional write that no other write has undone did not take effect."""
    if is_local(workdir):
        return f"{FILE} is not written, and nobody else has changed it"
    bucket = workdir.partition("://")[2].partition("/")[0]
    return f"the store does not take {FILE}: does the bucket {bucket!r} exist?"


def _outlast(workdir: str, store: Any, found: dict, stamp: bytes, ttl: float, log: Log) -> bytes:
    """The stamp of a lease whose owner has ended. Raises ValueError if the owner is alive."""
    if is_here(found):
        if is_alive(found):
            raise _refusal(workdir, found)
        log(f"{workdir}: taken over from {owner_text(found)}, which has ended")
        return stamp
    with contextlib.suppress(TypeError, ValueError):
        ttl = max(ttl, min(float(found.get("ttl", 0)), LONGEST_TTL))
    log(f"{workdir} belongs to {owner_text(found)}: watching for a sign of life for {ttl:.0f} s")
    begun = now()
    while now() - begun < ttl:
        time.sleep(min(1.0, ttl / 10))
        later, changed = read(store)
        if later is None:
            return changed
        if changed != stamp:
            raise _refusal(workdir, later)
    log(f"{workdir}: taken over; its owner gave no sign of life for {now() - begun:.0f} s")
    return stamp


def _copied_from(workdir: str, found: dict) -> str:
    """The directory whose lease `found` is, where that is another one and this file a copy; else
    "", also for records that do not say where they belong."""
    place = found.get("workdir")
    if not isinstance(place, str) or place in ("", real_place(workdir)):
        return ""
    with contextlib.suppress(Unavailable, OSError):
        if is_local(place) and is_local(workdir) and os.path.samefile(place, workdir):
            return ""  # mounted twice
        there, _ = read(open_store(place))
        return place if there is not None and there.get("token") == found.get("token") else ""
    return ""


def _refusal(workdir: str, owner: dict) -> ValueError:
    if place := _copied_from(workdir, owner):
        return ValueError(
            f"{workdir} was copied from {place}, where {owner_text(owner)} runs: delete {FILE} in "
            f"{workdir}, and run again"
        )
    pid = owner.get("pid", "?")
    stop = f"`kill {pid}`" + ("" if is_here(owner) else f" on {owner.get('host', '?')}")
    return ValueError(
        f"{workdir} is in use by {owner_text(owner)}: wait until that run ends, stop it with "
        f"{stop}, or name another --workdir"
    )


def owner_text(owner: dict) -> str:
    """The owner in words: process, host, job, since when, last heartbeat."""
    if "token" not in owner:
        return f"an unknown run (its {FILE} is damaged)"
    job = f" (job {owner['job']})" if owner.get("job") else ""
    return (
        f"process {owner.get('pid', '?')} on {owner.get('host', '?')}{job}, started "
        f"{owner.get('started', '?')}, last heartbeat {owner.get('heartbeat_time', '?')}"
    )


# ------------------------------------------------------------------------------ who and where


def own_record(ttl: float, workdir: str = "") -> dict:
    """What the file says of this process, and of where it lies."""
    boot, namespace = machine()
    return {
        "token": uuid.uuid4().hex,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "boot": boot,
        "pid_namespace": namespace,
        "process_start": process_start(os.getpid()),
        "started": clock_text(),
        "heartbeat": 0,
        "heartbeat_time": clock_text(),
        "ttl": ttl,
        "job": job_name(),
        "workdir": real_place(workdir),
    }


def real_place(workdir: str) -> str:
    """The one name of a directory that may be named by links."""
    return os.path.realpath(workdir) if is_local(workdir) else workdir.rstrip("/")


def job_name() -> str:
    """The scheduler's name of this job, or ""."""
    names = ("SLURM_JOB_ID", "JOBSET_NAME", "RAY_JOB_ID", "PBS_JOBID", "LSB_JOBID")
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def machine() -> tuple[str, str]:
    """Boot id and process namespace: where both are the same, process ids mean the same. Empty
    where the system has none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot, os.readlink("/proc/self/ns/pid")
    except OSError:
        return "", ""


def is_here(owner: dict) -> bool:
    """Whether the owner's process id can be looked up here."""
    boot, namespace = machine()
    return bool(boot) and (owner.get("boot"), owner.get("pid_namespace")) == (boot, namespace)


def is_alive(owner: dict) -> bool:
    """Whether the owner's process, which `is_here`, still runs."""
    pid = owner.get("pid")
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # another user's
    started = process_start(pid)
    return started is None or started == owner.get("process_start")


def process_start(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; -1 for one that has ended and was not
    waited for, None if the system does not say. Process ids come again, with another start."""
    try:
        # The name, in parentheses, may contain spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return -1 if fields[0] in "ZX" else int(fields[19])


def now() -> float:
    """Seconds on a clock that nobody sets, and that goes on while the machine sleeps."""
    if sys.platform == "linux":
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


def clock_text() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())


# ------------------------------------------------------------------------------ the file


def is_empty(folder: Path) -> bool:
    """Whether nothing but `FILES` is in the folder."""
    return {path.name for path in folder.iterdir()} <= {*FILES}


def is_local(workdir: str) -> bool:
    return "://" not in workdir


def open_store(workdir: str) -> Any:
    """TensorStore's key-value store of a directory. Raises Unavailable."""
    import tensorstore

    # TensorStore refuses "..", and of a link only the file system knows where that leads.
    folder = {"driver": "file", "path": f"{os.path.realpath(workdir)}/"}
    spec = folder if is_local(workdir) else kvstore_spec(workdir.rstrip("/") + "/")
    return _wait(lambda: tensorstore.KvStore.open(spec))


def kvstore_spec(url: str) -> Any:
    """What TensorStore opens; its driver of s3 does not look at the variables of a server's address
    that other programs of AWS take."""
    address = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if not (url.startswith("s3://") and address):
        return url
    bucket, _, path = url.removeprefix("s3://").partition("/")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    spec = {"driver": "s3", "bucket": bucket, "path": path, "endpoint": address}
    return {**spec, "aws_region": region}


def read(store: Any) -> tuple[dict | None, bytes]:
    """The record, None if there is none and {} if it is damaged; and the stamp for `write`."""
    found = _wait(lambda: store.read(FILE))
    if found.state == "missing":
        return None, found.stamp.generation
    try:
        # The file driver does not truncate what a killed write left: there may be more behind it.
        record, _ = json.JSONDecoder().raw_decode(found.value.decode())
    except ValueError:
        record = {}
    return record if isinstance(record, dict) else {}, found.stamp.generation


def write(store: Any, record: dict | None, stamp: bytes) -> bytes | None:
    """Replaces what has this stamp, None deletes it. Returns the new stamp; None, and nothing was
    changed, if something else is there by now."""
    text = None if record is None else json.dumps(record, indent=1) + "\n"
    return _wait(lambda: store.write(FILE, text, if_equal=stamp)).generation or None


def _wait(operation: Callable[[], Any]) -> Any:
    try:
        return operation().result(timeout=IO_SECONDS)
    # TensorStore turns what its drivers report into errors of many kinds.
    except Exception as error:
        text = " ".join(str(error).replace("\0", "/").split()) or type(error).__name__
        raise Unavailable(text[:300]) from error
