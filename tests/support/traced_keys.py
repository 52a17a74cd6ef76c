"""What a resolved config makes of a step and of its data, in forms that can be compared.

Each function takes a config and returns something else for another step, state or batch. Nothing
is compiled or allocated: meshes are abstract, and attention is the plain one.
"""

import contextlib
import dataclasses
import hashlib
import io
import math
import re

import jax
import numpy as np

from llmx import config as config_lib
from llmx import sharding
from llmx.config import checks, stage_memory, utilization
from llmx.config import recipe as recipe_lib
from llmx.data import dataset as dataset_lib
from llmx.data import loader
from llmx.model import families
from llmx.pipeline import stages
from llmx.runtime import divergence
from llmx.sharding.mesh import within
from llmx.step import step

CPU = jax.sharding.AbstractDevice("", None, "cpu")


def resolved(*changes):
    """A small run of one device with all of these keys, one dict after the other; "model" is a
    preset."""
    keys = {"mesh.data": 1, "batch.size": 4, "batch.sequence_length": 16, "steps": 20}
    keys |= {"model.num_layers": 2, "model.width": 64, "model.vocab_multiple": 64}
    keys |= {"attention.implementation": "reference", "workdir": "unused"}
    for each in changes:
        keys |= each
    run = config_lib.default()
    if "model" in keys:
        run.model = families.preset(keys.pop("model"))
    for key, value in keys.items():
        config_lib.set_value(run, key, value)
    return checks.resolve(run, math.prod(abs(vars(run.mesh)[axis]) for axis in sharding.AXES))


def recipe_of(run):
    made = recipe_lib.make_recipe(run, devices=CPU)
    return dataclasses.replace(made, compiler_options=dict)


def hashed(function, *args):
    """A hash of what a function traces to, with its constants."""
    traced = (function if hasattr(function, "trace") else jax.jit(function)).trace(*args).jaxpr
    found = hashlib.sha256(re.sub(r"0x[0-9a-f]+", "", str(traced)).encode())
    for constant in traced.consts:
        found.update(np.asarray(constant).tobytes())
    return found.hexdigest()


def shapes(run):
    """Shapes, types and shardings of the state and of a batch."""
    recipe = recipe_of(run)
    return str(recipe.abstract), str(recipe.abstract_batch), str(recipe.mesh)


def loss(run):
    """What is minimized: the forward pass."""
    recipe = recipe_of(run)
    of = recipe.loss

    def minimized(params, frozen, batch, extra):
        rows = of.prepared(batch, frozen, step=0) | {"share": batch["weights"]}
        with of.execution.policy.products():
            params = of.joined(params, frozen, training=True)
            return of.of_rows(of.apply.losses(params, rows, of.execution), rows, extra)

    with within(recipe.mesh):
        return hashed(minimized, of.params, of.frozen, recipe.abstract_batch, of.abstract_extra)


def a_step(run):
    """The last phase of a step: gradient, exchange and update."""
    recipe = recipe_of(run)
    with within(recipe.mesh):
        train_step = step.make_train_step(recipe, list(recipe.strategy.phases)[-1])
        return hashed(train_step, recipe.abstract, recipe.abstract_batch)


def between(run):
    """What runs between steps, and when."""
    recipe = recipe_of(run)
    programs = {str(name): each for name, each in recipe.strategy.outer.items()} | recipe.between
    table = recipe.strategy.timetable
    due = [
        (table.phase_of(n, -1), table.fragments_after(n), recipe.between_after(n))
        for n in range(run.steps)
    ]
    with within(recipe.mesh):
        return due, {name: hashed(each, recipe.abstract) for name, each in programs.items()}


def rates(run):
    """The learning rates."""
    return [float(rate) for rate in jax.vmap(recipe_of(run).schedule)(np.arange(run.steps))]


def new_tables(run):
    """What tables begin with."""
    recipe = recipe_of(run)
    with within(recipe.mesh):
        return [hashed(each.init, recipe.loss.params) for each in recipe.constraints.values()]


def new_scale(run):
    """What a loss is multiplied by at first."""
    return [float(each.scale) for each in recipe_of(run).loss.init_extra().values()]


def staged(run):
    """The schedule of a pipeline, its stages, and whose weight gradients wait."""
    table = utilization.table_of(run)
    chunks = stages.cut(run.model.num_blocks, table.stage_of, run.pipeline.layers)
    return str(table), str(chunks), stage_memory.deferred_layers(run, 2**25)


def kept_tokens(run):
    """What a continuation keeps of keys and values."""
    recipe = recipe_of(run)
    with within(recipe.mesh):
        execution = recipe.loss.execution
        return str(jax.eval_shape(lambda: recipe.loss.apply.empty_cache(2, 8, execution)))


def rolled_back(run):
    """When a run goes back, to where, with which batches and rates."""
    section = run.rollback
    watch = divergence.LossWatch(section, first=0, saved=None)
    losses = [3.0 - 0.01 * n for n in range(100)] + [3.0 + 0.1 * n for n in range(100)]
    causes = [watch.see(n, each) for n, each in enumerate(losses, 1)]
    batches = [divergence.batch_of(section, n) for n in range(20)]
    return causes, batches, divergence.boundaries(section), divergence.refusal(section, 3)


def data(run):
    """The batches, what else is known of the data, or why there are none."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            opened = dataset_lib.open_dataset(
                run.data, sequence_length=run.batch.sequence_length, seed=run.seed,
                top_k=run.distillation.top_k,
            )  # fmt: skip
    except ValueError as error:
        return re.sub(r"\d+\.\d+ s", "", str(error))
    rows = range(run.batch.size)
    batches = loader.Loader(opened, batch_size=run.batch.size, rows=rows)
    with contextlib.closing(batches):
        taken = [next(batches) for _ in range(3)]
    return (
        [{name: array.tolist() for name, array in batch.items()} for _, batch in taken],
        opened.num_held_out_windows, opened.num_threads, opened.prefetch,
    )  # fmt: skip
