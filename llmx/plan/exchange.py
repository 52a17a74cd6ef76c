"""What replicas hold and send that are kept equal by another strategy than the mean.

The state is that of a recipe without devices. The bytes are `network`'s, tensor by tensor; over a
run they are the mean of its steps, in all of its phases (`llmx.sync.strategy.STRATEGIES`).
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator

import jax

from llmx import sharding
from llmx.aot.topologies import Topology
from llmx.config import Config, recipe, stage_memory, state_memory
from llmx.plan import network, traffic
from llmx.plan.network import StepGroup
from llmx.plan.sizes import Sizes
from llmx.plan.traffic import Message
from llmx.sharding import scatter
from llmx.sync import replicas as replicas_lib
from llmx.sync.replicas import MEAN

PURPOSE = "exchange"
# With warmup_steps=-1: the share of a run after which the variance is taken to have settled.
SETTLED = 0.15
_PARTS = {"params": "parameters", "opt_state": "optimizer", "ema": "ema", "sync": PURPOSE}


def state(run: Config) -> dict[str, float]:
    """Bytes of a device that live from step to step, of a resolved run."""
    held = recipe.make_recipe(run, devices=_KIND).abstract
    found = {
        name: float(sharding.device_bytes(getattr(held, field))) for field, name in _PARTS.items()
    }
    return found | {"masks": state_memory.of_masks(run)}


_KIND = jax.sharding.AbstractDevice("", None, "gpu")


def on(
    sizes: Sizes, topology: Topology, *, phase: str = "", deferred: float | None = None
) -> list[Message]:
    """All messages of a step of a resolved run on a machine. `deferred`: of `deferred_on`, if it is
    known."""
    if deferred is None:
        deferred = deferred_on(sizes.run, topology)
    of_slice = topology.num_devices // topology.num_slices
    return messages(
        sizes, turns=recipe.turns_of(sizes.run, topology.device_kind), 
        on_gpu=topology.platform == "gpu", phase=phase, deferred=deferred,
        exchanges=sharding.exchanges(topology.device_kind, topology.num_devices),
        summed=of_slice if scatter.is_summed(topology.device_kind, topology.num_devices) else 0,
    )  # fmt: skip


def deferred_on(run: Config, topology: Topology) -> float:
    """The share of layers whose weight gradients a pipeline defers on a machine, 0 to 1."""
    on_gpu = topology.platform == "gpu"
    return stage_memory.deferred_share(run, topology.chip.device_hbm_bytes, on_gpu=on_gpu)


def messages(sizes: Sizes, *, phase: str = "", **program) -> list[Message]:
    """All messages of a resolved run's step: `traffic.of`, with what its strategy sends.

    `phase`: of the strategy; "" = the mean over the run's steps. `program`: as `traffic.of` has it.
    """
    listed = traffic.of(sizes, **program)
    run = sizes.run
    if run.sync.strategy == "mean" or sizes.mesh[replicas_lib.AXIS] == 1:
        return listed
    groups = [group for group in groups_of(run) if phase in ("", group.phase)]
    steps = sum(group.steps for group in groups)
    mean = sum(group.steps for group in groups if group.phase == MEAN) / max(steps, 1)
    found = [*_without(sizes, listed, mean), *_of_mean(listed, mean)]
    own = [group for group in groups if group.phase != MEAN]
    # Outer steps are programs of their own.
    sent = sum(group.steps * (group.step.bytes + group.outer.bytes * (not phase)) for group in own)
    replicas = sizes.mesh[replicas_lib.AXIS]
    if own and sent:
        whole = sent / steps / (1 - 1 / replicas)
        found.append(Message(PURPOSE, "all-to-all", replicas_lib.AXES, whole, 1.0, replicas))
    return [one for one in found if one.size > 1 and one.count]


def _of_mean(listed: Iterable[Message], share: float) -> Iterator[Message]:
    """Sums of gradients over the replicas, in the share of steps that have the mean."""
    for one in listed:
        if replicas_lib.AXIS in one.axes:
            yield dataclasses.replace(one, count=one.count * share)


def _without(sizes: Sizes, listed: Iterable[Message], share: float) -> Iterator[Message]:
    """All else; of the sums those within a replica, in the other steps."""
    for one in listed:
        if replicas_lib.AXIS not in one.axes:
            yield one
            continue
        inside = tuple(axis for axis in one.axes if axis != replicas_lib.AXIS)
        yield dataclasses.replace(
            one, axes=inside, size=sizes.size(inside), count=one.count * (1 - share)
        )


def groups_of(run: Config) -> list[StepGroup]:
    """The steps of a resolved run that send the same, in their phases."""
    keys = (*dataclasses.astuple(run.sync), *sorted(vars(run.mesh).items(), key=str))
    return list(_groups_of(str(keys), run.steps, _Held(run)))


@dataclasses.dataclass(frozen=True)
class _Held:
    """A run that takes no part in comparisons: its key does."""

    run: Config = dataclasses.field(compare=False)


@functools.lru_cache(maxsize=64)
def _groups_of(key: str, steps: int, held: _Held) -> tuple[StepGroup, ...]:
    run = held.run
    axes = {axis: vars(run.mesh)[axis] for axis in sharding.AXES if axis != "stage"}
    replicas = network.replicas_of(run.sync, run.model, axes, run.sharding.layout)
    timetable = recipe.make_recipe(run, devices=_KIND).strategy.timetable
    freeze = round(SETTLED * steps) if run.sync.warmup_steps < 0 else -1
    reduce_bytes = recipe.policy_of(run).reduce.itemsize
    return tuple(network.of_run(replicas, timetable, freeze_step=freeze, reduce_bytes=reduce_bytes))
