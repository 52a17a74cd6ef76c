"""Routed feed-forward layers: each token through its experts, in a custom gradient.

The weights of a device's experts are gathered over the replicas that split them, in the compute
dtype, once in each pass, as `dot` does. One manual region then sends rows to the devices of their
experts, multiplies, and brings results back (`travel`, `grouped`). The gradient takes the rows
there again and keeps nothing of the forward pass but its arguments: it computes `gate` and `up`
once more, as a layer does that is run again. Weight gradients are terms of sums over the axes along
which tokens differ, but for `expert`: an expert sees the tokens of the whole axis.

Communicates over those of `TOKEN_AXES` that split the weights (gathers, reduce-scatters), over
`expert` (rows, and their gradients) and over `tensor` (sums of results).

Letters: B batch, T positions, N = B T on one device, D width, E experts, F expert_dim, k experts of
a token, R slots of rows in blocks, b rows of a block.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float

from llmx import sharding
from llmx.model import dot, precision, remat
from llmx.model.activations import hidden
from llmx.model.experts import grouped, travel
from llmx.model.experts.config import CAPACITY, ExpertsConfig
from llmx.model.experts.router import Routing

INSIDE, OF_TOKENS = ("batch", "sequence", "embed"), ("batch", "sequence", None)


class Weights(NamedTuple):
    """Of all experts of a layer, each a parameter in any layout."""

    gate: Array | None  # [E, D, F]; None where the MLP is not gated
    up: Array  # [E, D, F]
    down: Array  # [E, F, D]
    gate_bias: Array | None = None  # [E, F]; None where there are none
    up_bias: Array | None = None  # [E, F]
    down_bias: Array | None = None  # [E, D]

    @property
    def inward(self) -> list[tuple[Array, Array | None]]:
        """What a token is multiplied with, each with its bias."""
        pairs = [(self.gate, self.gate_bias), (self.up, self.up_bias)]
        return [(weight, bias) for weight, bias in pairs if weight is not None]

    @classmethod
    def of_inward(cls, inward: list, down: Any, biases: list, down_bias: Any) -> "Weights":
        """From lists in the order of `inward`: one or two, and as many biases or none."""
        gate, up = (None, *inward)[-2:]
        gate_bias, up_bias = (None, None, *biases)[-2:]
        return cls(gate, up, down, gate_bias, up_bias, down_bias)


@dataclasses.dataclass(frozen=True)
class _Layer:
    """Static data of the custom gradient: what is computed, and where each array lives."""

    activation: str
    num_experts: int
    config: ExpertsConfig
    mesh: Mesh
    x: PartitionSpec  # [B, T, D]
    weights: PartitionSpec  # [B, T, k]
    parameters: Weights  # of PartitionSpecs
    param: jnp.dtype
    compute: jnp.dtype
    reduce: jnp.dtype
    out: PartitionSpec
    token_axes: tuple[str, ...]  # along which tokens differ
    local_axes: tuple[str, ...]

    @property
    def tensor(self) -> tuple[str, ...]:
        """Mesh axes that split F: results are sums over them."""
        return sharding.mesh_axes(self.of_parameters.down.partitions[1])

    def gathered(self, weight: Array) -> Array:
        """A weight as both passes multiply it; communicates over the replicas that split it."""
        return dot.gathered(weight, self.compute, over=dot.EXPERT_WEIGHTS_OVER)

    def ways(self, tokens: int, k: int) -> travel.Ways:
        """How rows of this many tokens of a device travel."""
        devices = self.mesh.shape.get(travel.AXIS, 1)
        others = tuple(
            axis for axis, size in self.mesh.shape.items()
            if size > 1 and axis != travel.AXIS and axis not in self.local_axes
        )  # fmt: skip
        return travel.ways(devices, self.num_experts, tokens * k, self.config.buffer, others)

    def region(self, function: Callable, in_specs, out_specs) -> Callable:
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    @property
    def of_parameters(self) -> Weights:
        """Of the gathered weights."""
        gathered = lambda spec: sharding.without(spec, dot.EXPERT_WEIGHTS_OVER)  # noqa: E731
        return jax.tree.map(gathered, self.parameters)

    def once(self, array: Array) -> Array:
        """A term of the sums over `tensor` that all its devices have: on one of them, else 0."""
        if not self.tensor:
            return array
        return jnp.where(jax.lax.axis_index(self.tensor) == 0, array, 0)


def experts(
    x_BTD: Float[Array, "B T D"], routing: Routing, weights: Weights, *, activation: str,
    config: ExpertsConfig, place: sharding.Placement, policy: precision.Policy, out: PartitionSpec,
) -> Float[Array, "B T D"]:  # fmt: skip
    """The sum over each token's experts of their results, each times its weight, placed as `out`.

    Args:
      x_BTD, routing: of the same tokens.
      weights: master parameters, or those with gradient buffers.
      activation: see `activations.hidden`.
      config: how rows reach their experts.
      place, policy, out: the mesh, the dtypes, and the PartitionSpec of the result.
    """
    x_BTD = place.constrain(x_BTD, INSIDE, multiplied_into=("mlp",))
    x_BTD = checkpoint_name(x_BTD, remat.MLP_NORM)
    experts_BTk = place.constrain(routing.experts_BTk, OF_TOKENS)
    weights_BTk = place.constrain(routing.weights_BTk, OF_TOKENS, multiplied_into=("mlp",))
    spec_of = lambda array: jax.typeof(array).sharding.spec  # noqa: E731
    layer = _Layer(
        activation=activation, num_experts=weights.up.shape[0], config=config, mesh=place.mesh,
        x=spec_of(x_BTD), weights=spec_of(weights_BTk),
        parameters=jax.tree.map(spec_of, weights), param=weights.up.dtype, compute=x_BTD.dtype,
        reduce=policy.reduce, out=out, token_axes=place.token_axes, local_axes=place.local_axes,
    )  # fmt: skip
    return _experts(layer, x_BTD, experts_BTk, weights_BTk, weights)


def dense(
    x_BTD: Float[Array, "B T D"], routing: Routing, weights: Weights, *, activation: str,
    config: ExpertsConfig, place: sharding.Placement, policy: precision.Policy, out: PartitionSpec,
) -> Float[Array, "B T D"]:  # fmt: skip
    """`experts` by the plain computation: each expert computes each token, and is multiplied by 0
    for those of others. E times the work; not over `expert`."""
    x_BTD = place.constrain(x_BTD, INSIDE, multiplied_into=("mlp",))
    experts_BTk, weights_BTk = (place.constrain(array, OF_TOKENS) for array in routing)
    of_each = place.activation(("batch", "sequence", None, "mlp"))
    product = functools.partial(dot.dot, "BTD,EDF->BTEF", x_BTD, out=of_each, policy=policy)
    first = [_shifted(product(weight), bias) for weight, bias in weights.inward]
    hidden_BTEF = hidden(activation, *first)
    chosen_BTkE = experts_BTk[..., None] == jnp.arange(weights.up.shape[0])
    weights_BTE = jnp.sum(jnp.where(chosen_BTkE, weights_BTk[..., None], 0), axis=-2)
    hidden_BTEF *= weights_BTE[..., None].astype(hidden_BTEF.dtype)
    y_BTD = dot.dot("BTEF,EFD->BTD", hidden_BTEF, weights.down, out=out, policy=policy)
    if weights.down_bias is None:
        return y_BTD
    weights_BTE = weights_BTE.astype(x_BTD.dtype)
    return y_BTD + dot.dot("BTE,ED->BTD", weights_BTE, weights.down_bias, out=out, policy=policy)


def _shifted(product: Array, bias: Array | None) -> Array:
    return product if bias is None else dot.shifted(product, bias)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _experts(layer: _Layer, x_BTD, experts_BTk, weights_BTk, params):
    split = sharding.split_only
    terms = layer.region(
        functools.partial(_forward_local, layer),
        (split(layer.x), split(layer.weights), split(layer.weights), layer.of_parameters),
        sharding.unreduced(split(layer.x), layer.tensor),
    )(*_plain(x_BTD, experts_BTk, weights_BTk), jax.tree.map(layer.gathered, params))
    return sharding.scattered(terms, layer.out, exchange=False)


def _plain(*arrays):
    """Without the axes over which their gradients will be sums."""
    return (
        jax.sharding.reshard(array, sharding.split_only(jax.typeof(array).sharding.spec))
        for array in arrays
    )


def _forward(layer, *arguments):
    return _experts(layer, *arguments), arguments


def _backward(layer: _Layer, arguments, gradient_BTD):
    x_BTD, experts_BTk, weights_BTk, params = arguments
    split, unreduced = sharding.split_only, sharding.unreduced
    gradient_BTD = jax.sharding.reshard(gradient_BTD, split(layer.x))
    summed = tuple(axis for axis in layer.token_axes if axis != travel.AXIS)
    gradient_x, gradient_weights, gradients = layer.region(
        functools.partial(_backward_local, layer),
        (
            split(layer.x), split(layer.weights), split(layer.weights), layer.of_parameters,
            split(layer.x),
        ),
        (
            unreduced(split(layer.x), layer.tensor), unreduced(split(layer.weights), layer.tensor),
            jax.tree.map(lambda spec: unreduced(spec, summed), layer.of_parameters),
        ),
    )(
        *_plain(x_BTD, experts_BTk, weights_BTk), jax.tree.map(layer.gathered, params), gradient_BTD
    )  # fmt: skip

    def placed(terms, to):
        return sharding.scattered(terms, unreduced(to, to.reduced), exchange=False)

    done = lambda terms, to: (  # noqa: E731
        sharding.scattered(terms, unreduced(to, to.reduced)).astype(layer.param)
    )
    gradients = jax.tree.map(done, gradients, layer.parameters)
    return placed(gradient_x, layer.x), None, placed(gradient_weights, layer.weights), gradients


_experts.defvjp(_forward, _backward)


# -------------------------------------------------------------------------------------- one device


class _Local(NamedTuple):
    """The arguments of a device in rows of tokens, and where they go."""

    x_ND: Array
    weights_Nk: Array
    to: travel.Ways
    journey: travel.Journey


def _local(layer: _Layer, x_BTD, experts_BTk, weights_BTk) -> _Local:
    B, T, D = x_BTD.shape
    k = experts_BTk.shape[-1]
    if layer.config.dispatch == CAPACITY:
        within = _within_capacity(experts_BTk, layer.num_experts, layer.config.capacity)
        experts_BTk = jnp.where(within, experts_BTk, layer.num_experts)
    to = layer.ways(B * T, k)
    journey = travel.plan(experts_BTk.reshape(B * T, k), to)
    return _Local(x_BTD.reshape(B * T, D), weights_BTk.reshape(B * T, k), to, journey)


def _within_capacity(experts_BTk: Array, num_experts: int, capacity: float) -> Array:
    """bool[B, T, k]: whether an assignment is among the first of its expert in its row."""
    B, T, k = experts_BTk.shape
    most = max(int(capacity * T * k / num_experts), 1)

    def of_row(experts_A):
        _, place_A, _ = grouped.by_expert(experts_A, num_experts)
        return place_A < most

    return jax.vmap(of_row)(experts_BTk.reshape(B, T * k)).reshape(B, T, k)


def _in_rounds(local: _Local, one: Callable):
    """The sum over all rounds of `one(round)`, a tree of arrays."""
    total = one(travel.round_of(local.journey, jnp.zeros((), jnp.int32), local.to))
    if local.to.per_pair >= local.journey.token_of.shape[0]:
        return total  # one round takes all

    def more(carry):
        number, total = carry
        new = one(travel.round_of(local.journey, number, local.to))
        return number + 1, jax.tree.map(jnp.add, total, new)

    unfinished = lambda carry: carry[0] < local.journey.rounds  # noqa: E731
    return jax.lax.while_loop(unfinished, more, (jnp.ones((), jnp.int32), total))[1]


def _forward_local(layer: _Layer, x_BTD, experts_BTk, weights_BTk, weights):
    local = _local(layer, x_BTD, experts_BTk, weights_BTk)

    def expert(x_bD, weights):
        products = [_biased(_product(x_bD, weight), bias) for weight, bias in weights.inward]
        out_bD = _product(hidden(layer.activation, *products), weights.down)
        return out_bD if weights.down_bias is None else out_bD + layer.once(weights.down_bias)

    def one(this: travel.Round):
        x_RD = travel.sent(local.x_ND, this, local.to)
        out_RD = grouped.by_block(expert, x_RD, weights, this.blocks)
        out_NkD = travel.returned(out_RD, this, local.to)
        return jnp.einsum(
            "nk,nkd->nd", local.weights_Nk, out_NkD, preferred_element_type=jnp.float32
        )

    out_ND = _in_rounds(local, one)
    return out_ND.reshape(x_BTD.shape).astype(x_BTD.dtype)


def _backward_local(layer: _Layer, x_BTD, experts_BTk, weights_BTk, weights, gradient_BTD):
    local = _local(layer, x_BTD, experts_BTk, weights_BTk)
    gradient_ND = gradient_BTD.reshape(local.x_ND.shape)

    def expert(rows, weights):
        x_bD, gradient_bD, weights_b = rows
        products = [_biased(_product(x_bD, weight), bias) for weight, bias in weights.inward]
        hidden_bF, pull = jax.vjp(functools.partial(hidden, layer.activation), *products)
        times = lambda rows: (rows * weights_b[:, None]).astype(rows.dtype)  # noqa: E731
        # Of each row's result times 1: its product with the hidden row is the weight's gradient.
        unweighted_bF = _product(gradient_bD, weights.down, transposed=True)
        weight_b = jnp.einsum(
            "bf,bf->b", unweighted_bF, hidden_bF, preferred_element_type=jnp.float32
        )
        biases, of_down_bias = [], None
        if weights.down_bias is not None:
            bias_D = layer.once(weights.down_bias)
            weight_b += jnp.einsum(
                "bd,d->b", gradient_bD, bias_D, preferred_element_type=jnp.float32
            )
            of_down_bias = _summed(times(gradient_bD))
        to_products = pull(times(unweighted_bF))
        if weights.up_bias is not None:
            biases = [_summed(to) for to in to_products]
        x_terms = [
            _product(to, weight, transposed=True)
            for to, (weight, _) in zip(to_products, weights.inward, strict=True)
        ]
        inward = [_term(x_bD, to) for to in to_products]
        terms = Weights.of_inward(
            inward, _term(times(hidden_bF), gradient_bD), biases, of_down_bias
        )
        return (functools.reduce(jnp.add, x_terms), weight_b), terms

    def one(this: travel.Round):
        rows = (
            travel.sent(local.x_ND, this, local.to), travel.sent(gradient_ND, this, local.to),
            _weights_of_rows(local, this),
        )  # fmt: skip
        (x_RD, weight_R), gradients = grouped.by_block_with_sums(
            expert, rows, weights, this.blocks, layer.reduce
        )
        x_NkD = travel.returned(x_RD, this, local.to)
        x_ND = jnp.sum(x_NkD, axis=1, dtype=jnp.float32)
        return x_ND, travel.returned(weight_R, this, local.to), gradients

    x_ND, weights_Nk, gradients = _in_rounds(local, one)
    x_BTD = x_ND.reshape(x_BTD.shape).astype(x_BTD.dtype)
    return x_BTD, weights_Nk.reshape(weights_BTk.shape), gradients


def _product(x_bD: Array, weight_DF: Array, *, transposed: bool = False) -> Array:
    """x times a weight [D, F] in the dtype of x; `transposed`: times one of [F, D]."""
    expression = "bd,fd->bf" if transposed else "bd,df->bf"
    return jnp.einsum(expression, x_bD, weight_DF, preferred_element_type=x_bD.dtype)


def _term(x_bD: Array, gradient_bF: Array) -> Array:
    """Of a weight gradient, the sum over the rows of a block, fp32 [D, F]."""
    return jnp.einsum("bd,bf->df", x_bD, gradient_bF, preferred_element_type=jnp.float32)


def _biased(product: Array, bias: Array | None) -> Array:
    return product if bias is None else product + bias


def _summed(rows_bF: Array) -> Array:
    """Of the gradient of a bias, the sum over the rows of a block, fp32 [F]."""
    return jnp.sum(rows_bF, axis=0, dtype=jnp.float32)


def _weights_of_rows(local: _Local, this: travel.Round) -> Array:
    """The weights of the assignments in blocks, fp32 [R]. Communicates over `expert`."""
    slots = local.to.devices * local.to.per_pair
    weights = jnp.zeros(slots, jnp.float32).at[this.slot_Nk.reshape(-1)].set(
        local.weights_Nk.reshape(-1), mode="drop"
    )  # fmt: skip
    weights_nC = weights.reshape(local.to.devices, local.to.per_pair)
    return travel.arranged(travel.exchanged(weights_nC, local.to), this)
