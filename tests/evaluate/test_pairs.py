"""Held-out pairs of answers: what is reported of them is what plain NumPy finds."""

import json

import jax
import numpy as np
import pytest
from support import runs

import llmx
from llmx import config as config_lib
from llmx.config import recipe as recipe_lib
from llmx.data import dataset as data_lib
from llmx.evaluate import __main__ as evaluate
from llmx.model import families

EXACT = 5e-5  # sums of fp32 log-likelihoods against float64
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture
def run(tmp_path):
    noise = np.random.default_rng(0)
    with open(tmp_path / "pairs.jsonl", "w") as file:
        for number in range(60):
            words = [" ".join(noise.choice(["yes", "no", "é"], n)) for n in noise.integers(1, 5, 3)]
            record = {
                "prompt": f"{number} {words[0]}",
                "chosen": words[1] + "!",
                "rejected": words[2],
            }
            file.write(json.dumps(record) + "\n")
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    run = config_lib.default()
    run.workdir, run.steps, run.precision = str(tmp_path / "run"), 4, "fp32"
    sizes = dict(width=16, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=32)
    run.model = families.preset("llama3", **sizes)
    run.data.sources, run.data.cache_dir = (str(tmp_path / "pairs.jsonl"),), str(tmp_path / "cache")
    run.data.format, run.data.pack, run.data.held_out = "preference", False, 0.4
    run.data.chat_template = str(tmp_path / "template.jinja")
    run.batch.size, run.batch.sequence_length, run.data.num_threads = 8, 96, 0
    run.preference.beta, run.preference.label_smoothing = 0.3, 0.1
    run.optimizer.warmup_steps, run.optimizer.learning_rate = 1, 0.02
    run.evaluation.every, run.evaluation.batches, run.metrics.log_every = 2, 0, 1
    run.metrics.progress, run.metrics.tensorboard, run.launch.compile_cache = "plain", False, ""
    return run


def plain(config, dataset, num_rows, log_p_of) -> dict[str, float]:
    """Loss, accuracy and margin of all held-out pairs. `log_p_of`: (batch) -> of the model and of
    the reference, [2, B, T, V]."""
    losses, margins = [], []
    for index in range(-(-dataset.num_held_out_windows // num_rows)):
        rows = dataset.held_out_rows(index, range(num_rows), num_rows)
        log_p = np.float64(log_p_of(rows))
        picked = np.take_along_axis(log_p, rows["targets"][None, ..., None], axis=-1)[..., 0]
        gained = (picked[0] - picked[1]) * rows["weights"]
        for row in range(num_rows):
            of = [gained[row][rows["segment_ids"][row] == segment].sum() for segment in (1, 2)]
            if not rows["weights"][row].any():
                continue
            margin = config.beta * (of[0] - of[1])
            right, wrong = np.log1p(np.exp(-margin)), np.log1p(np.exp(margin))
            dpo = (1 - config.label_smoothing) * right + config.label_smoothing * wrong
            ipo = (of[0] - of[1] - 1 / (2 * config.beta)) ** 2
            losses.append(ipo if config.loss == "ipo" else dpo)
            margins.append(margin)
    return {
        "loss": np.mean(losses), "accuracy": np.mean(np.array(margins) > 0),
        "margin": np.mean(margins), "num_pairs": len(margins),
    }  # fmt: skip


KINDS = {
    "whole": dict(mesh__fsdp=2, mesh__tensor=2),
    "average": dict(optimizer__ema_decay=0.5, batch__size=16, batch__accumulation=2),
    "adapters": dict(adapters__rank=2, optimizer__learning_rate=0.1),
    "ipo": dict(preference__loss="ipo", preference__label_smoothing=0.0),
}


@pytest.mark.parametrize("kind", KINDS)
def test_held_out_pairs_are_evaluated_as_numpy_does(kind, run, capsys):
    for key, value in KINDS[kind].items():
        config_lib.set_value(run, key.replace("__", "."), value)
    fitted = llmx.fit(run)
    records = [record for record in fitted.history if record["kind"] == "eval"]
    assert [record["step"] for record in records] == [2, 4]
    reported = {"loss", "accuracy", "margin"}
    assert records[0].keys() - {"kind", "step", "tokens", "time"} == reported
    capsys.readouterr()
    assert evaluate.main(["--workdir", run.workdir, "--json"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["step"] == 4 and "perplexity" not in said and said["num_pairs"] > 9
    for name in reported:
        np.testing.assert_allclose(records[-1][name], said[name], rtol=EXACT)
    # Plain: the state that came back, and the model that the run began with.
    config = fitted.config
    recipe = recipe_lib.make_recipe(config)
    dataset = data_lib.open_dataset(
        config.data, sequence_length=96, seed=config.seed, log=lambda text: None
    )
    with jax.set_mesh(recipe.mesh):
        state, start = fitted.state, recipe.init(config.seed)
        models = recipe.loss.merged(state.averaged, state.frozen), start.frozen
        logits = jax.jit(lambda params, rows: runs.logits(recipe, params, rows))

        def log_p_of(rows):
            batch = runs.put_batch(recipe, rows)
            return [jax.nn.log_softmax(jax.device_get(logits(params, batch))) for params in models]

        wanted = plain(config.preference, dataset, config.batch.size, log_p_of)
    for name, value in wanted.items():
        np.testing.assert_allclose(said[name], value, rtol=EXACT)
    assert 0 < wanted["accuracy"] < 1 and wanted["margin"] != 0


def test_what_the_command_says_of_pairs(run, capsys):
    run.steps = 1
    llmx.fit(run)
    capsys.readouterr()
    assert evaluate.main(["--workdir", run.workdir]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("step 1: held-out loss 0.") and " pairs" in said
    assert "per pair (the chosen text gained more in " in said
    # Of other text, the nats of its tokens.
    flags = ["--data", run.data.chat_template, "--json"]
    assert evaluate.main(["--workdir", run.workdir, *flags]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["perplexity"] > 1
