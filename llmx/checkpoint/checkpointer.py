"""Checkpoints: written in the background, committed by one rename, verified, restored on any mesh.

A checkpoint is a directory `<step>/` with two items: `state/` (Orbax: every array of the training
state under its path name; each process writes and reads its own shards) and `meta/` (one JSON
document, see `manifest`). Orbax (https://orbax.readthedocs.io) does not detect a flipped byte, so
every restore compares checksums (`checksums`). Arrays are written in the layer permutation of the
run (`pipeline.permutation`), and a restore moves the layers to the one that is wanted (`reshard`).
"""

import contextlib
import dataclasses
import functools
import importlib
import json
import pathlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax

from llmx.checkpoint import directory as directories
from llmx.checkpoint import manifest, places, restore, writer
from llmx.checkpoint.manifest import Corrupt, Document, Mismatch, Unreadable
from llmx.checkpoint.restore import Reader, Restored
from llmx.pipeline.permutation import IDENTITY, LayerPermutation
from llmx.runtime import bounds, exits
from llmx.runtime.bounds import MACHINE, bounded, choice, plain

WAIT_SECONDS = 60.0  # that a step waits for the save before its own


@dataclasses.dataclass
class CheckpointConfig:
    """When checkpoints are written, and which of them are kept."""

    # steps between checkpoints; 0 = only at the end of the run
    every: int = bounded(500, at_least=0, remedy="0 for the end only")
    # newest checkpoints kept; with 1 there is nothing to fall back to
    keep_last: int = bounded(3, at_least=1)
    # also keep for ever each checkpoint whose step is a multiple of this; 0 = off
    keep_every: int = bounded(0, at_least=0, remedy="0 for off")
    # a checkpoint that cannot be written (full disk): "continue" and try again, or "stop" the run
    on_failure: str = choice("continue", ("continue", "stop"))
    # replicas that differ at a save: "stop" the run, or "restore" the newest checkpoint and go on
    on_corruption: str = choice("stop", ("stop", "restore"))
    # a local disk, or /dev/shm for memory: each process also writes its shards here, and holds a
    # copy of another host's; "" = off
    local_directory: str = plain("", of=MACHINE)
    # steps between these local checkpoints
    local_every: int = bounded(
        10, at_least=1, of=MACHINE, needs={"checkpoint.local_directory": {"not": ("",)}}
    )
    # seconds from SIGTERM until the process ends, saved or not; Kubernetes allows 30 by default
    grace_seconds: float = bounded(25.0, above=0, at_most=1e8, of=MACHINE)


