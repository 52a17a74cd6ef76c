"""What a run keeps from step to step: parameters, moments and the average, counted leaf by leaf.

Each is counted as the layout splits it, and a pipeline's blocks with the slots of all its chunks,
of which a shorter one leaves some empty. `tests/plan/test_memory.py` compares the counts with the
shapes and shardings of the recipe.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh

from llmx import sharding
from llmx.config import Config, utilization
from llmx.config.axes import layout_of
from llmx.model import adapters, apply, precision, quantization
from llmx.model.families import ModelConfig
from llmx.sharding import trees
from llmx.step import moments, optimizers
from llmx.step.transforms import masks

FP32 = 4
PARTS = ("parameters", "optimizer", "ema", "masks")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A parameter."""

    name: str  # "blocks/mlp/up/kernel"
    shape: tuple[int, ...]  # global; of blocks, the first dimension counts layers
    axes: tuple[str, ...]  # logical, one for each dimension

    @property
    def in_blocks(self) -> bool:
        return self.axes[0] == "layers"

    @property
    def of_layers(self) -> bool:
        """Of blocks, or of dense first layers."""
        return self.axes[0] in ("layers", "first")

    @property
    def is_matrix(self) -> bool:
        """Split by width, and updated as matrices are; else a norm or bias, small and whole."""
        return "embed" in self.axes

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)


def leaves(model: ModelConfig) -> tuple[Leaf, ...]:
    """All parameters of a model, rows that pad the vocabulary included."""
    return _leaves(*vars(model).values())


@functools.lru_cache(maxsize=64)
def _leaves(*values: Any) -> tuple[Leaf, ...]:
    """`values`: of the fields of a `ModelConfig`, which itself has no hash."""
    return _listed(*apply.abstract_parameters(ModelConfig(*values)))


