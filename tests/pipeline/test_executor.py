"""Pipelines train as one device does: every schedule, on stages crossed with the other axes.

Losses and gradient norms of three steps and the parameters after them agree to 1e-5 in fp32.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import compare, packed, runs

from llmx.aot import program
from llmx.pipeline import schedule, schedules, stages, ticks
from llmx.pipeline import schedule as schedule_lib

TOLERANCE = 1e-5
BATCH, LENGTH, STEPS = 32, 16, 3

MODELS = {
    "gpt2": dict(num_heads=4, num_kv_heads=4, head_dim=8),  # tied, learned positions, biases
    "llama3": dict(num_heads=4, num_kv_heads=2, head_dim=8),  # untied
    "gemma3": dict(  # tied, kinds of layers alternate
        num_heads=4, num_kv_heads=2, head_dim=8, window=5, layer_pattern=("local", "global")
    ),
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """What is trained, and on which stages."""

    schedule: str
    stages: int
    microbatches: int
    mesh: str = ""  # the other axes: "fsdp2 tensor2"
    family: str = "llama3"
    num_layers: int = 8
    layout: str = "zero3"
    remat: str = "full"
    layers: tuple[int, ...] = ()
    policy: str = "fp32"
    gather: str = "layer"

    def __str__(self):
        rest = "-".join(self.mesh.split())
        shown = [self.schedule, f"stage{self.stages}", rest, f"M{self.microbatches}", self.family]
        shown += [f"L{self.num_layers}"] if self.num_layers != 8 else []
        shown += [str(self.layers).replace(" ", "")] if self.layers else []
        return "-".join(filter(None, [*shown, self.layout, self.remat, self.policy]))

    @property
    def sizes(self) -> dict[str, int]:
        others = {name[:-1]: int(name[-1]) for name in self.mesh.split()}
        return {"stage": self.stages} | others


def batches() -> list[dict]:
    return packed.batches(STEPS, rows=BATCH, length=LENGTH, vocab=90)


EMPTY = {name: np.zeros_like(array) for name, array in batches()[0].items()}


def make_config(cell: Cell, model: dict | None = None, **keys):
    model = dict(vocab_size=257, num_layers=cell.num_layers) | MODELS[cell.family] | (model or {})
    if cell.stages > 1:
        keys = dict(pipeline__schedule=cell.schedule, pipeline__layers=cell.layers) | keys
    keys = dict(batch__size=BATCH, loss__z_loss=1e-4, sharding__gather=cell.gather) | keys
    return runs.make_config(
        cell.family,
        model=model,
        mesh=cell.sizes,
        precision=cell.policy,
        remat=cell.remat,
        batch__sequence_length=LENGTH,
        batch__accumulation=cell.microbatches,
        sharding__layout=cell.layout,
        **runs.PARITY_OPTIMIZER,
        **keys,
    )


def make_recipe(cell: Cell, model: dict | None = None, **keys):
    return runs.make_recipe(make_config(cell, model, **keys))


def train(cell: Cell, given: list[dict], **keys) -> runs.Trained:
    return runs.train(make_recipe(cell, **keys), given)


ONE_DEVICE = Cell("", 1, 1, layout="ddp", remat="none")


@functools.cache
def reference(family: str, num_layers: int):
    """What one device does."""
    cell = dataclasses.replace(ONE_DEVICE, family=family, num_layers=num_layers)
    return train(cell, batches())


def assert_equal(got, wanted):
    compare.assert_trained_alike(got, wanted, TOLERANCE)


# Every schedule, number of stages, number of microbatches (below, equal to, above and not divisible
# by the stages), axis beside, family, layout and remat policy; the pairs that matter most.
QUICK = [
    Cell("gpipe", 2, 4, "fsdp2 tensor2", "gpt2"),
    Cell("1f1b", 4, 8, "fsdp2"),
    Cell("1f1b", 4, 1, family="gemma3", num_layers=6),
    Cell("interleaved_1f1b", 2, 4, "fsdp2 sequence2", remat="names"),
    Cell("zb_h1", 4, 8, "tensor2", "gpt2", layout="ddp", remat="none"),
    Cell("zb_v", 2, 4, "fsdp2 tensor2", layout="hsdp", remat="none"),
]
SLOW = [
    Cell("gpipe", 4, 8, "sequence2", "gemma3", num_layers=7),
    Cell("gpipe", 8, 16, layout="ddp", remat="none"),
    Cell("1f1b", 2, 2, "data2 tensor2", "gpt2", layout="zero1"),
    Cell("1f1b", 4, 16, "sequence2", "gpt2", remat="dots"),
    Cell("1f1b", 8, 8, family="gpt2"),
    Cell("1f1b", 8, 4, family="llama3"),
    Cell("1f1b", 2, 16, "fsdp2 sequence2", layout="zero2", remat="none"),
    Cell("1f1b", 2, 8, "data2 fsdp2", layout="hsdp", gather="step"),
    Cell("1f1b", 4, 8, layers=(1, 3, 3, 1), family="gemma3"),
    Cell("interleaved_1f1b", 4, 8, "tensor2", "gpt2", num_layers=11, layout="zero1"),
    Cell("interleaved_1f1b", 4, 4, "fsdp2", "gemma3"),
    Cell("zb_h1", 4, 1, "fsdp2", remat="none"),  # ticks of weight gradients with idle stages
    Cell("zb_v", 4, 2, "tensor2"),
    Cell("zb_h1", 2, 4, "sequence2 tensor2", layout="zero2", remat="none"),
    Cell("zb_h1", 8, 16, family="llama3", remat="full"),
    Cell("zb_h1", 2, 8, "data2 fsdp2", layout="hsdp", gather="step"),
    Cell("zb_v", 4, 8, "fsdp2", "gpt2", remat="names"),
    Cell("zb_v", 2, 2, "sequence4", "gpt2"),
    Cell("dual_pipe_v", 2, 4, "data2 fsdp2", "gemma3", num_layers=7, layout="hsdp", remat="names"),
    Cell("dual_pipe_v", 4, 16, "tensor2", remat="none"),
]


@pytest.mark.parametrize(
    "cell", [*QUICK, *(pytest.param(cell, marks=pytest.mark.slow) for cell in SLOW)], ids=str
)
def test_stages_train_as_one_device(cell):
    assert_equal(train(cell, batches()), reference(cell.family, cell.num_layers))


@pytest.mark.slow
@pytest.mark.parametrize("microbatches, stages", [(3, 2), (6, 4), (7, 4)])
def test_microbatches_that_stages_do_not_divide(microbatches, stages):
    """With rows that divide by them: the last ones of the batch are left out."""
    cell = Cell("1f1b", stages, microbatches)
    rows = BATCH // microbatches * microbatches
    given = [{name: array[:rows] for name, array in batch.items()} for batch in batches()]
    one = dataclasses.replace(ONE_DEVICE, family=cell.family)
    assert_equal(*(train(each, given, batch__size=rows) for each in (cell, one)))


@pytest.mark.slow
def test_bf16():
    cell = Cell("1f1b", 2, 4, "fsdp2 tensor2", policy="bf16")
    losses, norms, params = train(cell, batches())
    wanted = reference(cell.family, cell.num_layers)
    np.testing.assert_allclose(losses, wanted[0], rtol=1e-2)
    np.testing.assert_allclose(norms, wanted[1], rtol=5e-2)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(params))


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
    cell = Cell("1f1b", 2, 4, "fsdp2", num_layers=3)
    assert ticks.program(table).slots["saved"] == 2 + 1  # one to write to without an operation
    trained = train(cell, batches(), pipeline__table=str(path))
    assert_equal(trained, reference("llama3", 3))


def test_evaluation():
    cell = Cell("zb_v", 2, 4, "fsdp2", "gemma3", num_layers=7)
    found = []
    for each in (cell, dataclasses.replace(ONE_DEVICE, family="gemma3", num_layers=7)):
        recipe = make_recipe(each)
        with jax.set_mesh(recipe.mesh):
            batch = runs.put_batch(recipe, batches()[0])
            sums = runs.make_evaluation(recipe)(recipe.init(0).params, batch)
            found.append(jax.device_get(sums))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6)


# ------------------------------------------------------------------------------------ PipeDream-2BW


def delayed(family: str, num_layers: int, given: list[dict]):
    """One device: to W(t) the gradient of the batch before is applied, taken at W(t-1), which was
    the newest when that batch came."""
    cell = dataclasses.replace(ONE_DEVICE, family=family, num_layers=num_layers)
    config = make_config(cell)
    recipe = runs.make_recipe(config)
    differentiate, update = runs.make_gradient(recipe), runs.make_update(recipe, config)
    losses, norms = [], []
    with jax.set_mesh(recipe.mesh):
        state = recipe.init(0)
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
    Cell("pipedream_2bw", 2, 4, "fsdp2", remat="none"),
    pytest.param(
        Cell("pipedream_2bw", 4, 8, "tensor2", "gpt2", num_layers=6), marks=pytest.mark.slow
    ),
    pytest.param(
        Cell("pipedream_2bw", 2, 4, "data2 sequence2", "gemma3", num_layers=7, layout="zero1"),
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize("cell", TWO_VERSIONS, ids=str)
def test_pipedream_2bw_is_gradients_of_delay_one(cell):
    """A batch is reported, and its gradient applied, in the step after the one that took it in."""
    losses, norms, params = train(cell, [*batches(), EMPTY])
    assert losses[0] == norms[0] == 0
    wanted = delayed(cell.family, cell.num_layers, batches())
    assert_equal((losses[1:], norms[1:], params), wanted)


def test_one_version_from_first_to_last_stage():
    """Vertical sync: a batch's loss and gradient do not depend on the weights of the next step.

    While batch 0 is under way, the newest weights are made useless: what is reported of it stays.
    """
    cell = Cell("pipedream_2bw", 4, 8, num_layers=4)
    recipe = make_recipe(cell)
    train_step = runs.make_train_step(recipe)
    found = []
    for spoiled in (False, True):
        with jax.set_mesh(recipe.mesh):
            state, _ = train_step(recipe.init(0), runs.put_batch(recipe, batches()[0]))
            if spoiled:
                state = state._replace(params=jax.tree.map(lambda a: a * 3, state.params))
            _, report = train_step(state, runs.put_batch(recipe, batches()[1]))
            found.append((float(report.loss), float(report.grad_norm)))
    assert found[0] == found[1]
    one = dataclasses.replace(ONE_DEVICE, num_layers=4)
    losses, norms, _ = train(one, batches()[:1])
    np.testing.assert_allclose(found[0], (losses[0], norms[0]), rtol=TOLERANCE)


# ------------------------------------------------------------------------- what a program executes


def compiled(cell: Cell, model: dict | None = None):
    recipe = make_recipe(cell, model)
    text = runs.lower(recipe).compile().as_text()
    return recipe, program.read(text, list(recipe.mesh.shape.items()))


@pytest.mark.parametrize(
    "schedule",
    [
        name if name in ("1f1b", "zb_h1") else pytest.param(name, marks=pytest.mark.slow)
        for name in schedules.SCHEDULES
    ],
)
def test_the_program_takes_the_ticks_of_the_table(schedule):
    """Products of the compiled loops, trips multiplied in, of a conditional the branch with the
    most: in units of a stage's forward pass they are the length of the table, idle stages
    included."""
    cell = Cell(schedule, 4, 16, remat="none", layout="ddp")
    recipe, program = compiled(cell, {"mlp_dim": 4096})
    kernels = [
        leaf.size for leaf in jax.tree.leaves(recipe.abstract.params["blocks"]) if leaf.ndim > 2
    ]
    forward = 2 * sum(kernels) / cell.stages * (BATCH * LENGTH / cell.microbatches)
    length = schedule_lib.check(schedules.SCHEDULES[schedule](4, 16)).length
    assert program.flops / forward == pytest.approx(length, rel=0.02)


def test_a_loop_has_the_operations_of_its_ticks_only():
    kinds = lambda name: [  # noqa: E731
        (times, [set(table.kind[first + at]) - {schedule.IDLE} for at in range(length)])
        for table in [schedules.SCHEDULES[name](4, 16)]
        for first, length, times in ticks.program(table).loops
    ]
    F, B = {schedule.FORWARD}, {schedule.BACKWARD}
    assert kinds("gpipe") == [(19, [F]), (19, [B])]
    assert kinds("1f1b") == [(4, [F]), (15, [B, F]), (4, [B])]
    assert kinds("pipedream_2bw") == [(16, [F, B])]
    # Forward operations alone, then a loop in which each stage takes its branch, then a last one.
    assert [times for times, _ in kinds("zb_v")] == [8, 90, 1]


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
    cell = Cell("1f1b", 4, 8, "fsdp2")
    _, program = compiled(cell)
    crossing = program.select(across="stage")
    assert {each.kind for each in crossing} == {"collective-permute", "all-reduce"}
    sends = [each for each in crossing if each.kind == "collective-permute"]
    assert sum(each.count for each in sends) == 2 * (8 + 4 - 1)
    assert program.select(kind="all-gather", axes="fsdp")


# --------------------------------------------------------------------------------------- what fails


def test_layers_that_do_not_fill_the_parts():
    with pytest.raises(ValueError, match="add up to 8 layers"):
        stages.cut(8, (0, 1), (3, 4))
    with pytest.raises(ValueError, match="too few"):
        stages.cut(3, (0, 1, 2, 3))
