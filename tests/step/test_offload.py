"""The optimizer's state in the memory of the host: the same numbers, and where they lie."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import compare, packed, resumes, runs, tiers

from llmx.config import ConfigError
from llmx.model.remat import HOST_MEMORY
from llmx.sharding import trees
from llmx.step import offload, optimizers, step

# fp32 whose operations the compiler fuses otherwise.
TOLERANCE = 1e-6
# And of moments in few bits, which are rounded up or down by random bits: one number in a thousand
# is so near to where up turns into down that it differs by a unit, 2^-8 of it.
OF_FEW_BITS = 2e-4
STEPS, ROWS, LENGTH, VOCAB = 3, 8, 16, 257
MODEL = dict(
    vocab_size=VOCAB, width=32, mlp_dim=64, num_heads=4, num_kv_heads=2, head_dim=8, num_layers=3
)
MESH = {"fsdp": 2, "tensor": 2}
CASES = {
    "one device": {},
    "fsdp x tensor, average": dict(mesh=MESH, optimizer__ema_decay=0.9),
    "zero1": dict(mesh={"data": 2, "fsdp": 2}, sharding__layout="zero1"),
    "lamb": dict(optimizer__name="lamb"),
    "lion": dict(optimizer__name="lion"),
    "adafactor": dict(optimizer__name="adafactor", mesh={"fsdp": 2}),
    "muon": dict(optimizer__name="muon", mesh={"fsdp": 2}),
    "int8 moments": dict(optimizer__moments="int8", mesh={"fsdp": 2}),
    "pure bf16": dict(precision="pure_bf16"),
    "stages": dict(
        mesh={"stage": 2, "fsdp": 2}, pipeline__schedule="1f1b", batch__accumulation=2,
    ),
    "accumulation": dict(mesh={"data": 2}, batch__accumulation=2),
    "int8 gradients": dict(mesh={"data": 2}, sync__strategy="int8"),
    "fp16": dict(precision="fp16", loss_scale__kind="dynamic"),
}  # fmt: skip
SLOW = {"adafactor", "muon", "pure bf16"}
FULL = {"zero1", "lamb", "lion", "accumulation", "int8 gradients"}  # with --full-grid


def make_config(**values):
    keys = dict(batch__size=ROWS, batch__sequence_length=LENGTH, optimizer__warmup_steps=1)
    return runs.make_config("llama3", model=MODEL, **keys | values)


@functools.cache
def batches():
    return packed.batches(STEPS, rows=ROWS, length=LENGTH, vocab=VOCAB)


def trained(recipe):
    """(losses, gradient norms, the state) after a step per batch, from seed 0."""
    phase = runs.phase(recipe, STEPS)
    train_step, reports = runs.make_train_step(recipe, phase), []
    with jax.set_mesh(recipe.mesh):
        state = recipe.init(0)
        for batch in batches():
            state, report = train_step(state, runs.put_batch(recipe, batch))
            reports.append((float(report.loss), float(report.grad_norm)))
    return reports, state


def kinds(state) -> dict[str, str]:
    """By name of an array of the optimizer's state: the kind of memory that it is in."""
    return {name: leaf.sharding.memory_kind for name, leaf in trees.named(state.opt_state).items()}


def assert_in_host_memory(state):
    """All but counters and vectors outside the blocks; all else of the state is on the device."""
    default = jax.devices()[0].default_memory().kind
    for name, leaf in trees.named(state.opt_state).items():
        kind = HOST_MEMORY if leaf.ndim >= 2 else default
        assert leaf.sharding.memory_kind == kind, name
    assert HOST_MEMORY in kinds(state).values()
    for leaf in jax.tree.leaves(state._replace(opt_state=())):
        assert leaf.sharding.memory_kind == default


WEIGHTS = {
    "weights": dict(remat="full"),
    "weights of segments, tensor": dict(remat="every_2", mesh=MESH),
    "weights, moments too": dict(
        remat="names", mesh={"data": 2, "fsdp": 2}, sharding__layout="hsdp", batch__accumulation=2,
        offload__optimizer=True, optimizer__ema_decay=0.9,
    ),
    "fp8 weights": dict(remat="full", mesh={"fsdp": 2}, products__format="fp8",
                        products__gather="fp8", precision="bf16"),
    "turns": dict(remat="full", mesh={"tensor": 2}, sharding__turns=2),
}  # fmt: skip
SLOW_WEIGHTS = {"fp8 weights"}
FULL_WEIGHTS = {"turns"}


