"""Runs as stages of a compression take and leave them: a folder with a config, a tokenizer and one
checkpoint of parameters alone, which evaluates, generates, trains on and exports as any other."""

import copy
import functools
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from llmx import config as config_lib
from llmx import convert, sharding
from llmx.checkpoint import checkpointer, directory, hf_reader, identity, streamed
from llmx.config import Config
from llmx.config import recipe as recipe_lib
from llmx.contract import Batch
from llmx.data import dataset as data_lib
from llmx.data import tokenizers
from llmx.data.config import DataConfig
from llmx.data.dataset import Dataset
from llmx.evaluate import held_out, saved_run
from llmx.model import packed
from llmx.model.adapters import AdaptersConfig
from llmx.model.distillation import DistillationConfig
from llmx.model.packed import Packed
from llmx.model.preference import PreferenceConfig
from llmx.model.quantization import QuantizationConfig
from llmx.pipeline.schedules import PipelineConfig
from llmx.runtime import launch
from llmx.sharding import trees
from llmx.step.step import Recipe
from llmx.step.transforms.masks import PruningConfig
from llmx.sync.config import SyncConfig

CHECKPOINTS, CONFIG = "checkpoints", "config.json"


class Opened(NamedTuple):
    """A run on the devices that are here, for passes forward."""

    config: Config  # resolved for these devices
    recipe: Recipe
    params: Any  # of the model, adapters merged, the average where the run keeps one


def opened(workdir: str, *, step: int | None = None) -> Opened:
    """The run of a work directory. Raises ValueError where it has no checkpoint, or its model does
    not fit the devices."""
    run = config_lib.load_run(workdir)
    launch.start(launch.LaunchConfig())
    run = saved_run.config_of(run, workdir, own_data=True)
    run.quantization = QuantizationConfig()  # as `written` leaves it: no ranges beside weights
    recipe = recipe_lib.make_recipe(run)
    return Opened(run, recipe, saved_run.params_of(run, recipe, workdir, step=step).state)


def dataset_of(run: Config) -> Dataset:
    """The text of a run."""
    return data_lib.open_dataset(
        run.data, sequence_length=run.batch.sequence_length, seed=run.seed, log=launch.note
    )


def training_batches(run: Opened, number: int) -> list[Batch]:
    """The first batches of a run's training text, on its mesh: for calibration."""
    dataset, to = dataset_of(run.config), run.recipe.loss.batch_sharding
    size = held_out.batch_size(run.config)
    rows = sharding.process_rows(to, (size, dataset.sequence_length))
    local = (dataset.train_rows(index, rows, size) for index in range(number))
    return [
        {name: sharding.assemble(batch[name], rows, to, size) for name in batch} for batch in local
    ]


def written(
    config: Config, params: Any, folder: pathlib.Path, *, origin: str, keep: bool = False
) -> None:  # fmt: skip
    """Makes the run of a config and parameters in a folder; config.json comes last.

    origin: a work directory with the tokenizer. keep: what else is in the folder stays. Raises
    `writer.Unwritten`.
    """
    directory.remove(folder / CHECKPOINTS if keep else folder)
    config = _plain(config, folder)
    arrays = {f"params/{name}": _streamed(leaf) for name, leaf in trees.named(params).items()}
    meta = {"imported_from": str(origin), "config": config_lib.to_json(config)}
    streamed.save(str(folder / CHECKPOINTS), 0, arrays, meta)
    tokenizers.of_run(origin).save(folder / tokenizers.FILE_NAME)
    config_lib.save_run(config)


def _plain(config: Config, folder: pathlib.Path) -> Config:
    """The config of a run that begins with parameters of this model: on any devices, of no groups.

    What the run's weights were trained as is in their numbers, and not in its config any more.
    """
    config = copy.deepcopy(config)
    config.workdir, config.start_from, config.start_changes = str(folder), "", ()
    config.resume_step = -1
    config.adapters, config.preference = AdaptersConfig(), PreferenceConfig()
    config.pruning = PruningConfig()  # zeros are its masks
    config.quantization = QuantizationConfig()  # weights are rounded already
    config.distillation, config.start_from_layers = DistillationConfig(), ()
    config.mesh, config.pipeline = sharding.MeshConfig(), PipelineConfig()
    config.sync = SyncConfig()
    config.optimizer.ema_decay = 0.0
    config.data.tokenizer = str(folder / tokenizers.FILE_NAME)
    return config


