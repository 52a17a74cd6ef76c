"""Products of two factors, layers that are gone through several times, tensor-train tables: loss
and gradient are those of the dense model, by numpy, and the same on every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import compare, packed, runs

from llmx.config import ConfigError
from llmx.model import costs, ranks, remat_costs, tensor_train
from llmx.sharding import trees

MODEL = dict(num_layers=2, width=16, mlp_dim=24, num_heads=4, num_kv_heads=2, head_dim=4,
             vocab_size=261, vocab_multiple=2)  # fmt: skip
LATENT = dict(num_kv_heads=4, rope_dim=2, num_experts=4, experts_per_token=2, expert_dim=8,
              shared_dim=8, first_dense=1, router_groups=1, router_groups_kept=1)  # fmt: skip
FAMILIES = {"llama3": {}, "gpt2": dict(num_kv_heads=4), "deepseek_v3": LATENT}
RANKS = ("attention=4", "mlp=8", "attention/out=6")
KEYS = dict(batch__size=4, batch__sequence_length=12)
BATCHES = packed.batches(3, rows=4, length=12, vocab=261)


def recipe_of(family="llama3", *, model=None, **keys):
    model = MODEL | FAMILIES[family] | (model or {})
    return runs.make_recipe(runs.make_config(family, model=model, **KEYS | keys))


def gradient_of(recipe, params):
    """Loss and gradients of a batch, on the host."""
    with jax.set_mesh(recipe.mesh):
        params = jax.device_put(params, jax.tree.map(lambda a: a.sharding, recipe.loss.params))
        found = runs.make_gradient(recipe)(params, runs.put_batch(recipe, BATCHES[0]))
    loss, _, tree = jax.device_get(found)
    return float(loss), trees.named(tree)


def start_of(recipe):
    with jax.set_mesh(recipe.mesh):
        return jax.device_get(recipe.init(0).params)


@pytest.mark.parametrize("family", FAMILIES)
def test_factors_have_the_loss_and_gradient_of_their_product(family):
    texts = RANKS if family != "deepseek_v3" else ("attention=3", "mlp=4")
    routed = "num_experts" in FAMILIES[family]  # whose losses are not those of tokens
    no_loss_of_routers = dict(experts__balance_weight=0.0) if routed else {}
    factored = recipe_of(family, model=dict(ranks=texts), **no_loss_of_routers)
    params = trees.named(start_of(factored))
    dense, pairs = {}, {}
    for name, leaf in params.items():
        if name.endswith("/kernel/down"):
            kernel = name.removesuffix("/down")
            up = params[f"{kernel}/up"]
            product = [np.tensordot(a, b, axes=1) for a, b in zip(leaf, up, strict=True)]
            dense[kernel], pairs[kernel] = np.stack(product), (leaf, up)
        elif not name.endswith("/kernel/up"):
            dense[name] = leaf
    assert len(pairs) == 7 if family == "llama3" else len(pairs) > 5
    loss, got = gradient_of(factored, trees.nest(params))
    plain = recipe_of(family, **no_loss_of_routers)
    wanted_loss, wanted = gradient_of(plain, trees.nest(dense))
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-6)
    for kernel, (down, up) in pairs.items():
        layers, rank = len(up), up.shape[1]
        down_lIr, up_lrO = down.reshape(layers, -1, rank), up.reshape(layers, rank, -1)
        gradient = wanted.pop(kernel).reshape(layers, down_lIr.shape[1], up_lrO.shape[2])
        of_down, of_up = got.pop(f"{kernel}/down"), got.pop(f"{kernel}/up")
        wanted[f"{kernel}/down"] = (gradient @ up_lrO.transpose(0, 2, 1)).reshape(of_down.shape)
        wanted[f"{kernel}/up"] = (down_lIr.transpose(0, 2, 1) @ gradient).reshape(of_up.shape)
        got |= {f"{kernel}/down": of_down, f"{kernel}/up": of_up}
    compare.assert_close(got, wanted, 2e-5)


@pytest.mark.parametrize("family", ["llama3", "gpt2"])
def test_repeated_layers_are_those_of_a_deeper_model(family):
    """Each layer three times, one after the other: its gradient is the sum of theirs."""
    shared = recipe_of(family, model=dict(repeats=3))
    params = start_of(shared)
    deep = recipe_of(family, model=dict(num_layers=6))
    blocks = jax.tree.map(lambda leaf: np.repeat(leaf, 3, axis=0), params["blocks"])
    loss, got = gradient_of(shared, params)
    wanted_loss, wanted = gradient_of(deep, params | {"blocks": blocks})
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-6)
    wanted |= {
        name: leaf.reshape(2, 3, *leaf.shape[1:]).sum(1)
        for name, leaf in wanted.items()
        if name.startswith("blocks/")
    }
    compare.assert_close(got, wanted, 2e-5)


TRAINED = {
    "integers": dict(
        quantization__bits=4, quantization__group=4, quantization__scales="learned",
        quantization__activations="current",
    ),
    "adapters": dict(adapters__rank=2),
}  # fmt: skip


def found_of(recipe, params, frozen):
    """Loss and gradients of a batch, on the host, with parameters that are not trained."""
    to = jax.tree.map(lambda leaf: leaf.sharding, (recipe.loss.params, recipe.loss.frozen))

    def take(params, frozen, batch):
        joined = recipe.loss.joined(params, frozen, training=True)
        return recipe.gradient.take(joined, batch, (), ())[0]

    with jax.set_mesh(recipe.mesh):
        own = jax.device_put((params, frozen), to)
        found = jax.device_get(jax.jit(take)(*own, runs.put_batch(recipe, BATCHES[0])))
    return float(found.loss), trees.named(found.tree)


@pytest.mark.parametrize("case", TRAINED)
def test_what_repeated_layers_train_is_the_sum_of_a_deeper_model_s(case):
    """Weights as integers with their scales, and adapters: each layer has its own once."""
    shared = recipe_of(model=dict(repeats=2), **TRAINED[case])
    deep = recipe_of(model=dict(num_layers=4), **TRAINED[case])
    random = np.random.default_rng(1)

    def moved(leaf):  # adapters begin at zero
        return leaf + np.float32(0.1 * random.normal(size=leaf.shape))

    def twice(tree):
        blocks = jax.tree.map(lambda leaf: np.repeat(leaf, 2, axis=0), tree["blocks"])
        return tree | {"blocks": blocks}

    with jax.set_mesh(shared.mesh):
        start = jax.device_get(shared.init(0))
    own = jax.tree.map(moved, start.params), start.frozen
    loss, got = found_of(shared, *own)
    wanted_loss, wanted = found_of(deep, *(tree and twice(tree) for tree in own))
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-6)
    wanted |= {
        name: leaf.reshape(2, 2, *leaf.shape[1:]).sum(1)
        for name, leaf in wanted.items()
        if name.startswith("blocks/")
    }
    assert all(leaf.any() for leaf in wanted.values())
    compare.assert_close(got, wanted, 2e-5)


@pytest.mark.parametrize("case", TRAINED)
def test_repeated_layers_train_alike_on_a_mesh(case):
    # Inputs are not rounded here: of one between two codes the order of sums decides.
    keys = TRAINED[case] | {"quantization__activations": ""} | runs.PARITY_OPTIMIZER
    one, split = (
        recipe_of(model=dict(repeats=2), **mesh, **keys)
        for mesh in ({}, dict(mesh=dict(fsdp=2, tensor=2)))
    )
    compare.assert_trained_alike(*(runs.train(each, BATCHES[:2]) for each in (split, one)), 1e-5)


@pytest.mark.parametrize("cores", [2, 3])
def test_a_tensor_train_is_the_table_that_it_stands_for(cores):
    train = dict(embedding_rank=4, embedding_cores=cores)
    recipe = recipe_of(model=train)
    params = start_of(recipe)
    own = [np.float64(params["embedding"][f"core{n + 1}"]) for n in range(cores)]
    made = recipe_of()

    def table(own):
        whole = own[0]  # 1 v d r
        for core in own[1:]:
            whole = np.einsum("avdr,rwes->avwdes", whole, core)
            whole = whole.reshape(1, whole.shape[1] * whole.shape[2], -1, core.shape[3])
        return whole[0, :262, :, 0]

    loss, got = gradient_of(recipe, params)
    dense = params | {"embedding": np.float32(table(own))}
    wanted_loss, wanted = gradient_of(made, dense)
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-6)
    of_table = np.float64(wanted["embedding"])
    random = np.random.default_rng(0)
    for at in range(cores):  # the table is linear in each core
        for _ in range(3):
            step = random.normal(size=own[at].shape)
            moved = table([step if one == at else core for one, core in enumerate(own)])
            np.testing.assert_allclose(
                np.sum(got[f"embedding/core{at + 1}"] * step), np.sum(of_table * moved),
                rtol=1e-4, atol=1e-5,
            )  # fmt: skip


MESHES = {
    "fsdp-tensor": dict(mesh=dict(fsdp=2, tensor=2)),
    "remat-accumulation": dict(mesh=dict(data=2), batch__accumulation=2, remat="full"),
    "stages": dict(mesh=dict(stage=2, fsdp=2), batch__accumulation=2, pipeline__schedule="1f1b"),
    "int8": dict(mesh=dict(data=2), sync__strategy="int8", sync__warmup_steps=10),
    "sequence": dict(mesh=dict(sequence=2, tensor=2), remat="dots"),
    "turns": dict(mesh=dict(tensor=2), sharding__turns=2, remat="full"),
}
SMALL = {
    "all": dict(ranks=RANKS, repeats=2, embedding_rank=4),
}


@pytest.fixture(scope="module")
def wanted_of_small():
    return runs.train(recipe_of(model=SMALL["all"], **runs.PARITY_OPTIMIZER), BATCHES)


@pytest.mark.parametrize("mesh", MESHES)
def test_all_three_are_the_same_on_every_mesh(mesh, wanted_of_small):
    got = runs.train(
        recipe_of(model=SMALL["all"], **MESHES[mesh], **runs.PARITY_OPTIMIZER), BATCHES
    )
    compare.assert_trained_alike(got, wanted_of_small, 1e-5)


def test_factors_of_deferred_gradients():
    """Zero bubble leaves the weight gradient of each factor for later."""
    model = dict(ranks=RANKS, embedding_rank=4)
    wanted = runs.train(recipe_of(model=model, **runs.PARITY_OPTIMIZER), BATCHES)
    stages = dict(mesh=dict(stage=2), batch__accumulation=2, pipeline__schedule="zb_h1")
    got = runs.train(recipe_of(model=model, **stages, **runs.PARITY_OPTIMIZER), BATCHES)
    compare.assert_trained_alike(got, wanted, 1e-5)


def test_decoding_is_the_forward_pass():
    """A token at a time, with the cache of each pass, gives the logits of the whole row."""
    recipe = recipe_of(model=SMALL["all"])
    apply, execution = recipe.loss.apply, recipe.loss.execution

    @jax.jit
    def one(params, cache, rows, at):
        return apply.decode(params, cache, *rows, at, execution)

    with jax.set_mesh(recipe.mesh):
        params = recipe.init(0).params
        ids_BT = jnp.array([[3, 77, 12, 5, 200, 9]])
        rows = ids_BT, jnp.zeros((1, 6), jnp.int32), jnp.arange(6)[None]
        whole_BTV = jax.jit(lambda params, *rows: apply.logits(params, *rows, execution))(
            params, *rows
        )
        cache = apply.empty_cache(1, 8, execution)
        assert cache["blocks"][0].shape[0] == 4  # two layers, two passes
        for at in range(6):
            of_token = tuple(row[:, at : at + 1] for row in rows)
            got_BTV, cache = one(params, cache, of_token, at)
            np.testing.assert_allclose(got_BTV[0, 0], whole_BTV[0, at], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("model", [
    dict(ranks=RANKS), dict(repeats=3), dict(embedding_rank=4),
    dict(embedding_rank=4, embedding_cores=2, repeats=2, ranks=("mlp=4",)),
])  # fmt: skip
def test_counts_are_those_of_the_tree(model):
    recipe = recipe_of(model=model)
    own = recipe.loss.apply.model
    total = sum(leaf.size for leaf in jax.tree.leaves(recipe.loss.params))
    assert costs.num_stored_parameters(own) == total == sum(costs.parameters_by_layer(own))


def test_flops_are_those_of_the_factors():
    plain, low = (recipe_of(model=m).loss.apply.model for m in ({}, dict(ranks=("mlp/up=8",))))
    flops = lambda model: costs.forward_flops_by_layer(model, sequence_length=12)  # noqa: E731
    wanted = [was - 2 * (16 * 24 - 8 * (16 + 24)) * (0 < at < 3) for at, was in
              enumerate(flops(plain))]  # fmt: skip
    assert flops(low) == wanted
    thrice = recipe_of(model=dict(repeats=3)).loss.apply.model
    assert flops(thrice)[1:3] == [3 * was for was in flops(plain)[1:3]]


@pytest.mark.parametrize("text", ["full", "dots", "none"])
@pytest.mark.parametrize("model", [dict(ranks=RANKS), dict(repeats=3)])
def test_repeated_flops_by_factor(text, model):
    """What remat repeats of two factors: the first of each always, for the second's gradient."""
    own = recipe_of(model=model).loss.apply.model
    plain = recipe_of().loss.apply.model
    sizes = dict(sequence_length=12, text=text, loss_chunks=1)
    got = remat_costs.recomputed_flops_by_layer(own, **sizes)
    was = remat_costs.recomputed_flops_by_layer(plain, **sizes)
    if model.get("repeats"):
        assert got[1] == 3 * was[1]
    elif text == "none":
        assert got == was == [0.0] * 4
    else:
        known = ranks.of(own)
        inputs = {name: sizes[0] for name, sizes in ranks.sizes_of_products(own).items()}
        downs = sum(2 * inputs[name] * rank for name, rank in known.items())
        assert got[1] >= downs


