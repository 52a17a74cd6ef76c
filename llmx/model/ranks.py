"""Which products of a model are two factors, by `ModelConfig.ranks`: pure data, no jax.

A product x W of rank r is (x A) B, A [in, r] and B [r, out]: r (in + out) parameters, and as many
multiply-adds of a token, in the place of in * out. Its kernel in the parameter tree is
{"down": A, "up": B}. Layers are stacked and scanned, so a product has one rank in all layers.

Letters: D width, F mlp_dim, N num_heads, K num_kv_heads, H head_dim, R and Q latents.
"""

from collections.abc import Iterable, Sequence
from typing import Any

# The names of products in a layer, and their factors in the tree.
MODULES = ("attention", "mlp")
DOWN, UP = "down", "up"
Sizes = tuple[int, int]


def sizes_of_products(model: Any) -> dict[str, Sizes]:
    """(inputs, outputs) of each product of a block that may be two factors, by name: those of the
    blocks, and of dense first layers in the names that these have.

    Not the experts' own, which are one array of all experts, nor the one that makes keys and values
    of a latent: decoding splits it.
    """
    D, H, N, K = model.width, model.head_dim, model.num_heads, model.num_kv_heads
    query, key = (D, N * H), (D, K * H)
    attention = {"query": query, "key": key, "value": key, "out": query[::-1]}
    if model.kv_latent:
        R, Q, P, V = model.kv_latent, model.query_latent, model.rope_dim, model.value_dim
        attention = {"query": (Q or D, N * H), "down": (D, R + P), "out": (N * V, D)}
        attention |= {"query_down": (D, Q)} if Q else {}
    found = {f"attention/{name}": sizes for name, sizes in attention.items()}
    if not model.num_experts or model.num_first:
        found |= _of_mlp("mlp", D, model.mlp_dim, model.gated_mlp)
    if model.num_experts and model.shared_dim:
        found |= _of_mlp("mlp/shared", D, model.shared_dim, model.gated_mlp)
    return found


def _of_mlp(name: str, width: int, hidden: int, gated: bool) -> dict[str, Sizes]:
    inward = ("gate", "up") if gated else ("up",)
    return {f"{name}/{one}": (width, hidden) for one in inward} | {f"{name}/down": (hidden, width)}


def is_within(product: str, names: Iterable[str]) -> bool:
    """Whether a product, "mlp/up", is one of these or of one of these modules, "mlp"."""
    return any(product == name or product.startswith(f"{name}/") for name in names)


def parse(texts: Sequence[str]) -> dict[str, int]:
    """{"mlp": 32} of ("mlp=32",). Raises ValueError for what is no such text."""
    found = {}
    for text in texts:
        name, _, rank = (part.strip() for part in text.partition("="))
        if not name or not rank.isdecimal() or int(rank) < 1:
            raise ValueError(
                f"model.ranks has {text!r}: write a product or a module and its rank, as "
                "'attention/query=16' or 'mlp=32'"
            )
        found[name] = int(rank)
    return found


def of(model: Any) -> dict[str, int]:
    """The rank of each product that is two factors, by its name: "attention/query". Of two texts
    that name a product the later holds."""
    found = {}
    for name, rank in parse(model.ranks).items():
        for product in sizes_of_products(model):
            if is_within(product, (name,)):
                found[product] = rank
    return found


def num_parameters(sizes: Sizes, rank: int | None) -> int:
    """Of a product, and of its two factors with a rank: what a token is multiplied with."""
    inputs, outputs = sizes
    return inputs * outputs if not rank else rank * (inputs + outputs)


def texts(by_product: dict[str, int]) -> tuple[str, ...]:
    """`ModelConfig.ranks` of products by name, each by itself."""
    return tuple(f"{product}={rank}" for product, rank in sorted(by_product.items()))


def problems(model: Any) -> list[str]:
    """All that is wrong with `ModelConfig.ranks`, each with its remedy."""
    known, found = sizes_of_products(model), []
    for text in model.ranks:
        try:
            [(name, rank)] = parse((text,)).items()
        except ValueError as error:
            found.append(str(error))
            continue
        named = {
            product: min(sizes) for product, sizes in known.items() if is_within(product, (name,))
        }
        if not named:
            found.append(
                f"model.ranks names {name!r}, which has no product that can be two factors: use "
                f"some of {', '.join((*MODULES, *known))}"
            )
        elif rank > min(named.values()):
            least = min(named, key=named.get)
            found.append(
                f"model.ranks={text!r} is above {named[least]}, which is the rank of {least}: use "
                f"at most {named[least]}"
            )
    return found
