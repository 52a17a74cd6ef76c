"""One dial: depth. Width, heads, batch, learning rate and token budget follow from it.

    python -m llmx.train --config configs/scaling.py:6
    python -m llmx.aot --config configs/scaling.py --topology v5e:2x2

The number behind the colon is the depth L. The width is 64 L, the head size 64, the budget 20
tokens per parameter (Chinchilla, arXiv 2203.15556), and the learning rate falls as one over the
square root of the width. Depth 2 takes minutes on a laptop.
"""

from llmx import config
from llmx.model import costs, families


def get_config(depth: str = "4") -> config.Config:
    run = config.default()
    L = int(depth)
    run.model = families.preset(
        "llama3", num_layers=L, width=64 * L, num_heads=L, num_kv_heads=L, head_dim=64,
        mlp_dim=192 * L, vocab_size=257, max_positions=2048, tied_head=True,
    )  # fmt: skip
    run.workdir = f"runs/scaling_{L}"
    run.batch.size, run.batch.sequence_length = 8 * L, 512
    tokens = 20 * costs.num_parameters(run.model)
    run.steps = max(100, tokens // (run.batch.size * run.batch.sequence_length))
    run.optimizer.learning_rate = 0.05 / (64 * L) ** 0.5
    run.optimizer.warmup_steps = run.steps // 20
    run.evaluation.every = run.checkpoint.every = max(50, run.steps // 10)
    run.sample.prompt = "import os\n\n\ndef "
    return run
