"""A run as one GGUF file, which llama.cpp and its kin load, and transformers reads.

Packed weights become blocks of 32 numbers with a scale in fp16: Q4_0 of int4, Q8_0 of int8, each
code as it is. Other matrices are in fp32, fp16 or bf16. What the file's reader will compute is
compared with the model: `read_back`. Source of the format: ggml-org/ggml, docs/gguf.md; it is
written by the package `gguf` (the extra quant).
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmx.checkpoint import gguf_tokenizer, hf, hf_formats, hf_packed, hf_reader, writer
from llmx.checkpoint.hf_values import HINTS
from llmx.model import families, packed
from llmx.model.families import ModelConfig

BLOCK = 32  # numbers of a Q4_0 or Q8_0 block
# By family: the architecture, and whether the two halves of a rotated head are interleaved there.
ARCHITECTURES = {
    "llama3": ("llama", True), "mistral": ("llama", True), "qwen2": ("qwen2", False),
    "qwen3": ("qwen3", False),
}  # fmt: skip
# The family as which an architecture is computed: of it is all that a file does not say.
COMPUTED_AS = {"llama": "llama3", "qwen2": "qwen2", "qwen3": "qwen3"}
# Our field -> key behind the architecture's name.
KEYS = {
    "max_positions": "context_length", "width": "embedding_length", "num_layers": "block_count",
    "mlp_dim": "feed_forward_length", "num_heads": "attention.head_count",
    "num_kv_heads": "attention.head_count_kv", "head_dim": "attention.key_length",
    "rope_theta": "rope.freq_base", "norm_eps": "attention.layer_norm_rms_epsilon",
    "vocab_size": "vocab_size",
}  # fmt: skip
# Whose query weights llama.cpp takes for width x width, whatever the file says of heads.
HEADS_OF_WIDTH = ("qwen2",)
OF_HEADS = ("attention.value_length", "rope.dimension_count")  # the same as "head_dim"


def problems(model: ModelConfig, params: Mapping[str, Any]) -> list[str]:
    """Why a model has no GGUF file, with remedies."""
    found = []
    if model.family not in ARCHITECTURES:
        found.append(
            f"model.family={model.family!r} is not written as GGUF: use one of "
            f"{', '.join(ARCHITECTURES)}, or --to-hf and llama.cpp's own converter"
        )
    elif different := hf_formats.differences(model, read_back(model), ignore=("family",)):
        name, _ = ARCHITECTURES[model.family]
        found.append(
            f"a GGUF file of architecture {name!r} cannot represent {different}: change the "
            "model, or see whether --to-hf can"
        )
    for name, leaf in packed.named(params).items():
        if not packed.is_packed(leaf):
            continue
        inputs, groups = packed.inputs_of(leaf)
        if leaf.zero is not None:
            found.append(f"{name} has zero points, and Q4_0 and Q8_0 none: use symmetric=True")
        elif (inputs // groups) % BLOCK:
            found.append(
                f"{name} has a scale for each {inputs // groups} inputs, and GGUF one for each "
                f"{BLOCK}: use a group that is a multiple of {BLOCK}"
            )
    return found


def read_back(model: ModelConfig) -> ModelConfig:
    """The model that llama.cpp computes of the file of a model: by its keys, by which tensors it
    has, and else by its architecture."""
    name, _ = ARCHITECTURES[model.family]
    tensors = {row.ours for row in hf_formats.rows(model)}
    values = _metadata(model)
    if name in HEADS_OF_WIDTH:
        values[KEYS["head_dim"]] = model.width // model.num_heads
    return dataclasses.replace(
        families.preset(COMPUTED_AS[name]), **{field: values[key] for field, key in KEYS.items()},
        tied_head="head" not in tensors, qkv_bias="blocks/attention/query/bias" in tensors,
        qk_norm="blocks/attention/query_norm/scale" in tensors,
    )  # fmt: skip


def _metadata(model: ModelConfig) -> dict[str, int | float]:
    """What a file says of a model, by keys without the architecture's name."""
    values = {key: _stored(HINTS[field](vars(model)[field])) for field, key in KEYS.items()}
    return values | dict.fromkeys(OF_HEADS, model.head_dim)


def _stored(value: int | float) -> int | float:
    """A number as a file has it, but for rounding: floats are of 32 bits."""
    if isinstance(value, int):
        return value
    with np.errstate(over="ignore"):
        stored = float(np.float32(value))
    return value if math.isclose(stored, value, rel_tol=1e-6) else stored


