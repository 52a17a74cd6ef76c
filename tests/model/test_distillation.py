"""What a student learns from a teacher: values and gradients are NumPy's, in every layout."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from model import test_losses
from support import compare, runs

from llmx import sharding
from llmx.config import ConfigError, starting
from llmx.model import apply as apply_lib
from llmx.model import (
    distillation,
    distilled_losses,
    families,
    hidden_states,
    precision,
    quantization,
    quantized,
)
from llmx.sharding import trees

TOLERANCE = 2e-5  # fp32 sums in another order; values are of size 1 to 10
B, T, D, V, NUM_REAL = test_losses.B, test_losses.T, test_losses.D, test_losses.V, 43
E = 24  # the teacher's width

# ------------------------------------------------------------------------------- of two heads


def log_softmax(logits):
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def plain(arrays, *, temperature, reverse, softcap=0.0, teacher_softcap=0.0):
    """(CE, log Z, divergence, d x, d head) of the weighted sums, in float64, without autodiff."""
    x, head, of_teacher, teacher_head = (
        np.float64(arrays[name]) for name in ("x", "head", "teacher_x", "teacher_head")
    )
    head, teacher_head, targets = head[:NUM_REAL], teacher_head[:NUM_REAL], arrays["targets"]
    logits, teacher = x @ head.T, of_teacher @ teacher_head.T
    slope = np.ones_like(logits)
    if softcap:
        logits = softcap * np.tanh(logits / softcap)
        slope = 1 - (logits / softcap) ** 2
    if teacher_softcap:
        teacher = teacher_softcap * np.tanh(teacher / teacher_softcap)
    log_p, log_q = log_softmax(teacher / temperature), log_softmax(logits / temperature)
    p, q, sharp = np.exp(log_p), np.exp(log_q), log_softmax(logits)
    over, other = (log_q, log_p) if reverse else (log_p, log_q)
    divergence = (np.exp(over) * (over - other)).sum(-1)
    rows = np.indices(targets.shape)
    loss, log_z = -sharp[*rows, targets], (logits - sharp)[..., 0]
    one_hot = np.eye(NUM_REAL)[targets]
    weights = {
        name: np.float64(arrays[f"{name}_weights"])[..., None] for name in ("loss", "z", "d")
    }
    by_logits = weights["loss"] * (np.exp(sharp) - one_hot) + weights["z"] * np.exp(sharp)
    between = q * (log_q - log_p - divergence[..., None]) if reverse else q - p
    by_logits = (by_logits + weights["d"] * between / temperature) * slope
    by_head = np.zeros((V, D))
    by_head[:NUM_REAL] = np.einsum("btv,btd->vd", by_logits, x)
    return loss, log_z, divergence, by_logits @ head, by_head


def make_arrays():
    arrays, random = test_losses.make_arrays(), np.random.default_rng(3)
    return arrays | {
        "teacher_x": random.normal(size=(B, T, E)).astype(np.float32),
        "teacher_head": random.normal(size=(V, E)).astype(np.float32),
        "d_weights": random.uniform(size=(B, T)).astype(np.float32),
    }


def put(arrays, place):
    given = {name: arrays[name] for name in ("x", "head", "targets", "loss_weights", "z_weights")}
    found = test_losses.put(given, place, np.float32)
    head = sharding.spec(("vocab", "embed"), place.layout.parameters, place.mesh, shape=(V, E))
    to = {
        "teacher_x": place.activation(("batch", "block_sequence", "embed")), "teacher_head": head,
        "d_weights": place.activation(("batch", "sequence")),
    }  # fmt: skip
    return found | {
        name: jax.device_put(arrays[name], NamedSharding(place.mesh, spec))
        for name, spec in to.items()
    }


def settings_of(place, *, chunks=0, softcap=0.0):
    return dict(
        num_real=NUM_REAL, softcap=softcap, chunks=chunks, place=place,
        policy=precision.POLICIES["fp32"],
    )  # fmt: skip


def of_program(arrays, token_losses):
    """As `plain`, of a program (x, head, arrays) -> (CE, log Z, divergence)."""

    @jax.jit
    def run(arrays):
        def weighted(x, head):
            found = token_losses(x, head, arrays)
            weights = (arrays[f"{name}_weights"] for name in ("loss", "z", "d"))
            total = sum(jnp.sum(one * w) for one, w in zip(found, weights, strict=True))
            return total, found

        gradients, values = jax.grad(weighted, argnums=(0, 1), has_aux=True)(
            arrays["x"], arrays["head"]
        )
        return *values, *gradients

    return jax.device_get(run(arrays))


def against_head(place, *, temperature=1.0, reverse=False, teacher_softcap=0.0, **settings):
    def token_losses(x_BTD, head_VD, arrays):
        return distilled_losses.against_head(
            x_BTD, head_VD, arrays["targets"], arrays["teacher_x"], arrays["teacher_head"],
            temperature=temperature, reverse=reverse, teacher_softcap=teacher_softcap,
            **settings_of(place, **settings),
        )  # fmt: skip

    with jax.set_mesh(place.mesh), jax.default_matmul_precision("highest"):
        return of_program(put(make_arrays(), place), token_losses)


def assert_as_plain(found, wanted, *, of=5):
    names = ("CE", "log Z", "divergence", "d x", "d head")
    for name, one, other in list(zip(names, found, wanted, strict=True))[:of]:
        scale = np.abs(other).max()
        np.testing.assert_allclose(one, other, atol=TOLERANCE * scale, rtol=TOLERANCE, err_msg=name)


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_divergence_and_gradient_are_those_of_numpy(temperature, reverse, chunks):
    """Of the data's loss and log Z too; padding of the vocabulary has no part in it."""
    options = dict(temperature=temperature, reverse=reverse)
    found = against_head(test_losses.make_place("one device"), chunks=chunks, **options)
    assert_as_plain(found, plain(make_arrays(), **options))


