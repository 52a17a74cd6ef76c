"""A run as one GGUF file, which llama.cpp and its kin load, and transformers reads.

Packed weights become blocks of 32 numbers with a scale in fp16: Q4_0 of int4, Q8_0 of int8, each
code as it is. Other tensors are in fp32. Source of the format: ggml-org/ggml, docs/gguf.md; it is
written by the package `gguf` (the extra quant).
"""

import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmx.checkpoint import hf, hf_formats, hf_packed, writer
from llmx.model import packed
from llmx.model.families import ModelConfig

BLOCK = 32  # numbers of a Q4_0 or Q8_0 block
# By family: the architecture, and whether the two halves of a rotated head are interleaved there.
ARCHITECTURES = {
    "llama3": ("llama", True), "mistral": ("llama", True), "qwen2": ("qwen2", False),
    "qwen3": ("qwen3", False),
}  # fmt: skip
TOKEN, CONTROL = 1, 3  # kinds of tokens


def problems(model: ModelConfig, params: Mapping[str, Any]) -> list[str]:
    """Why a model has no GGUF file, with remedies."""
    found = []
    if model.family not in ARCHITECTURES:
        found.append(
            f"model.family={model.family!r} is not written as GGUF: use one of "
            f"{', '.join(ARCHITECTURES)}, or --to-hf and llama.cpp's own converter"
        )
    if model.rope_scaling != "none":
        found.append(
            f"model.rope_scaling={model.rope_scaling!r} is not written as GGUF: use --to-hf and "
            "llama.cpp's own converter"
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


def export(
    params: Mapping[str, Any], model: ModelConfig, file: str | pathlib.Path, *,
    tokenizer: Mapping[str, Any] | None = None, end_token: int | None = None,
    ends_of_turn: Sequence[int] = (),
) -> None:  # fmt: skip
    """Writes a new file.

    Args:
      params: the model's parameters, a nested dict of numpy or jax arrays, or packed.
      tokenizer: the contents of a tokenizer.json.
      end_token: id of the token that ends a text.
      ends_of_turn: id of the one that ends a turn, if it is another.

    Raises ValueError for `problems` and an existing file, and `writer.Unwritten` where the disk
    takes none.
    """
    import gguf

    if found := problems(model, params):
        raise ValueError("\n".join(found))
    file = pathlib.Path(file)
    if file.exists():
        raise ValueError(f"{file} exists: name a new file")
    name, halves = ARCHITECTURES[model.family]
    out = gguf.GGUFWriter(None, name)
    _describe(out, model)
    if tokenizer is not None:
        _add_tokenizer(out, tokenizer, model.vocab_size, end_token)
        for end in ends_of_turn:
            out.add_eot_token_id(end)
    architecture = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[name]
    names = gguf.get_tensor_name_map(architecture, model.num_layers)
    arrays = hf.checked_params(params, model)
    for theirs, (row, index) in hf_formats.tensor_names(
        model, prefix=hf_formats.FORMATS[model.family].prefix
    ).items():
        heads = {"q_proj": model.num_heads, "k_proj": model.num_kv_heads}
        of_heads = next((num for part, num in heads.items() if f".{part}." in theirs), 0)
        order = functools.partial(_interleaved, heads=of_heads if halves else 0)
        short = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        _add(out, short, row, index, arrays, model, order)
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


def _describe(out: Any, model: ModelConfig) -> None:
    out.add_context_length(model.max_positions)
    out.add_embedding_length(model.width)
    out.add_block_count(model.num_layers)
    out.add_feed_forward_length(model.mlp_dim)
    out.add_head_count(model.num_heads)
    out.add_head_count_kv(model.num_kv_heads)
    out.add_key_length(model.head_dim)
    out.add_value_length(model.head_dim)
    out.add_rope_dimension_count(model.head_dim)
    out.add_rope_freq_base(model.rope_theta)
    out.add_layer_norm_rms_eps(model.norm_eps)
    out.add_vocab_size(model.vocab_size)
    if model.window:
        out.add_sliding_window(model.window)


def _add_tokenizer(
    out: Any, tokenizer: Mapping[str, Any], vocab_size: int, end_token: int | None
) -> None:  # fmt: skip
    """A BPE tokenizer; others are left out, and so is how text is cut before it."""
    vocab, merges = tokenizer["model"].get("vocab"), tokenizer["model"].get("merges")
    if not isinstance(vocab, dict) or merges is None:
        return
    by_id = {number: (text, TOKEN) for text, number in vocab.items()}
    for token in tokenizer.get("added_tokens", []):
        by_id[token["id"]] = token["content"], CONTROL if token["special"] else TOKEN
    tokens = [by_id.get(number, (f"[unused{number}]", CONTROL)) for number in range(vocab_size)]
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("default")
    out.add_token_list([text for text, _ in tokens])
    out.add_token_types([kind for _, kind in tokens])
    # A list of strings has at least one.
    joined = [pair if isinstance(pair, str) else " ".join(pair) for pair in merges]
    out.add_token_merges(joined or ["a b"])
    if end_token is not None:
        out.add_eos_token_id(end_token)
        out.add_bos_token_id(end_token)


def _interleaved(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a weight [out, ...], the two halves of each head in turn: 0 = as they are."""
    if not heads:
        return array
    halves = array.reshape(heads, 2, -1, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def _add(out, name: str, row, index: tuple, arrays: Mapping, model: ModelConfig, order) -> None:
    """One tensor, in blocks if it is packed."""
    import gguf

    leaf = arrays[row.paths[0]]
    if not packed.is_packed(leaf):
        parts = list(hf.parts_of(row, index, arrays, model))
        out.add_tensor(name, order(np.ascontiguousarray(np.concatenate(parts), np.float32)))
        return
    convert = functools.partial(hf.to_theirs, row, sizes=hf_formats.dimension_sizes(model))
    codes, scales = map(order, hf_packed.codes_and_scales(row, arrays, convert, index))
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
