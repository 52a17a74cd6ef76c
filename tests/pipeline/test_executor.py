"""Pipelines train as one device does where the parity grid has no axis for it; two versions of the
weights; and what the compiled programs of schedules execute.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import compare, parity_grid, runs

from llmx.aot import program
from llmx.config import stage_memory
from llmx.pipeline import executor, schedule, schedules, stages, ticks
from llmx.pipeline import schedule as schedule_lib
from llmx.pipeline import staged as staged_lib
from llmx.pipeline import tick as tick_lib

TOLERANCE = 1e-5
PLAIN = parity_grid.PLAIN
EMPTY = {name: np.zeros_like(array) for name, array in parity_grid.batches()[0].items()}


def staged(schedule: str, stage: int, accumulation: int, **options) -> dict:
    """A row of the parity grid."""
    return PLAIN | dict(schedule=schedule, stage=stage, accumulation=accumulation) | options


def train(row: dict, given: list[dict] | None = None, **keys) -> runs.Trained:
    return runs.train(
        parity_grid.make_recipe(row, **keys), parity_grid.batches() if given is None else given
    )


def assert_trained_as_one_device(got, row: dict):
    _, wanted = parity_grid.reference(row["family"], parity_grid.num_layers(row))
    compare.assert_trained_alike(got, wanted, TOLERANCE)


# That schedules train as one device does, crossed with all other options: tests/parity. Here is
# what the grid does not have.


@pytest.mark.slow
def test_layers_as_the_config_deals_them_out():
    row = staged("1f1b", 4, 8, family="gemma3", remat="full")
    assert_trained_as_one_device(train(row, pipeline__layers=(1, 3, 4, 1)), row)


@pytest.mark.slow
@pytest.mark.parametrize("microbatches, stages", [(3, 2), (6, 4), (7, 4)])
def test_microbatches_that_stages_do_not_divide(microbatches, stages):
    """With rows that divide by them: the last ones of the batch are left out."""
    rows = parity_grid.BATCH // microbatches * microbatches
    given = [
        {name: array[:rows] for name, array in batch.items()} for batch in parity_grid.batches()
    ]
    row = staged("1f1b", stages, microbatches)
    one = train(PLAIN, given, batch__size=rows, model=dict(num_layers=9))
    compare.assert_trained_alike(train(row, given, batch__size=rows), one, TOLERANCE)


def test_a_table_from_a_file(tmp_path):
    """Classic 1F1B, whose ticks mix kinds and do not split the backward pass."""
    forward, backward = schedule.FORWARD, schedule.BACKWARD
    warm = [[(forward, m, 0) for m in range(2)], [(forward, 0, 1)]]
    orders = [
        [*warm[0], (backward, 0, 0), (forward, 2, 0), (backward, 1, 0), (forward, 3, 0),
         (backward, 2, 0), (backward, 3, 0)],
        [*warm[1], (backward, 0, 1), (forward, 1, 1), (backward, 1, 1), (forward, 2, 1),
         (backward, 2, 1), (forward, 3, 1), (backward, 3, 1)],
    ]  # fmt: skip
    path = tmp_path / "classic.csv"
    schedule.write_csv(schedule.schedule_asap("classic", orders), path)
    table = schedule.read_csv(path)
    assert schedule.check(table).peak_stash.tolist() == [2, 1]
    assert ticks.program(table).slots["saved"] == 2 + 1  # one to write to without an operation
    row = staged("1f1b", 2, 4, fsdp=2)
    assert_trained_as_one_device(train(row, pipeline__table=str(path)), row)


def test_evaluation():
    row = staged("zb_v", 2, 4, fsdp=2, family="gemma3")
    found = []
    for each in (row, PLAIN | dict(family="gemma3")):
        recipe = parity_grid.make_recipe(each, model=dict(num_layers=9))
        with jax.set_mesh(recipe.mesh):
            batch = runs.put_batch(recipe, parity_grid.batches()[0])
            sums = runs.make_evaluation(recipe)(recipe.init(0).params, batch)
            found.append(jax.device_get(sums))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6)


@pytest.mark.parametrize(
    ("row", "layers"),
    [
        (staged("zb_h1", 2, 4, fsdp=2, remat="full"), 2),
        pytest.param(staged("zb_v", 2, 4, tensor=2, family="gpt2"), 1, marks=pytest.mark.slow),
        pytest.param(
            staged("zb_1f1b", 4, 8, family="gemma3", remat="part+names"), 2, marks=pytest.mark.slow
        ),
    ],
)
def test_weight_gradients_of_some_layers_are_deferred(row, layers, monkeypatch):
    """The others' are made at once; the factors that are kept are those of `layers`."""
    kept, empty = [], executor._empty

    def recorded(context, steps):
        kept.append([leaf.shape for record in context.runs[0].deferred for leaf in record.types])
        return empty(context, steps)

    monkeypatch.setattr(stage_memory, "deferred_layers", lambda *_, **__: layers)
    monkeypatch.setattr(executor, "_empty", recorded)
    assert_trained_as_one_device(train(row), row)
    assert kept[0] and {shape[0] for shape in kept[0]} == {layers}


