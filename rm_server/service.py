"""Glue: callers on one side, the batch loop on the other.

A request comes in as a list of inputs. Part by part it is admitted, tokenised off the event loop, and put among the
waiting items; whenever the worker is free, the planner takes the next batch, so batches grow while the device is busy
and no timer delays anyone.

Invariant: whatever happens, each request's every item is settled exactly once, and what it held is given back.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from rm_server.admission import Admission
from rm_server.batches import BatchLoop
from rm_server.errors import (
    DeadlineExceededError,
    DrainingError,
    LoadingError,
    NonFiniteRewardError,
    NotReadyError,
    ServerError,
    TooLargeError,
)
from rm_server.groups import Item, Request, WaitingItems
from rm_server.inputs import ItemInput, TokenizeOptions, tokenize
from rm_server.metrics import Metrics
from rm_server.planner import Counting
from rm_server.scorer import ServedModel
from rm_server.settings import ServerSettings, SettingsError

logger = logging.getLogger("rm_server")

PART_BATCHES = 4
PART_ITEMS = 512
"""A part of a request is at most this many batches of tokens and this many items."""


class ScoringService:
    """The engine behind every route."""

    def __init__(self, settings: ServerSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = settings
        self.clock = clock
        self.metrics = Metrics()
        self.model: ServedModel | None = None
        self.counting: Counting = "padded"
        self.state: Literal["loading", "serving", "draining"] = "loading"
        self.exit_on_stall: Callable[[], None] | None = None
        self.waiting = WaitingItems()
        self.admission = Admission(
            max_tokens=settings.max_queued_tokens,
            max_items=settings.max_queued_items,
            max_queue_seconds=settings.max_queue_seconds,
            max_batch_tokens=settings.max_batch_tokens,
            clock=clock,
        )
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="rm-scorer")
        self._tokenizers = ThreadPoolExecutor(settings.num_tokenizer_threads, thread_name_prefix="rm-tokenizer")
        self._batches = BatchLoop(
            waiting=self.waiting,
            admission=self.admission,
            metrics=self.metrics,
            worker=self._worker,
            probe_seconds=settings.probe_seconds,
            stall_seconds=settings.stall_seconds,
            on_stall=self._on_stall,
            clock=clock,
        )
        self._task: asyncio.Task[None] | None = None
        self._open: set[Request] = set()
        self._nothing_open = asyncio.Event()
        self._nothing_open.set()
        # How many tokens a character gives, learned from what was tokenised.
        self._tokens_per_character = 0.3

    # ------------------------------------------------------------------ life

    async def start(self, load: Callable[[], ServedModel]) -> ServedModel:
        """Load the model on the worker thread, prove it with one forward, and begin to serve.

        Raises what ``load`` or the first forward raises, and SettingsError for limits the model cannot have.
        """
        model = await asyncio.get_running_loop().run_in_executor(self._worker, load)
        _check_limits(self.settings, model)
        # A model with a token tree computes a shared prefix once; any other is charged for its padding.
        self.counting = "shared" if model.shares_prefixes else "padded"
        self.admission.longest_item = self.settings.max_length or model.max_length
        self.model = model
        await self._batches.probe(model)
        self._task = asyncio.create_task(
            self._batches.run(model, self.counting, self.settings.max_batch_tokens), name="rm-batches"
        )
        if self.state == "loading":
            self.state = "serving"
        return model

    def begin_drain(self) -> None:
        """Admit nothing more. What was admitted goes on."""
        self.state = "draining"
        self.admission.close(DrainingError("the server is shutting down", 5))

    async def drain(self, grace_seconds: float) -> None:
        """Admit nothing more, wait for what was admitted, and fail what is not done after the grace period."""
        self.begin_drain()
        if self._open and grace_seconds > 0:
            waiter = asyncio.ensure_future(self._nothing_open.wait())
            await asyncio.wait({waiter}, timeout=grace_seconds)
            waiter.cancel()
        if self._open:
            logger.warning("the grace period is over, %d requests are not finished", len(self._open))
        for request in tuple(self._open):
            request.settle_rest(DrainingError("the server shut down before this was scored", 5))

    async def stop(self) -> None:
        """Fail whatever is not done and end the loop."""
        await self.drain(0)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        self._worker.shutdown(wait=False, cancel_futures=True)
        self._tokenizers.shutdown(wait=False, cancel_futures=True)

    @property
    def num_open(self) -> int:
        """Requests that are not answered."""
        return len(self._open)

    @property
    def max_length(self) -> int:
        """Longest sequence that is scored, in tokens."""
        return self.admission.longest_item

    @property
    def forward_seconds_so_far(self) -> float:
        """How long the forward in flight has been running; 0 when there is none."""
        since = self._batches.in_flight_since
        return 0.0 if since is None else self.clock() - since

    def why_not_serving(self) -> ServerError | None:
        """The error for new requests, or None while they are taken."""
        if self.state == "loading":
            return LoadingError("the model is being loaded", 5)
        if self.state == "draining":
            return DrainingError("the server is shutting down", 5)
        return None

    def why_not_ready(self) -> ServerError | None:
        """The error of `/ready`, or None."""
        error = self.why_not_serving()
        if error is not None:
            return error
        if self.forward_seconds_so_far > self.settings.stall_seconds:
            return NotReadyError(f"a forward has been running for {self.forward_seconds_so_far:.0f} s", 5)
        age = self.clock() - (self._batches.last_success or 0.0)
        if age > self.settings.ready_seconds:
            return NotReadyError(f"no forward has succeeded for {age:.0f} s", 5)
        return None

    def update_gauges(self) -> None:
        """Bring the gauges up to now."""
        self.metrics.queued_tokens.set(self.admission.tokens)
        self.metrics.queued_items.set(self.admission.items)
        self.metrics.waiting_parts.set(self.admission.num_waiting)
        self.metrics.ready.set(self.why_not_ready() is None)
        if self._batches.scorer is not None:
            self.metrics.token_limit.set(self._batches.scorer.token_limit)

    def _on_stall(self) -> None:
        self.metrics.stalls.inc()
        logger.error("a forward has been running for %g s: it is stuck", self.settings.stall_seconds)
        if self.exit_on_stall is not None:
            self.exit_on_stall()

    # ------------------------------------------------------------------ one request

    async def score(self, inputs: Sequence[ItemInput], options: TokenizeOptions, deadline: float) -> Request:
        """Score all inputs; returns the request with a reward or an error for each, in order.

        ``deadline`` is on this service's clock. Raises ServerError for the request as a whole. If the calling task is
        cancelled, what waits is dropped.
        """
        error = self.why_not_serving()
        if error is not None:
            raise error
        if len(inputs) > self.settings.max_request_items:
            raise TooLargeError(
                f"{len(inputs)} items in one request are over the limit of {self.settings.max_request_items}"
            )
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        request = Request(len(inputs), lambda: None if settled.done() else settled.set_result(None))
        if not inputs:
            return request
        self._open.add(request)
        self._nothing_open.clear()
        try:
            await self._feed(request, inputs, options, deadline)
            await asyncio.wait({settled}, timeout=max(deadline - self.clock(), 0))
            request.settle_rest(DeadlineExceededError("was not scored before the deadline"))
        except asyncio.CancelledError:
            self.metrics.requests_cancelled.inc()
            raise
        finally:
            self._let_go(request)
        self._count_outcomes(request)
        return request

    async def _feed(
        self, request: Request, inputs: Sequence[ItemInput], options: TokenizeOptions, deadline: float
    ) -> None:
        """Admit, tokenise and enqueue part by part. What cannot be admitted is settled with the reason."""
        assert self.model is not None, "this is a bug: requests are taken before the model is loaded"
        loop = asyncio.get_running_loop()
        start = 0
        while start < len(inputs) and self.clock() < deadline:
            stop, estimate = self._next_part(inputs, start)
            begin = self.clock()
            try:
                await self.admission.admit(request, estimate, stop - start, deadline)
            except ServerError as error:
                for slot in range(start, len(inputs)):
                    request.settle(slot, error)
                return
            if start == 0:
                self.metrics.requests_admitted.inc()
            admitted = self.clock()
            self.metrics.admission_seconds.observe(admitted - begin)
            part = inputs[start:stop]
            outcomes = await loop.run_in_executor(self._tokenizers, tokenize, self.model, part, options, logger.error)
            seconds = self.clock() - admitted
            self.metrics.tokenize_seconds.observe(seconds)
            request.tokenize_seconds += seconds
            items: list[Item] = []
            for slot, (item, outcome) in enumerate(zip(part, outcomes, strict=True), start):
                if isinstance(outcome, ServerError):
                    request.settle(slot, outcome)
                    continue
                items.append(Item(outcome.key, request, slot))
                request.truncated[slot] = outcome.is_truncated
                self.metrics.items_unfinished.inc(not item.finished)
            self._enqueue(request, items, estimate, stop - start)
            self._learn(part, items)
            start = stop

    def _next_part(self, inputs: Sequence[ItemInput], start: int) -> tuple[int, int]:
        """Where the part that begins at ``start`` ends, and the tokens it is thought to have."""
        limit, total, stop = PART_BATCHES * self.settings.max_batch_tokens, 0, start
        while stop < len(inputs) and stop - start < PART_ITEMS:
            item = inputs[stop]
            size = item.size if item.ids is not None else int(item.size * self._tokens_per_character) + 8
            if stop > start and total + size > limit:
                break
            total, stop = total + size, stop + 1
        return stop, min(total, self.settings.max_queued_tokens)

    def _enqueue(self, request: Request, items: list[Item], estimate: int, num_estimated: int) -> None:
        num_tokens = sum(item.num_tokens for item in items)
        self.admission.hold(request, num_tokens - estimate, len(items) - num_estimated)
        request.num_tokens += num_tokens
        training_length = self._training_length
        now = self.clock()
        for item in items:
            item.waiting_since = now
            if training_length is not None and item.num_tokens > training_length:
                request.over_training_length.append(item.slot)
        if self.counting == "padded":
            items = sorted(items, key=lambda item: item.num_tokens)  # rows of one length pad each other least
        self.waiting.add(items)
        self.admission.wake()
        self._batches.notify()

    def _learn(self, part: Sequence[ItemInput], items: list[Item]) -> None:
        characters = sum(item.size for item in part if item.ids is None)
        if characters and len(items) == len(part) and not any(item.request.truncated[item.slot] for item in items):
            ratio = sum(item.num_tokens for item in items) / characters
            self._tokens_per_character += 0.05 * (min(ratio, 2.0) - self._tokens_per_character)

    def _let_go(self, request: Request) -> None:
        """Drop what still waits and give back what is held for it; the batch in flight gives back the rest itself."""
        self.waiting.discard(request)
        tokens, items = request.in_flight_tokens - request.held_tokens, request.in_flight_items - request.held_items
        if items:
            self.admission.hold(request, tokens, items)
            self.admission.wake()
        self._open.discard(request)
        if not self._open:
            self._nothing_open.set()

    def _count_outcomes(self, request: Request) -> None:
        for reward in request.rewards:
            if reward is not None:
                self.metrics.items_scored.inc()
                self.metrics.reward.observe(reward)
        for error in request.errors.values():
            self.metrics.items_failed.labels(reason=error.type).inc()
            self.metrics.items_non_finite.inc(isinstance(error, NonFiniteRewardError))
        self.metrics.items_truncated.inc(sum(request.truncated))
        self.metrics.items_over_training_length.inc(len(request.over_training_length))

    @property
    def _training_length(self) -> int | None:
        record = self.model.record if self.model is not None else None
        return record.training_length if record is not None else None


def _check_limits(settings: ServerSettings, model: ServedModel) -> None:
    if settings.max_length is not None and settings.max_length > model.max_length:
        raise SettingsError(
            f"max_length ({settings.max_length}) is over the model's context of {model.max_length} tokens"
        )
    longest = settings.max_length or model.max_length
    if longest > settings.max_queued_tokens:
        raise SettingsError(
            f"max_queued_tokens ({settings.max_queued_tokens}) is below the longest sequence ({longest} tokens), "
            "which could never be admitted; raise it, or set max_length"
        )
