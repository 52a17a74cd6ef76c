"""Which remat fits a budget of memory with the least recomputation: chosen, and confirmed.

Policies are put in a row, from what saves least to what saves most: of a pipeline inputs of model
chunks, then segments, then inputs of layers, then one more of the named values at a time, the one
first that spares most FLOPs per byte. Between two neighbours of the row the first n layers have the
first and the others the second. So all candidates are in one order, in which memory grows and
recomputation falls. Their memory is that of a compiled one and the bytes that they save more or
less, at first by count and then as compiled programs differ. A few compilations find the last that
fits.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import NamedTuple

from llmx.aot.report import size
from llmx.config import Config, utilization
from llmx.model import costs, precision, remat, remat_costs
from llmx.pipeline import schedule
from llmx.pipeline.schedule import BACKWARD, FORWARD
from llmx.runtime import device_memory
from llmx.runtime.agreement import Peers

ENOUGH = 0.9  # of the budget: a program that holds as much is taken
_AIM = 0.97  # of the budget, where a program is expected to be
MOST_TRIES = 8
_GIB = 2**30


class Candidate(NamedTuple):
    """A choice of remat."""

    text: str  # the config's `remat`
    saved: float  # bytes that a device saves, by count
    recomputed: float  # FLOPs per token


class Trial(NamedTuple):
    """A candidate that was compiled."""

    number: int  # in the row
    candidate: Candidate
    peak: int  # bytes of a device


@dataclasses.dataclass(frozen=True)
class Choice:
    """What was chosen, and what it took."""

    budget: int  # bytes of a device
    chosen: Trial
    trials: tuple[Trial, ...]
    forward: float  # FLOPs per token of a forward pass

    @property
    def lines(self) -> list[str]:
        """The choice and its cost as text."""
        candidate, peak = self.chosen.candidate, self.chosen.peak
        tried = [f"{trial.candidate.text}: {size(trial.peak)}" for trial in self.trials]
        return [
            f"remat={candidate.text!r}: {size(peak)} of a budget of "
            f"{size(self.budget)}; the backward pass repeats "
            f"{candidate.recomputed / self.forward:.1%} of the forward pass",
            f"tried {len(tried)}: {', '.join(tried)}",
        ]


def choose(
    run: Config, peak_of: Callable[[str], int], budget: int, log: Callable[[str], None]
) -> Choice:
    """The candidate that recomputes least of those whose program fits.

    Args:
      run: a resolved config.
      peak_of: compiles the run with a `remat` and returns the most that a device holds, in bytes.
      budget: bytes of a device.

    Raises ValueError where nothing fits.
    """
    row, trials = candidates(run), {}
    number = next(n for n, one in enumerate(row) if one.text == FULL)
    while number is not None and len(trials) < MOST_TRIES:
        trial = Trial(number, row[number], peak_of(row[number].text))
        log(f"remat={trial.candidate.text}: {size(trial.peak)} of {size(budget)}")
        trials[number] = trial
        number = following(row, trials, budget)
    fitting = [trial for trial in trials.values() if trial.peak <= budget]
    if not fitting:
        least = min(trials.values(), key=lambda trial: trial.peak)
        raise ValueError(
            f"memory_budget: {size(budget)} is less than any remat needs: "
            f"remat={least.candidate.text!r} holds {size(least.peak)}; use a larger budget, more "
            "devices, batch.accumulation, offload.optimizer=True or offload.saves=('input',)"
        )
    best = max(fitting, key=lambda trial: trial.number)
    forward = costs.forward_flops_per_token(run.model, sequence_length=run.batch.sequence_length)
    return Choice(budget, best, tuple(trials.values()), forward)


def on_these_devices(run: Config, log: Callable[[str], None], peers: Peers | None = None) -> Config:
    """A resolved config whose remat is chosen by compiling the step for the devices of the job.

    Each phase of the run is compiled; the one that holds most has to fit. `memory_budget=0` is the
    least memory that a device has, of all `peers`, each of which must call this; None = this
    process is the only one. Raises ValueError where nothing fits, or where a device does not say
    how much memory it has.
    """
    import jax

    from llmx.config.recipe import make_recipe

    platform = jax.local_devices()[0].platform

    def peak_of(text: str) -> int:
        recipe = make_recipe(with_remat(run, text))
        phases = recipe.strategy.timetable.phases_from(0)
        return max(_peak_of_phase(recipe, phase, platform) for phase in phases)

    limit = int(run.memory_budget * _GIB) or _least_limit(peers or Peers())
    choice = choose(run, peak_of, limit, log)
    for line in choice.lines:
        log(f"budget: {line}")
    return with_remat(run, choice.chosen.candidate.text)


def _peak_of_phase(recipe, phase: str, platform: str) -> int:
    """The most that a device holds in a step of this phase, in bytes, compiled."""
    import jax

    from llmx.step import step

    with jax.set_mesh(recipe.mesh):
        lowered = step.make_train_step(recipe, phase).lower(recipe.abstract, recipe.abstract_batch)
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            refusal = device_memory.parse_out_of_memory(str(error))
            if refusal is None:
                raise
            return refusal.needed
    return device_memory.device_peak(compiled.memory_analysis(), platform)


def _least_limit(peers: Peers) -> int:
    """Bytes that a program may use of any device of the job."""
    import jax

    mine = min(map(device_memory.limit, jax.local_devices()))
    least = min(map(int, peers.exchange("memory_limit", str(mine))))
    if not least:
        raise ValueError(
            "remat='budget' with memory_budget=0: a device of this run does not say how much "
            "memory it has; give memory_budget in GiB"
        )
    return least


def following(row: list[Candidate], trials: dict[int, Trial], budget: int) -> int | None:
    """The number of the next candidate to compile; None: the search has ended.

    Between the largest that fits and the smallest that does not, where the bytes that are left for
    it end: measured between these two, or by count where one of them is missing.
    """
    known = sorted(trials.values())
    below = max((one for one in known if one.peak <= budget), default=None)
    above = min((one for one in known if one.peak > budget), default=None)
    low = below.number + 1 if below else 0
    high = above.number - 1 if above else len(row) - 1
    if low > high or (below and below.peak >= ENOUGH * budget):
        return None
    slope = 1.0
    if below and above:
        slope = (above.peak - below.peak) / (above.candidate.saved - below.candidate.saved)
    elif len(known) > 1:
        first, last = known[0], known[-1]
        slope = (last.peak - first.peak) / (last.candidate.saved - first.candidate.saved)
    nearest = below or above
    room = (_AIM * budget - nearest.peak) / max(slope, 0.1)
    inside = [n for n in range(low, high + 1) if row[n].saved <= nearest.candidate.saved + room]
    return max(inside, default=low)


FULL = "full"


def candidates(run: Config) -> list[Candidate]:
    """All candidates, from what saves least to what saves most.

    "none" is none of them with `offload.saves` or `offload.parameters`, which do not go with it.
    """
    chunks = utilization.chunks_of(run) or (run.model.num_blocks,)
    layers, times, texts = max(chunks), _times_saved(run), []
    for text, richer in itertools.pairwise([*_policies(run), "none"]):
        texts += [text, *(f":{layers - n}={text},{richer}" for n in range(1, layers))]
    texts.append("none")
    if run.mesh.stage > 1:  # by itself: rules follow it, none goes before it
        texts.insert(0, remat.PART)
    kinds = sorted(set(run.model.layer_kinds))
    texts = [text for text in texts if not remat.problems(text, run.offload, kinds)]
    # Of some mixtures a richer one saves less: from the end, each must save less than all behind.
    found = []
    for text in reversed(texts):
        candidate = _candidate(run, text, chunks, times)
        if not found or candidate.saved < found[-1].saved:
            found.append(candidate)
    return found[::-1]


def _times_saved(run: Config) -> int:
    """How many pairs of model chunk and microbatch a device saves at one time."""
    if run.mesh.stage == 1:
        return 1
    table = utilization.table_of(run)
    return int(schedule.held(table, FORWARD, BACKWARD).max())


def _policies(run: Config) -> list[str]:
    """For all layers alike, from what saves least to what saves most. What is offloaded is saved
    anyway, and named by none."""
    model, length, offloaded = run.model, run.batch.sequence_length, run.offload.saves
    sizes = remat_costs.bytes_of_saves(model, _compute_bytes(run))
    scores = sum(costs.scores_by_block(model, length, True)) / model.num_layers

    def repeated(*names: str) -> float:
        policy = remat.Policy(frozenset(names))
        return remat_costs.recomputed_flops(model, policy, scores, offloaded)

    rotated = [] if model.qk_norm else [remat.QUERY_KEY_VALUE]
    units = [remat.ATTENTION, remat.ATTENTION_OUT, *rotated, remat.GATE, remat.UP, remat.MLP_OUT]
    units += [remat.QUERY, remat.KEY, remat.VALUE] if model.qk_norm else []
    spared = {name: repeated() - repeated(name) for name in units}
    units = [name for name in units if spared[name]]
    units.sort(key=lambda name: -spared[name] / sizes[name])
    # Then what spares no product.
    units += [remat.HIDDEN, remat.MLP_NORM, remat.ATTENTION_NORM]
    units += [] if rotated else [remat.QUERY_KEY_VALUE]
    units = [name for name in units if name not in offloaded]
    return ["sqrt", FULL, *("+".join(units[:n]) for n in range(1, len(units) + 1))]


def _compute_bytes(run: Config) -> int:
    return precision.POLICIES[run.precision].compute.itemsize


def _candidate(run: Config, text: str, chunks: tuple[int, ...], times: int) -> Candidate:
    """The candidate, counted; `times`: that a device saves a model chunk."""
    num_bytes, offloaded = _compute_bytes(run), run.offload.saves
    tokens = utilization.tokens_of(run) / (run.mesh.sequence * run.mesh.tensor)
    of_chunk = remat_costs.saved_bytes_of_chunk(
        run.model, text=text, compute_bytes=num_bytes, chunks=chunks, offloaded=offloaded
    )
    # And what the layers of the largest segment, or with "part" of a chunk, save when they are run
    # again, of one microbatch.
    chosen = remat_costs.policies(run.model, text, chunks)
    again = [
        sum(
            remat_costs.saved_bytes(run.model, policy, num_bytes, offloaded)
            for policy in chosen[first:end]
        )
        for first, end in remat_costs.segments(run.model, text, chunks)
    ]
    if remat.keeps_input(text):
        again.append(
            remat_costs.saved_bytes_of_chunk(
                run.model, text=remat.inside(text), compute_bytes=num_bytes, chunks=chunks,
                offloaded=offloaded,
            )
        )  # fmt: skip
    _, *by_flops, _ = remat_costs.recomputed_flops_by_layer(
        run.model, sequence_length=run.batch.sequence_length, text=text, loss_chunks=2,
        chunks=chunks, offloaded=offloaded,
    )  # fmt: skip
    saved = (times * of_chunk + max(again, default=0)) * tokens
    return Candidate(text, saved, sum(by_flops))


def with_remat(run: Config, text: str) -> Config:
    """The resolved run with `remat=text`, not "budget", and without memory_budget.

    `text` counts layers within each model chunk of a pipeline. It is not checked: a `text` that is
    wrong, or does not go with the run's `offload`, is an error where the run is resolved or traced.
    """
    return dataclasses.replace(run, remat=text, memory_budget=0.0)
