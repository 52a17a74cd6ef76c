"""A run as a model of lm-evaluation-harness: `lm_eval.simple_evaluate(model="llmx", ...)`.

Its requests are answered as its own `HFLM` answers them for the exported model: the same tokens,
prompts cut at the left, rolling windows and stop strings.
"""

import collections
import functools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs

from llmx import config
from llmx.checkpoint import mirror
from llmx.config import recipe as recipe_lib
from llmx.data import chat, text_stream, tokenizers
from llmx.data.choices import Continuation
from llmx.evaluate import held_out, saved_run
from llmx.evaluate.multiple_choice import Scorer, Scores
from llmx.model import sampling
from llmx.runtime import launch

SHORTEST_ROW = 128  # of a batch: the longest request's tokens, rounded up to a power of two
BLOCK = 16  # tokens that are generated between two looks for stop strings
# Settings of generation that change nothing.
_NEUTRAL = {"num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1.0}


class Refused(ValueError):
    """What a user can put right: a work directory, an argument, a request."""


@register_model("llmx")
class LlmxLM(TemplateLM):
    """The model of a work directory, on all devices of this machine, in this process alone."""

    def __init__(
        self, workdir: str = "", *, step: int | None = None, max_length: int | None = None,
        max_gen_toks: int = 256, batch_size: int | str = "auto", precision: str = "",
        tensor: int = 1, seed: int = 0, max_batch_size: int | None = None,
        device: str | None = None, **unknown: Any,
    ):  # fmt: skip
        """Args:
          workdir: of a run, or of a model that `llmx.convert --from-hf` imported.
          step: of the checkpoint; the newest by default.
          max_length: tokens of a prompt with what follows it, at most; by default `max_positions`.
          max_gen_toks: tokens to generate at most, where a task does not say.
          batch_size: rows of a batch, more where the devices need more; "auto": those of the run.
          precision: of the computation, as of a config; by default that of the run.
          tensor: devices that share each layer. The others take other rows.
          seed: of texts that are sampled.
          max_batch_size, device: of other models; JAX chooses the devices.

        Raises Refused for a work directory without a run, for other arguments, and for a mesh that
        does not fit.
        """
        super().__init__()
        if unknown or not workdir:
            wrong = f"has no {sorted(unknown)}" if unknown else "names no run"
            raise Refused(
                f"--model_args {wrong}: give workdir=RUN, and if need be step, max_length, "
                "max_gen_toks, precision, tensor and seed"
            )
        try:
            workdir = mirror.reading(workdir)
            run = config.load_run(workdir, with_ngrams=True)
            self._coder = tokenizers.of_run(workdir)
            launch.start(launch.LaunchConfig(coordinator="none"))
            run.precision = precision or run.precision
            run = saved_run.config_of(run, workdir, tensor=tensor)
            self._recipe = recipe_lib.make_recipe(run)
            restored = saved_run.params_of(run, self._recipe, workdir, step=step)
        except (ValueError, RuntimeError, OSError) as error:
            raise Refused(str(error)) from error
        launch.note(f"step {restored.step} of {workdir}")
        self._stops = chat.stop_tokens(self._coder, run.data.format)
        self._params, self._workdir, self._step = restored.state, workdir, restored.step
        positions = run.model.max_positions
        self.max_length, self.max_gen_toks = int(max_length or positions), int(max_gen_toks)
        if not 1 <= self.max_length <= positions:
            raise Refused(
                f"max_length={max_length} must be 1 to {positions}, the max_positions of the model"
            )
        automatic = str(batch_size).startswith("auto")
        self._batch_size = held_out.batch_size(run) if automatic else int(batch_size)
        if self._batch_size < 1:
            raise Refused(f'batch_size={batch_size} must be at least 1, or "auto"')
        self._seed, self._batches_sampled = int(seed), 0
        self._scorers: dict[int, Scorer] = {}  # by tokens of a row

    # ------------------------------------------------------------------------------------- tokens

    @property
    def eot_token_id(self) -> int:
        return self._named("eos_token", self._coder.end_of_document)

    @property
    def prefix_token_id(self) -> int:
        return self._named("bos_token", self.eot_token_id)

    def _named(self, name: str, default: int) -> int:
        return self._coder.special.get(self._coder.names.get(name, ""), default)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **options: Any
    ) -> list[int]:  # fmt: skip
        """Ids; special tokens are read. None: behind the tokens that the tokenizer begins a text
        with, unless these are there."""
        if add_special_tokens is None:
            return self._coder.encode_prompt(string).tolist()
        ids = self._coder.encode_marked(string, self._coder.find_special(string)).ids.tolist()
        return [*self._coder.start, *ids] if add_special_tokens else ids

    @property
    def tokenizer_name(self) -> str:
        return f"llmx-{self._coder.fingerprint[:16]}"

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The run's template, if one is to be applied. Raises Refused if it has none."""
        if not chat_template:
            return None
        # Answers to what it renders end as turns do, whatever the run was trained on.
        self._stops = chat.stop_tokens(self._coder, "chat")
        return self._template.source

    @functools.cached_property
    def _template(self) -> chat.Template:
        try:
            return chat.template_of(self._coder)
        except ValueError as error:
            raise Refused(f"{self._workdir}: {error}") from error

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:  # fmt: skip
        """The text of a conversation; without `add_generation_prompt` it ends inside of its last
        message, which is to be continued. A system message that the template refuses is left out.
        """
        render = functools.partial(self._template.render, generation_prompt=add_generation_prompt)
        try:
            text = render(chat_history).text
        except ValueError:
            without = [message for message in chat_history if message["role"] != "system"]
            if len(without) == len(chat_history):
                raise
            text = render(without).text
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].strip()
        begin, found, _ = text.rpartition(last)
        return begin + found

    # -------------------------------------------------------------------------------- likelihoods

    def loglikelihood(self, requests: Sequence, disable_tqdm: bool = False) -> list:
        for request in requests:
            if not request.args[1]:
                raise Refused(f"an empty continuation of {request.args[0][-80:]!r}: give text")
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """As the harness; but where tokens join so that none is left, the last one of both."""
        before, behind = super()._encode_pair(context, continuation)
        if behind:
            return before, behind
        *before, last = self.tok_encode(context + continuation)
        return before or [self.prefix_token_id], [last]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **options: Any
    ) -> list[tuple[float, bool]]:
        """(log-likelihood, whether greedy) of each (texts, ids of a prompt, ids behind it)."""
        several = [self._cut(*request) for request in requests]
        if not several:
            return []
        nats, greedy = self._scored(several)
        found = [
            (-float(one), bool(is_greedy)) for one, is_greedy in zip(nats, greedy, strict=True)
        ]
        for (texts, *_), answer in zip(requests, found, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return found

    def _cut(self, texts: Any, prompt: list[int], ids: list[int]) -> Continuation:
        """Without the beginning that is longer than `max_length`."""
        if not 1 <= len(ids) <= self.max_length:
            shown = repr(texts[1][:80]) if texts else "a window"
            raise Refused(
                f"the continuation {shown} has {len(ids)} tokens behind its prompt, and must have "
                f"1 to {self.max_length}: leave it out, or raise max_length"
            )
        prompt = [*prompt, *ids][-(self.max_length + 1) : -len(ids)]
        return Continuation(np.array(prompt, np.int32), np.array(ids, np.int32), 0)

    def _scored(self, several: Sequence[Continuation]) -> Scores:
        longest = max(one.size - 1 for one in several)
        length = max(SHORTEST_ROW, 1 << (longest - 1).bit_length())
        length = min(length, self._recipe.model.max_positions)
        if length not in self._scorers:
            loss = self._recipe.loss
            self._scorers[length] = Scorer(
                loss.apply, loss.execution, batch_size=self._batch_size, length=length,
                filler=self._coder.end_of_document,
            )  # fmt: skip
        return self._scorers[length](self._params, several)

    def loglikelihood_rolling(self, requests: Sequence, disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, in windows of `max_length` tokens."""
        windows, counts = [], []
        for request in requests:
            pairs = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]), prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length, context_len=1,
            )  # fmt: skip
            own = [(None, *utils.make_disjoint_window(pair)) for pair in pairs]
            windows, counts = [*windows, *own], [*counts, len(own)]
        nats = [answer for answer, _ in self._loglikelihood_tokens(windows)]
        ends = np.cumsum(counts)
        sums = [float(sum(nats[end - n : end])) for end, n in zip(ends, counts, strict=True)]
        for request, found in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, found)
        return sums

    # --------------------------------------------------------------------------------- generation

    def generate_until(self, requests: Sequence, disable_tqdm: bool = False) -> list[str]:
        """Texts that continue prompts until a stop string, the end of text, or a number of tokens.

        Requests of the same settings are generated together, the longest prompts first.
        """
        groups, texts = collections.defaultdict(list), [""] * len(requests)
        for number, request in enumerate(requests):
            groups[json.dumps(request.args[1], sort_keys=True, default=repr)].append(number)
        for numbers in groups.values():
            given = requests[numbers[0]].args[1]
            settings, until = self._settings(given)
            room = self.max_length - settings["max_tokens"]
            if room < 1:
                raise Refused(
                    f"max_gen_toks={settings['max_tokens']} leaves no room for a prompt in "
                    f"{self.max_length} tokens: use fewer, or raise max_length"
                )
            prompts = {n: self._prompt(requests[n].args[0], room) for n in numbers}
            numbers.sort(key=lambda n: (-len(prompts[n]), requests[n].args[0]))
            for first in range(0, len(numbers), self._batch_size):
                batch = numbers[first : first + self._batch_size]
                found = self._generated([prompts[n] for n in batch], settings, until)
                for number, text in zip(batch, found, strict=True):
                    texts[number] = text
                    self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return texts

    def _prompt(self, text: str, room: int) -> list[int]:
        return (self.tok_encode(text) or [self.prefix_token_id])[-room:]

    def _settings(self, given: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Those of `sampling.stream`, and stop strings, of a task's settings of generation."""
        given = {name: value for name, value in given.items() if value is not None}
        rest = dict(normalize_gen_kwargs(given, self.max_gen_toks))
        until = [text for text in rest.pop("until") if text]
        temperature, samples = float(rest.pop("temperature", 0.0)), rest.pop("do_sample")
        settings = {
            "max_tokens": rest.pop("max_gen_toks"), "temperature": temperature if samples else 0.0,
            "top_k": int(rest.pop("top_k", 0)), "top_p": float(rest.pop("top_p", 1.0)),
        }  # fmt: skip
        unknown = {name for name, value in rest.items() if _NEUTRAL.get(name) != value}
        if unknown:
            raise Refused(
                f"generation has no settings {sorted(unknown)}: leave them out; there are until, "
                "max_gen_toks, do_sample, temperature, top_k and top_p"
            )
        problems = list(sampling.sampling_problems(*list(settings.values())[1:]))
        if problems:
            raise Refused("\n".join(problems))
        # A stop string may be a special token, which is no part of a text.
        named = (self._coder.special[text] for text in until if text in self._coder.special)
        stop_tokens = sorted({*self._stops, self.eot_token_id, *named})
        return settings | {"stop_tokens": stop_tokens}, until

    def _generated(
        self, prompts: Sequence[list[int]], settings: dict[str, Any], until: Iterable[str]
    ) -> list[str]:  # fmt: skip
        """What follows each prompt. The last one fills the batch up, so that one program does."""
        filled = [*prompts, *[prompts[-1]] * (self._batch_size - len(prompts))]
        number, until = len(prompts), tuple(until)
        # Of what is generated alone, as the harness decodes it.
        streams = [text_stream.TextStream(self._coder, [], stops=until) for _ in prompts]
        added: list[list[int]] = [[] for _ in prompts]
        seed = self._seed + self._batches_sampled
        self._batches_sampled += 1
        loss = self._recipe.loss
        for blocks in sampling.stream(
            loss.apply, self._params, loss.execution, filled, **settings, seed=seed, block=BLOCK
        ):
            for stream, ids, new in zip(streams, added, blocks[:number], strict=True):
                ids.extend(new)
                stream.add(new)
            if all(stream.stopped for stream in streams):
                break
        texts = map(self._coder.decode, added)
        return [
            min((text.split(stop)[0] for stop in until), key=len, default=text) for text in texts
        ]

    def get_model_info(self) -> dict[str, Any]:
        """For the results of a command."""
        shapes = jax.tree.leaves(self._recipe.loss.model_params)
        return {
            "model_num_parameters": sum(int(np.prod(leaf.shape)) for leaf in shapes),
            "model_revision": f"step {self._step}",
        }
