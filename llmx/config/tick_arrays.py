"""A pipeline's ticks on a device, and the bytes of their arrays, counted without a compiler.

`llmx.config.tick_memory` adds them up, by the program that a compiler makes of the ticks.

Letters: as in `llmx.model.costs`.
"""

import copy
import dataclasses
import functools
import math

from llmx import sharding
from llmx.config import Config, loss_memory, state_memory, utilization
from llmx.config.axes import (
    WRITTEN_OUT,
    exchanges_ahead,
    gathers_ahead,
    gathers_head_once,
    gathers_once,
    replica_axes,
    splits_parameters,
)
from llmx.config.state_memory import Held, leaves
from llmx.model import precision, remat, remat_costs
from llmx.pipeline import ticks
from llmx.pipeline.ticks import Program

GRADIENT_BYTES = 4  # of a sum over microbatches, fp32
# Arrays [tokens, F] and [tokens, D] that are there at once while a layer is run again and
# differentiated: gate, up, their activation and its gradient; the stream, its gradient, both norms.
OF_MLP, OF_STREAM = 4, 4
# XLA:GPU has more arrays [tokens, F] at once, and copies `down` and `out` of all layers in fp32
# before its loops, in another layout (in pipelines also where parameters are bf16).
MORE_OF_MLP, COPIED_BYTES = 6, 4
SELECTED_FACTORS = 0.6  # of the factors of a BACKWARD, on GPUs


