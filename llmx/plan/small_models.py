"""Small models whose steps are timed on the machine at hand, to compare the planner with.

`MODELS` are those that `scripts/validate_planner.py --cpu` runs; nothing is fitted to them.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llmx import config
from llmx.config import checks, recipe
from llmx.contract import Batch
from llmx.model import families
from llmx.plan import stopwatch
from llmx.step import step
from llmx.step.step import Recipe


def _llama(heads: int, kv_heads: int, head_dim: int, mlp_dim: int, **others: Any) -> dict[str, Any]:
    heads_of = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}
    return heads_of | {"mlp_dim": mlp_dim} | others


def _gpt2(heads: int, **others: Any) -> dict[str, Any]:
    width = others["width"]
    return _llama(heads, heads, width // heads, 4 * width, **others)


# By name: family, (sequences, tokens), and the changes of `run_of`.
MODELS: dict[str, tuple[str, tuple[int, int], dict[str, Any]]] = {
    "llama 64": ("llama3", (16, 128), _llama(
        4, 2, 16, 192, width=64, num_layers=2, vocab_size=512)),
    "llama 256": ("llama3", (4, 256), _llama(
        4, 4, 64, 768, width=256, num_layers=4, vocab_size=4096)),
    "llama 512": ("llama3", (2, 256), _llama(
        8, 2, 64, 1536, width=512, num_layers=8, vocab_size=8192, precision="bf16",
        remat="full")),
    "llama 768": ("llama3", (4, 128), _llama(
        12, 4, 64, 2048, width=768, num_layers=4, vocab_size=32000, precision="bf16")),
    "qwen 128": ("qwen3", (4, 512), _llama(
        4, 2, 32, 512, width=128, num_layers=6, vocab_size=1024)),
    "qwen 384": ("qwen3", (4, 128), _llama(
        6, 3, 64, 1024, width=384, num_layers=12, vocab_size=16384, precision="bf16",
        remat="full")),
    "gemma3 256": ("gemma3", (4, 256), _llama(
        4, 1, 64, 1024, width=256, num_layers=6, vocab_size=8192, precision="bf16")),
    "gemma3 192": ("gemma3", (1, 1024), _llama(
        4, 2, 48, 576, width=192, num_layers=4, vocab_size=2048)),
    "gemma2 320": ("gemma2", (4, 256), _llama(
        5, 5, 64, 960, width=320, num_layers=6, vocab_size=4096, remat="full")),
    "gpt2 768": ("gpt2", (8, 64), _gpt2(12, width=768, num_layers=2, vocab_size=32000)),
    "gpt2 128": ("gpt2", (1, 1024), _gpt2(
        2, width=128, num_layers=8, vocab_size=512, precision="bf16")),
    "gpt2 512": ("gpt2", (2, 512), _gpt2(
        8, width=512, num_layers=4, vocab_size=2048, precision="bf16", remat="full")),
}  # fmt: skip


def run_of(
    family: str, batch: tuple[int, int], *, precision: str = "fp32", remat: str = "none",
    **model: Any,
) -> config.Config:  # fmt: skip
    """A resolved run on one CPU device; `batch`: sequences, tokens of each; `model`: changes of
    the family's smallest."""
    run = config.default()
    run.model = families.preset(family, **model)
    run.batch.size, run.batch.sequence_length = batch
    run.model.max_positions = max(run.model.max_positions, batch[1])
    run.precision, run.remat, run.launch.platform = precision, remat, "cpu"
    return checks.resolve(run, 1)


class Steps:
    """The compiled train step of a run on the first device, and its state."""

    def __init__(self, run: config.Config):
        self.recipe = recipe.make_recipe(run, devices=jax.devices()[:1])
        with jax.set_mesh(self.recipe.mesh):
            self._step = (
                step.make_train_step(self.recipe)
                .lower(self.recipe.abstract, self.recipe.abstract_batch)
                .compile(compiler_options=dict(self.recipe.compiler_options()))
            )
        self._state, self._batch = self.recipe.init(0), batch_of(self.recipe)

    @property
    def program(self) -> str:
        """The text of the compiled program."""
        return self._step.as_text()

    def seconds(self) -> float:
        """Runs one step; the time that it took."""
        begun = stopwatch.clock()
        with jax.set_mesh(self.recipe.mesh):
            self._state, report = self._step(self._state, self._batch)
            report.loss.block_until_ready()
            jax.block_until_ready(self._state)
        return stopwatch.clock() - begun


def measured(
    runs: Mapping[str, config.Config], rounds: int, note: Callable[[str], None]
) -> dict[str, float]:
    """Seconds of a step of each run: the least of several.

    The runs take turns, so that what others compute on the machine meets all of them; `note` is
    told how far it is.
    """
    steps = {}
    for name, run in runs.items():
        steps[name] = Steps(run)
        steps[name].seconds()
        note(f"compiled {name}")
    found = dict.fromkeys(runs, math.inf)
    for number in range(1, rounds + 1):
        for name, one in steps.items():
            found[name] = min(found[name], stopwatch.least(one.seconds, enough=1, most=1.0))
        note(f"round {number} of {rounds}")
    return found


def batch_of(of: Recipe) -> Batch:
    """Random tokens: every row one document."""
    B, T = of.batch_shape
    tokens = np.random.default_rng(0).integers(0, of.model.vocab_size, (B, T + 1), np.int32)
    ones = np.ones((B, T), np.int32)
    arrays = {
        "tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segment_ids": ones,
        "positions": ones.cumsum(axis=1, dtype=np.int32) - 1, "weights": ones.astype(np.float32),
    }  # fmt: skip
    return {
        name: jax.device_put(jnp.asarray(arrays[name], shape.dtype), shape.sharding)
        for name, shape in of.abstract_batch.items()
    }
