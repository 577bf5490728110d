"""Metrics on rewards: every expected value is derived by hand in its test's docstring."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rm_train import metrics
from rm_train.comparisons import BestOfPrompt, best_of_n, compare_correctness, linear_map, ties_score

LN2 = math.log(2)


def test_tie_counts_one_half() -> None:
    """Right, wrong, tie, tie: (1 + 0 + 1/2 + 1/2) / 4 = 1/2."""
    assert metrics.correctness([2, 1, 3, 0], [1, 2, 3, 0]).tolist() == [1.0, 0.0, 0.5, 0.5]
    assert metrics.accuracy([2, 1, 3, 0], [1, 2, 3, 0]) == 0.5


def test_pair_that_half_prefer_counts_one_half_whoever_wins() -> None:
    """Right, wrong, right with the labels 1, 1, 1/2: (1 + 0 + 1/2) / 3; a label just above one half has a winner."""
    assert metrics.correctness([1, 0, 1], [0, 1, 0], [1, 1, 0.5]).tolist() == [1.0, 0.0, 0.5]
    assert metrics.accuracy([1, 0, 1], [0, 1, 0], [1, 1, 0.5]) == pytest.approx(0.5)
    assert metrics.accuracy([1], [0], [0.51]) == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rewards_that_are_no_numbers_are_an_error(bad: float) -> None:
    with pytest.raises(ValueError, match="rejected: 1 of 2 rewards are NaN or infinite"):
        metrics.accuracy([1, 2], [0, bad])


def test_arrays_of_different_length_or_none_are_an_error() -> None:
    with pytest.raises(ValueError, match="2 chosen rewards for 1 rejected"):
        metrics.accuracy([1, 2], [0])
    with pytest.raises(ValueError, match="at least one pair"):
        metrics.accuracy([], [])


def test_interval_resamples_prompts_and_not_pairs() -> None:
    """Two prompts, one with 50 right pairs and one with 50 wrong: a resample draws two prompts, so its accuracy is 0,
    1/2 or 1 with probability 1/4, 1/2, 1/4, and the 95 % interval is [0, 1]. Resampling 100 pairs would give about
    0.4 to 0.6.
    """
    chosen, prompts = [1] * 50 + [-1] * 50, ["a"] * 50 + ["b"] * 50
    interval = metrics.accuracy_interval(chosen, [0] * 100, prompts)
    assert (interval.value, interval.low, interval.high) == (0.5, 0.0, 1.0)


def test_interval_is_near_the_normal_one_for_single_pairs() -> None:
    """400 prompts with one pair each, 300 right: standard error sqrt(0.75 · 0.25 / 400) = 0.02165, so about
    0.75 ± 1.96 · 0.02165 = [0.7076, 0.7924].
    """
    interval = metrics.accuracy_interval([1] * 300 + [-1] * 100, [0] * 400, [str(i) for i in range(400)])
    assert interval.low == pytest.approx(0.7076, abs=0.006)
    assert interval.high == pytest.approx(0.7924, abs=0.006)


def test_weights_weigh_accuracy_and_interval() -> None:
    """A prompt of three pairs, all wrong, that weigh 1/3 each, and one with a right pair: (0 + 1) / 2. A resample draws
    the first twice, both, or the second twice: 0, 1/2 or 1. Unweighted it is 1/4, and 0, 1/4 or 1.
    """
    chosen, prompts, weights = [-1, -1, -1, 1], ["a", "a", "a", "b"], [1 / 3, 1 / 3, 1 / 3, 1]
    assert metrics.accuracy(chosen, [0] * 4, None, weights) == pytest.approx(0.5)
    interval = metrics.accuracy_interval(chosen, [0] * 4, prompts, weights=weights)
    assert (interval.value, interval.low, interval.high) == pytest.approx((0.5, 0.0, 1.0))
    sums, counts = metrics.sum_by_prompt(np.array([0.0, 0.0, 1.0, 1.0]), prompts, weights)
    assert (sums.tolist(), counts.tolist()) == (pytest.approx([1 / 3, 1]), pytest.approx([1, 1]))
    by_key = metrics.accuracy_by(["x", "x", "y", "x"], chosen, [0] * 4, weights=weights)
    assert by_key["x"] == metrics.Share(pytest.approx(1 / (2 / 3 + 1)), 3)  # type: ignore[arg-type]
    lengths = metrics.length_report(chosen, [0] * 4, [9] * 4, [5] * 4, weights=weights)
    assert lengths.chosen_longer == metrics.Share(pytest.approx(0.5), 4)  # type: ignore[arg-type]


def test_weights_weigh_the_difference_of_two_models() -> None:
    """The second model gains all three pairs of one row and loses another row's only pair: 1 - 1 rows of 2."""
    first, second, prompts = [0, 0, 0, 1], [1, 1, 1, 0], ["a", "a", "a", "b"]
    found = compare_correctness(first, second, prompts, weights=[1 / 3, 1 / 3, 1 / 3, 1])
    assert found.difference.value == pytest.approx(0.0)
    assert (found.only_first_right, found.only_second_right, found.p_value) == (1, 3, 1.0)


