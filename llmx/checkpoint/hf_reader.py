"""Reads a Hugging Face checkpoint: any part of any parameter, each tensor from its file.

`open_checkpoint` compares the names, shapes and types in all files with the model before memory is
taken. `Source.part` then gives a slice of a parameter as a device holds it, and `to_shards` puts
all of them on their devices: the host holds one device's part of one parameter at a time.

Letters: V vocabulary, Z the parts of a fused tensor.
"""

import dataclasses
import functools
import itertools
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
import safetensors

from llmx.checkpoint import hf_formats, mxfp4
from llmx.checkpoint.hf_formats import Tensor
from llmx.data import json_files
from llmx.model.families import ModelConfig
from llmx.pipeline.permutation import EMPTY, IDENTITY, LayerPermutation

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
STORED_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16,
                  "BF16": ml_dtypes.bfloat16}  # fmt: skip
_MAX_HEADER_BYTES = 32 << 20  # 100,000 tensors take 15 MB
# Files are mapped into memory, and what was read of them stays there until they are closed.
_MAPPED_BYTES = 128 << 20


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """An opened checkpoint whose tensors are those of `model`."""

    directory: pathlib.Path
    model: ModelConfig
    files: Mapping[str, str]  # the file of each tensor
    names: Mapping[str, tuple[Tensor, tuple[int, ...]]]  # see `hf_formats.tensor_names`
    _open: "_Files"

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all parameters by path, with their layers in the model's order."""
        found = {}
        for row in hf_formats.rows(self.model):
            found |= hf_formats.our_shapes(row, self.model)
        return found | hf_formats.unwritten(self.model)

    def dtype(self, path: str) -> np.dtype:
        """The smallest in which all numbers of a parameter are as they are stored; of what is
        packed bf16, and of fp64 fp32."""
        stored = {self._stored_dtype(name) for name, _ in self._tensors.get(path, {}).values()}
        if len(stored) == 1 and stored <= {np.dtype(each) for each in DTYPES.values()}:
            return stored.pop()
        return np.dtype(np.float32)

    @functools.cached_property
    def _tensors(self) -> dict[str, dict[tuple[int, ...], tuple[str, Tensor]]]:
        """By path, and by layer and expert: the name of a tensor and its row."""
        found: dict[str, dict] = {}
        for name, (row, index) in self.names.items():
            for path in row.paths:
                found.setdefault(path, {})[index] = name, row
        return found

    def part(self, path: str, index: Sequence[slice], dtype: Any) -> np.ndarray:
        """A slice of step 1 of a parameter [layers, experts, ...], as far as it has these. Rows
        that pad the vocabulary are zero, and so is a parameter that the family's files lack."""
        sizes = self.shapes[path]
        bounds = [one.indices(size)[:2] for one, size in zip(index, sizes, strict=True)]
        out = np.zeros([stop - start for start, stop in bounds], dtype)
        if path not in self._tensors:
            return out
        lead = len(next(iter(self._tensors[path])))
        for at in itertools.product(*(range(*of) for of in bounds[:lead])):
            name, row = self._tensors[path][at]
            dims = row.dims_of_parts[row.paths.index(path)]
            within = dict(zip(dims, bounds[lead:], strict=True))
            place = tuple(i - start for i, (start, _) in zip(at, bounds, strict=False))
            if dims[0] == "V":
                start, stop = within["V"]
                within["V"] = min(start, self.model.vocab_size), min(stop, self.model.vocab_size)
                if start >= within["V"][1]:  # padding alone
                    continue
                place = (slice(0, within["V"][1] - within["V"][0]),)
            out[place] = self._cut(name, row, path, within)
        return out

    def _cut(
        self, name: str, row: Tensor, path: str, within: Mapping[str, tuple[int, int]]
    ) -> np.ndarray:
        """What a tensor has of a parameter, in our order; `within`: first and last of each letter.

        Of a dimension that joins several letters the first is cut as it is read, others after.
        """
        sizes = hf_formats.dimension_sizes(self.model)
        part, offsets = row.paths.index(path), [0] * len(row.groups.split(","))
        if row.joined is not None:
            lengths = [hf_formats.their_shape(each, sizes)[row.joined] for each in row.pieces]
            offsets[row.joined], row = sum(lengths[:part]), row.pieces[part]
        sizes = hf_formats.sizes_of(row, sizes)
        wanted = dict(within) | {"Z": (part, part + 1)}
        read, shape, after, order = [], [], [], ""
        for group, offset in zip(row.groups.split(","), offsets, strict=True):
            inner = math.prod(sizes[x] for x in group[1:])
            start, stop = wanted[group[0]]
            read.append(slice(offset + start * inner, offset + stop * inner))
            shape += [stop - start, *(sizes[x] for x in group[1:])]
            after += [slice(None), *(slice(*wanted[x]) for x in group[1:])]
            order += group
        array = self._read(name, tuple(read))
        if not np.isfinite(array).all():
            raise ValueError(
                f"{name} in {self.directory} holds numbers that are NaN or infinite: download the "
                "checkpoint again, or take one of an earlier step"
            )
        array = array.reshape(shape)[tuple(after)]
        ours = ("Z" if row.parts else "") + row.dims
        array = array.transpose([order.index(x) for x in ours])
        return array[0] if row.parts else array

    def _stored_dtype(self, name: str) -> np.dtype:
        if name not in self.files:
            return np.dtype(ml_dtypes.bfloat16)
        return np.dtype(STORED_DTYPES[self._open.dtype(self.files[name], name)])

    def _read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        if name in self.files:
            return self._open.read(self.files[name], name, index)
        first, packed, last = index  # files have the packed dimension at the end
        blocks, scales = (
            self._open.read(self.files[one], one, (first, last))
            for one in (name + mxfp4.BLOCKS, name + mxfp4.SCALES)
        )
        return mxfp4.dequantized(blocks, scales)[:, packed]


