"""`token_rewards: true` over HTTP: the reward at each token of an answer, beside the same rewards as without it."""

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rm_client import AsyncRewardClient
from rm_server.token_rewards import MAX_ITEMS, token_texts
from tests.conftest import byte_tokenizer

Serve = Callable[..., Any]
BOUND = 2e-5
PROMPT = [{"role": "user", "content": "How do I look after a cactus, and how often does it need any water at all?"}]
ANSWERS = ["Water it rarely.", "Water it rarely, and let it stand in the sun.", "No idea."]


async def post(client: Any, **body: Any) -> tuple[int, Any]:
    response = await client.post("/score", json={"token_rewards": True, **body})
    return response.status_code, response.json()


def plain_rewards(checkpoint: Path, sequences: list[list[int]]) -> list[float]:
    """What plain transformers and peft give in fp32, each sequence alone."""
    import torch
    from peft import AutoPeftModelForSequenceClassification

    model = AutoPeftModelForSequenceClassification.from_pretrained(
        str(checkpoint), num_labels=1, dtype=torch.float32
    ).eval()
    model.get_base_model().config.pad_token_id = None
    with torch.inference_mode():
        return [float(model(torch.tensor([ids])).logits[0, 0]) for ids in sequences]


@pytest.mark.parametrize("settings", [{}, {"max_batch_tokens": 48}, {"exact": True}, {"prefix_cache_mb": 0}])
async def test_each_is_what_plain_transformers_gives_for_the_sequence_up_to_there(
    tiny_model: Any, tiny_checkpoint: Path, serve: Serve, settings: dict[str, Any]
) -> None:
    async with serve(tiny_model, **settings) as (client, _):
        await client.post("/score", json={"prompt": PROMPT, "completions": ANSWERS})  # fills the cache
        status, answer = await post(client, prompt=PROMPT, completions=ANSWERS)
    assert status == 200
    for text, reward, read in zip(ANSWERS, answer["rewards"], answer["token_rewards"], strict=True):
        ids = tiny_model.renderer.render(PROMPT, text)
        assert "".join(read["tokens"]) == text + "<|im_end|>"
        assert read["start"] + len(read["tokens"]) == len(ids)
        assert read["rewards"][-1] == reward
        beginnings = [ids[: end + 1] for end in range(read["start"], len(ids))]
        np.testing.assert_allclose(read["rewards"], plain_rewards(tiny_checkpoint, beginnings), atol=BOUND)


async def test_exact_rewards_are_the_same_to_the_last_bit_with_and_without(tiny_model: Any, serve: Serve) -> None:
    async with serve(tiny_model, exact=True) as (client, _):
        _, read = await post(client, prompt=PROMPT, completions=ANSWERS)
        plain = (await client.post("/score", json={"prompt": PROMPT, "completions": ANSWERS})).json()
    assert read["rewards"] == plain["rewards"]
    assert "token_rewards" not in plain


async def test_the_client_gives_what_the_server_answered(tiny_model: Any, serve: Serve) -> None:
    groups = [{"prompt": PROMPT, "completions": ANSWERS}, {"prompt": "Why?", "completions": ["No idea."]}]
    async with serve(tiny_model) as (client, _):
        _, answer = await post(client, groups=groups)
        async with AsyncRewardClient("http://rm", transport=client._transport) as ours:
            result = await ours.score_groups(groups, token_rewards=True)
    read = [[vars(reading) for reading in row] for row in result.token_rewards]
    for found, expected in zip(chain(*read), chain(*answer["token_rewards"]), strict=True):
        assert (found["start"], found["tokens"]) == (expected["start"], expected["tokens"])
        np.testing.assert_allclose(found["rewards"], expected["rewards"], atol=BOUND)
    assert [row[0]["rewards"][-1] for row in read] == [row[0] for row in result.rewards]


