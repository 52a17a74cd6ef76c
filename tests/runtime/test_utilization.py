"""utilization.py: shares of the peak of the type that products take, and how they are shown."""

import pytest

from llmx.runtime.hardware import CHIPS
from llmx.runtime.utilization import Utilization, text

FLOPS = {"mfu": 6e9, "mfu_full": 7e9, "hfu": 8e9}


def shares(chip: str, dtype: str) -> dict[str, float]:
    return Utilization(FLOPS, CHIPS[chip], dtype, num_devices=8).shares(1e5)


def test_shares_are_of_all_devices():
    assert shares("h100_sxm", "bfloat16") == pytest.approx(
        {name: flops * 1e5 / (8 * 989.5e12) for name, flops in FLOPS.items()}
    )


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_eight_bits_have_their_own_peak_and_the_bfloat16_share_beside_it(dtype):
    half, plain = shares("h100_sxm", dtype), shares("h100_sxm", "bfloat16")
    for name in FLOPS:
        assert half[name] == pytest.approx(plain[name] / 2)
    assert half["mfu_of_bfloat16"] == pytest.approx(plain["mfu"])


@pytest.mark.parametrize(("chip", "dtype"), [("tpu_v4", "int8"), ("tpu_v5e", "float8_e5m2")])
def test_where_eight_bits_are_no_faster_there_is_one_share(chip, dtype):
    assert shares(chip, dtype) == shares(chip, "bfloat16")


def test_text():
    assert text({}) == ""
    assert text({"loss": 3.0, "mfu": 0.4}) == "MFU 40.0%"
    figures = {"mfu": 0.4, "mfu_full": 0.45, "hfu": 0.5}
    assert text(figures) == "MFU 40.0% (full 45.0%, HFU 50.0%)"
    beside = "MFU 40.0% (full 45.0%, HFU 50.0%, of bfloat16's peak 80.0%)"
    assert text(figures | {"mfu_of_bfloat16": 0.8}) == beside


def test_what_the_shares_are_of():
    fp8 = Utilization(FLOPS, CHIPS["h200"], "float8_e4m3fn", num_devices=8)
    assert fp8.peak_text() == "8 x 1979 TFLOP/s in float8 (NVIDIA H200 SXM 141GB)"
    fp32 = Utilization(FLOPS, CHIPS["tpu_v5p"], "float32", num_devices=4)
    assert fp32.peak_text() == "4 x 459 TFLOP/s in bfloat16 (TPU v5p)"
