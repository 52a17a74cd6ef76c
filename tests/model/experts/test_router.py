"""The router: choice, weights, groups, losses that keep loads equal, and the loads."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from support import packed, runs

from llmx import contract, sharding
from llmx.config import ConfigError
from llmx.model import dot, families, precision, training_loss
from llmx.model.experts import router
from llmx.model.experts.config import ExpertsConfig
from llmx.pipeline import permutation
from llmx.step.transforms import expert_loads, loss_scale

B, T, E, K = 2, 5, 8, 3


@pytest.fixture(autouse=True)
def on_one_device():
    sizes = dict.fromkeys(sharding.AXES, 1)
    with jax.set_mesh(sharding.make_mesh(sizes, devices=jax.devices()[:1])):
        yield


def model(**values):
    chosen = dict(num_experts=E, experts_per_token=K) | values
    return families.preset("mixtral", **chosen)


def logits(seed: int = 0):
    return np.random.default_rng(seed).normal(size=(B, T, E)).astype(np.float32)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_choice_and_weights(kind, renormalize):
    """Chosen by score and bias, weighted by the score alone."""
    x, bias = logits(), np.linspace(-0.3, 0.3, E).astype(np.float32)
    of = model(router=kind, router_renormalize=renormalize, router_scale=2.5)
    (experts, weights), shares = router.route(of, jnp.asarray(x), jnp.asarray(bias))
    scores = 1 / (1 + np.exp(-x)) if kind == "sigmoid" else np.exp(x) / np.exp(x).sum(-1)[..., None]
    for b, t in np.ndindex(B, T):
        chosen = sorted(range(E), key=lambda e: -(scores[b, t, e] + bias[e]))[:K]
        assert list(experts[b, t]) == chosen
        want = scores[b, t, chosen]
        want = 2.5 * (want / want.sum() if renormalize else want)
        np.testing.assert_allclose(weights[b, t], want, rtol=1e-5)
    np.testing.assert_allclose(shares.sum(axis=-1), 1, rtol=1e-6)


def test_softmax_that_is_renormalized_is_the_softmax_over_the_chosen():
    x = logits()
    (experts, weights), _ = router.route(model(), jnp.asarray(x), jnp.zeros(E))
    chosen = np.take_along_axis(x, np.asarray(experts), axis=-1)
    np.testing.assert_allclose(weights, jax.nn.softmax(chosen, axis=-1), rtol=1e-5)


@pytest.mark.parametrize("kind, best", [("softmax", 1), ("sigmoid", 2)])
def test_experts_are_in_the_groups_that_a_token_chose(kind, best):
    """Two of four groups: by the best score (DeepSeek-V2), or the sum of the best two (V3)."""
    rng, size = np.random.default_rng(0), 4  # experts of a group
    x = rng.normal(size=(B, 20, 4 * size)).astype(np.float32)
    bias = 0.05 * rng.normal(size=4 * size).astype(np.float32)
    of = model(
        router=kind, num_experts=4 * size, router_groups=4, router_groups_kept=2,
        experts_per_token=3,
    )  # fmt: skip
    (experts, _), _ = router.route(of, jnp.asarray(x), jnp.asarray(bias))
    scores = 1 / (1 + np.exp(-x)) if kind == "sigmoid" else np.exp(x) / np.exp(x).sum(-1)[..., None]
    scores, others = scores + bias, 0
    for b, t in np.ndindex(B, 20):
        sums = [np.sort(scores[b, t].reshape(4, size))[:, -n:].sum(axis=1) for n in (best, size)]
        kept, by_all = (set(np.argsort(-of_groups)[:2]) for of_groups in sums)
        others += kept != by_all
        allowed = [e for e in range(4 * size) if e // size in kept]
        assert list(experts[b, t]) == sorted(allowed, key=lambda e: -scores[b, t, e])[:3]
    assert others > 5  # the sum of all scores of a group would choose other groups


@pytest.mark.parametrize("balance", ["sequence", "batch"])
def test_the_balance_loss(balance):
    """Averaged over tokens it is E / k sum_e (share of assignments) (mean score), per scope."""
    x, of = logits(), model()
    (experts, _), shares = router.route(of, jnp.asarray(x), jnp.zeros(E))
    counts = np.asarray(router.loads(experts, jnp.ones((B, T), bool), E))
    config = ExpertsConfig(balance=balance, balance_weight=0.5, z_weight=0.25)
    losses = router.router_losses(config, jnp.asarray(x), shares, jnp.asarray(counts), K)
    rows = [np.s_[b : b + 1] for b in range(B)] if balance == "sequence" else [np.s_[:]]
    for row in rows:
        tokens = counts[row].shape[0] * T
        fraction = counts[row].sum(axis=(0, 1)) * E / (K * tokens)
        want = 0.5 * (fraction * np.asarray(shares)[row].mean(axis=(0, 1))).sum()
        z = 0.25 * np.mean(np.log(np.exp(x[row]).sum(-1)) ** 2)
        np.testing.assert_allclose(np.mean(losses[row]), want + z, rtol=1e-5)


def test_the_balance_loss_of_equal_loads_and_of_one_expert():
    """1 where all scores and loads are equal; E where one expert has all of both."""
    config = ExpertsConfig(balance="sequence", balance_weight=1.0)
    equal, ones = jnp.full((1, E, E), 1 / E), jnp.eye(E)[None]
    flat = router.router_losses(config, equal, equal, ones, 1)
    np.testing.assert_allclose(flat.mean(), 1, rtol=1e-6)
    one = jnp.zeros((1, E, E)).at[..., 0].set(1)
    np.testing.assert_allclose(router.router_losses(config, one, one, one, 1).mean(), E, rtol=1e-6)


def test_losses_are_minimized_and_loads_handed_out():
    """As if they were added to the loss: the same gradient as by automatic differentiation."""
    rng = np.random.default_rng(0)
    y, share = rng.normal(size=(B, T, 4)), rng.random((B, T)) * (rng.random((B, T)) > 0.3)
    x, bias = logits(), jnp.zeros(E)
    (experts, _), _ = router.route(model(), jnp.asarray(x), bias)

    def losses(x):
        return jnp.square(jax.nn.logsumexp(x, axis=-1))

    def attached(x, bias):
        out = router.attach(jnp.asarray(y), losses(x), jnp.asarray(share), bias, experts)
        return jnp.sum(jnp.sin(out))

    by_x, by_bias = jax.grad(attached, argnums=(0, 1))(jnp.asarray(x), bias)
    want = jax.grad(lambda x: jnp.sum(losses(x) * share))(jnp.asarray(x))
    np.testing.assert_allclose(by_x, want, rtol=1e-5, atol=1e-7)
    counted = np.asarray(experts)[share > 0].reshape(-1)
    np.testing.assert_array_equal(by_bias, np.bincount(counted, minlength=E))


@pytest.mark.parametrize("num_experts, k", [(1, 1), (4, 4)])
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_where_all_experts_are_chosen(kind, num_experts, k):
    """Loads are equal, and the balance loss is 1."""
    x = logits()[..., :num_experts]
    of = model(router=kind, num_experts=num_experts, experts_per_token=k)
    assert not families.problems(of)
    (experts, weights), shares = router.route(of, jnp.asarray(x), jnp.zeros(num_experts))
    assert (np.sort(experts, axis=-1) == np.arange(k)).all()
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-6)
    loads = router.loads(experts, jnp.ones((B, T), bool), num_experts)
    config = ExpertsConfig(balance_weight=1.0)
    losses = router.router_losses(config, jnp.asarray(x), shares, loads, k)
    np.testing.assert_allclose(losses, 1, rtol=1e-5)


@pytest.mark.parametrize("policy", precision.POLICIES)
def test_a_router_multiplies_in_more_than_bf16(policy):
    """GPUs and TPUs multiply fp32 in the bits of bf16 or TF32 unless told otherwise."""
    exact, policy = policy == "fp32", precision.POLICIES[policy]
    x, weight = jnp.ones((2, 3, 4)), jnp.ones((4, E))

    def product(x, weight):
        return dot.dot("BTD,DE->BTE", x, weight, out=PartitionSpec(None, None, None), policy=policy)

    with policy.products():
        both = jax.jit(jax.grad(lambda *given: product(*given).sum(), (0, 1)))
        program = both.lower(x, weight).as_text()
    wanted = "HIGHEST" if exact else "HIGH"
    found = re.findall(r"dot_general.*precision = \[(\w+), (\w+)\]", program)
    assert len(found) == 2 and set(sum(found, ())) == {wanted}, program


# ------------------------------------------------------------------------------------- in training


SMALL = dict(
    num_experts=4, vocab_size=257, width=32, mlp_dim=32, expert_dim=32, num_heads=2,
    num_kv_heads=2, head_dim=16,
)  # fmt: skip


def config_of(num_layers=2, mesh=None, **keys):
    keys = runs.PARITY_OPTIMIZER | dict(batch__size=8, batch__sequence_length=16) | keys
    return runs.make_config("mixtral", model=SMALL | dict(num_layers=num_layers), mesh=mesh, **keys)


@pytest.mark.parametrize("policy", ["bf16", "pure_bf16"])
def test_no_product_of_fp32_numbers_leaves_bf16(policy):
    """Which GPUs do not have. So the router's gradient is rounded behind its product."""
    recipe = runs.make_recipe(config_of(precision=policy, mesh=dict(data=1, fsdp=2)))
    program = runs.lower(recipe, "mean").as_text()
    kinds = re.findall(r"dot_general.*: \((.*)\) -> (.*)", program)
    dtypes = lambda text: tuple(re.findall(r"(b?f\d+)>", text))  # noqa: E731
    kinds = {(dtypes(of), *dtypes(to)) for of, to in kinds}
    assert (("f32", "f32"), "f32") in kinds and (("bf16", "bf16"), "bf16") in kinds
    assert (("f32", "f32"), "bf16") not in kinds


