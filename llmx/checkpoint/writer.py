"""One save: started in the foreground, written and committed in the background.

Every process copies its shards to the host and writes them (Orbax), and reports to process 0 over
the key-value store of `jax.distributed`: the error that stopped it, or the checksums of its devices
(`checksums.combine`). Process 0 commits and gives the verdict, which all processes wait for. A
failure anywhere is the verdict at once: no process waits in a barrier for one that has failed.
No collective runs, on devices or in the background.
"""

import asyncio
import contextlib
import itertools
import json
import pathlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from llmx.checkpoint import checksums, directory, quiet
from llmx.checkpoint.manifest import IN_PARTS, PART_BYTES, Document
from llmx.data import build
from llmx.runtime import host_memory, launch, output_paths
from llmx.runtime.agreement import Store
from llmx.runtime.causes import reason
from llmx.sharding import trees

SAVED, FAILED, DIFFERS, REFUSED = "saved", "failed", "differs", "refused"


class Verdict(NamedTuple):
    """How a save ended, the same in all processes; `text` gives the reason if it is not SAVED."""

    kind: str
    text: str = ""
    remedy: str = ""


class Unwritten(OSError):
    """An import or an export could not be written; the text says why, and what to do."""


@contextlib.contextmanager
def filling(
    folder: pathlib.Path, *, last: str, besides: Collection[str] = (),
    remedy: str = "export into a new directory",
) -> Iterator[None]:  # fmt: skip
    """Makes a directory for files that the block writes, the one named `last` after all others.

    Raises ValueError as `output_paths.require_new`, or while another process fills it. Whatever the
    block raises, no files are left but those of `besides`; an OSError becomes `Unwritten`. What a
    killed one leaves is marked, and the next one replaces it.
    """

    def refuse() -> None:
        raise ValueError(f"another process is writing {folder}: wait for it to end")

    try:
        if not folder.exists():
            folder.mkdir(parents=True, exist_ok=True)
        with build.exclusive(folder, on_wait=refuse):
            output_paths.require_new(folder, last=last, besides=besides, remedy=remedy)
            try:
                _clear(folder, besides)
                (folder / output_paths.UNFINISHED).touch()
                yield
                (folder / output_paths.UNFINISHED).unlink(missing_ok=True)
            except BaseException:
                with contextlib.suppress(OSError):
                    _clear(folder, besides)
                raise
    except OSError as error:
        if isinstance(error, Unwritten) or _is_elsewhere(error, folder):
            raise
        cause, remedy = reason(error)
        raise Unwritten(f"{folder} cannot be written: {cause}: {remedy}") from error


def _is_elsewhere(error: OSError, folder: pathlib.Path) -> bool:
    """Whether an error names a file outside a folder, as what is read for it."""
    named = error.filename
    return (
        isinstance(named, str) and folder.absolute() not in pathlib.Path(named).absolute().parents
    )


def _clear(folder: pathlib.Path, besides: Collection[str]) -> None:
    """Removes what is in a directory, the mark last: killed in between, it may be cleared again."""
    paths = [path for path in folder.iterdir() if path.name not in besides]
    for path in sorted(paths, key=lambda path: path.name == output_paths.UNFINISHED):
        directory.remove(path)


class Refused(Exception):
    """This process may not write here any more: another one owns the work directory."""


class Board:
    """Texts between the processes of a job, for the saves of one checkpointer."""

    _instances = itertools.count()  # every process makes the same ones in the same order

    def __init__(self) -> None:
        client, self.rank, self.count = launch.store()
        self._store = None if client is None else Store(client)
        self._prefix = f"llmx/saves/{next(self._instances)}"

    def put(self, key: str, text: str) -> None:
        if self._store is not None:
            self._store.put(f"{self._prefix}/{key}", text)

    def get(self, key: str, *, seconds: float, until: Callable[[], bool] = lambda: False) -> str:
        """The text under `key`; "" once `until()`. Raises TimeoutError after `seconds`."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                return self._store.get(f"{self._prefix}/{key}", 0.2)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            if until():
                return ""
        raise TimeoutError(f"no word from another process for {seconds:.0f} s ({key})")

    def any_under(self, key: str) -> bool:
        return bool(self._store.list(f"{self._prefix}/{key}"))

    def share(self, key: str, text: str) -> str:
        """Process 0's text."""
        if self.count == 1:
            return text
        if self.rank == 0:
            self.put(key, text)
            return text
        return self.get(key, seconds=PATIENCE)

    def forget(self, key: str) -> None:
        if self._store is not None and self.rank == 0:
            self._store.delete(f"{self._prefix}/{key}/")


