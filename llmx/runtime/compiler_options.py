"""Options of XLA that let collectives run beside computation, by chip: what `auto` chooses.

Another version of the compiler may refuse an option. So each is tried on a small program first, and
left out with a note where it is refused.
"""

import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from llmx.runtime import hardware, launch
from llmx.runtime.launch import LaunchConfig

Options = dict[str, str | bool | int]

_ASYNCHRONOUS = {"xla_enable_async_all_gather": True, "xla_enable_async_all_reduce": True}
# Gathers and all-reduces computed inside the products beside them. On v5e only: libtpu 0.0.42.1
# takes these on v5p as well, but 0.0.50.1 refuses them on all other chips, because of "incorrect
# results, hang, SDC".
_FUSED = _ASYNCHRONOUS | {
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": True,
}
# Gathers and reduce-scatters on the SparseCores, of which v5e has none. Without the last one,
# reduce-scatters over a whole slice are all-reduces of which each device keeps a part: twice the
# bytes on the wire.
_ON_SPARSE_CORES = _ASYNCHRONOUS | {
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": True,
    "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather": True,
    "xla_tpu_enable_sparse_core_collective_offload_3d_all_gather": True,
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": True,
    "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter": True,
}
# The rings of sends in which tpu7x's compiler computes parts of a product take more cycles than
# products of whole weights, and its SparseCores gather those by default.
_WITHOUT_RINGS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000}

# By key of `hardware.CHIPS`; a chip that is in none of these tables gets none. What each row does
# to memory, traffic and the estimated step is in docs/performance.md (libtpu 0.0.42.1).
OVERLAP: dict[str, Options] = {
    "tpu_v4": _ASYNCHRONOUS,
    "tpu_v5e": _FUSED,
    "tpu_v5p": _ON_SPARSE_CORES,
    "tpu_v6e": _ON_SPARSE_CORES,
    "tpu7x": _WITHOUT_RINGS,
}
# Where gradients are exchanged: the same device kinds and numbers as in `llmx.sharding.scatter`.
# In larger slices of v5e these options end the compilation.
_EXCHANGE = {"xla_tpu_enable_async_all_to_all": True}
EXCHANGED: dict[str, tuple[float, Options]] = {
    "tpu_v4": (math.inf, _EXCHANGE),
    "tpu_v5e": (16, _EXCHANGE),
}

# With mesh.tensor > 1: on GPUs several collectives at a time, each by itself, in loops that are not
# unrolled. Otherwise those over `tensor` and `fsdp` wait for each other. Gathers are not pipelined:
# XLA would compute attention of a layer twice for its gradient.
_ONE_BY_ONE = {
    "xla_gpu_enable_pipelined_all_gather": False,
    "xla_gpu_experimental_parallel_collective_overlap_limit": 3,
    "xla_gpu_all_gather_combine_threshold_bytes": 1,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 1,
    "xla_gpu_enable_while_loop_double_buffering": False,
}
WITH_TENSOR: dict[str, Options] = dict.fromkeys(
    ("a100_40gb", "a100_80gb", "h100_sxm", "h200", "b200"), _ONE_BY_ONE
)
# With mesh.expert > 1: rows travel to their experts beside what is computed meanwhile. Not on v5e,
# see `EXCHANGED`.
WITH_EXPERT: dict[str, Options] = dict.fromkeys(("tpu_v4", "tpu_v5p", "tpu_v6e"), _EXCHANGE)


def options(
    config: LaunchConfig, devices: Sequence[jax.Device], mesh: Mapping[str, int] | None = None
) -> Options:
    """{name: value} for `jax.jit` of a run's programs on `devices`.

    Those of `launch.compiler_options`, and with launch.overlap="auto" those of `wanted` that this
    compiler accepts and that neither the config nor XLA_FLAGS nor LIBTPU_INIT_ARGS sets. A first
    call compiles a small program for all devices. `mesh`: sizes of the run's mesh axes.
    """
    users = launch.compiler_options(config)
    for name, value in launch.XLA_FLAGS.get(devices[0].platform, {}).items():
        if name in launch.LISTS and name in users:
            users[name] = launch.joined(str(users[name]), value)
    chosen = wanted(config, devices[0].device_kind, len(devices), mesh)
    return accepted(chosen, tuple(devices)) | users


