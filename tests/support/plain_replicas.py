"""Plain loops over one device's gradients, with NumPy and optax: what replicas do, by the papers.

A small model with some tokens that never occur, its batches, and for each strategy a loop that
takes each replica's gradient by itself.
"""

import dataclasses
import functools

import jax
import numpy as np
import optax
from support import packed, plain_signs, runs

from llmx import sharding
from llmx.model import apply, families
from llmx.sharding import trees
from llmx.step import optimizers
from llmx.sync import reshard
from llmx.sync.replicas import VARIANCE

BATCH, LENGTH, STEPS, WARMUP = 16, 16, 6, 2
UNUSED = 80  # tokens from here on never occur: their rows have no gradient
ESTIMATE = 0.05  # relative: three standard deviations of an estimated norm (`sync.sketch`)
CLIP = 0.5  # gradients are longer, so that it matters who clips what

# Learning rates that halve within the six steps; see `runs.PARITY_OPTIMIZER` for eps.
OPTIMIZER = optimizers.OptimizerConfig(learning_rate=1e-3, warmup_steps=1, eps=1e-3)
# 0/1 Adam takes the signs of differences of parameters: steps are to be long against a rounding of
# these, and to be zero where there is no gradient.
ZERO_ONE = dataclasses.replace(OPTIMIZER, learning_rate=3e-2, weight_decay=0.0)
LAMB = dataclasses.replace(OPTIMIZER, name="lamb", learning_rate=1e-2)


def batches() -> list[dict]:
    return packed.batches(STEPS, rows=BATCH, length=LENGTH, vocab=UNUSED)


MODEL = families.preset(
    "llama3", vocab_size=257, vocab_multiple=8, width=32, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=8, mlp_dim=64,
)  # fmt: skip


def make_recipe(
    strategy: str, mesh: dict | None = None, layout: str = "ddp", *,
    optimizer: optimizers.OptimizerConfig = OPTIMIZER, sync: dict | None = None, **keys,
):  # fmt: skip
    """The model on four replicas, or on a mesh; `sync`: values of the strategy's section."""
    sync = {f"sync__{name}": value for name, value in (sync or {}).items()}
    optimizer = dataclasses.replace(optimizer, clip_norm=CLIP)
    return runs.make_recipe(
        runs.make_config(
            MODEL,
            mesh={"data": 4} if mesh is None else mesh,
            steps=STEPS,
            batch__size=BATCH,
            batch__sequence_length=LENGTH,
            sharding__layout=layout,
            optimizer=optimizer,
            guard__on_bad_step="skip",
            sync__strategy=strategy,
            **sync | keys,
        )
    )


@dataclasses.dataclass(frozen=True)
class Plain:
    """One device: parameters to begin with, and gradients of any rows."""

    params: dict  # on the host
    gradient: object  # (params, batch) -> (loss, tokens, gradients) on the host

    def of_rows(self, params, batch: dict, num: int) -> list[tuple]:
        """What each of `num` replicas has: (loss, share of the tokens, gradient of its mean).

        Parameters: the same for all, or a list.
        """
        rows = BATCH // num
        parts = [{k: a[i * rows : (i + 1) * rows] for k, a in batch.items()} for i in range(num)]
        params = params if isinstance(params, list) else [params] * num
        made = [self.gradient(p, part) for p, part in zip(params, parts, strict=True)]
        total = sum(tokens for _, tokens, _ in made)
        return [(loss, tokens / total, grads) for loss, tokens, grads in made]


def make() -> Plain:
    """The model of `make_recipe`, as it begins."""
    recipe = make_recipe("mean", {})
    take = runs.make_gradient(recipe)

    def gradient(params, batch):
        with jax.set_mesh(recipe.mesh):
            to = jax.tree.map(lambda leaf: leaf.sharding, recipe.abstract.params)
            loss, tokens, grads = take(jax.device_put(params, to), runs.put_batch(recipe, batch))
        return float(loss), float(tokens), jax.device_get(grads)

    return Plain(jax.device_get(recipe.init(0).params), gradient)


def times(tree, factor):
    return jax.tree.map(lambda leaf: np.float32(factor) * leaf, tree)


def added(trees):
    return jax.tree.map(lambda *leaves: np.sum(leaves, axis=0, dtype="f4"), *trees)


def minus(tree, other, factor=1.0):
    """tree - factor * other."""
    return jax.tree.map(lambda a, b: a - np.float32(factor) * b, tree, other)


def replica(tree, i: int):
    """Of arrays [n, ...] replica i's."""
    return jax.tree.map(lambda leaf: leaf[i], jax.device_get(tree))


def mean_of(trees):
    return times(added(trees), 1 / len(trees))


def norm_of(tree) -> float:
    return float(optax.tree.norm(tree))


def clipped(grads):
    return times(grads, CLIP / max(norm_of(grads), CLIP))


def shares_of(made):
    return [times(grads, share) for _, share, grads in made]


def loss_of(made) -> float:
    return sum(loss * share for loss, share, _ in made)


