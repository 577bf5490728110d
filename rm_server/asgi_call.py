"""One HTTP request answered by an application in this process, without a socket. Knows nothing of Ray.

Invariant: the application is called as a server calls it, once, with the whole body; its answer is taken whole,
or, where it has no end, part by part for a bounded time.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope


class Call(NamedTuple):
    """One HTTP request, read whole."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Answer(NamedTuple):
    """One HTTP response, read whole."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


async def answer(app: ASGIApp, call: Call) -> Answer:
    """Run an ASGI application on one request. To cancel this is to the application as if the caller had left."""
    begin: Message = {}
    chunks: list[bytes] = []

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            begin.update(message)
        else:
            chunks.append(message.get("body", b""))

    await app(_scope(call), _receive(call, None), send)
    return Answer(begin["status"], list(begin["headers"]), b"".join(chunks))


async def stream(app: ASGIApp, call: Call, seconds: float) -> AsyncIterator[Answer | bytes]:
    """Run an ASGI application on one request: first an Answer without its body, then the body's parts as they come.

    After ``seconds``, or when this is closed, it is to the application as if the caller had left.
    """
    sent: asyncio.Queue[Message | None] = asyncio.Queue()

    async def run() -> None:
        try:
            await app(_scope(call), _receive(call, seconds), sent.put)
        finally:
            sent.put_nowait(None)

    running = asyncio.create_task(run())
    try:
        while (message := await sent.get()) is not None:
            if message["type"] == "http.response.start":
                yield Answer(message["status"], list(message["headers"]), b"")
            elif message.get("body"):
                yield message["body"]
        await running  # raises what the application raised
    finally:
        running.cancel()
        await asyncio.wait([running])


def _scope(call: Call) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": call.path,
        "raw_path": call.path.encode(),
        "query_string": call.query,
        "root_path": "",
        "headers": call.headers,
        "client": None,
        "server": None,
    }


def _receive(call: Call, seconds: float | None) -> Receive:
    """The request, and then a caller who leaves after ``seconds``, or stays until the application is cancelled."""
    unread: list[Message] = [{"type": "http.request", "body": call.body, "more_body": False}]

    async def receive() -> Message:
        if unread:
            return unread.pop()
        if seconds is None:
            await asyncio.Event().wait()
        else:
            await asyncio.sleep(seconds)
        return {"type": "http.disconnect"}

    return receive
