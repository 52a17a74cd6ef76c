"""The configurations that a search compares: every way to run a config on so many devices.

The model, the optimizer, the precision, the global batch and the loss's chunks stay. What varies is

    mesh           each way to write the devices as stage x data x fsdp x expert x sequence x
                   tensor; `expert` of models with routed experts, whose number it divides
    layout         those that differ on the mesh, with weights gathered by layer or by step
    accumulation   each number of microbatches that divides the batch
    pipeline       the schedules that flush, with 1, 2 or 4 chunks on a stage, and its cut
    remat          `REMATS`, and what the config has
    ulysses        each divisor of `sequence` that divides the heads of a device

Three things stand for others: layouts that split over `data` and `fsdp` alike have all replicas on
`fsdp`; "gpipe" takes the ticks of "1f1b" and holds more; "pipedream_2bw" is another optimization.
The config itself is a candidate, whatever it has.
"""

import copy
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from llmx import config as config_lib
from llmx import sharding
from llmx.aot.topologies import Topology
from llmx.config import Config, ConfigError, checks, preference_checks
from llmx.model import remat
from llmx.model.attention import attend, splash
from llmx.model.quantization import AVERAGE
from llmx.pipeline.schedules import PipelineConfig
from llmx.plan import experts, operators
from llmx.plan import partition as partition_lib
from llmx.plan.partition import Layer

REMATS = (
    "none", "dots+attention", "dots", "names+attention_out", "names", "attention", "full", "sqrt",
)  # fmt: skip
OF_CHUNKS = ("part+dots", "part")  # with stages, besides
# Schedule and chunks on a stage; 0 = its least.
SCHEDULES = (
    ("1f1b", 0), ("zb_1f1b", 0), ("zb_h1", 0), ("interleaved_1f1b", 2), ("zb_1f1b", 2), ("zb_v", 0),
    ("dual_pipe_v", 0), ("interleaved_1f1b", 4), ("zb_1f1b", 4),
)  # fmt: skip
CHUNKS = {"zb_v": 2, "dual_pipe_v": 2, "interleaved_1f1b": 2}  # of 0; of others 1
WHOLE = ("ddp", "zero1", "zero2")  # layouts that keep all parameters on a device
# Tokens of a microbatch on a device: with fewer, products are far below the peak. Left out unless
# the batch has no more for each device.
LEAST_TOKENS = 512
MOST_STAGES_X_MICROBATCHES = 2**12  # of chunks: tables beyond take seconds to make


class Candidate(NamedTuple):
    """One way to run a config."""

    stage: int
    data: int
    fsdp: int
    sequence: int
    tensor: int
    across_slices: tuple[str, ...]
    layout: str
    gather: str
    replicate_kv: bool
    accumulation: int
    schedule: str
    virtual_stages: int
    layers: tuple[int, ...]
    remat: str
    ulysses: int
    expert: int = 1


# Where the config has each field.
KEYS = {
    "stage": "mesh.stage", "data": "mesh.data", "fsdp": "mesh.fsdp", "sequence": "mesh.sequence",
    "tensor": "mesh.tensor", "across_slices": "mesh.across_slices", "layout": "sharding.layout",
    "gather": "sharding.gather", "replicate_kv": "sharding.replicate_kv",
    "accumulation": "batch.accumulation", "schedule": "pipeline.schedule",
    "virtual_stages": "pipeline.virtual_stages", "layers": "pipeline.layers", "remat": "remat",
    "ulysses": "attention.ulysses", "expert": "mesh.expert",
}  # fmt: skip

# What the config says of axes that a candidate may have.
OF_AXES = ("attention.zigzag", "sharding.sequence_parallel", "sharding.replicate_kv")


class Group(NamedTuple):
    """Candidates that compute the same but for what they save: apart from where the state is."""

    stage: int
    replicas: int  # data x fsdp x expert
    sequence: int
    tensor: int
    accumulation: int
    ulysses: int
    schedule: str
    virtual_stages: int
    layers: tuple[int, ...]
    expert: int = 1

    @property
    def chunks(self) -> int:
        """Model chunks on a stage."""
        return self.virtual_stages or CHUNKS.get(self.schedule, 1)


class Placement(NamedTuple):
    """Where a group's state is."""

    data: int
    fsdp: int
    across_slices: tuple[str, ...]
    layout: str
    gather: str