@dataclasses.dataclass(frozen=True)
class Ticks:
    """A pipeline's ticks on a device, and the bytes of their arrays.

    Only what does not depend on `deferred` may be cached: see `deferring`.
    """

    run: Config  # resolved, with stages
    program: Program
    deferred: int  # layers of each chunk whose weight gradients WEIGHT makes
    on_gpu: bool

    def deferring(self, layers: int) -> "Ticks":
        """The same with so many layers deferred: what is cached does not depend on them, and is
        not counted again."""
        other = copy.copy(self)
        vars(other)["deferred"] = layers
        return other

    @functools.cached_property
    def held(self) -> Held:
        return Held(self.run)

    @functools.cached_property
    def state(self) -> dict[str, float]:
        """Bytes that live from step to step."""
        return state_memory.of(self.run)

    @functools.cached_property
    def sums_of_gradients(self) -> float:
        """Numbers of those of one step."""
        return sum(self.held.numbers(leaf, "gradients") for leaf in leaves(self.run.model))

    @functools.cached_property
    def chunks(self) -> tuple[int, ...]:
        return utilization.chunks_of(self.run)

    @property
    def layers(self) -> int:
        """Layers of the longest chunk."""
        return max(self.chunks)

    @property
    def chunks_per_stage(self) -> int:
        return self.program.table.chunks_per_stage

    @property
    def policy(self) -> precision.Policy:
        return precision.policy_of(self.run.precision, self.run.reduce_dtype)

    @property
    def tokens(self) -> float:
        """Of a microbatch, on a device."""
        return utilization.tokens_of(self.run) / self.run.mesh.sequence

    @property
    def mlp_dim(self) -> float:
        """Columns of F on a device; of a mixture those of the MLP that every token goes through."""
        return remat_costs.mlp_dim(self.run.model) / self.run.mesh.tensor

    # What kind of ticks these are.

    @property
    def joined(self) -> bool:
        """Whether the body of a loop has several ticks, as of FORWARD and of BACKWARD."""
        return any(length > 1 for _, length, _ in self.program.loops)

    @property
    def heads_unrolled(self) -> bool:
        """Whether a loop has two ticks with heads, which XLA:GPU writes out."""
        heads = self.program.rows.head >= 0
        return any(
            (length, times) == (1, WRITTEN_OUT) and heads[first : first + times].all()
            for first, length, times in self.program.loops
        )

    @property
    def splits_backward(self) -> bool:
        return self.program.table.splits_backward

    @property
    def mixes_kinds(self) -> bool:
        """Whether ticks take branches."""
        return self.program.table.mixes_kinds

    @property
    def periodic(self) -> bool:
        """Whether a step has two versions of the weights, as in PipeDream-2BW."""
        return self.program.table.periodic

    @property
    def splits_parameters(self) -> bool:
        return splits_parameters(self.run)

    @property
    def gathers_ahead(self) -> bool:
        return self.on_gpu and gathers_ahead(self.run)

    @property
    def exchanges_ahead(self) -> bool:
        return self.on_gpu and exchanges_ahead(self.run)

    @property
    def gathers_once(self) -> bool:
        """Whether weights are gathered once a step."""
        return gathers_once(self.run)

    @property
    def one_kind_a_loop(self) -> bool:
        """Whether loops have ticks of FORWARD alone, and of BACKWARD alone, as in GPipe."""
        return not (self.joined or self.splits_backward or self.mixes_kinds or self.periodic)

    @property
    def one_tick_at_a_time(self) -> bool:
        """Whether XLA:GPU begins no tick early: where stages gather no weights, and blocks exchange
        activations over `tensor`; or each is one device, in loops of one kind."""
        if not self.on_gpu or self.splits_parameters:
            return False
        return self.over_tensor or (self.one_kind_a_loop and not self.splits_tokens)

    @property
    def over_tensor(self) -> bool:
        """Whether blocks exchange activations over `tensor`, on GPUs."""
        return self.on_gpu and self.run.mesh.tensor > 1

    @property
    def loops_ahead(self) -> bool:
        """Whether XLA:GPU gathers ahead in loops over ticks that have no branches."""
        plain = not (self.mixes_kinds or self.periodic)
        return self.gathers_ahead and self.layers > 1 and plain

    @property
    def several_kinds(self) -> bool:
        """Whether the model has layers of several kinds."""
        return len(set(self.run.model.layer_kinds)) > 1

    @property
    def has_periods(self) -> bool:
        """Whether a chunk's layers are a loop over periods of several kinds, with loops in it."""
        if remat_costs.branches(self.run.model, self.chunks):
            return False
        period = remat.period_of(self.run.model.layer_kinds[: self.layers])
        return 1 < period <= self.layers // 2

    @property
    def gathers_where_used(self) -> bool:
        """Whether GPUs gather a layer's weights where they are used, as beside `tensor`."""
        in_layers = self.run.sharding.gather == "layer" and self.splits_parameters
        return self.on_gpu and in_layers and not self.gathers_ahead

    @property
    def layers_unrolled(self) -> bool:
        """Whether there is no loop over a chunk's layers where XLA:GPU gathers ahead."""
        return self.layers == WRITTEN_OUT and not self.splits_backward

    @property
    def joined_whole(self) -> bool:
        """Whether bodies of several ticks have whole parameters, on GPUs."""
        return self.on_gpu and self.joined and not self.splits_parameters

    @property
    def alone(self) -> bool:
        """Whether a loop over one layer is written out, into the body of the loop over ticks."""
        return self.layers == 1 and self.joined

    @property
    def splits_tokens(self) -> bool:
        """Whether a stage has several devices with other tokens, which sum their gradients."""
        return any(vars(self.run.mesh)[axis] > 1 for axis in sharding.TOKEN_AXES)

    # What layers save.

    @property
    def saves_all(self) -> bool:
        """Whether layers save everything from FORWARD to BACKWARD."""
        text = remat.inside(self.run.remat)
        return not self.keeps_input and remat_costs.saves_all(self.run.model, text)

    @property
    def saves_products(self) -> bool:
        """Whether they save all products with weights, and not everything."""
        text = remat.inside(self.run.remat)
        return not self.keeps_input and remat_costs.saves_all_products(self.run.model, text)

    @property
    def saves_more_than_inputs(self) -> bool:
        """Whether a layer that is in no segment saves more than its input."""
        text = remat.inside(self.run.remat)
        apart = remat_costs.policies_apart(self.run.model, text, self.chunks)
        return any(policy.saved is None or policy.saved for policy in apart)

    @property
    def keeps_input(self) -> bool:
        """Whether a chunk's input is all that is kept from FORWARD to BACKWARD."""
        return remat.keeps_input(self.run.remat)

    @property
    def stores_factors_once(self) -> bool:
        """Whether XLA:GPU sees that several products have one input: where no branch is between,
        of ticks or of layers of several kinds."""
        one_body = self.on_gpu and self.joined and not self.mixes_kinds
        return one_body and not self.several_kinds

    @property
    def rounds_gradients(self) -> bool:
        """Whether those of a microbatch are in another type than their sums."""
        return self.policy.reduce.itemsize < GRADIENT_BYTES

    # Bytes.

    @functools.cached_property
    def saved(self) -> float:
        """What the longest chunk has saved of a microbatch when its layers are differentiated."""
        return kept(self.run, remat.inside(self.run.remat), self.chunks)

    @functools.cached_property
    def saved_by_forward(self) -> float:
        """What it saves in FORWARD: with `part` its input alone."""
        return kept(self.run, self.run.remat, self.chunks)

    @property
    def gathered_for_step(self) -> float:
        """All weights of a stage's products, where they are gathered once a step."""
        if not self.gathers_once:
            return 0.0
        of_layers = self.gathered(self.layers * self.chunks_per_stage)
        return of_layers + self.policy.compute.itemsize * self.whole_head

    @property
    def whole_head(self) -> float:
        """Numbers of a stage's share of a head that is gathered once a step."""
        rows = self.run.model.padded_vocab / (self.run.mesh.stage * self.run.mesh.tensor)
        return rows * self.run.model.width * gathers_head_once(self.run)

    @functools.cached_property
    def gradients(self) -> float:
        """Those of a chunk's weights, of one microbatch."""
        return self.policy.reduce.itemsize * self.of_layers(self.layers, "gradients")

    @functools.cached_property
    def outside(self) -> float:
        """Gradients of embedding and head of one microbatch, which are one table where the head is
        tied. XLA:GPU has more of them. Without gathers, those of lookups are scattered when they
        are added up. Of a tied head both are there, beside each other, where ticks take branches;
        and where gradients are fp32, in bodies of several ticks with a chunk in each stage; and
        there, of layers of several kinds whose gradients are whole, those of two turns of the loop:
        a body has two, and begins the second early."""
        tables = (leaf for leaf in leaves(self.run.model) if not leaf.in_blocks)
        found = GRADIENT_BYTES * sum(self.held.numbers(leaf, "gradients") for leaf in tables)
        if self.on_gpu and not self.splits_parameters:
            found += self.table_gradient("embedding")
            found -= self.table_gradient("embedding", "gradients")
        if self.gathers_ahead and self.mixes_kinds:
            return found + self.tied
        in_loops = self.joined_whole and not self.periodic and self.layers > 1
        if not in_loops or self.chunks_per_stage > 1:
            return found
        if self.layers > WRITTEN_OUT and self.several_kinds and self.ways("gradients") == 1:
            return 2 * (found + self.tied)
        return found + (0.0 if self.rounds_gradients else self.tied)

    @property
    def tied(self) -> float:
        """The head's own gradient, where it is the embedding's table."""
        return self.run.model.tied_head * self.table_gradient("embedding", "gradients")

    @property
    def copied(self) -> float:
        """Of `down` and `out` of all layers, a device's share."""
        model, layers = self.run.model, self.chunks_per_stage * self.layers
        columns = self.mlp_dim + model.num_heads * model.head_dim / self.run.mesh.tensor
        numbers = layers * model.width * columns / self.ways("parameters")
        return COPIED_BYTES * numbers

    @property
    def more_of_mlp(self) -> float:
        """Of one layer's activations, on GPUs."""
        return self.policy.compute.itemsize * self.tokens * MORE_OF_MLP * self.mlp_dim

    @functools.cached_property
    def of_loss(self) -> float:
        return loss_memory.of(self.run, on_gpu=self.on_gpu)

    @property
    def factors(self) -> int:
        """What a BACKWARD leaves to WEIGHT, in a slot."""
        of_layer = factor_bytes(self.run, distinct=self.stores_factors_once)
        return self.deferred * of_layer * (self.program.slots["deferred"] > 0)

    @property
    def deferred_share(self) -> float:
        return self.deferred / self.layers

    @property
    def selected_factors(self) -> float:
        """`factors` before they are in a slot. As it selects what a branch returns, XLA:GPU has
        more than half of it twice, in chunks of several layers that gather no weights."""
        twice = self.on_gpu and self.layers > 1 and not self.splits_parameters
        return self.factors * (1 + SELECTED_FACTORS if twice else 1)

    def table_gradient(self, name: str, split: str = "parameters") -> float:
        """A table's gradient in fp32, before it is scattered."""
        tables = (leaf for leaf in leaves(self.run.model) if leaf.name == name)
        return GRADIENT_BYTES * sum(self.held.numbers(leaf, split) for leaf in tables)

    def of_layers(
        self, count: int, table: str, whole: tuple[str, ...] = (), part: str = ""
    ) -> float:
        """Numbers of some layers' parameters; `part`: of those with this in their names."""
        blocks = (leaf for leaf in leaves(self.run.model) if leaf.in_blocks and part in leaf.name)
        numbers = sum(self.held.numbers(leaf, table, whole=whole) for leaf in blocks)
        return count * numbers * self.run.mesh.stage / self.held.slots

    def gathered(self, count: int, part: str = "") -> float:
        """Some layers' weights, gathered."""
        numbers = self.of_layers(count, "parameters", ("embed",), part)
        return self.policy.compute.itemsize * numbers

    def layer(self, weights: int, of_mlp: float = OF_MLP) -> float:
        """One layer's activations, and some layers' weights, gathered."""
        width = of_mlp * self.mlp_dim + OF_STREAM * self.run.model.width
        return self.gathered(weights) + self.policy.compute.itemsize * self.tokens * width

    @property
    def layer_ahead(self) -> float:
        """`layer` on GPUs that gather ahead: weights of two, and more of the MLP."""
        return self.layer(2) + self.more_of_mlp + self.fp32_of_layer

    @property
    def of_periods(self) -> float:
        """What XLA:GPU has more of a loop over periods: their parts of what the microbatch saved,
        as the loops within read and write them; and, where it gathers ahead, a second body's layer,
        as the last kind of a period is in no loop."""
        if not self.has_periods:
            return 0.0
        second = self.layer(2) + self.more_of_mlp if self.gathers_ahead else 0.0
        return second + (1 + self.joined) * self.saved

    def backward(self, weights: int, share: float = 1.0, of_mlp: float = OF_MLP) -> float:
        """A microbatch's saved activations, read, or made again for a share of a chunk's layers;
        the gradients of a chunk's weights; and `layer`."""
        saved = self.saved * (share if self.keeps_input else 1.0)
        return saved + self.gradients + self.layer(weights, of_mlp)

    @property
    def fp32_of_layer(self) -> float:
        """Whole gradients of a layer's MLP, twice, as far as they are wider than its weights."""
        wider = max(0, self.policy.reduce.itemsize - self.policy.compute.itemsize)
        return 2 * wider * self.of_layers(1, "parameters", ("embed",), "/mlp/")

    @property
    def of_fp32_gradients(self) -> float:
        """What XLA:GPU has more where gradients are fp32 as their sums are: it writes a sum to
        where the gradient was, and so copies those of all layers; and `fp32_of_layer`."""
        if self.rounds_gradients:
            return 0.0
        copied = GRADIENT_BYTES * self.of_layers(self.layers * self.chunks_per_stage, "gradients")
        return copied + self.fp32_of_layer

    @property
    def begun(self) -> float:
        """Beside the loss on GPUs, of the ticks of a loop's body that are begun: what layers that
        save all, or all products, saved; of the latter also their gradients."""
        if not (self.saves_products or self.saves_all):
            return 0.0
        return self.saved_by_forward + self.saves_products * self.gradients

    @property
    def begun_again(self) -> float:
        """Of a second microbatch that is begun, with `part`, where stages gather no weights: what
        is made again, and more of a layer's MLP."""
        return self.keeps_input * (self.saved + self.more_of_mlp)

    def ways(self, table: str) -> int:
        """Over how many devices a layout's table splits the width."""
        return math.prod(vars(self.run.mesh)[axis] for axis in replica_axes(self.run, table))


