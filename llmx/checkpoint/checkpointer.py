"""Checkpoints: written in the background, committed by one rename, verified, restored on any mesh.

A checkpoint is a directory `<step>/` with two items: `state/` (Orbax: every array of the training
state under its path name; each process writes and reads its own shards) and `meta/` (one JSON
document, see `manifest`). Orbax (https://orbax.readthedocs.io) does not detect a flipped byte, so
every restore compares checksums (`checksums`). Arrays are written in the layer permutation of the
run (`pipeline.permutation`), and a restore moves the layers to the one that is wanted (`reshard`).
"""

import contextlib
import dataclasses
import importlib
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from llmx.checkpoint import checksums, manifest, reshard
from llmx.checkpoint.manifest import Corrupt, Document, Mismatch
from llmx.pipeline.permutation import IDENTITY, LayerPermutation
from llmx.runtime import bounds
from llmx.runtime.bounds import bounded
from llmx.sharding import trees

STATE, META = "state", "meta"
UNFINISHED = ".orbax-checkpoint-tmp"
DELETED = ".deleted"


@dataclasses.dataclass
class CheckpointConfig:
    """When checkpoints are written, and which of them are kept."""

    # steps between checkpoints; 0 = only at the end of the run
    every: int = bounded(500, at_least=0, remedy="0 for the end only")
    # newest checkpoints kept; with 1 there is nothing to fall back to
    keep_last: int = bounded(3, at_least=1)
    # also keep for ever each checkpoint whose step is a multiple of this; 0 = off
    keep_every: int = bounded(0, at_least=0, remedy="0 for off")
    # a local disk, or /dev/shm for memory: each process also writes its shards here, and holds a
    # copy of another host's; "" = off
    local_directory: str = ""
    # steps between these local checkpoints
    local_every: int = bounded(10, at_least=1)
    # seconds from SIGTERM until the process ends, saved or not; Kubernetes allows 30 by default
    grace_seconds: float = bounded(25.0, above=0)


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


class Restored(NamedTuple):
    state: Any
    meta: dict
    step: int


class OutOfMemory(Exception):
    """A restore ran out of memory; the checkpoint may be good."""


# Verdicts of one process about one checkpoint; the worst of all processes counts.
Verdict = type[Exception] | None
VERDICTS = (None, Corrupt, Mismatch, OutOfMemory)


def prefetch() -> threading.Thread:
    """Starts to import Orbax in a thread: it takes half a second, and the first save waits less."""
    orbax = ("orbax.checkpoint",)
    thread = threading.Thread(target=importlib.import_module, args=orbax, daemon=True)
    thread.start()
    return thread


