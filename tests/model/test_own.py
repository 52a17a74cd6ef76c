"""A program's own model: its losses and gradients are those of plain JAX, on every mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from support import text_runs

import llmx
from llmx import config as config_lib
from llmx.config import checks, recipe
from llmx.model import own
from llmx.step.step import make_train_step

WIDTH, VOCAB, B, T = 16, 257, 8, 12
TOLERANCE = 1e-5
MOVED = 1e-4  # of 3e-2 in three steps of Adam, which divides small gradients by themselves


class Mixer:
    """Not a decoder: each token sees the one before it, of its own segment. Its parameters are
    named as those of the decoder whose gradients are loads, and are a list in a dict."""

    def init(self, key):
        keys = jax.random.split(key, 3)
        draw = lambda key, *shape: 0.3 * jax.random.normal(key, shape)  # noqa: E731
        return {
            "table": draw(keys[0], VOCAB, WIDTH),
            "blocks": [{"mlp": {"up": draw(keys[1], WIDTH, 32), "bias": jnp.ones(32)}}],
            "head": draw(keys[2], 32, VOCAB),
        }

    def logits(self, params, tokens_BT, positions_BT, segments_BT):
        x_BTD = params["table"][tokens_BT] + jnp.sin(positions_BT)[..., None]
        same_BT = segments_BT[:, 1:] == segments_BT[:, :-1]
        before_BTD = jnp.where(same_BT[..., None], x_BTD[:, :-1], 0)
        x_BTD = x_BTD.at[:, 1:].add(before_BTD)
        for block in params["blocks"]:
            x_BTD = jax.nn.gelu(x_BTD @ block["mlp"]["up"] + block["mlp"]["bias"])
        return x_BTD @ params["head"]


class Tensor(Mixer):
    rules = ((r"table", ("vocab", "embed")), (r"up", ("embed", "mlp")), (r".*", ()))

    def init(self, key):
        params = super().init(key)
        return params | {"table": jnp.pad(params["table"], ((0, 7), (0, 0)))}


def batch_of(seed: int) -> dict:
    noise = np.random.default_rng(seed)
    tokens = noise.integers(0, VOCAB, (B, T + 1)).astype(np.int32)
    segments = np.sort(noise.integers(1, 3, (B, T)), axis=1).astype(np.int32)
    weights = (noise.random((B, T)) < 0.8).astype(np.float32)
    positions = np.tile(np.arange(T, dtype=np.int32), (B, 1))
    return dict(tokens=tokens[:, :-1], targets=tokens[:, 1:], segment_ids=segments,
                positions=positions, weights=weights)  # fmt: skip


def run_of(name: str, **values) -> config_lib.Config:
    run = config_lib.default()
    run.model.own, run.precision, run.steps = name, "fp32", 3
    run.batch.size, run.batch.sequence_length = B, T
    run.optimizer.learning_rate, run.optimizer.warmup_steps = 1e-2, 0
    run.optimizer.schedule, run.optimizer.clip_norm, run.optimizer.weight_decay = "constant", 0.5, 0
    for key, value in values.items():
        section, _, field = key.rpartition("__")
        setattr(getattr(run, section) if section else run, field, value)
    return run


@pytest.fixture
def mixer(monkeypatch):
    monkeypatch.setitem(own.MODELS, "object:mixer", Mixer())
    monkeypatch.setitem(own.MODELS, "object:tensor", Tensor())


def plain(model, batches: list[dict]) -> tuple[list[float], dict]:
    """Losses and final parameters of a loop over whole batches in plain JAX and optax."""
    params = model.init(jax.random.key(0))

    def loss_of(params, batch):
        logits = model.logits(params, batch["tokens"], batch["positions"], batch["segment_ids"])
        nats = optax.softmax_cross_entropy_with_integer_labels(
            logits[..., :VOCAB], batch["targets"]
        )
        return jnp.sum(nats * batch["weights"]) / jnp.sum(batch["weights"])

    adam = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2, b2=0.95))
    state, losses = adam.init(params), []
    for batch in batches:
        loss, gradient = jax.value_and_grad(loss_of)(params, batch)
        updates, state = adam.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return losses, params


MESHES = {
    "one": {},
    "zero3": dict(mesh__fsdp=2, mesh__data=2, sharding__layout="zero3"),
    "zero2, microbatches": dict(mesh__fsdp=2, mesh__data=2, sharding__layout="zero2",
                                batch__accumulation=2),
    "zero1": dict(mesh__data=4, sharding__layout="zero1"),
    "ddp, microbatches": dict(mesh__data=2, sharding__layout="ddp", batch__accumulation=4),
    "tensor": dict(mesh__fsdp=2, mesh__tensor=2),
}  # fmt: skip


@pytest.mark.parametrize("case", MESHES)
def test_steps_are_those_of_plain_jax(case, mixer):
    name = "object:tensor" if case == "tensor" else "object:mixer"
    run = checks.resolve(run_of(name, **({"mesh__data": 1} | MESHES[case])), None)
    devices = jax.devices()[: run.mesh.data * run.mesh.fsdp * run.mesh.tensor]
    made = recipe.make_recipe(run, devices=devices)
    batches = [batch_of(seed) for seed in range(3)]
    wanted, last = plain(own.MODELS[name], batches)
    state = trained(made, batches, wanted)
    found = own.tree(made.model, jax.device_get(state.params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=MOVED), found, last)
    if case == "tensor":
        assert state.params["table"].sharding.spec[0] == "tensor"


def trained(made, batches: list[dict], wanted: list[float]):
    """The state after steps whose losses are those wanted, and so is that of an evaluation."""
    with jax.set_mesh(made.mesh):
        state, step = made.init(seed=0), make_train_step(made)
        for rows, loss in zip(batches, wanted, strict=True):
            batch = jax.device_put(rows, made.loss.batch_sharding)
            nats, tokens = jax.jit(made.gradient.loss)(state.params, batch)
            state, report = step(state, batch)
            assert float(report.loss) == pytest.approx(loss, rel=TOLERANCE)
            assert float(nats / tokens) == pytest.approx(loss, rel=TOLERANCE)
    return state


class LinenModel(linen.Module):
    @linen.compact
    def __call__(self, tokens_BT):
        x_BTD = linen.Embed(VOCAB, WIDTH)(tokens_BT)
        return linen.Dense(VOCAB)(jax.nn.gelu(linen.Dense(32)(x_BTD)))


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.table = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens_BT):
        x_BTD = self.table(tokens_BT)
        for layer in self.layers:
            x_BTD = x_BTD + jax.nn.gelu(layer(x_BTD))
        return self.head(x_BTD)


@pytest.mark.parametrize("model", [own.linen(LinenModel()), own.nnx_model(NnxModel)])
def test_flax_modules_are_models(model, monkeypatch):
    monkeypatch.setitem(own.MODELS, "object:flax", model)
    made = recipe.make_recipe(checks.resolve(run_of("object:flax", mesh__fsdp=2), None),
                              devices=jax.devices()[:2])  # fmt: skip
    batches = [batch_of(seed) for seed in range(2)]
    wanted, _ = plain(model, batches)
    trained(made, batches, wanted)


def test_fit_trains_and_goes_on(tmp_path):
    text_runs.write_corpus(tmp_path, files=2, words=300)
    run = run_of("", checkpoint__every=2, evaluation__every=4, evaluation__batches=1, steps=4)
    run.metrics.log_every = 1
    run.data.sources = (str(tmp_path / "text" / "*"),)
    first = llmx.fit(dataclasses.replace(run, steps=2), workdir=tmp_path / "run", model=Mixer())
    assert first.done and not first.config.sample.prompt
    both = llmx.fit(run, workdir=tmp_path / "run", model=Mixer())
    whole = llmx.fit(run, workdir=tmp_path / "whole", model=Mixer())
    assert both.curve() == whole.curve() and len(both.curve()[0]) >= 1
    assert both.curve(kind="eval")[1][-1] < np.log(VOCAB) + 1
    with pytest.raises(ValueError, match="own model, 'object:Mixer'"):
        config_lib.load_run(str(tmp_path / "run"))
    with pytest.raises(ValueError, match="pass it to"):
        llmx.fit(both.config, workdir=tmp_path / "run")


class NotFloat(Mixer):
    def init(self, key):
        return super().init(key) | {"count": jnp.zeros((), jnp.int32)}


class TooFew(Mixer):
    def logits(self, *args):
        return super().logits(*args)[..., :100]


class NoBatch(Mixer):
    def logits(self, *args):
        return super().logits(*args)[0]


class WrongRules(Mixer):
    rules = ((r".*", ("embed", "mlp")),)


WRONG = {
    "nothing": (object(), {}, "without init(key) and logits(params"),
    "integers": (NotFloat(), {}, "parameter count is int32"),
    "vocabulary": (TooFew(), {}, "logits of 100 tokens, and the tokenizer has 257"),
    "shape": (NoBatch(), {}, "must be [2, 4, V]"),
    "rules": (WrongRules(), {}, "bias of shape (32,) the axes ('embed', 'mlp')"),
    "stages": (Mixer(), dict(mesh__stage=2), "mesh.stage=2 with model.own"),
    "remat": (Mixer(), dict(remat="full"), "put jax.checkpoint around"),
    "strategy": (Mixer(), dict(sync__strategy="int8"), "sync.strategy='int8' with model.own"),
    "adapters": (Mixer(), dict(adapters__rank=4), "adapters.rank=4 with model.own"),
    "muon": (Mixer(), dict(optimizer__name="muon"), "optimizer.name='muon' with model.own"),
    "prompt": (Mixer(), dict(sample__prompt="a"), "sample.prompt='a' with model.own"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_refused(case, monkeypatch):
    model, values, said = WRONG[case]
    monkeypatch.setitem(own.MODELS, "object:wrong", model)
    with pytest.raises(config_lib.ConfigError) as error:
        checks.resolve(run_of("object:wrong", **values), None)
    assert said in str(error.value)
