"""Cached logits equal whole ones; neither batch nor mesh changes a text; sampling is exact."""

import dataclasses
import functools
import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.mixed_model import MIXED

from llmx import config, generate, sharding
from llmx.checkpoint import checkpointer
from llmx.data import tokenizers
from llmx.model import apply, families, precision, sampling
from llmx.model.execution import Execution

FAMILIES = ("gpt2", "llama3", "qwen3", "gemma2", "gemma3", "gpt_oss", "deepseek_v3", "smollm3")
VOCAB = 257

# fp32; the sums over a padded cache have another order than those over a row.
LOGITS = dict(rtol=1e-5, atol=1e-5)

# The longest is beyond the smallest bucket: alone, the others have a shorter cache.
PROMPTS = [[5], [200, 3, 77], list(range(40, 80)), [9, 8, 7, 6, 5, 4]]


@dataclasses.dataclass(frozen=True, eq=False)
class Built:
    config: families.ModelConfig
    apply: apply.Apply
    params: dict
    execution: Execution

    def generate(self, prompts, **changes) -> list[list[int]]:
        settings = dict(max_tokens=10, temperature=1.0, seed=3) | changes
        return sampling.generate(self.apply, self.params, self.execution, prompts, **settings)


@functools.cache
def built(family: str, mesh: tuple = (), *, replicate_kv: bool = False) -> Built:
    """A tiny model with random parameters on a mesh of `mesh`, pairs of axis and size."""
    changes = dict(vocab_size=VOCAB, width=32, mlp_dim=48, head_dim=8, max_positions=64)
    if family.startswith("gemma"):
        changes |= dict(num_layers=3, window=5)
    if family == "deepseek_v3":
        changes |= dict(rope_dim=4, value_dim=6)
    if family == "smollm3":
        changes |= MIXED
    decoder = families.preset(family, **changes)
    sizes = dict.fromkeys(sharding.AXES, 1) | dict(mesh)
    devices = jax.devices()[: math.prod(sizes.values())]
    layout = sharding.make_layout("zero3", replicate_kv=replicate_kv)
    place = sharding.Placement(sharding.make_mesh(sizes, devices=devices), layout)
    shapes, axes = apply.abstract_parameters(decoder)
    to = sharding.shardings(shapes, place.mesh, layout, rules=axes)
    noise = np.random.default_rng(0)

    def draw(path, leaf, to):
        # Small biases and norms near one, or every text is the same whatever the prompt.
        name, array = sharding.path_name(path), noise.standard_normal(leaf.shape)
        is_scale = name.endswith("scale")
        array = (0.05 if name.endswith("bias") or is_scale else 0.3) * array
        if is_scale and not decoder.norm_plus_one:
            array += 1
        return jax.device_put(array.astype(leaf.dtype), to)

    params = jax.tree_util.tree_map_with_path(draw, shapes, to)
    execution = Execution(place, precision.POLICIES["fp32"])
    return Built(decoder, apply.Apply(decoder), params, execution)


# ----------------------------------------------------------------------------------------- cache


@pytest.mark.parametrize("family", FAMILIES)
def test_cached_logits_equal_whole_ones(family):
    """A prefill of 9 tokens, then token by token; windows of 5 reach into the cache."""
    decoder, num_tokens, prefill = built(family), 20, 9
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, VOCAB, (2, num_tokens)).astype(np.int32)
    segments = np.zeros_like(tokens)
    positions = np.tile(np.arange(num_tokens, dtype=np.int32), (2, 1))
    with jax.set_mesh(decoder.execution.place.mesh):
        whole = jax.jit(lambda *arrays: decoder.apply.logits(*arrays, decoder.execution))(
            decoder.params, tokens, segments, positions
        )
        decode = jax.jit(lambda *arrays: decoder.apply.decode(*arrays, decoder.execution))
        cache = decoder.apply.empty_cache(2, num_tokens + 3, decoder.execution)
        steps = [slice(0, prefill), *(slice(t, t + 1) for t in range(prefill, num_tokens))]
        cached = []
        for at in steps:
            arrays = (tokens[:, at], segments[:, at], positions[:, at])
            logits, cache = decode(decoder.params, cache, *arrays, at.start)
            cached.append(np.asarray(logits))
    cached = np.concatenate(cached, axis=1)
    np.testing.assert_allclose(cached[..., :VOCAB], whole[..., :VOCAB], **LOGITS)
    assert (cached[..., VOCAB:] == -np.inf).all()


