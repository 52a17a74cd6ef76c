"""A budget of memory: the candidates are in order, and the search ends at the last that fits."""

import copy
import itertools

import pytest
from support import runs

from llmx import config
from llmx.aot import budget, compiler
from llmx.config import checks, utilization
from llmx.model import families, remat, remat_costs
from llmx.runtime import device_memory
from llmx.runtime.agreement import Peers
from llmx.runtime.hardware import CHIPS

GIB = 2**30

MODELS = {
    "llama3": {}, "gpt2": {}, "qwen3": {}, "gemma3": dict(layer_pattern=("local", "global")),
    "deep": dict(num_layers=53),
}  # fmt: skip


def make_run(name: str, **keys) -> config.Config:
    sizes = dict(num_layers=13, width=64, mlp_dim=192, num_heads=4, num_kv_heads=4, head_dim=16)
    model = sizes | dict(vocab_size=257) | MODELS[name]
    family = "llama3" if name == "deep" else name
    return runs.make_config(
        family, model=model, batch__size=8, batch__sequence_length=64, remat="budget", **keys
    )


RUNS = [(name, {}) for name in MODELS]
RUNS += [("llama3", dict(mesh=dict(stage=2), batch__accumulation=4)),
         ("llama3", dict(mesh=dict(fsdp=2, tensor=2)))]  # fmt: skip


@pytest.mark.parametrize(("name", "keys"), RUNS)
def test_candidates_save_more_and_recompute_less(name, keys):
    run = make_run(name, **keys)
    row = budget.candidates(run)
    for one, richer in itertools.pairwise(row):
        assert one.saved < richer.saved
        assert one.recomputed >= richer.recomputed
    texts = [one.text for one in row]
    assert "full" in texts and texts[-1] == "none" and row[-1].recomputed == 0
    # Of a pipeline the least is a chunk's input, with few in flight not always less than segments.
    assert "sqrt" in texts[0] or (run.mesh.stage > 1 and texts[0] == "part")
    assert row[-2].recomputed == 0
    for text in texts:
        remat.parse(text, sorted(set(run.model.layer_kinds)))


def test_with_many_stages_a_chunks_input_is_the_least():
    """Of 8 chunks of 4 layers that are in flight, not one array each of segments of 2 layers."""
    run = make_run(
        "llama3", mesh=dict(stage=4), batch__accumulation=8, model__num_layers=16,
        pipeline__schedule="gpipe",
    )  # fmt: skip
    least, second, *_ = budget.candidates(run)
    assert least.text == "part"
    tokens, x_bytes = 64, 4 * 64
    assert least.saved == tokens * x_bytes * (8 + 4) < second.saved
    assert least.recomputed > second.recomputed


OFFLOAD = [
    ("llama3", dict(offload__saves=("input",))),
    ("llama3", dict(offload__saves=("gate", "up", "attention"))),
    ("gemma3", dict(offload__saves=("query", "mlp_out"))),
    ("qwen3", dict(offload__saves=remat.SAVES)),
    ("llama3", dict(offload__parameters=True)),
    ("deep", dict(offload__parameters=True, offload__saves=("input", "hidden"))),
]


@pytest.mark.parametrize(("name", "keys"), OFFLOAD)
def test_candidates_go_with_offload(name, keys):
    run = make_run(name, **keys)
    row = budget.candidates(run)
    assert "full" in [one.text for one in row]
    for one, richer in itertools.pairwise(row):
        assert one.saved < richer.saved and one.recomputed >= richer.recomputed
    for one in row:
        assert not set(run.offload.saves) & set(one.text.replace(",", "+").split("+"))
        assert not any(policy.saved is None for policy in remat_costs.policies(run.model, one.text))
        # As `llmx.aot` does with what it compiles.
        checks.resolve(copy.deepcopy(budget.with_remat(run, one.text)), 1)


PIPELINES = [
    dict(mesh=dict(stage=2), batch__accumulation=4),
    dict(mesh=dict(stage=2), batch__accumulation=4, pipeline__layers=(9, 4)),
    dict(mesh=dict(stage=2), batch__accumulation=2, pipeline__schedule="interleaved_1f1b",
         pipeline__virtual_stages=2),
    dict(offload__saves=("attention", "gate")),
]  # fmt: skip


@pytest.mark.parametrize("keys", PIPELINES)
def test_candidates_repeat_what_hfu_counts(keys):
    run = make_run("llama3", loss__chunks=1, **keys)
    for one in budget.candidates(run):
        flops = utilization.of(budget.with_remat(run, one.text), CHIPS["tpu_v5p"], 2)
        again = flops.flops_per_token["hfu"] - flops.flops_per_token["mfu"]
        assert one.recomputed == pytest.approx(again, abs=1e-6 * flops.flops_per_token["mfu"])


