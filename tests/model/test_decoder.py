"""Every family: causality, documents, windows, padding, scanning, recomputing, positions."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from llmx import sharding
from llmx.model import apply, embedding, families, precision, remat, rope
from llmx.model import apply as apply_lib
from llmx.model import decoder as decoder_lib
from llmx.model.attention import masks
from llmx.model.execution import Execution

FAMILIES = (
    "gpt2",
    "llama3",
    "qwen3",
    "gemma2",
    "gemma3",
    "mixtral",
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v3",
)
VOCAB = 257

# fp32, the same operations in another order of compilation.
SAME = dict(rtol=1e-5, atol=1e-6)

T = 24


@dataclasses.dataclass(frozen=True, eq=False)
class Built:
    config: families.ModelConfig
    apply: apply.Apply
    params: dict  # all of them random: zeros and ones hide mistakes
    execution: Execution


@functools.cache
def one_device() -> sharding.Placement:
    mesh = sharding.make_mesh(dict.fromkeys(sharding.AXES, 1), devices=jax.devices()[:1])
    return sharding.Placement(mesh, sharding.make_layout("ddp"))


@pytest.fixture(autouse=True, scope="module")
def mesh():
    with jax.set_mesh(one_device().mesh):
        yield


@functools.cache
def built(family: str) -> Built:
    """A tiny model of the family."""
    changes = dict(vocab_size=VOCAB, width=32, mlp_dim=48, head_dim=8, max_positions=64)
    if family.startswith("gemma") or family == "gpt_oss":
        changes |= dict(num_layers=3, window=3)
    if family == "deepseek_v3":
        changes |= dict(rope_dim=4, value_dim=6, rope_scaling="yarn", rope_factor=4.0,
                        rope_old_context=8, first_dense=2)  # fmt: skip
    return make(families.preset(family, **changes))


def make(config: families.ModelConfig) -> Built:
    shapes, _ = apply.abstract_parameters(config)
    noise = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(0.2 * noise.standard_normal(leaf.shape), leaf.dtype), shapes
    )
    execution = Execution(one_device(), precision.POLICIES["fp32"])
    return Built(config, apply.Apply(config), params, execution)


def row(*lengths: int):
    """Segments and positions [1, T] of a row of packed documents."""
    segments = np.repeat(np.arange(len(lengths)), lengths)
    positions = np.concatenate([np.arange(length) for length in lengths])
    return segments[None].astype(np.int32), positions[None].astype(np.int32)


def some_tokens(seed: int = 0, size: int = T) -> np.ndarray:
    """[1, size] tokens, all different."""
    tokens = np.random.default_rng(seed).permutation(VOCAB)[:size]
    return tokens[None].astype(np.int32)


@functools.cache
def logits_of(family: str):
    """Jitted (params, tokens, segments, positions) -> logits [B, T, V]."""
    decoder = built(family)
    return jax.jit(lambda params, *arrays: decoder.apply.logits(params, *arrays, decoder.execution))


def logits(family: str, tokens, segments, positions) -> np.ndarray:
    return np.asarray(logits_of(family)(built(family).params, tokens, segments, positions))


def a_batch(segments, positions) -> dict:
    tokens = some_tokens()
    return dict(
        tokens=tokens, targets=np.roll(tokens, -1, axis=1), segment_ids=segments,
        positions=positions,
    )  # fmt: skip


def mean_loss(apply: apply.Apply, execution: Execution):
    """(params, batch) -> (mean loss, (losses, log Z))."""

    def function(params, batch):
        losses_BT, log_z_BT = apply.losses(params, batch, execution)
        return losses_BT.mean(), (losses_BT, log_z_BT)

    return function


@functools.cache
def differentiated(family: str):
    """Jitted (params, batch) -> ((mean loss, (losses, log Z)), gradient)."""
    decoder = built(family)
    return jax.jit(jax.value_and_grad(mean_loss(decoder.apply, decoder.execution), has_aux=True))


@functools.cache
def loss_and_gradient(family: str):
    return jax.tree.map(
        np.asarray, differentiated(family)(built(family).params, a_batch(*row(10, 14)))
    )


def assert_same_trees(got, want):
    got, want = (jax.tree_util.tree_leaves_with_path(tree) for tree in (got, want))
    for (path, leaf), (_, wanted) in zip(got, want, strict=True):
        name = sharding.path_name(path)
        np.testing.assert_allclose(leaf, wanted, **SAME, err_msg=name)


# -------------------------------------------------------------------------------- who sees whom


@pytest.mark.parametrize("family", FAMILIES)
def test_future_has_zero_gradient(family):
    """d logits of a position / d rows of later tokens is exactly zero; of tokens it sees, not."""
    decoder, position = built(family), 9
    # A tied table is the head too: only its use as input counts here.
    table = decoder.params["embedding"]

    def one_logit(table_VD):
        execution = decoder.execution
        params = dict(decoder.params)
        if decoder.config.tied_head:
            untied = dataclasses.replace(decoder.config, tied_head=False)
            apply, params["head"] = apply_lib.Apply(untied), table
        else:
            apply = decoder.apply
        params["embedding"] = table_VD
        tokens, (segments, positions) = some_tokens(), row(T)
        out = apply.logits(params, tokens, segments, positions, execution)[0, position, :VOCAB]
        return jnp.sum(jnp.sin(out + jnp.arange(VOCAB)))

    gradient_VD = np.asarray(jax.jit(jax.grad(one_logit))(table))
    [tokens] = some_tokens()
    assert (gradient_VD[tokens[position + 1 :]] == 0).all()
    window = decoder.config.window or T
    for token in tokens[max(0, position + 1 - window) : position + 1]:
        assert np.abs(gradient_VD[token]).max() > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_future_leaves_logits_alone(family):
    segments, positions = row(T)
    tokens, changed = some_tokens(), some_tokens()
    changed[0, 10:] = changed[0, 10:][::-1]
    before, after = (logits(family, t, segments, positions) for t in (tokens, changed))
    np.testing.assert_array_equal(before[0, :10], after[0, :10])
    assert (before[0, 11:, :VOCAB] != after[0, 11:, :VOCAB]).any(axis=-1).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_do_not_see_each_other(family):
    """Changing one document leaves the logits of the others bit-identical, in both directions."""
    bounds, (segments, positions) = [(0, 9), (9, 10), (10, T)], row(9, 1, T - 10)
    tokens = some_tokens()
    before = logits(family, tokens, segments, positions)[..., :VOCAB]
    for start, stop in bounds:
        changed = tokens.copy()
        changed[0, start:stop] = (changed[0, start:stop] + 1) % VOCAB
        after = logits(family, changed, segments, positions)[..., :VOCAB]
        other = np.ones(T, bool)
        other[start:stop] = False
        np.testing.assert_array_equal(before[0, other], after[0, other])
        assert (before[0, start] != after[0, start]).any()


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_document_equals_document_alone(family):
    """In value too: positions restart."""
    segments, positions = row(9, T - 9)
    packed = logits(family, some_tokens(), segments, positions)[0, 9:]
    alone_tokens = np.roll(some_tokens(), -9, axis=1)
    alone = logits(family, alone_tokens, *row(T - 9, 9))[0, : T - 9]
    # Sums over other keys, hidden or not: logits near zero are differences of large ones.
    packed, alone = packed[:, :VOCAB], alone[:, :VOCAB]
    np.testing.assert_allclose(packed, alone, rtol=0, atol=1e-6 * np.abs(alone).max())


LOCAL, GLOBAL = families.LOCAL, families.GLOBAL


@pytest.mark.parametrize(
    ("pattern", "num_layers", "reach"),
    [
        ((LOCAL,), 3, 12),  # window - 1 positions back from each layer
        ((LOCAL, LOCAL), 3, 12),  # a layer left over after a whole period
        ((LOCAL, GLOBAL), 3, T),  # one global layer sees everything
    ],
)
def test_window_reaches_as_far_as_its_layers(pattern, num_layers, reach):
    decoder = make(
        families.preset(
            "gemma3", vocab_size=VOCAB, width=32, mlp_dim=48, head_dim=8, max_positions=64,
            num_layers=num_layers, window=5, layer_pattern=pattern,
        )
    )  # fmt: skip
    logits_of = jax.jit(
        lambda *arrays: decoder.apply.logits(decoder.params, *arrays, decoder.execution)
    )
    (segments, positions), tokens = row(T), some_tokens()
    before = np.asarray(logits_of(tokens, segments, positions))[0, :, :VOCAB]
    changed = tokens.copy()
    changed[0, 2] = 3 if tokens[0, 2] != 3 else 4
    after = np.asarray(logits_of(changed, segments, positions))[0, :, :VOCAB]
    touched = (before != after).any(axis=-1)
    inside = (np.arange(T) >= 2) & (np.arange(T) <= 2 + reach)
    np.testing.assert_array_equal(touched, inside)


# ----------------------------------------------------------------------------- logits and losses


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_of_the_vocabulary(family):
    """Padded tokens have no probability, and their rows no gradient."""
    config = built(family).config
    assert config.padded_vocab > VOCAB
    out = logits(family, some_tokens(), *row(T))
    assert (out[..., VOCAB:] == -np.inf).all() and np.isfinite(out[..., :VOCAB]).all()
    _, gradient = loss_and_gradient(family)
    for name in ("embedding",) if config.tied_head else ("embedding", "head"):
        assert (gradient[name][VOCAB:] == 0).all()
        assert (np.abs(gradient[name][:VOCAB]).max(axis=-1) > 0).any()


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_are_those_of_the_logits(family):
    batch = a_batch(*row(10, 14))
    (_, (got, log_z)), _ = loss_and_gradient(family)
    out = logits(family, batch["tokens"], batch["segment_ids"], batch["positions"])
    out = out[..., :VOCAB].astype(np.float64)
    want_z = np.log(np.exp(out).sum(axis=-1))
    hit = np.take_along_axis(out, batch["targets"][..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(log_z, want_z, **SAME)
    np.testing.assert_allclose(got, want_z - hit, **SAME)


@pytest.mark.parametrize("family", FAMILIES)
def test_first_loss_is_near_that_of_guessing(family):
    config = built(family).config
    params = jax.jit(lambda: apply.init_parameters(config, 0))()
    (loss, _), _ = differentiated(family)(params, a_batch(*row(10, 14)))
    # Logits of unit variance cost half a nat over guessing.
    assert abs(float(loss) - math.log(VOCAB)) < 1.0


def test_softcaps_act():
    """Logits never exceed the cap, however large the weights; capped scores change the result."""
    decoder = built("gemma2")
    cap = decoder.config.logit_softcap
    large = decoder.params | {"embedding": 100 * decoder.params["embedding"]}
    out = np.asarray(logits_of("gemma2")(large, some_tokens(), *row(T)))[..., :VOCAB]
    assert np.abs(out).max() <= cap and np.abs(out).max() > 0.99 * cap

    tight = dataclasses.replace(decoder.config, attention_softcap=0.01)
    apply = apply_lib.Apply(tight)
    capped = jax.jit(lambda *a: apply.logits(decoder.params, *a, decoder.execution))(
        some_tokens(), *row(T)
    )
    plain = logits("gemma2", some_tokens(), *row(T))
    assert np.abs(np.asarray(capped)[..., :VOCAB] - plain[..., :VOCAB]).max() > 1e-3


# ------------------------------------------------------------------- scanning and recomputing


def unrolled_losses(decoder: Built, params: dict, batch: dict):
    """The decoder as a python loop over its blocks, with logits whole."""
    config, execution = decoder.config, decoder.execution
    place = dict(place=execution.place, policy=execution.policy)
    definition, _ = nnx.split(nnx.eval_shape(lambda: decoder_lib.Decoder(config, nnx.Rngs(0))))
    whole = nnx.merge(definition, params)
    definitions = [
        nnx.split(nnx.eval_shape(lambda: decoder_lib.Block(config, nnx.Rngs(0), routed=routed)))[0]  # noqa: B023
        for routed in (False, config.num_experts > 0)
    ]
    segments, positions = batch["segment_ids"], batch["positions"]
    mask = masks.Mask(segments, positions, segments, positions)
    x_BTD = embedding.embed(batch["tokens"], params["embedding"], **place)
    if config.embedding_scale:
        x_BTD = x_BTD * math.sqrt(config.width)
    if config.positions == "learned":
        x_BTD += embedding.embed(positions, params["positions"], **place)
    for index, kind in enumerate(config.layer_kinds):
        first = index < config.num_first
        at = index if first else index - config.num_first
        stack, definition = params["first" if first else "blocks"], definitions[not first]
        weights = jax.tree.map(lambda array: array[at], stack)  # noqa: B023
        rotation = None
        if config.positions == "rope":
            frequencies = rope.rope_frequencies(config, kind)
            rotation = rope.rotation_of(positions, frequencies, rope.amplitude(config, kind))
        window = config.window if kind == LOCAL else 0
        x_BTD, _ = nnx.merge(definition, weights)(x_BTD, rotation, mask, window, execution)
    head_VD = params["embedding"] if config.tied_head else params["head"]
    logits_BTV = jnp.einsum("BTD,VD->BTV", whole.norm(x_BTD), head_VD[:VOCAB])
    if config.logit_softcap:
        logits_BTV = config.logit_softcap * jnp.tanh(logits_BTV / config.logit_softcap)
    log_p_BTV = jax.nn.log_softmax(logits_BTV)
    return -jnp.take_along_axis(log_p_BTV, batch["targets"][..., None], axis=-1)[..., 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_scanned_layers_equal_a_loop(family):
    decoder = built(family)
    function = jax.value_and_grad(lambda *args: unrolled_losses(decoder, *args).mean())
    got = jax.jit(function)(decoder.params, a_batch(*row(10, 14)))
    (loss, _), gradient = loss_and_gradient(family)
    assert_same_trees(got, (loss, gradient))


def test_periods_of_layers_equal_a_loop():
    """Two whole periods and two layers, of different kinds, left of a third."""
    pattern = (LOCAL, GLOBAL, LOCAL)
    decoder = make(dataclasses.replace(built("gemma3").config, layer_pattern=pattern, num_layers=8))
    batch = a_batch(*row(10, 14))
    loop = jax.jit(lambda *args: unrolled_losses(decoder, *args))
    scan = jax.jit(lambda *args: decoder.apply.losses(*args, decoder.execution)[0])
    got, want = scan(decoder.params, batch), loop(decoder.params, batch)
    np.testing.assert_allclose(got, want, **SAME)


@pytest.mark.parametrize("policy", [name for name in remat.POLICIES if name != "none"])
@pytest.mark.parametrize("family", ["gemma2", "deepseek_v3"])
def test_remat_changes_nothing(family, policy):
    decoder = built(family)
    execution = dataclasses.replace(decoder.execution, remat=policy)
    function = jax.jit(jax.value_and_grad(mean_loss(decoder.apply, execution), has_aux=True))
    got = function(decoder.params, a_batch(*row(10, 14)))
    assert_same_trees(got, loss_and_gradient(family))


def num_equations(jaxpr) -> int:
    """Equations of a jaxpr and of all that it calls."""
    inner = [
        found
        for equation in jaxpr.eqns
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        )
        if hasattr(found := value.jaxpr if hasattr(value, "jaxpr") else value, "eqns")
    ]
    return len(jaxpr.eqns) + sum(map(num_equations, inner))


@pytest.mark.parametrize("family", ["llama3", "gemma3", "deepseek_v3"])
def test_program_does_not_grow_with_depth(family):
    def size(num_layers: int) -> int:
        config = families.preset(family, vocab_size=VOCAB, num_layers=num_layers)
        shapes, _ = apply_lib.abstract_parameters(config)
        apply = apply_lib.Apply(config)
        function = jax.grad(mean_loss(apply, built(family).execution), has_aux=True)
        return num_equations(jax.make_jaxpr(function)(shapes, a_batch(*row(T))).jaxpr)

    period = len(built(family).config.layer_pattern)
    small, large = size(4 * period), size(32 * period)
    assert small == large and small > 100


# -------------------------------------------------------------------------------- rotary positions


def test_llama3_frequencies():
    """Against the rule of the paper's code, by hand: kept, blended and divided."""
    config = families.preset(
        "llama3", vocab_size=VOCAB, head_dim=8, rope_theta=10_000.0, rope_scaling="llama3",
        rope_factor=8.0, rope_low_freq=1.0, rope_high_freq=4.0, rope_old_context=64,
    )  # fmt: skip
    # Wavelengths 2 pi 10^(0..3) = 6.3, 63, 628, 6283: kept below 64/4, divided above 64/1.
    turns = 64 * 0.1 / (2 * math.pi)  # 1.0186 turns over the old context
    smooth = (turns - 1) / (4 - 1)
    blended = (1 - smooth) * 0.1 / 8 + smooth * 0.1
    want = [1.0, blended, 0.01 / 8, 0.001 / 8]
    np.testing.assert_allclose(rope.rope_frequencies(config, GLOBAL), want, rtol=1e-6)
    # As published for Llama 3.2: the lowest frequency of head size 64 is theta^(-62/64) / 32.
    published = families.preset("llama3.2_1b")
    frequencies = rope.rope_frequencies(published, GLOBAL)
    np.testing.assert_allclose(frequencies[[0, -1]], [1, 500_000 ** (-62 / 64) / 32], rtol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_first_numbers_of_a_head_are_rotated(interleaved):
    config = dataclasses.replace(built("llama3").config, head_dim=16, rope_dim=6)
    alone = dataclasses.replace(config, head_dim=6, rope_dim=0)
    frequencies = rope.rope_frequencies(config, GLOBAL)
    np.testing.assert_array_equal(frequencies, rope.rope_frequencies(alone, GLOBAL))
    x = np.random.default_rng(0).standard_normal((1, 5, 2, 16)).astype(np.float32)
    rotation = rope.rotation_of(np.arange(5, dtype=np.int32)[None], frequencies)
    got = rope.rotate(x, rotation, interleaved=interleaved)
    want = rope.rotate(x[..., :6], rotation, interleaved=interleaved)
    np.testing.assert_array_equal(got[..., :6], want)
    np.testing.assert_array_equal(got[..., 6:], x[..., 6:])


@pytest.mark.parametrize(
    ("changes", "learned"),
    [
        (dict(rope_dim=4, qkv_bias=True), 4),
        (dict(layer_pattern=("global_nope",), bias=True), 0),
        (dict(positions="learned", qkv_bias=True), 0),
        # Norms of keys, and sinks beside them, make a constant count.
        (dict(layer_pattern=("global_nope",), qkv_bias=True, qk_norm=True), 8),
        (dict(positions="learned", qkv_bias=True, attention_sinks=True), 8),
    ],
    ids=["partial", "unrotated", "learned", "normed", "sinks"],
)
def test_numbers_of_a_bias_that_no_score_depends_on_have_no_gradient(changes, learned):
    """The others have one; Adam would divide rounding errors by themselves."""
    decoder = make(dataclasses.replace(built("llama3").config, num_layers=1, **changes))
    loss = mean_loss(decoder.apply, decoder.execution)
    gradient = jax.jit(jax.grad(loss, has_aux=True))(decoder.params, a_batch(*row(10, 14)))[0]
    bias_KH = np.asarray(gradient["blocks"]["attention"]["key"]["bias"][0])
    assert (np.abs(bias_KH[:, :learned]) > 1e-7).all() and not bias_KH[:, learned:].any()


def test_linear_frequencies_spare_local_layers():
    config = families.preset("gemma3_4b", head_dim=4)
    np.testing.assert_allclose(rope.rope_frequencies(config, GLOBAL), [1 / 8, 1e-3 / 8], rtol=1e-6)
    np.testing.assert_allclose(rope.rope_frequencies(config, LOCAL), [1, 1e-2], rtol=1e-6)


def test_rotation_depends_on_distance_only():
    rng = np.random.default_rng(0)
    query, key = (rng.standard_normal((1, 1, 1, 16)).astype(np.float32) for _ in range(2))
    frequencies = rope.rope_frequencies(built("llama3").config, GLOBAL)
    frequencies = np.resize(frequencies, 8)

    def score(t: int, s: int) -> float:
        turned = [
            rope.rotate(x, rope.rotation_of(np.full((1, 1), p, np.int32), frequencies))
            for x, p in ((query, t), (key, s))
        ]
        return float(jnp.sum(turned[0] * turned[1]))

    assert score(0, 0) == pytest.approx(float((query * key).sum()), rel=1e-5)
    assert score(9, 4) == pytest.approx(score(25, 20), rel=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), rel=1e-3)
