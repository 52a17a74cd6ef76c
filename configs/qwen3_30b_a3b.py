"""Qwen3 30B-A3B at sequence 8192 on 64 chips: ZeRO-3 over 8, times experts over 8.

    python -m llmx.train --config configs/qwen3_30b_a3b.py --config.data.sources="('shards:/data',)"
    python -m llmx.aot --config configs/qwen3_30b_a3b.py --topology v5p:4x4x4

A token goes to 8 of a layer's 128 experts, of which each device has 16.
"""

from llmx import config
from llmx.model import families


def get_config() -> config.Config:
    run = config.default()
    run.steps = 100_000
    run.model = families.preset("qwen3_30b_a3b")
    run.experts.balance, run.experts.balance_weight = "batch", 0.001
    run.batch.size, run.batch.sequence_length = 64, 8192
    run.mesh.data, run.mesh.fsdp, run.mesh.expert = 1, 8, 8
    run.sharding.layout = "zero3"
    run.remat = "full"
    run.optimizer.learning_rate, run.optimizer.warmup_steps = 3e-4, 2000
    run.guard.on_bad_step, run.guard.spike_factor = "skip", 10.0
    return run
