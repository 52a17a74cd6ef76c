"""Which keys of a config have an effect, by what their fields say that they need.

    rank: int = bounded(4, at_least=1, needs={"sync.strategy": ("power_sgd",)})

`needs` are other keys with values of which one is there; {"not": values}, of which none is; or
{"has": values}, some of which are among several. They may stand at a section, for all its keys. A
key that needs what is not there, and is not at its default, is refused in a run that begins, and
put back to its default in one that is only read. A `config` is an `llmx.config.Config`.
"""

import copy
import dataclasses
import functools
import operator
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from llmx.data import json_files
from llmx.model import precision
from llmx.step.transforms import loss_scale
from llmx.sync import strategy

Needs = Mapping[str, Any]


class Derived(NamedTuple):
    """What is needed and is no key by itself."""

    keys: tuple[str, ...]  # that decide it
    is_there: Callable[[Any], bool]
    remedy: str


def _scales(kinds: Sequence[str]) -> Callable[[Any], bool]:
    def is_there(config: Any) -> bool:
        known = config.reduce_dtype in precision.REDUCE_DTYPES
        if not (known and config.precision in precision.POLICIES):
            return True  # which is refused
        policy = precision.policy_of(config.precision, config.reduce_dtype)
        return loss_scale.kind_of(config.loss_scale, policy) in kinds

    return is_there


_OF_SCALE = ("loss_scale.kind", "precision", "reduce_dtype")
DERIVED = {
    "a dynamic loss scale": Derived(
        _OF_SCALE, _scales(("dynamic",)), "set loss_scale.kind to 'dynamic'"
    ),
    "a loss scale": Derived(
        _OF_SCALE, _scales(("dynamic", "fixed")), "set loss_scale.kind to 'dynamic' or 'fixed'"
    ),
    "a compressor": Derived(
        ("sync.strategy", "sync.outer_format"),
        lambda config: (
            config.sync.strategy not in strategy.STRATEGIES or strategy.compresses(config.sync)
        ),
        "set sync.strategy to one that compresses, or sync.outer_format with 'local_sgd' or "
        "'diloco'",
    ),
    "a watchdog": Derived(
        ("watchdog.step_factor", "launch.watchdog_seconds"),
        lambda config: bool(config.watchdog.step_factor or config.launch.watchdog_seconds),
        "set watchdog.step_factor",
    ),
}


class Idle(NamedTuple):
    """A key without effect, that is not at its default."""

    key: str
    default: Any
    deciding: tuple[str, ...]  # the keys because of which it has none
    remedy: str


@functools.cache
def needs(kind: type) -> dict[str, Needs]:
    """Of each key that has any, what it needs, with what its sections need."""
    return {key: found for key, found in _needs(kind, "", {}) if found}


def _needs(kind: type, prefix: str, of: Needs) -> Iterator[tuple[str, Needs]]:
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        key, found = prefix + field.name, {**of, **field.metadata.get("needs", {})}
        if dataclasses.is_dataclass(hint := hints[field.name]):
            yield from _needs(hint, f"{key}.", found)
        else:
            # A section's needs are not those of the keys that decide them.
            decide = lambda other: DERIVED[other].keys if other in DERIVED else (other,)  # noqa: E731
            yield key, {other: found[other] for other in found if key not in decide(other)}


def idle(config: Any) -> Iterator[Idle]:
    """The keys without effect, each with the first reason. Values are of the right types."""
    default = type(config)()
    for key, wanted in needs(type(config)).items():
        own = value_of(default, key)
        if value_of(config, key) == own:
            continue
        for other, values in wanted.items():
            if other in DERIVED:
                derived = DERIVED[other]
                is_there, deciding, remedy = derived.is_there(config), derived.keys, derived.remedy
            else:
                is_there = _is_there(value_of(config, other), values)
                deciding, remedy = (other,), _remedy(other, values)
            if not is_there:
                yield Idle(key, own, deciding, remedy)
                break


def value_of(config: Any, key: str) -> Any:
    """The value of a key as "batch.size"."""
    return operator.attrgetter(key)(config)


def _is_there(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, tuple):
        return value in wanted
    if "not" in wanted:
        return value not in wanted["not"]
    return any(one in wanted["has"] for one in value)


def _remedy(key: str, wanted: Any) -> str:
    if isinstance(wanted, tuple):
        return f"set {key} to {' or '.join(map(repr, wanted))}"
    if "not" in wanted:
        return f"set {key} to another value"
    return f"put {' or '.join(map(repr, wanted['has']))} into {key}"


def problems(config: Any, known: Sequence[str] = ()) -> list[str]:
    """The keys that were set and have no effect, each with what would give it one.

    `known`: other problems; where one is about a key that decides, nothing is said.
    """
    found = []
    for one in idle(config):
        if any(key in text for key in one.deciding for text in known):
            continue
        value = value_of(config, one.key)
        why = " and ".join(
            f"{key}={json_files.shown(value_of(config, key))}" for key in one.deciding
        )
        given = json_files.shown(value)
        found.append(f"{one.key}={given} has no effect with {why}: {one.remedy}, or leave it out")
    return found


def without_idle(config: Any, prefix: str = "") -> Any:
    """A copy whose keys without effect have their defaults: also those that need such a key.

    prefix: of the keys that are looked at, as "model.".
    """
    config = copy.deepcopy(config)
    while found := [one for one in idle(config) if one.key.startswith(prefix)]:
        for one in found:
            section, _, name = one.key.rpartition(".")
            setattr(value_of(config, section) if section else config, name, one.default)
    return config
