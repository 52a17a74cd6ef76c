"""The search for configs that fit, against machines whose memory is a formula."""

import copy

import pytest

from llmx import config
from llmx.aot import suggest
from llmx.config import checks, flags
from llmx.model import families

DEVICES = 8


def made(**changes) -> config.Config:
    run = config.default()
    run.model = families.preset("llama3", num_layers=4, width=128, num_heads=8, num_kv_heads=4)
    run.batch.size, run.batch.sequence_length = 64, 64
    run.mesh.data, run.mesh.fsdp = 1, DEVICES
    for key, value in changes.items():
        run = suggest.Variant({key.replace("__", "."): value}, None, 0.0).of(run)
    return checks.resolve(run, DEVICES)


def memory(run: config.Config) -> tuple[float, float]:
    """(state, temporaries) of a machine that is easy to reckon with."""
    split = {"ddp": 4, "zero1": 2 + 2 / DEVICES, "zero2": 1 + 3 / DEVICES, "zero3": 4 / DEVICES}
    kept = {"none": 30, "dots": 14, "names": 8, "full": 2, "sqrt": 1.5}
    parallel = run.mesh.data * run.mesh.fsdp
    rows = run.batch.size / run.batch.accumulation / parallel
    return 16 * split[run.sharding.layout] / run.mesh.tensor, kept[
        run.remat
    ] * rows / run.mesh.tensor


def searched(run: config.Config, limit: float, enough: int = 2, most_tries: int = 8):
    """(compiled, fitting) variants."""
    compiled, fitting = [], []

    def peak_of(variant):
        peak = sum(memory(variant.of(run)))
        compiled.append(variant)
        fitting.extend([variant] if peak <= limit else [])
        return peak

    suggest.search(
        run, suggest.Measured(suggest.levels_of(run), memory(run)[0], sum(memory(run))),
        limit=limit, state_of=lambda run: memory(run)[0], peak_of=peak_of,
        most_tensor=8, enough=enough, most_tries=most_tries,
    )  # fmt: skip
    return compiled, fitting


def test_one_small_change_where_it_is_enough():
    tried, fitting = searched(made(), limit=8 + 130)
    assert tried[0].changes == fitting[0].changes == {"batch.accumulation": 2}
    assert fitting[0].flags == ["--config.batch.accumulation=2"]


def test_far_too_much_needs_several_and_few_tries():
    run = made(sharding__layout="ddp")
    tried, fitting = searched(run, limit=12, enough=1)
    assert len(fitting) == 1 and len(tried) <= 6
    state, temporaries = memory(fitting[0].of(run))
    assert state + temporaries <= 12
    assert fitting[0].changes["sharding.layout"] != "ddp"
    assert "batch.size" not in fitting[0].changes  # the last resort was not needed


def test_the_state_alone_is_never_compiled():
    run = made(sharding__layout="ddp")
    tried, _ = searched(run, limit=12, most_tries=50)
    assert all(memory(variant.of(run))[0] <= 12 for variant in tried)


def test_more_is_not_tried_where_less_was_enough():
    tried, fitting = searched(made(), limit=8 + 130, enough=4, most_tries=20)
    for variant in tried:
        before = fitting[: fitting.index(variant)] if variant in fitting else fitting
        earlier = [one for one in before if tried.index(one) < tried.index(variant)]
        assert not any(variant.levels.at_least(one.levels) for one in earlier)
    assert len(fitting) >= 2


def test_nothing_fits():
    tried, fitting = searched(made(), limit=1)
    assert tried == fitting == []


def test_what_fits_is_made_faster():
    run = made(remat="full", batch__accumulation=8)
    tried, fitting = searched(run, limit=100)
    assert fitting and all(variant.cost < 0 for variant in fitting)
    state, temporaries = memory(fitting[0].of(run))
    assert memory(run)[1] < temporaries and state + temporaries <= 100
    # Faster than the first that fits are only some that do not.
    assert all(variant.cost <= fitting[0].cost for variant in tried[: tried.index(fitting[0])])


def test_nothing_is_faster_than_no_saving():
    tried, _ = searched(made(sharding__layout="ddp"), limit=1e6)
    assert tried == []


def test_variants_keep_devices_and_are_configs():
    run = made()
    listed = suggest.variants(run, most_tensor=8)
    assert [one.cost for one in listed] == sorted(one.cost for one in listed)
    valid = [one for one in listed[::7] if suggest._is_config(one, run)]
    tensors = {one.of(run).mesh.tensor for one in valid}
    assert tensors == {1, 2, 4}  # 8 does not divide 4 K/V heads
    halved = [one for one in valid if one.levels.halvings == 1]
    assert halved and all(one.changes["batch.size"] == run.batch.size // 2 for one in halved)
    for one in valid:
        mesh = one.of(run).mesh
        assert mesh.data * mesh.fsdp * mesh.tensor == DEVICES
    assert run == made()  # it was not changed


@pytest.mark.parametrize("dimension", suggest.Levels._fields)
def test_saving_more_costs_more(dimension):
    levels = suggest.Levels(*[1] * len(suggest.Levels._fields))
    less = levels._replace(**{dimension: 0})
    assert suggest._cost(less) < suggest._cost(levels)
    assert levels.at_least(less) and not less.at_least(levels)


def test_flags_are_the_changes(tmp_path):
    path = tmp_path / "run.py"
    path.write_text("from llmx import config\n\ndef get_config():\n    return config.default()\n")
    variant = suggest.Variant({"remat": "full", "batch.accumulation": 2}, None, 0.0)
    command = flags.parser("test", "")
    _, plain, _ = flags.parse(command, ["--config", str(path)])
    _, changed, problems = flags.parse(command, ["--config", str(path), *variant.flags])
    assert not problems and changed == variant.of(copy.deepcopy(plain))


@pytest.mark.parametrize(("accumulation", "level"), [(1, 0), (4, 2)])
def test_levels(accumulation, level):
    levels = suggest.levels_of(made(batch__accumulation=accumulation, remat="names"))
    assert levels == suggest.Levels(
        layout=3, gather=1, remat=2, accumulation=level, tensor=0, halvings=0
    )  # fmt: skip
    assert levels.at_least(levels)
