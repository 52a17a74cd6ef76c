"""Writes text as memory-mapped token shards: python -m llmx.data --source FILES --output DIR.

Interrupted, it continues when run again, to the same bytes. --verify DIR checks a finished folder.
"""

import argparse
import functools
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from llmx.data import (
    build,
    config,
    dataset,
    preview,
    publish,
    remote,
    teacher_files,
    tokenizers,
    transient,
)
from llmx.data import shards as shards_lib
from llmx.data import sources as sources_lib
from llmx.runtime import exits, printable


def make_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = printable.Parser(
        prog="python -m llmx.data",
        description="Write text as memory-mapped token shards, to train on with "
        "--config.data.sources=\"('shards:DIR',)\". Run it again after an interruption and it "
        "continues.",
    )
    add = parser.add_argument
    # fmt: off
    add("--source", nargs="+", action="extend", default=[], metavar="SOURCE",
        help='"stdlib", or a file, folder or quoted glob of .txt .md .py .jsonl (also .gz, .zst) '
        ".parquet .arrow .array_record")
    add("--output", metavar="DIR", help="folder to write; new, or to continue")
    add("--tokenizer", default="bytes", metavar="NAME",
        help='"bytes" (default), or a tokenizer.json of Hugging Face tokenizers')
    add("--train-tokenizer", type=int, default=0, metavar="N",
        help="train a byte-level BPE of N tokens on the sources and use it")
    add("--text-key", default="text", metavar="KEY", help="JSONL key, column or feature (text)")
    add("--format", choices=config.TEXT_FORMATS, default="text",
        help='"chat": JSONL of messages, of which the assistant\'s turns are learned; '
        '"preference": JSONL of pairs, a chosen and a rejected answer')
    add("--chat-template", default="", metavar="FILE",
        help="Jinja file that renders conversations; by default the tokenizer's own")
    add("--no-bos", action="store_true",
        help="begin no document with the start token that the tokenizer adds to texts")
    add("--shard-tokens", type=int, default=build.SHARD_TOKENS, metavar="N",
        help=f"close a shard at this many tokens ({build.SHARD_TOKENS})")
    add("--skip-bad", action="store_true",
        help="leave out empty or unreadable files and records, counted, instead of an error")
    add("--teacher", default="", metavar="RUN",
        help="a run of llmx (or RUN@STEP): write beside the shards which tokens it finds "
        "likeliest, for distillation.top_k; the shards of --output may be there already")
    add("--top-k", type=int, default=64, metavar="K", help="of --teacher: so many tokens (64)")
    add("--teacher-context", type=int, default=0, metavar="C",
        help="of --teacher: score documents in windows of C tokens that overlap by half; by "
        "default the sequence length that it was trained with")
    add("--overwrite-teacher", action="store_true",
        help="discard what an earlier --teacher left in DIR")
    # fmt: on
    add("--overwrite", action="store_true", help="discard what an earlier run left in DIR")
    add("--verify", metavar="DIR", help="check every checksum of finished shards, write nothing")
    add(
        "--preview",
        nargs="?",
        type=int,
        const=3,
        default=0,
        metavar="N",
        help="show tokens of the first N documents (3), learned ones in green, and write nothing",
    )
    return parser


def _make_bar(*, unit: str):
    import rich.console
    from rich import progress

    sizes = [progress.DownloadColumn(), progress.TransferSpeedColumn()] if unit == "bytes" else []
    return progress.Progress(
        progress.TextColumn("{task.description}", markup=False), progress.BarColumn(),
        progress.TaskProgressColumn(), *sizes,
        progress.TextColumn("{task.fields[note]}", markup=False),
        progress.TimeRemainingColumn(), console=rich.console.Console(stderr=True),
    )  # fmt: skip


