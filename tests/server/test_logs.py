"""Request ids, JSON log lines, and canaries: what a caller sends is nowhere in the log."""

import asyncio
import io
import json
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import orjson
import pytest

from rm_server.logs import configure_logging, log_loop_problem
from rm_server.settings import ServerSettings

Serve = Callable[..., Any]
CANARY = "canary-7f3a"
BODY = {"input_ids": [[1, 2]]}


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Callable[[], str]]]:
    """``logged(log_format="json")`` configures logging as the command does, and gives back what reads the log."""
    names = ("", "rm_server", "rm_server.access", "uvicorn", "uvicorn.access")
    before = [(log, log.level, log.handlers[:], log.propagate) for log in map(logging.getLogger, names)]

    def start(**settings: Any) -> Callable[[], str]:
        stream = io.StringIO()
        monkeypatch.setattr("sys.stderr", stream)
        configure_logging(ServerSettings(checkpoint="x", **settings))
        return stream.getvalue

    yield start
    logging.captureWarnings(False)
    for log, level, handlers, propagate in before:
        log.setLevel(level)
        log.handlers[:] = handlers
        log.propagate = propagate


@pytest.mark.parametrize(
    ("sent", "is_kept"),
    [
        ("step-12/rank-3", True),
        ("a" * 128, True),
        ("0123456789abcdef@host:1", True),
        ("a" * 129, False),
        ("", False),
        ("has space", False),
        ('{"a": 1}', False),
        ("a\u00e9", False),
        (None, False),
    ],
)
async def test_request_id_is_the_callers_own_where_it_is_short_and_plain(
    fake: Any, serve: Serve, sent: str | None, is_kept: bool
) -> None:
    headers = {} if sent is None else {"X-Request-ID": sent.encode("latin-1")}
    async with serve(fake) as (client, _):
        good = await client.post("/score", json=BODY, headers=headers)
        bad = await client.post("/score", json={}, headers=headers)
        missing = await client.get("/nothing", headers=headers)
    for response in (good, bad, missing):
        request_id = response.headers["x-request-id"]
        assert (request_id == sent) is is_kept
        assert is_kept or re.fullmatch("[0-9a-f]{32}", request_id)
        if response is not good:
            assert response.json()["error"]["request_id"] == request_id
    assert is_kept or good.headers["x-request-id"] != bad.headers["x-request-id"]


async def test_error_of_every_kind_names_its_request(fake: Any, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*args: Any) -> None:
        raise RuntimeError(CANARY)

    async with serve(fake, max_length=4) as (client, _):
        answers = [
            await client.post("/score", json={"input_ids": [[1] * 5]}),
            await client.post("/score", content=b"{"),
            await client.get("/score"),
        ]
        monkeypatch.setattr("rm_server.app.build_answer", explode)
        answers.append(await client.post("/score", json=BODY))
    for response, status in zip(answers, (422, 400, 405, 500), strict=True):
        assert response.status_code == status
        assert response.json()["error"]["request_id"] == response.headers["x-request-id"]


async def test_json_log_has_one_object_a_line_with_the_request_and_what_it_was(
    fake: Any, serve: Serve, logged: Any
) -> None:
    read = logged(log_format="json", access_log=True)
    async with serve(fake, access_log=True) as (client, _):
        await client.post(f"/score?prompt={CANARY}", json=BODY, headers={"X-Request-ID": "one"})
        await client.get(f"/{CANARY}", headers={"X-Request-ID": "two"})
        await client.request(CANARY, "/score", headers={"X-Request-ID": "three"})
    lines = [json.loads(line) for line in read().splitlines()]
    assert [(line["request_id"], line["method"], line["route"], line["status"]) for line in lines] == [
        ("one", "POST", "/score", 200),
        ("two", "GET", "(none)", 404),
        ("three", "(other)", "/score", 405),
    ]
    for line in lines:
        assert line["level"] == "info"
        assert line["logger"] == "rm_server.access"
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
        assert 0 <= line["seconds"] < 60
    assert CANARY not in read()


async def test_without_access_log_a_request_leaves_no_line(fake: Any, serve: Serve, logged: Any) -> None:
    read = logged(log_level="debug")
    async with serve(fake) as (client, _):
        await client.post("/score", json=BODY)
    assert read() == ""


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_exception_is_logged_without_its_text(logged: Any, log_format: str) -> None:
    read = logged(log_format=log_format)
    for name in ("rm_server", "uvicorn.error", "somebody.else"):
        try:
            raise ValueError(CANARY)
        except ValueError:
            logging.getLogger(name).exception("it failed\nbadly")
    lines = read().splitlines()
    assert len(lines) == 3
    for line in lines:
        assert "ValueError <- " in line
        assert "test_logs.py" in line
        assert CANARY not in line


