"""The table of the parity contract: which options train as one device does, and what cannot meet.

A new technique that leaves the numbers alone adds an axis, or a value to one; the cover of all
pairs follows by itself. `PYTHONPATH=tests python tests/support/parity_grid.py` prints it.
"""

import functools
import itertools
import math

import jax
from support import packed, pairwise, runs
from support.pairwise import Rule

from llmx.pipeline import schedules

BATCH, LENGTH, VOCAB, STEPS = 32, 16, 257, 3
DEVICES = 8
MESH_AXES = ("stage", "data", "fsdp", "expert", "sequence", "tensor")

# Sizes that divide over eight devices; layer kinds alternate where a family has several.
MODEL = dict(vocab_size=VOCAB, width=64, mlp_dim=128, num_heads=8, head_dim=8)
FAMILIES = {
    "llama3": dict(num_kv_heads=4),
    "gpt2": dict(num_kv_heads=8),  # tied, learned positions, biases
    "qwen3": dict(num_kv_heads=4),
    "gemma2": dict(num_kv_heads=4, window=5),
    # With gemma2's softcaps.
    "gemma3": dict(num_kv_heads=4, window=5, layer_pattern=("local", "global"),
                   attention_softcap=2.0, logit_softcap=5.0),
    # Routed experts, with a shared one beside them.
    "mixtral": dict(num_kv_heads=4, num_experts=4, expert_dim=64, shared_dim=32),
    # Sinks, yarn, biases of routers and experts, clamped; local and global layers.
    "gpt_oss": dict(num_kv_heads=4, window=5, num_experts=4, experts_per_token=2, expert_dim=64),
    # Latent attention, and dense first layers: stages have unequal numbers of the others.
    "deepseek_v3": dict(
        num_kv_heads=8, rope_dim=4, num_experts=4, experts_per_token=2, expert_dim=64,
        shared_dim=32, first_dense=2, router_groups=2, router_groups_kept=1,
    ),
}  # fmt: skip
# All that qwen3 and gemma2 have is in these; each family is on one device what its own tests say.
OF_COVER = ("llama3", "gpt2", "gemma3", "mixtral", "gpt_oss", "deepseek_v3")
EXPERTS = dict(experts__bias_rate=1e-3, experts__z_weight=1e-3)
# Loads are unequal: rows over `expert` travel in several rounds.
TRAVEL = dict(experts__buffer=0.5)

# The first value of each axis is the plain one. Of other orders most give more rows.
AXES = {
    "offload": ("", "optimizer", "saves"),
    # One with each kind of operation and of placement; the others have a row of EXTREMES each.
    "schedule": ("", "1f1b", "interleaved_1f1b", "zb_h1", "dual_pipe_v"),
    "layout": ("zero3", "ddp", "zero1", "zero2", "hsdp"),
    "family": OF_COVER,
    # Ranges of layers are of a model chunk, where there are several.
    "remat": ("none", "full", "names", "sqrt", "every_2+names", ":1=full,dots"),
    "stage": (1, 2, 4),
    "sequence": (1, 2, 4),
    "tensor": (1, 2, 4),
    "fsdp": (1, 2),
    "data": (1, 2),
    "expert": (1, 2),
    "accumulation": (1, 2, 4, 8),
    "gather": ("layer", "step"),
    "ulysses": (1, 2),
    "zigzag": (True, False),
    "sequence_parallel": (True, False),
    "replicate_kv": (False, True),
    "chunks": (0, 3),
    "turns": (1, 2),
    "loss_scale": ("none", "dynamic"),
}  # fmt: skip


# Schedules whose backward pass is in two operations (zero bubble).
LEFT_FOR_LATER = ("zb_1f1b", "zb_h1", "zb_v", "dual_pipe_v")


@functools.cache
def _schedule(schedule: str, stage: int, accumulation: int) -> str:
    if not schedule:
        return ""
    try:
        schedules.SCHEDULES[schedule](stage, accumulation)
    except ValueError as error:
        return str(error)
    return ""


