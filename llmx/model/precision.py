"""Which dtype each number is kept, computed and summed in.

Parameters are the master copy that the optimizer updates: fp32, or bf16 in "pure_bf16". Weights
are cast to the compute dtype before they are gathered, and so travel in it. Norms, softmax, the
loss and the optimizer are in fp32 always. fp16 needs a loss scale
(`llmx.step.transforms.loss_scale`).

Sources: mixed precision training (arXiv 1710.03740), bf16 (arXiv 1905.12322), bf16 parameters
(arXiv 2010.06192, 2502.20566).
"""

import contextlib
import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from llmx.model.quantized import UNROUNDED, Numbers


@dataclasses.dataclass(frozen=True)
class Policy:
    """Dtypes of master parameters, of products and activations, of gradient sums over devices."""

    param: jnp.dtype
    compute: jnp.dtype
    reduce: jnp.dtype
    numbers: Numbers = UNROUNDED  # of the operands of the layers' products

    def products(self) -> contextlib.AbstractContextManager:
        """Makes matrix products exact: by default GPUs and TPUs multiply fp32 in fewer bits."""
        exact = "highest" if self.compute == jnp.float32 else "default"
        return jax.default_matmul_precision(exact)

    def frozen(self, axes: Sequence[str | None], other: jnp.dtype) -> jnp.dtype:
        """The dtype of a parameter with these logical axes that nothing trains: that of products
        and lookups, which read it; of norms and routers, which are read in fp32, `other`."""
        return self.compute if "embed" in axes and "router" not in axes else other


_FP32, _BF16, _FP16 = map(jnp.dtype, ("float32", "bfloat16", "float16"))

POLICIES = {
    "fp32": Policy(_FP32, _FP32, _FP32),
    "bf16": Policy(_FP32, _BF16, _BF16),  # gradients cross the network in bf16,
    "bf16_fp32_reduce": Policy(_FP32, _BF16, _FP32),  # or in fp32, at twice the bytes
    "pure_bf16": Policy(_BF16, _BF16, _BF16),  # rounded stochastically (`step.rounding`)
    # Sums over tokens and devices are larger than their terms: in fp16 they would overflow at
    # scales that the gradients of activations need.
    "fp16": Policy(_FP32, _FP16, _FP32),
}
# By name, for gradient sums over devices; "" = the policy's own.
REDUCE_DTYPES = {"": None, "fp32": _FP32, "bf16": _BF16, "fp16": _FP16}


def policy_of(name: str, reduce_dtype: str = "") -> Policy:
    """The policy of `POLICIES`, with gradients summed in one of `REDUCE_DTYPES`."""
    policy, reduce = POLICIES[name], REDUCE_DTYPES[reduce_dtype]
    return policy if reduce is None else dataclasses.replace(policy, reduce=reduce)


def refusal(name: str, reduce_dtype: str, platform: str) -> str:
    """Why a platform ("cpu", "gpu", "tpu") cannot compute so, with the remedy; "" if it can."""
    policy = policy_of(name, reduce_dtype)
    if platform != "tpu" or _FP16 not in (policy.compute, policy.reduce):
        return ""
    asked = f"reduce_dtype={reduce_dtype!r}" if policy.compute != _FP16 else f"precision={name!r}"
    return (
        f"{asked}: TPUs have no fp16: use 'bf16', which has the exponents of fp32 and needs no "
        "loss scale"
    )
