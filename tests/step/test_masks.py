"""Pruning while a run trains: masked weights are exactly zero in every layout and strategy."""

import functools
import math
import pathlib

import jax
import numpy as np
import pytest
from support import compare, runs

from llmx.config import ConfigError
from llmx.model import apply, families, quantization
from llmx.runtime.agreement import Peers
from llmx.sharding import trees
from llmx.step import guard
from llmx.step.transforms import masks
from llmx.sync.round_files import Outer, RoundFiles

HERE = str(pathlib.Path(__file__).parent)  # a folder that is there
BATCH, LENGTH, VOCAB, STEPS = 8, 8, 300, 6
MODEL = dict(
    vocab_size=VOCAB, vocab_multiple=64, width=16, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, mlp_dim=32,
)  # fmt: skip
WEIGHTS = 2 * (16 * 32 * 2 + 16 * 16 * 2 + 3 * 16 * 32)  # of the products of both layers
LAST = 4  # steps taken at the last pruning
SUMS = 1e-5  # relative: sums of gradients are taken in another order


def make_recipe(mesh=None, **keys):
    return _make_recipe(tuple((mesh or {}).items()), tuple(sorted(keys.items())))


@functools.cache
def _make_recipe(mesh, keys):
    options = dict(
        batch__size=BATCH, batch__sequence_length=LENGTH, steps=20, optimizer__warmup_steps=1,
        optimizer__learning_rate=0.01, pruning__method="magnitude", pruning__begin_step=1,
        pruning__end_step=LAST, pruning__every=2,
    )  # fmt: skip
    return runs.make_recipe(
        runs.make_config("llama3", model=MODEL, mesh=dict(mesh), **options | dict(keys))
    )


make_programs = functools.cache(runs.make_programs)


def batch_of(number: int) -> dict:
    generator, shape = np.random.default_rng(number), (BATCH, LENGTH)
    tokens = lambda: generator.integers(0, VOCAB, shape).astype(np.int32)  # noqa: E731
    return dict(
        tokens=tokens(), targets=tokens(), segment_ids=np.zeros(shape, np.int32),
        positions=np.broadcast_to(np.arange(LENGTH, dtype=np.int32), shape),
        weights=generator.uniform(0.5, 1.5, shape).astype(np.float32),
    )  # fmt: skip


def walk(recipe, steps=STEPS, state=None, first=0):
    """States on the host after each step, and the reports."""
    programs, states, reports = make_programs(recipe), [], []
    with jax.set_mesh(recipe.mesh):
        state = recipe.init(0) if state is None else state
        for number in range(first, first + steps):
            state, report = programs(number, state, runs.put_batch(recipe, batch_of(number)))
            states.append(jax.tree.map(np.array, state))
            reports.append(jax.device_get(report))
    return states, reports


def masks_of(state) -> dict[str, np.ndarray]:
    return trees.named(state.extra[masks.NAME].masks)


def masked_values(state, part: str) -> np.ndarray:
    """What a part of the state has of masked weights, all replicas' together."""
    found, of_part = [], trees.named(state._asdict()[part])
    for owner, mask in masks_of(state).items():
        for name, leaf in of_part.items():
            if name.endswith(owner) and leaf.shape[-mask.ndim :] == mask.shape:
                found.append(leaf[np.broadcast_to(~mask, leaf.shape)])
    return np.concatenate(found) if found else np.zeros(0)


DATA2 = {"data": 2}


def synced(strategy: str, **keys):
    return DATA2, dict(sync__strategy=strategy, sync__warmup_steps=1) | keys


