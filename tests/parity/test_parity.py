"""The parity contract: every technique trains as one device does, and so do any two together.

The rows are those of `support.parity_grid`: all pairs of its options that can meet. Losses and
gradient norms of three steps and the parameters after them agree with one device to 1e-5 relative
in fp32: rounding alone differs, as sums are taken in another order.

`pytest` alone runs rows in which every option occurs; with `-m slow` come four of five pairs, and
the rows with the others with `--full-grid` (`parity_grid.last_of_cover`). `--every-mesh` has the
product of every mesh, layout, family and schedule in place of the cover: thousands of programs.
"""

import jax
import numpy as np
import pytest
from support import compare, pairwise, parity_grid, runs

from llmx.config import ConfigError
from llmx.sharding import scatter

TOLERANCE = 1e-5  # relative; the contract of docs/architecture.md, seen: below 3e-6
BF16_TOLERANCE = 1e-2  # bf16 has 8 bits: 4e-3 for one number


def trained(row: dict, precision: str = "fp32"):
    """(of the row's program, of one device)."""
    adapters = row.get("adapters", False)
    initial, wanted = parity_grid.reference(row["family"], parity_grid.num_layers(row), adapters)
    recipe = parity_grid.make_recipe(row, precision)
    initial = initial._replace(
        extra=jax.device_get(recipe.loss.init_extra()),
        sync=jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), recipe.abstract.sync),
    )  # fmt: skip
    if row["stage"] == 1:
        state = runs.put_state(recipe, initial)
    elif (
        adapters or row in parity_grid.quick()
    ):  # stages have their layers in another order: born so
        state = recipe.init(0)
    else:  # or brought into it, which compiles nothing
        state = runs.put_state(
            recipe,
            initial._replace(
                params=runs.in_stages(recipe, initial.params),
                opt_state=jax.tree.map(
                    lambda leaf: np.zeros(leaf.shape, leaf.dtype), recipe.abstract.opt_state
                ),
            ),
        )
    return runs.train(recipe, parity_grid.batches(), state), wanted


def scatters(row: dict) -> bool:
    """Whether gradients are split, and so their sums scattered: elsewhere nothing is exchanged."""
    return row["layout"] in ("zero2", "zero3", "hsdp") and row["fsdp"] > 1


def pytest_generate_tests(metafunc):
    if "row" not in metafunc.fixturenames:
        return
    quick, rows = parity_grid.quick(), [*parity_grid.cover().rows, *parity_grid.EXTREMES]
    left = []  # those that others stand for
    if metafunc.function is test_bf16:
        rows = [
            row for row in quick if row["stage"] == 1 and not parity_grid.has_experts(row["family"])
        ]
        quick, left = [], rows[2:]  # a plain one, and one whose sequences and heads are split
    elif metafunc.function is test_adapters:
        rows = parity_grid.with_adapters()
        quick = [row for row in rows if row["turns"] > 1]  # of positions, and of rows in stages
        left = [row for row in rows if row not in quick]
    elif metafunc.function is test_sums_that_are_exchanged:
        rows = [row for row in (*parity_grid.EXTREMES, *quick) if scatters(row)]
        quick = [row for row in rows if row["layout"] == "hsdp"][:1]
        experts = [row for row in rows if row["expert"] > 1][:1]
        left = [row for row in rows if row not in quick + experts]
    elif metafunc.config.getoption("--every-mesh"):
        quick, rows = [], parity_grid.every_mesh()
    else:
        on_host = [row for row in parity_grid.EXTREMES if row["offload"] == "parameters"]
        # The first of those is also one of the rows with adapters, which run by default.
        left = parity_grid.last_of_cover() + on_host[:1]

    def marks(row):
        if row in left:
            return (pytest.mark.full_grid,)
        return () if row in quick else (pytest.mark.slow,)

    def group(row):  # one worker has the rows that are compared with one reference
        of = (row["family"], parity_grid.num_layers(row), "adapters" * row.get("adapters", False))
        return pytest.mark.xdist_group(f"parity {' '.join(map(str, of))}")

    cases = [
        pytest.param(row, id=parity_grid.name(row), marks=(group(row), *marks(row))) for row in rows
    ]
    metafunc.parametrize("row", cases)


