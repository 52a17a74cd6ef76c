"""Low-rank adapters (LoRA, arXiv 2106.09685): a product's weight stays, and what is trained is
added to it:

    y = x W + (alpha / rank) (dropout(x) A) B        A [in, rank], B [rank, out]

W is frozen, in the compute dtype, and has neither a gradient nor optimizer state. A and B are a
tree of their own, which is what a run with adapters trains: `State.params`; the model's parameters
are `State.frozen`. Where both are needed, `joined` puts `Adapted` in the place of a weight, and
`llmx.model.dot` multiplies with it. B begins at zero, so that the first step is the model's own.

Dropout's random numbers are hashes of (seed, step, row, position, layer, product, number of x): the
same on every mesh, in every microbatch and in a pass that is repeated.
"""

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llmx import sharding
from llmx.model.ranks import is_within
from llmx.runtime.bounds import bounded, plain
from llmx.sharding import trees

RANK = "rank"  # the logical axis
DOWN, UP = "down", "up"  # A and B
# Modules of a layer whose products can have adapters. Experts' own weights have none: they are one
# array of all experts, multiplied by kernels of their own.
MODULES = ("attention", "mlp")


_exact_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


_ON = {"adapters.rank": {"not": (0,)}}


@dataclasses.dataclass(unsafe_hash=True)
class AdaptersConfig:
    """What is trained beside frozen parameters."""

    rank: int = bounded(0, at_least=0)  # of each adapter; 0 = none: all parameters are trained
    # adapters are added with the weight alpha / rank
    alpha: float = bounded(16.0, above=0, needs=_ON)
    # share of each adapter's inputs that a training step leaves out
    dropout: float = bounded(0.0, at_least=0, below=1, needs=_ON)
    # which products have one: a module, "attention", or a product, "attention/query"
    products: tuple[str, ...] = plain(MODULES, needs=_ON)

    @property
    def scale(self) -> float:
        """What an adapter's product is multiplied by."""
        return self.alpha / self.rank


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted:
    """A weight with its adapter, [l, ...] of stacked layers, or of one layer."""

    weight: Any
    down: Any
    up: Any
    # With dropout: uint32 [l] of each layer and product, then in a layer uint32 [B, T]
    noise: Any
    config: AdaptersConfig = dataclasses.field(metadata={"static": True})


def factors(expression: str) -> tuple[str, str]:
    """The two products of an adapter beside "BTD,DNH->BTNH": "BTD,Dr->BTr" and "BTr,rNH->BTNH"."""
    inputs, out = expression.split("->")
    of_x, of_weight = inputs.split(",")
    summed = "".join(letter for letter in of_weight if letter not in out)
    made = "".join(letter for letter in of_weight if letter in out)
    low = "".join(letter for letter in of_x if letter not in summed) + "r"
    return f"{of_x},{summed}r->{low}", f"{low},r{made}->{out}"


def products(names: Iterable[str]) -> list[str]:
    """What `AdaptersConfig.products` can name beside whole modules, of parameters of these names:
    "attention/query" of "blocks/attention/query/kernel"."""
    return sorted({_product(name) for name in filter(is_product, names)})


def is_product(name: str) -> bool:
    """Whether a parameter is the weight of a product of a layer's attention or MLP."""
    return name.endswith("/kernel") and name.split("/")[1] in MODULES


def problems(config: AdaptersConfig, shapes: Any) -> list[str]:
    """All that is wrong with the section for a model with these parameters, with remedies."""
    if not config.rank:
        return []
    of_model, found = trees.named(shapes), []
    known = products(of_model)
    for name in config.products:
        if not any(is_within(product, (name,)) for product in known):
            found.append(
                f"adapters.products names {name!r}, which the model does not have: use some of "
                f"{', '.join((*MODULES, *known))}"
            )
    if not config.products:
        found.append("adapters.products=() leaves nothing to train: name products, or rank=0")
    chosen, ranks = _chosen(config, of_model), {}
    if chosen and not any(path.startswith("blocks/") for path in chosen):
        found.append(
            f"adapters.products={config.products!r} are of the dense first layers only: name "
            "products of the other layers too"
        )
    for path in chosen:
        _, *sizes = of_model[path].shape
        inputs = contracted(path)
        sides = math.prod(sizes[:inputs]), math.prod(sizes[inputs:])
        ranks[_product(path)] = min(sides)
    if ranks and config.rank > (least := min(ranks.values())):
        product = min(ranks, key=ranks.get)
        found.append(
            f"adapters.rank={config.rank} is above {least}, which is the rank of {product}: use at "
            f"most {least}"
        )
    return found


