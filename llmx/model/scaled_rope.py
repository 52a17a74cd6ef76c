"""What does not fit together in the scalings of rotary positions: pure data, no jax."""

from collections.abc import Iterator
from typing import Any


def problems(model: Any) -> Iterator[str]:
    """All problems of `rope_scaling`, each with its remedy."""
    if model.positions != "rope":
        return
    low, high = model.rope_low_freq, model.rope_high_freq
    if model.rope_scaling == "llama3" and low >= high:
        yield (
            f"model.rope_low_freq={low:g} is not below model.rope_high_freq={high:g}: pairs "
            "between the two are blended; use 1 and 4, or those that the model was trained with"
        )
    slow, fast = model.rope_beta_slow, model.rope_beta_fast
    if model.rope_scaling == "yarn" and slow > fast:
        yield (
            f"model.rope_beta_slow={slow:g} is above model.rope_beta_fast={fast:g}: pairs between "
            "the two are blended; use 1 and 32, or those that the model was trained with"
        )
    if model.rope_scaling == "yarn" and model.rope_theta == 1:
        yield (
            "model.rope_theta=1 with model.rope_scaling='yarn': all pairs turn alike, and none "
            "lies between others; use a base above 1"
        )
