"""Rewards of evaluation pairs: of pairs in memory, and of files that pass through.

Invariant: every number of a report comes from one pair of columns (rewards of chosen and of rejected answers), and what
is held at a time does not grow with the files.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rm_core.checkpoint import CheckpointError
from rm_core.model import RewardModel
from rm_train import metrics
from rm_train.best_of import BestOf, ScoredBestOf, encode_best_of
from rm_train.encode import EncodedPair, encode_pairs
from rm_train.eval_table import EvalTable
from rm_train.pairs import Pair
from rm_train.scoring import chunks, need_heads, score_heads

_CHUNK = 2048
"""Rows held at a time: enough to find long shared prompts, some megabytes of tokens."""


@dataclass(frozen=True)
class Rewards:
    """Raw rewards, float64 [N] each, of N evaluation pairs."""

    chosen: np.ndarray
    rejected: np.ndarray
    heads: tuple[np.ndarray, np.ndarray] | None = None
    """Those of the single heads, [N, K] each, where there are several."""

    @property
    def num_not_finite(self) -> int:
        """How many are NaN or infinite: no report can be made of them."""
        return int((~np.isfinite(self.chosen)).sum() + (~np.isfinite(self.rejected)).sum())

    @classmethod
    def of_sides(cls, values: np.ndarray) -> "Rewards":
        """From [2N, 1 + K]: chosen and rejected in turn, the reward and behind it the single heads'."""
        values = values.astype(np.float64)
        heads = (values[0::2, 1:], values[1::2, 1:]) if values.shape[1] > 1 else None
        return cls(values[0::2, 0], values[1::2, 0], heads)

    @classmethod
    def interleave(cls, parts: Sequence["Rewards"]) -> "Rewards":
        """Put the shares of several processes together: process p scored pairs p, p + n, p + 2n, …"""

        def whole(columns: list[np.ndarray]) -> np.ndarray:
            found = np.zeros((sum(map(len, columns)), *columns[0].shape[1:]))
            for index, column in enumerate(columns):
                found[index :: len(columns)] = column
            return found

        heads = [part.heads for part in parts if part.heads is not None]
        return cls(
            whole([part.chosen for part in parts]),
            whole([part.rejected for part in parts]),
            (whole([chosen for chosen, _ in heads]), whole([rejected for _, rejected in heads])) if heads else None,
        )


def score_pairs(
    model: RewardModel,
    encoded: Sequence[EncodedPair],
    *,
    max_tokens: int,
    progress: Callable[[int], None] = lambda count: None,
) -> Rewards:
    """Score both answers of every pair. ``progress`` is called with numbers of finished sequences."""
    sequences = [ids for item in encoded for ids in (item.chosen, item.rejected)]
    scored, heads = score_heads(model, sequences, max_tokens=max_tokens, progress=progress)
    rewards = scored.astype(np.float64)
    both = None if heads is None else (heads[0::2].astype(np.float64), heads[1::2].astype(np.float64))
    return Rewards(rewards[0::2], rewards[1::2], both)


def quick_metrics(rewards: Rewards, encoded: Sequence[EncodedPair]) -> dict[str, float]:
    """What is logged during training; the loss counts soft labels and weights as training does, an accuracy rows."""
    labels = [1.0 if item.pair.label is None else item.pair.label for item in encoded]
    weights = [item.pair.weight for item in encoded]
    return {
        "loss": metrics.log_loss(rewards.chosen, rewards.rejected, labels=labels, weights=weights),
        "accuracy": metrics.accuracy(
            rewards.chosen, rewards.rejected, labels, [item.pair.row_part for item in encoded]
        ),
        "margin": float((rewards.chosen - rewards.rejected).mean()),
    }


@dataclass
class Evaluated:
    """The columns of the pairs and the scored best-of-N rows of an evaluation."""

    table: EvalTable
    max_length: int
    """Tokens to which both were cut."""
    conservative: float = 0.0
    """K, where the rewards are mean - K * std over the heads."""
    best_of: list[ScoredBestOf] = field(default_factory=list)

    @property
    def num_not_finite(self) -> int:
        """How many rewards are NaN or infinite."""
        columns = [self.table.chosen, self.table.rejected, *(row.rewards for row in self.best_of)]
        return sum(int((~np.isfinite(column)).sum()) for column in columns)


def length_limit(model: RewardModel, max_length: int | None = None) -> int:
    """Tokens to which an evaluation cuts: what is asked for, or as training did, or all that the model reads.

    Raises CheckpointError where more is asked for than the model reads.
    """
    if max_length is None:
        trained = model.record.training_length if model.record is not None else None
        return min(trained or model.max_length, model.max_length)
    if max_length > model.max_length:
        raise CheckpointError(f"{model.name}: reads at most {model.max_length} tokens; --max-length is {max_length}")
    return max_length


def evaluate_stream(
    model: RewardModel,
    items: Iterable[Pair | BestOf],
    *,
    max_tokens: int,
    max_length: int | None = None,
    conservative: float = 0.0,
    progress: Callable[[int], None] = lambda count: None,
) -> Evaluated:
    """Score rows as they come, a chunk at a time; of each only its numbers are kept.

    ``max_length`` is read by ``length_limit``; ``conservative`` K makes the reward mean - K * std over the heads.
    ``progress`` is called with the number of rows of each finished chunk or part of one. Raises DataError, and
    CheckpointError, also for K of a model with one head alone.
    """
    if conservative:
        need_heads(model)
    limit = length_limit(model, max_length)
    found = Evaluated(EvalTable(model.head_offsets, conservative), limit, conservative)
    for chunk in chunks(items, _CHUNK):
        pairs = [item for item in chunk if isinstance(item, Pair)]
        rows = [item for item in chunk if isinstance(item, BestOf)]
        encoded = encode_pairs(pairs, model.renderer, limit)
        answers = [encode_best_of(row, model.renderer, limit) for row in rows]
        sequences = [ids for item in encoded for ids in (item.chosen, item.rejected)]
        sequences += [ids for group, _ in answers for ids in group]
        advance = _in_rows(progress, len(sequences), len(chunk))
        scored, heads = score_heads(model, sequences, max_tokens=max_tokens, progress=advance)
        if heads is not None:
            scored = scored - conservative * heads.std(axis=1)
        rewards = scored.astype(np.float64)
        for index, item in enumerate(encoded):
            first, second = 2 * index, 2 * index + 1
            both = None if heads is None else (heads[first].astype(np.float64), heads[second].astype(np.float64))
            found.table.add(item, float(rewards[first]), float(rewards[second]), both)
        start = 2 * len(encoded)
        for row, (group, cut) in zip(rows, answers, strict=True):
            own = rewards[start : start + len(group)].copy()
            found.best_of.append(ScoredBestOf(own, row.num_right, row.subset, row.id, row.where, cut))
            start += len(group)
    return found


def _in_rows(progress: Callable[[int], None], num_sequences: int, num_rows: int) -> Callable[[int], None]:
    """Turn finished sequences into finished rows, which sum up to ``num_rows``."""
    done = reported = 0

    def advance(count: int) -> None:
        nonlocal done, reported
        done += count
        rows = done * num_rows // num_sequences
        progress(rows - reported)
        reported = rows

    return advance
