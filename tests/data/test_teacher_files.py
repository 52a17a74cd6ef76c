"""What a teacher says of token shards: written beside them, resumed, read as tokens are."""

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from support import runs

from llmx import config
from llmx.checkpoint import checkpointer
from llmx.data import __main__ as command
from llmx.data import config as data_config
from llmx.data import dataset, packing, teacher_files, tokenizers
from llmx.data import shards as shards_lib
from llmx.data.teacher_files import Settings, Window
from llmx.model import quantized

# fp16 keeps 11 bits of a log-probability.
HALF_BIT = 2.0**-11
TEXTS = ["one two three four five", "six", "", "seven eight", "nine ten eleven twelve thirteen!"]
K = 3


def made(folder: pathlib.Path, texts=TEXTS, shard_tokens=30) -> shards_lib.Shards:
    """Token shards of a line of JSON each."""
    source = folder / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts if text))
    arguments = ["--source", str(source), "--output", str(folder / "shards")]
    assert command.main([*arguments, "--shard-tokens", str(shard_tokens)]) == 0
    return shards_lib.open_shards(folder / "shards")


def by_hash(batch):
    """A teacher whose words depend on the token, its position and its segment's number alone."""
    tokens, positions = (np.int64(batch[name]) for name in ("tokens", "positions"))
    seen = np.int64(batch["segment_ids"] > 0)
    ids = (tokens[..., None] * 7 + np.arange(K)) % 257
    log_p = -((tokens[..., None] % 13) + positions[..., None] + np.arange(K + 1)) / 8
    return np.int32(ids * seen[..., None]), np.float32(log_p)


