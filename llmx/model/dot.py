"""The matrix product of the model: cast, gather, contract; gradients are placed as parameters are.

Under ZeRO-3 a weight is split over replicas, gathered for the product, and its gradient
reduce-scattered. A custom gradient makes the communication exact: the gathered weight does not live
from the forward to the backward pass, which gathers it once more; the weight gradient has the
sharding of the weight and is summed in the reduce dtype. It can also be deferred (the operation W
of zero-bubble pipelines): the backward pass then returns its two operands.

Gathers and reduce-scatters over those of `TOKEN_AXES` that split the weight; sums over the axes
that split contracted dimensions; sums weight gradients over the axes that split the batch.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from llmx import sharding
from llmx.model import adapters, observed, packed, precision, quantized
from llmx.model.adapters import Adapted
from llmx.model.observed import Observed
from llmx.model.packed import Packed
from llmx.model.quantized import Quantized, Ranges, WithRanges
from llmx.sharding import mesh_axes

# The mesh axes over which weights of experts are gathered: `expert` says whose they are.
EXPERT_WEIGHTS_OVER = tuple(axis for axis in sharding.TOKEN_AXES if axis != "expert")


@dataclasses.dataclass(frozen=True)
class _Product:
    """One product, and where each of its arrays lives: static data of the custom gradient."""

    expression: str
    x: PartitionSpec
    weight: PartitionSpec
    out: PartitionSpec
    param: jnp.dtype | None  # of the weight's gradient; None = it has none
    reduce: jnp.dtype
    numbers: quantized.Numbers
    recomputed: bool
    deferred: bool  # the backward pass leaves the operands of the weight gradient

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

    def whole_weight(
        self, weight: jax.Array | Packed, dtype: jnp.dtype, ranges: Ranges
    ) -> jax.Array | Quantized:
        """The weight as both passes multiply it; communicates over those of `TOKEN_AXES`."""
        if isinstance(weight, Packed):
            return packed.whole(weight, dtype, sharding.TOKEN_AXES)
        _, of_weight, out = self.letters
        sides = tuple(letter not in out for letter in of_weight)
        whole = gathered(weight, dtype, numbers=self.numbers, sides=sides, amax=ranges.weight)
        if isinstance(whole, Quantized):
            return whole
        return self.numbers.rounded_weight(whole, sides, ranges.weight)

    def rounded_x(
        self, x: jax.Array, contracted_with: str, ranges: Ranges
    ) -> jax.Array | Quantized:
        """x as an operand of a product with an array of these letters."""
        of_x, _, _ = self.letters
        contracted = [letter in contracted_with for letter in of_x]
        return self.numbers.activation(x, self.numbers.x, contracted, ranges.x)

    def rounded_gradient(
        self, gradient: jax.Array, contracted_with: str, ranges: Ranges
    ) -> jax.Array | Quantized:
        """The gradient of the result, likewise."""
        _, _, out = self.letters
        contracted = [letter in contracted_with for letter in out]
        return self.numbers.activation(gradient, self.numbers.gradient, contracted, ranges.gradient)


class WeightGradOperands(NamedTuple):
    """What the backward pass leaves in the buffer of a deferred weight gradient (W)."""

    x: jax.Array  # what the weight was multiplied with
    gradient: jax.Array  # of the product


@jax.tree_util.register_static
class WeightGradRecord:
    """A buffer that records, while a program is traced, the types of its weight's operands."""

    product: _Product | None = None
    types: WeightGradOperands | None = None

    def gradient(self, operands: WeightGradOperands) -> jax.Array:
        """The weight gradient; each device's term of its sum where the weight is `reduced`."""
        return _weight_gradient(self.product, *operands)


class Factored(NamedTuple):
    """A weight that is two factors, each with its own buffer: y = (x down) up."""

    down: Any
    up: Any


class DeferredWeight(NamedTuple):
    """A weight whose gradient is deferred, with its buffer."""

    weight: jax.Array
    buffer: WeightGradOperands | WeightGradRecord


def with_grad_buffers(place: sharding.Placement, params: Any, buffers: Any) -> Any:
    """`Placement.with_grad_buffers`, where buffers may also be `WeightGradOperands` or a record,
    or have ranges. A parameter without a buffer is frozen: nothing differentiates it."""

    def one(array, buffer):
        if isinstance(buffer, WithRanges):
            return WithRanges(one(array, buffer.array), buffer.ranges)
        if isinstance(buffer, WeightGradOperands | WeightGradRecord):
            return DeferredWeight(place.with_unreduced_grad(array), buffer)
        return place.with_grad_buffers(array, buffer)

    return adapters.with_buffers(one, params, buffers)


