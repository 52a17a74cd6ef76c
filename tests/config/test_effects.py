"""A key that needs what is not there is refused, or put back where a config is only read."""

import pathlib

import pytest

from llmx import config as config_lib
from llmx.config import effects
from llmx.model import families

ROOT = pathlib.Path(__file__).parents[2]
KEYS = config_lib.leaf_types(config_lib.Config)
NEEDS = effects.needs(config_lib.Config)


def field_of(key):
    kind = config_lib.Config
    *sections, name = key.split(".")
    for section in sections:
        kind = type(config_lib.get_value(kind(), section))
    return kind.__dataclass_fields__[name]


def another(key):
    """A legal value that is not the default."""
    field, default = field_of(key), config_lib.get_value(config_lib.default(), key)
    if choices := field.metadata.get("choices"):
        names = choices() if callable(choices) else choices
        return next(name for name in names if name != default)
    if isinstance(default, bool):
        return not default
    if isinstance(default, int):
        return 2 if key == "model.embedding_cores" else default + 1
    if isinstance(default, float):
        return default / 2 or 0.25
    return "other" if isinstance(default, str) else ("other",)


def unmet(run, key):
    """Sets another key so that `key` needs what is not there; the keys that the error may name."""
    for other, wanted in NEEDS[key].items():
        if other in effects.DERIVED:
            if other == "a watchdog":
                run.watchdog.step_factor = 0.0
            return effects.DERIVED[other].keys
        if isinstance(wanted, tuple):
            values = field_of(other).metadata.get("choices") or ("csv", "mean", not wanted[0])
            values = values() if callable(values) else values
            kind = type(wanted[0])
            free = [v for v in values if v not in wanted and isinstance(v, kind)]
            config_lib.set_value(run, other, free[0])
        elif "not" in wanted:
            config_lib.set_value(run, other, wanted["not"][0])
        return (other,)
    raise AssertionError(key)


@pytest.mark.parametrize("key", NEEDS)
def test_a_key_without_effect_is_refused(key):
    run = config_lib.default()
    run.mesh.data = 1
    deciding = unmet(run, key)
    assert not [one for one in effects.idle(run) if one.key == key]  # the default never is
    config_lib.set_value(run, key, another(key))
    value = config_lib.get_value(run, key)
    (told,) = [text for text in effects.problems(run) if text.startswith(f"{key}={value!r} ")]
    assert "has no effect with" in told and "or leave it out" in told
    assert any(f"{other}=" in told for other in deciding)
    read = effects.without_idle(run)
    assert not effects.problems(read)
    assert config_lib.get_value(read, key) == config_lib.get_value(config_lib.default(), key)


def test_models_and_saved_configs_are_not_refused(tmp_path):
    for name in families.FAMILIES:
        run = config_lib.default()
        run.model = families.preset(name)
        assert not effects.problems(run), name
    run = config_lib.default()
    run.sync.warmup_steps, run.experts.balance_weight, run.model.window = 5, 0.3, 7
    run.workdir = str(tmp_path)
    config_lib.save_run(run)
    read = config_lib.read_saved(tmp_path / "config.json")
    assert (read.sync.warmup_steps, read.model.window) == (0, 0)
