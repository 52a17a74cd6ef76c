"""Layouts: tables from logical axis to mesh axes, and the PartitionSpec that one gives an array."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from jax.sharding import Mesh, PartitionSpec

from llmx.sharding import mesh as mesh_lib
from llmx.sharding.mesh import BATCH_AXES

_OF_TENSOR = {"needs": {"mesh.tensor": {"not": (1,)}}}


@dataclasses.dataclass
class ShardingConfig:
    """Which layout, and its variations."""

    # ddp | zero1 | zero2 | zero3 | hsdp
    layout: str = dataclasses.field(default="zero3", metadata={"choices": lambda: LAYOUTS})
    # between blocks, split the sequence over `tensor` too
    sequence_parallel: bool = dataclasses.field(default=True, metadata=_OF_TENSOR)
    # keep all K/V heads on every tensor shard (num_kv_heads < tensor)
    replicate_kv: bool = dataclasses.field(default=False, metadata=_OF_TENSOR)
    # split weights are gathered per "layer" and pass, or once per "step"
    gather: str = dataclasses.field(default="layer", metadata={"choices": lambda: GATHERS})
    # Groups of a device's rows, or of their positions, that take turns in a layer: one computes
    # while another communicates over `tensor`. 0 = with mesh.tensor > 1 and enough tokens: 2 on
    # TPUs, up to 4 on H100 and H200; else 1.
    turns: int = dataclasses.field(default=0, metadata={"limits": {"at least": 0}})


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
            self, **{t: {name: strip(over) for name, over in vars(self)[t].items()} for t in tables}
        )


# Tensor and pipeline parallelism, the same in every layout: of parameters and activations, then of
# each. Every stage has an equal share of embedding and head: see `llmx.pipeline.executor`.
_MODEL = {
    "vocab": ("stage", "tensor"),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "embed": (),
    "head_dim": (),
    "rank": (),  # of adapters
    "latent": (),  # of latent attention; where products take it, it is split as the width is
}
_PARAMETERS = _MODEL | {
    "positions": (), "norm": (), "layers": ("stage",), "experts": ("expert",), "router": (),
    "loads": (),
    "first": (),  # layers before those that stages divide
    "groups": (),  # inputs of a weight that share a scale
}  # fmt: skip
_ACTIVATIONS = _MODEL | {
    "batch": BATCH_AXES,
    "sequence": ("sequence",),  # inside attention and MLP
    "block_sequence": ("sequence", "tensor"),  # between them: sequence-parallel norms
    "cache": ("sequence",),  # slots for keys and values of what was decoded
    "router": (),  # logits of experts
    "layers": (),
}


def _layout(*over: tuple[str, ...]) -> Layout:
    """Parameters, gradients and optimizer state, each with its width split over these replicas."""
    return Layout(*(_PARAMETERS | {"embed": axes} for axes in over), _ACTIVATIONS)


# The devices of `sequence` are replicas of the parameters too: they have other tokens of a row.
_ALL, _FAST, _NONE = ("data", "fsdp", "sequence"), ("fsdp", "sequence"), ()

#                     parameters  gradients  optimizer state
LAYOUTS = {
    "ddp": _layout(_NONE, _NONE, _NONE),  # parameters are replicated; gradients are all-reduced
    "zero1": _layout(_NONE, _NONE, _ALL),  # each replica updates its share, then all gather it
    "zero2": _layout(_NONE, _ALL, _ALL),  # gradients are reduce-scattered
    "zero3": _layout(_ALL, _ALL, _ALL),  # parameters are gathered layer by layer (FSDP)
    "hsdp": _layout(_FAST, _FAST, _FAST),  # zero3 over `fsdp`, replicated over `data`
}

# Where a dimension does not divide over its mesh axes, as many of them as divide split it, and each
# other one splits the first of these dimensions of the array that divides over it too.
INSTEAD = {"embed": ("mlp", "heads", "kv_heads", "head_dim")}
# Arrays that have one of these are left whole along the others: tables are looked up, and
# multiplied, by parts of their width; routers are small.
SPLIT_LESS = ("vocab", "positions", "router")

# When split weights are gathered: in every layer and pass, so that few exist at a time; or all
# before the first microbatch, kept whole in the compute dtype for the step.
GATHERS = ("layer", "step")


def make_layout(name: str, *, sequence_parallel: bool = True, replicate_kv: bool = False) -> Layout:
    """`LAYOUTS[name]` with the variations of `ShardingConfig`; ValueError for an unknown name."""
    if name not in LAYOUTS:
        raise ValueError(f"layout {name!r} is unknown: use one of {', '.join(LAYOUTS)}")
    layout = LAYOUTS[name]
    if not sequence_parallel:
        whole = dict(layout.activations) | {"block_sequence": ("sequence",)}
        layout = dataclasses.replace(layout, activations=whole)
    if replicate_kv:
        tables = vars(layout).items()
        layout = Layout(**{name: dict(table) | {"kv_heads": ()} for name, table in tables})
    return layout


def spec(
    axes: Sequence[str | None], table: Mapping[str, tuple[str, ...]], mesh: Mesh, *,
    shape: Sequence[int] | None = None,
) -> PartitionSpec:  # fmt: skip
    """The PartitionSpec of an array whose dimensions have these logical axes (None = not split).

    Mesh axes that the mesh does not have, or that have size 1, drop out. With `shape`,
    dimensions in `INSTEAD` that do not divide leave axes to others.

    Raises ValueError for a logical axis that is not in `table`, a mesh axis used twice, and, if
    `shape` is given, for another rank or a dimension that does not divide.
    """
    if shape is not None and len(shape) != len(axes):
        raise ValueError(
            f"logical axes {tuple(axes)} name {len(axes)} dimensions and the array has shape "
            f"{tuple(shape)} with {len(shape)}: give one name (or None) per dimension"
        )
    used, sizes = {}, mesh.shape
    for axis in axes:
        if axis is not None and axis not in table:
            raise ValueError(
                f"logical axis {axis!r} is unknown: use one of {', '.join(sorted(table))}, or None"
            )
    entries = split_axes(axes, table, sizes, shape)
    for dim, (axis, over) in enumerate(zip(axes, entries, strict=True)):
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
                f"{mesh_lib.mesh_text({name: mesh.shape[name] for name in over})}: {shape[dim]} is "
                f"not a multiple of {ways}; pad it, or use a smaller mesh axis"
            )
    return PartitionSpec(*entries)


def split_axes(
    axes: Sequence[str | None], table: Mapping[str, tuple[str, ...]], sizes: Mapping[str, int],
    shape: Sequence[int] | None = None,
) -> list[tuple[str, ...]]:  # fmt: skip
    """The mesh axes, larger than 1, that split each dimension of an array.

    `sizes`: of the mesh axes. With `shape`, what cannot be split as `INSTEAD` says is left as the
    table has it.
    """
    found = [
        tuple(name for name in (table[axis] if axis else ()) if sizes.get(name, 1) > 1)
        for axis in axes
    ]
    for dim, axis in enumerate(axes if shape is not None else ()):
        if axis in INSTEAD and shape[dim] % math.prod(sizes[name] for name in found[dim]):
            others = [axes.index(name) for name in INSTEAD[axis] if name in axes]
            found = _moved(
                found, dim, others, sizes, shape, less=not {*SPLIT_LESS}.isdisjoint(axes)
            )
    return found


def _moved(found: list, dim: int, others: list[int], sizes: Mapping, shape, *, less: bool) -> list:
    """`found`, with some axes of dimension `dim` at `others`; `less`: with some left out."""
    over = found[dim]
    subsets = (
        subset for num in range(len(over), -1, -1) for subset in itertools.combinations(over, num)
    )
    ways = lambda names: math.prod(sizes[name] for name in names)  # noqa: E731
    for kept in sorted(subsets, key=ways, reverse=True):
        entries = list(found)
        entries[dim] = kept
        left = [] if less else [name for name in over if name not in kept]
        if shape[dim] % ways(kept) == 0 and all(
            _placed(name, entries, others, ways, shape) for name in left
        ):
            return entries
    return found


def _placed(name: str, entries: list, others: list[int], ways: Callable, shape) -> bool:
    """Adds a mesh axis to the first of `others` that divides over it too; whether there is one."""
    for other in others:
        wider = (*entries[other], name)
        if shape[other] % ways(wider) == 0:
            entries[other] = wider
            return True
    return False