def deferred(buffers: Any) -> bool:
    """Whether any gradient buffer of a tree takes the operands of a deferred weight gradient."""
    kinds = WeightGradOperands | WeightGradRecord
    leaves = jax.tree.leaves(buffers, is_leaf=lambda leaf: isinstance(leaf, kinds))
    return any(isinstance(leaf, kinds) for leaf in leaves)


def dot(
    expression: str, x: jax.Array,
    weight: jax.Array | Packed | DeferredWeight | WithRanges | Adapted | Factored | Observed, *,
    out: PartitionSpec, policy: precision.Policy, recomputed: bool = False,
) -> jax.Array:  # fmt: skip
    """`einsum(expression, x, weight)` in the compute dtype of x, placed as `out`.

    Args:
      expression: e.g. "BTD,DNH->BTNH"; no letter may be summed within one operand.
      x, weight: activations; a master parameter in any layout, or from `with_grad_buffers`, or
        with an adapter, whose product is added, or two factors, or `Observed`.
      out, policy: PartitionSpec of the result, and the dtypes.
      recomputed: the product is made again before its gradient is taken (remat), and may leave the
        gathered weight for it. Otherwise the gradient gathers for itself.
    """
    if isinstance(weight, Observed):
        x, weight = observed.observe(expression, x, weight.statistics), weight.weight
    if isinstance(weight, Adapted):
        return _adapted(expression, x, weight, out=out, policy=policy, recomputed=recomputed)
    if isinstance(weight, Factored):
        return _factored(expression, x, weight, out=out, policy=policy, recomputed=recomputed)
    weight, ranges = weight if isinstance(weight, WithRanges) else (weight, Ranges())
    weight, buffer = weight if isinstance(weight, DeferredWeight) else (weight, None)
    array = weight.codes if isinstance(weight, Packed) else weight
    product = _Product(
        expression=expression, x=jax.typeof(x).sharding.spec,
        weight=jax.typeof(array).sharding.spec, out=out,
        param=None if array is not weight else weight.dtype, reduce=policy.reduce,
        numbers=policy.numbers, recomputed=recomputed,
        deferred=isinstance(buffer, WeightGradOperands),
    )  # fmt: skip
    if isinstance(buffer, WeightGradRecord):
        operands = lambda x, weight: _operands(product, x, _dot(product, x, weight, None, ranges))  # noqa: E731
        buffer.product, buffer.types = product, jax.eval_shape(operands, x, weight)
        weight, buffer = jax.lax.stop_gradient(weight), None
    return _dot(product, x, weight, buffer, ranges)


def _adapted(
    expression: str, x: jax.Array, weight: Adapted, *, out: PartitionSpec,
    policy: precision.Policy, recomputed: bool,
) -> jax.Array:  # fmt: skip
    """`dot` of a weight with an adapter, neither of whose products is rounded."""
    exact = dataclasses.replace(policy, numbers=quantized.UNROUNDED)
    pair = Factored(weight.down, weight.up)
    kept = adapters.dropped(x, weight)
    added = _factored(expression, kept, pair, out=out, policy=exact, recomputed=recomputed)
    plain = dot(expression, x, weight.weight, out=out, policy=policy, recomputed=recomputed)
    return plain + weight.config.scale * added


def _factored(
    expression: str, x: jax.Array, weight: Factored, *, out: PartitionSpec,
    policy: precision.Policy, recomputed: bool,
) -> jax.Array:  # fmt: skip
    """`dot` of a weight of low rank. What lies between its two products is split as `out` is, and
    whole along the rank."""
    down, up = adapters.factors(expression)
    inner = PartitionSpec(*out.partitions[:2], None)
    product = functools.partial(dot, policy=policy, recomputed=recomputed)
    return product(up, product(down, x, weight.down, out=inner), weight.up, out=out)