def test_the_bias_moves_against_the_loads_and_the_optimizer_does_not_touch_it():
    """One step: by the rate, towards the mean of the layer; gradients' norm is without loads."""
    rate, found = 0.01, {}
    for value in (rate, 0.0):
        recipe = runs.make_recipe(config_of(experts__bias_rate=value))
        state = recipe.init(0)
        rows, length = recipe.batch_shape
        batch = packed.batches(1, rows=rows, length=length, vocab=recipe.model.vocab_size)[0]
        with jax.set_mesh(recipe.mesh):
            grads = jax.jit(recipe.gradient.take)(
                state.params, runs.put_batch(recipe, batch), (), recipe.loss.init_extra()
            )[0]
        grads = jax.device_get(grads)
        loads = grads.tree["blocks"]["mlp"].pop("bias")
        squares = [np.square(leaf, dtype="f8").sum() for leaf in jax.tree.leaves(grads.tree)]
        np.testing.assert_allclose(grads.norms, np.sqrt(sum(squares)), rtol=1e-5)
        found[value] = runs.train(recipe, [batch], state).params["blocks"]["mlp"]["bias"]
    tokens = np.asarray(batch["weights"] > 0).sum()
    np.testing.assert_array_equal(loads.sum(axis=1), 2 * tokens)
    want = rate * np.sign(loads.mean(axis=1, keepdims=True) - loads)
    np.testing.assert_allclose(found[rate], want, rtol=1e-6)
    assert not np.asarray(found[0.0]).any()


