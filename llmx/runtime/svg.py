"""Pictures of matplotlib as SVG in a page: text stays text, and ink, grid and background are CSS
variables of the page, so that a picture is dark where the page is."""

import html
import io
import re
from collections.abc import Callable, Mapping

import matplotlib
from matplotlib.figure import Figure

# Stand for the page's variables until the picture is text.
INK, LINE, PAPER = "#010203", "#040506", "#070809"
VARIABLES = {INK: "var(--ink)", LINE: "var(--line)", PAPER: "var(--paper)"}

# Okabe and Ito's, and lighter ones beside them.
BLUE, SKY, GREEN, ORANGE = "#0072b2", "#56b4e9", "#009e73", "#e69f00"
RED, PURPLE, YELLOW, GRAY = "#d55e00", "#cc79a7", "#e5d629", "#999999"
PALE_BLUE, PALE_ORANGE, PALE_PURPLE = "#b5daf2", "#f5cf85", "#ebc6da"
NAVY, SLATE, BROWN = "#003f63", "#5b7083", "#8a4b08"
_STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "llmx", "text.parse_math": False, "font.size": 9.5,
    "axes.labelsize": 9.5, "axes.edgecolor": INK, "axes.labelcolor": INK, "text.color": INK,
    "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False, "axes.spines.right": False,
    "axes.facecolor": "none", "figure.facecolor": "none", "axes.linewidth": 0.8,
}  # fmt: skip


def svg(
    name: str, make: Callable[[], Figure], label: str, titles: Mapping[str, str] | None = None
) -> str:
    """The element for a page. `titles`: what is shown at groups, by their id."""
    written = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        figure = make()
        # Without a date the same report gives the same page.
        empty = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(written, format="svg", metadata=empty, transparent=True)
    width = round(float(figure.get_figwidth()) * 96)
    text = written.getvalue()
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, count=1, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = text.replace("xlink:href", "href")
    # Several pictures of a page must not share names.
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    for group, what in (titles or {}).items():
        start = f'<g id="{name}-{group}">'
        text = text.replace(start, f"{start}<title>{html.escape(what)}</title>")
    for stand_in, variable in VARIABLES.items():
        text = text.replace(stand_in, variable)
    box = re.search(r'viewBox="[^"]*"', text).group()
    body = text[text.index(">") + 1 :]
    return (
        f'<svg class="picture" role="img" aria-label="{html.escape(label)}" {box} '
        f'style="--width:{width}px">{body}'
    )
