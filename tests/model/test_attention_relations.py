"""How attention relates tokens: divergences and gradients are NumPy's, on every mesh."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from llmx import sharding
from llmx.model import attention_relations as relations
from llmx.model import families
from llmx.model.attention.masks import Mask, Scores

TOLERANCE = 2e-5  # fp32 sums in another order
B, T, LAYERS = 4, 24, 3
STUDENT = dict(queries=(4, 6), keys=(2, 6), values=(2, 6))  # heads and their size
TEACHER = dict(queries=(4, 10), keys=(4, 10), values=(4, 8))  # values of latent attention
PAIRS = ((2, 4, 0), (0, 1, 5))  # the second with a window
MAPS = Scores(0.4, softcap=3.0), Scores(0.7)
KINDS = {
    "one device": {},
    "data2": dict(data=2),
    "fsdp2-tensor2": dict(fsdp=2, tensor=2),
    "tensor4, whole keys": dict(tensor=4),
    "sequence2-tensor2": dict(sequence=2, tensor=2),
}


def make_place(kind):
    sizes = dict.fromkeys(sharding.AXES, 1) | KINDS[kind]
    devices = jax.devices()[: math.prod(sizes.values())]
    layout = sharding.make_layout("zero3", replicate_kv="whole" in kind)
    return sharding.Placement(sharding.make_mesh(sizes, devices=devices), layout)


def make_arrays(length=T):
    """Both models' arrays, of packed rows whose documents end at other tokens."""
    random = np.random.default_rng(4)
    draw = lambda *shape: random.normal(size=shape).astype(np.float32)  # noqa: E731
    segments = np.sort(random.integers(1, 4, (B, length)), axis=1).astype(np.int32)
    starts = np.array([[row.searchsorted(one) for one in row] for row in segments])
    return {
        "student": {name: draw(LAYERS, B, length, *size) for name, size in STUDENT.items()},
        "teacher": {name: draw(B, length, 2, *size) for name, size in TEACHER.items()},
        "segments": segments, "positions": np.int32(np.arange(length) - starts),
        "weights": random.uniform(size=(B, length)).astype(np.float32),
    }  # fmt: skip


def scores_of(arrays, relation, heads, of_map):
    """(scores [B, R, T, S], a function from their gradient to that of the arrays), float64."""
    first, second = (relations.ARRAYS[letter] for letter in relation)
    x, y = np.float64(arrays[first]), np.float64(arrays[second])
    shapes, repeats = (x.shape, y.shape), 1
    if relation == "qk":
        heads, repeats = x.shape[2], x.shape[2] // y.shape[2]
        y = np.repeat(y, repeats, axis=2)
    x, y = (one.reshape(*one.shape[:2], heads, -1) for one in (x, y))
    scale, softcap = 1 / np.sqrt(x.shape[-1]), 0
    if relation == "qk":
        scale, softcap = of_map.scale, of_map.softcap
    scores, slope = scale * np.einsum("btru,bsru->brts", x, y), 1
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
        slope = 1 - (scores / softcap) ** 2

    def pull(by_scores):
        by_scores = scale * slope * by_scores
        by_x = np.einsum("brts,bsru->btru", by_scores, y).reshape(shapes[0])
        by_y = np.einsum("brts,btru->bsru", by_scores, x)
        if repeats > 1:
            by_y = by_y.reshape(*shapes[1][:3], repeats, -1).sum(3)
        return (first, by_x), (second, by_y.reshape(shapes[1]))

    return scores, pull


