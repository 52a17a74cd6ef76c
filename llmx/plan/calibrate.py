"""Measures what this machine's devices reach, for `llmx.plan --hardware`:

    python -m llmx.plan calibrate --out cpu.json [--quick]

Measured are products of matrices over a grid of sizes, types and passes; elementwise operators over
sizes; attention as llmx runs it here; the first use of new memory; a turn of a loop; and with
several devices sums over all. Each measurement is added to FILE.json.part as it is made: a run that
was stopped goes on behind the last one. FILE.json is written at the end (`hardware_file`).
"""

import dataclasses
import datetime
import itertools
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from llmx.aot import links, topologies
from llmx.aot.topologies import Topology
from llmx.plan import calibrations, gemm, hardware_file, machines, routes
from llmx.plan.gemm import Attended, Calibration, Core, Measured, Streamed
from llmx.plan.hardware_file import Hardware
from llmx.plan.traffic import Message
from llmx.runtime import exits, hardware, output_paths, printable

MIB = 2**20
ABOVE_THE_PEAK = 0.02  # of a product's least time: clocks and peaks are rounded
# Measurements of another version of `stopwatch` are not gone on with.
STOPWATCH = 2
LEAST_SHARE = 0.01  # of a measured time that is left without the start of an operator
# In the loop that measures them a GPU's small operators wait for the host; in a step the host is
# ahead. Products that take less than so many starts of an operator are left out, and the start that
# the planner takes stays as assumed.
LEAST_STARTS = 5
STOPPED = 130  # exit code of what Ctrl-C ends
_CPU_START = 50e-6  # seconds of a collective between CPU devices, where none was measured
# What is measured: its kind, and the arguments of the function in `stopwatch` that has its name.
Key = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True)
class Grid:
    """Sizes that are measured on a platform."""

    tokens: Sequence[int]
    widths: Sequence[int]
    dtypes: Sequence[str]
    most_flops: float  # of a product
    moved: Sequence[int]  # bytes
    lengths: Sequence[int]  # of a document
    head_dims: Sequence[int]
    rows: Sequence[int]  # heads x documents
    most_scores: int  # of a call
    sent: Sequence[int]  # bytes


def _grid(platform: str, quick: bool) -> Grid:
    powers = lambda first, last, step=2: [2**n for n in range(first, last, step)]  # noqa: E731
    dtypes = ("float32", "bfloat16")
    if platform == "cpu":
        return Grid(
            tokens=(128, 2048) if quick else (64, 512, 4096),
            widths=(64, 768) if quick else (64, 256, 1024, 4096), dtypes=dtypes, most_flops=5e9,
            moved=powers(14, 29, 4 if quick else 1), lengths=(256, 1024) if quick else
            (64, 256, 512, 1024, 2048), head_dims=(64,) if quick else (16, 64, 128),
            rows=(8,) if quick else (2, 16, 64), most_scores=2**23, sent=powers(10, 27, 4),
        )  # fmt: skip
    return Grid(
        tokens=(1024, 8192) if quick else (1024, 4096, 16384),
        widths=(1024, 8192) if quick else (1024, 2048, 4096, 8192, 16384), dtypes=("bfloat16",),
        most_flops=1e14, moved=powers(16, 33, 4 if quick else 2),
        lengths=(2048, 8192) if quick else (1024, 2048, 4096, 8192, 16384),
        head_dims=(128,) if quick else (64, 128), rows=(32,) if quick else (8, 64),
        most_scores=2**36, sent=powers(10, 31, 4),
    )  # fmt: skip