@pytest.mark.parametrize("family", ["gpt2", "gemma3"])
def test_greedy_equals_argmax_of_whole_logits(family):
    """Rows of different lengths, each against itself run without a cache."""
    decoder = built(family)
    texts = decoder.generate(PROMPTS, temperature=0.0)
    for prompt, added in zip(PROMPTS, texts, strict=True):
        assert len(added) == 10
        tokens = np.zeros((1, 64), np.int32)
        tokens[0, : len(prompt) + 10] = [*prompt, *added]
        positions = np.arange(64, dtype=np.int32)[None]
        likeliest = np.asarray(whole_logits(family)(tokens, positions)).argmax(axis=-1)[0]
        assert added == likeliest[len(prompt) - 1 : len(prompt) + 9].tolist()


@functools.cache
def whole_logits(family: str):
    decoder = built(family)

    def logits(tokens, positions):
        segments = jnp.zeros_like(positions)
        return decoder.apply.logits(decoder.params, tokens, segments, positions, decoder.execution)

    def run(tokens, positions):
        with jax.set_mesh(decoder.execution.place.mesh):
            return compiled(tokens, positions)

    compiled = jax.jit(logits)
    return run


# ------------------------------------------------------------------------------------------ rows


@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_batch_equals_each_prompt_alone(family):
    decoder = built(family)
    together = decoder.generate(PROMPTS)
    assert len(set(map(tuple, together))) == len(PROMPTS)
    assert together == [decoder.generate([prompt])[0] for prompt in PROMPTS]
    assert decoder.generate(PROMPTS[::-1]) == together[::-1]


def test_seed_decides():
    decoder = built("gpt2")
    assert decoder.generate(PROMPTS) == decoder.generate(PROMPTS)
    assert decoder.generate(PROMPTS) != decoder.generate(PROMPTS, seed=4)
    # Copies are different samples, whatever stands between them.
    first, other, second = decoder.generate([PROMPTS[1], PROMPTS[3], PROMPTS[1]])
    assert first != second
    assert [first, other] == decoder.generate([PROMPTS[1], PROMPTS[3]])
    assert [first, second] == decoder.generate([PROMPTS[1]] * 2)


def test_longer_text_begins_as_the_shorter():
    decoder = built("gpt2")
    short, long = (decoder.generate(PROMPTS, max_tokens=count) for count in (3, 20))
    assert [row[:3] for row in long] == short
    assert [len(row) for row in long] == [20] * 4


def test_repeated_use_compiles_once():
    decoder = dataclasses.replace(built("gpt2"))
    decoder.generate(PROMPTS)
    program = sampling._make_program(decoder.apply, decoder.execution, True)
    before = program._cache_size()
    decoder.generate([[1], [2] * 40, [4], [5]], max_tokens=7, top_k=3, top_p=0.5, temperature=0.3)
    decoder.generate(
        [[1] * 30, [2] * 34, [3], [4]], max_tokens=30, temperature=0.0, seed=9, stop_tokens=(4,)
    )
    assert program._cache_size() == before


@pytest.mark.parametrize("block", [1, 3, 64])
def test_a_stream_has_the_same_tokens(block):
    decoder = built("gpt2")
    settings = dict(max_tokens=10, temperature=1.0, seed=3)
    free = decoder.generate(PROMPTS)
    stops = (free[2][4], free[0][7])
    want = decoder.generate(PROMPTS, stop_tokens=stops)
    how = decoder.apply, decoder.params, decoder.execution
    for found, options in ((free, settings), (want, settings | {"stop_tokens": stops})):
        blocks = list(sampling.stream(*how, PROMPTS, **options, block=block))
        assert [list(itertools.chain(*parts)) for parts in zip(*blocks, strict=True)] == found
        assert all(len(part) <= block for parts in blocks for part in parts)
    assert len(blocks) <= -(-max(map(len, want)) // block) + 1
    with pytest.raises(ValueError, match="top_k=-1 must not be negative"):
        next(sampling.stream(*how, PROMPTS, **settings, top_k=-1))


def test_stops_at_the_end_of_a_document():
    decoder = built("gpt2")
    free = decoder.generate(PROMPTS)
    stop = free[2][4]
    want = [row[: row.index(stop)] if stop in row else row for row in free]
    assert decoder.generate(PROMPTS, stop_tokens=(stop,)) == want
    assert len(want[2]) <= 4 and max(map(len, want)) == 10


@pytest.mark.parametrize("temperature", [0.0, 1e6])
def test_padding_is_never_picked(temperature):
    """Even where its rows of the head are the likeliest by far."""
    decoder = built("gpt2")
    bias = np.zeros((decoder.config.padded_vocab, 1), np.float32)
    bias[VOCAB:] = 50.0
    loud = dataclasses.replace(
        decoder, params=decoder.params | {"embedding": decoder.params["embedding"] + bias}
    )
    rows = loud.generate(PROMPTS, temperature=temperature, max_tokens=24)
    assert all(0 <= token < VOCAB for row in rows for token in row)


# ---------------------------------------------------------------------------------------- meshes


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("gpt2", dict(tensor=4, data=2)),
        ("gpt2", dict(fsdp=8)),  # more devices than rows
        ("gemma2", dict(fsdp=2, sequence=2, tensor=2)),
        ("llama3", dict(sequence=2, tensor=4)),  # two K/V heads on four shards
        ("gemma3", dict(sequence=8)),
        ("deepseek_v3", dict(sequence=2, tensor=2, expert=2)),
    ],
    ids=str,
)
def test_mesh_equals_one_device(family, mesh):
    split = built(family, tuple(mesh.items()), replicate_kv=family == "llama3")
    settings = dict(top_k=40, top_p=0.95)
    texts = split.generate(PROMPTS, **settings)
    assert len(set(map(tuple, texts))) == len(PROMPTS)
    assert texts == built(family).generate(PROMPTS, **settings)


