"""The blocking client.

Invariant: a call returns checked rewards or raises one of rm_client.errors. After the budget no attempt
begins and no wait for the server; and within an attempt no wait is longer than what was left when the attempt began.
One RewardClient is one connection pool; it may be used from many threads. After a fork, make a new one.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import httpx

from rm_client.answers import GroupsResult, ScoreResult, ServerInfo, read_info
from rm_client.calls import Completion, FlatCall, GroupsCall, Text, flat_call, groups_call
from rm_client.errors import InvalidAnswerError, RequestTimeoutError, ResponseError, RewardClientError, response_error
from rm_client.holes import Scoring
from rm_client.retry import RetryNotice, RetryPolicy, connection_error, retry_after_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Unpack

    from rm_client.calls import Message, ScoreOptions


ANSWER_SECONDS = 10.0
"""What an answer may take beyond its deadline to be made and sent."""


class RewardClient:
    """Scores on a reward server, blocking.

    ``base_url``: such as ``http://127.0.0.1:8000``; a path in it is kept as a prefix.
    ``api_key``: sent as ``Authorization: Bearer``.
    ``reward_id``: pin; the server refuses to score with another reward model, and every answer is checked.
    ``timeout``: seconds for one attempt (the server answers 503 before the default passes; a call with a longer
    ``deadline_ms`` waits for that); ``connect_timeout``: seconds to connect. ``budget_seconds`` bounds the whole call,
    waits included (an answer that drips and then stops can take one ``timeout`` more), and ``max_retries`` the attempts
    (by default the budget ends first: a server that restarts may take minutes to load). What is retried is in
    rm_client.retry; a warning says so once a minute. Of an answer in which items have no reward for a reason that may
    pass, these alone are sent again.
    ``max_connections``: of the pool; more calls at once wait for a free one.
    ``transport``: an httpx transport, the seam for tests. ``sleep``, ``clock``, ``draw``: likewise for time and chance.
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
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.reward_id = reward_id
        self._http = httpx.Client(**http_settings(base_url, api_key, max_connections), transport=transport)
        self._retry = RetryPolicy(max_retries, budget_seconds)
        self._timeout, self._connect_timeout = timeout, connect_timeout
        self._sleep, self._clock, self._draw = sleep, clock, draw
        self._notice = RetryNotice(clock)
        self._tokenizer: str | None = None

    def score(
        self,
        prompt: Text,
        completions: Sequence[Completion],
        *,
        reference: Any = None,
        **options: Unpack[ScoreOptions],
    ) -> ScoreResult:
        """Score the answers to one prompt: one group, whose prompt is computed once.

        ``prompt``: text, or messages. ``completions``: texts, messages, or ``{"content", "finished": False}`` for one
        that was cut by its length limit. ``reference``: what the server's verifiers compare with. See ScoreOptions.
        """
        beside = {"prompt": prompt} if reference is None else {"prompt": prompt, "reference": reference}
        return self._flat(flat_call("completions", completions, pin=self.reward_id, beside=beside, **options))

    def score_groups(self, groups: Sequence[Mapping[str, Any]], **options: Unpack[ScoreOptions]) -> GroupsResult:
        """Score many groups in one request: ``{"prompt", "completions"}``, and ``id``, ``reference`` if wanted."""
        call: GroupsCall = groups_call(groups, pin=self.reward_id, **options)
        try:
            answer = self._post(call)
        except ResponseError as error:
            return call.failed(error)
        return call.read(answer)

    def score_texts(self, texts: Sequence[str], **options: Unpack[ScoreOptions]) -> ScoreResult:
        """Score whole texts, prompt and answer in one string; special tokens in them are read as such."""
        return self._flat(flat_call("texts", texts, pin=self.reward_id, **options))

    def score_conversations(
        self, conversations: Sequence[Sequence[Message]], **options: Unpack[ScoreOptions]
    ) -> ScoreResult:
        """Score whole conversations, each a list of messages that ends with the answer."""
        return self._flat(flat_call("conversations", conversations, pin=self.reward_id, **options))

    def score_ids(
        self, input_ids: Any, *, tokenizer: str | None = None, **options: Unpack[ScoreOptions]
    ) -> ScoreResult:
        """Score token ids (N sequences: lists, arrays or tensors).

        ``tokenizer``: hash of the tokenizer that made them, so that a server with another one refuses them. Not given:
        the hash that `/info` stated when it was first needed.
        """
        if tokenizer is None:
            tokenizer = self._tokenizer = self._tokenizer or self.info().tokenizer_hash
        beside = {} if tokenizer is None else {"tokenizer": tokenizer}
        return self._flat(flat_call("input_ids", input_ids, pin=self.reward_id, beside=beside, **options))

    def info(self) -> ServerInfo:
        """What is being served: reward_id, tokenizer hash, limits, mean and spread of the reward."""
        return read_info(self._request("GET", "info"))

    def health(self) -> bool:
        """Whether the server is alive. One attempt, no exception."""
        return self._why_not("health") is None

    def ready(self) -> bool:
        """Whether the server can score now. One attempt, no exception."""
        return self._why_not("ready") is None

    def wait_until_ready(self, timeout_seconds: float = 300.0) -> None:
        """Return once the server can score; raises RewardClientError, which says why not, when it cannot in time."""
        started = self._clock()
        while (reason := self._why_not("ready")) is not None:
            if self._clock() - started > timeout_seconds:
                raise not_ready(str(self._http.base_url), timeout_seconds, reason)
            self._sleep(0.25)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> RewardClient:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def _flat(self, call: FlatCall) -> ScoreResult:
        try:
            answer = self._post(call)
        except ResponseError as error:
            return call.failed(error)
        return call.read(answer)

    def _post(self, call: FlatCall | GroupsCall) -> Mapping[str, Any]:
        return self._request("POST", "score", Scoring(call), patience(self._timeout, call.payload))

    def _why_not(self, path: str) -> RewardClientError | None:
        try:
            return reason_of(self._http.get(path, timeout=self._connect_timeout))
        except httpx.RequestError as error:
            return connection_error(error, str(self._http.base_url.join(path)))

    def _request(
        self, method: str, path: str, scoring: Scoring | None = None, timeout: float | None = None
    ) -> Mapping[str, Any]:
        started, attempt = self._clock(), 0
        while True:
            left = self._retry.budget_seconds - (self._clock() - started)
            limits = attempt_timeout(timeout or self._timeout, self._connect_timeout, left)
            try:
                content = None if scoring is None else scoring.content
                outcome = self._attempt(method, path, content, limits, started + self._retry.budget_seconds)
            except httpx.RequestError as error:
                outcome = connection_error(error, str(self._http.base_url.join(path)))
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
            self._notice.say(str(self._http.base_url), outcome, wait)
            self._sleep(wait)
            attempt += 1

    def _attempt(
        self, method: str, path: str, content: bytes | None, limits: httpx.Timeout, ends: float
    ) -> Mapping[str, Any] | RewardClientError:
        body = bytearray()
        with self._http.stream(method, path, content=content, timeout=limits) as response:
            for chunk in response.iter_bytes():
                body += chunk
                if self._clock() > ends:  # httpx bounds each wait, this bounds them all (an answer may drip)
                    return late(self._http, path)
        return read_response(response, bytes(body))


