"""Bytes of one device and of its host, by `compiled.memory_analysis()` of a program."""

import re
from typing import Any, NamedTuple


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


class OutOfMemory(NamedTuple):
    """What XLA:TPU reports of a program that does not fit, in bytes of one device."""

    needed: int
    available: int


_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_AMOUNT = r"([\d.]+[KMGTB]?)"


def parse_out_of_memory(text: str) -> OutOfMemory | None:
    """The two amounts in a compiler's message; None: it is not about HBM.

    A program without room in vector memory is not: there a kernel's blocks are too large.
    """
    for pattern in (
        rf"HLO temporaries \({_AMOUNT}\) exceeds available HBM \({_AMOUNT}\)",
        rf"Ran out of memory in memory space hbm. Used {_AMOUNT} of {_AMOUNT} hbm",
    ):
        if "RESOURCE_EXHAUSTED" in text and (match := re.search(pattern, text)):
            numbers = [float(amount.rstrip("KMGTB")) for amount in match.groups()]
            units = [_UNITS[amount.lstrip("0123456789.")] for amount in match.groups()]
            return OutOfMemory(*(int(n * unit) for n, unit in zip(numbers, units, strict=True)))
    return None
