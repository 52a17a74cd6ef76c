"""Generated records follow the law that they are said to follow."""

import numpy as np
import pytest

from llmx.data.records import generated
from llmx.evaluate import clicks

NUMBER = 60_000


@pytest.fixture(scope="module", params=generated.PREFIXES)
def drawn(request):
    law = generated.parse(f"{request.param}{NUMBER}")
    return law, *generated.shard(law, 0)


def test_the_same_shard_is_the_same_and_others_are_others(drawn, monkeypatch):
    law, chunk, _ = drawn
    monkeypatch.setattr(generated, "SHARD_RECORDS", 1000)
    one, again, other = (generated.shard(law, number)[0] for number in (3, 3, 4))
    for left, right in zip(one, again, strict=True):
        np.testing.assert_array_equal(left, right)
    assert (one.ids != other.ids).any() and (one.labels != other.labels).any()
    reseeded, _ = generated.shard(generated.Law(law.kind, NUMBER, 1), 3)
    assert (one.ids != reseeded.ids).any()
    assert len(chunk.labels) == NUMBER


def test_the_last_shard_has_what_is_left(monkeypatch):
    monkeypatch.setattr(generated, "SHARD_RECORDS", 100)
    law = generated.parse("generated:250")
    assert [len(generated.shard(law, at)[0].labels) for at in range(law.num_shards)] == [
        100, 100, 50,
    ]  # fmt: skip


def test_ids_are_those_of_the_schema(drawn):
    law, chunk, _ = drawn
    for feature in law.schema.features:
        ids = chunk.ids[:, law.schema.slices[feature.name]]
        assert ids.min() >= -1 and ids.max() < feature.rows
    assert chunk.dense.dtype == np.float32 and chunk.ids.dtype == np.int32
    assert chunk.dense.min() >= 0 and np.isfinite(chunk.dense).all()


def test_frequencies_fall_as_zipf_says():
    law = generated.parse("generated:200000")
    chunk, _ = generated.shard(law, 0)
    at = law.schema.slices["C16"]
    counts = np.sort(np.unique(chunk.ids[:, at], return_counts=True)[1])[::-1]
    ranks = np.arange(4, 300)  # steps of whole numbers are small there, and counts large
    slope = np.polyfit(np.log(ranks + 1), np.log(counts[ranks]), 1)[0]
    assert slope == pytest.approx(-1.2, abs=0.08)
    assert len(counts) > 15_000  # and a long tail


def test_odds_are_calibrated_and_clicks_are_a_quarter(drawn):
    _, chunk, odds = drawn
    scores = clicks.Scores()
    scores.add(odds, chunk.labels, np.ones(NUMBER))
    found = scores.result()
    assert chunk.labels.mean() == pytest.approx(generated.MEAN_CLICKS, abs=0.01)
    assert found["calibration"] == pytest.approx(1, abs=0.02)
    assert found["calibration_error"] < 0.01
    assert 0.78 < found["auc"] < 0.9


def test_what_decides_most_is_not_in_single_features():
    """The best sum of terms of single features, fitted to the log odds themselves, misses most of
    them where pairs decide; a table of a planted pair's types has the pair's part whole."""
    law = generated.parse("generated:60000")
    chunk, odds = generated.shard(law, 0)
    left = odds - odds.mean()
    total = left.var()
    for _ in range(3):  # backfitting, by each feature's id
        for feature in law.schema.features:
            ids = chunk.ids[:, law.schema.slices[feature.name].start] + 1
            if feature.rows > 20_000:
                continue  # each id is nearly alone there: its mean is the record's own odds
            sums = np.bincount(ids, left)
            left = left - (sums / np.maximum(np.bincount(ids), 1))[ids]
    assert left.var() > 0.4 * total


def test_an_item_is_clicked_where_its_type_was_taken_lately():
    law = generated.parse(f"{generated.PREFIXES[1]}20000")
    chunk, odds = generated.shard(law, 0)
    assert law.schema.tables == {"user": 50_000, "item": 200_000}
    history = chunk.ids[:, law.schema.slices["history"]]
    lengths = (history >= 0).sum(axis=1)
    assert (history[:, 0] >= 0).all() and lengths.max() == 20
    assert ((history >= 0) == (np.arange(20) < lengths[:, None])).all()
    # But for the number there are two odds, 3 apart. The type is not in the ids, but those that
    # took the item itself took its type.
    rest = odds - 0.3 * chunk.dense[:, 0]
    high = rest > rest.mean()
    assert np.ptp(rest[high]) < 1e-5 and np.ptp(rest[~high]) < 1e-5
    assert rest[high].mean() - rest[~high].mean() == pytest.approx(3, abs=1e-5)
    item = chunk.ids[:, law.schema.slices["item"]]
    latest = np.arange(20) >= lengths[:, None] - 8
    taken = ((history == item) & latest).any(axis=1)
    assert taken.sum() > 500 and high[taken].all() and not high.all()


@pytest.mark.parametrize(
    "source", ["generated:", "generated:x", "generated:-1", "generated:0", "generated:5:",
               "generated:9:99999999999"],
)  # fmt: skip
def test_sources_that_are_no_law(source):
    if source == "generated:5:":
        assert generated.parse(source).seed == 0
        return
    with pytest.raises(ValueError, match=r"is no number of records|records number from 1"):
        generated.parse(source)
