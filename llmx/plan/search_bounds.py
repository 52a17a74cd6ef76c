"""What no candidate of a group can be below: seconds and bytes, cheaper than they are counted.

A search leaves out what is slower than the best that it has, or does not fit, and may leave out
nothing else. So each bound is a part of what `step_time` and `memory` count, at the least that it
can be for the group:

    seconds    the operators of layers, where the state is split over all devices, and the head's
               products at the peak; a pipeline's ticks until its last stage begins, or ends; what
               the core waits for over `tensor` and `sequence`
    bytes      the state, were it split over all devices, or where it is placed; what layers save
               of a microbatch, or of as many as a pipeline has in flight
"""

import dataclasses
import functools
import math
from typing import NamedTuple

from llmx.aot import links
from llmx.config import Config, recipe, utilization
from llmx.model import costs, remat_costs
from llmx.plan import (
    candidates,
    gradient_memory,
    memory,
    operators,
    routes,
    sizes,
    step_time,
    traffic,
)
from llmx.plan import passes as passes_lib
from llmx.plan.candidates import Candidate, Group, Placement, Space
from llmx.plan.machines import Machine
from llmx.plan.operators import BACKWARD, FORWARD, LOSS
from llmx.step import moments, optimizers

# Rules whose layers are not the same in chunks of the model as in the whole.
_BY_PLACE = ("sqrt", "every_", ":")


class Layer(NamedTuple):
    """Of a microbatch, at least."""

    forward: float  # seconds of a layer
    backward: float
    weight: float  # of the backward, in gradients of weights
    loss: float  # of lookups and head
    waits: float  # of all layers, for messages over `tensor` and `sequence`
    saved: float  # bytes of all layers


