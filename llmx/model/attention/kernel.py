"""What every attention kernel is: two functions, from which attention over several devices is put
together as it is on one.

Letters: B batch, T query positions, S key/value positions, N query heads, K key/value heads, H head
size.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from llmx.model import remat
from llmx.model.attention.masks import Mask, Scores

# The log-sum-exp of a query that sees nothing is at or below this; its output is finite.
NOTHING = -1e30


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Attention of some queries to some keys, on one device.

    forward(query, key, value, mask, scores, device_kind=) -> (out [B, T, N, H], log-sum-exp of the
      scores, fp32 [B, N, T]).
    backward(query, key, value, mask, scores, out, lse, gradient, device_kind=) -> gradients of
      query, key and value. `out` and `lse` are those over all keys that the queries see, of which
      the keys given here may be a part: so the gradients of all parts add up to the whole.
      None: by automatic differentiation of `forward`.

    Both raise NotImplementedError for what they do not do, `forward` for whatever `backward` would
    refuse. Called as a function, a kernel is differentiable attention.
    """

    forward: Callable
    backward: Callable | None = None

    def __call__(
        self,
        query_BTNH: Float[Array, "B T N H"],
        key_BSKH: Float[Array, "B S K H"],
        value_BSKH: Float[Array, "B S K H"],
        mask: Mask,
        scores: Scores,
        *,
        device_kind: str,
    ) -> Float[Array, "B T N H"]:
        """Attention; what its backward pass takes is named `remat.ATTENTION`."""
        if self.backward is None:
            out, _ = self.forward(
                query_BTNH, key_BSKH, value_BSKH, mask, scores, device_kind=device_kind
            )
            return checkpoint_name(out, remat.ATTENTION)
        return _whole(self, scores, device_kind, query_BTNH, key_BSKH, value_BSKH, mask)

    def gradients(self, query, key, value, mask, scores, out, lse, gradient, *, device_kind):
        """`backward`, or what stands for it."""
        if self.backward is not None:
            return self.backward(
                query, key, value, mask, scores, out, lse, gradient, device_kind=device_kind
            )
        (part, part_lse), pull = jax.vjp(
            lambda *arrays: self.forward(*arrays, mask, scores, device_kind=device_kind),
            query, key, value,
        )  # fmt: skip
        # out = sum of share x part, with share = exp(part_lse - lse).
        share_BTN1 = jnp.exp(part_lse - lse).swapaxes(1, 2)[..., None]
        of_part = share_BTN1 * gradient
        beside_BTN = jnp.sum(of_part * (part.astype(jnp.float32) - out), axis=-1)
        return pull((of_part.astype(part.dtype), beside_BTN.swapaxes(1, 2)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _whole(kernel, scores, device_kind, query, key, value, mask):
    return _whole_forward(kernel, scores, device_kind, query, key, value, mask)[0]


def _whole_forward(kernel, scores, device_kind, query, key, value, mask):
    out, lse = kernel.forward(query, key, value, mask, scores, device_kind=device_kind)
    out = checkpoint_name(out.astype(query.dtype), remat.ATTENTION)
    lse = checkpoint_name(lse, remat.ATTENTION)
    return out, (query, key, value, mask, out, lse)


def _whole_backward(kernel, scores, device_kind, residuals, gradient):
    query, key, value, mask, out, lse = residuals
    found = kernel.backward(
        query, key, value, mask, scores, out, lse, gradient, device_kind=device_kind
    )
    return *(g.astype(query.dtype) for g in found), None


_whole.defvjp(_whole_forward, _whole_backward)


def first_of(kernels: dict[str, Kernel], took: Callable[[str], None]) -> Kernel:
    """The first of `kernels` that does what it is given, found anew for each piece.

    `took` is told its name. Raises NotImplementedError where none does, with each one's reason.
    """

    def attempt(method: str, arguments: Sequence, device_kind: str):
        refused = []
        for name, kernel in kernels.items():
            try:
                made = getattr(kernel, method)(*arguments, device_kind=device_kind)
            except NotImplementedError as error:
                refused.append(f"{name}: {error}")
            else:
                took(name)
                return made
        raise NotImplementedError("; ".join(refused))

    def forward(*arguments, device_kind):
        return attempt("forward", arguments, device_kind)

    def backward(*arguments, device_kind):
        return attempt("gradients", arguments, device_kind)

    return Kernel(forward, backward)
