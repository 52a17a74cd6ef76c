"""Multiple-choice questions from JSONL, and rows in which a model's loss of each is computed.

A record is of one of three forms, as HellaSwag, MMLU and ARC have them:

    {"ctx": "A man sits down", "endings": [" and ...", ...], "label": 2}
    {"question": "...", "choices": ["...", ...], "answer": 0}                  (or "B")
    {"question": "...", "choices": {"text": [...], "label": ["A", ...]}, "answerKey": "B"}

The answer is a label, or without labels an index from 0 or a letter, or the text of a choice.

Letters: B rows, T tokens.
"""

import collections
import dataclasses
import itertools
import json
import os
import pathlib
import string
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from llmx.data import json_files, opening, packing, remote
from llmx.data.tokenizers import Tokenizer

_REMEDY_OF_NAMES = "name JSONL files of questions, or () for none"
_REMEDY = "give one JSON object a line, with a question, its choices and the right one"
MAX_BYTES = 256 << 20
_ANSWERS = ("answerKey", "answer", "label")  # keys of the right choice
_CONTEXTS = ("context", "passage", "article", "ctx")  # what questions of other forms are about


@dataclasses.dataclass(frozen=True)
class Question:
    """What stands before the choices, the choices, and which is right."""

    prompt: str
    choices: tuple[str, ...]
    answer: int

    def behind(self, choice: str) -> str:
        """A choice as it follows the prompt: with a space, unless one of the two has it."""
        spaced = self.prompt[-1:].isspace() or choice[0].isspace()
        return choice if spaced else f" {choice}"


@dataclasses.dataclass(frozen=True)
class Continuation:
    """Ids of a prompt and of what follows it, and the bytes of the latter's text."""

    prompt: np.ndarray
    ids: np.ndarray
    num_bytes: int

    @property
    def size(self) -> int:
        return len(self.prompt) + len(self.ids)


def name_of(path: str) -> str:
    """What the figures of a file of questions are reported as: the file's name without its end."""
    return pathlib.PurePosixPath(path).stem


def problems(paths: Sequence[str]) -> Iterator[str]:
    """What is wrong with the files that a run is to be asked, each with its remedy; reads none."""
    for path in paths:
        local = os.path.expanduser(path)
        if not path:
            yield f"evaluation.choices has an empty name: {_REMEDY_OF_NAMES}"
        elif remote.is_url(path):
            yield from remote.problems("evaluation.choices: ", path)
        elif not os.path.isfile(local):
            kind = "is not a file" if os.path.exists(local) else "does not exist"
            yield f"evaluation.choices: {path!r} {kind}: {_REMEDY_OF_NAMES}"
    for name, number in collections.Counter(map(name_of, paths)).items():
        if name and number > 1:
            yield (
                f"evaluation.choices has {number} files of the name {name!r}, by which figures are "
                "reported: rename them"
            )