def plain(arrays, how):
    """The divergence of each token, and the gradient of its weighted sum, in float64."""
    total, gradient = 0, {name: np.zeros_like(one, "f8") for name, one in arrays["student"].items()}
    segments, positions = arrays["segments"], arrays["positions"]
    back = positions[:, :, None] - positions[:, None]
    for number, (layer, _, window) in enumerate(how.pairs):
        seen = (segments[:, :, None] == segments[:, None]) & (back >= 0)
        seen = (seen & (back < (window or 10**6)))[:, None]
        student = {name: one[layer] for name, one in arrays["student"].items()}
        teacher = {name: one[:, :, number] for name, one in arrays["teacher"].items()}
        for relation in how.names:
            (own, pull), (of_teacher, _) = (
                scores_of(one, relation, how.heads, of_map)
                for one, of_map in zip((student, teacher), how.maps, strict=True)
            )
            parts = []
            for scores in (own, of_teacher):
                masked = np.where(seen, scores, -np.inf)
                top = masked.max(-1, keepdims=True)
                parts.append(masked - top - np.log(np.exp(masked - top).sum(-1, keepdims=True)))
            (log_q, log_p), heads = parts, own.shape[1]
            with np.errstate(invalid="ignore"):
                terms = np.where(seen, np.exp(log_p) * (log_p - log_q), 0)
            count = heads * len(how.names) * len(how.pairs)
            total = total + terms.sum((1, 3)) / count
            share = np.float64(arrays["weights"])[:, None, :, None] / count
            for name, part in pull(share * (np.exp(log_q) - np.exp(log_p))):
                gradient[name][layer] += part
    return total, gradient


def found(arrays, how, place):
    """The same, of the program."""
    tokens = place.activation(("batch", "sequence"))
    of = {name: place.activation(axes) for name, axes in relations.AXES.items()}
    put = lambda array, *spec: jax.device_put(array, NamedSharding(place.mesh, jax.P(*spec)))  # noqa: E731
    with jax.set_mesh(place.mesh), jax.default_matmul_precision("highest"):
        student = {name: put(arrays["student"][name], None, *of[name]) for name in how.arrays}
        teacher = {
            name: put(arrays["teacher"][name], *of[name][:2], None, *of[name][2:])
            for name in how.arrays
        }
        rows = [put(arrays[name], *tokens) for name in ("segments", "positions", "weights")]

        @jax.jit
        def run(student, teacher, segments_BT, positions_BT, weights_BT):
            def weighted(student):
                mask = Mask(segments_BT, positions_BT, segments_BT, positions_BT, ahead=0)
                losses_BT = how.losses(student, teacher, mask, place=place)
                return jnp.sum(losses_BT * weights_BT), losses_BT

            return jax.grad(weighted, has_aux=True)(student)

        gradient, losses = run(student, teacher, *rows)
        assert losses.sharding.spec == tokens
        return jax.device_get((losses, gradient))


def assert_as_plain(how, place, arrays):
    (losses, gradient), wanted = found(arrays, how, place), plain(arrays, how)
    np.testing.assert_allclose(losses, wanted[0], rtol=TOLERANCE, atol=TOLERANCE)
    for name, one in gradient.items():
        size = np.abs(wanted[1][name]).max()
        np.testing.assert_allclose(one, wanted[1][name], atol=TOLERANCE * size, err_msg=name)


def make(names=relations.NAMES, heads=2, pairs=PAIRS):
    return relations.Relations(tuple(names), heads, pairs, MAPS)


@pytest.mark.parametrize("rows", [5, 24])
@pytest.mark.parametrize("name", relations.NAMES)
def test_relations_are_those_of_numpy(name, rows, monkeypatch):
    """Of other sizes and numbers of key/value heads, of documents and windows; whether chunks of
    queries divide a row or not."""
    monkeypatch.setattr(relations, "ROWS", rows)
    assert_as_plain(make([name]), make_place("one device"), make_arrays())


@pytest.mark.parametrize("kind", list(KINDS)[1:])
def test_meshes_agree_with_numpy(kind, monkeypatch):
    """All relations at once; positions that devices split are in any order."""
    monkeypatch.setattr(relations, "ROWS", 7)
    arrays = make_arrays()
    if "sequence" in kind:
        order = np.random.default_rng(0).permutation(T)
        at = lambda axis: lambda array: np.take(array, order, axis=axis)  # noqa: E731
        arrays = {name: jax.tree.map(at(1 + (name == "student")), arrays[name]) for name in arrays}
    assert_as_plain(make(heads=4), make_place(kind), arrays)


