"""conventions.py: published utilizations follow from published throughputs, each by its count."""

import dataclasses

import pytest

from llmx.model import conventions, costs
from llmx.model.conventions import PUBLISHERS
from llmx.model.families import LOCAL, ModelConfig, preset
from llmx.runtime.hardware import CHIPS
from llmx.runtime.utilization import Utilization

# Printed with two to four digits, from throughputs printed with as many.
TOLERANCE = 0.01


def gpt(width: int, num_layers: int, num_heads: int, **changes) -> ModelConfig:
    """A GPT with 4 D in its MLP, learned positions, a tied head, biases everywhere."""
    shape = dict(
        width=width, num_layers=num_layers, num_heads=num_heads, num_kv_heads=num_heads,
        head_dim=width // num_heads, mlp_dim=4 * width,
    )  # fmt: skip
    return preset("gpt2", **shape | changes)


# Chowdhery et al., arXiv 2204.02311, table 1: one head of keys and values, SwiGLU of three
# matrices, tied table. Its attention and MLP run side by side, which changes no FLOP.
PALM = preset(
    "llama3", width=18432, num_layers=118, num_heads=48, num_kv_heads=1, head_dim=256,
    mlp_dim=4 * 18432, vocab_size=256_000, tied_head=True,
)  # fmt: skip
# arXiv 2104.04473 and 2205.05198, vocabulary padded to 51,200.
MEGATRON = {
    "22b": gpt(6144, 48, 64, vocab_size=51200, max_positions=2048),
    "175b": gpt(12288, 96, 96, vocab_size=51200, max_positions=2048),
    "530b": gpt(20480, 105, 128, vocab_size=51200, max_positions=2048),
    "1t": gpt(25600, 128, 160, vocab_size=51200, max_positions=2048),
}
LLAMA2_7B = preset(
    "llama3", width=4096, num_layers=32, num_heads=32, num_kv_heads=32, head_dim=128,
    mlp_dim=11008, vocab_size=32000,
)  # fmt: skip
LLAMA2_70B = preset(
    "llama3", width=8192, num_layers=80, num_heads=64, num_kv_heads=8, head_dim=128,
    mlp_dim=28672, vocab_size=32000,
)  # fmt: skip
GPT2_XL = preset("gpt2_1.5b", vocab_size=50304)  # llm.c trains padded rows as parameters


def mpt(num_positions: int, *shape: int) -> ModelConfig:
    return gpt(*shape, vocab_size=50368, max_positions=num_positions)


MPT_3B, MPT_7B, MPT_30B = (2560, 32, 20), (4096, 32, 32), (7168, 48, 56)


@dataclasses.dataclass(frozen=True)
class Published:
    """Throughput of all devices, and what the publisher made of it."""

    convention: str
    model: ModelConfig
    sequence_length: int
    tokens_per_second: float
    num_devices: int
    chip: str
    share: float = 0.0  # of the peak
    teraflops: float = 0.0  # per second and device, where no share is printed
    dtype: str = "bfloat16"


def megatron_2022(name, batch, devices, seconds, mfu, hfu):
    """arXiv 2205.05198, tables 3 and 5, and the introduction: scores are recomputed."""
    rate = batch * 2048 / seconds
    at = (MEGATRON[name], 2048, rate, devices, "a100_80gb")
    text = f"megatron 2022 {name} on {devices}"
    found = {f"{text}, MFU": Published("megatron 2022 mfu", *at, mfu)}
    return found | ({f"{text}, HFU": Published("megatron 2022 hfu", *at, hfu)} if hfu else {})


def megatron_2021(devices, teraflops, days):
    """arXiv 2104.04473, table 2: days for 300 billion tokens; all blocks are recomputed."""
    rate = 300e9 / (days * 24 * 3600)
    name = f"megatron 2021 530b on {devices}"
    at = (MEGATRON["530b"], 2048, rate, devices, "a100_80gb")
    return {name: Published("megatron 2021", *at, teraflops=teraflops)}


