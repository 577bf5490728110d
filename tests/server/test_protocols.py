"""Other trainers' routes: what their clients send and read, as found in the clients' sources."""

import asyncio
import base64
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from rm_core.chat import Renderer
from rm_server.app import create_app
from rm_server.service import ScoringService
from rm_server.settings import ServerSettings
from tests.core.test_chat import FAMILIES, family_tokenizer

Serve = Callable[..., Any]
CHAT = [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Yo, what is up?"}]
ROUTES = ("/get_reward", "/reward", "/v1/score/evaluation", "/classify", "/v1/embeddings")
EMPTY: dict[str, Any] = {
    "/get_reward": {"query": [], "prompts": [], "labels": []},
    "/v1/score/evaluation": {"model": "model", "messages": []},
    "/classify": {"model": "m", "input": []},
    "/v1/embeddings": {"model": "m", "input": []},
}


def openrlhf_body(text: str) -> dict[str, Any]:
    """openrlhf/utils/agent.py, SingleTurnAgentExecutor."""
    return {"query": [text], "prompts": ["p"], "labels": [None]}


def verl_body(text: str) -> dict[str, Any]:
    """verl/experimental/reward_loop/reward_loop.py, compute_score_disrm, rollout.name vllm."""
    return {"model": "some/path", "input": text, "use_activation": False}


def body_for(route: str, text: str) -> dict[str, Any]:
    return {
        "/get_reward": openrlhf_body(text),
        "/reward": {"prompt": text[:5], "response": text[5:], "label": None},
        "/v1/score/evaluation": {"model": "model", "messages": [text]},
        "/classify": verl_body(text),
        "/v1/embeddings": {"model": "some/path", "input": text},
    }[route]


def reward_in(route: str, answer: Any) -> float:
    """Where each client looks."""
    if route == "/get_reward":
        return float(answer["rewards"][0])
    if route == "/v1/score/evaluation":
        return float(answer["scores"][0])
    if route == "/classify":
        return float(answer["data"][-1]["probs"][-1])
    return float(answer["data"][-1]["embedding"][-1] if route == "/v1/embeddings" else answer)


@pytest.mark.parametrize("family", FAMILIES)
async def test_one_conversation_has_one_score_through_all_routes(
    fake: Any, serve: Serve, score_of: Any, family: str
) -> None:
    tokenizer = family_tokenizer(family)
    fake.renderer = renderer = Renderer.for_tokenizer(tokenizer)
    ids = renderer.render_conversation(CHAT)
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, date_string="26 Jul 2024")
    texts = {"whole": text, "as the policy stops": text.rstrip("\n")}
    if renderer.rules.chat_begins_with_bos:
        texts["without its BOS, as verl sends it"] = text.removeprefix(tokenizer.bos_token)
    prompt = text[: text.rindex("Yo")]
    async with serve(fake) as (client, _):

        async def post(route: str, body: Any) -> Any:
            response = await client.post(route, json=body)
            assert response.status_code == 200, (route, body, response.text)
            return response.json()

        rewards: dict[str, float] = {}
        for how, sent in texts.items():
            for route in ROUTES:
                rewards[f"{route} {how}"] = reward_in(route, await post(route, body_for(route, sent)))
            rewards[f"/score templated {how}"] = (await post("/score", {"texts": [sent], "text_as": "templated"}))[
                "rewards"
            ][0]
            rewards[f"SGLang {how}"] = (await post("/classify", {"text": sent}))["embedding"][0]
        stopped = texts["as the policy stops"]
        rewards["slime"] = await post("/reward", {"prompt": prompt, "response": stopped[len(prompt) :], "label": "x"})
        rewards["slime messages"] = await post(
            "/reward", {"prompt": CHAT[:1], "response": CHAT[1]["content"] + renderer.rules.end_of_turn, "label": 1}
        )
        parts = {"prompt": prompt, "completions": [stopped[len(prompt) :]], "text_as": "templated"}
        rewards["/score templated parts"] = (await post("/score", parts))["rewards"][0]
        rewards["/score chat"] = (await post("/score", {"conversations": [CHAT]}))["rewards"][0]
        rewards["/score ids"] = (await post("/score", {"input_ids": [ids]}))["rewards"][0]
        vllm_chat = {"messages": CHAT, "use_activation": False}
        rewards["vLLM messages"] = reward_in("/classify", await post("/classify", vllm_chat))
        rewards["vLLM ids"] = reward_in("/classify", await post("/classify", {"input": ids, "use_activation": False}))
        rewards["SGLang ids"] = (await post("/classify", {"input_ids": [ids]}))[0]["embedding"][0]
    assert rewards == dict.fromkeys(rewards, score_of(ids))
    assert {tuple(sequence) for batch in fake.forwards for sequence in batch[:1] if len(sequence) > 1} == {tuple(ids)}