def _devices(*sizes: int) -> str:
    return "more than eight devices" if math.prod(sizes) > DEVICES else ""


def _rows(*ways: int) -> str:
    return "rows of the batch do not divide" if BATCH % math.prod(ways) else ""


def _turns(turns: int, *ways: int) -> str:
    rows = BATCH // math.prod(ways)
    return f"{rows} rows have no {turns} turns" if rows % turns else ""


def has_experts(family: str) -> bool:
    return "num_experts" in FAMILIES[family]


def _turns_of_experts(turns: int, family: str) -> str:
    routed = turns > 1 and has_experts(family)
    return "loads of experts are of all tokens of a row" if routed else ""


def _left_for_later(turns: int, schedule: str) -> str:
    late = turns > 1 and schedule in LEFT_FOR_LATER
    return "weight gradients are left for later, one for each product" if late else ""


def _stages(schedule: str, stage: int) -> str:
    return "a schedule is for several stages" if bool(schedule) != (stage > 1) else ""


def _gather(gather: str, layout: str) -> str:
    whole = gather == "step" and layout not in ("zero3", "hsdp")
    return "parameters of this layout are whole: there is nothing to gather" if whole else ""


def _zigzag(zigzag: bool, sequence: int, ulysses: int) -> str:
    return "without a ring there is no zigzag" if not zigzag and sequence == ulysses else ""


def _saves(offload: str, remat: str) -> str:
    nothing = offload == "saves" and remat == "none"
    return "everything is kept on the device: no saves are named" if nothing else ""


def _saves_of_stages(offload: str, stage: int) -> str:
    on_device = offload == "saves" and stage > 1
    return "stages keep what layers save in buffers on the device" if on_device else ""


def _of(axis: str, plain):
    """An option other than the plain one does something only where the mesh axis is split."""
    return lambda value, size: f"no effect without {axis}" if value != plain and size == 1 else ""


RULES = (
    Rule(MESH_AXES, _devices, partial=True),
    Rule(("data", "fsdp", "expert", "accumulation"), _rows, partial=True),
    Rule(("turns", "data", "fsdp", "expert", "accumulation"), _turns, partial=True),
    Rule(("turns", "schedule"), _left_for_later),
    Rule(("turns", "family"), _turns_of_experts),
    Rule(("schedule", "stage"), _stages),
    Rule(("schedule", "stage", "accumulation"), _schedule),
    Rule(("gather", "layout"), _gather),
    Rule(("offload", "remat"), _saves),
    Rule(("offload", "stage"), _saves_of_stages),
    Rule(("ulysses", "sequence"), _of("sequence", 1)),
    Rule(("zigzag", "sequence"), _of("sequence", True)),
    Rule(("zigzag", "sequence", "ulysses"), _zigzag),
    Rule(("sequence_parallel", "tensor"), _of("tensor", True)),
    Rule(("replicate_kv", "tensor"), _of("tensor", False)),
)
PLAIN = {axis: values[0] for axis, values in AXES.items()}
OFFLOAD = {
    "": {},
    "optimizer": dict(offload__optimizer=True),
    "saves": dict(offload__saves=("input", "attention")),
    "parameters": dict(offload__parameters=True),
}

REFERENCE = dict(attention__implementation="reference")
# A strategy that sums all numbers: a compressor of which none is compressed.
SYNC = {"": {}, "int8": dict(sync__strategy="int8", sync__uncompressed=("*",))}
# Rows with "adapters": what is trained is beside a frozen model, whose routers learn no bias.
ADAPTERS = dict(adapters__rank=4)


