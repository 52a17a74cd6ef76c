"""gpt-oss 20B continued at sequence 8192 on 64 chips: ZeRO-3 over 16, times experts over 4.

    python -m llmx.convert --workdir runs/gpt-oss --from-hf gpt-oss-20b/
    python -m llmx.train --config configs/gpt_oss_20b.py --config.start_from=runs/gpt-oss \\
        --config.data.sources="('shards:/data',)"
    python -m llmx.aot --config configs/gpt_oss_20b.py --topology v5p:4x4x4

A token goes to 4 of a layer's 32 experts, of which each device has 8.
"""

from llmx import config
from llmx.model import families


def get_config() -> config.Config:
    run = config.default()
    run.steps = 10_000
    run.model = families.preset("gpt_oss_20b")
    run.experts.balance, run.experts.balance_weight = "batch", 0.001
    run.batch.size, run.batch.sequence_length = 64, 8192
    run.mesh.data, run.mesh.fsdp, run.mesh.expert = 1, 16, 4
    run.sharding.layout = "zero3"
    run.remat = "full"
    run.optimizer.learning_rate, run.optimizer.warmup_steps = 2e-5, 200
    run.guard.on_bad_step, run.guard.spike_factor = "skip", 10.0
    return run