def of_run(run: Config) -> Candidate:
    """What a resolved run has."""
    return Candidate(*(config_lib.get_value(run, key) for key in KEYS.values()))


def neutral(config: Config, topology_platform: str = "") -> Config:
    """The config resolved for one device, with all that varies set aside: what candidates change.

    Raises ConfigError for what is wrong with the rest.
    """
    run = copy.deepcopy(config)
    run.mesh = sharding.MeshConfig(data=1)
    run.sharding.layout, run.sharding.gather = "zero3", "layer"
    run.batch.accumulation, run.attention.ulysses = 1, 1
    run.pipeline = PipelineConfig()
    run.remat, run.memory_budget = "full", 0.0
    if topology_platform and not run.launch.platform:
        run.launch.platform = topology_platform
    given = {key: config_lib.get_value(run, key) for key in OF_AXES}
    for key in OF_AXES:  # which have no effect on one device
        config_lib.set_value(run, key, config_lib.get_value(config_lib.default(), key))
    run = checks.resolve(run)
    for key, value in given.items():
        config_lib.set_value(run, key, value)
    return run


def changed(base: Config, candidate: Candidate) -> Config:
    """A run of the candidate: `base`, from `neutral`, with its values. Sections are not copied
    where they stay the same."""
    run = copy.copy(base)
    sections: dict[str, dict] = {}
    for field, key in KEYS.items():
        section, _, name = key.rpartition(".")
        sections.setdefault(section, {})[name] = getattr(candidate, field)
    run.remat = candidate.remat
    for section in ("mesh", "sharding", "batch", "attention", "pipeline"):
        made = copy.copy(vars(base)[section])
        vars(made).update(sections[section])
        vars(run)[section] = made
    return run


