"""The loss of a model on what a run holds out, in whole batches."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from llmx import config, sharding
from llmx.data import dataset as data_lib
from llmx.data import tokenizers
from llmx.evaluate import clicks
from llmx.model import looked_up
from llmx.model.recommender import apply as clicks_lib
from llmx.step.step import Recipe
from llmx.tables.cached import View

OF_CLICKS = ("auc", "normalized_entropy", "calibration")  # what a run that trains reports


def batch_size(run: config.Config) -> int:
    """Rows of an evaluation's batch: a microbatch, or all of a step's, which stages need."""
    return run.batch.size // (run.batch.accumulation if run.mesh.stage == 1 else 1)


def make_step(recipe: Recipe) -> Callable:
    """The jitted (params, batch) -> (sums over the batch, by name, and what they are sums over).

    `params` are what `TrainingLoss.evaluated` returns. The sums are the loss in nats of tokens; of
    preferences the loss, accuracy and margin of pairs. Communicates over all mesh axes.
    """
    if recipe.loss.preference is not None:
        return jax.jit(recipe.loss.summed_pairs)

    def of_tokens(params, batch):
        nats, tokens = recipe.gradient.loss(params, batch)
        return {"loss": nats}, tokens

    def of_clicks(params, batch):
        loss = recipe.loss
        with loss.execution.policy.products():
            nats_B1, log_z_B1 = loss.apply.losses(params, batch, loss.execution)
        odds_B1 = clicks_lib.logits(nats_B1, log_z_B1, batch["targets"], jnp)
        scored = (odds_B1, batch["targets"], batch["weights"])
        whole = jax.tree.map(lambda array: jax.sharding.reshard(array, PartitionSpec()), scored)
        return {"loss": jnp.sum(nats_B1 * batch["weights"])}, jnp.sum(batch["weights"]), whole

    return jax.jit(of_clicks if of_records(recipe) else of_tokens)


def of_records(recipe: Recipe) -> bool:
    """Whether the model is one of clicks."""
    return bool(recipe.model.recommender.name)


def losses(
    recipe: Recipe, step: Callable, params: Any, dataset: data_lib.Dataset, *,
    batch_size: int, batches: int = 0, view: View | None = None,
) -> dict[str, float]:  # fmt: skip
    """Means over the first `batches` batches of the held-out split; 0 = all of it.

    Every process must call it; all get the same numbers. Communicates over all mesh axes. `view`:
    of the rows that the host has.

    Returns {"loss": nats per token, "perplexity", "num_tokens", "batches": evaluated,
    "split_batches": in the whole split}; of preferences {"loss": of a pair, "accuracy": the share
    of pairs whose chosen text gained more than the rejected one, "margin": its mean, "num_pairs",
    ...}; of clicks {"loss": per record, "auc", ...}, see `clicks.measures`. The means are nan if
    the dataset holds nothing out.
    """
    to = recipe.loss.batch_sharding
    rows = sharding.process_rows(to, (batch_size, dataset.sequence_length))
    of_pairs, scores = recipe.loss.preference is not None, clicks.Scores()
    totals = dict.fromkeys(("loss", *recipe.loss.of_pairs), 0.0)
    number = 0.0
    available = math.ceil(dataset.num_held_out_windows / batch_size)
    batches = min(batches or available, available)
    for index in range(batches):
        local = dataset.held_out_rows(index, rows, batch_size)
        if view is not None:
            model = recipe.model
            ids = looked_up.raw_ids(model.ngram_tables, model.ngram_rows, local)
            state, slots = view.prepare(ids)
            params, local = params | {looked_up.TABLES: state}, looked_up.with_slots(local, slots)
        batch = {name: sharding.assemble(local[name], rows, to, batch_size) for name in local}
        sums, count, *scored = jax.device_get(step(params, batch))
        for odds, labels, weights in scored:
            scores.add(odds, labels, weights)
        totals = {name: total + float(sums[name]) for name, total in totals.items()}
        number += float(count)
    means = {name: total / number if number else math.nan for name, total in totals.items()}
    if of_pairs:
        means["num_pairs"] = number
    elif of_records(recipe):
        means |= {name: value for name, value in scores.result().items() if name != "log_loss"}
    else:
        perplexity = math.exp(min(means["loss"], 700.0)) if number else math.nan
        means |= {"perplexity": perplexity, "num_tokens": number}
    return means | {"batches": batches, "split_batches": available}


def extent_text(result: dict[str, float]) -> str:
    """Which part of the held-out split a result of `losses` is about."""
    batches, available = result["batches"], result["split_batches"]
    if batches < available:
        return f"over {batches} of {available} held-out batches"
    return f"over the whole held-out split, {available} batches"


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
