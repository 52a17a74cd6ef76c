"""A run on stages and one without are the same run: checkpoints go from any to any other."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import runs

from llmx import config, convert
from llmx.checkpoint import checkpointer, model_params, reshard, resume
from llmx.data import tokenizers
from llmx.model import sampling
from llmx.pipeline import schedule, schedules
from llmx.sharding import trees
from llmx.step.optimizers import OptimizerConfig

ELSEWHERE = 1e-5  # relative: on another mesh sums are taken in another order
NUM_STEPS, SAVED_AT = 4, 2

# Layers, mesh, and what the config says beside. Seven layers are parts of unequal size.
MODEL = dict(width=16, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=32, vocab_multiple=8)
RUNS = {
    "one device": (7, {}, {}),
    "data2": (7, {"data": 2}, {}),
    "stage4": (7, {"stage": 4}, {}),
    "last is long": (7, {"stage": 4}, dict(pipeline__layers=(1, 1, 1, 4))),
    "stage2 x fsdp2": (7, {"stage": 2, "fsdp": 2}, {}),
    "interleaved": (7, {"stage": 2}, dict(pipeline__schedule="interleaved_1f1b")),
    "V": (7, {"stage": 2}, dict(pipeline__schedule="zb_v")),
    "8 layers": (8, {}, {}),
    "8 interleaved": (8, {"stage": 2}, dict(pipeline__schedule="interleaved_1f1b")),
    "8 on stage4": (8, {"stage": 4}, {}),
}


def config_of(name: str, model: dict | None = None, **keys) -> config.Config:
    num_layers, mesh, options = RUNS[name]
    keys = runs.PARITY_OPTIMIZER | dict(optimizer__ema_decay=0.5) | options | keys
    return runs.make_config(
        "llama3",
        model=MODEL | dict(num_layers=num_layers) | (model or {}),
        mesh=mesh,
        steps=NUM_STEPS,
        batch__size=8,
        batch__sequence_length=16,
        batch__accumulation=4,
        **keys,
    )


def recipe_of(name: str, model: dict | None = None, **keys):
    return runs.make_recipe(config_of(name, model, **keys))


@functools.cache
def new_state(name: str, seed: int):
    """Made once for all tests, which must not donate it: making one compiles a program."""
    return recipe_of(name).init(seed)


def opened(directory) -> checkpointer.Checkpointer:
    return checkpointer.Checkpointer(
        str(directory), checkpointer.CheckpointConfig(keep_last=100), log=print
    )


# ------------------------------------------------------------------------------------- the order


def drawn(recipe, num_layers: int) -> dict[str, np.ndarray]:
    """A number of its own for every place of a state, layers in the model's order."""
    random, found = np.random.default_rng(0), {}
    for name, leaf in trees.named(recipe.abstract).items():
        shape = leaf.shape
        if "blocks" in name and shape[:1] == (len(recipe.order.slots) or num_layers,):
            shape = (num_layers, *shape[1:])
        found[name] = random.integers(1, 2**31, shape).astype(leaf.dtype)
    return found


def as_staged(recipe, values: dict[str, np.ndarray], num_layers: int, empty: int):
    """The state of such values on the recipe's mesh, with `empty` in places without a layer."""

    def one(name, value):
        if recipe.order.is_identity or "blocks" not in name or value.shape[:1] != (num_layers,):
            return value
        rows = [np.full_like(value[0], empty) if i < 0 else value[i] for i in recipe.order.slots]
        return np.stack(rows)

    to = trees.named(recipe.abstract)
    arrays = {n: jax.device_put(one(n, value), to[n].sharding) for n, value in values.items()}
    return jax.tree.unflatten(jax.tree.structure(recipe.abstract), arrays.values())


def assert_equal(got, wanted):
    for (name, one), other in zip(trees.named(got).items(), jax.tree.leaves(wanted), strict=True):
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim), name
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other), err_msg=name)


PAIRS = [
    *[("stage4", name) for name, (layers, *_) in RUNS.items() if layers == 7],
    ("one device", "interleaved"), ("interleaved", "last is long"), ("V", "interleaved"),
    ("last is long", "data2"), ("8 interleaved", "8 layers"), ("8 layers", "8 interleaved"),
    ("8 interleaved", "8 on stage4"), ("8 on stage4", "8 layers"),
]  # fmt: skip


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_layers_are_moved_bit_for_bit(tmp_path, before, after):
    """What was in places without a layer is not read, and zero where there are such places."""
    source, target, num_layers = recipe_of(before), recipe_of(after), RUNS[before][0]
    values = drawn(source, num_layers)
    compiled = reshard._moved._cache_size()
    with opened(tmp_path) as checkpoints:
        state = as_staged(source, values, num_layers, empty=7)
        checkpoints.save(1, state, meta={}, order=source.order)
        with jax.transfer_guard("disallow"):
            restored = checkpoints.restore(target.abstract, order=target.order).state
        same = source.order == target.order
        assert_equal(restored, as_staged(target, values, num_layers, empty=7 if same else 0))
        if same:
            assert reshard._moved._cache_size() == compiled
        part = checkpointer.restore_part(
            tmp_path, target.abstract.params, prefix="ema", order=target.order, log=print
        )
        np.testing.assert_array_equal(
            part.state["blocks"]["mlp"]["up"]["kernel"],
            restored.ema["blocks"]["mlp"]["up"]["kernel"],
        )


