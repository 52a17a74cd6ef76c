"""Routed feed-forward layers: each token through its experts, in a custom gradient.

One manual region sends rows to the devices of their experts (`travel`), multiplies them there, and
brings results back. The weights of a device's experts are gathered over the replicas that split
them, in the compute dtype, once in each pass, as `dot` does, a part of their width at a time, and
their gradients reduce-scattered so (`products`). The gradient takes the rows there again and keeps
nothing of the forward pass but its arguments: it computes `gate` and `up` once more, as a layer
does that is run again. Weight gradients are terms of sums over the axes along which tokens differ,
but for `expert`: an expert sees the tokens of the whole axis.

Communicates over those of `TOKEN_AXES` that split the weights (gathers, reduce-scatters), over
`expert` (rows, and their gradients) and over `tensor` (sums of results).

A *row* is a token's vector on its way to one of its experts; only `within_capacity` means a row of
the batch.

Letters: B batch, T positions, N = B T on one device, D width, E experts, F expert_dim, k experts of
a token, R slots of rows in blocks, b rows of a block.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from llmx import sharding
from llmx.model import dot, precision, remat
from llmx.model.activations import hidden
from llmx.model.experts import grouped, products, travel
from llmx.model.experts.config import ExpertsConfig
from llmx.model.experts.products import Weights
from llmx.model.experts.router import Routing
from llmx.sharding.mesh import kind_of

# The scope of a loop whose length depends on data: how long it is where loads are about equal.
EXPECTED_TRIPS = "expected_trips_{}"
INSIDE, OF_TOKENS = ("batch", "sequence", "embed"), ("batch", "sequence", None)


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
    device_kind: str  # jax's name of the chip

    @property
    def tensor(self) -> tuple[str, ...]:
        """Mesh axes that split F: results are sums over them."""
        return sharding.mesh_axes(self.of_shards.down.partitions[-1])

    def shards(self, params: Weights) -> Weights:
        """The weights in the compute dtype, placed as `of_shards`, each matrix [E, D, F].

        Communicates over replicas that split F, where D does not divide over them.
        """
        shards = jax.tree.map(lambda weight: _plain(dot.cast(weight, self.compute)), params)
        shards = shards._replace(down=shards.down.swapaxes(1, 2))
        return jax.tree.map(jax.sharding.reshard, shards, self.of_shards)

    @property
    def of_shards(self) -> Weights:
        """PartitionSpecs of `shards`: as the parameters, but F, which is taken in parts, is whole
        over replicas."""
        specs = jax.tree.map(sharding.split_only, self.parameters)
        E, F, D = specs.down.partitions
        specs = specs._replace(down=PartitionSpec(E, D, F))

        def whole(spec: PartitionSpec) -> PartitionSpec:
            *others, width = spec.partitions
            width = sharding.without(PartitionSpec(width), dot.EXPERT_WEIGHTS_OVER)
            return PartitionSpec(*others, *width.partitions)

        return jax.tree.map(whole, specs)

    def whole(self, shards: Weights) -> Weights:
        """Weights of a device, or a part of their width, gathered; in manual regions.
        Communicates over the replicas that split them."""

        def gathered(weight, spec):
            for dimension, axes in _split_by_replicas(spec):
                weight = jax.lax.all_gather(weight, axes, axis=dimension, tiled=True)
            return weight

        return jax.tree.map(gathered, shards, self._like(shards))

    def summed(self, terms: Weights) -> Weights:
        """Weight gradients, of which each replica keeps its part; in manual regions.
        Communicates over the replicas that split the weights."""

        def scattered(term, spec):
            for dimension, axes in _split_by_replicas(spec):
                term = sharding.psum_scatter(term, axes, dimension=dimension)
            return term

        return jax.tree.map(scattered, terms, self._like(terms))

    def _like(self, weights: Weights) -> Weights:
        """`of_shards` without what `weights` has not."""
        specs = zip(weights, self.of_shards, strict=True)
        return Weights(*(None if weight is None else spec for weight, spec in specs))

    def once(self, array: Array) -> Array:
        """A term of the sums over `tensor` that all its devices have: on one of them, else 0."""
        if not self.tensor:
            return array
        return jnp.where(jax.lax.axis_index(self.tensor) == 0, array, 0)

    def products(self, local: "_Local", num_parts: int) -> products.Products:
        """How rows are multiplied."""
        to, rows = local.to, local.weights_Nk.size
        size = grouped.block_size(to.devices * to.per_pair, to.experts)
        return products.Products(
            self.activation, self.reduce, self.device_kind,
            by_kernels=products.has_kernels(self.device_kind),
            rows=grouped.expected_rows(rows, size, to.experts),
            several=num_parts > 1,
        )  # fmt: skip

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


def _split_by_replicas(spec: PartitionSpec) -> list[tuple[int, tuple[str, ...]]]:
    """The dimensions of a weight that replicas split, with their axes."""
    found = []
    for dimension, entry in enumerate(spec.partitions):
        axes = [axis for axis in sharding.mesh_axes(entry) if axis in dot.EXPERT_WEIGHTS_OVER]
        found += [(dimension, tuple(axes))] * bool(axes)
    return found


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
        device_kind=kind_of(place.mesh).device_kind,
    )  # fmt: skip
    return _experts(layer, x_BTD, experts_BTk, weights_BTk, weights)


def within_capacity(
    experts_BTk: Int[Array, "B T k"], num_experts: int, capacity: float, place: sharding.Placement
) -> Int[Array, "B T k"]:
    """Each assignment that is among the first of its expert in its row, of the positions on a
    device; the others go to no expert, number E. An expert takes `capacity` x T k / E of a row."""
    to = jax.typeof(experts_BTk).sharding.spec
    experts_BTk = place.constrain(experts_BTk, OF_TOKENS)
    spec = jax.typeof(experts_BTk).sharding.spec

    def local(experts_BTk):
        B, T, k = experts_BTk.shape
        most = max(int(capacity * T * k / num_experts), 1)
        place_of = lambda experts_A: grouped.by_expert(experts_A, num_experts)[1]  # noqa: E731
        place_BTk = jax.vmap(place_of)(experts_BTk.reshape(B, T * k)).reshape(B, T, k)
        return jnp.where(place_BTk < most, experts_BTk, num_experts)

    local = jax.shard_map(local, mesh=place.mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.sharding.reshard(local(experts_BTk), to)


def dense(
    x_BTD: Float[Array, "B T D"], routing: Routing, weights: Weights, *, activation: str,
    config: ExpertsConfig, place: sharding.Placement, policy: precision.Policy, out: PartitionSpec,
) -> Float[Array, "B T D"]:  # fmt: skip
    """`experts` by the plain computation: each expert computes each token, and is multiplied by 0
    for those of others. E/k times the work; not over `expert`."""
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
        (split(layer.x), split(layer.weights), split(layer.weights), layer.of_shards),
        sharding.unreduced(split(layer.x), layer.tensor),
    )(*map(_plain, (x_BTD, experts_BTk, weights_BTk)), layer.shards(params))
    return sharding.scattered(terms, layer.out, exchange=False)


def _plain(array: Array) -> Array:
    """Without the axes over which its gradient will be a sum."""
    return jax.sharding.reshard(array, sharding.split_only(jax.typeof(array).sharding.spec))


def _forward(layer, *arguments):
    return _experts(layer, *arguments), arguments


def _backward(layer: _Layer, arguments, gradient_BTD):
    x_BTD, experts_BTk, weights_BTk, params = arguments
    split, unreduced = sharding.split_only, sharding.unreduced
    gradient_BTD = jax.sharding.reshard(gradient_BTD, split(layer.x))
    summed = set(layer.token_axes) - {travel.AXIS}
    terms_of = lambda spec: unreduced(spec, summed - set(sharding.used_axes(spec)))  # noqa: E731
    gradient_x, gradient_weights, gradients = layer.region(
        functools.partial(_backward_local, layer),
        (
            split(layer.x), split(layer.weights), split(layer.weights), layer.of_shards,
            split(layer.x),
        ),
        (
            unreduced(split(layer.x), layer.tensor), unreduced(split(layer.weights), layer.tensor),
            jax.tree.map(terms_of, layer.of_shards),
        ),
    )(
        *map(_plain, (x_BTD, experts_BTk, weights_BTk)), layer.shards(params), gradient_BTD
    )  # fmt: skip

    def placed(terms, to):
        return sharding.scattered(terms, unreduced(to, to.reduced), exchange=False)

    gradients = gradients._replace(down=gradients.down.swapaxes(1, 2))
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
    to = layer.ways(B * T, k)
    journey = travel.plan(experts_BTk.reshape(B * T, k), to)
    return _Local(x_BTD.reshape(B * T, D), weights_BTk.reshape(B * T, k), to, journey)


def _in_rounds(local: _Local, one: Callable):
    """The sum over all rounds of `one(round)`, a tree of arrays."""
    first = jnp.zeros((), jnp.int32)
    numbered = lambda number: one(travel.round_of(local.journey, number, local.to))  # noqa: E731
    if local.to.per_pair >= local.journey.token_of.shape[0]:
        return numbered(first)  # one round takes all

    def more(carry):
        number, total = carry
        return number + 1, jax.tree.map(jnp.add, total, numbered(number))

    unfinished = lambda carry: carry[0] < local.journey.rounds  # noqa: E731
    zeros = jax.tree.map(
        lambda array: jnp.zeros(array.shape, array.dtype), jax.eval_shape(numbered, first)
    )
    even = travel.even_rounds(local.to, local.weights_Nk.size)
    with jax.named_scope(EXPECTED_TRIPS.format(even)):
        return jax.lax.while_loop(unfinished, more, (first, zeros))[1]


class _Parts(NamedTuple):
    """The shards of weights in parts of their width; the first part is gathered for all rounds."""

    shards: list[Weights]
    first: Weights


def _parts(layer: _Layer, shards: Weights) -> _Parts:
    """Communicates over the replicas that split the weights."""
    shards = shards._replace(down_bias=None)
    columns = products.parts(shards.up.shape[-1])
    of_parts = [jax.tree.map(lambda shard: shard[..., part], shards) for part in columns]  # noqa: B023
    return _Parts(of_parts, layer.whole(of_parts[0]))


def _in_parts(layer: _Layer, parts: _Parts, one: Callable):
    """The sum over the parts of an expert's width of `one(weights of the part, total before)`,
    which also returns what is of this part alone; a list of these.

    A part is gathered while the one before it is multiplied. Communicates over the replicas that
    split the weights.
    """
    total, found, weights = None, [], parts.first
    for following in (*parts.shards[1:], None):
        ahead = None
        if following is not None:
            after, total = jax.lax.optimization_barrier((following, total))
            ahead = layer.whole(after)
        total, own = one(weights, total)
        found.append(own)
        weights = ahead
    return total, found


def _forward_local(layer: _Layer, x_BTD, experts_BTk, weights_BTk, shards):
    local, parts = _local(layer, x_BTD, experts_BTk, weights_BTk), _parts(layer, shards)
    of = layer.products(local, len(parts.shards))

    def one(this: travel.Round):
        x_RD = travel.sent(local.x_ND, this, local.to)
        multiplied = lambda weights, total: (  # noqa: E731
            of.forward(x_RD, weights, this.blocks, total), None
        )  # fmt: skip
        out_RD, _ = _in_parts(layer, parts, multiplied)
        if shards.down_bias is not None:
            out_RD += products.of_rows(layer.once(shards.down_bias), this.blocks)
        out_NkD = travel.returned(out_RD.astype(x_RD.dtype), this, local.to)
        return jnp.einsum(
            "nk,nkd->nd", local.weights_Nk, out_NkD, preferred_element_type=jnp.float32
        )

    out_ND = _in_rounds(local, one)
    return out_ND.reshape(x_BTD.shape).astype(x_BTD.dtype)


def _backward_local(layer: _Layer, x_BTD, experts_BTk, weights_BTk, shards, gradient_BTD):
    local, parts = _local(layer, x_BTD, experts_BTk, weights_BTk), _parts(layer, shards)
    of = layer.products(local, len(parts.shards))
    gradient_ND = gradient_BTD.reshape(local.x_ND.shape)

    def one(this: travel.Round):
        blocks, sent = this.blocks, functools.partial(travel.sent, this=this, to=local.to)
        x_RD, gradient_RD = sent(local.x_ND), sent(gradient_ND)
        weights_R = _weights_of_rows(local, this)

        def multiplied(weights, total):
            total, terms = of.backward(x_RD, gradient_RD, weights_R, weights, blocks, total)
            return total, layer.summed(terms)

        (x_RD, weight_R), gradients = _in_parts(layer, parts, multiplied)
        gradients = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=-1), *gradients)
        if shards.down_bias is not None:
            bias_RD = products.of_rows(layer.once(shards.down_bias), blocks)
            weight_R += jnp.einsum(
                "rd,rd->r", gradient_RD, bias_RD, preferred_element_type=jnp.float32
            )
            weighted_RD = (gradient_RD * weights_R[:, None]).astype(gradient_RD.dtype)
            of_bias = of.sums_of_rows(weighted_RD, blocks, shards.up.shape[0])
            gradients = gradients._replace(down_bias=of_bias)
        x_NkD = travel.returned(x_RD.astype(local.x_ND.dtype), this, local.to)
        x_ND = jnp.sum(x_NkD, axis=1, dtype=jnp.float32)
        return x_ND, travel.returned(weight_R, this, local.to), gradients

    x_ND, weights_Nk, gradients = _in_rounds(local, one)
    x_BTD = x_ND.reshape(x_BTD.shape).astype(x_BTD.dtype)
    return x_BTD, weights_Nk.reshape(weights_BTk.shape), gradients


def _weights_of_rows(local: _Local, this: travel.Round) -> Array:
    """The weights of the assignments in blocks, fp32 [R]. Communicates over `expert`."""
    slots = local.to.devices * local.to.per_pair
    weights = jnp.zeros(slots, jnp.float32).at[this.slot_Nk.reshape(-1)].set(
        local.weights_Nk.reshape(-1), mode="drop"
    )  # fmt: skip
    weights_nC = weights.reshape(local.to.devices, local.to.per_pair)
    return travel.arranged(travel.exchanged(weights_nC, local.to), this)
