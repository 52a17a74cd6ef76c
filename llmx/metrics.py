"""Draws a run's loss curve: python -m llmx.metrics WORKDIR"""

import argparse
import sys

from llmx.runtime import exits

if __name__ == "__main__":
    exits.silent_interrupts()

from llmx.runtime import plot


def main() -> None:
    """Draws WORKDIR/loss.png and prints its path."""
    parser = argparse.ArgumentParser(
        prog="python -m llmx.metrics", description="Draw the loss curves of a run to loss.png."
    )
    parser.add_argument("workdir", help="the --workdir of the run; it may still be training")
    workdir = parser.parse_args().workdir
    try:
        print(plot.plot_loss(workdir, log=lambda text: print(text, file=sys.stderr)))
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
