"""Compiles the train step of a run for a machine that is not here.

State and batch are shapes only. A program that does not fit is a `Result` like any other: TPU
compilers refuse it, but report the two amounts of memory and write the buffers down first.
"""

import contextlib
import copy
import dataclasses
import math
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from llmx import config, sharding
from llmx.aot import peak_memory, report, step_time, topologies
from llmx.aot import program as program_lib
from llmx.aot.report import EXCHANGE, Memory, Result
from llmx.config import checks, packed_checks
from llmx.contract import Strategy
from llmx.model import remat
from llmx.model.remat import OffloadConfig
from llmx.runtime import device_memory, launch
from llmx.runtime.device_memory import OutOfMemory, parse_out_of_memory


class CompileError(RuntimeError):
    """The compiler refuses the program, for another reason than its size."""


def resolve(
    run: config.Config, topology: topologies.Topology, *, problems: Sequence[str] = ()
) -> config.Config:
    """`run` resolved for the machine. Raises ConfigError with all its problems."""
    run, problems, platform = copy.deepcopy(run), list(problems), topology.platform
    if run.launch.platform not in ("", platform):
        problems.append(
            f"launch.platform={run.launch.platform!r} and topology {topology.name} is a "
            f"{platform}: set --config.launch.platform={platform}"
        )
    else:
        run.launch.platform = platform
    if not run.model.is_decoder:
        key = "model.own" if run.model.own else "model.recommender.name"
        problems.append(
            f"{key}={run.model.own or run.model.recommender.name!r}: plans and reports count the "
            "decoder's parameters and FLOPs; leave it out"
        )
    problems += _across_slices(run, topology)
    problems += packed_checks.of_training(run)
    return checks.resolve(run, topology.num_devices, problems=problems)


def _across_slices(run: config.Config, topology: topologies.Topology) -> list[str]:
    """What is wrong with the axes that cross the slow network of the machine."""
    axes, parts = run.mesh.across_slices, topology.num_slices
    example = "--config.mesh.across_slices=\"('data',)\" with --config.mesh.data="
    if parts > 1 and not axes:
        return [
            f"topology {topology.name} has {parts} slices: name the mesh axes of "
            f"that size between them, {example}{parts}"
        ]
    sizes = {axis: vars(run.mesh)[axis] for axis in sharding.AXES}
    if not axes or set(axes) - set(sizes):
        return []
    try:
        sizes = sharding.resolve_sizes(sizes, topology.num_devices)
    except ValueError:
        return []  # reported as a problem of the mesh
    what = "slices"
    if parts == 1:
        what, parts = "hosts", topology.num_hosts
    crossing = math.prod(sizes[axis] for axis in axes)
    if crossing == parts:
        return []
    none = '--config.mesh.across_slices="()"'
    has, remedy = f"{parts} {what}", f"make their sizes multiply to {parts}, or none: {none}"
    if parts == 1:
        has, remedy = "one host, without a network to cross", f"name none: {none}"
    return [
        f"mesh.across_slices={axes} multiply to {crossing} and topology {topology.name} has "
        f"{has}: {remedy}"
    ]


