"""A model of a quarter of quickstart's parameters learns from quickstart's, and from its text.

    python -m llmx.train --config configs/quickstart.py           # first: the teacher
    python -m llmx.train --config configs/quickstart_distill.py
    python -m llmx.aot --config configs/quickstart_distill.py --topology v5e:1x1

The same student alone: --config.distillation.teacher= --workdir runs/student_alone.
docs/compression.md compares the two.
"""

from llmx import config
from llmx.model import families


def get_config() -> config.Config:
    run = config.default()
    run.distillation.teacher = "runs/quickstart"
    run.steps, run.precision = 300, "fp32"
    run.model = families.preset(
        "llama3", width=64, num_layers=4, num_heads=2, num_kv_heads=1, head_dim=32, mlp_dim=176,
        max_positions=1024, vocab_multiple=8, tied_head=True,
    )  # fmt: skip
    run.batch.size, run.batch.sequence_length = 16, 256
    run.optimizer.learning_rate, run.optimizer.warmup_steps = 6e-3, 30
    run.checkpoint.every, run.evaluation.every = 100, 100
    run.metrics.log_every = 5
    run.sample.prompt, run.sample.top_p = 'def read_lines(path):\n    """', 1.0
    return run
