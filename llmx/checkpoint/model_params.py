"""A run's model as other commands use it: its parameters, with adapters merged into them, and
weights that were trained as integers rounded."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from llmx import sharding
from llmx.checkpoint import checkpointer, hf_reader, identity, relaid, reshard, restore, streamed
from llmx.checkpoint.manifest import Document
from llmx.checkpoint.restore import Restored
from llmx.model import adapters, looked_up, precision, quantization, quantized
from llmx.model.adapters import AdaptersConfig
from llmx.model.execution import Execution
from llmx.model.families import ModelConfig
from llmx.model.quantization import AVERAGE, QuantizationConfig
from llmx.pipeline.permutation import IDENTITY, LayerPermutation
from llmx.sharding import trees
from llmx.step.step import Recipe

FROZEN = "frozen"  # in checkpoints, the parameters that are not trained


def adapters_of(meta: Mapping[str, Any]) -> AdaptersConfig:
    """Those of the run that wrote a checkpoint's meta; of older versions none."""
    return identity.section_of(meta, "adapters", AdaptersConfig)


def quantization_of(meta: Mapping[str, Any]) -> QuantizationConfig:
    """That of the run that wrote a checkpoint's meta; of older versions none."""
    return identity.section_of(meta, "quantization", QuantizationConfig)


def restore_params(
    workdir: str, abstract: Any, *, ema: bool | Callable[[Mapping[str, Any]], bool] = False,
    order: LayerPermutation = IDENTITY,
    step: int | None = None, log: Callable[[str], None], reader: restore.Reader | None = None,
) -> Restored:  # fmt: skip
    """The parameters of a run's model, or with `ema` their average, in the dtypes that they were
    saved in; with `streamed.FROM_FILES` not in memory, but to be read part by part.

    Args:
      abstract: shapes with shardings of the model's parameters, or a function of the document.
      ema: or a function of the checkpoint's meta.
      order: in which the layers are wanted.

    Weights with an adapter are merged, in fp32: W + scale A B; those that were trained as integers
    are what their codes stand for. Raises ValueError if the run has no checkpoint yet.
    """

    def averaged(meta: Mapping[str, Any]) -> bool:
        return ema(meta) if callable(ema) else ema

    def prefix(document: Document) -> str:
        return FROZEN if adapters_of(document.meta).rank else _own(averaged(document.meta))

    def wanted(document: Document) -> Any:
        like = abstract(document) if callable(abstract) else abstract
        return _with_steps(like, quantization_of(document.meta))

    restored = checkpointer.restore_saved(
        workdir, wanted, prefix=prefix, order=order, step=step, log=log, reader=reader
    )
    config = adapters_of(restored.meta)
    if not config.rank:
        return restored._replace(state=_rounded(restored.state, restored.meta))
    found = _restore_own(
        workdir, restored.state, config, ema=averaged(restored.meta), order=order,
        step=restored.step, log=log,
    )  # fmt: skip
    state = adapters.merged(restored.state, found.state, config, merge=_merge)
    return restored._replace(state=state)


def _with_steps(like: Any, config: QuantizationConfig) -> Any:
    """Shapes of a model's parameters with those of the scales that are learned, whole."""
    if not config.learns:
        return like  # packed weights, which are no dicts, too
    named, whole = trees.named(like), _whole(like)
    no_axes = jax.tree.map(lambda leaf: (None,) * len(leaf.shape), like)
    shapes, _ = quantization.with_steps(config, like, no_axes)
    return trees.nest({
        name: named[name] if name in named
        else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole)
        for name, leaf in trees.named(shapes).items()
    })  # fmt: skip


def _rounded(params: Any, meta: Mapping[str, Any]) -> Any:
    """The model's parameters, those that are quantized as the numbers of their codes."""
    config = quantization_of(meta)
    if not config.bits:
        return params
    compute = precision.POLICIES[meta["config"]["precision"]].compute
    named = trees.named(params)
    if not any(isinstance(leaf, streamed.Stored) for leaf in named.values()):
        return quantization.dequantized_on_mesh(params, config, compute)
    for name in [name for name in named if quantization.is_quantized(name)]:
        step = named.get(quantization.step_of(name))
        named[name] = RoundedStored.by(named[name], name, config, compute, step)
    return quantization.without_steps(trees.nest(named))


