"""Which tier runs a test: the default, `slow`, or `--full-grid`.

Three things decide. A test is marked `slow` for what it does: it starts processes, kills them, or
trains for minutes. A case is marked `full_grid` where another takes the same way through the code.
And a test is slow because it takes long: `tests/slow_cases.txt` has those, measured.

    pytest -m "" --measure times.tsv         CPU seconds of each test, as they end
    python tests/support/tiers.py times.tsv  writes tests/slow_cases.txt

The list has all tests above LIMIT. Of the cases of one function the shortest stays in the default
tier, unless it takes more than LONGEST: so `pytest` alone goes through nearly all functions.
"""

import collections
import os
import pathlib
import sys
from collections.abc import Collection, Iterable, Mapping

import pytest

LIMIT, LONGEST = 1.5, 4.0  # CPU seconds
LISTED = pathlib.Path(__file__).parents[1] / "slow_cases.txt"
_LEFT_ALONE = (
    "tests/parity/test_parity.py",  # `parity_grid.quick` chooses
    # These need packages that not every environment has, and so may not exist.
    "tests/checkpoint/test_hf.py", "tests/checkpoint/test_hf_layers.py",
    "tests/pipeline/test_torch_orders.py",
)  # fmt: skip


def full_grid(*values):
    """A case that runs with `--full-grid` only: another takes the same way through the code."""
    return pytest.param(*values, marks=pytest.mark.full_grid)


def by_tier(cases: Iterable[str], *, slow: Collection[str], full: Collection[str]) -> list:
    """Cases by name, those of `slow` and `full` with their marks."""

    def one(case: str):
        if case in full:
            return full_grid(case)
        return pytest.param(case, marks=[pytest.mark.slow] * (case in slow))

    return [one(case) for case in cases]


def mark_slow(items: Iterable[pytest.Item], *, all_are_here: bool) -> None:
    """Marks the tests of `LISTED`. `all_are_here`: whether each of them must be among `items`.

    Raises UsageError for names of the list that no test has.
    """
    listed = set(LISTED.read_text().splitlines())
    for item in items:
        if item.nodeid in listed:
            item.add_marker(pytest.mark.slow)
    missing = listed - {item.nodeid for item in items}
    if all_are_here and missing:
        raise pytest.UsageError(
            f"{LISTED.name} names tests that do not exist: {', '.join(sorted(missing)[:5])}: take "
            "them out, or measure again (tests/support/tiers.py)"
        )


def cpu_seconds() -> float:
    """Of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def slow_cases(seconds: Mapping[str, float]) -> list[str]:
    """The tests that are slow because they take long, by their CPU seconds."""
    functions = collections.defaultdict(list)
    for name in seconds:
        functions[name.partition("[")[0]].append(name)
    kept = {min(cases, key=lambda name: seconds[name]) for cases in functions.values()}
    kept = {name for name in kept if seconds[name] <= LONGEST}
    found = (name for name, of in seconds.items() if of > LIMIT and name not in kept)
    return sorted(name for name in found if not name.startswith(_LEFT_ALONE))


def main(path: str) -> None:
    lines = [line.split("\t") for line in pathlib.Path(path).read_text().splitlines()]
    seconds = {name: float(of) for of, name in lines}
    found = slow_cases(seconds)
    LISTED.write_text("".join(f"{name}\n" for name in found))
    left = sum(seconds.values()) - sum(seconds[name] for name in found)
    print(f"{len(found)} of {len(seconds)} tests are slow; the others take {left:.0f} CPU seconds")


if __name__ == "__main__":
    main(*sys.argv[1:])
