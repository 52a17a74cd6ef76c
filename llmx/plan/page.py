"""The report of `llmx.plan` on a config and a machine as one HTML page that needs no network.

The page is a file by itself: style and pictures are in it, there is no script, and nothing is
loaded. A section that the report does not have is left out.
"""

import collections
import html
import math
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import llmx
from llmx.pipeline.schedule import Table
from llmx.pipeline.simulate import Timeline
from llmx.plan import advice, page_text, pictures
from llmx.runtime import page_html
from llmx.runtime.page_html import Markup, escaped

Report = Mapping[str, Any]

MOST_OPERATORS, MOST_CONFIGURATIONS = 14, 12  # rows of a table
MOST_WORDS = 3  # parts of a step that are named on top


def render(report: Report, pipeline: tuple[Table, Timeline] | None = None) -> str:
    """The page.

    `report`: the JSON object of `run_report.show`, in bytes and seconds. `pipeline`: the schedule
    of the run and when its operations take place, for their picture; None: leave it out.
    """
    sections = [
        _time(report), _operators(report), _memory(report), _schedule(report, pipeline),
        _search(report), _sent(report), _duration(report), _rests_on(report),
    ]  # fmt: skip
    body = "\n".join([_head(report), *(section for section in sections if section)])
    return page_html.page(_title(report), f"{body}\n{_foot(report)}")


def _title(report: Report) -> str:
    config = pathlib.PurePath(report.get("run", {}).get("config", "").split(":")[0]).stem
    return f"{config} on {report['machine']}" if config else report["machine"]


# --------------------------------------------------------------------------------- the first screen


def _head(report: Report) -> str:
    """What the run is, whether it fits, how long a step is, where its time goes, what to change."""
    run = report.get("run", {})
    named = [(name, run[name]) for name in ("model", "machine", "mesh", "stages", "batch")
             if run.get(name)]  # fmt: skip
    cards = [_memory_card(report), _step_card(report), _run_card(report)]
    advised = page_html.bullets(map(_code_flags, advice.of(report)))
    return "\n".join([
        f"<header>\n<h1>{escaped(_title(report))}</h1>\n{page_html.facts(named)}\n</header>",
        f'<div class="cards">{"".join(card for card in cards if card)}</div>',
        page_html.section("What to change", advised, name="advice"),
    ])  # fmt: skip


def _line(text: object) -> str:
    return f"<p>{escaped(text)}</p>"


def _bar(parts: Mapping[str, tuple[float, str]], mark: float | None = None) -> str:
    """A bar of shares of the whole, each with its color; a line at the share `mark` inside it."""
    pieces = [
        f'<i style="width:{100 * share:.2f}%;background:{color}" title="{html.escape(name)}"></i>'
        for name, (share, color) in parts.items()
        if share >= 0.002
    ]
    if mark is not None and mark < 1:
        pieces.append(f'<b style="left:{100 * mark:.2f}%"></b>')
    return f'<div class="bar">{"".join(pieces)}</div>'


def _memory_card(report: Report) -> str:
    memory = report["memory"]
    share = memory["peak"] / memory["limit"]
    held = memory["state"] | memory["peaks"].get(memory["moment"], {})
    scale = max(memory["peak"], memory["limit"])
    bar = {name: (num / scale, pictures.BYTES.get(name, pictures.GRAY))
           for name, num in held.items()}  # fmt: skip
    answer = "It fits" if memory["fits"] else "It does not fit"
    return page_html.card(
        "Does it fit?", answer, _bar(bar, memory["limit"] / scale),
        _line(f"{page_text.memory(memory['peak'])} of {page_text.memory(memory['limit'])} of a "
              f"device, {share:.0%}; the peak is {memory['moment']}"
              + (f". The run is refused: {memory['refusal']}" if memory["refusal"] else "")),
        kind="good" if memory["fits"] else "bad",
    )  # fmt: skip


def _step_card(report: Report) -> str:
    if (time := report.get("time")) is None:
        return ""
    colors = pictures.time_colors(list(time["parts"]))
    bar = {name: (of / time["step"], colors[name]) for name, of in time["parts"].items()}
    most = sorted(time["parts"].items(), key=lambda item: -item[1])[:MOST_WORDS]
    words = " ".join(
        page_html.named(f"{name} {of / time['step']:.0%}", colors[name]) for name, of in most
    )
    return page_html.card(
        "How long is a step?", page_text.duration(time["step"]), _bar(bar), _line(Markup(words)),
        _line(f"{time['tokens_per_second']:,.0f} tokens/s, MFU {time['mfu']:.1%}, HFU "
              f"{time['hfu']:.1%}"),
    )  # fmt: skip


