"""Policy and state of admission: who may come in now, who waits, who is refused. Counts tokens and items.

The rule. Room is ``max_queued_tokens`` and ``max_queued_items``, and, once the rate is measured, no more tokens than
can be scored in ``max_queue_seconds``. A request comes in part by part. One that holds nothing yet may use all the
room; one that holds something may use three quarters, so a small request finds room beside a huge one. Who finds no
room waits, first come first served, until its deadline. Who could not be answered by its deadline is not let in.

Invariant: what is held is what was admitted and not released; it is over the room only by what tokenising found beyond
the estimate, or by one request that found the room empty.
"""

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from rm_server.errors import OverloadedError, ServerError
from rm_server.groups import Request

ROOM_IN_BATCHES = 16
"""The measured rate never lowers the room below this many batches."""
CAUTION = 2.5
"""Who has less than this times the expected time left is not let in: it would be late, and waste its turn. Under
overload everyone is let in at this margin, so whatever the expectation misses (a rate that falls while the machine is
busy refusing, the batch in flight, tokenising) must fit into it, or all are late at once."""


class Rate:
    """Tokens per second of the last forwards; None until there was one."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Count one batch; earlier ones fade by a tenth."""
        self._tokens = 0.9 * self._tokens + tokens
        self._seconds = 0.9 * self._seconds + seconds

    @property
    def tokens_per_second(self) -> float | None:
        return self._tokens / self._seconds if self._seconds > 0 and self._tokens > 0 else None


@dataclass(eq=False)
class _Waiter:
    future: "asyncio.Future[None]"
    request: Request
    tokens: int
    items: int
    deadline: float


_Line = OrderedDict[_Waiter, None]
"""First come, first served; who leaves is taken out of the middle at no cost."""


