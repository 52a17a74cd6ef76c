"""Masks of pruned weights in checkpoints: where a run begins, and what it may resume."""

from collections.abc import Callable
from typing import Any

import jax

from llmx.checkpoint import checkpointer, copies, identity
from llmx.checkpoint.manifest import Document, Mismatch
from llmx.contract import State
from llmx.sharding import trees
from llmx.step.step import Recipe
from llmx.step.transforms import masks
from llmx.step.transforms.masks import PruningConfig

Log = Callable[[str], None]
PLACE = f"extra/{masks.NAME}"  # of a `Pruning` in a checkpoint


def begun(config: Any, recipe: Recipe, state: State, log: Log) -> State:
    """A new state whose parameters are masked: as `pruning.masks_from` says, with the masks of
    another run, which are read straight to their shards, or where they are zero.

    Raises ValueError where that run has no masks of the same weights.
    """
    state, place = recipe.init_constraints(state), config.pruning.masks_from
    if not place or masks.NAME not in recipe.constraints:
        return state
    workdir, step = copies.local("pruning.masks_from=", place, log)
    wanted = recipe.abstract.extra[masks.NAME].masks

    def require(saved: Document) -> Any:
        missing = [name for name in trees.named(wanted) if not saved.holds(f"{PLACE}/masks/{name}")]
        if missing:
            raise Mismatch(
                f"pruning.masks_from={place!r} has no mask of {missing[0]}: name a run that prunes "
                "it, or leave it out of pruning.products"
            )
        return wanted

    found = checkpointer.restore_saved(
        workdir, require, prefix=f"{PLACE}/masks", order=recipe.order, step=step, log=log
    )
    log(f"pruned as {identity.origin(place)[0]}, step {found.step}")
    return with_masks(recipe, state, found.state)


def with_masks(recipe: Recipe, state: State, found: Any) -> State:
    """The state with these masks, which hold of it; they are split already."""
    own = state.extra[masks.NAME]._replace(masks=found)
    state = state._replace(extra=dict(state.extra) | {masks.NAME: own})
    with jax.set_mesh(recipe.mesh):
        return jax.jit(recipe.refreshed, donate_argnums=0)(state)


def require_same(config: Any, recipe: Recipe, saved: Document) -> None:
    """Raises Mismatch where a checkpoint has masks that the run would lose, or where its schedule
    is over and it has none."""
    workdir, now = config.workdir, config.pruning
    held = saved.holds(PLACE)
    if masks.NAME not in recipe.constraints:
        if held:
            raise Mismatch(
                f"{workdir} prunes, and the config gives pruning.method='none', by which pruned "
                "weights would be trained again: restore the section, use "
                "pruning.method='fixed', or continue with its parameters in another workdir, "
                f"--config.start_from={workdir}"
            )
        return
    wanted = recipe.abstract.extra[masks.NAME]
    if held and not saved.fits(wanted, prefix=PLACE, order=recipe.order):
        then = identity.section_of(saved.meta, "pruning", PruningConfig)
        raise Mismatch(
            f"{workdir} was pruned with {_text(then)}, and the config gives {_text(now)}, whose "
            "masks and scores are of other weights: restore these values, or continue with its "
            f"model in another workdir, --config.start_from={workdir}"
        )
    times = masks.times(now, config.steps)
    if not held and times and saved.step >= times[-1]:
        raise Mismatch(
            f"{workdir} is at step {saved.step} and has pruned nothing, and the schedule of the "
            f"config ends at step {times[-1]}: set pruning.begin_step and pruning.end_step to "
            "later steps"
        )


def _text(section: PruningConfig) -> str:
    names = ("method", "products", "rewind_to")
    return ", ".join(f"pruning.{name}={vars(section)[name]!r}" for name in names)
