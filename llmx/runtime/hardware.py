"""What a chip can do: FLOP/s, memory, links. Pure data; only `this_chip` imports jax.

All figures are per chip, dense (no structured sparsity) and peak; bandwidths are bytes per second
in one direction. Where a vendor states a sum over both directions, or a figure with sparsity, half
of it stands here.

Memory: Google's pages count HBM in GiB. NVIDIA writes GB but means GiB (an H100 has five stacks of
16 GiB). A program gets a little less than this: the driver and the runtime take their part.

Sources: Cloud TPU documentation, pages "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e", "TPU7x
(Ironwood)"; Jouppi et al., "TPU v4" (ISCA 2023, arXiv 2304.01433); NVIDIA data sheets "A100 Tensor
Core GPU", "H100 Tensor Core GPU", "H200 Tensor Core GPU", "Blackwell Architecture Technical Brief";
for the network "DGX A100", "DGX H100/H200", "DGX B200".
"""

import dataclasses

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One accelerator. On some TPUs a chip shows as two jax devices: see `devices_per_chip`."""

    name: str
    flops: dict[str, float]  # multiply-adds count as 2; per second, by the type of the factors
    hbm_bytes: int
    hbm_bandwidth: float  # bytes/s
    link_bandwidth: float  # bytes/s, one ICI or NVLink link, one direction
    num_links: int  # links per chip
    topology: str  # how links join chips: "torus_2d", "torus_3d", "switch", "pair" (a bridge)
    max_domain: int  # most chips that links join: a TPU pod, the GPUs of one server
    network_bandwidth: float | None  # bytes/s per chip beyond the links; None: not published
    devices_per_chip: int = 1  # jax devices; each has this fraction of everything above

    def device_flops(self, dtype: str = "bfloat16") -> float:
        """Peak FLOP/s of one jax device. ValueError where no figure for `dtype` is published."""
        if dtype not in self.flops:
            raise ValueError(
                f"{self.name} has no published FLOP/s for {dtype!r}: use one of {list(self.flops)}"
            )
        return self.flops[dtype] / self.devices_per_chip

    @property
    def device_hbm_bytes(self) -> int:
        """Memory of one jax device in bytes."""
        return self.hbm_bytes // self.devices_per_chip


# Keys of `flops` are numpy type names, with "float8" and "float4" for all forms of that width, and
# "tf32" for float32 factors rounded to 10 bits of mantissa (XLA's default for float32 on NVIDIA).
_A100_FLOPS = {"bfloat16": 312e12, "float16": 312e12, "int8": 624e12, "tf32": 156e12,
               "float32": 19.5e12}  # fmt: skip
_HOPPER_SXM_FLOPS = {"bfloat16": 989.5e12, "float16": 989.5e12, "float8": 1979e12,
                     "int8": 1979e12, "tf32": 494.5e12, "float32": 67e12}  # fmt: skip

CHIPS = {
    # ICI: 6 links of 50 GB/s (ISCA 2023, table 4). The data-center bandwidth is not published.
    "tpu_v4": Chip(
        name="TPU v4", flops={"bfloat16": 275e12, "int8": 275e12}, hbm_bytes=32 * GIB,
        hbm_bandwidth=1200e9, link_bandwidth=50e9, num_links=6, topology="torus_3d",
        max_domain=4096, network_bandwidth=None,
    ),
    # ICI: 1600 Gbit/s over 4 ports. Network: 6.4 Tbit/s per pod of 256.
    "tpu_v5e": Chip(
        name="TPU v5e", flops={"bfloat16": 197e12, "int8": 393e12}, hbm_bytes=16 * GIB,
        hbm_bandwidth=819e9, link_bandwidth=50e9, num_links=4, topology="torus_2d",
        max_domain=256, network_bandwidth=3.125e9,
    ),
    # ICI: 1200 GB/s both ways over 6 links. Network: 50 Gbit/s. The largest slice is 6144 chips.
    "tpu_v5p": Chip(
        name="TPU v5p", flops={"bfloat16": 459e12, "float8": 459e12, "int8": 918e12},
        hbm_bytes=95 * GIB, hbm_bandwidth=2765e9, link_bandwidth=100e9, num_links=6,
        topology="torus_3d", max_domain=8960, network_bandwidth=6.25e9,
    ),
    # ICI: 800 GB/s both ways over 4 ports. Network: 25.6 Tbit/s per pod of 256.
    "tpu_v6e": Chip(
        name="TPU v6e", flops={"bfloat16": 918e12, "float8": 918e12, "int8": 1836e12},
        hbm_bytes=32 * GIB, hbm_bandwidth=1638e9, link_bandwidth=100e9, num_links=4,
        topology="torus_2d", max_domain=256, network_bandwidth=12.5e9,
    ),
    # ICI: 1200 GB/s both ways over 6 links. Network: 100 Gbit/s. Each of the two dies is a device.
    "tpu7x": Chip(
        name="TPU7x", flops={"bfloat16": 2307e12, "float8": 4614e12}, hbm_bytes=192 * GIB,
        hbm_bandwidth=7380e9, link_bandwidth=100e9, num_links=6, topology="torus_3d",
        max_domain=9216, network_bandwidth=12.5e9, devices_per_chip=2,
    ),
    # NVLink 3: 600 GB/s both ways over 12 links. Network: one 200 Gbit/s adapter per GPU.
    "a100_40gb": Chip(
        name="NVIDIA A100 SXM 40GB", flops=_A100_FLOPS, hbm_bytes=40 * GIB, hbm_bandwidth=1555e9,
        link_bandwidth=25e9, num_links=12, topology="switch", max_domain=8, network_bandwidth=25e9,
    ),
    "a100_80gb": Chip(
        name="NVIDIA A100 SXM 80GB", flops=_A100_FLOPS, hbm_bytes=80 * GIB, hbm_bandwidth=2039e9,
        link_bandwidth=25e9, num_links=12, topology="switch", max_domain=8, network_bandwidth=25e9,
    ),
    # PCIe cards: NVLink only as a bridge between two; the network is the server maker's choice.
    "a100_pcie_40gb": Chip(
        name="NVIDIA A100 PCIe 40GB", flops=_A100_FLOPS, hbm_bytes=40 * GIB, hbm_bandwidth=1555e9,
        link_bandwidth=25e9, num_links=12, topology="pair", max_domain=2, network_bandwidth=None,
    ),
    "a100_pcie_80gb": Chip(
        name="NVIDIA A100 PCIe 80GB", flops=_A100_FLOPS, hbm_bytes=80 * GIB, hbm_bandwidth=1935e9,
        link_bandwidth=25e9, num_links=12, topology="pair", max_domain=2, network_bandwidth=None,
    ),
    # NVLink 4: 900 GB/s both ways over 18 links. Network: one 400 Gbit/s adapter per GPU.
    "h100_sxm": Chip(
        name="NVIDIA H100 SXM 80GB", flops=_HOPPER_SXM_FLOPS, hbm_bytes=80 * GIB,
        hbm_bandwidth=3350e9, link_bandwidth=25e9, num_links=18, topology="switch", max_domain=8,
        network_bandwidth=50e9,
    ),
    # NVLink bridge: 600 GB/s both ways.
    "h100_pcie": Chip(
        name="NVIDIA H100 PCIe 80GB",
        flops={"bfloat16": 756.5e12, "float16": 756.5e12, "float8": 1513e12, "int8": 1513e12,
               "tf32": 378e12, "float32": 51e12},
        hbm_bytes=80 * GIB, hbm_bandwidth=2000e9, link_bandwidth=25e9, num_links=12,
        topology="pair", max_domain=2, network_bandwidth=None,
    ),
    "h200": Chip(
        name="NVIDIA H200 SXM 141GB", flops=_HOPPER_SXM_FLOPS, hbm_bytes=141 * GIB,
        hbm_bandwidth=4800e9, link_bandwidth=25e9, num_links=18, topology="switch", max_domain=8,
        network_bandwidth=50e9,
    ),
    # NVLink 5: 1800 GB/s both ways over 18 links. Memory: a DGX B200 has 1440 GB, 64 TB/s over 8.
    "b200": Chip(
        name="NVIDIA B200 180GB",
        flops={"bfloat16": 2250e12, "float16": 2250e12, "float8": 4500e12, "float4": 9000e12,
               "int8": 4500e12, "tf32": 1100e12, "float32": 80e12},
        hbm_bytes=180 * GIB, hbm_bandwidth=8000e9, link_bandwidth=50e9, num_links=18,
        topology="switch", max_domain=8, network_bandwidth=50e9,
    ),
}  # fmt: skip

# What `jax.Device.device_kind` says, exactly, and the chip that it means. Other variants of these
# chips (H100 NVL, H20, A800, ...) have other figures and are deliberately not guessed.
DEVICE_KINDS = {
    "TPU v4": "tpu_v4",
    "TPU v5 lite": "tpu_v5e",
    "TPU v5e": "tpu_v5e",
    "TPU v5": "tpu_v5p",
    "TPU v5p": "tpu_v5p",
    "TPU v6 lite": "tpu_v6e",
    "TPU v6e": "tpu_v6e",
    "TPU7x": "tpu7x",
    "NVIDIA A100-SXM4-40GB": "a100_40gb",
    "NVIDIA A100-SXM4-80GB": "a100_80gb",
    "NVIDIA A100-PCIE-40GB": "a100_pcie_40gb",
    "NVIDIA A100 80GB PCIe": "a100_pcie_80gb",
    "NVIDIA H100 80GB HBM3": "h100_sxm",
    "NVIDIA H100 PCIe": "h100_pcie",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
}


def chip_of(device_kind: str) -> Chip | None:
    """The chip that a `device_kind` names, or None: a CPU, or a variant without figures here."""
    return CHIPS[DEVICE_KINDS[device_kind]] if device_kind in DEVICE_KINDS else None


def this_chip() -> Chip | None:
    """The chip of the first jax device, or None where it is unknown. Starts the jax backend."""
    import jax  # here, so that the tables cost nothing to those who only read them

    return chip_of(jax.devices()[0].device_kind)
