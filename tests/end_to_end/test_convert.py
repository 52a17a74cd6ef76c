"""Runs become Hugging Face checkpoints and back, by the command line."""

import dataclasses
import json
import subprocess
import sys

import jax
import numpy as np
import pytest
import tokenizers as library
from support import chat_templates, memory_store, small_tokenizers

from llmx import config, convert, generate
from llmx.checkpoint import checkpointer, hf, hf_reader
from llmx.config import checks
from llmx.data import tokenizers
from llmx.evaluate import __main__ as evaluate
from llmx.model import apply, families
from llmx.runtime import output_paths, ownership


def leaves_of(tree: dict) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def write_run(
    workdir, *, ema_decay: float = 0.0, tokenizer=None, format="text", always=None
) -> dict[int, dict]:
    """A work directory as a run leaves it, with two checkpoints; returns their states.

    always: a token of which the model is sure, whatever was before.
    """
    tokenizer = tokenizer or tokenizers.ByteTokenizer()
    run = config.default()
    run.workdir, run.steps = str(workdir), 9
    run.model = families.preset("llama3", vocab_size=tokenizer.vocab_size, num_layers=2)
    run.batch.sequence_length, run.optimizer.ema_decay = 64, ema_decay
    run.data.format = format
    config.save_run(run)
    tokenizer.save(workdir / "tokenizer.json")
    shapes, _ = apply.abstract_parameters(run.model)
    states = {}
    with checkpointer.Checkpointer(f"{workdir}/checkpoints", run.checkpoint, log=print) as saver:
        for step in (3, 9):
            noise = np.random.default_rng(step)
            draw = lambda leaf: noise.normal(size=leaf.shape).astype(np.float32)  # noqa: B023, E731
            states[step] = {"params": jax.tree.map(draw, shapes)}
            if always is not None:
                params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes)
                params["embedding"] += 1
                params["norm"]["scale"] += 1
                params["head"][always] = 1
                states[step]["params"] = params
            if ema_decay:
                states[step]["ema"] = jax.tree.map(draw, shapes)
            arrays = jax.tree.map(jax.numpy.asarray, states[step])
            saver.save(step, arrays, meta={"step": step}, wait=True)
    return states


def assert_exported(directory, params: dict):
    """`directory` holds `params`, whose padding is not written."""
    _, read = hf.load(directory)
    for name in ("embedding", "head"):
        params = params | {name: np.where(np.arange(384)[:, None] < 257, params[name], 0)}
    for one, other in zip(leaves_of(read), leaves_of(params), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_run_is_exported(tmp_path, capsys):
    states = write_run(tmp_path)
    assert convert.main(["--workdir", f"{tmp_path}", "--to-hf", f"{tmp_path}/new"]) == 0
    assert f"step 9 of {tmp_path} is now in" in "".join(capsys.readouterr())
    assert_exported(tmp_path / "new", states[9]["params"])
    old = ["--workdir", f"{tmp_path}", "--to-hf", f"{tmp_path}/old", "--step", "3"]
    assert convert.main([*old, "--dtype", "float32"]) == 0
    assert_exported(tmp_path / "old", states[3]["params"])
    assert json.loads((tmp_path / "old" / hf_reader.CONFIG).read_text())["eos_token_id"] == 256
    # A second time, or of a run without an average: an error, and nothing is changed.
    assert convert.main(old) == 2
    assert "not empty" in capsys.readouterr().err
    averaged = ["--workdir", f"{tmp_path}", "--to-hf", f"{tmp_path}/ema", "--ema"]
    assert convert.main(averaged) == 2
    assert "ema_decay=0 and keeps no average" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "part"), [([], "ema"), (["--ema"], "ema"), (["--no-ema"], "params")]
)
def test_the_average_goes_first(flags, part, tmp_path):
    states = write_run(tmp_path, ema_decay=0.9)
    command = ["--workdir", f"{tmp_path}", "--to-hf", f"{tmp_path}/new", *flags]
    assert convert.main(command) == 0
    assert_exported(tmp_path / "new", states[9][part])