def wanted(
    config: LaunchConfig, device_kind: str, num_devices: int, mesh: Mapping[str, int] | None = None
) -> Options:
    """The rows of `OVERLAP`, `EXCHANGED`, `WITH_TENSOR` and `WITH_EXPERT` for these devices and
    sizes of mesh axes, without what the user sets."""
    if config.overlap != "auto":
        return {}
    chip = hardware.DEVICE_KINDS.get(device_kind, "")
    row, (most, exchange) = OVERLAP.get(chip, {}), EXCHANGED.get(chip, (0, {}))
    if num_devices <= most:
        row = row | exchange
    for axis, table in {"tensor": WITH_TENSOR, "expert": WITH_EXPERT}.items():
        if (mesh or {}).get(axis, 1) > 1:
            row = row | table.get(chip, {})
    flags = " ".join(os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"))
    # A launch has put llmx's own flags there too.
    ours = {item for flags in launch.XLA_FLAGS.values() for item in flags.items()}
    given = [flag.lstrip("-").partition("=")[::2] for flag in flags.split()]
    set_by_user = {flag[0] for flag in given if flag not in ours}
    set_by_user |= set(launch.compiler_options(config))
    return {name: value for name, value in row.items() if name not in set_by_user}


def accepted(
    chosen: Mapping[str, Any], devices: tuple[jax.Device, ...],
    note: Callable[[str], None] = launch.note,
) -> Options:  # fmt: skip
    """Those of `chosen` that the compiler of `devices` takes; a note for each that it refuses."""
    if not chosen:
        return {}
    if not _refusal(tuple(chosen.items()), devices):
        return dict(chosen)
    left: Options = {}
    for name, value in chosen.items():
        # Together with those before it: some are refused only beside another.
        if reason := _refusal((*left.items(), (name, value)), devices):
            note(f"compiler: without {name}={value}, which this version refuses: {reason}")
        else:
            left[name] = value
    return left


@functools.cache
def _refusal(chosen: tuple[tuple[str, Any], ...], devices: tuple[jax.Device, ...]) -> str:
    """Why the compiler refuses these options, in a line; "" = it takes them."""
    try:
        _trial(devices).compile(compiler_options=dict(chosen))
    except jax.errors.JaxRuntimeError as error:
        return str(error).strip().partition("\n")[0][:200]
    return ""


@functools.cache
def _trial(devices: tuple[jax.Device, ...]) -> Any:
    """A lowered program in which options can matter: a loop of gathers, products and sums, within
    groups of up to 8 devices. (Over thousands it would take long to compile.)"""
    size = next(size for size in (8, 4, 2, 1) if len(devices) % size == 0)
    mesh = Mesh(
        np.array(devices).reshape(-1, size), ("other", "all"), axis_types=(AxisType.Auto,) * 2
    )
    rows, whole, width = PartitionSpec(None, "all"), PartitionSpec(), 16 * size

    def layer(x_nD, weight_DF):
        whole_DF = jax.lax.all_gather(weight_DF, "all", axis=0, tiled=True)
        y_nF = x_nD @ whole_DF
        terms_DF = x_nD.T @ y_nF
        gradient_DF = jax.lax.psum_scatter(terms_DF, "all", tiled=True)
        gradient_DF += sum(jnp.split(jax.lax.all_to_all(terms_DF, "all", 0, 0, tiled=True), size))
        return x_nD + jax.lax.psum(y_nF @ whole_DF.T, "all"), gradient_DF

    region = jax.shard_map(
        lambda x_nD, weights: jax.lax.scan(layer, x_nD, weights), mesh=mesh,
        in_specs=(whole, rows), out_specs=(whole, rows), check_vma=False,
    )  # fmt: skip
    shape = lambda *sizes, to: jax.ShapeDtypeStruct(  # noqa: E731
        sizes, jnp.bfloat16, sharding=NamedSharding(mesh, to)
    )
    with jax.set_mesh(mesh):  # not that of the run
        return jax.jit(region).lower(shape(128, width, to=whole), shape(2, width, 128, to=rows))
