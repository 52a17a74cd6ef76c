"""Configs that nobody chose, drawn over all keys, and their steps traced: scripts/fuzz.py has both.

A config is a file of configs/, or a small model of any family, on a mesh of up to 32 devices, with
some keys changed: techniques are switched on, numbers halved and doubled, choices taken. What
`checks.resolve` accepts must become a recipe, and every phase of its step, what replicas do between
steps and the other programs there must trace. Meshes are abstract: nothing is compiled.
"""

import dataclasses
import math
import pathlib
import random
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax._src.cudnn.fused_attention_stablehlo as cudnn

from llmx import config as config_lib
from llmx import sharding
from llmx.config import checks, flags, recipe
from llmx.model import families
from llmx.model.attention import attend
from llmx.sharding.mesh import within
from llmx.step.step import make_train_step

CONFIGS = pathlib.Path(__file__).resolve().parents[1] / "configs"
# Compilers differ in what a program may hold: one kind of device of each.
KINDS = (("", "cpu"), ("NVIDIA H100 80GB HBM3", "gpu"), ("TPU v5p", "tpu"))
# Of no step: where a run writes, what it reads, how its processes meet, and other people's runs.
LEFT_OUT = (
    "workdir", "start_", "resume_step", "launch.", "watchdog.", "data.sources", "data.cache_dir",
    "data.tokenizer", "data.train_tokenizer", "data.chat_template", "data.weights", "profile.",
    "checkpoint.local_directory", "evaluation.choices", "model.own", "distillation.",
    "pruning.masks_from", "pipeline.table", "packed.", "sample.prompt", "data.records.",
    "model.family",
)  # fmt: skip
# Values of texts and tuples that their fields do not list.
VALUES = {
    "remat": ("full", "names", "dots", "attention+gate", "sqrt", "every_2+names", ":1=full,dots"),
    "offload.saves": (("input",), ("input", "attention")),
    "model.layer_pattern": (
        ("local", "global"), ("global",), ("local",), ("local", "local", "global"),
    ),
    "model.ngram_tables": ((2,), (2, 3)),
    "model.ranks": (("mlp=8",), ("attention=3",), ("mlp=6", "attention=8")),
    "adapters.products": (("attention",), ("mlp",), ("attention", "mlp")),
    "pruning.products": (("attention",), ("mlp",)),
    "pruning.pattern": ("2:4", "1:4", "4:8", "row"),
    "mesh.across_slices": ((), ("data",), ("fsdp",), ("stage",)),
    "pipeline.layers": ((1, 1), (1, 3), (2, 1, 1)),
    "sync.uncompressed": (("embedding",), ("*norm*",), ("*",)),
    "distillation.hidden_layers": ((0,), (0, 1)),
    "rollback.at": ((10,), (10, 20)),
    "rollback.skipped": ((1,),),
    "data.text_key": ("text", "content"),
}  # fmt: skip
# Keys that are drawn together, more often than others; None = what the field may have.
TECHNIQUES = (
    {"adapters.rank": (1, 3, 4, 8), "adapters.products": None},
    {"quantization.bits": (2, 4, 8), "quantization.scales": None},
    {"quantization.activations": None}, {"batch.accumulation": (2, 4, 8)},
    {"optimizer.ema_decay": (0.99,)}, {"model.repeats": (2, 3)}, {"model.embedding_rank": (4, 8)},
    {"model.embedding_cores": (2, 3)}, {"loss.chunks": (1, 2, 3)}, {"loss.z_loss": (1e-4,)},
    {"attention.ulysses": (2, 4)}, {"sharding.turns": (0, 2, 3)}, {"sharding.turns": (0, 2)},
    {"products.format": ("fp8", "int8"), "products.scaling": None}, {"products.gather": None},
    {"products.format": ("fp8", "int8"), "products.granularity": None, "products.block": (16, 32)},
    {"sharding.gather": ("step",)}, {"sharding.gather": ("step",), "mesh.fsdp": (2, 4)},
    {"sharding.layout": tuple(sharding.LAYOUTS)}, {"sharding.replicate_kv": (True,)},
    {"sharding.sequence_parallel": (False,)}, {"model.ngram_tables": None},
    {"model.ngram_tables": None, "tables.optimizer": None, "tables.combine": None},
    {"model.ngram_tables": None, "tables.staleness": (1, 2), "tables.capacity": (0.0, 2.0)},
    {"model.ngram_tables": None, "tables.cache_rows": (4096, 65536)}, {"model.ranks": None},
    {"model.kv_latent": (1, 16), "model.rope_dim": (4, 8), "model.value_dim": (8, 16)},
    {"model.query_latent": (8,)}, {"model.window": (1, 5, 4096), "model.layer_pattern": None},
    {"offload.optimizer": (True,)}, {"offload.parameters": (True,), "remat": ("full", "dots")},
    {"offload.saves": None, "remat": ("full", "names")}, {"remat": None}, {"remat": None},
    {"pruning.method": None}, {"pruning.method": None, "pruning.scope": None},
    {"precision": None}, {"optimizer.name": None}, {"optimizer.name": None},
    {"optimizer.moments": None}, {"sync.strategy": None, "sharding.layout": ("ddp", "hsdp")},
    {"sync.strategy": None, "mesh.data": (2, 4)}, {"pipeline.schedule": None, "mesh.stage": (2,)},
    {"attention.implementation": None}, {"attention.implementation": None},
    {"precision": ("fp16",), "loss_scale.kind": None}, {"experts.balance": None},
    {"data.format": ("preference",), "preference.loss": None}, {"experts.dispatch": None},
)  # fmt: skip


