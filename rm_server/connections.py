"""Connections: what uvicorn leaves unbounded. Endless headers, bodies that drip, callers who do not read, floods.

Invariant: a connection that does not bring or take what it should within ``receive_seconds`` is closed, whatever state
it is in; while a request is being scored, no time limit of this file runs. (Idle ones are closed by uvicorn itself.)
"""

import asyncio
import logging
import resource
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import orjson
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from rm_server.errors import MalformedBodyError, OverloadedError, ServerError
from rm_server.logs import new_request_id
from rm_server.settings import ServerSettings, SettingsError

logger = logging.getLogger("rm_server")

KEEP_ALIVE_SECONDS = 75
"""Idle connections are kept this long: longer than the pools of httpx (5 s) and aiohttp (15 s) keep theirs, or a client
would now and then send on a connection that is just being closed."""
MAX_HEADER_BYTES = 32 * 1024
RESERVED_FILES = 256
"""Open files that are no connections: checkpoint, libraries, logs."""
GOODBYE_SECONDS = 2.0
LINGERING = 128
"""Refused connections that may wait for their callers to have sent what they send; more are closed at once."""
_BODY_HEADERS = (b"content-length", b"transfer-encoding")
BODY_SLACK_SECONDS = 1.0
"""A body that is late is answered by the application first, and the connection closed after this."""


def uvicorn_config(
    app: ASGIApp, settings: ServerSettings, on_refusal: Callable[[ServerError], None] = lambda error: None
) -> uvicorn.Config:
    """How uvicorn serves this application: its own limits, TLS, and no log of its own.

    ``on_refusal`` is told of what is answered here, without the application.
    """
    return uvicorn.Config(
        app,
        http=bounded_protocol(settings.receive_seconds, settings.max_connections, on_refusal),
        ws="none",
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        proxy_headers=False,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        log_config=None,
        access_log=False,
        lifespan="on",
        server_header=False,
        timeout_graceful_shutdown=int(settings.grace_seconds) + 5,
    )


