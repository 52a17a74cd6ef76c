"""Trains a model: python -m llmx.train --config configs/<run>.py [--config.section.key=value ...]

`main` is the story, top to bottom: config, mesh and shapes, data, state, compile, loop, and what
is shown at the end. Run again with the same work directory, it goes on where it stopped.
"""

import contextlib
import dataclasses
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from llmx import config, sharding
from llmx.checkpoint import checkpointer
from llmx.config import checks, flags
from llmx.config import describe as describe_lib
from llmx.runtime import launch, metrics, plot, signals


def main(argv: Sequence[str] | None = None) -> int:
    """Trains as the config says.

    Returns the exit code: 0 done, or told to stop; 2 the config or data is wrong; 3 stopped by the
    guard.
    """
    begun, log = time.perf_counter(), launch.log
    try:
        # 1. The config: all that is wrong with it is told before anything heavy is loaded.
        command = flags.parser("llmx.train", "Train a model; run it again to resume.")
        _, run, problems = flags.parse(command, argv)
        num_devices = None
        if not launch.problems(run.launch):
            launch.start(run.launch)
            num_devices = launch.device_count(run.launch)
        run = checks.resolve(run, num_devices, problems=problems)
        checkpoints = checkpointer.Checkpointer(
            f"{run.workdir}/checkpoints", run.checkpoint, log=log
        )

        # 2. Mesh and shapes: nothing is allocated.
        from llmx.checkpoint import resume
        from llmx.config import recipe

        setup = recipe.make_setup(run)
        log(describe(run, setup))

        # 3. Data: text is tokenised once, each process then reads its rows of every global batch.
        dataset = open_data(run, log)

        # 4. State: restored onto this mesh, whatever it was saved on, or born split.
        pass

        state, first = resume.restore_or_init(run, setup, checkpoints, dataset, log)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if jax.process_index() == 0:
        config.save_run(run)
        dataset.tokenizer.save(f"{run.workdir}/tokenizer.json")

    # 5. Compile the step, explicitly: a program for each phase that is still to come.
    programs = compile_programs(run, setup, state, first, log)

    # 6. The loop.
    code = 0
    with contextlib.ExitStack() as resources:
        resources.enter_context(checkpoints)
        resources.enter_context(jax.set_mesh(setup.mesh))
        stop = resources.enter_context(signals.StopSignal(log=log))
        watchdog = signals.Watchdog(run.launch.watchdog_seconds, log=log)
        resources.enter_context(watchdog)
        loop = Loop(run, setup, programs, dataset, state, first)
        resources.callback(loop.close)
        evaluation = Evaluation(run, setup, dataset, loop.reporter)
        profile = Profile(run)
        resources.callback(profile.close)
        try:
            while loop.step < run.steps and not stop.agreed(loop.step):
                profile.before(loop.step + 1)
                loop.advance()
                watchdog.beat()
                if loop.step == first + 1:
                    loop.settle()
                    log(f"first step done {time.perf_counter() - begun:.1f} s after launch")
                if profile.ends(loop.step):
                    with loop.aside():
                        profile.close()
                if checkpoints.due(loop.step):
                    with loop.aside():
                        save(run, setup, checkpoints, dataset, loop)
                if evaluation.due(loop.step):
                    with loop.aside():
                        evaluation(loop.step, loop.state)
            loop.settle()
        except TrainingStopped as stopped:
            log(str(stopped))
            code = 3
        save(run, setup, checkpoints, dataset, loop, wait=True)

        # 7. What came of it.
        if first < loop.step == run.steps:
            evaluation(loop.step, loop.state)
        if loop.step == run.steps:
            show_sample(run, setup, loop.state, dataset, log)
    if jax.process_index() == 0 and loop.step > 0:
        log(f"loss curve: {plot.plot_loss(run.workdir)}")
    log(farewell(run, loop.step, code))
    return code


# -------------------------------------------------------------------------------- before the loop


