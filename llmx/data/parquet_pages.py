"""Sizes of Parquet pages before they are decompressed: a page of a few kB can hold gigabytes.

pyarrow does not tell them. A page begins with a Thrift struct in the compact protocol
(https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md), `PageHeader` of
https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift.
"""

from collections.abc import Iterator
from typing import Any, BinaryIO

_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 12
_INTEGERS = (4, 5, 6)
_HEADER_BYTES = (1 << 16, 1 << 24)  # tried for one header; its statistics can hold long values
_MAX_DEPTH = 8


def sizes(file: BinaryIO, column: Any) -> Iterator[int]:
    """The size, decompressed, of each page in a column chunk of pyarrow's metadata.

    A dictionary page is the first. Raises ValueError for headers that are not as the format says.
    """
    offset = column.data_page_offset
    if column.dictionary_page_offset is not None:
        offset = min(offset, column.dictionary_page_offset)
    end = offset + column.total_compressed_size
    while offset < end:
        fields, length = _read_header(file, offset)
        uncompressed, compressed = fields.get(2), fields.get(3)
        if not isinstance(uncompressed, int) or not isinstance(compressed, int) or compressed < 0:
            raise ValueError(f"no page header at byte {offset}")
        yield uncompressed
        offset += length + compressed


def _read_header(file: BinaryIO, offset: int) -> tuple[dict[int, Any], int]:
    """The integers of the header at a byte of the file, and its length."""
    for size in _HEADER_BYTES:
        file.seek(offset)
        reader = _Reader(file.read(size))
        try:
            return reader.struct(0), reader.at
        except _CutOff:
            continue
    raise ValueError(f"no whole page header at byte {offset}")


class _CutOff(Exception):
    """A header is longer than what was read of the file."""


class _Reader:
    """Reads values of the compact protocol; every read moves on or raises."""

    def __init__(self, raw: bytes):
        self.raw, self.at = raw, 0

    def _byte(self) -> int:
        if self.at >= len(self.raw):
            raise _CutOff
        self.at += 1
        return self.raw[self.at - 1]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                return value
            if shift > 63:
                raise ValueError("a page header holds a number of more than 64 bits")

    def _integer(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def struct(self, depth: int) -> dict[int, Any]:
        """The integers of a struct by field; other values are passed over."""
        found, field = {}, 0
        while head := self._byte():
            field = field + (head >> 4) if head >> 4 else self._integer()
            found[field] = self._value(head & 15, depth)
        return found

    def _value(self, kind: int, depth: int) -> int | None:
        if depth > _MAX_DEPTH:
            raise ValueError("a page header is nested too deeply")
        if kind in _INTEGERS:
            return self._integer()
        if kind == _STRUCT:
            self.struct(depth + 1)
        elif kind in (_LIST, _SET):
            head = self._byte()
            count = head >> 4 if head >> 4 != 15 else self._varint()
            if count > len(self.raw):
                raise ValueError("a page header holds a list that is longer than itself")
            for _ in range(count):
                if head & 15 in (_TRUE, _FALSE):
                    self._byte()
                else:
                    self._value(head & 15, depth + 1)
        elif kind == _BINARY:
            length = self._varint()  # which moves on, too
            self.at += length
        elif kind in (_BYTE, _DOUBLE):
            self.at += 8 if kind == _DOUBLE else 1
        elif kind not in (_TRUE, _FALSE):
            raise ValueError(f"a page header holds a value of the unknown kind {kind}")
        return None