def bounded_protocol(
    receive_seconds: float, max_connections: int, on_refusal: Callable[[ServerError], None]
) -> type[HttpToolsProtocol]:
    """The HTTP protocol for ``uvicorn.Config(http=…)``, with these limits."""

    class BoundedProtocol(HttpToolsProtocol):
        _owed: Literal["head", "body", "nothing"] = "head"
        """What of the request that is being received has not come; after one, nothing until the next begins."""
        _head_bytes = _pieces_bytes = 0
        _timer: asyncio.TimerHandle | None = None
        _timed: tuple[object, object] = (None, None)
        _write_timer: asyncio.TimerHandle | None = None
        _is_refused = False
        _answering: RequestResponseCycle | None = None
        """The request that the application was given last; ``cycle`` is the one that came last, maybe behind it."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                self._refuse(
                    "503 Service Unavailable", OverloadedError(f"{max_connections} connections are open, the limit", 1)
                )
            else:
                self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            self.resume_writing()
            self._give_up()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            while data and not self.transport.is_closing() and not self._is_refused:
                piece, data = data[:MAX_HEADER_BYTES], data[MAX_HEADER_BYTES:]
                super().data_received(piece)
                # A header, or what comes behind a chunked body, is counted when it is whole, which one without an end
                # never is. The first piece may have begun with something else.
                self._pieces_bytes += len(piece)
                is_endless = self._owed != "nothing" and self._pieces_bytes > 2 * MAX_HEADER_BYTES
                if is_endless and not self.transport.is_closing():
                    self.send_400_response("")
            self._watch()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._owed, self._head_bytes, self._pieces_bytes = "head", 0, 0

        def on_url(self, url: bytes) -> None:
            self._count_head(url)
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            self._count_head(name, value)
            if self._owed == "head":  # what comes behind a chunked body is no header, and was not seen by a proxy
                super().on_header(name, value)

        def on_headers_complete(self) -> None:
            version, hosts = self.parser.get_http_version(), sum(name == b"host" for name, _ in self.headers)
            if version not in ("1.0", "1.1") or hosts > 1 or (version == "1.1" and hosts == 0):
                raise ValueError("RFC 9112, 3.2: a request names one host")
            if self.parser.should_upgrade() and any(name in _BODY_HEADERS for name, _ in self.headers):
                raise ValueError("the parser would take the body for the other protocol")
            super().on_headers_complete()
            self._owed = "body"
            if not self.pipeline:
                self._answering = self.cycle

        def on_body(self, body: bytes) -> None:
            self._pieces_bytes = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            super().on_message_complete()
            self._owed = "nothing"

        def _count_head(self, *parts: bytes) -> None:
            self._head_bytes += sum(map(len, parts))
            if self._head_bytes > MAX_HEADER_BYTES:
                raise ValueError("headers too long")

        def on_response_complete(self) -> None:
            if self.pipeline:
                self._answering = self.pipeline[-1][0]
            super().on_response_complete()
            self._watch()
            self._do_not_wait_for_goodbye()

        def shutdown(self) -> None:
            super().shutdown()
            self._do_not_wait_for_goodbye()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._write_timer = self.loop.call_later(receive_seconds, self._abort)

        def resume_writing(self) -> None:
            if self._write_timer is not None:
                self._write_timer.cancel()
                self._write_timer = None
                super().resume_writing()

        def send_400_response(self, msg: str) -> None:
            is_about_this = self._answering is self.cycle and self._owed == "body"
            if self._is_busy() and not (is_about_this and not self.cycle.response_started):
                self._abort()  # the next answer that this caller expects is that of an earlier request
                return
            self._refuse(
                "400 Bad Request",
                MalformedBodyError(
                    "the request is not valid HTTP/1.1, its headers are too long, or it has a body and offers another "
                    "protocol (Upgrade: send it without)"
                ),
            )

        def _watch(self) -> None:
            """Run the one timer that belongs to what the caller owes: headers, a body, or nothing."""
            owed = self._owed
            if self.flow.read_paused:  # an earlier request is being answered, or this one's body not yet read
                owed = "nothing"
            elif owed == "nothing" and self.timeout_keep_alive_task is None and not self._is_busy():
                owed = "head"  # bytes came, but none that begins a request
            if owed == "nothing" or self.transport.is_closing():
                self._stop()
            elif self._timed != (owed, self.cycle):
                self._stop()
                slack = BODY_SLACK_SECONDS if owed == "body" else 0.0
                self._timer = self.loop.call_later(receive_seconds + slack, self._abort)
                self._timed = (owed, self.cycle)

        def _is_busy(self) -> bool:
            return self._answering is not None and not self._answering.response_complete

        def _give_up(self) -> None:
            """Tell the application that nobody is there; what it still writes is dropped."""
            if self._answering is not None and not self._answering.response_complete:
                self._answering.disconnected = True
                self._answering.message_event.set()

        def _abort(self) -> None:
            self._give_up()
            self.transport.abort()

        def _stop(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
            self._timer, self._timed = None, (None, None)

        def _do_not_wait_for_goodbye(self) -> None:
            """A TLS connection that is closed waits 30 s for the caller's own end, and with it the whole server."""
            if self.scheme == "https" and self.transport.is_closing():
                is_sent = self.transport.get_write_buffer_size() == 0
                then = self.transport.abort if is_sent else self._do_not_wait_for_goodbye
                self.loop.call_later(GOODBYE_SECONDS, then)

        def _refuse(self, status: str, error: ServerError) -> None:
            """Answer without the application, in its form, and close."""
            on_refusal(error)
            self._give_up()
            request_id = new_request_id()
            body = error.body()
            body["error"]["request_id"] = request_id
            content = orjson.dumps(body)
            headers = {
                "Content-Type": "application/json",
                "Content-Length": str(len(content)),
                "Connection": "close",
                "X-Request-ID": request_id,
                **error.headers(),
            }
            lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
            self._stop()
            self.transport.write("\r\n".join(lines).encode("ascii") + content)
            if self.transport.can_write_eof() and len(self.connections) <= max_connections + LINGERING:
                # Closing with bytes of the caller's unread resets the connection, and the answer would be lost: what
                # is still sent is read and dropped.
                self._is_refused = True
                self.transport.write_eof()
                self.loop.call_later(GOODBYE_SECONDS, self._abort)
            else:
                self.transport.close()

    return BoundedProtocol


def check_tls(settings: ServerSettings) -> None:
    """Refuse a certificate or key that cannot be used before anything is loaded. Raises SettingsError."""
    if settings.ssl_certfile is None:
        return
    for name in (settings.ssl_certfile, settings.ssl_keyfile):
        if name is not None:
            try:
                Path(name).open("rb").close()
            except OSError as error:
                raise SettingsError(f"{name}: cannot be read: {error.strerror or error}") from None
    try:
        # An encrypted key would ask for its password on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            settings.ssl_certfile, settings.ssl_keyfile, password=lambda: b""
        )
    except ssl.SSLError as error:
        raise SettingsError(
            f"{settings.ssl_keyfile or settings.ssl_certfile}: is not the unencrypted PEM key of the certificate "
            f"{settings.ssl_certfile}, or that is none ({error.reason or 'cannot be parsed'})"
        ) from None


def raise_file_limit(max_connections: int) -> None:
    """Let this process hold that many connections open, where the system's hard limit allows it; log where not."""
    needed = max_connections + RESERVED_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        logger.warning(
            "max_connections is %d, but this process may open %d files only (ulimit -n)", max_connections, allowed
        )