def keys_of(platform: str, num_devices: int, quick: bool) -> list[Key]:
    """All that is measured, in order."""
    grid = _grid(platform, quick)
    found: list[Key] = [("start",)]
    found += [("move", size) for size in grid.moved]
    if platform == "cpu":
        found.append(("first_touch", 256 * MIB))
    for dtype, tokens, n, k in itertools.product(
        grid.dtypes, grid.tokens, grid.widths, grid.widths
    ):
        if 2.0 * tokens * n * k <= grid.most_flops:
            found.append(("product", tokens, n, k, dtype, "forward"))
            found.append(("product", tokens, n, k, dtype, "input gradient"))
            found.append(("product", n, k, tokens, dtype, "weight gradient"))
    for dtype, length, head_dim, rows in itertools.product(
        grid.dtypes, grid.lengths, grid.head_dims, grid.rows
    ):
        if rows * length**2 <= grid.most_scores:
            heads = min(rows, 8)
            sizes = (rows // heads, length, heads, heads, head_dim)
            found += [("attention", *sizes, dtype, passes) for passes in (1, 2)]
    if num_devices > 1:
        found += [("all_reduce", size) for size in grid.sent]
    return found


def measure(key: Key) -> float:
    """Seconds of one measurement on this machine."""
    from llmx.plan import stopwatch

    return vars(stopwatch)[key[0]](*key[1:])


def run(
    path: pathlib.Path, machine: Mapping[str, Any], keys: Sequence[Key],
    clock: Callable[[Key], float], note: Callable[[str], None],
) -> dict[Key, float]:  # fmt: skip
    """Seconds of all measurements; those that an earlier run made are read from `path`.

    `machine`: what must be the same as in the earlier run; ValueError if it is not. `clock`:
    measures one. `note`: is told how far it is.
    """
    found = _read(path, machine)
    if not found:
        path.write_text(json.dumps(machine) + "\n")
    elif done := sum(key in found for key in keys):
        note(f"{path}: {done} of {len(keys)} are measured already")
    with path.open("a") as file:
        for number, key in enumerate(keys, 1):
            if key in found:
                continue
            found[key] = clock(key)
            file.write(json.dumps([list(key), found[key]]) + "\n")
            file.flush()
            text = " ".join(map(str, key))
            note(f"{number} of {len(keys)}: {text}: {found[key] * 1e6:,.1f} us")
    return found


def check_products(path: pathlib.Path, found: Mapping[Key, float], chip: hardware.Chip) -> None:
    """ValueError if a product took less than the chip's peak FLOP/s allow, by 2% or more.

    Its line of `path` is taken out, so that the next run measures it again.
    """
    least = {
        key: 2.0 * key[1] * key[2] * key[3] / chip.peak(str(key[4]))[0]
        for key in found
        if key[0] == "product"
    }
    if not (wrong := [key for key in least if found[key] < (1 - ABOVE_THE_PEAK) * least[key]]):
        return
    lines = path.read_text().splitlines(keepends=True)
    kept = [line for line in lines[1:] if tuple(json.loads(line)[0]) not in wrong]
    _replace(path, "".join([lines[0], *kept]))
    first = min(wrong, key=lambda key: found[key] / least[key])
    _, m, n, k, dtype, role = first
    raise ValueError(
        f"{len(wrong)} of {len(least)} products took less than the peak of {chip.name} allows: "
        f"[{m}, {k}] x [{k}, {n}] of {dtype}, {role}: {found[first] * 1e6:,.1f} us, and at "
        f"{chip.peak(str(dtype))[0] / 1e12:,.4g} TFLOP/s it takes {least[first] * 1e6:,.1f}. "
        "The same command measures them again; where it says this twice, the chip has another "
        "peak: change its row in llmx/runtime/hardware.py"
    )


_LEAST_SECONDS = 1e-12  # less was not measured


def _read(path: pathlib.Path, machine: Mapping[str, Any]) -> dict[Key, float]:
    if not path.exists():
        return {}
    text = path.read_text(errors="replace")
    lines = text.splitlines()
    if not lines:
        return {}
    try:
        of = json.loads(lines[0])
    except json.JSONDecodeError:
        of = None
    if of != machine:
        raise ValueError(
            f"{path} holds measurements of {of}, and this is {machine}: remove it, or give another "
            "--out"
        )
    found, kept = {}, lines[:1]
    for line in lines[1:]:
        try:
            key, seconds = json.loads(line)
            key, seconds = tuple(key), float(seconds)
            if _LEAST_SECONDS < seconds < math.inf:
                found[key] = seconds
                kept.append(line)
        except (ValueError, TypeError, OverflowError):
            continue  # the end of a run that was killed while it wrote; it is measured again
    whole = "".join(f"{one}\n" for one in kept)
    if whole != text:  # perhaps only the end of the last line is missing
        _replace(path, whole)
    return found


def _replace(path: pathlib.Path, text: str) -> None:
    """Writes a file so that a process that is killed leaves it as it was."""
    _new(path).write_text(text)
    _new(path).replace(path)


def _new(path: pathlib.Path) -> pathlib.Path:
    """Where a file stands until it is whole."""
    return path.with_name(f"{path.name}.new")


def hardware_of(found: Mapping[Key, float], name: str, about: Mapping[str, Any]) -> Hardware:
    """The hardware that was measured. `about`: who measured it, and of what."""
    kind = about["device_kind"]
    base = hardware.DEVICE_KINDS.get(kind)
    family = _family(kind)
    chip = hardware.CHIPS[base] if base else _cpu_chip(found, name)
    chip = dataclasses.replace(chip, name=name)
    start = calibrations.core_of(base).calibration if base else calibrations.shares_of(chip)
    calibration = _calibration(found, chip, start)
    usable = (topologies.TPUS | topologies.GPUS)[family].hbm_bytes if family else None
    usable = usable or int(hardware_file.USABLE * chip.device_hbm_bytes)
    shared = links.Rates(chip.link_bandwidth, None, _CPU_START, 0.0, 0.0)
    rates = links.rates_of(chip) if base else shared
    own = Hardware(name, family, Core(chip, calibration), rates, int(usable), about)
    return dataclasses.replace(own, rates=_rates(found, own))


def _family(device_kind: str) -> str | None:
    machines = (topologies.TPUS | topologies.GPUS).items()
    return next((name for name, one in machines if one.device_kind == device_kind), None)


def _cpu_chip(found: Mapping[Key, float], name: str) -> hardware.Chip:
    """What a CPU reaches stands for its peaks, which nobody publishes."""
    flops: dict[str, float] = {}
    for key, seconds in found.items():
        if key[0] == "product":
            _, m, n, k, dtype, _ = key
            flops[dtype] = max(flops.get(dtype, 0.0), 2.0 * m * n * k / seconds)
    largest = max(key[1] for key in found if key[0] == "move")
    bandwidth = 2.0 * largest / found["move", largest]
    return hardware.Chip(
        name, flops, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), bandwidth,
        link_bandwidth=bandwidth / 2, num_links=1, topology=hardware_file.SHARED,
        max_domain=topologies.MAX_DEVICES, network_bandwidth=None,
    )  # fmt: skip