# Beyond the cover: all eight devices on one axis, fewer microbatches than stages and many more;
# parameters on the host, which many options exclude; and parts of a pipeline that keep their input.
EXTREMES = [
    PLAIN | changes
    for changes in (
        dict(data=8, layout="zero1", remat="full", accumulation=2),
        dict(fsdp=8, family="gpt2", remat="full", chunks=3),
        dict(data=2, fsdp=4, layout="hsdp", gather="step", accumulation=2, chunks=3),
        dict(tensor=8, layout="ddp", replicate_kv=True, accumulation=2),
        dict(sequence=8, remat="names"),  # tests/model/attention/test_ring.py has windows
        dict(expert=4, tensor=2, family="mixtral", remat="full"),
        dict(
            data=2,
            fsdp=2,
            expert=2,
            family="mixtral",
            layout="hsdp",
            gather="step",
            accumulation=2,
            remat="names",
        ),
        dict(stage=8, schedule="1f1b", accumulation=4, family="gpt2"),
        dict(stage=8, schedule="zb_h1", accumulation=16, layout="ddp", remat="full"),
        dict(
            offload="parameters",
            layout="hsdp",
            family="gemma3",
            remat="every_2+names",
            data=2,
            fsdp=2,
            tensor=2,
            accumulation=2,
            turns=2,
            loss_scale="dynamic",
        ),
        dict(
            offload="parameters", family="gpt2", remat=":1=full,dots", fsdp=2, sequence=4, chunks=3
        ),
        dict(stage=4, schedule="zb_1f1b", accumulation=8, family="gemma3", remat="part", fsdp=2),
        dict(stage=4, schedule="gpipe", accumulation=4, layout="zero1", remat="dots", data=2),
        dict(
            stage=2,
            schedule="zb_v",
            accumulation=4,
            family="gpt2",
            layout="zero2",
            remat="names",
            fsdp=2,
            tensor=2,
        ),
        dict(
            stage=2,
            schedule="interleaved_1f1b",
            accumulation=4,
            layout="hsdp",
            family="gemma2",
            remat="part+dots",
            tensor=2,
            data=2,
        ),
        # Replicas whose strategy leaves nothing out.
        dict(data=2, fsdp=2, tensor=2, layout="hsdp", accumulation=2, sync="int8"),
    )
]


@functools.cache
def cover() -> pairwise.Cover:
    return pairwise.cover(AXES, RULES)


def every_mesh() -> list[dict]:
    """Every mesh with every layout, family and schedule; the other options as the rules want."""
    product = {axis: AXES[axis] for axis in ("layout", "family", "schedule", *MESH_AXES)}
    combinations = itertools.product(*product.values())
    rows = (dict(zip(product, values, strict=True)) for values in combinations)
    found = (
        pairwise.completed(row, AXES, RULES, lambda *_: 0)
        for row in rows
        if not pairwise.problem(row, RULES)
    )
    return [row for row in found if row]


SHARE = 0.8  # of all pairs, in the rows that run without `--full-grid`


def cost(row: dict) -> float:
    """CPU seconds of a row beside those of a plain one, roughly: what its program takes to
    compile."""
    schedule = row["schedule"]
    of_schedule = 3 if schedule in SLOW_SCHEDULES else 2 if schedule in LEFT_FOR_LATER else 1
    of_family = 2 if row["family"] == "deepseek_v3" else 1.5 if has_experts(row["family"]) else 1
    return of_schedule * of_family


@functools.cache
def last_of_cover() -> list[dict]:
    """The rows with `--full-grid` only. The others have every value and four of five pairs: those
    that have most new pairs for what they cost."""
    chosen = quick()
    left = [row for row in cover().rows if row not in chosen]
    all_pairs = set().union(*map(pairwise.pairs_of, cover().rows))
    met = set().union(*map(pairwise.pairs_of, chosen))
    values = {item for row in chosen for item in row.items()}

    def gain(row: dict) -> tuple[bool, float]:  # new values first
        new = len(pairwise.pairs_of(row) - met)
        return not values >= set(row.items()), new / cost(row)

    while len(met) < SHARE * len(all_pairs):
        best = max(left, key=gain)
        left.remove(best)
        met |= pairwise.pairs_of(best)
        values |= set(best.items())
    return left


# Its programs take longest to compile; `zb_h1` and `1f1b` have all of its operations.
SLOW_SCHEDULES = ("dual_pipe_v",)


