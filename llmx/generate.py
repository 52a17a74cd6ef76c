"""Continues prompts: python -m llmx.generate --workdir W --prompt "..." [--prompt "..."]

With --chat it is a conversation, rendered by the chat template of the run's tokenizer. Lengths,
sampling and the key/value cache are in `llmx.model.sampling`.
"""

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from llmx.runtime import exits, printable

if __name__ == "__main__":
    exits.silent_interrupts()

import jax

from llmx import config as config_lib
from llmx.checkpoint import mirror, model_params
from llmx.config import checks
from llmx.config import recipe as recipe_lib
from llmx.contract import State
from llmx.data import chat, generated, text_stream, tokenizers, transient
from llmx.model import sampling
from llmx.model.attention import cache
from llmx.model.execution import Execution
from llmx.runtime import launch
from llmx.step.step import Recipe


def show_sample(
    config, recipe: Recipe, state: State, tokenizer, log: Callable[[str], None]
) -> None:  # fmt: skip
    """Logs a continuation of the config's prompt, at the end of a training run."""
    if not config.sample.prompt:
        return
    prompt = tokenizer.encode_prompt(config.sample.prompt).tolist()
    room = config.model.max_positions - len(prompt)
    if room < 1:
        log(f"no sample: sample.prompt has {len(prompt)} tokens, more than the model takes")
        return
    try:
        params = recipe.loss.merged(state.averaged, state.frozen, state.extra)
        execution, params = model_params.without_stages(recipe, params)
    except ValueError as error:
        log(f"no sample: {error}; python -m llmx.generate makes one on fewer devices")
        return
    [added] = sampling.generate(
        recipe.loss.apply, params, execution, [prompt],
        max_tokens=min(config.sample.max_tokens, room), temperature=config.sample.temperature,
        top_k=config.sample.top_k, top_p=config.sample.top_p, seed=config.seed,
        stop_tokens=chat.stop_tokens(tokenizer, config.data.format),
    )  # fmt: skip
    log(f"sample:\n{tokenizer.decode([*prompt, *added])}\n")


def _command() -> argparse.ArgumentParser:
    command = printable.Parser(
        prog="python -m llmx.generate",
        description="Continues prompts, or a conversation, with a trained run.",
    )
    command.add_argument("--workdir", required=True, help="where llmx.train wrote the run")
    command.add_argument(
        "--prompt", action="append", default=[], help="text to continue; repeatable"
    )
    command.add_argument("--prompt-file", help="a file with one prompt per line")
    talk = "talk: turns are lines of standard input; /reset begins again, /exit ends"
    command.add_argument("--chat", action="store_true", help=talk)
    command.add_argument("--system", default="", help="system message of the conversation")
    command.add_argument("--stream", action="store_true", help="print the text as it comes")
    stop = "end a text before this string; repeatable"
    command.add_argument("--stop", action="append", default=[], metavar="STRING", help=stop)
    command.add_argument("--samples", type=int, default=1, help="continuations of each prompt")
    command.add_argument("--max-tokens", type=int, help="most tokens to add")
    command.add_argument("--temperature", type=float, help="0 = always the likeliest token")
    command.add_argument("--top-k", type=int, help="only the k likeliest tokens; 0 = all")
    command.add_argument("--top-p", type=float, help="only the likeliest up to this probability")
    kept = "how keys and values are kept: int8, or in the run's precision"
    command.add_argument("--kv-cache", choices=(cache.INT8, "precision"), help=kept)
    command.add_argument("--seed", type=int, default=0, help="same seed, same text")
    command.add_argument("--step", type=int, help="checkpoint to use; the newest by default")
    command.add_argument("--tensor", type=int, default=1, help="devices that share each layer")
    command.add_argument("--fsdp", type=int, default=1, help="devices that share the parameters")
    made = command.add_argument_group("a data set", "text of the run, to train another one on")
    made.add_argument(
        "--output",
        metavar="FILE",
        default="",
        help='write JSON lines {"text": prompt and continuation}; run again, it goes on',
    )
    made.add_argument(
        "--prompt-source",
        action="append",
        default=[],
        metavar="SOURCE",
        help="cut the prompts from this text: as data.sources, repeatable",
    )
    made.add_argument("--prompt-tokens", type=int, default=32, help="of a prompt of a source (32)")
    made.add_argument("--number", type=int, default=1000, help="lines to write (1000)")
    made.add_argument("--batch", type=int, default=32, help="prompts that are continued together")
    command.epilog = "Defaults of the sampling come from the run's config (section sample)."
    return command


