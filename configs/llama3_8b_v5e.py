r"""Llama-3 8B at sequence 8192 on eight v5e chips of 16 GB: AdamW's moments in the host's memory.

    python -m llmx.train --config configs/llama3_8b_v5e.py \
        --config.data.sources="('shards:/data/web',)"
    python -m llmx.aot --config configs/llama3_8b_v5e.py --topology v5e:2x4

With offload.optimizer=False the program does not fit. Every step moves 15 GiB of moments over the
host's link, so it takes four microbatches (docs/memory.md).
"""

from llmx import config
from llmx.model import families


def get_config() -> config.Config:
    run = config.default()
    run.steps = 100_000
    run.model = families.preset("llama3_8b")
    run.batch.size, run.batch.sequence_length = 32, 8192
    run.batch.accumulation = 4
    run.mesh.data, run.mesh.fsdp = 1, 8
    run.sharding.layout = "zero3"
    run.remat = "full"
    run.offload.optimizer = True
    run.optimizer.learning_rate, run.optimizer.warmup_steps = 3e-4, 2000
    run.loss.z_loss = 1e-4
    run.guard.on_bad_step, run.guard.spike_factor = "skip", 10.0
    return run
