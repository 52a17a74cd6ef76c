r"""Llama-3 405B on 4,096 v5p chips: HSDP, two replicas of ZeRO-3 over 256, times tensor over 8.

    python -m llmx.train --config configs/llama3_405b.py --config.data.sources="('shards:/data',)"
    python -m llmx.aot --config configs/llama3_405b.py --topology v5p:16x16x16
    python -m llmx.aot --config configs/llama3_405b.py --config.mesh.data=1 \
        --config.mesh.fsdp=512 --config.mesh.tensor=1 --topology v5p:8x8x8

Weights are gathered and gradients scattered within 256 chips; between the two replicas only the
gradients' shares travel. The third line is ZeRO-3 alone, on 512 chips, where a chip holds 52.2 GiB:
26.8 with --config.remat=sqrt, as much with --config.offload.saves="('input',)" (docs/memory.md).
"""

from llmx import config
from llmx.model import families


def get_config() -> config.Config:
    run = config.default()
    run.steps = 100_000
    run.model = families.preset("llama3_405b")
    run.batch.size, run.batch.sequence_length = 512, 8192
    run.mesh.data, run.mesh.fsdp, run.mesh.tensor = 2, 256, 8
    run.sharding.layout = "hsdp"
    run.remat = "full"
    run.optimizer.learning_rate, run.optimizer.warmup_steps = 8e-5, 8000
    run.guard.on_bad_step, run.guard.spike_factor = "skip", 10.0
    return run