def mosaicml(shape, length, rate, devices, chip, mfu, hfu, dtype="bfloat16"):
    """github.com/mosaicml/llm-foundry, scripts/train/benchmarking/README.md."""
    at, name = (mpt(length, *shape), length, rate, devices, chip), f"mosaicml {shape} {length}"
    # Without checkpointing both are the same.
    of_hfu = "mosaicml mfu" if hfu == mfu else "mosaicml hfu"
    return {
        f"{name} {chip} {dtype}, MFU": Published("mosaicml mfu", *at, mfu, dtype=dtype),
        f"{name} {chip} {dtype}, HFU": Published(of_hfu, *at, hfu, dtype=dtype),
    }


def bridge(name, rate, devices, teraflops):
    """Megatron Bridge, docs/performance-summary.md, 25.09 and 25.11, DGX H100, tokens/s a GPU."""
    at = (preset(name), 8192, rate * devices, devices, "h100_sxm")
    found = Published("megatron 2025", *at, teraflops=teraflops, dtype="float8_e4m3fn")
    return {f"bridge {name} at {rate}": found}


def nemo(model, rate, devices, teraflops):
    """github.com/NVIDIA/NeMo, docs/source/performance/performance_summary.md, container 24.07."""
    at = (model, 4096, rate * devices, devices, "h100_sxm")
    found = Published("nemo 2024", *at, teraflops=teraflops, dtype="float8_e4m3fn")
    return {f"nemo {model.num_layers} layers": found}


def maxtext(name, rate, share):
    """github.com/AI-Hypercomputer/maxtext, docs/reference/models/tiering.md, 256 chips of v6e."""
    at = (preset(name), 8192, rate * 256, 256, "tpu_v6e", share)
    return {f"maxtext {name}": Published("maxtext 2024", *at)}


def torchtitan(model, length, rate, devices, chip, share, dtype="bfloat16"):
    """github.com/pytorch/torchtitan, docs/performance.md of 2024, tokens/s a GPU."""
    at = (model, length, rate * devices, devices, chip, share)
    return {
        f"torchtitan {model.num_layers} layers at {rate}": Published("torchtitan", *at, dtype=dtype)
    }


