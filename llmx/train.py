"""Trains a model: python -m llmx.train --config configs/<run>.py [--config.section.key=value ...]

`main` is the story, top to bottom: config, mesh and shapes, data, state, compile, loop, and what
is shown at the end. Run again with the same work directory, it continues where it stopped.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import sys
import time
import typing
from collections.abc import Callable, Sequence
from typing import Any

from llmx.runtime import exits

if __name__ == "__main__":
    exits.silent_interrupts()  # until `main` takes over

import jax

from llmx import config as config_lib
from llmx.checkpoint import checkpointer, mirror
from llmx.config import Config, checks, describe, flags, history, packed_checks
from llmx.contract import Batch
from llmx.model import looked_up, remat
from llmx.model.attention import attend
from llmx.runtime import (
    agreement,
    auxiliary,
    divergence,
    goodput,
    host_memory,
    launch,
    metrics,
    plot,
    profiling,
)
from llmx.runtime import job as job_lib
from llmx.runtime.caller import Caller
from llmx.tables import cached, host_files

# What a mistake in the config does not need is imported where it is used.
if typing.TYPE_CHECKING:
    from llmx.step.step import Recipe

Log = Callable[[str], None]


def main(argv: Sequence[str] | None = None, caller: Caller | None = None) -> int:
    """Trains as the command line says, or a `caller`. Returns a code of `runtime.exits`."""
    begun, log, caller = time.perf_counter(), launch.log, caller or Caller()
    host_memory.limit_arenas()
    with contextlib.ExitStack() as resources:
        job = resources.enter_context(job_lib.Job(log=log, caller=caller))
        resources.push(job.tell_crash)
        progress, stop = job.progress, job.stop
        config = num_devices = None
        try:
            # 1. The config: all its problems are reported before anything heavy is imported.
            args, config, problems = (caller.settings or read_config)(job, argv)
            if not checks.can_launch(config):
                job.join_by_environment()  # to tell the others what is wrong
            else:
                job.join(config.launch)
                job.watch(config.watchdog, config.launch)
                with progress("backend"):
                    num_devices = launch.device_count(config.launch)
            if args.auto_mesh and num_devices and not problems:
                from llmx.plan import auto

                config = auto.on_these_devices(config, log)
            problems = [*problems, *packed_checks.of_training(config)]
            config = checks.resolve(config, num_devices, problems=problems)
            config.workdir, store = mirror.begin(config.workdir, job, log=log)
            config = going_back_once(config, job)
            config = history.with_rollbacks(config, log, job.peers)
            same = {"--check-determinism": args.check_determinism, "workdir": store.named}
            job.peers.agree("start", launch_values(config) | same)
            job.own(config.workdir)
            from llmx.checkpoint import resume

            history.require_checkpoints(config)
            resume.begin_going_back(config)
            checkpoints = checkpointer.Checkpointer(
                f"{config.workdir}/checkpoints", config.checkpoint, log=log,
                may_write=job.may_write if store.is_local else job.still_owns, place=store.place,
                on_saved=store.pushing(history.noting_saves(config.workdir, caller.saved, log)),
                in_use=store.uses, again=store.again,
            )  # fmt: skip

            # 2. Mesh and shapes: nothing is allocated.
            from llmx.checkpoint import local_tier
            from llmx.config import recipe as recipe_lib
            from llmx.evaluate import during_training

            if config.remat == remat.BUDGET:
                from llmx.aot import budget

                with progress("compile"):
                    config = budget.on_these_devices(config, log, job.peers)
                    job.peers.agree("remat", {"remat": config.remat})
            recipe = recipe_lib.make_recipe(config)
            log(describe.run_text(config, recipe.mesh))

            # 3. Data: text is tokenised once, each process then reads its rows of every batch.
            with progress("data"):
                dataset = open_data(config, log)
                asked = during_training.EvaluationData(config, recipe, dataset)
                job.peers.agree("data", asked.fingerprints)

            # 4. State: restored onto this mesh, whatever it was saved on, or born split.
            tier = local_tier.LocalTier(
                config.checkpoint, config.workdir, job.peers, log=log, named=store.named
            )
            resources.enter_context(tier)
            restored, rows = restore(config, recipe, checkpoints, dataset, job, tier)
        except (ValueError, OSError) as error:
            return job.refuse(*describe.failure(config, error))

        # 5. Compile the step, explicitly: a program for each phase that is still to come.
        try:
            loop = Loop(config, recipe, dataset, restored, job, rows)
        except attend.Unsupported as error:
            return job.refuse(error)

        # 6. The loop.
        code = exits.DONE
        resources.enter_context(checkpoints)
        resources.enter_context(jax.set_mesh(recipe.mesh))
        resources.callback(lambda: loop.close())  # noqa: PLW0108 (of the loop at the end)
        evaluation = during_training.Evaluation(config, recipe, asked, loop.reporter, loop.rows)
        profile = profiling.Profile(config.profile, config.workdir)
        resources.callback(profile.close)
        resources.push(job.tell_crash)  # before anything above waits for other processes
        if args.check_determinism:
            try:
                with progress("evaluation"):
                    loop.check_determinism()
            except ValueError as error:
                return job.refuse(error)
        limit = resources.enter_context(end_in_time(config, job, checkpoints, tier))
        progress.enter("step")
        stop.start()
        while True:
            try:
                if loop.step < config.steps and evaluation.owed(loop.step, job.peers):
                    with loop.aside("evaluation"):
                        evaluation(loop.step, loop.state)
                while loop.step < config.steps and not stop.agreed(loop.step):
                    job.still_owns()
                    profile.before(loop.step + 1)
                    loop.advance()
                    if loop.step == loop.first + 1:
                        loop.settle()
                        log(f"first step done {time.perf_counter() - begun:.1f} s after launch")
                    if profile.ends(loop.step):
                        with loop.aside("save"):
                            profile.close()
                    checkpoints.poll(loop.step)
                    if checkpoints.due(loop.step):
                        with loop.aside("save"):
                            checkpoints.keep_before(loop.watch.trusted)
                            save(config, recipe, checkpoints, dataset, loop)
                    elif tier.due(loop.step):
                        with loop.aside("save"):
                            save(config, recipe, tier, dataset, loop)
                    if evaluation.due(loop.step):
                        with loop.aside("evaluation"):
                            evaluation(loop.step, loop.state)
                loop.finish()
                break
            except divergence.Diverged as diverged:
                changed, reason = roll_back(config, diverged, checkpoints, job)
                back_to = changed.rollback.at[-1] if changed else None
            except cached.CacheTooSmall as error:
                return job.refuse(error)
            except checkpointer.Halt as halt:
                if not halt.restore:
                    return job.refuse(halt, halt.code)
                log(str(halt))
                changed = dataclasses.replace(config, resume_step=-1)
                back_to = halt.newest or 0
            if changed is None:
                code = exits.STOPPED
                break
            # Again from before the loss rose, without the batches that were taken since; or from
            # before replicas differed.
            loop.close()
            rows = evaluation = None  # their memory is needed too
            tier.forget(after=back_to)
            config, recipe = changed, recipe_lib.make_recipe(changed)
            try:
                restored, rows = restore(config, recipe, checkpoints, dataset, job)
            except checkpointer.Halt as halt:
                return job.refuse(halt, halt.code)
            except (ValueError, OSError) as error:
                return job.refuse(*describe.failure(config, error))
            loop = Loop(config, recipe, dataset, restored, job, rows)
            skipped = config.rollback.skipped[-1:] if back_to in config.rollback.at else ()
            loop.reporter.event("rollback", loop.first, {"skipped": sum(skipped)})
            evaluation = during_training.Evaluation(config, recipe, asked, loop.reporter, loop.rows)
            if stop.asked_anywhere():
                break
        with progress("save"):
            # The faster one first: after SIGTERM time may be short.
            if tier.is_on and code == exits.DONE and loop.step < config.steps:
                save(config, recipe, tier, dataset, loop, wait=True)
            checkpoints.keep_before(loop.watch.trusted)
            try:
                save(config, recipe, checkpoints, dataset, loop, wait=True)
            except checkpointer.Halt as halt:
                return job.refuse(halt, halt.code)
            tier.superseded(loop.step)
            limit.cancel()

        # 7. The final evaluation, sample and curve, which a saved run can do without.
        if code == exits.DONE and loop.step < config.steps:
            code = stop.code
        finish(job, loop, evaluation, code)
        with progress("save"):
            code = store.end(code, limit.left)
        why = reason if code == exits.STOPPED else stop.reason
        caller.end(log, config=config, state=loop.state, step=loop.step, why=why)
        log(farewell(config, loop.step, code, why))
    return code


# -------------------------------------------------------------------------------- before the loop


def read_config(
    job: job_lib.Job, argv: Sequence[str] | None
) -> tuple[argparse.Namespace, Config, list[str]]:
    """The command line, its config, and the problems of its overrides.

    Raises ConfigError where there is no config.
    """
    command = flags.parser("llmx.train", "Train a model; run it again to resume.")
    check = "before training take a step twice, and compare the results bit for bit"
    command.add_argument("--check-determinism", action="store_true", help=check)
    try:
        args, config, problems = flags.parse(command, argv, auto_mesh=True)
    except config_lib.ConfigError:
        job.join_by_environment()
        raise
    except SystemExit as error:
        if error.code:  # not --help
            job.join_by_environment()
            job.refuse("the command line is wrong", error.code)
        raise
    return args, config, problems


def going_back_once(config: Config, job: job_lib.Job) -> Config:
    """See `resume`, which an error in the config does not need."""
    from llmx.checkpoint import resume

    return resume.going_back_once(config, job.peers, launch.log)


def launch_values(config: Config) -> dict[str, Any]:
    """What all processes of a run must have in common, by name."""
    values = {key: config_lib.get_value(config, key) for key in config_lib.leaf_types(Config)}
    own = ("launch.process_id", "launch.bind_address", "launch.compile_cache", "data.cache_dir",
           "data.num_threads", "data.prefetch")  # fmt: skip
    return agreement.versions() | {key: values[key] for key in values if key not in own}


def open_data(config: Config, log: Log):
    """The dataset. Raises ValueError for what is wrong with it."""
    from llmx.data import dataset as data_lib

    return data_lib.open_dataset(
        config.data, sequence_length=config.batch.sequence_length, seed=config.seed, log=log,
        top_k=config.distillation.top_k,
    )  # fmt: skip


def restore(config: Config, recipe: "Recipe", checkpoints, dataset, job: job_lib.Job, *tier):
    """Where the run begins (`resume.restore_or_init`), in all processes alike, and on record; and
    the rows of tables that the host has."""
    from llmx.checkpoint import resume

    with job.progress("restore"):
        restored = resume.restore_or_init(config, recipe, checkpoints, dataset, launch.log, *tier)
        with jax.set_mesh(recipe.mesh):
            state = recipe.strategy.begin(restored.state, job.peers)
        if recipe.strategy.waits:  # others may be ahead
            restored = restored._replace(state=state, step=int(jax.device_get(state.step)))
        history.require_checkpoints(config, restored.step)
        rows = resume.host_rows(recipe, restored, config.workdir)
        job.peers.agree("restored state", {"steps taken": restored.step})
    job.progress.begin_at(restored.step)
    if jax.process_index() == 0:
        config_lib.save_run(config)
        dataset.tokenizer.save(f"{config.workdir}/tokenizer.json")
    if (step := resume.going_back_to(config)) is not None:
        text = f"to step {step}: newer checkpoints were set aside"
        history.append(config.workdir, history.WENT_BACK, {"text": text}, log=launch.log)
        resume.end_going_back(config)
    history.record_start(config, resumed_from=restored.step, log=launch.log)
    return restored, rows


# ------------------------------------------------------------------------------------ in the loop


class Loop:
    """The steps of a run. While step n runs, the report of step n-1 is fetched and shown."""

    def __init__(
        self, config: Config, recipe, dataset, restored, job: job_lib.Job,
        rows: cached.Cached | None,
    ):  # fmt: skip
        from llmx import sharding
        from llmx.config import utilization
        from llmx.data import loader
        from llmx.runtime import hardware
        from llmx.step import programs

        self.config, self.recipe, self.first = config, recipe, (first := restored.step)
        self.rows = rows  # of tables, on the host
        self.dataset, progress = dataset, job.progress
        with progress("compile"):
            self.programs = programs.compile_all(recipe, restored.state, first, launch.log)
        self.programs.aside = progress
        self.state, self.step = restored.state, first  # after all steps that were started
        saved = restored.meta.get("loss_watch")
        self.teacher = restored.meta.get("teacher")
        self.watch = divergence.LossWatch(config.rollback, first=first, saved=saved)
        self._diverged: divergence.Diverged | None = None
        self._pending = None  # report of the step that is under way
        self._ahead = None  # a batch that was taken before its step
        self._progress = progress
        shape = (config.batch.size, config.batch.sequence_length)
        self._to = recipe.loss.batch_sharding
        self._rows = sharding.process_rows(self._to, shape)
        self._assemble = sharding.assemble
        # Groups of replicas that are runs of their own take turns in the rows of a batch.
        groups, before = config.sync.groups, config.sync.group * config.batch.size
        self._open_data = functools.partial(
            loader.Loader, dataset, batch_size=groups * config.batch.size,
            rows=[before + row for row in self._rows],
            batch_of=functools.partial(divergence.batch_of, config.rollback),
            ahead=recipe.loss.read_ahead,
        )  # fmt: skip
        self._data = self._open_data(start_step=first)
        if recipe.loss.read_ahead:
            self._ahead = self._next_batch()
            self.state = recipe.begun(self.state, self._ahead)
        reached = None
        if (chip := hardware.this_chip()) and config.model.is_decoder:
            reached = utilization.of(config, chip, jax.device_count())
            launch.log(f"peak:  {reached.peak_text()}, for MFU and HFU")
        self.reporter = metrics.Reporter(
            config.workdir, config.metrics, total_steps=config.steps, start_step=first,
            tokens_per_step=shape[0] * shape[1], reached=reached, log=launch.log, caller=job.caller,
            recorded=restored.meta.get("recorded"),
        )  # fmt: skip
        phases = lambda: progress.seconds  # noqa: E731
        self.goodput = goodput.Meter(config.workdir, phases, self.reporter, start_step=first)
        self.timer = metrics.StepTimer()
        self.timer.start()

    def check_determinism(self):
        """Takes the next step twice and stays before it; raises ValueError where they differ."""
        from llmx.checkpoint import checksums
        from llmx.step import determinism

        begun, self._ahead = time.perf_counter(), self._ahead or self._next_batch()
        self.state, count = determinism.check(
            lambda state, batch: self.programs(self.step, state, batch), self.state, self._ahead,
            fingerprints=checksums.fingerprints,
        )  # fmt: skip
        self.reporter.note(
            f"deterministic: step {self.step + 1}, taken twice, agrees bit for bit in {count} "
            f"arrays ({time.perf_counter() - begun:.1f} s)"
        )

    def advance(self):
        """Starts the next step and waits for the one before."""
        self._go_on()
        with self.timer.data(), self._progress("data wait"):
            batch, self._ahead = self._ahead or self._next_batch(), None
        with jax.transfer_guard("disallow"):
            self.state, report = self.programs(self.step, self.state, batch)
        self.settle()
        self.step += 1
        self._pending = report
        self._follow()

    def _follow(self):
        """Goes on where other groups of replicas are, if they are ahead."""
        strategy = self.recipe.strategy
        if not strategy.waits or not strategy.timetable.fragments_after(self.step - 1):
            return
        if (steps := int(jax.device_get(self.state.step))) > self.step:
            self.settle()
            self._data.close()
            self.step, self._data = steps, self._open_data(start_step=steps)

    def _next_batch(self) -> Batch:
        _, local = next(self._data)
        if self.rows is not None:
            local = self._with_slots(local)
        return {
            name: self._assemble(array, self._rows, self._to, self.config.batch.size)
            for name, array in local.items()
        }

    def _with_slots(self, local: dict) -> dict:
        """The batch with the slots of its rows, which the devices have from now on."""
        model, extra = self.recipe.model, dict(self.state.extra)
        ids = looked_up.raw_ids(model.ngram_tables, model.ngram_rows, local)
        extra[looked_up.TABLES], slots = self.rows.prepare(extra[looked_up.TABLES], ids)
        self.state = self.state._replace(extra=extra)
        return looked_up.with_slots(local, slots)

    def write_rows(self, folder: Any):
        """What a checkpoint has of the host's rows, into its folder."""
        self.rows.write_back(self.state.extra[looked_up.TABLES])
        self.rows.save(folder / host_files.FOLDER)

    def settle(self):
        """Waits for the step under way and shows its report.

        Raises Diverged where the guard stopped the run.
        """
        if self._pending is None:
            return
        report, self._pending = jax.device_get(self._pending), None
        self._progress.step_done(self.step)
        self._notice(report.scalars)
        seconds, data_seconds = self.timer.lap()
        scalars, by_layer = report.numbers(z_loss=self.config.loss.z_loss > 0)
        scalars |= self.rows.scalars() if self.rows is not None else {}
        self.reporter.train(
            self.step, scalars, step_seconds=seconds, data_seconds=data_seconds, by_layer=by_layer
        )
        self.goodput.step(self.step)
        if report.bad_leaf >= 0:
            self._refuse(report)
        elif report.scalars.get("overflowed", False):
            scale = scalars["loss_scale"]
            self.reporter.note(
                f"step {self.step}: the gradient overflowed at loss scale {scale:g}: update "
                "skipped, the scale is lowered"
            )
        elif self._diverged is None and report.tokens > 0:
            self._diverged = self.watch.look(self.step, scalars["loss"])

    def finish(self):
        """After the last step; raises Diverged as the next one would have."""
        self.settle()
        self._go_on()

    def _go_on(self):
        """Raises Diverged if the loss rose, once the state and its number of steps are settled."""
        if self._diverged is not None:
            self.settle()
            raise self._diverged

    @contextlib.contextmanager
    def aside(self, phase: str):
        """For what is not a step: after the step under way, outside its time."""
        self.settle()
        with self.timer.pause(), self._progress(phase):
            yield

    def close(self):
        self.goodput.close(self.step)
        self._data.close()
        self.reporter.close()
        self.state = self.rows = None  # their memory is needed if the run goes back

    def _notice(self, scalars: dict[str, Any]):
        freeze_step = int(scalars.get("freeze_step", -1))
        if freeze_step != self.programs.freeze_step:
            self.programs.freeze_step = freeze_step
            self.reporter.note(f"step {freeze_step + 1}: the variance has settled, and is frozen")

    def _refuse(self, report):
        step, guard = self.step, self.config.guard
        leaf = self.recipe.leaf_names[int(report.bad_leaf)]
        finite = math.isfinite(report.grad_norm) and math.isfinite(report.loss)
        what = "is a spike, largest" if finite else "is not finite, first"
        text = f"step {step}: the gradient (norm {report.grad_norm:.3g}) {what} in {leaf}"
        if guard.on_bad_step == "skip" and report.num_bad < guard.patience:
            self.reporter.note(f"{text}: update skipped, {report.num_bad} in a row")
            return
        noticed, self.step = step, int(jax.device_get(self.state.step))
        raise divergence.Diverged(text, noticed=noticed, trusted=self.watch.trusted)


