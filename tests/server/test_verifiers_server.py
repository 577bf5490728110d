"""Verifiers behind the routes, without a model: their verdicts, their limits, and what is refused by name."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rm_server.errors import InvalidRequestError
from rm_server.inputs import ItemInput
from rm_server.protocol_forms import for_verifiers
from rm_server.schema import Message
from rm_server.verification import answer_of
from rm_server.verifiers.answers import Answer
from tests.server.recipes import MATH_ONLY, QUICK, Served, post, serving


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def math_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """Loading math-verify takes seconds: the tests of this server share one, and its event loop."""
    async with serving(tmp_path_factory.mktemp("math"), MATH_ONLY) as served:
        yield served


@pytest.mark.asyncio(loop_scope="module")
async def test_server_with_verifiers_only_scores_without_a_model(math_server: Served) -> None:
    client, service = math_server
    assert (await client.get("/ready")).status_code == 200
    body = {"prompt": "2 + 2 = ", "completions": ["$4$", "$5$", "four"], "reference": 4}
    status, answer = await post(client, body)
    assert status == 200, answer
    assert answer["rewards"] == [1.0, 0.0, 0.0]
    assert answer["components"] == {"answer": [1.0, 0.0, 0.0]}
    assert answer["usage"] == {"tokens": 0, "computed_tokens": 0}
    info = (await client.get("/info")).json()
    assert (info["model_reward_id"], info["rendering"], info["dtype"]) == (None, None, "none")
    assert info["reward_id"] == answer["reward_id"]
    assert (await client.get("/metrics")).status_code == 200
    assert (await post(client, {"texts": []}))[1]["rewards"] == []
    assert service.metrics.registry.get_sample_value("rm_verifier_seconds_count", {"part": "answer"}) == 3


@pytest.mark.asyncio(loop_scope="module")
async def test_64_requests_at_once_get_what_each_would_get_alone(math_server: Served) -> None:
    client, _ = math_server

    async def ask(number: int) -> Any:
        completions = [f"so ${number}$", f"$\\frac{{{2 * number}}}{{2}}$", f"$-{number + 1}$"]
        return await post(client, {"prompt": "?", "completions": completions, "reference": f"${number}$"})

    answers = await asyncio.gather(*(ask(number) for number in range(64)))
    assert [status for status, _ in answers] == [200] * 64
    assert [answer["rewards"] for _, answer in answers] == [[1.0, 1.0, 0.0]] * 64


async def test_verifier_at_its_limit_costs_its_item_and_never_gives_0(tmp_path: Path) -> None:
    hangs = "a" * 100 + "b"
    async with serving(tmp_path, QUICK) as (client, service):
        status, answer = await post(client, {"prompt": "?", "completions": ["aaa", hangs, "aab"]})
        assert status == 200
        assert answer["rewards"] == [1.0, None, 0.0]
        assert answer["components"] == {"form": [1.0, None, 0.0], "size": [1.0, 1.0, 1.0]}
        assert answer["errors"] == [
            {
                "index": [1],
                "type": "verifier_timeout",
                "message": "completions[1]: form: took longer than its limit of 1 s",
                "retryable": False,
            }
        ]
        status, answer = await post(client, {"prompt": "?", "completions": [hangs]})
        assert (status, answer["error"]["type"]) == (500, "verifier_timeout")
        assert service.metrics.registry.get_sample_value("rm_verifier_workers_replaced_total") == 2


async def test_item_not_verified_before_its_deadline_says_so(tmp_path: Path) -> None:
    recipe = QUICK.replace("timeout_seconds: 1}", "timeout_seconds: 600}")
    async with serving(tmp_path, recipe) as (client, service):
        body = {"prompt": "?", "completions": ["aaa", "a" * 100 + "b"], "deadline_ms": 1500}
        status, answer = await post(client, body)
        assert (status, answer["rewards"]) == (200, [1.0, None])
        assert answer["errors"][0]["type"] == "deadline_exceeded"
        assert service.num_open == 0
        assert service.rewards is not None
        assert service.rewards.num_items == 0


@pytest.mark.asyncio(loop_scope="module")
async def test_missing_reference_is_asked_for_by_name(math_server: Served) -> None:
    client, _ = math_server
    status, answer = await post(client, {"groups": [{"prompt": "?", "completions": ["$1$"]}]})
    assert status == 422
    assert answer["error"]["message"] == "groups[0].completions[0]: answer: reference: is required"
    status, answer = await post(client, {"input_ids": [[1, 2]]})
    assert status == 422
    assert "input_ids[0]: this server's verifiers read text" in answer["error"]["message"]
    status, answer = await post(client, {"texts": ["$1$"], "reference": 1})
    says = "reference: belongs to prompt + completions, or to one of groups"
    assert (status, answer["error"]["message"]) == (422, says)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("depth", [1000, 985, 500, 100])
async def test_reference_nested_deeply_is_the_callers_error_and_costs_no_worker(
    math_server: Served, sample: Any, depth: int
) -> None:
    client, service = math_server
    before = sample(service, "rm_verifier_workers_replaced_total")
    nested = '{"prompt": "?", "completions": ["$1$"], "reference": ' + "[" * depth + "1" + "]" * depth + "}"
    response = await client.post("/score", content=nested)
    assert response.status_code == 422, response.text
    assert "reference: " in response.json()["error"]["message"]
    for number, right in (("0.0000001", "10^{-7}"), ("-0.0", "0"), ("9007199254740993", "9007199254740993")):
        body = '{"prompt": "?", "completions": ["$1$", "$' + right + '$"], "reference": ' + number + "}"
        response = await client.post("/score", content=body)
        assert (response.status_code, response.json()["rewards"]) == (200, [0.0, 1.0])
    for number in ("1e308", "18446744073709551617"):  # JSON's reader makes a float of what needs more than 64 bits
        body = '{"prompt": "?", "completions": ["$1$"], "reference": ' + number + "}"
        response = await client.post("/score", content=body)
        assert response.status_code == 422, response.text
        assert "reference: is too large to have kept all its digits; send it as a text" in response.text
    assert sample(service, "rm_verifier_workers_replaced_total") == before


@pytest.mark.asyncio(loop_scope="module")
async def test_other_trainers_routes_answer_with_the_recipes_reward(math_server: Served) -> None:
    client, service = math_server
    assert service.model is not None
    body = {"query": ["2 + 2 = $4$", "2 + 2 = $5$"], "prompts": ["2 + 2 = "] * 2, "labels": ["4", "4"]}
    answer = (await client.post("/get_reward", json=body)).json()
    assert answer["rewards"] == answer["scores"] == [1.0, 0.0]
    assert answer["extra_logs"]["rm_answer"] == [1.0, 0.0]
    response = await client.post("/get_reward", json=body | {"labels": ["4"]})
    assert response.status_code == 422
    assert "labels: there are 1 of them for 2 texts" in response.json()["error"]["message"]
    one = {"prompt": "2 + 2 = ", "response": "$4$", "label": 4}
    assert (await client.post("/reward", json=one)).json() == 1.0
    answer = (await client.post("/reward?form=object", json=one)).json()
    assert (answer["score"], answer["components"]) == (1.0, {"answer": 1.0})
    assert answer["reward_id"] == service.model.reward_id


@pytest.mark.parametrize(
    ("query", "prompt", "answer"),
    [
        ("Q: 2 + 2 = 4", "Q: 2 + 2 = ", "4"),
        ("<s>Q: 2 + 2 = 4", "Q: 2 + 2 = ", "4"),
        ("<s> Q: 2 + 2 = 4", "Q: 2 + 2 = ", "4"),
        ("<pad><pad><s>Q: 2 + 2 = 4", "Q: 2 + 2 = ", "4"),
        ("[CLS]Q: 2 + 2 = 4", "Q: 2 + 2 = ", "4"),
        ("<|im_start|>user\n2<|im_end|>\n4", "<|im_start|>user\n2<|im_end|>\n", "4"),
        ("<s><|im_start|>user\n2<|im_end|>\n4", "<|im_start|>user\n2<|im_end|>\n", "4"),
        ("how much is two and two? 4", "Tell me, how much is two and two? ", "4"),
        ("<s>how much is two and two? 4", "Tell me, how much is two and two? ", "4"),
        ("<|im_end|>\n<|im_start|>me\n4", "<|im_start|>you\n<|im_end|>\n<|im_start|>me\n", "4"),
        ("text", "", "text"),
        ("4 is Q: 2 + 2 = 4", "Q: 2 + 2 = ", None),
        ("2 + 2 = 4", "Tell me: 2 + 2 = ", None),
        ("x" * 10_000 + "4", "x" * 20_000 + "y", None),
        ("Q: 2+2 = 4", "Q: 2 + 2 = ", None),
    ],
)
def test_answer_begins_behind_its_prompt_whatever_stands_in_front(query: str, prompt: str, answer: str | None) -> None:
    items = [ItemInput("query[0]", query, is_templated=True)]
    if answer is None:
        with pytest.raises(InvalidRequestError, match=r"prompts\[0\]: query\[0\] does not begin with it"):
            for_verifiers(items, [prompt], None, wants_answers=True)
    else:
        assert for_verifiers(items, [prompt], None, wants_answers=True)[0].answer == answer
    assert for_verifiers(items, [prompt], None, wants_answers=False) == items, "a model reads the whole text"


@pytest.mark.asyncio(loop_scope="module")
async def test_query_that_does_not_hold_its_prompt_is_refused_and_not_verified_whole(math_server: Served) -> None:
    client, _ = math_server
    body = {"query": ["<s>Is $5$ it? $4$"], "prompts": ["Is $5$ it? "], "labels": ["4"]}
    assert (await client.post("/get_reward", json=body)).json()["rewards"] == [1.0]
    for prompt in ("Is $6$ it? ", ["Is $5$ it? "]):
        response = await client.post("/get_reward", json=body | {"prompts": [prompt]})
        assert response.status_code == 422
        assert response.json()["error"]["message"].startswith("prompts[0]: query[0] does not begin with it")


async def test_reference_that_nothing_compares_with_is_refused_by_name(tmp_path: Path) -> None:
    async with serving(tmp_path, QUICK) as (client, _):
        status, answer = await post(client, {"groups": [{"prompt": "?", "completions": ["a"], "reference": "x"}]})
        assert status == 422
        assert answer["error"]["message"].startswith("groups[0].reference: is not supported by this server")


SLOW = QUICK.replace("timeout_seconds: 1}", "timeout_seconds: 600}")


async def test_too_many_items_at_once_wait_until_their_deadline_and_are_refused_as_overload(
    tmp_path: Path, eventually: Any
) -> None:
    async with serving(tmp_path, SLOW, max_queued_items=2) as (client, service):
        slow = asyncio.create_task(post(client, {"prompt": "?", "completions": ["a" * 100 + "b"], "deadline_ms": 6000}))
        assert service.rewards is not None
        rewards = service.rewards
        await eventually(lambda: rewards.num_items == 1)
        status, answer = await post(client, {"prompt": "?", "completions": ["a"]})
        assert (status, answer["rewards"]) == (200, [1.0]), "there is room for one more"
        status, answer = await post(client, {"prompt": "?", "completions": ["a", "a"], "deadline_ms": 200})
        assert (status, answer["error"]["type"]) == (503, "overloaded")
        patient = asyncio.create_task(post(client, {"prompt": "?", "completions": ["a", "a"], "deadline_ms": 60_000}))
        gone = asyncio.create_task(post(client, {"prompt": "?", "completions": ["a", "a"], "deadline_ms": 60_000}))
        await eventually(lambda: len(rewards._line) == 2)
        gone.cancel()
        await slow
        assert (await patient)[1]["rewards"] == [1.0, 1.0]
        await eventually(lambda: (rewards.num_items, len(rewards._line)) == (0, 0))


async def test_who_waits_for_room_is_turned_away_when_the_server_shuts_down(tmp_path: Path, eventually: Any) -> None:
    async with serving(tmp_path, SLOW, max_queued_items=1) as (client, service):
        body = {"prompt": "?", "completions": ["a" * 100 + "b"], "deadline_ms": 60_000}
        both = [asyncio.create_task(post(client, body)) for _ in range(2)]
        rewards = service.rewards
        assert rewards is not None
        await eventually(lambda: rewards.num_items == len(rewards._line) == 1)
        service.begin_drain()
        status, answer = await both[1]
        assert (status, answer["error"]["type"]) == (503, "draining")
        await service.drain(0)
        await both[0]


def test_verifiers_read_the_answer_alone_without_its_end_token(fake: Any) -> None:
    user, said = (
        Message(role="user", content="2 + 2"),
        Message(role="assistant", content=[{"type": "text", "text": "4"}]),
    )
    for item, answer in [
        (ItemInput("x", "4", "2 + 2 = ", reference=4), Answer("4", 4)),
        (ItemInput("x", [user, said]), Answer("4")),
        (ItemInput("x", [Message(role="assistant")]), Answer("")),
        (ItemInput("x", "4", finished=False), Answer("4", finished=False)),
        (ItemInput("x", "4<|im_end|>", finished=None, is_templated=True), Answer("4")),
        (ItemInput("x", "4", finished=None, is_templated=True), Answer("4", finished=False)),
        (ItemInput("x", "2 + 2 = 4<|im_end|>", answer="4<|im_end|>", is_templated=True), Answer("4")),
    ]:
        assert answer_of(item, fake) == answer
    assert answer_of(ItemInput("x", "4<|im_end|>"), fake, is_templated=True) == Answer("4")
