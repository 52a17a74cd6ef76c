"""The same documents as files of every format that is read."""

import collections
import gzip
import json

import pyarrow
from array_record.python import array_record_module
from pyarrow import ipc, parquet

from llmx.data import array_records, config, dataset, documents, sources

TEXTS = [f"text {i} \u2028 \u00e9\r\n" + "word " * (i % 7) for i in range(60)]


def zstd(raw):
    out = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(out, "zstd") as stream:
        stream.write(raw)
    return out.getvalue().to_pybytes()


COMPRESS = {".gz": gzip.compress, ".zst": zstd}


def jsonl(texts=TEXTS):
    return "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts).encode()


def write_arrow(path, column, *, stream=True, batch=7):
    table = pyarrow.table({"id": list(range(len(column))), "text": column})
    make = ipc.new_stream if stream else ipc.new_file
    with make(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch)


def write_records(path, records):
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:4")
    for record in records:
        writer.write(record)
    writer.close()


def example(**features):
    message = array_records._example_class()()
    for name, value in features.items():
        kind = "bytes_list" if isinstance(value, bytes) else "int64_list"
        getattr(message.features.feature[name], kind).value.append(value)
    return message.SerializeToString()


def save_dataset(folder, parts, **state):
    """As `save_to_disk` of the datasets library lays a dataset out."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{len(parts):05d}.arrow" for i in range(len(parts))]
    for name, part in zip(names, parts, strict=True):
        write_arrow(folder / name, part)
    files = {"_data_files": [{"filename": name} for name in names], **state}
    (folder / "state.json").write_text(json.dumps(files))
    (folder / "dataset_info.json").write_text("{}")


def write_all(folder):
    """The same documents in every format; the source of each."""
    folder.mkdir(parents=True)
    (folder / "plain.jsonl").write_bytes(jsonl())
    for suffix, compress in COMPRESS.items():
        raw = jsonl()  # of two members or frames
        (folder / f"x.jsonl{suffix}").write_bytes(compress(raw[:999]) + compress(raw[999:]))
    write_arrow(folder / "stream.arrow", TEXTS)
    write_arrow(folder / "file.arrow", pyarrow.array(TEXTS, "large_string"), stream=False)
    write_arrow(folder / "dictionary.arrow", pyarrow.array(TEXTS).dictionary_encode())
    write_arrow(folder / "bytes.arrow", [text.encode() for text in TEXTS])
    save_dataset(folder / "saved", [TEXTS[:20], TEXTS[20:]])
    write_arrow(folder / "saved" / "cache-0123.arrow", ["a cached row"])
    save_dataset(folder / "splits" / "train", [TEXTS])
    (folder / "splits" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    write_records(folder / "x.array_record", [text.encode() for text in TEXTS])
    tf = [example(text=text.encode(), id=i) for i, text in enumerate(TEXTS)]
    write_records(folder / "t.array_record-00000-of-00001", tf)
    for i in range(3):
        part = folder / "t.parquet" / f"year={i}"
        part.mkdir(parents=True)
        rows = pyarrow.table({"text": TEXTS[20 * i : 20 * i + 20]})
        parquet.write_table(rows, part / "0.parquet")
    (folder / "t.parquet" / "_SUCCESS").write_text("")
    return sorted(str(path) for path in folder.iterdir())


def open_source(tmp_path, source, **settings):
    return dataset.open_dataset(
        config.DataConfig(sources=(source,), cache_dir=str(tmp_path / "cache"), **settings),
        sequence_length=16, seed=3, log=lambda line: None,
    )  # fmt: skip


def read(source, *, start=None, skip_bad=False, text_key="text"):
    skipped = collections.Counter()
    found = documents.read_documents(
        sources.list_files(source).files, text_key=text_key, skip_bad=skip_bad, skipped=skipped,
        start=start or documents.Position(),
    )  # fmt: skip
    return list(found), dict(skipped)
