"""Every key changes the program, or what is written, or is refused where it has no effect."""

import copy
import hashlib
import pathlib
import re

import jax
import numpy as np
import pytest

from llmx import config as config_lib
from llmx.config import checks, effects
from llmx.config import recipe as recipe_lib
from llmx.model import families
from llmx.step import step

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


# Keys of techniques that are off by default, which checks of their sections refuse.
OFF = ("adapters.", "packed.", "experts.", "quantization.", "tables.", "preference.",
       "distillation.", "pruning.", "pipeline.")  # fmt: skip
ON = {
    "adapters.rank", "packed.format", "quantization.bits", "quantization.activations",
    "distillation.teacher", "distillation.top_k", "pruning.method", "pruning.masks_from",
    "preference.loss",
}  # fmt: skip
OF_TYPES = {
    "distillation.hidden_layers": (1,), "distillation.attention_layers": (1,),
    "pipeline.layers": (1, 2), "start_from_layers": (0,), "pruning.pattern": "1:4",
}  # fmt: skip


def idle_alone():
    """Keys without effect in a default run, of one device."""
    run = config_lib.default()
    run.mesh.data = 1
    by_needs = []
    for key in NEEDS:
        changed = copy.deepcopy(run)
        config_lib.set_value(changed, key, another(key))
        by_needs += [key] * any(one.key == key for one in effects.idle(changed))
    of_sections = [key for key in KEYS if key.startswith(OFF) and key not in ON]
    others = ["memory_budget", "model.ngram_rows", "start_from_layers", "products.granularity"]
    return sorted({*by_needs, *of_sections, *others})


@pytest.mark.parametrize("key", idle_alone())
def test_resolve_refuses_it(key):
    run = config_lib.default()
    run.model, run.mesh.data = families.preset("llama3"), 1
    value = OF_TYPES.get(key, another(key))
    wrong_kind = "tuple[int" in str(KEYS[key]) or "tuple[float" in str(KEYS[key])
    config_lib.set_value(run, key, value if key in OF_TYPES or not wrong_kind else (1,))
    with pytest.raises(config_lib.ConfigError, match=re.escape(key)):
        checks.resolve(run, 1)


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


ROPE = {"model.rope_factor": 4.0, "model.rope_old_context": 256}
YARN = {"model.rope_scaling": "yarn", **ROPE}
LLAMA = {"model.rope_scaling": "llama3", **ROPE}
MOE = {"model": "mixtral"}
TWO = {"mesh.data": 2}
FP16 = {"precision": "fp16"}


def of(strategy, **keys):
    return TWO | {"sync.strategy": strategy} | {f"sync.{key}": keys[key] for key in keys}


