"""Items for which the server said "not now" in an answer that has rewards for others. Each test runs with both clients."""

from typing import Any

import httpx
import pytest

import rm_client
from rm_client import TokenRewards, grpo_advantages
from rm_client.answers import Timing, Usage

PIN = "sha256:aaaa"
GROUPS = [
    {"prompt": "p", "completions": ["a", "bb", "ccc"], "reference": "7"},
    {"prompt": "q", "completions": ["dddd"]},
    {"prompt": "s", "completions": ["long", "ee"], "id": "third"},
]


def halved(answer: dict[str, Any]) -> dict[str, Any]:
    """With a component for each reward, and every reward over 2 "over the training length"."""
    rows = answer["rewards"]
    is_flat = not isinstance(rows[0], list)
    rows = [rows] if is_flat else rows
    half = [[None if reward is None else reward / 2 for reward in row] for row in rows]
    over = [[g, i] for g, row in enumerate(rows) for i, reward in enumerate(row) if reward is not None and reward > 2]
    components = {"half": half[0] if is_flat else half}
    return {**answer, "components": components, "over_training_length": [at[1:] for at in over] if is_flat else over}


@pytest.mark.parametrize("on_error", ["raise", "none"])
def test_items_of_a_group_that_must_wait_are_asked_for_again_and_nothing_else_is(
    connect: Any, server: Any, fake_time: Any, on_error: str
) -> None:
    server.not_now = {"bb": ["draining", "overloaded"], "long": ["draining"], "ee": ["asleep", "loading"]}
    server.change = halved
    options = {"scale": "std", "ddof": 0, "eps": 0.0}
    result = connect().score_groups(GROUPS, on_error=on_error, advantages=options, token_rewards=True, deadline_ms=900)
    assert result.rewards == [[1.0, 2.0, 3.0], [4.0], [4.0, 2.0]]
    assert result.errors == ()
    assert result.advantages == grpo_advantages(result.rewards, ddof=0, eps=0.0)
    assert result.advantages[2] == [1.0, -1.0]
    assert result.truncated == [[False] * 3, [False], [True, False]]
    assert result.token_rewards[0][1] == TokenRewards(2, ["b", "b"], [1.0, 2.0])
    assert all(reading is not None for row in result.token_rewards for reading in row)
    assert result.components == {"half": [[0.5, 1.0, 1.5], [2.0], [2.0, 1.0]]}
    assert result.raw["over_training_length"] == [[0, 2], [1, 0], [2, 0]]
    assert "errors" not in result.raw
    assert (result.usage, result.timing) == (Usage(27, 15), Timing(4.5, 1.5, 21.0))
    assert fake_time.waits == [0.5, 1.0]
    first, second, third = server.bodies
    beside = {"token_rewards": True, "deadline_ms": 900, "reward_id": PIN}
    assert first == {"groups": GROUPS, "advantages": options, "token_rewards": True, "deadline_ms": 900}
    assert second == {
        "groups": [{**GROUPS[0], "completions": ["bb"]}, {**GROUPS[2], "completions": ["long", "ee"]}],
        **beside,
    }
    assert third == {
        "groups": [{**GROUPS[0], "completions": ["bb"]}, {**GROUPS[2], "completions": ["ee"]}],
        **beside,
    }


def test_items_of_a_flat_list_that_must_wait_are_asked_for_again(connect: Any, server: Any) -> None:
    client = connect()
    server.not_now = {"bb": ["draining"], "ccc": ["draining", "draining"]}
    server.change = halved
    result = client.score("p", ["a", "bb", "ccc"], advantages=True, reference="7")
    assert result.rewards == [1.0, 2.0, 3.0]
    assert result.advantages == grpo_advantages([1.0, 2.0, 3.0])
    assert (result.truncated, result.components) == ([False] * 3, {"half": [0.5, 1.0, 1.5]})
    assert result.raw["over_training_length"] == [[2]]
    assert server.bodies[1] == {"prompt": "p", "reference": "7", "completions": ["bb", "ccc"], "reward_id": PIN}
    assert server.bodies[2] == {"prompt": "p", "reference": "7", "completions": ["ccc"], "reward_id": PIN}
    server.not_now = {"bb": ["overloaded"]}
    assert client.score_texts(["a", "bb"]).rewards == [1.0, 2.0]
    assert server.bodies[-1] == {"texts": ["bb"], "reward_id": PIN}
    server.not_now = {"": ["draining"]}  # the first of the two
    assert client.score_ids([[1], [2, 3]]).rewards == [1.0, 2.0]
    assert server.bodies[-1] == {"input_ids": [[1]], "tokenizer": "sha256:tttt", "reward_id": PIN}


