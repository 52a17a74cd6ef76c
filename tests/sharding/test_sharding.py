"""From logical axes to shardings, on any pytree, and training under every layout outside llmx."""

import dataclasses
import importlib.util
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from llmx import sharding
from llmx.model import dot, precision

# A few steps of AdamW in fp32 with sums in another order; the loss is of size 1.
LOSS_TOLERANCE = 1e-5
POLICY = precision.POLICIES["fp32"]
PARAMETER_TOLERANCE = 1e-4

REPOSITORY = pathlib.Path(__file__).parents[2]
ZERO3 = sharding.LAYOUTS["zero3"]


def load_example():
    path = REPOSITORY / "scripts" / "shard_plain_jax.py"
    spec = importlib.util.spec_from_file_location("shard_plain_jax", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def mesh_of(**sizes):
    num_devices = int(np.prod(list(sizes.values())))
    devices = jax.devices()[:num_devices]
    return sharding.make_mesh(sizes, devices=devices, axis_type=AxisType.Auto)


# ---------------------------------------------------------------------------------------- one spec


def test_spec_splits_by_the_table():
    mesh = mesh_of(data=2, fsdp=2, tensor=2)
    spec = lambda *axes: sharding.spec(axes, ZERO3.parameters, mesh)  # noqa: E731
    assert spec("embed", "mlp") == PartitionSpec(("data", "fsdp"), "tensor")
    assert spec("layers", "heads", None) == PartitionSpec(None, "tensor", None)
    assert spec() == PartitionSpec()


def test_axes_of_size_one_and_missing_axes_drop_out():
    axes = ("embed", "mlp")
    assert sharding.spec(axes, ZERO3.parameters, mesh_of(data=1, fsdp=4, tensor=1)) == (
        PartitionSpec("fsdp", None)
    )
    assert sharding.spec(axes, ZERO3.parameters, mesh_of(replica=4)) == PartitionSpec(None, None)
    assert sharding.spec(("batch",), ZERO3.activations, mesh_of(data=2)) == PartitionSpec("data")


@pytest.mark.parametrize(
    ("axes", "shape", "words"),
    [
        (("embed", "mlpp"), None, ["'mlpp' is unknown", "mlp,", "or None"]),
        (("embed",), (8, 8), ["('embed',) name 1", "(8, 8) with 2", "one name (or None) per"]),
        (("mlp", "heads"), None, ["'tensor' would split both 'mlp' and 'heads'", "one dimension"]),
        (("embed", "mlp"), (8, 3), ["dimension 1 ('mlp') of shape (8, 3)", "tensor2",
                                    "3 is not a multiple of 2", "pad it, or use a smaller"]),
        (("embed", None), (6, 3), ["dimension 0 ('embed')", "data2 x fsdp2",
                                   "6 is not a multiple of 4", "pad it"]),
    ],
)  # fmt: skip
def test_spec_errors_name_value_limit_and_remedy(axes, shape, words):
    mesh = mesh_of(data=2, fsdp=2, tensor=2)
    with pytest.raises(ValueError) as error:
        sharding.spec(axes, ZERO3.parameters, mesh, shape=shape)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_parts_of_specs():
    assert sharding.mesh_axes(None) == ()
    assert sharding.mesh_axes("data") == ("data",)
    assert sharding.mesh_axes(("data", "fsdp")) == ("data", "fsdp")
    split = PartitionSpec(("data", "fsdp", "tensor"), "expert", None)
    assert sharding.without(split, ("data", "fsdp")) == PartitionSpec("tensor", "expert", None)
    assert sharding.without(split, ("tensor", "expert")) == PartitionSpec(
        ("data", "fsdp"), None, None
    )


def test_bytes_of_a_tree_on_one_device():
    mesh = mesh_of(data=2, tensor=4)
    to = lambda *spec: NamedSharding(mesh, PartitionSpec(*spec))  # noqa: E731
    tree = {
        "shape": jax.ShapeDtypeStruct((8, 12), jnp.bfloat16, sharding=to("data", "tensor")),
        "array": [jax.device_put(np.ones((8, 3), np.float32), to("data"))],
        "none": None,
    }
    assert sharding.device_bytes(tree) == 2 * (4 * 3) + 4 * (4 * 3)
    assert sharding.device_bytes(()) == 0


# ------------------------------------------------------------------------------------------ meshes


def test_sizes_are_resolved():
    assert sharding.resolve_sizes({"data": -1, "tensor": 2}, 8) == {"data": 4, "tensor": 2}
    assert sharding.resolve_sizes({"data": 8}, 8) == {"data": 8}


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"data": 0, "tensor": 2}, ["{'data': 0}", "at least 1, or -1"]),
        ({"data": -2}, ["{'data': -2}", "at least 1, or -1"]),
        ({"data": -1, "fsdp": -1}, ["['data', 'fsdp'] are all -1", "only one"]),
        ({"data": -1, "tensor": 3}, ["8 devices", "multiply to 3", "does not divide 8"]),
        ({"data": 2, "tensor": 2}, ["data2 x tensor2 needs 4", "there are 8", "to -1", "to 8"]),
        ({"data": 1}, ["of one device needs 1", "there are 8"]),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, words):
    with pytest.raises(ValueError) as error:
        sharding.resolve_sizes(sizes, 8)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_meshes_as_text():
    assert sharding.mesh_text({"data": 2, "fsdp": 1, "tensor": -1}) == "data2 x tensor-1"
    assert sharding.mesh_text({"data": 1, "fsdp": 1}) == "one device"