class Admission:
    """The door of the engine. All methods run on the event loop's thread."""

    def __init__(
        self,
        *,
        max_tokens: int,
        max_items: int,
        max_queue_seconds: float,
        max_batch_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        self.tokens = 0
        self.items = 0
        self.rate = Rate()
        self.longest_item = 0
        """Longest sequence in tokens, once the model is loaded: there is always room for some of them."""
        self._max_tokens = max_tokens
        self._max_items = max_items
        self._max_queue_seconds = max_queue_seconds
        self._max_batch_tokens = max_batch_tokens
        self._clock = clock
        self._newcomers: _Line = OrderedDict()
        self._holders: _Line = OrderedDict()
        self._late: _Line = OrderedDict()
        self._closed: ServerError | None = None
        self._is_open_to_admitted = False
        # Sum over requests of what each holds, a quarter batch at most: what fairness puts ahead of a small newcomer.
        self._fair_tokens = 0

    @property
    def num_waiting(self) -> int:
        return len(self._newcomers) + len(self._holders) + len(self._late)

    @property
    def room_tokens(self) -> int:
        """Tokens that may be held at the moment."""
        rate = self.rate.tokens_per_second
        if rate is None:
            return self._max_tokens
        floor = max(ROOM_IN_BATCHES * self._max_batch_tokens, 4 * self.longest_item)
        return min(self._max_tokens, max(floor, int(rate * self._max_queue_seconds)))

    def retry_after_seconds(self) -> int:
        """Seconds in which what is held should be done at the measured rate, 1 to 60."""
        rate = self.rate.tokens_per_second
        return 1 if rate is None else min(max(math.ceil(self.tokens / rate), 1), 60)

    async def admit(self, request: Request, tokens: int, items: int, deadline: float) -> None:
        """Hold room for a part of a request, waiting for it until the deadline.

        Raises OverloadedError, or the error that closed the door.
        """
        if self._closed is not None and not (self._is_open_to_admitted and request.was_admitted):
            raise self._closed
        waiter = _Waiter(asyncio.get_running_loop().create_future(), request, tokens, items, deadline)
        (self._holders if request.held_items else self._newcomers)[waiter] = None
        try:
            self.wake()
            await asyncio.wait({waiter.future}, timeout=max(deadline - self._clock(), 0))
            if not waiter.future.done():
                raise OverloadedError(
                    f"no room in the queue before the deadline ({self.tokens} of {self.room_tokens} tokens and "
                    f"{self.items} of {self._max_items} items are held)",
                    self.retry_after_seconds(),
                )
            waiter.future.result()
        finally:
            # Also when the caller left. Had it been let in meanwhile, its room is part of what the request holds.
            for line in (self._newcomers, self._holders, self._late):
                if waiter in line:
                    del line[waiter]
                    self.wake()  # it may have been the one that found no room, with others behind it who do

    def hold(self, request: Request, tokens: int, items: int) -> None:
        """Count tokens and items as held by a request; negative ones give room back. ``wake`` lets others in."""
        share = self._max_batch_tokens // 4
        before = min(request.held_tokens, share)
        request.held_tokens += tokens
        request.held_items += items
        self.tokens += tokens
        self.items += items
        self._fair_tokens += min(request.held_tokens, share) - before

    def wake(self) -> None:
        """Let in whoever has room now."""
        emptied = [waiter for waiter in self._holders if not waiter.request.held_items]
        for waiter in emptied:
            del self._holders[waiter]
            self._newcomers[waiter] = None
        if self._let_in(self._newcomers) and self._let_in(self._holders):
            # Nobody else wants the room: the most patient of the late ones may make it now. If that one does not,
            # the others are not looked at, or an overload would cost a look at everybody after every batch.
            while self._late and self._is_in_time(waiter := next(reversed(self._late))) and self._fits(waiter):
                self._enter(self._late, waiter)

    def _let_in(self, line: _Line) -> bool:
        """Let in from the front of a line; False when someone waits for nothing but room, whom nobody passes."""
        while line:
            waiter = next(iter(line))
            if not self._makes_it(waiter):
                del line[waiter]
                self._late[waiter] = None
            elif not self._fits(waiter):
                return False
            else:
                self._enter(line, waiter)
        return True

    def _enter(self, line: _Line, waiter: _Waiter) -> None:
        del line[waiter]
        self.hold(waiter.request, waiter.tokens, waiter.items)
        waiter.request.was_admitted = True
        waiter.future.set_result(None)

    def close(self, error: ServerError, *, let_admitted_finish: bool = False) -> None:
        """Refuse everyone from now on, and everyone who waits, until ``reopen``.

        With ``let_admitted_finish``, requests of which a part was let in go on coming in.
        """
        self._closed, self._is_open_to_admitted = error, let_admitted_finish
        for line in (self._newcomers, self._holders, self._late):
            for waiter in tuple(line):
                if not (let_admitted_finish and waiter.request.was_admitted):
                    del line[waiter]
                    waiter.future.set_exception(error)
        self.wake()

    def reopen(self) -> None:
        """Let in again."""
        self._closed = None

    def _fits(self, waiter: _Waiter) -> bool:
        if self.items == 0:
            return True
        is_holder = waiter.request.held_items > 0
        tokens, items = (room * 3 // 4 if is_holder else room for room in (self.room_tokens, self._max_items))
        return self.tokens + waiter.tokens <= tokens and self.items + waiter.items <= items

    def _makes_it(self, waiter: _Waiter) -> bool:
        """Whether a newcomer is let in. One that finds the room empty is, whatever the rate was: it measures it."""
        return self.items == 0 or self._is_in_time(waiter)

    def _is_in_time(self, waiter: _Waiter) -> bool:
        """Whether a request let in now can be answered by its deadline, at the measured rate and under fair turns."""
        rate = self.rate.tokens_per_second
        if rate is None:
            return True
        ahead = self.tokens
        if waiter.tokens <= self._max_batch_tokens // 4:
            # Half of each batch is for newcomers; one more batch is in flight.
            ahead = min(ahead, self._max_batch_tokens + 2 * self._fair_tokens)
        return self._clock() + CAUTION * (ahead + waiter.tokens) / rate <= waiter.deadline
