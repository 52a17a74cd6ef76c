"""Lines and Parquet become the records that are in them; malformed ones are errors with a place."""

import collections
import gzip
import json

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from llmx.data.records import hashing, parquet, tsv
from llmx.data.records import schema as schema_lib
from llmx.data.records.config import RecordsConfig, schema_of
from llmx.data.records.schema import NONE, Feature, Schema

SMALL = Schema(("I1", "I2"), (Feature("C1", 1000), Feature("C2", 50)))
GOOD = b"1\t3\t-2\t68fd1e64\t80e26c9b\n0\t\t7\t\tabc\n"


def fnv_row(text, name, rows):
    """The row of a text, one byte and one text at a time, in whole numbers of Python."""
    mask, value = 2**64 - 1, 0xCBF29CE484222325
    for byte in name.encode() + b"\0" + text:
        value = (value ^ byte) * 0x100000001B3 & mask
    for multiplier in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        value = (value ^ (value >> 33)) * multiplier & mask
    return (value ^ (value >> 33)) % rows


def read(path, schema=SMALL, **options):
    blocks = list(tsv.read(str(path), schema, **options))
    return schema_lib.concatenated([block.chunk for block in blocks]), blocks


def criteo_line(label, numbers, categories):
    return "\t".join([label, *numbers, *categories])


def test_lines_of_criteo_are_what_plain_python_reads(tmp_path):
    rng, schema, lines, expected = np.random.default_rng(0), schema_of(RecordsConfig()), [], []
    assert len(schema.dense) == 13 and len(schema.features) == 26
    for _ in range(300):
        label = str(rng.integers(2))
        numbers = [str(n) if rng.random() < 0.7 else "" for n in rng.integers(-3, 10**6, 13)]
        texts = [f"{n:08x}" if rng.random() < 0.8 else "" for n in rng.integers(0, 2**32, 26)]
        lines.append(criteo_line(label, numbers, texts))
        expected.append((
            int(label),
            [np.log1p(max(int(text or 0), 0)) for text in numbers],
            [
                fnv_row(text.encode(), one.name, one.rows) if text else NONE
                for text, one in zip(texts, schema.features, strict=True)
            ],
        ))  # fmt: skip
    path = tmp_path / "train.txt"
    path.write_text("\n".join(lines))  # the last line without its end
    chunk, _ = read(path, schema)
    labels, dense, ids = map(list, zip(*expected, strict=True))
    np.testing.assert_array_equal(chunk.labels, labels)
    np.testing.assert_allclose(chunk.dense, dense, rtol=1e-6)
    np.testing.assert_array_equal(chunk.ids, ids)


@pytest.mark.parametrize("name", ["x.tsv", "x.tsv.gz"])
@pytest.mark.parametrize("size", [30, 64, 1 << 20])
def test_blocks_of_any_size_give_the_same_and_reading_goes_on_behind_each(
    tmp_path, monkeypatch, size, name
):
    content = GOOD * 40
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    whole, _ = read(path)
    assert len(whole.labels) == 80
    monkeypatch.setattr(tsv, "BLOCK_BYTES", size)
    again, blocks = read(path)
    for one, other in zip(whole, again, strict=True):
        np.testing.assert_array_equal(one, other)
    assert len(blocks) > 1 or size > len(content)
    done = 0
    for block in blocks[:-1]:
        done += len(block.chunk.labels)
        rest, _ = read(path, offset=block.offset, lines=block.lines)
        np.testing.assert_array_equal(rest.ids, whole.ids[done:])


