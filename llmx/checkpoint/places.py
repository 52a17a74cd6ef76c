"""Where the processes of a run write a checkpoint: one folder that all see, or an object store.

On one file system every process writes its shards into the checkpoint's folder, and Orbax in
process 0 merges their indices. For a store each process writes into a folder of its own host
(Orbax's OCDBT needs renames) and uploads that as `state/ocdbt.process_<name>`. Once all have
reported so, process 0 merges the indices in the store, where TensorStore reads the nodes of the
trees alone, and uploads the document and `directory.MARKER`, that last. A checkpoint without it is
unfinished. A restore reads the shards of each process straight from the store, on any mesh.

Names hold a text of the launch and the number of the save: a process of an earlier launch that is
still uploading cannot change what this one merges.
"""

import collections
import contextlib
import json
import pathlib
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from llmx.checkpoint import checksums, directory, manifest, reshard, restore, writer
from llmx.checkpoint.manifest import Corrupt, Document, Unanswered, Unreadable
from llmx.data import remote, transient
from llmx.runtime import ownership

_METADATAS = "array_metadatas"  # Orbax's, with a file of each process
_FLIGHT_BYTES = 1 << 30  # that a process reads at a time
_CACHE_BYTES = 256 << 20  # of nodes of the trees
_DOCUMENT_BYTES = 1 << 30
_MERGE_SECONDS = 600.0  # of each request: TensorStore tries a write that is undone again for ever
# Errors of TensorStore that say something of the files; others say it of the way to them.
_OF_FILES = ("NOT_FOUND", "DATA_LOSS", "INVALID_ARGUMENT", "FAILED_PRECONDITION", "OUT_OF_RANGE")


class Place(NamedTuple):
    """What a save does beside Orbax's writing into `path`, the unfinished checkpoint's folder."""

    prepare: Callable[[int], None]  # (step) on process 0, before any process writes
    begin: Callable[[Any], None]  # (path) on the others, before they write
    # (path, step, number) on each, when its shards are written: a name for process 0
    written: Callable[[Any, int, int], str]
    # (path, step, handler, document, names) on process 0: all but what makes it complete
    finish: Callable[[Any, int, Any, dict, Sequence[str]], None]
    publish: Callable[[int], None]  # (step) on process 0: makes it complete for other hosts
    end: Callable[[Any], None]  # (path) on each, when it is known how the save has ended
    reader: restore.Reader


SHARED = Place(
    prepare=lambda step: None,
    begin=lambda path: None,
    written=lambda path, step, number: "",
    finish=lambda path, step, handler, sealed, names: writer.complete(path, sealed, handler),
    publish=lambda step: None,
    end=lambda path: None,
    reader=restore.ONTO_DEVICES,
)


def attempted(action: Callable[[], None]) -> None:
    """Does it again after an OSError, a few times."""
    for attempt in range(1, remote.ATTEMPTS + 1):
        try:
            return action()
        except OSError:
            if attempt == remote.ATTEMPTS:
                raise
            time.sleep(remote.PAUSE_SECONDS)


