"""Qwen3 0.6B with a tokenizer trained on the data, ZeRO-2, and a mixture of two sources.

    python -m llmx.train --config configs/qwen3_0.6b.py --config.data.sources="('docs/', 'stdlib')"
    python -m llmx.aot --config configs/qwen3_0.6b.py --topology v5e:2x4

By default the sources are Python's standard library and the project's own documentation, mixed
three to one.
"""

import pathlib

from llmx import config
from llmx.model import families

DOCS = str(pathlib.Path(__file__).parent.parent / "docs")


def get_config() -> config.Config:
    run = config.default()
    run.steps = 1000
    run.model = families.preset("qwen3_0.6b")
    run.batch.size, run.batch.sequence_length = 16, 512
    run.data.sources, run.data.weights = ("stdlib", DOCS), (3.0, 1.0)
    run.data.train_tokenizer = 8192
    run.sharding.layout = "zero2"
    run.remat = "dots"
    run.optimizer.name, run.optimizer.learning_rate = "lion", 1e-4
    run.checkpoint.every = 200
    return run
