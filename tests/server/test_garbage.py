"""Requests leave nothing to the garbage collector, which therefore runs while the server is idle."""

import asyncio
import gc
from collections import Counter
from collections.abc import Callable
from types import FrameType, FunctionType, TracebackType
from typing import Any

import pytest

Serve = Callable[..., Any]


def garbage_of_ours(objects: list[Any]) -> Counter[str]:
    """Objects of this repository's classes, and what holds them; the test's HTTP client leaves some of its own."""
    ours = [o for o in objects if isinstance(o, FrameType | FunctionType | TracebackType | asyncio.Future)]
    ours += [o for o in objects if type(o).__module__.startswith(("rm_server", "rm_core"))]
    return Counter(type(o).__name__ for o in ours)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"input_ids": [[1], [2]]}, 200),
        ({"texts": ["a"], "token_rewards": True}, 200),
        ({"texts": ["a", 1]}, 422),
        ({"input_ids": [[99_999_999]]}, 422),
        ({"input_ids": [[1]] * 9}, 413),
        ({"input_ids": [[1], [2]], "deadline_ms": 5}, 503),
    ],
)
async def test_answered_and_refused_requests_leave_no_cycles(
    fake: Any, serve: Serve, body: dict[str, Any], status: int
) -> None:
    async with serve(fake, max_request_items=8, max_queued_items=8) as (client, _):
        blocker = None
        if status == 503:
            fake.hold()
            blocker = asyncio.create_task(client.post("/score", json={"input_ids": [[1]] * 8}))
            await fake.until_entered()
        for _ in range(3):
            assert (await client.post("/score", json=body)).status_code == status
        gc.collect()
        gc.disable()
        try:
            for _ in range(20):
                await client.post("/score", json=body)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            found = garbage_of_ours(gc.garbage)
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
            fake.gate.set()
        if blocker is not None:
            await blocker
    assert found == {}
