"""Bad configs are told all at once, with words that help, before anything is allocated."""

import copy
import dataclasses
import errno
import math
import os
import pathlib
import runpy
import subprocess
import sys

import pytest

from llmx import config
from llmx.config import checks, describe
from llmx.config import flags as flags_lib
from llmx.model import families
from llmx.pipeline import schedule, schedules

ROOT = pathlib.Path(__file__).parents[2]
CONFIGS = sorted(set((ROOT / "configs").glob("*.py")) - set((ROOT / "configs").glob("compress_*")))


def changed(**values) -> config.Config:
    """A good config with values changed by path, as a config file would set them."""
    run = config.default()
    run.model = families.preset("llama3")
    for key, value in values.items():
        section, _, name = key.rpartition("__")
        setattr(vars(run)[section] if section else run, name, value)
    return run


# (changes, devices, words that the error must hold)
BAD = [
    (dict(optimizer__learning_rte=1e-3), 1, ["optimizer.learning_rte", "optimizer.learning_rate"]),
    (dict(stepz=5), 1, ["stepz", "did you mean steps"]),
    (dict(batch__batch_size=4), 1, ["batch.batch_size", "did you mean"]),
    (dict(steps="many"), 1, ["steps='many'", "a whole number"]),
    (dict(seed=2**32), 1, ["seed=4294967296", "at most 4294967295"]),
    (dict(optimizer__learning_rate="3e-4"), 1, ["learning_rate='3e-4'", "a number"]),
    (dict(data__sources="stdlib"), 1, ["data.sources='stdlib'", "tuple"]),
    (dict(model=7), 1, ["model=7", "ModelConfig"]),
    (dict(sharding__sequence_parallel=1), 1, ["sequence_parallel=1", "True or False"]),
    (dict(mesh__data=1, mesh__tensor=3), 3, ["num_heads=4", "tensor=3", "[1, 2]"]),
    (dict(mesh__data=1, mesh__tensor=4), 4, ["num_kv_heads=2", "tensor=4", "replicate_kv=True"]),
    (
        dict(mesh__data=1, mesh__tensor=6, sharding__replicate_kv=True, model__num_kv_heads=4,
             model__num_heads=12, batch__sequence_length=240),
        6, ["num_kv_heads=4", "tensor=6", "[1, 2, 4]", "may be a multiple"],
    ),
    (dict(mesh__data=1, mesh__tensor=2, model__num_heads=6, model__num_kv_heads=3), 2,
     ["1 problem", "num_kv_heads=3", "tensor=2", "use tensor in [1, 3]"]),
    (dict(pipeline__predict=True), 8, ["pipeline.predict=True", "mesh.stage=1"]),
    (dict(mesh__stage=2, batch__accumulation=2, model__num_layers=2, pipeline__predict=True), 8,
     ["pipeline.predict", "schedule='1f1b'", "use pipedream_2bw"]),
    (dict(mesh__stage=2, batch__accumulation=4, model__num_layers=2, pipeline__predict=True,
          pipeline__schedule="pipedream_2bw", loss_scale__kind="dynamic"), 8,
     ["pipeline.predict", "dynamic loss scale", "loss_scale.kind='fixed'"]),
    (dict(pipeline__memory_gib=1.0), 8, ["pipeline.memory_gib=1.0", "mesh.stage=1"]),
    *((dict(mesh__stage=2, batch__accumulation=2, model__num_layers=2, pipeline__memory_gib=1.0,
            pipeline__schedule="zb_h1") | {key: "bogus"}, 8, ["'bogus' is unknown"])
      for key in ("precision", "reduce_dtype", "optimizer__moments", "optimizer__name", "remat")),
    (dict(mesh__stage=2, batch__accumulation=2, model__num_layers=2, remat="part+"), 8,
     ["remat='part+': name a policy behind +"]),
    (dict(mesh__stage=2, batch__accumulation=2, model__num_layers=2, pipeline__memory_gib=1.0), 8,
     ["pipeline.memory_gib=1", "schedule='1f1b'", "use zb_1f1b"]),
    (dict(mesh__stage=2, batch__accumulation=2, model__num_layers=2, pipeline__schedule="zb_h1",
          pipeline__memory_gib=1e-6), 8,
     ["schedule='zb_h1' within 0.0 GiB", "use more stages or devices, or"]),
    (dict(remat="part"), 8, ["remat='part'", "mesh.stage=1", "use 'full', or 'sqrt'"]),
    (dict(remat="part+dots"), 8, ["remat='part+dots'", "use 'dots', or 'sqrt'"]),
    (dict(mesh__data=1, mesh__tensor=5, model__num_heads=5, model__num_kv_heads=5,
          model__mlp_dim=191), 5, ["mlp_dim=191", "tensor=5"]),
    (
        dict(mesh__data=1, mesh__tensor=3, model__num_heads=3, model__num_kv_heads=3,
             batch__sequence_length=255, model__vocab_size=260, model__vocab_multiple=10),
        3, ["vocabulary of 260", "tensor3", "vocab_multiple"],
    ),
    (dict(batch__size=12), 8, ["batch.size=12", "data8", "8 or 16"]),
    (dict(batch__size=16, batch__accumulation=3), 8, ["batch.size=16", "accumulation=3", "24"]),
    (dict(batch__sequence_length=254, mesh__sequence=4), 8,
     ["sequence_length=254", "sequence4", "multiple of 4"]),
    (dict(batch__sequence_length=255, mesh__tensor=2), 8,
     ["sequence_length=255", "tensor2", "sequence_parallel=False"]),
    (dict(batch__sequence_length=512), 1, ["sequence_length=512", "max_positions=256"]),
    (dict(model__width=60, model__mlp_dim=100), 8,
     ["model.width=60", "data8", "zero3", "multiple of 8"]),
    # Ranks stand for the width in what follows it, and adapters have fewer dimensions to split.
    (dict(model__ranks=("attention=3",), model__num_heads=5, model__num_kv_heads=5,
          model__head_dim=6, mesh__fsdp=4, sharding__gather="step"), 4,
     ["1 problem", "the rank 3 of blocks/attention/key/kernel/up", "fsdp4", "multiple of 4"]),
    (dict(model__width=60, adapters__rank=3, mesh__fsdp=8, sharding__gather="step"), 8,
     ["model.width=60", "blocks/attention/key/kernel/down", "fsdp8", "multiple of 8"]),
    (dict(mesh__data=3), 8, ["data3", "3 devices", "there are 8"]),
    (dict(mesh__tensor=3), 8, ["tensor3", "8 devices", "does not divide"]),
    (dict(mesh__fsdp=-1), 8, ["['data', 'fsdp']", "only one axis"]),
    (dict(mesh__fsdp=0), 8, ["{'fsdp': 0}", "at least 1"]),
    (
        dict(mesh__stage=2, pipeline__schedule="1f1"), 8,
        ["1 problem", "pipeline.schedule='1f1'", "did you mean '1f1b'"],
    ),
    (dict(pipeline__schedule="none"), 1, ["pipeline.schedule='none'", "gpipe"]),
    (dict(mesh__stage=4, batch__accumulation=8), 4, ["3 layers", "4 model chunks", "at most 3"]),
    (
        dict(mesh__stage=2, pipeline__schedule="interleaved_1f1b", batch__accumulation=2), 2,
        ["3 layers", "4 model chunks"],
    ),
    (
        dict(mesh__stage=2, pipeline__layers=(1, 1)), 2,
        ["pipeline.layers=(1, 1)", "2 numbers", "add up to 3", "2 numbers from 1, whose sum is 2"],
    ),
    (
        dict(mesh__stage=2, pipeline__layers=(1, 1, 1)), 2,
        ["pipeline.layers=(1, 1, 1)", "2 numbers"],
    ),
    (
        dict(mesh__stage=2, pipeline__virtual_stages=2), 2,
        ["mesh.stage=2", "1f1b with virtual_stages=2", "use 1, or interleaved_1f1b"],
    ),
    (
        dict(mesh__stage=2, pipeline__schedule="zb_v", pipeline__virtual_stages=3,
             model__num_layers=8), 2,
        ["zb_v with virtual_stages=3", "use 2"],
    ),
    (
        dict(mesh__stage=2, pipeline__schedule="interleaved_1f1b", pipeline__virtual_stages=1), 2,
        ["interleaved_1f1b with virtual_stages=1", "at least 2, or 1f1b"],
    ),
    (
        dict(mesh__stage=2, mesh__tensor=2, model__vocab_size=258, model__vocab_multiple=2), 4,
        ["vocabulary of 258", "stage2 x tensor2", "vocab_multiple to a multiple of 4"],
    ),
    (
        dict(model__vocab_size=151937, model__vocab_multiple=1), 1,
        ["vocab_size=151937", "151937 chunks of 1 only", "vocab_multiple=128"],
    ),
    (
        dict(mesh__stage=2, mesh__tensor=2, loss__chunks=7), 4,
        ["loss.chunks=7", "stage2 x tensor2"],
    ),
    (dict(pipeline__layers=(1, 2)), 1, ["pipeline.layers=(1, 2)", "mesh.stage=1", "leave it out"]),
    (dict(pipeline__virtual_stages=2), 8, ["pipeline.virtual_stages=2", "mesh.stage=1"]),
    (dict(pipeline__table="my.csv"), 1, ["pipeline.table='my.csv'", "mesh.stage=1"]),
    (
        dict(mesh__stage=2, pipeline__table="/nowhere/at/all.csv"), 2,
        ["pipeline.table='/nowhere/at/all.csv'", "cannot be read", "No such file"],
    ),
    (dict(mesh__across_slices=("dta",)), 8, ["'dta'", "did you mean 'data'"]),
    (dict(sharding__layout="zero4"), 1, ["layout='zero4'", "did you mean 'zero"]),
    (dict(sharding__gather="steps"), 1, ["gather='steps'", "did you mean 'step'"]),
    (
        dict(sharding__gather="step", sharding__layout="zero2"), 1,
        ["gather='step'", "'zero2'", "'zero3' or 'hsdp'"],
    ),
    (dict(precision="fp12"), 1, ["precision='fp12'", "did you mean 'fp"]),
    (dict(reduce_dtype="fp8"), 1, ["reduce_dtype='fp8'", "fp32"]),
    (dict(precision="fp16", launch__platform="tpu"), 1, ["TPUs have no fp16", "use 'bf16'"]),
    (dict(loss_scale__kind="dynamc"), 1, ["loss_scale.kind='dynamc'", "did you mean 'dynamic'"]),
    (dict(loss_scale__growth_interval=0), 1, ["loss_scale.growth_interval=0", "at least 1"]),
    (dict(loss_scale__backoff_factor=1.0), 1, ["loss_scale.backoff_factor=1.0", "below 1"]),
    (
        dict(loss_scale__initial=0.5), 1,
        ["loss_scale.initial=0.5", "loss_scale.minimum=1.0", "powers of two"],
    ),
    (dict(launch__overlap="on"), 1, ["launch.overlap='on'", "auto, none"]),
    (
        dict(launch__compiler_options=("async",)), 1,
        ["compiler_options", "'async'", "xla_name=value"],
    ),
    (dict(remat="ful"), 1, ["remat='ful'", "did you mean 'full'"]),
    (dict(precision="bfloat16"), 1, ["precision='bfloat16'", "bf16"]),
    (dict(attention__implementation="flash"), 1, ["implementation='flash'", "reference"]),
    (dict(attention__ulysses=0), 1, ["attention.ulysses=0", "at least 1"]),
    (
        dict(mesh__sequence=8, attention__ulysses=3), 8,
        ["attention.ulysses=3", "8 devices", "use a divisor"],
    ),
    (
        dict(mesh__sequence=8, attention__ulysses=8), 8,
        ["attention.ulysses=8", "4 query heads", "num_heads=4", "form rings"],
    ),
    (
        dict(mesh__sequence=8, batch__sequence_length=264), 8,
        ["264 positions", "16 chunks", "a multiple of 16", "attention.zigzag=False"],
    ),
    (dict(optimizer__name="adam"), 1, ["optimizer.name='adam'", "adamw"]),
    (dict(optimizer__schedule="cos"), 1, ["schedule='cos'", "cosine"]),
    (dict(optimizer__warmup_steps=-1), 1, ["warmup_steps=-1", "at least 0"]),
    (dict(optimizer__b1=1.0), 1, ["b1=1.0", "below 1"]),
    (dict(optimizer__clip_norm=-1.0), 1, ["clip_norm=-1.0", "at least 0"]),
    (dict(optimizer__moments="fp8"), 1, ["moments='fp8'", "auto, fp32, bf16, int8"]),
    (
        dict(optimizer__moments="int8", optimizer__name="adafactor"), 1,
        ["moments='int8'", "'adafactor'", "rows and columns", "set optimizer.moments='auto'"],
    ),
    (
        dict(optimizer__moments="bf16", sync__strategy="one_bit", sync__warmup_steps=1), 8,
        ["1 problem", "moments='bf16'", "'one_bit'", "set optimizer.moments='auto'"],
    ),
    (
        dict(precision="pure_bf16", sync__strategy="diloco"), 8,
        ["1 problem", "precision='pure_bf16'", "'diloco'", "bfloat16", "precision='bf16'"],
    ),
    (
        dict(optimizer__moments="int8", precision="pure_bf16", sync__strategy="zero_one"), 8,
        ["2 problems", "moments='int8'", "precision='pure_bf16'"],
    ),
    (dict(model__num_kv_heads=3), 1, ["num_heads=4", "num_kv_heads=3", "[1, 2, 4]"]),
    (dict(model__head_dim=15), 1, ["head_dim=15", "even"]),
    (dict(model__layer_pattern=("local",)), 1, ["window=0", "'local'"]),
    (dict(model__layer_pattern=("lokal",)), 1, ["('lokal',)", "'global'"]),
    (dict(model__norm="batch"), 1, ["norm='batch'", "rms"]),
    (dict(model__num_layers=0), 1, ["num_layers=0", "at least 1"]),
    (dict(loss__chunks=7), 1, ["loss.chunks=7", "384", "0 = automatic"]),
    (dict(model__vocab_size=256), 1, ["vocab_size=256", "257 tokens", "0 to follow"]),
    (dict(model__vocab_size=-1), 1, ["vocab_size=-1", "0 follows"]),
    (dict(guard__on_bad_step="ignore"), 1, ["on_bad_step='ignore'", "skip"]),
    (dict(guard__spike_factor=0.5), 1, ["spike_factor=0.5", "above 1"]),
    (dict(checkpoint__keep_last=0), 1, ["keep_last=0", "at least 1"]),
    (dict(metrics__progress="loud"), 1, ["progress='loud'", "plain"]),
    (dict(data__sources=("/nowhere/at/all",)), 1, ["/nowhere/at/all"]),
    (dict(data__sources=(3,)), 1, ["data.sources=(3,)", "a tuple of texts"]),
    (dict(data__weights=("1",)), 1, ["data.weights=('1',)", "a tuple of numbers"]),
    (dict(data__weights=1.0), 1, ["data.weights=1.0", "a tuple of numbers"]),
    (dict(data__tokenizer=3), 1, ["data.tokenizer=3", "a text"]),
    (dict(data__train_tokenizer=100), 1, ["train_tokenizer=100", "at least 257", "0 trains none"]),
    (dict(data__train_tokenizer=True), 1, ["train_tokenizer=True", "a whole number"]),
    (dict(data__held_out=0.9), 1, ["data.held_out=0.9", "at least 0 and at most 0.5"]),
    (dict(data__held_out=-0.1), 1, ["data.held_out=-0.1", "at least 0"]),
    (dict(data__held_out="5%"), 1, ["data.held_out='5%'", "a number"]),
    (dict(data__shuffle=1), 1, ["data.shuffle=1", "True or False"]),
    (dict(data__pack="yes"), 1, ["data.pack='yes'", "True or False"]),
    (dict(data__num_threads=-1), 1, ["data.num_threads=-1", "at most 64"]),
    (dict(data__prefetch=1.5), 1, ["data.prefetch=1.5", "a whole number"]),
    (dict(sample__top_p=0.0), 1, ["top_p=0.0", "above 0"]),
    (dict(launch__platform="npu"), 1, ["platform='npu'", "cpu"]),
    (dict(steps=0), 1, ["steps=0", "at least 1"]),
    (dict(model__rope_scaling="llama3", model__rope_low_freq=8.0), 1,
     ["rope_low_freq=8 is not below model.rope_high_freq=4", "use 1 and 4"]),
    (dict(model__rope_scaling="yarn", model__rope_beta_slow=40.0), 1,
     ["rope_beta_slow=40 is above model.rope_beta_fast=32", "use 1 and 32"]),
    (dict(model__rope_scaling="yarn", model__rope_theta=1.0), 1, ["use a base above 1"]),
    (dict(model__rope_low_freq=0.0), 1, ["rope_low_freq=0.0", "above 0"]),
    (dict(model__rope_old_context=0), 1, ["rope_old_context=0", "at least 1"]),
    (dict(model__rope_theta_local=-1.0), 1, ["rope_theta_local=-1.0", "at least 0"]),
    # No parameters have such shapes, of which one would be asked whether it divides.
    (dict(model__kv_latent=1, model__width=66, mesh__data=1, mesh__fsdp=5,
          sharding__layout="zero3", batch__size=5), 5,
     ["model.rope_dim=0", "model.value_dim=0", "num_kv_heads=2 with model.kv_latent=1"]),
]  # fmt: skip


