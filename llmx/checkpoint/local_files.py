"""The shards of one process at one step, in one file of the local tier.

A file is MAGIC, the length and CRC-32 of its header, the header (JSON), and the shards' bytes, one
after the other. The header has the document of a checkpoint (`manifest`) and for every shard its
leaf, its place in the global array and its CRC-32. The shards that the process which holds the
copy has anyway (replicated parameters) come last, and a copy ends before them.
"""

import concurrent.futures
import dataclasses
import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llmx.checkpoint.manifest import Corrupt

MAGIC = b"llmxtier"
LENGTHS = struct.Struct("<QI")  # of the header: its bytes and CRC-32
CHUNK = 16 * 2**20  # bytes per write or read


class Shard(NamedTuple):
    """A part of one array, as it stands in a file."""

    leaf: str
    start: tuple[int, ...]  # of its first element in the global array
    shape: tuple[int, ...]
    dtype: str
    size: int  # bytes
    crc32: int = 0

    @property
    def place(self) -> tuple:
        """What makes it the same part of the same array in another file."""
        return self.leaf, self.start, self.shape, self.dtype


@dataclasses.dataclass(frozen=True)
class Header:
    """What a file says about itself."""

    name: str  # of the step: the same in all processes that wrote it together
    step: int
    run: str
    process: int
    num_processes: int
    document: dict  # sealed, as in the `meta` of a checkpoint
    shards: tuple[Shard, ...]
    num_sent: int  # the first ones, which a copy has too

    def encoded(self) -> bytes:
        """The bytes before the shards."""
        text = json.dumps(dataclasses.asdict(self)).encode()
        return MAGIC + LENGTHS.pack(len(text), zlib.crc32(text)) + text


class Snapshot:
    """The shards of this process in host memory: copied from the devices, then written and sent.

    The buffer is kept for the next step, so that no save waits for new pages of memory.
    """

    def __init__(self, receiver: int | None) -> None:
        self._receiver = receiver  # the process that holds the copy
        self._like: dict[str, tuple] = {}
        self._buffer = np.empty(0, np.uint8)
        self.shards: list[Shard] = []
        self.num_sent = 0

    @property
    def size(self) -> int:
        """Bytes of all shards."""
        return self._buffer.size

    @property
    def sent_size(self) -> int:
        """Bytes of the shards that the receiver does not have."""
        return sum(shard.size for shard in self.shards[: self.num_sent])

    def take(self, arrays: Mapping[str, jax.Array]) -> None:
        """Copies the addressable shards of `arrays`, each once, to host memory."""
        like = {name: (x.shape, x.dtype, x.sharding) for name, x in arrays.items()}
        if like != self._like:
            self._plan(arrays)
            self._like = like
        with jax.transfer_guard("allow"):
            parts = {
                (name, _start(part.index)): part.data
                for name, array in arrays.items()
                for part in array.addressable_shards
            }
            wanted = [parts[shard.leaf, shard.start] for shard in self.shards]
            for data in wanted:
                data.copy_to_host_async()
            offset = 0
            for shard, data in zip(self.shards, wanted, strict=True):
                # On the CPU this is a view of the device's buffer, which the next step overwrites.
                values = np.ascontiguousarray(np.asarray(data)).reshape(-1).view(np.uint8)
                self._buffer[offset : offset + shard.size] = values
                offset += shard.size

    def seal(self) -> None:
        """Computes the checksums of the shards."""
        views = _views(memoryview(self._buffer), self.shards)
        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            sums = list(threads.map(zlib.crc32, views))
        self.shards = [s._replace(crc32=crc) for s, crc in zip(self.shards, sums, strict=True)]

    def bytes_of(self, num_shards: int) -> memoryview:
        """The first shards' bytes, one after the other."""
        return memoryview(self._buffer)[: sum(shard.size for shard in self.shards[:num_shards])]

    def _plan(self, arrays: Mapping[str, jax.Array]) -> None:
        sent, held = [], []
        for name, array in arrays.items():
            theirs = set()
            if self._receiver is not None:
                places = array.sharding.devices_indices_map(array.shape)
                theirs = {_start(i) for d, i in places.items() if d.process_index == self._receiver}
            mine = {_start(part.index): part.data.shape for part in array.addressable_shards}
            for start, shape in mine.items():
                size = int(np.prod(shape, dtype=np.int64)) * array.dtype.itemsize
                shard = Shard(name, start, tuple(shape), str(array.dtype), size)
                (held if start in theirs else sent).append(shard)
        self.shards, self.num_sent = sent + held, len(sent)
        self._buffer = np.empty(sum(shard.size for shard in self.shards), np.uint8)


