"""What the planner counts of routed experts, by hand."""

import math

import pytest

from llmx import config
from llmx.config import checks
from llmx.model import families
from llmx.plan import experts, machines, operators, sizes, traffic

E, K, D, F, ROWS, T = 6, 2, 768, 1536, 12, 1024


def run_of(num_devices=6, **keys):
    run = config.default()
    run.model = families.preset(
        "mixtral", width=D, num_layers=4, num_heads=8, num_kv_heads=4, head_dim=64,
        num_experts=E, experts_per_token=K, expert_dim=F, vocab_size=4096, max_positions=T,
    )  # fmt: skip
    run.batch.size, run.batch.sequence_length, run.remat = ROWS, T, "full"
    run.mesh.data = 1
    for key, value in keys.items():
        config.set_value(run, key.replace("__", "."), value)
    return checks.resolve(run, num_devices)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("buffer", [0.1, 0.6, 1.0, 1.5, 100.0])
def test_bytes_over_expert(n, buffer):
    """2 passes of rows forward and 3 backward, as many as a device sends another in a round; of a
    small buffer in several."""
    run = run_of(mesh__expert=n, mesh__fsdp=6 // n, experts__buffer=buffer)
    found = traffic.by_axes(traffic.of(sizes.of(run)))["expert"]
    assignments = ROWS * T / 6 * K
    rows = n * min(assignments, math.ceil(buffer * assignments / n))
    rows *= math.ceil(assignments / rows)
    of_layer = (n - 1) / n * rows * (5 * D * 2 + 2 * 4)
    # And gradients of what `expert` replicates: attention and norms, summed.
    assert found > 4 * of_layer
    others = [
        one
        for one in traffic.of(sizes.of(run))
        if one.axes == ("expert",) and one.purpose == "gradients"
    ]
    assert found - sum(one.sent for one in others) == pytest.approx(4 * of_layer)
    assert not [one for one in others if one.name.startswith("blocks/mlp/down")]


def test_weights_of_experts_are_not_gathered_over_expert():
    run = run_of(mesh__expert=3, mesh__fsdp=2)
    (gathered,) = (
        one for one in traffic.of(sizes.of(run))
        if one.purpose == "weights" and one.name == "blocks/mlp/gate"
    )  # fmt: skip
    assert gathered.axes == ("fsdp",) and gathered.count == 2 * 4
    assert gathered.bytes == 2 * E / 3 * D * F


def test_products_are_those_of_the_tokens_experts():
    """Eleven with matrices [D, F]: 3 forward, gate and up again, 6 gradients; and half a block."""
    for expert in (1, 3):
        of_run = sizes.of(run_of(mesh__expert=expert, mesh__fsdp=6 // expert))
        rows = experts.Rows(of_run)
        flops = sum(
            2 * math.prod(shape) * (forward + backward)
            for _, _, shape, forward, backward in experts.multiplied(of_run)
        )
        own = (3 + 2 + 3 + 3) * 2 * of_run.tokens * K * D * F
        assert own < flops <= own * (1 + E / expert * rows.block / 2 / (of_run.tokens * K)) * 1.001


LATENT = dict(
    model__kv_latent=128, model__query_latent=192, model__rope_dim=32, model__value_dim=48,
    model__num_kv_heads=8, model__first_dense=1, model__mlp_dim=2048, model__shared_dim=512,
)  # fmt: skip


def test_each_matrix_of_layers_of_several_kinds_is_gathered_in_both_passes():
    """Latents, a dense first layer and a shared expert: whatever their shapes, all of a layer's."""
    of_run = sizes.of(run_of(mesh__expert=3, mesh__fsdp=2, **LATENT))
    messages = [one for one in traffic.of(of_run) if one.purpose == "weights"]
    for leaf in of_run.weights:
        (gathered,) = (one for one in messages if one.name == leaf.name)
        number = 4 if "router" in leaf.axes else 2
        ways = 3 if experts.is_of_experts(leaf) else 1
        assert gathered.bytes * gathered.count == 2 * number * leaf.numbers / ways, leaf
    assert {leaf.axes[0] for leaf in of_run.weights} == {"layers", "first"}
    over_expert = [one for one in traffic.of(of_run) if one.purpose == "rows of experts"]
    assert sum(one.count for one in over_expert) == 5 * 3  # of four layers one is dense


def test_products_of_layers_of_several_kinds():
    """Forward each matrix that is not an expert's multiplies each token once: M is their number."""
    machine = machines.parse("v5p:2x2x1")
    of_run = sizes.of(run_of(4, mesh__fsdp=4, **LATENT))
    listed = operators.of(of_run, machine.core, operators.TPU)
    forward = sum(
        one.flops * one.count * of_run.run.model.num_layers
        for one in listed
        if one.moment == operators.FORWARD and one.part == operators.PRODUCTS
        and one.shape[0] == of_run.tokens
    )  # fmt: skip
    dense = sum(leaf.numbers for leaf in of_run.weights if not experts.is_of_experts(leaf))
    assert forward == pytest.approx(2 * of_run.tokens * dense)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (dict(experts__dispatch="capacity"), "dispatch='capacity'"),
        (dict(remat="none"), "remat='none'"),
        (dict(mesh__stage=2, mesh__fsdp=3, batch__accumulation=2), "mesh.stage=2"),
    ],
)
def test_what_is_not_counted_is_refused(keys, words):
    run = run_of(**dict(mesh__fsdp=6) | keys)
    assert words in experts.refusal(run, "TPU v5p") and "llmx.aot" in experts.refusal(
        run, "TPU v5p"
    )
    assert "on NVIDIA" in experts.refusal(run_of(mesh__fsdp=6), "NVIDIA H100 80GB HBM3")
    assert not experts.refusal(run_of(mesh__fsdp=6), "TPU v5p")