@pytest.mark.parametrize("changes, num_devices, words", BAD, ids=lambda value: str(value)[:60])
def test_bad_config(changes, num_devices, words):
    with pytest.raises(config.ConfigError) as error:
        checks.resolve(changed(**changes), num_devices)
    for word in words:
        assert word in str(error.value), f"{word!r} is not in: {error.value}"


def test_a_schedule_from_a_file(tmp_path):
    """It must be legal, and for the stages and microbatches of the run."""
    path = tmp_path / "my.csv"
    schedule.write_csv(schedules.one_f_one_b(2, 4), path)
    stages = dict(mesh__stage=2, pipeline__table=str(path))
    checks.resolve(changed(**stages, batch__accumulation=4), 2)
    with pytest.raises(
        config.ConfigError, match=r"for 2 stages and 4 microbatches: set mesh.stage"
    ):
        checks.resolve(changed(**stages, batch__accumulation=8), 2)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:-1]) + "\n")
    with pytest.raises(config.ConfigError, match="BACKWARD of microbatch 3 in chunk 0 is missing"):
        checks.resolve(changed(**stages, batch__accumulation=4), 2)


def test_good_config_resolves_and_is_not_changed():
    run = changed()
    before = copy.deepcopy(run)
    resolved = checks.resolve(run, 8)
    assert run == before
    assert resolved.mesh.data == 8 and resolved.model.vocab_size == 257