def describe(run: config.Config, setup) -> str:
    """What is about to be trained, on what."""
    from llmx.model import costs

    mesh = sharding.mesh_text(setup.mesh.shape)
    processes = f", {jax.process_count()} processes" if jax.process_count() > 1 else ""
    tokens = run.batch.size * run.batch.sequence_length * run.steps
    return (
        f"model: {describe_lib.model_text(run, costs.num_parameters(run.model))}\n"
        f"mesh:  {mesh} ({jax.devices()[0].device_kind}{processes}), layout {run.sharding.layout}\n"
        + (f"stages: {stages}\n" if (stages := describe_lib.stages_text(run)) else "")
        + (f"sync:  {agreement}\n" if (agreement := describe_lib.sync_text(run)) else "")
        + f"batch: {describe_lib.batch_text(run)}; {run.steps:,} steps = {tokens:,} tokens"
    )


def open_data(run: config.Config, log: Callable):
    """The dataset. Raises ValueError for what is wrong with it."""
    from llmx.data import dataset as data_lib

    return data_lib.open_dataset(
        run.data, sequence_length=run.batch.sequence_length, seed=run.seed,
        cache_dir=config.DATA_CACHE, log=log,
    )  # fmt: skip


def compile_programs(run: config.Config, setup, state, first: int, log: Callable) -> "Programs":
    """The compiled programs of the steps from `first` on, and which of them runs when."""
    from llmx.step import step
    from llmx.sync import strategy

    timetable = setup.timetable
    if timetable is None:
        return Programs({strategy.MEAN: compile_step(run, setup, log)})
    settled_at = int(jax.device_get(state.sync.settled_at))
    phases = timetable.phases_from(first, settled_at)
    steps = {phase: compile_step(run, setup, log, phase) for phase in phases}
    wanted = {timetable.fragments_after(number) for number in range(first, run.steps)}
    meetings = step.make_meetings(setup)
    with jax.set_mesh(setup.mesh):
        compiled = {
            each: meetings[each].lower(setup.abstract).compile() for each in sorted(wanted) if each
        }
    return Programs(steps, timetable, compiled, settled_at)


@dataclasses.dataclass
class Programs:
    """The train step of each phase, and the exchanges between steps (`llmx.sync`)."""

    steps: dict[str, Callable]
    timetable: Any = None
    meetings: dict[tuple[int, ...], Callable] = dataclasses.field(default_factory=dict)
    settled_at: int = -1

    def phase(self, step: int) -> str:
        if self.timetable is None:
            [only] = self.steps
            return only
        return self.timetable.phase(step, self.settled_at)

    def __call__(self, step: int, state, batch):
        """The state after step number `step`, and its report."""
        state, report = self.steps[self.phase(step)](state, batch)
        if self.timetable is not None and (due := self.timetable.fragments_after(step)):
            state = self.meetings[due](state)
        return state, report


def compile_step(run: config.Config, setup, log: Callable, phase: str = "mean") -> Callable:
    """The compiled train step; logs how long that took and what a device must hold."""
    from llmx.config import recipe
    from llmx.step import gradients

    begun = time.perf_counter()
    with jax.set_mesh(setup.mesh):
        batch = setup.abstract_batch(run.batch.size, run.batch.sequence_length)
        lowered = recipe.make_train_step(run, setup, phase=phase).lower(setup.abstract, batch)
        traced = time.perf_counter()
        compiled = lowered.compile()
    memory = compiled.memory_analysis()
    mib = lambda size: f"{size / 2**20:,.1f} MiB"  # noqa: E731
    seconds = time.perf_counter() - traced
    head = "step:  " if setup.timetable is None else f"step:  {phase}: "
    log(
        f"{head}traced in {traced - begun:.1f} s, compiled in {seconds:.1f} s; "
        f"each device holds {mib(memory.argument_size_in_bytes)} of state and batch and "
        f"{mib(memory.temp_size_in_bytes)} of temporaries"
        + (
            f", {mib(gradients.gathered_bytes(setup))} of them weights gathered for the whole step"
            if run.sharding.gather == "step"
            else ""
        )
    )
    return compiled