def roll_back(
    config: Config, diverged: divergence.Diverged, checkpoints, job: job_lib.Job
) -> tuple[Config | None, str]:
    """The config with which the run goes on from before the loss rose; it is on record then.

    None: the run stops; and a text that says why, and what can be done.
    """
    section, every = config.rollback, config.checkpoint.every
    checkpoints.keep_before(diverged.trusted)
    step = divergence.target(checkpoints.steps(), trusted=diverged.trusted, every=every)
    # Listings of a shared directory may differ.
    step = json.loads(job.peers.broadcast("step to go back to", json.dumps(step)))
    why = divergence.refusal(section, step)
    if not why:
        rollback = divergence.with_rollback(section, step=step, noticed=diverged.noticed)
        changed = dataclasses.replace(config, rollback=rollback, resume_step=-1)
        text = divergence.rollback_text(rollback, diverged)
        failed = ""
        try:
            # Before anything is done: a run that is killed now goes back when it starts again.
            if jax.process_index() == 0:
                config_lib.save_run(changed)
        except OSError as error:
            failed = f"The rollback cannot be recorded: {error}"
        if not (why := job.peers.broadcast("the rollback is recorded", failed)):
            record = {"text": text, "at": rollback.at, "skipped": rollback.skipped}
            history.append(config.workdir, history.ROLLBACK, record, log=launch.log)
            launch.log(text)
            return changed, text
    skips = config.guard.on_bad_step == "skip"
    others = "raise guard.patience" if skips else "set guard.on_bad_step='skip'"
    launch.log(f"{diverged}: the run stops")
    return None, f"{diverged}: stopped. {why}. {divergence.remedy(section, step, others)}"


