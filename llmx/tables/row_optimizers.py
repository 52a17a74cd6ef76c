"""Optimizers of rows: each has state of its own beside it, and a step updates those it touches.

    sgd          w -= lr g
    adagrad      s += g^2;            w -= lr g / (sqrt(s) + eps)             (Duchi et al. 2011)
    row_adagrad  s += mean(g^2);      the same, one s of a row          (FBGEMM's, arXiv 2101.05615)
    adam         m, v as usual;       w -= lr m^ / (sqrt(v^) + eps), where a step touches the row
                                      ("lazy"), by the number of steps that touched it
    ftrl         n += g^2; z += g - (1/eta - 1/eta') w; w in closed form     (McMahan et al. 2013)
                 1/eta = (eps + sqrt(n)) / lr, eta' of the row's last update: a rate that a
                 schedule has changed moves no row by itself

Letters: R rows that are touched, W width.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from llmx.tables.config import TablesConfig

Slots = dict[str, jax.Array]  # [R, W] or [R, 1], fp32


class RowOptimizer(NamedTuple):
    """What a row keeps, and how rows are updated."""

    slots: Mapping[str, bool]  # name -> whether each number has one, else the row has
    initial: Mapping[str, float]
    # (rows [R, W], slots, gradients [R, W], learning rate) -> (rows, slots)
    update: Callable[[jax.Array, Slots, jax.Array, jax.Array], tuple[jax.Array, Slots]]


def make(config: TablesConfig) -> RowOptimizer:
    """The optimizer of the config."""
    return _MAKERS[config.optimizer](config)


def _sgd(config: TablesConfig) -> RowOptimizer:
    return RowOptimizer({}, {}, lambda rows, slots, g, rate: (rows - rate * g, slots))


def _adagrad(config: TablesConfig, *, whole_row: bool = False) -> RowOptimizer:
    def update(rows, slots, g, rate):
        square = jnp.square(g)
        if whole_row:
            square = square.mean(axis=1, keepdims=True)
        total = slots["squares"] + square
        # A row without any gradient yet stays.
        step = jnp.where(total > 0, g / (jnp.sqrt(total) + config.eps), 0.0)
        return rows - rate * step, {"squares": total}

    return RowOptimizer(
        {"squares": not whole_row}, {"squares": config.initial_square}, update
    )  # fmt: skip


def _row_adagrad(config: TablesConfig) -> RowOptimizer:
    return _adagrad(config, whole_row=True)


def _adam(config: TablesConfig) -> RowOptimizer:
    b1, b2 = config.b1, config.b2

    def update(rows, slots, g, rate):
        count = slots["count"] + 1
        m = b1 * slots["m"] + (1 - b1) * g
        v = b2 * slots["v"] + (1 - b2) * jnp.square(g)
        m_hat, v_hat = m / (1 - b1**count), v / (1 - b2**count)
        rows = rows - rate * m_hat / (jnp.sqrt(v_hat) + config.eps)
        return rows, {"m": m, "v": v, "count": count}

    return RowOptimizer(
        {"m": True, "v": True, "count": False}, {"m": 0.0, "v": 0.0, "count": 0.0}, update
    )


def _ftrl(config: TablesConfig) -> RowOptimizer:
    def update(rows, slots, g, rate):
        is_on, begun = rate > 0, slots["rate"] > 0
        rate = jnp.where(is_on, rate, 1.0)
        n = slots["n"] + jnp.square(g)
        of_root = lambda n, rate: (config.eps + jnp.sqrt(n)) / rate  # noqa: E731
        before, now = of_root(slots["n"], jnp.where(begun, slots["rate"], rate)), of_root(n, rate)
        # Rows that begin elsewhere than at 0 have the z that puts them there.
        z = jnp.where(begun, slots["z"], -rows * (before + config.l2)) + g - (now - before) * rows
        pulled = jnp.sign(z) * config.l1 - z
        new = jnp.where(jnp.abs(z) <= config.l1, 0.0, pulled / (now + config.l2))
        new_slots = {"z": z, "n": n, "rate": jnp.broadcast_to(rate, slots["rate"].shape)}
        # Without a rate nothing moves.
        keep = lambda new, old: jnp.where(is_on, new, old)  # noqa: E731
        return keep(new, rows), {name: keep(new_slots[name], slots[name]) for name in new_slots}

    return RowOptimizer(
        {"z": True, "n": True, "rate": False}, {"z": 0.0, "n": 0.0, "rate": 0.0}, update
    )


_MAKERS = {
    "sgd": _sgd, "adagrad": _adagrad, "row_adagrad": _row_adagrad, "adam": _adam, "ftrl": _ftrl,
}  # fmt: skip
