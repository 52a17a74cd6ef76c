"""Which dimensions of a parameter count arrays of their own, and which are an array's rows and
columns, by logical axes.

Layers are stacked in one array, and so are a layer's experts. What an optimizer does to a matrix,
or to a tensor, it does to each layer's and each expert's, as if they were apart. Heads and their
size are one side of a matrix, as in the products of other libraries.
"""

from collections.abc import Sequence

LAYERS = ("layers", "first")  # all, or the dense first ones and the others
STACKED = (*LAYERS, "experts")


def num_stacked(axes: Sequence[str | None]) -> int:
    """How many dimensions, from the first on, count layers and experts."""
    return next((dim for dim, name in enumerate(axes) if name not in STACKED), len(axes))


def sides(axes: Sequence[str | None]) -> tuple[tuple[int, ...], ...]:
    """The dimensions of each side of an array of its own: ((1,), (2, 3)) of ("layers", "embed",
    "heads", "head_dim"). A matrix has two, a vector one; all dimensions that have no name for it
    are the other side of the width."""
    found: list[tuple[int, ...]] = []
    for dim, name in enumerate(axes):
        joined = name == "head_dim" or (name == "groups" and axes[dim - 1] == name)
        if joined and found:
            found[-1] += (dim,)
        elif name not in STACKED:
            found.append((dim,))
    if len(found) > 2 and "embed" in (axes[found[0][0]], axes[found[-1][0]]):
        cut = 1 if axes[found[0][0]] == "embed" else len(found) - 1
        found = [sum(part, ()) for part in (found[:cut], found[cut:])]
    return tuple(found)
