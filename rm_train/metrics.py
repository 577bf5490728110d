"""What the rewards of pairs say about a model: pure functions on arrays.

Invariant: a tie counts one half everywhere, intervals resample prompts and not pairs, and NaN is an error, never a
number. Arrays are float64 [N] (float32 is accepted), one entry for each pair, unless a docstring says otherwise.
``weights`` weigh a mean (default: every pair alike).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Rewards = npt.ArrayLike


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Share:
    """Accuracy on part of the pairs; None where there are none."""

    accuracy: float | None
    pairs: int


@dataclass(frozen=True, slots=True)
class ReliabilityBin:
    """Pairs whose confidence (the larger of p and 1-p) lies in [low, high): mean confidence against accuracy."""

    low: float
    high: float
    pairs: int
    confidence: float | None
    accuracy: float | None


@dataclass(frozen=True, slots=True)
class RewardSummary:
    """Spread of all rewards, chosen and rejected, and the mean difference between the two."""

    mean: float
    std: float
    mean_margin: float


@dataclass(frozen=True, slots=True)
class LengthReport:
    """How reward and accuracy go with the length of the answers."""

    reward_correlation: float | None
    """Pearson correlation of reward and length over all answers; None when one of them is constant."""
    margin_correlation: float | None
    """The same of the differences within pairs, which prompts of different kind cannot disturb."""
    matched: Share
    """Pairs whose lengths differ by at most the tolerance, as a share of the longer."""
    chosen_longer: Share
    chosen_shorter: Share


def _checked(chosen: Rewards, rejected: Rewards) -> tuple[Floats, Floats]:
    first, second = finite_array(chosen, "chosen"), finite_array(rejected, "rejected")
    if first.shape != second.shape:
        raise ValueError(f"{len(first)} chosen rewards for {len(second)} rejected ones")
    return first, second


def finite_array(values: Rewards, name: str) -> Floats:
    """Check that ``values`` is float64 [N] with N > 0 and no NaN or infinity; raises ValueError."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not array.size:
        raise ValueError(f"{name}: needs one reward for each of at least one pair, not shape {array.shape}")
    bad = int((~np.isfinite(array)).sum())
    if bad:
        raise ValueError(f"{name}: {bad} of {array.size} rewards are NaN or infinite")
    return array


def _shares(labels: Rewards | None, size: int) -> Floats:
    return np.ones(size) if labels is None else finite_array(labels, "labels")


def _importance(weights: Rewards | None, size: int) -> Floats:
    """The weights, or one for each pair where there are none or none weighs anything."""
    found = np.ones(size) if weights is None else finite_array(weights, "weights")
    return found if found.any() else np.ones(size)


def correctness(chosen: Rewards, rejected: Rewards, labels: Rewards | None = None) -> Floats:
    """1 where the chosen answer has the higher reward, 1/2 where both are equal, else 0. [N]

    ``labels`` are the shares that prefer chosen; where that is exactly 1/2, neither answer is the better one, and the
    pair counts 1/2.
    """
    first, second = _checked(chosen, rejected)
    right = 0.5 * (1.0 + np.sign(first - second))
    return right if labels is None else np.where(finite_array(labels, "labels") == 0.5, 0.5, right)


def accuracy(
    chosen: Rewards, rejected: Rewards, labels: Rewards | None = None, weights: Rewards | None = None
) -> float:
    """Mean correctness."""
    return _mean(correctness(chosen, rejected, labels), weights)


def _mean(values: Floats, weights: Rewards | None) -> float:
    return float(np.average(values, weights=_importance(weights, len(values))))


