"""Remat saves for the backward pass what its rules say, and changes no number."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmx import sharding
from llmx.model import apply as apply_lib
from llmx.model import costs, families, precision, remat, remat_costs
from llmx.model.attention.attend import AttentionConfig
from llmx.model.execution import Execution
from llmx.model.remat import OffloadConfig, Policy

# The same operations, fused by the compiler in another order.
TOLERANCE = 1e-5

BOTH = ("global", "local")


# ------------------------------------------------------------------------------------ the rules


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("full", [Policy()] * 6),
        ("names", [Policy(frozenset(("query_key_value", "attention")))] * 6),
        ("gate+up", [Policy(frozenset(("gate", "up")))] * 6),
        ("dots+attention", [Policy(frozenset((*remat.PRODUCTS, "attention")))] * 6),
        (":2=full,none", [Policy()] * 2 + [Policy(None)] * 4),
        ("1:3=full,4:=up,none", [Policy(None), *[Policy()] * 2, Policy(None)]
         + [Policy(frozenset(("up",)))] * 2),
        ("local=none,full", [Policy(None), Policy()] * 3),
        ("local=none,global=full", [Policy(None), Policy()] * 3),
        ("sqrt", [Policy(segment=0)] * 6),
        ("every_3+none", [Policy(None, 3)] * 6),
        (":4=every_2+gate,full", [Policy(frozenset(("gate",)), 2)] * 4 + [Policy()] * 2),
        ("part", [Policy()] * 6),
        ("part+:2=full,none", [Policy()] * 2 + [Policy(None)] * 4),
    ],
)  # fmt: skip
def test_the_first_rule_that_holds_decides(text, expected):
    rules = remat.parse(text, BOTH)
    kinds = ("local", "global") * 3
    assert [remat.policy_of(rules, n, kind) for n, kind in enumerate(kinds)] == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ful", "did you mean 'full'?"),
        ("gate+uq", "remat='uq' is unknown"),
        ("", "remat='' is unknown"),
        ("full,", "remat='' is unknown"),
        ("attention+sqrt", "remat='attention+sqrt': sqrt or every_N stands first, and once"),
        ("every_3+sqrt", "stands first, and once"),
        ("full+part", "remat='full+part': part stands before all rules, and once"),
        ("part+part", "part stands before all rules, and once"),
        ("parts", "did you mean 'part'?"),
        (":2=budget,full", "remat='budget' stands alone"),
        ("sqrt,full", "its rule number 2 holds for no layer"),
        ("local=full,global=dots,names", "its rule number 3 holds for no layer"),
        ("every_0", "remat='every_0' is unknown"),
        ("3:3=full,none", "'3:3' has no layers"),
        ("4:2=full,none", "'4:2' has no layers"),
        (":3=full", "leaves layers without a policy: end it with a policy for all"),
        ("local=full", "leaves layers without a policy"),
        ("dense=full,none", "'dense' is no kind of layer of this model: use global or local"),
        ("local=full,sqrt", "segments are of neighbouring layers of all kinds"),
    ],
)
def test_wrong_rules_are_named(text, words):
    (problem,) = remat.problems(text, OffloadConfig(), BOTH)
    assert words in problem


def test_wrong_offload_is_named():
    (unknown,) = remat.problems("full", OffloadConfig(saves=("inputs",)), BOTH)
    assert "did you mean 'input'?" in unknown
    (kept,) = remat.problems(":2=full,none", OffloadConfig(saves=("input",)), BOTH)
    assert "keeps everything on the device" in kept and "remat='dots'" in kept
    assert remat.problems("budget", OffloadConfig(saves=("input",)), BOTH) == []


@pytest.mark.parametrize("period", [1, 2, 6])
@pytest.mark.parametrize("num_layers", [1, 2, 3, 7, 12, 26, 53, 61, 64, 80, 126, 127])
def test_sqrt_saves_few_inputs(num_layers, period):
    """Of segments, and of the layers of one segment, which are whole periods."""
    period = min(period, num_layers)
    size = remat.segment_size(remat.POLICIES["sqrt"], num_layers, period)
    if size == 1:  # no segments, since none save inputs
        sizes = range(period, num_layers + 1, period)
        assert min(-(-num_layers // size) + size for size in sizes) >= num_layers
    else:
        assert size % period == 0
        assert -(-num_layers // size) + size <= 2 * math.sqrt(num_layers) + period


# ------------------------------------------------------------------------------- in a decoder

# By shape: L = 4 layers, B = 3, T = 5, N = 4, K = 2, H = 6, F = 17, D = 24.
L, B, T, N, K, H, D, F = 4, 3, 5, 4, 2, 6, 24, 17
QUERIES, KEYS, HIDDEN, STREAM = (N, H), (K, H), (F,), (D,)
SAVED = {
    "full": {STREAM: 1},  # the input of each layer
    "names": {STREAM: 1, QUERIES: 2, KEYS: 2},  # and query and attention, key and value
    "dots": {STREAM: 2, QUERIES: 1, KEYS: 2, HIDDEN: 2},  # what a weight gave and is needed again
    "attention": {STREAM: 1, QUERIES: 1},
    "query+attention_out": {STREAM: 2, QUERIES: 1},
    "attention_norm+mlp_norm+hidden": {STREAM: 3, HIDDEN: 1},
}


SIZES = dict(
    vocab_size=32, vocab_multiple=32, width=D, num_heads=N, num_kv_heads=K, head_dim=H, mlp_dim=F
)


def decoder(**changes):
    config = families.preset("llama3", num_layers=L, **SIZES, **changes)
    mesh = sharding.make_mesh({"data": 1}, devices=jax.devices()[:1])
    place = sharding.Placement(mesh, sharding.make_layout("ddp"))
    return config, Execution(place=place, policy=precision.POLICIES["fp32"])


def decoder_losses(policy: str, config=None, **execution):
    """(parameters, batch) -> losses of a decoder, and the shapes of the two."""
    model, plain = decoder() if config is None else (config, decoder()[1])
    execution = Execution(plain.place, plain.policy, remat=policy, **execution)
    shapes, _ = apply_lib.abstract_parameters(model)
    apply = apply_lib.Apply(model)
    tokens = jax.ShapeDtypeStruct((B, T), jnp.int32)
    batch = dict.fromkeys(("tokens", "targets", "segment_ids", "positions"), tokens)
    return lambda params, batch: apply.losses(params, batch, execution), (shapes, batch)


def decoder_residuals(policy: str, config=None, *, host=None, **execution) -> list[tuple[int, ...]]:
    """Shapes of all that the forward pass of a decoder keeps for the backward pass.

    `host`: only those in the memory of the host, or only the others.
    """
    losses, shapes = decoder_losses(policy, config, **execution)

    def backward(params, batch):
        return jax.vjp(lambda params: losses(params, batch), params)[1]

    with jax.set_mesh(decoder()[1].place.mesh):
        kept = jax.make_jaxpr(backward)(*shapes).out_avals
    in_host = [leaf.memory_space == jax.memory.Space.Host for leaf in kept]
    return [leaf.shape for leaf, is_in in zip(kept, in_host, strict=True) if host in (None, is_in)]


def of_layers(shapes, num_layers: int = L) -> dict[tuple[int, ...], int]:
    """How many arrays of each shape, per layer and token, are stacked for so many layers."""
    found = [shape[3:] for shape in shapes if shape[:3] == (num_layers, B, T)]
    return {shape: found.count(shape) for shape in set(found)}


@pytest.mark.parametrize("policy", SAVED)
def test_the_decoder_keeps_what_the_policy_names(policy):
    assert of_layers(decoder_residuals(policy)) == SAVED[policy]


def test_ranges_of_layers_keep_what_their_rule_names():
    shapes = decoder_residuals(":1=full,dots")
    assert of_layers(shapes, 1) == SAVED["full"]
    assert of_layers(shapes, 3) == SAVED["dots"]


def test_segments_keep_their_inputs_only():
    model, _ = decoder()
    shapes = decoder_residuals("sqrt", dataclasses.replace(model, num_layers=9))
    assert of_layers(shapes, 3) == {STREAM: 1} and of_layers(shapes, 9) == {}
    shapes = decoder_residuals("every_3+dots")  # three layers, and one that is left
    assert of_layers(shapes, 1) == {STREAM: 1} and of_layers(shapes, 3) == {}


@pytest.mark.parametrize(
    ("text", "num_layers"), [("sqrt", 1), ("sqrt", 4), ("sqrt", 5), ("every_2", 1), ("every_1", 3)]
)
def test_segments_that_save_nothing_are_not_made(text, num_layers):
    """Their layers would be run once more, for nothing."""
    model = dataclasses.replace(decoder()[0], num_layers=num_layers)

    def program(text):
        losses, shapes = decoder_losses(text, model)
        gradient = jax.grad(lambda params, batch: losses(params, batch)[0].sum())
        with jax.set_mesh(decoder()[1].place.mesh):
            return str(jax.make_jaxpr(gradient)(*shapes))

    assert program(text).count("dot_general") == program("full").count("dot_general")
    assert remat_costs.segments(model, text) == []


def test_sqrt_of_64_layers():
    model, _ = decoder()
    shapes = decoder_residuals("sqrt", dataclasses.replace(model, num_layers=64))
    size = remat.segment_size(remat.POLICIES["sqrt"], 64)
    stacked = [shape for shape in shapes if shape[1:3] == (B, T)]
    assert stacked == [(64 // size, B, T, D)] and 64 // size + size <= 2.2 * math.sqrt(64)


def test_the_policies_are_ordered_by_what_they_keep():
    model = dataclasses.replace(decoder()[0], num_layers=9)
    size = {
        policy: sum(math.prod(shape) for shape in decoder_residuals(policy, model))
        for policy in remat.POLICIES
    }
    assert size["sqrt"] < size["full"] < size["names"] < size["none"]
    assert size["full"] < size["dots"] < size["none"]


@pytest.mark.parametrize("policy", [":1=full,dots", "every_3", "full", "none", ":3=none,full"])
@pytest.mark.parametrize("num_layers", [4, 6])
def test_weights_are_not_copied_for_a_part_of_the_layers(policy, num_layers):
    """A range of layers, a period, and what is left of one, take weights from the whole stack."""
    model, _ = decoder(layer_pattern=("local", "global", "global"), window=3)
    kept = decoder_residuals(policy, dataclasses.replace(model, num_layers=num_layers))
    weights = [shape for shape in kept if shape[-2:] in ((D, F), (F, D))]
    assert weights and {shape[:-2] for shape in weights} == {(num_layers,)}


POLICIES = (
    *(policy for policy in remat.POLICIES if policy != "none"), "+".join(remat.SAVES),
    ":1=full,2:3=names,dots", "every_3+attention", ":6=sqrt,hidden", "every_2+none",
    "global=full,local=none", "1:=every_2,none",
)  # fmt: skip


@functools.cache
def gradients(policy: str, family: str, offloaded: tuple[str, ...] = ()):
    """The loss of two rows, and its gradients."""
    sizes = dict(vocab_size=64, vocab_multiple=32, num_layers=7, window=3) | (
        dict(layer_pattern=("local", "global", "global")) if family == "gemma3" else {}
    )
    model = families.preset(family, **sizes)
    _, plain = decoder()
    execution = Execution(
        plain.place, plain.policy, remat=policy, offloaded=offloaded,
        attention=AttentionConfig("blockwise"),
    )  # fmt: skip
    apply, ids = apply_lib.Apply(model), np.random.default_rng(0).integers(0, 64, (2, 8))
    batch = dict.fromkeys(("tokens", "targets"), jnp.asarray(ids, jnp.int32))
    batch |= dict(segment_ids=batch["tokens"] * 0, positions=batch["tokens"] * 0 + jnp.arange(8))

    def loss(params):
        return apply.losses(params, batch, execution)[0].sum()

    with jax.set_mesh(plain.place.mesh):
        params = apply_lib.init_parameters(model, 0)
        return jax.device_get(jax.jit(jax.value_and_grad(loss))(params))


def assert_equal(found, wanted):
    def one(got, want):
        near = TOLERANCE * np.abs(want).max()
        np.testing.assert_allclose(got, want, rtol=TOLERANCE, atol=near)

    jax.tree.map(one, found, wanted)


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_are_those_without_remat(policy):
    family = "llama3" if policy in remat.POLICIES else "gemma3"
    assert_equal(gradients(policy, family), gradients("none", family))


OFFLOADED = [("full", ("input",)), ("sqrt", ("input",)), ("dots", ("gate", "up")),
             (":2=full,attention", ("attention", "input"))]  # fmt: skip


@pytest.mark.parametrize(("policy", "offloaded"), OFFLOADED)
def test_gradients_are_the_same_with_offload(policy, offloaded):
    assert_equal(gradients(policy, "llama3", offloaded), gradients("none", "llama3"))


@pytest.mark.parametrize("family", ["llama3", "gpt2", "gemma3"])
def test_to_save_everything_is_to_copy_nothing(family, monkeypatch):
    """With gradient buffers a loop stacked the weights that its layers read: all of them, in fp32.

    Nor is an array saved in two types. The gradients are those of layers without a checkpoint."""
    plain, sizes = decoder()[1], dict(num_layers=L, layer_pattern=("global",))
    model = dataclasses.replace(families.preset(family, **SIZES), **sizes)
    mixed = Execution(plain.place, precision.POLICIES["bf16"], remat="none")
    exact = dataclasses.replace(plain, remat="none")
    apply = apply_lib.Apply(model)
    params = apply_lib.init_parameters(model, 0)
    buffers = jax.tree.map(jnp.zeros_like, params)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 32, (B, T)))
    batch = dict(
        tokens=tokens, targets=tokens, segment_ids=jnp.ones_like(tokens),
        positions=jnp.broadcast_to(jnp.arange(T), (B, T)),
    )  # fmt: skip

    def loss(buffers, params, execution):
        return jnp.sum(apply.losses(params, batch, execution, buffers)[0])

    def stacked():
        """What the loops over layers write, forward: of weights' shapes how many, all bytes."""
        pull = lambda tree, params: jax.vjp(lambda tree: loss(tree, params, mixed), tree)[1]  # noqa: E731
        jaxpr = jax.make_jaxpr(pull)(buffers, params)
        loops = [one for one in jaxpr.jaxpr.eqns if one.primitive.name == "scan"]
        written = [var.aval for one in loops for var in one.outvars if var.aval.shape[:1] == (L,)]
        named = jax.tree_util.tree_leaves_with_path(params["blocks"])
        weights = {leaf.shape for path, leaf in named if "kernel" in jax.tree_util.keystr(path)}
        num_bytes = sum(math.prod(one.shape) * one.dtype.itemsize for one in written)
        return sum(one.shape in weights for one in written), num_bytes

    def gradients():
        return jax.jit(jax.grad(functools.partial(loss, execution=exact)))(buffers, params=params)

    with jax.set_mesh(plain.place.mesh):
        (copies, num_bytes), found = stacked(), gradients()
        monkeypatch.setattr(remat, "checkpointed", lambda function, *_: function)
        (copies_before, bytes_before), expected = stacked(), gradients()
    assert copies == 0 < copies_before
    assert num_bytes < bytes_before
    assert_equal(found, expected)


