"""Every attention equals a plain one with loops, and every mesh equals one device."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmx import sharding
from llmx.model.attention import attend
from llmx.model.attention import attend as attend_lib
from llmx.model.attention.kernel import of_one_width
from llmx.model.attention.masks import Mask, Scores

# fp32 against float64: sums of up to 32 products of numbers near 1.
VALUE = dict(rtol=1e-5, atol=1e-5)
GRADIENT = dict(rtol=1e-4, atol=2e-5)
FP16 = 1e-2  # of the largest number: 11 bits each, several roundings
# On another mesh sums change their order: a few roundings of the largest number.
MESH_RTOL, MESH_ROUNDINGS = 1e-5, 4

# The others take rows in order, or run on GPUs only: test_splash.py, test_triton.py, test_cudnn.py.
ANY_LENGTH = ["reference", "blockwise"]

B, T, H = 2, 24, 8
INPUTS = ("query", "key", "value")


SCORES = Scores(scale=1 / math.sqrt(H))


def scores(*, softcap: float = 0.0, window: int = 0) -> Scores:
    return dataclasses.replace(SCORES, softcap=softcap, window=window)


@dataclasses.dataclass(frozen=True)
class Case:
    heads: int = 4
    kv_heads: int = 4
    packed: bool = False
    scores: Scores = SCORES
    value_dim: int = H


CASES = {
    "causal": Case(),
    "scale": Case(scores=Scores(scale=0.7)),
    "group2": Case(kv_heads=2),
    "group4": Case(heads=8, kv_heads=2),
    "multi_query": Case(kv_heads=1),
    "packed": Case(packed=True),
    "packed_group2": Case(kv_heads=2, packed=True),
    "window1": Case(scores=scores(window=1)),
    "window5": Case(scores=scores(window=5)),
    "packed_window": Case(kv_heads=2, packed=True, scores=scores(window=4)),
    "softcap": Case(scores=scores(softcap=0.5)),
    "narrow_values": Case(kv_heads=2, packed=True, value_dim=5),
    "wide_values": Case(kv_heads=1, value_dim=11),
    "all": Case(kv_heads=1, packed=True, scores=scores(softcap=1.0, window=6)),
}


def documents(packed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Segments and positions [B, T]; packed rows hold other documents, one a single token."""
    lengths = [[7, 1, 10, 6], [15, 9]] if packed else [[T], [T]]
    segments = [np.repeat(np.arange(len(row)), row) for row in lengths]
    positions = [np.concatenate([np.arange(n) for n in row]) for row in lengths]
    return np.stack(segments).astype(np.int32), np.stack(positions).astype(np.int32)


def inputs(case: Case, *, batch: int = B):
    """Query, key, value, and a gradient of the result, in sixteenths.

    Products of two are then exact in fp32 in any order, and what cancels is zero on every mesh.
    """
    rng = np.random.default_rng(0)
    kv, V = (batch, T, case.kv_heads), case.value_dim
    shapes = ((batch, T, case.heads, H), (*kv, H), (*kv, V), (batch, T, case.heads, V))
    return [np.round(16 * rng.standard_normal(shape)).astype(np.float32) / 16 for shape in shapes]


def self_mask(case: Case, *, repeats: int = 1) -> Mask:
    arrays = [jnp.asarray(np.tile(array, (repeats, 1))) for array in documents(case.packed)]
    return Mask(*arrays, *arrays)


def on_cpu(implementation: str):
    return functools.partial(attend.IMPLEMENTATIONS[implementation], device_kind="cpu")


