"""A run as a model of lm-evaluation-harness: its answers are those of the harness's own HFLM."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from support import chat_templates, hf_models, small_tokenizers

from llmx import convert
from llmx.evaluate import harness
from llmx.runtime import exits

os.environ["HF_HUB_OFFLINE"] = "1"
WHY = "the harness is of the extra `eval`, and what it is compared with of the extra `hf`"
lm_eval = pytest.importorskip("lm_eval", reason=WHY)
lm_eval_tasks = pytest.importorskip("lm_eval.tasks", reason=WHY)
torch = pytest.importorskip("torch", reason=WHY)
transformers = pytest.importorskip("transformers", reason=WHY)
Instance = pytest.importorskip("lm_eval.api.instance", reason=WHY).Instance
huggingface = pytest.importorskip("lm_eval.models.huggingface", reason=WHY)
harness_model = pytest.importorskip("llmx.evaluate.harness_model", reason=WHY)

CLOSE = 1e-4  # nats, of sums over up to 64 tokens in fp32
LENGTH = 64
KINDS = {"byte_level": "llama3", "sentencepiece": "mistral"}  # with a chat template each
# Both runs of a kind of tokenizer belong on one worker.
GROUPS = [pytest.param(kind, marks=pytest.mark.xdist_group(f"harness {kind}")) for kind in KINDS]
WORDS = ["the model", "reads", "a text", "été", "日本語", "tokens", "def return", "12 34", "\n"]


def request(kind: str, *args) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=args, idx=0)


def texts(count: int, most: int, *, seed: int, words=WORDS) -> list[str]:
    noise = np.random.default_rng(seed)
    return [" ".join(noise.choice(words, noise.integers(1, most))) for _ in range(count)]


@pytest.fixture(scope="module", params=GROUPS)
def both(request, tmp_path_factory):
    """The same random Llama as HFLM's and as ours, and our work directory."""
    folder = tmp_path_factory.mktemp("harness")
    template, kind, _ = chat_templates.STYLES[KINDS[request.param]]
    small_tokenizers.write(folder / "hf", kind, chat_template_jinja=template)
    coder = transformers.AutoTokenizer.from_pretrained(folder / "hf")
    values = hf_models.TINY | {
        "vocab_size": len(coder), "max_position_embeddings": LENGTH,
        "bos_token_id": coder.bos_token_id, "eos_token_id": coder.eos_token_id,
    }  # fmt: skip
    model = hf_models.make(transformers, "LlamaConfig", values, folder / "hf")
    theirs = huggingface.HFLM(pretrained=model, tokenizer=coder, batch_size=3, device="cpu")
    convert.from_hf(str(folder / "hf"), str(folder / "run"))
    ours = harness_model.LlmxLM(str(folder / "run"), precision="fp32", batch_size=3)
    return theirs, ours, folder / "run"


def assert_same(found, wanted):
    np.testing.assert_allclose([n for n, _ in found], [n for n, _ in wanted], rtol=0, atol=CLOSE)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]


def test_tokens_and_likelihoods(both):
    theirs, ours, _ = both
    assert (ours.prefix_token_id, ours.eot_token_id, ours.max_length) == (
        theirs.prefix_token_id, theirs.eot_token_id, theirs.max_length
    )  # fmt: skip
    prompts = ["", "a ", *texts(12, 6, seed=0), *texts(6, 60, seed=1)]  # the last are cut
    begins = theirs.tok_decode(theirs.prefix_token_id, skip_special_tokens=False)
    answers = texts(20, 4, seed=2)
    answers[::3] = [f" {text}" for text in answers[::3]]
    pairs = [*zip(prompts, answers, strict=True), (f"{begins}a", " b"), ("", f"{begins}c")]
    assert max(len(ours.tok_encode(one)) for one in prompts) > LENGTH
    for prompt, text in pairs:
        for one in (prompt, text, prompt + text):
            for special in (None, True, False):
                assert ours.tok_encode(one, special) == theirs.tok_encode(one, special)
    # HFLM has no answer where the tokens of a text join those before it, and none is left.
    asked = [pair for pair in pairs if not pair[0] or theirs._encode_pair(*pair)[1]]
    requests = [request("loglikelihood", *pair) for pair in asked]
    assert len(asked) >= 20
    assert_same(ours.loglikelihood(requests), theirs.loglikelihood(requests))
    every = [request("loglikelihood", *pair) for pair in pairs]
    assert all(nats < 0 for nats, _ in ours.loglikelihood(every))


