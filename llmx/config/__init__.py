"""A run as nested dataclasses, and as JSON in WORKDIR/config.json.

A config file's `get_config()` returns a `Config`. `llmx.config.flags` loads it and applies the
overrides (`--config.batch.size=64`); `llmx.config.checks.resolve` reports all problems in one
error, before anything is allocated or compiled; `llmx.config.recipe` turns it into a program.
"""

import copy
import dataclasses
import difflib
import json
import pathlib
import typing
from collections.abc import Iterable, Sequence
from typing import Any

from llmx.checkpoint.checkpointer import CheckpointConfig
from llmx.config import effects, value_types
from llmx.data import full_disk, remote
from llmx.data.config import DataConfig
from llmx.model import families, precision
from llmx.model.adapters import AdaptersConfig
from llmx.model.attention import cache
from llmx.model.attention.attend import AttentionConfig
from llmx.model.distillation import DistillationConfig
from llmx.model.experts.config import ExpertsConfig
from llmx.model.families import ModelConfig
from llmx.model.losses import NATS, LossConfig
from llmx.model.packed import PackedConfig
from llmx.model.preference import PreferenceConfig
from llmx.model.quantization import QuantizationConfig
from llmx.model.quantized import ProductsConfig
from llmx.model.remat import OffloadConfig
from llmx.pipeline.schedules import PipelineConfig
from llmx.runtime import bounds
from llmx.runtime.bounds import MACHINE, RUN, bounded, choice, plain, section_of
from llmx.runtime.divergence import RollbackConfig
from llmx.runtime.launch import LaunchConfig
from llmx.runtime.metrics import MetricsConfig
from llmx.runtime.watchdog import WatchdogConfig
from llmx.sharding import MeshConfig, ShardingConfig
from llmx.step.guard import GuardConfig
from llmx.step.optimizers import OptimizerConfig
from llmx.step.transforms.loss_scale import LossScaleConfig
from llmx.step.transforms.masks import PruningConfig
from llmx.sync.config import SyncConfig
from llmx.tables.config import TablesConfig


@dataclasses.dataclass
class BatchConfig:
    """What one step takes."""

    size: int = bounded(32, at_least=1)  # sequences per step, over all devices and microbatches
    sequence_length: int = bounded(256, at_least=1)  # tokens per sequence
    # microbatches that the step is done in, one after the other
    accumulation: int = bounded(1, at_least=1)


@dataclasses.dataclass
class EvaluationConfig:
    """Loss on the held-out split, and questions."""

    every: int = bounded(0, at_least=0)  # steps between evaluations; 0 = only at the end
    batches: int = bounded(8, at_least=0)  # microbatches, of stages whole batches; 0 = all held out
    choices: tuple[str, ...] = ()  # JSONL files of multiple-choice questions to answer as well


@dataclasses.dataclass
class SampleConfig:
    """The continuation printed when training ends, and the defaults of `llmx.generate`."""

    prompt: str = ""  # "" = no sample at the end
    max_tokens: int = bounded(200, at_least=1)  # tokens to add
    temperature: float = bounded(0.8, at_least=0)  # 0 = always the likeliest token
    top_k: int = bounded(0, at_least=0)  # sample from this many likeliest tokens; 0 = all
    # sample from the fewest tokens that have this probability together
    top_p: float = bounded(0.95, above=0, at_most=1, remedy="1 = off")
    # keys and values are kept in "int8", a scale for each token and head; "" = the compute dtype
    kv_cache: str = choice("", cache.FORMATS)


@dataclasses.dataclass
class ProfileConfig:
    """A window of steps that jax.profiler records into WORKDIR/profile."""

    first_step: int = bounded(0, at_least=0)  # 0 = no profile
    # steps in the window
    num_steps: int = bounded(3, at_least=1, needs={"profile.first_step": {"not": (0,)}})


