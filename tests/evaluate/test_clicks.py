"""Measures of predicted clicks equal their definitions, in whatever batches records come."""

import math

import numpy as np
import pytest

from llmx.evaluate import clicks


def defined_auc(odds, labels):
    """Over all pairs of a click and another record; ties are half."""
    above = odds[labels][:, None] > odds[~labels]
    equal = odds[labels][:, None] == odds[~labels]
    return (above + 0.5 * equal).mean()


def records(number, *, ties, seed=0):
    rng = np.random.default_rng(seed)
    odds = rng.standard_normal(number).astype(np.float32)
    if ties:
        odds = np.round(odds, 0 if ties == "many" else 1)
    return odds, rng.random(number) < 1 / (1 + np.exp(-odds))


def measured(odds, labels):
    scores = clicks.Scores()
    scores.add(odds, labels, np.ones(len(odds)))
    return scores.result()


@pytest.mark.parametrize("ties", ["", "some", "many"])
def test_auc_is_its_definition(ties):
    odds, labels = records(700, ties=ties)
    assert measured(odds, labels)["auc"] == pytest.approx(defined_auc(odds, labels), abs=1e-12)


def test_auc_of_orders_that_are_known():
    odds, labels = np.arange(6, dtype=np.float32), np.array([0, 0, 0, 1, 1, 1])
    assert measured(odds, labels)["auc"] == 1
    assert measured(-odds, labels)["auc"] == 0
    assert measured(0 * odds, labels)["auc"] == 0.5
    assert measured(np.array([-0.0, 0.0], np.float32), np.array([1, 0]))["auc"] == 0.5


def test_whole_numbers_beyond_64_bits_are_exact():
    huge = 4_000_000_000
    counts = clicks.Counts(
        np.array([-1, 0, 1], np.float32), np.array([huge, 0, huge]), np.array([0, 2 * huge, 0])
    )
    assert clicks.measures(counts)["auc"] == 0.5


def test_log_loss_and_calibration_are_their_definitions():
    odds, labels = records(900, ties="")
    found, wide = measured(odds, labels), odds.astype(np.float64)
    predicted = 1 / (1 + np.exp(-wide))
    nats = -np.log(np.where(labels, predicted, 1 - predicted)).mean()
    share = labels.mean()
    entropy = -share * math.log(share) - (1 - share) * math.log(1 - share)
    assert found["log_loss"] == pytest.approx(nats, rel=1e-12)
    assert found["normalized_entropy"] == pytest.approx(nats / entropy, rel=1e-12)
    assert found["calibration"] == pytest.approx(predicted.sum() / labels.sum(), rel=1e-12)
    order = np.argsort(odds)
    bins = np.split(order, clicks.BINS)  # 90 records each
    error = np.mean([abs(predicted[one].mean() - labels[one].mean()) for one in bins])
    assert found["calibration_error"] == pytest.approx(error, rel=1e-9)
    assert found["num_records"] == 900


def test_calibration_says_how_far_predictions_are_off():
    odds, labels = records(20_000, ties="")
    right, high = measured(odds, labels), measured(odds + 1, labels)
    assert right["calibration"] == pytest.approx(1, abs=0.02)
    assert high["calibration"] > 1.2 and high["calibration_error"] > 0.15
    assert right["calibration_error"] < 0.02 and high["auc"] == pytest.approx(
        right["auc"], abs=1e-6
    )


@pytest.mark.parametrize("waiting", [10, 1 << 20])
def test_batches_in_any_order_and_with_padding_give_the_same(monkeypatch, waiting):
    monkeypatch.setattr(clicks, "_WAITING", waiting)
    odds, labels = records(500, ties="some")
    scores, rng = clicks.Scores(), np.random.default_rng(1)
    for chosen in np.array_split(rng.permutation(500), 13):
        padded = np.concatenate([odds[chosen], [np.nan, 9]])
        weights = np.concatenate([np.ones(len(chosen)), [0, 0]])
        scores.add(padded[:, None], np.concatenate([labels[chosen], [1, 0]])[:, None], weights)
    assert scores.result() == measured(odds, labels)


def test_what_is_not_defined_is_nan():
    assert math.isnan(clicks.Scores().result()["log_loss"])
    only = measured(np.array([0.0, 1.0], np.float32), np.array([0, 0]))
    assert math.isnan(only["auc"]) and math.isnan(only["calibration"])
    assert only["log_loss"] == pytest.approx((math.log(2) + math.log1p(math.e)) / 2)


def test_nan_odds_are_an_error():
    with pytest.raises(ValueError, match="1 of 2 predicted odds are NaN: the model has diverged"):
        clicks.Scores().add(np.array([0, np.nan]), np.array([0, 1]), np.ones(2))
