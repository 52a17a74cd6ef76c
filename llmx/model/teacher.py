"""A teacher beside its student: another model on the same mesh, whose parameters nothing trains.

It is split as its student is, and computed with the same kernels on the same rows. On a mesh with
stages it has none: each stage has all its layers, and takes other rows of the batch.

Letters: B batch, T positions, E width of the teacher.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from llmx import sharding
from llmx.model import apply as apply_lib
from llmx.model import distillation, families, quantized
from llmx.model.execution import Execution

_STAGE = "stage"


@dataclasses.dataclass(frozen=True, eq=False)
class Teacher:
    """A model as functions, how it is executed, and the shapes of its parameters."""

    apply: apply_lib.Apply
    execution: Execution
    params: Any  # shapes with shardings
    axes: Any  # their logical axes
    head: PartitionSpec  # of the head, beside that of the student

    def head_of(self, params: Any) -> jax.Array:
        """The weight of the head, split as the student's: communicates on a mesh with stages."""
        head_VE = self.apply.head_weight(params)
        if jax.typeof(head_VE).sharding.spec == self.head:
            return head_VE
        return jax.sharding.reshard(head_VE, NamedSharding(self.execution.place.mesh, self.head))

    def hidden(
        self, params: Any, rows: Any, to: PartitionSpec, outputs: Mapping[str, Sequence[int]]
    ) -> dict[str, jax.Array]:
        """For a batch: what its head multiplies, [B, T, E], split as `to`, and by name `outputs`
        of P layers each, [B, T, P, ...]. Communicates as a forward pass."""
        place = self.execution.place
        rows = {
            name: place.constrain(rows[name], ("batch", "sequence"))
            for name in ("tokens", "segment_ids", "positions")
        }
        found = self.apply.last_hidden(params, rows, self.execution, outputs)
        hidden_BTE, *of_layers = jax.lax.stop_gradient(found)
        hidden_BTE = sharding.constrain(hidden_BTE, place.mesh, to)
        names = (distillation.HIDDEN, *(distillation.OF_LAYERS[name] for name in outputs))
        return dict(zip(names, (hidden_BTE, *of_layers), strict=True))


def make(model: families.ModelConfig, execution: Execution) -> Teacher:
    """A teacher for a student with this execution; nothing is allocated.

    Raises ValueError where the layout does not fit the teacher's model.
    """
    place, policy = execution.place, execution.policy
    layout = _without_stages(place.layout) if place.mesh.shape[_STAGE] > 1 else place.layout
    shapes, axes = apply_lib.abstract_parameters(model)
    to = sharding.shardings(shapes, place.mesh, layout, rules=axes, table="parameters")

    def one(leaf, axes, to):
        dtype = policy.frozen(axes, jnp.float32)
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=to)

    head = sharding.spec(
        ("vocab", "embed"), place.layout.parameters, place.mesh,
        shape=(model.padded_vocab, model.width),
    )  # fmt: skip
    own = dataclasses.replace(
        execution, place=sharding.Placement(place.mesh, layout), remat="none", offloaded=(),
        distilled=None, policy=dataclasses.replace(policy, numbers=quantized.UNROUNDED),
    )  # fmt: skip
    return Teacher(apply_lib.Apply(model), own, jax.tree.map(one, shapes, axes, to), axes, head)


def _without_stages(layout: sharding.Layout) -> sharding.Layout:
    """The layout of a model that is not cut into stages: these take other rows of a batch."""
    tables = tuple(name for name in vars(layout))
    layout = layout.without((_STAGE,), *tables)
    rows = {"batch": (*layout.activations["batch"], _STAGE)}
    return dataclasses.replace(layout, activations=dict(layout.activations) | rows)
