"""What a config takes from the place that `start_from` names: the model, if the config names none,
and the tokenizer."""

import dataclasses
import os

from llmx import config as config_lib
from llmx.checkpoint import identity
from llmx.config import Config
from llmx.data import remote, sources, tokenizers
from llmx.model.families import ModelConfig


def problem(config: Config) -> str:
    """Why a run cannot start from there; "" = it can, as far as the names of files tell."""
    if not config.start_from:
        return ""
    from llmx.checkpoint import hf_reader

    if text := remote.refusal("start_from=", config.start_from, "copy it to a local one first"):
        return text
    place, step = identity.origin(config.start_from)
    if hf_reader.is_checkpoint(place) and step is not None:
        return (
            f"start_from={config.start_from!r} names a step of a Hugging Face checkpoint, which "
            f"has none: use {place!r}"
        )
    is_run = os.path.isdir(os.path.join(place, "checkpoints"))
    if is_run or hf_reader.is_checkpoint(place):
        return ""
    return (
        f"start_from={config.start_from!r} holds no checkpoints: name the workdir of a run, "
        "or a directory of Hugging Face with config.json and safetensors"
    )


def adopted(config: Config) -> Config:
    """A copy with the model of `start_from`, where the config's is the default, and with its
    tokenizer, where the config leaves that open.

    Raises ValueError where the files there cannot be read, or the tokenizer is missing.
    """
    if not config.start_from or problem(config):
        return config
    from llmx.checkpoint import hf_reader

    place, _ = identity.origin(config.start_from)
    changes = {}
    if config.model == ModelConfig():
        changes["model"] = model_of(place)
    of_shards = any(name.startswith(sources.SHARDS_PREFIX) for name in config.data.sources)
    if config.data.tokenizer == "auto" and not (config.data.train_tokenizer or of_shards):
        file = os.path.join(place, tokenizers.FILE_NAME)
        if os.path.isfile(file):
            changes["data"] = dataclasses.replace(config.data, tokenizer=file)
        elif hf_reader.is_checkpoint(place):
            raise ValueError(
                f"start_from={config.start_from!r} has no {tokenizers.FILE_NAME}, and "
                "data.tokenizer='auto' would choose another tokenizer than its model was trained "
                "with: set data.tokenizer to that one"
            )
    return dataclasses.replace(config, **changes)


def model_of(place: str) -> ModelConfig:
    """The model of a work directory, or of a Hugging Face checkpoint. Raises ValueError."""
    from llmx.checkpoint import hf_reader

    if hf_reader.is_checkpoint(place):
        return hf_reader.read_model(place)
    return config_lib.load_run(place).model
