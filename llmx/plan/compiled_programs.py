"""Programs that were compiled, and what the planner counts for them.

A file has one program on a line, as JSON: `config`, the name of a file in configs/; `topology`;
`flags`, "section.key=value"; and of one device `state`, bytes of memory that live all the time,
`peak`, the most at any time, and `sent`, bytes in a step by mesh axes; and `seconds` of a step as
`llmx.aot` estimates them of the program: `step`, `compute`, and `exposed`, of collectives. To add
one, write its first three and run `scripts/validate_planner.py --programs --compile`.
"""

import dataclasses
import json
import pathlib
import subprocess
import sys
from collections.abc import Sequence

from llmx.aot import compiler, report, topologies
from llmx.aot.topologies import Topology
from llmx.config import Config
from llmx.config import flags as flags_lib
from llmx.plan import machines, run_report, step_time, traffic

# Bytes of which no model has enough to matter: sums of norms, ids, losses.
NEGLIGIBLE = 4 * 2**20


@dataclasses.dataclass(frozen=True)
class Program:
    """One that was compiled, or is to be."""

    config: str
    topology: str
    flags: tuple[str, ...]
    phase: str = ""  # of its `sync.strategy`
    state: int = 0  # bytes, with those of the batch
    peak: int = 0  # bytes
    sent: dict[str, float] = dataclasses.field(default_factory=dict)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        return " ".join((self.config, self.topology, *self.flags, *filter(None, [self.phase])))


@dataclasses.dataclass(frozen=True)
class Errors:
    """What the planner counts, as a share more or less than the program."""

    state: float
    peak: float
    sent: dict[str, float]  # by mesh axes that more than `NEGLIGIBLE` is sent along
    step: float  # seconds, beside those of the program's timeline


def read(path: str | pathlib.Path) -> list[Program]:
    """ValueError, naming the line, for one that is no program."""
    found = []
    for number, line in enumerate(pathlib.Path(path).read_text().splitlines(), 1):
        try:
            if line:
                of = json.loads(line)
                found.append(Program(**of | {"flags": tuple(of["flags"])}))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{path}, line {number} is no program ({error!r}): write one as "
                "scripts/draw_programs.py prints them"
            ) from error
    return found


def to_line(program: Program) -> str:
    return json.dumps(dataclasses.asdict(program))


def errors(program: Program, configs: pathlib.Path) -> Errors:
    """`configs`: the folder of the config files."""
    machine = machines.parse(program.topology)
    run, topology = resolved(program, configs)
    held, messages = run_report.count(run, topology, phase=program.phase)
    sent = traffic.by_axes(messages)
    shares = {}
    for axes in {*sent, *program.sent}:
        ours, compiled = sent.get(axes, 0.0), program.sent.get(axes, 0.0)
        if max(ours, compiled) > NEGLIGIBLE:
            shares[axes] = ours / max(compiled, 1.0) - 1
    state = sum(held.state.values()) / program.state - 1
    times = step_time.of(run, machine)
    step = times.step / program.seconds["step"] - 1
    return Errors(state, held.peak / program.peak - 1, shares, step)


def resolved(program: Program, configs: pathlib.Path) -> tuple[Config, Topology]:
    """The run that was compiled, and its machine. `configs`: the folder of the config files."""
    topology = topologies.parse(program.topology)
    given = [f"--config={configs / program.config}.py", *_overrides(program)]
    _, run, problems = flags_lib.parse(flags_lib.parser("validate_planner", ""), given)
    return compiler.resolve(run, topology, problems=problems), topology


def compiled(program: Program, configs: pathlib.Path) -> Program | None:
    """The same with figures of `llmx.aot`, in a process of its own; None: the compiler refuses."""
    done = subprocess.run(
        [sys.executable, "-m", "llmx.aot", "--json", "--config", f"{configs / program.config}.py",
         "--topology", program.topology, *_overrides(program),
         *(["--phase", program.phase] if program.phase else [])],
        stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    return from_report(program, json.loads(done.stdout)) if done.stdout else None


def from_report(program: Program, told: dict) -> Program:
    """`told`: what `llmx.aot --json` prints."""
    held, times = told["memory"], told["timeline"]
    return dataclasses.replace(
        program, state=held["arguments"], peak=held["peak"], sent=report.sent_by_axes(told),
        seconds={name: times[name] for name in ("step", "compute", "exposed")},
    )  # fmt: skip


def _overrides(program: Program) -> Sequence[str]:
    return [f"--config.{flag}" for flag in program.flags]