def problems(config: CheckpointConfig) -> list[str]:
    """All problems of `config`, as texts."""
    found = bounds.problems(config, "checkpoint.")
    if config.every > 0 and config.keep_every > 0 and config.keep_every % config.every:
        multiple = -(-config.keep_every // config.every) * config.every
        found.append(
            f"checkpoint.keep_every={config.keep_every} is not a multiple of "
            f"checkpoint.every={config.every}: few checkpoints would fall on it; use {multiple}"
        )
    if "://" in config.local_directory:
        found.append(
            f"checkpoint.local_directory={config.local_directory!r} is not local: name a folder on "
            "a disk of each host, or in /dev/shm"
        )
    if config.local_directory and 0 < config.every <= config.local_every:
        found.append(
            f"checkpoint.local_every={config.local_every} is not below checkpoint.every="
            f"{config.every}, so that no local checkpoint would be the newest: lower it"
        )
    return found


def prefetch() -> threading.Thread:
    """Starts to import Orbax in a thread: it takes half a second, and the first save waits less."""
    orbax = ("orbax.checkpoint",)
    thread = threading.Thread(target=importlib.import_module, args=orbax, daemon=True)
    thread.start()
    return thread


class Halt(Exception):
    """The run cannot go on as it is. Raised in all processes at the same step.

    `code`: the exit code.
    """

    code = exits.UNSAVED
    restore = False  # whether to go back to the newest checkpoint, and not to end


class Unsaved(Halt):
    """A checkpoint could not be written: the final one, or any under on_failure="stop"."""


class NotOwner(Halt):
    """Another process owns the work directory: nothing more is written."""

    code = exits.REFUSED


class ReplicasDiffer(Halt):
    """Replicas hold different values."""

    code = exits.STOPPED

    def __init__(self, text: str, *, restore: bool, newest: int | None) -> None:
        super().__init__(text)
        self.restore, self.newest = restore, newest  # the checkpoint to go back to


class Checkpointer(contextlib.AbstractContextManager):
    """Writes the checkpoints of one run, and restores the newest good one.

    Every process makes the same calls. A context manager: its end waits for the save in progress.
    `may_write` is called on process 0 before anything is written, renamed or deleted, and before a
    checkpoint is committed; it raises where this process does not own the directory any more.
    """

    def __init__(
        self, directory: str, config: CheckpointConfig, *, log: Callable[[str], None],
        may_write: Callable[[], None] = lambda: None,
        on_saved: Callable[[int], None] = lambda step: None, place: places.Place = places.SHARED,
        in_use: Callable[[int], bool] = lambda step: False,
        again: restore.Again = lambda step: None,
    ) -> None:  # fmt: skip
        """on_saved: called on process 0, in a thread, with the step of each complete checkpoint.
        in_use: whether a checkpoint is being copied, and is deleted later only.
        again: whence a checkpoint that is corrupt may be had."""
        if found := problems(config):
            raise ValueError("\n".join(found))
        self._root = directories.root_of(directory)
        self._config = config
        self._log = log
        self._may_write, self._on_saved, self._place = may_write, on_saved, place
        self._in_use, self._again = in_use, again
        self._board: writer.Board | None = None
        self._current: int | None = None  # the last step that this run saved or restored
        self._save: writer.Save | None = None
        self._num_saves = 0
        self._raises = False  # whether a failure of the present save is raised in any case
        self._retry: int | None = None  # the step at which a failed save is tried again
        self._deleting: list[threading.Thread] = []
        self._kept_before = -1
        self._went_back_to: int | None = -1
        # Processes notice a failed save at different moments, and act on it after the same `poll`.
        self._lock = threading.Lock()
        self._polls, self._noticed, self._act_at = 0, None, None
        prefetch()

    def __exit__(self, kind: type | None, error: BaseException | None, *_: object) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Halt as halt:  # the first error counts
            self._log(str(halt))

    def due(self, step: int) -> bool:
        """Whether the config asks for a checkpoint after `step` steps, or a failed one for another
        attempt."""
        every = self._config.every
        return every > 0 and (step % every == 0 or step == self._retry)

    def save(
        self, step: int, state: Any, *, meta: Mapping[str, Any],
        order: LayerPermutation = IDENTITY, wait: bool = False,
        beside: Callable[[Any], None] = lambda folder: None,
    ) -> bool:  # fmt: skip
        """Saves the checkpoint after `step` steps in the background.

        `state` is a pytree of jax.Arrays and Python numbers, its layers in the permutation `order`;
        `meta` holds JSON values. Returns when the arrays may be donated, with `wait` when the
        checkpoint is committed; False if this run has saved or restored the same step already, or
        where the save before it is not done after `WAIT_SECONDS`: then this one is tried again some
        steps later. `beside` writes what else the checkpoint has into its folder, before this
        returns. No collective runs. Raises ValueError for a leaf or meta that cannot be saved, and
        Halt for a save that ended badly: an earlier one, or with `wait` this one, whatever the
        policy.
        """
        if self._current == step:
            if wait:
                self._end_save(step, final=True)
            return False
        arrays, document = manifest.describe(step, state, meta, order)
        if not wait and self._is_late(step):
            self._retry = step + max(1, self._config.every // 4)
            return False
        self._end_save(step)
        # What runs on the devices now would be waited for by the copies to the host.
        jax.block_until_ready(arrays)
        if self._board is None:
            self._board = writer.Board()
        self._num_saves += 1
        self._raises = wait
        self._board.forget(f"{self._num_saves - 2}")
        self._current, self._retry = step, None
        self._save = writer.Save(
            step, arrays, document, root=self._root, board=self._board, number=self._num_saves,
            prepare=functools.partial(self._prepare, step, beside), may_commit=self._permitted,
            on_end=self._on_end, place=self._place,
        )  # fmt: skip
        if wait:
            self._end_save(step, final=True)
        return True

    def poll(self, step: int) -> None:
        """To be called after each step: acts on a save that has ended badly in the background.

        Costs nothing where none has. Raises Halt by policy, in all processes after the same step.
        """
        with self._lock:
            self._polls += 1
            noticed = self._noticed
        if noticed is None:
            return
        if self._act_at is None:
            self._act_at = self._agreed_poll()
        if self._polls >= self._act_at:
            self._end_save(step)

    def restore(
        self, abstract_state: Any | Callable[[Document], Any], step: int | None = None, *,
        order: LayerPermutation = IDENTITY, ignored: tuple[str, ...] = (),
    ) -> Restored | None:  # fmt: skip
        """Restores the newest good checkpoint, or exactly `step`; None if there is no checkpoint.

        Once an older checkpoint is restored, one that fails its checksums becomes `<step>.corrupt`.

        Args:
          abstract_state: `ShapeDtypeStruct`s with the shardings wanted and Python numbers; or a
            function that returns them for a checkpoint's document, and may raise `Mismatch`.
          order: the permutation of the layers wanted.
          ignored: paths; leaves saved under them are not restored unless `abstract_state` has them.

        Raises ValueError for a checkpoint of another structure, and if there are checkpoints and
        none is good.
        """
        self.wait()
        result = restore.newest(
            self._root, abstract_state, "", order, step, log=self._log, ignored=ignored,
            reader=self.reader, again=self._again,
        )  # fmt: skip
        if result is None:
            return None
        restored, bad = result
        for bad_step, reason in bad.items():
            self._set_aside(bad_step, "corrupt", reason)
        self._current = restored.step
        return restored

    @property
    def reader(self) -> Reader:
        """Of the arrays of its checkpoints."""
        return self._place.reader

    def steps(self) -> list[int]:
        """The steps with a committed checkpoint, good or not, oldest first."""
        return list_steps(str(self._root))

    def latest_step(self) -> int | None:
        """The newest of them."""
        return max(self.steps(), default=None)

    def keep_before(self, step: int) -> None:
        """From now on the newest checkpoint that is not after `step` is not deleted either."""
        self._kept_before = step

    def set_aside_after(self, step: int, reason: str) -> None:
        """Renames the checkpoints after `step` to `<step>.replaced`: the run goes on without them.
        Every process must call it."""
        self.wait()
        while newer := restore.agree_on_steps([other for other in self.steps() if other > step]):
            for other in newer:
                self._set_aside(other, "replaced", reason)

    def document(self, step: int) -> Document:
        """The document of checkpoint `step`; raises `manifest.Corrupt`."""
        return self.reader.document(self._root, step)

    def wait(self) -> None:
        """Waits until the save in progress has ended. Raises Halt, by policy, if it ended badly."""
        self._end_save(self._save.step if self._save else 0)

    def close(self) -> None:
        """Waits for saves and deletions in progress. Raises Halt if the last save ended badly."""
        try:
            self._end_save(0, final=True)
        finally:
            for thread in self._deleting:
                thread.join()

    # ------------------------------------------------------------------------- how a save ends

    def _end_save(self, step: int, *, final: bool = False) -> None:
        """Waits for the save in progress, and raises or plans another attempt if it ended badly."""
        save, self._save = self._save, None
        if save is None:
            return
        self._raises |= final
        verdict = save.join()
        with self._lock:
            self._noticed = self._act_at = None
        if verdict.kind == writer.SAVED:
            return
        self._current = None
        text = f"the checkpoint of step {save.step} was not written: {verdict.text}"
        if verdict.kind == writer.REFUSED:
            raise NotOwner(text)
        if verdict.kind == writer.DIFFERS:
            # Listings of a shared directory may differ: that of process 0 counts.
            found = self._board.share(f"{save.number}/newest", json.dumps(self.latest_step()))
            newest = json.loads(found)
            back = self._config.on_corruption == "restore" and not final
            # Once from each checkpoint: what is faulty may stay so.
            back, self._went_back_to = back and newest != self._went_back_to, newest
            text = f"{text}; {self._after_corruption(back)}"
            raise ReplicasDiffer(text, restore=back, newest=newest)
        if final or self._config.on_failure == "stop":
            raise Unsaved(
                f"{text}; {self._newest_text()}; {verdict.remedy} and run again to resume"
            )
        self._retry = step + max(1, self._config.every // 4)

    def _is_late(self, step: int) -> bool:
        """Whether the save in progress is not waited for any more; alike in all processes."""
        save, late = self._save, False
        if save is None:
            return False
        if self._board.rank == 0 and (late := not save.ends_within(WAIT_SECONDS)):
            self._log(
                f"the checkpoint of step {save.step} is still being written, since {save.since}: "
                f"training goes on, and that of step {step} is tried again later"
            )
        return json.loads(self._board.share(f"{save.number}/late/{step}", json.dumps(late)))

    def _on_end(self, save: writer.Save) -> None:
        """In the thread of the save."""
        if save.verdict.kind == writer.SAVED:
            if self._board.rank == 0:
                try:
                    self._prune()
                except (OSError, ValueError, writer.Refused) as error:
                    self._log(f"old checkpoints could not be deleted: {error}")
                self._on_saved(save.step)
            return
        text, remedy = save.verdict.text, save.verdict.remedy
        goes_on = self._config.on_failure == "continue" and not self._raises
        if self._board.rank == 0 and save.verdict.kind == writer.FAILED and goes_on:
            self._log(
                f"the checkpoint of step {save.step} was not written: {text}; "
                f"{self._newest_text()}; training goes on, and it is tried again soon: {remedy}"
            )
        with self._lock:
            self._noticed, polls = save.number, self._polls
        if self._board.count > 1:
            self._board.put(f"{save.number}/noticed/{self._board.rank}", str(polls))

    def _agreed_poll(self) -> int:
        """The `poll` at which all processes act: none has reached it, and all know by then."""
        if self._board.count == 1:
            return self._polls
        keys = [f"{self._noticed}/noticed/{rank}" for rank in range(self._board.count)]
        return 1 + max(int(self._board.get(key, seconds=60.0)) for key in keys)

    def _newest_text(self) -> str:
        if self._board.rank and self._place is not places.SHARED:  # its folder does not tell
            return "process 0 says which checkpoint is the newest"
        try:
            newest = self.latest_step()
        except ValueError as error:
            return str(error)
        return f"the newest checkpoint is step {newest}" if newest is not None else "there is none"

    def _after_corruption(self, back: bool) -> str:
        if back:
            return f"going back to the newest checkpoint; {self._newest_text()}"
        return (
            f"{self._newest_text()}; a device or host may be faulty (run its diagnostics), or the "
            "processes were started with other configs or data; run again to resume, or set "
            'checkpoint.on_corruption="restore" to go back without stopping'
        )

    # --------------------------------------------------------- the directory; on process 0 only

    def _permitted(self) -> None:
        try:
            self._may_write()
        except Exception as error:
            raise writer.Refused(str(error)) from error

    def _prepare(self, step: int, beside: Callable[[Any], None]) -> None:
        """Makes room for checkpoint `step`, and writes what it has beside arrays."""
        self._permitted()
        if self._num_saves > 1 and not self._root.exists():
            self._log(f"{self._root} has vanished, and the checkpoints in it: making it anew")
        self._root.mkdir(parents=True, exist_ok=True)
        for entry in directories.entries(self._root):
            if entry.kind in ("unfinished", "deleted"):
                if entry.kind == "unfinished":
                    self._log(f"removing the unfinished checkpoint of step {entry.step}")
                    directories.remove(self._root / entry.name)
                elif not self._deleting:
                    directories.remove(self._root / entry.name)
        if directories.occupied(self._root, step):
            self._rename(step, "replaced", "this run comes from another checkpoint")
        self._place.prepare(step)
        path = directories.unfinished_path(self._root, step) / directories.STATE
        path.mkdir(parents=True, exist_ok=True)
        beside(directories.unfinished_path(self._root, step))

    def _prune(self) -> None:
        """Deletes old checkpoints. `keep_last` that can be restored stay, as far as a look at their
        documents tells; so do all that are newer."""
        steps, every = self.steps(), self._config.keep_every
        trusted = max((step for step in steps if step <= self._kept_before), default=None)
        kept = 0
        for step in reversed(steps):
            if kept == self._config.keep_last:
                if step != trusted and (not every or step % every) and not self._in_use(step):
                    self._permitted()
                    thread = directories.start_removing(self._root, str(step))
                    self._deleting = [t for t in self._deleting if t.is_alive()] + [thread]
            elif is_intact(self._root, step):
                kept += 1

    def _rename(self, step: int, label: str, reason: str) -> None:
        target = directories.set_aside(self._root, step, label)
        self._log(f"set aside checkpoint {step} as {target.name}: {reason}")

    def _set_aside(self, step: int, label: str, reason: str) -> None:
        """Renames a checkpoint so that it is neither restored nor overwritten; on all processes."""
        if jax.process_index() == 0:
            self._permitted()
            self._rename(step, label, reason)
        if jax.process_count() > 1:
            from jax.experimental import multihost_utils

            multihost_utils.sync_global_devices(f"set aside {step}")


def list_steps(directory: str) -> list[int]:
    """The steps with a committed checkpoint in `directory`, oldest first."""
    return directories.steps(directories.root_of(directory))


def read_meta(directory: str, step: int) -> dict:
    """The `meta` of checkpoint `step`; ValueError if there is none or its meta is unreadable."""
    restore.require(directories.root_of(directory), step)
    try:
        return restore.read_document(directories.root_of(directory), step).meta
    except (Corrupt, Mismatch, Unreadable) as error:
        raise ValueError(f"checkpoint {step} in {directory}: {error}") from error


def is_import(directory: str, step: int | None) -> bool:
    """Whether checkpoint `step` holds parameters only, made by llmx.convert.

    Process 0 looks, since listings of a shared directory may differ; every process must call it.
    Raises ValueError as `read_meta`.
    """
    looks = step == 0 and jax.process_index() == 0
    found = looks and "imported_from" in read_meta(directory, 0)
    return bool(restore.agree_on_steps([0] if found else []))


def restore_part(
    directory: str, abstract: Any, *, prefix: restore.Prefix, order: LayerPermutation = IDENTITY,
    step: int | None = None, log: Callable[[str], None], reader: restore.Reader | None = None,
) -> Restored | None:  # fmt: skip
    """Restores only the subtree under `prefix` ("params", "opt/0/mu"), and changes no file.

    As `Checkpointer.restore`, but corrupt checkpoints are not renamed.
    """
    root = directories.root_of(directory)
    result = restore.newest(root, abstract, prefix, order, step, log=log, reader=reader)
    return None if result is None else result[0]


def restore_saved(
    workdir: str, abstract: Any, *, prefix: restore.Prefix, order: LayerPermutation = IDENTITY,
    step: int | None = None, log: Callable[[str], None], reader: restore.Reader | None = None,
) -> Restored:  # fmt: skip
    """`restore_part` of a run, in the dtypes that it was saved in. ValueError if it has no
    checkpoint yet."""
    if not pathlib.Path(workdir).is_dir():
        raise ValueError(f"{workdir} does not exist: name the work directory of a run")

    def as_saved(document):
        like = abstract(document) if callable(abstract) else abstract
        return document.in_saved_dtypes(like, prefix=restore.prefix_of(prefix, document))

    restored = restore_part(
        f"{workdir}/checkpoints", as_saved, prefix=prefix, order=order, step=step, log=log,
        reader=reader,
    )  # fmt: skip
    if restored is None:
        raise ValueError(f"{workdir} has no checkpoint yet: wait for its first one, or let it end")
    return restored


def is_intact(root: Any, step: int) -> bool:
    """Whether checkpoint `step` looks as if it can be restored; reads no arrays."""
    try:
        restore.read_document(root, step)
    except (Corrupt, Mismatch, Unreadable):
        return False
    return (root / str(step) / directories.STATE).is_dir()
