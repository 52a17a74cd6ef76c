"""Pipelines train as one device does."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from llmx import families, model, optim, parts, pipeline, precision, sharding, step

TOLERANCE = 1e-5
BATCH, LENGTH, STEPS = 32, 16, 3
MODELS = {
    "gpt2": dict(num_heads=4, num_kv_heads=4, head_dim=8),
    "llama3": dict(num_heads=4, num_kv_heads=2, head_dim=8),
    "gemma3": dict(num_heads=4, num_kv_heads=2, head_dim=8, window=5, layer_pattern=("local", "global")),
}


def config_of(family, num_layers):
    return families.preset(family, vocab_size=90, num_layers=num_layers, **MODELS[family])


def batches():
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        lengths = rng.integers(1, LENGTH, BATCH)
        segments = (np.arange(LENGTH)[None] >= lengths[:, None]).astype(np.int32) + 1
        positions = np.where(segments == 1, np.arange(LENGTH), np.arange(LENGTH) - lengths[:, None]).astype(np.int32)
        yield {
            "tokens": rng.integers(0, 90, (BATCH, LENGTH)).astype(np.int32),
            "targets": rng.integers(0, 90, (BATCH, LENGTH)).astype(np.int32),
            "segment_ids": segments,
            "positions": positions,
            "weights": (rng.random((BATCH, LENGTH)) < 0.8).astype(np.float32),
        }


def setup_of(family, mesh, schedule, M, *, num_layers=8, layout="zero3", remat="none", virtual=1, layers=(), policy="fp32"):
    config = config_of(family, num_layers)
    sizes = dict.fromkeys(sharding.AXES, 1) | mesh
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    mesh = sharding.make_mesh(sizes, devices=devices)
    run = model.Execution(place=sharding.Placement(mesh, sharding.make_layout(layout)), policy=precision.POLICIES[policy], remat=remat)
    pipe = None
    if sizes["stage"] > 1:
        table = schedule if isinstance(schedule, pipeline.Table) else pipeline.SCHEDULES[schedule](sizes["stage"], M, virtual)
        pipe = step.Pipeline(table, parts.cut(num_layers, table.stage_of, layers), (BATCH, LENGTH))
    return step.make_setup(config, run, optim.OptimizerConfig(warmup_steps=1, learning_rate=1e-3, eps=1e-3), total_steps=10, pipeline=pipe)


def trained(family, mesh, schedule, M, **options):
    setup = setup_of(family, mesh, schedule, M, **options)
    losses, norms = [], []
    with jax.set_mesh(setup.mesh):
        state = setup.init(0)
        train = step.make_train_step(setup, accumulation=M, clip_norm=1.0, z_loss=1e-4)
        for batch in batches():
            state, report = train(state, jax.device_put(batch, setup.batch_sharding))
            losses.append(jax.device_get(report.loss)); norms.append(jax.device_get(report.grad_norm))
        params = state.params
        if setup.pipeline:
            params = params | {"blocks": jax.device_get(params["blocks"])}
            params["blocks"] = setup.pipeline.parts.unstaged(params["blocks"])
    return losses, norms, jax.device_get(params)


@functools.cache
def reference(family, num_layers=8):
    return trained(family, {}, None, 1, num_layers=num_layers)


def delayed(family, num_layers=8):
    """One device: the gradient at W(t-1) of the batch that W(t-1) saw is applied to W(t)."""
    setup = setup_of(family, {}, None, 1, num_layers=num_layers)
    losses, norms = [], []
    with jax.set_mesh(setup.mesh):
        state = setup.init(0)
        before = jax.tree.map(jax.numpy.copy, state.params)
        gradient = jax.jit(step._make_gradient(setup, accumulation=1, z_loss=1e-4, gather="layer"))
        update = jax.jit(lambda state, grads: step._update(setup, state, grads, True))
        for batch in batches():
            (loss, _), _, grads, _ = gradient(state._replace(params=before), jax.device_put(batch, setup.batch_sharding))
            norm = np.sqrt(sum(float(jax.numpy.sum(g**2)) for g in jax.tree.leaves(grads)))
            grads = jax.tree.map(lambda g: g / max(norm, 1.0), grads)
            losses.append(float(loss)); norms.append(norm)
            new = update(state, grads)
            before, state = state.params, state._replace(params=new[0], opt_state=new[1], step=state.step + 1)
    return losses, norms, jax.device_get(state.params)


def difference(got, want):
    of = lambda a, b: float(np.abs(np.asarray(a) - b).max() / max(np.abs(b).max(), 1e-30))
    return of(got[0], np.asarray(want[0])), of(got[1], np.asarray(want[1])), max(of(a, b) for a, b in zip(jax.tree.leaves(got[2]), jax.tree.leaves(want[2]), strict=True))
