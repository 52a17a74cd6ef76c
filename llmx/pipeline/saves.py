"""What a stage keeps of a microbatch from the forward to the backward operation of a model chunk.

Two ways, each a `Saves`. `input_only` ("part" in the config's `remat`): the chunk's input, from
which the backward operation runs the whole chunk again. `residuals`: what jax saves for the
derivative of the chunk, which the other policies of `remat` name. A chunk's arguments (weights,
tokens of the microbatch) are there in the backward operation too and are not kept.

Letters: B batch, T positions, D width.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

# What a chunk may keep beside what is stated: the rows of its layers, int32.
MOST_BESIDE = 0.01


class Saves(NamedTuple):
    """A way to differentiate a chunk in two operations.

    `arguments` is what a chunk computes with beside its input x [B, T, D].
    """

    types: tuple[Any, ...]  # of what is kept of one chunk and microbatch
    forward: Callable  # (x, arguments) -> (y, what is kept)
    backward: Callable  # (what is kept, arguments, gradient of y) -> the pull's result


def input_only(differentiated: Callable, apply: Callable, x_type: jax.ShapeDtypeStruct) -> Saves:
    """Keeps a chunk's input. `apply`: (x, arguments) -> y; `differentiated`: see `residuals`."""

    def backward(kept, arguments, gradient):
        (x_BTD,) = kept
        return differentiated(x_BTD, arguments)[1](gradient)

    return Saves((x_type,), lambda x_BTD, arguments: (apply(x_BTD, arguments), (x_BTD,)), backward)


def residuals(differentiated: Callable, arguments: Callable, x_type: jax.ShapeDtypeStruct) -> Saves:
    """Keeps what the derivative of a chunk needs and is no argument.

    Args:
      differentiated: (x, arguments) -> (y, pull), as `jax.vjp` returns them.
      arguments: () -> the arguments of any chunk and microbatch, for their types.
      x_type: of a chunk's input.
    """
    structures = []

    def trace(x_BTD, arguments):
        y_BTD, pull = differentiated(x_BTD, arguments)
        values, structure = jax.tree.flatten(pull)
        structures.append(structure)
        return y_BTD, *values

    types = jax.eval_shape(arguments)
    program = jax.make_jaxpr(trace)(x_type, types)
    (structure,), run = structures, core.jaxpr_as_fun(program)
    # Arguments that the traced program returns as they came.
    number_of = {variable: number for number, variable in enumerate(program.jaxpr.invars[1:])}
    argument_of = [
        None if isinstance(value, core.Literal) else number_of.get(value)
        for value in program.jaxpr.outvars[1:]
    ]

    def not_arguments(values):
        pairs = zip(values, argument_of, strict=True)
        return tuple(value for value, number in pairs if number is None)

    def forward(x_BTD, arguments):
        y_BTD, *values = run(x_BTD, *jax.tree.leaves(arguments))
        return y_BTD, not_arguments(values)

    def backward(kept, arguments, gradient):
        given, kept = jax.tree.leaves(arguments), iter(kept)
        values = [next(kept) if number is None else given[number] for number in argument_of]
        return jax.tree.unflatten(structure, values)(gradient)

    types_kept = not_arguments([value.aval for value in program.jaxpr.outvars[1:]])
    return Saves(types_kept, forward, backward)


def check(saves: Saves, stated: float, remat: str, side_inputs: Any) -> None:
    """Raises RuntimeError where more is kept than `remat` states: `stated` bytes of a microbatch.

    `llmx.plan` counts with the same number. `side_inputs`: types of the masks and rotations of a
    microbatch, which a chunk may keep in the order of its groups.
    """
    kept = sum(map(_bytes, saves.types))
    if kept > (1 + MOST_BESIDE) * stated + sum(map(_bytes, jax.tree.leaves(side_inputs))):
        by_size = sorted(saves.types, key=_bytes, reverse=True)
        largest = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in by_size[:3])
        raise RuntimeError(
            f"a stage of this pipeline would keep {kept:,} bytes of each microbatch and chunk, and "
            f"remat={remat!r} states {int(stated):,}; the largest are {largest}. Use "
            "remat='part', which keeps the chunk's input alone, and please report this"
        )


def _bytes(leaf: Any) -> int:
    return int(np.prod(leaf.shape)) * leaf.dtype.itemsize
