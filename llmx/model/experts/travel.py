"""How rows travel to the devices of their experts and back, in rounds: in manual regions.

Experts are split over the mesh axis `expert`, and so is the batch. A device has A = tokens times k
assignments, of a token to an expert. It sends each device of the axis up to `per_pair` rows in a
round, by an all-to-all of arrays of one size; what does not fit follows in the next round. How many
rounds there are is known on all devices before the first. So nothing is dropped, however unequal
the loads are, and what is in memory is bounded. With `expert` of size 1 nothing is sent.

Letters: N tokens of this device, k experts of a token, A = N k assignments, D width, E experts of
this device, n devices along `expert`, C rows from one to another in a round, R slots of rows in
blocks.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from llmx.model.experts import grouped
from llmx.model.experts.grouped import Blocks

AXIS = "expert"


@dataclasses.dataclass(frozen=True)
class Ways:
    """Sizes that are known when a program is traced."""

    devices: int  # n, along `expert`
    experts: int  # of each device
    per_pair: int  # C
    others: tuple[str, ...] = ()  # mesh axes along which the number of rounds is made the same


def ways(
    devices: int, num_experts: int, assignments: int, buffer: float, others: tuple[str, ...]
) -> Ways:
    """The sizes for A assignments of each device and a `buffer` as `ExpertsConfig.buffer`."""
    per_pair = assignments
    if devices > 1:
        per_pair = min(assignments, math.ceil(buffer * assignments / devices))
    return Ways(devices, num_experts // devices, per_pair, others)


def even_rounds(to: Ways, assignments: int) -> int:
    """Rounds in which rows travel where loads are equal."""
    return max(-(-assignments // (to.devices * to.per_pair)), 1)


class Journey(NamedTuple):
    """Which assignment goes where; n E experts there are in all, and n E is that of no expert."""

    token_of: Int[Array, " A"]  # of the assignments in the order of their experts
    device_Nk: Int[Array, "N k"]  # n = of no expert
    place_Nk: Int[Array, "N k"]  # among those that go to this device
    first_n: Int[Array, " n"]  # of those that go to a device, in the order of experts
    counts_n: Int[Array, " n"]
    arriving_nE: Int[Array, "n E"]  # how many come from each device, by expert of this one
    rounds: Int[Array, ""]


def plan(experts_Nk: Int[Array, "N k"], to: Ways) -> Journey:
    """Where rows go. Communicates counts over `expert`, and one number over `to.others`."""
    N, k = experts_Nk.shape
    experts_A = experts_Nk.reshape(-1)
    num_experts = to.devices * to.experts
    order, place_A, counts = grouped.by_expert(experts_A, num_experts)
    counts_nE = counts.reshape(to.devices, to.experts)
    first_nE = jnp.cumsum(counts_nE, axis=1) - counts_nE  # of an expert, among its device's
    place_A = place_A + first_nE.reshape(-1)[jnp.minimum(experts_A, num_experts - 1)]
    counts_n = counts_nE.sum(axis=1)
    first_n = jnp.cumsum(counts_n) - counts_n
    device_A = experts_A // to.experts
    rounds, arriving_nE = jnp.ones((), jnp.int32), counts_nE
    if to.devices > 1:
        arriving_nE = jax.lax.all_to_all(counts_nE, AXIS, 0, 0)
        rounds = -(-counts_n.max() // to.per_pair)
        rounds = jax.lax.pmax(rounds, (AXIS, *to.others))
    in_shape = lambda array: array.reshape(N, k)  # noqa: E731
    return Journey(
        order // k, in_shape(device_A), in_shape(place_A), first_n, counts_n, arriving_nE, rounds
    )


class Round(NamedTuple):
    """One round of a journey."""

    token_nC: Int[Array, "n C"]  # which token is sent; N = none
    slot_Nk: Int[Array, "N k"]  # of an assignment among n C; n C = it is not in this round
    blocks: Blocks  # of the rows that arrive


def round_of(journey: Journey, number: Int[Array, ""], to: Ways) -> Round:
    """The rows of a round."""
    (N, _), C = journey.device_Nk.shape, to.per_pair
    place_nC = number * C + jnp.arange(C)[None]
    at_nC = journey.first_n[:, None] + place_nC
    token_nC = journey.token_of[jnp.minimum(at_nC, journey.token_of.shape[0] - 1)]
    token_nC = jnp.where(place_nC < journey.counts_n[:, None], token_nC, N)
    ends_nE = jnp.cumsum(journey.arriving_nE, axis=1)
    # What arrives from a device is in the order of experts: it has passed the end of those before.
    expert_nC = jnp.sum(place_nC[..., None] >= ends_nE[:, None, :], axis=-1)
    low = number * C
    now_Nk = (journey.place_Nk >= low) & (journey.place_Nk < low + C)
    now_Nk &= journey.device_Nk < to.devices
    slot_Nk = jnp.where(now_Nk, journey.device_Nk * C + journey.place_Nk - low, to.devices * C)
    return Round(token_nC, slot_Nk, grouped.blocks(expert_nC.reshape(-1), to.experts))


def sent(rows_N: Array, this: Round, to: Ways) -> Array:
    """Rows of tokens, [N, ...], in the blocks of their experts' devices, [R, ...].

    Communicates over `expert`: an all-to-all.
    """
    if to.devices == 1:
        # Rows are where they should be: one permutation.
        at_R = _taken(this.token_nC.reshape(-1), this.blocks.row_of_slot_R, rows_N.shape[0])
        return _taken(rows_N, at_R)
    return arranged(exchanged(_taken(rows_N, this.token_nC), to), this)


def arranged(rows_nC: Array, this: Round) -> Array:
    """What arrived, [n, C, ...], in blocks [R, ...]."""
    flat = rows_nC.reshape(-1, *rows_nC.shape[2:])
    return _taken(flat, this.blocks.row_of_slot_R)


def returned(rows_R: Array, this: Round, to: Ways) -> Array:
    """Rows in blocks, [R, ...], by assignment, [N, k, ...]: zeros of those not in this round.

    Communicates over `expert`: an all-to-all.
    """
    if to.devices == 1:
        at_Nk = _taken(this.blocks.slot_of_row, this.slot_Nk, rows_R.shape[0])
        return _taken(rows_R, at_Nk)
    rows = _taken(rows_R, this.blocks.slot_of_row)
    rows_nC = exchanged(rows.reshape(to.devices, to.per_pair, *rows.shape[1:]), to)
    return _taken(rows_nC.reshape(rows.shape), this.slot_Nk)


def exchanged(rows_nC: Array, to: Ways) -> Array:
    """What this device has for each other, [n, C, ...], for what each other has for it."""
    if to.devices == 1:
        return rows_nC
    with jax.named_scope("experts"):  # in profiles and reports
        return jax.lax.all_to_all(rows_nC, AXIS, 0, 0)


def _taken(rows: Array, at: Array, fill: int = 0) -> Array:
    """Rows by their numbers; `fill` where there is no such row."""
    return rows.at[at].get(mode="fill", fill_value=fill)
