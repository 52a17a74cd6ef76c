"""What can be pruned while a run trains, and what that cannot be combined with."""

from collections.abc import Iterator

from llmx.config import Config
from llmx.model import apply as apply_lib
from llmx.model import families, sparsity
from llmx.model.ranks import is_within
from llmx.runtime import bounds
from llmx.sharding import trees
from llmx.step.transforms import masks
from llmx.step.transforms.masks import FIXED, MOVEMENT, N_M, PruningConfig
from llmx.sync.replicas import MEAN

# Strategies after whose exchange the gradient of the global batch is there.
SUMMED = (MEAN, "int8", "top_k", "power_sgd")


def problems(config: Config) -> Iterator[str]:
    """All problems, each with its remedy."""
    section = config.pruning
    if bounds.problems(section, "pruning."):
        return  # said already
    if section.method == masks.NONE:
        yield from _without_effect(section, [n for n in vars(section) if n != "method"])
        return
    yield from _without_effect(section, _unused(section))
    yield from _schedule(config)
    if config.adapters.rank:
        yield (
            f"pruning.method={section.method!r} with adapters.rank={config.adapters.rank}: what is "
            "pruned is trained, and beside adapters weights are frozen; leave one of them out"
        )
    elif not families.problems(config.model):
        yield from _products(config)
    if section.method == MOVEMENT and config.sync.strategy not in SUMMED:
        yield (
            f"pruning.method='movement' with sync.strategy={config.sync.strategy!r}: no replica "
            f"has the gradient of the whole batch, which scores are made of; use one of "
            f"{', '.join(SUMMED)}, or pruning.method='magnitude'"
        )
    if section.method != FIXED and config.sync.groups > 1:
        yield (
            f"pruning.method={section.method!r} with sync.groups={config.sync.groups}: each group "
            "would choose masks of its own, and one that was gone would miss times of pruning; use "
            "pruning.method='fixed' with the masks of another run, or one group"
        )
    if section.method == FIXED and not (section.masks_from or config.start_from):
        yield (
            "pruning.method='fixed' and neither pruning.masks_from nor start_from: no weight would "
            "be pruned; name a run whose masks are taken, or start_from one with zeros"
        )


def _unused(section: PruningConfig) -> list[str]:
    """Keys that the method does not read."""
    of_schedule = ["begin_step", "end_step", "every"]
    unused = {
        N_M: ["sparsity", "scope", "masks_from"],
        FIXED: ["sparsity", "scope", "pattern", "rewind_to", *of_schedule],
    }
    return unused.get(section.method, ["pattern", "masks_from"])


def _without_effect(section: PruningConfig, names: list[str]) -> Iterator[str]:
    why = f"with pruning.method={section.method!r}: leave it out, or choose another method"
    yield from bounds.without_effect(section, "pruning.", dict.fromkeys(names, why))


def _schedule(config: Config) -> Iterator[str]:
    section = config.pruning
    if section.method == FIXED:
        return
    end = masks.last_step(section, config.steps)
    if section.begin_step > end:
        yield (
            f"pruning.begin_step={section.begin_step} is after pruning.end_step={end}: begin at "
            f"{end} at the latest, there all at once"
        )
    if end > config.steps:
        yield (
            f"pruning.end_step={end} is after the last step, steps={config.steps}: end by "
            f"{config.steps}, or earlier to train what is left"
        )
    if section.rewind_to < 0:
        return
    if section.rewind_to == 0 or section.rewind_to >= end:
        yield (
            f"pruning.rewind_to={section.rewind_to} must be a step from 1 to below the last "
            f"pruning, at {end}; to go back to the first weights start a run with the same seed "
            "and pruning.method='fixed', pruning.masks_from"
        )
    if config.sync.strategy != MEAN:
        yield (
            f"pruning.rewind_to={section.rewind_to} with sync.strategy={config.sync.strategy!r}, "
            "whose state is of weights that are given up: start a run from the early checkpoint, "
            "--config.start_from=WORKDIR@STEP --config.pruning.method=fixed "
            "--config.pruning.masks_from=WORKDIR"
        )
    if config.pipeline.schedule == "pipedream_2bw" and config.mesh.stage > 1:
        yield (
            f"pruning.rewind_to={section.rewind_to} with pipeline.schedule='pipedream_2bw', which "
            "has a gradient of weights that are given up in flight: use another schedule"
        )


def _products(config: Config) -> Iterator[str]:
    section = config.pruning
    shapes, axes = apply_lib.abstract_parameters(config.model)
    of_model = masks.prunable(axes)
    products = {masks.product_of(name) for name in of_model}
    modules = {product.partition("/")[0] for product in products}
    known = sorted(modules | products)
    for name in section.products:
        if not any(is_within(product, (name,)) for product in products):
            yield (
                f"pruning.products names {name!r}, which the model does not have: use some of "
                f"{', '.join(known)}"
            )
    if not section.products:
        yield "pruning.products=() leaves nothing to prune: name products, or pruning.method='none'"
    if section.method != N_M:
        return
    try:
        _, size = masks.parse(section.pattern)
    except ValueError:
        yield (f"pruning.pattern={section.pattern!r} must be 'N:M' with 0 < N < M <= 64, as '2:4'")
        return
    sizes = {name: leaf.shape for name, leaf in trees.named(shapes).items()}
    for name, of in masks.chosen(section, axes).items():
        if (dim := sizes[name][sparsity.contracted_dim(of)]) % size:
            yield (
                f"pruning.pattern={section.pattern!r}: {name} sums over {dim} numbers, which do "
                f"not divide into groups of {size}; leave {masks.product_of(name)} out of "
                "pruning.products, or use another pattern"
            )
