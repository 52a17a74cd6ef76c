"""Which tests `pytest` alone leaves out because they take long."""

from support import tiers


def test_slow_cases():
    """Above the limit, but not the shortest case of a function that takes no more than LONGEST."""
    low, high = tiers.LIMIT, tiers.LONGEST
    seconds = {
        "a.py::f[1]": low + 2, "a.py::f[2]": low + 1, "a.py::f[3]": low + 3,  # the second stays
        "a.py::g[1]": low / 2, "a.py::g[2]": low + 1,
        "a.py::h": high + 1, "a.py::i": high, "b.py::f[1]": low + 9,
        "tests/parity/test_parity.py::test_parity[x]": high + 50,
    }  # fmt: skip
    assert tiers.slow_cases(seconds) == [
        "a.py::f[1]", "a.py::f[3]", "a.py::g[2]", "a.py::h", "b.py::f[1]"
    ]  # fmt: skip


def test_the_list_is_in_order_and_each_test_is_there_once():
    listed = tiers.LISTED.read_text().splitlines()
    assert listed == sorted(set(listed))
