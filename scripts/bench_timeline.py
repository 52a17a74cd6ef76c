"""Estimated against measured step times of small programs on this CPU.

    python scripts/bench_timeline.py [--rounds 9] [--rows 1 4] [--json FILE]

`llmx.aot.timeline` reads the compiled text of a train step whatever compiled it. Here that is the
CPU, on one to eight fake devices of one process, so that the estimate can be compared with a clock.
The CPU's rates are measured once, in the same run, by six programs: a matrix product, cheap and
costly elementwise passes over an array, many small operations, a small and a large all-reduce.
Seconds are those of the process on all cores, which other load on the machine changes little. Fake
devices share the cores, so each has its share of the rates. Rounds alternate between the programs,
and medians are compared.

Beside the error of the timeline stands that of the plainest guess, one constant utilisation of the
model's FLOPs fitted to the same rows.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from llmx import config, sharding
from llmx.aot import core_times, links, step_time, timeline
from llmx.config import checks, recipe
from llmx.model import costs, families
from llmx.runtime import launch
from llmx.step import step

DEVICES = 8
WIDE = dict(width=384, num_layers=3, num_heads=6, num_kv_heads=2, head_dim=64, mlp_dim=1024)
SMALL = dict(width=128, num_layers=4, num_heads=4, num_kv_heads=4, head_dim=32, mlp_dim=384)
DEEP = SMALL | dict(num_layers=10)

# family, shape, mesh, (rows, tokens of a row), other values
ROWS = (
    ("llama3", SMALL, {}, (8, 256), {}),
    ("llama3", SMALL, {}, (32, 256), {}),
    ("gpt2", WIDE | dict(num_kv_heads=6), {}, (4, 256), {}),
    ("qwen3", DEEP, {}, (8, 128), {"remat": "full"}),
    ("gemma3", SMALL, {}, (4, 512), {}),
    ("llama3", WIDE, {}, (8, 256), {"remat": "full"}),
    ("llama3", WIDE, {"data": 2}, (8, 256), {}),
    ("llama3", SMALL, {"fsdp": 4}, (8, 256), {}),
    ("qwen3", WIDE, {"fsdp": 8}, (16, 128), {"remat": "full"}),
    ("llama3", WIDE, {"tensor": 2}, (4, 256), {}),
    ("gpt2", SMALL, {"data": 2, "tensor": 2}, (8, 256), {}),
    ("llama3", SMALL, {"fsdp": 2, "sequence": 2}, (4, 512), {}),
    ("llama3", SMALL, {"fsdp": 4}, (32, 128), {"accumulation": 4}),
    ("llama3", DEEP, {"data": 2, "fsdp": 4}, (16, 128), {}),
)


def config_of(row: tuple) -> config.Config:
    family, shape, mesh, (rows, length), others = row
    run = config.default()
    run.model = families.preset(
        family, vocab_size=2048, vocab_multiple=8, max_positions=1024, **shape
    )
    run.precision, run.steps, run.workdir = "fp32", 10, "unused"
    run.batch.size, run.batch.sequence_length = rows, length
    run.batch.accumulation = others.get("accumulation", 1)
    run.remat = others.get("remat", "none")
    for axis in sharding.AXES:
        setattr(run.mesh, axis, mesh.get(axis, 1))
    return checks.resolve(run, math.prod(mesh.values()))


def make_program(row: tuple) -> tuple[config.Config, str, Mesh, Callable[[], None]]:
    """The config of a row, the text of its compiled train step, and what runs it once."""
    run = config_of(row)
    made = recipe.make_recipe(run, devices=jax.devices()[: math.prod(row[2].values())])
    with jax.set_mesh(made.mesh):
        lowered = step.make_train_step(made).lower(made.abstract, made.abstract_batch)
        compiled = lowered.compile()
        random = np.random.default_rng(0)
        batch = {
            name: jax.device_put(
                random.integers(0, 2048, leaf.shape).astype(leaf.dtype)
                if name in ("tokens", "targets")
                else values_of(name, leaf), leaf.sharding,
            )
            for name, leaf in made.abstract_batch.items()
        }  # fmt: skip
        held = [made.init(0)]

    def once() -> None:
        with jax.set_mesh(made.mesh):
            held[0], report = compiled(held[0], batch)
            report.loss.block_until_ready()
            jax.block_until_ready(held[0])

    return run, compiled.as_text(), made.mesh, once


def values_of(name: str, leaf) -> np.ndarray:
    """Positions in order, one document, every token counted."""
    if name == "positions":
        return np.broadcast_to(np.arange(leaf.shape[-1], dtype=leaf.dtype), leaf.shape)
    return np.ones(leaf.shape, leaf.dtype)


def seconds_of(once: Callable[[], object], rounds: int = 7) -> float:
    once()
    taken = []
    for _ in range(rounds):
        begun = time.process_time()
        jax.block_until_ready(once())
        taken.append(time.process_time() - begun)
    return statistics.median(taken)


SMALL_OPERATIONS = 400
PASSES = 50  # over an array of the size that these models have
MATRIX, ELEMENTS, SENT = 512, 2**20, 2**20


def calibrate() -> dict[str, float]:
    """FLOPs and bytes in a second of a core; seconds of an operation, and of an all-reduce of all
    devices without bytes; bytes that each of them sends in a second of a core in a large one."""
    a = jnp.ones((MATRIX, MATRIX))
    product = jax.jit(lambda a: a @ a)
    flops = 2 * MATRIX**3 / seconds_of(lambda: product(a))
    x = jnp.ones(ELEMENTS)
    passes = jax.jit(lambda x: jax.lax.fori_loop(0, PASSES, lambda _, x: x * 0.9 + 1.0, x))
    bandwidth = PASSES * 8 * ELEMENTS / seconds_of(lambda: passes(x))
    curve = jax.jit(
        lambda x: jax.lax.fori_loop(0, PASSES, lambda _, x: jnp.exp(-x * x) / (1.0 + x), x)
    )
    elements = PASSES * 5 * ELEMENTS / seconds_of(lambda: curve(x))
    small = jnp.ones((4, 4))

    def chain(a):
        for _ in range(SMALL_OPERATIONS):
            a = jnp.sort(a @ small, axis=-1)
        return a

    chained = jax.jit(chain)
    launch_seconds = seconds_of(lambda: chained(small)) / (2 * SMALL_OPERATIONS)
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("x",), axis_types=(AxisType.Auto,))

    def all_reduce(size: int) -> float:
        parts = jax.device_put(jnp.ones(DEVICES * size), NamedSharding(mesh, P("x")))
        total = jax.jit(jax.shard_map(
            lambda part: jax.lax.psum(part, "x"), mesh=mesh, in_specs=P("x"), out_specs=P(),
        ))  # fmt: skip
        return seconds_of(lambda: total(parts))

    start = all_reduce(1)
    sent = 2 * 4 * SENT * (DEVICES - 1) / DEVICES
    exchange = sent / max(all_reduce(SENT) - start, 1e-9)
    return {
        "flops": flops, "bandwidth": bandwidth, "launch": launch_seconds, "start": start,
        "exchange": exchange, "elements": elements,
    }  # fmt: skip


def estimated(run: config.Config, text: str, mesh: Mesh, rates: dict) -> timeline.Timeline:
    """The timeline of a program with a device's share of the CPU."""
    n = mesh.size
    visible = step_time.visible_share(run.model, sequence_length=run.batch.sequence_length)
    core = core_times.Core(
        flops=dict.fromkeys(("bf16", "f32"), rates["flops"] / n), bandwidth=rates["bandwidth"] / n,
        launch=rates["launch"] * n, elements=rates["elements"] / n, visible=visible,
    )  # fmt: skip
    # `exchange` is what each of eight devices sends while all of them do.
    machine = links.Memory(rates["exchange"] * DEVICES / n, rates["start"] * n / DEVICES)
    return timeline.read(text, list(mesh.shape.items()), machine=machine, core=core)


