"""Prunes the model of the quickstart to half of its weights, and trains what is left.

    python -m llmx.train --config configs/quickstart.py           # first: the model
    python -m llmx.train --config configs/quickstart_pruned.py
    python -m llmx.generate --workdir runs/quickstart_pruned --prompt "def "
    python -m llmx.aot --config configs/quickstart_pruned.py --topology v5e:1x1

Two of four neighbours instead of any half: --config.pruning.method=n_m with
--config.pruning.end_step=40. Other weights, the same masks (the lottery ticket):
--config.start_from=runs/quickstart@100 --config.pruning.method=fixed
--config.pruning.masks_from=runs/quickstart_pruned --config.pruning.every=10
--config.pruning.end_step=0 --workdir runs/quickstart_ticket. See docs/compression.md.
"""

from llmx import config


def get_config() -> config.Config:
    run = config.default()
    run.start_from = "runs/quickstart"
    run.pruning.method, run.pruning.sparsity = "magnitude", 0.5
    run.pruning.end_step, run.pruning.every = 75, 5
    run.steps, run.precision = 150, "fp32"
    run.batch.size, run.batch.sequence_length = 16, 256
    run.optimizer.learning_rate, run.optimizer.warmup_steps = 3e-3, 10
    run.checkpoint.every, run.metrics.log_every = 50, 5
    return run
