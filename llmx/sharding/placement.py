"""`Placement`: a mesh and a layout together."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from llmx.sharding import grad_buffers, layouts, local_view, scatter, specs
from llmx.sharding.layouts import Layout
from llmx.sharding.mesh import TOKEN_AXES


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _with_terms(before: PartitionSpec, to: PartitionSpec, array: jax.Array) -> jax.Array:
    """`array`, placed as `before`, placed as `to`, along whose `reduced` axes its gradient is a sum
    of terms."""
    return jax.sharding.reshard(array, to)


def _added_up(before: PartitionSpec, to: PartitionSpec, _, terms: jax.Array) -> tuple[jax.Array]:
    done = specs.unreduced(before, before.reduced)
    return (scatter.scattered(terms, done, exchange=False),)


_with_terms.defvjp(lambda *arguments: (_with_terms(*arguments), None), _added_up)


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """A mesh and a layout together: with it, code names logical axes only."""

    mesh: Mesh
    layout: Layout
    # Mesh axes along which arrays differ although their types do not name them: see `to_local`.
    local_axes: tuple[str, ...] = ()

    def activation(
        self, axes: Sequence[str | None], shape: Sequence[int] | None = None
    ) -> PartitionSpec:
        """PartitionSpec of an activation with these logical axes; errors are those of `spec`."""
        return layouts.spec(axes, self.layout.activations, self.mesh, shape=shape)

    def constrain(
        self, array: jax.Array, axes: Sequence[str | None], *, multiplied_into: Sequence[str] = ()
    ) -> jax.Array:
        """`array` placed as an activation with these logical axes.

        Communicates over the mesh axes that split it otherwise. Where products turn it into axes
        `multiplied_into`, devices have terms of its gradient: these are added up once, here.
        """
        to = self.activation(axes, array.shape)
        table = self.layout.activations
        over = [a for name in multiplied_into for a in table[name] if self.mesh.shape.get(a, 1) > 1]
        if summed := [axis for axis in over if axis not in specs.used_axes(to)]:
            before = jax.typeof(array).sharding.spec
            return _with_terms(before, specs.reduced(to, summed), array)
        return specs.constrain(array, self.mesh, to)

    def manual(self, function: Callable, *, in_specs: Any, out_specs: Any) -> Callable:
        """`jax.shard_map` of `function`, also differentiable under `local_axes`.

        The gradient of an input is a sum over the axes along which it is whole, local ones apart.
        """
        return local_view.manual(
            self.mesh, self.local_axes, function, in_specs=in_specs, out_specs=out_specs
        )

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The mesh axes along which tokens differ: weight gradients are sums over them."""
        sizes = self.mesh.shape
        return tuple(a for a in TOKEN_AXES if sizes.get(a, 1) > 1 and a not in self.local_axes)

    def with_grad_buffers(self, params: Any, buffers: Any) -> Any:
        """Each parameter, its gradient accumulated into its buffer: see `accumulate_into`."""
        accumulate = functools.partial(grad_buffers.accumulate_into, self.token_axes)
        return jax.tree.map(accumulate, params, buffers)

    def with_unreduced_grad(self, array: jax.Array) -> jax.Array:
        """A parameter whose gradient stays a sum of terms, one on each device of `token_axes`."""
        return grad_buffers.with_unreduced_grad(self.token_axes, array)

    def per_replica(self, axes: tuple[str, ...]) -> "Placement":
        """The placement of one replica along `axes`: types and communication without these."""
        layout = self.layout.without(axes, "parameters", "gradients", "optimizer", "activations")
        return dataclasses.replace(self, layout=layout, local_axes=(*self.local_axes, *axes))

    def size(self, axes: Sequence[str]) -> int:
        """The number of devices along these mesh axes together."""
        return math.prod(self.mesh.shape[axis] for axis in axes)
