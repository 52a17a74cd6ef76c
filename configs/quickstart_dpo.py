"""Makes the model of quickstart_chat prefer short answers, by DPO on twelve pairs.

    python -m llmx.train --config configs/quickstart_chat.py      # first: the model
    python -m llmx.train --config configs/quickstart_dpo.py
    python -m llmx.generate --workdir runs/quickstart_dpo --chat --temperature 0
    python -m llmx.data --preview --source configs/quickstart_dpo.jsonl --format preference \
        --chat-template configs/quickstart_chat.jinja
    python -m llmx.aot --config configs/quickstart_dpo.py --topology v5e:1x1

Adapters are trained, so that the reference is the frozen model beside them. Without adapters
(--config.adapters.rank=0) all parameters are, and the reference is a copy of the first ones.
"""

import pathlib

from llmx import config

HERE = pathlib.Path(__file__).parent


def get_config() -> config.Config:
    run = config.default()
    run.start_from = "runs/quickstart_chat"
    run.adapters.rank, run.preference.chosen_weight = 8, 1.0
    run.steps, run.precision = 60, "fp32"
    run.batch.size, run.batch.sequence_length, run.data.pack = 12, 256, False
    run.data.sources, run.data.format = (str(HERE / "quickstart_dpo.jsonl"),), "preference"
    run.data.chat_template, run.data.held_out = str(HERE / "quickstart_chat.jinja"), 0.0
    run.optimizer.learning_rate, run.optimizer.warmup_steps = 6e-4, 5
    run.checkpoint.every, run.metrics.log_every = 20, 5
    return run
