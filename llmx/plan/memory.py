"""What a device holds at the peaks of a train step, counted without a compiler.

The state is counted leaf by leaf, as the layout splits it. What comes and goes is counted in whole
arrays, as many as the programs have that XLA makes for TPUs and for GPUs: `TPU` and `GPU` below.
There are three peaks, of which the largest is the device's:

    end of forward    what layers saved, gradient buffers, and the loss: logits of one chunk
                      (`gradient_memory.at_the_loss` says which buffers)
    backward          what layers saved, gradient buffers, one layer run again and differentiated
    update            where each device updates a share of parameters that it keeps whole, the new
                      ones beside the old; with Muon whole matrices beside all gradients

Pipelines are counted by `llmx.config.stage_memory`. docs/plan.md compares both with compiled
programs.

Letters: as in `llmx.model.costs`.
"""

import dataclasses
import math
from collections.abc import Sequence

from llmx import sharding
from llmx.aot.topologies import Topology
from llmx.config import loss_memory, recipe, stage_memory, state_memory
from llmx.config.axes import gathers_head_once, is_one_device
from llmx.config.state_memory import leaves
from llmx.model import quantization, remat, remat_costs
from llmx.model.attention import splash
from llmx.model.families import ModelConfig, is_local
from llmx.plan import exchange, experts, gradient_memory, head_memory, orthogonal, periods
from llmx.plan.sizes import Sizes

FP32 = 4
SHARES_ON_THE_WAY = 2  # shares of new parameters that are being gathered, on GPUs
BEGUN = 2  # arrays [tokens, D] that are gathered beside the loss, on GPUs
MOST_AT_A_TIME = 3  # groups of tokens that take turns whose MLP is differentiated, on GPUs
WHOLE_HEADS = 3  # gradients of the head at a time, with gather="step" and one microbatch
END_OF_FORWARD, BACKWARD, UPDATE = "end of forward", "backward", "update"


@dataclasses.dataclass(frozen=True)
class Program:
    """What the programs of a compiler have at a time, as read from those that were compiled."""

    # Whole arrays of a microbatch while a layer is run again and differentiated.
    mlp: float  # [tokens, F]: gate, up, their activation, gradients
    plain_mlp_alone: float  # the same of an MLP without gate, on one GPU
    inside: float  # [tokens, D] where positions are whole, with mesh.tensor > 1
    between: float  # [tokens, D] between blocks
    heads: float  # [tokens, N H]
    query_gradients: float  # the same for each that the attention kernel writes (`_blocks_of_keys`)
    normed_heads: float  # more of these, and of [tokens, K H], with norms of queries and keys
    kv_heads: float  # [tokens, K H]
    weights: float  # gathered weights of a layer, and their gradients: of all its weights
    # Where few tokens leave little to compute, the next layer's weights come before this one is
    # done: of [tokens, F], and for each layer that is there at a time of its weights and of their
    # gradients, in the reduce dtype, then, in place of `mlp` and `weights`.
    ahead: tuple[float, float, float]
    without_gathers: float  # times as many [tokens, F] where nothing waits for gathered weights
    bodies: bool  # layers of several kinds are computed at the same time
    bodies_alone: float  # at most so many where there is one device
    # Copies that XLA makes before its loops, in another layout.
    copied: tuple[str, ...]  # endings of the names of parameters; on TPUs in fp32
    head_copies: float  # of saved queries
    gathered_head: float  # of the head's share all the time
    lanes: int  # that the size of a head, and rows, are padded to


