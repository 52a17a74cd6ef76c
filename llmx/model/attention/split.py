"""Which device of the mesh axis `sequence` holds which positions of a row.

Letters: B batch, T positions, R groups of devices in a ring.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from llmx.sharding import mesh_axes


@dataclasses.dataclass(frozen=True)
class Split:
    """`ways` devices of `sequence` in R = ways / ulysses groups of neighbours.

    A row is cut into chunks: with zigzag 2R, of which group r has chunks r and 2R-1-r, else R,
    group r having chunk r. A group's positions lie on its devices in order.
    """

    ways: int
    ulysses: int = 1
    zigzag: bool = True

    def __post_init__(self):
        if self.ulysses < 1 or self.ways % self.ulysses:
            raise ValueError(
                f"attention.ulysses={self.ulysses} does not divide the {self.ways} devices of the "
                "mesh axis `sequence`: use a divisor"
            )

    @property
    def rings(self) -> int:
        """R, groups in a ring; 1 = no ring."""
        return self.ways // self.ulysses

    @property
    def chunks(self) -> np.ndarray:
        """int[R, chunks of a group]: which chunks each group holds, in its order."""
        group = np.arange(self.rings)[:, None]
        if not self.zigzag or self.rings == 1:
            return group
        return np.concatenate([group, 2 * self.rings - 1 - group], axis=1)

    def order(self, num_positions: int) -> np.ndarray:
        """int[num_positions]: the position at each index; ValueError if chunks do not divide it."""
        num = self.chunks.size
        if num_positions % math.lcm(num, self.ways):
            raise ValueError(
                f"{num_positions} positions do not divide into the {num} chunks that {self.ways} "
                f"devices of `sequence` hold: use a multiple of {math.lcm(num, self.ways)}, or "
                "attention.zigzag=False"
            )
        positions = np.arange(num_positions).reshape(num, -1)
        return positions[self.chunks.reshape(-1)].reshape(-1)


def reorder(array: Array, split: Split, mesh: Mesh, *, back: bool = False) -> Array:
    """`array` [B, T, ...] from the order of its rows to that of `split`, or `back`.

    Its sharding stays. Gathers over the mesh axes that split T: meant for token ids and losses.
    """
    return array if split.chunks.shape[1] == 1 else _reordered(split, mesh, back, array)


# The gradient goes the other way: automatic differentiation would add up those of local replicas.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _reordered(split: Split, mesh: Mesh, back: bool, array: Array) -> Array:
    order = split.order(array.shape[1])
    order = np.argsort(order) if back else order
    to = jax.typeof(array).sharding.spec
    axes = mesh_axes(to[1])

    def local(array):
        if not axes:
            return array[:, order]
        whole = jax.lax.all_gather(array, axes, axis=1, tiled=True)
        mine = jnp.asarray(order.reshape(-1, array.shape[1]))[jax.lax.axis_index(axes)]
        return whole[:, mine]

    return jax.shard_map(local, mesh=mesh, in_specs=to, out_specs=to, check_vma=False)(array)


_reordered.defvjp(
    lambda split, mesh, back, array: (_reordered(split, mesh, back, array), None),
    lambda split, mesh, back, _, gradient: (_reordered(split, mesh, not back, gradient),),
)