def test_clipping_leaves_loads_alone():
    """The bias compares them with their mean, and rounded products may miss it."""
    loads = jnp.asarray([[129.0, 128.0, 110.0, 125.0]])
    tree = {"blocks": {"mlp": {"bias": loads, "router": {"kernel": jnp.ones((2, 2))}}}}
    found = training_loss.scaled(tree, jnp.float32(1 / 5.39))["blocks"]["mlp"]
    np.testing.assert_array_equal(found["bias"], loads)
    np.testing.assert_allclose(found["router"]["kernel"], 1 / 5.39, rtol=1e-6)


def test_what_is_reported_of_loads():
    """Of each layer in the model's order, NaN of first layers that are dense, and of all layers. Of
    a batch without a token that counts, as of equal loads."""
    rows = jnp.asarray([[4.0, 4.0, 4.0, 0.0], [3.0] * 4, [6.0, 3.0, 3.0, 0.0]])
    slots = jnp.stack([rows[2], jnp.zeros(4), rows[0], rows[1]])  # of stages, one is empty
    order = permutation.LayerPermutation((2, permutation.EMPTY, 0, 1))
    mixture = model(num_experts=4, experts_per_token=2, num_layers=4, first_dense=1)
    (transform,) = expert_loads.transforms(
        mixture, ExpertsConfig(dispatch="capacity"), in_order=order.inverse,
    ).values()  # fmt: skip

    def shown(loads, tokens):
        tree = {"blocks": {"mlp": {"bias": loads}}}
        found = contract.Gradients(None, None, tokens, tree, None, None)
        return jax.tree.map(np.asarray, jax.jit(transform.scalars)(found, ()))

    found = shown(slots, jnp.float32(8.0))  # each to 2 experts: 16 assignments of a layer
    entropies = np.array([np.log(3), np.log(4), 1.5 * np.log(2)]) / np.log(4)
    wanted = dict(
        expert_load_max=[4 / 3, 1, 2], expert_load_min=[0, 1, 0], expert_entropy=entropies,
        expert_dropped=[0.25] * 3,
    )  # fmt: skip
    of_all = dict(
        expert_load_max=2, expert_load_min=0, expert_entropy=entropies.mean(), expert_dropped=0.25
    )
    assert found.keys() == {*wanted, *(f"{name}_by_layer" for name in wanted)}
    for name, values in wanted.items():
        np.testing.assert_allclose(found[f"{name}_by_layer"], [np.nan, *values], rtol=1e-6)
        np.testing.assert_allclose(found[name], of_all[name], rtol=1e-6)
    empty = shown(jnp.zeros((4, 4)), jnp.float32(0))
    for name in ("expert_load_max", "expert_load_min", "expert_entropy"):
        np.testing.assert_allclose(empty[name], 1, rtol=1e-6)
    assert empty["expert_dropped"] == 0
    one = expert_loads.of_layers(jnp.full((2, 1), 7.0))  # a single expert has all
    assert all((values == 1).all() for values in one.values())
    (transform,) = expert_loads.transforms(mixture, ExpertsConfig()).values()
    assert "expert_dropped" not in transform.scalars(
        contract.Gradients(*[None] * 3, {"blocks": {"mlp": {"bias": rows}}}, None, None), ()
    )