# ------------------------------------------------------------------------------------ in the loop


class TrainingStopped(RuntimeError):
    """The guard stopped the run; the state is as it was before the step that did it."""


class Loop:
    """The steps of a run. While step n runs, the report of step n-1 is fetched and shown."""

    def __init__(self, run: config.Config, setup, programs: Programs, dataset, state, first: int):
        from llmx import sharding
        from llmx.data import loader
        from llmx.model import costs
        from llmx.runtime import hardware

        self.run, self.setup, self.programs = run, setup, programs
        self.state, self.step = state, first  # after all steps that were started
        self._pending = None  # report of the step that is under way
        shape = (run.batch.size, run.batch.sequence_length)
        self._to = setup.batch_sharding
        self._rows = sharding.process_rows(self._to, shape)
        self._assemble = sharding.assemble
        self._data = loader.Loader(
            dataset, batch_size=run.batch.size, rows=self._rows, start_step=first
        )
        self.reporter = metrics.Reporter(
            run.workdir, run.metrics, total_steps=run.steps, start_step=first,
            tokens_per_step=shape[0] * shape[1], num_devices=jax.device_count(),
            flops_per_token=costs.training_flops_per_token(run.model, sequence_length=shape[1]),
            chip=hardware.this_chip(), log=launch.log,
        )  # fmt: skip
        self.timer = metrics.StepTimer()
        self.timer.start()

    def advance(self):
        """Starts the next step and waits for the one before."""
        with self.timer.data():
            _, local = next(self._data)
            batch = {
                name: self._assemble(array, self._rows, self._to, self.run.batch.size)
                for name, array in local.items()
            }
        with jax.transfer_guard("disallow"):
            self.state, report = self.programs(self.step, self.state, batch)
        self.settle()
        self.step += 1
        self._pending = report

    def settle(self):
        """Waits for the step under way and shows its report.

        Raises TrainingStopped where the guard stopped the run.
        """
        if self._pending is None:
            return
        report, self._pending = jax.device_get(self._pending), None
        self._notice(int(report.settled_at))
        seconds, data_seconds = self.timer.lap()
        scalars = {
            "loss": float(report.loss),
            "grad_norm": float(report.grad_norm),
            "learning_rate": float(report.learning_rate),
        }
        if self.run.loss.z_loss:
            scalars["z_loss"] = float(report.z_loss)
        self.reporter.train(self.step, scalars, step_seconds=seconds, data_seconds=data_seconds)
        if report.bad_leaf >= 0:
            self._refuse(report)

    @contextlib.contextmanager
    def aside(self):
        """For what is not a step: after the step under way, outside its time."""
        self.settle()
        with self.timer.pause():
            yield

    def close(self):
        self._data.close()
        self.reporter.close()

    def _notice(self, settled_at: int):
        if settled_at != self.programs.settled_at:
            self.programs.settled_at = settled_at
            self.reporter.note(f"step {settled_at + 1}: the variance has settled, and is frozen")

    def _refuse(self, report):
        step, guard = self.step, self.run.guard
        leaf = self.setup.leaf_names[int(report.bad_leaf)]
        finite = math.isfinite(report.grad_norm) and math.isfinite(report.loss)
        what = "is a spike, largest" if finite else "is not finite, first"
        text = f"step {step}: the gradient (norm {report.grad_norm:.3g}) {what} in {leaf}"
        if guard.on_bad_step == "skip" and report.num_bad < guard.patience:
            self.reporter.note(f"{text}: update skipped, {report.num_bad} in a row")
            return
        self.step = int(jax.device_get(self.state.step))
        raise TrainingStopped(
            f"{text}: stopped, and the state before that step is kept. Look at its data, lower "
            "optimizer.learning_rate or optimizer.clip_norm, or set guard.on_bad_step='skip'; then "
            "run again to resume"
        )