def _given(report: Report) -> str:
    """Of the run's steps, where their time was given and not counted."""
    run, counted = report["duration"], report.get("time")
    seconds = run.get("step_seconds")
    if not seconds or (counted and math.isclose(seconds, counted["step"])):
        return ""
    return f" of {page_text.duration(seconds)}, as --step-seconds says: MFU {run['mfu']:.1%}"


def _run_card(report: Report) -> str:
    if (run := report.get("duration")) is None:
        return ""
    cost = "" if run.get("dollars") is None else f", {run['dollars']:,.0f} dollars"
    return page_html.card(
        "And the whole run?", f"{run['seconds'] / 86400:,.2f} days",
        _line(f"{page_text.count(run['tokens'])} tokens in {run['steps']:,} steps{_given(report)}; "
              f"{run['device_hours']:,.0f} device hours{cost}"),
        _line(f"goodput {run['goodput']:.1%} with a checkpoint every {run['interval']:,} steps"),
    )  # fmt: skip


def _code_flags(line: str) -> Markup:
    """A line of text with its flags as code."""
    flag = r"--config\.[\w.]+(=(&quot;.*?&quot;|[\w.+-]+))?"
    return Markup(re.sub(flag, r"<code>\g<0></code>", html.escape(line)))


# ------------------------------------------------------------------------------------- the sections


def _time(report: Report) -> str:
    if (time := report.get("time")) is None:
        return ""
    alone = time.get("communication")
    waits = f"the step waits {page_text.duration(time['exposed'])} for messages"
    if alone is not None:
        waits = f"messages take {page_text.duration(alone)} by themselves; {waits}"
    rows = [
        ("computing", page_text.duration(time["compute"])),
        ("waiting for messages", page_text.duration(time["exposed"])),
        ("pipeline idle", page_text.duration(time["bubble"])),
        ("tokens per second", f"{time['tokens_per_second']:,.0f}"),
        *((label, f"{time[name]:.1%}") for name, label in (
            ("mfu", "MFU"), ("mfu_full", "MFU with all scores"), ("hfu", "HFU"),
            ("mfu_of_bfloat16", "MFU of bfloat16's peak")) if name in time),
    ]  # fmt: skip
    picture = page_html.figure(pictures.waterfall(time), f"{waits}.".capitalize())
    return page_html.section(
        "Where the time goes", page_html.columns(picture, page_html.facts(rows)), name="time"
    )


def _operators(report: Report) -> str:
    time = report.get("time")
    if time is None or not time["operators"]:
        return ""
    listed = sorted(_alike(time["operators"]), key=lambda one: -_spent(one))
    colors = pictures.time_colors([*pictures.TIMES, *time["parts"]])
    rows = []
    for number, one in enumerate(listed[:MOST_OPERATORS], 1):
        shape = " × ".join(f"{one[letter]:,}" for letter in "mnk") if one.get("m") else "–"
        rows.append((
            number, page_html.named(one["name"], colors.get(one.get("part"), pictures.BLUE)),
            page_text.share(_spent(one) / time["step"]), _reached(one),
            page_text.share(one["share"]) if one["flops"] else "–", f"{one['count']:,.4g}",
            page_text.duration(one["seconds"]), shape,
        ))  # fmt: skip
    if rest := listed[MOST_OPERATORS:]:
        share = page_text.share(sum(map(_spent, rest)) / time["step"])
        rows.append(("", f"{len(rest)} others", share, *[""] * 5))
    header = ("#", "operator", "of the step", "reaches", "of the peak", "times a step",
              "one takes", "M × N × K")  # fmt: skip
    caption = (
        "A point is an operator; numbers are those of the table below. Triangles are operators "
        "that only move bytes: they stand at 1 FLOP per byte, as high as the bytes per second that "
        "they reach."
    )
    picture = page_html.figure(
        pictures.roofline(time | {"operators": listed}, MOST_OPERATORS), caption
    )
    return page_html.section(
        "Operators", page_html.columns(picture, _parts_table(time, listed, colors)),
        page_html.table(header, rows, left=2), long=True,
    )  # fmt: skip


