"""What a device asks the others for: its ids without repetitions, in as many rounds as are needed.

All of it is the text of one device, in a manual region. Rows are numbers: device x slots + slot;
`none` stands for no row. In a round every device may ask every other for `capacity` rows of each
group. Usually one round is enough. Otherwise round i has the rows whose slot % rounds is i, with as
many rounds as it takes for each to fit: so all gradients of a row arrive in the same round, and its
update is made there, once.

Letters: K ids of the device, U = K places for different ones, n devices, C capacity, M = n C.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from llmx.tables.placement import Group

Asked = Mapping[str, jax.Array]  # by width: the rows [U] of `once`
Capacities = Mapping[str, int]  # by width, C


def once(numbers_K: jax.Array, *, none: int) -> tuple[jax.Array, jax.Array]:
    """Different numbers, ascending, `none` behind the last; and at which of them each is.

    On CPUs it takes a tenth of the time to sort numbers alone and look each up than to sort them
    with their places.
    """
    ordered_K = jnp.sort(numbers_K, stable=False)
    is_first_K = jnp.concatenate([jnp.ones(1, bool), ordered_K[1:] != ordered_K[:-1]])
    rank_K = jnp.cumsum(is_first_K, dtype=jnp.int32) - 1
    distinct_K = jnp.full_like(numbers_K, none)
    # Of equal ones any may write.
    distinct_K = distinct_K.at[rank_K].set(ordered_K, indices_are_sorted=True)
    return distinct_K, jnp.searchsorted(distinct_K, numbers_K).astype(jnp.int32)


def fit(groups: Mapping[str, Group], asked: Asked, capacities: Capacities) -> bool:
    """Whether one round is enough, whatever the ids are."""
    return all(
        capacities[key] >= min(group.slots, asked[key].shape[0]) for key, group in groups.items()
    )


def num_rounds(
    groups: Mapping[str, Group], asked: Asked, capacities: Capacities, axes: Sequence[str]
) -> jax.Array:
    """How many rounds it takes, int32 []. Communicates one number over `axes`."""
    if fit(groups, asked, capacities):
        return jnp.ones((), jnp.int32)
    most = max(group.slots for group in groups.values())

    def of_any(over: Sequence[jax.Array]) -> jax.Array:
        return jax.lax.psum(jnp.stack(over).any().astype(jnp.int32), axes) > 0

    def in_one(key: str) -> jax.Array:
        group = groups[key]
        first_n = jnp.arange(group.devices + 1, dtype=jnp.int32) * group.slots
        counts_n = jnp.diff(jnp.searchsorted(asked[key], first_n))
        return counts_n.max() > capacities[key]

    def in_more(key: str, rounds: jax.Array) -> jax.Array:
        """Whether too many are of one device and class: equal numbers, counted by sorting."""
        group, capacity, rows_U = groups[key], capacities[key], asked[key]
        classes = jnp.minimum(rounds, group.slots)
        bins_U = rows_U // group.slots * classes + rows_U % group.slots % classes
        bins_U = jnp.sort(jnp.where(rows_U < group.none, bins_U, group.none))
        if capacity >= len(bins_U):
            return jnp.zeros((), bool)
        return jnp.any((bins_U[capacity:] == bins_U[:-capacity]) & (bins_U[capacity:] < group.none))

    def more(state):
        rounds = jnp.minimum(state[0] * 2, most)
        return rounds, of_any([in_more(key, rounds) for key in groups])

    with jax.named_scope(_EXPECTED_TRIPS.format(0)):
        rounds, _ = jax.lax.while_loop(
            lambda state: state[1] & (state[0] < most), more,
            (jnp.ones((), jnp.int32), of_any([in_one(key) for key in groups])),
        )  # fmt: skip
    return rounds


# The scope of a loop whose end depends on data: what `llmx.aot` reads as its number of trips.
_EXPECTED_TRIPS = "expected_trips_{}"


def each_round(rounds: jax.Array | int, one_round: Callable[[Any, Any], Any], carry: Any) -> Any:
    """`one_round(number, carry)` for each; an int for `rounds` says that it is known."""
    if isinstance(rounds, int):
        for number in range(rounds):
            carry = one_round(number, carry)
        return carry
    with jax.named_scope(_EXPECTED_TRIPS.format(1)):
        return jax.lax.fori_loop(0, rounds, one_round, carry)


class Bucket(NamedTuple):
    """A round's rows, sorted by the device that has them."""

    slots_nC: jax.Array  # int32; -1: none
    from_nC: jax.Array  # int32: the place of each in U
    at_U: jax.Array  # int32: the place of each of U in n x C; n x C: not in this round


def bucket(group: Group, rows_U: jax.Array, capacity: int, rounds: Any, number: Any) -> Bucket:
    """Of round `number` of so many."""
    n, U = group.devices, rows_U.shape[0]
    device_U, slot_U = rows_U // group.slots, rows_U % group.slots
    is_in_U = (rows_U < group.none) & (slot_U % rounds == number)
    before_U = jnp.cumsum(is_in_U, dtype=jnp.int32) - is_in_U
    # Rows ascend, so those of a device are neighbors.
    first_n = jnp.searchsorted(rows_U, jnp.arange(n, dtype=jnp.int32) * group.slots)
    begin_n = jnp.concatenate([before_U, before_U[-1:] + is_in_U[-1:]])[first_n]
    at_U = before_U - begin_n[jnp.minimum(device_U, n - 1)] + device_U * capacity
    at_U = jnp.where(is_in_U, at_U, n * capacity)
    from_nC = jnp.full(n * capacity, U, jnp.int32)
    from_nC = from_nC.at[at_U].set(jnp.arange(U, dtype=jnp.int32), mode="drop")
    slots_nC = slot_U.at[from_nC].get(mode="fill", fill_value=-1)
    return Bucket(slots_nC.reshape(n, capacity), from_nC.reshape(n, capacity), at_U)


def exchange(arrays: Mapping[str, jax.Array], axes: Sequence[str]) -> dict[str, jax.Array]:
    """[n, C, ...] of one dtype: part i goes to device i; of all devices the part for this one.

    One all-to-all for all arrays: its start costs more than what it carries of a small table.
    """
    shapes = {key: array.shape for key, array in arrays.items()}
    if len(arrays) == 1:
        [(key, array)] = arrays.items()
        return {key: jax.lax.all_to_all(array, axes, 0, 0, tiled=True)}
    flat = [array.reshape(array.shape[0], -1) for array in arrays.values()]
    flat = jax.lax.all_to_all(jnp.concatenate(flat, axis=1), axes, 0, 0, tiled=True)
    found, first = {}, 0
    for key, shape in shapes.items():
        end = first + arrays[key].size // shape[0]
        found[key] = flat[:, first:end].reshape(shape)
        first = end
    return found


def summed(slots_M: jax.Array, gradients_MW: jax.Array, *, none: int):
    """The sum of the gradients of each slot: slots, ascending, `none` behind the last, and sums.

    slots_M: -1 = no slot.
    """
    slots_M = jnp.where(slots_M < 0, none, slots_M)
    distinct_M, place_M = once(slots_M, none=none)
    sums_MW = jnp.zeros_like(gradients_MW).at[place_M].add(gradients_MW)
    return distinct_M, sums_MW
