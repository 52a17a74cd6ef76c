"""Layouts proved by their collectives: what the compiled train step sends, in closed formulas.

The same small Llama is compiled for eight H100s and for eight TPU v5e chips, which are not here.
Letters in the formulas: W parameters of the blocks' matrices, E of the embedding table, H of the
head, L layers; numbers travel in bf16, 2 bytes each.
"""

import dataclasses
import functools

import pytest
from support import runs

from llmx.aot import program as program_lib
from llmx.aot import topologies
from llmx.model import costs, families

pytestmark = pytest.mark.aot

TOPOLOGIES = {"h100": "h100:8", "v5e": "v5e:2x4"}
ALL_TOPOLOGIES = TOPOLOGIES | {"v5p": "v5p:2x2x2"}
MODEL = dict(
    num_layers=4, width=256, mlp_dim=768, num_heads=8, num_kv_heads=8, head_dim=32,
    vocab_size=1024,
)  # fmt: skip
B, T = 32, 64  # few tokens: programs for large arrays compile for longer
BF16, FP32 = 2, 4
# Norms, token ids, sums of squares, the loss: nobody counts them.
SMALL = 128 * 1024
# The TPU compiler pads some scattered dimensions to whole tiles.
PADDING = 1.05


@dataclasses.dataclass(frozen=True)
class Case:
    layout: str
    mesh: tuple[tuple[str, int], ...]
    accumulation: int = 1
    gather: str = "layer"
    remat: str = "full"
    options: tuple[tuple[str, str], ...] = ()  # other keys of the config


CONFIG = families.preset("llama3", **MODEL)
PARTS = costs.parameters_by_part(CONFIG)
W, E, H = PARTS["attention"] + PARTS["mlp"], PARTS["embedding"], PARTS["head"]
MATRICES_PER_LAYER = 7  # query, key, value, out; gate, up, down


@functools.cache
def text(platform: str, case: Case) -> str:
    topology = topologies.parse(ALL_TOPOLOGIES[platform])
    config = runs.make_config(
        CONFIG, mesh=dict(case.mesh), precision="bf16", remat=case.remat,
        batch__size=B, batch__sequence_length=T, batch__accumulation=case.accumulation,
        sharding__layout=case.layout, sharding__gather=case.gather, **dict(case.options),
    )  # fmt: skip
    recipe = runs.make_recipe(config, devices=topologies.devices(topology))
    return topologies.compile(runs.lower(recipe), topology.platform).as_text()


def program(platform: str, case: Case) -> program_lib.CostReport:
    return program_lib.read(text(platform, case), case.mesh)


def moved(found: program_lib.CostReport, kind: str, axes: str, *, dtype: str = "bf16") -> int:
    """Bytes per step of whole arrays of `dtype`. An all-reduce of which each device keeps only its
    slice, and an all-to-all of terms that are then added up, are counted as the reduce-scatter that
    they stand for."""
    total = 0
    for each in found.select(kind=("all-reduce", "reduce-scatter"), axes=axes):
        if dtype not in each.dtype:
            continue
        scattered = each.bytes if each.kind == "reduce-scatter" else each.sliced_bytes
        wanted = {"reduce-scatter": scattered, "all-reduce": each.bytes - scattered}
        total += each.count * wanted.get(kind, 0)
    exchanged = [e for e in found.select(kind="all-to-all", axes=axes) if dtype in e.dtype]
    exchanged = [e for e in exchanged if "psum_scatter" in e.source]
    if kind == "reduce-scatter":
        total += program_lib.total_bytes(exchanged)
    if kind in ("all-reduce", "reduce-scatter"):
        return total
    return sum(e.count * e.bytes for e in found.select(kind=kind, axes=axes) if dtype in e.dtype)


def about(got: int, wanted: int) -> bool:
    return wanted <= got <= PADDING * wanted + SMALL


DATA8, FSDP8 = (("data", 8),), (("fsdp", 8),)
TWO_SPEEDS = (("data", 2), ("fsdp", 4))


def on(*platforms: str) -> list:
    """One worker has all tests of a platform, so that programs compile once."""
    return [cell(one) for one in platforms]


def cell(platform: str, *values, full_grid: bool = False, **keys):
    """Values of a test on a platform; full_grid: with `--full-grid` only, where another platform's
    program and the rows beside it have the same formula."""
    marks = [pytest.mark.xdist_group(f"layouts {platform}")]
    marks += [pytest.mark.full_grid] * full_grid
    return pytest.param(platform, *values, marks=marks, **keys)


each_platform = pytest.mark.parametrize("platform", on(*TOPOLOGIES))


