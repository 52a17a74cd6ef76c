"""A model that a program gives as an object, in the place of the decoder.

`model.own` is its name in `MODELS`, "object:NAME".

An object has two methods, and may have a third name:

- `init(key)`: new parameters, any pytree of arrays, of a `jax.random` key.
- `logits(params, tokens_BT, positions_BT, segments_BT)`: [B, T, V], in any float dtype; V is at
  least the tokenizer's vocabulary. A token must not see later ones or those of other segments.
  Arrays are global, and the compiler places what is inside.
- `rules`: a sequence of (regular expression of a parameter's path, logical axes), as
  `sharding.logical_axes` takes them: "embed" is the width, which the layout splits, and "mlp",
  "heads" and "vocab" are split over `tensor`. Without rules each parameter of two or more
  dimensions has one width: the dimension that the largest power of two divides.

`linen` and `nnx_model` make one of a Flax module. In a run's state, and in its checkpoints, the
parameters are a flat dict by path, "dense.kernel"; `tree` is the reverse.

Letters: B batch, T positions, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from llmx import sharding
from llmx.model.execution import Execution
from llmx.model.families import ModelConfig

PREFIX = "object:"
MODELS: dict[str, Any] = {}  # "object:NAME" -> object; `llmx.fit` and config files add to it
WIDTH = "embed"  # the logical axis that layouts split over replicas


@dataclasses.dataclass(frozen=True)
class Functions:
    """A model made of two functions."""

    init: Callable
    logits: Callable
    rules: Any = None


def linen(module: Any, *, rules: Any = None) -> Functions:
    """The model of a Flax Linen module whose call takes tokens [B, T] and returns logits.

    It must see to it that tokens do not see later ones; segments are not given to it, so that texts
    of one row see each other: set `data.pack=False` where they must not.
    """
    tokens = np.zeros((1, 2), np.int32)
    return Functions(
        init=lambda key: module.init(key, tokens)["params"],
        logits=lambda params, tokens_BT, *_: module.apply({"params": params}, tokens_BT),
        rules=rules,
    )


def nnx_model(make: Callable[[nnx.Rngs], nnx.Module], *, rules: Any = None) -> Functions:
    """The model of a Flax NNX module, made of random numbers; otherwise as `linen`."""
    definition, _ = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    return Functions(
        init=lambda key: nnx.to_pure_dict(nnx.state(make(nnx.Rngs(key)), nnx.Param)),
        logits=lambda params, tokens_BT, *_: nnx.merge(definition, params)(tokens_BT),
        rules=rules,
    )


def problems(name: str) -> list[str]:
    """What is wrong with the object of that name."""
    if name not in MODELS:
        return [
            f"model.own={name!r} was an object of a program, which is not here: pass it to "
            "llmx.fit(model=...) again, or add it to llmx.model.own.MODELS in the config file"
        ]
    kind = type(MODELS[name]).__name__
    missing = [
        text for text, method in (
            ("init(key)", "init"), ("logits(params, tokens, positions, segments)", "logits")
        )
        if not callable(getattr(MODELS[name], method, None))
    ]  # fmt: skip
    if missing:
        return [
            f"model.own={name!r} is a {kind} without {' and '.join(missing)}: see llmx.model.own; "
            "own.linen(module) and own.nnx_model(make) make one of a Flax module"
        ]
    return []


def abstract_parameters(model: ModelConfig) -> tuple[dict, dict]:
    """Shapes, fp32, and logical axes of the parameters, by path; nothing is allocated.

    Raises ValueError for parameters that are not floats, rules that name other dimensions than a
    parameter has, and logits of another shape than [B, T, V].
    """
    own = MODELS[model.own]
    shapes, tree = _flat(jax.eval_shape(own.init, jax.random.key(0)))
    for path, leaf in shapes.items():
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(f"model.own: parameter {path} is {leaf.dtype}, and must be a float")
    rows = [jax.ShapeDtypeStruct((2, 4), jnp.int32)] * 3
    found = jax.eval_shape(own.logits, jax.tree.unflatten(tree, shapes.values()), *rows)
    if getattr(found, "ndim", 0) != 3 or found.shape[:2] != (2, 4):
        got = getattr(found, "shape", type(found).__name__)
        raise ValueError(f"model.own: logits of tokens [2, 4] are {got}, and must be [2, 4, V]")
    if found.shape[2] < model.vocab_size:
        raise ValueError(
            f"model.own: there are logits of {found.shape[2]} tokens, and the tokenizer has "
            f"{model.vocab_size}: make as many, or use another data.tokenizer"
        )
    rules = getattr(own, "rules", None)
    if rules is None:
        axes = {path: _by_size(leaf.shape) for path, leaf in shapes.items()}
    else:
        axes = sharding.logical_axes(shapes, rules)
    for path, leaf in shapes.items():
        axes[path] = axes[path] or (None,) * leaf.ndim
        if len(axes[path]) != leaf.ndim:
            raise ValueError(
                f"model.own: the rules give {path} of shape {leaf.shape} the axes {axes[path]}: "
                "name as many, or () to leave it whole"
            )
    in_fp32 = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32)  # noqa: E731
    return jax.tree.map(in_fp32, shapes), axes


def init_parameters(model: ModelConfig, seed: int) -> dict:
    """New parameters in fp32, by path."""
    params, _ = _flat(MODELS[model.own].init(jax.random.key(seed)))
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)


def tree(model: ModelConfig, params: dict) -> Any:
    """Parameters as `init` returns them."""
    _, structure = _flat(jax.eval_shape(MODELS[model.own].init, jax.random.key(0)))
    return jax.tree.unflatten(structure, [params[path] for path in _paths(structure)])


def _flat(params: Any) -> tuple[dict, Any]:
    leaves, structure = jax.tree.flatten(params)
    return dict(zip(_paths(structure), leaves, strict=True)), structure


def _paths(structure: Any) -> list[str]:
    numbered = jax.tree.unflatten(structure, range(structure.num_leaves))
    paths = [
        sharding.path_name(path).replace("/", ".")
        for path, _ in jax.tree_util.tree_leaves_with_path(numbered)
    ]
    return [path or "params" for path in paths]


def _by_size(shape: tuple[int, ...]) -> tuple[str | None, ...]:
    """The width is the dimension that the largest power of two divides, of equals the largest; of
    vectors there is none."""
    if len(shape) < 2:
        return (None,) * len(shape)
    width = max(range(len(shape)), key=lambda dim: (shape[dim] & -shape[dim], shape[dim], dim))
    return tuple(WIDTH if dim == width else None for dim in range(len(shape)))


@dataclasses.dataclass(frozen=True, eq=False)
class Apply:
    """An own model as functions of its parameters: what a training loss takes of one."""

    model: ModelConfig
    batch_arrays: ClassVar[dict] = {}

    def losses(
        self, params: dict, batch: dict, execution: Execution, buffers: dict | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Loss of each token, and log Z, in nats, fp32 [B, T]; see `apply.Apply.losses`."""
        names = ("tokens", "targets", "positions", "segment_ids")
        rows = tuple(batch[name] for name in names)
        to = execution.place.activation(("batch", "sequence"))
        function = jax.sharding.auto_axes(
            functools.partial(self._losses, execution), out_sharding=(to, to)
        )
        if buffers is None:
            return function(params, rows)
        return into_buffers(function, params, rows, buffers)

    def _losses(self, execution: Execution, params: dict, rows: tuple):
        tokens_BT, targets_BT, positions_BT, segments_BT = rows
        compute = execution.policy.compute
        params = jax.tree.map(lambda leaf: leaf.astype(compute), params)
        logits_BTV = MODELS[self.model.own].logits(
            tree(self.model, params), tokens_BT, positions_BT, segments_BT
        )
        logits_BTV = logits_BTV[..., : self.model.vocab_size].astype(jnp.float32)
        log_z_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
        targets_BT1 = targets_BT[..., None]
        own_BT = jnp.take_along_axis(logits_BTV, targets_BT1, axis=-1, mode="clip")[..., 0]
        return log_z_BT - own_BT, log_z_BT


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def into_buffers(function: Callable, params: dict, rows: tuple, buffers: dict):
    """`function(params, rows)`, whose gradient by the parameters goes to `buffers`."""
    return function(params, rows)


def _forward(function, params, rows, buffers):
    out, pull = jax.vjp(lambda params: function(params, rows), params)
    return out, (pull, buffers)


def _backward(function, residuals, gradient):
    pull, buffers = residuals
    (found,) = pull(gradient)
    return None, None, jax.tree.map(_placed, found, buffers)


def _placed(gradient: jax.Array, buffer: jax.Array) -> jax.Array:
    """A gradient, summed already, in the type of its buffer: later sums over `reduced` axes find it
    on one device and zeros on the others."""
    to = jax.typeof(buffer).sharding.spec
    summed = jax.sharding.reshard(gradient.astype(buffer.dtype), PartitionSpec(*to.partitions))
    return jax.sharding.reshard(summed, sharding.unreduced(to, to.reduced))


into_buffers.defvjp(_forward, _backward)
