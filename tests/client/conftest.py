"""A reward server in a function: scores a completion by its length, fails what is told to fail, records requests."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

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


class FakeServer:
    """Rewards are lengths of completions; "fail" has none, "nan" is a NaN. ``refusals`` are given first, in order."""

    def __init__(self) -> None:
        self.requests: list[httpx.Request] = []
        self.refusals: list[httpx.Response | Exception] = []
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
            return refusal
        if request.url.path.endswith("/info"):
            return httpx.Response(200, json=INFO)
        if request.method == "GET":
            return httpx.Response(200, json={})
        body = json.loads(request.content)
        if "groups" in body:
            rows = [[self._reward(item) for item in group["completions"]] for group in body["groups"]]
            answer: dict[str, Any] = {"rewards": rows, "truncated": [[False] * len(row) for row in rows]}
            readings: list[Any] = [[self._reading(item) for item in group["completions"]] for group in body["groups"]]
            holes = [[g, i] for g, row in enumerate(rows) for i, r in enumerate(row) if r is None]
        else:
            items = next(body[key] for key in ("completions", "texts", "conversations", "input_ids") if key in body)
            row = [float(len(item)) if "input_ids" in body else self._reward(item) for item in items]
            answer = {"rewards": row, "truncated": [False] * len(row)}
            readings = [self._reading(item) for item in items]
            holes = [[i] for i, r in enumerate(row) if r is None]
        if "advantages" in body:
            answer["advantages"] = answer["rewards"]
        if body.get("token_rewards"):
            answer["token_rewards"] = readings
        if holes:
            answer["errors"] = [
                {"index": index, "type": "non_finite_reward", "message": "NaN", "retryable": False} for index in holes
            ]
        usage, timing = {"tokens": 9, "computed_tokens": 5}, {"queue_ms": 1.5, "tokenize_ms": 0.5, "forward_ms": 7.0}
        answer |= {"reward_id": REWARD_ID, "model": "tiny", "usage": usage, "timing": timing}
        return httpx.Response(200, text=json.dumps(self.change(answer)))

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


@pytest.fixture
def refusal() -> Callable[..., httpx.Response]:
    """An error answer as the server gives it."""

    def make(status: int, kind: str, retryable: bool = False, **headers: str) -> httpx.Response:
        body = {"error": {"type": kind, "message": f"about {kind}", "retryable": retryable}}
        return httpx.Response(status, json=body, headers={k.replace("_", "-"): v for k, v in headers.items()})

    return make