def gathered(
    weight: jax.Array, dtype: jnp.dtype, *, numbers: quantized.Numbers = quantized.UNROUNDED,
    sides: Sequence[bool | None] = (), amax: jax.Array | None = None,
    over: Sequence[str] = sharding.TOKEN_AXES,
) -> jax.Array | Quantized:  # fmt: skip
    """`weight` in `dtype`, whole over the mesh axes that split tokens: cast, then gathered.

    As codes, if `numbers` says so: see `Numbers.rounded_weight` for these, `sides` and `amax`.
    `over`: fewer axes, where one of them splits what is not to be gathered: experts.
    """
    weight = cast(weight, dtype)
    if numbers.gathers_codes:
        return quantized.gathered(numbers.rounded_weight(weight, sides, amax), over)
    whole = sharding.without(jax.typeof(weight).sharding.spec, over)
    return jax.sharding.reshard(weight, whole)


def is_weight(leaf: Any) -> bool:
    """Whether `dot` multiplies with it, and it is no array."""
    return isinstance(leaf, Adapted | Packed)


def whole(
    weight: jax.Array | Packed, dtype: jnp.dtype, numbers: quantized.Numbers, axes: Sequence[str]
) -> jax.Array | Packed:
    """A weight with these logical axes, gathered once for several products, in `dtype`.

    Rounded as `numbers` says if it is gathered as codes: each product then finds the same codes.
    Experts stay on their devices, and routers, which compute in fp32, in their own dtype.
    """
    if isinstance(weight, Packed):
        return weight  # each product takes the codes
    over = EXPERT_WEIGHTS_OVER if "experts" in axes else sharding.TOKEN_AXES
    if "router" in axes:
        dtype, numbers = weight.dtype, quantized.UNROUNDED
    sides = [None if axis == "layers" else axis == "embed" for axis in axes]
    return quantized.dequantized(gathered(weight, dtype, numbers=numbers, sides=sides, over=over))


