"""Hugging Face checkpoints: `export` writes a directory that transformers loads, `load` reads one.

`hf_formats` describes the checkpoint of each family as data. Files are safetensors
(https://github.com/huggingface/safetensors), read tensor by tensor from mapped memory, so that
loading needs the memory of the model and of its largest tensor.

Letters: V vocabulary, Z the parts of a fused tensor.
"""

import itertools
import json
import math
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from llmx.checkpoint import hf_files, hf_formats, mxfp4, writer
from llmx.checkpoint.hf_formats import Tensor
from llmx.data import json_files
from llmx.model.families import ModelConfig
from llmx.sharding import trees

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
SHARD_BYTES = 5 * 10**9  # transformers' own limit of a file
_STORED_DTYPES = ("F64", "F32", "F16", "BF16")
_MAX_HEADER_BYTES = 32 << 20  # 100,000 tensors take 15 MB
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def _letters(row: Tensor) -> tuple[str, str]:
    """The dimensions of a tensor in our order and in theirs."""
    return ("Z" if row.parts else "") + row.dims, row.groups.replace(",", "")


def _to_theirs(row: Tensor, parts: Sequence[np.ndarray], sizes: Mapping[str, int]) -> np.ndarray:
    ours, theirs = _letters(row)
    array = np.stack(parts) if row.parts else parts[0]
    array = array.transpose([ours.index(x) for x in theirs])
    return array.reshape(hf_formats.their_shape(row, sizes))


def _to_ours(row: Tensor, array: np.ndarray, sizes: Mapping[str, int]) -> list[np.ndarray]:
    ours, theirs = _letters(row)
    sizes = hf_formats.sizes_of(row, sizes)
    array = array.reshape([sizes[x] for x in theirs]).transpose([theirs.index(x) for x in ours])
    return list(array) if row.parts else [array]


def _view(array: np.ndarray, row: Tensor, index: tuple[int, ...], model: ModelConfig) -> np.ndarray:
    """One layer of a parameter, or one expert of it, without the padding of the vocabulary."""
    array = array[index]
    return array[: model.vocab_size] if row.dims[0] == "V" else array


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _numpy_dtype(name: str) -> np.dtype:
    if name not in DTYPES:
        raise ValueError(f"dtype={name!r} is unknown: use one of {', '.join(DTYPES)}")
    return np.dtype(DTYPES[name])


class Unwritten(OSError):
    """An export could not be written."""