def test_softcaps_are_each_model_s_own():
    options = dict(temperature=1.5, reverse=False, softcap=3.0, teacher_softcap=5.0)
    found = against_head(test_losses.make_place("one device"), chunks=3, **options)
    assert_as_plain(found, plain(make_arrays(), **options))


@pytest.mark.parametrize("name", list(test_losses.PLACES)[1:])
def test_layouts_agree_with_numpy(name):
    """Whatever splits vocabulary, widths, rows and positions; with chunks where they divide."""
    options = dict(temperature=2.0, reverse=name.startswith("zero1"))
    found = against_head(test_losses.make_place(name), chunks=3 * (name[-1] != "4"), **options)
    assert_as_plain(found, plain(make_arrays(), **options))


def test_a_teacher_like_its_student_teaches_nothing():
    arrays = make_arrays()
    own = arrays | {"teacher_x": arrays["x"], "teacher_head": arrays["head"]}
    divergence = plain(own, temperature=2.0, reverse=False)[2]
    place = test_losses.make_place("one device")

    def token_losses(x, head, given):
        return distilled_losses.against_head(
            x, head, given["targets"], given["x"], given["head"], temperature=2.0, reverse=False,
            teacher_softcap=0.0, **settings_of(place, chunks=3),
        )  # fmt: skip

    only = {name: np.zeros((B, T), np.float32) for name in ("loss_weights", "z_weights")}
    with jax.set_mesh(place.mesh):
        given = put(arrays | only, place)
        _, _, found, by_x, by_head = of_program(given, token_losses)
    np.testing.assert_allclose(found, divergence, atol=3e-6)
    assert max(np.abs(by_x).max(), np.abs(by_head).max()) < 1e-6


# ----------------------------------------------------------------------------- of listed tokens


def listed(arrays, k, *, temperature):
    """(ids, log p with that of the rest) of the teacher, as files have them, in fp64."""
    logits = np.float64(arrays["teacher_x"]) @ np.float64(arrays["teacher_head"][:NUM_REAL]).T
    log_p = log_softmax(logits)
    ids = np.argsort(-log_p, axis=-1)[..., :k]
    kept = np.take_along_axis(log_p, ids, axis=-1)
    rest = 1 - np.exp(kept).sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        rest = np.log(np.where(k == NUM_REAL, 0, rest))
    return ids.astype(np.int32), np.concatenate([kept, rest], -1).astype(np.float32)


def plain_listed(arrays, k, *, temperature, reverse):
    """The divergence and its gradient by the logits, over k tokens and all others as one."""
    ids, log_p = listed(arrays, k, temperature=temperature)
    x, head = np.float64(arrays["x"]), np.float64(arrays["head"][:NUM_REAL])
    log_q = log_softmax(x @ head.T)
    q = np.exp(log_q)

    def divergence(log_q):
        kept = np.take_along_axis(log_q, ids, -1)
        rest = 1 - np.exp(kept).sum(-1, keepdims=True)
        bins = np.concatenate([kept, np.log(np.maximum(rest, 1e-300))], -1)
        n = k if k == NUM_REAL else k + 1
        a, b = (log_softmax(one[..., :n] / temperature) for one in (np.float64(log_p), bins))
        over, other = (b, a) if reverse else (a, b)
        return (np.exp(over) * (over - other)).sum(-1)

    value, gradient, step = divergence(log_q), np.zeros(q.shape), 1e-5
    for token in range(NUM_REAL):  # by differences of float64: of another kind than autodiff
        moved = [
            log_softmax(x @ head.T + sign * step * np.eye(NUM_REAL)[token]) for sign in (1, -1)
        ]
        gradient[..., token] = (divergence(moved[0]) - divergence(moved[1])) / (2 * step)
    return value, gradient


