"""Every cross-check of a config: all problems at once, before anything is allocated."""

import copy
import dataclasses
import pathlib
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from llmx import config, sharding
from llmx import config as config_lib
from llmx.checkpoint import checkpointer
from llmx.config import Config, ConfigError
from llmx.data import config as data_config
from llmx.data import shards, sources, tokenizers
from llmx.model import families
from llmx.model.attention import split as split_lib
from llmx.pipeline import schedules
from llmx.pipeline import stages as stages_lib
from llmx.pipeline.schedules import PipelineConfig
from llmx.runtime import bounds, launch
from llmx.sync import replicas, strategy

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
    hints, known = typing.get_type_hints(type(section)), config.leaf_types(Config)
    for name, value in vars(section).items():
        if name not in hints:
            yield config.unknown_key(prefix + name, known)
        elif dataclasses.is_dataclass(hints[name]) and dataclasses.is_dataclass(value):
            yield from _unknown_keys(value, f"{prefix}{name}.")


def _wrong_types(section: Any, prefix: str = "") -> Iterator[str]:
    for name, hint in typing.get_type_hints(type(section)).items():
        value, key = vars(section)[name], prefix + name
        if not dataclasses.is_dataclass(hint):
            if not _has_type(value, hint):
                yield f"{key}={value!r} is not {type_name(hint)}"
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


def type_name(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "a text", bool: "True or False"}
    if hint in names:
        return names[hint]
    if typing.get_origin(hint) is tuple:
        return f"a tuple of {type_name(typing.get_args(hint)[0]).removeprefix('a ')}s"
    return str(hint)


def _sections(config: Config) -> list[str]:
    """Each section by itself: the bounds of its values, and how they fit each other."""
    found = bounds.problems(config, "")
    # Sections whose values must also fit each other; of the others only the bounds are checked.
    checked = {
        "data": _data(config),
        "model": families.problems(config.model),
        "sync": strategy.conflicts(config),
        "checkpoint": checkpointer.problems(config.checkpoint),
        "launch": launch.problems(config.launch),
    }
    for name, section in vars(config).items():
        if dataclasses.is_dataclass(section):
            found += checked[name] if name in checked else bounds.problems(section, f"{name}.")
    if config.batch.sequence_length > config.model.max_positions:
        found.append(
            f"batch.sequence_length={config.batch.sequence_length} is longer than "
            f"model.max_positions={config.model.max_positions}: use shorter sequences, or raise "
            "max_positions (a trained model then meets positions that it never saw)"
        )
    return found


def _data(config: Config) -> list[str]:
    """The data section; fills in the vocabulary from the tokenizer."""
    if found := [*bounds.problems(config.data, "data."), *data_config.problems(config.data)]:
        return found
    num_tokens = _vocab_size(config.data)
    if not config.model.vocab_size:
        config.model.vocab_size = num_tokens
    elif 1 <= config.model.vocab_size < num_tokens:
        found.append(
            f"model.vocab_size={config.model.vocab_size} is less than the {num_tokens} tokens "
            "of the tokenizer: set it to at least that, or to 0 to follow the tokenizer"
        )
    return found


def replica_axes(config: Config, table: str) -> tuple[str, ...]:
    """The mesh axes over which a layout's table splits the width, with the config's strategy."""
    over = vars(sharding.LAYOUTS[config.sharding.layout])[table]["embed"]
    apart = config.sync.strategy != "mean"
    return tuple(axis for axis in over if not (apart and axis == replicas.AXIS))


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
    sizes = {axis: config_lib.get_value(config.mesh, axis) for axis in sharding.AXES}
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
            yield f"mesh.across_slices names {axis!r}: {bounds.use_one_of(axis, sharding.AXES)}"


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
    if config.pipeline.schedule not in schedules.SCHEDULES:
        return
    try:
        table = schedules.table_of(
            config.pipeline, stages=stages, microbatches=config.batch.accumulation
        )
        cut = stages_lib.cut(config.model.num_layers, table.stage_of, config.pipeline.layers)
        if config.optimizer.name == "adafactor" and not cut.full:
            yield (
                f"optimizer.name='adafactor' with {cut.layers} layers in the model chunks of a "
                "pipeline: its means over a weight's layers would count empty slots; use "
                "chunks of equal size, or another optimizer"
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
        split = split_lib.Split(ways, chosen.ulysses, chosen.zigzag)
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