def accuracy_interval(
    chosen: Rewards,
    rejected: Rewards,
    prompts: Sequence[str],
    labels: Rewards | None = None,
    *,
    weights: Rewards | None = None,
    confidence: float = 0.95,
    samples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Accuracy with a bootstrap percentile interval.

    ``prompts`` names each pair's prompt; whole prompts are drawn with replacement, because pairs of one prompt are not
    independent.
    """
    right = correctness(chosen, rejected, labels)
    return mean_interval(right, prompts, weights=weights, confidence=confidence, samples=samples, seed=seed)


def mean_interval(
    values: Rewards,
    prompts: Sequence[str],
    *,
    weights: Rewards | None = None,
    confidence: float = 0.95,
    samples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Mean of ``values`` with a bootstrap percentile interval over prompts."""
    array = finite_array(values, "values")
    if len(prompts) != len(array):
        raise ValueError(f"{len(prompts)} prompts for {len(array)} pairs")
    sums, counts = sum_by_prompt(array, prompts, weights)
    rng = np.random.default_rng(seed)
    means = np.empty(samples)
    for sample in range(samples):  # one at a time: all at once would be samples x prompts numbers
        drawn = rng.integers(len(sums), size=len(sums))
        means[sample] = sums[drawn].sum() / counts[drawn].sum()
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(_mean(array, weights), float(low), float(high))


def sum_by_prompt(values: Floats, prompts: Sequence[str], weights: Rewards | None = None) -> tuple[Floats, Floats]:
    """Weighted sum of values, and sum of weights, of each distinct prompt."""
    _, group = np.unique(np.asarray(prompts), return_inverse=True)
    importance = _importance(weights, len(values))
    sums = np.asarray(np.bincount(group, importance * values), dtype=np.float64)
    return sums, np.asarray(np.bincount(group, importance), dtype=np.float64)


def log_loss(
    chosen: Rewards,
    rejected: Rewards,
    *,
    temperature: float = 1.0,
    labels: Rewards | None = None,
    weights: Rewards | None = None,
) -> float:
    """Mean Bradley-Terry loss in nats: -s log σ(d/T) - (1-s) log σ(-d/T), d = chosen - rejected.

    ``labels`` are the shares s that prefer chosen (default 1), ``weights`` weigh the mean (default 1; pairs that all
    weigh nothing are counted alike).
    """
    first, second = _checked(chosen, rejected)
    margins = (first - second) / temperature
    losses = np.logaddexp(0.0, -margins) + (1.0 - _shares(labels, len(margins))) * margins
    return float(np.average(losses, weights=_importance(weights, len(margins))))


def fit_temperature(
    chosen: Rewards, rejected: Rewards, *, labels: Rewards | None = None, weights: Rewards | None = None
) -> float:
    """The T that minimises ``log_loss`` under the same labels and weights; above 1 the model is too sure.

    The loss is convex in 1/T. Where it has no minimum (every pair right, or no better than chance) the answer is the
    nearest bound: T is kept within [0.01, 100] times the root mean square of the differences. Equal rewards everywhere
    give 1.
    """
    first, second = _checked(chosen, rejected)
    margins = first - second
    shares, importance = _shares(labels, len(margins)), _importance(weights, len(margins))
    scale = float(np.sqrt(np.mean(margins**2)))
    if scale == 0:
        return 1.0
    margins = margins / scale

    def slope(inverse: float) -> float:
        """Derivative of the loss by 1/T (in units of the scale)."""
        return float(np.mean(importance * margins * (_sigmoid(inverse * margins) - shares)))

    low, high = 0.01, 100.0  # of 1/T
    if slope(low) >= 0:
        return scale / low
    if slope(high) <= 0:
        return scale / high
    for _ in range(60):  # bisect on a logarithmic scale
        middle = float(np.sqrt(low * high))
        low, high = (low, middle) if slope(middle) > 0 else (middle, high)
    return scale / float(np.sqrt(low * high))


def _sigmoid(values: Floats) -> Floats:
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * values)), dtype=np.float64)


def reliability(
    chosen: Rewards,
    rejected: Rewards,
    *,
    temperature: float = 1.0,
    labels: Rewards | None = None,
    weights: Rewards | None = None,
    bins: int = 10,
) -> list[ReliabilityBin]:
    """Equal-width bins of the confidence max(p, 1-p), p = σ(d/T), from 0.5 to 1 (1 belongs to the last).

    The accuracy of a pair is the share that prefers what the model prefers: of the ``labels``, the shares that prefer
    chosen (default 1). ``weights`` weigh the means of a bin, not the number of its pairs.
    """
    place, confidence, right, importance = _calibration(chosen, rejected, temperature, labels, weights, bins)
    found = []
    for number in range(bins):
        inside = place == number
        pairs = int(inside.sum())
        weighed = _importance(importance[inside], pairs) if pairs else None
        found.append(
            ReliabilityBin(
                0.5 + number / (2 * bins),
                0.5 + (number + 1) / (2 * bins),
                pairs,
                float(np.average(confidence[inside], weights=weighed)) if pairs else None,
                float(np.average(right[inside], weights=weighed)) if pairs else None,
            )
        )
    return found


