"""Loss on held-out data: python -m llmx.evaluate --workdir W [--step N] [--batches N] [--json]"""

import argparse
import json
import math
import sys
from collections.abc import Callable
from typing import Any

from llmx.runtime import exits

if __name__ == "__main__":
    exits.silent_interrupts()

import jax

from llmx import config, sharding
from llmx.checkpoint import checkpointer
from llmx.config import checks
from llmx.config import recipe as recipe_lib
from llmx.contract import State
from llmx.data import dataset as data_lib
from llmx.data import tokenizers
from llmx.runtime import launch
from llmx.step.step import Recipe


def held_out_loss(
    recipe: Recipe, eval_step: Callable, params: Any, dataset: data_lib.Dataset, *,
    batch_size: int, batches: int = 0,
) -> dict[str, float]:  # fmt: skip
    """Mean loss over the first `batches` batches of the held-out split; 0 = all of it.

    Every process must call it; all get the same numbers. Communicates over all mesh axes.

    Returns {"loss": nats per token, "perplexity", "num_tokens", "batches": evaluated,
    "split_batches": in the whole split}; loss is nan if the dataset holds nothing out.
    """
    to = recipe.loss.batch_sharding
    rows = sharding.process_rows(to, (batch_size, dataset.sequence_length))
    total = num_tokens = 0.0
    available = math.ceil(dataset.num_held_out_windows / batch_size)
    batches = min(batches or available, available)
    for index in range(batches):
        local = dataset.held_out_rows(index, rows, batch_size)
        batch = {name: sharding.assemble(local[name], rows, to, batch_size) for name in local}
        nats, count = jax.device_get(eval_step(params, batch))
        total, num_tokens = total + float(nats), num_tokens + float(count)
    loss = total / num_tokens if num_tokens else math.nan
    perplexity = math.exp(min(loss, 700.0)) if num_tokens else math.nan
    return {
        "loss": loss, "perplexity": perplexity, "num_tokens": num_tokens, "batches": batches,
        "split_batches": available,
    }  # fmt: skip


def batches_text(result: dict[str, float]) -> str:
    """Which part of the held-out split a result of `held_out_loss` is about."""
    batches, available = result["batches"], result["split_batches"]
    if batches < available:
        return f"over {batches} of {available} held-out batches"
    return f"over the whole held-out split, {available} batches"


def averaged(state: State) -> Any:
    """The parameters to evaluate and sample with: their average where the run keeps one."""
    return state.params if state.ema == () else state.ema


def batch_size(run: config.Config) -> int:
    """Rows of an evaluation's batch: a microbatch, or all of a step's, which stages need."""
    return run.batch.size // (run.batch.accumulation if run.mesh.stage == 1 else 1)


class Evaluation:
    """The held-out loss of a run that trains, when it is due."""

    def __init__(self, run: config.Config, recipe: Recipe, dataset: data_lib.Dataset, reporter):
        self._run, self._recipe, self._dataset, self._reporter = run, recipe, dataset, reporter
        self._eval_step = jax.jit(recipe.gradient.loss)

    def due(self, step: int) -> bool:
        every = self._run.evaluation.every
        return every > 0 and step % every == 0 and step < self._run.steps

    def __call__(self, step: int, state: State) -> None:
        """Reports the loss, unless nothing is held out. Every process must call it."""
        if not self._dataset.num_held_out_windows:
            return
        result = held_out_loss(
            self._recipe, self._eval_step, averaged(state), self._dataset,
            batch_size=batch_size(self._run), batches=self._run.evaluation.batches,
        )  # fmt: skip
        scalars = {name: result[name] for name in ("loss", "perplexity")}
        self._reporter.eval(step, scalars, batches_text(result))


def main(argv: list[str] | None = None) -> int:
    """Prints the held-out loss of a trained run."""
    command = argparse.ArgumentParser(
        prog="python -m llmx.evaluate", description="Loss of a trained run on its held-out split."
    )
    command.add_argument("--workdir", required=True, help="where llmx.train wrote the run")
    command.add_argument("--step", type=int, help="checkpoint to evaluate; the newest by default")
    batches = "0 = the whole split; by default the config's evaluation.batches, as in training"
    command.add_argument("--batches", type=int, help=batches)
    command.add_argument("--json", action="store_true", help="print one JSON object")
    args = command.parse_args(argv)
    try:
        step, result = _evaluate(args)
    # RuntimeError: no checkpoint of the run is good, or the devices have no room for it.
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    sentence = (
        f"step {step}: held-out loss {result['loss']:.4f} nats per token "
        f"(perplexity {result['perplexity']:.2f}) {batches_text(result)}, "
        f"{result['num_tokens']:,.0f} tokens"
    )
    try:
        if jax.process_index() == 0:
            print(json.dumps({**result, "step": step}) if args.json else sentence, flush=True)
    except BrokenPipeError:
        sys.stdout = None  # the reader has seen enough
    except OSError as error:
        print(f"error: the result cannot be written: {error}", file=sys.stderr)
        return 2
    return 0


def _evaluate(args: argparse.Namespace) -> tuple[int, dict[str, float]]:
    """The step of the checkpoint, and its held-out loss."""
    if args.batches is not None and args.batches < 0:
        raise ValueError(f"--batches={args.batches} must be at least 0: 0 is the whole split")
    run = config.load_run(args.workdir)
    tokenizers.require(args.workdir)
    launch.start(launch.elsewhere(run.launch))
    if run.mesh.stage > 1:
        run.batch.accumulation = 1  # its own evaluations too take the batch of a step
    # Whatever devices are here: the checkpoint fits any mesh, and a pass needs no stages.
    run.mesh = sharding.MeshConfig()
    checks.forget_training(run)
    run = checks.resolve(run, jax.device_count())
    recipe = recipe_lib.make_recipe(run)
    dataset = data_lib.open_dataset(
        run.data, sequence_length=run.batch.sequence_length, seed=run.seed, log=launch.note
    )
    ema = run.optimizer.ema_decay > 0
    restored = checkpointer.restore_params(
        args.workdir, recipe.loss.params, ema=ema, step=args.step, log=launch.note
    )
    with jax.set_mesh(recipe.mesh):
        result = held_out_loss(
            recipe, jax.jit(recipe.gradient.loss), restored.state, dataset,
            batch_size=batch_size(run),
            batches=run.evaluation.batches if args.batches is None else args.batches,
        )  # fmt: skip
    return restored.step, result


if __name__ == "__main__":
    sys.exit(main())
