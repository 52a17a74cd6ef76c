"""The one matrix product of the model: cast, gather, contract; each gradient goes where it belongs.

Under ZeRO-3 a weight is split over replicas, gathered for the product, and its gradient
reduce-scattered. Written as a custom gradient the communication is exact in every remat policy: the
gathered weight is never kept for the backward pass but gathered again, and the weight gradient is
born with the sharding of the weight itself, summed in the reduce dtype.

Mesh axes: gathers and reduce-scatters over those of `BATCH_AXES` that split the weight; sums over
the mesh axes that split the contracted dimensions (`tensor` in the output projections); sums weight
gradients over the axes that split the batch.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from llmx import precision, sharding


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Where each array of one product lives: static data of the custom gradient."""

    expression: str
    x: PartitionSpec
    weight: PartitionSpec
    gathered: PartitionSpec
    out: PartitionSpec
    reduce: jnp.dtype


def dot(
    expression: str,
    x: jax.Array,
    weight: jax.Array,
    *,
    out: PartitionSpec,
    policy: precision.Policy,
) -> jax.Array:
    """`einsum(expression, x, weight)` in the compute dtype, placed as `out`.

    Args:
      expression: an einsum over x and weight, e.g. "BTD,DNH->BTNH"; no letter may be summed within
        one operand.
      x: activations, in the compute dtype.
      weight: a master parameter in any layout.
      out: PartitionSpec of the result.
      policy: the dtypes.

    Returns the product in the compute dtype.
    """
    weight_spec = jax.typeof(weight).sharding.spec
    plan = _Plan(
        expression=expression,
        x=jax.typeof(x).sharding.spec,
        weight=weight_spec,
        gathered=sharding.without(weight_spec, sharding.BATCH_AXES),
        out=out,
        reduce=policy.reduce,
    )
    return _dot(plan, x, weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(plan: _Plan, x: jax.Array, weight: jax.Array) -> jax.Array:
    return _product(plan, x, weight)


def _product(plan: _Plan, x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.einsum(plan.expression, x, _gathered(plan, x, weight), out_sharding=plan.out)


def _gathered(plan: _Plan, x: jax.Array, weight: jax.Array) -> jax.Array:
    return jax.sharding.reshard(weight.astype(x.dtype), plan.gathered)


def _dot_forward(plan, x, weight):
    # Not by `_dot`: remat policies see into this function but not into a custom gradient.
    return _product(plan, x, weight), (x, weight)


def _dot_backward(plan, residuals, gradient):
    x, weight = residuals
    inputs, out = plan.expression.split("->")
    of_x, of_weight = inputs.split(",")
    gradient_x = jnp.einsum(
        f"{out},{of_weight}->{of_x}", gradient, _gathered(plan, x, weight), out_sharding=plan.x
    )
    gradient_weight = jnp.einsum(
        f"{of_x},{out}->{of_weight}", x, gradient,
        out_sharding=plan.weight, preferred_element_type=plan.reduce,
    )  # fmt: skip
    return gradient_x, gradient_weight.astype(weight.dtype)


_dot.defvjp(_dot_forward, _dot_backward)
