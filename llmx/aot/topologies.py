"""Names of TPU slices and GPU clusters, and jax devices to compile for without such a machine.

    v5p:4x4x8       a slice of 4x4x8 = 128 TPU v5p chips
    4@v5e:16x16     four slices of 256 chips, joined by the data-center network
    h100:4x8        four hosts with eight H100s each; h100:8 is one host

Sources: shapes of slices from the Cloud TPU documentation, pages "TPU v4" to "TPU7x (Ironwood)";
wraparound from the scaling book (jax-ml.github.io/scaling-book/tpus). GPUs: NVIDIA's architecture
white papers of Ampere, Hopper and Blackwell, and what the driver reports of these boards.
"""

import dataclasses
import difflib
import importlib.util
import itertools
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llmx.runtime import hardware
from llmx.runtime.hardware import GIB

# Other common names.
OTHER_NAMES = {
    "v5litepod": "v5e", "v5lite": "v5e", "trillium": "v6e", "v7x": "tpu7x", "v7": "tpu7x",
    "ironwood": "tpu7x", "a100_80gb": "a100", "h100_sxm": "h100",
}  # fmt: skip

MAX_DEVICES = 2**16  # compilation for more is untested


@dataclasses.dataclass(frozen=True)
class _Tpu:
    """A generation of TPUs as libtpu knows it."""

    chip: str  # in hardware.CHIPS
    device_kind: str
    largest: tuple[int, ...]  # shape of the largest slice
    smallest: tuple[tuple[int, ...], ...]  # 3D only: those that are not of whole 4x4x4 cubes
    # Available to programs on one device, as libtpu reports it when a program needs more.
    hbm_bytes: float
    options: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class _Gpu:
    """Properties of a GPU that XLA's compiler needs."""

    chip: str  # in hardware.CHIPS
    device_kind: str
    hbm_bytes: int  # that the driver reports
    bandwidth: int  # bytes/s
    capability: int  # major version; the minor one is 0 for all of these
    num_cores: int  # streaming multiprocessors
    fpus_per_core: int  # fp32 lanes
    clock_ghz: float
    l2_bytes: int
    shared_bytes: int  # shared memory of a core
    num_links: int


# libtpu's default for TPU v4 is one device per core; the machine has one for both cores.
_MEGACORE = {"chip_config_name": "megacore"}
_CUBELESS = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))

TPUS = {
    "v4": _Tpu("tpu_v4", "TPU v4", (16, 16, 16), _CUBELESS, 30.75 * GIB, _MEGACORE),
    "v5e": _Tpu("tpu_v5e", "TPU v5 lite", (16, 16), (), 15.75 * GIB),
    "v5p": _Tpu("tpu_v5p", "TPU v5", (16, 20, 28), ((1, 1, 1), *_CUBELESS), 95.73 * GIB),
    "v6e": _Tpu("tpu_v6e", "TPU v6 lite", (16, 16), (), 31.24 * GIB),
    "tpu7x": _Tpu("tpu7x", "TPU7x", (16, 24, 24), ((1, 1, 1), *_CUBELESS), 94.74 * GIB),
}

# Slices of the 2D generations.
_FLAT_SHAPES = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))

_HOPPER = {
    "capability": 9, "num_cores": 132, "fpus_per_core": 128, "clock_ghz": 1.98,
    "l2_bytes": 50 * 2**20, "shared_bytes": 228 * 2**10, "num_links": 18,
}  # fmt: skip
_AMPERE = {
    "capability": 8, "num_cores": 108, "fpus_per_core": 64, "clock_ghz": 1.41,
    "l2_bytes": 40 * 2**20, "shared_bytes": 164 * 2**10, "num_links": 12,
}  # fmt: skip
_BLACKWELL = {
    "capability": 10, "num_cores": 148, "fpus_per_core": 128, "clock_ghz": 1.965,
    "l2_bytes": 132_644_864, "shared_bytes": 228 * 2**10, "num_links": 18,
}  # fmt: skip

