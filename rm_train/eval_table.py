"""What an evaluation keeps of each pair: a few numbers in columns, never its texts or tokens.

Invariant: a pair costs some eighty bytes, so that the pairs of a large set can pass through; the report is made from
the columns alone.
"""

from array import array
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from rm_core.checkpoint import Measured
from rm_core.reward_heads import offsets_of
from rm_train import metrics
from rm_train.baselines import answer_length
from rm_train.data import prompt_key
from rm_train.encode import EncodedPair

Floats = npt.NDArray[np.float64]


class _Labels:
    """A column of texts with few different values."""

    def __init__(self) -> None:
        self._codes = array("i")
        self._names: dict[str | None, int] = {}

    def add(self, value: str | None) -> None:
        self._codes.append(self._names.setdefault(value, len(self._names)))

    def values(self) -> list[str | None]:
        names = list(self._names)
        return [names[code] for code in self._codes]


class EvalTable:
    """Columns of evaluation pairs, in the order they were added."""

    def __init__(self, head_offsets: npt.NDArray[np.float32] | None = None, conservative: float = 0.0) -> None:
        """``head_offsets`` [K] were taken off the single heads' rewards that are added; None: nothing was.

        ``conservative`` times the heads' std was taken off the rewards.
        """
        self.truncated = 0
        self.conservative = conservative
        self._head_offsets = head_offsets
        self._head_sums: Floats | None = None
        self._prompts = array("Q")
        names = ("chosen", "rejected", "chosen_length", "rejected_length", "label", "weight", "row_part")
        self._numbers = {name: array("d") for name in names}
        self._spread = {name: array("d") for name in ("chosen", "rejected", "margin")}
        self._category, self._source = _Labels(), _Labels()

    def __len__(self) -> int:
        return len(self._prompts)

    def add(
        self,
        item: EncodedPair,
        chosen: float,
        rejected: float,
        heads: tuple[Floats, Floats] | None = None,
    ) -> None:
        """Keep the facts of one pair and its two rewards; ``heads`` are those of the single heads, [K] each."""
        pair = item.pair
        self.truncated += item.truncated
        self._prompts.append(int(prompt_key(pair)[:16], 16))
        label = 1.0 if pair.label is None else pair.label
        values = (chosen, rejected, *answer_length(pair), label, pair.weight, pair.row_part)
        for name, value in zip(self._numbers, values, strict=True):
            self._numbers[name].append(value)
        if heads is not None:
            for name, of_heads in zip(self._spread, (*heads, heads[0] - heads[1]), strict=True):
                self._spread[name].append(float(of_heads.std()))
            both = heads[0] + heads[1]
            self._head_sums = both if self._head_sums is None else self._head_sums + both
        self._category.add(pair.category)
        self._source.add(pair.source)

    @property
    def chosen(self) -> Floats:
        """Rewards of the chosen answers, [N]."""
        return np.array(self._numbers["chosen"])

    @property
    def rejected(self) -> Floats:
        """Rewards of the rejected answers, [N]."""
        return np.array(self._numbers["rejected"])

    @property
    def spread(self) -> tuple[Floats, Floats, Floats] | None:
        """Standard deviation over the heads of chosen reward, rejected reward and margin, [N] each; None with one."""
        chosen, rejected, margin = (np.array(column) for column in self._spread.values())
        return (chosen, rejected, margin) if len(margin) == len(self) > 0 else None

    @property
    def head_means(self) -> list[float] | None:
        """Mean raw reward of each single head, [K]; None with one."""
        if self._head_sums is None:
            return None
        means = self._head_sums / (2 * len(self))
        return [float(mean) for mean in (means if self._head_offsets is None else means + self._head_offsets)]

    @property
    def lengths(self) -> tuple[Floats, Floats]:
        """Characters of the chosen and of the rejected answers, [N] each."""
        return np.array(self._numbers["chosen_length"]), np.array(self._numbers["rejected_length"])

    @property
    def labels(self) -> Floats:
        """Shares of annotators that prefer the chosen answer, [N]."""
        return np.array(self._numbers["label"])

    @property
    def weights(self) -> Floats:
        """The pairs' weights in the log-loss, as in training's, [N]."""
        return np.array(self._numbers["weight"])

    @property
    def row_parts(self) -> Floats:
        """What the pairs count in an accuracy: those of one row are one together, [N]."""
        return np.array(self._numbers["row_part"])

    @property
    def prompts(self) -> list[str]:
        """A name of each pair's prompt, [N]."""
        return [f"{prompt:016x}" for prompt in self._prompts]

    @property
    def categories(self) -> list[str | None]:
        return self._category.values()

    @property
    def sources(self) -> list[str | None]:
        return self._source.values()