class Evaluation:
    """The loss on the held-out split, when it is due."""

    def __init__(self, run: config.Config, setup, dataset, reporter: metrics.Reporter):
        from llmx import evaluate
        from llmx.step import step

        self.run, self.reporter = run, reporter
        eval_step = step.make_eval_step(setup)
        self._loss_of = lambda state: evaluate.held_out_loss(
            setup, eval_step, evaluate.averaged(state), dataset,
            batch_size=evaluate.batch_size(run), batches=run.evaluation.batches,
        )  # fmt: skip
        self._batches_text = evaluate.batches_text
        self._has_any = dataset.num_held_out_windows > 0

    def due(self, step: int) -> bool:
        every = self.run.evaluation.every
        return every > 0 and step % every == 0 and step < self.run.steps

    def __call__(self, step: int, state):
        if self._has_any:
            result = self._loss_of(state)
            scalars = {name: result[name] for name in ("loss", "perplexity")}
            self.reporter.eval(step, scalars, self._batches_text(result))


class Profile:
    """The window of steps that jax.profiler records."""

    def __init__(self, run: config.Config):
        self.first, self.num = run.profile.first_step, run.profile.num_steps
        self.directory, self.running = f"{run.workdir}/profile", False

    def before(self, step: int):
        if self.first and step == self.first:
            options = jax.profiler.ProfileOptions()
            # The tracer of Python calls hooks into all threads, and crashes on one that is ending.
            options.python_tracer_level = 0
            jax.profiler.start_trace(self.directory, profiler_options=options)
            self.running = True

    def ends(self, step: int) -> bool:
        return self.running and step >= self.first + self.num - 1

    def close(self):
        if self.running:
            jax.profiler.stop_trace()
            self.running = False


def save(run: config.Config, setup, checkpoints, dataset, loop: Loop, *, wait: bool = False):
    """Checkpoints the state after the steps taken so far."""
    meta = {
        "fingerprint": dataset.fingerprint,  # the step says the rest of the data position
        "batch_size": run.batch.size,
        "config": config.to_json(run),
        "mesh": dict(setup.mesh.shape),
    }
    checkpoints.save(loop.step, loop.state, meta=meta, order=setup.order, wait=wait)


# --------------------------------------------------------------------------------- after the loop


def show_sample(run: config.Config, setup, state, dataset, log: Callable):
    """Prints a continuation of the configured prompt."""
    if not run.sample.prompt:
        return
    from llmx import evaluate, generate
    from llmx.model import sampling

    prompt = dataset.tokenizer.encode(run.sample.prompt).tolist()
    room = run.model.max_positions - len(prompt)
    if room < 1:
        log(f"no sample: sample.prompt has {len(prompt)} tokens, more than the model takes")
        return
    try:
        execution, params = generate.without_stages(setup, evaluate.averaged(state))
    except ValueError as error:
        log(f"no sample: {error}; python -m llmx.generate makes one on fewer devices")
        return
    [added] = sampling.generate(
        setup.apply, params, execution, [prompt],
        max_tokens=min(run.sample.max_tokens, room), temperature=run.sample.temperature,
        top_k=run.sample.top_k, top_p=run.sample.top_p, seed=run.seed,
        stop_token=dataset.tokenizer.end_of_document,
    )  # fmt: skip
    log(f"sample:\n{dataset.tokenizer.decode([*prompt, *added])}\n")


def farewell(run: config.Config, step: int, code: int) -> str:
    if code == 0 and step < run.steps:
        return f"stopped at step {step} of {run.steps}: run the same command again to go on"
    return f"step {step} of {run.steps}: everything is in {run.workdir}"


if __name__ == "__main__":
    sys.exit(main())
