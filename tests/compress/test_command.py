"""python -m llmx.compress: recipes are checked at once, a killed command goes on, and what it
makes is a run as any other."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest
from support import runs

from llmx import config as config_lib
from llmx import generate, library
from llmx.checkpoint import hf
from llmx.compress import __main__ as command
from llmx.compress import command as command_lib
from llmx.compress import recipe, report, saved, stages
from llmx.compress.recipe import Recipe
from llmx.convert import to_hf
from llmx.data.config import DataConfig
from llmx.evaluate import __main__ as evaluate
from llmx.model import costs, dense, families, packed
from llmx.model.quantization import QuantizationConfig
from llmx.sharding import trees

# One run serves several tests: they belong on one worker.
pytestmark = pytest.mark.xdist_group("compress")

STAGES = (("low_rank", dict(share=0.6, calibration_batches=1)),)
TRAIN = ("train", dict(steps=2, learning_rate=1e-3))
SOURCE = """
from llmx.compress.recipe import Recipe

def get_recipe():
    return Recipe(stages={stages!r}, evaluation_batches=1, generated_tokens=0)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The work directory of a run of two steps."""
    folder = tmp_path_factory.mktemp("compress")
    return runs.trained_workdir(
        folder, width=16, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=32
    )  # fmt: skip


def recipe_file(folder, stages_of_it):
    path = folder / "recipe.py"
    path.write_text(SOURCE.format(stages=stages_of_it))
    return str(path)


def run_command(source, path, output):
    return command.main([f"--workdir={source}", f"--recipe={path}", f"--output={output}"])


def test_the_command_makes_a_smaller_run(trained, tmp_path, capsys):
    """Killed in its last stage, and begun again; then evaluated, generated, exported."""
    path, output = recipe_file(tmp_path, (*STAGES, TRAIN)), tmp_path / "small"
    row = stages.STAGES["train"]

    def killed(job):
        raise KeyboardInterrupt

    stages.STAGES["train"] = row._replace(run=killed)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_command(trained, path, output)
    finally:
        stages.STAGES["train"] = row
    kept = [output / "stages" / name for name in ("0_start", "1_low_rank")]
    before = [(folder / "done.json").stat().st_mtime_ns for folder in kept]
    assert not (output / "config.json").exists()
    assert run_command(trained, path, output) == 0
    assert [(folder / "done.json").stat().st_mtime_ns for folder in kept] == before
    shown = capsys.readouterr().out
    assert "low_rank" in shown and "FLOPs/token" in shown
    rows = json.loads((output / report.REPORT).read_text())
    assert [row["stage"].split()[0] for row in rows] == [
        "start",
        *(name for name, _ in STAGES),
        "train",
    ]
    assert (output / report.PICTURE).stat().st_size > 5000
    small, was = (config_lib.load_run(str(where)).model for where in (output, trained))
    assert rows[0]["parameters"] == costs.num_parameters(was)
    assert rows[-1]["parameters"] == costs.num_parameters(small) < rows[0]["parameters"]
    assert rows[-1]["flops"] < 0.8 * rows[0]["flops"]
    assert all(math.isfinite(row["loss"]) for row in rows)
    # It is a run: what evaluates, generates and exports others does so with it.
    assert evaluate.main([f"--workdir={output}", "--batches=1", "--json"]) == 0
    loss = json.loads(capsys.readouterr().out.splitlines()[-1])["loss"]
    np.testing.assert_allclose(loss, rows[-1]["loss"], rtol=1e-5)
    assert generate.main([f"--workdir={output}", "--prompt=alpha", "--max-tokens=2"]) == 0
    to_hf(str(output), str(tmp_path / "hf"))
    model, exported = hf.load(tmp_path / "hf")
    assert model.num_layers == was.num_layers and not model.ranks
    wanted = dense.dense_params(jax.device_get(saved.opened(str(output)).params), small)
    padded = {name: leaf[: small.vocab_size] if name in ("embedding", "head") else leaf
              for name, leaf in trees.named(wanted).items()}  # fmt: skip
    got = trees.named(exported)
    assert padded.keys() == got.keys()
    for name, leaf in padded.items():
        ours = got[name][: len(leaf)]
        np.testing.assert_allclose(ours, leaf, rtol=1e-6, atol=1e-7, err_msg=name)
    # The same command again changes nothing; a recipe of other stages is refused.
    config = output / "config.json"
    was_written = config.stat().st_mtime_ns
    assert run_command(trained, path, output) == 0
    for other in (STAGES, (*STAGES, TRAIN, TRAIN), (("low_rank", dict(share=0.7)), TRAIN)):
        assert run_command(trained, recipe_file(tmp_path, other), output) == 2
        said = capsys.readouterr().err
        assert "begun with another source or recipe (stages was [{" in said
        assert "or name a new directory" in said
    assert config.stat().st_mtime_ns == was_written
    assert json.loads((output / report.REPORT).read_text()) == rows


def test_an_output_is_of_one_source_and_recipe(trained, tmp_path, monkeypatch):
    """From before its first stage ends."""
    output = tmp_path / "small"
    given = Recipe((*STAGES, TRAIN), evaluation_batches=1, generated_tokens=0)

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(command_lib, "_run", killed)
    with pytest.raises(KeyboardInterrupt):
        command_lib.compress(trained, given, str(output))
    named = command_lib._checked(trained, given, str(output))
    assert [stage.name for stage in named] == ["low_rank", "train"]
    longer = ("train", dict(steps=3, learning_rate=1e-3))
    for changes, said in (
        (dict(stages=STAGES), "stages was"),
        (dict(stages=(*STAGES, longer)), "stages was"),
        (dict(evaluation_batches=2), r"\(evaluation_batches was 1\)"),
        (dict(generated_tokens=8), r"\(generated_tokens was 0\)"),
        (dict(data=DataConfig(held_out=0.2)), r"\(data was null\)"),
    ):
        with pytest.raises(ValueError, match=said):
            command_lib.compress(trained, dataclasses.replace(given, **changes), str(output))
    again = f"{trained}@2"
    with pytest.raises(ValueError, match=f"source was .*{trained}"):
        command_lib.compress(again, given, str(output))
    (output / "stages" / "recipe.json").unlink()
    command_lib._checked(trained, given, str(output))  # nothing is in it
    (output / "stages" / "0_start").mkdir()
    with pytest.raises(ValueError, match=r"it has no stages/recipe.json"):
        command_lib.compress(trained, given, str(output))


def test_a_hugging_face_directory_is_a_source(trained, tmp_path):
    to_hf(trained, str(tmp_path / "hf"))
    data = config_lib.load_run(trained).data
    data.tokenizer = "auto"
    given = Recipe(
        (
            ("low_rank", dict(rank=2, products=("mlp",), method="plain")),
            ("tensor_train", dict(rank=6, cores=2)),
        ),
        data,
        evaluation_batches=1, generated_tokens=2,
    )  # fmt: skip
    start, low, small = command_lib.compress(str(tmp_path / "hf"), given, str(tmp_path / "small"))
    np.testing.assert_allclose(start.parameters - low.parameters, 2 * 3 * (16 * 32 - 2 * 48))
    assert min(row.tokens_per_second for row in (start, low, small)) > 0
    own = saved.opened(str(tmp_path / "small"))
    train = sum(leaf.size for leaf in jax.tree.leaves(own.params["embedding"]))
    assert low.parameters - small.parameters == 257 * 16 - train > 0


def test_a_run_that_was_trained_as_integers(trained, tmp_path):
    """Its rounded weights are those of the stages, and the same codes at the end. Groups of
    replicas are left behind."""
    run = config_lib.load_run(trained)
    run.start_from, run.workdir, run.steps = trained, str(tmp_path / "integers"), 1
    run.quantization = QuantizationConfig(bits=3, scales="learned", activations="average")
    assert library.fit(run).done
    config = json.loads((tmp_path / "integers" / "config.json").read_text())
    config["sync"] |= {"strategy": "diloco", "groups": 2, "exchange": str(tmp_path)}
    (tmp_path / "integers" / "config.json").write_text(json.dumps(config))
    quantize = dict(format="int4", group=0, method="gptq", calibration_batches=1)
    given = Recipe((("quantize", quantize),), evaluation_batches=1, generated_tokens=0)
    rows = command_lib.compress(run.workdir, given, str(tmp_path / "small"))
    of_stages = [tmp_path / "small" / "stages" / name for name in ("0_start", "1_quantize")]
    for folder in of_stages:
        config = config_lib.load_run(str(folder))
        assert config.quantization == QuantizationConfig()
        assert (config.sync.strategy, config.sync.groups, config.sync.exchange) == ("mean", 1, "")
    start, codes = (saved.opened(str(folder)).params["blocks"]["mlp"]["up"] for folder in of_stages)
    assert set(start) == {"kernel"}
    for layer, kernel_DF in enumerate(np.asarray(start["kernel"])):
        assert all(1 < len(np.unique(row)) <= 8 for row in kernel_DF.T)
        of_layer = jax.tree.map(lambda leaf, at=layer: leaf[at], codes["kernel"])
        found, scale, _ = packed.codes_of(of_layer)
        np.testing.assert_allclose((found - 8) * scale, kernel_DF, rtol=2.0**-7)
    assert rows[1].loss == pytest.approx(rows[0].loss, rel=1e-3)
    assert rows[1].nonzero == rows[0].nonzero < 1


@pytest.mark.full_grid  # each kind has tests of its own
def test_stages_of_other_kinds_follow_each_other(trained, tmp_path):
    """Zeros stay beside a teacher, and are still there when GPTQ has made codes of weights."""
    keep = dict(steps=2, weight=0.7, config={"pruning.method": "fixed"})
    given = Recipe(
        (
            ("prune", dict(method="magnitude", pattern="2:4")), ("distil", keep),
            ("quantize", dict(format="int4", group=4, method="gptq", calibration_batches=1)),
        ),
        evaluation_batches=1, generated_tokens=0,
    )  # fmt: skip
    rows = command_lib.compress(trained, given, str(tmp_path / "small"))
    loss = [row.loss for row in rows]
    assert loss[0] != loss[1] != loss[2] and abs(loss[3] / loss[2] - 1) < 0.02
    assert rows[0].nonzero > 0.99 and rows[3].nonzero <= rows[2].nonzero < 0.9
    for stage in ("1_prune", "2_distil"):
        params = saved.opened(str(tmp_path / "small" / "stages" / stage)).params
        kernel_LDF = np.asarray(params["blocks"]["mlp"]["up"]["kernel"])
        of_four = (kernel_LDF.reshape(2, 4, 4, 32) != 0).sum(axis=2)
        assert (of_four == 2).all()
    codes = saved.opened(str(tmp_path / "small" / "stages" / "3_quantize")).params
    up = codes["blocks"]["mlp"]["up"]["kernel"]
    for layer in range(2):
        found, _, _ = packed.codes_of(jax.tree.map(lambda leaf, at=layer: leaf[at], up))
        assert not (found - 8)[kernel_LDF[layer] == 0].any() and (found != 8).mean() > 0.4


MODEL = families.preset(
    "llama3", width=16, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=32,
    vocab_size=261,
)  # fmt: skip


@pytest.mark.parametrize(("of_recipe", "said"), [
    ((), r"stages=\(\) does nothing: name some of low_rank"),
    ((("lowrank", {}),), "stage 1: 'lowrank' is unknown: use one of .*did you mean 'low_rank'"),
    (("low_rank",), "stage 1 is 'low_rank': write a name and options"),
    ((("low_rank", dict(rang=3)),), "'rang' is no option: use one of .*did you mean 'rank'"),
    ((("low_rank", dict(rank="3")),), r"stage 1 \(low_rank\): rank='3' is not a whole number"),
    ((("low_rank", dict(rank=-3)),), "rank=-3 must be at least 0"),
    ((("low_rank", dict(share=0.5, rank=3)),), "give one of rank, share and energy: rank, share"),
    ((("low_rank", {}),), "give one of rank, share and energy: none"),
    ((("low_rank", dict(rank=3, products=("mpl",))),), "products names 'mpl'"),
    ((("low_rank", dict(rank=3, method="best")),), "method='best' is unknown"),
    ((("low_rank", dict(rank=3)), ("low_rank", dict(rank=2))),
     r"stage 2 \(low_rank\): products names 'attention', which has no product of one weight"),
    ((("tensor_train", dict(rank=4)), ("tensor_train", dict(rank=4))), "is a train of rank 4"),
    ((("train", dict(steps=0)),), "steps=0 must be at least 1"),
    ((("train", dict(config={"batch.sizes": 3})),), "did you mean batch.size"),
    ((("train", dict(config={"steps": 3})),), "'steps' is the stage's own"),
    ((("distil", dict(teacher="not/there")),), "teacher: .*not/there holds no run"),
])  # fmt: skip
def test_what_is_wrong_with_a_recipe_is_said(of_recipe, said):
    with pytest.raises(ValueError, match=said):
        recipe.checked(Recipe(of_recipe), MODEL)


def test_all_problems_are_said_at_once(tmp_path, capsys):
    path = recipe_file(tmp_path, (("low_rank", {}), ("nothing", {}), ("train", dict(steps=0))))
    assert run_command(tmp_path / "nowhere", path, tmp_path / "out") == 2
    said = capsys.readouterr().err
    for text in ("4 problems", "holds no run", "stage 1 (low_rank)", "stage 2", "stage 3 (train)"):
        assert text in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("text", "said"), [
    ("x = 1", "has no function get_recipe"),
    ("1 / 0", "fails: ZeroDivisionError"),
    ("def get_recipe():\n    return 3", "returns a int, not a"),
    (None, "there is no such file"),
])  # fmt: skip
def test_files_that_are_no_recipe(text, said, tmp_path):
    path = tmp_path / "recipe.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=said):
        recipe.load(str(path))


def test_the_recipes_of_this_repository_are_right():
    import pathlib

    root = pathlib.Path(__file__).parents[2] / "configs"
    files = sorted(root.glob("compress_*.py"))
    assert files
    for file in files:
        assert recipe.checked(recipe.load(str(file)), MODEL)
