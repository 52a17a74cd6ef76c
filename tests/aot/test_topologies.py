"""Names of machines mean what they say, impossible ones are refused, and devices are as asked."""

import dataclasses
import importlib.util
import subprocess
import sys
import types

import pytest

from llmx.aot import topologies
from llmx.runtime import hardware, launch

GIB = 2**30


@pytest.mark.parametrize(
    ("name", "platform", "num_devices", "num_slices", "chip"),
    [
        ("v4:2x2x2", "tpu", 8, 1, "tpu_v4"),
        ("v5e:1x1", "tpu", 1, 1, "tpu_v5e"),
        ("v5e:16x16", "tpu", 256, 1, "tpu_v5e"),
        ("4@v5e:16x16", "tpu", 1024, 4, "tpu_v5e"),
        ("v5p:2x2x2", "tpu", 8, 1, "tpu_v5p"),
        ("v5p:8x8x8", "tpu", 512, 1, "tpu_v5p"),
        ("v5p:16x20x28", "tpu", 8960, 1, "tpu_v5p"),
        ("v6e:8x8", "tpu", 64, 1, "tpu_v6e"),
        ("tpu7x:2x2x1", "tpu", 8, 1, "tpu7x"),  # two devices a chip
        ("tpu7x:16x24x24", "tpu", 18432, 1, "tpu7x"),
        ("h100:8", "gpu", 8, 1, "h100_sxm"),
        ("h100:4x8", "gpu", 32, 1, "h100_sxm"),
        ("h200:1", "gpu", 1, 1, "h200"),
        ("a100:2x4", "gpu", 8, 1, "a100_80gb"),
        ("a100_40gb:8", "gpu", 8, 1, "a100_40gb"),
        ("b200:128x8", "gpu", 1024, 1, "b200"),
    ],
)
def test_names(name, platform, num_devices, num_slices, chip):
    found = topologies.parse(name)
    assert (found.name, found.platform, found.num_devices, found.num_slices) == (
        name, platform, num_devices, num_slices,
    )  # fmt: skip
    assert found.chip is hardware.CHIPS[chip]
    assert hardware.chip_of(found.device_kind) is found.chip
    # A little less than the chip has; the pages of v5p say less than that.
    assert 0.94 * found.chip.device_hbm_bytes < found.hbm_bytes < 1.01 * found.chip.device_hbm_bytes


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("v5e:16x32", "nearest are v5e:16x16"),  # libtpu would end the process
        ("v6e:16x32", "nearest are v6e:16x16"),
        ("v5p:3x3x3", "no v5p slice has this shape; the nearest are v5p:2x4x4"),
        ("v5p:4x2x2", "nearest are v5p:2x2x4"),
        ("v5p:8", "nearest are v5p:2x2x2"),
        ("v4:1x1x1", "nearest are v4:2x2x1"),
        ("v5p:24x24x24", "the largest is 16x20x28"),
        ("v5e:2x2x1", "nearest are v5e:2x2"),
        ("v7x:2x2x1", "did you mean tpu7x?"),
        ("ironwood:2x2x1", "did you mean tpu7x?"),
        ("h1000:8", "did you mean h100?"),
        ("h100:16", "a host has 1 to 8 GPUs: write hosts x GPUs per host, here h100:2x8"),
        ("h100:0", "a host has 1 to 8 GPUs"),
        ("h100:2x2x2", "here h100:1x8"),
        ("2@h100:8", "counts slices of TPUs"),
        ("0@v5e:4x4", "at least 1"),
        ("v5e:16x16*4", "write the slices first: 4@v5e:16x16"),
        ("v5p", "is not FAMILY:SHAPE: write for example v5p:2x2x2"),
        ("", "is not FAMILY:SHAPE"),
        ("999@v5e:16x16", "at most 65,536 are supported"),
    ],
)
def test_wrong_names(name, words):
    with pytest.raises(ValueError) as error:
        topologies.parse(name)
    assert words in str(error.value) and repr(name) in str(error.value)


@pytest.mark.parametrize("family", topologies.TPUS)
def test_every_shape_of_a_slice_is_a_name(family):
    shapes = topologies.slice_shapes(family)
    assert len(set(shapes)) == len(shapes)
    for shape in shapes:
        found = topologies.parse(f"{family}:{'x'.join(map(str, shape))}")
        assert found.num_devices <= found.chip.max_domain * found.chip.devices_per_chip
    assert shapes[-1] == topologies.TPUS[family].largest


