"""A run as nested dataclasses; the door where config files and flags come in; every cross-check in
one place.

A config file's `get_config()` returns a `Config`. `ml_collections.config_flags` loads it and
parses the overrides (`--config.batch.size=64`). `resolve` then collects all that is wrong with it,
in one error, before anything is allocated or compiled. Nothing heavy is imported here: a mistake
is told within seconds.
"""

import argparse
import copy
import dataclasses
import difflib
import json
import pathlib
import sys
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from llmx import (
    attention,
    checkpoint,
    context,
    families,
    guard,
    launch,
    metrics,
    optim,
    parts,
    pipeline,
    precision,
    remat,
    sharding,
    sync,
)
from llmx.attention import AttentionConfig
from llmx.checkpoint import CheckpointConfig
from llmx.data import config as data_config
from llmx.data import shards, sources, tokenizers
from llmx.data.config import DataConfig
from llmx.families import ModelConfig
from llmx.guard import GuardConfig
from llmx.launch import LaunchConfig
from llmx.losses import LossConfig
from llmx.metrics import MetricsConfig
from llmx.optim import OptimizerConfig
from llmx.pipeline import PipelineConfig
from llmx.sharding import MeshConfig, ShardingConfig
from llmx.sync import SyncConfig


@dataclasses.dataclass
class BatchConfig:
    """What one step takes."""

    size: int = 32  # sequences per step, over all devices and microbatches
    sequence_length: int = 256  # tokens per sequence
    accumulation: int = 1  # microbatches that the step is done in, one after the other


@dataclasses.dataclass
class EvaluationConfig:
    """Loss on the held-out split."""

    every: int = 0  # steps between evaluations; 0 = only at the end
    batches: int = 8  # batches of one evaluation; 0 = the whole held-out split


@dataclasses.dataclass
class SampleConfig:
    """The continuation printed when training ends, and the defaults of `llmx.generate`."""

    prompt: str = ""  # "" = no sample at the end
    max_tokens: int = 200  # tokens to add
    temperature: float = 0.8  # 0 = always the likeliest token
    top_k: int = 0  # sample from this many likeliest tokens; 0 = all
    top_p: float = 0.95  # sample from the fewest tokens that have this probability together


@dataclasses.dataclass
class ProfileConfig:
    """A window of steps that jax.profiler records into WORKDIR/profile."""

    first_step: int = 0  # 0 = no profile
    num_steps: int = 3  # steps in the window


@dataclasses.dataclass
class Config:
    """One run."""

    workdir: str = ""  # everything that the run writes; "" = runs/<name of the config file>
    start_from: str = ""  # a new run begins with the parameters of the run in this workdir
    seed: int = 0  # of parameters and data order
    steps: int = 1000  # updates in the whole run
    precision: str = "bf16"  # a name in precision.POLICIES
    remat: str = "none"  # a name in remat.POLICIES
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    batch: BatchConfig = dataclasses.field(default_factory=BatchConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    sharding: ShardingConfig = dataclasses.field(default_factory=ShardingConfig)
    pipeline: PipelineConfig = dataclasses.field(default_factory=PipelineConfig)
    sync: SyncConfig = dataclasses.field(default_factory=SyncConfig)
    attention: AttentionConfig = dataclasses.field(default_factory=AttentionConfig)
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    guard: GuardConfig = dataclasses.field(default_factory=GuardConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)
    metrics: MetricsConfig = dataclasses.field(default_factory=MetricsConfig)
    sample: SampleConfig = dataclasses.field(default_factory=SampleConfig)
    profile: ProfileConfig = dataclasses.field(default_factory=ProfileConfig)
    launch: LaunchConfig = dataclasses.field(default_factory=LaunchConfig)


# Where token shards made from text are kept, unless data.cache_dir says otherwise.
DATA_CACHE = "~/.cache/llmx/data"


def default() -> Config:
    """A config to change: a small Llama on the text of Python's standard library."""
    return Config()


# ---------------------------------------------------------------------------------------- the door


class ConfigError(ValueError):
    """All that is wrong with a config: one problem a line."""

    def __init__(self, problems: Sequence[str]):
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = "\n".join(f"  - {problem}" for problem in problems)
        super().__init__(f"the config has {count}:\n{lines}")
        self.problems = list(problems)


def parser(module: str, description: str) -> argparse.ArgumentParser:
    """The command line that all commands share."""
    made = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        epilog="Any value of the config is overridden by --config.SECTION.KEY=VALUE; "
        "docs/configuration.md lists them.",
        allow_abbrev=False,
    )
    made.add_argument("--config", required=True, help="a config file, e.g. configs/quickstart.py")
    made.add_argument("--workdir", default="", help="overrides config.workdir")
    return made


