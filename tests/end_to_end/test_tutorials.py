"""The commands of docs/tutorials.md work as they stand there, with fewer steps."""

import json
import pathlib
import re
import shlex
import subprocess
import sys

import jax
import numpy as np
import pytest
from support import chat_templates, hf_checkpoints, small_tokenizers

from llmx.checkpoint import hf
from llmx.data import tokenizers

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tutorials.md").read_text()
SECTIONS = dict(zip(*[iter(re.split(r"^## (.*)$", PAGE, flags=re.MULTILINE)[1:])] * 2, strict=True))
FEWER = ["--config.steps=6", "--config.optimizer.warmup_steps=1", "--config.checkpoint.every=6",
         "--config.batch.size=2", "--config.batch.sequence_length=64",
         "--config.evaluation.batches=1"]  # fmt: skip


def commands(section: str) -> list[str]:
    (block,) = re.findall(r"```sh\n(.*?)```", SECTIONS[section], re.DOTALL)
    return block.strip().splitlines()


def run(line: str, folder: pathlib.Path, *more: str, talk: str = "") -> str:
    """The output of a command of the page, which must succeed."""
    python, *words = shlex.split(line)
    assert python == "python"
    done = subprocess.run(
        [sys.executable, *words, *more], cwd=folder, input=talk, text=True, timeout=400,
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{line}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the tutorials are followed: texts, a Llama, conversations, a book, questions."""
    folder = tmp_path_factory.mktemp("tutorial")
    (folder / "configs").symlink_to(ROOT / "configs")
    (folder / "texts").mkdir()
    words = ("the", "model", "reads", "text", "and", "learns", "it", "slowly", ".")
    random = np.random.default_rng(0)
    for number in range(4):
        (folder / "texts" / f"{number}.txt").write_text(" ".join(random.choice(words, 3000)))
    (folder / "book.txt").write_text(" ".join(random.choice(words, 300)))
    template = chat_templates.CHATML
    small_tokenizers.write(folder / "Llama", "byte_level", chat_template_jinja=template)
    size = tokenizers.load(folder / "Llama" / "tokenizer.json").vocab_size
    model, params = hf_checkpoints.random_params("llama3", vocab_size=size, max_positions=512)
    made = hf.export(jax.tree.map(lambda leaf: 0.05 * leaf, params), model, folder / "made")
    for path in made.iterdir():
        path.rename(folder / "Llama" / path.name)
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    (folder / "chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 40)
    question = {"ctx": "the model", "endings": ["reads text", "slowly"], "label": 0}
    (folder / "questions.jsonl").write_text(json.dumps(question) + "\n")
    return folder


@pytest.mark.slow
def test_from_text_to_an_export(folder):
    write, train, generate, evaluate = commands("Pre-train on your own data")
    assert "4 documents" in run(write, folder)
    run(train, folder, *FEWER)
    assert run(generate, folder).startswith("The ")
    assert "held-out loss" in run(evaluate, folder)
    preview, tune, chat = commands("Fine-tune a Llama on conversations")
    assert "learned" in run(preview, folder)
    run(tune, folder, *FEWER)
    assert (folder / "runs" / "tuned" / "loss.png").exists()
    run(chat, folder, "--max-tokens", "5", talk="hi\n")
    text, questions, export, adapter, report = commands("Evaluate and export")
    assert "bits per byte" in run(text, folder)
    assert "of 1 questions" in run(questions, folder)
    run(export, folder)
    run(adapter, folder)
    run(report, folder)
    assert (folder / "exported" / "model.safetensors").exists()
    assert (folder / "adapter" / "adapter_model.safetensors").exists()
    assert "<html" in (folder / "report.html").read_text()


def test_a_plan(tmp_path):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    counted, drawn = commands("Plan a run of 70B parameters")
    assert "GiB" in run(counted, tmp_path)
    run(drawn, tmp_path)
    assert "<svg" in (tmp_path / "plan.html").read_text()


def test_sharding_rules(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", SECTIONS["Share the sharding rules"], re.DOTALL)
    devices = jax.devices()
    namespace: dict = {}
    code = block.replace('"tensor": 2}', '"tensor": 2}, devices=devices[:4]')
    exec(compile(code, "tutorial", "exec"), {"devices": devices}, namespace)
    assert "fsdp" in capsys.readouterr().out
    assert namespace["params"]["up"].sharding.shard_shape((64, 256)) == (32, 128)
