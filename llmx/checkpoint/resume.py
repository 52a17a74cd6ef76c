"""Where a run begins: a checkpoint of its own, another run's parameters, or new ones.

A checkpoint is restored onto any mesh. What belongs to the devices that it was saved on is remade
for the present ones: `State.in_flight` of a pipeline, `State.sync` of replicas.
"""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from llmx.checkpoint import (
    checkpointer,
    chosen_layers,
    copies,
    from_export,
    hf_reader,
    identity,
    local_tier,
    masks,
    model_params,
    relaid,
    teachers,
)
from llmx.checkpoint import reshard as stored_layers
from llmx.checkpoint.checkpointer import Checkpointer, Restored
from llmx.checkpoint.local_tier import LocalTier
from llmx.checkpoint.manifest import Corrupt, Document, Mismatch, Unanswered, Unreadable
from llmx.contract import State
from llmx.data import transient
from llmx.model import precision, preference
from llmx.model.adapters import AdaptersConfig
from llmx.model.chosen_layers import of_layers
from llmx.model.families import ModelConfig
from llmx.model.quantization import QuantizationConfig
from llmx.model.training_loss import with_own
from llmx.pipeline.permutation import LayerPermutation
from llmx.runtime import divergence, launch
from llmx.sharding import trees
from llmx.step import guard, moments
from llmx.step.step import Recipe, in_dtypes_of
from llmx.sync import reshard
from llmx.sync.config import SyncConfig
from llmx.sync.replicas import MEAN
from llmx.sync.strategy import STRATEGIES
from llmx.tables import cached, exports, host_files

Log = Callable[[str], None]


def restore_or_init(
    config: Any, recipe: Recipe, checkpoints: Checkpointer, dataset: Any, log: Log,
    tier: LocalTier = local_tier.OFF,
) -> Restored:  # fmt: skip
    """The state, the number of steps it has taken and the meta that was saved with it: of the
    newest good checkpoint, of the one that `config.resume_step` goes back to, or new, without meta.

    Raises ValueError where the checkpoint is of another model or other data.
    """
    start_from, restored, back_to = config.start_from, None, going_back_to(config)
    if back_to is None:
        _forget_abandoned(config, checkpoints)
    directory = f"{config.workdir}/checkpoints"
    step = checkpoints.latest_step() if back_to is None else back_to
    if imported := checkpointer.is_import(directory, step):
        start_from = f"{config.workdir}@0"
    if not imported or (back_to is None and tier.holds(newer_than=0)):
        restored = restore(config, recipe, checkpoints, log, tier, step=back_to)
    beside = functools.partial(teachers.beside, config, recipe, dataset, log=log)
    if restored is None:
        state = recipe.init(config.seed)
        if start_from:
            reader = checkpoints.reader if imported else None
            state = start_with(config, recipe, state, start_from, log, reader=reader)
        state = masks.begun(config, recipe, state, log)
        if exports.is_export(start_from):
            state = from_export.with_tables(recipe, state, start_from, log)
        _forget_after(back_to, checkpoints, tier)
        return beside(Restored(state, {}, 0))
    if (saved := restored.meta["fingerprint"]) != dataset.fingerprint:
        raise ValueError(
            f"{config.workdir} was trained on data {saved[:12]} and the config gives "
            f"{dataset.fingerprint[:12]}: continuing would repeat some samples and miss others; "
            "restore data, batch.sequence_length and seed, or use another workdir"
        )
    if (saved := restored.meta["batch_size"]) != config.batch.size:
        raise ValueError(
            f"{config.workdir} was trained with batch.size={saved} and the config gives "
            f"{config.batch.size}: the position in the data counts batches, so some samples would "
            "be repeated or missed; restore batch.size, or use another workdir"
        )
    _forget_after(back_to, checkpoints, tier)
    log(f"resumed from checkpoint {restored.step} of {config.workdir}")
    changed = identity.differences(restored.meta.get("config", {}), identity.as_json(config))
    for line in identity.difference_lines(changed):
        log(f"config: {line}")
    # A run that the guard stopped may continue: restarting it is the user's decision.
    to = jax.tree.map(lambda leaf: leaf.sharding, recipe.abstract.guard)
    released = guard.released(jax.device_get(restored.state.guard))
    state = restored.state._replace(guard=jax.device_put(released, to))
    return beside(restored._replace(state=state))


