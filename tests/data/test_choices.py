"""Multiple-choice questions: their three forms, their rows, and what their scores are."""

import gzip
import json
import pathlib

import numpy as np
import pytest

from llmx.data import choices, tokenizers

HELLASWAG = {"ctx": "He sits ", "endings": ["down.", "up."], "label": "1"}
MMLU = {"question": "2+2?", "choices": ["3", "4", "5"], "answer": "B"}
ARC = {
    "question": "Which floats?", "choices": {"text": ["stone", "wood"], "label": ["1", "2"]},
    "answerKey": "2",
}  # fmt: skip
BYTES = tokenizers.ByteTokenizer()


def written(tmp_path, *records) -> str:
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records))
    return str(path)


def test_three_forms(tmp_path):
    found = choices.read(written(tmp_path, HELLASWAG, "", MMLU, ARC, MMLU | {"answer": 2}))
    assert found == [
        choices.Question("He sits ", ("down.", "up."), 1),
        choices.Question("2+2?", ("3", "4", "5"), 1),
        choices.Question("Which floats?", ("stone", "wood"), 1),
        choices.Question("2+2?", ("3", "4", "5"), 2),
    ]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ("{", "line 2: .*: give one JSON object a line"),
        ("[1]", "line 2: a JSON list in place of an object"),
        ({"choices": ["a", "b"], "answer": 0}, 'no text under "question" or "ctx"'),
        (MMLU | {"choices": ["a"]}, "no list of two texts or more"),
        (MMLU | {"choices": ["a", ""]}, "none of them empty"),
        (MMLU | {"choices": None}, "no list of two texts or more"),
        (MMLU | {"answer": "D"}, "the answer 'D' is none of the 3 choices"),
        (MMLU | {"answer": 3}, "the answer '3' is none of the 3 choices"),
        (MMLU | {"answer": True}, "the answer 'True' is none"),
        (MMLU | {"answer": -1}, "the answer '-1' is none"),
        (ARC | {"answerKey": "E"}, "the answer 'E' is none of the 2 choices"),
        (ARC | {"choices": {"text": ["a", "b"], "label": ["A"]}}, "as many labels, all different"),
        (ARC | {"choices": {"text": ["a", "b"], "label": ["A", "A"]}}, "all different"),
        (MMLU | HELLASWAG, 'both "endings" and "choices"'),
        ({key: HELLASWAG[key] for key in ("ctx", "endings")}, "the answer 'None' is none"),
    ],
)
def test_other_records_are_refused_by_line(record, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        choices.read(written(tmp_path, MMLU, record))


def test_compressed_files(tmp_path):
    plain, packed = written(tmp_path, MMLU), tmp_path / "questions.jsonl.gz"
    packed.write_bytes(gzip.compress(pathlib.Path(plain).read_bytes()))
    assert choices.read(str(packed)) == choices.read(plain)
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(ValueError, match="damaged or cut off"):
        choices.read(str(packed))


def test_files_without_questions_are_refused(tmp_path):
    with pytest.raises(ValueError, match="has no questions"):
        choices.read(written(tmp_path, "", " "))
    with pytest.raises(ValueError, match="does not exist"):
        choices.read(str(tmp_path / "none.jsonl"))


def test_tokens_that_join_prompt_and_choice_are_the_choices():
    """And prompt and choice together are the ids of the whole text."""
    coder = tokenizers.train([b"the cat sat on the mat. the cats sat. " * 40], vocab_size=290)
    for prompt in ("sat on the ", "sat on the"):
        question = choices.Question(prompt, ("cat", " mat"), 0)
        for text, one in zip(question.choices, choices.continuations(question, coder), strict=True):
            whole = coder.encode(prompt + question.behind(text))
            np.testing.assert_array_equal(np.concatenate([one.prompt, one.ids]), whole)
            assert one.num_bytes == len(text) and len(one.ids) >= 1
    question = choices.Question("sat on the ", ("cat", " mat"), 0)
    joined = choices.continuations(question, coder)[0]
    assert len(coder.encode("sat on the ")) > len(joined.prompt)  # " cat" is one token


@pytest.mark.parametrize(
    ("prompt", "choice", "text"),
    [
        ("2 + 2 =", "4", "2 + 2 = 4"), ("2 + 2 = ", "4", "2 + 2 = 4"), ("if x:\n", "y", "if x:\ny"),
        ("if x:\n", "    y", "if x:\n    y"), ("Answer:\n\n", "a", "Answer:\n\na"),
        ("A man", " sits", "A man sits"),
    ],
)  # fmt: skip
def test_white_space_stays_as_it_is(prompt, choice, text, tmp_path):
    record = {"question": prompt, "choices": [choice, "other"], "answer": 0}
    (question,) = choices.read(written(tmp_path, record))
    one, _ = choices.continuations(question, BYTES)
    assert bytes(np.concatenate([one.prompt, one.ids]).tolist()).decode() == text
    assert one.num_bytes == len(choice)  # not the space that was put between


def test_an_empty_prompt_begins_as_a_document_does():
    question = choices.Question("", (" a", " b"), 0)
    (one, _) = choices.continuations(question, BYTES)
    assert one.prompt.tolist() == [BYTES.end_of_document]


def test_rows_hold_each_as_a_document_of_its_own():
    noise = np.random.default_rng(0)
    several = [
        choices.Continuation(noise.integers(0, 99, before), noise.integers(0, 99, after), 1)
        for before, after in noise.integers(1, 6, (40, 2))
    ]
    number = 0
    for rows in choices.packed(several, num_rows=3, length=16, filler=7):
        batch, held = rows.batch, np.zeros((3, 16), int)
        for row, first, count in rows.places:
            one = several[number]
            number += 1
            begin, end = first - len(one.prompt) + 1, first + count
            ids = np.concatenate([one.prompt, one.ids])
            assert batch["tokens"][row, begin:end].tolist() == ids[:-1].tolist()
            assert batch["targets"][row, first:end].tolist() == one.ids.tolist()
            assert batch["positions"][row, begin:end].tolist() == list(range(end - begin))
            assert len({*batch["segment_ids"][row, begin:end]}) == 1
            held[row, begin:end] += 1
        assert held.max() == 1
        np.testing.assert_array_equal(batch["segment_ids"] > 0, held > 0)
        weighted = sum(count for _, _, count in rows.places)
        assert batch["weights"].sum() == weighted
    assert number == len(several)


def test_too_long_prompts_lose_their_beginning():
    one = choices.Continuation(np.arange(10), np.arange(3), 3)
    other = choices.Continuation(np.arange(10), np.arange(2), 2)
    assert choices.shortened([one, other], 12) == [one, other]
    for each in choices.shortened([one, other], 5):  # the same for both
        assert each.prompt.tolist() == [7, 8, 9]
    with pytest.raises(ValueError, match="a choice has 3 tokens and its row 2 positions"):
        choices.shortened([one, other], 2)


def test_scores_by_likelihood_and_per_byte():
    """A longer choice of more nats may have fewer of them per byte."""
    questions = [
        choices.Question("q", (" ab", " abcdef"), 1),
        choices.Question("q", (" a",) * 3, 0),
    ]
    several = [
        choices.Continuation(np.zeros(1, int), np.zeros(1, int), len(text))
        for each in questions for text in each.choices
    ]  # fmt: skip
    nats = np.array([3.0, 4.0, 1.0, 2.0, 3.0])
    assert choices.scores(questions, several, nats) == {
        "accuracy": 0.5, "accuracy_per_byte": 1.0, "guessing": (1 / 2 + 1 / 3) / 2, "questions": 2
    }  # fmt: skip


def test_names_of_files_that_cannot_be_asked(tmp_path):
    path = written(tmp_path, MMLU)
    assert not list(choices.problems(())) and not list(choices.problems((path,)))
    said = "\n".join(
        choices.problems((path, str(tmp_path), "x://a/b.jsonl", "c/questions.txt", ""))
    )
    for words in ("is not a file", "x is no kind of store", "'c/questions.txt' does not exist",
                  "an empty name", "2 files of the name 'questions'"):  # fmt: skip
        assert words in said
    assert choices.name_of("s3://b/x/arc.easy.jsonl") == "arc.easy"
