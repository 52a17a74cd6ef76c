"""Continues prompts: python -m llmx.generate --workdir W --prompt "..." [--prompt "..."]

Lengths, sampling and the key/value cache are in `llmx.model.sampling`.
"""

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from llmx.runtime import exits

if __name__ == "__main__":
    exits.silent_interrupts()

import jax

from llmx import config as config_lib
from llmx import sharding
from llmx.checkpoint import checkpointer, reshard
from llmx.config import checks
from llmx.config import recipe as recipe_lib
from llmx.data import tokenizers
from llmx.model import sampling
from llmx.model.execution import Execution
from llmx.pipeline.permutation import IDENTITY
from llmx.runtime import launch
from llmx.sharding import trees
from llmx.step.step import Recipe


def without_stages(recipe: Recipe, params: Any) -> tuple[Execution, Any]:
    """How and with what the devices of a mesh with stages generate: as ZeRO-3 replicas.

    The layers are put in the order of depth. Communicates over all mesh axes.

    Raises ValueError where the width does not divide over so many replicas.
    """
    execution, mesh = recipe.loss.execution, recipe.mesh
    if recipe.mesh.shape["stage"] == 1:
        return execution, params
    assert mesh.axis_names[:2] == ("stage", "data")  # so that devices stay in their order
    devices = mesh.devices.reshape(1, -1, *mesh.devices.shape[2:])
    mesh = jax.sharding.Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
    layout = execution.place.layout
    split = {"embed": sharding.LAYOUTS["zero3"].parameters["embed"]}
    layout = dataclasses.replace(layout, parameters=dict(layout.parameters) | split)
    wanted = reshard.stored(trees.named(recipe.loss.params), order=recipe.order, saved=IDENTITY)
    shapes = trees.unnamed(wanted, params)
    to = sharding.shardings(shapes, mesh, layout, rules=recipe.loss.axes)
    arrays = trees.named(params)
    reshard.move(arrays, wanted, order=IDENTITY, saved=recipe.order)
    execution = dataclasses.replace(execution, place=sharding.Placement(mesh, layout))
    return execution, jax.device_put(trees.unnamed(arrays, params), to)


def show_sample(config, recipe: Recipe, params: Any, tokenizer, log: Callable[[str], None]) -> None:
    """Logs a continuation of the config's prompt, at the end of a training run."""
    if not config.sample.prompt:
        return
    prompt = tokenizer.encode_prompt(config.sample.prompt).tolist()
    room = config.model.max_positions - len(prompt)
    if room < 1:
        log(f"no sample: sample.prompt has {len(prompt)} tokens, more than the model takes")
        return
    try:
        execution, params = without_stages(recipe, params)
    except ValueError as error:
        log(f"no sample: {error}; python -m llmx.generate makes one on fewer devices")
        return
    [added] = sampling.generate(
        recipe.loss.apply, params, execution, [prompt],
        max_tokens=min(config.sample.max_tokens, room), temperature=config.sample.temperature,
        top_k=config.sample.top_k, top_p=config.sample.top_p, seed=config.seed,
        stop_tokens=tokenizer.stop_tokens,
    )  # fmt: skip
    log(f"sample:\n{tokenizer.decode([*prompt, *added])}\n")


def _command() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(
        prog="python -m llmx.generate", description="Continues prompts with a trained run."
    )
    command.add_argument("--workdir", required=True, help="where llmx.train wrote the run")
    command.add_argument(
        "--prompt", action="append", default=[], help="text to continue; repeatable"
    )
    command.add_argument("--prompt-file", help="a file with one prompt per line")
    command.add_argument("--samples", type=int, default=1, help="continuations of each prompt")
    command.add_argument("--max-tokens", type=int, help="most tokens to add")
    command.add_argument("--temperature", type=float, help="0 = always the likeliest token")
    command.add_argument("--top-k", type=int, help="only the k likeliest tokens; 0 = all")
    command.add_argument("--top-p", type=float, help="only the likeliest up to this probability")
    command.add_argument("--seed", type=int, default=0, help="same seed, same text")
    command.add_argument("--step", type=int, help="checkpoint to use; the newest by default")
    command.add_argument("--tensor", type=int, default=1, help="devices that share each layer")
    command.add_argument("--fsdp", type=int, default=1, help="devices that share the parameters")
    command.epilog = "Defaults of the sampling come from the run's config (section sample)."
    return command


def main(argv: list[str] | None = None) -> int:
    """Prints prompts with their continuations. Exit code: 0 done, 2 where the input is wrong."""
    args = _command().parse_args(argv)
    try:
        _continue(args)
        sys.stdout.flush()
    except BrokenPipeError:
        sys.stdout = None  # the reader has seen enough
    # RuntimeError: no checkpoint of the run is good.
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _continue(args: argparse.Namespace):
    config = config_lib.load_run(args.workdir)
    texts = _prompt_texts(args, config.sample.prompt)
    coder = tokenizers.of_run(args.workdir)
    prompts = [coder.encode_prompt(text).tolist() for text in texts for _ in range(args.samples)]
    room = config.model.max_positions - max(len(prompt) for prompt in prompts)
    names = ("max_tokens", "temperature", "top_k", "top_p")
    settings = {name: getattr(config.sample, name) for name in names}
    # A default gives way to the model's limit, an explicit value does not.
    settings["max_tokens"] = max(1, min(settings["max_tokens"], room))
    settings |= {name: vars(args)[name] for name in names if vars(args)[name] is not None}
    max_tokens, *how = settings.values()
    problems = sampling.prompt_problems(config.model, prompts, max_tokens)
    if problems := [*problems, *sampling.sampling_problems(*how)]:
        raise ValueError("\n".join(problems))
    # This process alone, on the best device here, wherever the run was trained.
    alone = launch.LaunchConfig(coordinator="none", compile_cache=config.launch.compile_cache)
    launch.start(alone)
    recipe = _make_recipe(config, tensor=args.tensor, fsdp=args.fsdp)
    ema = config.optimizer.ema_decay > 0
    restored = checkpointer.restore_params(
        args.workdir, recipe.loss.params, ema=ema, step=args.step, log=launch.note
    )
    added = sampling.generate(
        recipe.loss.apply, restored.state, recipe.loss.execution, prompts, **settings,
        seed=args.seed, stop_tokens=coder.stop_tokens,
    )  # fmt: skip
    launch.note(f"step {restored.step}, {sum(map(len, added))} tokens added")
    for number, (prompt, new) in enumerate(zip(prompts, added, strict=True)):
        if len(prompts) > 1:
            which, sample = divmod(number, args.samples)
            print(f"--- prompt {which + 1}, sample {sample + 1}")
        print(coder.decode([*prompt, *new]), flush=True)


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