def going_back_to(config: Any) -> int | None:
    """The step that the user goes back to; None: the run goes on from its newest checkpoint."""
    return config.resume_step if config.resume_step >= 0 else None


def going_back_once(config: Any, peers: Any, log: Log) -> Any:
    """The config without `resume_step` where the job was started again, in any of its processes,
    and an earlier launch of it has gone back, or has ended before it had the work directory.

    Every process must call it: a replaced host counts its own restarts only. `peers` is
    `llmx.runtime.agreement.Peers`.
    """
    restarts = max(map(int, peers.exchange("restarts", str(launch.restart_count()))))
    if restarts == 0 or config.resume_step < 0:
        return config
    pending = ""
    with contextlib.suppress(OSError):
        pending = _pending(config).read_text()
    if peers.broadcast("going back", pending) == str(config.resume_step):
        log(
            f"resume_step={config.resume_step}: no earlier launch of this job has gone back yet, "
            f"and this is restart {restarts}: it does so"
        )
        return config
    log(
        f"resume_step={config.resume_step} was for the first launch of this job, and this is "
        f"restart {restarts}: going on from the newest checkpoint"
    )
    return dataclasses.replace(config, resume_step=-1)


def begin_going_back(config: Any) -> None:
    """Records that the run is to go back, until `end_going_back`: a restart of a job that ends
    before that does it. To be called once the work directory is owned. Raises OSError."""
    if jax.process_index() != 0:
        return
    if going_back_to(config) is None:
        _pending(config).unlink(missing_ok=True)
        return
    temporary = _pending(config).with_suffix(".tmp")
    temporary.write_text(str(config.resume_step))
    temporary.replace(_pending(config))


def end_going_back(config: Any) -> None:
    """Once the run has gone back, a restart does not do so again. Raises OSError."""
    if jax.process_index() == 0:
        _pending(config).unlink(missing_ok=True)


def _pending(config: Any) -> pathlib.Path:
    return pathlib.Path(config.workdir) / "going_back"


def _forget_after(step: int | None, checkpoints: Checkpointer, tier: LocalTier):
    """Once the checkpoint that a run goes back to is restored, the newer ones are set aside."""
    if step is not None:
        tier.forget(after=step)
        checkpoints.set_aside_after(step, f"the run goes back to step {step}")


def _forget_abandoned(config: Any, checkpoints: Checkpointer):
    """Sets aside what a rollback went back from, where the run was killed before that was done."""
    if not config.rollback.at:
        return
    found = []
    for step in checkpoints.steps():
        with contextlib.suppress(Corrupt, Mismatch, Unreadable):  # `restore` says so
            found.append(_abandoned_at(config, checkpoints.document(step)))
    # The first process decides, so all must ask it.
    after = min((at for at in found if at is not None), default=checkpoints.latest_step() or 0)
    checkpoints.set_aside_after(after, f"the run went back to step {after} (rollback.at)")


def _abandoned_at(config: Any, saved: Document) -> int | None:
    section = saved.meta.get("config", {}).get("rollback", {})
    return divergence.abandoned_at(section, config.rollback, saved.step)


