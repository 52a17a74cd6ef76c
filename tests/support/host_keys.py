"""What a config makes of a run on the host: files, lines, limits and what libraries are given.

Each function takes a config and a new folder, and returns something that can be compared: something
else where the run does something else.
"""

import contextlib
import itertools
import os
import pathlib
import shutil
import types
from unittest import mock

import jax
from support import traced_keys

from llmx import config as config_lib
from llmx import generate, sharding, train
from llmx.aot import budget as aot_budget
from llmx.checkpoint import (
    checkpointer,
    directory,
    grace,
    hf_formats,
    identity,
    local_tier,
    resume,
    writer,
)
from llmx.checkpoint import masks as saved_masks
from llmx.config import starting, table_checks
from llmx.data import tokenizers
from llmx.evaluate import during_training, held_out
from llmx.runtime import agreement, compiler_options, launch, metrics, plot, profiling, watchdog
from llmx.sharding import mesh
from llmx.step.transforms import masks
from llmx.sync import rounds
from llmx.tables import host_rows, row_optimizers

ALONE = agreement.Peers()


def files_in(folder):
    """Names of the files below it, and their sizes."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def saved(run, folder):
    """Where a run writes."""
    run.workdir = str(folder / run.workdir)
    config_lib.save_run(run)
    return files_in(folder)


def begun(run, folder):
    """What a run begins with: a model, its layers, whether another run's is taken; the step that it
    goes back to; masks."""
    run = starting.adopted(run)
    taken = {}
    if run.start_from:
        read = config_lib.read_saved(f"{run.start_from}/config.json")
        differs = identity.refusal_of_model(
            config_lib.to_json(read), run.model, allowed=run.start_changes
        )
        taken = {"differs": differs}
    return run.model, taken, resume.going_back_to(run)


def masked(run, folder):
    """Which run's masks are taken: here it is not there."""
    recipe = mock.MagicMock(constraints={masks.NAME: None})
    try:
        return saved_masks.begun(run, recipe, None, print)
    except ValueError as error:
        return str(error)


def exported(run, folder):
    """The config.json of an export."""
    try:
        return hf_formats.model_config_to_hf(run.model)
    except ValueError as error:
        return str(error)


def started(run, folder):
    """What JAX is given at the start of a process."""
    given = []
    joined = lambda *args, **kwargs: given.append((args, kwargs))  # noqa: E731
    clean = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    with (
        mock.patch.dict(os.environ, clean, clear=True),
        mock.patch.object(launch, "_set", lambda *pair: given.append(pair)),
        mock.patch.object(jax.distributed, "initialize", joined),
        mock.patch.object(jax.distributed, "is_initialized", lambda: False),
        mock.patch.object(launch, "note", given.append),
    ):
        launch.start(run.launch)
        return given, os.environ.get("XLA_FLAGS")


def compiled(run, folder):
    """Options of the compiler."""
    return compiler_options.wanted(run.launch, "TPU v5p", 8), launch.compiler_options(run.launch)


