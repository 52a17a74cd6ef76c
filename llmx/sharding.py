"""Where arrays live: a named mesh, logical axis names, and tables from the one to the other.

A tensor dimension has a *logical axis* ("embed", "heads", "batch", ...). A `Layout` says, for
parameters, gradients, optimizer state and activations, which *mesh axes* each logical axis is split
over. Data parallelism, ZeRO-1/2/3, HSDP, tensor parallelism and sequence parallelism differ in
these tables only; the model and the train step are one text.

This module needs jax and numpy only, and works on any pytree: see docs/sharding.md for its use in
other JAX code.

Sources: ZeRO (arXiv 1910.02054), Megatron tensor and sequence parallelism (arXiv 1909.08053,
2205.05198), HSDP (arXiv 2304.11277), logical axes (GSPMD, arXiv 2105.04663).
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

# Mesh axes, outermost (slowest network) first. The innermost get the fastest links.
AXES = ("stage", "data", "fsdp", "expert", "sequence", "tensor")

# The mesh axes that split the batch: replicas of the model work on different rows.
BATCH_AXES = ("data", "fsdp", "expert")

# The mesh axes that split tokens: along them, weight gradients are sums.
TOKEN_AXES = (*BATCH_AXES, "sequence")


@dataclasses.dataclass
class MeshConfig:
    """How many devices lie along each mesh axis; one of them may be -1 = all that remain."""

    stage: int = 1  # pipeline stages
    data: int = -1  # replicas that exchange gradients (slow network)
    fsdp: int = 1  # replicas that also share parameters or optimizer state (fast network)
    expert: int = 1  # expert parallelism; splits the batch elsewhere
    sequence: int = 1  # context parallelism: splits the tokens of a sequence
    tensor: int = 1  # tensor parallelism: splits heads, mlp and vocabulary
    across_slices: tuple[str, ...] = ()  # axes that cross the network between slices or nodes


@dataclasses.dataclass
class ShardingConfig:
    """Which layout, and its variations."""

    layout: str = "zero3"  # ddp | zero1 | zero2 | zero3 | hsdp
    sequence_parallel: bool = True  # between blocks, split the sequence over `tensor` too
    replicate_kv: bool = False  # keep all K/V heads on every tensor shard (num_kv_heads < tensor)
    gather: str = "layer"  # split weights are gathered per "layer" and pass, or once per "step"


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Four tables from logical axis to the mesh axes that split it (empty = not split)."""

    parameters: Mapping[str, tuple[str, ...]]
    gradients: Mapping[str, tuple[str, ...]]
    optimizer: Mapping[str, tuple[str, ...]]
    activations: Mapping[str, tuple[str, ...]]

    def without(self, axes: Sequence[str], *tables: str) -> "Layout":
        """The same, but nothing in these tables is split over the mesh axes `axes`."""
        strip = lambda over: tuple(axis for axis in over if axis not in axes)  # noqa: E731
        return dataclasses.replace(
            self,
            **{t: {name: strip(over) for name, over in vars(self)[t].items()} for t in tables},
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """A mesh and a layout together: what code needs to name logical axes only."""

    mesh: Mesh
    layout: Layout
    # Mesh axes along which arrays differ although their types call them whole: see `hide`.
    hidden: tuple[str, ...] = ()

    def activation(self, axes: Sequence[str | None], shape: Sequence[int] | None = None):
        """PartitionSpec of an activation with these logical axes."""
        return spec(axes, self.layout.activations, self.mesh, shape=shape)

    def constrain(
        self,
        array: jax.Array,
        axes: Sequence[str | None],
        *,
        multiplied_into: Sequence[str] = (),
    ) -> jax.Array:
        """`array` placed as an activation with these logical axes; communicates if it must.

        Where products turn it into axes `multiplied_into`, each device along their mesh axes has
        one term of its gradient: these are added up once, here, and not after every product.
        """
        to = self.activation(axes, array.shape)
        if summed := [a for a in self._mesh_axes(multiplied_into) if a not in used_axes(to)]:
            to = reduced(to, summed)
        return constrain(array, self.mesh, to)

    def manual(self, function: Callable, *, in_specs: Any, out_specs: Any) -> Callable:
        """`function` of one device's parts: `jax.shard_map`, differentiable under `hidden` axes.

        The gradient of what `in_specs` calls whole along an axis is a sum over it; along hidden
        axes it is not.
        """
        apply = functools.partial(jax.shard_map, mesh=self.mesh, check_vma=False)
        if not self.hidden:
            return apply(function, in_specs=in_specs, out_specs=out_specs)
        shown = lambda specs: jax.tree.map(functools.partial(_shown, self.hidden), specs)  # noqa: E731

        def local(*arrays):
            out = function(*jax.tree.map(lambda array: array[0], arrays))
            return jax.tree.map(lambda array: array[None], out)

        region = apply(local, in_specs=shown(in_specs), out_specs=shown(out_specs))

        def revealed(*arrays):
            out = region(*jax.tree.map(lambda a: reveal(self.mesh, self.hidden, a[None]), arrays))
            return jax.tree.map(lambda a: hide(self.mesh, self.hidden, a)[0], out)

        return revealed

    def _mesh_axes(self, axes: Sequence[str]) -> list[str]:
        table, sizes = self.layout.activations, self.mesh.shape
        return [over for axis in axes for over in table[axis] if sizes.get(over, 1) > 1]

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The mesh axes along which tokens differ: weight gradients are sums over them."""
        sizes = self.mesh.shape
        return tuple(a for a in TOKEN_AXES if sizes.get(a, 1) > 1 and a not in self.hidden)

    def routed(self, params: Any, sinks: Any) -> Any:
        """Each parameter with its gradient routed to its sink: see `route_gradient`."""
        route = functools.partial(route_gradient, self.token_axes)
        return jax.tree.map(route, params, sinks)

    def with_terms(self, array: jax.Array) -> jax.Array:
        """A parameter whose gradient is left as terms of a sum over the devices that see different
        tokens."""
        return _with_terms(self.token_axes, array)

    def alone(self, axes: tuple[str, ...]) -> "Placement":
        """Of one of the replicas along `axes`, which knows of no other: arrays have types as on a
        mesh without these axes, and what communicates does so within the replica."""
        layout = self.layout.without(axes, "parameters", "gradients", "optimizer", "activations")
        return dataclasses.replace(self, layout=layout, hidden=(*self.hidden, *axes))

    def size(self, axes: Sequence[str]) -> int:
        """The number of devices along these mesh axes together."""
        return math.prod(self.mesh.shape[axis] for axis in axes)


# ------------------------------------------------------------------------------------------- meshes


def resolve_sizes(sizes: Mapping[str, int], num_devices: int) -> dict[str, int]:
    """Mesh axis sizes with -1 filled in, so that their product is `num_devices`.

    Raises ValueError where they cannot multiply to it.
    """
    sizes = dict(sizes)
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    bad = {axis: size for axis, size in sizes.items() if size < 1 and size != -1}
    if bad:
        raise ValueError(f"mesh sizes {bad} must be at least 1, or -1 for all that remain")
    if len(open_axes) > 1:
        raise ValueError(f"mesh axes {open_axes} are all -1: only one axis can take the rest")
    known = math.prod(size for size in sizes.values() if size != -1)
    if open_axes:
        if num_devices % known:
            raise ValueError(
                f"mesh {mesh_text(sizes)} cannot fill {num_devices} devices: the given axes "
                f"multiply to {known}, which does not divide {num_devices}; change them to one of "
                "its divisors"
            )
        sizes[open_axes[0]] = num_devices // known
    elif known != num_devices:
        shown = mesh_text(sizes, alone="of one device")
        raise ValueError(
            f"mesh {shown} needs {known} devices and there are {num_devices}: "
            f"set one axis to -1, or change their product to {num_devices}"
        )
    return sizes


def make_mesh(
    sizes: Mapping[str, int],
    *,
    devices: Sequence[jax.Device] | None = None,
    across_slices: Sequence[str] = (),
    axis_type: AxisType = AxisType.Explicit,
) -> Mesh:
    """A mesh with axes `sizes` (name -> size, outermost first; one may be -1) over `devices`.

    Inner axes get the fastest links (`mesh_utils`). Axes named in `across_slices` cross the slow
    network: their sizes multiply to the number of slices (or of processes, where the devices have
    no slices).

    Raises ValueError where sizes and devices do not fit.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = resolve_sizes(sizes, len(devices))
    shape = tuple(sizes.values())
    if unknown := set(across_slices) - set(sizes):
        raise ValueError(f"mesh.across_slices names {sorted(unknown)}: the axes are {tuple(sizes)}")
    if across_slices:
        outer = tuple(size if axis in across_slices else 1 for axis, size in sizes.items())
        inner = tuple(size // out for size, out in zip(shape, outer, strict=True))
        by_slice = len({_slice_index(device) for device in devices}) > 1
        num = len({_slice_index(d) if by_slice else d.process_index for d in devices})
        if math.prod(outer) != num:
            raise ValueError(
                f"mesh.across_slices={tuple(across_slices)} multiply to {math.prod(outer)} and "
                f"there are {num} {'slices' if by_slice else 'processes'}: make their sizes "
                f"multiply to {num}, or set across_slices to ()"
            )
        array = mesh_utils.create_hybrid_device_mesh(
            inner, outer, devices=devices, process_is_granule=not by_slice,
            allow_split_physical_axes=True,
        )  # fmt: skip
    elif devices[0].platform == "cpu":
        array = np.array(devices).reshape(shape)
    else:
        array = mesh_utils.create_device_mesh(
            shape, devices=devices, allow_split_physical_axes=True
        )
    return Mesh(array, tuple(sizes), axis_types=(axis_type,) * len(sizes))


def _slice_index(device: jax.Device) -> int:
    return device.slice_index if hasattr(device, "slice_index") else 0


def mesh_text(sizes: Mapping[str, int], *, alone: str = "one device") -> str:
    """ "data2 x tensor4": mesh axes with their sizes, or `alone` where all are 1."""
    return " x ".join(f"{axis}{size}" for axis, size in sizes.items() if size != 1) or alone


# ------------------------------------------------------------------------------------- hidden axes
#
# Stages of a pipeline do different things at one time: this one a forward pass, that one a backward
# pass, or nothing. A program of explicit axes can say that if the axis `stage` is hidden: arrays
# that differ from stage to stage have types that do not name it, as if they were whole along it.
# Products, gathers and sums over the other axes then stay within a stage, and a conditional takes
# the branch that its stage's predicate says. Between stages only manual regions communicate.


def _shown(axes: tuple[str, ...], to: PartitionSpec) -> PartitionSpec:
    return PartitionSpec(axes[0] if len(axes) == 1 else axes, *to.partitions)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def hide(mesh: Mesh, axes: tuple[str, ...], array: jax.Array) -> jax.Array:
    """[n * ways, ...] split over `axes`, as [n, ...] of which each device keeps its own."""
    to = jax.typeof(array).sharding.spec
    rest = PartitionSpec(None, *to.partitions[1:])
    return jax.shard_map(
        lambda local: local, mesh=mesh, in_specs=_shown(axes, PartitionSpec(*to.partitions[1:])),
        out_specs=rest, check_vma=False,
    )(array)  # fmt: skip


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def reveal(mesh: Mesh, axes: tuple[str, ...], array: jax.Array) -> jax.Array:
    """The reverse of `hide`."""
    to = jax.typeof(array).sharding.spec
    return jax.shard_map(
        lambda local: local, mesh=mesh, in_specs=to,
        out_specs=_shown(axes, PartitionSpec(*to.partitions[1:])), check_vma=False,
    )(array)  # fmt: skip


def own_part(mesh: Mesh, axes: tuple[str, ...], array: jax.Array) -> jax.Array:
    """Each device's part along `axes` of an array that they split, as an array of its own."""
    to = jax.typeof(array).sharding.spec
    return jax.shard_map(
        lambda local: local, mesh=mesh, in_specs=to, out_specs=without(to, axes), check_vma=False
    )(array)


hide.defvjp(
    lambda mesh, axes, array: (hide(mesh, axes, array), None),
    lambda mesh, axes, _, gradient: (reveal(mesh, axes, gradient),),
)
reveal.defvjp(
    lambda mesh, axes, array: (reveal(mesh, axes, array), None),
    lambda mesh, axes, _, gradient: (hide(mesh, axes, gradient),),
)


# ------------------------------------------------------------------------------------------ layouts

# Tensor and pipeline parallelism: which logical axes of a parameter go to which mesh axes, in every
# layout. Every stage has an equal share of embedding and head: see `llmx.executor`.
_MODEL = {
    "vocab": ("stage", "tensor"),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "embed": (),
    "head_dim": (),
    "positions": (),
    "norm": (),
    "layers": ("stage",),
}

_ACTIVATIONS = {
    "batch": BATCH_AXES,
    "sequence": ("sequence",),  # inside attention and MLP
    "block_sequence": ("sequence", "tensor"),  # between them: sequence-parallel norms
    "cache": ("sequence",),  # slots for keys and values of what was decoded
    "vocab": ("stage", "tensor"),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "embed": (),
    "head_dim": (),
    "layers": (),
}


def _split(over: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Parameters split over the replicas `over` too, along the width, which every matrix has."""
    return _MODEL | {"embed": over}


def _layout(parameters, gradients, optimizer) -> Layout:
    return Layout(_split(parameters), _split(gradients), _split(optimizer), _ACTIVATIONS)


# The devices of `sequence` are replicas too, of the parameters: of a row they have other tokens.
_ALL, _FAST, _NONE = ("data", "fsdp", "sequence"), ("fsdp", "sequence"), ()

#                     parameters  gradients  optimizer state
LAYOUTS = {
    "ddp": _layout(_NONE, _NONE, _NONE),  # replicas are whole; gradients are all-reduced
    "zero1": _layout(_NONE, _NONE, _ALL),  # each replica updates its share, then all gather it
    "zero2": _layout(_NONE, _ALL, _ALL),  # gradients are reduce-scattered
    "zero3": _layout(_ALL, _ALL, _ALL),  # parameters are gathered layer by layer (FSDP)
    "hsdp": _layout(_FAST, _FAST, _FAST),  # zero3 over `fsdp`, whole replicas over `data`
}


def make_layout(name: str, *, sequence_parallel: bool = True, replicate_kv: bool = False) -> Layout:
    """`LAYOUTS[name]`, with sequence-parallel norms switched off or K/V heads kept whole if asked.

    Raises ValueError for an unknown name.
    """
    if name not in LAYOUTS:
        raise ValueError(f"layout {name!r} is unknown: use one of {', '.join(LAYOUTS)}")
    layout = LAYOUTS[name]
    if not sequence_parallel:
        whole = dict(layout.activations) | {"block_sequence": ("sequence",)}
        layout = dataclasses.replace(layout, activations=whole)
    if replicate_kv:
        tables = {
            field.name: dict(vars(layout)[field.name]) | {"kv_heads": ()}
            for field in dataclasses.fields(layout)
        }
        layout = Layout(**tables)
    return layout


# -------------------------------------------------------------------------- from names to shardings


def spec(
    axes: Sequence[str | None],
    table: Mapping[str, tuple[str, ...]],
    mesh: Mesh,
    *,
    shape: Sequence[int] | None = None,
) -> PartitionSpec:
    """The PartitionSpec of an array whose dimensions have these logical axes (None = not split).

    Mesh axes that the mesh does not have, or that have size 1, drop out. With `shape` the result is
    checked.

    Raises ValueError for a logical axis that is not in `table`, a mesh axis used twice, a rank that
    differs from `shape`'s, or a dimension that does not divide.
    """
    if shape is not None and len(shape) != len(axes):
        raise ValueError(
            f"logical axes {tuple(axes)} name {len(axes)} dimensions and the array has shape "
            f"{tuple(shape)} with {len(shape)}: give one name (or None) per dimension"
        )
    entries, used = [], {}
    for dim, axis in enumerate(axes):
        if axis is not None and axis not in table:
            raise ValueError(
                f"logical axis {axis!r} is unknown: use one of {', '.join(sorted(table))}, or None"
            )
        over = () if axis is None else table[axis]
        over = tuple(name for name in over if mesh.shape.get(name, 1) > 1)
        for name in over:
            if name in used:
                raise ValueError(
                    f"mesh axis {name!r} would split both {used[name]!r} and {axis!r} of "
                    f"{tuple(axes)}: a mesh axis can split one dimension of an array"
                )
            used[name] = axis
        ways = math.prod(mesh.shape[name] for name in over)
        if shape is not None and shape[dim] % ways:
            raise ValueError(
                f"dimension {dim} ({axis!r}) of shape {tuple(shape)} does not divide over "
                f"{mesh_text({name: mesh.shape[name] for name in over})}: {shape[dim]} is not a "
                f"multiple of {ways}; pad it, or use a smaller mesh axis"
            )
        entries.append(None if not over else over[0] if len(over) == 1 else over)
    return PartitionSpec(*entries)


def constrain(array: jax.Array, mesh: Mesh, to: PartitionSpec) -> jax.Array:
    """`array` with sharding `to`: a reshard on Explicit axes, a compiler hint on Auto ones."""
    if all(kind == AxisType.Explicit for kind in mesh.axis_types):
        return jax.sharding.reshard(array, NamedSharding(mesh, to))
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, to))


def mesh_axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes in one entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def ways(mesh: Mesh, entry: str | tuple[str, ...] | None) -> int:
    """Into how many parts one entry of a PartitionSpec splits."""
    return math.prod(mesh.shape[axis] for axis in mesh_axes(entry))


def without(to: PartitionSpec, axes: Sequence[str]) -> PartitionSpec:
    """`to` with these mesh axes removed: what a parameter looks like gathered over them."""
    kept = [tuple(a for a in mesh_axes(entry) if a not in axes) for entry in to.partitions]
    return PartitionSpec(*(None if not k else k[0] if len(k) == 1 else k for k in kept))


def device_bytes(tree: Any) -> int:
    """Bytes that each device holds of the arrays of `tree`, or of shapes with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


# When split weights are gathered: in every layer of every pass, so that few exist at a time; or all
# at once before the first microbatch, kept whole in the compute dtype for the whole step.
GATHERS = ("layer", "step")

# A key under which Flax variables carry their axis names: llmx's own, then the ones of Flax NNX.
_METADATA_KEYS = ("axes", "out_sharding", "sharding_names", "sharding")


def logical_axes(tree: Any, rules: Any = None) -> Any:
    """The logical axes of every leaf of `tree`: a tree of the same structure, leaves are tuples.

    `rules` is one of
      None: read Flax metadata, of NNX variables (metadata "axes", "out_sharding", "sharding_names"
        or "sharding") or of Linen boxes (`names`). A leaf without any is not split.
      a tree of tuples of names, one per leaf of `tree`, in the same structure.
      a sequence of (regular expression, names): the first whose expression is found in the leaf's
        path ("decoder/0/kernel") gives its axes.

    Raises ValueError for a leaf that no rule matches, or if no leaf is a Flax one and no rules are
    given.
    """
    if rules is None:
        if not any(map(_is_boxed, jax.tree.leaves(tree, is_leaf=_is_boxed))):
            raise ValueError(
                "no leaf carries logical axes in Flax metadata: give rules=, a tree of tuples "
                "of names or (path regex, names) rules"
            )
        return jax.tree.map(_axes_from_metadata, tree, is_leaf=_is_boxed)
    tree = jax.tree.map(_unboxed, tree, is_leaf=_is_boxed)
    if _is_rule_list(rules):
        return jax.tree_util.tree_map_with_path(functools.partial(_axes_from_rules, rules), tree)
    structure = jax.tree.structure(tree)
    names = structure.flatten_up_to(rules)
    return structure.unflatten([tuple(axes) for axes in names])


def shardings(
    abstract_tree: Any,
    mesh: Mesh,
    layout: Layout,
    *,
    rules: Any = None,
    table: str = "parameters",
) -> Any:
    """NamedShardings for every leaf of a tree of arrays or ShapeDtypeStructs.

    Args:
      abstract_tree: any pytree; boxed leaves (Flax NNX variables, Linen boxes) count as one leaf.
      mesh: the mesh.
      layout: one of `LAYOUTS`, or your own `Layout`.
      rules: where the logical axes come from: see `logical_axes`.
      table: which of the layout's tables: "parameters", "gradients", "optimizer" or "activations".

    Raises ValueError, naming the leaf, for whatever `spec` refuses.
    """
    axes = logical_axes(abstract_tree, rules)
    chosen = vars(layout)[table]
    tree = jax.tree.map(_unboxed, abstract_tree, is_leaf=_is_boxed)

    def one(path, leaf, names):
        try:
            # Leaves without names (scalars, counters) are not split.
            names = names if names else (None,) * len(leaf.shape)
            return NamedSharding(mesh, spec(names, chosen, mesh, shape=leaf.shape))
        except ValueError as error:
            raise ValueError(f"{path_name(path)}: {error}") from None

    return jax.tree_util.tree_map_with_path(one, tree, axes)


def path_name(path: Sequence[Any]) -> str:
    """A pytree path as text: "blocks/attention/query"."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def _is_boxed(leaf: Any) -> bool:
    """Whether `leaf` is an NNX variable or a Linen box, told by its methods, without Flax."""
    return hasattr(leaf, "get_metadata") or (hasattr(leaf, "names") and hasattr(leaf, "unbox"))


def _unboxed(leaf: Any) -> Any:
    if not _is_boxed(leaf):
        return leaf
    return leaf.unbox() if hasattr(leaf, "unbox") else leaf.get_value()


def _axes_from_metadata(leaf: Any) -> tuple[str | None, ...]:
    if hasattr(leaf, "get_metadata"):
        metadata = leaf.get_metadata()
        found = [metadata[key] for key in _METADATA_KEYS if metadata.get(key)]
        return tuple(found[0]) if found else ()
    return tuple(leaf.names) if hasattr(leaf, "names") else ()


def _is_rule_list(rules: Any) -> bool:
    return isinstance(rules, Sequence) and all(
        isinstance(rule, tuple)
        and len(rule) == 2
        and isinstance(rule[0], str)
        and isinstance(rule[1], tuple)
        for rule in rules
    )


def _axes_from_rules(rules: Sequence[tuple[str, tuple]], path: Sequence[Any], leaf: Any) -> tuple:
    name = path_name(path)
    for pattern, axes in rules:
        if re.search(pattern, name):
            return tuple(axes)
    raise ValueError(
        f"no rule matches {name} of shape {tuple(leaf.shape)}: add one, or end the rules with "
        '(".*", ()) to leave the rest whole'
    )


# ------------------------------------------------------------------- batches from processes


def process_rows(to: NamedSharding, shape: Sequence[int]) -> list[int]:
    """The rows of a global array of `shape` that this process's devices hold, in order."""
    rows = set()
    for index in to.addressable_devices_indices_map(tuple(shape)).values():
        rows.update(range(*index[0].indices(shape[0])))
    return sorted(rows)


def assemble(local: np.ndarray, rows: Sequence[int], to: NamedSharding, num_rows: int) -> jax.Array:
    """The global array of which this process holds `rows`; each process calls it with its own.

    Args:
      local: [len(rows), ...], the rows that `process_rows` asked for, in that order.
      rows: their global indices.
      to: sharding of the result.
      num_rows: rows of the global array.
    """
    if jax.process_count() == 1:
        return jax.device_put(local, to)
    place_of = {row: i for i, row in enumerate(rows)}
    shape = (num_rows, *local.shape[1:])

    def part(index):
        start, stop, _ = index[0].indices(num_rows)
        first = place_of[start]
        return local[(slice(first, first + stop - start), *index[1:])]

    return jax.make_array_from_callback(shape, to, part)


def regrouped(stacked: jax.Array, size: int) -> jax.Array:
    """[num * size, ...] as [num, size, ...], the other dimensions split as they were."""
    to = jax.typeof(stacked).sharding.spec
    grouped = split_as(to, None, *to.partitions)
    shape = (stacked.shape[0] // size, size, *stacked.shape[1:])
    return jnp.reshape(stacked, shape, out_sharding=grouped)


# ----------------------------------------------------------------------- sums that are not done yet
#
# On explicit axes a type can say that every device holds one term of a sum over some mesh axes
# (`unreduced`), and that an array's gradient will be such a sum (`reduced`). So each sum is done
# once, where we say: a reduce-scatter in the layer, or one all-reduce after the last microbatch.


def unreduced(to: PartitionSpec, axes: Sequence[str]) -> PartitionSpec:
    """`to` for an array of which each device along `axes` holds one term of a sum."""
    return PartitionSpec(*to.partitions, unreduced=frozenset(axes))


def reduced(to: PartitionSpec, axes: Sequence[str]) -> PartitionSpec:
    """`to` for an array whose gradient is `unreduced(to, axes)`; the same arrays on the devices."""
    return PartitionSpec(*to.partitions, reduced=frozenset(axes))


def split_as(to: PartitionSpec, *entries: str | tuple[str, ...] | None) -> PartitionSpec:
    """Other entries, with what `to` says of sums."""
    return PartitionSpec(*entries, unreduced=to.unreduced, reduced=to.reduced)


def split_only(to: PartitionSpec) -> PartitionSpec:
    """`to` without what it says of sums."""
    return PartitionSpec(*to.partitions)


def zeros(leaf: jax.ShapeDtypeStruct, *leading: int) -> jax.Array:
    """Zeros of a type, the first dimension replaced by `leading` if it is given."""
    shape = (*leading, *leaf.shape[1:]) if leading else leaf.shape
    return jnp.zeros(shape, leaf.dtype, out_sharding=leaf.sharding)


def empty_sum(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros in fp32 to add up gradients of a type in, each device its own terms."""
    spec = leaf.sharding.spec
    to = NamedSharding(leaf.sharding.mesh, unreduced(spec, spec.reduced))
    return jnp.zeros(leaf.shape, jnp.float32, out_sharding=to)


def used_axes(to: PartitionSpec) -> tuple[str, ...]:
    """The mesh axes that split some dimension of `to`."""
    return tuple(axis for entry in to.partitions for axis in mesh_axes(entry))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def route_gradient(axes: tuple[str, ...], array: jax.Array, sink: jax.Array) -> jax.Array:
    """`array`, whose gradient goes to `sink` instead: in its dtype, and split and summed as it is.

    A gradient must have the type of what it is the gradient of. ZeRO-2 keeps whole parameters and
    split gradients, mixed precision sums gradients of fp32 parameters in bf16: so `array` is held
    constant and the gradient is taken by `sink`, an array of the same shape whose value is not
    used. Where the type of `sink` is `reduced` along an axis, its gradient is not summed over it.

    Args:
      axes: the mesh axes along which devices see different tokens (`Placement.token_axes`).
      array: a parameter.
      sink: any array of its shape.
    """
    # A gathered weight has the compute dtype, and its gradient the dtype that it is summed in.
    return _with_terms(axes, array.astype(jnp.promote_types(array.dtype, sink.dtype)))


def _with_terms(axes: Sequence[str], array: jax.Array) -> jax.Array:
    to = jax.typeof(array).sharding.spec
    return jax.sharding.reshard(array, reduced(to, [a for a in axes if a not in used_axes(to)]))


def to_sink(gradient: jax.Array, sink: Any) -> jax.Array:
    """The gradient of a parameter `with_terms`, in the type of its sink."""
    to = sink.sharding.spec
    return jax.sharding.reshard(gradient.astype(sink.dtype), unreduced(to, to.reduced))


def _route_forward(axes, array, sink):
    return route_gradient(axes, array, sink), sink


def _route_backward(axes, sink, gradient):
    return None, to_sink(gradient, jax.typeof(sink))


route_gradient.defvjp(_route_forward, _route_backward)
