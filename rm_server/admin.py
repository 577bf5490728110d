"""The routes of ``/admin``: which checkpoint is served, and whether the model is on its device.

Invariant: an admin key opens them and nothing else does; what is refused has changed nothing.
"""

import dataclasses
from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, Field

from rm_server.auth import require_admin
from rm_server.edge import BodyReader, decode_json, json_response
from rm_server.schema import _Strict as Strict
from rm_server.schema import parse_as
from rm_server.switch import Switch


class CheckpointRequest(Strict):
    """What to serve from now on."""

    checkpoint: str = Field(min_length=1, max_length=4096)
    """A folder on the server's machine, or a hub id; as on the command line."""
    reward_id: str | None = None
    """The identity that the checkpoint must have; another one is refused (409)."""


class CheckpointResponse(BaseModel):
    """What is served now, and what was served before (its `model` goes back there)."""

    reward_id: str
    model: str
    previous_reward_id: str
    previous_model: str
    load_seconds: float
    is_freed: bool
    """The old model has answered all it was asked, and its memory is given back."""


class SleepResponse(BaseModel):
    """The model is off its device."""

    state: str
    freed_bytes: int


class StateResponse(BaseModel):
    """`serving`"""

    state: str


_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/CheckpointRequest"}}},
    }
}


def admin_router(switch: Switch, bodies: BodyReader, refusals: dict[int | str, dict[str, Any]]) -> APIRouter:
    """The routes. ``refusals`` describes the answers that are not a success, for the schema."""
    router = APIRouter(prefix="/admin", tags=["administration"], dependencies=[Depends(require_admin)])

    @router.post("/checkpoint", response_model=CheckpointResponse, responses=refusals, openapi_extra=_BODY)
    async def change_checkpoint(request: Request) -> Response:
        """Serve another checkpoint: it is loaded beside the old one, verified, and takes over between two batches.

        Requests that were there are answered by the old one; every answer names its `reward_id`. A checkpoint that
        cannot be loaded, is not what it was, or does not fit the memory is refused, and the old one goes on.
        """
        body = await bodies.read(request)
        try:
            wanted = parse_as(CheckpointRequest, decode_json(body))
        finally:
            bodies.release(body)
        return json_response(dataclasses.asdict(await switch.swap(wanted.checkpoint, wanted.reward_id)))

    @router.post("/sleep", response_model=SleepResponse, responses=refusals)
    async def sleep() -> Response:
        """Finish what was admitted and give the device's memory back; scoring answers 503 `asleep` until `/wake`."""
        return json_response({"state": "asleep", "freed_bytes": await switch.sleep()})

    @router.post("/wake", response_model=StateResponse, responses=refusals)
    async def wake() -> Response:
        """Bring the model back to its device, prove it with a forward, and serve again."""
        await switch.wake()
        return json_response({"state": "serving"})

    return router


def add_admin_schemas(schemas: dict[str, Any]) -> None:
    """Put the body that is parsed here among the components of the schema."""
    schemas["CheckpointRequest"] = CheckpointRequest.model_json_schema()