@each_platform
def test_ddp_all_reduces_gradients_a_layer_at_a_time(platform):
    found = program(platform, Case("ddp", DATA8))
    assert about(moved(found, "all-reduce", "data"), BF16 * (W + E + H))
    assert moved(found, "reduce-scatter", "data") <= SMALL
    assert program_lib.total_bytes(found.select(kind="all-gather")) <= SMALL
    # Tensor fusion: one bucket holds the gradients of a layer, and not one parameter.
    of_layers = [
        each
        for each in found.select(kind="all-reduce", axes="data")
        if each.bytes >= BF16 * W // CONFIG.num_layers
    ]
    assert sum(each.count for each in of_layers) <= CONFIG.num_layers + 2
    if platform == "h100":
        assert {each.arrays for each in of_layers} <= {MATRICES_PER_LAYER, 2}
    assert program_lib.executions(found.select(kind="all-reduce")) <= CONFIG.num_layers + 6


@each_platform
def test_zero1_has_no_reduce_scatter_and_gathers_new_parameters(platform):
    found = program(platform, Case("zero1", DATA8))
    assert about(moved(found, "all-reduce", "data"), BF16 * (W + E + H))
    assert program_lib.total_bytes(found.select(kind="reduce-scatter")) == 0
    assert about(moved(found, "all-gather", "data", dtype="f32"), FP32 * (W + E + H))


@each_platform
def test_zero2_reduce_scatters_gradients(platform):
    found = program(platform, Case("zero2", DATA8))
    assert about(moved(found, "reduce-scatter", "data"), BF16 * (W + E + H))
    assert moved(found, "all-reduce", "data") <= SMALL
    assert about(moved(found, "all-gather", "data", dtype="f32"), FP32 * (W + E + H))


@pytest.mark.parametrize(
    ("platform", "remat"),
    [
        cell(platform, remat, full_grid=platform == "v5e" and remat == "names")
        for platform in TOPOLOGIES
        for remat in ("full", "none", "names")
    ],
)
def test_zero3_gathers_weights_twice_and_reduce_scatters_once(platform, remat):
    found = program(platform, Case("zero3", FSDP8, remat=remat))
    gathered = moved(found, "all-gather", "fsdp")
    # The head may be gathered once for both passes.
    assert BF16 * (2 * W + H) <= gathered <= PADDING * BF16 * (2 * W + 2 * H) + SMALL
    assert about(moved(found, "reduce-scatter", "fsdp"), BF16 * (W + H))
    assert moved(found, "all-reduce", "fsdp") <= SMALL
    # The table stays where it is: results travel, forward and back.
    looked_up = [e for e in found.select(kind="all-to-all") if "psum_scatter" not in e.source]
    exchanged = program_lib.total_bytes(looked_up)
    assert exchanged <= 2 * BF16 * B // 8 * T * CONFIG.width + SMALL
    others = program_lib.total_bytes(found.select(kind="all-gather")) - gathered
    assert others <= SMALL, "a gather in fp32"


