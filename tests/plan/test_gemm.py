"""gemm.py, collectives.py, calibrations.py: tiles, waves, bytes, tables and rings by hand."""

import dataclasses

import pytest

from llmx.aot import links
from llmx.plan import calibrations, collectives, gemm
from llmx.plan.gemm import Calibration, Core, Measured
from llmx.runtime import hardware

# Round figures: 100 units of 1 TFLOP/s in bf16, 1 TB/s, 10 links of 10 GB/s, an adapter of 5 GB/s.
CHIP = hardware.Chip(
    "round", {"bfloat16": 100e12, "float8": 200e12}, 80 * hardware.GIB, 1e12, 10e9, 10, "switch", 8,
    5e9,
)  # fmt: skip
CORE = Core(CHIP, Calibration(products=1.0, memory=1.0, units=100, start=0.0))
ROWS, COLUMNS = gemm.TILES[0]
K = 8192
# Products by hand are added up in another order.
CLOSE = 1e-9


def with_(**changes) -> Core:
    return dataclasses.replace(CORE, calibration=dataclasses.replace(CORE.calibration, **changes))


def share_of_peak(m: int, n: int, k: int, dtype: str, core: Core, *, batch: int = 1) -> float:
    """FLOP/s of a product as a share of the chip's peak for its type."""
    flops = 2.0 * batch * m * n * k
    return flops / gemm.seconds(m, n, k, dtype, core, batch=batch) / core.chip.peak(dtype)[0]


def test_full_waves_reach_the_peak():
    assert share_of_peak(10 * ROWS, 10 * COLUMNS, K, "bfloat16", CORE) == pytest.approx(1)
    assert share_of_peak(10 * ROWS, 20 * COLUMNS, K, "bfloat16", CORE) == pytest.approx(1)
    half = with_(products=0.5)
    assert share_of_peak(10 * ROWS, 10 * COLUMNS, K, "bfloat16", half) == pytest.approx(0.5)


def test_a_tile_beyond_a_full_wave_costs():
    """The last wave takes as long as a full one, unless smaller tiles fill it better."""
    full = gemm.seconds(10 * ROWS, 10 * COLUMNS, K, "bfloat16", CORE)
    beyond = gemm.seconds(10 * ROWS + 1, 10 * COLUMNS, K, "bfloat16", CORE)
    assert 1.2 * full < beyond <= 2 * full


def test_a_small_tile_reaches_less():
    """Each of these results is one wave of a tile. Splits of K, with larger tiles, cost bytes."""
    shares = [
        share_of_peak(10 * rows, 10 * columns, 512, "bfloat16", with_(memory=0.5))
        for rows, columns in ((256, 128), (128, 128), (128, 64))
    ]
    assert shares == sorted(set(shares), reverse=True)
    assert shares[1] == pytest.approx(64 / 84 / (256 / 3 / (256 / 3 + 20)))


def test_long_sums_are_split():
    """A result of eight small tiles would use eight of a hundred units."""
    share = share_of_peak(ROWS, COLUMNS, 64 * K, "bfloat16", CORE)
    assert 0.3 < share < 0.64


def test_few_rows_are_bound_by_bytes():
    m, n, k = 1, 6400, 4096
    assert gemm.seconds(m, n, k, "bfloat16", CORE) == pytest.approx(
        2 * (m * k + k * n + m * n) / 1e12
    )
    wide = gemm.seconds(m, n, k, "bfloat16", CORE, out="float32")
    assert wide == pytest.approx((2 * (m * k + k * n) + 4 * m * n) / 1e12)
    assert gemm.seconds(m, n, k, "float8", CORE) == pytest.approx(
        (m * k + k * n + m * n) / 1e12
    )  # fmt: skip


def test_narrow_types_are_faster():
    narrow, wide = (gemm.seconds(8192, 8192, K, dtype, CORE) for dtype in ("float8", "bfloat16"))
    assert narrow == pytest.approx(wide / 2)


def test_batches_fill_waves_together():
    one = gemm.seconds(ROWS, COLUMNS, K, "bfloat16", CORE)
    hundred = gemm.seconds(ROWS, COLUMNS, K, "bfloat16", CORE, batch=100)
    assert hundred < 60 * one
    fast = Core(dataclasses.replace(CHIP, hbm_bandwidth=1e13), CORE.calibration)
    assert share_of_peak(ROWS, COLUMNS, K, "bfloat16", fast, batch=100) == pytest.approx(1)


def test_every_operator_takes_the_start():
    late = with_(start=1e-3)
    for seconds in (
        lambda core: gemm.seconds(512, 512, 512, "bfloat16", core),
        lambda core: gemm.memory_seconds(1e6, core),
        lambda core: gemm.attention_seconds(1e9, "bfloat16", core),
    ):
        assert seconds(late) - seconds(CORE) == pytest.approx(1e-3)
    assert gemm.memory_seconds(1e9, with_(memory=0.5)) == pytest.approx(2e-3)
    assert gemm.attention_seconds(1e12, "bfloat16", with_(attention=0.5)) == pytest.approx(0.02)


TABLE = (
    Measured(4096, 4096, 4096, "bfloat16", 0.7),
    Measured(1024, 1024, 1024, "bfloat16", 0.3),
    Measured(4096, 4096, 4096, "float8", 0.2),
)