def quick() -> list[dict]:
    """A few rows in which every value occurs, but for those of `SLOW_SCHEDULES`."""
    rows = [row for row in cover().rows if row["schedule"] not in SLOW_SCHEDULES]
    return pairwise.every_value(rows, cost=lambda row: 2 if row["stage"] > 1 else 1)


def with_adapters() -> list[dict]:
    """Rows with adapters: those of the quick ones that split something, and parameters on the
    host."""
    rows = [row for row in quick() if row["family"] != "gpt_oss" and row["layout"] != "zero3"]
    on_host = [row for row in EXTREMES if row["offload"] == "parameters"]
    return [row | dict(adapters=True) for row in (*rows, *on_host[:1])]


def num_layers(row: dict) -> int:
    """Layers that no number of stages divides, and one at least for each model chunk, beside the
    dense first ones; without stages as many as `sqrt` makes segments of."""
    if row["stage"] > 1:
        return 9 + FAMILIES[row["family"]].get("first_dense", 0)
    return 7 if row["remat"] == "sqrt" else 3


def make_config(row: dict, precision: str = "fp32", model: dict | None = None, **keys):
    """The config of a row, with changes of the model and other keys."""
    model = MODEL | FAMILIES[row["family"]] | dict(num_layers=num_layers(row)) | (model or {})
    options = dict(pipeline__schedule=row["schedule"]) if row["schedule"] else {}
    options |= OFFLOAD[row["offload"]] | SYNC[row.get("sync", "")]
    if "num_experts" in model:
        options |= EXPERTS | (TRAVEL if row["expert"] > 1 else {})
    if row.get("adapters"):
        options |= ADAPTERS | (dict(experts__bias_rate=0.0) if "num_experts" in model else {})
    return runs.make_config(
        row["family"],
        model=model,
        mesh={axis: row[axis] for axis in MESH_AXES},
        precision=precision,
        remat=row["remat"],
        batch__sequence_length=LENGTH,
        batch__accumulation=row["accumulation"],
        sharding__layout=row["layout"],
        sharding__gather=row["gather"],
        sharding__sequence_parallel=row["sequence_parallel"],
        sharding__replicate_kv=row["replicate_kv"],
        attention__ulysses=row["ulysses"],
        attention__zigzag=row["zigzag"],
        sharding__turns=row["turns"],
        loss__chunks=row["chunks"],
        loss__z_loss=1e-4,
        loss_scale__kind=row["loss_scale"],
        **runs.PARITY_OPTIMIZER | dict(batch__size=BATCH) | options | keys,
    )


def make_recipe(row: dict, precision: str = "fp32", **keys):
    """The program of a row; see `make_config`."""
    return runs.make_recipe(make_config(row, precision, **keys))


@functools.cache
def batches() -> list[dict]:
    return packed.batches(STEPS, rows=BATCH, length=LENGTH, vocab=VOCAB)


@functools.cache
def reference(family: str, num_layers: int, adapters: bool = False):
    """What one device does: the initial state on the host, and three steps from it."""
    row = PLAIN | dict(family=family, adapters=adapters)
    recipe = make_recipe(row, model=dict(num_layers=num_layers), **REFERENCE)
    state = recipe.init(0)
    return jax.device_get(state), runs.train(recipe, batches(), state)


def name(row: dict) -> str:
    """What a row has beside the plain values: "gpt2-ddp-data2-tensor4-remat_full"."""
    words = [row["family"], row["layout"]]
    for axis, value in row.items():
        if axis in ("family", "layout") or value == PLAIN.get(axis):
            continue
        if axis in MESH_AXES:
            words.append(f"{axis}{value}")
        elif axis == "schedule":
            words.append(value)
        else:
            words.append(axis if value is True else f"{axis}_{value}")
    return "-".join(words)


if __name__ == "__main__":
    print(*map(name, cover().rows), sep="\n")
    for pair, reason in cover().invalid.items():
        print(*(f"{axis}={value!r}" for axis, value in pair), "cannot meet:", reason)