async def test_exception_that_nobody_awaits_is_logged_without_its_text(logged: Any) -> None:
    read = logged(log_format="json")
    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler()
    loop.set_exception_handler(log_loop_problem)

    def explode() -> None:
        raise RuntimeError(CANARY)

    loop.call_soon(explode)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    loop.set_exception_handler(before)
    assert "RuntimeError at" in json.loads(read())["message"]
    assert CANARY not in read()


def nested(depth: int) -> Any:
    value: Any = CANARY
    for _ in range(depth):
        value = {CANARY: value}
    return value


MESSAGE = {"role": "user", "content": CANARY}
CANARIES: list[Any] = [
    {"prompt": CANARY, "completions": [CANARY]},
    {"prompt": [MESSAGE], "completions": [[{"role": "assistant", "content": CANARY}]]},
    {"groups": [{"id": CANARY, "prompt": CANARY, "completions": [CANARY, ""]}]},
    {"texts": [CANARY, CANARY * 1000, ""]},
    {"texts": [CANARY * 5000]},
    {"conversations": [[{"role": CANARY, "content": CANARY}]]},
    {"conversations": [[{"role": "user", "content": [{"type": CANARY, "text": CANARY}]}]]},
    {"conversations": [[{"role": "assistant", "content": CANARY, "tool_calls": [nested(100)]}]]},
    {"conversations": [[{"role": "tool", "content": CANARY, "tool_call_id": CANARY, "name": CANARY}]]},
    {"texts": [1], CANARY: CANARY},
    {"texts": CANARY},
    {"texts": [{"a": CANARY}]},
    {"input_ids": [[CANARY]]},
    {"input_ids": [[1]], "tokenizer": CANARY},
    {"input_ids": [[1]], "reward_id": CANARY},
    {"input_ids": [[1]], "advantages": {"scale": CANARY}},
    {"query": [CANARY], "prompts": [CANARY], "labels": [CANARY]},
    {"query": [CANARY], "prompts": [CANARY, CANARY], "labels": [CANARY]},
    {"model": CANARY, "input": CANARY, "use_activation": False},
    {"model": CANARY, "input": [CANARY, 1], "use_activation": CANARY},
    {"model": CANARY, "messages": [MESSAGE]},
    {"model": CANARY, "messages": [CANARY]},
    {"text": CANARY, "input": CANARY},
    {"inputs": [[CANARY, CANARY]], "raw_scores": CANARY},
    {"query": CANARY, "documents": [CANARY], "top_n": CANARY},
    {"prompt": CANARY, "response": CANARY, "label": CANARY},
    {"responses_create_params": {"input": CANARY}, "response": {"output": CANARY}},
    {"path": CANARY, "checkpoint": CANARY},
    [CANARY],
    CANARY,
    b'{"texts": ["' + CANARY.encode() + b'"',
    b'{"texts": ["' + CANARY.encode() + b'\xff"]}',
    b'{"texts": ["\\ud800 ' + CANARY.encode() + b'"]}',
]


@pytest.mark.parametrize("failure", ["none", "model", "tokenizer", "nan", "answer"])
async def test_no_word_of_a_caller_is_logged_whatever_route_and_whatever_fails(
    fake: Any, serve: Serve, logged: Any, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    def explode(*args: Any, **more: Any) -> Any:
        raise RuntimeError(f"{CANARY} {args} {more}")

    read = logged(log_format="json", log_level="debug", access_log=True)
    headers = {"Authorization": f"Bearer {CANARY}", "X-API-Key": CANARY, "User-Agent": CANARY, "Cookie": CANARY}
    seen = set()
    async with serve(fake, access_log=True) as (client, service):
        if failure == "model":
            fake.before = explode
        elif failure == "tokenizer":
            for name in ("render", "render_text", "render_conversation", "render_templated"):
                monkeypatch.setattr(fake.renderer, name, explode)
        elif failure == "nan":
            fake.nan_for = lambda ids: True
        elif failure == "answer":
            monkeypatch.setattr("rm_server.answer._places", explode)
        paths = (await client.get("/openapi.json")).json()["paths"]
        routes = [(path, method.upper()) for path, methods in paths.items() for method in methods]
        for path, method in [*routes, ("/nothing", "POST")]:
            for body in CANARIES:
                content = body if isinstance(body, bytes) else orjson.dumps(body)
                response = await client.request(method, f"{path}?q={CANARY}", content=content, headers=headers)
                seen.add(response.status_code)
                assert response.status_code != 500 or failure != "none", (path, body)
        assert service.admission.items == 0
    assert {200, 404, 422} <= seen
    assert CANARY not in read()
    assert len(read().splitlines()) > len(CANARIES)