def test_the_cache_is_split_over_the_sequence_axis():
    """Each device holds its slots; their number is rounded up to divide."""
    execution = built("llama3", (("sequence", 4), ("data", 2))).execution
    place = sampling.placement(execution.place, split_batch=True)
    execution = dataclasses.replace(execution, place=place)
    apply = built("llama3").apply
    with jax.set_mesh(place.mesh):
        cache = jax.jit(lambda: apply.empty_cache(2, 30, execution))()
    for array, rank in ((cache["blocks"][0], 5), (cache["positions"], 2)):
        (shard, *_) = array.addressable_shards
        assert array.ndim == rank
        assert shard.data.shape[-4 if rank == 5 else -2 :][:2] == (1, 8)


# -------------------------------------------------------------------------------------- sampling


def nucleus(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Probabilities after temperature, top-k and top-p of one row, in float64."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    order = order[: top_k or None]
    weights = np.exp((logits[order].astype(np.float64) - logits.max()) / temperature)
    weights /= weights.sum()
    out, total = np.zeros(len(logits)), 0.0
    for token, weight in zip(order, weights, strict=True):
        out[token] = weight
        total += weight
        if top_p < 1 and total >= top_p:
            break
    return out / out.sum()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize(
    ("top_k", "top_p"),
    [(0, 1.0), (1, 1.0), (7, 1.0), (500, 1.0), (0, 0.5), (0, 1e-6), (0, 0.999), (9, 0.8)],
)
def test_kept_equals_numpy(temperature, top_k, top_p):
    logits = np.random.default_rng(2).normal(size=(5, 50)).astype(np.float32) * 2
    logits[1, 30:] = -np.inf
    logits[2, 10] = logits[2].max() + 20
    got = kept(logits, *arrays(temperature, top_k, top_p))
    for row, row_logits in enumerate(logits):
        want = nucleus(row_logits, temperature, top_k, top_p) > 0
        possible = np.isfinite(row_logits)
        np.testing.assert_array_equal(np.asarray(got)[row, possible], want[possible])


kept = jax.jit(sampling.sampling_mask)


def arrays(temperature: float, top_k: int, top_p: float):
    return jnp.float32(temperature), jnp.int32(top_k), jnp.float32(top_p)


def test_equal_tokens_that_top_k_left_out_are_not_counted_in_the_nucleus():
    mask = sampling.sampling_mask(jax.numpy.zeros((1, 4)), 1.0, 2, 0.4)
    assert mask.tolist() == [[True, False, False, False]]  # each of the two has a half


def test_equal_logits_are_cut_by_token_id():
    logits = np.zeros((1, 10), np.float32)
    assert np.flatnonzero(kept(logits, *arrays(1.0, 3, 1.0))).tolist() == [0, 1, 2]
    assert np.flatnonzero(kept(logits, *arrays(1.0, 0, 0.35))).tolist() == [0, 1, 2, 3]


def test_picks_follow_the_probabilities():
    """Frequencies of 20,000 picks, within five standard deviations."""
    count, logits = 20_000, np.random.default_rng(4).normal(size=12).astype(np.float32) * 1.5
    keys = jax.random.split(jax.random.key(0), count)
    rows = jnp.broadcast_to(logits, (count, 12))
    for settings in [(1.0, 0, 1.0), (0.7, 6, 0.9)]:
        picked = np.asarray(jax.jit(sampling.pick)(rows, keys, *arrays(*settings)))
        share = np.bincount(picked, minlength=12) / count
        want = nucleus(logits, *settings)
        assert (share[want == 0] == 0).all()
        assert (np.abs(share - want) <= 5 * np.sqrt(want * (1 - want) / count)).all()
    greedy = jax.jit(sampling.pick)(rows, keys, *arrays(0.0, 6, 0.9))
    assert (np.asarray(greedy) == logits.argmax()).all()


# ---------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("prompts", "changes", "words"),
    [
        ([], {}, "no prompts"),
        ([[1], []], {}, "prompt 2 is empty"),
        ([[257]], {}, "token 257.*257 tokens.*tokenizer"),
        ([[-1]], {}, "token -1"),
        ([[1] * 40], dict(max_tokens=25), "40 tokens.*65.*max_positions=64.*at most 24"),
        ([[1] * 64], {}, "max_positions=64.*shorter prompt"),
        ([[1]], dict(max_tokens=0), "max_tokens=0.*at least 1"),
        ([[1]], dict(temperature=-1.0), "temperature=-1.0"),
        ([[1]], dict(temperature=math.nan), "temperature=nan"),
        ([[1]], dict(top_k=-2), "top_k=-2"),
        ([[1]], dict(top_p=0.0), "top_p=0.0"),
        ([[1]], dict(top_p=1.5), "top_p=1.5"),
    ],
)
def test_bad_input(prompts, changes, words):
    for family in ("gpt2", "llama3"):
        with pytest.raises(ValueError, match=words):
            built(family).generate(prompts, **changes)


