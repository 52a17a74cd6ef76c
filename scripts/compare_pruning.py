"""Compresses the quickstart's model in several ways, and compares what comes out.

    python -m llmx.train --config configs/quickstart.py
    python scripts/compare_pruning.py                         # all rows
    python scripts/compare_pruning.py dense pruned_50 two_of_four

A row is a recipe of `llmx.compress`. Each is trained for equal tokens, the dense model too, so that
a smaller one is compared with what the larger would have become. Runs and stages are kept in
--folder; a killed command goes on. Add a row: it is a name in RUNS.
"""

import argparse
import os

from llmx.compress import command
from llmx.compress.recipe import Recipe

STEPS = 80


def train(steps: int = STEPS, **config) -> tuple[str, dict]:
    """A stage that trains; config: keys with "__" in the place of dots."""
    keys = {key.replace("__", "."): value for key, value in config.items()}
    return "train", dict(steps=steps, learning_rate=3e-3, warmup_steps=10, config=keys)


def one_shot(**options) -> tuple:
    return (("prune", options),)


PRUNED = dict(pruning__begin_step=0, pruning__every=5)
# By name: the stages. Without a stage that trains a row shows what the method alone does.
RUNS = {
    "dense": (train(),),
    "pruned_50": (train(pruning__method="magnitude", pruning__end_step=40, **PRUNED),),
    "pruned_80": (
        train(pruning__method="magnitude", pruning__sparsity=0.8, pruning__end_step=40, **PRUNED),
    ),
    "two_of_four": (train(pruning__method="n_m", pruning__end_step=20, **PRUNED),),
    "movement_50": (train(pruning__method="movement", pruning__end_step=40, **PRUNED),),
    "shrunk_30": (("shrink", dict(num_layers=3, mlp_dim=336)), train()),
    "magnitude": one_shot(method="magnitude"),
    "wanda": one_shot(method="wanda"),
    "sparse_gpt": one_shot(method="sparse_gpt"),
    "magnitude_2_4": one_shot(method="magnitude", pattern="2:4"),
    "wanda_2_4": one_shot(method="wanda", pattern="2:4"),
    "sparse_gpt_2_4": one_shot(method="sparse_gpt", pattern="2:4"),
}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RUNS)}")
    parser.add_argument("--workdir", default="runs/quickstart", help="of the trained run")
    parser.add_argument("--folder", default="runs/compare_pruning", help="of the new runs")
    args = parser.parse_args()
    if wrong := sorted(set(args.names) - set(RUNS)):
        parser.error(f"{wrong[0]!r} is unknown: use some of {', '.join(RUNS)}")
    rows = {}
    for name in args.names or RUNS:
        recipe = Recipe(stages=RUNS[name], evaluation_batches=16)
        rows[name] = command.compress(args.workdir, recipe, os.path.join(args.folder, name))
    first = next(iter(rows.values()))[0]
    dense = rows["dense"][-1] if "dense" in rows else first
    print("| run | held-out loss | to the run | to dense | not zero | FLOPs | tokens/s |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, measured in {"as it was": [first], **rows}.items():
        last = measured[-1]
        changes = [f"{last.loss / other.loss - 1:+.2%}" for other in (first, dense)]
        print(
            f"| {name} | {last.loss:.4f} | {changes[0]} | {changes[1]} | {last.nonzero:.0%} | "
            f"{last.flops / first.flops:.0%} | {last.tokens_per_second:.0f} |"
        )


if __name__ == "__main__":
    main()
