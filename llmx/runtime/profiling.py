"""A window of steps that jax.profiler records into WORKDIR/profile."""

from typing import Any

import jax


class Profile:
    """Starts and stops the profiler around the steps of a window.

    `config`: the section `profile`, first_step (counted from 1; 0 = no profile) and num_steps.
    """

    def __init__(self, config: Any, workdir: str):
        self.first, self.num = config.first_step, config.num_steps
        self.directory, self.running = f"{workdir}/profile", False

    def before(self, step: int) -> None:
        if self.first and step == self.first:
            options = jax.profiler.ProfileOptions()
            # The tracer of Python calls hooks into all threads, and crashes on one that is ending.
            options.python_tracer_level = 0
            jax.profiler.start_trace(self.directory, profiler_options=options)
            self.running = True

    def ends(self, step: int) -> bool:
        return self.running and step >= self.first + self.num - 1

    def close(self) -> None:
        if self.running:
            jax.profiler.stop_trace()
            self.running = False