class _Files:
    """The open files of a checkpoint."""

    def __init__(self, directory: pathlib.Path):
        self._directory, self._handles, self._num_bytes = directory, {}, 0

    def read(self, file: str, name: str, index: tuple[slice, ...]) -> np.ndarray:
        try:
            array = self._handle(file).get_slice(name)[index]
        except safetensors.SafetensorError as error:
            text = f"{name} in {self._directory / file} cannot be read: {error}; download it again"
            raise ValueError(text) from error
        self._num_bytes += array.nbytes
        if self._num_bytes > _MAPPED_BYTES:
            self._handles, self._num_bytes = {}, 0
        return array

    def dtype(self, file: str, name: str) -> str:
        return self._handle(file).get_slice(name).get_dtype()

    def _handle(self, file: str) -> Any:
        if file not in self._handles:
            self._handles[file] = opened(self._directory / file)
        return self._handles[file]


def to_shards(
    source: Source, wanted: Mapping[str, jax.ShapeDtypeStruct], *, order: LayerPermutation
) -> dict[str, jax.Array]:
    """Parameters by path, read part by part to the devices of this process that hold them.

    Args:
      wanted: shapes, dtypes and shardings; layers in the permutation `order`.

    Raises ValueError for parameters that are not those of the checkpoint.
    """
    shapes = {path: tuple(order.plain_shape(path, leaf.shape)) for path, leaf in wanted.items()}
    if shapes != source.shapes:
        names = {path for path, _ in shapes.items() ^ source.shapes.items()}
        texts = [f"{path} {source.shapes.get(path)}, wanted {shapes.get(path)}" for path in names]
        raise ValueError(
            f"{source.directory} holds other parameters than the model wants: {listed(texts)}: use "
            "the model of its config.json"
        )
    return {path: _placed(source, path, leaf, order) for path, leaf in wanted.items()}


