"""The search: its best is that of a full enumeration, it ends in time, and says why."""

import dataclasses
import io
import itertools
import json
import math
import pathlib
import shlex
import types

import pytest
from jax.experimental import mesh_utils

from llmx import config, sharding
from llmx.config import ConfigError
from llmx.model import families
from llmx.plan import __main__ as command
from llmx.plan import (
    auto,
    candidates,
    machines,
    partition,
    run_report,
    search,
    search_bounds,
    search_report,
    step_time,
)  # fmt: skip
from llmx.plan.options import pasted
from llmx.plan.partition import Layer

ROOT = pathlib.Path(__file__).parents[2]

TORUS = {
    "name": "t9", "flops": {"bfloat16": 1e15}, "hbm_bytes": 64 * 2**30, "hbm_bandwidth": 4e12,
    "link_bandwidth": 1e11, "num_links": 6, "topology": "torus_3d", "max_domain": 4096,
    "network_bandwidth": None,
}  # fmt: skip
CPU = TORUS | {"name": "cpu", "topology": "memory", "max_domain": 64}


def _config(**keys):
    run = config.default()
    run.model = families.preset(
        "llama3", width=512, num_layers=8, num_heads=8, num_kv_heads=4, head_dim=64, mlp_dim=1536,
        vocab_size=4096, max_positions=1024,
    )  # fmt: skip
    run.batch.size, run.batch.sequence_length = 16, 1024
    for key, value in keys.items():
        config.set_value(run, key.replace("__", "."), value)
    return run


def _space(run, machine, **keys):
    topology = machine.topology
    return candidates.Space(
        candidates.neutral(run, topology.platform), topology.num_devices, topology.num_slices,
        machine.on_gpu, remats=("none", "full", "sqrt"), of_chunks=("part",),
        schedules=(("1f1b", 0), ("zb_h1", 0)), **keys,
    )  # fmt: skip


# Little memory, so that it decides.
@pytest.mark.parametrize("name", ["h100:1x4", "v5e:2x2", "h100:2x2"])
@pytest.mark.parametrize("gib", [0.2, 60.0])
def test_the_best_is_that_of_a_full_enumeration(name, gib):
    machine = machines.parse(name)
    space = _space(_config(), machine)
    whole = search.Search(space, machine).find(limit=gib * 2**30, keep=1)
    quick = search.Search(space, machine, bounds=search_bounds.Bounds(space, machine))
    found = quick.find(limit=gib * 2**30, keep=1)
    assert found.best.step == whole.best.step and found.best.memory <= gib * 2**30
    assert found.counted < whole.counted / 2 and found.candidates == whole.candidates
    assert found.bound == found.best.step


def test_the_best_mixture_is_that_of_a_full_enumeration():
    """`expert` is an axis of the search, and nothing is chosen that is not counted."""
    machine = machines.parse("v5e:2x2")
    run = _config(remat="full", batch__size=4)
    run.model = families.preset(
        "mixtral", width=512, num_layers=4, num_heads=8, num_kv_heads=4, head_dim=64,
        num_experts=6, experts_per_token=2, expert_dim=768, vocab_size=4096, max_positions=1024,
    )  # fmt: skip
    space = _space(run, machine)
    assert "none" not in space.remats_of(next(space.groups()))
    space = dataclasses.replace(space, remats=("full",))
    groups = list(space.groups())
    assert {group.expert for group in groups} == {1, 2} and {group.stage for group in groups} == {1}
    whole = search.Search(space, machine).find(keep=1)
    found = search.Search(space, machine, bounds=search_bounds.Bounds(space, machine)).find(keep=1)
    assert found.best.step == whole.best.step and found.counted < whole.counted
    experts = {one.candidate.expert for one in whole.options}
    assert experts == {1, 2}