def test_interval_is_the_same_for_the_same_seed() -> None:
    rng = np.random.default_rng(0)
    chosen, rejected, prompts = rng.normal(size=60), rng.normal(size=60), [str(i % 20) for i in range(60)]
    first, again = (metrics.accuracy_interval(chosen, rejected, prompts, seed=3) for _ in range(2))
    assert first == again


def test_log_loss_of_equal_rewards_is_ln_2() -> None:
    assert metrics.log_loss([1, 5], [1, 5]) == pytest.approx(LN2)


def test_log_loss_values_with_temperature_labels_and_weights() -> None:
    """d = ln 3: σ(d) = 3/4, so the loss is -ln(3/4); with the label 1/2 it is -(ln 3/4 + ln 1/4)/2.
    With T = 2 and d = 2 ln 3 the loss is the first again. Weights 3 and 1 of losses -ln(3/4) and ln 2 (d = 0):
    (3 · -ln(3/4) + ln 2) / 4.
    """
    d, right, wrong = math.log(3), -math.log(3 / 4), -math.log(1 / 4)
    assert metrics.log_loss([d], [0]) == pytest.approx(right)
    assert metrics.log_loss([d], [0], labels=[0.5]) == pytest.approx((right + wrong) / 2)
    assert metrics.log_loss([2 * d], [0], temperature=2) == pytest.approx(right)
    assert metrics.log_loss([d, 0], [0, 0], weights=[3, 1]) == pytest.approx((3 * right + LN2) / 4)


def test_log_loss_of_huge_margins_is_finite() -> None:
    """Wrong by 1e4: log(1 + exp(1e4)) = 1e4."""
    assert metrics.log_loss([0], [1e4]) == pytest.approx(1e4)
    assert metrics.log_loss([1e4], [0]) == 0.0


def test_temperature_of_a_margin_that_is_right_three_times_in_four() -> None:
    """|d| = 2 everywhere, right in 3 of 4: the loss is least where σ(2/T) = 3/4, so 2/T = ln 3, T = 2/ln 3 = 1.8205."""
    assert metrics.fit_temperature([2, 2, 2, 0], [0, 0, 0, 2]) == pytest.approx(2 / math.log(3), rel=1e-6)


def test_temperature_scales_with_the_rewards() -> None:
    rng = np.random.default_rng(0)
    chosen, rejected = rng.normal(0.5, 1, 200), rng.normal(0, 1, 200)
    one = metrics.fit_temperature(chosen, rejected)
    assert metrics.fit_temperature(1000 * chosen, 1000 * rejected) == pytest.approx(1000 * one, rel=1e-6)


def test_temperature_without_a_minimum_is_the_nearest_bound() -> None:
    """Always right with d = 3: the loss falls as T goes to 0; the bound is 3/100. Always wrong: T goes to 3/0.01."""
    assert metrics.fit_temperature([3, 3], [0, 0]) == pytest.approx(0.03)
    assert metrics.fit_temperature([0, 0], [3, 3]) == pytest.approx(300)
    assert metrics.fit_temperature([1, 1], [1, 1]) == 1.0


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=2, max_size=30))
def test_fitted_temperature_is_no_worse_than_its_neighbours(rewards: list[tuple[float, float]]) -> None:
    chosen, rejected = zip(*rewards, strict=True)
    if max(abs(a - b) for a, b in rewards) < 1e-3:
        return
    best = metrics.fit_temperature(chosen, rejected)
    scale = math.sqrt(sum((a - b) ** 2 for a, b in rewards) / len(rewards))
    at_best = metrics.log_loss(chosen, rejected, temperature=best)
    for factor in (0.9, 1.1):
        other = min(max(best * factor, scale / 100), scale * 100)
        assert at_best <= metrics.log_loss(chosen, rejected, temperature=other) + 1e-9


