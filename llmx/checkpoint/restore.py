"""Restores the newest good checkpoint: the same one in all processes, on any mesh."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from llmx.checkpoint import checksums, directory, manifest, quiet, reshard
from llmx.checkpoint.manifest import Corrupt, Document, Mismatch, Unanswered, Unreadable
from llmx.data import transient
from llmx.pipeline.permutation import LayerPermutation
from llmx.sharding import trees


class Restored(NamedTuple):
    state: Any
    meta: dict
    step: int


class OutOfMemory(Exception):
    """A restore ran out of memory; the checkpoint may be good."""


# Verdicts of one process about one checkpoint; the worst of all processes counts.
Verdict = type[Exception] | None
VERDICTS = (None, Corrupt, Mismatch, OutOfMemory, Unreadable, Unanswered)


# What tensorstore says where a disk or a store fails.
_FAILED = re.compile(r"UNAVAILABLE|DEADLINE_EXCEEDED|Input/output error|Stale file handle|\bEIO\b")


class Reader(NamedTuple):
    """What makes arrays of a checkpoint's files, compares them with their checksums, orders their
    layers, and reads its document: see `read_arrays`, `checksums.differences`, `reshard.move` and
    `read_document`."""

    read: Callable[[Any, Mapping, Mapping], dict[str, Any]]
    differences: Callable[[Mapping, Mapping[str, int]], str]
    move: Callable[..., None]
    document: Callable[[Any, int], Document]


# What is restored of a state: the path of a subtree, or how that follows from the document.
Prefix = str | Callable[[Document], str]


def prefix_of(prefix: Prefix, document: Document) -> str:
    return prefix(document) if callable(prefix) else prefix


def read_document(root: Any, step: int) -> Document:
    return manifest.read(root / str(step) / directory.META / "metadata")


def require(root: Any, step: int) -> None:
    if step not in (steps := directory.steps(root)):
        raise ValueError(f"no checkpoint of step {step} in {root}: there are {steps or 'none'}")


# Called with the step of a checkpoint that is corrupt. Where a good one may be had from elsewhere,
# puts that into its place, and returns what undoes it; else None.
Again = Callable[[int], Callable[[], None] | None]


def newest(
    root: Any, abstract: Any, prefix: Prefix, order: LayerPermutation, step: int | None, *,
    log: Callable[[str], None], ignored: tuple[str, ...] = (), reader: Reader | None = None,
    again: Again = lambda step: None,
) -> tuple[Restored, dict[int, str]] | None:  # fmt: skip
    """The newest good checkpoint and {step: reason} of newer, corrupt ones; all processes agree."""
    reader = reader or ONTO_DEVICES
    steps: list[int] = []
    if jax.process_index() == 0:  # the others take its word
        steps = directory.steps(root)
        if step is not None:
            require(root, step)
            steps = [step]

    def restored(candidate: int) -> tuple[Verdict, str, Restored | None]:
        verdict, reason, tree, document = None, "", None, None
        try:
            document = reader.document(root, candidate)
            like = abstract(document) if callable(abstract) else abstract
            place = prefix_of(prefix, document)
            wanted = document.wanted(like, prefix=place, order=order, ignored=ignored)
            stored = reshard.stored(wanted, order=order, saved=document.order)
            tree = reader.read(
                root / str(candidate) / directory.STATE, stored, document.saved_names
            )
        except VERDICTS[1:] as error:
            verdict, reason = type(error), str(error)
        verdict, reason = _agree_on_verdict(verdict, reason)
        if verdict is not None:
            return verdict, reason, None
        saved = {name: document.leaves[name]["checksum"] for name in tree}
        if reason := reader.differences(tree, saved):
            return Corrupt, reason, None
        with jax.transfer_guard("allow"):
            reader.move(tree, wanted, order=order, saved=document.order)
        state = document.assemble(like, tree, prefix=place)
        return None, "", Restored(state, document.meta, document.step)

    bad: dict[int, str] = {}
    for candidate in agree_on_steps(steps):
        verdict, reason, found = restored(candidate)
        if verdict is Corrupt:
            log(f"checkpoint {candidate} is corrupt: {reason}")
            if (undo := again(candidate)) is not None:
                verdict, reason, found = restored(candidate)
                if verdict is not None:
                    undo()
                    log(f"it is not used: {reason}")
        if found is not None:
            return found, bad
        _refuse(root, candidate, verdict, reason)
        bad[candidate] = reason
    if not bad:
        return None
    rows = "\n".join(f"  {s}: {reason}" for s, reason in bad.items())
    remedy = "bring back a copy of one, or begin anew in another work directory"
    if others := [s for s in directory.steps(root) if s not in bad]:
        remedy = f"choose another step of {others}"
    raise ValueError(f"no good checkpoint in {root}; all are left as they are:\n{rows}\n{remedy}")


def _refuse(root: Any, step: int, verdict: Verdict, reason: str) -> None:
    """Raises ValueError for what another checkpoint would not change."""
    if verdict is Mismatch:
        raise ValueError(f"{root}: {reason}")
    if verdict is OutOfMemory:
        remedy = "nothing was changed, use more devices or a layout that shards more"
        problem = f"no memory to restore checkpoint {step} in {root}: {reason}"
        raise ValueError(f"{problem}; {remedy}")
    if verdict is Unreadable:
        remedy = "permit this user to read it, and run again; nothing was changed"
        raise ValueError(f"checkpoint {step} in {root}: {reason}; {remedy}")
    if verdict is Unanswered:
        problem = f"checkpoint {step} in {root}: {reason}; nothing was changed, run again"
        raise ValueError(problem) from transient.Transient(reason)


def read_arrays(path: Any, wanted: Mapping, saved_names: Mapping) -> dict[str, jax.Array]:
    """This process's shards of the wanted arrays; no barrier, since a single process may fail."""
    if not wanted:
        return {}
    import orbax.checkpoint as ocp

    quiet.silence_orbax()
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
        raise unread(error) from error
    for name, saved in on_disk.items():
        array, like = arrays[name], stored[saved]
        # With damaged metadata Orbax takes an array for something else, and leaves it out.
        if not isinstance(array, jax.Array) or (array.shape, array.dtype) != (
            like.shape,
            like.dtype,
        ):
            raise Corrupt(f"its arrays cannot be read (leaf {name} is not on disk as it was saved)")
    return arrays


def unread(error: Exception) -> OutOfMemory | Unreadable | Corrupt:
    """What an error of Orbax or tensorstore says of a checkpoint's arrays."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text:
        return OutOfMemory(text)
    if isinstance(error, PermissionError) or "PERMISSION_DENIED" in text:
        return Unreadable(f"its arrays cannot be read ({text})")
    if transient.is_transient(error) or _FAILED.search(text):
        return Unanswered(f"its arrays cannot be read ({text})")
    return Corrupt(f"its arrays cannot be read ({text})")


ONTO_DEVICES = Reader(read_arrays, checksums.differences, reshard.move, read_document)


def agree_on_steps(steps: list[int]) -> list[int]:
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