def _calibration(
    found: Mapping[Key, float], chip: hardware.Chip, start: Calibration
) -> Calibration:
    joined, on_gpu = chip.topology == hardware_file.SHARED, chip.is_gpu
    table, streamed, start_of = [], [], found["start",]
    for key, seconds in found.items():
        if key[0] == "product":
            _, m, n, k, dtype, _ = key
            if on_gpu and seconds < LEAST_STARTS * start_of:
                continue
            share = 2.0 * m * n * k / _without(start_of, seconds) / chip.peak(dtype)[0]
            table.append(Measured(m, n, k, dtype, min(1.0, round(share, 4))))
        elif key[0] == "move":
            streamed.append(
                Streamed(key[1], max(1, round(2.0 * key[1] / _without(start_of, seconds))))
            )
    reached = max(row.share for row in table)
    largest = max(streamed)
    bandwidth = chip.hbm_bandwidth / chip.devices_per_chip
    touched = [(key[1], seconds) for key, seconds in found.items() if key[0] == "first_touch"]
    attended = _attended(found, joined)
    return dataclasses.replace(
        start, products=min(1.0, reached), memory=min(1.0, largest.bandwidth / bandwidth),
        attention=start.attention if on_gpu else _share_of_attention(attended, chip),
        start=start.start if on_gpu else start_of,
        units=0 if joined else start.units,
        table=tuple(table), streamed=tuple(sorted(streamed)), attended=tuple(attended),
        fresh=touched[0][0] / touched[0][1] if touched else 0.0,
    )  # fmt: skip


