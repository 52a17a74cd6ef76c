"""The one matrix product of the model: cast, gather, contract; each gradient goes where it belongs.

Under ZeRO-3 a weight is split over replicas, gathered for the product, and its gradient
reduce-scattered. Written as a custom gradient the communication is exact: the gathered weight never
lives from the forward to the backward pass, which gathers it once more, for what it computes again
and for the gradient together; and the weight gradient is born with the sharding of the weight
itself, summed in the reduce dtype.

Mesh axes: gathers and reduce-scatters over those of `TOKEN_AXES` that split the weight; sums over
the mesh axes that split the contracted dimensions (`tensor` in the output projections); sums weight
gradients over the axes that split the batch.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from llmx import sharding
from llmx.model import precision, remat
from llmx.sharding import mesh_axes


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Where each array of one product lives: static data of the custom gradient."""

    expression: str
    x: PartitionSpec
    weight: PartitionSpec
    out: PartitionSpec
    param: jnp.dtype
    reduce: jnp.dtype
    recomputed: bool

    @property
    def gathered(self) -> PartitionSpec:
        return sharding.without(self.weight, sharding.TOKEN_AXES)

    @property
    def letters(self) -> tuple[str, str, str]:
        """Of x, of the weight, of the result."""
        inputs, out = self.expression.split("->")
        return *inputs.split(","), out

    @property
    def whole_out(self) -> PartitionSpec:
        """Of the result, without what scatters it after the product."""
        of_x, of_weight, out = self.letters
        split = dict(zip(of_weight, self.gathered.partitions, strict=True))
        split |= dict(zip(of_x, self.x.partitions, strict=True))
        return PartitionSpec(*(split[letter] for letter in out))


class WeightGradOperands(NamedTuple):
    """The buffer of a deferred weight gradient (W): instead of the gradient its two operands.

    These are what the weight was multiplied with, and the gradient of the product.
    `WeightGradRecord.gradient` multiplies them.
    """

    x: jax.Array
    gradient: jax.Array


@jax.tree_util.register_static
class WeightGradRecord:
    """A buffer that records, while a program is traced, the types of its weight's operands."""

    plan: _Plan | None = None
    types: WeightGradOperands | None = None

    def gradient(self, factors: WeightGradOperands) -> jax.Array:
        """The weight gradient, each device's term of its sum where the weight is `reduced`."""
        return _weight_gradient(self.plan, *factors)


class DeferredWeight(NamedTuple):
    """A weight whose gradient is deferred, with its buffer."""

    weight: jax.Array
    buffer: WeightGradOperands | WeightGradRecord


def with_grad_buffers(place: sharding.Placement, params: Any, buffers: Any) -> Any:
    """`Placement.with_grad_buffers`, where buffers may be `WeightGradOperands` or a record."""

    def one(array, buffer):
        if isinstance(buffer, WeightGradOperands | WeightGradRecord):
            return DeferredWeight(place.with_unreduced_grad(array), buffer)
        return place.with_grad_buffers(array, buffer)

    return jax.tree.map(one, params, buffers)