@pytest.mark.parametrize(
    "line, words",
    [
        (b"1\t3\t4\tab\n", "it has 4 columns, not 5 (label, 2 numbers, 2 categories)"),
        (b"1\t3\t4\tab\tcd\tef\n", "it has 6 columns, not 5"),
        (b"2\t3\t4\tab\tcd\n", "column 1 (label) is '2', not 0 or 1"),
        (b"\t3\t4\tab\tcd\n", "column 1 (label) is '', not 0 or 1"),
        (b"1\t3.5\t4\tab\tcd\n", "column 2 (I1) is '3.5', not a whole number or blank"),
        (b"1\t3\tx\tab\tcd\n", "column 3 (I2) is 'x', not a whole number or blank"),
        # What pyarrow would take.
        (b"1\t 3\t4\tab\tcd\n", "column 2 (I1) is ' 3', not a whole number or blank"),
        (b"1\t0x1F\t4\tab\tcd\n", "column 2 (I1) is '0x1F', not a whole number or blank"),
        (b"01\t3\t4\tab\tcd\n", "column 1 (label) is '01', not 0 or 1"),
        (
            b"1\t3\t-9223372036854775808\tab\tcd\n",
            "column 3 (I2) is '-9223372036854775808', which has more than 63 bits",
        ),
        (
            b"1\t3\t9999999999999999999999\tab\tcd\n",
            "column 3 (I2) is '9999999999999999999999', which has more than 63 bits",
        ),
        (b"1\t3\t4\tab\txyz\n", "column 5 (C2) is 'xyz', not up to 8 hexadecimal digits or blank"),
        (b"1\t3\t4\t123456789\t\n", "column 4 (C1) is '123456789', not up to 8 hexadecimal"),
        (b"1\t3\t4\t\xff\t\n", "column 4 (C1) is '\\\\xff', not up to 8 hexadecimal"),
        (b"\n", "it has 1 columns, not 5"),
    ],
)
@pytest.mark.parametrize("size", [30, 1 << 20])
def test_a_malformed_line_is_an_error_with_file_line_and_remedy(
    tmp_path, monkeypatch, line, words, size
):
    monkeypatch.setattr(tsv, "BLOCK_BYTES", size)
    path = tmp_path / "bad.tsv"
    path.write_bytes(GOOD * 3 + line + GOOD)
    with pytest.raises(ValueError) as error:
        read(path)
    assert str(error.value).startswith(f"{path} line 7: {words}")
    assert "data.skip_bad=True" in str(error.value)
    chunk, blocks = read(path, skip_bad=True)
    good = tmp_path / "good.tsv"
    good.write_bytes(GOOD * 4)
    np.testing.assert_array_equal(chunk.ids, read(good)[0].ids)
    assert sum(block.skipped for block in blocks) == 1


def test_large_numbers_are_read_beside_bad_lines_too(tmp_path):
    path, large = tmp_path / "x.tsv", b"1\t9223372036854775807\t-000000000000000000000007\tab\tcd\n"
    for content in (large, large + b"bad\n"):
        path.write_bytes(content)
        chunk, _ = read(path, skip_bad=True)
        np.testing.assert_allclose(chunk.dense, [[np.log1p(2.0**63), 0]], rtol=1e-6)


def test_a_file_without_line_ends_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tsv, "BLOCK_BYTES", 100)
    path = tmp_path / "x.tsv"
    path.write_bytes(GOOD + b"\0" * 1000)
    with pytest.raises(ValueError, match=r"x.tsv line 3: it has more than .* bytes: check that"):
        read(path)


def test_windows_line_ends_are_read(tmp_path):
    for name, content in (("a", GOOD), ("b", GOOD.replace(b"\n", b"\r\n"))):
        (tmp_path / name).write_bytes(content)
    np.testing.assert_array_equal(read(tmp_path / "a")[0].ids, read(tmp_path / "b")[0].ids)


# ----------------------------------------------------------------------------------------- Parquet

COLUMNS = Schema(
    ("age", "count"), (Feature("user", 100), Feature("word", 40), Feature("seen", 100, 3, "user"))
)


def table(**changes):
    columns = dict(
        label=pa.array([1, 0, 1, 0], pa.int8()),
        age=pa.array([0.5, None, -2.0, 4.0], pa.float64()),
        count=pa.array([3, None, -1, 0], pa.int32()),
        user=pa.array([5, None, 99, 0], pa.int64()),
        word=pa.array(["x", None, "", "yz"]),
        seen=pa.array([[1, 2], None, [], [7, None, 9]], pa.list_(pa.int64())),
        beside=pa.array(["not", "read", "at", "all"]),
    )  # fmt: skip
    return pa.table(columns | changes)


def read_table(tmp_path, value, schema=COLUMNS, start=0, **options):
    path = tmp_path / "x.parquet"
    pq.write_table(value, path, **options)
    parts = list(parquet.read(str(path), schema, label="label", start=start))
    return schema_lib.concatenated([chunk for chunk, _ in parts]), parts


