"""Parses the text of a compiled XLA program: computations, instructions, types and device groups.

It also evaluates scalars, as far as the text defines them: trip counts of loops, and whether a
value depends on the device. It reads what the texts of CPU, GPU and TPU compilers have in common.

Reference: openxla.org/xla/operation_semantics; xla/hlo/parser in github.com/openxla/xla.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np

_TYPE = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")


@functools.cache
def bits_of(dtype: str) -> int:
    """Bits of one element: of "bf16", "f8e4m3fn", "u4", ..."""
    if width := re.match(r"(?:bf|f|s|u|c)(\d+)", dtype):
        return int(width.group(1))
    if dtype == "pred":
        return 8
    raise ValueError(f"element type {dtype!r} of the program's text is unknown: add its width")


@dataclasses.dataclass(frozen=True)
class Array:
    """The type of one array: of its logical shape, without layout and padding."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        return -(-self.size * bits_of(self.dtype) // 8)


@dataclasses.dataclass(eq=False)
class Instruction:
    """One instruction. `rest` is its line after the opening parenthesis of the operands."""

    name: str
    type: str
    op: str
    rest: str
    root: bool

    @functools.cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays of its type, tuples flattened, without tokens."""
        return tuple(
            Array(dtype, tuple(int(dim.strip("<=")) for dim in dims.split(",") if dim))
            for dtype, dims in _TYPE.findall(self.type)
            if dtype not in ("token", "opaque")
        )

    @property
    def bytes(self) -> int:
        return sum(array.bytes for array in self.arrays)

    @functools.cached_property
    def _end(self) -> int:
        """Where the parenthesis of the operands closes."""
        depth = 1
        for match in re.finditer(r"[()]", self.rest):
            depth += 1 if match.group() == "(" else -1
            if depth == 0:
                return match.start()
        return len(self.rest)

    @property
    def literal(self) -> str:
        """The text of the operands: the value of a constant, the number of a parameter."""
        return self.rest[: self._end]

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        return tuple(re.findall(r"%([\w.\-]+)", self.literal))

    @functools.cached_property
    def attributes(self) -> str:
        """Everything between the operands and `backend_config`."""
        return self.rest[self._end :].partition(", backend_config=")[0]

    @functools.cached_property
    def config(self) -> str:
        """`backend_config`: the compiler's own annotations."""
        return self.rest[self._end :].partition(", backend_config=")[2]

    def attribute(self, name: str) -> str | None:
        """The name or number that follows `name=`."""
        match = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
        return match and match.group(1)

    @property
    def label(self) -> str:
        """The name in the text and the operation in the traced program, for messages."""
        source = source_of(self)
        return f"{self.name} ({source})" if source else self.name

    @property
    def index(self) -> int:
        """The element that a get-tuple-element takes."""
        return int(self.attribute("index"))

    def integers(self, name: str) -> tuple[int, ...]:
        """The numbers of `name={0,1}`; () where there is none."""
        match = re.search(rf"\b{name}=\{{([\d,]*)\}}", self.attributes)
        return tuple(_integers(match.group(1))) if match else ()

    def quoted(self, name: str) -> str | None:
        """The text of `name="..."`."""
        match = re.search(rf'\b{name}="([^"]*)"', self.attributes)
        return match and match.group(1)

    def configured(self, name: str) -> str | None:
        """The value of `"name":"value"` or `"name":value` in `backend_config`."""
        match = re.search(rf'"{name}":"?([\w.$\-+]+)', self.config)
        return match and match.group(1)

    @property
    def called(self) -> tuple[str, ...]:
        """The computations that it runs once, or one of which it runs; not those of a loop."""
        if branches := re.search(r"branch_computations=\{([^}]*)\}", self.attributes):
            return tuple(re.findall(r"%([\w.\-]+)", branches.group(1)))
        names = ["to_apply"] if self.op in ("call", "call-start") else ["calls"]
        if self.op == "conditional":
            names = ["true_computation", "false_computation"]
        return tuple(match for name in names if (match := self.attribute(name)))


