"""A run that trains reports what `llmx.evaluate` finds in its checkpoints."""

import json
import types

import numpy as np
import pytest
from support import runs

import llmx
from llmx import config as config_lib
from llmx import train
from llmx.data import choices, tokenizers
from llmx.evaluate import __main__ as evaluate
from llmx.evaluate import during_training
from llmx.model import families
from llmx.report import __main__ as report

# The same parameters on another mesh, adapters merged: sums in another order, in fp32.
OTHERWISE = 2e-5
WORDS = ["red", "green", "blue", "one", "two", "three", "café", "日本"]


def questions(path, number: int = 21) -> str:
    noise = np.random.default_rng(0)
    with open(path, "w") as file:
        for _ in range(number):
            # No two alike, of which rounding would choose one.
            texts = [f"{word} {noise.choice(WORDS)}" for word in noise.permutation(WORDS)[:4]]
            prompt = " ".join(noise.choice(WORDS, noise.integers(0, 9)))
            record = {"question": prompt, "choices": texts, "answer": int(noise.integers(4))}
            file.write(json.dumps(record) + "\n")
    return str(path)


def small(folder, **keys) -> config_lib.Config:
    noise = np.random.default_rng(1)
    (folder / "text.txt").write_text(" ".join(noise.choice(WORDS, 4000)))
    run = config_lib.default()
    run.workdir, run.steps, run.precision = str(folder / "run"), 4, "fp32"
    sizes = dict(width=16, num_layers=4, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=32)
    run.model = families.preset("llama3", **sizes | {"vocab_multiple": 8})
    run.data.sources, run.data.cache_dir = (str(folder / "text.txt"),), str(folder / "cache")
    run.batch.size, run.batch.sequence_length, run.data.held_out = 8, 64, 0.1
    run.optimizer.warmup_steps, run.optimizer.learning_rate = 1, 0.02
    run.checkpoint.every, run.evaluation.every, run.metrics.log_every = 2, 2, 1
    run.metrics.progress, run.metrics.tensorboard, run.launch.compile_cache = "plain", False, ""
    run.data.num_threads, run.evaluation.batches = 0, 1
    run.evaluation.choices = (questions(folder / "colors.jsonl"),)
    for key, value in keys.items():
        config_lib.set_value(run, key.replace("__", "."), value)
    return run


SETUPS = {
    "fsdp-tensor": dict(mesh__fsdp=2, mesh__tensor=2),
    "sequence-ema": dict(mesh__sequence=2, optimizer__ema_decay=0.5),
    "adapters": dict(adapters__rank=2, mesh__fsdp=2, optimizer__learning_rate=0.1),
    "diloco": dict(sync__strategy="diloco", sync__every=2, mesh__data=2, mesh__fsdp=4),
}
STAGED = {
    "stages": dict(mesh__stage=2, batch__accumulation=2, pipeline__schedule="zb_v"),
    "stages-adapters": dict(
        mesh__stage=2, mesh__data=2, mesh__fsdp=2, batch__accumulation=2, adapters__rank=2
    ),
}


@pytest.mark.parametrize("setup", SETUPS)
def test_the_shares_are_those_of_the_command(setup, tmp_path, monkeypatch, capsys):
    assert_as_the_command(small(tmp_path, **SETUPS[setup]), monkeypatch, capsys)


@pytest.mark.parametrize("setup", STAGED)
def test_the_shares_of_a_pipeline_are_those_of_the_command(setup, tmp_path, monkeypatch, capsys):
    assert_as_the_command(small(tmp_path, **STAGED[setup]), monkeypatch, capsys)


