"""Rewards do not depend on the token budget, on what is cached, or on the order of arrival."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rm_core.model import RewardModel
from rm_core.passes import score_in_passes
from rm_core.prefix_cache import PrefixCache
from tests.conftest import save_classifier
from tests.core.test_attention import nested_sequences

BOUND = 2e-5


@pytest.fixture(scope="module", params=["llama", "mistral", "gemma2"])
def model(request, tmp_path_factory):
    directory = save_classifier(tmp_path_factory.mktemp("classifier") / request.param, request.param)
    return RewardModel.load(str(directory), dtype="float32", device="cpu")


def alone(model, sequences):
    with torch.inference_mode():
        return torch.cat([model.network.forward_padded([ids]) for ids in sequences]).numpy()


@pytest.mark.parametrize("max_tokens", [7, 33, 64, 200, 10_000])
def test_any_budget_gives_the_scores_of_padded_rows(model, max_tokens):
    sequences = nested_sequences(2)
    scored = model.score_batch(sequences, max_tokens=max_tokens)
    np.testing.assert_allclose(scored.rewards, alone(model, sequences), atol=BOUND)


def test_a_sequence_longer_than_the_budget_is_computed_in_pieces_of_it(model, monkeypatch):
    generator = np.random.default_rng(0)
    sequences = [generator.integers(0, 256, length).tolist() for length in (300, 5)]
    widths = []
    run = model.network.run_tree
    monkeypatch.setattr(model.network, "run_tree", lambda ids, *rest: widths.append(len(ids)) or run(ids, *rest))
    scored = model.score_batch(sequences, max_tokens=64)
    assert max(widths) <= 64
    np.testing.assert_allclose(scored.rewards, alone(model, sequences), atol=BOUND)
    assert scored.computed_tokens.sum() == sum(widths) == 305


@pytest.mark.parametrize("max_bytes", [0, 20_000, 10**8])
def test_cache_hits_and_evictions_do_not_change_scores(model, max_bytes):
    cache = PrefixCache(max_bytes)
    for seed in (0, 1, 0, 2, 1, 0):
        sequences = nested_sequences(seed)
        order = np.random.default_rng(seed).permutation(len(sequences))
        expected = alone(model, sequences)
        for part in np.array_split(order, 5):  # siblings arrive apart
            scored = model.score_batch([sequences[i] for i in part], max_tokens=150, cache=cache)
            np.testing.assert_allclose(scored.rewards, expected[part], atol=BOUND)
            assert cache.num_bytes <= max_bytes
    assert (len(cache) > 0) == (max_bytes > 0)


def test_a_sibling_that_arrives_later_pays_for_its_answer_only(model):
    generator = np.random.default_rng(3)
    prompt = generator.integers(0, 256, 96).tolist()
    answers = [[*prompt, *generator.integers(0, 256, 20).tolist()] for _ in range(3)]
    cache = PrefixCache(10**8)
    first = model.score_batch(answers[:1], cache=cache)
    assert first.computed_tokens.tolist() == [116]
    later = model.score_batch(answers[1:], cache=cache)
    assert later.cached_tokens == 2 * 96
    assert later.computed_tokens.tolist() == [20, 20]
    np.testing.assert_allclose(later.rewards, alone(model, answers[1:]), atol=BOUND)


def test_costs_are_shared_among_those_who_share(model):
    prompt, tail = list(range(100)), list(range(200, 220))
    group = [[*prompt, answer, *tail] for answer in (1, 2, 3, 4)]
    scored = model.score_batch([*group, group[0]])
    assert scored.computed_tokens.sum() == pytest.approx(100 + 4 * 21)
    assert scored.computed_tokens[1] == pytest.approx(25 + 21)
    assert scored.computed_tokens[0] == scored.computed_tokens[4] == pytest.approx((25 + 21) / 2)
    assert scored.rewards[0] == scored.rewards[4]


@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=60), min_size=1, max_size=8),
    st.integers(1, 80),
    st.sampled_from([0, 30_000, 10**7]),
)
@settings(max_examples=60, deadline=None)
def test_random_trees_budgets_and_caches(tiny_model, sequences, max_tokens, max_bytes):
    cache = PrefixCache(max_bytes)
    expected = alone(tiny_model, sequences)
    for _ in range(2):
        with torch.inference_mode():
            scored = score_in_passes(tiny_model.network, sequences, max_tokens, cache)
        np.testing.assert_allclose(scored.rewards, expected, atol=BOUND)


def test_known_length_is_what_find_gives_and_does_not_count_as_a_use(model):
    cache = PrefixCache(10**8)
    sequences = [[1, *range(2, 42)], [2, *range(2, 42)]]
    model.score_batch(sequences, cache=cache)
    assert cache.known_length((1, *range(2, 42))) == cache.find((1, *range(2, 42)))[1] == 32
    assert cache.known_length((9, *range(2, 42))) == 0
    oldest = cache._entries[next(iter(cache._entries))].ids
    cache.known_length(oldest)
    cache.max_bytes = cache.num_bytes
    model.score_batch([[3, *range(2, 42)]], cache=cache)
    assert cache.num_evicted >= 1
    assert cache.known_length(oldest) == 0
