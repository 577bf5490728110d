"""``rm-train eval`` and ``rm-train compare``: models on the same data, as one report.

Invariant: the data pass through, model by model; what is compared are the same rows in the same order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Literal

import numpy as np

from rm_core.checkpoint import CheckpointError, conservative_reward_id
from rm_core.model import RewardModel
from rm_train.best_of import BestOf, best_of_report, scores_of
from rm_train.comparisons import compare_correctness, linear_map
from rm_train.config import Columns, SourceConfig, parse_source
from rm_train.console import ConsoleReporter
from rm_train.data import first_rows, read_items
from rm_train.eval_table import full_report
from rm_train.evaluation import Evaluated, evaluate_stream
from rm_train.metrics import correctness
from rm_train.pairs import Pair
from rm_train.rows import DataError
from rm_train.sources import count_rows, source_names

Dtype = Literal["auto", "float32", "bfloat16"]


def evaluate_data(
    model: RewardModel,
    data: Sequence[str],
    *,
    columns: Columns | None = None,
    max_tokens: int,
    max_length: int | None = None,
    conservative: float = 0.0,
    limit: int | None,
    reporter: ConsoleReporter,
) -> Evaluated:
    """Score every row of the sources, or the first ``limit`` pairs of each and read no further.

    ``columns`` maps our names to the rows', in all sources alike; ``max_length`` and ``conservative`` are those of
    ``evaluate_stream``. Raises DataError or CheckpointError.
    """
    sources = [SourceConfig.model_validate(parse_source(text)) for text in data]
    counts = [count_rows(source) for source in sources] if limit is None else [None]
    about = None if None in counts else sum(count for count in counts if count is not None)
    with reporter.count("scoring", about) as advance:
        found = evaluate_stream(
            model,
            _items(sources, columns, limit),
            max_tokens=max_tokens,
            max_length=max_length,
            conservative=conservative,
            progress=advance,
        )
    if not len(found.table) and not found.best_of:
        raise DataError(", ".join(data), "holds no pairs")
    if found.num_not_finite:
        number = 2 * len(found.table) + sum(len(row.rewards) for row in found.best_of)
        raise CheckpointError(f"{model.name}: {found.num_not_finite} of {number} rewards are NaN or infinite")
    return found


def _items(sources: Sequence[SourceConfig], columns: Columns | None, limit: int | None) -> Iterator[Pair | BestOf]:
    for source, name in zip(sources, source_names(sources), strict=True):
        yield from first_rows(read_items(source, columns, name=name), limit)


def report_of(model: RewardModel, found: Evaluated) -> dict[str, Any]:
    """The whole report of one model, as plain JSON values."""
    report: dict[str, Any] = {"reward_id": model.reward_id, "dtype": model.dtype, "max_length": found.max_length}
    if found.conservative:
        report["reward_id"] = conservative_reward_id(model.reward_id, found.conservative)
        report["conservative"] = found.conservative
    if len(found.table):
        report |= full_report(found.table)
    if found.best_of:
        report["best_of_n"] = best_of_report(found.best_of)
    return report


def compare(
    paths: Sequence[str],
    data: Sequence[str],
    *,
    dtype: Dtype,
    columns: Columns | None = None,
    max_tokens: int,
    max_length: int | None = None,
    limit: int | None,
    reporter: ConsoleReporter,
) -> dict[str, Any]:
    """Evaluate each model on the same rows and compare every later one with the first.

    Without ``max_length`` each one cuts where its own training did, so that its numbers are those of ``eval``.
    The result holds ``models`` (a report each) and ``comparisons``: paired difference of accuracy with interval and p
    value, the same for best-of-N, and scale and offset that map the first model's rewards onto the other's.
    """
    models: list[dict[str, Any]] = []
    found: list[Evaluated] = []
    for path in paths:
        model = RewardModel.load(path, dtype=dtype)
        reporter.say(f"{path}: {model.reward_id}, {model.dtype}")
        found.append(
            evaluate_data(
                model,
                data,
                columns=columns,
                max_tokens=max_tokens,
                max_length=max_length,
                limit=limit,
                reporter=reporter,
            )
        )
        models.append({"model": path, **report_of(model, found[-1])})
        del model  # before the next one is loaded
    comparisons = [
        {"old": paths[0], "new": path, **_compared(found[0], other)}
        for path, other in zip(paths[1:], found[1:], strict=True)
    ]
    return {"models": models, "comparisons": comparisons}


def _compared(old: Evaluated, new: Evaluated) -> dict[str, Any]:
    result: dict[str, Any] = {}
    if len(old.table):
        result["pairs"] = asdict(
            compare_correctness(
                correctness(old.table.chosen, old.table.rejected, old.table.labels),
                correctness(new.table.chosen, new.table.rejected, new.table.labels),
                old.table.prompts,
                weights=old.table.row_parts,
            )
        )
    if old.best_of:
        where = [row.where for row in old.best_of]
        result["best_of_n"] = asdict(compare_correctness(scores_of(old.best_of), scores_of(new.best_of), where))
    result["rewards"] = asdict(linear_map(_all_rewards(old), _all_rewards(new)))
    return result


def _all_rewards(found: Evaluated) -> np.ndarray:
    return np.concatenate([found.table.chosen, found.table.rejected, *(row.rewards for row in found.best_of)])