def ranks(values: list[float]) -> np.ndarray:
    return np.argsort(np.argsort(values)).astype(float)


def errors(estimates: list[float], measured: list[float]) -> tuple[float, float]:
    """Spearman's rank correlation, and the mean of |estimate / measured - 1|."""
    correlation = float(np.corrcoef(ranks(estimates), ranks(measured))[0, 1])
    pairs = zip(estimates, measured, strict=True)
    return correlation, statistics.mean(abs(one / other - 1) for one, other in pairs)


def main() -> None:
    command = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    command.add_argument("--rounds", type=int, default=9)
    command.add_argument("--rows", type=int, nargs="*", default=range(1, len(ROWS) + 1))
    command.add_argument("--json", default="", metavar="FILE")
    args = command.parse_args()
    launch.start(launch.LaunchConfig(platform="cpu", cpu_devices=DEVICES, compile_cache=""))
    rates = calibrate()
    print("calibrated:", ", ".join(f"{name} {value:.3g}" for name, value in rates.items()))
    programs = [make_program(ROWS[number - 1]) for number in args.rows]
    taken: list[list[float]] = [[] for _ in programs]
    for turn in range(args.rounds + 1):
        for times, (*_, once) in zip(taken, programs, strict=True):
            begun = time.process_time()
            once()
            if turn > 0:
                times.append(time.process_time() - begun)
    measured = [statistics.median(times) for times in taken]
    found = [estimated(run, text, mesh, rates) for run, text, mesh, _ in programs]
    print_table(args.rows, programs, measured, found)
    if args.json:
        rows = [
            {"row": number, "measured": seconds, "estimated": one.step}
            for number, seconds, one in zip(args.rows, measured, found, strict=True)
        ]
        with open(args.json, "w") as file:
            json.dump({"rates": rates, "rows": rows}, file, indent=2)


def print_table(numbers, programs, measured, found) -> None:
    print("| | program | estimated / measured | exposed collectives |\n| --- | --- | --- | --- |")
    flops = []
    for number, (run, *_), seconds, one in zip(numbers, programs, measured, found, strict=True):
        family, shape, sizes, (rows, length), others = ROWS[number - 1]
        name = f"{family}, width {shape['width']}, {shape['num_layers']} layers, "
        name += f"{rows} x {length}, {sharding.mesh_text(sizes)}"
        name += "".join(f", {key} {value}" for key, value in others.items())
        print(f"| {number} | {name} | {one.step / seconds:.2f} | {one.exposed / one.step:.0%} |")
        each = costs.training_flops_per_token(run.model, sequence_length=length)
        flops.append(each * rows * length)
    utilisation = math.exp(statistics.mean(
        math.log(work / seconds) for work, seconds in zip(flops, measured, strict=True)
    ))  # fmt: skip
    for name, estimates in (
        ("timeline", [one.step for one in found]),
        ("one constant utilisation, fitted", [work / utilisation for work in flops]),
    ):
        correlation, error = errors(estimates, measured)
        print(f"{name}: rank correlation {correlation:.2f}, mean error {error:.0%}")


if __name__ == "__main__":
    main()
