"""What a trained run has learned: its loss on text, and its choices among given answers.

python -m llmx.evaluate --workdir W                       # on what the run held out
python -m llmx.evaluate --workdir W --data book.txt       # on all of other text
python -m llmx.evaluate --workdir W --choices arc.jsonl   # multiple-choice questions
"""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

from llmx.runtime import exits

if __name__ == "__main__":
    exits.silent_interrupts()

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from llmx import config, sharding
from llmx.checkpoint import mirror, model_params
from llmx.checkpoint.restore import Restored
from llmx.config import checks
from llmx.config import recipe as recipe_lib
from llmx.contract import State
from llmx.data import choices, tokenizers
from llmx.data import dataset as data_lib
from llmx.data.config import DataConfig
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


def num_text_bytes(dataset: data_lib.Dataset, *, batch_size: int, batches: int) -> int:
    """Bytes of the text that the tokens predicted in the first held-out batches stand for.

    Exact where tokens are bytes. Else those that each row's tokens decode to by themselves.
    """
    total, are_bytes = 0, isinstance(dataset.tokenizer, tokenizers.ByteTokenizer)
    for index in range(batches):
        rows = dataset.held_out_rows(index, range(batch_size), batch_size)
        for targets, weights in zip(rows["targets"], rows["weights"], strict=True):
            learned = targets[weights > 0]
            if are_bytes:
                total += int((learned != dataset.tokenizer.end_of_document).sum())
                continue
            ends = np.flatnonzero(learned == dataset.tokenizer.end_of_document) + 1
            for text in np.split(learned, ends):
                total += len(dataset.tokenizer.decode(text).encode())
    return total


def choice_nats(
    recipe: Recipe, params: Any, several: Sequence[choices.Continuation], *, batch_size: int,
    length: int, filler: int,
) -> np.ndarray:  # fmt: skip
    """The loss of each continuation behind its prompt in nats, summed over its tokens, [number].

    Every process must call it; all get the same numbers. Communicates over all mesh axes.
    """
    to, whole = recipe.loss.batch_sharding, NamedSharding(recipe.mesh, PartitionSpec())
    execution, found = recipe.loss.execution, []

    def losses(params, batch):
        return jax.sharding.reshard(recipe.loss.apply.losses(params, batch, execution)[0], whole)

    of_tokens, rows = jax.jit(losses), sharding.process_rows(to, (batch_size, length))
    for each in choices.packed(several, num_rows=batch_size, length=length, filler=filler):
        batch = {
            name: sharding.assemble(array[np.asarray(rows)], rows, to, batch_size)
            for name, array in each.batch.items()
        }
        nats_BT = np.asarray(jax.device_get(of_tokens(params, batch)), np.float64)
        for row, first, number in each.places:
            found.append(nats_BT[row, first : first + number].sum())
    return np.array(found)


def batches_text(result: dict[str, float]) -> str:
    """Which part of the held-out split a result of `held_out_loss` is about."""
    batches, available = result["batches"], result["split_batches"]
    if batches < available:
        return f"over {batches} of {available} held-out batches"
    return f"over the whole held-out split, {available} batches"


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
        params = self._recipe.loss.evaluated(state.averaged, state.frozen)
        result = held_out_loss(
            self._recipe, self._eval_step, params, self._dataset,
            batch_size=batch_size(self._run), batches=self._run.evaluation.batches,
        )  # fmt: skip
        # The loss of pairs is not one of tokens.
        names = ("loss",) if self._recipe.loss.preference else ("loss", "perplexity")
        scalars = {name: result[name] for name in names}
        self._reporter.eval(step, scalars, batches_text(result))


def main(argv: list[str] | None = None) -> int:
    """Prints the loss, or the share of right answers, of a trained run."""
    command = argparse.ArgumentParser(
        prog="python -m llmx.evaluate",
        description="Loss of a trained run on its held-out split or other text; right answers.",
    )
    command.add_argument("--workdir", required=True, help="where llmx.train wrote the run")
    command.add_argument("--step", type=int, help="checkpoint to evaluate; the newest by default")
    batches = "0 = all; by default the config's evaluation.batches, and all with --data"
    command.add_argument("--batches", type=int, help=batches)
    command.add_argument(
        "--data", action="append", default=[], metavar="SOURCE",
        help="text in place of the run's: file, folder, glob or shards:DIR, as data.sources",
    )  # fmt: skip
    command.add_argument(
        "--choices", metavar="FILE", help="JSONL of questions, as of HellaSwag, MMLU or ARC"
    )
    command.add_argument("--json", action="store_true", help="print one JSON object")
    args = command.parse_args(argv)
    if args.choices and (args.data or args.batches is not None):
        command.error("--choices goes without --data and --batches")
    try:
        step, result, sentence = _evaluate(args)
    # RuntimeError: no checkpoint of the run is good, or the devices have no room for it.
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        if jax.process_index() == 0:
            shown = (
                json.dumps({**result, "step": step}) if args.json else f"step {step}: {sentence}"
            )
            print(shown, flush=True)
    except BrokenPipeError:
        sys.stdout = None  # the reader has seen enough
    except OSError as error:
        print(f"error: the result cannot be written: {error}", file=sys.stderr)
        return 2
    return 0