CASES = {
    # Section 4.1: 238.3 thousand tokens/s of both pods.
    "palm 540b, MFU": Published("palm mfu", PALM, 2048, 238_300, 6144, "tpu_v4", 0.462),
    **megatron_2022("22b", 4, 8, 1.10, 0.415, 0.437),
    **megatron_2022("175b", 64, 64, 13.75, 0.514, 0.528),
    **megatron_2022("530b", 280, 280, 37.83, 0.560, 0.570),
    **megatron_2022("1t", 512, 512, 71.49, 0.563, 0.570),
    **megatron_2022("530b", 2240, 2240, 39.15, 0.542, None),
    **megatron_2021(560, 171, 156),
    **megatron_2021(1120, 167, 80),
    **megatron_2021(2240, 159, 42),
    **mosaicml(MPT_30B, 2048, 73860, 32, "h100_sxm", 0.4392, 0.5857),
    **mosaicml(MPT_7B, 65536, 15654, 8, "h100_sxm", 0.2859, 0.3813),
    **mosaicml(MPT_7B, 2048, 85144, 8, "h100_sxm", 0.4644, 0.4644),
    **mosaicml(MPT_7B, 8192, 25655, 8, "a100_80gb", 0.5447, 0.7262),
    **mosaicml(MPT_3B, 2048, 244692, 8, "h100_sxm", 0.277, 0.277, dtype="float8_e4m3fn"),
    **mosaicml(MPT_3B, 32768, 46853, 8, "h100_sxm", 0.1438, 0.1918, dtype="float8_e4m3fn"),
    # github.com/karpathy/llm.c, discussion 677, steps 1 and 10.
    "llm.c 1558m, step 1": Published("llm.c", GPT2_XL, 1024, 343_080, 8, "h100_sxm", 0.426),
    "llm.c 1558m, step 10": Published("llm.c", GPT2_XL, 1024, 381_369, 8, "h100_sxm", 0.473),
    **bridge("llama3_8b", 14079, 8, 725),
    **bridge("llama3_8b", 14451, 8, 744),
    **bridge("llama3_70b", 1619, 64, 727),
    **bridge("llama3_405b", 302, 1024, 763),
    **nemo(LLAMA2_7B, 16634, 8, 767),
    **nemo(LLAMA2_70B, 1717, 64, 763),
    **maxtext("llama3_8b", 7207, 0.4546),
    **maxtext("llama3_70b", 960, 0.5033),
    **torchtitan(preset("llama3_405b"), 8192, 185, 128, "h100_sxm", 0.2452, "float8_e4m3fn"),
    **torchtitan(preset("llama3_405b"), 8192, 109, 128, "h100_sxm", 0.290),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_published_figures_follow_from_their_throughput(case):
    flops = conventions.flops_per_token(
        case.model, PUBLISHERS[case.convention], sequence_length=case.sequence_length
    )
    chip = CHIPS[case.chip]
    reached = Utilization({"mfu": flops}, chip, case.dtype, case.num_devices)
    got = reached.shares(case.tokens_per_second)["mfu"]
    wanted = case.share or case.teraflops * 1e12 / chip.peak(case.dtype)[0]
    assert got == pytest.approx(wanted, rel=TOLERANCE)


def test_each_of_the_three_figures_is_some_publishers():
    used = [PUBLISHERS[case.convention] for case in CASES.values()]
    assert conventions.FIGURES["mfu"] in used and conventions.FIGURES["mfu_full"] in used
    assert {"blocks", "model", "scores"} <= {one.recomputed for one in used}  # an HFU
    assert {case.convention for case in CASES.values()} | {"maxtext 2025"} == set(PUBLISHERS)


@pytest.mark.parametrize(
    ("model", "wanted"),
    [(mpt(2048, *MPT_30B), 29_975_214_080), (mpt(65536, *MPT_7B), 6_918_905_856),
     (mpt(2048, *MPT_3B), 2_651_837_440), (GPT2_XL, 1_557_686_400)],
)  # fmt: skip
def test_parameters_are_those_that_the_publishers_print(model, wanted):
    assert costs.num_parameters(model) == wanted


def test_parameters_of_palm():
    # Table 1 says 540.35 billion. Of its norms, one a layer, ours are two.
    assert costs.num_parameters(PALM) == pytest.approx(540.35e9, rel=1e-4)


@pytest.mark.parametrize("name", ["175b", "1t"])
def test_megatrons_formulas(name):
    # arXiv 2104.04473, appendix; arXiv 2205.05198, equations 7 and 8: of a token.
    model, s = MEGATRON[name], 2048
    h, layers, V = model.width, model.num_layers, model.vocab_size
    formulas = {
        "megatron 2021": 96 * (1 + s / (6 * h) + V / (16 * layers * h)),
        "megatron 2022 mfu": 72 * (1 + s / (6 * h) + V / (12 * h * layers)),
        "megatron 2022 hfu": 72 * (1 + s / (3 * h) + V / (12 * h * layers)),
    }
    for key, formula in formulas.items():
        counted = conventions.flops_per_token(model, PUBLISHERS[key], sequence_length=s)
        assert counted == pytest.approx(layers * h**2 * formula)


def test_six_flops_for_each_parameter():
    # PaLM, appendix B: 6 N + 12 L H Q T. nanoGPT's N is without learned positions.
    model, T = PALM, 2048
    count = conventions.flops_per_token(model, PUBLISHERS["palm mfu"], sequence_length=T)
    assert count == 6 * costs.num_parameters(model) + 12 * 118 * 48 * 256 * T


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_maxtext_counts_half_of_a_window(family):
    """github.com/AI-Hypercomputer/maxtext, maxtext_utils.py: (4 T^2 + 4 T min(W, T)) N H / 2 of a
    global and a local layer."""
    model, length = preset(family, window=1024), 8192
    per_key = 4 * model.num_heads * model.head_dim
    keys = [model.window if kind == LOCAL else length for kind in model.layer_kinds]
    weights = sum(costs.weights_of_block(model)) * model.num_layers
    head = model.width * model.vocab_size
    wanted = 3 * (2 * (weights + head) + per_key * sum(keys) / 2)
    found = conventions.flops_per_token(
        model, conventions.PUBLISHERS["maxtext 2025"], sequence_length=length
    )
    assert found == pytest.approx(wanted, rel=1e-4)
