"""Eight fake CPU devices for every test."""

import os

# Collectives of eight fake devices on few cores can time out under the default scheduler.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_cpu_enable_concurrency_optimized_scheduler=false"
    + " --xla_backend_optimization_level=0"  # compiles in half the time
)
# XLA:CPU's threads. A collective that waits takes one, and several may wait on each device.
os.environ["NPROC"] = "64"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_num_cpu_devices", 8)
# Tests look at what is compiled, so nothing may come from an earlier run's cache.
jax.config.update("jax_enable_compilation_cache", False)
