"""What files hold: binary content is named, and memory is bounded whatever a small file claims."""

import collections
import io
import json
import pathlib
import re
import subprocess
import sys
import types

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from llmx.data import documents, parquet_pages, sources, tokenizers

ROOT = pathlib.Path(__file__).parents[2]


def read(path, *, skip_bad=False, start=None):
    skipped = collections.Counter()
    files = sources.list_files(str(path)).files
    found = documents.read_documents(
        files, text_key="text", skip_bad=skip_bad, skipped=skipped,
        start=start or documents.Position(),
    )  # fmt: skip
    return list(found), dict(skipped)


NULS = bytes(300_000)


@pytest.mark.parametrize(
    ("name", "raw", "words"),
    [
        ("a.txt", NULS, r"a\.txt: byte 0 is NUL: the file is binary"),
        ("a.txt", b"text\n" * 400_000 + NULS, r"a\.txt: byte 2000000 is NUL"),
        ("a.md", "wide".encode("utf-16-le"), r"a\.md: byte 1 is NUL.*iconv -f UTF-16"),
        ("a.txt", b"\x01\x02\x03text", r"a\.txt: from byte 0 on: 3 of 7 bytes are NUL or other"),
        ("a.jsonl", NULS, r"a\.jsonl: line 1, byte 0 is NUL: the file is damaged"),
        ("a.jsonl", b'{"text": "x"}\n' + NULS, r"a\.jsonl: line 2, byte 14 is NUL"),
        (
            "a.jsonl",
            json.dumps({"text": "\0" * 1000}).encode(),
            r"a\.jsonl: line 1: key 'text': 1000 of 1000 bytes are NUL",
        ),
    ],
)
def test_binary_content_is_named_and_left_out(tmp_path, name, raw, words):
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(ValueError, match=words + ".*skip_bad=True"):
        read(tmp_path / name)
    found, skipped = read(tmp_path / name, skip_bad=True)
    assert skipped == {"binary": 1}
    assert b"\0" not in b"".join(document.text for document in found)
    assert name == "a.jsonl" or not found  # a text file with one NUL is left out whole


def test_binary_parquet_rows(tmp_path):
    parquet.write_table(pyarrow.table({"text": ["x", "\0" * 50]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"row 2: column 'text': 50 of 50 bytes are NUL"):
        read(tmp_path / "a.parquet")


def test_text_with_few_control_characters_is_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\x1b[1mbold\x1b[0m\tand\f\r\n")
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "a stray \0 in a record"}))
    assert len(read(tmp_path)[0]) == 2


def test_lines_without_end_are_not_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "MAX_RECORD_BYTES", 1000)
    long = json.dumps({"text": "x" * 3_000_000}).encode()
    good = json.dumps({"text": "good"}).encode()
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([good, long, good]) + b"\n")
    with pytest.raises(ValueError, match=r"line 2 \(byte 17\): a line of more than 1,000 bytes"):
        read(tmp_path / "a.jsonl")
    found, skipped = read(tmp_path / "a.jsonl", skip_bad=True)
    assert [one.text for one in found] == [b"good"] * 2 and skipped == {"too long": 1}
    assert found[1].end.offset == (tmp_path / "a.jsonl").stat().st_size
    after, _ = read(tmp_path / "a.jsonl", skip_bad=True, start=found[0].end)
    assert after == found[1:]
    (tmp_path / "b.jsonl").write_bytes(good + b"\n" + b"x" * 5000)
    found, skipped = read(tmp_path / "b.jsonl", skip_bad=True)
    assert [one.text for one in found] == [b"good"] and skipped == {"too long": 1}


def test_a_line_of_too_many_values(tmp_path):
    beside = b'{"text": "a", "beside": [' + b"{}," * 2_000_000 + b"1]}\n"
    (tmp_path / "a.jsonl").write_bytes(beside)
    with pytest.raises(ValueError, match=r"line 1 \(byte 0\) has more than the 2,000,000 JSON"):
        read(tmp_path / "a.jsonl")
    text = '{"key": [1, 2, 3]}, \\" ' * 100_000  # braces and commas in a text are text
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}))
    assert read(tmp_path / "a.jsonl")[0][0].text == text.encode()


