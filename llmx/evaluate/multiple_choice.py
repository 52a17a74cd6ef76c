"""Log-likelihoods of texts behind prompts, and the questions that they answer.

Letters: B rows, T positions.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from llmx import sharding
from llmx.checkpoint import model_params
from llmx.config import Config
from llmx.contract import State
from llmx.data import choices, tokenizers
from llmx.evaluate import held_out
from llmx.model.apply import Apply
from llmx.model.execution import Execution
from llmx.model.experts import config as experts_config
from llmx.model.training_loss import TOKEN_AXES
from llmx.step.step import Recipe

REPORTED = ("accuracy", "accuracy_per_byte")  # of a file of questions, while a run trains


class Scores(NamedTuple):
    """Of each continuation of a prompt."""

    nats: np.ndarray  # the loss, summed over its tokens, fp64 [number]
    greedy: np.ndarray  # whether no token of it has a likelier one in its place, bool [number]


class Scorer:
    """Scores continuations on a mesh, in batches of rows that several share. One program.

    Each has the score that it would have alone: documents of a row do not see each other, and
    experts take all their tokens.
    """

    def __init__(
        self, apply: Apply, execution: Execution, *, batch_size: int, length: int, filler: int
    ):  # fmt: skip
        """`batch_size`: rows of a batch at least; as many more as the mesh divides them. `length`:
        of a row. `filler`: the token of positions that hold nothing."""
        self.execution = execution = _of_packed_rows(execution)
        place = execution.place
        self._mesh, self._length, self._filler = place.mesh, length, filler
        self._to = NamedSharding(place.mesh, place.activation(TOKEN_AXES))
        ways = place.size(sharding.mesh_axes(self._to.spec[0]))
        self._num_rows = -(-batch_size // ways) * ways
        self._rows = sharding.process_rows(self._to, (self._num_rows, length))
        whole = NamedSharding(place.mesh, PartitionSpec())

        def of_tokens(params, batch):
            found = apply.scores(params, batch, execution)
            return [jax.sharding.reshard(array_BT, whole) for array_BT in found]

        self._of_tokens = jax.jit(of_tokens)

    def __call__(self, params: Any, several: Sequence[choices.Continuation]) -> Scores:
        """Every process must call it; all get the same numbers. Communicates over all mesh axes."""
        nats, greedy = [], []
        with jax.set_mesh(self._mesh):
            for each in choices.packed(
                several, num_rows=self._num_rows, length=self._length, filler=self._filler
            ):
                batch = {
                    name: sharding.assemble(
                        array[np.asarray(self._rows)], self._rows, self._to, self._num_rows
                    )
                    for name, array in each.batch.items()
                }
                nats_BT, likeliest_BT = jax.device_get(self._of_tokens(params, batch))
                for row, first, number in each.places:
                    of = (row, slice(first, first + number))
                    nats.append(np.asarray(nats_BT[of], np.float64).sum())
                    greedy.append(bool(likeliest_BT[of].all()))
        return Scores(np.array(nats), np.array(greedy, bool))


def _of_packed_rows(execution: Execution) -> Execution:
    """The same of rows with several documents, each computed as it would be alone."""
    experts, attention = execution.experts, execution.attention
    if experts.dispatch == experts_config.CAPACITY:
        experts = dataclasses.replace(experts, dispatch=experts_config.DROPLESS)
    if attention.implementation == "cudnn":  # which takes rows of one document
        attention = dataclasses.replace(attention, implementation="auto")
    return dataclasses.replace(
        execution, packed=True, turns=1, experts=experts, attention=attention
    )


@dataclasses.dataclass(frozen=True)
class QuestionFile:
    """The questions of a file, and what a tokenizer makes of their choices, in the same order."""

    name: str  # by which its figures are reported
    questions: list[choices.Question]
    continuations: list[choices.Continuation]

    @classmethod
    def open(cls, path: str, tokenizer: tokenizers.Tokenizer, length: int) -> "QuestionFile":
        """Raises ValueError, naming file and question, for what cannot be asked in a row of so many
        tokens."""
        questions, continuations = choices.read(path), []
        for number, question in enumerate(questions, 1):
            try:
                found = choices.continuations(question, tokenizer)
                continuations += choices.shortened(found, length)
            except ValueError as error:
                raise ValueError(f"{path}: question {number}: {error}") from error
        return cls(choices.name_of(path), questions, continuations)

    def answered(self, scorer: Scorer, params: Any) -> dict[str, float]:
        """`choices.scores` of a model. Every process must call it; all get the same numbers."""
        nats = scorer(params, self.continuations).nats
        return choices.scores(self.questions, self.continuations, nats)


def scorer_of(run: Config, recipe: Recipe, execution: Execution, filler: int) -> Scorer:
    """A scorer in batches as those of a run's evaluations."""
    return Scorer(
        recipe.loss.apply, execution, batch_size=held_out.batch_size(run),
        length=run.batch.sequence_length, filler=filler,
    )  # fmt: skip


def params_of(recipe: Recipe, state: State) -> Any:
    """The parameters that are asked, of a state: its own, and of a mesh with stages a copy.
    Communicates over all mesh axes then."""
    loss, trained, frozen = recipe.loss, state.averaged, state.frozen
    if recipe.mesh.shape["stage"] == 1:
        return loss.rounded(loss.joined(trained, frozen), state.extra)
    return model_params.without_stages(recipe, loss.merged(trained, frozen))[1]
