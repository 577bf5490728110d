"""One HTTP request answered by an application in this process, without a socket. Knows nothing of Ray.

Invariant: the application is called as a server calls it, once, with the whole body; its answer is taken whole.
"""

import asyncio
from typing import NamedTuple

from starlette.types import ASGIApp, Message


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
    scope = {
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
    unread: list[Message] = [{"type": "http.request", "body": call.body, "more_body": False}]
    begin: Message = {}
    chunks: list[bytes] = []

    async def receive() -> Message:
        if not unread:
            await asyncio.Event().wait()  # the caller stays until this is cancelled
        return unread.pop()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            begin.update(message)
        else:
            chunks.append(message.get("body", b""))

    await app(scope, receive, send)
    return Answer(begin["status"], list(begin["headers"]), b"".join(chunks))
