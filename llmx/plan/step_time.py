"""How long a train step takes on a machine, and where the time goes: counted, nothing is compiled.

A device computes its operators (`operators`) one after the other; a pipeline's in the ticks of its
schedule. Messages (`traffic`) travel beside them on the machine's links (`routes`), and what the
compiled programs do not hide is added:

    weights, gradients of layers   hidden behind the layer before: what is beyond the layers' own
                                   time, and what the first and last layer wait for
    activations over `tensor`      of several groups of tokens that take turns half of one group's;
                                   of one group all, but on GPUs what a layer computes without them
                                   hides the others
    all others                     a share, read from the programs of each compiler: `TPU`, `GPU`

On the links of one kind messages take turns: what they take longer there than the step computes is
waited for, whatever the shares say.
"""

import collections
import dataclasses
import functools
from collections.abc import Sequence

from llmx.config import Config, recipe, utilization
from llmx.config.axes import gathers_ahead
from llmx.pipeline import schedule, simulate
from llmx.pipeline.schedule import KINDS, Table
from llmx.pipeline.simulate import Timeline
from llmx.plan import exchange, experts, operators, routes, sizes, slots, traffic
from llmx.plan import passes as passes_lib
from llmx.plan.machines import Machine
from llmx.plan.operators import BACKWARD, ENDS, FORWARD, LOSS, WEIGHT_GRADIENT, Operator
from llmx.plan.sizes import Sizes
from llmx.plan.traffic import HALVES, Message
from llmx.runtime import compiler_options, hardware


@dataclasses.dataclass(frozen=True)
class Overlap:
    """The share of messages' time that the core waits for, in the programs of a compiler."""

    edge: float  # layers' worth of weights and gradients, once a step
    edge_of_pass: float  # the same for each pass of a pipeline
    # Whether those of ticks in which all stages do the same are gathered ahead, as in other loops.
    ahead: bool
    once: float  # of sums of gradients and what an update sends, once a step
    step: float  # of weights that are gathered once a step
    ring: float  # of keys and values
    heads: float  # of Ulysses' exchanges
    rows: float  # of rows on their way to experts and back
    wide: float  # of gradients of layers in more bytes than the compute dtype's
    wide_in_pipelines: float  # the same where there are stages
    stages: float  # of what is sent over `stage`
    scatters_stop: bool = False  # reduce-scatters stop the core
    # Activations that are gathered and summed over `tensor` travel beside what is computed without
    # them: see `_Waits._of_activations`.
    beside: bool = False


# Of the programs in tests/golden/programs.jsonl (jax 0.10.2, libtpu 0.0.42.1).
TPU = Overlap(
    edge=1.7,
    edge_of_pass=1.0,
    ahead=False,
    once=1.0,
    step=1.0,
    ring=0.0,
    heads=1.0,
    rows=0.8,
    wide=0.0,
    wide_in_pipelines=0.0,
    stages=1.0,
)
GPU = Overlap(
    edge=0.1,
    edge_of_pass=0.8,
    ahead=True,
    once=0.3,
    step=0.6,
    ring=0.5,
    heads=0.5,
    rows=1.0,
    wide=0.88,
    wide_in_pipelines=0.3,
    stages=0.2,
    beside=True,
)


# XLA:CPU computes in the order of the program: nothing is hidden.
CPU = Overlap(
    edge=1.0,
    edge_of_pass=1.0,
    ahead=False,
    once=1.0,
    step=1.0,
    ring=1.0,
    heads=1.0,
    rows=1.0,
    wide=1.0,
    wide_in_pipelines=1.0,
    stages=1.0,
)

_ON_SPARSE_CORES = "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter"

