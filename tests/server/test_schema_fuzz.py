"""Requests made from our own ``/openapi.json`` by schemathesis: no 500, and every answer as the schema says."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from rm_server.auth import Keys
from rm_server.settings import ServerSettings
from tests.server.conftest import FakeModel

CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
# As the schema says, and against it.
MODES = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]


def attack(url: str, key: str, num_cases: int) -> Counter[tuple[str, int]]:
    """Send the cases and check the answers; returns how often each route gave each status.

    The admin routes come last, since a server that was put to sleep scores nothing.
    """
    statuses: Counter[tuple[str, int]] = Counter()
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = sorted(
        (found.ok() for found in schema.get_all_operations()),
        key=lambda operation: (operation.path.startswith("/admin"), operation.path),
    )
    writing = [operation for operation in operations if operation.body]
    num_examples = max(num_cases // (len(MODES) * len(writing)), 1)
    with requests.Session() as session:
        session.headers["X-API-Key"] = key
        for operation in operations:
            for mode in MODES if operation in writing else MODES[:1]:

                @settings(
                    max_examples=num_examples if operation in writing else 1,
                    deadline=None,
                    database=None,
                    derandomize=True,
                    phases=[Phase.generate],
                    suppress_health_check=list(HealthCheck),
                )
                @given(case=operation.as_strategy(generation_mode=mode))
                def send(case: schemathesis.Case) -> None:
                    response = case.call(session=session, timeout=30)
                    statuses[case.operation.path, response.status_code] += 1
                    # 503 and 504 are answers that a deadline of 5e-324 ms asks for.
                    assert response.status_code not in (500, 501, 502), response.text
                    case.validate_response(response, checks=CHECKS)

                send()
        assert session.post(f"{url}/admin/wake", timeout=30).status_code == 200
        assert session.get(f"{url}/ready", timeout=30).json() == {"status": "ready"}
    return statuses


@pytest.mark.slow
@pytest.mark.parametrize("num_cases", [500, pytest.param(10_000, marks=pytest.mark.long)])
async def test_requests_made_from_the_schema_are_answered_as_it_says(
    fake: Any, serve_on_socket: Callable[..., Any], admin_key: tuple[Keys, str], num_cases: int
) -> None:
    def load(settings: ServerSettings, checkpoint: str) -> FakeModel:
        if len(checkpoint) % 2:
            raise ValueError("there is no such checkpoint")
        return FakeModel(fake.renderer)

    keys, key = admin_key
    async with serve_on_socket(fake, keys=keys, load=load, default_deadline_ms=20_000) as (url, server):
        statuses = await asyncio.to_thread(attack, url, key, num_cases)
        assert server.service.admission.tokens == server.service.admission.items == 0
    assert sum(statuses.values()) >= num_cases * 0.8
    assert statuses["/admin/checkpoint", 200] > 0
    assert statuses["/admin/checkpoint", 422] > 0
    for path in ("/score", "/get_reward", "/health", "/ready", "/info", "/metrics"):
        assert statuses[path, 200] > 0, statuses
