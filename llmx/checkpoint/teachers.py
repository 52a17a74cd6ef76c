"""A run's teacher: read beside the state when a run starts, and in no checkpoint of it.

The checkpoint says which one it was, by place and step, and a run that is resumed reads that again.
Where it is gone the run does not start, and nothing is changed.
"""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax

from llmx.checkpoint import copies, hf_reader, identity, model_params
from llmx.checkpoint.restore import Restored
from llmx.data import tokenizers
from llmx.model.families import ModelConfig
from llmx.step.step import Recipe, in_dtypes_of

TEACHER = "teacher"  # in the meta of a checkpoint

Log = Callable[[str], None]


def beside(config: Any, recipe: Recipe, dataset: Any, restored: Restored, log: Log) -> Restored:
    """A run's state with its teacher, and its meta with which one that is; where the run has no
    teacher, as it is.

    Raises ValueError where the teacher is gone, or has another tokenizer.
    """
    teacher = recipe.loss.teacher
    if teacher is None:
        return restored
    named = config.distillation.teacher
    origin, step = identity.origin(named)
    before = restored.meta.get(TEACHER) or {}
    known = before.get("step") if before.get("place") == origin else None
    if step is None and known is not None:  # it may have been trained since
        named = f"{origin}@{known}"
    place, step = copies.local("distillation.teacher=", named, log)
    _same_tokenizer(named, place, dataset.tokenizer)
    params, step = _read(place, step, teacher.apply.model, teacher.params, log)
    like = teacher.params
    to = jax.tree.map(lambda leaf: leaf.sharding, like)
    params = jax.jit(lambda params: in_dtypes_of(like, params), out_shardings=to)(params)
    log(f"teacher: {origin}" + ("" if step is None else f", step {step}"))
    meta = {**restored.meta, TEACHER: {"place": origin, "step": step}}
    return restored._replace(state=restored.state._replace(frozen=params), meta=meta)


def _read(
    place: str, step: int | None, model: ModelConfig, like: Any, log: Log
) -> tuple[Any, int | None]:
    """Its parameters, of a run the average where it keeps one, and the step."""
    if hf_reader.is_checkpoint(place):
        same = lambda stored: dataclasses.replace(stored, vocab_multiple=model.vocab_multiple)  # noqa: E731
        return model_params.of_hugging_face(place, like, model_of=same), None

    def has_average(saved: dict) -> bool:
        return saved.get("config", {}).get("optimizer", {}).get("ema_decay", 0) > 0

    restored = model_params.restore_params(place, like, ema=has_average, step=step, log=log)
    return restored.state, restored.step


def _same_tokenizer(named: str, place: str, tokenizer: Any) -> None:
    file = os.path.join(place, tokenizers.FILE_NAME)
    if not os.path.isfile(file):
        raise ValueError(
            f"distillation.teacher={named!r} has no {tokenizers.FILE_NAME}, so that its tokens "
            "cannot be compared with the student's: put the one that it was trained with there"
        )
    theirs = tokenizers.load(file)
    if theirs.fingerprint != tokenizer.fingerprint:
        raise ValueError(
            f"distillation.teacher={named!r} has another tokenizer ({theirs.name}, "
            f"{theirs.vocab_size} tokens) than the data ({tokenizer.name}, {tokenizer.vocab_size} "
            f"tokens): set data.tokenizer={file!r}, and write shards anew with it"
        )