def write(path: Path, header: bytes, data: memoryview) -> None:
    """Writes a file; it has its name only once it is complete and on disk."""
    with create(path) as file:
        file.write(header)
        for begin in range(0, len(data), CHUNK):
            file.write(data[begin : begin + CHUNK])


class create:
    """A file that gets its name by a rename at the end, and is removed after an error."""

    def __init__(self, path: Path) -> None:
        self._path, self._temporary = path, path.with_name(f"{path.name}.tmp")

    def __enter__(self):
        self._file = open(self._temporary, "wb")
        return self._file

    def __exit__(self, kind: Any, *_: object) -> None:
        try:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
                os.replace(self._temporary, self._path)
        finally:
            self._file.close()
            self._temporary.unlink(missing_ok=True)


def read_header(file: Any) -> Header:
    """The header of an open file, which is left at the shards' bytes. Raises Corrupt."""
    fixed = file.read(len(MAGIC) + LENGTHS.size)
    if len(fixed) < len(MAGIC) + LENGTHS.size or not fixed.startswith(MAGIC):
        raise Corrupt("it does not begin as a file of the local tier")
    length, crc = LENGTHS.unpack(fixed[len(MAGIC) :])
    rest = os.fstat(file.fileno()).st_size - file.tell()
    if length > rest:
        raise Corrupt("its header is cut off")
    text = file.read(length)
    if zlib.crc32(text) != crc:
        raise Corrupt("its header does not match its checksum")
    values = json.loads(text)
    shards = tuple(
        Shard(leaf, tuple(start), tuple(shape), *others)
        for leaf, start, shape, *others in values.pop("shards")
    )
    return Header(**values, shards=shards)


def shard_bytes(own: Path, copy: Path | None = None) -> Iterator[tuple[Shard, memoryview]]:
    """The bytes of a process's shards, in the order of its header: (shard, bytes) of each.

    Args:
      own: the file that the process wrote; or, with `copy`, that of the process which holds `copy`
        and which has the shards that the copy leaves out.

    Raises Corrupt for a file that is cut off or a shard that does not match its checksum.
    """
    with open(copy or own, "rb") as file, open(own, "rb") as other:
        header, places = read_header(file), {}
        if copy is not None:
            holder, offset = read_header(other), other.tell()
            for shard in holder.shards:
                places[shard.place] = offset
                offset += shard.size
        for number, shard in enumerate(header.shards):
            source = file
            if copy is not None and number >= header.num_sent:
                if shard.place not in places:
                    raise Corrupt(f"the holder of its copy has no {shard.leaf}")
                source = other
                source.seek(places[shard.place])
            data = np.empty(shard.size, np.uint8)
            if source.readinto(memoryview(data)) != shard.size:
                raise Corrupt(f"it is cut off in leaf {shard.leaf}")
            if zlib.crc32(data) != shard.crc32:
                raise Corrupt(f"checksum differs in leaf {shard.leaf}")
            yield shard, memoryview(data)


class Elsewhere(Exception):
    """The shards of a file are not those that this process needs on the present devices."""


def read_arrays(path: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """The wanted global arrays, of this process's shards in the file that it wrote.

    Raises Corrupt, and Elsewhere if the file has other shards than the shardings ask for.
    """
    with open(path, "rb") as file:
        have = {(shard.leaf, shard.start): shard for shard in read_header(file).shards}
    parts: dict[tuple, list] = {}  # (leaf, start) -> the devices that want it
    for name, leaf in wanted.items():
        for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
            place = name, _start(index)
            shape = leaf.sharding.shard_shape(leaf.shape)
            if place not in have or have[place].shape != shape:
                raise Elsewhere(f"leaf {name} was split in another way")
            parts.setdefault(place, []).append(device)
    arrays: dict[str, dict] = {name: {} for name in wanted}
    for shard, data in shard_bytes(path):
        values = np.frombuffer(data, jnp.dtype(shard.dtype)).reshape(shard.shape)
        for device in parts.get((shard.leaf, shard.start), ()):
            memory = wanted[shard.leaf].sharding.memory_kind
            to = jax.sharding.SingleDeviceSharding(device, memory_kind=memory)
            arrays[shard.leaf][device] = jax.device_put(values, to, may_alias=False)
    return {
        name: jax.block_until_ready(
            jax.make_array_from_single_device_arrays(
                leaf.shape, leaf.sharding, list(arrays[name].values())
            )
        )
        for name, leaf in wanted.items()
    }


def _start(index: tuple[slice, ...]) -> tuple[int, ...]:
    return tuple(part.start or 0 for part in index)


def _views(data: memoryview, shards: list[Shard]) -> Iterator[memoryview]:
    offset = 0
    for shard in shards:
        yield data[offset : offset + shard.size]
        offset += shard.size