def _argument_problems(arguments: argparse.Namespace) -> Iterator[str]:
    yield from _teacher_problems(arguments)
    if not arguments.source and not _is_written(arguments):
        yield '--source is missing: name text, such as --source stdlib or "docs/**/*.md"'
    if arguments.preview < 0:
        yield f"--preview {arguments.preview} is below 1: give the number of documents to show"
    if not (arguments.output or arguments.preview):
        yield "--output is missing: name the folder to write"
    for source in arguments.source:
        if source.startswith(sources_lib.SHARDS_PREFIX):
            yield f"--source {source!r} is tokens already: name text"
        else:
            yield from (
                f"--source: {text}"
                for text in sources_lib.problems(source, skip_bad=arguments.skip_bad)
            )
    size = arguments.train_tokenizer
    low, high = tokenizers.MIN_TRAINED_SIZE, tokenizers.MAX_TRAINED_SIZE
    if size and not low <= size <= high:
        yield f"--train-tokenizer {size} is outside {low} to {high}: choose for example 4096"
    if size and arguments.tokenizer != "bytes":
        yield "--train-tokenizer and --tokenizer exclude each other: give one"
    if arguments.tokenizer == "auto":
        yield '--tokenizer "auto" has no meaning here: give "bytes" or a file'
    yield from (f"--tokenizer: {text}" for text in tokenizers.problems(arguments.tokenizer))
    if size and (arguments.format != "text" or arguments.preview):
        yield "--train-tokenizer goes with text that is written: give a --tokenizer for the rest"
    if arguments.chat_template and not os.path.isfile(os.path.expanduser(arguments.chat_template)):
        yield f"--chat-template {arguments.chat_template!r} is no file: name a Jinja file"
    if arguments.shard_tokens < 1:
        yield f"--shard-tokens {arguments.shard_tokens} is below 1: give at least 1"
    output = os.path.expanduser(arguments.output or ".")
    if remote.is_url(output):
        yield from remote.problems("--output ", output)
    elif os.path.exists(output) and not os.path.isdir(output):
        yield f"--output {output} is a file: name a folder"


def _is_written(arguments: argparse.Namespace) -> bool:
    """Whether a teacher is asked about shards that are there."""
    output = pathlib.Path(os.path.expanduser(arguments.output or "."), shards_lib.INDEX)
    return bool(arguments.teacher and arguments.output) and output.is_file()


def _teacher_problems(arguments: argparse.Namespace) -> Iterator[str]:
    if not arguments.teacher:
        if arguments.teacher_context or arguments.overwrite_teacher:
            yield "--teacher-context and --overwrite-teacher go with --teacher: name a run"
        return
    if arguments.top_k < 1:
        yield f"--top-k {arguments.top_k} is below 1: give for example 64"
    if arguments.teacher_context < 0:
        yield f"--teacher-context {arguments.teacher_context} is below 0: leave it out"
    if remote.is_url(arguments.output or ""):
        yield f"--teacher writes local folders: give a folder in place of {arguments.output}"
    if arguments.format == "preference":
        yield "--teacher with --format preference: the losses of pairs have no teacher"


def verify(folder: pathlib.Path) -> None:
    """Checks sizes and checksums of a finished folder, with a progress bar."""
    index = shards_lib.read_index(folder)
    with _make_bar(unit="shards") as bar:
        task = bar.add_task(
            f"verify {printable.printable(folder)}", total=len(index["shards"]), note=""
        )
        shards_lib.check_sizes(folder, index["shards"], dtype=np.dtype(index["dtype"]))
        for entry in index["shards"]:
            shards_lib.check_sums(folder, entry)
            bar.advance(task)
    shards_lib.open_shards(folder)
    exits.show(
        f"{folder}: {len(index['shards'])} shards, {index['tokens']:,} tokens: all checksums match"
    )


def _check_identity(folder: str | pathlib.Path, index: dict, recipe: build.Recipe) -> None:
    if index["identity"] != recipe.identity():
        raise ValueError(
            f"{folder} holds the shards of other sources or settings (or the source files have "
            "changed since): run with --overwrite, or choose another folder"
        )


def _already_complete(folder: pathlib.Path, recipe: build.Recipe) -> bool:
    """Whether an earlier run finished this very work. Raises where the folder holds another's."""
    if (folder / shards_lib.INDEX).is_file():
        index = shards_lib.read_index(folder)
        _check_identity(folder, index, recipe)
        shards_lib.open_shards(folder)
        (folder / shards_lib.PROGRESS).unlink(missing_ok=True)
        exits.show(f"{folder} is complete already: {index['tokens']:,} tokens; nothing to do")
        return True
    if foreign := build.foreign_files(folder):
        raise ValueError(
            f"{folder} holds other files ({', '.join(foreign[:3])}): choose a new or empty folder"
        )
    return False


