"""Masks in checkpoints: resumed on other meshes and stages, taken from other runs, never lost."""

import jax
import numpy as np
import pytest
from support import runs
from support.compare import assert_close, assert_same
from support.resumes import resumed, run_of, save

from llmx.sharding import trees
from llmx.step.transforms import masks

# Five layers are parts of unequal size, with empty rows in the longest's place. Of four steps the
# first two end with a pruning.
DENSE = dict(model__num_layers=5)
PRUNED = DENSE | dict(
    pruning__method="magnitude", pruning__begin_step=1, pruning__end_step=2, pruning__every=1
)
FIXED = DENSE | dict(pruning__method="fixed")
ELSEWHERE = 1e-5  # relative: on another mesh sums are taken in another order
STAGES = dict(mesh__stage=2, batch__accumulation=2)


def batch_of(number: int) -> dict:
    generator, shape = np.random.default_rng(number), (8, 16)
    tokens = lambda: generator.integers(0, 250, shape).astype(np.int32)  # noqa: E731
    return dict(
        tokens=tokens(), targets=tokens(), segment_ids=np.zeros(shape, np.int32),
        positions=np.broadcast_to(np.arange(16, dtype=np.int32), shape),
        weights=np.ones(shape, np.float32),
    )  # fmt: skip


def trained(recipe, state, first: int, end: int):
    """The state after the steps from `first` to `end`."""
    programs = runs.make_programs(recipe)
    with jax.set_mesh(recipe.mesh):
        for number in range(first, end):
            state, _ = programs(number, state, runs.put_batch(recipe, batch_of(number)))
    return state


def host(tree):
    return jax.tree.map(np.array, tree)


def by_depth(recipe, state) -> dict[str, np.ndarray]:
    """Masks on the host by name, layers in the model's order."""
    found = host(state.extra[masks.NAME].masks)
    return trees.named(found | {"blocks": jax.device_get(recipe.order.inverse(found["blocks"]))})


def pruned_and_zero(recipe, state) -> int:
    """How many weights are pruned; all of these are zero."""
    params, number = trees.named(runs.in_order(recipe, state.params)), 0
    for name, mask in by_depth(recipe, state).items():
        assert not params[name][~mask].any(), name
        number += int((~mask).sum())
    return number


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run on two devices, saved after two steps, and its state after all four."""
    folder = tmp_path_factory.mktemp("pruned")
    _, recipe = run_of(folder, 2, **PRUNED)
    state = trained(recipe, recipe.init(0), 0, 2)
    at_two = host(state)
    save(folder, 2, 2, state, **PRUNED)
    return folder, recipe, at_two, host(trained(recipe, state, 2, 4))


ELSEWHERES = {
    "same": (2, {}),
    "fsdp2 x tensor2": (1, dict(mesh__fsdp=2, mesh__tensor=2)),
    "stage2": (1, STAGES),
    "interleaved": (1, STAGES | dict(pipeline__schedule="interleaved_1f1b")),
}


@pytest.mark.parametrize("name", ELSEWHERES)
def test_masks_go_on_elsewhere(saved, name):
    """Bit for bit, and the run goes on as it would have."""
    folder, own, at_two, at_end = saved
    num, values = ELSEWHERES[name]
    recipe, state, first, _ = resumed(folder, num, **PRUNED, **values)
    assert first == 2
    assert_same(by_depth(recipe, state), trees.named(at_two.extra[masks.NAME].masks))
    total = sum(mask.size for mask in by_depth(recipe, state).values())
    assert pruned_and_zero(recipe, state) == total // 2
    for leaf in trees.named(state.extra[masks.NAME].masks).values():
        assert leaf.dtype == bool
    wanted = trees.named(recipe.abstract.extra)
    for place, leaf in trees.named(state.extra).items():
        assert leaf.sharding.is_equivalent_to(wanted[place].sharding, leaf.ndim), place
    after = trained(recipe, state, 2, 4)
    assert pruned_and_zero(recipe, after) == total // 2
    assert float(after.extra[masks.NAME].sparsity) == 0.5
    assert_close(runs.in_order(recipe, after.params), runs.in_order(own, at_end.params), ELSEWHERE)


def test_a_dense_run_begins_to_prune(tmp_path):
    """Where the schedule is still to come; after it, it would prune nothing."""
    save(tmp_path, 1, 1, **DENSE)
    recipe, state, _, _ = resumed(tmp_path, 1, **PRUNED)
    assert all(mask.all() for mask in by_depth(recipe, state).values())
    save(tmp_path, 3, 1, **DENSE)
    with pytest.raises(ValueError, match=r"the schedule of the config ends at step 2"):
        resumed(tmp_path, 1, **PRUNED)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (DENSE, "by which pruned weights would be trained again"),
        (PRUNED | dict(pruning__products=("mlp",)), "pruning.products"),
        (PRUNED | dict(pruning__method="movement"), "pruning.method='movement'"),
    ],
    ids=["off", "other products", "other method"],
)
def test_masks_are_not_lost(saved, values, words):
    with pytest.raises(ValueError, match=words):
        resumed(saved[0], 2, **values)


def test_fixed_masks_go_on(saved):
    """With the schedule over, a run may go on with the masks that it has."""
    recipe, state, _, _ = resumed(saved[0], 2, **FIXED, start_from=str(saved[0]))
    assert_same(by_depth(recipe, state), trees.named(saved[2].extra[masks.NAME].masks))


def test_early_weights_with_masks_of_a_later_run(saved, tmp_path):
    """The lottery ticket: the first weights of a seed, and late rewinding: those of a step."""
    folder, _, at_two, _ = saved
    found = trees.named(at_two.extra[masks.NAME].masks)
    recipe, state, first, said = resumed(
        tmp_path / "ticket", 1, **FIXED, pruning__masks_from=f"{folder}@2"
    )
    assert first == 0 and "pruned as" in said
    assert_same(by_depth(recipe, state), found)
    assert np.isclose(state.extra[masks.NAME].sparsity, 0.5)
    wanted = trees.named(host(recipe.init(0).params))
    wanted |= {name: wanted[name] * mask for name, mask in found.items()}
    assert_same(trees.named(host(state.params)), wanted)
    after = trained(recipe, state, 0, 2)
    assert_same(by_depth(recipe, after), found)
    assert pruned_and_zero(recipe, after) == sum((~mask).sum() for mask in found.values())


def test_zeros_of_the_start_stay(saved, tmp_path):
    """A model that was pruned elsewhere has no masks beside its zeros."""
    folder, _, at_two, _ = saved
    recipe, state, _, _ = resumed(tmp_path, 1, **FIXED, start_from=str(folder))
    assert_same(by_depth(recipe, state), trees.named(at_two.extra[masks.NAME].masks))
    with pytest.raises(ValueError, match="has no mask of"):
        resumed(tmp_path / "other", 1, **FIXED, pruning__masks_from=str(tmp_path_without(tmp_path)))


def tmp_path_without(tmp_path):
    """A run that prunes nothing."""
    save(tmp_path / "dense", 1, 1, **DENSE)
    return tmp_path / "dense"