def against_list(place, k, *, temperature=1.0, reverse=False, **settings):
    how = distillation.Distilled(0.5, temperature, reverse, k)
    ids, log_p = listed(make_arrays(), k, temperature=temperature)

    def token_losses(x_BTD, head_VD, arrays):
        rows = {distillation.IDS: arrays["ids"], distillation.LOG_P: arrays["log_p"]}
        return how.token_losses(
            (x_BTD, head_VD), arrays["targets"], rows, {}, **settings_of(place, **settings)
        )

    with jax.set_mesh(place.mesh), jax.default_matmul_precision("highest"):
        arrays = put(make_arrays(), place)
        tokens = place.activation(("batch", "sequence"))
        to = NamedSharding(place.mesh, PartitionSpec(*tokens.partitions, None))
        arrays |= {"ids": jax.device_put(ids, to), "log_p": jax.device_put(log_p, to)}
        return of_program(arrays, token_losses)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("k", [5, NUM_REAL])
def test_listed_tokens_are_those_of_numpy(k, temperature, reverse):
    options = dict(temperature=temperature, reverse=reverse)
    found = against_list(test_losses.make_place("one device"), k, chunks=3, **options)
    value, by_logits = plain_listed(make_arrays(), k, **options)
    arrays = make_arrays()
    _, _, _, by_x, by_head = plain(arrays | {"d_weights": 0 * arrays["d_weights"]}, **options)
    by_logits *= np.float64(arrays["d_weights"])[..., None]
    by_x = by_x + by_logits @ np.float64(arrays["head"][:NUM_REAL])
    by_head[:NUM_REAL] += np.einsum("btv,btd->vd", by_logits, np.float64(arrays["x"]))
    np.testing.assert_allclose(found[2], value, rtol=5e-5, atol=5e-6)
    np.testing.assert_allclose(found[3], by_x, atol=5e-5 * np.abs(by_x).max())
    np.testing.assert_allclose(found[4], by_head, atol=5e-5 * np.abs(by_head).max())


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_all_tokens_listed_are_the_whole_distribution(reverse):
    """A complete list gives the loss against the teacher's head, in value and gradient."""
    options = dict(temperature=2.0, reverse=reverse)
    place = test_losses.make_place("zero3, fsdp 4 x tensor 2")
    assert_as_plain(
        against_list(place, NUM_REAL, chunks=3, **options),
        plain(make_arrays(), **options),
    )


def test_a_shorter_list_tells_less():
    """Joining tokens to one never raises the divergence, and all of them as one leave none."""
    place = test_losses.make_place("one device")
    found = [against_list(place, k)[2] for k in (1, 4, 12, NUM_REAL)]
    for less, more in itertools.pairwise(found):
        assert np.all(less <= more + 1e-5)
    assert np.all(found[0] < found[-1])


# ------------------------------------------------------------------------------- in a train step

MODEL = dict(num_layers=2, width=16, mlp_dim=24, num_heads=4, num_kv_heads=2, head_dim=4,
             vocab_size=257, vocab_multiple=8)  # fmt: skip
# Of another family and size than its student.
TEACHER = families.preset("gemma2", **MODEL | dict(width=24, num_layers=3, window=5))
KEYS = dict(
    batch__size=8, batch__sequence_length=16, distillation__teacher="of the test",
    distillation__weight=0.7, distillation__temperature=2.0,
)  # fmt: skip
MESHES = {
    "fsdp2-tensor2, gathered once": dict(mesh=dict(fsdp=2, tensor=2), sharding__gather="step"),
    "sequence2-data2, zero1, accumulation2": dict(
        mesh=dict(sequence=2, data=2), sharding__layout="zero1", batch__accumulation=2,
        loss__chunks=3,
    ),
    "stage2-fsdp2": dict(mesh=dict(stage=2, fsdp=2), batch__accumulation=2),
    "replicas": dict(mesh=dict(data=2), sync__strategy="stale", sync__staleness=0),
}  # fmt: skip


@pytest.fixture(autouse=True)
def teacher(monkeypatch):
    """In no file: the recipe asks for its model, and the state is given its parameters."""
    of = lambda config: TEACHER if config.distillation.teacher else None  # noqa: E731
    monkeypatch.setattr(starting, "teacher_of", of)
    monkeypatch.setattr(starting, "place_problem", lambda option, place: "")


def recipe_of(**keys):
    return runs.make_recipe(runs.make_config("llama3", model=MODEL, **KEYS | keys))


def batches(number=3):
    random = np.random.default_rng(2)
    shape, found = (8, 16), []
    for _ in range(number):
        batch = {name: random.integers(0, 257, shape) for name in ("tokens", "targets")}
        batch |= {"segment_ids": np.ones(shape), "positions": np.tile(np.arange(16), (8, 1))}
        batch = {name: np.int32(array) for name, array in batch.items()}
        found.append(batch | {"weights": np.float32(random.random(shape) > 0.2)})
    return found


def state_of(recipe, seed=0):
    """With a teacher that is sure of something."""
    random = np.random.default_rng(1)
    teacher = recipe.loss.teacher.apply.model
    drawn = jax.device_get(jax.jit(lambda: apply_lib.init_parameters(teacher, 5))())
    moved = jax.tree.map(lambda leaf: leaf + 0.2 * random.normal(size=leaf.shape), drawn)
    with jax.set_mesh(recipe.mesh):
        frozen = jax.tree.map(
            lambda leaf, to: jax.device_put(leaf.astype(to.dtype), to.sharding),
            moved, recipe.loss.frozen,
        )  # fmt: skip
        return recipe.init(seed)._replace(frozen=frozen)


