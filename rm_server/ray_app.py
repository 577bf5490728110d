"""The reward server on Ray Serve, as replicas behind one address.

    serve run rm_server.ray_app:app checkpoint=runs/quickstart/checkpoint num_replicas=2
    serve deploy deploy/ray/serve.yaml

An argument is a key of ``RaySettings`` or a setting of ``rm-server``, which may also come from ``RM_SERVER_*``. Two
deployments: ``Gate`` takes the HTTP requests, reads each one's prompt and hands it on; ``Scorer`` are the replicas,
each with the whole engine. docs/scale.md says how to run it.

Invariant: the gate decides where a request is answered, never what: every answer with a reward is a replica's own.
"""

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, Metric, generate_latest
from prometheus_client.registry import Collector
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rm_server.asgi_call import Answer, Call
from rm_server.edge import BodyReader, ClientLeftError, ErrorBoundary, error_response, json_response
from rm_server.errors import ForbiddenError, InternalError, NotReadyError, ServerError
from rm_server.logs import REQUEST_ID_HEADER, RequestLog, configure_logging, current_request_id
from rm_server.ray_prefix import prompt_key
from rm_server.ray_replica import Scorer
from rm_server.settings import ServerSettings, SettingsError, load_settings

MAX_ONGOING_REQUESTS = 4096
"""Requests of one replica. It queues, orders and refuses by tokens itself; Ray's own default of 5 would starve it."""
READY_SECONDS = 5.0
LIVE_SECONDS = 10.0
"""An open live page asks its replica anew so often: one that is to end waits for what it has begun."""
_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
_HOP_HEADERS = {b"content-length", b"transfer-encoding", b"connection", b"x-request-id"}


