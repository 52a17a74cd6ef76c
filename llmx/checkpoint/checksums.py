"""Checksums of a checkpoint: of its arrays, computed on the devices, and of its JSON document.

The fingerprint of an array is a sum over the bit pattern of the global array, hence the same number
on every mesh, layout and process count. A device's part of the array has a sum of its own: devices
that hold the same part must agree, and the sums of the parts add up to the fingerprint.
"""

import collections
import functools
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

# {leaf name: {device id: sum over the part of the leaf that the device holds}}
DeviceSums = dict[str, dict[int, int]]


def fingerprints(arrays: Mapping[str, jax.Array]) -> dict[str, int]:
    """A uint32 for each array: the same on every mesh, changed by a flipped byte or swapped values.

    Compiles once per shape, dtype and sharding. Communicates one number per array, an all-reduce
    over the mesh axes that shard it. Arrays are processed one at a time: offloaded ones may not fit
    the device together, and on fake CPU devices two programs at once can deadlock.
    """
    return {name: int(jax.device_get(_fingerprint(onto_device(x)))) for name, x in arrays.items()}


def differences(arrays: Mapping[str, jax.Array], expected: Mapping[str, int]) -> str:
    """The arrays with other fingerprints than expected, as text; "" if there are none."""
    return difference_text(fingerprints(arrays), expected)


def difference_text(found: Mapping[str, int], expected: Mapping[str, int]) -> str:
    """The names of fingerprints that are others than expected, as text; "" if there are none."""
    wrong = [name for name, actual in found.items() if actual != expected[name]]
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return f"checksum differs in leaf {', '.join(wrong[:3])}{more}" if wrong else ""


def start_device_sums(arrays: Mapping[str, jax.Array]) -> dict[str, list[jax.Shard]]:
    """Starts to compute a uint32 per array and local device: the sum over the part it holds.

    Returns without waiting for the devices. No communication. Offloaded arrays are processed one
    at a time, because they may not fit the devices together.
    """
    started = {}
    for name, array in arrays.items():
        present = onto_device(array)
        started[name] = _start(present)
        if present is not array:
            jax.block_until_ready([shard.data for shard in started[name]])
    return started


def fetch(started: Mapping[str, Sequence[jax.Shard]]) -> DeviceSums:
    """What `start_device_sums` started; waits for it. Runs nothing on the devices."""
    values = jax.device_get({name: [s.data for s in shards] for name, shards in started.items()})
    return {
        name: {s.device.id: int(v.sum()) for s, v in zip(shards, values[name], strict=True)}
        for name, shards in started.items()
    }


def of_part(part: Any, starts: Sequence[int]) -> int:
    """The sum over a part of an array, whose first element is at `starts`; those of all parts add
    up to the fingerprint, modulo 2^32."""
    return int(_sum_at(jnp.asarray(part), jnp.asarray(starts, jnp.uint32)))


def combine(sums: DeviceSums, arrays: Mapping[str, Any]) -> tuple[dict[str, int], str]:
    """The fingerprint of each array from the sums of all devices, and where replicas differ.

    The text names the leaf, and the devices and processes in the minority (of a tie, all); it is
    "" where all replicas agree. `arrays` say shapes and shardings.
    """
    totals, wrong = {}, []
    for name, array in arrays.items():
        parts = collections.defaultdict(list)
        for device, index in array.sharding.devices_indices_map(array.shape).items():
            parts[tuple((s.start, s.stop) for s in index)].append(device)
        totals[name] = 0
        for devices in parts.values():
            camps = collections.defaultdict(list)
            for device in devices:
                camps[sums[name][device.id]].append(device)
            largest = max(camps, key=lambda value: len(camps[value]))
            totals[name] = (totals[name] + largest) % 2**32
            if len(camps) > 1:
                wrong.append(_camps_text(name, [camps.pop(largest), *camps.values()]))
    more = f" (and in {len(wrong) - 1} more parts of leaves)" if len(wrong) > 1 else ""
    return totals, wrong[0] + more if wrong else ""


def _camps_text(name: str, camps: Sequence[Sequence[jax.Device]]) -> str:
    def text(devices):
        ids = ", ".join(str(device.id) for device in sorted(devices, key=lambda d: d.id))
        processes = sorted({device.process_index for device in devices})
        many = "es" if len(processes) > 1 else ""
        plural = "s" if len(devices) > 1 else ""
        return f"device{plural} {ids} (process{many} {', '.join(map(str, processes))})"

    head, *others = camps
    if len(head) == max(map(len, others)):
        each = " and ".join(text(devices) for devices in camps)
        return f"replicas of {name} differ: {each} hold different values, none is the majority"
    few = " and ".join(text(devices) for devices in others)
    hold = "hold" if sum(map(len, others)) > 1 else "holds"
    return f"replicas of {name} differ: {few} {hold} other values than {text(head)}"


