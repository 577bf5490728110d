"""State of one served model: the model, its scorer with the prefix cache, and the items that wait for it.

Invariant: a request belongs to one engine from its arrival to its answer, so its ids come from one tokenizer and its
rewards from one model, whatever the server serves by then.
"""

import asyncio
import time
from collections.abc import Callable

from rm_server.groups import Request, WaitingItems
from rm_server.live import RewardWindow
from rm_server.planner import Counting
from rm_server.scorer import BatchScorer, ServedModel
from rm_server.settings import ServerSettings, SettingsError


class Engine:
    """One model and its work. A swap puts a second one beside the first until the first has nothing left to do."""

    def __init__(
        self, model: ServedModel, settings: ServerSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.model = model
        self.counting = counting_of(model, settings)
        self.scorer = BatchScorer(
            model,
            settings.max_batch_tokens,
            self.counting,
            clock,
            settings.prefix_cache_mb * 1024 * 1024,
            settings.conservative,
        )
        self.waiting = WaitingItems()
        self.open: set[Request] = set()
        """Requests that are not answered. Changed by ``enter`` and ``leave`` alone."""
        self.is_idle = asyncio.Event()
        """Set while no request is open."""
        self.is_idle.set()
        self.recent = RecentMean()
        """Of the rewards that were answered."""
        self.window = RewardWindow()
        """The last of them, for the live page."""
        self.max_length = settings.max_length or model.max_length

    def enter(self, request: Request) -> None:
        """A request is scored here."""
        self.open.add(request)
        self.is_idle.clear()

    def leave(self, request: Request) -> None:
        """A request has its answer."""
        self.open.discard(request)
        if not self.open:
            self.is_idle.set()

    @property
    def drift(self) -> float | None:
        """How far the recent mean reward is from the checkpoint's, in the checkpoint's standard deviations.

        None where the checkpoint does not say, or nothing was scored yet.
        """
        record = self.model.record
        if record is None or not record.num_eval or not record.reward_std or self.recent.mean is None:
            return None
        return (self.recent.mean - record.reward_mean) / record.reward_std


class RecentMean:
    """Mean of the last ``WINDOW`` numbers, about: older ones fade."""

    WINDOW = 1000

    def __init__(self) -> None:
        self.mean: float | None = None
        self._count = 0

    def add(self, number: float) -> None:
        """Count one."""
        self._count = min(self._count + 1, self.WINDOW)
        before = self.mean if self.mean is not None else 0.0
        self.mean = before + (number - before) / self._count


def counting_of(model: ServedModel, settings: ServerSettings) -> Counting:
    """How batches are charged: a model with a token tree computes a shared prefix once, any other pays its padding."""
    if settings.exact:
        return "alone"
    return "shared" if model.shares_prefixes else "padded"


def why_no_sharing(model: ServedModel, settings: ServerSettings) -> str | None:
    """Why prefixes are not shared, in words, or None where they are."""
    return "every sequence is scored alone (exact)" if settings.exact else model.sharing_off


def why_no_cache(model: ServedModel, settings: ServerSettings) -> str | None:
    """Why there is no prefix cache, in words, or None where there is one."""
    if (reason := why_no_sharing(model, settings)) is not None:
        return reason
    return "prefix_cache_mb is 0" if settings.prefix_cache_mb == 0 else None


def check_limits(settings: ServerSettings, model: ServedModel) -> None:
    """Raise SettingsError for limits that this model cannot have."""
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
