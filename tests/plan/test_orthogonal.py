"""What Muon's exchange of matrices takes, beside the program that makes it."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from support.resolved import resolved

from llmx import config, sharding
from llmx.config import recipe
from llmx.plan import machines, memory, operators, orthogonal, sizes, step_time, traffic
from llmx.step import muon


def _sizes(**keys):
    run = config.default()
    run.mesh.data, run.optimizer.name = 1, "muon"
    return sizes.of(resolved(run, **keys))


@pytest.mark.parametrize("layers", [1, 3, 8])
def test_messages_are_those_of_the_program(layers):
    """Of one stack over fsdp4 x tensor2: operands of its all-to-alls, or results of its gathers."""
    counted = _sizes(
        mesh__fsdp=4, mesh__tensor=2, batch__size=8, model__num_layers=layers, model__width=64,
        model__mlp_dim=128, model__num_heads=4, model__num_kv_heads=2, model__head_dim=16,
    )  # fmt: skip
    mesh = sharding.make_mesh({"fsdp": 4, "tensor": 2}, axis_type=AxisType.Auto)
    to = NamedSharding(mesh, PartitionSpec(None, "fsdp", "tensor"))
    x = jax.ShapeDtypeStruct((layers, 64, 128), jnp.float32, sharding=to)
    text = (
        jax.jit(lambda x: muon.on_whole_matrices(jnp.sin, x, to, (1, 2)))
        .lower(x)
        .compile()
        .as_text()
    )
    kind = "all-gather" if layers == 1 else "all-to-all"
    # CPUs exchange a tuple, with a part for each device.
    results = re.findall(rf"= (\(.*?\)|\S+) {kind}\(", text)
    found = [
        sum(4 * math.prod(map(int, one.split(","))) for one in re.findall(r"f32\[([\d,]+)\]", of))
        for of in results
    ]
    up = [one for one in orthogonal.messages(counted) if one[-1] == "blocks/mlp/up/kernel"]
    assert {one[0] for one in up} == {kind}
    assert sorted(found) == sorted(one[2] for one in up for _ in range(one[3]))
    sent = {one.axes for one in traffic.of(counted) if one.purpose == "whole matrices"}
    assert sent == {("fsdp",), ("tensor",)}


def test_layer_by_layer_each_is_gathered():
    counted = _sizes(
        mesh__fsdp=4, batch__size=8, model__num_layers=6, offload__optimizer=True,
    )  # fmt: skip
    found = [one for one in orthogonal.messages(counted) if one[-1] == "blocks/mlp/up/kernel"]
    model = counted.run.model
    assert found == [("all-gather", ("fsdp",), 4 * model.width * model.mlp_dim, 6, found[0][-1])]
    stack = next(one for one in orthogonal.stacks(counted) if one.leaf.name == found[0][-1])
    assert stack.matrices == 6 and stack.at_a_time == 1  # each device has all, one after the other


@pytest.mark.parametrize(
    "keys", [dict(offload__optimizer=True), dict(offload__parameters=True, offload__optimizer=True),
             dict(optimizer__moments="int8")],
)  # fmt: skip
@pytest.mark.parametrize("mesh", [{}, dict(mesh__data=4, sharding__layout="ddp", batch__size=8)])
def test_layer_by_layer_one_is_held(keys, mesh):
    """With whole parameters too: nothing is sent."""
    if "offload__parameters" in keys and mesh:
        mesh = dict(mesh__fsdp=4, batch__size=8)
    counted = _sizes(**keys, **mesh, model__num_layers=8, remat="full")
    whole = _sizes(**mesh, model__num_layers=8, remat="full")
    assert recipe.updates_by_layer(counted.run) and not recipe.updates_by_layer(whole.run)
    ways = 4 if "mesh__fsdp" in mesh else 1
    assert orthogonal.held(counted) == orthogonal.held(whole) / 8 * ways
    sent = {one[0] for one in orthogonal.messages(counted)}
    assert sent == ({"all-gather"} if ways > 1 else set())


def test_stages_have_layers_of_their_own():
    keys = dict(mesh__stage=2, mesh__fsdp=2, batch__size=8, batch__accumulation=2)
    counted = _sizes(**keys, model__num_layers=8)
    assert {one.layers for one in orthogonal.stacks(counted)} == {4}
    held = memory.of(counted, on_gpu=True).peaks[memory.UPDATE]["whole matrices"]
    model = counted.run.model
    assert held == 5 * 4 * 2 * model.width * model.mlp_dim


def test_products_are_divided_among_devices():
    def flops(**keys):
        counted = _sizes(**keys, model__num_layers=8)
        return sum(
            2 * math.prod(shape) * count
            for stack in orthogonal.stacks(counted)
            for shape, count in orthogonal.products(stack)
        )

    one = flops()
    assert flops(mesh__fsdp=4, batch__size=8) == one / 4
    assert flops(mesh__data=4, batch__size=8, sharding__layout="ddp") == one
    # Five iterations of X X^T, its square, and what X is multiplied with.
    d, f = _sizes().run.model.width, _sizes().run.model.mlp_dim
    mlp = 3 * 8 * 5 * 2 * (2 * d * d * f + d**3)
    assert mlp < one < 2 * mlp


def test_each_expert_has_matrices_of_its_own():
    keys = dict(
        model__num_experts=8, model__experts_per_token=2, model__expert_dim=512,
        model__num_layers=4, mesh__fsdp=2, mesh__expert=4, batch__size=8,
    )  # fmt: skip
    counted = _sizes(**keys)
    gate = next(one for one in orthogonal.stacks(counted) if "mlp/gate" in one.leaf.name)
    assert (gate.rows, gate.columns) == (counted.run.model.width, 512)
    assert gate.experts == 2 and gate.splits == (("fsdp",),) and gate.matrices == 2 * 2
    sent = [one for one in orthogonal.messages(counted) if one[-1] == gate.leaf.name]
    assert sent == [("all-to-all", ("fsdp",), 4 * 4 * gate.rows * gate.columns, 2, sent[0][-1])]


def test_a_step_with_muon_takes_what_it_adds():
    keys = dict(mesh__fsdp=8, batch__size=8, batch__sequence_length=256, sharding__layout="zero3")
    muons, adams = (_sizes(**keys, optimizer__name=name) for name in ("muon", "adamw"))
    machine = machines.parse("h100:8")
    times = [step_time.of(one.run, machine) for one in (muons, adams)]
    assert times[0].step > times[1].step
    of_muon = [one for one in times[0].operators if "orthogonalised" in one.name]
    assert of_muon and {one.part for one in of_muon} == {operators.UPDATE}
    assert not [one for one in times[1].operators if "orthogonalised" in one.name]
    held = memory.of(muons, on_gpu=True).peaks[memory.UPDATE]
    largest = 4 * muons.run.model.width * muons.run.model.mlp_dim
    matrices = -(-muons.run.model.num_layers // 8)
    assert held["whole matrices"] == 5 * matrices * largest
    assert memory.UPDATE not in memory.of(adams, on_gpu=True).peaks


def test_fp32_factors_are_those_of_the_chip():
    chips = {
        name: orthogonal.dtype(machines.parse(name).topology.chip)
        for name in ("h100:8", "v5p:2x2x1")
    }
    assert chips == {"h100:8": "tf32", "v5p:2x2x1": "bfloat16"}