@pytest.mark.parametrize("mesh", MESHES)
def test_meshes_train_alike(mesh, one_device):
    recipe = recipe_of(**MESHES[mesh], **runs.PARITY_OPTIMIZER)
    compare.assert_trained_alike(runs.train(recipe, batches(), state_of(recipe)), one_device, 1e-5)


@pytest.fixture(scope="module")
def one_device():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(starting, "teacher_of", lambda config: TEACHER)
        patch.setattr(starting, "place_problem", lambda option, place: "")
        recipe = recipe_of(**runs.PARITY_OPTIMIZER)
        return runs.train(recipe, batches(), state_of(recipe))


def with_list(batch, k=6):
    """What a teacher would have written of a batch."""
    random = np.random.default_rng(7)
    log_p = log_softmax(2 * random.normal(size=(*batch["tokens"].shape, 257)))
    ids = np.argsort(-log_p, axis=-1)[..., :k]
    kept = np.take_along_axis(log_p, ids, axis=-1)
    rest = np.log(1 - np.exp(kept).sum(-1, keepdims=True))
    return batch | {
        distillation.IDS: np.int32(ids),
        distillation.LOG_P: np.float32(np.concatenate([kept, rest], -1)),
    }


def test_lists_train_alike_on_meshes():
    """Rows of lists are split, permuted and cut into microbatches of stages as tokens are."""
    keys = dict(distillation__teacher="", distillation__top_k=6, **runs.PARITY_OPTIMIZER)
    rows = [with_list(batch) for batch in batches(2)]
    mesh = dict(mesh=dict(stage=2, sequence=2, tensor=2), batch__accumulation=2)
    one, split = recipe_of(**keys), recipe_of(**mesh, **keys)
    compare.assert_trained_alike(runs.train(split, rows), runs.train(one, rows), 1e-5)


def test_step_is_that_of_numpy():
    """Loss, divergence and gradient of a step, of whole logits of both models."""
    recipe, batch = recipe_of(), batches(1)[0]
    with jax.set_mesh(recipe.mesh):
        state, rows = state_of(recipe), runs.put_batch(recipe, batch)
        of_teacher = np.float64(jax.jit(lambda frozen: recipe.loss.teacher.apply.logits(
            frozen, *(rows[name] for name in ("tokens", "segment_ids", "positions")),
            recipe.loss.teacher.execution,
        ))(state.frozen))[..., :257]  # fmt: skip
        logits = jax.jit(lambda own: runs.logits(recipe, own, rows)[..., :257])
        mine, pull = jax.vjp(logits, state.params)

        def take(state, rows):
            params = recipe.loss.joined(state.params, state.frozen, training=True)
            prepared = recipe.loss.prepared(rows, state.frozen)
            return recipe.gradient.take(params, prepared, (), ())[0]

        found = jax.jit(take)(state, rows)
        total, num = jax.jit(recipe.gradient.loss)(
            recipe.loss.evaluated(state.params, state.frozen), rows
        )
        share = np.float64(batch["weights"])[..., None] / batch["weights"].sum()
        sharp, p, log_q = log_softmax(np.float64(mine)), None, log_softmax(np.float64(mine) / 2)
        log_p = log_softmax(of_teacher / 2)
        p = np.exp(log_p)
        one_hot = np.eye(257)[batch["targets"]]
        by_logits = 0.3 * (np.exp(sharp) - one_hot) + 0.7 * 4 * (np.exp(log_q) - p) / 2
        (gradient,) = pull(jax.device_put(np.float32(share * by_logits), mine.sharding))
    loss, divergence = (-(one_hot * sharp) * share).sum(), (p * (log_p - log_q) * share).sum()
    np.testing.assert_allclose(found.loss, loss, rtol=2e-5)
    np.testing.assert_allclose(total / num, loss, rtol=2e-5)  # evaluated on the data alone
    np.testing.assert_allclose(found.reported["divergence"], divergence, rtol=2e-5)
    compare.assert_close(found.tree, gradient, 3e-5)


# -------------------------------------------------------------------------- outputs of layers

HIDDEN = dict(distillation__hidden_weight=0.4, distillation__hidden_layers=(2, 0))


def layer_outputs(apply, params, rows, execution):
    """By layer: of models of the first layers alone."""
    found = []
    for number in range(1, apply.model.num_layers + 1):
        first = apply_lib.Apply(dataclasses.replace(apply.model, num_layers=number))
        blocks = jax.tree.map(lambda leaf: leaf[:number], params["blocks"])  # noqa: B023
        tokens, *others = (rows[name] for name in ("tokens", "segment_ids", "positions"))
        mask = apply_lib.self_mask(*others, execution)
        x = first.embedded(params, tokens, mask, execution)
        found.append(first.apply_layers(blocks, x, mask, execution)[0])
    return np.float64(np.stack(jax.device_get(found)))


