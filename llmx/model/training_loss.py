"""What training minimises: the loss of a model on a mesh, and where its gradient is added up.

The loss is a sum over tokens divided once by the token count of the global batch.

Letters: B batch, T positions.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from llmx import sharding
from llmx.contract import Batch, Transform
from llmx.model import apply as apply_lib
from llmx.model import decoder, dot, families, quantized, remat
from llmx.model.execution import Execution
from llmx.model.experts import router
from llmx.sharding.mesh import within

TOKEN_AXES = ("batch", "sequence")  # logical axes of every array of a batch
BATCH_DTYPES = dict.fromkeys(("tokens", "targets", "segment_ids", "positions"), "int32")
BATCH_DTYPES |= {"weights": "float32"}


@dataclasses.dataclass(frozen=True, eq=False)
class TrainingLoss:
    """A model on a mesh, with the shapes and shardings of its parameters and gradients."""

    apply: apply_lib.Apply
    execution: Execution
    params: Any  # shapes with shardings
    axes: Any  # logical axes of the parameters
    gradients: Any  # shardings of gradients
    updates: Any  # shardings of parameters while the optimizer updates them
    z_loss: float = 0.0  # factor of log(Z)^2
    gather: str = "layer"  # one of `sharding.GATHERS`
    transforms: Mapping[str, Transform] = dataclasses.field(default_factory=dict)
    of_tokens: Callable[[jax.Array, jax.Array], jax.Array] | None = None  # see `losses.OF_TOKENS`

    @property
    def mesh(self) -> Mesh:
        return self.execution.place.mesh

    def weighted(
        self, loss_BT, log_z_BT, share_BT, extra: Mapping[str, Any] | tuple = ()
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Sums over tokens: of all that is differentiated, of the loss, of the z-loss.

        `share_BT`: 1 / (tokens of the global batch), 0 for positions that do not count. `extra`:
        states of the transforms, which may change what is differentiated and nothing else.
        """
        loss = minimized = jnp.sum(loss_BT * share_BT)
        if self.of_tokens is not None:
            minimized = jnp.sum(self.of_tokens(loss_BT, log_z_BT) * share_BT)
        z = self.z_loss * jnp.sum(jnp.square(log_z_BT) * share_BT)
        return self._transformed(minimized + z, extra), loss, z

    def token_shares(self, share_BT: jax.Array, extra: Mapping[str, Any] | tuple) -> jax.Array:
        """What a nat of each token's loss adds to what is differentiated; `share_BT` as above."""
        return share_BT * jax.lax.stop_gradient(self._transformed(jnp.ones(()), extra))

    def _transformed(self, loss: jax.Array, extra: Mapping[str, Any] | tuple) -> jax.Array:
        """What is differentiated of a loss, with these states of the transforms."""
        for name, transform in self.transforms.items():
            if name in extra:
                loss = transform.loss(loss, extra[name])
        return loss

    def init_extra(self) -> Mapping[str, Any] | tuple:
        """New states of the transforms, by name; () = there are none."""
        return {name: each.init() for name, each in self.transforms.items()} or ()

    @property
    def abstract_extra(self) -> Mapping[str, Any] | tuple:
        """Shapes with shardings of the transforms' states."""
        whole = NamedSharding(self.mesh, PartitionSpec())
        return jax.tree.map(lambda leaf: placed(leaf, whole), jax.eval_shape(self.init_extra))

    def summed(self, params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """(sum of losses in nats, number of tokens) of a global batch, for evaluation."""
        with self.execution.policy.products():
            loss_BT, _ = self.apply.losses(params, batch, self.execution)
        return jnp.sum(loss_BT * batch["weights"]), jnp.sum(batch["weights"])

    def per_replica(self, axes: tuple[str, ...]) -> "TrainingLoss":
        """The same of one of the replicas along `axes`: nothing communicates over these."""
        place = self.execution.place.per_replica(axes)
        return dataclasses.replace(self, execution=dataclasses.replace(self.execution, place=place))

    def buffers(self, accumulation: int) -> Any:
        """The type of each parameter's gradient buffer, for `accumulation` microbatches.

        Matrices: in the reduce dtype, summed layer by layer; over axes that do not split them after
        the last microbatch only. Norms and biases: in fp32, summed after the last layer.
        """
        place, policy = self.execution.place, self.execution.policy

        def one(leaf, to: NamedSharding, axes) -> jax.ShapeDtypeStruct:
            small = "embed" not in axes
            later = set(place.token_axes) - set(sharding.used_axes(to.spec))
            spec = sharding.reduced(to.spec, later if small or accumulation > 1 else ())
            dtype = jnp.float32 if small else policy.reduce
            to = NamedSharding(place.mesh, spec)
            return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=to)

        return jax.tree.map(one, self.params, self.gradients, self.axes)

    def with_ranges(self, buffers: Any, extra: Mapping[str, Any] | tuple) -> Any:
        """Gradient buffers with the ranges that the states of the transforms have, if any."""
        if quantized.RANGES not in extra:
            return buffers
        amax = extra[quantized.RANGES].max(axis=0) * self._scale_of_ranges(extra)
        blocks = quantized.with_ranges(buffers["blocks"], amax, self.axes["blocks"])
        return buffers | {"blocks": blocks}

    def without_ranges(self, grads: Any, extra: Mapping[str, Any] | tuple) -> tuple[Any, Any]:
        """Gradients, and the ranges that they hand out, as of a loss that no transform scales."""
        grads, amax = quantized.without_ranges(grads)
        known = quantized.RANGES in extra
        return grads, amax / self._scale_of_ranges(extra) if known else amax

    def _scale_of_ranges(self, extra: Mapping[str, Any]) -> jax.Array:
        """By how much the transforms scale each of `Ranges`, fp32 [3]: what is differentiated, and
        so the gradients. 1 for states that are zero."""
        one = jnp.ones(())
        scale = self._transformed(one, extra)
        return jnp.stack([one, one, jnp.where(scale > 0, scale, 1)])

    def gathered(self, params: Any) -> Any:
        """Parameters as the whole step uses them; with gather="step", the weights of products whole
        over the batch axes, in the compute dtype: communicates. Tables of lookups stay split."""
        policy = self.execution.policy
        if self.gather != "step":
            return params

        def one(path, leaf, axes):
            if "embed" not in axes or path[0].key in decoder.LOOKED_UP:
                return leaf
            in_blocks = path[0].key in ("blocks", "first")
            numbers = policy.numbers if in_blocks else policy.numbers.of_head
            return dot.whole(leaf, policy.compute, numbers, axes)

        return jax.tree_util.tree_map_with_path(one, params, self.axes)

    def gathered_bytes(self) -> int:
        """Bytes per device of the weights that gather="step" keeps whole."""
        with within(self.mesh):
            gathered = jax.eval_shape(self.gathered, self.params)
        pairs = zip(jax.tree.leaves(gathered), jax.tree.leaves(self.params), strict=True)
        changed = [leaf for leaf, old in pairs if leaf.sharding.spec != old.sharding.spec]
        return sharding.device_bytes(changed)

    @property
    def batch_sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, self.execution.place.activation(TOKEN_AXES))

    def abstract_batch(self, shape: Sequence[int]) -> Batch:
        """Shapes with shardings of a global batch [B, T]."""
        return {
            name: jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=self.batch_sharding)
            for name, dtype in BATCH_DTYPES.items()
        }


