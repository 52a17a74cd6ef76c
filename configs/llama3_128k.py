"""Llama-3 8B on rows of 131,072 tokens, split over sixteen v5p chips as one zigzag ring.

    python -m llmx.train --config configs/llama3_128k.py --config.data.sources="('shards:/web',)"
    python -m llmx.aot --config configs/llama3_128k.py --topology v5p:2x2x4

Each chip holds 8,192 tokens of a row and a sixteenth of the state; keys and values travel around
the ring (docs/long_context.md). Inputs and results of attention are saved for the backward pass, so
that the ring turns once per pass. Positions are stretched sixteenfold over the base model's 8,192.
"""

from llmx import config
from llmx.model import families


def get_config() -> config.Config:
    run = config.default()
    run.steps = 10_000
    run.model = families.preset(
        "llama3_8b", max_positions=131072, rope_scaling="llama3", rope_factor=16.0,
        rope_low_freq=1.0, rope_high_freq=4.0, rope_old_context=8192,
    )  # fmt: skip
    run.batch.size, run.batch.sequence_length, run.batch.accumulation = 8, 131072, 8
    run.mesh.data, run.mesh.sequence = 1, 16
    run.sharding.layout = "zero3"
    run.remat = "names"
    run.optimizer.learning_rate, run.optimizer.warmup_steps = 3e-5, 500
    run.guard.on_bad_step, run.guard.spike_factor = "skip", 10.0
    return run