@pytest.mark.parametrize(
    ("name", "precision"),
    [("h100:2x4", "bf16"), ("v5e:2x4", "bf16"), ("v5e:2x4", "pure_bf16"), ("cpu:8", "bf16")],
)
def test_bounds_are_bounds(name, precision, tmp_path):
    path = tmp_path / "cpu.json"
    path.write_text(json.dumps(CPU | {"hbm_bandwidth": 1e10}))  # moves of memory decide
    machine = machines.parse(name, path if name == "cpu:8" else None)
    space = _space(_config(precision=precision), machine)
    bounds = search_bounds.Bounds(space, machine)
    counted = search.Search(space, machine)
    checked = 0
    for group in itertools.islice(space.groups(), 0, None, 7):
        for text in space.remats_of(group):
            for at, place in enumerate(space.placements(group)):
                candidate = space.candidate(group, place, text)
                if (held := counted.bytes_of(candidate)) is None:
                    continue
                assert bounds.bytes(group, text, place) <= held * (1 + 1e-9), candidate
                if at > 1:
                    continue
                option, checked = counted.option(candidate, math.inf), checked + 1
                assert bounds.seconds_of_group(group) <= option.step * (1 + 1e-9)
                assert bounds.seconds(group, text) <= option.step * (1 + 1e-9), candidate
                assert bounds.bytes(group, text) <= held * (1 + 1e-9), candidate
    assert checked > 100


def test_every_candidate_has_all_devices_and_the_batch():
    machine = machines.parse("h100:2x4")
    space = _space(_config(), machine)
    seen = set()
    for candidate in space.all():
        sizes = [getattr(candidate, axis) for axis in sharding.AXES if axis != "expert"]
        assert math.prod(sizes) == 8
        seen.add(tuple(sizes))
    # stage, data, fsdp, sequence, tensor: every factorisation that the model admits.
    assert {(1, 1, 8, 1, 1), (2, 2, 2, 1, 1), (1, 1, 1, 2, 4), (8, 1, 1, 1, 1)} <= seen


def test_a_search_that_is_cut_short_says_what_is_left():
    machine = machines.parse("h100:2x4")
    space = _space(_config(), machine)
    bounds = search_bounds.Bounds(space, machine)
    found = [search.Search(space, machine, bounds=bounds).find(most=5) for _ in range(2)]
    assert found[0].bound <= found[0].best.step and found[0].counted < 60
    # All processes of a job find the same.
    assert found[0].best == found[1].best


def test_a_search_that_ends_early_is_never_behind_the_plainest():
    """ZeRO-3 alone, and devices split evenly over `tensor` and `sequence`, with the best remat and
    microbatches that fit: here where pipelines are looked at first."""

    class Misled(search_bounds.Bounds):
        def seconds_of_group(self, group):
            return super().seconds_of_group(group) * (group.stage == 1)

        def seconds(self, group, text):
            return super().seconds(group, text) * (group.stage == 1)

    machine = machines.parse("h100:2x4")
    space = _space(_config(batch__size=64), machine)
    limit = 0.4 * 2**30
    one = search.Search(space, machine, bounds=Misled(space, machine))
    early = one.find(limit=limit, most=1)
    plain = []
    for group in space.groups():
        if group.stage > 1 or group.tensor != group.sequence:
            continue
        for place, text in itertools.product(space.placements(group), space.remats_of(group)):
            candidate = space.candidate(group, place, text)
            splits = (place.layout, place.gather, place.data) == ("zero3", "layer", 1)
            if splits and (one.bytes_of(candidate) or math.inf) <= limit:
                plain.append(one.option(candidate, limit))
    assert {option.candidate.tensor for option in plain} == {1, 2}
    assert early.best.step <= min(option.step for option in plain)
    assert early.counted < 100


def test_what_is_refused_is_counted():
    """Else a search that ends after so many takes as long as it will."""
    machine = machines.parse("h100:2x4")
    space = _space(_config(), machine)
    own = candidates.changed(space.base, next(space.all()))
    refused = search.Search(
        space, machine, own, bounds=search_bounds.Bounds(space, machine),
        memory=lambda run, machine: search.held(run, machine) if run is own else None,
    )  # fmt: skip
    assert refused.find(most=40).counted < 120 < refused.find().counted


def test_a_search_that_is_cut_short_says_so_wherever_it_ends(monkeypatch):
    machine, run = machines.parse("h100:1x2"), _config()
    for most, said in ((5, True), (10**6, False)):
        monkeypatch.setattr(search_report, "MOST_COUNTED", most)
        _, text = search_report.chosen(run, machine)
        section, lines, _ = search_report.show(run, machine, out=io.StringIO())
        for one in (text, lines[0]):
            assert ("not all that may be faster were counted: none takes less than" in one) == said
        with_more, links, network = section["what_if"]
        for one in (links, network):  # only those that were shown are timed again
            assert "at least" in one or "nothing for those that are the fastest now" in one
        assert ("at least" in with_more or "fastest now" in with_more) == said