def restore(
    config: Any, recipe: Recipe, checkpoints: Checkpointer, log: Log,
    tier: LocalTier = local_tier.OFF, *, step: int | None = None,
) -> Restored | None:  # fmt: skip
    """The newest good checkpoint, or exactly `step`, with what has to change on other devices than
    it was saved on.

    A batch that was in flight on other stages is taken again; a strategy's state is resharded for
    another number of replicas (`contract.Strategy.reshard`).
    """
    # What is read of a checkpoint depends on it: the newest may be corrupt, and the one before
    # saved on other devices.
    wanted = functools.partial(_wanted, config, recipe)
    found = local_tier.restore_newest(
        checkpoints, tier, wanted, step, order=recipe.order, ignored=("in_flight", "extra")
    )
    if found is None:
        return None
    restored, saved = found
    state = restored.state
    if trees.named(recipe.abstract.sync):
        if state.sync == ():
            log(f"the replicas begin to synchronize by {config.sync.strategy!r}")
            _, sync = recipe.init_sync(state.params)
            state = state._replace(sync=sync)
        elif not _of_these_replicas(recipe, saved):
            state = state._replace(sync=_resharded(recipe, state.sync, saved.order))
            name, num = config.sync.strategy, config.mesh.data
            log(f"the state of {name!r} was converted to {num} replicas")
        state = _entered(recipe, state, saved)
    for name in recipe.loss.transforms:
        if name not in state.extra and saved.holds(f"extra/{name}"):
            log(f"{name} of the checkpoint has another shape than this config gives it: begun anew")
    state = state._replace(extra={
        name: relaid.onto_devices(recipe, name, own, saved.meta, log)
        if name in recipe.constraints else own
        for name, own in dict(state.extra).items()
    })  # fmt: skip
    state = _with_resumed_extra(recipe, state)
    first = restored.step
    if not saved.fits(recipe.abstract.in_flight, prefix="in_flight"):
        state = state._replace(in_flight=recipe.init_in_flight(state))
        if saved.holds("in_flight"):
            log("the batch that was in flight in the pipeline when it was saved is taken again")
            first -= 1
            step = jax.device_put(np.int32(first), recipe.abstract.step.sharding)
            state = state._replace(step=step)
    return restored._replace(state=state, step=first)


def host_rows(recipe: Recipe, restored: Restored, workdir: str) -> cached.Cached | None:
    """The rows that the host has beside a state: those of its checkpoint, or new; None: it has
    none.

    Raises ValueError where they are of other tables, or do not fit.
    """
    tables = recipe.loss.execution.tables
    if tables is None or not tables.virtual:
        return None
    rows = cached.Cached(tables)
    if restored.meta:
        rows.load(_host_rows_of(workdir, restored.step))
    return rows


def _host_rows_of(workdir: str, step: int) -> pathlib.Path:
    return pathlib.Path(workdir) / "checkpoints" / str(step) / host_files.FOLDER


def _same_place_of_rows(config: Any, recipe: Recipe, saved: Document):
    """Raises Mismatch where rows of tables were kept elsewhere, Corrupt where their files are
    damaged."""
    tables = recipe.loss.execution.tables
    before = saved.meta.get("config", {}).get("tables", {}).get("cache_rows", 0)
    now = config.tables.cache_rows if tables is not None else 0
    if bool(before) != bool(now):
        raise Mismatch(
            f"{config.workdir} was trained with tables.cache_rows={before} and the config gives "
            f"{now}: rows would have to move between the devices and the host; restore it (any "
            "number above 0 will do if it was one), or use another workdir"
        )
    if now:
        try:
            host_files.check(_host_rows_of(config.workdir, saved.step))
        except (ValueError, OSError) as error:
            kind = Unanswered if transient.is_transient(error) else Corrupt
            raise kind(f"its rows of tables cannot be read ({error})") from error


def _with_resumed_extra(recipe: Recipe, state: State) -> State:
    """The state with those of transforms and constraints: new where the checkpoint has none that
    fits."""
    saved, transforms = dict(state.extra), recipe.loss.transforms
    states = dict(recipe.loss.init_extra())
    for name in saved.keys() & transforms.keys():
        states[name] = transforms[name].resumed(saved[name])
    to = jax.tree.map(lambda leaf: leaf.sharding, {n: recipe.abstract.extra[n] for n in states})
    states = jax.device_put(jax.device_get(states), to)
    if not recipe.constraints.keys() <= saved.keys():
        state = recipe.init_constraints(state._replace(extra={}))
        saved = dict(state.extra) | saved
    states |= {name: saved[name] for name in recipe.constraints}
    return state._replace(extra=states or ())