def test_parquet_pages_are_measured_and_large_ones_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    texts = [f"{i} {'words ' * 200}" for i in range(300)]
    for options in (
        {"use_dictionary": False, "data_page_size": 2000, "write_batch_size": 10},
        {"data_page_size": 2000, "write_batch_size": 10, "dictionary_pagesize_limit": 5000},
        {"use_dictionary": False, "data_page_version": "2.0", "row_group_size": 100},
    ):
        table = pyarrow.table({"text": texts})
        parquet.write_table(table, path, compression="zstd", write_statistics=False, **options)
        with parquet.ParquetFile(path) as opened, open(path, "rb") as file:
            groups = [opened.metadata.row_group(i) for i in range(opened.num_row_groups)]
            for group in groups:
                column = group.column(0)
                found = list(parquet_pages.sizes(file, column))
                # The chunk's own size also counts the headers of the pages, below 100 bytes each.
                left = column.total_uncompressed_size - sum(found)
                assert 0 < left < 100 * len(found)
        plain = read(path)[0]
        monkeypatch.setattr(documents, "_SMALL_CHUNK_BYTES", 0)
        monkeypatch.setattr(documents, "_BATCH_BYTES", 5000)
        assert read(path)[0] == plain and [one.text.decode() for one in plain] == texts
        assert read(path, start=plain[150].end)[0] == plain[151:]
        monkeypatch.undo()
    monkeypatch.setattr(documents, "_SMALL_CHUNK_BYTES", 0)
    monkeypatch.setattr(documents, "_MAX_PAGE_BYTES", 10_000)
    with pytest.raises(ValueError, match=r"a\.parquet: row group 0 has a page of \d+,\d+ bytes"):
        read(path)


def test_long_documents_are_encoded_in_pieces(tmp_path, monkeypatch):
    corpus = [b"some words and lines\n" * 50, "\u4e2d\u6587 ".encode() * 50]
    tokenizer = tokenizers.train(corpus, vocab_size=300)
    texts = [b"words and lines\n" * 20, b"some words " * 30, "\u4e2d".encode() * 99, b"", b"so"]
    whole = tokenizer.encode_documents(texts)
    for size in (16, 50, 64):
        monkeypatch.setattr(tokenizers, "PIECE_BYTES", size)
        sizes = []
        for text in texts:
            pieces = list(tokenizers._pieces(text))
            assert b"".join(pieces) == text
            sizes += map(len, pieces)
            for piece in pieces[:-1]:
                piece.decode("utf-8")
        assert max(sizes) <= size
        for ids, one, text in zip(tokenizer.encode_documents(texts), whole, texts, strict=True):
            assert tokenizer.decode(ids).encode() == text
            # Lines are no token's inside, so that cuts at their ends change nothing.
            assert not text.endswith(b"\n") or np.array_equal(ids, one)
    byte = tokenizers.ByteTokenizer()
    assert all(byte.encode_documents([t])[0].tobytes() == t for t in texts)


MEMORY = """
import collections, pathlib, re, sys
from llmx.data import build, tokenizers
folder = pathlib.Path(sys.argv[1])
tokenizer = tokenizers.load(folder / "tokenizer.json")
tokenizer.encode("warm up")
resident = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
before = resident()
recipe = build.make_recipe([str(folder / sys.argv[2])], tokenizer=tokenizer, text_key="text",
                           skip_bad=False)
(folder / "out").mkdir(exist_ok=True)
try:
    print(build.write_shards(folder / "out", recipe, report=lambda *a: None)["documents"])
except ValueError as error:
    print(error)
print(resident() - before)
"""


def written_in_another_process(folder, name):
    """What a build of the file says, and the bytes that it took at most."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(folder), name],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *said, taken = done.stdout.splitlines()
    return "\n".join(said), int(taken)


@pytest.mark.slow
def test_memory_of_one_long_line_with_bpe(tmp_path):
    """31 MB took 3.6 GB."""
    text = "the quick brown fox jumped over lazy dogs " * 750_000
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}))
    tokenizers.train([text[:100_000].encode()], vocab_size=300).save(tmp_path / "tokenizer.json")
    said, taken = written_in_another_process(tmp_path, "a.jsonl")
    assert said == "1" and taken < 1 << 30


@pytest.mark.slow
def test_memory_of_small_files_that_claim_much(tmp_path):
    tokenizers.ByteTokenizer().save(tmp_path / "tokenizer.json")
    table = pyarrow.table({"text": ["a" * 280_000_000]})
    parquet.write_table(table, tmp_path / "a.parquet", use_dictionary=False, compression="zstd")
    del table
    with open(tmp_path / "b.jsonl", "wb") as file:
        file.write(b'{"text": "')
        file.truncate(8 << 30)  # without a newline; sparse
    said, taken = written_in_another_process(tmp_path, "a.parquet")
    assert re.search(r"a\.parquet: row group 0 has a page of 280,000,010 bytes", said)
    assert taken < 200 << 20
    said, taken = written_in_another_process(tmp_path, "b.jsonl")
    assert re.search(r"b\.jsonl: line 1 \(byte 0\): a line of more than 67,108,864 bytes", said)
    assert taken < 300 << 20


def test_page_headers_that_are_no_headers():
    def sizes(raw):
        column = types.SimpleNamespace(
            data_page_offset=0, dictionary_page_offset=None, total_compressed_size=len(raw)
        )
        return list(parquet_pages.sizes(io.BytesIO(raw), column))

    assert sizes(b"\x15\x00\x15\x14\x15\x00\x00") == [10]
    for raw in (b"\x19" * 5000, b"\x1c" * 5000, b"\x15" + b"\xff" * 99, b"\x15\x00", b"\0" * 9):
        with pytest.raises(ValueError, match="page header"):
            sizes(raw)
