"""Pieces of the planner's page: numbers with units as text, and flags."""

import html
from collections.abc import Iterable

from llmx.aot.report import size
from llmx.plan import options
from llmx.runtime.page_html import Markup

_PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def duration(seconds: float) -> str:
    """ "1.691 s", "8.67 ms", "12.3 µs"."""
    if abs(seconds) >= 1:
        return f"{_digits(seconds, 4)} s"
    unit, scale = ("ms", 1e-3) if abs(seconds) >= 1e-3 else ("µs", 1e-6)
    return f"{_digits(seconds / scale, 3)} {unit}" if seconds else "0 s"


def _digits(number: float, count: int) -> str:
    """A number of at least so many digits, zeros behind the point too."""
    whole = len(str(int(abs(number))))
    return f"{number:,.{max(count - whole, 0)}f}"


def rate(number: float, unit: str) -> str:
    """ "459 TFLOP/s"."""
    for scale, prefix in _PREFIXES:
        if number >= scale:
            return f"{_digits(number / scale, 3)} {prefix}{unit}"
    return f"{_digits(number, 3)} {unit}"


def count(number: float) -> str:
    """ "15.6 trillion", "65,536"."""
    for scale, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= scale:
            return f"{_digits(number / scale, 3)} {word}"
    return f"{number:,.0f}"


def share(number: float) -> str:
    return f"{number:.1%}"


def memory(num_bytes: float) -> str:
    """As `size`; nothing for none."""
    return size(num_bytes) if num_bytes else "–"


def flags(words: Iterable[str]) -> Markup:
    """Flags of a command line."""
    inside = " ".join(f"<code>{html.escape(options.pasted([word]))}</code>" for word in words)
    return Markup(f'<span class="flags">{inside}</span>')