def test_all_problems_are_told_at_once():
    run = changed(remat="ful", batch__size=12, optimizer__name="adam", mesh__across_slices=("x",))
    run.optimizer.lr = 1.0
    with pytest.raises(config.ConfigError) as error:
        checks.resolve(run, 8)
    assert len(error.value.problems) == 5
    assert "5 problems" in str(error.value)


def test_unknown_data_is_not_also_a_bad_vocabulary():
    with pytest.raises(config.ConfigError) as error:
        checks.resolve(changed(data__sources=("shards:/nowhere/at/all",)), 1)
    assert len(error.value.problems) == 1


def test_nothing_is_allocated_before_the_checks():
    """resolve needs no device at all: it works where jax has no backend."""
    code = (
        "import os; os.environ['JAX_PLATFORMS'] = 'none'\n"
        "from llmx import config\nfrom llmx.config import checks\n"
        "run = config.default(); run.remat = 'x'\n"
        "try: checks.resolve(run, 8)\n"
        "except config.ConfigError as error: print('told:', error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert "told: " in done.stdout and "remat='x'" in done.stdout, done.stderr


def write(tmp_path, body: str = "") -> str:
    path = tmp_path / "run.py"
    path.write_text(
        "from llmx import config\nfrom llmx.model import families\n\n\ndef get_config():\n"
        "    run = config.default()\n    run.model = families.preset('llama3')\n"
        f"{body}    return run\n"
    )
    return str(path)


def parsed(path: str, *flags: str):
    _, run, problems = flags_lib.parse(flags_lib.parser("x", "y"), ["--config", path, *flags])
    return run, problems


def test_flags_override(tmp_path):
    run, problems = parsed(
        write(tmp_path), "--config.batch.size=64", "--config.optimizer.learning_rate", "1e-2",
        "--config.data.shuffle=False", "--noconfig.data.pack", "--config.model.num_layers=7",
        "--config.data.sources=('a', 'b')", "--config.optimizer.weight_decay=1",
    )  # fmt: skip
    assert not problems
    assert run.batch.size == 64 and run.optimizer.learning_rate == 1e-2
    assert not run.data.shuffle and not run.data.pack and run.model.num_layers == 7
    assert run.data.sources == ("a", "b") and run.optimizer.weight_decay == 1
    assert run.workdir == "runs/run"


def test_a_flag_does_not_rename_a_model(tmp_path):
    """It would be trained as what it is, and refused as what it is called when it is exported."""
    path = write(tmp_path, "    run.model = families.preset('qwen3', width=32)\n")
    run, problems = parsed(path, "--config.model.family=qwen3", "--config.model.width=64")
    assert not problems and run.model == families.preset("qwen3")
    run, problems = parsed(path, "--config.model.family=llama3", "--config.model.width=64")
    assert run.model == families.preset("qwen3")
    with pytest.raises(config.ConfigError) as error:
        checks.resolve(run, 1, problems=problems)
    for words in ("model.family='llama3'", "as 'qwen3'", "use families.preset('llama3', ...)"):
        assert words in str(error.value)
    # With all that the family has it is one: a Llama with biases of queries is a Qwen2.
    path = write(tmp_path, "    run.model = families.preset('llama3')\n")
    run, problems = parsed(path, "--config.model.family=qwen2", "--config.model.qkv_bias=True")
    assert not problems and run.model.family == "qwen2"


@pytest.mark.parametrize(
    ("preset", "changes", "family", "missing"),
    [
        ("llama3", {}, "qwen3", "nothing of qk_norm:"),
        ("llama3", {}, "gpt2", "nothing of positions, norm, "),
        ("llama3", {"tied_head": True}, "mixtral", "nothing of num_experts, "),
        ("qwen3", {"qk_norm": False}, "qwen3", "nothing of qk_norm:"),
        # A window or layers without rotation make no other family of a Llama, nor does a part of
        # what a family has make none of it.
        ("llama3", {"layer_pattern": ("local",), "window": 8}, "llama3", ""),
        ("llama3", {"layer_pattern": ("global", "global_nope")}, "llama3", ""),
        ("llama3", {"qkv_bias": True}, "qwen2", ""),
        ("mistral", {"layer_pattern": ("global",), "window": 0}, "mistral", ""),
        ("gemma2", {"attention_softcap": 0.0}, "gemma2", ""),
    ],
)
def test_a_family_is_no_name_alone(preset, changes, family, missing):
    """The model would be trained as what it is, and its export refused as what it is called."""
    run = config.default()
    run.model = families.preset(preset, vocab_size=257, **changes)
    run.model.family, run.data.tokenizer = family, "bytes"
    if not missing:
        assert checks.resolve(run, 1).model.family == family
        return
    with pytest.raises(config.ConfigError, match=f"families.preset.'{family}'") as error:
        checks.resolve(run, 1)
    assert missing in str(error.value) and "1 problem" in str(error.value)


def test_a_long_value_is_told_by_its_beginning_and_end():
    error = config.ConfigError(["short", f"offload.saves: '{'x' * 10**6}' is unknown: use input"])
    assert error.problems[0] == "short" and len(str(error)) < 5000
    assert error.problems[1].startswith("offload.saves: 'xxx")
    assert error.problems[1].endswith("xx' is unknown: use input")


def test_bad_flags_are_told_with_the_rest(tmp_path):
    path = write(tmp_path, "    run.remat = 'ful'\n    run.optimizer.lr = 1\n")
    run, problems = parsed(
        path, "--config.batch.size=lots", "--config.optimzer.eps=1", "--config.model.widht=3"
    )
    with pytest.raises(config.ConfigError) as error:
        checks.resolve(run, 1, problems=problems)
    for words in ("batch.size='lots'", "did you mean optimizer.eps", "did you mean model.width",
                  "remat='ful'", "optimizer.lr"):  # fmt: skip
        assert words in str(error.value)


@pytest.mark.parametrize(
    "body, words",
    [
        ("    raise ValueError('no luck')\n", "no luck"),
        ("    return 3\n", "returns int"),
        ("    run.model = families.preset('llama9')\n", "llama9"),
    ],
)
def test_files_that_fail(tmp_path, body, words):
    with pytest.raises(config.ConfigError, match=words):
        parsed(write(tmp_path, body))


def test_the_config_of_a_run_is_one_for_the_command_line(tmp_path):
    """With its work directory, unless another is named."""
    run = checks.resolve(changed(), 8)
    run.workdir = str(tmp_path)
    config.save_run(run)
    path = str(tmp_path / "config.json")
    again, problems = parsed(path, "--config.batch.size=64", "--config.data.sources=('a',)")
    assert not problems and again.workdir == str(tmp_path)
    assert (again.batch.size, again.data.sources) == (64, ("a",))
    again.batch.size, again.data.sources = run.batch.size, run.data.sources
    assert dataclasses.asdict(again) == dataclasses.asdict(run)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(config.ConfigError, match="is damaged, or of another version"):
        parsed(path)


@pytest.mark.parametrize("name", ["run.yaml", "run.toml", "run"])
def test_files_of_other_kinds_are_named(tmp_path, name):
    (tmp_path / name).write_text("batch: {size: 4}\n")
    with pytest.raises(config.ConfigError, match=r"a Python file with a function get_config\(\)"):
        parsed(str(tmp_path / name))


def test_other_names_of_keys_are_known():
    known = config.leaf_types(config.Config)
    for name, key in config.OTHER_NAMES.items():
        assert f"did you mean {key}?" in config.unknown_key(f"optimizer.{name}", known)
        assert key in known


@pytest.mark.parametrize(("key", "meant"), [
    ("learning_rate", "optimizer.learning_rate"), ("tabels.learning_rate", "tables.learning_rate"),
    ("trainer.learning_rate", "optimizer.learning_rate"),
    ("num_layers", "model.num_layers"), ("weight_decay", "optimizer.weight_decay"),
    ("optimizer.learning_rte", "optimizer.learning_rate"),
])  # fmt: skip
def test_the_key_that_is_meant_is_named(key, meant):
    assert f"did you mean {meant}?" in config.unknown_key(key, config.leaf_types(config.Config))


@pytest.mark.parametrize("body", ["    run.model = families.preset('llama9')\n", "    run.(\n"])
def test_a_failing_file_is_named_with_its_line(tmp_path, body):
    with pytest.raises(config.ConfigError, match=r"run\.py, line 8, fails: "):
        parsed(write(tmp_path, body))


def test_a_warmup_that_does_not_end_is_told():
    run = config.default()
    run.steps, run.optimizer.warmup_steps = 500, 2000
    assert "warmup_steps=2000 is not below steps=500" in "".join(describe.oddities(run))
    run.optimizer.warmup_steps = 499
    assert not list(describe.oddities(run))


def test_missing_file(tmp_path):
    with pytest.raises(config.ConfigError, match=rf"{tmp_path}: this is a folder: name a file"):
        parsed(str(tmp_path))
    with pytest.raises(config.ConfigError, match=r"nowhere\.py: there is no such file"):
        parsed("nowhere.py")


def test_written_and_read(tmp_path):
    run = checks.resolve(changed(), 8)
    run.workdir = str(tmp_path)
    config.save_run(run)
    again = config.load_run(str(tmp_path))
    assert dataclasses.asdict(again) == dataclasses.asdict(run)
    with pytest.raises(ValueError, match="holds no run"):
        config.load_run(str(tmp_path / "other"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_config_resolves(path):
    source = path.read_text()
    assert len(source.splitlines()) <= 40
    module = runpy.run_path(str(path))
    assert "python -m llmx" in module["__doc__"]
    run = module["get_config"]()
    # Of other runs, which are not here.
    run.start_from, run.distillation = "", type(run.distillation)()
    devices = 1
    if run.mesh.data != -1:
        for axis in ("stage", "data", "fsdp", "expert", "sequence", "tensor"):
            devices *= max(1, vars(run.mesh)[axis])
    checks.resolve(run, devices)


@pytest.mark.parametrize(("key", "value"), [
    ("steps", 10**30), ("batch.size", 2**31), ("checkpoint.keep_every", 10**30),
    ("rollback.at_most", 10**9), ("rollback.rise", math.inf), ("sync.every", 2**40),
    pytest.param("rollback.window", 10**5000, id="digits"),
    ("rollback.rise", 1e30), ("rollback.at", (2**40,)), ("guard.spike_factor", math.inf),
    ("metrics.spike_deviations", math.inf), ("watchdog.step_factor", 1e30),
    ("watchdog.save_seconds", 1e30), ("watchdog.step_seconds", math.inf),
    ("launch.heartbeat_seconds", 2**31 - 1), ("launch.watchdog_seconds", 2**31 - 1),
    ("checkpoint.grace_seconds", 1e30), ("model.rope_theta", math.inf),
    ("model.rope_high_freq", math.nan),
])  # fmt: skip
def test_numbers_that_nothing_can_count_to_are_refused(key, value):
    run = config.default()
    config.set_value(run, key, value)
    with pytest.raises(config.ConfigError, match=rf"{key}=.* must be .*(at most|finite)"):
        checks.resolve(run)


@pytest.mark.parametrize(("number", "path", "words"), [
    (errno.ENOSPC, "run/x", "the disk is full ({}): free space on it, or name another --workdir"),
    (errno.EACCES, "data/a/b.txt", "not permitted ({}): permit it, or name another data.sources"),
    (errno.EIO, "cache/x/tokens", "run again, or name another data.cache_dir"),
    (errno.ENOENT, "tokenizer.json", "({}): bring it back, or name another data.tokenizer"),
    (errno.EROFS, "run/local/x", "for writing, or name another checkpoint.local_directory"),
    (errno.EISDIR, "run/config.json", "a folder is in the way ({}): move it away, or name another"),
    (errno.ENOENT, "runner", "bring it back"), (errno.ENOSPC, None, "free space on it"),
])  # fmt: skip
def test_a_failure_names_the_file_and_the_key_that_it_comes_from(tmp_path, number, path, words):
    run, at = config.default(), lambda name: str(tmp_path / name)
    run.workdir, run.data.cache_dir, run.data.tokenizer = (
        at("run"),
        at("cache"),
        at("tokenizer.json"),
    )
    run.data.sources = ("stdlib", at("data/*/[a-z].txt"))
    run.checkpoint.local_directory = at("run/local")
    error = OSError(number, os.strerror(number), *([at(path)] if path else []))
    text = describe.failure_text(run, error)
    assert words.format(error) in text
    assert ("name another" in text) == ("name another" in words)


def test_late_gradients_with_adamw_are_warned_of():
    run = config.default()
    run.mesh.stage, run.batch.accumulation, run.pipeline.schedule = 2, 4, "pipedream_2bw"
    run.optimizer.learning_rate = 6e-3
    assert "AdamW at learning rate 0.006" in describe.delay_text(run)
    for section, key, value in (
        ("optimizer", "learning_rate", 1e-3), ("optimizer", "name", "muon"),
        ("pipeline", "predict", True), ("pipeline", "schedule", "1f1b"), ("mesh", "stage", 1),
    ):  # fmt: skip
        other = copy.deepcopy(run)
        setattr(getattr(other, section), key, value)
        assert not describe.delay_text(other)


def test_golden_keys():
    """The whole surface of the config, so that a change to it is seen in review."""
    wanted = (ROOT / "tests/golden/config_keys.txt").read_text().splitlines()
    assert list(config.leaf_types(config.Config)) == wanted
    # Pruning, integers of weights, inputs and the KV cache, teachers: some eight keys each; sparse
    # tables, models of clicks and their records some thirty, tables in host memory and relations of
    # attention four each.
    assert len(wanted) <= 307


def test_every_key_has_a_comment():
    """Each leaf is explained where it is defined, on its line or the line above."""
    import inspect

    def sections(kind):
        yield kind
        for hint in __import__("typing").get_type_hints(kind).values():
            if dataclasses.is_dataclass(hint):
                yield from sections(hint)

    missing = []
    for kind in sections(config.Config):
        lines = inspect.getsource(kind).splitlines()
        for number, line in enumerate(lines):
            name = line.strip().partition(":")[0]
            fields = {field.name: field for field in dataclasses.fields(kind)}
            if line.startswith("    ") and name in fields and ": " in line:
                leaf = not dataclasses.is_dataclass(__import__("typing").get_type_hints(kind)[name])
                if leaf and "#" not in line and not lines[number - 1].strip().startswith("#"):
                    missing.append(f"{kind.__name__}.{name}")
    assert not missing


def test_docs_list_every_key():
    script = ROOT / "scripts/config_table.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], cwd=ROOT, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, "docs/configuration.md is stale: run scripts/config_table.py"


@pytest.mark.parametrize("axis, size", [("stage", 0), ("tensor", 0), ("fsdp", -2)])
def test_mesh_sizes_are_checked_without_devices_too(axis, size):
    """A problem of the launch section leaves the number of devices unknown."""
    run = config.default()
    setattr(run.mesh, axis, size)
    with pytest.raises(config.ConfigError, match=f"'{axis}': {size}.* must be at least 1, or -1"):
        checks.resolve(run, None)


def test_dense_layers_that_leave_none_with_experts_are_refused_before_shapes_are_made():
    """Whether or not anything else fits: no parameters have such shapes."""
    run = config.default()
    run.model = families.preset("deepseek_v3", num_layers=2, first_dense=3)
    run.mesh.data, run.mesh.fsdp, run.batch.size = 1, 3, 6
    with pytest.raises(config.ConfigError, match="first_dense=3 leaves none of"):
        checks.resolve(run, 3)
