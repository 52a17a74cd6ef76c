"""Options that hide collectives: who chooses them, and what is left where one is refused."""

import functools

import jax
import pytest

from llmx.runtime import compiler_options, hardware, launch
from llmx.sharding import scatter

V5E, GATHER = "TPU v5 lite", "xla_enable_async_all_gather"
LARGE = 32  # devices: a slice of v5e on which nothing is exchanged
ROW = compiler_options.OVERLAP["tpu_v5e"]


@pytest.fixture(autouse=True)
def no_flags(monkeypatch):
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)


def test_a_row_is_of_a_known_chip():
    tables = (
        compiler_options.OVERLAP, compiler_options.EXCHANGED, compiler_options.WITH_TENSOR,
        compiler_options.WITH_EXPERT,
    )  # fmt: skip
    rows = {chip for table in tables for chip in table}
    assert rows <= set(hardware.CHIPS)


def test_auto_is_the_row_of_the_chip():
    assert compiler_options.wanted(launch.LaunchConfig(), V5E, LARGE) == ROW


def test_all_to_alls_are_asynchronous_where_sums_are_exchanged():
    """Two packages that do not import each other agree."""
    kinds = hardware.DEVICE_KINDS.items()
    exchanged = compiler_options.EXCHANGED
    assert {k: exchanged[c][0] for k, c in kinds if c in exchanged} == scatter.EXCHANGING
    small = compiler_options.wanted(launch.LaunchConfig(), V5E, 16)
    assert small == ROW | {"xla_tpu_enable_async_all_to_all": True}


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA H100 80GB HBM3", "TPU v99"])
def test_a_chip_without_a_row_gets_none(kind):
    assert compiler_options.wanted(launch.LaunchConfig(), kind, 8) == {}


def test_none_switches_them_off():
    assert compiler_options.wanted(launch.LaunchConfig(overlap="none"), V5E, LARGE) == {}


def test_an_option_of_the_user_goes_first():
    config = launch.LaunchConfig(compiler_options=(f"{GATHER}=false", "xla_b=2"))
    chosen = compiler_options.wanted(config, V5E, LARGE)
    assert chosen == {name: value for name, value in ROW.items() if name != GATHER}


@pytest.mark.parametrize("variable", ["XLA_FLAGS", "LIBTPU_INIT_ARGS"])
def test_a_flag_in_the_environment_goes_first(variable, monkeypatch):
    monkeypatch.setenv(variable, f"--xla_other=1 --{GATHER}=false")
    assert GATHER not in compiler_options.wanted(launch.LaunchConfig(), V5E, LARGE)


def test_on_cpu_only_the_users_options_remain():
    config = launch.LaunchConfig(compiler_options=("xla_b=2",))
    assert compiler_options.options(config, jax.devices()) == {"xla_b": 2}


def test_a_refused_option_is_left_out_with_a_note():
    """Compiled for CPU, whose compiler knows the first and the last of these."""
    known = ("xla_embed_ir_in_executable", "xla_cpu_enable_fast_math")
    chosen = {known[0]: True, "xla_no_such_option": True, known[1]: False}
    notes = []
    left = compiler_options.accepted(chosen, tuple(jax.devices()), note=notes.append)
    assert left == {known[0]: True, known[1]: False}
    (note,) = notes
    assert "without xla_no_such_option=True" in note and "\n" not in note
    again = compiler_options.accepted(left, tuple(jax.devices()), note=notes.append)
    assert again == left and len(notes) == 1


@pytest.mark.aot
@pytest.mark.parametrize(
    ("topology", "chip"),
    [
        ("v4:2x2x1", "tpu_v4"), ("v5e:2x2", "tpu_v5e"), ("v5p:2x2x1", "tpu_v5p"),
        ("v6e:2x2", "tpu_v6e"), ("tpu7x:2x2x1", "tpu7x"),
    ],
)  # fmt: skip
def test_the_compiler_here_takes_each_row(topology, chip):
    from llmx.aot import topologies

    devices = topologies.devices(topology)
    notes = []
    config = launch.LaunchConfig()
    row = compiler_options.wanted(config, devices[0].device_kind, len(devices), {"expert": 2})
    assert row.items() >= compiler_options.OVERLAP[chip].items()
    assert row.items() >= compiler_options.WITH_EXPERT.get(chip, {}).items()
    chosen = row | {"xla_no_such_option": True}
    assert compiler_options.accepted(chosen, tuple(devices), note=notes.append) == row
    assert len(notes) == 1 and "xla_no_such_option" in notes[0]


H100 = "NVIDIA H100 80GB HBM3"
LIMIT = "xla_gpu_experimental_parallel_collective_overlap_limit"


def test_rows_of_experts_travel_beside_other_work():
    chosen = functools.partial(compiler_options.wanted, launch.LaunchConfig(), "TPU v5", 64)
    (name,) = compiler_options.WITH_EXPERT["tpu_v5p"]
    assert name not in chosen({"expert": 1, "fsdp": 64}) and chosen({"expert": 4})[name]


def test_gpus_have_a_row_where_activations_travel(monkeypatch):
    chosen = functools.partial(compiler_options.wanted, launch.LaunchConfig(), H100, 8)
    row = compiler_options.WITH_TENSOR["h100_sxm"]
    assert chosen() == {} and chosen({"tensor": 2}) == row
    # What a launch adds to XLA_FLAGS by itself does not go before it; another value does.
    ours = launch.merge_flags("", launch.XLA_FLAGS["gpu"])
    monkeypatch.setenv("XLA_FLAGS", f"{ours} --{LIMIT}=1")
    assert chosen({"tensor": 2}) == {name: value for name, value in row.items() if name != LIMIT}


@pytest.mark.aot
def test_the_gpu_compiler_takes_its_row():
    from llmx.aot import topologies

    devices, notes = topologies.devices("h100:2"), []
    row = compiler_options.WITH_TENSOR["h100_sxm"]
    assert compiler_options.accepted(row, tuple(devices), note=notes.append) == row and not notes
