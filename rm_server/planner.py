"""Policy: which of the waiting items make the next batch. No torch, no asyncio, no clock.

The rule. The first half of a batch is for *newcomers*, requests that have not had a turn, oldest first; the rest is
for requests that are *under way*, in turn. What one side leaves, the other gets. A turn is worth a quarter of the
batch and at least one item: the request's oldest item, then those that share its prefix, whichever request they
belong to, then the request's next oldest. A request with items left after its turn goes to the back of those under way.
Whoever stands in front and does not fit begins one of the next two batches.

What the prefix cache holds costs nothing, so a batch is as large as what will really be computed.

Invariant: a batch costs at most ``max_batch_tokens``, unless it is one single sequence that costs more. Both lines are
first come, first served, and each moves in at least every other batch, so every item is planned.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from rm_server.groups import TOKEN_BYTES, Item, Request, WaitingItems, num_shared_tokens

Counting = Literal["shared", "padded", "alone"]
"""How a batch is charged: ``shared`` counts distinct tokens after prefix sharing (a model with a token tree),
``padded`` counts rows times the longest row (a model that pads), ``alone`` counts distinct sequences whole (each is
computed in a forward of its own)."""

Known = Callable[[bytes], int]
"""How many tokens at the beginning of a sequence the prefix cache holds."""

TURNS_PER_BATCH = 4
MIN_SHARED_TOKENS = 16
"""A shorter common prefix counts for nothing: the token tree (``rm_core.tree.MIN_SHARED``) computes it again, too."""
MIN_SHARED_FRACTION = 8
"""One that is less than an eighth of the item saves tokens, but does not bring the item forward."""
MAX_MISFITS = 32
"""How many requests whose next item does not fit are passed over before a batch is called full."""


@dataclass(frozen=True)
class Batch:
    """Items of one forward, sorted by token ids."""

    items: list[Item]
    num_tokens: int
    """Sum of the sequence lengths."""
    cost: int
    """What the batch is thought to cost, in tokens, as ``BatchCost`` counts."""


def knows_nothing(key: bytes) -> int:
    """There is no prefix cache."""
    return 0


def plan_batch(waiting: WaitingItems, max_batch_tokens: int, counting: Counting, known: Known = knows_nothing) -> Batch:
    """Take the next batch out of ``waiting``; empty only if nothing waits."""
    plan = _Plan(waiting, max_batch_tokens, counting, known)
    half = max_batch_tokens // 2
    underway_first = waiting.underway_first
    front = waiting.underway[0] if waiting.underway else None
    if underway_first:
        plan.fill(waiting.underway, half)
    plan.fill(waiting.newcomers, half if waiting.underway else max_batch_tokens)
    plan.fill(waiting.underway, max_batch_tokens)
    plan.fill(waiting.newcomers, max_batch_tokens)
    # The front of each side meets an empty batch, in which everything fits, at least every other time.
    waiting.underway_first = not underway_first and front is not None and front not in plan.served
    return plan.batch()


class BatchCost:
    """What a growing set of sequences costs in one forward, as ``rm_core.passes`` will compute it."""

    def __init__(self, counting: Counting, known: Known = knows_nothing) -> None:
        self.tokens = 0
        self._counting = counting
        self._known = known
        self._known_before: dict[bytes, int] = {}
        self._sorted_keys: list[bytes] = []
        self._longest = 0

    def with_key(self, key: bytes) -> int:
        """The cost if this sequence joined."""
        place = bisect_left(self._sorted_keys, key)
        around = self._sorted_keys[max(place - 1, 0) : place + 1]
        length = len(key) // TOKEN_BYTES
        if self._counting == "padded":
            if key in around:
                return self.tokens
            return (len(self._sorted_keys) + 1) * max(self._longest, length)
        if self._counting == "alone" or key in around:
            return self.tokens + (0 if key in around else length)
        # In sorted order the longest prefix shared with any is shared with a neighbour. Behind what the cache holds,
        # too, a shared run must be long enough.
        known = self._known_length(key)
        shared = max((num_shared_tokens(key, other) for other in around), default=0)
        return self.tokens + length - (shared if shared - known >= MIN_SHARED_TOKENS else known)

    def _known_length(self, key: bytes) -> int:
        if key not in self._known_before:
            self._known_before[key] = self._known(key)
        return self._known_before[key]

    def add(self, key: bytes, cost: int) -> None:
        """Let a sequence join; ``cost`` is what ``with_key`` said."""
        place = bisect_left(self._sorted_keys, key)
        if self._sorted_keys[place : place + 1] != [key]:
            self._sorted_keys.insert(place, key)
        self._longest = max(self._longest, len(key) // TOKEN_BYTES)
        self.tokens = cost


class _Plan:
    def __init__(self, waiting: WaitingItems, max_batch_tokens: int, counting: Counting, known: Known) -> None:
        self.waiting = waiting
        self.limit = max_batch_tokens
        self.share = max(max_batch_tokens // TURNS_PER_BATCH, 1)
        self.counting: Counting = counting
        self.cost = BatchCost(counting, known)
        self.items: list[Item] = []
        self.served: set[Request] = set()

    def fill(self, line: deque[Request], until: int) -> None:
        """Give turns to the requests of a line until the batch costs ``until``."""
        misfits: list[Request] = []
        while line and self.cost.tokens < until and len(misfits) < MAX_MISFITS:
            request = line.popleft()
            if self.waiting.oldest(request) is None:
                continue  # its items rode along with others
            if not self._serve_turn(request):
                misfits.append(request)
                continue
            self.served.add(request)
            request.had_turn = True
            if self.waiting.oldest(request) is not None:
                self.waiting.underway.append(request)
        line.extendleft(reversed(misfits))

    def _serve_turn(self, request: Request) -> bool:
        """Take the request's share. False when not even its oldest item fits."""
        limit, took_any = self.limit, False
        end_of_share = min(self.cost.tokens + self.share, self.limit)
        while (item := self.waiting.oldest(request)) is not None:
            cost = self.cost.with_key(item.key)
            if cost > limit and self.items:
                break
            self._take_with_relatives(item, cost, end_of_share)
            limit, took_any = end_of_share, True
        return took_any

    def _take_with_relatives(self, item: Item, cost: int, limit: int) -> None:
        start = self.waiting.position(item)
        stop = start + 1
        self.cost.add(item.key, cost)
        while self.counting == "shared":
            below, above = self.waiting.neighbour(start - 1), self.waiting.neighbour(stop)
            saved_below = _saved_worth(below, self.waiting.neighbour(start))
            saved_above = _saved_worth(above, self.waiting.neighbour(stop - 1))
            relative = below if saved_below >= saved_above else above
            if relative is None or max(saved_below, saved_above) == 0:
                break
            cost = self.cost.with_key(relative.key)
            if cost > limit:
                break
            self.cost.add(relative.key, cost)
            start, stop = (start - 1, stop) if relative is below else (start, stop + 1)
        self.items += self.waiting.take(start, stop)

    def batch(self) -> Batch:
        items = sorted(self.items, key=lambda item: (item.key, item.number))
        return Batch(items, sum(item.num_tokens for item in items), self.cost.tokens)


def num_saved_tokens(a: bytes, b: bytes) -> int:
    """Tokens that are computed once for two sequences: their common prefix, if it is long enough to be shared."""
    shared = num_shared_tokens(a, b)
    return shared if shared >= MIN_SHARED_TOKENS or a == b else 0


def _saved_worth(neighbour: Item | None, member: Item | None) -> int:
    """Tokens that a neighbour shares with a member of the run; 0 where it is not worth bringing it forward."""
    if neighbour is None or member is None:
        return 0
    saved = num_saved_tokens(neighbour.key, member.key)
    return saved if saved * MIN_SHARED_FRACTION >= neighbour.num_tokens else 0