@dataclasses.dataclass(eq=False)
class Computation:
    name: str
    instructions: list[Instruction]

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}

    @functools.cached_property
    def position(self) -> dict[str, int]:
        return {one.name: index for index, one in enumerate(self.instructions)}

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        users: dict[str, list[Instruction]] = {one.name: [] for one in self.instructions}
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                users[operand].append(instruction)
        return users

    @functools.cached_property
    def root(self) -> Instruction:
        return next((one for one in self.instructions if one.root), self.instructions[-1])

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        return {int(one.literal): one for one in self.instructions if one.op == "parameter"}

    def operands_of(self, instruction: Instruction) -> list[Instruction]:
        return [self.by_name[name] for name in instruction.operands]


@dataclasses.dataclass(eq=False)
class Module:
    computations: dict[str, Computation]
    entry: Computation
    num_partitions: int
    num_replicas: int

    def called(self, instruction: Instruction) -> Iterator[Computation]:
        for name in instruction.called:
            yield self.computations[name]

    def inside(self, instruction: Instruction) -> Iterator[tuple[Computation, Instruction]]:
        """All instructions of a fusion's computations, those of nested fusions included."""
        for computation in self.called(instruction):
            for inner in computation.instructions:
                yield computation, inner
                if inner.op == "fusion":
                    yield from self.inside(inner)


_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_TAIL = re.compile(r'^\}(, execution_thread="\w+")?$')
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)$", re.DOTALL)
_BEGIN = re.compile(r"^\s+(?:ROOT )?%[\w.\-]+ = ")


def parse(text: str) -> Module:
    """The module of a compiled program's text; ValueError if it is not of a scheduled program."""
    lines = text.split("\n")
    if not lines[0].startswith("HloModule") or "is_scheduled=true" not in lines[0]:
        remedy = "'HloModule ..., is_scheduled=true, ...' (a lowered program is not compiled yet)"
        begin = f"the text begins with {lines[0][:60]!r}"
        raise ValueError(f"{begin}: give what `compiled.as_text()` returns, {remedy}")
    texts: dict[str, list[list[str]]] = {}  # the lines of each instruction, by computation
    entry = current = None
    for line in lines[1:]:
        if current is None:
            if head := _HEAD.match(line):
                current = texts[head.group(2)] = []
                entry = head.group(2) if head.group(1) else entry
        # Metadata of Pallas calls has line breaks and lines that begin with "}}": a computation
        # ends at a line with a single brace, and other lines continue an instruction.
        elif _TAIL.match(line):
            current = None
        elif _BEGIN.match(line):
            current.append([line])
        elif current:
            current[-1].append(line)
    if entry is None:
        raise ValueError("the program's text has no ENTRY computation: it is cut off")
    computations = {name: Computation(name, [*map(_parsed, rows)]) for name, rows in texts.items()}
    counts = dict(re.findall(r"\b(num_partitions|replica_count)=(\d+)", lines[0]))
    num_partitions, num_replicas = counts.get("num_partitions", 1), counts.get("replica_count", 1)
    return Module(computations, computations[entry], int(num_partitions), int(num_replicas))


def _parsed(lines: Sequence[str]) -> Instruction:
    text = "\n".join(lines)
    if (match := _LINE.match(text)) is None:
        raise ValueError(f"this line of the program's text cannot be read: {text[:200]!r}")
    root, *fields = match.groups()
    return Instruction(*fields, root=bool(root))


COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all",
    "collective-permute", "collective-broadcast",
)  # fmt: skip


def collective_kind(instruction: Instruction) -> str | None:
    """The kind of a collective, of its start where it has one; None for everything else."""
    kind = instruction.op.removesuffix("-start")
    return kind if kind in COLLECTIVES else None


# Parts of an operation's name that tracing adds.
_TRACING = {"while", "body", "closed_call", "shard_map", "checkpoint", "remat2", "eval_jaxpr"}


