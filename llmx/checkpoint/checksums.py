"""Checksums of a checkpoint: of its arrays, computed on the devices, and of its JSON document.

The fingerprint of an array is a sum over the bit pattern of the global array, hence the same number
on every mesh, layout and process count.
"""

import json
import zlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp


def fingerprints(arrays: Mapping[str, jax.Array]) -> dict[str, int]:
    """A uint32 for each array: the same on every mesh, changed by a flipped byte or swapped values.

    Compiles once per shape, dtype and sharding. Communicates one number per array, an all-reduce
    over the mesh axes that shard it. Arrays are processed one at a time: offloaded ones may not fit
    the device together, and on fake CPU devices two programs at once can deadlock.
    """
    return {name: int(jax.device_get(_fingerprint(onto_device(x)))) for name, x in arrays.items()}


def differences(arrays: Mapping[str, jax.Array], expected: Mapping[str, int]) -> str:
    """The arrays with other fingerprints than expected, as text; "" if there are none."""
    wrong = [name for name, actual in fingerprints(arrays).items() if actual != expected[name]]
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return f"checksum differs in leaf {', '.join(wrong[:3])}{more}" if wrong else ""


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
    """The sum of mix(word xor position), modulo 2^32.

    `mix` is a bijection, so one changed word always changes the sum. Being nonlinear in word and
    position together it sees permutations too, which sums weighted by position miss (x and -x
    swapped over an even distance). Integer sums do not depend on their order.
    """
    words = _words(x)
    position = jnp.zeros((1,) * words.ndim, jnp.uint32)
    for dim, size in enumerate(words.shape):
        offset = jnp.uint32(0x9E3779B1 * (dim + 1) % 2**32)
        steps = _mix(jnp.arange(size, dtype=jnp.uint32) + offset)
        position = position + steps.reshape([-1 if d == dim else 1 for d in range(words.ndim)])
    return jnp.sum(_mix(words ^ position), dtype=jnp.uint32)


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