def flags(candidate: Candidate, config: Config) -> list[str]:
    """For the command line of a config that is not resolved: each axis of the mesh that is not 1,
    and what else differs."""
    found = []
    for field, key in KEYS.items():
        value, own = getattr(candidate, field), config_lib.get_value(config, key)
        is_axis = field in sharding.AXES
        if value != own or (is_axis and value != 1):
            text = repr(value) if isinstance(value, tuple) else str(value)
            found.append(f"--config.{key}={text}")
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class Space:
    """All candidates of a config on a machine."""

    base: Config  # from `neutral`
    num_devices: int
    num_slices: int = 1
    on_gpu: bool = False
    remats: tuple[str, ...] = REMATS
    of_chunks: tuple[str, ...] = OF_CHUNKS
    schedules: tuple[tuple[str, int], ...] = SCHEDULES
    chain: tuple[Layer, ...] = ()  # of unequal layers: stages are cut as `partition` cuts them

    def groups(self) -> Iterator[Group]:
        """Valid as far as arithmetic says."""
        run, model = self.base, self.base.model
        for stage in self._stages():
            for tensor in divisors(self.num_devices // stage):
                if not self._splits(stage, tensor):
                    continue
                for sequence in divisors(self.num_devices // stage // tensor):
                    ways = sequence * (tensor if run.sharding.sequence_parallel else 1)
                    if run.batch.sequence_length % ways or not self._zigzag(sequence):
                        continue
                    replicas = self.num_devices // stage // tensor // sequence
                    if run.batch.size % replicas:
                        continue
                    ulysses = [
                        n for n in divisors(sequence) if (model.num_heads // tensor) % n == 0
                    ]
                    for accumulation in self._microbatches(stage, replicas, sequence):
                        for schedule in self._schedules(stage, accumulation):
                            for n, expert in itertools.product(ulysses, self._experts(replicas)):
                                yield Group(
                                    stage, replicas, sequence, tensor, accumulation, n, *schedule,
                                    expert=expert,
                                )  # fmt: skip

    def _microbatches(self, stage: int, replicas: int, sequence: int) -> list[int]:
        """Numbers of microbatches with enough tokens; at least as many as stages, if there are."""
        batch = self.base.batch
        rows, length = batch.size // replicas, batch.sequence_length / sequence
        least = min(LEAST_TOKENS, batch.size * batch.sequence_length / self.num_devices)
        enough = [n for n in divisors(rows) if rows // n * length >= least]
        return [n for n in enough if n >= stage] or enough[-1:]

    def placements(self, group: Group) -> list[Placement]:
        """Where the state may be."""
        return list(_placements(
            group.stage, group.replicas // group.expert, group.sequence, self.num_slices,
            self.base.model.width, self._whole_layouts, self._gathers,
        ))  # fmt: skip

    def remats_of(self, group: Group) -> tuple[str, ...]:
        """What its layers may save."""
        return self._remats + (self.of_chunks if group.stage > 1 else ())

    def candidate(self, group: Group, placement: Placement, remat_text: str) -> Candidate:
        replicate = self.base.sharding.replicate_kv or self._needs_copies(group.tensor)
        return Candidate(
            group.stage, placement.data, placement.fsdp, group.sequence, group.tensor,
            placement.across_slices, placement.layout, placement.gather, replicate,
            group.accumulation, group.schedule, group.virtual_stages, group.layers, remat_text,
            group.ulysses, group.expert,
        )  # fmt: skip

    def all(self) -> Iterator[Candidate]:
        """One by one."""
        for group in self.groups():
            for placement in self.placements(group):
                for text in self.remats_of(group):
                    yield self.candidate(group, placement, text)

    def count(self) -> int:
        """How many there are."""
        return sum(
            len(self.placements(group)) * len(self.remats_of(group)) for group in self.groups()
        )

    def run(self, candidate: Candidate) -> Config | None:
        """The resolved run of a candidate; None where a check refuses it."""
        run = changed(self.base, candidate)
        if any(checks.mesh_problems(run)) or (self.on_gpu and checks.rings_in_branches(run)):
            return None
        return run

    @functools.cached_property
    def _remats(self) -> tuple[str, ...]:
        kinds = sorted(set(self.base.model.layer_kinds))
        return tuple(
            text
            for text in self.remats
            if not remat.problems(text, self.base.offload, kinds)
            and not experts.keeps_weights(self.base.model, text)
        )

    @functools.cached_property
    def _whole_layouts(self) -> tuple[str, ...]:
        """Layouts with whole parameters that go with the config."""
        run = self.base
        return () if run.offload.parameters or run.products.gather else WHOLE

    @functools.cached_property
    def _gathers(self) -> tuple[str, ...]:
        return ("layer",) if self.base.offload.parameters else sharding.GATHERS

    def _stages(self) -> list[int]:
        run = self.base
        refused = (
            run.model.num_experts
            or run.offload.saves
            or run.offload.parameters
            or run.products.scaling == "delayed"
            or run.quantization.activations == AVERAGE
        )
        if refused or run.sync.strategy != "mean":
            return [1]
        return [n for n in divisors(self.num_devices) if n <= run.model.num_layers]

    def _needs_copies(self, tensor: int) -> bool:
        """Whether keys and values must be on several devices of `tensor`."""
        return self.base.model.num_kv_heads % tensor > 0

    def _splits(self, stage: int, tensor: int) -> bool:
        model = self.base.model
        widths = (model.expert_dim, model.shared_dim) if model.num_experts else (model.mlp_dim,)
        if model.num_heads % tensor or any(width % tensor for width in widths):
            return False
        if self._needs_copies(tensor) and tensor % model.num_kv_heads:
            return False
        rows, rest = divmod(model.padded_vocab, stage * tensor)
        return not rest and not (self.base.loss.chunks and rows % self.base.loss.chunks)

    def _experts(self, replicas: int) -> list[int]:
        """Sizes of the axis `expert` among so many replicas."""
        number = self.base.model.num_experts
        return [n for n in divisors(replicas) if number % n == 0] if number else [1]

    def _zigzag(self, sequence: int) -> bool:
        """Whether rows divide over the rings of `sequence`, in two parts each where they zigzag."""
        parts = 2 * sequence if self.base.attention.zigzag and sequence > 1 else sequence
        return self.base.batch.sequence_length % parts == 0

    @functools.cache  # noqa: B019 - lives as long as the space
    def _schedules(self, stage: int, microbatches: int) -> list[tuple[str, int, tuple[int, ...]]]:
        """(schedule, chunks on a stage, cut)."""
        if stage == 1:
            return [("1f1b", 0, ())]
        found = []
        for name, virtual in self.schedules:
            chunks = stage * (virtual or CHUNKS.get(name, 1))
            too_few = name == "dual_pipe_v" and microbatches < 2 * stage
            too_large = chunks * microbatches > MOST_STAGES_X_MICROBATCHES
            if chunks <= self.base.model.num_layers and not (too_few or too_large):
                found.append((name, virtual, self._cut(chunks, microbatches)))
        return found

    def _cut(self, chunks: int, microbatches: int) -> tuple[int, ...]:
        """The layers of each chunk; () = as equal as possible."""
        if not self.chain:
            return ()
        pipeline = partition_lib.Pipeline(math.inf, microbatches)
        best = partition_lib.partition(
            self.chain, chunks, pipeline, num_stages=chunks, replicate=False
        )
        return tuple(stage.num_layers for stage in best.stages)


@functools.lru_cache(maxsize=4096)
def _placements(
    stage: int, replicas: int, sequence: int, slices: int, width: int, whole: tuple[str, ...],
    gathers: tuple[str, ...],
) -> tuple[Placement, ...]:  # fmt: skip
    found = []
    for data in divisors(replicas):
        fsdp, split = replicas // data, replicas * sequence
        for across in _crossings(stage, data, fsdp, slices):
            alike = []  # layouts that split over data and fsdp alike
            if data == 1 or "data" in across:
                alike += ["ddp", *("zero1", "zero2") * (width % split == 0)]
                alike = [layout for layout in alike if layout in whole]
                alike += ["zero3"] * (width % split == 0)
            if split == 1:
                alike = alike[:1]
            elif data > 1 and fsdp * sequence > 1 and width % (fsdp * sequence) == 0:
                alike.append("hsdp")
            for layout in alike:
                of = ("layer",) if layout in WHOLE else gathers
                found += [Placement(data, fsdp, across, layout, gather) for gather in of]
    return tuple(found)


def _crossings(stage: int, data: int, fsdp: int, slices: int) -> list[tuple[str, ...]]:
    """Mesh axes whose sizes multiply to the number of slices: they cross the slow network."""
    if slices == 1:
        return [()]
    sizes = {"stage": stage, "data": data, "fsdp": fsdp}
    found = [(name,) for name, size in sizes.items() if size == slices]
    return found + [("stage", "data")] * (stage * data == slices and stage > 1 and data > 1)


@functools.lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """In ascending order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


def refusal(config: Config) -> str:
    """Why a config is not counted, with the remedy; "" if it is."""
    if config.remat == remat.BUDGET:
        return (
            "remat='budget' is chosen by compiling: run llmx.aot, which prints its choice, and "
            "give that as --config.remat"
        )
    return of_adapters(config)


def of_adapters(config: Config) -> str:
    """Why a run with adapters, of preferences, or with a teacher is not counted, with the remedy;
    "" if it is."""
    what = ""
    if config.adapters.rank:
        what = f"adapters.rank={config.adapters.rank}: the planner counts models trained whole"
    elif preference_checks.is_on(config):
        what = "data.format='preference': the planner does not count the reference"
    elif config.distillation.teacher:
        what = "distillation.teacher: the planner does not count a teacher beside the student"
    remedy = "run llmx.aot, which compiles the run, with a mesh of your choice"
    return f"{what}; {remedy}" if what else ""


def of_attention(config: Config, topology: Topology) -> str:
    """Why attention's kernel does not run on a machine, with the remedy; "" if it does."""
    name, why_not = config.attention.implementation, ""
    platforms = [of for of, names in attend.PREFERRED.items() if name in names]
    if platforms and topology.platform not in platforms:
        why_not = f"it runs on {platforms[0].upper()}s, and {topology.name} has none"
    elif name == "splash" and not splash.fits_lanes(config.batch.sequence_length):
        why_not = f"batch.sequence_length={config.batch.sequence_length} is no multiple of 128"
    elif name == "cudnn":
        why_not = operators.cudnn_refusal(config)
    remedy = "use attention.implementation='auto'"
    return f"attention.implementation={name!r}: {why_not}; {remedy}" if why_not else ""


def of_latents(config: Config) -> str:
    """Why latent attention and dense first layers are not counted, with the remedy; "" if the model
    has neither."""
    model = config.model
    for key, value in (("kv_latent", model.kv_latent), ("first_dense", model.num_first)):
        if value:
            return (
                f"model.{key}={value}: searches and pipelines' cuts do not take such layers yet; "
                "leave --search or --chip out, or run llmx.aot, which compiles the run"
            )
    return ""


def own(config: Config, topology: Topology, problems: Sequence[str] = ()) -> Config | None:
    """The config as it is, resolved for the machine; None where it does not go with it."""
    from llmx.aot import compiler

    try:
        return compiler.resolve(config, topology, problems=problems)
    except ConfigError:
        return None
