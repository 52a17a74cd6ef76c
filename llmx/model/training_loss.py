"""What training minimises: the loss of a model on a mesh, and where its gradient is added up.

The loss is a sum over tokens divided once by the token count of the global batch.

Letters: B batch, T positions.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from llmx import sharding
from llmx.contract import Batch, Transform
from llmx.model import adapters as adapters_lib
from llmx.model import apply as apply_lib
from llmx.model import (
    decoder,
    distillation,
    dot,
    families,
    hidden_states,
    looked_up,
    preference,
    quantization,
    quantized,
    remat,
)
from llmx.model import packed as packed_lib
from llmx.model import teacher as teacher_lib
from llmx.model.adapters import AdaptersConfig
from llmx.model.execution import Execution
from llmx.model.experts import router
from llmx.model.hidden_states import PROJECTION
from llmx.model.packed import PackedConfig
from llmx.model.preference import PreferenceConfig
from llmx.model.quantization import QuantizationConfig
from llmx.sharding.mesh import within

TOKEN_AXES = ("batch", "sequence")  # logical axes of every array of a batch
BATCH_DTYPES = dict.fromkeys(("tokens", "targets", "segment_ids", "positions"), "int32")
BATCH_DTYPES |= {"weights": "float32"}


@dataclasses.dataclass(frozen=True, eq=False)
class TrainingLoss:
    """A model on a mesh, with the shapes and shardings of its parameters and gradients."""

    apply: apply_lib.Apply
    execution: Execution
    params: Any  # of what is trained, shapes with shardings
    axes: Any  # logical axes of `params`
    gradients: Any  # shardings of gradients
    updates: Any  # shardings of parameters while the optimizer updates them
    z_loss: float = 0.0  # factor of log(Z)^2
    gather: str = "layer"  # one of `sharding.GATHERS`
    transforms: Mapping[str, Transform] = dataclasses.field(default_factory=dict)
    of_tokens: Callable[[jax.Array, jax.Array], jax.Array] | None = None  # see `losses.OF_TOKENS`
    adapters: AdaptersConfig = dataclasses.field(default_factory=AdaptersConfig)
    # Parameters that are not trained: the model's own beside adapters, those of the reference of
    # preferences, or of a teacher. Shapes with shardings; () = there are none
    frozen: Any = ()
    frozen_axes: Any = ()  # their logical axes
    model_axes: Any = ()  # logical axes of the model's parameters
    # What pairs of answers cost; None = the loss is that of tokens
    preference: PreferenceConfig | None = None
    teacher: teacher_lib.Teacher | None = None  # whose parameters are the frozen ones
    seed: int = 0  # of dropout
    # from the blocks' parameters [L, ...] to those of the stages of a pipeline
    arrange: Callable[[Any], Any] = lambda blocks: blocks
    quantization: QuantizationConfig = dataclasses.field(default_factory=QuantizationConfig)

    @property
    def model_params(self) -> Any:
        """Shapes with shardings of the model's parameters."""
        return (
            self.frozen if self.adapters.rank else quantization.without_steps(of_model(self.params))
        )

    @property
    def of_rounded(self) -> "TrainingLoss":
        """The same, of weights that are rounded already: trained as they are."""
        own = (self.params, self.axes, self.gradients, self.updates)
        params, axes, gradients, updates = map(quantization.without_steps, own)
        return dataclasses.replace(
            self, params=params, axes=axes, gradients=gradients, updates=updates,
            quantization=QuantizationConfig(),
        )  # fmt: skip

    def with_rows(self, rows: Mapping[str, Any]) -> "TrainingLoss":
        """The same, of rows of tables too: by width, shapes with shardings, of a batch."""
        to = {looked_up.ROWS: jax.tree.map(lambda leaf: leaf.sharding, dict(rows))}
        axes = {looked_up.ROWS: {key: ("rows", None) for key in rows}}
        return dataclasses.replace(
            self, params=self.params | {looked_up.ROWS: dict(rows)}, axes=self.axes | axes,
            gradients=self.gradients | to, updates=self.updates | to,
        )  # fmt: skip

    def rounded(self, params: Any, extra: Mapping[str, Any] | tuple = ()) -> Any:
        """The model's parameters as it is evaluated, outside of programs: those that are quantized
        as their codes' numbers, and with the ranges of their inputs where the states `extra` of the
        transforms have averages of these; with its tables, if these have some. Communicates as
        `quantization.quantized_weights` does."""
        if self.execution.tables is not None:
            return params | {looked_up.TABLES: dict(extra)[looked_up.TABLES]}
        compute = self.execution.policy.compute
        params = quantization.dequantized_on_mesh(params, self.quantization, compute)
        if not isinstance(averages := dict(extra).get(quantized.RANGES), quantized.Averages):
            return params
        return quantized.params_with_ranges(params, averages.amax, self.model_axes)

    def joined(self, params: Any, frozen: Any, *, training: bool = False) -> Any:
        """Parameters with which the model is computed, of what is trained and what is not.

        `training`: of a batch that is `prepared`: adapters drop a part of their inputs.
        """
        if training and self.teacher is not None:
            return params | {distillation.HEAD: self.teacher.head_of(frozen)}
        if not self.adapters.rank:
            return params
        layers = None
        if training and self.adapters.dropout:
            model = self.apply.model
            numbers = jnp.arange(model.num_first, model.num_layers, dtype=jnp.int32)
            layers = {"first": jnp.arange(model.num_first), "blocks": self.arrange(numbers)}
        return adapters_lib.joined(frozen, params, self.adapters, layers=layers)

    def merged(self, params: Any, frozen: Any, extra: Mapping[str, Any] | tuple = ()) -> Any:
        """Parameters of the same model without adapters, split as the frozen ones; or `rounded`."""
        if not self.adapters.rank:
            return self.rounded(params, extra)
        merge = adapters_lib.merged_on_mesh
        return adapters_lib.merged(frozen, params, self.adapters, merge=merge)

    @property
    def mesh(self) -> Mesh:
        return self.execution.place.mesh

    def weighted(
        self, token_losses: Sequence[jax.Array], share_BT, extra: Mapping[str, Any] | tuple = ()
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Sums over tokens: of all that is differentiated, of the loss, of the z-loss.

        `token_losses`: what `Apply.losses` returns. `share_BT`: 1 / (tokens of the global batch), 0
        for positions that do not count. `extra`: states of the transforms, which may change what
        is differentiated and nothing else.
        """
        loss_BT, log_z_BT, *of_teacher = token_losses
        loss = minimized = jnp.sum(loss_BT * share_BT)
        if self.of_tokens is not None:
            minimized = jnp.sum(self.of_tokens(loss_BT, log_z_BT) * share_BT)
        if of_teacher:
            sums = [jnp.sum(one_BT * share_BT) for one_BT in of_teacher]
            minimized = self.execution.distilled.minimized(minimized, *sums)
        z = self.z_loss * jnp.sum(jnp.square(log_z_BT) * share_BT)
        return self._transformed(minimized + z, extra), loss, z

    def of_rows(
        self, token_losses: Sequence[jax.Array], rows: Batch, extra: Mapping[str, Any] | tuple
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array, dict[str, jax.Array]]]:
        """What is differentiated of these rows of a batch; and their loss, z-loss, and what else is
        reported, by name. `rows` also have "share", see `weighted`, and what `prepared` adds."""
        if self.preference is None:
            both, loss, z = self.weighted(token_losses, rows["share"], extra)
            sums = [jnp.sum(one_BT * rows["share"]) for one_BT in token_losses[2:]]
            return both, (loss, z, dict(zip(self.reported, sums, strict=True)))
        loss, reported = preference.losses(self.preference, rows, token_losses[0])
        return self._transformed(loss, extra), (loss, jnp.zeros(()), reported)

    @property
    def reported(self) -> tuple[str, ...]:
        """Names of what `of_rows` reports."""
        if self.execution.distilled is not None:
            return self.execution.distilled.reported
        return self.of_pairs

    @property
    def of_pairs(self) -> tuple[str, ...]:
        """Names of what `summed_pairs` reports beside the loss; () = the loss is that of tokens."""
        return () if self.preference is None else preference.REPORTED

    def prepared(
        self, batch: Batch, frozen: Any, *, step: Any = None, accumulation: int = 1
    ) -> Batch:  # fmt: skip
        """A global batch with what else its loss depends on: the noise of dropout, at a step of
        training; for preferences what the reference says of it, in `accumulation` microbatches, and
        so what a teacher says. Communicates as a forward pass does."""
        if step is not None and self.adapters.dropout:
            to = self.batch_sharding
            noise_BT = adapters_lib.noise_of_rows(batch["tokens"].shape, to, step, self.seed)
            batch = batch | {"noise": noise_BT}
        if self.teacher is not None:
            return self._taught(batch, frozen, accumulation)
        if self.preference is None:
            return batch

        def nats_of(rows):
            return self.apply.losses(frozen, rows, self.execution)[0]

        with self.execution.policy.products():
            if accumulation == 1:
                nats_BT = nats_of(batch)
            else:
                nats_BT = from_microbatches(jax.lax.map(nats_of, microbatches(batch, accumulation)))
        return preference.with_reference(batch, nats_BT)

    def _taught(self, batch: Batch, frozen: Any, accumulation: int) -> Batch:
        """A batch with what the teacher says of it, as `prepared` returns it."""
        to = self.execution.place.activation(("batch", "block_sequence", "embed"))
        rows = {name: batch[name] for name in ("tokens", "segment_ids", "positions")}
        ways = self.mesh.shape["stage"]  # the rows of the teacher are split over stages too
        parts = next(n for n in range(max(accumulation // ways, 1), 0, -1) if accumulation % n == 0)
        outputs = self.execution.distilled.of_teacher
        hidden_of = lambda rows: self.teacher.hidden(frozen, rows, to, outputs)  # noqa: E731
        with self.teacher.execution.policy.products():
            if parts == 1:
                return batch | hidden_of(rows)
            of_parts = jax.lax.map(hidden_of, microbatches(rows, parts))
            return batch | {name: from_microbatches(one) for name, one in of_parts.items()}

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

    def evaluated(self, params: Any, frozen: Any, extra: Mapping[str, Any] | tuple = ()) -> Any:
        """What `summed` takes, of what is trained, what is not, and the states of the transforms;
        outside of programs."""
        joined = self.rounded(self.joined(params, frozen), extra)
        return joined if self.preference is None else (joined, frozen)

    def summed(self, params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """(sum of losses in nats, number of tokens) of a global batch, for evaluation; of
        preferences the sum over pairs and their number."""
        if self.preference is not None:
            sums, num_pairs = self.summed_pairs(params, batch)
            return sums["loss"], num_pairs
        with self.execution.policy.products():
            loss_BT, *_ = self.apply.losses(params, batch, self.execution)
        return jnp.sum(loss_BT * batch["weights"]), jnp.sum(batch["weights"])

    def summed_pairs(self, params: Any, batch: Batch) -> tuple[dict[str, jax.Array], jax.Array]:
        """Of preferences: sums over the pairs of a global batch, of their loss and of all that is
        `reported`, by name, and the number of pairs. `params` are those of `evaluated`."""
        params, frozen = params
        batch = self.prepared(batch, frozen)
        with self.execution.policy.products():
            nats_BT, _ = self.apply.losses(params, batch, self.execution)
        loss, reported = preference.losses(self.preference, batch, nats_BT)
        num_pairs = preference.has_pair(batch).sum()
        return {
            name: mean * num_pairs for name, mean in {"loss": loss, **reported}.items()
        }, num_pairs

    def per_replica(self, axes: tuple[str, ...]) -> "TrainingLoss":
        """The same of one of the replicas along `axes`: nothing communicates over these."""
        place, tables = self.execution.place.per_replica(axes), self.execution.tables
        execution = dataclasses.replace(
            self.execution, place=place, tables=tables and tables.per_replica(axes)
        )
        return dataclasses.replace(self, execution=execution)

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
        amax = quantized.known_ranges(extra[quantized.RANGES]) * self._scale_of_ranges(extra)
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
        over the batch axes, in the compute dtype: communicates. Tables of lookups stay split, and
        so do rows of sparse tables, which the model's axes do not name."""
        policy, axes = self.execution.policy, self.model_axes
        if self.gather != "step":
            return params
        if distillation.HEAD in params:
            axes = axes | {distillation.HEAD: ("vocab", "embed")}
        if PROJECTION in params:
            axes = axes | {PROJECTION: self.axes[PROJECTION]}

        def one(path, leaf, axes):
            if (
                packed_lib.is_packed(leaf)
                or "embed" not in axes
                or path[0].key in decoder.LOOKED_UP
            ):
                return leaf
            in_blocks = path[0].key in ("blocks", "first")
            numbers = policy.numbers if in_blocks else policy.numbers.of_head
            if path[0].key == PROJECTION:
                numbers = quantized.UNROUNDED
            gather = lambda leaf: dot.whole(leaf, policy.compute, numbers, axes)  # noqa: E731
            return adapters_lib.on_base(gather, leaf)

        own = {name: leaf for name, leaf in params.items() if name in axes}
        axes = {name: axes[name] for name in own}
        return params | jax.tree_util.tree_map_with_path(one, own, axes, is_leaf=dot.is_weight)

    def gathered_bytes(self) -> int:
        """Bytes per device of the weights that gather="step" keeps whole."""
        with within(self.mesh):
            gathered = jax.eval_shape(self.gathered, self.model_params)
        pairs = zip(jax.tree.leaves(gathered), jax.tree.leaves(self.model_params), strict=True)
        changed = [leaf for leaf, old in pairs if leaf.sharding.spec != old.sharding.spec]
        return sharding.device_bytes(changed)

    @property
    def batch_sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, self.execution.place.activation(TOKEN_AXES))

    @property
    def read_ahead(self) -> dict[str, str]:
        """See `looked_up.read_ahead`."""
        tables = self.execution.tables
        return looked_up.read_ahead(tables, self.apply.id_arrays) if tables else {}

    def abstract_batch(self, shape: Sequence[int]) -> Batch:
        """Shapes with shardings of a global batch [B, T]."""
        arrays = {name: (tuple(shape), dtype) for name, dtype in BATCH_DTYPES.items()}
        for name, (size, dtype) in self.apply.batch_arrays.items():
            arrays[name] = ((*shape, size), dtype)
        if (tables := self.execution.tables) is not None and tables.virtual:
            columns = sum(feature.columns for feature in tables.features)
            arrays[looked_up.IDS] = ((*shape, columns // shape[1]), "int32")
        if (distilled := self.execution.distilled) is not None:
            arrays |= distilled.arrays(tuple(shape))
        arrays |= {own: arrays[name] for name, own in self.read_ahead.items()}
        return {
            name: jax.ShapeDtypeStruct(shape, dtype, sharding=self.batch_sharding)
            for name, (shape, dtype) in arrays.items()
        }


def make(
    config: families.ModelConfig, execution: Execution, *,
    arrange: Callable[[Any], Any] = lambda blocks: blocks, z_loss: float = 0.0,
    gather: str = "layer",
    in_host_memory: bool = False, transforms: Mapping[str, Transform] | None = None,
    of_tokens: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
    adapters: AdaptersConfig | None = None, preferred: PreferenceConfig | None = None,
    quantized_as: QuantizationConfig | None = None, packed: PackedConfig | None = None,
    teacher: families.ModelConfig | None = None, seed: int = 0,
) -> TrainingLoss:  # fmt: skip
    """Shapes, shardings and functions of a model on a mesh; nothing is allocated.

    `arrange`: from the blocks' parameters [L, ...] to those of the stages of a pipeline.
    `in_host_memory`: the blocks' matrices are kept there. `adapters`: with a rank, they are what is
    trained. `preferred`: the loss is that of pairs, and the model at the start the reference.
    `quantized_as`: how weights are rounded, whose scales may be trained too.
    `teacher`: of a model that is computed beside this one, to be learned from.
    `packed`: with bits, the weights of products are stored as these, and have no gradient.

    Raises ValueError, naming the parameter, where the layout does not fit the model and mesh.
    """
    adapters = adapters or AdaptersConfig()
    place, policy = execution.place, execution.policy
    shapes, axes = apply_lib.abstract_parameters(config)

    stored = functools.partial(_stored, place, arrange, in_host_memory)
    model_shapes, model_axes = shapes, axes
    if packed is not None and packed.bits:
        model_shapes, model_axes = packed_lib.shapes_and_axes(packed, shapes, axes)
    frozen, frozen_axes = (), ()
    taught_by = teacher_lib.make(teacher, execution) if teacher is not None else None
    if taught_by is not None:
        frozen, frozen_axes = taught_by.params, taught_by.axes
    elif adapters.rank or preferred is not None:
        frozen = stored(model_shapes, model_axes, lambda axes: policy.frozen(axes, policy.param))
        frozen_axes = model_axes
    if adapters.rank:
        shapes, axes = adapters_lib.shapes_and_axes(adapters, shapes, axes)
    else:
        shapes, axes = model_shapes, model_axes
    shapes, axes = _with_projection(execution, shapes, axes, config, teacher)
    quantized_as = quantized_as or QuantizationConfig()
    shapes, axes = quantization.with_steps(quantized_as, shapes, axes)
    params = stored(shapes, axes, lambda axes: policy.param)
    gradients, updates = (
        _placed_by(place, table, params, axes) for table in ("gradients", "optimizer")
    )
    return TrainingLoss(
        apply_lib.of(config), execution, params, axes, gradients, updates, z_loss, gather,
        transforms or {}, of_tokens, adapters, frozen, frozen_axes, model_axes, preferred,
        taught_by, seed, arrange, quantized_as,
    )  # fmt: skip


def _with_projection(
    execution: Execution, shapes: Any, axes: Any, student: families.ModelConfig,
    teacher: families.ModelConfig | None,
) -> tuple[Any, Any]:  # fmt: skip
    """Shapes and axes with those of the matrices from the student's layers to the teacher's, where
    outputs of layers are learned."""
    if execution.distilled is None or not (layers := execution.distilled.layers):
        return shapes, axes
    own_shapes, own_axes = hidden_states.shapes_and_axes(layers, student.width, teacher.width)
    return shapes | {PROJECTION: own_shapes}, axes | {PROJECTION: own_axes}


def _stored(
    place: sharding.Placement, arrange: Callable[[Any], Any], in_host_memory: bool,
    shapes: Any, axes: Any, dtype_of: Callable[[tuple], jnp.dtype],
) -> Any:  # fmt: skip
    """Shapes with shardings of parameters as a run keeps them; floats in `dtype_of` their axes."""
    shapes = jax.tree.map(
        lambda leaf, axes: jax.ShapeDtypeStruct(
            leaf.shape, dtype_of(axes) if leaf.dtype == jnp.float32 else leaf.dtype
        ),
        shapes, axes,
    )  # fmt: skip
    if "blocks" in shapes:
        shapes["blocks"] = jax.eval_shape(arrange, shapes["blocks"])
    to = _placed_by(place, "parameters", shapes, axes)
    if in_host_memory:
        on_host = lambda to: to.with_memory_kind(remat.HOST_MEMORY)  # noqa: E731
        to["blocks"] = jax.tree.map(
            lambda to, names: on_host(to) if "embed" in names else to,
            to["blocks"], axes["blocks"],
        )  # fmt: skip
    return jax.tree.map(placed, shapes, to)


def _placed_by(place: sharding.Placement, table: str, shapes: Any, axes: Any) -> Any:
    return sharding.shardings(shapes, place.mesh, place.layout, rules=axes, table=table)


def of_model(params: Any) -> Any:
    """Parameters without those that are trained beside the model and are no part of it."""
    if not isinstance(params, Mapping) or PROJECTION not in params:
        return params
    return {name: tree for name, tree in params.items() if name != PROJECTION}


def with_own(model: Any, params: Any) -> Any:
    """`params`, with the parameters of `model` in the place of those of its model."""
    return {**params, **model} if of_model(params) is not params else model


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


def from_microbatches(array_nBT: jax.Array) -> jax.Array:
    """The reverse of `microbatches`, of one array."""
    num, rows, *rest = array_nBT.shape
    _, of_rows, *others = jax.typeof(array_nBT).sharding.spec
    array = jnp.swapaxes(array_nBT, 0, 1)
    return jnp.reshape(array, (num * rows, *rest), out_sharding=PartitionSpec(of_rows, *others))
