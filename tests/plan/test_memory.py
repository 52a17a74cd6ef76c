"""The state that the planner counts is that of the recipe, leaf for leaf."""

import contextlib
import dataclasses
import json
import math

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AbstractDevice
from support.resolved import resolved

from llmx import config, sharding
from llmx.config import ConfigError, stage_memory
from llmx.config.recipe import make_recipe
from llmx.model import families
from llmx.pipeline.schedules import PipelineConfig
from llmx.plan import machines, memory, search, sizes
from llmx.step import optimizers

H100 = AbstractDevice("NVIDIA H100 80GB HBM3", None, "gpu")


def _resolved(family="llama3", **keys):
    run = config.default()
    run.model = families.preset(
        family, width=64, num_layers=4, num_heads=8, num_kv_heads=8 if family == "gpt2" else 4,
        head_dim=16, mlp_dim=192, vocab_size=512,
    )  # fmt: skip
    run.batch.size, run.batch.sequence_length, run.batch.accumulation = 64, 128, 4
    run.mesh.data = 1
    return resolved(run, **keys)


ALL_AXES = dict(mesh__data=2, mesh__fsdp=2, mesh__sequence=2, mesh__tensor=2)
CASES = {
    **{layout: dict(sharding__layout=layout, **ALL_AXES) for layout in sharding.LAYOUTS},
    "stages": dict(mesh__stage=2, mesh__fsdp=2, mesh__tensor=2, sharding__layout="zero2"),
    "stages, learned positions": dict(
        family="gpt2", mesh__stage=2, mesh__tensor=4, sharding__layout="ddp"
    ),
    "stages, unequal chunks": dict(
        family="qwen3", mesh__stage=2, mesh__fsdp=4, pipeline__layers=(3, 1)
    ),
    "gpt2": dict(family="gpt2", mesh__fsdp=4, mesh__tensor=2),
    "gemma3": dict(family="gemma3", mesh__fsdp=2, mesh__data=2, sharding__layout="hsdp"),
    "qwen3, K/V heads whole": dict(
        family="qwen3", mesh__tensor=8, mesh__fsdp=2, sharding__replicate_kv=True
    ),
    "lion": dict(optimizer__name="lion", mesh__fsdp=4),
    "muon": dict(optimizer__name="muon", mesh__fsdp=4),
    # Narrow matrices and vectors are kept whole, in bf16 as the parameters; means in fp32.
    "adafactor, pure bf16": dict(optimizer__name="adafactor", precision="pure_bf16",
                                 mesh__fsdp=4, mesh__tensor=2),
    "adafactor, factored": dict(
        optimizer__name="adafactor", model__width=256, mesh__stage=2, mesh__fsdp=2, mesh__tensor=2,
        pipeline__layers=(3, 1), precision="pure_bf16",
    ),
    "adafactor, experts, on the host": dict(
        family="mixtral", optimizer__name="adafactor", model__width=256, model__expert_dim=128,
        mesh__fsdp=2, mesh__expert=2, offload__optimizer=True,
    ),
    "lamb, average": dict(optimizer__name="lamb", optimizer__ema_decay=0.9, mesh__data=4,
                          sharding__layout="zero1"),
    "moments in bf16": dict(optimizer__moments="bf16", mesh__fsdp=4),
    "pure bf16": dict(precision="pure_bf16", optimizer__ema_decay=0.9, mesh__fsdp=4),
    "fp16": dict(precision="fp16", mesh__fsdp=4),
    "learned scales": dict(
        quantization__bits=4, quantization__scales="learned", quantization__group=16,
        optimizer__ema_decay=0.9, mesh__stage=2, mesh__fsdp=2, mesh__tensor=2,
    ),
    "moments on the host": dict(offload__optimizer=True, mesh__fsdp=4),
    "parameters on the host": dict(
        offload__optimizer=True, offload__parameters=True, mesh__fsdp=4, optimizer__ema_decay=0.9,
        remat="full",
    ),
    "pruning by movement": dict(
        pruning__method="movement", mesh__fsdp=4, sharding__layout="zero1",
        pruning__products=("mlp", "attention/out"),
    ),
    "stages, pruning, rewinding": dict(
        family="qwen3", mesh__stage=2, mesh__fsdp=4, pipeline__layers=(3, 1),
        pruning__method="magnitude", pruning__rewind_to=5,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_state_is_the_recipes(name):
    _assert_state_is_the_recipes(_resolved(**CASES[name]))


def _assert_state_is_the_recipes(run):
    state = make_recipe(run, devices=H100).abstract
    parts = {"parameters": state.params, "optimizer": state.opt_state, "ema": state.ema,
             "masks": state.extra}  # fmt: skip
    of_run = sizes.of(run)
    for on_host in (False, True):
        counted = memory.state(of_run, on_host=on_host)
        for part, tree in parts.items():
            leaves = [
                leaf for leaf in jax.tree.leaves(tree)
                if (leaf.sharding.memory_kind == "pinned_host") == on_host and leaf.ndim
            ]  # fmt: skip
            held = sharding.device_bytes(leaves)
            # Trust ratios and the like: some numbers for each layer.
            assert counted[part] == held or 0 < held - counted[part] < 512, (part, on_host)
    reported = memory.of(of_run).state
    assert reported == {part: size for part, size in memory.state(of_run).items() if size}


def _momentum(config, schedule, axes):
    return optax.sgd(schedule, momentum=config.b1)


def _three_moments(config, schedule, axes):
    return optax.chain(optax.trace(0.9), optax.scale_by_adam(), optax.scale_by_learning_rate(1.0))


@pytest.mark.parametrize(("optimizer", "moments"), [(_momentum, 1), (_three_moments, 3)])
def test_state_of_an_optimizer_that_a_config_file_adds(optimizer, moments, monkeypatch):
    monkeypatch.setitem(optimizers.OPTIMIZERS, "mine", optimizer)
    run = _resolved(optimizer__name="mine", mesh__fsdp=4)
    assert optimizers.num_moments(run.optimizer) == (moments, moments)
    _assert_state_is_the_recipes(run)


@pytest.mark.parametrize("name", [name for name in CASES if "stages" in name])
def test_a_stage_holds_the_state(name):
    """With norms, biases and learned positions whole on every device along `tensor`."""
    run = _resolved(**CASES[name])
    counted, held = stage_memory.of(run), memory.state(sizes.of(run))
    assert counted.parameters == held["parameters"]
    assert counted.optimizer == held["optimizer"] + held["ema"] + held["masks"]


# Norms and scalars of a model this small.
OF_STAGES = 0.01


@pytest.mark.parametrize("precision", ["bf16", "pure_bf16"])
@pytest.mark.parametrize("layout", ["zero1", "zero2", "zero3"])
def test_an_average_on_stages_is_the_recipes(precision, layout):
    """In fp32 whatever the parameters are, and split as the moments."""
    keys = dict(mesh__stage=2, mesh__fsdp=4, sharding__layout=layout, precision=precision)
    for more in (dict(), dict(optimizer__ema_decay=0.9)):
        run = _resolved(**keys, **more)
        state = make_recipe(run, devices=H100).abstract
        counted = memory.of(sizes.of(run)).state
        held = sharding.device_bytes(jax.tree.leaves(state.params))
        assert counted["parameters"] == pytest.approx(held, rel=OF_STAGES)
        held = sharding.device_bytes(jax.tree.leaves((state.opt_state, state.ema)))
        kept = counted["optimizer"] + counted.get("ema", 0)
        assert kept == pytest.approx(held, rel=OF_STAGES)


IN_FLIGHT = dict(mesh__stage=2, mesh__fsdp=2, pipeline__schedule="pipedream_2bw")


@pytest.mark.parametrize("name", ["zero1", "stages", "moments on the host", "2BW"])
def test_a_recipe_without_devices_has_the_shapes_of_one_with_them(name):
    """Where there are as many devices: fake ones of a CPU."""
    run = _resolved(**(CASES | {"2BW": IN_FLIGHT})[name] | dict(mesh__data=1, mesh__sequence=1))
    count = math.prod(vars(run.mesh)[axis] for axis in sharding.AXES)
    devices = jax.devices()[:count]
    if len(devices) < count:
        pytest.fail(f"{count} devices are needed")
    there = make_recipe(run, devices=devices).abstract
    kind = AbstractDevice(devices[0].device_kind, None, devices[0].platform)
    absent = make_recipe(run, devices=kind).abstract
    told = [
        [(leaf.shape, leaf.dtype, leaf.sharding.spec, leaf.sharding.memory_kind == "pinned_host")
         for leaf in jax.tree.leaves(tree)]
        for tree in (there, absent)
    ]  # fmt: skip
    assert told[0] == told[1] and len(told[0]) > 20


@pytest.mark.parametrize("fsdp", [2, 4, 8])
def test_eight_bit_moments_take_a_scale_for_32_numbers(fsdp):
    """And each device those of a whole dimension, where a block crosses shards."""
    run = _resolved(optimizer__moments="int8", mesh__fsdp=fsdp)
    state = make_recipe(run, devices=H100).abstract
    held = sharding.device_bytes([leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim])
    assert memory.state(sizes.of(run))["optimizer"] == pytest.approx(held, rel=0.02)


def _loss(chunks, *, on_gpu, remat="none"):
    run = _resolved(mesh__fsdp=2, loss__chunks=chunks, remat=remat, **LARGE_LOSS)
    held = memory.of(sizes.of(run), on_gpu=on_gpu)
    forward, backward = (held.peaks[name] for name in (memory.END_OF_FORWARD, memory.BACKWARD))
    of_logit = (2**17 // 2 // 4) * 2**13 // chunks  # numbers of an array of a chunk's logits
    return forward["loss"], backward.get("logits", 0), of_logit


# 128 K tokens of a step in four microbatches: logits of a microbatch are 2**14 x 2**13.
LARGE_LOSS = dict(
    model__vocab_size=2**13, batch__size=128, batch__sequence_length=1024,
    model__max_positions=1024,
)  # fmt: skip


def test_the_gradient_of_logits_is_beside_them():
    """In bf16; on TPUs one of up to 128 MiB is in the core's own memory. On GPUs, where chunks of
    the head are gathered ahead, the logits of the next chunk are there in its place."""
    of_rows = 2 * 2**13 * 64  # of the whole head in bf16
    for on_gpu, number in ((False, 4), (True, 8)):
        (of_4, _, logits), (of_8, _, fewer) = (_loss(n, on_gpu=on_gpu) for n in (4, 8))
        assert of_4 - of_8 == number * (logits - fewer) + of_rows * (2 / 4 - 2 / 8)
        of_1, _, all_logits = _loss(1, on_gpu=on_gpu)
        assert 2 * all_logits > 2**27 > 2 * logits
        assert of_1 - of_4 == 6 * all_logits - number * logits + of_rows * (1 - 2 / 4)


def test_logits_of_one_chunk_stay():
    """Where layers are run again. On GPUs their gradients, in bf16."""
    for on_gpu in (False, True):
        _, kept, logits = _loss(1, on_gpu=on_gpu, remat="full")
        assert kept == (2 if on_gpu else 4) * logits


def test_a_loop_of_two_chunks_is_written_out_on_gpus():
    """As in compiled programs: logits of both, and both chunks of the head."""
    (of_2, _, logits), (of_4, _, fewer) = (_loss(n, on_gpu=True) for n in (2, 4))
    rows = 2 * (2**13 // 4) * 64
    assert of_2 - of_4 == 8 * logits - 8 * fewer + (2 * 2 - 2) * rows


def test_keys_that_each_device_has_are_saved_whole():
    keys = dict(mesh__tensor=4, mesh__fsdp=2, remat="names")
    split, whole = (
        sizes.of(_resolved(**keys, sharding__replicate_kv=replicate)) for replicate in (False, True)
    )
    saved = [memory.saved(of_run, memory.GPU)["saved activations"] for of_run in (split, whole)]
    model = whole.run.model
    of_keys = 2 * 2 * whole.tokens * model.num_kv_heads * model.head_dim * model.num_layers
    assert saved[1] - saved[0] == of_keys * (1 - 1 / 4)


def test_more_is_held_where_more_is_saved():
    keys = dict(
        mesh__fsdp=4, model__num_layers=64, model__head_dim=128, model__mlp_dim=1024,
        batch__sequence_length=1024, model__max_positions=1024,
    )  # fmt: skip
    peaks = {
        remat: memory.of(sizes.of(_resolved(**keys, remat=remat))).peak
        for remat in ("sqrt", "full", "names", "none")
    }
    assert list(peaks.values()) == sorted(set(peaks.values()))


def test_more_devices_never_hold_more():
    for axis in ("fsdp", "tensor", "sequence"):
        peaks = [
            memory.of(sizes.of(_resolved(**{f"mesh__{axis}": n}))).peak for n in (1, 2, 4)
        ]  # fmt: skip
        assert np.all(np.diff(peaks) < 0), axis


SPLIT = dict(
    mesh__stage=2, mesh__fsdp=2, pipeline__schedule="zb_h1", batch__size=256,
    batch__sequence_length=1024, model__max_positions=1024, model__vocab_size=2**14,
)  # fmt: skip


def _of_one_layer(*, on_gpu):
    """A run that defers the weight gradients of one layer, and the bytes it is counted with."""
    run = _resolved(**SPLIT)
    return run, stage_memory.of(run, deferred_layers=1, on_gpu=on_gpu).total


def test_where_no_layer_can_be_deferred_the_run_is_refused(tmp_path):
    run, one_layer = _of_one_layer(on_gpu=False)
    for share, refused in ((0.89, False), (0.91, True)):
        held = memory.of(sizes.of(run), device_bytes=(size := int(one_layer / share)))
        assert held.peak == one_layer
        assert ("zb_h1' within" in str(held.refusal)) == refused
        row = dict(name="small", base="v5p", hbm_bytes=size, usable_bytes=size)
        (path := tmp_path / "small.json").write_text(json.dumps(row))
        machine = machines.parse("small:2x2x1", path)
        assert search.held(run, machine) == (None if refused else one_layer)


def test_a_limit_is_refused_that_is_too_low_on_every_platform():
    needed = sorted(_of_one_layer(on_gpu=on_gpu)[1] for on_gpu in (False, True))
    assert needed[0] < needed[1]
    for bytes_, fits in ((needed[0] - 2**10, False), (needed[0], True), (needed[1], True)):
        keys = SPLIT | dict(pipeline__memory_gib=bytes_ / 2**30)
        with (
            contextlib.nullcontext() if fits else pytest.raises(ConfigError, match="zb_h1' within")
        ):
            _resolved(**keys)


def test_a_refusal_names_what_would_begin():
    """`part` or 1f1b where that is within the limit, and the limit is with them."""
    run, one = _of_one_layer(on_gpu=False)
    plain = PipelineConfig(schedule="1f1b")
    others = {
        "remat='part'": dataclasses.replace(run, remat="part"),
        "1f1b": dataclasses.replace(run, pipeline=plain),
    }
    held = {name: stage_memory.of(other, deferred_layers=1).total for name, other in others.items()}
    assert all(size < one for size in held.values())
    for most in (one - 1, *(size - 1 for size in held.values())):
        _, refusal = stage_memory.planned_layers(run, int(most / 0.9))
        for name, size in held.items():
            assert (name in str(refusal)) == (size <= int(most / 0.9) * 0.9), (most, name)
