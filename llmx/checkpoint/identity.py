"""What makes a run the one that wrote a checkpoint: the function of its model is compared and must
be the same; all other differences between the configs are lines to show.

Configs are compared as the nested dicts of their JSON, so that those of other versions can be: a
key that only one of them has is a difference like another, and never an error.
"""

import dataclasses
import json
import pathlib
from collections.abc import Collection, Mapping
from typing import Any

from llmx.model import families
from llmx.model.families import ModelConfig
from llmx.model.recommender.config import RecommenderConfig

ABSENT = "(no such key)"


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"batch.size": 8, ...} of a config's JSON."""
    found = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def as_json(config: Any) -> dict[str, Any]:
    """A dataclass as nested dicts of JSON values."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """{key: (before, now)} of two configs as JSON, `ABSENT` where one has no such key."""
    before, now = flat(before), flat(now)
    pairs = {key: (before.get(key, ABSENT), now.get(key, ABSENT)) for key in {**before, **now}}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def difference_lines(found: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """Differences for people: "optimizer.learning_rate: 0.001 -> 0.0003"."""
    return [f"{key}: {before} -> {now}" for key, (before, now) in found.items()]


def model_changes(saved: Mapping[str, Any], given: ModelConfig) -> list[str]:
    """The fields of the section `model` by which two models with the same parameters compute
    different functions: "model.rope_theta: saved 10000.0, given 500000.0"."""
    was = dataclasses.replace(given, **_known(saved))
    before, now = families.identity(was), families.identity(given)
    return [
        f"model.{name}: saved {vars(was)[name]!r}, given {vars(given)[name]!r}"
        for name in now
        if before[name] != now[name] and vars(was)[name] != vars(given)[name]
    ]


def model_of(saved: Mapping[str, Any]) -> ModelConfig:
    """The model of a run's config as JSON; fields that it does not have are their defaults."""
    return ModelConfig(**_known(saved.get("model", {})))


def section_of(meta: Mapping[str, Any], name: str, kind: type) -> Any:
    """A section of the config of the run that wrote a checkpoint's meta, a `kind`; what an older
    version did not have is at its default."""
    return kind(**known_fields(kind, meta.get("config", {}).get(name, {})))


def known_fields(kind: type, saved: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass that JSON has, as arguments of it."""
    known = {field.name for field in dataclasses.fields(kind)}
    return {n: tuple(v) if isinstance(v, list) else v for n, v in saved.items() if n in known}


def _known(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a section `model` that this version has."""
    values = known_fields(ModelConfig, saved)
    if "recommender" in values:
        known = known_fields(RecommenderConfig, values["recommender"])
        values["recommender"] = RecommenderConfig(**known)
    # Of a version that had no such field, whose layers a token went through once.
    return ({"repeats": 1} if values else {}) | values


def refusal_of_model(
    saved: Mapping[str, Any], given: ModelConfig, *, allowed: Collection[str] = ()
) -> str:
    """The lines of the error where a checkpoint's config is of another model; "" = the same.

    Args:
      saved: the config that the checkpoint's meta holds; {} = none, nothing to compare.
      given: the model of the present config.
      allowed: fields that may differ.
    """
    allowed = {f"model.{name}" for name in allowed}
    changes = model_changes(saved.get("model", {}), given)
    return "\n".join(f"  {text}" for text in changes if text.partition(":")[0] not in allowed)


def origin(start_from: str) -> tuple[str, int | None]:
    """The work directory and the step of `start_from`: "W@1200" is step 1200 of W, "W" the newest
    of W."""
    workdir, at, step = start_from.rpartition("@")
    if at and workdir and step.isdecimal() and not pathlib.Path(start_from).exists():
        return workdir, int(step)
    return start_from, None
