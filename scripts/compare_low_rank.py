"""Factors of low rank in the quickstart's model, by several methods, and what they lose.

    python -m llmx.train --config configs/quickstart.py
    python scripts/compare_low_rank.py                       # all rows
    python scripts/compare_low_rank.py plain_50 whitened_50

A row is a recipe of `llmx.compress`. Runs and stages are kept in --folder; a killed command goes
on. Add a row: it is a name in RUNS.
"""

import argparse
import os

from llmx.compress import command
from llmx.compress.recipe import Recipe

TRAIN = ("train", dict(steps=150, learning_rate=3e-3, warmup_steps=10))


def of(method: str, **size) -> tuple:
    """The stage, with a share of the parameters of the products, or of their energy."""
    return "low_rank", dict(method=method, **size)


RUNS = {
    "plain_75": (of("plain", share=0.75),),
    "scaled_75": (of("scaled", share=0.75),),
    "whitened_75": (of("whitened", share=0.75),),
    "plain_50": (of("plain", share=0.5),),
    "scaled_50": (of("scaled", share=0.5),),
    "whitened_50": (of("whitened", share=0.5),),
    "dense_trained": (TRAIN,),
    "plain_50_trained": (of("plain", share=0.5), TRAIN),
    "whitened_50_trained": (of("whitened", share=0.5), TRAIN),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RUNS)}")
    parser.add_argument("--workdir", default="runs/quickstart", help="of the trained run")
    parser.add_argument("--folder", default="runs/compare_low_rank", help="of the new runs")
    args = parser.parse_args()
    if wrong := sorted(set(args.names) - set(RUNS)):
        parser.error(f"{wrong[0]!r} is unknown: use some of {', '.join(RUNS)}")
    rows = {}
    for name in args.names or RUNS:
        recipe = Recipe(stages=RUNS[name], evaluation_batches=8)
        rows[name] = command.compress(args.workdir, recipe, os.path.join(args.folder, name))
    first = next(iter(rows.values()))[0]
    print("| run | held-out loss | to the run | parameters | FLOPs | tokens/s |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, measured in {"as it was": [first], **rows}.items():
        last = measured[-1]
        print(
            f"| {name} | {last.loss:.4f} | {last.loss / first.loss - 1:+.1%} | "
            f"{last.parameters / first.parameters:.0%} | {last.flops / first.flops:.0%} | "
            f"{last.tokens_per_second:.0f} |"
        )


if __name__ == "__main__":
    main()
