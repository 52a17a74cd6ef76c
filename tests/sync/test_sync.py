"""Strategies between replicas: what runs when, who is late, and what is kept for other replicas."""

import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from llmx import config, sharding
from llmx.config import checks, describe, effects
from llmx.contract import Strategy, Timetable
from llmx.model import families
from llmx.step import optimizers
from llmx.sync import late, replicas, reshard
from llmx.sync import strategy as strategy_lib
from llmx.sync.config import SyncConfig
from llmx.sync.replicas import COMPRESSED, LOCAL, MEAN, VARIANCE

ROUNDING = 1e-6  # of the largest number: fp32 sums in another order


def table(strategy: str, total: int = 20, rates=None, **values) -> Timetable:
    rates = np.ones(total) if rates is None else rates
    return strategy_lib.STRATEGIES[strategy].timetable(SyncConfig(strategy, **values), rates)


def walk(found: Timetable, freeze_step: int = -1) -> list[str]:
    return [found.phase_of(step, freeze_step) for step in range(found.total_steps)]


# -------------------------------------------------------------------------------- what runs when

COMPRESSING = ["int8", "top_k", "power_sgd", "stale", "one_bit", "one_bit_lamb"]
LOCALLY = ["local_sgd", "diloco"]


@pytest.mark.parametrize(
    "strategy, phase",
    [("mean", MEAN), *((s, COMPRESSED) for s in COMPRESSING), *((s, LOCAL) for s in LOCALLY)],
)
def test_steps_of_mean_come_first(strategy, phase):
    for warmup, phases in (
        (0, (phase,)),
        (5, (MEAN, phase)),
        (19, (MEAN, phase)),
        (20, (MEAN,)),
        (100, (MEAN,)),
    ):
        found = table(strategy, warmup_steps=warmup)
        assert walk(found) == ([MEAN] * min(warmup, 20) + [phase] * 20)[:20]
        phases_of_all = (MEAN,) if strategy == "mean" else phases
        assert found.phases_from(0) == phases_of_all
        for first in range(20):
            there = set(walk(found)[first:])
            assert found.phases_from(first, -1) == tuple(p for p in phases_of_all if p in there)


@pytest.mark.parametrize("strategy", ["one_bit", "one_bit_lamb"])
def test_the_variance_settles_and_is_frozen_from_the_second_step_on(strategy):
    found = table(strategy, warmup_steps=-1)
    assert found.phases_from(0) == (MEAN, COMPRESSED)
    assert walk(found) == [MEAN] * 20
    assert walk(found, 0) == [MEAN] * 2 + [COMPRESSED] * 18
    assert walk(found, 7) == [MEAN] * 9 + [COMPRESSED] * 11
    assert found.phases_from(0, -1) == found.phases_from(15, -1) == (MEAN, COMPRESSED)
    assert found.phases_from(8, 7) == (MEAN, COMPRESSED)
    assert found.phases_from(9, 7) == (COMPRESSED,)


@pytest.mark.parametrize("strategy", ["mean", *COMPRESSING])
def test_nothing_is_exchanged_after_a_step_by_those_who_exchange_in_it(strategy):
    found = table(strategy, warmup_steps=3)
    assert all(found.fragments_after(step) == () for step in range(20))


@pytest.mark.parametrize(
    "strategy, warmup, every, wanted",
    [
        ("local_sgd", 0, 1, list(range(20))),
        ("local_sgd", 0, 6, [5, 11, 17, 19]),
        ("local_sgd", 4, 6, [9, 15, 19]),
        ("local_sgd", 0, 30, [19]),
        ("local_sgd", 20, 6, []),
        ("diloco", 2, 9, [10, 19]),
        ("diloco", 3, 30, [19]),
    ],
)
def test_exchanges_of_parameters_and_one_at_the_end(strategy, warmup, every, wanted):
    found = table(strategy, warmup_steps=warmup, every=every)
    assert [step for step in range(20) if found.fragments_after(step)] == wanted
    assert {found.fragments_after(step) for step in wanted} <= {(0,)}


