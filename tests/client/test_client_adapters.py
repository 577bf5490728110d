"""Reward functions as the trainers call them: signatures read in TRL 1.16, verl 0.9.1, ms-swift 4.6, OpenRLHF 0.11."""

import asyncio
import functools
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
import torch

import rm_client
from rm_client import (
    AsyncRewardFunction,
    MsSwiftReward,
    OpenRLHFReward,
    adapters,
    trl_reward_function,
    verl_compute_score,
    verl_compute_score_batch,
)
from rm_client.batches import group_by_prompt

USER = {"role": "user", "content": "q"}


def says(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


@pytest.fixture
def served(server: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every client that is made talks to the fake server; ``served.num_clients`` counts them."""
    server.num_clients = 0

    def patched(kind: type) -> Callable[..., Any]:
        def make(url: str, **settings: Any) -> Any:
            server.num_clients += 1
            return kind(url, transport=httpx.MockTransport(server), **settings)

        return make

    for name in ("RewardClient", "AsyncRewardClient"):
        monkeypatch.setattr(f"rm_client.lazy.{name}", patched(getattr(rm_client, name)))
    monkeypatch.setattr(adapters, "_shared", {})
    return server


def trl_sees_async(func: Any) -> bool:
    """trl/trainer/utils.py, is_async_callable."""
    while isinstance(func, functools.partial):
        func = func.func
    return inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(func.__call__)


async def test_trl_gets_a_reward_per_completion_from_one_request(served: Any) -> None:
    prompts = ["p", "q", "p", "q"]
    given: dict[str, Any] = {
        "prompts": prompts,
        "completions": ["a", "bb", "ccc", "fail"],
        "completion_ids": [[1], [1], [1], [1]],
        "answer": ["1", "2", "1", "2"],
        "trainer_state": object(),
        "log_extra": lambda *_: None,
    }
    plain, waiting = trl_reward_function("http://rm"), trl_reward_function("http://rm", asynchronous=True)
    assert not trl_sees_async(plain)
    assert trl_sees_async(waiting)
    assert plain(**given) == [1.0, 2.0, 3.0, None]
    assert await waiting(**given) == [1.0, 2.0, 3.0, None]
    groups = [{"prompt": "p", "completions": ["a", "ccc"]}, {"prompt": "q", "completions": ["bb", "fail"]}]
    assert served.bodies == [{"groups": groups}] * 2


def test_trl_messages_are_sent_as_messages(served: Any) -> None:
    reward = trl_reward_function("http://rm", name="helpful", text_as="chat", truncation="left")
    filled = [{**USER, "tool_calls": None}]  # what an Arrow table makes of rows with different keys
    assert reward(prompts=[filled, [USER]], completions=[says("a"), says("bb")]) == [1.0, 2.0]
    assert served.bodies == [
        {
            "groups": [{"prompt": [USER], "completions": [says("a"), says("bb")]}],
            "text_as": "chat",
            "truncation": "left",
        }
    ]
    assert reward.__name__ == "helpful"


def test_trl_columns_become_references(served: Any) -> None:
    reward = trl_reward_function("http://rm", reference_column="answer")
    assert reward(["p", "p", "p"], ["a", "bb", "c"], answer=["1", "2", "1"]) == [1.0, 2.0, 1.0]
    assert served.bodies[0]["groups"] == [
        {"prompt": "p", "reference": "1", "completions": ["a", "c"]},
        {"prompt": "p", "reference": "2", "completions": ["bb"]},
    ]
    with pytest.raises(ValueError, match=r"'answer'.*there are: solution"):
        reward(["p"], ["a"], solution=["1"])


def test_trl_completions_that_were_cut_are_marked(served: Any) -> None:
    reward = trl_reward_function("http://rm", eos_token_ids=[2])
    assert reward(["p"] * 3, ["a", "bb", "c"], completion_ids=[[5, 2], [5, 6], []]) == [1.0, 2.0, 1.0]
    completions = served.bodies[0]["groups"][0]["completions"]
    assert completions == ["a", {"content": "bb", "finished": False}, {"content": "c", "finished": False}]


def test_trl_logs_how_many_items_failed(served: Any) -> None:
    logged: list[tuple[str, float]] = []
    reward = trl_reward_function("http://rm")
    for texts in (["a", "fail"], ["a", "b"]):
        reward(["p", "p"], texts, log_metric=lambda name, value: logged.append((name, value)))
    assert logged == [("reward_model/failed", 0.5), ("reward_model/failed", 0.0)]


def test_trl_run_stops_when_the_request_itself_fails(served: Any, refusal: Any) -> None:
    reward = trl_reward_function("http://rm", reward_id="sha256:other")
    with pytest.raises(rm_client.RewardIdMismatchError):
        reward(["p"], ["a"])
    served.refusals = [refusal(401, "unauthorized")]
    with pytest.raises(rm_client.UnauthorizedError):
        trl_reward_function("http://rm")(["p"], ["a"])


def test_trl_function_reuses_its_client_and_pickles_without_it(served: Any) -> None:
    reward = trl_reward_function("http://rm", reference_column=None, timeout=5.0)
    for _ in range(3):
        assert reward(["p"], ["aa"]) == [2.0]
    assert served.num_clients == 1
    copy = pickle.loads(pickle.dumps(reward))
    assert copy(["p"], ["aa"]) == [2.0]
    assert served.num_clients == 2
    assert copy.__name__ == "reward_model"
    pickle.loads(pickle.dumps(trl_reward_function("http://rm", asynchronous=True)))


def test_a_forked_process_makes_its_own_client(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reward = trl_reward_function("http://rm")
    reward(["p"], ["a"])
    monkeypatch.setattr("os.getpid", lambda: -5)
    reward(["p"], ["a"])
    assert served.num_clients == 2


def test_one_answer_is_never_spread_over_many(served: Any) -> None:
    with pytest.raises(ValueError, match="8 completions, but 1 prompts"):
        trl_reward_function("http://rm")(["p"], ["a"] * 8)
    served.change = lambda answer: {**answer, "rewards": [[1.0]], "truncated": None}
    with pytest.raises(rm_client.InvalidAnswerError):
        trl_reward_function("http://rm")(["p"] * 8, ["a"] * 8)


def test_an_empty_batch_gives_an_empty_list(served: Any) -> None:
    assert trl_reward_function("http://rm")([], []) == []


def test_grouping_keeps_the_batchs_order() -> None:
    batch = group_by_prompt(["a", "b", "a", "b", "c"], ["1", "2", "3", "4", "5"])
    assert [group["completions"] for group in batch.groups] == [["1", "3"], ["2", "4"], ["5"]]
    assert batch.flat([[1.0, 3.0], [2.0, None], [5.0]]) == [1.0, 2.0, 3.0, None, 5.0]
    as_text, as_messages = "q", [{"role": "user", "content": "q"}]
    assert len(group_by_prompt([as_text, as_messages], ["1", "2"]).groups) == 2


def test_references_that_only_print_alike_do_not_share_a_group() -> None:
    long, other = np.arange(2000), np.arange(2000)
    other[1000] = 7
    close, closer = np.array([0.1234567891]), np.array([0.1234567892])
    assert (repr(long), repr(close)) == (repr(other), repr(closer))
    for references in ([long, other, long], [close, closer, close]):
        batch = group_by_prompt(["p"] * 3, ["1", "2", "3"], references=references)
        assert [group["completions"] for group in batch.groups] == [["1", "3"], ["2"]]
    with pytest.raises(rm_client.InvalidRequestError, match="item 1: its prompt or reference cannot be sent as JSON"):
        group_by_prompt(["p", "p"], ["1", "2"], references=["x", object()])


async def test_verl_scores_one_item_with_the_prompt_from_extra_info(served: Any) -> None:
    score = functools.partial(verl_compute_score, url="http://rm", reward_id="sha256:aaaa")
    assert inspect.iscoroutinefunction(score)  # what verl's managers test
    given: dict[str, Any] = {"data_source": "d", "solution_str": "abc", "ground_truth": "42"}
    assert await score(**given, extra_info={"question": "q", "num_turns": 1}) == {"score": 3.0}
    messages = {"extra_info": {"raw": (USER,)}, "prompt_key": "raw"}
    assert await score(**given, **messages, send_reference=True, reward_router_address="x") == {"score": 3.0}
    assert await score(**given, extra_info={"question": "q"}, chat=False) == {"score": 3.0}
    assert [body["groups"][0] for body in served.bodies] == [
        {"prompt": [USER], "completions": ["abc"]},
        {"prompt": [USER], "completions": ["abc"], "reference": "42"},
        {"prompt": "q", "completions": ["abc"]},
    ]
    assert served.num_clients == 1


async def test_verl_gets_an_exception_never_a_zero(served: Any) -> None:
    with pytest.raises(rm_client.PartialFailureError):
        await verl_compute_score("d", "fail", "42", {"question": "q"}, url="http://rm")
    with pytest.raises(ValueError, match=r"no 'question'.*it has: prompt"):
        await verl_compute_score("d", "a", "42", {"prompt": "q"}, url="http://rm")
    with pytest.raises(TypeError, match="promt_key"):
        await verl_compute_score("d", "a", "42", {"question": "q"}, url="http://rm", promt_key="x")


def test_verl_batch_is_one_request(served: Any) -> None:
    scores = verl_compute_score_batch(
        data_sources=["d"] * 3,
        solution_strs=["a", "bb", "ccc"],
        ground_truths=["1", "1", "2"],
        extra_infos=[{"question": "q"}, {"question": "q"}, {"question": "r"}],
        url="http://rm",
    )
    assert scores == [{"score": 1.0}, {"score": 2.0}, {"score": 3.0}]
    assert [len(group["completions"]) for group in served.bodies[0]["groups"]] == [2, 1]


def test_ms_swift_makes_it_with_args_and_calls_it_with_columns(served: Any) -> None:
    orms = {"betterthan": functools.partial(MsSwiftReward, "http://rm", reference_column="solution")}
    orm = orms["betterthan"](args=object())
    assert orm.__class__.__name__ == "MsSwiftReward"  # under which ms-swift logs it
    rewards = orm(
        ["a", "bb", "fail"],
        messages=[[USER, *says("a")], [USER, *says("bb")], [USER, *says("fail")]],
        is_truncated=[False, True, False],
        solution=["1", "1", "1"],
        trainer_state=None,
    )
    assert rewards == [1.0, 2.0, None]
    assert served.bodies[0]["groups"] == [
        {"prompt": [USER], "reference": "1", "completions": ["a", {"content": "bb", "finished": False}, "fail"]}
    ]
    with pytest.raises(ValueError, match="messages"):
        orm(["a"])


def test_openrlhf_gets_rewards_scores_between_0_and_1_and_logs(served: Any) -> None:
    reward_func = OpenRLHFReward("http://rm", api_key="k")
    out = reward_func(["abc", "x" * 3000], ["p", "p"], ["l", "l"])
    assert out["rewards"].tolist() == [3.0, 3000.0]
    # sigmoid((3 - 1) / 2) = 1 / (1 + e^-1)
    assert out["scores"].tolist() == pytest.approx([0.7310586, 1.0], rel=1e-5)
    assert out["scores"].max() < 1  # a group of such answers must pass OpenRLHF's filter
    assert out["extra_logs"]["rm_truncated"].tolist() == [0.0, 0.0]
    assert out["extra_logs"]["rm_reward"].tolist() == [3.0, 3000.0]
    assert (served.bodies[0]["texts"][0], served.bodies[0]["text_as"]) == ("abc", "templated")
    one = reward_func(["abcd"], ["p"], ["l"])
    assert torch.tensor([one["rewards"]]).shape == (1,)  # as OpenRLHF's generator stores it
    assert sum(request.url.path == "/info" for request in served.requests) == 1
    with pytest.raises(rm_client.PartialFailureError):
        reward_func(["fail"], ["p"], ["l"])


def test_openrlhf_labels_reach_the_verifiers_beside_each_prompts_answers(served: Any) -> None:
    reward_func = OpenRLHFReward("http://rm", send_label=True)
    out = reward_func(["<s>2+2=four", "1+1=two", "<s>2+2=4"], ["2+2=", "1+1=", "2+2="], ["4", "2", "4"])
    assert out["rewards"].tolist() == [4.0, 3.0, 1.0]
    assert served.bodies == [
        {
            "groups": [
                {"prompt": "<s>2+2=", "reference": "4", "completions": ["four", "4"]},
                {"prompt": "1+1=", "reference": "2", "completions": ["two"]},
            ],
            "text_as": "templated",
        }
    ]
    assert out["extra_logs"]["rm_truncated"].tolist() == [0.0] * 3
    with pytest.raises(ValueError, match=r"queries\[0\] does not hold prompts\[0\]"):
        reward_func(["abc"], ["x"], ["l"])


@pytest.mark.parametrize("recipe", [{"parts": {"size": {"kind": "length"}, "model": {"kind": "model"}}}, None])
def test_openrlhf_sends_verifiers_the_answer_alone_without_a_label_too(
    served: Any, monkeypatch: pytest.MonkeyPatch, recipe: Any
) -> None:
    monkeypatch.setitem(type(served).__call__.__globals__["INFO"], "recipe", recipe)
    out = OpenRLHFReward("http://rm")(["<s>2+2=four", "1+1=two"], ["2+2=", "1+1="], ["4", "2"])
    if recipe is None:
        assert served.bodies[0]["texts"] == ["<s>2+2=four", "1+1=two"], "a model reads the whole text"
    else:
        assert out["rewards"].tolist() == [4.0, 3.0]
        assert served.bodies[0]["groups"] == [
            {"prompt": "<s>2+2=", "completions": ["four"]},
            {"prompt": "1+1=", "completions": ["two"]},
        ]


def test_openrlhf_scores_of_verifiers_are_their_rewards_so_that_its_filter_sees_0_and_1(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = type(served).__call__.__globals__["INFO"]
    alone = {"recipe": {}, "model_reward_id": None, "reward_mean": None, "reward_std": None}
    for name, value in alone.items():
        monkeypatch.setitem(info, name, value)
    out = OpenRLHFReward("http://rm")(["", "a", "ab"], ["p"] * 3, ["l"] * 3)
    assert out["scores"].tolist() == [0.0, 1.0, 1.0]
    beside = {"recipe": {}, "model_reward_id": "sha256:m", "reward_mean": 0.0, "reward_std": 1.0}
    for name, value in beside.items():
        monkeypatch.setitem(info, name, value)
    out = OpenRLHFReward("http://rm")([""], ["p"], ["l"])
    assert out["scores"].tolist() == [0.5]


def test_a_plain_loop_awaits_rewards(served: Any) -> None:
    score = pickle.loads(pickle.dumps(AsyncRewardFunction("http://rm")))
    assert asyncio.run(score(["p", [USER]], ["a", "fail"], ["1", None])) == [1.0, None]
    assert served.bodies[0]["groups"][0]["reference"] == "1"
    assert "reference" not in served.bodies[0]["groups"][1]