def looped(query, key, value, segments, positions, case: Case) -> np.ndarray:
    """Attention one query at a time, in float64."""
    query, key, value = (array.astype(np.float64) for array in (query, key, value))
    out, group = np.zeros((B, T, case.heads, case.value_dim)), case.heads // case.kv_heads
    for b in range(B):
        for n in range(case.heads):
            for t in range(T):
                seen = [
                    s for s in range(t + 1)
                    if segments[b, s] == segments[b, t]
                    and (not case.scores.window or t - s < case.scores.window)
                ]  # fmt: skip
                score = np.array([query[b, t, n] @ key[b, s, n // group] for s in seen])
                score *= case.scores.scale
                if case.scores.softcap:
                    score = case.scores.softcap * np.tanh(score / case.scores.softcap)
                weight = np.exp(score - score.max())
                weight /= weight.sum()
                out[b, t, n] = sum(
                    w * value[b, s, n // group] for w, s in zip(weight, seen, strict=True)
                )
    return out


def dense(query_BTNH, key_BSKH, value_BSKH, seen_BTS, case: Case):
    """The formula over whole matrices with repeated K/V heads, for its gradient."""
    group = case.heads // case.kv_heads
    key_BSNH, value_BSNH = (jnp.repeat(array, group, axis=2) for array in (key_BSKH, value_BSKH))
    score_BNTS = jnp.einsum("BTNH,BSNH->BNTS", query_BTNH, key_BSNH) * case.scores.scale
    if case.scores.softcap:
        score_BNTS = case.scores.softcap * jnp.tanh(score_BNTS / case.scores.softcap)
    weight_BNTS = jnp.exp(score_BNTS) * seen_BTS[:, None]
    weight_BNTS /= weight_BNTS.sum(axis=-1, keepdims=True)
    return jnp.einsum("BNTS,BSNH->BTNH", weight_BNTS, value_BSNH)


def seen_by(segments, positions, window: int) -> np.ndarray:
    """bool[B, T, S] from slots in the row, not from positions."""
    t, s = np.arange(T)[:, None], np.arange(T)[None, :]
    seen = (segments[:, :, None] == segments[:, None, :]) & (s <= t)
    return seen & (t - s < window) if window else seen


def value_and_gradients(function, arrays, cotangent):
    """What `function` returns, and its gradients for `cotangent`, compiled together."""

    def both(arrays, cotangent):
        out, pull = jax.vjp(function, *arrays)
        return out, pull(cotangent)

    return jax.tree.map(np.asarray, jax.jit(both)(tuple(arrays), cotangent))


@functools.cache
def expected(name: str):
    """Value by loops; gradients of the dense formula."""
    case = CASES[name]
    *arrays, cotangent = inputs(case)
    segments, positions = documents(case.packed)
    seen = seen_by(segments, positions, case.scores.window)
    _, gradients = value_and_gradients(
        lambda *arrays: dense(*arrays, jnp.asarray(seen), case), arrays, cotangent
    )
    return looped(*arrays, segments, positions, case), gradients


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("implementation", ANY_LENGTH)
def test_implementation_equals_loops(implementation, name):
    case = CASES[name]
    *arrays, cotangent = inputs(case)
    mask, kernel = self_mask(case), on_cpu(implementation)
    try:
        value, gradients = value_and_gradients(
            lambda *arrays: kernel(*arrays, mask, case.scores), arrays, cotangent
        )
    except NotImplementedError as reason:
        pytest.skip(f"{implementation}: {reason}")
    want, want_gradients = expected(name)
    np.testing.assert_allclose(value, want, **VALUE)
    for which, got, to_be in zip(INPUTS, gradients, want_gradients, strict=True):
        np.testing.assert_allclose(got, to_be, **GRADIENT, err_msg=f"gradient of {which}")


def test_values_are_padded_for_kernels_of_one_width():
    """Where a kernel takes heads of one width only, values and their gradients stay narrow."""

    def one_width(function):
        def checked(query, key, value, *rest, device_kind):
            assert query.shape[-1] == key.shape[-1] == value.shape[-1]
            return function(query, key, value, *rest, device_kind=device_kind)

        return checked

    blockwise = attend.IMPLEMENTATIONS["blockwise"]
    kernel = of_one_width(one_width(blockwise.forward), one_width(blockwise.backward))
    for name in ("narrow_values", "packed_group2"):
        case = CASES[name]
        *arrays, cotangent = inputs(case)
        value, gradients = value_and_gradients(
            lambda *arrays, case=case: kernel(
                *arrays, self_mask(case), case.scores, device_kind="cpu"
            ),
            arrays, cotangent,
        )  # fmt: skip
        want, want_gradients = expected(name)
        np.testing.assert_allclose(value, want, **VALUE)
        for got, to_be in zip(gradients, want_gradients, strict=True):
            np.testing.assert_allclose(got, to_be, **GRADIENT)
    wide = [jnp.zeros((1, 2, 1, width)) for width in (4, 4, 6)]
    with pytest.raises(NotImplementedError, match="values of width 6 are wider than queries of 4"):
        kernel(*wide, self_mask(CASES["causal"]), SCORES, device_kind="cpu")


@pytest.mark.parametrize("name", ["all", "packed_window", "group2"])
@pytest.mark.parametrize("implementation", ANY_LENGTH)
def test_fp16_hides_scores_and_keeps_large_ones(implementation, name):
    """Masks are below every number of fp16, and scores here reach three times its largest."""
    case = CASES[name]
    query, key, value, cotangent = inputs(case)
    if not case.scores.softcap:
        case = dataclasses.replace(case, scores=dataclasses.replace(case.scores, scale=1e-4))
        query, key = 200 * query, 200 * key
    mask, kernel = self_mask(case), on_cpu(implementation)
    results = [
        value_and_gradients(
            lambda *arrays: kernel(*arrays, mask, case.scores),
            [array.astype(dtype) for array in (query, key, value)], cotangent.astype(dtype),
        )
        for dtype in (np.float16, np.float32)
    ]  # fmt: skip
    for got, want in zip(*map(jax.tree.leaves, results), strict=True):
        assert got.dtype == np.float16
        np.testing.assert_allclose(got, want, rtol=FP16, atol=FP16 * np.abs(want).max())


@pytest.mark.parametrize("implementation", ANY_LENGTH)
def test_what_is_not_seen_has_no_influence(implementation):
    """Bit for bit: keys and values of other documents, of the future, and beyond the window."""
    case = CASES["packed_window"]
    query, key, value, _ = inputs(case)
    mask, kernel = self_mask(case), on_cpu(implementation)
    run = jax.jit(lambda key, value: kernel(query, key, value, mask, case.scores))
    seen = seen_by(*documents(True), case.scores.window)
    try:
        before = np.asarray(run(key, value))
    except NotImplementedError as reason:
        pytest.skip(f"{implementation}: {reason}")
    for slot in (0, 7, 12, T - 1):
        changed_key, changed_value = key.copy(), value.copy()
        changed_key[:, slot] += 3.0
        changed_value[:, slot] -= 5.0
        after = np.asarray(run(changed_key, changed_value))
        changed_BT = (after != before).any(axis=(2, 3))
        np.testing.assert_array_equal(changed_BT, seen[:, :, slot])


@pytest.mark.parametrize("implementation", ANY_LENGTH)
def test_empty_slots_stay_finite(implementation):
    """A query that sees nothing, as in a padded cache, gives finite values and gradients."""
    case = CASES["causal"]
    *arrays, cotangent = inputs(case)
    segments, positions = documents(False)
    nothing = jnp.full_like(jnp.asarray(segments), -1)
    mask = Mask(jnp.asarray(segments), jnp.asarray(positions), nothing, nothing)
    kernel = on_cpu(implementation)
    try:
        value, gradients = value_and_gradients(
            lambda *arrays: kernel(*arrays, mask, case.scores), arrays, cotangent
        )
    except NotImplementedError as reason:
        pytest.skip(f"{implementation}: {reason}")
    assert np.isfinite(value).all()
    assert all(np.isfinite(gradient).all() for gradient in gradients)


# ------------------------------------------------------------------------------------------- meshes

MESHES = {
    "tensor4": dict(tensor=4),
    "tensor2_batch4": dict(tensor=2, fsdp=4),
    "sequence2_tensor2_batch2": dict(sequence=2, tensor=2, data=2),
    "sequence4_expert2": dict(sequence=4, expert=2),
}


def placed(sizes: dict, *, replicate_kv: bool) -> sharding.Placement:
    count = math.prod(sizes.values())
    mesh = sharding.make_mesh(
        {axis: sizes.get(axis, 1) for axis in sharding.AXES}, devices=jax.devices()[:count]
    )
    return sharding.Placement(mesh, sharding.make_layout("zero3", replicate_kv=replicate_kv))


def attended(place: sharding.Placement, case: Case, implementation: str):
    """Value and gradients of `attend` with arrays placed as the model places them."""
    *arrays, cotangent = inputs(case, batch=8)
    mask = self_mask(case, repeats=4)
    heads = ("batch", "sequence", "heads", "head_dim")
    kv_heads = ("batch", "sequence", "kv_heads", "head_dim")
    put = lambda array, axes: jax.device_put(  # noqa: E731
        array, jax.NamedSharding(place.mesh, place.activation(axes, array.shape))
    )
    arrays = [put(a, axes) for a, axes in zip(arrays, (heads, kv_heads, kv_heads), strict=True)]
    mask = jax.tree.map(lambda array: put(array, ("batch", "sequence")), mask)

    def attend(*arrays_and_mask):
        *arrays, mask = arrays_and_mask
        return attend_lib.attend(
            *arrays,
            mask,
            case.scores,
            config=attend_lib.AttentionConfig(implementation),
            place=place,
        )

    def both(arrays, mask, cotangent):
        out, pull = jax.vjp(lambda *arrays: attend(*arrays, mask), *arrays)
        return out, pull(cotangent)

    with jax.set_mesh(place.mesh):
        return jax.tree.map(np.asarray, jax.jit(both)(arrays, mask, put(cotangent, heads)))


def assert_same_on_mesh(got: np.ndarray, want: np.ndarray, which: str):
    atol = MESH_ROUNDINGS * np.finfo(np.float32).eps * np.abs(want).max()
    np.testing.assert_allclose(got, want, rtol=MESH_RTOL, atol=atol, err_msg=which)


@functools.cache
def on_one_device(case: Case, implementation: str):
    return attended(placed({}, replicate_kv=False), case, implementation)


@pytest.mark.parametrize("kind", ["split_kv", "whole_kv", "fewer_kv", "one_kv"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("implementation", ANY_LENGTH)
def test_mesh_equals_one_device(implementation, mesh, kind):
    """Split K/V heads; whole ones though they could be split; fewer than `tensor`; a single one."""
    kv_heads = {"split_kv": 4, "whole_kv": 4, "fewer_kv": 2, "one_kv": 1}[kind]
    case = Case(heads=8, kv_heads=kv_heads, packed=True, scores=scores(softcap=2.0, window=9))
    place = placed(MESHES[mesh], replicate_kv=kind != "split_kv")
    try:
        value, gradients = attended(place, case, implementation)
    except NotImplementedError as reason:
        pytest.skip(f"{implementation}: {reason}")
    want, want_gradients = on_one_device(case, implementation)
    assert_same_on_mesh(value, want, "value")
    for which, got, to_be in zip(INPUTS, gradients, want_gradients, strict=True):
        assert_same_on_mesh(got, to_be, f"gradient of {which}")


def test_fewer_queries_than_keys():
    """Queries and keys of different lengths: what decoding with a cache asks for."""
    case = CASES["group2"]
    query, key, value, _ = inputs(case)
    segments, positions = (jnp.asarray(array) for array in documents(False))
    reference = on_cpu("reference")
    whole = reference(query, key, value, self_mask(case), case.scores)
    last = Mask(segments[:, -5:], positions[:, -5:], segments, positions)
    part = reference(query[:, -5:], key, value, last, case.scores)
    np.testing.assert_allclose(part, whole[:, -5:], **VALUE)


def test_what_no_implementation_does_says_why():
    case = CASES["causal"]
    message = "implementation='splash' cannot do this: .* in order only; use .*'auto'"
    with pytest.raises(ValueError, match=message):
        attended(placed({}, replicate_kv=False), case, "splash")


def test_auto_prefers_by_platform():
    assert attend.candidates("auto", "tpu") == ("splash", "blockwise")
    assert attend.candidates("auto", "gpu") == ("cudnn", "triton", "blockwise")
    assert attend.candidates("auto", "cpu") == ("blockwise",)
    assert attend.candidates("reference", "tpu") == ("reference",)
