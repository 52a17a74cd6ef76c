"""What Muon sends, holds and computes, where it orthogonalises matrices (`llmx.step.muon`).

Devices exchange their shares of a stack of layers for whole matrices of some layers, and back, one
stack after the other. Where the update goes layer by layer, each layer is gathered on all devices.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from llmx.config.state_memory import Leaf
from llmx.plan.sizes import Sizes
from llmx.runtime import hardware
from llmx.sharding import split_axes
from llmx.step import muon

FP32 = 4


class Stack(NamedTuple):
    """Equal matrices, one of each layer, of a parameter."""

    leaf: Leaf
    rows: int
    columns: int
    layers: int  # of a device's stage
    splits: tuple[tuple[str, ...], ...]  # the mesh axes that split a dimension of a matrix
    ways: int  # parts of a matrix
    one_by_one: bool  # gathered layer by layer

    @property
    def matrices(self) -> int:
        """That a device orthogonalises."""
        return self.layers if self.one_by_one else -(-self.layers // self.ways)

    @property
    def share(self) -> float:
        """Bytes of a device's share, with the zeros that are exchanged."""
        whole = self.layers if self.one_by_one else self.matrices * self.ways
        return FP32 * whole * self.rows * self.columns / self.ways


def stacks(sizes: Sizes) -> Iterator[Stack]:
    """Of all parameters that Muon orthogonalises; none with another optimizer."""
    run = sizes.run
    if run.optimizer.name != "muon":
        return
    by_layer = run.offload.optimizer or run.offload.parameters or run.optimizer.moments == "int8"
    table = vars(sizes.layout)["optimizer"]
    for leaf in sizes.weights:
        first, *rest = split_axes(leaf.axes, table, sizes.mesh, leaf.shape)
        layers = leaf.shape[0] // sizes.size(first)
        width = leaf.shape[leaf.axes.index("embed")]
        columns = leaf.numbers // leaf.shape[0] // width
        splits = tuple(axes for axes in rest if axes)
        ways = math.prod(map(sizes.size, splits))
        yield Stack(
            leaf, width, columns, layers, splits, ways, by_layer or layers == 1 or ways == 1
        )


def messages(sizes: Sizes) -> Iterator[tuple[str, tuple[str, ...], float, int, str]]:
    """(kind, mesh axes, bytes as `traffic.Message` has them, count, parameter) of a step."""
    for one in stacks(sizes):
        if one.one_by_one:
            num_bytes = FP32 * one.rows * one.columns / one.ways
            for axes in one.splits:
                num_bytes *= sizes.size(axes)
                yield "all-gather", axes, num_bytes, one.layers, one.leaf.name
        else:
            for axes in one.splits:
                yield "all-to-all", axes, one.share, 2, one.leaf.name


def dtype(chip: hardware.Chip) -> str:
    """Of fp32 factors in products, as XLA takes them unless told otherwise."""
    if chip.topology.startswith("torus"):
        return "bfloat16"
    return "tf32" if "tf32" in chip.flops else "float32"


def products(stack: Stack) -> Iterator[tuple[tuple[int, int, int], int]]:
    """(M, N, K) of the products of a step, and how often a device makes them."""
    less, more = sorted((stack.rows, stack.columns))
    times = muon.STEPS * stack.matrices
    yield (less, less, more), times  # X X^T
    yield (less, less, less), times  # its square
    yield (less, more, less), times  # and what X is multiplied with


def held(sizes: Sizes) -> float:
    """Bytes at a time: the largest stack of whole matrices, and its update."""
    wholes = [
        FP32 * one.rows * one.columns * (1 if one.one_by_one and one.ways > 1 else one.matrices)
        for one in stacks(sizes)
    ]
    return ARRAYS * max(wholes, default=0.0)


ARRAYS = 5  # of a stack: before and after an iteration, its momentum, and what is exchanged
