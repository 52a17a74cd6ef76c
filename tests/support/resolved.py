"""Resolved configs for the planner's tests."""

import math

from llmx import config
from llmx.config import Config, checks


def resolved(run: Config | None = None, **keys) -> Config:
    """`run`, or the default config, with these values ("__" for "."), on as many devices as its
    mesh has. `run` is changed."""
    run = run or config.default()
    for key, value in keys.items():
        config.set_value(run, key.replace("__", "."), value)
    mesh = (size for size in vars(run.mesh).values() if isinstance(size, int) and size > 0)
    return checks.resolve(run, math.prod(mesh))
