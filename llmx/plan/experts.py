"""What routed experts hold, send and compute on a device, counted without a compiler.

Counted for loads that are about equal, and so for one round of rows (`llmx.model.experts.travel`),
or as many as a small buffer takes, in the form that TPUs run: kernels over rows in blocks, a part
of the width at a time (`llmx.model.experts.products`). What other forms take is not counted:
`refusal` says so.

Letters: A assignments of a device's tokens to experts, n devices along `expert`, R slots of rows in
blocks, D width, F expert_dim of a device, f of one part, E experts of a device.
"""

import dataclasses
import functools
from collections.abc import Iterator

from llmx.config import Config
from llmx.config.state_memory import Leaf
from llmx.model import costs, remat, remat_costs
from llmx.model.experts import grouped, kernels, products, travel
from llmx.model.experts.config import DROPLESS
from llmx.model.families import ModelConfig
from llmx.plan.sizes import Sizes

FP32 = 4
ROWS, WEIGHTS_OF_ROWS = "rows of experts", "weights of rows"  # purposes of messages
NAMES = ("mlp/gate", "mlp/up", "mlp/down")


def refusal(config: Config, device_kind: str) -> str:
    """Why a run with experts is not counted, with the remedy; "" if it is, or has none."""
    model = config.model
    if not model.num_experts:
        return ""
    uncounted = {
        f"on {device_kind}, which applies them block by block": not products.has_kernels(
            device_kind
        ),
        f"with mesh.stage={config.mesh.stage}": config.mesh.stage > 1,
        f"with experts.dispatch={config.experts.dispatch!r}": config.experts.dispatch != DROPLESS,
        "with biases": model.bias,
        f"with sync.strategy={config.sync.strategy!r}": config.sync.strategy != "mean",
        "with offloading": bool(config.offload.saves or config.offload.parameters),
        f"with remat={config.remat!r}": keeps_weights(model, config.remat),
    }
    for what, is_so in uncounted.items():
        if is_so:
            return (
                f"model.num_experts={model.num_experts}: the planner does not count routed experts "
                f"{what}; {'use remat=full, or ' if 'remat' in what else ''}run llmx.aot, which "
                "compiles the run"
            )
    return ""


def keeps_weights(model: ModelConfig, text: str) -> bool:
    """Whether layers with experts save their weights, by a rule of `remat`: not counted."""
    if not model.num_experts or text == remat.BUDGET:
        return False
    return any(policy.saved is None for policy in remat_costs.policies(model, text))


def is_of_experts(leaf: Leaf) -> bool:
    """Whether a parameter is a matrix of every expert."""
    return "experts" in leaf.axes and leaf.is_matrix


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a microbatch on a device, and what they are multiplied with."""

    sizes: Sizes

    @functools.cached_property
    def ways(self) -> travel.Ways:
        run = self.sizes.run
        return travel.ways(
            self.sizes.mesh[travel.AXIS], run.model.num_experts, round(self.assignments),
            run.experts.buffer, (),
        )  # fmt: skip

    @property
    def assignments(self) -> float:
        return self.sizes.tokens * self.sizes.run.model.experts_per_token

    @property
    def experts(self) -> int:
        """Of a device."""
        return self.ways.experts

    @property
    def rounds(self) -> int:
        """In which rows travel, each of a buffer."""
        return travel.even_rounds(self.ways, round(self.assignments))

    @property
    def arriving(self) -> int:
        """In a round: from each device as many as one sends another."""
        return self.ways.devices * self.ways.per_pair

    @functools.cached_property
    def block(self) -> int:
        return grouped.block_size(self.arriving, self.experts)

    @property
    def slots(self) -> int:
        return grouped.num_blocks(self.arriving, self.experts) * self.block

    @property
    def computed(self) -> float:
        return grouped.expected_rows(self.assignments, self.block, self.experts * self.rounds)

    @property
    def width(self) -> int:
        """Of an expert on a device."""
        return self.sizes.run.model.expert_dim // self.sizes.mesh["tensor"]

    @functools.cached_property
    def parts(self) -> tuple[int, int]:
        """How many parts of the width there are, and columns of one."""
        found = products.parts(self.width)
        return len(found), found[0].stop

    @property
    def inward(self) -> int:
        """Matrices that a row is multiplied with first: gate and up, or up."""
        return costs.matrices_of_mlp(self.sizes.run.model) - 1


@dataclasses.dataclass(frozen=True)
class Program:
    """Arrays that are there at a time while a layer's experts are differentiated."""

    wide: float  # [R, D] in the compute dtype
    hidden: float  # [R, f], with gate and up
    weights: float  # parts of a matrix, gathered
    sums: float  # parts of a matrix: gradients, in the reduce dtype
    tokens: float = 6.0  # [tokens, D] in the compute dtype


