"""Hugging Face checkpoints: `export` writes a directory that transformers loads, `load` reads one.

`hf_formats` describes the checkpoint of each family as data, `hf_reader` reads it. Files are
safetensors (https://github.com/huggingface/safetensors).

Letters: V vocabulary, Z the parts of a fused tensor.
"""

import functools
import json
import math
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from llmx.checkpoint import hf_files, hf_formats, hf_packed, hf_reader, streamed, writer
from llmx.checkpoint.hf_formats import Tensor
from llmx.checkpoint.hf_reader import CONFIG, INDEX, WEIGHTS, listed
from llmx.data import full_disk, tokenizer_files
from llmx.model import packed
from llmx.model.families import ModelConfig
from llmx.sharding import trees

SHARD_BYTES = 5 * 10**9  # transformers' own limit of a file
ROWS = 4096  # of a table of the vocabulary, in memory at a time
_NAMES = {np.dtype(kind): name for name, kind in hf_reader.STORED_DTYPES.items()}
_NAMES |= {np.dtype(np.int32): "I32", np.dtype(np.int64): "I64"}


class Written(NamedTuple):
    """A tensor of a file."""

    shape: tuple[int, ...]
    dtype: np.dtype
    parts: Callable[[], Iterable[np.ndarray]]  # in the file's order


def to_theirs(row: Tensor, parts: Sequence[np.ndarray], sizes: Mapping[str, int]) -> np.ndarray:
    if row.joined is not None:
        tensors = [to_theirs(*one, sizes) for one in zip(row.pieces, zip(parts), strict=True)]
        return np.concatenate(tensors, axis=row.joined)
    ours, theirs = ("Z" if row.parts else "") + row.dims, row.groups.replace(",", "")
    array = np.stack(parts) if row.parts else parts[0]
    array = array.transpose([ours.index(x) for x in theirs])
    return array.reshape(hf_formats.their_shape(row, sizes))


