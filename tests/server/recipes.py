"""Recipes for tests, and a started server with one of them behind a client."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from rm_server.app import create_app
from rm_server.service import ScoringService
from rm_server.settings import ServerSettings

Served = tuple[httpx.AsyncClient, ScoringService]

MIXED = """
parts:
  model:  {kind: model, standardise: checkpoint}
  answer: {kind: math, timeout_seconds: 60}
  boxed:  {kind: regex, pattern: "boxed", whole: false, timeout_seconds: 60}
  length: {kind: overlong, max_length: 40, buffer: 20, timeout_seconds: 60}
reward:
  gate: boxed
  otherwise: -2.0
  then:
    sum:
      - {part: model, weight: 0.5}
      - answer
      - {part: length, weight: 0.25}
"""
MATH_GATE = """
parts:
  model:  {kind: model, standardise: checkpoint}
  answer: {kind: math, timeout_seconds: 60}
  length: {kind: overlong, max_length: 40, buffer: 20, timeout_seconds: 60}
reward:
  sum:
    - {gate: answer, then: model, otherwise: -3.0}
    - {part: length, weight: 0.5}
"""
MATH_ONLY = """
parts:
  answer: {kind: math, timeout_seconds: 60}
reward: answer
"""
QUICK = """
parts:
  form: {kind: regex, pattern: "(a|aa)+$", timeout_seconds: 1}
  size: {kind: length, maximum: 1000, timeout_seconds: 60}
reward: {product: [form, size]}
"""


@asynccontextmanager
async def serving(tmp_path: Path, recipe: str, model: Any = None, **settings: Any) -> AsyncIterator[Served]:
    """A started service with a recipe behind a client, in this process."""
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe)
    checkpoint = None if model is None else "fake"
    service = ScoringService(
        ServerSettings(checkpoint=checkpoint, recipe=str(path), num_verifier_workers=2, **settings)
    )
    app = create_app(service, service.settings)
    try:
        await service.start(lambda: model)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=300) as client:
            yield client, service
    finally:
        await service.stop()


async def post(client: httpx.AsyncClient, body: Any) -> tuple[int, Any]:
    response = await client.post("/score", json=body)
    return response.status_code, response.json()
