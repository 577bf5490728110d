"""Changing the model of a running server: swaps under load, refusals, sleep and wake. Fakes; no sleeps."""

import asyncio
import gc
import random
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import httpx
import pytest

from rm_server.app import create_app
from rm_server.auth import Keys
from rm_server.memory import Need
from rm_server.service import ScoringService
from rm_server.settings import ServerSettings
from rm_server.switch import Switch
from tests.server.conftest import FakeModel, expected_score, metric, until

Load = Callable[[ServerSettings, str], Any]
KEY = "an admin key"


class Other(FakeModel):
    """Another fake: its score is that of the fake, moved by ``shift``, and its reward id says so."""

    def __init__(self, renderer: Any, shift: float, max_length: int = 512) -> None:
        super().__init__(renderer, max_length)
        self.shift = shift
        self.name = f"fake{shift:g}"
        self.reward_id = f"sha256:shift{shift:g}"

    def score_batch(self, sequences: Any, **options: Any) -> Any:
        done = super().score_batch(sequences, **options)
        done.rewards[:] += self.shift
        return done


def score_under(reward_id: str, ids: list[int]) -> float:
    """What the model of this identity gives."""
    import numpy as np

    return float(np.float32(expected_score(ids)) + np.float32(float(reward_id.removeprefix("sha256:shift"))))


@pytest.fixture
def admin_keys(tmp_path: Any) -> Keys:
    from rm_server.auth import hash_key

    (tmp_path / "admin.txt").write_text(f"{hash_key(KEY)} boss\n")
    return Keys.from_files(None, str(tmp_path / "admin.txt"))


@asynccontextmanager
async def switching(
    model: Any,
    keys: Keys,
    load: Load,
    measure: Any = lambda settings, checkpoint: Need(0, 0),
    load_seconds: float = 60.0,
    **settings: Any,
) -> AsyncIterator[tuple[httpx.AsyncClient, ScoringService]]:
    service = ScoringService(ServerSettings(checkpoint="fake", **settings))
    app = create_app(service, service.settings, keys, Switch(service, load, measure, load_seconds))
    # Nothing here may keep a model alive that was swapped out.
    models, gate = [model], getattr(model, "gate", threading.Event())
    del model
    await service.start(models.pop)
    try:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app),
            base_url="http://server",
            timeout=60,
            headers={"Authorization": f"Bearer {KEY}"},
        ) as client:
            yield client, service
    finally:
        gate.set()
        await service.stop()


def loader(renderer: Any) -> Load:
    """``"3"`` loads the model whose scores are moved by 3."""
    return lambda settings, checkpoint: Other(renderer, float(checkpoint))


Start = Callable[..., AbstractAsyncContextManager[tuple[httpx.AsyncClient, ScoringService]]]


@pytest.fixture
def swappable(fake: Any, admin_keys: Keys) -> Start:
    """``async with swappable(model, load=…, …) as (client, service)``; by default the fake that moves scores by 0."""

    def start(model: Any = None, *, load: Load | None = None, keys: Keys = admin_keys, **rest: Any) -> Any:
        return switching(model or Other(fake.renderer, 0), keys, load or loader(fake.renderer), **rest)

    return start


@pytest.mark.parametrize("num_swaps", [5, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.long])])
async def test_swap_under_load_back_and_forth_loses_nothing_and_every_answer_fits_the_reward_id_it_names(
    swappable: Start, num_swaps: int
) -> None:
    async with swappable(max_batch_tokens=256) as (client, service):
        is_over = False
        seen: set[str] = set()

        async def call(seed: int) -> int:
            rng, count = random.Random(seed), 0
            while not is_over:
                ids = [[rng.randrange(256) for _ in range(rng.choice([1, 9, 90]))] for _ in range(rng.choice([1, 5]))]
                response = await client.post("/score", json={"input_ids": ids})
                assert response.status_code == 200, response.text
                answer = response.json()
                assert answer["rewards"] == [score_under(answer["reward_id"], one) for one in ids]
                seen.add(answer["reward_id"])
                count += 1
            return count

        calls = [asyncio.create_task(call(seed)) for seed in range(16)]
        for number in range(1, num_swaps + 1):
            before = service.metrics.registry.get_sample_value("rm_items_scored_total") or 0
            await until(lambda: metric(service, "rm_items_scored_total") > before + 10)  # noqa: B023
            response = await client.post("/admin/checkpoint", json={"checkpoint": str(number % 2)})
            assert response.status_code == 200, response.text
            body = response.json()
            assert body["reward_id"] == f"sha256:shift{number % 2}"
            assert body["previous_reward_id"] == f"sha256:shift{(number + 1) % 2}"
            assert body["is_freed"] is True
        is_over = True
        counts = await asyncio.gather(*calls)
        assert metric(service, "rm_swaps_total", outcome="succeeded") == num_swaps
        assert service.admission.tokens == service.admission.items == service.num_open == 0
    assert min(counts) > 0
    assert seen == {"sha256:shift0", "sha256:shift1"}


