"""The DLRM of dlrm.py with its rows in host memory: devices have a cache of those that are in use.

    python -m llmx.train --config configs/dlrm_host.py
    python -m llmx.train --config configs/dlrm_host.py --config.launch.cpu_devices=4

The devices hold 49,152 of 2.7 million rows, and the host at most some 220,000: others are made when
they are named, and forgotten when they were not named for long. For ids without a bound, such as
raw ids of Parquet or texts, name files in data.sources and add --config.data.records.ids=exact.
docs/tables.md says how it works.
"""

import pathlib
import runpy

from llmx import config

DLRM = pathlib.Path(__file__).with_name("dlrm.py")


def get_config() -> config.Config:
    run = runpy.run_path(str(DLRM))["get_config"]()
    run.tables.cache_rows = 49_152
    run.tables.host_gib = 0.02
    return run