class RaySettings(BaseModel):
    """What is set for Ray beside the server's own settings."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    num_replicas: int = Field(default=1, ge=1)
    """Replicas, at least."""
    max_replicas: int | None = Field(default=None, ge=1)
    """Replicas, at most; without it their number stays what it is."""
    queued_tokens_per_replica: int = Field(default=65_536, ge=1)
    """Another replica is started where more tokens than this, for each, are admitted and not answered."""
    num_cpus: float = Field(default=1.0, gt=0)
    """Cores that Ray sets aside for a replica; also the threads of its forward."""
    num_gpus: float = Field(default=0.0, ge=0)
    """GPUs for a replica. With 0 it sees none and computes on the CPU."""
    prefix_chars: int = Field(default=2048, ge=1)
    """Of a text in which the prompt is not marked: characters that decide about the replica."""


def app(arguments: dict[str, Any]) -> serve.Application:
    """The application for ``serve run`` and ``serve deploy``. Raises SettingsError."""
    ours = {name: value for name, value in arguments.items() if name in RaySettings.model_fields}
    try:
        ray_settings = RaySettings.model_validate(ours)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise SettingsError(f"{problem['loc'][0]}: {problem['msg']}, not {problem['input']!r}") from None
    rest = {name: value for name, value in arguments.items() if name not in ours}
    config_file = rest.pop("config", None)
    settings = load_settings(rest, os.environ, config_file)
    for name in ("ssl_certfile", "ssl_keyfile", "exit_on_stall"):
        if getattr(settings, name):
            raise SettingsError(f"{name}: belongs to rm-server; Ray's proxy takes the connections (docs/scale.md)")
    values = settings.model_dump(exclude={"checkpoint"})
    return gate_deployment(ray_settings, values).bind(
        values, ray_settings.prefix_chars, scorer_deployment(ray_settings, settings).bind(values)
    )


def scorer_deployment(ray_settings: RaySettings, settings: ServerSettings) -> Any:
    """The replicas as a Ray Serve deployment."""
    number: dict[str, Any] = {"num_replicas": ray_settings.num_replicas}
    if ray_settings.max_replicas is not None:
        policy = {
            "policy_function": "rm_server.ray_routing:QueuedTokensPolicy",
            "policy_kwargs": {"tokens_per_replica": ray_settings.queued_tokens_per_replica},
        }
        bounds = {"min_replicas": ray_settings.num_replicas, "max_replicas": ray_settings.max_replicas}
        number = {"autoscaling_config": {**bounds, "policy": policy}}
    return serve.deployment(
        Scorer,
        name="Scorer",
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        user_config={"checkpoint": settings.checkpoint},
        ray_actor_options={"num_cpus": ray_settings.num_cpus, "num_gpus": ray_settings.num_gpus},
        graceful_shutdown_timeout_s=settings.grace_seconds + 5,
        health_check_period_s=5,
        request_router_config={"request_router_class": "rm_server.ray_routing:PrefixRouter"},
        **number,
    )


def gate_deployment(ray_settings: RaySettings, values: Mapping[str, Any]) -> Any:
    """What takes the requests, as a Ray Serve deployment. It needs little of a core, and sets none aside."""
    return serve.deployment(
        serve.ingress()(Gate),
        name="Gate",
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=float(values["grace_seconds"]) + 5,
    )


class Gate:
    """Reads a request under the server's limits, finds its prompt, and has a replica answer it."""

    def __init__(self, values: dict[str, Any], prefix_chars: int, scorers: DeploymentHandle[Any]) -> None:
        settings = ServerSettings.model_validate(values)
        configure_logging(settings)
        self._bodies = BodyReader(settings.max_body_bytes, settings.max_waiting_bytes, settings.receive_seconds)
        self._prefix_chars = prefix_chars
        self._scorers = scorers

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Ray calls this in the replica."""
        return Starlette(
            routes=[Route("/{path:path}", self._answer, methods=_METHODS)],
            middleware=[Middleware(UnnamedAnswer), Middleware(RequestLog, log_access=False), Middleware(ErrorBoundary)],
            exception_handlers={ServerError: _refuse, ClientLeftError: _nobody_there},
        )

    async def _answer(self, request: Request) -> Response:
        path = request.url.path.removeprefix(request.scope.get("root_path", ""))
        if path == "/health":
            return json_response({"status": "ok"})
        if path == "/admin" or path.startswith("/admin/"):
            raise ForbiddenError(
                "replicas change their checkpoint together: deploy another user_config.checkpoint (docs/scale.md)"
            )
        body = await self._bodies.read(request)
        try:
            headers = [(name, value) for name, value in request.headers.raw if name not in _HOP_HEADERS]
            headers.append((REQUEST_ID_HEADER.lower().encode(), (current_request_id() or "").encode()))
            call = Call(request.method, path, request.scope["query_string"], headers, body)
            if path == "/ui/live":
                return await self._stream(call)
            key = prompt_key(body, self._prefix_chars) if body else None
            answer = await self._forward(call, key, READY_SECONDS if path == "/ready" else None)
        finally:
            self._bodies.release(body)
        if path == "/metrics" and answer.status == 200:
            return Response(await self._all_metrics(), media_type=CONTENT_TYPE_LATEST)
        return _response(answer)

    async def _forward(self, call: Call, key: bytes | None, seconds: float | None) -> Answer:
        try:
            with _replica_errors():
                answer: Answer = await asyncio.wait_for(self._scorers.forward.remote(call, prefix_key=key), seconds)
        except asyncio.TimeoutError:
            raise NotReadyError("no replica is there", 5) from None
        return answer

    async def _stream(self, call: Call) -> Response:
        """An answer without an end, all of it from one replica while that one is there."""
        method = self._scorers.options(stream=True).stream
        key = secrets.token_bytes(16)

        def ask() -> Any:
            return method.remote(call, LIVE_SECONDS, prefix_key=key)

        async def parts(asked: Any) -> AsyncIterator[bytes]:
            try:
                with _replica_errors():
                    while True:
                        async for part in asked:
                            yield part
                        asked = ask()
                        if (await anext(asked)).status != 200:
                            return
            except ServerError:
                return  # too late for a status: the page asks again and is told
            finally:
                asked.cancel()

        asked = ask()
        with _replica_errors():
            begin: Answer = await anext(asked)
            if begin.status != 200:
                return _response(begin._replace(body=b"".join([part async for part in asked])))
        response = StreamingResponse(parts(asked), begin.status)
        response.raw_headers = begin.headers
        return response

    async def _all_metrics(self) -> bytes:
        try:
            found: list[list[Metric]] = await self._scorers.broadcast("metrics").results_async(timeout_s=READY_SECONDS)
        except (RayError, RayServeException, TimeoutError):
            raise NotReadyError("a replica did not say what it measured; try again", 1) from None
        return generate_latest(_Merged(found))


class UnnamedAnswer:
    """ASGI middleware: Ray's proxy, which names every request that has no name, writes the name into the answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def unnamed_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(name, value) for name, value in message["headers"] if name.lower() != b"x-request-id"]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, unnamed_send)


class _Merged(Collector):
    """The families of several replicas, each once."""

    def __init__(self, found: Iterable[Iterable[Metric]]) -> None:
        self._families: dict[str, Metric] = {}
        for families in found:
            for family in families:
                if family.name in self._families:
                    self._families[family.name].samples += family.samples
                else:
                    self._families[family.name] = family

    def collect(self) -> Iterable[Metric]:
        """For the exposition."""
        return self._families.values()


@contextmanager
def _replica_errors() -> Iterator[None]:
    """What goes wrong on the way to a replica or in it, as ServerError."""
    try:
        yield
    except RayTaskError as error:  # the replica lives, and its application raised
        raise InternalError(f"a replica failed: {type(error.cause).__name__}") from None
    except (RayError, RayServeException):  # it ended, is ending, or cannot be reached
        raise NotReadyError("the replica that was to answer this is gone; try again", 1) from None


def _response(answer: Answer) -> Response:
    response = Response(answer.body, answer.status)
    response.raw_headers = answer.headers
    return response


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServerError), "this is a bug: registered for these alone"
    return error_response(error)


async def _nobody_there(request: Request, error: Exception) -> Response:
    return Response(status_code=499)
