"""Cost reports of compiled programs whose costs are known by arithmetic.

Each program of PROGRAMS is compiled for eight fake CPU devices, and, marked `aot`, for eight H100s
and for TPUs of four generations: what it computes and moves is the same, however the compiler
writes it.
"""

import collections
import dataclasses
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support import runs

from llmx import sharding
from llmx.aot import compiler, hlo_text, topologies
from llmx.aot import program as program_lib
from llmx.runtime import launch

ACCELERATORS = ["h100:8", "v5e:2x4", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1"]
# Programs are compiled once for each: one worker has all tests of a platform.
PLATFORMS = [
    "cpu",
    *(
        pytest.param(name, marks=[pytest.mark.aot, pytest.mark.xdist_group(f"programs {name}")])
        for name in ACCELERATORS
    ),
]


def devices_of(platform: str) -> list:
    if platform == "cpu":
        return jax.devices()
    from llmx.aot import topologies

    return topologies.devices(platform)


def make_mesh(platform: str, sizes: dict) -> Mesh:
    devices = np.array(devices_of(platform)[: math.prod(sizes.values())])
    return Mesh(devices.reshape(tuple(sizes.values())), tuple(sizes))


def shape(mesh: Mesh, dims: tuple, *spec, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, P(*spec)))


def compile_text(mesh: Mesh, function, *arguments, options=None, manual=None) -> str:
    """The compiled text of a function; `manual` = (in_specs, out_specs): one of each shard."""
    if manual:
        function = jax.shard_map(
            function, mesh=mesh, in_specs=manual[0], out_specs=manual[1], check_vma=False
        )
    # Otherwise TPU and GPU turn fp32 arrays that meet in a product to shorter ones, and send those.
    with jax.default_matmul_precision("highest"):
        lowered = jax.jit(function).lower(*arguments)
    return lowered.compile(compiler_options=options or {}).as_text()


def read(text: str, mesh: Mesh) -> program_lib.CostReport:
    return program_lib.read(text, list(mesh.shape.items()))


def moved(program: program_lib.CostReport) -> dict:
    """(kind, axes) -> (executions, bytes of the whole arrays). An all-reduce of which devices keep
    only their slice counts as the reduce-scatter that it stands for."""
    found = collections.defaultdict(lambda: [0, 0])
    for each in program.collectives:
        parts = [(each.kind, each.bytes - each.sliced_bytes)]
        if each.sliced:
            parts.append(("reduce-scatter", each.sliced_bytes))
        for kind, size in parts:
            if size:
                found[kind, each.axes][0] += each.count
                found[kind, each.axes][1] += each.count * size
    return {key: tuple(value) for key, value in found.items()}


# ----------------------------------------------------------------------- the same on every platform

L, B, D = 6, 16, 128  # layers, rows of each device, width


@functools.cache
def fsdp(platform):
    """Layers whose weights are split over eight devices: gathered twice, gradients scattered."""
    mesh = make_mesh(platform, {"fsdp": 8})

    def layer(x_BD, w_DD):
        whole_DD = jax.lax.all_gather(w_DD, "fsdp", axis=0, tiled=True)
        return jnp.tanh(x_BD @ whole_DD), None

    def loss(w_LDD, x_BD):
        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x_BD, w_LDD)[0] ** 2)

    def gradient(w_LDD, x_BD):
        value, grads = jax.value_and_grad(loss)(w_LDD, x_BD)
        return jax.lax.psum(value, "fsdp"), grads

    text = compile_text(
        mesh, gradient, shape(mesh, (L, D, D), None, "fsdp"), shape(mesh, (8 * B, D), "fsdp"),
        manual=((P(None, "fsdp"), P("fsdp")), (P(), P(None, "fsdp"))),
    )  # fmt: skip
    weights = D * D * 4
    expected = {
        ("all-gather", ("fsdp",)): (2 * L, 2 * L * weights),
        ("reduce-scatter", ("fsdp",)): (L, L * weights),
        ("all-reduce", ("fsdp",)): (1, 4),
    }
    # Forward, once more in the backward pass, and two products of the backward pass.
    return text, mesh, expected, 4 * L * 2 * B * D * D


SUBSETS = [
    ("data",), ("fsdp",), ("tensor",), ("data", "fsdp"), ("data", "tensor"), ("fsdp", "tensor"),
    ("data", "fsdp", "tensor"),
]  # fmt: skip


@functools.cache
def cube(platform):
    """Every kind of collective over every subset of the axes of a 2x2x2 mesh."""
    mesh = make_mesh(platform, {"data": 2, "fsdp": 2, "tensor": 2})
    every = P(tuple(mesh.axis_names))

    def exchange(x):
        made = []
        for axes in SUBSETS:
            made.append(jax.lax.psum(x * (len(made) + 1), axes))
            made.append(jax.lax.all_gather(jnp.sin(x * len(made)), axes))
            made.append(jax.lax.psum_scatter(
                jnp.cos(x * len(made)), axes, scatter_dimension=1, tiled=True
            ))  # fmt: skip
            made.append(jax.lax.all_to_all(jnp.exp(x * len(made)), axes, 1, 0, tiled=True))
            if len(axes) == 1:
                made.append(jax.lax.ppermute(x / len(made), axes[0], [(0, 1), (1, 0)]))
        return [each[None] for each in made]

    text = compile_text(mesh, exchange, shape(mesh, (8 * 16, 64), every[0]), manual=(every, every))
    size, expected = 16 * 64 * 4, {}
    for axes in SUBSETS:
        expected["all-gather", axes] = (1, size * 2 ** len(axes))
        for kind in ("all-reduce", "reduce-scatter", "all-to-all"):
            expected[kind, axes] = (1, size)
        if len(axes) == 1:
            expected["collective-permute", axes] = (1, size)
    return text, mesh, expected, 0