async def test_requests_that_were_there_are_answered_by_the_old_model_and_it_is_freed_after_them(
    fake: Any, swappable: Start
) -> None:
    old = Other(fake.renderer, 0)
    gone = weakref.ref(old)
    async with swappable(old, max_batch_tokens=16) as (client, service):
        old.hold()
        early = asyncio.create_task(client.post("/score", json={"input_ids": [[1] * 16, [2] * 16, [3] * 16]}))
        await old.until_entered()
        swap = asyncio.create_task(client.post("/admin/checkpoint", json={"checkpoint": "1"}))
        await until(lambda: service.model is not None and service.model.reward_id == "sha256:shift1")
        late = asyncio.create_task(client.post("/score", json={"input_ids": [[1] * 16]}))
        await until(lambda: len(service.waiting) == 1)
        assert not swap.done()
        old.gate.set()
        answers = [(await task).json() for task in (early, late)]
        assert [answer["reward_id"] for answer in answers] == ["sha256:shift0", "sha256:shift1"]
        assert answers[0]["rewards"] == [expected_score([n] * 16) for n in (1, 2, 3)]
        assert answers[1]["rewards"] == [score_under("sha256:shift1", [1] * 16)]
        assert (await swap).json()["is_freed"] is True
        del old
        gc.collect()
        assert gone() is None, "something holds the old model"


async def test_pinned_caller_gets_409_after_a_swap_and_is_served_again_after_the_way_back(swappable: Start) -> None:
    body = {"input_ids": [[1]], "reward_id": "sha256:shift0"}
    async with swappable() as (client, _):
        statuses = []
        for checkpoint in ("1", "0"):
            await client.post("/admin/checkpoint", json={"checkpoint": checkpoint})
            response = await client.post("/score", json=body)
            statuses.append((response.status_code, response.json().get("error", {}).get("type")))
    assert statuses == [(409, "reward_id_mismatch"), (200, None)]


@pytest.mark.parametrize(
    ("error", "status", "kind", "says"),
    [
        (ValueError("x: model.safetensors is truncated"), 422, "checkpoint_refused", "is truncated"),
        (OSError(28, "No space left on device"), 422, "checkpoint_refused", "No space left"),
        (RuntimeError("secret"), 422, "checkpoint_refused", "log says where"),
        (MemoryError(), 503, "not_enough_memory", "memory ran out"),
    ],
)
async def test_checkpoint_that_cannot_be_loaded_changes_nothing(
    swappable: Start, error: Exception, status: int, kind: str, says: str
) -> None:
    def load(settings: ServerSettings, checkpoint: str) -> Any:
        raise error

    async with swappable(load=load) as (client, service):
        response = await client.post("/admin/checkpoint", json={"checkpoint": "x"})
        assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
        assert says in response.json()["error"]["message"]
        assert "secret" not in response.text
        answer = (await client.post("/score", json={"input_ids": [[1]]})).json()
        assert answer["reward_id"] == "sha256:shift0"
        assert (await client.get("/ready")).status_code == 200
        assert metric(service, "rm_swaps_total", outcome=kind) == 1


async def test_checkpoint_with_another_identity_limits_or_nan_is_refused(fake: Any, swappable: Start) -> None:
    def load(settings: ServerSettings, checkpoint: str) -> Any:
        model = Other(fake.renderer, 1, max_length=256 if checkpoint == "short" else 512)
        model.nan_for = lambda ids: checkpoint == "nan"
        return model

    async with swappable(load=load, max_length=512) as (client, service):
        for body, status, says in (
            ({"checkpoint": "1", "reward_id": "sha256:other"}, 409, "not the one expected"),
            ({"checkpoint": "short"}, 422, "context of 256"),
            ({"checkpoint": "nan"}, 422, "NaN"),
            ({"checkpoint": ""}, 422, "checkpoint: must not be empty"),
            ({"checkpoint": "1", "rewardid": "x"}, 422, "rewardid: unknown field"),
        ):
            response = await client.post("/admin/checkpoint", json=body)
            assert (response.status_code, says in response.json()["error"]["message"]) == (status, True), response.text
        assert service.model is not None
        assert service.model.reward_id == "sha256:shift0"