def in_store(
    url: str, launch: str, rank: int, *, before: Callable[[], None],
    may_write: Callable[[], None], begun: Callable[[int], None],
    published: Callable[[int], None],
) -> Place:  # fmt: skip
    """Of the checkpoints in the work directory `url`.

    Args:
      launch: letters and digits, the same in all processes and another in each launch.
      before: called on process 0 before a checkpoint is made complete.
      may_write: raises on process 0 where the store's directory is not this run's any more.
      begun: called on process 0 with the step of a checkpoint before any process writes it.
      published: called on process 0 with the step of a checkpoint that is complete there.
    """
    root = f"{url}/{directory.CHECKPOINTS}"

    def written(path: Any, step: int, number: int) -> str:
        state, to = _local(path / directory.STATE), f"{root}{step}/{directory.STATE}"
        beside, own = f"{_METADATAS}/process_{rank}", state / f"ocdbt.process_{rank}"
        if (state / beside).exists():
            attempted(lambda: remote.upload(state / beside, f"{to}/{beside}"))
        if not own.exists():  # it holds no shard that others do not write
            return ""
        name = f"{own.name}x{launch}x{number}"
        attempted(lambda: remote.upload_folder(own, f"{to}/{name}", last="manifest.ocdbt"))
        return name

    def finish(path: Any, step: int, handler: Any, sealed: dict, names: Sequence[str]) -> None:
        may_write()
        attempted(lambda: _remove_unfinished(root, step, names))
        before()
        _merge(f"{root}{step}/{directory.STATE}/", [name for name in names if name], sealed)
        writer.complete(path, sealed)
        for file in _local(path).rglob("*"):
            name = file.relative_to(_local(path)).as_posix()
            if file.is_file() and not name.startswith(f"{directory.STATE}/ocdbt.process_"):
                attempted(lambda file=file, name=name: remote.upload(file, f"{root}{step}/{name}"))

    def publish(step: int) -> None:
        may_write()
        text = f"Checkpoint commit was successful to {root}{step}".encode()
        attempted(lambda: remote.write_bytes(f"{root}{step}/{directory.MARKER}", text))
        published(step)

    return Place(
        begun, _make_anew, written, finish, publish,
        _drop_arrays if rank == 0 else directory.remove, _reader(root),
    )  # fmt: skip


def _remove_unfinished(root: str, step: int, names: Sequence[str]) -> None:
    """Removes what checkpoint `step` was before, and what saves that were cut off have left; not
    the `names` that its processes have just written."""
    state = f"{step}/{directory.STATE}"
    own = (f"{state}/{_METADATAS}/", *(f"{state}/{name}/" for name in names if name))
    with contextlib.suppress(FileNotFoundError):
        found = list(remote.find(root))
        complete = {name.split("/")[0] for name in found if name.endswith(f"/{directory.MARKER}")}
        complete.discard(str(step))
        found.sort(key=lambda name: not name.endswith(directory.MARKER))  # that one first
        for name in found:
            unfinished = "/" in name and name.split("/")[0] not in complete
            if unfinished and not name.startswith(own):
                remote.remove(f"{root}{name}")


def _make_anew(path: Any) -> None:
    directory.remove(path)
    # Orbax waits for process 0 to make this one, and on this host no process 0 does.
    (path / directory.STATE / _METADATAS).mkdir(parents=True)


def _drop_arrays(path: Any) -> None:
    """Of a checkpoint that the store has the disk keeps what lists and documents need."""
    for folder in _local(path / directory.STATE).glob("ocdbt.process_*"):
        shutil.rmtree(folder, ignore_errors=True)


def _local(path: Any) -> pathlib.Path:
    return pathlib.Path(path)


def _merge(state: str, names: Sequence[str], sealed: Mapping[str, Any]) -> None:
    """Makes one index of what the processes have uploaded into `state`. Raises OSError."""
    import tensorstore

    # Only stores of one context can refer to each other's files.
    context = tensorstore.Context()

    def opened(path: str, **config: Any) -> Any:
        base = ownership.kvstore_spec(f"{state}{path}")
        spec = {"driver": "ocdbt", "base": base, "config": config}
        return tensorstore.KvStore.open(spec, context=context).result(timeout=_MERGE_SECONDS)

    try:
        whole = opened("", max_decoded_node_bytes=100_000_000)
        transaction = tensorstore.Transaction(atomic=True)
        copies = [
            opened(f"{name}/").experimental_copy_range_to(whole.with_transaction(transaction))
            for name in names
        ]
        for copy in copies:
            copy.result(timeout=_MERGE_SECONDS)
        transaction.commit_async().result(timeout=_MERGE_SECONDS)
        keys = {key.decode() for key in whole.list().result(timeout=_MERGE_SECONDS)}
    except Exception as error:  # TensorStore raises several types
        cause = " ".join(str(error).split())[:300] or type(error).__name__
        raise OSError(f"{state}: {cause}") from error
    leaves = sealed["document"]["leaves"]
    arrays = {name.replace("/", ".") for name, leaf in leaves.items() if leaf["type"] == "array"}
    if missing := sorted(name for name in arrays if f"{name}/.zarray" not in keys):
        raise OSError(f"{state} lacks {missing[:4]} after the upload")


