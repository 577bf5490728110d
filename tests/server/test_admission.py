import asyncio

import pytest

from rm_server.admission import Admission
from rm_server.errors import DrainingError, OverloadedError
from rm_server.groups import Request


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def door(max_tokens: int = 1000, max_items: int = 100, max_batch_tokens: int = 40) -> tuple[Admission, Clock]:
    clock = Clock()
    admission = Admission(
        max_tokens=max_tokens,
        max_items=max_items,
        max_queue_seconds=10.0,
        max_batch_tokens=max_batch_tokens,
        clock=clock,
    )
    return admission, clock


async def start(
    admission: Admission, tokens: int, items: int = 1, request: Request | None = None, deadline: float = 60
):
    request = request or Request(items)
    task = asyncio.create_task(admission.admit(request, tokens, items, deadline))
    await settle()
    return request, task


async def settle() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


async def test_who_finds_no_room_waits_and_comes_in_first_come_first_served() -> None:
    admission, _ = door()
    first, _ = await start(admission, 900)
    _, second = await start(admission, 200)
    _, third = await start(admission, 50)
    assert not second.done()
    assert not third.done(), "a smaller one must not pass"
    admission.hold(first, -900, -1)
    admission.wake()
    await settle()
    assert second.done()
    assert third.done()
    assert (admission.tokens, admission.items) == (250, 2)


async def test_items_are_bounded_like_tokens() -> None:
    admission, _ = door(max_items=4)
    await start(admission, 1, items=4)
    _, late = await start(admission, 1, items=1)
    assert not late.done()
    late.cancel()


async def test_no_room_until_the_deadline_is_an_overload_with_the_time_to_wait() -> None:
    admission, clock = door()
    admission.rate.add(100, 1.0)
    await start(admission, 900)
    clock.now = 60.0
    _, late = await start(admission, 200, deadline=60.0)
    await settle()
    with pytest.raises(OverloadedError, match="900 of 1000 tokens") as raised:
        await late
    assert raised.value.headers() == {"Retry-After": "9"}
    assert admission.num_waiting == 0


async def test_huge_request_leaves_a_quarter_of_the_room_to_others() -> None:
    admission, _ = door()
    huge, _ = await start(admission, 700, items=10)
    _, more = await start(admission, 100, request=huge)
    assert not more.done(), "it holds something already and may have three quarters"
    _, small = await start(admission, 200)
    assert small.done()
    more.cancel()


async def test_holder_whose_items_are_done_waits_like_a_newcomer() -> None:
    admission, _ = door()
    huge, _ = await start(admission, 700, items=10)
    _, more = await start(admission, 100, request=huge)
    await start(admission, 200)
    admission.hold(huge, -700, -10)
    admission.wake()
    await settle()
    assert more.done()


async def test_request_larger_than_the_room_comes_in_when_it_is_empty() -> None:
    admission, _ = door()
    first, _ = await start(admission, 10)
    large_request, large = await start(admission, 5000)
    _, small = await start(admission, 10)
    assert not large.done()
    assert not small.done()
    admission.hold(first, -10, -1)
    admission.wake()
    await settle()
    assert large.done()
    assert not small.done()
    admission.hold(large_request, -5000, -1)
    admission.wake()
    await settle()
    assert small.done()


async def test_measured_rate_bounds_the_room_to_what_is_answered_in_time() -> None:
    admission, _ = door(max_tokens=100_000)
    assert admission.room_tokens == 100_000
    admission.rate.add(1000, 1.0)
    assert admission.room_tokens == 10_000
    admission.rate.add(0, 1e6)
    assert admission.room_tokens == 16 * 40
    admission.longest_item = 500
    assert admission.room_tokens == 2000


async def test_who_cannot_make_the_deadline_is_passed_by_those_who_can() -> None:
    admission, clock = door(max_tokens=1000)
    admission.rate.add(100, 1.0)
    first, _ = await start(admission, 600)
    _, hopeless = await start(admission, 300, deadline=16.0)
    _, patient = await start(admission, 300, deadline=60.0)
    assert not hopeless.done(), "600 tokens ahead of it take 6 s, its own 3 s, which may turn out 2.5 times as long"
    assert patient.done()
    admission.hold(first, -600, -1)
    admission.wake()
    await settle()
    assert hopeless.done(), "it is let in when the others are done early"
    await hopeless
    assert clock.now == 0.0


async def test_who_came_too_late_is_not_let_in_to_be_late_when_the_room_is_empty() -> None:
    admission, clock = door(max_tokens=1000)
    admission.rate.add(100, 1.0)
    first, _ = await start(admission, 600)
    _, late = await start(admission, 300, deadline=7.0)
    clock.now = 6.0
    admission.hold(first, -600, -1)
    admission.wake()
    await settle()
    assert not late.done(), "its own tokens take 3 s, and 1 s is left"
    _, newcomer = await start(admission, 300, deadline=7.0)
    assert newcomer.done(), "one that comes to an empty room is always tried: it measures the rate anew"
    late.cancel()


async def test_small_request_with_little_time_comes_in_beside_a_long_queue() -> None:
    admission, _ = door(max_tokens=1000)
    admission.rate.add(100, 1.0)
    await start(admission, 700)
    _, small = await start(admission, 5, deadline=2.0)
    assert small.done(), "fair turns answer it within a batch or two, not after 7 s"


async def test_caller_who_leaves_the_line_is_forgotten() -> None:
    admission, _ = door()
    first, _ = await start(admission, 900)
    _, leaving = await start(admission, 200)
    _, staying = await start(admission, 300)
    leaving.cancel()
    await settle()
    assert admission.num_waiting == 1
    admission.hold(first, -900, -1)
    admission.wake()
    await settle()
    assert staying.done()
    assert admission.tokens == 300


@pytest.mark.parametrize("gives_up", [True, False])
async def test_who_waits_behind_one_that_leaves_or_gives_up_comes_in_at_once(gives_up: bool) -> None:
    admission, _ = door()
    await start(admission, 900)
    _, large = await start(admission, 200, deadline=0.2 if gives_up else 60)
    _, small = await start(admission, 50)
    assert not small.done() or large.done()
    if not gives_up:
        large.cancel()
    await asyncio.wait({large})
    assert large.cancelled() or isinstance(large.exception(), OverloadedError)
    await settle()
    assert small.done(), "the room is there; nothing has to end first"


async def test_door_that_lets_the_admitted_finish_is_closed_to_all_others() -> None:
    admission, _ = door(max_tokens=1000)
    known, _ = await start(admission, 700)
    _, more = await start(admission, 100, request=known)
    _, newcomer = await start(admission, 400)
    admission.close(DrainingError("closing"), let_admitted_finish=True)
    with pytest.raises(DrainingError):
        await newcomer
    with pytest.raises(DrainingError):
        await admission.admit(Request(1), 1, 1, 60)
    assert not more.done()
    admission.hold(known, -700, -1)
    admission.wake()
    await more
    _, last = await start(admission, 900, request=known)
    admission.close(DrainingError("closing"))
    with pytest.raises(DrainingError):
        await last


async def test_closing_the_door_refuses_who_waits_and_who_comes() -> None:
    admission, _ = door()
    await start(admission, 900)
    _, waiting = await start(admission, 200)
    admission.close(DrainingError("closing"))
    with pytest.raises(DrainingError):
        await waiting
    with pytest.raises(DrainingError):
        await admission.admit(Request(1), 1, 1, 60)
