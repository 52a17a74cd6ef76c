"""Trains the quickstart's model further as integers, and compares it with what it would have become
in fp32, and with that rounded after training.

    python -m llmx.train --config configs/quickstart.py
    python scripts/compare_quantized_training.py [NAME ...] [--steps 150] [-- --config.x=y]

Each run begins with the parameters of --workdir and sees equal tokens in equal order; runs that are
in --folder already are not made again. What follows "--" is given to each. Add a row: it is a name
in RUNS.
"""

import argparse
import dataclasses
import pathlib
import subprocess
import sys

import jax
import numpy as np

from llmx import config as config_lib
from llmx.config import checks
from llmx.config import recipe as recipe_lib
from llmx.data import dataset as data_lib
from llmx.evaluate import held_out, saved_run
from llmx.model import quantization, sampling
from llmx.model.attention import cache
from llmx.model.quantization import QuantizationConfig

ROOT = pathlib.Path(__file__).parent.parent
FP32 = "fp32"
LEARNED = {"quantization.bits": 4, "quantization.scales": "learned"}
RUNS: dict[str, dict[str, object]] = {
    FP32: {},
    "int4 trained": {"quantization.bits": 4},
    "int4 trained, groups of 32": {"quantization.bits": 4, "quantization.group": 32},
    "int4 trained, learned scales": LEARNED,
    "int4 trained, learned scales, int8 inputs": LEARNED | {"quantization.activations": "average"},
    "int3 trained, learned scales": LEARNED | {"quantization.bits": 3},
    "int2 trained, learned scales": LEARNED | {"quantization.bits": 2},
}
# Of the fp32 run, rounded after training: to nearest, without any data.
ROUNDED = {
    "int8 rounded": dict(bits=8), "int4 rounded": dict(bits=4),
    "int4 rounded, groups of 32": dict(bits=4, group=32), "int3 rounded": dict(bits=3),
    "int2 rounded": dict(bits=2),
}  # fmt: skip


def train(name: str, args: argparse.Namespace) -> pathlib.Path:
    """The work directory of a run, which is made if it is not there."""
    workdir = pathlib.Path(args.folder, name.replace(", ", "_").replace(" ", "_"))
    keys = {
        "start_from": args.workdir, "steps": args.steps, "optimizer.learning_rate": args.rate,
        "optimizer.warmup_steps": 10, "evaluation.every": 0, "checkpoint.every": args.steps,
        "sample.prompt": "", **RUNS[name],
    }  # fmt: skip
    command = [
        sys.executable, "-m", "llmx.train", "--config", args.config,
        "--workdir", str(workdir), *(f"--config.{key}={value}" for key, value in keys.items()),
        *args.extra,
    ]  # fmt: skip
    if not (workdir / "checkpoints" / str(args.steps)).is_dir():
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return workdir


def held_out_loss(workdir: pathlib.Path, batches: int, rounded: QuantizationConfig) -> float:
    """Nats per token of a run's last checkpoint, its weights rounded as `rounded` says."""
    run = config_lib.load_run(str(workdir))
    run = saved_run.config_of(run, str(workdir), own_data=True)
    recipe = recipe_lib.make_recipe(run)
    data = data_lib.open_dataset(
        run.data, sequence_length=run.batch.sequence_length, seed=run.seed, log=lambda _: None
    )
    params = saved_run.evaluated(run, recipe, str(workdir)).state
    compute = recipe.loss.execution.policy.compute
    params = quantization.dequantized_on_mesh(params, rounded, compute)
    with jax.set_mesh(recipe.mesh):
        return held_out.losses(
            recipe, held_out.make_step(recipe), params, data,
            batch_size=held_out.batch_size(run), batches=batches,
        )["loss"]  # fmt: skip


def cache_text(workdir: str, rows: int = 16, prompt: int = 64, tokens: int = 64) -> str:
    """What an int8 KV cache changes of a run: greedy continuations of held-out text, and logits."""
    run = saved_run.config_of(config_lib.load_run(workdir), workdir, own_data=True)
    recipe = recipe_lib.make_recipe(checks.for_inference(run), devices=jax.devices()[:1])
    data = data_lib.open_dataset(
        run.data, sequence_length=run.batch.sequence_length, seed=run.seed, log=lambda _: None
    )
    text = data.held_out_rows(0, range(rows), rows)["tokens"].astype(np.int32)
    params = saved_run.params_of(run, recipe, workdir).state
    apply, found = recipe.loss.apply, {}
    zeros, positions = np.zeros_like(text), np.broadcast_to(np.arange(text.shape[1]), text.shape)
    for kind in cache.FORMATS:
        execution = dataclasses.replace(recipe.loss.execution, kv_cache=kind)
        added = sampling.generate(
            apply, params, execution, text[:, :prompt].tolist(), max_tokens=tokens, temperature=0
        )
        with jax.set_mesh(recipe.mesh):
            empty = apply.empty_cache(*text.shape, execution)
            logits, _ = apply.decode(
                params, empty, text, zeros, np.int32(positions), 0,
                dataclasses.replace(execution, place=sampling.placement(
                    execution.place, split_batch=True)),
            )  # fmt: skip
        logits = np.asarray(logits)[..., : run.model.vocab_size]
        size = cache.bytes_per_token(run.model, kind, execution.policy.compute)
        found[kind] = np.array(added), logits, size
    (texts, logits, size), (of_int8, rounded, small) = found[""], found[cache.INT8]
    same = texts == of_int8
    error = (rounded - logits) / logits.std()
    return (
        f"int8 KV cache: {small} bytes per token in place of {size}; {same.mean():.1%} of "
        f"{same.size} greedy tokens are equal, and {same.all(axis=1).sum()} of {rows} texts whole; "
        f"logits are off by {np.sqrt(np.square(error).mean()):.2%} of their deviation (root mean "
        f"square), and by {np.abs(error).max():.2%} at most"
    )


def main() -> None:
    command = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    command.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RUNS)}")
    command.add_argument("--workdir", default="runs/quickstart", help="of the trained run")
    command.add_argument("--config", default="configs/quickstart.py", help="of the trained run")
    command.add_argument(
        "--folder", default="runs/compare_quantized_training", help="of the new runs"
    )
    command.add_argument("--steps", type=int, default=150, help="of each run")
    command.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    command.add_argument("--batches", type=int, default=64, help="held-out batches; 0 = all")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = command.parse_args(sys.argv[1:split])
    args.extra = sys.argv[split + 1 :]
    names = [FP32, *(name for name in args.names or RUNS if name != FP32)]
    if wrong := sorted(set(names) - set(RUNS)):
        command.error(f"{wrong[0]!r} is unknown: use some of {', '.join(RUNS)}")
    found, plain = {}, QuantizationConfig()
    for name in names:
        workdir = train(name, args)
        rows = {name: plain}
        if name == FP32:
            rows |= {name: QuantizationConfig(**values) for name, values in ROUNDED.items()}
        for row, rounded in rows.items():
            found[row] = held_out_loss(workdir, args.batches, rounded)
            print(f"{row}: {found[row]:.4f}", flush=True)
    print("| run | held-out loss | to fp32 |\n| --- | --- | --- |")
    for name, loss in found.items():
        print(f"| {name} | {loss:.4f} | {loss / found[FP32] - 1:+.2%} |")
    print(cache_text(str(args.workdir)))


if __name__ == "__main__":
    main()