async def test_memory_is_checked_before_anything_is_loaded(swappable: Start) -> None:
    def load(settings: ServerSettings, checkpoint: str) -> Any:
        raise AssertionError("it was loaded")

    huge = lambda settings, checkpoint: Need(host=1 << 60, device=0)  # noqa: E731
    async with swappable(load=load, measure=huge) as (client, _):
        response = await client.post("/admin/checkpoint", json={"checkpoint": "1"})
    assert (response.status_code, response.json()["error"]["type"]) == (503, "not_enough_memory")
    assert "MiB are free" in response.json()["error"]["message"]


async def test_second_change_at_the_same_time_is_refused(fake: Any, swappable: Start) -> None:
    model = Other(fake.renderer, 0)
    async with swappable(model) as (client, service):
        model.hold()
        scoring = asyncio.create_task(client.post("/score", json={"input_ids": [[1]]}))
        await model.until_entered()
        first = asyncio.create_task(client.post("/admin/checkpoint", json={"checkpoint": "1"}))
        await until(lambda: service.model is not model)
        for path in ("checkpoint", "sleep", "wake"):
            response = await client.post(f"/admin/{path}", json={"checkpoint": "2"})
            assert (response.status_code, response.json()["error"]["type"]) == (409, "busy")
        model.gate.set()
        assert (await first).status_code == (await scoring).status_code == 200


async def test_server_that_is_asked_to_end_during_a_load_ends_and_the_swap_is_refused(
    fake: Any, swappable: Start
) -> None:

    may_load = threading.Event()

    def load(settings: ServerSettings, checkpoint: str) -> Any:
        assert may_load.wait(10)
        return Other(fake.renderer, 1)

    async with swappable(load=load) as (client, service):
        swap = asyncio.create_task(client.post("/admin/checkpoint", json={"checkpoint": "1"}))
        await until(lambda: service.is_loading_beside)
        await service.drain(1)
        may_load.set()
        assert (await swap).json()["error"]["type"] == "draining"


async def test_load_that_hangs_is_given_up_and_what_it_gives_later_is_dropped(fake: Any, swappable: Start) -> None:
    may_load, late = threading.Event(), []

    def load(settings: ServerSettings, checkpoint: str) -> Any:
        model = Other(fake.renderer, float(checkpoint))
        if checkpoint == "1":
            assert may_load.wait(20), "the test never let it go"
            late.append(weakref.ref(model))
        return model

    async with swappable(load=load, load_seconds=0.5) as (client, service):
        response = await client.post("/admin/checkpoint", json={"checkpoint": "1"})
        assert (response.status_code, response.json()["error"]["type"]) == (504, "deadline_exceeded")
        assert "was not loaded within 0.5 s" in response.json()["error"]["message"]
        assert metric(service, "rm_swaps_total", outcome="deadline_exceeded") == 1
        assert service.is_loading_beside, "a thread cannot be stopped"
        answer = (await client.post("/admin/checkpoint", json={"checkpoint": "2"})).json()
        assert answer["reward_id"] == "sha256:shift2"
        may_load.set()
        await until(lambda: not service.is_loading_beside)
        (gone,) = late
        await until(lambda: gc.collect() >= 0 and gone() is None)
        assert (await client.post("/score", json={"input_ids": [[1]]})).json()["reward_id"] == "sha256:shift2"


async def test_asleep_nothing_is_scored_the_device_is_free_and_waking_brings_it_back(
    fake: Any, swappable: Start
) -> None:
    async with swappable(fake, probe_seconds=0.01, ready_seconds=30) as (client, service):
        fake.hold()
        early = asyncio.create_task(client.post("/score", json={"input_ids": [[1]]}))
        await fake.until_entered()
        sleeping = asyncio.create_task(client.post("/admin/sleep"))
        await until(lambda: service.state == "asleep")
        assert not fake.is_away
        fake.gate.set()
        assert (await early).status_code == 200, "what was admitted is finished first"
        body = (await sleeping).json()
        assert (body["state"], fake.is_away) == ("asleep", True)
        assert body["freed_bytes"] >= 123
        for response in (await client.post("/score", json={"input_ids": [[1]]}), await client.get("/ready")):
            assert (response.status_code, response.json()["error"]["type"]) == (503, "asleep")
            assert response.headers["retry-after"]
        assert (await client.get("/health")).status_code == 200
        assert (await client.post("/admin/sleep")).json()["freed_bytes"] == 0
        num_forwards = len(fake.forwards)
        swap = await client.post("/admin/checkpoint", json={"checkpoint": "1"})
        assert swap.json()["error"]["type"] == "asleep"
        assert len(fake.forwards) == num_forwards, "no probe touches a model that is away"
        assert (await client.post("/admin/wake")).json() == {"state": "serving"}
        assert not fake.is_away
        assert (await client.get("/ready")).status_code == 200
        assert (await client.post("/score", json={"input_ids": [[1]]})).json()["rewards"] == [expected_score([1])]
        assert (await client.post("/admin/wake")).status_code == 200, "waking twice is no error"