def shapes_and_axes(config: AdaptersConfig, shapes: Any, axes: Any) -> tuple[dict, dict]:
    """Shapes, in fp32, and logical axes of the adapters of a model with these parameters, whose
    layers are stacked: {"blocks": {"attention": {"query": {"kernel": {"down": ..., "up": ...}}}}}.
    """
    leaves = jax.tree.leaves(axes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    axes_of = dict(zip(trees.named(shapes), leaves, strict=True))
    found = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32)
        for name, shape in named(config, trees.named(shapes), lambda leaf: leaf.shape, config.rank)
    }
    names = dict(named(config, axes_of, lambda names: names, RANK))
    return trees.nest(found), trees.nest(names)


def named(
    config: AdaptersConfig, of_model: Mapping[str, Any], dimensions: Callable, rank: Any
) -> Iterator[tuple[str, tuple]]:
    """("blocks/attention/query/kernel/down", (*dimensions, rank)) and so on of all adapters of a
    model, of whose parameters `dimensions(leaf)` gives sizes, or names, one for each dimension."""
    for path in _chosen(config, of_model):
        layers, *rest = dimensions(of_model[path])
        inputs = contracted(path)
        yield f"{path}/{DOWN}", (layers, *rest[:inputs], rank)
        yield f"{path}/{UP}", (layers, rank, *rest[inputs:])


def init(config: AdaptersConfig, shapes: Any, axes: Any, seed: int) -> Any:
    """New adapters of a model with these parameters, fp32: A uniform within 1 / sqrt(inputs), as
    PEFT has it, and B zero."""

    def one(path, leaf):
        name = trees.path_name(path)
        if name.endswith(f"/{UP}"):
            return jnp.zeros(leaf.shape, jnp.float32)
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(name.encode()))
        most = 1 / math.sqrt(math.prod(leaf.shape[1:-1]))
        return jax.random.uniform(key, leaf.shape, jnp.float32, -most, most)

    return jax.tree_util.tree_map_with_path(one, shapes_and_axes(config, shapes, axes)[0])


def joined(
    frozen: Any, adapters: Any, config: AdaptersConfig, *,
    layers: Mapping[str, Any] | None = None, path: tuple[str, ...] = (),
) -> Any:  # fmt: skip
    """The model's parameters, with `Adapted` in the place of those that have an adapter.

    `layers`: the numbers of the layers in each stack, int32 [l]: then inputs are dropped.
    """
    if not isinstance(frozen, Mapping):
        noise = None
        if layers is not None and config.dropout:
            product = np.uint32(zlib.crc32("/".join(path).encode()))
            noise = _mixed(layers[path[0]].astype(jnp.uint32) * np.uint32(0x9E3779B1) + product)
            of_layers = jax.typeof(adapters[DOWN]).sharding.spec.partitions[0]
            noise = jax.sharding.reshard(noise, jax.P(of_layers))
        return Adapted(frozen, adapters[DOWN], adapters[UP], noise, config)
    return {
        name: joined(leaf, adapters[name], config, layers=layers, path=(*path, name))
        if name in adapters else leaf
        for name, leaf in frozen.items()
    }  # fmt: skip


def noise_of_rows(shape: tuple[int, int], to: Any, step: Any, seed: int) -> Any:
    """Random numbers of the positions of a global batch, uint32 [B, T], placed as `to`."""
    row, column = (
        jax.lax.broadcasted_iota(jnp.uint32, shape, dim, out_sharding=to) for dim in (0, 1)
    )
    of_step = _mixed(jnp.uint32(seed) ^ _mixed(jnp.asarray(step).astype(jnp.uint32)))
    return _mixed(_mixed(row ^ of_step) + column)


def with_noise(weights: Any, noise_BT: Any) -> Any:
    """A layer's weights, whose adapters that drop inputs know the noise of the positions."""

    def one(weight):
        if not isinstance(weight, Adapted) or weight.noise is None:
            return weight
        return dataclasses.replace(weight, noise=_mixed(noise_BT ^ weight.noise))

    return jax.tree.map(one, weights, is_leaf=is_adapted)