def test_make_mesh_takes_the_rest_and_is_explicit():
    mesh = sharding.make_mesh({"data": -1, "fsdp": 1, "tensor": 2})
    assert dict(mesh.shape) == {"data": 4, "fsdp": 1, "tensor": 2}
    assert set(mesh.axis_types) == {AxisType.Explicit}
    neighbours = [device.id for device in mesh.devices[0, 0]]
    assert neighbours == [0, 1]  # the innermost axis joins neighbouring devices


def test_across_slices():
    mesh = sharding.make_mesh({"data": 1, "fsdp": 8}, across_slices=("data",))
    assert dict(mesh.shape) == {"data": 1, "fsdp": 8}
    with pytest.raises(ValueError, match=r"\['node'\]: the axes are \('data',\)"):
        sharding.make_mesh({"data": 8}, across_slices=("node",))
    with pytest.raises(ValueError, match=r"\('data',\) multiply to 2 and there are 1 processes.*1"):
        sharding.make_mesh({"data": 2, "fsdp": 4}, across_slices=("data",))


# ----------------------------------------------------------------------------------------- layouts

# On a mesh of data2 x fsdp2 x tensor2: how an ("embed", "mlp") matrix is split in the tables
# parameters, gradients and optimizer.
WHOLE, FAST, ALL = (PartitionSpec(width, "tensor") for width in (None, "fsdp", ("data", "fsdp")))
EXPECTED = {
    "ddp": (WHOLE, WHOLE, WHOLE),
    "zero1": (WHOLE, WHOLE, ALL),
    "zero2": (WHOLE, ALL, ALL),
    "zero3": (ALL, ALL, ALL),
    "hsdp": (FAST, FAST, FAST),
}


def test_devices_along_a_row_share_the_state():
    """They hold the same weights and see other tokens: to ZeRO they are replicas."""
    mesh = mesh_of(data=2, fsdp=2, sequence=2)
    embed = lambda name: sharding.spec(  # noqa: E731
        ("embed",), sharding.make_layout(name).parameters, mesh
    )
    assert embed("zero3") == PartitionSpec(("data", "fsdp", "sequence"))
    assert embed("hsdp") == PartitionSpec(("fsdp", "sequence"))
    assert embed("zero2") == PartitionSpec(None)


