"""The audit log: one whole line for each reward, no text, and a disk that fails costs nobody an answer."""

import errno
import hashlib
import json
import logging
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rm_server.audit import AuditLog, ids_digest
from rm_server.groups import Request, key_of
from rm_server.settings import SettingsError

Serve = Callable[..., Any]
CANARY = "canary-audit"
MODEL: Any = SimpleNamespace(reward_id="sha256:model", dtype="float32")


def digest(ids: list[int]) -> str:
    """The documented rule, written out: sha256 over the ids, 4 bytes each, big-endian."""
    return "sha256:" + hashlib.sha256(struct.pack(f">{len(ids)}I", *ids)).hexdigest()


def records(path: Path) -> list[dict[str, Any]]:
    content = path.read_text()
    assert content == "" or content.endswith("\n")
    return [json.loads(line) for line in content.splitlines()]


def note(log: AuditLog, *rewards: float, request_id: str = "r") -> None:
    request = Request(len(rewards))
    for slot, reward in enumerate(rewards):
        request.digests[slot] = (ids_digest(key_of([slot])), 1)
        request.settle(slot, reward)
    log.record(request_id, MODEL, request)


def test_parts_of_a_recipe_are_in_the_log_and_ids_only_where_a_model_scores(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log, request = AuditLog(path, max_bytes=4096), Request(2)
    request.settle(0, 1.5)
    request.settle(1, 0.5)
    request.components = {"answer": [1.0, 0.0], "format": [0.5, None]}
    log.record(None, MODEL, request)
    log.close()
    first, second = records(path)
    assert (first["request_id"], first["ids"], first["tokens"]) == (None, None, 0)
    assert first["components"] == {"answer": 1.0, "format": 0.5}
    assert second["components"] == {"answer": 0.0, "format": None}


async def test_every_reward_has_a_line_from_which_it_can_be_checked(fake: Any, serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    fake.nan_for = lambda ids: ids == [7]
    body = {
        "groups": [
            {"prompt": CANARY, "completions": ["a", CANARY]},
            {"prompt": [{"role": "user", "content": CANARY}], "completions": ["c"]},
        ]
    }
    async with serve(fake, audit_log=str(path)) as (client, _):
        first = await client.post("/score", json=body, headers={"X-Request-ID": "step-1"})
        ids = {"input_ids": [[1, 2, 3], [7], [4, 5]]}
        second = (await client.post("/score", json=ids, headers={"X-Request-ID": "step-2"})).json()
        await client.post("/score", json={"texts": [CANARY * 1000]})
    first_rewards = [reward for row in first.json()["rewards"] for reward in row]
    lines = records(path)
    render = fake.renderer.render
    sequences = [render(CANARY, "a"), render(CANARY, CANARY), render(body["groups"][1]["prompt"], "c")]
    assert [(line["request_id"], line["index"], line["reward"], line["ids"], line["tokens"]) for line in lines] == [
        *[("step-1", i, first_rewards[i], digest(sequences[i]), len(sequences[i])) for i in range(3)],
        ("step-2", 0, second["rewards"][0], digest([1, 2, 3]), 3),
        ("step-2", 2, second["rewards"][2], digest([4, 5]), 2),
    ]
    for line in lines:
        assert list(line) == ["time", "request_id", "index", "ids", "tokens", "reward_id", "dtype", "reward"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", line["time"])
        assert (line["reward_id"], line["dtype"]) == (fake.reward_id, "float32")
    assert CANARY not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600


async def test_other_trainers_routes_are_in_the_log_too(fake: Any, serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    async with serve(fake, audit_log=str(path)) as (client, service):
        answer = await client.post("/get_reward", json={"query": ["a", "b"], "prompts": ["a", "b"], "labels": ["", ""]})
    assert [line["reward"] for line in records(path)] == answer.json()["rewards"]
    assert service.metrics.registry.get_sample_value("rm_audit_records_total", {"outcome": "written"}) == 2


def test_full_file_is_moved_aside_and_no_record_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path, max_bytes=4096)
    for number in range(100):
        note(log, float(number), request_id=str(number))
    log.close()
    rotated = sorted(tmp_path.glob("audit.jsonl.*"), key=lambda name: int(name.suffix[1:]))
    assert len(rotated) > 3
    assert [name.suffix for name in rotated] == [f".{n}" for n in range(1, len(rotated) + 1)]
    written = [line["request_id"] for name in [*rotated, path] for line in records(name)]
    assert written == [str(number) for number in range(100)]
    assert all(name.stat().st_size <= 4096 for name in rotated)


def test_log_is_continued_after_a_restart_and_half_a_line_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "new" / "audit.jsonl"
    log = AuditLog(path, max_bytes=1 << 20)
    note(log, 1.0)
    log.close()
    with path.open("a") as file:
        file.write('{"time": "2026')
    log = AuditLog(path, max_bytes=1 << 20)
    note(log, 2.0)
    log.close()
    assert [line["reward"] for line in records(path)] == [1.0, 2.0]


class Disk:
    """Makes ``os.write`` to the audit log fail after some bytes while ``is_full``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = True
        self._write = os.write
        monkeypatch.setattr("rm_server.audit.os.write", self.write)

    def write(self, file: int, data: Any) -> int:
        if not self.is_full:
            return self._write(file, data)
        if len(data) > 20:
            return self._write(file, data[:20])
        raise OSError(errno.ENOSPC, "No space left on device")


async def test_full_disk_costs_no_request_is_counted_and_logged_once(
    fake: Any,
    serve: Serve,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    eventually: Callable[..., Any],
    sample: Callable[..., float],
) -> None:
    path, disk = tmp_path / "audit.jsonl", Disk(monkeypatch)
    async with serve(fake, audit_log=str(path)) as (client, service):
        for _ in range(5):
            assert (await client.post("/score", json={"input_ids": [[1], [2]]})).status_code == 200
        await eventually(lambda: sample(service, "rm_audit_records_total", outcome="lost") == 10)
        disk.is_full = False
        assert (await client.post("/score", json={"input_ids": [[3]]})).status_code == 200
    assert len(records(path)) == 1
    assert records(path)[0]["ids"] == digest([3])
    complaints = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(complaints) == 1
    assert complaints[0] == f"the audit log lost 2 records: {path}: No space left on device"


def test_disk_that_hangs_holds_up_nobody_and_what_waits_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    gate, lost = threading.Event(), [0]

    def hang(file: int, data: Any) -> int:
        assert gate.wait(30)
        return len(data)

    def count(outcome: str, number: int) -> None:
        lost[0] += number if outcome == "lost" else 0

    monkeypatch.setattr("rm_server.audit.os.write", hang)
    monkeypatch.setattr("rm_server.audit.MAX_WAITING_RECORDS", 10)
    log = AuditLog(tmp_path / "audit.jsonl", 4096, count)
    for _ in range(8):
        note(log, 1.0, 2.0, 3.0)
    assert lost[0] == 24 - 9
    gate.set()
    log.close()


def test_log_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match=r"audit_log: .* cannot be written: "):
        AuditLog(tmp_path / "file" / "audit.jsonl", 4096)
    with pytest.raises(SettingsError, match="cannot be written: Is a directory"):
        AuditLog(tmp_path, 4096)
    log = AuditLog(tmp_path / "audit.jsonl", 4096)
    with pytest.raises(SettingsError, match="is written by another server"):
        AuditLog(tmp_path / "audit.jsonl", 4096)
    log.close()
    AuditLog(tmp_path / "audit.jsonl", 4096).close()
