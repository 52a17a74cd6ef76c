"""How good predicted odds of clicks are: AUC, log loss, calibration; exact, over batches.

AUC is the probability that a click has higher odds than a record without one, ties counted half.
It needs all odds: they are kept as the distinct fp32 values, with how many clicks and others have
each, so that batches add up in any order to the same.
"""

import dataclasses
import math

import numpy as np

_WAITING = 1 << 20  # odds that are added before they are merged
BINS = 10  # of `calibration_error`


@dataclasses.dataclass(frozen=True)
class Counts:
    """Distinct log odds, ascending, and how many records of each label have them."""

    odds: np.ndarray  # fp32 [n]
    clicks: np.ndarray  # int64 [n]
    others: np.ndarray  # int64 [n]


class Scores:
    """The records of an evaluation so far."""

    def __init__(self):
        empty = np.zeros(0, np.int64)
        self._counts = Counts(np.zeros(0, np.float32), empty, empty)
        self._waiting: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, odds: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> None:
        """Adds records by their log odds and labels, 0 or 1; those of weight 0 are padding.

        Raises ValueError for odds that are NaN, of which no order is known.
        """
        chosen = np.asarray(weights).ravel() > 0
        odds = np.asarray(odds, np.float32).ravel()[chosen] + np.float32(0)  # -0 is 0
        if np.isnan(odds).any():
            raise ValueError(
                f"{int(np.isnan(odds).sum())} of {odds.size} predicted odds are NaN: the model has "
                "diverged; go back to an earlier checkpoint, or lower the learning rate"
            )
        self._waiting.append((odds, np.asarray(labels).ravel()[chosen] > 0))
        if sum(len(odds) for odds, _ in self._waiting) > _WAITING:
            self._merge()

    def _merge(self) -> None:
        odds, labels = (np.concatenate(parts) for parts in zip(*self._waiting, strict=True))
        old, self._waiting = self._counts, []
        values, place = np.unique(np.concatenate([old.odds, odds]), return_inverse=True)
        ones = np.concatenate([old.clicks, labels.astype(np.int64)])
        zeros = np.concatenate([old.others, (~labels).astype(np.int64)])
        clicks, others = np.zeros(len(values), np.int64), np.zeros(len(values), np.int64)
        np.add.at(clicks, place, ones)
        np.add.at(others, place, zeros)
        self._counts = Counts(values, clicks, others)

    def counts(self) -> Counts:
        """The records so far."""
        if self._waiting:
            self._merge()
        return self._counts

    def result(self) -> dict[str, float]:
        """See `measures`."""
        return measures(self.counts())


def measures(counts: Counts) -> dict[str, float]:
    """The measures of predictions.

    - "auc": nan where all labels are alike.
    - "log_loss": cross-entropy in nats per record.
    - "normalized_entropy": the log loss over that of predicting the share of clicks always (He et
      al., ADKDD 2014); below 1 the model knows something.
    - "calibration": predicted clicks over clicks; 1 is right.
    - "calibration_error": mean over records of |predicted - actual share of clicks| of the record's
      bin, of BINS bins of about equally many records.
    - "num_records".
    """
    clicks, others = int(counts.clicks.sum()), int(counts.others.sum())
    number = clicks + others
    found = dict.fromkeys(
        ("auc", "log_loss", "normalized_entropy", "calibration", "calibration_error"), math.nan
    )
    if number:
        odds = counts.odds.astype(np.float64)
        of_clicks, of_others = np.logaddexp(0, -odds), np.logaddexp(0, odds)
        nats = _sum(of_clicks, counts.clicks) + _sum(of_others, counts.others)
        predicted = np.exp(-of_clicks)
        found["log_loss"] = nats / number
        found["calibration_error"] = _calibration_error(counts, predicted)
    if clicks:
        found["calibration"] = float(predicted @ (counts.clicks + counts.others)) / clicks
    if clicks and others:
        share = clicks / number
        entropy = -share * math.log(share) - (1 - share) * math.log1p(-share)
        found["normalized_entropy"] = found["log_loss"] / entropy
        found["auc"] = _auc(counts, clicks, others)
    return found | {"num_records": number}


def _sum(nats: np.ndarray, numbers: np.ndarray) -> float:
    """Odds may be infinite, where no record has the other label."""
    there = numbers > 0
    return float(nats[there] @ numbers[there])


def _auc(counts: Counts, clicks: int, others: int) -> float:
    """Of whole numbers up to the last division, in Python's own where 64 bits may not hold them."""
    below = np.cumsum(counts.others) - counts.others
    if 2 * clicks * others < 1 << 63:
        twice = int(counts.clicks @ (2 * below + counts.others))
    else:
        pairs = zip(counts.clicks.tolist(), (2 * below + counts.others).tolist(), strict=True)
        twice = sum(one * other for one, other in pairs)
    return twice / (2 * clicks * others)


def _calibration_error(counts: Counts, predicted: np.ndarray) -> float:
    records = counts.clicks + counts.others
    number = records.sum()
    middle = np.cumsum(records) - records / 2
    bins = np.minimum((middle * BINS / number).astype(np.int64), BINS - 1)
    expected = np.bincount(bins, predicted * records, BINS)
    actual = np.bincount(bins, counts.clicks, BINS)
    return float(np.abs(expected - actual).sum() / number)
