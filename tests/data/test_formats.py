"""Compressed text, Arrow, saved datasets and ArrayRecord hold the documents of the plain file."""

import gzip
import json
import random

import pyarrow
import pytest
from pyarrow import ipc, parquet
from support.data_formats import (
    COMPRESS,
    TEXTS,
    example,
    jsonl,
    open_source,
    read,
    save_dataset,
    write_all,
    write_arrow,
    write_records,
    zstd,
)

from llmx.data import __main__ as command
from llmx.data import build, documents, shards, sources, tokenizers


def test_every_format_gives_the_rows_of_the_plain_file(tmp_path):
    names = write_all(tmp_path / "c")
    plain = open_source(tmp_path, str(tmp_path / "c" / "plain.jsonl"))
    assert len(names) == 12
    for name in names:
        opened = open_source(tmp_path, name)
        assert opened.fingerprint == plain.fingerprint, name
        for step in (0, 5):
            expected, found = (o.train_rows(step, range(4), 4) for o in (plain, opened))
            for key, value in expected.items():
                assert (found[key] == value).all(), name


@pytest.mark.parametrize("encoding", ["DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY", "PLAIN"])
def test_encodings_of_parquet(tmp_path, monkeypatch, encoding):
    """Those of pages version 2 too, and beside a row group with a dictionary."""
    path = str(tmp_path / "a.parquet")
    table = pyarrow.table({"text": TEXTS})
    for version in ("1.0", "2.0"):
        parquet.write_table(
            table, path, use_dictionary=False, column_encoding={"text": encoding},
            data_page_version=version, row_group_size=25,
        )  # fmt: skip
        for small in (32 << 20, 0):
            monkeypatch.setattr(documents, "_SMALL_CHUNK_BYTES", small)
            whole, _ = read(path)
            assert [one.text.decode() for one in whole] == TEXTS
            assert read(path, start=whole[29].end)[0] == whole[30:]


def test_texts_that_repeat_those_before_them_are_decoded_in_parts(tmp_path, monkeypatch):
    """A page of a few kB holds each whole: `DELTA_BYTE_ARRAY` stores what they add."""
    path = str(tmp_path / "a.parquet")
    texts = ["x" * 100_000 + f"{number:04d}" for number in range(500)]
    parquet.write_table(
        pyarrow.table({"text": texts}), path, use_dictionary=False, compression="none",
        column_encoding={"text": "DELTA_BYTE_ARRAY"},
    )  # fmt: skip
    monkeypatch.setattr(documents, "_MAX_PAGE_BYTES", 1 << 20)
    before = pyarrow.total_allocated_bytes()
    files = sources.list_files(path).files
    found = documents.read_documents(files, text_key="text", skip_bad=False, skipped={})
    for wanted, document in zip(texts, found, strict=True):
        assert document.text == wanted.encode()
        assert pyarrow.total_allocated_bytes() - before < 8 << 20


@pytest.mark.parametrize("kind", [
    pyarrow.string_view(), pyarrow.binary_view(), pyarrow.large_string(), pyarrow.large_binary(),
    pyarrow.dictionary(pyarrow.int32(), pyarrow.large_string()),
])  # fmt: skip
def test_types_of_text(tmp_path, kind):
    column = pyarrow.array([*TEXTS[:30], None, *TEXTS[30:], "long " * 99])
    column = column.cast(kind) if not pyarrow.types.is_dictionary(kind) else (
        column.cast(kind.value_type).dictionary_encode()
    )  # fmt: skip
    for stream in (True, False):
        path = str(tmp_path / f"{stream}.arrow")
        write_arrow(path, column, stream=stream)
        whole, skipped = read(path, skip_bad=True)
        assert [one.text.decode() for one in whole] == [*TEXTS, "long " * 99]
        assert skipped["without text"] == 1
        assert read(path, start=whole[8].end, skip_bad=True)[0] == whole[9:]
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    whole, _ = read(str(tmp_path / "a.parquet"), skip_bad=True)
    assert [one.text.decode() for one in whole] == [*TEXTS, "long " * 99]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt"])