# By platform.
MOVED = {"tpu": operators.TPU, "gpu": operators.GPU, "cpu": operators.CPU}
OVERLAPS = {"tpu": TPU, "gpu": GPU, "cpu": CPU}


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Seconds of a step."""

    parts: dict[str, float]  # they add up to the step
    compute: float  # operators, without waiting for others
    communication: float  # all messages on free links
    operators: tuple[Operator, ...]

    @property
    def step(self) -> float:
        return sum(self.parts.values())

    @property
    def exposed(self) -> float:
        """What the core waits for messages."""
        return sum(of for name, of in self.parts.items() if name.startswith(EXPOSED))

    @property
    def bubble(self) -> float:
        return self.parts.get(BUBBLE, 0.0)


EXPOSED, BUBBLE = "exposed", "bubble"


def overlap_of(machine: Machine) -> Overlap:
    """Of the programs for a machine. XLA:TPU has reduce-scatters run beside the core where
    SparseCores take them, which `compiler_options` asks for."""
    overlap, chip = OVERLAPS[machine.topology.platform], machine.topology.device_kind
    options = compiler_options.OVERLAP.get(hardware.DEVICE_KINDS.get(chip, ""), {})
    on_core = "xla_enable_async_all_reduce" in options and _ON_SPARSE_CORES not in options
    return dataclasses.replace(overlap, scatters_stop=on_core)


def of(run: Config, machine: Machine) -> StepTime:
    """Of a resolved run."""
    counted, overlap = sizes.of(run), overlap_of(machine)
    passes = passes_lib.of(run)
    deferred = exchange.deferred_on(run, machine.topology)
    parts, listed = computed(counted, machine, deferred)
    compute = sum(parts.values()) - parts.get(BUBBLE, 0.0)
    turns = recipe.turns_of(run, machine.topology.device_kind)
    links = routes.on(machine, tuple(counted.mesh.items()), tuple(run.mesh.across_slices))
    listed_messages = exchange.on(counted, machine.topology, deferred=deferred)
    messages = [(one, links.seconds(one) * one.count) for one in listed_messages]
    waits = _Waits(counted, passes, listed, overlap, turns)
    found = waits.of(messages)
    for axes, seconds in _beyond(found, messages, links, sum(parts.values())).items():
        found[axes] = found.get(axes, 0.0) + seconds
    for axes, seconds in found.items():
        parts[f"{EXPOSED}: {axes}"] = seconds
    return StepTime(parts, compute, sum(seconds for _, seconds in messages), tuple(listed))


def _beyond(
    waited: dict[str, float], messages: list[tuple[Message, float]], links: routes.Routes,
    computed: float,
) -> dict[str, float]:  # fmt: skip
    """What is left to be waited for, by mesh axes, of messages that take longer on links of one
    kind than what the step computes and is known to wait for. Links of several kinds work at the
    same time: those that take longest decide."""
    by_links: dict[str, dict[str, float]] = {}
    for one, seconds in messages:
        axes, of_links = ",".join(one.axes), by_links.setdefault(links.links_of(one), {})
        of_links[axes] = of_links.get(axes, 0.0) + seconds
    if not by_links:
        return {}
    slowest = max(by_links.values(), key=lambda of_links: sum(of_links.values()))
    beyond = sum(slowest.values()) - sum(waited.values()) - computed
    return {max(slowest, key=slowest.get): beyond} if beyond > 0 else {}


def computed(
    counted: Sizes, machine: Machine, deferred: float
) -> tuple[dict[str, float], list[Operator]]:
    """What a device computes and how long a pipeline leaves it idle, in parts; and its operators.

    Seconds, of a step that waits for no message: a bound for `of`. `deferred`: the share of layers
    whose weight gradients are deferred (`exchange.deferred_on`).
    """
    moved = MOVED[machine.topology.platform]
    turns = recipe.turns_of(counted.run, machine.topology.device_kind)
    listed = operators.of(counted, machine.core, moved, turns=turns)
    listed += slots.of(counted, machine.core, moved, deferred)
    parts = _computed(counted, listed)
    if (idle := _idle(counted, listed, deferred)) > 0:
        parts[BUBBLE] = idle
    return parts, listed


def _rounds(counted: Sizes) -> tuple[int, int]:
    """How many passes over layers a device makes in each direction that are of use, and layers."""
    run = counted.run
    chunks = utilization.chunks_of(run)
    per_stage = len(chunks) // run.mesh.stage if chunks else 1
    return run.batch.accumulation * per_stage, max(chunks, default=run.model.num_layers)


def repetitions(counted: Sizes) -> dict[str, int]:
    """How often a device does in a step what operators count for each moment, empty slots of
    pipelines left out."""
    rounds, layers = _rounds(counted)
    # Lookups and heads are split over all stages.
    loss = counted.run.batch.accumulation
    return {FORWARD: rounds * layers, BACKWARD: rounds * layers, LOSS: loss, ENDS: 1}


def _computed(counted: Sizes, listed: list[Operator]) -> dict[str, float]:
    """Of the work that is of use, by the operators' parts."""
    times = repetitions(counted)
    parts: dict[str, float] = {}
    for one in listed:
        spent = one.seconds * one.count * times[one.moment]
        parts[one.part] = parts.get(one.part, 0.0) + spent
    return parts


