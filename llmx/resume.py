"""Where a run begins: a checkpoint of its own, another run's parameters, or new ones.

A checkpoint is restored onto any mesh. What belongs to the devices that it was saved on is made
over for those of now: `State.stale` of a pipeline, `State.sync` of replicas.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from llmx import checkpoint, config, guard, orders, sharding, sync


def restore_or_init(
    run: config.Config, setup, checkpoints, dataset, log: Callable
) -> tuple[Any, int]:
    """The state and the number of steps it has taken: of the newest good checkpoint, or new.

    Raises ValueError where the checkpoint is of another model or other data.
    """
    newest, start_from = checkpoints.latest_step(), run.start_from
    if newest == 0 and "imported_from" in checkpoints.meta(0):
        newest, start_from = None, run.workdir  # parameters only: made by llmx.convert
    if newest is not None:
        _check_strategy(run, checkpoints.meta(newest))
    restored = None if newest is None else restore(setup, checkpoints, newest, log)
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


def _check_strategy(run: config.Config, meta: dict):
    """Replicas may begin to agree in another way than by the mean, but not change it."""
    saved = meta.get("config", {}).get("sync", {}).get("strategy", "mean")
    if saved not in ("mean", run.sync.strategy):
        raise ValueError(
            f"{run.workdir} was trained with sync.strategy={saved!r} and the config gives "
            f"{run.sync.strategy!r}: what its replicas had not sent would be lost; restore it, or "
            f"go on with its parameters in another workdir, --config.start_from={run.workdir}"
        )


def restore(setup, checkpoints, newest: int, log: Callable):
    """The newest good checkpoint, with what has to change on other devices than it was saved on.

    A batch that was under way on other stages is taken again; what replicas keep of each other is
    made over for another number of them (`sync.regrouped`).
    """
    wanted = setup.abstract
    _, flies = checkpoints.fits(newest, wanted.stale, prefix="stale")
    replicas, same = checkpoints.fits(newest, wanted.sync, prefix="sync")
    same = same and checkpoints.order(newest) == setup.order
    if wanted.sync is not None and replicas and not same:
        wanted = wanted._replace(sync=_as_saved(wanted.sync, checkpoints.shapes(newest, "sync")))
    elif not replicas:
        wanted = wanted._replace(sync=None)
    if not flies:
        wanted = wanted._replace(stale=None)
    restored = checkpoints.restore(wanted, order=setup.order, ignored="" if flies else "stale")
    state = restored.state
    if setup.abstract.sync is not None:
        if not replicas:
            log(f"the replicas begin to agree by {setup.replicas.config.strategy!r}")
            state = state._replace(sync=setup.new_sync(state.params))
        elif not same:
            order = checkpoints.order(restored.step)
            state = state._replace(sync=_regrouped(setup, state.sync, order))
            log(f"what replicas had not sent is split among {setup.replicas.size}")
    restored = restored._replace(state=state)
    return restored if flies else _taken_again(setup, checkpoints, restored, log)


def _taken_again(setup, checkpoints, restored, log: Callable):
    """Without the batch that was under way when it was saved."""
    saved, _ = checkpoints.fits(restored.step, None, prefix="stale")
    state, first = restored.state._replace(stale=setup.nothing_under_way()), restored.step
    if saved:
        log("the batch that was under way in the pipeline when it was saved is taken again")
        to = setup.abstract.step.sharding
        state, first = state._replace(step=jax.device_put(np.int32(first - 1), to)), first - 1
    return restored._replace(state=state, step=first)


def _as_saved(wanted: sync.Sync, shapes: Mapping[str, Sequence[int]]) -> sync.Sync:
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


def _regrouped(setup, saved: sync.Sync, order: orders.Order) -> sync.Sync:
    """`sync.regrouped` on the mesh; `order`: that of the layers as they were saved."""
    wanted = setup.abstract.sync
    shapes = sync.named(setup.abstract.params)
    before = {
        name: orders.stored({name: leaf}, order=setup.order, saved=order)[name].shape
        for name, leaf in shapes.items()
    }

    def ordered(name, array):
        return orders.ordered(name, array, order=setup.order, saved=order)

    to = jax.tree.map(lambda leaf: leaf.sharding, wanted)
    make = lambda saved: sync.regrouped(saved, wanted, before, ordered)  # noqa: E731
    with jax.set_mesh(setup.mesh):
        return jax.jit(jax.sharding.auto_axes(make, out_sharding=to))(saved)


def start_with(setup, state, workdir: str, log: Callable):
    """A new state with the parameters of another run, or of an import."""
    restored = checkpoint.restore_part(
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
    return state._replace(params=restored.state, ema=ema)