def _without(start: float, seconds: float) -> float:
    """A measured time without the start of an operator, which the planner adds to its rows."""
    return max(seconds - start, LEAST_SHARE * seconds)


def _attended(found: Mapping[Key, float], in_blocks: bool) -> list[Attended]:
    """Seconds of a score, of forward and backward pass."""
    rows = []
    for key, once in found.items():
        if key[0] == "attention" and key[-1] == 1:
            _, batch, length, heads, _, head_dim, dtype, _ = key
            start, both = found["start",], found[*key[:-1], 2]
            scores = batch * heads * gemm.scores_of(length, in_blocks=in_blocks)
            backward, forward = _without(start, max(both - once, once)), _without(start, once)
            rows.append(
                Attended(length, batch * heads, head_dim, dtype, forward / scores,
                         backward / scores)
            )  # fmt: skip
    return rows


def _share_of_attention(rows: Sequence[Attended], chip: hardware.Chip) -> float:
    """The most that attention reaches of the peak FLOP/s, forward."""
    share = lambda row: 4.0 * row.head_dim / row.forward / chip.peak(row.dtype)[0]  # noqa: E731
    return min(1.0, max(map(share, rows)))


def _rates(found: Mapping[Key, float], own: Hardware) -> links.Rates:
    """With sums over all devices: what their links reach, so that the planner's route over the
    machine takes the measured times. As they are where a sum leaves its host or slice: the network
    takes an unknown part of it."""
    sent = sorted((key[1], seconds) for key, seconds in found.items() if key[0] == "all_reduce")
    shape, rates = str(own.measured["shape"]), own.rates
    if len(sent) < 2 or not shape:
        return rates
    topology = machines.topology_of(f"{own.name}:{shape}", own, "measured")
    if topology.num_slices > 1 or (own.platform == "gpu" and topology.shape[0] > 1):
        return rates
    (least, start), (most, longest) = sent[0], sent[-1]
    first, last = (_predicted(size, topology, own) for size in (least, most))
    link = rates.link * (last - first) / max(longest - start, 1e-9)
    free = dataclasses.replace(rates, link=link, start=0.0)
    own = dataclasses.replace(own, rates=free)
    return dataclasses.replace(free, start=max(0.0, start - _predicted(least, topology, own)))


def _predicted(num_bytes: int, topology: Topology, own: Hardware) -> float:
    """Seconds of a sum over all devices by the planner."""
    machine = machines.Machine(topology, own.core, own.rates)
    of_all = routes.Routes(machine, {"data": topology.num_devices})
    message = Message("sums", "all-reduce", ("data",), num_bytes, 1, topology.num_devices)
    return of_all.seconds(message)


def this_machine() -> dict[str, Any]:
    """What measurements are of; starts the jax backend."""
    import jax

    kind = jax.devices()[0].device_kind
    return {
        "device_kind": kind, "num_devices": jax.device_count(), "shape": shape_of(jax.devices()),
        "jax": jax.__version__, "stopwatch": STOPWATCH,
        "cores": len(os.sched_getaffinity(0)), "processor": _processor() if kind == "cpu" else "",
    }  # fmt: skip