def main(argv: list[str] | None = None) -> int:
    """Prints prompts with their continuations. Exit code: 0 done, 2 where the input is wrong."""
    args = _command().parse_args(argv)
    try:
        if args.prompt_source and not args.output:
            raise ValueError("--prompt-source goes with --output FILE: name one")
        if args.output and (args.chat or args.stream or args.stop):
            raise ValueError("--output goes without --chat, --stream and --stop: leave these out")
        if args.system and not args.chat:
            raise ValueError("--system goes with --chat: put it into the prompt")
        args.workdir = mirror.reading(args.workdir)
        mode = _chat if args.chat else _write if args.output else _continue
        mode(args)
        sys.stdout.flush()
    except BrokenPipeError:
        sys.stdout = None  # the reader has seen enough
    # RuntimeError: no checkpoint of the run is good.
    except (ValueError, RuntimeError, OSError) as error:
        printable.error(transient.told(error))
        return transient.exit_code(error)
    return 0


def _continue(args: argparse.Namespace) -> None:
    config = config_lib.load_run(args.workdir, with_ngrams=True)
    texts = _prompt_texts(args, config.sample.prompt)
    coder = tokenizers.of_run(args.workdir)
    prompts = [coder.encode_prompt(text).tolist() for text in texts for _ in range(args.samples)]
    room = config.model.max_positions - max(len(prompt) for prompt in prompts)
    settings = _settings(args, config, room)
    max_tokens, *how = settings.values()
    problems = sampling.prompt_problems(config.model, prompts, max_tokens)
    if problems := [*problems, *sampling.sampling_problems(*how)]:
        raise ValueError("\n".join(problems))
    model = _restore(args, config)
    stops = chat.stop_tokens(coder, config.data.format)
    settings |= {"seed": args.seed, "stop_tokens": stops}
    if args.stream or args.stop:
        rows = [text_stream.TextStream(coder, prompt, stops=args.stop) for prompt in prompts]
        shown = _Rows(rows, [_heading(args, prompts, row) for row in range(len(prompts))])
        before = [coder.decode(prompt) for prompt in prompts]
        for piece in shown.pieces(sampling.stream(*model, prompts, **settings), before):
            print(printable.on(sys.stdout, piece), end="", flush=True)
        return
    added = sampling.generate(*model, prompts, **settings)
    launch.note(f"{sum(map(len, added))} tokens added")
    for row, (prompt, new) in enumerate(zip(prompts, added, strict=True)):
        text = _heading(args, prompts, row) + coder.decode([*prompt, *new])
        print(printable.on(sys.stdout, text), flush=True)