_FILE = """from llmx import config
from llmx.model import families


def get_config():
    run = config.default()
    run.model = families.preset({family!r}, **{sizes!r})
    run.data.tokenizer, run.batch.sequence_length = "bytes", {length}
    return run
"""


def draw(rng: random.Random, folder: pathlib.Path) -> list[str]:
    """Arguments of a command line: a config file, and what is changed of it."""
    files = sorted(path for path in CONFIGS.glob("*.py") if "def get_config" in path.read_text())
    # For rows of 128k tokens jax makes splash's masks for minutes.
    files = [path for path in files if not re.search("compress|128k", path.name)]
    if rng.random() < 0.7:
        file = folder / "config.py"
        file.write_text(_small_model(rng))
    else:
        file = rng.choice(files)
    keys = _mesh(rng) if rng.random() < 0.7 else {}
    fields = dict(_fields(config_lib.Config()))
    for technique in rng.sample(TECHNIQUES, rng.choice((0, 1, 2, 2, 3, 3, 4, 5))):
        for key, values in technique.items():
            keys[key] = rng.choice(values or _values(rng, key, *fields[key]))
    others = [key for key in fields if not key.startswith(LEFT_OUT)]
    for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
        key = rng.choice(others)
        keys[key] = rng.choice(_values(rng, key, *fields[key]))
    return ["--config", str(file), *(f"--config.{key}={value}" for key, value in keys.items())]


