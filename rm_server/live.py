"""What the live page shows: the last rewards, and the rates of what ``/metrics`` counts.

Invariant: memory is bounded whatever is scored (a ring of rewards, a few seconds of counts, a number of pages), and no
text, id or key of anyone is in it. It costs nothing but the ring while no page is open.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
from prometheus_client.metrics import MetricWrapperBase

from rm_server.errors import OverloadedError

if TYPE_CHECKING:
    from rm_server.service import ScoringService

WINDOW = 4096
"""Rewards that are kept."""
TICK_SECONDS = 1.0
RATE_SECONDS = 10.0
"""Rates are over about this long."""
MAX_PAGES = 64
_BINS = 32
_QUANTILES = {"p05": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95}


class RewardWindow:
    """The last ``WINDOW`` rewards of one model."""

    def __init__(self) -> None:
        self._ring = np.zeros(WINDOW, dtype=np.float64)
        self._num_added = 0

    def add(self, reward: float) -> None:
        """Keep one, in the place of the oldest."""
        self._ring[self._num_added % WINDOW] = reward
        self._num_added += 1

    def values(self) -> np.ndarray:
        """float64 [N], in no particular order."""
        return self._ring[: min(self._num_added, WINDOW)]


def describe_rewards(values: np.ndarray, mean: float | None, std: float | None) -> dict[str, Any]:
    """Mean, quantiles and histogram of rewards [N]; ``mean`` and ``std`` are the checkpoint's, where it has them."""
    if not len(values):
        return {"count": 0, "mean": None, "std": None, "quantiles": None, "histogram": None, "drift": None}
    low, high = _ends(values, mean, std)
    counts, edges = np.histogram(np.clip(values, low, high), bins=_BINS, range=(low, high))
    found = float(values.mean())
    return {
        "count": len(values),
        "mean": found,
        "std": float(values.std()),
        "quantiles": dict(zip(_QUANTILES, np.quantile(values, list(_QUANTILES.values())).tolist(), strict=True)),
        "histogram": {"edges": edges.tolist(), "counts": counts.tolist()},
        "drift": (found - mean) / std if mean is not None and std else None,
    }


def _ends(values: np.ndarray, mean: float | None, std: float | None) -> tuple[float, float]:
    """A histogram's ends. With the checkpoint's spread they stay where they are, so that bars can be compared."""
    if mean is not None and std:
        return mean - 4 * std, mean + 4 * std
    low, high = (float(end) for end in np.quantile(values, [0.005, 0.995]))
    margin = 0.05 * (high - low) or max(abs(low), 1.0) * 0.05
    return low - margin, high + margin


class Live:
    """Makes one event a tick, the same for every open page."""

    def __init__(self, service: "ScoringService") -> None:
        self.num_pages = 0
        self._service = service
        self._history: deque[tuple[float, dict[str, float]]] = deque()
        self._event = b""
        self._made_at = -math.inf

    def check_room(self) -> None:
        """Raise OverloadedError where as many pages are open as may be."""
        if self.num_pages >= MAX_PAGES:
            raise OverloadedError(f"{MAX_PAGES} live pages are open, the limit", 30)

    async def stream(self) -> AsyncIterator[bytes]:
        """Events until the caller leaves or the server shuts down."""
        self.num_pages += 1
        try:
            while self._service.state != "draining":
                yield self._latest()
                await asyncio.sleep(TICK_SECONDS - time.time() % TICK_SECONDS)
        finally:
            self.num_pages -= 1

    def _latest(self) -> bytes:
        now = self._service.clock()
        if now - self._made_at >= 0.5 * TICK_SECONDS:
            self._event = b"data: " + orjson.dumps(self._make(now)) + b"\n\n"
            self._made_at = now
        return self._event

    def _make(self, now: float) -> dict[str, Any]:
        service, metrics = self._service, self._service.metrics
        engine = service.engine
        record = engine.model.record if engine is not None else None
        has_spread = record is not None and record.num_eval > 0 and record.reward_std > 0
        mean, std = (record.reward_mean, record.reward_std) if record is not None and has_spread else (None, None)
        return {
            "time": time.time(),
            "state": service.state,
            "model": engine.model.name if engine is not None else None,
            "reward_id": engine.model.reward_id if engine is not None else None,
            "checkpoint": {"mean": mean, "std": std} if has_spread else None,
            "rewards": describe_rewards(engine.window.values() if engine is not None else np.zeros(0), mean, std),
            "queue": {
                "tokens": service.admission.tokens,
                "items": service.admission.items,
                "waiting_parts": service.admission.num_waiting,
                "requests": service.num_open,
            },
            "rates": self._rates(now, engine.scorer.token_limit if engine is not None else 0),
            "refused": dict(_by_label(metrics.requests_refused)),
            "failed": dict(_by_label(metrics.items_failed)),
            "cancelled": _value(metrics.requests_cancelled, "_total"),
        }

    def _rates(self, now: float, token_limit: int) -> dict[str, float | None]:
        counts = self._counts()
        while len(self._history) > 1 and self._history[1][0] <= now - RATE_SECONDS:
            self._history.popleft()
        if self._history and self._history[0][0] < now - 2 * RATE_SECONDS:
            self._history.clear()  # nobody looked for a while: that is no rate of now
        self._history.append((now, counts))
        begin, before = self._history[0]
        seconds = now - begin
        gained = {name: value - before[name] for name, value in counts.items()}

        def per(name: str, of: float) -> float | None:
            return gained[name] / of if of > 0 else None

        sent = gained["sent_tokens"]
        queue, forward = per("queue_seconds", gained["queue_items"]), per("forward_seconds", gained["batches"])
        fill = per("computed_tokens", gained["batches"] * token_limit)
        return {
            "items": per("items", seconds),
            "tokens": per("sent_tokens", seconds),
            "computed_tokens": per("computed_tokens", seconds),
            "batch_fill": None if fill is None else min(fill, 1.0),  # a long sequence is a batch over the budget
            "batch_items": per("batch_items", gained["batches"]),
            "saved": 1 - gained["computed_tokens"] / sent if sent > 0 else None,
            "cache_hits": per("cache_hit_tokens", sent),
            "queue_ms": None if queue is None else queue * 1000,
            "forward_ms": None if forward is None else forward * 1000,
        }

    def _counts(self) -> dict[str, float]:
        metrics = self._service.metrics
        return {
            "items": _value(metrics.items_scored, "_total"),
            "sent_tokens": _value(metrics.batch_tokens_before, "_sum"),
            "computed_tokens": _value(metrics.batch_tokens_after, "_sum"),
            "cache_hit_tokens": _value(metrics.cache_hit_tokens, "_total"),
            "batches": _value(metrics.batch_items, "_count"),
            "batch_items": _value(metrics.batch_items, "_sum"),
            "queue_seconds": _value(metrics.queue_seconds, "_sum"),
            "queue_items": _value(metrics.queue_seconds, "_count"),
            "forward_seconds": _value(metrics.forward_seconds, "_sum"),
        }


def _value(metric: MetricWrapperBase, ending: str) -> float:
    """The one sample of a metric without labels whose name ends so."""
    return next(
        float(sample.value) for family in metric.collect() for sample in family.samples if sample.name.endswith(ending)
    )


def _by_label(metric: MetricWrapperBase) -> Iterator[tuple[str, float]]:
    """The counts of a counter with one label, by the label's value."""
    for family in metric.collect():
        for sample in family.samples:
            if sample.name.endswith("_total"):
                yield next(iter(sample.labels.values())), float(sample.value)
