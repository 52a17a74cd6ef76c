"""What `expert` splits, and what routed experts cannot be combined with."""

from collections.abc import Iterator

from llmx.config import Config
from llmx.model.experts import config as experts_config
from llmx.runtime import bounds


def problems(config: Config, sizes: dict[str, int]) -> Iterator[str]:
    """All problems, each with its remedy. `sizes`: of the mesh axes."""
    model, experts, ways = config.model, config.experts, sizes["expert"]
    E = model.num_experts
    if not E:
        return
    if E % ways:
        yield (
            f"model.num_experts={E} does not divide over mesh.expert={ways}: use mesh.expert in "
            f"{bounds.divisors(E, min(E, 4096))}"
        )
    if experts.dispatch == experts_config.DENSE and ways > 1:
        yield (
            f"experts.dispatch='dense' with mesh.expert={ways}: each device computes all experts; "
            "use mesh.expert=1, or dispatch='dropless'"
        )
    if config.sharding.turns > 1:
        yield (
            f"sharding.turns={config.sharding.turns} with model.num_experts={E}: loads of experts "
            "are of all tokens of a row; use sharding.turns=1"
        )
    if config.products.format or config.products.gather:
        yield (
            f"products.format={config.products.format!r}, products.gather="
            f"{config.products.gather!r} with model.num_experts={E}: products of experts are not "
            "rounded; leave both out"
        )
    if experts.balance == experts_config.BATCH and config.sync.strategy != "mean":
        yield (
            f"experts.balance='batch' with sync.strategy={config.sync.strategy!r}, whose replicas "
            "know their own loads only: use experts.balance='sequence'"
        )
    if experts.bias_rate and experts.dispatch == experts_config.CAPACITY:
        yield (
            f"experts.bias_rate={experts.bias_rate} with experts.dispatch='capacity': loads are "
            "then of the tokens that experts take, and not of those that want them; use "
            "dispatch='dropless', or experts.balance_weight with bias_rate=0"
        )
    if experts.bias_rate and config.sync.strategy != "mean":
        yield (
            f"experts.bias_rate={experts.bias_rate} with sync.strategy="
            f"{config.sync.strategy!r}, whose replicas know their own loads only: use strategy "
            "'mean', or experts.balance='sequence' with bias_rate=0"
        )