def dropped(x: Any, weight: Adapted) -> Any:
    """x [B, T, ...] without a random share of its numbers, the others larger for it."""
    if weight.noise is None:
        return x
    to = jax.typeof(x).sharding.spec
    plain = sharding.split_only(to)
    noise = jax.sharding.reshard(weight.noise, jax.P(*plain.partitions[:2]))
    number, size = jnp.zeros(x.shape[2:], jnp.uint32), 1
    inner = jax.P(*plain.partitions[2:])
    for dim in reversed(range(x.ndim - 2)):
        iota = jax.lax.broadcasted_iota(jnp.uint32, x.shape[2:], dim, out_sharding=inner)
        number, size = number + iota * np.uint32(size), size * x.shape[2 + dim]
    number = jnp.broadcast_to(number, x.shape, out_sharding=plain)
    noise = jnp.broadcast_to(
        jnp.expand_dims(noise, tuple(range(2, x.ndim))), x.shape, out_sharding=plain
    )
    keep = 1 - weight.config.dropout
    kept = _mixed(noise + number * np.uint32(0x85EBCA77)) < np.uint32(keep * 2**32)
    return jnp.where(kept, jax.sharding.reshard(x, plain) * jnp.asarray(1 / keep, x.dtype), 0)


def _mixed(bits: Any) -> Any:
    """uint32 of which each bit depends on each bit of `bits` (finalizer of MurmurHash3)."""
    bits = (bits ^ (bits >> 16)) * np.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * np.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)


def merged(
    frozen: Any, adapters: Any, config: AdaptersConfig, *, merge: Callable | None = None
) -> Any:  # fmt: skip
    """The parameters of the model that computes the same without adapters: W + scale A B in fp32;
    those without an adapter as they are. `merge`: in the place of `merged_weight`."""
    merge = merge or merged_weight

    def one(leaf):
        return merge(leaf.weight, leaf.down, leaf.up, config.scale) if is_adapted(leaf) else leaf

    return jax.tree.map(one, joined(frozen, adapters, config), is_leaf=is_adapted)


def merged_weight(weight: Any, down: Any, up: Any, scale: float) -> Any:
    """W + scale A B in fp32, of stacked layers [l, ...]."""
    return weight.astype(jnp.float32) + scale * low_rank(down, up)


def merged_on_mesh(weight: Any, down: Any, up: Any, scale: float) -> Any:
    """`merged_weight` of arrays on a mesh, split as the weight. Communicates."""
    to = weight.sharding
    with jax.set_mesh(to.mesh):
        merge = jax.sharding.auto_axes(merged_weight, out_sharding=to)
        return jax.jit(merge, static_argnums=3, out_shardings=to)(weight, down, up, scale)


def low_rank(down: Any, up: Any, einsum: Callable = _exact_einsum) -> Any:
    """A B of stacked layers, [l, ...] as their weight."""
    into, out = "abc"[: down.ndim - 2], "xyz"[: up.ndim - 2]
    return einsum(f"l{into}r,lr{out}->l{into}{out}", down, up)


def on_base(function: Callable, weight: Any) -> Any:
    """`function` of a weight; of one with an adapter, of what is frozen."""
    if isinstance(weight, Adapted):
        return dataclasses.replace(weight, weight=function(weight.weight))
    return function(weight)


def is_adapted(leaf: Any) -> bool:
    return isinstance(leaf, Adapted)


def with_buffers(function: Callable, params: Any, buffers: Any) -> Any:
    """`function(array, buffer)` of parameters and their gradient buffers. What has no buffer is
    frozen, and stays as it is; buffers of adapters are {"down": ..., "up": ...}."""
    if isinstance(params, Adapted):
        own = {name: function(vars(params)[name], buffers[name]) for name in (DOWN, UP)}
        return dataclasses.replace(params, **own)
    if not isinstance(params, Mapping):
        return function(params, buffers)
    return {
        name: with_buffers(function, leaf, buffers[name]) if name in buffers else leaf
        for name, leaf in params.items()
    }


def _chosen(config: AdaptersConfig, names: Iterable[str]) -> list[str]:
    return [
        path for path in filter(is_product, names)
        if is_within(_product(path), config.products)
    ]  # fmt: skip


def _product(path: str) -> str:
    """ "attention/query" of "blocks/attention/query/kernel"."""
    return path.partition("/")[2].rpartition("/")[0]


def contracted(path: str) -> int:
    """How many of a layer's dimensions its product contracts: heads and their size where the output
    of attention is made, else one."""
    return 2 if path.endswith("attention/out/kernel") else 1
