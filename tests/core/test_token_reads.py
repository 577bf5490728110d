"""The reward at each token of an answer, as it is read in the forwards that compute the answer anyway."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rm_core.model import RewardModel
from rm_core.padded_passes import score_padded
from rm_core.passes import score_in_passes
from rm_core.prefix_cache import PrefixCache
from rm_core.token_reads import TokenReads
from tests.conftest import save_classifier
from tests.core.test_fused import load, root_mean_square

BOUND = 2e-5


@pytest.fixture(scope="module", params=["llama", "mistral"])
def model(request, tmp_path_factory):
    directory = save_classifier(tmp_path_factory.mktemp("classifier") / request.param, request.param)
    return RewardModel.load(str(directory), dtype="float32", device="cpu")


def prefixes_alone(model, ids, first):
    """The reward of every beginning of ``ids`` that ends at ``first`` or later, each in a row of its own."""
    with torch.inference_mode():
        return np.array([float(model.network.forward_padded([ids[: end + 1]])) for end in range(first, len(ids))])


def group(num_prompt, lengths, seed=0):
    generator = np.random.default_rng(seed)
    prompt = generator.integers(0, 256, num_prompt).tolist()
    return [[*prompt, *generator.integers(0, 256, length).tolist()] for length in lengths]


def check(model, sequences, first, scored):
    for ids, place, reward, read in zip(sequences, first, scored.rewards, scored.token_rewards, strict=True):
        if place is None:
            assert read is None
            continue
        assert read.dtype == np.float32
        assert read[-1] == reward, "the last token's value is the reward, to the bit"
        np.testing.assert_allclose(read, prefixes_alone(model, ids, place), atol=BOUND)


@pytest.mark.parametrize("max_tokens", [16, 40, 64, 10_000])
def test_every_budget_reads_what_the_beginnings_score_alone(model, max_tokens):
    sequences = group(70, (30, 7, 90, 30))
    first = [70, None, 70, 95]
    check(model, sequences, first, model.score_batch(sequences, max_tokens=max_tokens, read_from=first))


def test_cached_answers_are_computed_again_and_cached_prompts_are_not(model):
    sequences, cache = group(96, (20, 40)), PrefixCache(10**8)
    for _ in range(2):
        model.score_batch(sequences, cache=cache)
    scored = model.score_batch(sequences, cache=cache, read_from=[96, 96])
    check(model, sequences, [96, 96], scored)
    assert scored.computed_tokens.sum() == 60


def test_answers_that_begin_alike_are_read_in_the_part_they_share(model):
    prompt, opening = list(range(60)), list(range(100, 140))
    sequences = [[*prompt, *opening, *tail] for tail in ([1, 2], [3], [4, 5, 6])]
    scored = model.score_batch(sequences, read_from=[60] * 3)
    check(model, sequences, [60] * 3, scored)
    assert scored.computed_tokens.sum() == 60 + 40 + 6
    np.testing.assert_array_equal(scored.token_rewards[0][:40], scored.token_rewards[1][:40])


def test_equal_sequences_may_ask_for_different_parts(model):
    (ids,) = group(30, (30,))
    for one in (model.score_batch, lambda s, read_from: padded(model, s, read_from)):
        scored = one([ids, ids, ids], read_from=[40, None, 30])
        assert [None if read is None else len(read) for read in scored.token_rewards] == [20, None, 30]
        check(model, [ids] * 3, [40, None, 30], scored)


def padded(model, sequences, first, max_tokens=200):
    with torch.inference_mode():
        return score_padded(model.network, sequences, max_tokens, TokenReads(sequences, first))


def test_padded_rows_give_the_same(model):
    sequences, first = group(50, (30, 7, 90, 1)), [50, None, 50, 50]
    check(model, sequences, first, padded(model, sequences, first))


def test_who_does_not_ask_pays_nothing(model, monkeypatch):
    sequences, rows = group(50, (30, 7)), []
    run = model.network.run_tree
    monkeypatch.setattr(model.network, "run_tree", lambda *args: rows.append(len(args[-1])) or run(*args))
    assert model.score_batch(sequences).token_rewards is None
    assert rows == [2]
    model.score_batch(sequences, read_from=[50, None])
    assert rows == [2, 31]


@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=60), min_size=1, max_size=6),
    st.integers(1, 80),
    st.sampled_from([0, 30_000, 10**7]),
    st.data(),
)
@settings(max_examples=40, deadline=None)
def test_random_trees_budgets_caches_and_places(tiny_model, sequences, max_tokens, max_bytes, data):
    cache = PrefixCache(max_bytes)
    places = st.one_of(st.none(), st.integers(0, 59))
    for _ in range(2):
        first = [
            None if place is None else min(place, len(ids) - 1)
            for ids, place in ((ids, data.draw(places)) for ids in sequences)
        ]
        with torch.inference_mode():
            scored = score_in_passes(tiny_model.network, sequences, max_tokens, cache, TokenReads(sequences, first))
        check(tiny_model, sequences, first, scored)


def test_the_fused_pass_in_bf16_is_as_close_to_fp32_as_plain_transformers(tmp_path):
    model, exact = load(tmp_path, "llama", "bfloat16"), load(tmp_path, "llama", "float32")
    if model.network.fused_off is not None:
        pytest.skip(f"no fused pass here: {model.network.fused_off}")
    sequences, first = group(161, (1, 33, 129)), [161, 161, 150]
    ours, plain = [], []
    for budget in (10_000, 96):
        scored = model.score_batch(sequences, max_tokens=budget, cache=PrefixCache(10**8), read_from=first)
        for ids, place, reward, read in zip(sequences, first, scored.rewards, scored.token_rewards, strict=True):
            assert read[-1] == reward
            expected = prefixes_alone(exact, ids, place)
            ours.append(read - expected)
            plain.append(prefixes_alone(model, ids, place) - expected)
    assert root_mean_square(np.concatenate(ours)) <= 1.1 * root_mean_square(np.concatenate(plain))


def test_places_outside_of_a_sequence_and_encoders_are_refused(model, tmp_path):
    with pytest.raises(ValueError, match="no place in a sequence of 2 tokens"):
        model.score_batch([[1, 2]], read_from=[2])
    directory = save_classifier(tmp_path / "bert", "bert", head_dim=None, num_key_value_heads=None)
    encoder = RewardModel.load(str(directory), dtype="float32", device="cpu")
    assert "encoder" in (encoder.token_rewards_off or "")
    with pytest.raises(ValueError, match="encoder"):
        encoder.score_batch([[1, 2]], read_from=[0])


def test_several_heads_are_read_as_their_mean(model):
    sequences, first = group(40, (20, 30)), [40, 45]
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn((2, model.network.head.in_features), generator=generator)
    model.network.heads = torch.stack(
        [model.network.head.weight[0] + spread[0], model.network.head.weight[0] - spread[0]]
    )
    try:
        scored = model.score_batch(sequences, max_tokens=48, read_from=first)
        assert scored.heads.shape == (2, 2)
        check(model, sequences, first, scored)
    finally:
        model.network.heads = None
