"""Where a run begins: a checkpoint of its own, another run's parameters, or new ones.

A checkpoint is restored onto any mesh. What belongs to the devices that it was saved on is made
over for those of now: `State.stale` of a pipeline, `State.sync` of replicas.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from llmx import sharding
from llmx.checkpoint import checkpointer, reshard
from llmx.checkpoint.manifest import Document, Mismatch
from llmx.pipeline.permutation import LayerPermutation
from llmx.sharding import trees
from llmx.step import guard
from llmx.step.state import State
from llmx.sync import strategy


def restore_or_init(run: Any, setup, checkpoints, dataset, log: Callable) -> tuple[Any, int]:
    """The state and the number of steps it has taken: of the newest good checkpoint, or new.

    Raises ValueError where the checkpoint is of another model or other data.
    """
    start_from, restored = run.start_from, None
    if checkpoints.latest_step() == 0 and "imported_from" in checkpoints.meta(0):
        start_from = run.workdir  # parameters only: made by llmx.convert
    else:
        restored = restore(run, setup, checkpoints, log)
    if restored is None:
        state = setup.init(run.seed)
        return (start_with(setup, state, start_from, log) if start_from else state), 0
    if (saved := restored.meta["fingerprint"]) != dataset.fingerprint:
        raise ValueError(
            f"{run.workdir} was trained on data {saved[:12]} and the config gives "
            f"{dataset.fingerprint[:12]}: going on would repeat some samples and miss others; "
            "restore data, batch.sequence_length and seed, or use another workdir"
        )
    if (saved := restored.meta["batch_size"]) != run.batch.size:
        raise ValueError(
            f"{run.workdir} was trained with batch.size={saved} and the config gives "
            f"{run.batch.size}: the position in the data counts batches, so some samples would be "
            "repeated or missed; restore batch.size, or use another workdir"
        )
    log(f"resumed from checkpoint {restored.step} of {run.workdir}")
    # A run that the guard stopped may go on: whoever starts it again has changed something.
    to = jax.tree.map(lambda leaf: leaf.sharding, setup.abstract.guard)
    released = guard.released(jax.device_get(restored.state.guard))
    return restored.state._replace(guard=jax.device_put(released, to)), restored.step


def restore(run: Any, setup, checkpoints, log: Callable):
    """The newest good checkpoint, with what has to change on other devices than it was saved on.

    A batch that was under way on other stages is taken again; what replicas keep of each other is
    made over for another number of them (`sync.regrouped`).
    """
    # What is read of a checkpoint depends on it: the newest may be corrupt, and the one before
    # saved on other devices.
    wanted = functools.partial(_wanted, run, setup)
    restored = checkpoints.restore(wanted, order=setup.order, ignored="stale")
    if restored is None:
        return None
    state, saved = restored.state, checkpoints.document(restored.step)
    if setup.replicas is not None:
        if state.sync is None:
            log(f"the replicas begin to agree by {setup.replicas.config.strategy!r}")
            state = state._replace(sync=setup.new_sync(state.params))
        elif not _of_these_replicas(setup, saved):
            state = state._replace(sync=_regrouped(setup, state.sync, saved.order))
            log(f"what replicas had not sent is split among {setup.replicas.size}")
    first = restored.step
    if not saved.fits(setup.abstract.stale, prefix="stale"):
        state = state._replace(stale=setup.nothing_under_way())
        if saved.holds("stale"):
            log("the batch that was under way in the pipeline when it was saved is taken again")
            first -= 1
            to = setup.abstract.step.sharding
            state = state._replace(step=jax.device_put(np.int32(first), to))
    return restored._replace(state=state, step=first)


def _wanted(run: Any, setup, saved: Document) -> State:
    """The state to read from a checkpoint, as far as it has it."""
    strategy = saved.meta.get("config", {}).get("sync", {}).get("strategy", "mean")
    # Replicas may begin to agree in another way than by the mean, but not change it.
    if strategy not in ("mean", run.sync.strategy):
        raise Mismatch(
            f"{run.workdir} was trained with sync.strategy={strategy!r} and the config gives "
            f"{run.sync.strategy!r}: what its replicas had not sent would be lost; restore it, or "
            f"go on with its parameters in another workdir, --config.start_from={run.workdir}"
        )
    wanted = setup.abstract
    if not saved.fits(wanted.stale, prefix="stale"):
        wanted = wanted._replace(stale=None)
    if not saved.holds("sync"):
        return wanted._replace(sync=None)
    if wanted.sync is not None and not _of_these_replicas(setup, saved):
        wanted = wanted._replace(sync=_as_saved(wanted.sync, saved.shapes("sync")))
    return wanted


def _of_these_replicas(setup, saved: Document) -> bool:
    """Whether it was saved by as many replicas, each with this order of layers."""
    return saved.fits(setup.abstract.sync, prefix="sync") and saved.order == setup.order


def _as_saved(wanted: strategy.Sync, shapes: Mapping[str, Sequence[int]]) -> strategy.Sync:
    """The strategy's state in the shapes in which it was saved, split as far as they divide."""

    def one(path, leaf):
        name = sharding.path_name(path)
        shape = tuple(shapes.get(f"sync/{name}", leaf.shape))
        late = name.startswith("late/") and shape[1:2] != leaf.shape[1:2]
        if len(shape) != len(leaf.shape) or late:
            return leaf  # of another structure, which the restore tells
        to = leaf.sharding
        ways = [sharding.ways(to.mesh, entry) for entry in to.spec.partitions]
        entries = [
            None if dim % way else entry
            for dim, way, entry in zip(shape, ways, to.spec.partitions, strict=False)
        ]
        to = to.update(spec=jax.P(*entries))
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=to)

    return jax.tree_util.tree_map_with_path(one, wanted)


def _regrouped(setup, saved: strategy.Sync, order: LayerPermutation) -> strategy.Sync:
    """`sync.regrouped` on the mesh; `order`: that of the layers as they were saved."""
    wanted = setup.abstract.sync
    shapes = trees.named(setup.abstract.params)
    before = {
        name: reshard.stored({name: leaf}, order=setup.order, saved=order)[name].shape
        for name, leaf in shapes.items()
    }

    def ordered(name, array):
        moves = order.moves(name, array.shape, setup.order)
        return order.convert(array, setup.order) if moves else array

    to = jax.tree.map(lambda leaf: leaf.sharding, wanted)
    make = lambda saved: strategy.regrouped(saved, wanted, before, ordered)  # noqa: E731
    with jax.set_mesh(setup.mesh):
        return jax.jit(jax.sharding.auto_axes(make, out_sharding=to))(saved)


def start_with(setup, state, workdir: str, log: Callable):
    """A new state with the parameters of another run, or of an import."""
    restored = checkpointer.restore_part(
        f"{workdir}/checkpoints", setup.abstract.params, prefix="params", order=setup.order, log=log
    )
    if restored is None:
        raise ValueError(f"start_from={workdir!r} has no checkpoint yet")
    log(f"starting with the parameters of {workdir}, step {restored.step}")
    ema = state.ema
    if ema is not None:
        to = jax.tree.map(lambda leaf: leaf.sharding, setup.abstract.ema)
        # Its own copy: the step donates both.
        ema = jax.jit(lambda params: jax.tree.map(lambda leaf: leaf + 0, params), out_shardings=to)(
            restored.state
        )
    own = setup.new_sync(restored.state)  # replicas that go on alone have parameters of their own
    return state._replace(params=restored.state, ema=ema, sync=own)