def _write(args: argparse.Namespace) -> None:
    """Continuations of prompts, or of pieces of a text, as JSON lines."""
    config, coder = (
        config_lib.load_run(args.workdir, with_ngrams=True),
        tokenizers.of_run(args.workdir),
    )
    for name, least in (("prompt_tokens", 1), ("number", 1), ("batch", 1)):
        if vars(args)[name] < least:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag}={vars(args)[name]} must be at least {least}")
    longest, prompts = args.prompt_tokens, None
    if not args.prompt_source:
        texts = _prompt_texts(args, config.sample.prompt)
        prompts = [
            coder.encode_prompt(text).tolist() for text in texts for _ in range(args.samples)
        ]
        longest = max(map(len, prompts))
    settings = _settings(args, config, config.model.max_positions - longest)
    max_tokens, *how = settings.values()
    problems = sampling.prompt_problems(config.model, [[0] * longest], max_tokens)
    if problems := [*problems, *sampling.sampling_problems(*how)]:
        raise ValueError("\n".join(problems))
    number = args.number if prompts is None else len(prompts)
    if prompts is None:
        prompts = generated.prefixes(
            args.prompt_source, coder, length=longest, stride=longest + max_tokens,
            text_key=config.data.text_key,
        )  # fmt: skip
    model, stops = _restore(args, config), chat.stop_tokens(coder, config.data.format)

    def texts_of(chosen: list[list[int]], batch: int) -> list[str]:
        filled = [*chosen, *[chosen[-1]] * (args.batch - len(chosen))]  # one program does
        added = sampling.generate(
            *model, filled, **settings, seed=args.seed + batch, stop_tokens=stops
        )
        pairs = zip(chosen, added, strict=False)
        return [coder.decode([*prompt, *new]) for prompt, new in pairs]

    path = pathlib.Path(args.output)
    path.parent.mkdir(parents=True, exist_ok=True)
    done = generated.write(
        path, iter(prompts), texts_of, number=number, batch=args.batch,
        report=lambda done: launch.note(f"{done} of {number} texts"),
    )  # fmt: skip
    if done < number:
        launch.note(f"{args.output} has {done} texts: the source has no more prompts")


