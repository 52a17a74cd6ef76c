"""A student's whole run: it stops, goes on with its teacher, and is evaluated without one."""

import shutil

import jax
import numpy as np
import pytest
from support import text_runs

import llmx
from llmx import config as config_lib
from llmx.data import __main__ as data_command
from llmx.evaluate import __main__ as evaluate
from llmx.model import families

pytestmark = pytest.mark.slow


def config_of(folder, **model):
    run = config_lib.default()
    sizes = dict(num_layers=2, width=32, num_heads=2, num_kv_heads=2, head_dim=16, mlp_dim=48)
    run.model = families.preset("llama3", **sizes | model)
    run.steps, run.precision = 6, "fp32"
    run.batch.size, run.batch.sequence_length = 8, 32
    run.optimizer.warmup_steps, run.optimizer.learning_rate = 1, 1e-2
    run.checkpoint.every, run.evaluation.every, run.evaluation.batches = 2, 3, 2
    run.metrics.log_every, run.metrics.progress = 1, "plain"
    run.data.sources, run.data.cache_dir = (str(folder / "text"),), str(folder / "cache")
    run.launch.compile_cache = ""
    return run


def test_a_student_s_run(tmp_path):
    """Stopped and continued it takes the same steps, with the teacher read again; its files hold
    no teacher, and evaluate and learn from files without one."""
    text_runs.write_corpus(tmp_path, files=20, words=200)
    teacher = llmx.fit(config_of(tmp_path), workdir=tmp_path / "teacher")
    run = config_of(tmp_path, width=16, mlp_dim=24)
    run.distillation.teacher = str(teacher.workdir)
    run.distillation.hidden_weight = run.distillation.attention_weight = 0.1
    whole = llmx.fit(run, workdir=tmp_path / "whole")

    def stop(record):
        if record["kind"] == "train" and record["step"] == 3:
            raise KeyboardInterrupt

    cut = llmx.fit(run, workdir=tmp_path / "cut", callbacks=[stop])
    assert not cut.done and cut.step < 6
    rest = llmx.fit(run, workdir=tmp_path / "cut")
    assert rest.done
    assert text_runs.losses(tmp_path / "cut", steps=6) == text_runs.losses(
        tmp_path / "whole", steps=6
    )
    jax.tree.map(np.testing.assert_array_equal, rest.params, whole.params)
    assert "projection" in whole.state.params and "projection" not in whole.params
    records = text_runs.records(tmp_path / "whole")
    assert records[6]["divergence"] < records[1]["divergence"]
    assert all(record["hidden"] > 0 < record["attention"] for record in records.values())
    evaluated = text_runs.records(tmp_path / "whole", "eval")
    assert set(evaluated) == {3, 6} and "perplexity" in evaluated[6]

    shards = tmp_path / "shards"
    command = ["--source", str(tmp_path / "text"), "--output", str(shards), "--top-k", "8"]
    assert data_command.main([*command, "--teacher", str(teacher.workdir)]) == 0
    shutil.rmtree(teacher.workdir)
    assert evaluate.main(["--workdir", str(tmp_path / "whole"), "--json"]) == 0
    with pytest.raises(ValueError, match="needs it whenever it is started"):
        llmx.fit(run, workdir=tmp_path / "whole")
    run.distillation = type(run.distillation)(top_k=8)
    run.data.sources = (f"shards:{shards}",)
    listed = llmx.fit(run, workdir=tmp_path / "listed")
    assert listed.done
    assert text_runs.records(tmp_path / "listed")[6]["divergence"] > 0