def export(
    params: Mapping[str, Any], model: ModelConfig, directory: str | pathlib.Path, *,
    tokenizer_file: str | pathlib.Path | None = None, end_token: int | None = None,
    files: Mapping[str, bytes] | None = None, ids: Mapping[str, int] | None = None,
    ends_of_turn: Sequence[int] = (),
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
      ends_of_turn: ids of further tokens that end a text.
      dtype: a name in `hf_reader.DTYPES`.
      shard_bytes: weights of more than this are split over several files.

    Raises ValueError if the format cannot represent `model`, or `params` is of another model, and
    `writer.Unwritten` where the disk takes no files. Whatever it raises, no files are left.
    """
    directory, numpy_dtype = pathlib.Path(directory), hf_reader.numpy_dtype(dtype)
    config = hf_formats.model_config_to_hf(model)
    files = files or {}
    config |= {"torch_dtype": dtype, "use_cache": True}
    config = hf_formats.with_kept(config, model, tokenizer_files.imported_config(files))
    config |= hf_files.special_ids(files, end_token=end_token, ids=ids)
    config, files = hf_files.with_ends(config, files, ends_of_turn)
    arrays = checked_params(params, model)
    names = hf_formats.tensor_names(model, prefix=hf_formats.FORMATS[model.family].prefix)
    tensors = {}
    for name, (row, index) in names.items():
        tensors |= _written(name, row, index, arrays, model, numpy_dtype)
    config |= hf_packed.quantization_config(names, arrays)
    with writer.filling(directory, last=CONFIG):
        if tokenizer_file is not None:
            hf_files.write(directory, pathlib.Path(tokenizer_file), files, model, end_token)
        _write_tensors(directory, tensors, shard_bytes)
        text = json.dumps(config, indent=2) + "\n"
        full_disk.write_atomically(directory / CONFIG, text.encode())
    return directory


def checked_params(params: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
    """The parameters that files have, by path. ValueError where they are of another model."""
    flat, rows = packed.named(params), hf_formats.rows(model)
    expected = {}
    for row in rows:
        expected |= hf_formats.our_shapes(row, model)
    unwritten = hf_formats.unwritten(model)
    expected |= unwritten
    missing, unknown = expected.keys() - flat.keys(), flat.keys() - expected.keys()
    if missing or unknown:
        raise ValueError(
            f"the parameters are not those of a {model.family} model: missing "
            f"{listed(missing) or 'none'}, unknown {listed(unknown) or 'none'}; export with the "
            "config of their run"
        )
    for path, shape in expected.items():
        if (found := hf_packed.shape_of(flat[path])) != shape:
            raise ValueError(
                f"parameter {path} has shape {found} and the model makes it {shape}: export with "
                "the config of its run"
            )
    for path in unwritten:
        if np.any(np.asarray(flat[path][...])):
            raise ValueError(
                f"parameter {path} is not zero, and a {model.family} checkpoint has no bias by "
                "which experts are chosen: train with experts.bias_rate=0, and balance_weight "
                "in its place"
            )
    kept = streamed.Stored | packed.Packed
    host = lambda leaf: leaf if isinstance(leaf, kept) else np.asarray(leaf)  # noqa: E731
    return {path: host(leaf) for path, leaf in flat.items() if path not in unwritten}


def _written(
    name: str, row: Tensor, index: tuple[int, ...], arrays: Mapping[str, Any], model: ModelConfig,
    dtype: np.dtype,
) -> dict[str, Written]:  # fmt: skip
    """What a file has of one tensor, by name: itself, or the parts of a packed one."""
    sizes = hf_formats.dimension_sizes(model)
    if not any(packed.is_packed(arrays[path]) for path in row.paths):
        parts = functools.partial(parts_of, row, index, arrays, model)
        return {name: Written(hf_formats.their_shape(row, sizes), dtype, parts)}
    convert = functools.partial(to_theirs, row, sizes=sizes)
    shape, num_groups = hf_packed.shape_and_groups(name, row, arrays, convert, index)
    make = functools.partial(hf_packed.parts, row, arrays, convert, index, num_groups)
    return {
        f"{name.removesuffix('weight')}{part}": Written(
            shape, dtype if kind is None else kind, functools.partial(make, part)
        )
        for part, (shape, kind) in hf_packed.shapes(shape, num_groups, arrays[row.paths[0]]).items()
    }


def _write_tensors(directory: pathlib.Path, tensors: Mapping[str, Written], shard_bytes: int):
    shards, room, total_size = [[]], shard_bytes, 0
    for name, tensor in tensors.items():
        size = math.prod(tensor.shape) * tensor.dtype.itemsize
        if size > room and shards[-1]:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= size
        total_size += size
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = WEIGHTS if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        with open(directory / file, "xb") as out:
            out.write(_header({name: tensors[name] for name in shard}))
            for tensor in map(tensors.get, shard):
                for part in tensor.parts():
                    out.write(np.ascontiguousarray(part, tensor.dtype).reshape(-1).view(np.uint8))
        weight_map |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _header(tensors: Mapping[str, Written]) -> bytes:
    """The beginning of a file of safetensors with these tensors, one behind another."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + math.prod(tensor.shape) * tensor.dtype.itemsize
        header[name] = {
            "dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }  # fmt: skip
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def parts_of(
    row: Tensor, index: tuple[int, ...], arrays: Mapping[str, Any], model: ModelConfig
) -> Iterator[np.ndarray]:
    """A tensor in its file's order; tables of the vocabulary, which are in ours too, by rows."""
    if row.dims[0] != "V":
        sizes = hf_formats.dimension_sizes(model)
        yield to_theirs(row, [np.asarray(arrays[path][index]) for path in row.paths], sizes)
        return
    for start in range(0, model.vocab_size, ROWS):
        yield arrays[row.ours][start : min(start + ROWS, model.vocab_size)]


def load(
    directory: str | pathlib.Path, model: ModelConfig | None = None, *, dtype: str = "float32"
) -> tuple[ModelConfig, dict]:
    """Reads a Hugging Face checkpoint: its model, and its parameters as a nested dict of numpy.

    `directory`, `model` and errors: see `hf_reader.open_checkpoint`. `dtype`: of the parameters
    returned, a name in `hf_reader.DTYPES`.
    """
    numpy_dtype = hf_reader.numpy_dtype(dtype)
    source = hf_reader.open_checkpoint(directory, model)
    whole = {path: (slice(None),) * len(shape) for path, shape in source.shapes.items()}
    arrays = {path: source.part(path, index, numpy_dtype) for path, index in whole.items()}
    return source.model, trees.nest(arrays)
