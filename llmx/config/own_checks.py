"""What a model in the place of the decoder cannot be combined with: one that a program gives as an
object (`llmx.model.own`), or one of clicks."""

from collections.abc import Iterator

from llmx.config import Config
from llmx.data import pairs
from llmx.model import apply, own
from llmx.step.transforms.masks import PruningConfig

# Values that are the decoder's, by key, and why.
DECODERS = {
    "remat": ("none", "put jax.checkpoint around the model's own layers"),
    "adapters.rank": (0, "adapters are of the decoder's products"),
    "model.ranks": ((), "factors are of the decoder's products"),
    "model.repeats": (1, "the model's layers are its own"),
    "model.embedding_rank": (0, "the embedding is the model's own"),
    "pruning.method": (PruningConfig().method, "masks are of the decoder's products"),
    "packed.format": ("", "packed weights are of the decoder's products"),
    "distillation.teacher": ("", "students are decoders"),
    "distillation.top_k": (0, "students are decoders"),
    "start_from_layers": ((), "layers are chosen of decoders"),
    "products.format": ("", "the model's products are its own"),
    "sharding.gather": ("layer", "the compiler gathers the model's weights where it wants"),
    "sharding.turns": (0, "the model's layers are its own"),
    "offload.parameters": (False, "the model would have to fetch them"),
    "offload.optimizer": (False, "its layers are not known one by one"),
    "offload.saves": ((), "the model says what is saved"),
    "mesh.stage": (1, "stages are of the decoder's layers"),
    "mesh.sequence": (1, "attention over several devices is the decoder's"),
    "mesh.expert": (1, "experts are the decoder's"),
    "sync.strategy": ("mean", "replicas by themselves are of the decoder"),
    "evaluation.choices": ((), "its scores of choices are the decoder's"),
    "sample.prompt": ("", "generation is the decoder's"),
}


def problems(config: Config) -> Iterator[str]:
    """All problems, each with its remedy."""
    name, why_not = config.model.own, "model.own"
    if config.model.recommender.name:
        name, why_not = config.model.recommender.name, "model.recommender.name"
    for key, (wanted, why) in DECODERS.items():
        if key == "sync.strategy" and config.model.recommender.name:
            continue  # whose program is written for replicas too
        value = _value(config, key)
        if value != wanted and value is not None:
            yield f"{key}={value!r} with {why_not}={name!r}: {why}; use {key}={wanted!r}"
    if config.data.format == pairs.FORMAT:
        yield f"data.format={pairs.FORMAT!r} with {why_not}={name!r}: use data.format='text'"
    if config.optimizer.name == "muon":
        yield (
            f"optimizer.name='muon' with {why_not}={name!r}: which dimensions a matrix contracts "
            "is known of the decoder only; use 'adamw', or pass an optimizer of your own"
        )
    if config.model.recommender.name:
        return
    if found := own.problems(name):
        yield from found
        return
    try:
        apply.abstract_parameters(config.model)
    except (TypeError, ValueError) as error:
        text = str(error)
        yield text if text.startswith("model.own") else f"model.own={name!r}: {text}"


def _value(config: Config, key: str):
    section, _, name = key.rpartition(".")
    return vars(vars(config)[section] if section else config)[name]