@pytest.mark.parametrize("case", tiers.by_tier(WEIGHTS, slow=SLOW_WEIGHTS, full=FULL_WEIGHTS))
def test_parameters_on_the_host_change_no_bit(case):
    plain = WEIGHTS[case] | dict(offload__optimizer=False)
    reports, wanted = trained(runs.make_recipe(make_config(**plain)))
    recipe = runs.make_recipe(make_config(**WEIGHTS[case], offload__parameters=True))
    found, state = trained(recipe)
    assert found == reports
    compare.assert_same(jax.device_get(state), jax.device_get(wanted))
    memory = {name: leaf.sharding.memory_kind for name, leaf in trees.named(state.params).items()}
    on_host = {name for name, kind in memory.items() if kind == HOST_MEMORY}
    assert on_host == {name for name in memory if "blocks/" in name and "kernel" in name}
    computed = computed_in_host_memory(traced(recipe))
    assert {equation.primitive.name for equation in computed} == set()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(remat="none"), "with remat='none'"),
        (dict(remat=":2=none,full"), "with remat=':2=none,full'"),
        (dict(mesh={"stage": 2}, pipeline__schedule="1f1b", batch__accumulation=2), "mesh.stage=2"),
        (dict(mesh={"data": 2}, sync__strategy="int8"), "with sync.strategy='int8'"),
        (dict(mesh={"fsdp": 2}, sharding__gather="step"), "with sharding.gather='step'"),
        (dict(mesh={"fsdp": 2}, sharding__layout="zero2"), "with layout 'zero2'"),
    ],
)  # fmt: skip
def test_parameters_are_not_offloaded_with(changes, words):
    changes = dict(remat="full") | changes
    make_config(**changes)
    with pytest.raises(ConfigError) as error:
        make_config(**changes, offload__parameters=True)
    (problem,) = str(error.value).splitlines()[1:]
    assert words in problem and "use" in problem


@pytest.mark.parametrize("case", tiers.by_tier(CASES, slow=SLOW, full=FULL))
def test_offload_changes_no_bit(case):
    reports, wanted = trained(runs.make_recipe(make_config(**CASES[case])))
    recipe = runs.make_recipe(make_config(**CASES[case], offload__optimizer=True))
    assert_in_host_memory(recipe.abstract)
    found, state = trained(recipe)
    assert found == reports
    compare.assert_same(jax.device_get(state), jax.device_get(wanted))
    assert_in_host_memory(state)
    assert set(kinds(wanted).values()) == {jax.devices()[0].default_memory().kind}


# ------------------------------------------------------------------------------- layer by layer


@pytest.mark.parametrize(
    ("name", "moments", "mesh"),
    [
        ("adamw", "fp32", {}), ("adamw", "fp32", {"stage": 2, "fsdp": 2}), ("lamb", "fp32", MESH),
        ("lion", "fp32", {}), ("muon", "fp32", MESH), ("adamw", "bf16", {}), ("adamw", "int8", {}),
    ],
)  # fmt: skip
def test_layer_by_layer_is_the_update_of_all(name, moments, mesh):
    """Accepted, or refused after one that was."""
    pipeline = dict(pipeline__schedule="1f1b", batch__accumulation=2) if "stage" in mesh else {}
    config = make_config(
        mesh=mesh, optimizer__name=name, optimizer__moments=moments, optimizer__ema_decay=0.9,
        optimizer__warmup_steps=0, optimizer__eps=1e-3, **pipeline,
    )  # fmt: skip
    recipe = runs.make_recipe(config)
    optimizer = optimizers.make(
        config.optimizer, axes=recipe.loss.axes, splits=recipe.loss.updates,
        total_steps=config.steps,
    )  # fmt: skip
    random = np.random.default_rng(0)
    draw = lambda leaf: random.normal(size=leaf.shape).astype(np.float32)  # noqa: E731
    gradients = jax.tree.map(draw, recipe.loss.params)

    def states(in_parts):
        update = step.make_update(recipe.loss, recipe.ema_decay, in_parts)

        @jax.jit
        def updated(state, gradients, accepted):
            state = update(gradients, state, accepted, optimizer.whole)
            return state._replace(step=state.step + 1)

        with jax.set_mesh(recipe.mesh):
            placed = jax.device_put(gradients, recipe.loss.updates)
            first = updated(recipe.init(0), placed, jnp.bool_(True))  # moments that are not zero
            both = [updated(first, placed, jnp.bool_(accepted)) for accepted in (True, False)]
            return jax.device_get(both)

    whole = states(lambda apply: apply)
    parts = states(functools.partial(offload.layer_by_layer, stages=config.mesh.stage))
    of_moments = TOLERANCE if moments == "fp32" else OF_FEW_BITS
    for part, all_at_once in zip(parts, whole, strict=True):
        compare.assert_close(part.params, all_at_once.params, TOLERANCE)
        compare.assert_close(part.ema, all_at_once.ema, TOLERANCE)
        compare.assert_close(part.opt_state, all_at_once.opt_state, of_moments)


# -------------------------------------------------------------------------------------- programs

MOVES = {"device_put", "dynamic_slice", "dynamic_update_slice", "reshape", "squeeze"}
CONTAINERS = {
    "jit", "while", "scan", "cond", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat2",
    "checkpoint", "eval_jaxpr", "reshard",
}  # fmt: skip


