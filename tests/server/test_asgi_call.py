"""An application called in the process answers as over a socket, and an answer without an end is given part by part."""

import asyncio
from contextlib import aclosing
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rm_server.asgi_call import Answer, Call, answer, stream


class Endless:
    """Events without an end, and how many of them are being sent."""

    def __init__(self) -> None:
        self.num_open = self.num_sent = 0
        routes = [Route("/events", self._events), Route("/echo", self._echo, methods=["POST"]), Route("/no", self._no)]
        self.app = Starlette(routes=routes)

    async def _events(self, request: Request) -> Response:
        return StreamingResponse(self._endless(), headers={"X-Mine": "yes"}, media_type="text/event-stream")

    async def _endless(self) -> Any:
        self.num_open += 1
        try:
            while True:
                self.num_sent += 1
                yield f"data: {self.num_sent}\n\n"
                await asyncio.sleep(0.001)
        finally:
            self.num_open -= 1

    async def _echo(self, request: Request) -> Response:
        return JSONResponse([(await request.body()).decode(), request.url.query, request.headers["x-mine"]])

    async def _no(self, request: Request) -> Response:
        raise RuntimeError("of the application")


def call(path: str, method: str = "GET", body: bytes = b"") -> Call:
    return Call(method, path, b"a=1", [(b"x-mine", b"yes")], body)


async def test_the_application_sees_the_request_and_its_answer_is_whole() -> None:
    wanted = Answer(200, [(b"content-length", b"20"), (b"content-type", b"application/json")], b'["text","a=1","yes"]')
    assert await answer(Endless().app, call("/echo", "POST", b"text")) == wanted
    parts = [part async for part in stream(Endless().app, call("/echo", "POST", b"text"), 60)]
    assert parts == [wanted._replace(body=b""), wanted.body]


async def test_parts_of_an_endless_answer_come_as_they_are_sent_and_it_ends_with_its_reader() -> None:
    endless = Endless()
    async with aclosing(stream(endless.app, call("/events"), 60)) as parts:
        begin = await anext(parts)
        assert isinstance(begin, Answer)
        assert (begin.status, dict(begin.headers)[b"x-mine"]) == (200, b"yes")
        assert [await anext(parts) for _ in range(3)] == [f"data: {number}\n\n".encode() for number in (1, 2, 3)]
        assert endless.num_open == 1
    assert endless.num_open == 0


async def test_an_endless_answer_ends_when_its_time_is_over() -> None:
    endless = Endless()
    _, *parts = [part async for part in stream(endless.app, call("/events"), 0.1)]
    assert 1 <= len(parts) == endless.num_sent
    assert endless.num_open == 0


async def test_a_caller_who_leaves_ends_an_answer_that_is_taken_whole() -> None:
    endless = Endless()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(answer(endless.app, call("/events")), 0.1)
    assert endless.num_open == 0
    assert endless.num_sent > 0


async def test_what_the_application_raises_reaches_the_caller() -> None:
    with pytest.raises(RuntimeError, match="of the application"):
        await answer(Endless().app, call("/no"))
    with pytest.raises(RuntimeError, match="of the application"):
        _ = [part async for part in stream(Endless().app, call("/no"), 60)]
