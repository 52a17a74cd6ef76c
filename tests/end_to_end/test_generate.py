"""A run generates the same text whatever devices share its layers, or says why it cannot."""

import json
import re
import shutil

import jax
import numpy as np
import pytest

from llmx import config as config_lib
from llmx import generate
from llmx.checkpoint import checkpointer
from llmx.config import ConfigError, checks
from llmx.config import recipe as recipe_lib
from llmx.data import config as data_config
from llmx.data import dataset, tokenizers
from llmx.evaluate import __main__ as evaluate
from llmx.model import apply, families, sampling
from llmx.model.attention import cache

# By query heads and K/V heads, which of 2, 3, 4 and 6 devices may share them.
SHARES = {(6, 3): (3, 6), (8, 2): (2, 4), (12, 4): (2, 4), (12, 2): (2, 4, 6), (6, 1): (2, 3, 6)}
PROMPTS = [[5, 3, 8, 1], [7, 2]]


def run_of(num_heads: int, num_kv_heads: int) -> config_lib.Config:
    run = config_lib.default()
    run.model.vocab_size, run.model.vocab_multiple, run.model.num_layers = 48, 48, 2
    run.model.num_heads, run.model.num_kv_heads, run.model.head_dim = num_heads, num_kv_heads, 8
    run.model.width, run.model.mlp_dim, run.precision = 24, 48, "fp32"
    # What generation has no use for, and what its mesh would refuse.
    run.remat, run.mesh.stage, run.mesh.data, run.sharding.replicate_kv = "part", 2, 1, True
    return run


def added(run: config_lib.Config) -> list[list[int]]:
    devices = jax.devices()[: run.mesh.tensor * run.mesh.fsdp]
    recipe = recipe_lib.make_recipe(run, devices=devices)
    # Larger than a run's first weights, so that texts depend on the prompts.
    params = jax.tree.map(lambda leaf: 4 * leaf, recipe.init(0).params)
    return sampling.generate(
        recipe.loss.apply, params, recipe.loss.execution, PROMPTS, max_tokens=12, temperature=0
    )


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "shares"),
    [(6, 3, (3, 6)), (12, 2, (4,)), (6, 1, (2,))],
    ids=["split, and whole", "a few of several", "one"],
)
def test_devices_that_share_heads_change_no_token(num_heads, num_kv_heads, shares):
    run = run_of(num_heads, num_kv_heads)
    alone = added(checks.for_inference(run))
    assert len({tuple(text) for text in alone}) == len(PROMPTS)
    for tensor in shares:
        assert added(checks.for_inference(run, tensor=tensor)) == alone


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), SHARES)
def test_devices_that_cannot_share_heads_are_refused(num_heads, num_kv_heads):
    run = run_of(num_heads, num_kv_heads)
    for tensor in (2, 3, 4, 6):
        if tensor in SHARES[num_heads, num_kv_heads]:
            checks.for_inference(run, tensor=tensor)
            continue
        with pytest.raises(ConfigError) as refused:
            checks.for_inference(run, tensor=tensor)
        remedies = re.findall(r"use tensor in \[([0-9, ]+)\]", str(refused.value))
        assert f"={tensor}" in str(refused.value) and remedies
        for remedy in remedies:
            assert tensor not in map(int, remedy.split(","))


def test_other_devices_share_the_parameters_only():
    run = run_of(6, 3)
    assert added(checks.for_inference(run, fsdp=2)) == added(checks.for_inference(run))
    with pytest.raises(ConfigError, match=r"model.width=24 does not divide over 5"):
        checks.for_inference(run, fsdp=5)


@pytest.fixture
def trained(tmp_path) -> config_lib.Config:
    """A run of two stages with a checkpoint."""
    run = run_of(6, 3)
    run.workdir, run.data.cache_dir = str(tmp_path / "run"), str(tmp_path / "cache")
    (tmp_path / "text.txt").write_text("a few words " * 400)
    run.data.sources, run.data.held_out = (str(tmp_path / "text.txt"),), 0.5
    run.model.vocab_size, run.model.vocab_multiple = 0, 6
    run.batch.size, run.batch.accumulation = 8, 2
    run.batch.sequence_length = run.model.max_positions = 16
    run.sharding.replicate_kv = False
    run.launch.compile_cache = ""
    run = checks.resolve(run, 2)
    config_lib.save_run(run)
    tokenizers.ByteTokenizer().save(tmp_path / "run/tokenizer.json")
    state = {"params": apply.init_parameters(run.model, 0)}
    where = f"{run.workdir}/checkpoints"
    with checkpointer.Checkpointer(where, run.checkpoint, log=print) as saver:
        saver.save(3, state, meta={"step": 3}, wait=True)
    return run


