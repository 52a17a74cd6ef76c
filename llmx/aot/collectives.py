"""The collectives of a compiled program: what each moves, over which mesh axes, and what hides it.

Bytes are those of the whole arrays: as gathered, or before they are scattered. Wire bytes are those
that one device sends in a ring of n: (n-1)/n of the whole for an all-gather, a reduce-scatter or an
all-to-all, twice that for an all-reduce, all of it for a permute
(jax-ml.github.io/scaling-book/sharding).
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Sequence

import numpy as np

from llmx.aot import hlo_text, instruction_costs
from llmx.aot.hlo_text import Computation, Frame, Instruction, Module, collective_kind, source_of


@dataclasses.dataclass(frozen=True)
class Collective:
    """One operation of the program in which devices exchange data."""

    kind: str  # hlo_text.COLLECTIVES, or "send": from a TPU slice to others, through the hosts
    axes: tuple[str, ...] | None  # mesh axes that its groups span, outermost first; None: unknown
    dtype: str  # "bf16"; of arrays of several types "bf16+f32"
    arrays: int  # combined into this one operation
    count: int | None  # executions per step, loops multiplied in; None: a trip count is unknown
    bytes: int  # per execution: the whole arrays, as gathered or before they are scattered
    wire_bytes: int  # per execution: sent by one device
    asynchronous: bool
    hidden_by: int  # compute operations between its start and its end
    in_loop: int  # loops around it
    sliced: bool  # an all-reduce of which devices keep only their slice (of some of its arrays)
    name: str  # in the text
    source: str  # the operation of the traced program that it comes from; "": the text has none
    sliced_bytes: int = 0  # those of `bytes` of which devices keep only their slice


@dataclasses.dataclass(frozen=True)
class SlicedMesh:
    """The mesh, split into what lies within a TPU slice and what lies across slices."""

    axes: tuple[str, ...]
    within: tuple[int, ...]  # sizes within a slice: replica groups name positions here
    across: tuple[int, ...]  # sizes across slices

    def spanned(self, groups: Sequence[Sequence[int]], sizes: Sequence[int]) -> tuple | None:
        """The axes along which members of a group differ. None: some are outside the mesh."""
        longest = max(map(len, groups))
        members = np.array([(*group, *[group[0]] * (longest - len(group))) for group in groups])
        if members.max() >= math.prod(sizes):
            return None
        varies = (np.any(along != along[:, :1]) for along in np.unravel_index(members, sizes))
        return tuple(itertools.compress(self.axes, varies))


Axes = Sequence[tuple[str, int]]  # (axis, size) of a mesh, outermost first


def sliced_mesh(module: Module, mesh: Axes, across_slices: Sequence[str]) -> SlicedMesh:
    """Where the program's partitions lie in the mesh. ValueError where they do not fit it."""
    axes, sizes = tuple(name for name, _ in mesh), tuple(size for _, size in mesh)
    shown = " x ".join(f"{name}{size}" for name, size in mesh)
    if unknown := set(across_slices) - set(axes):
        raise ValueError(f"across_slices names {sorted(unknown)}: the mesh axes are {axes}")
    devices, partitions = math.prod(sizes), module.num_partitions
    if module.num_replicas == 1 and (devices < partitions or devices % partitions):
        raise ValueError(
            f"mesh {shown} has {devices} devices and the program is for {partitions}: give the "
            "mesh that it was compiled for"
        )
    num_slices = max(devices // partitions, 1)
    across = [size if name in across_slices else 1 for name, size in mesh]
    if num_slices == 1:  # also where these axes cross hosts: the program is of all of them
        across = [1] * len(sizes)
    elif not across_slices:
        for dim, size in enumerate(sizes):
            across[dim] = math.gcd(size, num_slices // math.prod(across[:dim]))
    elif math.prod(across) != num_slices:
        raise ValueError(
            f"across_slices={tuple(across_slices)} of mesh {shown} make {math.prod(across)} "
            f"slices and the program is that of one of {num_slices}: name the axes that cross them"
        )
    within = tuple(size // outer for size, outer in zip(sizes, across, strict=True))
    return SlicedMesh(axes, within, tuple(across))


@dataclasses.dataclass(eq=False)
class FusionContents:
    """Products and collectives of a fusion's computation."""

    flops: float = 0.0
    unread: list[str] = dataclasses.field(default_factory=list)  # dimensions cannot be parsed
    collectives: list[tuple[Computation, Instruction]] = dataclasses.field(default_factory=list)
    targets: set[str] = dataclasses.field(default_factory=set)  # of custom calls

    def chains(self) -> dict[tuple, tuple[Computation, Instruction]]:
        """Collectives that this fusion carries out in part, by what all parts have in common."""
        return {
            (part.op, part.attribute("channel_id"), chain): (computation, part)
            for computation, part in self.collectives
            if (chain := part.quoted("chain_id")) is not None
        }


@dataclasses.dataclass(frozen=True, eq=False)
class Analysis:
    """The program that is read, and intermediate results."""

    module: Module
    mesh: SlicedMesh
    # by name of the fused computation
    fusions: dict[str, FusionContents] = dataclasses.field(default_factory=dict)
    visited: set[str] = dataclasses.field(default_factory=set)  # names of collectives and products


def fusion_contents(analysis: Analysis, fusion: Instruction) -> FusionContents:
    """What a fusion contains, fusions inside it included; cached in `analysis`."""
    (computation,) = analysis.module.called(fusion)
    if computation.name in analysis.fusions:
        return analysis.fusions[computation.name]
    contents = analysis.fusions[computation.name] = FusionContents()
    for inside, instruction in analysis.module.inside(fusion):
        if instruction_costs.is_product(instruction):
            analysis.visited.add(instruction.name)
            flops = instruction_costs.flops_of(inside, instruction)
            contents.flops += flops or 0.0
            contents.unread += [instruction.name] if flops is None else []
        elif collective_kind(instruction):
            analysis.visited.add(instruction.name)
            contents.collectives.append((inside, instruction))
        elif instruction.op == "custom-call":
            contents.targets.add(instruction.quoted("custom_call_target"))
    return contents


def read_collective(
    analysis: Analysis, frame: Frame, instruction: Instruction, *, fusion: Instruction | None = None
) -> tuple[list[Collective], list[str]]:
    """A collective at its start, by itself or in a fusion, and what is unknown of it.

    No collective if every group has one device: nothing moves.
    """
    module, computation = analysis.module, frame.computation
    analysis.visited.add(instruction.name)
    kind = collective_kind(instruction)
    if fusion is not None and fusion.attribute("calls").startswith("all-reduce-scatter"):
        kind = "reduce-scatter"  # TPU's way to write one
    axes, n, unknown = _participants(analysis, kind, instruction)
    if n == 1:
        return [], unknown
    operands = computation.operands_of(instruction)
    if kind == "ragged-all-to-all":
        operands = operands[:1]  # the others: room for the result, offsets and sizes
        label = instruction.label
        unknown.append(f"bytes of {label}: they depend on data; its whole operand is counted")
    size = sum(operand.bytes for operand in operands)
    if kind == "all-gather" and n:
        size *= n
    elif kind == "all-gather":  # from the result; that of a start names the operands too
        size = instruction.bytes - (size if instruction.op.endswith("-start") else 0)
    arrays = sum(_num_joined(module, computation, operand) for operand in operands)
    if kind == "all-to-all" and n and not instruction.integers("dimensions"):
        arrays //= n  # written as one operand per device
    sliced = _sliced_bytes(module, frame, instruction, n) if kind == "all-reduce" and n else 0
    outer = instruction if fusion is None else fusion
    around = computation if fusion is None else frame.parent.computation
    collective = Collective(
        kind=kind, axes=axes, dtype=_dtypes(operands), arrays=arrays, count=1, bytes=size,
        wire_bytes=_wire_bytes(kind, size, n), in_loop=0, sliced=sliced > 0, sliced_bytes=sliced,
        name=outer.name, source=source_of(instruction) or source_of(outer),
        **overlap_of(analysis, around, outer),
    )  # fmt: skip
    return [collective], unknown


def _participants(
    analysis: Analysis, kind: str, instruction: Instruction
) -> tuple[tuple[str, ...] | None, int, list[str]]:
    """The mesh axes of a collective, the size of its groups (0: unknown), and what is unknown."""
    groups = None
    if analysis.module.num_replicas == 1:
        groups = hlo_text.groups_of(instruction, analysis.module.num_partitions)
    if groups is None:
        note = "its groups cannot be parsed; counted with the most possible bytes on the wire"
        return None, 0, [f"devices that {instruction.label} joins: {note}"]
    if kind == "collective-permute":
        if not groups:
            note = "a collective-permute without pairs, which gives zeros: a fault of the compiler?"
            return (), 1, [f"what {instruction.label} is for: {note}"]
        groups = [pair for pair in groups if pair[0] != pair[1]]
    n = max((len(group) for group in groups), default=1)
    axes = analysis.mesh.spanned(groups, analysis.mesh.within) if n > 1 else ()
    note = f"mesh axes of {instruction.label}: its groups are not of this mesh"
    return axes, n, [note] if axes is None else []


def _dtypes(operands: Sequence[Instruction]) -> str:
    return "+".join(dict.fromkeys(array.dtype for one in operands for array in one.arrays))


def _num_joined(module: Module, computation: Computation, operand: Instruction) -> int:
    """The number of arrays in one operand: GPU programs join them end to end."""
    while operand.op == "bitcast":
        operand = computation.by_name[operand.operands[0]]
    joined = next(module.called(operand)).root if operand.op == "fusion" else operand
    if joined.op == "concatenate" and len(joined.arrays[0].dims) == 1:
        return len(joined.operands)
    return len(operand.arrays)


def _wire_bytes(kind: str, size: int, n: int) -> int:
    """Bytes that one of n devices sends; n = 0: unknown, the largest possible number."""
    if kind in ("collective-permute", "collective-broadcast"):
        return size
    share = 1.0 if n == 0 else (n - 1) / n
    return round(size * share * (2 if kind == "all-reduce" else 1))


# Operations that return a whole array in another form.
_RESHAPING = {"bitcast", "convert", "copy", "copy-start", "copy-done", "reshape", "transpose"}


def _sliced_bytes(module: Module, frame: Frame, reduce: Instruction, n: int) -> int:
    """Bytes of an all-reduce's arrays of which each device uses only its n-th."""
    arrays, result = frame.computation.operands_of(reduce), reduce
    if reduce.op.endswith("-start"):
        result = done_of(frame.computation, reduce)
    while frame.caller is not None and result is frame.computation.root:
        # In a computation of its own, asynchronous or fused.
        if frame.caller.op == "fusion":
            result = frame.caller
        elif frame.caller.op.endswith("-start"):
            result = done_of(frame.parent.computation, frame.caller)
        else:
            return 0
        frame = frame.parent
    if result is None:
        return 0
    total, users = 0, frame.computation.users[result.name]
    for number, array in enumerate(arrays):
        elements = [one for one in users if one.op == "get-tuple-element" and one.index == number]
        if len(arrays) == 1:
            elements = [result]
        most = array.arrays[0].size // n
        if elements and all(_only_sliced(module, frame, one, most) for one in elements):
            total += array.bytes
    return total


def _only_sliced(module: Module, frame: Frame, array: Instruction, most: int) -> bool:
    """Whether every use of an array is a slice, chosen by device, of `most` elements or fewer."""
    users = frame.computation.users[array.name]
    if array is frame.computation.root:
        in_fusion = frame.caller is not None and frame.caller.op == "fusion"
        return in_fusion and _only_sliced(module, frame.parent, frame.caller, most)
    return bool(users) and all(_slices(module, frame, array, user, most) for user in users)


def _slices(module: Module, frame: Frame, array: Instruction, user: Instruction, most: int) -> bool:
    """Whether one user of an array takes such a slice, itself or in what it returns or runs."""
    if user.op in _RESHAPING:
        return _only_sliced(module, frame, user, most)
    if user.op == "dynamic-slice" and user.operands[0] == array.name:
        chosen = hlo_text.depends_on_device(module, frame, user.operands[1:])
        return chosen and user.arrays[0].size <= most
    if user.op != "fusion":
        return False
    inner = frame.enter(module, user)
    return all(
        _only_sliced(module, inner, inner.computation.parameters[number], most)
        for number, name in enumerate(user.operands)
        if name == array.name
    )


def done_of(computation: Computation, start: Instruction) -> Instruction | None:
    """The done of an asynchronous start; None: it is not in this computation."""
    for user in computation.users[start.name]:
        if user.op.endswith("-done"):
            return user
        if user.op.endswith("-update"):
            return done_of(computation, user)
    return None


def _position(computation: Computation, done: Instruction | None) -> int:
    return len(computation.instructions) if done is None else computation.position[done.name]


def overlap_of(analysis: Analysis, computation: Computation, start: Instruction) -> dict:
    """The fields `asynchronous` and `hidden_by` of a collective that an instruction runs."""
    if not start.op.endswith("-start") or start.configured("is_sync") == "true":
        return {"asynchronous": False, "hidden_by": 0}
    begin = start
    if not start.operands:  # prepared early; an update gives it its arrays
        begin = next(iter(computation.users[start.name]), start)
    end = _position(computation, done_of(computation, start))
    between = _num_computes(analysis, computation, computation.position[begin.name] + 1, end)
    return {"asynchronous": True, "hidden_by": between}


# Operations that move or make arrays without computing.
_MOVES = {
    "copy", "slice", "dynamic-slice", "dynamic-update-slice", "concatenate", "reshape",
    "transpose", "broadcast", "pad", "iota", "send", "recv", "reverse", "gather",
}  # fmt: skip


def _num_computes(analysis: Analysis, computation: Computation, begin: int, end: int) -> int:
    """The number of instructions from `begin` to `end` that compute something on arrays."""
    return sum(_computes(analysis, one) for one in computation.instructions[begin:end])


def _computes(analysis: Analysis, instruction: Instruction) -> bool:
    if instruction.op in ("while", "conditional", "call"):
        return True
    if instruction.op == "custom-call":
        return instruction_costs.is_kernel(instruction) or instruction_costs.is_product(instruction)
    if not any(array.dims for array in instruction.arrays):
        return False  # counters and sums
    if instruction.op == "fusion":
        contents = fusion_contents(analysis, instruction)
        return contents.flops > 0 or not contents.collectives
    asynchronous = instruction.op.endswith(("-start", "-update", "-done"))
    moves = instruction.op in instruction_costs.FREE | _MOVES
    return not (asynchronous or moves or collective_kind(instruction))


def read_chains(
    analysis: Analysis, frame: Frame
) -> tuple[list[Collective], list[str], list[tuple[Computation, Instruction]]]:
    """The collectives that several fusions begin, carry on and end (TPU v5e), what is unknown of
    them, and the instruction of each in its first fusion."""
    collectives, unknown, firsts = [], [], []
    position = frame.computation.position
    for fusions, inside, part in chains_of(analysis, frame.computation):
        first, last = fusions[0], fusions[-1]
        listed, notes = read_collective(analysis, Frame(inside, first, frame), part, fusion=first)
        begin, end = position[first.name], position[last.name] + 1
        changes = {
            "asynchronous": len(fusions) > 1,
            "hidden_by": _num_computes(analysis, frame.computation, begin, end),
            "name": ",".join(fusion.name for fusion in fusions),
        }
        collectives += [
            dataclasses.replace(one, source=one.source or source_of(last), **changes)
            for one in listed
        ]
        unknown += notes
        firsts.append((inside, part))
    return collectives, unknown, firsts


def chains_of(
    analysis: Analysis, computation: Computation
) -> list[tuple[list[Instruction], Computation, Instruction]]:
    """For each chain its fusions, and the collective in the first of them."""
    open_chains, ended = {}, []
    for fusion in (one for one in computation.instructions if one.op == "fusion"):
        contents = fusion_contents(analysis, fusion)
        for key, (inside, part) in contents.chains().items():
            open_chains.setdefault(key, ([], inside, part))[0].append(fusion)
            if "AsyncCollectiveDone" in contents.targets:
                ended.append(open_chains.pop(key))
    return ended + list(open_chains.values())


_TRANSFERS = {kind.upper().replace("-", "_"): kind for kind in hlo_text.COLLECTIVES[:4]}
# A device is written as 100000 x its slice, counted from 1, + its number in the slice.
_SLICE = 100_000
_TARGET = re.compile(r'_xla_megascale_target="?(\{.*?\}(?:x\{[\d:,]*\})?)"?,_xla')
_RENDEZVOUS = "_xla_host_transfer_rendezvous"
_PAIRS = re.compile(r'_xla_send_recv_source_target_pairs="?(\{.*?\}\})')


def read_send(
    analysis: Analysis, computation: Computation, send: Instruction
) -> tuple[list[Collective], list[str]]:
    """What devices hand to their hosts for other slices; GPUs send to each other, as a permute."""
    mesh, operands = analysis.mesh, [computation.by_name[send.operands[0]]]
    kind, transfer, groups = "send", "collective-permute", None
    if pairs := _PAIRS.search(send.attributes):
        kind, groups, sizes = "collective-permute", _id_groups(pairs.group(1)), mesh.within
    elif send.quoted("_xla_host_transfer_handler_name") == "xla_megascale_runtime":
        transfer = _TRANSFERS.get(send.quoted("_xla_megascale_transfer_type"), transfer)
        target, sizes = _TARGET.search(send.attributes), mesh.across
        groups = _slice_groups(target.group(1)) if target else None
    else:
        return [], [f"purpose of {send.label}: it leaves the devices"]
    n = max(len(group) for group in groups) if groups else 0
    axes = mesh.spanned(groups, sizes) if groups else None
    size = sum(operand.bytes for operand in operands) * (n if transfer == "all-gather" else 1)
    begin = computation.position[send.name] + 1
    end = _position(computation, reply_of(computation, send))
    collective = Collective(
        kind=kind, axes=axes, dtype=_dtypes(operands), arrays=len(operands), count=1, bytes=size,
        wire_bytes=_wire_bytes(transfer, size, n), asynchronous=True,
        hidden_by=_num_computes(analysis, computation, begin, end), in_loop=0, sliced=False,
        name=send.name,
        source=source_of(send) or f"{transfer} {send.quoted(_RENDEZVOUS) or ''}".strip(),
    )  # fmt: skip
    return [collective], [] if axes is not None else [f"destination of {send.label}"]


def reply_of(computation: Computation, send: Instruction) -> Instruction | None:
    """The instruction at which the reply to a send has been received; None: not in here."""
    name = send.quoted(_RENDEZVOUS)
    receives = (one for one in computation.instructions if one.op == "recv" and name is not None)
    receive = next((one for one in receives if one.quoted(_RENDEZVOUS) == name), send)
    return done_of(computation, receive)


def pairs_of(send: Instruction) -> list[list[int]]:
    """(source, target) of the devices of a send between GPUs; [] for others."""
    pairs = _PAIRS.search(send.attributes)
    return _id_groups(pairs.group(1)) if pairs else []


def _id_groups(text: str) -> list[list[int]]:
    groups = re.findall(r"\{([\d,\->]+)\}", text)
    return [list(map(int, re.findall(r"\d+", group))) for group in groups]


def _slice_groups(target: str) -> list[list[int]]:
    """Groups of slices, from 0: of "{1,2}x{0:3}" (slices and their devices), or of devices."""
    if "x" in target:
        return [[number - 1 for number in _id_groups(target.partition("x")[0])[0]]]
    return [[number // _SLICE - 1 for number in group] for group in _id_groups(target)]
