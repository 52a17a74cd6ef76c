"""DLRM, DCN-v2 and DIN equal the same in plain NumPy, in 64 bits, in value and in gradient."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmx.model.recommender import recommender
from llmx.model.recommender.config import RecommenderConfig

# fp32 against fp64, of sums of some hundred terms of size 1.
VALUE = dict(rtol=2e-5, atol=2e-5)
# Differences of the fp64 function over 2e-5: their own error is 1e-9, so fp32 is what differs.
STEP, GRADIENT = 1e-5, dict(rtol=2e-3, atol=2e-4)

B, F, D, L = 7, 3, 4, 5
PLAIN = {"a": 0, "b": 0, "c": 0}
WITH_HISTORY = {"user": 0, "item": 0, "seen": L, "bought": L}
HISTORIES = ("seen=item", "bought=item")
SMALL = dict(width=D, bottom=(6, D), top=(8, 5))
CASES = {
    "dlrm": (RecommenderConfig(name="dlrm", **SMALL), F, PLAIN),
    "dlrm without numbers": (
        RecommenderConfig(name="dlrm", **SMALL | {"bottom": ()}), 0, PLAIN,
    ),
    "dcn": (RecommenderConfig(name="dcn", cross_layers=2, **SMALL), F, PLAIN),
    "dcn of low rank": (RecommenderConfig(name="dcn", cross_rank=3, **SMALL), F, PLAIN),
    "dcn in parallel": (RecommenderConfig(name="dcn", structure="parallel", **SMALL), F, PLAIN),
    "dcn of bare numbers": (RecommenderConfig(name="dcn", **SMALL | {"bottom": ()}), F, PLAIN),
    "dcn without layers": (
        RecommenderConfig(name="dcn", cross_layers=0, **SMALL | {"top": ()}), 0 + F, PLAIN,
    ),
    "din": (
        RecommenderConfig(name="din", attention=(6, 3), histories=HISTORIES, **SMALL), F,
        WITH_HISTORY,
    ),
}  # fmt: skip


# ------------------------------------------------------- the models, written down a second time


def plain_layers(params, name, x, activation):
    for at in itertools.count():
        if f"{name}.{at}.weight" not in params:
            return x
        x = x @ params[f"{name}.{at}.weight"] + params[f"{name}.{at}.bias"]
        x = activation(x, params.get(f"{name}.{at}.slope"))


def relu(x, _):
    return np.where(x > 0, x, 0)


def prelu(x, slope):
    return np.where(x > 0, x, slope * x)


def sigmoid(x, _):
    return 1 / (1 + np.exp(-x))


def plain_dlrm(config, params, dense, embedded, present):
    """A record at a time, a pair at a time."""
    odds = []
    for record in range(B):
        vectors = [embedded[name][record] for name in PLAIN]
        features = []
        if dense.shape[1]:
            of_numbers = plain_layers(params, "bottom", dense[record], relu)
            vectors, features = [of_numbers, *vectors], list(of_numbers)
        for i in range(len(vectors)):
            for j in range(i):
                features.append(vectors[i] @ vectors[j])
        hidden = plain_layers(params, "top", np.array(features), relu)
        odds.append((hidden @ params["logit.weight"] + params["logit.bias"])[0])
    return np.array(odds)


def plain_dcn(config, params, dense, embedded, present):
    numbers = plain_layers(params, "bottom", dense, relu)
    x0 = np.concatenate([numbers, *(embedded[name] for name in PLAIN)], axis=1)
    x = x0
    for at in range(config.cross_layers):
        weight = params[f"cross.{at}.weight"]
        if config.cross_rank:
            weight = params[f"cross.{at}.down"] @ weight
        x = x0 * (x @ weight + params[f"cross.{at}.bias"]) + x
    if config.structure == "parallel":
        x = np.concatenate([x, plain_layers(params, "top", x0, relu)], axis=1)
    else:
        x = plain_layers(params, "top", x, relu)
    return (x @ params["logit.weight"] + params["logit.bias"])[:, 0]


def plain_din(config, params, dense, embedded, present):
    """An id of a history at a time; those that are not there are left out."""
    candidate_of = dict(pair.split("=") for pair in config.histories)
    odds = []
    for record in range(B):
        x = [plain_layers(params, "bottom", dense[record], relu)]
        for name in WITH_HISTORY:
            rows = embedded[name]
            if name not in candidate_of:
                x.append(rows[record])
                continue
            candidate, interest = embedded[candidate_of[name]][record], np.zeros(D)
            for row, there in zip(rows[record], present[name][record], strict=True):
                if there:
                    both = np.concatenate([candidate, row, candidate - row, candidate * row])
                    hidden = plain_layers(params, f"attention.{name}", both, sigmoid)
                    last = f"attention.{name}.last"
                    interest = interest + row * (
                        hidden @ params[f"{last}.weight"] + params[f"{last}.bias"]
                    )
            x.append(interest)
        hidden = plain_layers(params, "top", np.concatenate(x), prelu)
        odds.append((hidden @ params["logit.weight"] + params["logit.bias"])[0])
    return np.array(odds)


PLAIN_MODELS = {"dlrm": plain_dlrm, "dcn": plain_dcn, "din": plain_din}


def inputs(lengths, num_dense):
    rng = np.random.default_rng(0)
    dense = rng.standard_normal((B, num_dense)).astype(np.float32)
    shapes = {name: (B, length, D) if length else (B, D) for name, length in lengths.items()}
    embedded = {k: rng.standard_normal(shape).astype(np.float32) for k, shape in shapes.items()}
    present = {name: rng.random((B, L)) < 0.6 for name, length in lengths.items() if length}
    for there in present.values():
        there[0] = False  # a record without a history
    return dense, embedded, present


def in_64(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


@pytest.fixture(params=CASES)
def case(request):
    config, num_dense, lengths = CASES[request.param]
    model = recommender.make(config, num_dense=num_dense, lengths=lengths)
    params = model.init(jax.random.key(1))
    return config, model, params, inputs(lengths, num_dense)


def test_odds_are_those_of_plain_numpy(case):
    config, model, params, (dense, embedded, present) = case
    found = jax.jit(model.logits)(params, dense, embedded, present)
    assert found.shape == (B,) and found.dtype == jnp.float32
    plain = PLAIN_MODELS[config.name]
    expected = plain(config, in_64(params), *in_64((dense, embedded)), present)
    assert np.std(expected) > 0.05
    np.testing.assert_allclose(found, expected, **VALUE)


def test_gradients_are_the_differences_of_plain_numpy(case):
    """Of the loss, by each parameter, the numbers and the rows, along a random direction."""
    config, model, params, (dense, embedded, present) = case
    labels = np.arange(B) % 2
    plain = PLAIN_MODELS[config.name]

    def loss(params, dense, embedded):
        nats, _ = recommender.losses(model.logits(params, dense, embedded, present), labels)
        return nats.sum()

    def plain_loss(params, dense, embedded):
        odds = plain(config, params, dense, embedded, present)
        return (np.log1p(np.exp(odds)) - labels * odds).sum()

    leaves, structure = jax.tree.flatten((params, dense, embedded))
    found = jax.tree.leaves(jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(params, dense, embedded))
    points, rng = in_64(leaves), np.random.default_rng(2)
    for at, gradient in enumerate(found):
        direction = rng.standard_normal(points[at].shape)
        both = []
        for sign in (1, -1):
            moved = list(points)
            moved[at] = points[at] + sign * STEP * direction
            both.append(plain_loss(*jax.tree.unflatten(structure, moved)))
        expected = (both[0] - both[1]) / (2 * STEP)
        np.testing.assert_allclose(np.vdot(gradient, direction), expected, **GRADIENT)


def test_ids_that_are_not_there_have_no_gradient():
    config, num_dense, lengths = CASES["din"]
    model = recommender.make(config, num_dense=num_dense, lengths=lengths)
    dense, embedded, present = inputs(lengths, num_dense)
    params = model.init(jax.random.key(0))
    by_rows = jax.grad(lambda rows: model.logits(params, dense, rows, present).sum())(embedded)
    for name, there in present.items():
        assert not np.any(np.asarray(by_rows[name])[~there])
        assert np.all(np.any(np.asarray(by_rows[name])[there], axis=-1))


@pytest.mark.parametrize(
    "options, num_dense, num_features, expected",
    [
        # Of facebookresearch/dlrm: bench/dlrm_s_criteo_kaggle.sh
        (
            dict(name="dlrm", width=16, bottom=(512, 256, 64, 16), top=(512, 256)), 13, 26,
            {"bottom.0.weight": (13, 512), "top.0.weight": (367, 512), "logit.weight": (256, 1)},
        ),
        # Of MLPerf's training benchmark of 2019 to 2022
        (
            dict(name="dlrm", width=128, bottom=(512, 256, 128), top=(1024, 1024, 512, 256)), 13,
            26, {"bottom.2.weight": (256, 128), "top.0.weight": (479, 1024)},
        ),
        # And its successor, DLRM-DCNv2: 27 vectors of width 128
        (
            dict(name="dcn", width=128, bottom=(512, 256, 128), top=(1024, 1024, 512, 256),
                 cross_layers=3, cross_rank=512), 13, 26,
            {"cross.2.down": (3456, 512), "cross.2.weight": (512, 3456),
             "cross.2.bias": (3456,), "top.0.weight": (3456, 1024)},
        ),
    ],
)  # fmt: skip
def test_published_shapes(options, num_dense, num_features, expected):
    lengths = {f"C{number}": 0 for number in range(num_features)}
    model = recommender.make(RecommenderConfig(**options), num_dense=num_dense, lengths=lengths)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    assert {path: shapes[path].shape for path in expected} == expected
    assert {path: leaf.ndim for path, leaf in shapes.items()} == {
        path: len(axes) for path, axes in model.axes.items()
    }


def test_logical_axes_are_split_as_layouts_say():
    from llmx import sharding

    model = recommender.make(*CASES["dlrm"][:1], num_dense=F, lengths=PLAIN)
    assert model.axes["top.0.weight"] == ("embed", "mlp") and model.axes["top.0.bias"] == ("mlp",)
    assert model.axes["logit.weight"] == ("embed", None) and model.axes["logit.bias"] == (None,)
    known = sharding.make_layout("zero3").parameters
    assert {name for axes in model.axes.values() for name in axes if name} <= set(known)


def test_losses_are_cross_entropies_without_overflow():
    odds = np.array([-200.0, -1.0, 0.0, 3.0, 200.0], np.float32)
    for label in (0.0, 1.0):
        nats, log_z = recommender.losses(jnp.asarray(odds), jnp.full(5, label))
        wide = odds.astype(np.float64)
        expected = np.logaddexp(0, -wide if label else wide)
        np.testing.assert_allclose(nats, expected, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(log_z, np.logaddexp(0, wide), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "options, num_dense, lengths, words",
    [
        (dict(name="mlp"), F, PLAIN, "recommender.name='mlp' is no model: use dlrm, dcn, din"),
        (dict(bottom=(8, 9)), F, PLAIN, "let it end in model.recommender.width=4"),
        (dict(), 0, PLAIN, "set model.recommender.bottom=()"),
        (dict(top=(8, 0)), F, PLAIN, "recommender.top has a layer of width 0"),
        (dict(), F, {"a": 0, "b": 3}, "'b' is not combined: let its rows be summed, or use 'din'"),
        (dict(name="din"), F, WITH_HISTORY, "no candidate for 'seen': add 'seen=CANDIDATE'"),
        (dict(name="din"), F, PLAIN, "recommender.histories=() leaves DIN without a history"),
        (dict(name="din", histories=("seen",)), F, WITH_HISTORY, "'seen' is no pair"),
        (dict(name="din", histories=("seen=x",)), F, WITH_HISTORY, "features are user, item, seen"),
        (
            dict(name="din", histories=(*HISTORIES, "seen=user")), F, WITH_HISTORY,
            "names a history twice",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_an_error(options, num_dense, lengths, words):
    config = RecommenderConfig(**SMALL | {"name": "dlrm"} | options)
    with pytest.raises(ValueError) as error:
        recommender.make(config, num_dense=num_dense, lengths=lengths)
    assert words in str(error.value)
