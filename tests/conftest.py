"""Eight fake CPU devices for every test."""

import os
from importlib.metadata import version

os.environ["XLA_FLAGS"] = " ".join([
    os.environ.get("XLA_FLAGS", ""),
    # Collectives of eight fake devices on few cores can time out under the default scheduler.
    "--xla_cpu_enable_concurrency_optimized_scheduler=false",
    "--xla_backend_optimization_level=0",  # compiles in half the time
    # And in half of that; jax 0.12 no longer knows the flag.
    *(["--xla_cpu_use_fusion_emitters=false"] if version("jax").startswith("0.10.") else []),
])  # fmt: skip
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_num_cpu_devices", 8)
# Tests look at what is compiled, so nothing may come from an earlier run's cache.
jax.config.update("jax_enable_compilation_cache", False)


def pytest_addoption(parser):
    parser.addoption(
        "--full-grid",
        action="store_true",
        help="also run cases that are left out, as others cover them: parity of every mesh x "
        "layout x family x schedule, instead of a cover of all pairs; other tests with every "
        "strategy, format and machine",
    )


def pytest_collection_modifyitems(config, items):
    if config.getoption("--full-grid"):
        return
    left = [item for item in items if item.get_closest_marker("full_grid")]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]
