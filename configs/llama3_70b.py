"""Llama-3 70B at sequence 8192 on 64 chips: ZeRO-3 over 16, times tensor parallelism over 4.

    python -m llmx.train --config configs/llama3_70b.py --config.data.sources="('shards:/data',)"
    python -m llmx.aot --config configs/llama3_70b.py --topology v5p:4x4x4

Between blocks, positions are split over `tensor` too (sequence-parallel norms), so activations are
split 64 ways.
"""

from llmx import config
from llmx.model import families


def get_config() -> config.Config:
    run = config.default()
    run.steps = 100_000
    run.model = families.preset("llama3_70b")
    run.batch.size, run.batch.sequence_length = 64, 8192
    run.mesh.data, run.mesh.fsdp, run.mesh.tensor = 1, 16, 4
    run.sharding.layout = "zero3"
    run.remat = "full"
    run.optimizer.learning_rate, run.optimizer.warmup_steps = 1.5e-4, 2000
    run.optimizer.schedule = "wsd"
    run.guard.on_bad_step, run.guard.spike_factor = "skip", 10.0
    return run