def test_columns_of_parquet_are_the_values_in_them(tmp_path):
    chunk, _ = read_table(tmp_path, table())
    np.testing.assert_array_equal(chunk.labels, [1, 0, 1, 0])
    # Floats as they are, counts as ln(1 + x).
    np.testing.assert_allclose(chunk.dense, [[0.5, np.log(4)], [0, 0], [-2, 0], [4, 0]], rtol=1e-6)
    x, yz = fnv_row(b"x", "word", 40), fnv_row(b"yz", "word", 40)
    assert chunk.ids.tolist() == [
        [5, x, 1, 2, -1], [-1, -1, -1, -1, -1], [99, -1, -1, -1, -1], [0, yz, 7, -1, 9],
    ]  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        dict(label=pa.array([True, False, True, False])),
        dict(label=pa.array([1.0, 0.0, 1.0, 0.0])),
        dict(word=pa.array(["x", None, "", "yz"]).dictionary_encode()),
        dict(word=pa.array(["x", None, "", "yz"], pa.large_string())),
        dict(seen=pa.array([[1, 2], None, [], [7, None, 9]], pa.large_list(pa.int32()))),
        dict(user=pa.array([5, None, 99, 0], pa.uint8())),
        dict(age=pa.array([0.5, None, -2.0, 4.0], pa.float32())),
    ],
    ids=lambda changes: f"{next(iter(changes))} {next(iter(changes.values())).type}",
)
def test_types_that_hold_the_same_give_the_same(tmp_path, changes):
    expected, _ = read_table(tmp_path, table())
    found, _ = read_table(tmp_path, table(**changes))
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_lines_and_parquet_of_the_same_texts_are_the_same_records(tmp_path):
    path = tmp_path / "x.tsv"
    path.write_bytes(GOOD)
    value = pa.table(dict(
        label=[1, 0], I1=pa.array([3, None]), I2=[-2, 7], C1=["68fd1e64", None],
        C2=["80e26c9b", "abc"],
    ))  # fmt: skip
    for one, other in zip(read(path)[0], read_table(tmp_path, value, SMALL)[0], strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("groups, batch", [(2, 3), (4, 1), (100, 3), (3, 100)])
def test_parquet_is_read_on_behind_any_record(tmp_path, monkeypatch, groups, batch):
    monkeypatch.setattr(parquet, "BATCH_RECORDS", batch)
    value = pa.concat_tables([table()] * 3)
    whole, parts = read_table(tmp_path, value, row_group_size=groups)
    assert parts[-1][1] == len(whole.labels) == 12
    for start in range(12):
        rest, _ = read_table(tmp_path, value, start=start, row_group_size=groups)
        np.testing.assert_array_equal(rest.ids, whole.ids[start:])


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(label=[1, 0, 2, 0]), "record 2 column 'label' is 2, not 0 or 1"),
        (dict(label=[1, None, 1, 0]), "record 1 column 'label' is None, not 0 or 1"),
        (dict(label=["a", "b", "c", "d"]), "column 'label' is of type string: a label is a number"),
        (dict(age=[0.5, 1.0, float("nan"), 1.0]), "record 2 column 'age' is nan, not a finite"),
        (dict(age=[0.5, 1.0, 1.0, 1e300]), "record 3 column 'age' is 1e+300, not a finite"),
        (dict(age=["a"] * 4), "column 'age' is of type string, no number: name it in data.records"),
        (dict(user=[0, 100, 1, 1]), "record 1 column 'user' is the id 100, and the feature has ids"
                                    " from 0 to 99: raise data.records.rows=100"),
        (dict(user=[0, 1, 1, -1]), "record 3 column 'user' is the id -1, and the feature has ids "
                                   "from 0 to 99: set data.records.ids='double'"),
        (dict(seen=[[1], [2, 3], [4, 500], []]), "record 2 column 'seen' is the id 500"),
        (dict(seen=[[1], [2, 3, 4, 5], [], []]), "record 1 column 'seen' has 4 ids, more than the 3"
                                                 " of the feature: write 'seen:4'"),
        (dict(user=[0.5, 1.0, 1.0, 1.0]), "column 'user' is of type double, and ids are whole"),
        (dict(word=["x", "y" * 300, "", ""]), "record 1 column 'word' is a text of 300 bytes"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_used_is_an_error_with_its_place(tmp_path, changes, words):
    with pytest.raises(ValueError) as error:
        read_table(tmp_path, table(**changes))
    assert str(error.value).startswith(f"{tmp_path}/x.parquet") and words in str(error.value)


WEIGHED = Schema(("age",), (
    Feature("user", 100, weights="trust"), Feature("word", 40),
    Feature("seen", 100, 3, "user", "seconds"),
))  # fmt: skip
WEIGHTS = dict(
    trust=pa.array([1, None, 0, 2], pa.int8()),
    seconds=pa.array([[0.5, 2], None, [], [1.0, None, 0.25]], pa.list_(pa.float32())),
)


def test_ids_have_weights_of_their_own_column(tmp_path):
    """A weight beside an id that is missing may be missing; on disk they are beside the ids."""
    chunk, _ = read_table(tmp_path, table(**WEIGHTS), WEIGHED)
    wanted = [[1, 0.5, 2, 0], [0, 0, 0, 0], [0, 0, 0, 0], [2, 1, 0, 0.25]]
    assert chunk.weights.tolist() == wanted and chunk.weights.dtype == np.float32
    np.testing.assert_array_equal(chunk.ids, read_table(tmp_path, table())[0].ids)
    for one, other in zip(chunk, WEIGHED.unpack(WEIGHED.pack(chunk)), strict=True):
        np.testing.assert_array_equal(one, other)
    assert schema_lib.from_json(WEIGHED.as_json()) == WEIGHED
    assert all(len(one) == 4 for one in COLUMNS.as_json()["features"])  # as before


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(trust=[1, 1, 1, -0.5]), "column 'trust' is -0.5, and the weight of an id is a"),
        (dict(trust=[None, 1, 1, 1]), "record 0 column 'trust' is None"),
        (dict(trust=["a"] * 4), "column 'trust' is of type string, no number"),
        (dict(trust=[[1.0]] * 4), "column 'trust' is of type list<"),
        (dict(seconds=[1.0] * 4), "'seconds' is of type double, and its ids 'seen' of"),
        (dict(seconds=[[1.0, 2.0], None, [], [1.0]]), "record 3 column 'seconds' has 1 weights, and"
                                                      " 'seen' 3 ids"),
        (dict(seconds=[[1.0, float("inf")], None, [], [1.0] * 3]), "record 0 column"),
        (dict(seconds=[[1.0, 2.0], None, [], [1.0, 1.0, float("nan")]]), "record 3"),
    ],
)  # fmt: skip
def test_a_weight_that_cannot_be_used_is_an_error_with_its_place(tmp_path, changes, words):
    with pytest.raises(ValueError) as error:
        read_table(tmp_path, table(**WEIGHTS | changes), WEIGHED)
    assert str(error.value).startswith(f"{tmp_path}/x.parquet") and words in str(error.value)


