"""Training from a program or a notebook: `llmx.fit(config, callbacks=[...])`; docs/library.md.

It is the run of `python -m llmx.train` with a config in memory: the same loop, work directory,
checkpoints and resumption. What a program passes as an object stands in the table where a config
file would put it (`OPTIMIZERS`, `OF_TOKENS`, `OBJECTS`) as long as the run lasts.
"""

import argparse
import contextlib
import copy
import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from llmx import train
from llmx.config import Config
from llmx.contract import State
from llmx.data import objects
from llmx.model import adapters, losses, own
from llmx.model.training_loss import of_model
from llmx.runtime import exits, records
from llmx.runtime.caller import Caller, Record, name_of
from llmx.step import optimizers


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that has ended: all steps are taken, or it can be continued by the same call."""

    config: Config  # resolved
    state: State  # arrays on the run's mesh, after `step` steps
    step: int
    done: bool  # whether all steps are taken
    why: str  # it stopped before; "" where it is done
    callback_errors: Mapping[str, Exception]  # the first of each callback that failed, by name

    @property
    def workdir(self) -> pathlib.Path:
        """Checkpoints, metrics and all else that the run has written."""
        return pathlib.Path(self.config.workdir)

    @property
    def params(self) -> Any:
        """The parameters as a nested dict of arrays; their average where the run keeps one, and
        merged with adapters where these are what is trained. Of a model of your own a flat dict by
        path, which `own.tree` turns into what its `init` returns, while `fit` runs with it."""
        state, config = self.state, self.config.adapters
        if not config.rank:
            return of_model(state.averaged)
        merge = adapters.merged_on_mesh
        return adapters.merged(state.frozen, state.averaged, config, merge=merge)

    @property
    def history(self) -> list[Record]:
        """The records of metrics.jsonl, also of earlier calls; [] where that is not here."""
        path = self.workdir / records.RECORDS
        return list(map(_with_floats, records.read_records(path))) if path.exists() else []

    def curve(self, name: str = "loss", kind: str = "train") -> tuple[list[int], list[float]]:
        """(steps, values) of a number in the records of a kind, for a plot."""
        pairs = [(r["step"], r[name]) for r in self.history if r["kind"] == kind and name in r]
        return [step for step, _ in pairs], [value for _, value in pairs]


def fit(
    config: Config, *, callbacks: Sequence[Callable[[Record], Any]] = (),
    workdir: str | os.PathLike = "",
    optimizer: Callable | None = None, loss: Callable | None = None, dataset: Any = None,
    model: Any = None,
) -> Run:  # fmt: skip
    """Trains as the config says, or goes on with the run that is in its work directory.

    Args:
      config: as `get_config()` of a config file returns it; it is not changed.
      callbacks: functions of a record, see `llmx.runtime.caller`. An error in one becomes a
        warning, and `Run.callback_errors` has it; KeyboardInterrupt of one stops the run after the
        step that is under way.
      workdir: goes before that of the config.
      optimizer: (OptimizerConfig, schedule, axes) -> optax transformation, a row of `OPTIMIZERS`.
      loss: what a token adds to what is minimized, a row of `losses.OF_TOKENS`.
      dataset: gives the rows of each step, see `llmx.data.objects`.
      model: computes logits in the place of the decoder, see `llmx.model.own`.

    Ctrl-C and SIGTERM stop the run after a step, with a checkpoint; before the first step and the
    second time Ctrl-C raises KeyboardInterrupt. Raises ValueError for what is wrong with the
    config, the data, the checkpoint or the work directory, and `checkpointer.Halt` where the last
    checkpoint could not be written.
    """
    config = copy.deepcopy(config)
    config.workdir = str(workdir or config.workdir)
    if not config.workdir:
        raise ValueError("workdir='' names no folder for the run: fit(config, workdir='runs/mine')")
    if isinstance(callbacks, Mapping) or callable(callbacks):
        raise ValueError("callbacks must be a list of functions: fit(config, callbacks=[function])")
    if wrong := [callback for callback in callbacks if not callable(callback)]:
        raise ValueError(f"callbacks has {wrong[0]!r}, which is no function of a record")
    with contextlib.ExitStack() as registered:
        _register(registered, config, optimizer=optimizer, loss=loss, dataset=dataset,
                  model=model)  # fmt: skip
        args = argparse.Namespace(auto_mesh=False, check_determinism=False)
        caller = Caller(settings=lambda job, argv: (args, config, []), callbacks=tuple(callbacks))
        code = train.main([], caller)
    if code in (exits.REFUSED, exits.UNSAVED) or not caller.ended:
        error = caller.refused
        raise error if isinstance(error, BaseException) else ValueError(str(error))
    done = code == exits.DONE
    ended = {**caller.ended, "why": "" if done else caller.ended["why"]}
    return Run(**ended, done=done, callback_errors=caller.errors)


def _register(
    until: contextlib.ExitStack, config: Config, *, optimizer: Callable | None,
    loss: Callable | None, dataset: Any, model: Any,
) -> None:  # fmt: skip
    """Puts the objects into their tables, and their names into the config."""
    if optimizer is not None:
        if not callable(optimizer):
            raise ValueError(
                f"optimizer is a {type(optimizer).__name__}: give a function that makes it of the "
                "learning rate's schedule, as lambda config, schedule, axes: optax.sgd(schedule)"
            )
        config.optimizer.name = until.enter_context(_row(optimizers.OPTIMIZERS, optimizer))
    if loss is not None:
        if not callable(loss):
            raise ValueError(f"loss is a {type(loss).__name__}: give a function of (nats, log_z)")
        config.loss.of_tokens = until.enter_context(_row(losses.OF_TOKENS, loss))
    if dataset is not None:
        config.data.sources = (until.enter_context(_row(objects.OBJECTS, dataset)),)
    if model is not None:
        config.model.own = until.enter_context(_row(own.MODELS, model))


@contextlib.contextmanager
def _row(table: dict[str, Any], value: Any) -> Iterator[str]:
    """The name of a row that the table has inside."""
    name = objects.PREFIX + name_of(value if callable(value) else type(value)).strip("<>")
    table[name] = value
    try:
        yield name
    finally:
        del table[name]


def _with_floats(record: Record) -> Record:
    """As callbacks get it: numbers that are not finite stand as strings in the file."""
    finite = {"nan", "inf", "-inf"}
    return {
        name: float(value)
        if isinstance(value, str) and value in finite and name != "kind"
        else value
        for name, value in record.items()
    }
