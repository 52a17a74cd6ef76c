"""When a run counts as diverged, where it goes back to, and which batches it then takes."""

import math

import numpy as np
import pytest

from llmx.runtime import divergence
from llmx.runtime.divergence import LossWatch, RollbackConfig


def first_alarm(losses, **values):
    """(step, trusted step) where the watch says that the run diverges; (None, ...) if never."""
    watch = LossWatch(RollbackConfig(**values), first=0, saved=None)
    for step, loss in enumerate(losses, start=1):
        if watch.see(step, float(loss)):
            return step, watch.trusted
    return None, watch.trusted


STEPS = np.arange(20_000)
FALLING = 2 + 6 * np.exp(-STEPS / 300) + 2 * np.exp(-STEPS / 20_000)


def noisy(losses, deviation, seed=0):
    return losses + deviation * np.random.default_rng(seed).normal(size=len(losses))


@pytest.mark.parametrize("deviation", [0.0, 0.1, 0.5, 1.0])
def test_noise_is_no_divergence(deviation):
    assert first_alarm(noisy(FALLING, deviation))[0] is None


def test_what_recovers_or_stays_small_is_none():
    spikes, shifted = FALLING.copy(), FALLING.copy()
    for start in range(1000, 19_000, 500):
        spikes[start : start + 40] += 3 * np.exp(-np.arange(40) / 10)
    shifted[5000:] += 0.6
    for losses in (spikes, shifted):
        step, trusted = first_alarm(noisy(losses, 0.1))
        assert step is None and trusted > 19_900  # and the higher loss is the usual one by then


@pytest.mark.parametrize("deviation", [0.02, 0.3])
@pytest.mark.parametrize("height", [1.5, 4.0])
def test_a_rise_is_noticed_in_two_windows(height, deviation):
    risen = FALLING.copy()
    risen[5000:] += height
    step, trusted = first_alarm(noisy(risen, deviation))
    assert 5000 + 50 <= step <= 5000 + 100
    assert 5000 - 60 <= trusted < 5000  # of before it, and not long before


def test_a_slow_rise_is_noticed():
    risen = FALLING.copy()
    risen[5000:] += np.minimum(5, 0.005 * (STEPS[5000:] - 5000))
    step, trusted = first_alarm(noisy(risen, 0.05))
    assert step < 5400 and trusted <= 5000 + 60  # 0.3 nats at most
    assert first_alarm(noisy(risen, 0.05), rise=0.0)[0] is None


def test_the_watch_goes_on_from_a_checkpoint():
    """The same step and verdict, whenever the run was killed and resumed."""
    import json

    risen = FALLING[:1000].copy()
    risen[700:] += 3
    losses = noisy(risen, 0.2)
    wanted = first_alarm(losses)
    for stop in (0, 5, 690, 720):
        config = RollbackConfig()
        watch = LossWatch(config, first=0, saved=None)
        for step in range(1, stop + 1):
            assert not watch.see(step, float(losses[step - 1]))
        saved = json.loads(json.dumps(watch.numbers()))
        watch = LossWatch(config, first=stop, saved=saved)
        for step in range(stop + 1, 1001):
            if watch.see(step, float(losses[step - 1])):
                break
        assert (step, watch.trusted) == wanted


def test_a_run_that_was_stopped_and_started_again_has_another_window():
    config, watch = (
        RollbackConfig(window=4),
        LossWatch(RollbackConfig(window=4), first=0, saved=None),
    )
    losses = [2.0] * 10 + [9.0] * 20
    stopped = next(step for step, loss in enumerate(losses, start=1) if watch.see(step, loss))
    again = LossWatch(config, first=stopped, saved=watch.numbers())
    seen = [bool(again.see(stopped + number, 9.0)) for number in range(1, 5)]
    assert seen == [False, False, False, True]


def test_where_it_goes_back_to():
    assert divergence.target([100, 200, 300], trusted=250, every=100) == 200
    assert divergence.target([100, 200], trusted=200, every=100) == 200
    assert divergence.target([100], trusted=60, every=100) == 0  # none can be older
    assert divergence.target([300], trusted=250, every=100) is None  # deleted
    assert divergence.target([], trusted=250, every=0) == 0


def batches(config, steps):
    return [divergence.batch_of(config, step) for step in range(steps)]


def test_batches_and_rates_follow_from_the_config():
    once = divergence.with_rollback(RollbackConfig(), step=4, noticed=7)
    assert (once.at, once.skipped) == ((4,), (3,))
    assert batches(once, 7) == [0, 1, 2, 3, 7, 8, 9]
    later = divergence.with_rollback(once, step=6, noticed=8)
    assert batches(later, 8) == [0, 1, 2, 3, 7, 8, 11, 12]
    assert divergence.boundaries(later) == {4: 0.5, 6: 0.5}
    # Before the first: what that one left out stays left out.
    before = divergence.with_rollback(once, step=2, noticed=6)
    assert (before.at, before.skipped) == ((2, 2), (3, 4))
    assert batches(before, 4) == [0, 1, 9, 10]
    assert divergence.boundaries(before) == {2: 0.25}


def test_checkpoints_of_what_was_left_are_known():
    once = divergence.with_rollback(RollbackConfig(), step=4, noticed=7)
    plain, with_it = {"at": [], "skipped": []}, {"at": [4], "skipped": [3]}
    assert divergence.abandoned_at(plain, once, 6) == 4
    assert divergence.abandoned_at({}, once, 6) == 4  # of a version without rollbacks
    assert divergence.abandoned_at(plain, once, 4) is None
    assert divergence.abandoned_at(with_it, once, 6) is None
    twice = divergence.with_rollback(once, step=4, noticed=7)
    assert divergence.abandoned_at(with_it, twice, 6) == 4


def test_the_rate_is_lowered_from_there_on():
    from llmx.step import optimizers

    config = optimizers.OptimizerConfig(warmup_steps=2, learning_rate=1.0)
    plain = optimizers.make_schedule(config, total_steps=20)
    factors = divergence.boundaries(RollbackConfig(at=(5, 9), skipped=(1, 1)))
    scaled = optimizers.make_schedule(config, total_steps=20, factors=factors)
    for count in range(20):
        wanted = float(plain(count)) * 0.5 ** sum(at <= count for at in (5, 9))
        assert math.isclose(float(scaled(count)), wanted, rel_tol=1e-6)


def test_bad_records_are_told():
    found = divergence.problems(RollbackConfig(at=(3, -1), skipped=(2,)))
    assert len(found) == 2 and "different length" in found[0] and "below 0" in found[1]