def end_in_time(config: Config, job: job_lib.Job, checkpoints, tier):
    """After SIGTERM this process ends within `checkpoint.grace_seconds`, saved or not."""
    from llmx.checkpoint import grace

    newest = lambda: grace.newest_text(checkpoints, tier, config.checkpoint.local_directory)  # noqa: E731
    limit = grace.GraceLimit(
        config.checkpoint.grace_seconds, process=job.peers.index, newest=newest,
        end=lambda text: job.peers.end(exits.AGAIN, text),
    )  # fmt: skip
    job.stop.noticed.append(lambda: job.stop.code == exits.AGAIN and limit.start())
    return limit


def save(config: Config, recipe, checkpoints, dataset, loop: Loop, *, wait: bool = False):
    """Checkpoints the state after the steps taken so far, in the work directory or locally."""
    meta = {
        "fingerprint": dataset.fingerprint,  # the step says the rest of the data position
        "batch_size": config.batch.size,
        "config": config_lib.to_json(config),
        "mesh": dict(recipe.mesh.shape),
        "loss_watch": loop.watch.numbers(),
        "teacher": loop.teacher,
        "recorded": loop.reporter.recorded,
    }
    # Rows of the host go into checkpoints of the work directory only.
    beside = {"beside": loop.write_rows} if loop.rows is not None else {}
    checkpoints.save(
        loop.step, recipe.saved(loop.state), meta=meta, order=recipe.order,
        wait=wait or loop.step == config.steps, **beside,  # a failure of the last is the run's
    )  # fmt: skip


