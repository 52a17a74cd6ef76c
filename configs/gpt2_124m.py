"""GPT-2 124M with ZeRO-1 over all devices, gradient accumulation and bf16.

    python -m llmx.train --config configs/gpt2_124m.py --config.data.sources="('shards:/data/web',)"
    python -m llmx.aot --config configs/gpt2_124m.py --topology v5e:2x4

A step is 524,288 tokens. Without the data flag it trains on the text of Python's standard library,
to try it out.
"""

from llmx import config
from llmx.model import families


def get_config() -> config.Config:
    run = config.default()
    run.steps = 19_000
    run.model = families.preset("gpt2_124m")
    run.batch.size, run.batch.sequence_length, run.batch.accumulation = 512, 1024, 4
    run.sharding.layout = "zero1"
    run.remat = "names"
    run.optimizer.learning_rate, run.optimizer.warmup_steps = 6e-4, 700
    run.checkpoint.every, run.evaluation.every, run.evaluation.batches = 1000, 250, 4
    return run
