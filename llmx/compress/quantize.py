"""Post-training quantization: a trained model with the weights of its products packed.

Embedding, head, norms, biases, routers and experts stay as they are.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from llmx.compress import calibration, rounding, scaling
from llmx.compress.calibration import Layer
from llmx.contract import Batch
from llmx.model import adapters, packed
from llmx.model.apply import Apply
from llmx.model.execution import Execution
from llmx.model.families import ModelConfig
from llmx.model.observed import Statistics
from llmx.model.packed import PackedConfig
from llmx.runtime.bounds import bounded, choice

NEAREST, GPTQ = "nearest", "gptq"
AWQ, SMOOTH = "awq", "smooth"


@dataclasses.dataclass
class QuantizeConfig:
    """How weights of `PackedConfig` are found."""

    method: str = choice(GPTQ, (NEAREST, GPTQ))  # of rounding
    # of inputs before it, without a change of the model: "awq" for weights of few bits, "smooth"
    # for activations that are rounded too
    scaling: str = choice("", ("", AWQ, SMOOTH))
    # GPTQ: inputs with the largest squares first, with the scales of the weights as they were
    by_importance: bool = False
    damping: float = bounded(0.01, above=0)  # GPTQ: share of the mean of the diagonal, added to it
    # SmoothQuant: how much of the range goes from activations to weights
    strength: float = bounded(0.5, at_least=0, at_most=1)

    @property
    def calibrated(self) -> bool:
        """Whether it takes text."""
        return self.method == GPTQ or bool(self.scaling)


def problems(
    apply: Apply, params: Any, config: PackedConfig, how: QuantizeConfig, num_batches: int
) -> Iterator[str]:
    """Why a model cannot be quantized so, with remedies."""
    if not config.format:
        yield "packed.format='' packs nothing: use 'int8' or 'int4'"
        return
    yield from packed.problems(config, params)
    if how.calibrated:
        yield from calibration.problems(apply)
        if not num_batches:
            yield "no calibration text: give batches, or use method='nearest' with scaling=''"


def quantized(
    apply: Apply, params: dict, batches: Sequence[Batch], execution: Execution,
    config: PackedConfig, how: QuantizeConfig,
) -> dict:  # fmt: skip
    """The parameters with `Packed` in the place of the weights of products.

    Args:
      params: of the model in fp32, on the mesh of `execution`, which has no stages.
      batches: calibration text, see `calibration.layer_by_layer`; () where `how` takes none.

    Communicates as `calibration.layer_by_layer`. Raises ValueError for what `problems` finds.
    """
    if found := list(problems(apply, params, config, how, len(batches))):
        raise ValueError("\n".join(found))

    def change(layer: Layer) -> dict[str, Any]:
        model = apply.first_layers.model if layer.stack == "first" else apply.model
        return of_layer(model, layer.weights, layer.statistics, config, how)

    batches = batches if how.calibrated else ()
    return calibration.layer_by_layer(apply, params, batches, execution, change)


def of_layer(
    model: ModelConfig, weights: Mapping[str, jax.Array], statistics: Mapping[str, Statistics],
    config: PackedConfig, how: QuantizeConfig,
) -> dict[str, Any]:  # fmt: skip
    """A layer's weights by name, those of products as `Packed`, others as they were or scaled.

    Weights that are codes already keep them, whatever the method, see `rounding.own_codes`.
    """
    new = {name: weight.astype(jnp.float32) for name, weight in weights.items()}
    if how.scaling == AWQ:
        new, statistics = scaling.awq(model, new, statistics, config)
    elif how.scaling == SMOOTH:
        new, statistics = scaling.smoothed(model, new, statistics, strength=how.strength)
    for name in calibration.products(weights):
        weight_IO, shape = scaling.matrix(new, name), weights[name].shape
        if (own := rounding.own_codes(weight_IO, config=config)) is not None:
            rounded = own
        elif how.method == GPTQ:
            rounded = rounding.gptq(
                weight_IO, statistics[name].gram_II, config=config,
                by_importance=how.by_importance, damping=how.damping,
            )  # fmt: skip
        else:
            rounded = rounding.nearest(weight_IO, config=config)
        outputs = len(shape) - adapters.contracted(name)
        new[name] = packed.pack(*rounded, config, shape, outputs)
    return new