def cast(weight: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """`weight.astype(dtype)`, in two steps of which the first does the rounding.

    XLA moves a plain cast, but no rounding, out of the loop over layers: it would keep a second
    copy of all weights.
    """
    if weight.dtype == dtype:
        return weight
    # With the exponents that the weight has: fewer would make numbers zero that are subnormal in
    # fp16, where many weights are.
    exponents, mantissa = jnp.finfo(weight.dtype).nexp, jnp.finfo(dtype).nmant
    return jax.lax.reduce_precision(weight, exponents, mantissa).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(
    product: _Product, x: jax.Array, weight: jax.Array | Packed,
    buffer: WeightGradOperands | None, ranges: Ranges,
):  # fmt: skip
    return _dot_forward(product, x, weight, buffer, ranges)[0]


def _dot_forward(product, x, weight, buffer, ranges):
    _, of_weight, _ = product.letters
    left, whole = (
        product.rounded_x(x, of_weight, ranges),
        product.whole_weight(weight, x.dtype, ranges),
    )
    out = _contracted(
        product.expression, left, whole, product.x, product.gathered, product.out, x.dtype
    )
    found = Ranges(quantized.amax_of(left), quantized.amax_of(whole))
    return out, (x, whole if product.recomputed else weight, ranges, found)


def _dot_backward(product, residuals, gradient):
    x, weight, ranges, found = residuals
    if not product.recomputed:
        weight = product.whole_weight(weight, x.dtype, ranges)
    of_x, of_weight, out = product.letters
    # Positions that were scattered after the product are gathered once, for both gradients.
    gradient = jax.sharding.reshard(gradient, product.whole_out)
    left = product.rounded_gradient(gradient, of_weight, ranges)
    gradient_x = _contracted(
        f"{out},{of_weight}->{of_x}", left, weight, product.whole_out, product.gathered,
        sharding.unreduced(product.x, product.x.reduced), x.dtype,
    )  # fmt: skip
    if product.numbers.clips_x and ranges.x is not None:
        gradient_x = _inside(gradient_x, x, ranges.x)
    found = found._replace(gradient=quantized.amax_of(left))
    if product.param is None:
        return gradient_x, None, None, found
    if product.deferred:
        return gradient_x, None, _operands(product, x, gradient), found
    return gradient_x, _weight_gradient(product, x, gradient, ranges), None, found


_dot.defvjp(_dot_forward, _dot_backward)


def _inside(gradient: jax.Array, x: jax.Array, amax: jax.Array) -> jax.Array:
    """A gradient of x, 0 where x is beyond its range; of terms of a sum, each."""
    kind, of_x = jax.typeof(gradient).sharding, sharding.split_only(jax.typeof(x).sharding.spec)

    def local(gradient, x, amax):
        return jnp.where((amax > 0) & (jnp.abs(x.astype(jnp.float32)) > amax), 0, gradient)

    return jax.shard_map(
        local, mesh=kind.mesh, in_specs=(kind.spec, of_x, PartitionSpec()), out_specs=kind.spec,
        check_vma=False,
    )(gradient, jax.sharding.reshard(x, of_x), amax)  # fmt: skip


def _weight_gradient(product, x, gradient, ranges=Ranges()):  # noqa: B008
    of_x, of_weight, out = product.letters
    # Where gradients are not rounded, x is what the forward pass multiplied: straight through.
    blocks_along = out if product.numbers.gradient else of_weight
    terms = _terms(
        f"{of_x},{out}->{of_weight}", product.rounded_x(x, blocks_along, ranges),
        product.rounded_gradient(gradient, of_x, ranges), product.x, product.whole_out,
        product.reduce,
    )  # fmt: skip
    to = sharding.unreduced(product.weight, product.weight.reduced)
    return sharding.scattered(terms, to).astype(product.param)


def _operands(product, x, gradient) -> WeightGradOperands:
    x = jax.sharding.reshard(x, sharding.split_only(product.x))
    return WeightGradOperands(x, jax.sharding.reshard(gradient, product.whole_out))


def _contracted(expression, left, right, of_left, of_right, to: PartitionSpec, dtype) -> jax.Array:
    """The product placed as `to`, in two steps: each device's term of the sum, then the sum.

    So a sum whose result is split again becomes a reduce-scatter.
    """
    terms = _terms(expression, left, right, of_left, of_right, dtype)
    return sharding.scattered(terms, to, exchange=False)


def _terms(expression, left, right, of_left, of_right, dtype) -> jax.Array:
    """The product as a sum over the axes that split contracted dimensions, not done yet."""
    inputs, out = expression.split("->")
    entries = (*of_left.partitions, *of_right.partitions)
    split = dict(zip(inputs.replace(",", ""), entries, strict=True))
    summed = [axis for letter in split if letter not in out for axis in mesh_axes(split[letter])]
    term = PartitionSpec(*(split[letter] for letter in out))
    return quantized.einsum(
        expression, left, right, dtype=dtype, out=sharding.unreduced(term, summed)
    )


@jax.custom_vjp
def scaled(y: jax.Array, scale: jax.Array) -> jax.Array:
    """y * scale, along the last dimensions of y; both in one dtype.

    The backward pass communicates over axes that split other dimensions of y and are not `reduced`.
    """
    return y * _plain(scale)


def _scaled_backward(residuals, gradient):
    y, scale = residuals
    return gradient * _plain(scale), summed_rows(gradient * y, scale)


scaled.defvjp(lambda y, scale: (scaled(y, scale), (y, scale)), _scaled_backward)


@jax.custom_vjp
def shifted(y: jax.Array, bias: jax.Array) -> jax.Array:
    """y + bias in y's dtype, along the last dimensions of y; otherwise as `scaled`."""
    return y + _plain(bias).astype(y.dtype)


shifted.defvjp(
    lambda y, bias: (shifted(y, bias), bias),
    lambda bias, gradient: (gradient, summed_rows(gradient.astype(bias.dtype), bias)),
)


def _plain(parameter: jax.Array) -> jax.Array:
    return jax.sharding.reshard(parameter, sharding.split_only(jax.typeof(parameter).sharding.spec))


def summed_rows(array: jax.Array, parameter: jax.Array) -> jax.Array:
    """`array` summed over its leading dimensions, as the gradient of `parameter`.

    Communicates over the axes that split these dimensions and are not `reduced` in its type.
    """
    kind, to = jax.typeof(array).sharding, jax.typeof(parameter).sharding.spec
    rows = array.ndim - parameter.ndim
    entries = kind.spec.partitions
    summed = sharding.used_axes(PartitionSpec(*entries[:rows]))
    terms = jax.shard_map(
        lambda local: local.sum(axis=tuple(range(rows))), mesh=kind.mesh, in_specs=kind.spec,
        out_specs=sharding.unreduced(PartitionSpec(*entries[rows:]), summed), check_vma=False,
    )(array)  # fmt: skip
    return jax.sharding.reshard(terms, sharding.unreduced(to, to.reduced))
