"""What lies in a device's memory when a compiled program needs most of it.

XLA writes down how it assigns buffers, if asked to, and also for a program that it then refuses
because it does not fit: which value lies where, how large it is, and from which instruction of the
schedule to which it lives. `at_peak` puts this together: the moment of most memory, and the arrays
that fill it, with the line of the program that made each.

`peak_memory_in_bytes` of `compiled.memory_analysis()` is the same sum without the arrays. Arrays
in other memories (the host's, vector memory) are not counted.
"""

import collections
import dataclasses
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence

# Files of a dump are named by what they hold, behind the name of the module.
_BEFORE = "before_optimizations.txt"
_AFTER = "after_optimizations.txt"
_ASSIGNMENT = "after_optimizations-buffer-assignment.txt"
_LIVE_RANGES = "after_optimizations-live-range.txt"


def dump_options(folder: str | pathlib.Path) -> dict[str, str | bool]:
    """Options of `lowered.compile` that make XLA write into `folder`."""
    return {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}


@dataclasses.dataclass(frozen=True)
class Dump:
    """The texts of one compilation; "" for those that XLA did not come to."""

    before: str  # HLO as it came from jax
    after: str  # scheduled and partitioned
    assignment: str
    live_ranges: str


def read_dump(folder: str | pathlib.Path, module: str) -> Dump:
    """What XLA wrote of the program whose name holds `module`."""
    files = [path for path in pathlib.Path(folder).glob("*.txt") if module in path.name]

    def text(ending: str) -> str:
        found = [path for path in files if path.name.endswith(ending)]
        return found[0].read_text() if found else ""

    return Dump(text(_BEFORE), text(_AFTER), text(_ASSIGNMENT), text(_LIVE_RANGES))


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An array, or several of one shape and source."""

    bytes: int  # of all of them
    count: int
    shape: str  # "bf16[32,1,2048,4096]"
    operation: str  # of the traced program: "transpose(jvp())/while/body/..."
    source: str  # "step.py:254"; "": the program does not say
    argument: bool  # state and batch: there all the time


@dataclasses.dataclass(frozen=True)
class Peak:
    """The moment of most memory."""

    bytes: int
    buffers: tuple[Buffer, ...]  # largest first


# From which instruction of the schedule to which each value lives, by name.
Ranges = Mapping[str, tuple[int, int]]

_VALUE = re.compile(r"\s+value: <\d+ (\S+)(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (\S+)")


@dataclasses.dataclass(frozen=True)
class _Value:
    name: str  # of the instruction, with {index} where it gives several
    shape: str
    begin: int  # where it lies in the memory for temporaries
    end: int
    argument: bool


def at_peak(dump: Dump) -> Peak | None:
    """The moment of most memory; None where the dump does not tell.

    Values that share memory (a loop updates its state in place) count once.
    """
    always, temporary = _assignment(dump.assignment)
    ranges = _live_ranges(dump.live_ranges)
    if not always or not ranges:
        return None
    living = [value for value in temporary if value.name in ranges]
    moment = _fullest(living, ranges)
    live = [value for value in living if ranges[value.name][0] <= moment <= ranges[value.name][1]]
    fixed = sum(value.end - value.begin for value in always)
    shown = [*always, *_side_by_side(live, ranges)]
    return Peak(fixed + _covered(live), tuple(_described(shown, living, ranges, dump.after)))


# ------------------------------------------------------------------------------------- reading


def _assignment(text: str) -> tuple[list[_Value], list[_Value]]:
    """Values that are there all the time, and temporary ones, in the device's main memory."""
    always, temporary, kind = [], [], ""
    seen = False
    for line in text.splitlines():
        if line.startswith("allocation "):
            header = re.match(r"allocation \d+: size (\d+)(.*):$", line)
            traits = header.group(2)
            # Colors other than 0 are other memories: vector memory, scalars, the host's.
            elsewhere = re.search(r"color [1-9]", traits) or "thread-local" in traits
            kind = "" if elsewhere else traits
            seen = False
        elif kind and (value := _VALUE.match(line)):
            name, size, offset, shape = value.groups()
            made = _Value(
                name=name.removesuffix("{}"),
                shape="tuple" if shape.startswith("(") else shape.partition("{")[0],
                begin=int(offset),
                end=int(offset) + int(size),
                argument="parameter" in kind,
            )
            if "preallocated-temp" in kind:
                temporary.append(made)
            elif not seen:  # the others take its place: outputs that overwrite arguments
                always.append(made)
                seen = True
    return always, temporary


