"""`python -m llmx.plan`: reports, pictures and files of schedules and of configs' pipelines."""

import json
import pathlib

import pytest

from llmx.model import costs, families
from llmx.pipeline.schedule import check
from llmx.pipeline.schedules import SCHEDULES
from llmx.pipeline.simulate import simulate
from llmx.plan import __main__ as command
from llmx.plan import draw, search, stage_costs

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("name", SCHEDULES)
def test_plan_shows_every_schedule(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command.main(["--schedule", name, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["stages"], report["microbatches"]) == (4, 16)
    assert report["bubble"] == pytest.approx(report["closed_form"]["bubble"])
    assert report["step_time"]["barriers"] == pytest.approx(report["length"])
    assert command.main(["--schedule", name]) == 0
    out = capsys.readouterr().out
    assert f"{name}: 4 stages, 16 microbatches" in out
    assert f"{report['bubble']:.2%}; closed form {report['closed_form']['formula']}" in out
    assert " ".join(map(str, report["peak_stash"])) in out
    picture = tmp_path / f"{name}_4x16.png"
    assert f"picture: {picture.name}" in out and list(tmp_path.iterdir()) == [picture]
    assert command.main(["--schedule", name, "--out", ""]) == 0
    assert "picture" not in capsys.readouterr().out


def test_plan_draws_and_takes_back_what_it_wrote(capsys, tmp_path):
    csv, png = tmp_path / "zb_v.csv", tmp_path / "zb_v.png"
    sizes = ["--stages=2", "--microbatches=4", "--virtual-stages=2"]
    assert command.main(["--schedule=zb_v", *sizes, f"--csv={csv}", "--json"]) == 0
    wrote = json.loads(capsys.readouterr().out)
    times = ["--forward=0.3", "--backward=0.4", "--weight=0.3", "--transfer=0.01"]
    assert command.main([f"--table={csv}", *times, f"--out={png}", "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert read["bubble"] == wrote["bubble"] == pytest.approx(1 / 25)
    assert "closed_form" not in read
    assert read["step_time"]["free_running"] < read["step_time"]["barriers"]


def test_the_picture_has_a_box_per_operation_and_their_numbers():
    table = SCHEDULES["interleaved_1f1b"](2, 3)
    facts, timeline = check(table), simulate(table, forward=1, backward=2)
    work, memory = draw.draw(table, facts, timeline).axes
    assert len(work.patches) == len(list(table.operations())) == len(work.texts)
    assert "bubble 14.3%" in work.get_title()
    shown = [int(text.get_text()) for text in memory.texts if text.get_text()]
    assert max(shown) == facts.peak_stash.max()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--stages=0"], "stages=0: use at least 1"),
        (["--schedule=dual_pipe_v", "--microbatches=3"], "use more, or zb_v"),
        (["--table=none.csv"], "none.csv"),
        (["--table=none.csv", "--stages=2"], "--stages with --table=none.csv: the file says it"),
        (["--forward=-1"], "forward is"),
        (["--forward=nan"], "forward is [nan"),
        (["--out=picture.nothing"], "nothing"),
        (["--forward=0", "--backward=0", "--weight=0", "--out=x.png"], "all times are 0"),
    ],
)
def test_plan_says_what_is_wrong(argv, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command.main(argv) == 2
    out, err = capsys.readouterr()
    assert words in err and not out
    assert len(err.splitlines()) == 1


def test_plan_refuses_options_that_it_does_not_have(capsys):
    for argv in (
        ["--schedule=2f2b"], ["--stages=two"], ["--schedule=1f1b", "--table=x.csv"],
        ["--config.batch.size=8"],
    ):  # fmt: skip
        with pytest.raises(SystemExit) as error:
            command.main(argv)
        assert error.value.code == 2
        assert "error:" in capsys.readouterr().err


# ------------------------------------------------------------------------------ a config's pipeline

LLAMA = [f"--config={ROOT}/configs/llama3_8b.py", "--chip=v5p", "--stages=4"]
MICROBATCHES_8 = ["--microbatches=8", "--config.batch.size=64"]

# Two layers see the whole row, the others eight tokens of it.
UNEVEN = """
from llmx import config
from llmx.model import families


def get_config():
    run = config.default()
    run.model = families.preset(
        "gemma3", vocab_size=300, num_layers=6, window=8, max_positions=131072,
        layer_pattern=("global", "global", *["local"] * 4),
    )
    run.mesh.stage, run.mesh.data = 2, 1
    run.batch.size, run.batch.accumulation, run.batch.sequence_length = 4, 4, 131072
    return run
"""


def planned(argv, capsys):
    """The JSON report, and the text."""
    assert command.main([*argv, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert command.main(argv) == 0
    return report, capsys.readouterr().out


def test_a_configs_pipeline_is_cut_by_its_layers(capsys):
    report, out = planned([*LLAMA, *MICROBATCHES_8], capsys)
    assert (report["name"], report["stages"], report["microbatches"]) == ("1f1b", 4, 8)
    assert report["bubble"] == pytest.approx(report["closed_form"]["bubble"])
    best, equal = report["cuts"]["planned"], report["cuts"]["equal"]
    # Stages share embedding and head, so equal layers are best.
    assert best["layers"] == equal["layers"] == [8, 8, 8, 8]
    assert best["barriers"] == equal["barriers"] == report["step_time"]["barriers"]
    assert "the equal cut is as fast: leave pipeline.layers out" in out
    assert "on stage4 x fsdp8; remat full; 8 microbatches of 8,192 tokens" in out
    assert "at 50% (--utilization) of the 459 TFLOP/s in bfloat16 of TPU v5p" in out
    assert "100 GB/s (one link of TPU v5p; --bandwidth)" in out
    assert "block 8 to block 15" in out and "1/4 of embedding and head" in out


def test_times_are_flops_over_what_the_devices_reach(capsys):
    flags = [
        *LLAMA,
        *MICROBATCHES_8,
        "--bandwidth=1e6",
        "--config.remat=none",
        "--config.loss.chunks=2",
    ]
    report, out = planned([*flags, "--utilisation=0.25"], capsys)
    llama = families.preset("llama3_8b")
    parts = costs.forward_flops_by_part(llama, sequence_length=8192)
    seconds = {name: 3 * flops * 8192 / (0.25 * 459e12) for name, flops in parts.items()}
    head = seconds.pop("head")
    # 8 + 3 times a stage's layers, and 8 times its share of a head whose logits are made again.
    expected = 11 * sum(seconds.values()) / 4 + 8 * (4 / 3) * head / 4
    assert report["step_time"]["barriers"] == pytest.approx(expected, rel=1e-6)
    # Of 4 x 8 devices; they reach 0.25 of the peak in what they compute, which HFU counts.
    reached = report["cuts"]["planned"]
    computed = 8 * (sum(seconds.values()) + 4 / 3 * head) / 4
    assert reached["hfu"] == pytest.approx(0.25 * computed / expected)
    causal = costs.training_flops_per_token(llama, sequence_length=8192)
    assert reached["mfu"] == pytest.approx(64 * 8192 * causal / expected / 32 / 459e12)
    assert f"MFU {reached['mfu']:.1%} (full {reached['mfu_full']:.1%}, HFU " in out
    # Tensor parallelism shares the work of a replica.
    split, _ = planned([*flags, "--utilisation=0.25", "--config.mesh.tensor=2"], capsys)
    assert split["step_time"]["barriers"] == pytest.approx(expected / 2, rel=1e-6)


def test_a_device_has_room_for_the_longest_part(capsys):
    flags = [*LLAMA, *MICROBATCHES_8, "--config.model.num_layers=30"]
    report, _ = planned([*flags, "--config.pipeline.layers=(12, 6, 6, 6)"], capsys)
    cuts = report["cuts"]
    assert cuts["config"]["layers"] == [12, 6, 6, 6]
    first, block, *_, last = costs.parameters_by_layer(families.preset("llama3_8b"))
    for name, longest in (("planned", 8), ("equal", 8), ("config", 12)):
        memory = cuts[name]["memory"]
        norms = (2 * longest + 1) * 4096  # whole on each device; the rest over fsdp8
        matrices = longest * (block - 2 * 4096) + (first + last - 4096) / 4
        held = matrices / 8 + norms
        state = {"parameters": 4 * held, "optimizer": 8 * held, "gradients": 4 * held}
        # 7 microbatches of 8192 tokens of which a layer keeps its input.
        for part, expected in (state | {"kept": 7 * 8192 * 4096 * 2 * longest}).items():
            assert memory[part] == pytest.approx(expected, rel=1e-6), (name, part)
        assert cuts[name]["memory_bytes"] == sum(memory.values())
    assert cuts["config"]["barriers"] > 1.3 * cuts["planned"]["barriers"]


def test_a_device_does_not_hold_moments_that_the_host_has(capsys):
    flags = [*LLAMA, *MICROBATCHES_8]
    here, there = (
        planned([*flags, *more], capsys)[0]["cuts"]["planned"]["memory"]
        for more in ([], ["--config.offload.optimizer=True"])
    )
    # Those of the last norm stay, as of all that has one dimension.
    assert here["optimizer"] > 2 * 4 * 4096 and there == here | {"optimizer": 2 * 4 * 4096}


def test_each_cut_is_priced_with_the_remat_of_its_chunks(capsys):
    """Of the first six layers of each chunk inputs are saved, of the others what products gave."""
    flags = [*LLAMA, *MICROBATCHES_8, "--config.model.num_layers=24"]
    cut = "--config.pipeline.layers=(6, 6, 6, 6)"
    full = planned([*flags, cut], capsys)[0]["cuts"]
    ranges = planned([*flags, cut, "--config.remat=:6=full,dots"], capsys)[0]["cuts"]
    for figure in ("memory_bytes", "barriers", "hfu"):
        assert ranges["equal"][figure] == pytest.approx(full["equal"][figure])
    # One with longer chunks saves more and repeats less.
    uneven = [*flags, "--config.pipeline.layers=(12, 4, 4, 4)"]
    full = planned(uneven, capsys)[0]["cuts"]
    report, _ = planned([*uneven, "--config.remat=:6=full,dots"], capsys)
    ranges = report["cuts"]
    assert ranges["config"]["memory_bytes"] > full["config"]["memory_bytes"]
    assert ranges["config"]["barriers"] < full["config"]["barriers"]
    computed, of_full = (
        cuts["config"]["hfu"] * cuts["config"]["barriers"] for cuts in (ranges, full)
    )
    assert computed < 0.99 * of_full
    for figure in ("memory_bytes", "barriers", "hfu"):
        assert ranges["equal"][figure] == pytest.approx(full["equal"][figure])


def test_products_are_kept_until_their_weight_gradients(capsys):
    flags = [*LLAMA, *MICROBATCHES_8, "--memory=1000"]
    reports = [planned([*flags, f"--schedule={name}"], capsys)[0] for name in ("gpipe", "zb_h1")]
    plain, split = (report["cuts"]["planned"]["memory"] for report in reports)
    # 8 microbatches of inputs; 4 of inputs and 4 of factors, in bf16, of these one slot more for
    # stages without an operation. D, N H and F are 4096, 4096 and 14336 wide, K H is 1024.
    factors = 2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336)  # q, out; k, v; MLP
    assert plain["factors"] == 0 and split["factors"] == 8 * 2 * 8192 * 5 * factors
    assert plain["kept"] - split["kept"] == 8 * 2 * 8192 * 4 * 4096


def test_a_fast_cut_that_does_not_fit_gives_way_to_one_that_does(tmp_path, capsys):
    path = tmp_path / "uneven.py"
    path.write_text(UNEVEN)
    flags = [f"--config={path}", "--chip=h100", "--config.remat=none"]
    free = planned(flags, capsys)[0]["cuts"]
    assert max(free["planned"]["layers"]) > max(free["equal"]["layers"])
    most, least = (free[name]["memory_bytes"] for name in ("planned", "equal"))
    within = planned([*flags, f"--memory={(least + 1) / 2**30}"], capsys)[0]["cuts"]
    assert within["planned"]["memory_bytes"] <= least < most
    assert command.main([*flags, f"--memory={(least - 1) / 2**30}"]) == 2
    assert "is too little: the model chunks of 1f1b" in capsys.readouterr().err


def test_layers_that_differ_are_cut_unevenly(tmp_path, capsys):
    path = tmp_path / "uneven.py"
    path.write_text(UNEVEN)
    flags = [f"--config={path}", "--chip=h100", "--utilization=0.4"]
    report, out = planned(flags, capsys)
    best, equal = report["cuts"]["planned"], report["cuts"]["equal"]
    assert equal["layers"] == [3, 3] and best["layers"] == [1, 5]
    # A stage computes the slots of the longest: four empty ones, as local layers, behind the first.
    gain = equal["barriers"] / best["barriers"]
    assert 1.3 < gain < 2
    line = f'--config.pipeline.layers="{tuple(best["layers"])}"   {gain:.3f} x as fast'
    assert line in out
    # What is to be pasted is taken, and gives that time.
    again, _ = planned([*flags, line.split("   ")[0].replace('"', "")], capsys)
    assert again["cuts"]["config"] == best


@pytest.mark.parametrize("name", ["gpipe", "interleaved_1f1b", "zb_h1", "zb_v", "pipedream_2bw"])
def test_every_schedule_has_times_of_a_configs_layers(name, capsys):
    report, out = planned([*LLAMA, *MICROBATCHES_8, f"--schedule={name}"], capsys)
    table = SCHEDULES[name](4, 8)
    assert report["name"] == name and len(report["cuts"]["planned"]["layers"]) == table.num_chunks
    assert report["step_time"]["free_running"] <= report["step_time"]["barriers"]
    assert ("planner's formula" in out) == (name in ("gpipe", "pipedream_2bw"))
    # Both steps' weights behind each other, and those of the batch in flight.
    memory = report["cuts"]["planned"]["memory"]
    assert memory["versions"] == memory["parameters"] * (name == "pipedream_2bw")
    assert (memory["in_flight"] > memory["parameters"]) == (name == "pipedream_2bw")


def seconds_of(option):
    return option["step_time"]


def test_what_is_recommended_is_the_fastest_that_fits(capsys):
    report, out = planned([*LLAMA, *MICROBATCHES_8, "--memory=30"], capsys)
    options, best = report["options"], report["best"]
    fitting = [option for option in options if option["memory_bytes"] <= 0.95 * 30 * 2**30]
    assert fitting == [option for option in options if option["fits"]] and fitting != options
    assert best == min(fitting, key=seconds_of)
    assert {option["schedule"] for option in options} == {*SCHEDULES} - {"pipedream_2bw"}
    assert report["chosen"]["schedule"] == "1f1b" and report["chosen"] in options
    assert f"use {best['flags']}" in out
    gain = report["chosen"]["step_time"] / best["step_time"]
    assert f"warning: 1f1b with remat='full' takes {gain:.2f} x the time of" in out
    # The flags give what they promise, and then nothing is better.
    flags = [*LLAMA, *MICROBATCHES_8, "--memory=30", *best["flags"].split()]
    again, out = planned(flags, capsys)
    assert again["chosen"]["step_time"] == pytest.approx(best["step_time"])
    assert again["chosen"]["memory_bytes"] == best["memory_bytes"]
    assert again["best"] == again["chosen"] and not again["warning"] and "use --" not in out


def test_zero_bubble_is_recommended_only_where_it_is_faster(capsys):
    """Its ticks last as long as the longest operation, with full remat a backward one of two."""
    flags = [*LLAMA, "--microbatches=16", "--config.batch.size=128", "--memory=1000"]
    report, _ = planned(flags, capsys)
    by_name = lambda name, text: next(  # noqa: E731
        seconds_of(option)
        for option in report["options"]
        if (option["schedule"], option["remat"]) == (name, text)
    )
    assert by_name("zb_h1", "full") > by_name("1f1b", "full")
    # Without remat and with few scores the three operations take equally long.
    report, _ = planned([*flags, "--config.batch.sequence_length=512"], capsys)
    assert by_name("zb_h1", "none") < by_name("1f1b", "none")
    chosen, _ = planned([*flags, "--schedule=zb_h1"], capsys)
    assert chosen["best"] == min(
        (option for option in chosen["options"] if option["fits"]), key=seconds_of
    )
    assert "warning: zb_h1 with remat='full' takes" in chosen["warning"]


def test_nothing_is_recommended_that_gpus_cannot_run(capsys):
    flags = ["--schedule=1f1b", "--config.mesh.sequence=2", "--config.mesh.fsdp=4"]
    mixing = {"zb_h1", "zb_v", "dual_pipe_v"}
    for chip, expected in (("h100", set()), ("v5p", mixing)):
        report, _ = planned(
            [LLAMA[0], f"--chip={chip}", *LLAMA[2:], *MICROBATCHES_8, *flags], capsys
        )
        assert {option["schedule"] for option in report["options"]} & mixing == expected


def test_a_configs_pipeline_is_drawn_and_written(capsys, tmp_path):
    csv, png = tmp_path / "mine.csv", tmp_path / "mine.png"
    flags = [*LLAMA, "--config.batch.size=32", "--microbatches=4"]
    assert command.main([*flags, "--schedule=gpipe", f"--csv={csv}", f"--out={png}"]) == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    named = planned([*flags, "--schedule=gpipe"], capsys)[0]["step_time"]
    assert planned([*flags, f"--table={csv}"], capsys)[0]["step_time"] == named


def test_pipedreams_own_plan_has_the_head_at_the_end(capsys):
    flags = [*LLAMA, "--microbatches=8", "--replicate"]
    report, out = planned([*flags, "--devices=4", "--bandwidth=50"], capsys)
    assert report["planned"]["layers"] == [8, 9, 9, 6]
    assert report["equal"]["layers"] == [8, 8, 8, 8]
    assert report["planned"]["step_time"] < report["equal"]["step_time"]
    assert f"planned: MFU {report['planned']['mfu']:.1%} (full " in out
    assert 0 < report["equal"]["mfu"] < report["planned"]["mfu"] < 0.5
    assert "llmx.train does not run this plan" in out and "pipeline.layers=" not in out
    free, _ = planned([*flags[:-3], "--microbatches=8", "--replicate", "--devices=6"], capsys)
    assert sum(free["planned"]["replicas"]) <= 6


def test_layers_are_timed_on_this_machine(tmp_path, capsys):
    path = tmp_path / "small.py"
    path.write_text(UNEVEN.replace("131072", "64"))
    flags = [f"--config={path}", "--measure", "--bandwidth=1", "--config.precision=fp32"]
    assert command.main(flags) == 0
    out = capsys.readouterr().out
    assert "times      measured on this machine (cpu)" in out
    assert "in lockstep" in out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--chip=v9"], ["--chip=v9 is unknown: use one of v4, v5e, v5p"]),
        (["--chip=v5p", "--memory=1"], ["--memory=1 GiB is too little", "use more stages"]),
        (["--chip=v5p", "--versions=2"], ["--versions without --replicate: the schedule says"]),
        (["--chip=v5p", "--forward=1"], ["--forward with --config: times come from the layers"]),
        (["--chip=v5p", "--bandwidth=0"], ["--bandwidth=0 must be at least 1e-06 and at most"]),
        (["--chip=v5p", "--memory=inf"], ["--memory=inf must be at least 0.001 and at most 1e+06"]),
        (["--chip=v5p", "--memory=1e300"], ["--memory=1e+300 must be at least 0.001"]),
        (["--chip=v5p", "--utilization=50"], ["--utilization=50 must be at least 0.001 and at m"]),
        (["--chip=v5p", "--utilization=1e-300"], ["--utilization=1e-300 must be at least 0.001"]),
        (
            ["--chip=v5p", "--replicate", "--devices=100000"],
            ["--devices=100000 with --replicate: of 32 layers a plan is found for at most 1986"],
        ),
        (
            ["--chip=v5p", "--schedule=zb_v", "--memory=1"],
            ["with one layer's weight gradients deferred", "use more stages or devices"],
        ),
        (
            ["--chip=v5p", "--memory=12", "--config.remat=none"],
            ["--memory=12 GiB is too little", "; what fits: --config.", "--config.remat="],
        ),
        (["--chip=v5p", "--stages=5"], ["does not divide over 5 = stage5"]),
        (["--chip=v5p", "--stages=1"], ["give --machine NAME", "mesh.stage=1 is none"]),
        (["--chip=v5p", "--table=none.csv"], ["pipeline.table='none.csv' cannot be read"]),
        (["--chip=v4", "--config.mesh.across_slices=('stage',)"], ["give --bandwidth"]),
        (["--chip=v5p", "--replicate"], ["--replicate needs --devices=N"]),
        (["--chip=v5p", "--replicate", "--devices=8", "--schedule=zb_h1"], ["planner knows gpipe"]),
        (["--chip=v5p", "--config.batch.sise=1"], ["did you mean batch.size?"]),
        (["--measure"], ["--config needs --chip=NAME", "--measure with --bandwidth"]),
    ],
)
def test_plan_says_what_is_wrong_with_a_config(argv, words, capsys):
    assert command.main([LLAMA[0], "--stages=4", *argv]) == 2
    out, err = capsys.readouterr()
    assert not out
    for word in words:
        assert word in err


@pytest.mark.parametrize(
    "argv",
    [
        ["--machine=h100:8"],
        ["--machine=v5p:2x2x2", "--config.remat=none"],
        ["--machine=h100:8", "--search"],
        ["--machine=h100:8", "--config.mesh=auto"],
        ["--chip=v5p", "--stages=2"],
    ],
    ids=" ".join,
)
def test_mixtures_are_refused_and_not_counted_as_dense(argv, capsys):
    config = ROOT / "configs/quickstart_experts.py"
    assert command.main([f"--config={config}", *argv]) == 2
    printed = capsys.readouterr().err
    assert "model.num_experts=8: " in printed and "not count routed experts" in printed


def test_options_of_a_config_need_one(capsys):
    assert command.main(["--chip=v5p", "--replicate"]) == 2
    assert "--chip, --replicate without --config" in capsys.readouterr().err


@pytest.mark.parametrize("family", ["v5p", "tpu7x", "h100", "a100_40gb"])
def test_both_reports_admit_the_same(family, capsys):
    """`--chip` and `--machine`: one share of the same bytes of a device."""
    sizes = ["--config.mesh.stage=2", "--config.mesh.data=1", "--config.mesh.fsdp=-1",
             "--config.batch.accumulation=8", "--config.batch.size=64", "--json"]  # fmt: skip
    argv = [f"--config={ROOT}/configs/gpt2_124m.py", *sizes]
    shape = "2x2x1" if family in ("v5p", "tpu7x") else "8"
    command.main([*argv, f"--machine={family}:{shape}"])
    memory = json.loads(capsys.readouterr().out)["memory"]
    usable = stage_costs.usable_bytes(stage_costs.chip_named(family))
    assert usable == memory["limit"] and memory["admitted"] == search.ADMITTED
    assert command.main([*argv[:-1], f"--chip={family}", "--devices=8"]) == 0
    assert f"what fits in {search.ADMITTED * usable / 2**30:.2f} GiB" in capsys.readouterr().out


def test_a_run_that_does_not_fit_says_what_to_change(capsys):
    flags = ["--config", str(ROOT / "configs" / "llama3_70b.py"), "--machine=h100:8"]
    flags += ["--config.mesh.fsdp=8", "--config.mesh.tensor=1", "--config.batch.accumulation=1"]
    assert command.main(flags) == 1
    out = capsys.readouterr().out
    assert "DOES NOT FIT" in out and "more than is admitted" in out
    assert "to fit: 80.00 GiB, 34% of the peak, are for saved activations: another --config" in out
    assert command.main([*flags, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)["advice"]
    assert any("--config.offload.optimizer" in line for line in told)
    smaller = [*flags, "--config.model.num_layers=4", "--config.batch.size=8"]
    assert command.main(smaller) == 0
    assert "to fit" not in capsys.readouterr().out


def test_rings_that_gpus_refuse_are_no_report(capsys):
    """As `llmx.aot` and the run refuse them; TPUs take them."""
    flags = (
        "mesh.stage=4", "mesh.sequence=2", "mesh.data=1", "mesh.fsdp=1", "attention.ulysses=1",
        "batch.accumulation=8", "batch.size=16", "model.num_layers=8", "data.train_tokenizer=0",
        "mesh.across_slices=()", "sharding.layout=zero1",
    )  # fmt: skip
    given = ["--config", str(ROOT / "configs" / "llama3_8b.py"), *(f"--config.{f}" for f in flags)]
    for machine, schedule, refused in (
        ("h100:8", "zb_h1", True), ("h100:8", "1f1b", False), ("v5p:2x2x2", "zb_h1", False),
    ):  # fmt: skip
        args = [*given, "--machine", machine, f"--config.pipeline.schedule={schedule}"]
        assert (command.main(args) == 2) == refused
        assert ("a ring inside a branch" in capsys.readouterr().err) == refused


def test_a_run_that_would_not_begin_does_not_fit(tmp_path, capsys):
    """With a layer's weight gradients deferred it may take nine tenths of a device; of a run that
    begins a report admits more."""
    flags = ["--config", str(ROOT / "configs" / "llama3_8b.py"), "--machine=small:2x2x1"]
    flags += ["--config.mesh.stage=2", "--config.mesh.fsdp=2", "--config.model.num_layers=8"]
    flags += ["--config.pipeline.schedule=zb_h1", "--config.batch.accumulation=4"]
    flags += ["--config.mesh.across_slices=()"]

    def report(device_bytes, *more):
        row = {"name": "small", "base": "v5p", "usable_bytes": device_bytes}
        path = tmp_path / "small.json"
        path.write_text(json.dumps(row | {"hbm_bytes": device_bytes}))
        code = command.main([*flags, f"--hardware={path}", *more])
        return code, capsys.readouterr().out

    _, of_one_layer = report(2**33, "--json")
    peak = json.loads(of_one_layer)["memory"]["peak"]
    code, told = report(int(peak / 0.93), "--json")
    told = json.loads(told)
    assert code == 1 and told["memory"]["peak"] == peak
    assert peak < search.ADMITTED * told["memory"]["limit"]
    code, text = report(int(peak / 0.93))
    assert code == 1 and ": REFUSED" in text and "the run is refused: pipeline.schedule" in text
    assert "to fit: The run is refused" in text
    code, text = report(int(peak / 0.89))
    assert code == 0 and "DOES NOT FIT" not in text and "refused" not in text