def test_saved_bytes_of_a_stage_are_of_its_longest_chunk():
    """Of three microbatches that a first stage of 1F1B in lockstep has in flight."""
    keys = dict(mesh=dict(stage=2), batch__accumulation=4, pipeline__layers=(9, 4))
    by_text = {one.text: one.saved for one in budget.candidates(make_run("llama3", **keys))}
    tokens, of_input = 2 * 64, 4 * 64
    assert by_text["full"] == 3 * tokens * 9 * of_input
    # Segments of three layers: their inputs, and those of the layers of one that is run again.
    assert by_text["sqrt"] == (3 * 3 + 3) * tokens * of_input


def test_full_and_none_are_counted_as_the_planner_does():
    run = make_run("llama3")
    by_text = {one.text: one for one in budget.candidates(run)}
    again = remat_costs.recomputed_flops_by_layer(
        run.model, sequence_length=64, text="full", loss_chunks=2
    )
    assert by_text["full"].recomputed == sum(again[1:-1])
    tokens, saved = 8 * 64, 4 * run.model.width * run.model.num_layers
    assert by_text["full"].saved == tokens * saved


class Machine:
    """Compiles nothing: memory is a state and a share of the bytes that are saved."""

    def __init__(self, run, *, state: float, share: float, bump=lambda number: 0.0):
        self.row = budget.candidates(run)
        self.numbers = {one.text: n for n, one in enumerate(self.row)}
        self.state, self.share, self.bump = state, share, bump
        self.compiled = []

    def peak_of(self, text: str) -> int:
        number = self.numbers[text]
        self.compiled.append(text)
        return int(self.state + self.share * self.row[number].saved * (1 + self.bump(number)))


@pytest.mark.parametrize("share", [0.4, 0.75, 1.0, 1.6])
@pytest.mark.parametrize("part", [0.02, 0.1, 0.35, 0.6, 0.9])
@pytest.mark.parametrize(("name", "keys"), RUNS[:1] + RUNS[3:6])
def test_the_search_uses_the_budget(name, keys, part, share):
    run = make_run(name, **keys)
    low, *_, high = (one.saved for one in budget.candidates(run))
    machine = Machine(run, state=2 * high, share=share)
    limit = int(machine.state + share * (low + part * (high - low)))
    choice = budget.choose(run, machine.peak_of, limit, lambda line: None)
    number = machine.numbers[choice.chosen.candidate.text]
    assert choice.chosen.peak <= limit
    following = [machine.peak_of(one.text) for one in machine.row[number + 1 : number + 2]]
    assert choice.chosen.peak >= budget.ENOUGH * limit or following > [limit]
    assert len(choice.trials) <= budget.MOST_TRIES


def test_all_that_fits_is_saved():
    run = make_run("llama3")
    machine = Machine(run, state=GIB, share=1.0)
    choice = budget.choose(run, machine.peak_of, 100 * GIB, lambda line: None)
    assert choice.chosen.candidate.text == "none" and len(choice.trials) <= 3
    assert "0.0% of the forward pass" in choice.lines[0]


def test_programs_that_are_not_as_counted():
    """Memory that goes up and down by several per cent beside the count."""
    run = make_run("llama3")
    machine = Machine(run, state=GIB, share=0.5, bump=lambda number: 0.06 * (-1) ** number)
    choice = budget.choose(run, machine.peak_of, int(1.006 * GIB), lambda line: None)
    assert choice.chosen.peak <= 1.006 * GIB and len(choice.trials) <= budget.MOST_TRIES


