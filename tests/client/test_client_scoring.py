"""What the clients send and what they make of the answer. Each test runs with both clients."""

import json
import re
from typing import Any

import httpx
import numpy as np
import pytest
import torch

import rm_client
from rm_client import AsyncRewardClient, RewardClient, TokenRewards
from rm_client.answers import Timing, Usage

PIN = "sha256:aaaa"


def test_one_group_gives_a_typed_result(connect: Any, server: Any) -> None:
    result = connect().score("hello", ["a", "bbb", ""])
    assert result.rewards == [1.0, 3.0, 0.0]
    assert (result.reward_id, result.model, result.truncated) == (PIN, "tiny", [False] * 3)
    assert result.usage == Usage(9, 5)
    assert result.timing == Timing(1.5, 0.5, 7.0)
    assert (result.advantages, result.errors, result.components) == (None, (), None)
    assert server.bodies == [{"prompt": "hello", "completions": ["a", "bbb", ""]}]
    with pytest.raises(AttributeError):
        result.rewards = []


def test_only_what_was_given_is_sent(connect: Any, server: Any) -> None:
    client = connect(reward_id=PIN)
    client.score("p", ["a"], advantages=True, truncation="left", text_as="chat", deadline_ms=500, reference="42")
    client.score("p", ["a"], advantages={"scale": "none"}, on_error="none")
    client.score("p", ["a"], advantages=False)
    first, second, third = server.bodies
    assert first == {
        "prompt": "p",
        "completions": ["a"],
        "reference": "42",
        "advantages": {"scale": "std", "ddof": 1, "eps": 1e-4},
        "truncation": "left",
        "text_as": "chat",
        "reward_id": PIN,
        "deadline_ms": 500,
    }
    assert second == {"prompt": "p", "completions": ["a"], "advantages": {"scale": "none"}, "reward_id": PIN}
    assert third == {"prompt": "p", "completions": ["a"], "reward_id": PIN}


def test_every_input_form_has_its_own_field(connect: Any, server: Any) -> None:
    client = connect()
    user, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "four"}
    assert client.score([user], [[answer], "ab", {"content": "c", "finished": False}]).rewards == [4.0, 2.0, 1.0]
    assert client.score_texts(["q a", "q"]).rewards == [3.0, 1.0]
    assert client.score_conversations([[user, answer]]).rewards == [4.0]
    groups = [{"id": "a", "prompt": "p", "completions": ["x", "yy"]}, {"prompt": [user], "completions": []}]
    assert client.score_groups(groups).rewards == [[1.0, 2.0], []]
    assert [list(body) for body in server.bodies] == [
        ["prompt", "completions"],
        ["texts"],
        ["conversations"],
        ["groups"],
    ]
    assert server.bodies[3]["groups"] == groups


def test_advantages_come_back_in_the_shape_of_the_rewards(connect: Any) -> None:
    client = connect()
    assert client.score("p", ["a", "bb"], advantages=True).advantages == [1.0, 2.0]
    groups = [{"prompt": "p", "completions": ["a"]}, {"prompt": "q", "completions": ["a", "bb"]}]
    assert client.score_groups(groups, advantages=True).advantages == [[1.0], [1.0, 2.0]]


