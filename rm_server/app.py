"""The FastAPI application: routes, their documentation, and nothing that scores.

Invariant: every route is a thin translation to one call of ``ScoringService``.
"""

import asyncio
import importlib.metadata
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypedDict

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse

from rm_server.admin import add_admin_schemas, admin_router
from rm_server.answer import build_answer
from rm_server.auth import Keys, RequireKeys, key_name
from rm_server.edge import (
    BodyReader,
    ClientLeftError,
    ErrorBoundary,
    PlainRoute,
    decode_json,
    error_body,
    error_response,
    json_response,
    translate_http_exception,
    until_client_leaves,
)
from rm_server.errors import RewardIdMismatchError, ServerError, TokenizerMismatchError
from rm_server.info import describe
from rm_server.inputs import TokenizeOptions, list_inputs
from rm_server.logs import RequestLog
from rm_server.protocols import add_schemas, protocol_router
from rm_server.schema import ErrorResponse, ScoreRequest, ScoreResponse, count_items, parse_score_request
from rm_server.scorer import ServedModel
from rm_server.service import ScoringService
from rm_server.settings import ServerSettings
from rm_server.switch import Switch
from rm_server.token_rewards import refuse_token_rewards
from rm_server.ui_routes import ui_paths, ui_router
from rm_server.verification import refuse_unused_reference

_REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorResponse, "description": "Not JSON, or not UTF-8"},
    401: {"model": ErrorResponse, "description": "No API key, or one that is not known"},
    409: {"model": ErrorResponse, "description": "Another reward model or tokenizer than the pinned one"},
    413: {"model": ErrorResponse, "description": "Can never fit"},
    422: {"model": ErrorResponse, "description": "A field is wrong; the message names it"},
    500: {"model": ErrorResponse, "description": "The server failed"},
    503: {"model": ErrorResponse, "description": "Overloaded, loading or shutting down; see Retry-After"},
    504: {"model": ErrorResponse, "description": "Not scored before the deadline"},
}
_FORBIDDEN: dict[str, Any] = {"model": ErrorResponse, "description": "Not an admin key, or the admin routes are off"}
_NOT_READY: dict[int | str, dict[str, Any]] = {503: _REFUSALS[503]}
_NEEDS_KEY: dict[int | str, dict[str, Any]] = {401: _REFUSALS[401]}
_OPEN_PATHS = ("/health", "/ready")
LARGE_ANSWER = 512
"""Items from which on advantages are computed off the event loop."""
_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ScoreRequest"}}},
    }
}


class AppState(TypedDict):
    """What the lifespan hands to requests (``request.state``)."""

    service: ScoringService


