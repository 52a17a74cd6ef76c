"""Pieces of HTML pages that are files by themselves: style and pictures are in them, there is no
script, and nothing is loaded."""

import html
from collections.abc import Iterable, Sequence

from llmx.runtime import page_style


def page(title: str, body: str) -> str:
    """The file, with its content as HTML."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escaped(title)}</title>\n<style>{page_style.CSS}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def section(title: str, *content: str, name: str = "", long: bool = False) -> str:
    kind = ' class="long"' if long else ""
    inside = "\n".join(part for part in content if part)
    start = f'<section id="{name or title.lower()}"{kind}>'
    return f"{start}\n<h2>{escaped(title)}</h2>\n{inside}\n</section>"


def figure(picture: str, caption: str = "", *, wide: bool = False) -> str:
    picture = f'<div class="wide">{picture}</div>' if wide else picture
    return f"<figure>{picture}<figcaption>{escaped(caption)}</figcaption></figure>"


def columns(*parts: str) -> str:
    return f'<div class="columns">{"".join(f"<div>{part}</div>" for part in parts)}</div>'


def card(question: str, answer: object, *lines: str, kind: str = "") -> str:
    """A question with its answer, and HTML below it."""
    kind = f' class="{kind}"' if kind else ""
    return (
        f'<div class="card"><h3>{escaped(question)}</h3><b{kind}>{escaped(answer)}</b>'
        f"{''.join(lines)}</div>"
    )


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