@pytest.mark.parametrize("content", [b"\xef\xbb\xbf", b"\xef\xbb\xbf\n\n", b"\n"])
def test_a_file_of_a_byte_order_mark_alone_is_empty(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    if name == "a.txt" and content != b"\xef\xbb\xbf":
        return  # blank text
    with pytest.raises(ValueError, match="the file is empty"):
        read(str(path))
    assert read(str(path), skip_bad=True) == ([], {"empty": 1})


def test_reading_goes_on_after_any_document(tmp_path):
    for name in write_all(tmp_path / "c"):
        whole, _ = read(name)
        assert [one.text.decode() for one in whole] == TEXTS, name
        for i in (0, 6, 7, 19, 20, 58, 59):
            rest, _ = read(name, start=whole[i].end)
            assert rest == whole[i + 1 :], (name, i)


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_text_is_cut_as_plain_text_is(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(documents, "MAX_PIECE_BYTES", 500)
    raw = "".join(TEXTS).encode() + b"x" * 1200
    (tmp_path / "a.txt").write_bytes(raw)
    (tmp_path / f"a.txt{suffix}").write_bytes(COMPRESS[suffix](raw))
    plain, _ = read(str(tmp_path / "a.txt"))
    compressed, _ = read(str(tmp_path / f"a.txt{suffix}"))
    assert compressed == plain and len(plain) > 3
    for i, document in enumerate(plain):
        assert read(str(tmp_path / f"a.txt{suffix}"), start=document.end)[0] == plain[i + 1 :]


@pytest.mark.parametrize("name", ["x.jsonl.zst", "saved", "x.array_record"])
def test_an_interrupted_build_continues_to_the_same_bytes(tmp_path, name):
    write_all(tmp_path / "c")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    recipe = build.make_recipe(
        [str(tmp_path / "c" / name)], tokenizer=tokenizers.ByteTokenizer(), text_key="text",
        skip_bad=False, shard_tokens=300,
    )  # fmt: skip
    for folder in (whole, cut):
        folder.mkdir()
    build.write_shards(whole, recipe, report=lambda *_: None)
    original, num_closed = shards.ShardWriter.close, 0

    def close(writer):
        nonlocal num_closed
        num_closed += 1
        if num_closed == 3:
            raise KeyboardInterrupt
        return original(writer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards.ShardWriter, "close", close)
        with pytest.raises(KeyboardInterrupt):
            build.write_shards(cut, recipe, report=lambda *_: None)
    progress = json.loads((cut / "progress.json").read_text())
    assert len(progress["shards"]) == 2
    reports = []
    build.write_shards(cut, recipe, report=lambda *counts: reports.append(counts))
    assert max(done for done, _ in reports) <= recipe.num_bytes
    for path in whole.iterdir():
        assert (cut / path.name).read_bytes() == path.read_bytes()


# ---- damage ----


@pytest.mark.parametrize("suffix", COMPRESS)
def test_damaged_compressed_files_are_named_with_the_place(tmp_path, suffix):
    path = tmp_path / f"a.jsonl{suffix}"
    lines = [json.dumps({"text": random.Random(i).randbytes(60).hex()}) + "\n" for i in range(4000)]
    raw = COMPRESS[suffix]("".join(lines).encode())
    kind = "gzip" if suffix == ".gz" else "zstd"
    for damaged in (raw[: len(raw) // 2], raw[:-1], raw + b"rubbish", raw[:5], b"no such data"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"a\.jsonl{suffix}: the {kind} data is damaged") as e:
            read(str(path), skip_bad=True)
        assert "of the file, after line " in str(e.value) and "\n" not in str(e.value)
    path.write_bytes(raw[: len(raw) // 2])
    with pytest.raises(ValueError) as e:
        read(str(path))
    line = int(str(e.value).split("after line ")[1].split()[0])
    assert 1000 < line < 2000  # what half of the file holds
    path.write_bytes(COMPRESS[suffix](b""))
    with pytest.raises(ValueError, match=r"the file is empty"):
        read(str(path))
    assert read(str(path), skip_bad=True) == ([], {"empty": 1})
    (tmp_path / f"b.txt{suffix}").write_bytes(COMPRESS[suffix](b""))
    with pytest.raises(ValueError, match=r"b\.txt.*the file is empty \(0 bytes when decomp"):
        read(str(tmp_path / f"b.txt{suffix}"))


def test_a_changed_byte_in_gzip_is_noticed(tmp_path):
    raw = gzip.compress(jsonl())
    for at in range(20, len(raw), 41):
        damaged = bytearray(raw)
        damaged[at] ^= 1
        (tmp_path / "a.jsonl.gz").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"a\.jsonl\.gz: "):
            read(str(tmp_path / "a.jsonl.gz"))


def test_errors_in_compressed_text_name_its_lines(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n{"te'))
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz: line 2 \(byte 14\): malformed JSON"):
        read(str(tmp_path / "a.jsonl.gz"))
    (tmp_path / "a.txt.zst").write_bytes(zstd(b"one\ntwo\nthr\xff"))
    with pytest.raises(ValueError, match=r"a\.txt\.zst: line 3, byte 11: 0xff is not valid UTF-8"):
        read(str(tmp_path / "a.txt.zst"))


def test_damaged_arrow_files(tmp_path):
    path = tmp_path / "a.arrow"
    for stream in (True, False):
        write_arrow(path, TEXTS, stream=stream)
        raw = path.read_bytes()
        for cut in (len(raw) // 2, len(raw) - 1, 3):
            path.write_bytes(raw[:cut])
            with pytest.raises(ValueError, match=r"a\.arrow: not readable as Arrow .*cut off"):
                read(str(path))
        generator = random.Random(0)
        for _ in range(300):  # ends in an error of one line or in other text, not in a crash
            damaged = bytearray(raw)
            damaged[generator.randrange(len(raw))] ^= 1 << generator.randrange(8)
            path.write_bytes(damaged)
            try:
                read(str(path), skip_bad=True)
            except ValueError as error:
                assert str(error).startswith(str(path))


def test_bad_rows_of_arrow_files(tmp_path):
    path = str(tmp_path / "a.arrow")
    for column, message in [
        (["x", None], r"row 2: column 'text' is null"),
        (["x", ""], r"row 2: column 'text' is an empty string"),
        ([b"x", b"\xff"], r"row 2: byte 0 of the text is not valid UTF-8"),
        ([1, 2], r"column 'text' is of type int64, not text"),
    ]:
        write_arrow(path, column)
        with pytest.raises(ValueError, match=message):
            read(path)
    with pytest.raises(ValueError, match=r"no column 'body' \(its columns: 'id', 'text'\)"):
        read(path, text_key="body")
    bad = pyarrow.Array.from_buffers(
        pyarrow.string(), 3, pyarrow.array([b"a", b"\xff", b"c"]).buffers()
    )
    write_arrow(path, bad)
    found, skipped = read(path, skip_bad=True)
    assert [one.text for one in found] == [b"a", b"c"] and skipped == {"bad UTF-8": 1}
    write_arrow(path, pyarrow.array([], "string"))
    with pytest.raises(ValueError, match=r"the file is empty \(0 rows\)"):
        read(path)


@pytest.mark.parametrize("column", [TEXTS, pyarrow.array(TEXTS).dictionary_encode()])
def test_compressed_arrow_is_refused(tmp_path, column):
    table = pyarrow.table({"text": column})
    options = ipc.IpcWriteOptions(compression="zstd")
    with ipc.new_stream(tmp_path / "a.arrow", table.schema, options=options) as writer:
        writer.write_table(table)
    with pytest.raises(ValueError, match=r"message 1 is compressed.*or as \.parquet"):
        read(str(tmp_path / "a.arrow"))


def test_long_rows_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "MAX_RECORD_BYTES", 100)
    write_arrow(tmp_path / "a.arrow", ["x" * 101, "y" * 100])
    write_records(tmp_path / "a.array_record", [b"x" * 101, example(text=b"y" * 100)])
    for name in ("a.arrow", "a.array_record"):
        with pytest.raises(ValueError, match=r"1: a text of more than 100 bytes"):
            read(str(tmp_path / name))
        found, skipped = read(str(tmp_path / name), skip_bad=True)
        assert [one.text for one in found] == [b"y" * 100] and skipped == {"too long": 1}


def test_damaged_array_records(tmp_path):
    path = tmp_path / "a.array_record"
    write_records(path, [random.Random(i).randbytes(300).hex().encode() for i in range(500)])
    raw = path.read_bytes()
    for cut in (10, len(raw) // 2, len(raw) - 1):
        path.write_bytes(raw[:cut])
        with pytest.raises(ValueError, match=r"not readable as ArrayRecord.*cut off"):
            read(str(path), skip_bad=True)
    damaged = bytearray(raw)
    damaged[150_000] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"not readable as ArrayRecord at record [2-4]\d\d "):
        read(str(path))
    write_records(path, [])
    with pytest.raises(ValueError, match=r"the file is empty \(0 records\)"):
        read(str(path))


def test_examples_without_the_feature(tmp_path):
    path = str(tmp_path / "a.array_record")
    for record in (example(body=b"x"), example(text=3)):
        write_records(path, [record])
        with pytest.raises(ValueError, match=r"record 1: no feature 'text' .*'(body|text)'\): set"):
            read(path)
    # Text that begins as an example does is text.
    texts = [b"\n", b"\n\n", b"\n\x05\n\x03abc", b"\n" * 12, b"\n\x0a0123456789"]
    write_records(path, texts)
    assert [one.text for one in read(path)[0]] == texts


# ---- names ----


def test_saved_datasets_are_read_as_their_state_says(tmp_path):
    save_dataset(tmp_path / "c" / "saved", [["one"], ["two"]])
    write_arrow(tmp_path / "c" / "saved" / "cache-1.arrow", ["cached"])
    listing = sources.list_files(str(tmp_path / "c"))
    assert [f.kind for f in listing.files] == ["arrow"] * 2
    assert listing.left_out == {"beside a saved dataset": 1}
    again = sources.list_files(str(tmp_path / "c" / "*"))
    assert again.files == listing.files and again.left_out == listing.left_out
    (tmp_path / "c" / "saved" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(ValueError, match=r"data-00001-of-00002.arrow \(missing file of a dataset"):
        sources.list_files(str(tmp_path / "c"))


def test_splits_of_a_saved_dataset_must_be_chosen(tmp_path, capsys):
    for split in ("train", "test"):
        save_dataset(tmp_path / "d" / split, [[split]])
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ValueError, match=r"of the splits 'train', 'test': name the one .*d/train'"):
        sources.list_files(str(tmp_path / "d"))
    arguments = ["--source", str(tmp_path / "d"), "--output", str(tmp_path / "out")]
    assert command.main(arguments) == 2
    assert "name the one to read" in capsys.readouterr().err
    (tmp_path / "a.txt").write_text("text")
    assert sources.list_files(str(tmp_path), skip_bad=True).left_out["broken links or folders"] == 1
    assert [one.text for one in read(str(tmp_path / "d" / "test"))[0]] == [b"test"]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"_data_files": None}, "names no Arrow files"),
        ({"_data_files": [{"filename": "../x.arrow"}]}, "names no Arrow files"),
        ({"_indices_data_files": [{"filename": "indices.arrow"}]}, "flatten_indices"),
    ],
)
def test_states_that_are_not_read(tmp_path, state, message):
    save_dataset(tmp_path / "d", [["x"]], **state)
    with pytest.raises(ValueError, match=message):
        sources.list_files(str(tmp_path / "d"))


def test_the_datasets_library_writes_what_is_read(tmp_path):
    datasets = pytest.importorskip("datasets", reason="the datasets library is not installed")
    from datasets.table import InMemoryTable

    # Its own fingerprints are hashes of pickles, which fail with some versions of pyarrow.
    made = datasets.Dataset(InMemoryTable(pyarrow.table({"text": TEXTS})), fingerprint="f0")
    made.save_to_disk(str(tmp_path / "d"), num_shards=3)
    assert [one.text.decode() for one in read(str(tmp_path / "d"))[0]] == TEXTS
    datasets.DatasetDict(train=made, test=made).save_to_disk(str(tmp_path / "two"))
    with pytest.raises(ValueError, match="name the one to read"):
        sources.list_files(str(tmp_path / "two"))
    assert len(read(str(tmp_path / "two" / "train"))[0]) == len(TEXTS)


def test_compressed_files_by_name(tmp_path):
    (tmp_path / "notes.gz").write_bytes(gzip.compress(b"some notes"))
    assert [one.text for one in read(str(tmp_path / "notes.gz"))[0]] == [b"some notes"]
    assert [one.text for one in read(str(tmp_path / "*.gz"))[0]] == [b"some notes"]
    with pytest.raises(ValueError, match=r"\.gz 1 \(name it \.txt\.gz or \.jsonl\.gz\)"):
        sources.list_files(str(tmp_path))
    (tmp_path / "a.tar.gz").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"a\.tar\.gz: files of kind \.tar\.gz are not read"):
        sources.list_files(str(tmp_path / "a.tar.gz"))
    (tmp_path / "t.parquet.zst").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"decompress it, and name it \.parquet"):
        sources.list_files(str(tmp_path / "t.parquet.zst"))