@functools.cache
def loops(platform):
    """Loops in loops that count up, down, by more than one, and to a number that they must hit."""
    mesh = make_mesh(platform, {"x": 8})
    ring = [(i, (i + 1) % 8) for i in range(8)]

    def count(x, start, go_on, step, inside):
        state = (jnp.int32(start), x)
        return jax.lax.while_loop(
            lambda state: go_on(state[0]), lambda s: (s[0] + step, inside(s[1])), state
        )[1]

    def run(w_LDD, x_BD):
        def outer(x_BD, w_DD):
            def send(x):
                return jnp.sin(jax.lax.ppermute(x, "x", ring) @ w_DD)

            x_BD = jax.lax.fori_loop(0, 5, lambda _, x: jnp.tanh(jax.lax.psum(x @ w_DD, "x")), x_BD)
            x_BD = count(x_BD, 3, lambda i: i < 11, 2, send)  # 4 times
            x_BD = count(x_BD, 3, lambda i: i <= 11, 2, send)  # 5
            x_BD = count(x_BD, 10, lambda i: i > 0, -3, send)  # 4
            x_BD = count(x_BD, 10, lambda i: i >= 1, -3, send)  # 4
            x_BD = count(x_BD, 0, lambda i: i != 12, 4, send)  # 3
            return x_BD, None

        return jax.lax.scan(outer, x_BD, w_LDD)[0]

    text = compile_text(
        mesh,
        run,
        shape(mesh, (L, D, D)),
        shape(mesh, (8 * B, D), "x"),
        manual=((P(), P("x")), P("x")),
    )
    size = B * D * 4
    expected = {
        ("all-reduce", ("x",)): (5 * L, 5 * L * size),
        ("collective-permute", ("x",)): (20 * L, 20 * L * size),
    }
    return text, mesh, expected, 25 * L * 2 * B * D * D


@functools.cache
def ddp(platform):
    """Replicas: the gradients of all layers are reduced by one operation (tensor fusion)."""
    mesh = make_mesh(platform, {"data": 8})

    def update(params, x_BD):
        def loss(params):
            y_BD = x_BD
            for w_DD in params:
                y_BD = jnp.tanh(y_BD @ w_DD)
            return jnp.mean(y_BD**2)

        return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params))

    text = compile_text(mesh, update, [shape(mesh, (D, D))] * 4, shape(mesh, (8 * B, D), "data"))
    expected = {("all-reduce", ("data",)): (1, 4 * D * D * 4)}
    return text, mesh, expected, (4 + 4 + 3) * 2 * B * D * D


PROGRAMS = {"fsdp": fsdp, "cube": cube, "loops": loops, "ddp": ddp}


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_known_by_arithmetic(name, platform):
    text, mesh, expected, flops = PROGRAMS[name](platform)
    program = read(text, mesh)
    assert moved(program) == expected
    assert program.flops == flops
    assert not program.unknown
    assert (program.estimated_cycles is not None) == (platform not in ("cpu", "h100:8"))
    if name == "ddp":
        (reduce,) = program.collectives
        assert reduce.arrays == 4
    if name == "loops" and platform != "h100:8":  # GPU flags may take trips out of their loop
        assert {each.in_loop for each in program.collectives} == {2}


@pytest.mark.parametrize("name", ["fsdp", "loops"])
def test_trip_counts_are_found_where_they_are_not_written_down(name):
    """As in programs for TPU: from condition, start and growth of the counter."""
    text, mesh, expected, flops = PROGRAMS[name]("cpu")
    bare = re.sub(r'"known_trip_count":\{"n":"\d+"\},?', "", text)
    assert "known_trip_count" in text and "known_trip_count" not in bare
    program = read(bare, mesh)
    assert moved(program) == expected
    assert program.flops == flops


@pytest.mark.parametrize("platform", PLATFORMS)
def test_wire_bytes_are_those_of_a_ring(platform):
    text, mesh, *_ = cube(platform)
    program = read(text, mesh)
    for each in program.collectives:
        n = 2 ** len(each.axes)
        share = {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1}.get(each.kind, (n - 1) / n)
        assert each.wire_bytes == each.bytes * share
    sent = sum(each.wire_bytes for each in program.collectives)
    assert program_lib.wire_bytes(program.collectives) == sent
    assert program_lib.executions(program.select(kind="all-gather")) == len(SUBSETS)
    gathers = program.select(kind="all-gather", axes=("tensor", "data"))
    assert program_lib.total_bytes(gathers) == 4 * 16 * 64 * 4
    assert {each.axes for each in program.select(across="data")} == {
        axes for axes in SUBSETS if "data" in axes
    }


# ------------------------------------------------------------------------------ what it cannot know


@pytest.mark.parametrize("platform", PLATFORMS)
def test_loops_that_data_end_are_unknown(platform):
    mesh = make_mesh(platform, {"x": 8})

    def run(w_DD, x_BD):
        return jax.lax.while_loop(
            lambda x: jax.lax.psum(jnp.sum(x), "x") > 1,
            lambda x: jnp.sin(jax.lax.psum(x @ w_DD, "x")),
            x_BD,
        )

    text = compile_text(
        mesh, run, shape(mesh, (D, D)), shape(mesh, (8 * B, D), "x"), manual=((P(), P("x")), P("x"))
    )
    program = read(text, mesh)
    assert len(program.collectives) >= 2
    assert all(each.count is None for each in program.collectives)
    assert program.flops is None and program.bytes is None
    assert program_lib.wire_bytes(program.collectives) is None
    (note,) = program.unknown
    assert "trip count of the loop" in note and "while" in note


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_loop_whose_length_the_program_expects_counts_so_often(platform):
    """By its scope, not loops inside it."""
    mesh = make_mesh(platform, {"x": 8})

    def run(w_DD, x_BD):
        inner = lambda x: jax.lax.fori_loop(0, 5, lambda _, x: jnp.sin(x @ w_DD), x)  # noqa: E731
        with jax.named_scope("expected_trips_3"):
            return jax.lax.while_loop(lambda x: jnp.max(x) > 1, inner, x_BD)

    text = compile_text(mesh, run, shape(mesh, (D, D)), shape(mesh, (B, D)))
    program = read(text, mesh)
    assert program.flops == 3 * 5 * 2 * B * D * D
    (note,) = program.unknown
    assert "3 are counted, as expected" in note


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_larger_branch_counts_and_is_reported(platform):
    mesh = make_mesh(platform, {"x": 8})

    def run(w_DD, x_BD):
        return jax.lax.cond(
            x_BD[0, 0] > 0,
            lambda x: jax.lax.psum(x, "x") @ w_DD,
            lambda x: jax.lax.all_gather(x, "x", tiled=True)[B : 2 * B] @ w_DD @ w_DD,
            x_BD,
        )

    text = compile_text(
        mesh, run, shape(mesh, (D, D)), shape(mesh, (8 * B, D), "x"), manual=((P(), P("x")), P("x"))
    )
    program = read(text, mesh)
    assert moved(program) == {("all-gather", ("x",)): (1, 8 * B * D * 4)}
    assert program.flops == 2 * 2 * B * D * D
    (note,) = program.unknown
    assert "branch that" in note and f"{2 * B * D * D:,}" in note and f"{4 * B * D * D:,}" in note


