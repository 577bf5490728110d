"""Keys and values of prefixes that were computed before, under a byte budget.

Invariant: an entry's ids and its keys and values belong together, and the entries' bytes never exceed the budget. An
entry serves any sequence that shares a run with its beginning.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

import torch

from rm_core.attention import LayerKV
from rm_core.tree import MIN_SHARED, shared_length

Key = tuple[int, ...]


@dataclass(frozen=True)
class CachedPrefix:
    """Ids and, layer by layer, their keys and values."""

    ids: Key
    layers: tuple[LayerKV, ...]

    @property
    def num_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for layer in self.layers for x in layer)


class PrefixCache:
    """Least recently used prefixes. Lanes of one batch may use it at the same time."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_evicted = 0
        """Entries dropped so far to make room for others."""
        self._bytes_of_token = 0.0
        self._entries: OrderedDict[Key, CachedPrefix] = OrderedDict()
        self._sorted: list[Key] = []
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, ids: Key) -> tuple[CachedPrefix, int] | None:
        """The entry that shares the longest run with the beginning of ``ids``, and the run's length.

        The sequence's last token is never taken from the cache: its hidden state is what is wanted. Lengths are
        multiples of MIN_SHARED, so that siblings whose answers begin alike still stand under one prefix.
        """
        with self._lock:
            best, length = self._longest(ids)
            if best is None:
                return None
            self._entries.move_to_end(best)
            return self._entries[best], length

    def has_room_for(self, num_tokens: int) -> bool:
        """Whether so long an entry would be kept; True before the first, which tells what a token takes."""
        return num_tokens * self._bytes_of_token <= self.max_bytes

    def known_length(self, ids: Key) -> int:
        """The length that ``find`` would give, without counting as a use; 0 where nothing is known."""
        with self._lock:
            return self._longest(ids)[1]

    def _longest(self, ids: Key) -> tuple[Key | None, int]:
        best, length = None, 0
        # The longest common prefix of a sorted list is with a neighbour.
        at = bisect_left(self._sorted, ids)
        for key in self._sorted[max(at - 1, 0) : at + 1]:
            shared = shared_length(key, ids)
            if shared > length:
                best, length = key, shared
        length = usable_length(length, ids)
        return (best, length) if length else (None, 0)

    def add(self, entry: CachedPrefix) -> None:
        """Keep an entry, dropping the least recently used ones for it; one that exceeds the budget is not kept."""
        size = entry.num_bytes
        with self._lock:
            self._bytes_of_token = size / len(entry.ids)
            if size > self.max_bytes or entry.ids in self._entries:
                return
            while self.num_bytes + size > self.max_bytes:
                self._remove(next(iter(self._entries)))
                self.num_evicted += 1
            self._entries[entry.ids] = entry
            self._sorted.insert(bisect_left(self._sorted, entry.ids), entry.ids)
            self.num_bytes += size

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            self._entries.clear()
            self._sorted.clear()
            self.num_bytes = 0

    def _remove(self, key: Key) -> None:
        self.num_bytes -= self._entries.pop(key).num_bytes
        del self._sorted[bisect_left(self._sorted, key)]


def usable_length(shared: int, ids: Key) -> int:
    """How much of a shared run of ``shared`` tokens is worth taking over for ``ids``."""
    length = min(shared, len(ids) - 1)
    return length - length % MIN_SHARED


def concatenate(first: Sequence[LayerKV], length: int, second: Sequence[LayerKV]) -> tuple[LayerKV, ...]:
    """The first ``length`` tokens of ``first`` followed by ``second``, layer by layer."""
    return tuple(
        LayerKV(torch.cat([a.keys[:length], b.keys]), torch.cat([a.values[:length], b.values]))
        for a, b in zip(first, second, strict=True)
    )