def source_of(instruction: Instruction) -> str:
    """The operation of the traced program that an instruction comes from; "": unknown."""
    name = instruction.quoted("op_name") or ""
    parts = [part for part in name.split("/") if part not in _TRACING]
    short = "/".join(parts[1:] if parts[0].startswith("jit(") else parts)
    return short if len(short) <= 100 else f"{short[:40]}...{short[-57:]}"


_GRID = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?(?=[,\s)]|$)")
_MESH = re.compile(
    r"replica_groups=@?mesh[\[<]([^\]>]*)[\]>](?:, device_ids=\(([^{]*)\))? \{([^}]*)\}"
)
_LIST = re.compile(r"\b(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})?\}")


def groups_of(instruction: Instruction, num_devices: int) -> list[list[int]] | None:
    """The groups of logical devices of a collective, or pairs of a permute; None: unknown."""
    text = instruction.attributes
    if match := _GRID.search(text):
        shape, dims, order = match.groups()
        return _grid(dims, order).reshape(_integers(shape)).tolist()
    if match := _MESH.search(text):
        return _mesh_groups(*match.groups())
    if match := _LIST.search(text):
        if match.group(1) is None:  # all devices are one group; without pairs none sends
            return [] if match.group().startswith("source") else [list(range(num_devices))]
        return [_integers(group) for group in re.findall(r"\{([\d, ]+)\}", match.group(1))]
    return None


def _grid(dims: str, order: str | None) -> np.ndarray:
    """The numbers from 0 on in an array of shape `dims`, transposed by `order`."""
    shape = _integers(dims)
    grid = np.arange(math.prod(shape)).reshape(shape)
    return grid.transpose(_integers(order)) if order else grid


def _mesh_groups(axes: str, devices: str | None, used: str) -> list[list[int]] | None:
    """Groups along axes of the compiler's mesh: `'x'=4,'y'=2`, `[2,4]T(1,0)`, `'x':(2)2,'y'`.

    `x:(2)2` is the part of axis x of size 2 with 2 outside it.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'?(\w+)'?=(\d+)", axes)}
    parts = re.findall(r"'?(\w+)'?(?::\((\d+)\)(\d+))?(?:,|$)", used)
    if not sizes or any(name not in sizes for name, _, _ in parts):
        return None
    ids = np.arange(math.prod(sizes.values()))
    if devices and (grid := re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", devices)):
        ids = _grid(*grid.groups())
    elif devices:
        ids = np.array(_integers(devices))
    shape, inside = [], []
    for axis, size in sizes.items():
        used = [(int(low or 1), int(part or size)) for name, low, part in parts if name == axis]
        spans = [(low, low * part) for low, part in used]
        cuts = sorted({1, size}.union(*spans))
        for low, high in itertools.pairwise(cuts):
            shape.append(high // low)
            inside.append(any(begin <= low < end for begin, end in spans))
    order = sorted(range(len(shape)), key=lambda dim: inside[dim])
    length = math.prod(size for size, within in zip(shape, inside, strict=True) if within)
    return ids.reshape(shape).transpose(order).reshape(-1, length).tolist()


def _integers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number.strip()]


@dataclasses.dataclass(frozen=True, eq=False)
class Frame:
    """A computation and the instruction that runs it, to follow a parameter to its source."""

    computation: Computation
    caller: Instruction | None = None
    parent: "Frame | None" = None
    # Inside the loop that is analysed, elements of its state that change stay symbols.
    symbolic: bool = False

    def enter(self, module: Module, caller: Instruction) -> "Frame":
        """The frame of the one computation that an instruction runs."""
        (computation,) = module.called(caller)
        return Frame(computation, caller, self, self.symbolic)


@dataclasses.dataclass(frozen=True)
class Scalar:
    """An integer, or element `symbol` of a loop's state plus an integer."""

    value: int
    symbol: int | None = None


_SAME = {
    "copy", "bitcast", "convert", "reshape", "copy-start", "copy-done", "optimization-barrier",
    "broadcast",
}  # fmt: skip


