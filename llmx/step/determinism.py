"""Whether a step is deterministic: taken twice from the same state and batch, bit for bit.

Resuming, restarting on other processes and comparing replicas all count on it. The state waits in
the host's memory, so that the devices hold no more than in training: each try begins with a copy of
it, which the step may donate, and of its result only the fingerprints are kept.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from llmx.sharding import trees

Fingerprints = Callable[[Mapping[str, jax.Array]], Mapping[str, int]]


class NotDeterministic(ValueError):
    """The same step gave two results."""


class HostCopy(NamedTuple):
    """This process's part of an array, in the host's memory."""

    shape: tuple[int, ...]
    sharding: jax.sharding.Sharding
    shards: list[tuple[jax.Device, np.ndarray]]  # a replica shares the array of the first


def to_host(array: jax.Array) -> HostCopy:
    """A copy that the donation of `array` does not change."""
    parts: dict[str, np.ndarray] = {}
    shards = []
    for shard in array.addressable_shards:
        key = str(shard.index)
        if key not in parts:
            # np.asarray would be a view of a CPU device's memory.
            parts[key] = np.array(shard.data, copy=True)
        shards.append((shard.device, parts[key]))
    return HostCopy(array.shape, array.sharding, shards)


def from_host(copy: HostCopy) -> jax.Array:
    """The array again, in memory of its own."""
    kind = copy.sharding.memory_kind
    single = [
        jax.device_put(part, SingleDeviceSharding(device, memory_kind=kind), may_alias=False)
        for device, part in copy.shards
    ]
    return jax.make_array_from_single_device_arrays(copy.shape, copy.sharding, single)


def check(
    step: Callable[[Any, Any], tuple[Any, Any]], state: Any, batch: Any, *,
    fingerprints: Fingerprints,
) -> tuple[Any, int]:  # fmt: skip
    """Takes a step twice; returns the state as it was, and how many arrays agreed.

    Every process must call it. Communicates over all mesh axes.

    Args:
      step: (state, batch) -> (state, report); it may donate the state.
      state: is used up; go on with the state that is returned.
      fingerprints: of arrays by name, as `llmx.checkpoint.checksums` has them.

    Raises NotDeterministic, which names the first array that differs, and in how many elements.
    """
    kept = jax.tree.map(to_host, state)
    for leaf in jax.tree.leaves(state):
        leaf.delete()  # whoever else still holds it
    is_copy = lambda node: isinstance(node, HostCopy)  # noqa: E731
    again = lambda: jax.tree.map(from_host, kept, is_leaf=is_copy)  # noqa: E731

    def take() -> dict[str, jax.Array]:
        new, report = step(again(), batch)
        return trees.named(new) | trees.named({"report": report})

    first = fingerprints(take())
    second = fingerprints(take())
    if different := [name for name in first if first[name] != second[name]]:
        raise NotDeterministic(_text(different, len(first), take))
    return again(), len(first)


def _text(different: list[str], total: int, take: Callable[[], dict[str, jax.Array]]) -> str:
    """What is not deterministic; a third and fourth try tell in how many elements."""
    name = different[0]
    count = int(jax.device_get(_num_different(take()[name], again := take()[name])))
    elements = f"in {count:,} of {again.size:,} elements" if count else "in some tries, not in all"
    return (
        f"the step is not deterministic: taken twice from the same state and batch, "
        f"{len(different)} of {total} arrays differ, first {name}, {elements}. On GPUs add "
        "--xla_gpu_deterministic_ops=true to XLA_FLAGS (it may be slower), on others look for a "
        "faulty device; without --check-determinism the run trains as it is"
    )


@jax.jit
def _num_different(one: jax.Array, other: jax.Array) -> jax.Array:
    """How many elements differ in a bit: 0.0 and -0.0 do."""
    if jnp.issubdtype(one.dtype, jnp.floating):
        unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}[one.dtype.itemsize]
        one, other = (jax.lax.bitcast_convert_type(x, unsigned) for x in (one, other))
    return jnp.sum(one != other)
