"""Spikes of the loss and of the gradient norm, told apart from noise by a running median.

A number spikes where it lies many deviations above the median of the steps before; the deviation is
1.4826 times the median distance from the median (MAD), which for a normal distribution is its
standard deviation, and which earlier spikes do not move. Nothing is done about a spike: the guard
decides about updates.
"""

import bisect
import collections
import math
from typing import NamedTuple

WINDOW, FEWEST = 128, 32  # steps that the median is taken over, and that it needs
DEVIATION = 1.4826  # of a normal distribution, over its MAD
# A deviation counts as at least this share of the median: a loss on a plateau hardly varies.
LEAST_SHARE = {"loss": 0.005, "grad_norm": 0.1}
TELL_AGAIN = 100  # steps after which spikes that go on are told again


class Spike(NamedTuple):
    """A step with a spike."""

    scalars: dict[str, float]  # each spiking number, its median, and how many deviations it is off
    text: str  # to be shown, or "" where that was done lately


class Spikes:
    """Watches one run, step by step."""

    def __init__(self, deviations: float):
        """deviations: above the median, that make a spike; 0 = never."""
        self._deviations = deviations
        self._watched = {name: _Window() for name in LEAST_SHARE} if deviations else {}
        self._told = -math.inf

    def look(self, step: int, scalars: dict[str, float]) -> Spike | None:
        """The spike in the numbers of this step; then they count among those before the next."""
        found, texts = {}, []
        for name, window in self._watched.items():
            value = scalars.get(name, math.nan)
            if not math.isfinite(value):  # the guard tells of it
                continue
            if len(window.recent) >= FEWEST:
                median, deviation = window.median_and_deviation()
                deviation = max(deviation, LEAST_SHARE[name] * abs(median), 1e-30)
                off = (value - median) / deviation
                if off > self._deviations:
                    found |= {name: value, f"{name}_median": median, f"{name}_deviations": off}
                    texts.append(f"{name} {value:.4g} against a running median of {median:.4g}")
            window.add(value)
        if not found:
            return None
        text = ""
        if step - self._told >= TELL_AGAIN:
            self._told, text = step, f"step {step}: spike: {', '.join(texts)}"
        return Spike(found, text)


class _Window:
    """The last numbers, in order of time and of size."""

    def __init__(self):
        self.recent, self._sorted = collections.deque(), []

    def add(self, value: float):
        if len(self.recent) == WINDOW:
            oldest = self.recent.popleft()
            del self._sorted[bisect.bisect_left(self._sorted, oldest)]
        self.recent.append(value)
        bisect.insort(self._sorted, value)

    def median_and_deviation(self) -> tuple[float, float]:
        middle = len(self._sorted) // 2
        median = self._sorted[middle]
        distances = sorted(abs(value - median) for value in self._sorted)
        return median, DEVIATION * distances[middle]
