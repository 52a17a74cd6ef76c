"""spikes.py: a spike is told from noise, from a falling loss and from a plateau."""

import math
import random

from llmx.runtime.spikes import Spikes


def looked(values, name="loss", deviations=10.0):
    watch = Spikes(deviations)
    found = {step: watch.look(step, {name: value}) for step, value in enumerate(values, start=1)}
    return {step: spike for step, spike in found.items() if spike}


def noisy(number, *, level=3.0, noise=0.05, seed=0):
    draw = random.Random(seed)
    return [draw.gauss(level, noise) for _ in range(number)]


def test_a_spike_is_told_with_its_median():
    values = noisy(100)
    values[70] = 6.0
    (step, spike), *others = looked(values).items()
    assert step == 71 and not others
    assert spike.text.startswith("step 71: spike: loss 6 against a running median of ")
    assert abs(spike.scalars["loss_median"] - 3.0) < 0.05
    assert spike.scalars["loss_deviations"] > 30


def test_what_is_no_spike():
    assert not looked(noisy(2000))
    assert not looked([10 / (1 + step / 50) for step in range(1000)])  # falls
    assert not looked([2.0 + 1e-6 * (step % 3) for step in range(500)])  # a plateau
    assert not looked([2.0] * 100 + [2.01] * 100)
    assert not looked([3.0] * 20 + [30.0])  # too few before it
    assert not looked([3.0] * 50 + [math.nan, math.inf])  # the guard's
    assert not looked([3.0] * 50 + [300.0], deviations=0)


def test_gradient_norms_may_double():
    assert not looked([1.0] * 50 + [1.9], name="grad_norm")
    assert list(looked([1.0] * 50 + [2.1], name="grad_norm")) == [51]


def test_a_new_level_is_told_seldom_and_then_is_no_spike():
    found = looked([2.0] * 100 + [8.0] * 400)
    assert min(found) == 101 and max(found) < 101 + 70  # then it is the median
    assert [step for step, spike in found.items() if spike.text] == [101]