def assert_as_the_command(run, monkeypatch, capsys):
    """At each evaluation the losses of choices, both shares, and the held-out loss."""
    losses, scores = [], choices.scores

    def noting(questions, several, nats):
        losses.append(nats)
        return scores(questions, several, nats)

    monkeypatch.setattr(choices, "scores", noting)
    seen = []
    fitted = llmx.fit(run, callbacks=[seen.append])
    assert fitted.done
    assert "colors/accuracy 0." in capsys.readouterr().out
    records = [record for record in fitted.history if record["kind"] == "eval"]
    assert [record["step"] for record in records] == [2, 4]
    assert records == [record for record in seen if record["kind"] == "eval"]

    for number, record in enumerate(records):
        flags = ["--workdir", run.workdir, "--step", str(record["step"]), "--json"]
        assert evaluate.main([*flags, "--choices", run.evaluation.choices[0]]) == 0
        said = json.loads(capsys.readouterr().out.splitlines()[-1])
        np.testing.assert_allclose(losses[number], losses[2 + number], rtol=OTHERWISE)
        for name in ("accuracy", "accuracy_per_byte"):
            assert record[f"colors/{name}"] == said[name]
        assert np.ptp(losses[number]) > 1
        assert evaluate.main(flags) == 0
        said = json.loads(capsys.readouterr().out.splitlines()[-1])
        np.testing.assert_allclose(record["loss"], said["loss"], rtol=OTHERWISE)


def test_questions_alone_are_reported_and_drawn(tmp_path):
    """Where nothing is held out: at the end too, and by two files."""
    more = questions(tmp_path / "few.jsonl", number=2)
    run = small(tmp_path, data__held_out=0.0, evaluation__every=0, metrics__tensorboard=True)
    run.evaluation.choices = (*run.evaluation.choices, more)
    fitted = llmx.fit(run)
    (record,) = [record for record in fitted.history if record["kind"] == "eval"]
    names = {
        f"{file}/{name}" for file in ("colors", "few") for name in ("accuracy", "accuracy_per_byte")
    }
    assert record.keys() - {"kind", "step", "tokens", "time"} == names and record["step"] == 4
    assert record["few/accuracy"] in (0, 0.5, 1)
    assert (fitted.workdir / "loss.png").exists()
    page = tmp_path / "page.html"
    assert report.main([run.workdir, "--output", str(page)]) == 0 and page.exists()
    (events,) = (fitted.workdir / "tensorboard").glob("events*")
    assert b"eval/few/accuracy_per_byte" in events.read_bytes()


LONG = {"question": "Which?", "choices": ["a", "b" * 64], "answer": 0}
FILES = {
    "none": (None, r"evaluation.choices: '\S+asked.jsonl' does not exist: name JSONL files"),
    "empty": ("", r"evaluation.choices: \S+asked.jsonl has no questions"),
    "no JSON": ("x", r"evaluation.choices: \S+asked.jsonl: line 1: .* give one JSON object a line"),
    "one choice": (LONG | {"choices": ["a"]}, "line 1: the choices are no list of two texts"),
    "half a character": (
        json.dumps(LONG | {"question": "\ud800"}), r"line 1: half a character, '\\ud800', in a text"
    ),
    "longer than a row": (
        LONG, "asked.jsonl: question 1: a choice has 65 tokens and its row 64 positions: leave"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", FILES)
def test_files_that_cannot_be_asked_are_refused_before_anything_compiles(
    kind, tmp_path, monkeypatch
):
    content, said = FILES[kind]
    run, path = small(tmp_path), tmp_path / "asked.jsonl"
    run.evaluation.choices = (str(path),)
    if content is not None:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    monkeypatch.setattr(train, "Loop", None)  # which compiles
    with pytest.raises(ValueError, match=said):
        llmx.fit(run)


def test_names_by_which_two_would_be_reported_are_refused(tmp_path):
    run = small(tmp_path)
    (tmp_path / "more").mkdir()
    run.evaluation.choices += (questions(tmp_path / "more/colors.jsonl"), "")
    with pytest.raises(ValueError, match="2 files of the name 'colors'") as caught:
        llmx.fit(run)
    assert "evaluation.choices has an empty name" in str(caught.value)


def test_stages_that_cannot_share_the_width_are_refused(tmp_path, monkeypatch):
    """Six devices, which train a width of 32 in two stages of three."""
    sizes = dict(width=32, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=24)
    config = runs.make_config(
        "llama3", model=sizes | {"vocab_multiple": 6}, mesh={"stage": 2, "data": 3},
        sharding__layout="ddp", batch__size=12, batch__accumulation=2,
        evaluation__choices=(questions(tmp_path / "colors.jsonl"),), batch__sequence_length=64,
    )  # fmt: skip
    data = types.SimpleNamespace(tokenizer=tokenizers.ByteTokenizer())
    with pytest.raises(ValueError, match=r"evaluation\.choices: .*32"):
        during_training.EvaluationData(config, runs.make_recipe(config), data)
