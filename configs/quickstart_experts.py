r"""The quickstart as a mixture of experts: eight in each layer, of which a token goes through two.

    python -m llmx.train --config configs/quickstart_experts.py
    python -m llmx.train --config configs/quickstart_experts.py --config.launch.cpu_devices=4 \
        --config.mesh.data=1 --config.mesh.expert=4
    python -m llmx.aot --config configs/quickstart_experts.py --topology v5e:1x1

As many FLOPs for each token as in configs/quickstart.py, and a held-out loss that is more than 2%
lower. The bias by which experts are chosen keeps their loads equal, with a tenth of the usual
balance loss: by the bias alone, and in larger steps, loads swing between two experts.
"""

from llmx import config
from llmx.model import families


def get_config() -> config.Config:
    run = config.default()
    run.steps = 300
    run.precision = "fp32"
    run.model = families.preset(
        "mixtral", width=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32,
        expert_dim=192, num_experts=8, experts_per_token=2, max_positions=1024, vocab_multiple=8,
        tied_head=True, vocab_size=0,
    )  # fmt: skip
    run.experts.balance_weight, run.experts.bias_rate = 0.001, 0.003
    run.batch.size, run.batch.sequence_length = 16, 256
    run.optimizer.learning_rate, run.optimizer.warmup_steps = 6e-3, 30
    run.checkpoint.every, run.evaluation.every = 100, 100
    run.metrics.log_every = 5
    run.sample.prompt, run.sample.top_p = 'def read_lines(path):\n    """', 1.0
    return run
