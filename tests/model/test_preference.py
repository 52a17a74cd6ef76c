"""Losses of pairs: their values and gradients are those of a plain NumPy version."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import compare, runs

from llmx.config import ConfigError
from llmx.model import preference

MODEL = dict(num_layers=2, width=16, mlp_dim=24, num_heads=4, num_kv_heads=2, head_dim=4,
             vocab_size=257, vocab_multiple=2)  # fmt: skip
KEYS = dict(batch__size=8, batch__sequence_length=16, data__format="preference", data__pack=False)
LORA = dict(adapters__rank=2)
# Lengths of the chosen and the rejected text of each row, and of their prompts; one row is padding.
PAIRS = [(7, 9, 3), (4, 6, 2), (8, 8, 5), (5, 3, 1), (9, 6, 4), (0, 0, 0), (6, 5, 2), (4, 12, 2)]


def recipe_of(**keys):
    return runs.make_recipe(runs.make_config("llama3", model=MODEL, **KEYS | keys))


def batch_of_pairs() -> dict[str, np.ndarray]:
    random, shape = np.random.default_rng(2), (len(PAIRS), 16)
    batch = {name: np.zeros(shape, np.int32) for name in ("segment_ids", "positions")}
    batch["weights"] = np.zeros(shape, np.float32)
    for name in ("tokens", "targets"):
        batch[name] = random.integers(0, 257, shape).astype(np.int32)
    for row, (chosen, rejected, prompt) in enumerate(PAIRS):
        for begin, size, segment in ((0, chosen, 1), (chosen, rejected, 2)):
            part = slice(begin, min(begin + size, 16))
            batch["segment_ids"][row, part] = segment
            batch["positions"][row, part] = np.arange(16)[: part.stop - begin]
            batch["weights"][row, begin + prompt : max(part.stop - 1, begin)] = 1
    return batch


def states(recipe):
    """Parameters that have moved from their reference; layers as the recipe has them."""
    state, random = recipe.init(0), np.random.default_rng(1)
    moved = jax.tree.map(
        lambda leaf: leaf + (0.3 * leaf.std() + 0.05) * random.normal(size=leaf.shape),
        jax.device_get(state.params),
    )
    to = jax.tree.map(lambda leaf: leaf.sharding, state.params)
    return state._replace(params=jax.device_put(jax.tree.map(np.float32, moved), to))


def plain(name, logits, reference, batch, *, beta, smoothing=0.0, chosen_weight=0.0):
    """The loss, accuracy and margin, and the gradient by the logits [B, T, V], in float64."""
    log_p = []
    for values in (np.float64(logits), np.float64(reference)):
        most = values.max(-1, keepdims=True)
        log_p.append(values - most - np.log(np.exp(values - most).sum(-1, keepdims=True)))
    rows, columns = np.indices(batch["targets"].shape)
    gained = (log_p[0] - log_p[1])[rows, columns, batch["targets"]] * batch["weights"]
    pairs = [row for row, (chosen, *_) in enumerate(PAIRS) if chosen]
    gradient, losses, margins = np.zeros(logits.shape), [], []
    for row in pairs:
        segment = batch["segment_ids"][row]
        margin = gained[row][segment == 1].sum() - gained[row][segment == 2].sum()
        if name == "dpo":
            sigmoid = 1 / (1 + np.exp(-beta * margin))
            loss = -(1 - smoothing) * np.log(sigmoid) - smoothing * np.log(1 - sigmoid)
            slope = beta * (-(1 - smoothing) * (1 - sigmoid) + smoothing * sigmoid)
        else:
            loss = (margin - 1 / (2 * beta)) ** 2
            slope = 2 * (margin - 1 / (2 * beta))
        chosen = (segment == 1) * batch["weights"][row]
        own = log_p[0][rows[row], columns[row], batch["targets"][row]]
        losses.append(loss - chosen_weight * (chosen * own).sum() / chosen.sum())
        margins.append(margin)
        for t in np.flatnonzero(batch["weights"][row]):
            sign = 1 if segment[t] == 1 else -1
            one_hot = np.arange(logits.shape[-1]) == batch["targets"][row, t]
            by_log_p = slope * sign - chosen_weight * chosen[t] / chosen.sum()
            gradient[row, t] = by_log_p * (one_hot - np.exp(log_p[0][row, t])) / len(pairs)
    margins = np.array(margins)
    return np.mean(losses), np.mean(margins > 0), beta * margins.mean(), gradient


CASES = {
    "dpo": dict(preference__beta=0.3),
    "smoothed": dict(preference__beta=0.5, preference__label_smoothing=0.2),
    "ipo": dict(preference__loss="ipo", preference__beta=0.4),
    "chosen": dict(preference__beta=0.3, preference__chosen_weight=0.7),
    "adapters": dict(preference__beta=0.3, **LORA),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_numpy(case):
    keys = CASES[case]
    recipe = recipe_of(**keys)
    state, batch, loss = states(recipe), batch_of_pairs(), recipe.loss
    with jax.set_mesh(recipe.mesh):
        rows = runs.put_batch(recipe, batch)
        logits = jax.jit(lambda own: runs.logits(recipe, loss.joined(own, state.frozen), rows))
        mine, of_reference = logits(state.params), runs.logits(recipe, state.frozen, rows)
        wanted, accuracy, margin, by_logits = plain(
            keys.get("preference__loss", "dpo"), np.asarray(mine), np.asarray(of_reference), batch,
            beta=keys["preference__beta"], smoothing=keys.get("preference__label_smoothing", 0.0),
            chosen_weight=keys.get("preference__chosen_weight", 0.0),
        )  # fmt: skip
        _, pull = jax.vjp(logits, state.params)
        (gradient,) = pull(jax.device_put(np.float32(by_logits), mine.sharding))

        def take(own, frozen, rows):
            prepared = loss.prepared(rows, frozen)
            return recipe.gradient.take(loss.joined(own, frozen), prepared, (), ())[0]

        found = jax.jit(take)(state.params, state.frozen, rows)
        total, num = jax.jit(recipe.gradient.loss)(loss.evaluated(state.params, state.frozen), rows)
    np.testing.assert_allclose(found.loss, wanted, rtol=2e-5)
    np.testing.assert_allclose(total / num, wanted, rtol=2e-5)
    assert num == 7
    np.testing.assert_allclose(found.reported["accuracy"], accuracy, rtol=1e-6)
    np.testing.assert_allclose(found.reported["margin"], margin, rtol=1e-4)
    compare.assert_close(found.tree, gradient, 3e-5)


@pytest.mark.parametrize("case", CASES)
def test_losses_of_rows_are_those_of_numpy(case):
    """Of every kind of loss, by the losses of tokens: without a model."""
    keys = {name.partition("__")[2]: v for name, v in CASES[case].items() if "preference" in name}
    config, batch = preference.PreferenceConfig(**keys), batch_of_pairs()
    random = np.random.default_rng(4)
    logits, reference = random.normal(size=(2, 8, 16, 257))
    wanted, accuracy, margin, by_logits = plain(
        keys.get("loss", "dpo"), logits, reference, batch, beta=keys["beta"],
        smoothing=keys.get("label_smoothing", 0.0), chosen_weight=keys.get("chosen_weight", 0.0),
    )  # fmt: skip

    def nats(logits):
        log_p = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(log_p, batch["targets"][..., None], axis=-1)[..., 0]

    rows = preference.with_reference(jax.tree.map(jnp.asarray, batch), nats(jnp.float32(reference)))
    loss_of = lambda logits: preference.losses(config, rows, nats(logits))  # noqa: E731
    (loss, reported), gradient = jax.value_and_grad(loss_of, has_aux=True)(jnp.float32(logits))
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    np.testing.assert_allclose(reported["accuracy"], accuracy, rtol=1e-6)
    np.testing.assert_allclose(reported["margin"], margin, rtol=1e-4)
    compare.assert_close(gradient, by_logits, 1e-5)


MESHES = {
    "fsdp2-tensor2": dict(mesh=dict(fsdp=2, tensor=2)),
    "sequence2": dict(mesh=dict(sequence=2, data=2)),
    "accumulation4": dict(mesh=dict(data=2), batch__accumulation=4),
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("adapters", [{}, LORA], ids=["whole", "adapters"])
def test_meshes_train_alike(mesh, adapters):
    batches = [batch_of_pairs()] * 3
    keys = runs.PARITY_OPTIMIZER | adapters
    compare.assert_trained_alike(
        runs.train(recipe_of(**MESHES[mesh], **keys), batches),
        runs.train(recipe_of(**keys), batches), 1e-5,
    )  # fmt: skip


def test_training_prefers_the_chosen_texts():
    """And the reference stays what it was; the first loss is log 2."""
    recipe = recipe_of(optimizer__learning_rate=1e-2, optimizer__warmup_steps=0)
    train_step = runs.make_train_step(recipe)
    with jax.set_mesh(recipe.mesh):
        state = recipe.init(0)
        before, reports = jax.device_get(state.frozen), []
        for _ in range(5):
            state, report = train_step(state, runs.put_batch(recipe, batch_of_pairs()))
            reports.append(report)
    np.testing.assert_allclose(reports[0].loss, np.log(2), rtol=1e-6)
    assert reports[0].scalars["accuracy"] == 0 and reports[-1].scalars["accuracy"] == 1
    assert reports[-1].loss < 0.6 and reports[-1].scalars["margin"] > 0
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.frozen), before)
    assert "accuracy" in reports[0].numbers(z_loss=False)[0]


@pytest.mark.parametrize(("remat", "near"), [("full", 0.0), ("none", 2**-9)])
def test_the_first_loss_is_exact_in_bf16(remat, near):
    """The reference is computed as the model is: its norms are not rounded. What is saved in bf16
    is rounded, and a compiler does not round what is not."""
    recipe = recipe_of(precision="bf16", remat=remat)
    random = np.random.default_rng(0)
    put = lambda tree, like: jax.tree.map(  # noqa: E731
        lambda a, b: jax.device_put(np.asarray(a, b.dtype), b.sharding), tree, like
    )
    with jax.set_mesh(recipe.mesh):
        state = recipe.init(0)
        drawn = jax.tree.map(
            lambda leaf: leaf + 0.1 * random.normal(size=leaf.shape), jax.device_get(state.params)
        )
        params, frozen = put(drawn, recipe.loss.params), put(drawn, recipe.loss.frozen)
        state = state._replace(params=params, frozen=frozen)
        rows = runs.put_batch(recipe, batch_of_pairs())
        _, report = runs.make_train_step(recipe)(state, rows)
    assert abs(float(report.scalars["margin"])) <= near
    np.testing.assert_allclose(report.loss, np.log(2), rtol=1e-6 + near)


def test_kernels_are_told_that_a_row_has_two_texts():
    assert recipe_of().loss.execution.packed


def test_padding_alone_is_no_update():
    recipe = recipe_of()
    nothing = {name: jnp.zeros_like(array) for name, array in batch_of_pairs().items()}
    with jax.set_mesh(recipe.mesh):
        state = recipe.init(0)
        before = jax.device_get(state.params)
        state, report = runs.make_train_step(recipe)(state, runs.put_batch(recipe, nothing))
    assert float(report.loss) == 0 and np.isfinite(report.grad_norm)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), before)


@pytest.mark.parametrize(("keys", "said"), [
    (dict(data__pack=True), "a row holds one pair; set data.pack=False"),
    (dict(mesh=dict(stage=2), batch__accumulation=2), "reference is not computed in stages"),
    (dict(mesh=dict(data=2), sync__strategy="int8"), "by tokens, not by pairs"),
    (dict(loss__z_loss=1e-4), "use loss.z_loss=0"),
    (dict(attention__implementation="cudnn"), "does not tell the two texts of a row apart"),
    (dict(preference__beta=0.0), "preference.beta=0.0"),
    (dict(preference__label_smoothing=0.7), "preference.label_smoothing=0.7"),
    (dict(preference__loss="kto"), "'kto'"),
    (dict(data__format="text", preference__beta=0.2), "no effect with data.format='text'"),
    (dict(preference__loss="ipo", preference__label_smoothing=0.1), "no effect with pref"),
])  # fmt: skip
def test_what_cannot_be_is_said(keys, said):
    with pytest.raises(ConfigError, match=said):
        recipe_of(**keys)
