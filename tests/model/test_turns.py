"""Groups of rows or positions that take turns: the same sums, and weights gathered no more often.

That training is equal on every mesh is in the parity grid, whose axis `turns` has 1 and 2.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from support import compare, parity_grid, runs, tiers

from llmx import sharding
from llmx.aot import program as program_lib
from llmx.config import ConfigError
from llmx.config import recipe as recipe_lib
from llmx.model import turns
from llmx.model.attention import masks

TOLERANCE = 1e-5  # as in the parity grid
ROW = parity_grid.PLAIN | dict(fsdp=2, tensor=4, remat="full")


@pytest.fixture
def rows_on_devices():
    """int32 [16, 3]: rows over four devices, whole along the other axis of the mesh."""
    kinds = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=kinds)
    with jax.set_mesh(mesh):
        yield jax.device_put(jnp.arange(48.0).reshape(16, 3), PartitionSpec("fsdp"))


@pytest.fixture
def taken(monkeypatch):
    """The set of groups that layers are computed in."""
    found, groups_of = set(), turns.groups_of

    def record(*arguments):
        found.add(groups_of(*arguments))
        return groups_of(*arguments)

    monkeypatch.setattr(turns, "groups_of", record)
    return found


def test_each_device_divides_its_own_rows(rows_on_devices):
    parts = turns.split(rows_on_devices, 2)
    assert [part.shape for part in parts] == [(8, 3)] * 2
    for part, low in zip(parts, (0, 2), strict=True):
        for shard, whole in zip(
            part.addressable_shards, rows_on_devices.addressable_shards, strict=True
        ):
            mine = np.asarray(whole.data)[low : low + 2]
            np.testing.assert_array_equal(shard.data, mine)
    np.testing.assert_array_equal(turns.join(parts), rows_on_devices)


def test_the_gradient_of_a_row_is_its_own(rows_on_devices):
    """Not added up over the devices that hold the same row, and not divided by their number."""

    def loss(array):
        first, second = turns.split(array, 2)
        return jnp.sum(jnp.square(turns.join([first, 3 * second])))

    parts = turns.split(2 * rows_on_devices, 2)
    wanted = turns.join([parts[0], 9 * parts[1]])
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(rows_on_devices), wanted)


@pytest.mark.parametrize(("wanted", "number"), [(1, 1), (2, 2), (3, 1), (4, 4), (6, 2), (8, 4)])
def test_groups_divide_the_rows_of_a_device(rows_on_devices, wanted, number):
    place = sharding.Placement(
        jax.sharding.get_mesh(), sharding.make_layout("zero3", sequence_parallel=False)
    )
    x_BTD = jnp.broadcast_to(rows_on_devices[:, :, None], (16, 3, 3))  # three positions
    mask = masks.Mask(*[rows_on_devices] * 4)  # not in order
    assert turns.groups_of(wanted, x_BTD, mask, place) == turns.Groups(number)
    in_order = dataclasses.replace(mask, ahead=0)
    found = turns.groups_of(3, x_BTD, in_order, place)
    assert found == turns.Groups(3, turns.POSITIONS)


def test_buffers_take_the_sum_of_all_groups():
    """In fp32: bf16 would lose the small term."""

    def loss(buffer):
        first, second, third = turns.shared({"w": buffer}, 3)
        return jnp.sum(first["w"] + second["w"] * 2**-8 + third["w"] * 2**-8)

    gradient = jax.grad(loss)(jnp.ones(4, jnp.bfloat16))
    np.testing.assert_array_equal(gradient.astype(jnp.float32), 1 + 2**-7 + np.zeros(4))
    assert turns.shared(None, 3) == [None] * 3


@pytest.mark.parametrize("groups", [tiers.full_grid(2), 4])
def test_turns_train_as_one_device_does(groups, taken):
    initial, wanted = parity_grid.reference("llama3", parity_grid.num_layers(ROW))
    recipe = parity_grid.make_recipe(ROW | dict(turns=groups))
    trained = runs.train(recipe, parity_grid.batches(), runs.put_state(recipe, initial))
    compare.assert_trained_alike(trained, wanted, TOLERANCE)
    assert taken == {turns.Groups(groups)}


@pytest.mark.parametrize(
    "changes",
    [
        tiers.full_grid(dict(turns=2)), dict(turns=4, tensor=2), dict(turns=2, remat="none"),
        dict(turns=2, family="gemma3"),
        tiers.full_grid(dict(turns=2, family="gpt2", remat="names")),
        dict(turns=2, layout="zero1", sequence_parallel=False),
        dict(turns=2, tensor=2, stage=2, schedule="1f1b", fsdp=2),
    ],
    ids=str,
)  # fmt: skip
def test_positions_of_one_row_take_turns(changes, taken):
    """A device has one row of each microbatch: its later positions attend to the earlier ones."""
    row = ROW | changes
    row["accumulation"] = parity_grid.BATCH // row["fsdp"]
    initial, wanted = parity_grid.reference(row["family"], parity_grid.num_layers(row))
    recipe = parity_grid.make_recipe(row)
    state = recipe.init(0) if row["stage"] > 1 else runs.put_state(recipe, initial)
    trained = runs.train(recipe, parity_grid.batches(), state)
    compare.assert_trained_alike(trained, wanted, TOLERANCE)
    assert taken == {turns.Groups(row["turns"], turns.POSITIONS)}


def gathered_bytes(groups: int, remat: str) -> float:
    """Bytes of all arrays that are gathered over `fsdp` in a step."""
    recipe = parity_grid.make_recipe(ROW | dict(remat=remat, turns=groups))
    text = runs.lower(recipe).compile().as_text()
    program = program_lib.read(text, list(recipe.mesh.shape.items()))
    return sum(
        one.count * one.bytes
        for one in program.collectives
        if one.kind == "all-gather" and one.axes == ("fsdp",)
    )


@pytest.mark.parametrize("remat", ["full", "names", tiers.full_grid("dots")])
def test_weights_are_gathered_once_for_all_groups(remat, taken):
    assert gathered_bytes(2, remat) == gathered_bytes(1, remat) > 0
    assert taken == {turns.Groups(2)}


def test_without_remat_they_are_not_kept_for_the_backward_pass():
    """It gathers once more, as without turns."""
    assert gathered_bytes(2, "none") >= gathered_bytes(1, "none")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            dict(fsdp=2, accumulation=4, turns=3),
            r"turns=3 divides neither the 4 rows .* multiple of 3\): use 1 or 2 or 4, or 0",
        ),
        (dict(turns=-3), r"sharding.turns=-3 must be at least 0"),
        (
            dict(stage=2, schedule="zb_h1", accumulation=2, turns=2),
            r"turns=2 with pipeline.schedule='zb_h1', which leaves the weight gradient",
        ),
        (
            dict(fsdp=2, accumulation=16, turns=2, implementation="splash"),
            r"a multiple of 256\): use 1, or 0",
        ),
        (
            dict(fsdp=2, accumulation=16, turns=2, implementation="cudnn"),
            "'cudnn' their positions cannot take turns: use 1, or attention.implementation='auto'",
        ),
    ],
)
def test_what_has_no_turns_is_refused(row, reason):
    row = parity_grid.PLAIN | row
    kernel = row.pop("implementation", "auto")
    with pytest.raises(ConfigError, match=reason):
        parity_grid.make_recipe(row, attention__implementation=kernel)


@pytest.mark.parametrize(
    ("keys", "groups"),
    [
        (dict(batch__size=16), 2),  # four rows of 8,192 tokens a device
        (dict(batch__size=16, batch__sequence_length=2048), 2),
        (dict(batch__size=8), 2),
        (dict(batch__size=12), 1),  # three rows
        (dict(batch__size=3, mesh=dict(tensor=8)), 2),  # by positions
        (dict(batch__size=1, mesh=dict(tensor=8)), 2),
        (dict(batch__size=1, mesh=dict(tensor=8), batch__sequence_length=4096), 1),
        (dict(batch__size=4, mesh=dict(fsdp=2, sequence=2, tensor=2)), 2),  # two rows
        (dict(batch__size=2, mesh=dict(fsdp=2, sequence=2, tensor=2)), 1),
        (dict(batch__size=16, batch__accumulation=2), 2),
        (dict(batch__size=16, batch__accumulation=2, mesh=dict(stage=2, tensor=2)), 2),
        (
            dict(
                batch__size=16,
                batch__accumulation=2,
                mesh=dict(stage=2, tensor=2),
                pipeline__schedule="zb_h1",
            ),
            1,
        ),
        (dict(batch__size=16, sharding__turns=1), 1),
        (dict(batch__size=16, sharding__turns=4), 4),
        (dict(batch__size=16, mesh=dict(fsdp=8)), 1),  # nothing is sent over `tensor`
    ],
)
def test_auto_takes_turns_of_enough_tokens(keys, groups):
    keys = dict(mesh=dict(fsdp=4, tensor=2), batch__sequence_length=8192) | keys
    model = dict(max_positions=8192, num_heads=8, num_kv_heads=8)
    run = runs.make_config("llama3", model=model, **keys)
    assert recipe_lib.turns_of(run, "TPU v5p") == groups
    given = run.sharding.turns or 1
    assert recipe_lib.turns_of(run, "cpu") == recipe_lib.turns_of(run, "NVIDIA B200") == given
