"""Trains the model of the quickstart on as integers: weights of 4 bits, with learned scales.

    python -m llmx.train --config configs/quickstart.py           # first: the model
    python -m llmx.train --config configs/quickstart_qat.py
    python -m llmx.generate --workdir runs/quickstart_qat --prompt "def read" --kv-cache int8
    python -m llmx.aot --config configs/quickstart_qat.py --topology v5e:1x1

Evaluations, samples and exports are of the rounded weights. Inputs of products are rounded to 8
bits too with --config.quantization.activations=average.
"""

from llmx import config


def get_config() -> config.Config:
    run = config.default()
    run.start_from = "runs/quickstart"
    run.quantization.bits, run.quantization.scales = 4, "learned"
    run.steps, run.precision = 150, "fp32"
    run.batch.size, run.batch.sequence_length = 16, 256
    run.optimizer.learning_rate, run.optimizer.warmup_steps = 3e-3, 10
    run.checkpoint.every, run.evaluation.every = 50, 50
    run.metrics.log_every = 5
    run.sample.prompt, run.sample.top_p, run.sample.kv_cache = "def read_lines(path):", 1.0, "int8"
    return run
