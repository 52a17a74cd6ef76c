"""The stage of a recipe that puts two factors of low rank in the place of a run's products."""

import dataclasses
from collections.abc import Iterator

import jax
import numpy as np

from llmx import config as config_lib
from llmx.compress import calibration, low_rank, saved
from llmx.model import adapters, ranks
from llmx.model.apply import Apply
from llmx.model.families import ModelConfig
from llmx.runtime import launch
from llmx.runtime.bounds import bounded, choice
from llmx.sharding import trees


@dataclasses.dataclass
class LowRank:
    """Products become two factors; one of rank, share and energy says how large."""

    # modules or products: "attention", "mlp/up"
    products: tuple[str, ...] = ranks.MODULES
    rank: int = bounded(0, at_least=0)  # of each product
    share: float = bounded(0.0, at_least=0, below=1)  # of each product's parameters
    energy: float = bounded(0.0, at_least=0, at_most=1)  # of each product's squared singular values
    # "whitened" by the inputs of calibration text, "scaled" by their magnitudes, or "plain"
    method: str = choice(
        low_rank.WHITENED, (low_rank.WHITENED, low_rank.SCALED, low_rank.PLAIN)
    )  # fmt: skip
    calibration_batches: int = bounded(8, at_least=1)  # of the training text


def run(job) -> None:
    """Puts two factors in the place of the products that a recipe names."""
    options, opened = job.options, saved.opened(job.source)
    model = opened.config.model
    named = trees.named(jax.device_get(opened.params))
    statistics = {}
    if options.method != low_rank.PLAIN:
        batches = saved.training_batches(opened, options.calibration_batches)
        loss = opened.recipe.loss
        statistics = calibration.statistics(loss.apply, opened.params, batches, loss.execution)
    sizes, found = ranks.sizes_of_products(model), {}
    for product in _chosen(model, options.products):
        paths = [path for path in named if path.partition("/")[2] == f"{product}/kernel"]
        spectra = {path: _spectra(named[path], path, statistics, options.method) for path in paths}
        every = [one for of_path in spectra.values() for one in of_path]
        rank = low_rank.rank_of(
            sizes[product], every, rank=options.rank, share=options.share, energy=options.energy
        )
        if not low_rank.saves(sizes[product], rank):
            launch.note(f"{product} stays one weight: rank {rank} would not make it smaller")
            continue
        found[product] = rank
        for path in paths:
            parts = low_rank.factored_leaves(
                named.pop(path), adapters.contracted(path), spectra[path], rank
            )
            named |= {f"{path}/{name}": leaf for name, leaf in parts.items()}
    config = config_lib.load_run(job.source)
    config.model = dataclasses.replace(config.model, ranks=ranks.texts(ranks.of(model) | found))
    saved.written(config, trees.nest(named), job.folder, origin=job.source)


def _spectra(leaf: np.ndarray, path: str, statistics: dict, method: str) -> list:
    """Of each layer of a stacked weight."""
    inputs = int(np.prod(leaf.shape[1 : 1 + adapters.contracted(path)]))
    sides = low_rank.sides_of(statistics.get(path), method) or [None] * len(leaf)
    return [
        low_rank.spectrum(layer.reshape(inputs, -1), side)
        for layer, side in zip(leaf, sides, strict=True)
    ]


def _chosen(model: ModelConfig, products: tuple[str, ...]) -> list[str]:
    """Products of one weight that the names mean."""
    return [
        product for product in ranks.sizes_of_products(model)
        if product not in ranks.of(model)
        and ranks.is_within(product, products)
    ]  # fmt: skip


def problems(model: ModelConfig, options: LowRank) -> Iterator[str]:
    """What is wrong with factors of a model, each with its remedy."""
    given = [name for name in ("rank", "share", "energy") if getattr(options, name)]
    if len(given) != 1:
        yield f"give one of rank, share and energy: {', '.join(given) or 'none'} is given"
    for name in options.products:
        if not _chosen(model, (name,)):
            known = _chosen(model, ranks.MODULES)
            yield (
                f"products names {name!r}, which has no product of one weight: use some of "
                f"{', '.join((*ranks.MODULES, *known))}"
            )
    if not options.products:
        yield "products=() leaves nothing to do: name products, or leave the stage out"
    if options.method != low_rank.PLAIN:
        for text in calibration.problems(Apply(model)):
            yield f"method={options.method!r}: {text}, method='plain'"


def model_of(model: ModelConfig, options: LowRank) -> ModelConfig:
    """With ranks of all that is chosen, if only of size one where they are not known yet."""
    found = dict.fromkeys(_chosen(model, options.products), options.rank or 1)
    sizes = ranks.sizes_of_products(model)
    found = {name: rank for name, rank in found.items() if low_rank.saves(sizes[name], rank)}
    return dataclasses.replace(model, ranks=ranks.texts(ranks.of(model) | found))
