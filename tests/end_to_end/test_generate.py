"""A run generates the same text whatever devices share its layers, or says why it cannot."""

import re

import jax
import numpy as np
import pytest

from llmx import config as config_lib
from llmx import evaluate, generate
from llmx.checkpoint import checkpointer
from llmx.config import ConfigError, checks
from llmx.config import recipe as recipe_lib
from llmx.data import tokenizers
from llmx.model import apply, sampling

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
