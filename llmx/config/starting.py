"""What a config takes from the place that `start_from` names: the model, if the config names none,
and the tokenizer."""

import dataclasses
import os
import pathlib

from llmx import config as config_lib
from llmx.checkpoint import identity
from llmx.config import Config
from llmx.data import remote, sources, tokenizers
from llmx.model.families import ModelConfig


def problem(config: Config) -> str:
    """Why a run cannot start from there; "" = it can, as far as the names of files tell, or it has
    begun already and needs nothing from there."""
    found = _problem(config) if config.start_from else ""
    return "" if found and _begun(config) else found


def _begun(config: Config) -> str:
    """A local folder with the config and tokenizer of the run itself, where it has a checkpoint;
    "" = it has none."""
    from llmx.checkpoint import copies, directory

    if not remote.is_url(config.workdir):
        complete = directory.steps(pathlib.Path(config.workdir, "checkpoints"))
        return config.workdir if config.workdir and complete else ""
    try:
        found = copies.find("workdir=", config.workdir)
        return found.small() if found.steps else ""
    except (ValueError, OSError):
        return ""


def _problem(config: Config) -> str:
    from llmx.checkpoint import copies, hf_reader

    if remote.is_url(config.start_from):
        try:
            return copies.find("start_from=", config.start_from).problem()
        except ValueError as error:
            return str(error)
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
    is_gone = bool(config.start_from and _problem(config))
    if not config.start_from or (is_gone and not _begun(config)):
        return config
    of_shards = any(name.startswith(sources.SHARDS_PREFIX) for name in config.data.sources)
    takes_tokenizer = config.data.tokenizer == "auto" and not (
        config.data.train_tokenizer or of_shards
    )
    takes_model = config.model == ModelConfig()
    if not (takes_model or takes_tokenizer):
        return config
    place, is_hugging_face = (_begun(config), False) if is_gone else _readable(config.start_from)
    changes = {}
    if takes_model:
        changes["model"] = _model_of(place, is_hugging_face)
    if takes_tokenizer:
        file = os.path.join(place, tokenizers.FILE_NAME)
        if os.path.isfile(file):
            changes["data"] = dataclasses.replace(config.data, tokenizer=file)
        elif is_hugging_face:
            raise ValueError(
                f"start_from={config.start_from!r} has no {tokenizers.FILE_NAME}, and "
                "data.tokenizer='auto' would choose another tokenizer than its model was trained "
                "with: set data.tokenizer to that one"
            )
    return dataclasses.replace(config, **changes)


def _readable(start_from: str) -> tuple[str, bool]:
    """A local folder with the config and tokenizer, and whether they are of Hugging Face."""
    from llmx.checkpoint import copies, hf_reader

    if remote.is_url(start_from):
        found = copies.find("start_from=", start_from)
        return found.small(), found.is_hugging_face
    place, _ = identity.origin(start_from)
    return place, hf_reader.is_checkpoint(place)


def _model_of(place: str, is_hugging_face: bool) -> ModelConfig:
    """The model of a work directory, or of a Hugging Face checkpoint. Raises ValueError."""
    from llmx.checkpoint import hf_reader

    return hf_reader.read_model(place) if is_hugging_face else config_lib.load_run(place).model