def _live_ranges(text: str) -> dict[str, tuple[int, int]]:
    """From which instruction of the schedule to which each value lives."""
    body = text.partition("BufferLiveRange:")[2].partition("Live ranges at")[0]
    found = re.findall(r"^\s+(\S+):(\d+)-(\d+)$", body, re.MULTILINE)
    # The only array of an instruction has an empty index here and none in the assignment.
    return {name.removesuffix("{}"): (int(first), int(last)) for name, first, last in found}


# ---------------------------------------------------------------------------------------- peak


def _fullest(values: list[_Value], ranges: Ranges) -> int:
    """The moment at which most memory is covered."""
    if not values:
        return 0
    change = collections.Counter()
    for value in values:
        first, last = ranges[value.name]
        change[first] += value.end - value.begin
        change[last + 1] -= value.end - value.begin
    # The sum of sizes is at least what they cover: from the largest sum down, few need a look.
    level, sums = 0, {}
    for moment in sorted(change):
        level += change[moment]
        sums[moment] = level
    best, where = -1, 0
    for moment, most in sorted(sums.items(), key=lambda pair: -pair[1]):
        if most <= best:
            break
        live = [one for one in values if ranges[one.name][0] <= moment <= ranges[one.name][1]]
        if (covered := _covered(live)) > best:
            best, where = covered, moment
    return where


def _covered(values: Iterable[_Value]) -> int:
    """Bytes that these values take, each byte once."""
    total = reached = 0
    for begin, end in sorted((value.begin, value.end) for value in values):
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _side_by_side(values: list[_Value], ranges: Ranges) -> list[_Value]:
    """One value for each place: of those that share it, the largest, then the oldest."""
    chosen: list[_Value] = []
    for value in sorted(values, key=lambda one: (one.begin - one.end, ranges[one.name][0])):
        if all(value.end <= one.begin or one.end <= value.begin for one in chosen):
            chosen.append(value)
    return chosen


# --------------------------------------------------------------------------------- description


def _described(
    values: Iterable[_Value], others: Sequence[_Value], ranges: Ranges, program: str
) -> list[Buffer]:
    made_by, sources = _instructions(program), _Sources(program)
    groups: dict[tuple, list[int]] = collections.defaultdict(list)
    for value in values:
        sharing = [value, *_in_its_place(value, others, ranges)]
        # Loops pass values on under names that say nothing: the most telling one of all.
        told = [_told(made_by, one.name) for one in sharing]
        operation, frame = max(told, key=lambda pair: (pair[1] > 0, len(pair[0])))
        key = (value.shape, _readable(operation), sources.line(frame), value.argument)
        groups[key].append(value.end - value.begin)
    made = [
        Buffer(
            bytes=sum(sizes), count=len(sizes), shape=shape, operation=operation,
            source=source, argument=argument,
        )
        for (shape, operation, source, argument), sizes in groups.items()
    ]  # fmt: skip
    return sorted(made, key=lambda buffer: -buffer.bytes)


def _in_its_place(value: _Value, others: Sequence[_Value], ranges: Ranges) -> list[_Value]:
    """Values that are this one before and after it: of one shape and place, without a gap."""
    if value.argument or value.name not in ranges:  # arguments and constants are always there
        return []
    place = (value.begin, value.end, value.shape)
    same = [one for one in others if (one.begin, one.end, one.shape) == place]
    first, last = ranges[value.name]
    found = []
    for one in sorted(same, key=lambda each: ranges[each.name]):
        if ranges[one.name][0] == last:
            found.append(one)
            last = ranges[one.name][1]
    for one in sorted(same, key=lambda each: ranges[each.name], reverse=True):
        if ranges[one.name][1] == first:
            found.append(one)
            first = ranges[one.name][0]
    return found