def placed(run, folder):
    """Which of the devices of two slices is where in the mesh."""
    sizes = {axis: vars(run.mesh)[axis] for axis in sharding.AXES}
    of = [dict(id=n, process_index=n // 4, slice_index=n // 4) for n in range(8)]
    devices = [types.SimpleNamespace(platform="cpu", device_kind="cpu", **each) for each in of]
    with mock.patch.object(mesh, "Mesh", lambda array, *args, **kwargs: array):
        array = sharding.make_mesh(sizes, devices=devices, across_slices=run.mesh.across_slices)
    return [device.id for device in array.flat]


def limits(run, folder):
    """How long each phase may take, before and after steps are measured."""
    found = []
    for median in (None, 1.0, 30.0):
        progress = types.SimpleNamespace(measured=median, median_step=lambda m=median: m)
        seconds = run.launch.watchdog_seconds
        dog = watchdog.Watchdog(run.watchdog, progress, ALONE, step_seconds=seconds)
        phases = ("step", "backend", "launch", "data", "restore", "compile", "evaluation", "save")
        found += [dog.on, *(dog.limit(phase) for phase in phases)]
    return found


def checkpoints(run, folder):
    """When a run saves, what it keeps, and what a failed save does."""
    deleted, ends = [], []
    with contextlib.ExitStack() as patched:
        patch = lambda *args: patched.enter_context(mock.patch.object(*args))  # noqa: E731
        patch(checkpointer, "is_intact", lambda root, step: True)
        gone = types.SimpleNamespace(is_alive=lambda: False)
        remove = lambda root, name: deleted.append(name) or gone  # noqa: E731
        patch(directory, "start_removing", remove)
        own = checkpointer.Checkpointer(str(folder), run.checkpoint, log=lambda text: None)
        patch(own, "steps", lambda: [100 * n for n in range(1, 11)])
        own._board = types.SimpleNamespace(rank=0, share=lambda key, value: value)
        due = [step for step in range(1, 1001) if own.due(step)]
        own._prune()
        for kind in (writer.FAILED, writer.DIFFERS):
            verdict = types.SimpleNamespace(kind=kind, text="", remedy="")
            own._save = types.SimpleNamespace(step=500, number=1, join=lambda v=verdict: v)
            try:
                own._end_save(500)
                ends.append(own._retry)
            except checkpointer.Halt as halt:
                ends.append((type(halt), halt.restore))
    return due, deleted, ends


def locally(run, folder):
    """When a run saves locally, and where."""
    opened = []
    with mock.patch.object(local_tier.LocalTier, "_open", lambda *args: opened.append(args[1:])):
        tier = local_tier.LocalTier(run.checkpoint, str(folder), ALONE, log=print)
    return len(opened), [step for step in range(1, 100) if tier.due(step)]


def ended(run, folder):
    """How long the end after SIGTERM may take."""
    job = types.SimpleNamespace(peers=ALONE, stop=types.SimpleNamespace(noticed=[], code=0))
    with mock.patch.object(grace, "GraceLimit") as limit:
        train.end_in_time(run, job, None, None)
    return limit.call_args.args


def evaluated(run, folder):
    """When a run is evaluated, on how much of what, with which questions."""
    recipe = traced_keys.recipe_of(run)
    dataset = types.SimpleNamespace(
        tokenizer=tokenizers.ByteTokenizer(), num_held_out_windows=9, fingerprint=""
    )
    asked = during_training.EvaluationData(run, recipe, dataset)
    told = []
    with (
        mock.patch.object(held_out, "losses") as losses,
        mock.patch.object(held_out, "extent_text", str),
        mock.patch.object(type(recipe.loss), "evaluated", lambda *args: None),
    ):
        files, asked.files = asked.files, []
        evaluation = during_training.Evaluation(run, recipe, asked, None)
        with contextlib.suppress(TypeError):
            evaluation._held_out(types.SimpleNamespace(averaged=0, frozen=0, extra=0))
        told = losses.call_args.kwargs["batches"]
    return [s for s in range(run.steps) if evaluation.due(s)], told, [f.questions for f in files]


def reported(run, folder):
    """Lines, records, event files and drawings of 200 steps with a spike."""
    lines, drawn = [], []
    losses = [3 + 0.01 * (n % 7) for n in range(200)]
    losses[150] = 9.0
    with (
        mock.patch.object(plot, "plot_all", lambda workdir: drawn.append(workdir) or []),
        mock.patch.object(metrics, "REFRESH_SECONDS", 1e9),
        mock.patch.object(metrics, "_duration", lambda seconds: "soon"),  # of a busy machine
        contextlib.redirect_stdout(types.SimpleNamespace(
            isatty=lambda: False, write=lines.append, flush=lambda: None)),
        metrics.Reporter(
            folder, run.metrics, total_steps=200, tokens_per_step=1, log=lines.append
        ) as reporter,
    ):  # fmt: skip
        for step, loss in enumerate(losses, 1):
            reporter.train(step, {"loss": loss})
            if reporter._drawing:
                reporter._drawing.result()
        records = reporter.recorded
    files = {name.partition(".")[0] for name in files_in(folder)}
    return lines, records, files, len(drawn)


def sampled(run, folder):
    """What a continuation is drawn with, at the end and by the command."""
    given = []
    coder = tokenizers.ByteTokenizer()
    loss = types.SimpleNamespace(merged=lambda *args: None, apply=None)
    with (
        mock.patch.object(generate.model_params, "without_stages", lambda *args: (None, None)),
        mock.patch.object(
            generate.sampling, "generate",
            lambda *args, **kwargs: given.append((args, kwargs)) or [[]],
        ),
    ):  # fmt: skip
        state = types.SimpleNamespace(averaged=0, frozen=0, extra=0)
        generate.show_sample(run, types.SimpleNamespace(loss=loss), state, coder, lambda text: None)
    names = ("max_tokens", "temperature", "top_k", "top_p")
    room = run.model.max_positions
    return given, generate._settings(types.SimpleNamespace(**dict.fromkeys(names)), run, room)


def profiled(run, folder):
    """The steps that are recorded."""
    found = []
    profile = profiling.Profile(run.profile, str(folder))
    with mock.patch.object(profile, "_auxiliary", lambda start, last: True):
        for step in range(1, 12):
            profile.before(step)
            found += [step] * profile.running
            if profile.ends(step):
                profile.close()
    return found


def met(run, folder):
    """Where a group of replicas meets the others, as which, and how long it waits."""
    strategy = traced_keys.recipe_of(run).strategy
    if not strategy.waits:
        return None
    own = strategy.begin.__self__
    state = types.SimpleNamespace(step=0, params={}, sync=types.SimpleNamespace(outer={}))
    found = []

    def files(*args):
        found.append(args[:2])
        raise InterruptedError

    with (
        mock.patch.object(rounds, "RoundFiles", files), contextlib.suppress(InterruptedError)
    ):  # fmt: skip
        own.begin(state, ALONE)
    looks = []
    own._files = types.SimpleNamespace(
        closed=looks.append, groups_in=lambda step: (set(), {0, 1}),
        close=lambda *args: args,
    )  # fmt: skip
    clock = itertools.count(0, 50)
    with (
        mock.patch.object(rounds.time, "monotonic", lambda: next(clock)),
        mock.patch.object(rounds.time, "sleep", lambda seconds: None),
    ):
        own._waited(10, lambda: None)
    return found, len(looks)


def budget(run, folder):
    """How much a device may hold."""
    with mock.patch.object(aot_budget, "choose") as choose:
        choose.return_value.lines, choose.return_value.chosen.candidate.text = [], "full"
        aot_budget.on_these_devices(run, print)
    return choose.call_args.args[2]


def cached_in(run, folder):
    """Which of two folders token shards are written to."""
    places = [pathlib.Path.home() / name for name in (".cache/llmx/data", "elsewhere")]
    for place in places:
        shutil.rmtree(place, ignore_errors=True)
    traced_keys.data(run)
    return [bool(files_in(place)) for place in places]


def of_host(run, folder):
    """How many rows the host keeps, and when an id gets one."""
    [table, *_] = table_checks.tables_of(run)
    slots = row_optimizers.make(run.tables).slots
    widths = host_rows.widths_of(slots, run.tables, table.width)
    return host_rows.capacity_of(run.tables, widths, table.width), run.tables.admit_after
