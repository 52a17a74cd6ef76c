"""The operations of a compiled program in which devices exchange data: what each moves, over which
mesh axes, and what hides it.

Bytes are those of the whole arrays: as gathered, or before they are scattered. Wire bytes are those
that one device sends in a ring of n: (n-1)/n of the whole for an all-gather, a reduce-scatter or an
all-to-all, twice that for an all-reduce, all of it for a permute
(jax-ml.github.io/scaling-book/sharding).
"""

import dataclasses
import math
import re
from collections.abc import Sequence

import numpy as np

from llmx.aot import hlo_text, instruction_costs
from llmx.aot.hlo_text import (
    Computation,
    Frame,
    Instruction,
    Module,
    collective_kind,
    source_of,
    told,
)


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


@dataclasses.dataclass(frozen=True, eq=False)
class Reading:
    """What all of a program's reading shares."""

    module: Module
    place: "Place"
    fused: dict[str, "Fused"]  # by name of the computation, as they are met
    met: set[str]  # names of the collectives and products that were met


# ----------------------------------------------------------------------------- devices and the mesh


@dataclasses.dataclass(frozen=True)
class Place:
    """The mesh, split into what lies within a TPU slice and what lies across slices."""

    axes: tuple[str, ...]
    inner: tuple[int, ...]  # sizes within a slice: positions here are what replica groups name
    outer: tuple[int, ...]  # sizes across slices

    def spanned(self, groups: Sequence[Sequence[int]], sizes: Sequence[int]) -> tuple | None:
        """The axes along which members of a group differ. None: some are outside the mesh."""
        longest = max(len(group) for group in groups)
        members = np.array([(*group, *[group[0]] * (longest - len(group))) for group in groups])
        if members.max() >= math.prod(sizes):
            return None
        along = np.unravel_index(members, sizes)
        return tuple(
            axis for axis, at in zip(self.axes, along, strict=True) if np.any(at != at[:, :1])
        )


