"""What a run is and what it is made of: its state on the devices, and the shapes, shardings and
functions with which `llmx.step` makes and advances it.

Letters: B batch, T positions.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from llmx import sharding
from llmx.model import apply, execution, families
from llmx.pipeline import executor
from llmx.pipeline.permutation import IDENTITY, LayerPermutation
from llmx.pipeline.schedule import Table
from llmx.pipeline.stages import ModelChunks
from llmx.sharding import trees
from llmx.step import guard, optimizers
from llmx.sync.strategy import PARAMETERS, Replicas, Sync, Timetable

Batch = dict[str, jax.Array]  # tokens, targets, segment_ids, positions int32 [B, T]; weights fp32

TOKEN_AXES = ("batch", "sequence")  # logical axes of every array of a batch
BATCH_DTYPES = {
    "tokens": "int32",
    "targets": "int32",
    "segment_ids": "int32",
    "positions": "int32",
    "weights": "float32",
}


class State(NamedTuple):
    """All that a run is: what a checkpoint holds."""

    step: jax.Array  # batches taken, int32
    params: Any  # nested dict, master dtype
    opt_state: Any
    ema: Any  # average of params, or None
    guard: guard.Guard
    stale: "Stale | None" = None
    sync: Sync | None = None


class Stale(NamedTuple):
    """What a periodic pipeline leaves of a step for the next: a batch that is still under way.

    A step takes a batch in with the parameters W(t) that it begins with, and brings the one before
    to its end, which went in with W(t-1): W(t+1) = W(t) - update(gradient at W(t-1)).
    """

    params: Any  # with which the batch went in
    batch: dict[str, jax.Array]
    gradients: Any  # so far
    losses: tuple[jax.Array, ...]
    flight: executor.Buffers


class Report(NamedTuple):
    """Scalars of one step, on the device."""

    loss: jax.Array  # nats per token over the global batch
    z_loss: jax.Array  # what the z-loss adds
    tokens: jax.Array  # predicted tokens in the global batch
    grad_norm: jax.Array  # before clipping
    learning_rate: jax.Array
    bad_leaf: jax.Array  # index of the leaf that made the step bad, -1 = the step is good
    num_bad: jax.Array  # bad steps in a row
    settled_at: jax.Array  # the step that found the variance settled (1-bit Adam); -1 = none yet


@dataclasses.dataclass(frozen=True, eq=False)
class Pipeline:
    """What the stages of a mesh do: a legal table, and which of its model chunks has which layers.

    `rows`: (sequences, tokens) of a batch, needed for a periodic table.
    """

    table: Table
    chunks: ModelChunks
    rows: tuple[int, int] = (0, 0)


@dataclasses.dataclass(frozen=True, eq=False)
class Setup:
    """A model on a mesh: shapes, shardings and the functions to make and run it."""

    model: families.ModelConfig
    apply: apply.Apply
    run: execution.Execution
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    axes: Any  # logical axes of the parameters
    abstract: State  # shapes with shardings
    gradients: Any  # shardings of gradients
    updates: Any  # shardings of parameters while they are updated
    optimizer_config: optimizers.OptimizerConfig
    pipeline: "Pipeline | None" = None
    replicas: Replicas | None = None  # None: replicas agree by the mean of gradients
    timetable: Timetable | None = None
    tail: optax.GradientTransformationExtraArgs | None = None  # see `optimizers`
    # Of a frozen variance: the direction that replaces Adam's.
    frozen: optax.GradientTransformationExtraArgs | None = None

    @property
    def alone(self) -> bool:
        """Whether replicas have parameters and an optimizer of their own."""
        return self.replicas is not None and (self.replicas.strategy.agrees_on == PARAMETERS)

    @property
    def mesh(self) -> jax.sharding.Mesh:
        return self.run.place.mesh

    @property
    def leaf_names(self) -> list[str]:
        """Parameter paths in the order of `Report.bad_leaf`."""
        return list(trees.named(self.abstract.params))

    @property
    def order(self) -> LayerPermutation:
        """In which order the state has the layers: what its checkpoints need to know."""
        return IDENTITY if self.pipeline is None else self.pipeline.chunks.permutation

    @property
    def batch_sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, self.run.place.activation(TOKEN_AXES))

    def abstract_batch(self, batch_size: int, sequence_length: int) -> Batch:
        """Shapes of a global batch."""
        shape = (batch_size, sequence_length)
        return {
            name: jax.ShapeDtypeStruct(shape, dtype, sharding=self.batch_sharding)
            for name, dtype in BATCH_DTYPES.items()
        }

    def init(self, seed: int) -> State:
        """A new state, every array born with its sharding."""

        def make() -> State:
            params = apply.init_parameters(self.model, seed)
            if self.pipeline is not None:
                params["blocks"] = self.pipeline.chunks.permutation.apply(params["blocks"])
            return State(
                step=jnp.zeros((), jnp.int32),
                params=params,
                opt_state=None if self.alone else self.optimizer.init(params),
                ema=params if self.optimizer_config.ema_decay else None,
                guard=guard.init(),
                sync=self._begun(params),
            )

        to = jax.tree.map(lambda leaf: leaf.sharding, self.abstract._replace(stale=None))
        # Auto axes: the compiler splits the random numbers as the results are split.
        with jax.set_mesh(self.mesh):
            state = jax.jit(jax.sharding.auto_axes(make, out_sharding=to))()
        return state._replace(stale=self.nothing_under_way())

    def _begun(self, params: Any) -> Sync | None:
        if self.replicas is None:
            return None
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.abstract.sync)
        begun = zeros._replace(settled_at=jnp.full((), -1, jnp.int32))
        if not self.alone:
            return begun
        copies = lambda leaf: jnp.broadcast_to(leaf, (self.replicas.size, *leaf.shape))  # noqa: E731
        own = jax.tree.map(copies, params)
        return begun._replace(params=own, opt_state=jax.vmap(self.optimizer.init)(own))

    def new_sync(self, params: Any) -> Sync | None:
        """The state of a strategy that begins with these parameters."""
        if self.replicas is None:
            return None
        to = jax.tree.map(lambda leaf: leaf.sharding, self.abstract.sync)
        with jax.set_mesh(self.mesh):
            return jax.jit(jax.sharding.auto_axes(self._begun, out_sharding=to))(params)

    def nothing_under_way(self) -> "Stale | None":
        """`State.stale` of a batch without tokens, whose parameters do not matter."""
        if self.abstract.stale is None:
            return None
        with jax.set_mesh(self.mesh):
            return jax.jit(lambda: jax.tree.map(sharding.zeros, self.abstract.stale))()


def placed(leaf: Any, to: NamedSharding) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a leaf, with this sharding."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=to)