def test_nothing_fits():
    run = make_run("llama3")
    machine = Machine(run, state=GIB, share=1.0)
    with pytest.raises(
        ValueError, match=r"less than any remat needs: remat=.*sqrt.* holds"
    ) as error:
        budget.choose(run, machine.peak_of, GIB // 2, lambda line: None)
    assert "use a larger budget, more devices" in str(error.value)


def test_choices_that_others_have_to_make():
    with pytest.raises(ValueError, match=r"is chosen by llmx\.train and llmx\.aot"):
        remat.parse("budget", ("global",))
    with pytest.raises(config.ConfigError, match=r"memory_budget=3\.0 has no effect with remat"):
        runs.make_config("llama3", memory_budget=3.0)


def test_a_run_within_a_budget():
    """On the devices of this machine: the program of what was chosen is within the budget."""
    run, lines = make_run("llama3", mesh=dict(data=8)), []
    run.memory_budget = 1000.0  # GiB
    assert budget.on_these_devices(run, lines.append).remat == "none"
    peaks = [float(line.split(": ")[1].split()[0]) for line in lines if line.startswith("remat=")]
    assert "MiB" in lines[0] and peaks[0] < peaks[-1]
    run.memory_budget = (peaks[0] + peaks[-1]) / 2 / 1024
    chosen = budget.on_these_devices(run, lines.append)
    assert chosen.remat not in ("budget", "none") and run.remat == "budget"
    assert lines[-2].startswith(f"budget: remat={chosen.remat!r}")
    run.memory_budget = 0.0
    with pytest.raises(ValueError, match="does not say how much memory it has"):
        budget.on_these_devices(run, lines.append)


def test_a_run_with_offload_within_a_budget():
    run = make_run(
        "llama3", mesh=dict(data=8), offload__saves=("gate",), memory_budget=1000.0
    )  # fmt: skip
    chosen = budget.on_these_devices(run, lambda line: None)
    assert chosen.offload.saves == ("gate",) and chosen.remat == budget.candidates(run)[-1].text
    assert not checks.resolve(chosen, 8).memory_budget


def test_every_phase_of_a_run_is_within_the_budget(monkeypatch):
    """The warm-up holds more than the phase behind it, which alone would leave all saved."""
    run = make_run(
        "llama3", mesh=dict(data=8), sync__strategy="int8", sync__warmup_steps=3,
        memory_budget=1.0,
    )  # fmt: skip
    row, compiled = budget.candidates(run), []
    by_text = {one.text: one.saved for one in row}

    def peak_of_phase(recipe, phase, platform):
        text = recipe.loss.execution.remat
        compiled.append((text, phase))
        return int(GIB * by_text[text] / by_text["none"] * (1.5 if phase == "mean" else 0.5))

    monkeypatch.setattr(budget, "_peak_of_phase", peak_of_phase)
    chosen = budget.on_these_devices(run, lambda line: None).remat
    assert budget.ENOUGH <= 1.5 * by_text[chosen] / by_text["none"] <= 1
    phases = {phase for _, phase in compiled}
    assert len(phases) > 1 and "mean" in phases
    assert len(compiled) == len(set(compiled)) == len(phases) * len({text for text, _ in compiled})


class OtherProcess(Peers):
    """Peers with one other process, which has a device of 3 GiB."""

    def exchange(self, name: str, text: str) -> list[str]:
        return [text, str(3 * GIB)]


def test_processes_take_the_least_memory_of_all(monkeypatch):
    run, limits = make_run("llama3"), []
    monkeypatch.setattr(device_memory, "limit", lambda device: 4 * GIB)

    def choose(run, peak_of, limit, log):
        limits.append(limit)
        raise ValueError("chosen")

    monkeypatch.setattr(budget, "choose", choose)
    for peers in (None, Peers(), OtherProcess()):
        with pytest.raises(ValueError, match="chosen"):
            budget.on_these_devices(run, print, peers)
    assert limits == [4 * GIB, 4 * GIB, 3 * GIB]
    # One that does not know is an error in all.
    monkeypatch.setattr(device_memory, "limit", lambda device: 0)
    with pytest.raises(ValueError, match="a device of this run does not say how much memory"):
        budget.on_these_devices(run, print, OtherProcess())


@pytest.mark.aot
@pytest.mark.full_grid  # compiles several large programs
def test_a_program_for_an_absent_machine_within_a_budget():
    topology = "h100:4"
    run = config.default()
    run.model = families.preset(
        "llama3", num_layers=8, width=512, num_heads=4, num_kv_heads=2, head_dim=128, mlp_dim=2048,
        vocab_size=512, max_positions=2048,
    )  # fmt: skip
    run.mesh.data, run.mesh.fsdp = 1, 4
    run.batch.size, run.batch.sequence_length = 16, 2048
    tokens = 16 * 2048 // 4  # of a device

    def total(function, text, **sizes):
        return sum(function(run.model, text=text, loss_chunks=2, **sizes)[1:-1])

    # Half of what saving products and attention would take, beside the inputs of layers.
    full, rich = (
        tokens * total(remat_costs.saved_bytes_by_layer, text, compute_bytes=2)
        for text in ("full", "dots+attention")
    )
    alone = compiler.compile(budget.with_remat(run, "full"), topology).memory.peak
    limit = alone + (rich - full) // 2
    run.remat, run.memory_budget = "budget", limit / GIB
    result = compiler.compile(run, topology)
    assert alone < 0.85 * limit <= result.memory.peak <= limit
    by_remat = [
        total(remat_costs.recomputed_flops_by_layer, text, sequence_length=2048)
        for text in (result.run.remat, "full")
    ]
    assert by_remat[0] < by_remat[1]
    assert result.budget[0].startswith(f"remat={result.run.remat!r}")