# By key: where it has an effect, and another value.
IN_PROGRAMS = {
    "model.rope_theta": ({}, 500.0),
    "model.rope_interleaved": ({}, True),
    "model.rope_dim": ({}, 8),
    "model.rope_factor": (LLAMA, 8.0),
    "model.rope_low_freq": (LLAMA, 0.5),
    "model.rope_high_freq": (LLAMA, 8.0),
    "model.rope_old_context": (LLAMA, 64),
    "model.rope_beta_fast": (YARN, 3.0),
    "model.rope_beta_slow": (YARN, 0.1),
    "model.rope_truncate": (YARN, False),
    "model.rope_mscale": (YARN | {"model.rope_mscale_all": 0.7}, 3.0),
    "model.rope_mscale_all": (YARN, 0.5),
    "model.qk_norm_over": ({"model.qk_norm": True}, "all"),
    "model.window": ({"model.layer_pattern": ("local",), "model.window": 4}, 3),
    "model.rope_theta_local": ({"model.layer_pattern": ("local",), "model.window": 4}, 50.0),
    "model.qkv_bias": ({}, True),
    "model.query_latent": ({"model": "deepseek_v3"}, 12),
    "model.value_dim": ({"model": "deepseek_v3"}, 8),
    "model.experts_per_token": (MOE, 3),
    "model.expert_dim": (MOE, 24),
    "model.shared_dim": (MOE, 24),
    "model.router": (MOE, "sigmoid"),
    "model.router_renormalize": (MOE, False),
    "model.router_scale": (MOE, 2.0),
    "model.first_dense": (MOE, 1),
    "experts.balance_weight": (MOE, 0.3),
    "experts.z_weight": (MOE, 0.3),
    "experts.dispatch": (MOE, "dense"),
    "attention.ulysses": ({"mesh.sequence": 2}, 2),
    "attention.zigzag": ({"mesh.sequence": 2}, False),
    "sharding.sequence_parallel": ({"mesh.tensor": 2}, False),
    "products.history": (
        {"products.format": "fp8", "products.scaling": "delayed"}, 4),
    "products.block": (
        {"products.format": "fp8", "products.granularity": "block", "products.block": 8}, 16),
    "loss_scale.growth_interval": (FP16, 7),
    "loss_scale.growth_factor": (FP16, 4.0),
    "loss_scale.backoff_factor": (FP16, 0.25),
    "loss_scale.minimum": (FP16, 2.0),
    "loss_scale.maximum": (FP16, 2.0**20),
    "optimizer.b1": ({}, 0.5),
    "optimizer.b2": ({}, 0.5),
    "optimizer.eps": ({}, 1e-3),
    "optimizer.final_fraction": ({}, 0.5),
    "optimizer.decay_steps": ({"optimizer.schedule": "wsd", "optimizer.warmup_steps": 1}, 5),
    "guard.patience": ({"guard.on_bad_step": "skip"}, 3),
    "sync.error_feedback": (of("int8"), False),
    "sync.bucket_mib": (of("int8"), 1e-3),
    "sync.uncompressed": (of("int8"), ("*norm*",)),
    "sync.scale": (of("one_bit", warmup_steps=2), "mean"),
    "sync.rank": (of("power_sgd"), 2),
    "sync.fraction": (of("top_k"), 0.3),
    "sync.average_moments": (of("local_sgd"), True),
    "sync.by_tokens": (of("local_sgd"), True),
    "sync.outer_format": (of("local_sgd"), "int8"),
    "sync.outer_learning_rate": (of("diloco"), 0.2),
    "sync.outer_momentum": (of("diloco"), 0.2),
    "sync.fragments": (of("diloco"), 2),
    "sync.staleness": (of("stale"), 1),
    "sync.asynchronous": (of("stale"), True),
}  # fmt: skip


def made(changes):
    run = config_lib.default()
    changes = {"model.num_layers": 2, **changes}
    run.model = families.preset(changes.pop("model", "llama3"))
    run.batch.size, run.batch.sequence_length, run.steps = 4, 16, 10
    run.mesh.data, run.model.vocab_multiple = 1, 64
    for key, value in changes.items():
        config_lib.set_value(run, key, value)
    sizes = [v for v in vars(run.mesh).values() if isinstance(v, int)]
    return checks.resolve(run, int(np.prod(sizes)))


def program(changes):
    """A hash of all programs of a step."""
    run = made(changes)
    sizes = [v for v in vars(run.mesh).values() if isinstance(v, int)]
    recipe = recipe_lib.make_recipe(run, devices=jax.devices()[: int(np.prod(sizes))])
    found = hashlib.sha256(str(recipe.abstract).encode())
    with jax.set_mesh(recipe.mesh):
        steps = [step.make_train_step(recipe, phase) for phase in recipe.strategy.phases]
        traced = [each.trace(recipe.abstract, recipe.abstract_batch) for each in steps]
        traced += [jax.jit(each).trace(recipe.abstract) for each in recipe.strategy.outer.values()]
    for one in traced:
        found.update(re.sub(r"0x[0-9a-f]+", "", str(one.jaxpr)).encode())
        for constant in one.jaxpr.consts:
            found.update(np.asarray(constant).tobytes())
    return found.hexdigest()


@pytest.fixture(scope="module")
def programs():
    return {}


@pytest.mark.slow  # a minute and a half
@pytest.mark.parametrize("key", IN_PROGRAMS)
def test_a_key_changes_the_program(key, programs):
    where, value = IN_PROGRAMS[key]
    plain = str(sorted(where.items()))
    if plain not in programs:
        programs[plain] = program(where)
    assert program(where | {key: value}) != programs[plain]


def test_the_same_config_gives_the_same_program(programs):
    assert program({}) == program({})
