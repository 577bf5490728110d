"""200 real texts and chats: what is served in fp32 equals plain transformers on the same ids, however it is sent."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import make_checkpoint

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def real_checkpoint(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA checkpoint on the bundled chat model (pad == eos) with random weights that matter."""
    return make_checkpoint(tmp_path_factory.mktemp("real") / "checkpoint", smollm2)


def real_items(shared_data: Callable[[str], Path]) -> tuple[list[str], list[list[dict[str, str]]]]:
    texts, chats = [], []
    for line in shared_data("eval_ukp_convarg.jsonl").read_text().splitlines():
        row = json.loads(line)
        texts.append(row["prompt"] + "\n" + row["chosen"])
    for line in shared_data("eval_hh_harmless.jsonl").read_text().splitlines():
        row = json.loads(line)
        chats.append([*row["prompt"], *row["rejected"]])
    short = [text for text in texts if len(text) < 350][:100]
    return short, [chat for chat in chats if sum(len(m["content"]) for m in chat) < 450][:100]


def plain_scores(checkpoint: Path, base: Path, sequences: list[list[int]]) -> np.ndarray:
    """Plain peft and transformers in fp32, each sequence alone, read at its last position by hand."""
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, checkpoint).eval().get_base_model()
    scores = []
    with torch.inference_mode():
        for ids in sequences:
            hidden = model.model(input_ids=torch.tensor([ids])).last_hidden_state[:, -1]
            scores.append(float(model.score(hidden)[0, 0]))
    return np.array(scores)


async def test_200_real_texts_and_chats_are_served_as_plain_transformers_scores_them(
    real_checkpoint: Path, smollm2: Path, serve: Callable[..., Any], shared_data: Callable[[str], Path]
) -> None:
    from rm_core.model import RewardModel

    texts, chats = real_items(shared_data)
    assert len(texts) == len(chats) == 100
    model = RewardModel.load(str(real_checkpoint), dtype="float32", device="cpu")
    assert model.shares_prefixes
    tokenizer = model.tokenizer
    ids = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    for chat in chats:
        whole = tokenizer(tokenizer.apply_chat_template(chat, tokenize=False), add_special_tokens=False)["input_ids"]
        assert whole[-2] == tokenizer.eos_token_id
        ids.append(whole[:-1])  # the newline after the last end-of-turn token is no part of the answer
    expected = plain_scores(real_checkpoint, smollm2, ids)
    bound = 1e-4 * max(float(expected.std()), 1.0)
    async with serve(model, max_batch_tokens=2048) as (client, _):
        alone = [
            (await client.post("/score", json=body)).json()["rewards"][0]
            for body in [*({"texts": [t]} for t in texts[::4]), *({"conversations": [c]} for c in chats[::4])]
        ]
        big = (await client.post("/score", json={"texts": texts})).json()["rewards"]
        big += (await client.post("/score", json={"conversations": chats})).json()["rewards"]
        lots = [(start, {"texts": texts[start::8]}) for start in range(8)]
        lots += [(start, {"conversations": chats[start::8]}) for start in range(8)]
        answers = await asyncio.gather(*(client.post("/score", json=body) for _, body in lots))
    np.testing.assert_allclose(big, expected, atol=bound, rtol=0)
    np.testing.assert_allclose(alone, [*expected[:100:4], *expected[100::4]], atol=bound, rtol=0)
    for (start, body), answer in zip(lots, answers, strict=True):
        part = expected[:100] if "texts" in body else expected[100:]
        np.testing.assert_allclose(answer.json()["rewards"], part[start::8], atol=bound, rtol=0)
    # left and right padding inside give the same
    with torch.inference_mode():
        for side in ("left", "right"):
            padded = model.network.forward_padded(ids[90:110], padding_side=side).numpy()
            np.testing.assert_allclose(padded, expected[90:110], atol=bound, rtol=0)
    print(
        f"largest difference {np.abs(np.array(big) - expected).max():.2g}, bound {bound:.2g}, spread {expected.std():.3g}"
    )
