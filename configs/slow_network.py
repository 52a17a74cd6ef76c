r"""The quickstart's model on four replicas that exchange one bit per number: 1-bit Adam.

    python -m llmx.train --config configs/slow_network.py --config.launch.cpu_devices=4
    python -m llmx.train --config configs/slow_network.py --config.launch.cpu_devices=4 \
        --config.sync.strategy=mean --config.sync.warmup_steps=0 --workdir runs/slow_network_mean
    python -m llmx.aot --config configs/slow_network.py --topology v5e:2x2

The replicas are four devices, here fake ones of a CPU. They average their gradients for 180 steps,
15% of the run, and then exchange momentum as signs and scales: 1/32 of the bytes of a mean in
fp32. The log names both programs. The second command is the run to compare the loss with: both end
at a held-out loss of about 1.41 nats per byte. Other strategies: docs/slow_networks.md.
"""

from llmx import config
from llmx.model import families


def get_config() -> config.Config:
    run = config.default()
    run.steps = 1200
    run.precision = "fp32"
    run.model = families.preset(
        "llama3", width=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, mlp_dim=384,
        max_positions=1024, vocab_multiple=8, tied_head=True,
    )  # fmt: skip
    run.batch.size, run.batch.sequence_length = 8, 128
    run.mesh.data = 4
    run.sync.strategy, run.sync.warmup_steps = "one_bit", 180
    run.optimizer.learning_rate, run.optimizer.warmup_steps = 2e-3, 60
    run.optimizer.clip_norm = 1.0
    run.checkpoint.every, run.evaluation.every = 400, 400
    run.metrics.log_every = 25
    return run
