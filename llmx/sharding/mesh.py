"""Meshes: named axes of devices, and the rows of a batch that each process holds."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding

# Mesh axes, outermost (slowest network) first. The innermost get the fastest links.
AXES = ("stage", "data", "fsdp", "expert", "sequence", "tensor")
# Those that split the batch: replicas of the model work on different rows.
BATCH_AXES = ("data", "fsdp", "expert")
# Those that split tokens: along them, weight gradients are sums.
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


def resolve_sizes(sizes: Mapping[str, int], num_devices: int) -> dict[str, int]:
    """Mesh axis sizes with -1 filled in; ValueError if they cannot multiply to `num_devices`."""
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
        raise ValueError(
            f"mesh {mesh_text(sizes, if_single='of one device')} needs {known} devices and there "
            f"are {num_devices}: set one axis to -1, or change their product to {num_devices}"
        )
    return sizes


class PlacementError(ValueError):
    """A mesh for which jax finds no place on a torus of TPUs."""


def make_mesh(
    sizes: Mapping[str, int], *, devices: Sequence[jax.Device] | None = None,
    across_slices: Sequence[str] = (), axis_type: AxisType = AxisType.Explicit,
) -> Mesh:  # fmt: skip
    """A mesh with axes `sizes` (name -> size, outermost first; one may be -1) over `devices`.

    Inner axes get the fastest links. The sizes of the axes in `across_slices`, which cross the slow
    network, multiply to the number of slices (of processes, where the devices have no slices).

    Raises ValueError where sizes and devices do not fit; `PlacementError` where jax cannot place
    them on a torus, as some sizes on sides as 20 or 28.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = resolve_sizes(sizes, len(devices))
    shape = tuple(sizes.values())
    options = dict(devices=devices, allow_split_physical_axes=True)
    if unknown := set(across_slices) - set(sizes):
        raise ValueError(f"mesh.across_slices names {sorted(unknown)}: the axes are {tuple(sizes)}")
    if across_slices:
        outer = tuple(size if axis in across_slices else 1 for axis, size in sizes.items())
        inner = tuple(size // out for size, out in zip(shape, outer, strict=True))
        slices = {getattr(device, "slice_index", 0) for device in devices}
        by_slice = len(slices) > 1
        num = len(slices) if by_slice else len({device.process_index for device in devices})
        if math.prod(outer) != num:
            raise ValueError(
                f"mesh.across_slices={tuple(across_slices)} multiply to {math.prod(outer)} and "
                f"there are {num} {'slices' if by_slice else 'processes'}: make their sizes "
                f"multiply to {num}, or set across_slices to ()"
            )
        with _placing(sizes, devices):
            array = mesh_utils.create_hybrid_device_mesh(
                inner, outer, process_is_granule=not by_slice, **options
            )
    elif devices[0].platform == "cpu":
        array = np.array(devices).reshape(shape)
    else:
        with _placing(sizes, devices):
            array = mesh_utils.create_device_mesh(shape, **options)
    return Mesh(array, tuple(sizes), axis_types=(axis_type,) * len(sizes))


@contextlib.contextmanager
def _placing(sizes: Mapping[str, int], devices: Sequence[jax.Device]) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError, AssertionError, NotImplementedError) as error:
        if devices[0].platform != "tpu":
            raise
        kind = getattr(devices[0], "device_kind", devices[0].platform)
        raise PlacementError(
            f"mesh {mesh_text(sizes)}: jax cannot place it on these {len(devices)} {kind} devices "
            f"({error}): let an axis take a whole side of their torus, or exchange two sizes; "
            "python -m llmx.plan --search finds the fastest mesh that has a place"
        ) from error


def within(mesh: Mesh | AbstractMesh) -> contextlib.AbstractContextManager:
    """Traces under a mesh, whether its devices are there or not."""
    return jax.set_mesh(mesh) if isinstance(mesh, Mesh) else jax.sharding.use_abstract_mesh(mesh)


def kind_of(mesh: Mesh | AbstractMesh) -> AbstractDevice:
    """The platform and kind of a mesh's devices, whether these are there or not."""
    return mesh.abstract_mesh.abstract_device


def mesh_text(sizes: Mapping[str, int], *, if_single: str = "one device") -> str:
    """ "data2 x tensor4": mesh axes with their sizes, or `if_single` where all are 1."""
    return " x ".join(f"{axis}{size}" for axis, size in sizes.items() if size != 1) or if_single


def process_rows(to: NamedSharding, shape: Sequence[int]) -> list[int]:
    """Indices of the rows of a global array of `shape` that this process holds, in order."""
    indices = to.addressable_devices_indices_map(tuple(shape)).values()
    return sorted(set().union(*(range(*index[0].indices(shape[0])) for index in indices)))


def assemble(local: np.ndarray, rows: Sequence[int], to: NamedSharding, num_rows: int) -> jax.Array:
    """The global array [num_rows, ...] with sharding `to`; each process gives its own rows.

    `local` [len(rows), ...] are those of this process, `rows` their indices from `process_rows`.
    """
    if jax.process_count() == 1:
        return jax.device_put(local, to)
    first_rows = {row: i for i, row in enumerate(rows)}

    def part(index):
        start, stop, _ = index[0].indices(num_rows)
        first = first_rows[start]
        return local[(slice(first, first + stop - start), *index[1:])]

    return jax.make_array_from_callback((num_rows, *local.shape[1:]), to, part)
