"""The products of experts, of rows in blocks on one device, and their gradients.

One contract, and two forms of it: block by block in ordinary products, which is the reference, and
kernels on TPU. Both take a part of an expert's width at a time: so what is between products,
[R, F], and gathered weights exist for one part, and results are sums over the parts.

Letters: R slots of rows in blocks, b rows of a block, E experts of this device, D width, F
expert_dim or a part of it.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from llmx.model.activations import hidden
from llmx.model.experts import grouped, kernels
from llmx.model.experts.grouped import Blocks

# Parts of an expert's width, of at least so many columns, in whole lanes.
MOST_PARTS, LEAST_COLUMNS = 4, 2048


def parts(width: int) -> tuple[slice, ...]:
    """The parts of an expert's width on a device."""
    for number in range(MOST_PARTS, 1, -1):
        size, rest = divmod(width, number)
        if size >= LEAST_COLUMNS and not rest and size % kernels.LANES == 0:
            return tuple(slice(first, first + size) for first in range(0, width, size))
    return (slice(0, width),)


def has_kernels(device_kind: str) -> bool:
    """Whether the kernels' blocks fit into the memory of this chip's core."""
    return device_kind.startswith(tuple(kernels.VMEM))


class Weights(NamedTuple):
    """Of all experts of a layer, or of a device, or a part of their width."""

    gate: Array | None  # [E, D, F]; None where the MLP is not gated
    up: Array  # [E, D, F]
    down: Array  # [E, F, D], as a parameter; [E, D, F] in products and their gradients
    gate_bias: Array | None = None  # [E, F]; None where there are none
    up_bias: Array | None = None  # [E, F]
    down_bias: Array | None = None  # [E, D]

    @property
    def inward(self) -> list[tuple[Array, Array | None]]:
        """What a token is multiplied with, each with its bias."""
        pairs = [(self.gate, self.gate_bias), (self.up, self.up_bias)]
        return [(weight, bias) for weight, bias in pairs if weight is not None]

    @classmethod
    def of_inward(cls, inward: list, down: Array, biases: list) -> "Weights":
        """From lists in the order of `inward`: one or two, and as many biases or none."""
        gate, up = (None, *inward)[-2:]
        gate_bias, up_bias = (None, None, *biases)[-2:]
        return cls(gate, up, down, gate_bias, up_bias)


