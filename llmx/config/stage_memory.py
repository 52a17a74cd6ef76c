"""What a device of a pipeline holds at the peak of a step, counted without a compiler.

The peak is in a BACKWARD of the stage that keeps most microbatches, or in the loss. What comes and
goes in it depends on the program that XLA makes: `config.tick_memory`.
"""

import dataclasses
import math
from collections.abc import Iterator

from llmx.config import Config, tick_arrays, tick_memory, utilization
from llmx.config.tick_arrays import GRADIENT_BYTES, Ticks
from llmx.model import remat

# Of a chip's memory, where the config has no limit: within the first, or one layer in the second.
AUTOMATIC, AT_MOST = 2 / 3, 0.9


@dataclasses.dataclass(frozen=True)
class StageMemory:
    """Bytes of a device, by what they are for."""

    parameters: int
    optimizer: int  # moments; the average of the parameters and masks, if there are any
    gradients: int  # sums over microbatches; of PipeDream-2BW those of two steps
    # Of PipeDream-2BW, from step to step: weights and gradients of the batch in flight; with
    # prediction the weights twice and no gradients.
    in_flight: int
    versions: int  # of PipeDream-2BW: what the weights of both steps, behind each other, take more
    kept: int  # from FORWARD to BACKWARD
    waiting: int  # inputs of chunks, and gradients of their outputs
    factors: int  # of deferred weight gradients, from BACKWARD to WEIGHT
    working: int  # that comes and goes in a BACKWARD

    @property
    def total(self) -> int:
        return sum(vars(self).values())


def of(run: Config, *, deferred_layers: int | None = None, on_gpu: bool = False) -> StageMemory:
    """Of a resolved run with stages.

    `deferred_layers`: of each chunk, whose weight gradients are deferred; None = all. Raises
    ValueError for remat="budget".
    """
    return _of(tick_arrays.of(run, deferred_layers, on_gpu=on_gpu))


def _of(arrays: Ticks) -> StageMemory:
    run = arrays.run
    policy, program = arrays.policy, arrays.program
    state, held_gradients = arrays.state, arrays.sums_of_gradients
    periodic = program.table.periodic
    in_flight = versions = 0.0
    if periodic:
        # In a step both lie behind each other, and where those in flight were is room for others.
        versions = state["parameters"]
        # With prediction no gradients, as they are applied, but the weights predicted from.
        in_flight = state["parameters"] + (
            state["parameters"] if run.pipeline.predict
            else policy.reduce.itemsize * held_gradients
        )  # fmt: skip
    x_bytes = policy.compute.itemsize * run.model.width * tick_arrays.tokens_between(run)
    return StageMemory(
        parameters=math.ceil(state["parameters"]),
        optimizer=math.ceil(state["optimizer"] + state["ema"] + state["masks"]),
        gradients=math.ceil(GRADIENT_BYTES * held_gradients * (2 if periodic else 1)),
        in_flight=math.ceil(in_flight),
        versions=math.ceil(versions),
        kept=math.ceil(program.slots["saved"] * arrays.saved_by_forward),
        waiting=math.ceil((program.slots["inputs"] + program.slots["gradients"]) * x_bytes),
        factors=program.slots["deferred"] * arrays.factors,
        working=math.ceil(tick_memory.of(arrays)),
    )


def deferred_share(run: Config, device_bytes: int | None, *, on_gpu: bool = False) -> float:
    """The share of a chunk's layers whose weight gradients are deferred, 0 to 1, as they are
    planned."""
    layers, _ = planned_layers(run, device_bytes, on_gpu=on_gpu)
    return 1.0 if layers is None else layers / max(utilization.chunks_of(run))


@dataclasses.dataclass(eq=False)
class DoesNotFit(ValueError):
    """Not one layer's weight gradients of a run can be deferred within a limit. What would fit is
    counted where its text is asked for."""

    run: Config
    most: float  # bytes
    one: int  # that it holds with those of one layer
    on_gpu: bool

    def __str__(self) -> str:
        given = self.run.pipeline.memory_gib
        remedies = [text for text, other in _others(self.run) if self._begins(other)]
        remedies.append("more stages or devices")
        if given:
            remedies.append("a larger pipeline.memory_gib")
        return (
            f"pipeline.schedule={self.run.pipeline.schedule!r} within {self.most / 2**30:.1f} GiB "
            f"of a device (pipeline.memory_gib={given:g}): with one layer's weight gradients "
            f"deferred it holds {self.one / 2**30:.1f} GiB; use {', or '.join(remedies)}"
        )

    def _begins(self, other: Config) -> bool:
        """Whether another run is valid and within the limit, one layer deferred if any is."""
        try:
            return of(other, deferred_layers=1, on_gpu=self.on_gpu).total <= self.most
        except ValueError:
            return False


def _others(run: Config) -> Iterator[tuple[str, Config]]:
    """What takes less, by what to set."""
    if not remat.keeps_input(run.remat):
        yield "remat='part'", dataclasses.replace(run, remat="part")
    plain = dataclasses.replace(run.pipeline, schedule="1f1b", virtual_stages=0, layers=())
    yield "1f1b", dataclasses.replace(run, pipeline=plain)


def planned_layers(
    run: Config, device_bytes: int | None, *, on_gpu: bool = False
) -> tuple[int | None, DoesNotFit | None]:
    """`deferred_layers`, and None; where it raises DoesNotFit 1, and that: the run is refused."""
    try:
        return deferred_layers(run, device_bytes, on_gpu=on_gpu), None
    except DoesNotFit as error:
        return 1, error


def refusal(run: Config, platform: str) -> str:
    """Why a run is refused within its `pipeline.memory_gib`; "" if it is not. `platform`: "" = it
    is not known yet, and what fits on any may go on."""
    kinds = (platform not in ("tpu", "cpu"),) if platform else (False, True)
    refusals = [planned_layers(run, None, on_gpu=on_gpu)[1] for on_gpu in kinds]
    return str(refusals[0]) if all(refusals) else ""


def deferred_layers(run: Config, device_bytes: int | None, *, on_gpu: bool = False) -> int | None:
    """The layers of each chunk whose weight gradients are deferred: as many as fit.

    Within `pipeline.memory_gib`, or else within two thirds of `device_bytes`, and one layer within
    nine tenths: that leaves room for what is not counted. None = all, where neither is known or the
    schedule defers none. Raises DoesNotFit where not one layer's fit, ValueError for
    remat="budget".
    """
    table, given = utilization.table_of(run), run.pipeline.memory_gib * 2**30
    most = given or (device_bytes or 0) * AT_MOST
    if not most or not table.splits_backward:
        return None
    arrays = tick_arrays.of(run, 1, on_gpu=on_gpu)
    if (one := _of(arrays).total) <= most:
        limit = given or device_bytes * AUTOMATIC
        held = lambda layers: _of(arrays.deferring(layers)).total  # noqa: E731
        return next((n for n in range(arrays.layers, 1, -1) if held(n) <= limit), 1)
    raise DoesNotFit(run, most, one, on_gpu)