def test_a_table_holds_at_its_rows():
    core = with_(table=TABLE)
    for row in TABLE:
        share = share_of_peak(row.m, row.n, row.k, row.dtype, core)
        assert share == pytest.approx(row.share)


def test_a_table_is_interpolated_by_its_ratio_to_the_curve():
    size = 2048  # as far from either row
    core = with_(table=TABLE)
    ratios = [row.share / share_of_peak(row.m, row.n, row.k, row.dtype, CORE) for row in TABLE[:2]]
    share = share_of_peak(size, size, size, "bfloat16", core)
    curve = share_of_peak(size, size, size, "bfloat16", CORE)
    assert share / curve == pytest.approx((ratios[0] * ratios[1]) ** 0.5)


# ------------------------------------------------------------------------------------ collectives

RATES = links.Rates(link=100e9, network=5e9, start=0.0, hop=0.0, network_hop=0.0)


def ring(kind="all-reduce", size=8, num_bytes=1e9, per_node=8, adapters=8, rates=RATES):
    return collectives.seconds(
        kind, num_bytes, size, per_node=per_node, adapters=adapters, rates=rates
    )


def test_rings_within_a_node():
    assert ring() == pytest.approx(2 * 7 / 8 / 100)
    assert ring("all-gather") == ring("reduce-scatter") == pytest.approx(7 / 8 / 100)
    assert ring(size=1) == 0


def test_rings_beyond_a_node_are_bound_by_adapters():
    assert ring(size=16) == pytest.approx(2 * 15 / 16 / (8 * 5))
    assert ring(size=16, per_node=1, adapters=1) == pytest.approx(2 * 15 / 16 / 5)
    fast = dataclasses.replace(RATES, network=1e15)
    assert ring(size=16, rates=fast) == pytest.approx(2 * 15 / 16 / 100)  # the links


def test_groups_with_a_stride_leave_by_one_adapter():
    assert collectives.adapters_of(1, 8) == 8
    assert collectives.adapters_of(4, 2) == 1


def test_short_messages_reach_less_of_the_bandwidth():
    rates = dataclasses.replace(RATES, start=20e-6, hop=1e-6)
    bandwidths = [size / ring(num_bytes=size, rates=rates) for size in (1e4, 1e6, 1e8, 1e10)]
    assert bandwidths == sorted(bandwidths)
    assert bandwidths[0] < 0.01 * bandwidths[-1]
    assert ring(num_bytes=0, rates=rates) == pytest.approx(20e-6 + 2 * 7e-6)


def test_many_nodes_sum_short_messages_by_trees():
    rates = dataclasses.replace(RATES, hop=1e-6, network_hop=3e-6)
    found = ring(size=1024, num_bytes=0, rates=rates)
    assert found == pytest.approx(2 * (7e-6 + 7 * 3e-6))  # 128 nodes: 7 levels
    # Long ones by rings, whose devices do not send their own share.
    assert ring(size=1024, num_bytes=1e12, rates=rates) < 2 * 1e12 / (8 * 5e9)
    assert ring("all-gather", size=1024, num_bytes=0, rates=rates) > 128 * 3e-6


def test_messages_between_two_devices():
    send = collectives.message_seconds
    assert send(1e9, leaves_node=False, rates=RATES) == pytest.approx(0.01)
    assert send(1e9, leaves_node=True, rates=RATES) == pytest.approx(0.2)


def test_an_unknown_network_is_refused():
    alone = dataclasses.replace(RATES, network=None)
    assert ring(rates=alone) > 0
    with pytest.raises(ValueError, match="network_bandwidth is None"):
        ring(size=16, rates=alone)


def test_rates_are_shares_of_the_data_sheet():
    rates = collectives.rates_of(with_(links=0.5, network=0.8, collective=1e-3))
    assert (rates.link, rates.network, rates.start) == pytest.approx((50e9, 4e9, 1e-3), rel=CLOSE)


# ----------------------------------------------------------------------------------- calibrations


@pytest.mark.parametrize("name", hardware.CHIPS)
def test_every_chip_has_a_core(name):
    core = calibrations.core_of(name)
    calibration = core.calibration
    shares = (calibration.products, calibration.memory, calibration.attention, calibration.links)
    assert all(0.4 <= share <= 1 for share in shares)
    assert calibration.host == 0  # of a compiled program
    share = share_of_peak(8192, 8192, 8192, "bfloat16", core)
    assert 0.75 * calibration.products < share < calibration.products + CLOSE
    assert (name in calibrations.CALIBRATIONS) == core.chip.is_gpu


def test_a_chip_of_the_users_own():
    """Twice the FLOP/s of everything: half the time of large products, the same of few rows."""
    twice = dataclasses.replace(CHIP, flops={"bfloat16": 200e12})
    core = Core(twice, CORE.calibration)
    large, small = (16384, 16384, 16384), (1, 6400, 4096)
    assert gemm.seconds(*large, "bfloat16", core) == pytest.approx(
        gemm.seconds(*large, "bfloat16", CORE) / 2
    )
    assert gemm.seconds(*small, "bfloat16", core) == gemm.seconds(*small, "bfloat16", CORE)
