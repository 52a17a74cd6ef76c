"""Programs that nobody chose, for the planner to be compared with: drawn from a seed.

    python scripts/draw_programs.py --seed 1 --count 12 > drawn.jsonl
    python scripts/validate_planner.py --programs drawn.jsonl --compile

Machines, families, sizes (heads, widths, vocabulary, sequences; odd ones too), meshes, layouts,
schedules, rings and Ulysses, `remat`, precision, offload, optimizer, strategies of `sync`. Models
have few layers, so that one compiles in a minute or two. `--axis stage` draws those with more than
one device along that mesh axis. What `llmx.config` refuses, or what the planner does not count, is
drawn again; whether it fits is not asked.

`--published` draws models of published shapes, 0.5 to 9 billion parameters, of 2 to 32 GiB on a
device by the planner's count and admitted by it, with sequences of 2,048 to 32,768 tokens.
"""

import argparse
import pathlib
import random

from llmx import sharding
from llmx.aot import topologies
from llmx.config import flags as flags_lib
from llmx.model import families
from llmx.plan import candidates, compiled_programs, experts, run_report
from llmx.plan.compiled_programs import Program
from llmx.plan.search import ADMITTED

CONFIGS = pathlib.Path(__file__).resolve().parents[1] / "configs"
MACHINES = (
    "v5e:2x2", "v5e:2x4", "v5e:4x4", "v5p:2x2x1", "v5p:2x2x2", "v5p:2x2x4", "h100:4", "h100:6",
    "h100:8", "h100:2x8", "h100:4x8", "h100:8x8",
)  # fmt: skip
FAMILIES = ("gpt2_124m", "qwen3_0.6b", "llama3_8b", "gemma3_1b", "mixtral_8x7b")
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "pipedream_2bw", "zb_h1")
OFFLOADS = ("optimizer", "parameters")
# Config, and the shape that it is given.
PUBLISHED = {
    "qwen3_0.6b": "qwen3_0.6b", "qwen3_8b": "qwen3_0.6b", "gemma3_1b": "gemma3_1b",
    "gemma3_4b": "gemma3_1b", "llama3.2_1b": "llama3_8b", "llama3.2_3b": "llama3_8b",
    "llama3_8b": "llama3_8b", "mistral_7b": "llama3_8b", "qwen2.5_7b": "llama3_8b",
    "olmo2_7b": "llama3_8b", "phi3_mini_4k": "llama3_8b", "gemma2_2b": "gemma3_1b",
}  # fmt: skip
LARGE_MACHINES = (
    "v5e:2x4", "v5e:4x4", "v5e:8x8", "v5e:16x16", "v5p:2x2x2", "v5p:2x2x4", "v5p:4x4x4", "h100:8",
    "h100:2x8", "h100:4x8", "h100:8x8", "h100:16x8",
)  # fmt: skip
LEAST, MOST = 2 * 2**30, 32 * 2**30  # bytes of a device
STRATEGIES = ("int8", "power_sgd", "top_k", "local_sgd", "diloco", "stale")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument(
        "--axis", choices=sharding.AXES, help="a mesh axis that has more than one device"
    )
    parser.add_argument("--published", action="store_true", help="models of published shapes")
    flags = parser.parse_args()
    if flags.published and flags.axis == "expert":
        parser.error("--axis expert: no published shape that is drawn has experts")
    rng, found = random.Random(flags.seed), 0
    while found < flags.count:
        program = draw_published(rng) if flags.published else draw(rng)
        split = not flags.axis or f"mesh.{flags.axis}=1" not in program.flags
        if split and is_counted(program, medium=flags.published):
            print(compiled_programs.to_line(program), flush=True)
            found += 1


