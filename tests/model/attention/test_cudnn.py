"""cuDNN's attention says what it refuses; on GPUs it is what "auto" compiles to."""

import dataclasses
import json
import math
import re

import jax
import jax._src.cudnn.fused_attention_stablehlo as fused
import jax.numpy as jnp
import pytest

from llmx import sharding
from llmx.aot import program, topologies
from llmx.model import remat
from llmx.model.attention import attend
from llmx.model.attention.cudnn import CUDNN
from llmx.model.attention.masks import Mask, Scores

H100 = topologies.GPUS["h100"].device_kind
FORWARD, BACKWARD = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"

B, T = 2, 768


@dataclasses.dataclass(frozen=True)
class Case:
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 128
    window: int = 0
    softcap: float = 0.0
    ahead: int | None = 0
    one_document: bool = True
    dtype: str = "bfloat16"

    @property
    def scores(self) -> Scores:
        return Scores(scale=0.25, softcap=self.softcap, window=self.window)


def inputs(case: Case, *, rows: int = T, keys: int = T):
    """Shapes of query, key, value and mask."""
    shape = lambda *sizes, dtype=case.dtype: jax.ShapeDtypeStruct(sizes, dtype)  # noqa: E731
    key = shape(B, keys, case.kv_heads, case.head_dim)
    tokens, key_tokens = shape(B, rows, dtype="int32"), shape(B, keys, dtype="int32")
    mask = Mask(
        tokens, tokens, key_tokens, key_tokens, ahead=case.ahead, one_document=case.one_document
    )
    return shape(B, rows, case.heads, case.head_dim), key, key, mask


def forward(kernel, case: Case, device_kind: str = H100, **sizes):
    """The jaxpr of `kernel.forward`, and what it returns."""
    run = lambda *given: kernel.forward(*given, case.scores, device_kind=device_kind)  # noqa: E731
    return jax.make_jaxpr(run, return_shape=True)(*inputs(case, **sizes))


@pytest.fixture
def cudnn(monkeypatch):
    """The version that topologies.devices assumes."""
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91200)


