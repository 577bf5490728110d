"""Rewards of evaluation pairs, and what they say about a model.

Invariant: every number of a report comes from one pair of arrays (rewards of chosen and of rejected answers), and the
accuracy of a model stands beside what length alone would get.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rm_core.checkpoint import Measured
from rm_core.model import RewardModel
from rm_train import metrics
from rm_train.baselines import answer_length, longer_wins, shorter_wins
from rm_train.data import prompt_key
from rm_train.encode import EncodedPair, count_truncated
from rm_train.scoring import score_sequences


@dataclass(frozen=True)
class Rewards:
    """Raw rewards, float64 [N] each, of N evaluation pairs."""

    chosen: np.ndarray
    rejected: np.ndarray

    @property
    def num_not_finite(self) -> int:
        """How many are NaN or infinite: no report can be made of them."""
        return int((~np.isfinite(self.chosen)).sum() + (~np.isfinite(self.rejected)).sum())

    @classmethod
    def interleave(cls, parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> "Rewards":
        """Put the shares of several processes together: process p scored pairs p, p + n, p + 2n, …"""
        sides = []
        for side in (0, 1):
            whole = np.zeros(sum(len(part[side]) for part in parts))
            for index, part in enumerate(parts):
                whole[index :: len(parts)] = part[side]
            sides.append(whole)
        return cls(*sides)


def score_pairs(
    model: RewardModel,
    encoded: Sequence[EncodedPair],
    *,
    max_tokens: int,
    progress: Callable[[int], None] = lambda count: None,
) -> Rewards:
    """Score both answers of every pair. ``progress`` is called with numbers of finished sequences."""
    sequences = [ids for item in encoded for ids in (item.chosen, item.rejected)]
    rewards = score_sequences(model, sequences, max_tokens=max_tokens, progress=progress).astype(np.float64)
    return Rewards(rewards[0::2], rewards[1::2])


def quick_metrics(rewards: Rewards) -> dict[str, float]:
    """What is logged during training."""
    return {
        "loss": metrics.log_loss(rewards.chosen, rewards.rejected),
        "accuracy": metrics.accuracy(rewards.chosen, rewards.rejected),
        "margin": float((rewards.chosen - rewards.rejected).mean()),
    }


def full_report(rewards: Rewards, encoded: Sequence[EncodedPair]) -> dict[str, Any]:
    """Everything that ``rm-train eval`` prints and a checkpoint records, as plain JSON values."""
    chosen, rejected = rewards.chosen, rewards.rejected
    pairs = [item.pair for item in encoded]
    interval = metrics.accuracy_interval(chosen, rejected, [prompt_key(pair) for pair in pairs])
    temperature = metrics.fit_temperature(chosen, rejected)
    summary = metrics.summarise(chosen, rejected)
    lengths = [[answer_length(pair)[side] for pair in pairs] for side in (0, 1)]
    report = {
        "pairs": len(pairs),
        "truncated": count_truncated(encoded),
        "accuracy": asdict(interval),
        "longer_wins": longer_wins(pairs),
        "shorter_wins": shorter_wins(pairs),
        "log_loss": metrics.log_loss(chosen, rejected),
        "calibration": {
            "temperature": temperature,
            "log_loss": metrics.log_loss(chosen, rejected, temperature=temperature),
            "expected_error": metrics.expected_calibration_error(chosen, rejected, temperature=temperature),
            "reliability": [asdict(bin_) for bin_ in metrics.reliability(chosen, rejected, temperature=temperature)],
        },
        "reward": asdict(summary),
        "length": asdict(metrics.length_report(chosen, rejected, lengths[0], lengths[1])),
        "by_category": _by([pair.category for pair in pairs], rewards),
        "by_source": _by([pair.source for pair in pairs], rewards),
    }
    return report  # noqa: RET504


def _by(keys: list[str | None], rewards: Rewards) -> dict[str, Any]:
    return {key: asdict(share) for key, share in metrics.accuracy_by(keys, rewards.chosen, rewards.rejected).items()}


def measured(rewards: Rewards, encoded: Sequence[EncodedPair], extra: dict[str, Any] | None = None) -> Measured:
    """What a checkpoint records of an evaluation."""
    report = {**full_report(rewards, encoded), **(extra or {})}
    return Measured(
        reward_mean=report["reward"]["mean"],
        reward_std=report["reward"]["std"],
        temperature=report["calibration"]["temperature"],
        num_eval=2 * len(encoded),
        metrics=report,
    )