def compile(run: config.Config, topology: str | topologies.Topology, *, phase: str = "") -> Result:
    """Compiles a run's train step for a machine and reports its memory and costs.

    `phase`: with `sync.strategy`, a phase of `llmx.sync` or "exchange"; "" = the run's last phase.
    Raises ValueError for a wrong config or topology, and CompileError where the compiler refuses
    the program, except for its size.
    """
    if isinstance(topology, str):
        topology = topologies.parse(topology)
    run = resolve(run, topology)
    if run.remat == remat.BUDGET:
        return _within_budget(run, topology, phase)
    devices = topologies.devices(topology)
    # Not needed, and slow to import, where the config is wrong.
    import jax

    from llmx.config.recipe import make_recipe
    from llmx.model import costs

    recipe = make_recipe(run, devices=devices)
    # Traces and programs of an earlier call must not shorten this one's times.
    jax.clear_caches()
    began = time.perf_counter()
    with jax.set_mesh(recipe.mesh), tempfile.TemporaryDirectory() as folder:
        try:
            chosen = _phase(recipe.strategy, phase)
            lowered = _lowered(recipe, chosen)
        except NotImplementedError as error:
            raise CompileError(_first_lines(f"jax cannot trace it: {error}")) from error
        lowered_at = time.perf_counter()
        own = recipe.compiler_options()
        compiled, refusal = _compile(lowered, topology.platform, folder, own)
        compiled_at = time.perf_counter()
        dump = peak_memory.read_dump(folder, "outer_step" if chosen == EXCHANGE else "train_step")
    peak = peak_memory.at_peak(dump)
    in_host = _host_bytes(recipe, run.offload) if topology.platform == "gpu" else 0
    memory, unknown = _memory(compiled, refusal, peak, topology, unsaid=in_host)
    after = dump.after if compiled is None else compiled.as_text()
    program = times = None
    if after:
        sizes = list(recipe.mesh.shape.items())
        program = program_lib.read(after, sizes, across_slices=run.mesh.across_slices)
        unknown += program.unknown
        times = step_time.estimate(after, run, topology, recipe.mesh)
    length = run.batch.sequence_length
    flops = costs.training_flops_per_token(run.model, sequence_length=length)
    return Result(
        run=run, topology=topology, phase=chosen,
        fused=recipe.strategy.messages if chosen in ("compressed", EXCHANGE) else (0, ()),
        memory=memory, largest=() if peak is None else peak.buffers, program=program,
        state=_state_bytes(recipe), num_parameters=costs.num_parameters(run.model),
        model_flops=flops * run.batch.size * length / topology.num_devices,
        lower_seconds=lowered_at - began, compile_seconds=compiled_at - lowered_at,
        versions=_versions(topology), unknown=tuple(unknown), before=dump.before, after=after,
        timeline=times,
    )  # fmt: skip


def _within_budget(run: config.Config, topology: topologies.Topology, phase: str) -> Result:
    """The result with the remat that `budget.choose` finds."""
    from llmx.aot import budget

    results = {}

    def peak_of(text: str) -> int:
        results[text] = compile(budget.with_remat(run, text), topology, phase=phase)
        return results[text].memory.peak

    limit = int(run.memory_budget * 2**30) or topology.hbm_bytes
    choice = budget.choose(run, peak_of, limit, launch.note)
    return dataclasses.replace(results[choice.chosen.candidate.text], budget=tuple(choice.lines))


def _phase(strategy: Strategy, phase: str) -> str:
    """The phase to compile; "" where a run has one program only."""
    if len(strategy.phases) == 1:
        if phase:
            raise ValueError(f"--phase={phase}: sync.strategy='mean' has one program; leave it out")
        return ""
    phases = strategy.timetable.phases_from(0)
    known = (*phases, *((EXCHANGE,) if strategy.outer and not strategy.waits else ()))
    if phase and phase not in known:
        raise ValueError(f"--phase={phase}: the programs of this run are {', '.join(known)}")
    return phase or phases[-1]


def _lowered(recipe, phase: str) -> Any:
    from llmx.step import step

    if phase == EXCHANGE:
        whole_model = max(recipe.strategy.outer, key=len)
        return recipe.strategy.outer[whole_model].lower(recipe.abstract)
    train_step = step.make_train_step(recipe, phase or "mean")
    return train_step.lower(recipe.abstract, recipe.abstract_batch)


def _compile(
    lowered: Any, platform: str, folder: str, own: Mapping[str, Any]
) -> tuple[Any, OutOfMemory | None]:
    """The compiled program, or why it does not fit; XLA's dump goes to `folder`.

    `own`: the run's compiler options, which override the flags of its platform.
    """
    import jax

    # A cached program takes no time to compile, and its buffers are not dumped.
    cached = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    # A dump that the user asks for goes to their folder; buffers are then unknown.
    users_dump = "xla_dump_to" in os.environ.get("XLA_FLAGS", "")
    options = dict(own) | ({} if users_dump else peak_memory.dump_options(folder))
    try:
        return topologies.compile(lowered, platform, options), None
    except jax.errors.JaxRuntimeError as error:
        refusal = parse_out_of_memory(str(error))
        if refusal is None:
            raise CompileError(_first_lines(str(error))) from error
        return None, refusal
    finally:
        jax.config.update("jax_enable_compilation_cache", cached)


