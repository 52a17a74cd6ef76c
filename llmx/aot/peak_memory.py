"""The arrays in a device's memory when a compiled program needs most of it.

XLA can dump its buffer assignment, even of a program that does not fit: address, size and live
range (in instructions of the schedule) of every value. `at_peak` finds the moment of most memory
(`peak_memory_in_bytes` of `compiled.memory_analysis()`) and its arrays, with the line of source
that made each. Arrays in other memories (the host's, vector memory) are not counted.
"""

import collections
import dataclasses
import itertools
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from llmx.aot import hlo_text
from llmx.aot.hlo_text import Instruction


def dump_options(folder: str | pathlib.Path) -> dict[str, str | bool]:
    """Options of `lowered.compile` that make XLA write into `folder`."""
    return {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}


@dataclasses.dataclass(frozen=True)
class Dump:
    """The texts of one compilation; "" for those that XLA did not write."""

    before: str  # HLO as lowered by jax
    after: str  # scheduled and partitioned
    assignment: str
    live_ranges: str


def read_dump(folder: str | pathlib.Path, module: str) -> Dump:
    """What XLA dumped of the program whose name contains `module`."""
    files = [path for path in pathlib.Path(folder).glob("*.txt") if module in path.name]

    def text(ending: str) -> str:
        return next((p.read_text() for p in files if p.name.endswith(f"{ending}.txt")), "")

    after = (f"after_optimizations{part}" for part in ("", "-buffer-assignment", "-live-range"))
    return Dump(text("before_optimizations"), *map(text, after))


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An array, or several of one shape and source."""

    bytes: int  # of all of them
    count: int
    shape: str  # "bf16[32,1,2048,4096]"
    operation: str  # of the traced program: "transpose(jvp())/while/body/..."
    source: str  # "step.py:254"; "": unknown
    argument: bool  # state and batch, which live all the time


@dataclasses.dataclass(frozen=True)
class Peak:
    """The moment of most memory."""

    bytes: int
    buffers: tuple[Buffer, ...]  # largest first


# By name of a value: the first and the last instruction of the schedule at which it lives.
Ranges = Mapping[str, tuple[int, int]]

_VALUE = re.compile(r"\s+value: <\d+ (\S+)(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (\S+)")


@dataclasses.dataclass(frozen=True)
class _Value:
    name: str  # of the instruction, with {index} if that returns a tuple
    shape: str
    begin: int  # address in the memory for temporaries
    end: int
    argument: bool


def at_peak(dump: Dump) -> Peak | None:
    """The moment of most memory; None if the dump has no buffer assignment.

    Values that share memory (a loop updates its state in place) count once.
    """
    permanent, temporary = _assignment(dump.assignment)
    ranges = _live_ranges(dump.live_ranges)
    if not (permanent and ranges):
        return None
    temporary = [value for value in temporary if value.name in ranges]
    live = _live_at(_peak_moment(temporary, ranges), temporary, ranges)
    num_bytes = sum(value.end - value.begin for value in permanent) + _bytes_covered(live)
    shown = [*permanent, *_without_overlaps(live, ranges)]
    return Peak(num_bytes, tuple(_buffers(shown, temporary, ranges, dump.after)))


def _assignment(text: str) -> tuple[list[_Value], list[_Value]]:
    """The permanent and the temporary values in the device's main memory."""
    permanent, temporary, kind, seen = [], [], "", False
    for line in text.splitlines():
        if line.startswith("allocation "):
            traits = re.match(r"allocation \d+: size \d+(.*):$", line).group(1)
            # Colors other than 0 are other memories: vector memory, scalars, the host's.
            other_memory = re.search(r"color [1-9]", traits) or "thread-local" in traits
            kind, seen = "" if other_memory else traits, False
        elif kind and (value := _VALUE.match(line)):
            name, size, offset, shape = value.groups()
            assigned = _Value(
                name=name.removesuffix("{}"),
                shape="tuple" if shape.startswith("(") else shape.partition("{")[0],
                begin=int(offset), end=int(offset) + int(size), argument="parameter" in kind,
            )  # fmt: skip
            if "preallocated-temp" in kind:
                temporary.append(assigned)
            elif not seen:  # the others reuse its memory: outputs that overwrite arguments
                permanent.append(assigned)
                seen = True
    return permanent, temporary


def _live_ranges(text: str) -> dict[str, tuple[int, int]]:
    body = text.partition("BufferLiveRange:")[2].partition("Live ranges at")[0]
    rows = re.findall(r"^\s+(\S+):(\d+)-(\d+)$", body, re.MULTILINE)
    # The only array of an instruction has an empty index here and none in the assignment.
    return {name.removesuffix("{}"): (int(first), int(last)) for name, first, last in rows}


def _live_at(moment: int, values: Iterable[_Value], ranges: Ranges) -> list[_Value]:
    return [one for one in values if ranges[one.name][0] <= moment <= ranges[one.name][1]]


def _peak_moment(values: list[_Value], ranges: Ranges) -> int:
    """The moment at which most memory is covered."""
    if not values:
        return 0
    change = collections.Counter()
    for value in values:
        first, last = ranges[value.name]
        change[first] += value.end - value.begin
        change[last + 1] -= value.end - value.begin
    # The sum of sizes is an upper bound of the bytes covered: few moments have to be looked at.
    moments = sorted(change)
    sums = zip(itertools.accumulate(change[moment] for moment in moments), moments, strict=True)
    most, peak = -1, 0
    for bound, moment in sorted(sums, key=lambda pair: -pair[0]):
        if bound <= most:
            break
        if (covered := _bytes_covered(_live_at(moment, values, ranges))) > most:
            most, peak = covered, moment
    return peak