@dataclasses.dataclass(frozen=True)
class _Instruction:
    op: str
    operand: str  # the first one's name
    operation: str  # of the traced program
    frame: int


_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%([\w.\-]+) = .*? ([a-z][\w\-]*)\((?:%([\w.\-]+))?(.*)$")


def _instructions(program: str) -> dict[str, _Instruction]:
    found = {}
    for line in program.splitlines():
        if match := _INSTRUCTION.match(line):
            name, op, operand, rest = match.groups()
            operation = re.search(r'op_name="((?:[^"\\]|\\.)*)"', rest)
            frame = re.search(r"stack_frame_id=(\d+)", rest)
            found[name] = _Instruction(
                op, operand or "", operation.group(1) if operation else "",
                int(frame.group(1)) if frame else 0,
            )  # fmt: skip
    return found


def _told(made_by: Mapping[str, _Instruction], name: str) -> tuple[str, int]:
    """(operation, stack frame) of a value; where the compiler made it, by what it is made of."""
    made = made_by.get(re.sub(r"\{.*", "", name))
    if made is None:
        return "", 0
    if made.operation or made.op in ("parameter", "while"):
        return made.operation, made.frame
    source = made_by.get(made.operand)
    if source is None or not source.operation:
        return made.op, 0
    return f"{made.op} of {source.operation}", source.frame


_WORDS = {
    "transpose(jvp())": "backward", "jvp()": "forward", "rematted_computation": "recomputed",
}  # fmt: skip
_NOTHING = {"while", "body", "closed_call", "checkpoint", "eval_jaxpr", "shard_map", ""}


def _readable(operation: str) -> str:
    """Without the parts of a name that say how it was traced; of merged names the first."""
    made, of, source = operation.partition(" of ")
    if of:
        return f"{made} of {_readable(source)}"
    if operation.startswith(("state", "batch")):  # state.params[\'blocks\'][\'mlp\']
        return re.sub(r"\[\\?'([^]]*?)\\?'\]", r"/\1", operation)
    parts = operation.partition(":")[0].split("/")
    parts = [part.removeprefix("(") if part not in _WORDS else _WORDS[part] for part in parts]
    parts = [_WORDS.get(part, part) for part in parts]
    return "/".join(part for part in parts if part not in _NOTHING and not part.startswith("jit("))


class _Sources:
    """Lines of source, from the tables at the head of a program."""

    def __init__(self, program: str):
        self._files = dict(_table(program, "FileNames", r'"([^"]*)"'))
        self._locations = {
            number: (file, line)
            for number, file, line in _table(
                program, "FileLocations", r"\{file_name_id=(\d+) function_name_id=\d+ line=(\d+)"
            )
        }
        self._frames = {
            number: (location, parent)
            for number, location, parent in _table(
                program, "StackFrames", r"\{file_location_id=(\d+)(?: parent_frame_id=(\d+))?"
            )
        }

    def line(self, frame: int) -> str:
        """The innermost line of llmx, else of anybody, that a stack frame comes from."""
        innermost, number = "", str(frame)
        while number in self._frames:
            location, parent = self._frames[number]
            file, line = self._locations[location]
            path = self._files[file]
            where = f"{pathlib.PurePath(path).name}:{line}"
            innermost = innermost or where
            if "/llmx/" in path:
                return where
            # Numbers of parents are written plus one; 1 is none.
            number = str(int(parent) - 1) if parent else ""
        return innermost


def _table(program: str, title: str, row: str) -> list[tuple[str, ...]]:
    """(number, groups of `row`, ...) of each line of a table, which ends with an empty line."""
    table = program.partition(f"\n{title}\n")[2].partition("\n\n")[0]
    return re.findall(rf"^(\d+) {row}", table, re.MULTILINE)
