"""Writes the table of all config keys into docs/configuration.md, from the comments beside them.

    python scripts/config_table.py [--check]

With --check nothing is written; exit code 1 if the page is not what the code says (a test runs it
so).
"""

import argparse
import dataclasses
import inspect
import pathlib
import sys
import typing

from llmx import config
from llmx.runtime import bounds

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "configuration.md"
BEGIN, END = "<!-- keys: written by scripts/config_table.py -->", "<!-- end of keys -->"


def comments(kind: type) -> dict[str, str]:
    """{field: comment}, of the comment on the field's line or on the lines above it."""
    found, above = {}, []
    names = {field.name for field in dataclasses.fields(kind)}
    for line in inspect.getsource(kind).splitlines():
        text = line.strip()
        name = text.partition(":")[0]
        if text.startswith("#"):
            above.append(text.lstrip("# "))
            continue
        if line.startswith("    ") and name in names:
            found[name] = text.partition("  # ")[2] or " ".join(above)
        above = []
    return found


def table(kind: type, title: str, prefix: str = "") -> list[str]:
    """Markdown of one section and those inside it."""
    hints, notes, defaults = typing.get_type_hints(kind), comments(kind), kind()
    owners = config.owners()
    lines = [f"### {title}", "", inspect.getdoc(kind).splitlines()[0], ""]
    lines += ["| key | default | meaning |", "| --- | --- | --- |"]
    inner = []
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[field.name]):
            name = prefix + field.name
            inner += ["", *table(hints[field.name], name, f"{name}.")]
        else:
            value = repr(vars(defaults)[field.name])
            note = notes[field.name].replace("|", "\\|")
            if owners[prefix + field.name] == bounds.MACHINE:
                note += " (machine)"
            lines.append(f"| `{prefix}{field.name}` | `{value}` | {note} |")
    return lines + inner


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only compare")
    args = parser.parse_args()
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    made = "\n".join([before + BEGIN, "", *table(config.Config, "The run"), "", END + after])
    if args.check:
        return int(made != page)
    PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