class Checkpointer(contextlib.AbstractContextManager):
    """Writes the checkpoints of one run, and restores the newest good one.

    Every process makes the same calls. A context manager: its end waits for the save in progress.
    """

    def __init__(self, directory: str, config: CheckpointConfig, *, log: Callable[[str], None]):
        if found := problems(config):
            raise ValueError("\n".join(found))
        self._root = _root(directory)
        self._config = config
        self._log = log
        self._orbax = None
        self._current: int | None = None  # the last step that this run saved or restored
        self._saving: int | None = None
        self._deleting: list[threading.Thread] = []
        self._kept_before = -1
        prefetch()

    def __exit__(self, *_: object) -> None:
        self.close()

    def due(self, step: int) -> bool:
        """Whether the config asks for a checkpoint after `step` steps."""
        return self._config.every > 0 and step % self._config.every == 0

    def save(
        self, step: int, state: Any, *, meta: Mapping[str, Any],
        order: LayerPermutation = IDENTITY, wait: bool = False,
    ) -> bool:  # fmt: skip
        """Saves the checkpoint after `step` steps in the background.

        `state` is a pytree of jax.Arrays and Python numbers, its layers in the permutation `order`;
        `meta` holds JSON values. Returns when the arrays may be donated, with `wait` when the
        checkpoint is committed; False if this run has saved or restored the same step already.
        Communicates over every mesh axis (the checksums). Raises ValueError for a leaf or meta that
        cannot be saved, and the error of an earlier background save.
        """
        if self._current == step:
            if wait:
                self.wait()
            return False
        arrays, document = manifest.describe(step, state, meta, order)
        self.wait()
        self._open()
        # Two programs at once can deadlock on fake CPU devices.
        jax.block_until_ready(arrays)
        exists = (self._root / str(step)).exists()
        if _agree_on_steps([step] if exists else []):
            self._set_aside(step, "replaced", "this run comes from another checkpoint")
        sealed = document.sealed(checksums.fingerprints(arrays))
        import orbax.checkpoint as ocp

        items = {STATE: ocp.args.PyTreeSave(trees.nest(arrays)), META: ocp.args.JsonSave(sealed)}
        with jax.transfer_guard("allow"):
            self._orbax.save(self._root / str(step), args=ocp.args.Composite(**items))
        self._current = self._saving = step
        if wait:
            self.wait()
        return True

    def restore(
        self, abstract_state: Any | Callable[[Document], Any], step: int | None = None, *,
        order: LayerPermutation = IDENTITY, ignored: str = "",
    ) -> Restored | None:  # fmt: skip
        """Restores the newest good checkpoint, or exactly `step`; None if there is no checkpoint.

        Once an older checkpoint is restored, one that fails its checksums becomes `<step>.corrupt`.

        Args:
          abstract_state: `ShapeDtypeStruct`s with the shardings wanted and Python numbers; or a
            function that returns them for a checkpoint's document, and may raise `Mismatch`.
          order: the permutation of the layers wanted.
          ignored: a path; leaves saved under it are not restored unless `abstract_state` has them.

        Raises ValueError for a checkpoint of another structure, RuntimeError if none is good.
        """
        self.wait()
        result = _restore_newest(
            self._root, abstract_state, "", order, step, log=self._log, ignored=ignored
        )
        if result is None:
            return None
        restored, bad = result
        for bad_step, reason in bad.items():
            self._set_aside(bad_step, "corrupt", reason)
        self._current = restored.step
        return restored

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
        while newer := _agree_on_steps([other for other in self.steps() if other > step]):
            for other in newer:
                self._set_aside(other, "replaced", reason)

    def document(self, step: int) -> Document:
        """The document of checkpoint `step`; raises `manifest.Corrupt`."""
        return _read_document(self._root, step)

    def wait(self) -> None:
        """Waits until the save in progress is committed, then deletes old checkpoints."""
        if self._orbax is None:
            return
        try:
            self._orbax.wait_until_finished()
        except Exception as error:
            lost = f"the checkpoint of step {self._saving} in {self._root}"
            error.add_note(f"{lost} was not written; the ones before it are intact")
            self._current = None
            raise
        finally:
            saved, self._saving = self._saving, None
        if saved is not None and jax.process_index() == 0:
            self._prune()

    def close(self) -> None:
        """Waits for saves and deletions in progress, and releases the writer."""
        self.wait()
        for thread in self._deleting:
            thread.join()
        if self._orbax is not None:
            self._orbax.close()
            self._orbax = None

    def _open(self) -> None:
        if self._orbax is not None:
            return
        import orbax.checkpoint as ocp

        if jax.process_index() == 0:
            self._root.mkdir(parents=True, exist_ok=True)
            left = [p for p in self._root.iterdir() if UNFINISHED in p.name or DELETED in p.name]
            unfinished = [path.name.split(".")[0] for path in left if UNFINISHED in path.name]
            if unfinished:
                self._log(f"removing the unfinished checkpoint of step {', '.join(unfinished)}")
            for path in left:
                path.rmtree()
        handlers = {STATE: ocp.PyTreeCheckpointHandler(), META: ocp.JsonCheckpointHandler()}
        self._orbax = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(**handlers))

    def _prune(self) -> None:
        every, steps = self._config.keep_every, list_steps(str(self._root))
        kept = max((step for step in steps if step <= self._kept_before), default=None)
        old = [step for step in steps[: -self._config.keep_last] if step != kept]
        for step in (step for step in old if not every or step % every):
            # Renamed first: a kill during the deletion leaves no torn checkpoint under this name.
            deleted = (self._root / str(step)).rename(self._root / f"{step}{DELETED}")
            thread = threading.Thread(target=deleted.rmtree)
            thread.start()
            self._deleting = [t for t in self._deleting if t.is_alive()] + [thread]

    def _set_aside(self, step: int, label: str, reason: str) -> None:
        """Renames a checkpoint so that it is neither restored nor overwritten; on all processes."""
        if jax.process_index() == 0:
            target, copies = self._root / f"{step}.{label}", 1
            while target.exists():
                copies += 1
                target = self._root / f"{step}.{label}-{copies}"
            (self._root / str(step)).rename(target)
            self._log(f"set aside checkpoint {step} as {target.name}: {reason}")
        if jax.process_count() > 1:
            from jax.experimental import multihost_utils

            multihost_utils.sync_global_devices(f"set aside {step}")