@pytest.mark.parametrize("name", sharding.LAYOUTS)
def test_layouts_split_what_their_names_say(name):
    mesh, layout = mesh_of(data=2, fsdp=2, tensor=2), sharding.make_layout(name)
    tables = (layout.parameters, layout.gradients, layout.optimizer)
    found = tuple(sharding.spec(("embed", "mlp"), table, mesh) for table in tables)
    assert found == EXPECTED[name]
    batch = sharding.spec(("batch", "sequence"), layout.activations, mesh)
    assert batch == PartitionSpec(("data", "fsdp"), None)
    for table in tables:  # every layout knows the same names
        assert set(table) == set(ZERO3.parameters)


def test_variations_of_a_layout():
    mesh = mesh_of(sequence=2, tensor=2)
    between = lambda layout: sharding.spec(("block_sequence",), layout.activations, mesh)  # noqa: E731
    assert between(sharding.make_layout("zero3")) == PartitionSpec(("sequence", "tensor"))
    whole = sharding.make_layout("zero3", sequence_parallel=False)
    assert between(whole) == PartitionSpec("sequence")
    layout = sharding.make_layout("zero3", replicate_kv=True)
    for field in dataclasses.fields(layout):
        table = vars(layout)[field.name]
        assert sharding.spec(("kv_heads",), table, mesh) == PartitionSpec(None), field.name
        assert sharding.spec(("heads",), table, mesh) == PartitionSpec("tensor"), field.name
    assert ZERO3.parameters["kv_heads"] == ("tensor",)  # the tables themselves are left alone
    with pytest.raises(ValueError, match=r"'zero4' is unknown: use one of ddp, zero1"):
        sharding.make_layout("zero4")


def test_a_layout_of_ones_own():
    tables = {
        field.name: dict(vars(ZERO3)[field.name]) | {"experts": ("expert",)}
        for field in dataclasses.fields(ZERO3)
    }
    mine, mesh = sharding.Layout(**tables), mesh_of(data=2, expert=4)
    found = sharding.spec(("experts", "embed", "mlp"), mine.parameters, mesh, shape=(4, 8, 8))
    assert found == PartitionSpec("expert", "data", None)


# ------------------------------------------------------------------- shardings of trees, by source

SHAPES = {
    "up": jax.ShapeDtypeStruct((16, 32), "float32"),
    "blocks": [jax.ShapeDtypeStruct((32, 16), "float32")],
    "count": jax.ShapeDtypeStruct((), "int32"),
}


def specs(tree):
    return jax.tree.map(lambda leaf: leaf.spec, tree)


def test_a_tree_of_tuples():
    names = {"up": ("embed", "mlp"), "blocks": [("mlp", "embed")], "count": ()}
    found = sharding.shardings(SHAPES, mesh_of(fsdp=4, tensor=2), ZERO3, rules=names)
    assert specs(found) == {
        "up": PartitionSpec("fsdp", "tensor"),
        "blocks": [PartitionSpec("tensor", "fsdp")],
        "count": PartitionSpec(),
    }


def test_rules_are_ordered_path_expressions():
    rules = [
        (r"^blocks/\d+$", ("mlp", "embed")),
        (r"blocks", ("embed", "mlp")),  # too late: the first match wins
        (r"up$", ("embed", "mlp")),
        (r".*", ()),
    ]
    mesh = mesh_of(fsdp=4, tensor=2)
    assert sharding.logical_axes(SHAPES, rules)["blocks"] == [("mlp", "embed")]
    found = sharding.shardings(SHAPES, mesh, ZERO3, rules=rules)
    assert specs(found)["up"] == PartitionSpec("fsdp", "tensor")
    assert specs(found)["count"] == PartitionSpec()
    with pytest.raises(ValueError, match=r'no rule matches count of shape \(\): add one.*\("\.\*"'):
        sharding.shardings(SHAPES, mesh, ZERO3, rules=rules[:-1])


