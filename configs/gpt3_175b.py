"""GPT-3 175B (arXiv 2005.14165) with ZeRO-3 over 512 v5p chips, sequences of 2048.

    python -m llmx.train --config configs/gpt3_175b.py --config.data.sources="('shards:/data',)"
    python -m llmx.aot --config configs/gpt3_175b.py --topology v5p:8x8x8

A step is 1,048,576 tokens.
"""

from llmx import config
from llmx.model import families


def get_config() -> config.Config:
    run = config.default()
    run.steps = 290_000
    run.model = families.preset("gpt3_175b")
    run.batch.size, run.batch.sequence_length = 512, 2048
    run.mesh.data, run.mesh.fsdp = 1, 512
    run.sharding.layout = "zero3"
    run.remat = "full"
    run.optimizer.learning_rate, run.optimizer.warmup_steps = 6e-5, 360
    run.guard.on_bad_step, run.guard.spike_factor = "skip", 10.0
    return run
