"""What a chip can do: FLOP/s, memory, links. Pure data; only `this_chip` imports jax.

All figures are per chip, dense and peak; bandwidths are bytes per second in one direction. Of a
vendor's sum over both directions, or figure with sparsity, half stands here.

Memory: Google's pages count HBM in GiB. NVIDIA writes GB but means GiB (an H100 has five stacks of
16 GiB). A program gets a little less than this: the driver and the runtime take their part.

Sources: Cloud TPU documentation, pages "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e", "TPU7x
(Ironwood)"; Jouppi et al., "TPU v4" (ISCA 2023, arXiv 2304.01433); NVIDIA data sheets "A100 Tensor
Core GPU", "H100 Tensor Core GPU", "H200 Tensor Core GPU", "Blackwell Architecture Technical Brief";
for the network "DGX A100", "DGX H100/H200", "DGX B200". Watts of GPUs are the data sheets' largest.
"""

import dataclasses
import re

GIB = 2**30
# Products of bfloat16 in an exact one of fp32 (XLA's precision HIGHEST on TPU, "bf16_6x").
EXACT_PASSES = 6


@dataclasses.dataclass(frozen=True)
class Chip:
    """One accelerator. On some TPUs a chip shows as two jax devices: see `devices_per_chip`."""

    name: str
    flops: dict[str, float]  # multiply-adds count as 2; per second, by the type of the factors
    hbm_bytes: int
    hbm_bandwidth: float  # bytes/s
    link_bandwidth: float  # bytes/s, one ICI or NVLink link, one direction
    num_links: int  # links per chip
    # How links join chips: "torus_2d", "torus_3d", "switch", "pair" (a bridge), "memory" (of CPUs).
    topology: str
    max_domain: int  # most chips that links join: a TPU pod, the GPUs of one server
    network_bandwidth: float | None  # bytes/s per chip beyond the links; None: not published
    devices_per_chip: int = 1  # jax devices; each has this fraction of everything above
    watts: float | None = None  # rated power of the chip; None: not published

    @property
    def is_gpu(self) -> bool:
        return self.topology in ("switch", "pair")

    def device_flops(self, dtype: str = "bfloat16") -> float:
        """Peak FLOP/s of one jax device. ValueError where no figure for `dtype` is published."""
        if dtype not in self.flops:
            raise ValueError(
                f"{self.name} has no published FLOP/s for {dtype!r}: use one of {list(self.flops)}"
            )
        return self.flops[dtype] / self.devices_per_chip

    def peak(self, dtype: str) -> tuple[float, str]:
        """Peak FLOP/s of one jax device for factors of a numpy type, and the type it is of.

        That of bfloat16 where none is published: such products are computed in bfloat16.
        """
        width = re.match(r"float[48](?=_|$)", dtype)
        name = width[0] if width else dtype
        name = name if name in self.flops else "bfloat16"
        return self.device_flops(name), name

    def exact_flops(self) -> float:
        """FLOP/s of one jax device in exact fp32 products: on TPUs made of several in bfloat16."""
        if "float32" in self.flops or not self.topology.startswith("torus"):
            return self.peak("float32")[0]
        return self.device_flops("bfloat16") / EXACT_PASSES

    @property
    def device_hbm_bytes(self) -> int:
        """Memory of one jax device in bytes."""
        return self.hbm_bytes // self.devices_per_chip


# Keys of `flops` are numpy type names, with "float8" and "float4" for all forms of that width, and
# "tf32" for float32 factors rounded to 10 bits of mantissa (XLA's default for float32 on NVIDIA).
# fmt: off
_A100 = {"bfloat16": 312e12, "float16": 312e12, "int8": 624e12, "tf32": 156e12, "float32": 19.5e12}
_HOPPER = {"bfloat16": 989.5e12, "float16": 989.5e12, "float8": 1979e12, "int8": 1979e12,
           "tf32": 494.5e12, "float32": 67e12}
_H100_PCIE = {"bfloat16": 756.5e12, "float16": 756.5e12, "float8": 1513e12, "int8": 1513e12,
              "tf32": 378e12, "float32": 51e12}
_BLACKWELL = {"bfloat16": 2250e12, "float16": 2250e12, "float8": 4500e12, "float4": 9000e12,
              "int8": 4500e12, "tf32": 1100e12, "float32": 80e12}