def is_counted(program: Program, *, medium: bool = False) -> bool:
    """`medium`: also whether it takes `LEAST` to `MOST`, and is admitted."""
    try:
        run, topology = compiled_programs.resolved(program, CONFIGS)
        refused = candidates.refusal(run) or experts.refusal(run, topology.device_kind)
        held, _ = run_report.count(run, topology, phase=program.phase)
    except ValueError:
        return False
    within = LEAST <= held.peak <= min(MOST, ADMITTED * topology.hbm_bytes)
    return not refused and (within or not medium)


def draw_published(rng: random.Random) -> Program:
    """One of a published model, which may be none that a config allows."""
    name, machine = rng.choice(tuple(PUBLISHED)), rng.choice(LARGE_MACHINES)
    topology = topologies.parse(machine)
    keys = {"mesh.across_slices": ()} | shape(name)
    keys |= mesh(rng, topology.num_devices, experts=False)
    if rng.random() < 0.4:  # plain data parallelism is what most use
        ways = keys["mesh.data"] * keys["mesh.stage"] * keys["mesh.sequence"] * keys["mesh.tensor"]
        keys |= {"mesh.data": 1, "mesh.stage": 1, "mesh.sequence": 1, "mesh.tensor": 1}
        keys["mesh.fsdp"] *= ways
    stage, data, fsdp = (keys[f"mesh.{axis}"] for axis in ("stage", "data", "fsdp"))
    microbatches = rng.choice((1, 1, 1, 2, 4, 8))
    if stage > 1:
        keys["pipeline.schedule"] = rng.choice(SCHEDULES)
        microbatches = stage * rng.choice((1, 2, 4))
    keys["batch.accumulation"] = microbatches
    keys["batch.size"] = data * fsdp * microbatches * rng.choice((1, 1, 2, 4, 8))
    keys["batch.sequence_length"] = 2048 * rng.choice((1, 1, 2, 2, 4, 4, 8, 16))
    layouts = ["zero3"] if data == 1 else ["ddp", "zero1", "zero2", "hsdp", "hsdp"]
    keys["sharding.layout"] = rng.choice(layouts)
    remats = ("none", "full", "full", "names", "dots", "attention", "attention+gate", "sqrt")
    keys["remat"] = rng.choice(remats)
    keys["precision"] = precision(rng, topology)
    if rng.random() < 0.15:
        keys["products.format"] = "int8" if topology.platform == "tpu" else "fp8"
    keys["optimizer.name"] = rng.choice(("adamw", "adamw", "adamw", "lion"))
    if keys["mesh.sequence"] > 1:
        keys["attention.ulysses"] = keys["mesh.sequence"] if rng.random() < 0.4 else 1
    if rng.random() < 0.15:
        keys[f"offload.{rng.choice(OFFLOADS)}"] = True
    return Program(PUBLISHED[name], machine, tuple(f"{key}={value}" for key, value in keys.items()))


def shape(name: str) -> dict[str, object]:
    """Of a published model, where its config has another."""
    config = CONFIGS / f"{PUBLISHED[name]}.py"
    _, run, _ = flags_lib.parse(flags_lib.parser("draw_programs", ""), [f"--config={config}"])
    own, wanted = vars(run.model), vars(families.preset(name))
    keys = {f"model.{key}": value for key, value in wanted.items() if value != own[key]}
    if run.data.train_tokenizer:
        keys |= {"data.train_tokenizer": 0, "model.vocab_size": wanted["vocab_size"]}
    return keys