def place_of(
    module: Module, mesh: Sequence[tuple[str, int]], across_slices: Sequence[str]
) -> Place:
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
    outer = [1] * len(axes)
    slices = max(devices // partitions, 1)
    if across_slices:
        outer = [size if name in across_slices else 1 for name, size in mesh]
        if math.prod(outer) != slices:
            raise ValueError(
                f"across_slices={tuple(across_slices)} of mesh {shown} make {math.prod(outer)} "
                f"slices and the program is that of one of {slices}: name the axes that cross them"
            )
    else:
        for axis, size in enumerate(sizes):
            outer[axis] = math.gcd(size, slices)
            slices //= outer[axis]
    inner = tuple(size // out for size, out in zip(sizes, outer, strict=True))
    return Place(axes, inner, tuple(outer))


# ------------------------------------------------------------------------------------------ fusions


@dataclasses.dataclass(frozen=True, eq=False)
class Fused:
    """What matters here of a fusion's computation."""

    flops: float
    unread: tuple[str, ...]  # products whose text is not understood
    collectives: tuple[tuple[Computation, Instruction], ...]
    targets: frozenset[str]  # of custom calls

    def chains(self) -> dict[tuple, tuple[Computation, Instruction]]:
        """Collectives of which it carries out a part, by what their parts have in common."""
        return {
            (each.op, each.attribute("channel_id"), chain): (computation, each)
            for computation, each in self.collectives
            if (chain := each.quoted("chain_id")) is not None
        }


def fused_of(reading: Reading, fusion: Instruction) -> Fused:
    (computation,) = reading.module.called(fusion)
    if computation.name not in reading.fused:
        flops, unread, found, targets = 0.0, [], [], set()
        for inside, each in reading.module.inside(fusion):
            if instruction_costs.is_product(each):
                product = instruction_costs.flops_of(inside, each)
                flops += product or 0.0
                unread += [each.name] if product is None else []
                reading.met.add(each.name)
            elif collective_kind(each):
                found.append((inside, each))
                reading.met.add(each.name)
            elif each.op == "custom-call":
                targets.add(each.quoted("custom_call_target"))
        reading.fused[computation.name] = Fused(
            flops, tuple(unread), tuple(found), frozenset(targets)
        )
    return reading.fused[computation.name]


# -------------------------------------------------------------------------------------- collectives


def read_collective(
    reading: Reading, frame: Frame, each: Instruction, *, fusion: Instruction | None = None
) -> tuple[list[Collective], list[str]]:
    """A collective at its start, alone or in a fusion, and what is not known of it.

    None of it if each device is alone in its group: nothing moves.
    """
    module, computation, place = reading.module, frame.computation, reading.place
    reading.met.add(each.name)
    kind = collective_kind(each)
    if fusion is not None and fusion.attribute("calls").startswith("all-reduce-scatter"):
        kind = "reduce-scatter"  # TPU's way to write one
    groups, unknown = hlo_text.groups_of(each, module.num_partitions), []
    if module.num_replicas > 1:
        groups = None
    if groups is None:
        axes, n = None, 0
        unknown.append(
            f"devices that {told(each)} joins: its groups are not understood; it is counted with "
            "the most bytes on the wire that there can be"
        )
    else:
        if kind == "collective-permute":
            groups = [pair for pair in groups if pair[0] != pair[1]]
        n = max((len(group) for group in groups), default=1)
        if n == 1:
            return [], []
        axes = place.spanned(groups, place.inner)
        if axes is None:
            unknown.append(f"mesh axes of {told(each)}: its groups are not of this mesh")
    operands = computation.operands_of(each)
    if kind == "ragged-all-to-all":
        operands = operands[:1]  # then come room for the result, offsets and sizes
        unknown.append(f"bytes of {told(each)}: data say how many; its whole operand is counted")
    size = sum(operand.bytes for operand in operands)
    if kind == "all-gather" and n:
        size *= n
    elif kind == "all-gather":  # the result tells; that of a start names the operands too
        size = each.bytes - (size if each.op.endswith("-start") else 0)
    arrays = sum(_joined(module, computation, operand) for operand in operands)
    if kind == "all-to-all" and n and not each.integers("dimensions"):
        arrays //= n  # written as one operand per device
    kept = _sliced_bytes(module, frame, each, n) if kind == "all-reduce" and n else 0
    if fusion is None:
        waits = waits_of(reading, computation, each)
    else:
        waits = waits_of(reading, frame.parent.computation, fusion)
    collective = Collective(
        kind=kind,
        axes=axes,
        dtype=_dtypes(operands),
        arrays=arrays,
        count=1,
        bytes=size,
        wire_bytes=_on_the_wire(kind, size, n),
        in_loop=0,
        sliced=kept > 0,
        name=(fusion or each).name,
        source=source_of(each) or (source_of(fusion) if fusion is not None else ""),
        sliced_bytes=kept,
        **waits,
    )
    return [collective], unknown


def _dtypes(operands: Sequence[Instruction]) -> str:
    arrays = [array for operand in operands for array in operand.arrays]
    return "+".join(dict.fromkeys(array.dtype for array in arrays))


def _joined(module: Module, computation: Computation, operand: Instruction) -> int:
    """The number of arrays in one operand: GPU programs join them end to end."""
    while operand.op == "bitcast":
        operand = computation.by_name[operand.operands[0]]
    joined = operand
    if operand.op == "fusion":
        (fused,) = module.called(operand)
        joined = fused.root
    if joined.op == "concatenate" and len(joined.arrays[0].dims) == 1:
        return len(joined.operands)
    return len(operand.arrays)


def _on_the_wire(kind: str, size: int, n: int) -> int:
    """Bytes that one of n devices sends; n = 0: unknown, as many as there can be."""
    if kind in ("collective-permute", "collective-broadcast"):
        return size
    share = 1.0 if n == 0 else (n - 1) / n
    return round(size * share * (2 if kind == "all-reduce" else 1))


# ------------------------------------------------------------- all-reduces of which a slice is kept

# What gives an array on whole, in another form.
_WHOLE = {"bitcast", "convert", "copy", "copy-start", "copy-done", "reshape", "transpose"}


def _sliced_bytes(module: Module, frame: Frame, reduce: Instruction, n: int) -> int:
    """Bytes of an all-reduce's arrays of which each device uses its n-th alone."""
    arrays, carrier = frame.computation.operands_of(reduce), reduce
    if reduce.op.endswith("-start"):
        carrier = _end(frame.computation, reduce)
    while frame.caller is not None and carrier is frame.computation.root:
        # In a computation of its own, run beside others or as a fusion.
        if frame.caller.op == "fusion":
            carrier = frame.caller
        elif frame.caller.op.endswith("-start"):
            carrier = _end(frame.parent.computation, frame.caller)
        else:
            return 0
        frame = frame.parent
    if carrier is None:
        return 0
    if len(arrays) == 1:
        kept = _only_sliced(module, frame, carrier, arrays[0].arrays[0].size // n)
        return arrays[0].bytes if kept else 0
    total = 0
    for number, array in enumerate(arrays):
        uses = [
            user
            for user in frame.computation.users[carrier.name]
            if user.op == "get-tuple-element" and int(user.attribute("index")) == number
        ]
        limit = array.arrays[0].size // n
        if uses and all(_only_sliced(module, frame, use, limit) for use in uses):
            total += array.bytes
    return total


def _only_sliced(module: Module, frame: Frame, array: Instruction, limit: int) -> bool:
    """Whether all that is used of an array is a slice, chosen by device, of at most `limit`."""
    users = frame.computation.users[array.name]
    if array is frame.computation.root:
        in_fusion = frame.caller is not None and frame.caller.op == "fusion"
        return in_fusion and _only_sliced(module, frame.parent, frame.caller, limit)
    for user in users:
        if user.op in _WHOLE:
            if not _only_sliced(module, frame, user, limit):
                return False
        elif user.op == "dynamic-slice" and user.operands[0] == array.name:
            if user.arrays[0].size > limit:
                return False
            if not hlo_text.depends_on_device(module, frame, user.operands[1:]):
                return False
        elif user.op == "fusion":
            (computation,) = module.called(user)
            inner = Frame(computation, user, frame)
            for number, name in enumerate(user.operands):
                parameter = computation.parameters[number]
                if name == array.name and not _only_sliced(module, inner, parameter, limit):
                    return False
        else:
            return False
    return bool(users)


# ---------------------------------------------------------------------------------- what hides them


def _end(computation: Computation, start: Instruction) -> Instruction | None:
    """Where what begins at `start` ends; None: not in this computation."""
    for user in computation.users[start.name]:
        if user.op.endswith("-done"):
            return user
        if user.op.endswith("-update"):
            return _end(computation, user)
    return None


def _until(computation: Computation, end: Instruction | None) -> int:
    return len(computation.instructions) if end is None else computation.position[end.name]


def waits_of(reading: Reading, computation: Computation, start: Instruction) -> dict:
    """The fields `asynchronous` and `hidden_by` of a collective that an instruction runs."""
    if not start.op.endswith("-start") or start.configured("is_sync") == "true":
        return {"asynchronous": False, "hidden_by": 0}
    begin = start
    if not start.operands:  # made ready early; an update gives it its arrays
        begin = next(iter(computation.users[start.name]), start)
    end = _until(computation, _end(computation, start))
    between = _num_computes(reading, computation, computation.position[begin.name] + 1, end)
    return {"asynchronous": True, "hidden_by": between}


# What moves or makes arrays without computing.
_MOVES = {
    "copy", "slice", "dynamic-slice", "dynamic-update-slice", "concatenate", "reshape",
    "transpose", "broadcast", "pad", "iota", "send", "recv", "reverse", "gather",
}  # fmt: skip


def _num_computes(reading: Reading, computation: Computation, begin: int, end: int) -> int:
    """How many of these instructions compute something on arrays."""
    return sum(_computes(reading, each) for each in computation.instructions[begin:end])


def _computes(reading: Reading, each: Instruction) -> bool:
    if each.op in ("while", "conditional", "call"):
        return True
    if each.op == "custom-call":
        return instruction_costs.is_kernel(each) or instruction_costs.is_product(each)
    if not any(array.dims for array in each.arrays):
        return False  # counters and sums
    if each.op == "fusion":
        fused = fused_of(reading, each)
        return fused.flops > 0 or not fused.collectives
    in_parts = each.op.endswith(("-start", "-update", "-done"))
    still = instruction_costs.is_free(each) or each.op in _MOVES or collective_kind(each)
    return not (in_parts or still)


# --------------------------------------------------- one collective, carried out by several fusions


def read_chains(
    reading: Reading, frame: Frame
) -> tuple[list[Collective], list[str], list[tuple[Computation, Instruction]]]:
    """The collectives of a computation that several fusions begin, carry on and end (TPU v5e).

    With what is not known of them, and the instruction of each in its first fusion.
    """
    collectives, unknown, firsts = [], [], []
    for fusions, inside, each in _chains(reading, frame.computation):
        first, last = fusions[0], fusions[-1]
        found, notes = read_collective(reading, Frame(inside, first, frame), each, fusion=first)
        position = frame.computation.position
        between = _num_computes(
            reading, frame.computation, position[first.name], position[last.name] + 1
        )
        collectives += [
            dataclasses.replace(
                one,
                asynchronous=len(fusions) > 1,
                hidden_by=between,
                name=",".join(fusion.name for fusion in fusions),
                source=one.source or source_of(last),
            )
            for one in found
        ]
        unknown += notes
        firsts.append((inside, each))
    return collectives, unknown, firsts


def _chains(
    reading: Reading, computation: Computation
) -> list[tuple[list[Instruction], Computation, Instruction]]:
    going, found = {}, []
    for fusion in computation.instructions:
        if fusion.op != "fusion":
            continue
        fused = fused_of(reading, fusion)
        for key, (inside, each) in fused.chains().items():
            going.setdefault(key, ([], inside, each))[0].append(fusion)
            if "AsyncCollectiveDone" in fused.targets:
                found.append(going.pop(key))
    return found + list(going.values())


# ------------------------------------------------------------------------------- between TPU slices

_TRANSFERS = {
    "ALL_REDUCE": "all-reduce", "ALL_GATHER": "all-gather", "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
}  # fmt: skip
# A device is written as 100000 x its slice, counted from 1, + its number in the slice.
_SLICE = 100_000
_TARGET = re.compile(r'_xla_megascale_target="?(\{.*?\}(?:x\{[\d:,]*\})?)"?,_xla')
_PAIRS = re.compile(r'_xla_send_recv_source_target_pairs="?(\{.*?\}\})')


def read_send(
    reading: Reading, computation: Computation, send: Instruction
) -> tuple[list[Collective], list[str]]:
    """What devices give to their hosts for other slices; GPUs send to each other, as a permute."""
    place, operands = reading.place, [computation.by_name[send.operands[0]]]
    kind, like, groups = "send", "collective-permute", None
    if pairs := _PAIRS.search(send.attributes):
        kind, groups, sizes = "collective-permute", _braces(pairs.group(1)), place.inner
    elif send.quoted("_xla_host_transfer_handler_name") == "xla_megascale_runtime":
        like = _TRANSFERS.get(send.quoted("_xla_megascale_transfer_type"), like)
        target, sizes = _TARGET.search(send.attributes), place.outer
        groups = _slices(target.group(1)) if target else None
    else:
        return [], [f"what {told(send)} is for: it leaves the devices"]
    n = max(len(group) for group in groups) if groups else 0
    axes = place.spanned(groups, sizes) if groups else None
    size = sum(each.bytes for each in operands) * (n if like == "all-gather" else 1)
    begin, end = computation.position[send.name] + 1, _answered(computation, send)
    collective = Collective(
        kind=kind,
        axes=axes,
        dtype=_dtypes(operands),
        arrays=len(operands),
        count=1,
        bytes=size,
        wire_bytes=_on_the_wire(like, size, n),
        asynchronous=True,
        hidden_by=_num_computes(reading, computation, begin, end),
        in_loop=0,
        sliced=False,
        name=send.name,
        source=source_of(send) or f"{like} {_rendezvous(send) or ''}".strip(),
    )
    return [collective], [] if axes is not None else [f"where {told(send)} goes"]


def _rendezvous(each: Instruction) -> str | None:
    return each.quoted("_xla_host_transfer_rendezvous")


def _answered(computation: Computation, send: Instruction) -> int:
    """The position where the answer to a send is there."""
    if (named := _rendezvous(send)) is not None:
        for each in computation.instructions:
            if each.op == "recv" and _rendezvous(each) == named:
                return _until(computation, _end(computation, each))
    return _until(computation, _end(computation, send))


def _braces(text: str) -> list[list[int]]:
    groups = re.findall(r"\{([\d,\->]+)\}", text)
    return [[int(number) for number in re.findall(r"\d+", group)] for group in groups]


def _slices(target: str) -> list[list[int]]:
    """Groups of slices, from 0: of "{1,2}x{0:3}" (slices and their devices), or of devices."""
    if "x" in target:
        return [[number - 1 for number in _braces(target.partition("x")[0])[0]]]
    return [[number // _SLICE - 1 for number in group] for group in _braces(target)]