@pytest.mark.parametrize("family", FAMILIES)
async def test_an_answer_without_its_end_token_is_scored_as_unfinished_and_said_to_be(
    fake: Any, serve: Serve, score_of: Any, sample: Any, family: str
) -> None:
    tokenizer = family_tokenizer(family)
    fake.renderer = renderer = Renderer.for_tokenizer(tokenizer)
    unfinished = score_of(renderer.render_conversation(CHAT, finished=False))
    finished = score_of(renderer.render_conversation(CHAT))
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, date_string="26 Jul 2024")
    cut = text[: text.rindex("up?") + 3]
    async with serve(fake) as (client, service):
        answer = (await client.post("/get_reward", json=openrlhf_body(cut))).json()
        assert (answer["rewards"], answer["extra_logs"]["rm_finished"]) == ([unfinished], [0.0])
        answer = (await client.post("/v1/score/evaluation", json={"messages": [cut, text]})).json()
        assert (answer["scores"], answer["finished"]) == ([unfinished, finished], [False, True])
        body = {"prompt": CHAT[:1], "response": CHAT[1]["content"]}
        answer = (await client.post("/reward?form=object", json=body)).json()
        expected = {"score": unfinished, "finished": False, "truncated": False, "reward_id": fake.reward_id}
        assert answer == expected
        assert (await client.post("/reward?finished=always", json=body)).json() == finished
        scored = (await client.post("/score", json={"texts": [cut], "text_as": "templated"})).json()
        assert scored["rewards"] == [unfinished]
        assert sample(service, "rm_items_unfinished_total") == 4
        # these clients send whole conversations: the template closes the last turn
        for route in ("/classify", "/v1/embeddings"):
            assert reward_in(route, (await client.post(route, json=body_for(route, cut))).json()) == finished


async def test_text_without_any_special_token_is_raw_text(fake: Any, serve: Serve, score_of: Any) -> None:
    raw = score_of(fake.renderer.render_text("two + two = 4", text_as="raw"))
    async with serve(fake) as (client, _):
        for route in ("/classify", "/v1/embeddings"):
            answer = await client.post(route, json=body_for(route, "two + two = 4"))
            assert reward_in(route, answer.json()) == raw
        ended = openrlhf_body("two + two = 4<|im_end|>")
        assert (await client.post("/get_reward", json=ended)).json()["rewards"] == [raw]


async def test_end_and_pad_tokens_behind_an_answer_count_once(fake: Any, serve: Serve, score_of: Any) -> None:
    ids = fake.renderer.render_conversation(CHAT)
    text = fake.renderer.tokenizer.decode(ids)
    async with serve(fake) as (client, _):
        for tail in ("<|im_end|>", "\n", "<|im_end|>\n<|im_end|>"):
            answer = await client.post("/v1/score/evaluation", json={"messages": [text + tail]})
            assert answer.json()["scores"] == [score_of(ids)], tail


# ------------------------------------------------------------------ shapes


async def test_openrlhf_reads_rewards_scores_and_logs(fake: Any, serve: Serve, score_of: Any) -> None:
    fake.record = SimpleNamespace(reward_mean=1.0, reward_std=2.0, training_length=4096)
    texts = ["a<|im_end|>", "b<|im_end|>"]
    rewards = [score_of(fake.renderer.render_text(text[0])) for text in texts]
    async with serve(fake) as (client, _):
        answer = (
            await client.post("/get_reward", json={"query": texts, "prompts": ["", ""], "labels": [1, {}]})
        ).json()
    assert set(answer) == {"rewards", "scores", "extra_logs"}
    assert answer["rewards"] == rewards
    assert answer["scores"] == pytest.approx([1 / (1 + np.exp(-(reward - 1) / 2)) for reward in rewards])
    logs = {"rm_reward": rewards, "rm_finished": [1.0, 1.0], "rm_truncated": [0.0, 0.0]}
    assert answer["extra_logs"] == logs


