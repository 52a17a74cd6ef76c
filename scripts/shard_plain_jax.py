"""A plain-JAX model, a dict of arrays, trained under any layout with `llmx.sharding` alone.

    python scripts/shard_plain_jax.py --layout zero3 --mesh fsdp=4,tensor=2

Prints the loss of each step and the bytes of state per device. All layouts print the same losses.
Explained in docs/sharding.md.
"""

import argparse

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding

from llmx import sharding

# The logical axes of every leaf, by its path; the first match wins. The optimizer's state is named
# by the same rules, as the paths of its moments end in those of the parameters.
RULES = [
    (r"up$", ("embed", "mlp")),
    (r"down$", ("mlp", "embed")),
    (r"bias$", ("mlp",)),
    (r".*", ()),
]


def init(key):
    up, down = jax.random.split(key)
    return {
        "up": jax.random.normal(up, (64, 256)) / 8,
        "bias": jnp.zeros(256),
        "down": jax.random.normal(down, (256, 64)) / 16,
    }


def loss_of(params, batch):
    hidden = jax.nn.relu(batch["x"] @ params["up"] + params["bias"])
    return jnp.mean(jnp.square(hidden @ params["down"] - batch["y"]))


def make_training(mesh, layout, optimizer):
    """(key -> state born split, (state, batch) -> (state, loss), sharding of a batch)."""

    def init_state(key):
        params = init(key)
        return {"params": params, "opt": optimizer.init(params)}

    abstract = jax.eval_shape(init_state, jax.random.key(0))
    of = lambda tree, table: sharding.shardings(tree, mesh, layout, rules=RULES, table=table)  # noqa: E731
    params, grads = abstract["params"], of(abstract["params"], "gradients")
    state_to = {"params": of(params, "parameters"), "opt": of(abstract["opt"], "optimizer")}
    shares = of(params, "optimizer")
    rows = NamedSharding(mesh, sharding.spec(("batch", None), layout.activations, mesh))

    def step(state, batch):
        loss, grad = jax.value_and_grad(loss_of)(state["params"], batch)
        grad = jax.lax.with_sharding_constraint(grad, grads)
        # Each device updates the share for which it holds the moments.
        share = jax.lax.with_sharding_constraint(state["params"], shares)
        updates, opt = optimizer.update(grad, state["opt"], share)
        return {"params": optax.apply_updates(share, updates), "opt": opt}, loss

    return (
        jax.jit(init_state, out_shardings=state_to),
        jax.jit(step, out_shardings=(state_to, None), donate_argnums=0),
        rows,
    )


def make_batch(step: int):
    x = jax.random.normal(jax.random.key(step), (64, 64))
    return {"x": x, "y": jnp.roll(x, 1, axis=-1)}


def train(mesh, layout, optimizer, num_steps: int):
    """The final state and the losses."""
    init_state, step, rows = make_training(mesh, layout, optimizer)
    state, losses = init_state(jax.random.key(0)), []
    for i in range(num_steps):
        state, loss = step(state, jax.device_put(make_batch(i), rows))
        losses.append(float(loss))
    return state, losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layout", default="zero3", choices=sharding.LAYOUTS)
    parser.add_argument("--mesh", default="fsdp=4,tensor=2", help="axis=size,...; outermost first")
    parser.add_argument("--steps", type=int, default=5)
    flags = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)  # stand-ins, where there is no accelerator
    sizes = {axis: int(size) for axis, size in (pair.split("=") for pair in flags.mesh.split(","))}
    mesh = sharding.make_mesh(sizes, axis_type=AxisType.Auto)
    layout = sharding.make_layout(flags.layout)
    state, losses = train(mesh, layout, optax.adamw(1e-2), flags.steps)
    for i, loss in enumerate(losses):
        print(f"step {i}  loss {loss:.6f}")
    leaves = jax.tree.leaves(state)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    print(f"state {sum(leaf.nbytes for leaf in leaves):,} bytes, {held:,} on each device")


if __name__ == "__main__":
    main()