def shape_of(devices: Sequence) -> str:
    """How jax devices are joined, as `--machine` has it behind the name; "" = in no known shape."""
    if devices[0].platform == "cpu":
        return str(len(devices))
    hosts = {device.process_index for device in devices}
    if devices[0].platform == "gpu":
        return f"{len(hosts)}x{len(devices) // len(hosts)}"
    places = np.array([device.coords for device in devices])
    sides = (places.max(axis=0) - places.min(axis=0) + 1).tolist()
    chip = hardware.chip_of(devices[0].device_kind)
    if chip is None:
        return ""
    if math.prod(sides) * chip.devices_per_chip != len(devices):  # several slices, or part of one
        return ""
    return "x".join(map(str, sides[: 2 if chip.topology == "torus_2d" else 3]))


def _processor() -> str:
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    return found[1] if (found := re.search(r"model name\s*: (.*)", text)) else ""


def main(argv: Sequence[str]) -> int:
    """The command line of `python -m llmx.plan calibrate`; the exit code."""
    command = printable.Parser(
        prog="python -m llmx.plan calibrate", allow_abbrev=False,
        description="Measures what this machine's devices reach, for `python -m llmx.plan "
        "--hardware FILE.json`. Minutes; a run that was stopped goes on where it was.",
    )  # fmt: skip
    command.add_argument("--out", metavar="FILE.json", help="what is written (KIND.json)")
    command.add_argument("--quick", action="store_true", help="fewer sizes, a minute")
    args = command.parse_args(argv)
    if problems := output_paths.file_problems("--out", args.out or ""):
        printable.to_stderr("\n".join(problems))
        return 2
    from llmx import config
    from llmx.runtime import launch

    launch.start(config.default().launch)
    machine = this_machine() | {"quick": args.quick}
    name = _family(machine["device_kind"]) or _name_of(machine["device_kind"])
    out = pathlib.Path(args.out or f"{name}.json")
    part = out.with_name(f"{out.name}.part")
    for path in (out, part, _new(out)):
        if path.exists() and not path.is_file():
            printable.to_stderr(f"--out {out}: {path} is no file: give another --out")
            return 2
    platform = "cpu" if machine["device_kind"] == "cpu" else "accelerator"
    keys = keys_of(platform, machine["num_devices"], args.quick)
    if platform != "cpu" and machine["device_kind"] not in hardware.DEVICE_KINDS:
        printable.to_stderr(f"{machine['device_kind']!r} has no row in llmx.runtime.hardware")
        return 2
    note = printable.to_stderr
    try:
        found = run(part, machine, keys, measure, note)
        if chip := hardware.chip_of(machine["device_kind"]):
            check_products(part, found, chip)
    except (ValueError, OSError) as error:
        printable.to_stderr(error)
        return 2
    except KeyboardInterrupt:
        printable.to_stderr(f"stopped; the same command goes on from {part}")
        return STOPPED
    about = machine | {"date": datetime.date.today().isoformat()}
    own = hardware_of({key: found[key] for key in keys}, name, about)
    _replace(out, hardware_file.to_text(own))
    part.unlink()
    exits.show(text(own, out))
    return 0


def _name_of(device_kind: str) -> str:
    return re.sub(r"\W+", "_", device_kind.lower())


def text(own: Hardware, path: pathlib.Path) -> str:
    """What was measured, in words."""
    chip, found = own.core.chip, own.core.calibration
    flops = ", ".join(f"{name} {rate / 1e9:,.4g}" for name, rate in chip.flops.items())
    return "\n".join([
        f"{own.name}: {own.measured.get('processor') or own.measured['device_kind']}, "
        f"{own.measured['num_devices']} devices, {own.measured['date']}",
        f"peak GFLOP/s: {flops}; products reach {found.products:.0%}, "
        f"attention {found.attention:.0%}",
        f"memory: {chip.hbm_bandwidth * found.memory / 1e9:,.4g} GB/s"
        + (f", new memory {found.fresh / 1e9:,.3g} GB/s" if found.fresh else ""),
        f"{len(found.table)} products, {len(found.attended)} sizes of attention",
        f"written to {path}: python -m llmx.plan --config CONFIG --machine {own.name}:SHAPE "
        f"--hardware {path}",
    ])  # fmt: skip
