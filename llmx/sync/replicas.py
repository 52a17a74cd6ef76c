"""The replicas along `data`: what each device holds of every tensor, and manual regions over it.

`data` crosses the slow network. A strategy says what the replicas exchange there; the layout says
how each of them is split over the other axes, and neither knows of the other. With every strategy
but "mean" the parameters are whole along `data`, and each replica takes the gradient of its own
rows.

Gradients are exchanged as *shares*: a replica's term of the gradient of the global batch, so that
the sum over replicas is the gradient, however many tokens each has. What compression leaves out is
in the same unit, and so the sum of all residuals means the same for any number of replicas.
"""

import dataclasses
import fnmatch
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from llmx import sharding
from llmx.contract import Gradient, Gradients, Optimizer, State, Timetable
from llmx.model.training_loss import TrainingLoss, scaled, squared_norms
from llmx.sharding import trees
from llmx.sync import buckets, compressors
from llmx.sync.compressors import Compressor, Group, Residuals, Tensor
from llmx.sync.config import SyncConfig

AXIS = "data"
AXES = (AXIS,)
WHOLE = PartitionSpec()

# Phases. A step averages gradients in full; exchanges them, or the momentum, in the strategy's way;
# is local, each replica updating itself; is local, with gradients summed in full for the second
# moment only.
MEAN, COMPRESSED, LOCAL, VARIANCE = "mean", "compressed", "local", "variance"


