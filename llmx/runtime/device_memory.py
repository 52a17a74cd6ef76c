"""Bytes of one device and of its host, by `compiled.memory_analysis()` of a program."""

from typing import Any


def host_bytes(sizes: Any) -> int:
    """In the memory of the host, by one device's program: arguments, outputs, temporaries."""
    return (
        sizes.host_argument_size_in_bytes + sizes.host_temp_size_in_bytes
        + sizes.host_output_size_in_bytes - sizes.host_alias_size_in_bytes
    )  # fmt: skip


def device_peak(sizes: Any) -> int:
    """The most that the device holds at one time; more than that where the host holds some, of
    which XLA's own figure is the sum."""
    if not host_bytes(sizes):
        return sizes.peak_memory_in_bytes
    outputs = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return sizes.argument_size_in_bytes + outputs + sizes.temp_size_in_bytes
