"""The server around a real (tiny, random) model: what is served is what the model scores."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import numpy as np

Serve = Callable[..., Any]
TOLERANCE = 1e-4


def texts(count: int) -> list[str]:
    rng = random.Random(1)
    return ["".join(rng.choice("abcdefgh ,.") for _ in range(rng.choice([1, 7, 60, 300]))) for _ in range(count)]


async def test_served_scores_equal_the_model_alone_in_one_request_and_by_16_clients(
    tiny_model: Any, serve: Serve, sample: Any
) -> None:
    sent = texts(60)
    alone = [float(tiny_model.score_ids([tiny_model.renderer.render_text(text)])[0]) for text in sent]
    async with serve(tiny_model, max_batch_tokens=1024) as (client, service):
        single = await client.post("/score", json={"texts": sent[:1]})
        whole = await client.post("/score", json={"texts": sent})
        lots = [sent[i::16] for i in range(16)]
        answers = await asyncio.gather(*(client.post("/score", json={"texts": lot}) for lot in lots))
        assert sample(service, "rm_forward_failures_total", cause="error") == 0
    np.testing.assert_allclose(single.json()["rewards"], alone[:1], atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(whole.json()["rewards"], alone, atol=TOLERANCE, rtol=0)
    for i, answer in enumerate(answers):
        np.testing.assert_allclose(answer.json()["rewards"], alone[i::16], atol=TOLERANCE, rtol=0)


async def test_group_of_chat_answers_equals_its_conversations(tiny_model: Any, serve: Serve) -> None:
    prompt = [{"role": "user", "content": "what is 2 + 2?"}]
    answers = ["4", "five", "I do not know, sorry"]
    body = {"groups": [{"prompt": prompt, "completions": answers}]}
    conversations = [[*prompt, {"role": "assistant", "content": answer}] for answer in answers]
    async with serve(tiny_model) as (client, _):
        grouped = (await client.post("/score", json=body)).json()
        flat = (await client.post("/score", json={"conversations": conversations})).json()
        info = (await client.get("/info")).json()
    np.testing.assert_allclose(grouped["rewards"][0], flat["rewards"], atol=TOLERANCE, rtol=0)
    assert grouped["reward_id"] == info["reward_id"] == tiny_model.reward_id
    assert info["tokenizer_hash"] == tiny_model.tokenizer_hash


async def test_client_of_the_project_reads_the_answers(tiny_model: Any, serve: Serve) -> None:
    from rm_client import AsyncRewardClient

    async with serve(tiny_model) as (client, _):
        transport = client._transport
        async with AsyncRewardClient("http://server", transport=transport) as rewards:
            result = await rewards.score("a prompt ", ["one", "two"], advantages=True)
            info = await rewards.info()
    assert len(result.rewards) == 2
    assert result.advantages is not None
    assert abs(sum(result.advantages)) < 1e-6
    assert result.reward_id == info.reward_id == tiny_model.reward_id
    assert result.usage.tokens > 0
