"""Best-of-N rows: one prompt, some right answers, some wrong ones (the form of RewardBench 2).

Invariant: a row is best-of-N when its ``chosen`` or ``rejected`` is a list of answers; anything else is a pair.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rm_core.chat import Renderer, RenderError
from rm_train.comparisons import BestOfPrompt, best_of_n, ties_score
from rm_train.config import Columns
from rm_train.metrics import Floats, mean_interval
from rm_train.row_reader import Content, RowReader, content_of, refuse_tools
from rm_train.rows import DataError, Row

_TIES = "ties"
"""The subset whose rows come in couples: one with a single right answer (id ``ref:n``), one with many (``tied:n``)."""


@dataclass(frozen=True, slots=True)
class BestOf:
    """One prompt with its answers, right ones first."""

    prompt: Content | None
    answers: tuple[Content, ...]
    num_right: int
    subset: str | None
    id: str | None
    where: str


@dataclass(frozen=True, slots=True)
class ScoredBestOf:
    """What is kept of a row once it is scored."""

    rewards: Floats
    num_right: int
    subset: str | None
    id: str | None
    where: str
    truncated: bool

    def as_prompt(self) -> BestOfPrompt:
        """In the form that the measures take."""
        return BestOfPrompt(self.rewards.tolist(), [index < self.num_right for index in range(len(self.rewards))])


def is_best_of(values: Mapping[str, Any], columns: Columns) -> bool:
    """Whether a row holds lists of answers. A list of messages (objects with a role) is one answer."""
    return any(_holds_answers(values.get(columns.get(name, name) or "")) for name in ("chosen", "rejected"))


def _holds_answers(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], str | list | tuple)


def read_best_of(row: Row, columns: Columns) -> BestOf:
    """Read one such row. Raises DataError."""
    reader = RowReader(row, columns)
    refuse_tools(reader)
    sides: list[list[Content]] = []
    for name in ("chosen", "rejected"):
        value = reader.need(name)
        one = not isinstance(value, list | tuple) or (value and isinstance(value[0], Mapping))  # text, or messages
        items = [value] if one else value
        found = [content_of(reader, f"{name}[{index}]", item) for index, item in enumerate(items)]
        if not found:
            raise reader.error(name, "needs at least one answer")
        sides.append(found)
    raw = reader.get("prompt")
    prompt = None if raw is None else content_of(reader, "prompt", raw, may_be_empty=True)
    answers = [*sides[0], *sides[1]]
    if len({isinstance(answer, str) for answer in answers}) > 1:
        raise reader.error("chosen", "mixes text and messages; one row must have one form")
    if isinstance(prompt, str) and not isinstance(answers[0], str):
        prompt = ({"role": "user", "content": prompt},)
    if isinstance(prompt, tuple) and isinstance(answers[0], str):
        answers = [({"role": "assistant", "content": str(answer)},) for answer in answers]
    subset = reader.text("category")
    if subset is None and isinstance(row.values.get("subset"), str):
        subset = row.values["subset"]
    return BestOf(prompt or None, tuple(answers), len(sides[0]), subset, reader.text("id"), reader.where)


def encode_best_of(row: BestOf, renderer: Renderer, max_length: int) -> tuple[list[list[int]], bool]:
    """Ids of every answer, cut like pairs, and whether any was. Raises DataError."""
    encoded, truncated = [], False
    for answer in row.answers:
        try:
            ids, _, cut = renderer.render_pair(row.prompt, answer, answer, max_length=max_length)
        except RenderError as error:
            raise DataError(row.where, str(error)) from None
        encoded.append(ids)
        truncated |= cut
    return encoded, truncated


def scores_of(rows: Sequence[ScoredBestOf]) -> Floats:
    """1 where a right answer alone has the highest reward, a share where several do, else 0. [N]"""
    return np.array(best_of_n([row.as_prompt() for row in rows]))


def best_of_report(rows: Sequence[ScoredBestOf]) -> dict[str, Any]:
    """Accuracy over prompts with interval, by subset, and the mean over subsets (RewardBench 2's headline).

    The subset Ties is scored by ``ties_score`` and stands apart from the accuracy over prompts. Raises DataError where
    its couples are not whole.
    """
    ties = [row for row in rows if (row.subset or "").lower() == _TIES]
    plain = [row for row in rows if (row.subset or "").lower() != _TIES]
    report: dict[str, Any] = {"prompts": len(rows), "truncated": sum(row.truncated for row in rows)}
    subsets: dict[str, dict[str, Any]] = {}
    if plain:
        scores = scores_of(plain)
        report["accuracy"] = asdict(mean_interval(scores, [row.where for row in plain]))
        groups: dict[str, list[float]] = defaultdict(list)
        for row, score in zip(plain, scores.tolist(), strict=True):
            groups[row.subset or "(none)"].append(score)
        subsets = {name: {"score": float(np.mean(found)), "prompts": len(found)} for name, found in groups.items()}
    if ties:
        subsets["Ties"] = {"score": _score_ties(ties), "prompts": len(ties)}
    report["by_subset"] = dict(sorted(subsets.items()))
    report["mean_of_subsets"] = float(np.mean([subset["score"] for subset in subsets.values()]))
    return report


def _score_ties(rows: Sequence[ScoredBestOf]) -> float:
    couples: dict[str, dict[str, BestOfPrompt]] = defaultdict(dict)
    for row in rows:
        kind, colon, number = (row.id or "").partition(":")
        if kind not in ("ref", "tied") or not colon:
            raise DataError(row.where, f"id: a row of the subset Ties is called ref:N or tied:N, not {row.id!r}")
        couples[number][kind] = row.as_prompt()
    for number, couple in couples.items():
        if len(couple) != 2:
            raise DataError(rows[0].where, f"id: of the Ties question {number} there is only {min(couple)}:{number}")
    return ties_score([couple["ref"] for couple in couples.values()], [couple["tied"] for couple in couples.values()])
