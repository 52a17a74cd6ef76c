"""Marks of parametrized cases by the tier that runs them: the default, `slow`, or `--full-grid`."""

from collections.abc import Collection, Iterable

import pytest


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