def _entered(recipe: Recipe, state: State, saved: Document) -> State:
    """The state on entry of a phase that the checkpoint's last step was not in, but would have been
    with the present strategy and warm-up: that change of phase is seen by no step to come."""
    last = saved.step - 1
    if last < 0:
        return state
    section = saved.meta.get("config", {}).get("sync", {})
    then = SyncConfig(**{name: section[name] for name in section if name in vars(SyncConfig())})
    table = STRATEGIES[then.strategy].timetable(then, [1.0] * saved.step)
    freeze_step = int(jax.jit(recipe.strategy.scalars)(state).get("freeze_step", -1))
    phase, before = (of.phase_of(last, freeze_step) for of in (recipe.strategy.timetable, table))
    if recipe.abstract.opt_state == () and before != MEAN == phase:
        raise ValueError(
            f"checkpoint {saved.step} was saved after a warm-up of {then.warmup_steps} steps, and "
            "with the present sync.warmup_steps it would be within it: the local steps of the "
            f"replicas would be lost; set sync.warmup_steps to at most {last}"
        )
    if phase == MEAN or before != MEAN:
        return state
    with jax.set_mesh(recipe.mesh):
        return recipe.strategy.enter(state, MEAN, phase)


def _wanted(config: Any, recipe: Recipe, saved: Document) -> State:
    """The state to read from a checkpoint, as far as it has it."""
    _same_run(config, saved)
    _same_format(config, saved)
    masks.require_same(config, recipe, saved)
    _same_place_of_rows(config, recipe, saved)
    strategy = saved.meta.get("config", {}).get("sync", {}).get("strategy", "mean")
    # Replicas may begin to synchronize in another way than by the mean, but not change it.
    if strategy not in ("mean", config.sync.strategy):
        raise Mismatch(
            f"{config.workdir} was trained with sync.strategy={strategy!r} and the config gives "
            f"{config.sync.strategy!r}: what its replicas had not sent would be lost; restore it, "
            "or continue with its parameters in another workdir, "
            f"--config.start_from={config.workdir}"
        )
    wanted = recipe.saved(recipe.abstract)
    if strategy == "mean" and wanted.opt_state == ():
        raise Mismatch(
            f"{config.workdir} was trained with sync.strategy='mean', and with "
            f"{config.sync.strategy!r} every replica has an optimizer state of its own: continue "
            f"with its parameters in another workdir, --config.start_from={config.workdir}"
        )
    if not saved.fits(wanted.in_flight, prefix="in_flight"):
        wanted = wanted._replace(in_flight=())
    wanted = wanted._replace(extra={
        name: relaid.as_saved(recipe, state, name, saved)
        for name, state in dict(wanted.extra).items()
        if saved.fits(state, prefix=relaid.path_of(name), order=recipe.order)
        or relaid.is_there(recipe, name, saved)
    })  # fmt: skip
    if not saved.holds("sync"):
        return wanted._replace(sync=())
    if not _of_these_replicas(recipe, saved):
        shapes = {name.removeprefix("sync/"): s for name, s in saved.shapes("sync").items()}
        wanted = wanted._replace(sync=reshard.as_saved(wanted.sync, shapes))
    return wanted


def _same_run(config: Any, saved: Document):
    """Raises Mismatch where the checkpoint is of another model, or of a longer run; Corrupt where
    the run went back to before it."""
    if (at := _abandoned_at(config, saved)) is not None and going_back_to(config) is None:
        raise Corrupt(f"the run went back from it to step {at} (rollback.at)")
    if changes := identity.refusal_of_model(saved.meta.get("config", {}), config.model):
        raise Mismatch(
            f"{config.workdir} was trained as a model of another function than the config gives:\n"
            f"{changes}\n"
            "restore these values, or train the changed model in another workdir; where no "
            f"parameter changes its shape it can begin with --config.start_from={config.workdir} "
            "and --config.start_changes naming the fields"
        )
    before, now = model_params.adapters_of(saved.meta), config.adapters
    before = dataclasses.replace(before, dropout=now.dropout)  # which changes no parameter
    if before != now and (before.rank or now.rank):
        raise Mismatch(
            f"{config.workdir} was trained with {_adapters_text(before)}, and the config gives "
            f"{_adapters_text(now)}: restore these values, or continue with its model in another "
            f"workdir, --config.start_from={config.workdir}"
        )
    before, now_rounded = model_params.quantization_of(saved.meta), config.quantization
    if (rounds := _rounding(before)) != (wanted := _rounding(now_rounded)):
        raise Mismatch(
            f"{config.workdir} was trained with {_section_text(rounds)}, and the config gives "
            f"{_section_text(wanted)}: restore these values, or continue with its weights in "
            f"another workdir, --config.start_from={config.workdir}"
        )
    were_pairs, are_pairs = map(
        _has_reference, (saved.meta.get("config", {}), identity.as_json(config))
    )
    if were_pairs != are_pairs and not now.rank:
        kept, given = ("keeps a", "has none") if were_pairs else ("keeps no", "needs one")
        raise Mismatch(
            f"{config.workdir} {kept} reference of preferences, and the config {given} "
            "(data.format, preference.loss): restore these values, or continue with its model in "
            f"another workdir, --config.start_from={config.workdir}"
        )
    late = saved.meta.get("config", {}).get("tables", {}).get("staleness", 0)
    if late not in (0, config.tables.staleness):
        raise Mismatch(
            f"{config.workdir} was trained with tables.staleness={late} and the config gives "
            f"{config.tables.staleness}: updates of {late} steps wait for their tables and would "
            "come at other steps; restore it, or use another workdir"
        )
    if saved.step > config.steps:
        raise Mismatch(
            f"{config.workdir} is at step {saved.step}, which is after the last, "
            f"steps={config.steps}: set steps to at least {saved.step}, go back with "
            "--config.resume_step, or use another workdir"
        )


