"""What waits for what in a step with sparse tables: in compiled programs for machines that are not
here."""

import functools
import re

import jax
import pytest
from support import runs
from tables.test_training import made

from llmx.aot import hlo_text, instruction_costs, topologies
from llmx.aot import program as program_lib
from llmx.aot.hlo_text import Instruction, Module

pytestmark = pytest.mark.aot

TOPOLOGIES = {"h100": "h100:8", "v5p": "v5p:2x2x2"}
DEVICES = 8


@functools.cache
def compiled(platform: str, **keys):
    """The train step of a DLRM."""
    config = made("dlrm", mesh={"data": DEVICES}, **keys)
    recipe = runs.make_recipe(config, topologies.devices(TOPOLOGIES[platform]))
    lowered = runs.lower(recipe)
    return topologies.compile(lowered, topologies.parse(TOPOLOGIES[platform]).platform), recipe


def holds(module: Module, one: Instruction, asked) -> bool:
    """Whether an instruction is, or runs anywhere inside, what is `asked`."""
    if asked(one):
        return True
    called = re.findall(r"(?:body|condition|calls|to_apply)=%([\w.\-]+)", one.attributes)
    inner = {*one.called, *called} & module.computations.keys()
    return any(
        holds(module, each, asked)
        for name in inner
        for each in module.computations[name].instructions
    )


def behind(module: Module, first: list[Instruction]) -> set[str]:
    """The instructions of the program that wait for any of these."""
    found, left = set(), [one.name for one in first]
    while left:
        new = {user.name for user in module.entry.users[left.pop()]} - found
        found |= new
        left += new
    return found


def exchanges_and_products(platform: str, staleness: int):
    """How many exchanges wait for products, and how many products for exchanges."""
    found, _ = compiled(platform, tables__staleness=staleness)
    module = hlo_text.parse(found.as_text())
    is_exchange = lambda one: hlo_text.collective_kind(one) == "all-to-all"  # noqa: E731
    exchanges, products = (
        [one for one in module.entry.instructions if holds(module, one, asked)]
        for asked in (is_exchange, instruction_costs.is_product)
    )
    assert len(exchanges) == 2 and len(products) > 6  # lookup and update, each in its rounds
    late, early = behind(module, products), behind(module, exchanges)
    return (
        sum(one.name in late for one in exchanges), sum(one.name in early for one in products)
    )  # fmt: skip


@pytest.mark.parametrize("platform", TOPOLOGIES)
def test_nothing_waits_for_an_exchange_of_late_rows(platform):
    """No path leads from the network's products to the tables' exchanges, and none back."""
    assert exchanges_and_products(platform, staleness=1) == (0, 0)
    # In the same step updates wait for the backward pass, and nearly all products for the rows.
    updates, products = exchanges_and_products(platform, staleness=0)
    assert updates == 1 and products > 6


@pytest.mark.parametrize("platform", TOPOLOGIES)
def test_late_updates_are_in_place(platform):
    """No copy of tables or of what waits."""
    keys = dict(tables__staleness=4, data__records__rows=20_000_000)
    found, recipe = compiled(platform, **keys)
    tables = 4 * sum(leaf.size for leaf in jax.tree.leaves(recipe.abstract.extra)) / DEVICES
    memory = found.memory_analysis()
    assert memory.alias_size_in_bytes >= tables
    assert memory.temp_size_in_bytes < tables / 8


def test_exchanges_run_beside_the_network():
    """Where one round is enough whatever the ids are, there is no loop, and the compiler for H100
    has other work between the beginning and the end of each exchange."""
    found, _ = compiled("h100", tables__staleness=1, tables__capacity=float(DEVICES))
    program = program_lib.read(found.as_text(), (("data", DEVICES),))
    exchanges = program.select(kind="all-to-all")
    assert program_lib.executions(exchanges) == 3
    assert all(one.asynchronous and one.hidden_by for one in exchanges)