def _make_recipe(arguments: argparse.Namespace) -> build.Recipe:
    """What the options describe."""
    tokenizer = arguments.train_tokenizer or tokenizers.load(arguments.tokenizer)
    if arguments.chat_template:
        tokenizer = tokenizer.with_template(tokenizers.read_template(arguments.chat_template))
    recipe = build.make_recipe(
        arguments.source, tokenizer=tokenizer, text_key=arguments.text_key,
        skip_bad=arguments.skip_bad, shard_tokens=arguments.shard_tokens,
        bos=not arguments.no_bos, format=arguments.format,
    )  # fmt: skip
    if recipe.left_out:
        printable.to_stderr(f"left out: {sources_lib.listed(recipe.left_out)}")
    return recipe


def write(arguments: argparse.Namespace) -> None:
    """Writes or continues the shards that the options describe."""
    recipe = _make_recipe(arguments)
    if remote.is_url(arguments.output):
        return _write_to_store(arguments, recipe)
    folder = pathlib.Path(os.path.expanduser(arguments.output))
    folder.mkdir(parents=True, exist_ok=True)

    def refuse() -> None:
        raise ValueError(f"another process is writing {folder}: wait for it to end")

    with build.exclusive(folder, on_wait=refuse):
        if arguments.overwrite:
            teacher_files.clear(folder)
            build.clear(folder)
        if not _already_complete(folder, recipe):
            _print_index(arguments.output, _build(folder, recipe))


def _write_to_store(arguments: argparse.Namespace, recipe: build.Recipe) -> None:
    """The same where --output is a URL."""
    upload = publish.Upload(arguments.output, dataset.DATA_CACHE)
    upload.folder.mkdir(parents=True, exist_ok=True)

    def refuse() -> None:
        raise ValueError(f"another process is writing {upload.url}: wait for it to end")

    with build.exclusive(upload.folder, on_wait=refuse):
        index = None if arguments.overwrite else upload.index()
        if index is not None:
            _check_identity(arguments.output, index, recipe)
            tokens = f"{index['tokens']:,} tokens"
            exits.show(f"{arguments.output} is complete already: {tokens}; nothing to do")
            return
        index = upload.begin(recipe.identity(), overwrite=arguments.overwrite)
        if index is None:
            index = _build(upload.folder, recipe, closed=upload.send)
        upload.end()
    _print_index(arguments.output, index)


def _build(
    folder: pathlib.Path, recipe: build.Recipe, *, closed: Callable[[], None] = lambda: None
) -> dict:  # fmt: skip
    """Writes the shards with a progress bar; returns the index."""
    size = isinstance(recipe.tokenizer, int)
    with _make_bar(unit="bytes") as bar:
        task = bar.add_task(
            "training the tokenizer" if size else "tokenising", total=recipe.num_bytes, note=""
        )

        def report(num_bytes: int, num_tokens: int) -> None:
            bar.update(task, completed=num_bytes, note=f"{num_tokens:,} tokens")

        return build.write_shards(folder, recipe, report=report, closed=closed)