@each_platform
def test_hsdp_sends_only_shares_over_the_slow_axis(platform):
    found = program(platform, Case("hsdp", TWO_SPEEDS))
    assert about(moved(found, "reduce-scatter", "fsdp"), BF16 * (W + H))
    assert about(moved(found, "all-reduce", "data"), BF16 * (W + E + H) // 4)
    slow = [e.count * e.bytes for e in found.select(across="data")]
    assert sum(slow) <= PADDING * BF16 * (W + E + H) // 4 + 2 * SMALL
    assert program_lib.total_bytes(found.select(kind="all-gather", across="data")) <= SMALL


# Each layout on one of the machines, and each machine with one of them.
@pytest.mark.parametrize(
    ("platform", "layout", "mesh", "axis", "share"),
    [
        cell(
            platform, *values, full_grid=(platform, values[0]) in (("v5e", "ddp"), ("h100", "hsdp"))
        )
        for platform in TOPOLOGIES
        for values in (("ddp", DATA8, "data", 1), ("hsdp", TWO_SPEEDS, "data", 4))
    ],
)
def test_gradients_are_all_reduced_after_the_last_microbatch(platform, layout, mesh, axis, share):
    """And not in each: four microbatches send what one does."""
    found = program(platform, Case(layout, mesh, accumulation=4))
    assert about(moved(found, "all-reduce", axis), BF16 * (W + E + H) // share)
    assert program_lib.executions(found.select(kind="all-reduce", axes=axis)) <= 8


@each_platform
def test_weights_are_gathered_once_per_step_if_asked(platform):
    found = program(platform, Case("zero3", FSDP8, accumulation=4, gather="step"))
    assert about(moved(found, "all-gather", "fsdp"), BF16 * (W + H))
    assert about(moved(found, "reduce-scatter", "fsdp"), 4 * BF16 * (W + H))
    if platform != "h100":  # what it saves: counted once
        return
    again = program(platform, Case("zero3", FSDP8, accumulation=4))
    assert moved(again, "all-gather", "fsdp") >= 4 * BF16 * (2 * W + H)


FP8_GATHERS = (("products__gather", "fp8"),)
FP8 = (("products__format", "fp8"), *FP8_GATHERS)


FP8_CASES = {
    "products in bf16": ("layer", FP8_GATHERS, 2),
    "products in fp8": ("layer", FP8, 2),
    "once per step": ("step", FP8_GATHERS, 1),
}


@pytest.mark.parametrize(
    ("platform", "gather", "options", "passes"),
    [
        cell(
            platform,
            *values,
            full_grid=platform == "v5p" and values[0] == "step",
            id=f"{platform}-{name}",
        )
        for platform in ("h100", "v5p")
        for name, values in FP8_CASES.items()
    ],
)
def test_weights_gathered_in_fp8_are_half_the_bytes(platform, gather, options, passes):
    """Of every pass, and of the head."""
    usual = program(platform, Case("zero3", FSDP8, gather=gather))
    found = program(platform, Case("zero3", FSDP8, gather=gather, options=options))
    before, after = (
        program_lib.total_bytes(each.select(kind="all-gather", axes="fsdp"))
        for each in (usual, found)
    )
    assert abs(after / (before / 2) - 1) <= 0.02
    assert about(before, passes * BF16 * W + BF16 * H)
    # Gradients and everything else travel as before.
    for kind in ("reduce-scatter", "all-to-all"):
        sent = [program_lib.total_bytes(each.select(kind=kind)) for each in (usual, found)]
        assert sent[0] == sent[1]


@pytest.mark.xdist_group("layouts h100")
def test_h100_multiplies_fp8_in_its_fp8_units():
    """All products of the layers; those of the head stay in bf16."""
    found = text("h100", Case("zero3", FSDP8, options=FP8))
    in_fp8 = found.count('custom_call_target="__cublas$lt$matmul$f8"')
    others = found.count('custom_call_target="__cublas') - in_fp8
    assert in_fp8 >= 3 * MATRICES_PER_LAYER
    assert others <= 3


@each_platform
def test_tensor_parallelism_moves_what_the_formula_says(platform):
    """Per layer, with A the bytes of one activation of the tensor group: the forward pass gathers
    2 A and scatters 2 A; the backward pass with remat gathers 2 A again for what it computes again
    and scatters 1 A of it (the last sum is not needed), and gathers 2 A and scatters 2 A of
    gradients: 6 A and 5 A. Outside the layers 1 A is scattered after the lookup, and gathered, for
    the head; backwards the other way round."""
    fsdp, tensor = 2, 4
    found = program(platform, Case("zero3", (("fsdp", fsdp), ("tensor", tensor))))
    activation = BF16 * B // fsdp * T * CONFIG.width
    gathers = 6 * CONFIG.num_layers * activation
    assert gathers <= moved(found, "all-gather", "tensor") <= gathers + 3 * activation + SMALL
    scatters = 5 * CONFIG.num_layers * activation
    if platform == "h100":
        # `xla_gpu_enable_pipelined_all_gather` moves a gather into the iteration before, and there
        # computes its operand once more: attention's output, in all layers but the first.
        scatters += (CONFIG.num_layers - 1) * activation
    got = moved(found, "reduce-scatter", "tensor")
    assert scatters <= got <= PADDING * scatters + 3 * activation + SMALL
    assert moved(found, "all-reduce", "tensor") <= SMALL
    # Each device gathers only the weights of its share.
    assert moved(found, "all-gather", "fsdp") <= PADDING * BF16 * (2 * W + 2 * H) // tensor + SMALL


@pytest.mark.xdist_group("layouts h100")
def test_reductions_run_beside_compute():
    """On H100 every large collective of the layers' loops is asynchronous, with work to hide it."""
    found = program("h100", Case("zero3", FSDP8))
    in_loops = [each for each in found.collectives if each.in_loop and each.bytes > SMALL]
    assert in_loops
    assert all(each.asynchronous and each.hidden_by for each in in_loops), in_loops


@pytest.mark.xdist_group("layouts v5p")
def test_a_whole_slice_of_v5p_scatters_gradients_beside_compute():
    """The options of `runtime.compiler_options`: without them each sum is an all-reduce, of which
    each device keeps its part, and stands alone."""
    found = program("v5p", Case("zero3", FSDP8))
    scatters = found.select(kind="reduce-scatter", axes="fsdp")
    assert about(moved(found, "reduce-scatter", "fsdp"), BF16 * (W + H))
    assert sum(each.count * each.bytes for each in scatters) >= BF16 * (W + H)
    assert moved(found, "all-reduce", "fsdp") <= SMALL
    of_layers = [each for each in scatters if each.bytes > SMALL]
    assert of_layers and all(each.asynchronous and each.hidden_by for each in of_layers)


@pytest.mark.xdist_group("layouts v5e")
def test_a_whole_slice_of_v5e_exchanges_gradients_beside_compute():
    """`sharding.scatter` and the options: no sum is an all-reduce, and each runs beside work."""
    found = program("v5e", Case("zero3", FSDP8))
    sums = [e for e in found.select(kind="all-to-all", axes="fsdp") if "psum_scatter" in e.source]
    assert about(program_lib.total_bytes(sums), BF16 * (W + H))
    assert moved(found, "all-reduce", "fsdp") <= SMALL
    of_layers = [each for each in sums if each.in_loop]
    assert of_layers and all(each.asynchronous and each.hidden_by for each in of_layers)