async def test_open_requests_are_refused_with_the_reason_when_sleep_can_wait_no_longer(
    fake: Any, swappable: Start
) -> None:
    async with swappable(fake, grace_seconds=0.05, max_queued_items=1) as (client, service):
        fake.hold()
        scoring = asyncio.create_task(client.post("/score", json={"input_ids": [[1]]}))
        await fake.until_entered()
        waiting = asyncio.create_task(client.post("/score", json={"input_ids": [[2]]}))
        await until(lambda: service.admission.num_waiting == 1)
        sleeping = asyncio.create_task(client.post("/admin/sleep"))
        for task in (scoring, waiting):
            assert (await task).json()["error"]["type"] == "asleep"
        fake.gate.set()
        assert (await sleeping).status_code == 200
        await client.post("/admin/wake")
        assert (await client.post("/score", json={"input_ids": [[2]]})).json()["rewards"] == [expected_score([2])]


async def test_device_that_is_still_full_leaves_it_asleep_and_it_may_be_woken_later(
    fake: Any, swappable: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with swappable(fake) as (client, service):
        await client.post("/admin/sleep")

        def full() -> None:
            raise MemoryError

        with monkeypatch.context() as patched:
            patched.setattr(fake, "return_to_device", full)
            response = await client.post("/admin/wake")
        assert (response.status_code, response.json()["error"]["type"]) == (503, "not_enough_memory")
        assert service.state == "asleep"
        assert (await client.post("/admin/wake")).status_code == 200


@pytest.mark.parametrize(
    ("error", "status", "kind"), [(MemoryError(), 503, "not_enough_memory"), (RuntimeError("x"), 500, "internal")]
)
async def test_model_that_cannot_leave_its_device_is_put_back_and_serves_on(
    fake: Any, swappable: Start, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int, kind: str
) -> None:
    def half_way() -> int:
        fake.is_away = True
        raise error

    async with swappable(fake) as (client, service):
        with monkeypatch.context() as patched:
            patched.setattr(fake, "leave_device", half_way)
            response = await client.post("/admin/sleep")
        assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
        assert (service.state, fake.is_away) == ("serving", False)
        assert (await client.get("/ready")).status_code == 200
        assert (await client.post("/score", json={"input_ids": [[1]]})).json()["rewards"] == [expected_score([1])]
        assert (await client.post("/admin/sleep")).status_code == 200
        await client.get("/metrics")
        assert (metric(service, "rm_asleep"), metric(service, "rm_ready")) == (1, 0)


async def test_model_that_can_neither_leave_nor_come_back_sleeps_until_it_can(
    fake: Any, swappable: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> int:
        raise MemoryError

    async with swappable(fake) as (client, service):
        with monkeypatch.context() as patched:
            patched.setattr(fake, "leave_device", full)
            patched.setattr(fake, "return_to_device", full)
            response = await client.post("/admin/sleep")
        assert (response.status_code, response.json()["error"]["type"]) == (503, "not_enough_memory")
        assert service.state == "asleep"
        assert (await client.post("/admin/wake")).status_code == 200
        assert (await client.post("/score", json={"input_ids": [[1]]})).status_code == 200


@pytest.mark.parametrize("path", ["checkpoint", "sleep", "wake"])
async def test_admin_routes_are_closed_without_an_admin_key(fake: Any, swappable: Start, path: str) -> None:
    async with swappable(fake) as (client, service):
        response = await client.post(f"/admin/{path}", json={"checkpoint": "1"}, headers={"Authorization": "Bearer x"})
        assert response.status_code == 401
        assert service.state == "serving"
    async with swappable(fake, keys=Keys()) as (client, service):
        assert (await client.post(f"/admin/{path}", json={"checkpoint": "1"})).status_code == 403
        assert service.state == "serving"


async def test_drift_compares_the_recent_rewards_with_the_checkpoint(fake: Any, swappable: Start) -> None:
    from types import SimpleNamespace

    fake.record = SimpleNamespace(training_length=10, reward_mean=2.0, reward_std=0.5, num_eval=100, temperature=1.0)
    sent = [[n] for n in range(50)]
    mean = sum(map(expected_score, sent)) / 50
    async with swappable(fake) as (client, service):
        assert "rm_reward_drift NaN" in (await client.get("/metrics")).text
        await client.post("/score", json={"input_ids": sent})
        await client.get("/metrics")
        assert metric(service, "rm_reward_recent_mean") == pytest.approx(mean)
        assert metric(service, "rm_reward_drift") == pytest.approx((mean - 2.0) / 0.5)