def test_names_cost_no_import_of_jax():
    code = (
        "import sys; from llmx.aot import topologies; topologies.parse('v5p:2x2x2')\n"
        "print('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_rings():
    assert topologies.wraps((4, 4, 8)) == (True, True, True)
    assert topologies.wraps((2, 4, 4)) == (False, False, False)
    assert topologies.wraps((8, 16)) == (False, True, False)


@pytest.mark.parametrize(
    ("name", "package"), [("v5e:2x2", "libtpu"), ("h100:8", "jax_cuda13_plugin")]
)
def test_missing_compiler(name, package, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    with pytest.raises(
        topologies.CompilerMissing, match="pip install 'jax\\[tpu,cuda13-local\\]=="
    ) as error:
        topologies.devices(name)
    assert package in str(error.value)


def test_other_devices_than_asked_for_are_an_error():
    topology = topologies.parse("v5e:2x2")
    device = types.SimpleNamespace(device_kind="TPU v5 lite")
    topologies._check(topology, [device] * 4)
    for wrong in ([device] * 2, [types.SimpleNamespace(device_kind="cpu")] * 4, []):
        with pytest.raises(RuntimeError, match=f"gives {len(wrong)} of"):
            topologies._check(topology, wrong)
    with pytest.raises(RuntimeError, match="in 2 slices"):
        topologies._check(dataclasses.replace(topology, num_slices=2), [device] * 8)


# ---------------------------------------------------------------------------- with the compilers


@pytest.mark.aot
@pytest.mark.parametrize(
    "name",
    ["v4:2x2x1", "v4:4x4x4", "v5e:1x1", "v5e:2x4", "v5e:16x16", "3@v5e:2x2", "v5p:1x1x1",
     "v5p:2x2x2", "v5p:16x20x28", "v6e:8x16", "tpu7x:1x1x1", "tpu7x:4x4x8", "h100:1", "h100:4x8",
     "h200:2", "a100:8", "a100_40gb:8", "b200:2x8"],
)  # fmt: skip
def test_devices(name):
    topology = topologies.parse(name)
    found = topologies.devices(name)
    assert len(found) == topology.num_devices == len({device.id for device in found})
    assert {device.device_kind for device in found} == {topology.device_kind}
    assert {device.platform for device in found} == {topology.platform}
    if topology.platform == "gpu":
        assert len({device.process_index for device in found}) == topology.shape[0]


@pytest.mark.aot
@pytest.mark.parametrize("family", topologies.TPUS)
def test_memory_of_a_device_is_what_the_compiler_says(family):
    import jax
    import jax.numpy as jnp

    from llmx.aot import compiler

    topology = topologies.parse(
        f"{family}:{'2x2' if len(topologies.TPUS[family].largest) == 2 else '2x2x1'}"
    )
    to = jax.sharding.SingleDeviceSharding(topologies.devices(topology)[0])
    large = jax.ShapeDtypeStruct((256, 2**30), jnp.float32, sharding=to)
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        jax.jit(lambda x: x @ x.T @ jnp.sin(x)).lower(large).compile()
    refusal = compiler.parse_out_of_memory(str(error.value))
    assert refusal.needed > 2**40
    # The message has two decimals, and versions of libtpu differ in the last.
    assert abs(refusal.available - topology.hbm_bytes) <= 0.011 * GIB


@pytest.mark.aot
def test_rings_change_reductions():
    """Over one axis of a torus a reduce-scatter is one; without the wraparound it is not."""
    import jax
    import jax.numpy as jnp

    from llmx import sharding

    mesh = sharding.make_mesh({"fsdp": 16, "tensor": 4}, devices=topologies.devices("v5p:4x4x4"))
    spec = jax.sharding.PartitionSpec
    scatter = jax.shard_map(
        lambda x: jax.lax.psum_scatter(x, "fsdp", tiled=True), mesh=mesh,
        in_specs=spec(None, "tensor"), out_specs=spec("fsdp", "tensor"), check_vma=False,
    )  # fmt: skip
    to = jax.sharding.NamedSharding(mesh, spec(None, "tensor"))
    array = jax.ShapeDtypeStruct((4096, 16384), jnp.bfloat16, sharding=to)
    text = jax.jit(scatter).lower(array).compile().as_text()
    assert " reduce-scatter(" in text and " all-reduce(" not in text


@pytest.mark.aot
def test_flags_reach_the_gpu_compiler(tmp_path, monkeypatch):
    import jax
    import jax.numpy as jnp

    from llmx.aot import peak_memory

    to = jax.sharding.SingleDeviceSharding(topologies.devices("h100:1")[0])
    array = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16, sharding=to)
    lowered = jax.jit(lambda x: x @ x).lower(array)

    def options(folder) -> str:
        topologies.compile(lowered, "gpu", peak_memory.dump_options(folder))
        (path,) = folder.glob("*.debug_options")
        return path.read_text()

    wanted = launch.XLA_FLAGS["gpu"]
    threshold = wanted["xla_gpu_all_gather_combine_threshold_bytes"]
    written = options(tmp_path / "llmx")
    assert "xla_gpu_autotune_level: 0" in written
    assert f"xla_gpu_all_gather_combine_threshold_bytes: {threshold}" in written
    # What the user says goes first.
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_all_gather_combine_threshold_bytes=12345")
    assert f"threshold_bytes: {threshold}" not in options(tmp_path / "user").partition("reduce")[0]


@pytest.mark.aot
def test_refusals_of_compilers_are_not_swallowed():
    import jax
    import jax.numpy as jnp

    to = jax.sharding.SingleDeviceSharding(topologies.devices("v5e:1x1")[0])
    lowered = jax.jit(jnp.sin).lower(jax.ShapeDtypeStruct((8,), jnp.float32, sharding=to))
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option: 'xla_no_such'"):
        topologies.compile(lowered, "tpu", {"xla_no_such": True})
