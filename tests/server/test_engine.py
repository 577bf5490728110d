"""The whole engine behind HTTP, under load and under every fault. Events, no sleeps."""

import asyncio
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

Serve = Callable[..., Any]


async def test_64_concurrent_clients_get_their_own_rewards_in_order(
    fake: Any, serve: Serve, score_of: Any, sample: Any, eventually: Any
) -> None:
    rng = random.Random(0)
    bodies = [
        [[rng.randrange(300) for _ in range(rng.choice([1, 5, 60, 300]))] for _ in range(rng.choice([1, 1, 4, 16]))]
        for _ in range(64)
    ]
    async with serve(fake, max_batch_tokens=1024) as (client, service):
        fake.hold()
        first = asyncio.create_task(client.post("/score", json={"input_ids": bodies[0]}))
        await fake.until_entered()
        others = [asyncio.create_task(client.post("/score", json={"input_ids": body})) for body in bodies[1:]]
        await eventually(lambda: sample(service, "rm_requests_admitted_total") == 64)
        fake.gate.set()
        responses = await asyncio.gather(first, *others)
        forwards = sample(service, "rm_batch_requests_count")
        assert sample(service, "rm_batch_requests_sum") / forwards > 2
        assert service.admission.tokens == service.admission.items == 0
        assert service.admission.num_waiting == 0
    for body, response in zip(bodies, responses, strict=True):
        assert response.json()["rewards"] == [score_of(ids) for ids in body]


async def test_health_answers_during_a_long_forward_and_ready_stays_true(fake: Any, serve: Serve) -> None:
    async with serve(fake) as (client, _):
        fake.hold()
        scoring = asyncio.create_task(client.post("/score", json={"input_ids": [[1]]}))
        await fake.until_entered()
        for _ in range(20):
            assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 200
        assert not scoring.done()
        fake.gate.set()
        assert (await scoring).status_code == 200


