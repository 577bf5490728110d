"""``rm-train score``: the forms of a row, and rows that cannot be scored."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from rm_core.model import RewardModel
from rm_train import score_file
from rm_train.score_file import score_lines

USER, ANSWER = {"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A stone."}


def score(model: RewardModel, *rows: Any) -> list[dict[str, Any]]:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    return list(score_lines(model, lines, max_tokens=64))


def alone(model: RewardModel, ids: list[int]) -> float:
    return float(model.score_ids([ids])[0])


def test_every_form_of_a_row_is_scored_as_the_renderer_says(tiny_model: RewardModel) -> None:
    render = tiny_model.renderer
    answers = score(
        tiny_model,
        {"id": "k", "prompt": "What? ", "completions": ["A stone.", "Nothing at all, really."]},
        {"prompt": [USER], "completion": "A stone."},
        {"text": "What? A stone."},
        {"messages": [USER, ANSWER], "id": 7},
        {"completion": "A stone."},
    )
    assert [answer.get("id") for answer in answers] == ["k", None, None, 7, None]
    assert [answer["line"] for answer in answers] == [1, 2, 3, 4, 5]
    expected = [alone(tiny_model, render.render("What? ", text)) for text in ("A stone.", "Nothing at all, really.")]
    assert answers[0]["rewards"] == pytest.approx(expected, abs=1e-4)
    chat = alone(tiny_model, render.render_conversation([USER, ANSWER]))
    assert answers[1]["reward"] == pytest.approx(chat, abs=1e-4)
    assert answers[3]["reward"] == pytest.approx(chat, abs=1e-4)
    assert answers[2]["reward"] == pytest.approx(expected[0], abs=1e-4)
    assert answers[4]["reward"] == pytest.approx(alone(tiny_model, render.render_text("A stone.")), abs=1e-4)


def test_lines_pass_through_a_chunk_at_a_time(tiny_model: RewardModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_file, "_CHUNK", 2)
    read: list[int] = []

    def lines() -> Iterator[bytes]:
        for number in range(5):
            read.append(number)
            yield b"\xef\xbb\xbf" * (not number) + json.dumps({"text": f"a {number}"}).encode() + b"\n"
        yield b'{"text": "\xff"}\n'

    answers = score_lines(tiny_model, lines(), max_tokens=64)
    assert next(answers)["line"] == 1
    assert read == [0, 1]
    rest = list(answers)
    assert [answer["line"] for answer in rest] == [2, 3, 4, 5, 6]
    assert "is not UTF-8 text (byte 10 of the line)" in rest[-1]["error"]
    expected = [alone(tiny_model, tiny_model.renderer.render_text(f"a {number}")) for number in range(1, 5)]
    assert [answer["reward"] for answer in rest[:-1]] == pytest.approx(expected, abs=1e-4)


def test_completion_that_was_cut_gets_no_end_token(tiny_model: RewardModel) -> None:
    """Both spellings of a finished answer agree, and the unfinished one is scored without its end."""
    whole, same, cut = score(
        tiny_model,
        {"prompt": "q ", "completion": "abc"},
        {"prompt": "q ", "completion": {"content": "abc"}},
        {"prompt": "q ", "completion": {"content": "abc", "finished": False}},
    )
    assert whole["reward"] == pytest.approx(same["reward"], abs=1e-5)
    assert cut["reward"] == pytest.approx(
        alone(tiny_model, tiny_model.renderer.render("q ", "abc", finished=False)), abs=1e-4
    )
    assert cut["reward"] != pytest.approx(whole["reward"], abs=1e-3)


def test_empty_list_of_completions_gives_an_empty_list(tiny_model: RewardModel) -> None:
    assert score(tiny_model, {"prompt": "q", "completions": []}) == [{"line": 1, "rewards": []}]


def test_blank_lines_count_as_lines_and_are_not_answered(tiny_model: RewardModel) -> None:
    assert [answer["line"] for answer in score(tiny_model, "", {"text": "a"}, "  ", {"text": "b"})] == [2, 4]


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ("{not json", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[1, 2]", "must be a JSON object, not a list"),
        ("NaN", "must be a JSON object"),
        ({}, "completions, completion, messages, text"),
        ({"prompt": "q"}, "completions, completion, messages, text"),
        ({"text": "a", "messages": [USER]}, "messages and text"),
        ({"text": 5}, "text: must be text"),
        ({"text": ""}, "text: is empty"),
        ({"text": None}, "text: must be text"),
        ({"text": "\ud800"}, "text: "),
        ({"text": "a", "prompt": "b"}, "prompt: stands beside text"),
        ({"messages": "hi"}, "messages: must be a list"),
        ({"messages": []}, "messages: is an empty list"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"prompt": 5, "completion": "a"}, "prompt: must be text or a list of messages, not a number"),
        ({"prompt": {"role": "user"}, "completion": "a"}, "prompt: must be text"),
        ({"prompt": "q", "completion": 5}, "completion: must be text"),
        ({"prompt": "q", "completion": None}, "completion: must be text"),
        ({"prompt": "q", "completion": {"text": "a"}}, "completion.text: is unknown"),
        ({"prompt": "q", "completion": {"content": "a", "finished": "no"}}, "completion.finished"),
        ({"prompt": "q", "completions": "abc"}, "completions: must be a list"),
        ({"prompt": "q", "completions": ["a", None]}, "completions[1]: must be text"),
        ({"prompt": "q", "completions": ["a", [ANSWER]]}, "completions[1]: is a list of messages"),
        ({"prompt": [USER], "completions": ["a", []]}, "completions[1]: is an empty list"),
        ({"text": "a" * 600}, "reads at most 512"),
    ],
)
def test_broken_row_says_why_and_stops_nothing(row: Any, named: str, tiny_model: RewardModel) -> None:
    good, bad, last = score(tiny_model, {"text": "a"}, row, {"text": "a"})
    assert set(bad) == {"line", "error"}
    assert bad["line"] == 2
    assert named in bad["error"]
    assert "\n" not in bad["error"]
    assert len(bad["error"]) < 300
    assert good["reward"] == pytest.approx(last["reward"], abs=1e-5)
