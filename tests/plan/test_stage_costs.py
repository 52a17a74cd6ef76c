"""A run on stages and one without are the same run: checkpoints go from any to any other."""

import functools
import pathlib

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from llmx import config, convert, generate
from llmx.checkpoint import checkpointer, reshard, resume
from llmx.config import checks, recipe
from llmx.data import tokenizers
from llmx.model import families, sampling
from llmx.pipeline import schedule, schedules
from llmx.sharding import trees

ELSEWHERE = 1e-5  # relative: on another mesh sums are taken in another order
NUM_STEPS, SAVED_AT = 4, 2

# Devices, layers, and what the config says. Seven layers are parts of unequal size.
RUNS = {
    "one device": (1, 7, dict()),
    "data2": (2, 7, dict()),
    "stage4": (4, 7, dict(mesh__stage=4)),
    "last is long": (4, 7, dict(mesh__stage=4, pipeline__layers=(1, 1, 1, 4))),
    "stage2 x fsdp2": (4, 7, dict(mesh__stage=2, mesh__fsdp=2)),
    "interleaved": (2, 7, dict(mesh__stage=2, pipeline__schedule="interleaved_1f1b")),
    "V": (2, 7, dict(mesh__stage=2, pipeline__schedule="zb_v")),
    "8 layers": (1, 8, dict()),
    "8 interleaved": (2, 8, dict(mesh__stage=2, pipeline__schedule="interleaved_1f1b")),
    "8 on stage4": (4, 8, dict(mesh__stage=4)),
}


def run_of(name: str, **values) -> tuple[config.Config, list[jax.Device]]:
    num_devices, num_layers, changes = RUNS[name]
    run = config.default()
    run.model = families.preset(
        "llama3", num_layers=num_layers, width=16, num_heads=2, num_kv_heads=2, head_dim=8,
        mlp_dim=32, vocab_multiple=8,
    )  # fmt: skip
    run.steps, run.precision = NUM_STEPS, "fp32"
    run.batch.size, run.batch.sequence_length, run.batch.accumulation = 8, 16, 4
    run.optimizer.warmup_steps, run.optimizer.learning_rate = 1, 1e-3
    run.optimizer.eps, run.optimizer.ema_decay = 1e-3, 0.5
    run.sharding.layout = "zero3"
    for key, value in (changes | values).items():
        config.set_value(run, key.replace("__", "."), value)
    return checks.resolve(run, num_devices), jax.devices()[:num_devices]


def setup_of(name: str, **values):
    run, devices = run_of(name, **values)
    return recipe.make_setup(run, devices=devices)


def opened(directory) -> checkpointer.Checkpointer:
    return checkpointer.Checkpointer(
        str(directory), checkpointer.CheckpointConfig(keep_last=100), log=print
    )


# ------------------------------------------------------------------------------------- the order


def drawn(setup, num_layers: int) -> dict[str, np.ndarray]:
    """A number of its own for every place of a state, layers in the model's order."""
    random, found = np.random.default_rng(0), {}
    for name, leaf in trees.named(setup.abstract).items():
        shape = leaf.shape
        if "blocks" in name and shape[:1] == (len(setup.order.slots) or num_layers,):
            shape = (num_layers, *shape[1:])
        found[name] = random.integers(1, 2**31, shape).astype(leaf.dtype)
    return found


def as_staged(setup, values: dict[str, np.ndarray], num_layers: int, empty: int):
    """The state of such values on the setup's mesh, with `empty` in places without a layer."""

    def one(name, value):
        if setup.order.is_identity or "blocks" not in name or value.shape[:1] != (num_layers,):
            return value
        rows = [np.full_like(value[0], empty) if i < 0 else value[i] for i in setup.order.slots]
        return np.stack(rows)

    to = trees.named(setup.abstract)
    arrays = {n: jax.device_put(one(n, value), to[n].sharding) for n, value in values.items()}
    return jax.tree.unflatten(jax.tree.structure(setup.abstract), arrays.values())


def assert_equal(got, wanted):
    for (name, one), other in zip(trees.named(got).items(), jax.tree.leaves(wanted), strict=True):
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim), name
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other), err_msg=name)


PAIRS = [
    *[("stage4", name) for name, (_, layers, _) in RUNS.items() if layers == 7],
    ("one device", "interleaved"), ("interleaved", "last is long"), ("V", "interleaved"),
    ("last is long", "data2"), ("8 interleaved", "8 layers"), ("8 layers", "8 interleaved"),
    ("8 interleaved", "8 on stage4"), ("8 on stage4", "8 layers"),
]  # fmt: skip


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_layers_are_moved_bit_for_bit(tmp_path, before, after):
    """What was in places without a layer is not read, and zero where there are such places."""
    source, target, num_layers = setup_of(before), setup_of(after), RUNS[before][1]
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
    """Factored moments too, where they have a row for each layer."""
    values = dict(optimizer__name=optimizer, model__width=128, model__mlp_dim=128)
    # Adafactor takes parts of equal size only.
    unequal, equal = (
        ("interleaved", "one device", "stage4"), ("8 interleaved", "8 layers", "8 on stage4"),
    )  # fmt: skip
    num = 8 if optimizer == "adafactor" else 7
    setups = [setup_of(name, **values) for name in (equal if num == 8 else unequal)]
    drawn_values = drawn(setups[0], num)
    staged = [as_staged(setup, drawn_values, num, empty=0) for setup in setups]
    names = [n for n in trees.named(setups[0].abstract.opt_state) if "blocks" in n]
    assert len(names) >= 8
    with opened(tmp_path) as checkpoints:
        checkpoints.save(1, staged[0], meta={}, order=setups[0].order)
        for setup, wanted in zip(setups, staged, strict=True):
            assert_equal(checkpoints.restore(setup.abstract, order=setup.order).state, wanted)


