"""Exit codes of training: what ended a run, and so whether it is worth another start.

`llmx.runtime.supervisor` and the files in scripts/cluster/ decide by them.
"""

import signal
import sys

from llmx.runtime import printable

DONE = 0  # all steps are taken
CRASHED = 1  # an error that nobody foresaw, or an interpreter that was held: stacks are printed
REFUSED = 2  # config, data, checkpoint or work directory: fix what the last line names
STOPPED = 3  # by the guard or by divergence: the state before it is kept
UNSAVED = 74  # a checkpoint could not be written (EX_IOERR of sysexits.h)
AGAIN = 75  # SIGTERM, a hang, a lost process: start again (EX_TEMPFAIL of sysexits.h)
INTERRUPTED = 130  # Ctrl-C: saved after the first, at once after the second
TERMINATED = 143  # SIGTERM before the first step: there is nothing new to save


def silent_interrupts() -> None:
    """Ctrl-C ends this command in silence, with `INTERRUPTED`, also among the seconds of imports.

    For commands that have nothing to save, and until others have their own handler. Where Ctrl-C is
    ignored or handled already, it stays so.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def show(text: str) -> bool:
    """`show_raw` of a text that may hold controls of others, which are shown."""
    return show_raw(printable.printable(text))


def show_raw(text: str) -> bool:
    """Prints to a reader who may have seen enough, as `head`: that is no error.

    Whether there is a reader still.
    """
    try:
        print(text, flush=True)
    except BrokenPipeError:
        sys.stdout = None  # the interpreter flushes it once more at its end
    return sys.stdout is not None