def test_token_ids_carry_the_tokenizer_hash_which_is_asked_for_once(connect: Any, server: Any) -> None:
    client = connect()
    assert client.score_ids([[1, 2, 3], np.array([4, 5]), torch.tensor([6])]).rewards == [3.0, 2.0, 1.0]
    assert client.score_ids(torch.tensor([[1, 2], [3, 4]])).rewards == [2.0, 2.0]
    assert client.score_ids([[7]], tokenizer="sha256:mine").rewards == [1.0]
    assert [body["tokenizer"] for body in server.bodies] == ["sha256:tttt", "sha256:tttt", "sha256:mine"]
    assert server.bodies[0]["input_ids"] == [[1, 2, 3], [4, 5], [6]]
    assert sum(request.url.path == "/info" for request in server.requests) == 1


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda c: c.score("p", "one string"), "completions"),
        (lambda c: c.score_texts({"a": 1}), "texts"),
        (lambda c: c.score_ids([[1, 2.5]], tokenizer="t"), r"input_ids\[0\]"),
        (lambda c: c.score_ids([[True]], tokenizer="t"), r"input_ids\[0\]"),
        (lambda c: c.score_ids([1, 2], tokenizer="t"), r"input_ids\[0\]"),
        (lambda c: c.score_ids(np.array([1, 2]), tokenizer="t"), r"input_ids\[0\]"),
        (lambda c: c.score_groups([{"prompt": "p"}]), r"groups\[0\].completions"),
        (lambda c: c.score_groups(["p"]), r"groups\[0\]"),
        (lambda c: c.score("p", ["a"], reference=float("nan")), "JSON"),
        (lambda c: c.score("p", ["\ud800"]), "JSON"),
        (lambda c: c.score("p", [object()]), "JSON"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name_and_not_sent(connect: Any, server: Any, call: Any, field: str) -> None:
    with pytest.raises(rm_client.InvalidRequestError, match=field):
        call(connect())
    assert server.requests == []


def test_a_misspelt_option_is_an_error(connect: Any) -> None:
    client = connect()
    with pytest.raises(TypeError, match="advantage"):
        client.score("p", ["a"], advantage=True)
    with pytest.raises(ValueError, match="on_error"):
        client.score("p", ["a"], on_error="ignore")


def test_numpy_references_are_sent_as_plain_json(connect: Any, server: Any) -> None:
    connect().score("p", ["a"], reference={"answer": np.float32(2), "tests": np.array(["x"])})
    assert server.bodies[0]["reference"] == {"answer": 2.0, "tests": ["x"]}


def test_an_item_without_reward_raises_with_the_good_rewards(connect: Any) -> None:
    client = connect()
    with pytest.raises(rm_client.PartialFailureError) as flat:
        client.score("p", ["a", "fail"])
    assert flat.value.rewards == [1.0, None]
    assert flat.value.errors == (rm_client.ItemError((1,), "non_finite_reward", "about non_finite_reward", False),)
    assert "rewards[1]" in str(flat.value)
    groups = [{"prompt": "p", "completions": ["a"]}, {"prompt": "q", "completions": ["fail", "bb"]}]
    with pytest.raises(rm_client.PartialFailureError) as nested:
        client.score_groups(groups)
    assert nested.value.rewards == [[1.0], [None, 2.0]]
    assert nested.value.errors[0].index == (1, 0)


def test_an_item_without_reward_is_none_where_that_was_asked_for(connect: Any) -> None:
    result = connect().score("p", ["fail", "bb"], on_error="none", advantages=True)
    assert result.rewards == [None, 2.0]
    assert [error.index for error in result.errors] == [(0,)]


def test_a_hole_without_a_reason_is_a_failure_too(connect: Any, server: Any) -> None:
    server.change = lambda answer: {**answer, "rewards": [None, 2.0], "errors": "nonsense"}
    client = connect()
    with pytest.raises(rm_client.PartialFailureError, match="neither a reward nor a reason"):
        client.score("p", ["a", "bb"])
    assert client.score("p", ["a", "bb"], on_error="none").rewards == [None, 2.0]


@pytest.mark.parametrize("kind", ["non_finite_reward", "too_long", "verifier_failed", "verifier_timeout"])
def test_when_all_items_failed_they_are_none_or_the_reason_is_raised(
    connect: Any, server: Any, refusal: Any, kind: str
) -> None:
    client = connect(reward_id=PIN)
    server.refusals = [refusal(422 if kind == "too_long" else 500, kind) for _ in range(3)]
    with pytest.raises(rm_client.ResponseError, match=kind) as error:
        client.score("p", ["fail"])
    assert error.value.type == kind
    flat = client.score("p", ["fail", "fail"], on_error="none", advantages=True)
    assert (flat.rewards, flat.advantages) == ([None, None], [0.0, 0.0])
    assert [e.type for e in flat.errors] == [kind, kind]
    nested = client.score_groups([{"prompt": "p", "completions": ["fail"]}] * 2, on_error="none")
    assert nested.rewards == [[None], [None]]


def test_when_all_items_failed_by_the_servers_fault_it_raises(connect: Any, server: Any) -> None:
    client = connect()
    for status, kind in ((504, "deadline_exceeded"), (500, "internal")):
        entry = {"index": [0], "type": kind, "message": "m", "retryable": False}
        body = {"error": {"type": kind, "message": "m", "retryable": False}, "errors": [entry]}
        server.refusals = [httpx.Response(status, json=body)]
        with pytest.raises(rm_client.ResponseError, match=kind) as error:
            client.score("p", ["a"], on_error="none")
        assert [e.type for e in error.value.errors] == [kind]
    entries = [
        {"index": [i], "type": kind, "message": "m", "retryable": False}
        for i, kind in enumerate(("invalid_request", "too_long"))
    ]
    server.refusals = [httpx.Response(422, json={"error": entries[0], "errors": entries})]
    result = client.score("p", ["", "long"], on_error="none")
    assert [e.type for e in result.errors] == ["invalid_request", "too_long"]


def test_a_failed_request_raises_even_where_failed_items_are_none(connect: Any, server: Any, refusal: Any) -> None:
    client = connect()
    for status, kind in (
        (422, "invalid_request"),
        (401, "unauthorized"),
        (504, "deadline_exceeded"),
        (500, "internal"),
    ):
        server.refusals = [refusal(status, kind)]
        with pytest.raises(rm_client.ResponseError, match=kind):
            client.score("p", ["a"], on_error="none")


@pytest.mark.parametrize(
    "change",
    [
        lambda a: {**a, "rewards": [1.0]},
        lambda a: {**a, "rewards": [1.0, 2.0, 3.0]},
        lambda a: {**a, "rewards": 1.0},
        lambda a: {k: v for k, v in a.items() if k != "rewards"},
        lambda a: {**a, "rewards": [1.0, float("nan")]},
        lambda a: {**a, "rewards": [1.0, float("inf")]},
        lambda a: {**a, "rewards": [1.0, "2.0"]},
        lambda a: {**a, "rewards": [1.0, True]},
        lambda a: {**a, "rewards": [[1.0, 2.0]]},
        lambda a: {**a, "truncated": [False]},
        lambda a: {**a, "advantages": None},
        lambda a: [1.0, 2.0],
    ],
)
def test_an_answer_of_the_wrong_shape_is_never_scored(connect: Any, server: Any, change: Any) -> None:
    server.change = change
    with pytest.raises(rm_client.InvalidAnswerError):
        connect().score("p", ["a", "bb"], advantages=True, on_error="none")


@pytest.mark.parametrize("rows", [[[1.0]], [[1.0], [2.0]], [[1.0], [2.0, 3.0], []], [1.0, 2.0], None])
def test_groups_of_the_wrong_shape_are_never_scored(connect: Any, server: Any, rows: Any) -> None:
    server.change = lambda answer: {**answer, "rewards": rows}
    groups = [{"prompt": "p", "completions": ["a"]}, {"prompt": "q", "completions": ["a", "bb"]}]
    with pytest.raises(rm_client.InvalidAnswerError, match="rewards"):
        connect().score_groups(groups)


def test_an_answer_of_another_reward_model_is_refused(connect: Any, server: Any, refusal: Any) -> None:
    client = connect(reward_id=PIN)
    assert client.score("p", ["a"]).rewards == [1.0]
    server.change = lambda answer: {**answer, "reward_id": "sha256:other"}
    with pytest.raises(rm_client.RewardIdMismatchError, match="sha256:other"):
        client.score("p", ["a"], on_error="none")
    server.change = lambda answer: {k: v for k, v in answer.items() if k != "reward_id"}
    with pytest.raises(rm_client.RewardIdMismatchError):
        client.score_groups([{"prompt": "p", "completions": ["a"]}])
    server.refusals = [refusal(409, "reward_id_mismatch")]
    with pytest.raises(rm_client.RewardIdMismatchError):
        client.score("p", ["a"])
    assert len(server.requests) == 4  # none was repeated


def test_info_health_and_ready(connect: Any, server: Any, refusal: Any, fake_time: Any) -> None:
    client = connect()
    info = client.info()
    assert (info.reward_id, info.tokenizer_hash, info.max_length, info.reward_std) == (PIN, "sha256:tttt", 2048, 2.0)
    assert info.raw["model"] == "tiny"
    assert client.health()
    assert client.ready()
    server.refusals = [refusal(503, "loading", True), httpx.ConnectError("refused")]
    assert not client.ready()
    assert not client.health()
    server.refusals = [refusal(503, "loading", True)] * 3
    client.wait_until_ready()
    assert fake_time.waits == [0.25] * 3
    server.refusals = [refusal(503, "loading", True)] * 1000
    with pytest.raises(rm_client.RewardClientError, match="not ready within 2 s"):
        client.wait_until_ready(2.0)


def test_the_key_and_a_path_prefix_are_used(connect: Any, server: Any) -> None:
    connect("https://host:1234/models/rm", api_key="secret").score("p", ["a"])
    request = server.requests[0]
    assert str(request.url) == "https://host:1234/models/rm/score"
    assert request.headers["Authorization"] == "Bearer secret"
    assert request.headers["Content-Type"] == "application/json"


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://host:port", ""])
def test_a_url_that_cannot_work_is_refused_at_once(url: str) -> None:
    for kind in (RewardClient, AsyncRewardClient):
        with pytest.raises(ValueError, match="base_url"):
            kind(url)


def test_bodies_are_utf8_json_without_escapes(connect: Any, server: Any) -> None:
    connect().score("größer ≻", ["ü"])
    assert "größer ≻".encode() in server.requests[0].content
    assert json.loads(server.requests[0].content)["completions"] == ["ü"]


def test_token_rewards_come_where_they_are_asked_for_in_the_shape_of_the_rewards(connect: Any, server: Any) -> None:
    client = connect()
    reading = TokenRewards(2, ["a", "b"], [1.0, 2.0])
    flat = client.score("hello", ["ab", "fail"], token_rewards=True, on_error="none")
    assert flat.token_rewards == [reading, None]
    groups = [{"prompt": "p", "completions": ["ab"]}, {"prompt": "q", "completions": ["fail", "ab"]}]
    assert client.score_groups(groups, token_rewards=True, on_error="none").token_rewards == [
        [reading],
        [None, reading],
    ]
    assert client.score_texts(["ab"]).token_rewards is None
    assert [body.get("token_rewards") for body in server.bodies] == [True, True, None]


@pytest.mark.parametrize(
    ("readings", "words"),
    [
        (None, "token_rewards: "),
        ([], "token_rewards: sent 1 items, got 0"),
        ([{"start": 0, "rewards": [1.0]}], "token_rewards[0]: expected"),
        ([{"start": 0, "tokens": ["a", "b"], "rewards": [1.0]}], "token_rewards[0].rewards: "),
        ([{"start": 0, "tokens": ["a"], "rewards": ["1"]}], "token_rewards[0].rewards[0]: expected a finite number"),
    ],
)
def test_token_rewards_that_do_not_fit_are_refused(connect: Any, server: Any, readings: Any, words: str) -> None:
    server.change = lambda answer: {**answer, "token_rewards": readings}
    with pytest.raises(rm_client.InvalidAnswerError, match=re.escape(words)):
        connect().score_texts(["a"], token_rewards=True)
