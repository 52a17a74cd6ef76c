"""The contract of attention kernels: two functions of the arrays on one device.

Letters: B batch, T query positions, S key/value positions, N query heads, K key/value heads, H head
size, V of values; G = N/K.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from llmx.model import remat
from llmx.model.attention import sinks
from llmx.model.attention.masks import Mask, Scores

# The log-sum-exp of a query that sees no key is at or below this; its output is finite.
NOTHING = -1e30


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Attention of some queries to some keys, on one device.

    forward(query, key, value, mask, scores, *, device_kind) -> (out, lse)
    backward(query, key, value, mask, scores, out, lse, gradient, *, device_kind)
      -> gradients of query, key and value, in their shapes, in fp32 or the compute dtype.
      None: `forward` is differentiated automatically.

      query        [B, T, N, H]  compute dtype (bf16, fp16, fp32); rotated, not yet scaled
      key          [B, S, K, H]  compute dtype; query head n attends to key/value head n // (N / K)
      value        [B, S, K, V]  compute dtype; V is H, or another width
      mask                       which keys each query sees: arrays [B, T], [B, S], static promises
      scores                     scale, soft cap and window of q.k; static
      out          [B, T, N, V]  compute dtype or fp32: softmax(scores) x value
      lse          [B, N, T]     fp32: log of the sum of exp(scores) over the keys that a query sees
      gradient     [B, T, N, V]  any float dtype: of the loss by `out`
      device_kind                jax's name of the chip, e.g. "TPU v5 lite": block sizes differ

    In `backward`, `out` and `lse` are those over all keys that the queries see, and the given keys
    may be a part of these: the gradients of all parts then add up to the whole.

    Both raise NotImplementedError for inputs that they do not support, `forward` also for those
    that `backward` would refuse. Nothing communicates. Calling the kernel is differentiable.
    """

    forward: Callable
    backward: Callable | None = None

    def __call__(
        self,
        query_BTNH: Float[Array, "B T N H"],
        key_BSKH: Float[Array, "B S K H"],
        value_BSKH: Float[Array, "B S K H"],
        mask: Mask, scores: Scores, sinks_BTN: Float[Array, "B T N"] | None = None, *,
        device_kind: str,
    ) -> Float[Array, "B T N H"]:  # fmt: skip
        """`out`; what the backward pass needs of it is named `remat.ATTENTION`.

        `sinks_BTN`: see `sinks`.
        """
        arrays = (query_BTNH, key_BSKH, value_BSKH, mask)
        if self.backward is not None:
            return _attention(self, scores, device_kind, *arrays, sinks_BTN)
        out, lse = self.forward(*arrays, scores, device_kind=device_kind)
        out, _ = sinks.joined(out, lse, sinks_BTN)
        return checkpoint_name(out, remat.ATTENTION)

    def gradients(self, query, key, value, mask, scores, out, lse, gradient, *, device_kind):
        """`backward`; where it is None, the same by automatic differentiation of `forward`."""
        if self.backward is not None:
            return self.backward(
                query, key, value, mask, scores, out, lse, gradient, device_kind=device_kind
            )
        (part, part_lse), pull = jax.vjp(
            lambda *arrays: self.forward(*arrays, mask, scores, device_kind=device_kind),
            query, key, value,
        )  # fmt: skip
        # out is the sum of share x part over all parts, with share = exp(part_lse - lse).
        share_BTN1 = jnp.exp(part_lse - lse).swapaxes(1, 2)[..., None]
        of_part = share_BTN1 * gradient
        of_lse_BTN = jnp.sum(of_part * (part.astype(jnp.float32) - out), axis=-1)
        return pull((of_part.astype(part.dtype), of_lse_BTN.swapaxes(1, 2)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attention(kernel, scores, device_kind, query, key, value, mask, sinks_BTN):
    return _attention_forward(kernel, scores, device_kind, query, key, value, mask, sinks_BTN)[0]


def _attention_forward(kernel, scores, device_kind, query, key, value, mask, sinks_BTN):
    out, lse = kernel.forward(query, key, value, mask, scores, device_kind=device_kind)
    out, lse = sinks.joined(out, lse, sinks_BTN)
    out, lse = checkpoint_name((out.astype(query.dtype), lse), remat.ATTENTION)
    return out, (query, key, value, mask, sinks_BTN, out, lse)


def _attention_backward(kernel, scores, device_kind, residuals, gradient):
    *arrays, mask, sinks_BTN, out, lse = residuals
    gradients = kernel.backward(*arrays, mask, scores, out, lse, gradient, device_kind=device_kind)
    of_sinks = sinks.gradient(sinks_BTN, out, lse, gradient)
    return *(g.astype(arrays[0].dtype) for g in gradients), None, of_sinks


_attention.defvjp(_attention_forward, _attention_backward)


def of_one_width(forward: Callable, backward: Callable) -> Kernel:
    """A kernel of functions that take heads of one width: narrower values are padded with zeros."""

    def padded(array, width: int):
        return jnp.pad(array, [(0, 0)] * 3 + [(0, width - array.shape[-1])])

    def wide_forward(query_BTNH, key_BSKH, value_BSKV, *rest, device_kind):
        H, V = query_BTNH.shape[-1], value_BSKV.shape[-1]
        if V == H:
            return forward(query_BTNH, key_BSKH, value_BSKV, *rest, device_kind=device_kind)
        if V > H:
            raise NotImplementedError(f"values of width {V} are wider than queries of {H}")
        value_BSKH = padded(value_BSKV, H)
        out, lse = forward(query_BTNH, key_BSKH, value_BSKH, *rest, device_kind=device_kind)
        return out[..., :V], lse

    def wide_backward(
        query, key, value, mask, scores, out, lse, gradient, *, device_kind
    ):  # fmt: skip
        H, V = query.shape[-1], value.shape[-1]
        if V < H:
            value, out, gradient = (padded(array, H) for array in (value, out, gradient))
        of_query, of_key, of_value = backward(
            query, key, value, mask, scores, out, lse, gradient, device_kind=device_kind
        )
        return of_query, of_key, of_value[..., :V]

    return Kernel(wide_forward, wide_backward)


def heads_first(array_BTNH: Array, num_kv_heads: int) -> Array:
    """[B, K, G, T, H]: the G query heads of each key/value head together."""
    B, T, N, H = array_BTNH.shape
    return array_BTNH.reshape(B, T, num_kv_heads, N // num_kv_heads, H).transpose(0, 2, 3, 1, 4)


def heads_last(array_BKGTH: Array) -> Array:
    """The reverse of `heads_first`."""
    B, K, G, T, H = array_BKGTH.shape
    return array_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, K * G, H)


def first_of(kernels: dict[str, Kernel], on_choice: Callable[[str, list[str]], None]) -> Kernel:
    """A kernel whose calls choose the first of `kernels` that supports the inputs.

    Each call passes its name, and why those before it do not, to `on_choice`; NotImplementedError,
    with all reasons, if none does.
    """

    def attempt(method: str, *arguments, device_kind: str):
        refusals = []
        for name, kernel in kernels.items():
            try:
                result = getattr(kernel, method)(*arguments, device_kind=device_kind)
            except NotImplementedError as error:
                refusals.append(f"{name}: {error}")
            else:
                on_choice(name, refusals)
                return result
        raise NotImplementedError("; ".join(refusals))

    return Kernel(functools.partial(attempt, "forward"), functools.partial(attempt, "gradients"))
