"""Pairwise covers: few rows of options in which every pair of values that can meet does meet.

Most defects need two options at most (Kuhn, Wallace, Gallo 2004, "Software fault interactions and
implications for software testing"), and the number of rows grows with the two longest axes instead
of with the product of all.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Axes = Mapping[str, Sequence[Any]]  # name -> values
Row = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


class Rule(NamedTuple):
    """What cannot meet, and why."""

    axes: tuple[str, ...]
    problem: Callable[..., str]  # values of the axes -> the reason, or "" if they can meet
    # Whether it also holds before all of its axes have a value, with 1 for those that have none.
    partial: bool = False


def problem(row: Row, rules: Iterable[Rule]) -> str:
    """Why these values, perhaps not yet of all axes, cannot meet; "" if no rule says so."""
    for rule in rules:
        known = rule.partial or all(axis in row for axis in rule.axes)
        if known and (reason := rule.problem(*(row.get(axis, 1) for axis in rule.axes))):
            return reason
    return ""


def completed(row: Row, axes: Axes, rules: Sequence[Rule], gain: Callable) -> Row | None:
    """A row with a value for every axis, or None if there is none.

    gain: (row so far, axis, value) -> number; values of the largest gain are tried first.
    """
    if problem(row, rules):
        return None
    free = [axis for axis in axes if axis not in row]
    if not free:
        return row
    for value in sorted(axes[free[0]], key=lambda value: -gain(row, free[0], value)):
        if found := completed(row | {free[0]: value}, axes, rules, gain):
            return found
    return None


def pairs_of(row: Row) -> set[Pair]:
    return set(itertools.combinations(row.items(), 2))


def all_pairs(axes: Axes) -> list[Pair]:
    values = [[(axis, value) for value in axes[axis]] for axis in axes]
    return [
        pair for one, other in itertools.combinations(values, 2)
        for pair in itertools.product(one, other)
    ]  # fmt: skip


class Cover(NamedTuple):
    """Rows in which all valid pairs meet, and the pairs that no row can have, with reasons."""

    rows: list[Row]
    invalid: dict[Pair, str]


def cover(axes: Axes, rules: Sequence[Rule]) -> Cover:
    """A cover of all pairs; always the same for the same axes and rules."""
    missing = dict.fromkeys(all_pairs(axes))  # a set that keeps its order
    rows, invalid = [], {}
    order = list(axes)

    def gain(row: Row, axis: str, value: Any) -> int:
        """New pairs; where there are none, the first values, which are plain, before others."""
        new = 0
        for other in row:
            pair = ((other, row[other]), (axis, value))
            if order.index(other) > order.index(axis):
                pair = pair[::-1]
            new += pair in missing
        return new

    while missing:
        best, count = None, 0
        for pair in list(itertools.islice(missing, 8)):
            row = completed(dict(pair), axes, rules, gain)
            if row is None:
                invalid[pair] = problem(dict(pair), rules) or "no rest of a row fits both"
                del missing[pair]
                continue
            row = {axis: row[axis] for axis in axes}
            new = sum(pair in missing for pair in pairs_of(row))
            if new > count:
                best, count = row, new
        if best is not None:
            rows.append(best)
            for pair in pairs_of(best):
                missing.pop(pair, None)
    return Cover(rows, invalid)


def every_value(rows: Sequence[Row], cost: Callable[[Row], float]) -> list[Row]:
    """A few of the rows in which every value occurs, cheap ones first."""
    missing = {item for row in rows for item in row.items()}
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(missing & set(row.items())) / cost(row))
        chosen.append(best)
        missing -= set(best.items())
    return chosen