# ------------------------------------------------------------------------------------ reading


def _reader(root: str) -> restore.Reader:
    def document(_: Any, step: int) -> Document:
        url = f"{root}{step}/{directory.META}/metadata"
        try:
            return manifest.parse(json.loads(remote.read_bytes(url, most=_DOCUMENT_BYTES)), url)
        except (FileNotFoundError, ValueError) as error:
            raise Corrupt(f"its meta cannot be read ({type(error).__name__}: {error})") from error
        except OSError as error:
            kind = Unanswered if transient.is_transient(error) else Unreadable
            raise kind(f"its meta cannot be read ({error})") from error

    def read(path: Any, wanted: Mapping[str, Any], names: Mapping[str, str]) -> dict:
        # `path` is that of the local folder, which has no arrays.
        return _read(f"{root}{path.parent.name}/{directory.STATE}/", wanted, names)

    return restore.Reader(read, checksums.differences, reshard.move, document)


def _read(
    state: str, wanted: Mapping[str, Any], saved_names: Mapping[str, str]
) -> dict[str, jax.Array]:
    """See `restore.read_arrays`: of each array what this process's devices hold, once."""
    try:
        with jax.transfer_guard("allow"):
            return _read_parts(state, wanted, saved_names)
    except (Corrupt, restore.OutOfMemory):
        raise
    except Exception as error:  # TensorStore raises several types
        problem = restore.unread(error)
        if isinstance(problem, Corrupt) and not any(code in str(error) for code in _OF_FILES):
            problem = Unanswered(str(problem))
        raise problem from error


def _read_parts(state: str, wanted: Mapping[str, Any], saved_names: Mapping[str, str]) -> dict:
    import tensorstore

    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
    base, opening, arrays = ownership.kvstore_spec(state), {}, {}
    for name in wanted:
        on_disk = saved_names.get(name, name).replace("/", ".")  # as Orbax names them
        kvstore = {"driver": "ocdbt", "base": base, "path": f"{on_disk}/"}
        spec = {"driver": "zarr", "kvstore": kvstore}
        opening[name] = tensorstore.open(spec, read=True, open=True, context=context)
    pending, in_flight = collections.deque(), 0

    def place_oldest() -> int:
        name, like, parts, size = pending.popleft()
        arrays[name] = _placed(like, parts)
        return size

    for name, leaf in wanted.items():
        store, like = opening[name].result(), manifest.as_stored(name, leaf)
        if (tuple(store.shape), store.dtype.numpy_dtype) != (like.shape, like.dtype):
            raise Corrupt(f"its arrays cannot be read (leaf {name} is not on disk as it was saved)")
        parts, size = {}, 0
        for index in like.sharding.addressable_devices_indices_map(like.shape).values():
            key = _bounds(index, like.shape)
            if key not in parts:
                parts[key] = store[tuple(slice(*of) for of in key)].read()
                size += int(np.prod([stop - start for start, stop in key])) * like.dtype.itemsize
        while pending and in_flight + size > _FLIGHT_BYTES:
            in_flight -= place_oldest()
        pending.append((name, like, parts, size))
        in_flight += size
    while pending:
        place_oldest()
    return arrays


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(one.indices(size)[:2] for one, size in zip(index, shape, strict=True))


def _placed(like: jax.ShapeDtypeStruct, parts: Mapping[tuple, Any]) -> jax.Array:
    """The array, of the parts that are being read."""
    kind, placed = like.sharding.memory_kind, []
    for device, index in like.sharding.addressable_devices_indices_map(like.shape).items():
        to = jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
        placed.append(jax.device_put(parts[_bounds(index, like.shape)].result(), to))
    jax.block_until_ready(placed)
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, placed)
