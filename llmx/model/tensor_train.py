"""A table of the vocabulary as a train of tensors (arXiv 1901.10787): shapes, pure data, no jax.

With V <= v1 v2 v3 and D = d1 d2 d3, row (i1, i2, i3) of the table has at column (j1, j2, j3)

    sum over r, s of  core1[1, i1, j1, r] core2[r, i2, j2, s] core3[s, i3, j3, 1]

so that rank (v1 d1 + rank v2 d2 + v3 d3) numbers stand in the place of V D. Digits count from the
first core on; rows behind the vocabulary are never looked up.

Letters: V vocabulary, D width.
"""

import math
from typing import Any

AXES = ("rank",) * 4  # logical axes of a core [rank, v, d, rank]: it is whole on every device


def shapes(model: Any) -> dict[str, tuple[int, int, int, int]]:
    """Of each core, by name; {} where the model has a table."""
    if not model.embedding_rank:
        return {}
    number, rank = model.embedding_cores, model.embedding_rank
    rows, columns = digits(model.padded_vocab, number), divisors(model.width, number)
    ranks = [1, *[rank] * (number - 1), 1]
    return {
        f"core{at + 1}": (ranks[at], rows[at], columns[at], ranks[at + 1]) for at in range(number)
    }


def digits(size: int, number: int) -> tuple[int, ...]:
    """So many sizes, nearly equal, whose product is at least `size` and little above."""
    found = []
    for left in range(number, 0, -1):
        each = max(math.ceil(round(size ** (1 / left), 9)), 1)
        found.append(each)
        size = -(-size // each)
    return tuple(found)


def divisors(size: int, number: int) -> tuple[int, ...]:
    """So many sizes whose product is `size`, as nearly equal as there are."""
    found = []
    for left in range(number, 1, -1):
        root = size ** (1 / left)
        exact = (one for one in range(1, size + 1) if size % one == 0)
        each = min(exact, key=lambda one: abs(math.log(one / root)))
        found.append(each)
        size //= each
    return (*found, size)


def num_parameters(model: Any) -> int:
    """Of all cores; 0 where the model has a table."""
    return sum(map(math.prod, shapes(model).values()))


def problems(model: Any) -> list[str]:
    """All that is wrong with the train of a model, each with its remedy."""
    if not model.embedding_rank:
        return []
    found = []
    if model.tied_head:
        found.append(
            f"model.embedding_rank={model.embedding_rank} with model.tied_head=True: the head "
            "would be the whole table, made anew in every step; use tied_head=False, or "
            "embedding_rank=0"
        )
    if model.vocab_size and (most := _largest_rank(model)) < model.embedding_rank:
        found.append(
            f"model.embedding_rank={model.embedding_rank} is above {most}, with which "
            f"{model.embedding_cores} tensors hold any table of {model.padded_vocab} x "
            f"{model.width}: use at most {most}"
        )
    return found


def _largest_rank(model: Any) -> int:
    number = model.embedding_cores
    rows, columns = digits(model.padded_vocab, number), divisors(model.width, number)
    sizes = [v * d for v, d in zip(rows, columns, strict=True)]
    return max(min(math.prod(sizes[:cut]), math.prod(sizes[cut:])) for cut in range(1, number))