def http_settings(base_url: str, api_key: str | None, max_connections: int) -> dict[str, Any]:
    """What both clients give to httpx. Raises ValueError for a URL without scheme or host, and for an unusable key."""
    try:
        url = httpx.URL(base_url)
    except (httpx.InvalidURL, TypeError) as error:
        raise ValueError(f"base_url: {error}") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"base_url: expected http://HOST:PORT, got {base_url!r}")
    headers = {"Accept": "application/json", "Content-Type": "application/json"}
    if api_key is not None:
        key = api_key.strip()  # it was read from a file, with its line's end
        if not key or not key.isascii() or not key.isprintable():
            # Said here and without the key: the HTTP library would quote it in its error.
            raise ValueError("api_key: must be printable ASCII on one line, and not empty")
        headers["Authorization"] = f"Bearer {key}"
    # 4 s: below the 5 s after which uvicorn closes an idle connection, so that a request does not meet a closing one.
    limits = httpx.Limits(
        max_connections=max_connections, max_keepalive_connections=max_connections, keepalive_expiry=4.0
    )
    return {"base_url": url, "headers": headers, "limits": limits}


def patience(timeout: float, payload: Mapping[str, Any]) -> float:
    """Seconds for one attempt of a call: a server that may take until the call's own deadline is given until then."""
    deadline_ms: float | None = payload.get("deadline_ms")
    return timeout if deadline_ms is None else max(timeout, deadline_ms / 1000 + ANSWER_SECONDS)


def attempt_timeout(timeout: float, connect_timeout: float, left: float) -> httpx.Timeout:
    """Limits of one attempt, none past what is ``left`` of the budget; a call may wait that long for a connection."""
    left = max(left, 0.001)
    return httpx.Timeout(min(timeout, left), connect=min(connect_timeout, left), pool=left)


def reason_of(response: httpx.Response) -> RewardClientError | None:
    """Why a probe's answer is not a yes; None where it is."""
    answer = None if response.status_code == 200 else read_response(response, response.content)
    return answer if isinstance(answer, RewardClientError) else None


def not_ready(url: str, seconds: float, reason: RewardClientError) -> RewardClientError:
    """What ``wait_until_ready`` raises."""
    return RewardClientError(f"{url}: not ready within {seconds:g} s; the last try: {reason}", retryable=True)


def late(http: httpx.Client | httpx.AsyncClient, path: str) -> RequestTimeoutError:
    """An answer that had begun, or not, when the budget ended."""
    return RequestTimeoutError(f"{http.base_url.join(path)}: no answer within the budget")


def read_response(response: httpx.Response, content: bytes) -> Mapping[str, Any] | RewardClientError:
    """The decoded answer, or the exception that it stands for (returned, so that the caller may retry)."""
    try:
        body: Any = json.loads(content)
    except ValueError:  # covers bytes that are no UTF-8
        body = None
    if response.status_code == 200 and isinstance(body, Mapping):
        return body
    if response.is_success:
        return InvalidAnswerError(f"{response.url}: expected a JSON object", status=response.status_code)
    if response.is_redirect:
        target = response.headers.get("Location", "another address")
        return ResponseError(
            f"{response.url}: redirects to {target}; give that as base_url", status=response.status_code
        )
    error = response_error(response.status_code, body, text=content.decode(errors="replace"))
    error.retry_after_seconds = retry_after_seconds(response.headers.get("Retry-After"), response.headers.get("Date"))
    return error
