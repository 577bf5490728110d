"""Glue: callers on one side, the batch loop on the other.

A request comes in as a list of inputs. Part by part it is admitted, tokenised off the event loop, and put among the
waiting items; whenever the worker is free, the planner takes the next batch, so batches grow while the device is busy
and no timer delays anyone.

Invariant: whatever happens, each request's every item is settled exactly once, and what it held is given back.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from rm_server.admission import Admission
from rm_server.audit import AuditLog
from rm_server.batches import BatchLoop
from rm_server.conservative import conservative_model
from rm_server.engine import Engine, check_limits
from rm_server.errors import (
    AsleepError,
    DeadlineExceededError,
    DrainingError,
    LoadingError,
    NotReadyError,
    ServerError,
    TooLargeError,
)
from rm_server.groups import Request, WaitingItems
from rm_server.inputs import ItemInput, TokenizeOptions
from rm_server.intake import Intake
from rm_server.logs import current_request_id
from rm_server.metrics import Metrics
from rm_server.scorer import ServedModel
from rm_server.settings import ServerSettings
from rm_server.verification import rewards_of
from rm_server.worker import Worker

logger = logging.getLogger("rm_server")
T = TypeVar("T")


class ScoringService:
    """The engine behind every route."""

    def __init__(self, settings: ServerSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = settings
        self.clock = clock
        self.metrics = Metrics()
        self.rewards = rewards_of(settings, self.metrics)
        """What makes the rewards, where a recipe does."""
        self._audit = None
        if settings.audit_log is not None:
            self._audit = AuditLog(Path(settings.audit_log), settings.audit_max_bytes, self._count_audited)
        self.engine: Engine | None = None
        """What new requests go to; None until a model is loaded."""
        self.state: Literal["loading", "serving", "asleep", "draining"] = "loading"
        self.loads: set[object] = set()
        """Checkpoints that are being loaded, each on a thread of its own. Changed by those threads."""
        self.exit_on_stall: Callable[[], None] | None = None
        self.admission = Admission(
            max_tokens=settings.max_queued_tokens,
            max_items=settings.max_queued_items,
            max_queue_seconds=settings.max_queue_seconds,
            max_batch_tokens=settings.max_batch_tokens,
            clock=clock,
        )
        self._worker = Worker(
            "rm-scorer",
            stall_seconds=settings.stall_seconds,
            on_stall=partial(self._on_stall, "a forward"),
            clock=clock,
        )
        self._batches = BatchLoop(
            admission=self.admission,
            metrics=self.metrics,
            worker=self._worker,
            probe_seconds=settings.probe_seconds,
            dead_seconds=settings.stall_seconds,
            on_dead=partial(self._give_up, f"no forward has succeeded for {settings.stall_seconds:g} s"),
            clock=clock,
        )
        self._intake = Intake(
            settings,
            admission=self.admission,
            metrics=self.metrics,
            notify=self._batches.notify,
            on_stall=partial(self._on_stall, "the tokenizer"),
            clock=clock,
        )
        self._task: asyncio.Task[None] | None = None
        self._num_open = 0
        self._nothing_open = asyncio.Event()
        self._nothing_open.set()

    # ------------------------------------------------------------------ life

    async def start(self, load: Callable[[], ServedModel | None]) -> None:
        """Load the model on the worker thread, prove it with one forward, and begin to serve.

        Raises what ``load`` or the first forward raises, and SettingsError for limits the model cannot have.
        """
        if self.rewards is not None:
            await asyncio.to_thread(self.rewards.start)
        loaded = await asyncio.get_running_loop().run_in_executor(self._worker.executor, load)
        model = self.dress(loaded)
        check_limits(self.settings, model)
        await self._batches.probe(model)
        self.serve_with(Engine(model, self.settings, self.clock))
        self._task = asyncio.create_task(self._batches.run(), name="rm-batches")
        if self.state == "loading":
            self.state = "serving"

    def dress(self, model: ServedModel | None) -> ServedModel:
        """A loaded model as this server shows it: with the identity of what the settings make of its reward."""
        if model is not None:
            model = conservative_model(model, self.settings.conservative)
        if self.rewards is not None:
            return self.rewards.dress(model)
        assert model is not None, "this is a bug: neither a model nor a recipe"
        return model

    def serve_with(self, engine: Engine) -> None:
        """From now on, new requests go to this engine; one that was there finishes what it has."""
        self.engine = engine
        self._batches.engines.append(engine)
        self.admission.longest_item = engine.max_length

    def retire(self, engine: Engine) -> None:
        """Forget an engine that is idle and takes no new requests."""
        assert engine is not self.engine, "this is a bug: it takes the new requests"
        self._batches.engines.remove(engine)

    async def on_worker(self, work: Callable[[], T]) -> T:
        """Run something on the thread that runs the model, between two batches."""
        return await self._worker.run(work)

    async def fall_asleep(self) -> None:
        """Take no new requests, and wait for those that are open: ``grace_seconds``, then they get the same error."""
        self.state = "asleep"
        if self._num_open:
            await self._wait_until_nothing_is_open(self.settings.grace_seconds)
        if self._num_open:
            error = AsleepError("the model was put to sleep before this was scored", 5)
            self.admission.close(error)
            self._settle_all(error)
            await self._nothing_open.wait()
            self.admission.reopen()
        self._batches.is_paused = True
        self._batches.notify()

    def wake_up(self) -> None:
        """Take requests again. A forward has just succeeded."""
        self._batches.has_succeeded()
        self._batches.is_paused = False
        self._batches.notify()
        if self.state == "asleep":
            self.state = "serving"

    def begin_drain(self) -> None:
        """Admit no new request. One of which a part was admitted goes on, and its other parts come in."""
        self.state = "draining"
        self.admission.close(_shutting_down(), let_admitted_finish=True)
        if self.rewards is not None:
            self.rewards.turn_away(_shutting_down())

    async def drain(self, grace_seconds: float) -> None:
        """Admit no new request, wait for those admitted, and fail what is not done after the grace period."""
        self.begin_drain()
        if self._num_open and grace_seconds > 0:
            await self._wait_until_nothing_is_open(grace_seconds)
        if self._num_open:
            logger.warning("the grace period is over, %d requests are not finished", self._num_open)
        self.admission.close(_shutting_down())
        self._settle_all(DrainingError("the server shut down before this was scored", 5))

    async def stop(self) -> None:
        """Fail whatever is not done and end the loop."""
        await self.drain(0)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        if self._audit is not None:
            await asyncio.to_thread(self._audit.close)
        self._worker.close()
        self._intake.tokenizers.close()
        if self.rewards is not None:
            await asyncio.to_thread(self.rewards.close)

    async def _wait_until_nothing_is_open(self, seconds: float) -> None:
        waiter = asyncio.ensure_future(self._nothing_open.wait())
        await asyncio.wait({waiter}, timeout=seconds)
        waiter.cancel()

    def _settle_all(self, error: ServerError) -> None:
        for request in [request for engine in self._batches.engines for request in engine.open]:
            request.settle_rest(error)
        if self.rewards is not None:
            self.rewards.abandon_all(error)

    @property
    def num_open(self) -> int:
        """Requests that are not answered."""
        return self._num_open

    @property
    def model(self) -> ServedModel | None:
        """What scores new requests; None until it is loaded."""
        return self.engine.model if self.engine is not None else None

    @property
    def waiting(self) -> WaitingItems:
        """The items that wait for the model that scores new requests."""
        assert self.engine is not None, "this is a bug: nothing is loaded"
        return self.engine.waiting

    @property
    def max_length(self) -> int:
        """Longest sequence that is scored, in tokens."""
        return self.admission.longest_item

    @property
    def is_loading_beside(self) -> bool:
        """A checkpoint is being loaded on a thread of its own."""
        return bool(self.loads)

    @property
    def is_busy(self) -> bool:
        """Whether a thread is at work that nothing can stop: a forward, tokenising, or loading another checkpoint."""
        return self._worker.busy_seconds > 0 or self._intake.tokenizers.busy_seconds > 0 or self.is_loading_beside

    def why_not_serving(self) -> ServerError | None:
        """The error for new requests, or None while they are taken."""
        if self.state == "loading":
            return LoadingError("the model is being loaded", 5)
        if self.state == "draining":
            return _shutting_down()
        if self.state == "asleep":
            return AsleepError("the model is asleep; POST /admin/wake wakes it", 5)
        return None

    def why_not_ready(self) -> ServerError | None:
        """The error of `/ready`, or None."""
        error = self.why_not_serving()
        if error is not None:
            return error
        for what, worker in (("a forward", self._worker), ("the tokenizer", self._intake.tokenizers)):
            if worker.busy_seconds > self.settings.stall_seconds:
                return NotReadyError(f"{what} has been running for {worker.busy_seconds:.0f} s", 5)
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
        self.metrics.asleep.set(self.state == "asleep")
        if self.engine is not None:
            self.metrics.token_limit.set(self.engine.scorer.token_limit)
            mean, drift = self.engine.recent.mean, self.engine.drift
            self.metrics.reward_recent_mean.set(math.nan if mean is None else mean)
            self.metrics.reward_drift.set(math.nan if drift is None else drift)
            cache = self.engine.scorer.cache
            self.metrics.cache_bytes.set(cache.num_bytes if cache is not None else 0)
            self.metrics.cache_prefixes.set(len(cache) if cache is not None else 0)

    def _on_stall(self, what: str) -> None:
        self._give_up(f"{what} has been running for {self.settings.stall_seconds:g} s: it is stuck")

    def _give_up(self, why: str) -> None:
        """Nothing that this process can mend; with ``exit_on_stall`` it ends for its supervisor."""
        self.metrics.stalls.inc()
        logger.error("%s", why)
        if self.exit_on_stall is not None:
            self.exit_on_stall()

    # ------------------------------------------------------------------ one request

    def refuse_too_many(self, num_items: int) -> None:
        """Raise TooLargeError where a request has more items than any may have."""
        if num_items > (limit := self.settings.max_request_items):
            raise TooLargeError(f"{num_items} items in one request are over the limit of {limit}")

    async def score(self, inputs: Sequence[ItemInput], options: TokenizeOptions, deadline: float) -> Request:
        """Score all inputs; returns the request with a reward or an error for each, in order.

        ``deadline`` is on this service's clock. Raises ServerError for the request as a whole. If the calling task is
        cancelled, what waits is dropped.
        """
        error = self.why_not_serving()
        if error is not None:
            raise error
        self.refuse_too_many(len(inputs))
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        request = Request(len(inputs), lambda: None if settled.done() else settled.set_result(None))
        if not inputs:
            return request
        engine = self.engine
        assert engine is not None, "this is a bug: requests are taken before the model is loaded"
        engine.enter(request)
        self._num_open += 1
        self._nothing_open.clear()
        verdicts = None
        try:
            verdicts = (
                None
                if self.rewards is None
                else await self.rewards.begin(
                    inputs, engine.model, deadline - self.clock(), is_templated=options.text_as == "templated"
                )
            )
            if self.rewards is None or self.rewards.recipe.model_part is not None:
                await self._intake.feed(engine, request, inputs, options, deadline, settled)
                if not settled.done():  # as after a refusal, of which there may be hundreds a second
                    await asyncio.wait({settled}, timeout=max(deadline - self.clock(), 0))
            else:
                self.metrics.requests_admitted.inc()
            request.settle_rest(DeadlineExceededError("was not scored before the deadline"))
            if verdicts is not None:
                await asyncio.wait({verdicts.task}, timeout=max(deadline - self.clock(), 0))
                verdicts.combine_into(request)
        except asyncio.CancelledError:
            self.metrics.requests_cancelled.inc()
            raise
        finally:
            if verdicts is not None and self.rewards is not None:
                self.rewards.end(verdicts)
            self._let_go(engine, request)
        self.metrics.count_outcomes(request)
        for reward in request.rewards:
            if reward is not None:
                engine.recent.add(reward)
                engine.window.add(reward)
        if self._audit is not None:
            self._audit.record(current_request_id(), engine.model, request)
        return request

    def _let_go(self, engine: Engine, request: Request) -> None:
        """Drop what still waits and give back what is held for it; the batch in flight gives back the rest itself."""
        engine.waiting.discard(request)
        tokens, items = request.in_flight_tokens - request.held_tokens, request.in_flight_items - request.held_items
        if items:
            self.admission.hold(request, tokens, items)
            self.admission.wake()
        engine.leave(request)
        self._num_open -= 1
        if not self._num_open:
            self._nothing_open.set()

    def _count_audited(self, outcome: str, records: int) -> None:
        self.metrics.audit_records.labels(outcome=outcome).inc(records)


def _shutting_down() -> DrainingError:
    return DrainingError("the server is shutting down", 5)
