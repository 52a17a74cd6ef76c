"""The compiled programs of a run: a train step for each phase, and what runs between steps."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax

from llmx.contract import Batch, State
from llmx.step import step as step_lib
from llmx.step.step import Recipe


@dataclasses.dataclass
class Programs:
    """The train step of each phase, what replicas synchronize between steps (`llmx.sync`), and the
    programs of constraints."""

    recipe: Recipe
    steps: dict[str, Callable]
    outer: dict[tuple[int, ...], Callable]
    between: dict[str, Callable]
    freeze_step: int = -1

    def phase(self, step: int) -> str:
        return self.recipe.strategy.timetable.phase_of(step, self.freeze_step)

    def __call__(self, step: int, state: State, batch: Batch) -> tuple[State, Any]:
        """The state after step number `step`, and its report."""
        phase, previous = self.phase(step), self.phase(max(step - 1, 0))
        if phase != previous:
            state = self.recipe.strategy.enter(state, previous, phase)
        state, report = self.steps[phase](state, batch)
        if fragments := self.recipe.strategy.timetable.fragments_after(step):
            state = self.outer[fragments](state)
        for name in self.recipe.between_after(step):
            state = self.between[name](state)
        return state, report


def compile_all(
    recipe: Recipe, state: State, first: int, log: Callable[[str], None]
) -> Programs:  # fmt: skip
    """The compiled programs of the steps from `first` on, and which of them runs when."""
    strategy, timetable = recipe.strategy, recipe.strategy.timetable
    freeze_step = int(jax.jit(strategy.scalars)(state).get("freeze_step", -1))
    phases = timetable.phases_from(first, freeze_step)
    steps = {phase: compile_step(recipe, log, phase) for phase in phases}
    numbers = range(first, timetable.total_steps)
    fragments = {timetable.fragments_after(number) for number in numbers} - {()}
    names = {name for number in numbers for name in recipe.between_after(number)}

    def compiled(program: Callable) -> Callable:
        return program.lower(recipe.abstract).compile()

    with jax.set_mesh(recipe.mesh):
        outer = {each: compiled(strategy.outer[each]) for each in sorted(fragments)}
        between = {name: compiled(recipe.between[name]) for name in sorted(names)}
    return Programs(recipe, steps, outer, between, freeze_step)


def compile_step(recipe: Recipe, log: Callable[[str], None], phase: str = "mean") -> Callable:
    """The compiled train step; logs how long that took and what a device must hold."""
    begun = time.perf_counter()
    with jax.set_mesh(recipe.mesh):
        lowered = step_lib.make_train_step(recipe, phase).lower(
            recipe.abstract, recipe.abstract_batch
        )
        traced = time.perf_counter()
        compiled = lowered.compile()
    memory = compiled.memory_analysis()
    mib = lambda size: f"{size / 2**20:,.1f} MiB"  # noqa: E731
    seconds = time.perf_counter() - traced
    head = "step:  " if len(recipe.strategy.phases) == 1 else f"step:  {phase}: "
    gathered = recipe.loss.gathered_bytes() if recipe.loss.gather == "step" else 0
    log(
        f"{head}traced in {traced - begun:.1f} s, compiled in {seconds:.1f} s; "
        f"each device holds {mib(memory.argument_size_in_bytes)} of state and batch and "
        f"{mib(memory.temp_size_in_bytes)} of temporaries"
        + (f", {mib(gathered)} of them weights gathered for the whole step" if gathered else "")
    )
    return compiled