# ------------------------------------------------------------------------------------ PipeDream-2BW


def delayed(family: str, given: list[dict]):
    """One device: to W(t) the gradient of the batch before is applied, taken at W(t-1), which was
    the newest when that batch came."""
    config = parity_grid.make_config(PLAIN | dict(family=family), model=dict(num_layers=9))
    recipe = runs.make_recipe(config)
    differentiate, update = runs.make_gradient(recipe), runs.make_update(recipe, config)
    losses, norms = [], []
    with jax.set_mesh(recipe.mesh):
        state = recipe.init(0)
        state = state._replace(step=state.step + 1)  # the first one completes no batch
        before = jax.tree.map(jnp.copy, state.params)
        for batch in given:
            loss, _, grads = differentiate(before, runs.put_batch(recipe, batch))
            norm = float(jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(grads))))
            grads = jax.tree.map(lambda leaf: leaf / max(norm, 1.0), grads)  # noqa: B023
            losses.append(float(loss))
            norms.append(norm)
            before, state = state.params, update(state, grads)
    return np.array(losses), np.array(norms), jax.device_get(state.params)


TWO_VERSIONS = [
    staged("pipedream_2bw", 2, 4, fsdp=2),
    pytest.param(
        staged("pipedream_2bw", 4, 8, tensor=2, family="gpt2", remat="full"),
        marks=pytest.mark.slow,
    ),
    pytest.param(
        staged(
            "pipedream_2bw", 2, 4, data=2, sequence=2, family="gemma3", layout="zero1", remat="full"
        ),
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize("row", TWO_VERSIONS, ids=parity_grid.name)
def test_pipedream_2bw_is_gradients_of_delay_one(row):
    """A batch is reported, and its gradient applied, in the step after the one that took it in."""
    losses, norms, params = train(row, [*parity_grid.batches(), EMPTY])
    assert losses[0] == norms[0] == 0
    wanted = delayed(row["family"], parity_grid.batches())
    compare.assert_trained_alike((losses[1:], norms[1:], params), wanted, TOLERANCE)


def predicted(family: str, given: list[dict], first_layers: int):
    """One device as 2 stages with 4 microbatches: of a batch, taken at 2 W(t) - W(t-1), the first
    stage, with embedding and `first_layers`, leaves the last two to the next step, the other one
    the last."""
    config = parity_grid.make_config(PLAIN | dict(family=family), model=dict(num_layers=9))
    recipe = runs.make_recipe(config)
    differentiate, update = runs.make_gradient(recipe), runs.make_update(recipe, config)

    def thirds(params, batch):
        """Loss, and gradients of the microbatches 0 and 1, 2, and 3; microbatch m is rows m::4."""
        total, losses, sums = max(batch["weights"].sum(), 1.0), [], []
        for of in ((0, 1), (2,), (3,)):
            rows = np.isin(np.arange(len(batch["weights"])) % 4, of)
            part = batch | {"weights": batch["weights"] * rows[:, None]}
            loss, tokens, grads = differentiate(params, runs.put_batch(recipe, part))
            losses.append(float(loss * tokens / total))
            sums.append(jax.tree.map(lambda leaf: leaf * (tokens / total), grads))  # noqa: B023
        return sum(losses), sums

    def taken(path, old_2, old_3, new_01, new_2):
        first, last = new_01 + old_2 + old_3, new_01 + new_2 + old_3
        if path[0].key == "blocks":
            return jnp.concatenate([first[:first_layers], last[first_layers:]])
        return first if path[0].key == "embedding" else last

    losses, norms, old = [], [], None
    with jax.set_mesh(recipe.mesh):
        state = recipe.init(0)
        state = state._replace(step=state.step + 1)  # the first one completes no batch
        earlier = jax.tree.map(jnp.copy, state.params)
        for batch in given:
            latest = jax.tree.map(jnp.copy, state.params)
            before = jax.tree.map(lambda new, old: 2 * new - old, latest, earlier)
            loss, new = thirds(before, batch)
            if old is not None:
                grads = jax.tree_util.tree_map_with_path(taken, *old[1:], *new[:2])
                norm = float(jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(grads))))
                grads = jax.tree.map(lambda leaf: leaf / max(norm, 1.0), grads)  # noqa: B023
                norms.append(norm)
                state = update(state, grads)
            losses.append(loss)
            earlier, old = latest, new
    return np.array(losses[:-1]), np.array(norms), jax.device_get(state.params)