def test_a_loss_scale_leaves_loads_alone():
    """Other numbers than powers of two would round them."""
    scale = loss_scale.LossScale(jnp.float32(3.0), jnp.int32(0), jnp.int32(0))
    loads = jnp.asarray([[129.0, 128.0, 110.0, 125.0]])
    tree = {"blocks": {"mlp": {"bias": loads, "up": jnp.full((2,), 6.0)}}}
    found = contract.Gradients(
        jnp.float32(1), jnp.float32(0), jnp.float32(1), tree, jnp.ones(2), jnp.ones(())
    )
    found = loss_scale.make(loss_scale.LossScaleConfig()).gradients(found, scale)
    np.testing.assert_array_equal(found.tree["blocks"]["mlp"]["bias"], loads)
    np.testing.assert_allclose(found.tree["blocks"]["mlp"]["up"], 2.0, rtol=1e-6)


@pytest.mark.parametrize("mesh", [{}, dict(data=2), dict(stage=2), dict(expert=2, fsdp=2)], ids=str)
def test_the_share_of_dropped_tokens_is_counted(mesh):
    """Each layer drops what does not fit its experts, of each row. With all tokens to one pair of
    experts an expert keeps its capacity, of a row of 16: 8 of 16, and half is dropped."""
    accumulation = 2 if "stage" in mesh else 1
    recipe = runs.make_recipe(
        config_of(
            mesh=mesh, experts__dispatch="capacity", experts__capacity=1.0,
            batch__accumulation=accumulation,
        )
    )  # fmt: skip
    state = recipe.init(0)
    mlp = state.params["blocks"]["mlp"]
    unfair = np.zeros(mlp["bias"].shape, np.float32)
    unfair[..., :2] = 10.0  # more than any score
    mlp["bias"] = jax.device_put(unfair, mlp["bias"].sharding)
    rows, length = recipe.batch_shape
    batch = packed.batches(1, rows=rows, length=length, vocab=recipe.model.vocab_size)[0]
    batch |= {"weights": np.ones((rows, length), np.float32)}
    train_step = runs.make_train_step(recipe)
    with jax.set_mesh(recipe.mesh):
        _, report = train_step(state, runs.put_batch(recipe, batch))
    found = {name: np.asarray(value) for name, value in report.scalars.items()}
    np.testing.assert_allclose(found["expert_dropped_by_layer"], [0.5, 0.5], atol=1e-6)
    np.testing.assert_allclose(found["expert_load_max_by_layer"], [2.0, 2.0], rtol=1e-6)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (dict(experts__bias_rate=0.1, sync__strategy="int8"), "bias_rate=0.1 with sync.strategy"),
        (dict(experts__balance="batch", sync__strategy="int8"), "balance='batch' with sync"),
        (dict(sharding__turns=2), "sharding.turns=2 with model.num_experts=4"),
        (dict(products__format="fp8"), "products.format='fp8'.*not rounded"),
        (dict(model__num_experts=0, experts__bias_rate=0.1), "no effect with model.num_experts=0"),
        (
            dict(model__num_experts=0, experts__buffer=2.0),
            "buffer=2.0 has no effect with model.num",
        ),
        (
            dict(experts__capacity=2.0),
            "capacity=2.0 has no effect with experts.dispatch='dropless'",
        ),
        (
            dict(experts__balance="none", experts__balance_weight=0.5),
            "balance_weight=0.5 has no effect with experts.balance='none': set experts.balance to",
        ),
        (
            dict(experts__dispatch="dense", experts__buffer=2.0),
            "buffer=2.0 has no effect with experts.dispatch='dense'",
        ),
        (dict(model__experts_per_token=5), "experts_per_token=5 is more than the 4 experts"),
        (
            dict(model__experts_per_token=1),
            "experts_per_token=1 with model.router_renormalize=True",
        ),
        (
            dict(experts__dispatch="capacity", experts__bias_rate=0.1),
            "bias_rate=0.1 with experts.dispatch='capacity'",
        ),
        (dict(model__expert_dim=0), "expert_dim=0 with model.num_experts=4"),
        (dict(model__router_groups=3), "router_groups=3 does not divide"),
        (dict(model__router_groups_kept=2), "router_groups_kept=2 is more than"),
        (dict(model__activation="clamped_silu", model__gated_mlp=False), "of gate and up"),
        (dict(experts__dispatch="sorted"), "experts.dispatch"),
    ],
    ids=str,
)
def test_wrong_values_are_named_with_a_remedy(keys, words):
    with pytest.raises(ConfigError, match=words):
        runs.make_recipe(config_of(**keys))