def test_the_commands_refuse_what_training_refuses(trained, capsys):
    command = ["--workdir", trained.workdir, "--prompt", "a", "--max-tokens", "3"]
    assert generate.main([*command, "--tensor", "2"]) == 2
    said = capsys.readouterr().err
    assert "model.num_kv_heads=3 does not divide over tensor=2: use tensor in [1, 3]" in said
    assert "replicate_kv" not in said
    assert generate.main([*command, "--tensor", "3"]) == 0


def test_a_run_with_parts_is_evaluated(trained, capsys):
    assert evaluate.main(["--workdir", trained.workdir, "--json"]) == 0
    assert np.isfinite(float(re.search(r'"loss": ([0-9.]+)', capsys.readouterr().out)[1]))


TEMPLATE = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@pytest.fixture(scope="module")
def talking(tmp_path_factory) -> str:
    """The work directory of a run with a chat template, whose text is noise."""
    run = config_lib.default()
    run.workdir = workdir = str(tmp_path_factory.mktemp("talking"))
    run.model = families.preset("llama3", vocab_size=257, num_layers=1, max_positions=128)
    run.launch.compile_cache = ""
    config_lib.save_run(run)
    tokenizers.ByteTokenizer().with_template(TEMPLATE).save(f"{workdir}/tokenizer.json")
    rng = np.random.default_rng(0)
    shapes, _ = apply.abstract_parameters(run.model)
    draw = lambda leaf: jax.numpy.asarray(rng.normal(size=leaf.shape), np.float32)  # noqa: E731
    state = {"params": jax.tree.map(draw, shapes)}
    where = f"{workdir}/checkpoints"
    with checkpointer.Checkpointer(where, run.checkpoint, log=print) as saver:
        saver.save(3, state, meta={"step": 3}, wait=True)
    return workdir


def printed(capsys, workdir, *flags) -> str:
    capsys.readouterr()
    assert generate.main(["--workdir", workdir, "--max-tokens", "20", *flags]) == 0
    return capsys.readouterr().out


def test_streamed_text_is_the_same(talking, capsys):
    prompts = ["--prompt", "two", "--prompt", "a é", "--samples", "2", "--seed", "5"]
    whole = printed(capsys, talking, *prompts)
    parts = [part.partition("\n")[2] for part in whole.split("--- prompt")]
    assert len(parts) == 5
    stop = parts[2][len("two") + 4 : len("two") + 6]
    assert printed(capsys, talking, *prompts, "--stream") == whole
    # Of the second text nothing is shown from its stop string on.
    said = printed(capsys, talking, *prompts, "--stop", stop).split("--- prompt")
    assert said[2].partition("\n")[2] == parts[2][: parts[2].index(stop, 3)] + "\n"


def test_the_flag_keeps_keys_and_values_in_int8(talking, capsys, monkeypatch):
    """And the config's value does, unless the flag says otherwise."""
    kinds, empty_slots = [], cache.empty_slots

    def noted(*arguments, kind, **settings):
        kinds.append(kind)
        return empty_slots(*arguments, kind=kind, **settings)

    monkeypatch.setattr(apply, "empty_slots", noted)
    prompts = ["--prompt", "two", "--prompt", "a", "--max-tokens", "8"]
    whole = printed(capsys, talking, *prompts, "--kv-cache", "int8")
    assert set(kinds) == {"int8"}
    assert printed(capsys, talking, *prompts, "--kv-cache", "int8", "--stream") == whole
    run = config_lib.load_run(talking)
    run.sample.kv_cache = "int8"
    monkeypatch.setattr(config_lib, "load_run", lambda workdir, **_: run)
    assert printed(capsys, talking, *prompts) == whole
    assert set(kinds) == {"int8"}
    printed(capsys, talking, *prompts, "--kv-cache", "precision")
    assert kinds[-1] == ""


