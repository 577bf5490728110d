"""State of the engine: requests, their items, and the items that wait.

Invariant: an item is in the waiting list, or in the batch in flight, or settled with one reward or one error; never
two of these. All of this is touched on the event loop's thread alone.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rm_server.errors import ServerError

TOKEN_BYTES = 4


def key_of(ids: Sequence[int]) -> bytes:
    """Token ids as big-endian uint32: 4 bytes a token instead of 36, and sorted as bytes they are sorted as ids."""
    return np.asarray(ids, dtype=">u4").tobytes()


def ids_of(key: bytes) -> list[int]:
    """The token ids of a key."""
    ids: list[int] = np.frombuffer(key, dtype=">u4").tolist()
    return ids


def num_shared_tokens(a: bytes, b: bytes) -> int:
    """Length of the longest common prefix of two keys, in tokens."""
    if a == b:
        return len(a) // TOKEN_BYTES
    shorter = min(len(a), len(b))
    if a[:TOKEN_BYTES] != b[:TOKEN_BYTES]:
        return 0
    if a[:shorter] == b[:shorter]:
        return shorter // TOKEN_BYTES
    count = shorter // TOKEN_BYTES
    differs = np.frombuffer(a, np.uint32, count) != np.frombuffer(b, np.uint32, count)
    return int(differs.argmax())


class SpreadReward(float):
    """A reward made of several heads' own, with their mean, their standard deviation and the least of them."""

    __slots__ = ("least", "mean", "std")
    least: float
    mean: float
    std: float

    def __new__(cls, reward: float, mean: float, std: float, least: float) -> "SpreadReward":
        made = super().__new__(cls, reward)
        made.mean, made.std, made.least = mean, std, least
        return made


@dataclass(frozen=True)
class Reading:
    """Where in a sequence its answer begins, what text each of the answer's tokens adds, and the rewards read there."""

    start: int
    texts: list[str]
    rewards: np.ndarray | None = None
    """fp32 [n]; None until the item is scored."""


class Request:
    """One caller's items. ``rewards`` and ``errors`` fill up; ``on_settled`` is called once, when all are in."""

    def __init__(self, num_items: int, on_settled: Callable[[], None] = lambda: None) -> None:
        self.rewards: list[float | None] = [None] * num_items
        self.errors: dict[int, ServerError] = {}
        self.truncated: list[bool] = [False] * num_items
        self.digests: dict[int, tuple[str, int]] = {}
        """Digest of the ids and number of tokens by slot, where there is an audit log."""
        self.num_tokens = 0
        self.computed_tokens = 0
        self.over_training_length: list[int] = []
        self.pending: deque[Item] = deque()
        self.held_tokens = 0
        self.held_items = 0
        self.was_admitted = False
        """A part of it was let in."""
        self.in_flight_tokens = 0
        self.in_flight_items = 0
        self.had_turn = False
        self.components: dict[str, list[float | None]] | None = None
        """The parts of each reward, where a recipe combines several; or ``mean``, ``std``, ``min`` over the heads."""
        self.readings: dict[int, Reading] = {}
        """By slot, of the items whose reward is wanted at each token."""
        self.tokenize_seconds = 0.0
        self.forward_seconds = 0.0
        self._num_open = num_items
        self._on_settled = on_settled

    @property
    def is_settled(self) -> bool:
        return self._num_open == 0

    def settle(self, slot: int, outcome: float | ServerError) -> None:
        """Give one item its reward or its error; the first outcome counts, later ones are dropped."""
        if self.rewards[slot] is not None or slot in self.errors:
            return
        if isinstance(outcome, ServerError):
            self.errors[slot] = outcome
        else:
            self.rewards[slot] = float(outcome)
            if isinstance(outcome, SpreadReward):
                if self.components is None:
                    self.components = {name: [None] * len(self.rewards) for name in ("mean", "std", "min")}
                for name, value in (("mean", outcome.mean), ("std", outcome.std), ("min", outcome.least)):
                    self.components[name][slot] = value
        self._num_open -= 1
        if self._num_open == 0:
            self._on_settled()

    def outcome(self, slot: int) -> float | ServerError | None:
        """What an item has got so far."""
        return self.errors.get(slot, self.rewards[slot])

    def replace(self, slot: int, outcome: float | ServerError) -> None:
        """Give an item another outcome: what a recipe makes of the model's. Not before all are settled."""
        self.rewards[slot] = None if isinstance(outcome, ServerError) else outcome
        self.errors.pop(slot, None)
        if isinstance(outcome, ServerError):
            self.errors[slot] = outcome

    def settle_rest(self, error: ServerError) -> None:
        """Give every item that has no outcome yet this error."""
        for slot, reward in enumerate(self.rewards):
            if reward is None:
                self.settle(slot, error)


