"""Where a run begins: the newest checkpoint that is good, whatever devices each was saved on."""

import os
from pathlib import Path

import jax
import numpy as np
import pytest
from support.compare import assert_same
from support.resumes import DATA, opened, resumed, run_of, save

from llmx import config

ONE_BIT = dict(sync__strategy="one_bit", sync__warmup_steps=1)
DILOCO = dict(sync__strategy="diloco", sync__every=2, optimizer__ema_decay=0.0)


def tear_meta(workdir: Path, step: int):
    os.truncate(workdir / "checkpoints" / str(step) / "meta" / "metadata", 100)


@pytest.mark.parametrize("values", [dict(), ONE_BIT, DILOCO], ids=["mean", "one_bit", "diloco"])
def test_a_newest_checkpoint_without_meta_falls_back(tmp_path, values):
    wanted = save(tmp_path, 1, 4, **values)
    save(tmp_path, 2, 4, **values)
    tear_meta(tmp_path, 2)
    _, state, first, said = resumed(tmp_path, 4, **values)
    assert first == 1 and "set aside checkpoint 2 as 2.corrupt" in said
    assert_same(state, wanted)


def test_the_one_before_may_be_of_other_replicas(tmp_path):
    """What is done for another number of replicas is done for the checkpoint that is taken."""
    of_two = save(tmp_path, 1, 2, **ONE_BIT)
    of_four = save(tmp_path, 2, 4, **ONE_BIT)
    _, state, first, said = resumed(tmp_path, 4, **ONE_BIT)
    assert first == 2 and "converted to" not in said
    assert_same(state, of_four)
    tear_meta(tmp_path, 2)
    _, state, first, said = resumed(tmp_path, 4, **ONE_BIT)
    assert first == 1 and "converted to 4 replicas" in said
    assert_same((state.params, state.opt_state), (of_two.params, of_two.opt_state))


def test_the_tokens_of_a_round_that_has_begun_are_kept(tmp_path):
    """Replicas of another number share them."""
    by_tokens = DILOCO | dict(sync__by_tokens=True)
    _, recipe = run_of(tmp_path, 2, **by_tokens)
    state = recipe.init(0)
    tokens = jax.device_put(np.float32([100, 300]), state.sync.tokens.sharding)
    state = state._replace(sync=state.sync._replace(tokens=tokens))
    save(tmp_path, 1, 2, state=state, **by_tokens)
    _, found, _, _ = resumed(tmp_path, 2, **by_tokens)
    assert_same(found, state)
    _, found, _, said = resumed(tmp_path, 4, **by_tokens)
    np.testing.assert_array_equal(found.sync.tokens, [100] * 4)  # 400 in all
    assert "converted to 4 replicas" in said


def test_the_one_before_may_be_of_other_stages(tmp_path):
    periodic = dict(mesh__stage=2, batch__accumulation=4, pipeline__schedule="pipedream_2bw")
    wanted = save(tmp_path, 1, 1)
    save(tmp_path, 2, 2, **periodic)
    tear_meta(tmp_path, 2)
    _, state, first, said = resumed(tmp_path, 2, **periodic)
    assert first == 1 and "taken again" not in said
    assert_same(state.params, wanted.params)  # two stages of one layer each: in the same order
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(state.in_flight))


def test_without_a_good_checkpoint_all_are_named_and_left(tmp_path):
    save(tmp_path, 1, 2, **ONE_BIT)
    tear_meta(tmp_path, 1)
    with pytest.raises(ValueError, match=r"no good checkpoint in .*\n  1: its meta"):
        resumed(tmp_path, 2, **ONE_BIT)
    assert (tmp_path / "checkpoints" / "1").exists()


EXPERTS = dict(
    model__num_experts=4, model__experts_per_token=2, model__expert_dim=16, experts__bias_rate=0.01
)


@pytest.mark.parametrize(
    "to",
    [
        dict(mesh__expert=1),
        dict(mesh__expert=4),
        dict(mesh__expert=2, mesh__stage=2, batch__accumulation=2),
    ],
    ids=str,
)
def test_experts_move_to_other_devices(tmp_path, to):
    wanted = save(tmp_path, 1, 1, **EXPERTS, mesh__expert=2)
    _, state, first, _ = resumed(tmp_path, 1, **EXPERTS, **to)
    assert first == 1
    up = state.params["blocks"]["mlp"]["up"]
    assert up.sharding.shard_shape(up.shape)[1] == 4 // to["mesh__expert"]
    assert_same((state.params, state.opt_state), (wanted.params, wanted.opt_state))


SCALED = dict(loss_scale__kind="dynamic", loss_scale__initial=2.0**9)
PERIODIC = dict(mesh__stage=2, batch__accumulation=4, pipeline__schedule="pipedream_2bw")


def test_the_loss_scale_is_in_checkpoints(tmp_path):
    wanted = save(tmp_path, 1, 2, **SCALED)
    _, state, first, _ = resumed(tmp_path, 2, **SCALED | dict(loss_scale__initial=2.0**5))
    assert first == 1 and state.extra["loss_scale"].scale == 2.0**9
    assert_same(state, wanted)