@pytest.mark.parametrize(("keys", "said"), [
    (dict(model=dict(ranks=("mlp/upp=4",))), "names 'mlp/upp', which has no product"),
    (dict(model=dict(ranks=("mlp=0",))), "'mlp=0': write a product"),
    (dict(model=dict(ranks=("mlp",))), "'mlp': write a product"),
    (dict(model=dict(ranks=("attention=9",))), "above 8, which is the rank of attention/key"),
    (dict(model=dict(embedding_rank=4, tied_head=True)), "with model.tied_head=True"),
    (dict(model=dict(embedding_rank=400)), "model.embedding_rank=400 is above"),
    (dict(model=dict(embedding_rank=4, embedding_cores=5)), "embedding_cores=5"),
    (dict(model=dict(embedding_rank=4, embedding_cores=1)), "embedding_cores=1"),
    (dict(model=dict(repeats=0)), "model.repeats=0"),
    (dict(model=dict(repeats=2), mesh=dict(stage=2), batch__accumulation=2,
          pipeline__schedule="zb_h1"), "a layer has one of each pass"),
])  # fmt: skip
def test_what_cannot_be_is_said(keys, said):
    with pytest.raises(ConfigError, match=said):
        recipe_of(**keys)


def test_shapes_of_trains_hold_the_table():
    for vocab, width in ((261, 16), (50257, 768), (128256, 4096), (7, 13)):
        for number in (2, 3):
            rows = tensor_train.digits(vocab, number)
            assert vocab <= np.prod(rows) < 1.35 * vocab + 8
            assert np.prod(tensor_train.divisors(width, number)) == width