def _bytes_covered(values: Iterable[_Value]) -> int:
    """Bytes that these values cover, each byte counted once."""
    total = reached = 0
    for begin, end in sorted((value.begin, value.end) for value in values):
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _without_overlaps(values: list[_Value], ranges: Ranges) -> list[_Value]:
    """Of values that share memory one: the largest, then the oldest."""
    chosen: list[_Value] = []
    for value in sorted(values, key=lambda one: (one.begin - one.end, ranges[one.name][0])):
        if all(value.end <= one.begin or one.end <= value.begin for one in chosen):
            chosen.append(value)
    return chosen


def _buffers(
    values: Iterable[_Value], others: Sequence[_Value], ranges: Ranges, program: str
) -> list[Buffer]:
    """The values as buffers, equal ones in groups, largest first."""
    line_of, instructions = source_lines(program), {}
    for computation in hlo_text.parse(program).computations.values():
        instructions |= computation.by_name
    groups: dict[tuple, list[int]] = collections.defaultdict(list)
    for value in values:
        # Loops pass values on under names without a meaning: the longest name of all is taken.
        names = [one.name for one in (value, *_same_slot(value, others, ranges))]
        origins = [_origin(instructions, name) for name in names]
        operation, frame = max(origins, key=lambda pair: (pair[1] > 0, len(pair[0])))
        key = (value.shape, readable(operation), line_of(frame), value.argument)
        groups[key].append(value.end - value.begin)
    buffers = [Buffer(sum(sizes), len(sizes), *key) for key, sizes in groups.items()]
    return sorted(buffers, key=lambda buffer: -buffer.bytes)


def _same_slot(value: _Value, others: Sequence[_Value], ranges: Ranges) -> list[_Value]:
    """Values that are this one before and after it: of one shape and address, without a gap."""
    if value.argument or value.name not in ranges:  # arguments and constants live all the time
        return []
    slot = (value.begin, value.end, value.shape)
    same = [one for one in others if (one.begin, one.end, one.shape) == slot]
    same.sort(key=lambda one: ranges[one.name])
    joined = []
    # After the value: what begins at its last instruction. Before it: what ends at its first.
    for ordered, near, far in ((same, 0, 1), (reversed(same), 1, 0)):
        reached = ranges[value.name][far]
        for one in ordered:
            if ranges[one.name][near] == reached:
                joined.append(one)
                reached = ranges[one.name][far]
    return joined


def _origin(instructions: Mapping[str, Instruction], name: str) -> tuple[str, int]:
    """(operation, stack frame) of a value; of its operand if the compiler created it."""
    instruction = instructions.get(name.partition("{")[0])
    operation, frame = _traced(instruction)
    if instruction is None or operation or instruction.op in ("parameter", "while"):
        return operation, frame
    operation, frame = _traced(instructions.get(next(iter(instruction.operands), "")))
    return (f"{instruction.op} of {operation}", frame) if operation else (instruction.op, 0)


def _traced(instruction: Instruction | None) -> tuple[str, int]:
    """(operation of the traced program, stack frame); ("", 0) where the text has none."""
    if instruction is None:
        return "", 0
    return instruction.quoted("op_name") or "", int(instruction.attribute("stack_frame_id") or 0)


_WORDS = {"transpose(jvp())": "backward", "jvp()": "forward", "rematted_computation": "recomputed"}
_TRACING = {"while", "body", "closed_call", "checkpoint", "eval_jaxpr", "shard_map", ""}


def readable(operation: str) -> str:
    """A traced operation without the parts that tracing adds; of merged names the first."""
    op, of, source = operation.partition(" of ")
    if of:
        return f"{op} of {readable(source)}"
    if operation.startswith(("state", "batch")):  # state.params[\'blocks\'][\'mlp\']
        return re.sub(r"\[\\?'([^]]*?)\\?'\]", r"/\1", operation)
    parts = [part.removeprefix("(") for part in operation.partition(":")[0].split("/")]
    parts = [_WORDS.get(part, part) for part in parts]
    return "/".join(part for part in parts if part not in _TRACING and not part.startswith("jit("))


def source_lines(program: str) -> Callable[[int], str]:
    """A function from a stack frame to the innermost line of llmx, else of any file, in it."""
    row = r"\{file_name_id=(\d+) function_name_id=\d+ line=(\d+)"
    files = dict(_table(program, "FileNames", r'"([^"]*)"'))
    lines = {number: fields for number, *fields in _table(program, "FileLocations", row)}
    row = r"\{file_location_id=(\d+)(?: parent_frame_id=(\d+))?"
    frames = {number: fields for number, *fields in _table(program, "StackFrames", row)}

    def line_of(frame: int) -> str:
        innermost, number = "", str(frame)
        while number in frames:
            location, parent = frames[number]
            file, line = lines[location]
            text = f"{pathlib.PurePath(files[file]).name}:{line}"
            innermost = innermost or text
            if "/llmx/" in files[file]:
                return text
            # Numbers of parents are written plus one; 1 is none.
            number = str(int(parent) - 1) if parent else ""
        return innermost

    return line_of


def _table(program: str, title: str, row: str) -> list[tuple[str, ...]]:
    """(number, groups of `row`, ...) of each line of a table, which ends with an empty line."""
    table = program.partition(f"\n{title}\n")[2].partition("\n\n")[0]
    return re.findall(rf"^(\d+) {row}", table, re.MULTILINE)