def windows_one_by_one(length: int, context: int) -> list[tuple[int, int]]:
    """(token, tokens before it that are seen) of a document, by the rule in words."""
    half = max(context // 2, 1)
    starts = [0]
    while starts[-1] + context < length:
        starts.append(starts[-1] + half)
    return [(t, t - next(s for s in starts if s <= t < s + context)) for t in range(length)]


@pytest.mark.parametrize("context", [1, 2, 5, 8])
def test_each_token_is_scored_once_behind_half_a_context(context):
    lengths = [1, 7, 4, 23]
    found, first = [], 0
    for window in teacher_files.windows_of(np.array(lengths), context):
        assert window.end - window.begin <= context
        found += [(t, t - window.begin) for t in range(window.kept, window.end)]
    wanted = []
    for length in lengths:
        wanted += [(first + t, seen) for t, seen in windows_one_by_one(length, context)]
        first += length
    assert found == wanted
    long_ones = [seen for t, seen in found if t >= sum(lengths[:3]) + context]
    assert min(long_ones) >= context // 2 - 1


def test_rows_hold_several_windows_in_order():
    windows = [Window(0, 4, 0), Window(4, 7, 4), Window(7, 12, 7), Window(12, 13, 12)]
    found = list(teacher_files.batches(iter(windows), rows=2, context=8))
    assert found == [[windows[:2], windows[2:]]]
    assert list(teacher_files.batches(iter([]), rows=2, context=8)) == []


def write(shards, top=by_hash, *, context=8, rows=2, top_k=K, teacher="t", report=lambda n: None):
    settings = Settings(teacher, 5, top_k, context)
    teacher_files.write(shards, settings, top, rows=rows, report=report)


def test_written_files_say_what_the_teacher_says(tmp_path):
    """For each token, in its window; read whole, in part, and with fewer tokens."""
    shards = made(tmp_path)
    assert len(shards.tokens) == 2
    write(shards)
    opened = teacher_files.open_tokens(shards, K, verify=True)
    assert opened.ids[0].dtype == np.uint16 and opened.log_p[0].dtype == np.float16
    first = 0
    for number, tokens in enumerate(shards.tokens):
        own = shards.lengths[np.searchsorted(np.cumsum(shards.lengths), first, side="right") :]
        ids, log_p = opened.read(number, 0, len(tokens), K)
        seen = [at for length in own for _, at in windows_one_by_one(int(length), 8)]
        seen = np.array(seen[: len(tokens)])
        batch = {"tokens": tokens[None], "positions": seen[None], "segment_ids": np.ones_like(seen)}
        wanted_ids, wanted = by_hash(batch)
        np.testing.assert_array_equal(ids, wanted_ids[0])
        np.testing.assert_allclose(log_p, wanted[0], rtol=HALF_BIT)
        fewer_ids, fewer = opened.read(number, 2, 7, 1)
        np.testing.assert_array_equal(fewer_ids, ids[2:7, :1])
        np.testing.assert_allclose(np.exp(fewer[:, 1]), np.exp(log_p[2:7, 1:]).sum(1), rtol=1e-5)
        first += len(tokens)


@pytest.mark.parametrize("calls", [1, 2, 4])
def test_an_interrupted_call_goes_on_to_the_same_bytes(tmp_path, calls):
    shards = made(tmp_path)
    shutil.copytree(shards.folder, tmp_path / "torn")
    torn = shards_lib.open_shards(tmp_path / "torn")
    write(shards, rows=1)
    left = calls

    def killed(batch):
        nonlocal left
        if not left:
            raise KeyboardInterrupt
        left -= 1
        return by_hash(batch)

    with pytest.raises(KeyboardInterrupt):
        write(torn, killed, rows=1)
    folder = torn.folder / teacher_files.FOLDER
    for path in folder.glob("shard-*"):  # what was not recorded is there in part
        with path.open("ab") as file:
            file.write(b"torn")
    done = []
    write(torn, rows=1, report=done.append)
    assert done[0] > 0 and done[-1] == torn.num_tokens
    for path in (shards.folder / teacher_files.FOLDER).iterdir():
        assert path.read_bytes() == (folder / path.name).read_bytes(), path.name


def test_rows_have_what_the_teacher_said_of_their_tokens(tmp_path):
    """Packed and cut as tokens are, with shares of two sources, whatever the number of rows."""
    folders = [tmp_path / name for name in ("a", "b")]
    opened = []
    for number, folder in enumerate(folders):
        folder.mkdir()
        shards = made(folder, [text + "?" * number for text in TEXTS if text])
        write(shards, context=64)
        opened.append(f"shards:{shards.folder}")
    for pack in (True, False):
        values = data_config.DataConfig(sources=tuple(opened), pack=pack, held_out=0.0)
        data = dataset.open_dataset(
            values, sequence_length=10, seed=0, top_k=K, log=lambda line: None
        )
        batch = data.train_rows(0, range(8), 8)
        assert batch[packing.TEACHER_IDS].shape == (8, 10, K)
        real = batch["segment_ids"] > 0
        tokens = batch["tokens"][real]
        wanted = (np.int64(tokens)[:, None] * 7 + np.arange(K)) % 257
        np.testing.assert_array_equal(batch[packing.TEACHER_IDS][real], wanted)
        # Of the whole document, also where a row begins in its middle.
        log_p = batch[packing.TEACHER_LOG_P]
        assert np.all(log_p[real][:, 0] <= -(tokens % 13) / 8 + 1e-3)
        assert not log_p[~real].any()
        plain = dataset.open_dataset(values, sequence_length=10, seed=0, log=lambda line: None)
        for name, array in plain.train_rows(0, range(8), 8).items():
            np.testing.assert_array_equal(array, batch[name])


def test_what_is_wrong_is_said(tmp_path):
    shards = made(tmp_path)
    with pytest.raises(ValueError, match=r"nothing of a teacher.*--teacher RUN --top-k 2"):
        teacher_files.open_tokens(shards, 2)
    write(shards)
    with pytest.raises(ValueError, match=r"has the 3 likeliest tokens, and distillation.top_k=4"):
        teacher_files.open_tokens(shards, 4)
    with pytest.raises(ValueError, match=r"written with step=5, not 6: .*--overwrite-teacher"):
        teacher_files.is_complete(shards, Settings("t", 6, K, 8))
    assert teacher_files.is_complete(shards, Settings("t", 5, K, 8))
    text = data_config.DataConfig(sources=("stdlib",))
    with pytest.raises(ValueError, match="'stdlib' is none: write shards"):
        dataset.open_dataset(text, sequence_length=8, seed=0, top_k=2)
    path = shards.folder / teacher_files.FOLDER / "shard-00001.log_p"
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"00001.log_p: checksum mismatch"):
        teacher_files.open_tokens(shards, K)
    path.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=r"00001.log_p is missing, or not of"):
        teacher_files.open_tokens(shards, K)
    index = shards.folder / teacher_files.FOLDER / shards_lib.INDEX
    index.write_text(index.read_text().replace('"step": 5', '"step": 7'))
    with pytest.raises(ValueError, match="does not match its own checksum"):
        teacher_files.open_tokens(shards, K)