def list_steps(directory: str) -> list[int]:
    """The steps with a committed checkpoint in `directory`, oldest first."""
    root = _root(directory)
    if not root.exists():
        return []
    return sorted(int(path.name) for path in root.iterdir() if path.name.isdecimal())


def read_meta(directory: str, step: int) -> dict:
    """The `meta` of checkpoint `step`; ValueError if there is none or its meta is unreadable."""
    _require(directory, step)
    try:
        return _read_document(_root(directory), step).meta
    except (Corrupt, Mismatch) as error:
        raise ValueError(f"checkpoint {step} in {directory}: {error}") from error


def restore_part(
    directory: str, abstract: Any, *, prefix: str, order: LayerPermutation = IDENTITY,
    step: int | None = None, log: Callable[[str], None],
) -> Restored | None:  # fmt: skip
    """Restores only the subtree under `prefix` ("params", "opt/0/mu"), and changes no file.

    As `Checkpointer.restore`, but corrupt checkpoints are not renamed.
    """
    result = _restore_newest(_root(directory), abstract, prefix, order, step, log=log)
    return None if result is None else result[0]


def restore_params(
    workdir: str, abstract: Any, *, ema: bool = False, order: LayerPermutation = IDENTITY,
    step: int | None = None, log: Callable[[str], None],
) -> Restored:  # fmt: skip
    """A run's parameters, or with `ema` their average; ValueError if it has no checkpoint yet."""
    directory, prefix = f"{workdir}/checkpoints", "ema" if ema else "params"
    restored = restore_part(directory, abstract, prefix=prefix, order=order, step=step, log=log)
    if restored is None:
        raise ValueError(f"{workdir} has no checkpoint yet: wait for its first one, or let it end")
    return restored


def _root(directory: str):
    from etils import epath

    path = epath.Path(directory)
    return path if "://" in str(directory) else epath.Path(path.absolute())


def _read_document(root: Any, step: int) -> Document:
    return manifest.read(root / str(step) / META / "metadata")


def _require(root: Any, step: int) -> None:
    if step not in (steps := list_steps(str(root))):
        raise ValueError(f"no checkpoint of step {step} in {root}: there are {steps or 'none'}")


