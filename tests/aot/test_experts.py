"""Mixtures as compilers make them: what travels to experts, and what multiplies there."""

import pytest
from support import tiers

from llmx import config
from llmx.aot import compiler, topologies
from llmx.aot import program as program_lib
from llmx.model import families
from llmx.plan import run_report, traffic

LAYERS, D, K, ROWS, T, BUFFER = 2, 256, 2, 16, 256, 1.5
TPU = "v5p:2x2x1"


def run(precision: str = "bf16") -> config.Config:
    made = config.default()
    made.precision = precision
    made.model = families.preset(
        "mixtral", num_layers=LAYERS, width=D, num_heads=4, num_kv_heads=2, head_dim=128,
        num_experts=4, experts_per_token=K, expert_dim=512, vocab_size=512, vocab_multiple=128,
        max_positions=1024, shared_dim=256,
    )  # fmt: skip
    made.batch.size, made.batch.sequence_length, made.remat = ROWS, T, "full"
    made.mesh.data, made.mesh.fsdp, made.mesh.expert = 1, 2, 2
    made.experts.buffer = BUFFER
    return made


@pytest.mark.aot
def test_rows_travel_beside_other_work_and_kernels_multiply_them():
    result = compiler.compile(run(), TPU)
    program = result.program
    exchanges = program.select(kind="all-to-all", across="expert")
    wide = [each for each in exchanges if each.dtype == "bf16"]
    # Forward there and back; backward tokens and gradients there, gradients back.
    tokens, n = ROWS * T // 4, 2
    formula = 5 * (n - 1) / n * BUFFER * tokens * K * D * 2 * LAYERS
    assert program_lib.wire_bytes(wide) == pytest.approx(formula, rel=0.05)
    assert program_lib.hidden_bytes(wide) > 0
    names = " ".join(each.name for each in program.kernels)
    assert "grouped_product" in names and "grouped_sums" in names
    # And as the planner counts it.
    _, messages = run_report.count(result.run, topologies.parse(TPU))
    counted = traffic.by_axes(messages)["expert"]
    over = program_lib.wire_bytes(program.select(axes="expert"))
    assert counted == pytest.approx(over, rel=0.02)


@pytest.mark.aot
@pytest.mark.parametrize("precision", ["bf16", tiers.full_grid("pure_bf16")])
def test_gpus_compile_mixtures_in_bf16(precision):
    """XLA:GPU refuses products of fp32 numbers that leave bf16, and so did mixtures in bf16."""
    result = compiler.compile(run(precision), "h100:2x2")
    assert result.fits and result.program.collectives