def table_of(
    encoded: Sequence[EncodedPair], chosen: Floats, rejected: Floats, heads: tuple[Floats, Floats] | None = None
) -> EvalTable:
    """The table of pairs that are all in memory; ``heads`` are the raw rewards of single heads, [N, K] each."""
    offsets = offsets_of(np.concatenate(heads).mean(axis=0).tolist()) if heads is not None else None
    if heads is not None and offsets is not None:
        heads = (heads[0] - offsets, heads[1] - offsets)
    table = EvalTable(offsets)
    for index, item in enumerate(encoded):
        both = None if heads is None else (heads[0][index], heads[1][index])
        table.add(item, float(chosen[index]), float(rejected[index]), both)
    return table


def full_report(table: EvalTable) -> dict[str, Any]:
    """Everything that ``rm-train eval`` prints and a checkpoint records, as plain JSON values.

    In an accuracy every row counts one, so that a K-wise row counts no more than a pair; ``accuracy_of_pairs`` alone
    counts every pair.
    """
    chosen, rejected = table.chosen, table.rejected
    long_chosen, long_rejected = table.lengths
    labels, weights, parts = table.labels, table.weights, table.row_parts
    temperature = metrics.fit_temperature(chosen, rejected, labels=labels, weights=weights)
    counted: dict[str, Any] = {"temperature": temperature, "labels": labels, "weights": weights}
    longer = metrics.accuracy(long_chosen, long_rejected, labels, parts)
    return {
        "pairs": len(table),
        "rows": round(float(parts.sum())),
        "truncated": table.truncated,
        "accuracy": asdict(metrics.accuracy_interval(chosen, rejected, table.prompts, labels, weights=parts)),
        "accuracy_of_pairs": metrics.accuracy(chosen, rejected, labels),
        "longer_wins": longer,
        "shorter_wins": 1.0 - longer,
        "log_loss": metrics.log_loss(chosen, rejected, labels=labels, weights=weights),
        "calibration": {
            "temperature": temperature,
            "log_loss": metrics.log_loss(chosen, rejected, **counted),
            "expected_error": metrics.expected_calibration_error(chosen, rejected, **counted),
            "reliability": [asdict(bin_) for bin_ in metrics.reliability(chosen, rejected, **counted)],
        },
        "reward": asdict(metrics.summarise(chosen, rejected)),
        "length": asdict(metrics.length_report(chosen, rejected, long_chosen, long_rejected, labels, weights=parts)),
        "by_category": _by(table.categories, table),
        "by_source": _by(table.sources, table),
        "by_length_difference": _by(_length_bands(long_chosen, long_rejected), table, ordered=False),
        **({} if table.spread is None else {"heads": _heads_report(table, *table.spread)}),
    }


def _heads_report(table: EvalTable, std_chosen: Floats, std_rejected: Floats, std_margin: Floats) -> dict[str, Any]:
    """What the heads' disagreement says: it should be larger, for its margin, where the model is wrong."""
    chosen, rejected, labels, parts = table.chosen, table.rejected, table.labels, table.row_parts
    right = metrics.correctness(chosen, rejected, labels)

    def mean(values: Floats) -> float | None:
        return float(values.mean()) if len(values) else None

    sure = np.abs(chosen - rejected) / np.maximum(std_margin, 1e-12)
    left = 1.0 - table.conservative  # of the one std that is to be taken off
    half = np.argsort(-sure, kind="stable")[: max(len(sure) // 2, 1)]
    return {
        "mean_std": float(np.concatenate([std_chosen, std_rejected]).mean()),
        "margin_std_right": mean(std_margin[right == 1]),
        "margin_std_wrong": mean(std_margin[right == 0]),
        "accuracy_of_surer_half": float(np.average(right[half], weights=parts[half])),
        "accuracy_mean_minus_std": metrics.accuracy(
            chosen - left * std_chosen, rejected - left * std_rejected, labels, parts
        ),
    }


def _by(keys: Sequence[str | None], table: EvalTable, *, ordered: bool = True) -> dict[str, Any]:
    shares = metrics.accuracy_by(keys, table.chosen, table.rejected, table.labels, table.row_parts)
    names = shares if ordered else [name for name in _BANDS if name in shares]
    return {key: asdict(shares[key]) for key in names}


_BANDS = ("chosen under half", "chosen shorter", "within 10 %", "chosen longer", "chosen over double")


def _length_bands(chosen: Floats, rejected: Floats) -> list[str | None]:
    """How the chosen answer's length compares with the rejected one's."""
    longer = np.maximum(chosen, rejected)
    near = np.abs(chosen - rejected) <= 0.1 * longer
    places = np.select([near, 2 * chosen < rejected, chosen < rejected, chosen > 2 * rejected], [2, 0, 1, 4], default=3)
    return [_BANDS[place] for place in places]


def measured(table: EvalTable, extra: dict[str, Any] | None = None) -> Measured:
    """What a checkpoint records of an evaluation."""
    report = {**full_report(table), **(extra or {})}
    return Measured(
        reward_mean=report["reward"]["mean"],
        reward_std=report["reward"]["std"],
        temperature=report["calibration"]["temperature"],
        num_eval=2 * len(table),
        metrics=report,
        head_means=table.head_means,
    )
