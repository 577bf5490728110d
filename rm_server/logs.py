"""What the server logs: one line for an event, as text or as JSON, with the id of the request it belongs to.

A caller may name its request with ``X-Request-ID``; any other request gets a name. The name is in the answer's header,
in an error's body, in every log line and in the audit log.

Invariant: no prompt, no key and no exception's text is logged. An exception is its type and the places it passed;
a request is its method, its route as declared (never the path or query as sent), status and time.
"""

import asyncio
import contextvars
import logging
import logging.config
import random
import re
import time
import traceback
from collections.abc import Callable
from datetime import datetime, timezone
from types import TracebackType
from typing import Any

import orjson
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rm_server.errors import describe_exception
from rm_server.settings import ServerSettings

access_logger = logging.getLogger("rm_server.access")

REQUEST_ID_HEADER = "X-Request-ID"
_ACCEPTED_ID = re.compile(rb"[A-Za-z0-9._:@/+=-]{1,128}")
_current_id: contextvars.ContextVar[str | None] = contextvars.ContextVar("rm_request_id", default=None)


def current_request_id() -> str | None:
    """The id of the request that this task works for; None outside of one."""
    return _current_id.get()


def request_id_of(scope: Scope) -> str:
    """The id a caller sent, if it is short and plain; a new one otherwise."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _ACCEPTED_ID.fullmatch(value):
            sent: bytes = value
            return sent.decode("ascii")
    return new_request_id()


def new_request_id() -> str:
    """128 random bits in hexadecimal: no secret, so without the system call that a UUID takes for each."""
    return f"{random.getrandbits(128):032x}"


class RequestLog:
    """ASGI middleware, the outermost: names each request and, with ``log_access``, logs a line when it is over."""

    def __init__(
        self, app: ASGIApp, *, log_access: bool, key_name: Callable[[Scope], str | None] = lambda scope: None
    ) -> None:
        self._app = app
        self._log_access = log_access
        self._key_name = key_name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id, start, status = request_id_of(scope), time.monotonic(), 0
        token = _current_id.set(request_id)

        async def named_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        try:
            await self._app(scope, receive, named_send)
        finally:
            if self._log_access:
                self._log(scope, status, time.monotonic() - start)
            _current_id.reset(token)

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        # The path may quote a caller; the route is ours.
        route = getattr(scope.get("route"), "path", None) or "(none)"
        method = scope["method"] if scope["method"] in _METHODS else "(other)"
        fields = {"method": method, "route": route, "status": status, "seconds": round(seconds, 6)}
        if (name := self._key_name(scope)) is not None:
            fields["key"] = name
        access_logger.info("%s %s %d in %.3f s", method, route, status, seconds, extra={"fields": fields})


_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"))


class _Formatter(logging.Formatter):
    """Writes an exception as its type and the places it passed, without its text and without lines of code."""

    def timestamp(self, record: logging.LogRecord) -> str:
        """When it happened, in UTC with milliseconds."""
        when = datetime.fromtimestamp(record.created, timezone.utc)
        return f"{when:%Y-%m-%dT%H:%M:%S}.{int(record.msecs):03d}Z"

    def formatException(  # noqa: N802
        self,
        ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None],
    ) -> str:
        kind, _, trace = ei
        if kind is None:
            return ""
        places = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in traceback.extract_tb(trace)]
        return " <- ".join([kind.__name__, *reversed(places)])


class TextFormatter(_Formatter):
    """One line: time, level, logger, request id where there is one, message."""

    def format(self, record: logging.LogRecord) -> str:
        request_id = current_request_id()
        named = f"[{request_id}] " if request_id else ""
        line = f"{self.timestamp(record)} {record.levelname} {record.name}: {named}{record.getMessage()}"
        if record.exc_info:
            line += f": {self.formatException(record.exc_info)}"
        return line.replace("\n", "\\n").replace("\r", "\\r")


class JsonFormatter(_Formatter):
    """One JSON object a line: ``time``, ``level``, ``logger``, ``message``, ``request_id``, an event's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": self.timestamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (request_id := current_request_id()) is not None:
            entry["request_id"] = request_id
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        fields = getattr(record, "fields", None)
        if isinstance(fields, dict):
            entry |= fields
        return orjson.dumps(entry, default=lambda value: type(value).__name__).decode()


def configure_logging(settings: ServerSettings) -> None:
    """Send the server's, uvicorn's and other libraries' log to stderr in the chosen form."""
    level = settings.log_level.upper()
    formatter = JsonFormatter if settings.log_format == "json" else TextFormatter
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"line": {"()": formatter}},
            "handlers": {
                "stderr": {"class": "logging.StreamHandler", "formatter": "line", "stream": "ext://sys.stderr"}
            },
            "root": {"handlers": ["stderr"], "level": "WARNING"},
            "loggers": {
                "rm_server": {"level": level},
                # uvicorn's own access lines quote paths and queries; RequestLog writes ours.
                "rm_server.access": {"level": "INFO" if settings.access_log else "WARNING"},
                # Its warnings are about what callers send, at the callers' pace.
                "uvicorn": {"level": "ERROR"},
                "uvicorn.access": {"level": "CRITICAL", "propagate": False},
            },
        }
    )
    logging.captureWarnings(True)


def log_loop_problem(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Exception handler of the event loop: asyncio's own would log the exception's text."""
    error = context.get("exception")
    what = describe_exception(error) if error is not None else "no exception"
    logging.getLogger("rm_server").error("the event loop caught something nobody awaited: %s", what)