def test_weights_of_the_temperature_count_as_repetition() -> None:
    """Differences 1 (right) and −1 (wrong); three right ones for each wrong: σ(1/T) = 3/4, so 1/T = ln 3."""
    expected = pytest.approx(1 / math.log(3), rel=1e-6)
    assert metrics.fit_temperature([1, 1, 1, 0], [0, 0, 0, 1]) == expected
    assert metrics.fit_temperature([1, 0], [0, 1], weights=[3, 1]) == expected
    assert metrics.fit_temperature([1], [0], labels=[0.75]) == expected


def test_pairs_that_all_weigh_nothing_are_counted_alike() -> None:
    chosen, rejected, nothing = [1, 1, 1, 0], [0, 0, 0, 1], [0] * 4
    for measure in (metrics.log_loss, metrics.fit_temperature, metrics.expected_calibration_error, metrics.reliability):
        assert measure(chosen, rejected, weights=nothing) == measure(chosen, rejected)


def test_reliability_and_calibration_error() -> None:
    """d = ln 3 four times (confidence 0.75), right in 2 of 4: in ten bins of width 0.05 from 0.5, 0.75 opens bin 5;
    accuracy 0.5, gap 0.25. One pair with d = 0: confidence 0.5, bin 0, accuracy 1/2, gap 0. ECE = 4/5 · 0.25 = 0.2.
    """
    d = math.log(3) + 1e-9
    table = metrics.reliability([d, d, 0, 0, 0], [0, 0, d, d, 0])
    assert [row.pairs for row in table] == [1, 0, 0, 0, 0, 4, 0, 0, 0, 0]
    assert table[5].accuracy == 0.5
    assert table[5].confidence == pytest.approx(0.75)
    assert (table[5].low, table[5].high) == (0.75, 0.8)
    assert table[1].accuracy is None
    assert metrics.expected_calibration_error([d, d, 0, 0, 0], [0, 0, d, d, 0]) == pytest.approx(0.2)


def test_calibration_weighs_pairs_and_counts_shares() -> None:
    """d = ln 3 and −ln 3: confidence 3/4 in both. Label 0.9 where the model is right (weight 3): 0.9 agree; label 0.8
    where it is wrong (weight 1): 0.2 agree. Accuracy (3·0.9 + 0.2)/4 = 0.725, gap 0.025; an even pair of weight 4 at
    confidence 1 (d = 100): accuracy 1/2, gap 1/2. ECE = (4·0.025 + 4·0.5)/8 = 0.2625.
    """
    d = math.log(3) + 1e-9
    chosen, rejected, labels, weights = [d, 0, 100], [0, d, 0], [0.9, 0.8, 0.5], [3, 1, 4]
    table = metrics.reliability(chosen, rejected, labels=labels, weights=weights)
    assert [row.pairs for row in table] == [0, 0, 0, 0, 0, 2, 0, 0, 0, 1]
    assert (table[5].accuracy, table[9].accuracy) == (pytest.approx(0.725), pytest.approx(0.5))
    error = metrics.expected_calibration_error(chosen, rejected, labels=labels, weights=weights)
    assert error == pytest.approx(0.2625, abs=1e-6)


def test_certain_pairs_belong_to_the_last_bin() -> None:
    assert metrics.reliability([100], [0])[-1].pairs == 1


def test_summary_of_rewards() -> None:
    """Rewards 1, 3, 1, -1: mean 1, squared deviations 0, 4, 0, 4, std sqrt(2); margins 0 and 4, mean 2."""
    summary = metrics.summarise([1, 3], [1, -1])
    assert (summary.mean, summary.mean_margin) == (1.0, 2.0)
    assert summary.std == pytest.approx(math.sqrt(2))


def test_accuracy_by_key_leaves_out_pairs_without_one() -> None:
    """Key a: right and tie, 3/4 of 2; key b: wrong, 0 of 1."""
    found = metrics.accuracy_by(["a", "b", None, "a"], [1, 0, 1, 1], [0, 1, 0, 1])
    assert found == {"a": metrics.Share(0.75, 2), "b": metrics.Share(0.0, 1)}


def test_length_report() -> None:
    """Rewards are lengths / 10, so both correlations are 1. Lengths (100, 95): 5 apart, within 10 % of 100: matched.
    (50, 100): not. Pair 1 right and chosen longer, pair 2 wrong and chosen shorter.
    """
    report = metrics.length_report([10, 5], [9.5, 10], [100, 50], [95, 100])
    assert report.reward_correlation == pytest.approx(1.0)
    assert report.margin_correlation == pytest.approx(1.0)
    assert report.matched == metrics.Share(1.0, 1)
    assert report.chosen_longer == metrics.Share(1.0, 1)
    assert report.chosen_shorter == metrics.Share(0.0, 1)