# With libtpu 0.0.42.1: where there is one part, and where there are several; and more sums of one
# part where rows travel in a loop of rounds.
ONE = Program(wide=4.0, hidden=6.0, weights=3.0, sums=3.0)
SEVERAL = Program(wide=4.0, hidden=8.0, weights=2.0, sums=8.0)
SUMS_OF_ROUNDS = 2.0


def layer_bytes(sizes: Sizes) -> float:
    """Of a layer's experts at the peak of the backward pass."""
    rows, model = Rows(sizes), sizes.run.model
    number, columns = rows.parts
    program = SEVERAL if number > 1 else ONE
    hidden = program.hidden * (rows.inward + 1) / 3
    matrix = rows.experts * model.width * columns
    gathered = bool(sizes.axes_of("embed", "parameters"))
    # Of several rounds the first part is kept, of all matrices.
    weights = program.weights + (rows.inward + 1) * (number > 1 and rows.ways.devices > 1)
    sums = program.sums + SUMS_OF_ROUNDS * (number == 1 and rows.ways.devices > 1)
    held = weights * sizes.compute_bytes * gathered + sums * sizes.reduce_bytes
    activations = program.wide * rows.slots * model.width + hidden * rows.slots * columns
    activations += program.tokens * sizes.tokens * model.width
    return sizes.compute_bytes * activations + held * matrix


def copied(sizes: Sizes) -> tuple[str, ...]:
    """Endings of names of parameters that XLA:TPU copies in fp32, in another layout: that with F
    last, which `down` has from the beginning where a device has less than a lane of D."""
    columns = sizes.run.model.width / sizes.size(sizes.axes_of("embed", "parameters"))
    return ("mlp/down",) if sizes.run.model.num_experts and columns >= kernels.LANES else ()


def exchanges(sizes: Sizes) -> Iterator[tuple[str, float, float, float]]:
    """Purpose, bytes of an all-to-all over `expert`, how often a layer makes it in each pass."""
    rows = Rows(sizes)
    wide = sizes.compute_bytes * rows.arriving * sizes.run.model.width
    yield ROWS, wide, 2.0 * rows.rounds, 3.0 * rows.rounds
    yield WEIGHTS_OF_ROWS, FP32 * rows.arriving, 0.0, 2.0 * rows.rounds


def multiplied(sizes: Sizes) -> Iterator[tuple[str, str, tuple[float, float, float], float, float]]:
    """Name, role and shape [M, N, K] of each product with experts, and how often a layer makes it
    in each pass: gate and up once more in the backward pass."""
    rows, D = Rows(sizes), sizes.run.model.width
    for name in NAMES[3 - rows.inward - 1 :]:
        down = name == NAMES[-1]
        left, right = (rows.width, D) if down else (D, rows.width)
        yield name, "forward", (rows.computed, right, left), 1.0, 0.0 if down else 1.0
        yield name, "input gradient", (rows.computed, left, right), 0.0, 1.0
        yield name, "weight gradient", (left, right, rows.computed), 0.0, 1.0


# Arrays that are read or written outside products, in each pass: [R, D], and [R, F].
MOVED_WIDE, MOVED_HIDDEN = (16.0, 32.0), (5.5, 21.5)


def moved_bytes(sizes: Sizes, index: int) -> float:
    """That a layer's experts read and write outside products; `index`: in the backward pass."""
    rows = Rows(sizes)
    slots = rows.slots * rows.rounds
    wide = MOVED_WIDE[index] * slots * sizes.run.model.width
    return sizes.compute_bytes * (wide + MOVED_HIDDEN[index] * slots * rows.width)
