"""What the data doctor found: as data, as JSON, as a table, as an exit code.

Invariant: JSON and table say the same; ``locations`` of a finding are complete, only examples are cut.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

Severity = Literal["error", "warning"]

KINDS: dict[str, tuple[Severity, str]] = {
    "broken": ("error", "the row cannot be read"),
    "identical": ("error", "chosen and rejected are the same text: nothing to learn, and a tie in every accuracy"),
    "empty": ("error", "an answer is empty or blank"),
    "leaked": ("error", "the prompt of an evaluation pair is also trained on (case and blanks aside)"),
    "template": ("error", "the pair cannot be rendered as a model will see it"),
    "double_bos": ("error", "two BOS tokens: the text already contains one"),
    "missing_end": ("error", "the rendered answer does not end in an end token"),
    "identical_ids": ("error", "the two answers differ, but render to the same tokens: a tie, and nothing to learn"),
    "contradictory": ("warning", "the same two answers to the same prompt were preferred the other way round earlier"),
    "duplicate": ("warning", "the same pair stood earlier"),
    "over_long": ("warning", "longer than the limit in tokens: training drops the left of its prompt"),
    "control_tokens": ("warning", "the text contains a control token of the tokenizer, which becomes that token"),
    "doubtful_label": ("warning", "the soft label prefers the other answer: the pair is read the other way round"),
}
"""Every kind of finding, in the order shown: how bad it is, and what it means."""


@dataclass(frozen=True, slots=True)
class Example:
    """One faulty pair."""

    where: str
    note: str
    """What exactly is wrong with it; empty when the finding says it all."""
    text: str
    """The beginning of its prompt."""


@dataclass(frozen=True, slots=True)
class Finding:
    """All pairs with one kind of fault."""

    kind: str
    severity: Severity
    meaning: str
    examples: tuple[Example, ...]
    """Every pair concerned, in order."""
    total: int
    """Pairs examined."""

    @property
    def count(self) -> int:
        """Pairs concerned."""
        return len(self.examples)

    @property
    def locations(self) -> list[str]:
        """``file:line`` of every pair concerned."""
        return [example.where for example in self.examples]


@dataclass(frozen=True, slots=True)
class LengthStatistics:
    """Lengths of answers (characters) or of prompt and answer (tokens). Quantiles are of each pair's longer side."""

    chosen_mean: float
    rejected_mean: float
    median: int
    p90: int
    p99: int
    longest: int


@dataclass(frozen=True)
class DoctorReport:
    """The whole examination. Printing it with rich shows a table."""

    train_pairs: int
    eval_pairs: int
    prompts: int
    """Distinct prompts."""
    tied_rows: int
    """K-wise rows that gave no pair because all their answers are tied."""
    max_length: int | None
    findings: tuple[Finding, ...]
    characters: LengthStatistics | None
    tokens: LengthStatistics | None
    """None when nothing was rendered."""
    longer_wins: float | None
    bag_of_words: float | None
    """Held-out accuracy; None when it was not asked for or the pairs are too few."""

    @property
    def shorter_wins(self) -> float | None:
        """Accuracy of calling the shorter answer better."""
        return None if self.longer_wins is None else 1.0 - self.longer_wins

    def finding(self, kind: str) -> Finding | None:
        """The finding of that kind, None when there is none."""
        return next((finding for finding in self.findings if finding.kind == kind), None)

    def to_json(self, *, examples: int = 5, text: bool = True) -> dict[str, Any]:
        """Plain values for ``json.dumps``. ``text=False`` leaves out every word of the data."""
        return {
            "train_pairs": self.train_pairs,
            "eval_pairs": self.eval_pairs,
            "prompts": self.prompts,
            "tied_rows": self.tied_rows,
            "max_length": self.max_length,
            "findings": [
                {
                    "kind": finding.kind,
                    "severity": finding.severity,
                    "meaning": finding.meaning,
                    "count": finding.count,
                    "total": finding.total,
                    "examples": [
                        {"where": example.where, "note": example.note, **({"text": example.text} if text else {})}
                        for example in finding.examples[:examples]
                    ],
                }
                for finding in self.findings
            ],
            "characters": None if self.characters is None else asdict(self.characters),
            "tokens": None if self.tokens is None else asdict(self.tokens),
            "longer_wins": self.longer_wins,
            "shorter_wins": self.shorter_wins,
            "bag_of_words": self.bag_of_words,
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(
            f"{self.train_pairs:,} training pairs"
            + (f", {self.eval_pairs:,} evaluation pairs" if self.eval_pairs else "")
            + f", {self.prompts:,} distinct prompts"
            + (f"; {self.tied_rows:,} K-wise rows without a winner left out" if self.tied_rows else "")
        )
        if self.findings:
            yield self._findings_table()
        else:
            yield Text("no faults found", style="green")
        yield self._numbers_table()

    def _findings_table(self) -> Table:
        table = Table(title="findings", title_justify="left")
        for name in ("kind", "pairs", "what it means", "first places"):
            table.add_column(name, justify="right" if name == "pairs" else "left", overflow="fold")
        for finding in self.findings:
            share = finding.count / max(finding.total, 1)
            places = [
                example.where + (f" ({example.note})" if example.note else "") for example in finding.examples[:3]
            ]
            table.add_row(
                Text(finding.kind, style="red" if finding.severity == "error" else "yellow"),
                f"{finding.count:,} ({share:.1%})",
                finding.meaning,
                Text("\n".join(places)),
            )
        return table

    def _numbers_table(self) -> Table:
        table = Table(title="numbers", title_justify="left", show_header=False)
        for row in self._numbers():
            table.add_row(*row)
        return table

    def _numbers(self) -> Iterator[tuple[str, str]]:
        for name, lengths in (("answer, characters", self.characters), ("prompt and answer, tokens", self.tokens)):
            if lengths is not None:
                yield (
                    name,
                    f"mean chosen {lengths.chosen_mean:,.0f}, rejected {lengths.rejected_mean:,.0f}; longer side: "
                    f"median {lengths.median:,}, 90 % {lengths.p90:,}, 99 % {lengths.p99:,}, "
                    f"longest {lengths.longest:,}",
                )
        if self.longer_wins is not None:
            yield "the longer wins", f"{self.longer_wins:.3f}"
            yield "the shorter wins", f"{1 - self.longer_wins:.3f}"
        if self.bag_of_words is not None:
            yield "bag of words, held out", f"{self.bag_of_words:.3f} (a reward model must beat these)"