def test_what_the_model_would_write_is_greedy(both):
    """Continuations by ids, so that each is what it is."""
    theirs, ours, _ = both
    noise, asked = np.random.default_rng(3), []
    for number in range(6):
        prompt = noise.integers(10, 400, 3 + number).tolist()
        with torch.no_grad():
            out = theirs.model.generate(
                torch.tensor([prompt]), max_new_tokens=1 + number, do_sample=False,
                eos_token_id=-1, pad_token_id=0,
            )  # fmt: skip
        added = out[0, len(prompt) :].tolist()
        other = [*added[:-1], (added[-1] + 1) % 400]
        asked += [(("p", "c"), prompt, added), (("p", "d"), prompt, other)]
    found = ours._loglikelihood_tokens(asked)
    assert_same(found, theirs._loglikelihood_tokens(asked))
    assert [greedy for _, greedy in found] == [True, False] * 6


def test_rolling_likelihoods(both):
    theirs, ours, _ = both
    requests = [request("loglikelihood_rolling", text) for text in [*texts(7, 80, seed=4), "a"]]
    lengths = [len(ours.tok_encode(one.args[0])) for one in requests]
    assert max(lengths) > 2 * LENGTH and min(lengths) < LENGTH
    found = ours.loglikelihood_rolling(requests)
    np.testing.assert_allclose(found, theirs.loglikelihood_rolling(requests), rtol=0, atol=CLOSE)


def test_greedy_texts(both):
    theirs, ours, _ = both
    prompts = [*texts(6, 6, seed=5), *texts(2, 70, seed=6)]
    settings = [
        {"until": [], "max_gen_toks": 12}, {"until": ["e", "\n\n"], "max_gen_toks": 20},
        {"until": " ", "max_gen_toks": 9, "do_sample": False, "temperature": 0.7},
    ]  # fmt: skip
    requests = [request("generate_until", p, dict(s)) for p in prompts for s in settings]
    found, wanted = ours.generate_until(requests), theirs.generate_until(requests)
    assert found == wanted
    assert len({*found}) > 8 and any(found)
    # Of an empty prompt HFLM takes what its tokenizer makes; without a token there is nothing.
    (text,) = ours.generate_until([request("generate_until", "", dict(settings[0]))])
    assert text


@pytest.mark.parametrize("both", ["byte_level"], indirect=True)
def test_a_special_token_ends_a_text(both):
    """Where a task's stop strings name one, as end_of_turn: it is no part of the text."""
    _, ours, _ = both
    settings = {"until": [], "max_gen_toks": 30}
    asked = [request("generate_until", text, settings) for text in texts(4, 9, seed=9)]
    whole = ours.generate_until(asked)
    name = list(ours._coder.special)[-1]
    found, stops = ours._settings(settings | {"until": [name, "x"]})
    stop_tokens = ours._settings(settings)[0]["stop_tokens"]
    assert {*found["stop_tokens"]} == {*stop_tokens, ours._coder.special[name]}
    assert stops == [name, "x"]
    ended = [request("generate_until", one.args[0], settings | {"until": [name]}) for one in asked]
    for text, longer in zip(ours.generate_until(ended), whole, strict=True):
        assert longer.startswith(text) and name not in text


@pytest.mark.parametrize("both", ["byte_level"], indirect=True)
def test_sampled_texts_depend_on_seed_and_number_only(both):
    _, _, workdir = both
    settings = {"until": [], "max_gen_toks": 16, "do_sample": True, "temperature": 1.0, "top_k": 50}
    requests = [request("generate_until", "the model", settings)] * 7  # in three batches
    found = []
    for seed in (0, 0, 5):
        model = harness_model.LlmxLM(str(workdir), precision="fp32", batch_size=3, seed=seed)
        found.append(model.generate_until(requests))
    assert len({*found[0]}) == 7
    assert found[0] == found[1] != found[2]


def test_chat_templates(both):
    theirs, ours, _ = both
    talk = [{"role": "user", "content": "the model"}, {"role": "assistant", "content": "reads "}]
    talk.append({"role": "user", "content": "a text"})
    assert ours.chat_template(True) == theirs.chat_template(True) and not ours.chat_template(False)
    for messages, prompted in ((talk[:1], True), (talk, True), (talk[:2], False)):
        text = theirs.apply_chat_template(messages, add_generation_prompt=prompted)
        assert ours.apply_chat_template(messages, add_generation_prompt=prompted) == text
        assert ours.tok_encode(text) == theirs.tok_encode(text)
    assert ours.tokenizer_name


REFUSED = {
    "no run": (dict(workdir="/nowhere"), "--workdir=/nowhere holds no run"),
    "nothing": (dict(workdir=""), "--model_args names no run: give workdir=RUN"),
    "unknown": (dict(pretrained="gpt2"), r"--model_args has no \['pretrained'\]: give workdir=RUN"),
    "long": (dict(max_length=65), "max_length=65 must be 1 to 64, the max_positions of the model"),
    "rows": (dict(batch_size=0), "batch_size=0 must be at least 1"),
    "tensor": (dict(tensor=3), "tensor"),
    "precision": (dict(precision="fp12"), "fp12"),
    "step": (dict(step=7), "7"),
}  # fmt: skip


