"""What a run that trains reports of itself: its held-out loss, and the questions it answers."""

import hashlib
from typing import Any

from llmx import config
from llmx.checkpoint import model_params
from llmx.contract import State
from llmx.data import dataset as data_lib
from llmx.evaluate import held_out, multiple_choice
from llmx.model import looked_up
from llmx.model.execution import Execution
from llmx.step.step import Recipe
from llmx.tables.cached import Cached


class EvaluationData:
    """What a run that trains is evaluated on: its dataset, and `evaluation.choices`."""

    def __init__(self, run: config.Config, recipe: Recipe, dataset: data_lib.Dataset):
        """Raises ValueError for files that cannot be asked, and for a mesh that cannot ask."""
        self.dataset, coder = dataset, dataset.tokenizer
        open_file, length = multiple_choice.QuestionFile.open, run.batch.sequence_length
        try:
            self.files = [open_file(path, coder, length) for path in run.evaluation.choices]
            if self.files:
                _execution(recipe)
        except ValueError as error:
            raise ValueError(f"evaluation.choices: {error}") from error

    @property
    def fingerprints(self) -> dict[str, str]:
        """By name: the same in all processes of a run."""
        parts = repr([(file.name, file.questions) for file in self.files])
        questions = hashlib.sha256(parts.encode()).hexdigest()
        return {"fingerprint": self.dataset.fingerprint, "questions": questions}

    def scorer(self, run: config.Config, recipe: Recipe) -> multiple_choice.Scorer:
        """Of the parameters that `multiple_choice.params_of` returns."""
        filler = self.dataset.tokenizer.end_of_document
        return multiple_choice.scorer_of(run, recipe, _execution(recipe), filler)


def _execution(recipe: Recipe) -> Execution:
    """How questions are asked. Raises ValueError where a mesh with stages cannot."""
    has_stages = recipe.mesh.shape["stage"] > 1
    return model_params.stageless(recipe)[0] if has_stages else recipe.loss.execution


class Evaluation:
    """Reports the held-out loss and the shares of right answers, when they are due."""

    def __init__(
        self, run: config.Config, recipe: Recipe, data: EvaluationData, reporter: Any,
        rows: Cached | None = None,
    ) -> None:  # fmt: skip
        """rows: what the host has of the run's tables."""
        self._run, self._recipe, self._reporter, self._rows = run, recipe, reporter, rows
        self._dataset, self._files = data.dataset, data.files
        self._step = held_out.make_step(recipe)
        self._scorer = data.scorer(run, recipe) if data.files else None

    def due(self, step: int) -> bool:
        every = self._run.evaluation.every
        return every > 0 and step % every == 0 and step < self._run.steps

    def owed(self, step: int, peers: Any) -> bool:
        """Whether `step`, which is saved, lacks the record of its evaluation: an earlier launch was
        killed before it had one. Every process must call it, with its `agreement.Peers`."""
        if step == 0 or not (self.due(step) or step == self._run.steps):
            return False
        lacking = "" if self._reporter.has_evaluated(step) else "lacking"
        return peers.broadcast("evaluation", lacking) == "lacking"

    def __call__(self, step: int, state: State) -> None:
        """Reports, unless nothing is held out and nothing asked. Every process must call it."""
        scalars, extent = self._held_out(state) if self._dataset.num_held_out_windows else ({}, "")
        if self._files:
            params = multiple_choice.params_of(self._recipe, state)
            for file in self._files:
                found = file.answered(self._scorer, params)
                scalars |= {f"{file.name}/{name}": found[name] for name in multiple_choice.REPORTED}
        if scalars:
            self._reporter.eval(step, scalars, extent)

    def _held_out(self, state: State) -> tuple[dict[str, float], str]:
        """The means over the held-out split, and which part of it they are over."""
        loss = self._recipe.loss
        params = loss.evaluated(state.averaged, state.frozen, state.extra)
        result = held_out.losses(
            self._recipe, self._step, params, self._dataset,
            batch_size=held_out.batch_size(self._run), batches=self._run.evaluation.batches,
            view=self._rows and self._rows.view(state.extra[looked_up.TABLES]),
        )  # fmt: skip
        # The loss of pairs is not one of tokens, nor is that of records.
        names = ("loss", *(loss.of_pairs or ("perplexity",)))
        if held_out.of_records(self._recipe):
            names = ("loss", *held_out.OF_CLICKS)
        return {name: result[name] for name in names}, held_out.extent_text(result)
