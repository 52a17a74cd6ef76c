"""A window of steps that jax.profiler records into WORKDIR/profile."""

from collections.abc import Callable
from typing import Any

import jax

from llmx.runtime import launch
from llmx.runtime.auxiliary import Auxiliary


class Profile:
    """Starts and stops the profiler around the steps of a window; where it fails there is none.

    `config`: the section `profile`, first_step (counted from 1; 0 = no profile) and num_steps.
    """

    def __init__(self, config: Any, workdir: str, *, log: Callable[[str], None] = launch.log):
        self._auxiliary = Auxiliary("the profile", log=log)
        self.first, self.num = config.first_step, config.num_steps
        self.directory, self.running = f"{workdir}/profile", False

    def before(self, step: int) -> None:
        if self.first and step == self.first:
            options = jax.profiler.ProfileOptions()
            # The tracer of Python calls hooks into all threads, and crashes on one that is ending.
            options.python_tracer_level = 0
            start = lambda: jax.profiler.start_trace(self.directory, profiler_options=options)  # noqa: E731
            self.running = self._auxiliary(start, last=True)

    def ends(self, step: int) -> bool:
        return self.running and step >= self.first + self.num - 1

    def close(self) -> None:
        if self.running:
            self.running = False
            self._auxiliary(jax.profiler.stop_trace, last=True)
