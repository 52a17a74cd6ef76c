"""What a search found, as JSON and as text: the best, why the next lost, what more would change."""

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from llmx.aot import compiler, report
from llmx.aot.report import size
from llmx.config import Config
from llmx.plan import (
    candidates,
    exchange,
    experts,
    schedule_report,
    search_bounds,
    sizes,
    traffic,
)
from llmx.plan.machines import Machine
from llmx.plan.options import pasted
from llmx.plan.search import ADMITTED, Found, Option, Search

MOST_COUNTED = 3500  # candidates: tens of seconds
MORE = 2**30  # bytes of a device, for "what if"
_WIDTH = 30  # of the progress bar
_NAMED = 0.002  # of a step: smaller differences are not said
SHOWN = 8


def make(config: Config, machine: Machine) -> Search:
    """The search for a config that is not resolved.

    Raises ConfigError for what is wrong on any mesh, ValueError for a `sync.strategy`.
    """
    if config.sync.strategy != "mean":
        raise ValueError(
            f"sync.strategy={config.sync.strategy!r} with a search for a mesh: its replicas are a "
            "choice of the method, and its exchange takes too long to count for thousands of "
            "meshes; use --config.sync.strategy=mean, or set the mesh"
        )
    topology = machine.topology
    platform = "cpu" if topology.family == "cpu" else topology.platform  # `auto` has CPUs as GPUs
    space = candidates.Space(
        candidates.neutral(config, platform), topology.num_devices, topology.num_slices,
        machine.on_gpu,
    )  # fmt: skip
    if why_not := (
        candidates.of_adapters(config)
        or candidates.of_latents(space.base)
        or experts.refusal(space.base, topology.device_kind)
    ):
        raise ValueError(why_not)
    own = candidates.own(config, topology)
    if own is not None and experts.refusal(own, topology.device_kind):
        own = None
    return Search(space, machine, own, bounds=search_bounds.Bounds(space, machine))


def chosen(config: Config, machine: Machine, *, out: TextIO | None = None) -> tuple[Config, str]:
    """The fastest run that fits, not resolved, and how it was found, in words.

    Every process of a job finds the same. Raises ValueError where nothing fits.
    """
    search = make(dataclasses.replace(config, mesh=type(config.mesh)(data=1)), machine)
    search.own = None
    found = search.find(most=MOST_COUNTED, progress=bar(out) if out else None)
    if found.best is None:
        raise ValueError(nothing_fits(found, config, machine))
    best = found.best
    text = (
        f"mesh=auto: the fastest of {found.candidates:,} configurations, predicted "
        f"{best.step:.4g} s a step with {size(best.memory)} of a device: "
        f"{pasted(candidates.flags(best.candidate, config))}{_left_out(found)}"
    )
    return candidates.changed(config, best.candidate), text


def nothing_fits(found: Found, config: Config, machine: Machine) -> str:
    """Why a search found nothing, with the remedy."""
    name, num = machine.topology.name, machine.topology.num_devices
    if not found.candidates:
        return (
            f"no mesh of the {num:,} devices of {name} divides batch.size={config.batch.size}, "
            f"batch.sequence_length={config.batch.sequence_length}, {config.model.num_layers} "
            "layers and the model's heads: use a batch.size that they divide, or fewer devices"
        )
    if found.least is None:
        return (
            f"none of {found.candidates:,} configurations goes with {name}, {num:,} devices: use a "
            "batch.size that they divide, other sizes of the model, or fewer devices"
        )
    return (
        f"none of {found.candidates:,} configurations fits into "
        f"{size(ADMITTED * machine.topology.hbm_bytes)} of a device of {name}: of those that were "
        f"counted the least takes {size(found.least.memory)}; use more devices, a smaller "
        "batch.sequence_length, or offload"
    )