def scalar(module: Module, frame: Frame, name: str, path: tuple[int, ...] = ()) -> Scalar | None:
    """The integer that an instruction (element `path` of its tuple) yields; None: unknown."""
    instruction = frame.computation.by_name[name]
    op, operands = instruction.op, instruction.operands
    if op == "constant":
        number = re.fullmatch(r"-?\d+", instruction.literal)
        return Scalar(int(number.group())) if number else None
    if op in _SAME:
        return scalar(module, frame, operands[0], path)
    if op == "get-tuple-element":
        return scalar(module, frame, operands[0], (instruction.index, *path))
    if op == "tuple" and path:
        return scalar(module, frame, operands[path[0]], path[1:])
    if op == "parameter":
        return _parameter(module, frame, int(instruction.literal), path)
    if op in ("fusion", "call"):
        inner = frame.enter(module, instruction)
        return scalar(module, inner, inner.computation.root.name, path)
    if op == "while":
        constant = path and _is_invariant(module, instruction, path[0])
        return scalar(module, frame, operands[0], path) if constant else None
    if op in ("add", "subtract", "multiply"):
        return _combine(op, *(scalar(module, frame, operand) for operand in operands))
    return None


def _parameter(module: Module, frame: Frame, number: int, path: tuple[int, ...]) -> Scalar | None:
    caller, parent = frame.caller, frame.parent
    if caller is None:
        return None
    if caller.op == "while":
        if not path:
            return None
        if _is_invariant(module, caller, path[0]):
            return scalar(module, parent, caller.operands[0], path)
        return Scalar(0, path[0]) if frame.symbolic and len(path) == 1 else None
    if caller.op == "conditional":
        number = 1 + list(caller.called).index(frame.computation.name)
    # An asynchronous start without operands gets them later.
    known = number < len(caller.operands)
    return scalar(module, parent, caller.operands[number], path) if known else None


def _combine(op: str, left: Scalar | None, right: Scalar | None) -> Scalar | None:
    if left is None or right is None:
        return None
    a, b = left.value, right.value
    value = {"add": a + b, "subtract": a - b, "multiply": a * b}[op]
    if right.symbol is None and (left.symbol is None or op != "multiply"):
        return Scalar(value, left.symbol)
    return Scalar(value, right.symbol) if op == "add" and left.symbol is None else None


def _is_invariant(module: Module, loop: Instruction, index: int) -> bool:
    """Whether the body of a loop leaves element `index` of its state unchanged."""
    body = module.computations[loop.attribute("body")]
    if body.root.op != "tuple" or index >= len(body.root.operands):
        return False
    element = body.by_name[body.root.operands[index]]
    if element.op != "get-tuple-element" or element.index != index:
        return False
    return body.by_name[element.operands[0]].op == "parameter"


_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE", "EQ": "EQ"}


def trip_count(module: Module, frame: Frame, loop: Instruction) -> int | None:
    """How often the body of a while loop runs; None: its end depends on data, and the program does
    not say how often it expects."""
    counted = _counted_trips(module, frame, loop)
    return expected_trips(loop) if counted is None else counted


def expected_trips(loop: Instruction) -> int | None:
    """What the program expects of a loop whose end depends on data: it is traced in a scope
    "expected_trips_3"."""
    said = re.search(r"expected_trips_(\d+)/while$", loop.quoted("op_name") or "")
    return int(said.group(1)) if said else None


def expected_branches(conditional: Instruction) -> tuple[list[Fraction], list[Fraction]] | None:
    """How often a conditional in a loop takes each branch, as shares of the iterations: on average
    over the devices, and where it is the longest of any device. None: the program, traced in a
    scope "expected_branches_4_12_longest_1_7", does not say it."""
    scope = r"expected_branches_([\d_]+)_longest_([\d_]+)/[^/]+$"
    said = re.search(scope, conditional.quoted("op_name") or "")
    if not said:
        return None
    taken, longest = ([int(one) for one in group.split("_")] for group in said.groups())
    if conditional.attribute("true_computation"):  # `called` has it first
        taken, longest = taken[::-1], longest[::-1]
    shares = lambda counts: [Fraction(count, sum(counts)) for count in counts]  # noqa: E731
    return shares(taken), shares(longest)