def test_missing_columns_and_damaged_files_are_errors(tmp_path):
    with pytest.raises(ValueError, match="has no column 'user', but label, age"):
        read_table(tmp_path, table().drop_columns("user"))
    path = tmp_path / "x.parquet"
    path.write_bytes(b"PAR1 this is none")
    with pytest.raises(ValueError, match=r"x\.parquet cannot be read as Parquet"):
        list(parquet.read(str(path), COLUMNS, label="label"))


# ----------------------------------------------------------------------------------- ids and order


def test_rows_of_texts_are_spread_evenly_and_apart_by_table():
    texts = np.array([f"{number:x}".encode() for number in range(20_000)])
    rows = hashing.of_texts(texts, Feature("C1", 100))[:, 0]
    assert rows.dtype == np.int32 and rows.min() == 0 and rows.max() == 99
    counts = np.bincount(rows, minlength=100)
    assert np.sum((counts - 200.0) ** 2 / 200) < 160  # chi-squared of 99 degrees: 5 sigma
    assert 100 < (rows == hashing.of_texts(texts, Feature("C2", 100))[:, 0]).sum() < 300
    largest = hashing.of_texts(texts, Feature("C1", schema_lib.MAX_ROWS))
    assert largest.min() >= 0 and len(np.unique(largest)) > 19_990
    expected = [fnv_row(text, "C1", 100) for text in texts[:50].tolist()]
    assert rows[:50].tolist() == expected


def test_two_hashes_tell_apart_what_one_does_not():
    """Of 300 texts in 100 rows most share a row with another, and few share both."""
    texts = np.array([f"{number:x}".encode() for number in range(300)])
    one = hashing.of_texts(texts, Feature("C1", 100))
    two = hashing.of_texts(texts, Feature("C1", 100, hashes=2))
    np.testing.assert_array_equal(two[:, :1], one)
    assert len(np.unique(one)) <= 100 < 290 < len(np.unique(two, axis=0))
    counts = np.histogram2d(*two.T, bins=5)[0]  # independent: 12 of each pair of fifths
    assert np.sum((counts - 12.0) ** 2 / 12) < 24 + 5 * np.sqrt(48)
    numbers = np.array([-5, 0, 2**62, 7])
    rows = hashing.of_numbers(numbers, Feature("C1", 1000, hashes=2))
    assert rows.shape == (4, 2) and len(np.unique(rows)) == 8 and 0 <= rows.min() <= 999


