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
    # Shapes do not tell: rows that divide have the same on two devices as on four.
    constraint = recipe.constraints.get(name)  # transforms depend on no devices
    return constraint is not None and constraint.is_moved(meta.get("mesh", {}))


def as_saved(recipe: Recipe, state: Any, name: str, saved: Document) -> Any:
    """Shapes of a state as the checkpoint has them, whole on all devices where it is of others."""
    if not _is_moved(recipe, name, saved.meta):
        return state
    shapes, whole = saved.shapes(path_of(name)), NamedSharding(recipe.mesh, PartitionSpec())
    named = {
        path: jax.ShapeDtypeStruct(
            tuple(shapes[f"{path_of(name)}/{path}"]), leaf.dtype, sharding=whole
        )
        for path, leaf in trees.named(state).items()
    }
    return trees.unnamed(named, state)


def onto_devices(
    recipe: Recipe, name: str, state: Any, meta: dict, log: Callable[[str], None]
) -> Any:
    """The state `as_saved`, as it is on the devices of the recipe; `meta`: of the checkpoint."""
    if not _is_moved(recipe, name, meta):
        return state
    like, sizes = recipe.abstract.extra[name], meta.get("mesh", {})
    on_host = recipe.constraints[name].relaid(jax.device_get(state), sizes)
    to = jax.tree.map(lambda leaf: leaf.sharding, like)
    if recipe.constraints[name].saved:
        return jax.device_put(on_host, to)
    used = ", ".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1) or "one device"
    log(f"{name}: rows were moved from a mesh of {used} to these devices")
    return jax.device_put(on_host, to)
