"""What the arrays of a run measure on one device: memory, bytes sent and times start from here."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

from llmx import sharding
from llmx.config import Config, recipe, utilization
from llmx.config.axes import layout_of
from llmx.config.state_memory import FP32, Held, Leaf, head_of, leaves
from llmx.model import costs, remat_costs
from llmx.model.precision import Policy
from llmx.sharding.layouts import Layout
from llmx.sharding.mesh import TOKEN_AXES


@dataclasses.dataclass(frozen=True, eq=False)
class Sizes:
    """Of a resolved run."""

    run: Config
    mesh: dict[str, int]  # all axes of `sharding.AXES`
    layout: Layout
    policy: Policy

    @functools.cached_property
    def tokens(self) -> float:
        """Tokens of a microbatch on a device, inside attention and MLP."""
        return utilization.tokens_of(self.run) / self.mesh["sequence"]

    @functools.cached_property
    def tokens_between(self) -> float:
        """The same between blocks, where positions may be split over `tensor` too."""
        ways = self.mesh["tensor"] if self.run.sharding.sequence_parallel else 1
        return self.tokens / ways

    @property
    def rings(self) -> int:
        """Devices of attention's ring over `sequence`; 1 = there is none, and without the axis
        `attention.ulysses` splits nothing."""
        sequence = self.mesh["sequence"]
        return sequence // math.gcd(sequence, self.run.attention.ulysses)

    @property
    def splits_positions(self) -> bool:
        """Whether the devices along `tensor` have other positions between blocks."""
        return self.run.sharding.sequence_parallel and self.mesh["tensor"] > 1

    @property
    def several(self) -> bool:
        """Whether a step has several microbatches."""
        return self.run.batch.accumulation > 1

    @property
    def saves_all(self) -> bool:
        """Whether layers save everything: `remat="none"`."""
        return remat_costs.saves_all(self.run.model, self.run.remat)

    @property
    def saves_products(self) -> bool:
        """Whether layers save all products with weights, and not everything: `remat="dots"`."""
        return remat_costs.saves_all_products(self.run.model, self.run.remat)

    @property
    def compute_bytes(self) -> int:
        return self.policy.compute.itemsize

    def gathered_bytes(self, leaf: Leaf) -> int:
        """Of a number of a split weight, while it is gathered."""
        if "router" in leaf.axes:  # multiplied in the dtype that it has
            return self.param_bytes
        numbers = self.policy.numbers
        if not leaf.of_layers:
            numbers = numbers.of_head
        return numbers.weight.dtype.itemsize if numbers.gathers_codes else self.compute_bytes

    @property
    def reduce_bytes(self) -> int:
        return self.policy.reduce.itemsize

    def summed_bytes(self, leaf: Leaf) -> int:
        """Of a number of a split weight's gradient, while it is summed over devices. A router's
        leaves its product in fp32, and is rounded before the sum, but where the weight is split."""
        in_fp32 = "router" in leaf.axes and self.axes_of("embed", "parameters")
        return FP32 if in_fp32 else self.reduce_bytes

    @property
    def param_bytes(self) -> int:
        """Of a number of a matrix's master copy."""
        return self.policy.param.itemsize

    def size(self, axes: Sequence[str]) -> int:
        """Devices along these mesh axes together."""
        return math.prod(self.mesh[axis] for axis in axes)

    @functools.cached_property
    def _known(self) -> dict[tuple, Any]:
        """What was asked before: a search asks for much of it many times."""
        return {}

    def axes_of(self, name: str, table: str) -> tuple[str, ...]:
        """The mesh axes, larger than 1, that split a logical axis in a table of the layout."""
        if (name, table) not in self._known:
            over = vars(self.layout)[table][name]
            self._known[name, table] = tuple(axis for axis in over if self.mesh[axis] > 1)
        return self._known[name, table]

    def splitting(self, leaf: Leaf, table: str) -> tuple[str, ...]:
        """The mesh axes that are to split the width, and do split this parameter: the width, or
        another dimension where that does not divide."""
        key = "splitting", leaf.name, table
        if key not in self._known:
            over = vars(self.layout)[table]
            found = itertools.chain(*sharding.split_axes(leaf.axes, over, self.mesh, leaf.shape))
            over = [axis for axis in self.axes_of("embed", table) if axis in found]
            self._known[key] = tuple(over)
        return self._known[key]

    @functools.cached_property
    def padding(self) -> float:
        """By how much the blocks of all stages grow where chunks of a pipeline are not equally
        long: the shorter ones have empty slots."""
        return Held(self.run).slots / self.run.model.num_blocks

    def local(self, leaf: Leaf, table: str, *, whole: Sequence[str] = ()) -> float:
        """Numbers of a parameter on a device, without splitting the logical axes `whole`; of blocks
        with the empty slots of stages."""
        key = leaf.name, table, whole
        if key not in self._known:
            split = (self.axes_of(name, table) for name in leaf.axes if name not in (None, *whole))
            numbers = leaf.numbers * (self.padding if leaf.in_blocks else 1.0)
            self._known[key] = numbers / math.prod(map(self.size, split))
        return self._known[key]

    @property
    def layers(self) -> float:
        """Layers of a device, with its empty slots."""
        return self.run.model.num_layers * self.padding / self.mesh["stage"]

    def layers_of(self, leaf: Leaf) -> float:
        """Layers of which a device has numbers of this parameter."""
        if not leaf.in_blocks:
            return leaf.shape[0]
        return leaf.shape[0] * self.padding / self.mesh["stage"]

    def whole(self, leaf: Leaf) -> float:
        """Numbers of a parameter on a device that has it gathered, whole along the width."""
        return self.local(leaf, "parameters", whole=("embed",))

    @functools.cached_property
    def head(self) -> Leaf:
        """What the last hidden state is multiplied with."""
        return head_of(self.run.model)

    @functools.cached_property
    def weights(self) -> tuple[Leaf, ...]:
        """The layers' matrices."""
        return tuple(leaf for leaf in leaves(self.run.model) if leaf.of_layers and leaf.is_matrix)

    @functools.cached_property
    def stacks(self) -> tuple["Sizes", ...]:
        """Of each stack of equal layers (`costs.stacks`) as a model of its own; the blocks are the
        last."""
        models = costs.stacks(self.run.model)
        if len(models) == 1:
            return (self,)
        of = lambda model: dataclasses.replace(self.run, model=model)  # noqa: E731
        return tuple(dataclasses.replace(self, run=of(model)) for model in models)

    @functools.cached_property
    def token_axes(self) -> tuple[str, ...]:
        """The mesh axes, larger than 1, along which tokens differ."""
        return tuple(axis for axis in TOKEN_AXES if self.mesh[axis] > 1)


def of(run: Config) -> Sizes:
    """Of a resolved config."""
    mesh = {axis: vars(run.mesh)[axis] for axis in sharding.AXES}
    return Sizes(run, mesh, layout_of(run), recipe.policy_of(run))
