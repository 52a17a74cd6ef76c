"""A Llama of 0.8M parameters learns the text of Python's standard library, byte by byte.

    python -m llmx.train --config configs/quickstart.py
    python -m llmx.aot --config configs/quickstart.py --topology v5e:1x1

About two minutes on two CPU cores give a held-out loss below 1.8 nats per byte, a sampled
continuation, and runs/quickstart/loss.png. If killed, rerun the command; it continues. With
--config.steps=600 a finished run continues too.
"""

from llmx import config
from llmx.model import families


def get_config() -> config.Config:
    run = config.default()
    run.steps = 300
    run.precision = "fp32"
    run.model = families.preset(
        "llama3", width=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, mlp_dim=384,
        max_positions=1024, vocab_multiple=8, tied_head=True,
    )  # fmt: skip
    run.batch.size, run.batch.sequence_length = 16, 256
    run.optimizer.learning_rate, run.optimizer.warmup_steps = 6e-3, 30
    run.checkpoint.every, run.evaluation.every = 100, 100
    run.metrics.log_every = 5
    run.sample.prompt, run.sample.top_p = 'def read_lines(path):\n    """', 1.0
    return run
