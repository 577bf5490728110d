"""A reward server in a function: scores a completion by its length, fails what is told to fail, records requests."""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from rm_client import AsyncRewardClient, RewardClient

REWARD_ID = "sha256:aaaa"
INFO = {
    "reward_id": REWARD_ID,
    "model": "tiny",
    "tokenizer_hash": "sha256:tttt",
    "max_length": 2048,
    "training_length": 512,
    "reward_mean": 1.0,
    "reward_std": 2.0,
}


def content_of(item: Any) -> str:
    """The text that is scored in a text, messages, or {"content", "finished"}."""
    if isinstance(item, dict):
        item = item["content"]
    return item if isinstance(item, str) else item[-1]["content"]


def shaped(flat: list[Any], sizes: list[int] | None) -> list[Any]:
    """As it is, or in one list per group."""
    ends = iter(flat)
    return flat if sizes is None else [[next(ends) for _ in range(size)] for size in sizes]


class FakeServer:
    """Rewards are lengths of completions; "fail" has none, "nan" is a NaN. ``refusals`` are given first, in order; None
    among them is a request that is answered.

    ``not_now``: of a text, the errors (all retryable) that it gets, one a request, before its reward. A text that
    begins with "long" is truncated.
    """

    def __init__(self) -> None:
        self.not_now: dict[str, list[str]] = {}
        self.requests: list[httpx.Request] = []
        self.refusals: list[httpx.Response | Exception | None] = []
        self.change: Callable[[dict[str, Any]], Any] = lambda answer: answer

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(request.content) for request in self.requests if request.method == "POST"]

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if self.refusals:
            refusal = self.refusals.pop(0)
            if isinstance(refusal, Exception):
                raise refusal
            if refusal is not None:
                return refusal
        if request.url.path.endswith("/info"):
            return httpx.Response(200, json=INFO)
        if request.method == "GET":
            return httpx.Response(200, json={})
        body = json.loads(request.content)
        sizes = None
        if "groups" in body:
            sizes = [len(group["completions"]) for group in body["groups"]]
            items = [item for group in body["groups"] for item in group["completions"]]
        else:
            items = next(body[key] for key in ("completions", "texts", "conversations", "input_ids") if key in body)
        reasons = [self._reason("" if "input_ids" in body else content_of(item)) for item in items]
        rewards = [
            None if reason else float(len(item)) if "input_ids" in body else self._reward(item)
            for item, reason in zip(items, reasons, strict=True)
        ]
        cut = [
            r is not None and isinstance(i, str) and i.startswith("long") for i, r in zip(items, rewards, strict=True)
        ]
        answer: dict[str, Any] = {"rewards": shaped(rewards, sizes), "truncated": shaped(cut, sizes)}
        readings = shaped(
            [self._reading(i) if r is not None else None for i, r in zip(items, rewards, strict=True)], sizes
        )
        places = [[i] for i in range(len(items))]
        if sizes is not None:
            places = [[g, i] for g, size in enumerate(sizes) for i in range(size)]
        if "advantages" in body:
            answer["advantages"] = answer["rewards"]
        if body.get("token_rewards"):
            answer["token_rewards"] = readings
        errors = [
            {"index": place, "type": reason, "message": f"about {reason}", "retryable": reason != "non_finite_reward"}
            for place, reason in zip(places, reasons, strict=True)
            if reason
        ]
        if errors:
            answer["errors"] = errors
        usage, timing = {"tokens": 9, "computed_tokens": 5}, {"queue_ms": 1.5, "tokenize_ms": 0.5, "forward_ms": 7.0}
        answer |= {"reward_id": REWARD_ID, "model": "tiny", "usage": usage, "timing": timing}
        return httpx.Response(200, text=json.dumps(self.change(answer)))

    def _reason(self, text: str) -> str | None:
        waiting = self.not_now.get(text)
        return "non_finite_reward" if text == "fail" else waiting.pop(0) if waiting else None

    def _reading(self, item: Any) -> dict[str, Any] | None:
        if isinstance(item, list) or self._reward(item) is None:
            return None
        tokens = list(content_of(item))
        return {"start": 2, "tokens": tokens, "rewards": [float(n + 1) for n in range(len(tokens))]}

    @staticmethod
    def _reward(item: Any) -> float | None:
        text = content_of(item)
        return None if text == "fail" else float("nan") if text == "nan" else float(len(text))


class FakeTime:
    """A clock that moves only when someone sleeps."""

    def __init__(self) -> None:
        self.now = 100.0
        self.waits: list[float] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds

    async def async_sleep(self, seconds: float) -> None:
        self.sleep(seconds)


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def fake_time() -> FakeTime:
    return FakeTime()


class Blocking:
    """An AsyncRewardClient whose methods can be called as RewardClient's, so that one test covers both."""

    def __init__(self, client: AsyncRewardClient) -> None:
        self.client = client
        self.loop = asyncio.new_event_loop()

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self.loop.run_until_complete(getattr(self.client, name)(*args, **kwargs))

    def close(self) -> None:
        self.loop.run_until_complete(self.client.aclose())
        self.loop.close()


@pytest.fixture(params=["sync", "async"])
def connect(request: pytest.FixtureRequest, server: Any, fake_time: Any) -> Iterator[Callable[..., Any]]:
    """``connect(url, draw=…, **settings)``: a client of the fake server in fake time, of either kind."""
    opened: list[Any] = []

    def make(url: str = "http://rm", draw: float = 1.0, **settings: Any) -> Any:
        common = {"transport": httpx.MockTransport(server), "clock": fake_time.clock, "draw": lambda: draw, **settings}
        if request.param == "sync":
            client: Any = RewardClient(url, sleep=fake_time.sleep, **common)
        else:
            client = Blocking(AsyncRewardClient(url, sleep=fake_time.async_sleep, **common))
        opened.append(client)
        return client

    yield make
    for client in opened:
        client.close()


@pytest.fixture
def refusal() -> Callable[..., httpx.Response]:
    """An error answer as the server gives it."""

    def make(status: int, kind: str, retryable: bool = False, **headers: str) -> httpx.Response:
        body = {"error": {"type": kind, "message": f"about {kind}", "retryable": retryable}}
        return httpx.Response(status, json=body, headers={k.replace("_", "-"): v for k, v in headers.items()})

    return make
