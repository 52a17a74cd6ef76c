"""The arrays at a program's peak: against programs whose memory is known by arithmetic."""

import jax
import jax.numpy as jnp
import pytest

from llmx.aot import peak_memory

L, B, D = 8, 256, 512
MATRIX, ROW = 4 * D * D, 4 * B * D
SLACK = 4096  # bytes: counters, tuples, alignment


def compiled(function, *arguments, folder, **options):
    lowered = jax.jit(function, **options).lower(*arguments)
    program = lowered.compile(compiler_options=peak_memory.dump_options(folder))
    return program, peak_memory.read_dump(folder, function.__name__)


def weights():
    return jax.ShapeDtypeStruct((L, D, D), jnp.float32)


def rows():
    return jax.ShapeDtypeStruct((B, D), jnp.float32)


def saves_its_inputs(state, x):
    def layer(x, weight):
        return jnp.tanh(x @ weight), x

    x, inputs = jax.lax.scan(layer, x, state)
    return jnp.sum(inputs * jnp.cos(x))


def test_a_scan_that_saves(tmp_path):
    program, dump = compiled(saves_its_inputs, weights(), rows(), folder=tmp_path)
    peak = peak_memory.at_peak(dump)
    arguments = [each for each in peak.buffers if each.argument]
    assert {(each.operation, each.bytes) for each in arguments} == {
        ("state", L * MATRIX), ("x", ROW),
    }  # fmt: skip
    (saved,) = [each for each in peak.buffers if each.shape == f"f32[{L},{B},{D}]"]
    assert saved.bytes == L * ROW and not saved.argument
    assert "dynamic_update_slice" in saved.operation
    line = saves_its_inputs.__code__.co_firstlineno + 4
    assert saved.source == f"test_peak_memory.py:{line}"
    # Beside them two layers' activations and perhaps one matrix.
    least = L * MATRIX + ROW + L * ROW + 2 * ROW
    assert least <= peak.bytes <= least + MATRIX + ROW + SLACK
    analysis = program.memory_analysis()
    assert peak.bytes <= analysis.argument_size_in_bytes + analysis.temp_size_in_bytes + SLACK


def test_equal_arrays_are_grouped(tmp_path):
    def two_squares(x, y):
        a, b = jnp.sin(x) @ jnp.cos(x), jnp.sin(y) @ jnp.cos(y)
        return a @ b

    square = jax.ShapeDtypeStruct((D, D), jnp.float32)
    _, dump = compiled(two_squares, square, square, folder=tmp_path)
    peak = peak_memory.at_peak(dump)
    assert sum(each.bytes for each in peak.buffers if each.argument) == 2 * MATRIX
    temporary = [each for each in peak.buffers if not each.argument and each.bytes >= MATRIX]
    # At most: two factors, the other product.
    assert 2 * MATRIX <= sum(each.bytes for each in temporary) <= 4 * MATRIX
    assert all(each.bytes == each.count * MATRIX for each in temporary)
    assert peak.buffers == tuple(sorted(peak.buffers, key=lambda each: -each.bytes))


def test_reused_memory_counts_once():
    assignment = """BufferAssignment:
allocation 0: size 100, parameter 0, shape |f32[25]| at ShapeIndex {}, maybe-live-out:
 value: <1 state @0> (size=100,offset=0): f32[25]{0}
 value: <2 new_state @0> (size=100,offset=0): f32[25]{0}
allocation 1: size 4000, page 0, color 1, preallocated-temp:
 value: <3 in_vector_memory @1> (size=4000,offset=0): f32[1000]{0:S(1)}
allocation 2: size 300, page 0, preallocated-temp:
 value: <4 init @0> (size=200,offset=0): f32[50]{0}
 value: <5 loop{1} (phi) @0> (size=200,offset=0): f32[50]{0}
 value: <6 small @0> (size=40,offset=200): f32[10]{0}
 value: <7 later @0> (size=100,offset=200): f32[25]{0}
allocation 3: size 8, thread-local:
 value: <8 counter @0> (size=8,offset=0): f32[2]{0}
"""
    live = """HloLiveRange (max 20):
  InstructionSequence:
    0:state
  BufferLiveRange:
    state{}:0-20
    new_state{}:9-20
    init{}:1-4
    loop{1}:4-9
    small{}:5-6
    later{}:12-14
    in_vector_memory{}:1-20
    counter{}:1-2
  Live ranges at 5 (peak):
    loop{1}: 200 bytes (cumulative: 200 bytes)
"""
    metadata = '{op_name="jit(f)/transpose(jvp())/while/body/zeros"}'
    program = (
        "HloModule jit_f, is_scheduled=true\n\nENTRY %main (c: f32[]) -> f32[50] {\n"
        f"  ROOT %init = f32[50]{{0}} broadcast(%c), metadata={metadata}\n}}\n"
    )
    peak = peak_memory.at_peak(peak_memory.Dump("", program, assignment, live))
    assert peak.bytes == 100 + 200 + 40
    assert [(each.shape, each.bytes, each.argument) for each in peak.buffers] == [
        ("f32[50]", 200, False), ("f32[25]", 100, True), ("f32[10]", 40, False),
    ]  # fmt: skip
    assert peak.buffers[0].operation == "backward/zeros"


def test_without_a_dump_there_is_no_peak(tmp_path):
    assert peak_memory.at_peak(peak_memory.read_dump(tmp_path, "anything")) is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("jit(train_step)/jvp()/while/body/closed_call/dot_general", "forward/dot_general"),
        (
            "transpose(jvp())/while/body/(rematted_computation/reshard:reshard)",
            "backward/recomputed/reshard",
        ),
        (r"state.params[\'blocks\'][\'mlp\'][\'up\']", "state.params/blocks/mlp/up"),
        ("state.opt_state[0].mu['head']", "state.opt_state[0].mu/head"),
        ("convert of state.params['head']", "convert of state.params/head"),
        ("", ""),
    ],
)
def test_operations_for_people(name, words):
    assert peak_memory.readable(name) == words