@pytest.mark.parametrize(
    ("format", "generation"),
    [("text", ""), ("chat", ""), ("preference", '{"eos_token_id": [501], "top_k": 3}'),
     ("chat", '{"top_k": 3}')],
)  # fmt: skip
def test_what_learned_to_end_its_turns_ends_there(format, generation, tmp_path, capsys):
    """In all programs, although the model's own end of text is another token."""
    transformers = pytest.importorskip("transformers")
    gguf = pytest.importorskip("gguf")
    files = {"generation_config_json": generation} if generation else {}
    template = chat_templates.CHATML
    folder = small_tokenizers.write(
        tmp_path / "base", "byte_level", chat_template_jinja=template, **files
    )
    coder = tokenizers.load(folder)
    turn, last = coder.special["<|im_end|>"], coder.end_of_document
    work = tmp_path / "run"
    work.mkdir()
    write_run(work, tokenizer=coder, format=format, always=turn)
    flags = ["--workdir", str(work)]
    assert convert.main([*flags, "--to-hf", str(tmp_path / "out")]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = theirs("the model", return_tensors="pt")
    found = model.generate(**ids, max_new_tokens=5, do_sample=False)[0].tolist()
    count = 5 if format == "text" else 1
    assert found[ids["input_ids"].shape[1] :] == [turn] * count
    ends = [last] if format == "text" else [last, turn]
    stops = json.loads((tmp_path / "out" / hf_reader.CONFIG).read_text())["eos_token_id"]
    assert stops == (ends if ends[1:] else last)
    if format == "text":  # as they were
        assert (tmp_path / "out/generation_config.json").is_file() == bool(generation)
    else:
        kept = json.loads((tmp_path / "out/generation_config.json").read_text())
        assert kept["eos_token_id"] == ends and kept.get("top_k") == (3 if generation else None)
    capsys.readouterr()
    text = [*flags, "--prompt", "the model", "--max-tokens", "5", "--temperature", "0"]
    assert generate.main(text) == 0
    assert f"{5 if format == 'text' else 0} tokens added" in "".join(capsys.readouterr())
    assert convert.main([*flags, "--to-gguf", str(tmp_path / "out.gguf")]) == 0
    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    fields = [reader.get_field(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ends = {field.contents() for field in fields if field}
    assert last in ends and (turn in ends) == (format != "text")


def test_bytes_are_a_tokenizer_elsewhere(tmp_path):
    write_run(tmp_path)
    convert.main(["--workdir", f"{tmp_path}", "--to-hf", f"{tmp_path}/new"])
    theirs = library.Tokenizer.from_file(f"{tmp_path}/new/tokenizer.json")
    text = "".join(map(chr, range(1, 0x500))) + "\0 two  spaces\r\n\tü 日本 🙂"
    assert theirs.encode(text).ids == list(text.encode())
    assert theirs.decode(theirs.encode(text).ids) == text
    assert theirs.token_to_id("<|endoftext|>") == 256


def test_a_checkpoint_becomes_a_run(tmp_path, capsys):
    """Imported, it generates the same text; exported again, it is the same checkpoint."""
    coder = tokenizers.train([b"one two three two one " * 50], vocab_size=300)
    (tmp_path / "run").mkdir()
    write_run(tmp_path / "run", tokenizer=coder)
    there = ["--workdir", f"{tmp_path}/run", "--to-hf", f"{tmp_path}/hf"]
    back = ["--workdir", f"{tmp_path}/back", "--from-hf", f"{tmp_path}/hf"]
    again = ["--workdir", f"{tmp_path}/back", "--to-hf", f"{tmp_path}/again"]
    for command in (there, back, again):
        assert convert.main(command) == 0
    files = sorted(path.name for path in (tmp_path / "hf").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "again").iterdir())
    for name in files:
        assert (tmp_path / "hf" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    capsys.readouterr()
    said = []
    for workdir in ("run", "back"):
        command = ["--workdir", f"{tmp_path}/{workdir}", "--prompt", "two one", "--max-tokens", "5"]
        assert generate.main([*command, "--temperature", "0"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != ""
    assert convert.main(back) == 2
    assert "not empty: import into a new directory" in capsys.readouterr().err


def test_exports_to_and_imports_from_a_store(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "run").mkdir()
    write_run(tmp_path / "run")
    there = ["--workdir", f"{tmp_path}/run", "--to-hf"]
    with memory_store.emptied() as files:
        for place in (f"{tmp_path}/hf", "memory://bucket/hf"):
            assert convert.main([*there, place]) == 0
        local = {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}
        assert memory_store.objects(files, "bucket/hf") == local
        assert convert.main([*there, "memory://bucket/hf"]) == 2
        assert "memory://bucket/hf exists and is not empty" in capsys.readouterr().err
        # Of an upload that was killed; the weights had another name then.
        for name in ("config.json", "tokenizer.json"):
            files.rm_file(f"/bucket/hf/{name}")
        for name in (output_paths.UNFINISHED, "model-00001-of-00002.safetensors"):
            files.pipe_file(f"/bucket/hf/{name}", b"")
        assert convert.main([*there, "memory://bucket/hf"]) == 0
        assert memory_store.objects(files, "bucket/hf") == local
        files.pipe_file("/bucket/other/notes.txt", b"")
        assert convert.main([*there, "memory://bucket/other"]) == 2
        back = ["--workdir", f"{tmp_path}/back", "--from-hf", "memory://bucket/hf"]
        assert convert.main(back) == 0
    again = ["--workdir", f"{tmp_path}/back", "--to-hf", f"{tmp_path}/again"]
    assert convert.main(again) == 0
    assert local == {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()}
    meta = checkpointer.read_meta(f"{tmp_path}/back/checkpoints", 0)
    assert meta["imported_from"] == "memory://bucket/hf"


# As llmx.convert, but it is killed where the last file is to come.
KILLED = """
import os, sys
from llmx import config, convert
from llmx.checkpoint import hf

def killed(folder, *args):
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"x")
    os._exit(9)

hf._write_tensors, config.save_run = killed, lambda run: os._exit(9)
convert.main(sys.argv[1:])
"""


def test_a_killed_export_or_import_is_made_again(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    write_run(tmp_path / "run")
    export = ["--workdir", f"{tmp_path}/run", "--to-hf", f"{tmp_path}/hf"]
    back = ["--workdir", f"{tmp_path}/back", "--from-hf", f"{tmp_path}/hf"]
    for command, folder in ((export, tmp_path / "hf"), (back, tmp_path / "back")):
        done = subprocess.run([sys.executable, "-c", KILLED, *command], timeout=120, check=False)
        assert done.returncode == 9 and (folder / output_paths.UNFINISHED).exists()
        assert convert.main(command) == 0
        names = {path.name for path in folder.iterdir()}
        assert "config.json" in names and "model-00001-of-00002.safetensors" not in names
        assert not names & {output_paths.UNFINISHED, ownership.FILE}
        assert convert.main(command) == 2  # what is complete stays, marked or not
        (folder / output_paths.UNFINISHED).touch()
        assert convert.main(command) == 2
        assert "is not empty" in capsys.readouterr().err
        assert not (folder / output_paths.UNFINISHED).exists()


def test_a_complete_export_to_a_store_loses_its_mark_and_one_that_is_written_stays(
    tmp_path, capsys
):
    write_run(tmp_path)
    command, mark = ["--workdir", f"{tmp_path}", "--to-hf", "memory://bucket/hf"], "/bucket/hf/"
    mark += output_paths.UNFINISHED
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    record = ownership.own_record(60.0)
    record |= {"pid": other.pid, "process_start": ownership.process_start(other.pid)}
    with memory_store.emptied() as files:
        files.pipe_file(mark, json.dumps(record).encode())
        assert convert.main(command) == 2
        assert f"being written by process {other.pid}: wait" in capsys.readouterr().err
        assert files.exists(mark)
        other.communicate()
        assert convert.main(command) == 0 and not files.exists(mark)
        files.pipe_file(mark, json.dumps(record).encode())
        assert convert.main(command) == 2 and not files.exists(mark)
        assert "is not empty" in capsys.readouterr().err


def test_bad_commands_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        convert.main(["--workdir", f"{tmp_path}", "--from-hf", "x", "--step", "3"])
    assert "go with --to-hf" in capsys.readouterr().err
    assert convert.main(["--workdir", f"{tmp_path}/none", "--to-hf", f"{tmp_path}/x"]) == 2
    assert "holds no run" in capsys.readouterr().err
    write_run(tmp_path)
    run = config.load_run(f"{tmp_path}")
    run.model = dataclasses.replace(run.model, bias=True)
    config.save_run(run)
    assert convert.main(["--workdir", f"{tmp_path}", "--to-hf", f"{tmp_path}/x"]) == 2
    assert "cannot represent model.bias=True" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_what_lies_beside_the_tensors_comes_back_unchanged(tmp_path):
    """Files byte for byte; ids and dtype in config.json; also by way of a run that trains on."""
    ours = small_tokenizers.write(
        tmp_path / "tokenizer", "byte_level", chat_template_jinja="{{ messages }}\r\n",
        generation_config_json='{"eos_token_id": [501, 504], "temperature": 0.6}',
        special_tokens_map_json='{"pad_token": "<|im_end|>"}', added_tokens_json="{}\n",
    )  # fmt: skip
    (ours / "tokenizer.model").write_bytes(bytes(range(256)))
    (tmp_path / "run").mkdir()
    write_run(tmp_path / "run", tokenizer=tokenizers.load(ours))
    there = ["--workdir", f"{tmp_path}/run", "--to-hf", f"{tmp_path}/hf", "--dtype", "bfloat16"]
    assert convert.main(there) == 0
    stored = tmp_path / "hf" / hf_reader.CONFIG
    stored_config = json.loads(stored.read_text())
    begin, pad = stored_config["bos_token_id"], stored_config["pad_token_id"]
    assert (begin, pad) == tuple(
        tokenizers.load(ours).special[t] for t in ("<|begin_of_text|>", "<|im_end|>")
    )
    stored_config |= {"eos_token_id": [501, 504], "pad_token_id": 7, "bos_token_id": 500}
    stored.write_text(json.dumps(stored_config))
    back = ["--workdir", f"{tmp_path}/back", "--from-hf", f"{tmp_path}/hf"]
    assert convert.main(back) == 0
    kept = tokenizers.load(tmp_path / "back")
    assert {501, 504} <= set(kept.stop_tokens) and kept.template == "{{ messages }}\r\n"
    # A run that starts from it keeps its tokenizer, as `llmx.train` does.
    write_run(tmp_path, tokenizer=kept)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"start_from": f"{tmp_path}/back"}))
    for workdir in ("back", "."):
        out = tmp_path / f"out-{workdir}"
        assert convert.main(["--workdir", f"{tmp_path}/{workdir}", "--to-hf", f"{out}"]) == 0
        names = {path.name for path in ours.iterdir()}
        written = {path.name for path in out.iterdir()}
        assert written == names | {hf_reader.CONFIG, hf_reader.WEIGHTS}
        for name in names:
            assert (out / name).read_bytes() == (ours / name).read_bytes(), name
        again = json.loads((out / hf_reader.CONFIG).read_text())
        for key in ("eos_token_id", "pad_token_id", "bos_token_id", "torch_dtype"):
            assert again[key] == stored_config[key]
    assert (tmp_path / "out-back" / hf_reader.WEIGHTS).stat().st_size == (
        (tmp_path / "hf" / hf_reader.WEIGHTS).stat().st_size
    )


def test_without_a_tokenizer_nothing_is_read_as_bytes(tmp_path, capsys):
    write_run(tmp_path)
    assert convert.main(["--workdir", f"{tmp_path}", "--to-hf", f"{tmp_path}/hf"]) == 0
    (tmp_path / "hf" / "tokenizer.json").unlink()
    assert convert.main(["--workdir", f"{tmp_path}/new", "--from-hf", f"{tmp_path}/hf"]) == 0
    said = "".join(capsys.readouterr())
    assert "has no tokenizer.json: write one there" in said
    for command, more in ((generate, ["--prompt", "a"]), (evaluate, [])):
        assert command.main(["--workdir", f"{tmp_path}/new", *more]) == 2
        assert "has no tokenizer.json, so that its tokens mean" in capsys.readouterr().err
    named = ["--workdir", f"{tmp_path}/named", "--from-hf", f"{tmp_path}/hf"]
    assert convert.main([*named, "--tokenizer", "bytes"]) == 0
    assert tokenizers.load(tmp_path / "named").name == "bytes"
    with pytest.raises(SystemExit):
        convert.main(["--workdir", "x", "--to-hf", "y", "--tokenizer", "bytes"])
    assert "--tokenizer goes with --from-hf" in capsys.readouterr().err


def test_a_run_that_starts_from_another_reads_with_its_tokenizer(tmp_path):
    for name, tokenizer in (("file", tokenizers.train([b"one two " * 9], vocab_size=300)),
                            ("bytes", None)):  # fmt: skip
        (tmp_path / name).mkdir()
        write_run(tmp_path / name, tokenizer=tokenizer)
    run = config.default()
    for name in ("bytes", "file"):
        run.start_from = f"{tmp_path}/{name}"
        assert checks.resolve(run, 1).data.tokenizer == f"{tmp_path}/{name}/tokenizer.json"
    run.data.tokenizer = "bytes"
    assert checks.resolve(run, 1).data.tokenizer == "bytes"


def test_a_run_whose_optimizer_is_not_here_is_used_all_the_same(tmp_path, capsys):
    """A config file had added it to `OPTIMIZERS`, which is of no matter to a pass forward."""
    states = write_run(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    values["optimizer"]["name"] = "mine"
    path.write_text(json.dumps(values))
    command = ["--workdir", f"{tmp_path}", "--prompt", "a", "--max-tokens", "2"]
    assert generate.main(command) == 0
    assert capsys.readouterr().out.startswith("a")
    assert convert.main(["--workdir", f"{tmp_path}", "--to-hf", f"{tmp_path}/new"]) == 0
    assert_exported(tmp_path / "new", states[9]["params"])
    text = tmp_path / "text.txt"
    text.write_text("some text of a few words, " * 9)
    assert evaluate.main(["--workdir", f"{tmp_path}", "--data", f"{text}"]) == 0
    assert "bits per byte" in capsys.readouterr().out
