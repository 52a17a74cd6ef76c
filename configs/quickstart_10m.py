"""The quickstart with a model of 10M parameters: minutes on a GPU, half an hour on two CPU cores.

    python -m llmx.train --config configs/quickstart_10m.py
    python -m llmx.aot --config configs/quickstart_10m.py --topology v5e:1x1

The same text and number of steps. docs/compression.md makes it smaller.
"""

import pathlib
import runpy

from llmx import config
from llmx.model import families

QUICKSTART = pathlib.Path(__file__).with_name("quickstart.py")


def get_config() -> config.Config:
    run = runpy.run_path(str(QUICKSTART))["get_config"]()
    run.model = families.preset(
        "llama3", width=384, num_layers=6, num_heads=6, num_kv_heads=2, head_dim=64, mlp_dim=1024,
        max_positions=1024, vocab_multiple=8, tied_head=True,
    )  # fmt: skip
    run.workdir = "runs/quickstart_10m"
    run.optimizer.learning_rate = 2e-3
    return run
