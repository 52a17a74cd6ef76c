"""The stage of a recipe that puts a train of tensors in the place of a run's embedding table."""

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from llmx import config as config_lib
from llmx.compress import saved
from llmx.model import tensor_train
from llmx.model.families import ModelConfig
from llmx.runtime.bounds import bounded


@dataclasses.dataclass
class TensorTrain:
    """The embedding table becomes a train of tensors."""

    rank: int = bounded(16, at_least=1)
    cores: int = bounded(3, at_least=2, at_most=3)


def run(job) -> None:
    """Puts a train of tensors in the place of the embedding table."""
    config, opened = config_lib.load_run(job.source), saved.opened(job.source)
    config.model = model_of(config.model, job.options)
    params = dict(jax.device_get(opened.params))
    shapes = tensor_train.shapes(config.model)
    cores = cores_of_table(np.float64(params["embedding"]), list(shapes.values()))
    params["embedding"] = dict(zip(shapes, cores, strict=True))
    saved.written(config, params, job.folder, origin=job.source)


def model_of(model: ModelConfig, options: TensorTrain) -> ModelConfig:
    """The model with the train."""
    return dataclasses.replace(
        model, embedding_rank=options.rank, embedding_cores=options.cores
    )  # fmt: skip


def problems(model: ModelConfig, options: TensorTrain) -> Iterator[str]:
    """What is wrong with a train in the place of a model's table."""
    if model.embedding_rank:
        yield f"the embedding is a train of rank {model.embedding_rank} already: leave it out"
        return
    yield from tensor_train.problems(model_of(model, options))


def cores_of_table(table_VD: np.ndarray, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """The cores [r, v, d, s] of `tensor_train.shapes` whose train is nearest to a table, core by
    core (TT-SVD, Oseledets 2011); fp32. Ranks beyond those of the table are filled with zeros."""
    rows, columns = [s[1] for s in shapes], [s[2] for s in shapes]
    whole = np.zeros((int(np.prod(rows)), int(np.prod(columns))))
    whole[: len(table_VD)] = table_VD
    number = len(shapes)
    whole = whole.reshape(*rows, *columns)
    order = [axis for pair in zip(range(number), range(number, 2 * number), strict=True)
             for axis in pair]  # fmt: skip
    left, cores, rank = whole.transpose(order), [], 1
    for at, shape in enumerate(shapes):
        core = np.zeros(shape)
        if at == number - 1:
            core[:rank] = left.reshape(rank, shape[1], shape[2], 1)
            cores.append(np.float32(core))
            break
        u, values, v = np.linalg.svd(left.reshape(rank * shape[1] * shape[2], -1), False)
        kept = min(shape[3], len(values))
        core[:rank, :, :, :kept] = u[:, :kept].reshape(rank, shape[1], shape[2], kept)
        cores.append(np.float32(core))
        left, rank = values[:kept, None] * v[:kept], kept
    return cores
