"""The asyncio client: RewardClient's methods, awaited.

Invariant: as RewardClient, and a call never takes longer than its budget. Rule for event loops: connections belong to
the loop that opened them, so there is one pool per running loop, opened on first use; ``aclose`` closes the running
loop's. Calls from several loops (or several ``asyncio.run`` one after another) are therefore right, but each loop
should close its own pool before it ends.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import httpx

from rm_client.answers import GroupsResult, ScoreResult, ServerInfo, read_info
from rm_client.calls import Completion, FlatCall, GroupsCall, Text, flat_call, groups_call
from rm_client.client import attempt_timeout, http_settings, late, not_ready, patience, read_response, reason_of
from rm_client.errors import ResponseError, RewardClientError
from rm_client.holes import Scoring
from rm_client.retry import RetryNotice, RetryPolicy, connection_error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Unpack

    from rm_client.calls import Message, ScoreOptions


class AsyncRewardClient:
    """Scores on a reward server, from asyncio. Arguments as RewardClient's.

    Any number of calls may run at once: they share ``max_connections`` connections, and the rest wait for a free one.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        reward_id: str | None = None,
        timeout: float = 120.0,
        connect_timeout: float = 10.0,
        max_retries: int = 100,
        budget_seconds: float = 600.0,
        max_connections: int = 128,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.reward_id = reward_id
        self._settings, self._transport = http_settings(base_url, api_key, max_connections), transport
        self._pools: dict[asyncio.AbstractEventLoop, httpx.AsyncClient] = {}
        self._lock = threading.Lock()  # loops may run in different threads
        self._retry = RetryPolicy(max_retries, budget_seconds)
        self._timeout, self._connect_timeout = timeout, connect_timeout
        self._sleep, self._clock, self._draw = sleep, clock, draw
        self._notice = RetryNotice(clock)
        self._tokenizer: str | None = None

    async def score(
        self,
        prompt: Text,
        completions: Sequence[Completion],
        *,
        reference: Any = None,
        **options: Unpack[ScoreOptions],
    ) -> ScoreResult:
        """As RewardClient.score."""
        beside = {"prompt": prompt} if reference is None else {"prompt": prompt, "reference": reference}
        return await self._flat(flat_call("completions", completions, pin=self.reward_id, beside=beside, **options))

    async def score_groups(self, groups: Sequence[Mapping[str, Any]], **options: Unpack[ScoreOptions]) -> GroupsResult:
        """As RewardClient.score_groups."""
        call: GroupsCall = groups_call(groups, pin=self.reward_id, **options)
        try:
            answer = await self._post(call)
        except ResponseError as error:
            return call.failed(error)
        return call.read(answer)

    async def score_texts(self, texts: Sequence[str], **options: Unpack[ScoreOptions]) -> ScoreResult:
        """As RewardClient.score_texts."""
        return await self._flat(flat_call("texts", texts, pin=self.reward_id, **options))

    async def score_conversations(
        self, conversations: Sequence[Sequence[Message]], **options: Unpack[ScoreOptions]
    ) -> ScoreResult:
        """As RewardClient.score_conversations."""
        return await self._flat(flat_call("conversations", conversations, pin=self.reward_id, **options))

    async def score_ids(
        self, input_ids: Any, *, tokenizer: str | None = None, **options: Unpack[ScoreOptions]
    ) -> ScoreResult:
        """As RewardClient.score_ids."""
        if tokenizer is None:
            tokenizer = self._tokenizer = self._tokenizer or (await self.info()).tokenizer_hash
        beside = {} if tokenizer is None else {"tokenizer": tokenizer}
        return await self._flat(flat_call("input_ids", input_ids, pin=self.reward_id, beside=beside, **options))

    async def info(self) -> ServerInfo:
        """As RewardClient.info."""
        return read_info(await self._request("GET", "info"))

    async def health(self) -> bool:
        """As RewardClient.health."""
        return await self._why_not("health") is None

    async def ready(self) -> bool:
        """As RewardClient.ready."""
        return await self._why_not("ready") is None

    async def wait_until_ready(self, timeout_seconds: float = 300.0) -> None:
        """As RewardClient.wait_until_ready."""
        started = self._clock()
        while (reason := await self._why_not("ready")) is not None:
            if self._clock() - started > timeout_seconds:
                raise not_ready(str(self._settings["base_url"]), timeout_seconds, reason)
            await self._sleep(0.25)

    async def aclose(self) -> None:
        """Close the running loop's connections."""
        with self._lock:
            pool = self._pools.pop(asyncio.get_running_loop(), None)
        if pool is not None:
            await pool.aclose()

    async def __aenter__(self) -> AsyncRewardClient:
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        await self.aclose()

    def _pool(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        with self._lock:
            pool = self._pools.get(loop)
            if pool is None:
                # A loop that ended without aclose() cannot close its connections any more: let go of them.
                self._pools = {known: its for known, its in self._pools.items() if not known.is_closed()}
                pool = self._pools[loop] = httpx.AsyncClient(**self._settings, transport=self._transport)
        return pool

    async def _flat(self, call: FlatCall) -> ScoreResult:
        try:
            answer = await self._post(call)
        except ResponseError as error:
            return call.failed(error)
        return call.read(answer)

    async def _post(self, call: FlatCall | GroupsCall) -> Mapping[str, Any]:
        return await self._request("POST", "score", Scoring(call), patience(self._timeout, call.payload))

    async def _why_not(self, path: str) -> RewardClientError | None:
        pool = self._pool()
        try:
            return reason_of(await pool.get(path, timeout=self._connect_timeout))
        except httpx.RequestError as error:
            return connection_error(error, str(pool.base_url.join(path)))

    async def _request(
        self, method: str, path: str, scoring: Scoring | None = None, timeout: float | None = None
    ) -> Mapping[str, Any]:
        pool, started, attempt = self._pool(), self._clock(), 0
        while True:
            left = self._retry.budget_seconds - (self._clock() - started)
            limits = attempt_timeout(timeout or self._timeout, self._connect_timeout, left)
            try:
                content = None if scoring is None else scoring.content
                response = await _within(left, pool.request(method, path, content=content, timeout=limits))
                outcome = late(pool, path) if response is None else read_response(response, response.content)
            except httpx.RequestError as error:
                outcome = connection_error(error, str(pool.base_url.join(path)))
            if not isinstance(outcome, RewardClientError):
                if scoring is None:
                    return outcome
                not_now = scoring.take(outcome)
                if not_now is None:
                    return scoring.answer
                outcome = not_now
            outcome.num_attempts = attempt + 1
            wait = self._retry.wait_seconds(outcome, attempt, self._clock() - started, self._draw())
            if wait is None:
                if scoring is None:
                    raise outcome
                return scoring.given_up(outcome)
            self._notice.say(str(pool.base_url), outcome, wait)
            await self._sleep(wait)
            attempt += 1


async def _within(seconds: float, asking: Coroutine[Any, Any, httpx.Response]) -> httpx.Response | None:
    """The response, or None after so many seconds: httpx bounds each wait, this bounds them all (an answer may drip).

    Not wait_for, which before Python 3.12 loses a cancellation that comes with the answer.
    """
    task = asyncio.ensure_future(asking)
    try:
        await asyncio.wait({task}, timeout=max(seconds, 0.001))
        return task.result() if task.done() else None
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