EMA = dict(optimizer__ema_decay=0.9)
CASES = {
    "one device": ({}, EMA),
    "fsdp2 x tensor2": ({"fsdp": 2, "tensor": 2}, EMA),
    "zero1": ({"fsdp": 4}, dict(sharding__layout="zero1", **EMA)),
    "zero2": ({"fsdp": 4}, dict(sharding__layout="zero2", batch__accumulation=2)),
    "hsdp": ({"data": 2, "fsdp": 2}, dict(sharding__layout="hsdp")),
    "stage2": ({"stage": 2}, dict(batch__accumulation=4)),
    "pipedream_2bw": (
        {"stage": 2}, dict(batch__accumulation=4, pipeline__schedule="pipedream_2bw"),
    ),
    "offload": (
        {"fsdp": 2},
        dict(offload__optimizer=True, offload__parameters=True, remat="full",
             pruning__method="movement", pruning__rewind_to=2),
    ),
    "8-bit moments": ({"fsdp": 2}, dict(optimizer__moments="int8")),
    "muon": ({"fsdp": 2}, dict(optimizer__name="muon")),
    "fp16": ({}, dict(precision="fp16", **EMA)),
    "diloco": (
        {"data": 2, "fsdp": 2}, dict(sync__strategy="diloco", sync__warmup_steps=1, sync__every=2)
    ),
    "int8": synced("int8"),
    "top_k": synced("top_k", sync__fraction=0.25),
    "power_sgd": synced("power_sgd", **EMA),
    "one_bit": synced("one_bit", sync__warmup_steps=3, **EMA),
    "zero_one": synced("zero_one"),
    "stale": synced("stale"),
    "integers": (
        {"fsdp": 2, "tensor": 2},
        dict(quantization__bits=4, quantization__group=8, quantization__scales="learned",
             quantization__activations="average", **EMA),
    ),
    "repeats": ({"fsdp": 2}, dict(model__repeats=2)),
    "experts": (
        {"expert": 2},
        dict(model__num_experts=4, model__experts_per_token=2, model__expert_dim=16,
             experts__bias_rate=0.01),
    ),
}  # fmt: skip
# Of these the update of a masked weight is not zero, which is set to zero after it.
MIXED = ("muon", "int8", "power_sgd", "one_bit", "zero_one")


@pytest.mark.parametrize("name", CASES)
def test_masked_weights_are_zero(name):
    """In the parameters, their average, and those of each replica, after every step; and as many
    are masked as the schedule says."""
    mesh, keys = CASES[name]
    recipe = make_recipe(mesh, **keys)
    states, reports = walk(recipe)
    total = sum(mask.size for mask in masks_of(states[0]).values())
    assert name == "experts" or total == WEIGHTS
    for number, (state, report) in enumerate(zip(states, reports, strict=True)):
        pruned = {3: math.floor(total * 0.5 * (1 - (1 / 3) ** 3))}.get(number + 1, 0)
        pruned = pruned if number + 1 < LAST else total // 2
        assert sum((~mask).sum() for mask in masks_of(state).values()) == pruned
        assert np.isclose(state.extra[masks.NAME].sparsity, pruned / total)
        for part in ("params", "ema"):
            assert not masked_values(state, part).any(), (number, part)
        if hasattr(state.sync, "params"):
            own = state._replace(sync=state.sync.params)
            values = masked_values(own, "sync")
            assert values.size == 2 * pruned and not values.any(), number
        if name not in MIXED:
            assert not masked_values(state, "opt_state").any(), number
        assert np.isfinite(report.loss)
    assert reports[-1].scalars["sparsity"] == np.float32(0.5)
    assert any((a != b).any() for a, b in zip(
        jax.tree.leaves(states[-1].params), jax.tree.leaves(states[LAST - 1].params), strict=True
    ))  # fmt: skip


def pruned_at_once(recipe, params) -> dict[str, np.ndarray]:
    """Masks of the last pruning of these parameters, layers in the model's order."""
    with jax.set_mesh(recipe.mesh):
        state = recipe.init(0)._replace(params=runs.put_params(recipe, params))
        step = jax.device_put(np.int32(LAST), state.step.sharding)
        state = recipe.between[f"{masks.NAME}/{masks.PRUNE}"](state._replace(step=step))
    assert not masked_values(jax.tree.map(np.array, state), "params").any()
    found = jax.device_get(state.extra[masks.NAME].masks)
    return trees.named(found | {"blocks": jax.device_get(recipe.order.inverse(found["blocks"]))})


@functools.cache
def first_params():
    return jax.device_get(make_recipe().init(0).params)


@pytest.mark.parametrize(
    "mesh", [{"fsdp": 2, "tensor": 2}, {"stage": 2}, {"data": 2, "fsdp": 2}], ids=str
)
def test_every_mesh_prunes_the_same(mesh):
    keys = dict(batch__accumulation=4) if "stage" in mesh else {}
    wanted, found = (
        pruned_at_once(make_recipe(m, **k), first_params()) for m, k in (({}, {}), (mesh, keys))
    )
    compare.assert_same(found, wanted)
    assert sum((~mask).sum() for mask in found.values()) == WEIGHTS // 2