def _rounding(section: QuantizationConfig) -> dict[str, Any]:
    """What says which parameters and states a run has that trains weights as integers."""
    kept = {"bits", *(("group", "scales") if section.bits else ()), "activations"}
    return {name: value for name, value in vars(section).items() if name in kept}


def _section_text(values: Mapping[str, Any]) -> str:
    return ", ".join(f"quantization.{name}={value!r}" for name, value in values.items())


def _has_reference(run: Mapping[str, Any]) -> bool:
    """Whether a config, as JSON, is of preferences."""
    loss = run.get("preference", {}).get("loss", preference.NONE)
    return preference.is_minimized(run.get("data", {}).get("format", ""), loss)


def _adapters_text(section: AdaptersConfig) -> str:
    if not section.rank:
        return "adapters.rank=0"
    return ", ".join(f"adapters.{name}={value!r}" for name, value in vars(section).items())


def _same_format(config: Any, saved: Document):
    """Raises Mismatch where parameters or moments were kept in another format."""
    section = saved.meta.get("config", {})
    then = section.get("precision"), section.get("optimizer", {}).get("moments", moments.AUTO)
    now = config.precision, config.optimizer.moments
    if then[0] not in precision.POLICIES or then[1] not in moments.NAMES:
        return  # of another version: the arrays tell
    params = [precision.POLICIES[policy].param for policy, _ in (then, now)]
    kept = [moments.resolved(of[1], param) for of, param in zip((then, now), params, strict=True)]
    if params[0] == params[1] and kept[0] == kept[1]:
        return
    raise Mismatch(
        f"{config.workdir} was trained with precision={then[0]!r} and optimizer.moments="
        f"{then[1]!r}: it keeps parameters in {params[0].name} and moments in {kept[0]}, and the "
        f"config asks for {params[1].name} and {kept[1]}; restore both, or continue with its "
        f"parameters in another workdir, --config.start_from={config.workdir}"
    )


def _of_these_replicas(recipe: Recipe, saved: Document) -> bool:
    """Whether it was saved by as many replicas, each with this order of layers."""
    return saved.fits(recipe.abstract.sync, prefix="sync") and saved.order == recipe.order


def _resharded(recipe: Recipe, saved: Any, order: LayerPermutation) -> Any:
    """The strategy's state for the present replicas; `order`: that of the layers as saved."""
    params = trees.named(recipe.loss.params)
    stored = stored_layers.stored(params, order=recipe.order, saved=order)
    shapes = {name: leaf.shape for name, leaf in stored.items()}

    def ordered(name, array):
        moves = order.moves(name, array.shape, recipe.order)
        return order.convert(array, recipe.order) if moves else array

    to = jax.tree.map(lambda leaf: leaf.sharding, recipe.abstract.sync)
    layers = reshard.Layers(shapes, ordered)
    make = lambda saved: recipe.strategy.reshard(saved, layers)  # noqa: E731
    with jax.set_mesh(recipe.mesh):
        return jax.jit(jax.sharding.auto_axes(make, out_sharding=to))(saved)