GPUS = {
    "h100": _Gpu("h100_sxm", "NVIDIA H100 80GB HBM3", 84_942_979_072, 3_352_320_000_000, **_HOPPER),
    "h200": _Gpu("h200", "NVIDIA H200", 151_397_597_184, 4_800_000_000_000, **_HOPPER),
    "a100": _Gpu(
        "a100_80gb", "NVIDIA A100-SXM4-80GB", 85_100_068_864, 2_039_040_000_000, **_AMPERE
    ),
    "a100_40gb": _Gpu(
        "a100_40gb", "NVIDIA A100-SXM4-40GB", 42_331_013_120, 1_555_200_000_000, **_AMPERE
    ),
    "b200": _Gpu("b200", "NVIDIA B200", 191_514_411_008, 7_672_320_000_000, **_BLACKWELL),
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """A machine by name."""

    name: str
    platform: str  # "tpu" | "gpu"
    family: str  # a key of TPUS or GPUS
    shape: tuple[int, ...]  # chips along each axis of a slice; hosts and GPUs of each host
    num_slices: int
    chip: hardware.Chip
    device_kind: str
    hbm_bytes: int  # of a device, that a program may use

    @property
    def num_devices(self) -> int:
        return self.num_slices * math.prod(self.shape) * self.chip.devices_per_chip

    @property
    def num_hosts(self) -> int:
        """Hosts of all slices: one of a TPU has 2x2 chips."""
        if self.platform == "gpu":
            return self.shape[0]
        return self.num_slices * max(1, math.prod(self.shape) // 4)

    @property
    def text(self) -> str:
        """ "4 slices of 16x16 TPU v5e, 1,024 devices"."""
        count = f"{self.num_devices:,} device{'s' if self.num_devices > 1 else ''}"
        if self.platform == "gpu":
            hosts, per_host = self.shape
            where = f"{hosts} hosts of {per_host}" if hosts > 1 else "one host of"
            return f"{where} {self.chip.name}, {count}"
        slices = f"{self.num_slices} slices of " if self.num_slices > 1 else ""
        return f"{slices}{_by(self.shape)} {self.chip.name}, {count}"


def parse(name: str) -> Topology:
    """The machine called `name`; jax is not imported.

    Raises ValueError for an unknown name or shape (with some, libtpu would abort the process).
    """
    match = re.fullmatch(r"(?:(\d+)@)?([a-z0-9_]+):(\d+(?:x\d+)*)", name)
    if not match:
        raise ValueError(
            f"topology {name!r}: write the slices first: {slices[2]}@{slices[1]}"
            if (slices := re.fullmatch(r"([a-z0-9_]+:[\dx]+)\*(\d+)", name))
            else f"topology {name!r} is not FAMILY:SHAPE: write for example v5p:2x2x2, "
            "4@v5e:16x16 (four slices), h100:8 or h100:4x8 (hosts x GPUs per host)"
        )
    num_slices, family, shape = match.groups()
    shape = tuple(int(size) for size in shape.split("x"))
    if family not in TPUS | GPUS:
        raise ValueError(_unknown_family(name, family))
    is_gpu, machine = family in GPUS, (TPUS | GPUS)[family]
    shape = _gpu_shape(name, family, shape) if is_gpu else _slice_shape(name, family, shape)
    if num_slices is not None and (is_gpu or int(num_slices) < 1):
        raise ValueError(
            f"topology {name!r}: {num_slices}@ counts slices of TPUs, at least 1: "
            f"write {name.partition('@')[2]!r}"
            + (", with hosts before GPUs per host: h100:4x8" if is_gpu else "")
        )
    topology = Topology(
        name=name, platform="gpu" if is_gpu else "tpu", family=family, shape=shape,
        num_slices=int(num_slices or 1), chip=hardware.CHIPS[machine.chip],
        device_kind=machine.device_kind, hbm_bytes=int(machine.hbm_bytes),
    )  # fmt: skip
    if topology.num_devices > MAX_DEVICES:
        count = f"{topology.num_devices:,} devices: at most {MAX_DEVICES:,} are supported"
        raise ValueError(f"topology {name!r} has {count}; use fewer slices or hosts")
    return topology


def _unknown_family(name: str, family: str) -> str:
    known = [*TPUS, *GPUS]
    near = difflib.get_close_matches(family, known, n=1, cutoff=0.5)
    near = OTHER_NAMES.get(family, near and near[0])
    hint = f" (did you mean {near}?)" if near else ""
    return f"topology {name!r}: {family!r} is unknown: use one of {', '.join(known)}{hint}"


def _slice_shape(name: str, family: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    valid = slice_shapes(family)
    if shape in valid:
        return shape
    near = sorted(valid, key=lambda other: _distance(shape, other))[:3]
    raise ValueError(
        f"topology {name!r}: no {family} slice has this shape; the nearest are "
        f"{', '.join(f'{family}:{_by(one)}' for one in near)} (the largest is "
        f"{_by(TPUS[family].largest)})"
    )


def _by(shape: tuple[int, ...]) -> str:
    """ "2x2x4"."""
    return "x".join(map(str, shape))


def slice_shapes(family: str) -> list[tuple[int, ...]]:
    """All shapes of a slice of this generation, smallest first, axes in ascending order."""
    tpu = TPUS[family]
    if len(tpu.largest) == 2:
        return list(_FLAT_SHAPES)
    cubes = itertools.product(*(range(4, size + 1, 4) for size in tpu.largest))
    ascending = [shape for shape in cubes if list(shape) == sorted(shape)]
    return [*tpu.smallest, *sorted(ascending, key=math.prod)]


def _distance(shape: tuple[int, ...], valid: tuple[int, ...]) -> tuple[float, float]:
    """How far a valid shape is from the requested one: in chips, then in its sides."""
    chips = abs(math.log(math.prod(valid) / max(1, math.prod(shape))))
    sides = itertools.zip_longest(sorted(shape)[::-1], sorted(valid)[::-1], fillvalue=1)
    return chips, sum(abs(a - b) for a, b in sides)


def _gpu_shape(name: str, family: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """(hosts, GPUs per host)."""
    most = hardware.CHIPS[GPUS[family].chip].max_domain
    hosts, per_host = shape if len(shape) == 2 else (1, shape[0])
    if len(shape) <= 2 and hosts >= 1 and 1 <= per_host <= most:
        return hosts, per_host
    total = math.prod(shape)
    raise ValueError(
        f"topology {name!r}: a host has 1 to {most} GPUs: write hosts x GPUs per host, here "
        f"{family}:{max(1, math.ceil(total / most))}x{min(max(total, 1), most)}"
    )


class CompilerMissing(ValueError):
    """The compiler of the platform is not installed."""


def devices(topology: str | Topology) -> list:
    """jax devices of the machine, to make a mesh of and to compile for; nothing runs on them.

    Call it before the compilers are loaded: it sets environment variables that they then read.
    Raises CompilerMissing; ValueError for a bad name; RuntimeError if the compiler returns other
    devices than requested.
    """
    if isinstance(topology, str):
        topology = parse(topology)
    _prepare(topology.platform)
    from jax.experimental import topologies

    if topology.platform == "gpu":
        hosts, per_host = topology.shape
        actual = topologies.get_topology_desc(
            platform="cuda", topology=f"1x{hosts}x{per_host}",
            target_config=gpu_target(GPUS[topology.family]),
        ).devices  # fmt: skip
    else:
        actual = topologies.get_topology_desc(
            platform="tpu", topology_name=f"{topology.family}:{_by(topology.shape)}",
            # A host has 2x2 chips; without this option libtpu refuses a slice of a single chip.
            chips_per_host_bounds=(1, 1, 1) if math.prod(topology.shape) == 1 else (2, 2, 1),
            wrap=wraps(topology.shape), **TPUS[topology.family].options,
            **({"num_slices": topology.num_slices} if topology.num_slices > 1 else {}),
        ).devices  # fmt: skip
    _check(topology, actual)
    return list(actual)


def _prepare(platform: str) -> None:
    """Prepares the process for the compiler of `platform`; the user's settings stay."""
    import jax

    modules = {"tpu": ("libtpu",), "gpu": ("jax_cuda13_plugin", "jax_cuda12_plugin")}[platform]
    users_library = platform == "tpu" and "TPU_LIBRARY_PATH" in os.environ
    if not users_library and not any(map(importlib.util.find_spec, modules)):
        problem = f"the {platform.upper()} compiler is not installed ({' or '.join(modules)})"
        raise CompilerMissing(f"{problem}: {_install()} (no such device is needed)")
    jax.config.update("jax_platforms", "cpu")  # devices of this machine are not used
    if platform == "gpu":
        import jax._src.cudnn.fused_attention_stablehlo as fused_attention

        # jax asks cuDNN for its version before it compiles attention; this is that of
        # `gpu_target`. Only cuDNN knows the kernel's workspace: the program's memory lacks it.
        fused_attention.check_cudnn_version = lambda: 91200
        return
    for name, value in (
        ("TPU_SKIP_MDS_QUERY", "1"),  # there is no metadata server to ask
        ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),  # the lock on the chips guards nothing here
        # libtpu warns if these are not set. They describe this machine and do not change programs.
        ("TPU_ACCELERATOR_TYPE", "v4-8"),
        ("TPU_WORKER_HOSTNAMES", "localhost"),
    ):
        os.environ.setdefault(name, value)


def _install() -> str:
    """The command that installs both compilers, of the version that this jax pins."""
    import jax

    return f"pip install 'jax[tpu,cuda13-local]=={jax.__version__}'"


def wraps(shape: Sequence[int]) -> tuple[bool, bool, bool]:
    """Along which axes of a slice the links form a ring, which changes how reductions compile.

    Every axis of a slice that is built of whole 4x4x4 cubes, and those of 16 of a 2D slice.
    """
    if len(shape) == 2:
        return (shape[0] == 16, shape[1] == 16, False)
    return (all(size % 4 == 0 for size in shape),) * 3


def _check(topology: Topology, actual: Sequence) -> None:
    """Raises RuntimeError if the compiler returned the devices of another machine."""
    kinds = {device.device_kind for device in actual}
    slices = {device.slice_index for device in actual if hasattr(device, "slice_index")}
    num_slices = max(1, len(slices))
    expected = (topology.num_devices, {topology.device_kind}, topology.num_slices)
    if (len(actual), kinds, num_slices) != expected:
        raise RuntimeError(
            f"topology {topology.name!r} should be {topology.num_devices} devices "
            f"{topology.device_kind!r} in {topology.num_slices} slices, and the compiler gives "
            f"{len(actual)} of {sorted(kinds)} in {num_slices}: install the version that this "
            f"jax pins, {_install()}"
        )


def compile(lowered: Any, platform: str, options: Mapping[str, str | bool] | None = None) -> Any:
    """Compiles `lowered`, of `jax.jit(...).lower(...)`, with the flags of a run on `platform`.

    Raises what `lowered.compile` raises. `options`: more compiler options.
    """
    import jax

    from llmx.runtime import launch

    # As options, not in XLA_FLAGS: jax may have read them already.
    wanted = launch.XLA_FLAGS[platform]
    if platform == "gpu":
        wanted = wanted | {"xla_gpu_autotune_level": "0"}  # no GPU is here to time candidates on
    added = launch.added_flags(os.environ.get("XLA_FLAGS", ""), wanted)
    chosen = {name: launch.option_value(text) for name, text in added.items()}
    while True:
        try:
            return lowered.compile(compiler_options=chosen | dict(options or {}))
        except jax.errors.JaxRuntimeError as error:
            # Flags that this version accepts but ignores are not options.
            unknown = re.search(r"No such compile option: '(\w+)'", str(error))
            if not unknown or unknown[1] not in chosen:
                raise
            del chosen[unknown[1]]


def gpu_target(gpu: _Gpu) -> str:
    """The description of a GPU for XLA's compiler: a GpuTargetConfigProto as text."""
    feature = "ACCELERATED_FEATURES" if gpu.capability >= 9 else "NONE"
    return f"""
gpu_device_info {{
  name: "{gpu.device_kind}"
  cuda_compute_capability {{ major: {gpu.capability} feature_extension: {feature} }}
  core_count: {gpu.num_cores}
  fpus_per_core: {gpu.fpus_per_core}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {gpu.hbm_bytes}
  memory_bandwidth: {gpu.bandwidth}
  l2_cache_size: {gpu.l2_bytes}
  shared_memory_per_core: {gpu.shared_bytes}
  shared_memory_per_block: {48 * 2**10}
  shared_memory_per_block_optin: {gpu.shared_bytes - 2**10}
  registers_per_core_limit: {2**16} registers_per_block_limit: {2**16}
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: {2**31 - 1} block_dim_limit_y: {2**16 - 1} block_dim_limit_z: {2**16 - 1}
  device_interconnect_info {{ active_links: {gpu.num_links} }}
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.12.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 patch: 0 }}
device_description_str: "{gpu.device_kind}"
"""
