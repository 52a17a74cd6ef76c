"""Where arrays live: a named mesh, logical axis names, and tables from the one to the other.

A tensor dimension has a *logical axis* ("embed", "heads", "batch", ...). A `Layout` says, for
parameters, gradients, optimizer state and activations, which *mesh axes* split each logical axis.
Data, tensor and sequence parallelism, ZeRO-1/2/3 and HSDP differ in these tables only.

The package needs jax and numpy only and works on any pytree: docs/sharding.md shows its use in
other JAX code. The names are public here; the files are internal.

Sources: ZeRO (arXiv 1910.02054), Megatron tensor and sequence parallelism (arXiv 1909.08053,
2205.05198), HSDP (arXiv 2304.11277), logical axes (GSPMD, arXiv 2105.04663).
"""

from llmx.sharding.grad_buffers import accumulate_into, empty_sum, to_buffer, zeros
from llmx.sharding.layouts import (
    GATHERS,
    LAYOUTS,
    Layout,
    ShardingConfig,
    make_layout,
    spec,
    split_axes,
)
from llmx.sharding.local_view import from_local, local_part, to_local
from llmx.sharding.mesh import (
    AXES,
    BATCH_AXES,
    TOKEN_AXES,
    MeshConfig,
    PlacementError,
    assemble,
    make_mesh,
    mesh_text,
    process_rows,
    resolve_sizes,
)  # fmt: skip
from llmx.sharding.placement import Placement
from llmx.sharding.pytrees import logical_axes, shardings
from llmx.sharding.scatter import exchanges, psum_scatter, scattered
from llmx.sharding.specs import (
    constrain,
    device_bytes,
    mesh_axes,
    reduced,
    regrouped,
    split_as,
    split_only,
    unreduced,
    used_axes,
    ways,
    without,
)  # fmt: skip
from llmx.sharding.trees import path_name

__all__ = [
    "AXES", "BATCH_AXES", "GATHERS", "LAYOUTS", "TOKEN_AXES", "Layout", "MeshConfig", "Placement",
    "PlacementError", "ShardingConfig", "accumulate_into", "assemble", "constrain", "device_bytes",
    "empty_sum", "exchanges", "from_local", "local_part", "logical_axes", "make_layout",
    "make_mesh", "mesh_axes", "mesh_text", "path_name", "process_rows", "psum_scatter", "reduced",
    "regrouped", "resolve_sizes", "scattered", "shardings", "spec", "split_as", "split_axes",
    "split_only", "to_buffer", "to_local", "unreduced", "used_axes", "ways", "without", "zeros",
]  # fmt: skip