def _placed(
    source: Source, path: str, leaf: jax.ShapeDtypeStruct, order: LayerPermutation
) -> jax.Array:
    slots = order.slots if order.moves(path, leaf.shape, IDENTITY) else None
    holders: dict[tuple, list[jax.Device]] = {}
    indices = leaf.sharding.addressable_devices_indices_map(leaf.shape)
    for device, index in indices.items():
        key = tuple(one.indices(size)[:2] for one, size in zip(index, leaf.shape, strict=True))
        holders.setdefault(key, []).append(device)
    arrays = []
    for bounds, devices in holders.items():
        index = tuple(slice(*of) for of in bounds)
        if slots is None:
            host = source.part(path, index, leaf.dtype)
        else:
            host = np.zeros([stop - start for start, stop in bounds], leaf.dtype)
            for row, layer in enumerate(slots[index[0]]):
                if layer != EMPTY:
                    of_layer = (slice(layer, layer + 1), *index[1:])
                    host[row] = source.part(path, of_layer, leaf.dtype)[0]
        kind = leaf.sharding.memory_kind
        placed = [jax.sharding.SingleDeviceSharding(one, memory_kind=kind) for one in devices]
        arrays += jax.block_until_ready([jax.device_put(host, to) for to in placed])
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, arrays)


def open_checkpoint(directory: str | pathlib.Path, model: ModelConfig | None = None) -> Source:
    """A checkpoint, with everything that can be known without reading its numbers checked.

    Args:
      directory: config.json and safetensors, in one file or several.
      model: the model that it must be, e.g. with another `vocab_multiple`; None = as config.json
        says. With rotary positions `max_positions` may differ.

    Raises ValueError for an unknown kind of model, another model than `model`, and tensors that are
    missing, unknown or of another shape.
    """
    directory = pathlib.Path(directory)
    stored = read_model(directory)
    model = stored if model is None else model
    ignore = ("max_positions",) if model.positions == "rope" else ()
    if different := hf_formats.differences(model, stored, ignore=ignore):
        raise ValueError(f"the checkpoint in {directory} is of another model than {different}")
    files = _tensor_files(directory)
    names = _checked_names(directory, files, model)
    sizes = hf_formats.dimension_sizes(model)
    shapes = {name: hf_formats.their_shape(row, sizes) for name, (row, _) in names.items()}
    packed = {name: shapes.pop(name) for name in names if name not in files}
    _check_headers(directory, files, shapes)
    parts: dict[str, tuple[int, ...]] = {}
    for name, shape in packed.items():
        parts |= mxfp4.packed_shapes(name, shape)
    _check_headers(directory, files, parts, dtypes=("U8",))
    source = Source(directory, model, files, names, _Files(directory))
    _check_tied(source)
    return source


