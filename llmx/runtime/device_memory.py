"""Bytes of one device and of its host, by `compiled.memory_analysis()` of a program."""

from typing import Any


def host_bytes(sizes: Any) -> int:
    """In the memory of the host, by one device's program: arguments, outputs, temporaries."""
    return (
        sizes.host_argument_size_in_bytes + sizes.host_temp_size_in_bytes
        + sizes.host_output_size_in_bytes - sizes.host_alias_size_in_bytes
    )  # fmt: skip


def device_peak(sizes: Any, platform: str) -> int:
    """The most that the device holds at one time.

    An upper bound where the host holds some, which is in XLA's own figure too, and on CPU, whose
    figure has not all temporaries.
    """
    outputs = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    at_most = sizes.argument_size_in_bytes + outputs + sizes.temp_size_in_bytes
    if host_bytes(sizes) or platform == "cpu":
        return at_most
    return sizes.peak_memory_in_bytes


def limit(device: Any) -> int:
    """What a program may use of a jax device's memory; 0: unknown."""
    return (device.memory_stats() or {}).get("bytes_limit", 0)