@functools.cache
def updater(name: str, total: int = STEPS):
    """A jitted (gradient, optimizer state, parameters) -> (parameters, state)."""
    config = {"adamw": OPTIMIZER, "lamb": LAMB}[name]
    optimizer = optimizers.make(config, axes=AXES, total_steps=total).whole

    def update(grads, state, params):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return optimizer, jax.jit(update)


_, AXES = apply.abstract_parameters(MODEL)
NAMES = {
    sharding.path_name(path): axes
    for path, axes in jax.tree_util.tree_leaves_with_path(
        AXES, is_leaf=lambda leaf: isinstance(leaf, tuple)
    )
}


def plain_mean(plain: Plain, steps: int, name: str = "adamw"):
    """(losses, parameters, optimizer state) of replicas that sum their gradients."""
    optimizer, update = updater(name)
    params, state, losses = plain.params, optimizer.init(plain.params), []
    for batch in batches()[:steps]:
        made = plain.of_rows(params, batch, 4)
        losses.append(loss_of(made))
        params, state = update(clipped(added(shares_of(made))), state, params)
    return losses, jax.device_get(params), jax.device_get(state)


def chosen(fragments, num: int, new, old):
    """`new` in these of `num` fragments of the parameters, `old` elsewhere."""

    def one(path, new, old):
        layered = path[0].key == "blocks"
        rows = [row % num in fragments for row in range(len(new))] if layered else 0 in fragments
        there = np.reshape(rows, (-1, *(1,) * (np.ndim(new) - 1))) if layered else rows
        return np.where(there, new, old)

    return jax.tree_util.tree_map_with_path(one, new, old)


def seen_by(state) -> tuple[dict, dict] | None:
    """What exchanges of signs have left in a run: of replicas [n, ...], and of their servers."""
    kept = jax.device_get(getattr(state.sync, "residuals", None))
    if kept is None:
        return None
    shapes = {name: leaf.shape[1:] for name, leaf in kept.errors.items()}
    return kept.errors, {n: reshard.whole(a, shapes[n]) for n, a in kept.server.items()}


class PlainSigns:
    """Exchanges of trees in signs, with the errors of four replicas and their servers."""

    def __init__(self, like):
        like = trees.named(like)
        self.errors = {name: np.zeros((4, *leaf.shape), "f4") for name, leaf in like.items()}
        self.server = {name: np.zeros(leaf.shape, "f4") for name, leaf in like.items()}

    def __call__(self, terms: list[dict], live: dict, seen=None) -> dict:
        """`seen`: errors and servers' errors by name, of the run (`plain_signs.exchanged`)."""
        sums = {}
        for name, axes in NAMES.items():
            stacked = np.stack([np.asarray(trees.named(term)[name], "f4") for term in terms])
            sums[name], self.errors[name], self.server[name] = plain_signs.exchanged(
                stacked, self.errors[name], self.server[name], trees.named(live)[name], axes,
                seen=seen and tuple(each[name] for each in seen),
            )  # fmt: skip
        return trees.unnamed(sums, live)


def least_of(nu, count: int):
    """A tenth of the usual size of each layer, of a second moment of `count` updates."""

    def one(path, v):
        rows = v.reshape(len(v) if path[0].key == "blocks" else 1, -1)
        means = [row[row > 0].mean() for row in rows]
        least = 0.1 * np.sqrt(np.float32(means) / (1 - OPTIMIZER.beta2**count))
        return least.reshape(-1, *[1] * (v.ndim - 1)).astype("f4")

    return jax.tree_util.tree_map_with_path(one, nu)


def size_of(nu, count: int, least):
    """What Adam divides by where the second moment is frozen."""
    bias = np.float32(1 - OPTIMIZER.beta2**count)
    one = lambda v, least: np.maximum(np.sqrt(v / bias), least) + np.float32(1e-3)  # noqa: E731
    return jax.tree.map(one, nu, least)


def learning_rate(config: optimizers.OptimizerConfig, count: int) -> float:
    return float(optimizers.make_schedule(config, total_steps=STEPS)(count))


def decayed(update, params, config: optimizers.OptimizerConfig = OPTIMIZER):
    decay = lambda u, p, on: u + np.float32(config.weight_decay) * p if on else u  # noqa: E731
    return jax.tree.map(decay, update, params, optimizers.decay_mask(AXES))


