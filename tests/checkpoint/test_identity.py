"""What a model is, is compared on resume; all else is shown; a run can go back."""

import dataclasses
import functools
import unittest.mock
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from support import runs
from support.compare import assert_same
from support.resumes import opened, resumed, run_of, save

from llmx.checkpoint import checkpointer, directory, identity, model_params, restore, resume
from llmx.config import Config, checks, effects
from llmx.model import families

BASE = dict(
    num_layers=2, width=16, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=16, vocab_size=300,
    vocab_multiple=8, max_positions=32,
)  # fmt: skip
LOCAL = dict(layer_pattern=(families.LOCAL, families.GLOBAL), window=3, rope_theta_local=500.0)
EXPERTS = dict(num_experts=4, experts_per_token=2, expert_dim=16)
LATENT = dict(kv_latent=8, query_latent=8, rope_dim=4, value_dim=8)
# From which models each field is changed, and to what. In one of them at least it has an effect,
# unless it never has one.
MODELS = {
    "plain": families.ModelConfig(**BASE),
    "stretched": families.ModelConfig(
        **BASE, rope_scaling="llama3", rope_factor=4.0, rope_old_context=16
    ),
    "local": families.ModelConfig(**BASE, **LOCAL, rope_scaling="linear", rope_factor=4.0),
    "shared": families.ModelConfig(**BASE | LOCAL | dict(rope_theta_local=0.0)),
    "unrotated": families.ModelConfig(
        **BASE, layer_pattern=(families.GLOBAL_NOPE, families.LOCAL_NOPE), window=3, rope_dim=4
    ),
    "post_norms": families.ModelConfig(**BASE, post_norms=True),
    "yarn": families.ModelConfig(
        **BASE,
        rope_theta=50.0,
        rope_scaling="yarn",
        rope_factor=4.0,
        rope_old_context=32,
        rope_beta_fast=2.0,
        rope_mscale=0.5,
        rope_mscale_all=0.7,
        rope_truncate=False,
    ),
    "normed": families.ModelConfig(**BASE, qk_norm=True),
    "latent": families.ModelConfig(**BASE, **LATENT),
    "learned": families.ModelConfig(**BASE, positions="learned"),
    "experts": families.ModelConfig(**BASE, **EXPERTS),
    "grouped": families.ModelConfig(
        **BASE | EXPERTS | dict(num_experts=8), router_groups=4, router_groups_kept=1
    ),
}
CHANGES = dict(
    family="phi3", vocab_size=299, vocab_multiple=16, width=32, num_layers=3, num_heads=4,
    num_kv_heads=1, head_dim=16, mlp_dim=32, max_positions=64, positions="learned",
    rope_theta=100.0, rope_theta_local=50.0, rope_scaling="linear", rope_factor=2.0,
    rope_low_freq=0.5, rope_high_freq=6.0, rope_old_context=64, norm="layer", norm_eps=0.1,
    norm_plus_one=True, pre_norms=False, post_norms=True, qk_norm=True, activation="gelu",
    gated_mlp=False, bias=True, qkv_bias=True, tied_head=True, embedding_scale=True,
    query_scale=1.0, window=5, layer_pattern=(families.LOCAL,), attention_softcap=0.5,
    logit_softcap=0.5, rope_beta_fast=3.0, rope_beta_slow=0.25, qk_norm_over="all",
    attention_sinks=True,
    rope_interleaved=True, rope_truncate=True, rope_mscale=1.0, rope_mscale_all=1.0, kv_latent=16,
    query_latent=4, rope_dim=2, value_dim=4, first_dense=1,
    num_experts=8, experts_per_token=3, expert_dim=24, shared_dim=8, router="sigmoid",
    router_renormalize=False, router_scale=2.0, router_groups=2, router_groups_kept=3,
    repeats=2, ranks=("mlp=4",), embedding_rank=4, embedding_cores=3,
)  # fmt: skip
# Whether these have an effect depends on other fields.
DEPENDENT = [name for name in CHANGES if name.startswith(("rope", "window", "layer_p", "max_p"))]
OF_EXPERTS = ("router", "expert", "first", "num_exp", "shared", "mlp_dim")
OF_LATENTS = [name for name in CHANGES if name.endswith(("latent", "_dim"))]
OF_EXPERTS = [name for name in CHANGES if name.startswith(OF_EXPERTS)]
WITHOUT_EFFECT = {"family", "vocab_multiple", "embedding_cores"}  # the last one by itself