def teach(arguments: argparse.Namespace) -> None:
    """Writes what a teacher says of the tokens of a finished folder, or goes on with it.

    Raises ValueError where the teacher does not fit the shards.
    """
    from llmx import config as runs
    from llmx.checkpoint import identity, mirror
    from llmx.runtime import launch

    place, step = identity.origin(arguments.teacher)
    workdir = mirror.reading(place)
    run = runs.load_run(workdir)
    folder = pathlib.Path(os.path.expanduser(arguments.output))
    opened = shards_lib.open_shards(folder)
    if tokenizers.of_run(workdir).fingerprint != opened.tokenizer.fingerprint:
        raise ValueError(
            f"--teacher {arguments.teacher} has another tokenizer than {folder} "
            f"({opened.vocab_size} tokens): write the shards with its tokenizer.json, --tokenizer "
            f"{workdir}/{tokenizers.FILE_NAME}"
        )
    context = arguments.teacher_context or run.batch.sequence_length
    if context > run.model.max_positions:
        raise ValueError(
            f"--teacher-context {context} is more than the {run.model.max_positions} positions "
            "that the teacher takes: use fewer"
        )
    if arguments.top_k > run.model.vocab_size:
        raise ValueError(
            f"--top-k {arguments.top_k} is more than the vocabulary of {run.model.vocab_size}"
        )
    launch.start(launch.LaunchConfig(coordinator="none"))
    with build.exclusive(folder, on_wait=lambda: _refuse(folder)):
        if arguments.overwrite_teacher:
            teacher_files.clear(folder)
        top, step, rows = _teacher_of(run, workdir, step, arguments.top_k, context)
        settings = teacher_files.Settings(
            str(pathlib.Path(place).resolve()), step, arguments.top_k, context
        )
        if teacher_files.is_complete(opened, settings):
            exits.show(f"{folder}/{teacher_files.FOLDER} is complete already; nothing to do")
            return
        with _make_bar(unit="tokens") as bar:
            task = bar.add_task("teacher", total=opened.num_tokens, note="")
            teacher_files.write(
                opened, settings, top, rows=rows,
                report=lambda done: bar.update(task, completed=done, note=f"{done:,} tokens"),
            )  # fmt: skip
    exits.show(
        f"{folder}/{teacher_files.FOLDER}: {arguments.top_k} tokens for each of "
        f"{opened.num_tokens:,}, by {arguments.teacher} at step {step}"
    )


def _refuse(folder: pathlib.Path) -> None:
    raise ValueError(f"another process is writing {folder}: wait for it to end")


# Logits of a batch exist whole: rows of a batch are as few as keep them below.
_LOGIT_BYTES = 512 << 20


def _teacher_of(run: Any, workdir: str, step: int | None, top_k: int, context: int):
    """(what `teacher_files.write` calls, the step of the checkpoint, rows of a batch), with the
    parameters split over all devices, or their average where the run keeps one."""
    import jax

    from llmx.checkpoint import model_params
    from llmx.config import checks
    from llmx.config import recipe as recipe_lib
    from llmx.model import top_tokens
    from llmx.model.experts import config as experts
    from llmx.runtime import launch

    devices = jax.device_count()
    averaged = run.optimizer.ema_decay > 0
    run = checks.for_inference(run, fsdp=devices)
    # Rows hold several documents, each computed as it would be alone.
    run.data.pack = True
    if run.experts.dispatch == experts.CAPACITY:
        run.experts.dispatch = experts.DROPLESS
    if run.attention.implementation == "cudnn":
        run.attention.implementation = "auto"
    recipe = recipe_lib.make_recipe(run)
    restored = model_params.restore_evaluated(
        workdir, recipe, ema=averaged, step=step, log=launch.note
    )
    top = top_tokens.make(recipe.loss.apply, recipe.loss.execution, number=top_k)
    rows = min(_LOGIT_BYTES // (4 * context * run.model.padded_vocab), 64)
    rows = max(rows // devices, 1) * devices
    return functools.partial(top, restored.state), restored.step, rows


def _print_index(folder: str, index: dict) -> None:
    skipped = f"; left out: {index['skipped']}" if index["skipped"] else ""
    exits.show(
        f"{folder}: {index['tokens']:,} tokens in {index['documents']:,} documents, "
        f"{len(index['shards'])} shards, vocabulary {index['vocab_size']:,}{skipped}"
    )


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status: 0 done, 2 wrong input, 75 if a disk failed."""
    arguments = make_parser().parse_args(argv)
    try:
        if arguments.verify:
            remote.require_local("--verify ", arguments.verify, "copy it to a local folder first")
            verify(pathlib.Path(os.path.expanduser(arguments.verify)))
            return 0
        if problems := list(_argument_problems(arguments)):
            raise ValueError("\n".join(problems))
        if arguments.preview:
            for line in preview.lines(
                _make_recipe(arguments), count=arguments.preview, color=preview.has_color(),
                shown=printable.printable,
            ):  # fmt: skip
                if not exits.show_raw(line):
                    break
            return 0
        if not _is_written(arguments) or arguments.source:
            write(arguments)
        if arguments.teacher:
            teach(arguments)
    # RuntimeError: no checkpoint of the teacher is good.
    except (ValueError, OSError, RuntimeError) as error:
        printable.error(transient.told(error))
        return transient.exit_code(error)
    except KeyboardInterrupt:
        print("interrupted; run the same command again to continue", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