# ------------------------------------------------------------------------------------- its costs


@pytest.mark.parametrize("text", ["sqrt", "every_2+dots", ":2=every_2,names", ":1=full,dots"])
def test_saved_bytes_are_those_of_the_decoder(text):
    model, _ = decoder()
    shapes = [s for s in decoder_residuals(text) if s[1:3] == (B, T) and s[3:] in SAVED["dots"]]
    counted = remat_costs.saved_bytes_by_layer(model, text=text, loss_chunks=1, compute_bytes=4)
    without_lse = [4 * N * ("names" in text and n >= 2) for n in range(L)]
    assert sum(map(math.prod, shapes)) * 4 == B * T * (sum(counted[1:-1]) - sum(without_lse))


def test_a_part_keeps_its_input_and_is_run_once_more():
    model, size = decoder()[0], dict(loss_chunks=1, compute_bytes=4, chunks=(1, 2, L - 3))
    for inner in ("full", "dots"):
        text = f"part+{inner}"
        *blocks, _ = remat_costs.saved_bytes_by_layer(model, text=text, **size)[1:]
        assert blocks == [4 * D * (layer in (0, 1, 3)) for layer in range(L)]
        by_layer = lambda text: remat_costs.recomputed_flops_by_layer(  # noqa: E731
            model, sequence_length=T, text=text, loss_chunks=1, chunks=(1, 2, L - 3)
        )
        forward = costs.forward_flops_by_layer(model, sequence_length=T)
        for found, inside, once in zip(by_layer(text), by_layer(inner), forward, strict=True):
            assert found == inside + once * (inside > 0)