def test_a_loss_scale_may_begin_end_and_change_between_runs(tmp_path):
    wanted = save(tmp_path, 1, 2)
    _, state, _, _ = resumed(tmp_path, 2, **SCALED)
    assert state.extra["loss_scale"].scale == 2.0**9
    assert_same(state._replace(extra=()), wanted)
    fixed = dict(loss_scale__kind="fixed", loss_scale__initial=2.0**7)
    wanted = save(tmp_path, 2, 2, **SCALED)
    _, state, first, _ = resumed(tmp_path, 2, **fixed)
    assert first == 2 and state.extra["loss_scale"].scale == 2.0**7
    assert state.extra["loss_scale"].scale.sharding == wanted.step.sharding
    _, state, first, _ = resumed(tmp_path, 2)
    assert first == 2 and state.extra == ()
    assert_same(state, wanted._replace(extra=()))


DELAYED = dict(precision="bf16", products__format="fp8", products__scaling="delayed")


def test_the_history_of_delayed_scaling_is_in_checkpoints(tmp_path):
    _, recipe = run_of(tmp_path, 2, **DELAYED)
    state = recipe.init(0)
    state = state._replace(extra=jax.tree.map(lambda leaf: leaf + 3, state.extra))
    wanted = jax.device_get(state.extra)
    save(tmp_path, 1, 2, state=state, **DELAYED)
    _, state, _, said = resumed(tmp_path, 2, **DELAYED)
    assert_same(state.extra, wanted)
    assert "anew" not in said
    _, state, first, said = resumed(tmp_path, 2, **DELAYED | dict(products__history=4))
    assert first == 1 and not np.any(state.extra["product_ranges"])
    assert "product_ranges of the checkpoint has another shape" in said


def test_a_batch_in_flight_without_its_scale_is_taken_again(tmp_path):
    save(tmp_path, 2, 2, **PERIODIC)
    _, state, first, said = resumed(tmp_path, 2, **PERIODIC | SCALED)
    assert first == 1 and "taken again" in said
    assert state.extra["loss_scale"].scale == 2.0**9
    save(tmp_path, 3, 2, **PERIODIC | SCALED)
    _, state, first, said = resumed(tmp_path, 2, **PERIODIC)
    assert first == 2 and "taken again" in said and state.extra == ()


def test_another_strategy_is_refused_and_the_checkpoint_left(tmp_path):
    save(tmp_path, 1, 2, **ONE_BIT)
    with pytest.raises(ValueError, match=r"sync\.strategy='one_bit' and the config gives 'diloco'"):
        resumed(tmp_path, 2, **DILOCO)
    assert (tmp_path / "checkpoints" / "1").exists()


@pytest.mark.parametrize(
    "before, warmup_steps, frozen",
    [
        (dict(), 1, True),
        (dict(), 2, False),  # before the first step of the run: `step.programs` does it
        (ONE_BIT | dict(sync__warmup_steps=3), 1, True),
        (ONE_BIT | dict(sync__warmup_steps=3), 4, False),
        (ONE_BIT | dict(sync__warmup_steps=1), 1, False),  # it was, in the run that was saved
    ],
)
def test_a_warm_up_that_now_ends_before_the_checkpoint_is_ended(
    tmp_path, before, warmup_steps, frozen
):
    """No step to come is the first one behind it, which would freeze the variance."""
    run, recipe = run_of(tmp_path, 2, **before)
    with opened(tmp_path) as checkpoints:
        state = recipe.init(0)
        head = state.opt_state[0]
        state = state._replace(
            opt_state=(head._replace(count=head.count + 2), *state.opt_state[1:])
        )
        meta = dict(fingerprint=DATA.fingerprint, batch_size=8, config=config.to_json(run))
        checkpoints.save(2, state, meta=meta, order=recipe.order)
    _, found, first, _ = resumed(tmp_path, 2, **ONE_BIT | dict(sync__warmup_steps=warmup_steps))
    assert first == 2 and int(found.sync.num_updates) == (2 if frozen else 0)
    assert_same((found.params, found.opt_state), (state.params, state.opt_state))


@pytest.mark.parametrize("values", [dict(), ONE_BIT, DILOCO], ids=["mean", "one_bit", "diloco"])
def test_every_replica_starts_with_the_parameters_of_another_run(tmp_path, values):
    wanted = save(tmp_path / "other", 3, 1)
    start_from = dict(start_from=str(tmp_path / "other"))
    _, state, first, _ = resumed(tmp_path / "new", 4, seed=1, **values, **start_from)
    assert first == 0
    assert_same(state.params, wanted.params)
    assert_same(state.ema, wanted.params if values is not DILOCO else ())
    if values is DILOCO:
        for own, want in zip(
            jax.tree.leaves(state.sync.params), jax.tree.leaves(wanted.params), strict=True
        ):
            assert_same([*np.asarray(own)], [np.asarray(want)] * 4)


def test_local_steps_are_not_lost_to_a_longer_warm_up(tmp_path):
    save(tmp_path, 2, 2, **DILOCO)
    with pytest.raises(ValueError, match=r"would be lost; set sync\.warmup_steps to at most 1"):
        resumed(tmp_path, 2, **DILOCO | dict(sync__warmup_steps=4))
    assert (tmp_path / "checkpoints" / "2").exists()


def test_the_mean_does_not_turn_into_local_steps(tmp_path):
    save(tmp_path, 2, 2)
    with pytest.raises(ValueError, match=r"optimizer state of its own: .*start_from="):
        resumed(tmp_path, 2, **DILOCO)
