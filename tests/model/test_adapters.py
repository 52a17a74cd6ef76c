"""Adapters: the loss and its gradient are those of the model with merged weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import compare, packed, runs

from llmx.config import ConfigError
from llmx.model import adapters
from llmx.sharding import trees

MODEL = dict(num_layers=3, width=16, mlp_dim=24, num_heads=4, num_kv_heads=2, head_dim=4,
             vocab_size=261, vocab_multiple=2)  # fmt: skip
LATENT = dict(num_kv_heads=4, rope_dim=2, num_experts=4, experts_per_token=2, expert_dim=8,
              shared_dim=8, first_dense=1, router_groups=1, router_groups_kept=1)  # fmt: skip
FAMILIES = {"llama3": {}, "gpt2": dict(num_kv_heads=4), "deepseek_v3": LATENT}
KEYS = dict(batch__size=4, batch__sequence_length=12, adapters__rank=3, adapters__alpha=5.0)


def recipe_of(family="llama3", **keys):
    model = MODEL | FAMILIES[family]
    return runs.make_recipe(runs.make_config(family, model=model, **KEYS | keys))


def state_of(recipe):
    """A state whose adapters add something, also in their first step."""
    state = recipe.init(0)
    random = np.random.default_rng(1)
    draw = lambda leaf: random.normal(size=leaf.shape, scale=0.2).astype(leaf.dtype)  # noqa: E731
    params = jax.tree.map(draw, jax.device_get(state.params))
    return state._replace(
        params=jax.device_put(params, jax.tree.map(lambda a: a.sharding, state.params))
    )


def plainly_merged(frozen, own, scale):
    """W + scale A B by numpy's `tensordot`, layer by layer."""
    whole, parts = dict(trees.named(jax.device_get(frozen))), trees.named(jax.device_get(own))
    for path in [name for name in whole if f"{name}/down" in parts]:
        pairs = zip(parts[f"{path}/down"], parts[f"{path}/up"], strict=True)
        added = np.stack([np.tensordot(down, up, axes=1) for down, up in pairs])
        whole[path] = whole[path] + np.float32(scale) * added
    return trees.nest(whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradient_are_those_of_merged_weights(family):
    # `summed` is without the losses of routers.
    recipe = recipe_of(
        family, **dict(experts__balance_weight=0.0) if "num_experts" in FAMILIES[family] else {}
    )
    state, loss = state_of(recipe), recipe.loss
    scale = 5.0 / 3
    batch = packed.batches(1, rows=4, length=12, vocab=261)[0]
    plain = recipe_of(family, adapters__rank=0, adapters__alpha=16.0)

    def nats(own, frozen):
        sums, tokens = plain.loss.summed(adapters.merged(frozen, own, recipe.loss.adapters), batch)
        return sums / tokens

    with jax.set_mesh(recipe.mesh):
        batch = runs.put_batch(recipe, batch)
        merged = plainly_merged(state.frozen, state.params, scale)
        by_us = loss.merged(state.params, state.frozen)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), by_us, merged
        )
        joined = loss.joined(state.params, state.frozen)
        wanted, _ = jax.jit(plain.loss.summed)(jax.device_put(merged), batch)
        got, _ = jax.jit(loss.summed)(joined, batch)
        np.testing.assert_allclose(got, wanted, rtol=1e-5)
        frozen, _ = jax.jit(loss.summed)(state.frozen, batch)
        assert abs(float(frozen - wanted)) > 1e-4 * float(wanted)  # they do add something
        found, _ = jax.jit(recipe.gradient.take)(joined, batch, (), loss.init_extra())
        wanted = jax.jit(jax.grad(nats))(state.params, state.frozen)
    compare.assert_close(found.tree, wanted, 2e-5)
    assert all(jnp.abs(leaf).max() > 0 for leaf in jax.tree.leaves(wanted))


# In bf16 a step rounds in other places than an evaluation, whose layers have no checkpoint.
@pytest.mark.parametrize(("precision", "near"), [("fp32", 1e-6), ("bf16", 2**-9)])
def test_the_first_step_is_the_models_own_and_nothing_frozen_moves(precision, near):
    recipe = recipe_of(precision=precision, optimizer__weight_decay=0.1)
    state = recipe.init(0)
    frozen = trees.named(state.frozen)
    matrices = {name for name, leaf in frozen.items() if leaf.dtype == jnp.bfloat16}
    if precision == "bf16":
        assert set(frozen) - matrices == {name for name in frozen if name.endswith("norm/scale")}
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype(np.float32)}
    plain = recipe_of(precision=precision, adapters__rank=0, adapters__alpha=16.0)
    before, batch = jax.device_get(state.frozen), packed.batches(2, rows=4, length=12, vocab=261)
    train_step, of_plain = runs.make_train_step(recipe), runs.make_evaluation(plain)
    with jax.set_mesh(recipe.mesh):
        nats, tokens = of_plain(state.frozen, runs.put_batch(recipe, batch[0]))
        assert trees.named(state.opt_state).keys()  # moments of adapters only
        for name, leaf in trees.named(state.opt_state).items():
            assert leaf.ndim == 0 or name.rpartition("/")[2] in ("down", "up"), name
        for one in batch:
            state, report = train_step(state, runs.put_batch(recipe, one))
            if int(state.step) == 1:
                np.testing.assert_allclose(report.loss, nats / tokens, rtol=near)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.frozen), before)
    assert all(np.abs(jax.device_get(leaf)).max() > 0 for leaf in jax.tree.leaves(state.params))