def test_every_field_is_changed():
    fields = {field.name for field in dataclasses.fields(families.ModelConfig)}
    # Of a program, and of sparse tables.
    others = {"own", "recommender", "ngram_tables", "ngram_rows"}
    assert set(CHANGES) == fields - others


def test_models_with_other_tables_are_refused():
    model = dataclasses.replace(MODELS["plain"], ngram_tables=(2,), ngram_rows=10)
    saved = {"model": identity.as_json(model)}
    assert not identity.refusal_of_model(saved, model)
    for changes in (dict(ngram_tables=(2, 3)), dict(ngram_rows=11)):
        refused = identity.refusal_of_model(saved, dataclasses.replace(model, **changes))
        assert all(f"model.{name}" in refused for name in changes)
    of_clicks = dataclasses.replace(
        MODELS["plain"], recommender=dataclasses.replace(model.recommender, name="dlrm")
    )
    assert "model.recommender" in identity.refusal_of_model(saved, of_clicks)
    without = dataclasses.replace(MODELS["plain"], ngram_rows=11)
    assert not identity.refusal_of_model({"model": identity.as_json(MODELS["plain"])}, without)


def test_another_model_of_a_program_is_refused():
    model = MODELS["plain"]
    saved = {"model": identity.as_json(dataclasses.replace(model, own="object:a"))}
    assert not identity.refusal_of_model(saved, dataclasses.replace(model, own="object:a"))
    for other in ("object:b", ""):
        assert "model.own" in identity.refusal_of_model(
            saved, dataclasses.replace(model, own=other)
        )


def program_of(model: families.ModelConfig):
    """(parameters, batch) -> the losses of a row, which depend on every logit; parameter shapes."""
    # Also fields are set that nothing reads, which a run's config may not have.
    with unittest.mock.patch.object(effects, "problems", lambda *_: []):
        recipe = runs.make_recipe(runs.make_config(model, batch__sequence_length=16, batch__size=1))

    def losses(params, batch):
        return runs.losses(recipe, params, batch)[0]

    return recipe, jax.jit(losses), jax.tree.map(lambda leaf: leaf.shape, recipe.loss.params)


def outputs(model: families.ModelConfig, params=None):
    """Those losses, of random parameters and tokens; and the parameters."""
    recipe, losses, shapes = program_of(model)
    if params is None:
        leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda shape: isinstance(shape, tuple))
        random = np.random.default_rng(0)
        params = [random.normal(size=shape).astype("f4") for shape in leaves]
        params = jax.tree.unflatten(tree, params)
    elif shapes != jax.tree.map(np.shape, params):
        return None, params  # of another structure, and so another function
    tokens = np.random.default_rng(1).integers(0, 299, (1, 16)).astype("i4")
    batch = dict(
        tokens=tokens, targets=tokens[:, ::-1].copy(), segment_ids=np.ones_like(tokens),
        positions=np.arange(16, dtype="i4")[None], weights=np.ones((1, 16), "f4"),
    )  # fmt: skip
    to = jax.tree.map(lambda leaf: leaf.sharding, recipe.loss.params)
    with jax.set_mesh(recipe.mesh):
        return np.asarray(losses(jax.device_put(params, to), runs.put_batch(recipe, batch))), params


def text(model: families.ModelConfig) -> str:
    """The program that computes them."""
    recipe, losses, _ = program_of(model)
    with jax.set_mesh(recipe.mesh):
        return losses.lower(recipe.loss.params, recipe.abstract_batch).as_text()


def refusals(base: str, names):
    """(field, changed model, what is said of it) for each field that can be changed alone."""
    model = MODELS[base]
    saved = {"model": identity.as_json(model)}
    for name in names:
        changed = dataclasses.replace(model, **{name: CHANGES[name]})
        if vars(changed) != vars(model) and not families.problems(changed):
            refused = identity.refusal_of_model(saved, changed)
            said = f"model.{name}: saved {vars(model)[name]!r}, given {CHANGES[name]!r}"
            assert not refused or said in refused
            yield name, changed, refused


def test_refused_if_and_only_if_the_program_changes():
    """Without running it, of the fields whose effect depends on others, and some that have one."""
    wanted = text(MODELS["local"])
    for name, changed, refused in refusals("local", [*DEPENDENT, *WITHOUT_EFFECT, "norm_eps"]):
        assert bool(refused) == (text(changed) != wanted), name


