"""Draws a run's loss curve: python -m llmx.metrics WORKDIR"""

import argparse

from llmx.runtime import plot


def main() -> None:
    """Draws WORKDIR/loss.png and prints its path."""
    parser = argparse.ArgumentParser(
        prog="python -m llmx.metrics", description="Draw the loss curves of a run to loss.png."
    )
    parser.add_argument("workdir", help="the --workdir of the run; it may still be training")
    try:
        print(plot.plot_loss(parser.parse_args().workdir))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