def plain_one_bit(plain: Plain, config: optimizers.OptimizerConfig, norms: list[float], seen):
    """1-bit Adam or LAMB: (losses, parameters, momentum, the exchange).

    Of the compressed steps, `norms` by which they clip, estimates of the mean's; and `seen`, what
    the run's exchanges left (`seen_by`).
    """
    b1, b2 = np.float32(config.b1), np.float32(config.beta2)
    losses, params, state = plain_mean(plain, WARMUP, config.name)
    mu, nu = state[0].mu, state[0].nu
    fresh, signs = nu, PlainSigns(plain.params)
    live, bias = jax.tree.map(lambda v: v > 0, nu), np.float32(1 - config.beta2**WARMUP)
    # LAMB: the average of trust ratios so far, and the factors on it since.
    average = trees.named(state[2].average) if config.name == "lamb" else {}
    average = {name: ratio / (1 - 0.9**WARMUP) for name, ratio in average.items()}
    factor = {name: np.ones_like(ratio) for name, ratio in average.items()}
    for number, batch in list(enumerate(batches()))[WARMUP:]:
        made = plain.of_rows(params, batch, 4)
        losses.append(loss_of(made))
        norm, terms, least = norms[number - WARMUP], [], least_of(nu, WARMUP)
        size = size_of(nu, WARMUP, least)
        assert abs(norm / norm_of(added(shares_of(made))) - 1) < ESTIMATE
        for share in shares_of(made):
            g = times(share, CLIP / max(norm, CLIP))
            m = jax.tree.map(lambda g, m: b1 * m / 4 + (1 - b1) * g, g, mu)
            terms.append(jax.tree.map(np.divide, m, size))
        sums, lives = signs(terms, live, seen[number - WARMUP]), trees.named(live)
        direction = jax.tree.map(lambda u, on: np.where(on, u, 0), sums, live)
        # Others live from their first gradient on.
        first = lambda u, on, v, least: np.where(~on & (u > 0), bias * least**2, v)  # noqa: E731
        nu = jax.tree.map(first, sums, live, nu, least)
        live = jax.tree.map(lambda u, on: on | (u > 0), sums, live)
        before, mu = mu, jax.tree.map(np.multiply, direction, size)
        update = decayed(times(direction, 1 / (1 - b1 ** (number + 1))), params)
        if average:
            shown = jax.tree.map(lambda m, old: (m - b1 * old) / (1 - b1), mu, before)
            fresh = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, fresh, shown)
            now = size_of(fresh, number + 1, least)
            ratios, scaled = trees.named(jax.tree.map(np.divide, size, now)), {}
            bare = trees.named(times(direction, 1 / (1 - b1 ** (number + 1))))
            for name, u in trees.named(update).items():
                inner = tuple(range(average[name].ndim, u.ndim))
                aged = np.mean(ratios[name], axis=inner, where=lives[name])
                own = np.sqrt(np.sum(bare[name] ** 2, inner) / np.sum(u**2, inner)).clip(0, 1)
                wanted = (own * aged + 1 - own).clip(0.5, 4)
                factor[name] = np.clip(wanted, 0.9 * factor[name], 1.1 * factor[name])
                scale = average[name] * factor[name]
                scaled[name] = u * scale.reshape(*scale.shape, *(1,) * len(inner))
            update = trees.unnamed(scaled, update)
        params = minus(params, update, learning_rate(config, number))
    return losses, params, mu, signs


def plain_zero_one(plain: Plain, recipe, seen):
    """0/1 Adam: (losses, parameters, each replica's momentum). `seen`: as of `seen_by`, by step."""
    b1, b2 = np.float32(OPTIMIZER.b1), np.float32(OPTIMIZER.beta2)
    zeros = times(plain.params, 0)
    anchor, own, mus, nu = plain.params, [plain.params] * 4, [zeros] * 4, zeros
    signs, losses, moments, sums = PlainSigns(plain.params), [], 0, np.zeros(2)
    for number, batch in enumerate(batches()):
        made = plain.of_rows(own, batch, 4)
        losses.append(loss_of(made))
        grads = [clipped(grads) for _, _, grads in made]
        if runs.phase(recipe, number) == VARIANCE:
            agreed = added([times(g, made[i][1]) for i, g in enumerate(grads)])
            nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, nu, agreed)
            moments += 1
        live, size = jax.tree.map(lambda v: v > 0, nu), size_of(nu, moments, least_of(nu, moments))
        rate, corrected = learning_rate(ZERO_ONE, number), 1 - OPTIMIZER.b1 ** (number + 1)
        direction = lambda m, size, on: np.where(on, m / size, np.float32(0))  # noqa: E731
        for i, g in enumerate(grads):
            mus[i] = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, mus[i], g)
            update = jax.tree.map(direction, times(mus[i], 1 / corrected), size, live)
            own[i] = minus(own[i], decayed(update, own[i], ZERO_ONE), rate)
        sums += rate, rate / corrected
        if runs.outer_after(recipe, number):
            bare = minus(anchor, decayed(zeros, anchor, ZERO_ONE), sums[0])
            exchanged = signs([times(minus(bare, each), 1 / 4) for each in own], live, seen[number])
            moved = jax.tree.map(lambda u, on: np.where(on, u, 0), exchanged, live)
            where = lambda on, new, old: jax.tree.map(np.where, on, new, old)  # noqa: E731
            anchor = minus(bare, moved)
            own = [anchor] * 4
            momentum = times(jax.tree.map(np.multiply, moved, size), 1 / sums[1])
            mus = [where(live, momentum, mu) for mu in mus]
            sums = np.zeros(2)
    return losses, anchor, mus
