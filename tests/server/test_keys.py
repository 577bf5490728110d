"""API keys: who gets in, who does not, and that a key is nowhere in the clear."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import Depends, FastAPI

from rm_server import ScoringService, ServerSettings, create_app
from rm_server.auth import KeyFile, KeyFileError, Keys, hash_key, require_admin
from rm_server.settings import load_settings

Serve = Callable[..., Any]
API_KEY, OTHER_KEY, ADMIN_KEY = "rm-alpha-canary", "rm-beta-canary", "rm-admin-canary"
BODY = {"input_ids": [[1, 2]]}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    api, admin = tmp_path / "api.txt", tmp_path / "admin.txt"
    api.write_text(f"# trainers\n\n{hash_key(API_KEY)} trainer-a\n{hash_key(OTHER_KEY)}\n")
    admin.write_text(f"{hash_key(ADMIN_KEY)} operator\n")
    return {"api_keys_file": str(api), "admin_keys_file": str(admin)}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (bearer(API_KEY), 200),
        (bearer(OTHER_KEY), 200),
        (bearer(ADMIN_KEY), 200),
        ({"authorization": f"bearer   {API_KEY} "}, 200),
        ({"X-API-Key": API_KEY}, 200),
        ({"X-API-Key": API_KEY, "Authorization": "Basic dXNlcjpwYXNz"}, 200),
        ({"X-API-Key": API_KEY, **bearer("wrong")}, 200),
        ({}, 401),
        (bearer("wrong"), 401),
        (bearer(""), 401),
        (bearer(API_KEY[:-1]), 401),
        (bearer(API_KEY + "x"), 401),
        (bearer(hash_key(API_KEY)), 401),
        ({"Authorization": API_KEY}, 401),
        ({"X-API-Key": "x" * 5000}, 401),
    ],
)
async def test_only_a_known_key_may_score(
    fake: Any, serve: Serve, sample: Any, files: dict[str, str], headers: dict[str, str], status: int
) -> None:
    async with serve(fake, **files) as (client, service):
        response = await client.post("/score", json=BODY, headers=headers)
        assert response.status_code == status, response.text
        if status == 401:
            assert response.json()["error"]["type"] == "unauthorized"
            assert response.json()["error"]["retryable"] is False
            assert response.headers["www-authenticate"] == "Bearer"
            assert sample(service, "rm_requests_refused_total", reason="unauthorized") == 1


async def test_any_byte_may_be_sent_as_a_key(fake: Any, serve: Serve, files: dict[str, str]) -> None:
    async with serve(fake, **files) as (client, _):
        response = await client.post("/score", json=BODY, headers=[(b"x-api-key", bytes(range(128, 256)))])
    assert response.status_code == 401


async def test_health_and_ready_are_open_and_all_else_is_closed(fake: Any, serve: Serve, files: dict[str, str]) -> None:
    async with serve(fake, **files) as (client, _):
        app_paths = list((await client.get("/openapi.json", headers=bearer(API_KEY))).json()["paths"])
        for path in ("/health", "/ready", "/metrics"):
            assert (await client.get(path)).status_code == 200
        closed = {*app_paths, "/docs", "/openapi.json", "/nothing", "/healthz"} - {"/health", "/ready", "/metrics"}
        for path in sorted(closed):
            for method in ("GET", "POST"):
                assert (await client.request(method, path)).status_code in (401, 403), path
        assert (await client.get("/nothing", headers=bearer(API_KEY))).status_code == 404
    async with serve(fake, metrics_need_key=True, **files) as (client, _):
        assert (await client.get("/metrics")).status_code == 401
        assert (await client.get("/metrics", headers=bearer(API_KEY))).status_code == 200


async def test_without_a_key_file_nobody_needs_a_key(fake: Any, serve: Serve) -> None:
    async with serve(fake) as (client, _):
        assert (await client.post("/score", json=BODY)).status_code == 200
        assert (await client.post("/score", json=BODY, headers=bearer("whatever"))).status_code == 200


async def test_body_of_a_caller_without_a_key_is_not_read(fake: Any, serve: Serve, files: dict[str, str]) -> None:
    read = 0

    async def chunks() -> Any:
        nonlocal read
        for _ in range(100):
            read += 1
            yield b"x" * 1000

    async with serve(fake, **files) as (client, _):
        assert (await client.post("/score", content=chunks())).status_code == 401
    assert read == 0


def admin_app(**files: str) -> FastAPI:
    service = ScoringService(ServerSettings(checkpoint="x", **files))
    app = create_app(service, service.settings)

    @app.post("/admin/thing", dependencies=[Depends(require_admin)])
    async def thing() -> dict[str, bool]:
        return {"done": True}

    return app


@pytest.mark.parametrize(
    ("with_files", "headers", "status", "kind"),
    [
        (True, bearer(ADMIN_KEY), 200, None),
        (True, {"X-API-Key": ADMIN_KEY}, 200, None),
        (True, bearer(API_KEY), 403, "forbidden"),
        (True, bearer("wrong"), 401, "unauthorized"),
        (True, {}, 401, "unauthorized"),
        (False, {}, 403, "forbidden"),
        (False, bearer(ADMIN_KEY), 403, "forbidden"),
    ],
)
async def test_admin_routes_need_an_admin_key_always(
    files: dict[str, str], with_files: bool, headers: dict[str, str], status: int, kind: str | None
) -> None:
    app = admin_app(**(files if with_files else {}))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server") as client:
        response = await client.post("/admin/thing", headers=headers)
        assert response.status_code == status
        assert kind is None or response.json()["error"]["type"] == kind
        assert (await client.post("/admin", headers=headers)).status_code == (404 if status == 200 else status)


async def test_admin_dependency_alone_keeps_a_route_closed(files: dict[str, str]) -> None:
    app = admin_app(**files)

    @app.post("/not-under-admin", dependencies=[Depends(require_admin)])
    async def thing() -> dict[str, bool]:
        return {"done": True}

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server") as client:
        assert (await client.post("/not-under-admin", headers=bearer(API_KEY))).status_code == 403
        assert (await client.post("/not-under-admin", headers=bearer(ADMIN_KEY))).status_code == 200


def test_every_admin_route_of_the_server_has_the_admin_dependency() -> None:
    service = ScoringService(ServerSettings(checkpoint="x"))
    for route in create_app(service, service.settings).routes:
        if getattr(route, "path", "").startswith("/admin"):
            assert require_admin in [d.call for d in route.dependant.dependencies], route  # type: ignore[attr-defined]


@pytest.fixture
def clock() -> Iterator[Any]:
    class Clock:
        now = 0.0

        def __call__(self) -> float:
            return self.now

    return Clock()  # type: ignore[return-value]


def knows(keys: KeyFile, key: str) -> bool:
    import hashlib

    return keys.name_of([hashlib.sha256(key.encode()).digest()]) is not None


def test_changed_file_is_read_again_and_a_broken_one_changes_nothing(
    tmp_path: Path, clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    path.write_text(hash_key("one"))
    keys = KeyFile(path, clock)
    assert knows(keys, "one")

    def replace(text: str) -> None:
        new = tmp_path / "new"
        new.write_text(text)
        os.replace(new, path)

    replace(hash_key("two"))
    assert not knows(keys, "two"), "looked at no more than once a second"
    clock.now += 1
    assert knows(keys, "two")
    assert not knows(keys, "one")
    caplog.clear()
    for broken in ("", "# none\n", "plain-key-canary\n", f"{hash_key('three')}\nsha256:12 x\n"):
        replace(broken)
        for _ in range(3):
            clock.now += 1
            assert knows(keys, "two")
            assert not knows(keys, "three")
    path.unlink()
    clock.now += 1
    assert knows(keys, "two")
    assert "canary" not in caplog.text
    assert "the 1 keys read earlier stay valid" in caplog.text
    replace(hash_key("four"))
    clock.now += 1
    assert knows(keys, "four")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "holds no key"),
        (b"my-plain-canary\n", "keys:1: must be sha256:HEX NAME"),
        (b"\n" + hash_key("x").encode() + b" name with spaces\n", "keys:2: must be"),
        (b"\xff\xfe\x00", "keys:1: must be"),
        (b"#" * (2 << 20), "is over 1048576 bytes"),
        (b"\n".join(hash_key(str(n)).encode() for n in range(1001)), "1001 keys are over the limit of 1000"),
        (None, "cannot be read: No such file"),
    ],
)
def test_key_file_that_cannot_be_used_is_refused_in_one_line_that_quotes_nothing(
    tmp_path: Path, content: bytes | None, says: str
) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(KeyFileError) as raised:
        Keys.from_files(str(path), None)
    assert says in str(raised.value)
    assert "canary" not in str(raised.value)
    assert "\n" not in str(raised.value)


def test_command_makes_a_key_and_its_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rm_server.auth"]
    made = subprocess.run([*command, "trainer-a"], capture_output=True, text=True, check=True)
    key = made.stderr.split()[-1]
    assert made.stdout == f"{hash_key(key)} trainer-a\n"
    assert len(key) > 40
    assert len(made.stderr.splitlines()) == 1, "no warning beside the key"
    path = tmp_path / "keys"
    path.write_text(made.stdout)
    assert knows(KeyFile(path), key)
    for no_name in ("a b", "--help"):
        refused = subprocess.run([*command, no_name], capture_output=True, text=True)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert refused.stderr.startswith("usage: ")


async def test_no_key_is_logged_or_answered(
    fake: Any, serve: Serve, caplog: pytest.LogCaptureFixture, files: dict[str, str]
) -> None:
    caplog.set_level(logging.DEBUG)
    texts = []
    async with serve(fake, access_log=True, **files) as (client, _):
        for headers in (bearer(API_KEY), {"X-API-Key": "wrong-canary"}, bearer(ADMIN_KEY)):
            for path in ("/score", "/info", "/admin/x", "/nothing"):
                texts.append((await client.post(path, json=BODY, headers=headers)).text)
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("rm_server")]
    assert "canary" not in "".join([*texts, *ours])
    names = [record.fields.get("key") for record in caplog.records if hasattr(record, "fields")]
    assert names == ["trainer-a"] * 4 + [None] * 4 + ["operator"] * 4


def test_key_files_are_settings_like_any_other(tmp_path: Path) -> None:
    settings = load_settings({"checkpoint": "c"}, {"RM_SERVER_API_KEYS_FILE": "/run/secrets/keys"})
    assert settings.api_keys_file == "/run/secrets/keys"