def seal(document: dict) -> dict:
    """`document`, as JSON reads it back, together with its checksum."""
    document = json.loads(json.dumps(document))
    return {"crc32": _crc(document), "document": document}


def is_intact(sealed: Mapping) -> bool:
    """Whether the document in `sealed` matches its checksum."""
    return _crc(sealed["document"]) == sealed["crc32"]


def _crc(document: dict) -> int:
    return zlib.crc32(json.dumps(document, sort_keys=True).encode())


def onto_device(array: jax.Array) -> jax.Array:
    """`array` in device memory, if it is offloaded to the host's."""
    device = min(array.sharding.device_set, key=lambda device: device.id)
    memory = device.default_memory().kind
    if array.sharding.memory_kind in (None, memory):
        return array
    return jax.device_put(array, array.sharding.with_memory_kind(memory))


@jax.jit
def _fingerprint(x: jax.Array) -> jax.Array:
    return _sum(x, (0,) * x.ndim)


def _start(x: jax.Array) -> list[jax.Shard]:
    """The sums over the parts of `x` on this process's devices, being computed."""
    if isinstance(x.sharding, jax.NamedSharding):
        return _sharded_sum(x.sharding.mesh, x.sharding.spec)(x).addressable_shards
    started = []
    for shard in x.addressable_shards:
        starts = tuple(part.start or 0 for part in shard.index)
        started += _sum_from(shard.data, starts).addressable_shards
    return started


@functools.cache
def _sharded_sum(mesh: jax.sharding.Mesh, spec: jax.P):
    """Array -> uint32 [devices of the mesh], each the sum over its own part; no communication."""
    axes_of = [(axes,) if isinstance(axes, str) else tuple(axes or ()) for axes in spec]

    def local(x):
        padded = axes_of + [()] * (x.ndim - len(axes_of))
        starts = [jax.lax.axis_index(a) * x.shape[d] if a else 0 for d, a in enumerate(padded)]
        return _sum(x, starts)[None]

    over_all = jax.P(mesh.axis_names)
    # The replicas of one part may differ, against what the sharding says.
    mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=over_all, check_vma=False)
    compiled = jax.jit(mapped)

    @functools.wraps(compiled)
    def run(x):
        with jax.set_mesh(mesh):
            return compiled(x)

    return run


def _sum(x: jax.Array, starts: Sequence[Any]) -> jax.Array:
    """The sum of mix(word xor position), modulo 2^32, over a part of an array.

    `starts`: the position in the array of the part's first element, by dimension. `mix` is a
    bijection, so one changed word always changes the sum. Being nonlinear in word and position
    together it sees permutations too, which sums weighted by position miss (x and -x swapped over
    an even distance). Integer sums do not depend on their order.
    """
    words = _words(x)
    # Complex numbers have a dimension more in front, 64-bit types one more at the end.
    starts = [0] * jnp.issubdtype(x.dtype, jnp.complexfloating) + list(starts)
    starts += [0] * (words.ndim - len(starts))
    position = jnp.zeros((1,) * words.ndim, jnp.uint32)
    for dim, size in enumerate(words.shape):
        offset = jnp.uint32(0x9E3779B1 * (dim + 1) % 2**32)
        first = jnp.asarray(starts[dim]).astype(jnp.uint32)
        steps = _mix(jnp.arange(size, dtype=jnp.uint32) + first + offset)
        position = position + steps.reshape([-1 if d == dim else 1 for d in range(words.ndim)])
    return jnp.sum(_mix(words ^ position), dtype=jnp.uint32)


_sum_from = jax.jit(_sum, static_argnums=1)
_sum_at = jax.jit(_sum)


def _words(x: jax.Array) -> jax.Array:
    """The bit pattern of `x` as uint32, one word per element (two for 64-bit types)."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    if x.dtype == jnp.bool_ or x.dtype in (jnp.int4, jnp.uint4):
        return x.astype(jnp.uint8).astype(jnp.uint32)
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[x.dtype.itemsize]
    return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
    """The finaliser of MurmurHash3 (github.com/aappleby/smhasher), a bijection of uint32."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