def test_text_for_a_student(talking, tmp_path, capsys):
    """Prompts of a corpus, continued in batches, are lines that training reads; see also
    tests/data/test_generated.py."""
    source, output = tmp_path / "text.txt", tmp_path / "made.jsonl"
    source.write_text("one two three four five six seven eight nine ten eleven twelve")
    flags = ["--workdir", talking, "--max-tokens", "6", "--temperature", "0", "--output"]
    cut = ["--prompt-source", str(source), "--prompt-tokens", "8", "--batch", "3"]
    assert generate.main([*flags, str(output), *cut, "--number", "4"]) == 0
    texts = [json.loads(line)["text"] for line in output.read_text().splitlines()]
    assert [text[:8] for text in texts] == ["one two ", "four fiv", "seven ei", "ne ten e"]
    alone = printed(
        capsys, talking, "--prompt", "four fiv", "--max-tokens", "6", "--temperature", "0"
    )
    assert alone == texts[1] + "\n"
    said = ["--number", "9", *cut]
    assert generate.main([*flags, str(output), *said]) == 0
    assert "has 4 texts: the source has no more prompts" in capsys.readouterr().err
    values = data_config.DataConfig(
        sources=(str(output),), held_out=0.0, cache_dir=str(tmp_path / "cache")
    )
    opened = dataset.open_dataset(values, sequence_length=8, seed=0, log=lambda line: None)
    assert opened.num_train_windows > 0
    for wrong in (["--chat"], ["--batch", "0"], ["--number", "0"]):
        assert generate.main([*flags, str(output), *cut, *wrong]) == 2
    assert generate.main(["--workdir", talking, *cut]) == 2
    assert "--prompt-source goes with --output" in capsys.readouterr().err


def converse(capsys, monkeypatch, workdir, *lines, flags=()) -> list[str]:
    """What is said to the lines of a conversation, each between two marks of the reader."""
    capsys.readouterr()
    answers, left = [], iter(lines)

    def read(_):
        answers.append(capsys.readouterr().out)
        if (line := next(left, None)) is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", read)
    assert generate.main(["--workdir", workdir, "--max-tokens", "20", "--chat", *flags]) == 0
    return answers[1:]


def test_a_conversation_is_its_rendered_prompt(talking, capsys, monkeypatch):
    end, lines = "<|endoftext|>", ("hi", "and?", "/reset", "hi", "/exit", "x")
    first, second, nothing, again = converse(
        capsys, monkeypatch, talking, *lines, flags=["--system", "be kind"]
    )
    assert again == first and nothing == "" and len(first) > 5
    prompt = f"system: be kind{end}user: hi{end}assistant: "
    longer = f"{prompt}{first[:-1]}{end}user: and?{end}assistant: "
    whole = printed(capsys, talking, "--prompt", prompt, "--prompt", longer)
    _, one, two = whole.split("--- prompt")
    assert one.endswith(f"user: hiassistant: {first}")
    assert two.endswith(f"user: and?assistant: {second}")


def test_what_goes_wrong_in_a_conversation(talking, capsys, monkeypatch, tmp_path):
    assert generate.main(["--workdir", talking, "--chat", "--prompt", "a"]) == 2
    assert "--chat reads turns from standard input" in capsys.readouterr().err
    assert generate.main(["--workdir", talking, "--system", "a", "--prompt", "a"]) == 2
    assert "--system goes with --chat" in capsys.readouterr().err
    # Too long a turn is left out, and the conversation goes on.
    answers = converse(capsys, monkeypatch, talking, "x" * 200, "hi", "/reset", "hi")
    assert answers[0] == answers[2] == "" and answers[1] == answers[3] != ""
    shutil.copytree(talking, tmp_path / "bare")
    (tmp_path / "bare/chat_template.jinja").unlink()
    assert generate.main(["--workdir", str(tmp_path / "bare"), "--chat"]) == 2
    assert "has no chat template: set data.chat_template" in capsys.readouterr().err