# Seconds to wait for a process that writes; one that died ends the others long before.
PATIENCE = 3600.0


class Save:
    """One save of `arrays` and their `document`; `verdict` is None until it is known.

    Args:
      prepare: called on process 0 before anything is written; what it raises is the verdict.
      may_commit: called on process 0 before the commit; what it raises is the verdict.
      on_end: called with this, in a thread, once the verdict is known.
      place: where it is written, `places.Place`.
    """

    def __init__(
        self, step: int, arrays: Mapping[str, jax.Array], document: Document, *, root: Any,
        board: Board, number: int, prepare: Callable[[], None], may_commit: Callable[[], None],
        on_end: Callable[["Save"], None], place: Any,
    ) -> None:  # fmt: skip
        self.step, self.number = step, number
        self.since = time.strftime("%H:%M:%S")
        self.verdict: Verdict | None = None
        self._document, self._root, self._board = document, root, board
        self._may_commit, self._on_end, self._place = may_commit, on_end, place
        self._abstract = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            for name, x in arrays.items()
        }
        self._path = directory.unfinished_path(root, step)
        self._error, self._futures, self._sums, self._handler = None, [], {}, None
        verdict = Verdict(SAVED)
        if board.rank == 0:
            verdict = _attempt(prepare)
        verdict = Verdict(*json.loads(board.share(f"{number}/prepared", json.dumps(verdict))))
        if verdict.kind == SAVED:
            try:
                if board.rank:
                    place.begin(self._path)
                self._start(arrays)
            except Exception as error:  # told to the others by the thread
                self._error = error
        self._thread = threading.Thread(target=self._run, args=(verdict,), name="llmx-save")
        self._thread.start()

    def ends_within(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def join(self) -> Verdict:
        """Waits for the verdict and until what a failed save left behind is removed."""
        self._thread.join()
        return self.verdict

    def _start(self, arrays: Mapping[str, jax.Array]) -> None:
        """Starts the checksums, and the copies to the host; returns when those are done."""
        import orbax.checkpoint as ocp

        quiet.silence_orbax()
        self._sums = checksums.start_device_sums(arrays)
        self._handler = ocp.PyTreeCheckpointHandler()
        in_chunks = {
            name: ocp.SaveArgs(
                chunk_byte_size=PART_BYTES if name.startswith(IN_PARTS) and array.ndim else None
            )
            for name, array in arrays.items()
        }
        saving = self._handler.async_save(
            self._path / directory.STATE,
            args=ocp.args.PyTreeSave(trees.nest(arrays), save_args=trees.nest(in_chunks)),
        )
        loop = asyncio.new_event_loop()
        try:
            with jax.transfer_guard("allow"):
                self._futures = loop.run_until_complete(saving) or []
        finally:
            loop.close()

    def _run(self, prepared: Verdict) -> None:
        verdict = prepared
        if prepared.kind == SAVED:
            report = self._written()
            work = self._lead if self._board.rank == 0 else self._follow
            try:
                verdict = work(report)
            # The store is gone with process 0, or a process gave no word.
            except Exception as error:
                verdict = Verdict(FAILED, *reason(error))
            if self._board.rank == 0:
                self._board.put(f"{self.number}/verdict", json.dumps(verdict))
        # The host copies are no longer needed.
        if self._handler is not None:
            with contextlib.suppress(Exception):
                self._handler.close()  # its threads
        self._futures, self._sums, self._handler = [], {}, None
        host_memory.release()
        with contextlib.suppress(OSError):
            saved = self._root / str(self.step)
            self._place.end(saved if saved.exists() and not self._board.rank else self._path)
        self.verdict = verdict
        try:
            self._on_end(self)
        finally:
            # Where this process may not write any more, the remains may be another owner's.
            if verdict.kind in (FAILED, DIFFERS) and self._board.rank == 0:
                self._clean_up()

    def _written(self) -> dict:
        """This process's report: waits until its shards are on disk."""
        try:
            if self._error is not None:
                raise self._error
            for future in self._futures:
                future.result()
            name = self._place.written(self._path, self.step, self.number)
            return {"sums": checksums.fetch(self._sums), "name": name}
        # Orbax and tensorstore raise many types.
        except Exception as error:
            return {"failed": reason(error)}

    def _follow(self, report: dict) -> Verdict:
        board, number = self._board, self.number
        if "failed" in report:
            board.put(f"{number}/failed/{board.rank}", json.dumps(report["failed"]))
        board.put(f"{number}/written/{board.rank}", json.dumps(report))
        return Verdict(*json.loads(board.get(f"{number}/verdict", seconds=PATIENCE)))

    def _lead(self, report: dict) -> Verdict:
        board, number = self._board, self.number
        verdict = self._failure_of(report)
        sums, names = report.get("sums", {}), [report.get("name", "")]
        for rank in range(1, board.count):
            if verdict is not None:
                break
            text = board.get(
                f"{number}/written/{rank}", seconds=PATIENCE,
                until=lambda: board.any_under(f"{number}/failed"),
            )  # fmt: skip
            other = json.loads(text) if text else self._first_failure()
            verdict = self._failure_of(other, rank)
            for name, by_device in other.get("sums", {}).items():
                sums[name] |= {int(device): value for device, value in by_device.items()}
            names.append(other.get("name", ""))
        return verdict or _attempt(lambda: self._commit(sums, names))

    def _first_failure(self) -> dict:
        for rank in range(1, self._board.count):
            key = f"{self.number}/failed/{rank}"
            try:
                cause, remedy = json.loads(self._board.get(key, seconds=0.25))
            except TimeoutError:
                continue
            return {"failed": (f"process {rank}: {cause}", remedy)}
        raise TimeoutError("a process that failed does not say why")

    def _failure_of(self, report: dict, rank: int = 0) -> Verdict | None:
        if "failed" not in report:
            return None
        cause, remedy = report["failed"]
        named = self._board.count > 1 and not cause.startswith("process ")
        return Verdict(FAILED, f"process {rank}: {cause}" if named else cause, remedy)

    def _commit(self, sums: checksums.DeviceSums, names: list[str]) -> None:
        totals, differences = checksums.combine(sums, self._abstract)
        if differences:
            raise _Differs(differences)
        sealed = self._document.sealed(totals)
        self._place.finish(self._path, self.step, self._handler, sealed, names)
        self._may_commit()
        self._place.publish(self.step)
        directory.commit(self._root, self.step)

    def _clean_up(self) -> None:
        """Removes what was written, when all processes have stopped writing it."""
        for rank in range(1, self._board.count):
            try:
                self._board.get(f"{self.number}/written/{rank}", seconds=30)
            except (TimeoutError, jax.errors.JaxRuntimeError):
                break
        if not directory.renames_atomically(self._root) and self.step in directory.steps(
            self._root
        ):
            return
        directory.remove(self._path)


def complete(path: Any, sealed: dict, handler: Any = None) -> None:
    """Ends the writing of arrays by an Orbax handler, if that is to merge what the processes have
    written, and writes what else a checkpoint has."""
    if handler is not None:
        handler.finalize(path / directory.STATE)
    meta = path / directory.META
    meta.mkdir(exist_ok=True)
    (meta / "metadata").write_text(json.dumps(sealed))
    items = {directory.STATE: "pytree", directory.META: "json"}
    names = {"pytree": "PyTreeCheckpointHandler", "json": "JsonCheckpointHandler"}
    place = "orbax.checkpoint._src.handlers"
    handlers = {k: f"{place}.{v}_checkpoint_handler.{names[v]}" for k, v in items.items()}
    described = {"item_handlers": handlers, "commit_timestamp_nsecs": time.time_ns()}
    (path / "_CHECKPOINT_METADATA").write_text(json.dumps(described))


class _Differs(Exception):
    """Devices that should hold the same values hold different ones."""


def _attempt(action: Callable[[], None]) -> Verdict:
    try:
        action()
    except _Differs as error:
        return Verdict(DIFFERS, str(error))
    except Refused as error:
        return Verdict(REFUSED, str(error))
    # Anything that stops a write must reach the other processes.
    except Exception as error:
        return Verdict(FAILED, *reason(error))
    return Verdict(SAVED)