def _calibration(
    chosen: Rewards,
    rejected: Rewards,
    temperature: float,
    labels: Rewards | None,
    weights: Rewards | None,
    bins: int,
) -> tuple[npt.NDArray[np.int64], Floats, Floats, Floats]:
    """Of each pair: its bin, the model's confidence, the share that agrees with the model, the weight. [N] each."""
    first, second = _checked(chosen, rejected)
    probability = _sigmoid((first - second) / temperature)
    confidence = np.maximum(probability, 1.0 - probability)
    shares = _shares(labels, len(first))
    right = 0.5 + np.sign(first - second) * (shares - 0.5)
    place = np.minimum((confidence - 0.5) * 2 * bins, bins - 1).astype(np.int64)
    return place, confidence, right, _importance(weights, len(first))


def expected_calibration_error(
    chosen: Rewards,
    rejected: Rewards,
    *,
    temperature: float = 1.0,
    labels: Rewards | None = None,
    weights: Rewards | None = None,
    bins: int = 10,
) -> float:
    """Mean over pairs of |confidence - accuracy| of the pair's bin; labels and weights as in ``reliability``."""
    place, confidence, right, importance = _calibration(chosen, rejected, temperature, labels, weights, bins)
    gaps = np.bincount(place, importance * (confidence - right))
    return float(np.abs(gaps).sum() / importance.sum())


def summarise(chosen: Rewards, rejected: Rewards) -> RewardSummary:
    """Mean and standard deviation (ddof 0) over all 2N rewards, and the mean of chosen - rejected."""
    first, second = _checked(chosen, rejected)
    both = np.concatenate([first, second])
    return RewardSummary(float(both.mean()), float(both.std()), float((first - second).mean()))


def accuracy_by(
    keys: Sequence[str | None],
    chosen: Rewards,
    rejected: Rewards,
    labels: Rewards | None = None,
    weights: Rewards | None = None,
) -> dict[str, Share]:
    """Accuracy for each key (category, source, ...), most pairs first; pairs without a key are left out."""
    right = correctness(chosen, rejected, labels)
    importance = _importance(weights, len(right))
    groups: dict[str, list[int]] = {}
    for index, (key, _) in enumerate(zip(keys, right, strict=True)):
        if key is not None:
            groups.setdefault(key, []).append(index)
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    return {key: Share(_mean(right[inside], importance[inside]), len(inside)) for key, inside in ordered}


def length_report(
    chosen: Rewards,
    rejected: Rewards,
    chosen_lengths: Rewards,
    rejected_lengths: Rewards,
    labels: Rewards | None = None,
    *,
    weights: Rewards | None = None,
    tolerance: float = 0.1,
) -> LengthReport:
    """Relate rewards to the answers' lengths (in any one unit). ``weights`` weigh the accuracies alone."""
    first, second = _checked(chosen, rejected)
    long_first, long_second = _checked(chosen_lengths, rejected_lengths)
    right = correctness(first, second, labels)
    gap = long_first - long_second
    importance = _importance(weights, len(right))

    def part(inside: npt.NDArray[np.bool_]) -> Share:
        return Share(_mean(right[inside], importance[inside]) if inside.any() else None, int(inside.sum()))

    return LengthReport(
        correlation(np.concatenate([first, second]), np.concatenate([long_first, long_second])),
        correlation(first - second, gap),
        part(np.abs(gap) <= tolerance * np.maximum(long_first, long_second)),
        part(gap > 0),
        part(gap < 0),
    )


def correlation(first: Rewards, second: Rewards) -> float | None:
    """Pearson correlation; None when one side is constant or there are fewer than two values."""
    x, y = _checked(first, second)
    x, y = x - x.mean(), y - y.mean()
    size = float(np.sqrt((x @ x) * (y @ y)))
    return None if size == 0 else float(x @ y) / size
