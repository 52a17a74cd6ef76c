"""The quickstart's train loop compared with a bare hand-written jitted step of the same model.

    python scripts/bench_step.py [--rounds 20]

The bare step is plain JAX: a dict of arrays, jax.grad, optax.adamw, one batch that stays on the
device, and attention that materialises its scores. The loop is that of `llmx.train`: data,
placement, compiled step, guard, metrics, reporter. It is timed twice: with the reference kernel,
which computes attention as the bare step does (like with like), and with the blockwise kernel, the
default on CPU, which the bare step does not have. Rounds alternate in one process, so that other
load on the machine affects all of them; the result is the median of the ratios.
"""

import argparse
import contextlib
import copy
import functools
import math
import statistics
import tempfile
import time

import jax
import jax.numpy as jnp
import optax

from llmx import config, train
from llmx.checkpoint.restore import Restored
from llmx.config import checks, flags
from llmx.config import recipe as recipe_lib
from llmx.model import families
from llmx.runtime import job as job_lib
from llmx.runtime import launch

KERNELS = {
    "reference": "as in the bare step",
    "blockwise": "in llmx only",
}


def init_params(m: families.ModelConfig) -> dict[str, jax.Array]:
    """Parameters of the bare model, its layers stacked."""
    D, N, K, H, F, V, L = (m.width, m.num_heads, m.num_kv_heads, m.head_dim, m.mlp_dim,
                           m.padded_vocab, m.num_layers)  # fmt: skip
    keys = iter(jax.random.split(jax.random.key(0), 8))
    normal = lambda *shape, fan: jax.random.normal(next(keys), shape) / math.sqrt(fan)  # noqa: E731
    return {
        "embed": normal(V, D, fan=D), "norm": jnp.ones(D),
        "norm1": jnp.ones((L, D)), "norm2": jnp.ones((L, D)),
        "q": normal(L, D, N, H, fan=D), "k": normal(L, D, K, H, fan=D),
        "v": normal(L, D, K, H, fan=D), "o": normal(L, N, H, D, fan=N * H),
        "gate": normal(L, D, F, fan=D), "up": normal(L, D, F, fan=D),
        "down": normal(L, F, D, fan=F),
    }  # fmt: skip


def bare_loss(m: families.ModelConfig, params: dict, batch: dict) -> jax.Array:
    """Mean nats per token of the model written out by hand."""
    N, K, H = m.num_heads, m.num_kv_heads, m.head_dim
    positions, segments = batch["positions"], batch["segment_ids"]
    angles = positions[..., None, None] * m.rope_theta ** (-jnp.arange(0, H, 2) / H)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    visible = (segments[:, :, None] == segments[:, None, :]) & (
        positions[:, :, None] >= positions[:, None, :]
    )

    def norm(x, scale):
        return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + m.norm_eps) * scale

    def rotate(x):
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def layer(x, p):
        h = norm(x, p["norm1"])
        q = rotate(jnp.einsum("btd,dnh->btnh", h, p["q"]))
        k = rotate(jnp.einsum("btd,dkh->btkh", h, p["k"]))
        v = jnp.einsum("btd,dkh->btkh", h, p["v"])
        q = q.reshape(*q.shape[:2], K, N // K, H)
        scores = jnp.einsum("btkgh,bskh->bkgts", q, k) / math.sqrt(H)
        scores = jnp.where(visible[:, None, None], scores, -1e30)
        a = jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(scores), v)
        x = x + jnp.einsum("btnh,nhd->btd", a.reshape(*x.shape[:2], N, H), p["o"])
        h = norm(x, p["norm2"])
        h = jax.nn.silu(h @ p["gate"]) * (h @ p["up"])
        return x + h @ p["down"], None

    x = params["embed"][batch["tokens"]]
    layers = {name: leaf for name, leaf in params.items() if name not in ("embed", "norm")}
    x, _ = jax.lax.scan(layer, x, layers)
    logits = norm(x, params["norm"]) @ params["embed"].T
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return (losses * batch["weights"]).sum() / batch["weights"].sum()