def test_gradients_of_masked_weights_do_not_count():
    """Neither in the norm that clipping looks at, nor in the guard's."""
    recipe = make_recipe()
    states, reports = walk(recipe, STEPS)
    state = states[-2]
    with jax.set_mesh(recipe.mesh):
        _, _, tree = runs.make_gradient(recipe)(
            runs.put_state(recipe, state).params, runs.put_batch(recipe, batch_of(STEPS - 1))
        )
    named = trees.named(jax.device_get(tree))
    named |= {name: named[name] * mask for name, mask in masks_of(state).items()}
    norm = math.sqrt(sum(np.square(leaf.astype("f8")).sum() for leaf in named.values()))
    assert np.isclose(reports[-1].grad_norm, norm, rtol=SUMS)


def test_movement_scores():
    """The sum of -w g over the steps so far, and the least are pruned."""
    recipe = make_recipe({"fsdp": 2}, pruning__method="movement")
    start = jax.tree.map(np.array, recipe.init(0))
    states, _ = walk(recipe, 3)
    gradient, scores = runs.make_gradient(recipe), {}
    for number, state in enumerate([start, *states[:2]]):
        with jax.set_mesh(recipe.mesh):
            params = runs.put_state(recipe, state).params
            tree = gradient(params, runs.put_batch(recipe, batch_of(number)))[2]
        grads, weights = trees.named(jax.device_get(tree)), trees.named(state.params)
        for name in masks_of(state):
            term = -(weights[name].astype("f8") * grads[name])
            scores[name] = scores.get(name, 0) + term
    found = trees.named(states[2].extra[masks.NAME].scores)
    compare.assert_close(found, {n: np.float32(s) for n, s in scores.items()}, SUMS)
    flat = np.concatenate([found[name].reshape(-1) for name in scores])
    kept = np.concatenate([masks_of(states[2])[name].reshape(-1) for name in scores])
    assert flat[~kept].max() <= flat[kept].min()


def test_a_layer_at_a_time():
    found = pruned_at_once(make_recipe({"fsdp": 2}, pruning__scope="layer"), first_params())
    assert all((~layer).mean() == 0.5 for mask in found.values() for layer in mask)


def test_two_of_four():
    recipe = make_recipe({"fsdp": 2, "tensor": 2}, pruning__method="n_m")
    named = trees.named(first_params())
    for name, mask in pruned_at_once(recipe, first_params()).items():
        dim = 2 if name.endswith("out/kernel") else 1
        kept, sizes = (np.moveaxis(a, dim, -1).reshape(-1, 4) for a in (mask, np.abs(named[name])))
        assert (kept.sum(-1) == 2).all(), name
        assert (np.where(kept, sizes, np.inf).min(-1) >= np.where(kept, 0, sizes).max(-1)).all()


def test_weights_that_are_left_go_back():
    """To those of an early step, with a new optimizer state; and train from there."""
    recipe = make_recipe({"fsdp": 2}, pruning__rewind_to=2, **EMA)
    states, _ = walk(recipe, STEPS)
    early, at_last = states[1], states[LAST - 1]
    named = trees.named(early.params)
    masked = masks_of(at_last)
    assert sum((~mask).sum() for mask in masked.values()) == WEIGHTS // 2
    named |= {name: named[name] * mask for name, mask in masked.items()}
    compare.assert_same(trees.named(at_last.params), named)
    compare.assert_same(trees.named(at_last.ema), named)
    moments = [leaf for leaf in jax.tree.leaves(at_last.opt_state) if leaf.ndim]
    assert moments and not any(leaf.any() for leaf in moments)
    assert not masked_values(states[-1], "params").any()
    assert any((a != b).any() for a, b in zip(
        jax.tree.leaves(states[-1].params), jax.tree.leaves(at_last.params), strict=True
    ))  # fmt: skip


