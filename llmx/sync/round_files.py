"""The folder in which groups of replicas, each a program of its own, exchange what they have moved.

    run.json                             what all groups must have in common
    rounds/STEPS/begun/GROUP             a group is in the round that ends after so many steps
    rounds/STEPS/moved/GROUP/PARAMETER   what it has moved, numbers in fp32
    rounds/STEPS/moved/GROUP.json        ... its tokens and checksums, written last
    rounds/STEPS/closed.json             the groups that count in the round, written once
    outer/STEPS/GROUP/params/PARAMETER, .../momentum/PARAMETER
                                         what all groups share after a round, the newest two, as
                                         this group has written it
    outer/STEPS.json                     ... which group's files count, and their checksums

Every file is written at once and as a whole, and what decides something (`run.json`, `closed.json`,
`outer/STEPS.json`) by the first writer only: a conditional write of TensorStore, which is atomic on
local disks, NFS and object stores. So a group may be killed at any time, and all that read a round
find the same groups in it. No group writes into files of another.
"""

import json
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from llmx.data import remote
from llmx.runtime import ownership

IO_SECONDS = 600.0  # of one parameter


class Outer(NamedTuple):
    """What all groups share after a round, by parameter name, whole and on the host."""

    steps: int  # that a run has taken then
    params: dict[str, np.ndarray]
    momentum: dict[str, np.ndarray]  # of the outer optimizer; {} = it has none


