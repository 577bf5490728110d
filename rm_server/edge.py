"""The edge of HTTP: bodies in, JSON out, and nothing of ours leaking.

Invariant: a body is never held beyond its limit; a caller who leaves is noticed; every answer that is not a success has
the one error body; no exception, and no word of a prompt, reaches a client or the log.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import orjson
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rm_server.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    MalformedBodyError,
    MethodNotAllowedError,
    NotFoundError,
    OverloadedError,
    ServerError,
    TooLargeError,
    describe_exception,
)
from rm_server.logs import current_request_id

logger = logging.getLogger("rm_server")
T = TypeVar("T")


class ClientLeftError(Exception):
    """The caller closed the connection; there is nobody to answer."""


class BodyReader:
    """Reads request bodies under a limit for each, a limit for all that are held at once, and a limit of time."""

    def __init__(self, max_body_bytes: int, max_waiting_bytes: int, max_seconds: float) -> None:
        self.held_bytes = 0
        self._max_seconds = max_seconds
        self._max_body_bytes = max_body_bytes
        self._max_waiting_bytes = max_waiting_bytes

    async def read(self, request: Request) -> bytes:
        """The body. The caller of this gives it back with ``release``. Raises ServerError or ClientLeftError."""
        if request.headers.get("content-encoding", "identity") != "identity":
            raise InvalidRequestError("Content-Encoding: send the body uncompressed")
        declared = request.headers.get("content-length", "")
        if declared.isdecimal():
            self._check(int(declared[:20]))
        try:
            return await asyncio.wait_for(self._read(request), self._max_seconds)
        except asyncio.TimeoutError:
            raise DeadlineExceededError(
                f"the body did not arrive within {self._max_seconds:g} s, which is the limit (receive_seconds)"
            ) from None

    async def _read(self, request: Request) -> bytes:
        chunks: list[bytes] = []
        size = 0
        try:
            async for chunk in request.stream():
                size += len(chunk)
                self.held_bytes += len(chunk)
                chunks.append(chunk)
                self._check(size, already_held=True)
        except ClientDisconnect:
            self.held_bytes -= size
            raise ClientLeftError from None
        except BaseException:
            self.held_bytes -= size
            raise
        return b"".join(chunks)

    def release(self, body: bytes) -> None:
        """Say that a body is no longer held."""
        self.held_bytes -= len(body)

    def _check(self, size: int, *, already_held: bool = False) -> None:
        if size > self._max_body_bytes:
            raise TooLargeError(f"the body of {size} bytes or more is over the limit of {self._max_body_bytes} bytes")
        if self.held_bytes + (0 if already_held else size) > self._max_waiting_bytes:
            raise OverloadedError(f"the requests being held are at their limit of {self._max_waiting_bytes} bytes", 5)


class PlainRoute(APIRoute):
    """A route whose handler takes the request and returns the response: documented by FastAPI, called without it.

    FastAPI would look for parameters to fill and results to convert at each request, and find none.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        return self.endpoint


def decode_json(body: bytes) -> Any:
    """Parse a body. Raises MalformedBodyError naming the place of the error."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        try:
            body.decode()
        except UnicodeDecodeError as bad:
            raise MalformedBodyError(f"the body is not UTF-8: invalid byte at position {bad.start}") from None
        raise MalformedBodyError(
            f"the body is not JSON: {error.msg} at line {error.lineno}, column {error.colno} (position {error.pos})"
        ) from None


async def until_client_leaves(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await ``work``; if the caller closes the connection first, cancel it and raise ClientLeftError."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientLeftError
    finally:
        for pending in (task, watcher):
            pending.cancel()
        await asyncio.wait({task, watcher})


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """An answer in JSON, floats at full precision."""
    return Response(orjson.dumps(content), status, headers, media_type="application/json")


def error_response(error: ServerError) -> Response:
    """The one form of an answer that is not a success."""
    return json_response(error_body(error), error.status, error.headers())


def error_body(error: ServerError) -> dict[str, Any]:
    """The body of an error, with the id of the request it answers."""
    body = error.body()
    if (request_id := current_request_id()) is not None:
        body["error"]["request_id"] = request_id
    return body


def translate_http_exception(error: HTTPException) -> tuple[ServerError, dict[str, str]]:
    """Unknown routes and methods in our words, with the headers that belong to them."""
    if error.status_code == 405:
        allowed = dict(error.headers or {})
        return MethodNotAllowedError("this route does not take this method; see /docs"), allowed
    if error.status_code == 404:
        return NotFoundError("there is no such route; see /docs"), {}
    return (InvalidRequestError if error.status_code < 500 else InternalError)("the request could not be handled"), {}


class ErrorBoundary:
    """ASGI middleware: an exception that nobody handled becomes a 500 without its text."""

    def __init__(self, app: ASGIApp, on_refusal: Callable[[ServerError], None] = lambda error: None) -> None:
        self._app = app
        self._on_refusal = on_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_started = False

        async def watched_send(message: Message) -> None:
            nonlocal has_started
            has_started = has_started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except Exception as error:
            logger.error("a request failed: %s", describe_exception(error))
            failure = InternalError("the server failed on this request; its log says where")
            self._on_refusal(failure)
            if not has_started:
                await error_response(failure)(scope, receive, send)