async def test_a_saturated_openrlhf_score_stays_inside_the_filter(fake: Any, serve: Serve) -> None:
    fake.record = SimpleNamespace(reward_mean=0.0, reward_std=1e-3, training_length=4096)
    async with serve(fake) as (client, _):
        texts = [f"{i}<|im_end|>" for i in range(8)]
        scores = (await client.post("/get_reward", json={"query": texts})).json()["scores"]
    assert all(0 < score < 1 for score in scores)


async def test_vllm_clients_get_its_answer_and_its_sigmoid_unless_switched_off(
    fake: Any, serve: Serve, score_of: Any
) -> None:
    ids = [[1, 2, 3], [4, 5]]
    rewards = [score_of(sequence) for sequence in ids]
    async with serve(fake) as (client, _):
        answer = (await client.post("/classify", json={"model": "mine", "input": ids})).json()
        raw = [
            (await client.post("/classify", json={"input": ids, **off})).json()
            for off in ({"use_activation": False}, {"activation": False})
        ]
        info = (await client.get("/info")).json()
    assert set(answer) == {"id", "object", "created", "model", "data", "usage"}
    assert (answer["object"], answer["model"]) == ("list", "mine")
    assert answer["id"].startswith("classify-")
    assert [set(entry) for entry in answer["data"]] == [{"index", "label", "probs", "num_classes", "truncated"}] * 2
    assert [entry["index"] for entry in answer["data"]] == [0, 1]
    expected = [1 / (1 + np.exp(-reward)) for reward in rewards]
    assert [entry["probs"][0] for entry in answer["data"]] == pytest.approx(expected, rel=1e-12)
    assert answer["usage"] == {"prompt_tokens": 5, "total_tokens": 5, "completion_tokens": 0}
    assert [[entry["probs"][0] for entry in one["data"]] for one in raw] == [rewards, rewards]
    assert "/classify" in info["squashing"]


async def test_vllm_truncation_keeps_the_end(fake: Any, serve: Serve, score_of: Any) -> None:
    body = {"input": [1, 2, 3, 4], "use_activation": False}
    async with serve(fake, max_length=3) as (client, _):
        answer = (await client.post("/classify", json={**body, "truncate_prompt_tokens": 2})).json()
        longest = (await client.post("/classify", json={**body, "truncate_prompt_tokens": -1})).json()
        refused = await client.post("/classify", json=body)
        by_url = (await client.post("/classify?truncation=left", json=body)).json()
    assert (reward_in("/classify", answer), answer["data"][0]["truncated"]) == (score_of([3, 4]), True)
    assert reward_in("/classify", longest) == reward_in("/classify", by_url) == score_of([2, 3, 4])
    assert refused.status_code == 422
    assert refused.json()["error"]["code"] == 422


async def test_sglang_clients_get_one_object_or_a_list(fake: Any, serve: Serve, score_of: Any) -> None:
    async with serve(fake) as (client, _):
        one = (await client.post("/classify", json={"input_ids": [1, 2]})).json()
        many = (await client.post("/classify", json={"input_ids": [[1, 2], [3]], "rid": ["a", "b"]})).json()
        texts = (await client.post("/classify", json={"text": ["x"]})).json()
    assert one["embedding"] == [score_of([1, 2])]
    assert [entry["embedding"] for entry in many] == [[score_of([1, 2])], [score_of([3])]]
    assert [entry["meta_info"]["id"] for entry in many] == ["a", "b"]
    assert len(texts) == 1


async def test_embeddings_come_as_numbers_or_as_openai_asks_for_them(fake: Any, serve: Serve, score_of: Any) -> None:
    async with serve(fake) as (client, _):
        answer = (await client.post("/v1/embeddings", json={"model": "m", "input": [[1], [2]]})).json()
        packed = (await client.post("/v1/embeddings", json={"input": [1], "encoding_format": "base64"})).json()
    assert [entry["embedding"] for entry in answer["data"]] == [[score_of([1])], [score_of([2])]]
    assert {entry["object"] for entry in answer["data"]} == {"embedding"}
    (value,) = struct.unpack("<f", base64.b64decode(packed["data"][0]["embedding"]))
    assert value == score_of([1])


