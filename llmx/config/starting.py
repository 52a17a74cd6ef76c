"""What a config takes from the place that `start_from` names: the model, if the config names none,
and the tokenizer."""

import dataclasses
import json
import os
import pathlib

from llmx import config as config_lib
from llmx.checkpoint import identity
from llmx.config import Config, effects
from llmx.data import json_files, remote, sources, tokenizers, transient
from llmx.model import chosen_layers
from llmx.model.families import ModelConfig
from llmx.tables import exports


def problem(config: Config) -> str:
    """Why a run cannot start from there; "" = it can, as far as the names of files tell, or it has
    begun already and needs nothing from there."""
    if not config.start_from or exports.is_export(config.start_from):
        return ""
    found = place_problem("start_from", config.start_from)
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
    except (ValueError, OSError) as error:
        if transient.is_transient(error):
            raise
        return ""


def place_problem(option: str, place: str) -> str:
    """Why no parameters can be read from a place that a key names; "" = they can, as far as the
    names of files tell."""
    from llmx.checkpoint import copies, hf_reader

    named = f"{option}={place!r}"
    if remote.is_url(place):
        try:
            return copies.find(f"{option}=", place).problem()
        except ValueError as error:
            if transient.is_transient(error):
                raise
            return str(error)
    folder, step = identity.origin(place)
    try:
        of_hf = hf_reader.is_checkpoint(folder)
    except OSError as error:
        if transient.is_transient(error):
            raise
        return f"{option}={json_files.shown(place)} cannot be read: {error.strerror}"
    if of_hf and step is not None:
        return f"{named} names a step of a Hugging Face checkpoint, which has none: use {folder!r}"
    is_run = os.path.isdir(os.path.join(folder, "checkpoints"))
    if is_run and (form := _packed(folder)):
        return (
            f"{named} has packed weights (packed.format={form!r}), which have no gradient: name "
            "the run that was quantized"
        )
    if is_run or of_hf:
        return ""
    return (
        f"{named} holds no checkpoints: name the workdir of a run, "
        "or a directory of Hugging Face with config.json and safetensors"
    )


def _packed(workdir: str) -> str:
    """`packed.format` of a run; "" = its weights are not packed, or it does not say."""
    try:
        with open(os.path.join(workdir, "config.json"), encoding="utf-8") as file:
            return json.load(file)["packed"]["format"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def adopted(config: Config) -> Config:
    """A copy with the model of `start_from`, where the config's is the default, and with its
    tokenizer, where the config leaves that open.

    Raises ValueError where the files there cannot be read, or the tokenizer is missing.
    """
    is_gone = not exports.is_export(config.start_from) and bool(
        config.start_from and place_problem("start_from", config.start_from)
    )
    if not config.start_from or (is_gone and not _begun(config)):
        return config
    of_shards = any(name.startswith(sources.SHARDS_PREFIX) for name in config.data.sources)
    takes_tokenizer = config.data.tokenizer == "auto" and not (
        config.data.train_tokenizer or of_shards
    )
    takes_model = config.model == ModelConfig()
    if not (takes_model or takes_tokenizer):
        return config
    place, is_hugging_face = (
        (_begun(config), False) if is_gone else _readable("start_from", config.start_from)
    )
    changes = {}
    if takes_model:
        model = _model_of(place, is_hugging_face)
        if config.start_from_layers and not is_gone:
            model = chosen_layers.of_layers(model, config.start_from_layers)
        changes["model"] = model
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
    # A checkpoint may name what has no effect: nobody has set that here.
    changed = dataclasses.replace(config, **changes)
    return effects.without_idle(changed, "model.") if takes_model else changed


def _readable(option: str, named: str) -> tuple[str, bool]:
    """A local folder with the config and tokenizer, and whether they are of Hugging Face."""
    from llmx.checkpoint import copies, hf_reader

    if remote.is_url(named):
        found = copies.find(f"{option}=", named)
        return found.small(), found.is_hugging_face
    place, _ = identity.origin(named)
    return place, hf_reader.is_checkpoint(place)


def _model_of(place: str, is_hugging_face: bool) -> ModelConfig:
    """The model of a work directory, or of a Hugging Face checkpoint. Raises ValueError."""
    from llmx.checkpoint import hf_reader

    if exports.is_export(place):
        return identity.model_of(exports.read_manifest(pathlib.Path(place)))
    return hf_reader.read_model(place) if is_hugging_face else config_lib.load_run(place).model


def teacher_of(config: Config) -> ModelConfig | None:
    """The model of `distillation.teacher`; None = there is none. Raises ValueError."""
    if not (place := config.distillation.teacher):
        return None
    folder, is_hugging_face = _readable("distillation.teacher", place)
    model = _model_of(folder, is_hugging_face)
    if is_hugging_face:
        model = dataclasses.replace(model, vocab_multiple=config.model.vocab_multiple)
    return model
