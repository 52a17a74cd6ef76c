"""What a stage keeps of a microbatch from the forward to the backward operation of a model chunk.

Two ways, each a `Saves`. `input_only` ("part" in the config's `remat`): the chunk's input, from
which the backward operation runs the whole chunk again. `residuals`: what jax saves for the
derivative of the chunk, which the other policies of `remat` name. A chunk's arguments (weights,
tokens of the microbatch) are there in the backward operation too, and nothing is kept that depends
on them alone.

Letters: B batch, T positions, D width.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core
from jax.interpreters import partial_eval

from llmx import sharding


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
    """Keeps what the derivative of a chunk needs and depends on the chunk's input.

    What depends on the arguments alone (weights, or rows of them, rotations) is made again.

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

    program = jax.make_jaxpr(trace)(x_type, jax.eval_shape(arguments))
    (structure,), run = structures, core.jaxpr_as_fun(program)
    is_kept, remake = _apart(program)
    types = [value.aval for value in program.jaxpr.outvars[1:]]

    def forward(x_BTD, arguments):
        y_BTD, *values = run(x_BTD, *jax.tree.leaves(arguments))
        return y_BTD, tuple(itertools.compress(values, is_kept))

    def backward(kept, arguments, gradient):
        kept, made = iter(kept), iter(remake(*jax.tree.leaves(arguments)))
        values = [next(kept if its_kept else made) for its_kept in is_kept]
        return jax.tree.unflatten(structure, values)(gradient)

    return Saves(tuple(itertools.compress(types, is_kept)), forward, backward)


def _apart(program: core.ClosedJaxpr) -> tuple[list[bool], Callable]:
    """Of the results of a program but the first: whether each depends on the first argument, and a
    function of the other arguments that returns those which do not."""
    jaxpr, numbers = program.jaxpr, range(1, len(program.jaxpr.outvars))

    def only(wanted) -> tuple[core.Jaxpr, list[bool]]:
        """What of the program makes these results, and which arguments it takes."""
        return partial_eval.dce_jaxpr(jaxpr, [False, *map(wanted, numbers)])

    is_kept = [only(number.__eq__)[1][0] for number in numbers]
    rest, taken = only(lambda number: not is_kept[number - 1])
    run = core.jaxpr_as_fun(core.ClosedJaxpr(rest, program.consts))
    return is_kept, lambda *others: run(*itertools.compress(others, taken[1:]))


def check(saves: Saves, stated: float, remat: str) -> None:
    """Raises RuntimeError where more is kept than `remat` states: `stated` bytes of a microbatch.

    `llmx.plan` counts with the same number.
    """
    kept = sum(map(_bytes, saves.types))
    if kept > stated:
        by_size = sorted(saves.types, key=_bytes, reverse=True)
        largest = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in by_size[:3])
        raise RuntimeError(
            f"a stage of this pipeline would keep {kept:,} bytes of each microbatch and chunk, and "
            f"remat={remat!r} states {int(stated):,}; the largest are {largest}. Use "
            "remat='part', which keeps the chunk's input alone, and please report this"
        )


def _bytes(leaf: Any) -> int:
    """Of one stage: what manual regions leave is split over all axes, and whole over `stage`."""
    to, size = leaf.sharding, int(np.prod(leaf.shape)) * leaf.dtype.itemsize
    return size // (to.mesh.shape["stage"] if "stage" in sharding.used_axes(to.spec) else 1)