# ---------------------------------------------------------------------------------- command line


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A run with one checkpoint, of a model whose average differs from its parameters."""
    path, decoder = tmp_path_factory.mktemp("run"), built("gpt2")
    run = config.default()
    run.workdir, run.model, run.precision = str(path), decoder.config, "fp32"
    run.optimizer.ema_decay, run.launch.compile_cache = 0.9, ""
    run.sample.prompt, run.sample.temperature = "", 0.8
    config.save_run(run)
    tokenizers.ByteTokenizer().save(path / "tokenizer.json")
    zeros = jax.tree.map(jnp.zeros_like, decoder.params)
    state = {"params": zeros, "ema": decoder.params}
    with checkpointer.Checkpointer(
        f"{path}/checkpoints", run.checkpoint, log=lambda text: None
    ) as writer:
        writer.save(7, state, meta={}, wait=True)
    return path


def command(*arguments) -> int:
    return generate.main([str(argument) for argument in arguments])


def test_command_prints_prompt_and_continuation(workdir, capsys, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("two\n\nthree\n")
    code = command(
        "--workdir", workdir, "--prompt", "one", "--prompt-file", prompts, "--samples", 2,
        "--max-tokens", 10, "--top-p", 1.0, "--temperature", 1.0, "--seed", 3, "--step", 7,
    )  # fmt: skip
    out, err = capsys.readouterr()
    assert code == 0, err
    assert "step 7" in err
    ids = [list(text.encode()) for text in ("one", "two", "three") for _ in range(2)]
    want, coder = built("gpt2").generate(ids, stop_tokens=(256,)), tokenizers.ByteTokenizer()
    texts = [coder.decode([*prompt, *added]) for prompt, added in zip(ids, want, strict=True)]
    shown = "".join(
        f"--- prompt {i // 2 + 1}, sample {i % 2 + 1}\n{text}\n" for i, text in enumerate(texts)
    )
    assert out == shown


def test_command_on_a_mesh(workdir, capsys):
    """Settings that are not given are the run's own; its length gives way to the model's."""
    code = command("--workdir", workdir, "--prompt", "one", "--tensor", 2, "--fsdp", 2)
    out, err = capsys.readouterr()
    assert code == 0, err
    prompt = list(b"one")
    settings = dict(max_tokens=61, temperature=0.8, top_p=0.95, seed=0, stop_tokens=(256,))
    [added] = built("gpt2").generate([prompt], **settings)
    assert out == tokenizers.ByteTokenizer().decode([*prompt, *added]) + "\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["no prompt", "--prompt-file"]),
        (["--prompt", ""], ["empty"]),
        (["--prompt", "x", "--step", 3], ["step 3", "[7]"]),
        (["--prompt", "x" * 70], ["max_positions=64"]),
        (["--prompt", "x", "--max-tokens", 64], ["max_tokens=64", "at most 63"]),
        (["--prompt", "x", "--top-p", 2], ["top_p=2.0"]),
        (["--prompt", "x", "--samples", 0], ["--samples=0"]),
        (["--prompt", "x", "--tensor", 16], ["--tensor=16", "1 to 8"]),
        (["--prompt", "x", "--tensor", 3], ["does not divide", "tensor=3"]),
        (["--prompt-file", "/nowhere/prompts"], ["/nowhere/prompts"]),
    ],
    ids=str,
)
def test_command_errors(workdir, capsys, arguments, words):
    assert command("--workdir", workdir, *arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and "Traceback" not in err
    assert all(word in err for word in words), err


def test_command_without_a_run(tmp_path, capsys, workdir):
    assert command("--workdir", tmp_path / "none", "--prompt", "x") == 2
    assert "holds no run" in capsys.readouterr().err
    values = json.loads((workdir / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values))
    tokenizers.ByteTokenizer().save(tmp_path / "tokenizer.json")
    assert command("--workdir", tmp_path, "--prompt", "x") == 2
    assert "no checkpoint yet" in capsys.readouterr().err
