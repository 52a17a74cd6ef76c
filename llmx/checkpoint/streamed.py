"""Checkpoints of arrays that never are in memory as a whole: written and read chunk by chunk.

What `save` writes is restored as any other checkpoint; `FROM_FILES` reads any. One process works
alone.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from llmx.checkpoint import checksums, directory, quiet, restore, writer
from llmx.checkpoint.manifest import IN_PARTS, PART_BYTES, Corrupt, Document
from llmx.pipeline.permutation import LayerPermutation
from llmx.sharding import trees

CHUNK_BYTES = 64 << 20  # of an array, in memory at a time


@dataclasses.dataclass(eq=False)
class Streamed:
    """An array that is made part by part."""

    shape: tuple[int, ...]
    dtype: np.dtype
    by_rows: bool  # whether a chunk has one row of the first dimension
    part: Callable[[tuple[slice, ...]], np.ndarray]
    checksum: int = 0  # of what was written so far
    error: Exception | None = None  # that `part` has raised

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


def save(folder: str, step: int, arrays: Mapping[str, Streamed], meta: Mapping[str, Any]) -> None:
    """Writes the checkpoint `step` into a directory that has none of that step.

    Raises Unwritten where it cannot be written, and what `part` raises; then nothing is left.
    """
    import orbax.checkpoint as ocp

    quiet.silence_orbax()
    root = directory.root_of(folder)
    had_root = root.exists()
    path = directory.unfinished_path(root, step)
    directory.remove(path)
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=_registry())
    tree = trees.nest(arrays)
    in_chunks = {
        name: ocp.SaveArgs(
            chunk_byte_size=PART_BYTES if name.startswith(IN_PARTS) else CHUNK_BYTES,
            shard_axes=(0,) * array.by_rows,
        )
        for name, array in arrays.items()
    }
    try:
        handler.save(
            path / directory.STATE, args=ocp.args.PyTreeSave(tree, save_args=trees.nest(in_chunks))
        )
        leaves = {
            name: {"type": "array", "shape": list(array.shape), "dtype": str(array.dtype)}
            for name, array in arrays.items()
        }
        sums = {name: array.checksum for name, array in arrays.items()}
        writer.complete(path, Document(step, leaves, dict(meta)).sealed(sums), handler)
        directory.commit(root, step)
    except BaseException as error:
        directory.remove(path)
        if not had_root and root.exists() and not any(root.iterdir()):
            directory.remove(root)
        for array in arrays.values():
            if array.error is not None:
                raise array.error from None
        if not isinstance(error, Exception):
            raise
        cause, remedy = writer.reason(error)
        raise writer.Unwritten(f"{path} cannot be written: {cause}: {remedy}") from error
    finally:
        handler.close()


def _registry() -> Any:
    """Orbax's way from types of leaves to what writes them, with `Streamed`."""
    from orbax.checkpoint import type_handlers

    class Handler(type_handlers.NumpyHandler):
        """Writes one array after another, and of each one chunk after another."""

        def __init__(self):
            super().__init__(deepcopy_host_arrays=False)

        async def _background_serialize(self, values, infos, args=None):
            for one in zip(values, infos, args, strict=True):
                await super()._background_serialize(*([each] for each in one))

        async def _open_and_write(self, value, tspec, ts_context):
            import tensorstore

            spec = tensorstore.Spec(tspec)
            store = await tensorstore.open(spec, create=True, open=True, context=ts_context)
            for index in _chunks(value.shape, store.chunk_layout.write_chunk.shape):
                try:
                    part = value.part(index)
                except Exception as error:
                    value.error = error
                    raise
                starts = [each.start for each in index]
                value.checksum = (value.checksum + checksums.of_part(part, starts)) % 2**32
                await store[index].write(part, can_reference_source_data_indefinitely=True)

    return type_handlers.create_type_handler_registry(
        (Streamed, Handler()), (jax.Array, type_handlers.ArrayHandler())
    )


def _chunks(shape: tuple[int, ...], chunk: tuple[int, ...] | None):
    """The slices of an array by a grid of chunks; a number is one, of which None is said."""
    chunk = chunk or ()
    starts = (range(0, size, step) for size, step in zip(shape, chunk, strict=True))
    for first in itertools.product(*starts):
        yield tuple(
            slice(start, min(start + step, size))
            for start, step, size in zip(first, chunk, shape, strict=True)
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Stored:
    """An array in a checkpoint's files, which an index reads."""

    shape: tuple[int, ...]
    dtype: np.dtype
    store: Any  # tensorstore's, in the order in which the layers were saved
    rows: tuple[int, ...] | None = None  # of the store, for each row of this; None = the same

    def __getitem__(self, index: Any) -> np.ndarray:
        """As of an array: numbers and slices, or `...` for all of it."""
        index = () if index is ... else index if isinstance(index, tuple) else (index,)
        if self.rows is None or (index and isinstance(index[0], int | np.integer)):
            if self.rows is not None:
                index = self.rows[index[0]], *index[1:]
            return self.store[index].read().result()
        rows = self.rows[index[0]] if index else self.rows
        return np.stack([self.store[row, *index[1:]].read().result() for row in rows])


def _read(path: Any, wanted: Mapping[str, Any], saved_names: Mapping[str, str]) -> dict:
    """See `restore.read_arrays`. Raises Corrupt."""
    import tensorstore

    found, place = {}, str(path)
    base = f"{place}/" if "://" in place else {"driver": "file", "path": f"{place}/"}
    for name, leaf in wanted.items():
        on_disk = saved_names.get(name, name).replace("/", ".")  # as Orbax names them
        kvstore = {"driver": "ocdbt", "base": base, "path": f"{on_disk}/"}
        try:
            store = tensorstore.open({"driver": "zarr", "kvstore": kvstore}, read=True).result()
        except Exception as error:  # tensorstore raises several types
            raise restore.unread(error) from error
        stored = tuple(store.shape), np.dtype(store.dtype.numpy_dtype)
        if stored != (tuple(leaf.shape), np.dtype(leaf.dtype)):
            raise Corrupt(f"its arrays cannot be read (leaf {name} is not on disk as it was saved)")
        found[name] = Stored(*stored, store)
    return found


def _differences(arrays: Mapping[str, Stored], expected: Mapping[str, int]) -> str:
    """See `checksums.differences`."""
    totals = dict.fromkeys(arrays, 0)
    for name, array in arrays.items():
        for index in _chunks(array.shape, array.store.chunk_layout.read_chunk.shape):
            try:
                part = array[index]
            except Exception as error:
                problem = restore.unread(error)
                if not isinstance(problem, Corrupt):
                    raise ValueError(f"{name}: {problem}") from error
                return str(problem)
            sum_of_part = checksums.of_part(part, [each.start for each in index])
            totals[name] = (totals[name] + sum_of_part) % 2**32
    return checksums.difference_text(totals, expected)


def _move(arrays: dict, wanted: Mapping, *, order: LayerPermutation, saved: LayerPermutation):
    """See `reshard.move`."""
    for name, leaf in wanted.items():
        if order.moves(name, leaf.shape, saved):
            rows = saved.rows(order)
            arrays[name] = dataclasses.replace(arrays[name], shape=tuple(leaf.shape), rows=rows)


FROM_FILES = restore.Reader(_read, _differences, _move, restore.read_document)
