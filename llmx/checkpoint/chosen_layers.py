"""Parameters of some layers of a checkpoint, read part by part to the devices that hold them."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from llmx.checkpoint import hf_reader, model_params, streamed
from llmx.checkpoint.manifest import Document
from llmx.model import apply as apply_lib
from llmx.model.families import ModelConfig
from llmx.sharding import trees

_BLOCKS = "blocks/"


@dataclasses.dataclass(frozen=True, eq=False)
class Chosen:
    """Parameters by path, as `hf_reader.to_shards` reads them, with these layers of `source`."""

    source: Any  # `hf_reader.Source`, or `Saved`
    layers: Sequence[int]

    @property
    def directory(self) -> pathlib.Path:
        return self.source.directory

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        cut = lambda path, shape: (len(self.layers), *shape[1:]) if _has_layers(path) else shape  # noqa: E731
        return {path: cut(path, tuple(shape)) for path, shape in self.source.shapes.items()}

    def part(self, path: str, index: Sequence[slice], dtype: Any) -> np.ndarray:
        if not _has_layers(path):
            return self.source.part(path, index, dtype)
        rows = range(*index[0].indices(len(self.layers)))
        of = [slice(self.layers[row], self.layers[row] + 1) for row in rows]
        return np.concatenate([self.source.part(path, (row, *index[1:]), dtype) for row in of])


def _has_layers(path: str) -> bool:
    return path.startswith(_BLOCKS)


@dataclasses.dataclass(frozen=True, eq=False)
class Saved:
    """The parameters of a run in its files."""

    directory: pathlib.Path
    arrays: Mapping[str, Any]  # by path

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {path: tuple(array.shape) for path, array in self.arrays.items()}

    def part(self, path: str, index: Sequence[slice], dtype: Any) -> np.ndarray:
        return np.asarray(self.arrays[path][tuple(index)]).astype(dtype)


def of_run(
    workdir: str, *, step: int | None, model_of: Callable[[Mapping[str, Any]], ModelConfig],
    log: Callable[[str], None],
) -> tuple[Saved, int]:  # fmt: skip
    """The parameters of a run's checkpoint, and its step; adapters merged into them.

    `model_of`: of the config in a checkpoint's meta; may raise Mismatch. Raises ValueError where
    there is no good checkpoint.
    """

    def whole(document: Document) -> Any:
        model = model_of(document.meta.get("config", {}))
        shapes, _ = apply_lib.abstract_parameters(model)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), shapes)

    restored = model_params.restore_params(
        workdir, whole, step=step, log=log, reader=streamed.FROM_FILES
    )
    return Saved(pathlib.Path(workdir), trees.named(restored.state)), restored.step


def to_shards(source: Any, layers: Sequence[int], like: Any, *, order: Any) -> Any:
    """Parameters with the shapes, shardings and dtypes of `like`, whose layers are `layers` of the
    source. Raises ValueError where they are of other shapes."""
    named = hf_reader.to_shards(Chosen(source, layers), trees.named(like), order=order)
    return trees.unnamed(named, like)