def bar(out: TextIO) -> Callable[[float, str], None]:
    """Draws the share of a search that is done, on a terminal in one line."""
    begun, last = time.monotonic(), [0.0]

    def draw(share: float, text: str):
        now = time.monotonic()
        if now - last[0] < (0.2 if out.isatty() else 10.0):
            return
        last[0] = now
        full = round(_WIDTH * share)
        line = f"search [{'#' * full}{'.' * (_WIDTH - full)}] {text}, {now - begun:.0f} s"
        print(f"\r{line:<79}" if out.isatty() else line, end="" if out.isatty() else "\n",
              file=out, flush=True)  # fmt: skip

    return draw


def show(
    config: Config, machine: Machine, *, verify: int = 0, out: TextIO | None = None
) -> tuple[dict[str, Any], list[str], Config]:
    """The section of the report, its lines, and the best run, resolved; where none fits, the one
    that holds least.

    `config`: not resolved. `verify`: of how many of the fastest the programs are compiled. `out`:
    for the progress; None = `sys.stderr`. Raises ValueError where checks refuse every
    configuration, and what `make` does.
    """
    out = out or sys.stderr
    begun = time.perf_counter()
    search = make(config, machine)
    found = search.find(most=MOST_COUNTED, progress=bar(out))
    if out.isatty():
        print(file=out)
    if (chosen := found.best or found.least) is None:
        raise ValueError(nothing_fits(found, config, machine))
    what_if = _what_if(search, found) if found.best else []
    seconds = time.perf_counter() - begun
    section = {
        "candidates": found.candidates, "fit": found.fit, "counted": found.counted,
        "seconds": seconds, "best": 0 if found.best else None,
        "bound": found.bound if found.best else None,
        "configurations": [_json(one, config) for one in (*found.options, *found.too_large)],
        "runner_up": _runner_up(found.options, config), "what_if": what_if,
    }  # fmt: skip
    if found.best is None:
        section |= {"nothing_fits": nothing_fits(found, config, machine), "least": chosen.memory}
    lines = _lines(section, found, config, machine)
    if verify:
        compiled, more = _verified(search, found, config, machine, verify, out)
        section["verified"] = compiled
        lines += ["", *more]
    return section, lines, search.run_of(chosen.candidate)


def _json(option: Option, config: Config) -> dict[str, Any]:
    return {
        "flags": candidates.flags(option.candidate, config), "step": option.step,
        "memory": option.memory, "fits": option.fits, "parts": option.parts,
    }  # fmt: skip


def _runner_up(options: Sequence[Option], config: Config) -> str:
    """Why the second lost, by the parts of its step."""
    if len(options) < 2:
        return ""
    best, second = options[:2]
    flags = pasted(candidates.flags(second.candidate, config))
    names = {*best.parts, *second.parts}
    differences = {name: second.parts.get(name, 0.0) - best.parts.get(name, 0.0) for name in names}
    named = [
        f"{difference:+.3g} s {name}"
        for name, difference in sorted(differences.items(), key=lambda item: -abs(item[1]))
        if abs(difference) > _NAMED * best.step
    ]
    slower = second.step / best.step - 1
    why = f": {', '.join(named)}" if named else ", with a little more of everything"
    return f"{flags} takes {slower:.1%} longer{why}"


def _what_if(search: Search, found: Found) -> list[str]:
    """What more memory and faster links would change."""
    best, texts = found.best, []
    limit = ADMITTED * search.machine.topology.hbm_bytes
    more = search.find(limit=limit + MORE, keep=1, most=MOST_COUNTED)
    text = _better(more.best, best, least=bool(_left_out(more)))
    texts.append(f"with 1 GiB more of each device: {text}")
    machine = search.machine
    for name, field in (("links", "link"), ("a network", "network")):
        rate = getattr(machine.rates, field)
        if rate is None:
            continue
        faster = dataclasses.replace(machine.rates, **{field: 2 * rate})
        other = search.on(dataclasses.replace(machine, rates=faster), None)
        retimed = [other.option(one.candidate, limit) for one in found.options]
        # Only those that are the fastest now: another may gain more.
        text = _better(min(retimed, key=lambda one: one.order), best, least=True)
        texts.append(f"with {name} twice as fast: {text}")
    return texts