def create_app(
    service: ScoringService, settings: ServerSettings, keys: Keys | None = None, switch: Switch | None = None
) -> FastAPI:
    """Build the application around a service. Its lifespan stops the service; whoever made the service starts it.

    ``keys`` are read from the settings' files where they are not given, which may raise KeyFileError. ``switch`` is
    what changes the model; a test may bring one that loads something else.
    """
    switch = switch or Switch(service)
    if keys is None:
        keys = Keys.from_files(settings.api_keys_file, settings.admin_keys_file)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[AppState]:
        yield {"service": service}
        switch.close()
        await service.stop()

    app = FastAPI(
        title="betterthan reward server",
        version=importlib.metadata.version("betterthan"),
        summary="Scores answers with a frozen reward model",
        lifespan=lifespan,
        redoc_url=None,
        redirect_slashes=False,
    )
    bodies = BodyReader(settings.max_body_bytes, settings.max_waiting_bytes, settings.receive_seconds)
    open_paths = [*_OPEN_PATHS, *([] if settings.metrics_need_key else ["/metrics"])]
    if settings.ui:
        open_paths += ui_paths()
    # The last one added is the first one a request meets.
    app.add_middleware(
        RequireKeys,
        keys=keys,
        open_paths=open_paths,
        on_refusal=service.metrics.count_refused,
    )
    app.add_middleware(ErrorBoundary, on_refusal=service.metrics.count_refused)
    app.add_middleware(RequestLog, log_access=settings.access_log, key_name=key_name)

    @app.exception_handler(ServerError)
    async def refuse(request: Request, error: ServerError) -> Response:
        service.metrics.count_refused(error)
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def refuse_route(request: Request, error: HTTPException) -> Response:
        translated, headers = translate_http_exception(error)
        service.metrics.count_refused(translated)
        return json_response(error_body(translated), error.status_code, headers)

    @app.exception_handler(ClientLeftError)
    async def nobody_there(request: Request, error: ClientLeftError) -> Response:
        return Response(status_code=499)

    async def score(request: Request) -> Response:
        """Score answers: exactly one of `prompt` + `completions`, `groups`, `texts`, `conversations`, `input_ids`."""
        arrival = service.clock()
        body = await bodies.read(request)
        try:
            data = decode_json(body)
            service.refuse_too_many(count_items(data))
            answer = await until_client_leaves(request, _score(service, parse_score_request(data), arrival))
        finally:
            bodies.release(body)
        service.metrics.request_seconds.labels(route=request.url.path).observe(service.clock() - arrival)
        return json_response(answer)

    # Before all others: routes are tried in this order.
    for path in ("/score", "/v1/score"):
        app.router.add_api_route(
            path,
            score,
            methods=["POST"],
            response_model=ScoreResponse,
            responses=_REFUSALS,
            openapi_extra=_BODY,
            route_class_override=PlainRoute,
        )
    app.include_router(protocol_router(service, bodies, _REFUSALS))
    app.include_router(admin_router(switch, bodies, _REFUSALS | {403: _FORBIDDEN}))
    if settings.ui:
        app.include_router(ui_router(service, needs_key=keys.api is not None))

    @app.get("/health")
    async def health() -> dict[str, str]:
        """The process lives and its event loop turns. Says nothing about the model: see `/ready`."""
        return {"status": "ok"}

    @app.get("/ready", responses=_NOT_READY)
    async def ready() -> dict[str, str]:
        """A real forward succeeded lately, and requests are taken."""
        if (error := service.why_not_ready()) is not None:
            raise error
        return {"status": "ready"}

    @app.get("/info", responses=_NOT_READY | _NEEDS_KEY)
    async def info() -> dict[str, Any]:
        """What is served: identity, rendering rules, numerics, limits, versions."""
        return describe(service, _loaded(service))

    @app.get("/metrics", response_class=PlainTextResponse, responses=_NEEDS_KEY)
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        service.update_gauges()
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]  # how FastAPI documents it
    return app


async def _score(service: ScoringService, request: ScoreRequest, arrival: float) -> dict[str, Any]:
    model = _loaded(service)
    if request.reward_id is not None and request.reward_id != model.reward_id:
        raise RewardIdMismatchError(
            f"reward_id: this server scores with {model.reward_id}, which is not the pinned one"
        )
    if request.tokenizer is not None and request.tokenizer != model.tokenizer_hash:
        raise TokenizerMismatchError(
            f"tokenizer: this server's is {model.tokenizer_hash}; its token ids mean something else"
        )
    refuse_unused_reference(request, service.rewards)
    deadline_ms = request.deadline_ms or service.settings.default_deadline_ms
    inputs = list_inputs(request)
    if request.token_rewards:
        refuse_token_rewards(model, len(inputs))
    options = TokenizeOptions(service.max_length, request.truncation, request.text_as, request.token_rewards)
    scored = await service.score(inputs, options, arrival + deadline_ms / 1000)
    answer = partial(build_answer, request, scored, model, service.clock() - arrival)
    # Advantages of thousands of groups take tenths of a second, in which the event loop must turn.
    return await asyncio.to_thread(answer) if request.advantages and len(inputs) > LARGE_ANSWER else answer()


def _loaded(service: ScoringService) -> ServedModel:
    error = service.why_not_serving()
    if error is not None:
        raise error
    assert service.model is not None, "this is a bug: serving without a model"
    return service.model


def _openapi(app: FastAPI) -> dict[str, Any]:
    """The schema, with the request body that ``score`` parses itself."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
        body = ScoreRequest.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas = schema["components"]["schemas"]
        schemas.update(body.pop("$defs"))
        schemas["ScoreRequest"] = body
        add_schemas(schemas)
        add_admin_schemas(schemas)
        app.openapi_schema = schema
    return app.openapi_schema
