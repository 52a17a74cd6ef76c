"""The types of a config's values, as its fields have them."""

import dataclasses
import types
import typing
from collections.abc import Iterator
from typing import Any

from llmx.data import json_files


def wrong_types(section: Any, prefix: str = "") -> Iterator[str]:
    """Values that are not of their field's type."""
    for name, hint in typing.get_type_hints(type(section)).items():
        value, key = vars(section)[name], prefix + name
        if not dataclasses.is_dataclass(hint):
            if not _has_type(value, hint):
                yield f"{key}={json_files.shown(value)} is not {type_name(hint)}"
        elif isinstance(value, hint):
            yield from wrong_types(value, f"{key}.")
        else:
            given = json_files.shown(value)
            yield f"{key}={given} is not a {hint.__name__}: change its fields instead"


def _has_type(value: Any, hint: Any) -> bool:
    if typing.get_origin(hint) is tuple:
        inner = typing.get_args(hint)[0]
        return isinstance(value, tuple | list) and all(_has_type(item, inner) for item in value)
    if isinstance(hint, types.UnionType):
        return any(_has_type(value, one) for one in typing.get_args(hint))
    if hint in (int, float):
        return isinstance(value, int | hint) and not isinstance(value, bool)
    return isinstance(value, hint)


def type_name(hint: Any) -> str:
    """A type in the words of an error."""
    if typing.get_origin(hint) is tuple:
        return f"a tuple of {type_name(typing.get_args(hint)[0]).removeprefix('a ')}s"
    names = {int: "a whole number", float: "a number", str: "a text", bool: "True or False"}
    return names.get(hint, str(hint))
