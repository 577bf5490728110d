"""More work than the server can do: what can never fit waits for no room. Under load: benchmarks/overload.py."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

Serve = Callable[..., Any]


@pytest.mark.parametrize(
    ("body", "kind", "says"),
    [
        ({"input_ids": [[1] * 17]}, "too_long", "input_ids[0]: 17 tokens are over the limit of 16"),
        ({"input_ids": [[]]}, "invalid_request", "input_ids[0]: is empty"),
        ({"input_ids": [[1, 300]], "truncation": "left"}, "invalid_request", "input_ids[0][1]: 300 is not a token id"),
        ({"texts": ["a" * (16 * 64 + 1)]}, "too_long", "texts[0]: 1025 characters cannot be 16 tokens"),
        ({"prompt": "a" * 1000, "completions": ["b" * 25] * 1000}, "too_long", "completions[0]: 1025 characters"),
    ],
)
async def test_what_can_never_be_scored_is_refused_at_once_while_others_wait_for_room(
    fake: Any, serve: Serve, eventually: Any, body: dict[str, Any], kind: str, says: str
) -> None:
    async with serve(fake, max_queued_items=1, max_length=16) as (client, service):
        fake.hold()
        blocker = asyncio.create_task(client.post("/score", json={"input_ids": [[1]]}))
        await fake.until_entered()
        waiting = asyncio.create_task(client.post("/score", json={"input_ids": [[2]]}))
        await eventually(lambda: service.admission.num_waiting == 1)
        response = await asyncio.wait_for(client.post("/score", json=body), 10)
        assert (response.status_code, response.json()["error"]["type"]) == (422, kind)
        assert says in response.json()["error"]["message"]
        assert not waiting.done()
        fake.gate.set()
        assert [(await task).status_code for task in (blocker, waiting)] == [200, 200]
        assert service.admission.tokens == service.admission.items == service.num_open == 0


async def test_item_that_can_never_be_scored_keeps_its_own_error_where_others_find_no_room(
    fake: Any, serve: Serve
) -> None:
    async with serve(fake, max_queued_items=1, max_length=16) as (client, _):
        fake.hold()
        blocker = asyncio.create_task(client.post("/score", json={"input_ids": [[1]]}))
        await fake.until_entered()
        response = await client.post("/score", json={"input_ids": [[2], [1] * 17], "deadline_ms": 20})
        assert response.status_code == 503
        assert [error["type"] for error in response.json()["errors"]] == ["overloaded", "too_long"]
        fake.gate.set()
        assert (await blocker).status_code == 200