async def test_they_have_the_shape_of_the_rewards_and_null_where_there_is_none(
    fake: Any, serve: Serve, score_of: Any
) -> None:
    fake.nan_for = lambda ids: ids[-2:] == fake.renderer.render_text("x")[-2:]
    async with serve(fake) as (client, _):
        body = [{"prompt": "pq", "completions": ["a", "x"]}, {"prompt": PROMPT, "completions": []}]
        status, answer = await post(client, groups=body)
    assert status == 200
    assert [len(row) for row in answer["token_rewards"]] == [2, 0]
    first, second = answer["token_rewards"][0]
    ids = fake.renderer.render("pq", "a")
    assert first == {
        "start": 2,
        "tokens": ["a", "<|im_end|>"],
        "rewards": [score_of(ids[: end + 1]) for end in range(2, len(ids))],
    }
    assert second is None


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ({"texts": ["ab"]}, "ab<|im_end|>"),
        ({"texts": ["ab"], "text_as": "chat"}, None),
        ({"input_ids": [[97, 98]]}, None),
        ({"conversations": [[*PROMPT, {"role": "assistant", "content": "yes"}]]}, "yes<|im_end|>"),
        ({"prompt": PROMPT, "completions": [[{"role": "assistant", "content": "yes"}]]}, "yes<|im_end|>"),
        ({"prompt": PROMPT, "completions": [{"content": "yes", "finished": False}]}, "yes"),
        ({"prompt": "2 + 2 = ", "completions": ["4"], "text_as": "chat"}, "4<|im_end|>"),
        ({"prompt": "2 + 2 = ", "completions": ["4<|im_end|>"], "text_as": "templated"}, "4<|im_end|>"),
        ({"prompt": PROMPT, "completions": ["4"], "text_as": "templated"}, "4"),
        ({"prompt": "Grüße ", "completions": ["Zoë 🙂!"]}, "Zoë 🙂!<|im_end|>"),
        ({"prompt": "p", "completions": [""]}, "<|im_end|>"),
    ],
)
async def test_every_form_shows_its_answer_and_nothing_of_the_prompt(
    fake: Any, serve: Serve, body: dict[str, Any], shown: str | None
) -> None:
    async with serve(fake) as (client, _):
        status, answer = await post(client, **body)
    assert status == 200, answer
    (read,) = answer["token_rewards"]
    assert len(read["tokens"]) == len(read["rewards"])
    assert read["rewards"][-1] == answer["rewards"][0]
    if shown is None:
        assert read["start"] == 0
    else:
        assert "".join(read["tokens"]) == shown


async def test_after_truncation_the_answer_is_still_found(fake: Any, serve: Serve) -> None:
    async with serve(fake, max_length=40) as (client, _):
        _, answer = await post(client, prompt="p" * 60, completions=["abc", "d" * 50], truncation="left")
    short, long = answer["token_rewards"]
    assert answer["truncated"] == [True, True]
    assert "".join(short["tokens"]) == "abc<|im_end|>"
    assert (long["start"], "".join(long["tokens"])) == (0, "d" * 39 + "<|im_end|>")


async def test_callers_of_one_batch_get_what_each_asked_for(fake: Any, serve: Serve, eventually: Any) -> None:
    import asyncio

    async with serve(fake) as (client, service):
        fake.hold()
        held = asyncio.create_task(client.post("/score", json={"input_ids": [[9]]}))
        await fake.until_entered()
        body = {"prompt": "pq", "completions": ["same"]}
        asking = asyncio.create_task(post(client, **body))
        whole = asyncio.create_task(post(client, texts=["pqsame"]))
        plain = asyncio.create_task(client.post("/score", json=body))
        await eventually(lambda: len(service.waiting) == 3)
        fake.gate.set()
        await held
        _, first = await asking
        _, second = await whole
        third = (await plain).json()
    assert [len(answer["token_rewards"][0]["rewards"]) for answer in (first, second)] == [5, 7]
    assert first["rewards"] == second["rewards"] == third["rewards"]
    assert "token_rewards" not in third


async def test_what_cannot_be_read_is_refused_by_name(fake: Any, serve: Serve) -> None:
    async with serve(fake) as (client, _):
        status, answer = await post(client, input_ids=[[1]] * (MAX_ITEMS + 1))
        assert (status, answer["error"]["type"]) == (413, "too_large")
        assert answer["error"]["message"].startswith("token_rewards: ")
        assert (await client.get("/info")).json()["token_rewards"] == "on"
        fake.token_rewards_off = "an encoder reads the whole text for its one reward"
        status, answer = await post(client, input_ids=[[1]])
        assert (status, answer["error"]["type"]) == (422, "invalid_request")
        assert "encoder" in answer["error"]["message"]
        assert (await client.get("/info")).json()["token_rewards"].startswith("off: an encoder")


async def test_value_that_is_no_number_is_null(fake: Any, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fake.score_batch

    def one_nan(*args: Any, **options: Any) -> Any:
        scored = real(*args, **options)
        for read in scored.token_rewards or ():
            read[0] = np.nan
        return scored

    monkeypatch.setattr(fake, "score_batch", one_nan)
    async with serve(fake) as (client, _):
        status, answer = await post(client, input_ids=[[1, 2]])
    assert status == 200
    assert answer["token_rewards"][0]["rewards"] == [None, answer["rewards"][0]]


def test_texts_of_tokens_give_the_text_whatever_characters_are_cut() -> None:
    tokenizer = byte_tokenizer()
    for text in ("plain words", " leading", "naïve 🙂🙃 \ufffd\ufffd ok", "\ufffd" * 40, "中文" * 9, ""):
        ids = tokenizer(text + "<|im_end|>")["input_ids"]
        for start in {0, len(ids) // 2 if text.isascii() else 0, len(ids) - 1}:
            texts = token_texts(tokenizer, ids, start)
            assert len(texts) == len(ids) - start
            assert "".join(texts) == (text + "<|im_end|>")[start:] if text.isascii() or start == 0 else "<|im_end|>"
    broken = tokenizer("🙂")["input_ids"][:2] + tokenizer("a")["input_ids"]
    assert "".join(token_texts(tokenizer, broken, 0)) == tokenizer.decode(broken)