@pytest.mark.parametrize("optimizer", ["adamw", "lion", "muon", "adafactor"])
def test_the_state_of_every_optimizer_is_moved(tmp_path, optimizer):
    """Factored moments too."""
    wide = dict(width=128, mlp_dim=128)
    no_eps = dict(optimizer__eps=OptimizerConfig().eps) if optimizer == "lion" else {}
    recipes = [
        recipe_of(name, wide, optimizer__name=optimizer, **no_eps)
        for name in ("interleaved", "one device", "stage4")
    ]
    drawn_values = drawn(recipes[0], 7)
    staged = [as_staged(recipe, drawn_values, 7, empty=0) for recipe in recipes]
    names = [n for n in trees.named(recipes[0].abstract.opt_state) if "blocks" in n]
    assert len(names) >= 8
    with opened(tmp_path) as checkpoints:
        checkpoints.save(1, staged[0], meta={}, order=recipes[0].order)
        for recipe, wanted in zip(recipes, staged, strict=True):
            assert_equal(checkpoints.restore(recipe.abstract, order=recipe.order).state, wanted)


def test_another_number_of_layers_is_an_error(tmp_path):
    """Seven layers on four stages have eight places; eight layers do not fit in them."""
    source = recipe_of("stage4")
    with opened(tmp_path) as checkpoints:
        checkpoints.save(1, new_state("stage4", 0), meta={}, order=source.order)
        for other in ("8 layers", "8 on stage4", "8 interleaved"):
            target = recipe_of(other)
            with pytest.raises(ValueError, match=r"saved float32\[7, .* wanted float32\[8, "):
                checkpoints.restore(target.abstract, order=target.order)