def read_model(directory: str | pathlib.Path) -> ModelConfig:
    """The model of a checkpoint's config.json. Raises ValueError where llmx does not have it."""
    path = pathlib.Path(directory) / CONFIG
    values = _read_json(path)
    try:
        return hf_formats.model_config_from_hf(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def is_checkpoint(directory: str | pathlib.Path) -> bool:
    """Whether a directory looks like a Hugging Face checkpoint, and not like a work directory."""
    place = pathlib.Path(directory)
    has_weights = (place / WEIGHTS).is_file() or (place / INDEX).is_file()
    is_run = (place / "checkpoints").is_dir()
    return has_weights and (place / CONFIG).is_file() and not is_run


def _check_tied(source: Source) -> None:
    """Raises ValueError where a tied head is stored, and is not the embedding."""
    name, files = hf_formats.HEAD.theirs, source.files
    if not source.model.tied_head or name not in files:
        return
    shape = source.model.vocab_size, source.model.width
    _check_headers(source.directory, files, {name: shape})
    step = max(1, _MAPPED_BYTES // (8 * shape[1]))
    for start in range(0, shape[0], step):
        rows = slice(start, min(start + step, shape[0])), slice(0, shape[1])
        if not np.array_equal(
            source._open.read(files[name], name, rows), source.part("embedding", rows, np.float64)
        ):
            raise ValueError(
                f"{source.directory} says tie_word_embeddings, and {name} is not the embedding: "
                "set it to false in config.json"
            )


def _checked_names(directory: pathlib.Path, files: Mapping[str, str], model: ModelConfig) -> dict:
    """`hf_formats.tensor_names` of the checkpoint, which must have these tensors and no others;
    where MXFP4 may be, two for one."""
    form = hf_formats.FORMATS[model.family]
    prefix = form.prefix
    has_prefix = any(name.startswith(prefix) for name in files)
    names = hf_formats.tensor_names(model, prefix=prefix if has_prefix else "")
    stored = set(names)
    for name, (row, _) in names.items():
        parts = {name + mxfp4.BLOCKS, name + mxfp4.SCALES}
        if row.ours in form.mxfp4 and name not in files and parts & files.keys():
            stored = stored - {name} | parts
    unknown = {name for name in files.keys() - stored if not hf_formats.BUFFERS.search(name)}
    unknown -= {hf_formats.HEAD.theirs} if model.tied_head else set()
    if missing := stored - files.keys():
        raise ValueError(
            f"{directory} lacks {listed(missing)}, which its config.json asks for: download it "
            "again, or correct config.json"
        )
    if unknown:
        raise ValueError(
            f"{directory} has {listed(unknown)}, which a {model.family} model of its config.json "
            "does not use: correct config.json, or remove them from the checkpoint"
        )
    return names


def _read_json(path: pathlib.Path) -> dict:
    remedy = "give the directory of a Hugging Face checkpoint, or download it again"
    return json_files.read_object(path, remedy=remedy)


def _tensor_files(directory: pathlib.Path) -> dict[str, str]:
    """The file of each tensor."""
    if (directory / WEIGHTS).is_file():
        with opened(directory / WEIGHTS) as file:
            return dict.fromkeys(file.keys(), WEIGHTS)
    if not (directory / INDEX).is_file():
        raise ValueError(
            f"{directory} has neither {WEIGHTS} nor {INDEX}: give a checkpoint in safetensors (a "
            ".bin one becomes that by transformers' save_pretrained)"
        )
    files = _read_json(directory / INDEX).get("weight_map")
    if not isinstance(files, dict) or not all(map(json_files.is_plain_name, files.values())):
        raise ValueError(
            f"{directory / INDEX}: weight_map must give each tensor the name of a file in "
            f"{directory}: download the checkpoint again"
        )
    if missing := {f for f in files.values() if not (directory / f).is_file()}:
        raise ValueError(f"{directory} lacks {listed(missing)}: download the checkpoint again")
    for path in sorted(set(files.values())):
        with opened(directory / path) as file:
            there = {name for name, of in files.items() if of == path}
            if missing := there - set(file.keys()):
                raise ValueError(
                    f"{directory / path} lacks {listed(missing)}, which {INDEX} says it has: "
                    "download the checkpoint again"
                )
    return files


def _check_headers(
    directory: pathlib.Path,
    files: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Iterable[str] = STORED_DTYPES,
) -> None:
    """Compares the shapes and types in the headers of the files with those of the model."""
    for path in sorted({files[name] for name in shapes}):
        with opened(directory / path) as file:
            for name in sorted(shapes.keys() & set(file.keys())):
                found = file.get_slice(name)
                if (shape := tuple(found.get_shape())) != shapes[name]:
                    raise ValueError(
                        f"{name} in {directory / path} has shape {shape}, and config.json makes it "
                        f"{shapes[name]}: correct config.json"
                    )
                if found.get_dtype() not in dtypes:
                    raise ValueError(
                        f"{name} in {directory / path} is of type {found.get_dtype()}: use a "
                        f"checkpoint in one of {', '.join(dtypes)}"
                    )


def opened(path: pathlib.Path) -> Any:
    """An open safetensors file. Raises ValueError for what is none."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
        if length > _MAX_HEADER_BYTES:
            raise ValueError(
                f"{path} claims a header of {length:,} bytes, above {_MAX_HEADER_BYTES:,}: it is "
                "not safetensors, or damaged; download it again"
            )
        return safetensors.safe_open(path, framework="np")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error})") from error
    except safetensors.SafetensorError as error:
        text = f"{path} is incomplete or not safetensors: {error}; download it again"
        raise ValueError(text) from error


def listed(names: Iterable[str]) -> str:
    """The first few of some names, and how many more there are."""
    names = sorted(names)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def numpy_dtype(name: str) -> np.dtype:
    """A dtype by its name in `DTYPES`. Raises ValueError."""
    if name not in DTYPES:
        raise ValueError(f"dtype={name!r} is unknown: use one of {', '.join(DTYPES)}")
    return np.dtype(DTYPES[name])