def test_correlation_of_a_constant_is_none() -> None:
    assert metrics.correlation([1, 1], [1, 2]) is None
    assert metrics.length_report([1, 0], [0, 1], [5, 5], [5, 5]).matched == metrics.Share(0.5, 2)


# ------------------------------------------------------------------ comparisons


def test_paired_comparison_counts_and_difference() -> None:
    """Second right where first wrong: 3; the reverse: 1; difference (3 - 1) / 8 = 0.25. The four differing prompts
    have sums 1, 1, 1, -1; of the 16 sign patterns |sum| ≥ 2 for all but the 6 balanced ones: p = 10/16.
    """
    first, second = [1, 1, 1, 0, 0, 0, 1, 0], [1, 1, 0, 1, 1, 1, 1, 0]
    result = compare_correctness(first, second, [str(i) for i in range(8)])
    assert (result.only_first_right, result.only_second_right) == (1, 3)
    assert result.difference.value == 0.25
    assert result.p_value == pytest.approx(10 / 16, abs=0.02)


def test_equal_models_differ_by_nothing() -> None:
    result = compare_correctness([1, 0, 0.5], [1, 0, 0.5], ["a", "b", "c"])
    assert (result.difference.value, result.difference.low, result.difference.high, result.p_value) == (0, 0, 0, 1)


def test_pairs_of_one_prompt_are_no_independent_evidence() -> None:
    """All 20 gains belong to one prompt: its sign is + or - with probability 1/2, |sum| is always 20, so p = 1."""
    assert compare_correctness([0] * 20, [1] * 20, ["same"] * 20).p_value == 1.0
    assert compare_correctness([0] * 20, [1] * 20, [str(i) for i in range(20)]).p_value < 0.001


def test_scale_and_offset_between_two_models() -> None:
    """new = 2 · old - 1 exactly."""
    found = linear_map([0, 1, 2], [-1, 1, 3])
    assert (found.scale, found.offset) == (2.0, -1.0)
    assert found.correlation == pytest.approx(1.0)
    assert linear_map([1, 1], [2, 4]).scale == 0.0


def test_best_of_n_gives_a_shared_first_place_its_share() -> None:
    """Right answer alone on top: 1. Shared by two: 1/2. By all four: 1/4. Below: 0."""
    right = [True, False, False, False]
    rewards: list[list[float]] = [[3, 1, 2, 0], [3, 3, 2, 0], [1, 1, 1, 1], [0, 1, 0, 0]]
    assert best_of_n([BestOfPrompt(r, right) for r in rewards]) == [1.0, 0.5, 0.25, 0.0]


def test_best_of_n_needs_right_and_wrong_answers() -> None:
    with pytest.raises(ValueError, match="needs a right and a wrong answer"):
        best_of_n([BestOfPrompt([1, 2], [True, True])])
    with pytest.raises(ValueError, match="1 right-or-wrong marks for 2 rewards"):
        best_of_n([BestOfPrompt([1, 2], [True])])


def test_ties_score_of_one_question() -> None:
    """Tied: right 5 and 4, wrong 1: gap 3, spread 1. Reference: right 5, wrong 3: gap 2. Both gaps positive (0.6),
    gap 3 > spread 1 (0.2), min(2, 3) = 2 > 1 (0.2), tanh(2/1 - 1) = 0.76159 · 0.01. Sum 1.0076159.
    """
    tied, reference = BestOfPrompt([5, 4, 1], [True, True, False]), BestOfPrompt([5, 3], [True, False])
    assert ties_score([reference], [tied]) == pytest.approx(1.0 + 0.01 * math.tanh(1))


def test_ties_score_of_a_failing_model() -> None:
    """Tied: right 5 and 1, wrong 2: gap -1, spread 4. Reference right 0, wrong 1: gap -1. Nothing but
    0.01 · tanh(-1/4 - 1).
    """
    tied, reference = BestOfPrompt([5, 1, 2], [True, True, False]), BestOfPrompt([0, 1], [True, False])
    assert ties_score([reference], [tied]) == pytest.approx(0.01 * math.tanh(-1.25))


def test_metrics_take_float32_arrays() -> None:
    chosen: Any = np.array([1, 2], dtype=np.float32)
    assert metrics.accuracy(chosen, np.zeros(2, dtype=np.float32)) == 1.0
