"""The report on a step's time: as JSON and as text."""

from typing import Any

from llmx.config import Config, utilization
from llmx.plan import schedule_report, sizes, step_time
from llmx.plan.machines import Machine
from llmx.plan.step_time import StepTime
from llmx.runtime.utilization import text as utilization_text


def to_json(found: StepTime, run: Config, machine: Machine) -> dict[str, Any]:
    """For the report: seconds, tokens per second, utilization, and what operators take of it."""
    tokens = run.batch.size * run.batch.sequence_length / found.step
    chip = machine.core.chip
    reached = utilization.of(run, chip, machine.topology.num_devices)
    peak, _ = chip.peak(reached.dtype)
    times = step_time.repetitions(sizes.of(run))
    listed = [
        {
            "name": one.name, "part": one.part, "moment": one.moment,
            "count": one.count * times[one.moment], "seconds": one.seconds, "flops": one.flops,
            "bytes": one.bytes, "share": one.flops / one.seconds / peak,
            **dict(zip("mnk", one.shape, strict=True)),
        }
        for one in found.operators
    ]  # fmt: skip
    return {
        "step": found.step, "compute": found.compute, "exposed": found.exposed,
        "bubble": found.bubble, "communication": found.communication, "tokens_per_second": tokens,
        **reached.shares(tokens), "parts": found.parts, "operators": listed, "peak_flops": peak,
        "bandwidth": chip.hbm_bandwidth / chip.devices_per_chip,
        "assumptions": assumptions(machine),
    }  # fmt: skip


def assumptions(machine: Machine) -> list[str]:
    """What the times rest on, in words."""
    reached = machine.core.calibration
    how = f"products at up to {reached.products:.0%} of the peak FLOP/s"
    if reached.table:
        how = f"products at {reached.in_steps:.0%} of a table of {len(reached.table)}"
    how += f", attention at {reached.attention:.0%} of the peak FLOP/s"
    if reached.cudnn:
        how += f" (cuDNN's at {reached.cudnn:.0%} of what an H200 reaches at its size)"
    how += ", memory at "
    how += f"{reached.memory:.0%} of its bandwidth"
    rates = machine.rates
    link = f"{rates.link / 1e9:.4g} GB/s over a device's links"
    if not machine.on_gpu:
        link = f"{rates.link / 1e9:.4g} GB/s over a link in one direction"
    beyond = "unknown" if rates.network is None else f"{rates.network / 1e9:.4g} GB/s"
    return [how, f"{link}, {beyond} beyond them"]


def lines(found: StepTime, report: dict[str, Any]) -> list[str]:
    """The time as text; `report`: of `to_json`."""
    rows = [
        (name, f"{seconds:.4g} s", f"{seconds / found.step:.1%}")
        for name, seconds in sorted(found.parts.items(), key=lambda item: -item[1])
    ]
    return [
        f"step {found.step:.4g} s: {report['tokens_per_second']:,.0f} tokens/s, "
        f"{utilization_text(report)}",
        *schedule_report.columns(rows, right=2),
        f"messages take {found.communication:.4g} s by themselves, of which the step waits for "
        f"{found.exposed:.4g} s",
        *(f"assumed: {what}" for what in report["assumptions"]),
    ]