def dot(
    expression: str,
    x: jax.Array,
    weight: jax.Array | DeferredWeight,
    *,
    out: PartitionSpec,
    policy: precision.Policy,
    recomputed: bool = False,
) -> jax.Array:
    """`einsum(expression, x, weight)` in the compute dtype, placed as `out`.

    Args:
      expression: an einsum over x and weight, e.g. "BTD,DNH->BTNH"; no letter may be summed within
        one operand.
      x: activations, in the compute dtype.
      weight: a master parameter in any layout, or as `with_grad_buffers` gives it.
      out: PartitionSpec of the result.
      policy: the dtypes.
      recomputed: the product is made again before its gradient is taken (remat), and may leave the
        gathered weight for it. Otherwise the gradient gathers for itself.

    Returns the product in the compute dtype.
    """
    buffer = None
    if isinstance(weight, DeferredWeight):
        weight, buffer = weight
    plan = _Plan(
        expression=expression,
        x=jax.typeof(x).sharding.spec,
        weight=jax.typeof(weight).sharding.spec,
        out=out,
        param=weight.dtype,
        reduce=policy.reduce,
        recomputed=recomputed,
    )
    if isinstance(buffer, WeightGradRecord):
        buffer.plan, buffer.types = (
            plan,
            jax.eval_shape(lambda x, weight: _factors(plan, x, _dot(plan, x, weight)), x, weight),
        )
        weight, buffer = jax.lax.stop_gradient(weight), None
    return (
        _dot(plan, x, weight)
        if buffer is None
        else _dot_deferring_weight_grad(plan, x, weight, buffer)
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(plan: _Plan, x: jax.Array, weight: jax.Array) -> jax.Array:
    return _dot_forward(plan, x, weight)[0]


def gathered(weight: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """`weight` in `dtype`, whole over the mesh axes that split tokens: cast, then gathered."""
    whole = sharding.without(jax.typeof(weight).sharding.spec, sharding.TOKEN_AXES)
    return jax.sharding.reshard(cast(weight, dtype), whole)


def cast(weight: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """`weight.astype(dtype)`, in two steps of which the first does the rounding.

    XLA moves a plain cast of one layer's weights out of the loop over layers, and then keeps a
    second copy of all weights. It does not move a rounding.
    """
    if weight.dtype == dtype:
        return weight
    to = jnp.finfo(dtype)
    return jax.lax.reduce_precision(weight, to.nexp, to.nmant).astype(dtype)


def _dot_forward(plan, x, weight):
    whole = gathered(weight, x.dtype)
    out = _contracted(plan.expression, x, whole, plan.x, plan.gathered, plan.out, x.dtype)
    # A policy that kept the product itself would keep it before its sum over devices.
    out = checkpoint_name(out, remat.PRODUCT)
    return out, (x, whole if plan.recomputed else weight)


def _dot_backward(plan, residuals, gradient):
    x, weight = residuals
    gradient, gradient_x = _input_gradient(plan, x, weight, gradient)
    return gradient_x, _weight_gradient(plan, x, gradient)


def _input_gradient(plan, x, weight, gradient):
    """The gradient of the product, placed for both gradients, and that of x."""
    if not plan.recomputed:
        weight = gathered(weight, x.dtype)
    of_x, of_weight, out = plan.letters
    # Positions that were scattered after the product are gathered once, for both gradients.
    gradient = jax.sharding.reshard(gradient, plan.whole_out)
    gradient_x = _contracted(
        f"{out},{of_weight}->{of_x}", gradient, weight, plan.whole_out, plan.gathered,
        sharding.unreduced(plan.x, plan.x.reduced), x.dtype,
    )  # fmt: skip
    return gradient, gradient_x


def _weight_gradient(plan, x, gradient):
    of_x, of_weight, out = plan.letters
    return _contracted(
        f"{of_x},{out}->{of_weight}", x, gradient, plan.x, plan.whole_out,
        sharding.unreduced(plan.weight, plan.weight.reduced), plan.reduce,
    ).astype(plan.param)  # fmt: skip


_dot.defvjp(_dot_forward, _dot_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot_deferring_weight_grad(
    plan: _Plan, x: jax.Array, weight: jax.Array, buffer: WeightGradOperands
) -> jax.Array:
    return _dot_forward(plan, x, weight)[0]


def _deferred_forward(plan, x, weight, buffer):
    return _dot_forward(plan, x, weight)


def _deferred_backward(plan, residuals, gradient):
    x, weight = residuals
    gradient, gradient_x = _input_gradient(plan, x, weight, gradient)
    return gradient_x, None, _factors(plan, x, gradient)


_dot_deferring_weight_grad.defvjp(_deferred_forward, _deferred_backward)


def _factors(plan, x, gradient) -> WeightGradOperands:
    x = jax.sharding.reshard(x, sharding.split_only(plan.x))
    return WeightGradOperands(x, jax.sharding.reshard(gradient, plan.whole_out))


def _contracted(expression, left, right, of_left, of_right, to: PartitionSpec, dtype) -> jax.Array:
    """The product placed as `to`: first each device's term of the sum, then the sum over devices.

    Said in two steps, a sum whose result is split again is a reduce-scatter.
    """
    inputs, out = expression.split("->")
    entries = (*of_left.partitions, *of_right.partitions)
    split = dict(zip(inputs.replace(",", ""), entries, strict=True))
    summed = [axis for letter in split if letter not in out for axis in mesh_axes(split[letter])]
    term = PartitionSpec(*(split[letter] for letter in out))
    product = jnp.einsum(
        expression, left, right, preferred_element_type=dtype,
        out_sharding=sharding.unreduced(term, summed),
    )  # fmt: skip
    return jax.sharding.reshard(product, to)


# ------------------------------------------------------------------- norms' scales, and biases


@jax.custom_vjp
def scaled(y: jax.Array, scale: jax.Array) -> jax.Array:
    """y * scale, along the last dimensions of y; the gradient of scale is summed as its type says.

    Both in one dtype. Communicates, in the backward pass, over the axes that split the leading
    dimensions of y, unless `scale` is `reduced` over them.
    """
    return y * _plain(scale)


def _scaled_forward(y, scale):
    return scaled(y, scale), (y, scale)


def _scaled_backward(residuals, gradient):
    y, scale = residuals
    return gradient * _plain(scale), _summed_rows(gradient * y, scale)


scaled.defvjp(_scaled_forward, _scaled_backward)


@jax.custom_vjp
def shifted(y: jax.Array, bias: jax.Array) -> jax.Array:
    """y + bias in y's dtype, along the last dimensions of y; otherwise as `scaled`."""
    return y + _plain(bias).astype(y.dtype)


def _shifted_forward(y, bias):
    return shifted(y, bias), bias


def _shifted_backward(bias, gradient):
    return gradient, _summed_rows(gradient.astype(bias.dtype), bias)


shifted.defvjp(_shifted_forward, _shifted_backward)


def _plain(parameter: jax.Array) -> jax.Array:
    return jax.sharding.reshard(parameter, sharding.split_only(jax.typeof(parameter).sharding.spec))


def _summed_rows(array: jax.Array, parameter: jax.Array) -> jax.Array:
    """`array` summed over its leading dimensions, as the gradient of `parameter`."""
    kind, to = jax.typeof(array).sharding, jax.typeof(parameter).sharding.spec
    rows = array.ndim - parameter.ndim
    entries = kind.spec.partitions
    summed = sharding.used_axes(PartitionSpec(*entries[:rows]))
    terms = jax.shard_map(
        lambda local: local.sum(axis=tuple(range(rows))), mesh=kind.mesh, in_specs=kind.spec,
        out_specs=sharding.unreduced(PartitionSpec(*entries[rows:]), summed), check_vma=False,
    )(array)  # fmt: skip
    return jax.sharding.reshard(terms, sharding.unreduced(to, to.reduced))