@pytest.mark.slow
@pytest.mark.parametrize("base", MODELS)
def test_refused_if_and_only_if_the_function_changes(base):
    """Each field of a model, changed: refused exactly where other losses come out."""
    wanted, params = outputs(MODELS[base])
    names = OF_EXPERTS if MODELS[base].num_experts else DEPENDENT
    of_some = {
        "plain": CHANGES, "latent": OF_LATENTS, "normed": ["qk_norm", "qk_norm_over"],
        "post_norms": ["pre_norms", "post_norms"],
    }  # fmt: skip
    names = of_some.get(base, names)
    for name, changed, refused in refusals(base, names):
        got, _ = outputs(changed, params)
        assert bool(refused) == (got is None or not np.array_equal(got, wanted)), name


def test_every_field_has_its_effect_somewhere():
    for name, value in CHANGES.items():
        changes = [
            identity.model_changes(
                identity.as_json(model), dataclasses.replace(model, **{name: value})
            )
            for model in MODELS.values()
        ]
        assert any(changes) == (name not in WITHOUT_EFFECT), name


def test_a_model_of_another_function_is_refused(tmp_path):
    """All fields in one error; the checkpoint is left, and the remedy works."""
    save(tmp_path, 2, 1)
    with pytest.raises(ValueError, match=r"model of another function") as error:
        resumed(tmp_path, 1, model__norm_eps=1e-3, model__activation="gelu")
    for words in ("model.norm_eps: saved 1e-05, given 0.001", "start_changes",
                  "model.activation: saved 'silu', given 'gelu'"):  # fmt: skip
        assert words in str(error.value)
    assert (tmp_path / "checkpoints" / "2").exists()
    start = dict(start_from=str(tmp_path), model__norm_eps=1e-3)
    with pytest.raises(ValueError, match=r"norm_eps: saved 1e-05, given 0\.001"):
        resumed(tmp_path / "new", 1, **start)
    _, _, first, _ = resumed(tmp_path / "new", 1, **start, start_changes=("norm_eps",))
    assert first == 0


def test_other_differences_are_lines(tmp_path):
    wanted = save(tmp_path, 2, 1)
    _, state, _, said = resumed(
        tmp_path, 1, optimizer__learning_rate=0.5, precision="bf16", model__family="mine"
    )
    lines = [line for line in said.splitlines() if line.startswith("config: ")]
    assert sorted(lines) == [
        "config: model.family: llama3 -> mine",
        "config: optimizer.learning_rate: 0.0003 -> 0.5",
        "config: precision: fp32 -> bf16",
    ]
    assert_same(state.params, wanted.params)


def test_keys_of_other_versions_are_tolerated():
    given = families.ModelConfig(**BASE)
    saved = identity.as_json(given)
    del saved["qk_norm"]
    saved["experts"] = 8
    assert not identity.refusal_of_model({"model": saved}, given)
    assert not identity.refusal_of_model({}, given)
    found = identity.differences({"model": saved}, {"model": identity.as_json(given)})
    assert identity.difference_lines(found) == [
        "model.experts: 8 -> (no such key)", "model.qk_norm: (no such key) -> False",
    ]  # fmt: skip


def test_a_run_past_its_end_is_refused(tmp_path):
    """The end may be where the checkpoint is, but not before it."""
    save(tmp_path, 4, 1)
    assert resumed(tmp_path, 1)[2] == 4  # steps=4
    save(tmp_path, 6, 1)
    with pytest.raises(ValueError, match=r"at step 6, .* steps=4: set steps to at least 6"):
        resumed(tmp_path, 1)


def test_going_back(tmp_path):
    """Newer checkpoints are set aside."""
    wanted = save(tmp_path, 1, 1)
    for step in (2, 3):
        save(tmp_path, step, 1)
    with pytest.raises(ValueError, match=r"no checkpoint of step 5 in .* \[1, 2, 3\]"):
        resumed(tmp_path, 1, resume_step=5)
    _, state, first, said = resumed(tmp_path, 1, resume_step=1)
    assert first == 1
    assert_same(state.params, wanted.params)
    found = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert found == {"1", "2.replaced", "3.replaced"} and "goes back to step 1" in said
    assert opened(tmp_path).steps() == [1]


def test_parameters_of_a_step(tmp_path):
    wanted = save(tmp_path / "other", 1, 1)
    save(tmp_path / "other", 2, 1)
    start = f"{tmp_path / 'other'}@1"
    _, state, first, said = resumed(tmp_path / "new", 1, start_from=start)
    assert first == 0 and "step 1" in said
    assert_same(state.params, wanted.params)
    with pytest.raises(ValueError, match=r"no checkpoint of step 7 .* \[1, 2\]"):
        resumed(tmp_path / "new", 1, start_from=f"{tmp_path / 'other'}@7")


