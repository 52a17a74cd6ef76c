"""Memory and communication of split rows, compiled for TPUs that are not here; and the blockwise
kernel beside the reference, run here.

    python scripts/bench_context.py [--rows 1 4] [--no-cpu]

Prints the tables of docs/performance.md. Sent is per device and step; the formula is that of
docs/long_context.md for full remat.
"""

import argparse
import dataclasses
import time

import jax
import jax.numpy as jnp
from bench_aot import GIB, measure

from llmx import config, sharding
from llmx.model.attention import attend
from llmx.model.attention.masks import Mask, Scores


@dataclasses.dataclass(frozen=True)
class Row:
    config: str
    topology: str
    flags: tuple[str, ...]
    bound: float | None = None  # GiB


def _long(ways: int) -> tuple[str, ...]:
    """Llama-3 8B, one row of 131,072 tokens, full remat."""
    return (f"mesh.sequence={ways}", "batch.size=1", "batch.accumulation=1", "remat=full")


ROWS = (
    Row("configs/llama3_128k.py", "v5p:2x2x1", _long(4)),
    Row("configs/llama3_128k.py", "v5p:2x2x2", _long(8)),
    Row("configs/llama3_128k.py", "v5p:2x2x4", _long(16)),
    Row("configs/llama3_128k.py", "v5p:2x2x4", ()),
    Row(
        "configs/llama3_70b.py", "v5p:4x4x4", ("mesh.sequence=4", "mesh.tensor=1"), bound=31.1
    ),
)  # fmt: skip

HEADER = (
    "| | model, machine, mesh, batch | peak GiB | state | activations | x n "
    "| sent in the ring GiB | formula | hidden | compile s |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


def ring_formula(run: config.Config) -> float:
    """GiB: forward, computed again if the policy is full, and backward, of all layers."""
    rings = run.mesh.sequence // run.attention.ulysses
    heads = run.model.num_kv_heads // run.mesh.tensor // run.attention.ulysses
    rows = run.batch.size // (run.mesh.data * run.mesh.fsdp)
    block = 4 * rows * run.batch.sequence_length // rings * heads * run.model.head_dim
    blocks = (2 if run.remat == "full" else 1) * (rings - 1) + 3 * (rings - 1) + 1
    return run.model.num_layers * blocks * block / GIB


def line(number: int, row: Row, told: dict) -> str:
    run = config.from_json(told["config"])
    sends = [
        each
        for each in told["program"]["collectives"]
        if each["kind"] == "collective-permute" and each["axes"] == ["sequence"]
    ]
    sent = sum(each["count"] * each["bytes"] for each in sends)
    hidden = sum(each["count"] * each["bytes"] for each in sends if each["hidden_by"])
    peak, state = told["memory"]["peak"] / GIB, sum(told["state"].values()) / GIB
    mesh = sharding.mesh_text(told["mesh"])
    batch = f"{run.batch.size} x {run.batch.sequence_length}, remat {run.remat}"
    cells = [
        str(number),
        f"{told['num_parameters'] / 1e9:.0f}B, {row.topology}, {mesh}, {batch}",
        f"{peak:.2f}" + (f" (at most {row.bound})" if row.bound else ""),
        f"{state:.2f}", f"{peak - state:.2f}", f"{(peak - state) * run.mesh.sequence:.1f}",
        f"{sent / GIB:.2f}", f"{ring_formula(run):.2f}", f"{hidden / sent:.0%}",
        f"{told['seconds']['lower'] + told['seconds']['compile']:.0f}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def compare_on_cpu(length: int = 4096, rounds: int = 3) -> None:
    """Forward and backward pass of one row, fp32, four query heads on two K/V heads of 64."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((1, length, 4, 64), (1, length, 2, 64), (1, length, 2, 64), (1, length, 4, 64))
    *arrays, cotangent = (jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True))
    rows = jnp.ones((1, length), jnp.int32)
    mask = Mask(rows, None, rows, None, ahead=0)
    compiled = {}
    for name in ("reference", "blockwise"):
        kernel = attend.IMPLEMENTATIONS[name]

        def both(arrays, cotangent, kernel=kernel):
            run = lambda *arrays: kernel(*arrays, mask, Scores(64**-0.5), device_kind="cpu")  # noqa: E731
            out, pull = jax.vjp(run, *arrays)
            return out, pull(cotangent)

        compiled[name] = jax.jit(both).lower(arrays, cotangent).compile()
    seconds = {name: [] for name in compiled}
    for _ in range(rounds + 1):
        for name, run in compiled.items():
            begun = time.perf_counter()
            jax.block_until_ready(run(arrays, cotangent))
            seconds[name].append(time.perf_counter() - begun)
    print(f"\n{length} tokens on this CPU | seconds, best of {rounds} | temporary MiB")
    for name, run in compiled.items():
        temporary = run.memory_analysis().temp_size_in_bytes / 2**20
        print(f"{name} | {min(seconds[name][1:]):.2f} | {temporary:.0f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rows", type=int, nargs="*", default=range(1, len(ROWS) + 1), help="from 1"
    )
    parser.add_argument("--no-cpu", action="store_true", help="leave out what runs here")
    args = parser.parse_args()
    print(HEADER, flush=True)
    for number in args.rows:
        row = ROWS[number - 1]
        print(line(number, row, measure(row, [])), flush=True)
    if not args.no_cpu:
        compare_on_cpu()


if __name__ == "__main__":
    main()