@dataclasses.dataclass
class Config:
    """One run."""

    # everything that the run writes; "" = runs/<name of the config file>
    workdir: str = plain("", of=MACHINE)
    # a new run begins with these parameters: "WORKDIR", "WORKDIR@STEP", or a Hugging Face
    # directory, each local or a URL; with sparse tables a local folder of llmx.tables export
    start_from: str = ""
    # of start_from's layers, those that the model begins with, in this order: (0, 2, 5); () = all
    start_from_layers: tuple[int, ...] = ()
    # fields of `model` that may differ from start_from's: ("rope_theta",)
    start_changes: tuple[str, ...] = plain((), needs={"start_from": {"not": ("",)}})
    # go back to this checkpoint; newer ones are renamed <step>.replaced. -1 = the newest
    resume_step: int = bounded(-1, at_least=-1, remedy="-1 resumes from the newest")
    seed: int = bounded(0, at_least=0, at_most=2**32 - 1)  # of parameters and data order
    steps: int = bounded(1000, at_least=1)  # updates in the whole run
    precision: str = choice("bf16", precision.POLICIES)  # a name in precision.POLICIES
    # of gradient sums over devices: "fp32" | "bf16" | "fp16"; "" = what `precision` says
    reduce_dtype: str = choice("", lambda: precision.REDUCE_DTYPES)
    # what layers save for the backward pass: rules, see model/remat.py; "budget" = chosen by memory
    remat: str = "none"
    # with remat="budget": GiB that a device may hold at most; 0 = nearly all that it has
    memory_budget: float = bounded(0.0, at_least=0, at_most=1e6)
    offload: OffloadConfig = section_of(OffloadConfig, of=RUN)
    model: ModelConfig = section_of(ModelConfig, of=RUN)
    adapters: AdaptersConfig = section_of(AdaptersConfig, of=RUN)
    packed: PackedConfig = section_of(PackedConfig, of=RUN)
    batch: BatchConfig = section_of(BatchConfig, of=RUN)
    data: DataConfig = section_of(DataConfig, of=RUN)
    mesh: MeshConfig = section_of(MeshConfig, of=RUN)
    sharding: ShardingConfig = section_of(ShardingConfig, of=RUN)
    pipeline: PipelineConfig = section_of(PipelineConfig, of=RUN)
    sync: SyncConfig = section_of(SyncConfig, of=RUN)
    attention: AttentionConfig = section_of(AttentionConfig, of=RUN)
    experts: ExpertsConfig = section_of(
        ExpertsConfig, of=RUN, needs={"model.num_experts": {"not": (0,)}}
    )
    products: ProductsConfig = section_of(ProductsConfig, of=RUN)
    quantization: QuantizationConfig = section_of(QuantizationConfig, of=RUN)
    tables: TablesConfig = section_of(TablesConfig, of=RUN)
    loss: LossConfig = section_of(LossConfig, of=RUN)
    preference: PreferenceConfig = section_of(PreferenceConfig, of=RUN)
    distillation: DistillationConfig = section_of(DistillationConfig, of=RUN)
    loss_scale: LossScaleConfig = section_of(LossScaleConfig, of=RUN)
    optimizer: OptimizerConfig = section_of(OptimizerConfig, of=RUN)
    pruning: PruningConfig = section_of(PruningConfig, of=RUN)
    guard: GuardConfig = section_of(GuardConfig, of=RUN)
    rollback: RollbackConfig = section_of(RollbackConfig, of=RUN)
    checkpoint: CheckpointConfig = section_of(CheckpointConfig, of=RUN)
    evaluation: EvaluationConfig = section_of(EvaluationConfig, of=RUN)
    metrics: MetricsConfig = section_of(MetricsConfig, of=RUN)
    sample: SampleConfig = section_of(SampleConfig, of=RUN)
    profile: ProfileConfig = section_of(ProfileConfig, of=RUN)
    launch: LaunchConfig = section_of(LaunchConfig, of=MACHINE)
    watchdog: WatchdogConfig = section_of(WatchdogConfig, of=MACHINE, needs={"a watchdog": True})


def default() -> Config:
    """A config to change: a small Llama on the text of Python's standard library."""
    return Config()