def parse(
    made: argparse.ArgumentParser, argv: Sequence[str] | None = None
) -> tuple[argparse.Namespace, Config, list[str]]:
    """The other arguments, the config with its overrides, and what was wrong with the overrides.

    Raises ConfigError where there is no config to speak of: the file is missing or fails.
    """
    args, rest = made.parse_known_args(sys.argv[1:] if argv is None else argv)
    overrides, others = _overrides(rest)
    if others:
        made.error(f"unknown arguments: {' '.join(others)} (overrides are --config.KEY=VALUE)")
    config, problems = _load(args.config, overrides)
    if args.workdir:
        config.workdir = args.workdir
    if not config.workdir:
        config.workdir = str(pathlib.Path("runs") / pathlib.Path(args.config.split(":")[0]).stem)
    return args, config, problems


def _overrides(rest: list[str]) -> tuple[dict[str, str], list[str]]:
    """{key: text} of --config.KEY=TEXT, --config.KEY TEXT, --noconfig.KEY; and what is left."""
    found, others, rest = {}, [], list(rest)
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.partition("=")
        if name.startswith("--config."):
            if not equals:
                value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
            found[name.removeprefix("--config.")] = value
        elif name.startswith("--noconfig.") and not equals:
            found[name.removeprefix("--noconfig.")] = "false"
        else:
            others.append(argument)
    return found, others


def _load(path: str, overrides: dict[str, str]) -> tuple[Config, list[str]]:
    """The file's config with each override applied; what is wrong with an override is a problem."""
    import absl.flags
    from ml_collections import config_flags

    def read(arguments: Sequence[str]) -> Config:
        values = absl.flags.FlagValues()
        argv = ["llmx", f"--config={path}", *arguments]
        holder = config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv)
        values(argv)
        return holder.value

    if not pathlib.Path(path.split(":")[0]).is_file():
        raise ConfigError([f"--config={path}: there is no such file"])
    try:
        config = read([])
    except Exception as error:
        text = str(error).strip().splitlines()
        raise ConfigError(
            [f"{path} fails: {text[-1] if text else type(error).__name__}"]
        ) from error
    if not isinstance(config, Config):
        raise ConfigError(
            [f"{path}: get_config() returns {type(config).__name__}; return an llmx.config.Config"]
        )
    types_, problems = leaf_types(Config), []
    for key, text in overrides.items():
        if key not in types_:
            problems.append(_unknown_key(key, types_))
            continue
        try:
            # One at a time: a bad value does not hide the next.
            value = get_value(read([f"--config.{key}={text}"]), key)
        except (ValueError, TypeError, absl.flags.Error):
            problems.append(f"{key}={text!r} is not {_type_name(types_[key])}")
            continue
        set_value(config, key, value)
    return config, problems


def leaf_types(kind: type, prefix: str = "") -> dict[str, Any]:
    """{"batch.size": int, ...} of a nested dataclass."""
    found = {}
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        name, hint = prefix + field.name, hints[field.name]
        if dataclasses.is_dataclass(hint):
            found |= leaf_types(hint, f"{name}.")
        else:
            found[name] = hint
    return found


def _unknown_key(key: str, known: typing.Iterable[str]) -> str:
    known = list(known)
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if not near:  # the right key in the wrong section
        last = key.rpartition(".")[2]
        ends = {name.rpartition(".")[2]: name for name in reversed(known)}
        near = [ends[n] for n in difflib.get_close_matches(last, list(ends), n=1, cutoff=0.6)]
    hint = f"did you mean {near[0]}?" if near else "docs/configuration.md lists the keys"
    return f"{key} is not a key of the config: {hint}"


def get_value(config: Any, key: str) -> Any:
    """The value of a key as "batch.size"."""
    for name in key.split("."):
        config = vars(config)[name]
    return config


def set_value(config: Any, key: str, value: Any):
    """Sets what `get_value` gives."""
    *sections, name = key.split(".")
    for section in sections:
        config = vars(config)[section]
    setattr(config, name, value)


# -------------------------------------------------------------------------------- written and read


