"""A DLRM learns who clicks, of records that are generated with a law of their own.

    python -m llmx.train --config configs/dlrm.py
    python -m llmx.train --config configs/dlrm.py --config.launch.cpu_devices=4 --config.mesh.data=4

Records have 13 numbers and 26 ids, as Criteo's display advertising challenge: name its files in
data.sources to train on them. Rows of the tables are split over the devices of the batch.
docs/tables.md says how, and what the measures mean.
"""

import dataclasses

from llmx import config


def get_config() -> config.Config:
    run = config.default()
    run.model.recommender = dataclasses.replace(
        run.model.recommender, name="dlrm", width=16, bottom=(64, 16), top=(128, 64)
    )
    run.data.format, run.data.sources = "records", ("generated:300000",)
    run.precision = "fp32"
    run.batch.size, run.batch.sequence_length = 1024, 1
    run.steps = 270  # an epoch
    run.optimizer.learning_rate, run.optimizer.warmup_steps = 2e-3, 20
    run.optimizer.weight_decay = 0.0
    run.tables.learning_rate = 0.05
    run.evaluation.every, run.evaluation.batches = 90, 0
    run.checkpoint.every = 90
    run.metrics.log_every = 10
    return run
