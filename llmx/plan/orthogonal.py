"""What Muon sends, holds and computes, where it orthogonalises matrices (`llmx.step.muon`).

Devices exchange their shares of a stack of layers for whole matrices of some layers, and back, one
stack after the other. Where the update goes layer by layer, each layer is gathered on all devices.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from llmx.config import recipe
from llmx.config.state_memory import Leaf
from llmx.plan.sizes import Sizes
from llmx.runtime import hardware
from llmx.sharding import split_axes
from llmx.step import muon

FP32 = 4
EXPERTS = "experts"  # the logical axis
# Of a stack at the peak of an update that was compiled (Gemma-3 1B, ddp, h100:8): momentum, and it
# in another layout; X before and after an iteration; the new value.
ARRAYS = 5


class Stack(NamedTuple):
    """Equal matrices of a parameter, one of each layer or of each of its experts."""

    leaf: Leaf
    rows: int
    columns: int
    layers: int  # of a device's stage
    experts: int  # of a device, each with a matrix in each layer; 1 = there are none
    splits: tuple[tuple[str, ...], ...]  # the mesh axes that split a dimension of a matrix
    ways: int  # parts of a matrix
    by_layer: bool  # the update goes through the layers one after the other

    @property
    def is_gathered(self) -> bool:
        """Layer by layer, on all devices that split a matrix."""
        return self.ways > 1 and (self.by_layer or self.layers == 1)

    @property
    def is_exchanged(self) -> bool:
        return self.ways > 1 and not self.is_gathered

    @property
    def matrices(self) -> int:
        """That a device orthogonalises."""
        layers = -(-self.layers // self.ways) if self.is_exchanged else self.layers
        return layers * self.experts

    @property
    def at_a_time(self) -> int:
        """Of these."""
        return self.experts if self.by_layer else self.matrices


def stacks(sizes: Sizes) -> Iterator[Stack]:
    """Of all parameters that Muon orthogonalises; none with another optimizer."""
    run = sizes.run
    if run.optimizer.name != "muon":
        return
    by_layer = recipe.updates_by_layer(run)
    table = vars(sizes.layout)["optimizer"]
    for leaf in sizes.weights:
        (_, layers, first), *rest = zip(
            leaf.axes, leaf.shape, split_axes(leaf.axes, table, sizes.mesh, leaf.shape), strict=True
        )
        layers //= sizes.size(first)
        experts = math.prod(num // sizes.size(axes) for name, num, axes in rest if name == EXPERTS)
        of_matrix = [(num, axes) for name, num, axes in rest if name != EXPERTS]
        width = leaf.shape[leaf.axes.index("embed")]
        columns = math.prod(num for num, _ in of_matrix) // width
        splits = tuple(axes for _, axes in of_matrix if axes)
        ways = math.prod(map(sizes.size, splits))
        yield Stack(leaf, width, columns, layers, experts, splits, ways, by_layer)


def messages(sizes: Sizes) -> Iterator[tuple[str, tuple[str, ...], float, int, str]]:
    """(kind, mesh axes, bytes as `traffic.Message` has them, count, parameter) of a step."""
    for one in stacks(sizes):
        if one.is_gathered:
            num_bytes = FP32 * one.experts * one.rows * one.columns / one.ways
            for axes in one.splits:
                num_bytes *= sizes.size(axes)
                yield "all-gather", axes, num_bytes, one.layers, one.leaf.name
        elif one.is_exchanged:
            share = FP32 * one.matrices * one.rows * one.columns  # with zeros that fill up
            for axes in one.splits:
                yield "all-to-all", axes, share, 2, one.leaf.name


def dtype(chip: hardware.Chip) -> str:
    """Of fp32 factors, as XLA takes them unless told otherwise: an update is outside of
    `Policy.products`, whatever `precision` says."""
    if chip.topology.startswith("torus"):
        return "bfloat16"
    return "tf32" if "tf32" in chip.flops else "float32"


def products(stack: Stack) -> Iterator[tuple[tuple[int, int, int], int]]:
    """(M, N, K) of the products of a step, and how often a device makes them."""
    less, more = sorted((stack.rows, stack.columns))
    times = muon.ITERATIONS * stack.matrices
    yield (less, less, more), times  # X X^T
    yield (less, less, less), times  # its square
    yield (less, more, less), times  # and what X is multiplied with


def held(sizes: Sizes) -> float:
    """Bytes at a time: of the largest stack."""
    return ARRAYS * max(
        (FP32 * one.rows * one.columns * one.at_a_time for one in stacks(sizes)), default=0.0
    )