def make(
    config: families.ModelConfig, execution: Execution, *,
    arrange: Callable[[Any], Any] | None = None, z_loss: float = 0.0, gather: str = "layer",
    in_host_memory: bool = False, transforms: Mapping[str, Transform] | None = None,
    of_tokens: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
) -> TrainingLoss:  # fmt: skip
    """Shapes, shardings and functions of a model on a mesh; nothing is allocated.

    `arrange`: from the blocks' parameters [L, ...] to those of the stages of a pipeline.
    `in_host_memory`: the blocks' matrices are kept there.

    Raises ValueError, naming the parameter, where the layout does not fit the model and mesh.
    """
    place, dtype = execution.place, execution.policy.param
    shapes, axes = apply_lib.abstract_parameters(config)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), shapes)
    if arrange is not None:
        shapes["blocks"] = jax.eval_shape(arrange, shapes["blocks"])
    parameters, gradients, updates = (
        sharding.shardings(shapes, place.mesh, place.layout, rules=axes, table=table)
        for table in ("parameters", "gradients", "optimizer")
    )
    if in_host_memory:
        parameters["blocks"] = jax.tree.map(
            lambda to, names: to.with_memory_kind(remat.HOST_MEMORY) if "embed" in names else to,
            parameters["blocks"], axes["blocks"],
        )  # fmt: skip
    params = jax.tree.map(placed, shapes, parameters)
    apply = apply_lib.Apply(config)
    return TrainingLoss(
        apply, execution, params, axes, gradients, updates, z_loss, gather, transforms or {},
        of_tokens,
    )  # fmt: skip


def placed(leaf: Any, to: NamedSharding) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a leaf, with this sharding."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=to)


def squared_norms(tree: Any) -> jax.Array:
    """The squared norm of each leaf, fp32 [leaves]; 0 of loads, which are no gradients."""

    def one(path, leaf):
        if router.is_loads(path):
            return jnp.zeros(())
        return jnp.sum(jnp.square(leaf.astype(jnp.float32)))

    return jnp.stack(jax.tree.leaves(jax.tree_util.tree_map_with_path(one, tree)))


def scaled(tree: Any, factors: jax.Array) -> Any:
    """A tree times a factor [], or a tree [n, ...] times factors [n]; loads stay what they are:
    whole numbers, of which one that is the mean must not be rounded away from it."""

    def one(path, leaf):
        if router.is_loads(path):
            return leaf
        if not factors.ndim:
            return leaf * factors
        num = leaf.ndim - 1
        to = PartitionSpec(jax.typeof(leaf).sharding.spec.partitions[0], *[None] * num)
        return leaf * jnp.reshape(factors, (-1, *[1] * num), out_sharding=to)

    return jax.tree_util.tree_map_with_path(one, tree)


def microbatches(batch: Batch, num: int) -> Batch:
    """[B, T] as [num, B/num, T], every num-th row together, so that no row leaves its device."""

    def split(array):
        rows, *rest = jax.typeof(array).sharding.spec
        shape = (array.shape[0] // num, num, *array.shape[1:])
        array = jnp.reshape(array, shape, out_sharding=PartitionSpec(rows, None, *rest))
        return jnp.swapaxes(array, 0, 1)

    return jax.tree.map(split, batch)
