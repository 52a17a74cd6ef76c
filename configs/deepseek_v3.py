"""DeepSeek-V3 671B at sequence 4096 on 1,024 chips: ZeRO-3 over 32, times experts over 32.

    python -m llmx.train --config configs/deepseek_v3.py --config.data.sources="('shards:/data',)"
    python -m llmx.aot --config configs/deepseek_v3.py --topology v5p:8x8x16

Each device has eight of the 256 experts of a layer. Loads are kept equal by the bias by which
experts are chosen, and by a small loss of each sequence, as published (arXiv 2412.19437).
"""

from llmx import config
from llmx.model import families


def get_config() -> config.Config:
    run = config.default()
    run.steps = 100_000
    run.model = families.preset("deepseek_v3_671b")
    run.experts.bias_rate, run.experts.balance_weight = 1e-3, 1e-4
    run.batch.size, run.batch.sequence_length = 1024, 4096
    run.mesh.data, run.mesh.fsdp, run.mesh.expert = 1, 32, 32
    run.sharding.layout = "zero3"
    run.remat = "full"
    run.optimizer.learning_rate, run.optimizer.warmup_steps = 2.2e-4, 2000
    run.guard.on_bad_step, run.guard.spike_factor = "skip", 10.0
    return run
