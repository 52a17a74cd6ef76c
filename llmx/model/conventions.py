"""FLOPs of a token of training: llmx's three figures, and the conventions of other trainers.

MFU and HFU are FLOPs per token times tokens/s, over the peak. Trainers differ in the FLOPs:

- scores: all T keys of each query, or those that the causal mask (and a window) leaves;
- weights: matrices that are multiplied, or six FLOPs for every parameter, so that tables which are
  only looked up, norms and biases count as products;
- recomputation: none (MFU), or what the backward pass repeats of the forward pass (HFU).

docs/performance.md has who counts how. Of tokens all count every position of the batch, padding and
packed documents alike. The backward pass costs twice the forward pass.

What an attention kernel repeats by itself in its backward pass is left out, as publishers do: a
fused kernel makes 5 products of the size of the scores instead of 4, two separate kernels 7, so
that the figure would depend on the kernel. `llmx.aot` shows what a compiled program computes.
"""

import dataclasses
from collections.abc import Sequence

from llmx.model import costs, remat_costs
from llmx.model.families import ModelConfig, is_local


@dataclasses.dataclass(frozen=True)
class Convention:
    """What is counted. The default is llmx's MFU."""

    causal: bool = True  # without scores that mask and window hide
    half_windows: bool = False  # W / 2 keys of each query within a window, as of a causal mask
    weights: str = "products"  # | "parameters": all of them, as published
    # | "remat": what the run repeats; | "blocks", "model": their whole forward pass;
    # | "scores": all passes of attention's scores
    recomputed: str = "nothing"


FIGURES = {
    "mfu": Convention(),
    "mfu_full": Convention(causal=False),
    "hfu": Convention(recomputed="remat"),
}

# Of published figures. Sources: docs/performance.md, tests/model/test_conventions.py.
PUBLISHERS = {
    "palm mfu": Convention(causal=False, weights="parameters"),
    "megatron 2021": Convention(causal=False, recomputed="blocks"),  # arXiv 2104.04473
    "megatron 2022 mfu": Convention(causal=False),  # arXiv 2205.05198
    # Equation 8 adds the scores of three passes, though one is repeated.
    "megatron 2022 hfu": Convention(causal=False, recomputed="scores"),
    "megatron 2025": Convention(),  # also NeMo and Megatron Bridge since 2025
    "nemo 2024": Convention(causal=False),
    "mosaicml mfu": Convention(causal=False, weights="parameters"),
    "mosaicml hfu": Convention(causal=False, weights="parameters", recomputed="model"),
    "llm.c": Convention(weights="parameters"),
    "maxtext 2024": Convention(causal=False),
    "maxtext 2025": Convention(half_windows=True),  # since July
    "torchtitan": Convention(causal=False),  # and norms, which are nothing beside the matrices
}


def flops_per_token(
    model: ModelConfig, convention: Convention, *, sequence_length: int, remat: str = "none",
    loss_chunks: int = 1, chunks: Sequence[int] = (), offloaded: Sequence[str] = (),
) -> float:  # fmt: skip
    """FLOPs of forward and backward pass per token of a sequence, by a convention.

    `remat` (the config's), `loss_chunks`, `chunks` of a pipeline, `offloaded`: of
    `remat_costs.recomputed_flops_by_layer`, which raises ValueError where `remat` is wrong or
    "budget". Only conventions that count recomputation by "remat" ask for them; others take any.
    """
    sizes = dict(sequence_length=sequence_length, causal=convention.causal)
    layers = costs.forward_flops_by_layer(model, **sizes)
    scores = costs.forward_flops_by_part(model, **sizes)["scores"]
    by_parameters = convention.weights == "parameters"
    forward = 2.0 * costs.num_parameters(model) + scores if by_parameters else sum(layers)
    if convention.half_windows:
        forward -= _beyond_half_windows(model, sequence_length)
    passes = costs.TRAINING_PASSES
    if convention.recomputed == "remat":
        again = remat_costs.recomputed_flops_by_layer(
            model, text=remat, loss_chunks=loss_chunks, chunks=chunks, offloaded=offloaded, **sizes
        )
        return passes * forward + sum(again)
    again = {
        "nothing": 0.0, "blocks": sum(layers[1:-1]), "model": forward, "scores": passes * scores
    }  # fmt: skip
    return passes * forward + again[convention.recomputed]


def _beyond_half_windows(model: ModelConfig, length: int) -> float:
    """FLOPs of causal scores per token, forward, beyond those of W / 2 keys in windows."""
    keys = costs.keys_per_query(model, sequence_length=length, causal=True)
    half = min(model.window, length) / 2
    layers = zip(keys, model.layer_kinds, strict=True)
    beyond = sum(num - half for num, kind in layers if is_local(kind))
    return costs.scores_per_key(model) * model.repeats * beyond


def by_figure(
    model: ModelConfig, *, sequence_length: int, remat: str, loss_chunks: int,
    chunks: Sequence[int] = (), offloaded: Sequence[str] = (),
) -> dict[str, float]:  # fmt: skip
    """FLOPs per token of each of the `FIGURES`.

    Arguments: see `flops_per_token`. Raises ValueError where `remat` is wrong or "budget", for HFU.
    """
    return {
        name: flops_per_token(
            model, convention, sequence_length=sequence_length, remat=remat,
            loss_chunks=loss_chunks, chunks=chunks, offloaded=offloaded,
        )
        for name, convention in FIGURES.items()
    }  # fmt: skip
