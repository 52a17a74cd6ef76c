"""What is kept in the memory of the host, in programs compiled for TPU v5e."""

import functools
import tempfile
from typing import Any, NamedTuple

import pytest
from support import runs

from llmx import sharding
from llmx.aot import compiler, hlo_text, peak_memory, topologies
from llmx.aot.report import Memory
from llmx.sharding import trees

# Programs serve several tests: one worker has all. Each compiles for a minute or more.
pytestmark = [pytest.mark.aot, pytest.mark.xdist_group("offload"), pytest.mark.full_grid]

TOPOLOGY = topologies.parse("v5e:2x2")
LAYERS, WIDTH, ROWS, LENGTH = 16, 512, 16, 1024
MODEL = dict(
    num_layers=LAYERS, width=WIDTH, mlp_dim=2048, num_heads=4, num_kv_heads=4, head_dim=128,
    vocab_size=32768, max_positions=LENGTH,
)  # fmt: skip
INPUT = 2 * ROWS * LENGTH * WIDTH // TOPOLOGY.num_devices  # bytes of a layer's, in bf16
HOST_MEMORY = "S(5)"  # in a layout
ROUNDING = 1e-3  # of sizes: tiles, and scalars that nobody counts


class Program(NamedTuple):
    memory: Memory
    peak: int  # of main memory, from the buffers
    text: str
    state: Any


@functools.cache
def compiled(**keys) -> Program:
    config = runs.make_config(
        "llama3", model=MODEL, mesh={"fsdp": TOPOLOGY.num_devices}, precision="bf16",
        remat="full", batch__size=ROWS, batch__sequence_length=LENGTH, **keys,
    )  # fmt: skip
    recipe = runs.make_recipe(config, devices=topologies.devices(TOPOLOGY))
    with tempfile.TemporaryDirectory() as folder:
        options = dict(recipe.compiler_options()) | peak_memory.dump_options(folder)
        program = topologies.compile(runs.lower(recipe), TOPOLOGY.platform, options)
        peak = peak_memory.at_peak(peak_memory.read_dump(folder, "train_step"))
    memory, _ = compiler._memory(program, None, peak, TOPOLOGY)
    return Program(memory, peak.bytes, program.as_text(), recipe.abstract)


def matrices(tree: Any, where: str = "") -> int:
    """Bytes on one device of a tree's matrices."""
    arrays = trees.named(tree).items()
    found = {name: leaf for name, leaf in arrays if leaf.ndim >= 2 and where in name}
    return sharding.device_bytes(found)


def loops(program: Program) -> list:
    """All computations but the entry."""
    module = hlo_text.parse(program.text)
    return [each for each in module.computations.values() if each is not module.entry]


def beside(loop: Any, kind: str) -> list[bool]:
    """Of each transfer of a kind in a loop, from or to the host: whether work is done meanwhile."""
    found = []
    for start in loop.instructions:
        if start.op == f"{kind}-start" and HOST_MEMORY in start.type:
            (done,) = [user for user in loop.users[start.name] if user.op == f"{kind}-done"]
            span = loop.instructions[loop.position[start.name] : loop.position[done.name]]
            found.append(any(one.op in ("fusion", "custom-call") for one in span))
    return found


def test_the_optimizers_state_is_on_the_device_layer_by_layer():
    plain, found = compiled(), compiled(offload__optimizer=True)
    of_all, of_layers = (matrices(found.state.opt_state, where) for where in ("", "blocks/"))
    assert of_all - of_layers > 2 * of_layers // LAYERS
    saved = plain.memory.arguments - found.memory.arguments
    assert saved == pytest.approx(of_all, rel=ROUNDING)
    assert plain.memory.host == 0 and found.memory.host == pytest.approx(of_all, rel=ROUNDING)
    # Two layers at a time. Embedding and head come when activations are gone.
    assert found.peak <= plain.peak - of_all + 2 * of_layers // LAYERS
    assert found.memory.peak == found.peak


def test_weights_are_on_the_device_layer_by_layer():
    plain = compiled(offload__optimizer=True)
    found = compiled(offload__optimizer=True, offload__parameters=True)
    weights = matrices(found.state.params, "kernel")
    assert plain.memory.arguments - found.memory.arguments == pytest.approx(weights, rel=ROUNDING)
    assert found.memory.host - plain.memory.host == pytest.approx(weights, rel=ROUNDING)
    # By less than their size: so small a model's weights were partly in the memory on the chip.
    assert found.peak < plain.peak


def test_weights_are_fetched_beside_products():
    """In the loops of both passes, from the start of each transfer to its end."""
    program = compiled(offload__optimizer=True, offload__parameters=True)
    in_host = [leaf.sharding.memory_kind for leaf in trees.named(program.state.params).values()]
    of_a_layer = in_host.count("pinned_host")
    found = [beside(loop, "dynamic-slice") for loop in loops(program)]
    of_passes = [each for each in found if len(each) == of_a_layer]
    assert of_passes == [[True] * of_a_layer] * 2


def test_transfers_run_beside_the_update():
    """In the loop over layers other work is done from the start of a transfer to its end."""
    program = compiled(offload__optimizer=True)
    in_blocks = [
        name for name, leaf in trees.named(program.state.opt_state).items()
        if "blocks/" in name and leaf.ndim >= 2
    ]  # fmt: skip
    for kind in ("dynamic-slice", "dynamic-update-slice"):
        found = [one for loop in loops(program) for one in beside(loop, kind)]
        assert len(found) == len(in_blocks)
        # What is updated first waits for its two moments.
        assert sum(found) >= len(in_blocks) - 2


def test_inputs_of_layers_are_in_host_memory():
    plain, found = compiled(), compiled(offload__saves=("input",))
    assert plain.memory.host == 0
    assert found.memory.host == pytest.approx(LAYERS * INPUT, rel=ROUNDING)
    assert found.memory.arguments == plain.memory.arguments
    # What remains is the peak of another moment, with few of them.
    assert found.peak <= plain.peak - LAYERS // 2 * INPUT
    assert found.memory.peak == found.peak