def test_with_prediction_an_update_takes_what_each_stage_has_completed():
    """Each microbatch's gradient at the weights with which it entered; none in the first step."""
    row, given = staged("pipedream_2bw", 2, 4, remat="full"), [*parity_grid.batches(), EMPTY]
    keys = dict(pipeline__predict=True, pipeline__layers=(5, 4))
    losses, norms, params = train(row, given, **keys)
    wanted = predicted(row["family"], given, 5)
    compare.assert_trained_alike((losses[1:], norms[1:], params), wanted, TOLERANCE)
    with pytest.raises(AssertionError):
        compare.assert_trained_alike(delayed(row["family"], given[:-1]), wanted, TOLERANCE)


@pytest.mark.slow
def test_one_version_from_first_to_last_stage():
    """Vertical sync: a batch's loss and gradient do not depend on the weights of the next step.

    While batch 0 is under way, the newest weights are made useless: what is reported of it stays.
    """
    recipe = parity_grid.make_recipe(staged("pipedream_2bw", 4, 8))
    train_step = runs.make_train_step(recipe)
    first, second, _ = parity_grid.batches()
    found = []
    for spoiled in (False, True):
        with jax.set_mesh(recipe.mesh):
            state, _ = train_step(recipe.init(0), runs.put_batch(recipe, first))
            if spoiled:
                state = state._replace(params=jax.tree.map(lambda a: a * 3, state.params))
            _, report = train_step(state, runs.put_batch(recipe, second))
            found.append((float(report.loss), float(report.grad_norm)))
    assert found[0] == found[1]
    _, wanted = parity_grid.reference("llama3", 9)
    np.testing.assert_allclose(found[0], (wanted.losses[0], wanted.norms[0]), rtol=TOLERANCE)


# ------------------------------------------------------------------------- what a program executes


def compiled(row: dict, **changes):
    recipe = parity_grid.make_recipe(row, **changes)
    text = runs.lower(recipe).compile().as_text()
    return recipe, program.read(text, list(recipe.mesh.shape.items()))


@pytest.mark.parametrize(
    "schedule",
    [
        name if name == "zb_h1" else pytest.param(name, marks=pytest.mark.slow)
        for name in schedules.SCHEDULES
    ],
)
def test_the_program_takes_the_ticks_of_the_table(schedule):
    """Products of the compiled loops, trips multiplied in, of a conditional the branch with the
    most: in units of a stage's forward pass they are the length of the table, idle stages
    included."""
    row = staged(schedule, 4, 16, layout="ddp")
    # Little but the products of the blocks: what embedding, head and attention add is below 2%.
    model = dict(num_layers=8, num_heads=4, num_kv_heads=2, mlp_dim=12288)
    recipe, program = compiled(row, model=model)
    kernels = [
        leaf.size for leaf in jax.tree.leaves(recipe.abstract.params["blocks"]) if leaf.ndim > 2
    ]
    forward = 2 * sum(kernels) / 4 * (parity_grid.BATCH * parity_grid.LENGTH / 16)
    length = schedule_lib.check(schedules.SCHEDULES[schedule](4, 16)).length
    assert program.flops / forward == pytest.approx(length, rel=0.02)


