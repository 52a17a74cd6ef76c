"""Small models whose steps are timed on the machine at hand, to compare the planner with.

`MODELS` are those that `scripts/validate_planner.py --cpu` runs; nothing is fitted to them.
"""

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

SECONDS = 3.0  # for which a model's steps are repeated, at least
STEPS = 5  # at least


def run_of(
    family: str, batch: tuple[int, int], *, precision: str = "fp32", remat: str = "none", **model
) -> config.Config:
    """A resolved run on one CPU device; `batch`: sequences, tokens of each; `model`: changes."""
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
