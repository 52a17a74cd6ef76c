"""A mesh and a layout together: what model code needs to name logical axes only."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from llmx.sharding import grad_buffers, layouts, local_view, specs
from llmx.sharding.layouts import Layout
from llmx.sharding.mesh import TOKEN_AXES


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """A mesh and a layout together: what code needs to name logical axes only."""

    mesh: Mesh
    layout: Layout
    # Mesh axes along which arrays differ although their types call them whole: see `to_local`.
    local_axes: tuple[str, ...] = ()

    def activation(self, axes: Sequence[str | None], shape: Sequence[int] | None = None):
        """PartitionSpec of an activation with these logical axes."""
        return layouts.spec(axes, self.layout.activations, self.mesh, shape=shape)

    def constrain(
        self,
        array: jax.Array,
        axes: Sequence[str | None],
        *,
        multiplied_into: Sequence[str] = (),
    ) -> jax.Array:
        """`array` placed as an activation with these logical axes; communicates if it must.

        Where products turn it into axes `multiplied_into`, each device along their mesh axes has
        one term of its gradient: these are added up once, here, and not after every product.
        """
        to = self.activation(axes, array.shape)
        if summed := [a for a in self._mesh_axes(multiplied_into) if a not in specs.used_axes(to)]:
            to = specs.reduced(to, summed)
        return specs.constrain(array, self.mesh, to)

    def manual(self, function: Callable, *, in_specs: Any, out_specs: Any) -> Callable:
        """`function` of one device's parts: `jax.shard_map`, differentiable under `local_axes`.

        The gradient of what `in_specs` calls whole along an axis is a sum over it; along hidden
        axes it is not.
        """
        apply = functools.partial(jax.shard_map, mesh=self.mesh, check_vma=False)
        if not self.local_axes:
            return apply(function, in_specs=in_specs, out_specs=out_specs)
        shown = functools.partial(
            jax.tree.map, functools.partial(local_view.shown, self.local_axes)
        )

        def local(*arrays):
            out = function(*jax.tree.map(lambda array: array[0], arrays))
            return jax.tree.map(lambda array: array[None], out)

        region = apply(local, in_specs=shown(in_specs), out_specs=shown(out_specs))

        def revealed(*arrays):
            out = region(
                *jax.tree.map(
                    lambda a: local_view.from_local(self.mesh, self.local_axes, a[None]), arrays
                )
            )
            return jax.tree.map(
                lambda a: local_view.to_local(self.mesh, self.local_axes, a)[0], out
            )

        return revealed

    def _mesh_axes(self, axes: Sequence[str]) -> list[str]:
        table, sizes = self.layout.activations, self.mesh.shape
        return [over for axis in axes for over in table[axis] if sizes.get(over, 1) > 1]

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
        """A parameter whose gradient is left as terms of a sum over the devices that see different
        tokens."""
        return grad_buffers.with_unreduced_grad(self.token_axes, array)

    def per_replica(self, axes: tuple[str, ...]) -> "Placement":
        """Of one of the replicas along `axes`, which knows of no other: arrays have types as on a
        mesh without these axes, and what communicates does so within the replica."""
        layout = self.layout.without(axes, "parameters", "gradients", "optimizer", "activations")
        return dataclasses.replace(self, layout=layout, local_axes=(*self.local_axes, *axes))

    def size(self, axes: Sequence[str]) -> int:
        """The number of devices along these mesh axes together."""
        return math.prod(self.mesh.shape[axis] for axis in axes)
