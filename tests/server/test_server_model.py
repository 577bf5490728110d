"""The server around a real (tiny, random) model: what is served is what the model scores."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rm_server.loader import load_model
from rm_server.settings import ServerSettings, SettingsError

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


def test_start_says_why_so_many_threads_and_that_budget(
    tiny_checkpoint: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "rm_server")
    given = {"checkpoint": str(tiny_checkpoint), "device": "cpu", "num_threads": torch.get_num_threads()}
    load_model(ServerSettings(**given))
    assert "CPU threads (num_threads), 12288 tokens a batch (the default)" in caplog.text
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    load_model(ServerSettings(**given | {"num_threads": 0, "max_batch_tokens": 64}))
    assert "CPU threads (OMP_NUM_THREADS), 64 tokens a batch (as set)" in caplog.text
    monkeypatch.delenv("OMP_NUM_THREADS")
    load_model(ServerSettings(**given | {"num_threads": 0}))
    assert "CPU threads (torch's choice for this machine)" in caplog.text


def test_prefix_cache_beyond_the_memory_is_refused_before_anything_is_loaded() -> None:
    settings = ServerSettings(checkpoint="not there", device="cpu", prefix_cache_mb=1 << 40)
    with pytest.raises(SettingsError, match=r"prefix_cache_mb \(1099511627776\) is over the memory of \d+ MiB"):
        load_model(settings)


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


def conversation_groups(count: int, answers: int) -> list[list[str]]:
    rng = random.Random(2)

    def text(length: int) -> str:
        return "".join(rng.choice("abcdefgh ,.") for _ in range(length))

    return [
        [prompt + text(rng.choice([1, 20, 45])) for _ in range(answers)] for prompt in (text(100) for _ in "." * count)
    ]


async def test_answers_that_come_later_pay_for_themselves_alone_and_score_the_same(
    tiny_model: Any, serve: Serve, sample: Any
) -> None:
    groups = conversation_groups(4, 4)
    async with serve(tiny_model, max_batch_tokens=1024) as (client, service):
        for number in range(4):
            for group in groups:
                body = {"texts": [group[number]]}
                answer = (await client.post("/score", json=body)).json()
                ids = tiny_model.renderer.render_text(group[number])
                np.testing.assert_allclose(answer["rewards"], tiny_model.score_ids([ids]), atol=TOLERANCE, rtol=0)
                assert answer["usage"]["tokens"] == len(ids)
                assert answer["usage"]["computed_tokens"] == len(ids) - (96 if number else 0)
        metrics = (await client.get("/metrics")).text
        assert sample(service, "rm_cache_hit_tokens_total") == 3 * 4 * 96
        assert sample(service, "rm_cache_bytes") > 0
        info = (await client.get("/info")).json()
    assert "rm_cache_prefixes 4.0" in metrics
    assert info["prefix_sharing"] == info["prefix_cache"] == "on"


async def test_without_a_cache_every_answer_pays_for_its_prompt(tiny_model: Any, serve: Serve) -> None:
    group = conversation_groups(1, 2)[0]
    async with serve(tiny_model, prefix_cache_mb=0) as (client, _):
        usages = [(await client.post("/score", json={"texts": [text]})).json()["usage"] for text in group]
        info = (await client.get("/info")).json()
    assert all(usage["computed_tokens"] == usage["tokens"] for usage in usages)
    assert (info["prefix_sharing"], info["prefix_cache"]) == ("on", "off: prefix_cache_mb is 0")


async def test_memory_of_a_long_sequence_is_bounded_by_the_budget(
    tiny_model: Any, serve: Serve, monkeypatch: Any
) -> None:
    """Sequences up to the model's context of 512 under a budget of 64: no forward sees more than 64 tokens."""
    widths: list[int] = []
    run = tiny_model.network.run_tree
    monkeypatch.setattr(tiny_model.network, "run_tree", lambda ids, *rest: widths.append(len(ids)) or run(ids, *rest))
    rng = random.Random(3)
    sequences = [[rng.randrange(256) for _ in range(length)] for length in (512, 300, 20, 65)]
    async with serve(tiny_model, max_batch_tokens=64) as (client, _):
        widths.clear()
        answer = (await client.post("/score", json={"input_ids": sequences})).json()
    assert max(widths) <= 64
    assert answer["usage"] == {"tokens": 897, "computed_tokens": 897}
    with torch.inference_mode():
        alone = torch.cat([tiny_model.network.forward_padded([ids]) for ids in sequences]).numpy()
    np.testing.assert_allclose(answer["rewards"], alone, atol=TOLERANCE, rtol=0)


async def test_exact_rewards_are_the_same_bits_whatever_comes_with_them_or_before_them(
    tiny_model: Any, serve: Serve, sample: Any
) -> None:
    sent = sorted({text for group in conversation_groups(5, 4) for text in group} | set(texts(20)))
    rng = random.Random(4)
    seen: dict[str, set[float]] = {text: set() for text in sent}
    async with serve(tiny_model, exact=True, max_batch_tokens=256) as (client, service):
        for size in (1, 3, 40):
            order = rng.sample(sent, len(sent))
            lots = [order[start : start + size] for start in range(0, len(order), size)]
            answers = await asyncio.gather(*(client.post("/score", json={"texts": lot}) for lot in lots))
            for lot, answer in zip(lots, answers, strict=True):
                body = answer.json()
                assert body["usage"]["computed_tokens"] == body["usage"]["tokens"]
                for text, reward in zip(lot, body["rewards"], strict=True):
                    seen[text].add(reward)
        info = (await client.get("/info")).json()
    assert all(len(rewards) == 1 for rewards in seen.values())
    for text, (reward,) in seen.items():
        ids = tiny_model.renderer.render_text(text)
        assert reward == float(tiny_model.score_batch([ids], max_tokens=256).rewards[0])
    assert info["exact"] is True
    assert info["prefix_sharing"] == info["prefix_cache"] == "off: every sequence is scored alone (exact)"
    assert sample(service, "rm_batch_items_sum") > sample(service, "rm_batch_items_count")
