"""Small models of transformers as llmx reads them, with packed weights, on one device."""

import functools
import pathlib
from typing import Any

import jax
import pytest
from support import hf_models

from llmx import sharding
from llmx.checkpoint import hf
from llmx.compress import quantize
from llmx.compress.quantize import QuantizeConfig
from llmx.model import precision
from llmx.model.apply import Apply
from llmx.model.execution import Execution
from llmx.model.families import ModelConfig
from llmx.model.packed import PackedConfig


@functools.cache
def execution() -> Execution:
    mesh = sharding.make_mesh(dict.fromkeys(sharding.AXES, 1), devices=jax.devices()[:1])
    return Execution(
        sharding.Placement(mesh, sharding.make_layout("ddp")), precision.POLICIES["fp32"]
    )


def quantized(
    folder: pathlib.Path, kind: str, values: dict[str, Any], config: PackedConfig
) -> tuple[ModelConfig, Any]:
    """The model with nearest codes; transformers' own is in folder/theirs."""
    transformers = pytest.importorskip("transformers")
    hf_models.make(transformers, kind, values, folder / "theirs")
    model, params = hf.load(folder / "theirs")
    params = jax.device_put(params, jax.NamedSharding(execution().place.mesh, jax.P()))
    how = QuantizeConfig(method="nearest")
    return model, quantize.quantized(Apply(model), params, (), execution(), config, how)