class RoundFiles:
    """What group number `group` reads and writes. Raises OSError where the folder cannot be used.

    `shapes`: of all parameters, by name; they are fp32.
    """

    def __init__(self, folder: str, group: int, shapes: Mapping[str, Sequence[int]]):
        self._folder, self._group, self._shapes = folder, group, shapes
        self._store = _tried(lambda: ownership.open_store(folder), folder)

    def agree(self, values: Mapping[str, Any]) -> None:
        """Raises ValueError where the group that came first has other values."""
        mine = json.loads(json.dumps(values))
        self._create("run.json", mine)
        first = self._document("run.json")
        if wrong := [key for key in {**first, **mine} if first.get(key) != mine.get(key)]:
            rows = [
                f"{key} is {first.get(key)!r} there and {mine.get(key)!r} here" for key in wrong
            ]
            more = [f"and {len(rows) - 8} more"] if len(rows) > 8 else []
            raise ValueError(
                f"sync.exchange={self._folder} is of groups that train otherwise: "
                f"{'; '.join([*rows[:8], *more])}. Give all groups the same config, or begin anew "
                "in another folder"
            )

    # ------------------------------------------------------------------------------ a round

    def begin(self, steps: int) -> None:
        """Says that this group takes part in the round that ends after so many steps."""
        self._write(f"{_round(steps)}begun/{self._group:04d}", b"")

    def publish(self, steps: int, moved: Mapping[str, np.ndarray], tokens: float) -> None:
        """Leaves what this group has moved in a round; not again where it has, before a restart."""
        place = f"{_round(steps)}moved/{self._group:04d}"
        if self._read(f"{place}.json") is None:
            self._write_arrays(f"{place}/", moved)
            sums = {name: zlib.crc32(_bytes(array)) for name, array in moved.items()}
            self._write(f"{place}.json", _text({"tokens": tokens, "crc32": sums}))

    def groups_in(self, steps: int) -> tuple[set[int], set[int]]:
        """The groups that have begun a round, and those that have published what they moved."""
        begun, moved = (
            {int(key.removesuffix(".json")) for key in self._list(f"{_round(steps)}{what}/")
             if key.endswith(end) and "/" not in key}
            for what, end in (("begun", ""), ("moved", ".json"))
        )  # fmt: skip
        return begun, moved

    def closed(self, steps: int) -> list[int] | None:
        """The groups that count in a round; None as long as it is open."""
        found = self._document(f"{_round(steps)}closed.json")
        return None if found is None else found["groups"]

    def close(self, steps: int, groups: Sequence[int]) -> list[int]:
        """Closes a round with these groups, unless another has: those that count."""
        self._create(f"{_round(steps)}closed.json", {"groups": list(groups), "by": self._group})
        return self.closed(steps)

    def tokens(self, steps: int, groups: Sequence[int]) -> list[float]:
        """The tokens that each of these groups has trained on in a round."""
        return [self._moved(steps, group)["tokens"] for group in groups]

    def moved(self, steps: int, group: int, name: str) -> np.ndarray:
        """What a group has moved of a parameter. Raises OSError where it was damaged."""
        sums = self._moved(steps, group)["crc32"]
        return self._array(f"{_round(steps)}moved/{group:04d}/", name, sums[name])

    def _moved(self, steps: int, group: int) -> dict[str, Any]:
        found = self._document(key := f"{_round(steps)}moved/{group:04d}.json")
        if found is None:
            raise FileNotFoundError(f"{self._folder}/{key} is gone")
        return found

    # -------------------------------------------------------------------- what all groups share

    def newest(self) -> int | None:
        """The steps after which the newest of `write_outer` is; None = there is none."""
        found = [int(key[:-5]) for key in self._list("outer/") if key.endswith(".json")]
        return max(found, default=None)

    def write_outer(self, outer: Outer) -> None:
        """Leaves what all groups share, unless it is there; removes what is older than the one
        before it.

        Before the first round every group does so, each with what it begins with: the first counts.
        """
        key, sums = f"outer/{outer.steps:010d}", {}
        if self._read(f"{key}.json") is not None:
            return
        place = f"{key}/{self._group:04d}/"
        for what, arrays in (("params", outer.params), ("momentum", outer.momentum)):
            self._write_arrays(f"{place}{what}/", arrays)
            sums[what] = {name: zlib.crc32(_bytes(array)) for name, array in arrays.items()}
        self._create(f"{key}.json", {"by": self._group, "crc32": sums})
        found = self._document(f"{key}.json")
        if found is None or found["by"] != self._group:
            self._remove(place)
        steps = sorted(int(name[:-5]) for name in self._list("outer/") if name.endswith(".json"))
        for old in steps[:-2]:
            self._remove(f"outer/{old:010d}")
        if len(steps) > 1:
            for folder in {key.partition("/")[0] for key in self._list("rounds/")}:
                if int(folder) < steps[-2]:
                    self._remove(_round(int(folder)))

    def read_outer(self, steps: int) -> Outer:
        """What all groups share after so many steps."""
        key = f"outer/{steps:010d}"
        found = self._document(f"{key}.json")
        if found is None:
            raise FileNotFoundError(f"{self._folder}/{key}.json is gone")
        place = f"{key}/{found['by']:04d}/"
        arrays = {
            what: {name: self._array(f"{place}{what}/", name, of[name]) for name in of}
            for what, of in found["crc32"].items()
        }
        return Outer(steps, arrays["params"], arrays["momentum"])

    # ------------------------------------------------------------------------------- the store

    def _write_arrays(self, place: str, arrays: Mapping[str, np.ndarray]) -> None:
        for name, array in arrays.items():
            self._write(place + _file(name), _bytes(array))

    def _array(self, place: str, name: str, crc32: int) -> np.ndarray:
        content = self._read(place + _file(name))
        if content is None:
            raise FileNotFoundError(f"{self._folder}/{place}{_file(name)} is gone")
        if zlib.crc32(content) != crc32:
            raise OSError(f"{self._folder}/{place}{_file(name)} is damaged: its checksum differs")
        return np.frombuffer(content, "<f4").reshape(self._shapes[name])

    def _document(self, key: str) -> Any:
        content = self._read(key)
        return None if content is None else json.loads(content)

    def _create(self, key: str, document: Any) -> None:
        """Writes a file unless it is there."""
        read = lambda: self._store.read(key).result(timeout=IO_SECONDS)  # noqa: E731
        found = self._tried(read)
        if found.state == "missing":
            write = self._store.write
            stamp, text = found.stamp.generation, _text(document)
            self._tried(lambda: write(key, text, if_equal=stamp).result(timeout=IO_SECONDS))

    def _write(self, key: str, content: bytes) -> None:
        self._tried(lambda: self._store.write(key, content).result(timeout=IO_SECONDS))

    def _read(self, key: str) -> bytes | None:
        found = self._tried(lambda: self._store.read(key).result(timeout=IO_SECONDS))
        return None if found.state == "missing" else bytes(found.value)

    def _list(self, prefix: str) -> list[str]:
        keys = self._tried(lambda: self._store.list(_range(prefix)).result(timeout=IO_SECONDS))
        return [key.decode().removeprefix(prefix) for key in keys]

    def _remove(self, prefix: str) -> None:
        self._tried(lambda: self._store.delete_range(_range(prefix)).result(timeout=IO_SECONDS))

    def _tried(self, action: Callable[[], Any]) -> Any:
        return _tried(action, self._folder)


def _tried(action: Callable[[], Any], folder: str) -> Any:
    """Does it again where the store does not answer, a few times. Raises OSError."""
    for attempt in range(1, remote.ATTEMPTS + 1):
        try:
            return action()
        except Exception as error:  # TensorStore raises several types
            if attempt == remote.ATTEMPTS:
                text = " ".join(str(error).split())[:300] or type(error).__name__
                raise OSError(f"sync.exchange={folder} cannot be used: {text}") from error
            time.sleep(remote.PAUSE_SECONDS)


def _range(prefix: str) -> Any:
    import tensorstore

    return tensorstore.KvStore.KeyRange(prefix, prefix + "\x7f")


def _round(steps: int) -> str:
    return f"rounds/{steps:010d}/"


def _file(name: str) -> str:
    return name.replace("/", ".")


def _text(document: Any) -> bytes:
    return json.dumps(document, indent=1).encode()


def _bytes(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array, "<f4").tobytes()
