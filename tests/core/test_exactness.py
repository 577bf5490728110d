"""A reward computed over a token tree is the one plain transformers gives the sequence alone, however it is computed.

The default run covers 250 sequences for each family, 2,000 in all; the slow one 2,000 for each.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from rm_core.model import RewardModel
from rm_core.prefix_cache import PrefixCache
from rm_core.tree import MIN_SHARED, build_tree
from tests.conftest import byte_tokenizer
from tests.core.exactness import (
    FAMILIES,
    WINDOWED,
    Ids,
    Item,
    Subject,
    arrive,
    check_bfloat16,
    corpus,
    plain_classifier,
    plain_rewards,
    plain_scores,
    save_varied,
    subject_of,
)

# ------------------------------------------------------------------ can these tests fail?


def test_the_corpus_has_every_shape_and_cuts_characters() -> None:
    items = corpus(250)
    assert len({item.kind for item in items}) == 13
    lengths = [len(item.ids) for item in items]
    assert min(lengths) == 1
    assert max(lengths) > 300
    assert len({tuple(item.ids) for item in items}) < len(items)
    tokenizer = byte_tokenizer()
    cut = [i for i in items if i.kind == "unicode parted inside a character" and "�" in tokenizer.decode(i.ids[-3:])]
    assert len(cut) > 4
    # sharing more than halves the tokens, so most of what is scored is scored through ancestors
    assert build_tree([item.ids for item in items]).num_tokens < 0.5 * sum(lengths)


def test_the_weights_make_every_token_matter(subject: Subject) -> None:
    """A first token that is another one moves rewards far beyond the bound, wherever the layers can see it."""
    assert subject.expected.std() > 0.3
    reach = 2 * 17  # two windowed layers carry the first token so far; beyond it, only a full layer does
    short = [ids for ids in subject.sequences if 2 < len(ids) <= reach][:40]
    classifier = plain_classifier(subject.directory)
    moved = np.abs(
        plain_rewards(classifier, short) - plain_rewards(classifier, [[ids[0] ^ 1, *ids[1:]] for ids in short])
    )
    assert np.mean(moved > 10 * subject.bound) > 0.9


@pytest.mark.parametrize("family", WINDOWED)
def test_a_window_that_is_off_by_one_would_show(family: str, tmp_path: Path) -> None:
    save_varied(tmp_path, family, **FAMILIES[family])
    sequences = [item.ids for item in corpus(60) if len(item.ids) > 40]
    right = plain_rewards(plain_classifier(tmp_path), sequences)
    wider = plain_rewards(plain_classifier(tmp_path, sliding_window=FAMILIES[family]["sliding_window"] + 1), sequences)
    assert np.mean(np.abs(right - wider) > 1e-3) > 0.95


# ------------------------------------------------------------------ rewards


def test_one_tree_gives_the_rewards_of_plain_transformers(subject: Subject) -> None:
    scored = subject.model.score_batch(subject.sequences)
    assert scored.computed_tokens.sum() < 0.5 * sum(map(len, subject.sequences))
    subject.check(scored.rewards)


def test_each_sequence_alone_has_the_same_reward(subject: Subject) -> None:
    indices = range(0, len(subject.items), 5)
    subject.check(np.array([subject.model.score_ids([subject.sequences[i]])[0] for i in indices]), indices)


@pytest.mark.parametrize("max_tokens", [MIN_SHARED, 100])
def test_groups_and_long_sequences_split_by_the_budget_keep_their_rewards(subject: Subject, max_tokens: int) -> None:
    """100 tokens split every group and cut the long sequences into five pieces; 16, which is slow, leave nothing whole."""
    indices = range(0, len(subject.items), 1 if max_tokens > MIN_SHARED else 4)
    found = subject.model.score_batch([subject.sequences[index] for index in indices], max_tokens=max_tokens)
    subject.check(found.rewards, indices)


def test_arrival_order_does_not_change_rewards(subject: Subject) -> None:
    assert arrive(subject, None, None, seed=1) == 0


def test_cache_hits_do_not_change_rewards(subject: Subject) -> None:
    cache = PrefixCache(10**9)
    first = arrive(subject, cache, None, seed=2)
    again = arrive(subject, cache, 500, seed=3)
    assert 0 < first < again
    subject.check(subject.model.score_batch(subject.sequences, cache=cache).rewards)


def test_evicted_prefixes_do_not_change_rewards(subject: Subject) -> None:
    """The cache holds about 300 tokens: prefixes go while their siblings are still to come."""
    whole = PrefixCache(10**9)
    subject.model.score_batch([list(range(64))], cache=whole)
    cache = PrefixCache(300 * whole.num_bytes // 64)
    known: set[int] = set()
    gone = 0
    for seed, max_tokens in ((4, None), (5, 100)):
        assert arrive(subject, cache, max_tokens, seed) > 0
        found = {i for i, ids in enumerate(subject.sequences) if cache.find(tuple(ids)) is not None}
        gone += len(known - found)
        known = found
    assert gone > 0
    assert 0 < cache.num_bytes <= cache.max_bytes


def test_a_cached_prefix_serves_every_kind_of_follower(subject: Subject) -> None:
    """After a prompt alone: itself, longer and shorter ones, ones that part inside it, and ones that share too little."""
    draw = np.random.default_rng(6)
    prompt = draw.integers(0, 256, 70).tolist()
    tail, other = draw.integers(0, 256, 30).tolist(), draw.integers(0, 256, 30).tolist()
    followers = [
        prompt,
        prompt[:-1],
        [*prompt, *tail],
        [*prompt[:40], *other],
        prompt[:17],
        prompt[:16],
        [*prompt[:9], 3],
    ]
    followers += [[*prompt, *tail[:20], *other], [*prompt, tail[0]]]
    expected = plain_rewards(plain_classifier(subject.directory), followers)
    for batch_size in (1, len(followers)):
        cache = PrefixCache(10**9)
        subject.model.score_batch([prompt], cache=cache)
        found = [
            subject.model.score_batch(followers[at : at + batch_size], cache=cache).rewards
            for at in range(0, len(followers), batch_size)
        ]
        np.testing.assert_allclose(np.concatenate(found), expected, atol=subject.bound, rtol=0)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("family", list(FAMILIES))
def test_2000_sequences_keep_their_rewards_in_every_way_of_computing_them(family: str, tmp_path: Path) -> None:
    subject = subject_of(family, 2000, tmp_path / family)
    subject.check(subject.model.score_batch(subject.sequences, max_tokens=8192).rewards)
    subject.check(subject.model.score_batch(subject.sequences, max_tokens=200).rewards)
    for max_bytes in (10**9, 10**5):
        cache = PrefixCache(max_bytes)
        for seed in (7, 8):
            arrive(subject, cache, 1500, seed)


@pytest.mark.slow
@pytest.mark.long
def test_200_real_answers_of_smollm2_keep_their_rewards(
    smollm2: Path, shared_data: Callable[[str], Path], tmp_path: Path
) -> None:
    """Short questions with several answers, and chats of several turns, in fp32 and bf16."""
    from transformers import AutoTokenizer

    from rm_core.chat import Renderer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    renderer = Renderer.for_tokenizer(tokenizer)
    sequences: list[Ids] = []
    for name, count, longest in (("truthfulqa.jsonl", 150, 100), ("eval_hh_harmless.jsonl", 200, 180)):
        for line in shared_data(name).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            chosen, rejected, _ = renderer.render_pair(row["prompt"], row["chosen"], row["rejected"], max_length=1024)
            if len(sequences) < count and max(len(chosen), len(rejected)) < longest:
                sequences += [chosen, rejected]
    assert len(sequences) == 200
    classifier = plain_classifier(smollm2)
    torch.nn.init.normal_(classifier.score.weight, std=0.05, generator=torch.Generator().manual_seed(0))
    classifier.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    expected, hidden = plain_scores(classifier, sequences)
    model = RewardModel.load(str(tmp_path), dtype="float32", device="cpu")
    assert model.sharing_off is None
    real = Subject(model, [Item("real", ids) for ids in sequences], expected, hidden, tmp_path)
    real.check(model.score_batch(sequences, max_tokens=1500).rewards)
    assert arrive(real, PrefixCache(10**9), 1500, seed=0) > 0
    rounded = RewardModel.load(str(tmp_path), dtype="bfloat16", device="cpu")
    check_bfloat16(rounded, plain_classifier(tmp_path, torch.bfloat16), sequences, hidden)
