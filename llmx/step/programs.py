"""The compiled programs of a run: the train step of each phase, and what follows a step."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from llmx.contract import Batch, State, Strategy


@dataclasses.dataclass
class Programs:
    """The train step of each phase, and what replicas synchronize between steps (`llmx.sync`)."""

    strategy: Strategy
    steps: dict[str, Callable]
    outer: dict[tuple[int, ...], Callable]
    freeze_step: int = -1
    aside: Callable = contextlib.nullcontext  # a context in which replicas wait for other programs

    def phase(self, step: int) -> str:
        return self.strategy.timetable.phase_of(step, self.freeze_step)

    def __call__(self, step: int, state: State, batch: Batch) -> tuple[State, Any]:
        """The state after step number `step`, and its report."""
        phase, previous = self.phase(step), self.phase(max(step - 1, 0))
        if phase != previous:
            state = self.strategy.enter(state, previous, phase)
        state, report = self.steps[phase](state, batch)
        if fragments := self.strategy.timetable.fragments_after(step):
            with self.aside("exchange") if self.strategy.waits else contextlib.nullcontext():
                state = self.outer[fragments](state)
        return state, report