def test_a_loop_has_the_operations_of_its_ticks_only():
    kinds = lambda name: [  # noqa: E731
        (times, [set(table.kind[first + at]) - {schedule.IDLE} for at in range(length)])
        for table in [schedules.SCHEDULES[name](4, 16)]
        for first, length, times in ticks.program(table).loops
    ]
    F, B = {schedule.FORWARD}, {schedule.BACKWARD}
    # The first forward operations have no head behind them, all others have.
    assert kinds("gpipe") == [(3, [F]), (16, [F]), (19, [B])]
    assert kinds("1f1b") == [(3, [F]), (16, [F, B]), (3, [B])]
    assert kinds("pipedream_2bw") == [(16, [F, B])]
    # Forward operations alone, then a loop in which each stage takes its branch, then a last one.
    assert [times for times, _ in kinds("zb_v")] == [8, 87, 4]
    W = {schedule.WEIGHT}
    assert kinds("zb_1f1b") == [(3, [F]), (4, [F, B]), (12, [W, F, B]), (3, [W, B]), (1, [W])]


def test_stages_without_branches_meet_no_conditions_but_heads_of_one_chunk_of_several():
    """All entries of a loop are there in all its ticks or in none; the head's depend on the chunk
    where a stage has several."""
    for name, chunks in (
        ("gpipe", 1), ("1f1b", 1), ("zb_1f1b", 1), ("pipedream_2bw", 1), ("zb_1f1b", 2),
        ("interleaved_1f1b", 2),
    ):  # fmt: skip
        program = ticks.program(schedules.SCHEDULES[name](4, 16, chunks))
        for first, length, times in program.loops:
            for tick in range(first, first + length):
                of_ticks = slice(tick, first + length * times, length)
                body = executor.body_of(jax.tree.map(lambda a: a[of_ticks], program.rows))  # noqa: B023
                assert body.when.embedding is not tick_lib.When.SOMETIMES
                assert body.when.embedding_gradient is not tick_lib.When.SOMETIMES
                if chunks == 1:
                    assert body.when.head is not tick_lib.When.SOMETIMES


def test_a_stage_that_would_keep_more_than_stated_is_refused(monkeypatch):
    """Whatever jax saves of a chunk is compared with what `remat` states, while it is traced."""
    row = staged("1f1b", 2, 4, remat="full")
    stated = staged_lib.remat_costs.saved_bytes_of_chunk
    less = lambda *args, **keys: stated(*args, **keys) - 1  # noqa: E731
    monkeypatch.setattr(staged_lib.remat_costs, "saved_bytes_of_chunk", less)
    with pytest.raises(RuntimeError, match=r"keep .* bytes .*'full' states .*remat='part'"):
        train(row)


def test_buffers_are_those_of_the_table():
    """Places for what is kept: as many as microbatches are in flight, whatever their number."""
    slots = lambda name, m: ticks.program(schedules.SCHEDULES[name](4, m)).slots  # noqa: E731
    for m in (8, 16, 64):
        assert slots("1f1b", m)["saved"] == 7
        assert slots("gpipe", m)["saved"] == m + 1  # and one to write to without an operation
        assert slots("zb_h1", m)["saved"] <= 5
        assert slots("pipedream_2bw", m)["saved"] <= 8
        assert slots("1f1b", m)["inputs"] <= 2


def test_only_the_executor_crosses_stages():
    """Weights are gathered, and gradients summed, within a stage; neighbours exchange twice per
    microbatch and idle tick; all stages share what enters the head and leaves the embedding."""
    _, program = compiled(staged("1f1b", 4, 8, fsdp=2, remat="full"))
    crossing = program.select(across="stage")
    assert {each.kind for each in crossing} == {"collective-permute", "all-reduce"}
    sends = [each for each in crossing if each.kind == "collective-permute"]
    assert sum(each.count for each in sends) == 2 * (8 + 4 - 1)
    assert program.select(kind="all-gather", axes="fsdp")


# --------------------------------------------------------------------------------------- what fails


def test_layers_that_do_not_fill_the_chunks():
    with pytest.raises(ValueError, match="add up to 8 layers"):
        stages.cut(8, (0, 1), (3, 4))
    with pytest.raises(ValueError, match="too few"):
        stages.cut(3, (0, 1, 2, 3))
