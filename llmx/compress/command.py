"""The stages of a recipe, one after the other, each kept when it is done.

OUTPUT/stages/recipe.json says what OUTPUT is made of, from before the first stage on: another
source or recipe is refused. OUTPUT/stages/2_low_rank is the run that the second stage made, with
done.json, its measurement, written last: a command that was killed skips what has it. At the end
OUTPUT is a run itself.
"""

import dataclasses
import json
import pathlib
import time
from typing import Any

from llmx import config as config_lib
from llmx.compress import measure, recipe, report, saved, stages
from llmx.compress.measure import Measured
from llmx.compress.recipe import Named, Recipe
from llmx.runtime import launch, output_paths, ownership

STAGES, RECIPE, DONE = "stages", "recipe.json", "done.json"
BEGIN = stages.BEGIN.partition("_")[2]
LONGEST = 300  # characters of a value in a message


def compress(source: str, given: Recipe, output: str) -> list[Measured]:
    """Compresses a run, or goes on where it was killed; what was measured, after each stage.

    Raises ValueError for all that is wrong with source, recipe and output, before anything starts.
    """
    named = _checked(source, given, output)
    root = pathlib.Path(output)
    with ownership.take(output, log=launch.note):
        _write_json(root / STAGES / RECIPE, _key(source, given, named))
        rows, at = [], source
        for number, stage in enumerate([None, *named]):
            folder = _folder(root, number, stage)
            row = _done(folder) or _run(at, folder, stage, given)
            rows.append(row)
            launch.note(_line(row))
            at = str(folder)
        _finish(pathlib.Path(at), root)
        report.write(root, rows)
    return rows


def _checked(source: str, given: Recipe, output: str) -> list[Named]:
    """The stages, if nothing is wrong with source, recipe and output."""
    found = [*saved.problems_of_source(source), *output_paths.folder_problems("--output", output)]
    root = pathlib.Path(output)
    own = (root / STAGES).is_dir() or not root.exists() or ownership.is_empty(root)
    if not own:
        found.append(f"--output={output} exists and is not empty: name a new directory")
    if found:
        recipe.checked(given, config_lib.default().model, problems=found)
    named = recipe.checked(given, saved.model_of(source))
    if problem := _other(root, _key(source, given, named)):
        raise ValueError(
            f"--output={output} was begun with another source or recipe ({problem}): give those, "
            "or name a new directory"
        )
    return named


def _folder(root: pathlib.Path, number: int, stage: Named | None) -> pathlib.Path:
    return root / STAGES / f"{number}_{BEGIN if stage is None else stage.name}"


def _key(source: str, given: Recipe, named: list[Named]) -> dict[str, Any]:
    """What all that is in an output has been made and measured with."""
    data = None if given.data is None else dataclasses.asdict(given.data)
    return json.loads(json.dumps({
        "source": source, "data": data, "stages": [stage.as_json for stage in named],
        "evaluation_batches": given.evaluation_batches, "generated_tokens": given.generated_tokens,
    }))  # fmt: skip


def _other(root: pathlib.Path, key: dict[str, Any]) -> str:
    """What an output was begun with that is not of this key; "" = nothing."""
    try:
        begun = json.loads((root / STAGES / RECIPE).read_text())
    except FileNotFoundError:
        return f"it has no {STAGES}/{RECIPE}" if any((root / STAGES).glob("*/")) else ""
    except ValueError:
        return f"its {STAGES}/{RECIPE} is no JSON"
    wrong = [name for name in key if begun.get(name) != key[name]]
    return "; ".join(f"{name} was {_short(begun.get(name))}" for name in wrong)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _done(folder: pathlib.Path) -> Measured | None:
    """The measurement of a stage that is done; None = it is not."""
    try:
        return Measured(**json.loads((folder / DONE).read_text()))
    except (OSError, ValueError):
        return None


def _write_json(path: pathlib.Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n")
    temporary.replace(path)


def _run(at: str, folder: pathlib.Path, stage: Named | None, given: Recipe) -> Measured:
    """Runs a stage, and keeps what is measured of the run that it made."""
    text = BEGIN if stage is None else stage.text
    launch.note(f"stage {folder.name}: {text}")
    begun = time.perf_counter()
    if stage is None:
        saved.begun(at, folder, given.data)
    else:
        stages.STAGES[stage.name].run(stages.Job(at, folder, stage.options))
    seconds = time.perf_counter() - begun
    row = measure.of(folder, text, given, seconds=seconds)
    _write_json(folder / DONE, dataclasses.asdict(row))
    return row


def _finish(last: pathlib.Path, root: pathlib.Path) -> None:
    """Makes the run of the last stage that of the output, which is of one recipe only."""
    if (root / saved.CONFIG).is_file():
        return
    run = saved.opened(str(last))
    saved.written(config_lib.load_run(str(last)), run.params, root, origin=str(last), keep=True)


def _line(row: Measured) -> str:
    return (
        f"  {report.short(row.bytes)}B, {report.short(row.parameters)} parameters, held-out loss "
        f"{row.loss:.4f}"
    )
