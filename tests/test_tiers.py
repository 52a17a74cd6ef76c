"""Which tests `pytest` alone leaves out because they take long."""

import pytest
from support import tiers


def test_what_takes_long_is_left_out():
    """The shortest case of a function is in the default tier, or slow; the others above the limit
    stay out of both."""
    low, high = tiers.LIMIT, tiers.LONGEST
    seconds = {
        "a.py::f[1]": low + 2, "a.py::f[2]": low + 1, "a.py::f[3]": low + 3,  # the second stays
        "a.py::g[1]": low / 2, "a.py::g[2]": low + 1,
        "a.py::h": high + 1, "a.py::i": high, "b.py::f[1]": high + 2, "b.py::f[2]": high + 1,
        "tests/parity/test_parity.py::test_parity[x]": high + 50,
    }  # fmt: skip
    assert tiers.left_out(seconds) == {
        "a.py::f[1]": "full_grid", "a.py::f[3]": "full_grid", "a.py::g[2]": "full_grid",
        "a.py::h": "slow", "b.py::f[1]": "full_grid", "b.py::f[2]": "slow",
    }  # fmt: skip


def test_the_list_is_in_order_and_each_function_runs_in_one_tier_at_least():
    names = [line.split("\t")[1] for line in tiers.LISTED.read_text().splitlines()]
    assert names == sorted(set(names))
    slow = [name.partition("[")[0] for name, tier in tiers.read_list().items() if tier == "slow"]
    assert len(slow) == len(set(slow))


def test_each_name_of_the_list_is_a_test(pytestconfig):
    """Not an error of the collection: with pytest-xdist that ends the run without a word."""
    if tiers.WITHOUT_A_TEST not in pytestconfig.stash:
        pytest.skip("some tests were not collected: `pytest` alone collects all")
    assert pytestconfig.stash[tiers.WITHOUT_A_TEST] == [], (
        "take them out of tests/slow_cases.txt, or measure again; OTHERS_STAND_FOR is in "
        "tests/support/tiers.py"
    )


def test_a_name_without_a_test_is_found():
    """And what should stand for others where it does not run itself."""

    class Item:
        def __init__(self, nodeid, *marks):
            self.nodeid, self.marks = nodeid, list(marks)

        def add_marker(self, mark):
            self.marks.append(mark.name)

        def get_closest_marker(self, name):
            return name if name in self.marks else None

    stood_for, stands = next(iter(tiers.OTHERS_STAND_FOR.items()))
    one, other = Item(f"{stood_for}[x]"), Item(f"{stands}[y]")
    missing = tiers.mark_listed([one, other])
    assert tiers.FULL_GRID in one.marks and tiers.FULL_GRID not in other.marks
    assert stood_for not in missing and stands not in missing
    assert stands in tiers.mark_listed([one, Item(f"{stands}[y]", tiers.FULL_GRID)])
    assert set(tiers.read_list()) < set(missing)
