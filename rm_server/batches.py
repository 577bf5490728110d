"""The loop that carries batches from the waiting items to the worker thread and rewards back to the requests.

Invariant: what was taken out of the waiting items is settled and given back to admission, whatever was raised.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

import numpy as np

from rm_server.admission import Admission
from rm_server.errors import InternalError, describe_exception
from rm_server.groups import Request, WaitingItems
from rm_server.metrics import Metrics
from rm_server.planner import Batch, Counting, plan_batch
from rm_server.scorer import BatchScorer, ScoredBatch, Scorer

logger = logging.getLogger("rm_server")
T = TypeVar("T")

PROBE_IDS = (0,)


class BatchLoop:
    """Runs as one task; everything but the forward is on the event loop's thread."""

    def __init__(
        self,
        *,
        waiting: WaitingItems,
        admission: Admission,
        metrics: Metrics,
        worker: Executor,
        probe_seconds: float,
        stall_seconds: float,
        on_stall: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self.last_success: float | None = None
        self.in_flight_since: float | None = None
        self.scorer: BatchScorer | None = None
        self._waiting = waiting
        self._admission = admission
        self._metrics = metrics
        self._worker = worker
        self._probe_seconds = probe_seconds
        self._stall_seconds = stall_seconds
        self._on_stall = on_stall
        self._clock = clock
        self._has_work = asyncio.Event()
        # When the last batch ended with more waiting: the gap until the next one is part of what a batch takes.
        self._busy_since: float | None = None

    def notify(self) -> None:
        """Say that there are new waiting items."""
        self._has_work.set()

    async def probe(self, model: Scorer) -> None:
        """One forward of one token. Raises what it raises, ValueError for NaN."""
        await self._on_worker(lambda: _probe(model))
        self.last_success = self._clock()

    async def run(self, model: Scorer, counting: Counting, max_batch_tokens: int) -> None:
        """Score batch after batch, and probe when idle, until cancelled."""
        scorer = self.scorer = BatchScorer(model, max_batch_tokens, counting, self._clock)
        while True:
            try:
                if not self._waiting:
                    await self._idle(model)
                batch = plan_batch(self._waiting, scorer.token_limit, counting)
                if batch.items:
                    await self._score(batch, scorer)
            except Exception as error:  # a bug of ours must not leave anyone waiting for ever
                logger.error("the batch loop failed: %s", describe_exception(error))
                for request in self._waiting.clear():
                    request.settle_rest(InternalError("the server failed; its log says where"))

    async def _idle(self, model: Scorer) -> None:
        self._has_work.clear()
        try:
            await asyncio.wait_for(self._has_work.wait(), self._probe_seconds)
        except asyncio.TimeoutError:  # a class of its own before Python 3.11
            try:
                await self.probe(model)
            except Exception as error:  # whatever a model raises; `/ready` shows it
                logger.error("the probe forward failed: %s", describe_exception(error))
                self._metrics.probes.labels(outcome="failed").inc()
            else:
                self._metrics.probes.labels(outcome="succeeded").inc()

    async def _score(self, batch: Batch, scorer: BatchScorer) -> None:
        start = self._clock()
        for item in batch.items:
            item.request.in_flight_tokens += item.num_tokens
            item.request.in_flight_items += 1
            self._metrics.queue_seconds.observe(start - item.waiting_since)
        try:
            scored = await self._on_worker(lambda: scorer.score([item.key for item in batch.items]))
        except (
            Exception
        ) as error:  # the scorer catches what the model raises; this is a bug, and reaches the waiters too
            logger.error("scoring a batch failed: %s", describe_exception(error))
            scored = ScoredBatch([InternalError("scoring failed; the server's log says where")] * len(batch.items))
        finally:
            for item in batch.items:
                item.request.in_flight_tokens -= item.num_tokens
                item.request.in_flight_items -= 1
                self._admission.hold(item.request, -item.num_tokens, -1)
        seconds = self._clock() - start
        requests = self._deliver(batch, scored, seconds)
        self._admission.wake()
        self._observe(batch, scored, seconds, len(requests))
        self._busy_since = start + seconds if self._waiting else None

    def _deliver(self, batch: Batch, scored: ScoredBatch, seconds: float) -> set[Request]:
        requests: set[Request] = set()
        if any(isinstance(outcome, float) for outcome in scored.outcomes):
            self.last_success = self._clock()
            now = self._clock()
            self._admission.rate.add(batch.num_tokens, now - (self._busy_since or now - seconds))
        for item, charge, outcome in zip(batch.items, batch.charges, scored.outcomes, strict=True):
            request = item.request
            if request not in requests:
                requests.add(request)
                request.forward_seconds += seconds
            request.computed_tokens += charge
            request.settle(item.slot, outcome)
        return requests

    def _observe(self, batch: Batch, scored: ScoredBatch, seconds: float, num_requests: int) -> None:
        for problem in scored.problems:
            logger.error("a forward failed: %s", problem)
        metrics = self._metrics
        metrics.forward_seconds.observe(seconds)
        metrics.batch_tokens_before.observe(batch.num_tokens)
        metrics.batch_tokens_after.observe(batch.computed_tokens)
        metrics.batch_items.observe(len(batch.items))
        metrics.batch_requests.observe(num_requests)
        metrics.forward_failures.labels(cause="error").inc(scored.num_failures)
        metrics.forward_failures.labels(cause="out_of_memory").inc(scored.num_out_of_memory)

    async def _on_worker(self, work: Callable[[], T]) -> T:
        """Run on the worker thread, under the eye of the stall timer."""
        loop = asyncio.get_running_loop()
        self.in_flight_since = self._clock()
        timer = loop.call_later(self._stall_seconds, self._on_stall)
        try:
            return await loop.run_in_executor(self._worker, work)
        finally:
            timer.cancel()
            self.in_flight_since = None


def _probe(model: Scorer) -> None:
    if not np.isfinite(model.score_ids([PROBE_IDS])).all():
        raise ValueError("the model gives NaN or infinity for a single token")