def computed_in_host_memory(jaxpr) -> list:
    """Equations with an operand in host memory that do more than move it. Chips refuse them."""
    found = []
    for equation in jaxpr.eqns:
        for parameter in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")
        ):
            inner = getattr(parameter, "jaxpr", parameter)
            found += computed_in_host_memory(inner) if hasattr(inner, "eqns") else []
        spaces = {getattr(v.aval, "memory_space", None) for v in equation.invars}
        if jax.memory.Space.Host in spaces:
            name = equation.primitive.name
            found += [] if name in MOVES | CONTAINERS else [equation]
    return found


def traced(recipe):
    phase = runs.phase(recipe, STEPS)
    with jax.set_mesh(recipe.mesh):
        traced = runs.make_train_step(recipe, phase).trace(recipe.abstract, recipe.abstract_batch)
    return traced.jaxpr.jaxpr


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_computed_in_host_memory(case):
    program = traced(runs.make_recipe(make_config(**CASES[case], offload__optimizer=True)))
    assert "<host>" in str(program)
    assert computed_in_host_memory(program) == []


def test_what_is_computed_in_host_memory_is_found():
    def loop(x):
        x = jax.device_put(x, jax.memory.Space.Host)
        return jax.lax.fori_loop(0, 3, lambda i, x: x + x, x)

    (found,) = computed_in_host_memory(jax.jit(loop).trace(jnp.ones(4)).jaxpr.jaxpr)
    assert found.primitive.name == "add"


# ----------------------------------------------------------------------------------- checkpoints

HOST = dict(offload__optimizer=True)
WEIGHTS_TOO = HOST | dict(offload__parameters=True, remat="full")


def with_moments(state):
    """A new state with moments that are not zero."""
    random = np.random.default_rng(0)

    def one(leaf):
        new = random.uniform(size=leaf.shape) if leaf.ndim else 7
        return jax.device_put(np.asarray(new, leaf.dtype), leaf.sharding)

    return state._replace(opt_state=jax.tree.map(one, state.opt_state))


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        ((2, HOST), (2, HOST)), ((2, HOST), (4, HOST)), ((4, HOST), (2, {})), ((2, {}), (4, HOST)),
        ((2, HOST | dict(mesh__stage=2)), (4, HOST)), ((4, HOST), (2, WEIGHTS_TOO)),
    ],
)  # fmt: skip
def test_it_is_restored_to_where_the_run_keeps_it(tmp_path, saved, wanted):
    (devices, values), (other_devices, other_values) = saved, wanted
    _, recipe = resumes.run_of(tmp_path, devices, **values)
    written = resumes.save(tmp_path, 2, devices, state=with_moments(recipe.init(2)), **values)
    recipe, state, at, _ = resumes.resumed(tmp_path, other_devices, **other_values)
    assert at == 2
    if "mesh__stage" not in values:
        compare.assert_same(jax.device_get(state), jax.device_get(written))
    to = lambda tree: jax.tree.map(lambda leaf: leaf.sharding, tree)  # noqa: E731
    kept = to(recipe.abstract.opt_state)
    assert to(state.opt_state) == kept
    if other_values == HOST:
        assert_in_host_memory(state)
    assert to(state.params) == to(recipe.abstract.params)
    # And trains on: the step takes it from there.
    batch = packed.batches(1, rows=8, length=16, vocab=128)[0]
    with jax.set_mesh(recipe.mesh):
        state, report = runs.make_train_step(recipe)(state, runs.put_batch(recipe, batch))
    assert np.isfinite(float(report.loss)) and int(state.step) == 1  # it was saved new
    assert to(state.opt_state) == kept


# -------------------------------------------------------------------------------------- refusals

OF_REPLICAS = {
    "one_bit": dict(sync__warmup_steps=2), "zero_one": {}, "local_sgd": {}, "diloco": {},
    "one_bit_lamb": dict(sync__warmup_steps=2, optimizer__name="lamb"),
}  # fmt: skip


@pytest.mark.parametrize("strategy", OF_REPLICAS)
def test_states_of_replicas_are_not_offloaded(strategy):
    values = dict(mesh={"data": 2}, sync__strategy=strategy, **OF_REPLICAS[strategy])
    make_config(**values)
    with pytest.raises(ConfigError) as error:
        make_config(**values, offload__optimizer=True)
    (problem,) = str(error.value).splitlines()[1:]
    assert f"offload.optimizer with sync.strategy={strategy!r}" in problem
    assert "leave offload.optimizer out, or use strategy 'mean'" in problem


def test_saves_of_stages_are_not_offloaded():
    values = dict(mesh={"stage": 2}, pipeline__schedule="1f1b", batch__accumulation=2)
    with pytest.raises(ConfigError, match=r"leave offload[.]saves out, or save less"):
        make_config(**values, remat="full", offload__saves=("input",))
