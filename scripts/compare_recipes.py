"""Compresses the quickstart's model in several ways, and compares what comes out.

    python -m llmx.train --config configs/quickstart.py
    python scripts/compare_recipes.py                         # all rows
    python scripts/compare_recipes.py dense pruned_50 two_of_four

A row is a recipe of `llmx.compress`. Each is trained for equal tokens, the dense model too, so that
a smaller one is compared with what the larger would have become. Runs and stages are kept in
--folder; a killed command goes on. Add a row: it is a name in `runs`.
"""

import argparse
import os
import pathlib
import time

import jax

from llmx import config
from llmx.compress import command, saved
from llmx.compress.recipe import Recipe
from llmx.model import apply, sampling
from llmx.model.families import ModelConfig


def train(steps: int, rate: float, **options) -> tuple[str, dict]:
    """A stage that trains; options: keys of the config with "__" in the place of dots."""
    keys = {key.replace("__", "."): value for key, value in options.items()}
    return "train", dict(steps=steps, learning_rate=rate, warmup_steps=10, config=keys)


def one_shot(**options) -> tuple:
    return (("prune", options),)


def factored(method: str, share: float) -> tuple:
    """The stage, with a share of the parameters of the products."""
    return "low_rank", dict(method=method, share=share)


def shrunk(model: ModelConfig, share: float) -> tuple:
    """The stage that leaves a share of the layers' weights: about a quarter fewer layers, and a
    narrower MLP."""
    layers = model.num_layers - max(1, model.num_layers // 6)
    shapes, _ = apply.abstract_parameters(model)
    weights = sum(leaf.size for leaf in jax.tree.leaves(shapes["blocks"])) / model.num_layers
    column = sum(leaf.size for leaf in jax.tree.leaves(shapes["blocks"]["mlp"])) / (
        model.num_layers * model.mlp_dim
    )
    columns = (share * weights * model.num_layers / layers - weights) / column + model.mlp_dim
    return "shrink", dict(num_layers=layers, mlp_dim=int(columns) // 16 * 16)


def runs(steps: int, rate: float, model: ModelConfig, folder: str) -> dict[str, tuple]:
    """By name: the stages. Without a stage that trains a row shows what the method alone does.
    `rate`: the largest learning rate of those that do; `folder`: of the rows, of which "dense" is
    the teacher of others."""
    trained = train(steps, rate)

    taught = {"distillation__teacher": os.path.join(folder, "dense", "stages", "1_train.run")}

    def pruned(method: str, until: float, more: dict | None = None, **options) -> tuple:
        options = {f"pruning__{key}": value for key, value in options.items()} | (more or {})
        end = round(until * steps)
        return (
            train(
                steps, rate, pruning__method=method, pruning__begin_step=0, pruning__every=5,
                pruning__end_step=end, **options,
            ),
        )  # fmt: skip

    return {
        "dense": (trained,),
        "pruned_50": pruned("magnitude", 0.25),
        "pruned_50_by_layer": pruned("magnitude", 0.25, scope="layer"),
        "pruned_50_taught": pruned("magnitude", 0.25, taught, scope="layer"),
        "shrunk_30_taught": (shrunk(model, 0.68), train(steps, rate, **taught)),
        "pruned_80": pruned("magnitude", 0.5, sparsity=0.8),
        "two_of_four": pruned("n_m", 0.25),
        "movement_50": pruned("movement", 0.5),
        "shrunk_30": (shrunk(model, 0.68), trained),
        "magnitude": one_shot(method="magnitude"),
        "wanda": one_shot(method="wanda"),
        "sparse_gpt": one_shot(method="sparse_gpt"),
        "magnitude_2_4": one_shot(method="magnitude", pattern="2:4"),
        "wanda_2_4": one_shot(method="wanda", pattern="2:4"),
        "sparse_gpt_2_4": one_shot(method="sparse_gpt", pattern="2:4"),
        "plain_75": (factored("plain", 0.75),),
        "scaled_75": (factored("scaled", 0.75),),
        "whitened_75": (factored("whitened", 0.75),),
        "plain_50": (factored("plain", 0.5),),
        "scaled_50": (factored("scaled", 0.5),),
        "whitened_50": (factored("whitened", 0.5),),
        "plain_50_trained": (factored("plain", 0.5), trained),
        "whitened_50_trained": (factored("whitened", 0.5), trained),
    }


def speed(folder: str, tokens: int = 200, times: int = 8) -> float:
    """How many times as fast the last stage of a compression generates one row as the first: the
    least seconds of each, alternately, after a first time that compiles."""
    stages = pathlib.Path(folder, "stages")
    last = max(path.parent.name for path in stages.glob("*/done.json"))
    runs = [saved.opened(str(stages / name)) for name in ("0_start", last)]
    seconds = [[], []]
    for _ in range(times):
        for run, of_run in zip(runs, seconds, strict=True):
            loss, begun = run.recipe.loss, time.perf_counter()
            [added] = sampling.generate(
                loss.apply, run.params, loss.execution, [list(range(40, 72))], max_tokens=tokens,
                temperature=0.0,
            )  # fmt: skip
            of_run.append((time.perf_counter() - begun) / len(added))
    first, compressed = (min(of_run[1:]) for of_run in seconds)
    return first / compressed


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of those in `runs`")
    parser.add_argument("--steps", type=int, default=150, help="of what trains")
    parser.add_argument(
        "--learning-rate", type=float, default=3e-3, help="the largest, of what trains (0.003)"
    )
    parser.add_argument("--batches", type=int, default=16, help="of held-out text")
    parser.add_argument("--workdir", default="runs/quickstart", help="of the trained run")
    parser.add_argument("--folder", default="runs/compare_recipes", help="of the new runs")
    parser.add_argument(
        "--speed", action="store_true", help="only how much faster the compressed runs generate"
    )
    args = parser.parse_args()
    model = config.load_run(args.workdir).model
    known = runs(args.steps, args.learning_rate, model, args.folder)
    if wrong := sorted(set(args.names) - set(known)):
        parser.error(f"{wrong[0]!r} is unknown: use some of {', '.join(known)}")
    rows = {}
    for name in args.names if args.speed else ():
        print(f"{name}: generates {speed(os.path.join(args.folder, name)):.2f} times as fast")
    if args.speed:
        return
    for name in args.names or known:
        recipe = Recipe(stages=known[name], evaluation_batches=args.batches)
        rows[name] = command.compress(args.workdir, recipe, os.path.join(args.folder, name))
    first = next(iter(rows.values()))[0]
    dense = rows["dense"][-1] if "dense" in rows else first
    print(
        "| run | held-out loss | to the run | to dense | parameters | not zero | FLOPs | tokens/s |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, measured in {"as it was": [first], **rows}.items():
        last = measured[-1]
        changes = [f"{last.loss / other.loss - 1:+.2%}" for other in (first, dense)]
        print(
            f"| {name} | {last.loss:.4f} | {changes[0]} | {changes[1]} | "
            f"{last.parameters / first.parameters:.0%} | {last.nonzero:.0%} | "
            f"{last.flops / first.flops:.0%} | {last.tokens_per_second:.0f} |"
        )


if __name__ == "__main__":
    main()