def read(path: str) -> list[Question]:
    """The questions of a file. Raises ValueError, naming file, line and remedy."""
    given = os.path.expanduser(path)
    raw = json_files.read_bytes(given, remedy=_REMEDY_OF_NAMES, max_bytes=MAX_BYTES)
    if opening.compression_of(given):
        with opening.open_at(given) as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise ValueError(f"{path} has more than {MAX_BYTES:,} bytes, the most read: {_REMEDY}")
    found = []
    for number, line in enumerate(raw.splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            found.append(_question(record))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: line {number}: {error}: {_REMEDY}") from error
    if not found:
        raise ValueError(f"{path} has no questions: {_REMEDY}")
    return found


def _question(record: Any) -> Question:
    if not isinstance(record, dict):
        raise ValueError(f"a JSON {type(record).__name__} in place of an object")
    if "endings" in record and "choices" in record:
        raise ValueError('both "endings" and "choices"')
    if "endings" in record:
        prompt, choices, labels = record.get("ctx"), record["endings"], None
    elif isinstance(record.get("choices"), dict):
        prompt = record.get("question")
        choices, labels = record["choices"].get("text"), record["choices"].get("label")
    else:
        prompt, choices, labels = record.get("question"), record.get("choices"), None
    if not isinstance(prompt, str):
        raise ValueError('no text under "question" or "ctx"')
    texts = isinstance(choices, list) and all(isinstance(text, str) and text for text in choices)
    if not texts or len(choices) < 2:
        raise ValueError("the choices are no list of two texts or more, none of them empty")
    labels = None if labels is None else _labels(labels, len(choices))
    if found := [key for key in _CONTEXTS if "question" in record and record.get(key)]:
        raise ValueError(f'"{found[0]}" beside "question" is not read: write one text, as question')
    answers = {key: record[key] for key in _ANSWERS if record.get(key) is not None}
    if len(answers) > 1 and "endings" not in record:
        answers.pop("label", None)  # of HellaSwag's form alone; else it may be of another purpose
    if not answers:
        raise ValueError("no answer under " + " or ".join(map(repr, _ANSWERS)))
    places = {key: _place(answer, choices, labels) for key, answer in answers.items()}
    if len({*places.values()}) > 1:
        raise ValueError(f"{' and '.join(map(repr, places))} name different choices: keep one")
    place = next(iter(places.values()))
    _require_text([prompt, *choices])
    return Question(prompt, tuple(choices), place)


def _labels(labels: Any, number: int) -> list[str]:
    """The labels of choices as text: files write digits as text or as numbers."""
    kinds = isinstance(labels, list) and all(type(label) in (str, int) for label in labels)
    found = [str(label).strip() for label in labels] if kinds else []
    if len({*found} - {""}) != number or len(found) != number:
        raise ValueError(f"{number} choices need as many labels, all different, texts or numbers")
    return found


def _place(answer: Any, choices: Sequence[str], labels: Sequence[str] | None) -> int:
    """Which choice an answer names. Raises ValueError where it names none, or two.

    By its label where there are labels; without, by its index from 0 or its letter; else by its
    text. Files of ARC count from 1 in some rows whose labels are letters.
    """
    wanted = str(answer).strip() if type(answer) in (str, int) else ""
    letters = list(string.ascii_uppercase[: len(choices)])
    by_text = {at for at, text in enumerate(choices) if wanted and text.strip() == wanted}
    if labels is None:
        named = {str(at): at for at in range(len(choices))}
        found = {named[wanted]} if wanted in named else _matching(wanted, letters)
        # A number is an index; a text may be what a choice says.
        found |= by_text if isinstance(answer, str) else set()
    else:
        found = _matching(wanted, labels)
        if not found and isinstance(answer, str):
            counted = [str(at) for at in range(1, len(choices) + 1)]
            in_letters = [label.upper() for label in labels] == letters
            found = by_text | (_matching(wanted, counted) if in_letters else set())
    if len(found) != 1:
        kind = "several" if found else "none"
        raise ValueError(f"the answer {str(answer)[:50]!r} is {kind} of the {len(choices)} choices")
    return found.pop()


def _matching(wanted: str, labels: Sequence[str]) -> set[int]:
    """The places of a label; in upper or lower case where it is not there as it stands."""
    exact = {at for at, label in enumerate(labels) if label == wanted}
    return exact or {at for at, label in enumerate(labels) if label.lower() == wanted.lower()}


def _require_text(texts: Sequence[str]) -> None:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            lone = text[error.start : error.end]
            raise ValueError(f"half a character, {lone!a}, in a text") from error


def continuations(question: Question, tokenizer: Tokenizer) -> list[Continuation]:
    """The choices of a question behind its prompt, each encoded as one text with it."""
    start = np.array(tokenizer.start, np.int32)
    prompt = tokenizer.encode(question.prompt)
    found = []
    for choice in question.choices:
        whole = tokenizer.encode(question.prompt + question.behind(choice))
        # Tokens may join the end of the prompt with the choice: they belong to the choice.
        same = min(len(prompt), len(whole) - 1)
        differ = np.flatnonzero(whole[:same] != prompt[:same])
        kept = int(differ[0]) if len(differ) else same
        before = np.concatenate([start, whole[:kept]])
        if not len(before):  # nothing to predict the first token from
            before = np.array([tokenizer.end_of_document], np.int32)
        found.append(Continuation(before, whole[kept:], len(choice.encode())))
    return found


def shortened(of_one: Sequence[Continuation], most: int) -> list[Continuation]:
    """The choices of a question with at most so many tokens before the last: where one has more,
    the prompts of all lose as much of their beginning."""
    surplus = max(one.size for one in of_one) - (most + 1)
    if surplus <= 0:
        return list(of_one)
    if surplus >= min(len(one.prompt) for one in of_one):
        longest = max(len(one.ids) for one in of_one)
        raise ValueError(
            f"a choice has {longest} tokens and its row {most} positions: leave the question out"
        )
    return [dataclasses.replace(one, prompt=one.prompt[surplus:]) for one in of_one]


@dataclasses.dataclass(frozen=True)
class Rows:
    """A batch, and for each continuation in it (row, first column, columns) of its targets."""

    batch: dict[str, np.ndarray]
    places: list[tuple[int, int, int]]


def packed(
    several: Sequence[Continuation], *, num_rows: int, length: int, filler: int
) -> Iterator[Rows]:
    """Batches [B, T] of all continuations in their order, each a document of its own."""
    rows = itertools.groupby(_rows_of(several, length), key=lambda place: place[0] // num_rows)
    number = 0
    for index, group in rows:
        batch = packing.empty_batch(num_rows, length, filler)
        places, segments = [], np.zeros(num_rows, int)
        for of_all, column in group:
            one, row = several[number], of_all - index * num_rows
            number += 1
            ids = np.concatenate([one.prompt, one.ids])
            columns = slice(column, column + len(ids) - 1)
            segments[row] += 1
            batch["tokens"][row, columns] = ids[:-1]
            batch["targets"][row, columns] = ids[1:]
            batch["segment_ids"][row, columns] = segments[row]
            batch["positions"][row, columns] = np.arange(len(ids) - 1)
            first = column + len(one.prompt) - 1
            batch["weights"][row, first : columns.stop] = 1
            places.append((row, first, len(one.ids)))
        yield Rows(batch, places)


def _rows_of(several: Sequence[Continuation], length: int) -> Iterator[tuple[int, int]]:
    """Row and first column of each continuation: the next that has room for its inputs."""
    row = column = 0
    for one in several:
        if column + one.size - 1 > length:
            row, column = row + 1, 0
        yield row, column
        column += one.size - 1


def scores(
    questions: Sequence[Question], several: Sequence[Continuation], nats: np.ndarray
) -> dict[str, float]:
    """Shares of right answers: the likeliest choice, and the likeliest per byte of its text.

    `nats`: the loss of each continuation, summed over its tokens.
    """
    right = right_per_byte = at = 0
    for question in questions:
        of = slice(at, at + len(question.choices))
        at = of.stop
        lengths = np.array([one.num_bytes for one in several[of]])
        right += int(np.argmin(nats[of])) == question.answer
        right_per_byte += int(np.argmin(nats[of] / lengths)) == question.answer
    number = len(questions)
    return {
        "accuracy": right / number, "accuracy_per_byte": right_per_byte / number,
        "guessing": float(np.mean([1 / len(each.choices) for each in questions])),
        "questions": number,
    }  # fmt: skip