def test_a_student_like_its_teacher_learns_nothing():
    arrays, how = make_arrays(), make(pairs=((1, 0, 0), (2, 1, 4)))
    same = {name: np.moveaxis(one[1:], 0, 2) for name, one in arrays["student"].items()}
    how = relations.Relations(how.names, how.heads, how.pairs, (MAPS[0], MAPS[0]))
    losses, gradient = found(arrays | {"teacher": same}, how, make_place("one device"))
    assert np.abs(losses).max() < 1e-6
    assert max(np.abs(one).max() for one in gradient.values()) < 1e-6


def test_other_documents_and_later_tokens_change_nothing():
    arrays, how, place = make_arrays(), make(), make_place("one device")
    before = found(arrays, how, place)[0]
    last = arrays["segments"] == arrays["segments"].max()
    for whose, axis in (("student", 1), ("teacher", 0)):
        for name, one in arrays[whose].items():
            moved = np.moveaxis(one.copy(), (axis, axis + 1), (0, 1))
            moved[last] += 1
            arrays[whose][name] = np.moveaxis(moved, (0, 1), (axis, axis + 1))
    after = found(arrays, how, place)[0]
    np.testing.assert_array_equal(after[~last], before[~last])
    assert np.abs(after - before)[last].max() > 1e-3


def test_scores_of_all_queries_never_exist(monkeypatch):
    """In the compiled gradient no array is as large as half of the scores of one head."""
    monkeypatch.setattr(relations, "ROWS", 32)
    length, place, how = 512, make_place("one device"), make(["qq", "qk"], heads=4)
    arrays = make_arrays(length)
    segments, positions, weights = (arrays[n] for n in ("segments", "positions", "weights"))

    def total(student, teacher):
        mask = Mask(segments, positions, segments, positions)
        return jnp.sum(how.losses(student, teacher, mask, place=place) * weights)

    with jax.set_mesh(place.mesh):
        compiled = jax.jit(jax.grad(total)).lower(arrays["student"], arrays["teacher"]).compile()
    sizes = [
        math.prod(map(int, shape.split(",")))
        for shape in re.findall(r"(?:f32|pred)\[([\d,]+)\]", compiled.as_text())
    ]
    assert max(sizes) < B * length * length // 2  # of one head


def test_half_precision_adds_gradients_up_in_fp32(monkeypatch):
    """Of many chunks as of one: a sum in bf16 would lose what is small beside it."""
    arrays, how, place = (
        make_arrays(256),
        make(["kk"], pairs=((0, 0, 0),)),
        make_place("one device"),
    )
    half = {whose: jax.tree.map(jnp.bfloat16, arrays[whose]) for whose in ("student", "teacher")}
    half |= {"segments": np.ones((B, 256), "i4"), "positions": np.tile(np.arange(256), (B, 1))}
    gradients = []
    for rows in (1, 256):
        monkeypatch.setattr(relations, "ROWS", rows)
        losses, gradient = found(arrays | half, how, place)
        assert losses.dtype == np.float32 and gradient["keys"].dtype == jnp.bfloat16
        gradients.append(np.float32(gradient["keys"]))
    error = np.linalg.norm(gradients[0] - gradients[1]) / np.linalg.norm(gradients[1])
    assert error < 2**-8, error


def test_layers_and_windows_of_models():
    """By default the last layers, whose windows both hold."""
    sizes = dict(width=16, num_heads=4, num_kv_heads=2, head_dim=4, mlp_dim=8)
    local = families.preset("gemma2", **sizes, num_layers=4, window=6)
    other = families.preset("gemma2", **sizes, num_layers=2, window=4)
    of = lambda layers: relations.of(("qq",), 0, layers, other, local)  # noqa: E731
    assert of(()).pairs == ((1, 3, 0),) and of(()).heads == 4
    assert of((2, 0)).pairs == ((0, 2, 4), (1, 0, 6))
    assert of((2, 0)).of_teacher == (2, 0) and of(()).arrays == ("queries",)
    assert of(()).maps[0] == Scores(other.score_scale, 50.0)
