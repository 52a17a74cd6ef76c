"""What a compression does: a Python file whose `get_recipe()` returns a `Recipe`."""

import dataclasses
import json
import pathlib
import runpy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from llmx.compress import stages
from llmx.config import value_types
from llmx.data.config import DataConfig
from llmx.model.families import ModelConfig
from llmx.runtime import bounds
from llmx.runtime.bounds import bounded

FUNCTION = "get_recipe"


@dataclasses.dataclass
class Recipe:
    """Stages, one after the other, and how a run is measured after each."""

    stages: tuple[tuple, ...] = ()  # (name, options), as ("low_rank", dict(energy=0.9))
    # text to calibrate, train and measure with; None = that of the run
    data: DataConfig | None = None
    evaluation_batches: int = bounded(8, at_least=1)  # of held-out text
    generated_tokens: int = bounded(64, at_least=0)  # whose speed is measured; 0 = it is not


class Named(NamedTuple):
    """A stage of a recipe with its options."""

    name: str
    options: Any

    @property
    def text(self) -> str:
        """For people: "low_rank energy=0.9"; what is as by default is left out."""
        default = type(self.options)()
        own = {k: v for k, v in vars(self.options).items() if v != vars(default)[k]}
        return " ".join([self.name, *(f"{key}={value}" for key, value in own.items())])

    @property
    def as_json(self) -> dict[str, Any]:
        """What must be the same for a stage that was done to count."""
        return json.loads(json.dumps({"stage": self.name, **dataclasses.asdict(self.options)}))


def load(path: str) -> Recipe:
    """The recipe of a file. Raises ValueError where there is none."""
    if not pathlib.Path(path).is_file():
        raise ValueError(f"--recipe={path}: there is no such file")
    try:
        names = runpy.run_path(path)
    except Exception as error:
        raise ValueError(f"--recipe={path} fails: {type(error).__name__}: {error}") from error
    if FUNCTION not in names:
        raise ValueError(f"--recipe={path} has no function {FUNCTION}(), which makes the recipe")
    try:
        found = names[FUNCTION]()
    except Exception as error:
        raise ValueError(
            f"--recipe={path}: {FUNCTION}() fails: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(found, Recipe):
        raise ValueError(
            f"--recipe={path}: {FUNCTION}() returns a {type(found).__name__}, not a "
            "llmx.compress.recipe.Recipe"
        )
    return found


def checked(recipe: Recipe, model: ModelConfig, *, problems: Sequence[str] = ()) -> list[Named]:
    """The stages of a recipe for a model. Raises ValueError with all that is wrong."""
    found, named = [*problems, *_problems(recipe)], []
    pairs = recipe.stages if isinstance(recipe.stages, tuple | list) else ()
    for number, pair in enumerate(pairs, 1):
        one, wrong = _stage(pair, f"stage {number}")
        found += wrong
        if one is None:
            continue
        stage, where = stages.STAGES[one.name], f"stage {number} ({one.name})"
        wrong = [f"{where}: {text}" for text in stage.problems(model, one.options)]
        found += wrong
        if stage.last and number < len(pairs):
            found.append(
                f"{where}: its weights are codes, which no other stage takes: make it last"
            )
        if not wrong:
            model = stage.model(model, one.options)
        named.append(one)
    if found:
        count = "1 problem" if len(found) == 1 else f"{len(found)} problems"
        raise ValueError("\n  - ".join([f"the recipe has {count}:", *found]))
    return named


def _problems(recipe: Recipe) -> Iterator[str]:
    if not isinstance(recipe.stages, tuple | list):
        yield f"stages={recipe.stages!r} is not a tuple of stages: (('low_rank', dict(rank=8)),)"
    elif not recipe.stages:
        yield f"stages=() does nothing: name some of {', '.join(stages.STAGES)}"
    numbers = ("evaluation_batches", "generated_tokens")
    wrong = [name for name in numbers if type(getattr(recipe, name)) is not int]
    yield from (f"{name}={getattr(recipe, name)!r} is not a whole number" for name in wrong)
    if not wrong:
        yield from bounds.problems(dataclasses.replace(recipe, stages=()), "")
    if recipe.data is not None and not isinstance(recipe.data, DataConfig):
        yield f"data={recipe.data!r} is not a DataConfig: llmx.data.config.DataConfig(sources=...)"


def _stage(pair: Any, where: str) -> tuple[Named | None, list[str]]:
    """A stage, None where its options cannot be checked further; and what is wrong with it."""
    is_pair = isinstance(pair, tuple | list) and len(pair) == 2
    if not is_pair or not isinstance(pair[0], str) or not isinstance(pair[1], dict):
        return None, [f"{where} is {pair!r}: write a name and options, ('low_rank', dict(rank=8))"]
    name, options = pair
    if name not in stages.STAGES:
        return None, [f"{where}: {name!r} is unknown: {bounds.use_one_of(name, stages.STAGES)}"]
    kind, where = stages.STAGES[name].options, f"{where} ({name})"
    known = [field.name for field in dataclasses.fields(kind)]
    if unknown := [key for key in options if key not in known]:
        return None, [
            f"{where}: {key!r} is no option: {bounds.use_one_of(key, known)}" for key in unknown
        ]
    one = kind(**options)
    if wrong := list(value_types.wrong_types(one)):
        return None, [f"{where}: {text}" for text in wrong]
    if wrong := bounds.problems(one, ""):
        return None, [f"{where}: {text}" for text in wrong]
    return Named(name, one), []