_LONGEST = 4000  # characters of a problem: the values that it repeats may have any number


class ConfigError(ValueError):
    """All problems of a config, one a line, of a long one its beginning and end."""

    def __init__(self, problems: Sequence[str]):
        problems = [
            f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
            if len(text) > _LONGEST
            else text
            for text in problems
        ]
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n  - ".join([f"the config has {count}:", *problems]))
        self.problems = problems


def leaf_types(kind: type, prefix: str = "") -> dict[str, Any]:
    """{"batch.size": int, ...} of a nested dataclass."""
    found = {}
    for name, hint in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint):
            found |= leaf_types(hint, f"{prefix}{name}.")
        else:
            found[prefix + name] = hint
    return found


def owners(kind: type = Config, prefix: str = "", of: str = RUN) -> dict[str, str]:
    """Of each key, as "batch.size", whether it is the run's or the machine's: RUN or MACHINE."""
    found, hints = {}, typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        hint, key, its = hints[field.name], prefix + field.name, field.metadata.get("of", of)
        found |= owners(hint, f"{key}.", its) if dataclasses.is_dataclass(hint) else {key: its}
    return found


# What other trainers call a key.
OTHER_NAMES = {
    "lr": "optimizer.learning_rate", "max_lr": "optimizer.learning_rate",
    "beta1": "optimizer.b1", "beta2": "optimizer.b2", "wd": "optimizer.weight_decay",
    "grad_clip": "optimizer.clip_norm", "max_grad_norm": "optimizer.clip_norm",
    "batch_size": "batch.size", "global_batch_size": "batch.size",
    "seq_len": "batch.sequence_length", "max_seq_len": "batch.sequence_length",
    "gradient_accumulation_steps": "batch.accumulation", "max_steps": "steps",
    "train_steps": "steps", "hidden_size": "model.width", "n_layer": "model.num_layers",
    "dtype": "precision", "output_dir": "workdir",
}  # fmt: skip


def unknown_key(key: str, known: Iterable[str]) -> str:
    """The problem of a key that no section has, with the key that was probably meant."""
    known = list(known)
    end = key.rpartition(".")[2]
    if end in OTHER_NAMES and OTHER_NAMES[end] in known:
        near = [OTHER_NAMES[end]]
        return f"{key[:200]} is not a key of the config: did you mean {near[0]}?"
    near = _of_sections(key, known) or difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if not near:  # the right key in the wrong section
        ends = {name.rpartition(".")[2]: name for name in reversed(known)}
        last = difflib.get_close_matches(key.rpartition(".")[2], ends, n=1)
        near = [ends[name] for name in last]
    hint = f"did you mean {near[0]}?" if near else "docs/configuration.md lists the keys"
    return f"{key[:200]} is not a key of the config: {hint}"


# Sections whose keys are meant where several have one of that name.
FIRST = ("optimizer", "model", "batch", "data", "checkpoint")


def _of_sections(key: str, known: Sequence[str]) -> list[str]:
    """The key of this very name in the section that was probably meant; [] = none has one."""
    section, _, end = key.rpartition(".")
    of = {name.rpartition(".")[0]: name for name in known if name.rpartition(".")[2] == end}
    near = difflib.get_close_matches(section, of, n=1, cutoff=0.5)
    near = near or [name for name in FIRST if name in of] or list(of)
    return [of[name] for name in near[:1]]


def get_value(config: Any, key: str) -> Any:
    """The value of a key as "batch.size"."""
    for name in key.split("."):
        config = vars(config)[name]
    return config


def set_value(config: Any, key: str, value: Any):
    """Sets the value of a key as "batch.size"."""
    section, _, name = key.rpartition(".")
    vars(get_value(config, section) if section else config)[name] = value