@dataclasses.dataclass(frozen=True)
class Products:
    """Products of rows in these blocks.

    weights: gathered, each matrix [E, D, F]: so all are gathered, and their gradients scattered,
    along the same dimension, which is not the last. Not the bias of `down`, which is no part's.
    total: of the parts before, or None; in fp32 where there are several parts.
    """

    activation: str
    reduce: jnp.dtype  # of weight gradients
    device_kind: str  # jax's name of the chip
    by_kernels: bool
    rows: float  # in blocks in use, as expected
    several: bool  # parts

    def forward(self, x_RD: Array, weights: Weights, of: Blocks, total: Array | None) -> Array:
        """The results of all rows, [R, D], each times 1."""
        if not self.by_kernels:

            def expert(x_bD, weights):
                products = [_onto(bias, _times(x_bD, weight)) for weight, bias in weights.inward]
                hidden_bF = hidden(self.activation, *products)
                return _times(hidden_bF, weights.down, self._sum(x_bD), transposed=True)

            return _onto(total, grouped.by_block(expert, x_RD, weights, of))
        hidden_RF = hidden(self.activation, *self._inward(x_RD, weights, of))
        return self._product(
            hidden_RF, weights.down, of, dtype=self._sum(x_RD), onto=total, transposed=True
        )

    def backward(
        self, x_RD: Array, gradient_RD: Array, weights_R: Array, weights: Weights, of: Blocks,
        total: tuple | None,
    ) -> tuple[tuple[Array, Array], Weights]:  # fmt: skip
        """Gradients of rows [R, D] and of their weights [R], fp32; and those of `weights`.

        gradient_RD: of each row's token; weights_R: what a row's result is multiplied with, fp32.
        """
        form = self._by_kernels if self.by_kernels else self._by_block
        return form(x_RD, gradient_RD, weights_R, weights, of, total or (None, None))

    def _by_block(self, x_RD, gradient_RD, weights_R, weights, of, total):
        def expert(rows, weights):
            x_bD, gradient_bD, weights_b = rows
            products = [_onto(bias, _times(x_bD, weight)) for weight, bias in weights.inward]
            unweighted_bF = _times(gradient_bD, weights.down)
            hidden_bF, to_products, weight_b = self._between(products, unweighted_bF, weights_b)
            x_terms = [
                _times(to, weight, self._sum(x_bD), transposed=True)
                for to, (weight, _) in zip(to_products, weights.inward, strict=True)
            ]
            biases = []
            if weights.up_bias is not None:
                biases = [jnp.sum(to, axis=0, dtype=jnp.float32) for to in to_products]
            terms = [_term(x_bD, to) for to in to_products]
            terms = Weights.of_inward(terms, _term(gradient_bD, hidden_bF), biases)
            return (functools.reduce(jnp.add, x_terms), weight_b), terms

        rows, sums = grouped.by_block_with_sums(
            expert, (x_RD, gradient_RD, weights_R), weights, of, self.reduce
        )
        return tuple(map(_onto, total, rows)), sums

    def _by_kernels(self, x_RD, gradient_RD, weights_R, weights, of, total):
        num_experts = weights.down.shape[0]
        products = self._inward(x_RD, weights, of)
        unweighted_RF = self._product(gradient_RD, weights.down, of)
        hidden_RF, to_products, weight_R = self._between(products, unweighted_RF, weights_R)
        x_terms, weight_total = total
        last = len(products) - 1
        for number, (to, (weight, _)) in enumerate(zip(to_products, weights.inward, strict=True)):
            dtype = self._sum(x_RD) if number == last else jnp.float32
            x_terms = self._product(to, weight, of, transposed=True, dtype=dtype, onto=x_terms)
        sums = functools.partial(
            kernels.sums, of=of, num_experts=num_experts, dtype=self.reduce,
            device_kind=self.device_kind, rows=self.rows,
        )  # fmt: skip
        biases = []
        if weights.up_bias is not None:
            biases = [self.sums_of_rows(to, of, num_experts) for to in to_products]
        inward = [sums(x_RD, to) for to in to_products]
        gradients = Weights.of_inward(inward, sums(gradient_RD, hidden_RF), biases)
        return (x_terms, _onto(weight_total, weight_R)), gradients

    def _inward(self, x_RD, weights: Weights, of: Blocks) -> list[Array]:
        """The products with gate and up, or with up alone, biases added."""
        return [
            _onto(of_rows(bias, of), self._product(x_RD, weight, of))
            for weight, bias in weights.inward
        ]

    def sums_of_rows(self, rows_RF: Array, of: Blocks, num_experts: int) -> Array:
        """Over the rows of each expert, [E, F]: gradients of biases."""
        of_blocks = rows_RF.reshape(-1, of.size, rows_RF.shape[-1])
        of_blocks = of_blocks.sum(axis=1, dtype=jnp.float32)
        sums = jax.ops.segment_sum(of_blocks, of.expert_of_block, num_experts)
        return sums.astype(self.reduce)

    def _between(self, products, unweighted_RF, weights_R):
        """The hidden rows times their weights, the gradients of `products`, and of the weights.

        unweighted_RF: the gradient of each hidden row, were its weight 1: its product with the row
        is the weight's gradient.
        """
        hidden_RF, pull = jax.vjp(functools.partial(hidden, self.activation), *products)
        times = lambda rows: (rows * weights_R[:, None]).astype(rows.dtype)  # noqa: E731
        weight_R = jnp.einsum(
            "rf,rf->r", unweighted_RF, hidden_RF, preferred_element_type=jnp.float32
        )
        return times(hidden_RF), pull(times(unweighted_RF)), weight_R

    def _sum(self, x: Array) -> jnp.dtype:
        """Of sums over the width."""
        return jnp.dtype(jnp.float32) if self.several else x.dtype

    def _product(self, x_RK, weights, of, *, dtype=None, **keys) -> Array:
        return kernels.product(
            x_RK, weights, of, dtype=dtype or x_RK.dtype, device_kind=self.device_kind,
            rows=self.rows, **keys,
        )  # fmt: skip


def of_rows(bias_EF: Array | None, of: Blocks) -> Array | None:
    """The bias of each row's expert, [R, F]."""
    return None if bias_EF is None else jnp.repeat(bias_EF[of.expert_of_block], of.size, axis=0)


def _onto(total: Array | None, term: Array) -> Array:
    return term if total is None else total + term


def _times(x_bD: Array, weight_DF: Array, dtype=None, *, transposed: bool = False) -> Array:
    """x times a weight; `transposed`: [b, F] times one of [D, F]."""
    expression = "bd,fd->bf" if transposed else "bd,df->bf"
    return jnp.einsum(expression, x_bD, weight_DF, preferred_element_type=dtype or x_bD.dtype)


def _term(x_bD: Array, gradient_bF: Array) -> Array:
    """Of a weight gradient, the sum over the rows of a block, fp32 [D, F]."""
    return jnp.einsum("bd,bf->df", x_bD, gradient_bF, preferred_element_type=jnp.float32)
