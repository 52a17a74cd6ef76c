"""Gemma-3 1B: five sliding-window layers to one global, on two slices of four devices (HSDP).

    python -m llmx.train --config configs/gemma3_1b.py --config.data.sources="('shards:/data/web',)"
    python -m llmx.aot --config configs/gemma3_1b.py --topology 2@v5e:2x2

Within a slice, parameters are split over `fsdp`; between slices only gradients travel. The loss
computes the logits of the 262,144 words in chunks.
"""

from llmx import config
from llmx.model import families


def get_config() -> config.Config:
    run = config.default()
    run.steps = 50_000
    run.model = families.preset("gemma3_1b")
    run.batch.size, run.batch.sequence_length = 64, 2048
    run.mesh.data, run.mesh.fsdp = 2, 4
    run.mesh.across_slices = ("data",)
    run.sharding.layout = "hsdp"
    run.remat = "full"
    run.optimizer.name, run.optimizer.learning_rate = "muon", 1e-3
    run.optimizer.ema_decay = 0.999
    return run