@pytest.mark.parametrize("kind", ["mse", "cosine"])
def test_losses_of_layers_are_those_of_numpy(kind):
    """Value, and gradient of the matrices; of the rest of the model by differences."""
    recipe = recipe_of(**HIDDEN, distillation__hidden_loss=kind)
    batch, loss = batches(1)[0], recipe.loss
    with jax.set_mesh(recipe.mesh):
        state, rows = state_of(recipe), runs.put_batch(recipe, batch)
        mine = layer_outputs(loss.apply, state.params, rows, loss.execution)
        teacher = layer_outputs(loss.teacher.apply, state.frozen, rows, loss.teacher.execution)

        def take(params, state, rows):
            joined = loss.joined(params, state.frozen, training=True)
            return recipe.gradient.take(joined, loss.prepared(rows, state.frozen), (), ())[0]

        take = jax.jit(take)
        found = take(state.params, state, rows)
        step = jax.tree.map(lambda leaf: 1e-3 * leaf / jnp.linalg.norm(leaf), found.tree)
        moved = [
            take(jax.tree.map(lambda a, b: a + sign * b, state.params, step), state, rows)  # noqa: B023
            for sign in (1, -1)
        ]
    share = np.float64(batch["weights"]) / batch["weights"].sum()
    total, wanted = 0.0, {}
    for layer, of_teacher in ((0, 2), (1, 0)):
        matrix = np.float64(state.params["projection"][f"layer_{layer}"])
        x, y = mine[layer], teacher[of_teacher]
        out = x @ matrix
        if kind == "mse":
            each, slope = ((out - y) ** 2).mean(-1), 2 * (out - y) / y.shape[-1]
        else:
            a, b = (np.linalg.norm(one, axis=-1, keepdims=True) for one in (out, y))
            cosine = (out * y).sum(-1, keepdims=True) / (a * b)
            each, slope = 1 - cosine[..., 0], -(y / (a * b) - cosine * out / a**2)
        total += (each * share).sum() / 2
        slope = 0.4 / 2 * slope * share[..., None]
        wanted[f"layer_{layer}"] = np.einsum("btd,bte->de", x, slope)
    np.testing.assert_allclose(found.reported["hidden"], total, rtol=1e-4)
    compare.assert_close(found.tree["projection"], wanted, 1e-4)

    def minimized(one):
        of_teacher = 0.7 * 4 * one.reported["divergence"] + 0.4 * one.reported["hidden"]
        return 0.3 * one.loss + of_teacher

    along = float(minimized(moved[0]) - minimized(moved[1])) / 2
    norms = sum(
        float(jnp.sum(a * b))
        for a, b in zip(*map(jax.tree.leaves, (found.tree, step)), strict=True)
    )
    np.testing.assert_allclose(along, norms, rtol=2e-2)


@pytest.mark.parametrize("mesh", list(MESHES)[:2])
def test_layers_train_alike_on_meshes(mesh):
    keys = HIDDEN | runs.PARITY_OPTIMIZER | dict(remat="full")
    one, split = recipe_of(**keys), recipe_of(**MESHES[mesh], **keys)
    compare.assert_trained_alike(
        runs.train(split, batches(), state_of(split)), runs.train(one, batches(), state_of(one)),
        1e-5,
    )  # fmt: skip


# ----------------------------------------------------------------------- relations of attention

ATTENTION = dict(
    distillation__attention_weight=3.0, distillation__attention_layers=(2, 1),
    distillation__attention_relations=("qq", "kk", "vv", "qk"),
)  # fmt: skip
# Its first and last layer see 5 positions back.
OF_OTHER_HEADS = dataclasses.replace(TEACHER, num_kv_heads=4, head_dim=8)


@pytest.fixture
def attention_recipe(monkeypatch):
    """Of a student with normalised queries and keys, of other heads than its teacher."""
    monkeypatch.setattr(starting, "teacher_of", lambda config: OF_OTHER_HEADS)
    model = MODEL | dict(qk_norm=True)

    def of(**keys):
        return runs.make_recipe(runs.make_config("llama3", model=model, **KEYS | keys))

    return of


def packed_batches(number=3):
    """Two documents in each row."""
    found = batches(number)
    for batch in found:
        second = np.arange(16) >= np.arange(4, 12)[:, None]
        starts = np.where(second, np.arange(4, 12)[:, None], 0)
        batch["segment_ids"] = np.int32(1 + second)
        batch["positions"] = np.int32(np.arange(16) - starts)
    return found