# With libtpu 0.0.42.1 and XLA of jax 0.10.2.
TPU = Program(
    mlp=3.0, plain_mlp_alone=3.0, inside=3.0, between=2.0, heads=0.0, query_gradients=1.0,
    normed_heads=0.0, kv_heads=6.0, weights=1.2,
    ahead=(0.0, 0.0, 0.0), without_gathers=1.0, bodies=False, bodies_alone=1.0,
    copied=("attention/query/kernel", "attention/key/kernel", "attention/value/kernel"),
    head_copies=0.0, gathered_head=0.0, lanes=128,
)  # fmt: skip
GPU = Program(
    mlp=6.0, plain_mlp_alone=5.0, inside=2.5, between=5.0, heads=2.0, query_gradients=0.0,
    normed_heads=3.0, kv_heads=0.0, weights=1.4,
    ahead=(3.0, 1.0, 1.75), without_gathers=1.5, bodies=True, bodies_alone=1.5,
    copied=("mlp/down/kernel", "attention/out/kernel"),
    head_copies=1.0, gathered_head=1.0, lanes=1,
)  # fmt: skip

# What XLA:TPU copies into another layout (`_turned`): where several loops read it; on one device.
_TURNED = ("mlp/down/kernel", "attention/query/kernel", "attention/out/kernel")
_TURNED_ALONE = (*TPU.copied, "attention/out/kernel")


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of a device."""

    state: dict[str, int]  # "parameters", "optimizer", "ema"; what lives all the time
    peaks: dict[str, dict[str, int]]  # by moment: what comes to the state, by what it is for
    host: int = 0  # of the state, in the host's memory for this device
    refusal: ValueError | None = None  # why the run would not begin, for want of memory

    @property
    def moment(self) -> str:
        """The name of the largest peak."""
        return max(self.peaks, key=lambda name: sum(self.peaks[name].values()))

    @property
    def peak(self) -> int:
        return sum(self.state.values()) + sum(self.peaks[self.moment].values())


def of(
    sizes: Sizes,
    *,
    on_gpu: bool = False,
    exchanges: bool = False,
    turns: int = 1,
    device_bytes: int | None = None,
) -> Memory:
    """Of a resolved run. `exchanges`: as `traffic.of` has it; `turns`: of `recipe.turns_of`.

    `device_bytes`: of a device; with zero-bubble schedules it decides how many weight gradients are
    deferred. Raises ValueError for remat="budget".
    """
    if sizes.mesh["stage"] > 1:
        return _of_stages(sizes, on_gpu, device_bytes)
    program = GPU if on_gpu else TPU
    common = _saved(sizes, program) | gradient_memory.buffers(sizes) | _copies(sizes, program)
    common |= _gathered(sizes) | _rounded(sizes)
    if not on_gpu:
        common |= {"rounded embedding": _rounded_table(sizes, "embedding")}
    if on_gpu:
        common |= {
            "a period of layers": _of_period(sizes, common["saved activations"]),
            "gradient of the embedding": gradient_memory.embedding_in_fp32(sizes),
        }
    else:
        common |= {"turned weights": _turned(sizes)}
    if sizes.run.sync.strategy != "mean":
        common.pop("gradients", None)  # the program makes them where the exchange's old state was
    peaks = {
        END_OF_FORWARD: common | {
            "loss": max(
                loss_memory.of(sizes.run, on_gpu=on_gpu), head_memory.scattered(sizes, on_gpu)
            ),
            "gradient of the head": 0.0 if on_gpu else head_memory.in_the_loss(sizes, exchanges),
            "a layer, begun": _begun(sizes, program, turns),
        } | gradient_memory.at_the_loss(sizes, common, on_gpu),
        BACKWARD: common | {
            "rounded head": 0.0 if on_gpu else _rounded_table(sizes, "head"),
            "a layer": max(_layer(one, program, turns) for one in sizes.stacks),
            "a segment": _segment(sizes.stacks[-1]),
            "gradient of the head": head_memory.behind_the_loss(sizes, on_gpu),
            "logits": loss_memory.kept_logits(sizes.run, on_gpu=on_gpu),
            "tables in another layout": head_memory.padded_tables(sizes, program.lanes),
        }
        | gradient_memory.summed_at_once(sizes, common, on_gpu)
        | _turned_table(sizes, common, program),
        UPDATE: _relaid(sizes, program) | _orthogonalized(sizes) | {
            "updated parameters": _updated(sizes, on_gpu, device_bytes),
        },
    }  # fmt: skip
    whole = lambda parts: {name: math.ceil(of) for name, of in parts.items() if of}  # noqa: E731
    peaks = {name: whole(parts) for name, parts in peaks.items() if any(parts.values())}
    return Memory(whole(state(sizes)), peaks, math.ceil(sum(state(sizes, on_host=True).values())))


def on(sizes: Sizes, topology: Topology) -> Memory:
    """`of` a run on a machine."""
    return of(
        sizes, on_gpu=topology.platform == "gpu", device_bytes=topology.chip.device_hbm_bytes,
        exchanges=sharding.exchanges(topology.device_kind, topology.num_devices),
        turns=recipe.turns_of(sizes.run, topology.device_kind),
    )  # fmt: skip


def state(sizes: Sizes, *, on_host: bool = False) -> dict[str, float]:
    """What lives from step to step, on the device or in the host's memory for it.

    With another strategy than "mean" also what replicas keep to exchange less.
    """
    if sizes.run.sync.strategy != "mean":
        return {} if on_host else exchange.state(sizes.run)
    return state_memory.of(sizes.run, on_host=on_host)


def _saved(sizes: Sizes, program: Program) -> dict[str, float]:
    """What layers save for the backward pass, of one microbatch, and copies of it."""
    found = saved(sizes, program)
    if _alone(sizes, program) or (program is GPU and (sizes.several or _hides_copies(sizes))):
        return found
    return found | {"copies of activations": program.head_copies * _queries(sizes)}


def _hides_copies(sizes: Sizes) -> bool:
    """Whether queries are rotated, and no weights gathered: as compiled with `ddp`, `zero1` and
    `zero2`, XLA:GPU then saves them in the layout that attention takes."""
    gathers = sizes.axes_of("embed", "parameters")
    return not gathers and sizes.run.model.positions == "rope"


def saved(sizes: Sizes, program: Program) -> dict[str, float]:
    """What all layers save for the backward pass, of one microbatch."""
    # Arrays of the stream are split as between blocks, those of heads and MLP over `tensor`, but
    # for keys and values that each device has. XLA:TPU fills heads up to whole lanes, but queries
    # and results of attention have positions last in a model that rotates queries, where a device
    # has whole sequences and layers do not save all.
    model = sizes.run.model
    whole = dataclasses.replace(model, head_dim=_head_dim(model, program))
    whole_sequences = sizes.mesh["sequence"] == 1
    positions_last = model.positions == "rope" and whole_sequences and not sizes.saves_all
    stream = dataclasses.replace(model, num_heads=0, num_kv_heads=0, mlp_dim=0)
    keys = dataclasses.replace(whole, num_heads=0, mlp_dim=0)
    others = dataclasses.replace(model if positions_last else whole, num_kv_heads=0)
    of_stream, of_keys, of_others = (_per_token(sizes, one) for one in (stream, keys, others))
    saved = (
        of_stream * sizes.tokens_between
        + (of_keys - of_stream) * sizes.tokens * _kv_heads(sizes) / model.num_kv_heads
        + (of_others - of_stream) * sizes.tokens / sizes.mesh["tensor"]
    )
    found = {"saved activations": saved}
    if sizes.saves_all:
        # The inputs of products are whole over `tensor`.
        more = sizes.tokens - sizes.tokens_between
        found["saved activations"] += (
            2 * model.num_layers * sizes.compute_bytes * more * model.width
        )
    return found


def _kv_heads(sizes: Sizes) -> float:
    """Of a device."""
    return sizes.run.model.num_kv_heads / sizes.size(sizes.axes_of("kv_heads", "activations"))


def _segment(sizes: Sizes) -> float:
    """A segment of layers that is run again: what they save then, a copy of their weights, and
    their gradients, before these are written to where those of all layers are."""
    model, policies = sizes.run.model, remat_costs.policies(sizes.run.model, sizes.run.remat)
    input_bytes = sizes.compute_bytes * model.width
    of_weights = _weights_of_layers(sizes) + gradient_memory.of_layers(sizes)
    of_layer = {
        policy: input_bytes * sizes.tokens_between + of_weights / model.num_layers
        + (remat_costs.saved_bytes(model, policy, sizes.compute_bytes, sizes.run.offload.saves)
           - input_bytes) * sizes.tokens / sizes.mesh["tensor"]
        for policy in set(policies)
    }  # fmt: skip
    segments = remat_costs.segments(model, sizes.run.remat)
    held = (sum(of_layer[policies[n]] for n in range(*segment)) for segment in segments)
    return max(held, default=0.0)


def _weights_of_layers(sizes: Sizes) -> float:
    """A device's share of the layers' parameters."""
    of_layers = (leaf for leaf in leaves(sizes.run.model) if leaf.of_layers)
    return sum(sizes.param_bytes * sizes.local(leaf, "parameters") for leaf in of_layers)


def _per_token(sizes: Sizes, model: ModelConfig) -> float:
    """Bytes that all layers save of a token."""
    by_layer = remat_costs.saved_bytes_by_layer(
        model, text=sizes.run.remat, loss_chunks=2, compute_bytes=sizes.compute_bytes,
        offloaded=sizes.run.offload.saves,
    )  # fmt: skip
    return sum(by_layer[1:-1])


def _queries(sizes: Sizes) -> float:
    """The queries that layers save."""
    model, policies = sizes.run.model, remat_costs.policies(sizes.run.model, sizes.run.remat)
    if sizes.mesh["sequence"] > 1:
        return 0.0
    saves = [of.saved is None or remat.QUERY_KEY_VALUE in of.saved for of in policies]
    array = sizes.compute_bytes * sizes.tokens * model.num_heads * model.head_dim
    return sum(saves) * array / sizes.mesh["tensor"]


def _begun(sizes: Sizes, program: Program, turns: int) -> float:
    """Beside the loss, of a layer that is run again: where groups of tokens take turns XLA:GPU
    gathers its inputs over `tensor` meanwhile, as it does the last hidden state."""
    gathers = turns > 1 and sizes.splits_positions
    if program is TPU or not gathers or sizes.saves_all or sizes.saves_products:
        return 0.0
    return BEGUN * sizes.compute_bytes * sizes.tokens * sizes.run.model.width


def _alone(sizes: Sizes, program: Program) -> bool:
    """Whether there is one GPU: nothing is sent, and nothing is begun before it is needed."""
    return program is GPU and is_one_device(sizes.run)


def _copies(sizes: Sizes, program: Program) -> dict[str, float]:
    """Of weights in another layout, and of the head's share."""
    found, split = 0.0, sizes.axes_of("embed", "parameters")
    copied_bytes = FP32 if program is TPU else sizes.param_bytes
    if program is GPU and not split and _turns_weights(sizes):
        found += sum(
            sizes.param_bytes * sizes.local(leaf, "parameters")
            for leaf in sizes.weights if not leaf.name.endswith("mlp/down/kernel")
        )  # fmt: skip
    if split:
        found += program.gathered_head * copied_bytes * sizes.local(sizes.head, "parameters")
    if split and not sizes.run.offload.parameters:
        found += sum(
            copied_bytes * sizes.local(leaf, "parameters")
            for leaf in leaves(sizes.run.model)
            if leaf.name.endswith((*program.copied, *experts.copied(sizes)))
        )
    return {"copies of weights and gradients": found}


