"""When to try again, after how long, and that it is said. No clock and no randomness of its own.

Invariant: only failures before an answer, and answers that say "not now" (502, 503; of some items or of all), are tried
again; a refusal (4xx), our own failure (500) and a missed deadline (504, the caller's own) never are; and no wait goes
past the call's budget.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

import httpx

from rm_client.errors import ConnectionFailedError, RequestTimeoutError, RewardClientError, UnavailableError

logger = logging.getLogger("rm_client")

NOTICE_SECONDS = 60.0


class RetryNotice:
    """A warning in the log that calls are tried again, once a minute at most, however many of them wait."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._said_at: float | None = None

    def say(self, url: str, error: RewardClientError, wait_seconds: float) -> None:
        """About one failed attempt."""
        now = self._clock()
        if self._said_at is None or now - self._said_at >= NOTICE_SECONDS:
            self._said_at = now
            about = "" if url in error.message else f"{url}: "
            logger.warning("trying again in %.1f s: %s%s", wait_seconds, about, error)


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential backoff with jitter: ``first_wait * 2**n`` up to ``longest_wait``, times 0.5 to 1 at random.

    ``Retry-After`` is a floor: the wait is never shorter, and up to a quarter longer, so that callers who were turned
    away together do not come back together. ``budget_seconds`` bounds one call with all its attempts and waits.
    """

    max_retries: int = 100
    budget_seconds: float = 600.0
    first_wait_seconds: float = 0.5
    longest_wait_seconds: float = 30.0

    def wait_seconds(
        self, error: RewardClientError, attempt: int, elapsed_seconds: float, random: float
    ) -> float | None:
        """Seconds to wait after the failed attempt number ``attempt`` (from 0), or None to give up.

        ``random`` is a draw from [0, 1).
        """
        again = isinstance(error, ConnectionFailedError | UnavailableError) and not isinstance(
            error, RequestTimeoutError
        )
        if not again or not error.retryable or attempt >= self.max_retries:
            return None
        wait = min(self.longest_wait_seconds, self.first_wait_seconds * 2.0 ** min(attempt, 30)) * (0.5 + 0.5 * random)
        asked = error.retry_after_seconds if isinstance(error, UnavailableError) else None
        if asked is not None:
            wait = max(wait, asked * (1 + 0.25 * random))
        return wait if elapsed_seconds + wait < self.budget_seconds else None


def connection_error(error: httpx.RequestError, url: str) -> ConnectionFailedError:
    """Translate httpx's exception. Only a failed or broken connection is worth another attempt."""
    built = _translated(error, url)
    built.__cause__ = error
    return built


def retry_after_seconds(header: str | None, date: str | None) -> float | None:
    """Read ``Retry-After``: seconds, or a date, which is measured against the answer's own ``Date``."""
    if header is None:
        return None
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(header) - parsedate_to_datetime(date or "")).total_seconds())
    except (ValueError, TypeError):
        return None  # a header that no one can read asks for nothing


def _translated(error: httpx.RequestError, url: str) -> ConnectionFailedError:
    reason = str(error) or type(error).__name__
    if isinstance(error, httpx.ConnectTimeout):
        return ConnectionFailedError(f"{url}: no connection in time: {reason}")
    if isinstance(error, httpx.PoolTimeout):
        return RequestTimeoutError(f"{url}: no free connection in the pool within the budget")
    if isinstance(error, httpx.TimeoutException):
        return RequestTimeoutError(f"{url}: no answer in time ({type(error).__name__}); raise timeout, or send less")
    retryable = isinstance(error, httpx.NetworkError | httpx.RemoteProtocolError)
    return ConnectionFailedError(f"{url}: {reason}", retryable=retryable)
