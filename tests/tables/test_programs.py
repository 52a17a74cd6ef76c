"""What devices exchange for sparse tables, and what a step keeps beside them: in compiled programs
for machines that are not here."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding

from llmx.aot import program as program_lib
from llmx.aot import topologies
from llmx.tables import costs
from llmx.tables import tables as tables_lib
from llmx.tables.config import Feature, Table, TablesConfig

pytestmark = pytest.mark.aot

TOPOLOGIES = {"h100": "h100:8", "v5p": "v5p:2x2x2"}
DEVICES = 8
B, ROWS = 8192, 2_000_000
NUMBER, LENGTH, WIDTHS = 6, 2, (32, 16)  # of tables: half of them have each width


def one_step(several: list[tables_lib.Tables]):
    """A step of each, as a model would that has all of them."""

    def step(states, ids):
        taken = [each.take(state, ids) for each, state in zip(several, states, strict=True)]

        def loss(rows):
            return sum(
                jnp.sum(jnp.square(array))
                for each, part, own in zip(several, rows, taken, strict=True)
                for array in each.combine(part, own.plan).values()
            )

        gradients = jax.grad(loss)([own.rows for own in taken])
        return [
            each.update(*args, rate=0.1)
            for each, *args in zip(several, states, taken, gradients, strict=True)
        ]

    return jax.jit(step, donate_argnums=0)


@functools.cache
def compiled(platform: str, number: int = NUMBER, *, packed: bool = True):
    """The step of so many tables, of one `Tables` or of one for each table."""
    devices = topologies.devices(TOPOLOGIES[platform])
    mesh = Mesh(np.array(devices[:DEVICES]), ("data",), axis_types=(AxisType.Explicit,))
    splits = ("rows", "rows", "whole") * NUMBER
    tables = [
        Table(f"t{each}", ROWS, WIDTHS[each % len(WIDTHS)], split=splits[each])
        for each in range(number)
    ]
    features = [Feature(f"f{table.name}", table.name, LENGTH) for table in tables]
    parts = [(tables, features)]
    if not packed:
        parts = [([table], [feature]) for table, feature in zip(tables, features, strict=True)]
    several = [tables_lib.make(*part, TablesConfig(), mesh) for part in parts]
    to = NamedSharding(mesh, several[0].split)
    ids = {f.name: jax.ShapeDtypeStruct((B, LENGTH), jnp.int32, sharding=to) for f in features}
    with jax.set_mesh(mesh):
        lowered = one_step(several).lower([each.abstract for each in several], ids)
    found = topologies.compile(lowered, topologies.parse(TOPOLOGIES[platform]).platform)
    return found, several


@pytest.mark.parametrize("platform", TOPOLOGIES)
def test_one_exchange_of_ids_and_one_of_rows_for_all_tables(platform):
    """And one of gradients; not two forward and one back for each table."""
    program = program_lib.read(compiled(platform)[0].as_text(), (("data", DEVICES),))
    exchanges = program.select(kind="all-to-all")
    assert program_lib.executions(exchanges) == 3
    assert not program.select(kind=("all-gather", "reduce-scatter", "collective-permute"))
    reduces = program.select(kind="all-reduce")
    assert program_lib.total_bytes(reduces) <= 64  # the number of rounds, and the loss
    # Of each row the id, its numbers, and their gradients with the slot; half the tables each.
    capacity = TablesConfig().capacity * (NUMBER // 2) * LENGTH * B / DEVICES
    of_width = [4 + 4 * width + 4 * (width + 1) for width in WIDTHS]
    sent = capacity * sum(of_width) * (DEVICES - 1) / DEVICES
    assert program_lib.wire_bytes(exchanges) == pytest.approx(sent, rel=0.01)


@pytest.mark.parametrize("platform", TOPOLOGIES)
def test_what_is_counted_is_what_is_compiled(platform):
    """`tables.costs`: the bytes of the state, and of what a device sends."""
    found, [tables] = compiled(platform)
    counted = costs.of(
        tuple(tables.groups.values()), tables.features, tables.optimizer.slots,
        records=B // DEVICES, multiple=tables.config.capacity,
    )  # fmt: skip
    memory = found.memory_analysis()
    ids = 4 * LENGTH * B * NUMBER / DEVICES
    state = memory.argument_size_in_bytes - ids
    assert counted.rows + counted.optimizer == pytest.approx(state, rel=1e-3)
    program = program_lib.read(found.as_text(), (("data", DEVICES),))
    sent = program_lib.wire_bytes(program.select(kind="all-to-all"))
    assert sum(counted.sent.values()) == pytest.approx(sent, rel=0.01)


def test_tables_of_their_own_have_exchanges_of_their_own():
    """What packing saves."""
    found, several = compiled("h100", 3, packed=False)
    program = program_lib.read(found.as_text(), (("data", DEVICES),))
    assert len(several) == 3
    assert program_lib.executions(program.select(kind="all-to-all")) == 3 * 3


@pytest.mark.parametrize("platform", TOPOLOGIES)
def test_tables_are_updated_in_place(platform):
    """No copy of the tables: what a step needs beside them is of the size of a batch."""
    found, [tables] = compiled(platform)
    memory = found.memory_analysis()
    state = sum(4 * leaf.size for leaf in jax.tree.leaves(tables.abstract)) / DEVICES
    assert memory.alias_size_in_bytes >= state
    assert memory.temp_size_in_bytes < state / 8