def pipeline_of(
    counted: Sizes, listed: Sequence[Operator], machine: Machine
) -> tuple[Table, Timeline] | None:
    """The schedule of a run and when its operations take place, in lockstep; None: no pipeline."""
    run = counted.run
    if run.mesh.stage == 1:
        return None
    table = utilization.table_of(run)
    _, layers = _rounds(counted)
    of_layer = _operations(table, listed, exchange.deferred_on(run, machine.topology))
    times = {kind: layers * seconds for kind, seconds in of_layer.items()}
    return table, simulate.simulate(table, **times)


def _operations(table: Table, listed: Sequence[Operator], deferred: float) -> dict[str, float]:
    """Seconds of a layer in each kind of operation of a schedule, the mean over a chunk's."""
    forward, backward = (operators.seconds(listed, of) for of in (FORWARD, BACKWARD))
    weight = 0.0
    if table.splits_backward:
        weight = deferred * operators.seconds(listed, BACKWARD, name=WEIGHT_GRADIENT)
    return {"forward": forward, "backward": backward - weight, "weight": weight}


def _idle(counted: Sizes, listed: Sequence[Operator], deferred: float) -> float:
    """What a pipeline's step takes beyond the work of one stage, in lockstep."""
    if counted.run.mesh.stage == 1:
        return 0.0
    table = utilization.table_of(counted.run)
    rounds, layers = _rounds(counted)
    times = {KINDS[schedule.IDLE]: 0.0} | _operations(table, listed, deferred)
    lockstep = sum(
        number * max(times[KINDS[kind]] for kind in kinds)
        for kinds, number in _ticks(table).items()
    )
    return layers * (lockstep - rounds * sum(times.values()))


@functools.lru_cache(maxsize=512)
def _ticks(table: Table) -> dict[tuple[int, ...], int]:
    """How many ticks have these kinds of operations, over all stages: they take as long as the
    longest, because stages meet at each end."""
    return collections.Counter(tuple(sorted({*row.tolist()})) for row in table.kind)


def least_share(one: Message, overlap: Overlap, turns: int) -> float:
    """At least this share of a message's time is waited for, of a run that makes nothing again."""
    found = share(one, overlap, turns)
    if one.purpose == "activations" and overlap.beside:
        # Schedules may allow no turns: then the first of four gathers of a layer, forward and
        # backward, see `_Waits._of_activations`.
        return min(found, 0.25 if one.kind == "all-gather" else 0.0)
    # Of pipelines over `stage` too.
    return min(found, overlap.stages) if one.purpose == "sums of the loss" else found


def share(one: Message, overlap: Overlap, turns: int) -> float:
    """The share of a message's time that the core waits for, where no layer hides it.

    `turns`: groups of tokens, of `recipe.turns_of`. Of pipelines, and of one group on GPUs,
    `_Waits._alone` says more.
    """
    if overlap.scatters_stop and one.kind == "reduce-scatter":
        return 1.0
    if one.purpose == "activations":
        return 1.0 if turns == 1 else 0.5 / turns
    if one.purpose in ("keys and values", "gradients of keys and values"):
        return overlap.ring
    if one.purpose == "heads":
        return overlap.heads
    if one.purpose in (experts.ROWS, experts.WEIGHTS_OF_ROWS):
        return overlap.rows
    if one.purpose == "weights":
        return overlap.step
    if one.purpose == "gradients":
        return overlap.once if one.kind == "all-reduce" else overlap.wide
    return overlap.once if one.purpose in ("updated parameters", "whole matrices") else 1.0


