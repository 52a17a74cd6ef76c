"""Weights trained as integers: values and gradients are those of torch and of plain NumPy."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import compare, packed, runs

from llmx.config import ConfigError
from llmx.model import adapters, dot, quantization, quantized, ranks
from llmx.model.quantization import QuantizationConfig
from llmx.model.quantized import Ranges
from llmx.sharding import trees

try:
    import torch
except ModuleNotFoundError:
    torch = None  # of the extra `hf`
needs_torch = pytest.mark.skipif(torch is None, reason="torch is of the extra `hf`")

# In units of a scale: many times the rounding of its fp32 division.
MIDDLE = 1e-5
MODEL = dict(num_layers=2, width=16, mlp_dim=32, num_heads=4, num_kv_heads=2, head_dim=8,
             vocab_size=261, vocab_multiple=2)  # fmt: skip
KEYS = dict(batch__size=4, batch__sequence_length=12)
CASES = {
    "channel": dict(quantization__bits=4),
    "group": dict(quantization__bits=3, quantization__group=16),
    "group of two heads": dict(quantization__bits=8, quantization__group=16),
    "learned": dict(quantization__bits=4, quantization__scales="learned"),
    "learned group": dict(
        quantization__bits=4, quantization__group=4, quantization__scales="learned"
    ),
    "bf16": dict(quantization__bits=4, quantization__group=8, precision="bf16"),
}
MESHES = {
    "fsdp2 x tensor2": dict(mesh=dict(fsdp=2, tensor=2)),
    "accumulation": dict(mesh=dict(data=2), batch__accumulation=2, sharding__layout="zero2"),
    "stages": dict(mesh=dict(stage=2, fsdp=2), batch__accumulation=2, pipeline__schedule="zb_h1"),
    "remat": dict(mesh=dict(fsdp=4), remat="full", sharding__gather="step"),
    "replicas": dict(mesh=dict(data=2), sync__strategy="int8", sync__warmup_steps=10),
}


def recipe_of(family="llama3", model=None, **keys):
    return runs.make_recipe(runs.make_config(family, model=MODEL | (model or {}), **KEYS | keys))


def batches(num):
    return packed.batches(num, rows=4, length=12, vocab=261)


def rows_of(name, weight, group):
    """A stacked weight as [l, groups, numbers of a group, outputs], and the way back."""
    num = adapters.contracted(name)
    inputs = int(np.prod(weight.shape[1 : 1 + num]))
    group = group or inputs
    return weight.reshape(len(weight), inputs // group, group, -1)


def in_torch(name, weight, config: QuantizationConfig, log_step=None):
    """The rounded weight in fp32, differentiable by the weight and the logarithm of scales; and how
    far numbers are from the middle between two codes, in units of their scale."""
    most = 2 ** (config.bits - 1) - 1
    rows = rows_of(name, weight, config.group)
    if log_step is None:
        scale = rows.detach().abs().amax(dim=2, keepdim=True) / most
        by_channel = rows.movedim(2, 0)
        value = torch.fake_quantize_per_channel_affine(
            by_channel.reshape(len(by_channel), -1), scale.reshape(-1),
            torch.zeros(scale.numel(), dtype=torch.int32), 1, -most - 1, most,
        ).reshape(by_channel.shape).movedim(0, 2)  # fmt: skip
    else:
        scale = log_step.reshape(*rows.shape[:2], 1, -1).exp()
        # Value of `scale`, gradient times the factor of LSQ.
        factor = (rows.shape[2] * most) ** -0.5
        scale = scale * factor + (scale * (1 - factor)).detach()
        steps = torch.clamp(rows / scale, -most - 1, most)
        value = (steps + (torch.round(steps) - steps).detach()) * scale
    exact = rows.detach().double() / scale.detach().double()
    from_middle = (exact - torch.floor(exact) - 0.5).abs()
    return value.reshape(weight.shape), from_middle.reshape(weight.shape).numpy()


def state_of(recipe):
    """Parameters of which those that are learned clip some numbers."""
    state = recipe.init(0)
    random = np.random.default_rng(3)

    def one(path, leaf):
        if trees.path_name(path).endswith(quantization.LOG_STEP):
            leaf = leaf - 0.4 + random.normal(size=leaf.shape, scale=0.2).astype(np.float32)
        return leaf

    params = jax.tree_util.tree_map_with_path(one, jax.device_get(state.params))
    to = jax.tree.map(lambda leaf: leaf.sharding, state.params)
    return state._replace(params=jax.device_put(params, to))


@needs_torch
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_torch(case):
    recipe = recipe_of(**CASES[case])
    config, state = recipe.loss.quantization, state_of(recipe)
    plain = recipe_of(**({"precision": "bf16"} if case == "bf16" else {}))
    with jax.set_mesh(recipe.mesh):
        batch = runs.put_batch(recipe, batches(1)[0])
        weights = recipe.loss.rounded(state.params)
        found, _ = jax.jit(recipe.gradient.take)(state.params, batch, (), ())
        # By the rounded weights themselves: a model that is not quantized.
        above, _ = jax.jit(plain.gradient.take)(weights, batch, (), ())
    named, got = trees.named(jax.device_get(state.params)), trees.named(jax.device_get(weights))
    above = trees.named(jax.device_get(above.tree))
    wanted = dict(above)
    for name in filter(quantization.is_quantized, named):
        weight = named[name]
        if case == "bf16":
            weight = np.asarray(jnp.asarray(weight, jnp.bfloat16), np.float32)
        weight, log_step = torch.tensor(weight, requires_grad=True), None
        step = name.replace("kernel", "log_step")
        if step in named:
            log_step = torch.tensor(named[step], requires_grad=True)
        value, from_middle = in_torch(name, weight, config, log_step)
        value.backward(torch.tensor(above[name].astype(np.float32)))
        own = value.detach().numpy()
        if case == "bf16":
            own = np.asarray(jnp.asarray(own, jnp.bfloat16), np.float32)
        # Of a number in the middle the last bit of a division decides.
        clear = from_middle > MIDDLE
        assert clear.mean() > 0.99
        np.testing.assert_allclose(got[name][clear], own[clear], rtol=1e-6, atol=1e-8)
        wanted[name] = weight.grad.numpy()
        if step in named:
            wanted[step] = log_step.grad.numpy()
            clipped = (wanted[name] == 0) & (above[name] != 0)
            assert 0.001 < clipped.mean() < 0.5
            assert np.abs(wanted[step]).max() > 0
    compare.assert_close(found.tree, trees.nest(wanted), 1e-5)
    norm = np.sqrt(sum(np.sum(np.square(np.float32(leaf))) for leaf in wanted.values()))
    np.testing.assert_allclose(found.norms, norm, rtol=1e-4)


@functools.cache
def on_one_device(case, of_inputs=False, nudge=0):
    """With a `nudge`, parameters begin a last bit up or down, each by itself."""
    keys = runs.PARITY_OPTIMIZER | CASES[case] | (INPUTS if of_inputs else {})
    recipe, random = recipe_of(**keys), np.random.default_rng(nudge)
    with jax.set_mesh(recipe.mesh):
        state = recipe.init(0)
    if nudge:
        bit = lambda leaf: np.float32(1) + random.choice([-1, 1], leaf.shape) * np.float32(2**-23)  # noqa: E731
        params = jax.tree.map(
            lambda leaf: jax.device_put(np.asarray(leaf) * bit(leaf), leaf.sharding), state.params
        )
        state = state._replace(params=params)
    return runs.train(recipe, batches(3), state)


@pytest.mark.parametrize(
    "case, mesh", [("group", "fsdp2 x tensor2"), *(("learned group", mesh) for mesh in MESHES)]
)
def test_every_mesh_trains_as_one_device(case, mesh):
    """Also where it splits a group: 16 inputs of "group" are on two devices of `fsdp`."""
    got = runs.train(recipe_of(**MESHES[mesh], **runs.PARITY_OPTIMIZER, **CASES[case]), batches(3))
    compare.assert_trained_alike(got, on_one_device(case), 1e-5)


def test_codes_are_the_model_bit_for_bit():
    """What is stored, a code and a scale for each group, gives the losses of training's model."""
    recipe, plain = recipe_of(**CASES["learned group"]), recipe_of()
    state = state_of(recipe)
    with jax.set_mesh(recipe.mesh):
        batch = runs.put_batch(recipe, batches(1)[0])
        codes = quantization.quantized_weights(
            state.params, recipe.loss.quantization, jnp.dtype("float32")
        )
        stored = dict(trees.named(jax.device_get(quantization.without_steps(state.params))))
        for name, one in codes.items():
            assert one.codes.dtype == jnp.int8
            assert -8 <= one.codes.min() < one.codes.max() <= 7
            wide = np.repeat(one.scale, stored[name].shape[1] // one.scale.shape[1], axis=1)
            for axis in range(2, wide.ndim):
                wide = np.repeat(wide, stored[name].shape[axis] // wide.shape[axis], axis=axis)
            stored[name] = np.asarray(one.codes, np.float32) * wide
        to = jax.tree.map(lambda leaf: leaf.sharding, recipe.loss.model_params)
        params = jax.device_put(trees.nest(stored), to)
        compare.assert_same(recipe.loss.evaluated(state.params, ()), params)
        by_codes, _ = runs.make_evaluation(plain)(params, batch)
        found, _ = jax.jit(recipe.gradient.take)(state.params, batch, (), ())
        _, tokens = runs.make_evaluation(plain)(params, batch)
    np.testing.assert_allclose(found.loss, by_codes / tokens, rtol=1e-6)


def test_qwix_gives_the_same_codes():
    """With its scales, the largest magnitude over 7.5: 7 stands for more than it does."""
    qwix = pytest.importorskip("qwix")
    recipe = recipe_of()
    weight = np.random.default_rng(0).normal(size=(2, 16, 12)).astype(np.float32)
    config = QuantizationConfig(bits=4, group=8, scales="learned")
    theirs = [qwix.quantize(jnp.asarray(one), "int4", channelwise_axes=[1], tiled_axes={0: 8})
              for one in weight]  # fmt: skip
    with jax.set_mesh(recipe.mesh):
        ours = quantization.rounded(
            "blocks/mlp/up/kernel", jnp.asarray(weight), config, jnp.dtype("float32"),
            jnp.log(jnp.stack([one.scale for one in theirs])),
        )  # fmt: skip
    wanted = np.stack([np.asarray(one.qvalue, np.int8) for one in theirs])
    assert set(np.unique(wanted)) == set(range(-8, 8))
    # A logarithm and its exponential may move what is in the middle between two codes.
    assert (np.asarray(ours.codes) == wanted).mean() > 0.99
    assert np.abs(np.asarray(ours.codes, np.int32) - wanted).max() <= 1


INPUTS = dict(
    quantization__activations="average", quantization__decay=0.75, quantization__freeze_after=2
)


def test_ranges_are_moving_averages_that_freeze():
    recipe = recipe_of(**INPUTS)
    ranges = quantized.RANGES
    with jax.set_mesh(recipe.mesh):
        state, step = recipe.init(0), runs.make_train_step(recipe)
        found, kept = [], []
        for rows in batches(4):
            batch = runs.put_batch(recipe, rows)
            one, _ = jax.jit(recipe.gradient.take)(state.params, batch, (), state.extra)
            found.append(np.asarray(one.amax))
            state, _ = step(state, batch)
            kept.append(np.asarray(state.extra[ranges].amax))
    np.testing.assert_array_equal(kept[0], found[0])
    np.testing.assert_allclose(kept[1], 0.75 * found[0] + 0.25 * found[1], rtol=1e-6)
    np.testing.assert_array_equal(kept[3], kept[1])
    assert np.abs(found[3] - found[1]).max() > 0
    assert (found[0][..., 0] > 0).all()


@needs_torch
def test_inputs_are_rounded_and_clipped_as_torch_does():
    """A product with a range below the largest of its inputs: value and both gradients."""
    random, place = np.random.default_rng(0), recipe_of(**INPUTS).loss.execution
    x, weight = random.normal(size=(2, 5, 16)), random.normal(size=(16, 12))
    above, amax = random.normal(size=(2, 5, 12)), 1.5
    x, weight, above = (np.float32(array) for array in (x, weight, above))
    assert (np.abs(x) > amax).any()

    def ours(x, weight):
        ranges = Ranges(jnp.float32(amax), jnp.float32(0), jnp.float32(0))
        return dot.dot(
            "BTD,DF->BTF", x, quantized.WithRanges(weight, ranges), out=jax.P(None, None, None),
            policy=place.policy,
        )  # fmt: skip

    with jax.set_mesh(place.place.mesh):
        value, pull = jax.vjp(ours, jnp.asarray(x), jnp.asarray(weight))
        got = value, *pull(jnp.asarray(above))
    x, weight = (torch.tensor(array, requires_grad=True) for array in (x, weight))
    # Clipped first: where torch's mask is of the rounded number, here it is of the number.
    rounded = torch.fake_quantize_per_tensor_affine(
        torch.clamp(x, -amax, amax), float(np.float32(amax) / np.float32(127)), 0, -127, 127
    )
    wanted = rounded @ weight
    wanted.backward(torch.tensor(above))
    for ours, theirs in zip(got, (wanted.detach(), x.grad, weight.grad), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


INPUTS_MESHES = {
    # Without microbatches: in the first step there is no average, and each rounds by its own range.
    "fsdp2 x tensor2": dict(mesh=dict(fsdp=2, tensor=2)),
    "replicas": dict(mesh=dict(data=2), sync__strategy="int8", sync__warmup_steps=10),
}


@pytest.mark.parametrize("mesh", INPUTS_MESHES)
def test_inputs_of_every_mesh_are_those_of_one_device(mesh):
    keys = runs.PARITY_OPTIMIZER | CASES["learned"] | INPUTS
    got = runs.train(recipe_of(**INPUTS_MESHES[mesh], **keys), batches(3))
    for nudge in range(8):
        # A code is 1/127 of the largest input. Where one is next to the middle between two codes,
        # the last bits of a sum decide, on one device too: got is one of what it may be there.
        with contextlib.suppress(AssertionError):
            return compare.assert_trained_alike(got, on_one_device("learned", True, nudge), 1e-5)
    compare.assert_trained_alike(got, on_one_device("learned", True), 1e-5)


@pytest.mark.parametrize(("keys", "said"), [
    (dict(quantization__bits=9), "quantization.bits=9"),
    (dict(quantization__bits=4, quantization__group=12), "12 does not divide the inputs of"),
    (dict(quantization__group=4), "no effect with quantization.bits=0"),
    (dict(quantization__bits=4, quantization__freeze_after=5), "quantization.activations=''"),
    (dict(quantization__bits=4, products__format="int8"), "round the same numbers again"),
    (dict(quantization__bits=4, adapters__rank=2), "beside adapters are frozen"),
    (dict(quantization__bits=4, mesh=dict(stage=2), batch__accumulation=4,
          pipeline__schedule="pipedream_2bw"), "rounded a step before"),
    (dict(quantization__activations="average", mesh=dict(stage=2), batch__accumulation=2),
     "hand out no ranges"),
    (dict(quantization__bits=4, offload__parameters=True), "leave offload.parameters out"),
])  # fmt: skip
def test_what_cannot_be_is_said(keys, said):
    with pytest.raises(ConfigError, match=said):
        recipe_of(**keys)


def test_factors_are_not_quantized():
    """Where all products are two factors that is an error, else the run says which are."""
    with pytest.raises(ConfigError, match="bits=4 would round nothing"):
        recipe_of(quantization__bits=4, model=dict(ranks=("attention=4", "mlp=4")))
    recipe = recipe_of(quantization__bits=4, model=dict(ranks=("mlp=4",)))
    with jax.set_mesh(recipe.mesh):
        params = recipe.init(0).params
        codes = jax.jit(
            lambda params: quantization.quantized_weights(
                params, recipe.loss.quantization, "float32"
            )
        )(params)
    assert {name.split("/")[1] for name in codes} == {"attention"} and len(codes) == 4
    said = quantization.text(recipe.loss.quantization, ranks.of(recipe.loss.apply.model))
    assert said == (
        "weights of layers (not the factors of mlp/down, mlp/gate, mlp/up) in 4 bits, a scale for "
        "each output"
    )


def test_experts_are_refused():
    with pytest.raises(ConfigError, match="kernels of their own"):
        runs.make_config("mixtral", quantization__bits=4)