def export(
    params: Mapping[str, Any], model: ModelConfig, file: str | pathlib.Path, *,
    tokenizer: Mapping[str, Any] | None = None, end_token: int | Sequence[int] | None = None,
    names: Mapping[str, str] | None = None, template: str = "", dtype: str = "float32",
) -> list[str]:  # fmt: skip
    """Writes a new file, and returns lines on what it does not say of the tokenizer.

    Args:
      params: the model's parameters, a nested dict of numpy or jax arrays, or packed.
      tokenizer: the contents of a tokenizer.json.
      end_token: id of the token that ends a text, or of several, the tokenizer's own first.
      names, template: {"bos_token": "<s>", ...} and the chat template of the tokenizer.
      dtype: of matrices that are not packed, a name in `hf_reader.DTYPES`; vectors are in float32.

    Raises ValueError for `problems`, an existing file and numbers that the dtype does not hold, and
    `writer.Unwritten` where the disk takes none.
    """
    import gguf

    if found := problems(model, params):
        raise ValueError("\n".join(found))
    file = pathlib.Path(file)
    if file.exists():
        raise ValueError(f"{file} exists: name a new file")
    name, halves = ARCHITECTURES[model.family]
    out = _writer(name)
    metadata, lines = {f"{name}.{key}": value for key, value in _metadata(model).items()}, []
    if tokenizer is not None:
        ends = [end_token] if isinstance(end_token, int) else list(end_token or ())
        of_tokenizer, lines = gguf_tokenizer.metadata(
            tokenizer, model.vocab_size, names=names, end_tokens=ends, template=template
        )
        metadata |= of_tokenizer
    for key, value in metadata.items():
        _add_value(out, key, value)
    architecture = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[name]
    tensor_map = gguf.get_tensor_name_map(architecture, model.num_layers)
    arrays = hf.checked_params(params, model)
    for theirs, (row, index) in hf_formats.tensor_names(
        model, prefix=hf_formats.FORMATS[model.family].prefix
    ).items():
        heads = {"q_proj": model.num_heads, "k_proj": model.num_kv_heads}
        of_heads = next((num for part, num in heads.items() if f".{part}." in theirs), 0)
        order = functools.partial(_interleaved, heads=of_heads if halves else 0)
        short = tensor_map.get_name(theirs, try_suffixes=(".weight", ".bias"))
        _add(out, short, row, index, arrays, model, order, dtype)
    temporary = file.with_name(f".{file.name}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        out.write_header_to_file(temporary)
        out.write_kv_data_to_file()
        out.write_tensors_to_file()
        out.close()
        temporary.replace(file)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        cause, remedy = writer.reason(error)
        raise writer.Unwritten(f"{file} cannot be written: {cause}: {remedy}") from error
    return lines


def _writer(architecture: str) -> Any:
    """The library's, that also takes an empty list of strings: merges of a tokenizer of bytes."""
    import gguf

    class Writer(gguf.GGUFWriter):
        def _pack_val(self, val, vtype, add_vtype, sub_type=None):
            if vtype is not gguf.GGUFValueType.ARRAY or val:
                return super()._pack_val(val, vtype, add_vtype, sub_type)
            kinds = (
                (vtype, gguf.GGUFValueType.STRING) if add_vtype else (gguf.GGUFValueType.STRING,)
            )
            return b"".join(self._pack("I", kind) for kind in kinds) + self._pack("Q", 0)

    return Writer(None, architecture)


def _add_value(out: Any, key: str, value: Any) -> None:
    import gguf

    kinds = gguf.GGUFValueType
    of_type = {
        str: kinds.STRING, bool: kinds.BOOL, int: kinds.UINT32, float: kinds.FLOAT32,
        list: kinds.ARRAY,
    }  # fmt: skip
    out.add_key_value(key, value, of_type[type(value)])


def _interleaved(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a weight [out, ...], the two halves of each head in turn: 0 = as they are."""
    if not heads:
        return array
    halves = array.reshape(heads, 2, -1, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def _add(
    out, name: str, row, index: tuple, arrays: Mapping, model: ModelConfig, order, dtype: str
) -> None:
    """One tensor, in blocks if it is packed."""
    import gguf

    leaf = arrays[row.paths[0]]
    if not packed.is_packed(leaf):
        parts = list(hf.parts_of(row, index, arrays, model))
        whole = order(np.ascontiguousarray(np.concatenate(parts), np.float32))
        kind = hf_reader.numpy_dtype(dtype if whole.ndim > 1 else "float32")
        with np.errstate(over="ignore"):
            stored = whole.astype(kind)
        if np.isfinite(whole).all() > np.isfinite(stored).all():
            raise ValueError(
                f"{name} has numbers up to {np.abs(whole).max():g}, beyond {dtype}: use --dtype "
                "bfloat16 or float32"
            )
        # The library knows no bfloat16 of numpy.
        raw = gguf.GGMLQuantizationType.BF16 if dtype == "bfloat16" and whole.ndim > 1 else None
        out.add_tensor(name, stored if raw is None else stored.view(np.uint8), raw_dtype=raw)
        return
    convert = functools.partial(hf.to_theirs, row, sizes=hf_formats.dimension_sizes(model))
    codes, scales = map(order, hf_packed.codes_and_scales(row, arrays, convert, index))
    if scales.max() > np.finfo(np.float16).max:
        raise ValueError(
            f"{name} has scales up to {scales.max():g}, and blocks of GGUF have them in fp16: use "
            "--to-hf"
        )
    kind = gguf.GGMLQuantizationType.Q4_0 if leaf.bits == 4 else gguf.GGMLQuantizationType.Q8_0
    out.add_tensor(name, blocks_of(codes, scales, leaf.bits), raw_dtype=kind)


def blocks_of(codes: np.ndarray, scales: np.ndarray, bits: int) -> np.ndarray:
    """Codes [out, in] from 0 on and the scale of each as bytes [out, blocks * size of one]."""
    rows = len(codes)
    codes = codes.reshape(rows, -1, BLOCK)
    scale = scales.reshape(codes.shape)[..., :1].astype(np.float16).view(np.uint8)
    if bits == 4:  # the first half of a block in the low bits
        low, high = np.split(codes.astype(np.uint8), 2, axis=-1)
        numbers = low | high << 4
    else:
        numbers = (codes - 128).astype(np.int8).view(np.uint8)
    return np.concatenate([scale, numbers], axis=-1).reshape(rows, -1)
