"""Packed weights as `compressed-tensors` stores them, which transformers and vLLM load.

A weight [out, in] is `weight_packed`, int32 words of codes along in, the first in the lowest bits;
`weight_scale` [out, groups]; `weight_shape`; and where groups have zero points
`weight_zero_point`, words along out. Its format "pack-quantized".
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from llmx.checkpoint.hf_tables import Tensor
from llmx.model import packed
from llmx.model.packed import Packed

WORD = 32  # bits


def shape_of(leaf: Any) -> tuple[int, ...]:
    """Of a parameter; of a packed one, that of the weight."""
    if not packed.is_packed(leaf):
        return tuple(leaf.shape)
    return packed.shape_of(leaf)


def quantization_config(names: Mapping[str, tuple], arrays: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json says of packed weights; {} where there are none.

    names: of tensors, with their row and index.

    Raises ValueError where that is not what the weights are.
    """
    leaves = [leaf for leaf in arrays.values() if packed.is_packed(leaf)]
    if not leaves:
        return {}
    inputs = [packed.inputs_of(leaf) for leaf in leaves]
    groups = {size // num if num > 1 else 0 for size, num in inputs}
    one_group = {size for size, num in inputs if num == 1}
    # A product with as many inputs as a group has one scale, like one that has no groups.
    group = max(groups)
    grouped = group and one_group <= {group}
    weights = {
        "num_bits": leaves[0].bits, "type": "int", "symmetric": leaves[0].zero is None,
        "strategy": "group" if grouped else "channel", "group_size": group if grouped else None,
        "dynamic": False,
    }  # fmt: skip
    kept = [
        name.removesuffix(".weight") for name, (row, _) in names.items()
        if name.endswith(".weight") and len(row.groups.split(",")) == 2
        and not any(packed.is_packed(arrays[path]) for path in row.paths)
        and "embed" not in name
    ]  # fmt: skip
    ignored = sorted({"lm_head", *kept})
    for name, (row, _) in names.items():
        module = name.removesuffix(".weight")
        read = None if module in ignored or module == name or "embed" in name else weights
        for path in row.paths:
            _require_as_read(name, arrays[path], read)
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors", "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": ignored,
        }
    }  # fmt: skip


def _require_as_read(name: str, leaf: Any, read: Mapping[str, Any] | None) -> None:
    """Raises ValueError where config.json's one rule for packed weights is not this one's; `read`:
    the rule, None = it says that the weight is not packed."""
    is_packed = packed.is_packed(leaf)
    if is_packed and read:
        size, groups = packed.inputs_of(leaf)
        own = leaf.bits, leaf.zero is None, size // groups
        if own == (read["num_bits"], read["symmetric"], read["group_size"] or size):
            return
    elif not is_packed and (not read or len(leaf.shape) < 3):
        return
    stored = f"{leaf.bits} bits of {packed.inputs_of(leaf)}" if is_packed else "not packed"
    raise ValueError(
        f"{name} is {stored} (inputs, groups), and config.json has one rule for all, {read}: pack "
        "all products with one format, group and symmetric"
    )


def shape_and_groups(
    name: str, row: Tensor, arrays: Mapping[str, Any], convert: Callable, index: tuple[int, ...]
) -> tuple[tuple[int, int], int]:
    """Of one tensor its shape, [out, in], and how many groups an output has.

    Raises ValueError for a tensor that is no Linear module's.
    """
    leaf = arrays[row.paths[0]]
    _, num_groups = packed.inputs_of(leaf)
    probe = [np.zeros(shape_of(arrays[path])[len(index) :], np.int8) for path in row.paths]
    for each, path in zip(probe, row.paths, strict=True):
        inputs = each.ndim - arrays[path].outputs
        each[(slice(None),) * inputs + (0,) * arrays[path].outputs] = 1
    theirs = convert(probe)  # 1 for one of the outputs
    if theirs.ndim != 2 or not theirs.any(0).all():
        raise ValueError(
            f"{name} is stored as [in, out], and compressed-tensors packs weights [out, in] of "
            "Linear modules: export the run that was quantized"
        )
    return theirs.shape, num_groups


def shapes(shape: tuple[int, int], num_groups: int, leaf: Packed) -> dict[str, tuple]:
    """Of each part its shape and dtype; None = that of unpacked tensors."""
    rows, columns = shape
    words = lambda number: -(-number * leaf.bits // WORD)  # noqa: E731
    found = {
        "weight_packed": ((rows, words(columns)), np.dtype(np.int32)),
        "weight_scale": ((rows, num_groups), None),
        "weight_shape": ((2,), np.dtype(np.int64)),
    }
    if leaf.zero is not None:
        found["weight_zero_point"] = ((words(rows), num_groups), np.dtype(np.int32))
    return found


def parts(
    row: Tensor, arrays: Mapping[str, Any], convert: Callable, index: tuple[int, ...],
    num_groups: int, part: str,
) -> list[np.ndarray]:  # fmt: skip
    """One part of a packed tensor."""
    codes, scales, *zeros = codes_and_scales(row, arrays, convert, index)
    bits, step = arrays[row.paths[0]].bits, codes.shape[1] // num_groups
    match part:
        case "weight_packed":
            return [words_of(codes, bits)]
        case "weight_scale":
            return [scales[:, ::step]]
        case "weight_shape":
            return [np.array(codes.shape)]
        case _:
            return [words_of(zeros[0][:, ::step].T, bits).T]


def codes_and_scales(
    row: Tensor, arrays: Mapping[str, Any], convert: Callable, index: tuple[int, ...]
) -> list[np.ndarray]:
    """Codes [out, in] from 0 on of a packed tensor, the scale of each, and its zero point where
    there are such."""
    found: list[list[np.ndarray]] = [[], [], []]
    for path in row.paths:
        leaf = arrays[path]
        leaf = dataclasses.replace(
            leaf, codes=np.asarray(leaf.codes[index]), scale=np.asarray(leaf.scale[index]),
            zero=None if leaf.zero is None else np.asarray(leaf.zero[index]),
        )  # fmt: skip
        shape, whole = packed.shape_of(leaf), packed.codes_of(leaf)
        for kind, array in zip(found, whole, strict=True):
            if array is not None:
                of_each = np.repeat(array, len(whole[0]) // len(array), axis=0)
                kind.append(of_each.reshape(shape))
    return [convert(kind) for kind in found if kind]


def words_of(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [rows, columns] from 0 on as words [rows, columns * bits / 32], int32."""
    number = WORD // bits
    codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % number))).astype(np.uint32)
    codes = codes.reshape(len(codes), -1, number)
    words = np.bitwise_or.reduce(codes << (bits * np.arange(number, dtype=np.uint32)), axis=-1)
    return words.view(np.int32)
