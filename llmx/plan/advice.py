"""What to change about a run, in words, from the figures of its report."""

from collections.abc import Iterator, Mapping
from typing import Any

from llmx.aot.report import size
from llmx.plan import options

Report = Mapping[str, Any]

# From here on a cost is worth a word: shares of a step, of time, of memory.
WAITING, LOST, LARGE, GAIN = 0.1, 0.005, 0.15, 0.01
NUM_LARGEST = 3

_SPLIT = "more devices to split it over (--config.mesh.fsdp)"
_SMALLER = "smaller microbatches (--config.batch.accumulation)"
REMEDIES = {
    "parameters": f"{_SPLIT}, or --config.offload.parameters",
    "optimizer": f"{_SPLIT}, or --config.offload.optimizer",
    "saved activations": f"another --config.remat, or {_SMALLER}",
    "kept": f"another --config.remat, or {_SMALLER}",
    "in flight": f"{_SPLIT}, or another --config.pipeline.schedule",
    "a layer": f"{_SMALLER}, or --config.mesh.sequence",
    "a layer, begun": f"{_SMALLER}, or --config.mesh.sequence",
    "gradient of the embedding": f"--config.mesh.tensor, or {_SPLIT} with --config.sharding.layout",
    "working": f"{_SMALLER}, or --config.mesh.sequence",
    "loss": f"{_SMALLER}, or --config.mesh.tensor",
    "gathered weights": "--config.sharding.gather=layer",
}  # fmt: skip


def of(report: Report) -> list[str]:
    """Sentences, the most urgent first; `report`: of `run_report.show`."""
    rules = (_of_memory, _of_search, _of_remat, _of_time, _of_failures)
    found = [line for rule in rules for line in rule(report)]
    return found or ["Nothing stands out among what this report has."]


def to_fit(report: Report) -> list[str]:
    """Lines of what to change about a run that does not fit; [] if it does."""
    if report["memory"]["fits"]:
        return []
    return [f"to fit: {line}" for line in (*_of_memory(report), *_of_remat(report))]


def _of_memory(report: Report) -> Iterator[str]:
    memory = report["memory"]
    if memory["fits"]:
        return
    held = memory["state"] | memory["peaks"].get(memory["moment"], {})
    over = memory["peak"] - memory["admitted"] * memory["limit"]
    if memory["refusal"]:
        yield "The run is refused and would not begin; the reason names what would."
    if over <= 0:
        return
    yield f"It takes {size(over)} more than is admitted."
    for name, num_bytes in sorted(held.items(), key=lambda item: -item[1])[:NUM_LARGEST]:
        if num_bytes >= LARGE * memory["peak"]:
            remedy = f": {REMEDIES[name]}" if name in REMEDIES else ""
            share = num_bytes / memory["peak"]
            yield f"{size(num_bytes)}, {share:.0%} of the peak, are for {name}{remedy}"


def _of_search(report: Report) -> Iterator[str]:
    search = report.get("search")
    if search is None or not search["configurations"]:
        return
    if search["best"] is None:
        yield (
            f"None of {search['candidates']:,} configurations fits; of those that were counted the "
            f"least takes {size(search['least'])}."
        )
        return
    best = search["configurations"][search["best"]]
    flags, time = options.pasted(best["flags"]), report.get("time")
    text = f"takes {best['step']:.4g} s a step: {flags}"
    if time and best["step"] < time["step"]:
        text = (
            f"takes {1 - best['step'] / time['step']:.0%} less time, {best['step']:.4g} s: {flags}"
        )
    yield f"The fastest of {search['fit']:,} configurations that fit {text}"
    yield from search.get("what_if", ())


def _of_time(report: Report) -> Iterator[str]:
    if (time := report.get("time")) is None or report.get("search"):
        return  # what a search tried is more than what a rule says
    step = time["step"]
    if time["bubble"] > WAITING * step:
        yield (
            f"Stages of the pipeline are idle for {time['bubble'] / step:.0%} of the step: more "
            "microbatches (--config.batch.accumulation, with a larger --config.batch.size where "
            "they have one sequence per device), or another --config.pipeline.schedule"
        )
    if time["exposed"] > WAITING * step:
        longest = max((name for name in time["parts"] if name.startswith("exposed")),
                      key=time["parts"].get, default="")  # fmt: skip
        yield (
            f"The step waits for messages for {time['exposed'] / step:.0%} of its time, most of it "
            f"{longest}: a mesh that sends less along this axis, or more tokens per device"
        )


def _of_remat(report: Report) -> Iterator[str]:
    """The fastest of the other ways to save activations that fit, if it is of use."""
    time = report.get("time")
    fitting = [one for one in report.get("remats", ()) if one["fits"]]
    if time is None or report.get("search") or not fitting:
        return
    best = min(fitting, key=lambda one: one["step"])
    text = f"--config.remat={best['remat']} takes {best['step']:.4g} s a step"
    if not report["memory"]["fits"]:
        yield f"{text} and {size(best['memory'])}, which fits"
    elif best["step"] < (1 - GAIN) * time["step"]:
        gain = 1 - best["step"] / time["step"]
        yield f"{text}, {gain:.1%} less, and {size(best['memory'])} of a device"


def _of_failures(report: Report) -> Iterator[str]:
    run = report.get("duration") or {}
    own = run.get("as_configured")
    if own and run["goodput"] - own["goodput"] > LOST:
        yield (
            f"--config.checkpoint.every={run['interval']} instead of {own['interval']} gives a "
            f"goodput of {run['goodput']:.1%} instead of {own['goodput']:.1%}"
        )
