"""Bounds and choices of config values, kept as metadata of their dataclass fields.

    size: int = bounded(32, at_least=1)  # sequences per step
    norm: str = choice("rms", ("rms", "layer"))  # kind of normalisation

`problems` checks a section against them; a number without an upper limit must fit 32 bits, in which
steps are counted, and be finite. The metadata are plain dicts, so that the rooms beside
this one write them without an import: {"limits": {"at least": 1}} or {"choices": table}.
"""

import dataclasses
import difflib
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

# Whose a key is, in a field's metadata: {"of": MACHINE}. What is of the run goes with its
# config.json wherever that is read. What is of the machine does not: who reads somebody's run has
# devices, folders, addresses and compilers of their own.
RUN, MACHINE = "run", "machine"

HOLDS = {"at least": operator.ge, "above": operator.gt, "at most": operator.le,
         "below": operator.lt}  # fmt: skip


LARGEST = 2**31 - 1


def bounded(
    default: float, *, at_least: float | None = None, above: float | None = None,
    at_most: float | None = None, below: float | None = None, unless: float | None = None,
    remedy: str = "", **rules: Any,
) -> Any:  # fmt: skip
    """A field with a number within bounds.

    Args:
      at_least, above, at_most, below: lower and upper bound, itself allowed or not.
      unless: one value that is allowed outside the bounds.
      remedy: what to use instead, appended to the error.
      rules: other metadata: `of`, and `needs` (see `config.effects`).
    """
    bounds = {"at least": at_least, "above": above, "at most": at_most, "below": below}
    limits = {name: limit for name, limit in bounds.items() if limit is not None}
    metadata = {"limits": limits, "unless": unless, "remedy": remedy, **rules}
    return dataclasses.field(default=default, metadata=metadata)


def choice(
    default: str, choices: Iterable[str] | Callable[[], Iterable[str]], **rules: Any
) -> Any:  # fmt: skip
    """A field with one of several names; `choices` is a function where the table stands below."""
    return dataclasses.field(default=default, metadata={"choices": choices, **rules})


def plain(default: Any, **rules: Any) -> Any:
    """A field without bounds that has other metadata."""
    return dataclasses.field(default=default, metadata=rules)


def section_of(kind: type, *, of: str, **rules: Any) -> Any:
    """A section of a config, whose keys are `of` the run or the machine, unless they say so."""
    return dataclasses.field(default_factory=kind, metadata={"of": of, **rules})


def problems(section: Any, prefix: str) -> list[str]:
    """The values of a section that are out of bounds or unknown, each with its limit and remedy.

    `prefix` is that of the section's keys, as "batch.". Sections inside it are not looked at.
    """
    found = []
    for field in dataclasses.fields(section):
        key, value, rules = prefix + field.name, vars(section)[field.name], field.metadata
        if choices := rules.get("choices"):
            names = list(choices() if callable(choices) else choices)
            if value not in names:
                found.append(f"{key}={_shown(repr(value))} is unknown: {use_one_of(value, names)}")
        limits, unless = rules.get("limits", {}), rules.get("unless")
        if value != unless and not all(HOLDS[name](value, limits[name]) for name in limits):
            text = " and ".join(f"{name} {limit}" for name, limit in limits.items())
            text += "" if unless is None else f", or {unless}"
            remedy = f": {rules['remedy']}" if rules.get("remedy") else ""
            found.append(f"{key}={_shown(value)} must be {text}{remedy}")
        elif not {"at most", "below"} & limits.keys() and (limit := _limit_of_numbers(value)):
            found.append(f"{key}={_shown(value)} must be {limit}")
    return found


def without_effect(section: Any, prefix: str, why: Mapping[str, str]) -> Iterator[str]:
    """The keys of a section that nothing reads and that are not at their defaults.

    `why`: by key, why it is not read, and the remedy: "with adapters.rank=0: set a rank".
    """
    default = type(section)()
    for key, reason in why.items():
        if (value := vars(section)[key]) != vars(default)[key]:
            yield f"{prefix}{key}={_shown(repr(value))} has no effect {reason}"


def _limit_of_numbers(value: Any) -> str:
    """The limit of all numbers that one, or one of several, is beyond; "" if none is."""
    if isinstance(value, tuple | list):
        return next(filter(None, map(_limit_of_numbers, value)), "")
    if isinstance(value, float):
        return "" if math.isfinite(value) else "finite"
    return f"at most {LARGEST}" if isinstance(value, int) and abs(value) > LARGEST else ""


def _shown(value: Any) -> str:
    try:
        text = str(value)
        return text if len(text) <= 80 else f"{text[:77]}..."
    except ValueError:  # Python writes no number of so many digits
        return "a number of thousands of digits"


def use_one_of(value: str, names: Iterable[str]) -> str:
    """The remedy for an unknown name: all names, and the one that was probably meant."""
    names = list(names)
    near = difflib.get_close_matches(value, names, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"use one of {', '.join(name or repr(name) for name in names)}{hint}"


def divisors(value: int, most: int) -> list[int]:
    """Those up to `most`, for remedies."""
    return [n for n in range(1, most + 1) if value % n == 0]
