"""Divergence: when a run counts as diverged, where it goes back to, and what it changes then.

A rollback goes back to the last checkpoint from before the loss rose, skips the batches that were
taken since, and lowers the learning rate. What it did is written into the config (`rollback.at`,
`rollback.skipped`), so that config and seed still define every step of the run.

All decisions follow from the reports of steps, which all processes have, and from numbers that are
saved with each checkpoint: every process decides alike, and so does a run that was killed.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from llmx.runtime import bounds
from llmx.runtime.bounds import bounded

# A rise is also this many standard deviations of the smoothed loss: small batches are noisy.
_DEVIATIONS = 8
# A loss within this part of a rise has not begun to rise.
_CALM = 0.25
# Windows in which the best loss moves up to a loss that stays higher, as on other data.
_FORGETS = 40
_USUAL_RISE = 1.0


@dataclasses.dataclass
class RollbackConfig:
    """What a run does that diverges: the guard stops it, or its loss rises and stays high."""

    # go back to before the loss rose at most so often; 0 = never: the run stops
    at_most: int = bounded(0, at_least=0, at_most=1000, remedy="0 stops the run instead")
    # nats per token above its best that the smoothed loss may be; 0 = only the guard is asked
    rise: float = bounded(_USUAL_RISE, at_least=0, at_most=1000, remedy="0 for off")
    # steps in a row above that, to count as diverged; the loss is smoothed over half of them
    window: int = bounded(50, at_least=1, at_most=1_000_000, needs={"rollback.rise": {"not": (0,)}})
    # of the learning rate, at each rollback
    rate_factor: float = bounded(0.5, above=0, at_most=1, needs={"rollback.at_most": {"not": (0,)}})
    # the rollbacks of this run, filled in by itself: steps gone back to
    at: tuple[int, ...] = ()
    skipped: tuple[int, ...] = ()  # and how many batches were left out at each


def problems(config: RollbackConfig) -> list[str]:
    """All that is wrong with the section, each with its remedy."""
    found = bounds.problems(config, "rollback.")
    if len(config.at) != len(config.skipped):
        found.append(
            f"rollback.at={tuple(config.at)} and rollback.skipped={tuple(config.skipped)} are of "
            "different length: give both for each rollback"
        )
    for name in ("at", "skipped"):
        if any(value < 0 for value in vars(config)[name]):
            found.append(f"rollback.{name}={tuple(vars(config)[name])} has a number below 0")
    return found


def batch_of(config: RollbackConfig, step: int) -> int:
    """The batch of step number `step`, both counted from 0."""
    pairs = zip(config.at, config.skipped, strict=True)
    return step + sum(skipped for at, skipped in pairs if at <= step)


def boundaries(config: RollbackConfig) -> dict[int, float]:
    """{step: factor of the learning rate from there on}."""
    return {at: config.rate_factor ** config.at.count(at) for at in config.at}


def with_rollback(config: RollbackConfig, *, step: int, noticed: int) -> RollbackConfig:
    """The section after one more rollback: to `step`, of a run of which `noticed` steps were taken.

    A rollback to before an earlier one takes that one along: what it skipped stays skipped.
    """
    at = (*(min(before, step) for before in config.at), step)
    return dataclasses.replace(config, at=at, skipped=(*config.skipped, noticed - step))


def abandoned_at(saved: Mapping[str, Any], config: RollbackConfig, step: int) -> int | None:
    """The step of the rollback by which a checkpoint of `step` was abandoned: it was saved after
    that step, and without that rollback. None: it was not.

    saved: the section `rollback` of the config that the checkpoint was saved with.
    """
    had = list(zip(saved.get("at", ()), saved.get("skipped", ()), strict=True))
    lacking = []
    for pair in zip(config.at, config.skipped, strict=True):
        if pair in had:
            had.remove(pair)
        elif pair[0] < step:
            lacking.append(pair[0])
    return min(lacking, default=None)


def target(steps: Sequence[int], *, trusted: int, every: int) -> int | None:
    """The checkpoint to go back to: the newest of `steps` that is not after step `trusted`.

    0, the beginning, where none can be so old; None where there was one and it is deleted.
    """
    if before := [step for step in steps if step <= trusted]:
        return max(before)
    return 0 if every == 0 or trusted < every else None


def refusal(config: RollbackConfig, step: int | None) -> str:
    """Why the run does not go back to `step`; "" if it does."""
    if not config.at_most:
        return "rollback.at_most=0, so it does not go back by itself"
    if len(config.at) >= config.at_most:
        return f"It went back rollback.at_most={config.at_most} times already"
    if step is None:
        return "No checkpoint is left from before the loss rose"
    return ""


def rollback_text(config: RollbackConfig, diverged: "Diverged") -> str:
    """The last rollback of the section, in a line."""
    step, skipped = config.at[-1], config.skipped[-1]
    first = batch_of(config, step) - skipped
    rate = math.prod(boundaries(config).values())
    return (
        f"{diverged}: rollback {len(config.at)} of {config.at_most}: back to step {step}, without "
        f"batches {first} to {first + skipped - 1}, with the learning rate times {rate:g}"
    )


def remedy(config: RollbackConfig, step: int | None, others: str) -> str:
    """What to do about a run that stopped; `others` is one more thing that can be done."""
    times = max(2, 2 * config.at_most)
    back = "no checkpoint is from before that: raise checkpoint.keep_last, and start another run"
    if step is not None:
        back = f"go back to before it, --config.resume_step={step}"
        if step == 0:
            back = "begin in another workdir"
    return (
        f"Look at its data; {back}, with a lower optimizer.learning_rate or clip_norm; or let "
        f"--config.rollback.at_most={times} do so; or {others}; then run again to resume"
    )


class Diverged(Exception):
    """The run cannot go on from its present state.

    noticed: steps taken; trusted: the newest step whose state is from before the loss rose.
    """

    def __init__(self, cause: str, *, noticed: int, trusted: int):
        super().__init__(cause)
        self.noticed, self.trusted = noticed, trusted


class LossWatch:
    """Tells from the losses of a run's steps whether it diverges, and since when."""

    def __init__(self, config: RollbackConfig, *, first: int, saved: Mapping[str, Any] | None):
        """first: steps taken before; saved: what `numbers` gave then."""
        self._rise, self._window = config.rise, config.window
        self._horizon = max(1, config.window // 2)
        self._count, self._last, self._smoothed, self._variance = 0, 0.0, 0.0, 0.0
        self._best, self._above, self._calm = math.inf, 0, first
        if saved:
            self._count, self._above, self._calm = (
                int(saved[name]) for name in ("count", "above", "calm")
            )
            self._last, self._smoothed, self._variance = (
                float(saved[name]) for name in ("last", "smoothed", "variance")
            )
            self._best = math.inf if saved["best"] is None else float(saved["best"])
        if self._above >= self._window:
            self._above = 0  # it was stopped for this, and is started again all the same

    def numbers(self) -> dict[str, Any]:
        """For the checkpoint of this step: from these the watch goes on."""
        return {
            "count": self._count, "above": self._above, "calm": self._calm,
            "last": self._last, "smoothed": self._smoothed, "variance": self._variance,
            "best": None if math.isinf(self._best) else self._best,
        }  # fmt: skip

    @property
    def trusted(self) -> int:
        """The newest step whose state is from before the loss rose, if it has."""
        # A step's loss is that of the state before it, and smoothing is late by the horizon.
        return max(0, self._calm - self._horizon)

    def look(self, step: int, loss: float) -> Diverged | None:
        """As `see`; what to raise if the run has diverged."""
        cause = self.see(step, loss)
        return Diverged(cause, noticed=step, trusted=self.trusted) if cause else None

    def see(self, step: int, loss: float) -> str:
        """Takes the loss of step number `step`, counted from 1; why the run has diverged, or ""."""
        self._count += 1
        change, self._last = loss - self._last if self._count > 1 else 0.0, loss
        self._smoothed += (loss - self._smoothed) / min(self._count, self._horizon)
        if self._count < self._horizon:
            self._calm = step
            return ""
        if self._smoothed < self._best:
            self._best = self._smoothed
        else:
            self._best += (self._smoothed - self._best) / (_FORGETS * self._window)
        # Of the smoothed loss, from changes between neighbors: a loss that falls is not noisy.
        deviation = math.sqrt(self._variance / (2 * self._horizon - 1))
        level = max(self._rise or _USUAL_RISE, _DEVIATIONS * deviation)
        height = self._smoothed - self._best
        if height <= _CALM * level:
            self._calm = step
            weight = 1 / min(self._count, 10 * self._window)
            self._variance += weight * (change * change / 2 - self._variance)
        self._above = self._above + 1 if height > level else 0
        if not self._rise or self._above < self._window:
            return ""
        return (
            f"step {step}: the loss, {self._smoothed:.3f} smoothed, has been {height:.2f} nats "
            f"above its best for {self._above} steps (rollback.rise={self._rise:g})"
        )