@pytest.mark.parametrize(
    ("expert", "keys", "words"),
    [
        (3, {}, r"num_experts=4 does not divide over mesh.expert=3: use .* in \[1, 2, 4\]"),
        (2, dict(experts__dispatch="dense"), "dense.*mesh.expert=2"),
    ],
)
def test_meshes_that_experts_do_not_divide_over(expert, keys, words):
    values = runs.PARITY_OPTIMIZER | dict(batch__size=12) | keys
    with pytest.raises(ConfigError, match=words):
        runs.make_config(
            "mixtral", model=dict(num_layers=2, num_experts=4), mesh=dict(expert=expert), **values
        )


def test_an_empty_slot_of_a_stage_has_no_router():
    """Two stages of three layers: nothing of the empty slot's losses and loads is anywhere."""
    values = dict(experts__balance_weight=1.0, experts__z_weight=1.0, experts__bias_rate=0.01)
    found = {}
    for stages in (1, 2):
        mesh = dict(stage=stages)
        recipe = runs.make_recipe(config_of(3, mesh, batch__accumulation=2, **values))
        rows, length = recipe.batch_shape
        batches = packed.batches(3, rows=rows, length=length, vocab=recipe.model.vocab_size)
        train_step, reports = runs.make_train_step(recipe), []
        with jax.set_mesh(recipe.mesh):
            state = recipe.init(0)
            for batch in batches:
                state, report = train_step(state, runs.put_batch(recipe, batch))
                shown = map(np.asarray, report.scalars.values())
                reports.append(np.hstack([report.loss, report.grad_norm, *shown]))
        found[stages] = np.array(reports), runs.in_order(recipe, state.params)
    assert max(jax.tree.leaves(jax.tree.map(len, state.params["blocks"]))) == 4  # one is empty
    np.testing.assert_allclose(found[2][0], found[1][0], rtol=1e-5)
    jax.tree.map(
        lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6),
        found[2][1], found[1][1],
    )  # fmt: skip