def of(run: Config, deferred_layers: int | None = None, *, on_gpu: bool) -> Ticks:
    """Of a resolved run with stages. `deferred_layers`: of each chunk, or fewer; None = all."""
    size = max(utilization.chunks_of(run))
    deferred = size if deferred_layers is None else min(deferred_layers, size)
    return Ticks(run, ticks.program(utilization.table_of(run)), deferred, on_gpu)


def factor_bytes(run: Config, *, distinct: bool = False) -> int:
    """Per layer and microbatch, the factors of all its weight gradients: the input of each product
    with a weight, and the gradient of its output; `distinct`: an input of several products once."""
    mesh, model = run.mesh, run.model
    D, F, H, N, K = model.width, model.mlp_dim, model.head_dim, model.num_heads, model.num_kv_heads
    inward = 2 if model.gated_mlp else 1
    of_attention = 2 if model.kv_latent else 3  # latents, or queries, keys and values
    whole = ((1 if distinct else of_attention) + 1 + (1 if distinct else inward) + 1) * D
    heads = (N + 2 * K) * H + N * H
    if R := model.kv_latent:  # into latents, out of them, and through them
        Q, V = model.query_latent, model.value_dim
        whole += 2 * (Q + R) + model.rope_dim
        heads = N * (H + H - model.rope_dim + V + V)
    split = heads + inward * F + F  # over `tensor`
    compute = precision.policy_of(run.precision, run.reduce_dtype).compute.itemsize
    tokens = utilization.tokens_of(run) // mesh.sequence
    return math.ceil(compute * tokens * (whole + split / mesh.tensor))


def kept(run: Config, text: str, chunks: tuple[int, ...]) -> float:
    """Bytes that the longest chunk saves of a microbatch."""
    return tokens_between(run) * remat_costs.saved_bytes_of_chunk(
        run.model, text=text, chunks=chunks,
        compute_bytes=precision.POLICIES[run.precision].compute.itemsize,
    )  # fmt: skip


def tokens_between(run: Config) -> float:
    """Of a microbatch, that a device has between products."""
    ways = run.mesh.sequence * (run.mesh.tensor if run.sharding.sequence_parallel else 1)
    return utilization.tokens_of(run) / ways
