"""The fast tier: checkpoints on a local disk or in memory, with a copy on another host.

Every few steps each process writes its shards to a folder of its host, and sends what the other
process does not have to the process of a neighboring host. A step counts once all processes have
both. A run that starts again takes the newest such step, if it is newer than the checkpoints in the
work directory. A process whose host was replaced fetches its shards from the neighbor.

The tier needs the same number of processes and the same shardings as it was written with; otherwise
the checkpoints in the work directory are used.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from llmx.checkpoint import local_files as files
from llmx.checkpoint import local_places, manifest, neighbors
from llmx.checkpoint.checkpointer import CheckpointConfig, Checkpointer, Restored
from llmx.checkpoint.manifest import Corrupt, Document, Mismatch
from llmx.data import transient
from llmx.pipeline.permutation import IDENTITY, LayerPermutation
from llmx.runtime import launch, printable

OWN, COPY = "own", "copy"
NAME = re.compile(r"(\d+)-[0-9a-f]+")  # of a step: its number, and the launch that wrote it
COMMIT_SECONDS = 120  # until all processes have written a step

Log = Callable[[str], None]


class LocalTier(contextlib.AbstractContextManager):
    """Local checkpoints of one run; off where `config.local_directory` is "".

    Every process makes the same calls. `peers` is `llmx.runtime.agreement.Peers`. A failed save is
    a warning: training goes on, and the local checkpoint before it stays.
    """

    def __init__(
        self, config: CheckpointConfig, workdir: str, peers: Any, *, log: Log, named: str = ""
    ) -> None:  # fmt: skip
        """named: what names the run in all processes; by default `workdir`."""
        self._config, self._peers, self._log = config, peers, log
        self._folders: list[Path] = []
        self._listing: list[dict[str, list[str]]] = []  # of each process: step -> its files
        self._server: neighbors.Server | None = None
        self._worker: threading.Thread | None = None
        self._arrived = threading.Condition()
        self._received: set[str] = set()  # steps of which the neighbor's copy is complete
        self._names: dict[int, str] = {}  # number of the save -> name
        self._good: list[int] = []  # saves of which this process has its shards and the copy
        self._number = 0
        self._safe: int | None = None  # the newest save that all processes have
        self._failing = False
        if not self.is_on:
            return
        try:
            self._open(workdir, named or workdir)
        except OSError as error:
            raise ValueError(
                f"checkpoint.local_directory={config.local_directory!r}: {error}; make the folder "
                "and the other hosts reachable, or set it to '' for no local checkpoints"
            ) from error

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_on(self) -> bool:
        return bool(self._config.local_directory)

    def due(self, step: int) -> bool:
        """Whether the config asks for a local checkpoint after `step` steps."""
        return self.is_on and step % self._config.local_every == 0

    def save(
        self, step: int, state: Any, *, meta: Mapping[str, Any],
        order: LayerPermutation = IDENTITY, wait: bool = False,
    ) -> None:  # fmt: skip
        """Copies the state to host memory, and writes and sends it in the background.

        As `Checkpointer.save`. Returns when the arrays may be donated; waits first for the local
        save before it, and with `wait` for this one. Raises ValueError as `Checkpointer.save`.
        """
        if not self.is_on:
            return
        self.wait()
        arrays, document = manifest.describe(step, state, meta, order)
        jax.block_until_ready(arrays)
        self._snapshot.take(arrays)
        self._number += 1
        if self._number == 1:
            mib, sent = self._snapshot.size / 2**20, self._snapshot.sent_size / 2**20
            copied = (
                f", of which another process holds {sent:,.1f}" if self._peers.count > 1 else ""
            )
            self._log(f"local checkpoints: {mib:,.1f} MiB in each process{copied}")
        self._names[self._number] = f"{step}-{self._launch}{self._number:06x}"
        # The shards have checksums of their own; those of whole arrays would take device time.
        args = (self._number, step, document.sealed(dict.fromkeys(arrays, 0)))
        self._worker = threading.Thread(target=self._store, args=args, daemon=True)
        self._worker.start()
        if wait:
            self.wait()
            try:
                self._await_commit(self._number)
            except (TimeoutError, RuntimeError) as error:
                self._warn(step, error)

    def wait(self) -> None:
        """Waits until this process has written and sent the last save."""
        if self._worker is not None:
            self._worker.join()
            self._worker = None

    def newest(self) -> int | None:
        """The newest step from which all processes can be restored, as far as is known."""
        return None if self._safe is None else _step(self._names[self._safe])

    def restore(
        self, abstract_state: Any | Callable[[Document], Any], *,
        order: LayerPermutation = IDENTITY, ignored: tuple[str, ...] = (), newer_than: int = -1,
    ) -> tuple[Restored, Document] | None:  # fmt: skip
        """The newest good local checkpoint after step `newer_than`; None if there is none.

        The arguments are those of `Checkpointer.restore`, and `newer_than`, which must be the same
        in all processes. Raises ValueError for a checkpoint of another structure.
        """
        if not self.is_on:
            return None
        for name in self._candidates(newer_than):
            verdict, found = self._restore_step(name, abstract_state, order, ignored)
            if verdict == "mismatch":
                raise ValueError(f"{self._config.local_directory}: {found}")
            if verdict == "elsewhere":
                self._log(
                    f"local checkpoint {_step(name)} is not used: {found}; it needs the same "
                    "processes, mesh and layout as it was saved with"
                )
                return None
            if verdict == "":
                self._names[0], self._safe = name, 0
                self._good = [0]
                return found
        return None

    def common(self, step: int) -> int:
        """The `step` of process 0: listings of a shared directory may differ."""
        return int(self._exchange("common", step)[0]) if self.is_on else step

    def holds(self, *, newer_than: int) -> bool:
        """Whether a restore may find a step after `newer_than`."""
        return bool(self._listing) and bool(self._candidates(newer_than))

    def forget(self, *, after: int) -> None:
        """Deletes local checkpoints of later steps than `after`: the run goes back to it."""
        self._delete(lambda step: step > after)

    def superseded(self, step: int) -> None:
        """Deletes local checkpoints up to `step`, which the work directory has now."""
        self._delete(lambda local: local <= step)

    def close(self) -> None:
        """Waits for the save in progress, and listens no more."""
        self.wait()
        if self._server is not None:
            self._server.close()
            self._server = None

    # ---------------------------------------------------------------------------------- beginning

    def _open(self, workdir: str, named: str) -> None:
        index, count = self._peers.index, self._peers.count
        root = local_places.private_folder(self._config.local_directory, named)
        own = root / f"process-{index}"
        own.mkdir(exist_ok=True)
        disk = os.stat(root)
        place = {"host": local_places.boot_id(), "disk": [disk.st_dev, disk.st_ino]}
        place["address"] = "127.0.0.1"
        if count > 1:
            place["address"] = neighbors.route(launch.coordinator_host())
        if index == 0:
            place |= {"run": local_places.run_id(workdir), "launch": f"{int(time.time()):08x}"}
            place |= {"token": secrets.token_hex(32)}
        places = self._exchange("places", place)
        self._run, self._launch = places[0]["run"], places[0]["launch"] + places[0]["token"][:8]
        self._token = bytes.fromhex(places[0]["token"])
        hosts = [place["host"] for place in places]
        # The copy is held on another host, if there is one.
        others = [d for d in range(1, count) if all(hosts[k] != hosts[k - d] for k in range(count))]
        distance = others[0] if others else 1
        self._right, self._left = (index + distance) % count, (index - distance) % count
        self._folders = [own, *local_places.orphans(root, index, places)]
        self._snapshot = files.Snapshot(self._right if count > 1 else None)
        address = None
        if count > 1:
            bind = local_places.address_of(places, index)
            serve = {"take": self._take, "give": self._give}
            self._server = neighbors.Server(bind, self._token, **serve)
            address = self._server.address
        listing, told = self._list()
        told += local_places.elsewhere(root, index, self._run)
        rows = self._exchange("files", [address, listing, told])
        self._addresses = [address for address, _, _ in rows]
        self._listing = [listing for _, listing, _ in rows]
        for process, (_, _, told) in enumerate(rows):
            for text in told:
                self._log(f"process {process}: local checkpoint {text}")

    def _list(self) -> tuple[dict[str, list[str]], list[str]]:
        """The files that this process can read: {step's name: ["0.own", "1.copy"]}; the damaged."""
        found: dict[str, list[str]] = {}
        damaged = []
        for folder in self._folders:
            for path in sorted(folder.iterdir()):
                name, _, rest = path.name.partition(".")
                if not NAME.fullmatch(name) or path.suffix.removeprefix(".") not in (OWN, COPY):
                    path.unlink()  # cut off while it was written
                    continue
                try:
                    with open(path, "rb") as file:
                        header = files.read_header(file)
                except (OSError, Corrupt) as error:
                    damaged.append(f"{_step(name)} is damaged: {error}")
                    continue
                if header.run != self._run:
                    path.unlink()  # of a run that was in this work directory before
                else:
                    found.setdefault(name, []).append(rest)
        return found, damaged

    # ------------------------------------------------------------------------------------- saving

    def _store(self, number: int, step: int, document: dict) -> None:
        """Writes and sends the snapshot; in the background."""
        name, me, good = self._names[number], self._peers.index, False
        try:
            self._await_commit(number - 1)
            self._prune(keep=number)
            snapshot = self._snapshot
            self._require_room(snapshot)
            snapshot.seal()
            header = files.Header(
                name, step, self._run, me, self._peers.count, document,
                tuple(snapshot.shards), snapshot.num_sent,
            ).encoded()  # fmt: skip
            path = self._folders[0] / f"{name}.{me}.{OWN}"
            files.write(path, header, snapshot.bytes_of(len(snapshot.shards)))
            if self._peers.count > 1:
                self._send(name, header)
            good = True
            self._failing = False
        # Also of the key-value store; whatever it is, training does not depend on it.
        except Exception as error:
            self._warn(step, error)
        self._good = [*self._good, number] if good else self._good
        self._commit(number)

    def _require_room(self, snapshot: files.Snapshot) -> None:
        """Raises OSError before the disk, or the memory of the host, is full."""
        copy = snapshot.sent_size if self._peers.count > 1 else 0
        needed, free = snapshot.size + copy, shutil.disk_usage(self._folders[0]).free
        if needed > free:
            raise OSError(
                f"{self._config.local_directory} has {free / 2**20:,.0f} MiB free, and "
                f"{needed / 2**20:,.0f} are needed, twice"
            )

    def _send(self, name: str, header: bytes) -> None:
        message = {"name": name, "process": self._peers.index}
        data = [memoryview(header), self._snapshot.bytes_of(self._snapshot.num_sent)]
        neighbors.put(self._addresses[self._right], self._token, message, data)
        with self._arrived:
            if not self._arrived.wait_for(lambda: name in self._received, COMMIT_SECONDS):
                raise TimeoutError(f"process {self._left} has not sent its copy")
        self._compare_replicas(name, self._snapshot.shards)

    def _compare_replicas(self, name: str, shards: Sequence[files.Shard]) -> None:
        """Raises Corrupt where this process and the left one hold different values of a shard."""
        path = self._find(name, self._left, COPY)
        if path is None or self._peers.count == 1:
            return
        with open(path, "rb") as file:
            header = files.read_header(file)
        mine = {shard.place: shard.crc32 for shard in shards}
        for shard in header.shards[header.num_sent :]:
            if mine.get(shard.place, shard.crc32) != shard.crc32:
                raise Corrupt(
                    f"leaf {shard.leaf} has other values in process {self._left} than in process "
                    f"{self._peers.index}, and both should hold the same"
                )

    def _warn(self, step: int, error: Exception) -> None:
        if not self._failing:
            printable.to_stderr(
                f"warning: process {self._peers.index}: local checkpoint {step} was not written: "
                f"{type(error).__name__}: {error}; training goes on, with the one before"
            )
        self._failing = True

    def _commit(self, number: int) -> None:
        """Tells the others what this process has; process 0 tells what all have."""
        if self._peers.count == 1:
            self._safe = max(self._good, default=None)
            return
        with contextlib.suppress(RuntimeError):  # the store is gone when process 0 is
            have = {"number": number, "good": self._good}
            self._peers.publish(f"local_tier/have/{self._peers.index}", json.dumps(have))
            if self._peers.index:
                return
            deadline = time.monotonic() + COMMIT_SECONDS
            while time.monotonic() < deadline:
                rows = [json.loads(t) for t in self._peers.read("local_tier/have").values()]
                if len(rows) == self._peers.count and min(r["number"] for r in rows) >= number:
                    break
                time.sleep(0.05)
            common = set.intersection(*(set(row["good"]) for row in rows))
            all_have = len(rows) == self._peers.count and common
            self._safe = max(common) if all_have else None
            commit = {"number": number, "safe": self._safe}
            self._peers.publish("local_tier/commit/0", json.dumps(commit))

    def _await_commit(self, number: int) -> None:
        """Waits until it is known what all processes have of save `number`."""
        if self._peers.count == 1 or self._peers.index == 0 or number == 0:
            return
        deadline = time.monotonic() + COMMIT_SECONDS
        while time.monotonic() < deadline:
            for text in self._peers.read("local_tier/commit").values():
                commit = json.loads(text)
                if commit["number"] >= number:
                    self._safe = commit["safe"]
                    return
            time.sleep(0.05)
        raise TimeoutError("process 0 has not told which local checkpoint all processes have")

    def _prune(self, *, keep: int) -> None:
        """Deletes all but the newest complete save and number `keep`: memory for two at most."""
        kept = {self._names[n] for n in (keep, self._safe) if n is not None}
        for path in self._paths():
            if path.name.partition(".")[0] not in kept:
                path.unlink(missing_ok=True)
        self._good = [n for n in self._good if self._names[n] in kept]
        self._received &= kept
        self._names = {n: name for n, name in self._names.items() if name in kept}

    def _delete(self, outdated: Callable[[int], bool]) -> None:
        if not self.is_on:
            return
        self.wait()
        for path in self._paths():
            if outdated(_step(path.name)) and not self._is_ahead(path.name):
                path.unlink(missing_ok=True)
        self._good = [n for n in self._good if not outdated(_step(self._names[n]))]
        self._listing = [
            {name: rest for name, rest in row.items() if not outdated(_step(name))}
            for row in self._listing
        ]
        if self._safe is not None and outdated(_step(self._names[self._safe])):
            self._safe = None

    def _is_ahead(self, file: str) -> bool:
        """Whether it is of a save that the neighbor has begun and this process has not."""
        written_by = file.partition(".")[0].partition("-")[2]  # the launch, and the save's number
        number = written_by.removeprefix(self._launch)
        return number != written_by and int(number, 16) > self._number

    def _paths(self) -> Iterator[Path]:
        return (path for folder in self._folders for path in list(folder.iterdir()))

    # ---------------------------------------------------------------------------------- restoring

    def _candidates(self, newer_than: int) -> list[str]:
        """Steps after `newer_than` that all processes can get, newest first."""
        names = {name for row in self._listing for name in row if _step(name) > newer_than}
        newest_first = sorted(names, key=lambda name: (_step(name), name), reverse=True)
        found = []
        for name in newest_first:
            lacking = [k for k in range(self._peers.count) if not self._holders(name, k)]
            if not lacking:
                found.append(name)
            elif not found:
                few = ", ".join(map(str, lacking[:8])) + (", ..." if len(lacking) > 8 else "")
                self._log(f"local checkpoint {_step(name)} lacks the shards of process {few}")
        return found

    def _holders(self, name: str, process: int) -> list[int]:
        """The processes that have the shards of `process`, the best first."""
        files_of = [row.get(name, ()) for row in self._listing]
        have = lambda kind: [k for k, row in enumerate(files_of) if f"{process}.{kind}" in row]  # noqa: E731
        own = sorted(have(OWN), key=lambda k: k != process)
        return own + [k for k in have(COPY) if k not in own]

    def _restore_step(
        self, name: str, abstract: Any, order: LayerPermutation, ignored: tuple[str, ...]
    ) -> tuple[str, Any]:
        """("", (Restored, Document)), or what is wrong: its kind and the reason; all agree."""
        me, loaded = self._peers.index, None
        verdict, reason = "missing", "its files are not on this host"
        if me in self._holders(name, me):
            verdict, reason, loaded = self._load(name, abstract, order, ignored)
        verdicts = self._exchange("own", [verdict, reason])
        for process, (kind, why) in enumerate(verdicts):
            if kind in ("missing", "corrupt"):
                others = [k for k in self._holders(name, process) if k != process]
                if f"{process}.{COPY}" in self._listing[process].get(name, ()):
                    others = [process]  # of a process that was on its host
                then = f"it takes the copy of process {others[0]}" if others else "there is no copy"
                step = _step(name)
                self._log(f"local checkpoint {step}: process {process}: {why}; {then}")
        lacking = _lacking(verdicts)
        while lacking:
            if verdict in ("missing", "corrupt"):
                verdict, reason = self._fetch(name)
                if not verdict:
                    verdict, reason, loaded = self._load(name, abstract, order, ignored)
            verdicts = self._exchange("fetched", [verdict, reason])
            # A copy may need a file that was itself damaged until just now: then once more.
            before, lacking = lacking, _lacking(verdicts)
            if lacking == before:
                break
        for kind in ("mismatch", "elsewhere", "corrupt"):
            for process, (found, why) in enumerate(verdicts):
                if found == kind:
                    if kind == "corrupt":
                        step = _step(name)
                        self._log(f"local checkpoint {step}: process {process}: {why}: not used")
                    return kind, why
        like, arrays, document = loaded
        state = document.assemble(like, arrays, prefix="")
        self._log(f"local checkpoint {document.step} of {self._config.local_directory} is used")
        return "", (Restored(state, document.meta, document.step), document)

    def _load(
        self, name: str, abstract: Any, order: LayerPermutation, ignored: tuple[str, ...]
    ) -> tuple:
        """A verdict, its reason, and (abstract state, arrays, document) of this process's file."""
        try:
            path = self._find(name, self._peers.index, OWN)
            if path is None:
                return "missing", "its files are not on this host", None
            with open(path, "rb") as file:
                header = files.read_header(file)
            if header.num_processes != self._peers.count:
                found = f"it was saved by {header.num_processes} processes"
                return "elsewhere", found, None
            self._compare_replicas(name, header.shards)
            document = manifest.parse(header.document, str(path))
            like = abstract(document) if callable(abstract) else abstract
            wanted = document.wanted(like, prefix="", order=order, ignored=ignored)
            if document.order != order:
                return "elsewhere", "its layers are in another order", None
            on_disk = {
                document.saved_names.get(leaf, leaf): (leaf, manifest.as_stored(leaf, array))
                for leaf, array in wanted.items()
            }
            stored = {saved: array for saved, (_, array) in on_disk.items()}
            arrays = files.read_arrays(path, stored)
            arrays = {leaf: arrays[saved] for saved, (leaf, _) in on_disk.items()}
        except Mismatch as error:
            return "mismatch", str(error), None
        except files.Elsewhere as error:
            return "elsewhere", str(error), None
        # Also a lack of device memory; the checkpoints in the work directory say more of it.
        except (OSError, Corrupt, RuntimeError, MemoryError) as error:
            return "corrupt", str(error), None
        return "", "", (like, arrays, document)

    def _fetch(self, name: str) -> tuple[str, str]:
        """Gets this process's file from another process: a verdict and its reason."""
        me, reason = self._peers.index, "no other process has a copy of its shards"
        path = self._folders[0] / f"{name}.{me}.{OWN}"
        message = {"name": name, "process": me}
        # Beside its own file it may have a copy itself, of a process that was on its host.
        for holder in self._holders(name, me):
            try:
                if holder == me:
                    parts = self._give(message)
                else:
                    parts = neighbors.get(self._addresses[holder], self._token, message)
                with files.create(path) as file:
                    for part in parts:
                        file.write(part)
                return "", ""
            except OSError as error:
                reason = f"no copy from process {holder}: {error}"
        return "corrupt", reason

    def _find(self, name: str, process: int, kind: str) -> Path | None:
        return next(iter(self._all(name, process, kind)), None)

    def _all(self, name: str, process: int, kind: str) -> list[Path]:
        paths = (folder / f"{name}.{process}.{kind}" for folder in self._folders)
        return [path for path in paths if path.exists()]

    # ------------------------------------------------------------------------ for other processes

    def _take(self, message: dict, chunks: Iterator[bytes]) -> None:
        """Stores the copy that the neighbor sends."""
        name, process = _checked(message)
        with files.create(self._folders[0] / f"{name}.{process}.{COPY}") as file:
            for chunk in chunks:
                file.write(chunk)
        with self._arrived:
            self._received.add(name)
            self._arrived.notify_all()

    def _give(self, message: dict) -> Iterator[bytes]:
        """The file of a process, from the first that is good of its own files and its copies."""
        name, process = _checked(message)
        sources = [(path, None) for path in self._all(name, process, OWN)]
        for copy in self._all(name, process, COPY):
            holder = copy.parent.name.removeprefix("process-")
            sources.append((copy.with_name(f"{name}.{holder}.{OWN}"), copy))
        reason = "it has no such file"
        for own, copy in sources:
            try:
                for _ in files.shard_bytes(own, copy):
                    pass  # compared with their checksums
                return self._stream(own, copy)
            except (OSError, Corrupt) as error:
                reason = str(error)
        raise OSError(reason)

    def _stream(self, own: Path, copy: Path | None) -> Iterator[bytes]:
        try:
            with open(copy or own, "rb") as file:
                yield files.read_header(file).encoded()
            for _, data in files.shard_bytes(own, copy):
                yield data
        except Corrupt as error:
            raise OSError(str(error)) from error

    def _exchange(self, name: str, value: Any) -> list[Any]:
        texts = self._peers.exchange(f"local_tier/{name}", json.dumps(value))
        return [json.loads(text) for text in texts]


def _step(name: str) -> int:
    return int(name.partition("-")[0])


def _lacking(verdicts: Sequence[Sequence[str]]) -> int:
    """How many processes have no good file of their shards."""
    return sum(kind in ("missing", "corrupt") for kind, _ in verdicts)


def _checked(message: dict) -> tuple[str, int]:
    name, process = message["name"], message["process"]
    if not NAME.fullmatch(name) or not isinstance(process, int):
        raise OSError(f"{name!r} is no local checkpoint")
    return name, process


OFF = LocalTier(CheckpointConfig(), "", None, log=print)


# ------------------------------------------------------------------------------------- both tiers


def restore_newest(
    checkpoints: Checkpointer, tier: LocalTier, wanted: Any, step: int | None = None, *,
    order: LayerPermutation, ignored: tuple[str, ...],
) -> tuple[Restored, Document] | None:  # fmt: skip
    """The newest good checkpoint of both tiers; with `step` that one of the work directory.

    The arguments are those of `Checkpointer.restore`, and so are the errors.
    """
    options = {"order": order, "ignored": ignored}
    newest = tier.common(-1 if (last := checkpoints.latest_step()) is None else last)
    if step is None and (found := tier.restore(wanted, newer_than=newest, **options)):
        return found
    try:
        restored = checkpoints.restore(wanted, step, **options)
    except (ValueError, RuntimeError) as error:
        # None is good, perhaps: then an older local one is better than an end.
        lost = step is None and not transient.is_transient(error)  # else it is read later
        if lost and (found := tier.restore(wanted, **options)):
            return found
        raise
    if restored is None:
        return None
    good = restored.step
    if step is None and good < newest and tier.holds(newer_than=good):
        restored = None  # its memory is needed
        if found := tier.restore(wanted, newer_than=good, **options):
            return found
        restored = checkpoints.restore(wanted, **options)
    tier.superseded(restored.step)
    return restored, checkpoints.document(restored.step)
