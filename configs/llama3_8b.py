"""Llama-3 8B at sequence 8192 with ZeRO-3 over one fast network: eight v5p chips or eight H100s.

    python -m llmx.train --config configs/llama3_8b.py --config.data.sources="('shards:/data/web',)"
    python -m llmx.aot --config configs/llama3_8b.py --topology v5p:2x2x2
    python -m llmx.aot --config configs/llama3_8b.py --topology h100:8

Parameters and AdamW moments are fp32, gradients bf16, all split eight ways. Weights are gathered
layer by layer, in bf16.
"""

from llmx import config
from llmx.model import families


def get_config() -> config.Config:
    run = config.default()
    run.steps = 100_000
    run.model = families.preset("llama3_8b")
    run.batch.size, run.batch.sequence_length = 8, 8192
    run.mesh.data, run.mesh.fsdp = 1, 8
    run.sharding.layout = "zero3"
    run.remat = "full"
    run.optimizer.learning_rate, run.optimizer.warmup_steps = 3e-4, 2000
    run.loss.z_loss = 1e-4
    run.guard.on_bad_step, run.guard.spike_factor = "skip", 10.0
    return run