def _turns_weights(sizes: Sizes) -> bool:
    """Whether XLA:GPU copies weights before a loop over all layers, as products in fp8 contract
    the last dimensions, and no gather puts them there."""
    model = sizes.run.model
    looped = remat.period_of(model.block_kinds) == 1 and model.num_layers > 2  # not written out
    in_loop = looped and not remat_costs.segments(sizes.run.model, sizes.run.remat)
    return sizes.run.products.format == "fp8" and in_loop and _casts(sizes)


def _turned(sizes: Sizes) -> float:
    """Weights of all layers that XLA:TPU copies into another layout. Where layers are a loop over
    periods, several loops read them (`model.layers`): of neighbours of one kind, and of what is
    left of a period. Else, of a mixture whose weights are not gathered, attention's and the
    experts'. Else on one device attention's, where layers are run again and heads fill lanes. Not
    those of the host, nor those that `_copies` has."""
    if sizes.run.offload.parameters:
        return 0.0
    if periods.number(sizes) > 1:
        already = TPU.copied if sizes.axes_of("embed", "parameters") else ()
        return _parameter_bytes(sizes, [name for name in _TURNED if name not in already])
    if sizes.run.model.num_experts and not sizes.axes_of("embed", "parameters"):
        return _parameter_bytes(sizes, (*_TURNED_ALONE, *experts.copied(sizes)))
    fills_lanes = sizes.run.model.head_dim % TPU.lanes == 0
    if is_one_device(sizes.run) and fills_lanes and not sizes.saves_all:
        return _parameter_bytes(sizes, _TURNED_ALONE)
    return 0.0