def _parts_table(time: Report, listed: Sequence[Report], colors: Mapping[str, str]) -> str:
    """What the operators of each part of a step reach together."""
    rows = []
    for part in dict.fromkeys(one.get("part", "") for one in listed):
        some = [one for one in listed if one.get("part", "") == part]
        seconds = sum(map(_spent, some))
        flops, num_bytes = (
            sum(one["count"] * one[of] for one in some) for of in ("flops", "bytes")
        )
        rows.append((
            page_html.named(part, colors.get(part, pictures.BLUE)), page_text.duration(seconds),
            page_text.share(flops / seconds / time["peak_flops"]) if flops else "–",
            page_text.share(num_bytes / seconds / time["bandwidth"]),
        ))  # fmt: skip
    return page_html.table(("part", "takes", "of peak FLOP/s", "of bandwidth"), rows)


def _spent(one: Report) -> float:
    """Seconds of an operator in a step."""
    return one["count"] * one["seconds"]


def _reached(one: Report) -> str:
    if one["flops"]:
        return page_text.rate(one["flops"] / one["seconds"], "FLOP/s")
    return page_text.rate(one["bytes"] / one["seconds"], "B/s")


def _alike(operators: Sequence[Report]) -> list[Report]:
    """Operators of one name and size as one: those that the backward pass runs again."""
    found: dict[tuple, dict[str, Any]] = {}
    for one in operators:
        name, moment = one["name"], one.get("moment", "")
        if not one["flops"] and moment in ("forward", "backward") and not name.endswith("again"):
            name = f"{name} {moment}"
        key = (name, one["seconds"], one["flops"], one["bytes"])
        if key in found:
            found[key]["count"] += one["count"]
        else:
            found[key] = dict(one) | {"name": name}
    return list(found.values())


def _memory(report: Report) -> str:
    memory = report["memory"]
    admitted = memory["admitted"]
    state, peaks = memory["state"], memory["peaks"]
    names = list(dict.fromkeys([*state, *(name for peak in peaks.values() for name in peak)]))
    columns = [state | peak for peak in peaks.values()]
    rows = [
        (page_html.named(name, pictures.BYTES.get(name, pictures.GRAY)),
         *(page_text.memory(column.get(name, 0)) for column in columns))
        for name in names
    ]  # fmt: skip
    total = ("together", *(page_text.memory(sum(column.values())) for column in columns))
    host = ""
    if memory.get("host"):
        host = f" In the host's memory: {page_text.memory(memory['host'])} of the state."
    caption = (
        f"The peak is {memory['moment']}: {page_text.memory(memory['peak'])} of "
        f"{page_text.memory(memory['limit'])}, {memory['peak'] / memory['limit']:.0%}; up to "
        f"{admitted:.0%} is admitted.{host}"
        + (f" The run is refused: {memory['refusal']}." if memory["refusal"] else "")
    )
    return page_html.section(
        "Memory of a device",
        page_html.columns(page_html.figure(pictures.memory(memory, admitted), caption),
                 page_html.table(("holds", *peaks), rows, total=total)),
        name="memory",
    )  # fmt: skip


def _schedule(report: Report, pipeline: tuple[Table, Timeline] | None) -> str:
    if pipeline is None:
        return ""
    table, _ = pipeline
    if not pictures.is_drawn(table):
        return page_html.section(
            "Schedule",
            _line(f"{table.name} on {table.num_stages} stages with {table.num_microbatches} "
                  "microbatches has too many operations for a picture."),
        )  # fmt: skip
    caption = "A box is an operation of a stage on a microbatch, in lockstep; below, what it keeps."
    return page_html.section(
        "Schedule", page_html.figure(pictures.gantt(*pipeline), caption, wide=True)
    )