NO_PLACE = dict(data=5, fsdp=2, sequence=8, tensor=4)


def test_a_mesh_without_a_place_on_the_torus_is_an_error(capsys, monkeypatch):
    def nowhere(shape, **_):  # as jax 0.10 says of this mesh, which jax 0.12 places
        raise NotImplementedError(f"Failed to find assignment for {shape}")

    monkeypatch.setattr(mesh_utils, "create_device_mesh", nowhere)
    flags = [f"--config.mesh.{axis}={size}" for axis, size in NO_PLACE.items()]
    config = f"--config={ROOT}/configs/llama3_8b.py"
    args = [config, "--machine=v5p:4x4x20", "--config.batch.size=320", *flags]
    code, printed = _run(capsys, *args, "--config.sharding.layout=hsdp")
    assert code == 2
    for word in ("data5 x fsdp2 x sequence8 x tensor4", "320 TPU v5", "whole side", "--search"):
        assert word in printed.err


@pytest.mark.parametrize("name", ["v5e:2x2", "h100:1x4"])
def test_what_is_listed_is_what_the_report_counts(name):
    """On v5e sums are exchanged in parts, of which the head's gradient takes less."""
    machine = machines.parse(name)
    space = _space(_config(), machine)
    found = search.Search(space, machine).find(limit=1e15).options
    for one in found[:20]:
        held, _ = run_report.count(space.run(one.candidate), machine.topology)
        assert held.peak == one.memory


def test_a_search_passes_over_meshes_without_a_place():
    """Which are most of some machines: here all but one of them."""
    machine = machines.parse("h100:1x4")
    space = _space(_config(), machine)

    def time(run, machine):
        if run.mesh.tensor < 4:
            raise sharding.PlacementError("no place")
        return step_time.of(run, machine)

    for limit in (60 * 2**30, 2**20):
        found = search.Search(space, machine, time=time).find(limit=limit)
        placed = found.options if limit > 2**30 else found.too_large
        assert placed and {one.candidate.tensor for one in placed} == {4}


def test_one_option_has_no_second(capsys):
    code, printed = _run(capsys, "--search", "--config.batch.size=1", machine="h100:1x1")
    assert code == 0 and "the second:" in printed.out
    space = dataclasses.replace(
        _space(_config(batch__size=1), machines.parse("h100:1x1")), remats=("full",)
    )
    found = search.Search(space, machines.parse("h100:1x1")).find()
    section = {"runner_up": search_report._runner_up(found.options, _config()),
               "what_if": [], "seconds": 1.0}  # fmt: skip
    assert len(found.options) == 1
    lines = search_report._lines(section, found, _config(), machines.parse("h100:1x1"))
    assert not any("the second" in line for line in lines)


def test_flags_can_be_pasted_into_a_shell():
    run = _config()
    machine = machines.parse("2@v5e:2x2")
    best = search_report.make(run, machine).find(most=20).best.candidate
    flags = candidates.flags(best._replace(layers=(1, 2)), run)
    assert any("across_slices=(" in flag for flag in flags)
    text = pasted(flags)
    assert shlex.split(text) == flags and 'across_slices="(' in text
    assert 'layers="(1, 2)"' in text


SIZES = {"gpt2_124m": "v5e:2x4", "qwen3_0.6b": "v5e:2x4", "gemma3_1b": "2@v5e:2x2",
         "llama3_8b": "h100:8", "llama3_8b_v5e": "v5e:2x4", "llama3_128k": "v5p:2x2x4",
         "llama3_70b": "v5p:4x4x4", "llama3_70b_pipeline": "v5p:4x4x4"}  # fmt: skip


# Candidates that are counted, of some thousands: the search has to look at the right ones first.
MOST = dict.fromkeys(SIZES, 100) | {"llama3_8b_v5e": 300}


