"""Tokens that are seen a few times before the variance is frozen: a bigram model by Zipf's law,
trained by the oracle of `support.replica_oracle`."""

import dataclasses

import numpy as np
import pytest
from support import replica_oracle as oracle

TOKENS, NEXT, REPLICAS, ROWS = 512, 32, 4, 64
SETTINGS = oracle.Settings(steps=1500, warmup=225, rate_warmup=75, decay=0.0)


class Bigrams:
    """Replicas that predict the next token from a table of logits."""

    def __init__(self):
        self.n, self.start = REPLICAS, {"table": np.zeros((TOKENS, NEXT))}
        self.decays = {"table": False}
        random = np.random.default_rng(0)
        chances = np.exp(1.5 * random.normal(size=(TOKENS, NEXT)))
        chances /= chances.sum(1, keepdims=True)
        often = 1 / np.arange(1, TOKENS + 1) ** 1.1
        shape = (SETTINGS.steps, REPLICAS, ROWS)
        self.tokens = random.choice(TOKENS, shape, p=often / often.sum())
        drawn = random.random((*shape, 1))
        self.targets = (chances[self.tokens].cumsum(-1) < drawn).sum(-1).clip(0, NEXT - 1)

    def shares(self, step: int) -> np.ndarray:
        return np.full(REPLICAS, 1 / REPLICAS)

    def gradient(self, step: int, i: int, x: dict) -> dict:
        tokens, found = self.tokens[step, i], np.zeros((TOKENS, NEXT))
        logits = x["table"][tokens]
        each = np.exp(logits - logits.max(1, keepdims=True))
        each /= each.sum(1, keepdims=True)
        each[np.arange(ROWS), self.targets[step, i]] -= 1
        np.add.at(found, tokens, each / ROWS)
        return {"table": found}

    def rare(self) -> np.ndarray:
        seen = np.bincount(self.tokens[: SETTINGS.warmup].ravel(), minlength=TOKENS)
        return (seen > 0) & (seen <= 12)


@pytest.mark.parametrize(("scale", "times"), [("rms", 3), ("mean", 1.4)])
def test_a_frozen_variance_does_not_throw_them_far(scale, times):
    """With the least variance they move as far as under Adam; without it `times` as far."""
    problem = Bigrams()
    rare = problem.rare()
    assert rare.sum() > 10

    def moved(found):
        return np.abs(found[-1]["table"] - found[SETTINGS.warmup]["table"])[rare].max()

    wanted = moved(oracle.gradients(problem, SETTINGS, None))
    settings = dataclasses.replace(SETTINGS, scale=scale)
    found = moved(oracle.one_bit(problem, settings, "adamw")[0])
    without = dataclasses.replace(settings, least=1e-6)
    without = moved(oracle.one_bit(problem, without, "adamw")[0])
    assert found < 1.2 * wanted and without > times * wanted, (wanted, found, without)