@pytest.mark.parametrize("every, fragments, warmup", [(6, 3, 0), (6, 3, 4), (4, 4, 1), (8, 2, 0)])
def test_each_fragment_is_exchanged_once_in_every(every, fragments, warmup):
    found = table("diloco", 60, every=every, fragments=fragments, warmup_steps=warmup)
    due = {step: found.fragments_after(step) for step in range(warmup, 59)}
    for begin in range(warmup, 59 - every):
        window = [due[step] for step in range(begin, begin + every) if due[step]]
        assert sorted(window) == [(f,) for f in range(fragments)]
    assert found.fragments_after(59) == tuple(range(fragments))
    # They take turns at even distances.
    steps = [step for step, fragment in due.items() if fragment]
    assert set(np.diff(steps)) == {every // fragments}


def rates_of(**values) -> np.ndarray:
    total = 400
    optimizer = optimizers.OptimizerConfig(learning_rate=1.0, **values)
    schedule = optimizers.make_schedule(optimizer, total_steps=total)
    return np.asarray(jax.vmap(schedule)(jnp.arange(total)), np.float64)


def zero_one_by_its_docstring(rates, warmup: int, every: int):
    """(steps with an exchange, steps that update the second moment), one step after the other."""
    peak = max(range(len(rates)), key=lambda step: (rates[step], -step))
    meetings, moments, apart = [], [], 0
    wait = since = 0  # steps between updates of the second moment, and since the last one
    ended = False
    for step in range(warmup, len(rates)):
        interval = 1
        while step > peak and rates[step] <= rates[peak] / (2 * interval):
            interval *= 2
        apart += 1
        if apart < min(interval, every):
            ended = True
            continue
        apart = 0
        meetings.append(step)
        since += 1
        if not ended and since >= wait:
            moments.append(step)
            since, wait = 0, 2 ** (len(moments) // 16)
    return meetings, moments


@pytest.mark.parametrize(
    "rates, warmup, every",
    [
        (rates_of(schedule="cosine", warmup_steps=50, final_fraction=0.01), 0, 30),
        (rates_of(schedule="cosine", warmup_steps=50, final_fraction=0.01), 70, 4),
        (rates_of(schedule="linear", warmup_steps=10, final_fraction=0.001), 3, 30),
        (rates_of(schedule="constant", warmup_steps=10), 0, 8),
    ],
    ids=["cosine", "at most 4", "linear", "constant"],
)
def test_the_intervals_of_zero_one(rates, warmup, every):
    found = table("zero_one", len(rates), rates, warmup_steps=warmup, every=every)
    meetings, moments = zero_one_by_its_docstring(rates, warmup, every)
    last = len(rates) - 1
    exchanges = [step for step in range(len(rates)) if found.fragments_after(step)]
    assert exchanges == sorted({*meetings, last})
    variances = [step for step in range(len(rates)) if found.phase_of(step) == VARIANCE]
    assert variances == moments and set(moments) <= set(meetings)
    others = {found.phase_of(step) for step in range(warmup, len(rates)) if step not in moments}
    assert others == {LOCAL}
    assert found.phases_from(0) == (*((MEAN,) if warmup else ()), VARIANCE, LOCAL)
    assert rates[-1] == rates.max() or np.diff(exchanges).max() > 2


def test_zero_one_may_begin_where_nobody_updates_the_second_moment():
    """Behind the peak there are no updates of it any more, and no program for them."""
    rates = rates_of(schedule="cosine", warmup_steps=50, final_fraction=0.01)
    found = table("zero_one", len(rates), rates, warmup_steps=350)
    assert found.phases_from(0) == (MEAN, LOCAL) and set(walk(found)[350:]) == {LOCAL}


# ------------------------------------------------------------------------------ bounded staleness


def walk_delays(num_replicas: int, steps: int = 200, **values) -> tuple[np.ndarray, np.ndarray]:
    chosen = SyncConfig("stale", **values)

    def one(lateness, step):
        delay, lateness = late.delays(chosen, lateness, step)
        return lateness, (delay, lateness)

    start = jnp.zeros((num_replicas,))
    _, (delays, lateness) = jax.jit(lambda: jax.lax.scan(one, start, jnp.arange(steps)))()
    return np.asarray(delays), np.asarray(lateness)


@pytest.mark.parametrize("staleness", [0, 1, 2, 5])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_nobody_is_later_than_the_bound(staleness, asynchronous):
    delays, lateness = walk_delays(8, staleness=staleness, asynchronous=asynchronous)
    assert delays.min() == 0 and delays.max() == staleness
    assert lateness.min() >= 0 and lateness.max() < staleness + 1
    np.testing.assert_array_equal(delays, np.floor(lateness))
    again, _ = walk_delays(8, staleness=staleness, asynchronous=asynchronous)
    np.testing.assert_array_equal(again, delays)


def test_who_waits_is_less_late():
    """Behind a bound all others wait for the last; asynchronously they do not."""
    bounded, asynchronous = (walk_delays(8, asynchronous=each)[0] for each in (False, True))
    assert np.any(bounded != asynchronous)
    assert bounded.mean() < asynchronous.mean()


@pytest.mark.parametrize("staleness", [1, 3])
def test_what_is_late_arrives(staleness):
    random = np.random.default_rng(0)
    waiting = {"w": jnp.zeros((staleness, 3, 2))}
    delays = random.integers(0, staleness + 1, 30)
    sent = random.normal(size=(30, 3, 2)).astype("f4")
    due = np.zeros((30 + staleness, 3, 2))
    for step, delay in enumerate(delays):
        due[step + delay] += sent[step]
        arrived, waiting = late.delayed({"w": sent[step]}, waiting, jnp.asarray(delay))
        np.testing.assert_allclose(arrived["w"], due[step], atol=ROUNDING * 10)
    np.testing.assert_allclose(waiting["w"], due[30:], atol=ROUNDING * 10)


# ------------------------------------------------------------------------ onto another number

SHAPES = {
    "blocks/w": ((4, 6, 10), ("layers", "embed", "mlp")),
    "matrix": ((8, 7), ("vocab", "embed")),
    "norm": ((5,), ("norm",)),
}
SPLITS = {"blocks/w": PartitionSpec(None, "fsdp", None), "matrix": PartitionSpec("fsdp", None)}


def strategy_of(
    name: str, n: int, fsdp: int = 1, splits=SPLITS, **values
) -> tuple[Strategy, object]:
    """A strategy of replicas of these shapes, and its state with random numbers in it."""
    mesh = sharding.make_mesh({"data": n, "fsdp": fsdp}, devices=jax.devices()[: n * fsdp])
    shapes = {name: jax.ShapeDtypeStruct(shape, "float32") for name, (shape, _) in SHAPES.items()}
    specs = {name: splits.get(name, PartitionSpec()) for name in SHAPES}
    specs = {
        name: PartitionSpec(*spec.partitions, *(None,) * (len(SHAPES[name][0]) - len(spec)))
        for name, spec in specs.items()
    }
    to = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    chosen, technique = SyncConfig(name, **values), strategy_lib.STRATEGIES[name]
    placed = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=to[name])
        for name, leaf in shapes.items()
    }
    inputs = replicas.StrategyInputs(
        config=chosen,
        replicas=replicas.make(
            chosen, mesh, technique.compressor, shapes=shapes,
            axes={name: axes for name, (_, axes) in SHAPES.items()}, updates=to,
        ),
        loss=types.SimpleNamespace(params=placed, mesh=mesh, updates=to),
        gradient=None, replica_gradient=None, optimizer=None,
        optimizer_config=optimizers.OptimizerConfig(),
        opt_state={"mu": placed},
        update=None, with_head=lambda head: inputs, decays={}, forget_norms=lambda state: state,
        timetable=technique.timetable(chosen, np.ones(20)),
    )  # fmt: skip
    made = technique.make(inputs)
    random = np.random.default_rng(n)

    def numbers(leaf):
        drawn = (
            random.normal(size=leaf.shape) if leaf.dtype == jnp.float32 else np.full(leaf.shape, 7)
        )
        return jnp.asarray(drawn, leaf.dtype)

    return made, jax.tree.map(numbers, made.abstract[1])


