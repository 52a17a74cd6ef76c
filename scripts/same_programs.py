"""Whether two revisions build the same programs: what a refactoring has to show.

    python scripts/same_programs.py HEAD~1               # the working tree beside that revision
    python scripts/same_programs.py HEAD~1 --only zero   # only the cases with "zero" in their name

Lowers every program of every case (train step in each phase, what replicas exchange between steps,
evaluation) in a worktree of the revision and in this tree, removes what only names things (symbols,
argument and result names, locations), and compares the texts. Each revision lowers with its own
copy of this script; the cases are the ones of this tree. Kernels for TPU and GPU need the extra
`aot`. Exit code 1: some program differs; the first differing lines are printed.
"""

import argparse
import base64
import difflib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEVICES = 8

# By family: sizes that divide over eight devices, layer kinds alternating where they do.
MODELS = {
    "gpt2": dict(num_layers=2, num_heads=8, num_kv_heads=8, head_dim=8),
    "llama3": dict(num_layers=4, num_heads=8, num_kv_heads=4, head_dim=8),
    "qwen3": dict(num_layers=2, num_heads=8, num_kv_heads=4, head_dim=8),
    "gemma2": dict(num_layers=2, num_heads=8, num_kv_heads=4, head_dim=8, window=5),
    "gemma3": dict(
        num_layers=3, num_heads=8, num_kv_heads=4, head_dim=8, window=5,
        layer_pattern=("local", "global"),
    ),
}  # fmt: skip
# Whole lanes and tiles, for the kernels of TPU and GPU.
WIDE = dict(num_layers=2, width=256, num_heads=4, num_kv_heads=2, head_dim=128, mlp_dim=512)
WIDE |= dict(max_positions=1024, vocab_size=512)

# Phases by the names that older revisions gave them.
OLD_NAMES = {"local": "alone"}


def case(name: str, family: str = "llama3", topology: str = "", model: dict | None = None, **keys):
    """One config: `keys` are its values, with __ in the place of dots."""
    values = {"mesh.data": 1} | {key.replace("__", "."): value for key, value in keys.items()}
    model = MODELS[family] | dict(vocab_size=257) if model is None else model
    return dict(name=name, family=family, topology=topology, model=model, values=values)


def sync(strategy: str, **keys):
    shape = {"mesh__data": 4, "mesh__fsdp": 2, "sync__warmup_steps": 5}
    return case(f"sync-{strategy}", **shape | {"sync__strategy": strategy} | keys)


def staged(schedule: str, **keys):
    shape = {"mesh__stage": 2, "mesh__fsdp": 2, "batch__accumulation": 4} | keys
    return case(f"stages-{schedule}", pipeline__schedule=schedule, **shape)


CASES = [
    *(case(f"one-{family}", family) for family in MODELS),
    *(case(f"remat-{name}", remat=name) for name in ("full", "names", "dots")),
    case("accumulation", batch__accumulation=4),
    case("bf16", precision="bf16", mesh__fsdp=8),
    case("ddp", mesh__data=8, sharding__layout="ddp"),
    case("zero1", mesh__data=8, sharding__layout="zero1"),
    case("zero2", mesh__fsdp=8, sharding__layout="zero2", batch__accumulation=2),
    case("zero3", mesh__data=2, mesh__fsdp=4, sharding__layout="zero3"),
    case("hsdp", "gemma3", mesh__data=2, mesh__fsdp=4, sharding__layout="hsdp"),
    case("gather-step", mesh__fsdp=8, sharding__gather="step", batch__accumulation=2),
    case("tensor", "gpt2", mesh__tensor=4, mesh__fsdp=2, loss__chunks=3),
    case("tensor-kv", mesh__tensor=8, sharding__replicate_kv=True),
    case("tensor-norms", mesh__tensor=2, mesh__fsdp=4, sharding__sequence_parallel=False),
    case("expert", mesh__expert=2, mesh__data=2, mesh__tensor=2, sharding__layout="zero2"),
    case("ring", mesh__sequence=4, mesh__fsdp=2),
    case("ring-rows", mesh__sequence=4, mesh__fsdp=2, attention__zigzag=False),
    case("ulysses", mesh__sequence=4, attention__ulysses=4),
    case("ulysses-ring", "gemma3", mesh__sequence=4, mesh__tensor=2, attention__ulysses=2),
    case("reference", attention__implementation="reference", mesh__fsdp=2),
    case("blockwise", attention__implementation="blockwise", mesh__fsdp=2),
    case("unpacked", data__pack=False, mesh__fsdp=2),
    case("z-loss", loss__z_loss=1e-4, optimizer__ema_decay=0.99, guard__spike_factor=5.0),
    *(
        case(f"optimizer-{name}", optimizer__name=name, mesh__fsdp=4)
        for name in ("adafactor", "lion", "muon", "lamb")
    ),
    case("splash", topology="v5e:2x4", model=WIDE, mesh__fsdp=8, precision="bf16"),
    case("splash-ring", topology="v5e:2x4", model=WIDE, mesh__sequence=4, mesh__fsdp=2),
    case("cudnn", topology="h100:8", model=WIDE, mesh__fsdp=8, precision="bf16", data__pack=False),
    case("triton", topology="h100:8", model=WIDE, mesh__fsdp=8, precision="bf16"),
    *map(staged, ("gpipe", "1f1b", "zb_h1", "zb_v", "dual_pipe_v", "pipedream_2bw")),
    staged("interleaved_1f1b", pipeline__virtual_stages=2),
    case("stages-uneven", mesh__stage=2, batch__accumulation=4, pipeline__layers=(3, 1)),
    case(
        "stages-ring",
        mesh__stage=2,
        mesh__sequence=2,
        mesh__tensor=2,
        batch__accumulation=2,
        remat="full",
    ),
    *map(sync, ("int8", "top_k", "power_sgd", "stale", "local_sgd")),
    sync("one_bit", optimizer__name="adamw", sync__warmup_steps=-1),
    sync("one_bit_lamb", optimizer__name="lamb"),
    sync("zero_one", mesh__tensor=2, mesh__fsdp=1),
    sync("diloco", sync__fragments=2),
    case(
        "sync-stages",
        sync__strategy="one_bit",
        sync__warmup_steps=5,
        mesh__stage=2,
        mesh__data=2,
        mesh__fsdp=2,
        batch__accumulation=2,
    ),
]