@pytest.mark.parametrize(
    ("text", "inputs"),
    [("every_2", 2), ("every_4", 1), (":4=every_3,every_2", 3), ("every_1", 6), ("sqrt", 2)],
)
def test_segments_are_of_whole_periods_as_in_the_decoder(text, inputs):
    """Six layers that repeat after three."""
    pattern = ("local", "global", "global")
    model, _ = decoder(layer_pattern=pattern, window=3)
    model = dataclasses.replace(model, num_layers=6)

    def kept(text):
        """Arrays [B, T, D] that the decoder keeps."""
        shapes = [s for s in decoder_residuals(text, model) if s[-3:] == (B, T, D)]
        return sum(math.prod(shape[:-3]) for shape in shapes)

    segments = remat_costs.segments(model, text)
    assert inputs == 6 - sum(end - first - 1 for first, end in segments)
    assert inputs - 1 == kept(text) - kept("every_6")


HOST = [("full", ("input",)), ("dots", ("gate", "up")), ("full", ("gate", "attention_norm")),
        ("sqrt", ("input",)), ("every_2+dots", ("gate",)), (":1=full,dots", ("input", "query")),
        ("query_key_value", ("key", "hidden")), ("key+gate", ("query_key_value",))]  # fmt: skip


@pytest.mark.parametrize(("text", "offloaded"), HOST)
def test_what_is_offloaded_is_not_counted_on_the_device(text, offloaded):
    model, _ = decoder()

    def kept(host: bool) -> int:
        """Numbers of each token that layers keep there."""
        shapes = decoder_residuals(text, offloaded=offloaded, host=host)
        of_rows = [s for s in shapes if s[1:3] == (B, T) and s[3:]]
        return sum(math.prod(shape[:1] + shape[3:]) for shape in of_rows)

    sizes = dict(text=text, loss_chunks=1, compute_bytes=4)
    _, *counted, _ = remat_costs.saved_bytes_by_layer(model, **sizes, offloaded=offloaded)
    assert 4 * kept(host=False) == sum(counted)
    # What layers of a segment save is fetched before the next segment.
    whole_run = not remat_costs.segments(model, text) or "input" in offloaded
    assert (kept(host=True) > 0) == whole_run


