"""What a student's layers learn from those of a teacher: outputs, through a learned projection.

Each layer that is taught is multiplied by a matrix of its own, student width D to teacher width E,
and compared with the output of a layer of the teacher (arXiv 1412.6550, FitNets; 1909.10351,
TinyBERT). The matrices are trained beside the student, in `params["projection"]`, and are no part
of its model.

Letters: B batch, T positions, D, E widths, P layers that are taught.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from llmx import sharding
from llmx.model import dot, precision, quantized

PROJECTION = "projection"
AXES = ("embed", "latent")  # logical axes of each matrix
OUTPUTS = "outputs"  # of layers, by which they are handed out
MSE, COSINE = "mse", "cosine"
LOSSES = (MSE, COSINE)


def pairs_of(chosen: Sequence[int], layers: int, of_teacher: int) -> tuple[tuple[int, int], ...]:
    """(layer of the student, layer of the teacher) of each pair.

    `chosen`: for each layer of the student that of the teacher, -1 = none; () = evenly, the last
    by the last. Raises ValueError for layers that are not there.
    """
    if not chosen:
        return tuple((n, -(-(n + 1) * of_teacher // layers) - 1) for n in range(layers))
    if len(chosen) != layers:
        raise ValueError(
            f"names {len(chosen)} layers and the student has {layers}: give one for each, -1 = none"
        )
    if wrong := [layer for layer in chosen if not -1 <= layer < of_teacher]:
        raise ValueError(
            f"layer {wrong[0]} is none of the teacher's {of_teacher}: use 0 to {of_teacher - 1}"
        )
    if not (found := tuple((n, layer) for n, layer in enumerate(chosen) if layer >= 0)):
        raise ValueError("names no layer: give one, or set no weight")
    return found


def name_of(layer: int) -> str:
    """Of the matrix of a layer of the student."""
    return f"layer_{layer}"


def shapes_and_axes(layers: Sequence[int], width: int, of_teacher: int) -> tuple[dict, dict]:
    """Of the matrices, by name."""
    shape = jax.ShapeDtypeStruct((width, of_teacher), jnp.float32)
    names = [name_of(layer) for layer in layers]
    return dict.fromkeys(names, shape), dict.fromkeys(names, AXES)


def init(shapes: Mapping[str, jax.ShapeDtypeStruct], seed: int) -> dict[str, Array]:
    """New matrices: normal, variance 1/D, so that outputs keep their size."""
    key = jax.random.fold_in(jax.random.key(seed), 0x7EAC)
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(one, leaf.shape) / leaf.shape[0] ** 0.5
        for one, (name, leaf) in zip(keys, sorted(shapes.items()), strict=True)
    }


def losses(
    outputs: Mapping[int, Float[Array, "B T D"]], matrices: Mapping[str, Array],
    teacher_BTPE: Float[Array, "B T P E"], *,
    kind: str, place: sharding.Placement, policy: precision.Policy,
) -> Float[Array, "B T"]:  # fmt: skip
    """The mean over the layers of what each token's output differs by from the teacher's, fp32.

    `outputs`: of the student's layers by number, in the order of the teacher's. "mse": the mean
    over E of squares; "cosine": 1 - cosine. Communicates as a product does.
    """
    exact = dataclasses.replace(policy, numbers=quantized.UNROUNDED)
    inside = place.activation(("batch", "sequence", "latent"))
    total_BT = jnp.zeros((), jnp.float32)
    for number, (layer, x_BTD) in enumerate(outputs.items()):
        whole_BTD = place.constrain(x_BTD, ("batch", "sequence", "embed"))
        projected_BTE = dot.dot(
            "BTD,DE->BTE", whole_BTD, matrices[name_of(layer)], out=inside, policy=exact
        ).astype(jnp.float32)
        wanted_BTE = teacher_BTPE[:, :, number].astype(jnp.float32)
        wanted_BTE = place.constrain(wanted_BTE, ("batch", "sequence", "latent"))
        total_BT += _DIFFERENCES[kind](projected_BTE, wanted_BTE)
    return total_BT / len(outputs)


def _mse(x_BTE: Array, wanted_BTE: Array) -> Array:
    return jnp.mean(jnp.square(x_BTE - wanted_BTE), axis=-1)


def _cosine(x_BTE: Array, wanted_BTE: Array) -> Array:
    norm = lambda x: jnp.sqrt(jnp.sum(jnp.square(x), axis=-1) + 1e-12)  # noqa: E731
    return 1 - jnp.sum(x_BTE * wanted_BTE, axis=-1) / (norm(x_BTE) * norm(wanted_BTE))


_DIFFERENCES = {MSE: _mse, COSINE: _cosine}
