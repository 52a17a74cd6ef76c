"""The stages of a recipe, one after the other, each kept when it is done.

OUTPUT/stages/2_low_rank is the run that the second stage made, with done.json, its measurement,
written last: a command that was killed skips what has it. At the end OUTPUT is a run itself.
"""

import dataclasses
import json
import pathlib
import time

from llmx import config as config_lib
from llmx.compress import measure, recipe, report, saved, stages
from llmx.compress.measure import Measured
from llmx.compress.recipe import Named, Recipe
from llmx.runtime import launch, output_paths, ownership

STAGES, DONE = "stages", "done.json"
BEGIN = stages.BEGIN.partition("_")[2]


def compress(source: str, given: Recipe, output: str) -> list[Measured]:
    """Compresses a run, or goes on where it was killed; what was measured, after each stage.

    Raises ValueError for all that is wrong with source, recipe and output, before anything starts.
    """
    named = _checked(source, given, output)
    root = pathlib.Path(output)
    with ownership.take(output, log=launch.note):
        rows, at = [], source
        for number, stage in enumerate([None, *named]):
            folder, key = _folder(root, number, stage), _key(source, given, stage)
            row = _done(folder, key)
            if row is None:
                row = _run(at, folder, stage, given, key)
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
    for number, stage in enumerate([None, *named]):
        folder = _folder(root, number, stage)
        wrong = sorted((root / STAGES).glob(f"{number}_*")) if (root / STAGES).is_dir() else []
        others = [path for path in wrong if not path.name.startswith(folder.name)]
        if others or (folder.is_dir() and _done(folder, _key(source, given, stage), check=True)):
            raise ValueError(
                f"--output={output} was begun with another source, recipe or stage {number}: "
                "give those, or name a new directory"
            )
    return named


def _folder(root: pathlib.Path, number: int, stage: Named | None) -> pathlib.Path:
    return root / STAGES / f"{number}_{BEGIN if stage is None else stage.name}"


def _key(source: str, given: Recipe, stage: Named | None) -> dict:
    """What must be the same for a stage that was done to count."""
    if stage is not None:
        return stage.as_json
    data = None if given.data is None else dataclasses.asdict(given.data)
    return json.loads(json.dumps({"source": source, "data": data}))


def _done(folder: pathlib.Path, key: dict, *, check: bool = False):
    """The measurement of a stage that is done; None = it is not. `check`: whether it is one of
    another key instead."""
    try:
        found = json.loads((folder / DONE).read_text())
    except (OSError, ValueError):
        return False if check else None
    if check:
        return found["key"] != key
    return Measured(**found["measured"])


def _run(at: str, folder: pathlib.Path, stage: Named | None, given: Recipe, key: dict) -> Measured:
    """Runs a stage, and keeps what is measured of the run that it made."""
    launch.note(f"stage {folder.name}: {BEGIN if stage is None else stage.text}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()
    if stage is None:
        saved.begun(at, folder, given.data)
    else:
        stages.STAGES[stage.name].run(stages.Job(at, folder, stage.options))
    seconds = time.perf_counter() - begun
    row = measure.of(
        folder, BEGIN if stage is None else stage.text, given, seconds=seconds
    )  # fmt: skip
    temporary = folder / f"{DONE}.tmp"
    temporary.write_text(json.dumps({"key": key, "measured": dataclasses.asdict(row)}, indent=2))
    temporary.replace(folder / DONE)
    return row


def _finish(last: pathlib.Path, root: pathlib.Path) -> None:
    """Makes the run of the last stage that of the output."""
    if (root / saved.CONFIG).is_file():
        return
    run = saved.opened(str(last))
    saved.written(config_lib.load_run(str(last)), run.params, root, origin=str(last), keep=True)


def _line(row: Measured) -> str:
    return (
        f"  {report.short(row.bytes)}B, {report.short(row.parameters)} parameters, held-out loss "
        f"{row.loss:.4f}"
    )