def finish(job: job_lib.Job, loop: Loop, evaluation, code: int):
    """Shows what came of the run; where that fails, nothing is lost."""
    from llmx import generate

    config, log = loop.config, launch.log
    if loop.step == config.steps and evaluation.owed(loop.step, job.peers):
        with job.progress("evaluation"):
            job.attempt("the final evaluation", code, evaluation, loop.step, loop.state)
    if loop.step == config.steps:
        with job.progress("sample"):
            show, coder = generate.show_sample, loop.dataset.tokenizer
            job.attempt("the sample", code, show, config, loop.recipe, loop.state, coder, log)
    loop.goodput.end(loop.step, done=loop.step == config.steps)
    in_time = code in (exits.DONE, exits.STOPPED)  # else time may be short
    if jax.process_index() == 0 and loop.step > 0 and in_time:
        draw = lambda: log(f"drawn: {', '.join(map(str, plot.plot_all(config.workdir)))}")  # noqa: E731
        with job.progress("sample"):  # no step: neither useful time nor a hang
            auxiliary.Auxiliary(plot.PLOT, log=log)(draw, last=True)


def farewell(config: Config, step: int, code: int, reason: str) -> str:
    """The last line of a run."""
    if step < config.steps and code != exits.STOPPED:
        where = f"stopped at step {step} of {config.steps}"
        how = "without --config.resume_step" if config.resume_step >= 0 else "the same command"
        return f"{reason}: {where}: run {how} again to continue"
    if code == exits.STOPPED:
        return reason
    return f"step {step} of {config.steps}: everything is in {config.workdir}"


if __name__ == "__main__":
    sys.exit(main())
