"""What a work directory says of the machine that it was written on counts on no other."""

import dataclasses
import json
import typing

import pytest

from llmx import config as config_lib
from llmx import convert, generate
from llmx.compress import __main__ as compress
from llmx.config import checks, flags
from llmx.config import recipe as recipe_lib
from llmx.data import __main__ as data_command
from llmx.data import tokenizers
from llmx.evaluate import __main__ as evaluate
from llmx.model import families
from llmx.runtime import bounds, launch
from llmx.runtime.launch import LaunchConfig
from llmx.tables import __main__ as tables

MACHINE = {
    "workdir", "data.num_threads", "data.prefetch", "data.cache_dir", "sync.exchange",
    "checkpoint.local_directory", "checkpoint.local_every", "checkpoint.grace_seconds",
    "metrics.progress",
}  # fmt: skip
SECTIONS = ("launch", "watchdog")  # all of whose keys are the machine's
CHOSEN = {
    "launch.compiler_options": ("xla_dump_to=/hostile",), "launch.coordinator": "10.0.0.1:99",
    "launch.num_processes": 4, "launch.process_id": 0,
}  # fmt: skip


def field_of(key):
    kind = config_lib.Config
    *sections, name = key.split(".")
    for section in sections:
        kind = typing.get_type_hints(kind)[section]
    return kind.__dataclass_fields__[name]


def hostile(key):
    """A legal value that is not the default."""
    field = field_of(key)
    if key in CHOSEN:
        return CHOSEN[key]
    if choices := field.metadata.get("choices"):
        return next(name for name in choices if name != field.default)
    return "/hostile" if isinstance(field.default, str) else field.default + 1


def test_every_key_is_of_the_run_or_of_the_machine():
    hints = typing.get_type_hints(config_lib.Config)
    for field in dataclasses.fields(config_lib.Config):
        if dataclasses.is_dataclass(hints[field.name]):
            assert field.metadata["of"] in (bounds.RUN, bounds.MACHINE), field.name
    owners = config_lib.owners()
    assert list(owners) == list(config_lib.leaf_types(config_lib.Config))
    assert set(owners.values()) == {bounds.RUN, bounds.MACHINE}
    assert {key for key in config_lib.machine_keys() if key.split(".")[0] not in SECTIONS} == (
        MACHINE
    )
    assert all(owners[key] == bounds.MACHINE for key in owners if key.split(".")[0] in SECTIONS)


@pytest.fixture
def workdir(tmp_path):
    """A run from elsewhere, with its own settings of the machine in each key."""
    run = config_lib.default()
    run.model = families.preset("llama3")
    run.model.vocab_size, run.mesh.data, run.batch.sequence_length = 257, 1, 32
    run.workdir = str(tmp_path / "run")
    config_lib.save_run(run)
    path = tmp_path / "run" / "config.json"
    values = json.loads(path.read_text())
    for key in config_lib.machine_keys():
        *sections, name = key.split(".")
        inner = values
        for section in sections:
            inner = inner[section]
        inner[name] = hostile(key)
    path.write_text(json.dumps(values))
    tokenizers.ByteTokenizer().save(tmp_path / "run" / "tokenizer.json")
    (tmp_path / "run" / "checkpoints" / "3").mkdir(parents=True)
    return tmp_path / "run"


def require_own(run, workdir):
    default = config_lib.default()
    default.workdir = str(workdir)
    for key in config_lib.machine_keys():
        assert config_lib.get_value(run, key) == config_lib.get_value(default, key), key


def test_a_saved_config_is_read_with_own_settings(workdir):
    written = config_lib.read_written(workdir / "config.json")
    for key in config_lib.machine_keys():
        assert config_lib.get_value(written, key) == hostile(key)
    require_own(config_lib.load_run(str(workdir)), workdir)
    require_own(checks.for_inference(config_lib.load_run(str(workdir))), workdir)


def test_a_saved_config_as_a_config_file(workdir, capsys):
    """Flags count, and what is left out is told."""
    path = str(workdir / "config.json")
    command = flags.parser("x", "y")
    _, run, problems = flags.parse(command, ["--config", path, "--config.launch.cpu_devices=2"])
    assert not problems and run.launch.cpu_devices == 2 and run.model.vocab_size == 257
    run.launch.cpu_devices = 0
    require_own(run, workdir)
    said = capsys.readouterr().err
    assert "settings of the machine are not taken: " in said
    assert "launch.compile_cache='/hostile'" in said and "cpu_devices" not in said


def harness(arguments):
    harness_model = pytest.importorskip("llmx.evaluate.harness_model")
    with pytest.raises(harness_model.Refused, match="enough"):
        harness_model.LlmxLM(arguments[-1])
    return 2


def write_recipe(folder):
    path = folder / "recipe.py"
    path.write_text(
        "from llmx.compress.recipe import Recipe\n\n\n"
        "def get_recipe():\n    return Recipe((('quantize', {'group': 0}),))\n"
    )


# The arguments besides --workdir; what they name is beside the run.
COMMANDS = {
    "generate": (generate, ["--prompt", "a"]),
    "evaluate": (evaluate, []),
    "compress": (compress, ["--recipe", "recipe.py", "--output", "small"]),
    "convert": (convert, ["--to-hf", "hf"]),
    "tables": (tables, ["--output", "rows"]),
    "teacher": (data_command, ["--top-k", "4", "--output", "shards"]),
    "harness": (None, []),
}


def call(name, run):
    command, arguments = COMMANDS[name]
    if command is None:
        return harness([str(run)])
    named = ["--teacher" if name == "teacher" else "--workdir", str(run)]
    beside = ["recipe.py", "small", "hf", "rows", "shards"]
    arguments = [str(run.parent / word) if word in beside else word for word in arguments]
    return command.main([*(["export"] if name == "tables" else []), *named, *arguments])


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_asks_for_own_settings(workdir, name, monkeypatch, tmp_path, capsys):
    """Of what commands read, what they give to jax, and what they resolve."""
    write_recipe(tmp_path)
    if name == "teacher":
        (tmp_path / "text.txt").write_text("Text of no meaning.\n" * 200)
        shards = ["--output", str(tmp_path / "shards"), "--source", str(tmp_path / "text.txt")]
        assert data_command.main(shards) == 0
    read, started, made = [], [], []
    real = config_lib.read_saved

    def enough(run, **_):
        made.append(run)
        raise ValueError("enough")

    monkeypatch.setattr(config_lib, "read_saved", lambda path: read.append(real(path)) or read[-1])
    monkeypatch.setattr(launch, "start", started.append)
    monkeypatch.setattr(recipe_lib, "make_recipe", enough)
    assert call(name, workdir) in (1, 2), capsys.readouterr()
    assert read
    for run in (*read, *made):
        require_own(run, workdir)
    for asked in started:
        assert dataclasses.replace(asked, coordinator="") == LaunchConfig()
    assert name in ("convert", "tables") or (started and made), capsys.readouterr()