def _streamed(leaf: Any) -> streamed.Streamed:
    leaf = np.asarray(jax.device_get(leaf))
    return streamed.Streamed(leaf.shape, leaf.dtype, False, functools.partial(_part, leaf))


def _part(leaf: np.ndarray, index: tuple[slice, ...]) -> np.ndarray:
    return leaf[index]


def begun(source: str, folder: pathlib.Path, data: DataConfig | None) -> None:
    """Makes a run of a work directory, "W" or "W@STEP", or of a Hugging Face directory.

    data: in the place of the run's own, of a Hugging Face directory in the place of the default.
    """
    place, step = identity.origin(source)
    if hf_reader.is_checkpoint(place):
        imported = folder.with_name(folder.name + ".imported")
        directory.remove(imported)
        convert.from_hf(place, str(imported))
        place, step = str(imported), None
    run, config = opened(place, step=step), config_lib.load_run(place)
    if data is not None:
        config.data = copy.deepcopy(data)
    written(config, run.params, folder, origin=place)


def problems_of_source(source: str) -> Iterator[str]:
    """Why a compression cannot begin with `source`."""
    place, step = identity.origin(source)
    if hf_reader.is_checkpoint(place):
        if step is not None:
            yield f"--workdir={source} names a step of a Hugging Face checkpoint, which has none"
        return
    if not pathlib.Path(place, CONFIG).is_file():
        yield (
            f"--workdir={source} holds no run and no Hugging Face checkpoint: name the work "
            "directory of a run, WORKDIR@STEP, or a directory with config.json and safetensors"
        )
        return
    if name := config_lib.load_run(place).model.own:
        yield f"--workdir={source} has a model of its own ({name!r}): stages take decoders"
    if name := config_lib.load_run(place).packed.format:
        yield (
            f"--workdir={source} has packed weights (packed.format={name!r}), which no stage "
            "takes: name the run that it was made of"
        )
    steps = checkpointer.list_steps(f"{place}/{CHECKPOINTS}")
    if not steps or (step is not None and step not in steps):
        which = "no checkpoint yet" if not steps else f"no checkpoint {step}, but {steps}"
        yield f"--workdir={source} has {which}: wait for it, or name another"


def model_of(source: str) -> Any:
    """The `ModelConfig` of a source that has no `problems_of_source`."""
    place, _ = identity.origin(source)
    if hf_reader.is_checkpoint(place):
        return hf_reader.read_model(place)
    return config_lib.load_run(place).model


def num_bytes(folder: pathlib.Path) -> int:
    """Bytes of a run's checkpoint on disk."""
    return directory.num_bytes(directory.root_of(str(folder / CHECKPOINTS)))


def nonzero(params: Mapping[str, Any]) -> tuple[int, int]:
    """Numbers of parameters that are not zero, and of all: of packed weights what codes stand for,
    of which scales and zero points are no part."""
    leaves = jax.tree.leaves(jax.device_get(params), is_leaf=packed.is_packed)
    pairs = [_nonzero(leaf) for leaf in leaves]
    return sum(number for number, _ in pairs), sum(size for _, size in pairs)


def _nonzero(leaf: Any) -> tuple[int, int]:
    if not packed.is_packed(leaf):
        return int(np.count_nonzero(leaf)), np.size(leaf)
    found = 0
    for layer in range(leaf.codes.shape[0]):
        codes_IO, _, zero_GO = packed.codes_of(_layer(leaf, layer))
        zero_GO = np.full((1, 1), 1 << leaf.bits - 1) if zero_GO is None else zero_GO
        codes_GgO = codes_IO.reshape(len(zero_GO), -1, codes_IO.shape[1])
        found += int(np.count_nonzero(codes_GgO != zero_GO[:, None]))
    return found, math.prod(packed.shape_of(leaf))


def _layer(leaf: Packed, index: int) -> Packed:
    return jax.tree.map(lambda array: array[index], leaf)
