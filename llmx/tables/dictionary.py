"""Numbers for ids of 64 bits: an exact hash map on the host, many ids at a time.

Open addressing with linear probing (Knuth, The Art of Computer Programming, volume 3, 6.4), each
probe one NumPy operation over all ids that are still looked for. A place of the map holds a number,
at which the id itself is kept: ids that share a hash are told apart. The map grows with what is in
it; arrays by number are as large as they may become, of which the system gives only pages that are
written.

Letters: N ids of a call.
"""

import numpy as np

NONE = -1  # no number: an id that is not there
_EMPTY, _REMOVED = -1, -2  # places
_LEAST = 1 << 10
# Share of the places that is in use, at most: then searches end after few probes.
_LOAD = 0.6


class Dictionary:
    """A number below `capacity` for each pair of a table and an id."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.ids = np.empty(max(capacity, 2), np.uint64)  # by number
        self.tables = np.empty(max(capacity, 2), np.uint16)
        self._end = 0  # numbers from here on were never given
        self._free = np.zeros(0, np.int32)  # numbers that were given back
        self._places = np.full(_LEAST, _EMPTY, np.int32)
        self._used = 0  # places that are not empty

    def __len__(self) -> int:
        return self._end - len(self._free)

    @staticmethod
    def bytes_of(capacity: int) -> int:
        """Bytes when it is full."""
        return capacity * 10 + 4 * _places_for(capacity)

    def find(self, ids_N: np.ndarray, tables_N: np.ndarray) -> np.ndarray:
        """The number of each id (uint64) of a table (uint16), int32 [N]; NONE of others."""
        found_N = np.full(len(ids_N), NONE, np.int32)
        left, at = np.arange(len(ids_N)), self._first(ids_N, tables_N)
        while left.size:
            number = self._places[at]
            same = (number >= 0) & (self.ids[number] == ids_N[left])
            same &= self.tables[number] == tables_N[left]
            found_N[left[same]] = number[same]
            goes_on = ~same & (number != _EMPTY)
            left, at = left[goes_on], self._next(at[goes_on])
        return found_N

    def add(self, ids_N: np.ndarray, tables_N: np.ndarray) -> np.ndarray:
        """New numbers, int32 [N], of ids that are different and not there; there is room."""
        assert len(self) + len(ids_N) <= self.capacity, "no room: remove some first"
        again = min(len(ids_N), len(self._free))
        self._free, old = np.split(self._free, [len(self._free) - again])
        new = np.arange(self._end, self._end + len(ids_N) - again, dtype=np.int32)
        self._end += len(new)
        numbers_N = np.concatenate([old, new])
        self.ids[numbers_N], self.tables[numbers_N] = ids_N, tables_N
        if self._used + len(ids_N) > _LOAD * len(self._places):
            self._rebuild()
        else:
            self._put(numbers_N)
        return numbers_N

    def remove(self, numbers_N: np.ndarray) -> None:
        """Different numbers, which are given back."""
        numbers, at = numbers_N, self._first(self.ids[numbers_N], self.tables[numbers_N])
        while numbers.size:
            found = self._places[at] == numbers
            self._places[at[found]] = _REMOVED
            numbers, at = numbers[~found], self._next(at[~found])
        self._free = np.concatenate([self._free, numbers_N.astype(np.int32)])

    def numbers(self) -> np.ndarray:
        """All numbers that are in use, int32, ascending."""
        there = np.ones(self._end, bool)
        there[self._free] = False
        return np.flatnonzero(there).astype(np.int32)

    @property
    def num_bytes(self) -> int:
        """Of memory that is in use."""
        return self._end * 10 + self._places.nbytes + self._free.nbytes

    def _first(self, ids_N: np.ndarray, tables_N: np.ndarray) -> np.ndarray:
        """Where the search for each begins: a hash by MurmurHash3's finalizer."""
        bits = ids_N ^ (tables_N.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        for multiplier in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            bits = (bits ^ (bits >> np.uint64(33))) * np.uint64(multiplier)
        # The high half as a share of the places, of which there are any number.
        high = bits >> np.uint64(32)
        return ((high * np.uint64(len(self._places))) >> np.uint64(32)).astype(np.int64)

    def _next(self, at: np.ndarray) -> np.ndarray:
        at = at + 1
        at[at == len(self._places)] = 0
        return at

    def _put(self, numbers: np.ndarray) -> None:
        at = self._first(self.ids[numbers], self.tables[numbers])
        while numbers.size:
            before = self._places[at]
            free = before < 0
            self._places[at[free]] = numbers[free]  # of several for one place the last stays
            won = free & (self._places[at] == numbers)
            self._used += int(np.count_nonzero(before[won] == _EMPTY))
            numbers, at = numbers[~won], self._next(at[~won])

    def _rebuild(self) -> None:
        """Without removed places, and with room for as many ids again."""
        size = _places_for(min(2 * len(self), self.capacity))
        self._places = None  # freed before the new ones are there
        self._places, self._used = np.full(max(size, _LEAST), _EMPTY, np.int32), 0
        numbers = self.numbers()
        for first in range(0, len(numbers), 1 << 20):
            self._put(numbers[first : first + (1 << 20)])


def _places_for(capacity: int) -> int:
    """For so many ids, and as many removed ones as make a rebuild rare."""
    return int(capacity * 1.25 / _LOAD) + 1
