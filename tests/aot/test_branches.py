"""What stages of a pipeline do inside branches that other stages do not take: no device may wait
there for one that took another, in programs compiled for TPUs and GPUs.
"""

import re

import pytest
from support import runs

from llmx.aot import hlo_text, topologies
from llmx.pipeline.schedules import SCHEDULES

pytestmark = pytest.mark.aot

MODEL = dict(
    num_layers=4, width=256, num_heads=4, num_kv_heads=4, head_dim=64, mlp_dim=512, vocab_size=512,
    max_positions=512,
)  # fmt: skip
TOPOLOGIES = {"tpu": "v5p:2x2x1", "gpu": "h100:4"}


def make_recipe(platform: str, schedule: str, mesh: dict, **keys):
    config = runs.make_config(
        "llama3", model=MODEL, mesh=mesh, precision="bf16", remat="full", batch__size=8,
        batch__accumulation=4, batch__sequence_length=512, pipeline__schedule=schedule, **keys,
    )  # fmt: skip
    devices = topologies.devices(topologies.parse(TOPOLOGIES[platform]))
    return runs.make_recipe(config, devices=devices)


def collectives_in_branches(module: hlo_text.Module) -> list[hlo_text.Instruction]:
    """Those of the operations in one tick: idle, forward, backward, weight.

    The conditionals of embedding and head have two branches, and all devices take the same.
    """
    conditionals = [
        each for computation in module.computations.values() for each in computation.instructions
        if each.op == "conditional" and len(each.called) > 2
    ]  # fmt: skip
    assert conditionals
    # `llmx.pipeline.tick` says how often each is taken: on average, and as the longest of a tick.
    # Rings have conditionals of their own, whose branches are data.
    told = [(each, said) for each in conditionals if (said := hlo_text.expected_branches(each))]
    assert told
    for each, (taken, longest) in told:
        assert len(taken) == len(longest) == len(each.called)
        assert sum(taken) == sum(longest) == 1 and taken[0] >= longest[0]  # some are idle
    found, computations = [], [one for each in conditionals for one in module.called(each)]
    while computations:
        for each in computations.pop().instructions:
            found += [each] if hlo_text.collective_kind(each) else []
            computations += module.called(each)
    return found


CASES = {
    "fsdp": dict(mesh=dict(stage=2, fsdp=2)),
    "ulysses": dict(mesh=dict(stage=2, sequence=2), attention__ulysses=2),
    "tensor": dict(mesh=dict(stage=2, tensor=2)),
    "ring": dict(mesh=dict(stage=2, sequence=2)),
}
BRANCHING = ("zb_h1", "zb_v", "dual_pipe_v")
# Every schedule with every case, each on one platform in turn; rings on TPU, see below. The V
# schedules have one half of the cases each; the other half is compiled with `pytest --full-grid`.
COVER = [
    pytest.param(
        "tpu" if case == "ring" or (row + column) % 2 else "gpu", schedule, case,
        marks=[pytest.mark.full_grid] * (row > 0 and (row + column) % 2),
    )
    for row, schedule in enumerate(BRANCHING)
    for column, case in enumerate(CASES)
]  # fmt: skip


@pytest.mark.parametrize(("platform", "schedule", "case"), COVER)
def test_a_branch_waits_for_devices_of_its_stage_only(platform, schedule, case):
    recipe = make_recipe(platform, schedule, **CASES[case])
    program = topologies.compile(runs.lower(recipe), platform, recipe.compiler_options())
    module = hlo_text.parse(program.as_text())
    inside = collectives_in_branches(module)
    assert inside or case == "fsdp"  # weights so small may be gathered before all ticks
    for each in inside:
        assert platform == "tpu" or hlo_text.collective_kind(each) != "collective-permute"
        groups = hlo_text.groups_of(each, 4)
        assert groups is not None, each.label
        for group in groups:
            assert len({device // 2 for device in group}) == 1, each.label  # 0 and 1: a stage


def most_branches(text: str) -> int:
    """Of the conditionals in a StableHLO text."""
    most, lines = 0, text.splitlines()
    for number, line in enumerate(lines):
        if '"stablehlo.case"' in line:
            indent = re.match(" *", line)[0]
            rest = lines[number + 1 :]
            end = next(at for at, later in enumerate(rest) if later.startswith(f"{indent}}})"))
            most = max(most, 1 + sum(later.startswith(f"{indent}}}, {{") for later in rest[:end]))
    return most


def test_stages_of_other_schedules_take_no_branches():
    """A conditional of operations has more branches than the two of a head."""
    lowered = lambda *case: runs.lower(make_recipe(*case, **CASES["fsdp"])).as_text()  # noqa: E731
    for schedule in {*SCHEDULES} - {*BRANCHING}:
        expected = 2 if schedule == "interleaved_1f1b" else 0
        assert most_branches(lowered("gpu", schedule)) == expected, schedule
    assert most_branches(lowered("tpu", "zb_h1")) > 2


@pytest.mark.parametrize("schedule", BRANCHING)
def test_rings_in_branches_are_refused_on_gpus(schedule):
    keys = dict(mesh=dict(stage=2, sequence=2))
    with pytest.raises(ValueError, match=rf"'{schedule}' with mesh.sequence=2 .* use zb_1f1b"):
        make_recipe("gpu", schedule, **keys)
    make_recipe("gpu", schedule, **keys, attention__ulysses=2)
    make_recipe("gpu", "zb_1f1b", **keys)
    make_recipe("tpu", schedule, **keys)


def test_rings_in_layers_of_kinds_that_differ_between_stages_are_refused_on_gpus():
    """Stages then branch inside a chunk, on the kind of each layer."""
    mixed = runs.make_config(
        "gemma3", model=MODEL | dict(layer_pattern=("local", "local", "global"), num_layers=6),
        mesh=dict(stage=2, sequence=2), precision="bf16", batch__size=8, batch__accumulation=4,
        batch__sequence_length=512,
    )  # fmt: skip
    at = lambda platform: topologies.devices(topologies.parse(TOPOLOGIES[platform]))  # noqa: E731
    runs.make_recipe(mixed, devices=at("gpu"))  # three layers of the same kinds on each stage
    mixed.pipeline.layers = (4, 2)
    with pytest.raises(ValueError, match=r"pipeline.layers=\(4, 2\) with mesh.sequence=2 .*kinds"):
        runs.make_recipe(mixed, devices=at("gpu"))
    runs.make_recipe(mixed, devices=at("tpu"))
    mixed.attention.ulysses = 2
    runs.make_recipe(mixed, devices=at("gpu"))