@pytest.mark.parametrize("both", ["byte_level"], indirect=True)
@pytest.mark.parametrize("case", REFUSED)
def test_arguments_that_do_not_fit_are_refused(case, both):
    given, said = REFUSED[case]
    with pytest.raises(harness_model.Refused, match=said):
        harness_model.LlmxLM(**{"workdir": str(both[2])} | given)


@pytest.mark.parametrize("both", ["byte_level"], indirect=True)
def test_requests_that_cannot_be_answered_are_refused(both):
    _, ours, _ = both
    for args, said in (
        (("a", ""), "an empty continuation of 'a'"),
        (("a", " the model" * 80), "tokens behind its prompt, and must have 1 to 64: leave it out"),
    ):
        with pytest.raises(harness_model.Refused, match=said):
            ours.loglikelihood([request("loglikelihood", *args)])
    for settings, said in (
        ({"num_beams": 4}, r"no settings \['num_beams'\]: leave them out"),
        ({"max_gen_toks": 64}, "leaves no room for a prompt in 64 tokens"),
        ({"do_sample": True, "temperature": 1, "top_p": 2.0}, "top_p=2.0 must be above 0"),
    ):
        with pytest.raises(harness_model.Refused, match=said):
            ours.generate_until([request("generate_until", "a", {"until": []} | settings)])
    assert ours.loglikelihood([]) == ours.generate_until([]) == ours.loglikelihood_rolling([]) == []
    assert ours.loglikelihood_rolling([request("loglikelihood_rolling", "")])[0] <= 0


HEAD = """
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
"""
TASKS = {
    "asked": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "continued": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["."], max_gen_toks: 6}
metric_list: [{metric: exact_match}]
""",
    "read": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: bits_per_byte}, {metric: word_perplexity}]
""",
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    asked, answers = texts(9, 9, seed=7), texts(36, 3, seed=8, words=WORDS[:3] + WORDS[-4:-1])
    with open(folder / "asked.jsonl", "w") as file:
        for number, text in enumerate(asked):
            # No two alike, of which rounding would choose one.
            choices = [f"{n} {answers[4 * number + n]}" for n in range(4)]
            record = {"question": f"{number} {text}", "choices": choices}
            file.write(json.dumps(record | {"answer": number % 4}) + "\n")
    for name, text in TASKS.items():
        head = HEAD.replace("FILE", str(folder / "asked.jsonl"))
        (folder / f"{name}.yaml").write_text(f"task: {name}{head}{text}")
    return folder


def test_whole_tasks_have_the_figures_of_hflm(both, tasks):
    theirs, ours, _ = both
    manager = lm_eval_tasks.TaskManager(include_path=str(tasks), include_defaults=False)
    found, wanted = (
        lm_eval.simple_evaluate(
            model, tasks=list(TASKS), task_manager=manager, num_fewshot=0, bootstrap_iters=0
        )["results"]
        for model in (ours, theirs)
    )
    for name in TASKS:
        figures = {key: value for key, value in wanted[name].items() if isinstance(value, float)}
        assert figures
        for key, value in figures.items():
            np.testing.assert_allclose(found[name][key], value, rtol=1e-4)
    assert 0 < found["asked"]["acc,none"] < 1


@pytest.mark.parametrize("both", ["byte_level"], indirect=True)
def test_the_command(both, tasks, tmp_path):
    *_, workdir = both
    command = [sys.executable, "-m", "llmx.evaluate.harness", "--include_path", str(tasks)]
    own = ["--model_args", f"workdir={workdir}", "--tasks", "asked", "--batch_size", "2"]

    def run(*words):
        return subprocess.run([*command, *words], capture_output=True, text=True, check=False)

    done = run(*own, "--output_path", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert "|asked|" in done.stdout and "acc_norm" in done.stdout
    (saved,) = (tmp_path / "out").rglob("results*.json")
    assert json.loads(saved.read_text())["results"]["asked"]["acc,none"] >= 0
    refused = run("--model_args", f"workdir={tmp_path}", "--tasks", "asked")
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1].startswith(f"error: --workdir={tmp_path} holds no run")


@pytest.mark.parametrize(
    ("words", "said"), [(["--tasks", "asked,nosuch"], "nosuch"), ([], "No tasks specified")]
)
def test_what_the_harness_refuses_is_an_error_of_input(words, said, tasks, tmp_path, capsys):
    own = ["--include_path", str(tasks), "--model_args", f"workdir={tmp_path}"]
    assert harness.main([*own, *words]) == exits.REFUSED
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ") and said in last