def test_errors_name_the_leaf():
    rules = [(r"blocks", ("mlp", "embed")), (r".*", ())]
    with pytest.raises(ValueError, match=r"^blocks/0: dimension 1 \('embed'\).*multiple of 3"):
        sharding.shardings(SHAPES, mesh_of(data=3), ZERO3, rules=rules)


def test_names_must_come_from_somewhere():
    with pytest.raises(
        ValueError, match="no leaf carries logical axes in Flax metadata: give rules"
    ):
        sharding.shardings(SHAPES, mesh_of(fsdp=4, tensor=2), ZERO3)


def test_tables_are_chosen_by_name():
    rules = [(r"up", ("embed", "mlp")), (r".*", ())]
    mesh, layout = mesh_of(data=4), sharding.make_layout("zero1")
    found = {
        table: specs(sharding.shardings(SHAPES, mesh, layout, rules=rules, table=table))["up"]
        for table in ("parameters", "gradients", "optimizer")
    }
    assert found["parameters"] == found["gradients"] == PartitionSpec(None, None)
    assert found["optimizer"] == PartitionSpec("data", None)


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # Flax's older keys
@pytest.mark.parametrize("key", ["out_sharding", "sharding_names", "sharding", "axes"])
def test_flax_nnx_metadata(key):
    nnx = pytest.importorskip("flax.nnx", reason="Flax is not installed")

    class Model(nnx.Module):
        def __init__(self, rngs):
            # Logical names are no mesh axes, so Flax is not to place arrays by them on its own.
            with nnx.use_eager_sharding(False):
                value = jax.random.normal(rngs.params(), (32, 16))
                self.down = nnx.Param(value, **{key: ("mlp", "embed")})
                kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
                self.up = nnx.Linear(16, 32, rngs=rngs, kernel_init=kernel)

    mesh = mesh_of(fsdp=4, tensor=2)
    state = nnx.state(nnx.eval_shape(lambda: Model(nnx.Rngs(0))))
    found = sharding.shardings(state, mesh, ZERO3)
    assert found["down"].spec == PartitionSpec("tensor", "fsdp")
    assert found["up"]["kernel"].spec == PartitionSpec("fsdp", "tensor")
    assert found["up"]["bias"].spec == PartitionSpec(None)  # no metadata: whole
    # The tree is what jit takes: parameters are born split.
    make = jax.jit(lambda: nnx.state(Model(nnx.Rngs(0))), out_shardings=found)
    born = make()["up"]["kernel"][...]
    assert born.addressable_shards[0].data.shape == (4, 16)


def test_flax_linen_boxes():
    linen = pytest.importorskip("flax.linen", reason="Flax is not installed")

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            initializer = linen.initializers.lecun_normal()
            boxed = linen.with_partitioning(initializer, ("embed", "mlp"))
            x = linen.Dense(32, kernel_init=boxed)(x)
            boxed = linen.with_logical_partitioning(initializer, ("mlp", "embed"))
            return linen.Dense(16, kernel_init=boxed)(x)

    mesh = mesh_of(fsdp=4, tensor=2)
    abstract = jax.eval_shape(Model().init, jax.random.key(0), jnp.ones((8, 16)))
    found = specs(sharding.shardings(abstract, mesh, ZERO3))["params"]
    assert found["Dense_0"]["kernel"] == PartitionSpec("fsdp", "tensor")
    assert found["Dense_1"]["kernel"] == PartitionSpec("tensor", "fsdp")
    assert found["Dense_1"]["bias"] == PartitionSpec(None)