def test_frozen_weights_cost_no_gradient():
    """A step takes two thirds of the FLOPs of products, and a part of the state."""

    def flops(recipe):
        with jax.set_mesh(recipe.mesh):
            return runs.lower(recipe).compile().cost_analysis()["flops"]

    sizes = dict(width=128, mlp_dim=256, num_heads=4, head_dim=32, num_kv_heads=4, vocab_size=257)
    make = lambda rank: runs.make_recipe(runs.make_config(  # noqa: E731
        "llama3", model=MODEL | sizes | dict(num_layers=2), batch__size=4,
        batch__sequence_length=64, adapters__rank=rank, attention__implementation="reference",
    ))  # fmt: skip
    trained, whole = make(1), make(0)
    ratio = flops(trained) / flops(whole)
    assert 0.6 < ratio < 0.75, ratio


def test_chosen_products_only():
    recipe = recipe_of(adapters__products=("attention/query", "mlp"))
    names = {name.partition("/")[2] for name in trees.named(recipe.loss.params)}
    kernels = ("attention/query", "mlp/down", "mlp/gate", "mlp/up")
    assert names == {f"{kernel}/kernel/{part}" for kernel in kernels for part in ("down", "up")}


@pytest.mark.parametrize(("keys", "said"), [
    (dict(adapters__products=("attention/querry",)), "'attention/querry', which the model"),
    (dict(adapters__products=()), "leaves nothing to train"),
    (dict(adapters__rank=9), "adapters.rank=9 is above 8, which is the rank of attention/key"),
    (dict(adapters__rank=-1), "adapters.rank=-1"),
    (dict(adapters__alpha=0.0), "adapters.alpha=0.0"),
    (dict(adapters__rank=0, adapters__alpha=3.0), "no effect with adapters.rank=0"),
    (dict(mesh=dict(stage=2), batch__accumulation=4, pipeline__schedule="pipedream_2bw"),
     "keeps two versions of all parameters"),
    (dict(products__format="fp8", products__scaling="delayed"), "frozen weights have none"),
])  # fmt: skip
def test_what_cannot_be_is_said(keys, said):
    with pytest.raises(ConfigError, match=said):
        recipe_of(**keys)


def test_first_layers_alone_are_refused():
    with pytest.raises(ConfigError, match="are of the dense first layers only: name"):
        recipe_of("deepseek_v3", adapters__products=("mlp/gate",))


DROPOUT = dict(adapters__dropout=0.4)


def test_dropout_leaves_out_a_share_and_keeps_the_mean():
    """Of every product and layer another one, drawn anew for each step, row and position."""
    recipe = recipe_of(**DROPOUT)
    with jax.set_mesh(recipe.mesh):
        state = state_of(recipe)
        joined = recipe.loss.joined(state.params, state.frozen, training=True)
        joined = joined["blocks"]["attention"]
    of = lambda name, number: jax.tree.map(lambda leaf: leaf[number], joined[name]["kernel"])  # noqa: E731
    x = jnp.ones((4, 12, 16))

    def kept(weight, step):
        noise = adapters.noise_of_rows((4, 12), recipe.loss.batch_sharding, step, 0)
        weights = adapters.with_noise({"kernel": weight}, noise)
        return np.asarray(adapters.dropped(x, weights["kernel"]))

    with jax.set_mesh(recipe.mesh):
        first, other, key = kept(of("query", 0), 0), kept(of("query", 1), 0), kept(of("key", 0), 0)
        assert set(np.unique(first)) == {0, np.float32(1 / 0.6)}
        many = np.stack([kept(of("query", 0), step) for step in range(40)])
    assert abs(many.mean() - 1) < 0.02
    # Each number, row, position and step by itself: within five deviations.
    for axis, deviation in (((0, 1, 2), 0.019), ((0, 2, 3), 0.016), ((0, 1, 3), 0.016)):
        assert np.abs(many.mean(axis) - 1).max() < 5 * deviation
    assert 0.4 < (many[0] == many[1]).mean() < 0.64  # 0.6^2 + 0.4^2 = 0.52
    for another in (other, key):
        assert 0.42 < (first == another).mean() < 0.62


def test_dropout_changes_training_and_not_evaluation():
    batch = packed.batches(1, rows=4, length=12, vocab=261)[0]
    losses = {}
    for share in (0.0, 0.4):
        recipe = recipe_of(adapters__dropout=share)
        with jax.set_mesh(recipe.mesh):
            state, rows = state_of(recipe), runs.put_batch(recipe, batch)
            whole = recipe.loss.evaluated(state.params, state.frozen)
            evaluated = runs.make_evaluation(recipe)(whole, rows)[0]
            _, report = runs.make_train_step(recipe)(state, rows)
        losses[share] = float(evaluated), float(report.loss)
    assert losses[0.0][0] == losses[0.4][0]
    assert abs(losses[0.0][1] - losses[0.4][1]) > 1e-3


MESHES = {
    "accumulation": dict(mesh=dict(data=2), batch__accumulation=2),
    "tensor-sequence": dict(mesh=dict(tensor=2, sequence=2), remat="full"),
    "stages": dict(mesh=dict(stage=2, fsdp=2), batch__accumulation=2, pipeline__schedule="zb_h1"),
    "replicas": dict(mesh=dict(data=2), sync__strategy="int8", sync__warmup_steps=10),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_dropout_is_the_same_on_every_mesh(mesh):
    batches = packed.batches(3, rows=4, length=12, vocab=261)
    keys = runs.PARITY_OPTIMIZER | DROPOUT
    wanted = runs.train(recipe_of(**keys), batches)
    compare.assert_trained_alike(
        runs.train(recipe_of(**MESHES[mesh], **keys), batches), wanted, 1e-5
    )
