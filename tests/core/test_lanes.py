"""Lanes divide a batch among threads: the same rewards and the same tokens as one pass after the other."""

import contextlib
import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rm_core import kernels, lanes
from rm_core.lanes import Lanes, divide
from rm_core.model import RewardModel
from rm_core.passes import score_in_passes, units_of
from rm_core.prefix_cache import PrefixCache
from tests.conftest import save_classifier

SIZES = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A model in the fused pass, whose lanes take any budget."""
    try:
        kernels.load()
    except kernels.NoKernelsError as error:
        pytest.skip(f"no compiled kernels here: {error}")
    monkeypatch.setattr(lanes, "TOKENS_OF_LANE", 16)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    save_classifier(tmp_path / "model", "llama", **SIZES)
    yield RewardModel.load(str(tmp_path / "model"), dtype="bfloat16", device="cpu")
    torch.set_num_threads(before)


def groups(seed, count=5, size=4, prompt=40, answer=12):
    generator = np.random.default_rng(seed)
    prompts = [generator.integers(0, 256, prompt).tolist() for _ in range(count)]
    return [[*ids, *generator.integers(0, 256, answer).tolist()] for ids in prompts for _ in range(size)]


def in_one_lane(model, sequences, max_tokens, cache=None):
    with torch.inference_mode():
        return score_in_passes(model.network, sequences, max_tokens, cache)


@pytest.fixture
def threads_used(monkeypatch):
    used = []

    def noted(*arguments):
        used.append((threading.current_thread().name.split("_")[0], torch.get_num_threads(), len(arguments[1])))
        return score_in_passes(*arguments)

    monkeypatch.setattr(lanes, "score_in_passes", noted)
    return used


def test_five_groups_are_two_for_each_lane_and_one_for_all_threads_together(model, threads_used):
    sequences = groups(0)
    found = model.score_batch(sequences, max_tokens=2000)
    lane, together = sorted(threads_used[:2]), threads_used[2]
    assert [(name, number, count) for name, number, count in lane] == [("rm-lane", 1, 8)] * 2
    assert together == ("MainThread", 2, 4)
    expected = in_one_lane(model, sequences, 2000)
    np.testing.assert_allclose(found.rewards, expected.rewards, atol=0.02 * expected.rewards.std())
    np.testing.assert_allclose(found.computed_tokens, expected.computed_tokens)


def test_a_single_group_is_computed_by_all_threads_together(model, threads_used):
    model.score_batch(groups(1, count=1), max_tokens=2000)
    assert threads_used == [("MainThread", 2, 4)]


@pytest.mark.parametrize("has_cache", [True, False])
def test_a_large_group_is_divided_behind_its_beginning(model, threads_used, monkeypatch, has_cache):
    monkeypatch.setattr(lanes, "TOKENS_TO_SPLIT", 50)
    sequences = groups(7, count=1, size=8, prompt=65)
    sequences += [sequences[3]]
    cache = PrefixCache(10**8) if has_cache else None
    found = model.score_batch(sequences, max_tokens=2000, cache=cache)
    assert [(name, count) for name, _, count in threads_used[:1]] == [("MainThread", 1)]
    assert sorted((name, count) for name, _, count in threads_used[1:]) == [("rm-lane", 4), ("rm-lane", 5)]
    assert found.computed_tokens.sum() == 64 + 8 * (1 + 12)
    assert found.cached_tokens == 0
    expected = in_one_lane(model, sequences, 2000)
    np.testing.assert_allclose(found.rewards, expected.rewards, atol=0.02 * expected.rewards.std())
    threads_used.clear()
    model.score_batch(groups(7, count=1, size=8, prompt=78), max_tokens=2000)
    assert [name for name, _, _ in threads_used] == ["MainThread"], "14 tokens of each answer would be computed again"


def test_no_answer_is_kept_where_there_is_no_cache(model, monkeypatch):
    made = []

    class Noted(PrefixCache):
        def __init__(self, max_bytes):
            super().__init__(max_bytes)
            made.append(self)

    monkeypatch.setattr(lanes, "PrefixCache", Noted)
    monkeypatch.setattr(lanes, "TOKENS_TO_SPLIT", 50)
    model.score_batch(groups(8, count=1, size=8, prompt=32, answer=60), max_tokens=2000)
    assert [len(cache) for cache in made] == [1], "the prompt alone"


def test_a_prompt_that_the_cache_has_no_room_for_is_computed_once(model, threads_used, monkeypatch):
    monkeypatch.setattr(lanes, "TOKENS_TO_SPLIT", 50)
    cache = PrefixCache(10**8)
    model.score_batch(groups(9, count=1, size=2, prompt=32), max_tokens=2000, cache=cache)
    cache.max_bytes = cache.num_bytes  # that of about 32 tokens
    threads_used.clear()
    sequences = groups(10, count=1, size=8, prompt=64)
    found = model.score_batch(sequences, max_tokens=2000, cache=cache)
    assert [(name, count) for name, _, count in threads_used] == [("MainThread", 8)]
    assert found.computed_tokens.sum() == 64 + 8 * 12
    assert found.cached_tokens == 0


def test_siblings_under_a_cached_prompt_go_to_different_lanes(model, threads_used):
    sequences = groups(2, count=1, size=8, prompt=64)
    cache = PrefixCache(10**8)
    model.score_batch([sequences[0][:65]], max_tokens=2000, cache=cache)
    threads_used.clear()
    found = model.score_batch(sequences, max_tokens=2000, cache=cache)
    assert [count for _, _, count in threads_used] == [4, 4]
    assert found.computed_tokens.sum() == 8 * 12
    assert found.cached_tokens == 8 * 64


def test_equal_sequences_are_computed_once_and_each_has_its_reward_in_its_place(model):
    sequences = groups(3)
    order = np.random.default_rng(0).permutation(2 * len(sequences)) % len(sequences)
    found = model.score_batch([sequences[index] for index in order], max_tokens=2000)
    expected = in_one_lane(model, sequences, 2000)
    np.testing.assert_allclose(found.rewards, expected.rewards[order], atol=0.02 * expected.rewards.std())
    assert found.computed_tokens.sum() == pytest.approx(expected.computed_tokens.sum())


def test_a_failing_lane_is_raised_when_the_others_have_ended(model, monkeypatch):
    ended = []
    others_wait = threading.Event()

    def fails_once(network, sequences, *rest):
        if not others_wait.is_set():
            others_wait.set()
            raise MemoryError("no memory")
        result = score_in_passes(network, sequences, *rest)
        ended.append(len(sequences))
        return result

    monkeypatch.setattr(lanes, "score_in_passes", fails_once)
    with pytest.raises(MemoryError, match="no memory"):
        model.score_batch(groups(4, count=4), max_tokens=2000)
    assert ended == [8]
    assert np.isfinite(model.score_batch(groups(4, count=4), max_tokens=2000).rewards).all()


def test_a_failed_lane_keeps_nothing_of_its_forward(model, monkeypatch):
    kept = []

    def fails(*_):
        activations = torch.zeros(1000)
        kept.append(weakref.ref(activations))
        raise MemoryError("no memory")

    monkeypatch.setattr(lanes, "score_in_passes", fails)
    gc.disable()  # a cycle would keep the memory until the collector comes by
    try:
        for count in (2, 4):
            with contextlib.suppress(MemoryError):
                model.score_batch(groups(4, count=count), max_tokens=2000)
        assert len(kept) == 4
        assert [reference() for reference in kept] == [None] * 4
    finally:
        gc.enable()


def test_a_lane_does_not_change_how_many_threads_others_have(model):
    model.score_batch(groups(5), max_tokens=2000)
    counts = []
    thread = threading.Thread(target=lambda: counts.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert [torch.get_num_threads(), *counts] == [2, 2]


def test_a_small_budget_is_not_divided(model, monkeypatch):
    monkeypatch.setattr(lanes, "TOKENS_OF_LANE", 2048)
    monkeypatch.setattr(Lanes, "_threads", lambda *_: pytest.fail("lanes were started"))
    assert np.isfinite(model.score_batch(groups(6), max_tokens=4095).rewards).all()


def test_units_hold_what_shares_a_prefix():
    a, b = [1] * 40, [2] * 40
    sequences = [[*a, 5], [*b, 6], [*a, 7], [*b, 6], [3]]
    assert units_of(sequences, None) == [([0, 2], 42), ([1, 3], 41), ([4], 1)]


@given(tokens=st.lists(st.integers(1, 3000), max_size=30), num_lanes=st.integers(2, 5))
def test_every_unit_is_divided_once_and_no_lane_gets_more_than_it_may(tokens, num_lanes):
    parts, together = divide(tokens, num_lanes, 2000)
    assert sorted([*together, *(number for lane in parts for number in lane)]) == list(range(len(tokens)))
    assert all(tokens[number] <= 2000 for lane in parts for number in lane)
    assert set(together) >= {number for number, count in enumerate(tokens) if count > 2000}
    loads = [sum(tokens[number] for number in lane) for lane in parts]
    small = [count for count in tokens if count <= 2000]
    assert max(loads) <= sum(small) / num_lanes + max(small, default=0)