def _better(option: Option, best: Option, *, least: bool) -> str:
    """What a change gains; `least`: others than this option were not all looked at."""
    gain = 1 - option.step / best.step
    if gain < _NAMED:
        return "nothing for those that are the fastest now" if least else "nothing"
    same = option.candidate == best.candidate
    flags = "" if same else f", {_difference(option.candidate, best.candidate)}"
    return f"{'at least ' if least else ''}{gain:.1%} less time{flags}"


def _difference(one: candidates.Candidate, other: candidates.Candidate) -> str:
    """What one has and the other has not, as keys of the config."""
    return ", ".join(
        f"{candidates.KEYS[field]}={value}"
        for field, value in one._asdict().items()
        if value != getattr(other, field)
    )


def _lines(section: dict[str, Any], found: Found, config: Config, machine: Machine) -> list[str]:
    head = (
        f"search: {found.candidates:,} configurations in {section['seconds']:.1f} s, memory of "
        f"{found.counted:,} counted"
    )
    if found.best is None:
        return [head, nothing_fits(found, config, machine)]
    rows = [("step", "memory", "flags")]
    for option in found.options[:SHOWN]:
        flags = pasted(candidates.flags(option.candidate, config)) or "(as configured)"
        rows.append((f"{option.step:.4g} s", size(option.memory), flags))
    second = [f"the second: {text}"] if (text := section["runner_up"]) else []
    return [
        head + _left_out(found), *schedule_report.columns(rows), *second, *section["what_if"],
    ]  # fmt: skip


def _left_out(found: Found) -> str:
    """Where a search ended before all that may be faster was counted, what none of it can beat."""
    if found.bound >= found.best.step * (1 - 1e-6):
        return ""
    return (
        f"; not all that may be faster were counted: none takes less than {found.bound:.4g} s, "
        f"{1 - found.bound / found.best.step:.1%} less than the best here"
    )


def _verified(
    search: Search, found: Found, config: Config, machine: Machine, most: int, out: TextIO
) -> tuple[list[dict[str, Any]], list[str]]:
    """The fastest, compiled: what was predicted beside what the program has."""
    results, lines = [], ["compiled", "predicted and compiled: peak, bytes sent, step"]
    for option in found.options:
        if len(results) == most:
            break
        flags = pasted(candidates.flags(option.candidate, config))
        print(f"compiling {flags}", file=out, flush=True)
        run = search.run_of(option.candidate)
        try:
            result = compiler.compile(run, machine.topology)
        except (compiler.CompileError, ValueError) as error:
            lines.append(f"{flags}: the compiler refuses it: {str(error).splitlines()[0]}")
            continue
        one = _beside(option, run, result, machine)
        results.append({"flags": flags, **one})
        told, fits = one["compiled"], "" if result.fits else " DOES NOT FIT"
        step = "unknown" if told["step"] is None else f"{told['step']:.4g} s"
        sent = (sum(of["sent"].values()) for of in (one["predicted"], told))
        lines.append(
            f"{size(option.memory)} and {size(told['peak'])}{fits}; "
            f"{' and '.join(map(size, sent))}; {option.step:.4g} s and {step}: {flags}"
        )
    return results, lines


def _beside(
    option: Option, run: Config, result: report.Result, machine: Machine
) -> dict[str, dict[str, Any]]:
    """What was predicted and what a program has: bytes at the peak and sent, seconds of a step."""
    told = report.to_json(result, None)
    sent = traffic.by_axes(exchange.on(sizes.of(run), machine.topology))
    step = result.timeline.step if result.timeline else None
    return {
        "predicted": {"peak": option.memory, "sent": sent, "step": option.step},
        "compiled": {
            "peak": result.memory.peak, "sent": report.sent_by_axes(told), "step": step,
        },
    }  # fmt: skip
