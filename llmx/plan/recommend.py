"""Which schedule, model chunks and remat are fastest for a config, of those that fit.

All schedules that flush take the same step, so a choice among them changes only memory and time.
Candidates are every such schedule with 1, 2 or 4 chunks on a stage, each with several `remat`s and
an equal cut of the layers. They are priced like the config's own pipeline: in lockstep, as stages
run (`stage_costs.priced`), with the times of its forward, backward and weight operations, so that
a zero-bubble schedule is recommended only where it is faster.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from llmx.config import Config, checks, utilization
from llmx.model import remat
from llmx.pipeline import schedules
from llmx.pipeline.schedule import Table
from llmx.plan import schedule_report, stage_costs
from llmx.plan.search import ADMITTED
from llmx.plan.stage_costs import Cut, Machine, Profile

CHUNKS = (0, 2, 4)  # on a stage; 0 = the schedule's least
REMATS = ("none", "dots", "full", "part+dots", "part")  # beside the config's
WORSE = 1.01  # times as slow as another that fits: worth a warning


@dataclasses.dataclass(frozen=True)
class Option:
    """One way to run the config's pipeline."""

    schedule: str
    chunks: int  # on a stage
    remat: str
    cut: Cut
    splits_backward: bool
    fits: bool
    flags: str  # for the command line of the config; "" = as it is

    @property
    def deferred(self) -> str:
        """Of how many layers of a chunk the weight gradients are deferred."""
        if not self.splits_backward:
            return "-"
        most = max(self.cut.layers)
        return str(most if self.cut.deferred_layers is None else self.cut.deferred_layers)

    def to_json(self) -> dict[str, Any]:
        return {
            "schedule": self.schedule, "chunks_per_stage": self.chunks, "remat": self.remat,
            "layers": self.cut.layers, "deferred_layers": self.cut.deferred_layers,
            "memory_bytes": self.cut.memory.total, "bubble": self.cut.bubble,
            "step_time": self.cut.barriers, "fits": self.fits, "flags": self.flags,
        }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Advice:
    """All candidates, the fastest first, and the config's own choice."""

    options: list[Option]
    chosen: Option
    limit: int | None  # bytes of a device that may be used

    @property
    def best(self) -> Option | None:
        """The fastest that fits; the config's own where none is faster; None = nothing fits."""
        found = next((option for option in self.options if option.fits), None)
        if found and self.chosen.fits and self.chosen.cut.barriers <= WORSE * found.cut.barriers:
            return self.chosen
        return found

    @property
    def warning(self) -> str:
        """Why the config's choice is worse than another; "" = it is not."""
        chosen, best = self.chosen, self.best
        if best is None:
            return (
                "warning: nothing fits: use more stages or devices, fewer tokens in a microbatch, "
                "or offload.optimizer=True"
            )
        if best is chosen:
            return ""
        name = f"warning: {chosen.schedule} with remat={chosen.remat!r}"
        if not chosen.fits:
            return f"{name} does not fit; {best.schedule} with remat={best.remat!r} does"
        times = chosen.cut.barriers / best.cut.barriers
        return (
            f"{name} takes {times:.2f} x the time of {best.schedule} with remat={best.remat!r}, "
            "which fits"
        )

    def text(self) -> str:
        """The table: of each schedule the fastest `remat` that fits, and the config's own."""
        limit = "" if self.limit is None else f" in {schedule_report.gib(self.limit)} of a device"
        lines = [f"what fits{limit}, the fastest first; the best remat of each schedule:"]
        if not any(option.fits for option in self.options):
            lines = [f"nothing fits{limit}; the remat of each schedule that takes least:"]
        shown: dict[tuple, Option] = {}
        for option in self.options:
            shown.setdefault((option.schedule, option.chunks), option)
        rows = [option for option in shown.values() if option is not self.chosen]
        rows = sorted([*rows, self.chosen], key=_order)
        head = ("schedule", "chunks", "remat", "deferred", "memory", "bubble", "step", "")
        cells = [head, *(self._row(option) for option in rows)]
        lines += schedule_report.columns(cells)
        if self.warning:
            lines.append(self.warning)
        if self.best is not None and self.best.flags:
            lines.append(f"use {self.best.flags}")
        elif self.best is not None:
            lines.append("no other that fits is faster by more than a hundredth")
        return "\n".join(lines)

    def _row(self, option: Option) -> tuple:
        notes = ["this config"] * (option is self.chosen) + ["does not fit"] * (not option.fits)
        return (
            option.schedule, option.chunks, option.remat, option.deferred,
            schedule_report.gib(option.cut.memory.total), f"{option.cut.bubble:.1%}",
            f"{1e3 * option.cut.barriers:.3f} ms", ", ".join(notes),
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        return {
            "options": [option.to_json() for option in self.options],
            "chosen": self.chosen.to_json(), "best": self.best and self.best.to_json(),
            "warning": self.warning,
        }  # fmt: skip


def recommend(config: Config, profile: Profile, machine: Machine) -> Advice:
    """What is fastest for a resolved config with stages, of what fits.

    `profile`: of the config. Raises ValueError where the config's own pipeline cannot be priced.
    """
    chosen = _option(config, config, profile, machine)
    options = others(config, profile, machine)
    if not utilization.table_of(config).periodic:
        options = sorted([chosen, *options], key=_order)
    return Advice(options, chosen, _limit(machine))


def others(config: Config, profile: Profile, machine: Machine) -> list[Option]:
    """Other ways to run the step of a resolved config, those that fit first, the fastest first."""
    options = []
    for run in _candidates(config, machine):
        try:
            options.append(_option(run, config, profile, machine))
        except ValueError:  # of zero bubble not one layer's factors fit
            continue
    return sorted(options, key=_order)


def _limit(machine: Machine) -> int | None:
    usable = machine.usable_bytes or machine.device_bytes
    return None if usable is None else int(ADMITTED * usable)


def _order(option: Option) -> tuple:
    """What fits, by time; then what does not, by memory."""
    memory = option.cut.memory.total
    if not option.fits:
        return True, memory
    # Times within a hundredth of a thousandth are equal: then what needs less memory is first.
    return False, float(f"{option.cut.barriers:.5g}"), memory


def _candidates(config: Config, machine: Machine) -> Iterator[Config]:
    """Other ways to run the same step, each resolved."""
    chosen = utilization.table_of(config)
    kinds, seen = sorted(set(config.model.layer_kinds)), {_key(config, chosen, config.remat)}
    for name, chunks in itertools.product(schedules.SCHEDULES, CHUNKS):
        pipeline = dataclasses.replace(
            config.pipeline, schedule=name, table="", virtual_stages=chunks, layers=(),
            predict=False, memory_gib=0.0,
        )  # fmt: skip
        run = dataclasses.replace(config, pipeline=pipeline)
        if any(checks.stage_problems(run, run.mesh.stage)):
            continue  # so many chunks, for example
        table = utilization.table_of(run)
        if table.splits_backward:
            run.pipeline.memory_gib = config.pipeline.memory_gib
        if table.periodic or (machine.is_gpu and checks.rings_in_branches(run)):
            continue
        for text in dict.fromkeys((config.remat, *REMATS)):
            key = _key(run, table, text)
            if key in seen or remat.problems(text, config.offload, kinds):
                continue
            seen.add(key)
            yield dataclasses.replace(run, remat=text)


def _key(config: Config, table: Table, text: str) -> tuple:
    return table.name, table.chunks_per_stage, text, bool(config.pipeline.table)


def _option(run: Config, config: Config, profile: Profile, machine: Machine) -> Option:
    """`run`, a variant of `config`, priced."""
    table = utilization.table_of(run)
    cut = stage_costs.priced(run, profile, table, machine, utilization.chunks_of(run))
    flags = []
    for key in ("schedule", "table", "virtual_stages", "layers", "predict", "memory_gib"):
        value = vars(run.pipeline)[key]
        if value != vars(config.pipeline)[key]:
            text = f'"{value}"' if key == "layers" else value  # for a shell
            flags.append(f"--config.pipeline.{key}={text}")
    if run.remat != config.remat:
        flags.append(f"--config.remat={run.remat}")
    limit = _limit(machine)
    fits = limit is None or cut.memory.total <= limit
    return Option(
        table.name, table.chunks_per_stage, run.remat, cut, table.splits_backward, fits,
        flags=" ".join(flags),
    )  # fmt: skip