def resharded(saved, strategy: Strategy, **ordered):
    shapes = {name: shape for name, (shape, _) in SHAPES.items()}
    found = strategy.reshard(saved, reshard.Layers(shapes, **ordered))
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, strategy.abstract[1])
    return found


def alike(stacked) -> np.ndarray:
    array = np.asarray(stacked)
    np.testing.assert_array_equal(array, np.broadcast_to(array[:1], array.shape))
    return array


def all_errors(state) -> dict[str, np.ndarray]:
    found = {}
    for name, error in state.residuals.errors.items():
        found[name] = np.asarray(error, np.float64).sum(0)
        if name in state.residuals.server:
            found[name] = found[name] + whole_by_hand(name, state.residuals.server[name])
    return found


def whole_by_hand(name: str, server) -> np.ndarray:
    """[n, L, parts..., Q] in the parameter's shape, one number after the other."""
    shape, axes = SHAPES[name]
    server = np.asarray(server, np.float64)
    layered = axes[0] == "layers"
    rows, inner = (shape[0], shape[1:]) if layered else (1, shape)
    parts = server.shape[2:-1]
    size = [dim // part for dim, part in zip(inner, parts, strict=True)]
    found = np.zeros((rows, *inner))
    for row, place in itertools.product(range(rows), np.ndindex(*inner)):
        part = tuple(i // s for i, s in zip(place, size, strict=True))
        at = int(np.ravel_multi_index([i % s for i, s in zip(place, size, strict=True)], size))
        replica, rest = divmod(at, server.shape[-1])
        found[(row, *place)] = server[(replica, row, *part, rest)]
    return found.reshape(shape)


@pytest.mark.parametrize(
    "split", [PartitionSpec(), PartitionSpec("fsdp"), PartitionSpec(None, "tensor", "fsdp")]
)
@pytest.mark.parametrize("n", [2, 3])
def test_servers_parts_make_the_parameter_whole(split, n):
    name, (shape, _) = "blocks/w", SHAPES["blocks/w"]
    ways = [2 if axis else 1 for axis in (*split.partitions, None, None, None)[:3]]
    length = (shape[1] // ways[1]) * (shape[2] // ways[2])
    q = -(-length // (8 * n)) * 8
    server = np.random.default_rng(0).normal(size=(n, shape[0], *ways[1:], q)).astype("f4")
    np.testing.assert_array_equal(reshard.whole(server, shape), whole_by_hand(name, server))


@pytest.mark.parametrize("n", [2, 8, 3])
@pytest.mark.parametrize("strategy", ["one_bit", "int8", "top_k", "power_sgd"])
def test_what_was_not_sent_is_split_among_the_new_replicas(strategy, n):
    _, saved = strategy_of(strategy, 4, fsdp=2, rank=2)
    wanted, _ = strategy_of(strategy, n, rank=2)
    found = resharded(saved, wanted)
    before, after = all_errors(saved), all_errors(found)
    assert after.keys() == before.keys() and len(after) > 0
    for name, total in before.items():
        alike(found.residuals.errors[name])
        np.testing.assert_allclose(after[name], total, atol=ROUNDING * np.abs(total).max())
    for name, server in found.residuals.server.items():
        wanted_whole = whole_by_hand(name, saved.residuals.server[name])
        np.testing.assert_allclose(whole_by_hand(name, server), wanted_whole, rtol=ROUNDING)
    assert not any(np.any(leaf) for leaf in found.residuals.queries.values())
    if strategy == "one_bit":
        assert (int(found.freeze_step), int(found.num_updates)) == (7, 7)
        assert found.variance == saved.variance


@pytest.mark.parametrize("fsdp", [1, 2])
def test_another_split_of_as_many_replicas_keeps_the_errors_too(fsdp):
    _, saved = strategy_of("one_bit", 4, fsdp=3 - fsdp)
    wanted, _ = strategy_of("one_bit", 4, fsdp=fsdp)
    found = resharded(saved, wanted)
    # Replicas keep their own, whose shape does not depend on the split.
    for name, errors in saved.residuals.errors.items():
        np.testing.assert_array_equal(found.residuals.errors[name], errors)
    before, after = all_errors(saved), all_errors(found)
    for name, total in before.items():
        np.testing.assert_allclose(after[name], total, atol=ROUNDING * np.abs(total).max())


@pytest.mark.parametrize("n", [2, 8, 3])
def test_what_is_on_its_way_still_arrives_in_its_turn(n):
    _, saved = strategy_of("stale", 4, staleness=3)
    wanted, _ = strategy_of("stale", n, staleness=3)
    found = resharded(saved, wanted)
    for name, waiting in found.late.items():
        total = np.asarray(saved.late[name]).sum(0)
        assert alike(waiting).shape == (n, 3, *SHAPES[name][0])
        np.testing.assert_allclose(waiting.sum(0), total, atol=ROUNDING * np.abs(total).max())
    assert found.late.keys() == SHAPES.keys()
    assert found.lateness.shape == (n,) and not np.any(found.lateness)
    assert int(found.num_steps) == 7


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("staleness", [1, 2, 5])
def test_under_another_staleness_all_that_is_on_its_way_arrives(staleness, n):
    """In its turn, or in the last step that there is one for."""
    _, saved = strategy_of("stale", 4, staleness=3)
    wanted, _ = strategy_of("stale", n, staleness=staleness)
    found = resharded(saved, wanted)
    for name, waiting in found.late.items():
        total = np.asarray(saved.late[name]).sum(0)
        turns = np.zeros((staleness, *total.shape[1:]), "f4")
        for turn, share in enumerate(total):
            turns[min(turn, staleness - 1)] += share
        np.testing.assert_allclose(
            alike(waiting).sum(0), turns, atol=ROUNDING * np.abs(turns).max()
        )
    assert found.late.keys() == SHAPES.keys()


@pytest.mark.parametrize("n", [2, 8, 3])
@pytest.mark.parametrize("strategy", ["local_sgd", "diloco", "zero_one"])
def test_replicas_of_their_own_begin_again_at_the_mean(strategy, n):
    _, saved = strategy_of(strategy, 4)
    wanted, _ = strategy_of(strategy, n)
    found = resharded(saved, wanted)
    for old, new in zip(
        jax.tree.leaves((saved.params, saved.opt_state)),
        jax.tree.leaves((found.params, found.opt_state)), strict=True,
    ):  # fmt: skip
        assert alike(new).shape == (n, *old.shape[1:])
        np.testing.assert_allclose(new[0], np.asarray(old).mean(0), atol=ROUNDING)
    if strategy == "zero_one":
        np.testing.assert_array_equal(found.rates, saved.rates)
        assert int(found.num_updates) == 7
        return
    for name, momentum in saved.outer.items():
        np.testing.assert_array_equal(found.outer[name], momentum)
    assert bool(saved.outer) == (strategy == "diloco")


@pytest.mark.parametrize("n", [2, 8, 4])
def test_the_tokens_of_a_round_that_has_begun_are_all_kept(n):
    _, saved = strategy_of("diloco", 4, by_tokens=True)
    saved = saved._replace(tokens=jnp.float32([100, 0, 40, 20]))
    wanted, _ = strategy_of("diloco", n, by_tokens=True)
    np.testing.assert_array_equal(resharded(saved, wanted).tokens, np.full(n, 160 / n))


def test_layers_go_into_their_new_order():
    _, saved = strategy_of("one_bit", 4)
    wanted, _ = strategy_of("one_bit", 2)
    order = np.array([2, 0, 3, 1])
    ordered = lambda name, array: array[order] if name.startswith("blocks") else array  # noqa: E731
    before, after = all_errors(saved), all_errors(resharded(saved, wanted, ordered=ordered))
    np.testing.assert_allclose(after["blocks/w"], before["blocks/w"][order], atol=10 * ROUNDING)
    np.testing.assert_allclose(after["matrix"], before["matrix"], atol=10 * ROUNDING)


# ------------------------------------------------------------------------------------------- checks


def config_of(chosen: SyncConfig) -> config.Config:
    """A config in which only the section can be wrong."""
    whole = config.default()
    whole.sync = chosen
    whole.optimizer.name = "lamb" if chosen.strategy == "one_bit_lamb" else "adamw"
    return whole


@pytest.mark.parametrize(
    "values, words",
    [
        (dict(strategy="one_bits"), ["'one_bits'", "one_bit,", "did you mean 'one_bit'"]),
        (dict(strategy="xyz"), ["'xyz'", "use one of mean, int8"]),
        (dict(strategy="int8", warmup_steps=-2), ["warmup_steps=-2", "at least -1"]),
        (dict(strategy="int8", warmup_steps=-1), ["warmup_steps=-1", "'int8'", "use a number"]),
        (dict(strategy="zero_one", warmup_steps=-1), ["warmup_steps=-1", "use a number"]),
        (dict(strategy="one_bit"), ["warmup_steps=0", "'one_bit'", "15% of the steps, or -1"]),
        (dict(strategy="one_bit_lamb"), ["warmup_steps=0", "15% of the steps, or -1"]),
        (dict(strategy="power_sgd", rank=0), ["rank=0", "at least 1"]),
        (dict(strategy="top_k", fraction=0.0), ["fraction=0.0", "above 0 and at most 1"]),
        (dict(strategy="top_k", fraction=1.5), ["fraction=1.5", "above 0 and at most 1"]),
        (dict(strategy="int8", bucket_mib=0.0), ["bucket_mib=0.0", "above 0"]),
        (dict(strategy="local_sgd", every=0), ["every=0", "at least 1"]),
        (dict(strategy="diloco", fragments=0), ["fragments=0", "at least 1"]),
        (dict(strategy="diloco", every=10, fragments=4),
         ["fragments=4", "every=10", "use a divisor"]),
        (dict(strategy="stale", staleness=-1), ["staleness=-1", "at least 0"]),
        (dict(strategy="diloco", outer_learning_rate=10.0),
         ["outer_learning_rate=10.0", "below 10"]),
        (dict(strategy="diloco", outer_momentum=1.0), ["outer_momentum=1.0", "below 1"]),
    ],
    ids=str,
)  # fmt: skip
def test_problems_name_value_limit_and_remedy(values, words):
    [found] = strategy_lib.conflicts(config_of(SyncConfig(**values)))
    for word in words:
        assert word in found, f"{word!r} is not in: {found}"


def test_all_problems_are_told_and_the_defaults_have_none():
    assert strategy_lib.problems(SyncConfig()) == []
    for name in strategy_lib.STRATEGIES:
        assert strategy_lib.problems(SyncConfig(name, warmup_steps=1)) == []
        assert strategy_lib.conflicts(config_of(SyncConfig(name, warmup_steps=1))) == []
    wrong = SyncConfig("diloco", every=0, fraction=2.0, outer_momentum=-1.0)
    assert len(strategy_lib.problems(wrong)) == len(strategy_lib.conflicts(config_of(wrong))) == 3


def resolved(num_devices: int = 2, **values) -> config.Config:
    run = config.default()
    run.model = families.preset("llama3")
    for key, value in values.items():
        config.set_value(run, key.replace("__", "."), value)
    return checks.resolve(run, num_devices)


@pytest.mark.parametrize(
    "values, words",
    [
        (dict(sync__strategy="one_bit", sync__warmup_steps=9, optimizer__name="lion"),
         ["'one_bit'", "a form of adamw", "optimizer.name='lion'", "set optimizer.name='adamw'"]),
        (dict(sync__strategy="one_bit_lamb", sync__warmup_steps=9),
         ["'one_bit_lamb'", "optimizer.name='adamw'", "set optimizer.name='lamb'"]),
        (dict(sync__strategy="zero_one", optimizer__name="muon"),
         ["'zero_one'", "set optimizer.name='adamw'"]),
        (dict(sync__strategy="diloco", optimizer__ema_decay=0.9),
         ["ema_decay=0.9", "'diloco'", "set it to 0"]),
        (dict(sync__strategy="one_bit"), ["sync.warmup_steps=0", "'one_bit'"]),
        (dict(sync__strategy="int8", sync__uncompressed=("*norm*", "*nrom*")),
         ["sync.uncompressed: '*nrom*' matches no parameter", "blocks/attention_norm/scale, "]),
        (dict(sync__strategy="diloco", sync__average_moments=True, optimizer__name="lion"),
         ["average_moments with optimizer.name='lion'", "leave sync.average_moments out"]),
        (dict(sync__strategy="local_sgd", sync__average_moments=True, sync__overlap=True),
         ["average_moments with sync.fragments above 1 or sync.overlap", "leave the one or"]),
        (dict(sync__strategy="one_bit", sync__warmup_steps=9, mesh__stage=2,
              batch__accumulation=4, pipeline__schedule="pipedream_2bw"),
         ["'one_bit'", "'pipedream_2bw'", "another schedule, or strategy 'mean'"]),
    ],
    ids=["lion", "adamw", "muon", "average", "no warm-up", "pattern", "moments", "overlap", "2bw"],
)  # fmt: skip
def test_strategies_and_the_rest_of_the_config(values, words):
    with pytest.raises(config.ConfigError) as error:
        resolved(4 if "mesh__stage" in values else 2, **values)
    for word in words:
        assert word in str(error.value), f"{word!r} is not in: {error.value}"


@pytest.mark.parametrize("strategy", strategy_lib.STRATEGIES)
def test_strategies_that_resolve_and_how_they_are_told(strategy):
    values = dict(sync__strategy=strategy, sync__warmup_steps=9 * (strategy != "mean"))
    if strategy == "one_bit_lamb":
        values["optimizer__name"] = "lamb"
    run = resolved(**values)
    wanted = "" if strategy == "mean" else f"{strategy} between 2 replicas, after 9 steps of 'mean'"
    assert describe.sync_text(run) == wanted


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (dict(strategy="mean", uncompressed=("*norm*",)), "uncompressed"),
        (dict(strategy="diloco", uncompressed=("*norm*",)), "outer_format='fp32'"),
        (dict(strategy="int8", average_moments=True), "average_moments=True"),
        (dict(strategy="mean", by_tokens=True), "by_tokens=True"),
        (dict(strategy="diloco", exchange="there"), "sync.groups=1"),
    ],
)
def test_options_without_effect_are_refused(values, said):
    run = config.default()
    run.sync = SyncConfig(**values)
    (found,) = effects.problems(run)
    assert said in found