def test_works_without_flax():
    """The example trains in a process where `import flax` fails."""
    code = """
import sys
sys.modules["flax"] = None
import runpy
sys.argv = ["shard_plain_jax.py", "--layout", "zero2", "--mesh", "data=4,tensor=2", "--steps", "1"]
runpy.run_path("scripts/shard_plain_jax.py", run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "step 0  loss" in done.stdout and "on each device" in done.stdout


# ------------------------------------------------------------- training outside llmx, every layout

MESHES = {
    "data 8": {"data": 8},
    "data 2 x fsdp 2 x tensor 2": {"data": 2, "fsdp": 2, "tensor": 2},
}


@pytest.fixture(scope="module")
def example():
    return load_example()


@pytest.fixture(scope="module")
def on_one_device(example):
    return example.train(mesh_of(data=1), ZERO3, optax.adamw(1e-2), 3)


@pytest.mark.parametrize("mesh_name", MESHES)
@pytest.mark.parametrize("layout", sharding.LAYOUTS)
def test_plain_jax_example_equals_one_device(example, on_one_device, layout, mesh_name):
    mesh = mesh_of(**MESHES[mesh_name])
    state, losses = example.train(mesh, sharding.make_layout(layout), optax.adamw(1e-2), 3)
    one_state, one_losses = on_one_device
    np.testing.assert_allclose(losses, one_losses, rtol=LOSS_TOLERANCE)
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(one_state), strict=True):
        np.testing.assert_allclose(got, want, atol=PARAMETER_TOLERANCE)
    # No device holds more than its share, of parameters and of moments.
    for held, table in (
        (state["params"]["up"], "parameters"),
        (state["opt"][0].mu["up"], "optimizer"),
        (state["opt"][0].nu["up"], "optimizer"),
    ):
        to = EXPECTED[layout][("parameters", "gradients", "optimizer").index(table)]
        ways = np.prod([mesh.shape.get(a, 1) for entry in to for a in sharding.mesh_axes(entry)])
        assert held.addressable_shards[0].data.size * ways == held.size


def test_equinox_model_by_rules():
    eqx = pytest.importorskip("equinox", reason="Equinox is not installed")
    rules = [
        (r"layers/0/weight$", ("mlp", "embed")),
        (r"layers/2/weight$", ("embed", "mlp")),
        (r".*", ()),
    ]
    optimizer = optax.adamw(1e-2)

    def init_model(key):
        return eqx.filter(eqx.nn.MLP(16, 16, 32, 2, key=key), eqx.is_array)

    static = eqx.filter(eqx.nn.MLP(16, 16, 32, 2, key=jax.random.key(0)), eqx.is_array, True)

    def loss_of(arrays, x, y):
        model = eqx.combine(arrays, static)
        return jnp.mean(jnp.square(jax.vmap(model)(x) - y))

    def step(state, x, y):
        arrays, moments = state
        loss, grads = jax.value_and_grad(loss_of)(arrays, x, y)
        updates, moments = optimizer.update(grads, moments, arrays)
        return (optax.apply_updates(arrays, updates), moments), loss

    def init_state(key):
        arrays = init_model(key)
        return arrays, optimizer.init(arrays)

    def train(mesh):
        abstract = jax.eval_shape(init_state, jax.random.key(0))
        to = sharding.shardings(abstract, mesh, ZERO3, rules=rules)
        rows = NamedSharding(mesh, sharding.spec(("batch", None), ZERO3.activations, mesh))
        state = jax.jit(init_state, out_shardings=to)(jax.random.key(0))
        one_step, losses = jax.jit(step, out_shardings=(to, None)), []
        for i in range(2):
            x = jax.device_put(jax.random.normal(jax.random.key(i), (8, 16)), rows)
            state, loss = one_step(state, x, jnp.sin(x))
            losses.append(float(loss))
        return state[0], losses

    split, losses = train(mesh_of(fsdp=8))
    whole, one_losses = train(mesh_of(data=1))
    np.testing.assert_allclose(losses, one_losses, rtol=LOSS_TOLERANCE)
    for got, want in zip(jax.tree.leaves(split), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(got, want, atol=PARAMETER_TOLERANCE)
    assert split.layers[0].weight.addressable_shards[0].data.shape == (32, 2)
    assert split.layers[2].weight.addressable_shards[0].data.shape == (2, 32)


# ----------------------------------------------------------------- placing arrays inside functions


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
def test_constrain_on_explicit_and_auto_axes(axis_type):
    mesh = sharding.make_mesh({"data": 4, "tensor": 2}, axis_type=axis_type)
    place = sharding.Placement(mesh, ZERO3)
    array = jnp.arange(32.0).reshape(8, 4)
    with jax.set_mesh(mesh):
        placed = jax.jit(lambda array: place.constrain(array, ("batch", "heads")) + 1)(array)
    np.testing.assert_array_equal(placed, array + 1)
    assert placed.addressable_shards[0].data.shape == (2, 2)
    assert place.size(("data", "tensor")) == 8
    with pytest.raises(ValueError, match="dimension 1"):
        place.constrain(jnp.ones((8, 3)), ("batch", "heads"))


@pytest.mark.parametrize(
    ("weight_to", "buffer_to", "later"),
    [
        ((None, None), (None, None), ()),  # DDP: an all-reduce in the layer
        ((None, None), (None, None), ("data", "fsdp")),  # ... or after the last microbatch
        ((None, None), (("data", "fsdp"), None), ()),  # ZeRO-2: a reduce-scatter
        ((("data", "fsdp"), None), (("data", "fsdp"), None), ()),  # ZeRO-3
        (("fsdp", None), ("fsdp", None), ("data",)),  # HSDP: the slow axis once per step
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_accumulate_into_sends_the_gradient_to_the_buffer(weight_to, buffer_to, later, dtype):
    mesh = sharding.make_mesh({"data": 2, "fsdp": 4})
    rows = ("data", "fsdp")
    put = lambda array, to: jax.device_put(array, NamedSharding(mesh, to))  # noqa: E731
    weight = put(jnp.arange(16.0).reshape(8, 2), PartitionSpec(*weight_to))
    to = PartitionSpec(*buffer_to)
    x = put(jnp.arange(64.0).reshape(8, 8) / 8, PartitionSpec(rows, None))

    def loss(buffer, weight, x):
        weight = sharding.accumulate_into(rows, weight, buffer)
        y = dot.dot("BD,DF->BF", x, weight, out=PartitionSpec(rows, None), policy=POLICY)
        return jnp.sum(jnp.square(y))

    def step(weight, x):
        buffer = jnp.full((8, 2), jnp.nan, dtype, out_sharding=sharding.reduced(to, later))
        value, gradients = jax.value_and_grad(loss, argnums=(0, 1))(buffer, weight, x)
        assert jax.typeof(gradients[0]).sharding.spec.unreduced == frozenset(later)
        return value, jax.sharding.reshard(gradients[0], to), gradients[1]

    with jax.set_mesh(mesh):
        value, to_buffer, to_weight = jax.jit(step)(weight, x)
    plain = jax.value_and_grad(lambda w, x: jnp.sum(jnp.square(x @ w)))
    want_value, want = plain(np.asarray(weight), np.asarray(x))
    np.testing.assert_allclose(value, want_value, rtol=LOSS_TOLERANCE)
    assert to_buffer.dtype == dtype
    assert to_buffer.sharding.spec == to
    tolerance = LOSS_TOLERANCE if dtype == "float32" else 1e-2
    np.testing.assert_allclose(to_buffer.astype("float32"), want, rtol=tolerance)
    np.testing.assert_array_equal(to_weight, 0)


def test_regrouped_splits_the_first_dimension_only():
    mesh = sharding.make_mesh({"data": 2, "fsdp": 4})
    to = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    stacked = jax.device_put(jnp.arange(48.0).reshape(6, 8), to)
    with jax.set_mesh(mesh):
        grouped = jax.jit(lambda array: sharding.regrouped(array, 2))(stacked)
    np.testing.assert_array_equal(grouped, np.arange(48.0).reshape(3, 2, 8))
    assert grouped.sharding.spec == PartitionSpec(None, None, "fsdp")
