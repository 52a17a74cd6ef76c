"""Eight fake CPU devices for every test; how XLA compiles for them; which tests run."""

import gc
import os
from importlib.metadata import version

os.environ["XLA_FLAGS"] = " ".join([
    os.environ.get("XLA_FLAGS", ""),
    # Collectives of eight fake devices on few cores can time out under the default scheduler.
    "--xla_cpu_enable_concurrency_optimized_scheduler=false",
    "--xla_backend_optimization_level=0",  # compiles in half the time
    "--xla_cpu_parallel_codegen_split_count=1",  # a tenth less; by default a program is 32 modules
    # And in half of that; jax 0.12 no longer knows the flag.
    *(["--xla_cpu_use_fusion_emitters=false"] if version("jax").startswith("0.10.") else []),
])  # fmt: skip
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# All of Python's frames in every operation were a tenth of the time of tracing and compiling.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "1")

import jax
import pytest
from support import tiers

jax.config.update("jax_num_cpu_devices", 8)
# Traced programs are many small objects that live long: looking for garbage among them took 3 to
# 6% of the time. What is imported so far is never garbage.
gc.freeze()
gc.set_threshold(50_000, 10, 10)
# Tests look at what is compiled, so nothing may come from an earlier run's cache.
jax.config.update("jax_enable_compilation_cache", False)


def pytest_addoption(parser):
    parser.addoption(
        "--full-grid",
        action="store_true",
        help="also run cases that are left out, as others cover them: the last rows of parity's "
        "cover of pairs; other tests with every strategy, format and machine, and those of "
        "tests/slow_cases.txt",
    )
    parser.addoption(
        "--every-mesh",
        action="store_true",
        help="parity of every mesh x layout x family x schedule, instead of a cover of all pairs",
    )
    parser.addoption("--measure", metavar="FILE", help="append the CPU seconds of each test")


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(config, items):
    tiers.group_by_file(items)
    without_a_test = tiers.mark_listed(items)
    if config.args == config.getini("testpaths"):
        config.stash[tiers.WITHOUT_A_TEST] = without_a_test
    if config.getoption("--full-grid"):
        return
    left = [item for item in items if item.get_closest_marker("full_grid")]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    begun = tiers.cpu_seconds()
    result = yield
    if path := item.config.getoption("--measure"):
        with open(path, "a") as file:
            file.write(f"{tiers.cpu_seconds() - begun:.2f}\t{item.nodeid}\n")
    return result
