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

from llmx.runtime import exits, printable

if __name__ == "__main__":
    exits.silent_interrupts()

import jax

from llmx import config
from llmx.checkpoint import mirror, resume
from llmx.config import recipe as recipe_lib
from llmx.data import dataset as data_lib
from llmx.data import tokenizers, transient
from llmx.evaluate import held_out, multiple_choice, saved_run
from llmx.model import looked_up
from llmx.runtime import launch
from llmx.step.step import Recipe


def main(argv: list[str] | None = None) -> int:
    """Prints the loss, or the share of right answers, of a trained run."""
    command = printable.Parser(
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
        "--choices", action="append", default=[], metavar="FILE",
        help="JSONL of questions, as of HellaSwag, MMLU or ARC",
    )  # fmt: skip
    command.add_argument("--json", action="store_true", help="print one JSON object")
    args = command.parse_args(argv)
    if "" in args.choices:
        command.error("--choices='' names no file: name a JSONL of questions")
    if args.choices and (args.data or args.batches is not None):
        command.error("--choices goes without --data and --batches")
    try:
        step, result, sentence = _evaluate(args)
    # RuntimeError: no checkpoint of the run is good, or the devices have no room for it.
    except (ValueError, RuntimeError, OSError) as error:
        printable.error(transient.told(error))
        return transient.exit_code(error)
    try:
        if jax.process_index() == 0:
            shown = (
                json.dumps({**result, "step": step}) if args.json else f"step {step}: {sentence}"
            )
            exits.show(shown)
    except OSError as error:
        printable.error(f"the result cannot be written: {error}")
        return 2
    return 0


def _evaluate(args: argparse.Namespace) -> tuple[int, dict[str, float], str]:
    """The step of the checkpoint, its result, and that as a sentence."""
    if args.batches is not None and args.batches < 0:
        raise ValueError(f"--batches={args.batches} must be at least 0: 0 is the whole split")
    args.workdir = mirror.reading(args.workdir)
    if args.choices:
        run = config.load_run(args.workdir, with_ngrams=True)
    else:
        run = config.load_run_with_tables(args.workdir)
    tokenizers.require(args.workdir)
    launch.start(launch.LaunchConfig())
    own_data = not (args.data or args.choices)
    run = saved_run.config_of(run, args.workdir, sources=args.data, own_data=own_data)
    of = _of_choices if args.choices else _of_text
    return of(args, run, recipe_lib.make_recipe(run))


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
    restored = saved_run.evaluated(run, recipe, args.workdir, step=args.step)
    rows, view = held_out.batch_size(run), None
    if (of_host := resume.host_rows(recipe, restored, args.workdir)) is not None:
        view = of_host.view(restored.state[looked_up.TABLES])
    with jax.set_mesh(recipe.mesh):
        result = held_out.losses(
            recipe, held_out.make_step(recipe), restored.state, dataset, batch_size=rows,
            batches=run.evaluation.batches if batches is None else batches, view=view,
        )  # fmt: skip
    if recipe.loss.preference is not None:
        return restored.step, result, _pairs_text(result)
    if held_out.of_records(recipe):
        return restored.step, result, _clicks_text(result)
    num_bytes = held_out.num_text_bytes(dataset, batch_size=rows, batches=result["batches"])
    nats = result["loss"] * result["num_tokens"]
    result["bits_per_byte"] = nats / math.log(2) / num_bytes if num_bytes else math.nan
    sentence = (
        f"held-out loss {result['loss']:.4f} nats per token "
        f"(perplexity {result['perplexity']:.2f}, {result['bits_per_byte']:.4f} bits per byte) "
        f"{held_out.extent_text(result)}, {result['num_tokens']:,.0f} tokens"
    )
    if args.data:
        sentence = sentence.replace("held-out ", "").replace("split", "text")
    return restored.step, result, sentence


def _pairs_text(result: dict[str, float]) -> str:
    return (
        f"held-out loss {result['loss']:.4f} per pair (the chosen text gained more in "
        f"{result['accuracy']:.1%}, margin {result['margin']:+.4f}) "
        f"{held_out.extent_text(result)}, {result['num_pairs']:,.0f} pairs"
    )


def _clicks_text(result: dict[str, float]) -> str:
    return (
        f"held-out loss {result['loss']:.4f} nats per record (AUC {result['auc']:.4f}, normalized "
        f"entropy {result['normalized_entropy']:.4f}, predicted over actual clicks "
        f"{result['calibration']:.3f}) {held_out.extent_text(result)}, "
        f"{result['num_records']:,} records"
    )


def _of_choices(
    args: argparse.Namespace, run: config.Config, recipe: Recipe
) -> tuple[int, dict, str]:
    coder, length = tokenizers.of_run(args.workdir), run.batch.sequence_length
    files = [multiple_choice.QuestionFile.open(path, coder, length) for path in args.choices]
    if len({file.name for file in files}) < len(files):
        raise ValueError("--choices names two files of one name, by which figures are reported")
    restored = saved_run.params_of(run, recipe, args.workdir, step=args.step)
    scorer = multiple_choice.scorer_of(run, recipe, recipe.loss.execution, coder.end_of_document)
    results = {file.name: file.answered(scorer, restored.state) for file in files}
    sentences = {
        name: f"{result['accuracy']:.1%} of {result['questions']} questions right by likelihood, "
        f"{result['accuracy_per_byte']:.1%} by likelihood per byte (guessing: "
        f"{result['guessing']:.1%})"
        for name, result in results.items()
    }
    if len(files) == 1:
        return restored.step, results[files[0].name], sentences[files[0].name]
    lines = "\n".join(f"  {name}: {sentence}" for name, sentence in sentences.items())
    return restored.step, results, f"\n{lines}"


if __name__ == "__main__":
    sys.exit(main())
