"""Pieces of the planner's page: numbers with units as text, and tables as HTML."""

import html
from collections.abc import Iterable, Sequence

from llmx.aot.report import size
from llmx.plan import options

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


def swatch(color: str) -> str:
    """The color of a row, as pictures have it."""
    return f'<i class="swatch" style="background:{color}"></i>'


class Markup(str):
    """Text that is HTML already."""


def escaped(text: object) -> str:
    return text if isinstance(text, Markup) else html.escape(str(text))


def named(name: str, color: str) -> Markup:
    """A name behind its color."""
    return Markup(f'<span class="named">{swatch(color)}<span>{escaped(name)}</span></span>')


def flags(words: Iterable[str]) -> Markup:
    """Flags of a command line."""
    inside = " ".join(f"<code>{html.escape(options.pasted([word]))}</code>" for word in words)
    return Markup(f'<span class="flags">{inside}</span>')


def table(
    header: Sequence[str], rows: Iterable[Sequence[object]], *, left: int = 1,
    total: Sequence[object] = (),
) -> str:  # fmt: skip
    """A table that scrolls by itself where the screen is narrow.

    `left`: columns of words, before those of numbers; `total`: a last row.
    """
    of_column = [' class="word"' if index < left else "" for index in range(len(header))]
    cells = lambda tag, row: "".join(  # noqa: E731
        f"<{tag}{kind}>{escaped(cell)}</{tag}>" for kind, cell in zip(of_column, row, strict=True)
    )
    lines = [f"<tr>{cells('td', row)}</tr>" for row in rows]
    if total:
        lines.append(f'<tr class="total">{cells("td", total)}</tr>')
    body = "\n".join(lines)
    return (
        f'<div class="wide"><table>\n<thead><tr>{cells("th", header)}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def facts(rows: Iterable[tuple[str, object]]) -> str:
    """A list of names and what they are."""
    lines = [f"<dt>{escaped(name)}</dt><dd>{escaped(what)}</dd>" for name, what in rows]
    return "<dl>\n" + "\n".join(lines) + "\n</dl>"


def bullets(lines: Iterable[object]) -> str:
    return "<ul>\n" + "\n".join(f"<li>{escaped(line)}</li>" for line in lines) + "\n</ul>"