def _evaluate(args: argparse.Namespace) -> tuple[int, dict[str, float], str]:
    """The step of the checkpoint, its result, and that as a sentence."""
    if args.batches is not None and args.batches < 0:
        raise ValueError(f"--batches={args.batches} must be at least 0: 0 is the whole split")
    args.workdir = mirror.reading(args.workdir)
    run = config.load_run(args.workdir)
    tokenizers.require(args.workdir)
    launch.start(launch.elsewhere(run.launch))
    if run.mesh.stage > 1:
        run.batch.accumulation = 1  # its own evaluations too take the batch of a step
    # Whatever devices are here: the checkpoint fits any mesh, and a pass needs no stages.
    run.mesh = sharding.MeshConfig()
    run.start_from = ""  # which may be gone
    checks.forget_training(run)
    if args.data or args.choices:
        own = f"{args.workdir}/{tokenizers.FILE_NAME}"
        of_text = DataConfig(tokenizer=own, cache_dir=run.data.cache_dir, bos=run.data.bos)
        run.data = dataclasses.replace(
            of_text, sources=tuple(args.data) or of_text.sources, text_key=run.data.text_key
        )
    run = checks.resolve(run, jax.device_count())
    of = _of_choices if args.choices else _of_text
    return of(args, run, recipe_lib.make_recipe(run))


def _params(args: argparse.Namespace, run: config.Config, recipe: Recipe) -> Restored:
    ema = run.optimizer.ema_decay > 0
    return model_params.restore_params(
        args.workdir, recipe.loss.params, ema=ema, step=args.step, log=launch.note
    )


def _of_text(
    args: argparse.Namespace, run: config.Config, recipe: Recipe
) -> tuple[int, dict[str, float], str]:
    data, batches = run.data, args.batches
    if args.data:
        data, batches = dataclasses.replace(data, held_out=1.0), batches or 0
    dataset = data_lib.open_dataset(
        data, sequence_length=run.batch.sequence_length, seed=run.seed, log=launch.note
    )
    if not dataset.num_held_out_windows:
        raise ValueError(
            f"the run in {args.workdir} holds nothing out (data.held_out={run.data.held_out}): "
            "name a text to evaluate on, --data FILE"
        )
    restored, rows = _params(args, run, recipe), batch_size(run)
    with jax.set_mesh(recipe.mesh):
        result = held_out_loss(
            recipe, jax.jit(recipe.gradient.loss), restored.state, dataset, batch_size=rows,
            batches=run.evaluation.batches if batches is None else batches,
        )  # fmt: skip
    num_bytes = num_text_bytes(dataset, batch_size=rows, batches=result["batches"])
    nats = result["loss"] * result["num_tokens"]
    result["bits_per_byte"] = nats / math.log(2) / num_bytes if num_bytes else math.nan
    sentence = (
        f"held-out loss {result['loss']:.4f} nats per token "
        f"(perplexity {result['perplexity']:.2f}, {result['bits_per_byte']:.4f} bits per byte) "
        f"{batches_text(result)}, {result['num_tokens']:,.0f} tokens"
    )
    if args.data:
        sentence = sentence.replace("held-out ", "").replace("split", "text")
    return restored.step, result, sentence


def _of_choices(
    args: argparse.Namespace, run: config.Config, recipe: Recipe
) -> tuple[int, dict[str, float], str]:
    coder, questions = tokenizers.of_run(args.workdir), choices.read(args.choices)
    length = run.batch.sequence_length
    several = [
        one
        for question in questions
        for one in choices.shortened(choices.continuations(question, coder), length)
    ]
    restored = _params(args, run, recipe)
    with jax.set_mesh(recipe.mesh):
        nats = choice_nats(
            recipe, restored.state, several, batch_size=batch_size(run), length=length,
            filler=coder.end_of_document,
        )  # fmt: skip
    result = choices.scores(questions, several, nats)
    sentence = (
        f"{result['accuracy']:.1%} of {result['questions']} questions right by likelihood, "
        f"{result['accuracy_per_byte']:.1%} by likelihood per byte (guessing: "
        f"{result['guessing']:.1%})"
    )
    return restored.step, result, sentence


if __name__ == "__main__":
    sys.exit(main())
