r"""Llama-3 70B at sequence 8192 on 64 chips: four pipeline stages, ZeRO-3 over 16 in each.

    python -m llmx.train --config configs/llama3_70b_pipeline.py \
        --config.data.sources="('shards:/data',)"
    python -m llmx.plan --config configs/llama3_70b_pipeline.py --chip v5p
    python -m llmx.aot --config configs/llama3_70b_pipeline.py --topology v5p:4x4x4

Compared with configs/llama3_70b.py, no products are split over `tensor`: a stage's weights are
gathered within its 16 chips, and between stages only activations travel. Each of the 4 microbatches
has one row for each of the 16 chips, so more microbatches (a smaller bubble) need a larger batch.
"""

from llmx import config
from llmx.model import families


def get_config() -> config.Config:
    run = config.default()
    run.steps = 100_000
    run.model = families.preset("llama3_70b")
    run.batch.size, run.batch.sequence_length, run.batch.accumulation = 64, 8192, 4
    run.mesh.stage, run.mesh.data, run.mesh.fsdp = 4, 1, 16
    run.pipeline.schedule = "1f1b"
    run.sharding.layout = "zero3"
    run.remat = "full"
    run.optimizer.learning_rate, run.optimizer.warmup_steps = 1.5e-4, 2000
    run.optimizer.schedule = "wsd"
    run.guard.on_bad_step, run.guard.spike_factor = "skip", 10.0
    return run