# Second line of a row: hbm_bytes, hbm_bandwidth, link_bandwidth, num_links, topology, max_domain,
# network_bandwidth.
CHIPS = {
    # ICI: 6 links of 50 GB/s (ISCA 2023, table 4). The data-center bandwidth is not published.
    "tpu_v4": Chip("TPU v4", {"bfloat16": 275e12, "int8": 275e12},
                   32 * GIB, 1200e9, 50e9, 6, "torus_3d", 4096, None),
    # ICI: 1600 Gbit/s over 4 ports. Network: 6.4 Tbit/s per pod of 256.
    "tpu_v5e": Chip("TPU v5e", {"bfloat16": 197e12, "int8": 393e12},
                    16 * GIB, 819e9, 50e9, 4, "torus_2d", 256, 3.125e9),
    # ICI: 1200 GB/s both ways over 6 links. Network: 50 Gbit/s. The largest slice is 6144 chips.
    "tpu_v5p": Chip("TPU v5p", {"bfloat16": 459e12, "float8": 459e12, "int8": 918e12},
                    95 * GIB, 2765e9, 100e9, 6, "torus_3d", 8960, 6.25e9),
    # ICI: 800 GB/s both ways over 4 ports. Network: 25.6 Tbit/s per pod of 256.
    "tpu_v6e": Chip("TPU v6e", {"bfloat16": 918e12, "float8": 918e12, "int8": 1836e12},
                    32 * GIB, 1638e9, 100e9, 4, "torus_2d", 256, 12.5e9),
    # ICI: 1200 GB/s both ways over 6 links. Network: 100 Gbit/s. Each of the two dies is a device.
    "tpu7x": Chip("TPU7x", {"bfloat16": 2307e12, "float8": 4614e12},
                  192 * GIB, 7380e9, 100e9, 6, "torus_3d", 9216, 12.5e9, devices_per_chip=2),
    # NVLink 3: 600 GB/s both ways over 12 links. Network: one 200 Gbit/s adapter per GPU.
    "a100_40gb": Chip("NVIDIA A100 SXM 40GB", _A100,
                      40 * GIB, 1555e9, 25e9, 12, "switch", 8, 25e9, watts=400),
    "a100_80gb": Chip("NVIDIA A100 SXM 80GB", _A100,
                      80 * GIB, 2039e9, 25e9, 12, "switch", 8, 25e9, watts=400),
    # PCIe cards: NVLink only as a bridge between two; the network is the server maker's choice.
    "a100_pcie_40gb": Chip("NVIDIA A100 PCIe 40GB", _A100,
                           40 * GIB, 1555e9, 25e9, 12, "pair", 2, None, watts=250),
    "a100_pcie_80gb": Chip("NVIDIA A100 PCIe 80GB", _A100,
                           80 * GIB, 1935e9, 25e9, 12, "pair", 2, None, watts=300),
    # NVLink 4: 900 GB/s both ways over 18 links. Network: one 400 Gbit/s adapter per GPU.
    "h100_sxm": Chip("NVIDIA H100 SXM 80GB", _HOPPER,
                     80 * GIB, 3350e9, 25e9, 18, "switch", 8, 50e9, watts=700),
    # NVLink bridge: 600 GB/s both ways.
    "h100_pcie": Chip("NVIDIA H100 PCIe 80GB", _H100_PCIE,
                      80 * GIB, 2000e9, 25e9, 12, "pair", 2, None, watts=350),
    "h200": Chip("NVIDIA H200 SXM 141GB", _HOPPER,
                 141 * GIB, 4800e9, 25e9, 18, "switch", 8, 50e9, watts=700),
    # NVLink 5: 1800 GB/s both ways over 18 links. Memory: a DGX B200 has 1440 GB, 64 TB/s over 8.
    "b200": Chip("NVIDIA B200 180GB", _BLACKWELL,
                 180 * GIB, 8000e9, 50e9, 18, "switch", 8, 50e9, watts=1000),
}
# fmt: on

# What `jax.Device.device_kind` says, exactly, and the chip that it means. Other variants of these
# chips (H100 NVL, H20, A800, ...) have other figures and are deliberately not guessed.
DEVICE_KINDS = {
    "TPU v4": "tpu_v4", "TPU7x": "tpu7x",
    "TPU v5 lite": "tpu_v5e", "TPU v5e": "tpu_v5e",
    "TPU v5": "tpu_v5p", "TPU v5p": "tpu_v5p",
    "TPU v6 lite": "tpu_v6e", "TPU v6e": "tpu_v6e",
    "NVIDIA A100-SXM4-40GB": "a100_40gb", "NVIDIA A100-SXM4-80GB": "a100_80gb",
    "NVIDIA A100-PCIE-40GB": "a100_pcie_40gb", "NVIDIA A100 80GB PCIe": "a100_pcie_80gb",
    "NVIDIA H100 80GB HBM3": "h100_sxm", "NVIDIA H100 PCIe": "h100_pcie",
    "NVIDIA H200": "h200", "NVIDIA B200": "b200",
}  # fmt: skip


def chip_of(device_kind: str) -> Chip | None:
    """The chip that a `device_kind` names, or None: a CPU, or a variant without figures here."""
    return CHIPS[DEVICE_KINDS[device_kind]] if device_kind in DEVICE_KINDS else None


def this_chip() -> Chip | None:
    """The chip of the first jax device, or None where it is unknown. Starts the jax backend."""
    import jax  # here, so that the tables cost nothing to those who only read them

    return chip_of(jax.devices()[0].device_kind)
