"""The table of chips: complete, equal to what the vendors state in other units, free of jax."""

import subprocess
import sys

import jax
import pytest

from llmx.runtime.hardware import CHIPS, DEVICE_KINDS, GIB, chip_of, this_chip

# The vendors' own headline sums, which the table holds per link and direction:
# name -> (GB/s over all links, both directions), as on the data sheet.
BOTH_WAYS_GBPS = {
    "tpu_v5e": 400, "tpu_v5p": 1200, "tpu_v6e": 800, "tpu7x": 1200, "a100_40gb": 600,
    "a100_80gb": 600, "a100_pcie_40gb": 600, "a100_pcie_80gb": 600, "h100_sxm": 900,
    "h100_pcie": 600, "h200": 900, "b200": 1800, "tpu_v4": 600,
}  # fmt: skip
# NVIDIA's headline bfloat16 TFLOP/s, with 2:4 sparsity: twice the dense figure.
SPARSE_BF16 = {"h100_sxm": 1979, "h100_pcie": 1513, "h200": 1979, "b200": 4500, "a100_80gb": 624}


@pytest.mark.parametrize("key", CHIPS)
def test_entry_is_plausible(key):
    chip = CHIPS[key]
    assert chip.flops["bfloat16"] > 1e14
    assert all(1e12 < flops < 1e17 for flops in chip.flops.values())
    assert chip.hbm_bytes % GIB == 0 and 16 <= chip.hbm_bytes // GIB <= 192
    assert 8e11 < chip.hbm_bandwidth < 1e13
    # A byte over the network costs more than one over the links, and that more than one from HBM.
    assert chip.num_links * chip.link_bandwidth < chip.hbm_bandwidth
    assert (chip.network_bandwidth or 0) <= chip.num_links * chip.link_bandwidth
    assert chip.topology in ("torus_2d", "torus_3d", "switch", "pair")
    assert (chip.topology == "torus_3d") == (chip.num_links == 6)


def test_links_add_up_to_the_data_sheets():
    sums = {key: 2 * c.num_links * c.link_bandwidth / 1e9 for key, c in CHIPS.items()}
    assert sums == BOTH_WAYS_GBPS


def test_flops_are_dense():
    for key, sparse_teraflops in SPARSE_BF16.items():
        assert CHIPS[key].flops["bfloat16"] == sparse_teraflops * 1e12 / 2


def test_two_devices_share_one_chip():
    chip = CHIPS["tpu7x"]
    assert chip.device_flops("float8") == 2307e12
    assert chip.device_hbm_bytes == 96 * GIB
    assert CHIPS["h100_sxm"].device_flops() == 989.5e12


def test_unpublished_dtype_names_the_published_ones():
    with pytest.raises(ValueError, match=r"TPU v5e has no published FLOP/s for 'float8'.*bfloat16"):
        CHIPS["tpu_v5e"].device_flops("float8")


@pytest.mark.parametrize(
    ("key", "dtype", "wanted"),
    [("h100_sxm", "bfloat16", (989.5e12, "bfloat16")),
     ("h100_sxm", "float16", (989.5e12, "float16")),
     ("h100_sxm", "float32", (67e12, "float32")),
     ("h100_sxm", "float8_e4m3fn", (1979e12, "float8")),
     ("h100_sxm", "float8_e5m2", (1979e12, "float8")),
     ("h100_sxm", "int8", (1979e12, "int8")),
     ("b200", "float4_e2m1fn", (9000e12, "float4")),
     ("tpu7x", "float8_e4m3fn", (2307e12, "float8")),
     ("tpu_v5e", "int8", (393e12, "int8")),
     # No figure: such products are computed in bfloat16.
     ("tpu_v5e", "float8_e4m3fn", (197e12, "bfloat16")),
     ("tpu_v5p", "float32", (459e12, "bfloat16"))],
)  # fmt: skip
def test_peaks_by_type(key, dtype, wanted):
    assert CHIPS[key].peak(dtype) == wanted


def test_exact_fp32_is_not_tf32_and_on_tpus_six_products():
    assert CHIPS["h100_sxm"].exact_flops() == 67e12
    assert CHIPS["tpu_v5e"].exact_flops() == pytest.approx(197e12 / 6)
    assert CHIPS["tpu7x"].exact_flops() == pytest.approx(2307e12 / 2 / 6)


def test_every_device_kind_is_a_chip_and_every_chip_has_one():
    assert set(DEVICE_KINDS.values()) == set(CHIPS)
    assert chip_of("TPU v5 lite").name == "TPU v5e"
    assert chip_of("NVIDIA H100 80GB HBM3").name == "NVIDIA H100 SXM 80GB"
    assert chip_of("NVIDIA H100 NVL") is None


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="asks about the CPU")
def test_cpu_is_no_known_chip():
    assert this_chip() is None


def test_the_tables_do_not_import_jax():
    code = "import sys, llmx.runtime.hardware; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