def export(
    params: Mapping[str, Any], model: ModelConfig, directory: str | pathlib.Path, *,
    tokenizer_file: str | pathlib.Path | None = None, end_token: int | None = None,
    files: Mapping[str, bytes] | None = None, ids: Mapping[str, int] | None = None,
    dtype: str = "float32", shard_bytes: int = SHARD_BYTES,
) -> pathlib.Path:  # fmt: skip
    """Writes a directory that `transformers.AutoModelForCausalLM.from_pretrained` loads.

    Args:
      params: the model's parameters, a nested dict of numpy or jax arrays.
      directory: new or empty. config.json is written last: an incomplete export has none.
      tokenizer_file: a tokenizer.json of Hugging Face `tokenizers`, to be copied.
      end_token: id of the token that ends a text.
      files: what lay beside the tokenizer.json, to be written as it was; `hf_files.read`.
      ids: of other special tokens, for config.json: {"bos_token_id": 1}.
      dtype: a name in `DTYPES`.
      shard_bytes: weights of more than this are split over several files.

    Raises ValueError if the format cannot represent `model`, or `params` is of another model, and
    Unwritten where the disk takes no files: then none are left.
    """
    directory, numpy_dtype = pathlib.Path(directory), _numpy_dtype(dtype)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory} exists and is not empty: export into a new directory")
    config = hf_formats.model_config_to_hf(model)
    files = files or {}
    config |= hf_files.special_ids(files, end_token=end_token, ids=ids)
    config |= {"torch_dtype": dtype, "use_cache": True}
    arrays = _checked_params(params, model)
    directory.mkdir(parents=True, exist_ok=True)
    try:
        if tokenizer_file is not None:
            hf_files.write(directory, pathlib.Path(tokenizer_file), files, model, end_token)
        _write_tensors(directory, arrays, model, numpy_dtype, shard_bytes)
        (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    except (OSError, safetensors.SafetensorError, KeyboardInterrupt) as error:
        for path in directory.iterdir():  # it was empty
            path.unlink()
        if isinstance(error, KeyboardInterrupt):
            raise
        cause, remedy = writer.reason(error)
        raise Unwritten(f"{directory} cannot be written: {cause}: {remedy}") from error
    return directory


def _checked_params(params: Mapping[str, Any], model: ModelConfig) -> dict[str, np.ndarray]:
    flat, rows = trees.named(params), hf_formats.rows(model)
    expected = {path: hf_formats.our_shape(row, model) for row in rows for path in row.paths}
    unwritten = hf_formats.unwritten(model)
    expected |= unwritten
    missing, unknown = expected.keys() - flat.keys(), flat.keys() - expected.keys()
    if missing or unknown:
        raise ValueError(
            f"the parameters are not those of a {model.family} model: missing "
            f"{_listed(missing) or 'none'}, unknown {_listed(unknown) or 'none'}; export with the "
            "config of their run"
        )
    for path, shape in expected.items():
        if (found := tuple(flat[path].shape)) != shape:
            raise ValueError(
                f"parameter {path} has shape {found} and the model makes it {shape}: export with "
                "the config of its run"
            )
    for path in unwritten:
        if np.any(flat[path]):
            raise ValueError(
                f"parameter {path} is not zero, and a {model.family} checkpoint has no bias by "
                "which experts are chosen: train with experts.bias_rate=0, and balance_weight "
                "in its place"
            )
    return {path: np.asarray(leaf) for path, leaf in flat.items() if path not in unwritten}


def _write_tensors(
    directory: pathlib.Path, arrays: dict, model: ModelConfig, dtype: np.dtype, shard_bytes: int
):
    sizes = hf_formats.dimension_sizes(model)
    names = hf_formats.tensor_names(model, prefix=hf_formats.FORMATS[model.family].prefix)
    shards, room, total_size = [[]], shard_bytes, 0
    for name, (row, _) in names.items():
        size = math.prod(hf_formats.their_shape(row, sizes)) * dtype.itemsize
        if size > room and shards[-1]:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= size
        total_size += size
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = WEIGHTS if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {}
        for name in shard:
            row, index = names[name]
            parts = [_view(arrays[path], row, index, model) for path in row.paths]
            tensors[name] = np.ascontiguousarray(_to_theirs(row, parts, sizes), dtype)
        safetensors.numpy.save_file(tensors, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def load(
    directory: str | pathlib.Path, model: ModelConfig | None = None, *, dtype: str = "float32"
) -> tuple[ModelConfig, dict]:
    """Reads a Hugging Face checkpoint: its model, and its parameters as a nested dict of numpy.

    Args:
      directory: config.json and safetensors, in one file or several.
      model: the model that it must be, e.g. with another `vocab_multiple`; None = as config.json
        says. With rotary positions `max_positions` may differ.
      dtype: of the parameters returned, a name in `DTYPES`.

    Raises ValueError for an unknown kind of model, another model than `model`, and tensors that are
    missing, unknown or of another shape.
    """
    directory, numpy_dtype = pathlib.Path(directory), _numpy_dtype(dtype)
    values = _read_json(directory / CONFIG)
    try:
        stored = hf_formats.model_config_from_hf(values)
    except ValueError as error:
        raise ValueError(f"{directory / CONFIG}: {error}") from error
    model = stored if model is None else model
    ignore = ("max_positions",) if model.positions == "rope" else ()
    if different := hf_formats.differences(model, stored, ignore=ignore):
        raise ValueError(f"the checkpoint in {directory} is of another model than {different}")
    files = _tensor_files(directory)
    names = _checked_names(directory, files, model)
    sizes = hf_formats.dimension_sizes(model)
    shapes = {name: hf_formats.their_shape(row, sizes) for name, (row, _) in names.items()}
    packed = {name: shapes.pop(name) for name in names if name not in files}
    # Before memory is taken for what config.json says.
    _check_headers(directory, files, shapes)
    for name, shape in packed.items():
        _check_headers(directory, files, mxfp4.packed_shapes(name, shape), dtypes=("U8",))
    arrays = {}
    for row in hf_formats.rows(model):
        shape, make = hf_formats.our_shape(row, model), np.zeros if "V" in row.dims else np.empty
        arrays |= {path: make(shape, numpy_dtype) for path in row.paths}
    tensors = itertools.chain(
        _read_tensors(directory, files, shapes), _read_packed(directory, files, packed)
    )
    for name, tensor in tensors:
        row, index = names[name]
        for path, part in zip(row.paths, _to_ours(row, tensor, sizes), strict=True):
            _view(arrays[path], row, index, model)[...] = part
    for path, shape in hf_formats.unwritten(model).items():
        arrays[path] = np.zeros(shape, numpy_dtype)
    if model.tied_head and hf_formats.HEAD.theirs in files:
        embedding = arrays["embedding"][: model.vocab_size]
        head = {hf_formats.HEAD.theirs: embedding.shape}
        _check_headers(directory, files, head)
        ((name, tensor),) = _read_tensors(directory, files, head)
        if not np.array_equal(tensor.astype(embedding.dtype), embedding):
            raise ValueError(
                f"{directory} says tie_word_embeddings, and {name} is not the embedding: set it to "
                "false in config.json"
            )
    return model, trees.nest(arrays)


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
            f"{directory} lacks {_listed(missing)}, which its config.json asks for: download it "
            "again, or correct config.json"
        )
    if unknown:
        raise ValueError(
            f"{directory} has {_listed(unknown)}, which a {model.family} model of its config.json "
            "does not use: correct config.json, or remove them from the checkpoint"
        )
    return names


def _read_json(path: pathlib.Path) -> dict:
    remedy = "give the directory of a Hugging Face checkpoint, or download it again"
    return json_files.read_object(path, remedy=remedy)


def _tensor_files(directory: pathlib.Path) -> dict[str, str]:
    """The file of each tensor."""
    if (directory / WEIGHTS).is_file():
        with _opened(directory / WEIGHTS) as file:
            return dict.fromkeys(file.keys(), WEIGHTS)
    if (directory / INDEX).is_file():
        files = _read_json(directory / INDEX).get("weight_map")
        if not isinstance(files, dict) or not all(map(json_files.is_plain_name, files.values())):
            raise ValueError(
                f"{directory / INDEX}: weight_map must give each tensor the name of a file in "
                f"{directory}: download the checkpoint again"
            )
        if missing := {f for f in files.values() if not (directory / f).is_file()}:
            raise ValueError(f"{directory} lacks {_listed(missing)}: download the checkpoint again")
        return files
    raise ValueError(
        f"{directory} has neither {WEIGHTS} nor {INDEX}: give a checkpoint in safetensors (a .bin "
        "one becomes that by transformers' save_pretrained)"
    )


def _read_tensors(
    directory: pathlib.Path, files: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, np.ndarray]]:
    """(name, tensor) for each name in `shapes`, one tensor in memory at a time."""
    by_file: dict[str, list[str]] = {}
    for name in shapes:
        by_file.setdefault(files[name], []).append(name)
    for path, names in by_file.items():
        with _opened(directory / path) as file:
            if missing := set(names) - set(file.keys()):
                problem = f"{directory / path} lacks {_listed(missing)}, which {INDEX} says it has"
                raise ValueError(f"{problem}: download the checkpoint again")
            for name in names:
                yield name, file.get_tensor(name)


def _read_packed(
    directory: pathlib.Path, files: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, np.ndarray]]:
    """(name, tensor) for each name in `shapes`, each stored in two; one in memory at a time."""
    for name, shape in shapes.items():
        parts = dict(_read_tensors(directory, files, mxfp4.packed_shapes(name, shape)))
        yield name, mxfp4.dequantized(parts[name + mxfp4.BLOCKS], parts[name + mxfp4.SCALES])


def _check_headers(
    directory: pathlib.Path,
    files: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Sequence[str] = _STORED_DTYPES,
) -> None:
    """Compares the shapes and types in the headers of the files with those of the model."""
    for path in sorted(set(files.values())):
        with _opened(directory / path) as file:
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


def _opened(path: pathlib.Path):
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
