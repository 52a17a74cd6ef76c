"""Orbax's own reports of errors that are handled and reported here, kept out of the output."""

import functools
import logging
import sys
from typing import Any


@functools.cache
def silence_orbax() -> None:
    """Drops Orbax's tracebacks of failed reads and writes; once per program."""
    logging.getLogger("absl").addFilter(_is_news)
    # Writes that were under way when the first one failed fail too, and nobody asks them.
    logging.getLogger("asyncio").addFilter(lambda record: "orbax" not in record.getMessage())
    sys.unraisablehook = functools.partial(_report, sys.unraisablehook)


def _is_news(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname or not record.exc_info


def _report(report: Any, unraisable: Any) -> None:
    # After the first error of many reads or writes, Orbax closes the loop that the others call.
    if "Event loop is closed" not in str(unraisable.exc_value):
        report(unraisable)