REFUSED = {
    "cpu": (Case(), "cpu", "NVIDIA GPUs, not on 'cpu'"),
    "tpu": (Case(), "TPU v5p", "NVIDIA GPUs, not on 'TPU v5p'"),
    "amd": (Case(), "AMD Instinct MI300X", "NVIDIA GPUs, not on 'AMD"),
    "fp32": (Case(dtype="float32"), H100, "bf16 and fp16, not float32"),
    "softcap": (Case(softcap=50.0), H100, "soft cap"),
    "packed": (Case(one_document=False), H100, "set data.pack=False"),
    "no_order": (Case(ahead=None), H100, "in order only"),
    "ahead": (Case(ahead=T // 2), H100, "start at the first key"),
    "all_but_one": (Case(ahead=T - 2), H100, "start at the first key"),
    "window_ahead": (Case(ahead=T, window=T), H100, "start at the first key"),
    "head12": (Case(head_dim=12), H100, "head_dim=12 is not a multiple of 8 up to 128"),
    "head256": (Case(head_dim=256), H100, "head_dim=256 is not a multiple of 8 up to 128"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_do_says_why(name):
    case, device_kind, words = REFUSED[name]
    with pytest.raises(NotImplementedError, match=words):
        forward(CUDNN, case, device_kind)
    with pytest.raises(NotImplementedError, match=words):
        query, key, value, mask = inputs(case)
        lse = jax.ShapeDtypeStruct((B, case.heads, T), jnp.float32)
        jax.eval_shape(
            lambda *given: CUDNN.backward(
                *given[:4], case.scores, *given[4:], device_kind=device_kind
            ),
            query, key, value, mask, query, lse, query,
        )  # fmt: skip


def test_masks_start_at_the_first_key():
    for keys in (T // 2, 2 * T):
        with pytest.raises(NotImplementedError, match="start at the first key"):
            forward(CUDNN, Case(), keys=keys)


@pytest.mark.parametrize("name", REFUSED)
def test_auto_takes_the_next(name):
    """Triton on NVIDIA GPUs, for rows in order; else blockwise."""
    case, device_kind, _ = REFUSED[name]
    jaxpr, _ = forward(attend.kernel_for("auto", "gpu"), case, device_kind)
    takes_triton = device_kind in (H100, "cpu") and name != "no_order"  # interpreted on "cpu"
    assert ("pallas_call" in str(jaxpr)) == takes_triton
    if not takes_triton:
        wanted, _ = forward(attend.IMPLEMENTATIONS["blockwise"], case, device_kind)
        assert re.sub(r" at 0x\w+", "", str(jaxpr)) == re.sub(r" at 0x\w+", "", str(wanted))


@pytest.mark.parametrize(
    "case, keys",
    [
        (Case(), T), (Case(dtype="float16", head_dim=64), T), (Case(window=100), T),
        (Case(ahead=2 * T), 2 * T), (Case(ahead=T // 2), T // 2), (Case(ahead=T - 1), T),
    ],
)  # fmt: skip
def test_auto_takes_it(cudnn, case, keys):
    jaxpr, (out, lse) = forward(attend.kernel_for("auto", "gpu"), case, keys=keys)
    assert str(jaxpr).count("dot_product_attention_fwd_wrapper") == 1
    assert (out.shape, out.dtype) == ((B, T, case.heads, case.head_dim), case.dtype)
    assert (lse.shape, lse.dtype) == ((B, case.heads, T), jnp.float32)


def backward_call(function, arrays: dict):
    """What each operand of jax's backward primitive is, and its parameters."""
    jaxpr = jax.make_jaxpr(function)(*arrays.values()).jaxpr
    known = dict(zip(map(id, jaxpr.invars), arrays, strict=True))
    for each in jaxpr.eqns:
        if "attention_fwd" in each.primitive.name:
            known |= {id(each.outvars[0]): "out", id(each.outvars[1]): "lse"}
        if "attention_bwd" in each.primitive.name:
            return [known.get(id(operand)) for operand in each.invars], each.params
    raise AssertionError(jaxpr)


@pytest.mark.parametrize("window", [0, 100])
def test_the_backward_primitive_is_called_as_jax_calls_it(cudnn, window):
    case = Case(window=window)
    query, key, value, _ = inputs(case)
    lse = jax.ShapeDtypeStruct((B, case.heads, T), jnp.float32)

    def ours(query, key, value, out, lse, gradient):
        segments = jnp.zeros((B, T), jnp.int32)
        mask = Mask(segments, None, segments, None, ahead=0, one_document=True)
        return CUDNN.backward(
            query, key, value, mask, case.scores, out, lse, gradient, device_kind=H100
        )

    def of_jax(query, key, value, gradient):
        attend = lambda *arrays: fused.dot_product_attention(  # noqa: E731
            *arrays, scale=case.scores.scale, mask_type=fused.MaskType.CAUSAL,
            sliding_window_length=window or None,
        )  # fmt: skip
        return jax.vjp(attend, query, key, value)[1](gradient)

    arrays = dict(query=query, key=key, value=value)
    found = backward_call(ours, arrays | dict(out=query, lse=lse, gradient=query))
    assert found == backward_call(of_jax, arrays | dict(gradient=query))
    assert found[0] == [*arrays, *(None,) * 7, "lse", "out", "gradient"]


# ------------------------------------------------------------------------ compiled for real GPUs


def compiled(
    case: Case, length: int, sizes: dict | None = None, *, policy: str = "none", topology="h100:8"
) -> tuple[str, program.CostReport]:
    """Value and gradients of two layers of bf16 attention through "auto"."""
    sizes = sizes or {"fsdp": 1}
    devices = topologies.devices(topology)[: math.prod(sizes.values())]
    mesh = sharding.make_mesh(sizes, devices=devices)
    place = sharding.Placement(mesh, sharding.make_layout("zero3"))

    def loss(query, keys_and_values, mask):
        def layer(query, key_and_value):
            out = attend.attend(
                query, *key_and_value, mask, case.scores, config=attend.AttentionConfig(),
                place=place,
            )  # fmt: skip
            return query + jnp.sin(out), None

        layer = remat.checkpointed(layer, remat.POLICIES[policy])
        return jnp.sum(jnp.square(jax.lax.scan(layer, query, keys_and_values)[0]))

    def shape(axes, *shape, dtype=jnp.bfloat16):
        stacked = (None,) * (len(shape) - len(axes))
        spec = jax.P(*stacked, *place.activation(axes))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, spec))

    tokens = shape(("batch", "sequence"), 1, length, dtype=jnp.int32)
    mask = Mask(*(tokens,) * 4, ahead=0, one_document=True)
    query = shape(("batch", "sequence", "heads", "head_dim"), 1, length, case.heads, case.head_dim)
    kv = ("batch", "sequence", "kv_heads", "head_dim")
    key = shape(kv, 2, 1, length, case.kv_heads, case.head_dim)
    with jax.set_mesh(mesh):
        step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
        lowered = step.lower(query, (key, key), mask)
    text = topologies.compile(lowered, "gpu").as_text()
    return text, program.read(text, list(mesh.shape.items()))


@dataclasses.dataclass(frozen=True)
class Call:
    target: str
    operands: tuple[str, ...]
    mask: str
    scale: float
    window: int


def calls(text: str) -> set[Call]:
    """The calls of cuDNN that a program has."""
    found = set()
    for line in text.splitlines():
        if target := re.search(r'custom_call_target="(__cudnn[^"]+)"', line):
            operands = re.search(r"operand_layout_constraints=\{(.*?)\}, \w+=", line)[1]
            config = json.loads(re.search(r"backend_config=(\{.*\})", line)[1])
            config = config["cudnn_fmha_backend_config"]
            found.add(
                Call(
                    target[1], tuple(re.findall(r"\w+\[[\d,]*\]", operands)), config["mask_type"],
                    config["fmha_scale"], config["sliding_window_length"],
                )
            )  # fmt: skip
    return found


def executions(program: program.CostReport, target: str) -> int:
    return sum(each.count for each in program.kernels if each.target == target)


@pytest.mark.aot
@pytest.mark.parametrize(
    "case",
    [
        Case(), Case(window=100), Case(window=T), Case(heads=4, kv_heads=4, head_dim=64),
        Case(kv_heads=1, head_dim=72),
    ],
    ids=["causal", "window", "window_of_the_row", "gpt2", "one_kv_head"],
)  # fmt: skip
def test_auto_compiles_to_cudnn(case):
    """One call each way with the mask, the keys and values as few as they are, and no scores."""
    text, program = compiled(case, T)
    query = f"bf16[1,{T},{case.heads},{case.head_dim}]"
    key = f"bf16[1,{T},{case.kv_heads},{case.head_dim}]"
    facts = ("CAUSAL", 0.25, case.window % T)
    assert calls(text) == {
        Call(FORWARD, (query, key, key), *facts),
        Call(BACKWARD, (query, key, key, f"f32[1,{case.heads},{T}]", query, query), *facts),
    }
    assert [executions(program, target) for target in (FORWARD, BACKWARD)] == [2, 2]
    assert not re.findall(rf"\[(?:\d+,)*{T},(?:\d+,)*{T}[,\]]", text)


@pytest.mark.aot
@pytest.mark.parametrize("topology", ["a100:1", "h200:1", "b200:1"])
def test_other_gpus_compile(topology):
    text, _ = compiled(Case(), T, topology=topology)
    assert {call.target for call in calls(text)} == {FORWARD, BACKWARD}


@pytest.mark.aot
def test_remat_keeps_what_the_policy_says():
    """Under "names" the backward pass finds output and log-sum-exp; under "full" it runs again."""
    counts = {
        policy: executions(compiled(Case(), T, policy=policy)[1], FORWARD) // 2
        for policy in ("full", "names")
    }
    assert counts == {"full": 2, "names": 1}


@pytest.mark.aot
def test_a_ring_of_cudnn():
    """The diagonal is causal, whole chunks have no mask, and sends hide behind work."""
    chunk = T  # each device holds two
    case = Case(kv_heads=4)
    text, program = compiled(case, 8 * chunk, {"sequence": 4, "tensor": 2})
    query = lambda chunks: f"bf16[1,{chunks * chunk},4,128]"  # noqa: E731
    key = lambda chunks: f"bf16[1,{chunks * chunk},2,128]"  # noqa: E731
    tiles = {(2, 2, "CAUSAL"), (2, 1, "NO_MASK"), (1, 2, "NO_MASK")}
    wanted = set()
    for rows, keys, mask in tiles:
        arrays = (query(rows), key(keys), key(keys))
        of_query = (f"f32[1,4,{rows * chunk}]", query(rows), query(rows))
        wanted |= {
            Call(FORWARD, arrays, mask, 0.25, 0),
            Call(BACKWARD, (*arrays, *of_query), mask, 0.25, 0),
        }
    assert calls(text) == wanted
    sends = program.select(kind="collective-permute")
    assert {each.axes for each in sends} == {("sequence",)}
    waits = [each for each in sends if not (each.asynchronous and each.hidden_by)]
    # Gradients of keys and values on their way home, with nothing left to do here.
    assert sum(each.count for each in waits) <= 2 and {each.dtype for each in waits} <= {"bf16"}