@dataclasses.dataclass(frozen=True, eq=False)
class Bounds:
    """Of a space's groups on a machine, for `step_time.of` and `memory.of`."""

    space: Space
    machine: Machine

    def seconds_of_group(self, group: Group) -> float:
        """Of a step, whatever layers save: the model's FLOPs at the chip's peak."""
        run, peak = self.space.base, self._peak
        tokens = run.batch.size * run.batch.sequence_length
        seconds = self._flops * tokens / self.space.num_devices / peak
        ticks = group.accumulation * group.chunks
        filling = (group.stage - 1) / (3 if _defers(group) else 1)
        return seconds * (1 + filling / ticks)

    def seconds(self, group: Group, text: str) -> float:
        """Of a step with a rule of `remat`."""
        one = self._layer(group, text)
        if group.stage == 1:
            layers = self.space.base.model.num_layers * (one.forward + one.backward)
            return group.accumulation * (layers + one.waits + one.loss)
        ticks = group.accumulation * group.chunks
        work, filling = one.forward + one.backward, one.forward
        if not _defers(group):
            filling = work
        elif group.schedule == "zb_1f1b":
            filling = work - one.weight
        num = self._layers_of_a_chunk(group)
        rest = group.accumulation * (one.waits + one.loss) / group.stage
        return num * (ticks * work + (group.stage - 1) * filling) + rest

    def bytes(self, group: Group, text: str, placement: Placement | None = None) -> float:
        """Of a device with a rule of `remat`; `placement`: None = wherever the state is."""
        if placement is not None:
            # Which is the same with any `ulysses`.
            state = self._placed(group._replace(ulysses=1), placement)
        else:
            state = self._state if group.stage == 1 else self._state_of_stages
        return state + self._saved(group, text)

    def _saved(self, group: Group, text: str) -> float:
        """Bytes of what layers save, of all microbatches in flight."""
        if group.stage == 1:
            return self._layer(group, text).saved
        run, chunks = self.space.base, group.layers or self._chunks(group)
        tokens = run.batch.size / group.replicas / group.accumulation * run.batch.sequence_length
        tokens /= group.sequence * (group.tensor if run.sharding.sequence_parallel else 1)
        kept = self._saved_of_chunk(text, chunks) * tokens
        return kept * least_in_flight(group)

    @functools.cache  # noqa: B019 - lives as long as the search
    def _placed(self, group: Group, placement: Placement) -> float:
        """Bytes of the state where it is placed, of sums of gradients over microbatches, and of
        weights that are gathered once a step."""
        one = sizes.of(candidates.changed(
            self.space.base, self.space.candidate(group, placement, "full")
        ))  # fmt: skip
        found = sum(memory.state(one).values())
        if group.stage > 1:
            found += memory.FP32 * sum(one.local(leaf, "gradients") for leaf in one.weights)
        else:
            found += gradient_memory.buffers(one)["sums of gradients"]
        if placement.gather == "step":
            found += sum(one.gathered_bytes(leaf) * one.whole(leaf) for leaf in one.weights)
        return found

    @functools.cached_property
    def _peak(self) -> float:
        """FLOP/s in the fastest type that the run multiplies in."""
        run, chip = self.space.base, self.machine.core.chip
        names = (utilization.compute_dtype(run), recipe.policy_of(run).compute.name)
        return max(chip.peak(name)[0] for name in names)

    @property
    def _moved(self) -> operators.Moved:
        return step_time.MOVED[self.machine.topology.platform]

    def _of_slots(self, group: Group) -> operators.Moved:
        """Of stages of one layer, whose ticks may share the body of a loop."""
        if group.stage == 1 or self._layers_of_a_chunk(group) > 1:
            return self._moved
        return dataclasses.replace(self._moved, saves=self._moved.slots, kept=self._moved.slots)

    @functools.cached_property
    def _flops(self) -> float:
        run = self.space.base
        return costs.training_flops_per_token(run.model, sequence_length=run.batch.sequence_length)

    def _layer(self, group: Group, text: str) -> Layer:
        rows = self.space.base.batch.size // group.replicas // group.accumulation
        if group.stage > 1 and any(of in text for of in _BY_PLACE):
            text = "full" if text in ("sqrt", "part+sqrt") else "none"
            return self._with_ring(rows, group, text)._replace(saved=0.0)
        return self._with_ring(rows, group, text)

    def _with_ring(self, rows: int, group: Group, text: str) -> Layer:
        """Tokens are computed alike, whether they are rows or parts of one: but for the ring."""
        both = math.gcd(rows, group.sequence)
        moved = self._of_slots(group)
        one = self._of(
            rows // both, group.tensor, group.sequence // both, text, group.expert, moved
        )
        forward = self._of_ring(rows, group) / 3
        return one._replace(
            forward=one.forward + forward, backward=one.backward + 2 * forward,
            waits=self._waits(rows, group.tensor, group.sequence, group.ulysses),
        )  # fmt: skip

    def _of_ring(self, rows: int, group: Group) -> float:
        """Seconds of what the steps of a ring add up, in a layer."""
        steps, run = group.sequence // group.ulysses, self.space.base
        if steps == 1:
            return 0.0
        numbers = rows * run.batch.sequence_length / group.sequence
        numbers *= run.model.num_heads * run.model.head_dim / group.tensor
        num_bytes = recipe.policy_of(run).compute.itemsize * numbers
        return self._moved.ring * steps * num_bytes / self.machine.core.bandwidth

    @functools.cache  # noqa: B019 - lives as long as the search
    def _of(
        self, rows: int, tensor: int, sequence: int, text: str, expert: int,
        moved: operators.Moved,
    ) -> Layer:  # fmt: skip
        run = self._run(rows, tensor, sequence, sequence, text, expert)
        counted, core = sizes.of(run), self.machine.core
        program = memory.GPU if self.machine.on_gpu else memory.TPU
        listed = operators.of(counted, core, moved)
        saved = memory.saved(counted, program)
        weight = operators.seconds(listed, BACKWARD, name=operators.WEIGHT_GRADIENT)
        products = sum(one.flops for one in listed if one.moment == LOSS)
        return Layer(
            operators.seconds(listed, FORWARD), operators.seconds(listed, BACKWARD), weight,
            products / self._peak, 0.0,
            sum(saved.values()),
        )  # fmt: skip

    def _run(
        self, rows: int, tensor: int, sequence: int, ulysses: int, text: str, expert: int = 1
    ) -> Config:
        """One microbatch of so many rows, its state split over all devices that are left."""
        ways = max(1, self.space.num_devices // tensor // sequence // expert)
        replicate = self.space.base.model.num_kv_heads % tensor > 0
        run = candidates.changed(self.space.base, Candidate(
            1, 1, ways, sequence, tensor, (), "zero3", "layer",
            self.space.base.sharding.replicate_kv or replicate, 1, "1f1b", 0, (), text, ulysses,
            expert,
        ))  # fmt: skip
        run.batch.size = rows * ways * expert
        return run

    @functools.cache  # noqa: B019 - lives as long as the search
    def _waits(self, rows: int, tensor: int, sequence: int, ulysses: int) -> float:
        """Of a microbatch whose layers run nothing again."""
        if tensor == sequence == 1:
            return 0.0
        run = self._run(rows, tensor, sequence, ulysses, "none")
        counted = sizes.of(run)
        overlap = step_time.OVERLAPS[self.machine.topology.platform]
        turns = recipe.turns_of(run, self.machine.topology.device_kind)
        on_torus = self.machine.topology.platform == "tpu"
        hosts = None if on_torus else routes.Routes(self.machine, counted.mesh)
        total = 0.0
        passes = passes_lib.of(run)
        inner = (*traffic.over_tensor(counted, passes), *traffic.over_sequence(counted, passes))
        for one in inner:
            if one.size > 1 and one.count:
                seconds = hosts.seconds(one) if hosts else self._on_all_links(one)
                total += seconds * one.count * step_time.least_share(one, overlap, turns)
        return total

    def _on_all_links(self, message: traffic.Message) -> float:
        """On a torus, whose links a group may have all for itself."""
        rates, chip = self.machine.rates, self.machine.topology.chip
        if message.kind == "collective-permute":
            return 0.0
        received = links.PASSES.get(message.kind, 1.0) * message.bytes * (1 - 1 / message.size)
        return received / (rates.link * max(chip.num_links, 6)) / chip.devices_per_chip

    def _layers_of_a_chunk(self, group: Group) -> int:
        return max(group.layers or self._chunks(group))

    def _chunks(self, group: Group) -> tuple[int, ...]:
        return _equal(self.space.base.model.num_layers, group.stage * group.chunks)

    @functools.cache  # noqa: B019 - lives as long as the search
    def _saved_of_chunk(self, text: str, chunks: tuple[int, ...]) -> int:
        run = self.space.base
        return remat_costs.saved_bytes_of_chunk(
            run.model, text=text, chunks=chunks,
            compute_bytes=recipe.policy_of(run).compute.itemsize,
        )  # fmt: skip

    @functools.cached_property
    def _state(self) -> float:
        one = sizes.of(self._run(1, 1, 1, 1, "full"))
        alone = dataclasses.replace(one, mesh=dict.fromkeys(one.mesh, 1))
        return sum(memory.state(alone).values()) / self.space.num_devices

    @functools.cached_property
    def _state_of_stages(self) -> float:
        """Without what pads the vocabulary: parameters, moments, sums of gradients."""
        run = self.space.base
        param = recipe.policy_of(run).param
        arrays = 0 if run.offload.optimizer else min(optimizers.num_moments(run.optimizer))
        number = param.itemsize + arrays * moments.number_bytes(run.optimizer.moments, param)
        total = costs.num_parameters(run.model) * (number + memory.FP32)
        return total / self.space.num_devices


def _defers(group: Group) -> bool:
    """Whether gradients of weights may fill what the pipeline leaves idle."""
    return group.schedule.startswith("zb_") or group.schedule == "dual_pipe_v"


def least_in_flight(group: Group) -> int:
    """Pairs of microbatch and chunk that some stage has saved at the peak, at least."""
    return min(group.accumulation, group.stage) * group.chunks


@functools.lru_cache(maxsize=4096)
def _equal(num_layers: int, chunks: int) -> tuple[int, ...]:
    each, more = divmod(num_layers, chunks)
    return (each + 1,) * more + (each,) * (chunks - more)
