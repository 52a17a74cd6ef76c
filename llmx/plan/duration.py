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
DEVICE_MTBF = 54 * 24 * 16_384 / 419
NEVER, MOST_TOKENS = 1e-6, 1e18  # goodput; tokens
MOST_DOLLARS = 1e6  # of a chip and hour
SAVE_SECONDS, RESTART_SECONDS = 10.0, 600.0


def best_interval(save: float, mtbf: float) -> float:
    """Seconds of work between checkpoints with the best goodput: Daly's estimate.

    Raises ValueError unless both are above 0 and finite.
    """
    _check("seconds", save=save, mtbf=mtbf)
    if save >= 2 * mtbf:
        return mtbf
    ratio = save / (2 * mtbf)
    return math.sqrt(2 * save * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save


def goodput(interval: float, *, save: float, restart: float, mtbf: float) -> float:
    """The share of time in which a run does what it keeps.

    Raises ValueError unless all are above 0 and finite; `restart` may be 0.
    """
    _check("seconds", interval=interval, save=save, mtbf=mtbf)
    if restart:
        _check("seconds", restart=restart)
    exponent = (interval + save) / mtbf
    if exponent + restart / mtbf > 700:  # beyond what a float holds
        return 0.0
    return interval / (mtbf * math.exp(restart / mtbf) * math.expm1(exponent))


def _check(unit: str, **values: float) -> None:
    for name, value in values.items():
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name}={value:g} must be a number of {unit} above 0")


def check(
    *, tokens: float = 1.0, step_seconds: float = 1.0, device_mtbf: float = DEVICE_MTBF,
    save_seconds: float = SAVE_SECONDS, restart_seconds: float = RESTART_SECONDS,
    price: float | None = None,
) -> None:  # fmt: skip
    """Raises ValueError for a value that no run can have; arguments as of `of`."""
    _check("tokens", tokens=tokens)
    if tokens > MOST_TOKENS:
        raise ValueError(f"tokens={tokens:g} must be at most {MOST_TOKENS:g}")
    _check("seconds", step_seconds=step_seconds, save_seconds=save_seconds)
    if restart_seconds:
        _check("seconds", restart_seconds=restart_seconds)
    _check("hours", device_mtbf=device_mtbf)
    if price is not None and not 0 <= price <= MOST_DOLLARS:
        raise ValueError(
            f"price={price:g} must be a number of dollars of a chip and hour, at least 0 and at "
            f"most {MOST_DOLLARS:g}"
        )


@dataclasses.dataclass(frozen=True)
class Duration:
    """A whole run."""

    tokens: float
    steps: int
    seconds: float  # with failures
    goodput: float
    interval: int  # steps between checkpoints; at most those of the run
    failures: float  # expected
    device_hours: float
    dollars: float | None  # None: no price was given
    kilowatt_hours: float | None  # of the chips, at their rated power; None: not published


def of(
    tokens: float, tokens_per_step: int, step_seconds: float, num_devices: int, chip: Chip, *,
    every: int = 0, device_mtbf: float = DEVICE_MTBF, save_seconds: float = SAVE_SECONDS,
    restart_seconds: float = RESTART_SECONDS, price: float | None = None,
) -> Duration:  # fmt: skip
    """A run of `tokens`.

    Args:
      step_seconds: of a step without checkpoints and failures.
      num_devices: jax devices, of which `chip` may have two.
      every: steps between checkpoints; 0 = as many as is best.
      device_mtbf: hours until a device stops the job, on average.
      save_seconds, restart_seconds: in which the job does not train.
      price: dollars for an hour of a chip.

    Raises ValueError for what `check` refuses, and for a job that never gets anywhere.
    """
    check(
        tokens=tokens, step_seconds=step_seconds, device_mtbf=device_mtbf,
        save_seconds=save_seconds, restart_seconds=restart_seconds, price=price,
    )  # fmt: skip
    mtbf, steps = device_mtbf * 3600 / num_devices, math.ceil(tokens / tokens_per_step)
    interval = every or max(1, round(best_interval(save_seconds, mtbf) / step_seconds))
    interval = min(interval, steps)
    share = goodput(interval * step_seconds, save=save_seconds, restart=restart_seconds, mtbf=mtbf)
    if share < NEVER:
        raise ValueError(
            f"with a failure every {mtbf:.3g} s, {interval:,} steps of {step_seconds:g} s, a save "
            f"of {save_seconds:g} s and a restart of {restart_seconds:g} s are hardly ever done: "
            "use fewer devices, shorter steps, saves or restarts, or checkpoints more often"
        )
    seconds = steps * step_seconds / share
    hours = seconds / 3600 * num_devices
    chip_hours = hours / chip.devices_per_chip
    return Duration(
        tokens, steps, seconds, share, interval, failures=seconds / mtbf, device_hours=hours,
        dollars=None if price is None else price * chip_hours,
        kilowatt_hours=None if chip.watts is None else chip.watts * chip_hours / 1000,
    )  # fmt: skip