def _restore_newest(
    root: Any, abstract: Any, prefix: str, order: LayerPermutation, step: int | None, *,
    log: Callable[[str], None], ignored: str = "",
) -> tuple[Restored, dict[int, str]] | None:  # fmt: skip
    """The newest good checkpoint and {step: reason} of newer, corrupt ones; all processes agree."""
    steps = list_steps(str(root))
    if step is not None:
        _require(root, step)
        steps = [step]
    bad: dict[int, str] = {}
    for candidate in _agree_on_steps(steps):
        verdict, reason, tree, document = None, "", None, None
        try:
            document = _read_document(root, candidate)
            like = abstract(document) if callable(abstract) else abstract
            wanted = document.wanted(like, prefix=prefix, order=order, ignored=ignored)
            stored = reshard.stored(wanted, order=order, saved=document.order)
            tree = _read_arrays(root / str(candidate) / STATE, stored, document.saved_names)
        except VERDICTS[1:] as error:
            verdict, reason = type(error), str(error)
        verdict, reason = _agree_on_verdict(verdict, reason)
        if verdict is None:
            saved = {name: document.leaves[name]["checksum"] for name in tree}
            if not (reason := checksums.differences(tree, saved)):
                with jax.transfer_guard("allow"):
                    reshard.move(tree, wanted, order=order, saved=document.order)
                state = document.assemble(like, tree, prefix=prefix)
                return Restored(state, document.meta, document.step), bad
        if verdict is Mismatch:
            raise ValueError(f"{root}: {reason}")
        if verdict is OutOfMemory:
            remedy = "nothing was changed, use more devices or a layout that shards more"
            problem = f"no memory to restore checkpoint {candidate} in {root}: {reason}"
            raise RuntimeError(f"{problem}; {remedy}")
        log(f"checkpoint {candidate} is corrupt: {reason}")
        bad[candidate] = reason
    if not bad:
        return None
    rows = "\n".join(f"  {s}: {reason}" for s, reason in bad.items())
    remedy = "bring back a copy of one, or move them out of the directory to start anew"
    if others := [s for s in list_steps(str(root)) if s not in bad]:
        remedy = f"choose another step of {others}"
    raise RuntimeError(f"no good checkpoint in {root}; all are left as they are:\n{rows}\n{remedy}")


def _read_arrays(path: Any, wanted: Mapping, saved_names: Mapping) -> dict[str, jax.Array]:
    """This process's shards of the wanted arrays; no barrier, since a single process may fail."""
    if not wanted:
        return {}
    import orbax.checkpoint as ocp

    on_disk = {name: saved_names.get(name, name) for name in wanted}
    stored = {on_disk[name]: manifest.as_stored(name, leaf) for name, leaf in wanted.items()}
    item = trees.nest(stored)
    restore_args = ocp.checkpoint_utils.construct_restore_args(item)
    args = ocp.args.PyTreeRestore(item=item, restore_args=restore_args, partial_restore=True)
    try:
        with jax.transfer_guard("allow"):
            tree = ocp.PyTreeCheckpointHandler().restore(path, args=args)
            arrays = trees.named(tree)
            arrays = jax.block_until_ready({name: arrays[saved] for name, saved in on_disk.items()})
    # Torn files raise errors of tensorstore, JSON, Orbax or the file system.
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text:
            raise OutOfMemory(text) from error
        raise Corrupt(f"its arrays cannot be read ({text})") from error
    return arrays


def _agree_on_steps(steps: list[int]) -> list[int]:
    """Process 0's newest steps, newest first; the file system may show others an older listing."""
    newest = steps[::-1][:64]
    if jax.process_count() == 1:
        return newest
    from jax.experimental import multihost_utils

    padded = np.array(newest + [-1] * (64 - len(newest)), np.int32)
    return [int(step) for step in multihost_utils.broadcast_one_to_all(padded) if step >= 0]


def _agree_on_verdict(verdict: Verdict, reason: str) -> tuple[Verdict, str]:
    """The worst verdict of all processes and the reason of the process that gave it."""
    if jax.process_count() == 1:
        return verdict, reason
    from jax.experimental import multihost_utils

    text = bytes([VERDICTS.index(verdict)]) + reason.encode()[:1023]
    row = np.frombuffer(text.ljust(1024, b"\0"), np.uint8)
    rows = multihost_utils.process_allgather(row)
    worst = rows[rows[:, 0].argmax()]
    agreed = VERDICTS[int(worst[0])]
    if agreed is verdict:
        return verdict, reason
    return agreed, bytes(worst[1:]).rstrip(b"\0").decode(errors="replace")