@dataclasses.dataclass(frozen=True, eq=False)
class _Waits:
    """What the core waits for messages."""

    counted: Sizes
    passes: passes_lib.Passes
    listed: list[Operator]
    overlap: Overlap
    turns: int

    def of(self, messages: list[tuple[Message, float]]) -> dict[str, float]:
        """Seconds by mesh axes."""
        found: dict[str, float] = {}
        layers: dict[str, float] = {}
        sums: dict[str, float] = {}
        for one, seconds in messages:
            axes = ",".join(one.axes)
            sums[axes] = sums.get(axes, 0.0) + seconds
            if self._is_hidden(one):
                layers[axes] = layers.get(axes, 0.0) + seconds
            else:
                found[axes] = found.get(axes, 0.0) + self._alone(one, seconds)
        for axes, seconds in layers.items():
            found[axes] = found.get(axes, 0.0) + self._edges(seconds)
        total = sum(layers.values())
        if (beyond := total - self._compute()) > 0:
            longest = max(layers, key=layers.get)
            found[longest] += beyond
        # No longer than the messages take: a pipeline's edges may be more than all its layers.
        found = {axes: min(seconds, sums[axes]) for axes, seconds in found.items()}
        return {axes: seconds for axes, seconds in found.items() if seconds > 0}

    def _alone(self, one: Message, seconds: float) -> float:
        """What is waited for of a message that no layer hides."""
        overlap, stages = self.overlap, self.counted.run.mesh.stage
        if overlap.scatters_stop and one.kind == "reduce-scatter":
            return seconds
        if stages > 1 and "stage" in one.axes:
            return seconds * overlap.stages
        if stages > 1 and one.purpose == "gradients" and one.kind == "reduce-scatter":
            return seconds * overlap.wide_in_pipelines
        if overlap.beside and self.turns == 1 and one.purpose == "activations":
            return self._of_activations(one, seconds / one.count)
        return seconds * share(one, overlap, self.turns)

    def _of_activations(self, one: Message, seconds: float) -> float:
        """Of messages over `tensor`, each of so many seconds.

        A layer gathers before attention and before its MLP, and sums behind both. Forward nothing
        hides its first gather; casts of weights hide the second, and writes of what is saved the
        sums. Backward, gathers and sums are hidden behind half of the products of weight gradients
        each, all-reduces behind all. Of what is run again half the gathers are first ones, casts
        hide the others, and sums are waited for, as are the messages of lookups and head.
        """
        sent = traffic.halves(self.counted, self.passes)
        gathers = one.kind == "all-gather"
        again = sent.gathered_again if gathers else sent.summed_again
        ends = one.count - sent.forward - sent.backward - again
        products = self._work(BACKWARD, WEIGHT_GRADIENT) * (1 if one.kind == "all-reduce" else 0.5)
        waited = seconds * ends + max(0.0, seconds * sent.backward - products)
        if not gathers:
            saves = self._work(FORWARD, operators.SAVES)
            return waited + max(0.0, seconds * sent.forward - saves) + seconds * again
        for number, casts in (
            (sent.forward, self._work(FORWARD, operators.WEIGHTS)),
            (again, self._work(BACKWARD, operators.WEIGHTS + operators.AGAIN)),
        ):
            half = seconds * number / HALVES
            waited += half + max(0.0, half - casts)
        return waited

    def _work(self, moment: str, name: str) -> float:
        """Seconds of a step in operators of layers whose names end so."""
        passes = self.passes.forward if moment == FORWARD else self.passes.backward
        return passes * self.passes.layers * operators.seconds(self.listed, moment, name=name)

    def _is_hidden(self, one: Message) -> bool:
        """Whether it travels beside the layer before or behind it."""
        run = self.counted.run
        if one.purpose == "weights":
            return run.sharding.gather == "layer"
        wide = self.counted.reduce_bytes > self.counted.compute_bytes and self.overlap.wide > 0
        stops = self.overlap.scatters_stop and one.kind == "reduce-scatter"
        return one.purpose == "gradients" and one.kind != "all-reduce" and not (wide or stops)

    def _edges(self, seconds: float) -> float:
        """What the first and the last layer of a pass wait for."""
        passes = self.passes.forward + self.passes.backward
        one_layer = seconds / max(1, passes * self.passes.layers)
        if self.counted.run.mesh.stage == 1 or self.passes.shared:
            return 2 * self.overlap.edge * one_layer  # without a loop over layers, no ends of it
        alike = self.passes.alike
        if not (self.overlap.ahead and gathers_ahead(self.counted.run)):
            alike = 0
        edges = 2 * self.overlap.edge * (alike > 0)
        return (self.overlap.edge_of_pass * (passes - alike) + edges) * one_layer

    def _compute(self) -> float:
        """Of all passes over layers."""
        return self.passes.layers * (
            self.passes.forward * operators.seconds(self.listed, FORWARD)
            + self.passes.backward * operators.seconds(self.listed, BACKWARD)
        )