def test_where_a_run_starts_is_checked_early(tmp_path):
    run = runs.make_config("llama3", workdir="unused")
    run.start_from, run.start_changes = f"{tmp_path}@3", ("norm",)
    with pytest.raises(ValueError, match="holds no checkpoints"):
        checks.resolve(run, 1)
    run.start_from, run.start_changes = "", ("norm_epsilon",)
    with pytest.raises(ValueError, match=r"start_changes: .*norm_eps.*, not 'norm_epsilon'"):
        checks.resolve(run, 1)


def test_the_checkpoint_from_before_the_loss_rose_is_kept(tmp_path):
    config = checkpointer.CheckpointConfig(keep_last=2)
    folder = str(tmp_path / "checkpoints")
    with checkpointer.Checkpointer(folder, config, log=print) as checkpoints:
        for step in range(1, 7):
            checkpoints.keep_before(min(step, 3))
            checkpoints.save(step, {"x": jax.numpy.zeros(4)}, meta={}, wait=True)
        assert checkpoints.steps() == [3, 5, 6]


@pytest.mark.parametrize(("restarts", "step"), [("00", 5), ("20", -1), ("02", -1)])
def test_a_job_goes_back_once(tmp_path, restarts, step):
    """Also where one of its hosts was replaced, and counts from 0."""
    config, said = Config(resume_step=5, workdir=str(tmp_path)), []
    peers = SimpleNamespace(
        exchange=lambda name, text: list(restarts), broadcast=lambda name, text: text
    )
    assert resume.going_back_once(config, peers, said.append).resume_step == step
    assert said == [] if step == 5 else "restart 2: going on from the newest" in said[0]


def test_a_restart_goes_back_where_no_launch_before_it_came_so_far(tmp_path):
    config, said = Config(resume_step=5, workdir=str(tmp_path)), []
    peers = SimpleNamespace(exchange=lambda name, text: ["2"], broadcast=lambda name, text: text)
    resume.begin_going_back(config)  # and then it was killed
    assert resume.going_back_once(config, peers, said.append) is config
    assert said == [
        "resume_step=5: no earlier launch of this job has gone back yet, and this is restart 2: "
        "it does so"
    ]
    other = Config(resume_step=7, workdir=str(tmp_path))
    assert resume.going_back_once(other, peers, said.append).resume_step == -1
    resume.end_going_back(config)
    assert resume.going_back_once(config, peers, said.append).resume_step == -1
    # A start that goes on from the newest checkpoint forgets what was asked for before.
    resume.begin_going_back(config)
    resume.begin_going_back(Config(workdir=str(tmp_path)))
    assert not list(tmp_path.iterdir())


def test_process_0_says_which_checkpoints_there_are(tmp_path, monkeypatch):
    """Listings of a shared directory may differ: this process sees none, and takes its word."""
    save(tmp_path, 1, 1)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(directory, "steps", lambda root: pytest.fail("a listing of its own"))
    monkeypatch.setattr(restore, "agree_on_steps", lambda steps: pytest.fail() if steps else [1])
    _, recipe = run_of(tmp_path, 1)
    wanted = functools.partial(model_params.restore_params, str(tmp_path), recipe.loss.params,
                               order=recipe.order, log=print)  # fmt: skip
    assert wanted().step == wanted(step=1).step == 1
    folder = f"{tmp_path}/checkpoints"
    assert checkpointer.is_import(folder, None)  # process 0 says so
    monkeypatch.setattr(restore, "agree_on_steps", lambda steps: [])
    assert not checkpointer.is_import(folder, 0)


def test_what_a_rollback_went_back_from_is_not_resumed_from(tmp_path):
    """Killed when the rollback was on record, and before anything was set aside."""
    wanted = save(tmp_path, 1, 1)
    for step in (2, 3):
        save(tmp_path, step, 1)
    _, state, first, said = resumed(tmp_path, 1, rollback__at=(1,), rollback__skipped=(2,))
    assert first == 1 and "the run went back to step 1" in said
    assert_same(state.params, wanted.params)
    assert opened(tmp_path).steps() == [1]
    save(tmp_path, 4, 1, rollback__at=(1,), rollback__skipped=(2,))
    assert resumed(tmp_path, 1, rollback__at=(1,), rollback__skipped=(2,))[2] == 4