def _turned_table(sizes: Sizes, common: dict[str, float], program: Program) -> dict[str, float]:
    """While periods of layers are differentiated XLA:TPU has a copy of a tied table that is whole
    on each device, and not its gradient yet: as compiled with Gemma-2 in ZeRO-1."""
    whole = sizes.run.model.tied_head and not sizes.axes_of("embed", "parameters")
    in_periods = periods.number(sizes) > 1 and not is_one_device(sizes.run)
    if program is GPU or not whole or not in_periods:
        return {}
    found = {"a turned table": sizes.param_bytes * sizes.local(sizes.head, "parameters")}
    if held := common.get("gradients"):
        found["gradients"] = held - gradient_memory.of_head(sizes)
    return found


def _parameter_bytes(sizes: Sizes, names: Sequence[str]) -> float:
    """Of a device's shares of the layers' parameters whose names end so."""
    return sum(
        sizes.param_bytes * sizes.local(leaf, "parameters")
        for leaf in sizes.weights
        if leaf.name.endswith(tuple(names))
    )


def _of_period(sizes: Sizes, saved_bytes: float) -> float:
    """On GPUs, where kinds of layers repeat a period: what a period saved, read from all layers',
    and the gradients of its weights, before and behind the loops over them."""
    if (num := periods.number(sizes)) == 1:
        return 0.0
    return (saved_bytes + 2 * gradient_memory.of_layers(sizes)) / num


