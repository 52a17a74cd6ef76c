"""Text columns of Arrow files (IPC streams and IPC files), memory-mapped, read row by row.

https://arrow.apache.org/docs/format/Columnar.html. Both forms hold the same messages; a file has
a magic word before them and a footer behind them, which is not needed here.
"""

from collections.abc import Iterator
from typing import Any

from llmx.data import opening, remote, transient

_MAGIC = b"ARROW1"
_END = b"\xff\xff\xff\xff\0\0\0\0"  # ends a stream
_FIRST_MESSAGE = 8  # of a file: behind the magic word and its padding
_TEXT_TYPES = (
    "string", "large_string", "string_view", "binary", "large_binary", "binary_view",
)  # fmt: skip
_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3  # MessageHeader of Message.fbs


def check_text_column(path: str, schema: Any, text_key: str) -> None:
    """Raises ValueError where a pyarrow schema has no single column of that name with text."""
    from pyarrow import types

    if schema.names.count(text_key) > 1:
        raise ValueError(f"{path}: two columns are named {text_key!r}: write it with one")
    if text_key not in schema.names:
        raise ValueError(
            f"{path}: no column {text_key!r} (its columns: {', '.join(map(repr, schema.names))}): "
            "set data.text_key (--text-key) to the one that holds the text"
        )
    kind = schema.field(text_key).type
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if str(kind) not in _TEXT_TYPES:
        raise ValueError(
            f"{path}: column {text_key!r} is of type {kind}, not text: set data.text_key "
            "(--text-key) to a string column"
        )


def values(path: str, start: int, text_key: str) -> Iterator[memoryview | None]:
    """The bytes of one column from row `start` on, None for null.

    Raises ValueError, which names the file, for damaged and compressed ones.
    """
    import pyarrow

    try:
        with _opened(path) as file:
            _check_messages(path, file)
            schema = _open(file, None).schema
            check_text_column(path, schema, text_key)
            batches, row = _open(file, [schema.get_field_index(text_key)]), 0
            for batch in batches:
                if row + batch.num_rows > start:
                    column = _as_bytes(batch.column(0))
                    # Offsets of a damaged file would lead out of its memory.
                    column.validate(full=True)
                    for value in column[max(start - row, 0) :]:
                        yield _buffer(value)
                row += batch.num_rows
    except (pyarrow.ArrowException, OSError, EOFError, OverflowError, MemoryError) as error:
        if transient.is_of_access(error):
            raise
        raise ValueError(
            f"{path}: not readable as Arrow ({error}): the file is damaged or cut off; write it "
            "again"
        ) from error


def _opened(path: str) -> Any:
    """A local file mapped into memory, an object read in blocks."""
    import pyarrow

    if remote.is_url(path):
        return pyarrow.PythonFile(opening.open_random(path), mode="r")
    return pyarrow.memory_map(path)


def _open(file: Any, fields: list[int] | None) -> Any:
    """A stream reader at the beginning of the messages; `fields`: the columns that it decodes."""
    from pyarrow import ipc

    _seek_messages(file)
    return ipc.open_stream(file, options=ipc.IpcReadOptions(included_fields=fields))


def _seek_messages(file: Any) -> None:
    file.seek(0)
    file.seek(_FIRST_MESSAGE if file.read(len(_MAGIC)) == _MAGIC else 0)


def _check_messages(path: str, file: Any) -> None:
    """Raises OSError for a file that is cut off, and ValueError for one that is compressed.

    Reads no content. What a small file decompresses to would have no bound.
    """
    from pyarrow import ipc

    file.seek(0)
    whole = file.read(len(_MAGIC)) == _MAGIC
    ending = _MAGIC if whole else _END
    file.seek(max(opening.status(path).num_bytes - len(ending), 0))
    if file.read(len(ending)) != ending:
        raise OSError("it has no end mark")
    _seek_messages(file)
    for number, message in enumerate(ipc.MessageReader.open_stream(file)):
        if _is_compressed(message.metadata.to_pybytes()):
            raise ValueError(
                f"{path}: message {number} is compressed, which is not read in Arrow files: write "
                "it without compression, or as .parquet"
            )


def _is_compressed(metadata: bytes) -> bool:
    """Whether a message is a batch with compressed buffers: a field of its flatbuffer says so.

    pyarrow does not tell. https://flatbuffers.dev/internals, https://github.com/apache/arrow/blob/
    main/format/Message.fbs.
    """

    def number(at: int, size: int) -> int:
        return int.from_bytes(metadata[at : at + size], "little")

    def field(table: int, slot: int) -> int:
        """Where a field of a table is, 0 if it is absent."""
        vtable = table - int.from_bytes(metadata[table : table + 4], "little", signed=True)
        if vtable < 0 or 4 + 2 * slot >= number(vtable, 2):
            return 0
        offset = number(vtable + 4 + 2 * slot, 2)
        return table + offset if offset else 0

    message = number(0, 4)
    kind, header = field(message, 1), field(message, 2)
    batch = header + number(header, 4)
    if number(kind, 1) == _DICTIONARY_BATCH:
        data = field(batch, 1)
        batch = data + number(data, 4)
    elif number(kind, 1) != _RECORD_BATCH:
        return False
    return field(batch, 3) != 0


def _as_bytes(column: Any) -> Any:
    """Text as bytes, without copying: one bad row must not make the others unreadable."""
    import pyarrow
    from pyarrow import types

    if types.is_dictionary(column.type):
        return pyarrow.DictionaryArray.from_arrays(
            column.indices, _as_bytes(column.dictionary), safe=False
        )
    if types.is_large_string(column.type):
        return column.view(pyarrow.large_binary())
    if str(column.type) == "string_view":  # a type that pyarrow has since 16
        return column.view(pyarrow.binary_view())
    return column.view(pyarrow.binary()) if types.is_string(column.type) else column


def _buffer(value: Any) -> memoryview | None:
    import pyarrow

    if isinstance(value, pyarrow.DictionaryScalar):
        value = value.value
    buffer = value.as_buffer() if value.is_valid else None
    return None if buffer is None else memoryview(buffer)
