"""Policy: which of the waiting items make the next batch. No torch, no asyncio, no clock.

The rule. The first half of a batch is for *newcomers*, requests that have not had a turn, oldest first; the rest is
for requests that are *under way*, in turn. What one side leaves, the other gets. A turn is worth a quarter of the
batch and at least one item: the request's oldest item, then those that share its prefix, whichever request they
belong to, then the request's next oldest. A request with items left after its turn goes to the back of those under way.
Whoever stands in front and does not fit begins one of the next two batches.

Invariant: a batch costs at most ``max_batch_tokens``, unless it is one single sequence that is longer. Both lines are
first come, first served, and each moves in at least every other batch, so every item is planned.
"""

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from typing import Literal

from rm_server.groups import TOKEN_BYTES, Item, Request, WaitingItems, num_shared_tokens

Counting = Literal["shared", "padded"]
"""How a batch is charged: ``shared`` counts distinct tokens after prefix sharing (a model with a token tree),
``padded`` counts rows times the longest row (a model that pads)."""

TURNS_PER_BATCH = 4
MIN_SHARED_TOKENS = 16
"""A shorter common prefix counts for nothing: the token tree (``rm_core.tree.MIN_SHARED``) computes it again, too."""
MIN_SHARED_FRACTION = 8
"""One that is less than an eighth of the item saves tokens, but does not bring the item forward."""
MAX_MISFITS = 32
"""How many requests whose next item does not fit are passed over before a batch is called full."""


@dataclass(frozen=True)
class Batch:
    """Items of one forward, sorted by token ids; ``charges`` are the tokens computed for each, sharing counted."""

    items: list[Item]
    charges: list[int]
    num_tokens: int
    """Sum of the sequence lengths."""
    computed_tokens: int
    """Sum of ``charges``."""


def plan_batch(waiting: WaitingItems, max_batch_tokens: int, counting: Counting) -> Batch:
    """Take the next batch out of ``waiting``; empty only if nothing waits."""
    plan = _Plan(waiting, max_batch_tokens, counting)
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
    """What a growing set of sequences costs in one forward."""

    def __init__(self, counting: Counting) -> None:
        self.tokens = 0
        self._counting = counting
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
        # In sorted order the longest prefix shared with any is shared with a neighbour.
        return self.tokens + length - max((num_saved_tokens(key, other) for other in around), default=0)

    def add(self, key: bytes, cost: int) -> None:
        """Let a sequence join; ``cost`` is what ``with_key`` said."""
        place = bisect_left(self._sorted_keys, key)
        if self._sorted_keys[place : place + 1] != [key]:
            self._sorted_keys.insert(place, key)
        self._longest = max(self._longest, len(key) // TOKEN_BYTES)
        self.tokens = cost


class _Plan:
    def __init__(self, waiting: WaitingItems, max_batch_tokens: int, counting: Counting) -> None:
        self.waiting = waiting
        self.limit = max_batch_tokens
        self.share = max(max_batch_tokens // TURNS_PER_BATCH, 1)
        self.counting: Counting = counting
        self.cost = BatchCost(counting)
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
        """The batch, each token charged to the first sequence, in the order of token ids, that holds it."""
        items = sorted(self.items, key=lambda item: (item.key, item.number))
        charges = []
        before = b""
        for item in items:
            saved = num_saved_tokens(before, item.key)
            if self.counting == "padded" and before != item.key:
                saved = 0
            charges.append(item.num_tokens - saved)
            before = item.key
        return Batch(items, charges, sum(item.num_tokens for item in items), sum(charges))


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
