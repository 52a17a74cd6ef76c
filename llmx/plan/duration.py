"""How long a training run takes and what it costs, failures included.

A run writes a checkpoint every `interval` seconds of work, for `save` seconds in which it does not
train. Failures come at random, on average one in `mtbf` seconds. After one the job needs `restart`
seconds and does again what it did since its last checkpoint. Then, for any interval (Daly, "A
higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 2006, eq. 13),

    goodput = interval / (mtbf e^(restart / mtbf) (e^((interval + save) / mtbf) - 1))

is the share of time in which it does what it keeps. The best interval is about sqrt(2 save mtbf)
(Young, CACM 1974), with Daly's correction where failures are frequent (eq. 37).
"""

import dataclasses
import math

from llmx.runtime.hardware import Chip

# Llama 3 (arXiv 2407.21783, 3.3.4): 419 unexpected interruptions in 54 days of 16,384 GPUs.
DEVICE_HOURS_PER_FAILURE = 54 * 24 * 16_384 / 419
NEVER = 1e-6  # goodput
SAVE_SECONDS, RESTART_SECONDS = 10.0, 600.0


def best_interval(save: float, mtbf: float) -> float:
    """Seconds of work between checkpoints with the best goodput: Daly's estimate.

    Raises ValueError unless both are above 0.
    """
    _check(save=save, mtbf=mtbf)
    if save >= 2 * mtbf:
        return mtbf
    ratio = save / (2 * mtbf)
    return math.sqrt(2 * save * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save


def goodput(interval: float, *, save: float, restart: float, mtbf: float) -> float:
    """The share of time in which a run does what it keeps.

    Raises ValueError unless all are above 0; `restart` may be 0.
    """
    _check(interval=interval, save=save, mtbf=mtbf)
    if not (restart >= 0 and math.isfinite(restart)):
        raise ValueError(f"restart={restart:g} must be at least 0 seconds")
    exponent = (interval + save) / mtbf
    if exponent + restart / mtbf > 700:  # beyond what a float holds
        return 0.0
    return interval / (mtbf * math.exp(restart / mtbf) * math.expm1(exponent))


def _check(**values: float) -> None:
    for name, value in values.items():
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name}={value:g} must be above 0 seconds")


@dataclasses.dataclass(frozen=True)
class Duration:
    """A whole run."""

    tokens: float
    steps: int
    seconds: float  # with failures
    goodput: float
    interval: int  # steps between checkpoints
    failures: float  # expected
    device_hours: float
    dollars: float | None  # None: no price was given
    kilowatt_hours: float | None  # of the chips, at their rated power; None: not published


def of(
    tokens: float, tokens_per_step: int, step_seconds: float, num_devices: int, chip: Chip, *,
    device_hours_per_failure: float = DEVICE_HOURS_PER_FAILURE, save: float = SAVE_SECONDS,
    restart: float = RESTART_SECONDS, price: float | None = None,
) -> Duration:  # fmt: skip
    """A run of `tokens`, with checkpoints as often as is best.

    Args:
      step_seconds: of a step without checkpoints and failures.
      num_devices: jax devices, of which `chip` may have two.
      device_hours_per_failure: of one device, until it stops the job.
      save, restart: seconds in which the job does not train.
      price: dollars for an hour of a chip.

    Raises ValueError for what is not above 0, and for a job that never gets anywhere.
    """
    _check(tokens=tokens, step_seconds=step_seconds)
    if not device_hours_per_failure > 0:
        raise ValueError(f"device_hours_per_failure={device_hours_per_failure:g} must be above 0")
    if price is not None and not price >= 0:
        raise ValueError(f"price={price:g} must be at least 0 dollars")
    mtbf = device_hours_per_failure * 3600 / num_devices
    interval = max(1, round(best_interval(save, mtbf) / step_seconds))
    share = goodput(interval * step_seconds, save=save, restart=restart, mtbf=mtbf)
    if share < NEVER:
        raise ValueError(
            f"with a failure every {mtbf:.3g} s and a restart of {restart:g} s the job fails "
            "before it has done anything: use fewer devices, or shorter saves and restarts"
        )
    steps = math.ceil(tokens / tokens_per_step)
    seconds = steps * step_seconds / share
    hours = seconds / 3600 * num_devices
    chip_hours = hours / chip.devices_per_chip
    return Duration(
        tokens, steps, seconds, share, interval, failures=seconds / mtbf, device_hours=hours,
        dollars=None if price is None else price * chip_hours,
        kilowatt_hours=None if chip.watts is None else chip.watts * chip_hours / 1000,
    )  # fmt: skip