def _casts(sizes: Sizes) -> bool:
    """Whether the model computes in another type than that of the parameters."""
    return sizes.compute_bytes != sizes.param_bytes


def _gathered(sizes: Sizes) -> dict[str, float]:
    """With gather="step" the weights of all products, and whole gradients of a head among them."""
    if sizes.run.sharding.gather != "step":
        return {}
    heads, products = 0, sizes.weights
    if gathers_head_once(sizes.run):
        heads = 1 if sizes.several else WHOLE_HEADS
        products = (*products, sizes.head)
    return {
        "gathered weights": sum(
            sizes.gathered_bytes(leaf) * sizes.whole(leaf) for leaf in products
        ),
        "gradients of the head": heads * sizes.compute_bytes * sizes.whole(sizes.head),
    }


def _rounded(sizes: Sizes) -> dict[str, float]:
    """A copy of the weights that are trained as integers, as the numbers of their codes."""
    if not sizes.run.quantization.bits:
        return {}
    numbers = sum(
        sizes.local(leaf, "parameters")
        for leaf in leaves(sizes.run.model) if quantization.is_quantized(leaf.name)
    )  # fmt: skip
    return {"rounded weights": sizes.param_bytes * numbers}


def _rounded_table(sizes: Sizes, name: str) -> float:
    """With several microbatches XLA:TPU rounds a table that is whole on each device once, before
    the loop over them; the loss counts the head itself."""
    if not (sizes.several and _casts(sizes)) or sizes.axes_of("embed", "parameters"):
        return 0.0
    tables = (leaf for leaf in leaves(sizes.run.model) if leaf.name == name)
    return sizes.compute_bytes * sum(sizes.whole(leaf) for leaf in tables)


