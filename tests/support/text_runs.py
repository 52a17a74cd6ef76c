"""Small texts for runs of the commands, and what such a run has recorded."""

import json
import math
import pathlib

import numpy as np

WORDS = ("alpha", "beta", "gamma", "delta", "def", "return", "import", "x", "=", "+", "\n")


def write_corpus(folder: pathlib.Path, *, files: int, words: int) -> pathlib.Path:
    """Writes folder/text/0.txt, ... of random words, each time the same; returns folder/text."""
    random = np.random.default_rng(0)
    text = folder / "text"
    text.mkdir()
    for number in range(files):
        (text / f"{number}.txt").write_text(" ".join(random.choice(WORDS, words)))
    return text


def records(workdir: pathlib.Path, kind: str = "train") -> dict[int, dict]:
    """Records by step; each step stands there once."""
    found = {}
    for line in (pathlib.Path(workdir) / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == kind:
            assert record["step"] not in found, f"step {record['step']} stands there twice"
            found[record["step"]] = record
    return found


def losses(workdir: pathlib.Path, *, steps: int | None = None) -> list[float]:
    """The loss of each step from the first on, nan where it completes no batch; `steps`: how many
    there must be."""
    found = records(workdir)
    assert list(found) == list(range(1, (len(found) if steps is None else steps) + 1))
    return [record.get("loss", math.nan) for record in found.values()]
