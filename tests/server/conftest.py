"""A model whose score is a hash of the ids, which can be made to wait, fail or give NaN; and a client for it."""

import asyncio
import hashlib
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn

from rm_core.passes import Scored
from rm_core.tree import MIN_SHARED, shared_length
from rm_server.app import create_app
from rm_server.auth import Keys, hash_key
from rm_server.connections import uvicorn_config
from rm_server.memory import Need
from rm_server.service import ScoringService
from rm_server.settings import ServerSettings
from rm_server.switch import Switch


def expected_score(ids: Sequence[int]) -> float:
    """What the fake model gives for these ids, a float32 between -8 and 8."""
    digest = hashlib.sha256(np.asarray(ids, dtype=np.int64).tobytes()).digest()
    return float(np.float32(int.from_bytes(digest[:4], "big") / 2**28 - 8))


class FakeModel:
    """Scores by hash. ``before`` is called with the sequences of each forward and may raise; ``gate`` holds it back."""

    name = "fake"
    reward_id = "sha256:" + "1" * 64
    tokenizer_hash = "sha256:" + "2" * 64
    vocab_size = 300
    dtype = "float32"
    dtype_reason = "float32: a fake has no other"
    device = "cpu"
    record: Any = None
    shares_prefixes = True
    sharing_off: str | None = None
    token_rewards_off: str | None = None
    num_heads = 1

    def __init__(self, renderer: Any, max_length: int = 512) -> None:
        self.renderer = renderer
        self.max_length = max_length
        self.forwards: list[list[list[int]]] = []
        self.before: Callable[[list[list[int]]], None] = lambda sequences: None
        self.nan_for: Callable[[list[int]], bool] = lambda ids: False
        self.is_away = False
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def score_batch(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        max_tokens: int | None = None,
        cache: Any = None,
        read_from: Sequence[int | None] | None = None,
    ) -> Scored:
        batch = [list(ids) for ids in sequences]
        self.entered.set()
        assert self.gate.wait(30), "the test never opened the gate"
        self.forwards.append(batch)
        self.before(batch)
        rewards = np.array([np.nan if self.nan_for(ids) else expected_score(ids) for ids in batch], dtype=np.float32)
        order = sorted(range(len(batch)), key=lambda i: batch[i])
        computed = np.zeros(len(batch))
        for before, i in zip([-1, *order], order, strict=False):
            shared = shared_length(batch[before], batch[i]) if before >= 0 else 0
            computed[i] = len(batch[i]) - (shared if shared >= MIN_SHARED else 0)
        reads = [
            None
            if start is None
            else np.array([expected_score(ids[: end + 1]) for end in range(start, len(ids))], "f4")
            for ids, start in zip(batch, read_from or (), strict=False)
        ]
        return Scored(rewards, computed, 0, token_rewards=reads if read_from is not None else None)

    def leave_device(self) -> int:
        self.is_away = True
        return 123

    def return_to_device(self) -> None:
        self.is_away = False

    def hold(self) -> None:
        """Let the next forward wait."""
        self.entered.clear()
        self.gate.clear()

    async def until_entered(self) -> None:
        """Wait until a forward has begun."""
        assert await asyncio.to_thread(self.entered.wait, 10), "no forward began"


@pytest.fixture
def fake(tiny_model: Any) -> FakeModel:
    return FakeModel(tiny_model.renderer)


Load = Callable[[ServerSettings, str], Any]


def switch_of(service: ScoringService, load: Load | None) -> Switch | None:
    """A switch that loads what the test says and finds memory enough."""
    return None if load is None else Switch(service, load, lambda settings, checkpoint: Need(0, 0))


@pytest.fixture
def admin_key(tmp_path: Any) -> tuple[Keys, str]:
    """A file with one admin key, read, and the key."""
    (tmp_path / "admin.txt").write_text(f"{hash_key('an admin key')} boss\n")
    return Keys.from_files(None, str(tmp_path / "admin.txt")), "an admin key"


@asynccontextmanager
async def running(
    model: Any, *, keys: Keys | None = None, load: Load | None = None, **settings: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, ScoringService]]:
    """A started service behind a client, in this process. ``load`` is what ``/admin/checkpoint`` loads with."""
    service = ScoringService(ServerSettings(checkpoint="fake", **settings))
    app = create_app(service, service.settings, keys, switch_of(service, load))
    await service.start(lambda: model)
    transport = httpx.ASGITransport(app=app)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=60) as client:
            yield client, service
    finally:
        model_gate = getattr(model, "gate", None)
        if model_gate is not None:
            model_gate.set()
        await service.stop()


@pytest.fixture
def serve() -> Callable[..., Any]:
    """``async with serve(model, max_batch_tokens=…) as (client, service)``."""
    return running


@asynccontextmanager
async def listening(
    model: Any, *, keys: Keys | None = None, load: Load | None = None, **settings: Any
) -> AsyncIterator[tuple[str, "QuietServer"]]:
    """A started service behind a real socket, served as the command serves it, on this event loop."""
    service = ScoringService(ServerSettings(checkpoint="fake", **settings))
    app = create_app(service, service.settings, keys, switch_of(service, load))
    server = QuietServer(uvicorn_config(app, service.settings, service.metrics.count_refused))
    server.service = service
    await service.start(lambda: model)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await until(lambda: server.started)
            scheme = "https" if service.settings.ssl_certfile else "http"
            yield f"{scheme}://127.0.0.1:{listener.getsockname()[1]}", server
        finally:
            model.gate.set()
            server.should_exit = True
            await serving
            await service.stop()


class QuietServer(uvicorn.Server):
    """uvicorn, which leaves the signals to pytest."""

    service: ScoringService

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@pytest.fixture
def serve_on_socket() -> Callable[..., Any]:
    """``async with serve_on_socket(model, receive_seconds=…) as (url, server)``."""
    return listening


@pytest.fixture
def score_of() -> Callable[[Sequence[int]], float]:
    return expected_score


def metric(service: ScoringService, name: str, **labels: str) -> float:
    """The value of one sample, 0 where it was never observed."""
    return service.metrics.registry.get_sample_value(name, labels) or 0.0


@pytest.fixture
def sample() -> Callable[..., float]:
    return metric


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop turn until the condition holds."""
    end = asyncio.get_running_loop().time() + 20
    while not condition():
        assert asyncio.get_running_loop().time() < end, "it never happened"
        await asyncio.sleep(0)


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], Any]:
    return until