def _fields(section: Any, prefix: str = "") -> Iterator[tuple[str, tuple[Any, dataclasses.Field]]]:
    """(key, (default, field)) of every key."""
    for field in dataclasses.fields(section):
        value = vars(section)[field.name]
        if dataclasses.is_dataclass(value):
            yield from _fields(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, (value, field)


def _values(rng: random.Random, key: str, default: Any, field: dataclasses.Field) -> tuple:
    """Some values that a field may have; what its bounds forbid is refused by its message."""
    if key in VALUES:
        return VALUES[key]
    if choices := field.metadata.get("choices"):
        return tuple(choices() if callable(choices) else choices)
    if isinstance(default, bool):
        return (not default,)
    if isinstance(default, int):
        return (0, 1, 2, 3, 4, 8, 2 * default, default // 2, default + 1)
    if isinstance(default, float):
        return (0.0, default / 2, default * 2, 0.5, 1.0, rng.random())
    return (default,)


def _mesh(rng: random.Random) -> dict[str, int]:
    """Axes of up to 32 devices, and rows that divide over them."""
    sizes, left = dict.fromkeys(sharding.AXES, 1), rng.choice((1, 2, 4, 8, 8, 16, 32, 6))
    while left > 1:
        part = rng.choice([n for n in (2, 3, 4, left) if left % n == 0])
        sizes[rng.choice(sharding.AXES)] *= part
        left //= part
    keys: dict[str, Any] = {f"mesh.{axis}": size for axis, size in sizes.items()}
    rows = sizes["data"] * sizes["fsdp"] * sizes["expert"] * rng.choice((1, 2, 4))
    keys["batch.accumulation"] = rng.choice((1, 1, 2, 4)) * sizes["stage"]
    keys["batch.size"] = rows * keys["batch.accumulation"]
    if sizes["stage"] > 1 and rng.random() < 0.7:
        keys["model.num_layers"] = sizes["stage"] * rng.choice((1, 2, 3))
    if sizes["data"] > 1 and rng.random() < 0.8:
        keys["sharding.layout"] = rng.choice(tuple(sharding.LAYOUTS))
    return keys


def _small_model(rng: random.Random) -> str:
    """A config file with a model of any family, whose small sizes mostly go together."""
    family = rng.choice(tuple(families.FAMILIES))
    preset = families.preset(family)
    heads, kv_heads = rng.choice(((4, 2), (4, 4), (8, 2), (8, 1), (6, 3)))
    sizes: dict[str, Any] = {
        "vocab_size": 257, "width": rng.choice((64, 96, 128)), "num_layers": rng.choice((2, 3, 4)),
        "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": rng.choice((16, 16, 32, 12)),
        "mlp_dim": rng.choice((128, 192)), "max_positions": 128,
    }  # fmt: skip
    if preset.window:
        sizes["window"] = rng.choice((5, 16))
    if preset.num_experts:
        sizes |= {"num_experts": rng.choice((4, 8)), "experts_per_token": 2, "expert_dim": 64,
                  "router_groups": 1, "router_groups_kept": 1,
                  "first_dense": rng.choice((0, 0, 1))}  # fmt: skip
    if preset.kv_latent:
        sizes |= {"kv_latent": 16, "rope_dim": 8, "value_dim": 16, "num_kv_heads": heads}
        sizes["query_latent"] = rng.choice((0, 16))
    sizes["num_layers"] = max(sizes["num_layers"], len(preset.layer_pattern))
    return _FILE.format(family=family, sizes=sizes, length=rng.choice((16, 32, 64)))


def trace(arguments: list[str], kind: tuple[str, str]) -> None:
    """Resolves a config and traces what its run would compile. ConfigError: it is refused;
    Unsupported: by the attention kernel that it names, which sees shapes only here.

    Raises AssertionError for another ValueError: `resolve` gathers all problems, and promises that
    what it returns has none.
    """
    try:
        _, run, problems = flags.parse(flags.parser("llmx.train", ""), arguments)
        sizes = [vars(run.mesh)[axis] for axis in sharding.AXES]
        devices = abs(math.prod(sizes)) * (2 if -1 in sizes else 1)
        run = checks.resolve(run, devices, problems=problems)
        device = jax.sharding.AbstractDevice(kind[0], None, kind[1])
        # Options are asked of a compiler, and a compiler of devices.
        made = dataclasses.replace(recipe.make_recipe(run, devices=device), compiler_options=dict)
        # jax asks cuDNN for its version when it traces attention.
        with within(made.mesh), mock.patch.object(cudnn, "check_cudnn_version", lambda: 91200):
            for phase in made.strategy.phases:
                step = make_train_step(made, phase)
                jax.make_jaxpr(step)(made.abstract, made.abstract_batch)
            for program in (*made.strategy.outer.values(), *made.between.values()):
                jax.make_jaxpr(program)(made.abstract)
    except (config_lib.ConfigError, attend.Unsupported):
        raise
    except ValueError as error:
        raise AssertionError(f"no problem of the config, and then: {error}") from error