@pytest.mark.parametrize("platform", PLATFORMS)
def test_branches_count_as_often_as_the_program_expects(platform):
    """Twelve iterations on eight devices: three of four times the second."""
    mesh = make_mesh(platform, {"x": 8})

    def run(flags, w_DD, x_BD):
        def body(x_BD, flag):
            with jax.named_scope("expected_branches_24_72_longest_3_9"):
                return jax.lax.cond(
                    flag > 0, lambda x: jnp.tanh(x @ w_DD @ w_DD), lambda x: jax.lax.psum(x, "x"),
                    x_BD,
                ), None  # fmt: skip

        return jax.lax.scan(body, x_BD, flags)[0]

    text = compile_text(
        mesh, run, shape(mesh, (12,), dtype=jnp.int32), shape(mesh, (D, D)),
        shape(mesh, (8 * B, D), "x"), manual=((P(), P(), P("x")), P("x")),
    )  # fmt: skip
    program = read(text, mesh)
    assert moved(program) == {("all-reduce", ("x",)): (3, 3 * B * D * 4)}
    assert program.flops == 9 * 2 * 2 * B * D * D
    assert not [note for note in program.unknown if "branch" in note]


def test_equal_branches_are_known():
    mesh = make_mesh("cpu", {"x": 8})

    def run(x_BD):
        return jax.lax.cond(x_BD[0, 0] > 0, lambda x: x + 1, lambda x: x * 2, x_BD)

    text = compile_text(mesh, run, shape(mesh, (8 * B, D), "x"), manual=(P("x"), P("x")))
    assert "conditional(" in text
    assert not read(text, mesh).unknown


# ----------------------------------------------------------------------------------------- products


def positions(size, window, *, stride, low, high, spread, window_spread) -> int:
    """Pairs of output and window position that meet an element, one by one."""
    whole = (size - 1) * spread + 1 + low + high
    outputs = (whole - ((window - 1) * window_spread + 1)) // stride + 1
    found = 0
    for out in range(outputs):
        for tap in range(window):
            at = out * stride + tap * window_spread - low
            found += 0 <= at < size * spread and at % spread == 0
    return found


CONVOLUTIONS = {
    "plain": dict(),
    "padded": dict(padding=[(2, 1), (1, 2)]),
    "strided": dict(window_strides=(2, 3), padding=[(1, 1), (0, 2)]),
    "transposed": dict(lhs_dilation=(2, 2), padding=[(2, 2), (2, 2)]),
    "dilated": dict(rhs_dilation=(2, 3), padding=[(3, 3), (3, 3)]),
    "grouped": dict(feature_group_count=4, padding=[(1, 1), (1, 1)]),
}
TPU_AND_CPU = ["cpu", pytest.param("v5e:2x4", marks=pytest.mark.aot)]