def restore_evaluated(
    workdir: str, recipe: Recipe, *, ema: bool = False, step: int | None = None,
    log: Callable[[str], None],
) -> Restored:  # fmt: skip
    """What `restore_params` returns of the parameters of a recipe's model, with the ranges that the
    inputs of their products are rounded by, where the run has averaged these, and with its tables,
    where it has some."""
    restored = restore_params(workdir, recipe.loss.model_params, ema=ema, step=step, log=log)
    if recipe.loss.execution.tables is not None:
        state = recipe.saved(recipe.abstract).extra[looked_up.TABLES]
        found = checkpointer.restore_saved(
            workdir, lambda saved: relaid.as_saved(recipe, state, looked_up.TABLES, saved),
            prefix=relaid.path_of(looked_up.TABLES), step=restored.step, log=log,
        )  # fmt: skip
        own = relaid.onto_devices(recipe, looked_up.TABLES, found.state, found.meta, log)
        return restored._replace(state=restored.state | {looked_up.TABLES: own})
    extra = dict(recipe.loss.abstract_extra)
    if quantized.RANGES not in extra or recipe.loss.quantization.activations != AVERAGE:
        return restored
    found = checkpointer.restore_saved(
        workdir, extra[quantized.RANGES], prefix=f"extra/{quantized.RANGES}", step=restored.step,
        log=log,
    )  # fmt: skip
    amax, axes = found.state.amax, recipe.loss.model_axes
    return restored._replace(state=quantized.params_with_ranges(restored.state, amax, axes))


def of_hugging_face(
    place: str, like: Any, *, model_of: Callable[[ModelConfig], ModelConfig],
    order: LayerPermutation = IDENTITY,
) -> Any:  # fmt: skip
    """The parameters of a Hugging Face checkpoint, with the shardings and dtypes of `like`.

    `model_of`: from the model of its config.json to that of `like`. Raises ValueError.
    """
    source = hf_reader.open_checkpoint(place, model_of(hf_reader.read_model(place)))
    named = hf_reader.to_shards(source, trees.named(like), order=order)
    return trees.unnamed(named, like)


def restore_reference(
    workdir: str, abstract: Any, *, step: int | None = None, log: Callable[[str], None]
) -> Restored:  # fmt: skip
    """The parameters with which a run began that learns from preferences.

    Raises ValueError if the run has no checkpoint yet.
    """
    return checkpointer.restore_saved(workdir, abstract, prefix=FROZEN, step=step, log=log)


def restore_adapters(
    workdir: str, abstract: Any, config: AdaptersConfig, *, ema: bool = False,
    step: int | None = None, log: Callable[[str], None],
) -> Restored:  # fmt: skip
    """The adapters of a run beside a model with parameters `abstract`, layers in its order.

    Raises ValueError if the run has no checkpoint yet.
    """
    return _restore_own(workdir, abstract, config, ema=ema, order=IDENTITY, step=step, log=log)


def _own(ema: bool) -> str:
    """Where a checkpoint has what is trained, or its average."""
    return "ema" if ema else "params"


def _restore_own(workdir, model_params, config: AdaptersConfig, *, ema, order, step, log):
    of_model, whole = trees.named(model_params), _whole(model_params)
    wanted = trees.nest({
        name: jax.ShapeDtypeStruct(shape, np.float32, sharding=whole)
        for name, shape in adapters.named(config, of_model, lambda leaf: leaf.shape, config.rank)
    })  # fmt: skip
    return checkpointer.restore_saved(
        workdir, wanted, prefix=_own(ema), order=order, step=step, log=log
    )


def _whole(params: Any) -> Any:
    """The sharding of small arrays beside these."""
    to = getattr(jax.tree.leaves(params)[0], "sharding", None)
    return NamedSharding(to.mesh, PartitionSpec()) if isinstance(to, NamedSharding) else to


def _merge(weight: Any, down: Any, up: Any, scale: float) -> Any:
    """W + scale A B in fp32, on the weight's mesh, or of what is read part by part."""
    if isinstance(weight, streamed.Stored):
        return MergedStored.of(weight, down, up, scale)
    return adapters.merged_on_mesh(weight, down, up, scale)