def _listed(shapes: Any, axes: Any) -> tuple[Leaf, ...]:
    names = jax.tree.leaves(axes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    pairs = zip(trees.named(shapes).items(), names, strict=True)
    return tuple(Leaf(name, tuple(leaf.shape), tuple(of)) for (name, leaf), of in pairs)


def of_adapters(run: Config) -> tuple[Leaf, ...]:
    """The adapters that a run trains."""
    if not run.adapters.rank:
        return ()
    of_model = apply.abstract_parameters(run.model)
    return _listed(*adapters.shapes_and_axes(run.adapters, *of_model))


def learned_scales(run: Config) -> tuple[Leaf, ...]:
    """The logarithms of the scales that a run learns for weights that are trained as integers."""
    if not run.quantization.learns:
        return ()
    shapes, axes = apply.abstract_parameters(run.model)
    listed = _listed(*quantization.with_steps(run.quantization, shapes, axes))
    return tuple(leaf for leaf in listed if leaf.name.endswith(f"/{quantization.LOG_STEP}"))


def unsplit(leaf: Leaf, table: Mapping[str, tuple[str, ...]], sizes: Mapping[str, int]) -> bool:
    """Whether the width does not divide over the mesh axes that are to split it, and neither do
    other dimensions."""
    found = sharding.split_axes(leaf.axes, table, sizes, leaf.shape)
    dim = leaf.axes.index("embed")
    return leaf.shape[dim] % math.prod(sizes[axis] for axis in found[dim]) > 0


def unplaced(run: Config) -> Iterator[str]:
    """Parameters that do not divide over the mesh axes over which the layout splits them."""
    sizes = {axis: vars(run.mesh)[axis] for axis in sharding.AXES}
    sizes["stage"] = 1  # chunks of unequal length are filled up
    if -1 in sizes.values():
        return
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    tables = [vars(layout_of(run))[name] for name in ("parameters", "gradients", "optimizer")]
    for leaf in (*leaves(run.model), *of_adapters(run)):
        for table in tables:
            try:
                sharding.spec(leaf.axes, table, mesh, shape=leaf.shape)
            except ValueError as error:
                yield f"mesh: {leaf.name}: {error}"
                break


def head_of(model: ModelConfig) -> Leaf:
    """What the last hidden state is multiplied with."""
    name = "embedding" if model.tied_head else "head"
    return next(leaf for leaf in leaves(model) if leaf.name == name)


@dataclasses.dataclass(frozen=True, eq=False)
class Held:
    """Numbers of parameters on one device of a resolved run."""

    run: Config

    @functools.cached_property
    def layout(self) -> sharding.Layout:
        return layout_of(self.run)

    @functools.cached_property
    def slots(self) -> int:
        """Layers that all stages have room for."""
        chunks = utilization.chunks_of(self.run)
        return max(chunks) * len(chunks) if chunks else self.run.model.num_blocks

    def numbers(self, leaf: Leaf, table: str, *, whole: Sequence[str] = ()) -> float:
        """Of a parameter, as a table of the layout splits it but for the logical axes `whole`."""
        over, mesh = vars(self.layout)[table], vars(self.run.mesh)
        if not whole:
            return self.kept(leaf, leaf.shape, table)
        split = [over[name] for name in leaf.axes if name not in (None, *whole)]
        ways = math.prod(mesh[axis] for axes in split for axis in axes)
        return leaf.numbers * self._with_slots(leaf) / ways

    def kept(self, leaf: Leaf, shape: tuple[int, ...], table: str = "optimizer") -> float:
        """Of an array of a parameter's shape, or with 1 where it has means."""
        over, mesh = vars(self.layout)[table], vars(self.run.mesh)
        split = sharding.split_axes(leaf.axes, over, mesh, leaf.shape)
        sizes = zip(shape, leaf.shape, split, strict=True)
        ways = math.prod(mesh[a] for size, full, axes in sizes if size == full for a in axes)
        return math.prod(shape) * self._with_slots(leaf) / ways

    def _with_slots(self, leaf: Leaf) -> float:
        return self.slots / self.run.model.num_blocks if leaf.in_blocks else 1.0


def of(run: Config, *, on_host: bool = False) -> dict[str, float]:
    """Bytes for a device of a resolved run, by `PARTS`; in its memory, or in the host's for it.

    What a strategy other than "mean" keeps is not counted.
    """
    found, held = dict.fromkeys(PARTS, 0.0), Held(run)
    param = precision.POLICIES[run.precision].param
    kept = moments.number_bytes(run.optimizer.moments, param)
    for leaf in (*leaves(run.model), *learned_scales(run)):
        weight = leaf.of_layers and leaf.is_matrix
        if on_host == (run.offload.parameters and weight and leaf.in_blocks):
            found["parameters"] += held.numbers(leaf, "parameters") * param.itemsize
        numbers = held.numbers(leaf, "optimizer")
        if run.optimizer.ema_decay and not on_host:
            found["ema"] += numbers * FP32
        if on_host != (run.offload.optimizer and len(leaf.shape) > 1):
            continue
        for shape in optimizers.kept_shapes(run.optimizer, leaf.shape, leaf.axes):
            # Eight bits are for matrices only, and position tables are none. Means are in fp32.
            in_8_bits = kept < 2 and leaf.is_matrix and "positions" not in leaf.axes
            if shape != leaf.shape or (kept < 2 and not in_8_bits):
                found["optimizer"] += held.kept(leaf, shape) * FP32
            elif in_8_bits:  # codes, and a byte for each block's scale
                found["optimizer"] += numbers + _scales(held, leaf)
            else:
                found["optimizer"] += numbers * kept
    if not on_host:
        found["masks"] = of_masks(run)
    return found


def moments_of(run: Config, leaf: Leaf) -> float:
    """Numbers of an optimizer's arrays for each number of a parameter."""
    shapes = optimizers.kept_shapes(run.optimizer, leaf.shape, leaf.axes)
    return sum(map(math.prod, shapes)) / leaf.numbers


def _scales(held: Held, leaf: Leaf) -> float:
    """Scales of a moment in 8 bits on a device: split as its numbers, but whole along their blocks
    where one crosses shards (`moments.scales_sharding`)."""
    mesh, over = vars(held.run.mesh), vars(held.layout)["optimizer"]
    dim = moments.block_dim(leaf.shape, leaf.axes)
    split = sharding.split_axes(leaf.axes, over, mesh, leaf.shape)
    ways = [math.prod(mesh[axis] for axis in axes) for axes in split]
    size = leaf.shape[dim]
    blocks = -(-size // min(moments.BLOCK, size))
    whole = size % (ways[dim] * moments.BLOCK) > 0
    return held.numbers(leaf, "optimizer") * ways[dim] / size * blocks / (1 if whole else ways[dim])


def of_masks(run: Config) -> float:
    """Bytes for a device of what pruning keeps: masks, scores, weights to go back to."""
    section, held = run.pruning, Held(run)
    if section.method == masks.NONE:
        return 0.0
    found, param = 0.0, precision.POLICIES[run.precision].param
    pruned = masks.chosen(section, apply.abstract_parameters(run.model)[1])
    for leaf in leaves(run.model):
        numbers = held.numbers(leaf, "optimizer")
        if leaf.name in pruned:
            found += held.numbers(leaf, "parameters")
            found += FP32 * numbers * (section.method == masks.MOVEMENT)
        found += param.itemsize * numbers * (section.rewind_to >= 0)
    return found
