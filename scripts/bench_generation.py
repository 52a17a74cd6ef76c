"""Tokens per second that a model of 28M parameters generates, beside transformers.

    pip install -e '.[hf]' && python scripts/bench_generation.py [--rounds 5] [--tokens 128]

A Llama with random weights is exported, and both read the files. Both continue the same prompts,
always with the likeliest token, in fp32 with a KV cache. Rounds alternate in one process; printed
are medians, and the median of the ratios of neighboring rounds. What is compiled or loaded before
the first token is left out of both.
"""

import argparse
import os
import statistics
import tempfile
import time

import jax
import numpy as np

from llmx import config
from llmx.checkpoint import hf
from llmx.config import checks
from llmx.config import recipe as recipe_lib
from llmx.model import apply, families, sampling

MODEL = dict(width=512, num_layers=8, num_heads=8, num_kv_heads=4, head_dim=64, mlp_dim=1408,
             vocab_size=4096, tied_head=False, max_positions=1024)  # fmt: skip
PROMPT = 32


def ours(directory: str):
    """(prompts, tokens) -> lists of new tokens, by llmx."""
    model, params = hf.load(directory)
    run = config.default()
    run.model, run.precision = model, "fp32"
    recipe = recipe_lib.make_recipe(checks.for_inference(run), devices=jax.devices()[:1])
    params = jax.device_put(params, jax.tree.map(lambda leaf: leaf.sharding, recipe.loss.params))

    def generate(prompts: np.ndarray, tokens: int) -> list[list[int]]:
        return sampling.generate(
            recipe.loss.apply, params, recipe.loss.execution, prompts.tolist(), max_tokens=tokens,
            temperature=0,
        )  # fmt: skip

    return generate


def theirs(directory: str):
    """The same by transformers."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def generate(prompts: np.ndarray, tokens: int) -> list[list[int]]:
        inputs = torch.from_numpy(prompts).long()
        with torch.no_grad():
            found = model.generate(
                inputs, attention_mask=torch.ones_like(inputs), do_sample=False,
                min_new_tokens=tokens, max_new_tokens=tokens, pad_token_id=0,
            )  # fmt: skip
        return found[:, prompts.shape[1] :].tolist()

    return generate


def seconds(generate, prompts: np.ndarray, tokens: int) -> float:
    start = time.perf_counter()
    found = generate(prompts, tokens)
    assert all(len(row) == tokens for row in found)
    return time.perf_counter() - start


def main() -> None:
    command = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    command.add_argument("--rounds", type=int, default=5)
    command.add_argument("--tokens", type=int, default=128, help="new tokens of each text")
    args = command.parse_args()
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    model = families.preset("llama3", **MODEL)
    params = jax.device_get(jax.jit(lambda: apply.init_parameters(model, 0))())
    print(f"{sum(leaf.size for leaf in jax.tree.leaves(params)):,} parameters")
    with tempfile.TemporaryDirectory() as directory:
        hf.export(params, model, f"{directory}/model")
        programs = {
            "llmx": ours(f"{directory}/model"),
            "transformers": theirs(f"{directory}/model"),
        }
    for batch in (1, 8):
        prompts = np.random.default_rng(0).integers(0, 4096, (batch, PROMPT)).astype(np.int32)
        texts = [generate(prompts, args.tokens) for generate in programs.values()]
        equal = np.mean(np.array(texts[0]) == np.array(texts[1]))
        times = {name: [] for name in programs}
        for _ in range(args.rounds):
            for name, generate in programs.items():
                times[name].append(seconds(generate, prompts, args.tokens))
        ratios = [b / a for a, b in zip(times["llmx"], times["transformers"], strict=True)]
        rates = {n: batch * args.tokens / statistics.median(found) for n, found in times.items()}
        print(
            f"batch {batch}: "
            + ", ".join(f"{name} {rate:.0f} tokens/s" for name, rate in rates.items())
            + f"; llmx is {statistics.median(ratios):.2f} times as fast "
            f"({min(ratios):.2f} to {max(ratios):.2f}); {equal:.1%} of the tokens are equal"
        )


if __name__ == "__main__":
    main()
