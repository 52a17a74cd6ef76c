"""Text of others on a terminal: names of files, templates and models may hold controls.

A terminal obeys what begins with an escape character: it moves the cursor, writes over lines,
changes titles, and some can be made to type. Such characters are shown as `repr` shows them.
"""

import argparse
import contextlib
import re
import sys
from typing import NoReturn, TextIO

from llmx.runtime import causes

# All control characters but tab and line feed, what turns the direction of writing, and halves of
# characters, which no stream can encode.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: object) -> str:
    """A text in which control characters are shown, as `\\x1b`; lines stay."""
    return _CONTROLS.sub(lambda found: repr(found[0])[1:-1], str(text))


def to_stderr(text: object) -> None:
    """Prints a line to standard error."""
    print(printable(text), file=sys.stderr, flush=True)


def try_to_stderr(text: object) -> None:
    """`to_stderr`, also where nobody reads it or its disk is full."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
        to_stderr(text)


def error(text: object) -> None:
    """Prints what ended a command, to standard error."""
    to_stderr(f"error: {causes.stated(text)}")


class Parser(argparse.ArgumentParser):
    """A command line whose errors, which repeat arguments, are printable."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def on(stream: TextIO, text: str) -> str:
    """What to write of a model's text: as it is, but to a terminal printable."""
    return printable(text) if stream.isatty() else text