class Item:
    """One sequence to score, for slot ``slot`` of its request."""

    __slots__ = ("is_waiting", "key", "number", "read_from", "request", "slot", "waiting_since")

    def __init__(self, key: bytes, request: Request, slot: int, read_from: int | None = None) -> None:
        self.key = key
        self.read_from = read_from
        """The token from which on the reward is wanted at each; None: at the last one alone."""
        self.request = request
        self.slot = slot
        self.number = 0
        self.waiting_since = 0.0
        self.is_waiting = False

    @property
    def num_tokens(self) -> int:
        return len(self.key) // TOKEN_BYTES


Entry = tuple[bytes, int, Item]


class WaitingItems:
    """The items that wait, twice: by request in order of arrival, and sorted by token ids, so that the items with the
    longest common prefix are neighbours."""

    def __init__(self) -> None:
        self.newcomers: deque[Request] = deque()
        """Requests that have not had a turn, oldest first."""
        self.underway: deque[Request] = deque()
        """Requests that have had a turn and still wait, the one whose turn is next first."""
        self.underway_first = False
        """Set by the planner where the front of ``underway`` found no room in the last batch."""
        self.num_tokens = 0
        self._entries: list[Entry] = []
        self._next_number = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, items: Sequence[Item]) -> None:
        """Append items of one request."""
        if not items:
            return
        request = items[0].request
        if not request.pending:
            (self.underway if request.had_turn else self.newcomers).append(request)
        new: list[Entry] = []
        for item in items:
            item.number = self._next_number
            item.is_waiting = True
            self._next_number += 1
            self.num_tokens += item.num_tokens
            new.append((item.key, item.number, item))
        request.pending.extend(items)
        # A binary insertion moves the tail once per item; one sort of two sorted runs is linear.
        if len(new) * 64 < len(self._entries):
            for entry in new:
                insort(self._entries, entry)
        else:
            new.sort()
            self._entries += new
            self._entries.sort()

    def position(self, item: Item) -> int:
        """Index of a waiting item among the entries."""
        return bisect_left(self._entries, (item.key, item.number))

    def neighbour(self, index: int) -> Item | None:
        """The item at this index, or None beyond the ends."""
        return self._entries[index][2] if 0 <= index < len(self._entries) else None

    def take(self, start: int, stop: int) -> list[Item]:
        """Remove and return the items of a run of entries."""
        taken = [entry[2] for entry in self._entries[start:stop]]
        del self._entries[start:stop]
        for item in taken:
            item.is_waiting = False
            self.num_tokens -= item.num_tokens
        return taken

    def oldest(self, request: Request) -> Item | None:
        """The request's first item that still waits."""
        pending = request.pending
        while pending and not pending[0].is_waiting:
            pending.popleft()
        return pending[0] if pending else None

    def discard(self, request: Request) -> list[Item]:
        """Remove and return whatever of this request still waits."""
        dropped = [item for item in request.pending if item.is_waiting]
        if len(dropped) > 16:
            gone = set(map(id, dropped))
            self._entries = [entry for entry in self._entries if id(entry[2]) not in gone]
        else:
            for item in dropped:
                del self._entries[self.position(item)]
        for item in dropped:
            item.is_waiting = False
            self.num_tokens -= item.num_tokens
        if request.pending:
            request.pending.clear()
            for line in (self.newcomers, self.underway):
                if request in line:
                    line.remove(request)
        return dropped

    def clear(self) -> set[Request]:
        """Forget everything; returns the requests that had items here."""
        requests = {entry[2].request for entry in self._entries}
        for request in requests:
            self.discard(request)
        return requests
