"""What a student can learn from a teacher, and what that cannot be combined with."""

import math
from collections.abc import Iterator

from llmx import sharding
from llmx.config import Config, preference_checks, starting
from llmx.data import transient
from llmx.model import attention_relations, families, hidden_states
from llmx.model.families import ModelConfig
from llmx.runtime import bounds


def problems(config: Config) -> Iterator[str]:
    """All problems, each with its remedy; where the teacher is, is looked at."""
    section = config.distillation
    if config.start_from_layers and not config.start_from:
        yield (
            f"start_from_layers={config.start_from_layers} has no effect without start_from: name "
            "the run or checkpoint whose layers they are"
        )
    if bounds.problems(section, "distillation."):
        return  # said already
    if not section.is_on:
        why = "without distillation.teacher or distillation.top_k: set one, or leave it out"
        keys = dict.fromkeys(vars(section), why)
        yield from bounds.without_effect(section, "distillation.", keys)
        return
    if section.teacher and section.top_k:
        yield (
            f"distillation.top_k={section.top_k} with distillation.teacher={section.teacher!r}: "
            "what was written beside the shards needs no teacher; leave one of them out"
        )
    yield from _combinations(config)
    yield from _layers(config)
    if section.teacher and not families.problems(config.model):
        yield from _teacher(config)


def _combinations(config: Config) -> Iterator[str]:
    key = "distillation.teacher" if config.distillation.teacher else "distillation.top_k"
    if config.adapters.rank and config.distillation.teacher:
        yield (
            f"{key} with adapters.rank={config.adapters.rank}: the teacher would stand where the "
            "frozen model stands; train all parameters, or learn from python -m llmx.data "
            "--teacher with distillation.top_k"
        )
    if config.model.own:
        yield f"{key} with a model of your own: it has no head to compare with a teacher's"
    if preference_checks.is_on(config):
        yield f"{key} with data.format='preference': the losses of pairs have no teacher"
    if config.pipeline.schedule == "pipedream_2bw" and config.mesh.stage > 1:
        yield (
            f"{key} with pipeline.schedule='pipedream_2bw', which keeps what is under way in the "
            "checkpoint, and what a teacher says with it: use another schedule"
        )
    if config.offload.parameters:
        yield f"{key} with offload.parameters=True: teachers are not kept in host memory"
    if config.distillation.top_k > config.model.vocab_size > 0:
        yield (
            f"distillation.top_k={config.distillation.top_k} is more than the "
            f"{config.model.vocab_size} tokens of the vocabulary: use at most that"
        )
    mesh, batch = config.mesh, config.batch
    ways = math.prod(vars(mesh)[axis] for axis in (*sharding.BATCH_AXES, "stage"))
    if config.distillation.teacher and mesh.stage > 1 and ways > 0 and batch.size % ways:
        yield (
            f"batch.size={batch.size} with a teacher does not divide over {ways} devices: each "
            f"stage takes other rows of it; use a multiple of {ways}"
        )


# What is learned from layers, and the keys that say how.
OF_LAYERS = {
    "hidden_weight": ("hidden_loss", "hidden_layers"),
    "attention_weight": ("attention_relations", "attention_heads", "attention_layers"),
}


def _layers(config: Config) -> Iterator[str]:
    """What is wrong with learning from layers, beside which layers these are."""
    section = config.distillation
    for weight, others in OF_LAYERS.items():
        if vars(section)[weight]:
            yield from _of_layers(config, f"distillation.{weight}={vars(section)[weight]}")
        else:
            why = f"with distillation.{weight}=0: set a weight, or leave it out"
            keys = dict.fromkeys(others, why)
            yield from bounds.without_effect(section, "distillation.", keys)
    if section.attention_weight:
        names = section.attention_relations
        for problem in attention_relations.problems_of_names(names):
            yield f"distillation.attention_relations={names} {problem}"
        if set(names) == {attention_relations.MAP}:
            why = f"with attention_relations={names}: maps have the models' heads; leave it out"
            yield from bounds.without_effect(section, "distillation.", {"attention_heads": why})


def _of_layers(config: Config, key: str) -> Iterator[str]:
    """What cannot be combined with a loss of layers, which has this key and value."""
    if config.distillation.top_k:
        yield f"{key} with distillation.top_k: files have no outputs of layers; name a teacher"
    if config.mesh.stage > 1:
        yield (
            f"{key} with mesh.stage={config.mesh.stage}: stages hand outputs of their last layer "
            "on alone; use mesh.stage=1, and fsdp or tensor"
        )
    if config.sharding.turns > 1:
        yield f"{key} with sharding.turns={config.sharding.turns}: use sharding.turns=1"
    if config.model.num_first:
        yield f"{key} with model.first_dense={config.model.num_first}: layers are of one stack"


def _teacher(config: Config) -> Iterator[str]:
    place = config.distillation.teacher
    if problem := starting.place_problem("distillation.teacher", place):
        yield f"{problem}; a run that learns from a teacher needs it whenever it is started"
        return
    try:
        teacher = starting.teacher_of(config)
    except ValueError as error:
        yield transient.stated(f"distillation.teacher={place!r}", error)
        return
    yield from fits(teacher, config)


def fits(teacher: ModelConfig, config: Config) -> Iterator[str]:
    """Why a student cannot learn from a teacher of this model."""
    section, student = config.distillation, config.model
    named = f"distillation.teacher={section.teacher!r}"
    if teacher.own:
        yield f"{named} is a model of a program's own: a teacher is one of the families of llmx"
        return
    for weight, (*_, layers) in OF_LAYERS.items():
        if not vars(section)[weight]:
            continue
        if teacher.num_first:
            yield f"distillation.{weight}={vars(section)[weight]}: the teacher has two stacks"
        chosen = vars(section)[layers]
        try:
            hidden_states.pairs_of(chosen, config.model.num_layers, teacher.num_layers)
        except ValueError as error:
            yield f"distillation.{layers}={chosen} {error}"
    if section.attention_weight:
        relations = section.attention_relations, section.attention_heads, config.mesh.tensor
        for problem in attention_relations.problems(*relations, student, teacher):
            yield f"distillation.{problem}"
    if teacher.vocab_size != student.vocab_size:
        yield (
            f"{named} has a vocabulary of {teacher.vocab_size} tokens and the student one of "
            f"{student.vocab_size}: both must have the same tokenizer; set data.tokenizer to the "
            "teacher's tokenizer.json and leave model.vocab_size out"
        )
    elif teacher.padded_vocab != student.padded_vocab:
        yield (
            f"{named} pads its vocabulary to {teacher.padded_vocab} rows and the student to "
            f"{student.padded_vocab}: set model.vocab_multiple={teacher.vocab_multiple}"
        )
    if teacher.max_positions < config.batch.sequence_length:
        yield (
            f"{named} takes {teacher.max_positions} positions and batch.sequence_length="
            f"{config.batch.sequence_length}: use shorter sequences"
        )