@dataclasses.dataclass(frozen=True, eq=False)
class Replicas:
    """The replicas of a mesh, what each device has of every tensor, and what they exchange.

    `tensors`: by parameter name. `specs`: how a replica's updates are split. `compressor`: of what
    is not summed in full.
    """

    config: SyncConfig
    mesh: Mesh
    tensors: dict[str, Tensor]
    specs: dict[str, PartitionSpec]
    compressor: Compressor

    @property
    def size(self) -> int:
        return self.mesh.shape[AXIS]

    @property
    def group(self) -> Group:
        config = self.config
        return Group(
            AXIS, self.size, config.error_feedback, bucket_bytes=int(config.bucket_mib * 2**20),
            fraction=config.fraction, rank=config.rank, scale=config.scale,
        )  # fmt: skip

    @property
    def stacked_specs(self) -> dict[str, PartitionSpec]:
        """How arrays of all replicas, [n, ...], are split."""
        return {name: PartitionSpec(AXIS, *spec.partitions) for name, spec in self.specs.items()}

    @property
    def stacked(self) -> dict[str, int]:
        """By name, how many of a parameter's dimensions count layers and experts."""
        return {name: tensor.stacked for name, tensor in self.tensors.items()}

    @property
    def own_specs(self) -> dict[str, PartitionSpec]:
        """How numbers of each layer and expert, [L, 1, ...] or [1, ...], are split."""
        return {
            name: PartitionSpec(
                *self.entries(name)[:tensor.stacked],
                *[None] * (len(tensor.shape) - tensor.stacked),
            )
            for name, tensor in self.tensors.items()
        }  # fmt: skip

    def region(self, function, *, in_specs, out_specs):
        """`function` of one device's parts, manual over all axes of the mesh."""
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def shape(self, name: str) -> tuple[int, ...]:
        """The global shape of a parameter."""
        ways = [sharding.ways(self.mesh, entry) for entry in self.entries(name)]
        return tuple(dim * n for dim, n in zip(self.tensors[name].shape, ways, strict=True))

    def entries(self, name: str) -> tuple:
        """The mesh axes that split each dimension of a parameter while it is updated."""
        entries = self.specs[name].partitions
        return (*entries, *(None,) * (len(self.tensors[name].shape) - len(entries)))

    def placed(self, shape, spec, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, spec))

    def like_parameters(self) -> dict[str, jax.ShapeDtypeStruct]:
        """fp32 arrays in the shapes and shardings of the updates, by name."""
        return {name: self.placed(self.shape(name), self.specs[name]) for name in self.tensors}

    def of_all(self, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """The type of an array that each replica has one of, [n, ...]."""
        spec = PartitionSpec(AXIS, *leaf.sharding.spec.partitions)
        return self.placed((self.size, *leaf.shape), spec, leaf.dtype)

    def abstract_residuals(self) -> Residuals:
        """Shapes with shardings of what the compressor keeps."""
        residuals = {field: {} for field in Residuals._fields}
        for name, tensor in self.tensors.items():
            for field, row in self.compressor.state(tensor, self.group).items():
                if row is None:
                    shape = self.placed((self.size, *self.shape(name)), self.stacked_specs[name])
                else:
                    shape = self._by_shard(name, row, () if field == "queries" else AXES)
                residuals[field][name] = shape
        return Residuals(**residuals)

    def _by_shard(self, name: str, last: tuple[int, ...], leading: tuple[str, ...] = ()):
        """[leading..., L, parts of each dimension..., last...]: an array of every shard's own.

        Its shape says how the parameter was split, which is what a restore has to know.
        """
        tensor, entries = self.tensors[name], self.entries(name)
        first, rest = (entries[0], entries[1:]) if tensor.layered else (None, entries)
        rows = tensor.rows * sharding.ways(self.mesh, first)
        shape = (
            *(self.mesh.shape[axis] for axis in leading),
            rows, *(sharding.ways(self.mesh, entry) for entry in rest), *last,
        )  # fmt: skip
        return self.placed(shape, PartitionSpec(*leading, first, *rest, *(None,) * len(last)))

    def residual_specs(self) -> Residuals:
        return jax.tree.map(lambda leaf: leaf.sharding.spec, self.abstract_residuals())

    def exchange(self, terms, residuals: Residuals, live=None, tensors=None):
        """The sum of all replicas' terms, for use inside a manual region; see `Compressor`.

        `tensors`: others than all of the model. One replica has nobody to send to, and compresses
        nothing.
        """
        tensors = list(self.tensors.values()) if tensors is None else tensors
        reduce = compressors.alone if self.size == 1 else self.compressor.reduce
        return reduce(tensors, terms, residuals, self.group, live)

    def messages(self) -> tuple[int, tuple[int, ...]]:
        """How many tensors are compressed into bytes, and the bytes of each message of the first
        phase of an exchange that a device fuses them into."""
        first = [self.compressor.messages(each, self.group)[0] for each in self.tensors.values()]
        sizes = [message.bytes for message in first if message.collective != "all_reduce"]
        fused = buckets.fuse(sizes, self.group.bucket_bytes)
        return len(sizes), tuple(sum(sizes[i] for i in bucket) for bucket in fused)

    def shares(self, found: Gradients) -> dict[str, jax.Array]:
        """Each replica's term of the global gradient, [n, ...] by name."""
        return trees.named(scaled(found.tree, found.shares))

    def summed_shares(
        self, shares: dict[str, jax.Array], found: Gradients, residuals: Residuals
    ) -> tuple[Gradients, Residuals]:
        """`found` with the sum of shares [n, ...] by the compressor, and its residuals.

        Communicates over `data`; sizes of compressed rows also over the axes that split a replica.
        """

        def region(shares, residuals):
            return self.exchange({name: share[0] for name, share in shares.items()}, residuals)

        specs = self.residual_specs()
        sums, residuals = self.region(
            region, in_specs=(self.stacked_specs, specs), out_specs=(self.specs, specs)
        )(shares, residuals)
        return with_sums(found, sums), residuals

    def summed(self, found: Gradients) -> Any:
        """The gradient of the global batch, summed in full over `data`."""
        region = lambda terms: jax.lax.psum({n: a[0] for n, a in terms.items()}, AXIS)  # noqa: E731
        sums = self.region(region, in_specs=(self.stacked_specs,), out_specs=self.specs)(
            self.shares(found)
        )
        return trees.unnamed(sums, found.tree)


def with_sums(found: Gradients, sums: dict[str, jax.Array]) -> Gradients:
    """Gradients of each replica with their sums, by name, in their place."""
    tree = trees.unnamed(sums, found.tree)
    return found._replace(tree=tree, norms=jnp.sqrt(squared_norms(tree).sum()), shares=())


def make(
    config: SyncConfig, mesh: Mesh, compressor: Compressor, *, shapes: Any, axes: Any, updates: Any
) -> Replicas:
    """The replicas of a model on a mesh.

    Args:
      config: the section `sync`.
      mesh: with an axis `data`.
      compressor: a value of `compressors.COMPRESSORS`.
      shapes, axes, updates: of the parameters, their logical axes, and their shardings while they
        are updated, which must be whole along `data`.
    """
    specs = {name: to.spec for name, to in trees.named(updates).items()}
    logical = jax.tree.structure(shapes).flatten_up_to(axes)
    tensors = {
        name: dataclasses.replace(
            compressors.local_tensor(name, leaf.shape, of, specs[name], dict(mesh.shape)),
            in_full=any(fnmatch.fnmatchcase(name, pattern) for pattern in config.uncompressed),
        )
        for (name, leaf), of in zip(trees.named(shapes).items(), logical, strict=True)
    }
    if config.average_moments or any(tensor.in_full for tensor in tensors.values()):
        compressor = compressors.some_in_full(compressor)
    return Replicas(config, mesh, tensors, specs, compressor)


def unmatched(config: SyncConfig, names: Iterable[str]) -> list[str]:
    """The patterns of parameters that are not compressed that match none of these names."""
    names = list(names)
    return [each for each in config.uncompressed if not fnmatch.filter(names, each)]


@dataclasses.dataclass(frozen=True, eq=False)
class StrategyInputs:
    """What a strategy is made from.

    opt_state: shapes with shardings of the optimizer's state.
    gradient: of the global batch. replica_gradient: of each replica's own rows, [n, ...].
    update: (gradients, State, accepted, optax transformation, **extra arguments of its update)
      -> State with new params, opt_state and ema where accepted.
    with_head: head -> these inputs with another optax transformation in the place of Adam.
    decays: by parameter name, whether weight decay applies.
    forget_norms: State -> State whose guard no longer knows which norms are usual.
    agreed: values of the config that groups of replicas in other programs must have too.
    """

    config: SyncConfig
    replicas: Replicas | None  # None: with strategy "mean" there is no need to tell them apart
    loss: TrainingLoss
    gradient: Gradient
    replica_gradient: Gradient | None
    optimizer: Optimizer
    optimizer_config: Any  # `step.optimizers.OptimizerConfig`
    opt_state: Any
    update: Callable
    with_head: Callable
    decays: dict[str, bool]
    forget_norms: Callable[[State], State]
    timetable: Timetable
    agreed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