def _counted_trips(module: Module, frame: Frame, loop: Instruction) -> int | None:
    """How often the body of a while loop runs, by the text.

    CPU and GPU programs contain the number. For TPU it follows from the condition, which compares
    an element of the state with a bound, the element's start value, and its increment in the body.
    A loop that goes on while an element is true, which its body makes false, runs at most once: 1.
    """
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.config):
        return int(known.group(1))
    inner = Frame(module.computations[loop.attribute("condition")], loop, frame, symbolic=True)
    compare = inner.computation.root
    while compare.op in ("fusion", *_SAME):
        if compare.op == "fusion":
            inner = inner.enter(module, compare)
            compare = inner.computation.root
        else:
            compare = inner.computation.by_name[compare.operands[0]]
    if compare.op != "compare":
        return 1 if _ends_after_one(module, loop, compare) else None
    direction = compare.attribute("direction")
    left, right = (scalar(module, inner, operand) for operand in compare.operands)
    if left is None or right is None or (left.symbol is None) == (right.symbol is None):
        return None
    if left.symbol is None:
        left, right, direction = right, left, _MIRRORED[direction]
    start = scalar(module, frame, loop.operands[0], (left.symbol,))
    body = Frame(module.computations[loop.attribute("body")], loop, frame, symbolic=True)
    next_value = scalar(module, body, body.computation.root.name, (left.symbol,))
    if start is None or start.symbol is not None:
        return None
    if next_value is None or next_value.symbol != left.symbol:
        return None
    return _trips(start.value + left.value, next_value.value, direction, right.value)


def _ends_after_one(module: Module, loop: Instruction, condition: Instruction) -> bool:
    """Whether the condition is an element of the state that the body makes false."""
    body = module.computations[loop.attribute("body")]
    if condition.op != "get-tuple-element" or body.root.op != "tuple":
        return False
    element = body.by_name[body.root.operands[condition.index]]
    while element.op in _SAME:
        element = body.by_name[element.operands[0]]
    return element.op == "constant" and element.literal == "false"


def _trips(start: int, step: int, direction: str, bound: int) -> int | None:
    """The number of values start, start + step, ... for which `value direction bound` holds."""
    distance = bound - start
    if direction in ("GT", "GE"):
        distance, step = -distance, -step
    if direction in ("LE", "GE"):
        distance += 1
    if direction == "NE":
        if distance == 0:
            return 0
        reached = step != 0 and distance % step == 0 and distance // step > 0
        return distance // step if reached else None
    if direction == "EQ":
        return None
    if distance <= 0:
        return 0
    return -(-distance // step) if step > 0 else None


def depends_on_device(module: Module, frame: Frame, names: Sequence[str]) -> bool:
    """Whether any of these scalars is computed from the id of the device.

    Scalars are followed back through fusions, calls and the states of loops.
    """
    seen, todo = set(), [(frame, name, ()) for name in names]
    while todo:
        where, name, path = todo.pop()
        if (key := (where.computation.name, name, path)) in seen:
            continue
        seen.add(key)
        instruction = where.computation.by_name[name]
        op, operands = instruction.op, instruction.operands
        if op in ("partition-id", "replica-id"):
            return True
        if op == "parameter" and where.caller is not None:
            number, by = int(instruction.literal), where.caller
            sources = {"while": slice(1), "conditional": slice(1, None)}
            chosen = by.operands[sources.get(by.op, slice(number, number + 1))]
            todo += [(where.parent, source, path) for source in chosen]
        elif op == "get-tuple-element":
            todo.append((where, operands[0], (instruction.index, *path)))
        elif op == "tuple" and path:
            todo.append((where, operands[path[0]], path[1:]))
        elif op in ("fusion", "call"):
            inner = where.enter(module, instruction)
            todo.append((inner, inner.computation.root.name, path))
        elif op == "while":
            todo.append((where, operands[0], path))
        else:
            todo += [(where, operand, ()) for operand in operands]
    return False