def test_masked_weights_are_zero_as_integers():
    """In the codes of weights that are trained as integers, and in the model that is evaluated."""
    mesh, keys = CASES["integers"]
    recipe = make_recipe(mesh, **keys)
    state = walk(recipe)[0][-1]
    with jax.set_mesh(recipe.mesh):
        params = runs.put_state(recipe, state).params
        config, compute = recipe.loss.quantization, recipe.loss.execution.policy.compute
        codes = jax.jit(lambda params: quantization.quantized_weights(params, config, compute))
        codes = {name: np.array(each.codes) for name, each in codes(params).items()}
        evaluated = trees.named(jax.device_get(recipe.loss.rounded(params)))
    assert codes.keys() == masks_of(state).keys()
    for name, mask in masks_of(state).items():
        assert (~mask).any() and not codes[name][~mask].any()
        assert not evaluated[name][~mask].any() and not evaluated[name][codes[name] == 0].any()
        assert np.abs(codes[name][mask]).max() > 3 and (codes[name][mask] != 0).mean() > 0.6


def test_a_stopped_run_prunes_nothing():
    """The step that stopped it is taken again, and then its weights are pruned."""
    recipe = make_recipe(guard__on_bad_step="stop")
    programs = make_programs(recipe)
    with jax.set_mesh(recipe.mesh):
        state = recipe.init(0)
        state, _ = programs(0, state, runs.put_batch(recipe, batch_of(0)))
        state, _ = programs(1, state, runs.put_batch(recipe, batch_of(1)))
        bad = batch_of(2)
        bad["weights"] = bad["weights"] * np.nan
        state, _ = programs(2, state, runs.put_batch(recipe, bad))
        assert state.guard.stopped and state.step == 2
        assert all(np.asarray(mask).all() for mask in masks_of(state).values())
        # As a run does that is started again.
        state = state._replace(guard=jax.jit(guard.released)(state.guard))
        state, _ = programs(2, state, runs.put_batch(recipe, batch_of(2)))
        assert not state.guard.stopped and state.step == 3
        pruned = sum(int((~np.asarray(mask)).sum()) for mask in masks_of(state).values())
    assert pruned == math.floor(WEIGHTS * 0.5 * (1 - (1 / 3) ** 3))
    assert not masked_values(jax.tree.map(np.array, state), "params").any()


def test_a_group_that_takes_over_parameters_keeps_its_masks(tmp_path):
    """Those that other groups share have values where this one's masks are False."""
    keys = dict(
        sync__strategy="diloco", sync__groups=2, sync__exchange=str(tmp_path), sync__every=2,
        sync__round_seconds=60.0, pruning__method="fixed", pruning__masks_from="runs/other",
        pruning__begin_step=0, pruning__end_step=0, pruning__every=10,
    )  # fmt: skip
    recipe, random = make_recipe(**keys), np.random.default_rng(0)
    with jax.set_mesh(recipe.mesh):
        state = recipe.init(0)
        drawn = lambda leaf: random.normal(size=leaf.shape).astype(np.float32)  # noqa: E731
        params = {name: drawn(leaf) for name, leaf in trees.named(state.params).items()}
        momentum = {name: drawn(leaf) for name, leaf in state.sync.outer.items()}
        files = RoundFiles(str(tmp_path), 1, {name: leaf.shape for name, leaf in params.items()})
        files.write_outer(Outer(2, params, momentum))
        own = state.extra[masks.NAME]
        stays = jax.tree.map(lambda mask: jax.device_put(drawn(mask) < 0, mask.sharding), own.masks)
        state = state._replace(extra={masks.NAME: own._replace(masks=stays)})
        found = jax.device_get(recipe.strategy.begin(state, Peers()))
    kept = masks_of(found)
    assert found.step == 2 and kept
    for part in (found.params, found.sync.params):
        for name, leaf in trees.named(part).items():
            wanted = params[name] * kept.get(name, np.bool_(True))
            np.testing.assert_array_equal(leaf.reshape(wanted.shape), wanted)