@pytest.mark.parametrize("reason", ["deadline_exceeded", "internal", "non_finite_reward", "too_long"])
def test_what_a_whole_request_would_not_be_repeated_for_is_not_for_an_item(
    connect: Any, server: Any, fake_time: Any, reason: str
) -> None:
    client = connect()
    server.not_now = {"bb": [reason]}
    assert client.score("p", ["a", "bb"], on_error="none").rewards == [1.0, None]
    server.not_now = {"bb": [reason], "ccc": ["draining"]}
    with pytest.raises(rm_client.PartialFailureError) as caught:
        client.score("p", ["a", "bb", "ccc"])  # it can only fail, so nothing is waited for
    assert [error.type for error in caught.value.errors] == [reason, "draining"]
    assert fake_time.waits == []
    server.not_now = {"bb": [reason], "ccc": ["draining"]}
    result = client.score("p", ["a", "bb", "ccc"], on_error="none")
    assert result.rewards == [1.0, None, 3.0]
    assert [(error.index, error.type) for error in result.errors] == [((1,), reason)]


def test_what_is_not_scored_within_the_budget_stays_without_reward_and_the_rest_is_kept(
    connect: Any, server: Any, fake_time: Any
) -> None:
    server.not_now = {"bb": ["draining"] * 99, "ee": ["draining", "draining", "overloaded"] + ["asleep"] * 99}
    client = connect(budget_seconds=10.0)
    result = client.score_groups(GROUPS, on_error="none", advantages=True)
    assert result.rewards == [[1.0, None, 3.0], [4.0], [4.0, None]]
    assert result.advantages == grpo_advantages(result.rewards)
    assert [(error.index, error.type, error.message) for error in result.errors] == [
        ((0, 1), "draining", "about draining"),
        ((2, 1), "asleep", "about asleep"),
    ]
    assert fake_time.waits == [0.5, 1.0, 2.0, 4.0]
    with pytest.raises(rm_client.PartialFailureError) as caught:
        client.score_groups(GROUPS)
    assert caught.value.rewards == result.rewards
    assert caught.value.retryable


def test_an_attempt_that_fails_loses_nothing(connect: Any, server: Any, fake_time: Any, refusal: Any) -> None:
    client = connect()
    server.not_now = {"bb": ["draining"], "ccc": ["draining"]}
    server.refusals = [None, refusal(503, "loading", True), httpx.ConnectError("restarting")]
    assert client.score("p", ["a", "bb", "ccc"]).rewards == [1.0, 2.0, 3.0]
    assert fake_time.waits == [0.5, 1.0, 2.0]
    server.not_now = {"bb": ["draining"], "ccc": ["draining"]}
    server.refusals = [None, httpx.ReadTimeout("slow")]
    result = client.score("p", ["a", "bb", "ccc"], on_error="none")
    assert (result.rewards, [error.type for error in result.errors]) == ([1.0, None, None], ["timeout"] * 2)


def test_the_reason_that_each_item_was_given_last_is_kept(connect: Any, server: Any) -> None:
    entries = [
        {"index": [0, i], "type": kind, "message": kind, "retryable": False}
        for i, kind in enumerate(("too_long", "non_finite_reward"))
    ]
    server.not_now = {"bb": ["draining"], "ccc": ["draining"]}
    server.refusals = [None, httpx.Response(422, json={"error": entries[0], "errors": entries})]
    result = connect().score_groups(GROUPS, on_error="none")
    assert result.rewards == [[1.0, None, None], [4.0], [4.0, 2.0]]
    assert [(e.index, e.type) for e in result.errors] == [((0, 1), "too_long"), ((0, 2), "non_finite_reward")]


@pytest.mark.parametrize("is_refused", [True, False])
def test_rewards_of_two_models_are_never_mixed(connect: Any, server: Any, refusal: Any, is_refused: bool) -> None:
    def exchange_model() -> None:
        server.requests.clear()
        server.not_now = {"bb": ["draining"]}
        server.refusals = [None, refusal(409, "reward_id_mismatch")] if is_refused else []
        server.change = lambda answer: {**answer, "reward_id": PIN if len(server.bodies) == 1 else "sha256:other"}

    exchange_model()
    result = connect().score("p", ["a", "bb"], on_error="none")
    assert (result.rewards, result.reward_id) == ([1.0, None], PIN)
    assert [(error.index, error.type) for error in result.errors] == [((1,), "reward_id_mismatch")]
    exchange_model()
    with pytest.raises(rm_client.PartialFailureError, match="reward_id_mismatch"):
        connect().score("p", ["a", "bb"])
    exchange_model()
    with pytest.raises(rm_client.RewardIdMismatchError):
        connect(reward_id=PIN).score("p", ["a", "bb"], on_error="none")
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"rewards": [2.0, 3.0]},
        {"rewards": [float("nan")]},
        {"truncated": [False, False]},
        {"token_rewards": []},
        {"components": {}},
        {"components": {"half": 1.0}},
        {"over_training_length": [[5]]},
    ],
)
def test_a_second_answer_of_the_wrong_shape_is_an_error_like_a_first(connect: Any, server: Any, wrong: Any) -> None:
    server.not_now = {"bb": ["draining"]}
    server.change = lambda answer: {**halved(answer), **({} if len(server.bodies) == 1 else wrong)}
    with pytest.raises(rm_client.InvalidAnswerError):
        connect().score("p", ["a", "bb"], on_error="none", token_rewards=True)
