"""Adapters as files that PEFT loads beside the model that they were trained on.

Source: `LoraConfig` and `get_peft_model_state_dict` of https://github.com/huggingface/peft.
"""

import json
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from llmx.checkpoint import hf_formats, writer
from llmx.checkpoint.hf_tables import FORMATS, Tensor
from llmx.data import full_disk
from llmx.model.adapters import DOWN, UP, AdaptersConfig, contracted
from llmx.model.families import ModelConfig
from llmx.sharding import trees

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def export(
    adapters: Any, config: AdaptersConfig, model: ModelConfig, directory: str | pathlib.Path, *,
    base: str = "",
) -> pathlib.Path:  # fmt: skip
    """Writes a directory that `peft.PeftModel.from_pretrained` loads.

    Weights that a family keeps fused in one tensor get one adapter of the rank of all their own.

    Args:
      adapters: a nested dict of numpy or jax arrays, layers in the model's order.
      directory: new or empty. adapter_config.json is written last.
      base: the model's Hugging Face directory or name, if it is known.

    Raises ValueError if a checkpoint of the family cannot represent the model, to which PEFT adds
    them, and `writer.Unwritten` where the disk takes none; then no files are left.
    """
    from safetensors.numpy import save_file

    directory = pathlib.Path(directory)
    hf_formats.model_config_to_hf(model)
    arrays = {name: np.asarray(leaf, np.float32) for name, leaf in trees.named(adapters).items()}
    if model.num_experts and (of_mlp := [name for name in arrays if "/mlp/" in name]):
        raise ValueError(
            f"{of_mlp[0]}: beside experts PEFT takes adapters of these names for those of experts; "
            "export the merged model with --to-hf, or train with adapters.products=('attention',)"
        )
    tensors = dict(_tensors(arrays, config, model))
    with writer.filling(directory, last=CONFIG):
        save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
        text = json.dumps(_config(arrays, config, model, base), indent=2) + "\n"
        full_disk.write_atomically(directory / CONFIG, text.encode())
    return directory


def _adapted_rows(arrays: Mapping[str, Any], model: ModelConfig) -> Iterator[tuple[Tensor, list]]:
    """The rows of the family's table with an adapter, and which of their parts have one."""
    for row in hf_formats.rows(model):
        numbers = [n for n, path in enumerate(row.paths) if f"{path}/{DOWN}" in arrays]
        if numbers:
            yield row, numbers


def _tensors(
    arrays: Mapping[str, np.ndarray], config: AdaptersConfig, model: ModelConfig
) -> Iterator[tuple[str, np.ndarray]]:
    """Names and values of A [rank, inputs] and B [outputs, rank], of each layer."""
    rank, prefix = config.rank, FORMATS[model.family].prefix
    adapted = {row.ours: numbers for row, numbers in _adapted_rows(arrays, model)}
    shapes = {}
    for row, _ in _adapted_rows(arrays, model):
        shapes |= hf_formats.our_shapes(row, model)
    for name, (row, index) in hf_formats.tensor_names(model, prefix=prefix).items():
        if row.ours not in adapted:
            continue
        downs, ups, first, outputs = [], [], 0, 0
        for number, path in enumerate(row.paths):
            size = _outputs(path, shapes[path])
            if number in adapted[row.ours]:
                downs.append(arrays[f"{path}/{DOWN}"][index].reshape(-1, rank).T)
                ups.append((outputs, arrays[f"{path}/{UP}"][index].reshape(rank, -1).T))
            outputs += size
        up = np.zeros((outputs, rank * len(ups)), np.float32)
        for row_of, part in ups:
            up[row_of : row_of + part.shape[0], first : first + rank] = part
            first += rank
        module = f"base_model.model.{name.removesuffix('.weight')}"
        yield f"{module}.lora_A.weight", np.ascontiguousarray(np.concatenate(downs))
        yield f"{module}.lora_B.weight", up


def _outputs(path: str, shape: tuple[int, ...]) -> int:
    """Of a stacked weight, the numbers that its product makes."""
    return math.prod(shape[1 + contracted(path) :])


def _config(
    arrays: Mapping[str, Any], config: AdaptersConfig, model: ModelConfig, base: str
) -> dict[str, Any]:
    """The content of adapter_config.json."""
    modules, ranks, alphas, input_first = [], {}, {}, False
    for row, numbers in _adapted_rows(arrays, model):
        # Of "layers.*.self_attn.q_proj.weight"; the end of a name is enough to find it.
        module = row.theirs.removesuffix(".weight").partition("*.")[2]
        modules.append(module)
        if len(row.paths) > 1:
            ranks[module] = config.rank * len(numbers)
            alphas[module] = config.alpha * len(numbers)
        # GPT-2's weights are stored input first.
        input_first |= row.dims[0] == row.groups[0]
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base or None,
        "r": config.rank, "lora_alpha": config.alpha, "lora_dropout": 0.0, "bias": "none",
        "target_modules": sorted(set(modules)), "rank_pattern": ranks, "alpha_pattern": alphas,
        "fan_in_fan_out": input_first, "inference_mode": True, "use_rslora": False,
        "use_dora": False, "init_lora_weights": True, "modules_to_save": None,
    }  # fmt: skip
