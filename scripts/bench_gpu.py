"""One GPU: a train step of llmx, and that of a compiled Llama of transformers of the same size.

    python scripts/bench_gpu.py --rows "1b 4x2048" "1b 1x8192 torch" [--results runs/bench_gpu]

A row is `MODEL ROWSxLENGTH [torch] [KEY=VALUE ...]`: a preset (`1b` and `3b` are those of Llama
3.2), the batch, and overrides of the config. Each row is its own process. Both sides compute in
bf16 with fp32 parameters and AdamW moments, on random tokens, one document a row: llmx's compiled
train step with clipping and guard, and `torch.compile` of `LlamaForCausalLM` (presets of Llama
only) under autocast, with fused AdamW and clipping, and with checkpointing where `remat=full`. The
time is the median of steps, each waited for; memory is the allocator's peak. MFU is causal
(docs/performance.md). `profile=DIR` also lists the kernels that take longest.
"""

import argparse
import collections
import contextlib
import dataclasses
import fcntl
import glob
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

GIB = 2**30
MODELS = {"1b": "llama3.2_1b", "3b": "llama3.2_3b"}
WARMUP, STEPS = 3, 12


@dataclasses.dataclass(frozen=True)
class Row:
    model: str
    rows: int
    length: int
    torch: bool
    flags: tuple[tuple[str, str], ...]

    @classmethod
    def parse(cls, text: str) -> "Row":
        model, batch, *rest = text.split()
        rows, length = map(int, batch.split("x"))
        flags = tuple(tuple(each.split("=", 1)) for each in rest if "=" in each)
        return cls(model, rows, length, "torch" in rest, flags)

    @property
    def tokens(self) -> int:
        return self.rows * self.length


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """One measurement at a time on this machine; another process may compile meanwhile."""
    with open(pathlib.Path(tempfile.gettempdir()) / "llmx_bench_gpu.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def timed(step: Callable[[], Any]) -> float:
    """Median seconds of a step, of which `step` waits for the end."""
    times = []
    for _ in range(WARMUP + STEPS):
        begun = time.perf_counter()
        step()
        times.append(time.perf_counter() - begun)
    return statistics.median(times[WARMUP:])


def config_of(row: Row):
    from llmx import config
    from llmx.config import checks
    from llmx.model import families

    run = config.default()
    run.model = families.preset(MODELS.get(row.model, row.model))
    run.batch.size, run.batch.sequence_length = row.rows, row.length
    run.data.pack = False
    types = config.leaf_types(config.Config)
    for key, value in row.flags:
        if key != "profile":
            read = {int: int, float: float, bool: lambda text: text == "True"}.get(types[key], str)
            config.set_value(run, key, read(value))
    return checks.resolve(run, 1)


def of_llmx(row: Row) -> dict[str, Any]:
    import jax
    import numpy as np

    from llmx.config import recipe as recipe_lib
    from llmx.config import utilization
    from llmx.runtime import hardware, launch
    from llmx.step import programs

    run = config_of(row)
    recipe = recipe_lib.make_recipe(run)
    begun = time.perf_counter()
    with alone():  # the compiler measures products to choose their algorithms
        step = programs.compile_step(recipe, launch.log)
    seconds_compiled = time.perf_counter() - begun
    state = recipe.init(0)
    random = np.random.default_rng(0)
    shape = (row.rows, row.length)
    tokens = random.integers(0, run.model.vocab_size, (row.rows, row.length + 1), np.int32)
    arrays = {
        "tokens": tokens[:, :-1], "targets": tokens[:, 1:],
        "segment_ids": np.ones(shape, np.int32), "weights": np.ones(shape, np.float32),
        "positions": np.broadcast_to(np.arange(row.length, dtype=np.int32), shape),
    }  # fmt: skip
    batch = {name: jax.device_put(arrays[name], recipe.loss.batch_sharding) for name in arrays}
    losses = []

    def one():
        nonlocal state
        state, report = step(state, batch)
        losses.append(float(report.loss))

    with alone():
        seconds = timed(one)
    flags = dict(row.flags)
    if "profile" in flags:
        with jax.profiler.trace(flags["profile"]):
            for _ in range(3):
                one()
    reached = utilization.of(run, hardware.this_chip(), 1)
    return {
        "device": jax.devices()[0].device_kind, "seconds": seconds, "compiled": seconds_compiled,
        "first_loss": losses[0], "loss": losses[-1],
        "peak": jax.devices()[0].memory_stats()["peak_bytes_in_use"],
        **reached.shares(row.tokens / seconds),
    } | ({"kernels": kernels(flags["profile"], 3)} if "profile" in flags else {})  # fmt: skip


def kernels(directory: str, steps: int) -> list[tuple[str, float, float]]:
    """(name, milliseconds in a step, times in a step) of what takes longest in a trace."""
    from jax.profiler import ProfileData

    total, count = collections.Counter(), collections.Counter()
    for path in glob.glob(f"{directory}/**/*.xplane.pb", recursive=True):
        for plane in ProfileData.from_file(path).planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            for line in plane.lines:
                if not line.name.startswith("Stream"):
                    continue
                for event in line.events:
                    total[event.name] += event.duration_ns / 1e6 / steps
                    count[event.name] += 1 / steps
    return [(name, ms, count[name]) for name, ms in total.most_common(60)]


def of_torch(row: Row) -> dict[str, Any]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    run = config_of(row)
    m = run.model
    if m.family != "llama3":
        raise ValueError(f"{row.model} is no Llama: leave out `torch`, or give a preset of Llama")
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    shape = LlamaConfig(
        vocab_size=m.vocab_size, hidden_size=m.width, intermediate_size=m.mlp_dim,
        num_hidden_layers=m.num_layers, num_attention_heads=m.num_heads,
        num_key_value_heads=m.num_kv_heads, head_dim=m.head_dim,
        max_position_embeddings=m.max_positions, tie_word_embeddings=m.tied_head,
        attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    with torch.device("cuda"):
        model = LlamaForCausalLM(shape)
    model.train()
    if run.remat != "none":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    tokens = torch.randint(0, m.vocab_size, (row.rows, row.length), device="cuda")
    compiled = torch.compile(model)
    losses = []

    def one():
        with torch.autocast("cuda", torch.bfloat16):
            loss = compiled(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())

    begun = time.perf_counter()
    one()
    seconds_compiled = time.perf_counter() - begun
    with alone():
        seconds = timed(one)
    from llmx.config import utilization
    from llmx.runtime import hardware

    kind = torch.cuda.get_device_name()
    reached = utilization.of(run, hardware.CHIPS["h200" if "H200" in kind else "h100_sxm"], 1)
    return {
        "device": kind, "seconds": seconds, "compiled": seconds_compiled, "first_loss": losses[0],
        "loss": losses[-1], "peak": torch.cuda.max_memory_allocated(),
        **reached.shares(row.tokens / seconds),
    }  # fmt: skip


def main() -> None:
    command = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    command.add_argument("--rows", nargs="+", required=True)
    command.add_argument("--results", default="runs/bench_gpu", help="folder of the results")
    command.add_argument("--alone", action="store_true", help="measure the row in this process")
    command.add_argument("--limit", type=float, default=150, help="seconds of a row")
    args = command.parse_args()
    folder = pathlib.Path(args.results)
    folder.mkdir(parents=True, exist_ok=True)
    for text in args.rows:
        row = Row.parse(text)
        if args.alone:
            found = (of_torch if row.torch else of_llmx)(row)
            name = "".join(char if char.isalnum() else "_" for char in text)
            (folder / f"{name}.json").write_text(json.dumps({"row": text, **found}))
            print(
                f"| {text} | {found['device']} | {found['seconds'] * 1e3:.1f} ms | "
                f"{row.tokens / found['seconds']:,.0f} tokens/s | MFU {100 * found['mfu']:.1f}% | "
                f"{found['peak'] / GIB:.1f} GiB | compiled in {found['compiled']:.0f} s | "
                f"loss {found['first_loss']:.3f}, {found['loss']:.3f} |", flush=True,
            )  # fmt: skip
            for name, ms, times in found.get("kernels", [])[:25]:
                print(f"    {ms:8.2f} ms  {times:6.1f} x  {name[:110]}", flush=True)
            continue
        arguments = [sys.executable, __file__, "--alone", "--rows", text, "--results", str(folder)]
        try:
            done = subprocess.run(
                arguments, timeout=args.limit, stderr=subprocess.PIPE, text=True, check=False
            )
            if done.returncode:
                print(f"| {text} | failed: {done.stderr[-1500:]}", flush=True)
        except subprocess.TimeoutExpired:
            print(f"| {text} | not done in {args.limit:g} s |", flush=True)


if __name__ == "__main__":
    main()