def _layer(sizes: Sizes, program: Program, turns: int) -> float:
    """One layer that is run again and differentiated. Of groups of tokens that take turns XLA:GPU
    has the MLP's arrays of three."""
    model, tensor = sizes.run.model, sizes.mesh["tensor"]
    mlp_dim = remat_costs.mlp_dim(model)
    bodies = periods.bodies(model) if program.bodies else 1
    gathers = sizes.axes_of("embed", "parameters") and sizes.run.sharding.gather == "layer"
    if _alone(sizes, program) or (sizes.several and not gathers):
        bodies = min(bodies, program.bodies_alone)
    waits = gathers or _alone(sizes, program) or sizes.several
    mlp, weights = program.mlp * (1.0 if waits else program.without_gathers), 0.0
    if _alone(sizes, program) and not model.gated_mlp:
        mlp = program.plain_mlp_alone
    if gathers:
        of_mlp = sizes.compute_bytes * sizes.tokens * mlp_dim / tensor
        arrays, whole, of_gradients = program.ahead
        whole += of_gradients * sizes.reduce_bytes / sizes.compute_bytes
        whole *= bodies
        mlp, weights = max(
            ((program.mlp, program.weights), (arrays, whole)),
            key=lambda counts: counts[0] * of_mlp + counts[1] * _layer_bytes(sizes),
        )
    normed = program.normed_heads if model.qk_norm else 0.0
    of_queries = program.heads + program.query_gradients * _blocks_of_keys(sizes)
    heads = (of_queries + normed) * model.num_heads / tensor
    heads += (program.kv_heads + normed) * _kv_heads(sizes)
    if program is GPU and turns > MOST_AT_A_TIME:
        mlp *= MOST_AT_A_TIME / turns
    activations = (
        mlp * sizes.tokens * mlp_dim / tensor
        + heads * sizes.tokens * _head_dim(model, program)
        + (program.inside if tensor > 1 else 0.0) * sizes.tokens * model.width
        + program.between * sizes.tokens_between * model.width
    )
    found = bodies * sizes.compute_bytes * activations + weights * _layer_bytes(sizes)
    # Experts are differentiated before attention is.
    return max(found, experts.layer_bytes(sizes)) if model.num_experts else found


def _blocks_of_keys(sizes: Sizes) -> float:
    """Gradients of all queries that there are at a time on TPUs. The kernel writes one for each
    block of its keys. Where it takes slices of these, those of all slices wait for their sum, each
    of the queries that see any of its keys. Other attention has 2 arrays of their size."""
    run = sizes.run
    num_keys = run.batch.sequence_length // sizes.rings  # in a ring those of one device
    model, given = run.model, (num_keys, run.model.head_dim, sizes.compute_bytes)
    if run.attention.implementation not in ("auto", "splash") or not splash.fits_lanes(num_keys):
        return 2.0
    size = num_keys // splash.num_slices(*given)
    windowed = all(is_local(kind) for kind in model.layer_kinds)
    reach = size + model.window if windowed else num_keys
    seeing = sum(min(num_keys - first, reach) for first in range(0, num_keys, size))
    return splash.num_query_gradients(*given) * seeing / num_keys