@pytest.mark.parametrize("name", SIZES)
def test_no_config_is_faster_on_its_own_hardware(name):
    from llmx.config import flags

    machine = machines.parse(SIZES[name])
    path = f"--config={ROOT}/configs/{name}.py"
    _, run, _ = flags.parse(flags.parser("test", ""), [path])
    made = search_report.make(run, machine)
    own = made.option(candidates.of_run(made.own), math.inf)
    made.own = None  # so that it has to find one
    best = made.find(most=MOST[name], keep=1).best
    assert best.step <= own.step * (1 + 1e-9)


def test_a_chain_of_unequal_layers_is_cut_as_pipedream_cuts_it():
    seconds = (3.0, 1.0, 1.0, 2.0, 5.0, 1.0, 1.0, 2.0)
    empty = dict(weight_bytes=0, state_bytes=0, version_bytes=0, output_bytes=0, stash_bytes=0)
    chain = tuple(Layer("block", of / 3, 2 * of / 3, **empty) for of in seconds)
    machine = machines.parse("h100:4")
    space = dataclasses.replace(_space(_config(), machine), chain=chain)
    cuts = {group.layers for group in space.groups() if group.stage == 4 and group.chunks == 1}
    ((cut),) = cuts

    def slowest(counts):
        ends = itertools.accumulate(counts)
        return max(sum(seconds[end - num : end]) for num, end in zip(counts, ends, strict=True))

    every = [one for one in itertools.product(range(1, 6), repeat=4) if sum(one) == len(seconds)]
    assert slowest(cut) == min(map(slowest, every)) < slowest((2, 2, 2, 2))
    planned = partition.partition(
        chain, 4, partition.Pipeline(math.inf, 4), num_stages=4, replicate=False
    )
    assert cut == tuple(stage.num_layers for stage in planned.stages)


def _run(capsys, *args, machine="h100:1x4"):
    path = f"--config={ROOT}/configs/quickstart.py"
    code = command.main((path, f"--machine={machine}", *args))
    return code, capsys.readouterr()


def test_the_command_searches(capsys):
    code, printed = _run(capsys, "--search")
    assert code == 0 and "search:" in printed.out and "the second:" in printed.out
    assert "with 1 GiB more of each device:" in printed.out


def test_auto_is_the_best(capsys):
    code, printed = _run(capsys, "--config.mesh=auto", "--json")
    report = json.loads(printed.out)
    best = report["search"]["configurations"][report["search"]["best"]]
    assert code == 0 and report["time"]["step"] == pytest.approx(best["step"])
    assert report["memory"]["peak"] == best["memory"]


def test_what_is_found_is_reported_where_the_config_itself_is_not_counted(capsys):
    """Mixtures that save their weights are not; by themselves they are refused, with a remedy."""
    args = (f"--config={ROOT}/configs/quickstart_experts.py", "--machine=v5e:2x2", "--json")
    assert command.main(args) == 2 and "use remat=full" in capsys.readouterr().err
    assert command.main((*args, "--search")) == 0
    report = json.loads(capsys.readouterr().out)
    best = report["search"]["configurations"][report["search"]["best"]]
    assert report["time"]["step"] == pytest.approx(best["step"])
    assert "use remat=full" in report["search"]["own_refusal"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--verify=1",), "--verify without --search"),
        (("--search", "--verify=0"), "--verify=0 must be at least 1"),
        (("--search", "--verify=100000"), "at most 100: each is compiled"),
        (("--config.mesh=auto", "--config.mesh.fsdp=2"), "mesh='auto' beside mesh.fsdp"),
        (("--config.mesh=best",), "mesh"),
    ],
)
def test_bad_input(args, words, capsys):
    code, printed = _run(capsys, *args)
    assert code == 2 and words in printed.err and not printed.out


@pytest.mark.parametrize("how", ["--search", "--config.mesh=auto"])
@pytest.mark.parametrize(("config", "batch"), [("llama3_405b", 8), ("llama3_8b", 8)])
def test_where_nothing_fits_the_report_says_so(how, config, batch, capsys, tmp_path):
    path, html = f"--config={ROOT}/configs/{config}.py", tmp_path / "plan.html"
    # Of 405B no state fits; of 8B on one device no configuration goes beyond the bounds.
    machine = "--machine=h100:8" if config == "llama3_405b" else "--machine=v5e:1x1"
    args = (path, machine, how, f"--config.batch.size={batch}", "--json", f"--html={html}")
    code = command.main(args)
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    found = report["search"]
    assert code == 1 and found["best"] is found["bound"] is None and not report["memory"]["fits"]
    assert "configurations fits into" in found["nothing_fits"]
    least = min(one["memory"] for one in found["configurations"])
    assert found["least"] == least > 0.95 * report["memory"]["limit"]
    assert f"None of {found['candidates']:,} configurations fits" in html.read_text()