def start_with(
    config: Any, recipe: Recipe, state: State, start_from: str, log: Log, *, reader: Any = None
) -> State:
    """A new state with the parameters of another run, of an import, of a Hugging Face checkpoint,
    or of exported tables, which are read straight to their shards.

    Raises ValueError where they are of a model of another function.
    """
    named, _ = identity.origin(start_from)
    place, step = copies.local("start_from=", start_from, log)

    def require_same(saved: Mapping[str, Any]) -> None:
        if config.start_from_layers:
            chosen = of_layers(identity.model_of(saved), config.start_from_layers)
            saved = {"model": identity.as_json(chosen)}
        if changes := identity.refusal_of_model(saved, config.model, allowed=config.start_changes):
            raise Mismatch(
                f"start_from={start_from!r} is a model of another function than the config "
                f"gives:\n{changes}\nuse these values, or no model in the config, which takes that "
                "one; or name the fields that are changed on purpose and change no parameter's "
                "shape: --config.start_changes=\"('field',)\""
            )

    params, from_step = _parameters(config, recipe, place, step, require_same, log, reader)
    at_step = "" if from_step is None else f", step {from_step}"
    cut = f", layers {config.start_from_layers}" if config.start_from_layers else ""
    log(f"starting with the parameters of {named}{at_step}{cut}")

    def copied(like: Any) -> Any:
        """Its own copy, in these dtypes: the step donates all of its state."""
        to = jax.tree.map(lambda leaf: leaf.sharding, like)
        copy = lambda params: in_dtypes_of(like, jax.tree.map(lambda leaf: leaf + 0, params))  # noqa: E731
        return jax.jit(copy, out_shardings=to)(params)

    like = recipe.loss.model_params
    if recipe.loss.adapters.rank:
        params = params if _dtypes(params) == _dtypes(like) else copied(like)
        return state._replace(frozen=params)
    params, like = with_own(params, state.params), recipe.loss.params
    own = recipe.saved(recipe.abstract).frozen
    frozen = copied(own) if own else ()
    if recipe.loss.quantization.learns:
        params = recipe.trained(params)
    ema = copied(recipe.abstract.ema) if recipe.ema_decay else ()
    if _dtypes(params) != _dtypes(like):
        params = copied(like)
    # Replicas with local steps have parameters of their own.
    opt_state, sync = recipe.init_sync(params)
    return state._replace(params=params, ema=ema, opt_state=opt_state, sync=sync, frozen=frozen)


def _parameters(
    config: Any, recipe: Recipe, place: str, step: int | None,
    require_same: Callable[[Mapping[str, Any]], None], log: Log, reader: Any,
) -> tuple[Any, int | None]:  # fmt: skip
    """The parameters of a run or of a Hugging Face checkpoint, with the shardings of the recipe,
    and the step of a run. Raises ValueError."""
    layers, like, order = config.start_from_layers, recipe.loss.model_params, recipe.order

    def model_of(saved: ModelConfig) -> ModelConfig:
        require_same({"model": identity.as_json(saved)})
        return dataclasses.replace(saved, vocab_multiple=recipe.model.vocab_multiple)

    if exports.is_export(place):
        return from_export.parameters(place, like, require_same)
    if hf_reader.is_checkpoint(place):
        try:
            if not layers:
                return model_params.of_hugging_face(
                    place, like, model_of=model_of, order=order
                ), None
            model = model_of(hf_reader.read_model(place))
        except Mismatch as error:
            raise ValueError(str(error)) from error
        source = hf_reader.open_checkpoint(place, model)
        return chosen_layers.to_shards(source, layers, like, order=order), None

    def of_run(saved: Mapping[str, Any]) -> ModelConfig:
        require_same(saved)
        return identity.model_of(saved)

    if layers:
        source, step = chosen_layers.of_run(place, step=step, model_of=of_run, log=log)
        return chosen_layers.to_shards(source, layers, like, order=order), step

    def wanted(saved: Document) -> Any:
        require_same(saved.meta.get("config", {}))
        return like

    restored = model_params.restore_params(
        place, wanted, order=order, step=step, log=log, reader=reader
    )
    return restored.state, restored.step


def _dtypes(tree: Any) -> list:
    return [leaf.dtype for leaf in jax.tree.leaves(tree)]