def _search(report: Report) -> str:
    if (search := report.get("search")) is None:
        return ""
    found, memory, time = search["configurations"], report["memory"], report.get("time")
    said = (
        f"{search['candidates']:,} configurations; of those that may be fastest "
        f"{search['fit']:,} fit; looked through in "
        f"{page_text.duration(search['seconds'])}."
    )
    if not found:
        return page_html.section("Search", _line(said))
    best = None if search["best"] is None else found[search["best"]]
    ranked = sorted(found, key=lambda one: (one is not best, not one["fits"], one["step"]))
    first = ranked[0]
    rows = [
        (number, page_text.flags(one["flags"]), page_text.duration(one["step"]),
         "–" if one is first else f"{one['step'] / first['step'] - 1:+.1%}",
         page_text.memory(one["memory"]), "yes" if one["fits"] else "no")
        for number, one in enumerate(ranked[:MOST_CONFIGURATIONS], 1)
    ]  # fmt: skip
    now = time and (memory["peak"], time["step"])
    picture = pictures.search(search, memory["limit"], memory["admitted"], now)
    header = ("#", "flags", "step", "to the first", "memory", "fits")
    told = [line for line in (said, search.get("runner_up")) if line]
    beside = "".join(_line(_code_flags(line)) for line in told)
    return page_html.section(
        "Search",
        page_html.columns(
            page_html.figure(picture, "Lines: memory that is admitted, and the limit."), beside
        ),
        page_html.table(header, rows, left=2), long=True,
    )  # fmt: skip


def _sent(report: Report) -> str:
    groups: dict[tuple[str, str, str], list[Report]] = collections.defaultdict(list)
    for message in report.get("messages", ()):
        groups[",".join(message["axes"]), message["kind"], message["purpose"]].append(message)
    title = "Bytes that a device sends in a step"
    if "messages" not in report:
        return ""
    if not groups:
        return page_html.section(title, _line("It sends nothing."), name="sent")
    total = lambda some: sum(one["sent"] for one in some)  # noqa: E731
    whole = sum(map(total, groups.values()))
    rows = [
        (*names, f"{sum(one['count'] for one in some):,.0f}", page_text.memory(total(some)),
         page_text.share(total(some) / (whole or 1)))
        for names, some in sorted(groups.items(), key=lambda item: -total(item[1]))
    ]  # fmt: skip
    together = ("together", "", "", "", page_text.memory(whole), "")
    header = ("mesh axes", "kind", "of", "times", "sent", "share")
    return page_html.section(
        title, page_html.table(header, rows, left=3, total=together), name="sent"
    )


def _duration(report: Report) -> str:
    if (run := report.get("duration")) is None:
        why = report.get("no_duration")
        return page_html.section("The whole run", _line(why), name="duration") if why else ""
    days = lambda of: f"{of['seconds'] / 86400:,.2f} days, goodput {of['goodput']:.1%}"  # noqa: E731
    rows = [
        ("tokens", f"{page_text.count(run['tokens'])} in {run['steps']:,} steps{_given(report)}"),
        ("with the best interval", f"{days(run)}; a checkpoint every {run['interval']:,} steps"),
    ]
    if own := run.get("as_configured"):
        rows.append(("as configured", f"{days(own)}; one every {own['interval']:,} steps"))
    rows += [
        ("failures expected", f"{run['failures']:,.1f}"),
        ("device hours", f"{run['device_hours']:,.0f}"),
    ]
    for name, label, unit in (("dollars", "cost", "dollars"),
                              ("kilowatt_hours", "energy of the chips", "kWh")):  # fmt: skip
        if run.get(name) is not None:
            rows.append((label, f"{run[name]:,.0f} {unit}"))
    if flops := run.get("flops"):
        rows.append(("FLOPs", f"{flops['6PD']:.3g} by 6PD, {flops['exact']:.3g} with attention"))
    return page_html.section("The whole run", page_html.facts(rows), name="duration")


def _rests_on(report: Report) -> str:
    lines = list(_assumptions(report))
    return page_html.section("What this rests on", page_html.bullets(lines), name="assumptions")


def _assumptions(report: Report) -> Iterator[str]:
    yield (
        "Counted, not compiled or measured: llmx.aot compiles the step for this machine, and "
        "docs/plan.md says how far the count is off."
    )
    yield from (f"Assumed: {what}." for what in report.get("time", {}).get("assumptions", ()))
    yield from (f"Not counted: {what}." for what in report.get("not_counted", ()))
    yield from (f"Uncertain: {what}." for what in report.get("uncertain", ()))


def _foot(report: Report) -> str:
    command = report.get("run", {}).get("command", "")
    said = f"<code>{html.escape(command)}</code>, " if command else ""
    return f'<footer class="soft">{said}llmx {escaped(llmx.__version__)}</footer>'