def test_ids_of_64_bits_and_pairs_of_rows_come_through_files(tmp_path):
    large = [2**63 - 1, None, 0, 2**40]
    for kind in ("exact", "double"):
        config = RecordsConfig(
            dense=("age", "count"), features=("user", "word", "seen:3@item"), rows=100, ids=kind
        )
        schema = schema_of(config)
        value = table(user=pa.array(large, pa.int64()))
        chunk, _ = read_table(tmp_path, value, schema)
        for one, other in zip(chunk, schema.unpack(schema.pack(chunk)), strict=True):
            np.testing.assert_array_equal(one, other)
            assert one.dtype == other.dtype
        assert schema_lib.from_json(json.loads(json.dumps(schema.as_json()))) == schema
        if kind == "exact":
            text = fnv_row(b"x", "word", 2**64) >> 1
            assert chunk.ids.dtype == np.int64
            assert chunk.ids.tolist() == [
                [2**63 - 1, text, 1, 2, -1], [-1, -1, -1, -1, -1], [0, -1, -1, -1, -1],
                [2**40, fnv_row(b"yz", "word", 2**64) >> 1, 7, -1, 9],
            ]  # fmt: skip
            continue
        assert chunk.ids.shape == (4, 10) and chunk.ids.max() < 100
        assert ((chunk.ids[:, ::2] < 0) == (chunk.ids[:, 1::2] < 0)).all()
        assert chunk.ids[0, 2] == fnv_row(b"x", "word", 100)
        np.testing.assert_array_equal(chunk.ids[1], np.full(10, NONE))
    with pytest.raises(ValueError, match="the id -5, and the feature has ids from 0 to 922"):
        config.ids = "exact"
        read_table(tmp_path, table(user=[0, -5, 1, 1]), schema_of(config))
    path = tmp_path / "x.tsv"
    path.write_bytes(GOOD)
    schema = schema_of(RecordsConfig(dense=("I1", "I2"), features=("C1", "C2"), ids="exact"))
    assert read(path, schema)[0].ids[0, 1] == fnv_row(b"80e26c9b", "C2", 2**64) >> 1


@pytest.mark.parametrize(
    "text, expected",
    [
        ("user", Feature("user", 9)),
        ("seen:50", Feature("seen", 9, 50)),
        ("seen:50@item", Feature("seen", 9, 50, "item")),
        ("other@item", Feature("other", 9, 1, "item")),
        ("seen*seconds", Feature("seen", 9, 1, "", "seconds")),
        ("seen:50*seconds@item", Feature("seen", 9, 50, "item", "seconds")),
    ],
)
def test_features_are_written_as_text(text, expected):
    assert schema_lib.parse_feature(text, 9) == expected


@pytest.mark.parametrize(
    "text", ["", ":3", "a:", "a:0", "a:x", "a:99999999", "a@", "a:2:3", "a*", "a@b*c"]
)
def test_what_is_no_feature_is_an_error(text):
    with pytest.raises(ValueError, match="is no feature: write the name of a column"):
        schema_lib.parse_feature(text, 9)


def test_records_are_packed_and_unpacked_whatever_their_ids():
    sizes = collections.OrderedDict(a=255, b=256, c=65_535, d=65_536, e=schema_lib.MAX_ROWS)
    schema = Schema(("x",), tuple(Feature(name, size, 2) for name, size in sizes.items()))
    ids = np.repeat([[size - 1 for size in sizes.values()], [0] * 5, [NONE] * 5], 2, axis=1)
    dense = np.array([[0.1], [-3e38], [0]], np.float32)
    chunk = schema_lib.Chunk(np.array([1, 0, 1], np.uint8), dense, ids.astype(np.int32),
                             schema_lib.no_weights(3))  # fmt: skip
    packed = schema.pack(chunk)
    assert packed.dtype.itemsize == 1 + 4 + 2 * (1 + 2 + 2 + 4 + 4)
    for one, other in zip(chunk, schema.unpack(packed), strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype
    assert schema_lib.from_json(schema.as_json()) == schema