def received(model, params, layer, x, positions):
    """Queries, keys and values of a layer as attention receives them, of the layer's input."""
    block = jax.tree.map(lambda leaf: leaf[layer].astype(jnp.float32), params["blocks"])
    own = block["attention"]

    def norm(x, scale):
        x = x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + model.norm_eps)
        return x * (scale + model.norm_plus_one)

    def turned(x):
        frequencies = model.rope_theta ** -(np.arange(0, model.head_dim, 2) / model.head_dim)
        angles = positions[:, :, None, None] * np.float32(frequencies)
        a, b = jnp.split(x, 2, axis=-1)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    y = norm(x, block["attention_norm"]["scale"])
    found = {
        name[0]: jnp.einsum("btd,dnh->btnh", y, own[name]["kernel"])
        for name in ("query", "key", "value")
    }
    if model.qk_norm:
        found |= {n[0]: norm(found[n[0]], own[f"{n}_norm"]["scale"]) for n in ("query", "key")}
    return found | {name: turned(found[name]) for name in "qk"}


def divergence_of(relation, pairs, seen):
    """Per token, from the definition: `pairs` are (model, what `received` returns)."""
    logs = []
    for model, arrays in pairs:
        (x, y), scale = (arrays[letter] for letter in relation), model.score_scale
        if relation == "qk":
            y = jnp.repeat(y, x.shape[2] // y.shape[2], axis=2)
        else:
            x, y = (one.reshape(*one.shape[:2], 4, -1) for one in (x, y))  # as many as its heads
            scale = x.shape[-1] ** -0.5
        scores = scale * jnp.einsum("btnh,bsnh->bnts", x, y)
        if relation == "qk" and (cap := model.attention_softcap):
            scores = cap * jnp.tanh(scores / cap)
        logs.append(jax.nn.log_softmax(jnp.where(seen[:, None], scores, -1e30), axis=-1))
    terms = jnp.exp(logs[1]) * (logs[1] - logs[0])
    return jnp.where(seen[:, None], terms, 0).sum(-1).mean(1)


def input_of(apply, params, layer, rows, execution):
    """Of a layer: the output of a model of those before it."""
    mask = apply_lib.self_mask(rows["segment_ids"], rows["positions"], execution)
    x = apply.embedded(params, rows["tokens"], mask, execution)
    if layer:
        first = apply_lib.Apply(dataclasses.replace(apply.model, num_layers=layer))
        blocks = jax.tree.map(lambda leaf: leaf[:layer], params["blocks"])
        x, _ = first.apply_layers(blocks, x, mask, execution)
    return x


def test_relations_of_a_step_are_those_of_whole_maps(attention_recipe):
    """Value, and gradient by every parameter, of maps that exist whole, by autodiff."""
    recipe, without = attention_recipe(**ATTENTION), attention_recipe()
    batch, loss = packed_batches(1)[0], recipe.loss
    back = batch["positions"][:, :, None] - batch["positions"][:, None]
    same = batch["segment_ids"][:, :, None] == batch["segment_ids"][:, None]
    share = batch["weights"] / batch["weights"].sum()
    with jax.set_mesh(recipe.mesh), jax.default_matmul_precision("highest"):
        state, rows = state_of(recipe), runs.put_batch(recipe, batch)

        def total(params):
            total = 0
            for layer, of_teacher, window in ((0, 2, 5), (1, 1, 99)):
                pairs = [
                    (apply.model, received(
                        apply.model, params, n, input_of(apply, params, n, rows, execution),
                        batch["positions"],
                    ))
                    for apply, params, n, execution in (
                        (loss.apply, params, layer, loss.execution),
                        (loss.teacher.apply, state.frozen, of_teacher, loss.teacher.execution),
                    )
                ]  # fmt: skip
                seen = same & (back >= 0) & (back < window)
                of_relations = [divergence_of(one, pairs, seen) for one in ("qq", "kk", "vv", "qk")]
                total += (sum(of_relations) / 4 * share).sum() / 2
            return total

        def take(recipe):
            params = recipe.loss.joined(state.params, state.frozen, training=True)
            return recipe.gradient.take(params, recipe.loss.prepared(rows, state.frozen), (), ())[0]

        value, by_maps = jax.jit(jax.value_and_grad(total))(state.params)
        found, plain = (jax.jit(lambda one=one: take(one))() for one in (recipe, without))
    assert set(found.reported) == {"divergence", "attention"} and value > 0.01
    np.testing.assert_allclose(found.reported["attention"], value, rtol=2e-5)
    np.testing.assert_allclose(found.loss, plain.loss, rtol=1e-6)
    wanted = jax.tree.map(lambda a, b: a + 3.0 * b, plain.tree, by_maps)
    compare.assert_close(found.tree, wanted, 3e-5)
    changed = compare.relative_errors(found.tree, plain.tree)
    for name in ("query/kernel", "key/kernel", "value/kernel", "query_norm/scale"):
        assert changed[f"blocks/attention/{name}"] > 0.05  # what is compared is not small


@pytest.mark.parametrize("mesh", [name for name in MESHES if not name.startswith("stage")])
def test_relations_train_alike_on_meshes(mesh, attention_recipe):
    """With outputs of layers beside them."""
    keys = ATTENTION | HIDDEN | runs.PARITY_OPTIMIZER | dict(remat="full")
    one, split = attention_recipe(**keys), attention_recipe(**MESHES[mesh], **keys)
    rows = packed_batches()
    compare.assert_trained_alike(
        *(runs.train(each, rows, state_of(each)) for each in (split, one)), 1e-5
    )


def test_relations_of_latent_attention_and_repeated_layers(monkeypatch):
    """Values of latents have a width of their own. On a mesh, in segments of layers too, they train
    as on one device."""
    latent = families.preset(
        "deepseek_v3", **MODEL | dict(num_kv_heads=4, head_dim=8, rope_dim=4, value_dim=6),
        kv_latent=8, query_latent=0, num_experts=0, first_dense=0,
    )  # fmt: skip
    monkeypatch.setattr(starting, "teacher_of", lambda config: latent)
    keys = dict(ATTENTION, distillation__attention_layers=(0, 1)) | runs.PARITY_OPTIMIZER
    model, rows = MODEL | dict(repeats=2), packed_batches()

    def trained(**others):
        recipe = runs.make_recipe(runs.make_config("llama3", model=model, **KEYS | keys | others))
        return runs.train(recipe, rows, state_of(recipe))

    split = trained(mesh=dict(fsdp=2, tensor=2), remat="sqrt")
    compare.assert_trained_alike(split, trained(), 1e-5)


LEARNED = dict(quantization__bits=4, quantization__scales="learned")
ROUNDED = {
    "learned, averages": LEARNED | dict(quantization__activations="average"),
    "delayed": dict(
        products__format="fp8", products__gather="fp8", products__scaling="delayed",
        sharding__gather="step",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ROUNDED)
def test_a_student_of_few_bits_learns_alike_on_a_mesh(case):
    """Its layers' outputs too. The teacher and the matrices between them are not rounded."""
    keys = HIDDEN | runs.PARITY_OPTIMIZER | ROUNDED[case]
    one, split = recipe_of(**keys), recipe_of(mesh=dict(fsdp=2, tensor=2), **keys)
    assert one.loss.teacher.execution.policy.numbers == quantized.UNROUNDED
    compare.assert_trained_alike(
        *(runs.train(each, batches(2), state_of(each)) for each in (split, one)), 1e-5
    )


@pytest.mark.parametrize("case", ["largest", "learned"])
def test_gradient_of_a_student_of_few_bits_is_that_of_its_codes(case):
    """Loss, divergence and gradient of a model that is not quantized, with the codes' numbers; of
    the weights straight through the rounding."""
    keys = LEARNED if case == "learned" else dict(quantization__bits=4)
    recipe, plain = recipe_of(**keys), recipe_of()
    with jax.set_mesh(recipe.mesh):
        state, rows = state_of(recipe), runs.put_batch(recipe, batches(1)[0])
        weights = recipe.loss.rounded(state.params)

        def take(recipe, params):
            joined = recipe.loss.joined(params, state.frozen, training=True)
            prepared = recipe.loss.prepared(rows, state.frozen)
            return recipe.gradient.take(joined, prepared, (), ())[0]

        found = jax.jit(lambda: take(recipe, state.params))()
        wanted = jax.jit(lambda: take(plain, weights))()
    np.testing.assert_allclose(found.loss, wanted.loss, rtol=1e-6)
    for name, value in wanted.reported.items():
        np.testing.assert_allclose(found.reported[name], value, rtol=1e-6)
    own, steps = {}, {}
    for name, leaf in trees.named(found.tree).items():
        (steps if name.endswith(quantization.LOG_STEP) else own)[name] = np.asarray(leaf)
    # Scales begin so large that nothing is clipped or little is: there it is zero.
    above = trees.named(wanted.tree)
    inside = {name: leaf != 0 for name, leaf in own.items()}
    assert all(each.mean() > 0.5 for name, each in inside.items() if name.startswith("blocks/mlp"))
    compare.assert_close(own, {name: inside[name] * above[name] for name in own}, 1e-5)
    assert len(steps) == 7 * (case == "learned") and all(leaf.any() for leaf in steps.values())


def test_layers_are_paired_evenly():
    assert hidden_states.pairs_of((), 4, 12) == ((0, 2), (1, 5), (2, 8), (3, 11))
    assert hidden_states.pairs_of((), 3, 4) == ((0, 1), (1, 2), (2, 3))
    assert hidden_states.pairs_of((), 4, 2) == ((0, 0), (1, 0), (2, 1), (3, 1))
    assert hidden_states.pairs_of((), 3, 1) == ((0, 0), (1, 0), (2, 0))
    assert hidden_states.pairs_of((-1, 5), 2, 6) == ((1, 5),)


def test_training_nears_the_teacher_that_stays_what_it_is():
    recipe = recipe_of(
        distillation__weight=1.0, distillation__temperature=1.0, precision="bf16",
        optimizer__learning_rate=1e-2, optimizer__warmup_steps=0,
    )  # fmt: skip
    train_step, rows = runs.make_train_step(recipe), runs.put_batch(recipe, batches(1)[0])
    with jax.set_mesh(recipe.mesh):
        state, divergences = state_of(recipe), []
        before = jax.device_get(state.frozen)
        for _ in range(8):
            state, report = train_step(state, rows)
            divergences.append(float(report.scalars["divergence"]))
    assert divergences[-1] < 0.7 * divergences[0]
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.frozen), before)
    assert "divergence" in report.numbers(z_loss=False)[0]
    assert {leaf.dtype.name for leaf in jax.tree.leaves(before)} == {"bfloat16", "float32"}


