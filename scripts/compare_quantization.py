"""Held-out loss and size of a run with its weights in 8 and 4 bits, each way of `llmx.compress`.

    python -m llmx.train --config configs/quickstart.py
    python scripts/compare_quantization.py --workdir runs/quickstart

Prints a Markdown table. Nothing is written: parameters are quantized in memory, and evaluated on
the run's held-out text. configs/quickstart_10m.py makes a run of a larger model.
"""

import argparse
import dataclasses
import sys

import jax

from llmx.compress import quantize, saved
from llmx.compress.quantize_stage import Quantize
from llmx.config import recipe as recipe_lib
from llmx.evaluate import held_out
from llmx.model import packed

PLAIN = dict(method="nearest")
# Rows of the table: post-training quantization.
POST_TRAINING = {
    "int8, nearest, per channel": Quantize("int8", 0, **PLAIN),
    "int8 x int8, nearest": Quantize("int8", 0, activations="int8", **PLAIN),
    "int8 x int8, SmoothQuant": Quantize("int8", 0, activations="int8", scaling="smooth", **PLAIN),
    "int4, nearest, per channel": Quantize("int4", 0, **PLAIN),
    "int4, nearest, group 128": Quantize("int4", 128, **PLAIN),
    "int4, nearest, group 128, zero points": Quantize("int4", 128, symmetric=False, **PLAIN),
    "int4, nearest, group 32": Quantize("int4", 32, **PLAIN),
    "int4, AWQ, group 128": Quantize("int4", 128, scaling="awq", **PLAIN),
    "int4, GPTQ, per channel": Quantize("int4", 0),
    "int4, GPTQ, group 128": Quantize("int4", 128),
    "int4, GPTQ, group 128, by importance": Quantize("int4", 128, by_importance=True),
    "int4, AWQ and GPTQ, group 128": Quantize("int4", 128, scaling="awq"),
    "int4, GPTQ, group 32": Quantize("int4", 32),
}


def loss_of(run: saved.Opened, options: Quantize | None, dataset, batches: list, num: int):
    """Held-out loss, and bytes of the weights of products."""
    params, config = run.params, run.config
    if options is not None:
        loss = run.recipe.loss
        params = quantize.quantized(
            loss.apply, params, batches, loss.execution, options.packed, options.how
        )
        if options.activations:
            products = dataclasses.replace(
                config.products, format=options.activations, granularity="channel"
            )
            config = dataclasses.replace(config, products=products)
    recipe = recipe_lib.make_recipe(config)
    with jax.set_mesh(recipe.mesh):
        found = held_out.losses(
            recipe, held_out.make_step(recipe), params, dataset,
            batch_size=held_out.batch_size(config), batches=num,
        )  # fmt: skip
    products = [
        leaf for name, leaf in packed.named(params).items() if name.endswith("/kernel")
    ]  # fmt: skip
    return found["loss"], sum(part.nbytes for part in jax.tree.leaves(products))


def main(argv: list[str] | None = None) -> int:
    command = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    command.add_argument("--workdir", default="runs/quickstart", help="a trained run")
    command.add_argument("--batches", type=int, default=8, help="held-out batches; 0 = all")
    command.add_argument("--calibration", type=int, default=8, help="batches of training text")
    command.add_argument("--only", default="", help="rows whose name has this")
    args = command.parse_args(argv)
    run = saved.opened(args.workdir)
    dataset, batches = saved.dataset_of(run.config), saved.training_batches(run, args.calibration)
    whole, whole_bytes = loss_of(run, None, dataset, batches, args.batches)
    print(f"| weights | held-out loss | change | bytes of products |\n|---|---|---|---|\n"
          f"| fp32 | {whole:.4f} | | {whole_bytes:,} |", flush=True)  # fmt: skip
    for name, options in POST_TRAINING.items():
        if args.only in name:
            loss, size = loss_of(run, options, dataset, batches, args.batches)
            print(f"| {name} | {loss:.4f} | {100 * (loss / whole - 1):+.2f}% | "
                  f"{size:,} ({size / whole_bytes:.3f}) |", flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
