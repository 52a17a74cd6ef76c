"""The quickstart with sparse tables: rows of the last two and three tokens, beside the embedding.

    python -m llmx.train --config configs/quickstart_ngrams.py
    python -m llmx.evaluate --workdir runs/quickstart_ngrams
    python -m llmx.generate --workdir runs/quickstart_ngrams --prompt "def "
    python -m llmx.aot --config configs/quickstart_ngrams.py --topology v5e:1x1

Two tables have 65,536 rows each, 20 times the parameters of the model; a step reads and updates the
rows of its own tokens. docs/tables.md compares it with the quickstart.
"""

import pathlib
import runpy

from llmx import config

QUICKSTART = pathlib.Path(__file__).with_name("quickstart.py")


def get_config() -> config.Config:
    run = runpy.run_path(str(QUICKSTART))["get_config"]()
    run.workdir = "runs/quickstart_ngrams"
    run.model.ngram_tables = (2, 3)
    run.tables.optimizer, run.tables.learning_rate = "adagrad", 0.1
    return run
