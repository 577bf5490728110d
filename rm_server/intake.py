"""The way in: a request's inputs are admitted, tokenised off the event loop, and put among the waiting items.

Invariant: part by part, each input becomes a waiting item or an error in its own slot, and what was held for one that
became no item is given back. A caller is kept no longer than its deadline, whatever the tokenizer is busy with, and one
whose inputs can never be scored waits for no room.
"""

import asyncio
import contextvars
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rm_server.admission import Admission
from rm_server.audit import ids_digest
from rm_server.engine import Engine
from rm_server.errors import ServerError
from rm_server.groups import Item, Request
from rm_server.inputs import ItemInput, TokenizeOptions, Tokens, tokenize, why_never
from rm_server.metrics import Metrics
from rm_server.parts import PART_ITEMS, PartCutter
from rm_server.settings import ServerSettings
from rm_server.worker import Worker

logger = logging.getLogger("rm_server")


class Intake:
    """Feeds the engines. ``notify`` says that there are new waiting items; ``on_stall`` that a tokenizer is stuck."""

    def __init__(
        self,
        settings: ServerSettings,
        *,
        admission: Admission,
        metrics: Metrics,
        notify: Callable[[], None],
        on_stall: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self.tokenizers = Worker(
            "rm-tokenizer",
            num_threads=settings.num_tokenizer_threads,
            stall_seconds=settings.stall_seconds,
            on_stall=on_stall,
            clock=clock,
        )
        self._admission = admission
        self._metrics = metrics
        self._notify = notify
        self._clock = clock
        self._parts = PartCutter(settings)
        self._is_audited = settings.audit_log is not None

    async def feed(
        self,
        engine: Engine,
        request: Request,
        inputs: Sequence[ItemInput],
        options: TokenizeOptions,
        deadline: float,
        settled: "asyncio.Future[None]",
    ) -> None:
        """Admit, tokenise and enqueue part by part. What cannot be admitted is settled with the reason.

        Returns early at the deadline, or once ``settled`` is done: all has been settled from outside.
        """
        await self._refuse_at_once(engine, request, inputs, options)
        start = 0
        while not request.is_settled and start < len(inputs) and self._clock() < deadline:
            stop, estimate = self._parts.next_part(inputs, start, options.max_length)
            begin = self._clock()
            try:
                await self._admission.admit(request, estimate, stop - start, deadline)
            except ServerError as error:
                kept = error.with_traceback(None)  # its frames hold the request, which would hold it: a cycle
                for slot in range(start, len(inputs)):
                    request.settle(slot, kept)
                return
            if start == 0:
                self._metrics.requests_admitted.inc()
            self._metrics.admission_seconds.observe(self._clock() - begin)
            part = inputs[start:stop]
            outcomes = await self._tokenize(engine, request, part, options, deadline, settled)
            if outcomes is None:
                return
            items = self._items_of(request, start, outcomes)
            self._enqueue(engine, request, items, estimate, stop - start)
            self._parts.learn(part, items)
            start = stop

    async def _refuse_at_once(
        self, engine: Engine, request: Request, inputs: Sequence[ItemInput], options: TokenizeOptions
    ) -> None:
        """Settle what can never be scored before anything waits for room."""
        for slot, item in enumerate(inputs):
            if (refusal := why_never(engine.model, item, options)) is not None:
                request.settle(slot, refusal)
            if slot % PART_ITEMS == PART_ITEMS - 1:
                await asyncio.sleep(0)  # conversations take time to measure, and the event loop must turn

    async def _tokenize(
        self,
        engine: Engine,
        request: Request,
        part: Sequence[ItemInput],
        options: TokenizeOptions,
        deadline: float,
        settled: "asyncio.Future[None]",
    ) -> list[Tokens | ServerError] | None:
        """None where the deadline or the end came first."""
        begin = self._clock()
        # In the request's context, so that what is logged there names the request.
        work = partial(contextvars.copy_context().run, tokenize, engine.model, part, options, logger.error)
        tokenizing = asyncio.ensure_future(self.tokenizers.run(work))
        try:
            left = max(deadline - begin, 0)
            ends: set[asyncio.Future[Any]] = {tokenizing, settled}
            await asyncio.wait(ends, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not tokenizing.done():
                return None
        finally:
            tokenizing.cancel()
        seconds = self._clock() - begin
        self._metrics.tokenize_seconds.observe(seconds)
        request.tokenize_seconds += seconds
        return tokenizing.result()

    def _items_of(self, request: Request, start: int, outcomes: Sequence[Tokens | ServerError]) -> list[Item]:
        items: list[Item] = []
        for slot, outcome in enumerate(outcomes, start):
            if isinstance(outcome, ServerError):
                request.settle(slot, outcome)
                continue
            reading = outcome.reading
            items.append(Item(outcome.key, request, slot, None if reading is None else reading.start))
            if reading is not None:
                request.readings[slot] = reading
            request.truncated[slot] = outcome.is_truncated
            if self._is_audited:
                request.digests[slot] = (ids_digest(outcome.key), items[-1].num_tokens)
            self._metrics.items_unfinished.inc(not outcome.is_finished)
        return items

    def _enqueue(self, engine: Engine, request: Request, items: list[Item], estimate: int, num_estimated: int) -> None:
        num_tokens = sum(item.num_tokens for item in items)
        self._admission.hold(request, num_tokens - estimate, len(items) - num_estimated)
        request.num_tokens += num_tokens
        record = engine.model.record
        training_length = record.training_length if record is not None else None
        now = self._clock()
        for item in items:
            item.waiting_since = now
            if training_length is not None and item.num_tokens > training_length:
                request.over_training_length.append(item.slot)
        if engine.counting == "padded":
            items = sorted(items, key=lambda item: item.num_tokens)  # rows of one length pad each other least
        engine.waiting.add(items)
        self._admission.wake()
        self._notify()