async def test_small_request_does_not_wait_behind_a_huge_one(
    fake: Any, serve: Serve, score_of: Any, eventually: Any
) -> None:
    async with serve(fake, max_batch_tokens=512) as (client, service):
        fake.hold()
        huge_body = {"input_ids": [[n // 256, n % 256, *range(40)] for n in range(5000)]}
        huge = asyncio.create_task(client.post("/score", json=huge_body))
        await fake.until_entered()
        small = asyncio.create_task(client.post("/score", json={"input_ids": [[299, 1]]}))
        await eventually(lambda: bool(service.waiting.newcomers))
        before = len(fake.forwards)
        fake.gate.set()
        assert (await small).json()["rewards"] == [score_of([299, 1])]
        assert not huge.done()
        in_flight, following = fake.forwards[before : before + 2]
        assert [299, 1] not in in_flight
        assert [299, 1] in following
        answer = (await huge).json()
    assert answer["rewards"] == [score_of(ids) for ids in huge_body["input_ids"]]


async def test_single_answers_of_one_prompt_share_one_forward(fake: Any, serve: Serve, eventually: Any) -> None:
    prompt = list(range(100))
    async with serve(fake) as (client, service):
        fake.hold()
        blocker = asyncio.create_task(client.post("/score", json={"input_ids": [[299]]}))
        await fake.until_entered()
        calls = [asyncio.create_task(client.post("/score", json={"input_ids": [[*prompt, n]]})) for n in range(8)]
        await eventually(lambda: len(service.waiting) == 8)
        fake.gate.set()
        responses = await asyncio.gather(*calls)
        await blocker
        assert [len(forward) for forward in fake.forwards] == [1, 1, 8]  # the start-up probe, the blocker, the group
        assert sum(response.json()["usage"]["computed_tokens"] for response in responses) == 108


async def test_forward_that_raises_once_fails_nobody_and_ready_stays_true(
    fake: Any, serve: Serve, score_of: Any, sample: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(fake) as (client, service):
        errors = iter([RuntimeError("secret text")])

        def fail_once(batch: Any) -> None:
            for error in errors:
                raise error

        fake.before = fail_once
        response = await client.post("/score", json={"input_ids": [[1], [2], [3]]})
        assert response.json()["rewards"] == [score_of([n]) for n in (1, 2, 3)]
        assert (await client.get("/ready")).status_code == 200
        assert sample(service, "rm_forward_failures_total", cause="error") == 1
    assert "secret text" not in caplog.text
    assert "RuntimeError at" in caplog.text


async def test_item_that_always_raises_fails_alone_among_callers(fake: Any, serve: Serve, score_of: Any) -> None:
    def fail(batch: list[list[int]]) -> None:
        if any(ids[0] == 13 for ids in batch):
            raise ValueError("bad item")

    fake.before = fail
    async with serve(fake) as (client, _):
        calls = [client.post("/score", json={"input_ids": [[n]]}) for n in range(20)]
        for n, response in enumerate(await asyncio.gather(*calls)):
            if n == 13:
                assert (response.status_code, response.json()["error"]["type"]) == (500, "internal")
                assert "bad item" not in response.text
            else:
                assert response.json()["rewards"] == [score_of([n])]


async def test_out_of_memory_is_survived_and_shown(fake: Any, serve: Serve, score_of: Any, sample: Any) -> None:
    def fail(batch: list[list[int]]) -> None:
        if sum(map(len, batch)) > 100:
            raise MemoryError

    fake.before = fail
    ids = [[n] * 30 for n in range(20)]
    async with serve(fake) as (client, service):
        response = await client.post("/score", json={"input_ids": ids})
        assert response.json()["rewards"] == [score_of(sequence) for sequence in ids]
        await client.get("/metrics")
        assert sample(service, "rm_forward_failures_total", cause="out_of_memory") > 0
        assert sample(service, "rm_batch_token_limit") == 512


async def test_tokenizer_that_raises_fails_its_item_alone(
    fake: Any, serve: Serve, score_of: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = fake.renderer.render_text

    def render(text: str, **options: Any) -> list[int]:
        if text == "secret":
            raise RuntimeError(text)
        return list(real(text, **options))

    monkeypatch.setattr(fake.renderer, "render_text", render)
    async with serve(fake) as (client, _):
        answer = (await client.post("/score", json={"texts": ["a", "secret", "b"]})).json()
    assert answer["rewards"] == [score_of(real("a")), None, score_of(real("b"))]
    assert answer["errors"][0]["type"] == "internal"
    assert "secret" not in caplog.text + answer["errors"][0]["message"]


async def call_and_hang_up(app: Any, body: bytes, hang_up: asyncio.Event) -> list[dict[str, Any]]:
    """An ASGI call whose client leaves when told so."""
    sent: list[dict[str, Any]] = []
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await hang_up.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/score",
        "raw_path": b"/score",
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-length", str(len(body)).encode())],
        "client": ("test", 1),
        "server": ("test", 80),
    }
    await app(scope, receive, send)
    return sent


async def test_caller_who_leaves_while_waiting_is_dropped_and_counted(
    fake: Any, serve: Serve, sample: Any, eventually: Any
) -> None:
    async with serve(fake) as (client, service):
        app = client._transport.app
        fake.hold()
        blocker = asyncio.create_task(client.post("/score", json={"input_ids": [[1]]}))
        await fake.until_entered()
        hang_up = asyncio.Event()
        leaving = asyncio.create_task(call_and_hang_up(app, b'{"input_ids": [[2], [3]]}', hang_up))
        await eventually(lambda: len(service.waiting) == 2)
        hang_up.set()
        await leaving
        assert len(service.waiting) == 0
        assert service.admission.items == 1
        assert sample(service, "rm_requests_cancelled_total") == 1
        fake.gate.set()
        assert (await blocker).status_code == 200
        assert [[2], [3]] not in fake.forwards
        assert service.admission.tokens == service.admission.items == service.num_open == 0


async def test_caller_who_leaves_during_its_forward_frees_its_room_when_it_ends(
    fake: Any, serve: Serve, sample: Any, eventually: Any, score_of: Any
) -> None:
    async with serve(fake) as (client, service):
        app = client._transport.app
        fake.hold()
        hang_up = asyncio.Event()
        leaving = asyncio.create_task(call_and_hang_up(app, b'{"input_ids": [[2], [3]]}', hang_up))
        await fake.until_entered()
        hang_up.set()
        await leaving
        assert service.admission.items == 2, "what is being computed is held until it is done"
        fake.gate.set()
        await eventually(lambda: service.admission.items == 0)
        assert sample(service, "rm_requests_cancelled_total") == 1
        assert (await client.post("/score", json={"input_ids": [[4]]})).json()["rewards"] == [score_of([4])]


async def test_deadline_in_the_queue_is_answered_and_the_item_dropped(fake: Any, serve: Serve) -> None:
    async with serve(fake) as (client, service):
        fake.hold()
        blocker = asyncio.create_task(client.post("/score", json={"input_ids": [[1]]}))
        await fake.until_entered()
        response = await client.post("/score", json={"input_ids": [[2]], "deadline_ms": 20})
        assert (response.status_code, response.json()["error"]["type"]) == (504, "deadline_exceeded")
        assert response.json()["error"]["retryable"] is True
        assert len(service.waiting) == 0
        fake.gate.set()
        assert (await blocker).status_code == 200
        assert [[2]] not in fake.forwards


async def test_what_was_scored_before_the_deadline_is_answered(fake: Any, serve: Serve, score_of: Any) -> None:
    async with serve(fake, max_batch_tokens=16) as (client, _):

        def hold_second(batch: list[list[int]]) -> None:
            if [2] * 16 in batch:
                fake.hold()
                fake.gate.wait(10)

        fake.before = hold_second
        response = await client.post("/score", json={"input_ids": [[1] * 16, [2] * 16], "deadline_ms": 300})
        assert response.status_code == 200
        assert response.json()["rewards"] == [score_of([1] * 16), None]
        assert response.json()["errors"][0]["type"] == "deadline_exceeded"


@pytest.mark.parametrize("as_list", [True, False])
async def test_overload_is_503_whether_items_come_in_a_list_or_one_by_one(
    fake: Any, serve: Serve, as_list: bool
) -> None:
    async with serve(fake, max_queued_items=4, max_batch_tokens=16, max_length=16) as (client, service):
        fake.hold()
        blocker = asyncio.create_task(client.post("/score", json={"input_ids": [[1] * 16] * 4}))
        await fake.until_entered()
        batches = [[[2], [3]]] if as_list else [[[2]], [[3]]]
        calls = [client.post("/score", json={"input_ids": batch, "deadline_ms": 20}) for batch in batches]
        for response in await asyncio.gather(*calls):
            assert (response.status_code, response.json()["error"]["type"]) == (503, "overloaded")
            assert int(response.headers["retry-after"]) >= 1
        assert service.admission.num_waiting == 0
        fake.gate.set()
        assert (await blocker).status_code == 200
        assert (await client.post("/score", json={"input_ids": [[2]]})).status_code == 200


async def test_overloaded_caller_is_served_when_room_comes_before_its_deadline(
    fake: Any, serve: Serve, eventually: Any
) -> None:
    async with serve(fake, max_queued_items=1) as (client, service):
        fake.hold()
        blocker = asyncio.create_task(client.post("/score", json={"input_ids": [[1]]}))
        await fake.until_entered()
        waiting = asyncio.create_task(client.post("/score", json={"input_ids": [[2], [3], [4]]}))
        await eventually(lambda: service.admission.num_waiting == 1)
        fake.gate.set()
        assert [response.status_code for response in await asyncio.gather(blocker, waiting)] == [200, 200]


async def test_drain_finishes_what_was_admitted_and_refuses_the_rest(
    fake: Any, serve: Serve, score_of: Any, eventually: Any
) -> None:
    async with serve(fake, max_queued_items=2) as (client, service):
        fake.hold()
        admitted = asyncio.create_task(client.post("/score", json={"input_ids": [[1], [2]]}))
        await fake.until_entered()
        waiting = asyncio.create_task(client.post("/score", json={"input_ids": [[3]]}))
        await eventually(lambda: service.admission.num_waiting == 1)
        draining = asyncio.create_task(service.drain(grace_seconds=30))
        assert (await waiting).json()["error"]["type"] == "draining"
        for response in (await client.post("/score", json={"input_ids": [[4]]}), await client.get("/ready")):
            assert (response.status_code, response.json()["error"]["type"]) == (503, "draining")
        assert (await client.get("/health")).status_code == 200
        assert not draining.done()
        fake.gate.set()
        assert (await admitted).json()["rewards"] == [score_of([1]), score_of([2])]
        await draining


async def test_drain_lets_in_the_later_parts_of_what_was_admitted_and_no_newcomer(
    fake: Any, serve: Serve, score_of: Any, eventually: Any
) -> None:
    ids = [[n // 256, n % 256] for n in range(1500)]
    async with serve(fake, max_queued_items=700) as (client, service):
        fake.hold()
        admitted = asyncio.create_task(client.post("/score", json={"input_ids": ids}))
        await fake.until_entered()
        newcomer = asyncio.create_task(client.post("/score", json={"input_ids": [[9]] * 300}))
        await eventually(lambda: service.admission.num_waiting == 2)
        draining = asyncio.create_task(service.drain(grace_seconds=30))
        assert (await newcomer).json()["error"]["type"] == "draining"
        assert not draining.done()
        fake.gate.set()
        answer = (await admitted).json()
        assert answer["rewards"] == [score_of(one) for one in ids]
        assert "errors" not in answer
        await draining


async def test_after_the_grace_period_the_later_parts_are_refused_too(fake: Any, serve: Serve, eventually: Any) -> None:
    async with serve(fake, max_queued_items=700) as (client, service):
        fake.hold()
        admitted = asyncio.create_task(client.post("/score", json={"input_ids": [[1]] * 1500}))
        await fake.until_entered()
        await eventually(lambda: service.admission.num_waiting == 1)
        await service.drain(grace_seconds=0.01)
        response = await asyncio.wait_for(admitted, 10)
        assert (response.status_code, response.json()["error"]["type"]) == (503, "draining")
        assert service.admission.num_waiting == 0


async def test_after_the_grace_period_nobody_is_left_hanging(fake: Any, serve: Serve) -> None:
    async with serve(fake) as (client, service):
        fake.hold()
        admitted = asyncio.create_task(client.post("/score", json={"input_ids": [[1]]}))
        await fake.until_entered()
        await service.drain(grace_seconds=0.01)
        response = await admitted
        assert (response.status_code, response.json()["error"]["type"]) == (503, "draining")


async def test_ready_turns_false_when_forwards_fail_and_true_again_when_they_do_not(
    fake: Any, serve: Serve, sample: Any, eventually: Any
) -> None:
    async with serve(fake, probe_seconds=0.01, ready_seconds=0.05) as (client, service):

        def broken(batch: Any) -> None:
            raise RuntimeError("device lost")

        fake.before = broken
        await eventually(lambda: service.why_not_ready() is not None)
        response = await client.get("/ready")
        assert response.status_code == 503
        assert response.json()["error"]["type"] == "not_ready"
        assert (await client.get("/health")).status_code == 200
        fake.before = lambda batch: None
        await eventually(lambda: service.why_not_ready() is None)
        assert sample(service, "rm_probes_total", outcome="failed") > 0
        assert sample(service, "rm_probes_total", outcome="succeeded") > 0


async def test_stuck_forward_makes_it_not_ready_and_tells_the_supervisor(fake: Any, serve: Serve, sample: Any) -> None:
    async with serve(fake, stall_seconds=0.1) as (client, service):
        stalled = asyncio.Event()
        service.exit_on_stall = stalled.set
        fake.hold()
        scoring = asyncio.create_task(client.post("/score", json={"input_ids": [[1]]}))
        await asyncio.wait_for(stalled.wait(), 10)
        response = await client.get("/ready")
        assert (response.status_code, response.json()["error"]["type"]) == (503, "not_ready")
        assert sample(service, "rm_stalls_total") >= 1
        fake.gate.set()
        assert (await scoring).status_code == 200
        assert (await client.get("/ready")).status_code == 200


@pytest.fixture
def stuck(fake: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The fake with a tokenizer that hangs on the text ``stuck`` until the event is set."""
    real, event = fake.renderer.render_text, threading.Event()

    def render(text: str, **options: Any) -> list[int]:
        assert text != "stuck" or event.wait(30), "the test never let it go"
        return list(real(text, **options))

    monkeypatch.setattr(fake.renderer, "render_text", render)
    yield event
    event.set()


async def test_stuck_tokenizer_keeps_no_caller_beyond_its_deadline_and_is_told_to_the_supervisor(
    fake: Any, serve: Serve, stuck: threading.Event, score_of: Any, eventually: Any
) -> None:
    async with serve(fake, stall_seconds=0.2) as (client, service):
        stalled = asyncio.Event()
        service.exit_on_stall = stalled.set
        body = {"texts": ["stuck"], "deadline_ms": 50}
        behind = {"texts": ["a"], "deadline_ms": 50}
        for response in await asyncio.gather(*(client.post("/score", json=one) for one in (body, behind))):
            assert (response.status_code, response.json()["error"]["type"]) == (504, "deadline_exceeded")
        assert service.admission.tokens == service.admission.items == service.num_open == 0
        assert service.is_busy
        await asyncio.wait_for(stalled.wait(), 10)
        response = await client.get("/ready")
        assert (response.status_code, response.json()["error"]["type"]) == (503, "not_ready")
        assert "the tokenizer has been running" in response.json()["error"]["message"]
        stuck.set()
        await eventually(lambda: not service.is_busy)
        assert (await client.get("/ready")).status_code == 200
        answer = (await client.post("/score", json={"texts": ["a"]})).json()
        assert answer["rewards"] == [score_of(fake.renderer.render_text("a"))]


async def test_sleep_and_drain_do_not_wait_for_a_stuck_tokenizer_beyond_the_grace_period(
    fake: Any, serve: Serve, stuck: threading.Event, eventually: Any
) -> None:
    async with serve(fake, grace_seconds=0.01) as (client, service):
        for end, kind in ((service.fall_asleep, "asleep"), (lambda: service.drain(0.01), "draining")):
            asked = asyncio.create_task(client.post("/score", json={"texts": ["stuck"]}))
            await eventually(lambda: service.admission.items == 1)
            await asyncio.wait_for(end(), 10)
            assert (await asked).json()["error"]["type"] == kind
            service.wake_up()


async def test_server_that_is_told_to_end_in_the_moment_of_new_work_ends(fake: Any, serve: Serve) -> None:
    async with serve(fake) as (_, service):
        service.wake_up()  # which tells the batch loop, as a new item does
        await asyncio.wait_for(service.stop(), 10)


async def test_bug_in_the_planner_fails_the_waiting_and_serves_the_next(
    fake: Any, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    import rm_server.batches as batches

    real = batches.plan_batch

    def explode(*args: Any) -> Any:
        monkeypatch.setattr(batches, "plan_batch", real)
        raise AssertionError("this is a bug")

    async with serve(fake) as (client, service):
        monkeypatch.setattr(batches, "plan_batch", explode)
        response = await client.post("/score", json={"input_ids": [[1]]})
        assert (response.status_code, response.json()["error"]["type"]) == (500, "internal")
        assert (await client.post("/score", json={"input_ids": [[1]]})).status_code == 200
        assert service.admission.tokens == 0


@pytest.mark.parametrize("where", ["planner", "delivery"])
async def test_bug_after_items_were_taken_for_a_batch_leaves_no_caller_hanging(
    fake: Any, serve: Serve, monkeypatch: pytest.MonkeyPatch, eventually: Any, where: str
) -> None:
    import rm_server.batches as batches

    owner, name = (batches, "plan_batch") if where == "planner" else (batches.BatchLoop, "_deliver")
    real = getattr(owner, name)

    def explode(*args: Any) -> Any:
        monkeypatch.setattr(owner, name, real)
        if where == "planner":
            real(*args)
        raise AssertionError("this is a bug")

    async with serve(fake) as (client, service):
        fake.hold()
        blocker = asyncio.create_task(client.post("/score", json={"input_ids": [[1]]}))
        await fake.until_entered()
        calls = [asyncio.create_task(client.post("/score", json={"input_ids": [[n], [n, n]]})) for n in range(2, 5)]
        await eventually(lambda: len(service.waiting) == 6)
        if where == "planner":
            fake.before = lambda batch: monkeypatch.setattr(owner, name, explode)
        else:
            monkeypatch.setattr(owner, name, explode)
        fake.gate.set()
        answers = await asyncio.wait_for(asyncio.gather(*calls), 10)
        assert {(answer.status_code, answer.json()["error"]["type"]) for answer in answers} == {(500, "internal")}
        assert (await blocker).status_code == (200 if where == "planner" else 500)
        fake.before = lambda batch: None
        assert (await client.post("/score", json={"input_ids": [[1]]})).status_code == 200
        assert service.admission.tokens == service.admission.items == service.num_open == 0


@pytest.mark.parametrize("is_idle", [True, False])
async def test_device_on_which_nothing_succeeds_is_told_to_the_supervisor(
    fake: Any, serve: Serve, sample: Any, is_idle: bool
) -> None:
    async with serve(fake, probe_seconds=0.02, ready_seconds=1, stall_seconds=0.2) as (client, service):
        gave_up = asyncio.Event()
        service.exit_on_stall = gave_up.set

        def lost(batch: Any) -> None:
            raise RuntimeError("CUDA error: device-side assert triggered")

        fake.before = lost

        async def call() -> None:
            while not gave_up.is_set():
                assert (await client.post("/score", json={"input_ids": [[1]]})).status_code == 500

        callers = [asyncio.create_task(call()) for _ in range(0 if is_idle else 4)]
        await asyncio.wait_for(gave_up.wait(), 10)
        await asyncio.gather(*callers)
        assert sample(service, "rm_stalls_total") == 1
        assert sample(service, "rm_probes_total", outcome="failed") >= 2


async def test_items_that_always_fail_are_no_lost_device(fake: Any, serve: Serve, sample: Any) -> None:
    def fail(batch: list[list[int]]) -> None:
        if any(ids[0] == 13 for ids in batch):
            raise ValueError("bad item")

    fake.before = fail
    async with serve(fake, probe_seconds=0.02, ready_seconds=30, stall_seconds=0.1) as (client, service):
        gave_up = asyncio.Event()
        service.exit_on_stall = gave_up.set
        while sample(service, "rm_probes_total", outcome="succeeded") < 10:
            assert (await client.post("/score", json={"input_ids": [[13]]})).status_code == 500
        assert not gave_up.is_set()
        assert (await client.get("/ready")).status_code == 200


async def test_every_answer_that_is_an_error_is_counted(
    fake: Any, serve: Serve, sample: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve(fake) as (client, service):
        for method, path, status, kind in (
            ("GET", "/nothing", 404, "not_found"),
            ("GET", "/score", 405, "invalid_request"),
            ("POST", "/admin/sleep", 403, "forbidden"),
        ):
            assert (await client.request(method, path)).status_code == status
            assert sample(service, "rm_requests_refused_total", reason=kind) == 1

        def fail() -> None:
            raise RuntimeError

        with monkeypatch.context() as patched:
            patched.setattr(service, "update_gauges", fail)
            assert (await client.get("/metrics")).status_code == 500
        assert sample(service, "rm_requests_refused_total", reason="internal") == 1
        if sys.platform == "linux":
            assert "\nprocess_resident_memory_bytes " in (await client.get("/metrics")).text


async def test_impossible_limits_are_refused_at_start(fake: Any) -> None:
    from rm_server import ScoringService, ServerSettings
    from rm_server.settings import SettingsError

    for limits, says in (
        ({"max_length": 513}, "context of 512"),
        ({"max_queued_tokens": 500}, "never be admitted"),
    ):
        service = ScoringService(ServerSettings(checkpoint="x", **limits))
        with pytest.raises(SettingsError, match=says):
            await service.start(lambda: fake)
        await service.stop()


async def test_model_that_gives_nan_for_everything_does_not_start(fake: Any) -> None:
    from rm_server import ScoringService, ServerSettings

    fake.nan_for = lambda ids: True
    service = ScoringService(ServerSettings(checkpoint="x"))
    with pytest.raises(ValueError, match="NaN"):
        await service.start(lambda: fake)
    assert service.why_not_ready() is not None
    await service.stop()
