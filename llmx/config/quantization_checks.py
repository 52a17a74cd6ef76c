"""What can be trained as integers, and what that cannot be combined with."""

from collections.abc import Iterator

from llmx.config import Config
from llmx.model import apply as apply_lib
from llmx.model import families, quantization
from llmx.runtime import bounds


def problems(config: Config) -> Iterator[str]:
    """All problems, each with its remedy."""
    section = config.quantization
    if bounds.problems(section, "quantization."):
        return  # said already
    if not (section.bits or section.activations):
        return
    what = f"quantization.bits={section.bits}"
    if section.activations:
        what += f", quantization.activations={section.activations!r}"
    if not families.problems(config.model) and section.bits:
        shapes, _ = apply_lib.abstract_parameters(config.model)
        yield from quantization.problems(section, shapes)
    if config.model.num_experts:
        yield (
            f"{what} with model.num_experts={config.model.num_experts}: weights of experts are "
            "multiplied in kernels of their own, which round nothing; use a dense model, or leave "
            "the section out"
        )
    if section.activations and config.model.kv_latent:
        yield (
            f"{what} with model.kv_latent={config.model.kv_latent}: decoding multiplies latents in "
            "another order, and would round other numbers; leave quantization.activations out"
        )
    if config.products.format or config.products.gather:
        yield (
            f"{what} with products.format={config.products.format!r} and products.gather="
            f"{config.products.gather!r}, which round the same numbers again: leave one of the "
            "sections out"
        )
    if config.adapters.rank:
        yield (
            f"{what} with adapters.rank={config.adapters.rank}: the weights beside adapters are "
            "frozen; train all parameters, or leave the section out"
        )
    yield from _parallel(config, what)


def _parallel(config: Config, what: str) -> Iterator[str]:
    section, stages = config.quantization, config.mesh.stage
    if section.bits and stages > 1 and config.pipeline.schedule == "pipedream_2bw":
        yield (
            f"{what} with pipeline.schedule='pipedream_2bw', whose gradients are of weights that "
            "were rounded a step before: use another schedule"
        )
    if section.bits and config.offload.parameters:
        yield (
            f"{what} with offload.parameters: all weights are rounded on the device before the "
            "first layer; leave offload.parameters out"
        )
    if section.activations == "average" and stages > 1:
        yield (
            f"quantization.activations='average' with mesh.stage={stages}: the stages of a "
            "pipeline hand out no ranges; use quantization.activations='current'"
        )
