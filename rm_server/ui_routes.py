"""The page that the server shows at ``/``, and the two routes of its own that it reads.

Invariant: a page of this server runs its own scripts and no other: no inline script, style or event handler, nothing
from elsewhere, and text that was sent is never markup. Its files hold nothing secret and need no key; whatever they
fetch does, where keys are set.
"""

import hashlib
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from rm_server.edge import json_response
from rm_server.errors import ServerError
from rm_server.live import Live
from rm_server.scorer import ServedModel
from rm_server.service import ScoringService

_FILES = Path(__file__).with_name("ui")
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def ui_paths() -> list[str]:
    """The paths of the page's files: what may be had without a key."""
    return ["/", *(f"/ui/{path.name}" for path in sorted(_FILES.iterdir()) if path.name != "index.html")]


def ui_router(service: ScoringService, *, needs_key: bool) -> APIRouter:
    """The routes. ``needs_key``: the page asks for a key before it asks the server anything."""
    router = APIRouter(include_in_schema=False)
    live = Live(service)
    for path in ui_paths():
        content = (_FILES / (path.removeprefix("/ui/") if path != "/" else "index.html")).read_bytes()
        if path == "/" and needs_key:
            content = content.replace(b'data-needs-key="false"', b'data-needs-key="true"')
        media_type = _TYPES["." + path.rpartition(".")[2] if path != "/" else ".html"]
        router.add_api_route(path, _file(content, media_type), methods=["GET", "HEAD"])

    @router.get("/ui/checkpoint")
    async def checkpoint() -> Response:
        """What ``reward_model.json`` says, and the chat template."""
        return json_response(describe_checkpoint(_model(service)))

    @router.get("/ui/live")
    async def events() -> Response:
        """Server-sent events, one a second."""
        _model(service)
        live.check_room()
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(live.stream(), headers=headers, media_type="text/event-stream")

    return router


def describe_checkpoint(model: ServedModel) -> dict[str, Any]:
    """The record, None for a model without one, and the template as text."""
    record = model.record.model_dump(mode="json", exclude={"rules", "hashes"}) if model.record is not None else None
    template = getattr(getattr(model.renderer, "tokenizer", None), "chat_template", None)
    return {"record": record, "chat_template": template if isinstance(template, str) else None}


def _model(service: ScoringService) -> ServedModel:
    error: ServerError | None = service.why_not_serving()
    if error is not None:
        raise error
    assert service.model is not None, "this is a bug: serving without a model"
    return service.model


def _file(content: bytes, media_type: str) -> Any:
    headers = {**_HEADERS, "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}

    async def send(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=media_type)

    return send