async def test_llama_factory_reads_scores(fake: Any, serve: Serve) -> None:
    async with serve(fake) as (client, _):
        response = await client.post("/v1/score/evaluation", json={"model": "model", "messages": ["a", "b"]})
        cut = await client.post("/v1/score/evaluation", json={"messages": ["abcdef"], "max_length": 3})
    answer = response.json()
    assert (answer["object"], answer["model"], len(answer["scores"])) == ("score.evaluation", "model", 2)
    assert cut.json()["truncated"] == [True]


@pytest.mark.parametrize("route", EMPTY)
async def test_empty_lists_are_answered(fake: Any, serve: Serve, route: str) -> None:
    async with serve(fake) as (client, _):
        response = await client.post(route, json=EMPTY[route])
        assert (await client.post("/classify", json={"text": []})).json() == []
    assert response.status_code == 200
    answer = response.json()
    if route == "/get_reward":
        assert answer == {
            "rewards": [],
            "scores": [],
            "extra_logs": {"rm_reward": [], "rm_finished": [], "rm_truncated": []},
        }
    else:
        assert answer.get("scores", answer.get("data")) == []


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize("route", ROUTES)
async def test_an_item_without_a_reward_fails_the_request_with_a_status_its_caller_understands(
    fake: Any, serve: Serve, route: str
) -> None:
    fake.nan_for = lambda ids: len(ids) > 1  # the start-up probe has one
    async with serve(fake, max_length=32) as (client, _):
        too_long = await client.post(route, json=body_for(route, "x" * 40))
        not_a_number = await client.post(route, json=body_for(route, "abcdefg"))
    assert too_long.status_code == 422
    assert too_long.json()["error"]["type"] == "too_long"
    assert "over the limit of 32" in too_long.json()["error"]["message"]
    # verl tries again for minutes on any 5xx, and a NaN stays one
    is_openai = route in ("/classify", "/v1/embeddings")
    assert not_a_number.status_code == (422 if is_openai else 500)
    assert not_a_number.json()["error"]["type"] == "non_finite_reward"
    assert ("code" in not_a_number.json()["error"]) == is_openai


async def test_one_bad_item_among_good_ones_is_an_error_never_a_number(fake: Any, serve: Serve) -> None:
    fake.nan_for = lambda ids: ids == [2]
    async with serve(fake) as (client, _):
        response = await client.post("/classify", json={"input": [[1], [2], [3]]})
        texts = await client.post("/get_reward", json={"query": ["a", ""], "prompts": [], "labels": []})
    assert response.status_code == 422
    assert texts.status_code == 422
    assert texts.json()["error"]["message"].startswith("query[1]")