def test_whole_logits_of_neither_exist():
    """With chunks, no array of the compiled step has as many numbers as the logits."""
    recipe = recipe_of(batch__size=128, loss__chunks=11)
    text = runs.lower(recipe).compile().as_text()
    sizes = [
        int(np.prod([int(size) for size in shape.split(",")]))
        for shape in test_losses.re.findall(r"f32\[([\d,]+)\]", text)
    ]
    assert max(sizes) < 128 * 16 * 264 // 3


@pytest.mark.parametrize(("keys", "said"), [
    (dict(distillation__top_k=4), "needs no teacher"),
    (dict(adapters__rank=2), "where the frozen model stands"),
    (dict(distillation__weight=1.5), "distillation.weight=1.5"),
    (dict(distillation__divergence="sideways"), "'sideways'"),
    (dict(distillation__teacher=""), "has no effect without distillation.teacher"),
    (dict(model=MODEL | dict(vocab_size=300)), "must have the same tokenizer"),
    (dict(model=MODEL | dict(vocab_multiple=128)), "set model.vocab_multiple=8"),
    (dict(data__format="preference", data__pack=False), "losses of pairs have no teacher"),
    (dict(mesh=dict(stage=2), batch__accumulation=3, batch__size=3), "use a multiple of 2"),
    (dict(mesh=dict(stage=2), batch__accumulation=4, pipeline__schedule="pipedream_2bw"),
     "use another schedule"),
    (dict(distillation__teacher="", distillation__top_k=300), "more than the 257 tokens"),
    (dict(start_from_layers=(0, 1)), "no effect without start_from"),
    (dict(distillation__hidden_layers=(0, 1)), "no effect with distillation.hidden_weight=0"),
    (HIDDEN | dict(distillation__hidden_layers=(0, 3)), "layer 3 is none of the teacher's 3"),
    (HIDDEN | dict(distillation__hidden_layers=(0,)), "names 1 layers and the student has 2"),
    (HIDDEN | dict(mesh=dict(stage=2), batch__accumulation=2), "use mesh.stage=1, and fsdp"),
    (HIDDEN | dict(distillation__teacher="", distillation__top_k=2), "files have no outputs"),
    (dict(distillation__attention_heads=2), "no effect with distillation.attention_weight=0"),
    (ATTENTION | dict(distillation__attention_layers=(0, 3)), "layer 3 is none of the teacher's 3"),
    (ATTENTION | dict(distillation__attention_layers=(-1, -1)), "names no layer"),
    (ATTENTION | dict(mesh=dict(stage=2), batch__accumulation=2), "use mesh.stage=1, and fsdp"),
    (ATTENTION | dict(sharding__turns=2), "use sharding.turns=1"),
    (ATTENTION | dict(distillation__teacher="", distillation__top_k=2), "name a teacher"),
    (ATTENTION | dict(distillation__attention_relations=("qv",)),
     "attention_relations=.'qv',. 'qv' is unknown: use one of qq, kk, vv, qk"),
    (ATTENTION | dict(distillation__attention_relations=()), "names no relation: give some of"),
    (ATTENTION | dict(distillation__attention_relations=("qq", "qq")), "names a relation twice"),
    (ATTENTION | dict(distillation__attention_relations=("qk",), distillation__attention_heads=2),
     "attention_heads=2 has no effect with attention_relations"),
    (ATTENTION | dict(model=MODEL | dict(num_heads=2)), "the teacher 4: leave 'qk' out"),
    (ATTENTION | dict(distillation__attention_heads=3),
     "attention_heads=3: .*8 numbers, which 3 does not divide; use one of 1, 2, 4, 8"),
    (ATTENTION | dict(model=MODEL | dict(num_heads=3, num_kv_heads=3, head_dim=4),
                      distillation__attention_relations=("vv",)),
     "attention_heads=0 .3, as the student has.*use one of 1, 2, 4"),
    (ATTENTION | dict(mesh=dict(tensor=2), distillation__attention_heads=1),
     "mesh.tensor=2 splits 1 relation heads, .*use one of 2, 4, 8"),
])  # fmt: skip
def test_what_cannot_be_is_said(keys, said):
    keys = dict(keys)
    model = keys.pop("model", MODEL)
    with pytest.raises(ConfigError, match=said):
        runs.make_config("llama3", model=model, **KEYS | keys)


def test_a_teacher_of_few_positions_is_refused(monkeypatch):
    short = dataclasses.replace(TEACHER, max_positions=8)
    monkeypatch.setattr(starting, "teacher_of", lambda config: short)
    with pytest.raises(ConfigError, match="takes 8 positions"):
        recipe_of()
