"""What tests of checkpoints share: the comparisons with transformers, and files of ours."""

import os

import jax
import pytest
from support import hf_checkpoints

from llmx import sharding
from llmx.checkpoint import hf
from llmx.model import execution, precision


@pytest.fixture(scope="module")
def transformers():
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["HF_HUB_OFFLINE"] = "1"
    pytest.importorskip("torch", reason="the models of transformers are in torch: extra `hf`")
    return pytest.importorskip("transformers", reason="what llmx is compared with: extra `hf`")


@pytest.fixture(scope="module")
def run():
    mesh = sharding.make_mesh(dict.fromkeys(sharding.AXES, 1), devices=jax.devices()[:1])
    place = sharding.Placement(mesh, sharding.LAYOUTS["ddp"])
    return execution.Execution(place=place, policy=precision.POLICIES["fp32"])


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A checkpoint of each family, of its `hf_checkpoints.random_params`."""
    made = {}

    def make(family: str, dtype: str = "float32"):
        if (family, dtype) not in made:
            model, params = hf_checkpoints.random_params(family)
            folder = tmp_path_factory.mktemp(family) / "hf"
            made[family, dtype] = hf.export(params, model, folder, dtype=dtype, shard_bytes=30_000)
        return made[family, dtype]

    return make