def _heading(args: argparse.Namespace, prompts: Sequence[Sequence[int]], row: int) -> str:
    which, sample = divmod(row, args.samples)
    return f"--- prompt {which + 1}, sample {sample + 1}\n" if len(prompts) > 1 else ""


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Texts that grow together, shown one after the other."""

    rows: Sequence[text_stream.TextStream]
    headings: Sequence[str]

    def pieces(
        self, blocks: Iterable[Sequence[Sequence[int]]], before: Sequence[str]
    ) -> Iterator[str]:
        """What to print, as tokens come; of later rows once those before have ended."""
        at, ended = 0, [False] * len(self.rows)
        waiting = [head + text for head, text in zip(self.headings, before, strict=True)]

        def ready(last: bool) -> Iterator[str]:
            nonlocal at
            while at < len(self.rows):
                yield waiting[at]
                waiting[at] = ""
                if not (last or ended[at]):
                    return
                yield "\n"
                at += 1

        yield from ready(last=False)
        for parts in blocks:
            for row, (stream, ids) in enumerate(zip(self.rows, parts, strict=True)):
                waiting[row] += stream.add(ids)
                ended[row] = stream.stopped
            yield from ready(last=False)
            if all(ended):
                return
        for row, stream in enumerate(self.rows):
            waiting[row] += stream.end()
        yield from ready(last=True)


def _settings(args: argparse.Namespace, config: config_lib.Config, room: int) -> dict[str, Any]:
    """Most tokens, temperature, top_k and top_p, by the flags and else by the config."""
    names = ("max_tokens", "temperature", "top_k", "top_p")
    settings = {name: getattr(config.sample, name) for name in names}
    # A default gives way to the model's limit, an explicit value does not.
    settings["max_tokens"] = max(1, min(settings["max_tokens"], room))
    return settings | {name: vars(args)[name] for name in names if vars(args)[name] is not None}


def _restore(args: argparse.Namespace, config: config_lib.Config) -> tuple[Any, Any, Execution]:
    """What `sampling` takes: the decoder, its parameters, and how it is executed."""
    # This process alone, on the best device here, wherever the run was trained.
    launch.start(launch.LaunchConfig(coordinator="none"))
    if args.kv_cache:
        config.sample.kv_cache = cache.INT8 if args.kv_cache == cache.INT8 else ""
    recipe = _make_recipe(config, tensor=args.tensor, fsdp=args.fsdp)
    ema = config.optimizer.ema_decay > 0
    restored = model_params.restore_evaluated(
        args.workdir, recipe, ema=ema, step=args.step, log=launch.note
    )
    launch.note(f"step {restored.step} of {args.workdir}")
    return recipe.loss.apply, restored.state, recipe.loss.execution


def _chat(args: argparse.Namespace) -> None:
    """A conversation, a line of standard input a turn."""
    if args.prompt or args.prompt_file or args.samples != 1:
        raise ValueError("--chat reads turns from standard input: leave out prompts and --samples")
    config, coder = (
        config_lib.load_run(args.workdir, with_ngrams=True),
        tokenizers.of_run(args.workdir),
    )
    chat.template_of(coder)  # raises where there is none
    _, *how = _settings(args, config, 1).values()
    if problems := list(sampling.sampling_problems(*how)):
        raise ValueError("\n".join(problems))
    beginning = [{"role": "system", "content": args.system}] if args.system else []
    stops = chat.stop_tokens(coder, "chat")
    model, talk = _restore(args, config), list(beginning)
    for line in _turns():
        if line.strip() in ("/exit", "/quit"):
            return
        if line.strip() == "/reset":
            talk = list(beginning)
            continue
        turn = [*talk, {"role": "user", "content": line}]
        try:
            prompt = _prompt_of(turn, coder, config)
        except ValueError as error:  # of this turn, and not of the run
            printable.error(error)
            continue
        room = config.model.max_positions - len(prompt)
        settings = _settings(args, config, room)
        settings |= {"max_tokens": min(settings["max_tokens"], room), "seed": args.seed}
        stream = text_stream.TextStream(coder, prompt, stops=args.stop)
        blocks = sampling.stream(*model, [prompt], **settings, stop_tokens=stops)
        for piece in _Rows([stream], [""]).pieces(blocks, [""]):
            print(printable.on(sys.stdout, piece), end="", flush=True)
        talk = [*turn, {"role": chat.ASSISTANT, "content": stream.text}]


def _prompt_of(talk: chat.Messages, coder: tokenizers.Tokenizer, config) -> list[int]:
    """Ids of a conversation that the assistant is to continue. Raises ValueError."""
    rendered = chat.template_of(coder).render(talk, generation_prompt=True)
    prompt = chat.encode(coder, rendered)[0].tolist()
    if len(prompt) >= config.model.max_positions:
        raise ValueError(
            f"the conversation has {len(prompt)} tokens, and the model has "
            f"max_positions={config.model.max_positions}: /reset begins another"
        )
    return prompt


def _turns() -> Iterator[str]:
    """Lines that a user writes, or that standard input holds, without blank ones."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if line.strip():
            yield line


def _prompt_texts(args: argparse.Namespace, default: str) -> list[str]:
    texts = list(args.prompt)
    if args.prompt_file:
        lines = pathlib.Path(args.prompt_file).read_text(encoding="utf-8").splitlines()
        texts += filter(None, lines)
    texts = texts or list(filter(None, [default]))
    if not texts:
        raise ValueError('there is no prompt: give --prompt "..." or --prompt-file FILE')
    if args.samples < 1:
        raise ValueError(f"--samples={args.samples} must be at least 1")
    return texts


def _make_recipe(config: config_lib.Config, *, tensor: int, fsdp: int) -> Recipe:
    """The run's model on a mesh of its own: a token at a time needs fewer devices than training."""
    devices = jax.devices()
    if min(tensor, fsdp) < 1 or tensor * fsdp > len(devices):
        limits = f"1 to {len(devices)}, the devices here"
        raise ValueError(f"--tensor={tensor} times --fsdp={fsdp} must be {limits}")
    run = checks.for_inference(config, tensor=tensor, fsdp=fsdp)
    return recipe_lib.make_recipe(run, devices=devices[: tensor * fsdp])


if __name__ == "__main__":
    sys.exit(main())
