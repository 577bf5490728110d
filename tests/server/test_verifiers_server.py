"""Verifiers behind the routes, without a model: their verdicts, their limits, and what is refused by name."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rm_server.inputs import ItemInput
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
    for number in ("1e308", "-0.0", "18446744073709551616"):
        body = '{"prompt": "?", "completions": ["$1$"], "reference": ' + number + "}"
        response = await client.post("/score", content=body)
        assert (response.status_code, response.json()["rewards"]) == (200, [0.0])
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


async def test_reference_that_nothing_compares_with_is_refused_by_name(tmp_path: Path) -> None:
    async with serving(tmp_path, QUICK) as (client, _):
        status, answer = await post(client, {"groups": [{"prompt": "?", "completions": ["a"], "reference": "x"}]})
        assert status == 422
        assert answer["error"]["message"].startswith("groups[0].reference: is not supported by this server")


async def test_too_many_items_at_once_are_refused_as_overload(tmp_path: Path, eventually: Any) -> None:
    recipe = QUICK.replace("timeout_seconds: 1}", "timeout_seconds: 600}")
    async with serving(tmp_path, recipe, max_queued_items=3) as (client, service):
        slow = asyncio.create_task(
            post(client, {"prompt": "?", "completions": ["a" * 100 + "b"] * 2, "deadline_ms": 3000})
        )
        assert service.rewards is not None
        rewards = service.rewards
        await eventually(lambda: rewards.num_items == 2)
        status, answer = await post(client, {"prompt": "?", "completions": ["a", "a"]})
        assert (status, answer["error"]["type"]) == (503, "overloaded")
        await slow


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