def _first_lines(text: str, count: int = 12) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    more = [f"... and {len(lines) - count} more lines"] if len(lines) > count else []
    return "\n".join(["the compiler refuses the program:", *lines[:count], *more])


def _memory(
    compiled, refusal, peak, topology: topologies.Topology, *, unsaid: int = 0
) -> tuple[Memory, list[str]]:
    """What a device must hold, and what is unknown of it.

    `unsaid`: bytes of arguments in the host's memory that the program counts as the device's.
    """
    unknown = []
    if peak is None:
        unknown.append("the arrays at the peak: the compiler wrote no buffer assignment")
    if topology.platform == "gpu":
        unknown.append("memory of CUDA, of NCCL and of cuDNN's workspaces: not in the program")
    if unsaid:
        unknown.append(
            "what of the host's memory is on the device while it is used: GPU programs that are "
            "compiled for another machine have no copies from and to it"
        )
    if compiled is not None:
        sizes = compiled.memory_analysis()
        host = device_memory.host_bytes(sizes)
        at_most = device_memory.device_peak(sizes, topology.platform)
        return Memory(
            arguments=sizes.argument_size_in_bytes - unsaid,
            outputs=sizes.output_size_in_bytes - sizes.alias_size_in_bytes,
            temporaries=sizes.temp_size_in_bytes,
            # XLA's own peak counts the host's memory too.
            peak=(min(peak.bytes, at_most) if host and peak is not None else at_most) - unsaid,
            limit=topology.hbm_bytes, host=host + unsaid,
        ), unknown  # fmt: skip
    unknown.append("host memory, and outputs apart from temporaries: the compilation stopped early")
    needed, arguments = refusal.needed, 0
    if peak is not None:
        arguments = sum(buffer.bytes for buffer in peak.buffers if buffer.argument)
        if abs(peak.bytes - needed) <= 0.01 * needed:
            needed = peak.bytes
        else:
            sizes = f"{report.size(peak.bytes)} (buffers) and {report.size(needed)}"
            unknown.append(f"which of {sizes} is right")
    return Memory(arguments, 0, needed - arguments, needed, refusal.available, None), unknown


def state_bytes(run: config.Config, topology: topologies.Topology) -> int:
    """Bytes of state and batch on one device; ValueError where config and machine do not fit."""
    from llmx.config.recipe import make_recipe

    recipe = make_recipe(run, devices=topologies.devices(topology))
    return sum(_state_bytes(recipe).values())


def _state_bytes(recipe) -> dict[str, int]:
    """Bytes of one device, by part of the state."""
    from llmx.step.transforms import masks

    state = recipe.abstract
    parts = {
        "parameters": state.params, "frozen": state.frozen, "optimizer": state.opt_state,
        "average": state.ema, "masks": dict(state.extra).get(masks.NAME, ()),
        "replicas": state.sync, "batch": recipe.abstract_batch,
    }  # fmt: skip
    sizes = {name: sharding.device_bytes(part) for name, part in parts.items()}
    return {name: size for name, size in sizes.items() if size}


def _host_bytes(recipe, offloaded: OffloadConfig) -> int:
    """Bytes of the state in the host's memory, for one device.

    Of devices that are not here jax knows no memories, and leaves the kind out of shardings.
    """
    import jax

    from llmx.step import offload

    params, loss, found = recipe.abstract.params, recipe.loss, []
    if offloaded.optimizer:
        found += offload.arrays_of_matrices(recipe.abstract.opt_state, params)
    if offloaded.parameters:
        trees = [(params, loss.axes)] + [(loss.frozen, loss.frozen_axes)] * bool(loss.frozen)
        for arrays, axes in trees:
            pairs = zip(
                jax.tree.leaves(arrays["blocks"]),
                jax.tree.leaves(axes["blocks"], is_leaf=lambda one: isinstance(one, tuple)),
                strict=True,
            )
            found += [leaf for leaf, names in pairs if "embed" in names]
    return sharding.device_bytes(found)


def _versions(topology: topologies.Topology) -> dict[str, str]:
    import importlib.metadata

    import jax

    packages = {"tpu": ("libtpu",), "gpu": ("jax-cuda13-pjrt", "jax-cuda12-pjrt")}
    versions = {"jax": jax.__version__}
    for package in packages[topology.platform]:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions
