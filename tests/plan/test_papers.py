"""The planner's figures beside those of the papers that it follows, by their formulas alone: no
count of the planner is used here, only what its command prints.

    Young, "A first order approximation to the optimum checkpoint interval", CACM 1974
    Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 2006
    Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", 2019
    Chowdhery et al., "PaLM: scaling language modeling with Pathways", 2022, appendix B

Letters: V vocabulary, D width, F of the MLP, L layers, N and K heads, H their size, T a sequence.
"""

import json
import math
import pathlib

import pytest

from llmx.plan import __main__ as command

ROOT = pathlib.Path(__file__).parents[2]
FP32 = 4

# A plain decoder in fp32 with Adam, ZeRO-3, and one row of tokens for each device.
V, D, F, L, N, K, H, T = 32_000, 2048, 8192, 6, 16, 8, 128, 4096
SIZES = {
    "vocab_size": V, "width": D, "mlp_dim": F, "num_layers": L, "num_heads": N, "num_kv_heads": K,
    "head_dim": H,
}  # fmt: skip


def planned(capsys, *flags):
    argv = [f"--config={ROOT}/configs/llama3_8b.py", "--json", *flags]
    assert command.main(argv) == 0
    return json.loads(capsys.readouterr().out)


def decoder(capsys, *, devices, machine, flags=()):
    return planned(
        capsys, f"--machine={machine}", f"--config.mesh.fsdp={devices}", "--config.mesh.data=1",
        *(f"--config.model.{name}={value}" for name, value in SIZES.items()),
        f"--config.batch.sequence_length={T}", f"--config.batch.size={devices}",
        "--config.precision=fp32", "--config.sharding.layout=zero3", "--config.remat=full",
        *flags,
    )  # fmt: skip


OF_LAYERS = L * (D * (N + 2 * K) * H + N * H * D + 3 * D * F)
OF_TABLE, OF_NORMS = V * D, (2 * L + 1) * D
PARAMETERS = OF_LAYERS + 2 * OF_TABLE + OF_NORMS


@pytest.mark.parametrize(
    ("devices", "machine"), [(8, "v5p:2x2x2"), (4, "h100:4"), (16, "h100:2x8")]
)
def test_zero3_splits_sixteen_bytes_of_each_parameter(devices, machine, capsys):
    """ZeRO, section 3: of Adam in fp32 4 bytes of a parameter, 4 of its gradient and 8 of moments,
    each over all devices; a checkpointed layer keeps its input (section 6.1)."""
    report = decoder(capsys, devices=devices, machine=machine)
    assert report["num_parameters"] == PARAMETERS
    held, norms = report["memory"], 3 * FP32 * OF_NORMS  # whole on each device
    assert held["state"]["parameters"] == pytest.approx(4 * PARAMETERS / devices, abs=norms)
    assert held["state"]["optimizer"] == pytest.approx(8 * PARAMETERS / devices, abs=norms)
    backward = held["peaks"]["backward"]
    assert backward["gradients"] == pytest.approx(4 * PARAMETERS / devices, abs=norms)
    assert backward["saved activations"] == pytest.approx(FP32 * L * T * D, rel=1e-3)
    # What else lives at the peak is less than a layer's arrays, weights, and the logits, whole.
    least = 16 * PARAMETERS / devices + FP32 * L * T * D
    a_layer = FP32 * (T * (10 * F + 20 * D) + 3 * OF_LAYERS / L)
    of_loss = FP32 * (3 * T * V / 2 + 2 * OF_TABLE)
    assert least < held["peak"] < least + max(a_layer, of_loss) + 0.2 * least


@pytest.mark.parametrize(("devices", "machine"), [(8, "v5p:2x2x2"), (8, "h100:8")])
def test_zero3_sends_three_times_the_parameters(devices, machine, capsys):
    """ZeRO, section 7.2.2: gathered for the forward and for the backward pass, and gradients
    scattered: three volumes, of which a device sends (n - 1) / n."""
    report = decoder(capsys, devices=devices, machine=machine)
    sent = sum(one["sent"] for one in report["messages"] if one["name"].endswith("/kernel"))
    assert sent == pytest.approx(3 * FP32 * OF_LAYERS * (devices - 1) / devices, rel=1e-6)


def test_tensor_parallel_layers_sum_four_times(capsys):
    """Megatron-LM (Shoeybi et al., 2019), section 3: two sums forward and two backward in a layer,
    of an array [tokens, D]; and `full` runs the two of the forward pass again."""
    report = decoder(
        capsys, devices=4, machine="h100:8",
        flags=["--config.mesh.tensor=2", "--config.sharding.sequence_parallel=False"],
    )  # fmt: skip
    sums = [
        one for one in report["messages"]
        if one["purpose"] == "activations" and one["kind"] == "all-reduce"
    ]  # fmt: skip
    array = FP32 * T * D
    of_ends = 2  # behind the lookup, and before the head in the backward pass
    again = 1  # attention's output, for the MLP's input; nothing needs the MLP's again
    count = L * (4 + again) + of_ends
    assert sum(one["sent"] for one in sums) == pytest.approx(count * 2 * array / 2)


def test_mfu_is_that_of_palm(capsys):
    """PaLM, appendix B: 6 N + 12 L H Q T FLOPs a token, N the parameters that multiply, of which a
    table that is looked up is none; the share is of what the chips could compute."""
    step, devices = 2.0, 8
    report = decoder(
        capsys, devices=devices, machine="v5p:2x2x2", flags=[f"--step-seconds={step}"]
    )  # fmt: skip
    flops = 6 * (OF_LAYERS + OF_TABLE) + 12 * L * N * H * T
    rate = T * devices / step
    share = rate * flops / (devices * 459e12)  # of a v5p, in bfloat16
    assert report["duration"]["mfu_full"] == pytest.approx(share, rel=1e-9)
    tokens = report["duration"]["tokens"]
    assert report["duration"]["flops"]["6PD"] == pytest.approx(6 * PARAMETERS * tokens, rel=1e-9)


def daly(interval, save, restart, mtbf):
    """The share of useful time, from the wall clock time of Daly's equation 13: each interval and
    its checkpoint end without a failure after (e^((tau + delta) / M) - 1) attempts' worth of M, and
    each failure costs a restart, which may fail too."""
    wall = mtbf * math.exp(restart / mtbf) * (math.exp((interval + save) / mtbf) - 1)
    return interval / wall


@pytest.mark.parametrize(
    ("step", "save", "restart", "hours"),
    [(0.5, 30, 300, 2000), (2.0, 60, 600, 50), (1.0, 120, 900, 24), (0.3, 5, 0, 100_000)],
)
def test_checkpoints_and_failures_are_those_of_young_and_daly(step, save, restart, hours, capsys):
    tokens, devices = 1e12, 8
    report = decoder(
        capsys, devices=devices, machine="h100:8", flags=[
            f"--step-seconds={step}", f"--save-seconds={save}", f"--restart-seconds={restart}",
            f"--device-mtbf={hours}", f"--tokens={tokens:g}", "--price=3",
        ],
    )["duration"]  # fmt: skip
    mtbf = hours * 3600 / devices
    interval = report["interval"] * step
    share = daly(interval, save, restart, mtbf)
    assert report["goodput"] == pytest.approx(share, rel=1e-9)
    # No number of steps between checkpoints is better by more than Daly's estimate is off.
    others = (
        daly(count * step, save, restart, mtbf) for count in range(1, 40 * report["interval"])
    )
    assert share == pytest.approx(max(others), rel=2e-4)
    # Young's first order, which Daly's approaches where failures are rare.
    young = math.sqrt(2 * save * mtbf)
    assert interval == pytest.approx(young, abs=save + young * math.sqrt(save / mtbf) + step)
    steps = math.ceil(tokens / (T * devices))
    assert report["steps"] == steps
    assert report["seconds"] == pytest.approx(steps * step / share, rel=1e-9)
    assert report["failures"] == pytest.approx(steps * step / share / mtbf, rel=1e-9)
    assert report["dollars"] == pytest.approx(3 * devices * steps * step / share / 3600, rel=1e-9)
