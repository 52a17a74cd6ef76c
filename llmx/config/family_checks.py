"""What is checked of a model's family: that it is more than a name."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from llmx.checkpoint import hf_formats
from llmx.config import Config
from llmx.model import families


def problems(config: Config) -> Iterator[str]:
    """A name alone changes nothing of what is trained, and fails at the export.

    A model that differs from its family in some ways, and not in all, is one that was changed.
    """
    model = config.model
    of_family, plain = families.FAMILIES.get(model.family, {}), families.ModelConfig()
    marks = {
        name: form for name, value in of_family.items()
        if name != "family" and (form := _form(value)) != _form(vars(plain)[name])
    }  # fmt: skip
    has_none = not any(_form(vars(model)[name]) == form for name, form in marks.items())
    if marks and has_none and why_not(model):
        yield (
            f"model.family={model.family!r} is the name alone, as the model has nothing of "
            f"{', '.join(marks)}: use families.preset({model.family!r}, ...) in a config file, "
            "which also sets what the family has"
        )


def why_not(model: families.ModelConfig) -> str:
    """Why a model is not of the family whose name it has; "" if it may be, or is wrong anyway."""
    if model.family not in families.FAMILIES or families.problems(model):
        return ""
    try:  # the tokenizer may still be to say how many tokens there are
        hf_formats.model_config_to_hf(dataclasses.replace(model, vocab_size=model.vocab_size or 1))
    except ValueError as error:
        return str(error)
    return ""


def _form(value: Any) -> Any:
    """Of a number, whether it is 0, which means without."""
    return value if isinstance(value, str | tuple) else bool(value)