# --------------------------------------------------------------------------- of this revision alone


def programs(given: dict):
    """(name, lowered) of every program of a case."""
    import jax

    from llmx import config
    from llmx.aot import topologies
    from llmx.config import checks, recipe
    from llmx.model import families
    from llmx.step import step

    run = config.default()
    run.workdir, run.steps, run.precision = "unused", 60, "fp32"
    run.batch.size, run.batch.sequence_length = 16, 16
    if given["topology"]:
        run.batch.sequence_length = 1024
    run.model = families.preset(given["family"], **given["model"])
    for key, value in given["values"].items():
        config.set_value(run, key, tuple(value) if isinstance(value, list) else value)
    sizes = [getattr(run.mesh, axis) for axis in ("stage", "data", "fsdp", "expert", "sequence")]
    count = run.mesh.tensor
    for size in sizes:
        count *= size
    devices = jax.devices()
    if given["topology"]:
        topology = topologies.parse(given["topology"])
        devices, run.launch.platform = topologies.devices(topology), topology.platform
    run = checks.resolve(run, count)
    made = recipe.make_recipe(run, devices=devices[:count])
    state, batch = made.abstract, made.abstract_batch
    with jax.set_mesh(made.mesh):
        for phase in made.strategy.phases:
            yield OLD_NAMES.get(phase, phase), step.make_train_step(made, phase).lower(state, batch)
        for fragments, outer_step in made.strategy.outer.items():
            yield f"exchange{fragments}", outer_step.lower(state)
        if not given["topology"]:
            yield "evaluation", jax.jit(made.gradient.loss).lower(state.params, batch)


# ---------------------------------------------------------------------------------- of all of them


def kernel_text(body: str) -> str:
    """A TPU kernel's bytecode as text, without the lines of the source that it names."""
    from jax._src.lib import tpu
    from jax._src.lib.mlir import ir

    with ir.Context() as context:
        tpu.register_dialect(context)
        context.allow_unregistered_dialects = True
        return ir.Module.parse(base64.b64decode(body)).operation.get_asm()


def stripped(text: str) -> str:
    """A lowered program without what only names things."""
    text = re.sub(r"(?<=body\\22: \\22)[\w+/=]+", lambda body: kernel_text(body.group()), text)
    text = re.sub(r" ?loc\([^()]*(?:\([^()]*\)[^()]*)*\)", "", text)
    text = re.sub(r'jax\.result_info = "[^"]*"', "", text)
    numbers: dict[str, int] = {}
    return re.sub(
        r"@[\w.$-]+", lambda name: f"@{numbers.setdefault(name.group(), len(numbers))}", text
    )


def write(folder: pathlib.Path, cases: list[dict]):
    """Lowers the cases into text files, "<case>.<program>.txt"."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["XLA_FLAGS"] = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
    import jax

    jax.config.update("jax_num_cpu_devices", DEVICES)
    for given in cases:
        for name, lowered in programs(given):
            (folder / f"{given['name']}.{name}.txt").write_text(lowered.as_text())
        jax.clear_caches()


def first_difference(old: str, new: str) -> str:
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=0)
    return "\n".join(line[:160] for line, _ in zip(lines, range(12), strict=False))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("revision", nargs="?", help="a git revision to compare with")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--write", default="", help="only lower the cases, into this folder")
    parser.add_argument("--cases", default="", help="with --write: a JSON file of cases")
    args = parser.parse_args()
    cases = [each for each in CASES if args.only in each["name"]]
    if args.write:
        if args.cases:
            cases = json.loads(pathlib.Path(args.cases).read_text())
        write(pathlib.Path(args.write), cases)
        return 0
    if not args.revision:
        parser.error("name a revision to compare with, for example HEAD~1")
    with tempfile.TemporaryDirectory() as scratch_name:
        scratch = pathlib.Path(scratch_name)
        tree, listed = scratch / "tree", scratch / "cases.json"
        listed.write_text(json.dumps(cases))
        subprocess.run(
            ["git", "-C", ROOT, "worktree", "add", "--quiet", "--detach", tree, args.revision],
            check=True,
        )
        try:
            running = []
            for root, name in ((tree, "old"), (ROOT, "new")):
                (scratch / name).mkdir()
                running.append(
                    subprocess.Popen(
                        [sys.executable, root / "scripts/same_programs.py", "--write",
                         scratch / name, "--cases", listed],
                        env=os.environ | {"PYTHONPATH": str(root)}, cwd=root,
                    )
                )  # fmt: skip
            if any([each.wait() for each in running]):
                return 1
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", tree], check=True)
        names = {path.name for which in ("old", "new") for path in (scratch / which).iterdir()}
        different = 0
        for name in sorted(names):
            old, new = (
                stripped(path.read_text()) if (path := scratch / which / name).exists() else ""
                for which in ("old", "new")
            )
            if old != new:
                different += 1
                print(f"DIFFERS  {name}\n{first_difference(old, new)}")
        print(f"{len(names) - different} of {len(names)} programs of {len(cases)} cases are equal")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
