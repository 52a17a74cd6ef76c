"""The estimated time of a step as lines of text."""

import collections
from collections.abc import Sequence

from llmx.aot import peak_memory
from llmx.aot.step_time import Speed
from llmx.aot.timeline import Exchange, Operation, Timeline
from llmx.runtime import utilization

_MOST_LINES = 10


def sections(times: Timeline, speed: Speed | None) -> list[list[str]]:
    """Sections of the cost report: the step, its longest operations, what it waits for."""
    return [_step(times, speed), _operations(times), _exchanges(times)]


def duration(seconds: float) -> str:
    """ "2.01 s", "197.5 ms", "3.2 us"."""
    for unit, scale, digits in (("s", 1.0, 3), ("ms", 1e-3, 1)):
        if seconds >= 0.97 * scale:
            return f"{seconds / scale:.{digits}f} {unit}"
    return f"{seconds * 1e6:.1f} us"


def _step(times: Timeline, speed: Speed | None) -> list[str]:
    lines = ["time of a step, an estimate: nothing was run"]
    tokens = ""
    if speed is not None:
        each = f"{speed.tokens_per_second_per_device:,.0f} of each device"
        tokens = f"   {speed.tokens_per_second:,.0f} tokens/s, {each}"
    lines.append(f"  {'step':20}{duration(times.step):>12}{tokens}")
    if speed is not None:
        program = "unknown" if speed.program is None else f"{speed.program:.1%}"
        lines += [
            f"  {'share of the peak':20}{utilization.text(speed.shares)}, of {speed.peak_dtype}",
            f"  {'':20}the program computes {program}: what kernels repeat, too",
        ]
    exposed = f"{times.exposed / times.step:.1%} of the step" if times.step else ""
    hidden = f"{times.hidden:.0%} of {duration(times.communication)} is hidden"
    lines += [
        f"  {'compute':20}{duration(times.compute):>12}",
        f"  {'waits for copies':20}{duration(times.copies):>12}",
        f"  {'exposed collectives':20}{duration(times.exposed):>12}   {exposed}; {hidden}",
        "  the step with nothing hidden "
        f"{duration(times.nothing_hidden)}, with half the bandwidth "
        f"{duration(times.half_bandwidth)}, with infinite bandwidth "
        f"{duration(times.infinite_bandwidth)}",
    ]
    return [*lines, *(f"  assumed: {one}" for one in times.assumptions)]


def _operations(times: Timeline) -> list[str]:
    groups: dict[tuple, list[Operation]] = collections.defaultdict(list)
    for one in times.operations:
        groups[one.basis, _what(one, 62)].append(one)
    longest = sorted(groups.items(), key=lambda item: -_total(item[1], "seconds"))
    lines = ["longest operations", f"  {'time':>10}{'share':>8}{'times':>8}  {'by':8}operation"]
    for (basis, what), group in longest[:_MOST_LINES]:
        seconds, count = _total(group, "seconds"), _total(group, "count")
        share = f"{seconds / times.step:.1%}"
        lines.append(f"  {duration(seconds):>10}{share:>8}{count:>8,}  {basis:8}{what}")
    return lines if longest else []


def _exchanges(times: Timeline) -> list[str]:
    groups: dict[tuple, list[Exchange]] = collections.defaultdict(list)
    for one in times.exchanges:
        if one.exposed > 0:
            groups[one.kind, _links(one.links), _what(one, 36)].append(one)
    longest = sorted(groups.items(), key=lambda item: -_total(item[1], "exposed"))
    columns = f"  {'exposed':>10}{'of':>10}{'times':>8}  {'kind':19}{'links':12}operation"
    lines = ["most exposed collectives", columns]
    for (kind, links, what), group in longest[:_MOST_LINES]:
        exposed, seconds = _total(group, "exposed"), _total(group, "seconds")
        shown = f"  {duration(exposed):>10}{duration(seconds):>10}{_total(group, 'count'):>8,}"
        lines.append(f"{shown}  {kind:19}{links:12}{what}")
    return lines if longest else []


def _total(group: Sequence[Operation | Exchange], field: str) -> float:
    return sum(vars(one)[field] for one in group)


def _links(names: Sequence[str]) -> str:
    return ",".join(names)


def _what(one: Operation | Exchange, room: int) -> str:
    """The operation of the traced program and its source line."""
    text, line = peak_memory.readable(one.source) or one.name, f"  {one.line}" if one.line else ""
    room -= len(line)
    return (text if len(text) <= room else f"...{text[3 - room :]}") + line
