"""The estimated time of a step as lines of text."""

from collections.abc import Sequence

from llmx.aot.step_time import Speed
from llmx.aot.timeline import Exchange, Operation, Timeline

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
        hfu = "unknown" if speed.hfu is None else f"{speed.hfu:.1%}"
        lines.append(
            f"  {'share of the peak':20}{speed.mfu:>12.1%}   MFU with causal attention; "
            f"{speed.mfu_full:.1%} with all scores; HFU {hfu}"
        )
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
    rows = [_operation(one, times.step) for one in times.operations[:_MOST_LINES]]
    columns = f"  {'time':>10}{'share':>8}{'times':>8}  {'by':8}operation"
    return ["longest operations", columns, *rows] if rows else []


def _operation(one: Operation, step: float) -> str:
    share = f"{one.seconds / step:.1%}"
    what = _shortened(one.source or one.name, 62)
    return f"  {duration(one.seconds):>10}{share:>8}{one.count:>8,}  {one.basis:8}{what}"


def _exchanges(times: Timeline) -> list[str]:
    exposed = [one for one in times.exchanges if one.exposed > 0][:_MOST_LINES]
    columns = f"  {'exposed':>10}{'of':>10}{'times':>8}  {'kind':19}{'links':12}operation"
    rows = [_exchange(one) for one in exposed]
    return ["most exposed collectives", columns, *rows] if rows else []


def _exchange(one: Exchange) -> str:
    what = _shortened(one.source or one.name, 36)
    return (
        f"  {duration(one.exposed):>10}{duration(one.seconds):>10}{one.count:>8,}  "
        f"{one.kind:19}{_links(one.links):12}{what}"
    )


def _links(names: Sequence[str]) -> str:
    return ",".join(names)


def _shortened(text: str, room: int) -> str:
    return text if len(text) <= room else f"...{text[3 - room :]}"
