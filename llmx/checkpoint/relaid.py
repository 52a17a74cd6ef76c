"""States of constraints that depend on the devices, of a checkpoint from others."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from llmx.checkpoint.manifest import Document
from llmx.sharding import trees
from llmx.step.step import Recipe


def path_of(name: str) -> str:
    """Where a checkpoint has a constraint's state."""
    return f"extra/{name}"


def is_there(recipe: Recipe, name: str, saved: Document) -> bool:
    """Whether the checkpoint has the state of a constraint that can be moved to these devices."""
    constraint = recipe.constraints.get(name)
    return constraint is not None and bool(constraint.relaid) and saved.holds(path_of(name))


def _is_moved(recipe: Recipe, name: str, meta: dict) -> bool:
    # Shapes do not tell: rows that divide have the same on two devices as on four. A transform's
    # state is whole on all.
    constraint = recipe.constraints.get(name)
    return constraint is not None and constraint.is_moved(meta)


def as_saved(recipe: Recipe, state: Any, name: str, saved: Document) -> Any:
    """Shapes of a state; where it is moved, those of the checkpoint by path, whole on all
    devices."""
    fits = saved.fits(state, prefix=path_of(name), order=recipe.order)
    if fits and not _is_moved(recipe, name, saved.meta):
        return state
    whole = NamedSharding(recipe.mesh, PartitionSpec())
    place = f"{path_of(name)}/"
    return trees.nest({
        path.removeprefix(place): jax.ShapeDtypeStruct(
            tuple(shape), saved.leaves[path]["dtype"], sharding=whole
        )
        for path, shape in saved.shapes(path_of(name)).items()
    })  # fmt: skip


def onto_devices(
    recipe: Recipe, name: str, state: Any, meta: dict, log: Callable[[str], None]
) -> Any:
    """The state `as_saved`, as it is on the devices of the recipe; `meta`: of the checkpoint."""
    constraint = recipe.constraints.get(name)  # None of a transform
    relaid = constraint.relaid if constraint is not None else None
    moved = relaid(state, meta) if relaid is not None else state
    if moved is state:
        return state
    if constraint.saved is not None:  # what a checkpoint has not, the caller fills in
        return moved
    sizes = meta.get("mesh", {})
    used = ", ".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1) or "one device"
    log(f"{name}: rows were moved from a mesh of {used} to these devices")
    return moved