def test_the_least_that_does_not_fit_is_that_of_a_full_enumeration():
    machine = machines.parse("h100:2x2")
    space = _space(_config(), machine)
    whole = search.Search(space, machine)
    sizes = filter(None, map(whole.bytes_of, space.all()))
    quick = search.Search(space, machine, bounds=search_bounds.Bounds(space, machine))
    found = quick.find(limit=2**20)
    assert found.best is None and found.least.memory == min(sizes)


def test_where_nothing_is_valid_it_is_an_error(capsys):
    code, printed = _run(capsys, "--search", "--config.batch.size=3", machine="h100:1x7")
    assert code == 2 and not printed.out
    assert "no mesh of the 7 devices of h100:1x7 divides batch.size=3, " in printed.err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--tokens=0",), "tokens=0"),
        (("--price=-1",), "price=-1"),
        (("--step-seconds=-1",), "step_seconds=-1"),
        (("--step-seconds=1e-9",), "no step is shorter than"),
        (("--save-seconds=0",), "save_seconds=0"),
        (("--device-mtbf=nan",), "device_mtbf=nan"),
        (("--config.remat=budget",), "remat='budget' is chosen by compiling"),
    ],
)
def test_wrong_flags_are_refused_before_a_search(args, words, capsys, monkeypatch):
    monkeypatch.setattr(search_report, "show", lambda *_, **__: pytest.fail("it searched"))
    code, printed = _run(capsys, "--search", *args)
    assert code == 2 and words in printed.err and not printed.out


@pytest.mark.parametrize(("base", "name"), [(TORUS, "t9:2x2x1"), (CPU, "cpu:4")])
def test_what_has_no_compiler_is_not_verified(base, name, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(search_report, "show", lambda *_, **__: pytest.fail("it searched"))
    path = tmp_path / "own.json"
    path.write_text(json.dumps(base))
    args = ("--search", "--verify=2", f"--hardware={path}")
    code, printed = _run(capsys, *args, machine=name)
    assert code == 2 and not printed.out
    assert f"--verify=2 on {name}: no compiler is known for" in printed.err


def test_what_no_mesh_divides_is_not_said_to_be_too_large(capsys):
    path = f"--config={ROOT}/configs/llama3_8b.py"
    sizes = ("--config.batch.size=7", "--config.batch.sequence_length=1001",
             "--config.model.num_layers=7")  # fmt: skip
    code = command.main((path, "--machine=h100:2x8", "--search", *sizes))
    err = capsys.readouterr().err
    assert code == 2 and "no mesh of the 16 devices of h100:2x8 divides batch.size=7, " in err
    assert "none of 0" not in err and "takes 0 B" not in err


def test_only_train_and_plan_choose_a_mesh(tmp_path):
    from llmx.config import flags

    given = [f"--config={ROOT}/configs/quickstart.py", "--config.mesh=auto"]
    _, _, problems = flags.parse(flags.parser("llmx.aot", ""), given)
    assert len(problems) == 1 and "llmx.plan --search" in problems[0]
    args, run, problems = flags.parse(flags.parser("llmx.train", ""), given, auto_mesh=True)
    assert args.auto_mesh and not problems and isinstance(run.mesh, sharding.MeshConfig)
    with pytest.raises(ConfigError):
        candidates.neutral(_config(batch__size=0))


def test_auto_takes_the_cpu_devices_of_a_config():
    """The machine that CPUs are searched as is no reason to refuse them."""
    run = _config(launch__cpu_devices=4, launch__platform="")
    devices = [types.SimpleNamespace(device_kind="cpu", platform="cpu")] * 4
    chosen, text = search_report.chosen(run, auto._machine(devices))
    assert math.prod(vars(chosen.mesh)[axis] for axis in sharding.AXES) == 4 and "fastest" in text