@dataclasses.dataclass(frozen=True, eq=False)
class MergedStored(streamed.Stored):
    """A weight in a checkpoint's files with an adapter in memory: an index reads W + scale A B."""

    down: np.ndarray | None = None
    up: np.ndarray | None = None
    scale: float = 0.0

    @classmethod
    def of(cls, stored: streamed.Stored, down: Any, up: Any, scale: float) -> "MergedStored":
        own = np.asarray(down), np.asarray(up), scale
        return cls(stored.shape, np.dtype(np.float32), stored.store, stored.rows, *own)

    def __getitem__(self, index: Any) -> np.ndarray:
        index = () if index is ... else index if isinstance(index, tuple) else (index,)
        weight = np.asarray(super().__getitem__(index), np.float32)
        layers, *rest = index or (slice(None),)
        if isinstance(layers, int | np.integer):
            layers, rest = slice(layers, layers + 1), (0, *rest)
        else:
            rest = (slice(None), *rest)
        added = adapters.low_rank(self.down[layers], self.up[layers], einsum=np.einsum)
        return weight + self.scale * added[tuple(rest)]


@dataclasses.dataclass(frozen=True, eq=False)
class RoundedStored(streamed.Stored):
    """A weight in a checkpoint's files, of which an index reads the numbers of its codes."""

    name: str = ""
    config: QuantizationConfig = dataclasses.field(default_factory=QuantizationConfig)
    compute: Any = None
    log_step: np.ndarray | None = None

    @classmethod
    def by(cls, stored: streamed.Stored, name, config, compute, log_step) -> "RoundedStored":
        steps = None if log_step is None else log_step[...]
        own = (stored.shape, stored.dtype, stored.store, stored.rows)
        return cls(*own, name, config, compute, steps)

    def __getitem__(self, index: Any) -> np.ndarray:
        index = () if index is ... else index if isinstance(index, tuple) else (index,)
        layers, *rest = index or (slice(None),)
        if isinstance(layers, int | np.integer):
            layers, rest = slice(layers, layers + 1), (0, *rest)
        else:
            rest = (slice(None), *rest)
        own = {self.name: super().__getitem__((layers,))}
        if self.log_step is not None:
            own[quantization.step_of(self.name)] = self.log_step[layers]
        mesh = sharding.make_mesh({"fsdp": 1}, devices=jax.devices()[:1])
        own = jax.device_put(trees.nest(own), NamedSharding(mesh, PartitionSpec()))
        numbers = quantization.dequantized_on_mesh(own, self.config, self.compute)
        return np.asarray(trees.named(numbers)[self.name])[tuple(rest)]


def stageless(recipe: Recipe) -> tuple[Execution, Any, Any]:
    """How the devices of a mesh with stages compute a whole model: as ZeRO-3 replicas.

    Returns the execution, and of the parameters, layers in the order of depth, the shapes by name
    and the shardings. Nothing is allocated.

    Raises ValueError where the width does not divide over so many replicas.
    """
    execution, mesh = recipe.loss.execution, recipe.mesh
    assert mesh.axis_names[:2] == ("stage", "data")  # so that devices stay in their order
    devices = mesh.devices.reshape(1, -1, *mesh.devices.shape[2:])
    mesh = jax.sharding.Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
    layout = execution.place.layout
    split = {"embed": sharding.LAYOUTS["zero3"].parameters["embed"]}
    layout = dataclasses.replace(layout, parameters=dict(layout.parameters) | split)
    wanted = reshard.stored(
        trees.named(recipe.loss.model_params), order=recipe.order, saved=IDENTITY
    )
    shapes = trees.unnamed(wanted, recipe.loss.model_params)
    to = sharding.shardings(shapes, mesh, layout, rules=recipe.loss.model_axes)
    execution = dataclasses.replace(execution, place=sharding.Placement(mesh, layout))
    return execution, wanted, to


def without_stages(recipe: Recipe, params: Any) -> tuple[Execution, Any]:
    """How and with what the devices of a mesh with stages compute a whole model, see `stageless`;
    where there are no stages, as they are. Communicates over all mesh axes."""
    if recipe.mesh.shape["stage"] == 1:
        return recipe.loss.execution, params
    execution, wanted, to = stageless(recipe)
    arrays = trees.named(params)
    reshard.move(arrays, wanted, order=IDENTITY, saved=recipe.order)
    return execution, jax.device_put(trees.unnamed(arrays, params), to)
