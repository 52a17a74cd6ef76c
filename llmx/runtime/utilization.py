"""Shares of the peak FLOP/s that a run reaches: three figures, named alike in every command.

- `mfu`: model FLOPs of causal attention, without the scores that mask and window hide;
- `mfu_full`: model FLOPs with all scores, T keys for each query;
- `hfu`: as `mfu`, and the forward pass that remat and the chunked loss repeat.

`llmx.model.conventions` counts the FLOPs and says what each leaves out. Beside factors of 8 bits,
`mfu_of_bfloat16` has the MFU as a share of the bfloat16 peak, to compare with runs in bfloat16.
"""

import dataclasses
from collections.abc import Mapping

from llmx.runtime.hardware import Chip

_BESIDE = {"mfu_full": "full", "hfu": "HFU", "mfu_of_bfloat16": "of bfloat16's peak"}


@dataclasses.dataclass(frozen=True)
class Utilization:
    """Turns the tokens/s of a run into shares of the peak of its devices."""

    flops_per_token: Mapping[str, float]  # by figure, forward and backward
    chip: Chip
    dtype: str  # numpy's name of the type that products take
    num_devices: int

    def shares(self, tokens_per_second: float) -> dict[str, float]:
        """By figure, for tokens/s of all devices."""
        peak, _ = self.chip.peak(self.dtype)
        bfloat16 = self.chip.device_flops("bfloat16")
        rate = tokens_per_second / self.num_devices
        found = {name: rate * flops / peak for name, flops in self.flops_per_token.items()}
        if peak > bfloat16:
            found["mfu_of_bfloat16"] = found["mfu"] * peak / bfloat16
        return found

    def peak_text(self) -> str:
        """What the shares are of."""
        peak, dtype = self.chip.peak(self.dtype)
        return f"{self.num_devices} x {peak / 1e12:g} TFLOP/s in {dtype} ({self.chip.name})"


def text(shares: Mapping[str, float]) -> str:
    """Those of the figures that there are: "MFU 40.1% (full 45.2%, HFU 53.0%)"; "" without."""
    if "mfu" not in shares:
        return ""
    beside = [f"{name} {shares[key]:.1%}" for key, name in _BESIDE.items() if key in shares]
    return f"MFU {shares['mfu']:.1%}" + (f" ({', '.join(beside)})" if beside else "")
