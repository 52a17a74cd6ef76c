"""What the comparisons with transformers share."""

import os

import jax
import pytest

from llmx import sharding
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