def test_parity(row):
    compare.assert_trained_alike(*trained(row), TOLERANCE)


def test_adapters(row):
    """Beside a frozen model, which stays what it is."""
    compare.assert_trained_alike(*trained(row), TOLERANCE)


def test_bf16(row):
    """In bf16 the same losses to bf16's own precision, and fp32 master parameters."""
    got, wanted = trained(row, "bf16")
    np.testing.assert_allclose(got.losses, wanted.losses, rtol=BF16_TOLERANCE)
    np.testing.assert_allclose(got.norms, wanted.norms, rtol=5 * BF16_TOLERANCE)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(got.params))


def test_sums_that_are_exchanged(row, monkeypatch):
    """As on chips where each device sends the others their parts of a gradient's terms."""
    exchanged, over = [], scatter._exchanged
    monkeypatch.setattr(scatter, "EXCHANGING", {"cpu": 8})
    monkeypatch.setattr(
        scatter, "_exchanged", lambda *given: (exchanged.append(given[1]), over(*given))[1]
    )
    jax.clear_caches()  # of what was traced for the compiler's reduce-scatters
    compare.assert_trained_alike(*trained(row), TOLERANCE)
    jax.clear_caches()
    assert "fsdp" in exchanged


# ------------------------------------------------------------------------------------- the cover


def test_every_valid_pair_is_in_the_cover():
    rows, invalid = parity_grid.cover()
    met = set().union(*map(pairwise.pairs_of, rows))
    pairs = pairwise.all_pairs(parity_grid.AXES)
    assert met | set(invalid) == set(pairs) and not met & set(invalid)
    assert len(rows) <= 48  # six remats times six families are 36
    for row in rows:
        assert not pairwise.problem(row, parity_grid.RULES)


def test_rows_without_the_full_grid_have_every_value_and_most_pairs():
    rows, left = parity_grid.cover().rows, parity_grid.last_of_cover()
    kept = [row for row in rows if row not in left]
    for axis, values in parity_grid.AXES.items():
        assert {row[axis] for row in kept} == set(values)
    pairs, met = (set().union(*map(pairwise.pairs_of, some)) for some in (rows, kept))
    assert len(met) >= parity_grid.SHARE * len(pairs)
    # They are for a time limit.
    assert sum(map(parity_grid.cost, kept)) < 0.5 * sum(map(parity_grid.cost, rows))


def test_pairs_outside_the_cover_have_a_reason():
    """They need more devices than there are, do nothing, or the config refuses them."""
    for pair, reason in parity_grid.cover().invalid.items():
        assert reason, pair


def test_rows_of_the_quick_subset_have_every_value():
    quick = parity_grid.quick()
    for axis, values in parity_grid.AXES.items():
        assert {row[axis] for row in quick} == set(values) - set(parity_grid.SLOW_SCHEDULES)
    assert len(quick) <= 16


def test_a_rule_that_nothing_keeps_is_found():
    """The cover of three switches, of which two exclude each other: no pair is lost silently."""
    axes = {"a": (0, 1), "b": (0, 1), "c": (0, 1)}
    rule = pairwise.Rule(("a", "b"), lambda a, b: "both" if a and b else "")
    rows, invalid = pairwise.cover(axes, [rule])
    assert invalid == {(("a", 1), ("b", 1)): "both"}
    assert len(rows) <= 6
    met = set().union(*map(pairwise.pairs_of, rows))
    assert len(met) == len(pairwise.all_pairs(axes)) - 1


def test_nothing_to_gather_is_refused_by_the_config_too():
    row = parity_grid.PLAIN | dict(layout="ddp", gather="step", fsdp=2)
    assert pairwise.problem(row, parity_grid.RULES)
    with pytest.raises(ConfigError, match="gathers nothing"):
        parity_grid.make_recipe(row)
