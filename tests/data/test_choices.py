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
        ({key: HELLASWAG[key] for key in ("ctx", "endings")}, "no answer under 'answerKey' or"),
        (MMLU | {"passage": "On sums."}, '"passage" beside "question" is not read'),
        (MMLU | {"answerKey": "A"}, "'answerKey' and 'answer' name different choices"),
    ],
)
def test_other_records_are_refused_by_line(record, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        choices.read(written(tmp_path, MMLU, record))


COLOURS = ["red", "green", "blue", "gray"]


def of_arc(labels, key, texts=COLOURS):
    return {"question": "Which?", "choices": {"text": texts, "label": labels}, "answerKey": key}


def of_mmlu(answer, texts=COLOURS):
    return {"question": "Which?", "choices": texts, "answer": answer}


@pytest.mark.parametrize(("record", "wanted"), [
    # A label, as text or as a number on either side, in upper or lower case.
    *((of_arc(labels, key), 1) for labels, key in (
        ("1234", "2"), ("1234", 2), ([1, 2, 3, 4], "2"), ([1, 2, 3, 4], 2), ("ABCD", "B"),
        ("ABCD", " b"), ("abcd", "B"), ("2143", 1), ("0123", 1), (["A", 2, "C", 4], "2"),
        (["10", "20", "30", "40"], 20), ("ABab", "B"), ("BADC", "a"),
    )),
    # Never an index where there are labels: ARC counts from 1 in a few rows.
    (of_arc("ABCD", "1"), 0), (of_arc("ABCD", "4"), 3),
    *((of_arc(labels, key), None) for labels, key in (
        ("1234", 0), ("1234", "0"), ([1, 2, 3, 4], 0), ("ABCD", "0"), ("ABCD", 1), ("ABCD", 0),
        ("ABCD", "5"), ("BACD", "1"), ("2345", 1), ("ABab", True), ([1, 2, 3, 4], True),
        ([1, 2, 3, 4], 1.0), ("1234", "01"), ("1234", "\u0662"), ("1234", ""), ("1234", None),
    )),
    # A label before a text that reads the same; the text where no label fits.
    (of_arc("1234", "2", ["2", "1", "3", "4"]), 1), (of_arc("ABCD", "green"), 1),
    (of_arc("ABCD", "red", ["red", "red ", "b", "c"]), None),
    # Labels that cannot tell choices apart.
    *((of_arc(labels, "1"), None) for labels in (
        [1, "1", 2, 3], ["1", " 1", "2", "3"], "123", "12345", [True, 1, 2, 3], [1.0, 2, 3, 4],
        [None] * 4, {"1": 1}, "", ["1", "", "2", "3"],
    )),
    # Without labels.
    ({"question": "Which?", "choices": {"text": COLOURS}, "answerKey": "B"}, 1),
    *((of_mmlu(answer), 1) for answer in (1, "1", "B", "b", "green", " green ")),
    *((of_mmlu(answer), None) for answer in (4, "4", -1, "E", "Green!", True, 1.0, "", None, [1])),
    (of_mmlu("1", ["3", "1", "4"]), 1), (of_mmlu(1, ["3", "4", "1"]), 1),
    (of_mmlu("2", ["1", "2", "3"]), None), (of_mmlu("B", ["B", "A"]), None),
    (of_mmlu("B", ["A", "B"]), 1),
    # Several keys of the answer.
    (of_mmlu("B") | {"answerKey": 1}, 1), (of_mmlu("B") | {"label": "hard"}, 1),
    (of_mmlu("B") | {"answerKey": "C"}, None),
    ({"ctx": "A", "endings": COLOURS, "label": "2"}, 2),
    ({"ctx": "A", "endings": COLOURS, "label": 2}, 2),
    ({"ctx": "A", "endings": COLOURS, "label": ""}, None),
])  # fmt: skip
def test_which_choice_an_answer_names(record, wanted, tmp_path):
    if isinstance(record.get("choices"), dict) and isinstance(record["choices"].get("label"), str):
        record["choices"]["label"] = list(record["choices"]["label"])
    path = written(tmp_path, record)
    if wanted is None:
        with pytest.raises(ValueError, match=r"questions.jsonl: line 1: "):
            choices.read(path)
    else:
        assert choices.read(path)[0].answer == wanted


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
