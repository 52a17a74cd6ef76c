"""Products of rows in blocks with their experts' weights on TPU, by Pallas: two kernels.

Each block of rows is of one expert. A step of the grid multiplies one block; the weights, or the
sums, of an expert stay in on-chip memory while its blocks follow each other, so that each is read
or written once. Blocks behind the last one in use are skipped.

Letters: R slots of rows in blocks, b rows of a block, E experts of this device, K and N the sizes
of a product.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from llmx.model.experts.grouped import Blocks

LANES = 128
MIB = 2**20
# On-chip memory that a kernel may take, by the beginning of jax's `device_kind`: of chips that have
# enough. The arrays of a step take half of it, as the next ones arrive meanwhile.
VMEM = {"TPU v5": 64 * MIB, "TPU v6": 64 * MIB, "TPU7x": 48 * MIB}
MOST_COLUMNS = 1024  # of a tile


def product(
    x_RK: Float[Array, "R K"], weights: Array, of: Blocks, *, dtype: jnp.dtype, device_kind: str,
    rows: float, transposed: bool = False, onto: Float[Array, "R N"] | None = None,
) -> Float[Array, "R N"]:  # fmt: skip
    """Each block times its expert's weights [E, K, N], or [E, N, K] if `transposed`, plus `onto`.

    Sums are in fp32, the result in `dtype`; zeros where a block is not in use. `rows`: that are in
    blocks in use, as expected, for the compiler's estimate. "cpu" runs the interpreter, for tests.
    """
    (R, K), size = x_RK.shape, of.size
    N = weights.shape[1 if transposed else 2]
    per_column = 2 * (K * weights.dtype.itemsize + size * (jnp.dtype(dtype).itemsize + 4))
    left = _vmem(device_kind) - 2 * size * K * x_RK.dtype.itemsize
    columns = _tile(N, min(MOST_COLUMNS, left // per_column))

    def kernel(expert_of_block, used, x_ref, weight_ref, *refs):
        *onto_ref, out_ref = refs

        @pl.when(pl.program_id(1) < used[0])
        def _():
            contracted = ((1,), (1 if transposed else 0,))
            out = jax.lax.dot_general(
                x_ref[...], weight_ref[...], (contracted, ((), ())),
                preferred_element_type=jnp.float32,
            )  # fmt: skip
            for ref in onto_ref:
                out += ref[...].astype(jnp.float32)
            out_ref[...] = out.astype(out_ref.dtype)

        @pl.when(pl.program_id(1) >= used[0])
        def _():
            out_ref[...] = jnp.zeros_like(out_ref)

    def weight_at(column, block, expert_of_block, used):
        at = (0, column)
        return (expert_of_block[block], *(reversed(at) if transposed else at))

    of_weights = (columns, K) if transposed else (K, columns)
    of_out = pl.BlockSpec((size, columns), lambda column, block, *_: (block, column))
    specs = [_rows(size, K), pl.BlockSpec((None, *of_weights), weight_at)]
    moved = _bytes(x_RK) * pl.cdiv(N, columns) + _bytes(weights) + R * N * jnp.dtype(dtype).itemsize
    operands = [x_RK, weights]
    if onto is not None:
        specs, operands = [*specs, of_out], [*operands, onto]
        moved += _bytes(onto)
    return _call(
        kernel, "grouped_product", of, grid=(pl.cdiv(N, columns), R // size), specs=specs,
        out=jax.ShapeDtypeStruct((R, N), dtype), of_out=of_out, operands=operands,
        aliases={} if onto is None or onto.dtype != dtype else {4: 0},
        flops=2 * rows * K * N, moved=moved, device_kind=device_kind,
    )  # fmt: skip


def sums(
    x_RK: Float[Array, "R K"], y_RN: Float[Array, "R N"], of: Blocks, *, num_experts: int,
    dtype: jnp.dtype, device_kind: str, rows: float,
) -> Float[Array, "E K N"]:  # fmt: skip
    """Of each expert the sum over its rows of x times y, in fp32, rounded once to `dtype`."""
    from jax.experimental.pallas import tpu as pltpu

    (R, K), N, size = x_RK.shape, y_RN.shape[1], of.size
    most = _vmem(device_kind) // (4 + 2 * jnp.dtype(dtype).itemsize) // 2
    columns = _tile(N, min(MOST_COLUMNS, most // LANES))
    height = _tile(K, min(MOST_COLUMNS, most // columns))

    def kernel(expert_of_block, used, x_ref, y_ref, out_ref, total_ref):
        block, last = pl.program_id(2), pl.num_programs(2) - 1
        expert = expert_of_block[block]

        @pl.when((block == 0) | (expert_of_block[jnp.maximum(block - 1, 0)] != expert))
        def _():
            total_ref[...] = jnp.zeros_like(total_ref)

        @pl.when(block < used[0])
        def _():
            total_ref[...] += jax.lax.dot_general(
                x_ref[...], y_ref[...], (((0,), (0,)), ((), ())),
                preferred_element_type=jnp.float32,
            )  # fmt: skip

        @pl.when((block == last) | (expert_of_block[jnp.minimum(block + 1, last)] != expert))
        def _():
            out_ref[...] = total_ref[...].astype(out_ref.dtype)

    def out_at(row, column, block, expert_of_block, used):
        return expert_of_block[block], row, column

    def part_at(which):
        return lambda row, column, block, _, used: (
            jnp.minimum(block, used[0] - 1), (row, column)[which]
        )  # fmt: skip

    out = jax.ShapeDtypeStruct((num_experts, K, N), dtype)
    return _call(
        kernel, "grouped_sums", of, grid=(pl.cdiv(K, height), pl.cdiv(N, columns), R // size),
        specs=[
            pl.BlockSpec((size, height), part_at(0)), pl.BlockSpec((size, columns), part_at(1)),
        ],
        out=out, of_out=pl.BlockSpec((None, height, columns), out_at), operands=[x_RK, y_RN],
        flops=2 * rows * K * N, device_kind=device_kind,
        moved=_bytes(x_RK) * pl.cdiv(N, columns) + _bytes(y_RN) * pl.cdiv(K, height)
        + num_experts * K * N * jnp.dtype(dtype).itemsize,
        scratch=[pltpu.VMEM((height, columns), jnp.float32)],
    )  # fmt: skip


def _rows(size: int, width: int) -> pl.BlockSpec:
    """Whole rows of a block; behind the last in use nothing is read."""
    return pl.BlockSpec(
        (size, width), lambda column, block, _, used: (jnp.minimum(block, used[0] - 1), 0)
    )


def _vmem(device_kind: str) -> int:
    """Of the arrays of a step together with those of the next."""
    return _limit(device_kind) * 3 // 4


def _limit(device_kind: str) -> int:
    kinds = VMEM | {"cpu": 64 * MIB}  # of the interpreter
    return next(n for kind, n in kinds.items() if device_kind.startswith(kind))


def _tile(size: int, most: int) -> int:
    """The largest part of `size` that is at most `most`, in whole lanes and equal parts if it can
    be: the last part may be smaller."""
    if size <= most:
        return size
    most = max(most // LANES, 1)
    equal = [n for n in range(most, most // 2, -1) if size % (n * LANES) == 0]
    return LANES * (equal[0] if equal else most)


def _call(
    kernel, name: str, of: Blocks, *, grid, specs, out, of_out, operands, flops: float, moved: int,
    device_kind: str, aliases=None, scratch=(),
):  # fmt: skip
    from jax.experimental.pallas import tpu as pltpu

    return pl.pallas_call(
        kernel, name=name, out_shape=out, input_output_aliases=aliases or {},
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2, grid=grid, in_specs=specs, out_specs=of_out,
            scratch_shapes=list(scratch),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * (len(grid) - 1) + ("arbitrary",),
            vmem_limit_bytes=_limit(device_kind),
        ),
        cost_estimate=pl.CostEstimate(
            flops=int(flops), bytes_accessed=int(moved), transcendentals=0
        ),
        interpret=device_kind == "cpu",
    )(of.expert_of_block.astype(jnp.int32), of.used.reshape(1), *operands)  # fmt: skip


def _bytes(array: Array) -> int:
    return array.size * array.dtype.itemsize