@pytest.mark.parametrize(
    ("text", "chunks", "policies"),
    [
        (":2=full,none", (2, 2), ["full"] * 4),
        (":1=full,dots", (3, 1), ["full", "dots", "dots", "full"]),
        ("1:2=none,names", (2, 4), ["names", "none", "names", "none", "names", "names"]),
    ],
)
def test_rules_hold_in_each_model_chunk(text, chunks, policies):
    model = dataclasses.replace(decoder()[0], num_layers=len(policies))
    wanted = [remat.POLICIES[name] for name in policies]
    assert remat_costs.policies(model, text, chunks) == wanted
    assert remat_costs.policies(model, text) != wanted


@pytest.mark.parametrize(
    ("text", "chunks", "segments"),
    [
        ("sqrt", (4, 4), []),  # too few layers in each
        ("sqrt", (8,), [(0, 2), (2, 4), (4, 6), (6, 8)]),
        ("every_3", (4, 4), [(0, 3), (3, 4), (4, 7), (7, 8)]),
        ("every_8", (4, 4), [(0, 4), (4, 8)]),
        # The slots of a shorter chunk are those of the longest.
        ("sqrt", (6, 2), [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (":4=every_4,full", (5, 3), [(0, 4), (5, 8)]),
        ("2:=every_2,full", (4, 2, 2), [(2, 4)]),
    ],
)
def test_segments_end_with_a_model_chunk(text, chunks, segments):
    model = dataclasses.replace(decoder()[0], num_layers=8)
    assert remat_costs.segments(model, text, chunks) == segments


def test_segments_are_of_periods_where_model_chunks_are_alike():
    pattern = ("local", "global", "global")
    model = dataclasses.replace(decoder(layer_pattern=pattern, window=3)[0], num_layers=12)
    assert remat_costs.segments(model, "every_2", (6, 6)) == [(0, 3), (3, 6), (6, 9), (9, 12)]
    # local in the place of global: each stage finds the kinds of its layers when it runs.
    uneven = remat_costs.segments(model, "every_2", (4, 4, 4))
    assert uneven == [(n, n + 2) for n in range(0, 12, 2)]


def test_chunks_are_all_layers():
    with pytest.raises(ValueError, match=r"chunks=\(2, 1\) are 3 layers and the model has 4"):
        remat_costs.policies(decoder()[0], "full", (2, 1))
