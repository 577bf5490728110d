"""Compare two models on the same pairs, and score best-of-N sets.

Invariant: as in ``metrics.py``, ties count a share and prompts, not pairs, are resampled.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rm_train.metrics import Floats, Interval, Rewards, correlation, finite_array, mean_interval, sum_by_prompt


@dataclass(frozen=True, slots=True)
class PairedComparison:
    """Two models judged on the same pairs."""

    difference: Interval
    """Accuracy of the second minus that of the first."""
    only_first_right: int
    only_second_right: int
    p_value: float
    """Two-sided, by flipping signs of whole prompts: how often chance alone gives so large a difference."""


@dataclass(frozen=True, slots=True)
class LinearMap:
    """new ≈ scale · old + offset."""

    scale: float
    offset: float
    correlation: float | None


@dataclass(frozen=True, slots=True)
class BestOfPrompt:
    """One prompt's candidates: ``rewards`` [N] and which of them are right, bool [N]."""

    rewards: Sequence[float]
    correct: Sequence[bool]


def compare_correctness(
    first: Rewards,
    second: Rewards,
    prompts: Sequence[str],
    *,
    weights: Rewards | None = None,
    samples: int = 10_000,
    seed: int = 0,
) -> PairedComparison:
    """Compare the ``metrics.correctness`` of two models on the same pairs in the same order.

    ``weights`` weigh the difference and its p value; the counts are of pairs.
    """
    one, two = finite_array(first, "first"), finite_array(second, "second")
    if one.shape != two.shape:
        raise ValueError(f"{len(one)} pairs of the first model, {len(two)} of the second")
    gain = two - one
    interval = mean_interval(gain, prompts, weights=weights, seed=seed)
    sums, _ = sum_by_prompt(gain, prompts, weights)
    sums = sums[sums != 0]
    observed = abs(float(sums.sum()))
    rng = np.random.default_rng(seed)
    as_large = 0
    for _ in range(samples):
        signs = rng.integers(0, 2, size=len(sums)) * 2 - 1
        as_large += abs(float(signs @ sums)) >= observed - 1e-9
    p_value = (as_large + 1) / (samples + 1)
    return PairedComparison(interval, int((gain < 0).sum()), int((gain > 0).sum()), p_value)


def linear_map(old: Rewards, new: Rewards) -> LinearMap:
    """Least squares scale and offset that turn one model's rewards into another's, answers in the same order."""
    x, y = finite_array(old, "old"), finite_array(new, "new")
    if x.shape != y.shape:
        raise ValueError(f"{len(x)} old rewards for {len(y)} new ones")
    centred = x - x.mean()
    spread = float(centred @ centred)
    scale = float(centred @ y) / spread if spread else 0.0
    return LinearMap(scale, float(y.mean()) - scale * float(x.mean()), correlation(x, y))


def best_of_n(prompts: Sequence[BestOfPrompt]) -> list[float]:
    """Score each prompt as RewardBench 2 does: 1 when a right answer alone has the highest reward, else 0.

    When k answers share the highest reward, the score is the share of right ones among them (with one right answer:
    1/k). Mean over prompts = best-of-N accuracy.
    """
    scores = []
    for prompt in prompts:
        rewards = finite_array(prompt.rewards, "rewards")
        right = _right(prompt, len(rewards))
        scores.append(float(right[rewards == rewards.max()].mean()))
    return scores


def _right(prompt: BestOfPrompt, size: int) -> Floats:
    right = np.asarray(prompt.correct, dtype=np.float64)
    if len(right) != size:
        raise ValueError(f"{len(right)} right-or-wrong marks for {size} rewards")
    if right.all() or not right.any():
        raise ValueError("a best-of-N prompt needs a right and a wrong answer")
    return right


def ties_score(reference: Sequence[BestOfPrompt], tied: Sequence[BestOfPrompt]) -> float:
    """RewardBench 2's score of its Ties subset, in [-0.01, 1.01].

    ``tied[i]`` asks question i with many right answers, ``reference[i]`` with one. With a right-wrong gap g (worst
    right minus best wrong) and the spread s among right answers (best minus worst): 0.3·share of tied prompts with
    g > 0, 0.3·share of reference prompts with g > 0, 0.2·share with g_tied > s, 0.2·share with min(g_ref, g_tied) > s,
    0.01·mean of tanh(min(g_ref, g_tied)/s - 1) (0 where that is 0/0). Source: Malik et al. 2025 and its code.
    """
    if len(reference) != len(tied) or not tied:
        raise ValueError(f"{len(reference)} reference prompts for {len(tied)} tied ones; each needs its partner")
    gap_reference = np.array([_gap_and_spread(prompt)[0] for prompt in reference])
    gap_tied, spread = np.array([_gap_and_spread(prompt) for prompt in tied]).T
    smaller = np.minimum(gap_reference, gap_tied)
    with np.errstate(divide="ignore", invalid="ignore"):
        certainty = np.nan_to_num(np.tanh(smaller / spread - 1), nan=0.0)
    return float(
        0.3 * (gap_tied > 0).mean()
        + 0.3 * (gap_reference > 0).mean()
        + 0.2 * (gap_tied > spread).mean()
        + 0.2 * (smaller > spread).mean()
        + 0.01 * certainty.mean()
    )


def _gap_and_spread(prompt: BestOfPrompt) -> tuple[float, float]:
    rewards = finite_array(prompt.rewards, "rewards")
    right = _right(prompt, len(rewards)) > 0
    return float(rewards[right].min() - rewards[~right].max()), float(rewards[right].max() - rewards[right].min())
