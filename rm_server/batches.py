"""The loop that carries batches from the waiting items to the worker thread and rewards back to the requests.

Invariant: what was taken out of the waiting items is settled and given back to admission, whatever was raised. While
forwards are asked for and none succeeds, there is a probe every ``probe_seconds``.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from rm_server.admission import Admission
from rm_server.engine import Engine
from rm_server.errors import InternalError, describe_exception
from rm_server.groups import Request
from rm_server.metrics import Metrics
from rm_server.planner import Batch, plan_batch
from rm_server.scorer import BatchScorer, ScoredBatch, Scorer
from rm_server.worker import Worker

logger = logging.getLogger("rm_server")

PROBE_IDS = (0,)


class BatchLoop:
    """Runs as one task; everything but the forward is on the event loop's thread.

    ``on_dead`` is called when probes have failed for ``dead_seconds``, and no forward has succeeded in that time.
    """

    def __init__(
        self,
        *,
        admission: Admission,
        metrics: Metrics,
        worker: Worker,
        probe_seconds: float,
        dead_seconds: float,
        on_dead: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self.last_success: float | None = None
        self.engines: list[Engine] = []
        """Those that may have work: one, and during a swap the old one before it."""
        self.is_paused = False
        """No probe while it is set. Set it only when nothing is waiting."""
        self._turn = 0
        self._admission = admission
        self._metrics = metrics
        self._worker = worker
        self._probe_seconds = probe_seconds
        self._dead_seconds = dead_seconds
        self._on_dead = on_dead
        self._last_probe = clock()
        # Since when probes have failed and nothing has succeeded.
        self._failing_since: float | None = None
        self._clock = clock
        self._has_work = asyncio.Event()
        # When the last batch ended with more waiting: the gap until the next one is part of what a batch takes.
        self._busy_since: float | None = None

    def notify(self) -> None:
        """Say that there are new waiting items."""
        self._has_work.set()

    async def probe(self, model: Scorer) -> None:
        """One forward of one token. Raises what it raises, ValueError for NaN."""
        await self._worker.run(lambda: probe(model))
        self.has_succeeded()

    def has_succeeded(self) -> None:
        """Say that a forward has just succeeded."""
        self.last_success = self._clock()
        self._failing_since = None

    async def run(self) -> None:
        """Score batch after batch, and probe when idle, until cancelled."""
        while True:
            try:
                engine = self._next_engine()
                if engine is None:
                    await self._idle()
                    continue
                await self._score_next(engine)
            except Exception as error:  # a bug of ours must not leave anyone waiting for ever
                logger.error("the batch loop failed: %s", describe_exception(error))
                # All that are open: what was taken for the batch is in no list any more.
                for engine in self.engines:
                    engine.waiting.clear()
                    for request in tuple(engine.open):
                        request.settle_rest(InternalError("the server failed; its log says where"))

    async def _score_next(self, engine: Engine) -> None:
        scorer = engine.scorer
        # Only the worker changes what the cache holds, and it is idle here.
        batch = plan_batch(engine.waiting, scorer.token_limit, engine.counting, scorer.known_length)
        if not batch.items or await self._score(batch, scorer):
            return
        # The items may be to blame, or the device: one token tells, and a loop that is never idle has to ask.
        if self._clock() - max(self._last_probe, self.last_success or 0.0) >= self._probe_seconds:
            await self._prove(engine)

    def _next_engine(self) -> Engine | None:
        """One with waiting items, or None. Where both the old and the new one have some, they take turns."""
        busy = [engine for engine in self.engines if engine.waiting]
        self._turn += 1
        return busy[self._turn % len(busy)] if busy else None

    async def _idle(self) -> None:
        self._has_work.clear()
        # Not wait_for: before Python 3.12 it loses a cancellation that comes with the event, and the loop never ends.
        notified = asyncio.ensure_future(self._has_work.wait())
        try:
            await asyncio.wait({notified}, timeout=None if self.is_paused else self._probe_seconds)
        finally:
            notified.cancel()
        if not (notified.done() or self.is_paused):
            await self._prove(self.engines[-1])

    async def _prove(self, engine: Engine) -> None:
        """Probe and count it; say so when this has failed for too long."""
        begin = self._last_probe = self._clock()
        try:
            await self.probe(engine.model)
        except Exception as error:  # whatever a model raises; `/ready` shows it
            logger.error("the probe forward failed: %s", describe_exception(error))
            self._metrics.probes.labels(outcome="failed").inc()
            if self._failing_since is None:
                self._failing_since = begin
            elif self._clock() - self._failing_since >= self._dead_seconds:
                self._failing_since = None
                self._on_dead()
        else:
            self._metrics.probes.labels(outcome="succeeded").inc()

    async def _score(self, batch: Batch, scorer: BatchScorer) -> bool:
        """Whether any item got a reward."""
        start = self._clock()
        for item in batch.items:
            item.request.in_flight_tokens += item.num_tokens
            item.request.in_flight_items += 1
            self._metrics.queue_seconds.observe(start - item.waiting_since)
        try:
            scored = await self._worker.run(lambda: scorer.score([item.key for item in batch.items], _read_from(batch)))
        except (
            Exception
        ) as error:  # the scorer catches what the model raises; this is a bug, and reaches the waiters too
            logger.error("scoring a batch failed: %s", describe_exception(error))
            failed = InternalError("scoring failed; the server's log says where")
            scored = ScoredBatch([failed] * len(batch.items), [0] * len(batch.items))
        finally:
            for item in batch.items:
                item.request.in_flight_tokens -= item.num_tokens
                item.request.in_flight_items -= 1
                self._admission.hold(item.request, -item.num_tokens, -1)
        seconds = self._clock() - start
        requests = self._deliver(batch, scored, seconds)
        self._admission.wake()
        self._observe(batch, scored, seconds, len(requests))
        self._busy_since = start + seconds if any(engine.waiting for engine in self.engines) else None
        return any(isinstance(outcome, float) for outcome in scored.outcomes)

    def _deliver(self, batch: Batch, scored: ScoredBatch, seconds: float) -> set[Request]:
        requests: set[Request] = set()
        if any(isinstance(outcome, float) for outcome in scored.outcomes):
            self.has_succeeded()
            now = self._clock()
            self._admission.rate.add(batch.num_tokens, now - (self._busy_since or now - seconds))
        for item, charge, outcome in zip(batch.items, scored.charges, scored.outcomes, strict=True):
            request = item.request
            if request not in requests:
                requests.add(request)
                request.forward_seconds += seconds
            request.computed_tokens += charge
            if item.read_from is not None and item.key in scored.token_rewards:
                rewards = scored.token_rewards[item.key][item.read_from - item.num_tokens :]
                request.readings[item.slot] = replace(request.readings[item.slot], rewards=rewards)
            request.settle(item.slot, outcome)
        return requests

    def _observe(self, batch: Batch, scored: ScoredBatch, seconds: float, num_requests: int) -> None:
        for problem in scored.problems:
            logger.error("a forward failed: %s", problem)
        metrics = self._metrics
        metrics.forward_seconds.observe(seconds)
        metrics.batch_tokens_before.observe(batch.num_tokens)
        metrics.batch_tokens_after.observe(scored.computed_tokens)
        metrics.cache_hit_tokens.inc(scored.cached_tokens)
        metrics.cache_evictions.inc(scored.num_evicted)
        metrics.batch_items.observe(len(batch.items))
        metrics.batch_requests.observe(num_requests)
        metrics.forward_failures.labels(cause="error").inc(scored.num_failures)
        metrics.forward_failures.labels(cause="out_of_memory").inc(scored.num_out_of_memory)


def _read_from(batch: Batch) -> dict[bytes, int]:
    """Where reading begins in sequences whose reward is wanted at each token; equal ones may ask for more or less."""
    places: dict[bytes, int] = {}
    for item in batch.items:
        if item.read_from is not None:
            places[item.key] = min(item.read_from, places.get(item.key, item.read_from))
    return places


def probe(model: Scorer) -> None:
    """Score one token. Raises what the model raises, and ValueError for NaN or infinity."""
    if not np.isfinite(model.score_batch([PROBE_IDS]).rewards).all():
        raise ValueError("the model gives NaN or infinity for a single token")