def make_bare_step(run: config.Config):
    """(init, step) of the same decoder, written out by hand."""
    o = run.optimizer
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, o.learning_rate, o.warmup_steps, run.steps, o.learning_rate * o.final_fraction
    )
    decayed = lambda params: jax.tree.map(lambda leaf: leaf.ndim > 2, params) | {"embed": True}  # noqa: E731
    optimizer = optax.chain(
        optax.clip_by_global_norm(o.clip_norm),
        optax.adamw(schedule, o.b1, o.b2, o.eps, weight_decay=o.weight_decay, mask=decayed),
    )
    loss_of = functools.partial(bare_loss, run.model)

    def init():
        params = init_params(run.model)
        return params, optimizer.init(params)

    @jax.jit(donate_argnums=0)
    def step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return jax.jit(init), step


def make_loop_timer(base: config.Config, kernel: str, workdir: str, steps: int):
    """(dataset, timer, close); `timer()` runs `steps` steps of the loop, in seconds per step."""
    quiet = lambda text: None  # noqa: E731
    run = copy.deepcopy(base)
    run.attention.implementation = kernel
    run.workdir = f"{workdir}/{kernel}"
    recipe = recipe_lib.make_recipe(run, devices=jax.devices()[:1])
    dataset = train.open_data(run, quiet)
    new = Restored(recipe.init(0), {}, 0)
    with jax.set_mesh(recipe.mesh):
        loop = train.Loop(run, recipe, dataset, new, job_lib.Job(log=quiet), None)

    def time_loop() -> float:
        begun = time.perf_counter()
        with jax.set_mesh(recipe.mesh):
            for _ in range(steps):
                loop.advance()
            loop.settle()
        return (time.perf_counter() - begun) / steps

    return dataset, time_loop, loop.close


def make_bare_timer(run: config.Config, batch: dict, steps: int):
    """`timer()` runs `steps` bare steps, in seconds per step."""
    init, bare_step = make_bare_step(run)
    state = init()

    def time_bare() -> float:
        nonlocal state
        begun = time.perf_counter()
        for _ in range(steps):
            state, loss = bare_step(state, batch)
        loss.block_until_ready()
        return (time.perf_counter() - begun) / steps

    return time_bare


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="configs/quickstart.py")
    parser.add_argument("--rounds", type=int, default=20, help="of 10 steps each")
    args = parser.parse_args()
    _, run, problems = flags.parse(flags.parser("bench", ""), ["--config", args.config])
    launch.start(run.launch)
    run = checks.resolve(run, 1, problems=problems)
    run.metrics.progress = "off"
    steps = 10
    with tempfile.TemporaryDirectory() as workdir, contextlib.ExitStack() as resources:
        timers = {}
        for kernel in KERNELS:
            dataset, timers[kernel], close = make_loop_timer(run, kernel, workdir, steps)
            resources.callback(close)
        rows = list(range(run.batch.size))
        batch = jax.device_put(dataset.train_rows(0, rows, run.batch.size))
        timers["bare"] = make_bare_timer(run, batch, steps)
        for timer in timers.values():  # compile and warm up
            timer()
        rounds = [{name: timer() for name, timer in timers.items()} for _ in range(args.rounds)]
    bare = statistics.median(times["bare"] for times in rounds)
    print(f"bare step: {bare * 1e3:.1f} ms (median of {args.rounds} rounds of {steps} steps)")
    for kernel, meaning in KERNELS.items():
        loop = statistics.median(times[kernel] for times in rounds)
        ratio = statistics.median(times[kernel] / times["bare"] for times in rounds)
        print(f"llmx loop, {kernel} kernel ({meaning}): {loop * 1e3:.1f} ms, ratio {ratio:.3f}")


if __name__ == "__main__":
    main()