def to_json(config: Config) -> dict:
    """The config as nested dicts of JSON values."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def from_json(values: dict) -> Config:
    """The config that `to_json` wrote. Raises ConfigError for keys of another version."""
    known, config, problems = leaf_types(Config), Config(), []

    def fill(values: dict, prefix: str):
        for name, value in values.items():
            key = prefix + name
            if isinstance(value, dict):
                fill(value, f"{key}.")
            elif key not in known:
                problems.append(unknown_key(key, known))
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
    full_disk.write_atomically(path, (json.dumps(to_json(config), indent=2) + "\n").encode())


def load_run(workdir: str, *, with_ngrams: bool = False) -> Config:
    """The resolved config of the run in `workdir`, whose model is a decoder without sparse tables.

    with_ngrams: it may have tables of n-grams, whose rows are on the devices.

    Raises ValueError where there is none, a damaged one, or one of another model.
    """
    config = load_run_with_tables(workdir)
    has = ""
    if config.model.recommender.name:
        has = f"model.recommender.name={config.model.recommender.name!r}"
    elif config.model.ngram_tables and not with_ngrams:
        has = f"model.ngram_tables={config.model.ngram_tables}"
    elif config.model.ngram_tables and config.tables.cache_rows:
        has = f"model.ngram_tables={config.model.ngram_tables} and "
        has += f"tables.cache_rows={config.tables.cache_rows}"
    if has:
        raise ValueError(
            f"{workdir} is a run with sparse tables ({has}), whose rows this command does not look "
            "up: python -m llmx.evaluate --workdir ... evaluates it"
        )
    return config


def load_run_with_tables(workdir: str) -> Config:
    """The same, of runs with sparse tables too."""
    remote.require_local("--workdir=", workdir, "copy the run to a local folder first")
    path = pathlib.Path(workdir) / "config.json"
    if not path.is_file():
        raise ValueError(
            f"--workdir={workdir} holds no run: {path} does not exist; train one with "
            f"python -m llmx.train --config ... --workdir {workdir}"
        )
    config = read_saved(path)
    if config.model.own:
        raise ValueError(
            f"{workdir} holds a run of a program's own model, {config.model.own!r}: commands know "
            "the decoder only; llmx.fit(model=...) with this workdir goes on and evaluates"
        )
    config.workdir = str(workdir)
    return config


def read_saved(path: str | pathlib.Path) -> Config:
    """The resolved config in a run's config.json, with the settings of this machine in the place of
    those of the machine that it was written on. Raises ValueError where it is damaged."""
    return effects.without_idle(of_here(read_written(path), pathlib.Path(path).parent))


def of_here(written: Config, workdir: pathlib.Path) -> Config:
    """A copy of a config that is read, with this machine's own settings: a work directory may come
    from somebody else, and says nothing of what is loaded, written or asked here."""
    config, default = copy.deepcopy(written), Config()
    for key in machine_keys():
        set_value(config, key, get_value(default, key))
    config.workdir = str(workdir)
    return config


def machine_keys() -> list[str]:
    """The keys whose values are settings of a machine."""
    return [key for key, of in owners().items() if of == MACHINE]


def read_written(path: str | pathlib.Path) -> Config:
    """The config in a run's config.json as it was written. Raises ValueError where damaged."""
    try:
        values = json.loads(pathlib.Path(path).read_bytes().decode())
        if not isinstance(values, dict):
            raise ValueError("it is no JSON object")
        config = from_json(values)
        if problems := list(value_types.wrong_types(config)) or _out_of_bounds(config):
            raise ConfigError(problems)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is damaged, or of another version: {error}\nbring back a copy, or run the "
            "training command again, which writes it anew"
        ) from error
    return config


def _out_of_bounds(config: Config) -> list[str]:
    """What no run can have had, section by section."""
    found = bounds.problems(config, "") + families.problems(config.model)
    # Its optimizer and loss may be some that its config file has added, and are not here.
    config = dataclasses.replace(
        config, optimizer=dataclasses.replace(config.optimizer, name="adamw"),
        loss=dataclasses.replace(config.loss, of_tokens=NATS),
    )  # fmt: skip
    for name, section in vars(config).items():
        if dataclasses.is_dataclass(section) and name != "model":
            found += bounds.problems(section, f"{name}.")
    return found
