"""scripts/bench_memory.py: the share of a forward pass that it shows as recomputed."""

import pathlib

import pytest
from support import runs

from llmx import config

SCRIPTS = pathlib.Path(__file__).parents[2] / "scripts"


@pytest.fixture
def recomputed(monkeypatch):
    """The figure of a run of eight layers."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import bench_memory

    def figure(remat: str, **keys) -> float:
        run = runs.make_config(
            "llama3", model=dict(num_layers=8, vocab_size=500), batch__size=8,
            batch__sequence_length=64, loss__chunks=1, remat=remat, **keys,
        )  # fmt: skip
        return bench_memory.recomputed({"config": config.to_json(run)})

    return figure


def test_what_the_host_keeps_is_not_recomputed(recomputed):
    offloaded = recomputed("full", offload__saves=("gate", "up"))
    assert offloaded == pytest.approx(recomputed("gate+up")) and offloaded < recomputed("full")
    assert recomputed("none") == 0


def test_rules_are_of_each_chunk(recomputed):
    stages = dict(mesh=dict(stage=2), batch__accumulation=4)
    assert recomputed(":4=full,none", **stages) == pytest.approx(recomputed("full"))
    assert recomputed(":4=full,none") == pytest.approx(recomputed("full") / 2)