def to_json(config: Config) -> dict:
    """The config as nested dicts of JSON values."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def from_json(values: dict) -> Config:
    """The config that `to_json` wrote.

    Raises ConfigError for keys that are not a config's, as of another version.
    """
    known, config, problems = leaf_types(Config), Config(), []

    def fill(values: dict, prefix: str):
        for name, value in values.items():
            key = prefix + name
            if isinstance(value, dict):
                fill(value, f"{key}.")
            elif key not in known:
                problems.append(_unknown_key(key, known))
            else:
                set_value(config, key, tuple(value) if isinstance(value, list) else value)

    fill(values, "")
    if problems:
        raise ConfigError(problems)
    return config


def save_run(config: Config):
    """Writes WORKDIR/config.json, which `load_run` reads."""
    path = pathlib.Path(config.workdir) / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(to_json(config), indent=2) + "\n")
    temporary.replace(path)


def load_run(workdir: str) -> Config:
    """The resolved config of the run in `workdir`.

    Raises ValueError where there is none.
    """
    path = pathlib.Path(workdir) / "config.json"
    if not path.is_file():
        raise ValueError(
            f"--workdir={workdir} holds no run: {path} does not exist; train one with "
            f"python -m llmx.train --config ... --workdir {workdir}"
        )
    config = from_json(json.loads(path.read_text()))
    config.workdir = str(workdir)
    return config


def model_text(config: Config, num_parameters: int) -> str:
    """What is trained, on a line."""
    return (
        f"{config.model.family}, {num_parameters:,} parameters, {config.model.num_layers} layers; "
        f"{config.precision}, remat {config.remat}"
    )


def batch_text(config: Config) -> str:
    """What a step takes, on a line."""
    batch = config.batch
    splits = f" in {batch.accumulation} microbatches" if batch.accumulation > 1 else ""
    tokens = batch.size * batch.sequence_length
    return f"{batch.size} x {batch.sequence_length} = {tokens:,} tokens per step{splits}"


def stages_text(config: Config) -> str:
    """What the stages of the mesh do, on a line; "" without stages."""
    stages = config.mesh.stage
    if stages == 1:
        return ""
    table = pipeline.table_of(
        config.pipeline, stages=stages, microbatches=config.batch.accumulation
    )
    layers = parts.cut(config.model.num_layers, table.stage_of, config.pipeline.layers).layers
    each = f"{min(layers)} to {max(layers)}" if len(set(layers)) > 1 else str(layers[0])
    return (
        f"{table.name} on {stages} stages, {each} layers in each of {table.num_parts} parts; "
        f"bubble {pipeline.check(table).bubble:.1%}"
    )


def sync_text(config: Config) -> str:
    """How replicas agree, on a line; "" where they sum their gradients as usual."""
    chosen = config.sync
    if chosen.strategy == "mean":
        return ""
    first = {
        -1: ", after steps of 'mean' until the variance has settled", 0: "",
    }.get(chosen.warmup_steps, f", after {chosen.warmup_steps} steps of 'mean'")  # fmt: skip
    return f"{chosen.strategy} between {config.mesh.data} replicas{first}"


# -------------------------------------------------------------------------------------- the checks


def resolve(
    config: Config, num_devices: int | None = None, *, problems: Sequence[str] = ()
) -> Config:
    """The config with nothing left open: mesh sizes filled in, the vocabulary known.

    Args:
      config: what the file and the flags say; not changed.
      num_devices: devices of the run; None = not known yet, and not checked.
      problems: what is already known to be wrong, reported with the rest.

    Raises ConfigError listing all problems, each with its remedy.
    """
    config = copy.deepcopy(config)
    found = [*problems, *_unknown_keys(config)]
    if wrong := list(_wrong_types(config)):
        raise ConfigError(found + wrong)  # values of a wrong type cannot be compared with others
    found += _sections(config)
    found += _mesh(config, num_devices)
    if config.start_from and not pathlib.Path(config.start_from, "checkpoints").is_dir():
        found.append(
            f"start_from={config.start_from!r} holds no checkpoints: name the workdir of a run, "
            "or of an import by llmx.convert --from-hf"
        )
    if found:
        raise ConfigError(found)
    return config


def _unknown_keys(section: Any, prefix: str = "") -> Iterator[str]:
    """Attributes that a config file set and no section has."""
    hints, known = typing.get_type_hints(type(section)), leaf_types(Config)
    for name, value in vars(section).items():
        if name not in hints:
            yield _unknown_key(prefix + name, known)
        elif dataclasses.is_dataclass(hints[name]) and dataclasses.is_dataclass(value):
            yield from _unknown_keys(value, f"{prefix}{name}.")


def _wrong_types(section: Any, prefix: str = "") -> Iterator[str]:
    for name, hint in typing.get_type_hints(type(section)).items():
        value, key = vars(section)[name], prefix + name
        if not dataclasses.is_dataclass(hint):
            if not _has_type(value, hint):
                yield f"{key}={value!r} is not {_type_name(hint)}"
        elif isinstance(value, hint):
            yield from _wrong_types(value, f"{key}.")
        else:
            yield f"{key}={value!r} is not a {hint.__name__}: change its fields instead"


def _has_type(value: Any, hint: Any) -> bool:
    if typing.get_origin(hint) is tuple:
        inner = typing.get_args(hint)[0]
        return isinstance(value, tuple | list) and all(_has_type(item, inner) for item in value)
    if isinstance(hint, types.UnionType):
        return any(_has_type(value, one) for one in typing.get_args(hint))
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _type_name(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "a text", bool: "True or False"}
    if hint in names:
        return names[hint]
    if typing.get_origin(hint) is tuple:
        return f"a tuple of {_type_name(typing.get_args(hint)[0]).removeprefix('a ')}s"
    return str(hint)


def _sections(config: Config) -> list[str]:
    """Each section by itself; fills in the vocabulary where the tokenizer says it."""
    found = data_config.problems(config.data)
    if not found:
        num_tokens = _vocab_size(config.data)
        if not config.model.vocab_size:
            config.model.vocab_size = num_tokens
        elif 1 <= config.model.vocab_size < num_tokens:
            found.append(
                f"model.vocab_size={config.model.vocab_size} is less than the {num_tokens} tokens "
                "of the tokenizer: set it to at least that, or to 0 to follow the tokenizer"
            )
    found += families.problems(config.model)
    found += optim.problems(config.optimizer)
    found += guard.problems(config.guard)
    found += _agreement(config)
    found += checkpoint.problems(config.checkpoint)
    found += metrics.problems(config.metrics)
    found += launch.problems(config.launch)
    for key, table in (
        ("precision", precision.POLICIES),
        ("remat", remat.POLICIES),
        ("sharding.layout", sharding.LAYOUTS),
        ("sharding.gather", sharding.GATHERS),
        ("pipeline.schedule", pipeline.SCHEDULES),
        ("attention.implementation", ("auto", *attention.IMPLEMENTATIONS)),
    ):
        if (value := get_value(config, key)) not in table:
            near = difflib.get_close_matches(value, list(table), n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            found.append(f"{key}={value!r} is unknown: use one of {', '.join(table)}{hint}")
    for key, least in (
        ("steps", 1), ("seed", 0), ("batch.size", 1), ("batch.sequence_length", 1),
        ("batch.accumulation", 1), ("evaluation.every", 0), ("evaluation.batches", 0),
        ("sample.max_tokens", 1), ("sample.temperature", 0), ("sample.top_k", 0),
        ("profile.first_step", 0), ("profile.num_steps", 1), ("loss.z_loss", 0), ("loss.chunks", 0),
        ("attention.ulysses", 1),
    ):  # fmt: skip
        if (value := get_value(config, key)) < least:
            found.append(f"{key}={value} must be at least {least}")
    if not 0 < config.sample.top_p <= 1:
        found.append(f"sample.top_p={config.sample.top_p} must be above 0 and at most 1 (1 = off)")
    if config.batch.sequence_length > config.model.max_positions:
        found.append(
            f"batch.sequence_length={config.batch.sequence_length} is longer than "
            f"model.max_positions={config.model.max_positions}: use shorter sequences, or raise "
            "max_positions (a trained model then meets positions that it never saw)"
        )
    return found


def _agreement(config: Config) -> list[str]:
    """How replicas agree, against what they are."""
    chosen = config.sync
    if found := sync.problems(chosen):
        return found
    strategy, optimizer = sync.STRATEGIES[chosen.strategy], config.optimizer
    if strategy.optimizer and optimizer.name != strategy.optimizer:
        found.append(
            f"sync.strategy={chosen.strategy!r} is a form of {strategy.optimizer} and "
            f"optimizer.name={optimizer.name!r}: set optimizer.name={strategy.optimizer!r}, or use "
            "a strategy for any optimizer, as 'int8' or 'diloco'"
        )
    if strategy.agrees_on == sync.PARAMETERS and optimizer.ema_decay:
        found.append(
            f"optimizer.ema_decay={optimizer.ema_decay} with sync.strategy={chosen.strategy!r}: "
            "the parameters that all replicas agree on change only now and then, and have no "
            "average by steps; set it to 0"
        )
    if (
        chosen.strategy != "mean" and config.mesh.stage > 1
        and config.pipeline.schedule == "pipedream_2bw"
    ):  # fmt: skip
        found.append(
            f"sync.strategy={chosen.strategy!r} with pipeline.schedule='pipedream_2bw': replicas "
            "exchange what a step ends with, and that schedule leaves a batch under way; use "
            "another schedule, or strategy 'mean'"
        )
    return found


def replica_axes(config: Config, table: str) -> tuple[str, ...]:
    """The mesh axes over which a layout's table splits the width, with the config's strategy."""
    over = vars(sharding.LAYOUTS[config.sharding.layout])[table]["embed"]
    apart = config.sync.strategy != "mean"
    return tuple(axis for axis in over if not (apart and axis == sync.AXIS))


def _vocab_size(data: data_config.DataConfig) -> int:
    """Tokens of the tokenizer that the data section names, read from its file."""
    prefix = sources.SHARDS_PREFIX
    written = [name.removeprefix(prefix) for name in data.sources if name.startswith(prefix)]
    if data.train_tokenizer:
        return data.train_tokenizer
    if data.tokenizer == "auto" and written:
        return shards.read_index(pathlib.Path(written[0]))["vocab_size"]
    return tokenizers.load("bytes" if data.tokenizer == "auto" else data.tokenizer).vocab_size


def _mesh(config: Config, num_devices: int | None) -> list[str]:
    """Sizes against mesh axes; fills in the open mesh axis."""
    sizes = {axis: get_value(config.mesh, axis) for axis in sharding.AXES}
    if num_devices is None:
        if -1 in sizes.values():
            return []
    else:
        try:
            sizes = sharding.resolve_sizes(sizes, num_devices)
        except ValueError as error:
            return [f"mesh: {error}"]
    for axis, size in sizes.items():
        setattr(config.mesh, axis, size)
    if config.sharding.layout not in sharding.LAYOUTS:
        return []
    return [
        *_mesh_axes(config, sizes),
        *_stages(config, sizes["stage"]),
        *_tensor(config, sizes),
        *_batch_and_width(config, sizes),
    ]


def _mesh_axes(config: Config, sizes: dict[str, int]) -> Iterator[str]:
    for axis in config.mesh.across_slices:
        if axis not in sizes:
            near = difflib.get_close_matches(axis, sharding.AXES, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            yield f"mesh.across_slices names {axis!r}: use axes of {sharding.AXES}{hint}"


def _stages(config: Config, stages: int) -> Iterator[str]:
    """What pipeline parallelism splits."""
    if stages == 1:
        default = PipelineConfig()
        for key in ("table", "layers", "virtual_stages"):
            if (value := vars(config.pipeline)[key]) != vars(default)[key]:
                yield (
                    f"pipeline.{key}={value!r} has no effect with mesh.stage=1: leave it out, or "
                    "set mesh.stage to the number of stages"
                )
        return
    if config.pipeline.schedule not in pipeline.SCHEDULES:
        return
    try:
        table = pipeline.table_of(
            config.pipeline, stages=stages, microbatches=config.batch.accumulation
        )
        cut = parts.cut(config.model.num_layers, table.stage_of, config.pipeline.layers)
        if config.optimizer.name == "adafactor" and not cut.full:
            yield (
                f"optimizer.name='adafactor' with {cut.layers} layers in the parts of a pipeline: "
                "its means over a weight's layers would count empty places; use parts of equal "
                "size, or another optimizer"
            )
    except ValueError as error:
        yield f"mesh.stage={stages}, batch.accumulation={config.batch.accumulation}: {error}"


def _tensor(config: Config, sizes: dict[str, int]) -> Iterator[str]:
    """What tensor parallelism splits; the vocabulary is split over stages too."""
    model, tensor = config.model, sizes["tensor"]
    both = sizes["stage"] * tensor
    over = (
        f"tensor={tensor}" if sizes["stage"] == 1 else f"stage={sizes['stage']} x tensor={tensor}"
    )
    for key, value, what in (
        ("num_heads", model.num_heads, "query heads"),
        ("mlp_dim", model.mlp_dim, "the MLP"),
    ):
        if value >= 1 and value % tensor:
            fitting = [n for n in range(1, tensor + 1) if value % n == 0]
            yield (
                f"model.{key}={value} does not divide over tensor={tensor}, which splits {what}: "
                f"use tensor in {fitting} or another {key}"
            )
    kv_heads = model.num_kv_heads
    if kv_heads >= 1 and kv_heads % tensor:
        if not config.sharding.replicate_kv:
            fitting = [n for n in range(1, kv_heads + 1) if kv_heads % n == 0]
            yield (
                f"model.num_kv_heads={kv_heads} does not divide over tensor={tensor}: use tensor "
                f"in {fitting}, or sharding.replicate_kv=True, which keeps all K/V heads on each "
                "shard"
            )
        elif tensor % kv_heads:
            yield (
                f"model.num_kv_heads={kv_heads} and tensor={tensor}: with sharding.replicate_kv "
                "one must be a multiple of the other, so that a shard's query heads share K/V heads"
            )
    if model.vocab_size >= 1 and model.vocab_multiple >= 1:
        if model.padded_vocab % both:
            yield (
                f"the padded vocabulary of {model.padded_vocab} (vocab_size={model.vocab_size}) "
                f"does not divide over {over}: set model.vocab_multiple to a multiple of {both}"
            )
        elif config.loss.chunks and model.padded_vocab // both % config.loss.chunks:
            yield (
                f"loss.chunks={config.loss.chunks} does not divide the "
                f"{model.padded_vocab // both} rows of the head on each of {over} "
                "shards: use a divisor, or 0 = automatic"
            )


def _context(config: Config, sizes: dict[str, int]) -> Iterator[str]:
    """How attention over split positions divides."""
    ways, length, chosen = sizes["sequence"], config.batch.sequence_length, config.attention
    if ways == 1:
        return
    try:
        split = context.Split(ways, chosen.ulysses, chosen.zigzag)
    except ValueError as error:
        yield str(error)
        return
    if length >= 1 and length % ways == 0:
        try:
            split.order(length)
        except ValueError as error:
            yield f"batch.sequence_length: {error}"
    heads = config.model.num_heads // sizes["tensor"]
    if heads >= 1 and heads % chosen.ulysses:
        yield (
            f"attention.ulysses={chosen.ulysses} does not divide the {heads} query heads of a "
            f"device (model.num_heads={config.model.num_heads} over tensor={sizes['tensor']}): use "
            "a divisor; the other devices of `sequence` form rings"
        )


def _batch_and_width(config: Config, sizes: dict[str, int]) -> Iterator[str]:
    """What data parallelism and context parallelism split."""
    batch, model, layout = config.batch, config.model, config.sharding.layout
    ways = 1
    for axis in sharding.BATCH_AXES:
        ways *= sizes[axis]
    names = sharding.mesh_text({axis: sizes[axis] for axis in sharding.BATCH_AXES})
    parts = ways * batch.accumulation
    if batch.size >= 1 and batch.accumulation >= 1 and batch.size % parts:
        accumulated = f" times accumulation={batch.accumulation}" if batch.accumulation > 1 else ""
        low = batch.size // parts * parts
        yield (
            f"batch.size={batch.size} does not divide over {parts} = {names}"
            f"{accumulated}: use {' or '.join(str(n) for n in (low, low + parts) if n)}"
        )
    tokens = sizes["sequence"] * (sizes["tensor"] if config.sharding.sequence_parallel else 1)
    yield from _context(config, sizes)
    if batch.sequence_length >= 1 and batch.sequence_length % tokens:
        yield (
            f"batch.sequence_length={batch.sequence_length} does not divide over {tokens} = "
            f"sequence{sizes['sequence']} x tensor{sizes['tensor']}: use a multiple of {tokens}"
            + (", or sharding.sequence_parallel=False" if sizes["tensor"] > 1 else "")
        )
    if config.sharding.gather == "step" and not replica_axes(config, "parameters"):
        yield (
            f"sharding.gather='step' gathers nothing with layout {layout!r}, whose parameters are "
            "whole: use 'layer', or layout 'zero3' or 'hsdp'"
        )
    over = replica_axes(config, "optimizer")
    ways = 1
    for axis in over:
        ways *= sizes[axis]
    if model.width >= 1 and model.width % ways:
        yield (
            f"model.width={model.width} does not divide over {ways} = "
            f"{' x '.join(f'{axis}{sizes[axis]}' for axis in over)}, which layout "
            f"{layout!r} splits it over: use a multiple of {ways}, a smaller fsdp "
            "axis, or layout 'ddp'"
        )