def test_the_schedule():
    section = masks.PruningConfig(method="magnitude", begin_step=10, end_step=50, every=15)
    assert masks.times(section, 100) == (10, 25, 40, 50)
    cubic = [masks.share(section, 100, step) for step in (10, 25, 40, 50, 60)]
    assert np.allclose(cubic, [0, 1 - 0.625**3, 1 - 0.25**3, 1, 1])
    at_once = masks.PruningConfig(method="n_m", begin_step=7, end_step=7)
    assert masks.times(at_once, 100) == (7,) and masks.share(at_once, 100, 7) == 1
    assert masks.times(masks.PruningConfig(method="magnitude"), 100)[-1] == 50
    assert masks.times(masks.PruningConfig(method="fixed"), 100) == ()


@pytest.mark.parametrize("keys", [
    dict(begin_step=10, end_step=50, every=15), dict(begin_step=7, end_step=7), dict(every=1),
    dict(end_step=90, every=200), dict(begin_step=60), dict(method="n_m", every=7),
    dict(method="fixed"),
], ids=str)  # fmt: skip
def test_a_step_is_a_time_of_pruning_by_arithmetic(keys):
    """No table is made for a step: a run has as many as there are steps."""
    section = masks.PruningConfig(**dict(method="magnitude") | keys)
    found = tuple(step for step in range(101) if masks.is_time(section, 100, step))
    assert found == masks.times(section, 100)


def test_without_pruning_nothing_is_kept():
    recipe = make_recipe(pruning__method="none", pruning__begin_step=0, pruning__end_step=0,
                         pruning__every=10)  # fmt: skip
    assert recipe.constraints == {} and recipe.abstract.extra == () and recipe.between == {}


PROBLEMS = {
    "begin": (dict(pruning__begin_step=9), "pruning.begin_step=9 is after pruning.end_step=4"),
    "end": (dict(pruning__end_step=40), "pruning.end_step=40 is after the last step, steps=20"),
    "products": (dict(pruning__products=("mpl",)), "names 'mpl', which the model does not have"),
    "none of them": (dict(pruning__products=()), "leaves nothing to prune"),
    "pattern": (
        dict(pruning__method="n_m", pruning__pattern="4:2"), "pruning.pattern='4:2' must be 'N:M'"
    ),
    "groups": (
        dict(pruning__method="n_m", pruning__pattern="8:32"), "numbers, which do not divide"
    ),
    "no effect": (dict(pruning__pattern="1:4"), "has no effect with pruning.method='magnitude'"),
    "rewind": (dict(pruning__rewind_to=5), "must be a step from 1 to below the last pruning, at 4"),
    "adapters": (dict(adapters__rank=2), "beside adapters weights are frozen"),
    "fixed": (
        dict(pruning__method="fixed", pruning__begin_step=0, pruning__end_step=0,
             pruning__every=10), "no weight would be pruned",
    ),
    "groups of replicas": (
        dict(sync__strategy="diloco", sync__groups=2, sync__exchange=HERE,
             sync__round_seconds=60.0),
        "one that was gone would miss times of pruning",
    ),
    "movement": (
        dict(pruning__method="movement", mesh__data=2, sync__strategy="one_bit",
             sync__warmup_steps=1),
        "no replica has the gradient of the whole batch",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROBLEMS)
def test_what_cannot_be(name):
    keys, words = dict(PROBLEMS[name][0]), PROBLEMS[name][1]
    mesh = {"data": keys.pop("mesh__data")} if "mesh__data" in keys else {}
    with pytest.raises(ConfigError) as error:
        make_recipe(mesh, **keys)
    assert all(words in problem for problem in error.value.problems)


def test_which_weights_are_pruned():
    """Of products and of experts; neither routers, norms, biases nor tables."""
    of = lambda family: sorted({  # noqa: E731
        masks.product_of(name)
        for name in masks.prunable(apply.abstract_parameters(families.preset(family))[1])
    })  # fmt: skip
    attention = [f"attention/{name}" for name in ("key", "out", "query", "value")]
    assert of("llama3") == [*attention, "mlp/down", "mlp/gate", "mlp/up"]
    assert of("gpt2") == [*attention, "mlp/down", "mlp/up"]
    assert of("gpt_oss") == of("mixtral") == of("llama3")
    assert of("deepseek_v3") == [
        *(f"attention/{name}" for name in ("down", "out", "query", "query_down", "up")),
        "mlp/down", "mlp/gate", "mlp/shared/down", "mlp/shared/gate", "mlp/shared/up", "mlp/up",
    ]  # fmt: skip
