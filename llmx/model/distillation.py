"""What a student learns from a teacher: its distribution over the next token, beside the data.

    (1 - weight) CE + weight T^2 KL(teacher || student), both at the temperature T

as arXiv 1503.02531, section 2; over the whole vocabulary where the teacher is computed beside the
student, and otherwise over the tokens that it finds likeliest, read from files, with all others as
one more token. The loss that is reported is the student's own on the data, in nats.

Letters: B batch, T positions, V vocabulary, E width of the teacher, K likeliest tokens.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from llmx import sharding
from llmx.data import packing
from llmx.model import (
    attention_relations,
    distilled_losses,
    families,
    hidden_states,
    losses,
    precision,
)
from llmx.model.attention.masks import Mask
from llmx.runtime.bounds import bounded, choice

# In a batch: the input of the teacher's head, [B, T, E]; or ids of the likeliest tokens, int32
# [B, T, K], and their log-probabilities with that of all others together, fp32 [B, T, K+1].
HIDDEN, IDS, LOG_P = "teacher_hidden", packing.TEACHER_IDS, packing.TEACHER_LOG_P
# By what layers hand out, the same of P layers of the teacher, [B, T, P, ...].
OF_LAYERS = {
    name: f"teacher_{name}"
    for name in (hidden_states.OUTPUTS, *attention_relations.ARRAYS.values())
}
OF_TEACHER = (HIDDEN, IDS, LOG_P, *OF_LAYERS.values())
HEAD = "teacher_head"  # beside the parameters
DIVERGENCES = ("forward", "reverse")
# Of what a student leaves to the tokens that are not listed: no logarithm of less is taken.
LEAST = 1e-9


@dataclasses.dataclass
class DistillationConfig:
    """What is learned from a teacher, beside the data."""

    # "WORKDIR", "WORKDIR@STEP", or a Hugging Face directory, each local or a URL; "" = none
    teacher: str = ""
    # read this many likeliest tokens of a teacher, which python -m llmx.data --teacher has written
    # beside the token shards; 0 = none
    top_k: int = bounded(0, at_least=0, at_most=2**16)
    weight: float = bounded(0.9, at_least=0, at_most=1)  # of the teacher; the data has the rest
    temperature: float = bounded(1.0, at_least=0.1, at_most=100.0)  # both are softened by it
    # "forward": KL(teacher || student) | "reverse": KL(student || teacher)
    divergence: str = choice("forward", DIVERGENCES)

    # beside it: of what outputs of layers differ by from the teacher's, through learned matrices
    hidden_weight: float = bounded(0.0, at_least=0)
    hidden_loss: str = choice(hidden_states.MSE, hidden_states.LOSSES)  # "mse" | "cosine"
    # for each layer of the student that of the teacher, -1 = none; () = evenly
    hidden_layers: tuple[int, ...] = ()

    # beside it: of how attention relates tokens, by its divergence from the teacher's
    attention_weight: float = bounded(0.0, at_least=0)
    # some of "qq", "kk", "vv" (MiniLMv2), and "qk": the map of attention itself
    attention_relations: tuple[str, ...] = ("qq", "kk", "vv")
    # which queries, keys and values of all heads are cut into; 0 = as many as the student has
    attention_heads: int = bounded(0, at_least=0)
    # for each layer of the student that of the teacher, -1 = none; () = the last by the last
    attention_layers: tuple[int, ...] = ()

    @property
    def is_on(self) -> bool:
        return bool(self.teacher or self.top_k)

    @property
    def of_layers(self) -> bool:
        """Whether layers have losses of their own."""
        return bool(self.hidden_weight or self.attention_weight)


@dataclasses.dataclass(frozen=True)
class Distilled:
    """How the losses of a student are taken."""

    weight: float
    temperature: float
    reverse: bool
    top_k: int = 0
    teacher_softcap: float = 0.0
    hidden_weight: float = 0.0
    hidden_loss: str = hidden_states.MSE
    hidden_pairs: tuple[tuple[int, int], ...] = ()  # (layer of the student, of the teacher)
    attention_weight: float = 0.0
    relations: attention_relations.Relations | None = None

    @property
    def weights_of_layers(self) -> dict[str, float]:
        """Of the losses of layers, by name."""
        found = {"hidden": self.hidden_weight} if self.hidden_pairs else {}
        return found | ({"attention": self.attention_weight} if self.relations else {})

    @property
    def reported(self) -> tuple[str, ...]:
        """Names of what is reported of a batch, beside the loss."""
        return ("divergence", *self.weights_of_layers)

    @property
    def of_teacher(self) -> dict[str, tuple[int, ...]]:
        """By what layers hand out: the layers of the teacher of which it is learned."""
        pairs, relations = self.hidden_pairs, self.relations
        found = {hidden_states.OUTPUTS: tuple(layer for _, layer in pairs)} if pairs else {}
        return found | (dict.fromkeys(relations.arrays, relations.of_teacher) if relations else {})

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of the student whose outputs are taught through matrices."""
        return tuple(layer for layer, _ in self.hidden_pairs)

    def token_losses(
        self, head: tuple[Array, Array], targets_BT: Array, rows: Mapping[str, Array],
        params: Mapping[str, Any], **settings: Any,
    ) -> tuple[Array, ...]:  # fmt: skip
        """Per-token -log p(target), log Z and divergence from the teacher, in nats, fp32 [B, T].

        Args:
          head: what the student's head multiplies, and its weight.
          rows: of the batch, with what the teacher says; without it there is no divergence.
          params: with the teacher's head.
          settings: of `losses.token_losses`.
        """
        if HIDDEN in rows:
            return distilled_losses.against_head(
                *head, targets_BT, rows[HIDDEN], params[HEAD], temperature=self.temperature,
                reverse=self.reverse, teacher_softcap=self.teacher_softcap, **settings,
            )  # fmt: skip
        if IDS not in rows:
            return losses.token_losses(*head, targets_BT, **settings)
        ids_BTK = jnp.concatenate([targets_BT[..., None], rows[IDS]], axis=-1)
        log_z_BT, logits_BTK = distilled_losses.picked_logits(*head, ids_BTK, **settings)
        log_q_BTK = logits_BTK - log_z_BT[..., None]
        divergence_BT = of_listed(
            rows[LOG_P], log_q_BTK[..., 1:], temperature=self.temperature, reverse=self.reverse
        )
        return -log_q_BTK[..., 0], log_z_BT, divergence_BT

    def layer_losses(
        self, outputs: Mapping[str, Array], rows: Mapping[str, Array], params: Mapping[str, Any],
        mask: Mask, *, place: sharding.Placement, policy: precision.Policy,
    ) -> list[Array]:  # fmt: skip
        """Each of `weights_of_layers`, [B, T], of outputs of all layers, [L, B, T, ...] by name."""
        found, of_teacher = [], {output: rows[OF_LAYERS[output]] for output in outputs}
        if self.hidden_pairs:
            of_layers = outputs[hidden_states.OUTPUTS]
            taught = {layer: of_layers[layer] for layer in self.layers}
            found.append(hidden_states.losses(
                taught, params[hidden_states.PROJECTION], of_teacher[hidden_states.OUTPUTS],
                kind=self.hidden_loss, place=place, policy=policy,
            ))  # fmt: skip
        if self.relations:
            found.append(self.relations.losses(outputs, of_teacher, mask, place=place))
        return found

    def minimized(self, loss: Array, divergence: Array, *of_layers: Array) -> Array:
        """What is minimized, of the loss on the data, the divergence and those of layers."""
        total = (1 - self.weight) * loss + self.weight * self.temperature**2 * divergence
        for weight, one in zip(self.weights_of_layers.values(), of_layers, strict=True):
            total += weight * one
        return total

    def arrays(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shapes and dtypes of what a batch [B, T] of the data has of a teacher."""
        if not self.top_k:
            return {}
        sizes = {IDS: (self.top_k, "int32"), LOG_P: (self.top_k + 1, "float32")}
        return {name: ((*shape, size), dtype) for name, (size, dtype) in sizes.items()}


def of(
    config: DistillationConfig, *, student: families.ModelConfig,
    teacher: families.ModelConfig | None = None,
) -> Distilled | None:  # fmt: skip
    """How a section has the losses of a student taken; None = nothing is learned from a teacher.
    Raises ValueError for layers that are not there."""
    if not config.is_on:
        return None
    reverse, pairs, relations = config.divergence == "reverse", (), None
    if teacher is not None and config.hidden_weight:
        layers = student.num_layers, teacher.num_layers
        pairs = hidden_states.pairs_of(config.hidden_layers, *layers)
    if teacher is not None and config.attention_weight:
        relations = attention_relations.of(
            config.attention_relations, config.attention_heads, config.attention_layers,
            student, teacher,
        )  # fmt: skip
    return Distilled(
        config.weight, config.temperature, reverse, config.top_k,
        teacher.logit_softcap if teacher else 0.0, config.hidden_weight, config.hidden_loss, pairs,
        config.attention_weight, relations,
    )  # fmt: skip


def of_listed(
    log_p_BTN: Float[Array, "B T N"], log_q_BTK: Float[Array, "B T K"], *,
    temperature: float = 1.0, reverse: bool = False,
) -> Float[Array, "B T"]:  # fmt: skip
    """The divergence over K listed tokens and all others as one, N = K + 1.

    `log_p_BTN`: of the teacher, the last of all others, -inf where the list is complete, which
    then has no others; `log_q_BTK`: of the student's whole distribution. At a temperature both
    distributions over N are raised to 1 / temperature and normalized. With K = V it is the
    divergence over the vocabulary; else it is at most that: joining tokens loses information.
    """
    log_p_BTN = log_p_BTN.astype(jnp.float32)
    complete_BT1 = jnp.isneginf(log_p_BTN[..., -1:])
    rest_BT1 = 1 - jnp.sum(jnp.exp(log_q_BTK), axis=-1, keepdims=True)
    rest_BT1 = jnp.where(complete_BT1, 1.0, jnp.maximum(rest_BT1, LEAST))
    floor = jnp.finfo(jnp.float32).min
    rest_BT1 = jnp.where(complete_BT1, floor, jnp.log(rest_BT1))
    log_q_BTN = jnp.concatenate([log_q_BTK, rest_BT1], axis=-1)
    log_p_BTN = jnp.maximum(log_p_BTN, floor)
    softened = lambda log: jax.nn.log_softmax(jnp.maximum(log / temperature, floor))  # noqa: E731
    log_p_BTN, log_q_BTN = softened(log_p_BTN), softened(log_q_BTN)
    over, other = (log_q_BTN, log_p_BTN) if reverse else (log_p_BTN, log_q_BTN)
    share_BTN = jnp.exp(over)
    return jnp.sum(jnp.where(share_BTN > 0, share_BTN * (over - other), 0), axis=-1)