@pytest.mark.parametrize(
    ("route", "body", "message"),
    [
        ("/get_reward", {"queries": ["a"]}, "query: is required"),
        ("/get_reward", {"query": "a"}, "query: must be a list"),
        ("/get_reward", {"query": [1]}, "query[0]: must be a text"),
        ("/get_reward", {"query": ["a"], "promts": []}, "promts: unknown field; did you mean prompts?"),
        ("/reward", {"prompt": "a"}, "response: is required"),
        ("/reward", {"prompt": 1, "response": "a"}, "prompt: "),
        ("/reward", {"prompt": [{"role": "user", "content": 1}], "response": "a"}, "prompt"),
        ("/classify", {}, "give input or messages"),
        ("/classify", {"model": "m"}, "give input or messages"),
        ("/classify", {"input": "a", "messages": CHAT}, "give exactly one of input and messages"),
        ("/classify", {"text": 1}, "text: must be a text or a list of texts"),
        ("/classify", {"text": "a", "input": "b"}, "input: unknown field"),
        ("/classify", {"input": ["a", 1]}, "input[1]: must be"),
        ("/classify", {"input": [[1], ["a"]]}, "input[1][0]: must be a token id"),
        ("/classify", {"input": [1, -1]}, "input[1]: must be a token id"),
        ("/classify", {"input": [True]}, "input[0]: must be"),
        ("/classify", {"input": [1, 2.0]}, "input[1]: must be a token id"),
        ("/classify", {"input_ids": [[1], [2, True]]}, "input_ids[1][1]: must be a token id"),
        ("/classify", {"input": {}}, "input: must be a text"),
        ("/classify", {"input": "a", "add_generation_prompt": True}, "add_generation_prompt: "),
        ("/classify", {"input": "a", "use_activation": False, "activation": True}, "contradicts"),
        ("/classify", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("/classify", {"text": ["a", "b"], "rid": ["x"]}, "rid: 1 names for 2 items"),
        ("/classify", [1], "must be a JSON object"),
        ("/v1/embeddings", {"input": "a", "dimensions": 2}, "dimensions: "),
        ("/v1/score/evaluation", {"messages": [[]]}, "messages[0]: must be a text"),
    ],
)
async def test_a_wrong_field_is_named(fake: Any, serve: Serve, route: str, body: Any, message: str) -> None:
    async with serve(fake) as (client, _):
        response = await client.post(route, json=body)
    assert response.status_code == 422, response.text
    assert message in response.json()["error"]["message"]


async def test_the_urls_query_pins_and_limits_and_nothing_in_it_is_ignored(fake: Any, serve: Serve) -> None:
    body = openrlhf_body("a<|im_end|>")
    async with serve(fake) as (client, _):
        good = await client.post("/get_reward", params={"reward_id": fake.reward_id, "deadline_ms": "9000"}, json=body)
        other = await client.post("/get_reward?reward_id=sha256:other", json=body)
        unknown = await client.post("/get_reward?reward-id=x", json=body)
        twice = await client.post("/get_reward?truncation=left&truncation=error", json=body)
        wrong = await client.post("/get_reward?deadline_ms=soon", json=body)
    assert good.status_code == 200
    assert (other.status_code, other.json()["error"]["type"]) == (409, "reward_id_mismatch")
    assert [r.status_code for r in (unknown, twice, wrong)] == [422] * 3
    assert "the URL's query: reward-id: unknown field; did you mean reward_id?" in unknown.json()["error"]["message"]
    assert "deadline_ms" in wrong.json()["error"]["message"]


@pytest.mark.parametrize("route", ROUTES)
async def test_overload_is_503_with_retry_after_once_the_deadline_passes(
    fake: Any, serve: Serve, eventually: Any, route: str
) -> None:
    async with serve(fake, max_queued_tokens=300, max_length=300) as (client, service):
        fake.hold()
        busy = asyncio.create_task(client.post("/score", json={"input_ids": [[1] * 300]}))
        await fake.until_entered()
        body = body_for(route, "x" * 290)
        waiting = asyncio.create_task(client.post(route, json=body))
        await eventually(lambda: service.admission.num_waiting == 1)
        response = await client.post(f"{route}?deadline_ms=1", json=body)
        fake.gate.set()
        assert (await busy).status_code == 200
        assert (await waiting).status_code == 200, "who waited got its answer"
    assert response.status_code in (503, 504)
    assert response.json()["error"]["retryable"] is True
    assert response.status_code == 504 or response.headers["retry-after"].isdigit()


@pytest.mark.parametrize("route", ROUTES)
async def test_a_caller_waits_while_the_model_is_loaded(fake: Any, route: str) -> None:
    service = ScoringService(ServerSettings(checkpoint="fake"))
    app = create_app(service, service.settings)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server") as client:
        call = asyncio.create_task(client.post(route, json=body_for(route, "abcdefgh<|im_end|>")))
        impatient = await client.post(f"{route}?deadline_ms=1", json=body_for(route, "abcdefgh"))
        await service.start(lambda: fake)
        assert (await call).status_code == 200
        assert (impatient.status_code, impatient.json()["error"]["type"]) == (503, "loading")
        service.begin_drain()
        draining = await client.post(route, json=body_for(route, "abcdefgh"))
        assert (draining.status_code, draining.json()["error"]["type"]) == (503, "draining")
    await service.stop()


async def test_requests_are_counted_by_route(fake: Any, serve: Serve, sample: Any) -> None:
    async with serve(fake) as (client, service):
        for route in ROUTES:
            await client.post(route, json=body_for(route, "abcdefgh"))
            assert sample(service, "rm_request_seconds_count", route=route) == 1
