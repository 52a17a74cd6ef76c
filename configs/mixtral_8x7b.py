"""Mixtral 8x7B at sequence 8192 on 64 chips: ZeRO-3 over 16, times experts over 4.

    python -m llmx.train --config configs/mixtral_8x7b.py --config.data.sources="('shards:/data',)"
    python -m llmx.aot --config configs/mixtral_8x7b.py --topology v5p:4x4x4

Each device has two of the eight experts of a layer, and its rows of tokens travel to them.
"""

from llmx import config
from llmx.model import families


def get_config() -> config.Config:
    run = config.default()
    run.steps = 100_000
    run.model = families.preset("mixtral_8x7b")
    run.experts.balance_weight = 0.01
    run.batch.size, run.batch.sequence_length = 64, 8192
    run.mesh.data, run.mesh.fsdp, run.mesh.expert = 1, 16, 4
    run.sharding.layout = "zero3"
    run.remat = "full"
    run.optimizer.learning_rate, run.optimizer.warmup_steps = 3e-4, 2000
    run.guard.on_bad_step, run.guard.spike_factor = "skip", 10.0
    return run