@pytest.mark.parametrize(("arguments", "said"), [
    (["--top-k", "0"], "--top-k 0 is below 1"),
    (["--teacher-context", "-1"], "--teacher-context -1 is below 0"),
    (["--format", "preference"], "have no teacher"),
])  # fmt: skip
def test_arguments_that_are_wrong(tmp_path, capsys, arguments, said):
    folder = made(tmp_path).folder
    assert command.main(["--output", str(folder), "--teacher", "runs/none", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert command.main(["--output", str(folder), "--overwrite-teacher"]) == 2
    assert "go with --teacher" in capsys.readouterr().err


# -------------------------------------------------------------------------- of a trained model

MODEL = dict(num_layers=2, width=16, mlp_dim=24, num_heads=4, num_kv_heads=2, head_dim=4,
             vocab_size=257, vocab_multiple=8)  # fmt: skip


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """The work directory of a run whose model is sure of something."""
    return saved(tmp_path_factory.mktemp("run"))[0]


def saved(workdir: pathlib.Path, **keys):
    """(a work directory, its recipe, the state in its checkpoint)."""
    run = runs.make_config(
        "llama3", model=MODEL, workdir=str(workdir), batch__sequence_length=32, batch__size=2,
        **keys,
    )  # fmt: skip
    recipe = runs.make_recipe(run)
    state = recipe.init(3)
    params = jax.tree.map(lambda leaf: leaf * 3 if leaf.ndim > 1 else leaf, state.params)
    state, extra = state._replace(params=params), dict(state.extra)
    if quantized.RANGES in extra:
        extra[quantized.RANGES] = jax.tree.map(lambda leaf: leaf + 1, extra[quantized.RANGES])
        state = state._replace(extra=extra)
    meta = {"config": config.to_json(run), "fingerprint": "", "batch_size": 2}
    options = checkpointer.CheckpointConfig()
    with checkpointer.Checkpointer(str(workdir / "checkpoints"), options, log=print) as kept:
        kept.save(4, state, meta=meta, order=recipe.order)
    config.save_run(run)
    tokenizers.ByteTokenizer().save(workdir / tokenizers.FILE_NAME)
    return workdir, recipe, state


def test_a_teacher_of_few_bits_says_what_it_is_evaluated_with(tmp_path):
    """With codes for weights, and inputs rounded by the averages of their ranges."""
    shards = made(tmp_path, ["one two three four five"])
    averages = dict(quantization__bits=4, quantization__activations="average")
    workdir, recipe, state = saved(tmp_path / "run", **averages)
    arguments = ["--output", str(shards.folder), "--teacher", str(workdir), "--top-k", "257"]
    assert command.main(arguments) == 0
    opened = teacher_files.open_tokens(shards, 257, verify=True)
    [tokens] = shards.tokens
    ids, log_p = opened.read(0, 0, len(tokens), 257)
    rows = tokens[None], np.ones_like(tokens)[None], np.arange(len(tokens))[None]

    def log_p_of(params):
        with jax.set_mesh(recipe.mesh):
            logits = recipe.loss.apply.logits(params, *map(np.int32, rows), recipe.loss.execution)
            return np.asarray(jax.nn.log_softmax(logits[0, :, :257]))

    by_id = np.zeros_like(log_p[:, :-1])
    np.put_along_axis(by_id, np.int64(ids), log_p[:, :-1], axis=-1)
    wanted = log_p_of(recipe.loss.rounded(state.params, state.extra))
    np.testing.assert_allclose(by_id, wanted, rtol=4 * HALF_BIT)
    by_own_ranges = log_p_of(recipe.loss.rounded(state.params))
    assert np.abs(by_own_ranges - wanted).max() > 0.1


def test_all_tokens_written_teach_as_the_teacher_beside_the_student(teacher, tmp_path, capsys):
    """With documents that are whole in a row both losses and gradients are equal, but for fp16."""
    folder = made(tmp_path, [text for text in TEXTS if 3 < len(text) < 31] * 2).folder
    arguments = ["--output", str(folder), "--teacher", str(teacher), "--top-k", "257"]
    assert command.main(arguments) == 0
    assert "257 tokens for each of" in capsys.readouterr().out
    assert command.main(arguments) == 0
    assert "complete already" in capsys.readouterr().out
    keys = dict(
        batch__size=4, batch__sequence_length=32, data__sources=(f"shards:{folder}",),
        data__pack=False, data__held_out=0.0, distillation__weight=0.7,
        distillation__temperature=2.0,
    )  # fmt: skip
    found = []
    for own in (dict(distillation__top_k=257), dict(distillation__teacher=str(teacher))):
        run = runs.make_config("gpt2", model=dict(MODEL, num_kv_heads=4), **keys | own)
        recipe = runs.make_recipe(run)
        data = dataset.open_dataset(
            run.data, sequence_length=32, seed=0, top_k=run.distillation.top_k, log=print
        )
        with jax.set_mesh(recipe.mesh):
            state = recipe.init(1)
            if recipe.loss.teacher:
                from llmx.checkpoint import model_params

                frozen = model_params.restore_params(str(teacher), recipe.loss.frozen, log=print)
                state = state._replace(frozen=frozen.state)
            batch = runs.put_batch(recipe, data.train_rows(0, range(4), 4))
            assert set(batch) == set(recipe.abstract_batch)

            def take(state, batch, loss=recipe.loss, gradient=recipe.gradient):
                params = loss.joined(state.params, state.frozen, training=True)
                prepared = loss.prepared(batch, state.frozen)
                return gradient.take(params, prepared, (), ())[0]

            found.append(jax.device_get(jax.jit(take)(state, batch)))
    cached, online = found
    np.testing.assert_allclose(cached.loss, online.loss, rtol=1e-6)
    assert online.reported["divergence"] > 0.3
    np.testing.assert_allclose(
        cached.reported["divergence"], online.reported["divergence"], rtol=4 * HALF_BIT
    )
    for one, other in zip(*map(jax.tree.leaves, (cached.tree, online.tree)), strict=True):
        scale = np.linalg.norm(other)
        assert np.linalg.norm(one - other) <= 8 * HALF_BIT * scale


def test_a_teacher_that_does_not_fit_is_refused(teacher, tmp_path, capsys):
    folder = made(tmp_path).folder
    base = ["--output", str(folder), "--teacher"]
    assert command.main([*base, str(teacher), "--teacher-context", "999999"]) == 2
    assert "positions that the teacher takes" in capsys.readouterr().err
    assert command.main([*base, str(teacher), "--top-k", "300"]) == 2
    assert "more than the vocabulary of 257" in capsys.readouterr().err
    assert command.main([*base, str(tmp_path / "none")]) == 2
    assert "holds no run" in capsys.readouterr().err