def draw(rng: random.Random) -> Program:
    """One, which may be none that a config allows."""
    machine, family = rng.choice(MACHINES), rng.choice(FAMILIES)
    topology = topologies.parse(machine)
    keys = {"mesh.across_slices": ()} | model(rng, family)
    keys |= mesh(rng, topology.num_devices, experts=family == "mixtral_8x7b")
    of_mesh = {axis: keys[f"mesh.{axis}"] for axis in ("stage", "data", "fsdp")}
    microbatches = rng.choice((1, 1, 2, 4))
    if of_mesh["stage"] > 1:
        keys["model.num_layers"] = of_mesh["stage"] * rng.choice((1, 1, 2, 3))
        keys["pipeline.schedule"] = rng.choice(SCHEDULES)
        microbatches = of_mesh["stage"] * rng.choice((1, 2))
    keys["batch.accumulation"] = microbatches
    rows = of_mesh["data"] * of_mesh["fsdp"] * keys["mesh.expert"] * microbatches
    keys["batch.size"] = rows * rng.choice((1, 1, 2, 4))
    lengths = (512, 1024) if family == "gpt2_124m" else (1024, 1536, 2048, 4096, 8192)
    keys["batch.sequence_length"] = rng.choice(lengths)
    layouts = ["zero3"] if of_mesh["data"] == 1 else ["ddp", "zero1", "zero2", "hsdp"]
    keys["sharding.layout"] = rng.choice(layouts)
    keys["remat"] = rng.choice(("none", "full", "names", "dots", "attention+gate", "sqrt"))
    keys["precision"] = precision(rng, topology)
    if rng.random() < 0.2:
        keys["products.format"] = "int8" if topology.platform == "tpu" else "fp8"
    keys["optimizer.name"] = rng.choice(("adamw", "adamw", "lion"))
    if keys["mesh.sequence"] > 1:
        keys["attention.ulysses"] = keys["mesh.sequence"] if rng.random() < 0.4 else 1
    if rng.random() < 0.15:
        keys[f"offload.{rng.choice(OFFLOADS)}"] = True
    if rng.random() < 0.2 and of_mesh["data"] > 1 and microbatches == of_mesh["fsdp"] == 1:
        keys |= {"sync.strategy": rng.choice(STRATEGIES), "sharding.layout": "ddp"}
    phase = "local" if keys.get("sync.strategy") in ("local_sgd", "diloco") else ""
    return Program(family, machine, tuple(f"{key}={value}" for key, value in keys.items()), phase)


def model(rng: random.Random, family: str) -> dict[str, object]:
    """Sizes: those of the family, or others."""
    keys: dict[str, object] = {"model.num_layers": rng.choice((2, 3, 4, 6))}
    if family == "mixtral_8x7b":
        return keys | {"model.num_experts": rng.choice((4, 8))}
    if rng.random() < 0.5:
        return keys
    heads = rng.choice((4, 6, 8, 12, 20))
    head_dim = 64 if family == "gpt2_124m" else rng.choice((64, 128))
    width = heads * head_dim if family == "gpt2_124m" else 128 * rng.randint(5, 24)
    groups = 1 if family == "gpt2_124m" else rng.choice((1, 2, 4))
    vocab = rng.choice((8192, 32000, 50257, 100277, 151936))
    keys |= {"model.num_heads": heads, "model.num_kv_heads": max(1, heads // groups)}
    keys |= {"model.head_dim": head_dim, "model.width": width, "model.vocab_size": vocab}
    return keys | {"model.mlp_dim": 128 * rng.randint(10, 80)}


def mesh(rng: random.Random, num_devices: int, *, experts: bool) -> dict[str, object]:
    """Every prime of the number of devices goes to one of three axes of the five, or six."""
    third = ("expert", "tensor") if experts else ("stage", "sequence", "tensor")
    axes = ["data", "fsdp", rng.choice(third)]
    sizes = dict.fromkeys(("stage", "data", "fsdp", "expert", "sequence", "tensor"), 1)
    while num_devices > 1:
        prime = next(one for one in range(2, num_devices + 1) if num_devices % one == 0)
        sizes[rng.choice(axes)] *= prime
        num_devices //= prime
    return {f"mesh.{axis}": size for axis, size in sizes.items()}


def precision(rng: random.Random, topology: topologies.Topology) -> str:
    names = ("bf16", "bf16", "bf16", "pure_bf16", "bf16_fp32_reduce", "fp32")
    return rng.choice(names + ("fp16",) * (topology.platform == "gpu"))


if __name__ == "__main__":
    main()