def _head_dim(model: ModelConfig, program: Program) -> int:
    return -(-model.head_dim // program.lanes) * program.lanes


def _layer_bytes(sizes: Sizes) -> float:
    """A layer's matrices, gathered, but for those of experts."""
    numbers = sum(sizes.whole(one) for one in sizes.weights if not experts.is_of_experts(one))
    return sizes.compute_bytes * numbers / sizes.run.model.num_layers


def _updated(sizes: Sizes, on_gpu: bool, device_bytes: int | None) -> float:
    """New parameters beside the old ones, where they are gathered after the update. A head whose
    gradient XLA:TPU keeps whole is updated before the others, and in its place, if there is one
    microbatch; and it fills heads up to whole lanes in new values of attention's weights."""
    at_once = not on_gpu and not sizes.several
    in_place = sizes.head.name if at_once and head_memory.keeps_whole(sizes) else None
    gathered = [
        leaf for leaf in leaves(sizes.run.model)
        if leaf.name != in_place
        and sizes.local(leaf, "parameters") > sizes.local(leaf, "optimizer")
    ]  # fmt: skip
    model = sizes.run.model
    padding = 1.0 if on_gpu else _head_dim(model, TPU) / model.head_dim
    found = sum(
        sizes.param_bytes * sizes.local(leaf, "parameters")
        * (padding if "/attention/" in leaf.name else 1.0)
        for leaf in gathered
    )  # fmt: skip
    whole = [
        leaf for leaf in gathered if sizes.local(leaf, "gradients") > sizes.local(leaf, "optimizer")
    ]
    if on_gpu and whole:
        # With whole gradients the last of them, and shares of new values that are on their way.
        shares = sorted(sizes.param_bytes * sizes.local(leaf, "optimizer") for leaf in whole)
        found += sum(shares[-SHARES_ON_THE_WAY:])
        found += max(sizes.reduce_bytes * sizes.local(leaf, "gradients") for leaf in whole)
        if device_bytes:
            found = max(0.0, min(found, _scheduled(sizes, device_bytes)))
    elif on_gpu and sizes.mesh["tensor"] == 1:
        # ZeRO-2: shares of all new values before they are gathered.
        found += sum(sizes.param_bytes * sizes.local(leaf, "optimizer") for leaf in gathered)
    return found


def _scheduled(sizes: Sizes, device_bytes: int) -> float:
    """What XLA:GPU lets its schedule take beside the state, if it can (`GetSchedulerMemoryLimit`):
    with it values that would be gathered early are updated in place."""
    return 0.95 * (0.8 * device_bytes - sum(state(sizes).values()))


def _relaid(sizes: Sizes, program: Program) -> dict[str, float]:
    """At the update of such tables their gradient is there in both layouts, and the new values and
    moments padded, beside the old."""
    if (padding := head_memory.padding_of(sizes, program.lanes)) == 1:
        return {}
    table = FP32 * sizes.local(sizes.head, "parameters")
    return _updated_with(sizes) | {"a table in another layout": 2 * table * (1 + padding)}


def _orthogonalized(sizes: Sizes) -> dict[str, float]:
    """Matrices that Muon has whole, beside all gradients."""
    if not (held := orthogonal.held(sizes)):
        return {}
    return _updated_with(sizes) | {"whole matrices": held}


def _updated_with(sizes: Sizes) -> dict[str, float]:
    """The gradients that an update reads: sums over microbatches, where there are several."""
    found = gradient_memory.buffers(sizes)
    name = "sums of gradients" if found["sums of gradients"] else "gradients"
    return {name: found[name]}


_STATE = ("parameters", "optimizer")  # parts of a `StageMemory`
# Parts that PipeDream-2BW leaves to the next step.
_LEFT_TO_NEXT_STEP = {"in_flight": "in flight", "kept": "kept", "waiting": "waiting"}


def _of_stages(sizes: Sizes, on_gpu: bool, device_bytes: int | None) -> Memory:
    deferred, refusal = stage_memory.planned_layers(sizes.run, device_bytes, on_gpu=on_gpu)
    parts = dict(vars(stage_memory.of(sizes.run, deferred_layers=deferred, on_gpu=on_gpu)))
    held = {name: math.ceil(num) for name, num in state(sizes).items() if num}
    if parts["in_flight"]:
        held |= {name: parts.pop(part) for part, name in _LEFT_TO_NEXT_STEP.items()}
    rest = {name: num for name, num in parts.items() if num and name not in _STATE}
    rest |= {name: math.ceil(num) for name, num in _rounded(sizes).items()}
    peaks = {BACKWARD: rest}
    updated = _orthogonalized(sizes) | {"updated parameters": _updated(sizes, on_gpu, device_bytes)}
    if any(updated.values()):
        peaks[UPDATE] = {name: math.ceil(num) for name, num in updated.items() if num}
    on_host = math.ceil(sum(state(sizes, on_host=True).values()))
    return Memory(held, peaks, on_host, refusal)