def test_another_number_of_layers_is_an_error(tmp_path):
    """Seven layers on four stages have eight places; eight layers do not fit in them."""
    source = setup_of("stage4")
    with opened(tmp_path) as checkpoints:
        checkpoints.save(1, source.init(0), meta={}, order=source.order)
        for other in ("8 layers", "8 on stage4", "8 interleaved"):
            target = setup_of(other)
            with pytest.raises(ValueError, match=r"saved float32\[7, .* wanted float32\[8, "):
                checkpoints.restore(target.abstract, order=target.order)


def test_a_flipped_byte_is_found_before_layers_are_moved(tmp_path):
    source, target = setup_of("interleaved"), setup_of("one device")
    with opened(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, source.init(step), meta={}, order=source.order)
    files = [path for path in (tmp_path / "2/state").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    raw = bytearray(largest.read_bytes())
    raw[len(raw) // 2] ^= 0x40
    largest.write_bytes(raw)
    with opened(tmp_path) as checkpoints:
        restored = checkpoints.restore(target.abstract)
    assert restored.step == 1
    assert_equal(restored.state, target.init(1))


def test_offloaded_moments_are_moved(tmp_path):
    source, target = setup_of("stage4"), setup_of("stage2 x fsdp2")

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
    source = setup_of("stage4", mesh__stage=2, mesh__data=2, pipeline__table=str(file))
    assert source.order == setup_of("interleaved").order
    with opened(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(1, source.init(3), meta={}, order=source.order)
    file.unlink()
    target = setup_of("one device")
    with opened(tmp_path / "checkpoints") as checkpoints:
        assert_equal(checkpoints.restore(target.abstract).state, target.init(3))


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


def batch_of(setup, step: int) -> dict[str, jax.Array]:
    random, shape = np.random.default_rng(step), (8, 16)
    batch = {
        "tokens": random.integers(0, 257, shape),
        "targets": random.integers(0, 257, shape),
        "segment_ids": np.ones(shape),
        "positions": np.broadcast_to(np.arange(16), shape),
        "weights": random.random(shape) < 0.8,
    }
    types = setup.abstract_batch(*shape)
    return {
        n: jax.device_put(a.astype(types[n].dtype), types[n].sharding) for n, a in batch.items()
    }


@functools.cache
def trainer(name: str):
    run, devices = run_of(name)
    setup = recipe.make_setup(run, devices=devices)
    return setup, recipe.make_train_step(run, setup)


def trained(name: str, state, first: int) -> tuple[np.ndarray, object]:
    """Losses of the steps from `first` on, and the state after them."""
    setup, train_step = trainer(name)
    losses = []
    with jax.set_mesh(setup.mesh):
        for step in range(first, NUM_STEPS):
            state, report = train_step(state, batch_of(setup, step))
            losses.append(jax.device_get(report.loss))
    return np.array(losses), state


@functools.cache
def undisturbed(name: str):
    losses, state = trained(name, trainer(name)[0].init(0), 0)
    return losses, jax.device_get(state)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> pathlib.Path:
    """A checkpoint of four stages after two steps."""
    directory = tmp_path_factory.mktemp("staged")
    setup, train_step = trainer("stage4")
    state = setup.init(0)
    with jax.set_mesh(setup.mesh), opened(directory) as checkpoints:
        for step in range(SAVED_AT):
            state, _ = train_step(state, batch_of(setup, step))
        checkpoints.save(SAVED_AT, state, meta={}, order=setup.order)
    return directory


def restored(directory, name: str):
    setup = trainer(name)[0]
    with opened(directory) as checkpoints:
        return checkpoints.restore(setup.abstract, order=setup.order).state


@pytest.mark.parametrize("name", ["one device", "interleaved", "stage2 x fsdp2"])
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
        workdir, (run, _) = tmp_path / name, run_of(name)
        run.workdir = str(workdir)
        config.save_run(run)
        tokenizers.ByteTokenizer().save(workdir / "tokenizer.json")
        setup = trainer(name)[0]
        with opened(workdir / "checkpoints") as checkpoints:
            checkpoints.save(2, restored(saved, name), meta={}, order=setup.order)
        convert.to_hf(str(workdir), str(workdir / "exported"))
        files = sorted((workdir / "exported").iterdir())
        exported.append({path.name: path.read_bytes() for path in files})
    assert "model.safetensors" in exported[0] and exported[0] == exported[1]


@pytest.mark.parametrize(
    ("alone", "name"),
    [("one device", "stage4"), ("one device", "interleaved"), ("8 layers", "8 on stage4")],
)
def test_a_staged_state_is_sampled_from(alone, name):
    """The sample at the end of a run: on the same devices, without stages."""
    texts = []
    for setup in (setup_of(alone), setup_of(name)):
        execution, params = generate.without_stages(setup, setup.init(0).ema)
        assert execution.place.mesh.shape["stage"] == 1
        texts += sampling.generate(
            setup.apply, params, execution, [[1, 2, 3]], max_tokens=5, temperature=0.0
        )
    assert texts[0] == texts[1]


def test_a_new_run_on_stages_starts_with_the_parameters_of_another(tmp_path):
    source, target = setup_of("one device"), setup_of("interleaved")
    with opened(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(1, source.init(1), meta={}, order=source.order)
    started = resume.start_with(target, target.init(2), str(tmp_path), print)
    wanted = target.init(1)
    assert_equal((started.params, started.ema), (wanted.params, wanted.ema))