def test_a_flipped_byte_is_found_before_layers_are_moved(tmp_path):
    source, target = recipe_of("interleaved"), recipe_of("one device")
    with opened(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, new_state("interleaved", 1), meta={}, order=source.order)
    files = [path for path in (tmp_path / "2/state").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    raw = bytearray(largest.read_bytes())
    raw[len(raw) // 2] ^= 0x40
    largest.write_bytes(raw)
    with opened(tmp_path) as checkpoints:
        restored = checkpoints.restore(target.abstract)
    assert restored.step == 1
    assert_equal(restored.state, new_state("one device", 1))


def test_offloaded_moments_are_moved(tmp_path):
    source, target = recipe_of("stage4"), recipe_of("stage2 x fsdp2")

    def offloaded(tree):
        def one(leaf):
            to = leaf.sharding.with_memory_kind("pinned_host")
            if isinstance(leaf, jax.Array):
                return jax.device_put(leaf, to)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=to)

        return tree._replace(opt_state=jax.tree.map(one, tree.opt_state))

    values = drawn(source, 7)
    with opened(tmp_path) as checkpoints:
        state = offloaded(as_staged(source, values, 7, empty=0))
        checkpoints.save(1, state, meta={}, order=source.order)
        restored = checkpoints.restore(offloaded(target.abstract), order=target.order).state
    assert_equal(restored, offloaded(as_staged(target, values, 7, empty=0)))


def test_the_order_does_not_need_the_file_of_the_schedule(tmp_path):
    file = tmp_path / "my.csv"
    schedule.write_csv(schedules.interleaved_1f1b(2, 4), file)
    source = recipe_of("interleaved", pipeline__schedule="1f1b", pipeline__table=str(file))
    assert source.order == recipe_of("interleaved").order
    with opened(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(1, new_state("interleaved", 1), meta={}, order=source.order)
    file.unlink()
    target = recipe_of("one device")
    with opened(tmp_path / "checkpoints") as checkpoints:
        assert_equal(checkpoints.restore(target.abstract).state, new_state("one device", 1))


def test_rows_that_do_not_divide_are_split_elsewhere():
    mesh = jax.make_mesh((4, 2), ("stage", "fsdp"), axis_types=(AxisType.Explicit,) * 2)
    spread = lambda to, *shape: reshard.spread(NamedSharding(mesh, to), shape).spec  # noqa: E731
    assert spread(P("stage", "fsdp"), 8, 6) == P("stage", "fsdp")
    assert spread(P("stage", "fsdp"), 7, 16) == P(None, ("fsdp", "stage"))
    assert spread(P("stage", "fsdp"), 7, 6, 12) == P(None, "fsdp", "stage")
    assert spread(P("stage", "fsdp"), 7, 6) == P(None, "fsdp")
    assert spread(P(("stage", "fsdp")), 7, 6) == P(None, None)
    assert spread(P(None, "fsdp"), 7, 6) == P(None, "fsdp")


# --------------------------------------------------------------------------------------- the run


def batch_of(recipe, step: int) -> dict[str, jax.Array]:
    random, shape = np.random.default_rng(step), (8, 16)
    batch = {
        "tokens": random.integers(0, 257, shape),
        "targets": random.integers(0, 257, shape),
        "segment_ids": np.ones(shape),
        "positions": np.broadcast_to(np.arange(16), shape),
        "weights": random.random(shape) < 0.8,
    }
    types = runs.abstract_batch(recipe)
    return runs.put_batch(recipe, {n: a.astype(types[n].dtype) for n, a in batch.items()})


@functools.cache
def trainer(name: str):
    recipe = recipe_of(name)
    return recipe, runs.make_train_step(recipe)


def trained(name: str, state, first: int) -> tuple[np.ndarray, object]:
    """Losses of the steps from `first` on, and the state after them."""
    recipe, train_step = trainer(name)
    losses = []
    with jax.set_mesh(recipe.mesh):
        for step in range(first, NUM_STEPS):
            state, report = train_step(state, batch_of(recipe, step))
            losses.append(jax.device_get(report.loss))
    return np.array(losses), state


@functools.cache
def undisturbed(name: str):
    losses, state = trained(name, jax.tree.map(jnp.copy, new_state(name, 0)), 0)
    return losses, jax.device_get(state)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> pathlib.Path:
    """A checkpoint of four stages after two steps."""
    directory = tmp_path_factory.mktemp("staged")
    recipe, train_step = trainer("stage4")
    state = jax.tree.map(jnp.copy, new_state("stage4", 0))
    with jax.set_mesh(recipe.mesh), opened(directory) as checkpoints:
        for step in range(SAVED_AT):
            state, _ = train_step(state, batch_of(recipe, step))
        checkpoints.save(SAVED_AT, state, meta={}, order=recipe.order)
    return directory


def restored(directory, name: str):
    recipe = trainer(name)[0]
    with opened(directory) as checkpoints:
        return checkpoints.restore(recipe.abstract, order=recipe.order).state


@pytest.mark.parametrize(
    "name",
    ["one device", "interleaved", pytest.param("stage2 x fsdp2", marks=pytest.mark.slow)],
)
def test_a_run_goes_on_elsewhere(saved, name):
    losses, _ = trained(name, restored(saved, name), SAVED_AT)
    wanted, _ = undisturbed("one device")
    np.testing.assert_allclose(losses, wanted[SAVED_AT:], rtol=ELSEWHERE)


def test_a_run_goes_on_where_it_was(saved):
    losses, state = trained("stage4", restored(saved, "stage4"), SAVED_AT)
    wanted, wanted_state = undisturbed("stage4")
    np.testing.assert_array_equal(losses, wanted[SAVED_AT:])
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(wanted_state), strict=True):
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes()
    np.testing.assert_allclose(wanted, undisturbed("one device")[0], rtol=ELSEWHERE)


def test_a_staged_run_is_exported(saved, tmp_path):
    """The same files as of the same parameters without stages."""
    exported = []
    for name in ("stage4", "one device"):
        workdir = tmp_path / name
        config.save_run(config_of(name, workdir=str(workdir)))
        tokenizers.ByteTokenizer().save(workdir / "tokenizer.json")
        recipe = trainer(name)[0]
        with opened(workdir / "checkpoints") as checkpoints:
            checkpoints.save(2, restored(saved, name), meta={}, order=recipe.order)
        convert.to_hf(str(workdir), str(workdir / "exported"))
        files = sorted((workdir / "exported").iterdir())
        exported.append({path.name: path.read_bytes() for path in files})
    assert "model.safetensors" in exported[0] and exported[0] == exported[1]


@pytest.mark.parametrize(
    ("alone", "name"),
    [("one device", "interleaved"), ("8 layers", "8 on stage4")],
)
def test_a_staged_state_is_sampled_from(alone, name):
    """The sample at the end of a run: on the same devices, without stages."""
    texts = []
    for each in (alone, name):
        recipe = recipe_of(each)
        execution, params = model_params.without_stages(recipe, new_state(each, 0).ema)
        assert execution.place.mesh.shape["stage"] == 1
        texts += sampling.generate(
            recipe.loss.apply, params, execution, [[1, 2, 3]], max_tokens=5, temperature=0.0
        )
    assert texts[0] == texts[1]


def test_a_new_run_on_stages_starts_with_the_parameters_of_another(tmp_path):
    source, target = recipe_of("one device"), recipe_of("interleaved")
    with opened(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(1, new_state("one device", 1), meta={}, order=source.order)
    started = resume.start_with(
        config_of("interleaved"), target, target.init(2), str(tmp_path), print
    )
    wanted = new_state("interleaved", 1)
    assert_equal((started.params, started.ema), (wanted.params, wanted.ema))