@pytest.mark.parametrize("platform", TPU_AND_CPU)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_flops_of_convolutions(name, platform):
    """The window's positions on padding and holes are no products."""
    said = {"window_strides": (1, 1), "padding": [(0, 0), (0, 0)]} | CONVOLUTIONS[name]
    groups = said.get("feature_group_count", 1)
    batch, height, width, features, outputs, window = 2, 9, 12, 8, 16, (3, 4)
    mesh = make_mesh(platform, {"x": 1})

    def convolve(image, kernel):
        return jax.lax.conv_general_dilated(
            image, kernel, dimension_numbers=("NHWC", "HWIO", "NHWC"), **said
        )

    kernel = shape(mesh, (*window, features // groups, outputs))
    text = compile_text(mesh, convolve, shape(mesh, (batch, height, width, features)), kernel)
    products = batch * features // groups * outputs
    for dim, size in enumerate((height, width)):
        low, high = said["padding"][dim]
        products *= positions(
            size, window[dim], stride=said["window_strides"][dim], low=low, high=high,
            spread=said.get("lhs_dilation", (1, 1))[dim],
            window_spread=said.get("rhs_dilation", (1, 1))[dim],
        )  # fmt: skip
    assert read(text, mesh).flops == 2 * products


@pytest.mark.parametrize("platform", PLATFORMS)
def test_flops_of_products_with_batch_dimensions(platform):
    mesh = make_mesh(platform, {"x": 8})

    def run(a_EBD, b_EDF):
        return jnp.einsum("ebd,edf->ebf", a_EBD, b_EDF), jnp.einsum("ebd,ebf->edf", a_EBD, a_EBD)

    text = compile_text(
        mesh, run, shape(mesh, (3, 8 * B, D), None, "x"), shape(mesh, (3, D, 64)),
        manual=((P(None, "x"), P()), (P(None, "x"), P("x"))),
    )  # fmt: skip
    assert read(text, mesh).flops == 3 * 2 * B * D * (64 + D)


@pytest.mark.aot
def test_flops_of_products_by_cublas():
    mesh = make_mesh("h100:8", {"x": 8})

    def run(w_LDD, x_EBD):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x_EBD, w_LDD)[0]

    text = compile_text(
        mesh, run, shape(mesh, (L, D, D)), shape(mesh, (8, 256, D), "x"),
        options={"xla_gpu_enable_triton_gemm": False},
    )  # fmt: skip
    program = read(text, mesh)
    assert "__cublas$" in text
    assert program.flops == L * 2 * 256 * D * D
    assert not program.kernels and not program.unknown


# ------------------------------------------------------------------------------------------ kernels


def doubled(x, *, cost=None, **options):
    from jax.experimental import pallas as pl

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    block = pl.BlockSpec((32, 128), lambda i, j: (i, j))
    return pl.pallas_call(
        kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // 32, x.shape[1] // 128), in_specs=[block], out_specs=block,
        cost_estimate=cost, name="doubled", **options,
    )(x)  # fmt: skip


@pytest.mark.aot
@pytest.mark.parametrize("platform", ["v5e:2x4", "v5p:2x2x2", "h100:8"])
def test_kernels_are_listed_with_their_own_estimate(platform):
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    mesh = make_mesh(platform, {"x": 8})
    cost = pl.CostEstimate(flops=12345, transcendentals=0, bytes_accessed=0)
    options = {"compiler_params": triton.CompilerParams()} if platform == "h100:8" else {}

    def run(x):
        return jax.lax.fori_loop(0, L, lambda _, x: doubled(x, cost=cost, **options), x)

    text = compile_text(mesh, run, shape(mesh, (8 * 64, 256), "x"), manual=(P("x"), P("x")))
    program = read(text, mesh)
    kernel = program.kernels[0]  # GPU flags may unroll the loop
    assert {each.name for each in program.kernels} == {"doubled"}
    assert sum(each.count for each in program.kernels) == L
    assert "doubled" in kernel.source
    if platform == "h100:8":  # the call does not carry its estimate
        assert kernel.flops is None
        assert program.unknown == ("FLOPs of kernels without an estimate: doubled",)
    else:
        assert kernel.flops == 12345
        assert not program.unknown
    assert program.flops == 0


@pytest.mark.aot
@pytest.mark.parametrize("platform", ["v5e:2x4", "tpu7x:2x2x1"])
def test_what_a_kernel_sends_itself_is_unknown(platform):
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu

    mesh = make_mesh(platform, {"x": 8})

    def kernel(x_ref, o_ref, sent, received):
        to = ((jax.lax.axis_index("x") + 1) % 8,)
        copy = tpu.make_async_remote_copy(x_ref, o_ref, sent, received, device_id=to)
        copy.start()
        copy.wait()

    def run(x):
        return pl.pallas_call(
            kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name="shift",
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[tpu.SemaphoreType.DMA] * 2,
            compiler_params=tpu.CompilerParams(has_side_effects=True),
        )(x)  # fmt: skip

    text = compile_text(mesh, run, shape(mesh, (8 * 64, 256), "x"), manual=(P("x"), P("x")))
    assert "bytes that the kernel shift sends to other devices" in read(text, mesh).unknown


# ------------------------------------------------------------------- overlap, as compilers write it


@pytest.mark.aot
@pytest.mark.parametrize("platform", ["v5e:2x4", "tpu7x:2x2x1", "h100:8"])
def test_gathers_hidden_by_products(platform):
    """Gathers of the next weights run beside this layer's product; each is counted once."""
    mesh, width, layers = make_mesh(platform, {"fsdp": 8}), 2048, 4

    def run(weights, x_BD):
        for w_DD in weights:
            x_BD = jnp.tanh(x_BD @ jax.lax.all_gather(w_DD, "fsdp", tiled=True))
        return x_BD

    text = compile_text(
        mesh, run, [shape(mesh, (width, width), "fsdp", dtype=jnp.bfloat16)] * layers,
        shape(mesh, (8192, width), "fsdp", dtype=jnp.bfloat16),
        manual=((P("fsdp"), P("fsdp")), P("fsdp")),
        options={"xla_gpu_all_gather_combine_threshold_bytes": 1} if platform == "h100:8" else {},
    )  # fmt: skip
    program = read(text, mesh)
    assert sum(each.arrays for each in program.collectives) == layers
    assert program_lib.total_bytes(program.collectives) == layers * width * width * 2
    assert program.select(kind="all-gather", axes="fsdp") == program.collectives
    assert program.flops == layers * 2 * 1024 * width**2
    hidden = [each for each in program.collectives if each.hidden_by]
    assert hidden and all(each.asynchronous for each in hidden)
    if platform == "v5e:2x4":  # several fusions carry out one gather
        assert any("," in each.name for each in hidden)


@pytest.mark.aot
def test_a_product_windowed_over_a_gather():
    """Collective matmul: the product of the part that has come hides the sending of the next.

    XLA's loop sends both ways, two parts each in every one of its n/4 trips (its counter grows by
    2), after one part before it: n + 1 parts instead of the gather's n - 1.
    """
    mesh, width, rows = make_mesh("v5e:2x4", {"tensor": 8}), 1024, 4096

    def run(x_TD, w_DF):
        to = NamedSharding(mesh, P(None, "tensor"))
        return jax.lax.with_sharding_constraint(x_TD @ w_DF, to)

    text = compile_text(
        mesh, run, shape(mesh, (rows, width), "tensor", dtype=jnp.bfloat16),
        shape(mesh, (width, 8 * width), None, "tensor", dtype=jnp.bfloat16),
        options={"xla_jf_spmd_threshold_for_windowed_einsum_mib": "0"},
    )  # fmt: skip
    program = read(text, mesh)
    part = rows // 8 * width * 2
    assert moved(program) == {("collective-permute", ("tensor",)): (9, 9 * part)}
    assert program.flops == 2 * rows * width * width
    assert all(each.hidden_by for each in program.collectives if each.in_loop)


# --------------------------------------------------------------------------------------- TPU slices

ACROSS = [
    # mesh, the axes across slices, those of the sum, what is sent within and across slices
    ({"data": 2, "fsdp": 4}, ("data",), ("data",), ("data",)),
    ({"stage": 2, "data": 2, "fsdp": 4}, ("stage", "data"), ("data",), ("data",)),
    ({"stage": 2, "data": 2, "fsdp": 4}, ("stage", "data"), ("stage",), ("stage",)),
    ({"fsdp": 4, "data": 2}, ("data",), ("data",), ("data",)),
]


@pytest.mark.aot
@pytest.mark.parametrize("sizes, across, summed, sent", ACROSS, ids=str)
def test_sums_across_slices(sizes, across, summed, sent):
    from llmx.aot import topologies

    slices = math.prod(sizes[axis] for axis in across)
    devices = topologies.devices(f"{slices}@v5e:2x2")
    mesh = sharding.make_mesh(sizes, devices=devices, across_slices=across, axis_type=AxisType.Auto)
    every = P(tuple(sizes))
    text = compile_text(
        mesh, lambda x: jax.lax.psum(x, summed), shape(mesh, (16 * mesh.size, 128), every[0]),
        manual=(every, every),
    )  # fmt: skip
    program = program_lib.read(text, list(sizes.items()), across_slices=across)
    (send,) = program.collectives
    n, size = math.prod(sizes[axis] for axis in summed), 16 * 128 * 4
    assert (send.kind, send.axes, send.count) == ("send", sent, 1)
    assert (send.bytes, send.wire_bytes) == (size, 2 * size * (n - 1) // n)
    assert not program.unknown


@pytest.mark.aot
def test_gathers_within_and_across_slices():
    from llmx.aot import topologies

    sizes = {"data": 2, "fsdp": 4}
    mesh = sharding.make_mesh(
        sizes, devices=topologies.devices("2@v5e:2x2"), across_slices=("data",),
        axis_type=AxisType.Auto,
    )  # fmt: skip

    def run(x):
        within = jax.lax.all_gather(x, "fsdp", tiled=True)
        across = jax.lax.all_gather(jnp.sin(x), "data", tiled=True)
        return within.sum() + across.sum(keepdims=True)

    every = P(("data", "fsdp"))
    text = compile_text(mesh, run, shape(mesh, (8 * 16, 128), every[0]), manual=(every, every))
    program = program_lib.read(text, list(sizes.items()))  # the outermost axes cross slices
    (gather,) = program.select(kind="all-gather")
    (send,) = program.select(kind="send")
    size = 16 * 128 * 4
    assert (gather.axes, gather.bytes, gather.wire_bytes) == (("fsdp",), 4 * size, 3 * size)
    assert (send.axes, send.bytes, send.wire_bytes) == (("data",), 2 * size, size)
    with pytest.raises(ValueError, match=r"across_slices=.'fsdp',. of mesh data2 x fsdp4 make 4"):
        program_lib.read(text, list(sizes.items()), across_slices=("fsdp",))


# ------------------------------------------------------------------------------ the real train step


SMALL = dict(num_heads=8, num_kv_heads=4, head_dim=128, width=256, mlp_dim=512, vocab_size=512)


def train_step(platform, sizes, num_layers) -> program_lib.CostReport:
    """The train step of a small model with these layers, zero3, everything computed again."""
    config = runs.make_config(
        "llama3", model=SMALL | dict(num_layers=num_layers), mesh=sizes, remat="full",
        precision="fp32" if platform == "cpu" else "bf16",  # CPUs widen bf16
        batch__size=8, batch__sequence_length=128, sharding__layout="zero3",
    )  # fmt: skip
    recipe = runs.make_recipe(config, devices=devices_of(platform))
    options = {}
    if platform == "h100:8":
        options = {name: launch.XLA_FLAGS["gpu"][name] for name in launch.LISTS}
    return read(runs.lower(recipe).compile(options).as_text(), recipe.mesh)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_weights_and_gradients_of_the_train_step(platform):
    """zero3 over fsdp x tensor. For each layer more, its weights are gathered over fsdp in the
    forward pass once more, in the backward pass too, and its gradients are scattered once more."""
    sizes = {"fsdp": 4, "tensor": 2}
    few, many = (train_step(platform, sizes, layers) for layers in (2, 4))
    D, F, N, K, H = 256, 512, 8, 4, 128
    weights = D * H * (N + 2 * K) + N * H * D + 3 * D * F
    expected = (4 - 2) * weights * (4 if platform == "cpu" else 2) // sizes["tensor"]

    def more(size_of) -> int:
        few_bytes, many_bytes = (
            sum(each.count * size_of(each) for each in program.select(axes="fsdp"))
            for program in (few, many)
        )
        return many_bytes - few_bytes

    def forward(each) -> int:
        return each.bytes if each.kind == "all-gather" and "transpose" not in each.source else 0

    gathered = more(lambda each: each.bytes if each.kind == "all-gather" else 0)
    assert gathered >= 2 * expected
    if platform.startswith(("v", "tpu")):  # CPU and GPU compilers may gather again in between
        assert gathered == 2 * expected
    if platform != "h100:8":  # GPU flags may combine gathers of both passes into one
        assert more(forward) == expected

    def scatter(each) -> int:
        exchanged = each.kind == "all-to-all" and "psum_scatter" in each.source
        return each.bytes if exchanged or each.kind == "reduce-scatter" else each.sliced_bytes

    assert more(scatter) == expected
    assert not any("FLOPs of kernels" not in note for note in few.unknown + many.unknown)


@pytest.mark.aot
def test_the_gpu_compiler_loses_no_gradients():
    """See `xla_disable_hlo_passes` in `launch.XLA_FLAGS`."""
    run = runs.make_config(
        "llama3", model=SMALL | dict(num_layers=4), mesh={"fsdp": 4, "tensor": 2}, remat="full",
        precision="bf16", batch__size=8, batch__sequence_length=128, sharding__layout="zero3",
    )  # fmt: skip
    text = compiler.compile(run, topologies.parse("h100:8")).after
    assert "reduce-scatter" in text and "source_target_pairs={}" not in text


# ------------------------------------------------------------------------- the text, piece by piece


def program_text(body: str, *, others: str = "", devices: int = 8) -> str:
    """A scheduled program with these lines in its ENTRY computation."""
    head = f"HloModule jit_f, is_scheduled=true, num_partitions={devices}"
    return f"{head}\n\n{others}\n\nENTRY %main (p: f32[8,8]) -> f32[8,8] {{\n{body}\n}}\n"


def collective(groups: str, devices: int = 8) -> list | None:
    rest = f"%x), channel_id=1, {groups}, use_global_device_ids=true, to_apply=%add"
    each = hlo_text.Instruction("all-reduce", "f32[8]", "all-reduce", rest, False)
    return hlo_text.groups_of(each, devices)


def same_groups(one, other) -> bool:
    return sorted(map(sorted, one)) == sorted(map(sorted, other))


# Equal pairs of spellings; most from xla/hlo/ir/replica_group_test.cc.
SPELLINGS = [
    ("{{0,1},{2,3}}", "[2,2]<=[4]", 4),
    ("{}", "[1,8]<=[8]", 8),
    ("{{0,4},{1,5},{2,6},{3,7}}", "[4,2]<=[2,4]T(1,0)", 8),
    ("mesh['a'=8] {'a'}", "[1,8]<=[8]", 8),
    ("mesh['a'=8] {'a':(1)2}", "[4,2]<=[2,4]T(1,0)", 8),
    ("mesh['a'=8] {'a':(2)2}", "[4,2]<=[2,2,2]T(0,2,1)", 8),
    ("mesh['a'=8] {'a':(4)2,'a':(1)2}", "[2,4]<=[2,2,2]T(1,2,0)", 8),
    ("mesh['x'=2,'y'=1,'z'=4] {'z'}", "{{0,1,2,3},{4,5,6,7}}", 8),
    ("mesh['x'=2,'y'=1,'z'=4] {'x','y'}", "{{0,4},{1,5},{2,6},{3,7}}", 8),
    ("mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'y'}", "{{0,2,4,6},{1,3,5,7}}", 8),
    ("mesh['x'=2,'y'=2], device_ids=(3,1,0,2) {'x'}", "{{3,0},{1,2}}", 4),
    ("@mesh<u=2,v=3> {u}", "{{0,3},{1,4},{2,5}}", 6),
]


@pytest.mark.parametrize("one, other, devices", SPELLINGS)
def test_groups_are_read_in_every_spelling(one, other, devices):
    one, other = (collective(f"replica_groups={text}", devices) for text in (one, other))
    assert same_groups(one, other)
    assert sorted(itertools.chain(*one)) == list(range(devices))


def test_groups_in_a_spelling_that_is_not_known_are_unknown():
    assert collective("replica_groups=ring(0..7)") is None
    line = (
        "  %p = f32[8,8] parameter(0)\n  ROOT %r = f32[8,8] all-reduce(%p), channel_id=1, "
        "replica_groups=ring(0..7), to_apply=%add"
    )
    program = program_lib.read(program_text(line), [("x", 8)])
    (reduce,) = program.collectives
    assert reduce.axes is None and reduce.bytes == 256
    (note,) = program.unknown
    assert note.startswith("devices that r joins: its groups cannot be parsed")
    assert program.select(kind="all-reduce") == (reduce,)
    assert program.select(axes="x") == program.select(across="x") == ()


@pytest.mark.parametrize("direction", ["LT", "LE", "GT", "GE", "NE"])
def test_trips_are_those_of_counting(direction):
    holds = {
        "LT": int.__lt__, "LE": int.__le__, "GT": int.__gt__, "GE": int.__ge__, "NE": int.__ne__,
    }[direction]  # fmt: skip

    def count(start, grows, bound):
        for trips in range(100):
            if not holds(start + trips * grows, bound):
                return trips
        return None  # for ever

    for start in range(-3, 4):
        for grows in range(-3, 4):
            for bound in range(-5, 6):
                got = hlo_text._trips(start, grows, direction, bound)
                assert got == count(start, grows, bound), (start, grows, bound)


LOOP = """%condition (s: (s32[], s32[], f32[8,8])) -> pred[] {
  %s = (s32[], s32[], f32[8,8]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %bound = s32[] get-tuple-element(%s), index=1
  ROOT %c = pred[] compare(%bound, %i), direction=GT
}

%body (t: (s32[], s32[], f32[8,8])) -> (s32[], s32[], f32[8,8]) {
  %t = (s32[], s32[], f32[8,8]) parameter(0)
  %k = s32[] get-tuple-element(%t), index=0
  %kept = s32[] get-tuple-element(%t), index=1
  %x = f32[8,8] get-tuple-element(%t), index=2
  %two = s32[] constant(2)
  %next = s32[] add(%k, %two)
  %y = f32[8,8] all-reduce(%x), channel_id=1, replica_groups={}, to_apply=%add
  ROOT %r = (s32[], s32[], f32[8,8]) tuple(%next, BOUND, %y)
}"""


@pytest.mark.parametrize("bound, trips", [("%kept", 4), ("%next", None)])
def test_a_bound_in_the_state_of_a_loop_is_known_while_it_stays(bound, trips):
    """Counts 4 - 1 = 3, 5, 7, 9 below 10, which lies in the state beside the counter."""
    lines = """
  %p = f32[8,8] parameter(0)
  %four = s32[] constant(4)
  %one = s32[] constant(1)
  %start = s32[] subtract(%four, %one)
  %ten = s32[] constant(10)
  %state = (s32[], s32[], f32[8,8]) tuple(%start, %ten, %p)
  %loop = (s32[], s32[], f32[8,8]) while(%state), condition=%condition, body=%body
  ROOT %r = f32[8,8] get-tuple-element(%loop), index=2"""
    text = program_text(lines, others=LOOP.replace("BOUND", bound))
    (reduce,) = program_lib.read(text, [("x", 8)]).collectives
    assert reduce.count == trips


ONCE = """%condition (s: (pred[], f32[8,8])) -> pred[] {
  %s = (pred[], f32[8,8]) parameter(0)
  ROOT %go = pred[] get-tuple-element(%s), index=0
}

%body (t: (pred[], f32[8,8])) -> (pred[], f32[8,8]) {
  %t = (pred[], f32[8,8]) parameter(0)
  %still = pred[] get-tuple-element(%t), index=0
  %x = f32[8,8] get-tuple-element(%t), index=1
  %no = pred[] constant(LITERAL)
  %y = f32[8,8] all-reduce(%x), channel_id=1, replica_groups={}, to_apply=%add
  ROOT %r = (pred[], f32[8,8]) tuple(GOES_ON, %y)
}"""


@pytest.mark.parametrize(
    "goes_on, literal, trips",
    [("%no", "false", 1), ("%no", "true", None), ("%still", "false", None)],
)
def test_a_loop_that_ends_itself_runs_at_most_once(goes_on, literal, trips):
    lines = """
  %p = f32[8,8] parameter(0)
  %wanted = pred[] parameter(1)
  %state = (pred[], f32[8,8]) tuple(%wanted, %p)
  %loop = (pred[], f32[8,8]) while(%state), condition=%condition, body=%body
  ROOT %r = f32[8,8] get-tuple-element(%loop), index=1"""
    text = ONCE.replace("GOES_ON", goes_on).replace("LITERAL", literal)
    (reduce,) = program_lib.read(program_text(lines, others=text), [("x", 8)]).collectives
    assert reduce.count == trips


def test_groups_of_one_move_nothing():
    lines = """
  %p = f32[8,8] parameter(0)
  %a = f32[8,8] all-reduce(%p), channel_id=1, replica_groups={{0},{1},{2},{3}}, to_apply=%add
  %b = f32[8,8] collective-permute(%a), channel_id=2, source_target_pairs={{0,0},{1,1}}
  ROOT %c = f32[8,8] collective-permute(%b), channel_id=3, source_target_pairs={{0,1},{1,1}}"""
    program = program_lib.read(program_text(lines, devices=4), [("data", 2), ("fsdp", 2)])
    assert [(each.name, each.axes) for each in program.collectives] == [("c", ("fsdp",))]
    assert not program.unknown


def test_a_permute_without_pairs_is_told():
    """All devices receive zeros from it: a compiler that writes it loses what was to arrive."""
    lines = """
  %p = f32[8,8] parameter(0)
  ROOT %c = f32[8,8] collective-permute(%p), channel_id=3, source_target_pairs={}"""
    program = program_lib.read(program_text(lines, devices=4), [("data", 2), ("fsdp", 2)])
    assert not program.collectives
    assert "without pairs, which gives zeros" in program.unknown[0]


HIDDEN = """
  %p = f32[8,8] parameter(0)
  %i = s32[] constant(1)
  %start = (f32[8,8], f32[64,8]) all-gather-start(%p), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}, backend_config={"collective_backend_config":{"is_sync":SYNC}}
  %j = s32[] add(%i, %i)
  %q = f32[8,8] copy(%p)
  %k = f32[8,8] fusion(%p), kind=kLoop, calls=%fused
  %d = f32[8,8] dot(%p, %k), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %done = f32[64,8] all-gather-done(%start)
  ROOT %r = f32[8,8] tanh(%d)"""  # noqa: E501
FUSED = """%fused (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8] parameter(0)
  ROOT %y = f32[8,8] sine(%x)
}"""


@pytest.mark.parametrize("synchronous", [False, True])
def test_counters_and_copies_hide_nothing(synchronous):
    text = program_text(HIDDEN.replace("SYNC", str(synchronous).lower()), others=FUSED)
    program = program_lib.read(text, [("x", 8)])
    (gather,) = program.collectives
    assert gather.asynchronous == (not synchronous)
    assert gather.hidden_by == (0 if synchronous else 2)  # the fusion and the product
    assert (gather.bytes, gather.wire_bytes, gather.dtype) == (8 * 256, 7 * 256, "f32")
    assert program.flops == 2 * 8 * 8 * 8
    # Of gather, counter, copy, fusion, product and tanh.
    assert program.bytes == (256 + 8 * 256) + 12 + 512 + 512 + 768 + 512


def test_arrays_joined_end_to_end_are_several():
    """GPU programs send combined arrays as one."""
    lines = """
  %p = f32[8,8] parameter(0)
  %a = f32[64] bitcast(%p)
  %b = f32[192] fusion(%a, %a, %a), kind=kLoop, calls=%join
  %c = f32[192] all-reduce(%b), channel_id=1, replica_groups={}, to_apply=%add
  ROOT %r = f32[8,8] bitcast(%p)"""
    others = """%join (x: f32[64], y: f32[64], z: f32[64]) -> f32[192] {
  %x = f32[64] parameter(0)
  %y = f32[64] parameter(1)
  %z = f32[64] parameter(2)
  ROOT %j = f32[192] concatenate(%x, %y, %z), dimensions={0}
}"""
    (reduce,) = program_lib.read(program_text(lines, others=others), [("x", 8)]).collectives
    assert (reduce.arrays, reduce.bytes) == (3, 3 * 256)


def test_several_fusions_that_carry_out_one_collective_are_one():
    """TPU v5e: the first begins it, a product carries it on, the last waits for it."""
    part = (
        "%{name} (x: f32[8,8]) -> f32[8,8] {{\n  %x{name} = f32[8,8] parameter(0)\n"
        "  %g{name} = f32[64,8] all-gather(%x{name}), channel_id=1, replica_groups=[1,8]<=[8], "
        'dimensions={{0}}, frontend_attributes={{chain_id="0"}}\n  {root}\n}}'
    )
    call = 'ROOT %c{n} = f32[8,8] custom-call(%g{name}), custom_call_target="AsyncCollective{n}"'
    product = (
        "ROOT %d = f32[8,8] dot(%x{name}, %x{name}), lhs_contracting_dims={{1}}, "
        "rhs_contracting_dims={{0}}"
    )
    parts = [("begin", call), ("middle", product), ("end", call)]
    others = "\n\n".join(
        part.format(
            name=name, root=root.format(name=name, n="Start" if name == "begin" else "Done")
        )
        for name, root in parts
    )
    for times in (1, 2):  # the same collective again, as an unrolled loop has it
        lines, last = ["  %p = f32[8,8] parameter(0)"], "p"
        for time in range(times):
            for name, _ in parts:
                lines.append(
                    f"  %{name}.{time} = f32[8,8] fusion(%{last}), kind=kCustom, calls=%{name}"
                )
                last = f"{name}.{time}"
        program = program_lib.read(program_text("\n".join(lines), others=others), [("x", 8)])
        assert len(program.collectives) == times
        gather = program.collectives[0]
        assert gather.name == "begin.0,middle.0,end.0"
        assert (gather.asynchronous, gather.hidden_by, gather.bytes) == (True, 1, 8 * 256)
        assert program.flops == times * 2 * 8 * 8 * 8
        assert not program.unknown


def test_lines_of_metadata_end_no_computation():
    """Calls of Pallas kernels have metadata of several lines."""
    lines = """
  %p = f32[8,8] parameter(0)
  %k = f32[8,8] custom-call(%p), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block\\": 128}"
}}, metadata={op_name="jit(f)/while/body/kernel/pallas_call"}, backend_config={"custom_call_config":{"body":"TUzv","cost_estimate":{"flops":"77"}}}
  ROOT %d = f32[8,8] dot(%p, %k), lhs_contracting_dims={1}, rhs_contracting_dims={0}"""  # noqa: E501
    program = program_lib.read(program_text(lines), [("x", 8)])
    assert program.kernels == (
        program_lib.Kernel("k", "tpu_custom_call", 1, 77.0, "kernel/pallas_call"),
    )
    assert program.flops == 2 * 8 * 8 * 8


def test_computations_without_a_known_caller_are_unknown():
    others = """%inner (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8] parameter(0)
  ROOT %lost = f32[8,8] all-reduce(%x), channel_id=1, replica_groups={}, to_apply=%add
}"""
    lines = """
  %p = f32[8,8] parameter(0)
  ROOT %r = f32[8,8] sometimes(%p), runs=%inner"""
    program = program_lib.read(program_text(lines, others=others), [("x", 8)])
    assert not program.collectives
    (note,) = program.unknown
    assert note.startswith("executions of lost: no instruction is known to run")


def test_host_transfers_are_unknown():
    lines = """
  %p = f32[8,8] parameter(0)
  %t = token[] after-all()
  %s = (f32[8,8], u32[], token[]) send(%p, %t), channel_id=1, is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="callback"}
  %e = token[] send-done(%s), channel_id=1, is_host_transfer=true
  ROOT %r = f32[8,8] copy(%p)"""  # noqa: E501
    assert program_lib.read(program_text(lines), [("x", 8)]).unknown == (
        "purpose of s: it leaves the devices",
    )


def test_sources_are_shortened_in_the_middle():
    name = "jit(f)/transpose(jvp())/while/body/closed_call/" + "x" * 200 + "/dot_general"
    rest = f'%p), metadata={{op_name="{name}" stack_frame_id=1}}'
    source = hlo_text.source_of(hlo_text.Instruction("a", "f32[]", "tanh", rest, False))
    assert len(source) == 100
    assert source.startswith("transpose(jvp())/xxx") and source.endswith("xxx/dot_general")


# ------------------------------------------------------------------------- slices kept, bytes moved


@pytest.mark.parametrize(
    "chosen, sliced",
    [("device", True), ("more", False), ("data", False), ("loop", False), ("both", False)],
)
def test_only_slices_chosen_by_device_stand_for_a_scatter(chosen, sliced):
    """A device's eighth does; not two eighths, one chosen otherwise, or one beside the whole."""
    mesh = make_mesh("cpu", {"x": 8})

    def part(whole, index, rows=8):
        return jax.lax.dynamic_slice_in_dim(whole, index * 8, rows)

    def run(x):
        whole, mine = jax.lax.psum(x, "x"), jax.lax.axis_index("x")
        if chosen == "loop":
            each = jax.lax.map(lambda i: jnp.sin(part(whole, i)), jnp.arange(8))
            return each.reshape(64, 64)
        if chosen == "more":
            return jnp.tile(part(whole, mine, 16), (4, 1))
        index = x[0, 0].astype(jnp.int32) if chosen == "data" else mine
        return jnp.tile(part(whole, index), (8, 1)) + (whole if chosen == "both" else 0)

    text = compile_text(mesh, run, shape(mesh, (8 * 64, 64), "x"), manual=(P("x"), P("x")))
    (reduce,) = read(text, mesh).collectives
    assert reduce.sliced == sliced
    assert reduce.sliced_bytes == (64 * 64 * 4 if sliced else 0)


def test_bytes_of_a_loop_are_those_of_its_slices():
    """A scan over stacked weights reads one layer's in a trip, and not the stack."""
    mesh, layers, size = make_mesh("cpu", {"x": 1}), 64, 512

    def run(w_LN, x_N):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x * w), jnp.sin(x)), x_N, w_LN)

    text = compile_text(mesh, run, shape(mesh, (layers, size)), shape(mesh, (size,)))
    program = read(text, mesh)
    # A trip reads weights and state, and writes the state and an output; copies may come on top.
    once = layers * 4 * size * 4
    assert once <= program.bytes <= 3 * once
    assert not program.unknown


