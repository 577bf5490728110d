"""An audit log, computed again: lines that a real server wrote are confirmed, changed ones are found."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rm_core.model import RewardModel
from rm_server.audit import AuditLog, ids_digest
from rm_train import replay as replay_module
from tests.train.runs import chat_rows, text_rows, write_rows
from tests.train.test_cli import run

ROWS: list[dict[str, Any]] = [
    {"prompt": "What? ", "completions": ["A stone.", {"content": "No", "finished": False}]},
    {"text": "Only a text."},
    {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
]


def key(ids: list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "big") for token in ids)


def write_log(path: Path, model: RewardModel, sequences: list[list[int]], off: float = 0.0) -> None:
    """What the server's own writer writes for these sequences."""
    log = AuditLog(path, 2**20)
    rewards = [float(model.score_ids([ids])[0]) + off for ids in sequences]
    digests = {index: (ids_digest(key(ids)), len(ids)) for index, ids in enumerate(sequences)}
    served: Any = SimpleNamespace(reward_id=model.reward_id, dtype="float32")
    request: Any = SimpleNamespace(rewards=rewards, digests=digests, components=None)
    log.record("request", served, request)
    log.close()


@pytest.fixture
def sequences(tiny_model: RewardModel) -> list[list[int]]:
    renderer = tiny_model.renderer
    return [
        renderer.render("What? ", "A stone."),
        renderer.render("What? ", "No", finished=False),
        renderer.render_text("Only a text."),
        renderer.render_conversation(ROWS[2]["messages"]),
    ]


def test_digest_is_that_of_the_servers_log(sequences: list[list[int]]) -> None:
    assert [replay_module.ids_digest(ids) for ids in sequences] == [ids_digest(key(ids)) for ids in sequences]


def test_lines_of_the_server_are_confirmed(
    tiny_checkpoint: Path,
    tiny_model: RewardModel,
    sequences: list[list[int]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows as they were sent, and pairs; in chunks of two; one sequence was scored twice."""
    monkeypatch.setattr(replay_module, "_CHUNK", 2)
    pairs = [*text_rows(2), *chat_rows(1, seed=2)]
    scored = [*sequences, sequences[0]]
    for row in pairs:
        scored += [tiny_model.renderer.render(row["prompt"], row[side]) for side in ("chosen", "rejected")]
    log = tmp_path / "audit.jsonl"
    write_log(log, tiny_model, scored)
    sent, trained = write_rows(tmp_path / "sent.jsonl", ROWS), write_rows(tmp_path / "pairs.jsonl", pairs)
    code, out, err = run(capsys, "replay", log, tiny_checkpoint, sent, trained, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert (found["lines"], found["confirmed"], found["different"], found["not_in_data"]) == (11, 11, 0, 0)
    assert found["largest_difference"] < 1e-4
    found = json.loads(run(capsys, "replay", log, tiny_checkpoint, trained, "--json")[1])
    assert (found["confirmed"], found["not_in_data"]) == (6, 5)


def test_changed_reward_and_other_model_are_found(
    tiny_checkpoint: Path,
    tiny_model: RewardModel,
    sequences: list[list[int]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = write_rows(tmp_path / "sent.jsonl", ROWS)
    log = tmp_path / "audit.jsonl"
    write_log(log, tiny_model, sequences, off=0.5)
    code, out, _ = run(capsys, "replay", log, tiny_checkpoint, data)
    assert code == 1
    assert out.startswith("4 lines: 0 confirmed, 4 different, 0 not in the data, 0 of another reward id")
    assert f"{log}:1: logged " in out
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    log.write_text("".join(json.dumps({**line, "reward_id": "sha256:other"}) + "\n" for line in lines))
    code, out, _ = run(capsys, "replay", log, tiny_checkpoint, data)
    assert code == 1
    assert "4 of another reward id" in out


def test_rotated_files_are_read_and_half_a_line_is_left_out(
    tiny_checkpoint: Path,
    tiny_model: RewardModel,
    sequences: list[list[int]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = tmp_path / "audit.jsonl"
    for number in (10, 9):
        write_log(tmp_path / f"part{number}", tiny_model, sequences[:2])
        (tmp_path / f"part{number}").rename(f"{log}.{number}")
    write_log(log, tiny_model, sequences)
    with log.open("a") as file:
        file.write('{"time": "2026')
    found = json.loads(
        run(capsys, "replay", log, tiny_checkpoint, write_rows(tmp_path / "sent.jsonl", ROWS), "--json")[1]
    )
    assert (found["lines"], found["confirmed"]) == (8, 8)


def test_what_is_no_audit_log_is_one_line(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_rows(tmp_path / "sent.jsonl", ROWS)
    (tmp_path / "broken").write_text('{"time": 1\n')
    for log, words in (
        (data, "is no line of an audit log"),
        (tmp_path / "no", "cannot be read"),
        (tmp_path / "broken", "not valid JSON"),
    ):
        code, _, err = run(capsys, "replay", log, tiny_checkpoint, data)
        assert code == 2
        assert words in err.splitlines()[-1]
        assert "Traceback" not in err
