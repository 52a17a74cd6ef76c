"""The stage of a recipe that packs the weights of a run's products: the last one."""

import dataclasses
from collections.abc import Iterator

from llmx import config as config_lib
from llmx.compress import calibration, quantize, saved
from llmx.compress.quantize import AWQ, GPTQ, NEAREST, SMOOTH, QuantizeConfig
from llmx.model import apply, packed
from llmx.model.apply import Apply
from llmx.model.families import ModelConfig
from llmx.model.packed import PackedConfig
from llmx.runtime.bounds import bounded, choice


@dataclasses.dataclass
class Quantize:
    """Weights of products in 8 or 4 bits; embedding, head, norms, experts stay as they are."""

    format: str = choice("int4", ("int8", "int4"))
    group: int = bounded(128, at_least=0)  # inputs of an output that share a scale; 0 = all
    symmetric: bool = True  # without zero points
    method: str = choice(GPTQ, (NEAREST, GPTQ))
    scaling: str = choice("", ("", AWQ, SMOOTH))  # of inputs, before weights are rounded
    by_importance: bool = False  # GPTQ rounds inputs with the largest squares first
    damping: float = bounded(0.01, above=0)  # of GPTQ
    strength: float = bounded(0.5, at_least=0, at_most=1)  # of SmoothQuant
    activations: str = choice("", ("", "int8"))  # how the run rounds the inputs of products
    calibration_batches: int = bounded(8, at_least=1)  # of the training text

    @property
    def packed(self) -> PackedConfig:
        return PackedConfig(self.format, self.group, self.symmetric)

    @property
    def how(self) -> QuantizeConfig:
        names = [field.name for field in dataclasses.fields(QuantizeConfig)]
        return QuantizeConfig(**{name: vars(self)[name] for name in names})


def run(job) -> None:
    """Packs the run of a folder."""
    options, found = job.options, saved.opened(job.source)
    batches = ()
    if options.how.calibrated:
        batches = saved.training_batches(found, options.calibration_batches)
    loss = found.recipe.loss
    params = quantize.quantized(
        loss.apply, found.params, batches, loss.execution, options.packed, options.how
    )
    config = config_lib.load_run(job.source)
    config.packed = options.packed
    if options.activations:
        config.products.format, config.products.granularity = options.activations, "channel"
        config.products.gather = ""
    saved.written(config, params, job.folder, origin=job.source)


def problems(model: ModelConfig, options: Quantize) -> Iterator[str]:
    """Why a model cannot be quantized so, each with its remedy."""
    yield from packed.problems(options.packed, apply.abstract_parameters(model)[0])
    if options.how.calibrated:
        yield from calibration.problems(Apply(model))