# ---------------------------------------------------------------------------------- what it refuses


def test_a_mesh_of_other_size_is_refused():
    text = program_text("  ROOT %p = f32[8,8] parameter(0)")
    with pytest.raises(ValueError, match="mesh x4 has 4 devices and the program is for 8"):
        program_lib.read(text, [("x", 4)])
    with pytest.raises(ValueError, match=r"across_slices names .'y'.: the mesh axes are .'x',."):
        program_lib.read(text, [("x", 8)], across_slices=("y",))


def test_other_texts_are_refused():
    lowered = jax.jit(jnp.sin).lower(1.0)
    with pytest.raises(ValueError, match=r"give what `compiled.as_text..` returns"):
        program_lib.read(lowered.as_text(), [("x", 1)])
    with pytest.raises(ValueError, match="no ENTRY computation: it is cut off"):
        program_lib.read("HloModule jit_f, is_scheduled=true\n", [("x", 1)])
    with pytest.raises(ValueError, match="element type 'q7' of the program's text is unknown"):
        program_lib.read(
            program_text("  ROOT %p = q7[8,8] parameter(0)\n  %q = q7[8] tanh(%p)"), [("x", 8)]
        )


def test_a_cost_report_is_plain_data():
    text, mesh, *_ = cube("cpu")
    program = read(text, mesh)
    assert dataclasses.asdict(program)["collectives"][0]["count"] == 1
    assert hash(program) == hash(read(text, mesh))
