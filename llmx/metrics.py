"""Draws a run's loss curve, and its numbers by layer: python -m llmx.metrics WORKDIR"""

from llmx.runtime import exits, printable

if __name__ == "__main__":
    exits.silent_interrupts()

from llmx.checkpoint import mirror
from llmx.data import transient
from llmx.runtime import plot


def main() -> None:
    """Draws WORKDIR/loss.png, and layers.png where there are numbers by layer; prints the paths."""
    parser = printable.Parser(
        prog="python -m llmx.metrics",
        description="Draw the loss curves of a run to "
        "loss.png, and what it recorded of each layer, if anything, to layers.png.",
    )
    parser.add_argument("workdir", help="the --workdir of the run; it may still be training")
    workdir = parser.parse_args().workdir
    try:
        workdir = mirror.reading(workdir)
        exits.show("\n".join(map(str, plot.plot_all(workdir, log=printable.to_stderr))))
    except (ValueError, OSError) as error:
        text = f"{parser.prog}: error: {printable.printable(transient.told(error))}\n"
        parser.exit(transient.exit_code(error), text)


if __name__ == "__main__":
    main()
